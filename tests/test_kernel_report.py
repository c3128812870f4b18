"""Resident waves by each limit, and what a report says of its instructions."""

from __future__ import annotations

import pytest

from rmsnorm_raw.backends.kernel_report import CU_BYTES_WANTED, KernelReport, Occupancy
from rmsnorm_raw.errors import InvalidInput

ASM = (
    (0, "global_load_dwordx4 v[0:3], v[4:5], off"),
    (8, "s_waitcnt vmcnt(0)"),
    (12, "s_endpgm"),
)


def report(
    arch: str = "gfx950",
    vgpr: int = 32,
    sgpr: int = 32,
    lds_bytes: int = 0,
    bound: int = 1024,
    asm: tuple[tuple[int, str], ...] = ASM,
) -> KernelReport:
    metadata = {
        ".name": "k", ".vgpr_count": str(vgpr), ".agpr_count": "0", ".sgpr_count": str(sgpr),
        ".vgpr_spill_count": "0", ".sgpr_spill_count": "0", ".private_segment_fixed_size": "0",
        ".group_segment_fixed_size": str(lds_bytes), ".max_flat_workgroup_size": str(bound),
        ".wavefront_size": "64", ".kernarg_segment_size": "64",
    }  # fmt: skip
    return KernelReport.read(arch, metadata, asm)


# the steps that LLVM's Occupancy remark shows for gfx90a and later
@pytest.mark.parametrize(
    ("vgpr", "waves"),
    [(1, 8), (64, 8), (65, 7), (72, 7), (80, 6), (96, 5), (128, 4), (168, 3), (256, 2), (257, 1)],
)
def test_waves_by_vector_registers(vgpr: int, waves: int) -> None:
    limit = "hardware" if waves == 8 else "registers"
    assert report(vgpr=vgpr).occupancy(256) == Occupancy(waves, limit)


def test_waves_by_scalar_registers() -> None:
    assert report(sgpr=100).occupancy(256) == Occupancy(8, "hardware")
    assert report(sgpr=102).occupancy(256) == Occupancy(7, "registers")


def test_waves_by_lds_in_its_granules() -> None:
    # 32 KiB take 26 granules of 1280 bytes: four blocks of gfx950's 160 KiB and not five
    assert report().occupancy(256, 32768) == Occupancy(4, "LDS")
    assert report(lds_bytes=16384).occupancy(256, 16384) == Occupancy(4, "LDS")
    assert report("gfx942").occupancy(256, 32768) == Occupancy(2, "LDS")
    assert report().occupancy(64, 20480) == Occupancy(2, "LDS")
    assert report().occupancy(256, 20480) == Occupancy(8, "hardware")


def test_a_second_block_that_does_not_fit_whole() -> None:
    # registers allow seven waves a SIMD, 28 a CU; a block of 1024 threads has 16
    assert report(vgpr=72).occupancy(1024) == Occupancy(4, "block size")
    assert report().occupancy(384) == Occupancy(7.5, "block size")


def test_a_launch_that_would_fail() -> None:
    with pytest.raises(InvalidInput, match="at most 256 threads"):
        report(bound=256).occupancy(512)
    with pytest.raises(InvalidInput, match="65536 bytes"):
        report("gfx942").occupancy(256, 65537)


def test_a_report_sums_up_its_instructions() -> None:
    kernel = report()
    assert kernel.mix == {"global load 16 B": 1, "wait": 1, "scalar": 1}
    assert kernel.row_loop() == ()
    assert [wait.instruction.vmcnt for wait in kernel.row_waits()] == [0]
    assert kernel.bytes_before_first_wait == 16


def test_waves_by_the_grid() -> None:
    # 256 CUs: 300 blocks put two on the fullest, 1 leaves the others empty
    assert report().occupancy(256, grid=300) == Occupancy(2, "grid")
    assert report().occupancy(256, grid=1) == Occupancy(1, "grid")
    assert report().occupancy(64, grid=1) == Occupancy(0.25, "grid")
    assert report().occupancy(256, grid=8 * 256) == Occupancy(8, "hardware")
    assert report().occupancy(256, 32768, grid=5 * 256) == Occupancy(4, "LDS")
    assert report("gfx942").occupancy(256, grid=304) == Occupancy(1, "grid")


def test_a_launch_report_says_what_the_launch_adds() -> None:
    kernel = report(vgpr=128, lds_bytes=256)
    taken = kernel.launched(grid=65536, block=256, dynamic_lds_bytes=4096)
    assert (taken.registers, taken.lds_bytes, taken.dynamic_lds_bytes) == (128, 256, 4096)
    assert (taken.waves_per_simd, taken.limit) == (4, "registers")
    assert taken.bytes_before_first_wait == 16
    assert taken.cu_bytes_before_first_wait == 4 * 256 * 16
    assert taken.mix == kernel.mix
    assert taken.waits == kernel.row_waits()
    assert kernel.launched(grid=1, block=64).cu_bytes_before_first_wait == 64 * 16


def test_a_launch_report_says_what_is_in_flight_and_what_is_wanted() -> None:
    more = report(vgpr=64, asm=(*((8 * i, ASM[0][1]) for i in range(2)), (16, ASM[1][1])))
    taken = more.launched(grid=65536, block=256)
    assert taken.in_flight == (
        "8 waves per SIMD x 256 lanes x 32 bytes a lane = 64 KiB a CU before the first wait that "
        "needs them (48 KiB keep memory busy)"
    )
    assert more.launched(grid=6 * 256, block=256).cu_bytes_before_first_wait == CU_BYTES_WANTED


def test_a_listing_marks_the_row_loop() -> None:
    loop = (
        *ASM[:2],
        (12, "global_store_dwordx4 v[4:5], v[0:3], off"),
        (20, "s_cbranch_scc1 65530"),
    )
    assert report(asm=(*loop, (24, "s_endpgm"))).listing.splitlines() == [
        "|     0  global_load_dwordx4 v[0:3], v[4:5], off",
        "|     8  s_waitcnt vmcnt(0)",
        "|     c  global_store_dwordx4 v[4:5], v[0:3], off",
        "|    14  s_cbranch_scc1 65530",
        "     18  s_endpgm",
    ]

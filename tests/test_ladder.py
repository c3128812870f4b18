"""The ladder: where rows are shared and programs paced, and where neither can be."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN, SIMULATED, DeviceSpec
from rmsnorm_raw.dtypes import DTYPE_BYTES
from rmsnorm_raw.ladder import PACED_BYTES, default_config
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.space import grid_programs, reject_reason

GFX950, GFX942, SM_90 = (KNOWN[arch] for arch in ("gfx950", "gfx942", "sm_90"))
ROWS = (1, 3, 132, 133, 529, 4096, 32768, 1 << 20)
WIDTHS = (1, 7, 256, 769, 1024, 3000, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1 << 20)


def problems(op: str) -> list[Problem]:
    make = getattr(Problem, op)
    return [
        make(rows, cols, x, weight_dtype=w)
        for rows, cols, (x, w) in itertools.product(
            ROWS, WIDTHS, [("bf16", "bf16"), ("fp16", "fp32"), ("fp32", "fp32"), ("bf16", None)]
        )
    ]


# ---- sm_90: rows of several blocks ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "slug"),
    [
        # two, four and eight blocks of 128 threads, 64 bytes a lane
        (32768, 8192, "bf16", "b128-t256-v16-reg-lk-m1"),
        (8192, 16384, "bf16", "b128-t512-v16-reg-lk"),
        (4096, 32768, "bf16", "b128-t1024-v16-reg-lk"),
        (8192, 8192, "fp32", "b128-t512-v16-reg-lk"),
        # few rows: half of that a lane, and the weight asked for with the row
        (1, 16384, "bf16", "b128-t1024-v16-reg-lk-m1"),
        (8, 8192, "bf16", "b128-t512-v16-reg-lk-m1"),
        (1, 32768, "bf16", "b128-t1024-v16-reg-lk-m1"),
        # wider than eight of those: 256 threads
        (4096, 65536, "bf16", "b256-t512-v16-reg-lk-ss"),
        (2048, 131072, "bf16", "b256-t1024-v16-reg-lk-ss"),
        (1024, 262144, "bf16", "b256-t2048-v16-reg-lk-ss"),
        (8, 262144, "bf16", "b256-t2048-v16-reg-lk-m1"),
        # and what one block does as well or better
        (32768, 4096, "bf16", "b256-t256-v16-reg-lk"),
        (32768, 2048, "bf16", "b128-t128-v16-reg-lk-m1"),
        (32768, 1 << 20, "bf16", "b1024-t1024-v16-2p-ss"),
    ],
)
def test_wide_rows_are_shared_on_sm_90(rows: int, cols: int, dtype: str, slug: str) -> None:
    assert default_config(Problem.forward(rows, cols, dtype), SM_90) == Config.parse(slug)


def test_a_wide_weight_keeps_a_row_of_32_kib_in_one_block() -> None:
    for cols in (8192, 16384):
        wide = Problem.forward(32768, cols, "bf16", weight_dtype="fp32")
        assert default_config(wide, SM_90) == Config.parse("b256-t256-v16-reg-lk")
        few = replace(wide, rows=8)
        assert default_config(few, SM_90).blocks_per_row > 1


def test_no_shared_row_has_a_block_with_nothing_to_do() -> None:
    """Nor is a row shared that a block of 256 threads keeps in two vectors a lane."""
    shared = 0
    for problem in problems("forward"):
        config = default_config(problem, SM_90)
        vectors = problem.cols * problem.element_bytes // 16
        if config.blocks_per_row > 1:
            shared += 1
            assert vectors > (config.blocks_per_row - 1) * config.block
            assert vectors > 512
            assert config.vec == 16
            assert config.path == "registers"
    assert shared > 50


@pytest.mark.parametrize(("cols", "alignment"), [(8193, 16), (8196, 16), (65537, 16), (16384, 8)])
def test_rows_of_narrow_vectors_are_not_shared_on_sm_90(cols: int, alignment: int) -> None:
    for rows in (1, 8, 4096):
        if cols == 65537 and rows < 4096:
            continue  # few of them are
        problem = Problem.forward(rows, cols, "bf16", alignment=alignment)
        config = default_config(problem, SM_90)
        assert config.blocks_per_row == 1
        assert config.vec == problem.widest_vec < 16


@pytest.mark.parametrize(
    ("rows", "cols", "alignment"),
    [(1, 65540, 16), (4096, 65540, 16), (4096, 65536, 8), (8, 65537, 16), (8, 32770, 16)],
)
def test_wide_rows_are_shared_whatever_their_vectors(rows: int, cols: int, alignment: int) -> None:
    config = default_config(Problem.forward(rows, cols, "bf16", alignment=alignment), SM_90)
    assert config.blocks_per_row > 1
    assert config.vec < 16


def test_what_is_wide_goes_by_bytes_on_amd() -> None:
    narrow = [Problem.forward(1, cols, "bf16") for cols in (4094, 4097, 8194, 16385)]
    assert all(default_config(problem, GFX950).blocks_per_row == 1 for problem in narrow)
    assert default_config(Problem.forward(1, 32770, "bf16"), GFX950).blocks_per_row == 8


def test_other_cuda_devices_share_no_rows() -> None:
    old = replace(SM_90, arch="sm_80")
    for problem in problems("forward"):
        assert default_config(problem, old).blocks_per_row == 1


# ---- sm_90: paced rings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "slug"),
    [
        (32768, 8192, "bf16", "b512-t512-v16-lds3bp-lk-ss-p1-fe"),
        (32768, 4096, "bf16", "b512-t256-v16-lds3bp-lk-ss-p1-fe"),
        (32768, 8192, "fp32", "b1024-t1024-v16-lds3bp-lk-ss-p1-fe"),
        (8192, 16384, "bf16", "b512-t512-v16-lds3brp-lk-ss-p1-fe"),
        (32768, 28672, "bf16", "b512-t512-v16-lds2brp-lk-ss-p1-fe"),
        (4096, 8192, "bf16", "b512-t512-v16-lds3b-lk-ss-p1-fe"),  # half a MiB a program
        (2048, 28672, "bf16", "b512-t512-v16-lds2brp-lk-ss-p1-fe"),
        (512, 4096, "bf16", "b512-t256-v16-lds2b-lk-ss-p1"),  # the finish is not early
        (32768, 256, "bf16", "b128-t32-v16-lds2b-lk-ss-p8-fe"),  # many programs
        (100, 8192, "bf16", "b512-t512-v16-reg-p1"),  # no second row
    ],
)
def test_long_backward_problems_are_paced_on_sm_90(
    rows: int, cols: int, dtype: str, slug: str
) -> None:
    assert default_config(Problem.backward(rows, cols, dtype), SM_90) == Config.parse(slug)


def test_programs_are_paced_from_768_kib_of_a_tensor_on() -> None:
    for cols in (4096, 8192, 16384, 28672):
        rows = -(-PACED_BYTES * 132 // (2 * cols))
        for more in (-1, 0):
            config = default_config(Problem.backward(rows + more, cols, "bf16"), SM_90)
            assert config.paced == (more == 0), (cols, config)


def test_what_is_paced_is_one_program_of_bulk_copies_with_steps_enough() -> None:
    paced = 0
    for problem in problems("backward"):
        config = default_config(problem, SM_90)
        assert config.bulk == (config.path == "lds")
        if config.paced:
            paced += 1
            assert config.bulk
            assert config.programs == 1
            assert grid_programs(problem, config, SM_90) == 132
            row_bytes = problem.cols * problem.element_bytes
            assert problem.rows * row_bytes >= 132 * PACED_BYTES
    assert paced > 20


@pytest.mark.parametrize(("cols", "alignment"), [(4097, 16), (4100, 16), (4096, 8), (16384, 4)])
def test_rows_without_vectors_of_16_bytes_have_no_bulk_ring(cols: int, alignment: int) -> None:
    for rows in (1, 133, 4096, 32768):
        problem = Problem.backward(rows, cols, "bf16", alignment=alignment)
        config = default_config(problem, SM_90)
        assert not config.bulk
        assert not config.paced
        assert config.vec == problem.widest_vec < 16


# ---- AMD -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [GFX950, GFX942], ids=lambda it: it.arch)
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_amd_gets_no_knob_of_cuda(op: str, device: DeviceSpec) -> None:
    for problem in problems(op):
        config = default_config(problem, device)
        assert not config.bulk
        assert not config.paced
        assert config.min_blocks == 0
        assert "keep" not in (config.load_policy, config.store_policy)
        assert reject_reason(problem, device, config) is None


def test_amd_shares_rows_that_are_wide_and_very_few() -> None:
    for problem in problems("forward"):
        config = default_config(problem, GFX950)
        vectors = problem.cols * problem.element_bytes // problem.widest_vec
        shared = Config(block=256, threads_per_row=2048, vec=problem.widest_vec)
        wanted = problem.rows * 8 <= 256 and vectors >= 4096
        if wanted and reject_reason(problem, GFX950, shared) is None:
            assert config == shared
        else:
            assert config.blocks_per_row == 1


@pytest.mark.parametrize("device", [GFX950, GFX942], ids=lambda it: it.arch)
def test_dbias_alone_is_read_by_many_programs_on_amd(device: DeviceSpec) -> None:
    dbias = {"bias_dtype": "bf16", "need_dx": False}
    for rows, cols in itertools.product(ROWS[2:], (7, 769, 1000, 4096, 8192, 16384)):
        alone = Problem.backward(rows, cols, "bf16", need_dweight=False, **dbias)
        config = default_config(alone, device)
        assert config.path == "registers"
        if rows >= 32768:
            assert 768 <= config.programs * config.block <= 1024
        both = Problem.backward(rows, cols, "bf16", **dbias)
        plain = Problem.backward(rows, cols, "bf16", need_dx=False)
        assert default_config(both, device).path == default_config(plain, device).path


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_device_serves_every_width(dtype: str) -> None:
    for device, make in itertools.product(
        (*KNOWN.values(), *SIMULATED.values()), (Problem.forward, Problem.backward)
    ):
        for rows, cols in itertools.product((1, 5, 4096), WIDTHS):
            problem = make(rows, cols, dtype)
            config = default_config(problem, device)
            assert reject_reason(problem, device, config) is None

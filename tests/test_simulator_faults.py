"""Planted faults: each must be caught, with its line where it has one, and its repair must pass."""

from __future__ import annotations

import re

import numpy as np
import pytest
from simulated import PORTABLE, Defines, kernels, run, small

from rmsnorm_raw.backends.cpu import CpuBackend, Order
from rmsnorm_raw.errors import CompileError, SimulatorError
from rmsnorm_raw.source import Source

ORDERS: tuple[Order, ...] = ("forward", "reverse", "shuffle")
#: of a shuffle that puts the first and the last wave of a block in the middle
SEED = 16
THREADS = np.arange(256)


# ---- wrong values --------------------------------------------------------------------------------


def launch(source: Source, *args: np.ndarray | np.generic, order: Order, wave: int) -> np.ndarray:
    """What 256 threads write to their first argument."""
    out = np.zeros(256, np.float32)
    backend = CpuBackend(wave, order=order, seed=SEED)
    run(backend, source, out, *args, block=256, lds_bytes=1024)
    return out


PASS_ON = small(
    """
  float* lds = (float*)rr_sim_lds();
  lds[threadIdx.x] = threadIdx.x;
  if (barrier) __syncthreads();
  out[threadIdx.x] = lds[giver[threadIdx.x]];
""",
    "float* out, const int* giver, int barrier",
)


@pytest.mark.parametrize("wave", [64, 32])
@pytest.mark.parametrize(
    ("giver", "seen_in"),
    [
        (255 - THREADS, {"forward", "reverse", "shuffle"}),
        ((THREADS + 128) % 256, {"forward", "reverse", "shuffle"}),
        (THREADS & 63, {"reverse", "shuffle"}),
        (THREADS | 192, {"forward", "shuffle"}),
        (THREADS & ~1, {"reverse", "shuffle"}),
    ],
    ids=["mirror", "half a block away", "first wave", "last wave", "next lane"],
)
def test_a_missing_barrier_shows_in_some_order(
    giver: np.ndarray, seen_in: set[str], wave: int
) -> None:
    index = giver.astype(np.int32)
    for order in ORDERS:
        without = launch(PASS_ON, index, np.int32(0), order=order, wave=wave)
        assert np.isnan(without).any() == (order in seen_in)
        repaired = launch(PASS_ON, index, np.int32(1), order=order, wave=wave)
        np.testing.assert_array_equal(repaired, giver)


USE_AGAIN = small(
    """
  float* lds = (float*)rr_sim_lds();
  for (int i = 0; i < 3; ++i) {
    lds[threadIdx.x] = i;
    __syncthreads();
    out[threadIdx.x] += lds[giver[threadIdx.x]];
    if (barrier) __syncthreads();
  }
""",
    "float* out, const int* giver, int barrier",
)


@pytest.mark.parametrize(
    ("giver", "seen_in"),
    [(THREADS & 63, {"forward", "shuffle"}), (THREADS | 192, {"reverse", "shuffle"})],
    ids=["first wave", "last wave"],
)
def test_lds_written_again_while_others_still_read(giver: np.ndarray, seen_in: set[str]) -> None:
    index = giver.astype(np.int32)
    for order in ORDERS:
        without = launch(USE_AGAIN, index, np.int32(0), order=order, wave=64)
        assert (without != 0 + 1 + 2).any() == (order in seen_in)
        repaired = launch(USE_AGAIN, index, np.int32(1), order=order, wave=64)
        np.testing.assert_array_equal(repaired, 0 + 1 + 2)


def test_lds_that_nobody_wrote_reads_as_nan() -> None:
    source = small(
        """
  float* lds = (float*)rr_sim_lds();
  if (threadIdx.x < written) lds[threadIdx.x] = 1;
  __syncthreads();
  for (unsigned i = 0; i < read; ++i) out[threadIdx.x] += lds[i];
""",
        "float* out, unsigned written, unsigned read",
    )
    for written, read in ((255, 256), (256, 257)):  # the second reads past the end
        sums = launch(source, np.uint32(written), np.uint32(read), order="forward", wave=64)
        assert np.isnan(sums).all()
    np.testing.assert_array_equal(
        launch(source, np.uint32(256), np.uint32(256), order="forward", wave=64), 256
    )


def test_a_wave_width_taken_for_granted_gives_a_wrong_sum() -> None:
    source = small(
        """
  int v = 1;
  for (int m = 1; m < width; m *= 2) {
    int other = 0;
    for (int lane = 0; lane < 64; ++lane) {
      const int value = __builtin_amdgcn_readlane(v, lane);
      if (lane == (int)(threadIdx.x % 64 ^ m)) other = value;
    }
    v += other;
  }
  out[threadIdx.x] = v;
""",
        "float* out, int width",
    )
    for width in (32, 64):
        sums = launch(source, np.int32(width), order="forward", wave=64)
        np.testing.assert_array_equal(sums, width)


# ---- divergence ----------------------------------------------------------------------------------

SHUFFLE = {64: "__builtin_amdgcn_readlane(1, 3)", 32: "__shfl_xor_sync(0xffffffffu, 1, 3)"}
#: body, with MARK on the line to be named and OTHER on another, and what is said
DIVERGENCE = {
    "half a wave at a barrier": (
        "if (threadIdx.x < {wave} + 16)\n __syncthreads(); // MARK",
        "divergent barrier: 16 of {wave} lanes of wave 1 arrived, lane 16 has returned",
    ),
    "a wave misses a barrier": (
        "if (threadIdx.x / {wave} != 1)\n __syncthreads(); // MARK",
        "divergent barrier: {others} of {waves} waves arrived, wave 1 has returned",
    ),
    "the first wave misses a barrier": (
        "if (threadIdx.x >= {wave})\n __syncthreads(); // MARK",
        "divergent barrier: {others} of {waves} waves arrived, wave 0 has returned",
    ),
    "a thread returns before a barrier": (
        "if (threadIdx.x == 5) return;\n __syncthreads(); // MARK",
        "divergent barrier: {lanes} of {wave} lanes of wave 0 arrived, lane 5 has returned",
    ),
    "waves at different barriers": (
        "if (threadIdx.x < {wave})\n __syncthreads(); // MARK\nelse\n __syncthreads(); // OTHER",
        "divergent barrier: 1 of {waves} waves arrived, wave 1 is at the barrier of line {other}",
    ),
    "odd lanes at a wave operation": (
        "if (threadIdx.x & 1)\n out[threadIdx.x] = {shuffle}; // MARK",
        "divergent wave operation: {half} of {wave} lanes of wave 0 arrived, lane 0 has returned",
    ),
    "lanes at different wave operations": (
        "if (threadIdx.x & 1)\n out[threadIdx.x] = {shuffle}; // OTHER\n"
        "else\n out[threadIdx.x] = {shuffle}; // MARK",
        "divergent wave operation: {half} of {wave} lanes of wave 0 arrived, "
        "lane 1 is at the wave operation of line {other}",
    ),
    "a lane at a barrier, the others at a wave operation": (
        "if (threadIdx.x == 7)\n __syncthreads(); // OTHER\nout[threadIdx.x] = {shuffle}; // MARK",
        "divergent wave operation: {lanes} of {wave} lanes of wave 0 arrived, "
        "lane 7 is at the barrier of line {other}",
    ),
    "a barrier and a wave operation on one line": (
        "if (threadIdx.x == 7) __syncthreads(); else {shuffle}; // MARK OTHER",
        "divergent wave operation: {lanes} of {wave} lanes of wave 0 arrived, "
        "lane 7 is at the barrier of line {other}",
    ),
    "a wave at a barrier that others left for the next one": (
        "for (unsigned i = 0; i < 1 + threadIdx.x / {wave}; ++i)\n __syncthreads(); // MARK",
        "divergent barrier: {others} of {waves} waves arrived, wave 0 has returned",
    ),
}


def good_kernel_runs(backend: CpuBackend) -> bool:
    giver, out = (255 - THREADS).astype(np.int32), np.zeros(256, np.float32)
    run(backend, PASS_ON, out, giver, np.int32(1), block=256, lds_bytes=1024)
    return np.array_equal(out, giver)


def divergent_kernels(wave: int, defines: Defines = ()) -> Source:
    """One kernel for each case of DIVERGENCE: ``k0``, ``k1``, ..."""
    bodies = (body.format(wave=wave, shuffle=SHUFFLE[wave]) for body, _ in DIVERGENCE.values())
    return kernels({f"k{i}": body for i, body in enumerate(bodies)}, defines=defines)


def message_of(case: str, source: Source, wave: int) -> str:
    entry = f"k{list(DIVERGENCE).index(case)}"
    start = source.text[: source.text.index(f" {entry}(")].count("\n") + 1
    lines = source.text.split("\n")[start - 1 :]
    marked, other = (
        next((start + i for i, line in enumerate(lines) if mark in line), 0)
        for mark in ("MARK", "OTHER")
    )
    waves = 256 // wave
    said = DIVERGENCE[case][1].format(
        wave=wave, lanes=wave - 1, half=wave // 2, waves=waves, others=waves - 1, other=other
    )
    return f"small.hip:{marked}: {said} (kernel {entry}, block 0)"


@pytest.mark.parametrize("defines", [(), PORTABLE], ids=["assembly", "portable"])
@pytest.mark.parametrize("wave", [64, 32])
@pytest.mark.parametrize("case", DIVERGENCE)
def test_divergence_names_its_line(case: str, wave: int, defines: Defines) -> None:
    source, backend = divergent_kernels(wave, defines), CpuBackend(wave)
    entry = source.entry_points[list(DIVERGENCE).index(case)]
    message = re.escape(message_of(case, source, wave))
    with pytest.raises(SimulatorError, match=f"^{message}$"):
        run(backend, source, np.zeros(256, np.float32), entry=entry, grid=2, block=256)
    assert good_kernel_runs(backend)


@pytest.mark.parametrize("order", ["reverse", "shuffle"])
def test_divergence_is_seen_in_every_order(order: Order) -> None:
    source, backend = divergent_kernels(64), CpuBackend(64, order=order)
    for entry in source.entry_points:
        with pytest.raises(SimulatorError, match=r"^small\.hip:\d+: divergent (barrier|wave)"):
            run(backend, source, np.zeros(256, np.float32), entry=entry, block=256)


def test_a_fault_names_its_block() -> None:
    source = small("if (blockIdx.x == 2 && threadIdx.x < 8)\n __syncthreads();")
    with pytest.raises(SimulatorError, match=r"^small\.hip:3: .* \(kernel k, block 2\)$"):
        run(CpuBackend(64), source, np.zeros(1, np.float32), grid=4)


def test_threads_may_return_where_nobody_waits_for_them() -> None:
    source = small("__syncthreads();\nif (threadIdx.x % 3) return;\nout[threadIdx.x] = 1;")
    np.testing.assert_array_equal(launch(source, order="forward", wave=64), THREADS % 3 == 0)


# ---- lanes, addresses, guards --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wave", "body", "said"),
    [
        (64, "__builtin_amdgcn_readlane(1, 64);", "readlane of lane 64 in a wave of 64"),
        (64, "__builtin_amdgcn_readlane(1, -1);", "readlane of lane 4294967295 in a wave of 64"),
        (64, "__builtin_amdgcn_readlane(1, threadIdx.x);", "readlane of lane 0 here and of lane 1"),
        (32, "__shfl_xor_sync(0xffffffffu, 1, 32);", "shuffle from lane 32 in a wave of 32"),
        (32, "__shfl_xor_sync(0xffffu, 1, 1);", "shuffle with mask 0xffff: all 32 lanes take part"),
        (64, "float v[4]; rr_sim_load(v, out + 1, 16);", "misaligned access of 16 bytes: 4 past"),
        (64, "float v[2]; rr_sim_store(out + 3, v, 8);", "misaligned access of 8 bytes: 4 past"),
    ],
)
def test_lanes_and_addresses(wave: int, body: str, said: str) -> None:
    backend = CpuBackend(wave)
    address, owner = backend.allocate(256)
    with pytest.raises(SimulatorError, match=rf"^small\.hip:3: {said}.*\(kernel k, block 0\)$"):
        run(backend, small(f"\n{body}"), np.uint64(address))
    assert owner.nbytes == 256
    assert good_kernel_runs(backend)


@pytest.mark.parametrize("size_bytes", [2, 4, 8, 16])
def test_aligned_accesses_move_their_bytes(size_bytes: int) -> None:
    backend = CpuBackend(64)
    body = f"""
  char v[16], *mine = (char*)out + threadIdx.x * {size_bytes};
  rr_sim_load(v, mine, {size_bytes});
  rr_sim_store(mine + 64 * {size_bytes}, v, {size_bytes});
"""
    address, owner = backend.allocate(2 * 64 * size_bytes)
    owner[:] = np.random.default_rng(0).integers(0, 256, owner.size, np.uint8)
    run(backend, small(body), np.uint64(address))
    first, second = owner.reshape(2, -1)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("control", ["0x100", "0x130", "0x144", "0x150"])
def test_dpp_controls_that_there_are_not(control: str) -> None:
    body = f"out[0] = __builtin_amdgcn_update_dpp(0, 1, {control}, 0xf, 0xf, true);"
    with pytest.raises(CompileError, match="DPP control"):
        CpuBackend(64).compile(small(body))


@pytest.mark.parametrize(
    ("index", "lds_bytes"), [(512, 512), (1025, 1000), (-1, 64), (-4096, 64), (0, 0)]
)
def test_stores_outside_lds(index: int, lds_bytes: int) -> None:
    backend = CpuBackend(64)
    source = small(f"if (blockIdx.x == 1) rr_sim_lds()[{index}] = 1;")
    where = "before the start" if index < 0 else "past the end"
    said = f"small.hip: store {where} of LDS: at byte {index} of {lds_bytes} (kernel k, block 1)"
    with pytest.raises(SimulatorError, match=f"^{re.escape(said)}$"):
        run(backend, source, np.zeros(1, np.float32), grid=2, lds_bytes=lds_bytes)
    assert good_kernel_runs(backend)


@pytest.mark.parametrize(
    ("elements", "index"), [(64, 64), (64, -1), (63, 63), (1, 500), (0, 0), (64, -1000)]
)
def test_stores_outside_a_buffer(elements: int, index: int) -> None:
    backend = CpuBackend(64)
    address, owner = backend.allocate(4 * elements)
    neighbours = [backend.allocate(128) for _ in range(3)]
    source = small(f"if (threadIdx.x == 0) out[{index}] = 1;")
    said = f"store outside a buffer: at byte {4 * index} of {4 * elements} (kernel k)"
    with pytest.raises(SimulatorError, match=f"^{re.escape(said)}$"):
        run(backend, source, np.uint64(address))
    assert all((other == 0xFF).all() for _, other in neighbours)
    assert owner.nbytes == 4 * elements
    assert good_kernel_runs(backend)  # and the fault is not reported again


def test_guards_stand_while_a_view_lives_and_no_longer() -> None:
    backend = CpuBackend(64)
    address, owner = backend.allocate(256)
    view = owner.view(np.float32)[:3]
    del owner
    overrun = small("if (threadIdx.x == 0) out[64] = 1;")
    with pytest.raises(SimulatorError, match="at byte 256 of 256"):
        run(backend, overrun, np.uint64(address))
    assert view.size == 3
    big = np.zeros(128, np.float32)
    del view
    run(backend, overrun, big)  # somebody else's memory
    assert big[64] == 1


def test_a_buffer_read_past_its_end_is_nan() -> None:
    backend = CpuBackend(64)
    for kind in (np.float32, np.float16):
        address, owner = backend.allocate(256)
        owner[:] = 0
        out = np.zeros(64, np.float32)
        size = np.dtype(kind).itemsize
        read = "*(const float*)p" if size == 4 else "rr_sim_f16_value(*(const unsigned short*)p)"
        body = f"const char* p = in + 256 + {size} * threadIdx.x;\nout[threadIdx.x] = {read};"
        run(backend, small(body, "const char* in, float* out"), np.uint64(address), out)
        assert np.isnan(out).all()
        assert owner.size == 256

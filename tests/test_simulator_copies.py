"""Asynchronous copies to LDS: where they land, when, and what waits for them."""

from __future__ import annotations

import numpy as np
import pytest
from simulated import (
    AMD_BUFFER,
    AMD_COPY,
    GFX942,
    Defines,
    coded,
    compiler_name,
    run,
    small,
    words,
)

from rmsnorm_raw.backends.cpu import CpuBackend, Landing, Order
from rmsnorm_raw.backends.host_compiler import compilers

LANDINGS: tuple[Landing, ...] = ("issue", "wait")
ORDERS: tuple[Order, ...] = ("forward", "reverse", "shuffle")
LANES = np.arange(64)
NOTHING = 0xFFFFFFFF  # what LDS begins as

each_landing = pytest.mark.parametrize("landing", LANDINGS)
each_order = pytest.mark.parametrize("order", ORDERS)


# ---- AMD: one address for the wave ---------------------------------------------------------------

#: a lane of two waves copies `bytes` from the lane that mirrors it, and a block reads all of LDS
MIRROR = """
  const unsigned wave = threadIdx.x / 64, lane = threadIdx.x % 64;
  const unsigned base = wave * 64 * {bytes}, mirrored = (63 - lane) * {bytes};
  {buffer}
  {copy}(buffer, rr_sim_lds() + base, {bytes}, mirrored, base, 0, 0);
  rr_sim_wait_vmcnt(0);
  __syncthreads();
  unsigned* lds = (unsigned*)rr_sim_lds();
  for (unsigned i = threadIdx.x; i < 128 * {bytes} / 4; i += 128) out[i] = lds[i];
"""


@each_landing
@pytest.mark.parametrize("command", compilers(), ids=compiler_name)
@pytest.mark.parametrize(("size", "defines"), [(16, ()), (4, ()), (4, GFX942)])
def test_lanes_land_side_by_side_wherever_they_copy_from(
    size: int, defines: Defines, command: tuple[str, ...], landing: Landing
) -> None:
    given, out = coded(128, size // 4), words(128, size // 4)
    buffer = AMD_BUFFER.format(bytes="in_bytes")
    body = MIRROR.format(buffer=buffer, copy=AMD_COPY, bytes=size)
    source = small(body, "const unsigned* in, unsigned in_bytes, unsigned* out", defines)
    backend = CpuBackend(64, compiler=command, landing=landing)
    arguments = {"block": 128, "lds_bytes": 128 * size}
    run(backend, source, given, np.uint32(given.nbytes), out, **arguments)
    mirrored = given.reshape(2, 64, -1)[:, ::-1].reshape(128, -1)
    np.testing.assert_array_equal(out, mirrored)
    run(
        backend, source, given, np.uint32(70 * size), out, **arguments
    )  # 6 lanes of the second wave
    mirrored[64 : 128 - 6] = 0
    np.testing.assert_array_equal(out, mirrored)


def test_the_immediate_offset_moves_both_ends() -> None:
    body = f"""
  {AMD_BUFFER.format(bytes=512)}
  {AMD_COPY}(buffer, rr_sim_lds(), 4, threadIdx.x * 4, 0, 256, 0);
  rr_sim_wait_vmcnt(0);
  for (int i = threadIdx.x; i < 128; i += 64) out[i] = ((unsigned*)rr_sim_lds())[i];
"""
    given, out = coded(128), words(128)
    source = small(body, "const unsigned* in, unsigned* out")
    run(CpuBackend(64), source, given, out, lds_bytes=512)
    np.testing.assert_array_equal(out[:64], NOTHING)
    np.testing.assert_array_equal(out[64:], given[64:])


# ---- AMD: one count of operations ----------------------------------------------------------------

#: two copies, a store after each, loads around them; then the words that have landed
QUEUE = f"""
  {AMD_BUFFER.format(bytes=512)}
  unsigned lane = threadIdx.x, word;
  for (int i = 0; i < 2; ++i) {{
    {AMD_COPY}(buffer, rr_sim_lds() + 256 * i, 4, 256 * i + lane * 4, 0, 0, 0);
    rr_sim_load(&word, in + lane, 4);
    rr_sim_store(out + 64 * (2 + i) + lane, &word, 4);
    rr_sim_load(&word, in + lane, 4);
  }}
  rr_sim_wait_vmcnt(count);
  for (int i = 0; i < 2; ++i) out[64 * i + lane] = ((unsigned*)rr_sim_lds())[64 * i + lane];
  rr_sim_wait_vmcnt(0);
"""


@each_landing
@pytest.mark.parametrize("count", range(6))
def test_a_wait_leaves_the_youngest_copies_and_stores(count: int, landing: Landing) -> None:
    given, out = coded(128), words(4, 64)
    source = small(QUEUE, "const unsigned* in, unsigned* out, unsigned count")
    run(CpuBackend(64, landing=landing), source, given, out, np.uint32(count), lds_bytes=512)
    for copy, younger in ((0, 3), (1, 1)):
        landed = landing == "issue" or count <= younger
        expected = given.reshape(2, 64)[copy] if landed else np.full(64, NOTHING)
        np.testing.assert_array_equal(out[copy], expected)


def test_a_barrier_waits_for_no_copy_of_either_vendor() -> None:
    body = """
  {copy}
  __syncthreads();
  out[threadIdx.x] = ((unsigned*)rr_sim_lds())[threadIdx.x];
  {wait}
"""
    to = "rr_sim_lds() + threadIdx.x * 4"
    amd = (
        AMD_BUFFER.format(bytes=256)
        + f"{AMD_COPY}(buffer, rr_sim_lds(), 4, threadIdx.x * 4, 0, 0, 0);"
    )
    cuda = f"rr_sim_copy_async({to}, in + threadIdx.x, 4); rr_sim_commit_copies();"
    for wave, copy, wait in (
        (64, amd, "rr_sim_wait_vmcnt(0);"),
        (32, cuda, "rr_sim_wait_groups(0);"),
    ):
        source = small(body.format(copy=copy, wait=wait), "const unsigned* in, unsigned* out")
        for landing in LANDINGS:
            given, out = coded(64), words(64)
            run(CpuBackend(wave, landing=landing), source, given, out, lds_bytes=256)
            np.testing.assert_array_equal(out, given if landing == "issue" else NOTHING)


@each_order
def test_late_copies_of_a_wave_land_together(order: Order) -> None:
    """A lane sees none of its neighbours' before the wait of the wave, and all of them after it."""
    body = f"""
  {AMD_BUFFER.format(bytes=256)}
  volatile unsigned* lds = (volatile unsigned*)rr_sim_lds();
  {AMD_COPY}(buffer, rr_sim_lds(), 4, threadIdx.x * 4, 0, 0, 0);
  for (int i = 0; i < 64; ++i) out[threadIdx.x] += lds[i] == 1000 + i;
  rr_sim_wait_vmcnt(0);
  for (int i = 0; i < 64; ++i) out[64 + threadIdx.x] += lds[i] == 1000 + i;
"""
    given, out = coded(64), words(2, 64)
    source = small(body, "const unsigned* in, unsigned* out")
    run(CpuBackend(64, order=order), source, given, out, lds_bytes=256)
    np.testing.assert_array_equal(out, [[0] * 64, [64] * 64])


@each_landing
def test_a_late_copy_reads_its_source_when_it_lands(landing: Landing) -> None:
    body = f"""
  {AMD_BUFFER.format(bytes=256)}
  {AMD_COPY}(buffer, rr_sim_lds(), 4, threadIdx.x * 4, 0, 0, 0);
  in[threadIdx.x] = 7;
  rr_sim_wait_vmcnt(0);
  out[threadIdx.x] = ((unsigned*)rr_sim_lds())[threadIdx.x];
"""
    given, out = coded(64), words(64)
    run(
        CpuBackend(64, landing=landing),
        small(body, "unsigned* in, unsigned* out"),
        given,
        out,
        lds_bytes=256,
    )
    np.testing.assert_array_equal(out, 1000 + LANES if landing == "issue" else 7)


# ---- CUDA: groups of a thread --------------------------------------------------------------------


@each_landing
@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("groups", range(4))
def test_a_wait_leaves_the_youngest_groups_and_what_is_in_none(
    groups: int, size: int, landing: Landing
) -> None:
    body = f"""
  const unsigned at = threadIdx.x * {size};
  for (int i = 0; i < 3; ++i) {{
    rr_sim_copy_async(rr_sim_lds() + 64 * {size} * i + at, in + 64 * {size} * i + at, {size});
    if (i < 2) rr_sim_commit_copies();
  }}
  rr_sim_wait_groups(groups);
  for (int i = 0; i < 3; ++i)
    __builtin_memcpy(out + 64 * {size} * i + at, rr_sim_lds() + 64 * {size} * i + at, {size});
  rr_sim_commit_copies();
  rr_sim_wait_groups(0);
"""
    given, out = coded(3, 16 * size), words(3, 16 * size)
    source = small(body, "const char* in, char* out, unsigned groups")
    backend = CpuBackend(32, landing=landing)
    run(backend, source, given, out, np.uint32(groups), lds_bytes=given.nbytes)
    for i, landed in enumerate((groups < 2, groups < 1, False)):
        expected = given[i] if landed or landing == "issue" else np.full_like(given[i], NOTHING)
        np.testing.assert_array_equal(out[i], expected)


@each_order
@pytest.mark.parametrize("barrier", [False, True])
def test_a_thread_waits_for_its_own_copies_alone(order: Order, barrier: bool) -> None:
    body = f"""
  rr_sim_copy_async(rr_sim_lds() + 4 * threadIdx.x, in + threadIdx.x, 4);
  rr_sim_commit_copies();
  rr_sim_wait_groups(0);
  {"__syncthreads();" * barrier}
  for (int i = 0; i < 64; ++i) out[threadIdx.x] += ((unsigned*)rr_sim_lds())[i] == 1000 + i;
"""
    given, out = coded(64), words(64)
    source = small(body, "const unsigned* in, unsigned* out")
    run(CpuBackend(32, order=order), source, given, out, lds_bytes=256)
    everything = [64] * 64 if barrier else list(range(1, 65))
    np.testing.assert_array_equal(np.sort(out), everything)


# ---- CUDA: mbarriers and bulk copies -------------------------------------------------------------

#: three rows of 256 words, asked for by the last thread; every thread reads a word from each
BULK = """
  unsigned long long* barrier = (unsigned long long*)rr_sim_lds();
  unsigned* row = (unsigned*)(rr_sim_lds() + 16);
  if (threadIdx.x == 5) rr_sim_barrier_init(barrier, 1);
  __syncthreads();
  for (unsigned round = 0; round < 3; ++round) {
    if (threadIdx.x == 255) {
      rr_sim_barrier_expect(barrier, 1024);
      for (int half = 0; half < 256; half += 128)
        rr_sim_copy_bulk((char*)(row + half), in + 256 * round + half, 512, barrier);
    }
    rr_sim_barrier_wait(barrier, round & 1);
    out[256 * round + threadIdx.x] = row[255 - threadIdx.x];
    __syncthreads();
  }
"""


@each_order
@each_landing
@pytest.mark.parametrize("command", compilers(), ids=compiler_name)
def test_phases_of_an_mbarrier(landing: Landing, order: Order, command: tuple[str, ...]) -> None:
    given, out = coded(3, 256), words(3, 256)
    backend = CpuBackend(32, order=order, landing=landing, compiler=command)
    source = small(BULK, "const unsigned* in, unsigned* out")
    run(backend, source, given, out, block=256, lds_bytes=16 + 1024)
    np.testing.assert_array_equal(out, given[:, ::-1])


@each_order
@each_landing
def test_waves_wait_for_each_other_in_a_chain(landing: Landing, order: Order) -> None:
    """A wave gets the word from the one before it: each pass of the scheduler helps one or more."""
    body = """
  unsigned long long* barriers = (unsigned long long*)rr_sim_lds();
  const unsigned wave = threadIdx.x / 32;
  char* mine = rr_sim_lds() + 64 + 16 * wave;
  if (threadIdx.x < 8) rr_sim_barrier_init(barriers + threadIdx.x, 1);
  __syncthreads();
  for (unsigned round = 0; round < 2; ++round) {
    if (wave) rr_sim_barrier_wait(barriers + wave - 1, round);
    if (threadIdx.x % 32 == 0) {
      rr_sim_barrier_expect(barriers + wave, 16);
      rr_sim_copy_bulk(mine, wave ? out + 4 * wave - 4 : in, 16, barriers + wave);
    }
    rr_sim_barrier_wait(barriers + wave, round);
    if (threadIdx.x % 32 == 0) out[4 * wave] = *(unsigned*)mine + 1;
    __syncthreads();
  }
"""
    given, out = coded(4), words(8, 4)
    backend = CpuBackend(32, order=order, landing=landing)
    source = small(body, "const unsigned* in, unsigned* out")
    run(backend, source, given, out, block=256, lds_bytes=64 + 8 * 16)
    assert out[0, 0] == 1001


@each_landing
def test_a_phase_wants_all_arrivals_and_all_bytes(landing: Landing) -> None:
    """Nothing lands while an arrival is missing, nor for a wait for the phase before."""
    body = """
  unsigned long long* barrier = (unsigned long long*)rr_sim_lds();
  volatile unsigned* row = (volatile unsigned*)(rr_sim_lds() + 16);
  if (threadIdx.x == 0) rr_sim_barrier_init(barrier, 2);
  __syncthreads();
  for (unsigned round = 0; round < 2; ++round, out += 4) {
    rr_sim_barrier_wait(barrier, round ^ 1);
    if (threadIdx.x == 0) {
      rr_sim_barrier_expect(barrier, 0);
      rr_sim_copy_bulk((char*)row, in + 4 * round, 16, barrier);
    }
    if (threadIdx.x >= 32) {
      out[0] = row[0];
      if (threadIdx.x == 63) rr_sim_barrier_expect(barrier, 16);
      if (late) rr_sim_barrier_wait(barrier, round ^ 1);
      out[1] = row[0];
    }
    rr_sim_barrier_wait(barrier, round);
    out[2] = row[0];
    __syncthreads();
  }
"""
    given, out = coded(8), words(2, 4)
    source = small(body, "const unsigned* in, unsigned* out, int late")
    late_copies = np.int32(landing == "wait")
    run(CpuBackend(32, landing=landing), source, given, out, late_copies, lds_bytes=32)
    early = [[1000, 1000, 1000], [1004, 1004, 1004]]
    late = [[NOTHING, NOTHING, 1000], [1000, 1000, 1004]]
    np.testing.assert_array_equal(out[:, :3], early if landing == "issue" else late)


@each_landing
def test_bulk_copies_land_by_their_mbarriers(landing: Landing) -> None:
    body = """
  unsigned long long* barriers = (unsigned long long*)rr_sim_lds();
  char* rows = rr_sim_lds() + 16;
  auto ask = [&](int row, int barrier) {
    rr_sim_barrier_expect(barriers + barrier, 16);
    rr_sim_copy_bulk(rows + 16 * row, in + 4 * row, 16, barriers + barrier);
  };
  auto look = [&] {
    for (int row = 0; row < 3; ++row) *out++ = *(volatile unsigned*)(rows + 16 * row);
  };
  if (threadIdx.x < 2) rr_sim_barrier_init(barriers + threadIdx.x, 1);
  __syncthreads();
  if (threadIdx.x == 0) ask(0, 0), ask(1, 1);
  rr_sim_barrier_wait(barriers + 1, 0);
  look();
  __syncthreads();
  if (threadIdx.x == 0) ask(2, 1);
  rr_sim_barrier_wait(barriers, 0);
  look();
  rr_sim_barrier_wait(barriers + 1, 1);
  look();
"""
    given, out = coded(12), words(3, 3)
    source = small(body, "const unsigned* in, unsigned* out")
    run(CpuBackend(32, landing=landing), source, given, out, block=32, lds_bytes=64)
    landed = np.array([[0, 1, 0], [1, 1, 0], [1, 1, 1]], bool)
    if landing == "issue":
        landed[1, 2] = landed[0, 0] = True
    np.testing.assert_array_equal(out, np.where(landed, [1000, 1004, 1008], NOTHING))


def test_places_in_the_queues_are_used_again() -> None:
    body = f"""
  {AMD_BUFFER.format(bytes=256)}
  for (int i = 0; i < 1025; ++i) {{
    {AMD_COPY}(buffer, rr_sim_lds(), 4, threadIdx.x * 4, 0, 0, 0);
    rr_sim_wait_vmcnt(1);
  }}
  rr_sim_wait_vmcnt(0);
"""
    run(CpuBackend(64), small(body, "const unsigned* in"), coded(64), lds_bytes=256)

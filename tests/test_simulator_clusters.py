"""Clusters: blocks that run together, meet at a barrier and store into each other's LDS."""

from __future__ import annotations

import re

import numpy as np
import pytest
from simulated import PORTABLE, Defines, coded, each_compiler, run, small, words

from rmsnorm_raw.backends.cpu import CpuBackend, Order
from rmsnorm_raw.errors import CompileError, SimulatorError
from rmsnorm_raw.source import Source

ORDERS: tuple[Order, ...] = ("forward", "reverse", "shuffle")
BLOCKS = 4  # of a cluster
LDS_BYTES = 8 + 4 * BLOCKS

each_order = pytest.mark.parametrize("order", ORDERS)


def cluster(body: str, parameters: str, defines: Defines = (), blocks: int = BLOCKS) -> Source:
    """A kernel of clusters of so many blocks; its body begins on line 2."""
    return small(body, parameters, (("RR_ROW_BLOCKS", str(blocks)), *defines))


# ---- values --------------------------------------------------------------------------------------

MINE = """  unsigned long long* barrier = (unsigned long long*)rr_sim_lds();
  float* sums = (float*)(barrier + 1);
  const unsigned part = blockIdx.x % 4;
"""
#: `{early}` and `{late}`: where the bytes are announced, before others may store or perhaps after
EXCHANGE = (
    MINE
    + """
  if (threadIdx.x == 0) rr_sim_barrier_init(barrier, 1);
  for (unsigned round = 0; round < rounds; ++round) {{
    if (threadIdx.x == 0) {{ {early} }}
    rr_sim_arrive_at_cluster();
    const float value = in[blockIdx.x];
    rr_sim_wait_for_cluster();
    if (threadIdx.x < 4) rr_sim_store_to_block(sums + part, value, barrier, threadIdx.x);
    if (threadIdx.x == 0) {{ {late} }}
    rr_sim_barrier_wait(barrier, round & 1);
    for (unsigned i = 0; i < 4; ++i) out[4 * (blockIdx.x * {lanes} + threadIdx.x) + i] = sums[i];
    in += gridDim.x, out += 4 * gridDim.x * {lanes};
  }}
"""
)
EXPECT = "rr_sim_barrier_expect(barrier, 16);"
PARAMETERS = "const unsigned* in, float* out, unsigned rounds"


def check_exchange(backend: CpuBackend, source: Source, lanes: int, clusters: int) -> None:
    rounds = 3
    given, out = coded(rounds, clusters, BLOCKS), words(rounds, clusters, BLOCKS, lanes, BLOCKS)
    run(
        backend, source, given, out, np.uint32(rounds),
        grid=clusters * BLOCKS, block=lanes, lds_bytes=LDS_BYTES,
    )  # fmt: skip
    expected = given.astype(np.float32)[:, :, None, None, :]
    np.testing.assert_array_equal(out.view(np.float32), np.broadcast_to(expected, out.shape))


def exchange(lanes: int, early: str = "", late: str = "", defines: Defines = ()) -> Source:
    return cluster(EXCHANGE.format(lanes=lanes, early=early, late=late), PARAMETERS, defines)


@pytest.mark.parametrize("defines", [(), PORTABLE], ids=["assembly", "portable"])
@each_compiler
@each_order
def test_blocks_of_a_cluster_store_into_each_others_lds(
    order: Order, command: tuple[str, ...], defines: Defines
) -> None:
    backend = CpuBackend(32, order=order, compiler=command)
    check_exchange(backend, exchange(64, early=EXPECT, defines=defines), 64, clusters=3)


@each_order
@pytest.mark.parametrize("lanes", [32, 256])
def test_many_clusters_follow_each_other(lanes: int, order: Order) -> None:
    check_exchange(CpuBackend(32, order=order), exchange(lanes, early=EXPECT), lanes, clusters=25)


@each_order
def test_bytes_may_come_before_they_are_announced(order: Order) -> None:
    check_exchange(CpuBackend(32, order=order), exchange(64, late=EXPECT), 64, clusters=5)


@each_order
def test_a_block_that_has_returned_is_waited_for_no_more(order: Order) -> None:
    body = """
  if (blockIdx.x % 4 == leaves) return;
  rr_sim_arrive_at_cluster();
  rr_sim_wait_for_cluster();
  rr_sim_arrive_at_cluster();
  rr_sim_wait_for_cluster();
  if (threadIdx.x == 0) out[blockIdx.x] = 1;
"""
    source, backend = cluster(body, "unsigned* out, unsigned leaves"), CpuBackend(32, order=order)
    for leaves in range(BLOCKS + 1):
        out = words(2, BLOCKS)
        run(backend, source, out, np.uint32(leaves), grid=out.size)
        expected = np.arange(BLOCKS) != leaves
        np.testing.assert_array_equal(out, np.broadcast_to(expected, out.shape))


@each_order
def test_nobody_passes_the_barrier_before_all_are_there(order: Order) -> None:
    body = """
  if (threadIdx.x == 0) atomicAdd(there, 1u);
  rr_sim_arrive_at_cluster();
  if (threadIdx.x == 0) out[2 * blockIdx.x] = *there;
  rr_sim_wait_for_cluster();
  if (threadIdx.x == 0) out[2 * blockIdx.x + 1] = *there;
"""
    out = words(3, BLOCKS, 2)
    source = cluster(body, "unsigned* out, unsigned* there")
    run(CpuBackend(32, order=order), source, out, words(1), grid=3 * BLOCKS)
    np.testing.assert_array_equal(out[..., 0].ravel(), np.arange(1, 13))  # blocks start in turn
    np.testing.assert_array_equal(out[..., 1], np.array([4, 8, 12])[:, None].repeat(4, 1))


# ---- faults --------------------------------------------------------------------------------------

INIT = "if (threadIdx.x == 0) rr_sim_barrier_init(barrier, 1); "
MEET = "rr_sim_arrive_at_cluster(); rr_sim_wait_for_cluster(); "
TO = "rr_sim_store_to_block({place}, 1.0f, {barrier}, {rank});"


def to(place: str = "sums", barrier: str = "barrier", rank: str = "1") -> str:
    return TO.format(place=place, barrier=barrier, rank=rank)


#: what comes before, the line to be named, and what is said
FAULTS = {
    "a wait without an arrival": (
        "", "rr_sim_wait_for_cluster();",
        "lane 0 waits at its cluster's barrier and has not arrived there",
    ),
    "a wait of a lane that has not arrived": (
        "if (threadIdx.x != 5) rr_sim_arrive_at_cluster();", "rr_sim_wait_for_cluster();",
        "lane 5 waits at its cluster's barrier and has not arrived there",
    ),
    "a lane that has arrived twice": (
        "if (threadIdx.x == 5) rr_sim_arrive_at_cluster(); rr_sim_arrive_at_cluster();",
        "rr_sim_wait_for_cluster();",
        "lanes of a wave with different arrivals at the cluster's barrier",
    ),
    "part of a wave waits": (
        "rr_sim_arrive_at_cluster();", "if (threadIdx.x < 20) rr_sim_wait_for_cluster();",
        "divergent wave operation: 20 of 32 lanes of wave 0 arrived, lane 20 has returned",
    ),
    "a store into a block that may not run": (
        INIT + "rr_sim_arrive_at_cluster();", to(),
        "block 1 of the cluster may not run: wait for the cluster first",
    ),
    "a rank outside the cluster": (INIT + MEET, to(rank="4"), "block 4 of a cluster of 4"),
    "an mbarrier before its init": (
        MEET, to(), "mbarrier of block 1 of the cluster used before its init"
    ),
    "a value past the end of LDS": (
        INIT + MEET, to(place="sums + 4"), "4 bytes at byte 24 of LDS, which has 24"
    ),
    "a value before LDS": (
        INIT + MEET, to(place="sums - 3"), "4 bytes at byte -4 of LDS, which has 24"
    ),
    "an mbarrier past the end of LDS": (
        INIT + MEET, to(barrier="barrier + 3"), "8 bytes at byte 24 of LDS, which has 24"
    ),
    "a misaligned value": (
        INIT + MEET, to(place="(float*)((char*)sums + 2)"),
        "misaligned access of 4 bytes: 2 past a multiple of them",
    ),
    "a misaligned mbarrier": (
        INIT + MEET, to(barrier="(unsigned long long*)(sums + 1)"),
        "misaligned access of 8 bytes: 4 past a multiple of them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_names_its_line(case: str) -> None:
    before, line, said = FAULTS[case]
    body = f"{MINE.rstrip()} {before}\n  {line}"  # on lines 2 to 5
    backend = CpuBackend(32)
    message = rf"^small\.hip:5: {re.escape(said)} \(kernel k, block \d\)$"
    for _ in range(2):
        with pytest.raises(SimulatorError, match=message):
            run(backend, cluster(body, "float* out"), words(1), grid=4, lds_bytes=LDS_BYTES)
    check_exchange(backend, exchange(64, early=EXPECT), 64, clusters=2)


@each_order
def test_a_grid_is_whole_clusters(order: Order) -> None:
    source = cluster(MEET, "float* out")
    backend = CpuBackend(32, order=order)
    run(backend, source, words(1), grid=8)
    for grid in (1, 6):
        said = rf"^small\.hip:2: a grid of {grid} blocks is not whole clusters of 4 \(kernel k, "
        with pytest.raises(SimulatorError, match=said):
            run(backend, source, words(1), grid=grid)


@each_order
@pytest.mark.parametrize("silent", range(BLOCKS))
def test_a_wait_for_a_block_that_never_arrives(silent: int, order: Order) -> None:
    body = f"""{MINE}  {INIT}
  __syncthreads();
  if (part == silent) rr_sim_barrier_wait(barrier, 0);
  else {{
    {MEET}
  }}
"""
    said = (
        rf"^small\.hip:\d+: deadlock: no wave can go on \((block {silent} of the cluster has not "
        r"arrived at its barrier|missing at this mbarrier: arrivals 1, bytes 0)\) \(kernel k, "
    )
    source, backend = cluster(body, "unsigned silent"), CpuBackend(32, order=order)
    with pytest.raises(SimulatorError, match=said):
        run(backend, source, np.uint32(silent), grid=8, lds_bytes=LDS_BYTES)


@each_order
@pytest.mark.parametrize(
    ("announced", "missing"), [("20", "arrivals 0, bytes 4"), ("12", "arrivals 1, bytes -4")]
)
def test_a_wait_for_other_bytes_than_come(announced: str, missing: str, order: Order) -> None:
    """Where too few are announced, a second phase begins before the last store of the first."""
    body = f"""{MINE}  {INIT}
  if (threadIdx.x == 0) rr_sim_barrier_expect(barrier, {announced});
  {MEET}
  if (threadIdx.x < 4) rr_sim_store_to_block(sums + part, 1.0f, barrier, threadIdx.x);
  {MEET}
  rr_sim_barrier_wait(barrier, {announced} == 12);
"""
    said = re.escape(f"deadlock: no wave can go on (missing at this mbarrier: {missing})")
    with pytest.raises(SimulatorError, match=said):
        run(
            CpuBackend(32, order=order), cluster(body, "float* out"), words(1),
            grid=4, lds_bytes=LDS_BYTES,
        )  # fmt: skip


def test_amd_has_no_clusters() -> None:
    with pytest.raises(CompileError, match="rr_sim_arrive_at_cluster"):
        CpuBackend(64).compile(cluster(MEET, "float* out"))

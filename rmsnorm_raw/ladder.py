"""The ladder: the default config, a function of M, N, dtypes and device alone.

It reads from the config wanted to the one that always fits; the first that the space keeps is
taken. Each threshold has its reason and its figure beside it. Every AMD choice is unmeasured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rmsnorm_raw.config import Config, Policy
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.space import (
    MAX_ROWS_PER_BLOCK,
    covering_lanes,
    reject_reason,
    require_fit,
    row_vectors,
)


def default_config(problem: Problem, device: DeviceSpec) -> Config:
    """The analytical default: a function of M, N, dtypes and device alone.

    Raises:
        InvalidConfig: nothing fits; the message carries the reason for the last rung.
    """
    rungs = list(_rungs(problem, device))
    for config in rungs:
        if reject_reason(problem, device, config) is None:
            return config
    require_fit(problem, device, rungs[-1])
    raise AssertionError("unreachable: the last rung was refused above")


def _rungs(problem: Problem, device: DeviceSpec) -> Iterator[Config]:
    """Configs from the one wanted to the one that always fits."""
    rungs = _forward_rungs if problem.op == "forward" else _backward_rungs
    yield from rungs(problem, device)


def _forward_rungs(problem: Problem, device: DeviceSpec) -> Iterator[Config]:
    """One block a row group, rows in registers.

    Figures: an H200, 2026-11, cold, bf16. The same shapes serve AMD (aiter and quack-FlyDSL have
    256 lanes with 16 to 32 elements each on MI355X); there they are unmeasured.
    """
    vec, vectors = problem.widest_vec, row_vectors(problem)
    # Few rows leave the device empty: a row takes every lane it can use. Else a lane keeps 32 bytes
    # of a narrow row and 64 of a wide one: 253 us at 32768x8192, 35.3 us at 32768x1024.
    few_rows = problem.rows <= device.compute_units
    per_lane = 1 if few_rows else 2 if vectors * vec <= 8192 else 4
    # Blocks of 256 threads: at 32768x1024 128 take 36.9 us, for 16 blocks of a multiprocessor do
    # not fill its 2048 threads.
    least = 64 if few_rows else 256
    # Rows are kept in L2: 262 -> 253 us at 32768x8192, 16.6 -> 16.2 us at 4096x3000; streamed 278.
    load: Policy = "keep" if device.dialect == "cuda" else "default"
    for row in _lane_counts(covering_lanes(vectors, per_lane, device)):
        block = _block(row, least)
        yield Config(block=block, threads_per_row=row, vec=vec, load_policy=load)
    # A row too wide to keep is read twice, without a policy: 574 us at 8192x65536, 682 kept.
    yield Config(block=1024, vec=vec, path="two_pass")


def _backward_rungs(problem: Problem, device: DeviceSpec) -> Iterator[Config]:
    """A persistent grid of 512 threads a compute unit, the next rows on their way.

    Figures: an H200, 2026-11, cold, bf16, dW finished.
    """
    vec, vectors = problem.widest_vec, row_vectors(problem)
    base = Config(vec=vec)
    if problem.rows <= device.compute_units:
        # No program has a second row: there is nothing to overlap. A lone row finishes dW itself,
        # 4.4 us instead of 8.1 at 1x4096.
        lone = problem.need_dweight and problem.rows == 1
        base = replace(base, finish="last_block" if lone else "kernel")
    elif device.arch == "sm_90" and vectors > 1024:
        # Such rows fill the ring too soon: 762 us from registers at 32768x8192 fp32, 787 by a ring.
        base = replace(base, load_policy="keep", store_policy="stream")
    elif device.arch == "sm_90":
        # Bulk copies into a ring of three rows, loads kept and stores streamed: at 32768x8192 381
        # us, against 384 by lanes, 417 ping-pong, 506 from registers; at 32768x1024 56, 58, 61, 72.
        base = replace(
            base, path="lds", stages=3, bulk=True, load_policy="keep", store_policy="stream"
        )  # fmt: skip
    elif device.dialect == "amd":
        # Unmeasured. Ping-pong needs no LDS and keeps a whole row in flight (gfx950: 128 VGPRs).
        base = replace(base, path="pingpong")
    # A lane keeps 32 bytes of each tensor; 64 where a row would take more than 512 lanes.
    for row in _lane_counts(covering_lanes(vectors, 2 if vectors <= 1024 else 4, device)):
        block = _block(row, 256)
        yield replace(
            base, block=block, threads_per_row=row, programs=max(1, min(4, 512 // block))
        )  # fmt: skip
    # Lanes that would have to keep more read the ring again: 204 us at 8192x16384 bf16.
    for row in (512, 1024):
        yield Config(
            block=row, vec=vec, path="lds", stages=3, reread=True, programs=1,
            bulk=device.arch == "sm_90", load_policy=base.load_policy,
            store_policy=base.store_policy,
        )  # fmt: skip
    # Rows too wide for that go in two passes.
    yield Config(block=256, vec=vec, path="two_pass", programs=4)


def _lane_counts(wanted: int) -> Iterator[int]:
    """Lanes a row to try: those wanted, then more, then fewer."""
    powers = [8 << k for k in range(8)]
    yield wanted
    yield from (row for row in powers if row > wanted)
    yield from (row for row in reversed(powers) if row < wanted)


def _block(row: int, least: int) -> int:
    """Threads of a block of one, two, four ... rows: ``least`` or more, for at most 16 rows."""
    block = row
    while block < least and block < MAX_ROWS_PER_BLOCK * row:
        block *= 2
    return max(64, block)

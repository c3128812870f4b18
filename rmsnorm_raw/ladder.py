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
    PROGRAMS,
    covering_lanes,
    inert_reason,
    reject_reason,
    require_fit,
    row_vectors,
)


def default_config(problem: Problem, device: DeviceSpec) -> Config:
    """The analytical default: a function of M, N, dtypes and device alone.

    Raises:
        InvalidConfig: nothing fits; the message carries the reason for the last rung.
    """
    rungs = _forward_rungs if problem.op == "forward" else _backward_rungs
    *wanted, last = rungs(problem, device)
    for config in wanted:
        if not (reject_reason(problem, device, config) or inert_reason(problem, device, config)):
            return config
    require_fit(problem, device, last)
    return last


def _forward_rungs(problem: Problem, device: DeviceSpec) -> Iterator[Config]:
    """One block a row group, rows in registers.

    Figures: an H200, 2026-11, cold, bf16. The same shapes serve AMD (aiter and quack-FlyDSL have
    256 lanes with 16 to 32 elements each on MI355X); there they are unmeasured.
    """
    vec, vectors = problem.widest_vec, row_vectors(problem)
    # A lane keeps 32 bytes of a narrow row and 64 of a wide one: 253 us at 32768x8192, 35.3 us at
    # 32768x1024; a lone row of 4096, too, is faster with 256 lanes (4.5 us) than with 512 (4.6).
    per_lane = 2 if vectors * vec <= 8192 else 4
    # Blocks of 256 threads: at 32768x1024 128 take 36.9 us, for 16 blocks of a multiprocessor do
    # not fill its 2048 threads. Few rows spread over the device instead.
    few_rows = problem.rows <= device.compute_units
    least = 64 if few_rows else 256
    # Rows are kept in L2: 262 -> 253 us at 32768x8192, 16.6 -> 16.2 us at 4096x3000; streamed 278.
    # A lone row would wait for the policy: 4.8 us instead of 4.5 at 1x4096.
    cuda = device.dialect == "cuda"
    load: Policy = "keep" if cuda and not few_rows else "default"
    for row in _lane_counts(covering_lanes(vectors, per_lane, device)):
        block = _block(row, least)
        yield Config(block=block, threads_per_row=row, vec=vec, load_policy=load)
    # A row too wide to keep is read twice, and what is written is kept out of the way of that: 289
    # us at 4096x65536, 331 with the loads kept.
    store: Policy = "stream" if cuda else "default"
    yield Config(block=1024, vec=vec, path="two_pass", store_policy=store)


def _backward_rungs(problem: Problem, device: DeviceSpec) -> Iterator[Config]:
    """A persistent grid, the next rows on their way.

    Figures: an H200, 2026-11, cold, bf16, dW finished.
    """
    vec, vectors = problem.widest_vec, row_vectors(problem)
    base = Config(vec=vec)
    # 512 threads a compute unit, for what is in flight keeps memory busy and not waves; 1024 where
    # a row is so short that its latency counts: 21.1 us at 32768x256, 25 with 512.
    short = vectors <= 32
    threads, least, per_lane = (1024, 128, 1) if short else (512, 256, 2 if vectors <= 1024 else 4)
    if problem.rows <= device.compute_units:
        # No program has a second row: there is nothing to overlap. A lone row finishes dW itself,
        # 4.4 us instead of 8.1 at 1x4096.
        if problem.need_dweight and problem.rows == 1:
            base = replace(base, finish="last_block")
    elif device.arch == "sm_90" and vectors > 1024:
        # Such rows fill the ring too soon: 762 us from registers at 32768x8192 fp32, 787 by a ring.
        base = replace(base, load_policy="keep", store_policy="stream")
    elif device.arch == "sm_90" and vec == 16:
        # Bulk copies into a ring, loads kept and stores streamed: at 32768x8192 381 us, against 384
        # by lanes, 417 ping-pong, 506 from registers; at 32768x1024 56, 58, 61, 72.
        base = replace(
            base, path="lds", stages=3, bulk=True, load_policy="keep", store_policy="stream"
        )  # fmt: skip
    else:
        # Ping-pong serves every width, needs no LDS and keeps a whole row in flight. On AMD it is
        # the default for that reason, unmeasured (gfx950: 124 to 157 VGPRs).
        base = replace(base, path="pingpong")
    # A lane keeps 32 bytes of each tensor; 64 where a row would take more than 512 lanes.
    for row in _lane_counts(covering_lanes(vectors, per_lane, device)):
        block = _block(row, least)
        for programs in (n for n in reversed(PROGRAMS) if n * block <= max(threads, block)):
            # Programs that share a multiprocessor overlap each other: two rows a ring are enough,
            # 193 us at 32768x4096 and 201 with three; a lone program wants three, 381 against 384.
            stages = min(base.stages, 2 if programs > 1 else 3)
            yield replace(base, block=block, threads_per_row=row, programs=programs, stages=stages)
    # Lanes that would have to keep more read the ring again: 204 us at 8192x16384 bf16.
    for row in (512, 1024):
        yield Config(
            block=row, vec=vec, path="lds", stages=3, reread=True, programs=1,
            bulk=device.arch == "sm_90", load_policy=base.load_policy,
            store_policy=base.store_policy,
        )  # fmt: skip
    # Rows too wide for that go in two passes.
    for programs in (4, 3, 2, 1):
        yield Config(block=256, vec=vec, path="two_pass", programs=programs)


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

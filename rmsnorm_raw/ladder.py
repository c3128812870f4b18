"""The ladder: the default config, a function of M, N, dtypes and device alone.

It reads from the config wanted to the one that always fits; the first that the space keeps is
taken. Each threshold has its reason and its figure beside it. Every AMD choice is unmeasured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from rmsnorm_raw.config import Config, Policy
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.space import (
    LANES,
    MAX_ROWS_PER_BLOCK,
    PROGRAMS,
    ROW_BLOCKS,
    adds_dout_up,
    covering_lanes,
    finishes_early,
    inert_reason,
    reject_reason,
    require_fit,
    ring_stranger,
    row_vectors,
)

#: bytes of each tensor that a program has, from which pacing pays: it costs 1 % at half a MiB
#: (4096x8192, 2048x16384) and is worth 2 % at one (8192x8192) and 4 % at four (32768x8192)
PACED_BYTES = 768 << 10
#: steps of a program below which two smaller ones overlap each other better than one
ALONE_STEPS = 48
#: rows up to so many blocks a compute unit are few: their latency counts and not what memory gives
FEW_ROWS = 4


def default_config(problem: Problem, device: DeviceSpec) -> Config:
    """The analytical default: a function of M, N, dtypes and device alone.

    Raises:
        InvalidConfig: nothing fits; the message carries the reason for the last rung.
    """
    rungs = _forward_rungs if problem.op == "forward" else _backward_rungs
    for config in rungs(problem, device):
        if not (reject_reason(problem, device, config) or inert_reason(problem, device, config)):
            break
    require_fit(problem, device, config)
    return config


def _forward_rungs(problem: Problem, device: DeviceSpec) -> Iterator[Config]:
    """One block a row group, or several blocks a row; rows in registers.

    Figures: an H200, 2026-11, cold, bf16 unless they say something else.
    """
    vec, vectors = problem.widest_vec, row_vectors(problem)
    cuda = device.dialect == "cuda"
    if cuda:
        yield from _cuda_forward_rungs(problem, device)
    elif vectors * vec >= 65536 and problem.rows * 8 <= device.compute_units:
        # Wide rows and hardly any: eight blocks a row, or most of the device would idle.
        # Unmeasured.
        yield Config(block=256, threads_per_row=2048, vec=vec)
    # A lane keeps 32 bytes of a narrow row and 64 of a wide one, in blocks of 256 threads: aiter
    # and quack-FlyDSL have 256 lanes with 16 to 32 elements each on MI355X. Few rows spread over
    # the device instead.
    per_lane = 2 if vectors * vec <= 8192 else 4
    most = 64 if problem.rows <= device.compute_units else 256
    load: Policy = "keep" if cuda else "default"
    for row in _lane_counts(covering_lanes(vectors, per_lane, device)):
        yield Config(block=_block(row, most), threads_per_row=row, vec=vec, load_policy=load)
    # A row too wide to keep is read twice, and what is written is kept out of the way of that: 289
    # us at 4096x65536, 331 with the loads kept.
    store: Policy = "stream" if cuda else "default"
    for block in (1024, 512, 256):
        yield Config(block=block, vec=vec, path="two_pass", store_policy=store)


def _cuda_forward_rungs(problem: Problem, device: DeviceSpec) -> Iterator[Config]:
    vec, vectors = problem.widest_vec, row_vectors(problem)
    few_rows = problem.rows <= FEW_ROWS * device.compute_units
    wide_weight = problem.weight_bytes > problem.element_bytes and not few_rows
    # Rows are kept in L2: 262 -> 253 us at 32768x8192; streamed 278.
    base = Config(vec=vec, load_policy="keep")
    # min_blocks=1 lets NVRTC ask for the weight with the row and not after its sum: 4.9 -> 4.0 us
    # at 1x4096 with an fp32 weight, 254.3 -> 251.6 at 32768x4096 fp32.
    ahead = replace(base, min_blocks=1)
    more = problem.extras
    if more.scale != "none" and not more.residual_dtype and vectors >= 512 and not few_rows:
        # An 8-bit y, half of what is read: 128 bytes a lane and few waves a row, with a scale for
        # each row 1.11 times as fast at 32768x4096, 1.03 at 32768x8192.
        row = covering_lanes(vectors, 8, device)
        yield replace(base, block=max(128, row), threads_per_row=row)
    row_bytes = vectors * vec
    wide = row_bytes > (8192 if vec == 16 else 32768) and (vec >= 8 or few_rows)
    if vec == 8 and row_bytes > 8192 and vectors <= 256 * 17 and not few_rows:
        # 36.2 us at 4096x8196, 48.1 in 544 lanes; 69.3 at 4096x16388, 72.9 in two blocks
        yield replace(base, block=256)
    elif vec < 16:
        pass  # other odd widths have no figures: shared where few and wide, else as on AMD, below
    elif 32 < vectors < 512:
        # One row a block, 32 bytes a lane: 66.5 us at 32768x2048, 67.4 with two rows a block.
        # Narrower ones go several a block of 256 threads, as on AMD.
        row = covering_lanes(vectors, 2, device)
        yield replace(ahead, block=max(64, row), threads_per_row=row)
    elif vectors == 512:
        if wide_weight:  # 19.5 us at 4096x4096 fp16/fp32; 20.6 in 256 lanes
            yield replace(ahead, block=128, threads_per_row=128)
        # 128.3 us at 32768x4096, 129.1 if the weight is asked for early
        yield replace(ahead if few_rows or problem.element_bytes == 4 else base, block=256)
    elif wide_weight and wide and vectors <= 2048:
        # One block: 253.1 us at 32768x8192 bf16/fp32, 129.6 at 8192x16384, 135 in 512 lanes.
        yield replace(base, block=256)
    # Wider rows are shared by blocks of 128 threads with 64 bytes a lane, 32 where rows are few:
    # 251.1 us at 32768x8192 (one block 252.6), 126.7 at 8192x16384 (128.6), 126.9 at 4096x32768
    # (134.8), 4.1 at 1x16384 (5.1). Up to eight may share one.
    for blocks in ROW_BLOCKS:
        per_lane = 2 if problem.rows <= device.compute_units and blocks < ROW_BLOCKS[-1] else 4
        if wide and vectors <= 128 * blocks * per_lane:
            early = few_rows or vectors <= 1024
            yield replace(ahead if early else base, block=128, threads_per_row=128 * blocks)
    # Wider still: 256 threads with 256 bytes a lane, or one vector more: 262.0 us at 4096x65536,
    # 269.3 at 2048x131072, 278.4 at 1024x262144, 273.4 at 1024x262152 (read twice 423.5); eight
    # blocks where rows are few, 7.7 at 8x262144.
    for blocks in ROW_BLOCKS:
        fits = 4096 < vectors <= 256 * blocks * (256 // max(8, vec) + 1)
        if wide and fits and (not few_rows or blocks == ROW_BLOCKS[-1]):
            config = ahead if few_rows else replace(base, store_policy="stream")
            yield replace(config, block=256, threads_per_row=256 * blocks)


def _backward_rungs(problem: Problem, device: DeviceSpec) -> Iterator[Config]:
    """A persistent grid, the next rows on their way.

    Figures: an H200, 2026-11, cold, bf16, dW finished.
    """
    vec, vectors = problem.widest_vec, row_vectors(problem)
    base = Config(vec=vec)
    # 512 threads a compute unit, for what is in flight keeps memory busy and not waves; 1024 where
    # a row is so short that its latency counts: 21.1 us at 32768x256, 25 with 512. A lane keeps 32
    # bytes of each tensor; 64 where a row would take more than 512 lanes.
    threads, most, per_lane = 512, 256, 2 if vectors <= 1024 else 4
    if vectors <= 32:
        threads, most, per_lane = 1024, 128, 1
    if problem.rows <= device.compute_units:
        # No program has a second row: there is nothing to overlap. A lone row finishes dW itself,
        # 4.4 us instead of 8.1 at 1x4096.
        if problem.need_dweight and problem.rows == 1:
            base = replace(base, finish="last_block")
    elif device.arch == "sm_90" and vec == 16 and not ring_stranger(problem):
        # Bulk copies into a ring of three rows, loads kept and stores streamed: 375 us at
        # 32768x8192, paced; 379 copied by lanes, 417 ping-pong, 506 from registers.
        base = replace(
            base, path="lds", stages=3, bulk=True, load_policy="keep", store_policy="stream"
        )  # fmt: skip
        if vectors > 32:
            threads, most, per_lane = _bulk_shape(problem, device)
    elif device.dialect == "amd" and adds_dout_up(problem):
        # Nothing overlaps a row but other programs: 64 bytes a lane in 1024 threads are 64 KiB in
        # flight. A ring would copy x too, which nobody reads. Unmeasured.
        threads, most, per_lane = 1024, 256, 4
    else:
        # Ping-pong serves every width, needs no LDS and keeps a whole row in flight. On AMD it is
        # the default for that reason, unmeasured (gfx950: 83 to 172 VGPRs).
        base = replace(base, path="pingpong")
    if finishes_early(problem, device):  # 54.6 us at 32768x1024, 56.2 with a later launch
        base = replace(base, finish="early")
    for row in _lane_counts(covering_lanes(vectors, per_lane, device)):
        block = _block(row, most)
        for programs in (n for n in reversed(PROGRAMS) if n * block <= max(threads, block)):
            config = replace(base, block=block, threads_per_row=row, programs=programs)
            yield _ring_for(problem, device, config) if config.bulk else config
    # Lanes that would have to keep more read the ring again: 201 us at 8192x16384 bf16.
    for stages, row in itertools.product((3, 2), (512, 1024)):
        config = Config(
            block=row, vec=vec, path="lds", stages=stages, reread=True, programs=1,
            bulk=device.arch == "sm_90", load_policy=base.load_policy,
            store_policy=base.store_policy, finish=base.finish,
        )  # fmt: skip
        yield _ring_for(problem, device, config) if config.bulk else config
    if problem.extras.heads > 1:  # which are never read twice; unmeasured
        for row in _lane_counts(covering_lanes(vectors, per_lane, device)):
            yield Config(block=_block(row, most), threads_per_row=row, vec=vec, programs=1)
    # Rows too wide for that go in two passes.
    for programs in (4, 3, 2, 1):
        yield Config(block=256, vec=vec, path="two_pass", programs=programs)


def _bulk_shape(problem: Problem, device: DeviceSpec) -> tuple[int, int, int]:
    """Threads a compute unit, most threads of a block and vectors a lane, for rings of bulk copies.

    A block has rows that together make about 16 KiB of each tensor a step.
    """
    vectors = row_vectors(problem)
    # Four programs of 128 for short rows: 57.3 us at 32768x1024 fp16, 60.2 in two of 256.
    if vectors <= 128:
        return 512, 128, 2
    # A lone row a block of less than 512 lanes would wait at each of its barriers: 44.3 us at
    # 4096x3000 fp32 with four vectors a lane and two rows, 47.2 with two and one.
    per_lane = 4 if 512 < vectors <= 768 else 2
    # Rows of 32 KiB in 1024 lanes: 737 us at 32768x8192 fp32, 742 in 512.
    if vectors > 1024:
        return 1024, 512, per_lane
    # Two programs of 256 where there are few steps, but enough to overlap: 34.3 us at 4096x4096
    # fp16, 36.5 as one; but 56.5 at 8192x4096, and 54.8. (384: or one of twice 192 lanes.)
    steps = problem.rows * vectors // (1024 * device.compute_units)
    if 4 < steps < (ALONE_STEPS // 2 if vectors >= 512 else ALONE_STEPS):
        return 512, 384, per_lane
    # One of 512 where there are many, for pacing, or hardly any: 192.4 us at 32768x4096, 197.5 as
    # two of 256; 11.2 at 256x4096, 12.6.
    return 512, 512, per_lane


def _ring_for(problem: Problem, device: DeviceSpec, config: Config) -> Config:
    """A bulk ring of as many stages as programs have use for, paced where they go on for long."""
    units = config.programs * device.compute_units
    steps = -(-problem.rows // (config.rows_per_block * units))
    program_bytes = problem.rows * problem.cols * problem.element_bytes // units
    # Short rows in many programs overlap each other: two are enough, 20.4 us at 32768x256.
    stages = 2 if config.programs > 4 else max(2, min(config.stages, steps))
    return replace(
        config, stages=stages, paced=config.programs == 1 and program_bytes >= PACED_BYTES
    )


def _lane_counts(wanted: int) -> Iterator[int]:
    """Lanes a row to try: those wanted, then more, then fewer."""
    yield wanted
    yield from (row for row in LANES if row > wanted)
    yield from (row for row in reversed(LANES) if row < wanted)


def _block(row: int, most: int) -> int:
    """Threads of a block: its rows are doubled up to ``most`` threads and 16 rows."""
    block = row
    while 2 * block <= most and block < MAX_ROWS_PER_BLOCK * row:
        block *= 2
    return max(64, block)

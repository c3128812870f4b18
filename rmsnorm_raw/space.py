"""The kernel space: what fits a problem, what is worth a search, and the ladder's default.

``reject_reason`` is the only judge. The enumerator proposes and the judge keeps, or names the
reason; the ladder's choice must be kept like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rmsnorm_raw.config import Config, Policy
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.errors import InvalidConfig
from rmsnorm_raw.problem import Problem

BLOCKS = (64, 128, 256, 512, 1024)
PROGRAMS = (1, 2, 3, 4, 8)
#: (load, store) of the rows. Outputs are kept only where the rows are: alone, they would push out
#: the rows that a second pass or a neighbour's weight still wants.
POLICIES: tuple[tuple[Policy, Policy], ...] = (
    ("default", "default"), ("keep", "default"), ("stream", "default"), ("default", "stream"),
    ("keep", "stream"), ("stream", "stream"), ("keep", "keep"),
)  # fmt: skip
MAX_RESIDENT_THREADS = 2048  # of a CU or multiprocessor, both vendors
MAX_ROWS_PER_BLOCK = 16  # in a search; more only lengthens the merge of dW
#: chunks that the two-pass kernels have in flight at once (TILE_CHUNKS of the kernel text)
TILE_CHUNKS = 4
#: registers of addresses, counters and the reduction, beside the row's data; NVRTC 13 and hiprtc 7
#: both stay under it for the plain kernels
OVERHEAD_REGISTERS = 28


# ---- counts that follow from a problem and a config --------------------------------------------


def elements(problem: Problem, config: Config) -> int:
    """Elements of x that a lane moves at once."""
    return config.vec // problem.element_bytes


def chunks(problem: Problem, config: Config) -> int:
    """Times that the lanes of a row must move ``vec`` bytes to cover it."""
    return -(-problem.cols // (config.threads_per_row * elements(problem, config)))


def lane_registers(problem: Problem, config: Config) -> int:
    """An estimate of the 32-bit registers a lane needs; the built kernel has the last word."""
    each = elements(problem, config)
    kept = chunks(problem, config) if config.path == "registers" else 1
    in_flight = 1 if config.path == "registers" else TILE_CHUNKS
    row_words = max(1, config.vec // 4)
    weight_words = max(1, each * problem.weight_bytes // 4) if problem.weight_bytes else 0
    if problem.op == "forward":
        data = row_words * kept * in_flight + weight_words
    else:
        dweight_words = each * problem.need_dweight
        data = kept * (2 * row_words * in_flight + weight_words + dweight_words)
    return data + OVERHEAD_REGISTERS


def lds_bytes(problem: Problem, config: Config, device: DeviceSpec) -> dict[str, int]:
    """Dynamic LDS (shared memory) of a block, by entry point; the layout is the kernels' own."""
    waves = config.block // device.wave
    if problem.op == "forward":
        return {"rmsnorm_forward": 4 * waves}
    finish = {"rmsnorm_dweight": 4 * 256} if problem.need_dweight else {}
    if config.path == "two_pass":
        return {"rmsnorm_backward_rows": 8 * waves, "rmsnorm_backward_columns": 0} | finish
    merge = 0
    if problem.need_dweight and config.rows_per_block > 1:
        merge = 4 * chunks(problem, config) * elements(problem, config) * config.threads_per_row
    return {"rmsnorm_backward": 16 * waves + merge} | finish


def row_chain(problem: Problem, config: Config) -> int:
    """S of the error bounds: the longest serial chain of additions a lane does in a row sum."""
    each = elements(problem, config)
    covered = chunks(problem, config)
    if config.path == "two_pass":
        tiles = -(-covered // TILE_CHUNKS)
        return -(-TILE_CHUNKS * each // min(4, each)) + tiles
    return -(-covered * each // 4) + 4


def partial_rows(problem: Problem, config: Config, device: DeviceSpec) -> int:
    """Rows of fp32 partial sums of dW: the programs of the grid, or the row shares of two passes."""
    programs = max(1, config.programs) * device.compute_units
    if config.path == "two_pass":
        programs = max(1, programs // column_tiles(problem, config))
        return max(1, min(programs, problem.rows))
    return max(1, min(programs, -(-problem.rows // config.rows_per_block)))


def column_tiles(problem: Problem, config: Config) -> int:
    """Column tiles of the second pass: a block's threads take one vector each."""
    return max(1, -(-problem.cols // (config.block * elements(problem, config))))


def dweight_chain(problem: Problem, config: Config, device: DeviceSpec) -> int:
    """D of the error bounds: rows that a program accumulates plus partial rows summed."""
    partials = partial_rows(problem, config, device)
    slots = config.rows_per_block if config.path == "registers" else 1
    return -(-problem.rows // (partials * slots)) + slots + partials


# ---- the judge ---------------------------------------------------------------------------------


def reject_reason(problem: Problem, device: DeviceSpec, config: Config) -> str | None:
    """Why a config cannot serve a problem on a device, in words with numbers; None if it can."""
    return (
        _reject_threads(device, config)
        or _reject_vec(problem, config)
        or _reject_path(problem, config)
        or _reject_policies(device, config)
        or _reject_bounds(device, config)
        or _reject_grid(problem, config)
        or _reject_registers(problem, device, config)
        or _reject_lds(problem, device, config)
    )


def require_fit(problem: Problem, device: DeviceSpec, config: Config) -> None:
    """Raises InvalidConfig, with the reason, unless the config can serve the problem."""
    reason = reject_reason(problem, device, config)
    if reason is not None:
        raise InvalidConfig(config.slug, f"does not fit {problem} on {device.arch}: {reason}")


def _reject_threads(device: DeviceSpec, config: Config) -> str | None:
    block, row = config.block, config.threads_per_row
    if not 64 <= block <= 1024 or block % device.wave:
        return f"a block has 64 to 1024 threads in whole waves of {device.wave}, not {block}"
    if not 8 <= row <= block or block % row:
        return f"threads_per_row is 8 to block={block} and divides it, not {row}"
    if row & (row - 1) and row % device.wave:
        return f"threads_per_row is a power of two or whole waves of {device.wave}, not {row}"
    return None


def _reject_vec(problem: Problem, config: Config) -> str | None:
    widest, element = problem.widest_vec, problem.element_bytes
    if config.vec not in (widest, widest // 2) or config.vec < element:
        offered = " or ".join(str(v) for v in (widest, widest // 2) if v >= element)
        return (
            f"vec is {offered} bytes here (rows of {problem.cols * element} bytes, addresses aligned "
            f"to {problem.alignment}), not {config.vec}"
        )
    return None


def _reject_path(problem: Problem, config: Config) -> str | None:
    if config.path in ("pingpong", "lds"):
        return f"path {config.path} is not built in this version: use registers or two_pass"
    if config.stages or config.bulk or config.reread:
        return f"stages, bulk and reread belong to path lds, not {config.path}"
    if config.finish == "last_block":
        return "finish last_block is not built in this version: use the second kernel"
    return None


def _reject_policies(device: DeviceSpec, config: Config) -> str | None:
    if device.dialect == "amd" and "keep" in (config.load_policy, config.store_policy):
        return "AMD has no keep policy: use default or stream"
    return None


def _reject_bounds(device: DeviceSpec, config: Config) -> str | None:
    if device.dialect == "amd":
        if config.min_blocks:
            return "min_blocks is CUDA's second launch bound: use waves_per_eu on AMD"
        if config.waves_per_eu not in (0, 1, 2, 4):
            return f"waves_per_eu is 1, 2 or 4, not {config.waves_per_eu}"
        have = -(-config.block // (4 * device.wave))
        if 0 < config.waves_per_eu <= have:
            return (
                f"waves_per_eu={config.waves_per_eu} is inert: one block already has {have} a SIMD"
            )
        return None
    if config.waves_per_eu:
        return "waves_per_eu is AMD's second launch bound: use min_blocks on CUDA"
    if config.min_blocks > 8 or config.min_blocks * config.block > MAX_RESIDENT_THREADS:
        return f"{config.min_blocks} blocks of {config.block} threads cannot share a multiprocessor"
    alone = device.registers_per_lane(config.block)
    if config.min_blocks and device.registers_per_lane(config.block, config.min_blocks) == alone:
        return (
            f"min_blocks={config.min_blocks} is inert: at {alone} registers a lane they fit anyway"
        )
    return None


def _reject_grid(problem: Problem, config: Config) -> str | None:
    if problem.op == "forward":
        if config.programs:
            return f"forward's path {config.path} has one block a row group: leave programs out"
        return None
    if config.programs not in PROGRAMS:
        return (
            f"backward has a persistent grid: programs is one of {PROGRAMS}, not {config.programs}"
        )
    if config.programs * config.block > MAX_RESIDENT_THREADS:
        return f"{config.programs} programs of {config.block} threads cannot share a compute unit"
    return None


def _reject_registers(problem: Problem, device: DeviceSpec, config: Config) -> str | None:
    resident = max(1, config.min_blocks)
    if device.dialect == "amd" and config.waves_per_eu:
        resident = max(1, config.waves_per_eu * 4 * device.wave // config.block)
    have = device.registers_per_lane(config.block, resident)
    need = lane_registers(problem, config)
    if need > have:
        return f"about {need} registers a lane, and {resident} x {config.block} lanes leave {have}"
    return None


def _reject_lds(problem: Problem, device: DeviceSpec, config: Config) -> str | None:
    need = max(lds_bytes(problem, config, device).values())
    if need > device.lds_bytes:
        return f"{need} bytes of LDS a block, and {device.arch} has {device.lds_bytes}"
    return None


# ---- the enumerator ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Space:
    """The configs worth a search: those kept, and those refused with the reason."""

    kept: tuple[Config, ...]
    rejected: tuple[tuple[Config, str], ...]

    def __repr__(self) -> str:
        return f"<Space: {len(self.kept)} kept, {len(self.rejected)} rejected>"


def enumerate_configs(problem: Problem, device: DeviceSpec) -> Space:
    """All configs worth trying for a problem on a device, in a fixed order.

    The space is a union of planes through block x threads_per_row x path x programs: the pairs of
    cache policies at the widest vectors, the second launch bounds, and vectors of half the width.
    That keeps it searchable (at most 300 forward, 1,000 backward) with no knob left out.
    """
    kept: dict[Config, None] = {}
    rejected: dict[Config, str] = {}
    for config in _candidates(problem, device):
        reason = reject_reason(problem, device, config)
        if reason is None:
            kept[config] = None
        else:
            rejected[config] = reason
    return Space(tuple(kept), tuple(rejected.items()))


def _candidates(problem: Problem, device: DeviceSpec) -> Iterator[Config]:
    vec = problem.widest_vec
    for base in _shapes(problem, device):
        for load, store in POLICIES:
            yield replace(base, vec=vec, load_policy=load, store_policy=store)
        for bound in (2, 4):
            if device.dialect == "amd":
                yield replace(base, vec=vec, waves_per_eu=bound)
            else:
                yield replace(base, vec=vec, min_blocks=bound)
        if vec > problem.element_bytes:
            yield replace(base, vec=vec // 2)


def _shapes(problem: Problem, device: DeviceSpec) -> Iterator[Config]:
    """Blocks, lanes a row, path and programs: the planes' common part."""
    programs = (0,) if problem.op == "forward" else PROGRAMS
    vectors = _vectors(problem)
    powers = {8 << k for k in range(8)}
    # lanes that just cover the row in 1 to 4 chunks: 192 instead of 256 for 375 vectors
    fitted = {_lanes(vectors, per_lane, device) for per_lane in (1, 2, 4)} - powers
    for count in programs:
        for block in BLOCKS:
            if vectors > block:
                yield Config(block=block, path="two_pass", programs=count)
            for row in sorted(powers):
                # no row slot with more than half of its lanes idle, none with very far to go
                wanted = (row == 8 or row < 2 * vectors) and vectors <= 64 * row
                if wanted and row <= block <= MAX_ROWS_PER_BLOCK * row:
                    yield Config(block=block, threads_per_row=row, programs=count)
        for row in sorted(fitted):
            for block in (row, 2 * row):
                yield Config(block=block, threads_per_row=row, programs=count)


# ---- the ladder --------------------------------------------------------------------------------


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
    vec = problem.widest_vec
    vectors = _vectors(problem)
    forward = problem.op == "forward"

    # Lanes a row. Many rows: a lane keeps about 32 bytes of a narrow row and 64 of a wide one, enough
    # in flight to cover memory latency. Few rows: the device is empty, so a row takes every lane it
    # can use and waits for memory once.
    few_rows = problem.rows < 2 * device.compute_units
    per_lane = 1 if few_rows else 2 if vectors * vec <= 8192 else 4
    wanted = _lanes(vectors, per_lane, device)

    # Rows a block. A block of at least 128 threads, so that narrow rows do not run into the limit on
    # resident blocks; backward's persistent programs want 256, for fewer partial rows of dW.
    least = 64 if few_rows else 128 if forward else 256
    powers = [8 << k for k in range(8)]
    wider = [row for row in powers if row > wanted]
    narrower = [row for row in reversed(powers) if row < wanted]
    for row in (wanted, *wider, *narrower):
        block = row * -(-least // row)
        base = Config(block=block, threads_per_row=row, vec=vec)
        if forward:
            yield replace(base, load_policy=_forward_load_policy(problem, device))
        else:
            yield replace(base, programs=max(1, min(4, 1024 // block)))

    # A row too wide to keep.
    if forward:
        policy = _forward_load_policy(problem, device)
        yield Config(block=1024, vec=vec, path="two_pass", load_policy=policy)
    else:
        yield Config(block=256, vec=vec, path="two_pass", programs=4)


def _vectors(problem: Problem) -> int:
    """Vectors of the widest kind in a row."""
    return max(1, problem.cols * problem.element_bytes // problem.widest_vec)


def _lanes(vectors: int, per_lane: int, device: DeviceSpec) -> int:
    """Lanes that cover a row in ``per_lane`` chunks: whole waves, or a power of two below one."""
    lanes = -(-vectors // per_lane)
    if lanes > device.wave:
        return min(1024, -(-lanes // device.wave) * device.wave)
    return max(8, 1 << (lanes - 1).bit_length())


def _forward_load_policy(problem: Problem, device: DeviceSpec) -> Policy:
    """Keep rows in L2 where CUDA can and they do not fit anyway: 262 -> 252 us at 32768x8192 bf16.

    An H200, 2026-10, with 256 threads a row; evict_first gave 278. AMD has no such policy.
    """
    larger_than_cache = problem.logical_bytes() > device.last_level_cache_bytes
    return "keep" if device.dialect == "cuda" and larger_than_cache else "default"

"""The kernel space: the counts that follow from a config, what fits a problem, what to search.

``reject_reason`` is the only judge. The enumerator proposes, and the judge keeps or names the
reason; the ladder's choice (:mod:`rmsnorm_raw.ladder`) must be kept like any other. Over 400 lines,
for the three speak of the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rmsnorm_raw.config import Config, Finish, Policy
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.dtypes import fp8_dtype, stored_bytes
from rmsnorm_raw.errors import InvalidConfig
from rmsnorm_raw.problem import Problem

BLOCKS = (64, 128, 256, 512, 1024)
#: lanes a row, beside those that just cover it
LANES = tuple(8 << k for k in range(8))
PROGRAMS = (1, 2, 3, 4, 8)
STAGES = (2, 3, 4)
#: (load, store) of the rows. Outputs are kept only where the rows are: alone, they would push out
#: the rows that a second pass or a neighbour's weight still wants.
POLICIES: tuple[tuple[Policy, Policy], ...] = (
    ("default", "default"), ("keep", "default"), ("stream", "default"), ("default", "stream"),
    ("keep", "stream"), ("stream", "stream"), ("keep", "keep"),
)  # fmt: skip
#: the same for the paths that overlap rows, by dialect; on an H200 streamed row loads lose 15 %
PIPELINE_POLICIES: dict[str, tuple[tuple[Policy, Policy], ...]] = {
    "cuda": (("default", "default"), ("default", "stream"), ("keep", "stream")),
    "amd": (("default", "default"), ("default", "stream"), ("stream", "stream")),
}
#: threads of a CU in a search of those paths, twice that for short rows and for forward: what is in
#: flight keeps memory busy, not waves
PIPELINE_THREADS = 512
#: up to so many rows backward's second launch is a good part of the time, and is worth saving
FEW_DWEIGHT_ROWS = 512
MAX_RESIDENT_THREADS = 2048  # of a CU or multiprocessor, both vendors
MAX_ROWS_PER_BLOCK = 16  # in a search; more only lengthens the merge of dW
#: blocks that may share a row
ROW_BLOCKS = (2, 4, 8)
#: launches side by side whose blocks share rows on AMD: each may leave all blocks of a row but one
#: waiting, and a compute unit must be left to start that one. Twice HIP's four hardware queues
LAUNCHES_SIDE_BY_SIDE = 8
#: chunks that the two-pass kernels have in flight at once (RR_TILE_CHUNKS of the kernel text)
TILE_CHUNKS = 4
#: threads of a block that finishes dW
FINISH_BLOCK = 256
#: registers a lane that leave a SIMD of AMD's its eight waves: forward's kernels that take no more
#: come out of hiprtc 7.0.0 and 7.2.4 the same with a bound of four waves as with none
ALL_WAVES_REGISTERS = 64
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


def ring_tensors(problem: Problem) -> int:
    """Tensors whose rows a ring holds."""
    return (1 if problem.op == "forward" else 2) + (problem.beside_dtype is not None)


def ring_stranger(problem: Problem) -> str | None:
    """A dtype of those tensors that is not x's; a ring holds rows of one dtype."""
    dout = problem.out_dtype if problem.op == "backward" else None
    others = (problem.beside_dtype, dout)
    return next((dtype for dtype in others if dtype not in (problem.dtype, None)), None)


def row_stores(problem: Problem, config: Config) -> int:
    """Stores that a lane makes for one of its vectors of a row, each of at most 16 bytes."""
    each = elements(problem, config)
    outputs = (output for output in problem.outputs if output.is_matrix)
    return sum(-(-each * stored_bytes(output.dtype) // 16) for output in outputs)


def lane_registers(problem: Problem, config: Config, device: DeviceSpec) -> int:
    """An estimate of the 32-bit registers a lane needs without spilling.

    The built kernel has the last word. Fitted to NVRTC 13.5 at 8 to 32 bf16 elements a lane, which
    converts the rows of backward to fp32 once and holds them over the reduction; forward's and the
    weights stay packed. For hiprtc see :func:`_held_by_hiprtc` and :func:`_tile_by_hiprtc`.
    """
    each = elements(problem, config)
    packed, weight = (_packed(each, dtype) for dtype in (problem.dtype, problem.weight_dtype))
    tensors = 1 if problem.op == "forward" else 2
    extra = _extra_registers(problem, config, device)
    if config.path == "two_pass":
        if device.dialect == "amd" and (tile := _tile_by_hiprtc(problem, config)):
            return OVERHEAD_REGISTERS + tile
        sums = each * (1 + (problem.extras.bias_dtype is not None))
        return OVERHEAD_REGISTERS + TILE_CHUNKS * (tensors * packed + extra) + weight + sums
    if device.dialect == "amd" and (problem.op == "backward" or config.path != "registers"):
        held = _held_by_hiprtc(problem, config) + extra
        return OVERHEAD_REGISTERS + chunks(problem, config) * held
    held = 0 if config.reread else packed if problem.op == "forward" else 2 * each
    if problem.op == "backward":
        held += each * problem.need_dweight
    chunk = held + weight + extra + (tensors * packed if config.path == "pingpong" else 0)
    return OVERHEAD_REGISTERS + chunks(problem, config) * chunk


def _packed(each: int, dtype: str | None) -> int:
    """Registers of so many elements as they were loaded; 0 where there is no such tensor."""
    return max(1, each * stored_bytes(dtype) // 4) if dtype else 0


def _extra_registers(problem: Problem, config: Config, device: DeviceSpec) -> int:
    """Registers of one chunk for a problem's extras: residual and bias, or its sums."""
    more, each, beside = problem.extras, elements(problem, config), problem.beside_dtype
    held = _packed(each, beside)
    if config.path == "two_pass":
        return held
    if beside and (device.dialect == "amd" or config.path == "pingpong"):
        held *= 2  # the next row's too, or fp32 beside what was loaded
    if more.bias_dtype:
        in_fp32 = problem.op == "backward" or device.dialect == "amd"
        held += each if in_fp32 else _packed(each, more.bias_dtype)
    return held


def _held_by_hiprtc(problem: Problem, config: Config) -> int:
    """Registers of one chunk of a persistent grid, by ROCm 7.0.0's and 7.2.4's code for gfx950.

    The rows, the weight and dW are in fp32 at once, dout beside its product with the weight where
    dW wants it too, and a chunk has an address. What is too much for a lane moves through
    accumulation registers all along, or goes to scratch.
    """
    each, tensors = elements(problem, config), 1 if problem.op == "forward" else 2
    packed = tensors * _packed(each, problem.dtype)
    dweight = problem.op == "backward" and problem.need_dweight
    weighted = problem.weight_bytes > 0 and (problem.op == "forward" or problem.need_dx)
    held = 1 + each * (weighted + dweight)
    if config.reread:  # all of the rows is read from the ring before any of it is worked on
        return held + packed
    held += each * (tensors + (weighted and dweight))
    if config.path == "pingpong":  # the next row; a weight stays packed, too
        held += packed
        held += _packed(each, problem.weight_dtype) * (weighted and problem.weight_bytes == 2)
        held += config.vec == 2  # 25 chunks of a single bf16 spilled (ROCm 7.2.4, gfx942)
        # stores of a row alone in its block have no condition: the next row is worked on with them
        held += 2 * each * (weighted and dweight and config.rows_per_block == 1)
    return held


def _tile_by_hiprtc(problem: Problem, config: Config) -> int:
    """Registers of a tile of forward's two_pass, where those compilers load all of it at once.

    They do where every lane has as many chunks; 0 where not, and where a residual is read or
    residual_out stored, for then loads stay behind stores. The tile's chunks are in fp32, and so
    are a weight and a bias of 16 bits; of wider ones it is half. An 8-bit y takes a chunk more.
    """
    more, each = problem.extras, elements(problem, config)
    has_tail = problem.cols % (config.threads_per_row * each) != 0
    if problem.op == "backward" or more.residual_dtype or more.residual_out_dtype or has_tail:
        return 0
    tile = min(TILE_CHUNKS, chunks(problem, config))
    beside = (problem.weight_dtype, more.bias_dtype)
    lists = sum(tile * 2 // stored_bytes(dtype) for dtype in beside if dtype)
    return each * (tile + lists + (more.scale != "none"))


def lds_bytes(problem: Problem, config: Config, device: DeviceSpec) -> dict[str, int]:
    """Dynamic LDS (shared memory) of a block, by entry point; the layout is the kernels' own.

    Every kernel has 16 bytes a wave to exchange sums. The ring adds stages x tensors x rows of the
    block, whole chunks each, and an mbarrier a stage in bulk; the rows of a block that meet for dW
    use the same memory when the ring is done.
    """
    exchange = 16 * (config.block // device.wave)
    backward = problem.op == "backward"
    dweight = backward and problem.need_dweight
    dbias = backward and problem.extras.bias_dtype is not None
    if config.path == "two_pass" and backward:
        sizes = {"rmsnorm_backward_rows": exchange, "rmsnorm_backward_columns": 0}
    else:
        row_elements = chunks(problem, config) * elements(problem, config) * config.threads_per_row
        need = exchange
        if config.blocks_per_row > 1:
            need += 4 * (2 + config.blocks_per_row)
        if (dweight or dbias) and config.rows_per_block > 1:
            need = exchange + 4 * row_elements
        if config.path == "lds":
            tensors = ring_tensors(problem)
            row_bytes = row_elements * problem.element_bytes
            ring = config.stages * tensors * config.rows_per_block * row_bytes
            need = max(need, -(-(exchange + 64 * config.bulk) // 128) * 128 + ring)
        sizes = {f"rmsnorm_{problem.op}": need}
    if dweight and config.finish != "last_block":
        sizes["rmsnorm_dweight"] = 2 * FINISH_BLOCK  # 4 floats for each run of 8 lanes
    if dbias:
        sizes["rmsnorm_dbias"] = 2 * FINISH_BLOCK
    return sizes


def row_chain(problem: Problem, config: Config) -> int:
    """S of the error bounds: the longest serial chain of additions a lane does in a row sum."""
    each = elements(problem, config)
    covered = chunks(problem, config)
    if config.path == "two_pass":
        tiles = -(-covered // TILE_CHUNKS)
        return -(-TILE_CHUNKS * each // min(4, each)) + tiles
    return -(-covered * each // 4) + 4


def grid_programs(problem: Problem, config: Config, device: DeviceSpec) -> int:
    """Blocks of a persistent grid; on backward's two_pass the shares that the rows are dealt into.

    Each leaves one row of fp32 partial sums of dW, and works on one of a token's heads. Where a
    unit has several, the grid has no more than make the same number of steps: 33.0 us at 4096x4096
    bf16 backward in 256 of 16 rows, 33.3 in 264. Where it has one, all are used, or units would
    idle: 57.3 us at 4096x8192 in 128, 56.7 in 132 (H200, 2026-11).
    """
    heads = problem.extras.heads
    programs = max(1, max(1, config.programs) * device.compute_units // heads)
    if config.path == "two_pass":
        programs = max(1, programs // column_tiles(problem, config))
        return max(1, min(programs, problem.rows))
    groups = max(1, -(-problem.tokens // config.rows_per_block))
    if config.programs <= 1:
        return min(programs, groups) * heads
    return -(-groups // -(-groups // programs)) * heads


def column_tiles(problem: Problem, config: Config) -> int:
    """Column tiles of the second pass: a block's threads take one vector each."""
    return max(1, -(-problem.cols // (config.block * elements(problem, config))))


def finish_columns(problem: Problem) -> int:
    """Columns that a block finishes dW for: few of a narrow row, so that there are more blocks."""
    return 4 if problem.cols <= 512 else 16 if problem.cols <= 2048 else 32


def finishes_early(problem: Problem, device: DeviceSpec) -> bool:
    """Whether a finish of dW can start early, and has the time to: with few rows it is in the way.

    An H200, 2026-11, bf16: 11.4 -> 12.2 us at 256x4096, 16.2 -> 16.0 at 1024x4096.
    """
    may = device.arch == "sm_90" and problem.op == "backward" and problem.need_dweight
    return may and problem.rows > FEW_DWEIGHT_ROWS


def sums_rows(problem: Problem) -> bool:
    """Whether backward has a sum over each row: for dx, or for an rstd that was not given."""
    return problem.need_dx or not problem.has_rstd


def adds_dout_up(problem: Problem) -> bool:
    """Whether dbias is all that is asked for: then a row has no sum, and so its loop no barrier."""
    alone = problem.extras.bias_dtype is not None and not problem.need_dweight
    return problem.op == "backward" and alone and not sums_rows(problem)


def dweight_chain(problem: Problem, config: Config, device: DeviceSpec) -> int:
    """D of the error bounds: rows that a program accumulates plus partial rows summed."""
    programs, heads = grid_programs(problem, config, device), problem.extras.heads
    slots = 1 if config.path == "two_pass" else config.rows_per_block
    partials = programs // heads if problem.extras.per_head else programs
    return -(-problem.rows // (programs * slots)) + slots + partials


def row_vectors(problem: Problem) -> int:
    """Vectors of the widest kind in a row."""
    return max(1, problem.cols * problem.element_bytes // problem.widest_vec)


def covering_lanes(vectors: int, per_lane: int, device: DeviceSpec) -> int:
    """Lanes that cover a row in ``per_lane`` chunks: whole waves, or a power of two below one."""
    lanes = -(-vectors // per_lane)
    if lanes > device.wave:
        return min(1024, -(-lanes // device.wave) * device.wave)
    return max(8, 1 << (lanes - 1).bit_length())


# ---- the judge ---------------------------------------------------------------------------------


def reject_reason(problem: Problem, device: DeviceSpec, config: Config) -> str | None:
    """Why a config cannot serve a problem on a device, in words with numbers; None if it can."""
    return (
        _reject_threads(problem, device, config)
        or _reject_vec(problem, config)
        or _reject_path(problem, device, config)
        or _reject_extras(problem, device, config)
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


def _reject_threads(problem: Problem, device: DeviceSpec, config: Config) -> str | None:
    block, row = config.block, config.threads_per_row
    if not 64 <= block <= 1024 or block % device.wave:
        return f"a block has 64 to 1024 threads in whole waves of {device.wave}, not {block}"
    if row > block:
        return _reject_row_blocks(problem, device, config)
    if not 8 <= row <= block or block % row:
        return f"threads_per_row is 8 to block={block} and divides it, not {row}"
    if row & (row - 1) and row % device.wave:
        return f"threads_per_row is a power of two or whole waves of {device.wave}, not {row}"
    return None


def _reject_row_blocks(problem: Problem, device: DeviceSpec, config: Config) -> str | None:
    block, row, blocks = config.block, config.threads_per_row, config.blocks_per_row
    if problem.op == "backward" or config.path != "registers":
        return (
            f"threads_per_row={row} is over block={block}, and blocks share a row on forward's "
            "path registers alone"
        )
    if row % block or blocks not in ROW_BLOCKS:
        offered = ", ".join(str(n * block) for n in ROW_BLOCKS)
        return f"threads_per_row over block={block} is {offered}, not {row}"
    if device.dialect == "cuda" and device.arch != "sm_90":
        return f"blocks that share a row are a cluster on CUDA, and {device.arch} is not sm_90"
    units = blocks * LAUNCHES_SIDE_BY_SIDE
    if device.dialect == "amd" and not device.simulated and units > device.compute_units:
        return (
            f"{blocks} blocks of a row wait for each other, and {LAUNCHES_SIDE_BY_SIDE} launches "
            f"side by side may leave all but one of each waiting: that wants {units} compute "
            f"units, and {device.arch} has {device.compute_units}"
        )
    if problem.rows * row >= 1 << 32:
        return f"{problem.rows} rows of {row} threads: one launch has less than 2**32"
    return None


def _reject_vec(problem: Problem, config: Config) -> str | None:
    widest, element = problem.widest_vec, problem.element_bytes
    if config.vec not in (widest, widest // 2) or config.vec < element:
        offered = " or ".join(str(v) for v in (widest, widest // 2) if v >= element)
        return (
            f"vec is {offered} bytes here (rows of {problem.cols * element} bytes, addresses "
            f"aligned to {problem.alignment}), not {config.vec}"
        )
    return None


def _reject_path(problem: Problem, device: DeviceSpec, config: Config) -> str | None:
    if config.finish != "kernel" and (problem.op == "forward" or config.path == "two_pass"):
        return "finish is a knob of backward's single kernel: forward has no dW, two_pass its own"
    if config.finish == "early" and device.arch != "sm_90":
        return f"a launch that starts while another ends is sm_90's; {device.arch} has none"
    if config.path != "lds":
        if config.stages or config.bulk or config.reread or config.paced:
            return f"stages, bulk, reread and paced belong to path lds, not {config.path}"
        return None
    if config.paced and (not config.bulk or problem.op == "forward"):
        return "paced belongs to backward's rings of bulk copies: lds<n>bp"
    if not 2 <= config.stages <= 8:
        return f"a ring has 2 to 8 stages, not {config.stages}"
    if config.vec < 4:
        return f"an asynchronous copy moves at least 4 bytes a lane, and vec is {config.vec}"
    if config.bulk:
        if device.arch != "sm_90":
            return f"bulk row copies are sm_90's; {device.arch} copies by lanes"
        if config.vec < 16:
            return "a bulk copy wants rows of whole 16-byte vectors"
    elif device.dialect == "amd" and config.threads_per_row % device.wave:
        return f"a wave's copies share one row: threads_per_row is whole waves of {device.wave}"
    return None


def _reject_extras(problem: Problem, device: DeviceSpec, config: Config) -> str | None:
    more, own = problem.extras, problem.dtype
    if more.scale != "none" and (reason := _reject_fp8(problem.out_dtype, device)):
        return reason
    if config.path == "lds" and (other := ring_stranger(problem)):
        return f"a ring holds rows of one dtype, and beside {own} there is {other}"
    if more.heads > 1 and (reason := one_head_reason(config)):
        return reason
    if more.scale == "dynamic" and config.blocks_per_row > 1:
        return "a row's own scale wants all of the row in one block"
    if config.finish == "last_block" and more.bias_dtype:
        return _LAST_BLOCK
    return None


_LAST_BLOCK = "a finish by the last block has no dbias, and one head a token"


def one_head_reason(config: Config) -> str | None:
    """Why a config cannot serve several heads a token; None if it may."""
    if config.path == "two_pass" or config.blocks_per_row > 1:
        return "the rows of several heads a token are read once, each in one block"
    return _LAST_BLOCK if config.finish == "last_block" else None


def _reject_fp8(out_dtype: str, device: DeviceSpec) -> str | None:
    has = fp8_dtype(device.arch)
    if out_dtype != has:
        return f"{device.arch} converts to {has}, not {out_dtype}"
    version = device.arch.removeprefix("sm_")
    if device.dialect == "cuda" and version.isdigit() and int(version) < 89:
        return f"{device.arch} has no conversion to {has}: sm_89 is the first"
    return None


def _reject_policies(device: DeviceSpec, config: Config) -> str | None:
    if device.dialect == "amd" and "keep" in (config.load_policy, config.store_policy):
        return "AMD has no keep policy: use default or stream"
    by_lanes = device.dialect == "cuda" and config.path == "lds" and not config.bulk
    if by_lanes and config.load_policy != "default":
        return "cp.async by lanes takes no policy: use lds<n>b or the default"
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
    together = device.registers_per_lane(config.block, config.min_blocks or 1)
    if config.min_blocks > 1 and together == alone:
        return (
            f"min_blocks={config.min_blocks} is inert: at {alone} registers a lane they fit anyway"
        )
    return None


def _reject_grid(problem: Problem, config: Config) -> str | None:
    if problem.op == "forward" and config.path in ("registers", "two_pass"):
        if config.programs:
            return f"forward's path {config.path} has one block a row group: leave programs out"
        return None
    if config.programs not in PROGRAMS:
        offered = ", ".join(f"-p{n}" for n in PROGRAMS)
        return f"the grid is persistent: add programs, one of {offered}; not {config.programs}"
    if config.programs * config.block > MAX_RESIDENT_THREADS:
        return f"{config.programs} programs of {config.block} threads cannot share a compute unit"
    return None


def _reject_registers(problem: Problem, device: DeviceSpec, config: Config) -> str | None:
    resident = max(1, config.min_blocks)
    if device.dialect == "amd" and config.waves_per_eu:
        resident = max(1, config.waves_per_eu * 4 * device.wave // config.block)
    have = device.registers_per_lane(config.block, resident)
    need = lane_registers(problem, config, device)
    # with none to spare hiprtc spilled: backward 37x16384 fp16 without weight and dW, b1024-t512-pp
    # (ROCm 7.2.4, gfx942)
    if need > have - (device.dialect == "amd"):
        return f"about {need} registers a lane, and {resident} x {config.block} lanes leave {have}"
    return None


def _reject_lds(problem: Problem, device: DeviceSpec, config: Config) -> str | None:
    need = max(lds_bytes(problem, config, device).values())
    blocks = max(1, config.programs)
    if blocks * need > device.lds_bytes:
        together = f" x {blocks} programs" if blocks > 1 else ""
        return f"{need} bytes of LDS a block{together}, and {device.arch} has {device.lds_bytes}"
    return None


def inert_reason(problem: Problem, device: DeviceSpec, config: Config) -> str | None:
    """Why a knob of a config does nothing here, and another config is the same kernel; or None.

    Such a config serves the problem, and a caller may well use one config for many; a search that
    tried it would time a kernel twice.
    """
    if config.finish != "kernel" and not problem.need_dweight:
        return "finish is inert: no dW is asked for"
    if problem.op == "backward" and not problem.need_dx and config.store_policy != "default":
        return "store_policy is inert: no dx is asked for"
    if device.dialect == "amd" and config.path == "pingpong" and adds_dout_up(problem):
        return (
            "pingpong is inert: dbias alone has no barrier, and hiprtc waits for the next row too"
        )
    if config.waves_per_eu and problem.op == "forward" and config.path == "registers":
        need = lane_registers(problem, config, device)
        if config.waves_per_eu <= 2 or need <= ALL_WAVES_REGISTERS:
            return (
                f"waves_per_eu={config.waves_per_eu} is inert: about {need} registers a lane leave "
                "room for as many waves anyway"
            )
    if fewer := max((n for n in PROGRAMS if n < config.programs), default=0):
        grid = grid_programs(problem, config, device)
        if grid_programs(problem, replace(config, programs=fewer), device) == grid:
            return (
                f"programs={config.programs} is inert: {grid} blocks are the whole grid with fewer"
            )
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

    The space is a union of planes over blocks and lanes a row. For registers, also with a row over
    several blocks: the pairs of cache policies, the second launch bounds and vectors of half the
    width. For the paths that overlap rows: rings of every depth (two for forward), by lanes and in
    bulk, and in one program paced. For two passes: the policies. That keeps it searchable (for
    problems of the study at most 300 forward, 1,000 backward) with no knob left out.
    """
    kept: dict[Config, None] = {}
    rejected: dict[Config, str] = {}
    for config in _candidates(problem, device):
        reason = reject_reason(problem, device, config) or inert_reason(problem, device, config)
        if reason is None:
            kept[config] = None
        else:
            rejected[config] = reason
    return Space(tuple(kept), tuple(rejected.items()))


def _candidates(problem: Problem, device: DeviceSpec) -> Iterator[Config]:
    vec = problem.widest_vec
    for shape in _shapes(problem, device):
        yield from _register_plane(problem, device, replace(shape, vec=vec))
        yield from _pipeline_plane(problem, device, replace(shape, vec=vec))
    for block in BLOCKS[2:]:  # a wide row gains nothing from small blocks
        if row_vectors(problem) > block:
            for programs in (0,) if problem.op == "forward" else (1, 2, 4):
                base = Config(block=block, vec=vec, path="two_pass", programs=programs)
                for load, store in POLICIES:
                    yield replace(base, load_policy=load, store_policy=store)


def _shapes(problem: Problem, device: DeviceSpec) -> Iterator[Config]:
    """Blocks and lanes a row."""
    vectors = row_vectors(problem)
    for block in BLOCKS:
        for row in LANES:
            # no row slot with more than half of its lanes idle, none with very far to go
            wanted = (row == 8 or row < 2 * vectors) and vectors <= 64 * row
            if wanted and row <= block <= MAX_ROWS_PER_BLOCK * row:
                yield Config(block=block, threads_per_row=row)
    # lanes that just cover the row in 1, 2 or 4 chunks: 192 instead of 256 for 375 vectors
    for row in sorted(
        {covering_lanes(vectors, per_lane, device) for per_lane in (1, 2, 4)} - {*LANES}
    ):
        for block in (row, 2 * row, 4 * row):
            if 64 <= block <= 512 or block == row:
                yield Config(block=block, threads_per_row=row)
    # blocks that share a row of more than 8 KiB
    for block, blocks in itertools.product((128, 256, 512), ROW_BLOCKS):
        row = blocks * block
        if problem.op == "forward" and row <= vectors <= 16 * row and vectors > 512:
            yield Config(block=block, threads_per_row=row)


def _register_plane(problem: Problem, device: DeviceSpec, shape: Config) -> Iterator[Config]:
    for programs in (0,) if problem.op == "forward" else PROGRAMS:
        base = replace(shape, programs=programs)
        yield base
        if base.vec > problem.element_bytes:
            yield replace(base, vec=base.vec // 2)
        if programs <= 2:
            # with CUDA's bound of 1 NVRTC spends registers on loads in flight, not on occupancy
            if device.dialect == "cuda":
                yield replace(base, min_blocks=1, load_policy="keep")
                yield replace(base, min_blocks=4)
            elif problem.op == "forward":
                # Two waves always fit: a lane has 256 registers at most. Backward's kernels, of 60
                # to 128 where four fit, are mostly the same with that bound (hiprtc 7).
                yield replace(base, waves_per_eu=4)
            for load, store in POLICIES:
                yield replace(base, load_policy=load, store_policy=store)
            if problem.need_dweight and problem.rows <= FEW_DWEIGHT_ROWS:
                yield replace(base, finish="last_block")


def _pipeline_plane(problem: Problem, device: DeviceSpec, shape: Config) -> Iterator[Config]:
    """Every ring and ping-pong; few of them for forward, where a persistent grid has yet to win."""
    forward = problem.op == "forward"
    if shape.block < (256 if forward else 128) or shape.rows_per_block > (2 if forward else 4):
        return
    if shape.blocks_per_row > 1:
        return
    # to read the ring again saves registers, so it is for lanes that keep much
    rereads = (False, True) if chunks(problem, shape) * elements(problem, shape) >= 32 else (False,)
    paths = [Config(path="pingpong")]
    for stages, bulk, reread in itertools.product(STAGES, (False, True), rereads):
        if not forward or stages != 3:
            paths.append(Config(path="lds", stages=stages, bulk=bulk, reread=reread))
    finish: Finish = "early" if finishes_early(problem, device) else "kernel"
    short = forward or row_vectors(problem) <= 32
    threads = 2 * PIPELINE_THREADS if short else PIPELINE_THREADS
    for programs, path in itertools.product((2,) if forward else (1, 2, 4, 8), paths):
        if programs > 1 and programs * shape.block > threads:
            continue
        base = replace(
            shape, programs=programs, path=path.path, stages=path.stages, bulk=path.bulk,
            reread=path.reread, finish=finish,
        )  # fmt: skip
        for load, store in PIPELINE_POLICIES[device.dialect][forward:]:
            yield replace(base, load_policy=load, store_policy=store)
        if path.bulk and programs == 1 and not forward:
            yield replace(base, paced=True, load_policy="keep", store_policy="stream")

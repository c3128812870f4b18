"""The static gate: what a config promises, held against the machine code that AMD's compiler made.

No device is needed, so this is the one proof of the gfx950 kernels that any machine can give. It
reads registers, LDS and spills; each memory operation with the tensor that it goes to, and whether
a row is moved again; how numbers are rounded and lanes added up (:mod:`.arithmetic`); the fences
between blocks (:mod:`.fences`); and replays the row loops that are to overlap (:mod:`.overlap`).
:func:`gate` gives the faults of one config, :func:`inert_knobs` those of a set of configs whose
code is too much alike.

That a result is right, or fast, is not its subject: :mod:`rmsnorm_raw.check` and a device say that.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import NamedTuple

from rmsnorm_raw.backends.arithmetic import arithmetic_faults
from rmsnorm_raw.backends.fences import last_block_faults, word_faults
from rmsnorm_raw.backends.flow import basic_blocks, natural_loops
from rmsnorm_raw.backends.kernel_report import SIMDS, KernelReport
from rmsnorm_raw.backends.offline import OfflineCode
from rmsnorm_raw.backends.overlap import Ring, pingpong_faults, ring_faults
from rmsnorm_raw.backends.provenance import memory_arguments
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN, DeviceSpec
from rmsnorm_raw.dtypes import stored_bytes
from rmsnorm_raw.problem import MATRICES, Problem
from rmsnorm_raw.space import (
    FINISH_BLOCK,
    TILE_CHUNKS,
    chunks,
    elements,
    grid_programs,
    lds_bytes,
    ring_tensors,
)

#: the arguments of each kernel of ours, in its order
ARGUMENTS = {
    "rmsnorm_forward": "x x_stride weight y y_stride rstd words rows run_time_cols eps",
    "rmsnorm_forward_clear": "words count",
    "rmsnorm_backward": "dout dout_stride x x_stride weight rstd dx dx_stride partial dweight "
    "finished progress rows run_time_cols eps",
    "rmsnorm_backward_rows": "dout dout_stride x x_stride weight rstd row_results rows "
    "run_time_cols eps",
    "rmsnorm_backward_columns": "dout dout_stride x x_stride weight rstd row_results dx dx_stride "
    "partial rows run_time_cols shares",
    "rmsnorm_dweight": "partial partials cols dweight",
    "rmsnorm_dbias": "partial partials cols dbias",
}
_BESIDE = "dresidual_out dresidual_out_stride dresidual dresidual_stride bias_partial"
#: those that follow where a problem has extras
EXTRA_ARGUMENTS = {
    "rmsnorm_forward": "bias residual residual_stride residual_out residual_out_stride scales "
    "x_head y_head residual_head residual_out_head",
    "rmsnorm_backward": f"{_BESIDE} dout_head x_head dx_head dresidual_out_head dresidual_head",
    "rmsnorm_backward_columns": _BESIDE,
}
#: those that add partial rows up
FINISHES = ("rmsnorm_dweight", "rmsnorm_dbias")
#: e_flags of a code object: the processor in its low byte (LLVM, AMDGPU usage guide)
E_FLAGS, PROCESSOR = 0x30, {"gfx942": 0x4C, "gfx950": 0x4F}
#: a lane moves no more at once
WIDEST_BYTES = 16


def gate(problem: Problem, config: Config, code: OfflineCode) -> list[str]:
    """The faults of one config's machine code, a line each, in words with numbers; [] if it passes.

    Args:
        problem: that the config was rendered for.
        config: that the code was compiled for.
        code: of gfx950 or gfx942, whose limits hold.
    """
    device = KNOWN[code.arch]
    faults = list(_target(code))
    for kernel in code.kernels.values():
        found = itertools.chain(
            _resources(problem, config, device, kernel),
            _traffic(problem, config, kernel),
            _moved_again(problem, config, kernel),
            _fences(problem, config, kernel),
            arithmetic_faults(problem, config, kernel, tensors(kernel)),
            _overlap(problem, config, kernel),
        )
        faults += [f"{kernel.name}: {fault}" for fault in found]
    return faults


def _target(code: OfflineCode) -> Iterator[str]:
    processor = code.code_object[E_FLAGS : E_FLAGS + 1].hex()
    if processor != f"{PROCESSOR[code.arch]:02x}":
        yield f"the code object is not for {code.arch}: its processor is 0x{processor}"
    for kernel in code.kernels.values():
        if kernel.wave != KNOWN[code.arch].wave:
            yield f"{kernel.name}: waves of {kernel.wave} lanes, not {KNOWN[code.arch].wave}"


def _resources(
    problem: Problem, config: Config, device: DeviceSpec, kernel: KernelReport
) -> Iterator[str]:
    if kernel.vgpr_spills or kernel.sgpr_spills:
        yield f"{kernel.vgpr_spills} VGPRs and {kernel.sgpr_spills} SGPRs are spilled"
    if kernel.scratch_bytes or any(
        one.access and one.access.space == "scratch" for one in kernel.asm
    ):
        yield f"{kernel.scratch_bytes} bytes of scratch a lane"
    if kernel.agpr:
        yield f"{kernel.agpr} accumulation registers: values are moved there and back"
    threads = FINISH_BLOCK if kernel.name in FINISHES else config.block
    if kernel.max_flat_workgroup_size != threads:
        yield f"built for blocks of {kernel.max_flat_workgroup_size} threads, not {threads}"
    # what the launch and the bound ask for: a block, and so many waves a SIMD
    wanted = max(-(-threads // (SIMDS * kernel.wave)), config.waves_per_eu)
    if kernel.waves_by_registers < wanted:
        yield (
            f"{kernel.vgpr} VGPRs leave room for {kernel.waves_by_registers} waves a SIMD, "
            f"not {wanted}"
        )
    if kernel.lds_bytes:
        yield (
            f"{kernel.lds_bytes} bytes of static LDS: a second LDS object, beside the one that is "
            "given at the launch"
        )
    need = lds_bytes(problem, config, device).get(kernel.name, 0) + kernel.lds_bytes
    if need > device.lds_bytes:
        yield f"{need} bytes of LDS a block, and {device.arch} has {device.lds_bytes}"


def tensors(kernel: KernelReport) -> dict[int, str]:
    """The offset of each memory operation of a kernel, with the tensor that it goes to.

    Two of them, as "dweight|partial", where branches that end alike were made one.
    """
    arguments = ARGUMENTS.get(kernel.name, ""), EXTRA_ARGUMENTS.get(kernel.name, "")
    names = dict(enumerate(" ".join(arguments).split()))
    by_offset = {
        f"+{each.offset}": names.get(each.number, f"argument {each.number}")
        for each in kernel.pointers
    }
    return {
        at: "|".join(sorted(by_offset[each] for each in found))
        for at, found in memory_arguments(kernel).items()
    }


class Moved(NamedTuple):
    """What a lane moves of a tensor in a kernel.

    Attributes:
        size_bytes: of one of its vectors; they go by 16 bytes at once where they are longer.
        is_output: it is stored, not loaded.
        is_row: of a matrix: moved once, with a cache policy.
        least: vectors that a lane moves in all, at least; 0 where it need not.
    """

    size_bytes: int
    is_output: bool
    is_row: bool
    least: int

    @property
    def width(self) -> int:
        """Bytes that go at once."""
        return min(WIDEST_BYTES, self.size_bytes)


def moves(problem: Problem, config: Config, kernel: str) -> dict[str, Moved]:
    """The tensors that a kernel of a problem may move, by the names of its arguments.

    Left out are words and counters, and the rstd that backward is given, which a ring loads as a
    scalar.
    """
    each, forward = elements(problem, config), problem.op == "forward"
    if kernel in FINISHES:
        name = kernel.removeprefix("rmsnorm_")
        (result,) = (it for it in problem.operands if it.name == name)
        partial = Moved(4 * min(4, each), False, False, 1)
        return {"partial": partial, name: Moved(stored_bytes(result.dtype), True, False, 1)}
    if kernel not in ARGUMENTS or kernel == "rmsnorm_forward_clear":
        return {}
    first_pass = kernel == "rmsnorm_backward_rows"
    unused: set[str] = set()
    if first_pass and not problem.need_dx:
        unused = {"dout", *["x"] * problem.has_rstd}
    elif not (forward or first_pass or problem.need_dx or problem.need_dweight):
        unused = {"x"}  # dbias alone
    times = 1 if config.path == "two_pass" else chunks(problem, config)
    # a last vector that is alone in its chunk is one for all lanes, and may be loaded as a scalar
    alone = times > 1 and problem.cols // each % config.threads_per_row == 1
    found = {}
    for name, dtype, _, _, is_output in problem.operands:
        size = stored_bytes(dtype) * each
        if name in MATRICES and not (first_pass and name not in ("x", "dout")):
            found[name] = Moved(size, is_output, True, times * (name not in unused))
        elif name in ("weight", "bias"):
            found[name] = Moved(size, False, False, (times - alone) * (forward or problem.need_dx))
        elif forward and name in ("rstd", "scale"):
            found[name.replace("scale", "scales")] = Moved(4, is_output, False, is_output)
    if not forward and not first_pass:
        last_block = config.finish == "last_block"  # dW or a row of partials, by two branches
        if problem.need_dweight and not last_block:
            found["partial"] = Moved(4 * each, True, False, times)
        if problem.extras.bias_dtype:
            found["bias_partial"] = Moved(4 * each, True, False, times)
    return found


def _traffic(problem: Problem, config: Config, kernel: KernelReport) -> Iterator[str]:
    """Widths and policies of the rows, and no policy on anything else."""
    goes_to, known = tensors(kernel), moves(problem, config, kernel.name)
    rows = {name for name, each in known.items() if each.is_row}
    policies = {"load": config.load_policy, "store": config.store_policy}
    wrong: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for one in kernel.asm:
        if (access := one.access) is None or one.offset not in goes_to:
            continue  # what is not in goes_to is never reached
        tensor = goes_to[one.offset]
        if not tensor:
            wrong[f"{one.text} goes to no argument that can be told"] += 1
        each = known.get(tensor)
        if each and each.is_output == (access.kind == "store"):
            to_lds = each.is_row and access.kind == "load" and config.path == "lds"
            width = _copy_bytes(config, kernel.arch) if to_lds else each.width
            moved[tensor] += access.size_bytes
            if access.size_bytes != width:
                said = f"by {access.size_bytes} bytes a lane, not {width}"
                wrong[f"{access.kind} of {tensor} {said}"] += 1
            if access.to_lds != to_lds:
                wrong[f"{access.kind} of {tensor} {'to' if access.to_lds else 'past'} LDS"] += 1
        elif set(tensor.split("|")) & rows:
            wrong[f"{access.kind} of {tensor}, which is no row to {access.kind}"] += 1
        if tensor not in rows:
            if access.nontemporal:
                wrong[f"{access.kind} of {tensor} with nt, which is for rows alone"] += 1
            continue
        policy = policies.get(access.kind, "default")
        if access.nontemporal != (policy == "stream"):
            said = "with nt" if access.nontemporal else "without nt"
            wrong[f"{access.kind} of {tensor} {said}, and {access.kind}_policy is {policy}"] += 1
    yield from (f"{fault} ({count} times)" for fault, count in wrong.items())
    for tensor, each in known.items():
        least = each.size_bytes * each.least
        if moved[tensor] < least:
            whole = "a row" if each.is_row else "it"
            yield f"{moved[tensor]} bytes of {tensor} a lane in all, and {whole} has {least}"


def _moved_again(problem: Problem, config: Config, kernel: KernelReport) -> Iterator[str]:
    """Rows that are read or stored more often than the path says.

    A path that keeps its rows moves one in an iteration of the row loop, ping-pong two, or one in a
    kernel without a loop. What a program does once, before that loop or after it, is left out: a
    ring's first rows and peeled iterations are there. Of `two_pass` the compiler unrolls as it
    likes, and so vectors that are read are held against those that are stored; where none are,
    those of x against those of dout.
    """
    goes_to, known = tensors(kernel), moves(problem, config, kernel.name)
    parts = [kernel.asm]
    if config.path != "two_pass":
        rows = {at for at, tensor in goes_to.items() if tensor in known and known[tensor].is_row}
        blocks = basic_blocks(kernel.asm)
        loops = [
            tuple(one for each in body for one in blocks[each].instructions)
            for body in natural_loops(blocks)
        ]
        parts = [part for part in loops if any(one.offset in rows for one in part)] or parts
    moved: Counter[str] = Counter()
    for one in itertools.chain.from_iterable(parts):
        if one.access and goes_to.get(one.offset) in known:
            moved[goes_to[one.offset]] += one.access.size_bytes
    vectors = {name: moved[name] // each.size_bytes for name, each in known.items()}
    for tensor, most in _most_vectors(problem, config, kernel.name, vectors).items():
        size = known[tensor].size_bytes
        if moved[tensor] > most * size:
            how = "stored" if known[tensor].is_output else "read"
            yield f"{tensor} is {how} again: {moved[tensor]} bytes a lane, not {most * size}"


def _most_vectors(
    problem: Problem, config: Config, kernel: str, moved: Mapping[str, int]
) -> dict[str, int]:
    """Vectors of each row tensor that a lane may move, by those of all tensors that it moves."""
    rows = {name: it for name, it in moves(problem, config, kernel).items() if it.is_row}
    if config.path != "two_pass":
        at_once = 2 if config.path == "pingpong" else 1
        return dict.fromkeys(rows, at_once * chunks(problem, config))
    if not rows:
        return {}
    tile = min(TILE_CHUNKS, chunks(problem, config))  # of the first pass
    if kernel == "rmsnorm_backward_rows":
        return dict.fromkeys(rows, tile)
    if kernel == "rmsnorm_forward":
        # a pass for a row's own scale has a loop of its own, which stores nothing; in it, as in the
        # last one, weight and bias go with x
        scaled = problem.extras.scale == "dynamic"
        beside = [moved[name] for name in ("weight", "bias") if name in moved]
        read = tile + min((1 + scaled) * moved["y"], *beside, 1 << 30)
        stored = moved["x"] - tile - scaled
    elif problem.need_dx:
        read, stored = moved["dx"], moved["x"]
    else:
        return {"x": moved["dout"], "dout": moved["x"]} if problem.need_dweight else {}
    return {name: stored if it.is_output else read for name, it in rows.items()}


def _fences(problem: Problem, config: Config, kernel: KernelReport) -> Iterator[str]:
    """What blocks tell each other, past the caches of the dies that they run on."""
    last_block = config.finish == "last_block" and problem.need_dweight
    if kernel.name == "rmsnorm_backward" and last_block:
        yield from last_block_faults(kernel, tensors(kernel), config.block // kernel.wave)
    if kernel.name == "rmsnorm_forward" and config.blocks_per_row > 1:
        yield from word_faults(kernel, tensors(kernel))


def _overlap(problem: Problem, config: Config, kernel: KernelReport) -> Iterator[str]:
    if kernel.name != f"rmsnorm_{problem.op}" or config.path not in ("lds", "pingpong"):
        return
    goes_to, covered = tensors(kernel), chunks(problem, config)
    rows = {name: it for name, it in moves(problem, config, kernel.name).items() if it.is_row}
    if config.path == "pingpong":
        read = {name: it for name, it in rows.items() if it.least and not it.is_output}
        row_loads = {at for at, tensor in goes_to.items() if tensor in read}
        loads = sum(covered * it.size_bytes // it.width for it in read.values())
        yield from pingpong_faults(kernel, row_loads, loads)
        return
    # a block of several rows may skip the stores of a row that does not exist, and then nothing
    # that it waits for is ever used; a wave may skip the last vectors of a row in any case
    stores: list[int] = []
    if config.rows_per_block > 1:
        whole = problem.cols % (config.threads_per_row * elements(problem, config)) == 0
        for name, it in rows.items():
            pieces = it.size_bytes // it.width
            written = [at for at, tensor in goes_to.items() if tensor == name and it.is_output]
            stores += [
                at for i, at in enumerate(written)
                if whole or i // pieces % covered < covered - 1
            ]  # fmt: skip
    copied = ring_tensors(problem)
    # what is added to dx is read once, with the rest that is read again
    reads = copied if not config.reread else 2 * copied - (problem.op == "backward") * (copied - 2)
    ring = Ring(
        config.stages,
        copies=covered * copied * config.vec // _copy_bytes(config, kernel.arch),
        stores=frozenset(stores),
        reads=covered * reads,
        read=f"ds_read_b{8 * config.vec}",
    )
    yield from ring_faults(kernel, ring)


def _copy_bytes(config: Config, arch: str) -> int:
    """Bytes that a lane copies to LDS at once: 12 and 16 are gfx950's alone, and none copies 8."""
    return 16 if arch == "gfx950" and config.vec == 16 else 4


def inert_knobs(problem: Problem, device: DeviceSpec, digests: Mapping[Config, str]) -> list[str]:
    """Pairs of configs that differ in one knob and do the same; [] if there are none.

    ``programs`` is the grid's alone: the code of two such configs is one, and so the grids must
    differ. Every other knob must change the code.

    Args:
        digests: :attr:`.offline.OfflineCode.code_digest` of each config, all of one compiler.
    """
    faults = []
    for knob in (each.name for each in fields(Config)):
        alike: dict[tuple[object, ...], list[Config]] = {}
        for config in digests:
            others = (getattr(config, each.name) for each in fields(Config) if each.name != knob)
            alike.setdefault(tuple(others), []).append(config)
        for one, other in (
            pair for each in alike.values() for pair in itertools.combinations(each, 2)
        ):
            if knob == "programs":
                inert = grid_programs(problem, one, device) == grid_programs(problem, other, device)
            else:
                inert = digests[one] == digests[other]
            if inert:
                faults.append(f"{knob} is inert: {one} and {other} do the same")
    return faults

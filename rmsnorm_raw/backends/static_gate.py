"""The static gate: what a config promises, held against the machine code that AMD's compiler made.

No device is needed, so this is the one proof of the gfx950 kernels that any machine can give. It
reads registers, LDS and spills; each memory operation with the tensor that it goes to, and whether
a row is moved again; how bf16 is rounded and lanes are added up; the fences between blocks
(:mod:`.fences`); and replays the row loops that are to overlap (:mod:`.overlap`).
:func:`gate` gives the faults of one config, :func:`inert_knobs` those of a set of configs whose
code is too much alike.

That a result is right, or fast, is not its subject: :mod:`rmsnorm_raw.check` and a device say that.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields

from rmsnorm_raw.backends.fences import last_block_faults, word_faults
from rmsnorm_raw.backends.flow import basic_blocks, natural_loops
from rmsnorm_raw.backends.kernel_report import SIMDS, KernelReport
from rmsnorm_raw.backends.offline import OfflineCode
from rmsnorm_raw.backends.overlap import Ring, pingpong_faults, ring_faults
from rmsnorm_raw.backends.provenance import memory_arguments
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN, DeviceSpec
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.space import (
    FINISH_BLOCK,
    TILE_CHUNKS,
    chunks,
    elements,
    grid_programs,
    lds_bytes,
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
}
#: the matrices: what is read and what is written a row at a time, and has a cache policy
READ, WRITTEN = ("x", "dout"), ("y", "dx")
#: e_flags of a code object: the processor in its low byte (LLVM, AMDGPU usage guide)
E_FLAGS, PROCESSOR = 0x30, {"gfx942": 0x4C, "gfx950": 0x4F}
#: shuffles through LDS hardware, about 50 cycles each; DPP and permlane swaps do the same in VALU
SHUFFLES = ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32")


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
            _arithmetic(problem, config, kernel),
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
    threads = FINISH_BLOCK if kernel.name == "rmsnorm_dweight" else config.block
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
    names = dict(enumerate(ARGUMENTS.get(kernel.name, "").split()))
    by_offset = {
        f"+{each.offset}": names.get(each.number, f"argument {each.number}")
        for each in kernel.pointers
    }
    return {
        at: "|".join(sorted(by_offset[each] for each in found))
        for at, found in memory_arguments(kernel).items()
    }


def _traffic(problem: Problem, config: Config, kernel: KernelReport) -> Iterator[str]:
    """Widths and policies of the rows, and no policy on anything else."""
    goes_to = tensors(kernel)
    copy_bytes = _copy_bytes(config, kernel.arch)
    policies = {"load": config.load_policy, "store": config.store_policy}
    widths = {"load": copy_bytes if config.path == "lds" else config.vec, "store": config.vec}
    wrong: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for one in kernel.asm:
        if (access := one.access) is None or one.offset not in goes_to:
            continue  # what is not in goes_to is never reached
        tensor = goes_to[one.offset]
        if not tensor:
            wrong[f"{one.text} goes to no argument that can be told"] += 1
        rows = tensor in READ if access.kind == "load" else tensor in WRITTEN
        if not rows:
            if set(tensor.split("|")) & {*READ, *WRITTEN}:
                wrong[f"{access.kind} of {tensor}, which is no row to {access.kind}"] += 1
            if access.nontemporal:
                wrong[f"{access.kind} of {tensor} with nt, which is for rows alone"] += 1
            continue
        moved[tensor] += access.size_bytes
        policy, width = policies[access.kind], widths[access.kind]
        if access.size_bytes != width:
            wrong[
                f"{access.kind} of {tensor} by {access.size_bytes} bytes a lane, not {width}"
            ] += 1
        if access.nontemporal != (policy == "stream"):
            said = "with nt" if access.nontemporal else "without nt"
            wrong[f"{access.kind} of {tensor} {said}, and {access.kind}_policy is {policy}"] += 1
        if access.to_lds != (access.kind == "load" and config.path == "lds"):
            wrong[f"{access.kind} of {tensor} {'to' if access.to_lds else 'past'} LDS"] += 1
    yield from (f"{fault} ({count} times)" for fault, count in wrong.items())
    for tensor in _row_tensors(problem, kernel.name):
        least = config.vec * (1 if config.path == "two_pass" else chunks(problem, config))
        if moved[tensor] < least:
            yield f"{moved[tensor]} bytes of {tensor} a lane in all, and a row has {least}"


def _moved_again(problem: Problem, config: Config, kernel: KernelReport) -> Iterator[str]:
    """Rows that are read or stored more often than the path says.

    A path that keeps its rows moves one in an iteration of the row loop, ping-pong two, or one in a
    kernel without a loop. What a program does once, before that loop or after it, is left out: a
    ring's first rows and peeled iterations are there. Of `two_pass` the compiler unrolls as it
    likes, and so bytes that are read are held against those that are stored; where none are, those
    of x against those of dout.
    """
    goes_to = tensors(kernel)
    row_tensors = _row_tensors(problem, kernel.name)
    rows = {at: tensor for at, tensor in goes_to.items() if tensor in row_tensors}
    parts = [kernel.asm]
    if config.path != "two_pass":
        blocks = basic_blocks(kernel.asm)
        loops = [
            tuple(one for each in body for one in blocks[each].instructions)
            for body in natural_loops(blocks)
        ]
        parts = [part for part in loops if any(one.offset in rows for one in part)] or parts
    moved: Counter[str] = Counter()
    for one in itertools.chain.from_iterable(parts):
        if one.access and one.offset in rows:
            moved[rows[one.offset]] += one.access.size_bytes
    for tensor, most in _most_moved(problem, config, kernel.name, moved).items():
        if moved[tensor] > most:
            how = "stored" if tensor in WRITTEN else "read"
            yield f"{tensor} is {how} again: {moved[tensor]} bytes a lane, not {most}"


def _most_moved(
    problem: Problem, config: Config, kernel: str, moved: Mapping[str, int]
) -> dict[str, int]:
    """Bytes of each row tensor that a lane may move."""
    row_tensors = _row_tensors(problem, kernel)
    if config.path != "two_pass":
        rows = 2 if config.path == "pingpong" else 1
        return dict.fromkeys(row_tensors, rows * chunks(problem, config) * config.vec)
    tile = min(TILE_CHUNKS, chunks(problem, config)) * config.vec  # of the first pass
    if kernel == "rmsnorm_forward":
        return {"x": moved["y"] + tile, "y": moved["x"] - tile}
    if kernel == "rmsnorm_backward_rows":
        return dict.fromkeys(row_tensors, tile)
    if problem.need_dx:
        return {"x": moved["dx"], "dout": moved["dx"], "dx": moved["x"]}
    return {"x": moved["dout"], "dout": moved["x"]}


def _fences(problem: Problem, config: Config, kernel: KernelReport) -> Iterator[str]:
    """What blocks tell each other, past the caches of the dies that they run on."""
    last_block = config.finish == "last_block" and problem.need_dweight
    if kernel.name == "rmsnorm_backward" and last_block:
        yield from last_block_faults(kernel, tensors(kernel), config.block // kernel.wave)
    if kernel.name == "rmsnorm_forward" and config.blocks_per_row > 1:
        yield from word_faults(kernel, tensors(kernel))


def _row_tensors(problem: Problem, kernel: str) -> Iterable[str]:
    """The matrices that a kernel is about."""
    if kernel == "rmsnorm_forward":
        return ("x", "y")
    if kernel in ("rmsnorm_backward", "rmsnorm_backward_columns"):
        return ("x", "dout", "dx") if problem.need_dx else ("x", "dout")
    if kernel == "rmsnorm_backward_rows":  # not launched where nothing of a row is to be found
        return ("x", "dout") if problem.need_dx else () if problem.has_rstd else ("x",)
    return ()


def _arithmetic(problem: Problem, config: Config, kernel: KernelReport) -> Iterator[str]:
    """How bf16 is rounded, and how lanes are added up."""
    goes_to = tensors(kernel)
    rows = sum(
        one.access.kind == "store" and goes_to.get(one.offset) in WRITTEN
        for one in kernel.asm
        if one.access
    )
    bf16 = problem.dtype == "bfloat16"
    each = elements(problem, config)
    packed = kernel.mix["v_cvt_pk_bf16_f32"]
    if kernel.arch == "gfx950":
        wanted = rows * -(-each // 2) * bf16
        if packed < wanted:
            yield f"{packed} v_cvt_pk_bf16_f32 for {wanted} pairs of bf16 that are stored"
    else:
        # to nearest even, by hand: the bit that decides a tie, and the carry that it makes
        by_hand = sum(bool(re.match(r"v_bfe_u32 .*, 16, 1$", one.text)) for one in kernel.asm)
        carries = sum(one.mnemonic == "v_add3_u32" for one in kernel.asm)
        wanted = rows * each * bf16
        if min(by_hand, carries) < wanted:
            yield f"{min(by_hand, carries)} bf16 are rounded, and {wanted} are stored"
    shuffles = sum(kernel.mix[name] for name in SHUFFLES)
    if shuffles:
        yield f"{shuffles} shuffles through LDS, where DPP would do"
    if kernel.name not in ("rmsnorm_forward_clear", "rmsnorm_backward_columns"):
        sums = problem.op == "forward" or problem.need_dx or not problem.has_rstd
        if (sums or kernel.name == "rmsnorm_dweight") and not kernel.mix["dpp"]:
            yield "lanes are added up without DPP"


def _overlap(problem: Problem, config: Config, kernel: KernelReport) -> Iterator[str]:
    if kernel.name != f"rmsnorm_{problem.op}" or config.path not in ("lds", "pingpong"):
        return
    names = READ if problem.op == "backward" else READ[:1]
    goes_to, covered = tensors(kernel), chunks(problem, config)
    vectors = covered * len(names)
    if config.path == "pingpong":
        row_loads = {at for at, tensor in goes_to.items() if tensor in names}
        yield from pingpong_faults(kernel, row_loads, vectors)
        return
    # a block of several rows may skip the stores of a row that does not exist, and then nothing
    # that it waits for is ever used; a wave may skip the last vectors of a row in any case
    stores: list[int] = []
    if config.rows_per_block > 1:
        whole = problem.cols % (config.threads_per_row * elements(problem, config)) == 0
        written = [at for at, tensor in goes_to.items() if tensor in WRITTEN]
        stores = [at for i, at in enumerate(written) if whole or i % covered < covered - 1]
    ring = Ring(
        config.stages,
        copies=vectors * config.vec // _copy_bytes(config, kernel.arch),
        stores=frozenset(stores),
        reads=vectors * (2 if config.reread else 1),
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

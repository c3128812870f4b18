"""How numbers are rounded to what is stored, and how lanes are added up, in gfx9 machine code."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping

from rmsnorm_raw.backends.flow import Block, basic_blocks, reverse_postorder
from rmsnorm_raw.backends.isa import Instruction, operands
from rmsnorm_raw.backends.kernel_report import KernelReport
from rmsnorm_raw.config import Config
from rmsnorm_raw.dtypes import LARGEST_FP8, stored_bytes
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.space import elements, sums_rows

#: shuffles through LDS hardware, about 50 cycles each; DPP and permlane swaps do the same in VALU
SHUFFLES = ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32")
CONVERT_FP8 = "v_cvt_pk_fp8_f32"
#: what picks the smaller or the larger of two numbers, or one by a comparison
_CHOICE = re.compile(r"v_(cndmask_b32|min_f32|max_f32|med3_f32)(_e32|_e64)? ")
_MOVE = re.compile(r"[sv]_mov_b32(_e32)? [sv]\d+, \S+$")

#: of each register, the bounds that its number is held to, and which of them it is
Held = dict[str, frozenset[str]]
_NOTHING: frozenset[str] = frozenset()
_ALL = frozenset(("above", "below"))


def arithmetic_faults(
    problem: Problem, config: Config, kernel: KernelReport, goes_to: Mapping[int, str]
) -> Iterator[str]:
    """What is wrong with a kernel's roundings and sums.

    Args:
        goes_to: the tensor of each memory operation, by offset.
    """
    yield from _bf16_faults(problem, config, kernel, goes_to)
    yield from _fp8_faults(problem, kernel, goes_to)
    if shuffles := sum(kernel.mix[name] for name in SHUFFLES):
        yield f"{shuffles} shuffles through LDS, where DPP would do"
    if _adds_lanes_up(problem, kernel.name) and not kernel.mix["dpp"]:
        yield "lanes are added up without DPP"


def _adds_lanes_up(problem: Problem, kernel: str) -> bool:
    """Whether a kernel has a sum over lanes that is used for anything."""
    if kernel == "rmsnorm_backward":
        return problem.need_dx or (problem.need_dweight and not problem.has_rstd)
    if kernel == "rmsnorm_backward_rows":
        return sums_rows(problem)
    return kernel not in ("rmsnorm_forward_clear", "rmsnorm_backward_columns")


def _stored(
    problem: Problem, kernel: KernelReport, goes_to: Mapping[int, str], dtype: str, at_once: int
) -> int:
    """Roundings, of so many numbers at once, to all matrices of a dtype that a lane stores.

    dx and dresidual are the same numbers: of one dtype, they are rounded once.
    """
    made: dict[str, int] = {}
    for operand in problem.operands:
        if operand.is_output and operand.is_matrix and operand.dtype == dtype:
            number = "dx" if problem.op == "backward" else operand.name
            count = sum(
                -(-one.access.size_bytes // (at_once * stored_bytes(dtype)))
                for one in kernel.asm
                if one.access and one.access.kind == "store"
                if goes_to.get(one.offset) == operand.name
            )
            made[number] = max(count, made.get(number, 0))
    return sum(made.values())


def _bf16_faults(
    problem: Problem, config: Config, kernel: KernelReport, goes_to: Mapping[int, str]
) -> Iterator[str]:
    """One instruction for a pair on gfx950; by hand, and to nearest even, on gfx942."""
    at_once = 2 if kernel.arch == "gfx950" else 1
    wanted = _stored(problem, kernel, goes_to, "bfloat16", at_once)
    what = "that are stored"
    if problem.extras.casting == "llama" and problem.dtype == "bfloat16":
        # and once more, ahead of the weight, for each vector of y
        y_bytes = elements(problem, config) * stored_bytes(problem.out_dtype)
        y = sum(
            one.access.size_bytes
            for one in kernel.asm
            if one.access and one.access.kind == "store" and goes_to.get(one.offset) == "y"
        )
        wanted += y // y_bytes * -(-elements(problem, config) // at_once)
        what = "that are stored or weighted"
    if kernel.arch == "gfx950":
        packed = kernel.mix["v_cvt_pk_bf16_f32"]
        if packed < wanted:
            yield f"{packed} v_cvt_pk_bf16_f32 for {wanted} pairs of bf16 {what}"
        return
    # the bit that decides a tie, and the carry that it makes
    by_hand = sum(bool(re.match(r"v_bfe_u32 .*, 16, 1$", one.text)) for one in kernel.asm)
    carries = sum(one.mnemonic == "v_add3_u32" for one in kernel.asm)
    if min(by_hand, carries) < wanted:
        yield f"{min(by_hand, carries)} bf16 are rounded, and {wanted} {what.removeprefix('that ')}"


# ---- 8-bit floats --------------------------------------------------------------------------------


def _fp8_faults(
    problem: Problem, kernel: KernelReport, goes_to: Mapping[int, str]
) -> Iterator[str]:
    """One instruction for a pair, of numbers that were held to the dtype's largest before.

    The instruction alone does not promise to hold them; AMD's own headers clamp ahead of it, too.
    """
    most = LARGEST_FP8.get(problem.out_dtype)
    if most is None:
        return
    wanted = _stored(problem, kernel, goes_to, problem.out_dtype, 2)
    converted = [one for one in kernel.asm if one.mnemonic == CONVERT_FP8]
    if len(converted) < wanted:
        yield f"{len(converted)} {CONVERT_FP8} for {wanted} pairs of fp8 that are stored"
    if loose := _not_held(kernel, most):
        yield f"{loose} numbers go to {CONVERT_FP8} and are not held to +-{most:g}"


def _not_held(kernel: KernelReport, most: float) -> int:
    """Numbers that reach a conversion to fp8 past a choice with one of the bounds."""
    literals = {_bits(most): _ALL | {"is above"}, _bits(-most): _ALL | {"is below"}}
    blocks = basic_blocks(kernel.asm)
    order = reverse_postorder(blocks)
    entry: dict[int, Held] = {order[0]: {}}
    loose: dict[int, int] = {}
    settled = False
    while not settled:
        settled = True
        for each in order:
            held = dict(entry[each])
            for one in blocks[each].instructions:
                if one.mnemonic == CONVERT_FP8:
                    packed = _numbers(one, held, literals)[:2]
                    loose[one.offset] = sum(not number >= _ALL for number in packed)
                _hold(one, held, literals)
            settled = _meet(blocks[each], held, entry) and settled
    return sum(loose.values())


def _bits(value: float) -> str:
    """A number of float32 as the disassembler prints it."""
    return f"0x{struct.unpack('<I', struct.pack('<f', value))[0]:x}"


def _numbers(
    one: Instruction, held: Held, literals: Mapping[str, frozenset[str]]
) -> list[frozenset[str]]:
    """What is known of an instruction's numbers, in their order."""
    words = (word.strip() for word in one.text.partition(",")[2].split(","))
    return [_ALL if word == "0" else literals.get(word, held.get(word, _NOTHING)) for word in words]


def _hold(one: Instruction, held: Held, literals: Mapping[str, frozenset[str]]) -> None:
    """Carries over one instruction what is known to be held to which bound."""
    known = _NOTHING
    if found := _CHOICE.match(one.text):
        numbers = _numbers(one, held, literals)[: 3 if found[1] == "med3_f32" else 2]
        bounds = {mark.removeprefix("is ") for mark in _NOTHING.union(*numbers) - _ALL}
        known = _ALL.intersection(*numbers) | bounds
    elif _MOVE.match(one.text):
        known = _numbers(one, held, literals)[0]
    for register in operands(one.text).results:
        held[register] = known


def _meet(block: Block, held: Held, entry: dict[int, Held]) -> bool:
    """Keeps, where branches meet, what all of them hold; whether that was known."""
    known = True
    for follower in block.followers:
        if follower not in entry:
            entry[follower], known = dict(held), False
            continue
        before = entry[follower]
        for register, bounds in before.items():
            both = bounds & held.get(register, _NOTHING)
            known = known and both == bounds
            before[register] = both
    return known

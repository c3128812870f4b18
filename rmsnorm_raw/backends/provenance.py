"""Which argument of a kernel each memory operation of gfx9 machine code goes to.

A pointer is followed from where the kernel loads its arguments, through every instruction, to the
addresses that are made of it, over branches and loops. What is loaded from memory is followed no
further: a kernel here takes no address from memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from rmsnorm_raw.backends.flow import basic_blocks, reverse_postorder
from rmsnorm_raw.backends.isa import Instruction, operands
from rmsnorm_raw.backends.kernel_report import KernelReport

#: registers that hold the address of the arguments when a kernel begins: the first that a wave is
#: given, where it wants neither a dispatch packet nor a queue (LLVM, AMDGPU usage guide)
ARGUMENTS_AT = ("s0", "s1")
#: follows the address of the arguments, as others follow the arguments themselves
_ARGUMENTS = "arguments"

State = dict[str, frozenset[str]]
NOTHING: frozenset[str] = frozenset()


def memory_arguments(kernel: KernelReport) -> dict[int, frozenset[str]]:
    """The offset of each memory operation, with the pointers that its address is made of.

    They are named by their offset among the arguments, as "+16". Scalar loads are left out.
    """
    blocks = basic_blocks(kernel.asm)
    order = reverse_postorder(blocks)
    pointers = {
        each.offset + 4 * half: f"+{each.offset}" for each in kernel.pointers for half in (0, 1)
    }
    start: State = dict.fromkeys(ARGUMENTS_AT, frozenset((_ARGUMENTS,)))
    entry: dict[int, State] = {order[0]: start}
    found: dict[int, frozenset[str]] = {}
    settled = False
    while not settled:
        settled = True
        for each in order:
            state = dict(entry.get(each, {}))
            for one in blocks[each].instructions:
                _follow(one, state, pointers, found)
            for follower in blocks[each].followers:
                settled = _merge(entry.setdefault(follower, {}), state) and settled
    return found


def _follow(
    one: Instruction, state: State, pointers: Mapping[int, str], found: dict[int, frozenset[str]]
) -> None:
    """Carries the state over one instruction; notes what its address is made of."""
    results, sources, address, lower = operands(one.text)
    reached = NOTHING.union(*(state.get(register, NOTHING) for register in sources))
    if one.access is not None:
        made_of = NOTHING.union(*(state.get(register, NOTHING) for register in address))
        found[one.offset] = found.get(one.offset, NOTHING) | (made_of - {_ARGUMENTS})
        reached = NOTHING
    elif one.mnemonic.startswith("s_load"):
        arguments = _ARGUMENTS in reached
        at = int(one.text.split(",")[-1].split()[0], 0) if arguments else 0
        for i, register in enumerate(results):
            name = pointers.get(at + 4 * i) if arguments else None
            state[register] = frozenset((name,)) if name else NOTHING
        return
    elif one.mnemonic.startswith("ds_"):
        reached = NOTHING
    below = reached
    if lower is not None:
        below = NOTHING.union(*(state.get(register, NOTHING) for register in lower))
    for i, register in enumerate(results):
        state[register] = reached if i else below


def _merge(into: State, state: State) -> bool:
    """Adds what is true at a branch's end; whether that was known."""
    known = True
    for register, names in state.items():
        if not names <= into.get(register, NOTHING):
            into[register] = into.get(register, NOTHING) | names
            known = False
    return known

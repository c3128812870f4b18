"""Reading gfx9 machine code: what each instruction does, what is in flight, where the loops are.

Pure Python over disassembly; :mod:`.offline` supplies the text. Everything here holds for gfx942
and gfx950, whose loads, copies to LDS and stores retire in order through one counter, ``vmcnt``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

#: the counter has six bits; with more in flight the issue stalls
MAX_VMCNT = 63

_VMEM = re.compile(
    r"(?P<space>global|buffer|flat|scratch)_(?P<kind>load|store|atomic)_(?P<lds>lds_)?(?P<format>\w+)"
)
_COUNT = re.compile(r"s_waitcnt .*\bvmcnt\((\d+)\)")
_FORMAT_BYTES = re.compile(r"(?P<dwords>dword)(x(?P<count>[234]))?|[us]?(?P<short>short)|[us]?byte")


class Access(NamedTuple):
    """What one vector-memory instruction does, for each lane.

    Attributes:
        space: "global", "buffer", "flat" or "scratch".
        kind: "load", "store" or "atomic".
        size_bytes: bytes a lane moves; 0 for atomics.
        to_lds: a copy that lands in LDS and not in registers.
        nontemporal: it carries the ``nt`` bit.
    """

    space: str
    kind: str
    size_bytes: int
    to_lds: bool
    nontemporal: bool

    def __str__(self) -> str:
        size = f" {self.size_bytes} B" if self.size_bytes else ""
        return f"{self.space} {self.kind}{' to LDS' * self.to_lds}{size}{' nt' * self.nontemporal}"


class Instruction(NamedTuple):
    """One instruction: bytes from its kernel's start, and the text that comgr prints."""

    offset: int
    text: str

    @property
    def mnemonic(self) -> str:
        """The first word, without the suffix of its encoding (_e32, _e64)."""
        return re.sub(r"_e(32|64)$", "", self.text.split(maxsplit=1)[0])

    @property
    def access(self) -> Access | None:
        """The vector-memory operation that it is, or None. Cache maintenance is none."""
        found = _VMEM.match(self.text)
        if found is None:
            return None
        words = self.text.split()
        kind, size_bytes = found["kind"], 0
        if kind != "atomic":
            width = _FORMAT_BYTES.match(found["format"])
            if width is None:
                raise ValueError(f"the width of {self.text!r} is not known")
            unit = 4 if width["dwords"] else 2 if width["short"] else 1
            size_bytes = unit * int(width["count"] or 1)
        to_lds = found["lds"] is not None or "lds" in words
        return Access(found["space"], kind, size_bytes, to_lds, "nt" in words)

    @property
    def agent_scope(self) -> bool:
        """Whether it reads or writes past what one die caches: it carries the ``sc1`` bit.

        That is what makes a load or a store an atomic one of agent scope; for an atomic that
        returns a value, as for a number that blocks take, agent scope is no bit at all (LLVM,
        AMDGPU usage guide, memory model of gfx942).
        """
        return "sc1" in self.text.split()

    @property
    def vmcnt(self) -> int | None:
        """The operations that an ``s_waitcnt`` lets stay in flight; None if it waits for none."""
        found = _COUNT.match(self.text)
        return int(found[1]) if found else None

    @property
    def branch_target(self) -> int | None:
        """The offset that a branch goes to: a signed count of 4-byte words after the branch."""
        found = re.fullmatch(r"s_c?branch\w* (\d+)", self.text)
        if found is None:
            return None
        words = int(found[1])
        return self.offset + 4 + 4 * (words - (words >> 15 << 16))

    @property
    def group(self) -> str:
        """The kind that :attr:`.kernel_report.KernelReport.mix` counts it as."""
        name = self.mnemonic
        if (access := self.access) is not None:
            return str(access)
        if name.endswith("_dpp"):
            return "dpp"
        if name.startswith(("ds_", "v_cvt_")):
            return name
        for start, group in _GROUPS:
            if name.startswith(start):
                return group
        return name


_GROUPS = (
    ("v_permlane", "permlane"), ("v_read", "read lane"), ("v_", "vector"), ("s_barrier", "barrier"),
    ("s_waitcnt", "wait"), ("s_load_", "scalar load"), ("s_", "scalar"),
)  # fmt: skip


def replay(
    instructions: Sequence[Instruction], *, loop: bool
) -> Iterator[tuple[Instruction, tuple[Instruction, ...]]]:
    """Each instruction with the vector-memory operations in flight before it, oldest first.

    A wait for ``vmcnt(N)`` retires all but the N youngest. Every instruction is taken to run, so
    what lies behind a mask counts, and both sides of a branch do.

    Args:
        loop: go round again until a pass starts with what the one before it started with.
    """
    flying: list[Instruction] = []
    for _ in range(MAX_VMCNT if loop else 1):
        at_top = flying.copy()
        for instruction in instructions:
            yield instruction, tuple(flying)
            if (count := instruction.vmcnt) is not None:
                del flying[: max(0, len(flying) - count)]
            elif instruction.access is not None:
                flying.append(instruction)
                del flying[:-MAX_VMCNT]
        if flying == at_top:
            return


class Wait(NamedTuple):
    """A wait by ``vmcnt``, and what is in flight before it, oldest first.

    Attributes:
        instruction: the ``s_waitcnt``.
        ends: the operations that it waits for.
        leaves: those that may stay in flight.
    """

    instruction: Instruction
    ends: tuple[Instruction, ...]
    leaves: tuple[Instruction, ...]


def waits(instructions: Sequence[Instruction], *, loop: bool) -> tuple[Wait, ...]:
    """The waits by ``vmcnt``, with what is in flight once a loop has settled.

    Args:
        loop: the instructions are a loop's body; operations of the iterations before it count.
    """
    settled = {}
    for instruction, flying in replay(instructions, loop=loop):
        if instruction.vmcnt is not None:
            ended = max(0, len(flying) - instruction.vmcnt)
            settled[instruction.offset] = Wait(instruction, flying[:ended], flying[ended:])
    return tuple(settled.values())


def bytes_before_first_wait(instructions: Sequence[Instruction], *, loop: bool) -> int:
    """The most bytes of loads that a lane has in flight when a wait needs one of them.

    Weight loads in flight at that moment count too: machine code does not tell them from row loads.

    Args:
        loop: as in :func:`waits`.
    """
    return max(
        (
            sum(map(_load_bytes, wait.ends + wait.leaves))
            for wait in waits(instructions, loop=loop)
            if any(map(_load_bytes, wait.ends))
        ),
        default=0,
    )


def loops(instructions: Sequence[Instruction]) -> list[tuple[Instruction, ...]]:
    """The bodies of the natural loops, in the order in which they run.

    By dominators, since the layout misleads: the compiler enters loops in their middle, and moves
    blocks behind a mask out of line, from where they branch backward without being a loop. Of waits
    that a branch chooses between, the loosest is kept: an LDS ring waits for fewer operations once
    its first rows, which have no stores before them, are done.
    """
    blocks = _blocks(instructions)
    order = _reverse_postorder(blocks)
    before: dict[int, list[int]] = {each: [] for each in order}
    for each in order:
        for follower in blocks[each].followers:
            before[follower].append(each)
    dominators = {each: set(order) for each in order} | {order[0]: {order[0]}}
    settled = False
    while not settled:
        settled = True
        for each in order[1:]:
            found = {each}.union(set.intersection(*(dominators[one] for one in before[each])))
            settled = settled and found == dominators[each]
            dominators[each] = found
    members: dict[int, set[int]] = {}
    for last in order:
        for head in blocks[last].followers:
            if head in dominators[last]:
                body = members.setdefault(head, {head})
                waiting = [last]
                while waiting:
                    each = waiting.pop()
                    if each not in body:
                        body.add(each)
                        waiting += before[each]
    return [
        _settled_body([each for each in order if each in body], blocks) for body in members.values()
    ]


def _settled_body(body: Sequence[int], blocks: Mapping[int, _Block]) -> tuple[Instruction, ...]:
    """The instructions of a loop's blocks, without the tighter of waits that exclude each other.

    Such waits stand in blocks that an iteration can avoid, one after the other, with scalar
    instructions between them at most.
    """
    kept: list[Instruction] = []
    # of such waits the one that is kept so far: its block, its count, itself
    choice: tuple[int, int, Instruction] | None = None
    for each in body:
        avoidable = _can_avoid(each, body, blocks)
        for one in blocks[each].instructions:
            if (count := one.vmcnt) is not None and avoidable:
                if choice is not None and choice[0] != each:
                    if choice[1] >= count:
                        continue
                    kept.remove(choice[2])
                choice = each, count, one
            elif one.group not in ("scalar", "wait"):
                choice = None
            kept.append(one)
    return tuple(kept)


def _can_avoid(block: int, body: Sequence[int], blocks: Mapping[int, _Block]) -> bool:
    """Whether an iteration can go round without a block. Lanes are never all masked off."""
    head, seen, waiting = body[0], {block}, [body[0]]
    while waiting:
        each = waiting.pop()
        if each in seen or each not in body:
            continue
        seen.add(each)
        followers = blocks[each].followers
        skip = blocks[each].instructions[-1].mnemonic
        if skip == "s_cbranch_execz":
            followers = followers[1:]
        elif skip == "s_cbranch_execnz":
            followers = followers[:1]
        if head in followers:
            return True
        waiting += followers
    return False


class _Block(NamedTuple):
    instructions: Sequence[Instruction]
    followers: tuple[int, ...]  # a branch's target first


def _blocks(instructions: Sequence[Instruction]) -> dict[int, _Block]:
    """The basic blocks by the offset of their first instruction."""
    starts = {instructions[0].offset}
    for instruction, following in itertools.pairwise(instructions):
        if (target := instruction.branch_target) is not None:
            starts |= {target, following.offset}
    at = [i for i, instruction in enumerate(instructions) if instruction.offset in starts]
    blocks = {}
    for first, after in itertools.pairwise((*at, len(instructions))):
        last = instructions[after - 1]
        followers = [] if last.branch_target is None else [last.branch_target]
        if last.mnemonic not in ("s_branch", "s_endpgm") and after < len(instructions):
            followers.append(instructions[after].offset)
        blocks[instructions[first].offset] = _Block(instructions[first:after], tuple(followers))
    return blocks


def _reverse_postorder(blocks: Mapping[int, _Block]) -> list[int]:
    """Offsets of the blocks that are reached, each before those that follow it on the way down."""
    first = next(iter(blocks))
    done: list[int] = []
    seen = {first}
    stack = [(first, iter(blocks[first].followers))]
    while stack:
        offset, followers = stack[-1]
        follower = next((each for each in followers if each not in seen), None)
        if follower is None:
            done.append(offset)
            stack.pop()
        else:
            seen.add(follower)
            stack.append((follower, iter(blocks[follower].followers)))
    return done[::-1]


def find_row_loop(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The body of the loop over rows (or over a row's tiles); () in a kernel without one.

    It is an innermost loop with loads or copies to LDS. Where such loops are several, one that
    stores outputs goes first, and then the one that loads the most: a remainder loop loads less
    than the unrolled one before it. A loop that only asks for another block's word is none.
    """
    loading = [
        body
        for body in loops(instructions)
        if any(_load_bytes(each) and not each.agent_scope for each in body)
    ]
    inner = [body for body in loading if not any(set(one) < set(body) for one in loading)]

    def rank(body: tuple[Instruction, ...]) -> tuple[bool, int]:
        return any(map(_is_store, body)), sum(map(_load_bytes, body))

    return max(inner, key=rank, default=())


def _load_bytes(instruction: Instruction) -> int:
    access = instruction.access
    return access.size_bytes if access and access.kind == "load" else 0


def _is_store(instruction: Instruction) -> bool:
    access = instruction.access
    return access is not None and access.kind == "store"

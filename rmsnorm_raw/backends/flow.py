"""Control flow of gfx9 machine code: basic blocks, loops, and the way through the loop over rows.

Pure Python over :mod:`.isa`'s instructions.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from rmsnorm_raw.backends.isa import Instruction, is_store, load_bytes, operands


def loops(instructions: Sequence[Instruction]) -> list[tuple[Instruction, ...]]:
    """The bodies of the natural loops, in the order in which they run.

    By dominators, since the layout misleads: the compiler enters loops in their middle, and moves
    blocks behind a mask out of line, from where they branch backward without being a loop. Of waits
    that a branch chooses between, the loosest is kept: an LDS ring waits for fewer operations once
    its first rows, which have no stores before them, are done.
    """
    blocks = basic_blocks(instructions)
    return [_without_choice(body, blocks) for body in natural_loops(blocks)]


def natural_loops(blocks: Mapping[int, Block]) -> list[list[int]]:
    """The blocks of each natural loop, its head first, in the order in which they run."""
    order = reverse_postorder(blocks)
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
    return [[each for each in order if each in body] for body in members.values()]


def _without_choice(
    body: Sequence[int], blocks: Mapping[int, Block], *, loosest: bool = True
) -> tuple[Instruction, ...]:
    """The instructions of a loop's blocks, with one of the waits that exclude each other.

    Such waits stand in blocks that an iteration can avoid, one after the other, with scalar
    instructions between them at most.

    Args:
        loosest: keep the one that leaves the most in flight, otherwise the least.
    """
    kept: list[Instruction] = []
    # of such waits the one that is kept so far: its block, its count, itself
    choice: tuple[int, int, Instruction] | None = None
    for each in body:
        avoidable = _goes_round(body, blocks, without=(each,))
        for one in blocks[each].instructions:
            if (count := one.vmcnt) is not None and avoidable:
                if choice is not None and choice[0] != each:
                    if (choice[1] >= count) is loosest:
                        continue
                    kept.remove(choice[2])
                choice = each, count, one
            elif one.group not in ("scalar", "wait"):
                choice = None
            kept.append(one)
    return tuple(kept)


def _goes_round(
    body: Sequence[int],
    blocks: Mapping[int, Block],
    *,
    without: Collection[int],
    lanes_off: bool = False,
) -> bool:
    """Whether an iteration of a loop can go round past none of some blocks."""
    outside = blocks.keys() - set(body)
    return _goes(body[0], body[0], blocks, without=outside | set(without), lanes_off=lanes_off)


def _goes(
    start: int, goal: int, blocks: Mapping[int, Block], *, without: Collection[int], lanes_off: bool
) -> bool:
    """Whether a wave can go from the head of a block to another's past none of some blocks.

    Args:
        lanes_off: it may skip what is behind a mask, because all its lanes may be off.
    """
    seen, waiting = set(without), [start]
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        followers = blocks[each].followers
        skip = blocks[each].instructions[-1].mnemonic
        if skip == "s_cbranch_execz" and not lanes_off:
            followers = followers[1:]
        elif skip == "s_cbranch_execnz" and not lanes_off:
            followers = followers[:1]
        if goal in followers:
            return True
        waiting += followers
    return False


class Block(NamedTuple):
    """Instructions that run one after the other, and the offsets of the blocks that follow."""

    instructions: Sequence[Instruction]
    followers: tuple[int, ...]  # a branch's target first


def basic_blocks(instructions: Sequence[Instruction]) -> dict[int, Block]:
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
        blocks[instructions[first].offset] = Block(instructions[first:after], tuple(followers))
    return blocks


def reverse_postorder(blocks: Mapping[int, Block]) -> list[int]:
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
    blocks = basic_blocks(instructions)
    return _without_choice(_row_loop(blocks), blocks)


def _row_loop(blocks: Mapping[int, Block]) -> list[int]:
    bodies: dict[tuple[int, ...], list[Instruction]] = {
        tuple(body): [one for each in body for one in blocks[each].instructions]
        for body in natural_loops(blocks)
    }
    loading = [
        body
        for body, instructions in bodies.items()
        if any(load_bytes(each) and not each.agent_scope for each in instructions)
    ]
    inner: list[tuple[int, ...]] = [
        body for body in loading if not any(set(one) < set(body) for one in loading)
    ]

    def rank(body: tuple[int, ...]) -> tuple[bool, int]:
        return any(map(is_store, bodies[body])), sum(map(load_bytes, bodies[body]))

    if not inner:
        return []
    best = max(inner, key=rank)
    return list(best)


class RowPath(NamedTuple):
    """What a wave runs, in order, of a kernel with a loop over rows.

    Attributes:
        before: the loop.
        first: an iteration among the first, which wait the tightest.
        settled: a later one, which waits the loosest.
        after: the loop.
        unwaited: an iteration can go round without any wait by ``vmcnt``.
    """

    before: tuple[Instruction, ...]
    first: tuple[Instruction, ...]
    settled: tuple[Instruction, ...]
    after: tuple[Instruction, ...]
    unwaited: bool


def row_path(
    instructions: Sequence[Instruction], *, all_runs: bool, surely: Collection[int] = ()
) -> RowPath | None:
    """The way through the loop over rows; None in a kernel without one.

    Args:
        all_runs: what is behind a mask or a branch runs. Otherwise the memory operations there do
            not, as in a wave whose lanes it does not concern; the waits there do.
        surely: offsets of operations that run all the same.
    """
    blocks = basic_blocks(instructions)
    body = _row_loop(blocks)
    if not body:
        return None
    order = reverse_postorder(blocks)
    skipped: set[int] = set()
    if not all_runs:
        skipped = {each for each in order if _skippable(each, order[0], body, blocks)}
    idle = {
        one
        for each in skipped
        for one in blocks[each].instructions
        if one.access and one.offset not in surely
    }
    before: list[int] = []
    after: list[int] = []
    for each in order:
        if each not in body:
            leads_in = _goes(each, body[0], blocks, without=(), lanes_off=True)
            (before if leads_in else after).append(each)

    def run(instructions: Iterable[Instruction]) -> tuple[Instruction, ...]:
        return tuple(one for one in instructions if one not in idle)

    return RowPath(
        before=run(one for each in before for one in blocks[each].instructions),
        first=run(_without_choice(body, blocks, loosest=False)),
        settled=run(_without_choice(body, blocks)),
        after=run(one for each in after for one in blocks[each].instructions),
        unwaited=_goes_unwaited(body, blocks),
    )


def _skippable(block: int, start: int, body: Sequence[int], blocks: Mapping[int, Block]) -> bool:
    """Whether a wave may skip a block: on its way to the loop over rows, or round it, or after."""
    if block in body:
        return _goes_round(body, blocks, without=(block,), lanes_off=True)
    return _goes(start, body[0], blocks, without=(block,), lanes_off=True)


def _goes_unwaited(body: Sequence[int], blocks: Mapping[int, Block]) -> bool:
    """Whether an iteration can go round without a wait by ``vmcnt``.

    The compiler makes two branches of a choice, and hands the outcome from one to the other in a
    scalar pair that is 0 or -1; a way through both that contradicts itself is none.
    """
    seen: set[tuple[int, frozenset[tuple[str, str]]]] = set()
    ways: list[tuple[int, frozenset[tuple[str, str]]]] = [(body[0], frozenset())]
    while ways:
        way = ways.pop()
        if way in seen or way[0] not in body:
            continue
        seen.add(way)
        block = blocks[way[0]]
        if any(one.vmcnt is not None for one in block.instructions):
            continue
        known = dict(way[1])
        for one in block.instructions:
            _evaluate(one, known)
        followers = block.followers
        if len(followers) == 2:
            taken = _is_taken(block.instructions[-1].mnemonic, known)
            followers = followers if taken is None else followers[:1] if taken else followers[1:]
        if body[0] in followers:
            return True
        ways += [(each, frozenset(known.items())) for each in followers]
    return False


def _evaluate(one: Instruction, known: dict[str, str]) -> None:
    """Keeps what is known of scalar pairs: "0", "-1", or of vcc "exec", which is not 0."""
    results = operands(one.text).results
    value = None
    if moved := re.fullmatch(r"s_mov_b64 .*, (0|-1)", one.text):
        value = moved[1]
    elif masked := re.fullmatch(r"s_and(n2)?_b64 vcc, exec, (s\[.*\])", one.text):
        bits = known.get(masked[2])
        if bits is not None:
            value = "exec" if (bits == "0") is bool(masked[1]) else "0"
    for pair in [pair for pair in known if set(operands(f"v_mov {pair}").results) & set(results)]:
        del known[pair]
    if value is not None:
        known[one.text.split()[1].rstrip(",")] = value


def _is_taken(branch: str, known: Mapping[str, str]) -> bool | None:
    """Whether a branch is taken; None where either may be. Lanes are never all masked off."""
    if branch in ("s_cbranch_execz", "s_cbranch_execnz"):
        return branch == "s_cbranch_execnz"
    if branch in ("s_cbranch_vccz", "s_cbranch_vccnz") and "vcc" in known:
        return (branch == "s_cbranch_vccz") is (known["vcc"] == "0")
    return None

"""Whether rows really travel while others are worked on: a row loop's memory operations, replayed.

A wave's loads, copies to LDS and stores retire in order, and ``s_waitcnt vmcnt(N)`` lets the N
youngest stay in flight. So the instructions of a kernel, in the order in which a wave runs them,
say at each of them which rows have come. A ring can be wrong here (a stage is read before its row
has come) or inert (right, and yet every row is waited for before the next is worked on): neither
shows in a result that was lucky, nor in a time that has nothing to compare with.

The number of a row is counted, not guessed: a row has a fixed number of copies, loads and reads,
and they are issued in the order of rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from rmsnorm_raw.backends.flow import row_path
from rmsnorm_raw.backends.isa import MAX_VMCNT, Instruction, operands
from rmsnorm_raw.backends.kernel_report import KernelReport

#: of no row: a store, or a load of something else
_OTHER = -1


@dataclass(slots=True)
class _Queue:
    """A wave's memory operations in flight, oldest first, by the row that they bring."""

    flying: list[int] = field(default_factory=list)
    issued: list[int] = field(default_factory=list)

    def issue(self, row: int) -> None:
        self.issued.append(row)
        self.flying.append(row)
        del self.flying[:-MAX_VMCNT]

    def wait(self, count: int) -> None:
        del self.flying[: max(0, len(self.flying) - count)]

    def younger_than(self, row: int) -> int:
        """Operations issued after the last one of a row."""
        return self.issued[::-1].index(row)


@dataclass(frozen=True, slots=True)
class Ring:
    """What a ring of rows in LDS is by its config.

    Attributes:
        stages: rows that the ring has room for.
        copies: copies of a wave that bring a row of each tensor.
        stores: offsets of the stores that every wave makes, at least of a row that exists.
        reads: reads of a lane that take it, all of them again where the ring is read twice.
        read: the mnemonic of such a read.
    """

    stages: int
    copies: int
    stores: frozenset[int]
    reads: int
    read: str


def ring_faults(kernel: KernelReport, ring: Ring) -> list[str]:
    """What is wrong with the waits of a ring, or with what they leave in flight; [] if nothing.

    At each read of a stage its own copies have retired, in the first rows and later, also in a wave
    that skips all it may skip. Later, everything younger is still in flight, as far as the counter
    counts: a wait that is tighter drains rows that nobody wants yet. A stage is refilled when all
    its reads have come back. No copy is in flight at the first barrier after the loop, nor at the
    kernel's end: LDS belongs to other waves there. Before, a wave reads what it copied itself, and
    so a wait of its own is enough.
    """
    faults = dict.fromkeys(
        fault for all_runs in (False, True) for fault in _replay_ring(kernel, ring, all_runs)
    )
    return list(faults)


def _replay_ring(kernel: KernelReport, ring: Ring, all_runs: bool) -> Iterable[str]:
    path = row_path(kernel.asm, all_runs=all_runs, surely=ring.stores)
    if path is None:
        yield "there is no loop over rows"
        return
    if path.unwaited:
        yield "an iteration of the row loop can go round without a wait for its row"
    made = [sum(one.access.to_lds for one in part if one.access) for part in path[:3]]
    # of the rows that are worked on, how many are before the loop
    peeled = made[0] // ring.copies - (ring.stages - 1)
    if peeled < 0 or made[0] % ring.copies or made[1:] != [ring.copies, ring.copies]:
        yield f"{made[0]} copies before the row loop and {made[2]} in it, of {ring.copies} a row"
        return
    queue, reads, copied, reading = _Queue(), 0, 0, False
    for row_now in range(peeled, 3 * ring.stages + peeled + 1):
        body = path.settled if row_now >= ring.stages else path.first
        settled = row_now > 2 * ring.stages + peeled
        for one in path.before if row_now == peeled else body:
            if one.vmcnt is not None:
                queue.wait(one.vmcnt)
            elif one.access is not None:
                if one.access.to_lds and reading:
                    yield f"{_at(one)} refills a stage before its reads have come back"
                row = copied // ring.copies if one.access.to_lds else _OTHER
                copied += one.access.to_lds
                queue.issue(row)
            elif one.mnemonic == ring.read and reads < ring.reads * row_now:
                row, reading = reads // ring.reads, True
                reads += 1
                yield from _judge_read(one, row, queue, ring, all_runs, settled)
            if "lgkmcnt(0)" in one.text:
                reading = False
    for one in path.after:
        if one.vmcnt is not None:
            queue.wait(one.vmcnt)
        elif one.access is not None:
            queue.issue(_OTHER)
        elif one.mnemonic in ("s_barrier", "s_endpgm"):
            if max(queue.flying, default=_OTHER) != _OTHER:
                yield f"copies are in flight at {_at(one)} after the row loop"
            return


def _judge_read(
    one: Instruction, row: int, queue: _Queue, ring: Ring, all_runs: bool, settled: bool
) -> Iterable[str]:
    if row in queue.flying:
        yield f"{_at(one)} reads a stage while copies of its row are in flight"
    elif settled and not all_runs:
        wanted = min(MAX_VMCNT, queue.younger_than(row))
        if len(queue.flying) < wanted:
            yield (
                f"{_at(one)} reads a stage with {len(queue.flying)} younger operations in flight, "
                f"not {wanted}: a younger row was waited for"
            )
    elif settled:
        newest = max(queue.flying, default=_OTHER)
        if newest <= row or queue.flying.count(newest) < min(MAX_VMCNT, ring.copies):
            yield f"{_at(one)} reads a stage with no younger row in flight"


def pingpong_faults(kernel: KernelReport, row_loads: Collection[int], loads: int) -> list[str]:
    """What is wrong with two rows in registers that take turns; [] if nothing.

    A register is used when its load has retired; and then, as at every wait of the loop, all loads
    of the row after it are in flight, as far as the counter counts.

    Args:
        row_loads: offsets of the instructions that load rows.
        loads: of a lane for a row of each tensor.
    """
    return list(dict.fromkeys(_replay_pingpong(kernel, row_loads, loads)))


def _replay_pingpong(kernel: KernelReport, row_loads: Collection[int], loads: int) -> Iterable[str]:
    path = row_path(kernel.asm, all_runs=True)
    if path is None:
        yield "there is no loop over rows"
        return
    for name, part, rows in (("before", path.before, 1), ("of", path.settled, 2)):
        made = sum(one.offset in row_loads for one in part)
        if made != rows * loads:
            yield f"{made} loads {name} the row loop, not {rows} x {loads}"
            return
    wanted = min(loads, MAX_VMCNT - 1)  # the compiler never waits for 63
    queue, loaded = _Queue(), 0
    unused: dict[str, int] = {}  # registers that hold what a load of a row brought: its number

    def left(row: int) -> int:
        return sum(number // loads == row for number in queue.flying)

    for iteration in range(-1, 4):
        for one in path.before if iteration < 0 else path.settled:
            if one.vmcnt is not None:
                queue.wait(one.vmcnt)
                newest = (loaded - 1) // loads
                if iteration > 0 and left(newest) < wanted:
                    yield f"{_at(one)} leaves {left(newest)} of {loads} loads of the youngest row"
                continue
            results, sources, *_ = operands(one.text)
            for number in {unused.pop(each) for each in sources if each in unused}:
                if number in queue.flying:
                    yield f"{_at(one)} uses what is still on its way"
                elif iteration > 0 and left(number // loads + 1) < wanted:
                    yield f"{_at(one)} uses a row before the next one is on its way"
            for register in results:
                unused.pop(register, None)
            if one.offset in row_loads:
                unused |= dict.fromkeys(results, loaded)
                queue.issue(loaded)
                loaded += 1
            elif one.access is not None:
                queue.issue(_OTHER)


def _at(one: Instruction) -> str:
    return f"{one.text} at {one.offset:#x}"

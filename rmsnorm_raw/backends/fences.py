"""Whether blocks see what other blocks stored: the fences that machine code really has.

Blocks of a grid run on several dies, and each die has an L2 of its own. On gfx942 and gfx950 a
store reaches other dies by a write-back, ``buffer_wbl2 sc1``, that has been waited for, and a load
is of what they stored after an invalidate, ``buffer_inv sc1``; a single load or store that carries
``sc1`` goes past the caches by itself (LLVM, AMDGPU usage guide, memory model of gfx942). One die,
or the simulator, gives the right result without any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rmsnorm_raw.backends.flow import basic_blocks, reverse_postorder
from rmsnorm_raw.backends.isa import Instruction
from rmsnorm_raw.backends.kernel_report import KernelReport

#: a word that blocks of a row exchange: a flag beside a float
WORD_BYTES = 8


class _Step(NamedTuple):
    """What a wave has to do: the start of the instruction, and in words."""

    start: str
    words: str

    def done_by(self, one: Instruction) -> bool:
        if self.start == "s_waitcnt":
            return one.vmcnt == 0
        return one.text.startswith(self.start) and (
            one.agent_scope or not self.start.startswith("buffer")
        )


_WRITE_BACK = _Step("buffer_wbl2", "write-back (buffer_wbl2 sc1)")
_WAIT = _Step("s_waitcnt", "wait for it (s_waitcnt vmcnt(0))")
_BARRIER = _Step("s_barrier", "barrier")
_INVALIDATE = _Step("buffer_inv", "invalidate (buffer_inv sc1)")


class _Fence(NamedTuple):
    """Steps in their order, which a wave takes before something, and what undoes them."""

    steps: tuple[_Step, ...]
    undone_by: tuple[str, str]  # the kind of an access, and its tensor
    before: tuple[str, str]
    words: str

    def faults(self, kernel: KernelReport, goes_to: Mapping[int, str]) -> Iterator[str]:
        """The steps that some way through the kernel leaves out.

        They count after the last access that undoes them, of any wave: and so, in a block of
        several waves, after the last barrier, if they begin with it.
        """
        blocks = basic_blocks(kernel.asm)
        order = reverse_postorder(blocks)
        entry = {order[0]: 0 if self.steps[0] is _BARRIER else len(self.steps)}
        least = len(self.steps)
        settled = False
        while not settled:
            settled = True
            for each in order:
                done = entry[each]
                for one in blocks[each].instructions:
                    if _is(self.before, one, goes_to):
                        least = min(least, done)
                    done = self._after(done, one, goes_to)
                for follower in blocks[each].followers:
                    less = min(done, entry.get(follower, done))
                    if entry.get(follower) != less:
                        entry[follower], settled = less, False
        if missing := ", ".join(each.words for each in self.steps[least:]):
            yield f"no {missing} {self.words}"

    def _after(self, done: int, one: Instruction, goes_to: Mapping[int, str]) -> int:
        """Steps behind a wave after an instruction."""
        if _is(self.undone_by, one, goes_to):
            return 0
        if self.steps[0] is _BARRIER and _BARRIER.done_by(one):
            return 1
        return done + (done < len(self.steps) and self.steps[done].done_by(one))


def _is(what: tuple[str, str], one: Instruction, goes_to: Mapping[int, str]) -> bool:
    kind, tensor = what
    if one.access is None or one.access.kind != kind:
        return False
    return tensor in goes_to.get(one.offset, "").split("|")


_STORES, _COUNT, _LOADS = ("store", "partial"), ("atomic", "finished"), ("load", "partial")


def last_block_faults(
    kernel: KernelReport, goes_to: Mapping[int, str], waves: int
) -> Iterator[str]:
    """What is missing before the last block adds up the others' partial rows.

    Every wave writes its stores back before the barrier after which one lane counts the block, and
    invalidates after the barrier that follows.

    Args:
        kernel: that ends with the finish by the last block.
        goes_to: the tensor of each memory operation, by offset.
        waves: of a block; the compiler leaves out the barriers of one wave.
    """
    for kind, tensor in (_STORES, _COUNT, _LOADS):
        if not any(_is((kind, tensor), one, goes_to) for one in kernel.asm):
            yield f"no {kind} of {tensor}, and so no last block"
            return
    barrier = (_BARRIER,) if waves > 1 else ()
    stored = _Fence(
        (_WRITE_BACK, _WAIT, *barrier), _STORES, _COUNT,
        "between the stores of partial and the block's count",
    )  # fmt: skip
    counted = _Fence(
        (*barrier, _INVALIDATE), _COUNT, _LOADS,
        "between the block's count and the loads of partial",
    )  # fmt: skip
    yield from stored.faults(kernel, goes_to)
    yield from counted.faults(kernel, goes_to)


def word_faults(kernel: KernelReport, goes_to: Mapping[int, str]) -> Iterator[str]:
    """What is wrong with the words by which the blocks of a row meet.

    Flag and value go at once, past the caches: so no fence has to order them.

    Args:
        kernel: whose blocks share rows.
        goes_to: the tensor of each memory operation, by offset.
    """
    words = [one for one in kernel.asm if one.access and goes_to.get(one.offset) == "words"]
    kinds = [one.access.kind for one in words if one.access]
    if missing := [kind for kind in ("atomic", "store", "load") if kind not in kinds]:
        yield f"no {' and no '.join(missing)} of the words by which blocks meet"
    for one in words:
        access = one.access
        if access is None or access.kind == "atomic":
            continue
        if access.size_bytes != WORD_BYTES:
            yield f"{access.kind} of words by {access.size_bytes} bytes, not {WORD_BYTES} at once"
        if not one.agent_scope:
            yield f"{access.kind} of words without sc1, which other dies need"

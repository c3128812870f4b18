"""Reading gfx9 machine code: what each instruction does, and what is in flight.

Pure Python over disassembly; :mod:`.offline` supplies the text. Everything here holds for gfx942
and gfx950, whose loads, copies to LDS and stores retire in order through one counter, ``vmcnt``.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

#: the counter has six bits; with more in flight the issue stalls
MAX_VMCNT = 63

_VMEM = re.compile(
    r"(?P<space>global|buffer|flat|scratch)_(?P<kind>load|store|atomic)_(?P<lds>lds_)?(?P<format>\w+)"
)
_COUNT = re.compile(r"s_waitcnt .*\bvmcnt\((\d+)\)")
_FORMAT_BYTES = re.compile(r"(?P<dwords>dword)(x(?P<count>[234]))?|[us]?(?P<short>short)|[us]?byte")

_REGISTER = re.compile(r"([vsa])(?:(\d+)|\[(\d+):(\d+)\])|vcc|m0")
# the first operand is what is read, not what is written
_NO_RESULT = re.compile(
    r"(global|flat|scratch|buffer)_store|ds_write|s_(cmp|bitcmp|waitcnt|barrier|nop|branch|cbranch"
    r"|endpgm|setprio|sleep|setreg|dcache|icache)|buffer_(inv|wb)|global_load_lds"
)
# a second result: the carry, or the flag of a division
_TWO_RESULTS = re.compile(r"v_(add|sub|subrev|addc|subb|subbrev)_co_|v_mad_[ui]64|v_div_scale")
# 64 bits, of which the lower half of the result comes of the lower halves alone
_CARRIES_UP = re.compile(r"v_mad_[ui]64|v_lshl_add_u64|[vs]_(lshl|lshlrev|mov)_b64|s_mul_u64")
# both operands change
_SWAP = re.compile(r"v_(swap|permlane\w*_swap)")
# the result is also read: lanes that are not written keep it, or it is added to
_KEEPS = re.compile(
    r"v_(fmac|mac|pk_fmac|dot\w*c|writelane|cvt_pk_fp8)|s_(addk|mulk|cmov)|.*_dpp|.*_d16_hi"
)


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


class Operands(NamedTuple):
    """The registers of an instruction, one name for each 32 bits ("v3", "s0", "vcc").

    Attributes:
        results: what it writes.
        sources: what it reads.
        address: those that an address in memory is made of; () where it goes to none.
        lower: what the first result is made of, where that is less than ``sources``.
    """

    results: tuple[str, ...]
    sources: tuple[str, ...]
    address: tuple[str, ...] = ()
    lower: tuple[str, ...] | None = None


@functools.lru_cache(maxsize=1 << 16)
def operands(text: str) -> Operands:
    """The operands of an instruction as comgr prints it."""
    mnemonic, _, rest = text.partition(" ")
    listed = [_registers(part) for part in rest.split(",")]
    flat = tuple(register for part in listed for register in part)
    access = Instruction(0, text).access
    if access is not None:
        if access.kind == "store" or (access.kind == "atomic" and "sc0" not in text.split()):
            # global: address, data, base; buffer: data, offset, descriptor
            address = (listed[0], *listed[2:]) if access.space != "buffer" else listed[1:]
            return Operands((), flat, _joined(address))
        if access.to_lds:
            return Operands((), flat, flat)
        return Operands(listed[0], _joined(listed[1:]), _joined(listed[1:]))
    if mnemonic.startswith("s_load"):
        return Operands(listed[0], _joined(listed[1:]), _joined(listed[1:]))
    if _NO_RESULT.match(mnemonic):
        return Operands((), flat)
    if mnemonic.startswith("ds_"):
        return Operands(listed[0], _joined(listed[1:]))
    if _SWAP.match(mnemonic):
        return Operands(_joined(listed[:2]), _joined(listed[:2]))
    count = 2 if _TWO_RESULTS.match(mnemonic) else 1
    sources = listed if _KEEPS.match(mnemonic) else listed[count:]
    carries = _CARRIES_UP.match(mnemonic) is not None
    lower = _joined(part[:1] for part in sources) if carries else None
    return Operands(_joined(listed[:count]), _joined(sources), lower=lower)


def _registers(text: str) -> tuple[str, ...]:
    found = _REGISTER.search(text)
    if found is None:
        return ()
    kind, one, first, last = found.groups()
    if kind is None:
        return (found[0],)
    if one is not None:
        return (kind + one,)
    return tuple(f"{kind}{i}" for i in range(int(first), int(last) + 1))


def _joined(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(itertools.chain.from_iterable(parts))


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
            sum(map(load_bytes, wait.ends + wait.leaves))
            for wait in waits(instructions, loop=loop)
            if any(map(load_bytes, wait.ends))
        ),
        default=0,
    )


def load_bytes(instruction: Instruction) -> int:
    """Bytes a lane of a load, or of a copy to LDS; 0 for anything else."""
    access = instruction.access
    return access.size_bytes if access and access.kind == "load" else 0


def is_store(instruction: Instruction) -> bool:
    """Whether it stores to memory."""
    access = instruction.access
    return access is not None and access.kind == "store"

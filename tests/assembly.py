"""Instructions written by hand, for the tests of what reads machine code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rmsnorm_raw.backends.isa import Instruction
from rmsnorm_raw.backends.kernel_report import KernelReport

LOAD = "global_load_dwordx4 v[0:3], v[4:5], off"
STORE = "global_store_dwordx4 v[4:5], v[0:3], off"
COPY = "buffer_load_dwordx4 v8, s[0:3], 0 offen lds"


def code(*lines: str) -> list[Instruction]:
    """Four bytes each; a branch names the index of the line that it goes to: "s_branch @3"."""
    made = []
    for index, line in enumerate(lines):
        head, _, target = line.partition("@")
        words = str((int(target) - index - 1) & 0xFFFF) if target else ""
        made.append(Instruction(4 * index, head + words))
    return made


def kernel(*lines: str, args: Sequence[Mapping[str, str]] = ()) -> KernelReport:
    """A kernel of gfx950's of such instructions, of which all numbers are 0.

    Args:
        args: its arguments, as the metadata of a code object has them.
    """
    metadata = dict.fromkeys(
        (".agpr_count", ".vgpr_spill_count", ".sgpr_spill_count", ".kernarg_segment_size",
         ".private_segment_fixed_size", ".group_segment_fixed_size", ".vgpr_count", ".sgpr_count",
         ".wavefront_size", ".max_flat_workgroup_size"), "0",
    )  # fmt: skip
    return KernelReport.read("gfx950", metadata | {".name": "k", ".args": args}, code(*lines))


def wait(count: int) -> str:
    return f"s_waitcnt vmcnt({count})"

"""Instructions written by hand, for the tests of what reads machine code."""

from __future__ import annotations

from rmsnorm_raw.backends.isa import Instruction

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


def wait(count: int) -> str:
    return f"s_waitcnt vmcnt({count})"

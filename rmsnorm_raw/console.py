"""What the command line prints and where its files go: tables, JSON, progress, folders."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rmsnorm_raw.errors import InvalidInput

if TYPE_CHECKING:
    from rmsnorm_raw.backends import Resources
    from rmsnorm_raw.backends.isa import Instruction
    from rmsnorm_raw.backends.kernel_report import LaunchReport
    from rmsnorm_raw.device import DeviceSpec

#: of tables that go into a file or a pipe, where no terminal gives a width: none is wider
PLAIN_WIDTH = 400


def out_dir(chosen: Path | None, device: DeviceSpec) -> Path:
    """The folder of a run's files, made before anything is measured."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", device.name)
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    out = chosen or Path("rmsnorm-raw-results", name, now)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            f"--out {out}: {error.strerror}; give a folder that you can write"
        ) from error
    return out


@contextlib.contextmanager
def progress() -> Iterator[Callable[[int, int, str], None]]:
    """A function to call as each step begins: a bar on a terminal, else lines; both on stderr.

    Both say how much time is left, by the steps so far.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    text = TextColumn("{task.description}", markup=False)
    # the steps differ, so their speed is that of ten minutes
    with Progress(
        *columns, text, console=console, transient=True, speed_estimate_period=600
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, of, what: bar.update(task, completed=done, total=of, description=what)


def _lines() -> Callable[[int, int, str], None]:
    began: dict[int, tuple[int, float]] = {}  # by how many there are: the first step, and when

    def line(done: int, of: int, what: str) -> None:
        first, at = began.setdefault(of, (done, time.monotonic()))
        left = ""
        if first < done < of:
            left_s = (time.monotonic() - at) / (done - first) * (of - done)
            left = f" ({left_s // 60:.0f}:{left_s % 60:02.0f} left)"
        print(f"[{done}/{of}] {what}{left}", file=sys.stderr, flush=True)

    return line


def print_table(titles: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """A table without lines on stdout; None stands as "-"."""
    from rich.console import Console
    from rich.table import Table

    titles = list(titles)
    table = Table(*titles, box=None, show_header=any(titles))
    for row in rows:
        table.add_row(*("-" if value is None else str(value) for value in row))
    console = Console(
        width=None if sys.stdout.isatty() else PLAIN_WIDTH, markup=False, highlight=False
    )
    console.print(table)


def print_json(facts: object) -> None:
    """Facts as JSON on stdout."""
    print(json.dumps(facts, indent=2))


#: after the title of inspect's waits
WAITS_MEAN = """, in the row loop once it has settled, or in all of a kernel without one:
vmcnt(N) waits until N of a wave's memory operations are in flight, of which the oldest end first"""


def counts(taken: Resources) -> dict[str, object]:
    """What :func:`machine_code` does not give in lists of their own."""
    return {name: fact for name, fact in asdict(taken).items() if name not in ("mix", "waits")}


def machine_code(resources: Mapping[str, LaunchReport]) -> dict[str, list[dict[str, object]]]:
    """Lists of what AMD's machine code has in flight, waits for, and is made of."""
    return {
        "in_flight": [
            {"entry_point": name, "in_flight": each.in_flight} for name, each in resources.items()
        ],
        "waits": [
            {
                "entry_point": name,
                "at": hex(wait.instruction.offset),
                "vmcnt": wait.instruction.vmcnt,
                "waits_for": _operations(wait.ends),
                "leaves_in_flight": _operations(wait.leaves),
            }
            for name, report in resources.items()
            for wait in report.waits
        ],
        "instructions": [{"entry_point": name, **each.mix} for name, each in resources.items()],
    }


def _operations(operations: Iterable[Instruction]) -> str:
    kinds = Counter(operation.group for operation in operations)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"

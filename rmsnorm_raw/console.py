"""What the command line prints and where its files go: tables, JSON, progress, folders."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rmsnorm_raw.errors import InvalidInput

if TYPE_CHECKING:
    from rmsnorm_raw.device import DeviceSpec

#: of tables that go into a file or a pipe, where no terminal gives a width: none is wider
PLAIN_WIDTH = 400


def out_dir(chosen: Path | None, device: DeviceSpec) -> Path:
    """The folder of a run's files, made before anything is measured; by default one of its own."""
    try:
        if chosen is None:
            return _new_folder(device)
        chosen.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            f"--out {chosen or Path.cwd()}: {error.strerror}; give a folder that you can write"
        ) from error
    return chosen


def _new_folder(device: DeviceSpec) -> Path:
    folder = Path("rmsnorm-raw-results", re.sub(r"[^A-Za-z0-9.]+", "-", device.name))
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    count = 1
    while True:
        with contextlib.suppress(FileExistsError):  # another run began in this second
            out = folder / (now if count == 1 else f"{now}-{count}")
            out.mkdir(parents=True)
            return out
        count += 1


@contextlib.contextmanager
def results(chosen: Path | None, device: DeviceSpec) -> Iterator[Path]:
    """:func:`out_dir`, which goes again where an error leaves it empty."""
    given = chosen is not None and chosen.exists()
    out = out_dir(chosen, device)
    try:
        yield out
    except BaseException:
        with contextlib.suppress(OSError):  # something is in it
            if chosen is None:
                os.removedirs(out)
            elif not given:
                out.rmdir()
        raise


@contextlib.contextmanager
def progress() -> Iterator[Callable[[int, int, str], None]]:
    """A function to call as each step begins: a bar on a terminal, else lines; both on stderr.

    Of more than ten steps a line stands for each tenth. Both say how much time is left, by the
    steps so far.
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
    tenths: dict[int, int] = {}  # likewise, those of the last line

    def line(done: int, of: int, what: str) -> None:
        tenth = 10 * done // max(of, 1)
        if of > 10 and tenths.get(of) == tenth:
            return
        tenths[of] = tenth
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

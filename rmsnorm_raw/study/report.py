"""``rmsnorm-raw report``: one page of runs, as HTML and Markdown, that cannot go stale.

The text depends on the runs' files, the archives and this code alone: no clock, no path, no host.
So a page is checked by making it again; digests in its head say which of its sources has changed.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import unescape
from importlib import resources
from pathlib import Path
from string import ascii_uppercase as LETTERS

from rmsnorm_raw import environment
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.study import archives, between, gains, page, sections
from rmsnorm_raw.study.files import digest, read_run
from rmsnorm_raw.study.page import Block, Heading, Plots, Table, Text
from rmsnorm_raw.study.runs import ARCHIVES, OP_OF, Run, archive_bytes

#: what makes a page. A change elsewhere that moves a figure shows when the page is made again
CODE = (
    "archives.py", "between.py", "files.py", "gains.py", "page.py", "plots.py", "report.py",
    "runs.py", "sections.py", "theme.py",
)  # fmt: skip
NOISE_PCT = 1.0
META = "rmsnorm-raw-sources"


@dataclass(frozen=True)
class Report:
    """A page that has been made.

    Attributes:
        folder: where it belongs.
        files: content by path in the folder: HTML, Markdown, and an SVG a plot.
        stem: the name of the page's files.
    """

    folder: Path
    files: dict[str, str]
    stem: str

    @property
    def plots_folder(self) -> str:
        """Holds the plots' files and nothing else."""
        return plots_folder(self.stem)

    def write(self) -> None:
        """Write all files, then put them in place; plots that are no longer made are removed.

        Raises:
            InvalidInput: the folder cannot be written; a page that was there is whole.
        """
        try:
            environment.replace_texts({self.folder / n: text for n, text in self.files.items()})
            for name in self._left_over():
                (self.folder / name).unlink()
        except OSError as error:
            raise InvalidInput(
                f"the report cannot be written to {self.folder}: {error.strerror}. What was there "
                "stays; make room, or give a folder that you can write with --out"
            ) from error

    def faults(self) -> list[str]:
        """Why the files in the folder are not these; empty if they are.

        Raises:
            InvalidInput: one of them cannot be read.
        """
        try:
            return self._faults()
        except OSError as error:
            raise InvalidInput(f"{error.filename} cannot be read: {error.strerror}") from error

    def _faults(self) -> list[str]:
        found = []
        for name, content in self.files.items():
            path = self.folder / name
            if not path.is_file():
                found.append(f"{path} is not there")
            elif (there := path.read_bytes()) != content.encode():
                found.append(f"{path} {_first_difference(there, content)}")
        found += [f"{self.folder / name} is of no plot" for name in self._left_over()]
        if not found:
            return []
        return [*self._changed_sources(), *found]

    def _left_over(self) -> list[str]:
        there = (self.folder / self.plots_folder).glob("*.svg")
        names = (f"{self.plots_folder}/{path.name}" for path in there)
        return sorted(name for name in names if name not in self.files)

    def _changed_sources(self) -> list[str]:
        path = self.folder / f"{self.stem}.html"
        if not path.is_file():
            return []
        recorded = _recorded(path.read_text(encoding="utf-8", errors="replace"))
        now = _recorded(self.files[path.name])
        names = sorted(recorded.keys() | now.keys())
        return [
            f"{name} is not what the page was made of"
            for name in names
            if recorded.get(name) != now.get(name)
        ]


def plots_folder(stem: str) -> str:
    """Beside a page, by its name."""
    return f"{stem}_plots"


def _recorded(text: str) -> dict[str, str]:
    """The digests in a page's head."""
    _, _, rest = text.partition(f'<meta name="{META}" content="')
    content = unescape(rest.partition('"')[0])
    pairs = (entry.rpartition("=") for entry in content.split("; ") if entry)
    return {name: value for name, _, value in pairs}


def _first_difference(there: bytes, content: str) -> str:
    theirs = there.decode("utf-8", errors="replace").splitlines()
    for number, line in enumerate(content.splitlines(), 1):
        if number > len(theirs):
            return f"ends before line {number}"
        if theirs[number - 1] != line:
            return f"differs from line {number} on"
    return "has other line ends, or lines at its end that do not belong"


def make(
    folders: Sequence[Path], *, out: Path | None = None, noise_pct: float = NOISE_PCT
) -> Report:
    """Make the page of runs.

    Args:
        folders: of the runs. Each after the first is compared with the first.
        out: the page's folder; None for that of the last run. One run's page is ``report``, that of
            several ``comparison``.
        noise_pct: changes of speed within it count as none.

    Raises:
        InvalidInput: a folder is no run, or two are the same.
    """
    if not 0 <= noise_pct < math.inf:
        raise InvalidInput(f"--noise {noise_pct:g}: it must be a number of percent, 0 or more")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise InvalidInput("a run cannot be compared with itself: name each folder once")
    if len(folders) > len(LETTERS):
        raise InvalidInput(f"{len(folders)} runs are too many for one page: name 26 at most")
    runs = [read_run(folder) for folder in folders]
    stem = "report" if len(runs) == 1 else "comparison"
    sources = _sources(runs)
    blocks = list(_blocks(runs, sources, noise_pct))
    recorded = [*sources, ("--noise", f"{noise_pct:g}")]
    facts = [(META, "; ".join(f"{name}={value}" for name, value in recorded))]
    plots = [plot for block in blocks if isinstance(block, Plots) for plot in block.plots]
    files = {
        f"{stem}.html": page.html(blocks, facts),
        f"{stem}.md": page.markdown(blocks, plots_folder(stem)),
        **{f"{plots_folder(stem)}/{plot.name}.svg": plot.file for plot in plots},
    }
    return Report(out or folders[-1], files, stem)


def _sources(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """(name, digest) of everything that a page is made of."""
    found = [
        (f"{letter}{name}", value)
        for letter, run in zip(_letters(runs), runs, strict=True)
        for name, value in run.digests.items()
    ]
    found += [(f"archive/{name}", digest(archive_bytes(name))) for name in ARCHIVES]
    home = resources.files("rmsnorm_raw.study")
    code = b"".join(home.joinpath(name).read_bytes() for name in CODE)
    return [*found, ("the report's code", digest(code))]


def _letters(runs: Sequence[Run]) -> list[str]:
    """Prefixes of runs' files and headings: "" of one run, "A: ", "B: " of several."""
    return [""] if len(runs) == 1 else [f"{letter}: " for letter in LETTERS[: len(runs)]]


def _blocks(
    runs: Sequence[Run], sources: Sequence[tuple[str, str]], noise: float
) -> Iterator[Block]:
    yield Heading(1, "RMSNorm, " + " against ".join(run.label for run in reversed(runs)))
    yield Text(
        "Every figure comes from the runs' CSV files. Speeds are decimal GB/s of the bytes that an "
        "operation must move (forward 2·M·N·a + N·w, backward 3·M·N·a + 2·N·w + 4·M; a, w: bytes "
        "of an activation and a weight element); times are medians in µs; a percentage names its "
        f"probe. Changes of speed within {noise:g} % count as noise."
    )
    for letter, run in zip(_letters(runs), runs, strict=True):
        if run.torn:
            yield Text(f"{letter}`{run.table}` ends in a piece of a row, which is left out.")
        if not run.environment.get("finished", True):
            yield Text(f"{letter}The run did not end: cells may be missing.")
    if any(run.simulated for run in runs):
        yield Text("Simulated: times of the simulator mean nothing.")
    if len(runs) > 1:
        rows = [[letter[0], run.label] for letter, run in zip(_letters(runs), runs, strict=True)]
        yield Table("The runs", ("", "device and time"), rows, words=True)
    for number, run in enumerate(runs[1:], 1):
        yield from between.comparison(runs[0], run, noise, ("A", LETTERS[number]))
    for letter, run in zip(_letters(runs), runs, strict=True):
        yield from _run_blocks(run, letter, noise)
    yield from archives.archives(runs[-1], noise)
    yield from sections.glossary(noise)
    yield Heading(2, "Sources")
    yield Text(
        "`rmsnorm-raw report RUN --check` makes this page again and fails where it differs. It was "
        "made of these files:"
    )
    yield Table(
        "sha256", ("source", "digest"), [[name, value] for name, value in sources], words=True
    )


def _run_blocks(run: Run, letter: str, noise: float) -> Iterator[Block]:
    """The sections of one run; of several, each title says which."""
    prefix = letter.lower().replace(": ", "-")
    made = itertools.chain(
        sections.environment(run),
        sections.roofline(run, prefix),
        *(sections.shapes(run, op, prefix) for op in OP_OF),
        gains.tuned(run, noise, prefix),
        sections.dtypes(run, prefix),
        sections.peers(run, noise, prefix),
    )
    for block in made:
        if isinstance(block, Heading):
            yield Heading(block.level, f"{letter}{block.text}")
        elif isinstance(block, Table):
            yield replace(block, caption=f"{letter}{block.caption}")
        elif isinstance(block, Plots):
            yield Plots([replace(plot, title=f"{letter}{plot.title}") for plot in block.plots])
        else:
            yield block


def run(folders: Sequence[Path], out: Path | None, noise_pct: float, check: bool) -> int:
    """The command: write the page, or check the one that is there; the exit code."""
    made = make(folders, out=out, noise_pct=noise_pct)
    if not check:
        made.write()
        pages = ", ".join(str(made.folder / f"{made.stem}.{kind}") for kind in ("html", "md"))
        print(f"written: {pages}, and their plots in {made.plots_folder}")
        return 0
    faults = made.faults()
    if not faults:
        print(f"{made.folder / made.stem}.html and its files are what these runs give")
        return 0
    print("\n".join([*faults, "make it again: the same command without --check"]), file=sys.stderr)
    return 1

"""What a report is of: runs as :mod:`.files` reads them, and the archives.

A run is a folder with ``environment.json`` and one table: ``sweep.csv`` of a sweep, or ``perf.csv``
of the pytest-benchmark suites. Columns are found by name; ``provider`` (without it every row is
ours), ``path`` (ladder or tuned) and ``times_us`` (all samples) may be missing.
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rmsnorm_raw.bandwidth import MATCHED
from rmsnorm_raw.problem import Op, Problem
from rmsnorm_raw.study.cells import ARCHIVE_NAME

OURS = "ours"
#: of a sweep, and of the suites
TABLES = ("sweep.csv", "perf.csv")
ENVIRONMENT = "environment.json"
#: of the latter, what changes by the minute, and says most right after the device was busy
CLOCKS = ("nvidia_gpus", "amd_tools")
ARCHIVES = ("hopper_quack_cells.csv", "mi355x_published.csv")
#: the probe of each of the Hopper archive's percentages and its GB/s, see archive/SOURCES.md
ARCHIVE_PROBE = {"H200": ("2r1w", 4312.7), "H100": ("write", 3182.3)}
OP_OF: dict[str, Op] = {short: op for op, short in ARCHIVE_NAME.items()}
PAIRS = ("fp16/fp16", "fp16/fp32", "bf16/bf16", "bf16/fp32", "fp32/fp32")
PEERS = ("quack", "quack_searched", "liger", "torch", "compile")


@dataclass(frozen=True, slots=True)
class Cell:
    """An operation, a shape and a pair of dtypes, by the names that the CSVs use."""

    op: str
    m: int
    n: int
    act: str
    weight: str

    @property
    def problem(self) -> Problem:
        """With the bytes that it moves."""
        build = Problem.forward if OP_OF[self.op] == "forward" else Problem.backward
        weight = None if self.weight == "none" else self.weight
        return build(self.m, self.n, self.act, weight_dtype=weight)

    def gbps(self, us: float) -> float:
        """Decimal GB/s of a call that takes so long."""
        return self.problem.logical_bytes() / us / 1e3

    @property
    def shape(self) -> str:
        """E.g. ``32768×8192``."""
        return f"{self.m}×{self.n}"

    @property
    def pair(self) -> str:
        """E.g. ``bf16/fp32``: of x, and of the weight."""
        return f"{self.act}/{self.weight}"

    @property
    def order(self) -> tuple[object, ...]:
        """Shapes by their elements, then the pairs in the archive's order."""
        known = self.pair in PAIRS
        return (
            self.m * self.n, self.m, 0 if known else 1,
            PAIRS.index(self.pair) if known else self.pair,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Without the operation, e.g. ``32768×8192 bf16/fp32``."""
        return f"{self.shape} {self.pair}"

    def __str__(self) -> str:
        return f"{self.op} {self.name}"


@dataclass(frozen=True, slots=True)
class Timing:
    """A row of a run: one provider in one cell.

    Attributes:
        cell: what was run.
        series: the provider, with its path where the table has one: "ours", "ours tuned", "quack".
        config: as the provider names it.
        verdict: PASS, or why there is no time; ``note`` says more.
        moved_bytes: by a call, of the rows that were run.
        rows_run: rows that were run; fewer than the cell's where they are capped.
        us: the median; None without one.
        interval_us: its 95 % interval; None without one.
        gbps: decimal GB/s; None on the simulator.
        pct: percent by probe, "copy", "write", "2r1w", "best" and "matched".
        times_us: all samples, where the table has them.
        note: why sampling stopped, or what went wrong.
    """

    cell: Cell
    series: str
    config: str
    verdict: str
    moved_bytes: int
    rows_run: int
    us: float | None
    interval_us: tuple[float, float] | None
    gbps: float | None
    pct: Mapping[str, float]
    times_us: tuple[float, ...]
    note: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A default config and a searched one in a cell.

    Attributes:
        cell: where.
        default_us: the ladder's time, or the published default's.
        tuned_us: with the config that a search found; both None where it is the same config.
        default_pct: percent of a probe, likewise; None without a probe.
        tuned_pct: likewise.
    """

    cell: Cell
    default_us: float | None
    tuned_us: float | None
    default_pct: float | None = None
    tuned_pct: float | None = None

    @property
    def ratio(self) -> float:
        """Speed of the searched config over the default's; 1 where they are the same."""
        if self.default_us is None or self.tuned_us is None:
            return 1.0
        return self.default_us / self.tuned_us


@dataclass(frozen=True)
class Run:
    """A run, as its files have it.

    Attributes:
        folder: where they lie.
        table: the name of its CSV.
        environment: of environment.json.
        timings: the rows of the CSV.
        torn: the CSV ends in a piece of a row, which is left out: the run was killed there.
        searches: rows of the tables of searches, by file name.
        digests: sha256 of each file that was read, by its path in the folder.
    """

    folder: Path
    table: str
    environment: Mapping[str, Any]
    timings: tuple[Timing, ...]
    torn: bool
    searches: Mapping[str, tuple[Mapping[str, str], ...]]
    digests: Mapping[str, str]

    @property
    def device(self) -> str:
        """The device's name."""
        return str(self.environment["device"]["name"])

    @property
    def simulated(self) -> bool:
        """Its times mean nothing, and it has no speeds."""
        return bool(self.environment["device"]["simulated"])

    @property
    def timing_protocol(self) -> int:
        """``measure.TIMING_PROTOCOL`` of its times; 1 where the files name none: older than 2."""
        return int(self.environment.get("timing_protocol", 1))

    @property
    def label(self) -> str:
        """The device and the time, the same wherever the folder lies."""
        return f"{self.device}, {str(self.environment['time_utc'])[:16].replace('T', ' ')} UTC"

    @functools.cached_property
    def by_key(self) -> Mapping[tuple[Cell, str], Timing]:
        """Rows by cell and series."""
        return {(timing.cell, timing.series): timing for timing in self.timings}

    @functools.cached_property
    def series(self) -> tuple[str, ...]:
        """Ours first, then the peers."""
        return tuple(sorted({timing.series for timing in self.timings}, key=series_order))

    @property
    def ours(self) -> tuple[str, ...]:
        """The series of our kernels."""
        return tuple(name for name in self.series if is_ours(name))

    def cells(self, op: str) -> list[Cell]:
        """The cells of an operation, small shapes first."""
        found = {timing.cell for timing in self.timings if timing.cell.op == op}
        return sorted(found, key=lambda cell: cell.order)

    def best(self, cell: Cell) -> Timing | None:
        """Our fastest row of a cell; None where none has a time."""
        rows = (self.by_key.get((cell, name)) for name in self.ours)
        timed = [(row.us, index, row) for index, row in enumerate(rows) if row and row.us]
        return min(timed)[2] if timed else None

    def probes(self, when: str) -> Mapping[str, Mapping[str, Any]]:
        """The probes ("opening" or "closing") by name; none on the simulator."""
        return self.environment.get(f"roofline_{when}") or {}

    def pairs(self) -> dict[str, list[Pair]]:
        """The ladder beside tuned configs, by what timed them: this table, or one beside it."""
        found = {}
        if table := [pair for op in OP_OF for cell in self.cells(op) if (pair := self._pair(cell))]:
            found[self.table] = table
        rows = self.searches.get("tuned_vs_ladder.csv", ())
        for regime in sorted({row["regime"] for row in rows} - {""}):
            mine = [row for row in rows if row["regime"] in (regime, "")]
            found[f"tuned_vs_ladder.csv, {regime}"] = [self._beside(row) for row in mine]
        return found

    def _pair(self, cell: Cell) -> Pair | None:
        """A sweep has a tuned row where a record names another config than the ladder's."""
        default, tuned = (self.by_key.get((cell, f"{OURS} {path}")) for path in ("ladder", "tuned"))
        if default and tuned and default.us and tuned.us:
            percents = (row.pct.get("matched") for row in (default, tuned))
            return Pair(cell, default.us, tuned.us, *percents)
        chosen = self.environment.get("tuned")
        if default and chosen is not None and str(cell.problem) not in chosen:
            return Pair(cell, None, None)
        return None

    def _beside(self, row: Mapping[str, str]) -> Pair:
        cell = cell_of(row)
        if not row["tuned_us"]:
            return Pair(cell, None, None)
        times = float(row["ladder_us"]), float(row["tuned_us"])
        probe = self.probes("opening").get(MATCHED[OP_OF[cell.op]])
        if probe is None:
            return Pair(cell, *times)
        return Pair(cell, *times, *(100 * cell.gbps(us) / probe["gbps"] for us in times))


def is_ours(series: str) -> bool:
    """Whether a series is of our kernels."""
    return series.split()[0] == OURS


def series_order(name: str) -> tuple[bool, int, str]:
    """Ours first, then the known peers, then others by name."""
    return not is_ours(name), PEERS.index(name) if name in PEERS else len(PEERS), name


def cell_of(row: Mapping[str, str]) -> Cell:
    """The cell that a row of any of the CSVs names.

    Raises:
        ValueError: it names none.
    """
    if row["op"] not in OP_OF:
        raise ValueError(f"op is {row['op']!r}: it must be one of {', '.join(OP_OF)}")
    return Cell(row["op"], count(row, "m"), count(row, "n"), row["act"], row["weight"])


def count(row: Mapping[str, str], column: str) -> int:
    """A number of rows or columns.

    Raises:
        ValueError: it is none, or 0.
    """
    text = row[column]
    if not (text.isascii() and text.isdigit() and text.strip("0")):
        raise ValueError(f"{column} is {text!r}: it must be a whole number above 0")
    return int(text)


# ---- the archives --------------------------------------------------------------------------------


def archive_bytes(name: str) -> bytes:
    """A file of ``study/archive``."""
    return resources.files("rmsnorm_raw.study").joinpath("archive", name).read_bytes()


@functools.cache
def archive_rows(name: str) -> tuple[Mapping[str, str], ...]:
    """A published table, as text by column."""
    text = archive_bytes(name).decode("utf-8")
    return tuple(csv.DictReader(io.StringIO(text, newline="")))


@functools.cache
def study_cells() -> frozenset[Cell]:
    """The 90 cells of the published study."""
    return frozenset(map(cell_of, archive_rows("hopper_quack_cells.csv")))


def archive_pairs(host: str, op: str) -> list[Pair]:
    """Quack's analytical default and its search, of the published study, in one host's cells."""
    _, peak = ARCHIVE_PROBE[host]
    found = []
    for row in archive_rows("hopper_quack_cells.csv"):
        if (row["host"], row["op"]) == (host, op):
            cell = cell_of(row)
            times = float(row["analytical_us"]), float(row["tuned_us"])
            found.append(Pair(cell, *times, *(100 * cell.gbps(us) / peak for us in times)))
    return sorted(found, key=lambda pair: pair.cell.order)

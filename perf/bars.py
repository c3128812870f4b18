"""The bars that the suites' figures are held to: ``python -m perf.bars RUN_DIR [AGAIN_DIR]``.

A ratio is a peer's time over ours, medians of one run. A bar fails when the 95 % interval of its
figure lies below it as a whole. One re-measurement is allowed: what failed in RUN_DIR and is in
AGAIN_DIR too is decided there, and both are printed. Exit code 1 if a bar fails.
"""

from __future__ import annotations

import argparse
import csv
import functools
import io
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rmsnorm_raw.dtypes import SHORT_NAME
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.stats import Comparison, compare
from rmsnorm_raw.study.cells import ARCHIVE_NAME, cells
from rmsnorm_raw.study.runs import OURS, PEERS
from rmsnorm_raw.study.table_file import whole_records

QUACKS = PEERS[:2]
Row = Mapping[str, str]
Key = tuple[str, ...]  # op, m, n, act, weight

#: of every cell of the study, against the fastest peer in that cell
CELL_RATIO = 0.99
#: (us, us): short calls may be slower than that by the first, if the peer is faster than the second
SLACK_US = {"fwd": (0.2, 10.0), "bwd": (0.3, 20.0)}
#: geometric means over the study's 45 cells
MEANS: dict[str, tuple[tuple[str, tuple[str, ...], float], ...]] = {
    "fwd": (("Quack default", ("quack",), 1.03),),
    "bwd": (
        ("Quack default", ("quack",), 1.25),
        ("the better Quack", QUACKS, 1.10),
        ("Liger", ("liger",), 2.0),
        ("torch", ("torch",), 2.0),
    ),
}
#: bf16/bf16, percent of the probe with the operation's reads and writes
PROBE = {"fwd": "copy", "bwd": "2r1w"}
PERCENT = {
    "fwd": {
        (32768, 256): 59.0, (32768, 1024): 87.0, (32768, 2048): 93.0, (32768, 4096): 95.0,
        (32768, 8192): 98.5, (8192, 16384): 96.0,
    },
    "bwd": {
        (32768, 256): 54.0, (32768, 1024): 79.0, (32768, 2048): 87.0, (32768, 4096): 93.0,
        (32768, 8192): 97.0, (8192, 16384): 89.0,
    },
}  # fmt: skip
#: dtype pairs at 32768x8192 may lie so many points of the matched probe below bf16/bf16
PAIR_POINTS = 3.0
#: bf16/bf16 beyond the study, against Quack's default; wide rows are 0.5 GiB of x
QUACK_RATIO = {
    "fwd": {
        (8192, 16384): 1.0, (4096, 65536): 0.9, (2048, 131072): 0.9, (1024, 262144): 0.9,
        (8, 262144): 0.5, (1 << 20, 128): 0.5,
    },
    "bwd": {
        (8192, 16384): 1.0, (4096, 65536): 0.7, (2048, 131072): 0.7, (1024, 262144): 0.7,
        (8, 262144): 0.5, (1 << 20, 128): 0.5,
    },
}  # fmt: skip
#: shapes that a bar names and the study lacks
BEYOND = sorted({*PERCENT["fwd"], *QUACK_RATIO["fwd"]} - {(c.rows, c.cols) for c in cells()})
#: the 90 cells with every peer
WALL_S = 480.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One bar and what a run says of it.

    Attributes:
        name: what is asked.
        bar: the least that is asked for.
        value: the figure; nan where there is none.
        low: lower end of its 95 % interval.
        high: upper end.
        note: what else to know, such as which peer was the best.
        excused: it is within the slack in microseconds.
    """

    name: str
    bar: float
    value: float
    low: float
    high: float
    note: str = ""
    excused: bool = False

    @property
    def failed(self) -> bool:
        return not (self.high >= self.bar or self.excused)

    def __str__(self) -> str:
        word = "FAIL" if self.failed else "ok  "
        interval = f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"
        note = f"; {self.note}" if self.note else ""
        return f"{word} {self.name}: {interval}, bar {self.bar:.4g}{note}"


@dataclass(frozen=True, slots=True)
class Results:
    """What the suites wrote into a folder.

    Attributes:
        rows: of perf.csv, by cell and provider.
        facts: environment.json.
    """

    rows: dict[Key, dict[str, Row]]
    facts: Mapping[str, object]

    def timed(self, key: Key, *providers: str) -> list[Row]:
        """The rows of these providers that have a time, the fastest first."""
        found = [row for name, row in self.rows.get(key, {}).items() if name in providers]
        return sorted((row for row in found if row["times_us"]), key=median_us)


def load(folder: Path) -> Results:
    """Read a run; a piece of a row that a kill has left at its end is no row."""
    whole = whole_records((folder / "perf.csv").read_bytes()).decode()
    rows = by_cell(csv.DictReader(io.StringIO(whole, newline="")))
    return Results(rows, json.loads((folder / "environment.json").read_text(encoding="utf-8")))


def by_cell(rows: Iterable[Row]) -> dict[Key, dict[str, Row]]:
    """Rows by cell and provider; of two for the same, the later."""
    grouped: dict[Key, dict[str, Row]] = {}
    for row in rows:
        grouped.setdefault(key_of(row), {})[row["provider"]] = row
    return grouped


def key_of(row: Row) -> Key:
    return tuple(row[column] for column in ("op", "m", "n", "act", "weight"))


def problem_key(problem: Problem) -> Key:
    """The key of a problem that has a weight."""
    act, weight = SHORT_NAME[problem.dtype], SHORT_NAME[problem.weight_dtype or ""]
    return ARCHIVE_NAME[problem.op], str(problem.rows), str(problem.cols), act, weight


def median_us(row: Row) -> float:
    return float(row["median_us"])


def ratio(peer: Row, ours: Row) -> Comparison:
    """A peer's time over ours, with its 95 % interval."""
    peer_us, our_us = ([float(time) for time in row["times_us"].split()] for row in (peer, ours))
    return compare(peer_us, our_us)


def geometric_mean(ratios: list[Comparison]) -> tuple[float, float, float]:
    """Geometric mean of independent ratios, and its 95 % interval.

    A ratio's interval is centred in the logarithm, where the mean's half width is the root of the
    sum of the squares, over the count.
    """
    centre = sum(math.log(one.ratio) for one in ratios) / len(ratios)
    reach = math.hypot(*(math.log(one.high / one.low) / 2 for one in ratios)) / len(ratios)
    return math.exp(centre), math.exp(centre - reach), math.exp(centre + reach)


@functools.cache
def study_keys(op: str) -> list[Key]:
    return [key for key in map(problem_key, cells()) if key[0] == op]


def findings(run: Results) -> Iterator[Finding]:
    """Every bar that the run has figures for."""
    for op in ARCHIVE_NAME.values():
        yield from _cell_bars(run, op)
        yield from _mean_bars(run, op)
        yield from _percent_bars(run, op)
        yield from _quack_bars(run, op)
    whole = all(run.timed(key, OURS) for op in ARCHIVE_NAME.values() for key in study_keys(op))
    if whole and not run.facts["beyond"]:
        spare = WALL_S / float(str(run.facts["wall_s"]))
        yield Finding(f"{WALL_S:g} s / the session's seconds", 1.0, spare, spare, spare)


def _cell_bars(run: Results, op: str) -> Iterator[Finding]:
    for key in study_keys(op):
        name = f"{_text(key)} / best peer"
        ours, peers = run.timed(key, OURS), run.timed(key, *PEERS)
        if not ours and OURS in run.rows.get(key, {}):
            verdict = run.rows[key][OURS]["verdict"]
            yield Finding(name, CELL_RATIO, math.nan, math.nan, math.nan, f"ours: {verdict}")
        if not ours or not peers:
            continue
        found, best_us, our_us = ratio(peers[0], ours[0]), median_us(peers[0]), median_us(ours[0])
        slack_us, below_us = SLACK_US[op]
        note = f"{peers[0]['provider']} {best_us:.1f} us, ours {our_us:.1f} us"
        excused = best_us < below_us and our_us <= best_us + slack_us
        yield Finding(name, CELL_RATIO, found.ratio, found.low, found.high, note, excused)


def _mean_bars(run: Results, op: str) -> Iterator[Finding]:
    for title, providers, bar in MEANS[op]:
        ratios = mean_of(run, op, *providers)
        if len(ratios) == len(study_keys(op)):
            yield Finding(f"{op} geometric mean / {title}", bar, *geometric_mean(ratios))


def mean_of(run: Results, op: str, *providers: str) -> list[Comparison]:
    """Ratios of the fastest of these providers, over the study's cells that have both times."""
    pairs = ((run.timed(key, *providers), run.timed(key, OURS)) for key in study_keys(op))
    return [ratio(peers[0], ours[0]) for peers, ours in pairs if peers and ours]


def _percent_bars(run: Results, op: str) -> Iterator[Finding]:
    for (rows, cols), bar in PERCENT[op].items():
        key = (op, str(rows), str(cols), "bf16", "bf16")
        for row in run.timed(key, OURS):
            yield _percent(row, PROBE[op], f"{_text(key)} % of {PROBE[op]}", bar)
    widest = (op, "32768", "8192", "bf16", "bf16")
    for reference in run.timed(widest, OURS):
        bar = float(reference["pct_matched"]) - PAIR_POINTS
        for key in study_keys(op):
            if key[:3] == widest[:3] and key != widest:
                for row in run.timed(key, OURS):
                    yield _percent(row, "matched", f"{_text(key)} % of matched, by bf16/bf16", bar)


def _percent(row: Row, probe: str, name: str, bar: float) -> Finding:
    value = float(row[f"pct_{probe}"])
    low, high = (value * median_us(row) / float(row[end]) for end in ("high_us", "low_us"))
    return Finding(name, bar, value, low, high)


def _quack_bars(run: Results, op: str) -> Iterator[Finding]:
    for (rows, cols), bar in QUACK_RATIO[op].items():
        key = (op, str(rows), str(cols), "bf16", "bf16")
        for quack, ours in zip(run.timed(key, "quack"), run.timed(key, OURS), strict=False):
            found = ratio(quack, ours)
            yield Finding(f"{_text(key)} / Quack", bar, found.ratio, found.low, found.high)


def _text(key: Key) -> str:
    op, m, n, act, weight = key
    return f"{op} {m}x{n} {act}/{weight}"


def main(folders: list[str], say: Callable[[str], object] = print) -> int:
    """Print every finding and those that fail once more; the exit code."""
    for folder, name in itertools.product(folders, ("perf.csv", "environment.json")):
        if not (Path(folder) / name).is_file():
            say(f"{folder} has no {name}: give the folder that pytest perf --out wrote")
            return 2
    first, *again = (load(Path(folder)) for folder in folders)
    if first.facts["simulated"]:
        say("the run is simulated: its times mean nothing, and no bar is held to them")
        return 1
    second = {found.name: found for run in again for found in findings(run)}
    failed, held = [], 0
    for found in findings(first):
        say(str(found))
        if found.failed and found.name in second:
            found = second[found.name]
            say(f"     measured again: {found}")
        if found.failed:
            failed.append(found)
        else:
            held += 1
    say(f"{held} bars hold, {len(failed)} fail; what the run has no figures for is not counted")
    if not first.facts.get("finished", True):
        say("NOT FINISHED: the run was ended before its last cell")
    if first.facts["suspect"]:
        say("SUSPECT: the probes moved by more than 2 % during the run")
    for found in failed:
        say(str(found))
    return int(bool(failed))


if __name__ == "__main__":
    options = argparse.ArgumentParser("python -m perf.bars", description=__doc__)
    options.add_argument("run", metavar="RUN_DIR", help="the folder that pytest perf --out wrote")
    options.add_argument("again", metavar="AGAIN_DIR", nargs="?", help="another, for what failed")
    given = options.parse_args()
    sys.exit(main([given.run, *filter(None, [given.again])]))

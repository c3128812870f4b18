"""The sections of a report between runs: one run against another."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from rmsnorm_raw.bandwidth import PROBES
from rmsnorm_raw.stats import MIN_SAMPLES, Comparison, Outcome, compare, compare_intervals
from rmsnorm_raw.study.page import Block, Heading, Items, Plots, Table, Text
from rmsnorm_raw.study.plots import intervals
from rmsnorm_raw.study.runs import (
    OP_OF,
    Cell,
    Run,
    Timing,
    is_ours,
)
from rmsnorm_raw.study.sections import (
    CELL,
    NONE,
    shown,
    value,
)

#: a verdict's colour
KIND = {
    Outcome.FASTER: "good", Outcome.SLOWER: "bad", Outcome.SAME: "same", Outcome.UNCLEAR: "same",
}  # fmt: skip
PERCENTS_DIFFER = (
    "A percentage is of the probe that its column names. Percentages of different probes do not "
    "compare, nor do those of one probe taken on different devices say which device is faster: "
    "GB/s do."
)

#: why its times of short calls are of another kind, see "Measuring" in ARCHITECTURE.md
PROTOCOL_1 = (
    "those of protocol 1 have a launch's turn in them, or other calls of a batch, on an H200 up to "
    "1 µs each"
)


def compare_rows(before: Timing, after: Timing, noise_pct: float) -> Comparison | None:
    """Of two rows with times: from all samples where both have them, else from the intervals.

    None where a row has neither, for then nothing is known of its spread.
    """
    if min(len(before.times_us), len(after.times_us)) >= MIN_SAMPLES:
        return compare(before.times_us, after.times_us, noise_pct)
    if before.us and after.us and before.interval_us and after.interval_us:
        return compare_intervals(
            (before.us, *before.interval_us), (after.us, *after.interval_us), noise_pct
        )
    return None


def shared_series(before: Run, after: Run) -> list[tuple[str, str]]:
    """Which series of two runs are set beside each other: those of one name.

    Where ours have no name in common, for one run has paths and the other none, each of ours is set
    beside each.
    """
    pairs = [(name, name) for name in before.series if name in after.series]
    if not any(is_ours(name) for name, _ in pairs):
        pairs = [(one, other) for one in before.ours for other in after.ours] + pairs
    return pairs


def comparison(before: Run, after: Run, noise: float, letters: tuple[str, str]) -> Iterator[Block]:
    """Cell by cell on one device; GB/s and percentages of the same-named probe across devices."""
    first, second = letters
    yield Heading(2, f"{second} against {first}")
    if before.simulated or after.simulated:
        yield Text("Simulated times mean nothing, so they are not compared.")
        return
    protocols = before.timing_protocol, after.timing_protocol
    if protocols[0] != protocols[1]:
        yield Text(
            f"{first} was timed by protocol {protocols[0]} and {second} by {protocols[1]}, so "
            "times of short calls do not compare" + f": {PROTOCOL_1}" * (1 in protocols) + "."
        )
    if before.device != after.device:
        yield from _across(before, after, letters)
        return
    yield Text(
        f"The speed of {second} over {first} with its 95 % interval, at a noise of {noise:g} %: "
        "FASTER and SLOWER are changes beyond the noise, interval and all; SAME is within it, "
        "interval and all; UNCLEAR is neither. An interval is of the samples within each run. The "
        "runs were not interleaved, so what the device did between them, its clocks and its "
        "temperature, stands in the ratios too: the probes, and peers that both runs have, show "
        "how much."
    )
    if before.table != after.table:
        yield Text(
            f"{first} is of `{before.table}` and {second} of `{after.table}`: a sweep times a cell "
            "by itself, the suites in turns with its peers. Short calls differ by that."
        )
    yield _opening_probes(before, after, letters)
    yield from _series_by_series(before, after, noise, letters)


def _opening_probes(before: Run, after: Run, letters: tuple[str, str]) -> Table:
    first, second = letters
    rows = []
    for probe in PROBES:
        probes = [run.probes("opening").get(probe) for run in (before, after)]
        speeds = [reading["gbps"] for reading in probes if reading]
        if len(speeds) == 2:
            change = f"{100 * speeds[1] / speeds[0] - 100:+.2f} %"
            rows.append([probe, *(f"{gbps:.1f}" for gbps in speeds), change])
    titles = ("probe", f"{first} GB/s", f"{second} GB/s", "change")
    return Table("Opening probes", titles, rows)


def _series_by_series(
    before: Run, after: Run, noise: float, letters: tuple[str, str]
) -> Iterator[Block]:
    """What all series come to; of ours also a plot and a table."""
    first, second = letters
    shared = shared_series(before, after)
    summary, plots, tables = [], [], []
    told = [
        f"{shown(name)}: {others} has no row of it"
        for run, others, place in ((before, second, 0), (after, first, 1))
        for name in run.series
        if name not in {pair[place] for pair in shared}
    ]
    for op, (one, other) in itertools.product(OP_OF, shared):
        found, apart = _changes(before, after, op, (one, other), noise, letters)
        if not found and not apart:
            continue
        name = shown(one) if one == other else f"{shown(one)} → {shown(other)}"
        verdicts = Counter(each.verdict for each in found)
        mean = geometric_mean(each.ratio for each in found) if found else None
        kinds = [str(verdicts[kind]) for kind in Outcome]
        left = str(sum(map(len, apart.values())))
        summary.append([f"{OP_OF[op]}, {name}", str(len(found)), value(mean, 4), *kinds, left])
        told += _told(f"{OP_OF[op]}, {name}", apart)
        if not found or not is_ours(one):
            continue
        slug = f"{second}-{first}-{op}-{one}-{other}".lower().replace(" ", "-")
        title = f"{OP_OF[op].capitalize()}, {name}: speed of {second} over {first}"
        drawn = [
            (each.cell.name, each.ratio, each.ends, KIND[each.verdict], each.verdict.value)
            for each in found
        ]
        plots.append(intervals(slug, title, drawn, "ratio of speeds, 95 % interval"))
        titles = (
            CELL, f"{first} µs", f"{second} µs", "ratio", "low", "high", "verdict",
            f"config of {first}", f"config of {second}",
        )  # fmt: skip
        tables.append(Table(title, titles, [each.row for each in found]))
    kinds = [kind.value for kind in Outcome]
    yield Table(
        "Verdicts, and geometric means of the ratio of speeds",
        ("", "cells", "geometric mean", *kinds, "not compared"), summary,
    )  # fmt: skip
    if told:
        yield Text("Not compared:")
        yield Items(told)
    if plots:
        yield Plots(plots)
        yield from tables
    else:
        yield Text("The two runs have no cell of ours to compare.")


def apart_for(one: Timing | None, other: Timing | None, letters: tuple[str, str]) -> str:
    """Why two runs' rows of a cell cannot be compared; "" where they can, or neither has a time."""
    sides = tuple(zip(letters, (one, other), strict=True))
    timed = [(letter, row.rows_run) for letter, row in sides if row and row.us]
    if len(timed) == 2:
        same = timed[0][1] == timed[1][1]
        return "" if same else " and ".join(f"{letter} ran {rows} rows" for letter, rows in timed)
    lost = [
        f"{letter} has {row.verdict} and no time" if row else f"{letter} has no row"
        for letter, row in sides
        if not (row and row.us)
    ]
    return lost[0] if timed else ""


def _told(name: str, apart: Mapping[str, Sequence[Cell]]) -> Iterator[str]:
    """An item a reason."""
    for reason, cells in apart.items():
        names = ", ".join(cell.name for cell in cells)
        yield f"{name}: {reason}, {len(cells)} {'cell' if len(cells) == 1 else 'cells'}: {names}"


def _cells(before: Run, after: Run, op: str) -> list[Cell]:
    """Those of both runs together."""
    return sorted({*before.cells(op), *after.cells(op)}, key=lambda cell: cell.order)


@dataclass(frozen=True, slots=True)
class _Change:
    """A cell that two runs have times of.

    Attributes:
        cell: which.
        us: medians of the one and the other.
        configs: of both.
        found: their comparison; None where nothing is known of the spread.
    """

    cell: Cell
    us: tuple[float, float]
    configs: tuple[str, str]
    found: Comparison | None

    @property
    def ratio(self) -> float:
        """Speed of the other over the one."""
        return self.us[0] / self.us[1]

    @property
    def ends(self) -> tuple[float, float] | None:
        """Of the ratio's interval."""
        return (self.found.low, self.found.high) if self.found else None

    @property
    def verdict(self) -> Outcome:
        return self.found.verdict if self.found else Outcome.UNCLEAR

    @property
    def row(self) -> list[str]:
        """Of a table."""
        before, after = self.configs
        return [
            self.cell.name, *(f"{us:.2f}" for us in self.us), f"{self.ratio:.4f}",
            *((f"{end:.4f}" for end in self.ends) if self.ends else (NONE, NONE)),
            self.verdict.value, before, after if after != before else "the same",
        ]  # fmt: skip


def _changes(
    before: Run,
    after: Run,
    op: str,
    series: tuple[str, str],
    noise: float,
    letters: tuple[str, str],
) -> tuple[list[_Change], dict[str, list[Cell]]]:
    """One series beside the other, and by reason the cells where they cannot be compared."""
    found: list[_Change] = []
    apart: dict[str, list[Cell]] = {}
    for cell in _cells(before, after, op):
        one, other = (
            run.by_key.get((cell, name)) for run, name in zip((before, after), series, strict=True)
        )
        if reason := apart_for(one, other, letters):
            # where one run has paths and the other none, no record is why a cell has no tuned row
            of_paths = series[0] != series[1] and "ours tuned" in series
            if (one and other) or not of_paths:
                apart.setdefault(reason, []).append(cell)
        elif one and other and one.us and other.us:
            compared = compare_rows(one, other, noise)
            found.append(_Change(cell, (one.us, other.us), (one.config, other.config), compared))
    return found, apart


def _across(before: Run, after: Run, letters: tuple[str, str]) -> Iterator[Block]:
    yield Text(
        "The devices differ, so nothing is called FASTER or SLOWER here: each cell has its GB/s "
        f"and, of each device's own probes, its percentages. {PERCENTS_DIFFER}"
    )
    for op in OP_OF:
        rows = []
        apart: dict[str, list[Cell]] = {}
        for cell in _cells(before, after, op):
            one, other = (_ours(run, cell) for run in (before, after))
            if reason := apart_for(one, other, letters):
                apart.setdefault(reason, []).append(cell)
            elif one and other and one.us:
                line = [value(each.gbps, 1) for each in (one, other)]
                for probe in PROBES:
                    line += [value(each.pct.get(probe), 2) for each in (one, other)]
                rows.append([cell.name, *line])
        sides = [
            f"{letter} {run.device}" for letter, run in zip(letters, (before, after), strict=True)
        ]
        titles = [f"{side} GB/s" for side in sides]
        titles += [f"{side} % of {probe}" for probe in PROBES for side in sides]
        yield Table(
            f"{OP_OF[op].capitalize()}, our best of each run",
            (CELL, *titles), rows,
        )  # fmt: skip
        if apart:
            yield Text("Not compared:")
            yield Items(list(_told(OP_OF[op], apart)))


def _ours(run: Run, cell: Cell) -> Timing | None:
    """Our fastest row of a cell, or one that says why there is no time."""
    rows = (run.by_key.get((cell, name)) for name in run.ours)
    return run.best(cell) or next((row for row in rows if row), None)

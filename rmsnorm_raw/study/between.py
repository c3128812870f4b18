"""The sections of a report between runs: one run against another, and beside the archives."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from rmsnorm_raw.bandwidth import MATCHED, PROBES
from rmsnorm_raw.stats import MIN_SAMPLES, Comparison, Outcome, compare, compare_intervals
from rmsnorm_raw.study.gains import count_row, count_titles, pair_plot
from rmsnorm_raw.study.page import Block, Heading, Plots, Table, Text
from rmsnorm_raw.study.plots import Plot, intervals
from rmsnorm_raw.study.runs import (
    ARCHIVE_PROBE,
    OP_OF,
    Cell,
    Pair,
    Run,
    Timing,
    archive_pairs,
    archive_rows,
    cell_of,
    is_ours,
)
from rmsnorm_raw.study.sections import (
    CELL,
    NONE,
    PAIR,
    percent,
    shown,
    value,
)

#: a verdict's colour
KIND = {
    Outcome.FASTER: "good", Outcome.SLOWER: "bad", Outcome.SAME: "same", Outcome.UNCLEAR: "same",
}  # fmt: skip
#: of the cell that the published study leads with
HEADLINE = "32768×8192"
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
    summary, plots, tables = [], [], []
    for op, (one, other) in itertools.product(OP_OF, shared_series(before, after)):
        found = list(_changes(before, after, op, (one, other), noise))
        if not found:
            continue
        name = shown(one) if one == other else f"{shown(one)} → {shown(other)}"
        verdicts = Counter(each.verdict for each in found)
        mean = geometric_mean(each.ratio for each in found)
        kinds = [str(verdicts[kind]) for kind in Outcome]
        summary.append([f"{OP_OF[op]}, {name}", str(len(found)), f"{mean:.4f}", *kinds])
        if not is_ours(one):
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
        ("", "cells", "geometric mean", *kinds), summary,
    )  # fmt: skip
    if plots:
        yield Plots(plots)
        yield from tables
    else:
        yield Text("The two runs share no cell of ours.")


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
    before: Run, after: Run, op: str, series: tuple[str, str], noise: float
) -> Iterator[_Change]:
    """The cells in which the one run has the first series, and the other the second."""
    for cell in before.cells(op):
        one, other = before.by_key.get((cell, series[0])), after.by_key.get((cell, series[1]))
        if one and other and one.us and other.us:
            found = compare_rows(one, other, noise)
            yield _Change(cell, (one.us, other.us), (one.config, other.config), found)


def _across(before: Run, after: Run, letters: tuple[str, str]) -> Iterator[Block]:
    yield Text(
        "The devices differ, so nothing is called FASTER or SLOWER here: each cell has its GB/s "
        f"and, of each device's own probes, its percentages. {PERCENTS_DIFFER}"
    )
    for op in OP_OF:
        rows = []
        for cell in before.cells(op):
            one, other = before.best(cell), after.best(cell)
            if one and other:
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


# ---- the archives --------------------------------------------------------------------------------


def headline_rows() -> list[list[str]]:
    """The published study's cell 32768×8192 bf16/bf16, by host, operation and path."""
    rows = []
    for row in archive_rows("hopper_quack_cells.csv"):
        cell = cell_of(row)
        if (cell.shape, cell.pair) != (HEADLINE, PAIR):
            continue
        probe, peak = ARCHIVE_PROBE[row["host"]]
        for path, column in (("analytical", "analytical_us"), ("searched", "tuned_us")):
            us = float(row[column])
            gbps = cell.gbps(us)
            share = f"{100 * gbps / peak:.2f} % of {probe} ({peak})"
            name = f"{row['host']} {OP_OF[cell.op]}"
            rows.append([name, path, f"{us:.3f}", f"{gbps:.1f}", share])
    return rows


def archives(run: Run, noise: float) -> Iterator[Block]:
    """Others' published figures, and this run's cells beside them."""
    yield Heading(2, "The archives beside")
    yield Text(
        "Published figures of others, shipped with the package (`rmsnorm_raw/study/archive`, "
        f"origins in its `SOURCES.md`); nothing of them was measured here. {PERCENTS_DIFFER} So "
        "the Hopper study's percentages stand beside this run's of the same probe alone: 2r1w for "
        "its H200, write for its H100."
    )
    yield Table(
        f"Quack's Hopper study at {HEADLINE} {PAIR}",
        ("", "config", "µs", "GB/s", "percent"), headline_rows(),
    )  # fmt: skip
    pairs = {(host, op): archive_pairs(host, op) for host in ARCHIVE_PROBE for op in OP_OF}
    rows = [count_row(f"{host} {OP_OF[op]}", found, noise) for (host, op), found in pairs.items()]
    yield Table(
        f"Quack's search against its analytical default, at a noise of {noise:g} %",
        count_titles(noise), rows,
    )  # fmt: skip
    yield Plots(list(_archive_plots(pairs, noise)))
    yield Text(_above_copy())
    for op in OP_OF:
        yield from _beside(run, op)


def _above_copy() -> str:
    """Why percentages of FlyDSL's copy probe exceed 100."""
    rows = [row for row in archive_rows("mi355x_published.csv") if row["probe_copy_gbps"]]
    best = max(rows, key=lambda row: float(row["gbps"]))
    copy, two_reads, write = (best[f"probe_{probe}_gbps"] for probe in ("copy", "2r1w", "write"))
    return (
        f"FlyDSL's forward comes to {100 * float(best['gbps']) / float(copy):.0f} % of copy: its "
        f"publisher's copy probe on the MI355X ({copy} GB/s) is slower than the 2r1w ({two_reads}) "
        f"and write ({write}) probes, so copy is no ceiling there."
    )


def _archive_plots(pairs: Mapping[tuple[str, str], Sequence[Pair]], noise: float) -> Iterator[Plot]:
    for (host, op), found in pairs.items():
        plot = pair_plot(
            f"archive-{host.lower()}-{op}",
            f"Quack's study, {host} {OP_OF[op]}: analytical against searched",
            found, ("analytical", "searched"),
            f"percent of {ARCHIVE_PROBE[host][0]}", noise,
        )  # fmt: skip
        if plot:
            yield plot


def _beside(run: Run, op: str) -> Iterator[Block]:
    """A run's cells beside the published ones: GB/s, and percent of the same-named probe."""
    published: dict[Cell, dict[str, tuple[float, float]]] = {}
    for row in archive_rows("hopper_quack_cells.csv"):
        if row["op"] == op:
            cell, (_, peak) = cell_of(row), ARCHIVE_PROBE[row["host"]]
            gbps = cell.gbps(min(float(row["analytical_us"]), float(row["tuned_us"])))
            published.setdefault(cell, {})[row["host"]] = gbps, 100 * gbps / peak
    amd = {cell_of(row): row for row in archive_rows("mi355x_published.csv") if row["op"] == op}
    probes = list(dict.fromkeys((MATCHED[OP_OF[op]], "write", "2r1w")))
    rows = []
    for cell in sorted({*published, *amd}, key=lambda cell: cell.order):
        best = run.best(cell)
        line = [value(best.gbps, 1) if best else NONE]
        line += [value(percent(best, probe), 2) for probe in probes]
        for host in ARCHIVE_PROBE:
            figures = published.get(cell, {}).get(host, (None, None))
            line += [value(figures[0], 1), value(figures[1], 2)]
        theirs = amd.get(cell)
        line.append(value(float(theirs["gbps"]), 1) if theirs else NONE)
        for probe in probes:
            of = theirs[f"probe_{probe}_gbps"] if theirs else ""
            share = 100 * float(theirs["gbps"]) / float(of) if theirs and of else None
            line.append(value(share, 2))
        rows.append([cell.name, *line])
    titles = ["this run GB/s", *(f"this run % of {probe}" for probe in probes)]
    for host, (of_probe, _) in ARCHIVE_PROBE.items():
        titles += [f"Quack, {host} GB/s", f"Quack, {host} % of {of_probe}"]
    titles += ["FlyDSL, MI355X GB/s", *(f"FlyDSL, MI355X % of {probe}" for probe in probes)]
    yield Table(
        f"{OP_OF[op].capitalize()}: our best of {run.label}, and the published figures (of Quack "
        "the better of default and search)",
        (CELL, *titles), rows,
    )  # fmt: skip

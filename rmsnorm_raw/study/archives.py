"""The section of a report on others' published figures, and a run's cells beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rmsnorm_raw.bandwidth import MATCHED
from rmsnorm_raw.study.between import PERCENTS_DIFFER
from rmsnorm_raw.study.gains import count_row, count_titles, pair_plot
from rmsnorm_raw.study.page import Block, Heading, Plots, Table, Text
from rmsnorm_raw.study.plots import Plot
from rmsnorm_raw.study.runs import (
    ARCHIVE_PROBE,
    OP_OF,
    Cell,
    Pair,
    Run,
    archive_pairs,
    archive_rows,
    cell_of,
)
from rmsnorm_raw.study.sections import CELL, NONE, PAIR, percent, value

#: of the cell that the published study leads with
HEADLINE = "32768×8192"


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
    capped = 0
    for cell in sorted({*published, *amd}, key=lambda cell: cell.order):
        best = run.best(cell)
        if best and best.rows_run < cell.m:
            best = None
            capped += 1
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
    if capped:
        yield Text(
            f"Of {capped} {'cell' if capped == 1 else 'cells'} this run ran fewer rows than the "
            "published ones: its figures are left out here."
        )

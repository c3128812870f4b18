"""What searched configs are worth beside a default: counts at a noise, dumbbells, a section."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean

from rmsnorm_raw.bandwidth import MATCHED
from rmsnorm_raw.study.page import Block, Heading, Plots, Table, Text
from rmsnorm_raw.study.plots import Plot, change, dumbbells
from rmsnorm_raw.study.runs import OP_OF, Pair, Run, cell_of
from rmsnorm_raw.study.sections import CELL, NONE


def counts(pairs: Sequence[Pair], noise_pct: float) -> Counter[str]:
    """How many cells gained, lost, stayed within the noise, or have one config for both."""
    names = {"good": "gains", "bad": "losses", "same": "within"}
    return Counter(
        "one config" if pair.tuned_us is None else names[change(pair.ratio, noise_pct)]
        for pair in pairs
    )


def count_row(name: str, pairs: Sequence[Pair], noise_pct: float) -> list[str]:
    """Of a table with :func:`count_titles`."""
    found = counts(pairs, noise_pct)
    mean = geometric_mean([pair.ratio for pair in pairs])
    said = [str(found[kind]) for kind in ("gains", "losses", "within", "one config")]
    return [name, str(len(pairs)), *said, f"{mean:.4f}"]


def count_titles(noise_pct: float) -> tuple[str, ...]:
    """What is counted."""
    return (
        "", "cells", f"faster by > {noise_pct:g} %", f"slower by > {noise_pct:g} %", "within",
        "same config", "geometric mean of the speed ratio",
    )  # fmt: skip


def pair_plot(
    name: str, title: str, pairs: Sequence[Pair], ends: tuple[str, str], unit: str, noise: float
) -> Plot | None:
    """Dumbbells of the cells whose two configs differ and have a percentage."""
    rows = [
        (pair.cell.name, pair.default_pct, pair.tuned_pct, pair.ratio)
        for pair in pairs
        if pair.default_pct is not None and pair.tuned_pct is not None
    ]
    return dumbbells(name, title, rows, ends, unit, noise) if rows else None


def tuned(run: Run, noise: float, prefix: str = "") -> Iterator[Block]:
    """What tuned configs are worth beside the ladder's."""
    yield Heading(2, "Ladder against tuned")
    found = {
        (source, op): mine
        for source, pairs in run.pairs().items()
        for op in OP_OF
        if (mine := [pair for pair in pairs if pair.cell.op == op])
    }
    if found:
        rows = [count_row(f"{OP_OF[op]}, {s}", mine, noise) for (s, op), mine in found.items()]
        caption = f"Gains and losses of tuned configs, at a noise of {noise:g} %"
        yield Table(caption, count_titles(noise), rows)
        drawn = (
            pair_plot(
                f"{prefix}tuned-{index}",
                f"{OP_OF[op].capitalize()}, {source}: ladder against tuned",
                mine, ("ladder", "tuned"), f"percent of {MATCHED[OP_OF[op]]}", noise,
            )
            for index, ((source, op), mine) in enumerate(found.items())
        )  # fmt: skip
        if plots := [plot for plot in drawn if plot]:
            yield Text("Dumbbells show the cells where the two are different configs.")
            yield Plots(plots)
    else:
        yield Text("No tuned config was timed beside the ladder's in this run.")
    if searches := run.searches.get("tune.csv"):
        yield from _searches(searches)


def _searches(rows: Sequence[Mapping[str, str]]) -> Iterator[Block]:
    """What ``tune.csv`` says: verdicts by operation, and the configs that won."""
    verdicts = Counter((row["op"], row["verdict"]) for row in rows)
    yield Text(
        "The searches (`tune.csv`): "
        + "; ".join(
            f"{OP_OF[op]}, {count} {'cell' if count == 1 else 'cells'} {verdict}"
            for (op, verdict), count in sorted(verdicts.items())
        )
        + ". LADDER: no candidate was faster beyond doubt, so the ladder's config stays."
    )
    won = [
        [cell_of(row).name, OP_OF[row["op"]], *_ratios(row), row["config"], row["ladder"]]
        for row in rows
        if row["verdict"] == "TUNED"
    ]
    if won:
        yield Table(
            "What the searches found: speed over the ladder's config, and its 95 % interval",
            (CELL, "operation", "cold", "steady", "tuned", "ladder"), won,
        )  # fmt: skip


def _ratios(row: Mapping[str, str]) -> Iterator[str]:
    for regime in ("cold", "steady"):
        ratio, low, high = (row[f"{regime}_{name}"] for name in ("ratio", "low", "high"))
        yield f"{ratio} [{low}, {high}]" if ratio else NONE

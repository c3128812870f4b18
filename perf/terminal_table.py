"""What the suites print at the end: a line a provider and cell, and the suites beside the cells."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import bars

from rmsnorm_raw.study.cells import ARCHIVE_NAME

if TYPE_CHECKING:
    from conftest import Session


def cell_id(key: bars.Key) -> str:
    op, m, n, act, weight = key
    return f"{op}-{m}x{n}-{act}-{weight}"


def table(session: Session) -> Iterator[str]:
    """A line a provider and cell, then what they come to."""
    run = session.results()
    if session.simulated:
        yield "times are simulated: they mean nothing"
    unit = "sim. us" if session.simulated else "us"
    yield from _others(session, unit)
    if not session.rows:
        return
    yield (
        f"{'cell':<28} {'provider':<14} {unit:>9} {'GB/s':>7} {'% best':>7} {'% match':>7}  "
        "peer / ours [95 %]"
    )
    for key, rows in run.rows.items():
        ours = run.timed(key, bars.OURS)
        for row in rows.values():
            head = f"{cell_id(key):<28} {row['provider']:<14}"
            if not row["times_us"]:
                yield f"{head} {row['verdict']}: {row['note'].partition(chr(10))[0]}"
                continue
            figures = (row[name] or "-" for name in ("gbps", "pct_best", "pct_matched"))
            line = f"{head} {bars.median_us(row):9.2f} " + " ".join(f"{it:>7}" for it in figures)
            if ours and row["provider"] != bars.OURS:
                found = bars.ratio(row, ours[0])
                line += f"  {found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"
            yield line
    for op, provider in itertools.product(ARCHIVE_NAME.values(), bars.PEERS):
        if ratios := bars.mean_of(run, op, provider):
            mean, low, high = bars.geometric_mean(ratios)
            yield (
                f"{op}, geometric mean over {len(ratios)} cells, {provider} / ours: "
                f"{mean:.3f} [{low:.3f}, {high:.3f}]"
            )
    if session.opening and session.closing:
        for before in session.opening.readings:
            after = session.closing.reading(before.probe)
            yield f"probe {before.probe}: {before.gbps:.1f} GB/s, at the end {after.gbps:.1f}"
        if session.opening.is_suspect(session.closing):
            yield "SUSPECT: a probe moved by more than 2 %: let the device rest and repeat"


def _others(session: Session, unit: str) -> Iterator[str]:
    """The suites beside the cells; a ratio is to ours in the group."""
    width = max((28, *(len(group) for group, *_ in session.others)))
    if session.others:
        figures = f"{unit:>11} {'GB/s':>7} {'% best':>7} {'/ ours':>7}"
        yield f"{'group':<{width}} {'provider':<14} {figures}  slug"
    ours = {group: us for group, us, info in session.others if info["provider"] == bars.OURS}
    for group, median_us, info in session.others:
        speeds = (f"{info[name]:.1f}" if name in info else "-" for name in ("gbps", "pct_best"))
        ratio = f"{median_us / ours[group]:.3f}" if group in ours else "-"
        cells = " ".join(f"{it:>7}" for it in (*speeds, ratio))
        yield f"{group:<{width}} {info['provider']:<14} {median_us:11.2f} {cells}  {info['slug']}"

"""What a sweep comes to, in lines and in a printed table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rmsnorm_raw.bandwidth import DRIFT_PCT
from rmsnorm_raw.study.cells import ARCHIVE_NAME
from rmsnorm_raw.study.runs import OURS
from rmsnorm_raw.study.sweep import PERCENT_OF, Outcome
from rmsnorm_raw.study.table_file import Row


def summary(outcome: Outcome) -> list[str]:
    """What a sweep comes to, in lines: geometric means, the probes' drift, failed cells."""
    origins = sorted(outcome.chosen_by.items())
    lines = ["configs: " + ", ".join(f"{count} {origin}" for origin, count in origins)]
    if outcome.rows_cap is not None:
        lines.append(f"rows are capped at {outcome.rows_cap}")
    if outcome.opening is None:
        lines.append("times are simulated: they mean nothing")
    lines += [each for op in ARCHIVE_NAME.values() for each in _means(outcome, op)]
    if outcome.opening and outcome.closing:
        for before in outcome.opening.readings:
            after = outcome.closing.reading(before.probe)
            lines.append(
                f"probe {before.probe}: {before.gbps:.1f} GB/s, at the end {after.gbps:.1f} "
                f"({100 * after.gbps / before.gbps - 100:+.2f} %), {before.variant.slug}"
            )
        if outcome.suspect:
            lines.append(
                f"SUSPECT: a probe moved by {outcome.drift_pct:.1f} % "
                f"during the run (limit {DRIFT_PCT:g} %): let the device rest and repeat"
            )
    lines += dict.fromkeys(idle_line(found) for found in outcome.idle if idle_line(found))
    lines.append(f"{len(outcome.rows) - len(outcome.failed)} of {len(outcome.rows)} rows passed")
    for row in outcome.failed:
        cell = f"{row['op']} {row['m']}x{row['n']} {row['act']}/{row['weight']} {who(row)}"
        first_line = row["note"].splitlines()[0]
        lines.append(f"{row['verdict']}: {cell}: {first_line} (the whole note is in sweep.csv)")
    return lines


def who(row: Row) -> str:
    """Who ran a row: our config's slug, or the peer."""
    return row["config"] if row["provider"] == OURS else row["provider"]


def idle_line(found: Mapping[str, object]) -> str:
    """What :func:`.idle.check` found, where that is anything but "idle"."""
    if found["state"] == "unknown":
        return f"NOT KNOWN TO BE IDLE: {found['why']}"
    if found["state"] == "busy":
        return "BUSY: the GPU was not idle, and --allow-busy let the run begin"
    return ""


def _means(outcome: Outcome, op: str) -> Iterator[str]:
    columns = (
        ("median_us", "us" if outcome.opening else "simulated us"),
        ("gbps", "GB/s"),
        *((f"pct_{probe}", f"% of {probe}") for probe in PERCENT_OF),
    )
    timed: dict[str, dict[tuple[str, ...], Row]] = {}  # by path or peer, then by cell
    for row in outcome.rows:
        if row["op"] == op and row["median_us"]:
            cell = tuple(row[name] for name in ("m", "n", "act", "weight"))
            timed.setdefault(row["path"] or row["provider"], {})[cell] = row
    for name, rows in timed.items():
        means = [
            f"{mean:.1f} {unit}"
            for column, unit in columns
            if (mean := geometric_mean(rows.values(), column)) is not None
        ]
        yield f"{op} {name}, geometric mean of {len(rows)} cells: {', '.join(means)}"
    ladder = timed.get("ladder", {})
    for name, rows in timed.items():
        if name == "ladder" or outcome.opening is None or not (both := rows.keys() & ladder):
            continue
        theirs, ours = (
            geometric_mean([each[cell] for cell in both], "median_us") for each in (rows, ladder)
        )
        if theirs and ours:
            yield f"{op} {name} / ladder, geometric mean of {len(both)} cells: {theirs / ours:.3f}"


#: column of a sweep -> its title in a printed table; what is not here is in the CSV alone
TITLES = {
    "provider": "provider", "path": "path", "op": "op", "m": "m", "n": "n", "act": "x",
    "weight": "w", "extras": "beside", "config": "config", "verdict": "verdict", "median_us": "us",
    "gbps": "GB/s", "pct_copy": "% copy", "pct_write": "% write", "pct_2r1w": "% 2r1w",
    "pct_best": "% best", "pct_matched": "% matched",
}  # fmt: skip


def printed(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of a table, without columns that are empty throughout (simulated speeds)."""
    titles = TITLES | ({"median_us": "simulated us"} if rows[0]["simulated"] == "true" else {})
    columns = [column for column in titles if any(row.get(column) for row in rows)]
    return [titles[column] for column in columns], [[row[c] for c in columns] for row in rows]


def geometric_mean(rows: Iterable[Row], column: str) -> float | None:
    """Of a column of numbers, over the rows that have one; None where none has."""
    found = [float(row[column]) for row in rows if row[column]]
    return statistics.geometric_mean(found) if found else None

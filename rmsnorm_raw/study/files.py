"""A run's files, read so that what is damaged or foreign is named by file, line and column."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rmsnorm_raw.bandwidth import PROBES
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.study.runs import (
    ENVIRONMENT,
    OP_OF,
    OURS,
    TABLES,
    Cell,
    Run,
    Timing,
    cell_of,
    count,
)

T = TypeVar("T")
Row = Mapping[str, str]

#: of searches, with what is read of them; each lies in the run's folder, or in one below it of its
#: own name
BESIDE = {
    "tuned_vs_ladder.csv": {"op", "m", "n", "act", "weight", "regime", "tuned_us", "ladder_us"},
    "tune.csv": {
        "op", "m", "n", "act", "weight", "verdict", "config", "ladder",
        "cold_ratio", "cold_low", "cold_high", "steady_ratio", "steady_low", "steady_high",
    },
}  # fmt: skip
#: columns without which a row is no time of a cell
NEEDED = {"op", "m", "n", "act", "weight", "config", "verdict", "median_us"}
#: of our kernels' rows; "" in a table without the column, and of a peer
PATHS = ("", "ladder", "tuned")
#: the least and the most that makes sense; a time's are the tables' last digit and eleven days.
#: Speeds and percentages of tiny calls are rounded, to 0 too
TIME_US = (1e-3, 1e12)
SPEED_GBPS = (0.0, 1e6)
PROBE_GBPS = (1e-3, 1e6)
PERCENT = (0.0, 1e3)
RATIO = (1e-6, 1e6)
MEND = "restore the file as it was written"
#: facts of environment.json that a page takes apart, where they are there
KINDS: Mapping[str, type] = {"command": list, "tuned": dict, "timing_protocol": int}


def read_run(folder: Path) -> Run:
    """Read a run's files.

    Raises:
        InvalidInput: a file is missing, damaged, of something else, or cannot be read.
    """
    try:
        return _run(folder)
    except OSError as error:
        raise InvalidInput(f"{error.filename} cannot be read: {error.strerror}") from error


def _run(folder: Path) -> Run:
    tables = [name for name in TABLES if (folder / name).is_file()]
    if len(tables) != 1 or not (folder / ENVIRONMENT).is_file():
        raise InvalidInput(
            f"{folder} is no run: a run is a folder with {ENVIRONMENT} and one of "
            f"{' and '.join(TABLES)}, as `rmsnorm-raw sweep --out` and `pytest perf --out` write"
        )
    beside: dict[str, str] = {}
    for name in BESIDE:
        for place in (name, f"{Path(name).stem}/{name}"):
            if name not in beside and (folder / place).is_file():
                beside[name] = place
    names = (tables[0], ENVIRONMENT, *beside.values())
    data = {name: (folder / name).read_bytes() for name in names}
    timings, torn = _timings(folder / tables[0], data[tables[0]])
    searches = {}
    for name, place in beside.items():
        rows, piece = table(folder / place, data[place], BESIDE[name], _searched)
        if piece:
            raise InvalidInput(f"{folder / place} ends in a piece of a row: {MEND}")
        searches[name] = tuple(rows)
    facts = environment(folder / ENVIRONMENT, data[ENVIRONMENT])
    digests = {name: digest(content) for name, content in data.items()}
    return Run(folder, tables[0], facts, timings, torn, searches, digests)


def digest(data: bytes) -> str:
    """Its sha256."""
    return hashlib.sha256(data).hexdigest()


def _timings(path: Path, data: bytes) -> tuple[tuple[Timing, ...], bool]:
    """The rows of a run's table, and whether a piece of one follows them."""
    found: dict[tuple[Cell, str], Timing] = {}
    rows_run: dict[Cell, int] = {}

    def add(row: Row) -> None:
        timing = _timing(row)
        if (timing.cell, timing.series) in found:
            raise ValueError(f"{timing.series} has {timing.cell} twice")
        if (rows := rows_run.setdefault(timing.cell, timing.rows_run)) != timing.rows_run:
            raise ValueError(f"rows_run is {timing.rows_run}, and {rows} in a row of the same cell")
        found[timing.cell, timing.series] = timing

    _, torn = table(path, data, NEEDED, add)
    if not found:
        raise InvalidInput(f"{path} has no rows")
    return tuple(found.values()), torn


def _timing(row: Row) -> Timing:
    cell = cell_of(row)
    rows_run = count(row, "rows_run") if row.get("rows_run") else cell.m
    if rows_run > cell.m:
        raise ValueError(f"rows_run is {rows_run}, and the cell has {cell.m} rows")
    name, path, verdict = row.get("provider", OURS), row.get("path", ""), row["verdict"]
    for column, word in (("provider", name), ("verdict", verdict)):
        if word.split() != [word]:
            raise ValueError(f"{column} is {word!r}: it must be one word")
    if path not in PATHS:
        raise ValueError(f"path is {path!r}: it must be ladder or tuned, or empty")
    low, high = (figure(row, column, TIME_US) for column in ("low_us", "high_us"))
    percents = {
        column.removeprefix("pct_"): figure(row, column, PERCENT)
        for column in row
        if column.startswith("pct_")
    }
    samples = row.get("times_us", "").split()
    times = [figure({"times_us": each}, "times_us", TIME_US) for each in samples]
    timing = Timing(
        cell=cell,
        series=f"{name} {path}".strip() if name == OURS else name,
        config=row["config"],
        verdict=verdict,
        moved_bytes=replace(cell, m=rows_run).problem.logical_bytes(),
        rows_run=rows_run,
        us=figure(row, "median_us", TIME_US),
        interval_us=(low, high) if low and high else None,
        gbps=figure(row, "gbps", SPEED_GBPS),
        pct={probe: percent for probe, percent in percents.items() if percent is not None},
        times_us=tuple(each for each in times if each),
        note=row.get("note", ""),
    )
    return timing if timing.us and verdict == "PASS" else _without_time(timing)


def _without_time(timing: Timing) -> Timing:
    """No figure of a row that has no median or is no PASS; a median that stands there is told."""
    said = f"its time of {timing.us:g} µs does not count" if timing.us else ""
    note = "; ".join(filter(None, (timing.note, said)))
    return replace(timing, us=None, interval_us=None, gbps=None, pct={}, times_us=(), note=note)


def _searched(row: Row) -> Row:
    """A row of a table of searches, when all that is read of it makes sense."""
    cell_of(row).problem.logical_bytes()
    for column in row:
        if column in ("tuned_us", "ladder_us"):
            figure(row, column, TIME_US)
        elif column.endswith(("_ratio", "_low", "_high")):
            figure(row, column, RATIO)
    if "regime" in row and len({bool(row[c]) for c in ("regime", "tuned_us", "ladder_us")}) > 1:
        raise ValueError("regime, tuned_us and ladder_us belong together: all three, or none")
    return row


# ---- CSV and JSON --------------------------------------------------------------------------------


def table(
    path: Path, data: bytes, needed: Collection[str], parse: Callable[[Row], T]
) -> tuple[list[T], bool]:
    """Parse the rows of a CSV that were written to their end.

    Args:
        path: for messages.
        data: of the file.
        needed: columns that each row has.
        parse: takes the text by column; what is wrong with it is a ValueError.

    Returns:
        What ``parse`` made of the rows, and whether a piece of one follows them.

    Raises:
        InvalidInput: it is no CSV in UTF-8, lacks a column, or a row cannot be parsed.
    """
    records = list(_records(path, data))
    (_, head), rows = records[0] if records else (1, []), records[1:]
    for line, fields in rows:
        if any(_has_rows(field, head) for field in fields):
            raise InvalidInput(
                f"{path}, line {line}: a quote is missing or too many, and takes in the next row: "
                f"{MEND}"
            )
    torn = bool(rows) and (not data.endswith(b"\n") or len(rows[-1][1]) < len(head))
    if torn:
        del rows[-1]
    if rows and (missing := set(needed) - set(head)):
        raise InvalidInput(f"{path}, line 1, has no column {', '.join(sorted(missing))}: {MEND}")
    if len(set(head)) < len(head):
        raise InvalidInput(f"{path}, line 1, names a column twice: {MEND}")
    place = ""
    found = []
    try:
        for number, (line, fields) in enumerate(rows, 1):
            place = f"line {line}, row {number}"
            if len(fields) != len(head):
                raise ValueError(f"{len(fields)} fields under {len(head)} titles")
            found.append(parse(dict(zip(head, fields, strict=True))))
    except ValueError as error:
        raise InvalidInput(f"{path}, {place}, cannot be read: {error}: {MEND}") from error
    return found, torn


def _has_rows(field: str, head: Sequence[str]) -> bool:
    """Whether a later line of a field names a cell, as a row does; notes have lines too."""
    lines = (dict(zip(head, line.split(","), strict=False)) for line in field.splitlines()[1:])
    return any(line.get("op") in OP_OF and line.get("m", "").isdigit() for line in lines)


def _records(path: Path, data: bytes) -> Iterator[tuple[int, list[str]]]:
    """The records with the lines that they begin on, titles first."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            line = data.count(b"\n", 0, error.start) + 1
            raise InvalidInput(f"{path}, line {line}, is not UTF-8: {MEND}") from error
        text = data[: error.start].decode("utf-8-sig")  # a piece of a row ends in half a character
    reader = csv.reader(io.StringIO(text, newline=""))
    line, number = 1, 0
    try:
        for fields in reader:
            if fields:
                yield line, fields
                number += 1
            line = reader.line_num + 1
    except csv.Error as error:
        raise InvalidInput(
            f"{path}, line {line}, row {number}, cannot be read: {error}: {MEND}"
        ) from error


def figure(row: Row, column: str, sense: tuple[float, float]) -> float | None:
    """A number of a row; None where it has none.

    Raises:
        ValueError: what stands there is no number, or none that makes sense.
    """
    text = row.get(column, "")
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not sense[0] <= number <= sense[1]:
        raise ValueError(f"{column} is {text!r}, and {sense[0]:g} to {sense[1]:g} makes sense")
    return number


def environment(path: Path, data: bytes) -> dict[str, Any]:
    """The facts of a run's environment.json.

    Raises:
        InvalidInput: it is no JSON, lacks the device or the time, or has probes that are none.
    """
    try:
        facts = json.loads(data)
        # what JSON lets through and no page can hold: nan, infinity, halves of characters
        json.dumps(facts, ensure_ascii=False, allow_nan=False).encode()
        facts["device"]["name"], facts["device"]["simulated"], facts["time_utc"]
        for name, kind in KINDS.items():
            if not isinstance(facts.get(name, kind()), kind):
                raise ValueError(f"{name} is {facts[name]!r}")
        if not all(isinstance(part, str) for part in facts.get("command", ())):
            raise ValueError(f"command is {facts['command']!r}")
        rooflines = [(name, facts.get(name)) for name in ("roofline_opening", "roofline_closing")]
        rooflines += [("roofline_resumed", each) for each in facts.get("roofline_resumed") or ()]
        for name, probes in rooflines:
            if probes:
                _require_probes(name, probes)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        said = f"it has no {error}" if isinstance(error, KeyError) else error
        raise InvalidInput(f"{path} is not of a run: {said}: {MEND}") from error
    return dict(facts)


def _require_probes(name: str, probes: Any) -> None:
    if not isinstance(probes, dict) or probes.keys() != set(PROBES):
        raise ValueError(f"{name} is {probes!r}: it must have {', '.join(PROBES)}")
    for probe, reading in probes.items():
        for column, (least, most) in (("gbps", PROBE_GBPS), ("median_us", TIME_US)):
            found = reading.get(column) if isinstance(reading, dict) else None
            if not (isinstance(found, int | float) and least <= found <= most):
                raise ValueError(
                    f"{column} of {probe} in {name} is {found!r}, and {least:g} to {most:g} makes "
                    "sense"
                )

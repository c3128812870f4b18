"""The sweep: every cell of the study through the gate and the timer, beside a measured roofline.

``environment.json`` is written before the first cell and again at the end, and each row of
``sweep.csv`` as its cell is done, so an interrupted sweep keeps what it has.
"""

from __future__ import annotations

import csv
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rmsnorm_raw import bandwidth, check, environment, measure, module, store, workbench
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.bandwidth import DRIFT_PCT, PROBES, Roofline
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.errors import RmsnormRawError
from rmsnorm_raw.measure import Samples
from rmsnorm_raw.problem import SHORT_NAME, Problem
from rmsnorm_raw.study.cells import ARCHIVE_NAME, cells

PERCENT_OF = (*PROBES, "best", "matched")
#: of sweep.csv, as text. ``op`` to ``weight`` are those of the archive; ``rows_run`` is m, or less
#: where rows are capped. ``verdict`` is PASS, FAIL (the gate) or the name of the error that left
#: the cell without a time. ``worst`` is the largest error over its bound; ``low_us`` to
#: ``high_us`` is the median's 95 % interval; ``note`` says why sampling stopped, or what went
#: wrong. What does not apply is empty: on the simulator, gbps and every percentage.
COLUMNS = (
    "op", "m", "n", "act", "weight", "rows_run", "config", "verdict", "worst", "median_us",
    "low_us", "high_us", "p10_us", "p90_us", "samples", "discarded", "gbps",
    *(f"pct_{probe}" for probe in PERCENT_OF), "simulated", "note",
)  # fmt: skip
#: rows of a cell on the simulator. The ladder's largest grid there is 8 programs of 4 rows: they go
#: round three times, and an odd number leaves a ragged block wherever a block has several rows
SIMULATED_ROWS = 67

Row = dict[str, str]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished sweep.

    Attributes:
        rows: of sweep.csv, by column.
        rows_cap: the most rows that a cell was run with; None for no cap.
        opening: the roofline before the cells; None on the simulator.
        closing: the same probes after them.
        csv_path: the table.
        environment_path: what the run stood on.
        chosen_by: how many configs were "tuned", "known best" and the "ladder"'s.
    """

    rows: tuple[Row, ...]
    rows_cap: int | None
    opening: Roofline | None
    closing: Roofline | None
    csv_path: Path
    environment_path: Path
    chosen_by: Mapping[str, int]

    @property
    def failed(self) -> tuple[Row, ...]:
        """The cells that have no time, for the reason in their verdict and note."""
        return tuple(row for row in self.rows if row["verdict"] != "PASS")


def sweep(
    backend: Backend,
    out_dir: Path,
    *,
    problems: Sequence[Problem] | None = None,
    rows_cap: int | None = None,
    budget_s: float = 0.3,
    progress: Progress = lambda done, of, what: None,
) -> Outcome:
    """Build, verify and time each problem with the best config known; write a row for each.

    Kernels are built first, in parallel. A cell that fails, at the gate or before, gets no time and
    does not stop the others: see :attr:`Outcome.failed`.

    Args:
        backend: where to run.
        out_dir: folder of sweep.csv and environment.json; created if need be.
        problems: None for the 90 cells of the study.
        rows_cap: the most rows a cell is run with; its config stays that of the whole cell. None
            for :data:`SIMULATED_ROWS` on the simulator and no cap on a GPU.
        budget_s: seconds of sampling a cell.
        progress: called with (steps done, steps in all, the step that begins).

    Raises:
        OSError: ``out_dir`` cannot be written.
        WrongResult: a probe of the roofline is wrong.
    """
    device, simulated = backend.device, backend.device.simulated
    problems = cells() if problems is None else problems
    resolved = [store.resolve(problem, backend) for problem in problems]
    planned = [(problem, config) for problem, (config, _) in zip(problems, resolved, strict=True)]
    chosen_by = dict(Counter(origin for _, origin in resolved))
    if rows_cap is None and simulated:
        rows_cap = SIMULATED_ROWS
    out_dir.mkdir(parents=True, exist_ok=True)
    csv_path, environment_path = out_dir / "sweep.csv", out_dir / "environment.json"
    facts: dict[str, object] = {
        "command": environment.command(sys.argv),
        "backend": backend.name,
        "device": asdict(device),
        "rows_cap": rows_cap,
        "budget_s": budget_s,
        "chosen_by": chosen_by,
    }
    build_all(planned, backend, progress)
    steps = len(planned) + (0 if simulated else 2)
    opening = closing = None
    if not simulated:
        progress(0, steps, "opening roofline")
        opening = bandwidth.roofline(backend)
        facts["roofline_opening"] = roofline_facts(opening)
    environment.write(environment_path, facts)
    rows: list[Row] = []
    with csv_path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        file.flush()
        for problem, config in planned:
            progress(len(rows) + (not simulated), steps, str(problem))
            rows.append(_run_cell(problem, config, backend, rows_cap, opening, budget_s))
            table.writerow(rows[-1])
            file.flush()
    if opening is not None:
        progress(steps - 1, steps, "closing roofline")
        closing = bandwidth.remeasure(opening, backend)
        facts |= closing_facts(opening, closing)
        environment.write(environment_path, facts)
    progress(steps, steps, "done")
    return Outcome(tuple(rows), rows_cap, opening, closing, csv_path, environment_path, chosen_by)


def roofline_facts(roofline: Roofline) -> dict[str, object]:
    """A roofline for a JSON file: by probe, its speed, its time and how it was run."""
    return {
        reading.probe: {
            "gbps": reading.gbps,
            "median_us": reading.samples.median_us,
            "moved_bytes": reading.moved_bytes,
            "variant": reading.variant.slug,
            "stopped": reading.samples.stopped,
        }
        for reading in roofline.readings
    }


def closing_facts(opening: Roofline, closing: Roofline) -> dict[str, object]:
    """The probes at the end of a run for its JSON file, and how far they moved."""
    return {
        "roofline_closing": roofline_facts(closing),
        "drift_pct": opening.drift_pct(closing),
        "suspect": opening.is_suspect(closing),
    }


def cell_columns(problem: Problem, config: Config, device: DeviceSpec) -> Row:
    """The columns of :data:`COLUMNS` that name a cell; the others are empty."""
    return dict.fromkeys(COLUMNS, "") | {
        "op": ARCHIVE_NAME[problem.op],
        "m": str(problem.rows),
        "n": str(problem.cols),
        "act": SHORT_NAME[problem.dtype],
        "weight": SHORT_NAME.get(problem.weight_dtype or "", "none"),
        "rows_run": str(problem.rows),
        "config": config.slug,
        "simulated": str(device.simulated).lower(),
    }


def time_columns(
    problem: Problem, verdict: check.Verdict, samples: Samples, roofline: Roofline | None
) -> Row:
    """The columns of a verified and timed kernel.

    Args:
        problem: what was run.
        verdict: a pass.
        samples: its times.
        roofline: what speeds are a percentage of; None on the simulator, which has no speeds.
    """
    row = {
        "verdict": "PASS",
        "worst": _worst(verdict),
        "median_us": f"{samples.median_us:.3f}",
        "low_us": f"{samples.low_us:.3f}",
        "high_us": f"{samples.high_us:.3f}",
        "p10_us": f"{samples.p10_us:.3f}",
        "p90_us": f"{samples.p90_us:.3f}",
        "samples": str(len(samples.times_us)),
        "discarded": str(samples.discarded),
        "note": samples.stopped,
    }
    if roofline is not None:
        gbps = samples.gbps(problem.logical_bytes())
        row["gbps"] = f"{gbps:.1f}"
        for probe in PERCENT_OF:
            row[f"pct_{probe}"] = f"{roofline.percent(gbps, probe, problem.op):.2f}"
    return row


def summary(outcome: Outcome) -> list[str]:
    """What a sweep comes to, in lines: geometric means, the probes' drift, failed cells."""
    origins = sorted(outcome.chosen_by.items())
    lines = ["configs: " + ", ".join(f"{count} {origin}" for origin, count in origins)]
    if outcome.rows_cap is not None:
        lines.append(f"rows are capped at {outcome.rows_cap}")
    if outcome.opening is None:
        lines.append("times are simulated: they mean nothing")
    for name in ARCHIVE_NAME.values():
        rows = [row for row in outcome.rows if row["op"] == name]
        means = [
            f"{mean:.1f} {unit}"
            for column, unit in (
                ("median_us", "us" if outcome.opening else "simulated us"),
                ("gbps", "GB/s"),
                *((f"pct_{probe}", f"% of {probe}") for probe in PERCENT_OF),
            )
            if (mean := geometric_mean(rows, column)) is not None
        ]
        if means:
            lines.append(f"{name}, geometric mean of its cells: {', '.join(means)}")
    if outcome.opening and outcome.closing:
        for before in outcome.opening.readings:
            after = outcome.closing.reading(before.probe)
            lines.append(
                f"probe {before.probe}: {before.gbps:.1f} GB/s, at the end {after.gbps:.1f} "
                f"({100 * after.gbps / before.gbps - 100:+.2f} %), {before.variant.slug}"
            )
        if outcome.opening.is_suspect(outcome.closing):
            lines.append(
                f"SUSPECT: a probe moved by {outcome.opening.drift_pct(outcome.closing):.1f} % "
                f"during the run (limit {DRIFT_PCT:g} %): let the device rest and repeat"
            )
    lines.append(f"{len(outcome.rows) - len(outcome.failed)} of {len(outcome.rows)} cells passed")
    for row in outcome.failed:
        cell = f"{row['op']} {row['m']}x{row['n']} {row['act']}/{row['weight']} {row['config']}"
        first_line = row["note"].splitlines()[0]
        lines.append(f"{row['verdict']}: {cell}: {first_line} (the whole note is in sweep.csv)")
    return lines


#: column of a sweep -> its title in a printed table; what is not here is in the CSV alone
TITLES = {
    "op": "op", "m": "m", "n": "n", "act": "x", "weight": "w", "config": "config",
    "verdict": "verdict", "median_us": "us", "gbps": "GB/s", "pct_copy": "% copy",
    "pct_write": "% write", "pct_2r1w": "% 2r1w", "pct_best": "% best", "pct_matched": "% matched",
}  # fmt: skip


def printed(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of a table, without columns that are empty throughout (simulated speeds)."""
    titles = TITLES | ({"median_us": "simulated us"} if rows[0]["simulated"] == "true" else {})
    columns = [column for column in titles if any(row[column] for row in rows)]
    return [titles[column] for column in columns], [[row[c] for c in columns] for row in rows]


def geometric_mean(rows: Iterable[Row], column: str) -> float | None:
    """Of a column of numbers, over the rows that have one; None where none has."""
    logs = [math.log(float(row[column])) for row in rows if row[column]]
    return math.exp(sum(logs) / len(logs)) if logs else None


def build_all(
    planned: Iterable[tuple[Problem, Config]],
    backend: Backend,
    progress: Progress = lambda done, total, label: None,
) -> None:
    """Fill the backend's cache, see :func:`.module.build_all`.

    An error is left for the cell that meets it again.
    """
    sources = [workbench.render(problem, config, backend.device) for problem, config in planned]
    count, done = len({source.digest for source in sources}), itertools.count()
    module.build_all(
        sources,
        backend,
        ended=lambda source, found: progress(next(done), count, f"build {count} kernels"),
    )


def _run_cell(
    problem: Problem,
    config: Config,
    backend: Backend,
    rows_cap: int | None,
    opening: Roofline | None,
    budget_s: float,
) -> Row:
    capped = problem if rows_cap is None else replace(problem, rows=min(problem.rows, rows_cap))
    row = cell_columns(problem, config, backend.device) | {"rows_run": str(capped.rows)}
    try:
        kernel = workbench.build(capped, config, backend=backend)
        verdict = kernel.check()
        if not verdict.passed:
            faults = "; ".join(verdict.message.splitlines())
            return row | {"verdict": "FAIL", "worst": _worst(verdict), "note": faults}
        samples = measure.measure(capped, config, kernel.binary, verdict, budget_s=budget_s)
    except RmsnormRawError as error:
        return row | {"verdict": type(error).__name__, "note": str(error)}
    return row | time_columns(capped, verdict, samples, opening)


def _worst(verdict: check.Verdict) -> str:
    return f"{max(verdict.worst.values(), default=0.0):.3g}"

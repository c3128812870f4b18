"""Searches of many problems, and ablations: what ``rmsnorm-raw tune`` runs, and its files.

``environment.json`` is written before the first search and again at the end, each row of
``tune.csv`` as its search ends, and at last ``<arch>.json``: the records that apply, as
``known_best`` has them. A problem that has a record is not searched again, so a run that was
interrupted goes on where it stopped.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rmsnorm_raw import ablation, environment, stats, store, tuner
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.errors import RmsnormRawError
from rmsnorm_raw.lab import WORDS, Steps, counted
from rmsnorm_raw.measure import TIMING_PROTOCOL, Regime
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.study.cells import ARCHIVE_NAME, problem_columns
from rmsnorm_raw.tuner import Decision
from rmsnorm_raw.worker import Worker

KINDS = tuple(WORDS)
REGIME_COLUMNS = tuple(
    f"{regime}_{name}" for regime in ("cold", "steady") for name in ("ratio", "low", "high")
)
INTERRUPTED = "INTERRUPTED"
#: of tune.csv, as text. ``verdict`` is TUNED, LADDER, INTERRUPTED, or the name of the error that
#: ended a search; ``origin`` says whether it was searched in this run. Ratios are the ladder's time
#: over the winner's at m rows, both orders together, with their 95 % intervals. ``faults`` names
#: what failed in this run's search, each as "config: kind: first line"
COLUMNS = (
    "op", "m", "n", "act", "weight", "extras", "verdict", "config", "ladder", "origin", "effort",
    "took_s", *KINDS, *REGIME_COLUMNS, "why", "faults",
)  # fmt: skip
Row = dict[str, str]
Progress = Callable[[int, int, str], None]


def tune_all(
    problems: Sequence[Problem],
    backend: Backend,
    out_dir: Path,
    *,
    effort: str = "quick",
    budget_s: float | None = None,
    resume: bool = True,
    steps: Steps | None = None,
    progress: Progress = lambda done, of, what: None,
) -> tuple[list[Row], list[Decision]]:
    """Tune each problem, all with one worker; see :func:`.tuner.tune`. Ctrl-C ends the run.

    Returns:
        The rows of tune.csv, and the decisions; a problem whose search failed has a row alone.

    Raises:
        OSError: ``out_dir`` cannot be written.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    facts = {
        "command": environment.command(sys.argv), "backend": backend.name,
        "device": asdict(backend.device), "effort": effort, "budget_s": budget_s,
        "timing_protocol": TIMING_PROTOCOL,
    }  # fmt: skip
    environment.write(out_dir / "environment.json", facts)
    rows: list[Row] = []
    decisions: list[Decision] = []
    with (
        (out_dir / "tune.csv").open("w", newline="", encoding="utf-8") as file,
        Worker.on(backend) as worker,
    ):
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for problem in problems:
            done = len(rows)
            row = problem_columns(problem)

            def step(what: str, done: int = done, problem: Problem = problem) -> None:
                progress(done, len(problems), f"{problem}: {what}")

            step("begins")
            try:
                decision = tuner.tune(
                    problem, effort, backend=backend, budget_s=budget_s, resume=resume,
                    steps=steps or worker, progress=step,
                )  # fmt: skip
            except KeyboardInterrupt:  # as its worker started, or its record was written
                rows.append(row | {"verdict": INTERRUPTED, "why": "interrupted"})
            except (RmsnormRawError, MemoryError) as error:
                rows.append(row | {"verdict": type(error).__name__, "why": str(error)})
            else:
                decisions.append(decision)
                rows.append(row | decision_columns(decision))
            table.writerow(dict.fromkeys(COLUMNS, "") | rows[-1])
            file.flush()
            if rows[-1]["verdict"] == INTERRUPTED:
                break
    said = summary(rows, len(problems), simulated=backend.device.simulated)
    environment.write(out_dir / "environment.json", facts | {"summary": said})
    if not backend.device.simulated:
        store.export(store.applying(backend).items(), out_dir / f"{backend.device.arch}.json")
    return rows, decisions


def decision_columns(decision: Decision) -> Row:
    """The other columns of :data:`COLUMNS`."""
    verdict = "TUNED" if decision.tuned else "LADDER"
    row = {
        "verdict": INTERRUPTED if decision.interrupted else verdict,
        "config": decision.config.slug,
        "ladder": decision.ladder.slug,
        "origin": decision.origin,
        "effort": decision.effort,
        "took_s": f"{decision.took_s:.2f}",
        "why": decision.why,
        "faults": "; ".join(f"{c.slug}: {fault.brief}" for c, fault in decision.faults.items()),
    }
    row |= {kind: str(decision.counts[kind]) for kind in KINDS if kind in decision.counts}
    for regime, found in decision.comparisons.items():
        for name in ("ratio", "low", "high"):
            row[f"{regime}_{name}"] = f"{getattr(found, name):.4f}"
    return row


def summary(rows: Sequence[Row], of: int | None = None, *, simulated: bool = False) -> list[str]:
    """What a run comes to, in lines.

    Args:
        of: the problems that it was to search; by default as many as there are rows.
        simulated: it kept nothing.
    """
    ended = [row for row in rows if row["verdict"] != INTERRUPTED]
    lines = []
    if len(ended) < len(rows):
        again = "nothing is kept on the simulator: the same command begins anew"
        if not simulated:
            again = "repeat the command, without --anew, and it goes on"
        lines.append(f"interrupted with {len(ended)} of {of or len(rows)} problems done; {again}")
    tuned = sum(row["verdict"] == "TUNED" for row in rows)
    kept = sum(row["verdict"] == "LADDER" for row in rows)
    lines.append(f"{tuned} of {len(ended)} problems tuned; the ladder stays in {kept}")
    for name in ARCHIVE_NAME.values():
        took = [
            float(row["took_s"])
            for row in rows
            if row["op"] == name and row.get("origin") == "searched"
        ]
        if took:
            lines.append(
                f"{name}: {len(took)} searched, mean {sum(took) / len(took):.2f} s, most "
                f"{max(took):.2f} s"
            )
    counts = {kind: sum(int(row.get(kind) or 0) for row in rows) for kind in KINDS}
    lines.append(f"configs: {counted(counts)}")
    for row in ended:
        if row["verdict"] not in ("TUNED", "LADDER"):
            first_line = row["why"].partition("\n")[0]
            name = f"{row['op']} {row['m']}x{row['n']} {row['act']}/{row['weight']}"
            name += f" + {row['extras']}" if row.get("extras") else ""
            lines.append(f"{row['verdict']}: {name}: {first_line} (the whole of it is in tune.csv)")
    return lines


#: of a printed table of tune.csv
TITLES = ("op", "m", "n", "x", "w", "verdict", "config", "s", "cold", "steady")


def table_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Rows of tune.csv for :data:`TITLES`."""
    names = ("op", "m", "n", "act", "weight", "verdict", "config", "took_s", "cold_ratio")
    return [[row.get(name, "") for name in (*names, "steady_ratio")] for row in rows]


#: of ablation.csv, as text
CHANGE_COLUMNS = (
    "op", "m", "n", "act", "weight", "extras", "regime", "change", "config", "median_us", "low_us",
    "high_us", "samples", "verdict", "ratio", "ratio_low", "ratio_high", "why_not",
)  # fmt: skip


def change_columns(change: ablation.Change) -> dict[str, str]:
    """The columns of :data:`CHANGE_COLUMNS` from ``change`` on, as text."""
    row = {"change": change.change or "the ladder", "config": change.config.slug}
    if change.samples is not None:
        taken = change.samples
        row |= {"regime": taken.regime, "samples": str(len(taken.times_us))}
        row |= {"median_us": f"{taken.median_us:.3f}", "low_us": f"{taken.low_us:.3f}"}
        row["high_us"] = f"{taken.high_us:.3f}"
    if change.comparison is not None:
        found = change.comparison
        row |= {"verdict": found.verdict.value, "ratio": f"{found.ratio:.4f}"}
        row |= {"ratio_low": f"{found.low:.4f}", "ratio_high": f"{found.high:.4f}"}
    return row | {"why_not": change.why_not}


def verdicts(changes: Sequence[ablation.Change]) -> dict[str, int]:
    """How many changes are FASTER, SLOWER, SAME and UNCLEAR."""
    counts = dict.fromkeys((outcome.value for outcome in stats.Outcome), 0)
    for change in changes:
        if change.comparison is not None:
            counts[change.comparison.verdict.value] += 1
    return counts


#: of a printed table of an ablation
CHANGE_TITLES = ("change", "config", "us", "speed beside the ladder's")


def change_rows(changes: Sequence[ablation.Change]) -> list[list[str]]:
    """An ablation for :data:`CHANGE_TITLES`."""
    return [
        [
            change.change or "the ladder",
            change.config.slug,
            f"{change.samples.median_us:.2f}" if change.samples else "",
            str(change),
        ]
        for change in changes
    ]


def ablate(
    problem: Problem,
    backend: Backend,
    out_dir: Path,
    *,
    regime: Regime = "cold",
    progress: Progress = lambda done, of, what: None,
) -> tuple[ablation.Change, ...]:
    """:func:`.ablation.ablate` in a worker; writes ablation.csv and environment.json.

    Raises:
        OSError: ``out_dir`` cannot be written.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    count = itertools.count()
    with Worker.on(backend) as worker:
        changes = ablation.ablate(
            problem, backend.device, worker, regime=regime,
            progress=lambda what: progress(next(count), 4, what),
        )  # fmt: skip
    with (out_dir / "ablation.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, CHANGE_COLUMNS)
        table.writeheader()
        for change in changes:
            named = problem_columns(problem) | change_columns(change)
            table.writerow(dict.fromkeys(CHANGE_COLUMNS, "") | named)
    facts = {
        "command": environment.command(sys.argv), "backend": backend.name,
        "device": asdict(backend.device), "problem": str(problem), "regime": regime,
        "verdicts": verdicts(changes), "timing_protocol": TIMING_PROTOCOL,
    }  # fmt: skip
    environment.write(out_dir / "environment.json", facts)
    return changes

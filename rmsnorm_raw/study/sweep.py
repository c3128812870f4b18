"""The sweep: every cell of the study through the gate and the timer, beside a measured roofline.

A cell is run with the ladder's config, with the tuned one where a record names another, and with
each chosen peer. Files are those of :mod:`.folder`: a sweep that was ended at any moment goes on
from its last whole row.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rmsnorm_raw import bandwidth, check, environment, ladder, measure, module, store, workbench
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.bandwidth import DRIFT_PCT, PROBES, Roofline
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.errors import LaunchError, RmsnormRawError, WrongResult
from rmsnorm_raw.measure import Samples
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.study.cells import cells, problem_columns
from rmsnorm_raw.study.folder import Folder
from rmsnorm_raw.study.origin import Origin
from rmsnorm_raw.study.providers import Cell, Provider, current_stream, providers
from rmsnorm_raw.study.rooflines import closing_facts, read_roofline, roofline_facts
from rmsnorm_raw.study.runs import OURS
from rmsnorm_raw.study.table_file import Row, TableFile

PERCENT_OF = (*PROBES, "best", "matched")
#: of sweep.csv, as text. ``path`` is how our config was chosen, "ladder" or "tuned", and empty for
#: a peer; ``module`` is what was called. ``op`` to ``weight`` are those of the archive;
#: ``rows_run`` is m, or less where rows are capped. ``verdict`` is PASS, FAIL (the gate) or the
#: name of the error that left the cell without a time. ``worst`` is the largest error over its
#: bound; ``low_us`` to ``high_us`` is the median's 95 % interval; ``note`` says why sampling
#: stopped, or what went wrong; ``times_us`` has every sample. What does not apply is empty: on the
#: simulator, gbps and every percentage.
COLUMNS = (
    "provider", "path", "version", "module", "op", "m", "n", "act", "weight", "rows_run", "config",
    "verdict", "worst", "median_us", "low_us", "high_us", "p10_us", "p90_us", "samples",
    "discarded", "gbps", *(f"pct_{probe}" for probe in PERCENT_OF), "simulated", "note",
    "times_us",
)  # fmt: skip
#: the columns that name a row
KEY = ("provider", "path", "op", "m", "n", "act", "weight")
#: those that have positive numbers where they are not empty
NUMBERS = (
    "m", "n", "rows_run", "median_us", "low_us", "high_us", "p10_us", "p90_us", "samples",
    "times_us",
)  # fmt: skip
#: likewise, or 0
SPEEDS = ("gbps", *(f"pct_{probe}" for probe in PERCENT_OF))
TABLE = TableFile("sweep.csv", COLUMNS, KEY, NUMBERS, SPEEDS)
#: characters; a compiler's log may have more than the 131,072 that csv reads of a field
MOST_NOTE = 100_000
#: rows of a cell on the simulator. The ladder's largest grid there is 8 programs of 4 rows: they go
#: round three times, and an odd number leaves a ragged block wherever a block has several rows
SIMULATED_ROWS = 67

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
        chosen_by: how many cells have a "tuned", a "known best" or the "ladder"'s config.
        resumed: the same probes each time that the run was gone on with.
        idle: whether the GPU was idle, by :func:`.idle.check`: at the beginning and at launch.
    """

    rows: tuple[Row, ...]
    rows_cap: int | None
    opening: Roofline | None
    closing: Roofline | None
    csv_path: Path
    environment_path: Path
    chosen_by: Mapping[str, int]
    resumed: tuple[Roofline, ...] = ()
    idle: tuple[Mapping[str, object], ...] = ()

    @property
    def failed(self) -> tuple[Row, ...]:
        """The rows that have no time, for the reason in their verdict and note."""
        return tuple(row for row in self.rows if row["verdict"] != "PASS")

    @property
    def drift_pct(self) -> float | None:
        """The most that a probe was off its opening figure, in percent; None on the simulator."""
        if self.opening is None or self.closing is None:
            return None
        return self.opening.drift_pct(*self.resumed, self.closing)

    @property
    def suspect(self) -> bool:
        """Whether the device changed too much during the run for its figures to mean much."""
        return self.drift_pct is not None and self.drift_pct > DRIFT_PCT


@dataclass(frozen=True, slots=True)
class Contest:
    """One row to be: a provider on a cell.

    Attributes:
        problem: the whole cell.
        provider: who runs it.
        config: ours; a peer has its own.
        path: "ladder" or "tuned", "" for a peer.
    """

    problem: Problem
    provider: Provider
    config: Config
    path: str

    def __str__(self) -> str:
        return f"{self.problem} {self.path or self.provider.name}"

    def columns(self, device: DeviceSpec) -> Row:
        """Those that name it; the others are empty."""
        return cell_columns(self.problem, device) | {
            "provider": self.provider.name,
            "path": self.path,
            "version": self.provider.version,
            "module": self.provider.module,
            "config": self.config.slug if self.path else "",
        }


def contests(
    problems: Iterable[Problem], backend: Backend, chosen: Sequence[Provider]
) -> Iterator[Contest]:
    """The rows of a sweep: of each cell ours, by the ladder and as tuned, then the peers."""
    for problem in problems:
        default = ladder.default_config(problem, backend.device)
        tuned, _ = store.resolve(problem, backend)
        for provider in chosen:
            if not provider.serves(problem):
                continue
            yield Contest(problem, provider, default, "ladder" if provider.name == OURS else "")
            if provider.name == OURS and tuned != default:
                yield Contest(problem, provider, tuned, "tuned")


def sweep(
    backend: Backend,
    out_dir: Path,
    *,
    problems: Sequence[Problem] | None = None,
    chosen: Sequence[Provider] | None = None,
    origins: Sequence[Origin] = (),
    rows_cap: int | None = None,
    budget_s: float = 0.3,
    look: Callable[[], Mapping[str, object]] = lambda: {"state": "not looked at"},
    opened: Callable[[], object] = lambda: None,
    progress: Progress = lambda done, of, what: None,
) -> Outcome:
    """Build, verify and time each problem with every provider; write a row for each.

    Kernels are built first, in parallel. A row that fails, at the gate or before, gets no time and
    does not stop the others: see :attr:`Outcome.failed`. An unfinished sweep in ``out_dir`` is gone
    on with.

    Args:
        backend: where to run.
        out_dir: folder of sweep.csv and environment.json; created if need be.
        problems: None for the 90 cells of the study.
        chosen: providers; None for ours alone.
        origins: where they come from, for environment.json.
        rows_cap: the most rows a cell is run with; its config stays that of the whole cell. None
            for :data:`SIMULATED_ROWS` on the simulator and no cap on a GPU.
        budget_s: seconds of sampling a row.
        look: whether the device is idle; called at the beginning, and at launch, when all is built.
            It raises what shall end the sweep.
        opened: called when ``out_dir`` is found fit to be written to.
        progress: called with (steps done, steps in all, the step that begins).

    Raises:
        InvalidInput: ``out_dir`` holds something else; see :class:`.folder.Folder`.
        CannotWrite: it cannot be written.
        LaunchError: the device is lost; the row that lost it is written.
        WrongResult: a probe of the roofline is wrong.
    """
    looks = [look()]
    simulated = backend.device.simulated
    problems = cells() if problems is None else problems
    chosen = providers()[:1] if chosen is None else chosen
    planned = list(contests(problems, backend, chosen))
    chosen_by = dict(Counter(store.resolve(problem, backend)[1] for problem in problems))
    if rows_cap is None and simulated:
        rows_cap = SIMULATED_ROWS
    facts = {
        "command": environment.command(sys.argv),
        "backend": backend.name,
        "device": asdict(backend.device),
        "toolchain": backend.toolchain._asdict(),
        "timing_protocol": measure.TIMING_PROTOCOL,
        "providers": {origin.name: origin.facts for origin in origins}
        or [provider.name for provider in chosen],
        "rows_cap": rows_cap,
        "budget_s": budget_s,
        "cells": [str(problem) for problem in problems],
        "tuned": {str(it.problem): it.config.slug for it in planned if it.path == "tuned"},
        "chosen_by": chosen_by,
    }
    keys = {it: TABLE.key_of(it.columns(backend.device)) for it in planned}
    table = replace(TABLE, planned=frozenset(keys.values()))
    with contextlib.closing(Folder(out_dir, table, facts)) as folder:
        opened()
        done = {TABLE.key_of(row) for row in folder.rows}
        left = [it for it in planned if keys[it] not in done]
        build_all([(it.problem, it.config) for it in left if it.path], backend, progress)
        looks.append(look())
        folder.record(idle=[*folder.facts.get("idle", ()), *looks])
        stream = current_stream(backend) if len(chosen) > 1 else 0
        steps = len(planned) + (0 if simulated else 2)
        opening = closing = None
        resumed: list[Roofline] = []
        if not simulated:
            progress(len(folder.rows), steps, "opening roofline")
            opening, resumed = _open_roofline(folder, backend, stream)
        bench = _Bench(backend, stream, rows_cap, budget_s, opening)
        for contest in left:
            progress(len(folder.rows) + (not simulated), steps, str(contest))
            folder.append(bench.row(contest))
            if folder.rows[-1]["verdict"] not in ("PASS", "FAIL"):
                _require_device(contest, backend, stream)
        bench.cell = None
        at_the_end: dict[str, object] = {}
        if opening is not None:
            progress(steps - 1, steps, "closing roofline")
            closing = bandwidth.remeasure(opening, backend, stream=stream)
            at_the_end = closing_facts(opening, closing, resumed)
        folder.finish(**at_the_end)
        outcome = Outcome(
            tuple(folder.rows), rows_cap, opening, closing, folder.csv_path,
            folder.environment_path, chosen_by, tuple(resumed), tuple(folder.facts["idle"]),
        )  # fmt: skip
    progress(steps, steps, "done")
    return outcome


def _open_roofline(
    folder: Folder, backend: Backend, stream: int
) -> tuple[Roofline, list[Roofline]]:
    """The run's opening roofline, and its probes again each time it was gone on with."""
    if "roofline_opening" not in folder.facts:
        opening = bandwidth.roofline(backend, stream=stream)
        folder.record(roofline_opening=roofline_facts(opening))
        return opening, []
    name = backend.device.name
    opening = read_roofline(name, folder.facts["roofline_opening"])
    resumed = [read_roofline(name, each) for each in folder.facts.get("roofline_resumed", ())]
    resumed.append(bandwidth.remeasure(opening, backend, stream=stream))
    folder.record(roofline_resumed=[roofline_facts(each) for each in resumed])
    return opening, resumed


def cell_columns(problem: Problem, device: DeviceSpec) -> Row:
    """The columns of :data:`COLUMNS` that name a cell; the others are empty."""
    named = {"rows_run": str(problem.rows), "simulated": str(device.simulated).lower()}
    return dict.fromkeys(COLUMNS, "") | problem_columns(problem) | named


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
        "times_us": " ".join(f"{took_us:.3f}" for took_us in samples.times_us),
    }
    if roofline is not None:
        gbps = samples.gbps(problem.logical_bytes())
        row["gbps"] = f"{gbps:.1f}"
        for probe in PERCENT_OF:
            row[f"pct_{probe}"] = f"{roofline.percent(gbps, probe, problem.op):.2f}"
    return row


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


@dataclass(slots=True)
class _Bench:
    """What makes a row of a contest."""

    backend: Backend
    stream: int
    rows_cap: int | None
    budget_s: float
    opening: Roofline | None
    cell: Cell | None = None  # the last peer's; the next one works on its inputs too

    def row(self, contest: Contest) -> Row:
        problem = contest.problem
        if self.rows_cap is not None:
            problem = replace(problem, rows=min(problem.rows, self.rows_cap))
        found = self._ours(problem, contest) if contest.path else self._peer(problem, contest)
        return contest.columns(self.backend.device) | {"rows_run": str(problem.rows)} | found

    def _ours(self, problem: Problem, contest: Contest) -> Row:
        try:
            kernel = workbench.build(problem, contest.config, backend=self.backend)
            verdict = kernel.check()
            if not verdict.passed:
                faults = "; ".join(verdict.message.splitlines())
                return {"verdict": "FAIL", "worst": _worst(verdict), "note": faults}
            samples = measure.measure(
                problem, contest.config, kernel.binary, verdict, stream=self.stream,
                budget_s=self.budget_s,
            )  # fmt: skip
        except (RmsnormRawError, MemoryError) as error:
            return failed_columns(error)
        return time_columns(problem, verdict, samples, self.opening)

    def _peer(self, problem: Problem, contest: Contest) -> Row:
        if self.cell is None or self.cell.problem != problem:
            self.cell = Cell(problem, contest.config, self.backend, self.stream)
        try:
            contender = contest.provider.prepare(self.cell)
            samples = measure.time_calls(
                contender.calls, self.backend, stream=self.stream, budget_s=self.budget_s
            )
        except WrongResult as error:
            return {"verdict": "FAIL", "note": str(error)}
        # a peer raises whatever it likes, and has a row
        except (Exception, SystemExit) as error:  # noqa: BLE001
            return failed_columns(error)
        found = time_columns(problem, contender.verdict, samples, self.opening)
        return found | {"config": contender.config}


def failed_columns(error: BaseException) -> Row:
    """The columns of a row that has no time because of an error."""
    return {"verdict": type(error).__name__, "note": (str(error) or repr(error))[:MOST_NOTE]}


def _require_device(contest: Contest, backend: Backend, stream: int) -> None:
    """A kernel with a fault poisons the device for this process: every later row would fail."""
    try:
        backend.synchronize(stream)
    except LaunchError as error:
        raise LaunchError(
            f"{contest} has lost the device ({error}). Its row says so, and the rows before it are "
            "kept: give the same command with this --out to go on after it"
        ) from error


def _worst(verdict: check.Verdict) -> str:
    return f"{max(verdict.worst.values(), default=0.0):.3g}"

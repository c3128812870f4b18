"""The suites' session and their table.

``pytest perf --benchmark-only`` times our kernel and its peers on the study's 90 cells, each after
its gate; beside them the probes, the host's time of a call, a Llama block, and the whole operator.
The warm-up, and how many copies of a queue-ahead the host's cost wants, are those of
:mod:`rmsnorm_raw.measure`; the rounds are pytest-benchmark's, on the clock of ``clock.py``. A round
whose host was late is dropped and counted; those of a short call are averaged by fours, as that
module's samples are. Probes run before the first cell and after the last.

Without a GPU the suites run our kernel in the simulator, at few rows; its times are marked as
simulated and mean nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import bars
import pytest
from clock import Clock, Rounds
from out_folder import TABLE, OutFolder, require_usable
from terminal_table import cell_id, table

from rmsnorm_raw import bandwidth, environment, measure, workbench
from rmsnorm_raw.ahead import calls_a_sample, copy_bytes, means
from rmsnorm_raw.backends import get_backend
from rmsnorm_raw.errors import install
from rmsnorm_raw.problem import Op, Problem
from rmsnorm_raw.stats import MIN_SAMPLES
from rmsnorm_raw.study import rooflines, sweep
from rmsnorm_raw.study.cells import cells
from rmsnorm_raw.study.providers import Cell, Provider, current_stream, providers

#: the device is busy for under 20 s of a session at this count, whatever the peers take; of a short
#: call a datum is the mean of four rounds, and there are four times as many
ROUNDS = 60
SIMULATED_ROWS = 4


# ---- the session ---------------------------------------------------------------------------------


class Session:
    """What the cells of one pytest session share."""

    def __init__(self, config: pytest.Config) -> None:
        self.out: Path | None = config.getoption("--out")
        self.beyond: bool = config.getoption("--beyond")
        self.backend = get_backend()
        self.stream = current_stream(self.backend)
        self.clock = Clock(self.backend, self.stream)
        everyone = providers(quack_search=config.getoption("--quack-search"))
        self.providers = everyone[:1] if self.backend.device.simulated else everyone
        self._args = config.invocation_params.args
        self._began = perf_counter()
        self.opening: bandwidth.Roofline | None = None
        self.closing: bandwidth.Roofline | None = None
        self.rows: list[dict[str, str]] = []
        self.infos: list[dict[str, Any]] = []
        self.others: list[tuple[str, float, dict[str, Any]]] = []  # group, median us, extra_info
        self.ended = False  # whether the last cell was reached
        self._folder = OutFolder(None, {})
        self._cell: Cell | None = None

    @property
    def simulated(self) -> bool:
        return self.backend.device.simulated

    def contests(self, op: Op) -> Iterator[tuple[Problem, Provider]]:
        """(problem, provider) of a suite, the providers of a cell one after another."""
        study = [problem for problem in cells() if problem.op == op]
        for problem, provider in itertools.product(study, self.providers):
            if provider.serves(problem):
                yield problem, provider
        if self.beyond:
            make = Problem.forward if op == "forward" else Problem.backward
            for (rows, cols), provider in itertools.product(bars.BEYOND, self.providers):
                if provider.name in ("ours", "quack"):
                    yield make(rows, cols, "bf16"), provider

    def _build_ahead(self, problems: set[Problem]) -> None:
        """Compile our kernels, a core each; an error is left for the cell that meets it again."""
        chosen = map(self.cell, problems)
        sweep.build_all([(cell.problem, cell.config) for cell in chosen], self.backend)

    def cell(self, problem: Problem) -> Cell:
        """The cell of a problem; the tensors of the cell before it are let go."""
        config = workbench.default_config(problem, self.backend.device)
        if self.simulated:
            problem = replace(problem, rows=min(problem.rows, SIMULATED_ROWS))
        if self._cell is None or self._cell.problem != problem:
            self._cell = Cell(problem, config, self.backend, self.stream)
        return self._cell

    def run(self, benchmark: Any, problem: Problem, provider: Provider) -> None:
        """Gate a provider on a cell, time it and write its row, whatever comes of it."""
        cell = self.cell(problem)
        row = dict.fromkeys(TABLE.columns, "") | sweep.cell_columns(problem, self.backend.device)
        row |= {"provider": provider.name, "path": "ladder" if provider.name == bars.OURS else ""}
        row |= {"version": provider.version, "module": provider.module}
        row |= {"rows_run": str(cell.problem.rows)}
        try:
            row |= self._timed(benchmark, cell, provider)
        except (Exception, SystemExit) as error:
            self._write(row | sweep.failed_columns(error))
            raise
        if row["times_us"]:
            benchmark.extra_info |= _info(row, provider, cell.problem)
            self.infos.append(benchmark.extra_info)
        self._write(row)

    def _timed(self, benchmark: Any, cell: Cell, provider: Provider) -> dict[str, str]:
        began = perf_counter()
        contender = provider.prepare(cell)
        prepare_s = perf_counter() - began
        samples = self.time(benchmark, contender.calls)
        if samples is None:
            return {"verdict": "PASS", "config": contender.config}
        return sweep.time_columns(cell.problem, contender.verdict, samples, self.opening) | {
            "config": contender.config,
            "prepare_s": f"{prepare_s:.2f}",
        }

    def time(self, benchmark: Any, calls: Sequence[measure.Call]) -> measure.Samples | None:
        """Device time of one operation, a round a call; None under --benchmark-disable.

        Raises:
            Unmeasurable: the host was late in most rounds.
        """
        warm = measure.time_calls(
            calls, self.backend, stream=self.stream, max_samples=12, min_samples=12
        )
        # one copy more than the timer wanted: here pytest-benchmark's own work is host time too
        copies = warm.evicted_bytes // copy_bytes(self.backend.device) + 1
        rounds = Rounds(self.clock, calls, 0 if self.simulated else copies)
        together = 1 if self.simulated else calls_a_sample(warm.median_us)
        count = MIN_SAMPLES if self.simulated else ROUNDS * together
        benchmark.pedantic(rounds.run, setup=rounds.setup, rounds=count)
        if not benchmark.enabled:  # --benchmark-disable: run once, no times
            return None
        late_us = [0.0] * count if self.simulated else rounds.late_us()
        data = benchmark.stats.stats.data
        kept = [took_s for took_s, late in zip(data, late_us, strict=True) if late <= 0]
        if len(kept) < count // 2:
            benchmark.has_error = True
            raise measure.Unmeasurable(
                f"the host was late in {count - len(kept)} of {count} rounds, by up to "
                f"{max(late_us):.0f} us, at last behind {rounds.copies} copies: another process "
                "may have the cores, or the call waits for the device"
            )
        data[:] = means(kept, together)
        return measure.Samples(
            tuple(took_s * 1e6 for took_s in data), "cold", f"{count} rounds", len(calls),
            evicted_bytes=rounds.evicted_bytes, discarded=count - len(kept),
            late_us=max(0.0, *late_us), simulated=self.simulated,
        )  # fmt: skip

    def note(
        self,
        benchmark: Any,
        provider: str,
        module: str,
        slug: str,
        *,
        moved_bytes: int,
        samples: measure.Samples | None = None,
    ) -> None:
        """What the JSON and the table say of an operation beside the cells, which has passed.

        Args:
            benchmark: the fixture, which has been run.
            provider: who did it.
            module: what was called.
            slug: what was chosen.
            moved_bytes: logical bytes of the norms in a call.
            samples: where device time is all theirs, so that there is a speed.
        """
        info = benchmark.extra_info
        info |= {"provider": provider, "module": module, "slug": slug, "verdict": "PASS"}
        info |= {"bytes": moved_bytes, "simulated": self.simulated}
        if samples is not None and self.opening is not None:
            info["gbps"] = gbps = samples.gbps(moved_bytes)
            for probe in (*bandwidth.PROBES, "best"):
                info[f"pct_{probe}"] = self.opening.percent(gbps, probe)
        if benchmark.enabled:
            self.others.append((benchmark.group, 1e6 * benchmark.stats.stats.median, info))

    def _write(self, row: dict[str, str]) -> None:
        self.rows.append(row)
        self._folder.append(row)

    def results(self) -> bars.Results:
        return bars.Results(bars.by_cell(self.rows), self.facts())

    def facts(self) -> dict[str, Any]:
        """What a run stands on, beside :func:`environment.collect`."""
        opening, closing = self.opening, self.closing
        at_the_end = {"roofline_closing": None, "drift_pct": None, "suspect": False}
        if opening and closing:
            at_the_end = rooflines.closing_facts(opening, closing)
        return {
            "command": environment.command(["pytest", *self._args]),
            "backend": self.backend.name,
            "device": asdict(self.backend.device),
            "timing_protocol": measure.TIMING_PROTOCOL,
            "simulated": self.simulated,
            "beyond": self.beyond,
            "providers": {p.name: p.missing() or f"{p.module} {p.version}" for p in self.providers},
            "roofline_opening": opening and rooflines.roofline_facts(opening),
            **at_the_end,
            "wall_s": perf_counter() - self._began,
        }

    def begin(self, problems: set[Problem]) -> None:
        """The folder, our kernels of these problems, the opening probes."""
        self._folder = OutFolder(self.out, self.facts())
        self._build_ahead(problems)
        if not self.simulated:
            self.opening = bandwidth.roofline(self.backend, stream=self.stream)
            self._folder.record(self.facts(), finished=False)

    def finish(self) -> None:
        """The closing probes unless it was ended early, the ratios to the best peer, the facts."""
        if self.ended and self.opening is not None:
            self.closing = bandwidth.remeasure(self.opening, self.backend, stream=self.stream)
        run = self.results()
        timed = (row for row in self.rows if row["times_us"])
        for row, info in zip(timed, self.infos, strict=True):
            peers = run.timed(bars.key_of(row), *bars.PEERS)
            if row["provider"] == bars.OURS and peers and not self.simulated:
                info["best_peer"] = peers[0]["provider"]
                info["best_peer_ratio"] = bars.ratio(peers[0], row).ratio
        self._folder.record(self.facts(), finished=self.ended)


def _info(row: dict[str, str], provider: Provider, problem: Problem) -> dict[str, Any]:
    percent = {f"pct_{probe}" for probe in sweep.PERCENT_OF}
    return {
        "provider": provider.name,
        "module": provider.module,
        "version": row["version"],
        "slug": row["config"],
        "verdict": row["verdict"],
        "simulated": row["simulated"] == "true",
        "rows_run": problem.rows,
        "bytes": problem.logical_bytes(),
        "discarded": int(row["discarded"]),
        **{name: float(row[name]) for name in sorted({"gbps", *percent}) if row[name]},
    }


# ---- pytest --------------------------------------------------------------------------------------

SESSION = pytest.StashKey[Session]()


def session_of(config: pytest.Config) -> Session:
    if SESSION not in config.stash:
        config.stash[SESSION] = Session(config)
    return config.stash[SESSION]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rmsnorm_raw")
    group.addoption(
        "--out", type=Path, metavar="DIR", help="write perf.csv and environment.json there, anew"
    )
    group.addoption(
        "--beyond",
        action="store_true",
        help="also the shapes beyond the study that perf/bars.py names, beside Quack",
    )
    group.addoption(
        "--quack-search",
        action="store_true",
        help="quack_searched searches every cell itself, 10 to 100 s each",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError(f"the suites need pytest-benchmark: {install('perf')}")
    if (out := config.getoption("--out")) is not None:
        require_usable(config, out)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A suite on the study's cells names its ``OP``; others their ``CONTESTS`` and their clock."""
    session, suite = session_of(metafunc.config), metafunc.module
    cases = []
    if hasattr(suite, "OP"):
        for problem, provider in session.contests(suite.OP):
            cell = cell_id(bars.problem_key(problem))
            mark = pytest.mark.benchmark(group=cell, timer=session.clock)
            cases.append(pytest.param(problem, provider, id=f"{cell}-{provider.name}", marks=mark))
        metafunc.parametrize(("problem", "provider"), cases)
        return
    timer = {"timer": session.clock} if suite.ON_DEVICE else {}
    for group, names in suite.CONTESTS.items():
        mark = pytest.mark.benchmark(group=group, **timer)
        cases += [pytest.param(name, id=f"{group}-{name}", marks=mark) for name in names]
    metafunc.parametrize("contest", cases)


@pytest.fixture(scope="session", autouse=True)
def probes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Our kernels built, the probes measured, before and after everything else."""
    session = session_of(request.config)
    mine = (item for item in request.session.items if "timed" in item.fixturenames)
    chosen = [item.callspec.params for item in mine]
    session.begin({p["problem"] for p in chosen if p["provider"].name == bars.OURS})
    yield
    session.finish()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Reached for the last cell, the suites have not been ended early, by Ctrl-C or -x."""
    ours = [each for each in item.session.items if "probes" in each.fixturenames]
    session_of(item.config).ended = item is ours[-1]


@pytest.fixture
def timed(benchmark: Any, request: pytest.FixtureRequest) -> Callable[[Problem, Provider], None]:
    """Gates and times a provider on a problem; skips one that is not installed."""

    def run(problem: Problem, provider: Provider) -> None:
        if reason := provider.missing():
            benchmark.skipped = True
            pytest.skip(reason)
        benchmark.params = {"problem": str(problem), "provider": provider.name}
        session_of(request.config).run(benchmark, problem, provider)

    return run


@pytest.fixture
def session(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Session:
    """For the suites beside the cells; without a GPU torch's CPU tensors go to the simulator."""
    found = session_of(request.config)
    if found.simulated:
        monkeypatch.setenv("RMSNORM_RAW_BACKEND", "cpu")
    return found


def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    """What two runs of one machine share: pytest-benchmark warns where it differs."""
    backend, facts = session_of(config).backend, environment.collect()
    machine_info["rmsnorm_raw"] = {
        "backend": backend.name,
        "device": asdict(backend.device),
        "nvidia_gpus": environment.drivers(facts["nvidia_gpus"]),
        "amd_gpus": facts["amd_gpus"],
        "toolchain": backend.toolchain._asdict(),
        **{name: facts[name] for name in ("packages", "compilers", "rocm_version")},
    }


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """All that the run stands on."""
    output_json["rmsnorm_raw"] = environment.collect() | session_of(config).facts()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    session = config.stash.get(SESSION, None)
    if session is not None and (session.rows or session.others):
        terminalreporter.section("rmsnorm_raw beside its peers")
        for line in table(session):
            terminalreporter.write_line(line)

"""The suites in perf/: run in the simulator, on a device of known times, and held to their bars."""

from __future__ import annotations

import csv
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from perf_suites import PERF, Bench, suite
from virtual_gpu import VirtualGpu, runs

from rmsnorm_raw import measure
from rmsnorm_raw.bandwidth import PROBES, Reading, Roofline, Variant
from rmsnorm_raw.check import Verdict
from rmsnorm_raw.errors import WrongResult
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.study import report
from rmsnorm_raw.study.cells import cells
from rmsnorm_raw.study.files import read_run
from rmsnorm_raw.study.providers import Cell, Contender, Provider

pytest.importorskip("pytest_benchmark", reason="pip install pytest-benchmark")

ROOT = PERF.parent


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PERF)


# ---- the suites, run -----------------------------------------------------------------------------


def run(*command: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    environment |= {"RMSNORM_RAW_BACKEND": "cpu"} | variables
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two cells in the simulator: the folder, and what was printed."""
    out = tmp_path_factory.mktemp("perf") / "new"
    chosen = "1x4096-fp16-fp32"
    json_path = out.with_suffix(".json")
    done = run(
        "-m", "pytest", str(PERF), "--benchmark-only", "-k", chosen, "--out", str(out),
        "--benchmark-json", str(json_path), "-p", "no:cacheprovider",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    json_path.rename(out / "benchmark.json")
    return out, done.stdout


def test_the_suites_run_in_the_simulator_and_say_so(ran: tuple[Path, str]) -> None:
    out, printed = ran
    with (out / "perf.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["op"], row["provider"], row["verdict"]) for row in rows] == [
        ("bwd", "ours", "PASS"),
        ("fwd", "ours", "PASS"),
    ]
    for row in rows:
        assert row["simulated"] == "true"
        assert len(row["times_us"].split()) == int(row["samples"]) == 6
        assert not any(value for name, value in row.items() if name[:4] in ("gbps", "pct_"))
    summary = printed[printed.index("rmsnorm_raw beside its peers") :]
    assert "times are simulated" in summary
    assert "fwd-1x4096-fp16-fp32" in summary


def test_the_json_carries_the_cell_and_the_environment(ran: tuple[Path, str]) -> None:
    report = json.loads((ran[0] / "benchmark.json").read_text(encoding="utf-8"))
    environment = json.loads((ran[0] / "environment.json").read_text(encoding="utf-8"))
    assert len(report["benchmarks"]) == 2
    for one in report["benchmarks"]:
        assert one["group"] in one["name"]
        assert one["name"].endswith("-ours]")
        assert one["options"]["timer"] == "device events"
        info = one["extra_info"]
        assert info["simulated"] is True
        assert info["verdict"] == "PASS"
        assert info["bytes"] > 0
        assert info["slug"].startswith("b")
        assert (info["module"], info["provider"]) == ("rmsnorm_raw.workbench", "ours")
        assert not any(name.startswith(("pct_", "gbps")) for name in info)
    for found in (report["rmsnorm_raw"], environment):
        assert found["backend"] == "cpu"
        assert found["device"]["simulated"] is True
        assert found["timing_protocol"] == measure.TIMING_PROTOCOL
        assert {"packages", "compilers", "wall_s", "providers"} <= found.keys()
    machine = report["machine_info"]["rmsnorm_raw"]
    assert machine["device"]["name"] == "CPU simulator, wave 64"
    assert {"nvidia_gpus", "amd_gpus", "toolchain", "packages", "compilers"} <= machine.keys()


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, Any]], str]:
    """The suites beside the cells in the simulator: benchmarks by name, and what was printed."""
    pytest.importorskip("torch")
    json_path = tmp_path_factory.mktemp("beside") / "benchmark.json"
    done = run(
        "-m", "pytest", str(PERF), "--benchmark-only", "-k", "host or roofline or llama",
        "--benchmark-json", str(json_path), "-p", "no:cacheprovider",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(json_path.read_text(encoding="utf-8"))
    return {one["name"]: one for one in report["benchmarks"]}, done.stdout


@pytest.mark.parametrize("probe", PROBES)
def test_the_probes_are_a_suite(probe: str, beside: Any) -> None:
    one = beside[0][f"test_probe[roofline-{probe}]"]
    assert (one["group"], one["options"]["timer"]) == ("roofline", "device events")
    info = one["extra_info"]
    assert (info["provider"], info["verdict"], info["slug"]) == (probe, "PASS", "b256-u2")
    assert info["bytes"] == {"copy": 2, "write": 1, "2r1w": 3}[probe] << 18
    assert not any(name.startswith(("pct_", "gbps")) for name in info)  # simulated


@pytest.mark.parametrize("group", ["host-forward", "host-forward-grad", "host-forward-backward"])
def test_host_times_are_a_suite_by_the_hosts_clock(group: str, beside: Any) -> None:
    for provider in ("ours", "torch"):
        one = beside[0][f"test_host[{group}-{provider}]"]
        assert (one["group"], one["options"]["timer"]) == (group, "perf_counter")
        assert one["extra_info"]["provider"] == provider
        assert one["extra_info"]["verdict"] == "PASS"
    assert beside[0][f"test_host[{group}-ours]"]["extra_info"]["slug"].startswith("b")


def test_a_llama_block_is_a_suite(beside: Any) -> None:
    for provider in ("ours", "torch", "float32"):
        one = beside[0][f"test_block[llama-block-{provider}]"]
        assert one["options"]["timer"] == "device events"
        assert one["extra_info"]["verdict"] == "PASS"
        assert one["extra_info"]["bytes"] > 0


def test_a_table_has_the_suites_beside_the_cells(beside: Any) -> None:
    printed = beside[1][beside[1].index("rmsnorm_raw beside its peers") :]
    assert "times are simulated" in printed
    assert "sim. us" in printed
    for start in ("roofline  ", "host-forward  ", "llama-block  "):
        assert f"\n{start}" in printed


# ---- the folder ----------------------------------------------------------------------------------


def suites(out: Path, *more: str, chosen: str = "fwd-1x4096-fp16-fp32") -> tuple[int, str]:
    """The exit code of some suites, and all that they said."""
    command = ("-m", "pytest", str(PERF), "-k", chosen, "-p", "no:cacheprovider")
    done = run(*command, "--out", str(out), *more)
    return done.returncode, done.stdout + done.stderr


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def facts_of(folder: Path) -> dict[str, Any]:
    facts = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    assert isinstance(facts, dict)
    return facts


def test_results_are_not_written_over(ran: tuple[Path, str]) -> None:
    before = files_of(ran[0])
    code, said = suites(ran[0], "--benchmark-only")
    assert code == 4
    assert f"{ran[0]} has perf.csv and environment.json of another run" in said
    assert "give another folder" in said
    assert files_of(ran[0]) == before


@pytest.mark.parametrize("name", ["sweep.csv", "environment.json"])
def test_nor_are_those_of_another_command(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    code, said = suites(tmp_path)
    assert (code, f"has {name} of another run" in said) == (4, True)
    assert files_of(tmp_path) == {name: b"{}"}


@pytest.mark.parametrize("under", [".", "under"])
def test_a_folder_that_cannot_be_made_is_a_wrong_option(under: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, said = suites(tmp_path / "file" / under)
    assert code == 4
    assert "give a folder that you can write" in said
    assert "INTERNALERROR" not in said


def test_several_processes_do_not_write_one_table(tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="pip install pytest-xdist")
    code, said = suites(tmp_path / "out", "-n", "2")
    assert (code, "times one call at a time: no -n" in said) == (4, True)
    assert not (tmp_path / "out").exists()


def test_a_run_has_ended_with_its_last_cell(ran: tuple[Path, str]) -> None:
    assert facts_of(ran[0])["finished"] is True


#: a plugin that does something in a cell
PLUGIN = """
import os, signal
def pytest_runtest_call(item):
    if "bf16-bf16" in item.name:
        {}
"""


@pytest.mark.parametrize(
    ("what", "more"),
    [
        ("raise KeyboardInterrupt", ()),
        ("raise ValueError", ("-x",)),
        ("os.kill(os.getpid(), signal.SIGKILL)", ()),
    ],
)
def test_a_run_that_was_ended_early_says_so(
    what: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "ender.py").write_text(PLUGIN.format(what))
    paths = os.pathsep.join((str(tmp_path), str(ROOT)))
    command = ("-m", "pytest", str(PERF), "-k", "fwd-1x4096", "-p", "ender", *more)
    out = tmp_path / "out"
    assert run(*command, "--out", str(out), "-p", "no:cacheprovider", PYTHONPATH=paths).returncode
    with (out / "perf.csv").open(newline="", encoding="utf-8") as file:
        assert [row["weight"] for row in csv.DictReader(file)] == ["fp16", "fp32"]
    facts = facts_of(out)
    assert facts["finished"] is False
    assert facts["device"]["simulated"] is True
    assert "The run did not end" in report.make([out]).files["report.md"]


@pytest.mark.parametrize("room_bytes", [1024, 4096])  # for no facts; for those and some rows
def test_a_full_disk_ends_a_run_with_a_message(room_bytes: int, tmp_path: Path) -> None:
    limit = f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({room_bytes},) * 2)"
    begin = f"import pytest, sys; {limit}; sys.exit(pytest.main(sys.argv[1:]))"
    out = tmp_path / "out"
    cells = (str(PERF), "-k", "fwd- and not fwd-32768", "-p", "no:cacheprovider")
    assert run("-m", "pytest", *cells).returncode == 0  # builds the kernels, whose files are larger
    done = run("-c", begin, *cells, "--out", str(out))
    said = done.stdout + done.stderr
    assert done.returncode == 2
    assert f"{out} cannot be written: File too large." in said
    assert "rows are kept; make room there" in said
    assert "Traceback" not in said
    assert "INTERNALERROR" not in said
    if room_bytes == 4096:
        assert facts_of(out)["finished"] is False
        assert read_run(out).torn
    judged = run("-m", "perf.bars", str(out))
    assert "Traceback" not in judged.stderr
    assert ("has no environment.json" in judged.stdout) is (room_bytes == 1024)


@pytest.mark.parametrize("times", ["1", "0.5", "-2", "nan", "inf"])
def test_a_planted_slowdown_is_one(times: str) -> None:
    paths = {"PYTHONPATH": os.pathsep.join((str(ROOT / "tests"), str(ROOT)))}
    done = run("-m", "pytest", str(PERF), "-p", "slower", f"--slower={times}", "--co", **paths)
    assert done.returncode == 4
    assert f"--slower {times} is no slowdown" in done.stderr


# ---- pytest-benchmark's own ways, as its users know them -----------------------------------------


def test_two_runs_compare_and_a_planted_slowdown_fails(tmp_path: Path) -> None:
    """The simulator's times waver, so the slowdown is large and the threshold wide."""
    command = (
        "-m", "pytest", str(PERF), "--benchmark-only", "-k", "fwd-1x4096-fp16-fp32-ours",
        f"--benchmark-storage=file://{tmp_path}", "-p", "no:cacheprovider", "-p", "slower",
    )  # fmt: skip
    compare = ("--benchmark-compare", "--benchmark-compare-fail=median:2000%")
    paths = {"PYTHONPATH": os.pathsep.join((str(ROOT / "tests"), str(ROOT)))}
    first = run(*command, "--benchmark-autosave", **paths)
    assert first.returncode == 0, first.stdout + first.stderr
    assert len([*tmp_path.rglob("*.json")]) == 1
    again = run(*command, "--benchmark-autosave", *compare, **paths)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "(NOW)" in again.stdout
    assert "machine_info is different" not in again.stdout + again.stderr
    slower = run(*command, *compare, "--slower", "200", **paths)
    assert slower.returncode != 0
    assert "Performance has regressed" in slower.stdout + slower.stderr
    assert "fwd-1x4096-fp16-fp32-ours" in slower.stdout


# ---- a session on a device of known times --------------------------------------------------------


PROBLEM = Problem.forward(32768, 8192, "bf16")
PASSED = Verdict(True, {"y": 0.5}, 0, "")


def provider(gpu: VirtualGpu, name: str, device_us: Any, host_us: Any = 5.0) -> Provider:
    def prepare(cell: Cell) -> Contender:
        calls = [gpu.call(f"{name} {clone}", device_us, host_us=host_us) for clone in range(2)]
        return Contender(calls, f"config of {name}", PASSED)

    return Provider(name, "rmsnorm_raw", "rmsnorm-raw", prepare)


Make = Callable[..., Any]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """A session of the suites on a virtual GPU."""

    def make(gpu: VirtualGpu, *, writes: bool = False) -> Any:
        conftest, clock = suite("conftest"), suite("clock")
        for module in (clock, conftest, measure):
            monkeypatch.setattr(module, "perf_counter", gpu.perf_counter)
        monkeypatch.setattr(conftest, "get_backend", lambda: gpu)
        options = {"--beyond": False, "--quack-search": False}
        options |= {"--out": tmp_path if writes else None}
        invocation = SimpleNamespace(args=("perf",))
        session = conftest.Session(
            SimpleNamespace(getoption=options.__getitem__, invocation_params=invocation)
        )
        monkeypatch.setattr(conftest.bandwidth, "roofline", lambda *a, **k: probes())
        session.begin(set())
        return session

    return make


def probes() -> Roofline:
    readings = [
        Reading(probe, Variant(), 10**9, measure.Samples((250.0,) * 6, "cold", "", 1))
        for probe in PROBES
    ]
    return Roofline("a GPU", 10**9, tuple(readings))


@pytest.mark.parametrize("device_us", [2.0, 400.0])
@pytest.mark.parametrize("host_us", [0.0, 30.0, 55.0, 70.0, 1000.0])
def test_a_round_is_device_time_whatever_the_host_costs(
    start: Make, device_us: float, host_us: float
) -> None:
    gpu = VirtualGpu()
    session = start(gpu)
    bench = Bench(session.clock)
    session.run(bench, PROBLEM, provider(gpu, "k", device_us, host_us))
    times_us = [1e6 * took_s for took_s in bench.stats.stats.data]
    assert times_us == pytest.approx([device_us] * len(times_us))
    assert len(times_us) == suite("conftest").ROUNDS


def test_rounds_rotate_and_evict_before_every_call(start: Make) -> None:
    gpu = VirtualGpu()
    session = start(gpu)
    session.run(Bench(session.clock), PROBLEM, provider(gpu, "k", 5.0))
    # the warm-up wanted one copy, and a call is two launches
    assert runs(gpu.log)[-4:] == [("copy", 2), ("k 0", 2), ("copy", 2), ("k 1", 2)]


def test_a_hiccup_of_the_host_is_dropped_and_counted(start: Make) -> None:
    gpu = VirtualGpu()
    session = start(gpu)
    bench = Bench(session.clock)
    hiccups = itertools.cycle([5.0] * 19 + [9000.0])
    session.run(bench, PROBLEM, provider(gpu, "k", 2.0, lambda: next(hiccups)))
    (row,) = session.rows
    assert int(row["discarded"]) == bench.extra_info["discarded"] == 12
    assert {float(time) for time in row["times_us"].split()} == {2.0}
    assert len(bench.stats.stats.data) == int(row["samples"]) == suite("conftest").ROUNDS - 3


class LateBench(Bench):
    """Its host is quick in the warm-up and slow in the rounds."""

    def __init__(self, timer: Callable[[], Any], slow_us: float) -> None:
        super().__init__(timer)
        self.host_us, self.slow_us = 5.0, slow_us

    def pedantic(self, target: Any, *, setup: Any, rounds: int) -> None:
        self.host_us = self.slow_us
        super().pedantic(target, setup=setup, rounds=rounds)


def test_a_host_that_falls_behind_gets_more_copies_ahead(start: Make) -> None:
    gpu = VirtualGpu()
    session = start(gpu)
    bench = LateBench(session.clock, 500.0)
    session.run(bench, PROBLEM, provider(gpu, "k", 2.0, lambda: bench.host_us))
    (row,) = session.rows
    assert row["verdict"] == "PASS"
    assert int(row["discarded"]) == suite("clock").WINDOW  # those of the first window
    assert {float(time) for time in row["times_us"].split()} == {2.0}
    copies = [count for name, count in runs(gpu.log) if name == "copy"]
    assert copies[-1] * gpu.copy_us >= 2 * 500


def test_a_host_that_was_late_in_a_few_rounds_of_a_window_keeps_its_copies(start: Make) -> None:
    gpu = VirtualGpu()
    session = start(gpu)
    hiccups = itertools.cycle([5.0, 5.0, 9000.0])
    session.run(Bench(session.clock), PROBLEM, provider(gpu, "k", 2.0, lambda: next(hiccups)))
    assert [count for name, count in runs(gpu.log) if name == "copy"][-1] == 2
    assert int(session.rows[0]["discarded"]) == 4 * suite("conftest").ROUNDS // 3


def test_a_host_that_waits_for_the_device_gets_no_time(start: Make) -> None:
    gpu = VirtualGpu()
    session = start(gpu)
    bench = LateBench(session.clock, 2 * measure.MAX_AHEAD_US)
    with pytest.raises(measure.Unmeasurable, match="the host was late in 240 of 240 rounds"):
        session.run(bench, PROBLEM, provider(gpu, "k", 2.0, lambda: bench.host_us))
    assert bench.has_error
    assert session.rows[-1]["verdict"] == "Unmeasurable"
    assert not session.rows[-1]["times_us"]


@pytest.mark.parametrize("error", [WrongResult, SystemExit])
def test_a_peer_that_fails_has_a_row_and_no_time(
    error: type[BaseException], start: Make, tmp_path: Path
) -> None:
    gpu = VirtualGpu()
    session = start(gpu, writes=True)

    def refuse(cell: Cell) -> Contender:
        raise error("y is off")

    peer = replace(provider(gpu, "liger", 5.0), prepare=refuse)
    with pytest.raises(error):
        session.run(Bench(session.clock), PROBLEM, peer)
    session.run(Bench(session.clock), PROBLEM, provider(gpu, "ours", 5.0))
    with (tmp_path / "perf.csv").open(newline="", encoding="utf-8") as file:
        failed, timed = csv.DictReader(file)
    assert (failed["verdict"], failed["note"], failed["times_us"]) == (
        error.__name__,
        "y is off",
        "",
    )
    assert timed["verdict"] == "PASS"
    (line,) = (line for line in suite("conftest").table(session) if "liger" in line)
    assert f"{error.__name__}: y is off" in line


def test_percentages_and_ratios_beside_the_peers(
    start: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = VirtualGpu()
    session = start(gpu, writes=True)
    facts = json.loads((session.out / "environment.json").read_text(encoding="utf-8"))
    assert (facts["finished"], facts["roofline_closing"]) == (False, None)
    assert facts["roofline_opening"]["copy"]["gbps"] == 4000
    benches = {}
    for name, device_us in (("ours", 250.0), ("quack", 275.0), ("torch", 400.0)):
        benches[name] = Bench(session.clock)
        session.run(benches[name], PROBLEM, provider(gpu, name, device_us))
    conftest = suite("conftest")
    monkeypatch.setattr(conftest.bandwidth, "remeasure", lambda opening, *a, **k: opening)
    session.ended = True
    session.finish()
    info = benches["ours"].extra_info
    assert info["gbps"] == pytest.approx(PROBLEM.logical_bytes() / 250e3, abs=0.1)
    assert info["pct_matched"] == info["pct_copy"] == pytest.approx(107.38, abs=0.01)
    assert info["best_peer"] == "quack"
    assert info["best_peer_ratio"] == pytest.approx(1.1)
    assert "best_peer" not in benches["quack"].extra_info
    lines = list(conftest.table(session))
    assert any("quack" in line and "1.100 [1.100, 1.100]" in line for line in lines)
    assert "fwd, geometric mean over 1 cells, torch / ours: 1.600 [1.600, 1.600]" in lines
    assert not any("simulated" in line or "SUSPECT" in line for line in lines)
    facts = json.loads((session.out / "environment.json").read_text(encoding="utf-8"))
    assert (facts["finished"], facts["suspect"], facts["drift_pct"]) == (True, False, 0)
    assert facts["roofline_closing"]["copy"]["gbps"] == 4000
    assert facts["command"] == ["pytest", "perf"]


def test_a_cell_is_contested_by_ours_and_five_peers_one_after_another(start: Make) -> None:
    session = start(VirtualGpu())
    contests = [*session.contests("forward")]
    assert len(contests) == 45 * 5 + 9  # compile in bf16 alone
    in_turn = [problem for problem, _ in itertools.groupby(problem for problem, _ in contests)]
    assert in_turn == [problem for problem in cells() if problem.op == "forward"]
    session.beyond = True
    more = [*session.contests("forward")][len(contests) :]
    assert {(p.rows, p.cols) for p, _ in more} == set(suite("bars").BEYOND)
    assert {provider.name for _, provider in more} == {"ours", "quack"}

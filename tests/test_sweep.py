from __future__ import annotations

import csv
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from virtual_gpu import VirtualGpu

from rmsnorm_raw import store, workbench
from rmsnorm_raw.backends import Backend, Code
from rmsnorm_raw.backends.cpu import CpuBackend
from rmsnorm_raw.bandwidth import PROBES, Reading, Roofline, Variant
from rmsnorm_raw.check import Verdict
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.dtypes import SHORT_NAME
from rmsnorm_raw.errors import InvalidInput, LaunchError, WrongResult
from rmsnorm_raw.measure import TIMING_PROTOCOL, Samples
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import Source
from rmsnorm_raw.study import sweep as study
from rmsnorm_raw.study.cells import ARCHIVE_NAME, cells, published_rows
from rmsnorm_raw.study.idle import Busy
from rmsnorm_raw.study.origin import choose, find
from rmsnorm_raw.study.providers import Cell, Contender, Provider
from rmsnorm_raw.study.summary import geometric_mean, summary
from rmsnorm_raw.study.sweep import COLUMNS, PERCENT_OF, Outcome, Row, sweep, time_columns
from rmsnorm_raw.study.table_file import whole_records

#: one small cell an operation, and one that is larger than the cap on rows
FORWARD = Problem.forward(3, 256, "bfloat16", weight_dtype="float32")
BACKWARD = Problem.backward(3, 256, "float16")
TALL = Problem.forward(4096, 256, "float32")
FEW = (FORWARD, BACKWARD, TALL)


def rows_of(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def facts_of(path: Path) -> dict[str, object]:
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(facts, dict)
    return facts


# ---- the cells ---------------------------------------------------------------------------------


def test_the_study_is_9_shapes_5_dtype_pairs_and_2_operations() -> None:
    study_cells = cells()
    assert len(study_cells) == len(set(study_cells)) == 90
    assert len({(cell.rows, cell.cols) for cell in study_cells}) == 9
    assert len({(cell.dtype, cell.weight_dtype) for cell in study_cells}) == 5
    assert {cell.op for cell in study_cells} == {"forward", "backward"}


def test_cells_stand_in_the_archives_order() -> None:
    named = [
        (ARCHIVE_NAME[c.op], c.rows, c.cols, SHORT_NAME[c.dtype], SHORT_NAME[c.weight_dtype])
        for c in cells()
        if c.weight_dtype
    ]
    assert named == [
        (row["op"], int(row["m"]), int(row["n"]), row["act"], row["weight"])
        for row in published_rows()
    ]


@pytest.mark.parametrize(("host", "best_probe_gbps"), [("H200", 4312.7), ("H100", 3182.3)])
def test_bytes_and_percentages_are_counted_as_in_the_archive(
    host: str, best_probe_gbps: float
) -> None:
    rows = published_rows(host)
    assert len(rows) == 90
    for cell, row in zip(cells(), rows, strict=True):
        assert cell.logical_bytes() == int(row["logical_bytes"])
        for kind in ("tuned", "analytical"):
            gbps = cell.logical_bytes() / float(row[f"{kind}_us"]) / 1e3
            assert gbps == pytest.approx(float(row[f"{kind}_gbps"]), abs=0.05001)
            pct = 100 * gbps / best_probe_gbps
            assert pct == pytest.approx(float(row[f"{kind}_pct"]), abs=0.006)


# ---- a sweep in the simulator ------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(cpu64: Backend, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return sweep(cpu64, tmp_path_factory.mktemp("sweep") / "new", problems=FEW, rows_cap=4)


def test_every_cell_passes_and_has_a_row(swept: Outcome) -> None:
    assert [row["verdict"] for row in swept.rows] == ["PASS"] * 3
    assert swept.failed == ()
    assert rows_of(swept.csv_path) == list(swept.rows)
    assert [row["op"] for row in swept.rows] == ["fwd", "bwd", "fwd"]
    assert swept.rows[0] | {"m": "3", "n": "256", "act": "bf16", "weight": "fp32"} == swept.rows[0]
    for row in swept.rows:
        assert tuple(row) == COLUMNS
        assert 0 < float(row["worst"]) <= 1
        assert (row["provider"], row["path"]) == ("ours", "ladder")
        assert len(row["times_us"].split()) == int(row["samples"])
        assert float(row["low_us"]) <= float(row["median_us"]) <= float(row["high_us"])


def test_rows_are_capped_and_the_config_is_the_whole_cells(swept: Outcome, cpu64: Backend) -> None:
    assert [row["m"] for row in swept.rows] == ["3", "3", "4096"]
    assert [row["rows_run"] for row in swept.rows] == ["3", "3", "4"]
    of_the_cap = workbench.default_config(replace(TALL, rows=4), cpu64.device)
    assert of_the_cap != workbench.default_config(TALL, cpu64.device)  # else nothing is tested
    assert swept.rows[2]["config"] == workbench.default_config(TALL, cpu64.device).slug
    assert "rows are capped at 4" in summary(swept)


def test_a_cell_is_run_with_what_a_search_has_found(
    cpu64: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "folder", lambda: tmp_path / "tuned")
    tuned, times = Config.parse("b128-t64-v16-reg"), {"cold": {"tuned": (1.0,), "ladder": (2.0,)}}
    store.save(store.key(TALL, cpu64), store.Record(tuned, "FASTER", times, {}, "", "quick"))
    outcome = sweep(cpu64, tmp_path, problems=[FORWARD, TALL], rows_cap=4)
    assert [(row["path"], row["m"], row["verdict"]) for row in outcome.rows] == [
        ("ladder", "3", "PASS"),
        ("ladder", "4096", "PASS"),
        ("tuned", "4096", "PASS"),
    ]
    assert outcome.rows[1]["config"] == workbench.default_config(TALL, cpu64.device).slug
    assert outcome.rows[2]["config"] == tuned.slug
    assert facts_of(outcome.environment_path)["tuned"] == {str(TALL): tuned.slug}
    assert outcome.chosen_by == {"ladder": 1, "tuned": 1}


def test_the_simulator_has_its_own_cap(cpu64: Backend, tmp_path: Path) -> None:
    outcome = sweep(cpu64, tmp_path, problems=[TALL])
    assert outcome.rows[0]["rows_run"] == str(study.SIMULATED_ROWS)


def test_simulated_times_have_neither_speed_nor_percentage(swept: Outcome) -> None:
    for row in swept.rows:
        assert row["simulated"] == "true"
        assert not any(row[column] for column in COLUMNS if column[:4] in ("gbps", "pct_"))
    lines = "\n".join(summary(swept))
    assert "times are simulated" in lines
    assert "%" not in lines
    assert "GB/s" not in lines
    assert "3 of 3 rows passed" in lines


def test_the_environment_says_what_the_run_stood_on(swept: Outcome, cpu64: Backend) -> None:
    facts = facts_of(swept.environment_path)
    assert facts["backend"] == "cpu"
    assert facts["rows_cap"] == 4
    device = facts["device"]
    assert isinstance(device, dict)
    assert device["name"] == cpu64.device.name
    assert device["last_level_cache_bytes"] == cpu64.device.last_level_cache_bytes
    assert {"command", "packages", "time_utc"} <= facts.keys()


class Counting(CpuBackend):
    """A simulator that keeps the sources it was asked to compile."""

    def __init__(self) -> None:
        super().__init__(64)
        self.compiled: list[str] = []

    def compile(self, source: Source) -> Code:
        self.compiled.append(source.digest)
        return super().compile(source)


def test_cells_that_share_a_source_share_its_build(tmp_path: Path) -> None:
    backend = Counting()
    twin = replace(FORWARD, rows=2)
    sweep(backend, tmp_path, problems=[FORWARD, twin, BACKWARD])
    ahead = backend.compiled[:-3]  # then each cell takes its own from the cache
    assert sorted(ahead) == sorted(set(backend.compiled))
    assert len(ahead) == 2


def test_progress_counts_the_builds_then_the_cells(cpu64: Backend, tmp_path: Path) -> None:
    steps: list[tuple[int, int, str]] = []
    sweep(cpu64, tmp_path, problems=FEW, rows_cap=2, progress=lambda *step: steps.append(step))
    builds, rest = steps[:3], steps[3:]
    assert builds == [(done, 3, "build 3 kernels") for done in range(3)]
    cells_begun = [(at, 3, f"{problem} ladder") for at, problem in enumerate(FEW)]
    assert rest == [*cells_begun, (3, 3, "done")]


# ---- what goes wrong ---------------------------------------------------------------------------


def test_an_interrupted_sweep_keeps_the_rows_written_so_far(cpu64: Backend, tmp_path: Path) -> None:
    def interrupt(done: int, of: int, what: str) -> None:
        if what == f"{TALL} ladder":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(cpu64, tmp_path, problems=FEW, rows_cap=4, progress=interrupt)
    assert [row["verdict"] for row in rows_of(tmp_path / "sweep.csv")] == ["PASS", "PASS"]
    facts = facts_of(tmp_path / "environment.json")
    assert (facts["backend"], facts["timing_protocol"]) == ("cpu", TIMING_PROTOCOL)


def plant(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Render backwards with a piece of their text replaced."""
    render = workbench.render

    def planted(problem: Problem, config: Config, device: DeviceSpec) -> Source:
        source = render(problem, config, device)
        if problem.op == "forward":
            return source
        assert old in source.text
        return replace(source, text=source.text.replace(old, new))

    monkeypatch.setattr(workbench, "render", planted)


ROW_TERM = " - x[e] * row.rstd * row.mean"


def test_a_wrong_kernel_fails_its_cell_alone_and_gets_no_time(
    cpu64: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, ROW_TERM, "")
    outcome = sweep(cpu64, tmp_path, problems=FEW, rows_cap=4)
    assert [row["verdict"] for row in outcome.rows] == ["PASS", "FAIL", "PASS"]
    (failed,) = outcome.failed
    assert float(failed["worst"]) > 1
    assert "dx[" in failed["note"]
    assert not any(failed[column] for column in ("median_us", "low_us", "high_us", "samples"))
    lines = summary(outcome)
    assert "2 of 3 rows passed" in lines
    assert any(line.startswith("FAIL: bwd 3x256 fp16/fp16 ") for line in lines)


def test_a_kernel_that_does_not_compile_fails_its_cell_alone(
    cpu64: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, ROW_TERM, " - nothing_of_this_name")
    outcome = sweep(cpu64, tmp_path, problems=FEW, rows_cap=4)
    assert [row["verdict"] for row in outcome.rows] == ["PASS", "CompileError", "PASS"]
    assert "nothing_of_this_name" in rows_of(outcome.csv_path)[1]["note"]
    (line,) = (line for line in summary(outcome) if line.startswith("CompileError: bwd "))
    assert "\n" not in line


# ---- speeds ------------------------------------------------------------------------------------

MOVED = {"copy": 2, "write": 1, "2r1w": 3}


def roofline(**gbps: float) -> Roofline:
    """Probes of these speeds, over buffers of 1 GB."""
    readings = []
    for probe in PROBES:
        took_us = MOVED[probe] * 1e6 / gbps["two_reads" if probe == "2r1w" else probe]
        samples = Samples((took_us,) * 6, "cold", "", 1)
        readings.append(Reading(probe, Variant(), MOVED[probe] * 10**9, samples))
    return Roofline("a GPU", 10**9, tuple(readings))


OPENING = roofline(copy=4000.0, write=5000.0, two_reads=4500.0)
PASSED = Verdict(True, {"dx": 0.5, "dweight": 0.25}, 0, "")


def test_percentages_name_their_probe() -> None:
    problem = Problem.backward(32768, 8192, "bf16")
    assert problem.logical_bytes() == 1_610_776_576
    took = Samples((400.0,) * 12, "cold", "interval 0 % < 1 %", 2, discarded=3)
    row = time_columns(problem, PASSED, took, OPENING)
    assert row["gbps"] == "4026.9"  # 1610776576 B / 400 us
    assert {probe: row[f"pct_{probe}"] for probe in PERCENT_OF} == {
        "copy": "100.67", "write": "80.54", "2r1w": "89.49", "best": "80.54", "matched": "89.49",
    }  # fmt: skip
    assert (row["worst"], row["samples"], row["discarded"]) == ("0.5", "12", "3")


def test_a_forward_is_matched_by_copy() -> None:
    problem = Problem.forward(32768, 8192, "bf16")
    row = time_columns(problem, PASSED, Samples((250.0,) * 12, "cold", "", 2), OPENING)
    assert row["pct_matched"] == row["pct_copy"] == "107.38"  # 1073758208 B / 250 us / 4000 GB/s


def finished(closing: Roofline, *times_us: float) -> Outcome:
    problem = Problem.forward(4096, 4096, "bf16")
    rows = [
        dict.fromkeys(COLUMNS, "")
        | {"op": "fwd", "provider": "ours", "path": "ladder", "m": str(at)}
        | time_columns(problem, PASSED, Samples((took_us,) * 6, "cold", "", 2), OPENING)
        for at, took_us in enumerate(times_us)
    ]
    paths = Path("sweep.csv"), Path("environment.json")
    return Outcome(tuple(rows), None, OPENING, closing, *paths, {"tuned": 2, "ladder": 1})


def test_the_summary_gives_geometric_means_and_every_probe() -> None:
    lines = summary(finished(OPENING, 10.0, 40.0))
    assert any(
        line.startswith("fwd ladder, geometric mean of 2 cells: 20.0 us, ") for line in lines
    )
    assert lines[0] == "configs: 1 ladder, 2 tuned"
    assert sum(line.startswith("probe ") for line in lines) == 3
    assert not any("SUSPECT" in line or "simulated" in line for line in lines)


@pytest.mark.parametrize(("write", "suspect"), [(5000.0, False), (4901.0, False), (4899.0, True)])
def test_probes_that_drift_over_2_percent_make_a_run_suspect(write: float, suspect: bool) -> None:
    closing = roofline(copy=4000.0, write=write, two_reads=4500.0)
    assert any(line.startswith("SUSPECT") for line in summary(finished(closing, 20.0))) is (suspect)


def test_a_geometric_mean_is_over_the_cells_that_have_a_number() -> None:
    rows = [{"pct": "1"}, {"pct": ""}, {"pct": "100"}]
    assert geometric_mean(rows, "pct") == pytest.approx(10)
    assert geometric_mean(rows[1:2], "pct") is None


# ---- peers, and a run that goes on -------------------------------------------------------------


def test_a_peer_has_its_row_beside_ours(cpu64: Backend, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    chosen = choose(["torch"])
    origins = [find(each) for each in chosen]
    outcome = sweep(cpu64, tmp_path, problems=FEW[:2], chosen=chosen, origins=origins, rows_cap=2)
    assert [(r["provider"], r["path"], r["op"], r["verdict"]) for r in outcome.rows] == [
        ("ours", "ladder", "fwd", "PASS"),
        ("torch", "", "fwd", "PASS"),
        ("ours", "ladder", "bwd", "PASS"),
        ("torch", "", "bwd", "PASS"),
    ]
    assert outcome.rows[1]["config"] == "F.rms_norm"
    assert outcome.rows[1]["module"] == "torch.nn.functional"
    named = facts_of(tmp_path / "environment.json")["providers"]
    assert isinstance(named, dict)
    assert named["torch"]["path"].endswith("torch/nn/functional.py")


def planted(name: str, error: BaseException) -> Provider:
    def refuse(cell: Cell) -> Contender:
        raise error

    return Provider(name, "torch", "torch", refuse)


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (WrongResult("y is off"), "FAIL"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        (RuntimeError("x" * 200_000), "RuntimeError"),  # of csv a field has 131,072 characters
        (SystemExit(0), "SystemExit"),
    ],
)
def test_a_peer_that_fails_has_a_row_and_stops_nobody(
    error: BaseException, verdict: str, cpu64: Backend, tmp_path: Path
) -> None:
    chosen = [*choose([]), planted("quack", error)]
    outcome = sweep(cpu64, tmp_path, problems=FEW[:2], chosen=chosen, rows_cap=2)
    assert [row["verdict"] for row in rows_of(outcome.csv_path)] == ["PASS", verdict] * 2
    assert outcome.rows[1]["note"]
    assert not outcome.rows[1]["median_us"]
    assert any(
        line.startswith(f"{verdict}: fwd 3x256 bf16/fp32 quack: ") for line in summary(outcome)
    )


def test_what_is_lost_with_the_device_is_not_written_as_failed(
    cpu64: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(stream: int) -> None:
        raise LaunchError("an illegal address")

    def crash(cell: Cell) -> Contender:
        monkeypatch.setattr(backend, "synchronize", lost)
        raise RuntimeError("CUDA error")

    backend = CpuBackend(64)
    chosen = [*choose([]), Provider("quack", "torch", "torch", crash)]
    with pytest.raises(LaunchError, match="has lost the device"):
        sweep(backend, tmp_path, problems=FEW, chosen=chosen, rows_cap=2)
    assert [row["verdict"] for row in rows_of(tmp_path / "sweep.csv")] == ["PASS", "RuntimeError"]


def test_a_sweep_goes_on_where_it_was_ended(cpu64: Backend, tmp_path: Path) -> None:
    begun: list[str] = []

    def interrupt(done: int, of: int, what: str) -> None:
        begun.append(what)
        if what.startswith(str(BACKWARD)):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(cpu64, tmp_path, problems=FEW, rows_cap=4, progress=interrupt)
    first = rows_of(tmp_path / "sweep.csv")
    begun.clear()
    outcome = sweep(
        cpu64, tmp_path, problems=FEW, rows_cap=4, progress=lambda *step: begun.append(step[2])
    )
    assert [row["op"] for row in outcome.rows] == ["fwd", "bwd", "fwd"]
    assert list(outcome.rows[:1]) == first  # kept to the last digit, not measured again
    assert f"{FORWARD} ladder" not in begun
    facts = facts_of(tmp_path / "environment.json")
    assert facts["finished"] is True
    sessions = facts["sessions"]
    assert isinstance(sessions, list)
    assert [session["rows_kept"] for session in sessions] == [0, 1]


@pytest.mark.parametrize(
    ("column", "text", "said"),
    [
        ("op", "fwd", "ours ladder fwd 3 256 bf16 fp32 has a row above it"),
        ("provider", "mine", "mine ladder bwd 3 256 fp16 fp16 is no row of this run"),
        ("pct_copy", "much", "pct_copy is 'much', no positive number"),
        ("times_us", "1 2 x", "times_us is 'x', no positive number"),
    ],
)
def test_a_table_that_was_edited_is_refused_and_nothing_is_changed(
    column: str, text: str, said: str, cpu64: Backend, tmp_path: Path
) -> None:
    def interrupt(done: int, of: int, what: str) -> None:
        if what.startswith(str(TALL)):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(cpu64, tmp_path, problems=FEW, rows_cap=4, progress=interrupt)
    rows = rows_of(tmp_path / "sweep.csv")
    if column == "op":
        rows[1] = rows[0]
    rows[1][column] = text
    with (tmp_path / "sweep.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(rows)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InvalidInput, match=f"sweep.csv, line 3: {said}"):
        sweep(cpu64, tmp_path, problems=FEW, rows_cap=4)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


class Looks:
    """An idle check that finds what it is told, in turn."""

    def __init__(self, *found: dict[str, object] | Exception) -> None:
        self.left = list(found)

    def __call__(self) -> dict[str, object]:
        found = self.left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def test_the_device_is_looked_at_before_all_and_again_at_launch(
    cpu64: Backend, tmp_path: Path
) -> None:
    idle = {"state": "idle"}
    with pytest.raises(Busy):
        sweep(cpu64, tmp_path / "a", problems=FEW, look=Looks(Busy("held")))
    assert not (tmp_path / "a").exists()
    with pytest.raises(Busy):
        sweep(cpu64, tmp_path / "b", problems=FEW, rows_cap=2, look=Looks(idle, Busy("held")))
    assert rows_of(tmp_path / "b" / "sweep.csv") == []
    unknown = {"state": "unknown", "why": "pip install nvidia-ml-py"}
    outcome = sweep(cpu64, tmp_path / "b", problems=FEW, rows_cap=2, look=Looks(idle, unknown))
    assert len(outcome.rows) == 3
    assert facts_of(outcome.environment_path)["idle"] == [idle, unknown]
    assert "NOT KNOWN TO BE IDLE: pip install nvidia-ml-py" in summary(outcome)


def measured(
    monkeypatch: pytest.MonkeyPatch, out: Path, closing: Roofline, *, stop_at: str = ""
) -> Outcome:
    """A sweep of a GPU of known times."""
    opened: list[Roofline] = []

    def row(bench: object, contest: study.Contest) -> Row:
        if contest.problem.op == stop_at:
            raise KeyboardInterrupt
        took = Samples((0.01,) * 12, "cold", "", 2)
        return contest.columns(gpu.device) | time_columns(contest.problem, PASSED, took, OPENING)

    gpu = VirtualGpu()
    monkeypatch.setattr(study._Bench, "row", row)
    monkeypatch.setattr(
        study.bandwidth, "roofline", lambda *a, **k: opened.append(OPENING) or OPENING
    )
    monkeypatch.setattr(study.bandwidth, "remeasure", lambda *a, **k: closing)
    return sweep(gpu, out, problems=FEW[:2])


def test_a_run_that_goes_on_keeps_its_opening_probes_and_measures_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slower = roofline(copy=4000.0, write=4800.0, two_reads=4500.0)
    with pytest.raises(KeyboardInterrupt):
        measured(monkeypatch, tmp_path, OPENING, stop_at="backward")
    with pytest.raises(KeyboardInterrupt):  # 4 % off as it goes on, and ended again
        measured(monkeypatch, tmp_path, slower, stop_at="backward")
    outcome = measured(monkeypatch, tmp_path, OPENING)
    assert outcome.opening is not None
    assert [r.gbps for r in outcome.opening.readings] == [r.gbps for r in OPENING.readings]
    assert outcome.opening.buffer_bytes == 10**9
    assert outcome.drift_pct == pytest.approx(4)
    facts = facts_of(outcome.environment_path)
    assert facts["suspect"] is True  # however well it ended
    assert facts["drift_pct"] == pytest.approx(4)
    assert facts["roofline_opening"]["copy"]["variant"] == "b512-u4"  # type: ignore[index]
    assert any(line.startswith("SUSPECT: a probe moved by 4.0 %") for line in summary(outcome))


def test_the_summary_sets_peers_beside_the_ladder() -> None:
    outcome = finished(OPENING, 10.0, 40.0)
    peers = [row | {"provider": "quack", "path": ""} for row in outcome.rows]
    peers = [row | {"median_us": str(1.5 * float(row["median_us"]))} for row in peers]
    both = replace(outcome, rows=(*outcome.rows, *peers))
    assert "fwd quack / ladder, geometric mean of 2 cells: 1.500" in summary(both)


# ---- kill -9 -----------------------------------------------------------------------------------

#: a sweep of some cells; with a number, killed half way through the write of that row
RUN = """
import os, signal, sys
from pathlib import Path
from rmsnorm_raw.backends import get_backend
from rmsnorm_raw.study import cells, folder, sweep
kill_at = int(sys.argv[2])
writes = 0
def write(file, data, write=os.write):
    global writes
    writes += 1
    if writes == kill_at:
        write(file, data[:len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return write(file, data)
folder.os.write = write
sweep.sweep(get_backend("cpu"), Path(sys.argv[1]), problems=cells.cells()[:32], rows_cap=2)
"""


def start(out: Path, kill_at: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RUN, str(out), str(kill_at)])


def names_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    return [tuple(row[name] for name in (*study.KEY, "config", "verdict")) for row in rows]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, ...]]:
    out = tmp_path_factory.mktemp("undisturbed")
    assert start(out).wait() == 0
    return names_of(rows_of(out / "sweep.csv"))


def test_killed_at_three_random_moments_it_has_the_same_rows(
    tmp_path: Path, undisturbed: list[tuple[str, ...]]
) -> None:
    csv_path, draw = tmp_path / "sweep.csv", random.Random(0)
    for at_least in (1, 8, 16):
        process = start(tmp_path)
        while process.poll() is None:
            time.sleep(0.002)
            if csv_path.exists() and csv_path.read_bytes().count(b"\r\n") > at_least:
                time.sleep(draw.uniform(0, 0.05))
                process.kill()
                break
        assert process.wait() == -signal.SIGKILL
    kept = csv_path.read_bytes()
    assert start(tmp_path).wait() == 0
    assert csv_path.read_bytes().startswith(whole_records(kept))
    assert names_of(rows_of(csv_path)) == undisturbed
    sessions = facts_of(tmp_path / "environment.json")["sessions"]
    assert isinstance(sessions, list)
    kept_rows = [session["rows_kept"] for session in sessions]
    assert kept_rows == sorted(kept_rows)
    assert kept_rows[0] == 0
    assert kept_rows[1] > 0


@pytest.mark.parametrize("kill_at", [1, 2, 9], ids=["header", "first row", "eighth row"])
def test_killed_in_the_middle_of_a_line_it_drops_the_piece(
    kill_at: int, tmp_path: Path, undisturbed: list[tuple[str, ...]]
) -> None:
    assert start(tmp_path, kill_at).wait() == -signal.SIGKILL
    piece = (tmp_path / "sweep.csv").read_bytes()
    assert not piece.endswith(b"\n")
    assert start(tmp_path).wait() == 0
    assert names_of(rows_of(tmp_path / "sweep.csv")) == undisturbed

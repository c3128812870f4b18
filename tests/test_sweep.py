from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from rmsnorm_raw import store, workbench
from rmsnorm_raw.backends import Backend, Code
from rmsnorm_raw.backends.cpu import CpuBackend
from rmsnorm_raw.bandwidth import PROBES, Reading, Roofline, Variant
from rmsnorm_raw.check import Verdict
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.measure import Samples
from rmsnorm_raw.problem import SHORT_NAME, Problem
from rmsnorm_raw.source import Source
from rmsnorm_raw.study import sweep as study
from rmsnorm_raw.study.cells import cells, published_rows
from rmsnorm_raw.study.sweep import COLUMNS, PERCENT_OF, Outcome, Row, sweep, time_columns

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
        (study.ARCHIVE_NAME[c.op], c.rows, c.cols, SHORT_NAME[c.dtype], SHORT_NAME[c.weight_dtype])
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
        assert float(row["low_us"]) <= float(row["median_us"]) <= float(row["high_us"])


def test_rows_are_capped_and_the_config_is_the_whole_cells(swept: Outcome, cpu64: Backend) -> None:
    assert [row["m"] for row in swept.rows] == ["3", "3", "4096"]
    assert [row["rows_run"] for row in swept.rows] == ["3", "3", "4"]
    of_the_cap = workbench.default_config(replace(TALL, rows=4), cpu64.device)
    assert of_the_cap != workbench.default_config(TALL, cpu64.device)  # else nothing is tested
    assert swept.rows[2]["config"] == workbench.default_config(TALL, cpu64.device).slug
    assert "rows are capped at 4" in study.summary(swept)


def test_a_cell_is_run_with_what_a_search_has_found(
    cpu64: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "folder", lambda: tmp_path / "tuned")
    tuned, times = Config.parse("b128-t64-v16-reg"), {"cold": {"tuned": (1.0,), "ladder": (2.0,)}}
    store.save(store.key(TALL, cpu64), store.Record(tuned, "FASTER", times, {}, "", "quick"))
    outcome = sweep(cpu64, tmp_path, problems=[FORWARD, TALL], rows_cap=4)
    assert [row["verdict"] for row in outcome.rows] == ["PASS"] * 2
    assert outcome.rows[1]["config"] == tuned.slug
    assert outcome.chosen_by == {"ladder": 1, "tuned": 1}


def test_the_simulator_has_its_own_cap(cpu64: Backend, tmp_path: Path) -> None:
    outcome = sweep(cpu64, tmp_path, problems=[TALL])
    assert outcome.rows[0]["rows_run"] == str(study.SIMULATED_ROWS)


def test_simulated_times_have_neither_speed_nor_percentage(swept: Outcome) -> None:
    for row in swept.rows:
        assert row["simulated"] == "true"
        assert not any(row[column] for column in COLUMNS if column[:4] in ("gbps", "pct_"))
    lines = "\n".join(study.summary(swept))
    assert "times are simulated" in lines
    assert "%" not in lines
    assert "GB/s" not in lines
    assert "3 of 3 cells passed" in lines


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
    assert rest == [(at, 3, str(problem)) for at, problem in enumerate(FEW)] + [(3, 3, "done")]


# ---- what goes wrong ---------------------------------------------------------------------------


def test_an_interrupted_sweep_keeps_the_rows_written_so_far(cpu64: Backend, tmp_path: Path) -> None:
    def interrupt(done: int, of: int, what: str) -> None:
        if what == str(TALL):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(cpu64, tmp_path, problems=FEW, rows_cap=4, progress=interrupt)
    assert [row["verdict"] for row in rows_of(tmp_path / "sweep.csv")] == ["PASS", "PASS"]
    assert facts_of(tmp_path / "environment.json")["backend"] == "cpu"


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
    lines = study.summary(outcome)
    assert "2 of 3 cells passed" in lines
    assert any(line.startswith("FAIL: bwd 3x256 fp16/fp16 ") for line in lines)


def test_a_kernel_that_does_not_compile_fails_its_cell_alone(
    cpu64: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, ROW_TERM, " - nothing_of_this_name")
    outcome = sweep(cpu64, tmp_path, problems=FEW, rows_cap=4)
    assert [row["verdict"] for row in outcome.rows] == ["PASS", "CompileError", "PASS"]
    assert "nothing_of_this_name" in rows_of(outcome.csv_path)[1]["note"]
    (line,) = (line for line in study.summary(outcome) if line.startswith("CompileError: bwd "))
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
        | {"op": "fwd"}
        | time_columns(problem, PASSED, Samples((took_us,) * 6, "cold", "", 2), OPENING)
        for took_us in times_us
    ]
    paths = Path("sweep.csv"), Path("environment.json")
    return Outcome(tuple(rows), None, OPENING, closing, *paths, {"tuned": 2, "ladder": 1})


def test_the_summary_gives_geometric_means_and_every_probe() -> None:
    lines = study.summary(finished(OPENING, 10.0, 40.0))
    assert any(line.startswith("fwd, geometric mean of its cells: 20.0 us, ") for line in lines)
    assert lines[0] == "configs: 1 ladder, 2 tuned"
    assert sum(line.startswith("probe ") for line in lines) == 3
    assert not any("SUSPECT" in line or "simulated" in line for line in lines)


@pytest.mark.parametrize(("write", "suspect"), [(5000.0, False), (4901.0, False), (4899.0, True)])
def test_probes_that_drift_over_2_percent_make_a_run_suspect(write: float, suspect: bool) -> None:
    closing = roofline(copy=4000.0, write=write, two_reads=4500.0)
    assert any(line.startswith("SUSPECT") for line in study.summary(finished(closing, 20.0))) is (
        suspect
    )


def test_a_geometric_mean_is_over_the_cells_that_have_a_number() -> None:
    rows = [{"pct": "1"}, {"pct": ""}, {"pct": "100"}]
    assert study.geometric_mean(rows, "pct") == pytest.approx(10)
    assert study.geometric_mean(rows[1:2], "pct") is None

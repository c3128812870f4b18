"""Searches of many problems, ablations, and what compares records with the ladder afterwards."""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from planted_lab import FakeSteps
from test_search import BEST, GOOD, H200, LADDER, PROBLEM, times
from virtual_gpu import VirtualGpu

import rmsnorm_raw as rr
from rmsnorm_raw import check, ladder, store, tuner
from rmsnorm_raw.measure import TIMING_PROTOCOL
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.study import tuning

ROOT = Path(__file__).resolve().parents[1]
GPU = VirtualGpu()
#: three problems of the study; the planted config is the best for the second
THREE = (Problem.forward(4096, 1024, "bf16"), PROBLEM, Problem.backward(4096, 4096, "bf16"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuner, "environment_digest", lambda: "an environment")
    store.forget()


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def steps() -> FakeSteps:
    return FakeSteps(times(**{GOOD.slug: 90.0}))


# ---- many problems -------------------------------------------------------------------------------


def test_each_problem_has_a_row_and_a_second_run_asks_nothing(tmp_path: Path) -> None:
    done, asked = [], steps()
    table, decisions = tuning.tune_all(
        THREE, GPU, tmp_path, steps=asked, progress=lambda n, of, what: done.append((n, of))
    )
    assert [row["verdict"] for row in table] == ["LADDER", "TUNED", "LADDER"]
    assert [decision.problem for decision in decisions] == list(THREE)
    written = rows_of(tmp_path / "tune.csv")
    assert [row["config"] for row in written] == [decision.config.slug for decision in decisions]
    assert written[1]["cold_ratio"] == written[1]["steady_ratio"] == "1.1111"
    assert int(written[0]["correct"]) > 20
    assert {of for _, of in done} == {3}
    facts = json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))
    assert facts["summary"] == tuning.summary(table)
    assert facts["timing_protocol"] == TIMING_PROTOCOL
    assert facts["summary"][0] == "1 of 3 problems tuned; the ladder stays in 2"
    correct, refused = (sum(int(row[it]) for row in written) for it in ("correct", "constraints"))
    assert f"configs: {correct} correct, {refused} refused by the space" in facts["summary"]
    store.forget()
    asked = steps()
    again, _ = tuning.tune_all(THREE, GPU, tmp_path, steps=asked)
    assert asked.log == []
    assert [row["config"] for row in again] == [row["config"] for row in table]
    assert {row["origin"] for row in again} == {"record"}


def test_a_search_that_fails_costs_its_own_row_alone(tmp_path: Path) -> None:
    base = ladder.default_config(THREE[0], H200)
    failing = replace(steps(), faults={("gate", base.slug): "runtime"})
    table, decisions = tuning.tune_all(THREE, GPU, tmp_path, steps=failing)
    assert [row["verdict"] for row in table] == ["SearchFailed", "TUNED", "LADDER"]
    assert len(decisions) == 2
    assert any(line.startswith("SearchFailed: fwd 4096x1024") for line in tuning.summary(table))


def test_the_configs_that_failed_are_named(tmp_path: Path) -> None:
    failing = replace(
        steps(), faults={("gate", BEST.slug): "correctness", ("compile", GOOD.slug): "compile"}
    )
    tuning.tune_all([PROBLEM], GPU, tmp_path, steps=failing)
    (row,) = rows_of(tmp_path / "tune.csv")
    assert sorted(row["faults"].split("; ")) == sorted(
        [f"{BEST.slug}: correctness: planted", f"{GOOD.slug}: compile: planted"]
    )


def test_an_error_without_a_message_has_its_line() -> None:
    row = dict.fromkeys(tuning.COLUMNS, "") | {"verdict": "MemoryError"}
    assert any(line.startswith("MemoryError: ") for line in tuning.summary([row]))


def test_an_interrupt_ends_the_run_and_keeps_the_records_so_far(tmp_path: Path) -> None:
    first = steps()
    tuning.tune_all(THREE[:1], GPU, tmp_path, steps=first)
    store.forget()
    calls = len(first.asked("gate"))
    stopped = replace(steps(), interrupt=("gate", 2), log=[])
    table, decisions = tuning.tune_all(THREE, GPU, tmp_path, steps=stopped)
    assert calls > 1
    assert [row["origin"] for row in table] == ["record", "searched"]
    assert decisions[-1].interrupted
    assert [row["verdict"] for row in rows_of(tmp_path / "tune.csv")] == ["LADDER", "INTERRUPTED"]
    facts = json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))
    assert facts["summary"][:2] == [
        "interrupted with 1 of 3 problems done; repeat the command, without --anew, and it goes on",
        "0 of 1 problems tuned; the ladder stays in 1",
    ]
    rest = steps()
    _, decisions = tuning.tune_all(THREE, GPU, tmp_path, steps=rest)
    assert {problem for _, problem, _ in rest.log if problem in THREE} == {*THREE[1:]}
    assert not decisions[-1].interrupted


def test_an_interrupt_outside_a_search_ends_the_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(key: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "lookup", interrupted)  # ahead of the search
    table, decisions = tuning.tune_all(THREE, GPU, tmp_path, steps=steps())
    assert ([row["verdict"] for row in table], decisions) == (["INTERRUPTED"], [])
    on_cpu = tuning.summary(table, 3, simulated=True)
    assert on_cpu[0] == (
        "interrupted with 0 of 3 problems done; nothing is kept on the simulator: the same "
        "command begins anew"
    )


# ---- ablation ------------------------------------------------------------------------------------


def test_an_ablation_leaves_a_table_and_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = FakeSteps(times(**{GOOD.slug: 90.0}))
    monkeypatch.setattr(tuning.Worker, "on", lambda backend: contextlib.nullcontext(asked))
    changes = tuning.ablate(PROBLEM, GPU, tmp_path)
    rows = rows_of(tmp_path / "ablation.csv")
    assert [row["change"] for row in rows] == [c.change or "the ladder" for c in changes]
    (best,) = (row for row in rows if row["config"] == GOOD.slug)
    assert (best["change"], best["verdict"], best["ratio"]) == (
        "store_policy=stream", "FASTER", "1.1111",
    )  # fmt: skip
    facts = json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))
    assert facts["verdicts"] == tuning.verdicts(changes)
    assert facts["verdicts"]["FASTER"] == 1
    assert facts["timing_protocol"] == TIMING_PROTOCOL
    assert all(bool(row["median_us"]) != bool(row["why_not"]) for row in rows)
    table = tuning.change_rows(changes)
    assert table[0][:3] == ["the ladder", LADDER.slug, "100.00"]
    assert len(table[0]) == len(tuning.CHANGE_TITLES)


# ---- records against the ladder ------------------------------------------------------------------


@pytest.fixture
def versus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("perf.tuned_vs_ladder")


class StandInLab:
    """Times of a lab, without kernels."""

    def __init__(self, given: FakeSteps) -> None:
        self.backend = GPU
        self.time = given.time


def compared(versus: ModuleType, monkeypatch: pytest.MonkeyPatch, us: float, **options: bool):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(check, "verify", lambda *args: check.Verdict(True, {}, 0, ""))
    lab = StandInLab(FakeSteps(times(**{GOOD.slug: us}), **options))  # type: ignore[arg-type]
    return list(versus.compared(PROBLEM, LADDER, GOOD, lab))


def test_records_are_compared_in_both_regimes(
    versus: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = compared(versus, monkeypatch, 90.0)
    assert [(row["regime"], row["verdict"]) for row in rows] == [
        ("cold", "FASTER"), ("steady", "FASTER"),
    ]  # fmt: skip
    assert [row["ratio"] for row in rows] == ["1.1111", "1.1111"]
    assert [row["regime"] for row in compared(versus, monkeypatch, 90.0, no_steady=True)] == [
        "cold"
    ]
    rows += list(versus.compared(THREE[0], LADDER, LADDER, None))
    assert rows[-1]["verdict"] == "LADDER"
    text = "\n".join(versus.summary(rows))
    assert "fwd cold: 1 FASTER; geometric mean 1.1111x of these, 1.0541x with the 1" in text


def test_a_wrong_record_is_not_timed(versus: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from rmsnorm_raw.errors import WrongResult

    monkeypatch.setattr(check, "verify", lambda *args: check.Verdict(False, {}, 0, "planted"))
    with pytest.raises(WrongResult):
        next(versus.compared(PROBLEM, LADDER, GOOD, StandInLab(steps())))


@pytest.mark.parametrize(("us", "code"), [(90.0, 0), (100.0, 0), (103.0, 1), (None, 1)])
def test_a_slower_record_or_none_fails_the_command(
    versus: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    us: float | None,
    code: int,
) -> None:
    monkeypatch.setattr(check, "verify", lambda *args: check.Verdict(True, {}, 0, ""))
    monkeypatch.setattr(versus, "start", lambda *args: (GPU, tmp_path))
    slower = FakeSteps(times(**{GOOD.slug: us or 0.0}))
    monkeypatch.setattr(versus, "Lab", lambda backend: StandInLab(slower))
    if us is not None:
        rr.tune(PROBLEM, backend=GPU, steps=steps())
        rr.tune(THREE[0], backend=GPU, steps=steps())
    store.forget()
    assert versus.main() == code
    if us is not None:
        written = rows_of(tmp_path / "tuned_vs_ladder.csv")
        assert {row["verdict"] for row in written} >= {"LADDER"}
        assert len(written) == 3

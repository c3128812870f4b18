"""Searches of many problems, ablations, and what compares records with the ladder afterwards."""

from __future__ import annotations

import csv
import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from planted_lab import FakeSteps
from test_search import GOOD, H200, LADDER, PROBLEM, times
from virtual_gpu import VirtualGpu

import rmsnorm_raw as rr
from rmsnorm_raw import ablation, candidates, check, ladder, space, store, tuner
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.search import SearchFailed
from rmsnorm_raw.study import tuning
from rmsnorm_raw.study.cells import cells

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
    assert facts["summary"][0] == "1 of 3 problems tuned; the ladder stays in 2"
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
    assert len(rows_of(tmp_path / "tune.csv")) == 2
    rest = steps()
    _, decisions = tuning.tune_all(THREE, GPU, tmp_path, steps=rest)
    assert {problem for _, problem, _ in rest.log if problem in THREE} == {*THREE[1:]}
    assert not decisions[-1].interrupted


# ---- candidates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [c for c in cells() if c.dtype == "bfloat16"][::7], ids=str)
@pytest.mark.parametrize("arch", ["sm_90", "gfx950"])
def test_the_first_round_has_every_value_of_every_knob(problem: Problem, arch: str) -> None:
    device = KNOWN[arch]
    kept = space.enumerate_configs(problem, device).kept
    base = ladder.default_config(problem, device)
    explorer = candidates.Explorer(kept, base)
    first = [base, *explorer.take(40)]
    for knob in candidates.KNOBS:
        assert {getattr(c, knob) for c in first} == {getattr(c, knob) for c in (base, *kept)}, knob
    everything = first[1:]
    while some := explorer.take(32, first[:3]):
        everything += some
    assert sorted(c.slug for c in everything) == sorted(c.slug for c in kept if c != base)


def test_one_factor_changes_one_knob_and_what_must_go_with_it() -> None:
    base = ladder.default_config(Problem.backward(32768, 8192, "bf16"), H200)
    problem = Problem.backward(32768, 8192, "bf16")
    walk = dict(candidates.one_factor(problem, H200, base))
    assert walk["block=256"] == replace(base, block=256)
    assert walk["paced=False"] == replace(base, paced=False)
    assert walk["path=registers"] == replace(
        base, path="registers", stages=0, bulk=False, paced=False
    )
    assert walk["bulk=False"] == replace(base, bulk=False, paced=False, load_policy="default")
    assert base not in walk.values()
    assert not any(change.startswith("stages=0") for change in walk)


# ---- ablation ------------------------------------------------------------------------------------


def test_an_ablation_says_what_each_knob_is_worth() -> None:
    stream = replace(LADDER, store_policy="stream")
    slow = replace(LADDER, load_policy="default")
    wrong = replace(LADDER, load_policy="stream")
    asked = FakeSteps(
        times(**{stream.slug: 90.0, slow.slug: 110.0}),
        faults={("gate", wrong.slug): "correctness"},
    )
    changes = ablation.ablate(PROBLEM, H200, asked)
    by_change = {change.change: change for change in changes}
    assert (changes[0].change, changes[0].config) == ("", LADDER)
    assert str(by_change["store_policy=stream"]).startswith("FASTER 1.11")
    assert str(by_change["load_policy=default"]).startswith("SLOWER 0.909")
    assert str(by_change["load_policy=stream"]) == "correctness: planted"
    refused = {c.change: str(c) for c in changes if str(c).startswith("does not fit: ")}
    walk = dict(candidates.one_factor(PROBLEM, H200, LADDER))
    for change, why in refused.items():
        config = walk[change]
        reason = space.reject_reason(PROBLEM, H200, config)
        assert why.removeprefix("does not fit: ") == (
            reason or space.inert_reason(PROBLEM, H200, config)
        )
    assert refused
    (timed,) = asked.asked("time cold")  # one run, the ladder's config in it
    assert timed[0] == LADDER.slug
    assert wrong.slug not in timed
    assert set(by_change) == {"", *walk}
    assert ablation.verdicts(changes)["FASTER"] == 1


def test_an_ablation_of_a_ladder_that_fails_is_refused() -> None:
    asked = FakeSteps(times(), faults={("try_out", LADDER.slug): "runtime"})
    with pytest.raises(SearchFailed, match=LADDER.slug):
        ablation.ablate(PROBLEM, H200, asked)
    with pytest.raises(InvalidInput, match="no steady times"):
        ablation.ablate(PROBLEM, H200, FakeSteps(times(), no_steady=True), regime="steady")


def test_an_ablation_is_not_of_simulated_times(cpu64: Backend, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="use a GPU"):
        tuning.ablate(PROBLEM, cpu64, tmp_path)


def test_an_ablations_columns_and_table() -> None:
    changes = ablation.ablate(PROBLEM, H200, FakeSteps(times()))
    for change in changes:
        row = ablation.columns(change)
        assert row.keys() <= set(ablation.COLUMNS)
        assert bool(row.get("median_us")) != bool(row["why_not"])
    table = tuning.change_rows(changes)
    assert table[0][0] == "the ladder"
    assert len(table[0]) == len(tuning.CHANGE_TITLES)


# ---- records against the ladder ------------------------------------------------------------------


@pytest.fixture
def versus() -> ModuleType:
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

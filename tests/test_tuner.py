"""``tune``: decisions, records, interrupts; and true searches in the simulator."""

from __future__ import annotations

import itertools
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from planted_lab import FakeSteps, PlantedLab
from test_search import BEST, GOOD, H200, KEPT, LADDER, PROBLEM, times
from virtual_gpu import VirtualGpu

import rmsnorm_raw as rr
from rmsnorm_raw import ladder, launch, store, tuner
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.backends.offline import OfflineBackend
from rmsnorm_raw.config import Config
from rmsnorm_raw.errors import BackendUnavailable, InvalidInput
from rmsnorm_raw.extras import Extras
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.stats import Outcome
from rmsnorm_raw.worker import Worker

GPU = VirtualGpu()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuner, "environment_digest", lambda: "an environment")
    store.forget()


def tuned(steps: FakeSteps, problem: Problem = PROBLEM, **options) -> tuner.Decision:  # type: ignore[no-untyped-def]
    return rr.tune(problem, backend=GPU, steps=steps, **options)


def faster() -> FakeSteps:
    return FakeSteps(times(**{GOOD.slug: 90.0}))


# ---- decisions -----------------------------------------------------------------------------------


def test_a_decision_says_what_why_and_what_to_paste() -> None:
    decision = tuned(faster())
    assert (decision.config, decision.ladder, decision.tuned) == (GOOD, LADDER, True)
    assert decision.origin == "searched"
    assert decision.comparisons["cold"].verdict is Outcome.FASTER
    assert set(decision.comparisons) == {"cold", "steady"}
    line = f'rr.rmsnorm_fwd(x, w, config="{GOOD.slug}")'
    assert decision.line == line
    short, table = repr(decision), str(decision)
    assert "\n" not in short
    assert "FASTER 1.111x" in short
    assert line in short
    assert table.splitlines()[-1] == line
    for said in (str(PROBLEM), "H200", LADDER.slug, "candidate first", "16383", "correct"):
        assert said in table


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (Problem.backward(8192, 8192, "bf16"), "rr.rmsnorm_bwd(dout, x, w, rstd, config="),
        (
            Problem.backward(8192, 8192, "bf16", weight_dtype=None),
            "rr.rmsnorm_bwd(dout, x, rstd=rstd, config=",
        ),
        (
            Problem.backward(8192, 8192, "bf16", has_rstd=False, need_dx=False, eps=1e-5),
            "rr.rmsnorm_bwd(dout, x, w, need_dx=False, eps=1e-05, config=",
        ),
        (
            Problem.forward(8192, 8192, "bf16", weight_dtype=None, store_rstd=False),
            "rr.rmsnorm_fwd(x, store_rstd=False, config=",
        ),
        (
            Problem.forward(
                8192, 8192, "bf16", bias_dtype="bf16", residual_dtype="bf16", casting="llama",
                residual_out_dtype="fp32", out_dtype="fp32", weight_offset=1.0, store_rstd=False,
            ),
            'rr.rmsnorm_fwd(x, w, bias=bias, residual=residual, residual_dtype="float32", '
            'casting="llama", out_dtype="float32", weight_offset=1.0, store_rstd=False, config=',
        ),
        (
            Problem.backward(
                8192, 8192, "fp32", dresidual_out_dtype="bf16", bias_dtype="fp16", dx_dtype="bf16",
                residual_dtype="fp32",
            ),
            "rr.rmsnorm_bwd(dout, x, w, rstd, dresidual_out=dresidual_out, need_dbias=True, "
            'bias_dtype="float16", dx_dtype="bfloat16", residual_dtype="float32", config=',
        ),
    ],
)  # fmt: skip
def test_the_line_calls_what_was_tuned(problem: Problem, line: str) -> None:
    assert tuned(FakeSteps(times()), problem).line.startswith(line)


def test_the_pasted_line_runs(cpu64: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.backward(3, 64, "fp32", eps=1e-5)
    decision = rr.tune(problem, "none", backend=cpu64)
    x, dout = (rr.array.randn((3, 64), seed=n, backend="cpu") for n in (0, 1))
    w, rstd = rr.array.randn(64, seed=2, backend="cpu"), rr.array.randn(3, seed=3, backend="cpu")
    names = {"rr": rr, "x": x, "dout": dout, "w": w, "rstd": rstd}
    assert eval(decision.line, names).dx.shape == (3, 64)


LINES = [
    Problem.forward(6, 64, "fp32", residual_dtype="bf16", bias_dtype="fp32", weight_offset=0.5),
    Problem.forward(6, 64, "fp32", residual_dtype="bf16", residual_out_dtype=None),
    Problem.forward(6, 64, "fp32", out_dtype="float8_e4m3fn", scale="dynamic", casting="llama"),
    Problem.forward(6, 64, "fp32", out_dtype="float8_e4m3fn", scale="static"),
    Problem.forward(6, 64, "fp32", heads=2, per_head=True),
    Problem.backward(
        6, 64, "fp32", bias_dtype="bf16", dresidual_out_dtype="bf16", residual_dtype="bf16"
    ),
]


@pytest.mark.parametrize("problem", LINES, ids=str)
def test_the_pasted_line_runs_the_problem_that_was_tuned(
    problem: Problem, cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    decision = rr.tune(problem, "none", backend=cpu64)
    arrays = {}
    for operand in problem.operands:
        shape: tuple[int, ...] = (operand.cols,)
        if operand.is_matrix:
            shape = (operand.rows, problem.extras.heads, problem.cols)
        elif operand.name == "rstd":
            shape = (operand.rows, 1)
        elif operand.cols > problem.cols:
            shape = (problem.extras.heads, problem.cols)
        if not operand.is_output:
            arrays[operand.name] = np.ones(shape, np.dtype(operand.dtype))
    launched = []
    make_plan = launch.make_plan
    monkeypatch.setattr(launch, "make_plan", lambda p, *_: launched.append(p) or make_plan(p, *_))
    eval(decision.line, {"rr": rr, "w": arrays.pop("weight"), **arrays})
    assert launched == [problem]


def test_where_the_ladder_stays_the_decision_says_so() -> None:
    decision = tuned(FakeSteps(times()))
    assert not decision.tuned
    assert decision.config == LADDER
    assert "the ladder's" in repr(decision)
    assert "none of" in str(decision)


def test_what_failed_is_named_with_its_reason() -> None:
    decision = tuned(replace(faster(), faults={("gate", BEST.slug): "correctness"}))
    assert decision.config == GOOD
    assert decision.faults.keys() == {BEST}
    assert f"{BEST.slug}: correctness: planted" in str(decision).splitlines()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InvalidInput, match="'thorough' is not one of none, quick, full"):
        tuned(faster(), effort="thorough")
    for budget_s in (0, -1.0, float("nan"), "5"):
        with pytest.raises(InvalidInput, match="give seconds above 0"):
            tuned(faster(), budget_s=budget_s)
    with pytest.raises(InvalidInput, match="the problem is 'forward': give a Problem"):
        tuned(faster(), "forward")  # type: ignore[arg-type]
    for nothing in (
        Problem.forward(0, 64, "fp32"),
        Problem.backward(8, 64, "fp32", need_dx=False, need_dweight=False),
        Problem.backward(
            8, 64, "fp32", need_dx=False, need_dweight=False, dresidual_out_dtype="fp32"
        ),
    ):
        with pytest.raises(InvalidInput, match="launches nothing"):
            tuned(faster(), nothing)
    alone = Problem.backward(8, 64, "fp32", need_dx=False, need_dweight=False, bias_dtype="fp32")
    assert tuned(FakeSteps(times()), alone).origin == "searched"


def test_what_cannot_be_searched_is_refused_before_a_worker_starts(cpu64: Backend) -> None:
    steps = faster()
    with pytest.raises(BackendUnavailable, match="without a device"):
        rr.tune(PROBLEM, backend=OfflineBackend("gfx950"), steps=steps)
    kernel = rr.build(SMALL, backend=cpu64)
    with pytest.raises(InvalidInput, match=r"pass kernel\.problem; edited text is not searched"):
        tuned(steps, kernel)  # type: ignore[arg-type]
    assert (steps.starts, steps.log) == (0, [])


# ---- records -------------------------------------------------------------------------------------


@pytest.mark.parametrize("us", [90.0, 130.0])
def test_a_second_search_finds_the_record_and_launches_nothing(us: float) -> None:
    first = tuned(FakeSteps(times(**{GOOD.slug: us})))
    store.forget()
    steps = faster()
    second = tuned(steps)
    assert (steps.log, steps.starts) == ([], 0)
    assert second.origin == "record"
    assert (second.config, second.why, second.counts) == (first.config, first.why, first.counts)
    assert second.comparisons == first.comparisons
    assert second.line == first.line


def test_what_was_tuned_is_what_a_call_resolves_to() -> None:
    tuned(faster())
    assert store.resolve(PROBLEM, GPU) == (GOOD, "tuned")
    assert store.resolve(replace(PROBLEM, rows=16000), GPU) == (GOOD, "tuned")
    assert store.resolve(replace(PROBLEM, rows=8191), GPU)[1] == "ladder"


def test_where_the_ladder_stays_each_of_the_buckets_rows_has_its_own_choice() -> None:
    problem = Problem.forward(700, 4096, "bfloat16")
    tuned(FakeSteps(times()), problem)
    for rows in (512, 700, 1023):
        here = replace(problem, rows=rows)
        assert store.resolve(here, GPU) == (ladder.default_config(here, H200), "ladder")


def test_a_more_thorough_search_is_made_and_a_lesser_one_is_not() -> None:
    tuned(FakeSteps(times()))
    steps = faster()
    assert tuned(steps, effort="full").config == GOOD
    assert steps.log
    again = FakeSteps(times())
    decision = tuned(again)
    assert (again.log, decision.config, decision.effort) == ([], GOOD, "full")


def test_a_search_can_be_made_anew() -> None:
    tuned(FakeSteps(times()))
    assert tuned(faster(), resume=False).config == GOOD


def test_a_search_that_timed_nothing_leaves_no_record() -> None:
    decision = tuned(replace(faster(), now=float("inf")))
    assert "the budget of 8 s ended before a candidate was gated" in decision.why
    assert re.search(r"\n0 correct, \d+ refused by the space;", str(decision))
    assert store.lookup(store.key(PROBLEM, GPU)) is None


def test_a_winner_is_of_the_whole_operation_that_it_was_found_for() -> None:
    whole = replace(PROBLEM, extras=Extras(bias_dtype="bfloat16"))
    base = ladder.default_config(whole, GPU.device)
    steps = FakeSteps(lambda problem, config, regime: 90.0 if config == GOOD else 100.0)
    assert base != GOOD
    assert tuned(steps, whole).config == GOOD
    assert store.resolve(whole, GPU) == (GOOD, "tuned")
    for other in (PROBLEM, replace(PROBLEM, extras=Extras(bias_dtype="float32"))):
        assert store.resolve(other, GPU)[1] == "ladder"


AT_ONCE_S = 1e-9  # a budget that ends in the first round


def test_a_search_whose_finals_were_cut_short_leaves_no_record() -> None:
    assert "did not finish" in tuned(faster(), budget_s=AT_ONCE_S).why
    assert store.lookup(store.key(PROBLEM, GPU)) is None
    steps = faster()
    assert tuned(steps).config == GOOD
    assert steps.log


@pytest.mark.parametrize("origin", ["tuned", "known best"])
def test_a_search_that_was_cut_short_takes_no_winners_place(
    origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(faster())
    if origin == "known best":
        key = store.key(PROBLEM, GPU)
        record = store.lookup(key)
        assert record
        store.export([(key, record)], tmp_path / f"{GPU.device.arch}.json")
        shutil.rmtree(store.folder())
        monkeypatch.setattr(store, "KNOWN_BEST", tmp_path)
        store.forget()
    for us in (80.0, 130.0):
        for effort in ("quick", "full"):
            steps = FakeSteps(times(**{BEST.slug: us}))
            tuned(steps, effort=effort, budget_s=AT_ONCE_S, resume=False)
            assert store.resolve(PROBLEM, GPU) == (GOOD, origin)
    steps = faster()
    tuned(steps, effort="full")
    assert steps.log  # none of these stands in the way of a whole one


def test_a_full_search_that_did_not_try_all_counts_as_quick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = replace(faster(), cost_s=0.01)
    monkeypatch.setattr(tuner, "Search", partial(tuner.Search, clock=steps.clock))
    decision = tuned(steps, effort="full", budget_s=10.0)
    assert decision.config == GOOD
    assert len(decision.standings) < len(KEPT)
    record = store.lookup(store.key(PROBLEM, GPU))
    assert record
    assert (record.config, record.effort) == (GOOD, "quick")


def test_no_effort_gives_what_is_known_and_asks_nothing() -> None:
    steps = FakeSteps(times())
    assert tuned(steps, effort="none").origin == "ladder"
    tuned(faster())
    decision = tuned(steps, effort="none")
    assert (decision.config, decision.origin) == (GOOD, "tuned")
    assert steps.log == []


# ---- Ctrl-C --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "interrupt", [("compile", 1), ("gate", 2), ("time cold", 2), ("time steady", 3)]
)
def test_an_interrupt_keeps_what_is_known(interrupt: tuple[str, int]) -> None:
    steps = replace(faster(), interrupt=interrupt)
    decision = tuned(steps)
    assert decision.interrupted
    assert decision.config == LADDER
    assert "interrupted" in decision.why
    assert bool(decision.standings) == (interrupt not in [("compile", 1)])
    assert bool(decision.finals) == (interrupt[0] == "time steady")
    assert store.lookup(store.key(PROBLEM, GPU)) is None
    assert tuned(faster()).config == GOOD  # and the next search is made


def test_an_interrupt_while_the_worker_starts_is_one_of_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    steps = faster()
    monkeypatch.setattr(steps, "start", interrupted)
    decision = tuned(steps)
    assert decision.interrupted
    assert (decision.config, steps.log) == (LADDER, [])


def test_a_lost_finalist_is_in_the_table() -> None:
    decision = tuned(FakeSteps(times(**{BEST.slug: 100.0}), first_place=1.05))
    assert "the order decides" in str(decision)
    assert decision.finals
    assert decision.samples["cold"].keys() == {"ladder"}


# ---- in the simulator ----------------------------------------------------------------------------

SMALL = Problem.forward(9, 256, "bfloat16")


def test_a_search_in_the_simulator_gates_and_decides_nothing(cpu32: Backend) -> None:
    decision = rr.tune(SMALL, backend=cpu32)
    assert decision.simulated
    assert "its times are simulated, and nothing is kept" in str(decision).splitlines()[0]
    assert not decision.tuned
    assert "simulated" in decision.why
    assert decision.counts["correct"] > 5
    assert not any(decision.counts.get(kind) for kind in ("compile", "runtime", "correctness"))
    table = str(decision)
    assert "simulated cold" in table
    assert "FASTER" not in table
    assert "SLOWER" not in table
    assert not store.folder().exists()


@pytest.mark.parametrize(
    "problem",
    [
        Problem.forward(
            9, 256, "bf16", bias_dtype="fp32", residual_dtype="bf16", heads=3, per_head=True
        ),
        Problem.backward(9, 256, "bf16", bias_dtype="fp32", dresidual_out_dtype="bf16"),
    ],
    ids=str,
)
def test_a_search_of_the_whole_operation_gates_its_candidates(
    problem: Problem, cpu32: Backend
) -> None:
    decision = rr.tune(problem, backend=cpu32)
    assert decision.counts["correct"] > 5, decision
    assert not any(decision.counts.get(kind) for kind in ("compile", "runtime", "correctness"))


def test_a_true_search_goes_on_past_planted_faults(cpu32: Backend) -> None:
    """Real kernels, a real child: what crashes, hangs or is wrong is counted and not timed."""
    base = ladder.default_config(SMALL, cpu32.device)
    near = first_round(cpu32)
    fates = dict(zip([c.slug for c in near], ("crash", "wrong", "text", "hang"), strict=False))
    assert len(fates) == 4
    with Worker(partial(PlantedLab, fates), limit_s=40.0) as worker:
        decision = rr.tune(SMALL, backend=cpu32, steps=worker)
    counts = {kind: decision.counts[kind] for kind in ("runtime", "correctness", "compile")}
    assert counts == {"runtime": 1, "correctness": 1, "compile": 1}
    assert decision.counts["timeout"] == 1
    assert decision.config == base
    timed = {config.slug for config, _ in decision.standings}
    assert timed
    assert not timed & fates.keys()


def first_round(backend: Backend) -> list[Config]:
    """Candidates of the search that no other's machine code comes before."""
    steps = FakeSteps(lambda problem, config, regime: 100.0)
    rr.tune(SMALL, backend=backend, steps=steps)
    own: dict[tuple[int, ...], Config] = {}
    for config in map(Config.parse, itertools.chain(*steps.asked("compile"))):
        if config.path == "registers":
            own.setdefault((config.block, config.threads_per_row, config.vec), config)
    return list(own.values())[1:]  # the first is the ladder's

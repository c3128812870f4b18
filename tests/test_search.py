"""The search on steps whose times and faults are given; no kernel runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planted_lab import FakeSteps

from rmsnorm_raw import ladder, space
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN, SIMULATED
from rmsnorm_raw.effort import FULL, QUICK, Effort
from rmsnorm_raw.errors import WrongResult
from rmsnorm_raw.lab import few_rows
from rmsnorm_raw.measure import Regime
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.search import GATE_ROWS, SIMULATED_CANDIDATES, Search, SearchFailed

H200 = KNOWN["sm_90"]
PROBLEM = Problem.forward(8192, 8192, "bfloat16")
LADDER = ladder.default_config(PROBLEM, H200)
KEPT = [c for c in space.enumerate_configs(PROBLEM, H200).kept if c != LADDER]
#: near the ladder's config, so that a quick search tries it in its first round
GOOD = replace(LADDER, store_policy="stream")
BEST = replace(LADDER, load_policy="default")


def times(**us: float):  # type: ignore[no-untyped-def]
    """100 us for the ladder's config, 130 for others, but for those named by their slug."""

    def time_us(problem: Problem, config: Config, regime: Regime) -> float:
        base = 100.0 if config == ladder.default_config(problem, H200) else 130.0
        return us.get(config.slug, base) * problem.rows / PROBLEM.rows

    return time_us


def searched(steps: FakeSteps, effort: Effort = QUICK, budget_s: float | None = None) -> Search:
    search = Search(PROBLEM, H200, steps, effort, budget_s=budget_s, clock=steps.clock)
    search.run()
    return search


def test_the_planted_configs_are_in_the_first_round() -> None:
    steps = FakeSteps(times())
    searched(steps)
    (first, *_) = steps.asked("compile")
    assert first[0] == LADDER.slug
    assert {GOOD.slug, BEST.slug} <= {*first[1:]}


# ---- who wins ------------------------------------------------------------------------------------


def test_a_faster_candidate_wins_in_both_orders_regimes_and_ends() -> None:
    steps = FakeSteps(times(**{GOOD.slug: 90.0}))
    search = searched(steps)
    assert search.config == GOOD
    assert [(f.rows, f.regime) for f in search.finals] == [
        (8192, "cold"), (8192, "steady"), (16383, "cold"), (16383, "steady"),
    ]  # fmt: skip
    for final in search.finals:
        assert final.won
        assert final.first.ratio == pytest.approx(100 / 90, rel=0.01)
        assert len(final.tuned_us) == len(final.ladder_us) >= 2 * 6
    finals = [slugs for name, p, slugs in steps.log if name == "time steady" and p.rows == 16383]
    assert finals == [[LADDER.slug, GOOD.slug], [GOOD.slug, LADDER.slug]]
    assert "FASTER in every final" in search.why
    assert "16383 rows steady" in search.why


def test_rows_inside_a_bucket_are_played_too() -> None:
    problem = replace(PROBLEM, rows=9000)
    steps = FakeSteps(times(**{GOOD.slug: 90.0}))
    search = Search(problem, H200, steps, QUICK, clock=steps.clock)
    search.run()
    assert search.config == GOOD
    assert list(dict.fromkeys(f.rows for f in search.finals)) == [9000, 8192, 16383]


def test_rows_of_several_heads_are_whole_tokens() -> None:
    """The gate's rows, those asked for, and the ends of the bucket, which is one of tokens."""
    problem = Problem.forward(3 * 9000, 4096, "bf16", heads=3, per_head=True)
    good = Config.parse("b256-t256-v16")
    base = ladder.default_config(problem, H200)
    assert good != base
    steps = FakeSteps(lambda p, config, regime: 90.0 if config == good else 100.0)
    search = Search(problem, H200, steps, QUICK, clock=steps.clock, known=good)
    search.run()
    assert search.config == good
    assert list(dict.fromkeys(f.rows for f in search.finals)) == [27000, 3 * 8192, 3 * 16383]
    assert next(p.rows for name, p, _ in steps.log if name == "gate") == 3 * 1367


@pytest.mark.parametrize(
    ("rows", "heads", "most", "few"),
    [
        (9000, 1, 4099, 4099),
        (7, 1, 4099, 7),
        (27000, 3, 67, 69),
        (3, 3, 67, 3),
        (640, 128, 67, 128),
    ],
)
def test_few_rows_are_an_odd_number_of_tokens(rows: int, heads: int, most: int, few: int) -> None:
    assert few_rows(Problem.forward(rows, 64, "bf16", heads=heads), most).rows == few


def test_the_best_of_several_wins() -> None:
    assert searched(FakeSteps(times(**{GOOD.slug: 95.0, BEST.slug: 90.0}))).config == BEST


def test_nothing_faster_leaves_the_ladder_and_plays_no_finals() -> None:
    search = searched(FakeSteps(times()))
    assert search.config == search.ladder == LADDER
    assert search.finals == []
    assert "none of" in search.why
    assert "faster than the ladder" in search.why


def test_a_gain_within_the_noise_does_not_ship() -> None:
    search = searched(FakeSteps(times(**{GOOD.slug: 99.3})))
    assert search.config == LADDER


def test_where_no_clones_exceed_the_cache_cold_decides() -> None:
    search = searched(FakeSteps(times(**{GOOD.slug: 90.0}), no_steady=True))
    assert search.config == GOOD
    assert {final.regime for final in search.finals} == {"cold"}


@pytest.mark.parametrize("known", [None, GOOD], ids=["unknown", "known"])
def test_the_winner_known_so_far_is_among_the_finalists_of_a_full_search(
    known: Config | None,
) -> None:
    """More candidates than a search has finalists are the fastest cold, and lose in steady."""
    one_sided = {config.slug for config in KEPT[: FULL.finalists + 1]} - {GOOD.slug}

    def time_us(problem: Problem, config: Config, regime: Regime) -> float:
        fast = config.slug in one_sided and regime == "cold"
        return 50.0 if fast else times(**{GOOD.slug: 90.0})(problem, config, regime)

    steps = FakeSteps(time_us)
    search = Search(PROBLEM, H200, steps, FULL, clock=steps.clock, known=known)
    search.run()
    assert search.config == (known or LADDER)
    assert search.finished


def test_the_winner_known_so_far_is_tried_first() -> None:
    steps = FakeSteps(times())
    Search(PROBLEM, H200, steps, QUICK, clock=steps.clock, known=KEPT[-1]).run()
    assert steps.asked("compile")[0][:2] == [LADDER.slug, KEPT[-1].slug]
    assert steps.asked("compile")[0].count(KEPT[-1].slug) == 1


# ---- who must not --------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["correctness", "runtime", "timeout"])
def test_a_wrong_candidate_that_is_the_fastest_is_never_timed(fault: str) -> None:
    steps = FakeSteps(
        times(**{GOOD.slug: 10.0, BEST.slug: 90.0}),
        faults={("gate", GOOD.slug): fault},  # type: ignore[dict-item]
    )
    search = searched(steps)
    assert search.config == BEST
    assert search.counts[fault] == 1
    assert search.faults[GOOD].kind == fault
    assert not any(GOOD.slug in slugs for slugs in steps.asked("time cold"))


@pytest.mark.parametrize("rows", [8192, 16383])
def test_a_candidate_that_is_wrong_at_full_rows_alone_does_not_ship(rows: int) -> None:
    """The gate before screening has fewer rows: the finals have their own, at each end."""
    assert rows > GATE_ROWS
    steps = FakeSteps(
        times(**{GOOD.slug: 50.0, BEST.slug: 90.0}),
        faults_at={("gate", GOOD.slug, rows): "correctness"},
    )
    search = searched(steps)
    assert search.config == BEST
    assert search.counts["correctness"] == 1
    assert not any(final.config == GOOD and final.rows == rows for final in search.finals)


def regime_times(slug: str, slow: str):  # type: ignore[no-untyped-def]
    plain, fast = times(), times(**{slug: 90.0})

    def time_us(problem: Problem, config: Config, regime: Regime) -> float:
        where = (regime, "far" if problem.rows != PROBLEM.rows else "near")
        return (plain if slow in where else fast)(problem, config, regime)

    return time_us


@pytest.mark.parametrize("slow", ["steady", "far"])
def test_faster_in_one_regime_or_at_one_end_alone_does_not_ship(slow: str) -> None:
    search = searched(FakeSteps(regime_times(GOOD.slug, slow)))
    assert search.config == LADDER
    assert search.finals
    assert not search.finals[-1].won
    assert slow in search.why or "16383 rows" in search.why
    assert "SLOWER" in search.why


def test_a_bias_of_the_timer_that_favours_one_place_is_detected_by_the_swap() -> None:
    steps = FakeSteps(times(**{GOOD.slug: 100.0}), first_place=1.05)
    search = searched(steps)
    assert search.config == LADDER
    final = search.finals[0]
    assert final.first.verdict.value == "FASTER"
    assert final.swapped.verdict.value == "SLOWER"
    assert "the order decides" in search.why


def test_a_bias_against_the_first_place_hides_no_winner() -> None:
    assert searched(FakeSteps(times(**{GOOD.slug: 90.0}), first_place=1.02)).config == GOOD


# ---- failures ------------------------------------------------------------------------------------


def test_failures_are_counted_by_kind() -> None:
    first_round = searched(FakeSteps(times(), cost_s=1.0), budget_s=400.0)
    some = list(first_round.standings)[:5]
    faults = {
        ("compile", some[0].slug): "compile", ("gate", some[1].slug): "correctness",
        ("gate", some[2].slug): "runtime", ("gate", some[3].slug): "timeout",
        ("try_out", some[4].slug): "runtime",
    }  # fmt: skip
    search = searched(FakeSteps(times(), faults=faults))  # type: ignore[arg-type]
    assert {kind: search.counts[kind] for kind in ("compile", "correctness", "timeout")} == {
        "compile": 1, "correctness": 1, "timeout": 1,
    }  # fmt: skip
    assert search.counts["runtime"] == 2
    found = space.enumerate_configs(PROBLEM, H200)
    assert search.counts["constraints"] == len(found.rejected)
    assert search.counts["correct"] == len(search.standings) + 1 + 1  # the ladder's, and some[4]
    assert not set(some) & set(search.standings)


def test_a_timing_that_fails_finds_its_culprit_and_times_the_others() -> None:
    slug = GOOD.slug
    search = searched(FakeSteps(times(**{BEST.slug: 90.0}), faults={("time", slug): "timeout"}))
    assert search.counts["timeout"] == 1
    assert search.faults[GOOD].kind == "timeout"
    assert search.config == BEST
    assert len(search.standings) > 20


@pytest.mark.parametrize(
    ("step", "kind", "error"),
    [
        ("compile", "compile", SearchFailed), ("gate", "correctness", WrongResult),
        ("gate", "memory", MemoryError), ("try_out", "timeout", SearchFailed),
    ],
)  # fmt: skip
def test_a_ladder_that_fails_ends_the_search(step: str, kind: str, error: type) -> None:
    steps = FakeSteps(times(), faults={(step, LADDER.slug): kind})  # type: ignore[dict-item]
    with pytest.raises(error, match=LADDER.slug):
        searched(steps)


def test_candidates_of_one_code_object_and_grid_are_timed_once() -> None:
    search = searched(FakeSteps(times(), identity=lambda config: f"{config.block}"))
    timed = {config.block for config in search.standings}
    assert len(search.standings) == len(timed)
    assert LADDER.block not in timed
    assert search.counts["duplicates"] > 10


# ---- how much ------------------------------------------------------------------------------------


def test_the_budget_ends_exploring_and_is_kept() -> None:
    steps = FakeSteps(times(**{GOOD.slug: 90.0}), cost_s=0.05)
    search = searched(steps, budget_s=6.0)
    assert search.took_s <= 6.0 + 3 * 0.05 * (1 + QUICK.round)
    assert len(search.standings) <= QUICK.round


@pytest.mark.parametrize("budget_s", [0.0, 1.0, 12.0])
def test_a_budget_that_ends_before_the_finals_leaves_the_ladder(budget_s: float) -> None:
    steps = FakeSteps(times(**{GOOD.slug: 50.0}), cost_s=0.2)
    search = searched(steps, budget_s=budget_s)
    assert search.config == LADDER
    assert "budget" in search.why
    assert search.took_s < budget_s + 35 * 0.2
    assert not search.finished


def test_full_effort_tries_the_whole_space() -> None:
    steps = FakeSteps(times(**{KEPT[-1].slug: 80.0}))
    search = searched(steps, FULL)
    assert set(search.standings) >= set(KEPT)
    assert search.config == KEPT[-1]
    assert search.counts["correct"] == len(search.standings) + 1


def test_quick_looks_near_the_leaders() -> None:
    """A valley: each step towards the best config is faster, and rounds follow it."""
    target = next(c for c in reversed(KEPT) if c.path == "registers")
    from rmsnorm_raw.candidates import knobs_apart

    def time_us(problem: Problem, config: Config, regime: Regime) -> float:
        return problem.rows / 80 * (1 + 0.05 * knobs_apart(config, target)[1])

    steps = FakeSteps(time_us, cost_s=0.01)
    search = searched(steps, budget_s=20.0)
    assert len(search.standings) < len(KEPT)
    assert target in search.standings


def test_a_search_is_the_same_twice() -> None:
    one, other = FakeSteps(times()), FakeSteps(times())
    searched(one)
    searched(other)
    assert one.log == other.log


# ---- the ends of a bucket ------------------------------------------------------------------------


def test_an_end_that_does_not_fit_the_device_is_skipped_and_said() -> None:
    small = replace(H200, memory_bytes=1_000_000_000)
    steps = FakeSteps(times(**{GOOD.slug: 90.0}))
    search = Search(PROBLEM, small, steps, QUICK, clock=steps.clock)
    search.run()
    assert search.config == GOOD
    assert {final.rows for final in search.finals} == {8192}
    assert "16383 rows skipped: they want" in search.why


@pytest.mark.parametrize("config", [GOOD, LADDER], ids=["candidate", "ladder"])
def test_memory_that_others_hold_is_no_reason_to_skip_an_end(config: Config) -> None:
    large = replace(H200, memory_bytes=141_000_000_000)
    steps = FakeSteps(
        times(**{GOOD.slug: 90.0}), faults_at={("gate", config.slug, 16383): "memory"}
    )
    search = Search(PROBLEM, large, steps, QUICK, clock=steps.clock)
    search.run()
    assert search.config == LADDER
    assert "fails at 16383 rows (memory)" in search.why
    assert search.counts["memory"] == 1


def test_a_candidate_is_held_against_the_ladders_choice_for_those_rows() -> None:
    problem = Problem.forward(512, 4096, "bfloat16")
    near, far = (ladder.default_config(replace(problem, rows=n), H200) for n in (512, 1023))
    assert near != far
    ladders = {(near.slug, 512): 100.0, (far.slug, 512): 50.0, (far.slug, 1023): 80.0}

    def time_us(problem: Problem, config: Config, regime: Regime) -> float:
        fast = 90.0 if config.store_policy == "stream" and config.min_blocks else 130.0
        return ladders.get((config.slug, problem.rows), fast)

    steps = FakeSteps(time_us)
    search = Search(problem, H200, steps, QUICK, clock=steps.clock)
    search.run()
    assert search.config == near  # 90 us beats the choice for 512 rows, and not that for 1023
    assert [(f.rows, f.ladder, f.won) for f in search.finals[-3:]] == [
        (512, near, True), (512, near, True), (1023, far, False),
    ]  # fmt: skip
    # what the ladder takes at an end is no candidate: its record would say that the ladder stays
    assert far not in search.standings


# ---- the simulator -------------------------------------------------------------------------------


def test_simulated_times_decide_nothing() -> None:
    steps = FakeSteps(lambda problem, config, regime: 50.0 if config.vec == 8 else 100.0)
    problem = Problem.forward(300, 256, "bfloat16")
    search = Search(problem, SIMULATED[32], steps, QUICK, clock=steps.clock)
    search.run()
    assert search.config == search.ladder
    assert "simulated" in search.why
    assert search.finals == []
    assert {problem.rows for name, problem, _ in steps.log if name != "compile"} == {67}


def in_the_simulator(steps: FakeSteps, effort: Effort, budget_s: float | None = None) -> Search:
    problem = Problem.forward(300, 256, "bfloat16")
    search = Search(
        problem, SIMULATED[64], steps, effort, budget_s=budget_s, clock=steps.clock
    )  # fmt: skip
    search.run()
    return search


@pytest.mark.parametrize("effort", [QUICK, FULL])
def test_no_clock_ends_a_search_in_the_simulator(effort: Effort) -> None:
    steps = FakeSteps(lambda problem, config, regime: 100.0, cost_s=1000.0)
    search = in_the_simulator(steps, effort)
    assert steps.asked("gate")[0] == [search.ladder.slug]
    assert search.tried == SIMULATED_CANDIDATES
    assert search.counts["correct"] == SIMULATED_CANDIDATES + 1


@pytest.mark.parametrize("budget_s", [0.5, 2.5, 10.0])
def test_a_budget_that_ends_before_the_gate_is_said(budget_s: float) -> None:
    steps = FakeSteps(lambda problem, config, regime: 100.0, cost_s=1.0)
    search = in_the_simulator(steps, QUICK, budget_s)
    assert search.tried == 0
    assert f"the budget of {budget_s:g} s ended before a candidate was gated" in search.why


def test_tried_is_what_the_gate_was_asked_about() -> None:
    said: list[str] = []
    steps = FakeSteps(times(), cost_s=0.05)
    search = Search(
        PROBLEM, H200, steps, QUICK, budget_s=6.0, clock=steps.clock, progress=said.append
    )
    search.run()
    gated = sum(len(slugs) for slugs in steps.asked("gate")[:1])
    assert 0 < search.tried < gated
    assert f"{search.tried} of {len(search.pool)} candidates gated" in said

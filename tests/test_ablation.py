"""One-factor ablations, on steps of known times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planted_lab import FakeSteps
from test_search import H200, LADDER, PROBLEM, times

from rmsnorm_raw import ablation, candidates, space
from rmsnorm_raw.device import SIMULATED
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.search import SearchFailed


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


def test_an_ablation_of_a_ladder_that_fails_is_refused() -> None:
    asked = FakeSteps(times(), faults={("try_out", LADDER.slug): "runtime"})
    with pytest.raises(SearchFailed, match=LADDER.slug):
        ablation.ablate(PROBLEM, H200, asked)
    with pytest.raises(InvalidInput, match="no steady times"):
        ablation.ablate(PROBLEM, H200, FakeSteps(times(), no_steady=True), regime="steady")


def test_an_ablation_is_not_of_simulated_times() -> None:
    with pytest.raises(InvalidInput, match="use a GPU"):
        ablation.ablate(PROBLEM, SIMULATED[32], FakeSteps(times()))

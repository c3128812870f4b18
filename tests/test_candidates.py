"""In which order a search tries a space, and the walk of an ablation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rmsnorm_raw import candidates, ladder, space
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.study.cells import cells

H200 = KNOWN["sm_90"]


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
    assert base.finish == "early"
    assert walk["path=two_pass"].finish == "kernel"
    assert space.reject_reason(problem, H200, walk["path=two_pass"]) is None
    assert base not in walk.values()
    assert not any(change.startswith("stages=0") for change in walk)


def test_rounds_after_the_first_are_mostly_the_leaders_neighbours() -> None:
    problem = Problem.backward(32768, 1024, "bf16")
    kept = space.enumerate_configs(problem, H200).kept
    explorer = candidates.Explorer(kept, ladder.default_config(problem, H200))
    explorer.take(40)
    leader = kept[-1]
    near = [c for c in explorer.take(30, [leader]) if candidates.knobs_apart(c, leader)[0] == 1]
    assert len(near) >= 5
    assert len(explorer) == len(kept) - 1 - 70


def test_the_same_seed_draws_the_same() -> None:
    problem = Problem.forward(4096, 4096, "bf16")
    kept = space.enumerate_configs(problem, H200).kept
    base = ladder.default_config(problem, H200)
    orders = [candidates.Explorer(kept, base, seed).take(len(kept)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]

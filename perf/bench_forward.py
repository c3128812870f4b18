"""Forward: y from x and weight, rstd stored."""

from __future__ import annotations

from collections.abc import Callable

from rmsnorm_raw.problem import Problem
from rmsnorm_raw.study.providers import Provider

OP = "forward"


def test_forward(
    problem: Problem, provider: Provider, timed: Callable[[Problem, Provider], None]
) -> None:
    timed(problem, provider)

"""Backward: dx and a finished dweight from dout, x, weight and rstd."""

from __future__ import annotations

from collections.abc import Callable

from rmsnorm_raw.problem import Problem
from rmsnorm_raw.study.providers import Provider

OP = "backward"


def test_backward(
    problem: Problem, provider: Provider, timed: Callable[[Problem, Provider], None]
) -> None:
    timed(problem, provider)

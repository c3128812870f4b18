"""Effort: how hard a search looks, in seconds, contenders and samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rmsnorm_raw.measure import Limits
from rmsnorm_raw.problem import Op


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to look.

    Attributes:
        budget_s: seconds of a search; none begins anything after that.
        exploring: share of the budget for compiling, gating and screening.
        round: configs of a round of exploring.
        halvings: (contenders, samples of each) of the stages before the finals.
        finalists: candidates that the finals may be played with, one after the other.
        cold: limits of the finals.
        steady: likewise.
    """

    budget_s: dict[Op, float]
    exploring: float
    round: int
    halvings: tuple[tuple[int, int], ...]
    finalists: int
    cold: Limits
    steady: Limits

    @property
    def tries_all(self) -> bool:
        """Whether all of a space is to be tried: it has no budget of its own."""
        return all(map(math.isinf, self.budget_s.values()))


#: On an H200 with 16 cores a round of 32 takes about a second forward, two backward.
QUICK = Effort(
    {"forward": 8.0, "backward": 16.0}, 0.3, 32, ((8, 24), (3, 48)), 2,
    Limits(budget_s=1.0, goal_pct=0.5, min_samples=36, max_samples=96),
    Limits(budget_s=0.5, goal_pct=0.5, min_samples=6, max_samples=12),
)  # fmt: skip
FULL = Effort(
    {"forward": math.inf, "backward": math.inf}, 0.7, 64,
    ((32, 24), (12, 60), (6, 120)), 4,
    Limits(budget_s=2.0, goal_pct=0.3, min_samples=60, max_samples=240),
    Limits(budget_s=2.0, goal_pct=0.3, min_samples=12, max_samples=24),
)  # fmt: skip

"""One-factor ablation: what each knob of the ladder's config is worth, one changed at a time.

All configs are gated, then timed interleaved with the ladder's in one run; a speed is a ratio to
the ladder's, with its interval. What the space refuses stands in the table with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rmsnorm_raw import candidates, ladder, space, stats
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.lab import Fault, Steps, ladder_failed
from rmsnorm_raw.measure import Limits, Regime, Samples
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.stats import Comparison

LIMITS = Limits(budget_s=1.0, goal_pct=0.3, min_samples=48, max_samples=240, warmup_s=0.01)
STEADY_LIMITS = Limits(budget_s=2.0, goal_pct=0.3, min_samples=12, max_samples=24, warmup_s=0.01)


@dataclass(frozen=True, slots=True)
class Change:
    """One knob changed.

    Attributes:
        change: "block=512"; "" for the ladder's config itself.
        config: the ladder's with that change.
        samples: its times; None where it has none.
        comparison: of its speed with the ladder's; None where it has no times.
        why_not: why it has none: the space's reason, or how it failed.
    """

    change: str
    config: Config
    samples: Samples | None = None
    comparison: Comparison | None = None
    why_not: str = ""

    def __str__(self) -> str:
        if self.comparison is not None:
            return str(self.comparison)
        return self.why_not or "the ladder's"


def ablate(
    problem: Problem,
    device: DeviceSpec,
    steps: Steps,
    *,
    regime: Regime = "cold",
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[Change, ...]:
    """The ladder's config, then every value of every knob in its place.

    Raises:
        InvalidInput: the device is the simulator, whose times say nothing about speed; or there are
            no steady times of the problem.
        SearchFailed, WrongResult, MemoryError: the ladder's config fails.
    """
    if device.simulated:
        raise InvalidInput("an ablation is of times, and simulated ones say nothing: use a GPU")
    base = ladder.default_config(problem, device)
    walk = list(candidates.one_factor(problem, device, base))
    why_not = {config: space.reject_reason(problem, device, config) or "" for _, config in walk}
    for config, reason in why_not.items():
        if not reason and (inert := space.inert_reason(problem, device, config)):
            why_not[config] = inert
    why_not = {config: f"does not fit: {reason}" for config, reason in why_not.items() if reason}
    left = [base, *(config for _, config in walk if config not in why_not)]
    for step in (steps.compile, steps.gate, steps.try_out):
        progress(f"{step.__name__} {len(left)} configs")
        found = step(problem, left)
        if isinstance(fault := found[base], Fault):
            raise ladder_failed(base, fault)
        for config in left:
            if isinstance(fault := found[config], Fault):
                why_not[config] = f"{fault.kind}: {fault.message}"
        left = [config for config in left if config not in why_not]
    progress(f"time {len(left)} configs, interleaved")
    taken = steps.time(problem, left, regime, LIMITS if regime == "cold" else STEADY_LIMITS)
    if isinstance(taken, Fault):
        raise InvalidInput(f"{problem} has no {regime} times: {taken.message}")
    return (
        Change("", base, taken[base]),
        *(_changed(change, config, base, taken, why_not) for change, config in walk),
    )


def _changed(
    change: str,
    config: Config,
    base: Config,
    taken: dict[Config, Samples],
    why_not: dict[Config, str],
) -> Change:
    if config not in taken:
        return Change(change, config, why_not=why_not[config])
    compared = stats.compare(taken[base].times_us, taken[config].times_us)
    return Change(change, config, taken[config], compared)

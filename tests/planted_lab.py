"""Steps and labs with planted faults and known times, for tests of the search and its worker."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rmsnorm_raw import lab, source
from rmsnorm_raw.backends import Code
from rmsnorm_raw.backends.cpu import CpuBackend
from rmsnorm_raw.config import Config
from rmsnorm_raw.lab import Fault, Kind
from rmsnorm_raw.measure import Limits, Regime, Samples
from rmsnorm_raw.problem import Problem

#: a few steps of an event's clock around a time, the same in every run
JITTER = (0.999, 1.0, 1.001, 1.0005, 0.9995, 1.0)


@dataclass
class FakeSteps:
    """Steps whose times are given: no kernel runs, and a clock of its own goes on.

    Attributes:
        time_us: of a config at some rows in a regime.
        faults: (step, slug) -> what the config fails by there.
        faults_at: (step, slug, rows) -> likewise, at those rows alone.
        first_place: factor on the times of whoever is timed first.
        cost_s: what the clock goes on by for each config of a step.
        interrupt: Ctrl-C comes in the n-th call of that step.
        log: (step, problem, slugs) of each call.
    """

    time_us: Callable[[Problem, Config, Regime], float]
    faults: Mapping[tuple[str, str], Kind] = field(default_factory=dict)
    faults_at: Mapping[tuple[str, str, int], Kind] = field(default_factory=dict)
    first_place: float = 1.0
    cost_s: float = 0.0
    interrupt: tuple[str, int] | None = None
    identity: Callable[[Config], str] = lambda config: config.slug
    no_steady: bool = False
    log: list[tuple[str, Problem, list[str]]] = field(default_factory=list)
    now: float = 0.0
    starts: int = 0

    def clock(self) -> float:
        return self.now

    def start(self) -> None:
        self.starts += 1

    def asked(self, step: str) -> list[list[str]]:
        return [slugs for name, _, slugs in self.log if name == step]

    def compile(
        self, problem: Problem, configs: Sequence[Config], until: float = float("inf")
    ) -> dict[Config, str | Fault]:
        found = self._step("compile", problem, configs, until)
        return {c: r if isinstance(r, Fault) else self.identity(c) for c, r in found.items()}

    def gate(
        self, problem: Problem, configs: Sequence[Config], until: float = float("inf")
    ) -> dict[Config, str | Fault]:
        return self._step("gate", problem, configs, until)

    def try_out(
        self, problem: Problem, configs: Sequence[Config], until: float = float("inf")
    ) -> dict[Config, str | Fault]:
        return self._step("try_out", problem, configs, until)

    def time(
        self, problem: Problem, configs: Sequence[Config], regime: Regime, limits: Limits
    ) -> dict[Config, Samples] | Fault:
        self._note(f"time {regime}", problem, configs)
        if regime == "steady" and self.no_steady:
            return Fault("constraints", "clones do not exceed the cache")
        for config in configs:
            if kind := self.faults.get(("time", config.slug)):
                return Fault(kind, "planted")
        self.now += self.cost_s * len(configs)
        taken = {}
        for place, config in enumerate(configs):
            us = self.time_us(problem, config, regime) * (1.0 if place else self.first_place)
            count = limits["min_samples"]
            times = tuple(us * JITTER[n % len(JITTER)] for n in range(count))
            taken[config] = Samples(times, regime, "planted", 2)
        return taken

    def _step(
        self, step: str, problem: Problem, configs: Sequence[Config], until: float
    ) -> dict[Config, str | Fault]:
        self._note(step, problem, configs)
        found: dict[Config, str | Fault] = {}
        for config in configs:
            if self.now > until:
                break
            self.now += self.cost_s
            kind = self.faults.get((step, config.slug))
            kind = kind or self.faults_at.get((step, config.slug, problem.rows))
            found[config] = Fault(kind, "planted") if kind else ""
        return found

    def _note(self, step: str, problem: Problem, configs: Sequence[Config]) -> None:
        self.log.append((step, problem, [config.slug for config in configs]))
        if self.interrupt and self.interrupt == (step, len(self.asked(step))):
            raise KeyboardInterrupt


class PlantedLab(lab.Lab):
    """A lab on the simulator, wave 32, where some configs' kernels are spoiled.

    Args:
        planted: slug -> "text" (does not compile), "wrong" (no pass of the gate), "crash" or
            "hang" in the gate, or "crash in the compiler".
    """

    def __init__(self, planted: Mapping[str, str]) -> None:
        backend = CpuBackend(32)
        super().__init__(backend)
        self._planted = planted
        compile_ = backend.compile

        def compile_or_crash(text: source.Source) -> Code:
            if planted.get(text.slug) == "crash in the compiler":
                os.abort()
            return compile_(text)

        backend.compile = compile_or_crash  # type: ignore[method-assign]

    def _render(self, problem: Problem, config: Config) -> source.Source:
        found = super()._render(problem, config)
        fate = self._planted.get(config.slug, "")
        if fate == "text":
            return replace(found, text=found.text + "\n#error planted")
        if fate == "wrong":
            right = "out[e] = x[e] * rstd;"
            assert right in found.text
            return replace(found, text=found.text.replace(right, "out[e] = 1.5f * x[e] * rstd;"))
        return found

    def _gate(self, problem: Problem, config: Config) -> str | Fault:
        fate = self._planted.get(config.slug, "")
        if fate == "crash":
            print("planted last words", flush=True)
            os.abort()
        if fate == "hang":
            time.sleep(600)
        return super()._gate(problem, config)

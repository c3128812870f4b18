"""The search: compile, gate, screen, halve, finals against the ladder's config.

The ladder's config is the baseline of every timing, in the same run. A candidate takes its place
only if it is FASTER beyond the noise in the finals: with the ladder first and with itself first, in
``cold`` and (where clones exceed the cache) in ``steady``, at the rows asked for and at both ends
of the bucket of rows that will be served by it. Anything else leaves the ladder in place, with the
reason. Each stage takes fresh samples, for the best of many is partly luck.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from rmsnorm_raw import candidates, clones, ladder, launch, space, stats, store
from rmsnorm_raw.ahead import copy_bytes
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.effort import Effort
from rmsnorm_raw.lab import Fault, Steps, few_rows, ladder_failed
from rmsnorm_raw.lab import SearchFailed as SearchFailed
from rmsnorm_raw.measure import Limits, Regime
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.stats import Comparison

#: rows of the gate that all candidates pass: enough for programs to go round, and a ragged block.
#: Finalists pass it at their full rows
GATE_ROWS = 4099
#: likewise in the simulator, of the gate and of the times
SIMULATED_ROWS = 67
#: candidates of a search in the simulator, which decides nothing: a second each on two cores
SIMULATED_CANDIDATES = 12
LEADERS = 3
REGIMES: tuple[Regime, ...] = ("cold", "steady")
#: what is beyond doubt by this much is a difference; see :func:`.stats.compare`
NOISE_PCT = 1.0
#: of a device's memory; the rest is the driver's
USABLE_MEMORY = 0.95
SCREEN_SAMPLES = 12
#: device-busy seconds of warm-up of a whole group that is timed together
WARM_UP_S = 0.1


@dataclass(frozen=True, slots=True)
class Final:
    """A candidate beside the ladder's config at some rows, in one regime.

    Attributes:
        config: the candidate.
        ladder: the ladder's config for these rows.
        rows: at which both ran.
        regime: "cold" or "steady".
        first: the comparison with the ladder timed first.
        swapped: the same with the candidate first.
        tuned_us: the candidate's times, of both orders.
        ladder_us: the ladder's.
    """

    config: Config
    ladder: Config
    rows: int
    regime: Regime
    first: Comparison
    swapped: Comparison
    tuned_us: tuple[float, ...]
    ladder_us: tuple[float, ...]

    @property
    def won(self) -> bool:
        """Whether the candidate is FASTER in both orders."""
        return all(c.verdict is stats.Outcome.FASTER for c in (self.first, self.swapped))

    @property
    def worse(self) -> Comparison:
        """Of the two orders, the one that says less for the candidate."""
        return min(self.first, self.swapped, key=lambda comparison: comparison.low)

    @property
    def reason(self) -> str:
        """Why it was not won."""
        where = f"at {self.rows} rows {self.regime}"
        if self.first.low > self.swapped.high or self.swapped.low > self.first.high:
            return (
                f"{where}: the order decides, {self.first} after the ladder and {self.swapped} "
                "before it, so a place is favoured and not a config"
            )
        return f"{where} is {self.worse}"


class Search:
    """One search; what is known so far is in its attributes at any time, also after an interrupt.

    Attributes:
        problem: what is searched for.
        ladder: its config by the ladder.
        config: the best known: the ladder's, until a candidate has won the finals.
        why: a sentence on that.
        pool: the configs to choose from.
        tried: candidates that the gate was asked about.
        counts: configs by what became of them; "correct" ones have passed the gate.
        standings: the latest comparison of each candidate that was timed.
        faults: what was wrong with each config that failed.
        finals: what was played, in order.
        skipped: ends of the bucket that were not tried, each with the reason.
        finished: whether it ended by itself: with something timed, or nothing to time, and no
            finals cut short by the budget, nor exploring by a smaller one than the effort's.
    """

    def __init__(
        self,
        problem: Problem,
        device: DeviceSpec,
        steps: Steps,
        effort: Effort,
        *,
        budget_s: float | None = None,
        known: Config | None = None,
        clock: Callable[[], float] = monotonic,
        progress: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.problem, self.device, self.steps, self.effort = problem, device, steps, effort
        self.config = self.ladder = ladder.default_config(problem, device)
        self.why = "the search did not reach the finals, so the ladder stays"
        self.pool: list[Config] = []
        self.tried = 0
        self.counts: Counter[str] = Counter()
        self.faults: dict[Config, Fault] = {}
        self.standings: dict[Config, Comparison] = {}
        self.finals: list[Final] = []
        self.skipped: list[str] = []
        self.finished = False
        self._known = known
        self._cut_short = False
        self._clock, self._progress = clock, progress
        self._began = clock()
        own_s = math.inf if device.simulated else effort.budget_s[problem.op]
        self._budget_s = own_s if budget_s is None else budget_s
        self._identities: set[str] = set()
        self._gated: set[Config] = set()

    @property
    def took_s(self) -> float:
        """Seconds since the search began."""
        return self._clock() - self._began

    @property
    def _left_s(self) -> float:
        return self._budget_s - self.took_s

    def _out_of_time(self) -> bool:
        """Whether the budget is spent, so that what asks is left out."""
        spent = self._left_s <= 0
        self._cut_short |= spent
        return spent

    def run(self) -> None:
        """Search, and leave the findings in the attributes; the budget begins here.

        Raises:
            SearchFailed: the ladder's config does not compile, run or pass the gate.
            MemoryError: the problem's tensors do not fit the device.
        """
        self._began = self._clock()
        self._explore()
        if self.pool and not self.tried:
            self.why = (
                f"the budget of {self._budget_s:g} s ended before a candidate was gated, so the "
                "ladder stays"
            )
        elif self.device.simulated:
            self.why = "simulated times say nothing about speed, so the ladder stays"
        elif finalists := self._halve():
            self._play(finalists)
        self.finished = not self._cut_short and bool(self.standings or not self.pool)

    # ---- exploring -------------------------------------------------------------------------------

    def _explore(self) -> None:
        kept = self.pool = self._enumerate()
        explorer = candidates.Explorer(kept, self.ladder, known=self._known)
        if self.device.simulated:
            for configs in ([self.ladder], explorer.take(SIMULATED_CANDIDATES)):
                self._progress(f"build and gate {len(configs)}, of {1 + len(kept)} configs")
                self._round(configs, self._began + self._budget_s)
            return
        until = self._began + self.effort.exploring * self._budget_s
        configs = [self.ladder, *explorer.take(self.effort.round)]
        while configs:
            began = self._clock()
            self._round(configs, until)
            self._progress(f"{self.tried} of {len(kept)} candidates gated")
            now = self._clock()
            if now + (now - began) > until:
                less = self._budget_s < self.effort.budget_s[self.problem.op]
                self._cut_short = less and bool(len(explorer) or now > until)
                return
            leaders = sorted(self.standings, key=lambda c: -self.standings[c].ratio)[:LEADERS]
            configs = explorer.take(self.effort.round, leaders)

    def _enumerate(self) -> list[Config]:
        """What to try: the kept configs, and those one knob from the ladder's that no plane holds.

        They fit at both ends of the bucket too, and are the ladder's choice at neither: a record of
        such a one says that the ladder stays.
        """
        found = space.enumerate_configs(self.problem, self.device)
        near = (c for _, c in candidates.one_factor(self.problem, self.device, self.ladder))
        ends = [replace(self.problem, rows=rows) for rows in self._rows_served()]
        choices = {ladder.default_config(end, self.device) for end in ends}
        kept = [
            config
            for config in dict.fromkeys((*found.kept, *near))
            if config not in choices
            and not space.inert_reason(self.problem, self.device, config)
            and not any(space.reject_reason(end, self.device, config) for end in ends)
        ]
        refused = set(found.kept) - set(kept) - choices
        self.counts["constraints"] = len(found.rejected) + len(refused)
        return kept

    def _rows_served(self) -> tuple[int, ...]:
        """The rows asked for, and both ends of the bucket of rows that its record serves."""
        rows, heads = self.problem.rows, self.problem.extras.heads
        return tuple(dict.fromkeys((rows, *store.bucket(rows, heads))))

    def _round(self, configs: Sequence[Config], until: float) -> None:
        """Compile, gate and screen some configs; the ladder's is the first of the first round."""
        fresh = []
        for config, found in self.steps.compile(self.problem, configs, until).items():
            if isinstance(found, Fault):
                self._fault(config, found)
            elif found in self._identities:
                self.counts["duplicates"] += 1
            else:
                self._identities.add(found)
                fresh.append(config)
        simulated = self.device.simulated
        few = few_rows(self.problem, SIMULATED_ROWS if simulated else GATE_ROWS)
        gated = self.steps.gate(few, fresh, until)
        self.tried += len(gated.keys() - {self.ladder})
        passed = self._sound(gated)
        self.counts["correct"] += len(passed)
        self._gated |= set(passed)
        if self.ladder not in self._gated:
            return  # the budget was spent before that
        passed = [config for config in passed if config != self.ladder]
        self._screen(few if simulated else self.problem, passed, SCREEN_SAMPLES)

    def _sound(self, found: dict[Config, str | Fault]) -> list[Config]:
        for config, result in found.items():
            if isinstance(result, Fault):
                self._fault(config, result)
        return [config for config, result in found.items() if not isinstance(result, Fault)]

    def _fault(self, config: Config, fault: Fault) -> None:
        """Count a config out; the ladder's ends the search."""
        if config == self.ladder:
            raise ladder_failed(config, fault)
        self._count_out(config, fault)

    def _count_out(self, config: Config, fault: Fault) -> None:
        self.counts[fault.kind] += 1
        self.faults[config] = fault
        self.standings.pop(config, None)

    # ---- timing beside the ladder ----------------------------------------------------------------

    def _screen(self, problem: Problem, configs: Sequence[Config], samples: int) -> None:
        """Hold configs against the ladder's, cold, all interleaved in one run."""
        if configs:
            sound = self._sound(self.steps.try_out(problem, [self.ladder, *configs]))
            self._hold(problem, [config for config in sound if config != self.ladder], samples)

    def _hold(self, problem: Problem, configs: Sequence[Config], samples: int) -> None:
        if not configs:
            return
        limits = Limits(
            goal_pct=0.0, min_samples=samples, max_samples=samples,
            warmup_s=WARM_UP_S / (1 + len(configs)),
        )  # fmt: skip
        taken = self.steps.time(problem, [self.ladder, *configs], "cold", limits)
        if not isinstance(taken, Fault):
            base_us = taken[self.ladder].times_us
            for config in configs:
                self.standings[config] = stats.compare(base_us, taken[config].times_us, NOISE_PCT)
        elif len(configs) == 1:
            self._fault(configs[0], taken)
        else:  # one of them is to blame
            half = len(configs) // 2
            self._hold(problem, configs[:half], samples)
            self._hold(problem, configs[half:], samples)

    def _halve(self) -> list[Config]:
        """The finalists, the fastest first."""
        tried = len(self.standings)
        leading = self._promising(self.standings)
        for contenders, samples in self.effort.halvings:
            leading = leading[:contenders]
            if leading and not self._out_of_time():
                self._progress(f"the best {len(leading)} again")
                self._screen(self.problem, leading, samples)
                leading = self._promising(leading)
        if not leading:
            self.why = f"none of {tried} candidates is faster than the ladder by {NOISE_PCT:g} %"
        finalists = leading[: self.effort.finalists]
        if self.effort.tries_all:
            finalists += [c for c in self.standings if c == self._known and c not in finalists]
        return finalists

    def _promising(self, configs: Iterable[Config]) -> list[Config]:
        """Those that may be FASTER by their latest comparison, the fastest first."""
        bound = 1 + NOISE_PCT / 100
        able = [c for c in configs if c in self.standings and self.standings[c].high > bound]
        return sorted(able, key=lambda config: -self.standings[config].ratio)

    # ---- finals ----------------------------------------------------------------------------------

    def _play(self, finalists: Sequence[Config]) -> None:
        lost = []
        self.why = "the finals were not played to an end, so the ladder stays"
        for config in finalists:
            self._progress(f"finals of {config.slug}")
            if not (reason := self._final(config)):
                self.config = config
                won = [final for final in self.finals if final.config == config]
                self.why = "FASTER in every final: " + "; ".join(
                    [f"{final.rows} rows {final.regime} {final.worse}" for final in won]
                    + self.skipped
                )
                return
            lost.append(f"{config.slug} {reason}")
        self.why = "no finalist won: " + "; ".join(lost)

    def _final(self, config: Config) -> str:
        """Why a candidate does not take the ladder's place; "" if it does."""
        self.skipped = []
        for rows in self._rows_served():
            problem = replace(self.problem, rows=rows)
            base = ladder.default_config(problem, self.device)
            if too_large := self._too_large(problem, (base, config)):
                self.skipped.append(too_large)
                continue
            if self._out_of_time():
                return f"did not finish: the budget of {self._budget_s:g} s is spent"
            for step in (self.steps.gate, self.steps.try_out):
                for each, fault in step(problem, [base, config]).items():
                    if not isinstance(fault, Fault):
                        continue
                    if each == base and fault.kind != "memory":
                        raise ladder_failed(base, fault)
                    self._count_out(config, fault)
                    return f"fails at {rows} rows ({fault.kind}): {fault.message}"
            for regime in REGIMES:
                if reason := self._game(problem, base, config, regime):
                    return reason
        return ""

    def _game(self, problem: Problem, base: Config, config: Config, regime: Regime) -> str:
        """Both orders at some rows in one regime: why the candidate lost, or ""."""
        if self._out_of_time():
            return f"did not finish: the budget of {self._budget_s:g} s is spent"
        limits = self.effort.cold if regime == "cold" else self.effort.steady
        first = self.steps.time(problem, [base, config], regime, limits)
        if isinstance(first, Fault) and first.kind == "constraints":
            return ""  # no clones that exceed the cache, so no steady times
        swapped = self.steps.time(problem, [config, base], regime, limits)
        for found in (first, swapped):
            if isinstance(found, Fault):
                self._count_out(config, found)
                return f"fails at {problem.rows} rows {regime} ({found.kind}): {found.message}"
        assert not isinstance(first, Fault)
        assert not isinstance(swapped, Fault)
        final = Final(
            config, base, problem.rows, regime,
            stats.compare(first[base].times_us, first[config].times_us, NOISE_PCT),
            stats.compare(swapped[base].times_us, swapped[config].times_us, NOISE_PCT),
            first[config].times_us + swapped[config].times_us,
            first[base].times_us + swapped[base].times_us,
        )  # fmt: skip
        self.finals.append(final)
        return "" if final.won else final.reason

    def _too_large(self, problem: Problem, configs: Iterable[Config]) -> str:
        """Why the rows of an end are not tried, where two clones do not fit the device; else ""."""
        device = self.device
        need = max(sum(launch.tensor_bytes(problem, c, device).values()) for c in configs)
        need = clones.MIN_CLONES * need + 2 * copy_bytes(device)
        if problem.rows == self.problem.rows or not device.memory_bytes:
            return ""
        if need <= USABLE_MEMORY * device.memory_bytes:
            return ""
        return (
            f"{problem.rows} rows skipped: they want {need / 1e9:.1f} GB and the device has "
            f"{device.memory_bytes / 1e9:.1f}"
        )

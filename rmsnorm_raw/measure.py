"""The timer: device time of a call, free of host time and of a warm cache -> Samples.

What the REPL, the command line and the probes time is timed here, and the suites keep its rules on
a clock of pytest-benchmark's (``perf/clock.py``). A shot is an event, the queue-ahead (copies of
twice the last-level cache), an event, the call, an event; the host enqueues all of it without
waiting. The middle event cannot fire before the queue-ahead is done. So if the host was done by
then, the device never waited for it between the last two events:

    host time from before the first event to after the last <= device time between the first two

The left side starts before the first event, not after the copy: on an idle device that event fires
at once, and the cost of enqueueing the copy would pass for device work. A shot that fails is
discarded and counted; where most of a batch fail, the queue-ahead is lengthened. Each shot is
waited for before the next is enqueued: with more behind it a call of 5 us took up to 1 us longer,
some shots of a batch and not others (H200, 2026-11).

``cold``: the queue-ahead evicts the cache too; a sample is one shot, or the mean of four if calls
are short, for launches take turns (:mod:`rmsnorm_raw.ahead`). ``steady``: a sample is one shot of a
train of calls, over clones that together are larger than the cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from rmsnorm_raw import check, stats
from rmsnorm_raw.ahead import TURNS, QueueAhead, calls_a_sample, lengthened, means
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.clones import ROTATED_CACHES, clone_plans
from rmsnorm_raw.config import Config
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.errors import Unmeasurable as Unmeasurable
from rmsnorm_raw.module import Binary
from rmsnorm_raw.problem import Problem

if TYPE_CHECKING:
    from typing_extensions import Unpack

Regime = Literal["cold", "steady"]
Call = Callable[[], object]

#: raise it when a time would come out otherwise than it did: times of two protocols say nothing of
#: each other, and tuned records of an older one are not served
TIMING_PROTOCOL = 2
#: shots of a contender before the next one's: then it is asked whether the host keeps ahead
BATCH = 12
#: calls of a steady sample, at least
TRAIN_CALLS = 100
#: a host that is still late behind this much device work is not slow, it waits for the device
MAX_AHEAD_US = 20_000.0


@dataclass(frozen=True, slots=True, repr=False)
class Samples:
    """Times of one operation.

    Attributes:
        times_us: device microseconds of a call, in the order taken: the mean of a sample's calls.
        regime: "cold" or "steady".
        stopped: why sampling ended, a sentence with the figure that decided.
        clones: copies of the tensors that the calls rotated over.
        evicted_bytes: bytes copied ahead of each call (steady: train), at the end.
        discarded: calls (steady: trains) dropped because the host was late by the module's rule.
        late_us: the most that a dropped one's host was late by; 0 where none was dropped.
        simulated: the times are the CPU simulator's, by the host's clock, and mean nothing.
    """

    times_us: tuple[float, ...]
    regime: Regime
    stopped: str
    clones: int
    evicted_bytes: int = 0
    discarded: int = 0
    late_us: float = 0.0
    simulated: bool = False

    @property
    def median_us(self) -> float:
        """The figure to quote."""
        return stats.percentile(self.times_us, 50)

    @property
    def p10_us(self) -> float:
        """The 10th percentile."""
        return stats.percentile(self.times_us, 10)

    @property
    def p90_us(self) -> float:
        """The 90th percentile."""
        return stats.percentile(self.times_us, 90)

    @property
    def low_us(self) -> float:
        """The lower end of the median's 95 % interval."""
        return stats.median_interval(self.times_us)[0]

    @property
    def high_us(self) -> float:
        """The upper end of the median's 95 % interval."""
        return stats.median_interval(self.times_us)[1]

    def gbps(self, moved_bytes: int) -> float:
        """Decimal GB/s of a call that moves ``moved_bytes``, e.g. ``Problem.logical_bytes()``."""
        return moved_bytes / self.median_us / 1e3

    def __str__(self) -> str:
        unit = "simulated us" if self.simulated else "us"
        text = (
            f"{self.median_us:.1f} {unit} [{self.low_us:.1f}, {self.high_us:.1f}], "
            f"p10 {self.p10_us:.1f}, p90 {self.p90_us:.1f}, "
            f"{len(self.times_us)} samples {self.regime}; {self.stopped}"
        )
        if self.discarded:
            text += f"; {self.discarded} discarded, host late by up to {self.late_us:.0f} us"
        return text

    def __repr__(self) -> str:
        return f"<Samples {self}>"


class Limits(TypedDict, total=False):
    """The limits of :func:`time_interleaved`, where their defaults are."""

    budget_s: float
    goal_pct: float
    min_samples: int
    max_samples: int
    warmup_s: float


def time_calls(
    calls: Sequence[Call],
    backend: Backend,
    *,
    stream: int = 0,
    regime: Regime = "cold",
    **limits: Unpack[Limits],
) -> Samples:
    """Device time of one operation: :func:`time_interleaved` with a single contender."""
    return time_interleaved([calls], backend, stream=stream, regime=regime, **limits)[0]


def time_interleaved(
    contenders: Sequence[Sequence[Call]],
    backend: Backend,
    *,
    stream: int = 0,
    regime: Regime = "cold",
    budget_s: float = 0.5,
    goal_pct: float = 1.0,
    min_samples: int = 12,
    max_samples: int = 1000,
    warmup_s: float = 0.025,
) -> list[Samples]:
    """Device time of several operations, batches by turns: clocks and heat drift for all alike.

    Every call runs once untimed (module load, run-time compilation, first touch); then each
    contender is sampled untimed until the device was busy with it for ``warmup_s``, since a fixed
    count would leave the clocks low for short kernels. On the simulator 6 calls are timed by the
    host's clock, whatever the limits.

    Args:
        contenders: of each, one operation over rotating clones of its inputs and outputs. A call
            enqueues on ``stream`` and does not wait. ``steady`` wants clones that together exceed
            three last-level caches; :func:`measure` sees to that.
        budget_s: wall seconds of sampling a contender, warm-up excluded.
        goal_pct: stop once the 95 % interval of the median (its full width) is narrower than this
            percentage of the median.
        min_samples: at least 6; taken even where the budget is spent.
        max_samples: of a contender.
        warmup_s: device-busy seconds of warm-up of a contender.

    Raises:
        InvalidInput: no calls, no such regime, or limits that contradict each other.
        Unmeasurable: a call waits for the device, so no sample is free of host time; or steady
            times are asked of the simulator.
    """
    if regime not in ("cold", "steady"):
        raise InvalidInput(f"regime {regime!r} is not 'cold' or 'steady'")
    if not contenders or not all(contenders):
        raise InvalidInput("there are no calls to time: give at least one call a contender")
    if not stats.MIN_SAMPLES <= min_samples <= max_samples:
        raise InvalidInput(
            f"min_samples is {min_samples}, max_samples {max_samples}: "
            f"{stats.MIN_SAMPLES} <= min_samples <= max_samples is needed"
        )
    if backend.device.simulated:
        if regime == "steady":
            raise Unmeasurable("the simulator has no steady times: use regime='cold'")
        return [_host_times(calls, backend, stream) for calls in contenders]

    ahead = QueueAhead(backend, stream)
    tracks = [_Track(calls, ahead, regime) for calls in contenders]
    for call in itertools.chain.from_iterable(contenders):
        call()
    backend.synchronize(stream)
    for track in tracks:
        track.warm_up(warmup_s * 1e6)
    while running := [track for track in tracks if not track.stopped]:
        for track in running:
            track.take(max_samples)
            if len(track.times_us) >= min_samples:
                track.stopped = _why_stop(track, budget_s, goal_pct, max_samples)
    return [track.samples() for track in tracks]


class _Shot(NamedTuple):
    """What the events and the host's clock say of one shot."""

    ahead_us: float  # device time of the queue-ahead
    timed_us: float  # device time of the timed calls, all together
    host_us: float  # from before the first event to after the last

    @property
    def late_us(self) -> float:
        return self.host_us - self.ahead_us


class _Track:
    """One contender: its rotation, its queue-ahead and the samples kept so far."""

    def __init__(self, calls: Sequence[Call], ahead: QueueAhead, regime: Regime) -> None:
        self._ahead = ahead
        self._regime = regime
        self._clones = len(calls)
        self._rotation = itertools.cycle(calls)
        steady = regime == "steady"
        # whole rotations, so that every clone weighs the same
        self._train = len(calls) * math.ceil(TRAIN_CALLS / len(calls)) if steady else 1
        self._batch = 1 if steady else BATCH
        self._copies = 1
        self._calls_a_sample = 1 if steady else TURNS
        self._kept: list[float] = []
        self.times_us: list[float] = []
        self._late: list[float] = []
        self.spent_s = 0.0
        self.stopped = ""

    def warm_up(self, busy_us: float) -> None:
        while busy_us > 0:
            shots = self._shoot(self._batch)
            busy_us -= sum(shot.ahead_us + shot.timed_us for shot in shots)
            if self._regime == "cold":
                call_us = stats.percentile([shot.timed_us for shot in shots], 50)
                self._calls_a_sample = calls_a_sample(call_us)

    def take(self, max_samples: int) -> None:
        """One batch: keeps what the host enqueued in time."""
        opened = perf_counter()
        wanted = max_samples * self._calls_a_sample - len(self._kept)
        for shot in self._shoot(min(self._batch, wanted)):
            if shot.late_us > 0:
                self._late.append(shot.late_us)
            else:
                self._kept.append(shot.timed_us / self._train)
        self.spent_s += perf_counter() - opened
        self.times_us = means(self._kept, self._calls_a_sample)

    def samples(self) -> Samples:
        return Samples(
            tuple(self.times_us), self._regime, self.stopped, self._clones,
            evicted_bytes=self._copies * self._ahead.copy_bytes,
            discarded=len(self._late), late_us=max(self._late, default=0.0),
        )  # fmt: skip

    def _shoot(self, count: int) -> list[_Shot]:
        """So many shots, each waited for."""
        backend, stream = self._ahead.backend, self._ahead.stream
        shots = []
        for _ in range(count):
            opened = perf_counter()
            before = backend.record(stream)
            self._ahead.enqueue(self._copies)
            start = backend.record(stream)
            for call in itertools.islice(self._rotation, self._train):
                call()
            end = backend.record(stream)
            host_us = (perf_counter() - opened) * 1e6
            timed_us = backend.elapsed_us(start, end)
            shots.append(_Shot(backend.elapsed_us(before, start), timed_us, host_us))
        self._keep_ahead(shots)
        return shots

    def _keep_ahead(self, shots: list[_Shot]) -> None:
        """Lengthens the queue-ahead where most shots were late."""
        times_us = [(shot.host_us, shot.ahead_us) for shot in shots]
        copies, host_us = lengthened(self._copies, times_us)
        if 2 * host_us <= MAX_AHEAD_US:
            self._copies = copies
        else:
            what = "a call" if self._train == 1 else f"a train of {self._train} calls"
            raise Unmeasurable(
                f"the host takes {host_us:.0f} us to enqueue {what}, over the limit of "
                f"{MAX_AHEAD_US / 2:.0f} us: most likely the call waits for the device. Take the "
                "synchronisation out of it, or time replays of a graph of it"
            )


def _why_stop(track: _Track, budget_s: float, goal_pct: float, max_samples: int) -> str:
    """The sentence that ends sampling; "" to go on."""
    low, high = stats.median_interval(track.times_us)
    width_pct = 100 * (high - low) / stats.percentile(track.times_us, 50)
    if width_pct < goal_pct:
        return f"interval {width_pct:.2g} % < {goal_pct:g} %"
    missed = f"at {width_pct:.2g} % >= {goal_pct:g} %"
    if track.spent_s >= budget_s:
        return f"budget {budget_s:g} s spent {missed}"
    if len(track.times_us) >= max_samples:
        return f"{max_samples} samples taken {missed}"
    return ""


def _host_times(calls: Sequence[Call], backend: Backend, stream: int) -> Samples:
    rotation = itertools.cycle(calls)
    times_us = []
    for _ in range(1 + stats.MIN_SAMPLES):  # the first one builds and loads
        opened = perf_counter()
        next(rotation)()
        backend.synchronize(stream)
        times_us.append((perf_counter() - opened) * 1e6)
    stopped = f"{stats.MIN_SAMPLES} calls simulated"
    return Samples(tuple(times_us[1:]), "cold", stopped, len(calls), simulated=True)


def measure(
    problem: Problem,
    config: Config,
    binary: Binary,
    verdict: check.Verdict,
    *,
    regime: Regime = "cold",
    stream: int = 0,
    **limits: Unpack[Limits],
) -> Samples:
    """Times a kernel that has passed the gate: :func:`.clone_plans`, then :func:`time_calls`.

    Raises:
        WrongResult: the verdict is not a pass.
        InvalidInput: the problem launches nothing.
        Unmeasurable: steady times of a problem whose clones do not exceed the cache; or see
            :func:`time_interleaved`.
    """
    check.require(verdict, problem, config)
    clones = clone_plans(problem, config, binary, stream=stream)
    simulated = binary.backend.device.simulated
    if regime == "steady" and not simulated and not clones.exceed_cache:
        raise Unmeasurable(
            f"{problem}: {len(clones.plans)} clones of {clones.clone_bytes:,} B do not exceed "
            f"{ROTATED_CACHES} last-level caches ({clones.cache_bytes:,} B), so steady times would "
            "be those of a warm cache: use regime='cold'"
        )
    return time_calls(clones.calls(stream), binary.backend, stream=stream, regime=regime, **limits)

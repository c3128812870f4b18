"""A GPU clock for pytest-benchmark.

Its timer gives stamps: recorded events. The difference of two waits for the second and is seconds
of the device. A pedantic round then is timed as a call is by :mod:`rmsnorm_raw.measure`: ``setup``
stamps, enqueues the copies that evict the caches and hands out the next clone's call, none of it
waiting for the device. Which rounds to drop by that module's rule, :meth:`Rounds.late_us` says;
where most of a window's were late, the rounds after it have more copies ahead of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rmsnorm_raw.ahead import QueueAhead, lengthened
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.measure import MAX_AHEAD_US, Call

#: rounds after which it is asked whether the host keeps ahead
WINDOW = 6


@dataclass(frozen=True, slots=True)
class Stamp:
    """A recorded event, and the host's clock on both sides of recording it."""

    backend: Backend
    before_s: float
    event: Any
    after_s: float

    def __sub__(self, start: Stamp) -> float:
        """Device seconds from another stamp to this one; waits for this one."""
        return self.backend.elapsed_us(start.event, self.event) / 1e6


class Clock:
    """pytest-benchmark's timer; the stamps that it gave are kept."""

    def __init__(self, backend: Backend, stream: int = 0) -> None:
        self.backend = backend
        self.stream = stream
        self.stamps: list[Stamp] = []

    def __repr__(self) -> str:  # pytest-benchmark writes it into its JSON
        return "device events"

    def __call__(self) -> Stamp:
        before_s = perf_counter()
        event = self.backend.record(self.stream)
        self.stamps.append(Stamp(self.backend, before_s, event, perf_counter()))
        return self.stamps[-1]


class Rounds:
    """The rounds of one pedantic run; ``setup`` and ``run`` are its arguments."""

    def __init__(self, clock: Clock, calls: Sequence[Call], copies: int) -> None:
        self._clock = clock
        self._rotation = itertools.cycle(calls)
        self.copies = copies
        self._asked = 0  # stamps of rounds that were asked after
        clock.stamps.clear()
        self._ahead = QueueAhead(clock.backend, clock.stream) if copies else None

    @property
    def evicted_bytes(self) -> int:
        return self.copies * self._ahead.copy_bytes if self._ahead else 0

    def setup(self) -> tuple[tuple[Call], dict[str, Any]]:
        self._keep_ahead()
        self._clock()
        if self._ahead:
            self._ahead.enqueue(self.copies)
        return (next(self._rotation),), {}

    @staticmethod
    def run(call: Call) -> None:
        call()

    def late_us(self) -> list[float]:
        """By round, how much longer the host took than the device was busy ahead of the call."""
        return [host_us - ahead_us for host_us, ahead_us in self._rounds(0)]

    def _rounds(self, first: int) -> list[tuple[float, float]]:
        """Of the rounds from a stamp on: microseconds of the host, and of the copies ahead."""
        stamps = iter(self._clock.stamps[first:])
        return [
            (1e6 * (end.after_s - opened.before_s), 1e6 * (start - opened))
            for opened, start, end in zip(*[stamps] * 3, strict=True)
        ]

    def _keep_ahead(self) -> None:
        """As the timer: lengthens the queue-ahead where most of a window's rounds were late."""
        if not self.copies or len(self._clock.stamps) - self._asked < 3 * WINDOW:
            return
        rounds = self._rounds(self._asked)  # pytest-benchmark has waited for them
        self._asked = len(self._clock.stamps)
        copies, host_us = lengthened(self.copies, rounds)
        if 2 * host_us <= MAX_AHEAD_US:
            self.copies = copies

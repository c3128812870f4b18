"""A GPU clock for pytest-benchmark.

Its timer gives stamps: recorded events. The difference of two waits for the second and is seconds
of the device. A pedantic round then is what a sample is in :mod:`rmsnorm_raw.measure`: ``setup``
stamps, enqueues the copies that evict the caches and hands out the next clone's call, none of it
waiting for the device. Which rounds to drop by that module's rule, :meth:`Rounds.late_us` says.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rmsnorm_raw.backends import Backend
from rmsnorm_raw.measure import EVICTED_CACHES, Call


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
        self._copies = copies
        clock.stamps.clear()
        backend = clock.backend
        self._copy_bytes = EVICTED_CACHES * backend.device.last_level_cache_bytes
        if copies:
            self._origin, self._owner = backend.allocate(2 * self._copy_bytes)

    @property
    def evicted_bytes(self) -> int:
        return self._copies * self._copy_bytes

    def setup(self) -> tuple[tuple[Call], dict[str, Any]]:
        self._clock()
        for _ in range(self._copies):
            target = self._origin + self._copy_bytes
            self._clock.backend.copy(target, self._origin, self._copy_bytes, self._clock.stream)
        return (next(self._rotation),), {}

    @staticmethod
    def run(call: Call) -> None:
        call()

    def late_us(self) -> list[float]:
        """By round, how much longer the host took than the device was busy ahead of the call."""
        rounds = zip(*[iter(self._clock.stamps)] * 3, strict=True)
        return [
            1e6 * ((end.after_s - opened.before_s) - (start - opened))
            for opened, start, end in rounds
        ]

"""A GPU made of two clocks: a host that pays for what it enqueues, a device that works it off.

It stands in for a Backend where the timer itself is under test: here the true device time of a call
is known, so a sample can be held against it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rmsnorm_raw.backends import Code, Toolchain
from rmsnorm_raw.device import KNOWN, DeviceSpec
from rmsnorm_raw.source import Source


class VirtualGpu:
    """A Backend without memory.

    Attributes:
        host_us: the host's clock.
        idle_us: when the device will have done all that is enqueued.
        busy_us: device time enqueued so far.
        log: what was enqueued: "copy", "fill", or the name of a call; small copies are left out.
        launched: launches so far, the small copies with them, the fills not.
    """

    name = "virtual"
    index = 0
    toolchain = Toolchain("none", "")

    def __init__(
        self,
        device: DeviceSpec = KNOWN["sm_90"],
        *,
        host_cost_us: float = 1.0,
        copy_cost_us: float = 1.0,
        copy_us: float = 60.0,
        clock: Callable[[float], float] = lambda busy_us: 1.0,
        channel: int | None = None,
        turn_us: float = 0.0,
    ) -> None:
        self.device = device
        self.host_cost_us = host_cost_us
        self.copy_cost_us = copy_cost_us
        self.copy_us = copy_us
        self.channel = channel  # most launches that wait for the device; then the host waits too
        self.turn_us = turn_us  # that two of each four launches start later, behind another's end
        self.clock = clock  # slowness of the device, by its busy time so far
        self.host_us = 0.0
        self.idle_us = 0.0
        self.busy_us = 0.0
        self.log: list[str] = []
        self.launched = 0
        self.ends_us: list[float] = []
        self.allocated: list[int] = []

    def perf_counter(self) -> float:
        return self.host_us / 1e6

    def enqueue(self, name: str, device_us: float, host_us: float) -> None:
        self.host_us += host_us
        took_us = device_us * self.clock(self.busy_us)
        self.idle_us = max(self.idle_us, self.host_us) + took_us
        self.busy_us += took_us
        self.launched += name != "fill"
        if name:
            self.log.append(name)
        self.ends_us.append(self.idle_us)
        if self.channel is not None and len(self.ends_us) > self.channel:
            self.host_us = max(self.host_us, self.ends_us[-self.channel - 1])

    def call(
        self,
        name: str,
        device_us: float | Callable[[], float] = 5.0,
        *,
        host_us: float | Callable[[], float] = 5.0,
        waits: bool = False,
    ) -> Callable[[], None]:
        """An operation of two launches of half the device time, the host's cost between them."""

        def run() -> None:
            device = device_us() if callable(device_us) else device_us
            self.enqueue(name, device / 2, 0.0)
            self.host_us += host_us() if callable(host_us) else host_us
            turn_us = self.turn_us if self.launched % 4 < 2 else 0.0
            self.enqueue(name, device / 2 + turn_us, 0.0)
            if waits:
                self.synchronize(0)

        return run

    # ---- the Backend protocol ------------------------------------------------------------------

    def compile(self, source: Source) -> Code:
        functions = {entry: (entry, dict(source.defines)) for entry in source.entry_points}
        return Code(functions, {}, "", source.digest)

    def assembly(self, source: Source) -> str:
        raise NotImplementedError

    def launch(
        self,
        function: Any,
        grid: int,
        block: int,
        args: Sequence[np.generic],
        lds_bytes: int,
        stream: int,
        early: bool = False,
    ) -> None:
        self.enqueue(str(function), 5.0, self.host_cost_us)

    def allocate(self, size_bytes: int) -> tuple[int, Any]:
        base = (1 << 40) + sum(self.allocated)
        self.allocated.append(-(-size_bytes // 4096) * 4096)
        return base, object()

    def copy(self, target: int, origin: int, size_bytes: int, stream: int) -> None:
        small = size_bytes < 4096
        self.enqueue("" if small else "copy", 1.0 if small else self.copy_us, self.copy_cost_us)

    def fill(self, target: int, byte: int, size_bytes: int, stream: int) -> None:
        self.enqueue("fill", 1.0, self.host_cost_us)

    def to_host(self, origin: int, size_bytes: int, stream: int) -> np.ndarray:
        raise NotImplementedError

    def from_host(self, target: int, data: np.ndarray, stream: int) -> None:
        raise NotImplementedError

    def synchronize(self, stream: int) -> None:
        self.host_us = max(self.host_us, self.idle_us)

    def record(self, stream: int) -> float:
        self.host_us += self.host_cost_us
        return max(self.host_us, self.idle_us)

    def elapsed_us(self, start: float, end: float) -> float:
        self.host_us = max(self.host_us, end)  # it waits
        return end - start


def runs(log: Sequence[str]) -> list[tuple[str, int]]:
    """The log with neighbours of one name counted together."""
    return [(name, len(list(group))) for name, group in itertools.groupby(log)]

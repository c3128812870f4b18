"""The queue-ahead: device work for the host to enqueue a call behind, so that no host is timed.

It evicts the caches too, and it mixes the turns that launches take. A call of several launches has
no single time: on an H200, of each four launches of a queue two start 0.85 us later than the other
two where they must wait for the launch before. Two empty kernels take 3.9 or 4.7 us, backward at
256x4096 10.4 or 11.3 (driver 580.159, 2026-11). The count of launches so far decides. So with a
fixed number of them from call to call a call has the same turn for ever, which another run may not
have, or its times are two clusters and their median is either. With a few small copies more or
less ahead of each call all turns come alike, and the mean of some calls is one figure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean

from rmsnorm_raw import stats
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.device import DeviceSpec

#: launches after which their turns come round, and calls of a sample where they are short
TURNS = 4
#: a copy this small is a launch as well; a fill is none
TURN_BYTES = 256
#: of a call that takes longer a turn is under half a percent
SHORT_US = 200.0


class QueueAhead:
    """Copies between two buffers.

    Attributes:
        backend: where they run.
        stream: on which.
        copy_bytes: of each.
    """

    def __init__(self, backend: Backend, stream: int) -> None:
        self.backend = backend
        self.stream = stream
        self.copy_bytes = copy_bytes(backend.device)
        self._origin, self._owner = backend.allocate(2 * self.copy_bytes)
        self._random = random.Random(0)

    def enqueue(self, copies: int) -> None:
        """So many copies, behind up to three small ones."""
        target = self._origin + self.copy_bytes
        for _ in range(self._random.randrange(TURNS)):
            self.backend.copy(target, self._origin, TURN_BYTES, self.stream)
        for _ in range(copies):
            self.backend.copy(target, self._origin, self.copy_bytes, self.stream)


def copy_bytes(device: DeviceSpec) -> int:
    """Of one copy: two last-level caches, so that none of the call's data stays in one."""
    return 2 * device.last_level_cache_bytes


def lengthened(copies: int, shots: Sequence[tuple[float, float]]) -> tuple[int, float]:
    """How many copies to enqueue ahead from now on, after some shots with so many.

    As many again, unless the host was late in most shots: then enough for twice its time.

    Args:
        copies: ahead of each shot.
        shots: microseconds of the host, and of the copies, in each.

    Returns:
        The copies, and the host's median time in the late shots; 0 where they stay as many.
    """
    late = [(host_us, ahead_us) for host_us, ahead_us in shots if host_us > ahead_us]
    if 2 * len(late) <= len(shots):
        return copies, 0.0
    host_us, ahead_us = (stats.percentile(times_us, 50) for times_us in zip(*late, strict=True))
    return max(copies + 1, math.ceil(2 * host_us * copies / ahead_us)), host_us


def calls_a_sample(call_us: float) -> int:
    """Of how many calls a cold sample is the mean, where one takes about ``call_us``."""
    return TURNS if call_us < SHORT_US else 1


def means(times_us: Sequence[float], calls: int) -> list[float]:
    """Samples of so many calls each, in order; those too few for one more are left out."""
    whole = len(times_us) // calls * calls
    return [fmean(times_us[at : at + calls]) for at in range(0, whole, calls)]

"""A pytest plugin that plants a slowdown in our kernel: ``pytest perf -p slower --slower 1.1``.

With ``tests`` on PYTHONPATH. A call is run again for each whole time that it shall be slower; for a
rest, as much is copied beside it as that share of its bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from rmsnorm_raw.measure import Call
from rmsnorm_raw.study import providers
from rmsnorm_raw.study.providers import Cell, Contender


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slower", type=float, help="times as long; more than 1")


def pytest_configure(config: pytest.Config) -> None:
    times = config.getoption("--slower")
    if times is None:
        return
    if not 1 < times < math.inf:
        raise pytest.UsageError(f"--slower {times:g} is no slowdown: give a number above 1")
    providers._ours = functools.partial(_slower, providers._ours, times)


def _slower(ours: Callable[[Cell], Contender], times: float, cell: Cell) -> Contender:
    contender = ours(cell)
    whole, rest = divmod(times - 1, 1)
    # a copy moves each of its bytes twice
    copied_bytes = round(rest * cell.problem.logical_bytes() / 2) // 16 * 16
    backend = cell.backend
    origin, owner = backend.allocate(2 * copied_bytes + 32)

    def slow(call: Call, owner: object = owner) -> None:
        for _ in range(1 + int(whole)):
            call()
        if copied_bytes:
            backend.copy(origin + copied_bytes, origin, copied_bytes, cell.stream)

    calls = [functools.partial(slow, call) for call in contender.calls]
    return replace(contender, calls=calls)

from __future__ import annotations

import pytest
from virtual_gpu import VirtualGpu

from rmsnorm_raw.ahead import TURNS, QueueAhead, copy_bytes, lengthened, means


@pytest.mark.parametrize(
    ("shots", "copies"),
    [
        ([(50.0, 60.0)] * 6, 2),  # the host was never late
        ([(500.0, 60.0)] * 3 + [(50.0, 60.0)] * 3, 2),  # in half of them: not in most
        ([(500.0, 60.0)] * 4 + [(50.0, 60.0)] * 2, 34),  # 1000 us, at 30 us a copy
        ([(61.0, 60.0)] * 6, 5),  # 122 us
        ([(60.5, 200.0)] + [(201.0, 200.0)] * 5, 5),  # 402 us at 100 us a copy
    ],
)
def test_a_host_that_is_mostly_late_gets_copies_for_twice_its_time(
    shots: list[tuple[float, float]], copies: int
) -> None:
    found, host_us = lengthened(2, shots)
    assert found == copies
    assert (host_us > 0) is (copies > 2)


def test_a_sample_has_all_of_its_calls_or_is_none() -> None:
    assert means([1.0, 2.0, 3.0, 6.0, 9.0], 2) == [1.5, 4.5]
    assert means([1.0, 2.0], 1) == [1.0, 2.0]
    assert means([1.0, 2.0, 3.0], 4) == []


def test_small_copies_bring_all_turns_and_the_long_ones_evict() -> None:
    gpu = VirtualGpu()
    ahead = QueueAhead(gpu, 0)
    assert ahead.copy_bytes == copy_bytes(gpu.device) == 2 * gpu.device.last_level_cache_bytes
    small = set()
    for _ in range(100):
        before = gpu.launched
        ahead.enqueue(3)
        small.add(gpu.launched - before - 3)
    assert small == set(range(TURNS))
    assert gpu.log == ["copy"] * 300

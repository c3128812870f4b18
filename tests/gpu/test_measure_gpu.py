"""The timer and the probes on a GPU: times agree with what can be had in another way."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest

from rmsnorm_raw import check, ladder, measure, module, source
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.bandwidth import PROBES, Roofline, remeasure, roofline
from rmsnorm_raw.clones import clone_plans
from rmsnorm_raw.config import Config
from rmsnorm_raw.measure import Unmeasurable, time_calls, time_interleaved
from rmsnorm_raw.module import Binary
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.stats import Outcome, compare

pytestmark = pytest.mark.gpu

#: on an H200, GB/s, by one card's readings over several runs; 2 % is added on both sides
H200_GBPS = {"copy": (4224, 4272), "2r1w": (4350, 4392), "write": (4622, 4652)}


def built(problem: Problem, gpu: Backend) -> tuple[Config, Binary]:
    config = ladder.default_config(problem, gpu.device)
    return config, module.build(source.render(problem, config, gpu.device), gpu)


@pytest.fixture(scope="module")
def timed_opening(gpu: Backend) -> tuple[Roofline, float]:
    began = time.perf_counter()
    found = roofline(gpu)
    took_s = time.perf_counter() - began
    print(f"\n{found}\nopening took {took_s:.1f} s")
    return found, took_s


@pytest.fixture(scope="module")
def opening(timed_opening: tuple[Roofline, float]) -> Roofline:
    return timed_opening[0]


def test_the_opening_takes_under_20_seconds(timed_opening: tuple[Roofline, float]) -> None:
    assert timed_opening[1] < 20


def test_probes_agree_with_a_copy_of_the_runtime(gpu: Backend, opening: Roofline) -> None:
    size_bytes = opening.buffer_bytes
    base, owner = gpu.allocate(2 * size_bytes)
    samples = time_calls([partial(gpu.copy, base + size_bytes, base, size_bytes, 0)], gpu)
    del owner
    runtime_gbps = samples.gbps(2 * size_bytes)
    found = {probe: opening.reading(probe).gbps for probe in PROBES}
    # the best kernel is no slower than the driver's own copy, and nothing is twice a copy
    assert found["copy"] > 0.97 * runtime_gbps
    assert max(found.values()) < 2 * found["copy"]
    assert found["2r1w"] > 0.9 * found["copy"]


def test_an_h200_gives_what_an_h200_gave(gpu: Backend, opening: Roofline) -> None:
    if gpu.device.name != "NVIDIA H200":
        pytest.skip(f"these are figures of an H200, and this is {gpu.device.name}")
    for probe, (low, high) in H200_GBPS.items():
        assert 0.98 * low < opening.reading(probe).gbps < 1.02 * high, probe


def test_an_idle_device_does_not_drift(gpu: Backend, opening: Roofline) -> None:
    closing = remeasure(opening, gpu)
    assert not opening.is_suspect(closing), f"{opening}\n{closing}"


def test_cold_and_steady_agree_where_the_cache_cannot_help(gpu: Backend) -> None:
    """At 1 GiB a call, neither eviction nor a train changes what memory gives."""
    problem = Problem.forward(32768, 8192, "bfloat16")
    config, binary = built(problem, gpu)
    verdict = check.verify(problem, config, binary)
    cold = measure.measure(problem, config, binary, verdict)
    steady = measure.measure(problem, config, binary, verdict, regime="steady")
    assert steady.median_us == pytest.approx(cold.median_us, rel=0.03)
    assert cold.gbps(problem.logical_bytes()) > 0


def test_a_long_train_by_the_host_clock_agrees(gpu: Backend) -> None:
    problem = Problem.forward(32768, 4096, "bfloat16")
    config, binary = built(problem, gpu)
    calls = clone_plans(problem, config, binary).calls()
    samples = time_calls(calls, gpu, regime="steady")
    repeats = 2000
    gpu.synchronize(0)
    began = time.perf_counter()
    for i in range(repeats):
        calls[i % len(calls)]()
    gpu.synchronize(0)
    wall_us = (time.perf_counter() - began) * 1e6 / repeats
    assert samples.median_us == pytest.approx(wall_us, rel=0.03)


def test_a_slow_host_does_not_show(gpu: Backend) -> None:
    problem = Problem.forward(4096, 4096, "bfloat16")
    calls = clone_plans(problem, *built(problem, gpu)).calls()

    def slowed(call: measure.Call) -> None:
        until = time.perf_counter() + 500e-6
        while time.perf_counter() < until:
            pass
        call()

    plain, slow = time_interleaved([calls, [partial(slowed, call) for call in calls]], gpu)
    assert slow.evicted_bytes > plain.evicted_bytes
    # 500 us of host time a call do not show; the longer eviction does, 21.2 us against 20.5 (H200)
    assert slow.median_us == pytest.approx(plain.median_us, rel=0.06)


def test_a_call_that_waits_is_refused(gpu: Backend) -> None:
    problem = Problem.forward(4096, 4096, "bfloat16")
    calls = clone_plans(problem, *built(problem, gpu)).calls()

    def waits() -> None:
        calls[0]()
        gpu.synchronize(0)

    with pytest.raises(Unmeasurable, match="waits for the device"):
        time_calls([waits], gpu)


def test_a_kernel_beside_itself_is_the_same(gpu: Backend) -> None:
    problem = Problem.forward(32768, 2048, "bfloat16")
    calls = clone_plans(problem, *built(problem, gpu)).calls()
    one, other = time_interleaved([calls, calls], gpu, min_samples=60)
    assert compare(one.times_us, other.times_us, noise_pct=2.0).verdict is Outcome.SAME


def test_two_launches_have_one_time_whatever_was_launched_before(gpu: Backend) -> None:
    """A copy is a launch: without turns mixed these were 10.4 and 11.3 us on an H200."""
    problem = Problem.backward(256, 4096, "float16", weight_dtype="float32")
    calls = clone_plans(problem, *built(problem, gpu)).calls()
    base, owner = gpu.allocate(512)
    medians_us = []
    for _ in range(4):
        gpu.copy(base + 256, base, 256, 0)
        taken = time_calls(calls, gpu, min_samples=60, max_samples=60, goal_pct=0.0)
        medians_us.append(taken.median_us)
    del owner
    assert max(medians_us) < 1.03 * min(medians_us), medians_us


def test_eviction_is_real(gpu: Backend) -> None:
    """A call whose data fits the cache is slower cold than in a train over one clone."""
    rows = gpu.device.last_level_cache_bytes // (4 * 4096 * 2)
    problem = Problem.forward(rows, 4096, "bfloat16")
    calls = clone_plans(problem, *built(problem, gpu)).calls()
    cold = time_calls(calls, gpu)
    warm = time_calls(calls[:1], gpu, regime="steady")
    assert np.log(cold.median_us / warm.median_us) > 0.05

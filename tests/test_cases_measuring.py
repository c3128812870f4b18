"""Reports from users of such kernels, about how they were timed; see test_cases.py."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from perf_suites import PERF, Bench, suite
from planted_lab import FakeSteps
from virtual_gpu import VirtualGpu, runs

import rmsnorm_raw
from rmsnorm_raw import check, clones, ladder, measure
from rmsnorm_raw.backends import Code
from rmsnorm_raw.backends.driver_facts import device_spec
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN, MIB
from rmsnorm_raw.effort import QUICK
from rmsnorm_raw.measure import Regime, time_calls, time_interleaved
from rmsnorm_raw.module import Binary
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.search import Search
from rmsnorm_raw.source import Source

Make = Callable[..., VirtualGpu]


@pytest.fixture
def make_gpu(monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(*device: Any, **costs: Any) -> VirtualGpu:
        gpu = VirtualGpu(*device, **costs)
        monkeypatch.setattr(measure, "perf_counter", gpu.perf_counter)
        return gpu

    return make


# ---- 7: quack PR#138, a fixed-count warm-up picks a config 45 % slower ---------------------------


@pytest.mark.parametrize("device_us", [2.0, 50.0, 1000.0])
def test_warm_up_by_time_ranks_the_faster_config_first_case_7(
    device_us: float, make_gpu: Make
) -> None:
    """A clock that is low for 20 ms of work makes whoever is timed first look twice as slow."""

    def ranked(**limits: float) -> list[float]:
        gpu = make_gpu(clock=lambda busy_us: 2.0 if busy_us < 20_000 else 1.0)
        calls = [[gpu.call("fast", device_us)], [gpu.call("45 % slower", 1.45 * device_us)]]
        return [samples.median_us for samples in time_interleaved(calls, gpu, **limits)]

    assert ranked() == pytest.approx([device_us, 1.45 * device_us])


def test_a_count_of_calls_is_no_warm_up_for_short_kernels_case_7(make_gpu: Make) -> None:
    """The virtual device does show the fault: without the warm-up the first one is misjudged."""
    gpu = make_gpu(clock=lambda busy_us: 2.0 if busy_us < 2_000 else 1.0)
    hasty = time_calls([gpu.call("k", 2.0)], gpu, warmup_s=0.0)
    assert hasty.times_us[0] == pytest.approx(4.0)
    gpu = make_gpu(clock=lambda busy_us: 2.0 if busy_us < 2_000 else 1.0)
    times_us = time_calls([gpu.call("k", 2.0)], gpu).times_us
    assert times_us == pytest.approx([2.0] * len(times_us))


def test_a_winner_that_is_slower_when_measured_again_does_not_ship_case_7() -> None:
    problem, device = Problem.forward(8192, 8192, "bfloat16"), KNOWN["sm_90"]
    base = ladder.default_config(problem, device)
    lucky = replace(base, load_policy="default")
    assert lucky != base
    seen: list[str] = []

    def searched(later_us: float) -> Search:
        def time_us(at: Problem, config: Config, regime: Regime) -> float:
            seen.append(config.slug)
            us = 100.0 if config.slug == ladder.default_config(at, device).slug else 130.0
            if config == lucky:
                us = 69.0 if seen.count(lucky.slug) == 1 else later_us
            return us * at.rows / problem.rows

        seen.clear()
        steps = FakeSteps(time_us)
        search = Search(problem, device, steps, QUICK, clock=steps.clock)
        search.run()
        return search

    assert searched(later_us=100.0).config == base
    assert seen.count(lucky.slug) > 1
    assert searched(later_us=69.0).config == lucky


# ---- 25: cusignal#220, a benchmark times only the launch -----------------------------------------


@pytest.mark.parametrize(
    ("regime", "host_us"),
    [("cold", 1.0), ("cold", 70.0), ("cold", 2000.0), ("steady", 1.0), ("steady", 70.0)],
)
def test_a_time_is_the_devices_and_not_the_launchs_case_25(
    regime: Regime, host_us: float, make_gpu: Make
) -> None:
    """A launch costs the host the same for a kernel of 3 us and for one of 900."""
    for device_us in (3.0, 900.0):
        gpu = make_gpu()
        calls = [gpu.call(f"clone {k}", device_us, host_us=host_us) for k in range(4)]
        samples = time_calls(calls, gpu, regime=regime)
        assert samples.median_us == pytest.approx(device_us, rel=0.01)


#: who reads the host's clock for more than a budget, and why that is no kernel's time
HOST_CLOCKS = {
    "measure.py",  # whether a sample's host was late; the simulator's times, marked as such
    "clock.py",  # the same, in the suites
    "conftest.py",  # how long a session and its preparations took
    "cpu.py",  # the simulator's events
    "overhead.py",  # what a call costs the host is what it measures
    "whole_operator.py",  # how long a run took, and its builds
}


def test_no_time_of_a_kernel_is_read_off_the_hosts_clock_case_25() -> None:
    reads = re.compile(r"perf_counter|time\.time\(\) -.*_us|process_time|timeit")
    files = (*Path(rmsnorm_raw.__file__).parent.rglob("*.py"), *PERF.glob("*.py"))
    assert {path.name for path in files if reads.search(path.read_text())} == HOST_CLOCKS


def test_the_suites_time_the_device_too_case_25(
    session: Callable[[VirtualGpu], Suite],
) -> None:
    for host_us in (1.0, 70.0, 2000.0):
        made = session(VirtualGpu())
        times_us = made.timed(device_us=3.0, host_us=host_us)
        assert times_us == pytest.approx([3.0] * len(times_us))


# ---- 26: NVIDIA/Fuser PR#1132, auto-calibrated rounds run on a warm cache ------------------------


class Suite:
    """A session of the suites in perf/ on a virtual GPU."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.gpu, self.session = gpu, object.__new__(suite("conftest").Session)
        self.session.backend, self.session.stream = gpu, 0
        self.session.clock = suite("clock").Clock(gpu)
        self.benchmark = Bench(self.session.clock)
        self.rounds = suite("conftest").ROUNDS

    def timed(self, device_us: float, host_us: float = 5.0) -> list[float]:
        calls = [self.gpu.call(f"clone {k}", device_us, host_us=host_us) for k in range(3)]
        samples = self.session.time(self.benchmark, calls)
        return list(samples.times_us)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Callable[[VirtualGpu], Suite]:
    pytest.importorskip("pytest_benchmark", reason="pip install pytest-benchmark")
    monkeypatch.syspath_prepend(PERF)

    def make(gpu: VirtualGpu) -> Suite:
        for each in (suite("clock"), suite("conftest"), measure):
            monkeypatch.setattr(each, "perf_counter", gpu.perf_counter)
        return Suite(gpu)

    return make


@pytest.mark.parametrize("device_us", [2.0, 4000.0])
def test_rounds_are_fixed_and_go_over_evicted_buffers_in_turn_case_26(
    device_us: float, session: Callable[[VirtualGpu], Suite]
) -> None:
    """However short the call, as many rounds, and four times those; the cache is evicted first."""
    made = session(VirtualGpu())
    made.timed(device_us)
    count = made.rounds * (4 if device_us == 2.0 else 1)
    assert made.benchmark.asked == [count]
    rounds = runs(made.gpu.log)[-2 * count :]
    assert [name for name, _ in rounds[::2]] == ["copy"] * count
    assert [name for name, _ in rounds[1::2]] == [f"clone {k % 3}" for k in range(count)]
    assert {count for name, count in rounds if name != "copy"} == {2}  # a call of two launches


def test_the_timer_rotates_and_evicts_before_every_sample_case_26(make_gpu: Make) -> None:
    gpu = make_gpu()
    samples = time_calls([gpu.call(f"clone {k}") for k in range(3)], gpu, max_samples=12)
    sampled = runs(gpu.log)[-2 * len(samples.times_us) :]
    assert [name for name, _ in sampled[::2]] == ["copy"] * 12
    names = [name for name, _ in sampled[1::2]]
    assert all(one != other for one, other in itertools.pairwise(names))
    assert samples.evicted_bytes >= 2 * gpu.device.last_level_cache_bytes


# ---- 27: quack-FlyDSL, the 4 MiB "L2" taken for the last-level cache on gfx950 -------------------


@pytest.mark.parametrize("arch", ["gfx940", "gfx941", "gfx942", "gfx950"])
def test_256_mib_is_the_floor_of_the_last_level_cache_case_27(arch: str, tmp_path: Path) -> None:
    says = {
        "name": b"an Instinct", "gcnArchName": f"{arch}:sramecc+".encode(), "warpSize": 64,
        "multiProcessorCount": 256, "sharedMemPerBlock": 64 * 1024, "l2CacheSize": 4 * MIB,
    }  # fmt: skip
    found = device_spec(says, "rocm", kfd_nodes=tmp_path)
    assert found.last_level_cache_bytes == 256 * MIB
    assert "Infinity Cache" in found.last_level_cache_source
    larger = device_spec(says | {"l2CacheSize": 512 * MIB}, "rocm", kfd_nodes=tmp_path)
    assert larger.last_level_cache_bytes == 512 * MIB


def test_what_is_evicted_and_rotated_on_gfx950_exceeds_256_mib_case_27(
    make_gpu: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = make_gpu(KNOWN["gfx950"], copy_us=200.0)
    samples = time_calls([gpu.call("k")], gpu)
    assert samples.evicted_bytes >= 2 * 256 * MIB
    monkeypatch.setattr(check, "write_inputs", lambda *args, **options: None)
    problem = Problem.forward(4096, 4096, "bfloat16")  # 64 MiB: 16 "L2"s, and no cache at all
    binary = Binary(Source("", "", (), ()), gpu, Code({}, {}, "", ""))
    config = ladder.default_config(problem, gpu.device)
    made = clones.clone_plans(problem, config, binary)
    assert len(made.plans) * made.clone_bytes > 3 * 256 * MIB

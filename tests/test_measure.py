"""The timer against a device whose true times are known."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from virtual_gpu import VirtualGpu, runs

from rmsnorm_raw import ladder, measure, module, source
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.check import Verdict, verify
from rmsnorm_raw.errors import InvalidInput, WrongResult
from rmsnorm_raw.measure import BATCH, Unmeasurable, time_calls, time_interleaved
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.stats import Outcome, compare


@pytest.fixture
def make_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., VirtualGpu]:
    def make(**costs: object) -> VirtualGpu:
        gpu = VirtualGpu(**costs)
        monkeypatch.setattr(measure, "perf_counter", gpu.perf_counter)
        return gpu

    return make


Make = Callable[..., VirtualGpu]


def noisy(spread: float) -> Callable[[], float]:
    rng = np.random.default_rng(1)
    return lambda: 100 * (1 + spread * float(rng.uniform(-1, 1)))


# ---- no host time in a sample ------------------------------------------------------------------


@pytest.mark.parametrize("device_us", [2.0, 400.0])
# under one copy's 60 us, just over it, and far over it
@pytest.mark.parametrize("host_us", [0.0, 30.0, 55.0, 70.0, 1000.0, 8000.0])
def test_a_sample_is_device_time_whatever_the_host_costs(
    make_gpu: Make, device_us: float, host_us: float
) -> None:
    gpu = make_gpu()
    samples = time_calls([gpu.call("k", device_us, host_us=host_us)], gpu)
    assert samples.times_us == pytest.approx([device_us] * len(samples.times_us))
    assert len(samples.times_us) >= 12


def test_without_the_queue_ahead_these_samples_would_hold_host_time(make_gpu: Make) -> None:
    """The virtual device does show the fault that the rule is there to stop."""
    gpu = make_gpu()
    start = gpu.record(0)
    gpu.call("k", 2.0, host_us=70.0)()
    assert gpu.elapsed_us(start, gpu.record(0)) > 70


def test_a_hiccup_of_the_host_is_discarded_and_counted(make_gpu: Make) -> None:
    gpu = make_gpu()
    hiccups = itertools.cycle([5.0] * 4 + [900.0])
    samples = time_calls([gpu.call("k", 2.0, host_us=lambda: next(hiccups))], gpu)
    assert samples.times_us == pytest.approx([2.0] * len(samples.times_us))
    assert samples.discarded > 0
    assert 800 < samples.late_us < 1000
    assert f"{samples.discarded} discarded" in str(samples)
    assert samples.evicted_bytes == 2 * gpu.device.last_level_cache_bytes  # a few change nothing


def test_the_cost_of_enqueueing_the_copy_is_no_device_time(make_gpu: Make) -> None:
    """On an idle device the first event fires before the copy is even enqueued."""
    gpu = make_gpu(copy_cost_us=50.0, copy_us=60.0)
    # done 130 us after the first event; the copy ends 110 us after it, though it took only 60
    samples = time_calls([gpu.call("k", 2.0, host_us=80.0)], gpu)
    assert samples.times_us == pytest.approx([2.0] * len(samples.times_us))


def test_a_slow_host_gets_more_work_queued_ahead(make_gpu: Make) -> None:
    gpu = make_gpu()
    one_copy = 2 * gpu.device.last_level_cache_bytes
    fast = time_calls([gpu.call("k", host_us=5.0)], gpu)
    slow = time_calls([gpu.call("k", host_us=1000.0)], gpu)
    assert fast.evicted_bytes == one_copy
    # at least the 1000 us that the call takes, at 60 us a copy; no more than a few times that
    assert 1000 / 60 <= slow.evicted_bytes / one_copy <= 4 * 1000 / 60
    assert slow.discarded == 0  # lengthened during the warm-up


@pytest.mark.parametrize("regime", ["cold", "steady"])
def test_a_call_that_waits_for_the_device_has_no_time(
    make_gpu: Make, regime: measure.Regime
) -> None:
    gpu = make_gpu()
    with pytest.raises(Unmeasurable, match="waits for the device"):
        time_calls([gpu.call("k", waits=True)], gpu, regime=regime)
    assert gpu.host_us < 10e6  # found out in seconds


def test_a_batch_that_fills_the_channel_is_not_the_calls_fault(make_gpu: Make) -> None:
    """A model's block is a hundred launches of 10 ms: a dozen of it are more than 1024."""
    gpu = make_gpu(channel=8)
    samples = time_calls([gpu.call("block", 11_000.0, host_us=100.0)], gpu, warmup_s=0.5)
    assert samples.times_us == pytest.approx([11_000.0] * len(samples.times_us))
    assert len(samples.times_us) >= 12
    assert gpu.host_us < 5e6


# ---- launches take turns -----------------------------------------------------------------------


@pytest.mark.parametrize("launched", range(4))
# with the queue-ahead's copy these are 3, 4 and 5 launches; of 4 the turns would never change
@pytest.mark.parametrize("more", range(3))
def test_a_short_call_has_one_time_whatever_was_launched_before(
    make_gpu: Make, more: int, launched: int
) -> None:
    gpu = make_gpu(turn_us=0.85)
    gpu.launched = launched
    two = gpu.call("k", 10.0)

    def call() -> None:
        two()
        for _ in range(more):
            gpu.enqueue("k", 5.0, 1.0)

    samples = time_calls([call], gpu, min_samples=60)
    assert samples.median_us == pytest.approx(10.0 + 5.0 * more + 0.85 / 2, rel=0.01)


@pytest.mark.parametrize(("device_us", "calls"), [(10.0, 4), (190.0, 4), (210.0, 1)])
def test_a_sample_of_a_short_call_is_the_mean_of_four(
    make_gpu: Make, device_us: float, calls: int
) -> None:
    gpu = make_gpu()
    each = itertools.cycle(device_us * (1 + k / 1000) for k in range(4))
    limits: measure.Limits = {"min_samples": 12, "max_samples": 12, "goal_pct": 0.0}
    samples = time_calls([gpu.call("k", lambda: next(each))], gpu, **limits)
    assert len(samples.times_us) == 12
    assert len(set(np.round(samples.times_us, 6))) == 4 // calls
    assert samples.median_us == pytest.approx(device_us * 1.0015)


# ---- the order of things -----------------------------------------------------------------------


def test_cold_evicts_before_every_sample_and_rotates(make_gpu: Make) -> None:
    gpu = make_gpu()
    calls = [gpu.call(f"clone{i}") for i in range(5)]
    samples = time_calls(calls, gpu)
    assert samples.clones == 5
    launches = 2  # a virtual call's
    first_pass, sampling = gpu.log[: 5 * launches], runs(gpu.log[5 * launches :])
    assert runs(first_pass) == [(f"clone{i}", launches) for i in range(5)]
    assert [name for name, _ in sampling[::2]] == ["copy"] * (len(sampling) // 2)
    turns = [name for name, _ in sampling[1::2]]
    assert turns == [f"clone{i % 5}" for i in range(len(turns))]
    assert all(count == launches for _, count in sampling[1::2])


def test_each_shot_is_waited_for_before_the_next(
    make_gpu: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = make_gpu()
    idle: list[bool] = []
    record = gpu.record

    def recorded(stream: int) -> float:
        idle.append(gpu.idle_us <= gpu.host_us)
        return record(stream)

    monkeypatch.setattr(gpu, "record", recorded)
    time_calls([gpu.call("k", 300.0)], gpu)
    before, start, end = idle[::3], idle[1::3], idle[2::3]
    assert len(before) == len(end) >= 12
    assert all(before)
    assert not any(start + end)


def test_first_calls_and_warm_up_are_not_sampled_and_not_in_the_budget(make_gpu: Make) -> None:
    gpu = make_gpu()
    compiled: set[str] = set()

    def first_time(name: str) -> Callable[[], float]:
        def cost() -> float:
            if name in compiled:
                return 5.0
            compiled.add(name)
            return 3e6

        return cost

    calls = [gpu.call(name, host_us=first_time(name)) for name in "ab"]
    samples = time_calls(calls, gpu, budget_s=0.5)
    assert gpu.host_us > 6e6
    assert samples.discarded == 0
    assert samples.stopped == "interval 0 % < 1 %"


@pytest.mark.parametrize("device_us", [2.0, 60.0, 2000.0])
def test_warm_up_lasts_by_time_and_not_by_count(make_gpu: Make, device_us: float) -> None:
    """The clocks come up after 20 ms of work, however many calls that is."""

    def waking(busy_us: float) -> float:
        return 1.45 if busy_us < 20_000 else 1.0

    gpu = make_gpu(clock=waking)
    samples = time_calls([gpu.call("k", device_us)], gpu)
    assert samples.times_us == pytest.approx([device_us] * len(samples.times_us))
    gpu = make_gpu(clock=waking)
    hasty = time_calls([gpu.call("k", device_us)], gpu, warmup_s=0.0)
    assert hasty.times_us[0] == pytest.approx(1.45 * device_us)


# ---- when to stop ------------------------------------------------------------------------------


def test_it_stops_at_the_goal_and_says_so(make_gpu: Make) -> None:
    gpu = make_gpu()
    samples = time_calls([gpu.call("k", noisy(0.002))], gpu)
    assert samples.stopped.startswith("interval 0.")
    assert samples.stopped.endswith("% < 1 %")
    assert len(samples.times_us) == 12
    assert 100 * (samples.high_us - samples.low_us) / samples.median_us < 1


def test_it_goes_on_until_the_goal_is_met(make_gpu: Make) -> None:
    gpu = make_gpu()
    samples = time_calls([gpu.call("k", noisy(0.02))], gpu)
    assert samples.stopped.endswith("% < 1 %")
    assert 12 < len(samples.times_us) < 1000


def test_it_stops_when_the_budget_is_spent_and_says_at_what(make_gpu: Make) -> None:
    gpu = make_gpu()
    samples = time_calls([gpu.call("k", noisy(0.5))], gpu, budget_s=0.02)
    assert samples.stopped.startswith("budget 0.02 s spent at ")
    assert samples.stopped.endswith(" % >= 1 %")
    # 163 us a call, four a sample: 20 ms hold 30, and a batch is finished
    assert 29 <= len(samples.times_us) <= 30 + BATCH // 4


def test_at_least_the_wanted_samples_are_taken_without_a_budget(make_gpu: Make) -> None:
    gpu = make_gpu()
    samples = time_calls([gpu.call("k", noisy(0.5))], gpu, budget_s=0.0, min_samples=30)
    assert 30 <= len(samples.times_us) < 30 + BATCH
    assert samples.stopped.startswith("budget 0 s spent")


def test_it_stops_at_the_most_samples_and_says_so(make_gpu: Make) -> None:
    gpu = make_gpu()
    samples = time_calls([gpu.call("k", noisy(0.5))], gpu, max_samples=40)
    assert len(samples.times_us) == 40
    assert samples.stopped.startswith("40 samples taken at ")


def test_contradicting_limits_are_refused(make_gpu: Make) -> None:
    gpu = make_gpu()
    call = gpu.call("k")
    with pytest.raises(InvalidInput, match="no calls"):
        time_calls([], gpu)
    with pytest.raises(InvalidInput, match="no calls"):
        time_interleaved([], gpu)
    with pytest.raises(InvalidInput, match="min_samples is 5"):
        time_calls([call], gpu, min_samples=5)
    with pytest.raises(InvalidInput, match="max_samples 10"):
        time_calls([call], gpu, max_samples=10)


# ---- steady ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clones", "train"), [(1, 100), (7, 105), (64, 128), (100, 100)])
def test_a_steady_sample_is_the_mean_of_whole_rotations(
    make_gpu: Make, clones: int, train: int
) -> None:
    gpu = make_gpu()
    calls = [gpu.call(f"clone{i}", 10.0 + i, host_us=1.0) for i in range(clones)]
    samples = time_calls(calls, gpu, regime="steady", warmup_s=0.0)
    mean_us = 10 + (clones - 1) / 2
    assert samples.times_us == pytest.approx([mean_us] * 12)
    assert samples.regime == "steady"
    trains = [
        list(group)
        for is_copy, group in itertools.groupby(gpu.log[2 * clones :], key="copy".__eq__)
        if not is_copy
    ]
    assert {len(launches) for launches in trains} == {2 * train}
    for launches in trains:
        assert {launches.count(name) for name in set(launches)} == {2 * train // clones}


@pytest.mark.parametrize("host_us", [1.0, 20.0, 90.0])
def test_a_train_that_the_host_enqueues_slowly_waits_behind_more_work(
    make_gpu: Make, host_us: float
) -> None:
    gpu = make_gpu()
    samples = time_calls([gpu.call("k", 5.0, host_us=host_us)], gpu, regime="steady")
    assert samples.times_us == pytest.approx([5.0] * len(samples.times_us))
    copies = samples.evicted_bytes / (2 * gpu.device.last_level_cache_bytes)
    assert copies * 60 >= 100 * host_us


# ---- several at once ---------------------------------------------------------------------------


def test_contenders_take_turns_so_that_a_drift_is_shared(make_gpu: Make) -> None:
    def heating(busy_us: float) -> float:
        return 1 + 0.3 * busy_us / 1e6

    gpu = make_gpu(clock=heating)
    limits: measure.Limits = {"goal_pct": 0.0, "max_samples": 240, "budget_s": 9.0}
    a, b = time_interleaved([[gpu.call("a", 100.0)], [gpu.call("b", 100.0)]], gpu, **limits)
    assert compare(a.times_us, b.times_us).verdict is Outcome.SAME
    gpu = make_gpu(clock=heating)
    one, other = (time_calls([gpu.call(name, 100.0)], gpu, **limits) for name in "ab")
    assert compare(one.times_us, other.times_us).verdict is Outcome.SLOWER


def test_a_contender_that_is_done_is_left_alone(make_gpu: Make) -> None:
    gpu = make_gpu()
    calm, wild = time_interleaved([[gpu.call("a")], [gpu.call("b", noisy(0.5))]], gpu)
    assert len(calm.times_us) == 12
    assert len(wild.times_us) > 12


# ---- the simulator, the gate, real plans -------------------------------------------------------


def test_the_simulator_is_timed_by_the_host_and_flagged(cpu64: Backend) -> None:
    ran: list[str] = []
    calls = [lambda: ran.append("a"), lambda: ran.append("b")]
    samples = time_calls(calls, cpu64, min_samples=100)
    assert samples.simulated
    assert samples.stopped == "6 calls simulated"
    assert len(samples.times_us) == 6
    assert samples.evicted_bytes == 0
    assert ran == ["a", "b", "a", "b", "a", "b", "a"]
    with pytest.raises(Unmeasurable, match="no steady times"):
        time_calls(calls, cpu64, regime="steady")


@pytest.mark.parametrize(
    "problem",
    [Problem.forward(4, 256, "bfloat16"), Problem.backward(4, 256, "float16")],
    ids=str,
)
def test_a_kernel_is_timed_after_the_gate(cpu64: Backend, problem: Problem) -> None:
    config = ladder.default_config(problem, cpu64.device)
    binary = module.build(source.render(problem, config, cpu64.device), cpu64)
    verdict = verify(problem, config, binary)
    samples = measure.measure(problem, config, binary, verdict)
    assert samples.simulated
    assert samples.clones == 2
    assert samples.gbps(problem.logical_bytes()) > 0
    failed = Verdict(passed=False, worst={"y": 3.0}, seed=1, message="y[0] is off")
    with pytest.raises(WrongResult, match=r"y\[0\] is off"):
        measure.measure(problem, config, binary, failed)


def test_samples_speak_for_themselves() -> None:
    samples = measure.Samples(
        tuple(float(t) for t in range(95, 106)), "cold", "interval 0.8 % < 1 %", clones=3
    )
    assert samples.median_us == 100
    assert (samples.p10_us, samples.p90_us) == (96, 104)
    assert (samples.low_us, samples.high_us) == (96, 104)
    assert samples.gbps(1_073_758_208) == pytest.approx(10737.58208)
    assert str(samples) == (
        "100.0 us [96.0, 104.0], p10 96.0, p90 104.0, 11 samples cold; interval 0.8 % < 1 %"
    )

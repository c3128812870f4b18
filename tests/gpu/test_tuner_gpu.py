"""Searches on a GPU, in a worker: quick, resumed, and past kernels that break their context."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import rmsnorm_raw as rr
from rmsnorm_raw import ablation, lab, ladder, source, space, store
from rmsnorm_raw.backends import Backend, get_backend
from rmsnorm_raw.config import Config
from rmsnorm_raw.lab import Fault
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.stats import Outcome
from rmsnorm_raw.worker import Worker

pytestmark = pytest.mark.gpu

PROBLEM = Problem.forward(4096, 4096, "bf16")
RIGHT = "out[e] = x[e] * rstd;"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(tmp_path / "cache"))
    store.forget()


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_a_quick_search_ends_soon_and_a_second_finds_its_record(op: str, gpu: Backend) -> None:
    problem = getattr(Problem, op)(4096, 4096, "bf16")
    decision = rr.tune(problem, backend=gpu)
    print(f"\n{decision!r}\n{decision}")
    assert decision.counts["correct"] >= 20
    assert not any(decision.counts.get(kind) for kind in ("runtime", "timeout", "correctness"))
    assert decision.took_s < 20
    assert decision.standings
    if decision.tuned:
        assert all(c.verdict is Outcome.FASTER for c in decision.comparisons.values())
        assert all(final.won for final in decision.finals if final.config == decision.config)
    store.forget()
    began = time.perf_counter()
    again = rr.tune(problem, backend=gpu)
    assert time.perf_counter() - began < 1
    assert (again.origin, again.config) == ("record", decision.config)
    assert store.resolve(problem, gpu)[0] == decision.config


class PlantedLab(lab.Lab):
    """A lab on the GPU that spoils kernels of some configs: slug -> "fault", "loop" or "wrong".

    A "loop" ends after a minute, so that a device which outlives its process is not held for good.
    """

    def __init__(self, name: str, planted: dict[str, str]) -> None:
        super().__init__(get_backend(name))
        self._planted = planted

    def _render(self, problem: Problem, config: Config) -> source.Source:
        found = super()._render(problem, config)
        spoiled = {
            "": RIGHT,
            "fault": f"*(volatile int*)64 = 1; {RIGHT}",
            "loop": f"for (long long t = clock64(); clock64() - t < 100000000000LL;) {{}} {RIGHT}",
            "wrong": "out[e] = 1.5f * x[e] * rstd;",
        }[self._planted.get(config.slug, "")]
        assert RIGHT in found.text
        return replace(found, text=found.text.replace(RIGHT, spoiled))


def test_kernels_that_break_the_context_or_hang_cost_their_own_result_alone(gpu: Backend) -> None:
    base = ladder.default_config(PROBLEM, gpu.device)
    kept = [c for c in space.enumerate_configs(PROBLEM, gpu.device).kept if c != base]
    kept = [c for c in kept if c.path == "registers" and c.blocks_per_row == 1]
    configs = [base, *kept[:: len(kept) // 6][:5]]
    fates = {configs[1].slug: "fault", configs[2].slug: "loop", configs[4].slug: "wrong"}
    with Worker(partial(PlantedLab, gpu.name, fates), limit_s=8.0) as worker:
        built = worker.compile(PROBLEM, configs)
        assert all(isinstance(found, str) for found in built.values())
        found = worker.gate(PROBLEM, configs)
        kinds = [each.kind if isinstance(each, Fault) else "" for each in found.values()]
        assert kinds == ["", "runtime", "timeout", "", "correctness", ""]
        sound = [config for config in configs if found[config] == ""]
        assert worker.try_out(PROBLEM, sound) == dict.fromkeys(sound, "")
        taken = worker.time(PROBLEM, sound, "cold", {})
        assert not isinstance(taken, Fault)
        assert all(samples.median_us > 5 for samples in taken.values())
    # the caller's own context was never touched
    x = rr.array.randn((8, 4096), "bf16", seed=0, backend=gpu.name)
    assert rr.rmsnorm_fwd(x).y.shape == (8, 4096)


def test_the_largest_bucket_end_of_the_study_fits(gpu: Backend) -> None:
    """65535 x 8192 fp32: gate and times of the ladder's config, with two clones."""
    problem = Problem.backward(65535, 8192, "fp32")
    if gpu.device.memory_bytes < 40e9:
        pytest.skip(f"{gpu.device.name} has {gpu.device.memory_bytes / 1e9:.0f} GB")
    base = ladder.default_config(problem, gpu.device)
    with Worker.on(gpu) as worker:
        worker.start()
        began = time.perf_counter()
        assert worker.gate(problem, [base]) == {base: ""}
        gated = time.perf_counter()
        taken = worker.time(problem, [base], "steady", {"min_samples": 6, "max_samples": 6})
        print(f"\ngate {gated - began:.2f} s, steady {time.perf_counter() - gated:.2f} s")
    assert not isinstance(taken, Fault)
    assert taken[base].median_us > 500


def test_what_a_gate_costs(gpu: Backend) -> None:
    """Prints seconds of a step on many configs: what the heuristics' budgets stand on."""
    device = gpu.device
    with Worker.on(gpu) as worker:
        worker.start()
        for problem in (Problem.forward(4099, 8192, "bf16"), Problem.backward(4099, 8192, "bf16")):
            configs = list(space.enumerate_configs(problem, device).kept[:32])
            for step in (worker.compile, worker.gate, worker.try_out):
                began = time.perf_counter()
                found = step(problem, configs)
                took_s = time.perf_counter() - began
                print(f"\n{problem}: {step.__name__} of 32 configs {took_s:.2f} s", end="")
                assert not any(isinstance(each, Fault) for each in found.values())
            began = time.perf_counter()
            limits = {"goal_pct": 0.0, "min_samples": 12, "max_samples": 12, "warmup_s": 0.003}
            assert not isinstance(worker.time(problem, configs, "cold", limits), Fault)
            print(f"\n{problem}: screen of 32 configs {time.perf_counter() - began:.2f} s")


def test_an_ablation_has_a_verdict_for_each_change(gpu: Backend) -> None:
    with Worker.on(gpu) as worker:
        changes = ablation.ablate(PROBLEM, gpu.device, worker)
    print()
    for change in changes:
        print(f"{change.change or 'the ladder':26} {change.config.slug:32} {change}")
    compared = [change for change in changes if change.comparison is not None]
    assert len(compared) >= 8
    assert all(change.why_not or change.comparison for change in changes[1:])


def test_the_worker_is_another_process(gpu: Backend) -> None:
    with Worker.on(gpu) as worker:
        worker.start()
        assert worker._process is not None
        assert worker._process.pid != os.getpid()

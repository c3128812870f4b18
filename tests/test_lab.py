"""The lab on the simulator: each step's results, and what it shares between configs."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from rmsnorm_raw import clones, ladder, launch, module, source, space
from rmsnorm_raw.backends import Backend, Code
from rmsnorm_raw.backends.cpu import CpuBackend
from rmsnorm_raw.config import Config
from rmsnorm_raw.errors import CompileError, LaunchError
from rmsnorm_raw.lab import Fault, Lab, Unhealthy
from rmsnorm_raw.problem import Problem

BACKWARD = Problem.backward(9, 256, "bfloat16")


def configs_of(problem: Problem, backend: Backend, count: int) -> list[Config]:
    base = ladder.default_config(problem, backend.device)
    kept = space.enumerate_configs(problem, backend.device).kept
    return [base, *(config for config in kept if config != base)][:count]


class Reports:
    """What a step reports."""

    def __init__(self) -> None:
        self.begun: list[Config] = []
        self.ended: dict[Config, str | Fault] = {}

    def begins(self, config: Config) -> None:
        self.begun.append(config)

    def ends(self, config: Config, result: str | Fault) -> None:
        self.ended[config] = result

    def of(self, step, problem: Problem, configs: list[Config], until: float = math.inf) -> Reports:  # type: ignore[no-untyped-def]
        step(problem, configs, until, self.begins, self.ends)
        return self


def test_a_source_is_compiled_once_for_all_its_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are a matter of the grid: five candidates, one compilation."""
    backend = CpuBackend(64)
    compiled: list[str] = []
    compile_ = backend.compile

    def counting(text: source.Source) -> Code:
        compiled.append(text.digest)
        return compile_(text)

    monkeypatch.setattr(backend, "compile", counting)
    problem = replace(BACKWARD, rows=100)
    base = Config(block=64, threads_per_row=32, programs=1)
    configs = [replace(base, programs=n) for n in (1, 2, 3, 4, 8)]
    found = Reports().of(Lab(backend).compile, problem, configs)
    assert len(compiled) == 1
    assert list(found.ended) == configs
    assert found.begun == configs[:1]
    assert len(set(found.ended.values())) == 5  # five grids of one code object
    one_row = Reports().of(Lab(backend).compile, replace(problem, rows=1), configs)
    assert len(set(one_row.ended.values())) == 1  # one block, whatever the programs


def test_gate_and_trial_report_each_config(cpu64: Backend) -> None:
    configs = configs_of(BACKWARD, cpu64, 4)
    lab = Lab(cpu64)
    for step in (lab.gate, lab.try_out):
        found = Reports().of(step, BACKWARD, configs)
        assert found.begun == configs
        assert found.ended == dict.fromkeys(configs, "")


def test_no_step_begins_a_config_after_its_time(cpu64: Backend) -> None:
    lab, configs = Lab(cpu64), configs_of(BACKWARD, cpu64, 2)
    for step in (lab.compile, lab.gate, lab.try_out):
        found = Reports().of(step, BACKWARD, configs, time.monotonic() - 1)
        assert (found.begun, found.ended) == ([], {})


def test_times_are_interleaved_over_one_arena(
    cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    arena = clones.arena

    def counting(*args, **options) -> clones.Arena:  # type: ignore[no-untyped-def]
        made.append(args[0])
        return arena(*args, **options)

    monkeypatch.setattr(clones, "arena", counting)
    lab, configs = Lab(cpu64), configs_of(BACKWARD, cpu64, 3)
    Reports().of(lab.try_out, BACKWARD, configs)
    taken = lab.time(BACKWARD, configs, "cold", {})
    assert not isinstance(taken, Fault)
    assert list(taken) == configs
    assert made == [BACKWARD]
    lab.time(replace(BACKWARD, rows=10), configs, "cold", {})
    assert len(made) == 2


def test_steady_times_need_clones_that_exceed_the_cache(cpu64: Backend) -> None:
    found = Lab(cpu64).time(BACKWARD, configs_of(BACKWARD, cpu64, 2), "steady", {})
    assert isinstance(found, Fault)
    assert (found.kind, "exceed the cache" in found.message) == ("constraints", True)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (CompileError("b64", "the log", "next"), "compile"), (LaunchError("refused"), "runtime"),
        (MemoryError("no room"), "memory"),
    ],
)  # fmt: skip
def test_an_error_is_a_fault_of_its_kind(
    error: Exception, kind: str, cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(text: source.Source) -> Code:
        raise error

    backend = CpuBackend(64)
    monkeypatch.setattr(backend, "compile", fails)
    config = configs_of(BACKWARD, cpu64, 1)[0]
    found = Reports().of(Lab(backend).gate, BACKWARD, [config]).ended[config]
    assert isinstance(found, Fault)
    assert found.kind == kind
    assert str(error) in found.message


def test_a_device_that_no_longer_answers_ends_the_lab_after_the_report(
    cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, configs = CpuBackend(64), configs_of(BACKWARD, cpu64, 2)

    def poisoned(*_: object) -> None:
        raise LaunchError("an illegal address")

    monkeypatch.setattr(backend, "launch", poisoned)
    monkeypatch.setattr(backend, "synchronize", poisoned)
    reports = Reports()
    with pytest.raises(Unhealthy):
        reports.of(Lab(backend).gate, BACKWARD, configs)
    assert list(reports.ended) == configs[:1]


def test_a_gate_short_of_memory_gives_the_arena_back_first(
    cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, configs = Lab(cpu64), configs_of(BACKWARD, cpu64, 1)
    Reports().of(lab.try_out, BACKWARD, configs)
    gate = lab._gate

    def needs_room(problem: Problem, config: Config) -> str | Fault:
        if lab._arena is not None:
            raise MemoryError
        return gate(problem, config)

    monkeypatch.setattr(lab, "_gate", needs_room)
    assert Reports().of(lab.gate, BACKWARD, configs).ended == {configs[0]: ""}


def test_an_arena_serves_the_configs_that_it_was_made_for(cpu64: Backend) -> None:
    device = cpu64.device
    configs = [
        *configs_of(BACKWARD, cpu64, 60),
        Config(block=64, threads_per_row=32, programs=1, finish="last_block"),
    ]
    arena = clones.arena(BACKWARD, configs, cpu64)
    assert all(arena.serves(BACKWARD, config) for config in configs)
    assert not arena.serves(replace(BACKWARD, rows=10), configs[0])
    least = min(
        configs, key=lambda config: launch.tensor_bytes(BACKWARD, config, device)["workspace"]
    )
    small = clones.arena(BACKWARD, [least], cpu64)
    assert not all(small.serves(BACKWARD, config) for config in configs)


def test_building_many_leaves_out_what_comes_too_late(cpu64: Backend) -> None:
    texts = [
        source.render(BACKWARD, config, cpu64.device, runtime_cols=True)
        for config in configs_of(BACKWARD, cpu64, 3)
    ]
    assert module.build_all(texts, cpu64, until=time.monotonic() - 1) == {}
    broken = replace(texts[0], text="#error planted")
    found = module.build_all([*texts, texts[0], broken], cpu64)
    assert found.keys() == {text.digest for text in (*texts, broken)}
    assert isinstance(found[broken.digest], CompileError)

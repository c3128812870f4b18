"""Commands beside the suites: what perf.overhead says of its figures, and perf.model's model."""

from __future__ import annotations

import argparse
import importlib
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).resolve().parents[1]
STEPS = 20


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("perf.overhead")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("perf.model")


def times() -> dict[str, dict[str, float]]:
    """Microseconds at which every bar just holds."""
    quack, torchs = {"quack": 20.0}, {"torch": 20 / 1.4}
    return {
        "forward, no grad": {"ours": 20.0, **quack, **torchs},
        "forward, grad": {"ours": 20.0, **quack, **torchs},
        "forward + backward": {"ours": 20.0, **quack, **torchs},
        "compiled forward": {"ours": 105.0, "eager": 100.0},
        "compiled forward + backward": {"ours": 105.0, "eager": 100.0},
    }


def test_every_bar_holds_at_its_edge(overhead: ModuleType) -> None:
    found = overhead.findings(times())
    assert len(found) == len(overhead.BARS)
    assert all(holds for _, holds in found), found


@pytest.mark.parametrize("what", ["forward, no grad", "forward, grad", "forward + backward"])
def test_a_call_slower_than_quacks_fails(overhead: ModuleType, what: str) -> None:
    slow = times()
    slow[what]["ours"] = 20.1
    lines = [line for line, holds in overhead.findings(slow) if not holds]
    assert lines
    assert all(line.startswith(what) and line.endswith("FAILS") for line in lines)
    assert "1.005 of quack's 20.00" in lines[0]


def test_a_compiled_call_over_five_percent_fails(overhead: ModuleType) -> None:
    slow = times()
    slow["compiled forward"]["ours"] = 105.2
    assert [holds for _, holds in overhead.findings(slow)].count(False) == 1


def test_a_missing_peer_is_named_and_fails_nothing(overhead: ModuleType) -> None:
    without = {
        what: {who: us for who, us in row.items() if who != "quack"}
        for what, row in times().items()
    }
    found = overhead.findings(without)
    assert sum("quack is not installed" in line for line, _ in found) == 3
    assert all(holds for _, holds in found)


@pytest.mark.parametrize("command", ["overhead", "model", "whole_operator"])
def test_a_command_wants_a_gpu(command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"perf.{command}", "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
        env={"RMSNORM_RAW_BACKEND": "cpu", "PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 1
    assert f"perf.{command} needs a GPU" in done.stderr


@pytest.mark.parametrize("command", ["bars", "static_gate", "whole_operator"])
def test_each_option_of_a_command_has_a_help(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[argparse.Action] = []

    def parse(parser: argparse.ArgumentParser, *_: object) -> None:
        options.extend(parser._actions)
        raise SystemExit

    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(SystemExit):
        runpy.run_module(f"perf.{command}", run_name="__main__")
    assert len(options) > 2
    assert [option.dest for option in options if not option.help] == []


@pytest.mark.parametrize("backend", ["formula", "simulator"])
def test_a_model_trains_as_with_a_float32_norm(
    model: ModuleType, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """20 steps: closer to the reference than another seed by a factor of 20, and it learns."""
    monkeypatch.delenv("RMSNORM_RAW_BACKEND", raising=False)
    size = model.Size(
        width=64, hidden=128, heads=2, vocabulary=64, batch=2, length=16, learning_rate=3e-3
    )
    data = model.batches(size, STEPS)
    reference = model.train(model.FloatNorm, 0, size, data, "cpu")
    another = model.train(model.FloatNorm, 1, size, data, "cpu")
    if backend == "simulator":
        monkeypatch.setenv("RMSNORM_RAW_BACKEND", "cpu")
    ours = model.train(model.our_norm, 0, size, data, "cpu")
    assert model.distance(ours, reference) <= model.distance(another, reference) / 20
    assert ours[-1] < 0.8 * ours[0]

"""The static gate without AMD's compiler: what its table says, and how knobs are compared.

What it makes of real machine code, right and with planted faults, is in ``tests/gfx950``.
"""

from __future__ import annotations

import csv
import importlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from rmsnorm_raw.backends.static_gate import inert_knobs
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.space import enumerate_configs

ROOT = Path(__file__).resolve().parents[1]
GFX950 = KNOWN["gfx950"]
BACKWARD = Problem.backward(32768, 8192, "bf16")


def inert(digests: dict[str, str], problem: Problem = BACKWARD) -> list[str]:
    configs = {Config.parse(slug): digest for slug, digest in digests.items()}
    return inert_knobs(problem, GFX950, configs)


def test_a_knob_that_changes_no_code_is_inert() -> None:
    assert inert({"b512-pp-p1": "a", "b512-pp-ls-p1": "b"}) == []
    assert inert({"b512-pp-p1": "a", "b512-pp-ls-p1": "a"}) == [
        "load_policy is inert: b512-t512-v16-pp-p1 and b512-t512-v16-pp-ls-p1 do the same"
    ]


def test_only_neighbours_in_one_knob_are_compared() -> None:
    assert inert({"b512-pp-p1": "a", "b512-pp-ls-ss-p1": "a"}) == []
    # a third between them shows which knob does nothing
    (fault,) = inert({"b512-pp-p1": "a", "b512-pp-ls-p1": "b", "b512-pp-ls-ss-p1": "b"})
    assert fault.startswith("store_policy is inert")


def test_programs_are_the_grids_alone() -> None:
    assert inert({"b256-pp-p1": "a", "b256-pp-p2": "a"}) == []
    few = Problem.backward(16, 8192, "bf16")  # 16 rows are 16 blocks, whatever is allowed
    (fault,) = inert({"b256-pp-p1": "a", "b256-pp-p2": "a"}, few)
    assert fault.startswith("programs is inert")


# ---- the table of whole spaces -------------------------------------------------------------------


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """perf/static_gate.py."""
    monkeypatch.syspath_prepend(ROOT / "perf")
    return importlib.import_module("static_gate")


def test_configs_of_one_source_are_compiled_once(table: ModuleType) -> None:
    jobs = list(table.jobs([BACKWARD], "gfx950", ("7.0.0", "7.2.4")))
    kept = enumerate_configs(BACKWARD, GFX950).kept
    for release in ("7.0.0", "7.2.4"):
        configs = [config for job in jobs if job.release == release for config in job.configs]
        assert sorted(configs, key=str) == sorted(kept, key=str)
    for job in jobs:
        assert len({(it.slug.partition("-p")[0], it.path) for it in job.configs}) == 1
    assert len(jobs) < 2 * len(kept)


@pytest.fixture
def small(
    table: ModuleType, rocm_stand_in: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """One narrow problem, by a stand-in for the compiler and in this process."""
    monkeypatch.setattr(table, "PROBLEMS", (Problem.forward(64, 64, "bf16"),))
    monkeypatch.setattr(table, "fetch_wheel", lambda release: tmp_path / release)
    monkeypatch.setattr(table, "ProcessPoolExecutor", ThreadPoolExecutor)
    return tmp_path / "out"


def test_faults_are_in_the_table_and_in_the_exit_code(
    table: ModuleType, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table.main(["--out", str(small)]) == 1
    with (small / "gate.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    kept = enumerate_configs(table.PROBLEMS[0], GFX950).kept
    assert {row["config"] for row in rows} == {config.slug for config in kept}
    assert {row["rocm"] for row in rows} == {"7.0.0", "7.2.4"}
    assert {row["kernel"] for row in rows} == {"rmsnorm_forward"}
    assert all(
        row["vgpr"] == "64" and "the code object is not for" in row["verdict"] for row in rows
    )
    facts = json.loads((small / "environment.json").read_text(encoding="utf-8"))
    assert facts["compilers"] == ["hiprtc of ROCm 7.0.0", "hiprtc of ROCm 7.2.4"]
    assert facts["compilations"] == 2 * len(kept)
    assert "b64-t8-v16-reg" in "".join(facts["faults"])
    assert f"{len(rows)} rows, {len(facts['faults'])} faults" in capsys.readouterr().out


def test_a_space_without_faults_passes(
    table: ModuleType, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "gate", lambda *_: [])
    monkeypatch.setattr(table, "inert_knobs", lambda *_: [])
    assert table.main(["--out", str(small)]) == 0
    assert json.loads((small / "environment.json").read_text(encoding="utf-8"))["faults"] == []

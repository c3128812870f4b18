"""compute-sanitizer over a grid of small problems: memory, races, uninitialised reads, barriers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rmsnorm_raw.backends import Backend

pytestmark = pytest.mark.gpu
TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_a_tool_finds_nothing(tool: str, gpu: Backend) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), *sys.path])
    run = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable,
         str(TESTS / "gpu" / "small_cells.py")],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    summary = "RACECHECK SUMMARY: 0 hazards" if tool == "racecheck" else "ERROR SUMMARY: 0 errors"
    assert summary in run.stdout + run.stderr
    assert run.stdout.count("forward ") + run.stdout.count("backward ") >= 30

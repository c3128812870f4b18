"""The suites of perf/ for tests: their modules, and what they use of pytest-benchmark's fixture."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

PERF = Path(__file__).resolve().parents[1] / "perf"


@functools.cache
def suite(name: str) -> ModuleType:
    """A module of perf/, which is on sys.path; its conftest by another name than that of tests/."""
    if name != "conftest":
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("perf_conftest", PERF / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Bench:
    """pytest-benchmark's fixture as far as a session uses it; it knows no calibration.

    Attributes:
        asked: the rounds of each run.
    """

    enabled = True
    has_error = False

    def __init__(self, timer: Callable[[], Any]) -> None:
        self.timer = timer
        self.asked: list[int] = []
        self.extra_info: dict[str, Any] = {}
        self.stats = SimpleNamespace(stats=SimpleNamespace(data=[]))

    def pedantic(self, target: Any, *, setup: Any, rounds: int) -> None:
        self.asked.append(rounds)
        for _ in range(rounds):
            args, kwargs = setup()
            start = self.timer()
            target(*args, **kwargs)
            self.stats.stats.data.append(self.timer() - start)

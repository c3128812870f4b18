"""Kernels by AMD's compiler, kept, so that tests can share them."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from rmsnorm_raw.backends.kernel_report import KernelReport
from rmsnorm_raw.backends.offline import OfflineCode, compile_offline
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render

Edits = tuple[tuple[str, str], ...]  # (old, new) of a kernel's text


@functools.cache
def compiled(
    problem: Problem, arch: str, libraries: Path, slug: str | None = None
) -> tuple[Config, OfflineCode]:
    """A config, by default the ladder's, and what a ROCm makes of it."""
    device = KNOWN[arch]
    config = Config.parse(slug) if slug else default_config(problem, device)
    return config, compile_offline(render(problem, config, device), arch, libraries=libraries)


def edited(
    problem: Problem, slug: str, arch: str, libraries: Path, edits: Edits
) -> tuple[Config, OfflineCode]:
    """A config, and what a ROCm makes of its text after some replacements."""
    config = Config.parse(slug)
    source = render(problem, config, KNOWN[arch])
    text = source.text
    for old, new in edits:
        assert text.count(old) == 1, f"the text has changed, plant this fault anew: {old}"
        text = text.replace(old, new)
    return config, compile_offline(replace(source, text=text), arch, libraries=libraries)


def rows_kernel(code: OfflineCode) -> KernelReport:
    """The kernel that stores the rows: y, or dx."""
    names = ("rmsnorm_forward", "rmsnorm_backward", "rmsnorm_backward_columns")
    return next(code.kernels[name] for name in names if name in code.kernels)

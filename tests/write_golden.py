"""Rewrites tests/golden after an intended change of the kernel text."""

from __future__ import annotations

from pathlib import Path

from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.kernels import (
    backward,
    backward_two_pass,
    blocks,
    extras,
    finish,
    forward,
    pace,
    prelude,
    ring,
    rows,
)
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render

GOLDEN = Path(__file__).parent / "golden"

if __name__ == "__main__":
    for module in (
        prelude, rows, extras, blocks, ring, pace, finish, forward, backward, backward_two_pass,
    ):  # fmt: skip
        name = module.__name__.rsplit(".", 1)[1]
        (GOLDEN / f"{name}.hip").write_text(module.TEXT)
    problem = Problem.backward(32768, 8192, "bf16", weight_dtype="fp32")
    source = render(problem, Config.parse("b512-t256-v16-ls-p2"), KNOWN["gfx950"])
    lines = "".join(f"{name}={value}\n" for name, value in source.defines)
    (GOLDEN / "backward_defines.txt").write_text(lines)

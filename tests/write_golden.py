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

MODULES = (
    prelude, rows, extras, blocks, ring, pace, finish, forward, backward, backward_two_pass,
)  # fmt: skip
#: by the name of a module of kernels
TEXTS: dict[str, str] = {module.__name__.rsplit(".", 1)[1]: module.TEXT for module in MODULES}


def backward_defines() -> str:
    """A line for each define of a backward."""
    problem = Problem.backward(32768, 8192, "bf16", weight_dtype="fp32")
    source = render(problem, Config.parse("b512-t256-v16-ls-p2"), KNOWN["gfx950"])
    return "".join(f"{name}={value}\n" for name, value in source.defines)


if __name__ == "__main__":
    for name, text in TEXTS.items():
        (GOLDEN / f"{name}.hip").write_text(text)
    (GOLDEN / "backward_defines.txt").write_text(backward_defines())

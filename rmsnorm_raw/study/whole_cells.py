"""Cells of the whole operator: what is compared beside the study's 90.

Residual add and norm, their backward, a norm of each head of a packed qkv, and 8-bit outputs; the
plain operation at the same shapes beside them. All read one layout: x of the heads is a view into
the packed tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rmsnorm_raw.backends import Backend
from rmsnorm_raw.extras import Scale
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.study.tensors import Cloned

ROWS, WIDTHS = 32768, (1024, 2048, 4096, 8192)
FP8_WIDTHS = (4096, 8192)
#: queries of a model with 8 heads for keys and 8 for values beside them
TOKENS, HEADS, PACKED_HEADS, HEAD_COLS = 8192, 32, 48, 128
#: rows, or tokens, of a cell on the simulator
SIMULATED_ROWS = 12
FP8 = "float8_e4m3fn"


@dataclass(frozen=True)
class WholeCell(Cloned):
    """One comparison.

    Attributes:
        name: in tables and test ids, e.g. "residual-forward-32768x1024".
        problem: the operation.
        backend: see :class:`.tensors.Cloned`, and so for stream and packed_heads.
    """

    name: str
    problem: Problem
    backend: Backend
    stream: int = 0
    packed_heads: int = 0

    @property
    def kind(self) -> str:
        """The name without its shape."""
        return self.name.rpartition("-")[0]

    def __str__(self) -> str:
        return self.name


def whole_cells(backend: Backend, stream: int = 0) -> tuple[WholeCell, ...]:
    """The cells on a backend; on the simulator with :data:`SIMULATED_ROWS` rows or tokens."""
    found = []
    for kind, problem in _problems():
        heads = problem.extras.heads
        shape = (problem.tokens, heads, problem.cols) if heads > 1 else (problem.rows, problem.cols)
        name = f"{kind}-{'x'.join(map(str, shape))}"
        if backend.device.simulated:
            problem = replace(problem, rows=SIMULATED_ROWS * heads)
        packed_heads = PACKED_HEADS if heads > 1 else 0
        found.append(WholeCell(name, problem, backend, stream, packed_heads))
    return tuple(found)


def _problems() -> Iterator[tuple[str, Problem]]:
    """(kind, problem) of every cell."""
    forward, backward = Problem.forward, Problem.backward
    for cols in WIDTHS:
        yield "residual-forward", forward(ROWS, cols, "bf16", residual_dtype="bf16")
        yield "residual-backward", backward(ROWS, cols, "bf16", dresidual_out_dtype="bf16")
    rows = TOKENS * HEADS
    yield "heads-forward", forward(rows, HEAD_COLS, "bf16", heads=HEADS, per_head=True)
    yield "heads-backward", backward(rows, HEAD_COLS, "bf16", heads=HEADS, per_head=True)
    scales: tuple[Scale, ...] = ("dynamic", "static")
    for cols, scale in itertools.product(FP8_WIDTHS, scales):
        plain = forward(ROWS, cols, "bf16", out_dtype=FP8, scale=scale)
        yield f"fp8-{scale}", plain
        more = replace(plain.extras, residual_dtype="bfloat16", residual_out_dtype="bfloat16")
        yield f"fp8-{scale}-residual", replace(plain, extras=more)
    for cols in WIDTHS:
        yield "plain-forward", forward(ROWS, cols, "bf16")
        yield "plain-backward", backward(ROWS, cols, "bf16")

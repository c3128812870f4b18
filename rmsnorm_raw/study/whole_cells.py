"""Cells of the whole operator: what is compared beside the study's 90, and its tensors.

Residual add and norm, their backward, a norm of each head of a packed qkv, and 8-bit outputs; the
plain operation at the same shapes beside them. Tensors are torch's, clones that calls rotate over,
the same for ours and for every peer, so that all read one layout: x of the heads is a view into
the packed tensor. Outputs of ours are beside them; a peer allocates its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rmsnorm_raw import check
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.clones import clone_count
from rmsnorm_raw.extras import Scale
from rmsnorm_raw.launch import Tensor
from rmsnorm_raw.problem import MATRICES, Operand, Problem
from rmsnorm_raw.study import peer_gate

ROWS, WIDTHS = 32768, (1024, 2048, 4096, 8192)
FP8_WIDTHS = (4096, 8192)
#: queries of a model with 8 heads for keys and 8 for values beside them
TOKENS, HEADS, PACKED_HEADS, HEAD_COLS = 8192, 32, 48, 128
#: rows, or tokens, of a cell on the simulator
SIMULATED_ROWS = 12
FP8 = "float8_e4m3fn"
STATIC_SCALE = 0.0185  # the largest y, some 8, becomes some 448

Tensors = dict[str, Any]  # torch's, by name


@dataclass(frozen=True)
class WholeCell:
    """One comparison.

    Attributes:
        name: in tables and test ids, e.g. "residual-forward-32768x1024".
        problem: the operation.
        backend: where it runs.
        stream: the raw stream of all calls.
        packed_heads: heads of a token in the tensor that x is sliced out of; 0 where x is dense.
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

    @functools.cached_property
    def inputs(self) -> tuple[Tensors, ...]:
        """What is read, a clone each, all alike.

        Draws of one seed: x, residual and dresidual_out normal, the weight about 1, dout with half
        of x in it, without which dx's row term would vanish in the noise; rstd is x's.
        """
        import torch

        first = {each.name: self._empty(each) for each in self.problem.inputs}
        draw = torch.Generator(self._where).manual_seed(0)
        for name, tensor in first.items():
            if name == "scale":
                tensor.fill_(STATIC_SCALE)
            elif name != "rstd":
                tensor.normal_(generator=draw)
        if "weight" in first:
            first["weight"].mul_(0.125).add_(1.0)
        if "dout" in first:
            first["dout"].add_(first["x"], alpha=0.5)
        if "rstd" in first:
            square = first["x"].float().square().mean(-1) + self.problem.eps
            first["rstd"].copy_(square.rsqrt())
        others = [
            {each.name: self._empty(each) for each in self.problem.inputs}
            for _ in range(1, self.clones)
        ]
        for clone in others:
            for name, tensor in clone.items():
                tensor.copy_(first[name])
        return (first, *others)

    @functools.cached_property
    def outputs(self) -> tuple[Tensors, ...]:
        """Where ours writes, a clone each."""
        return tuple(
            {each.name: self._empty(each) for each in self.problem.outputs}
            for _ in range(self.clones)
        )

    @property
    def clones(self) -> int:
        """How many: together they exceed three last-level caches."""
        return clone_count(self.backend.device, self.problem.logical_bytes())

    @property
    def _where(self) -> str:
        return "cpu" if self.backend.device.simulated else "cuda"

    def _empty(self, operand: Operand) -> Any:
        """A tensor of an operand, in the shape that torch's users give it."""
        import torch

        problem, heads = self.problem, self.problem.extras.heads
        shape: tuple[int, ...] = (operand.rows * operand.cols,)
        if operand.is_matrix:
            shape = (problem.rows, problem.cols)
            if heads > 1:
                shape = (problem.tokens, heads, problem.cols)
        elif heads > 1 and operand.cols > 1:
            shape = (heads, problem.cols)
        elif heads > 1 and operand.rows > 1:
            shape = (problem.tokens, heads)
        make = functools.partial(
            torch.empty, dtype=getattr(torch, operand.dtype), device=self._where
        )
        if operand.name == "x" and self.packed_heads:
            packed = make((problem.tokens, self.packed_heads * problem.cols))
            return packed[:, : heads * problem.cols].unflatten(1, (heads, problem.cols))
        return make(shape)

    def judge(self, results: Mapping[str, Any]) -> check.Verdict:
        """The peers' gate on what was computed from the first clone."""
        clone, untouched = self.inputs[:2]
        return peer_gate.judge(self.problem, clone, untouched, results)


def placed(problem: Problem, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Where torch's tensors of a problem lie, as a plan takes it."""
    found = {}
    for name, tensor in tensors.items():
        strides: Sequence[int] = ()
        if name in MATRICES:
            strides = tensor.stride()[: 2 if problem.extras.heads > 1 else 1]
        found[name] = Tensor(tensor.data_ptr(), *strides)
    return found


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

"""A problem's tensors in torch, clones that calls rotate over, the same for ours and every peer."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from rmsnorm_raw import check
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.clones import clone_count
from rmsnorm_raw.launch import Tensor
from rmsnorm_raw.problem import MATRICES, Operand, Problem
from rmsnorm_raw.study import peer_gate

#: of the data that is in them
SEED = 0

Tensors = dict[str, Any]  # torch's, by name


class Cloned:
    """What has a problem's tensors in torch, and the peers' gate on them.

    Attributes:
        problem: the operation.
        backend: where it runs.
        stream: the raw stream of all calls; :func:`.providers.current_stream` says torch's.
        packed_heads: heads of a token in the tensor that x is sliced out of; 0 where x is dense.
    """

    problem: Problem
    backend: Backend
    stream: int
    packed_heads: int = 0

    @functools.cached_property
    def inputs(self) -> tuple[Tensors, ...]:
        """What is read, a clone each, all alike: the gate's data."""
        first, *others = self._clones(self.problem.inputs)
        place = placed(self.problem, first)
        check.write_inputs(self.problem, self.backend, place, SEED, self.stream)
        for clone in others:
            for name, tensor in clone.items():
                tensor.copy_(first[name])
        return (first, *others)

    @functools.cached_property
    def outputs(self) -> tuple[Tensors, ...]:
        """Where ours writes, a clone each; a peer allocates its own."""
        return self._clones(self.problem.outputs)

    def judge(self, results: Mapping[str, Any]) -> check.Verdict:
        """The peers' gate on what was computed from the first clone, by the outputs' names."""
        clone, untouched = self.inputs[:2]
        return peer_gate.judge(self.problem, clone, untouched, results)

    def _clones(self, operands: Sequence[Operand]) -> tuple[Tensors, ...]:
        count = clones(self.problem, self.backend)
        return tuple({each.name: self._empty(each) for each in operands} for _ in range(count))

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
        where = "cpu" if self.backend.device.simulated else "cuda"
        make = functools.partial(torch.empty, dtype=getattr(torch, operand.dtype), device=where)
        if operand.name == "x" and self.packed_heads:
            packed = make((problem.tokens, self.packed_heads * problem.cols))
            return packed[:, : heads * problem.cols].unflatten(1, (heads, problem.cols))
        return make(shape)


def clones(problem: Problem, backend: Backend) -> int:
    """How many clones: together they exceed three last-level caches."""
    return clone_count(backend.device, problem.logical_bytes())


def placed(problem: Problem, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Where torch's tensors of a problem lie, as a plan takes it."""
    found = {}
    for name, tensor in tensors.items():
        strides: Sequence[int] = ()
        if name in MATRICES:
            strides = tensor.stride()[: 2 if problem.extras.heads > 1 else 1]
        found[name] = Tensor(tensor.data_ptr(), *strides)
    return found

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

#: of the data that is in them
SEED = 0

Tensors = dict[str, Any]  # torch's, by name


def clones(problem: Problem, backend: Backend) -> int:
    """How many clones: together they exceed three last-level caches."""
    return clone_count(backend.device, problem.logical_bytes())


def inputs(
    problem: Problem, backend: Backend, stream: int = 0, packed_heads: int = 0
) -> tuple[Tensors, ...]:
    """What is read, a clone each, all alike: the gate's data.

    Args:
        problem: whose inputs.
        backend: where they lie.
        stream: a raw handle; :func:`.providers.current_stream` says torch's.
        packed_heads: heads of a token in the tensor that x is sliced out of; 0 where x is dense.
    """
    make = functools.partial(_empty, problem, backend, packed_heads)
    first, *others = (
        {each.name: make(each) for each in problem.inputs} for _ in range(clones(problem, backend))
    )
    check.write_inputs(problem, backend, placed(problem, first), SEED, stream)
    for clone in others:
        for name, tensor in clone.items():
            tensor.copy_(first[name])
    return (first, *others)


def outputs(problem: Problem, backend: Backend) -> tuple[Tensors, ...]:
    """Where ours writes, a clone each."""
    make = functools.partial(_empty, problem, backend, 0)
    return tuple(
        {each.name: make(each) for each in problem.outputs} for _ in range(clones(problem, backend))
    )


def placed(problem: Problem, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Where torch's tensors of a problem lie, as a plan takes it."""
    found = {}
    for name, tensor in tensors.items():
        strides: Sequence[int] = ()
        if name in MATRICES:
            strides = tensor.stride()[: 2 if problem.extras.heads > 1 else 1]
        found[name] = Tensor(tensor.data_ptr(), *strides)
    return found


def _empty(problem: Problem, backend: Backend, packed_heads: int, operand: Operand) -> Any:
    """A tensor of an operand, in the shape that torch's users give it."""
    import torch

    heads = problem.extras.heads
    shape: tuple[int, ...] = (operand.rows * operand.cols,)
    if operand.is_matrix:
        shape = (problem.rows, problem.cols)
        if heads > 1:
            shape = (problem.tokens, heads, problem.cols)
    elif heads > 1 and operand.cols > 1:
        shape = (heads, problem.cols)
    elif heads > 1 and operand.rows > 1:
        shape = (problem.tokens, heads)
    where = "cpu" if backend.device.simulated else "cuda"
    make = functools.partial(torch.empty, dtype=getattr(torch, operand.dtype), device=where)
    if operand.name == "x" and packed_heads:
        packed = make((problem.tokens, packed_heads * problem.cols))
        return packed[:, : heads * problem.cols].unflatten(1, (heads, problem.cols))
    return make(shape)

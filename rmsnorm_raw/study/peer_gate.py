"""The peers' gate: relative L2 errors against float64, and inputs left as they were.

Our own gate would refuse correct peers, which round twice in places; this one takes whatever
computes a problem on torch's tensors, from the plain operation to heads, residuals and 8-bit y.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rmsnorm_raw.check import Verdict
from rmsnorm_raw.dtypes import LARGEST_FP8
from rmsnorm_raw.extras import LEAST_SCALE
from rmsnorm_raw.problem import Problem

#: relative L2 error of an output, at most: about twice that of one rounding
LIMITS = {"bfloat16": 3e-3, "float16": 4e-4, "float32": 1e-6} | dict.fromkeys(LARGEST_FP8, 5e-2)
#: elements that are worked on at a time, in several float64 temporaries
GATE_ELEMENTS = 1 << 24

Tensors = Mapping[str, Any]  # torch's, by name


def judged(problem: Problem) -> tuple[str, ...]:
    """The outputs that are asked for: all but rstd, which of Liger's sum is the rounded sum's."""
    return tuple(each.name for each in problem.outputs if each.name != "rstd")


def judge(problem: Problem, clone: Tensors, untouched: Tensors, results: Tensors) -> Verdict:
    """Whether the results of one clone of a problem's inputs are right.

    Args:
        problem: what is computed: it has a weight, and no bias, offset or casting.
        clone: the inputs that were worked on, matrices of (rows, cols), or (tokens, heads, cols).
        untouched: the same inputs in a clone that was not.
        results: outputs by name; those that :func:`judged` does not name are left alone.
    """
    import torch

    dtypes = {each.name: each.dtype for each in problem.outputs}
    limits = {name: LIMITS[dtypes[name]] for name in judged(problem)}
    if "dweight" in limits:  # as coarse as the activations
        limits["dweight"] = max(limits["dweight"], LIMITS[problem.dtype])
    errors = _relative_errors(problem, clone, results)
    faults = [
        f"relative L2 error of {name} is {error:.3g}, over {limits[name]:.3g}"
        for name, error in errors.items()
        if not error <= limits[name]  # a NaN is over it too
    ]
    faults += [
        f"{name} was written, and it is an input"
        for name, tensor in clone.items()
        if not torch.equal(tensor, untouched[name])
    ]
    worst = {name: error / limits[name] for name, error in errors.items()}
    return Verdict(not faults, worst, seed=0, message="; ".join(faults))


def _relative_errors(problem: Problem, inputs: Tensors, results: Tensors) -> dict[str, float]:
    sums = {name: [0.0, 0.0] for name in judged(problem)}  # squares of errors, of what is right

    def add(name: str, got: Any, want: Any) -> None:
        sums[name][0] += float((got - want).square().sum())
        sums[name][1] += float(want.square().sum())

    right = _forward if problem.op == "forward" else _backward
    dweight: Any = 0.0
    for rows in _blocks(inputs["x"]):
        want = right(problem, {n: t[rows] if _has_rows(n) else t for n, t in inputs.items()})
        dweight = dweight + want.pop("dweight", 0.0)
        divisor = want.pop("divisor", 1.0)
        for name in sums.keys() & want.keys():
            got = results[name][rows].reshape(want[name].shape)
            add(name, _wide(got) * (divisor if name == "y" else 1.0), want[name])
    if "dweight" in sums:
        add("dweight", results["dweight"].double(), dweight)
    return {name: math.sqrt(error / norm) for name, (error, norm) in sums.items()}


def _blocks(x: Any) -> Iterator[slice]:
    step = max(1, GATE_ELEMENTS // x[0].numel())
    yield from (slice(start, start + step) for start in range(0, x.shape[0], step))


def _has_rows(name: str) -> bool:
    return name not in ("weight", "scale")


def _wide(tensor: Any) -> Any:
    return (tensor.float() if tensor.element_size() == 1 else tensor).double()


def _forward(problem: Problem, t: Tensors) -> dict[str, Any]:
    """What is right in float64; y as it is before it is divided by the scale."""
    x, largest = t["x"].double(), LARGEST_FP8.get(problem.out_dtype, 1.0)
    h = x + t["residual"].double() if "residual" in t else x
    y = h * (h.square().mean(-1, keepdim=True) + problem.eps).rsqrt() * t["weight"].double()
    found = {"y": y, "residual_out": h}
    if problem.extras.scale == "dynamic":
        scale = (y.abs().amax(-1, keepdim=True) / largest).clamp(min=LEAST_SCALE)
        found |= {"scale": scale, "divisor": scale}
    elif problem.extras.scale == "static":
        scale = t["scale"].double()
        found |= {"y": y.clamp(-largest * scale, largest * scale), "divisor": scale}
    return found


def _backward(problem: Problem, t: Tensors) -> dict[str, Any]:
    """What is right in float64; of dweight the part of these rows."""
    x, dout = t["x"].double(), t["dout"].double()
    rstd = (x.square().mean(-1, keepdim=True) + problem.eps).rsqrt()
    xhat, g = x * rstd, dout * t["weight"].double()
    dx = (g - xhat * (g * xhat).mean(-1, keepdim=True)) * rstd
    if "dresidual_out" in t:
        dx += t["dresidual_out"].double()
    return {"dx": dx, "dweight": (dout * xhat).sum(0)}

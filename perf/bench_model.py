"""Device time of a Llama block, forward and backward, by whose norm it has.

The block is that of ``python -m perf.model``. Its norms are a small part of it: what a faster norm
is worth in a model is read here, and not in the cells.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from rmsnorm_raw import workbench
from rmsnorm_raw.problem import Problem

torch = pytest.importorskip("torch", reason="the block is torch's: pip install torch")

import model  # noqa: E402 - it wants torch

#: provider -> (its module, the class of its norm)
NORMS = {
    "ours": ("rmsnorm_raw.nn", "RMSNorm"),
    "quack": ("quack.rmsnorm", "QuackRMSNorm"),
    "liger": ("liger_kernel.transformers", "LigerRMSNorm"),
    "torch": ("torch.nn", "RMSNorm"),
    "float32": ("model", "FloatNorm"),
}
CONTESTS = {"llama-block": tuple(NORMS)}
ON_DEVICE = True
SIZE = model.Size(width=4096, hidden=14336, heads=32, layers=1, batch=2, length=2048)
SIMULATED_SIZE = model.Size(width=256, hidden=256, heads=2, layers=1, batch=1, length=8)
#: an error may be so many times that of the block with a float32 norm
MOST_ERROR = 1.5


def test_block(contest: str, benchmark: Any, session: Any) -> None:
    module, name = NORMS[contest]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        benchmark.skipped = True
        pytest.skip(f"{contest} is not installed")
    size = SIMULATED_SIZE if session.simulated else SIZE
    where = "cpu" if session.simulated else "cuda"
    arguments = (size.width,) if contest == "float32" else (size.width, model.EPS)
    norm = functools.partial(getattr(importlib.import_module(module), name), *arguments)
    torch.manual_seed(1)
    shape = (size.batch, size.length, size.width)
    x, dout = (torch.randn(shape, device=where, dtype=torch.bfloat16) for _ in range(2))
    step = step_of(block(size, lambda width: norm(), where), x, dout)
    require_right(step(), size, where, x, dout)
    session.time(benchmark, [step])
    rows = size.batch * size.length
    problems = [make(rows, size.width, "bf16") for make in (Problem.forward, Problem.backward)]
    slugs = [workbench.default_config(it, session.backend.device).slug for it in problems]
    # the block's time is not its norms', so there is no speed
    session.note(
        benchmark, contest, module, " ".join(slugs) if contest == "ours" else "",
        moved_bytes=2 * sum(problem.logical_bytes() for problem in problems),
    )  # fmt: skip


def block(size: model.Size, norm: Callable[[int], Any], where: str) -> Any:
    """A layer with the weights that every contest has."""
    torch.manual_seed(0)
    return model.Layer(size, norm).to(where, torch.bfloat16)


def step_of(layer: Any, x: Any, dout: Any) -> Callable[[], tuple[Any, ...]]:
    """Forward and backward: y, and the gradients of x and of both norms' weights."""
    leaf = x.detach().clone().requires_grad_()
    wanted = [leaf, layer.before_attention.weight, layer.before_mlp.weight]
    others = [each for each in layer.parameters() if all(each is not it for it in wanted)]

    def step() -> tuple[Any, ...]:
        y = layer(leaf)
        gradients = torch.autograd.grad(y, [*wanted, *others], dout)
        return (y.detach(), *gradients[: len(wanted)])

    return step


def require_right(found: tuple[Any, ...], size: model.Size, where: str, x: Any, dout: Any) -> None:
    """As near to float64 as the block with a float32 norm is, or it gets no time."""
    reference = block(size, model.FloatNorm, where)
    near = step_of(reference, x, dout)()
    exact = step_of(reference.double(), x.double(), dout.double())()
    for got, usual, right in zip(found, near, exact, strict=True):
        error, most = (float((it.double() - right).norm() / right.norm()) for it in (got, usual))
        assert error <= MOST_ERROR * most, f"error {error:.3g}, with a float32 norm {most:.3g}"

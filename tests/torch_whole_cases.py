"""Calls of rmsnorm_raw.nn with extras, held against float64: for a CPU and for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch_cases as plain

from rmsnorm_raw import bounds

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS, COLS = 1e-6, plain.COLS
LAYOUTS = {
    **plain.LAYOUTS,
    "one head of several": lambda make: make(2, 5, 3, COLS)[:, :4, 1:2],
}


@dataclass(frozen=True)
class Case:
    """What a call is asked for.

    Attributes:
        dtype: of x.
        weight_dtype: None for no weight.
        bias_dtype: None for no bias.
        residual: its dtype; None for none.
        more: what else is given by name.
        layout: of x, dout and the residual, in :data:`LAYOUTS`.
    """

    dtype: torch.dtype = BF16
    weight_dtype: torch.dtype | None = FP32
    bias_dtype: torch.dtype | None = None
    residual: torch.dtype | None = None
    more: dict[str, Any] = field(default_factory=dict)
    layout: str = "matrix"

    def __str__(self) -> str:
        named = [f"{k}={v}" for k, v in self.more.items()]
        dtypes = [self.dtype, self.weight_dtype, self.bias_dtype, self.residual]
        parts = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        return "-".join([*parts, *named, self.layout]).replace("torch.", "")


CASES = [
    Case(bias_dtype=FP32),
    Case(BF16, BF16, BF16),
    Case(weight_dtype=None, bias_dtype=FP16),
    Case(residual=BF16),
    Case(residual=BF16, more={"prenorm": True}),
    Case(residual=FP32, more={"prenorm": True}),
    Case(BF16, BF16, residual=BF16, more={"prenorm": True, "residual_dtype": FP32}),
    Case(FP16, FP16, residual=FP32, more={"prenorm": True, "residual_dtype": BF16}),
    Case(FP32, FP32, residual=BF16, more={"prenorm": True}),
    Case(more={"prenorm": True}),
    Case(more={"prenorm": True, "residual_dtype": FP32}),
    Case(weight_dtype=None, residual=BF16, more={"prenorm": True}),
    Case(BF16, BF16, more={"weight_offset": 1.0, "casting": "gemma"}),
    Case(BF16, BF16, more={"casting": "llama"}),
    Case(FP16, FP32, more={"casting": "llama", "out_dtype": FP32}),
    Case(more={"out_dtype": FP32}),
    Case(FP32, BF16, more={"out_dtype": BF16}),
    Case(FP16, FP32, BF16, BF16, {
        "prenorm": True, "residual_dtype": FP32, "out_dtype": BF16, "weight_offset": -0.5,
    }),
    *(
        Case(BF16, FP32, FP32, BF16, {"prenorm": True}, layout)
        for layout in plain.LAYOUTS if layout != "matrix"
    ),
    Case(layout="heads of packed qkv", more={"per_head": True}),
    Case(bias_dtype=BF16, layout="heads of packed qkv", more={"per_head": True}),
    Case(layout="no common stride", more={"per_head": True, "weight_offset": 1.0}),
    Case(BF16, BF16, BF16, FP32, {"per_head": True, "prenorm": True}, "5-D"),
    Case(layout="transposed", more={"per_head": True}),
    Case(layout="no rows", more={"per_head": True}),
    Case(BF16, FP32, FP32, more={"per_head": True}, layout="one head of several"),
]  # fmt: skip


@dataclass
class Made:
    """A case's tensors; all but the gradients want gradients."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    dout: Tensor
    dresidual_out: Tensor | None

    @property
    def leaves(self) -> list[Tensor]:
        """Those that are there, in the order of :func:`gradients`."""
        return [t for t in (self.x, self.weight, self.bias, self.residual) if t is not None]


def made(case: Case, device: str) -> Made:
    """The tensors of a case; x and the residual differ, also where a layout repeats a row."""

    def matrix(dtype: torch.dtype, seed: int) -> Tensor:
        return LAYOUTS[case.layout](plain.maker(dtype, device, seed)).detach()

    x = matrix(case.dtype, 0)
    lists = x.shape[-2:] if case.more.get("per_head") else x.shape[-1:]

    def columns(dtype: torch.dtype | None, seed: int, base: float) -> Tensor | None:
        if dtype is None:
            return None
        return (base + 0.1 * plain.maker(dtype, device, seed)(*lists)).detach()

    residual = None if case.residual is None else matrix(case.residual, 3)
    tensors = Made(
        x, columns(case.weight_dtype, 1, 1 - case.more.get("weight_offset", 0.0)),
        columns(case.bias_dtype, 2, 0.0), residual,
        matrix(case.more.get("out_dtype", case.dtype), 4), None,
    )  # fmt: skip
    if case.more.get("prenorm"):
        own = x.dtype if residual is None else residual.dtype
        tensors.dresidual_out = matrix(case.more.get("residual_dtype", own), 5)
    for leaf in tensors.leaves:
        leaf.requires_grad_()
    return tensors


def called(function: Callable[..., Any], case: Case, given: Made) -> tuple[Tensor, Tensor | None]:
    """(y, residual_out) of a function like rms_norm."""
    results = function(
        given.x, given.weight, EPS, bias=given.bias, residual=given.residual, **case.more
    )
    return results if case.more.get("prenorm") else (results, None)


def gradients(case: Case, given: Made, y: Tensor, residual_out: Tensor | None) -> list[Tensor]:
    """Of x and what there is of weight, bias and residual."""
    outputs, grads = [y], [given.dout]
    if residual_out is not None:
        outputs.append(residual_out)
        grads.append(given.dresidual_out)
    return list(torch.autograd.grad(outputs, given.leaves, grads))


def check(function: Callable[..., Any], case: Case, device: str) -> None:
    """All results of a case are right, and no input is written."""
    given = made(case, device)
    inputs = [*given.leaves, given.dout]
    before = [plain.bits(tensor) for tensor in inputs]
    y, residual_out = called(function, case, given)
    grads = gradients(case, given, y, residual_out)
    for tensor, was in zip(inputs, before, strict=True):
        assert np.array_equal(plain.bits(tensor), was), "an input was written"
    for got, leaf in zip(grads, given.leaves, strict=True):
        assert (got.dtype, got.shape) == (leaf.dtype, leaf.shape)
    h, rstd = check_forward(case, given, y, residual_out)
    if not given.x.numel():
        assert not any(grad.any() for grad in grads)
        return
    check_backward(case, given, h, rstd, grads)


def check_forward(
    case: Case, given: Made, y: Tensor, residual_out: Tensor | None
) -> tuple[np.ndarray, np.ndarray]:
    """(h as it is kept for backward, rstd), after y and residual_out are held."""
    x, residual = given.x, given.residual
    assert y.dtype == case.more.get("out_dtype", x.dtype)
    assert (y.shape, y.is_contiguous()) == (x.shape, True)
    own = x.dtype if residual is None else residual.dtype
    h_dtype = case.more.get("residual_dtype", own) if residual is not None else x.dtype
    total = x.detach().float() + (0 if residual is None else residual.detach().float())
    if residual_out is not None:
        assert residual_out.dtype == case.more.get("residual_dtype", own)
        assert plain.same(residual_out, total.to(residual_out.dtype)), "not rounded once"
    exact = plain.wide(total)
    if not exact.size:
        return exact, exact
    rstd = 1 / np.sqrt(np.square(exact).mean(axis=1) + EPS)
    is_cast = case.more.get("casting") == "llama"
    wanted = bounds.y_and_scale(
        exact, weights(case, given), rstd, bias=lists(case, given, given.bias),
        cast=str(x.dtype).removeprefix("torch.") if is_cast else None, factor=factor("y"),
    )  # fmt: skip
    plain.check("y", y, *wanted)
    return plain.wide(total.to(h_dtype)), rstd


def check_backward(
    case: Case, given: Made, h: np.ndarray, rstd: np.ndarray, grads: Sequence[Tensor]
) -> None:
    """Hold the gradients."""
    left = list(grads)
    dx = left.pop(0)
    d, w = plain.wide(given.dout), weights(case, given)
    terms = bounds.row_terms(bounds.row_sums(d, h, w), h.shape[1], EPS)
    terms = terms * (rstd / terms[0])  # rstd is that of the sum before it was rounded
    extra = None if given.dresidual_out is None else plain.wide(given.dresidual_out)
    wanted = bounds.dx_and_scale(d, h, w, terms, extra)
    plain.check("dx", dx, *wanted)
    products = d * h * rstd[:, None]
    for name, tensor, terms_of in (("dweight", given.weight, products), ("dbias", given.bias, d)):
        if tensor is not None:
            got = left.pop(0)
            per = tensor.shape[0] if case.more.get("per_head") else 1
            of_head = terms_of.reshape(-1, per, h.shape[1])
            plain.check(
                name, got.reshape(per, -1), of_head.sum(axis=0), np.abs(of_head).sum(axis=0)
            )
    if given.residual is not None:
        plain.check("dresidual", left.pop(0), *wanted)
    assert not left


def factor(output: str) -> float:
    return bounds.bound_factor(output, plain.CHAIN)


def weights(case: Case, given: Made) -> Any:
    """weight + weight_offset for each row."""
    if given.weight is None:
        return None
    return lists(case, given, given.weight) + case.more.get("weight_offset", 0.0)


def lists(case: Case, given: Made, tensor: Tensor | None) -> Any:
    """A weight or bias for each row, by its head."""
    if tensor is None:
        return None
    wide = plain.wide(tensor)
    if not case.more.get("per_head"):
        return wide[0]
    rows = given.x.numel() // given.x.shape[-1]
    return np.tile(wide, (rows // len(wide), 1))

"""Calls of rmsnorm_raw.nn in many layouts, held against float64: for a CPU and for a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from library_arrays import bits

from rmsnorm_raw import bounds

Tensor = torch.Tensor

PAIRS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
]
#: S and D of the bounds, over what the kernels' chains are at these sizes
CHAIN = 64
EPS = 1e-6
COLS = 96

Make = Callable[..., Tensor]
#: x of each layout, from a function that makes random tensors of a shape
LAYOUTS: dict[str, Callable[[Make], Tensor]] = {
    "one row": lambda make: make(COLS),
    "matrix": lambda make: make(7, COLS),
    "3-D": lambda make: make(2, 3, COLS),
    "4-D": lambda make: make(2, 1, 3, COLS),
    "5-D": lambda make: make(2, 1, 2, 3, COLS),
    "rows apart": lambda make: make(5, 3 * COLS)[:, COLS : 2 * COLS],
    "heads of packed qkv": lambda make: make(2, 5, 3, 2, COLS)[:, :, 1],
    "no common stride": lambda make: make(4, 5, COLS)[:, :3],
    "every other column": lambda make: make(5, 2 * COLS)[:, ::2],
    "transposed": lambda make: make(COLS, 5).t(),
    "one row repeated": lambda make: make(1, COLS).expand(6, COLS),
    "misaligned": lambda make: make(5 * COLS + 1)[1:].view(5, COLS),
    "odd width": lambda make: make(3, 37),
    "no rows": lambda make: make(0, COLS),
}


def maker(dtype: torch.dtype, device: str, seed: int = 0) -> Make:
    """Random tensors of any shape, made on the CPU, so that devices get the same."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    return make


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return one.dtype == other.dtype and np.array_equal(bits(one), bits(other))


def wide(tensor: Tensor) -> np.ndarray:
    """Rows in float64."""
    host = tensor.detach().cpu().double().numpy()
    return host.reshape(-1, host.shape[-1])


def check(
    output: str, got: Tensor, want: np.ndarray, scale: np.ndarray, slack: np.ndarray | float = 0.0
) -> None:
    """Hold a tensor within the bounds of its kind."""
    if not want.size:
        return
    dtype = str(got.dtype).removeprefix("torch.")
    factor = bounds.bound_factor(output, CHAIN)
    stored = bits(got).reshape(want.shape)
    worst = bounds.worst_of(stored, want, scale, factor, dtype, slack=slack)
    assert worst.ratio <= 1, (output, worst)


def check_forward(y: Tensor, x: Tensor, weight: Tensor | None) -> None:
    """Hold y against float64."""
    assert y.shape == x.shape
    assert y.is_contiguous()
    w = None if weight is None else wide(weight)[0]
    want, _ = bounds.reference_forward(wide(x), w, EPS)
    check("y", y, want, np.abs(want))


def check_backward(
    dx: Tensor | None, dweight: Tensor | None, dout: Tensor, x: Tensor, weight: Tensor | None
) -> None:
    """Hold gradients against float64."""
    w = None if weight is None else wide(weight)[0]
    d, a = wide(dout), wide(x)
    want_dx, want_dweight = bounds.reference_backward(d, a, w, None, EPS)
    if dx is not None:
        assert dx.shape == x.shape
        terms = bounds.row_terms(bounds.row_sums(d, a, w), a.shape[-1], EPS)
        check("dx", dx, want_dx, bounds.dx_and_scale(d, a, w, terms)[1])
    if dweight is not None:
        assert weight is not None
        assert dweight.shape == weight.shape
        xhat = a / np.sqrt((a**2).mean(axis=1, keepdims=True) + EPS)
        check("dweight", dweight, want_dweight[None], np.abs(d * xhat).sum(axis=0)[None])


def check_layout(
    function: Callable[..., Tensor], layout: str, pair: tuple[torch.dtype, torch.dtype],
    device: str,
) -> None:  # fmt: skip
    """y and both gradients of a layout are right, and no input is written."""
    make = maker(pair[0], device)
    x = LAYOUTS[layout](make).detach().requires_grad_()
    weight = (1 + 0.1 * maker(pair[1], device, seed=1)(x.shape[-1])).requires_grad_()
    dout = LAYOUTS[layout](make)
    before = [bits(tensor) for tensor in (x, weight, dout)]
    y = function(x, weight, EPS)
    dx, dweight = torch.autograd.grad(y, (x, weight), dout)
    assert (dx.dtype, dweight.dtype) == (x.dtype, weight.dtype)
    check_forward(y, x, weight)
    check_backward(dx, dweight, dout, x, weight)
    if not x.numel():
        assert not dweight.any()
    for tensor, was in zip((x, weight, dout), before, strict=True):
        assert np.array_equal(bits(tensor), was), "an input was written"

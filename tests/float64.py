"""Results of the operations on NumPy arrays, held against float64 and the bounds of their kind."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401 - makes np.dtype("bfloat16") known
import numpy as np

from rmsnorm_raw import bounds, ops

Array = np.ndarray
#: S and D of the bounds, over what the kernels' chains are for rows of up to 700 elements
CHAIN = 64


def bits(array: Array) -> Array:
    """The stored elements as unsigned integers."""
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def wide(array: Array) -> Array:
    """Rows in float64."""
    return array.astype(np.float64).reshape(-1, array.shape[-1])


def hold(output: str, got: Array, want: Array, scale: Array) -> None:
    """Hold an output within the bounds of its kind."""
    if want.size:
        factor = bounds.bound_factor(output, CHAIN)
        stored = bits(got).reshape(want.shape)
        worst = bounds.worst_of(stored, want, scale, factor, str(got.dtype))
        assert worst.ratio <= 1, (output, worst)


def hold_forward(result: ops.Forward, x: Array, weight: Array | None, eps: float) -> None:
    """Hold y and rstd, where there is one."""
    w = None if weight is None else weight.astype(np.float64)
    assert result.y.shape == x.shape
    if x.size:
        y, rstd = bounds.reference_forward(wide(x), w, eps)
        hold("y", result.y, y, np.abs(y))
        if result.rstd is not None:
            assert (result.rstd.shape, result.rstd.dtype) == (x.shape[:-1], np.float32)
            hold("rstd", result.rstd, rstd[None], rstd[None])


def hold_backward(
    result: ops.Backward,
    dout: Array,
    x: Array,
    weight: Array | None,
    rstd: Array | None,
    eps: float,
) -> None:
    """Hold dx and dweight, where there are any."""
    w = None if weight is None else weight.astype(np.float64)
    if not x.size:
        assert result.dweight is None or not result.dweight.any()
        return
    sums = bounds.row_sums(wide(dout), wide(x), w)
    terms = bounds.row_terms(sums, x.shape[-1], eps)
    if rstd is not None:
        given: Any = rstd.astype(np.float64).reshape(-1)
        terms = np.stack([given, *(sums[1:] * given / x.shape[-1])])
    if result.dx is not None:
        assert (result.dx.shape, result.dx.dtype) == (x.shape, x.dtype)
        hold("dx", result.dx, *bounds.dx_and_scale(wide(dout), wide(x), w, terms))
    if result.dweight is not None:
        assert weight is not None
        assert (result.dweight.shape, result.dweight.dtype) == (weight.shape, weight.dtype)
        product = wide(dout) * wide(x) * terms[0][:, None]
        want, scale = product.sum(axis=0), np.abs(product).sum(axis=0)
        hold("dweight", result.dweight, want[None], scale[None])

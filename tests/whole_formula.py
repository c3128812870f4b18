"""The whole operation in float64 with NumPy, and how far a right result may be from it.

Written from the formulas alone. Errors are in units of fp32's rounding, 2**-24, as in
rmsnorm_raw.bounds: a right result is within half the spacing of its dtype and some of these of each
term that it is the sum of.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray
UNIT = 2.0**-24
#: roundings that a y, a dx and a sum over rows may take at the sizes of these tests, and more
Y, DX, SUM = 20, 28, 16


def wide(array: Array | None) -> Any:
    return 0.0 if array is None else array.astype(np.float64)


def spacing(values: Array, dtype: Any) -> Array:
    """The distance between neighbours of a dtype at each value."""
    facts = ml_dtypes.finfo(np.dtype(dtype))
    exponent = np.frexp(np.maximum(np.abs(values), 2.0**-200))[1] - 1
    return np.ldexp(1.0, np.clip(exponent, facts.minexp, facts.maxexp) - facts.nmant)


def near(got: Array, want: Array, terms: Array, roundings: float) -> None:
    """Assert that a result is right: ``terms`` are the magnitudes that it is the sum of."""
    assert got.shape == want.shape
    error = np.abs(got.astype(np.float64) - want)
    allowed = spacing(want, got.dtype) / 2 + roundings * UNIT * terms + 2.0**-126
    worst = np.unravel_index(np.argmax(error / allowed), error.shape)
    assert not np.isnan(error).any()
    assert (error <= allowed).all(), (worst, got[worst], want[worst], error[worst] / allowed[worst])


def h_of(x: Array, residual: Array | None) -> Array:
    """x + residual in fp32, as float64."""
    if residual is None:
        return wide(x)
    return (x.astype(np.float32) + residual.astype(np.float32)).astype(np.float64)


def rstd_of(h: Array, eps: float) -> Array:
    return 1 / np.sqrt((h**2).mean(axis=-1) + eps)


def check_forward(
    result: Any,
    x: Array,
    weight: Array | None = None,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    casting: str = "none",
    scale: float | None = None,
) -> None:
    """Every element of a forward on NumPy arrays; a scale of its own where the result has one."""
    h = h_of(x, residual)
    rstd = rstd_of(h, eps)
    if result.rstd is not None:
        near(result.rstd, rstd, rstd, SUM)
    if result.residual_out is not None:  # one rounding of the fp32 sum, to the bit
        want = h.astype(np.float32).astype(result.residual_out.dtype)
        assert result.residual_out.tobytes() == want.tobytes()
    weighted = 1.0 if weight is None else wide(weight) + weight_offset
    normalised = h * rstd[..., None]
    # where fp32 and float64 may round to different numbers of x's dtype, both are right
    sides = [normalised * (1 + side * SUM * UNIT) for side in (-1, 1)]
    if casting == "llama":
        sides = [side.astype(np.float32).astype(x.dtype).astype(np.float64) for side in sides]
    lows_and_highs = [side * weighted + wide(bias) for side in sides]
    low, high = np.minimum(*lows_and_highs), np.maximum(*lows_and_highs)
    terms = np.maximum(np.abs(sides[0] * weighted), np.abs(sides[1] * weighted)) + np.abs(
        wide(bias)
    )
    if result.scale is not None:
        most = np.abs(np.stack([low, high])).max(axis=0).max(axis=-1)
        largest = float(ml_dtypes.finfo(result.y.dtype).max)
        near(result.scale, most / largest, terms.max(axis=-1) / largest, 2 * Y)
        by = result.scale.astype(np.float64)[..., None]
    else:
        by = 1.0 if scale is None else float(np.float32(scale))
    low, high, terms = low / by, high / by, terms / by
    if scale is not None or result.scale is not None:  # what is too large becomes the largest
        largest = float(ml_dtypes.finfo(result.y.dtype).max)
        low, high = np.clip(low, -largest, largest), np.clip(high, -largest, largest)
    got = result.y.astype(np.float64)
    near(result.y, np.clip(got, low, high), terms, Y)


def check_backward(
    result: Any,
    dout: Array,
    x: Array,
    weight: Array | None = None,
    *,
    rstd: Array | None = None,
    dresidual_out: Array | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> None:
    """Every element of a backward on NumPy arrays."""
    h, d = wide(x), wide(dout)
    by = rstd_of(h, eps) if rstd is None else wide(rstd)
    by = by[..., None]
    xhat = h * by
    g = d if weight is None else d * (wide(weight) + weight_offset)
    mean, spread = ((f(g * xhat)).mean(axis=-1, keepdims=True) for f in (np.array, np.abs))
    dx = by * (g - xhat * mean) + wide(dresidual_out)
    terms = by * (np.abs(g) + np.abs(xhat) * spread) + np.abs(wide(dresidual_out))
    for got in (result.dx, result.dresidual):
        if got is not None:
            near(got, dx, terms, DX)
    lists = x.shape[-1:] if weight is None else weight.shape
    for got, product in ((result.dweight, d * xhat), (result.dbias, d)):
        if got is not None:
            rows = product.reshape(-1, *lists)
            near(got, rows.sum(axis=0), np.abs(rows).sum(axis=0), SUM)

"""The gate in NumPy: number formats, the float64 reference, the error bounds.

What is right, and how far a correct kernel may be from it. Nothing here touches a device;
:mod:`rmsnorm_raw.kernels.reference` states the sums and the comparison again for one.

Bounds, with u = 2**-24, h = half the output dtype's spacing at the float64 value (0 for float32),
S and D the chains that :mod:`rmsnorm_raw.space` counts, w the weight and its offset, b the bias,
x the sum with the residual, g = dout * w and xhat = x * rstd; each has 2**-126 added:

    rstd           u * (8 + S/8)  * rstd
    y              h + u * (10 + S/8) * (|xhat * w| + |b|)
    dx, dresidual  h + u * (16 + S/8) * rstd * (|g| + |xhat| * mean|g * xhat|) + u * |dresidual_out|
    dweight        h + u * (8 + D/32) * sum|dout * xhat|
    dbias          h + u * (8 + D/32) * sum|dout|
    residual_out   0: the fp32 sum, rounded once
    scale          u * (12 + S/8) * max(|xhat * w| + |b|) / the largest number, by row

They were found by experiment in NumPy up to N = 1,048,576 (dx to 262,144): correct fp32 kernels
meet them; a store that truncates to bf16 and a dx without its row term do not. "Within 1 ulp" would
pass the first, and "within 2 ulp of the row's largest" the second in most rows. The gradient of
residual_out enters by one addition, whose rounding the other terms' share of u * 16 pays for.

With the casting "llama", xhat is rounded to x's dtype, to either side where it is within the bound
of a tie: xhat is then the middle of what it may be, and half of the distance times |w| is allowed.

An 8-bit y is y / scale, clamped and rounded: what that may be within y's bound / scale, and within
1e-5 of y / scale itself, of a tie.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rmsnorm_raw.dtypes import LARGEST_FP8

Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[Any]  # uint8, uint16 or uint32, as the dtype is stored

UNIT = 2.0**-24
#: bits of the significand, the hidden one included
SIGNIFICAND_BITS = {"float16": 11, "bfloat16": 8, "float32": 24} | dict.fromkeys(LARGEST_FP8, 4)
_BINADES = {  # the lowest and the highest
    "float16": (-14, 15),
    "bfloat16": (-126, 127),
    "float32": (-126, 127),
    "float8_e4m3fn": (-6, 8),
    "float8_e4m3fnuz": (-7, 7),
}
STORAGE: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.uint16),
    "bfloat16": np.dtype(np.uint16),
    "float32": np.dtype(np.uint32),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e4m3fnuz": np.dtype(np.uint8),
}


# ---- formats ------------------------------------------------------------------------------------


def decode(bits: Bits, dtype: str) -> Floats:
    """The numbers that stored elements stand for, as float64.

    An infinity becomes the power of two after the largest finite number, so that an overflow has an
    error like any other: none where the correct result rounds to it too.
    """
    if dtype in LARGEST_FP8:
        return _decode_fp8(bits, dtype)
    if dtype == "bfloat16":
        values = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = np.ascontiguousarray(bits).view(dtype)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return _clamped(values.astype(np.float64), dtype)


def _decode_fp8(bits: Bits, dtype: str) -> Floats:
    field, fraction = bits.astype(np.int64) >> 3 & 15, bits & 7
    significand = np.where(field, fraction + 8.0, fraction)
    values = np.ldexp(significand, np.maximum(field, 1) + _BINADES[dtype][0] - 4)
    is_nan = bits & 0x7F == 0x7F if dtype == "float8_e4m3fn" else bits == 0x80
    return np.where(is_nan, np.nan, np.where(bits >> 7, -values, values))


def _clamped(values: Floats, dtype: str) -> Floats:
    """Values within an 8-bit float's range; within what infinities stand for, of the others."""
    limit = LARGEST_FP8.get(dtype, 2.0 ** (_BINADES[dtype][1] + 1))
    return np.clip(values, -limit, limit)


def encode(values: Floats, dtype: str) -> Bits:
    """Values, exact in float32, rounded to nearest even and as they are stored; no 8-bit dtype."""
    with np.errstate(over="ignore"):
        if dtype == "float16":
            return values.astype(np.float16).view(np.uint16)
        bits = values.astype(np.float32).view(np.uint32)
    if dtype == "float32":
        return bits
    odd = bits >> np.uint32(16) & np.uint32(1)
    return (bits + np.uint32(0x7FFF) + odd >> np.uint32(16)).astype(np.uint16)


def spacing(values: Floats, dtype: str) -> Floats:
    """The distance between neighbours of a dtype at each value.

    Below the lowest binade it is the subnormals', above the highest that binade's.
    """
    magnitude = np.maximum(np.abs(values), 2.0**-200)  # frexp gives 0 the exponent of 1/2
    exponent = np.frexp(magnitude)[1] - 1
    binade = np.clip(exponent, *_BINADES[dtype])
    return power_of_two(binade - (SIGNIFICAND_BITS[dtype] - 1))


def rounded(values: Floats, dtype: str) -> Floats:
    """The number of a dtype that is nearest to each value, of two the even one.

    It has no largest one here: from half a spacing above that on, the result is larger.
    """
    step = spacing(values, dtype)
    return np.rint(values / step) * step


def power_of_two(exponent: npt.NDArray[np.integer[Any]]) -> Floats:
    """2 to each exponent."""
    return np.asarray(np.ldexp(1.0, exponent), np.float64)


# ---- the float64 reference ----------------------------------------------------------------------


class Reference(NamedTuple):
    """What the float64 reference needs of whole rows and columns; small enough to keep.

    Attributes:
        terms: (3, rows), see :func:`row_terms`.
        columns: see :meth:`gate.Engine.column_sums`.
    """

    terms: Floats
    columns: Floats


def row_terms(sums: Floats, cols: int, eps: float, *, given: float = 0.0) -> Floats:
    """(3, rows): rstd, mean(g * xhat), mean|g * xhat| from sums of x**2, g * x and |g * x|.

    Args:
        sums: (3, rows).
        cols: N >= 1.
        eps: added to the mean square.
        given: for a kernel that is given rstd: this multiple of it, as fp32 holds it; 0.0 for one
            that computes it.
    """
    rstd = 1.0 / np.sqrt(sums[0] / cols + eps)
    if given:
        rstd = (rstd * given).astype(np.float32).astype(np.float64)
    return np.stack([rstd, sums[1] * rstd / cols, sums[2] * rstd / cols])


def row_sums(dout: Floats | None, x: Floats, weight: Floats | None) -> Floats:
    """(3, rows) sums over columns of x**2, g * x and |g * x|; the last two 0 without dout.

    Here and below a weight, its offset added, is (cols,), or (rows, cols) where rows differ.
    """
    sums = np.zeros((3, len(x)))
    sums[0] = np.square(x).sum(axis=1)
    if dout is not None:
        product = _weighted(dout, weight) * x
        sums[1], sums[2] = product.sum(axis=1), np.abs(product).sum(axis=1)
    return sums


class Wanted(NamedTuple):
    """What an output should be: the error allowed is a factor times ``scale``, plus ``slack``."""

    value: Floats
    scale: Floats
    slack: Floats | float = 0.0


def y_and_scale(
    x: Floats,
    weight: Floats | None,
    rstd: Floats,
    *,
    bias: Floats | None = None,
    cast: str | None = None,
    factor: float = 0.0,
) -> Wanted:
    """y and what its bound is made of, all (rows, cols), from rstd (rows,).

    Args:
        x: (rows, cols), the residual added.
        weight: see :func:`row_sums`, and so for bias.
        rstd: (rows,).
        bias: None for none.
        cast: the dtype that xhat is rounded to.
        factor: how far off xhat may be before that, relative: see :func:`bound_factor`.
    """
    xhat = x * rstd[:, None]
    slack: Floats | float = 0.0
    if cast:
        low, high = rounded(xhat * (1 - factor), cast), rounded(xhat * (1 + factor), cast)
        xhat = (low + high) / 2
        slack = np.abs(_weighted(high - low, weight)) / 2
    y = _weighted(xhat, weight)
    if bias is None:
        return Wanted(y, np.abs(y), slack)
    return Wanted(y + bias, np.abs(y) + np.abs(bias), slack)


def dx_and_scale(
    dout: Floats,
    x: Floats,
    weight: Floats | None,
    terms: Floats,
    dresidual_out: Floats | None = None,
) -> Wanted:
    """dx and what its bound is made of, all (rows, cols), from :func:`row_terms`."""
    rstd, dot, spread = terms[:, :, None]
    g, xhat = _weighted(dout, weight), x * rstd
    dx, scale = rstd * (g - xhat * dot), rstd * (np.abs(g) + np.abs(xhat) * spread)
    if dresidual_out is None:
        return Wanted(dx, scale)
    return Wanted(dx + dresidual_out, scale, UNIT * np.abs(dresidual_out))


def reference_forward(x: Floats, weight: Floats | None, eps: float) -> tuple[Floats, Floats]:
    """RMSNorm in float64: y (rows, cols) and rstd (rows,) of x (rows, cols) and weight (cols,)."""
    rstd = row_terms(row_sums(None, x, weight), x.shape[1], eps)[0]
    return y_and_scale(x, weight, rstd).value, rstd


def reference_backward(
    dout: Floats, x: Floats, weight: Floats | None, rstd: Floats | None, eps: float
) -> tuple[Floats, Floats]:
    """Its backward in float64: dx (rows, cols) and dweight (cols,).

    Args:
        dout: (rows, cols).
        x: (rows, cols), what was normalised.
        weight: (cols,), or None for ones.
        rstd: (rows,), taken as it is; None to compute it from eps.
        eps: added to the mean square where rstd is None.
    """
    sums, cols = row_sums(dout, x, weight), x.shape[1]
    terms = row_terms(sums, cols, eps)
    if rstd is not None:
        terms = np.stack([rstd, sums[1] * rstd / cols, sums[2] * rstd / cols])
    dweight = (dout * x * terms[0][:, None]).sum(axis=0)
    return dx_and_scale(dout, x, weight, terms).value, dweight


def _weighted(values: Floats, weight: Floats | None) -> Floats:
    return values if weight is None else values * weight


# ---- bounds -------------------------------------------------------------------------------------


_CONSTANTS = {  # and what the chain is divided by
    "rstd": (8, 8),
    "y": (10, 8),
    "scale": (12, 8),
    "dx": (16, 8),
    "dresidual": (16, 8),
    "dweight": (8, 32),
    "dbias": (8, 32),
}
#: an 8-bit y may round either way so near to a tie, relative
TIE = 1e-5


def bound_factor(output: str, chain: int) -> float:
    """The bound of an output relative to its scale: the table's u * (...) at the head of this file.

    Args:
        output: its name; 0 for residual_out, which is exact.
        chain: D for dweight and dbias, S for the others.
    """
    if output == "residual_out":
        return 0.0
    constant, divisor = _CONSTANTS[output]
    return UNIT * (constant + chain / divisor)


class Worst(NamedTuple):
    """The element of an output that is furthest from right.

    Attributes:
        ratio: |error| / bound; above 1 is wrong, a NaN counts as inf.
        row: its row.
        col: its column.
        got: what was stored there.
        want: the float64 reference.
        bound: the error allowed; 0 where equality is asked for.
    """

    ratio: float
    row: int
    col: int
    got: float
    want: float
    bound: float


def worst_of(
    got: Bits,
    want: Floats,
    scale: Floats,
    factor: float,
    dtype: str,
    *,
    slack: Floats | float = 0.0,
    exact: bool = False,
) -> Worst:
    """Compare stored elements, (rows, cols) and not empty, with their float64 reference.

    Args:
        got: the output as stored.
        want: the reference; of an 8-bit y it, and scale and slack, over y's scale.
        scale: what the bound is relative to, by element.
        factor: from :func:`bound_factor`.
        dtype: of the output.
        slack: allowed beside.
        exact: ask for the reference rounded once, instead of an error within the bound.
    """
    values = decode(got, dtype)
    want = _clamped(want, dtype)
    if exact:
        want = rounded(want, dtype)
        bound = np.zeros_like(want)
        ratio = np.where(values == want, 0.0, np.inf)
    else:
        if dtype in LARGEST_FP8:
            bound = _reach(want, factor * scale + slack, dtype) + 2.0**-126
        else:
            half = 0.0 if dtype == "float32" else spacing(want, dtype) / 2
            bound = half + factor * scale + (slack + 2.0**-126)
        ratio = np.abs(values - want) / bound
        ratio[np.isnan(ratio)] = np.inf
    at = int(np.argmax(ratio))
    row, col = divmod(at, want.shape[1])
    return Worst(
        float(ratio.flat[at]), row, col, float(values.flat[at]), float(want.flat[at]),
        float(bound.flat[at]),
    )  # fmt: skip


def _reach(want: Floats, error: Floats, dtype: str) -> Floats:
    """How far from right the 8-bit rounding of what may be off by an error, or by TIE, can be."""
    error = np.maximum(TIE * np.abs(want), error)
    ends = (rounded(_clamped(want + way * error, dtype), dtype) for way in (-1, 1))
    low, high = (np.abs(end - want) for end in ends)
    return np.maximum(low, high)


def row_blocks(rows: int, cols: int) -> Iterator[tuple[int, int]]:
    """(first, last) of groups of rows with about a million elements.

    A large problem is worked on in these, so that its float64 copies never exist as a whole.
    """
    step = max(1, (1 << 20) // cols)
    for first in range(0, rows, step):
        yield first, min(rows, first + step)

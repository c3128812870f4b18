"""The gate in NumPy: number formats, gate data, the float64 reference, the error bounds.

What is right, and how far a correct kernel may be from it. Nothing here touches a device;
:mod:`rmsnorm_raw.kernels.reference` states the data, the sums and the comparison again for one.

Bounds, with u = 2**-24, h = half the output dtype's spacing at the float64 value (0 for float32),
S and D the chains that :mod:`rmsnorm_raw.space` counts, g = dout * weight and xhat = x * rstd; each
has 2**-126 added:

    rstd      u * (8 + S/8)  * rstd
    y         h + u * (10 + S/8) * |xhat * weight|
    dx        h + u * (16 + S/8) * rstd * (|g| + |xhat| * mean|g * xhat|)
    dweight   h + u * (8 + D/32) * sum|dout * xhat|

They were found by experiment in NumPy up to N = 1,048,576 (dx to 262,144): correct fp32 kernels
meet them; a store that truncates to bf16 and a dx without its row term do not. "Within 1 ulp" would
pass the first, and "within 2 ulp of the row's largest" the second in most rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[Any]  # uint16 or uint32, as the dtype is stored
_U64 = npt.NDArray[np.uint64]

UNIT = 2.0**-24
#: bits of the significand, the hidden one included
SIGNIFICAND_BITS = {"float16": 11, "bfloat16": 8, "float32": 24}
_LOWEST_BINADE = {"float16": -14, "bfloat16": -126, "float32": -126}
_HIGHEST_BINADE = {"float16": 15, "bfloat16": 127, "float32": 127}
STORAGE: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.uint16),
    "bfloat16": np.dtype(np.uint16),
    "float32": np.dtype(np.uint32),
}


# ---- formats ------------------------------------------------------------------------------------


def decode(bits: Bits, dtype: str) -> Floats:
    """The numbers that stored elements stand for, as float64.

    An infinity becomes the power of two after the largest finite number, so that an overflow has an
    error like any other: none where the correct result rounds to it too.
    """
    if dtype == "bfloat16":
        values = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = np.ascontiguousarray(bits).view(dtype)
    limit = 2.0 ** (_HIGHEST_BINADE[dtype] + 1)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return np.clip(values.astype(np.float64), -limit, limit)


def encode(values: Floats, dtype: str) -> Bits:
    """Values, exact in float32, rounded to nearest even and as they are stored."""
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
    binade = np.clip(exponent, _LOWEST_BINADE[dtype], _HIGHEST_BINADE[dtype])
    return _power_of_two(binade - (SIGNIFICAND_BITS[dtype] - 1))


def _power_of_two(exponent: npt.NDArray[np.integer[Any]]) -> Floats:
    return np.asarray(np.ldexp(1.0, exponent), np.float64)


# ---- gate data ----------------------------------------------------------------------------------

_GOLDEN = 0x9E3779B97F4A7C15
_STREAM = {"x": 0, "dout": 1, "weight": 2}


def gate_data(
    name: str, first: int, last: int, cols: int, dtype: str, seed: int, *, exact: bool
) -> Bits:
    """Rows first to last of an input, shape (last - first, cols), as stored bits.

    Every element is a hash of (seed, tensor, element number): integers times powers of two, rounded
    once, so a device makes the same bits. z below is the sum of four uniform 16-bit numbers,
    centred and made odd, times 2**-16: bell-shaped, never 0, |z| <= 4, standard deviation 1.155.

    x is z times the row's scale, 2**-6 to 2**6, all thirteen in any thirteen rows; dout is z plus
    half of x / scale, without which the row term of dx would vanish in the noise; weight is
    1 + z / 8.

    The exact case has x = +-scale, dout an integer from -8 to 8, weight 1/2, 1 or 2. With rstd =
    1 / scale and N a power of two every product and sum is exact in fp32, in any order.

    Args:
        name: "x", "dout" or "weight", which is one row.
        first: the first row.
        last: one after the last row.
        cols: N.
        dtype: of the result.
        seed: 0 <= seed < 2**64.
        exact: the exact case instead.
    """
    rows: _U64 = np.arange(first, last, dtype=np.uint64)[:, None]
    columns: _U64 = np.arange(cols, dtype=np.uint64)
    elements = rows * np.uint64(cols) + columns
    draws = _draw(seed, name, elements)
    # Row 0 has the smallest scale, for eps shows in no other, and a few rows have large ones too.
    scale = _power_of_two((rows * np.uint64(5) % np.uint64(13)).astype(np.int64) - 6)
    if exact:
        high = draws >> np.uint64(32)
        if name == "x":
            values = np.where(draws & np.uint64(1), -scale, scale)
        elif name == "dout":
            values = (high % np.uint64(17)).astype(np.float64) - 8.0
        else:
            values = _power_of_two((high % np.uint64(3)).astype(np.int64) - 1)
    elif name == "x":
        values = _bell(draws) * scale
    elif name == "dout":
        values = _bell(draws) + 0.5 * _bell(_draw(seed, "x", elements))
    else:
        values = 1.0 + 0.125 * _bell(draws)
    return encode(values, dtype)


def _mix(z: _U64) -> _U64:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014; Stafford's mix 13)."""
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def _draw(seed: int, name: str, elements: _U64) -> _U64:
    key = _mix(np.array([(seed + _STREAM[name] * _GOLDEN) % 2**64], np.uint64))
    return _mix(key + (elements + np.uint64(1)) * np.uint64(_GOLDEN))


def _bell(draws: _U64) -> Floats:
    total = np.full(draws.shape, -262139.0 / 2)
    for shift in (0, 16, 32, 48):
        total += draws >> np.uint64(shift) & np.uint64(0xFFFF)
    return total * 2.0**-15


# ---- the float64 reference ----------------------------------------------------------------------


class Reference(NamedTuple):
    """What the float64 reference needs of whole rows and columns; small enough to keep.

    Attributes:
        terms: (3, rows), see :func:`row_terms`.
        columns: (2, cols) sums over rows of dout * xhat, which is dweight, and of |dout * xhat|.
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
    """(3, rows) sums over columns of x**2, g * x and |g * x|; the last two 0 without dout."""
    sums = np.zeros((3, len(x)))
    sums[0] = np.square(x).sum(axis=1)
    if dout is not None:
        product = _weighted(dout, weight) * x
        sums[1], sums[2] = product.sum(axis=1), np.abs(product).sum(axis=1)
    return sums


def y_and_scale(x: Floats, weight: Floats | None, rstd: Floats) -> tuple[Floats, Floats]:
    """(y, what its bound is relative to), both (rows, cols), from rstd (rows,)."""
    y = _weighted(x * rstd[:, None], weight)
    return y, np.abs(y)


def dx_and_scale(
    dout: Floats, x: Floats, weight: Floats | None, terms: Floats
) -> tuple[Floats, Floats]:
    """(dx, what its bound is relative to), both (rows, cols), from :func:`row_terms`."""
    rstd, dot, spread = terms[:, :, None]
    g, xhat = _weighted(dout, weight), x * rstd
    return rstd * (g - xhat * dot), rstd * (np.abs(g) + np.abs(xhat) * spread)


def reference_forward(x: Floats, weight: Floats | None, eps: float) -> tuple[Floats, Floats]:
    """RMSNorm in float64: y (rows, cols) and rstd (rows,) of x (rows, cols) and weight (cols,)."""
    rstd = row_terms(row_sums(None, x, weight), x.shape[1], eps)[0]
    return y_and_scale(x, weight, rstd)[0], rstd


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
    return dx_and_scale(dout, x, weight, terms)[0], dweight


def _weighted(values: Floats, weight: Floats | None) -> Floats:
    return values if weight is None else values * weight


# ---- bounds -------------------------------------------------------------------------------------


def bound_factor(output: str, chain: int) -> float:
    """The bound of an output relative to its scale: the table's u * (...) at the head of this file.

    Args:
        output: "rstd", "y", "dx" or "dweight".
        chain: D for dweight, S for the others.
    """
    constant, divisor = {"rstd": (8, 8), "y": (10, 8), "dx": (16, 8), "dweight": (8, 32)}[output]
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
    got: Bits, want: Floats, scale: Floats, factor: float, dtype: str, *, exact: bool = False
) -> Worst:
    """Compare stored elements, (rows, cols) and not empty, with their float64 reference.

    Args:
        got: the output as stored.
        want: the reference.
        scale: what the bound is relative to, by element.
        factor: from :func:`bound_factor`.
        dtype: of the output.
        exact: ask for the reference rounded once, instead of an error within the bound.
    """
    values = decode(got, dtype)
    limit = 2.0 ** (_HIGHEST_BINADE[dtype] + 1)
    want = np.clip(want, -limit, limit)
    if exact:
        want = decode(encode(want, dtype), dtype)
        bound = np.zeros_like(want)
        ratio = np.where(values == want, 0.0, np.inf)
    else:
        half = 0.0 if dtype == "float32" else spacing(want, dtype) / 2
        bound = half + factor * scale + 2.0**-126
        ratio = np.abs(values - want) / bound
        ratio[np.isnan(ratio)] = np.inf
    at = int(np.argmax(ratio))
    row, col = divmod(at, want.shape[1])
    return Worst(
        float(ratio.flat[at]), row, col, float(values.flat[at]), float(want.flat[at]),
        float(bound.flat[at]),
    )  # fmt: skip


def row_blocks(rows: int, cols: int) -> Iterator[tuple[int, int]]:
    """(first, last) of groups of rows with about a million elements.

    A large problem is worked on in these, so that its float64 copies never exist as a whole.
    """
    step = max(1, (1 << 20) // cols)
    for first in range(0, rows, step):
        yield first, min(rows, first + step)

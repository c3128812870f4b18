"""What the gate's inputs hold: numbers that a device makes just so.

:mod:`rmsnorm_raw.kernels.reference` states the same again for one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rmsnorm_raw.bounds import Bits, Floats, encode, power_of_two
from rmsnorm_raw.dtypes import LARGEST_FP8

_U64 = npt.NDArray[np.uint64]
#: the inputs that are functions of the seed alone, in the order of the kernels' numbers
DATA = ("x", "dout", "weight", "residual", "bias", "dresidual_out")
#: those of which a row may be zeros
ZEROED = ("x", "residual")
#: log2 of the scale of a row that is large: squares stay within fp32, and fp16 within its range
LARGE_FP16, LARGE_OTHERS = 13, 30
#: what some weights are times: |xhat| of 2 and more then overflows fp16
LARGE_WEIGHT = 2.0**15

_GOLDEN = 0x9E3779B97F4A7C15


def gate_data(
    name: str, first: int, last: int, cols: int, dtype: str, seed: int, *, exact: bool,
    zero_row: int | None = None, large_row: int | None = None,
) -> Bits:  # fmt: skip
    """Rows first to last of an input, shape (last - first, cols), as stored bits.

    Every element is a hash of (seed, tensor, element number): integers times powers of two, rounded
    once, so a device makes the same bits. z below is the sum of four uniform 16-bit numbers,
    centred and made odd, times 2**-16: bell-shaped, never 0, |z| <= 4, standard deviation 1.155.

    x is z times the row's scale, 2**-6 to 2**6, all thirteen in any thirteen rows; dout is z plus
    half of x / scale, without which the row term of dx would vanish in the noise; weight is
    1 + z / 8, bias z / 2, and dresidual_out z over the row's scale, as dx is. The residual is a
    quarter of x's size and six bits longer, so that their sum in fp32 has to round.

    The exact case has x = +-scale, dout an integer from -8 to 8, dresidual_out one from -8 to 8
    over the row's scale, weight 1/2, 1 or 2. With rstd = 1 / scale and N a power of two every
    product and sum is exact in fp32, in any order.

    In both, one weight of 16 is 0 and three are negative: no more, or the row term would vanish.

    Args:
        name: one of :data:`DATA`; weight and bias are one row.
        first: the first row.
        last: one after the last row.
        cols: elements of a row.
        dtype: of the result.
        seed: 0 <= seed < 2**64.
        exact: the exact case instead.
        zero_row: this row of x, and of the residual, is zeros instead.
        large_row: this row's scale is large instead; of the weight, which is one row: one in 16 of
            its elements is.
    """
    rows: _U64 = np.arange(first, last, dtype=np.uint64)[:, None]
    columns: _U64 = np.arange(cols, dtype=np.uint64)
    elements = rows * np.uint64(cols) + columns
    draws = _draw(seed, name, elements)
    # Row 0 has the smallest scale, for eps shows in no other, and a few rows have large ones too.
    exponents = (rows * np.uint64(5) % np.uint64(13)).astype(np.int64) - 6
    if large_row is not None:
        exponents[rows == large_row] = LARGE_FP16 if dtype == "float16" else LARGE_OTHERS
    scale = power_of_two(exponents)
    if exact:
        high = draws >> np.uint64(32)
        if name == "x":
            values = np.where(draws & np.uint64(1), -scale, scale)
        elif name == "weight":
            values = _signs(draws) * power_of_two((high % np.uint64(3)).astype(np.int64) - 1)
        else:
            values = (high % np.uint64(17)).astype(np.float64) - 8.0
            values = values / scale if name == "dresidual_out" else values
    elif name == "x":
        values = _bell(draws) * scale
    elif name == "dout":
        values = _bell(draws) + 0.5 * _bell(_draw(seed, "x", elements))
    elif name == "weight":
        values = _signs(draws) * (1.0 + 0.125 * _bell(draws))
        if large_row is not None:
            values[draws >> np.uint64(4) & np.uint64(15) == 0] *= LARGE_WEIGHT
    elif name == "residual":
        longer = _bell(draws) + (draws & np.uint64(63)) * 2.0**-22
        values = longer * (0.25 * scale)
    elif name == "bias":
        values = 0.5 * _bell(draws)
    else:
        values = _bell(draws) / scale
    if zero_row is not None and name in ZEROED:
        values[rows[:, 0] == zero_row] = 0.0
    return encode(values, dtype)


def static_scale(dtype: str, seed: int) -> float:
    """The scale of an 8-bit y: one by which numbers above 2 to 3 are clamped; exact in float32."""
    draw = int(_draw(seed, "x", np.zeros(1, np.uint64))[0])
    return float(np.float32(2.0 / LARGEST_FP8[dtype] * (1.0 + (draw >> 40) * 2.0**-25)))


def _mix(z: _U64) -> _U64:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014; Stafford's mix 13)."""
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def _draw(seed: int, name: str, elements: _U64) -> _U64:
    key = _mix(np.array([(seed + DATA.index(name) * _GOLDEN) % 2**64], np.uint64))
    return _mix(key + (elements + np.uint64(1)) * np.uint64(_GOLDEN))


def _signs(draws: _U64) -> Floats:
    low = draws & np.uint64(15)
    return np.where(low == 0, 0.0, np.where(low < 4, -1.0, 1.0))


def _bell(draws: _U64) -> Floats:
    total = np.full(draws.shape, -262139.0 / 2)
    for shift in (0, 16, 32, 48):
        total += draws >> np.uint64(shift) & np.uint64(0xFFFF)
    return total * 2.0**-15

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from rmsnorm_raw import bounds
from rmsnorm_raw.bounds import Bits, Floats

DTYPES = ("float16", "bfloat16", "float32")
HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SEED = 20_260_917


def every_half() -> Bits:
    return np.arange(1 << 16, dtype=np.uint16)


# ---- formats -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_all_65536_patterns_decode_to_their_numbers(dtype: str) -> None:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        numbers = every_half().view(HALVES[dtype]).astype(np.float64)
    decoded = bounds.decode(every_half(), dtype)
    finite = np.isfinite(numbers)
    np.testing.assert_array_equal(decoded[finite], numbers[finite])
    np.testing.assert_array_equal(np.isnan(decoded), np.isnan(numbers))


@pytest.mark.parametrize(
    ("dtype", "after_largest"),
    [("float16", 2.0**16), ("bfloat16", 2.0**128), ("float32", 2.0**128)],
)
def test_an_infinity_stands_for_the_number_after_the_largest(
    dtype: str, after_largest: float
) -> None:
    bits = bounds.encode(np.array([np.inf, -np.inf]), dtype)
    assert bounds.decode(bits, dtype).tolist() == [after_largest, -after_largest]


@pytest.mark.parametrize("dtype", DTYPES)
def test_encoding_rounds_to_nearest_even(dtype: str) -> None:
    step = 2.0 ** (1 - bounds.SIGNIFICAND_BITS[dtype])
    if dtype == "float32":
        values, want = np.array([1.0, -1.5]), np.array([1.0, -1.5])
    else:
        values = np.array([1 + step / 2, 1 + 3 * step / 2, 1 + step * 0.51, -(1 + step / 2)])
        want = np.array([1, 1 + 2 * step, 1 + step, -1])
    np.testing.assert_array_equal(bounds.decode(bounds.encode(values, dtype), dtype), want)


@pytest.mark.parametrize("dtype", HALVES)
def test_encoding_agrees_with_the_dtype_s_own_library(dtype: str) -> None:
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(20_000) * 2.0 ** rng.integers(-30, 15, 20_000)).astype(np.float32)
    np.testing.assert_array_equal(
        bounds.encode(values.astype(np.float64), dtype),
        values.astype(HALVES[dtype]).view(np.uint16),
    )


@pytest.mark.parametrize("dtype", HALVES)
def test_spacing_is_the_gap_between_neighbours(dtype: str) -> None:
    # every finite number >= 0 and the one above it: subnormals, binade edges, the highest binade
    patterns = every_half()[:0x7C00] if dtype == "float16" else every_half()[:0x7F80]
    numbers = bounds.decode(patterns, dtype)
    gaps = np.diff(np.append(numbers, bounds.decode(patterns[-1:] + np.uint16(1), dtype)))
    np.testing.assert_array_equal(bounds.spacing(numbers, dtype), gaps)
    np.testing.assert_array_equal(bounds.spacing(-numbers, dtype), gaps)


# ---- gate data -----------------------------------------------------------------------------------


def data(name: str, rows: int, cols: int, seed: int = SEED, *, exact: bool = False) -> Floats:
    bits = bounds.gate_data(name, 0, rows, cols, "float32", seed, exact=exact)
    return bounds.decode(bits, "float32")


def test_x_has_thirteen_row_scales_and_no_zero() -> None:
    x = data("x", 26, 8192)
    deviation = x.std(axis=1) / 1.155  # of each row, so about a power of two
    exponents = np.log2(deviation)
    np.testing.assert_allclose(exponents, np.round(exponents), atol=0.05)
    assert sorted(np.round(exponents)) == sorted([*range(-6, 7)] * 2)
    assert np.all(x != 0)
    assert np.all(np.abs(x) <= 4 * np.exp2(np.round(exponents))[:, None])


def test_dout_leans_on_x_so_that_the_row_term_matters() -> None:
    x, dout = data("x", 13, 8192), data("dout", 13, 8192)
    unit = x / x.std(axis=1, keepdims=True)
    slope = (dout * unit).mean(axis=1) / 1.155
    np.testing.assert_allclose(slope, 0.5, atol=0.05)
    np.testing.assert_allclose(dout.std(), 1.155 * np.sqrt(1.25), rtol=0.02)


def test_weights_are_near_one() -> None:
    weight = data("weight", 1, 8192)
    np.testing.assert_allclose([weight.mean(), weight.std()], [1, 0.144], atol=0.01)


def test_seeds_tensors_and_elements_draw_independently() -> None:
    x, other = data("x", 13, 4096), data("x", 13, 4096, SEED + 1)
    unit = x / np.exp2(np.round(np.log2(x.std(axis=1, keepdims=True) / 1.155)))
    noise = data("dout", 13, 4096) - unit / 2
    for a, b in ((x, other), (x, noise), (x[:, 1:], x[:, :-1]), (x[1:], x[:-1])):
        signs = np.sign(a) * np.sign(b)
        assert abs(signs.mean()) < 4 / np.sqrt(signs.size)


def test_rows_do_not_depend_on_the_block_that_they_are_made_in() -> None:
    whole = bounds.gate_data("dout", 0, 9, 100, "bfloat16", SEED, exact=False)
    part = bounds.gate_data("dout", 4, 9, 100, "bfloat16", SEED, exact=False)
    np.testing.assert_array_equal(whole[4:], part)


def test_the_exact_case_is_made_of_powers_of_two_and_small_integers() -> None:
    x, dout, weight = (data(name, 13, 4096, exact=True) for name in ("x", "dout", "weight"))
    assert set(np.abs(x[:, 0])) == {2.0**k for k in range(-6, 7)}
    np.testing.assert_array_equal(np.abs(x), np.abs(x[:, :1]) + np.zeros_like(x))
    assert abs(np.sign(x).mean()) < 0.02
    assert set(dout.flat) == set(range(-8, 9))
    assert set(weight.flat) == {0.5, 1.0, 2.0}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_rounds_the_same_numbers(dtype: str) -> None:
    numbers = data("x", 13, 512)
    bits = bounds.gate_data("x", 0, 13, 512, dtype, SEED, exact=False)
    np.testing.assert_array_equal(bits, bounds.encode(numbers, dtype))


# ---- the float64 reference -----------------------------------------------------------------------


def test_forward_is_the_formula() -> None:
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((3, 7)), rng.standard_normal(7)
    y, rstd = bounds.reference_forward(x, weight, 1e-3)
    for row in range(3):
        want = 1 / np.sqrt(sum(v * v for v in x[row]) / 7 + 1e-3)
        assert rstd[row] == pytest.approx(want, rel=1e-14)
        np.testing.assert_allclose(y[row], x[row] * want * weight, rtol=1e-14)
    np.testing.assert_allclose(bounds.reference_forward(x, None, 1e-3)[0] * weight, y, rtol=1e-14)


def test_backward_is_the_slope_of_forward() -> None:
    rng = np.random.default_rng(2)
    x, dout, towards = rng.standard_normal((3, 4, 9))
    weight, turn = rng.standard_normal((2, 9))
    dx, dweight = bounds.reference_backward(dout, x, weight, None, 1e-3)

    def loss(step: float, turned: float) -> float:
        y, _ = bounds.reference_forward(x + step * towards, weight + turned * turn, 1e-3)
        return float((dout * y).sum())

    h = 1e-5  # a central difference: errors of about h**2 and 1e-16 / h
    assert (dx * towards).sum() == pytest.approx((loss(h, 0) - loss(-h, 0)) / (2 * h), rel=1e-8)
    assert (dweight * turn).sum() == pytest.approx((loss(0, h) - loss(0, -h)) / (2 * h), rel=1e-8)


def test_backward_takes_a_given_rstd_as_it_is() -> None:
    rng = np.random.default_rng(3)
    x, dout = rng.standard_normal((2, 3, 8))
    computed = bounds.reference_forward(x, None, 0.0)[1]
    dx, dweight = bounds.reference_backward(dout, x, None, computed, 0.0)
    np.testing.assert_allclose(dx, bounds.reference_backward(dout, x, None, None, 0.0)[0])
    doubled = bounds.reference_backward(dout, x, None, 2 * computed, 0.0)
    np.testing.assert_allclose(doubled[1], 2 * dweight)
    g, xhat = dout, 2 * x * computed[:, None]
    want = 2 * computed[:, None] * (g - xhat * (g * xhat).mean(axis=1, keepdims=True))
    np.testing.assert_allclose(doubled[0], want)


# ---- bounds --------------------------------------------------------------------------------------


def test_bound_factors_are_the_table_s() -> None:
    u = 2.0**-24
    assert bounds.bound_factor("rstd", 16) == u * 10
    assert bounds.bound_factor("y", 16) == u * 12
    assert bounds.bound_factor("dx", 16) == u * 18
    assert bounds.bound_factor("dweight", 64) == u * 10


def ratio(got: float, want: float, dtype: str = "float16", scale: float = 0.0) -> float:
    bits = bounds.encode(np.array([[got]]), dtype)
    factor = bounds.bound_factor("y", 0)
    return bounds.worst_of(bits, np.array([[want]]), np.array([[scale]]), factor, dtype).ratio


def test_a_correctly_rounded_element_is_within_half_a_spacing() -> None:
    step = 2.0**-10
    assert ratio(1.0, 1.0) == 0
    assert ratio(1.0, 1 + step / 2) == pytest.approx(1)
    assert ratio(1 + step, 1.0 + step * 0.49) > 1
    assert ratio(1.0, 1 + step * 0.5001, scale=1.0) < 1  # the fp32 part of the bound
    assert ratio(1.0, 1 + 10 * 2.0**-24, "float32", scale=1.0) == pytest.approx(1)
    assert ratio(2.0**-24, 1.6 * 2.0**-24) > 1  # a subnormal one spacing off


def test_an_infinity_is_right_where_the_reference_rounds_to_it_and_nowhere_else() -> None:
    assert ratio(np.inf, 65520.0) <= 1
    assert ratio(np.inf, 1e6) == 0
    assert ratio(65504.0, 65519.0) <= 1
    assert ratio(65504.0, 70000.0) > 1
    assert ratio(np.inf, 65519.0) > 1
    assert ratio(-np.inf, 1e6) > 1
    assert ratio(np.inf, 1e38, "float32") > 1


def test_a_nan_is_infinitely_wrong() -> None:
    assert ratio(np.nan, 1.0) == np.inf
    assert ratio(np.nan, 1e9) == np.inf


def test_the_worst_element_is_named() -> None:
    want = np.ones((4, 6))
    got = bounds.encode(want, "bfloat16")
    got[2, 5] += 3
    got[1, 0] += 1
    worst = bounds.worst_of(got, want, want, bounds.bound_factor("y", 8), "bfloat16")
    assert (worst.row, worst.col, worst.want, worst.got) == (2, 5, 1.0, 1 + 3 * 2.0**-7)
    assert worst.ratio == pytest.approx(6, rel=1e-3)


def test_exact_comparison_asks_for_the_one_right_rounding() -> None:
    want = np.array([[257.0]])  # a tie of bfloat16: 256 is even
    for got, right in ((256.0, True), (258.0, False)):
        bits = bounds.encode(np.array([[got]]), "bfloat16")
        worst = bounds.worst_of(bits, want, want, 0.0, "bfloat16", exact=True)
        assert worst.ratio == (0 if right else np.inf)
        # both are within the usual bound
        assert bounds.worst_of(bits, want, want, 0.0, "bfloat16").ratio <= 1


def test_blocks_of_rows_cover_every_row_once_and_stay_near_a_million_elements() -> None:
    for rows, cols in ((1, 1 << 20), (5, 1 << 20), (3000, 1000), (7, 1)):
        blocks = list(bounds.row_blocks(rows, cols))
        assert [row for first, last in blocks for row in range(first, last)] == list(range(rows))
        assert max(last - first for first, last in blocks) * cols <= 1 << 20

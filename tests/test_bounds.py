from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from rmsnorm_raw import bounds
from rmsnorm_raw.bounds import Bits
from rmsnorm_raw.dtypes import LARGEST_FP8

DTYPES = ("float16", "bfloat16", "float32")
EIGHTS = {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
}
HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


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


@pytest.mark.parametrize("dtype", EIGHTS)
def test_all_256_patterns_decode_to_their_numbers(dtype: str) -> None:
    patterns = np.arange(256, dtype=np.uint8)
    decoded = bounds.decode(patterns, dtype)
    np.testing.assert_array_equal(decoded, patterns.view(EIGHTS[dtype]).astype(np.float64))
    assert np.nanmax(decoded) == LARGEST_FP8[dtype]


@pytest.mark.parametrize("dtype", [*HALVES, *EIGHTS])
def test_rounding_agrees_with_the_dtype_s_own_library(dtype: str) -> None:
    """Numbers of every size, and ties: those halfway between neighbours."""
    rng = np.random.default_rng(0)
    dtypes = HALVES | EIGHTS
    bits = np.arange(0x7C00 if dtype in HALVES else 0x7E, dtype=bounds.STORAGE[dtype])
    numbers = bounds.decode(bits, dtype)
    spread = rng.standard_normal(20_000) * 2.0 ** rng.integers(-20, 8, 20_000)
    values = np.concatenate([(numbers[1:] + numbers[:-1]) / 2, spread])
    values = values[np.abs(values) <= min(LARGEST_FP8.get(dtype, 60000.0), 60000.0)]
    for way in (-1, 1):
        np.testing.assert_array_equal(
            bounds.rounded(way * values, dtype), (way * values).astype(dtypes[dtype])
        )


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


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [("float16", 0x7C00), ("bfloat16", 0x7F80), ("float8_e4m3fn", 0x7E), ("float8_e4m3fnuz", 0x7F)],
)
def test_spacing_is_the_gap_between_neighbours(dtype: str, numbers: int) -> None:
    # every finite number >= 0 and the one above it: subnormals, binade edges, the highest binade
    values = bounds.decode(np.arange(numbers + 1, dtype=bounds.STORAGE[dtype]), dtype)
    numbers, gaps = values[:-1], np.diff(values)
    np.testing.assert_array_equal(bounds.spacing(numbers, dtype), gaps)
    np.testing.assert_array_equal(bounds.spacing(-numbers, dtype), gaps)


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


def test_y_has_its_bias_and_the_bound_counts_both_terms() -> None:
    x, weight, bias = np.array([[2.0, -4.0]]), np.array([1.5, 0.5]), np.array([-3.0, 1.0])
    want = bounds.y_and_scale(x, weight, np.array([0.5]), bias=bias)
    assert want.value.tolist() == [[-1.5, 0.0]]
    assert want.scale.tolist() == [[4.5, 2.0]]
    assert want.slack == 0
    plain = bounds.y_and_scale(x, weight, np.array([0.5]))
    assert (plain.value.tolist(), plain.scale.tolist()) == ([[1.5, -1.0]], [[1.5, 1.0]])


def test_a_cast_rounds_xhat_before_the_weight_and_allows_both_sides_of_a_tie() -> None:
    step = 2.0**-7  # of bfloat16, above 1
    x = np.array([[1 + 0.3 * step, 1 + 0.5 * step, -(1 + 1.5 * step)]])
    want = bounds.y_and_scale(
        x, np.array([3.0, 3.0, 4.0]), np.ones(1), cast="bfloat16", factor=2.0**-20
    )
    np.testing.assert_array_equal(want.value, [[3.0, 3 * (1 + step / 2), -4 * (1 + 1.5 * step)]])
    np.testing.assert_array_equal(want.slack, [[0, 1.5 * step, 2 * step]])


def test_dx_has_the_gradient_of_the_residual_and_the_bound_its_rounding() -> None:
    dout, x = np.array([[1.0, 2.0]]), np.array([[1.0, -1.0]])
    terms = bounds.row_terms(bounds.row_sums(dout, x, None), 2, 0.0)
    plain = bounds.dx_and_scale(dout, x, None, terms)
    want = bounds.dx_and_scale(dout, x, None, terms, np.array([[8.0, -16.0]]))
    np.testing.assert_array_equal(want.value, plain.value + np.array([[8.0, -16.0]]))
    np.testing.assert_array_equal(want.scale, plain.scale)
    np.testing.assert_array_equal(want.slack, [[2.0**-21, 2.0**-20]])
    assert plain.slack == 0


def test_rows_may_have_weights_of_their_own() -> None:
    rng = np.random.default_rng(4)
    x, dout, weight = rng.standard_normal((3, 2, 5))
    for row in range(2):
        alone = bounds.row_sums(dout[row : row + 1], x[row : row + 1], weight[row])
        np.testing.assert_allclose(bounds.row_sums(dout, x, weight)[:, row], alone[:, 0])


# ---- bounds --------------------------------------------------------------------------------------


def test_bound_factors_are_the_table_s() -> None:
    u = 2.0**-24
    assert bounds.bound_factor("rstd", 16) == u * 10
    assert bounds.bound_factor("y", 16) == u * 12
    assert bounds.bound_factor("dx", 16) == u * 18
    assert bounds.bound_factor("dresidual", 16) == u * 18
    assert bounds.bound_factor("dweight", 64) == u * 10
    assert bounds.bound_factor("dbias", 64) == u * 10
    assert bounds.bound_factor("scale", 16) == u * 14
    assert bounds.bound_factor("residual_out", 16) == 0


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


def ratio_fp8(got: float, want: float, dtype: str = "float8_e4m3fn", error: float = 0.0) -> float:
    bits = np.array([[got]]).astype(EIGHTS[dtype]).view(np.uint8)
    assert bounds.decode(bits, dtype) == got
    return bounds.worst_of(bits, np.array([[want]]), np.zeros((1, 1)), 1, dtype, slack=error).ratio


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("dtype", EIGHTS)
def test_8_bits_are_the_nearest_or_either_side_of_what_is_near_a_tie(dtype: str, sign: int) -> None:
    largest = bounds.decode(np.arange(256, dtype=np.uint8), dtype)
    numbers = sign * np.unique(largest[largest >= 0])
    for low, high in pairwise(numbers):
        tie = (low + high) / 2
        for want, right in (
            (low, {low}),
            (tie + 0.1 * (low - tie), {low}),
            (tie * (1 - 2e-5), {low}),
            (tie * (1 - 0.5e-5), {low, high}),
            (tie, {low, high}),
            (tie * (1 + 0.5e-5), {low, high}),
            (tie * (1 + 2e-5), {high}),
        ):
            passes = {got for got in (low, high) if ratio_fp8(got, want, dtype) <= 1}
            assert passes == right, want


def test_8_bits_may_be_off_a_tie_by_an_error_of_y_s() -> None:
    assert ratio_fp8(18.0, 16.99) > 1
    assert ratio_fp8(18.0, 16.99, error=0.011) <= 1
    assert ratio_fp8(16.0, 16.99, error=0.011) <= 1
    assert ratio_fp8(16.0, 16.98, error=0.011) <= 1
    assert ratio_fp8(18.0, 16.98, error=0.011) > 1


@pytest.mark.parametrize(("dtype", "largest"), LARGEST_FP8.items())
def test_8_bits_are_clamped(dtype: str, largest: float) -> None:
    below = largest - bounds.spacing(np.array(largest), dtype)
    for want in (largest, 1.01 * largest, 1e9, np.inf):
        assert ratio_fp8(largest, want, dtype) <= 1
        assert ratio_fp8(-largest, -want, dtype) <= 1
        assert ratio_fp8(below, want, dtype) > 1
        assert ratio_fp8(-largest, want, dtype) > 1
    nan = np.array([[0x80 if dtype.endswith("uz") else 0x7F]], np.uint8)
    for want in (1.0, 1e9):
        value = np.array([[want]])
        assert bounds.worst_of(nan, value, value, 0.0, dtype).ratio == np.inf


def test_what_is_allowed_beside_is_added_to_the_bound() -> None:
    bits, one = bounds.encode(np.array([[1.5]]), "float32"), np.ones((1, 1))
    worst = bounds.worst_of(bits, one, one, 0.25, "float32", slack=np.full((1, 1), 0.25))
    assert (worst.ratio, worst.bound) == (pytest.approx(1), 0.5 + 2.0**-126)


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

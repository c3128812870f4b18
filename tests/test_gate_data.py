from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from rmsnorm_raw import bounds
from rmsnorm_raw.bounds import Floats
from rmsnorm_raw.dtypes import LARGEST_FP8
from rmsnorm_raw.gate_data import DATA, gate_data, static_scale

DTYPES = ("float16", "bfloat16", "float32")
SEED = 20_260_917


def data(name: str, rows: int, cols: int, seed: int = SEED, *, exact: bool = False) -> Floats:
    bits = gate_data(name, 0, rows, cols, "float32", seed, exact=exact)
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


def test_weights_are_near_one_and_some_are_negative_or_zero() -> None:
    weight = data("weight", 1, 8192)
    shares = [np.mean(weight == sign * np.abs(weight)) for sign in (-1, 0, 1)]  # 0 is in all three
    np.testing.assert_allclose(shares, [4 / 16, 1 / 16, 13 / 16], atol=0.02)
    size = np.abs(weight[weight != 0])
    np.testing.assert_allclose([size.mean(), size.std()], [1, 0.144], atol=0.01)
    # signs say nothing of sizes
    assert abs(np.abs(weight[weight < 0]).mean() - weight[weight > 0].mean()) < 0.02


def test_a_residual_is_smaller_than_x_and_their_sum_has_to_round() -> None:
    x, residual = data("x", 13, 8192), data("residual", 13, 8192)
    ratio = residual.std(axis=1) / x.std(axis=1)
    np.testing.assert_allclose(ratio, 0.25, rtol=0.05)
    assert np.all(residual != 0)
    total = x + residual
    assert (total != bounds.rounded(total, "float32")).mean() > 0.2
    # bf16 and fp32 add up to more than fp32 has too
    short = bounds.rounded(x, "bfloat16") + residual
    assert (short != bounds.rounded(short, "float32")).mean() > 0.2


def test_a_bias_is_half_of_y_s_size_and_the_residual_s_gradient_of_dx_s() -> None:
    bias, gradient = data("bias", 1, 8192), data("dresidual_out", 13, 8192)
    np.testing.assert_allclose([bias.mean(), bias.std()], [0, 0.577], atol=0.02)
    scales = data("x", 13, 8192).std(axis=1) / 1.155
    np.testing.assert_allclose(gradient.std(axis=1) * scales, 1.155, rtol=0.05)


@pytest.mark.parametrize(("dtype", "largest"), LARGEST_FP8.items())
def test_a_given_scale_clamps_numbers_above_two_to_three(dtype: str, largest: float) -> None:
    scales = [static_scale(dtype, seed) for seed in range(50)]
    assert len(set(scales)) == 50
    assert all(2 <= scale * largest < 3.001 for scale in scales)
    assert all(scale == np.float32(scale) for scale in scales)


def test_seeds_tensors_and_elements_draw_independently() -> None:
    x, other = data("x", 13, 4096), data("x", 13, 4096, SEED + 1)
    unit = x / np.exp2(np.round(np.log2(x.std(axis=1, keepdims=True) / 1.155)))
    noise = data("dout", 13, 4096) - unit / 2
    pairs = [(x, other), (x, noise), (x[:, 1:], x[:, :-1]), (x[1:], x[:-1])]
    draws = [data(name, 13, 4096) for name in ("x", "residual", "bias", "dresidual_out")]
    for a, b in pairs + list(combinations(draws, 2)):
        signs = np.sign(a) * np.sign(b)
        assert abs(signs.mean()) < 4 / np.sqrt(signs.size)


def test_rows_do_not_depend_on_the_block_that_they_are_made_in() -> None:
    whole = gate_data("dout", 0, 9, 100, "bfloat16", SEED, exact=False)
    part = gate_data("dout", 4, 9, 100, "bfloat16", SEED, exact=False)
    np.testing.assert_array_equal(whole[4:], part)


def test_the_exact_case_is_made_of_powers_of_two_and_small_integers() -> None:
    names = ("x", "dout", "weight", "dresidual_out")
    x, dout, weight, gradient = (data(name, 13, 4096, exact=True) for name in names)
    assert set(np.abs(x[:, 0])) == {2.0**k for k in range(-6, 7)}
    np.testing.assert_array_equal(np.abs(x), np.abs(x[:, :1]) + np.zeros_like(x))
    assert abs(np.sign(x).mean()) < 0.02
    assert set(dout.flat) == set(range(-8, 9))
    assert set((gradient * np.abs(x)).flat) == set(range(-8, 9))
    assert set(weight.flat) == {-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0}
    assert np.signbit(weight[weight == 0]).sum() == 0
    np.testing.assert_allclose([np.mean(weight == 0), np.mean(weight < 0)], [0.06, 0.19], atol=0.02)


@pytest.mark.parametrize("name", DATA)
def test_a_row_of_zeros_is_x_s_and_its_residual_s(name: str) -> None:
    full, zeroed = (
        gate_data(name, 3, 9, 100, "bfloat16", SEED, exact=False, zero_row=row) for row in (None, 5)
    )
    assert full.all() or name == "weight"
    if name in ("x", "residual"):
        full[2] = 0
    np.testing.assert_array_equal(zeroed, full)


@pytest.mark.parametrize(("dtype", "exponent"), [*zip(DTYPES, (13, 30, 30), strict=True)])
@pytest.mark.parametrize("name", DATA)
def test_a_large_row_has_another_scale(name: str, dtype: str, exponent: int) -> None:
    usual, large = (
        bounds.decode(gate_data(name, 3, 9, 100, dtype, SEED, exact=False, large_row=row), dtype)
        for row in (None, 5)
    )
    assert np.isfinite(large).all()
    more = {"x": 1, "residual": 1, "dresidual_out": -1}.get(name, 0) * (exponent - 6)
    usual[2] *= 2.0**more  # the scale of row 5 is 2**6
    if name not in ("weight", "dresidual_out"):
        np.testing.assert_array_equal(large, usual)
    elif name == "dresidual_out":  # subnormal in fp16
        np.testing.assert_allclose(large, usual, rtol=0, atol=2.0**-25)


@pytest.mark.parametrize("dtype", DTYPES)
def test_some_of_a_large_row_s_weights_are_large(dtype: str) -> None:
    usual, large = (
        bounds.decode(
            gate_data("weight", 0, 1, 8192, dtype, SEED, exact=False, large_row=row), dtype
        )
        for row in (None, 0)
    )
    more = large[usual != 0] / usual[usual != 0]
    assert {*more} == {1, 2.0**15}
    assert 0.05 < np.mean(more > 1) < 0.08
    assert np.abs(large).max() < 65504
    assert not large[usual == 0].any()
    # signs and sizes stay what they are elsewhere
    of_large = np.abs(usual[usual != 0][more > 1])
    np.testing.assert_allclose([of_large.mean(), of_large.std()], [1, 0.144], atol=0.03)
    assert (usual[usual != 0][more > 1] < 0).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DATA)
def test_every_dtype_rounds_the_same_numbers(dtype: str, name: str) -> None:
    numbers = data(name, 13, 512)
    bits = gate_data(name, 0, 13, 512, dtype, SEED, exact=False)
    np.testing.assert_array_equal(bits, bounds.encode(numbers, dtype))

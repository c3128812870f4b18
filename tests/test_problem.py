"""Problem: byte accounting against the published figures, vector widths, refusals."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmsnorm_raw.dtypes import DTYPE_BYTES, dtype_name
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.problem import MAX_COLS, Problem

dtypes = st.sampled_from(sorted(DTYPE_BYTES))


def test_published_byte_counts() -> None:
    # the two totals behind the study's four headline figures
    assert Problem.forward(32768, 8192, "bfloat16").logical_bytes() == 1_073_758_208
    assert Problem.backward(32768, 8192, "bfloat16").logical_bytes() == 1_610_776_576


@given(
    st.integers(0, 1 << 40), st.integers(0, MAX_COLS), dtypes, st.one_of(st.none(), dtypes)
)  # fmt: skip
def test_byte_formulas(rows: int, cols: int, dtype: str, weight: str | None) -> None:
    a, w = DTYPE_BYTES[dtype], DTYPE_BYTES[weight] if weight else 0
    forward = Problem.forward(rows, cols, dtype, weight_dtype=weight)
    assert forward.logical_bytes() == 2 * rows * cols * a + cols * w
    backward = Problem.backward(rows, cols, dtype, weight_dtype=weight)
    weight_passes = 2 if weight else 0
    assert backward.logical_bytes() == 3 * rows * cols * a + weight_passes * cols * w + 4 * rows


def test_what_is_not_asked_for_is_not_counted() -> None:
    full = Problem.backward(10, 64, "float16")
    no_dx = Problem.backward(10, 64, "float16", need_dx=False)
    no_dweight = Problem.backward(10, 64, "float16", need_dweight=False)
    own_rstd = Problem.backward(10, 64, "float16", has_rstd=False)
    assert full.logical_bytes() - no_dx.logical_bytes() == (10 * 64 + 64) * 2  # dx, and the weight
    assert full.logical_bytes() - no_dweight.logical_bytes() == 64 * 2
    assert full.logical_bytes() - own_rstd.logical_bytes() == 40


@given(st.integers(1, MAX_COLS), dtypes, st.sampled_from([2, 4, 8, 16]))
def test_widest_vec_divides_the_row_and_respects_alignment(n: int, dtype: str, align: int) -> None:
    problem = Problem.forward(3, n, dtype, alignment=align)
    vec, element = problem.widest_vec, problem.element_bytes
    assert n * element % vec == 0
    assert vec == element or vec <= align
    wider = vec * 2
    assert wider > 16 or wider > align or n * element % wider  # nothing wider would do


def test_dtype_names() -> None:
    assert dtype_name("bf16") == "bfloat16"
    assert Problem.forward(1, 1, "fp16").weight_dtype == "float16"
    assert Problem.forward(1, 1, "fp16", weight_dtype=None).weight_dtype is None
    assert not Problem.backward(1, 1, "fp16", weight_dtype=None).need_dweight


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float16, "float16"),
        (np.dtype("float32"), "float32"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
    ],
)
def test_a_dtype_of_a_librarys_own(dtype: Any, name: str) -> None:
    assert dtype_name(dtype) == name
    assert Problem.forward(1, 1, dtype) == Problem.forward(1, 1, name)
    assert Problem.backward(1, 1, "fp32", weight_dtype=dtype).weight_dtype == name


def test_a_dtype_of_torchs() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for dtype in DTYPE_BYTES:
        assert Problem.forward(1, 1, getattr(torch, dtype)).dtype == dtype
    with pytest.raises(InvalidInput, match=r"torch\.int8 is not supported: use fp16"):
        Problem.forward(1, 1, torch.int8)


@pytest.mark.parametrize("dtype", [None, 3, [], float, np.float64, "same"])
def test_what_is_no_dtype(dtype: Any) -> None:
    with pytest.raises(InvalidInput, match="is not supported: use fp16, bf16, fp32"):
        Problem.forward(1, 1, dtype)


@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "eps", "says"),
    [
        (-1, 4, "float32", 0.0, "rows is -1"),
        (1, -4, "float32", 0.0, "cols is -4"),
        (1, MAX_COLS + 1, "float32", 0.0, "1,048,576"),
        (
            1,
            4,
            "float64",
            0.0,
            "'float64' is not supported: use fp16.*float32.$",
        ),
        (1, 4, "int32", 0.0, "int32"),
        (1, 4, "float32", -1e-6, "eps"),
        (1, 4, "float32", math.nan, "eps"),
        (1, 4, "float32", math.inf, "eps"),
        (1, 4, "float32", 1e39, "eps is 1e.39.*float32"),
        (1, 4, "float32", "1e-6", "eps is '1e-6'"),
        (1.5, 4, "float32", 0.0, "rows is 1.5.*integer"),
        (1, 4.0, "float32", 0.0, "cols is 4.0.*integer"),
    ],
)
def test_refusals(rows: Any, cols: Any, dtype: str, eps: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        Problem.forward(rows, cols, dtype, eps=eps)


@given(
    st.sampled_from([Problem.forward, Problem.backward]),
    st.sampled_from(["fp16", "bf16", "fp32"]),
    st.sampled_from(["same", "fp32", None]),
    st.sampled_from([1e-6, 1e-5, 0]),
    st.sampled_from([2, 16]),
    st.booleans(),
    st.booleans(),
)
def test_the_repr_is_the_call_that_makes_it(
    make: Any, dtype: str, weight: str | None, eps: float, alignment: int, one: bool, other: bool
) -> None:
    names = ("store_rstd",) if make == Problem.forward else ("has_rstd", "need_dx")
    flags = dict(zip(names, (one, other), strict=False))
    problem = make(3, 8, dtype, weight_dtype=weight, eps=eps, alignment=alignment, **flags)
    assert eval(repr(problem)) == problem


def test_the_repr_leaves_out_what_is_left_at_its_default() -> None:
    assert repr(Problem.forward(64, 4096, "bf16")) == "Problem.forward(64, 4096, 'bfloat16')"
    assert repr(Problem.backward(1, 8, "fp32", weight_dtype=None, need_dx=False)) == (
        "Problem.backward(1, 8, 'float32', weight_dtype=None, need_dx=False)"
    )

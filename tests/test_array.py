"""The array layer on the cpu backend; tests/gpu/test_ops_gpu.py has it on a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from rmsnorm_raw import array
from rmsnorm_raw.errors import InvalidInput

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_are_numpys_with_that_dtype(dtype: str) -> None:
    for made in (
        array.empty((2, 3), dtype, backend="cpu"),
        array.zeros((2, 3), dtype, backend="cpu"),
        array.asarray([[0, 1, 2], [3, 4, 5]], dtype, backend="cpu"),
        array.randn((2, 3), dtype, seed=0, backend="cpu"),
    ):
        assert type(made) is np.ndarray
        assert made.dtype == DTYPES[dtype]
        assert made.shape == (2, 3)


def test_zeros_are() -> None:
    assert not array.zeros(5, "bf16", backend="cpu").any()


def test_asarray_rounds_to_nearest_even() -> None:
    # halfway between the bf16 neighbours 1 and 1 + 2**-7, and between 1 + 2**-7 and 1 + 2**-6
    made = array.asarray([1 + 2**-8, 1 + 3 * 2**-8], "bfloat16", backend="cpu")
    assert made.astype(np.float64).tolist() == [1.0, 1 + 2**-6]


def test_asarray_copies_nothing_that_it_need_not() -> None:
    data = np.ones((4, 4), np.float32)
    assert np.shares_memory(array.asarray(data, "float32", backend="cpu"), data)


def test_randn_is_fixed_by_its_seed_and_standard_normal() -> None:
    one = array.randn((200, 100), seed=1, backend="cpu")
    assert np.array_equal(one, array.randn((200, 100), seed=1, backend="cpu"))
    assert not np.array_equal(one, array.randn((200, 100), seed=2, backend="cpu"))
    assert abs(one.mean()) < 0.05
    assert abs(one.std() - 1) < 0.05
    rounded = array.randn((200, 100), "bf16", seed=1, backend="cpu")
    assert np.array_equal(rounded, one.astype(ml_dtypes.bfloat16))


def test_the_environment_variable_picks_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMSNORM_RAW_BACKEND", "cpu")
    assert type(array.zeros(3)) is np.ndarray
    monkeypatch.setenv("RMSNORM_RAW_BACKEND", "tpu")
    with pytest.raises(InvalidInput, match="'tpu' is not one of"):
        array.zeros(3)


def test_to_numpy_hands_numpys_through_and_refuses_others() -> None:
    made = array.zeros(3, backend="cpu")
    assert array.to_numpy(made) is made
    with pytest.raises(InvalidInput, match="list"):
        array.to_numpy([1.0])


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_other_dtypes_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(InvalidInput, match=dtype):
        array.zeros(3, dtype, backend="cpu")

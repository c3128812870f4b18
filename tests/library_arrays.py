"""Arrays of every library on a CPU, for tests of the array API: made, recognised, read as bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401 - makes np.dtype("bfloat16") known
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

Array = np.ndarray
LIBRARIES = ["numpy", "torch", "jax"]


def bits(array: Any) -> Array:
    """The stored elements of an array of any library, as unsigned integers."""
    if isinstance(array, torch.Tensor):
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[array.element_size()]
        array = array.detach().cpu().contiguous().view(whole).numpy()
    array = np.asarray(array)
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def into(library: str, array: Array) -> Any:
    """A NumPy array as one of another library, same bits."""
    if library == "torch":
        whole = array.view(f"i{array.itemsize}").copy()
        return torch.from_numpy(whole).view(getattr(torch, str(array.dtype)))
    if library == "jax":
        return pytest.importorskip("jax", reason="JAX is not installed").numpy.asarray(array)
    return array


def library_of(array: Any) -> str:
    return {"ndarray": "numpy", "Tensor": "torch", "ArrayImpl": "jax"}[type(array).__name__]


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.dtype(dtype))


def address_of(array: Any) -> int:
    for read in ("data_ptr", "unsafe_buffer_pointer"):
        if hasattr(array, read):
            return int(getattr(array, read)())
    return int(array.ctypes.data)


def host(array: Any) -> Array:
    """An array of any library as NumPy's, with the dtype of ml_dtypes."""
    name = str(array.dtype).removeprefix("torch.")
    return bits(array).view(np.dtype(name))

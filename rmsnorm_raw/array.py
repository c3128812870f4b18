"""Arrays on a backend, the way CuPy spells them: NumPy's on ``cpu``, CuPy's on ``rocm``, ``cuda``.

What comes out is the library's own array, so everything else that it can do is there too. Every
function takes ``backend="rocm" | "cuda" | "cpu"`` and without it asks :func:`get_backend`. Dtypes
are "float16", "bfloat16" (ml_dtypes' in both libraries) and "float32", or fp16, bf16 and fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes  # noqa: F401 - makes np.dtype("bfloat16") known
import numpy as np

from rmsnorm_raw.backends import get_backend
from rmsnorm_raw.backends.cupy_backend import CupyBackend
from rmsnorm_raw.dtypes import dtype_name
from rmsnorm_raw.errors import InvalidInput

Shape = int | tuple[int, ...]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a dtype name.

    Raises:
        InvalidInput: the dtype is not one of fp16, bf16, fp32.
    """
    return np.dtype(dtype_name(name))


def empty(shape: Shape, dtype: str = "float32", *, backend: str | None = None) -> Any:
    """An array of that shape, uninitialised."""
    with _library(backend) as xp:
        return xp.empty(shape, numpy_dtype(dtype))


def zeros(shape: Shape, dtype: str = "float32", *, backend: str | None = None) -> Any:
    """An array of that shape, all zeros."""
    with _library(backend) as xp:
        return xp.zeros(shape, numpy_dtype(dtype))


def asarray(data: Any, dtype: str = "float32", *, backend: str | None = None) -> Any:
    """Host data (nested sequences, or anything that NumPy reads) as an array of that dtype.

    Rounds to nearest even; copies only where the dtype or the device differs.
    """
    host = np.asarray(data).astype(numpy_dtype(dtype), copy=False)
    with _library(backend) as xp:
        return xp.asarray(host)


def randn(shape: Shape, dtype: str = "float32", *, seed: int, backend: str | None = None) -> Any:
    """Standard normal numbers, the same for a seed on every backend: NumPy draws them in fp32."""
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return asarray(numbers, dtype, backend=backend)


def to_numpy(array: Any) -> np.ndarray:
    """An array of this layer in host memory; NumPy's are returned as they are.

    Raises:
        InvalidInput: it is neither a NumPy nor a CuPy array.
    """
    if isinstance(array, np.ndarray):
        return array
    if type(array).__module__.partition(".")[0] != "cupy":
        raise InvalidInput(f"a {type(array).__name__} is neither a NumPy nor a CuPy array")
    host: np.ndarray = array.get()
    return host


@contextlib.contextmanager
def _library(name: str | None) -> Iterator[Any]:
    backend = get_backend(name)
    if not isinstance(backend, CupyBackend):
        yield np
        return
    import cupy

    with cupy.cuda.Device(backend.index):
        yield cupy

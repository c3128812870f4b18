"""Arrays in any layout of a flat buffer, with elements around them that nobody may write."""

from __future__ import annotations

import math
from typing import NamedTuple

import ml_dtypes  # noqa: F401 - makes np.dtype("bfloat16") known
import numpy as np
from hypothesis import strategies as st

GUARD = 64  # elements of the buffer before and after what an array is taken from


def bits(array: np.ndarray) -> np.ndarray:
    """The stored elements as unsigned integers."""
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


class Layout(NamedTuple):
    """How an array lies.

    Attributes:
        axes: its dimensions in the order of memory, the outermost first.
        steps: of each dimension, in elements of it; negative ones go backwards, 0 repeats.
        pads: elements of each dimension that are not the array's.
        offset: elements from a multiple of 16 bytes to where it begins.
    """

    axes: tuple[int, ...]
    steps: tuple[int, ...]
    pads: tuple[int, ...]
    offset: int


@st.composite
def layouts(draw: st.DrawFn, dims: int, *, written: bool = False) -> Layout:
    """Any layout; of an array that is written the rows are dense, apart and in order."""
    offset = draw(st.integers(0, 9))
    if written:
        pads = (*[0] * (dims - 1), draw(st.integers(0, 9)))
        return Layout((*range(dims),), (1,) * dims, pads, offset)
    steps = [draw(st.sampled_from((1, 1, 1, 2, 3, -1, -2, 0))) for _ in range(dims)]
    if draw(st.booleans()):
        steps[-1] = 1
    axes = draw(st.permutations(range(dims))) if draw(st.booleans()) else range(dims)
    return Layout((*axes,), (*steps,), (*[draw(st.integers(0, 3)) for _ in steps],), offset)


class Placed(NamedTuple):
    """An array to be made.

    Attributes:
        shape: of at least one dimension.
        dtype: its name.
        layout: where in its buffer it lies.
        seed: of its numbers.
        near: they are normal around this; around 0 the rows have scales from 1/16 to 16.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    seed: int
    near: float


class Buffer:
    """A flat buffer of random numbers.

    Attributes:
        array: the view of it that was asked for.
    """

    def __init__(self, placed: Placed) -> None:
        self._placed = placed
        dtype, layout = np.dtype(placed.dtype), placed.layout
        random = np.random.default_rng(placed.seed)
        size = math.prod(self._spread) + layout.offset + 2 * GUARD
        numbers = placed.near + (0.1 if placed.near else 1.0) * random.standard_normal(size)
        room = np.empty(size + 16, dtype)
        at = -(room.ctypes.data + GUARD * dtype.itemsize) % 16 // dtype.itemsize
        self.flat = room[at : at + size]
        self.flat[:] = numbers.astype(dtype)
        self.array = self._view(self.flat)
        if not placed.near and 0 not in layout.steps and len(placed.shape) > 1:
            scales = 2.0 ** random.integers(-4, 5, (*placed.shape[:-1], 1))
            self.array[...] = (self.array.astype(np.float32) * scales).astype(dtype)
        self._before = bits(self.flat).copy()

    @property
    def _dims(self) -> list[int]:
        """Of each dimension, the elements from the first that is the array's to the last."""
        both = zip(self._placed.shape, self._placed.layout.steps, strict=True)
        return [(n - 1) * abs(step) + 1 if n and step else min(n, 1) for n, step in both]

    @property
    def _spread(self) -> list[int]:
        pads = self._placed.layout.pads
        return [max(1, n) + pad for n, pad in zip(self._dims, pads, strict=True)]

    def _view(self, flat: np.ndarray) -> np.ndarray:
        shape, layout = self._placed.shape, self._placed.layout
        spread, start = self._spread, GUARD + layout.offset
        cube = flat[start : start + math.prod(spread)].reshape([spread[k] for k in layout.axes])
        cube = cube.transpose(np.argsort(layout.axes))[(*map(slice, self._dims),)]
        cube = cube[(*[slice(None, None, step or 1) for step in layout.steps],)]
        return np.broadcast_to(cube, shape) if 0 in layout.steps else cube

    def untouched(self, *, outside: bool = False) -> bool:
        """Whether the buffer, or what of it lies outside of the array, is as it was."""
        same = bits(self.flat) == self._before
        if outside:
            same[self._view(np.arange(same.size))] = True
        return bool(same.all())

"""Which arrays lie as rows in memory, each answer against the addresses of all elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rmsnorm_raw.strides import (
    collapse,
    heads_of,
    is_contiguous,
    rows_are_apart,
    rows_in_place,
)

Layout = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def strided(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes and strides: contiguous ones, permuted, sliced, expanded, negative, arbitrary."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    dense = [1]
    for size in reversed(shape[1:]):
        dense.append(dense[-1] * max(1, size) * draw(st.sampled_from([1, 1, 1, 2])))
    strides = list(reversed(dense))
    for axis in range(len(shape)):
        change = draw(st.sampled_from(["keep", "keep", "keep", "zero", "negate", "any"]))
        if change != "keep":
            any_stride = draw(st.integers(-9, 9)) if change == "any" else 0
            strides[axis] = {"zero": 0, "negate": -strides[axis]}.get(change, any_stride)
    return shape, tuple(strides)


def offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Where each element lies, in C order."""
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*shape)]


def admissible(found: tuple[int, int, int]) -> bool:
    return found[2] == 0 or found[2] >= found[1]


@given(strided())
def test_a_collapsed_array_has_each_element_where_it_was(
    layout: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    found = collapse(*layout)
    if found is not None:
        rows, cols, row_stride = found
        assert admissible(found)
        assert offsets((rows, cols), (row_stride, 1)) == offsets(*layout)


@given(strided())
def test_what_does_not_collapse_is_no_matrix_of_dense_rows(
    layout: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    """Every (rows, cols, stride) that would do is tried, so no copy is made in vain."""
    shape, strides = layout
    if collapse(shape, strides) is None:
        cols = shape[-1]
        rows = int(np.prod(shape[:-1]))
        where = offsets(shape, strides)
        for row_stride in {0, *range(cols, 200)}:
            assert offsets((rows, cols), (row_stride, 1)) != where


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((8,), (1,), (1, 8, 8)),
        ((8,), (2,), None),
        ((2, 3, 8), (24, 8, 1), (6, 8, 8)),
        ((6, 8), (24, 1), (6, 8, 24)),  # q of a packed qkv
        ((2, 3, 8), (72, 24, 1), (6, 8, 24)),
        ((2, 3, 8), (100, 24, 1), None),  # two strides
        ((5, 8), (0, 1), (5, 8, 0)),  # the gradient of a sum
        ((2, 3, 8), (0, 0, 1), (6, 8, 0)),
        ((5, 8), (0, 0), None),
        ((2, 3, 8), (0, 8, 1), None),  # rows repeat, and not all the same
        ((5, 8), (4, 1), None),  # rows overlap
        ((5, 8), (-8, 1), None),  # reversed rows
        ((5, 1), (3, 77), (5, 1, 3)),  # the stride of one element is never used
        ((1, 8), (3, 1), (1, 8, 8)),  # nor that of one row
        ((0, 8), (8, 1), (0, 8, 8)),
        ((5, 0), (1, 1), (5, 0, 0)),
    ],
)
def test_collapse(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: tuple[int, int, int] | None
) -> None:
    assert collapse(shape, strides) == expected


# ---- rows of several heads -----------------------------------------------------------------------


@st.composite
def with_heads(draw: st.DrawFn) -> tuple[Layout, int]:
    shape, strides = draw(strided())
    rows = int(np.prod(shape[:-1]))
    assume(rows and shape[-1])
    return (shape, strides), draw(st.sampled_from([n for n in range(1, 65) if rows % n == 0]))


def heads_and_strides(layout: Layout, heads: int) -> tuple[int, int]:
    """The only strides from token to token and from head to head that could be right."""
    rows = np.reshape(offsets(*layout), (-1, heads, layout[0][-1]))
    token = int(rows[1, 0, 0] - rows[0, 0, 0]) if len(rows) > 1 else heads * layout[0][-1]
    head = int(rows[0, 1, 0] - rows[0, 0, 0]) if heads > 1 else 0
    return token, head


@given(with_heads())
def test_each_element_of_each_head_is_where_it_was(case: tuple[Layout, int]) -> None:
    (shape, strides), heads = case
    found = rows_in_place(shape, strides, heads)
    if found is not None:
        whole = int(np.prod(shape[:-1])) // heads, heads, shape[-1]
        assert offsets(whole, (*found, 1)) == offsets(shape, strides)


@given(with_heads())
def test_what_has_no_rows_in_place_has_none(case: tuple[Layout, int]) -> None:
    """No copy is made in vain."""
    (shape, strides), heads = case
    if rows_in_place(shape, strides, heads) is None:
        cols = shape[-1]
        token, head = heads_and_strides((shape, strides), heads)
        whole = int(np.prod(shape[:-1])) // heads, heads, cols
        alike = offsets(whole, (token, head, 1)) == offsets(shape, strides)
        overlapping = 0 < head < cols or 0 < token < cols or min(token, head) < 0
        assert not alike or overlapping


@given(strided())
def test_heads_of_says_where_rows_lie_that_have_no_common_stride(layout: Layout) -> None:
    assume(0 not in layout[0])
    heads = heads_of(*layout)
    if heads > 1:
        assert collapse(*layout) is None
        assert rows_in_place(*layout, heads) is not None


@given(with_heads())
def test_rows_that_are_apart_share_no_element(case: tuple[Layout, int]) -> None:
    (shape, strides), heads = case
    found = rows_in_place(shape, strides, heads)
    if found is not None and rows_are_apart(shape, *found, heads):
        where = offsets(shape, strides)
        assert len(set(where)) == len(where)


@given(strided())
def test_contiguous_is_in_c_order(layout: Layout) -> None:
    where = offsets(*layout)
    assert is_contiguous(*layout) == (where == list(range(len(where))))


@pytest.mark.parametrize(
    ("shape", "strides", "heads", "expected"),
    [
        ((5, 4, 8), (32, 8, 1), 4, (32, 8)),
        ((20, 8), (8, 1), 4, (32, 8)),  # tokens and heads in one dimension
        ((5, 4, 8), (96, 8, 1), 4, (96, 8)),  # q of a packed qkv
        ((2, 3, 4, 8), (300, 100, 8, 1), 4, (100, 8)),  # batch and sequence are tokens
        ((2, 3, 4, 8), (400, 100, 8, 1), 4, None),  # they are not: three strides
        ((2, 3, 4, 8), (500, 32, 8, 1), 12, (500, 8)),  # sequence and heads are heads
        ((4, 5, 8), (8, 96, 1), 5, (8, 96)),  # heads before tokens
        ((1, 4, 8), (7, 8, 1), 4, (32, 8)),
        ((5, 1, 8), (96, 7, 1), 1, (96, 0)),
        ((5, 4, 8), (0, 8, 1), 4, (0, 8)),
        ((5, 4, 8), (96, 8, 1), 2, None),  # half of the heads are a token's
        ((5, 4, 8), (96, 16, 2), 4, None),  # the last dimension is not dense
        ((5, 4, 8), (96, 4, 1), 4, None),  # heads overlap
    ],
)
def test_rows_in_place(
    shape: tuple[int, ...], strides: tuple[int, ...], heads: int, expected: tuple[int, int] | None
) -> None:
    assert rows_in_place(shape, strides, heads) == expected


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        ((32, 8), True),
        ((96, 8), True),
        ((8, 40), True),  # heads before tokens
        ((0, 8), False),  # tokens repeat
        ((8, 0), False),  # heads repeat
        ((16, 8), False),  # a token begins within another
    ],
)
def test_rows_are_apart(strides: tuple[int, int], expected: bool) -> None:
    assert rows_are_apart((5, 4, 8), *strides, 4) == expected

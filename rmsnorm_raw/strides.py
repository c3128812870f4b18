"""Strides: which arrays lie in memory as rows that a kernel can read or write where they are.

Rows are numbered in C order of the leading dimensions; the last dimension holds a row and must be
dense. A matrix has one stride from row to row. With several heads a token it has two, from head to
head and from token to token: q cut out of a packed qkv, (tokens, heads, head_dim), has such.
Strides are in elements, one a dimension.
"""

from __future__ import annotations

import math

Ints = tuple[int, ...]


def collapse(shape: Ints, strides: Ints) -> tuple[int, int, int] | None:
    """(rows, cols, row_stride) of an array seen as a matrix in place; None if only a copy can be.

    The leading dimensions must fall into one with a single stride, of 0 (one row, repeated) or at
    least a row's length (no two rows overlap).
    """
    cols, rows = shape[-1], math.prod(shape[:-1])
    if rows == 0 or cols == 0:
        return rows, cols, cols
    found = _levels(shape, strides)
    row_stride = found[0][1] if found else cols
    single = len(found) < 2 and _reads(row_stride, cols) and _is_dense(shape, strides)
    return (rows, cols, row_stride) if single else None


def rows_in_place(shape: Ints, strides: Ints, heads: int) -> tuple[int, int] | None:
    """(row_stride, head_stride) of an array whose tokens have some heads; None if there are none.

    As :class:`.launch.Tensor` has them: from one token's rows to the next's, and from one head's
    row to the next's of its token. Each is 0 or at least a row's length.

    Args:
        heads: rows of a token; with 1, row_stride is that of :func:`collapse`, head_stride 0.
    """
    if heads == 1:
        matrix = collapse(shape, strides)
        return None if matrix is None else (matrix[2], 0)
    cols, found = shape[-1], _levels(shape, strides)
    if not found or len(found) > 2 or not _is_dense(shape, strides):
        return None
    (inner, head_stride), *outer = found
    if outer:
        fits, row_stride = inner == heads, outer[0][1]
    else:
        fits, row_stride = inner % heads == 0, heads * head_stride
    fits = fits and _reads(head_stride, cols) and _reads(row_stride, cols)
    return (row_stride, head_stride) if fits else None


def heads_of(shape: Ints, strides: Ints) -> int:
    """The heads for which an array without a common stride has its rows in place; 1 for none.

    Args:
        shape: of an array that has elements.
    """
    found = _levels(shape, strides)
    heads = found[0][0] if len(found) == 2 else 1
    return heads if rows_in_place(shape, strides, heads) is not None else 1


def rows_are_apart(shape: Ints, row_stride: int, head_stride: int, heads: int) -> bool:
    """Whether no two of the rows that :func:`rows_in_place` found share an element."""
    tokens = math.prod(shape[:-1]) // heads
    return are_apart((heads, tokens), (head_stride, row_stride), shape[-1])


def are_apart(counts: Ints, strides: Ints, length: int = 1) -> bool:
    """Whether each piece of a length lies beyond all those of the dimensions of smaller strides.

    Args:
        counts: of pieces, in each dimension.
        strides: from one to the next.
        length: elements of a piece.
    """
    free_from = length
    for stride, count in sorted(zip(strides, counts, strict=True)):
        if count > 1:
            if stride < free_from:
                return False
            free_from += stride * (count - 1)
    return True


def is_contiguous(shape: Ints, strides: Ints) -> bool:
    """Whether the elements lie one after the other, in C order."""
    found = _levels((*shape, 1), (*strides, 1))
    return 0 in shape or not found or (len(found) == 1 and found[0][1] == 1)


def _levels(shape: Ints, strides: Ints) -> list[tuple[int, int]]:
    """(size, stride) of the leading dimensions, innermost first, merged where they have one stride.

    Dimensions of one element are left out: their strides are never used, and may be anything.
    """
    found: list[tuple[int, int]] = []
    for size, stride in zip(shape[-2::-1], strides[-2::-1], strict=True):
        if size == 1:
            continue
        if found and stride == found[-1][0] * found[-1][1]:
            found[-1] = found[-1][0] * size, found[-1][1]
        else:
            found.append((size, stride))
    return found


def _is_dense(shape: Ints, strides: Ints) -> bool:
    return shape[-1] == 1 or strides[-1] == 1


def _reads(stride: int, cols: int) -> bool:
    return stride == 0 or stride >= cols

"""Tensors between guard bands, their rows between gaps: what is written there shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rmsnorm_raw.backends import Backend
from rmsnorm_raw.dtypes import stored_bytes
from rmsnorm_raw.gate import Case, Engine
from rmsnorm_raw.launch import Tensor
from rmsnorm_raw.problem import MATRICES, OF_ROWS

#: byte around inputs: NaN in float16, 3.4e38 in the others. Not that of outputs: a NaN that is read
#: past a row and stored past another would leave no trace
INPUT_FILL = 0x7F
#: bytes between rows, at least: a lane's widest store
GAP_BYTES = 16
#: guard bytes on both sides of a tensor, beside one whole row
GUARD_BYTES = 4096
ALLOCATION_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor between guard bands, its rows between gaps; all of it begins as one byte.

    Attributes:
        tensor: as a plan takes it.
        rows: of the tensor, here in the order in which they lie.
        row_bytes: bytes of a row.
        stride_bytes: bytes from one row to the next.
        base: where the allocation begins.
        size_bytes: its size.
        fill: the byte.
        owner: keeps the memory.
    """

    tensor: Tensor
    rows: int
    row_bytes: int
    stride_bytes: int
    base: int
    size_bytes: int
    fill: int
    owner: Any

    def broken(self, engine: Engine) -> str:
        """Where something was written outside the tensor, in words; "" for nowhere."""
        front = self.tensor.address - self.base
        end = front + (self.rows - 1) * self.stride_bytes + self.row_bytes
        back, gap = self.size_bytes - end, self.stride_bytes - self.row_bytes
        if at := engine.broken(self.base, 1, front, front, self.fill):
            return f"byte {front - at[1]} before the first row"
        if at := engine.broken(self.base + end, 1, back, back, self.fill):
            return f"byte {at[1]} after the last row"
        if gap and self.rows > 1:
            first = self.tensor.address + self.row_bytes
            if at := engine.broken(first, self.rows - 1, gap, self.stride_bytes, self.fill):
                return f"byte {at[1]} after row {at[0]}"
        return ""


def output_fill(dtype: str) -> int:
    """The byte that an output begins as: NaN in its dtype."""
    return 0x80 if dtype == "float8_e4m3fnuz" else 0xFF


def allocate(backend: Backend, case: Case, name: str, fill: int) -> Buffer:
    """A buffer for a tensor, aligned as the problem promises, and no better where it could be.

    With several heads a token's rows follow each other in one half of the matrices, and all of a
    head's in the other half.
    """
    (rows, cols, dtype), problem = case.shape(name), case.problem
    element, heads = stored_bytes(dtype), case.heads(name)
    # of all but these a lane moves as many elements at once as of x
    elements = 1 if name in OF_ROWS else max(1, problem.alignment // problem.element_bytes)
    vector = elements * element
    skew = vector if problem.alignment < 16 else 0
    row_bytes = cols * element
    if name not in MATRICES:
        return guarded(backend, rows, row_bytes, row_bytes, skew, fill)
    # an odd number of vectors, or every second row would be better aligned; each matrix its
    # own, or a kernel that takes one's stride for another's would pass
    least = -(-row_bytes // vector) + -(-GAP_BYTES // vector) | 1
    stride_bytes = (least + 2 * MATRICES.index(name)) * vector
    buffer = guarded(backend, rows, row_bytes, stride_bytes, skew, fill)
    strides = (stride_bytes // element, 0)
    if heads > 1 and MATRICES.index(name) % 2:
        strides = (strides[0], problem.tokens * strides[0])
    elif heads > 1:
        strides = (heads * strides[0], strides[0])
    return replace(buffer, tensor=Tensor(buffer.tensor.address, *strides))


def guarded(
    backend: Backend, rows: int, row_bytes: int, stride_bytes: int, skew: int, fill: int
) -> Buffer:
    """A buffer whose first row is ``skew`` bytes off a multiple of ALLOCATION_ALIGNMENT."""
    guard_bytes = GUARD_BYTES + stride_bytes
    size_bytes = 2 * guard_bytes + rows * stride_bytes + 2 * ALLOCATION_ALIGNMENT
    base, owner = backend.allocate(size_bytes)
    backend.fill(base, fill, size_bytes, 0)
    address = -(-(base + guard_bytes) // ALLOCATION_ALIGNMENT) * ALLOCATION_ALIGNMENT + skew
    return Buffer(Tensor(address), rows, row_bytes, stride_bytes, base, size_bytes, fill, owner)

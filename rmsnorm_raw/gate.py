"""The gate's two engines: they write gate data, sum rows and columns in float64, and compare.

``HostEngine`` reads bytes back and works in NumPy, in blocks of rows. ``DeviceEngine`` launches the
naive kernels of :mod:`rmsnorm_raw.kernels.reference`; only lists (of rows, of columns, of what each
thread found) come to the host. Same data, same bounds; the tests hold one against the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rmsnorm_raw import bounds
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.bounds import SIGNIFICAND_BITS, Bits, Floats, Worst
from rmsnorm_raw.dtypes import DTYPE_BYTES
from rmsnorm_raw.kernels import reference as kernels
from rmsnorm_raw.launch import Tensor
from rmsnorm_raw.module import build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import Source

#: inputs that are a function of the seed alone, in the order of the kernels' numbers
DATA = ("x", "dout", "weight")
REFERENCE = Source("rmsnorm_reference.hip", kernels.TEXT, (), kernels.ENTRY_POINTS)


class Case(NamedTuple):
    """One data set of one problem: the gate's, or the exact one of :func:`bounds.gate_data`.

    ``given``: backward is given this multiple of its rstd, where it is given one.
    """

    problem: Problem
    seed: int
    exact: bool
    given: float = 1.0

    def shape(self, name: str) -> tuple[int, int, str]:
        """(rows, cols, dtype) of a tensor; rstd is a column, weight and dweight are one row."""
        problem = self.problem
        if name == "rstd":
            return problem.rows, 1, "float32"
        if name in ("weight", "dweight"):
            return 1, problem.cols, problem.weight_dtype or problem.dtype
        return problem.rows, problem.cols, problem.dtype


class Engine(Protocol):
    """What the gate asks for. ``tensors`` holds what the problem has, by its usual name."""

    backend: Backend
    stream: int

    def write(self, case: Case, name: str, tensor: Tensor) -> None:
        """Write an input's gate data."""

    def changed(self, case: Case, name: str, tensor: Tensor) -> tuple[int, int] | None:
        """(row, column) of an element that :meth:`write` did not leave so, if there is one."""

    def row_sums(self, case: Case, tensors: Mapping[str, Tensor]) -> Floats:
        """As :func:`bounds.row_sums`."""

    def column_sums(self, case: Case, tensors: Mapping[str, Tensor], rstd: Floats) -> Floats:
        """(2, cols) sums over rows of dout * xhat and |dout * xhat|."""

    def worst(
        self, case: Case, tensors: Mapping[str, Tensor], output: str, terms: Floats, factor: float
    ) -> Worst:
        """The worst element of y or dx, as :func:`bounds.worst_of`.

        Args:
            case: the data.
            tensors: inputs and outputs.
            output: "y" or "dx".
            terms: from :func:`bounds.row_terms`.
            factor: from :func:`bounds.bound_factor`.
        """

    def broken(
        self, address: int, rows: int, row_bytes: int, stride_bytes: int, fill: int
    ) -> tuple[int, int] | None:
        """(row, byte) of a byte that is not ``fill``, in rows ``stride_bytes`` apart, if any."""


class HostEngine:
    """NumPy on bytes that are copied back: for the simulator, whose memory is the host's."""

    def __init__(self, backend: Backend, stream: int = 0) -> None:
        self.backend = backend
        self.stream = stream

    def write(self, case: Case, name: str, tensor: Tensor) -> None:
        """See :class:`Engine`."""
        rows, cols, dtype = case.shape(name)
        for first, last in bounds.row_blocks(rows, cols):
            address, memory, view = self._view(tensor, first, last, cols, dtype)
            view[:] = bounds.gate_data(name, first, last, cols, dtype, case.seed, exact=case.exact)
            self.backend.from_host(address, memory, self.stream)

    def changed(self, case: Case, name: str, tensor: Tensor) -> tuple[int, int] | None:
        """See :class:`Engine`."""
        rows, cols, dtype = case.shape(name)
        for first, last in bounds.row_blocks(rows, cols):
            view = self._view(tensor, first, last, cols, dtype)[2]
            wrong = view != bounds.gate_data(
                name, first, last, cols, dtype, case.seed, exact=case.exact
            )
            if wrong.any():
                row, col = divmod(int(np.argmax(wrong)), cols)
                return first + row, col
        return None

    def row_sums(self, case: Case, tensors: Mapping[str, Tensor]) -> Floats:
        """See :class:`Engine`."""
        weight = self._weight(case, tensors)
        return np.concatenate(
            [
                bounds.row_sums(
                    self._rows(case, tensors, "dout", first, last) if "dout" in tensors else None,
                    self._rows(case, tensors, "x", first, last),
                    weight,
                )
                for first, last in bounds.row_blocks(case.problem.rows, case.problem.cols)
            ],
            axis=1,
        )

    def column_sums(self, case: Case, tensors: Mapping[str, Tensor], rstd: Floats) -> Floats:
        """See :class:`Engine`."""
        sums = np.zeros((2, case.problem.cols))
        for first, last in bounds.row_blocks(case.problem.rows, case.problem.cols):
            product = self._rows(case, tensors, "x", first, last) * rstd[first:last, None]
            product *= self._rows(case, tensors, "dout", first, last)
            sums += product.sum(axis=0), np.abs(product).sum(axis=0)
        return sums

    def worst(
        self, case: Case, tensors: Mapping[str, Tensor], output: str, terms: Floats, factor: float
    ) -> Worst:
        """See :class:`Engine`."""
        rows, cols, dtype = case.shape(output)
        weight = self._weight(case, tensors)
        found = []
        for first, last in bounds.row_blocks(rows, cols):
            x = self._rows(case, tensors, "x", first, last)
            if output == "y":
                want, scale = bounds.y_and_scale(x, weight, terms[0, first:last])
            else:
                dout = self._rows(case, tensors, "dout", first, last)
                want, scale = bounds.dx_and_scale(dout, x, weight, terms[:, first:last])
            got = self._view(tensors[output], first, last, cols, dtype)[2]
            worst = bounds.worst_of(got, want, scale, factor, dtype, exact=case.exact)
            found.append(worst._replace(row=first + worst.row))
        return max(found, key=lambda worst: worst.ratio)

    def broken(
        self, address: int, rows: int, row_bytes: int, stride_bytes: int, fill: int
    ) -> tuple[int, int] | None:
        """See :class:`Engine`."""
        memory = self.backend.to_host(address, (rows - 1) * stride_bytes + row_bytes, self.stream)
        wrong = _strided(memory, rows, row_bytes, stride_bytes) != fill
        return divmod(int(np.argmax(wrong)), row_bytes) if wrong.any() else None

    def _view(
        self, tensor: Tensor, first: int, last: int, cols: int, dtype: str
    ) -> tuple[int, npt.NDArray[np.uint8], Bits]:
        """Address and copy of the memory from a first row to a last, and its elements."""
        stride = tensor.row_stride
        address = tensor.address + first * stride * DTYPE_BYTES[dtype]
        size_bytes = ((last - first - 1) * stride + cols) * DTYPE_BYTES[dtype]
        memory = self.backend.to_host(address, size_bytes, self.stream)
        elements = memory.view(bounds.STORAGE[dtype])
        return address, memory, _strided(elements, last - first, cols, stride)

    def _rows(
        self, case: Case, tensors: Mapping[str, Tensor], name: str, first: int, last: int
    ) -> Floats:
        _, cols, dtype = case.shape(name)
        return bounds.decode(self._view(tensors[name], first, last, cols, dtype)[2], dtype)

    def _weight(self, case: Case, tensors: Mapping[str, Tensor]) -> Floats | None:
        return self._rows(case, tensors, "weight", 0, 1)[0] if "weight" in tensors else None


def _strided(flat: npt.NDArray[Any], rows: int, cols: int, stride: int) -> npt.NDArray[Any]:
    item = flat.itemsize
    return np.lib.stride_tricks.as_strided(flat, (rows, cols), (stride * item, item))


class DeviceEngine:
    """The kernels of :mod:`rmsnorm_raw.kernels.reference`, on any backend.

    Row sums are taken by one thread per 128 columns of a row, column sums by about 2**18 threads.
    """

    #: blocks of the kernels that loop over rows; their findings are 48 bytes a thread
    ROW_BLOCKS = 512
    #: blocks of the kernels that loop over a list
    LIST_BLOCKS = 1 << 14
    #: blocks that gather findings, where there are more: 200 KB come to the host and not 6 MB
    GATHER_BLOCKS = 16

    def __init__(self, backend: Backend, stream: int = 0) -> None:
        self.backend = backend
        self.stream = stream
        self._functions = build(REFERENCE, backend).code.functions

    def write(self, case: Case, name: str, tensor: Tensor) -> None:
        """See :class:`Engine`."""
        rows, args = self._datum_args(case, name, tensor)
        self._launch("reference_write", min(rows, self.ROW_BLOCKS), *args)

    def changed(self, case: Case, name: str, tensor: Tensor) -> tuple[int, int] | None:
        """See :class:`Engine`."""
        rows, args = self._datum_args(case, name, tensor)
        worst = self._findings("reference_changed", rows, *args)
        return (worst.row, worst.col) if worst.ratio else None

    def row_sums(self, case: Case, tensors: Mapping[str, Tensor]) -> Floats:
        """See :class:`Engine`."""
        rows, cols = case.problem.rows, case.problem.cols
        shares = min(1024, max(1, cols // 128))
        partials = self._doubles(shares * 3 * rows)
        self._launch(
            "reference_row_partials", self._list_blocks(rows * shares),
            *_matrix(tensors, "dout"), *_matrix(tensors, "x"), _address(tensors, "weight"),
            np.int64(rows), np.int64(cols), *_significands(case), np.int64(shares),
            partials.address,
        )  # fmt: skip
        return self._combine(partials, shares, 3, rows)

    def column_sums(self, case: Case, tensors: Mapping[str, Tensor], rstd: Floats) -> Floats:
        """See :class:`Engine`."""
        rows, cols = case.problem.rows, case.problem.cols
        share_rows = -(-rows // max(1, (1 << 18) // cols))
        shares = -(-rows // share_rows)
        partials = self._doubles(shares * 2 * cols)
        on_device = self._upload(rstd)
        self._launch(
            "reference_column_partials", self._list_blocks(cols * shares),
            *_matrix(tensors, "dout"), *_matrix(tensors, "x"), on_device.address,
            np.int64(rows), np.int64(cols), _significands(case)[0], np.int64(shares),
            np.int64(share_rows), partials.address,
        )  # fmt: skip
        return self._combine(partials, shares, 2, cols)

    def worst(
        self, case: Case, tensors: Mapping[str, Tensor], output: str, terms: Floats, factor: float
    ) -> Worst:
        """See :class:`Engine`."""
        rows, cols, _ = case.shape(output)
        on_device = self._upload(terms)
        return self._findings(
            "reference_worst", rows, *_matrix(tensors, output), *_matrix(tensors, "dout"),
            *_matrix(tensors, "x"), _address(tensors, "weight"), on_device.address, np.int64(rows),
            np.int64(cols), *_significands(case), np.float64(factor), np.int32(case.exact),
        )  # fmt: skip

    def broken(
        self, address: int, rows: int, row_bytes: int, stride_bytes: int, fill: int
    ) -> tuple[int, int] | None:
        """See :class:`Engine`."""
        worst = self._findings(
            "reference_broken", rows, np.uint64(address), np.int64(rows), np.int64(row_bytes),
            np.int64(stride_bytes), np.int32(fill),
        )  # fmt: skip
        return (worst.row, worst.col) if worst.ratio else None

    def _datum_args(
        self, case: Case, name: str, tensor: Tensor
    ) -> tuple[int, tuple[np.generic, ...]]:
        rows, cols, dtype = case.shape(name)
        return rows, (
            np.uint64(tensor.address), np.int64(rows), np.int64(cols), np.int64(tensor.row_stride),
            np.int32(SIGNIFICAND_BITS[dtype]), np.int32(DATA.index(name)), np.int32(case.exact),
            np.uint64(case.seed),
        )  # fmt: skip

    def _launch(self, name: str, blocks: int, *args: np.generic) -> None:
        self.backend.launch(self._functions[name], blocks, kernels.BLOCK, args, 0, self.stream)

    def _findings(self, name: str, rows: int, *args: np.generic) -> Worst:
        """The worst of what the threads of a comparing kernel leave in its last argument."""
        blocks = min(rows, self.ROW_BLOCKS)
        records = self._doubles(blocks * kernels.BLOCK * kernels.RECORD)
        self._launch(name, blocks, *args, records.address)
        if blocks > self.GATHER_BLOCKS:
            found, count = records, np.int64(blocks * kernels.BLOCK)
            records = self._doubles(self.GATHER_BLOCKS * kernels.BLOCK * kernels.RECORD)
            args = (found.address, count, records.address)
            self._launch("reference_gather", self.GATHER_BLOCKS, *args)
        findings = self._download(records, kernels.RECORD)
        ratio, row, col, *rest = findings[np.argmax(findings[:, 0])].tolist()
        return Worst(ratio, int(row), int(col), *rest)

    def _combine(self, partials: _Memory, shares: int, kinds: int, items: int) -> Floats:
        """(kinds, items) sums over shares; the partial sums are no longer in use afterwards."""
        sums = self._doubles(kinds * items)
        self._launch(
            "reference_combine", self._list_blocks(kinds * items), partials.address,
            np.int64(shares), np.int64(kinds * items), sums.address,
        )  # fmt: skip
        return self._download(sums, items)

    def _list_blocks(self, items: int) -> int:
        return min(-(-items // kernels.BLOCK), self.LIST_BLOCKS)

    def _doubles(self, count: int) -> _Memory:
        address, owner = self.backend.allocate(8 * count)
        return _Memory(np.uint64(address), 8 * count, owner)

    def _upload(self, values: Floats) -> _Memory:
        memory = self._doubles(values.size)
        self.backend.from_host(int(memory.address), np.ascontiguousarray(values), self.stream)
        return memory

    def _download(self, memory: _Memory, cols: int) -> Floats:
        raw = self.backend.to_host(int(memory.address), memory.size_bytes, self.stream)
        return raw.view(np.float64).reshape(-1, cols)


class _Memory(NamedTuple):
    """Scratch memory of a device. It must outlive the kernels: every user ends with a download."""

    address: np.uint64
    size_bytes: int
    owner: Any


def _address(tensors: Mapping[str, Tensor], name: str) -> np.uint64:
    """A tensor's address, or 0, which the kernels take for "absent"."""
    return np.uint64(tensors[name].address if name in tensors else 0)


def _matrix(tensors: Mapping[str, Tensor], name: str) -> tuple[np.uint64, np.int64]:
    stride = tensors[name].row_stride if name in tensors else 0
    return _address(tensors, name), np.int64(stride)


def _significands(case: Case) -> tuple[np.int32, np.int32]:
    """What the kernels call p and weight_p: the dtypes of the matrices and of the weight."""
    _, _, dtype = case.shape("x")
    _, _, weight_dtype = case.shape("weight")
    return np.int32(SIGNIFICAND_BITS[dtype]), np.int32(SIGNIFICAND_BITS[weight_dtype])

"""The gate's engine on a device: the naive kernels of :mod:`rmsnorm_raw.kernels.reference`.

Only lists (of rows, of columns, of what each thread found) come to the host.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from rmsnorm_raw.backends import Backend
from rmsnorm_raw.bounds import SIGNIFICAND_BITS, Floats, Worst
from rmsnorm_raw.gate import Case
from rmsnorm_raw.gate_data import DATA
from rmsnorm_raw.kernels import reference as kernels
from rmsnorm_raw.launch import Tensor, Tensors
from rmsnorm_raw.module import build
from rmsnorm_raw.source import Source

REFERENCE = Source("rmsnorm_reference.hip", kernels.TEXT, (), kernels.ENTRY_POINTS)


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

    def row_sums(self, case: Case, tensors: Tensors) -> Floats:
        """See :class:`Engine`."""
        rows, cols = case.problem.rows, case.problem.cols
        shares = self._shares(cols)
        partials = self._doubles(shares * 3 * rows)
        self._launch(
            "reference_row_partials", self._list_blocks(rows * shares),
            *_matrix(case, tensors, "dout"), *_matrix(case, tensors, "x"),
            *_matrix(case, tensors, "residual"), *_list(case, tensors, "weight"), *_shape(case),
            np.int64(shares), partials.address,
        )  # fmt: skip
        return self._combine(partials, shares, 3, rows)

    def column_sums(self, case: Case, tensors: Tensors, rstd: Floats) -> Floats:
        """See :class:`Engine`."""
        kinds, items = case.columns
        steps = case.problem.rows * case.problem.cols // items
        share_steps = -(-steps // max(1, (1 << 18) // items))
        shares = -(-steps // share_steps)
        partials = self._doubles(shares * kinds * items)
        on_device = self._upload(rstd)
        self._launch(
            "reference_column_partials", self._list_blocks(items * shares),
            *_matrix(case, tensors, "dout"), *_matrix(case, tensors, "x"), on_device.address,
            *_shape(case), np.int64(shares), np.int64(share_steps), np.int64(kinds),
            partials.address,
        )  # fmt: skip
        return self._combine(partials, shares, kinds, items)

    def row_maxima(self, case: Case, tensors: Tensors, rstd: Floats, factor: float) -> Floats:
        """See :class:`Engine`."""
        rows, shares = case.problem.rows, self._shares(case.problem.cols)
        partials = self._doubles(shares * 3 * rows)
        on_device = self._upload(rstd)
        self._launch(
            "reference_row_maxima", self._list_blocks(rows * shares),
            *_forward_inputs(case, tensors), on_device.address, *_shape(case),
            _format(case.cast), np.float64(factor), np.int64(shares), partials.address,
        )  # fmt: skip
        return self._combine(partials, shares, 3, rows, largest=True)

    def worst(
        self, case: Case, tensors: Tensors, output: str, terms: Floats, factor: float
    ) -> Worst:
        """See :class:`Engine`."""
        on_device = self._upload(terms)
        args: tuple[np.generic, ...]
        if output == "y":
            name, scale = "y", case.problem.extras.scale
            args = (
                *_forward_inputs(case, tensors), on_device.address, _address(tensors, "scale"),
                np.int64(scale == "dynamic"), *_shape(case), _format(case.cast),
                np.float64(factor),
            )  # fmt: skip
        elif output == "residual_out":
            name = "sum"
            matrices = (_matrix(case, tensors, each) for each in ("x", "residual"))
            args = (*chain(*matrices), *_shape(case))
        else:
            name = "dx"
            matrices = (_matrix(case, tensors, each) for each in ("dout", "x", "dresidual_out"))
            args = (
                *chain(*matrices), *_list(case, tensors, "weight"), on_device.address,
                *_shape(case), np.float64(factor), np.int32(case.exact),
            )  # fmt: skip
        compared = _matrix(case, tensors, output)
        return self._findings(f"reference_worst_{name}", case.problem.rows, *compared, *args)

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
        rows, cols, _ = case.shape(name)
        special = (-1 if row is None else row for row in case.special_rows(name))
        return rows, (
            *_matrix(case, {name: tensor}, name), np.int64(rows), np.int64(cols),
            np.int64(case.heads(name)), np.int32(DATA.index(name)), np.int32(case.exact),
            np.uint64(case.seed), *map(np.int64, special),
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

    def _combine(
        self, partials: _Memory, shares: int, kinds: int, items: int, *, largest: bool = False
    ) -> Floats:
        """(kinds, items) sums or maxima over shares; the partial ones are out of use afterwards."""
        results = self._doubles(kinds * items)
        self._launch(
            "reference_combine", self._list_blocks(kinds * items), partials.address,
            np.int64(shares), np.int64(kinds * items), np.int32(largest), results.address,
        )  # fmt: skip
        return self._download(results, items)

    def _shares(self, cols: int) -> int:
        return min(1024, max(1, cols // 128))

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


def _address(tensors: Tensors, name: str) -> np.uint64:
    """A tensor's address, or 0, which the kernels take for "absent"."""
    return np.uint64(tensors[name].address if name in tensors else 0)


def _matrix(case: Case, tensors: Tensors, name: str) -> tuple[np.generic, ...]:
    """What the kernels call a MATRIX: address, strides of tokens and of heads, format."""
    if name not in tensors:
        return np.uint64(0), np.int64(0), np.int64(0), np.int32(0)
    address, row_stride, head_stride = tensors[name]
    dtype = case.shape(name)[2]
    return np.uint64(address), np.int64(row_stride), np.int64(head_stride), _format(dtype)


def _list(case: Case, tensors: Tensors, name: str) -> tuple[np.generic, np.generic]:
    """What the kernels call a LIST: address, format."""
    dtype = case.shape(name)[2] if name in tensors else None
    return _address(tensors, name), _format(dtype)


def _forward_inputs(case: Case, tensors: Tensors) -> tuple[np.generic, ...]:
    x, residual = (_matrix(case, tensors, name) for name in ("x", "residual"))
    weight, bias = (_list(case, tensors, name) for name in ("weight", "bias"))
    return *x, *residual, *weight, *bias


def _shape(case: Case) -> tuple[np.generic, ...]:
    problem, more = case.problem, case.problem.extras
    return (
        np.int64(problem.rows), np.int64(problem.cols), np.int64(more.heads),
        np.int32(more.per_head), np.float64(case.offset),
    )  # fmt: skip


def _format(dtype: str | None) -> np.int32:
    """What the kernels call p; 0 for nothing."""
    bits = SIGNIFICAND_BITS[dtype] if dtype else 0
    return np.int32(-bits if dtype == "float8_e4m3fnuz" else bits)

"""What the gate asks of an engine, and the engine in NumPy.

An engine writes gate data, sums rows and columns in float64, and compares. ``HostEngine`` reads
bytes back and works in blocks of tokens; :mod:`rmsnorm_raw.gate_device` has the one that launches
kernels. Same data, same bounds; the tests hold one against the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rmsnorm_raw import bounds
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.bounds import Bits, Floats, Wanted, Worst
from rmsnorm_raw.dtypes import stored_bytes
from rmsnorm_raw.gate_data import ZEROED, gate_data
from rmsnorm_raw.launch import Tensor, Tensors
from rmsnorm_raw.problem import MATRICES, Operand, Problem


class Case(NamedTuple):
    """One data set of one problem: the gate's, or the exact one of :func:`gate_data`.

    ``given``: what the gate works out itself, backward's rstd and a static scale, is given as this
    multiple of it. ``zero_row``: this row of x, and of its residual, is zeros; None for none.
    ``large_row``: this one is large; None for none. ``large_weights``: so is some of the weight.
    """

    problem: Problem
    seed: int
    exact: bool
    given: float = 1.0
    zero_row: int | None = None
    large_row: int | None = None
    large_weights: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """What is read."""
        return tuple(name for name, it in _operands(self.problem).items() if not it.is_output)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What is written."""
        return tuple(name for name, it in _operands(self.problem).items() if it.is_output)

    def operand(self, name: str) -> Operand:
        """A tensor of the problem."""
        return _operands(self.problem)[name]

    def heads(self, name: str) -> int:
        """Rows of a token: 1 of what is no matrix."""
        return self.problem.extras.heads if name in MATRICES else 1

    def shape(self, name: str) -> tuple[int, int, str]:
        """(rows, cols, dtype) of a tensor, a matrix's as the problem counts them.

        rstd and a row's scale are columns; weight, bias and their gradients are one row.
        """
        _, dtype, rows, cols, _ = self.operand(name)
        heads = self.heads(name)
        return rows * heads, cols // heads, dtype

    def special_rows(self, name: str) -> tuple[int | None, int | None]:
        """The row of zeros and the large row of a tensor, as :func:`gate_data` takes them."""
        if name == "weight":
            return None, 0 if self.large_weights else None
        return (self.zero_row if name in ZEROED else None), self.large_row

    @property
    def offset(self) -> float:
        """What is added to the weight, as fp32 holds it."""
        return float(np.float32(self.problem.extras.weight_offset))

    @property
    def cast(self) -> str | None:
        """The dtype that x * rstd is rounded to before the weight; float32 is what it has."""
        problem = self.problem
        llama = problem.extras.casting == "llama" and problem.dtype != "float32"
        return problem.dtype if llama else None

    @property
    def columns(self) -> tuple[int, int]:
        """(kinds, items) of :meth:`Engine.column_sums`."""
        more = self.problem.extras
        parts = more.heads if more.per_head else 1
        return 4 if more.bias_dtype else 2, parts * self.problem.cols


class Engine(Protocol):
    """What the gate asks for. ``tensors`` holds what the problem has, by its usual name."""

    backend: Backend
    stream: int

    def write(self, case: Case, name: str, tensor: Tensor) -> None:
        """Write an input's gate data."""

    def changed(self, case: Case, name: str, tensor: Tensor) -> tuple[int, int] | None:
        """(row, column) of an element that :meth:`write` did not leave so, if there is one."""

    def row_sums(self, case: Case, tensors: Tensors) -> Floats:
        """As :func:`bounds.row_sums`, of x and its residual."""

    def column_sums(self, case: Case, tensors: Tensors, rstd: Floats) -> Floats:
        """Sums over rows of dout * xhat and |dout * xhat|; with a bias, then of dout and |dout|.

        (2 or 4, cols), or (2 or 4, heads * cols) where each head has a weight.
        """

    def row_maxima(self, case: Case, tensors: Tensors, rstd: Floats, factor: float) -> Floats:
        """(3, rows) maxima over columns of |y|, and of the scale and slack of its bound."""

    def worst(
        self, case: Case, tensors: Tensors, output: str, terms: Floats, factor: float
    ) -> Worst:
        """The worst element of a matrix, as :func:`bounds.worst_of`.

        Args:
            case: the data.
            tensors: inputs and outputs.
            output: "y", "residual_out", "dx" or "dresidual".
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
        for first, last in _blocks(case, name):
            address, memory, view = self._view(case, tensor, name, first, last)
            view[:] = _data(case, name, first, last).reshape(view.shape)
            self.backend.from_host(address, memory, self.stream)

    def changed(self, case: Case, name: str, tensor: Tensor) -> tuple[int, int] | None:
        """See :class:`Engine`."""
        cols, heads = case.shape(name)[1], case.heads(name)
        for first, last in _blocks(case, name):
            view = self._view(case, tensor, name, first, last)[2]
            wrong = view != _data(case, name, first, last).reshape(view.shape)
            if wrong.any():
                row, col = divmod(int(np.argmax(wrong)), cols)
                return first * heads + row, col
        return None

    def row_sums(self, case: Case, tensors: Tensors) -> Floats:
        """See :class:`Engine`."""
        return np.concatenate(
            [
                bounds.row_sums(
                    self._rows(case, tensors, "dout", *block) if "dout" in tensors else None,
                    self._normalised(case, tensors, *block),
                    self._list(case, tensors, "weight", *block),
                )
                for block in _blocks(case, "x")
            ],
            axis=1,
        )

    def column_sums(self, case: Case, tensors: Tensors, rstd: Floats) -> Floats:
        """See :class:`Engine`."""
        kinds, items = case.columns
        sums, heads = np.zeros((kinds, items)), case.heads("x")
        for first, last in _blocks(case, "x"):
            product = self._rows(case, tensors, "x", first, last)
            product *= rstd[first * heads : last * heads, None]
            dout = self._rows(case, tensors, "dout", first, last)
            product *= dout
            for kind, terms in enumerate((product, dout)[: kinds // 2]):
                steps = terms.reshape(-1, items)
                sums[2 * kind] += steps.sum(axis=0)
                sums[2 * kind + 1] += np.abs(steps).sum(axis=0)
        return sums

    def row_maxima(self, case: Case, tensors: Tensors, rstd: Floats, factor: float) -> Floats:
        """See :class:`Engine`."""
        found = []
        for block in _blocks(case, "x"):
            y = self._wanted_y(case, tensors, rstd, factor, *block)
            slack = np.broadcast_to(y.slack, y.value.shape)
            found.append([terms.max(axis=1) for terms in (np.abs(y.value), y.scale, slack)])
        return np.concatenate(found, axis=1)

    def worst(
        self, case: Case, tensors: Tensors, output: str, terms: Floats, factor: float
    ) -> Worst:
        """See :class:`Engine`."""
        _, cols, dtype = case.shape(output)
        heads, found = case.heads(output), []
        exact = case.exact or output == "residual_out"
        for first, last in _blocks(case, output):
            rows = slice(first * heads, last * heads)
            if output == "y":
                want = self._wanted_y(case, tensors, terms[0], factor, first, last)
                if case.problem.extras.scale != "none":
                    want = _over(want, self._scales(case, tensors)[rows])
            elif output == "residual_out":
                total = self._normalised(case, tensors, first, last)
                want = Wanted(bounds.rounded(total, "float32"), total)
            else:
                more = "dresidual_out" in tensors
                want = bounds.dx_and_scale(
                    self._rows(case, tensors, "dout", first, last),
                    self._rows(case, tensors, "x", first, last),
                    self._list(case, tensors, "weight", first, last),
                    terms[:, rows],
                    self._rows(case, tensors, "dresidual_out", first, last) if more else None,
                )
            got = self._view(case, tensors[output], output, first, last)[2].reshape(-1, cols)
            worst = bounds.worst_of(
                got, want.value, want.scale, factor, dtype, slack=want.slack, exact=exact
            )
            found.append(worst._replace(row=rows.start + worst.row))
        return max(found, key=lambda worst: worst.ratio)

    def broken(
        self, address: int, rows: int, row_bytes: int, stride_bytes: int, fill: int
    ) -> tuple[int, int] | None:
        """See :class:`Engine`."""
        memory = self.backend.to_host(address, (rows - 1) * stride_bytes + row_bytes, self.stream)
        wrong = _strided(memory, rows, row_bytes, stride_bytes) != fill
        return divmod(int(np.argmax(wrong)), row_bytes) if wrong.any() else None

    def _view(
        self, case: Case, tensor: Tensor, name: str, first: int, last: int
    ) -> tuple[int, npt.NDArray[np.uint8], Bits]:
        """Address and copy of the memory from a first token to a last; (tokens, heads, cols)."""
        (_, cols, dtype), heads = case.shape(name), case.heads(name)
        item, tokens = stored_bytes(dtype), last - first
        address = tensor.address + first * tensor.row_stride * item
        extent = (tokens - 1) * tensor.row_stride + (heads - 1) * tensor.head_stride + cols
        memory = self.backend.to_host(address, extent * item, self.stream)
        strides = (tensor.row_stride * item, tensor.head_stride * item, item)
        elements = memory.view(bounds.STORAGE[dtype])
        view = np.lib.stride_tricks.as_strided(elements, (tokens, heads, cols), strides)
        return address, memory, view

    def _rows(self, case: Case, tensors: Tensors, name: str, first: int, last: int) -> Floats:
        """The rows of some tokens."""
        _, cols, dtype = case.shape(name)
        view = self._view(case, tensors[name], name, first, last)[2]
        return bounds.decode(view.reshape(-1, cols), dtype)

    def _normalised(self, case: Case, tensors: Tensors, first: int, last: int) -> Floats:
        x = self._rows(case, tensors, "x", first, last)
        if "residual" in tensors:
            x += self._rows(case, tensors, "residual", first, last)
        return x

    def _list(
        self, case: Case, tensors: Tensors, name: str, first: int, last: int
    ) -> Floats | None:
        """The weight, its offset added, or the bias: (cols,), or one for each of some rows."""
        if name not in tensors:
            return None
        values: Floats = self._rows(case, tensors, name, 0, 1)[0]
        if name == "weight" and case.offset:
            values += case.offset
        if case.problem.extras.per_head:
            values = np.tile(values.reshape(-1, case.problem.cols), (last - first, 1))
        return values

    def _wanted_y(
        self, case: Case, tensors: Tensors, rstd: Floats, factor: float,
        first: int, last: int,
    ) -> Wanted:  # fmt: skip
        heads = case.heads("x")
        return bounds.y_and_scale(
            self._normalised(case, tensors, first, last),
            self._list(case, tensors, "weight", first, last),
            rstd[first * heads : last * heads],
            bias=self._list(case, tensors, "bias", first, last),
            cast=case.cast,
            factor=factor,
        )

    def _scales(self, case: Case, tensors: Tensors) -> Floats:
        """The scale of each row's y, as it is stored: (rows, 1)."""
        rows = case.shape("scale")[0]
        memory = self.backend.to_host(tensors["scale"].address, 4 * rows, self.stream)
        stored = bounds.decode(memory.view(np.uint32), "float32")[:, None]
        return np.broadcast_to(stored, (case.problem.rows, 1))


@lru_cache(maxsize=64)  # asked for more than forty times a run
def _operands(problem: Problem) -> Mapping[str, Operand]:
    return {each.name: each for each in problem.operands}


def _blocks(case: Case, name: str) -> Iterator[tuple[int, int]]:
    """(first, last) tokens of a tensor, about a million elements."""
    operand = case.operand(name)
    return bounds.row_blocks(operand.rows, operand.cols)


def _data(case: Case, name: str, first: int, last: int) -> Bits:
    """The data of some tokens."""
    (_, cols, dtype), heads = case.shape(name), case.heads(name)
    rows, special = (first * heads, last * heads), case.special_rows(name)
    return _kept_data(name, *rows, cols, dtype, case.seed, case.exact, *special)


@lru_cache(maxsize=8)  # written, looked at, and both again in place; a block is 4 MB at most
def _kept_data(
    name: str, first: int, last: int, cols: int, dtype: str, seed: int, exact: bool,
    zero_row: int | None, large_row: int | None,
) -> Bits:  # fmt: skip
    data = gate_data(
        name, first, last, cols, dtype, seed, exact=exact, zero_row=zero_row, large_row=large_row
    )
    data.flags.writeable = False
    return data


def _over(want: Wanted, scales: Floats) -> Wanted:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # a wrong scale
        return Wanted(*(part / scales for part in want))


def _strided(flat: npt.NDArray[Any], rows: int, cols: int, stride: int) -> npt.NDArray[Any]:
    item = flat.itemsize
    return np.lib.stride_tricks.as_strided(flat, (rows, cols), (stride * item, item))

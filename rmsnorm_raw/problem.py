"""Problem: what is to be computed, and the bytes that it must move."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from rmsnorm_raw.dtypes import (
    DTYPE_BYTES,
    MAX_FLOAT32,
    SHORT_NAME,
    dtype_name,
    optional_dtype_name,
    out_dtype_name,
    stored_bytes,
)
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.extras import NO_EXTRAS, Casting, Extras, Scale, casting_of

Op = Literal["forward", "backward"]
MAX_COLS = 1 << 20
MAX_ROWS = 1 << 40


def require_problem(problem: object) -> None:
    """Raises InvalidInput, with how to make one, unless it is a Problem."""
    if not isinstance(problem, Problem):
        raise InvalidInput(
            f"the problem is {problem!r}: give a Problem, such as "
            "rr.Problem.forward(32768, 8192, 'bf16')"
        )


class Operand(NamedTuple):
    """A tensor of a problem, as it lies in memory.

    Attributes:
        name: "x", "weight", "y", ...
        dtype: its long name.
        rows: of a matrix, tokens: each has the rows of all its heads one after the other.
        cols: elements from the first of a row to the last.
        is_output: written, not read.
    """

    name: str
    dtype: str
    rows: int
    cols: int
    is_output: bool = False

    @property
    def is_matrix(self) -> bool:
        """Whether it has an element for each of x, and strides."""
        return self.name in MATRICES

    @property
    def size_bytes(self) -> int:
        """Bytes, rows contiguous."""
        return self.rows * self.cols * stored_bytes(self.dtype)


#: the tensors with an element for each of x, which have strides
MATRICES = ("x", "dout", "y", "dx", "residual", "residual_out", "dresidual_out", "dresidual")
#: those with a float32 a row (a static scale has one in all), which are moved one by one
OF_ROWS = ("rstd", "scale")
#: outputs that may be written over an input of their dtype: a lane reads, then writes
IN_PLACE = {"y": "x", "residual_out": "residual"}


@dataclass(frozen=True, slots=True, repr=False)
class Problem:
    """One operation on an (rows, cols) array whose last dimension is normalised.

    Build it with :meth:`forward` or :meth:`backward`.

    Attributes:
        op: "forward" or "backward".
        rows: M, the number of rows; any M >= 0.
        cols: N, the elements of a row; 0 <= N <= 1,048,576.
        dtype: of x, y, dout and dx.
        weight_dtype: of weight and dweight; None for no weight.
        eps: added to the mean square; a number >= 0 that float32 can hold.
        store_rstd: forward also writes rstd, float32 (rows,).
        has_rstd: backward is given rstd; otherwise it recomputes it from eps.
        need_dx: backward writes dx.
        need_dweight: backward writes dweight (always False without a weight).
        alignment: bytes of x that every base pointer and row stride allow a lane to move at once
            (the caller's arrays decide it; 16 where nothing is known against it).
        extras: bias, residual, offset, casting, heads, another dtype or a scale of y.
    """

    op: Op
    rows: int
    cols: int
    dtype: str
    weight_dtype: str | None
    eps: float = 1e-6
    store_rstd: bool = True
    has_rstd: bool = True
    need_dx: bool = True
    need_dweight: bool = True
    alignment: int = 16
    extras: Extras = NO_EXTRAS

    def __post_init__(self) -> None:
        for name in ("rows", "cols"):
            if not isinstance(getattr(self, name), numbers.Integral):
                raise InvalidInput(f"{name} is {getattr(self, name)!r}: it must be an integer")
        if not 0 <= self.rows <= MAX_ROWS:
            raise InvalidInput(f"rows is {self.rows}: 0 to {MAX_ROWS:,} rows are served")
        if not 0 <= self.cols <= MAX_COLS:
            raise InvalidInput(
                f"cols is {self.cols}: rows of 0 to {MAX_COLS:,} elements are served"
            )
        if not (isinstance(self.eps, numbers.Real) and 0 <= self.eps <= MAX_FLOAT32):
            raise InvalidInput(
                f"eps is {self.eps!r}: it must be a number >= 0 that float32 can hold"
            )
        if self.alignment not in (2, 4, 8, 16):
            raise InvalidInput(f"alignment is {self.alignment} bytes: use 2, 4, 8 or 16")
        for dtype in (self.dtype, self.weight_dtype):
            if dtype is not None and dtype not in DTYPE_BYTES:
                raise InvalidInput(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if self.extras:
            self.extras.require(
                self.op, self.rows, self.cols, self.out_dtype, self.weight_dtype is not None
            )

    @classmethod
    def forward(
        cls,
        rows: int,
        cols: int,
        dtype: object,
        *,
        weight_dtype: object = "same",
        eps: float = 1e-6,
        store_rstd: bool = True,
        alignment: int = 16,
        bias_dtype: object = None,
        residual_dtype: object = None,
        residual_out_dtype: object = "same",
        out_dtype: object = None,
        weight_offset: float = 0.0,
        casting: Casting = "none",
        heads: int = 1,
        per_head: bool = False,
        scale: Scale = "none",
    ) -> Problem:
        """y = x * rsqrt(mean(x^2) + eps) * weight over (rows, cols), and :class:`Extras`.

        Args:
            dtype: a name ("bf16", "bfloat16"), or a dtype of NumPy, ml_dtypes, torch or JAX.
            weight_dtype: likewise, "same" for the activations' dtype, or None for no weight.
            bias_dtype: likewise; None for no bias.
            residual_dtype: of the residual that is added to x; None for none.
            residual_out_dtype: of x + residual, where it is to be written; "same" for the
                residual's, and nothing without one; None for nothing.
            out_dtype: of y; None for x's. With a scale, one of :data:`LARGEST_FP8`.
            casting: "gemma" is fp32 to the end, as is "none"; see :class:`Extras` for "llama".
        """
        act = dtype_name(dtype)
        residual = optional_dtype_name(residual_dtype)
        same = isinstance(residual_out_dtype, str) and residual_out_dtype == "same"
        out = None if out_dtype is None else out_dtype_name(out_dtype)
        extras = Extras(
            bias_dtype=optional_dtype_name(bias_dtype), residual_dtype=residual,
            residual_out_dtype=residual if same else optional_dtype_name(residual_out_dtype),
            out_dtype=None if out == act else out, weight_offset=float(weight_offset),
            casting=casting_of(casting), heads=heads, per_head=per_head, scale=scale,
        )  # fmt: skip
        return cls(
            "forward", rows, cols, act, _weight_dtype(weight_dtype, act), eps,
            store_rstd=store_rstd, alignment=alignment, extras=extras,
        )  # fmt: skip

    @classmethod
    def backward(
        cls,
        rows: int,
        cols: int,
        dtype: object,
        *,
        weight_dtype: object = "same",
        eps: float = 1e-6,
        has_rstd: bool = True,
        need_dx: bool = True,
        need_dweight: bool = True,
        alignment: int = 16,
        bias_dtype: object = None,
        residual_dtype: object = None,
        dresidual_out_dtype: object = None,
        out_dtype: object = None,
        dx_dtype: object = None,
        weight_offset: float = 0.0,
        heads: int = 1,
        per_head: bool = False,
    ) -> Problem:
        """dx and dweight of the forward, from dout, x, weight and rstd; see :meth:`forward`.

        Args:
            dtype: of x, which is what was normalised: the forward's residual_out, if it had one.
            bias_dtype: of dbias, the sum of dout over all rows; None for none.
            residual_dtype: of dresidual, where it is wanted beside dx (it is the same gradient).
            dresidual_out_dtype: of residual_out's gradient, which is added to dx; None for none.
            out_dtype: of dout; None for x's.
            dx_dtype: None for x's.
        """
        act = dtype_name(dtype)
        weight = _weight_dtype(weight_dtype, act)
        out, dx = optional_dtype_name(out_dtype), optional_dtype_name(dx_dtype)
        extras = Extras(
            bias_dtype=optional_dtype_name(bias_dtype),
            residual_dtype=optional_dtype_name(residual_dtype),
            residual_out_dtype=optional_dtype_name(dresidual_out_dtype),
            out_dtype=None if out == act else out, dx_dtype=None if dx == act else dx,
            weight_offset=float(weight_offset), heads=heads, per_head=per_head,
        )  # fmt: skip
        return cls(
            "backward", rows, cols, act, weight, eps, has_rstd=has_rstd, need_dx=need_dx,
            need_dweight=need_dweight and weight is not None, alignment=alignment, extras=extras,
        )  # fmt: skip

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight element; 0 without a weight."""
        return DTYPE_BYTES[self.weight_dtype] if self.weight_dtype else 0

    @property
    def widest_vec(self) -> int:
        """The most bytes a lane can move at once: alignment allows it and it divides the row."""
        row_bytes = self.cols * self.element_bytes
        return max(v for v in (2, 4, 8, 16) if v == self.element_bytes or self._fits(v, row_bytes))

    def _fits(self, vec: int, row_bytes: int) -> bool:
        return vec >= self.element_bytes and vec <= self.alignment and row_bytes % vec == 0

    @property
    def tokens(self) -> int:
        """Rows of a matrix in memory: each has all the heads of one token."""
        return self.rows // self.extras.heads

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to launch for it: no elements, or no result asked for."""
        return not (self.rows and self.cols and self.outputs)

    @property
    def out_dtype(self) -> str:
        """The dtype of y, and so of dout."""
        return self.extras.out_dtype or self.dtype

    @property
    def beside_dtype(self) -> str | None:
        """The dtype of what is read beside x: residual, or dresidual_out for dx; None for none."""
        if self.op == "forward":
            return self.extras.residual_dtype
        return self.extras.residual_out_dtype if self.need_dx else None

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Every tensor that the operation reads, then every one that it writes."""
        more, own = self.extras, self.dtype
        lists = self.cols * (more.heads if more.per_head else 1)

        def matrix(name: str, dtype: str | None, is_output: bool = False) -> Operand | None:
            size = (self.tokens, self.cols * more.heads)
            return Operand(name, dtype, *size, is_output) if dtype else None

        def columns(name: str, dtype: str | None, is_output: bool = False) -> Operand | None:
            return Operand(name, dtype, 1, lists, is_output) if dtype else None

        def row_floats(name: str, there: bool, is_output: bool = False) -> Operand | None:
            return Operand(name, "float32", self.rows, 1, is_output) if there else None

        if self.op == "forward":
            found = [
                matrix("x", own),
                columns("weight", self.weight_dtype),
                columns("bias", more.bias_dtype),
                matrix("residual", self.beside_dtype),
                Operand("scale", "float32", 1, 1) if more.scale == "static" else None,
                matrix("y", self.out_dtype, True),
                row_floats("rstd", self.store_rstd, True),
                matrix("residual_out", more.residual_out_dtype, True),
                row_floats("scale", more.scale == "dynamic", True),
            ]
        else:
            found = [
                matrix("dout", self.out_dtype),
                matrix("x", own),
                columns("weight", self.weight_dtype),
                row_floats("rstd", self.has_rstd),
                matrix("dresidual_out", self.beside_dtype),
                matrix("dx", (more.dx_dtype or own) if self.need_dx else None, True),
                columns("dweight", self.weight_dtype if self.need_dweight else None, True),
                matrix("dresidual", more.residual_dtype if self.need_dx else None, True),
                columns("dbias", more.bias_dtype, True),
            ]
        return tuple(operand for operand in found if operand)

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """The operands that are read."""
        return tuple(operand for operand in self.operands if not operand.is_output)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """The operands that are written."""
        return tuple(operand for operand in self.operands if operand.is_output)

    def logical_bytes(self) -> int:
        """Bytes that the operation must move through device memory, each tensor once.

        forward 2*M*N*a + N*w, backward 3*M*N*a + 2*N*w + 4*M (a, w: bytes of an activation and a
        weight element; M, N: rows and cols), and every other tensor by its own size. What is not
        asked for (dx, dweight), or not given (rstd), is not counted, nor are dW's partial sums or
        forward's rstd.
        """
        unread = set() if self.op == "forward" or self.need_dx else {"weight"}
        unread |= {"rstd"} if self.op == "forward" else set()
        return sum(each.size_bytes for each in self.operands if each.name not in unread)

    def __repr__(self) -> str:
        """The call that makes it, without what is left at its default."""
        make = Problem.forward if self.op == "forward" else Problem.backward
        plain = make(self.rows, self.cols, self.dtype, weight_dtype=self.weight_dtype)
        args = [str(self.rows), str(self.cols), repr(self.dtype)]
        if self.weight_dtype != self.dtype:
            args.append(f"weight_dtype={self.weight_dtype!r}")
        for one, other in ((self, plain), (self.extras, NO_EXTRAS)):
            names = [field.name for field in fields(one) if field.name != "extras"]
            changed = [name for name in names if getattr(one, name) != getattr(other, name)]
            for name in changed:
                gradient = self.op == "backward" and name == "residual_out_dtype"
                shown = "dresidual_out_dtype" if gradient else name
                args.append(f"{shown}={getattr(one, name)!r}")
        if self.extras.residual_dtype and not self.extras.residual_out_dtype:
            args += ["residual_out_dtype=None"] * (self.op == "forward")
        return f"Problem.{self.op}({', '.join(args)})"

    def __str__(self) -> str:
        pair = f"{SHORT_NAME[self.dtype]}/{SHORT_NAME.get(self.weight_dtype or '', 'none')}"
        return f"{self.op} {self.rows}x{self.cols} {pair}{self.extras}"


def _weight_dtype(weight_dtype: object, dtype: str) -> str | None:
    if weight_dtype is None:
        return None
    if isinstance(weight_dtype, str) and weight_dtype == "same":
        return dtype
    return dtype_name(weight_dtype)

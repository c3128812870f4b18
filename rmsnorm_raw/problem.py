"""Problem: what is to be computed, and the bytes that it must move."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, fields
from typing import Literal

from rmsnorm_raw.errors import InvalidInput

Op = Literal["forward", "backward"]

#: bytes of one element, by dtype name
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
#: the short names used in tables and CSV files
SHORT_NAME = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
MAX_COLS = 1 << 20
MAX_ROWS = 1 << 40
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


def dtype_name(dtype: object) -> str:
    """The long name of a dtype: "bfloat16" of "bf16", of ml_dtypes.bfloat16, of torch.bfloat16.

    Args:
        dtype: a long or short name, or a dtype of NumPy, ml_dtypes, torch or JAX.

    Raises:
        InvalidInput: the dtype is not one of fp16, bf16, fp32.
    """
    name = dtype if isinstance(dtype, str) else _own_name(dtype)
    for long, short in SHORT_NAME.items():
        if name in (long, short):
            return long
    raise InvalidInput(
        f"dtype {dtype!r} is not supported: use {', '.join(SHORT_NAME.values())} "
        f"({', '.join(SHORT_NAME)})"
    )


def _own_name(dtype: object) -> object:
    """What a library calls a dtype of its own; torch's have no name but their text."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    return name or str(dtype).removeprefix("torch.")


def require_problem(problem: object) -> None:
    """Raises InvalidInput, with how to make one, unless it is a Problem."""
    if not isinstance(problem, Problem):
        raise InvalidInput(
            f"the problem is {problem!r}: give a Problem, such as "
            "rr.Problem.forward(32768, 8192, 'bf16')"
        )


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
    ) -> Problem:
        """y = x * rsqrt(mean(x^2) + eps) * weight over (rows, cols).

        Args:
            dtype: a name ("bf16", "bfloat16"), or a dtype of NumPy, ml_dtypes, torch or JAX.
            weight_dtype: likewise, "same" for the activations' dtype, or None for no weight.
        """
        act = dtype_name(dtype)
        return cls(
            "forward", rows, cols, act, _weight_dtype(weight_dtype, act), eps,
            store_rstd=store_rstd, alignment=alignment,
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
    ) -> Problem:
        """dx and dweight of the forward, from dout, x, weight and rstd; see :meth:`forward`."""
        act = dtype_name(dtype)
        weight = _weight_dtype(weight_dtype, act)
        return cls(
            "backward", rows, cols, act, weight, eps, has_rstd=has_rstd, need_dx=need_dx,
            need_dweight=need_dweight and weight is not None, alignment=alignment,
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

    def logical_bytes(self) -> int:
        """Bytes that the operation must move through device memory, each tensor once.

        forward 2*M*N*a + N*w, backward 3*M*N*a + 2*N*w + 4*M (a, w: bytes of an activation and a
        weight element; M, N: rows and cols). What is not asked for (dx, dweight), or not given
        (rstd), is not counted, nor are dW's partial sums or forward's rstd.
        """
        m, n, a, w = self.rows, self.cols, self.element_bytes, self.weight_bytes
        if self.op == "forward":
            return 2 * m * n * a + n * w
        moved = (2 + self.need_dx) * m * n * a + 4 * m * self.has_rstd
        return moved + n * w * (self.need_dx + self.need_dweight)

    def __repr__(self) -> str:
        """The call that makes it, without what is left at its default."""
        make = Problem.forward if self.op == "forward" else Problem.backward
        plain = make(self.rows, self.cols, self.dtype, weight_dtype=self.weight_dtype)
        args = [str(self.rows), str(self.cols), repr(self.dtype)]
        if self.weight_dtype != self.dtype:
            args.append(f"weight_dtype={self.weight_dtype!r}")
        names = [field.name for field in fields(Problem)]
        changed = [name for name in names if getattr(self, name) != getattr(plain, name)]
        args += [f"{name}={getattr(self, name)!r}" for name in changed]
        return f"Problem.{self.op}({', '.join(args)})"

    def __str__(self) -> str:
        pair = f"{SHORT_NAME[self.dtype]}/{SHORT_NAME.get(self.weight_dtype or '', 'none')}"
        return f"{self.op} {self.rows}x{self.cols} {pair}"


def _weight_dtype(weight_dtype: object, dtype: str) -> str | None:
    if weight_dtype is None:
        return None
    if isinstance(weight_dtype, str) and weight_dtype == "same":
        return dtype
    return dtype_name(weight_dtype)

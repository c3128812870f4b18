"""Extras: what a problem has beyond y = x * rstd * weight."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Literal

from rmsnorm_raw.dtypes import DTYPE_BYTES, LARGEST_FP8, MAX_FLOAT32, SHORT_NAME
from rmsnorm_raw.errors import InvalidInput

Casting = Literal["none", "llama", "gemma"]
Scale = Literal["none", "static", "dynamic"]
#: the widest row of several heads a token: the kernels keep such rows, and never read them twice
MAX_HEAD_COLS = 4096
MAX_HEADS = 1 << 16
#: heads, for which rows that share a weight are read where they are. With more a copy costs less: a
#: program of backward works on one head, and leaves partial sums, and each number of heads is a
#: kernel of its own, which a slice x[:, :n] of sequences would have compiled for each n
MAX_SHARED_HEADS = 256
#: the least scale that a row of an 8-bit y is given: that of zeros. The kernels have it too
LEAST_SCALE = 2.0**-100


@dataclass(frozen=True, slots=True)
class Extras:
    """What a problem has beyond y = x * rstd * weight; false where it has nothing.

    With h = x + residual, y = h * rstd * (weight + weight_offset) + bias, divided by the scale
    where there is one. Backward takes h for x.

    Attributes:
        bias_dtype: forward reads a bias, backward writes dbias; None for none.
        residual_dtype: forward reads a residual; backward writes dresidual, dx in another dtype.
        residual_out_dtype: forward writes h, rounded once; backward reads its gradient,
            dresidual_out, and adds it to dx.
        out_dtype: of y and dout, where it is not x's.
        dx_dtype: where it is not x's.
        weight_offset: added to the weight in fp32 (1 in Gemma's norm).
        casting: "llama": forward rounds h * rstd to x's dtype before the weight is applied, as the
            Llama family's norm does; backward knows nothing of it.
        heads: rows of a token; row r is head r % heads of token r // heads.
        per_head: the weight, and bias, have a row for each head: (heads, cols).
        scale: of an 8-bit y: "static", one fp32 number that is read; "dynamic", written for each
            row: max|y|, NaN passed over, over the dtype's largest number, at least
            :data:`LEAST_SCALE`.
    """

    bias_dtype: str | None = None
    residual_dtype: str | None = None
    residual_out_dtype: str | None = None
    out_dtype: str | None = None
    dx_dtype: str | None = None
    weight_offset: float = 0.0
    casting: Literal["none", "llama"] = "none"
    heads: int = 1
    per_head: bool = False
    scale: Scale = "none"

    def __bool__(self) -> bool:
        return self != NO_EXTRAS

    def __str__(self) -> str:
        """As " + residual fp32, bias bf16"; "" for nothing."""
        parts = [f"{self.heads} heads{', a weight each' * self.per_head}"] * (self.heads > 1)
        for name, dtype in (
            ("bias", self.bias_dtype), ("residual", self.residual_dtype),
            ("residual_out", self.residual_out_dtype), ("out", self.out_dtype),
            ("dx", self.dx_dtype),
        ):  # fmt: skip
            parts += [f"{name} {SHORT_NAME.get(dtype, dtype)}"] if dtype else []
        parts += [f"offset {self.weight_offset:g}"] if self.weight_offset else []
        parts += [f"casting {self.casting}"] if self.casting != "none" else []
        parts += [f"{self.scale} scale"] if self.scale != "none" else []
        return f" + {', '.join(parts)}" if parts else ""

    def require(self, op: str, rows: int, cols: int, y_dtype: str, has_weight: bool) -> None:
        """Raise InvalidInput, in words, where these do not go together, or not with a problem."""
        for name in ("bias_dtype", "residual_dtype", "residual_out_dtype", "dx_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in DTYPE_BYTES:
                raise InvalidInput(f"{name} is {dtype!r}: use one of {', '.join(DTYPE_BYTES)}")
        if op == "backward" and (self.casting != "none" or self.scale != "none"):
            raise InvalidInput("casting and scale are the forward's: backward has neither")
        if op == "forward" and self.dx_dtype is not None:
            raise InvalidInput("dx_dtype is backward's: forward has no dx")
        if self.scale not in ("none", "static", "dynamic"):
            raise InvalidInput(f"scale is {self.scale!r}: use 'none', 'static' or 'dynamic'")
        quantised = y_dtype in LARGEST_FP8
        if quantised != (self.scale != "none") or (quantised and op == "backward"):
            raise InvalidInput(
                f"out_dtype is {y_dtype} and scale is {self.scale!r}: a scale, and it alone, "
                f"goes with a forward's {' or '.join(LARGEST_FP8)}; give both, or neither"
            )
        if not -MAX_FLOAT32 <= self.weight_offset <= MAX_FLOAT32:
            raise InvalidInput(
                f"weight_offset is {self.weight_offset!r}: it must be finite in float32"
            )
        if not has_weight and (self.weight_offset or self.per_head):
            raise InvalidInput(
                "weight_offset and per_head are the weight's, and there is none: give a weight, or "
                "leave them out"
            )
        if not (isinstance(self.heads, numbers.Integral) and 1 <= self.heads <= MAX_HEADS):
            raise InvalidInput(f"heads is {self.heads!r}: a token has 1 to {MAX_HEADS:,} heads")
        if rows % self.heads:
            raise InvalidInput(f"rows is {rows}, not a multiple of the {self.heads} heads")
        if self.heads > 1 and cols > MAX_HEAD_COLS:
            raise InvalidInput(
                f"heads of {cols} elements: with several heads a token, rows of up to "
                f"{MAX_HEAD_COLS:,} are served"
            )
        if self.heads == 1 and self.per_head:
            raise InvalidInput("per_head wants several heads: a lone one's weight is (cols,)")


NO_EXTRAS = Extras()


def number(name: str, given: object) -> float:
    """What a caller gave for a number.

    Raises:
        InvalidInput: it is none, or no float can hold it.
    """
    if isinstance(given, (str, bytes, bool)):
        raise InvalidInput(f"{name} is {given!r}: pass a number")
    try:
        return float(given)  # type: ignore[arg-type]
    except OverflowError as error:
        raise InvalidInput(f"{name} is a number that no float can hold") from error
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{name} is {given!r}: pass a number") from error


def casting_of(casting: str) -> Literal["none", "llama"]:
    """What a family's name means here: Gemma's norm is fp32 to the end, as ours is anyway.

    Raises:
        InvalidInput: no family has that name.
    """
    if casting not in ("none", "llama", "gemma"):
        raise InvalidInput(f"casting is {casting!r}: use 'none', 'llama' or 'gemma'")
    return "llama" if casting == "llama" else "none"

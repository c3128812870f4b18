"""The options of the command line that name a problem, and the problem that they name."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from rmsnorm_raw.dtypes import fp8_dtype
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.extras import Casting, Scale
from rmsnorm_raw.problem import Problem


class Op(str, enum.Enum):
    """The values of --op."""

    forward = "forward"
    backward = "backward"
    fwd = "fwd"
    bwd = "bwd"


class CastingName(str, enum.Enum):
    """The values of --casting."""

    none = "none"
    llama = "llama"
    gemma = "gemma"


class ScaleName(str, enum.Enum):
    """The values of --scale."""

    none = "none"
    static = "static"
    dynamic = "dynamic"


def _beside(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Beside x and the weight")


@dataclass(frozen=True, slots=True)
class Asked:
    """The values of the options; backward's x is what was normalised, so --dtype is the sum's."""

    op: Annotated[Op | None, typer.Option("--op", help="The operation.")]
    rows: Annotated[int | None, typer.Option("--rows", help="M, the number of rows.")]
    cols: Annotated[int | None, typer.Option("--cols", help="N, the elements of a row.")]
    dtype: Annotated[str, typer.Option("--dtype", help="Of x: fp16, bf16 or fp32.")] = "bf16"
    weight_dtype: Annotated[
        str, typer.Option("--weight-dtype", help="fp16, bf16, fp32, same (as x) or none.")
    ] = "same"
    bias: Annotated[bool, _beside("--bias", help="A bias; backward: dbias.")] = False
    bias_dtype: Annotated[
        str, _beside("--bias-dtype", help="Of the bias; same: the weight's, or x's.")
    ] = "same"
    residual: Annotated[
        bool,
        _beside(
            "--residual",
            help="x + residual is normalised, and written; backward: its gradient is added to dx.",
        ),
    ] = False
    residual_dtype: Annotated[
        str, _beside("--residual-dtype", help="Of the residual and its gradient; same: x's.")
    ] = "same"
    residual_out_dtype: Annotated[
        str,
        _beside(
            "--residual-out-dtype",
            help="Of the sum that is written, or its gradient; same: the residual's; none.",
        ),
    ] = "same"
    weight_offset: Annotated[
        float, _beside("--weight-offset", help="Added to the weight: 1 in Gemma's norm.")
    ] = 0.0
    casting: Annotated[
        CastingName, _beside("--casting", help="As the norms of a model family round; forward.")
    ] = CastingName.none
    out_dtype: Annotated[
        str,
        _beside(
            "--out-dtype",
            help="Of y and dout; same: x's. fp8 (with --scale): the device's own e4m3.",
        ),
    ] = "same"
    dx_dtype: Annotated[str, _beside("--dx-dtype", help="Of dx; same: x's.")] = "same"
    scale: Annotated[
        ScaleName, _beside("--scale", help="Of an fp8 y: one that is given, or each row's own.")
    ] = ScaleName.none
    heads: Annotated[int, _beside("--heads", help="Rows of a token; --rows has those of all.")] = 1
    per_head: Annotated[bool, _beside("--per-head", help="A weight for each head.")] = False

    @property
    def names_a_problem(self) -> bool:
        """Whether any of the options was given."""
        return self != type(self)(None, None, None)

    def problem(self, arch: str) -> Problem:
        """The problem.

        Args:
            arch: of the device, which knows one of the 8-bit floats.

        Raises:
            InvalidInput: options are missing, or do not go together.
        """
        if self.op is None or self.rows is None or self.cols is None:
            raise InvalidInput("give --op, --rows and --cols, or --all")
        weight = None if self.weight_dtype == "none" else self.weight_dtype
        beside = self.dtype if weight in ("same", None) else weight
        bias = beside if self.bias_dtype == "same" else self.bias_dtype
        residual = self.dtype if self.residual_dtype == "same" else self.residual_dtype
        has_residual = self.residual or self.residual_dtype != "same"
        written: str | None = self.residual_out_dtype
        if written == "same":
            written = residual if has_residual else None
        common: dict[str, Any] = {
            "weight_dtype": weight, "weight_offset": self.weight_offset, "heads": self.heads,
            "per_head": self.per_head,
            "bias_dtype": bias if self.bias or self.bias_dtype != "same" else None,
            "out_dtype": fp8_dtype(arch) if self.out_dtype == "fp8" else _or_none(self.out_dtype),
        }  # fmt: skip
        written = None if written == "none" else written
        if self.op in (Op.forward, Op.fwd):
            if self.dx_dtype != "same":
                raise InvalidInput("--dx-dtype is backward's: forward has no dx")
            casting: Casting = self.casting.value
            scale: Scale = self.scale.value
            return Problem.forward(
                self.rows, self.cols, self.dtype, residual_dtype=residual if has_residual else None,
                residual_out_dtype=written, casting=casting, scale=scale, **common,
            )  # fmt: skip
        if (self.casting, self.scale) != (CastingName.none, ScaleName.none):
            raise InvalidInput("--casting and --scale are the forward's: backward has neither")
        dx = self.dtype if self.dx_dtype == "same" else self.dx_dtype
        return Problem.backward(
            self.rows, self.cols, self.dtype, dresidual_out_dtype=written, dx_dtype=dx,
            residual_dtype=residual if has_residual and residual != dx else None, **common,
        )  # fmt: skip


def _or_none(dtype: str) -> str | None:
    return None if dtype == "same" else dtype


def takes_problem(*, required: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of :class:`Asked`, in the place of its argument ``asked``.

    Args:
        required: whether --op, --rows and --cols must be given.
    """

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        names = [field.name for field in fields(Asked)]
        options = dict(inspect.signature(Asked, eval_str=True).parameters)
        for name in ("op", "rows", "cols"):
            default = inspect.Parameter.empty if required else None
            options[name] = options[name].replace(default=default)
        own = dict(inspect.signature(command, eval_str=True).parameters)
        del own["asked"]
        every = [p.replace(kind=p.KEYWORD_ONLY) for p in (*options.values(), *own.values())]

        @functools.wraps(command)
        def asking(**given: Any) -> None:
            command(asked=Asked(**{name: given.pop(name) for name in names}), **given)

        asking.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        asking.__annotations__ = {p.name: p.annotation for p in every}
        return asking

    return wrap

"""``rmsnorm_fwd`` and ``rmsnorm_bwd``: the two operations on arrays of any library.

An array decides where it is worked on: CPU arrays in the simulator, GPU arrays on their own device,
on the current stream of x's library. Everything is checked before anything is launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rmsnorm_raw.calls import Call, Chosen
from rmsnorm_raw.config import Config
from rmsnorm_raw.dtypes import fp8_dtype, optional_dtype_name
from rmsnorm_raw.errors import InvalidConfig, InvalidInput
from rmsnorm_raw.extras import Casting, Scale, number
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.ready import Ready, arch_of


class _Results:
    """Arrays by name, which unpack as the first two.

    It is no tuple, for what takes tuples apart and rebuilds them, such as torch's tree_map, would
    drop all but those two; to that it is one object.
    """

    def _pair(self) -> tuple[Any, Any]:
        first, second, *_ = vars(self).values()
        return first, second

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pair())

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return self._pair()[index]

    def __repr__(self) -> str:
        """The arrays in brief; of those beyond the pair what there is."""
        shown = (
            f"{name}={_brief(array)}"
            for at, (name, array) in enumerate(vars(self).items())
            if at < 2 or array is not None
        )
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, eq=False, repr=False)
class Forward(_Results):
    """What :func:`rmsnorm_fwd` gives; it unpacks as ``y, rstd = ...``, and is no tuple.

    Attributes:
        y: of x's shape.
        rstd: float32 of x's leading shape, or None.
        residual_out: x + residual, rounded once, or None.
        scale: float32 of x's leading shape with scale="dynamic", else None.
    """

    y: Any
    rstd: Any
    residual_out: Any = None
    scale: Any = None


@dataclass(frozen=True, eq=False, repr=False)
class Backward(_Results):
    """What :func:`rmsnorm_bwd` gives; it unpacks as ``dx, dweight = ...``, and is no tuple.

    Attributes:
        dx: of x's shape.
        dweight: like the weight.
        dbias: of the weight's shape.
        dresidual: of x's shape; dx itself where they have one dtype.

    None for what was not asked for.
    """

    dx: Any
    dweight: Any
    dbias: Any = None
    dresidual: Any = None


def rmsnorm_fwd(
    x: Any,
    weight: Any = None,
    *,
    bias: Any = None,
    residual: Any = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    casting: Casting = "none",
    out_dtype: Any = None,
    residual_dtype: Any = None,
    scale: Any = None,
    store_rstd: bool = True,
    out: Any = None,
    rstd_out: Any = None,
    residual_out: Any = None,
    scale_out: Any = None,
    workspace: Any = None,
    config: Config | Ready | str | None = None,
    stream: Any = None,
) -> Forward:
    """y = h * rstd * (weight + weight_offset) + bias, with rstd = (mean(h²) + eps)^-½.

    h is x, or x + residual, in fp32; means are over the last dimension. y is rounded once.

    Args:
        x: (..., N), float16, bfloat16 or float32, of NumPy, torch, CuPy, JAX or any library that
            speaks DLPack. It is read in place if its last dimension is dense and the leading ones
            have one common stride, or two, as heads of a packed qkv do; else one copy is made.
        weight: (N,), or (H, N) for x of (..., H, N): one for each head. Of any of the three dtypes,
            on x's device; its library may be another one. So it is for all other inputs.
        bias: of the weight's shape.
        residual: of x's shape.
        eps: finite and >= 0.
        weight_offset: 1 in Gemma's norm, whose weight is the difference from 1.
        casting: "llama" rounds h * rstd to x's dtype before the weight is applied, as the norm of
            that family does; "gemma" and "none" are fp32 to the end.
        out_dtype: of y, x's by default. "float8_e4m3fn", "float8_e4m3fnuz" or "fp8" (that of the
            two which x's device has) with a scale; CuPy knows neither, and has uint8.
        residual_dtype: of h, the residual's by default. Without a residual h is given only if this
            is.
        scale: of an 8-bit y, which is divided by it. A number, which is copied to the device at
            each call; an array of one float32; or "dynamic": each row has its own, max|y| over the
            dtype's largest number, and it is given.
        store_rstd: also give rstd, which :func:`rmsnorm_bwd` can use.
        out, rstd_out, residual_out, scale_out: where y, rstd, h and the rows' scales go: of their
            shapes and dtypes, rows dense, lists contiguous. ``residual_out`` may be the residual
            itself, and ``out`` x; otherwise they share memory with no other array.
            ``residual_out=False`` leaves h unwritten.
        workspace: an array of :func:`rmsnorm_raw.workspace_bytes` bytes, not shared with calls on
            other streams; with it, and all results given, nothing is allocated.
        config: a Config or slug; None for the best one known (:func:`rmsnorm_raw.store.resolve`:
            tuned here, known best, or the ladder's), "ladder" for the ladder's.
        stream: a torch or CuPy stream, an object with ``__cuda_stream__``, or a raw handle; None
            for the current stream of x's library. Results are allocated on it. Whoever gives one
            sees to it that x is ready there.

    Returns:
        Arrays of x's library on x's device; those that were given, themselves. With no rows or no
        columns nothing is launched, and rstd is eps^-½.

    Raises:
        InvalidInput: a shape, dtype, device, number or overlap that no kernel can serve.
        InvalidConfig: a slug that does not parse, or a config that does not fit.
        BackendUnavailable: the array's backend cannot run here; the message names what to install.
    """
    chosen = _parse(config)
    call = Call(x, stream)
    call.weight(weight)
    call.bias(bias)
    if residual is not None:
        call.like_x("residual", residual)
    kind = _scale_kind(scale)
    if kind == "static":
        call.scale(scale)
    call.target("y", out)
    call.target("rstd", rstd_out)
    call.target("residual_out", None if residual_out is False else residual_out)
    call.target("scale", scale_out)
    call.workspace(workspace)
    heads, per_head = call.heads(chosen)
    problem = Problem.forward(
        call.rows, call.cols, call.x.dtype, weight_dtype=call.dtype("weight"),
        eps=number("eps", eps), store_rstd=store_rstd, bias_dtype=call.dtype("bias"),
        residual_dtype=call.dtype("residual"),
        residual_out_dtype=_residual_out_dtype(residual_out, residual_dtype),
        out_dtype=fp8_dtype(arch_of(call.x.device)) if _is_fp8(out_dtype) else out_dtype,
        weight_offset=number("weight_offset", weight_offset), casting=casting, heads=heads,
        per_head=per_head, scale=kind,
    )  # fmt: skip
    made = call.compute(problem, chosen)
    return Forward(made["y"], made.get("rstd"), made.get("residual_out"), made.get("scale"))


def rmsnorm_bwd(
    dout: Any,
    x: Any,
    weight: Any = None,
    rstd: Any = None,
    *,
    dresidual_out: Any = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    need_dx: bool = True,
    need_dweight: bool = True,
    need_dbias: bool = False,
    dx_dtype: Any = None,
    bias_dtype: Any = None,
    residual_dtype: Any = None,
    dx: Any = None,
    dweight: Any = None,
    dbias: Any = None,
    dresidual: Any = None,
    workspace: Any = None,
    config: Config | Ready | str | None = None,
    stream: Any = None,
) -> Backward:
    """The gradients of :func:`rmsnorm_fwd`: with x̂ = x * rstd and g = dout * (weight + offset).

    dx = rstd * (g - x̂ * mean(g * x̂)) + dresidual_out; dweight = sum of dout * x̂ over all rows,
    dbias = sum of dout, both in fp32, rounded once and the same bits in every run.

    Args:
        dout: of x's shape, in any of the three dtypes.
        x: what was normalised: the forward's x, or its residual_out where there was a residual.
        weight: as in the forward.
        rstd: float32 of x's leading shape, contiguous, from the forward; None to recompute it.
        dresidual_out: the gradient of residual_out, of x's shape, where that was used.
        eps: the forward's; used where rstd is None.
        weight_offset: the forward's.
        need_dx: give dx, and dresidual.
        need_dweight: give dweight; without a weight there is none.
        need_dbias: give dbias.
        dx_dtype: that of the forward's x, where it is not x's here.
        bias_dtype: of dbias: the bias's, where it is not the weight's (without one, x's).
        residual_dtype: of dresidual: the residual's. Without it there is no dresidual.
        dx, dweight, dbias, dresidual: where they go, see :func:`rmsnorm_fwd`; sharing no memory
            with another array. A dbias or dresidual that is given is asked for, in its dtype.
        workspace: see :func:`rmsnorm_fwd`.
        config: see :func:`rmsnorm_fwd`.
        stream: see :func:`rmsnorm_fwd`.

    Returns:
        Arrays of x's library on x's device; with no rows dweight and dbias are zeros.

    Raises:
        InvalidInput: see :func:`rmsnorm_fwd`.
        InvalidConfig: see :func:`rmsnorm_fwd`.
        BackendUnavailable: see :func:`rmsnorm_fwd`.
    """
    chosen = _parse(config)
    built = chosen.problem if isinstance(chosen, Ready) else None
    call = Call(x, stream)
    call.like_x("dout", dout)
    call.weight(weight)
    call.rstd(rstd)
    if dresidual_out is not None:
        call.like_x("dresidual_out", dresidual_out)
    call.target("dx", dx)
    call.target("dweight", dweight)
    call.target("dbias", dbias)
    own = optional_dtype_name(dx_dtype) or call.x.dtype
    wanted = optional_dtype_name(residual_dtype)
    if dresidual is not dx or wanted not in (own, None):
        call.target("dresidual", dresidual)
    call.workspace(workspace)
    heads, per_head = call.heads(chosen)
    wanted = wanted or call.dtype("dresidual")
    apart = wanted != own or call.dtype("dresidual") or (built and built.extras.residual_dtype)
    of_bias = optional_dtype_name(bias_dtype) or call.dtype("dbias")
    of_bias = of_bias or call.dtype("weight") or call.x.dtype
    problem = Problem.backward(
        call.rows, call.cols, call.x.dtype, weight_dtype=call.dtype("weight"),
        eps=number("eps", eps), has_rstd=rstd is not None, need_dx=need_dx,
        need_dweight=need_dweight,
        bias_dtype=of_bias if need_dbias or dbias is not None else None,
        residual_dtype=wanted if need_dx and apart else None,
        dresidual_out_dtype=call.dtype("dresidual_out") if need_dx else None,
        out_dtype=call.dtype("dout"), dx_dtype=own if need_dx else None,
        weight_offset=number("weight_offset", weight_offset), heads=heads, per_head=per_head,
    )  # fmt: skip
    made = call.compute(problem, chosen)
    both = made.get("dx")
    return Backward(
        both, made.get("dweight"), made.get("dbias"),
        made.get("dresidual", both if wanted or dresidual is not None else None),
    )  # fmt: skip


def _residual_out_dtype(residual_out: Any, residual_dtype: Any) -> Any:
    if residual_out is False:
        return None
    return "same" if residual_dtype is None else residual_dtype


def _scale_kind(scale: Any) -> Scale:
    if scale is None:
        return "none"
    if isinstance(scale, str):
        if scale != "dynamic":
            raise InvalidInput(f"scale is {scale!r}: pass 'dynamic', a number or an array of one")
        return "dynamic"
    return "static"


def _is_fp8(dtype: Any) -> bool:
    return isinstance(dtype, str) and dtype == "fp8"


def _parse(config: Config | Ready | str | None) -> Chosen:
    if isinstance(config, str):
        return "ladder" if config == "ladder" else Config.parse(config)
    if config is None or isinstance(config, (Config, Ready)):
        return config
    raise InvalidConfig(repr(config), 'pass a slug, a Config, "ladder" or None')


def _brief(array: Any) -> str:
    """An array of any library without its elements."""
    if array is None:
        return "None"
    library, dtype = type(array).__module__.partition(".")[0], str(array.dtype)
    return f"<{library} {dtype.rpartition('.')[2]} {tuple(array.shape)}>"

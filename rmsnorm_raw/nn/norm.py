"""``rms_norm`` and ``RMSNorm``: the plain call by the short way, all others by :mod:`.whole`."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch.autograd import forward_ad

from rmsnorm_raw import layouts
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.extras import Casting, casting_of, number
from rmsnorm_raw.layouts import Whole
from rmsnorm_raw.nn import whole
from rmsnorm_raw.nn.launching import call_operator, is_eager, require_tensors
from rmsnorm_raw.nn.plain import PlainNorm, forward

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: what F.rms_norm takes for eps=None: the epsilon of the dtype that it computes in
EPS = torch.finfo(torch.float32).eps


class ModuleKeywords(TypedDict, total=False):
    """What both :func:`rms_norm` and :class:`RMSNorm` take by name."""

    weight_offset: float
    casting: Casting
    out_dtype: Any
    residual_dtype: Any
    per_head: bool


class Keywords(ModuleKeywords, total=False):
    """What :func:`rms_norm` takes by name."""

    bias: Any
    residual: Any
    prenorm: bool
    scale: Any
    residual_inplace: bool


def rms_norm(x: Any, weight: Any = None, eps: float | None = None, **more: Unpack[Keywords]) -> Any:
    """y = h * rstd * (weight + weight_offset) + bias with rstd = (mean(h²) + eps)^-½.

    h is x, or x + residual, summed in float32; y is rounded once. Rows are those of the weight's
    dimensions.

    Args:
        x: (..., N), float16, bfloat16 or float32 (on a CPU float64 too), on any device of CUDA or
            ROCm or on a CPU. It is read in place where its rows are dense and evenly spaced, or
            fall into evenly spaced tokens of evenly spaced heads, as those of a packed qkv do.
        weight: (N,), or of x's last dimensions; of any of the dtypes, on x's device. None: the last
            dimension is normalised, and not scaled.
        eps: None for 2**-23, float32's epsilon, whatever x's dtype, as F.rms_norm has it.
        bias: like the weight.
        residual: of x's shape, in a dtype of its own.
        prenorm: also give residual_out, which is h, rounded once.
        weight_offset: added to the weight in float32; 1 in Gemma's norm.
        casting: "llama" rounds h * rstd to x's dtype before the weight is applied, as the Llama
            family's norm does; "gemma" is float32 to the end, and so is "none". Gradients know
            nothing of it.
        out_dtype: of y; None for x's. ``torch.float8_e4m3fn`` or ``float8_e4m3fnuz`` with a scale.
        residual_dtype: of residual_out; None for the residual's, x's without one.
        scale: what an 8-bit y is divided by: a float32 tensor of one element, or "dynamic", which
            gives each row its own: max|y| over the dtype's largest number.
        per_head: the weight is (H, N) and x (..., H, N): each head has a weight of its own.
        residual_inplace: write residual_out into the residual; only where no gradient is wanted.

    Returns:
        y, or (y, residual_out) with prenorm, and the scales (...) float32 at the end with
        scale="dynamic". y is contiguous and of x's shape and dtype, under autocast too;
        residual_out may be x itself where no gradient is wanted. What is not 8 bits wide is
        differentiable in x, weight, bias and residual, more than once as well and in forward mode:
        what these ask for is computed by the plain formula.

    Raises:
        InvalidInput: a shape, dtype, device, eps or combination that no kernel can serve, or a
            gradient of what has none.
        BackendUnavailable: CuPy is missing, or does not fit the device.
    """
    if more:
        return _with_more(x, weight, eps, **more)
    eager = is_eager(x, weight)
    if not eager:
        require_tensors(x, weight=weight)
    if weight is not None and weight.dim() > 1:
        dims = _require_end(x, weight)
        return rms_norm(x.flatten(-dims), weight.flatten(), eps).view(x.shape)
    if eps is None:
        eps = torch.finfo(x.dtype).eps if x.dtype is torch.float64 else EPS
    if forward_ad._current_level >= 0:  # forward mode, whose tangents are in no flag of a tensor
        return whole.by_formula(x, weight, None, None, None, Whole(eps))[0]
    if not eager:
        return call_operator(torch.ops.rmsnorm_raw.rmsnorm_fwd, x, weight, eps)[0]
    wanted = x.requires_grad or (weight is not None and weight.requires_grad)
    if wanted and torch.is_grad_enabled():
        return PlainNorm.apply(x, weight, eps)
    return forward(x, weight, eps, store_rstd=False)[0]


def _with_more(
    x: Any,
    weight: Any = None,
    eps: float | None = None,
    *,
    bias: Any = None,
    residual: Any = None,
    prenorm: bool = False,
    weight_offset: float = 0.0,
    casting: Casting = "none",
    out_dtype: Any = None,
    residual_dtype: Any = None,
    scale: Any = None,
    per_head: bool = False,
    residual_inplace: bool = False,
) -> Any:
    """:func:`rms_norm` with any of its keywords."""
    static, kind = None, scale
    if isinstance(scale, torch.Tensor):
        static, kind = scale, "static"
    elif scale not in (None, "dynamic"):
        raise InvalidInput(
            f"scale is {scale!r}: pass a tensor of one float32 on {x.device}, or 'dynamic'"
        )
    eager = is_eager(x, weight, bias, residual, static)
    if not eager:
        require_tensors(x, weight=weight, bias=bias, residual=residual, scale=static)
    lists = bias if weight is None else weight
    if lists is not None and not per_head and lists.dim() > 1:
        dims = _require_end(x, lists, "bias" if weight is None else "weight")
        if weight is not None and bias is not None and bias.shape != weight.shape:
            raise InvalidInput(
                f"bias has shape {tuple(bias.shape)} and must have the weight's, "
                f"{tuple(weight.shape)}"
            )
        weight, bias = (None if t is None else t.flatten() for t in (weight, bias))
        more = {
            "bias": bias, "residual": residual, "prenorm": prenorm, "casting": casting,
            "weight_offset": weight_offset, "out_dtype": out_dtype, "scale": scale,
            "residual_dtype": residual_dtype, "residual_inplace": residual_inplace,
        }  # fmt: skip
        return _over(dims, x, weight, eps, more)
    if static is not None:
        _require_scale(x, static)
    wanted = torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    )
    words = (
        x.dtype, None if residual is None else residual.dtype, eps, weight_offset, casting,
        out_dtype, residual_dtype, kind, per_head, prenorm, residual_inplace, wanted,
    )  # fmt: skip
    try:
        asked = (_found if eager else _asked)(*words)
    except TypeError:  # a list, say, which cannot be looked up
        asked = _asked(*words)
    if asked.is_plain and bias is None and residual is None:
        return rms_norm(x, weight, eps)
    y, residual_out, scales = whole.call(
        x, weight, bias, residual, static, asked.more, eager, wanted, residual_inplace
    )
    if prenorm:
        residual_out = x if asked.passes else residual_out
        return (y, residual_out) if scales is None else (y, residual_out, scales)
    return y if scales is None else (y, scales)


rms_norm.__signature__ = inspect.signature(_with_more)  # type: ignore[attr-defined]


class _Asked(NamedTuple):
    """What a call asks for, by the words of :mod:`rmsnorm_raw.layouts`.

    Attributes:
        more: all that is no tensor.
        is_plain: nothing but x and a weight, as far as this knows.
        passes: x itself is residual_out.
    """

    more: Whole
    is_plain: bool
    passes: bool


def _asked(
    x: Any, residual: Any, eps: float | None, weight_offset: float, casting: Casting,
    out_dtype: Any, residual_dtype: Any, scale: Any, per_head: bool, prenorm: bool,
    in_place: bool, wanted: bool,
) -> _Asked:  # fmt: skip
    """What the keywords of a call come to.

    Args:
        x: its dtype, and so for the residual; None for none.
        eps: the call's, and so for all others but these two.
        scale: None, "static" or "dynamic".
        wanted: whether there is to be a gradient.
    """
    for name, dtype in (("out_dtype", out_dtype), ("residual_dtype", residual_dtype)):
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise InvalidInput(f"{name} is {dtype!r}: pass a torch.dtype")
    if wanted and scale is not None:
        raise InvalidInput(
            "an 8-bit y has no gradient, and one is asked for: call under torch.no_grad()"
        )
    own_dtype = x if residual is None else residual
    if in_place:
        if residual is None:
            raise InvalidInput("residual_inplace=True, and no residual to write to")
        if wanted:
            raise InvalidInput(
                "residual_inplace=True overwrites what a gradient needs: call under torch.no_grad()"
            )
        if residual_dtype not in (None, residual):
            raise InvalidInput(
                f"residual_dtype is {residual_dtype}, and in place it is the residual's, {residual}"
            )
    residual_dtype = residual_dtype or own_dtype
    casting = casting_of(casting)
    if x in (torch.float32, torch.float64):  # rounds to what it is
        casting = "none"
    if eps is None:
        eps = torch.finfo(x).eps if x is torch.float64 else EPS
    more = Whole(
        eps, number("weight_offset", weight_offset), casting, per_head,
        None if out_dtype is x else out_dtype, None, scale or "none",
    )  # fmt: skip
    is_plain = more == Whole(eps) and not prenorm
    passes = prenorm and residual is None and residual_dtype is x and not wanted
    if (prenorm and not passes) or in_place or (wanted and residual is not None):
        more = more._replace(residual_out_dtype=residual_dtype)
    return _Asked(more, is_plain, passes)


_found = functools.lru_cache(maxsize=layouts.KEPT)(_asked)


def _require_scale(x: Any, scale: Any) -> None:
    if scale.numel() != 1 or scale.dtype is not torch.float32 or scale.device != x.device:
        raise InvalidInput(
            f"scale is {scale.dtype} {tuple(scale.shape)} on {scale.device}: pass one float32 "
            f"number on {x.device}"
        )


def _require_end(x: Any, lists: Any, name: str = "weight") -> int:
    """The dimensions of a weight or bias of several, which are x's last ones."""
    dims = int(lists.dim())
    if x.shape[-dims:] != lists.shape:
        raise InvalidInput(
            f"{name} has shape {tuple(lists.shape)}, and x, {tuple(x.shape)}, does not end with it"
        )
    return dims


def _over(dims: int, x: Any, weight: Any, eps: Any, more: dict[str, Any]) -> Any:
    """:func:`rms_norm` of rows of several dimensions; the weight and the bias are flat."""
    rows, residual = x.flatten(-dims), more.get("residual")
    if residual is not None:
        if residual.shape != x.shape:
            raise InvalidInput(
                f"residual has shape {tuple(residual.shape)} and must have x's, {tuple(x.shape)}"
            )
        # in place no copy will do: torch says what it lacks
        in_place = more.get("residual_inplace")
        flat = residual.view(rows.shape) if in_place else residual.flatten(-dims)
        more = {**more, "residual": flat}
    results = rms_norm(rows, weight, eps, **more)
    if isinstance(results, torch.Tensor):
        return results.view(x.shape)
    return tuple(t.view(x.shape) if t.shape == rows.shape else t for t in results)


class RMSNorm(torch.nn.RMSNorm):  # type: ignore[misc]
    """``torch.nn.RMSNorm`` on our kernels: same arguments, state and repr, and more by name.

    ``module.__class__ = RMSNorm`` turns a torch.nn.RMSNorm of a finished model into one.

    Args:
        normalized_shape: the last dimensions of x; with ``per_head`` (H, N).
        eps: see :func:`rms_norm`.
        elementwise_affine: whether there is a weight.
        device: of the parameters.
        dtype: of the parameters.
        bias: whether there is a bias, of the weight's shape.
        extras: weight_offset, casting, out_dtype, residual_dtype and per_head as :func:`rms_norm`
            takes them. The weight is 1 - weight_offset at first.

    Attributes:
        extras: those that were given.
    """

    has_bias = False
    extras: ModuleKeywords = {}  # noqa: RUF012 - never changed in place

    def __init__(
        self,
        normalized_shape: Any,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = False,
        **extras: Unpack[ModuleKeywords],
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        if extras:
            known = ModuleKeywords.__annotations__
            if unknown := sorted(extras.keys() - known.keys()):
                raise TypeError(f"{', '.join(unknown)}: RMSNorm takes {', '.join(known)}")
            self.extras = extras
        if bias:
            self.has_bias = True
            self.bias = torch.nn.Parameter(
                torch.empty(self.normalized_shape, device=device, dtype=dtype)
            )
        if bias or extras:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weight such that, with its offset, it is 1; the bias 0."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.extras.get("weight_offset", 0.0))
        if self.has_bias:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: Any, residual: Any = None, prenorm: bool = False) -> Any:
        """See :func:`rms_norm`."""
        weight = self.weight
        more: dict[str, Any] = {}
        if residual is not None or prenorm or self.extras or self.has_bias:
            bias = self.bias if self.has_bias else None
            more = {"bias": bias, "residual": residual, "prenorm": prenorm, **self.extras}
        if weight is not None or more.get("bias") is not None:
            return rms_norm(x, weight, self.eps, **more)
        dims = len(self.normalized_shape)
        if x.shape[-dims:] != self.normalized_shape:
            raise InvalidInput(
                f"x has shape {tuple(x.shape)} and must end with {self.normalized_shape}, "
                "normalized_shape"
            )
        return _over(dims, x, None, self.eps, more)

    def extra_repr(self) -> str:
        """torch's, and what is there beyond it."""
        more = {"bias": True} if self.has_bias else {}
        parts = [f"{name}={value!r}" for name, value in {**more, **self.extras}.items()]
        return ", ".join([super().extra_repr(), *parts])

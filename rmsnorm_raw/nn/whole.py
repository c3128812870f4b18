"""Calls with more than x and a weight: residual, bias, offset, casting, heads, other dtypes, scale.

As the plain call, by two registered operators of its own, which ``torch.compile`` and the like see:

    rmsnorm_raw::rmsnorm_whole_fwd(x, weight, bias, residual, scale, eps, weight_offset, casting,
        per_head, out_dtype, residual_out_dtype, dynamic_scale) -> (y, rstd, residual_out, scales)
    rmsnorm_raw::rmsnorm_whole_bwd(dout, h, weight, rstd, dresidual_out, weight_offset, per_head,
        need_dweight, dx_dtype, dresidual_dtype, dbias_dtype) -> (dx, dweight, dbias, dresidual)

What is not asked for is empty. Eager calls end in the same :func:`forward` and :func:`backward`.
Backward starts from h, which is x, or residual_out where there is a residual.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from rmsnorm_raw import interop, layouts
from rmsnorm_raw.calls import rstd_of_nothing
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.extras import LEAST_SCALE, Scale
from rmsnorm_raw.layouts import Whole
from rmsnorm_raw.nn import formula
from rmsnorm_raw.nn.launching import (
    DEVICES,
    call_operator,
    dense,
    empty_like,
    is_batched,
    is_eager,
    kind_of,
    launch,
    layout_of,
    require_real,
    simulates,
)
from rmsnorm_raw.strides import are_apart


def call(
    x: Any, weight: Any, bias: Any, residual: Any, scale: Any, more: Whole, eager: bool,
    wanted: bool, in_place: bool,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(y, residual_out, scale of each row); the last two None where not asked for.

    Args:
        x: its rows are of the last dimension.
        weight: of that dimension, with per_head of the last two.
        bias: likewise.
        residual: like x.
        scale: a static one, or None.
        more: all that is no tensor.
        eager: see :func:`rmsnorm_raw.nn.launching.is_eager`.
        wanted: whether there is to be a gradient.
        in_place: residual_out is written into the residual.
    """
    if in_place and not (residual.is_contiguous() or are_apart(residual.shape, residual.stride())):
        raise InvalidInput(
            "the residual's elements overlap, as repeated rows do, and cannot be written in place"
        )
    if forward_ad._current_level >= 0:
        y, _, residual_out, scales = by_formula(x, weight, bias, residual, scale, more)
    elif not eager:
        y, _, residual_out, scales = call_operator(
            torch.ops.rmsnorm_raw.rmsnorm_whole_fwd, x, weight, bias, residual, scale, more.eps,
            more.weight_offset, more.casting, more.per_head, more.out_dtype,
            more.residual_out_dtype, more.scale == "dynamic",
        )  # fmt: skip
        scales = scales if more.scale == "dynamic" else None
    elif wanted:
        y, residual_out = WholeNorm.apply(x, weight, bias, residual, more)
        scales = None
    else:
        y, _, residual_out, scales = forward(
            x, weight, bias, residual, scale, more, False, in_place
        )
    if in_place and residual_out is not residual:
        residual_out = residual.copy_(residual_out)
    return y, residual_out, scales


class WholeNorm(torch.autograd.Function):  # type: ignore[misc]
    """Keeps h, which is an output or x itself, the weight, and rstd."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, residual: Any, more: Whole) -> Any:
        """y and residual_out."""
        y, rstd, residual_out, _ = forward(x, weight, bias, residual, None, more, True)
        _keep(ctx, x, weight, bias, residual, rstd, residual_out, more)
        if residual_out is not None and _is_constant(ctx):
            ctx.mark_non_differentiable(residual_out)
        return y, residual_out

    @staticmethod
    def backward(ctx: Any, dout: Any, dresidual_out: Any) -> Any:
        """dx, dweight, dbias and dresidual."""
        return *_gradients(ctx, dout, dresidual_out, directly=True), None


def _keep(
    ctx: Any, x: Any, weight: Any, bias: Any, residual: Any, rstd: Any, residual_out: Any,
    more: Whole,
) -> None:  # fmt: skip
    ctx.save_for_backward(x if residual is None else residual_out, weight, rstd)
    ctx.more = more
    ctx.dtypes = (
        x.dtype, None if bias is None else bias.dtype, None if residual is None else residual.dtype
    )  # fmt: skip
    ctx.set_materialize_grads(False)


def _is_constant(ctx: Any) -> bool:
    """Whether residual_out has no gradient: the weight and the bias do not enter it."""
    return not (ctx.needs_input_grad[0] or ctx.needs_input_grad[3])


def _gradients(ctx: Any, dout: Any, dresidual_out: Any, directly: bool) -> tuple[Any, ...]:
    """(dx, dweight, dbias, dresidual), None where not wanted."""
    h, weight, rstd = ctx.saved_tensors
    if h.shape[:-1] != rstd.shape:
        raise InvalidInput("residual_out was not asked for, and the gradient is computed from it")
    need_dx, need_dweight, need_dbias, need_dresidual = ctx.needs_input_grad[:4]
    of_x, of_bias, of_residual = ctx.dtypes
    if dout is None:  # y went nowhere
        if dresidual_out is None:
            return None, None, None, None
        dx = dresidual_out.to(of_x) if need_dx else None
        return dx, None, None, dresidual_out.to(of_residual) if need_dresidual else None
    dx_dtype = of_x if need_dx else of_residual if need_dresidual else None
    apart = need_dx and need_dresidual and of_x is not of_residual
    wanted = (
        need_dweight, dx_dtype, of_residual if apart else None, of_bias if need_dbias else None
    )  # fmt: skip
    if dx_dtype is None:
        dresidual_out = None
    used = [t for t in (dout, h, weight, rstd, dresidual_out) if t is not None]
    if torch.is_grad_enabled():  # create_graph: the gradients are to be differentiable themselves
        rstd = formula.rstd_of(h, ctx.more.eps)
        compute = formula.backward
    elif directly and all(is_eager(t, None) and not is_batched(t) for t in used):
        compute = backward
    else:
        compute = torch.ops.rmsnorm_raw.rmsnorm_whole_bwd
    given = dout, h, weight, rstd, dresidual_out, ctx.more.weight_offset, ctx.more.per_head
    dx, dweight, dbias, dresidual = compute(*given, *wanted)
    return (
        dx if need_dx else None, dweight if need_dweight else None, dbias if need_dbias else None,
        (dresidual if apart else dx) if need_dresidual else None,
    )  # fmt: skip


# ---- launches ------------------------------------------------------------------------------------


def by_formula(
    x: Any, weight: Any, bias: Any, residual: Any, scale: Any, more: Whole
) -> tuple[Any, Any, Any, Any]:
    """As :func:`forward`, in torch's operations."""
    require_real(x=x, weight=weight, bias=bias, residual=residual)
    layouts.require_whole(kind_of(x), kind_of(weight), kind_of(bias), kind_of(residual), more)
    return formula.forward(
        x, weight, more.eps, bias=bias, residual=residual,
        scale="dynamic" if more.scale == "dynamic" else scale, weight_offset=more.weight_offset,
        casting=more.casting, out_dtype=more.out_dtype, residual_out_dtype=more.residual_out_dtype,
    )  # fmt: skip


def forward(
    x: Any, weight: Any, bias: Any, residual: Any, scale: Any, more: Whole, store_rstd: bool,
    in_place: bool = False,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """(y, rstd, residual_out, scale of each row), None where not wanted.

    With ``in_place`` residual_out is the residual, written, unless its layout asks for a copy.
    """
    if x.is_cpu and not simulates():
        return by_formula(x, weight, bias, residual, scale, more)
    try:
        (weight, weight_address), (bias, bias_address) = dense(weight), dense(bias)
        address, residual_address = x.data_ptr(), 0 if residual is None else residual.data_ptr()
    except RuntimeError:
        require_real(x=x, weight=weight, bias=bias, residual=residual)
        raise
    in_place = in_place and not _shares(x, residual)
    prepared = layouts.whole_forward(
        layout_of(x), kind_of(weight), kind_of(bias), layout_of(residual),
        (address & 15, weight_address & 15, bias_address & 15, residual_address & 15), more,
        store_rstd, in_place,
    )  # fmt: skip
    if prepared is None:
        rows = None if residual is None else residual.contiguous()
        return forward(x.contiguous(), weight, bias, rows, scale, more, store_rstd)
    rstd = residual_out = scales = None
    rstd_address = scale_address = residual_out_address = 0
    y = empty_like(x, prepared, more.out_dtype)
    if store_rstd:
        rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        rstd_address = rstd.data_ptr()
    if more.residual_out_dtype is not None:
        residual_out = residual
        if not in_place:
            residual_out = empty_like(x, prepared, more.residual_out_dtype)
        residual_out_address = residual_out.data_ptr()
    if more.scale == "dynamic":
        scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        scale_address = scales.data_ptr()
    elif more.scale == "static":
        scale_address = scale.data_ptr()
    if prepared.launches:
        launch(
            prepared, x, (address, weight_address, y.data_ptr(), rstd_address),
            (bias_address, residual_address, residual_out_address, scale_address),
        )  # fmt: skip
    else:
        if rstd is not None:
            rstd.fill_(rstd_of_nothing(more.eps))
        if scales is not None:
            scales.fill_(LEAST_SCALE)
    if in_place and not residual.is_inference():
        torch.autograd.graph.increment_version(residual)
    return y, rstd, residual_out, scales


def _shares(x: Any, residual: Any) -> bool:
    """Whether x and the residual share memory."""
    storages = x.untyped_storage(), residual.untyped_storage()
    if storages[0].data_ptr() != storages[1].data_ptr():
        return False
    return interop.overlap(interop.view(x), interop.view(residual))


def backward(
    dout: Any, h: Any, weight: Any, rstd: Any, dresidual_out: Any, weight_offset: float,
    per_head: bool, need_dweight: bool, dx_dtype: Any, dresidual_dtype: Any, dbias_dtype: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """(dx, dweight, dbias, dresidual), None where not wanted."""
    more = weight_offset, per_head, need_dweight, dx_dtype, dresidual_dtype, dbias_dtype
    if h.is_cpu and not simulates():
        layouts.require_like(
            kind_of(h), kind_of(dout), kind_of(rstd), dout.dtype, kind_of(dresidual_out)
        )
        return formula.backward(dout, h, weight, rstd, dresidual_out, *more)
    (weight, weight_address), (rstd, rstd_address) = dense(weight), dense(rstd)
    address, dout_address = h.data_ptr(), dout.data_ptr()
    dresidual_out_address = 0 if dresidual_out is None else dresidual_out.data_ptr()
    lows = address & 15, dout_address & 15, weight_address & 15, dresidual_out_address & 15
    prepared = layouts.whole_backward(
        layout_of(dout), layout_of(h), kind_of(weight), layout_of(dresidual_out), kind_of(rstd),
        lows, *more,
    )  # fmt: skip
    if prepared is None:
        rows = None if dresidual_out is None else dresidual_out.contiguous()
        return backward(dout.contiguous(), h.contiguous(), weight, rstd, rows, *more)
    dx = None if dx_dtype is None else empty_like(h, prepared, dx_dtype)
    dresidual = None if dresidual_dtype is None else empty_like(h, prepared, dresidual_dtype)
    dweight = torch.empty_like(weight) if need_dweight else None
    dbias = None
    if dbias_dtype is not None:
        lists = h.shape[-2:] if per_head else h.shape[-1:]
        dbias = torch.empty(lists, dtype=dbias_dtype, device=h.device)
    if prepared.launches:
        launch(
            prepared, h,
            (dout_address, address, weight_address, rstd_address, _at(dx), _at(dweight)),
            (0, dresidual_out_address, _at(dresidual), _at(dbias)),
        )  # fmt: skip
    else:
        for total in (dweight, dbias):
            if total is not None:
                total.zero_()
    return dx, dweight, dbias, dresidual


def _at(tensor: Any) -> int:
    return 0 if tensor is None else int(tensor.data_ptr())


# ---- registered operators ------------------------------------------------------------------------

FORWARD, BACKWARD = "rmsnorm_raw::rmsnorm_whole_fwd", "rmsnorm_raw::rmsnorm_whole_bwd"

torch.library.define(
    FORWARD,
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? scale, float eps,"
    " float weight_offset=0., str casting='none', bool per_head=False, ScalarType? out_dtype=None,"
    " ScalarType? residual_out_dtype=None, bool dynamic_scale=False)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    BACKWARD,
    "(Tensor dout, Tensor h, Tensor? weight, Tensor rstd, Tensor? dresidual_out,"
    " float weight_offset, bool per_head, bool need_dweight, ScalarType? dx_dtype,"
    " ScalarType? dresidual_dtype, ScalarType? dbias_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _forward_operator(
    x: Any, weight: Any, bias: Any, residual: Any, scale: Any, *rest: Any
) -> tuple[Any, Any, Any, Any]:
    more = _whole(scale, *rest)
    return _filled(x, *forward(x, weight, bias, residual, scale, more, True))


def _backward_operator(dout: Any, h: Any, *rest: Any) -> tuple[Any, Any, Any, Any]:
    return _filled(h, *backward(dout, h, *rest))


def _filled(x: Any, *results: Any) -> tuple[Any, ...]:
    """An operator cannot give None."""
    return tuple(x.new_empty(0) if result is None else result for result in results)


def _whole(
    scale: Any, eps: float, weight_offset: float = 0.0, casting: Any = "none",
    per_head: bool = False, out_dtype: Any = None, residual_out_dtype: Any = None,
    dynamic_scale: bool = False,
) -> Whole:  # fmt: skip
    kind: Scale = "dynamic" if dynamic_scale else "none" if scale is None else "static"
    return Whole(eps, weight_offset, casting, per_head, out_dtype, residual_out_dtype, kind)


def _forward_fake(
    x: Any, weight: Any, bias: Any, residual: Any, scale: Any, *rest: Any
) -> tuple[Any, Any, Any, Any]:
    more = _whole(scale, *rest)
    layouts.require_whole(kind_of(x), kind_of(weight), kind_of(bias), kind_of(residual), more)
    residual_out, rows = more.residual_out_dtype, x.shape[:-1]
    return _filled(
        x, x.new_empty(x.shape, dtype=more.out_dtype or x.dtype),
        x.new_empty(rows, dtype=formula.wide_dtype(x)),
        None if residual_out is None else x.new_empty(x.shape, dtype=residual_out),
        x.new_empty(rows, dtype=torch.float32) if more.scale == "dynamic" else None,
    )  # fmt: skip


def _backward_fake(
    dout: Any, h: Any, weight: Any, rstd: Any, dresidual_out: Any, weight_offset: float,
    per_head: bool, need_dweight: bool, dx_dtype: Any, dresidual_dtype: Any, dbias_dtype: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    lists = h.shape[-2:] if per_head else h.shape[-1:]

    def empty(shape: Any, dtype: Any) -> Any:
        return None if dtype is None else h.new_empty(shape, dtype=dtype)

    return _filled(
        h, empty(h.shape, dx_dtype), empty(lists, weight.dtype if need_dweight else None),
        empty(lists, dbias_dtype), empty(h.shape, dresidual_dtype),
    )  # fmt: skip


def _keep_of_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, weight, bias, residual, *rest = inputs
    more = _whole(*rest)
    y, rstd, residual_out, scales = output
    _keep(ctx, x, weight, bias, residual, rstd, residual_out, more)
    fixed = [rstd, scales]
    fixed += [residual_out] if more.residual_out_dtype is None or _is_constant(ctx) else []
    fixed += [y] if more.scale != "none" else []
    ctx.mark_non_differentiable(*fixed)


def _operator_backward(ctx: Any, dout: Any, _: Any, dresidual_out: Any, __: Any) -> Any:
    return *_gradients(ctx, dout, dresidual_out, directly=False), *(None,) * 8


torch.library.impl(FORWARD, DEVICES, _forward_operator)
torch.library.impl(BACKWARD, DEVICES, _backward_operator)
torch.library.register_fake(FORWARD, _forward_fake)
torch.library.register_fake(BACKWARD, _backward_fake)
torch.library.register_autograd(FORWARD, _operator_backward, setup_context=_keep_of_operator)

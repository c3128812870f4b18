"""The plain call, y = x * rstd * weight: its launches, and its two registered operators.

An eager call takes the short way: one ``autograd.Function``, or, where no gradient is wanted, a
launch that stores no rstd. What a layout of tensors needs is found once; after that a call looks it
up, has torch allocate the results and writes their addresses into arguments that lie ready. All
else, ``torch.compile`` and what hands out tensors that only stand for others (fake tensors, tensor
subclasses, dispatch modes, ``torch.func``), gets two registered operators:

    rmsnorm_raw::rmsnorm_fwd(x, weight, eps) -> (y, rstd)
    rmsnorm_raw::rmsnorm_bwd(dout, x, weight, rstd, need_dx, need_dweight) -> (dx, dweight)

Both ways end in :func:`forward` and :func:`backward`, so they give the same bits. Tensors on a CPU
are worked on by the plain formula, or, with ``RMSNORM_RAW_BACKEND=cpu``, by the kernels in the
simulator.
"""

from __future__ import annotations

from typing import Any

import torch

from rmsnorm_raw import layouts
from rmsnorm_raw.calls import rstd_of_nothing
from rmsnorm_raw.nn import formula
from rmsnorm_raw.nn.launching import (
    DEVICES,
    dense,
    empty_like,
    is_batched,
    is_eager,
    kind_of,
    launch,
    layout_of,
    not_dense,
    require_real,
    simulates,
)


class PlainNorm(torch.autograd.Function):  # type: ignore[misc]
    """Keeps x, which autograd keeps anyway, the weight, and rstd."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, eps: float) -> Any:
        """y."""
        y, rstd = forward(x, weight, eps, store_rstd=True)
        ctx.save_for_backward(x, weight, rstd)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        """dx and dweight."""
        return *_gradients(ctx, dout, directly=True), None


def _gradients(ctx: Any, dout: Any, directly: bool) -> tuple[Any, Any]:
    """(dx, dweight), None where not wanted, of a context that has x, weight, rstd and eps."""
    x, weight, rstd = ctx.saved_tensors
    need_dx, need_dweight = ctx.needs_input_grad[:2]
    if torch.is_grad_enabled():  # create_graph: the gradients are to be differentiable themselves
        rstd = formula.rstd_of(x, ctx.eps)
        return by_formula(dout, x, weight, rstd, need_dx, need_dweight)
    # dout may be of a subclass, or batched; so may be what hooks on saved tensors give back
    used = [tensor for tensor in (dout, x, weight, rstd) if tensor is not None]
    eager = directly and all(is_eager(each, None) for each in used) and not is_batched(dout)
    compute = backward if eager else torch.ops.rmsnorm_raw.rmsnorm_bwd
    dx, dweight = compute(dout, x, weight, rstd, need_dx, need_dweight)
    return (dx if need_dx else None), (dweight if need_dweight else None)


def by_formula(
    dout: Any, x: Any, weight: Any, rstd: Any, need_dx: bool, need_dweight: bool
) -> tuple[Any, Any]:
    """(dx, dweight), None where not needed, in operations that torch can differentiate again."""
    dx_dtype = x.dtype if need_dx else None
    return formula.backward(
        dout, x, weight, rstd, None, 0.0, False, need_dweight, dx_dtype, None, None
    )[:2]


# ---- launches ------------------------------------------------------------------------------------


def forward(x: Any, weight: Any, eps: float, store_rstd: bool) -> tuple[Any, Any]:
    """(y, rstd), rstd None where it is not to be stored."""
    if x.is_cpu and not simulates():
        require_real(x=x)
        layouts.require_fit(kind_of(x), kind_of(weight))
        layouts.require_eps(eps)
        return formula.forward(x, weight, eps)[:2]
    # dense, layout_of and kind_of written out: a call has no tenth of a microsecond to give away
    kind, weight_address = None, 0
    if weight is not None:
        weight = weight.contiguous()
        kind, weight_address = (weight.shape, weight.dtype, weight.device), weight.data_ptr()
    try:
        address = x.data_ptr()
    except RuntimeError as error:
        raise not_dense(x) from error
    layout = x.shape, x.dtype, x.device, x.is_contiguous() or x.stride()
    low, weight_low = address & 15, weight_address & 15
    prepared = layouts.forward(layout, kind, low, weight_low, eps, store_rstd)
    if prepared is None:
        return forward(x.contiguous(), weight, eps, store_rstd)
    y = empty_like(x, prepared)
    rstd, rstd_address = None, 0
    if store_rstd:
        rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        rstd_address = rstd.data_ptr()
    if prepared.launches:
        launch(prepared, x, (address, weight_address, y.data_ptr(), rstd_address))
    elif rstd is not None:
        rstd.fill_(rstd_of_nothing(eps))
    return y, rstd


def backward(
    dout: Any, x: Any, weight: Any, rstd: Any, need_dx: bool, need_dweight: bool
) -> tuple[Any, Any]:
    """(dx, dweight), None where not needed."""
    if x.is_cpu and not simulates():
        layouts.require_like(kind_of(x), kind_of(dout), kind_of(rstd))
        return by_formula(dout, x, weight, rstd, need_dx, need_dweight)
    (weight, weight_address), (rstd, rstd_address) = dense(weight), dense(rstd)
    address, dout_address = x.data_ptr(), dout.data_ptr()
    prepared = layouts.backward(
        layout_of(dout), layout_of(x), kind_of(weight), kind_of(rstd),
        (address | dout_address) % 16, weight_address % 16, need_dx, need_dweight,
    )  # fmt: skip
    if prepared is None:
        return backward(dout.contiguous(), x.contiguous(), weight, rstd, need_dx, need_dweight)
    dx, dx_address, dweight, dweight_address = None, 0, None, 0
    if need_dx:
        dx = empty_like(x, prepared)
        dx_address = dx.data_ptr()
    if need_dweight:
        dweight = torch.empty_like(weight)
        dweight_address = dweight.data_ptr()
    if prepared.launches:
        given = (dout_address, address, weight_address, rstd_address, dx_address, dweight_address)
        launch(prepared, x, given)
    elif dweight is not None:
        dweight.zero_()
    return dx, dweight


# ---- registered operators ------------------------------------------------------------------------

FORWARD, BACKWARD = "rmsnorm_raw::rmsnorm_fwd", "rmsnorm_raw::rmsnorm_bwd"

torch.library.define(
    FORWARD,
    "(Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    BACKWARD,
    "(Tensor dout, Tensor x, Tensor? weight, Tensor rstd, bool need_dx, bool need_dweight)"
    " -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _forward_operator(x: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    return forward(x, weight, eps, store_rstd=True)


def _backward_operator(
    dout: Any, x: Any, weight: Any, rstd: Any, need_dx: bool, need_dweight: bool
) -> tuple[Any, Any]:
    dx, dweight = backward(dout, x, weight, rstd, need_dx, need_dweight)
    # an operator cannot give None
    return (x.new_empty(0) if dx is None else dx), (x.new_empty(0) if dweight is None else dweight)


def _forward_fake(x: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    layouts.require_fit(kind_of(x), kind_of(weight))
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.shape[:-1], dtype=formula.wide_dtype(x))


def _backward_fake(
    dout: Any, x: Any, weight: Any, rstd: Any, need_dx: bool, need_dweight: bool
) -> tuple[Any, Any]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_dx else x.new_empty(0)
    dweight = weight.new_empty(weight.shape) if need_dweight else x.new_empty(0)
    return dx, dweight


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _operator_backward(ctx: Any, dout: Any, _: Any) -> tuple[Any, Any, None]:
    return *_gradients(ctx, dout, directly=False), None


torch.library.impl(FORWARD, DEVICES, _forward_operator)
torch.library.impl(BACKWARD, DEVICES, _backward_operator)
torch.library.register_fake(FORWARD, _forward_fake)
torch.library.register_fake(BACKWARD, _backward_fake)
torch.library.register_autograd(FORWARD, _operator_backward, setup_context=_keep)

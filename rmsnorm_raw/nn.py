"""PyTorch: ``rms_norm`` and ``RMSNorm``, in the place of ``F.rms_norm`` and ``torch.nn.RMSNorm``.

An eager call takes the short way: one ``autograd.Function``, or, where no gradient is wanted, a
launch that stores no rstd. What a layout of tensors needs is found once; after that a call looks it
up, has torch allocate the results and writes their addresses into arguments that lie ready. All
else, ``torch.compile`` and what hands out tensors that only stand for others (fake tensors, tensor
subclasses, dispatch modes, ``torch.func``), gets two registered operators:

    rmsnorm_raw::rmsnorm_fwd(x, weight, eps) -> (y, rstd)
    rmsnorm_raw::rmsnorm_bwd(dout, x, weight, rstd, need_dx, need_dweight) -> (dx, dweight)

Both ways end in :func:`_forward` and :func:`_backward`, so they give the same bits. Tensors on a
CPU are worked on by the plain formula in torch's operations, or, with ``RMSNORM_RAW_BACKEND=cpu``,
by the kernels in the simulator.
"""

from __future__ import annotations

import os
from typing import Any

from rmsnorm_raw import layouts
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.ops import rstd_of_nothing

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "rmsnorm_raw.nn needs PyTorch 2.10 or newer: pip install 'rmsnorm-raw[torch]'", name="torch"
    ) from error
from torch.autograd import forward_ad

#: what F.rms_norm takes for eps=None: the epsilon of the dtype that it computes in
EPS = torch.finfo(torch.float32).eps


def rms_norm(x: Any, weight: Any = None, eps: float | None = None) -> Any:
    """y = x * rstd * weight with rstd = (mean(x²) + eps)^-½, over the dimensions of the weight.

    Args:
        x: (..., N), float16, bfloat16 or float32 (on a CPU float64 too), on any device of CUDA or
            ROCm or on a CPU. Rows are read in place where they are dense and evenly spaced.
        weight: (N,), or of x's last dimensions; of any of the dtypes, on x's device. None: the last
            dimension is normalised, and not scaled.
        eps: None for 2**-23, float32's epsilon, whatever x's dtype, as F.rms_norm has it.

    Returns:
        A contiguous tensor of x's shape and dtype, under autocast too. It is differentiable, more
        than once as well and in forward mode: what these ask for is computed by the plain formula.

    Raises:
        InvalidInput: a shape, dtype, device or eps that no kernel can serve.
        BackendUnavailable: CuPy is missing, or does not fit the device.
    """
    eager = _is_eager(x, weight)
    if not eager:
        _require_tensors(x, weight)
    if weight is not None and weight.dim() > 1:
        dims = weight.dim()
        if x.shape[-dims:] != weight.shape:
            raise InvalidInput(
                f"weight has shape {tuple(weight.shape)}, and x, {tuple(x.shape)}, does not end "
                "with it"
            )
        return rms_norm(x.flatten(-dims), weight.flatten(), eps).view(x.shape)
    if eps is None:
        eps = torch.finfo(x.dtype).eps if x.dtype is torch.float64 else EPS
    if forward_ad._current_level >= 0:  # forward mode, whose tangents are in no flag of a tensor
        return _formula_forward(x, weight, eps)[0]
    if not eager:
        return torch.ops.rmsnorm_raw.rmsnorm_fwd(x, weight, eps)[0]
    wanted = x.requires_grad or (weight is not None and weight.requires_grad)
    if wanted and torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps)
    return _forward(x, weight, eps, store_rstd=False)[0]


class RMSNorm(torch.nn.RMSNorm):  # type: ignore[misc]
    """``torch.nn.RMSNorm`` on our kernels: same arguments, state and repr.

    ``module.__class__ = RMSNorm`` turns a torch.nn.RMSNorm of a finished model into one.
    """

    def forward(self, x: Any) -> Any:
        """See :func:`rms_norm`."""
        if self.weight is not None:
            return rms_norm(x, self.weight, self.eps)
        dims = len(self.normalized_shape)
        if x.shape[-dims:] != self.normalized_shape:
            raise InvalidInput(
                f"x has shape {tuple(x.shape)} and must end with {self.normalized_shape}, "
                "normalized_shape"
            )
        if dims == 1:
            return rms_norm(x, None, self.eps)
        return rms_norm(x.flatten(-dims), None, self.eps).view(x.shape)


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
# names of this module: an attribute of torch costs a call on the host 0.1 us
_is_compiling = torch.compiler.is_compiling
_count_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # by is_grads_batched
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # not in a torch for CPUs
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# on the current GPU, past the dispatcher, as inductor's code allocates
_empty_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) or (
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
)


def _is_eager(x: Any, weight: Any) -> bool:
    """Whether the tensors have memory of their own, and nobody is to see operations go by."""
    return not (
        _is_compiling()
        or type(x) not in _PLAIN
        or type(weight) not in _PLAIN
        or _count_modes()
        or _transforms()
        or not (x.is_cuda or x.is_cpu)
        or x.is_neg()  # the dispatcher resolves it
        or (weight is not None and weight.is_neg())
    )


def _require_tensors(x: Any, weight: Any) -> None:
    for name, tensor in (("x", x), ("weight", weight)):
        if not isinstance(tensor, torch.Tensor) and not (tensor is None and name == "weight"):
            raise InvalidInput(f"{name} is {type(tensor).__name__}: pass a torch.Tensor")


class _RMSNorm(torch.autograd.Function):  # type: ignore[misc]
    """Keeps x, which autograd keeps anyway, the weight, and rstd."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, eps: float) -> Any:
        y, rstd = _forward(x, weight, eps, store_rstd=True)
        ctx.save_for_backward(x, weight, rstd)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        return *_gradients(ctx, dout, directly=True), None


def _gradients(ctx: Any, dout: Any, directly: bool) -> tuple[Any, Any]:
    """(dx, dweight), None where not wanted, of a context that has x, weight, rstd and eps."""
    x, weight, rstd = ctx.saved_tensors
    need_dx, need_dweight = ctx.needs_input_grad[:2]
    if torch.is_grad_enabled():  # create_graph: the gradients are to be differentiable themselves
        rstd = _formula_rstd(x, ctx.eps)
        return _formula_backward(dout, x, weight, rstd, need_dx, need_dweight)
    # dout may be of a subclass, or batched; so may be what hooks on saved tensors give back
    used = [tensor for tensor in (dout, x, weight, rstd) if tensor is not None]
    eager = directly and all(_is_eager(each, None) for each in used) and not _is_batched(dout)
    compute = _backward if eager else torch.ops.rmsnorm_raw.rmsnorm_bwd
    dx, dweight = compute(dout, x, weight, rstd, need_dx, need_dweight)
    return (dx if need_dx else None), (dweight if need_dweight else None)


# ---- launches ------------------------------------------------------------------------------------


def _forward(x: Any, weight: Any, eps: float, store_rstd: bool) -> tuple[Any, Any]:
    """(y, rstd), rstd None where it is not to be stored."""
    index = x.get_device()
    if index < 0:
        if not _simulates():
            return _formula_forward(x, weight, eps)
    elif index != _current_device():
        with torch.cuda.device(index):
            return _forward(x, weight, eps, store_rstd)
    # _dense, _layout and _kind written out: without grad a call has no tenth of a microsecond to
    # give away
    kind, weight_address = None, 0
    if weight is not None:
        weight = weight.contiguous()
        kind, weight_address = (weight.shape, weight.dtype, weight.device), weight.data_ptr()
    try:
        address = x.data_ptr()
    except RuntimeError as error:
        raise _not_dense(x) from error
    layout = x.shape, x.dtype, x.device, x.is_contiguous() or x.stride()
    low, weight_low = address & 15, weight_address & 15
    prepared = layouts.forward(layout, kind, low, weight_low, eps, store_rstd)
    if prepared is None:
        return _forward(x.contiguous(), weight, eps, store_rstd)
    y = _empty(prepared, x, index)
    rstd, rstd_address = None, 0
    if store_rstd:
        rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        rstd_address = rstd.data_ptr()
    if prepared.launches:
        _launch(prepared, index, (address, weight_address, y.data_ptr(), rstd_address))
    elif rstd is not None:
        rstd.fill_(rstd_of_nothing(eps))
    return y, rstd


def _backward(
    dout: Any, x: Any, weight: Any, rstd: Any, need_dx: bool, need_dweight: bool
) -> tuple[Any, Any]:
    """(dx, dweight), None where not needed."""
    index = x.get_device()
    if index < 0:
        if not _simulates():
            layouts.require_like(_kind(x), _kind(dout), _kind(rstd))
            return _formula_backward(dout, x, weight, rstd, need_dx, need_dweight)
    elif index != _current_device():
        with torch.cuda.device(index):
            return _backward(dout, x, weight, rstd, need_dx, need_dweight)
    (weight, weight_address), (rstd, rstd_address) = _dense(weight), _dense(rstd)
    address, dout_address = x.data_ptr(), dout.data_ptr()
    prepared = layouts.backward(
        _layout(dout), _layout(x), _kind(weight), _kind(rstd), (address | dout_address) % 16,
        weight_address % 16, need_dx, need_dweight,
    )  # fmt: skip
    if prepared is None:
        return _backward(dout.contiguous(), x.contiguous(), weight, rstd, need_dx, need_dweight)
    dx, dx_address, dweight, dweight_address = None, 0, None, 0
    if need_dx:
        dx = _empty(prepared, x, index)
        dx_address = dx.data_ptr()
    if need_dweight:
        dweight = torch.empty_like(weight)
        dweight_address = dweight.data_ptr()
    if prepared.launches:
        given = (dout_address, address, weight_address, rstd_address, dx_address, dweight_address)
        _launch(prepared, index, given)
    elif dweight is not None:
        dweight.zero_()
    return dx, dweight


def _empty(prepared: layouts.Prepared, x: Any, index: int) -> Any:
    """A new contiguous tensor like x."""
    if index < 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return _empty_cuda(prepared.shape, prepared.strides, x.dtype)


def _launch(prepared: layouts.Prepared, index: int, addresses: tuple[int, ...]) -> None:
    """Launch on torch's current stream of the GPU of an index, which is the current one.

    Scratch memory is torch's: it goes to whatever follows on the stream, and a graph's capture
    takes it from the graph's own pool.
    """
    where = "cpu" if index < 0 else "cuda"
    stream = scratch_address = counter_address = 0
    if index >= 0:
        stream = _current_stream(index)
    if prepared.workspace:
        scratch = torch.empty(prepared.workspace, dtype=torch.float32, device=where)
        scratch_address = scratch.data_ptr()
    if prepared.counter:
        counter = torch.zeros(1, dtype=torch.int32, device=where)
        counter_address = counter.data_ptr()
    given = (*addresses, scratch_address, counter_address)
    for launch in prepared.launches:
        launch(stream, given)


def _dense(tensor: Any) -> tuple[Any, int]:
    """(the tensor or a contiguous copy, its address); (None, 0) for None."""
    if tensor is None:
        return None, 0
    tensor = tensor.contiguous()
    return tensor, tensor.data_ptr()


def _not_dense(x: Any) -> InvalidInput:
    return InvalidInput(f"x is of layout {x.layout}, without rows in memory: pass a dense tensor")


def _layout(tensor: Any) -> tuple[Any, ...]:
    return (*_kind(tensor), tensor.is_contiguous() or tensor.stride())


def _kind(tensor: Any) -> Any:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def _simulates() -> bool:
    return os.environ.get("RMSNORM_RAW_BACKEND") == "cpu"


# ---- the plain formula ---------------------------------------------------------------------------


def _wide_dtype(tensor: Any) -> Any:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _wide(tensor: Any) -> Any:
    return tensor.to(_wide_dtype(tensor))


def _formula_rstd(x: Any, eps: float) -> Any:
    return torch.rsqrt(_wide(x).square().mean(-1) + eps)


def _formula_forward(x: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    """(y, rstd) in float32, float64 for a float64 x, rounded once."""
    if x.layout is not torch.strided:
        raise _not_dense(x)
    if not x.is_floating_point():
        raise InvalidInput(f"x is {x.dtype}: pass a tensor of floating-point numbers")
    layouts.require_fit(_kind(x), _kind(weight))
    layouts.require_eps(eps)
    rstd = _formula_rstd(x, eps)
    y = _wide(x) * rstd.unsqueeze(-1)
    if weight is not None:
        y = y * _wide(weight)
    return y.to(x.dtype).contiguous(), rstd.contiguous()


def _formula_backward(
    dout: Any, x: Any, weight: Any, rstd: Any, need_dx: bool, need_dweight: bool
) -> tuple[Any, Any]:
    """(dx, dweight), None where not needed, in operations that torch can differentiate again."""
    dx = dweight = None
    dout, rstd = _wide(dout), rstd.unsqueeze(-1)
    normalised = _wide(x) * rstd
    if need_dx:
        g = dout if weight is None else dout * _wide(weight)
        mean = (g * normalised).mean(-1, keepdim=True)
        dx = (rstd * (g - normalised * mean)).to(x.dtype).contiguous()
    if need_dweight:
        dweight = (dout * normalised).flatten(0, -2).sum(0) if x.dim() > 1 else dout * normalised
        dweight = dweight.to(weight.dtype)
    return dx, dweight


# ---- registered operators ------------------------------------------------------------------------

FORWARD, BACKWARD = "rmsnorm_raw::rmsnorm_fwd", "rmsnorm_raw::rmsnorm_bwd"
DEVICES = ("cpu", "cuda")  # "cuda" is ROCm's name too

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
    return _forward(x, weight, eps, store_rstd=True)


def _backward_operator(
    dout: Any, x: Any, weight: Any, rstd: Any, need_dx: bool, need_dweight: bool
) -> tuple[Any, Any]:
    dx, dweight = _backward(dout, x, weight, rstd, need_dx, need_dweight)
    # an operator cannot give None
    return (x.new_empty(0) if dx is None else dx), (x.new_empty(0) if dweight is None else dweight)


def _forward_fake(x: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    layouts.require_fit(_kind(x), _kind(weight))
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.shape[:-1], dtype=_wide_dtype(x))


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

"""What both kinds of call ask of torch's tensors, and how they launch."""

from __future__ import annotations

import os
from typing import Any

import torch

from rmsnorm_raw import layouts
from rmsnorm_raw.errors import InvalidInput

DEVICES = ("cpu", "cuda")  # "cuda" is ROCm's name too
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
# names of this module: an attribute of torch costs a call on the host 0.1 us
_is_compiling = torch.compiler.is_compiling
_count_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
is_batched = torch._C._functorch.is_legacy_batchedtensor  # by is_grads_batched
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # not in a torch for CPUs
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
#: on the current GPU, past the dispatcher, as inductor's code allocates
_empty_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def is_eager(x: Any, weight: Any, *more: Any) -> bool:
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
        or (more and not _are_plain(more))
    )


def _are_plain(tensors: tuple[Any, ...]) -> bool:
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_neg()):
            return False
    return True


def require_tensors(x: Any, **others: Any) -> None:
    """Raise InvalidInput unless x is a tensor, and each of the others, but for None."""
    for name, tensor in {"x": x, **others}.items():
        if not isinstance(tensor, torch.Tensor) and not (tensor is None and name != "x"):
            raise InvalidInput(f"{name} is {type(tensor).__name__}: pass a torch.Tensor")


def require_real(**tensors: Any) -> None:
    """Raise InvalidInput where a tensor has no rows in memory, or no floating-point numbers."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.layout is not torch.strided:
            raise not_dense(tensor, name)
        if not tensor.is_floating_point():
            raise InvalidInput(f"{name} is {tensor.dtype}: pass a tensor of floating-point numbers")


def not_dense(tensor: Any, name: str = "x") -> InvalidInput:
    """The error for a tensor without an address."""
    return InvalidInput(
        f"{name} is of layout {tensor.layout}, without rows in memory: pass a dense tensor"
    )


def launch(
    prepared: layouts.Prepared, x: Any, addresses: tuple[int, ...], more: tuple[int, ...] = (0,)
) -> None:
    """Launch on torch's current stream of x's device.

    Scratch memory is torch's: it goes to whatever follows on the stream, and a graph's capture
    takes it from the graph's own pool.

    Args:
        prepared: the launches.
        x: says where.
        addresses: as ``launch.TENSORS`` has them, up to the workspace.
        more: from there on; backward's first is the counter, in whose place anything will do.
    """
    index, stream, scratch_address = x.get_device(), 0, 0
    if index >= 0:
        if index != _current_device():
            with torch.cuda.device(index):
                return launch(prepared, x, addresses, more)
        stream = _current_stream(index)
    if prepared.workspace:
        scratch = torch.empty(prepared.workspace, dtype=torch.float32, device=x.device)
        scratch_address = scratch.data_ptr()
    if prepared.counter:
        counter = torch.zeros(1, dtype=torch.int32, device=x.device)
        more = counter.data_ptr(), *more[1:]
    given = (*addresses, scratch_address, *more)
    for prepared_launch in prepared.launches:
        prepared_launch(stream, given)
    return None


def call_operator(operator: Any, *args: Any) -> Any:
    """The results of a registered operator.

    Raises:
        InvalidInput: a gradient of torch.func is asked for: no registered operator has one.
    """
    if _is_compiling() or not _transforms():
        return operator(*args)
    try:
        return operator(*args)
    except RuntimeError as error:
        if "setup_context" not in str(error):
            raise
        raise InvalidInput(
            "torch.func.grad, vjp and jacrev do not go through registered operators: take "
            "torch.autograd.grad or backward(), or torch.func.jvp and jacfwd"
        ) from error


def empty_like(x: Any, prepared: layouts.Prepared, dtype: Any = None) -> Any:
    """A new contiguous tensor of x's shape and device, and of its dtype unless one is given."""
    index = x.get_device()
    if index < 0 or index != _current_device() or _empty_cuda is None:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return _empty_cuda(prepared.shape, prepared.strides, dtype or x.dtype)


def dense(tensor: Any) -> tuple[Any, int]:
    """(the tensor or a contiguous copy, its address); (None, 0) for None."""
    if tensor is None:
        return None, 0
    tensor = tensor.contiguous()
    return tensor, tensor.data_ptr()


def layout_of(tensor: Any) -> Any:
    """A tensor's layout, as :mod:`rmsnorm_raw.layouts` wants it; None for None."""
    if tensor is None:
        return None
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous() or tensor.stride()


def kind_of(tensor: Any) -> Any:
    """A tensor's kind, as :mod:`rmsnorm_raw.layouts` wants it; None for None."""
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def simulates() -> bool:
    """Whether tensors on a CPU are for the kernels in the simulator."""
    return os.environ.get("RMSNORM_RAW_BACKEND") == "cpu"

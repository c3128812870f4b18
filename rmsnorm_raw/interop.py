"""Arrays of any library in, results of the caller's library out, without copies.

An array becomes a :class:`View`: an address and a shape. NumPy, torch and CuPy arrays are read off
directly, which costs a microsecond or two; everything else that speaks DLPack, JAX first, goes
through NumPy or CuPy. Results are allocated by the caller's library, so its memory pool orders them
on its own stream. torch and JAX are never imported here: whoever has an array of theirs has them.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import ml_dtypes  # noqa: F401 - makes np.dtype("bfloat16") known
import numpy as np

from rmsnorm_raw.backends.cupy_backend import RawStream, why_unavailable
from rmsnorm_raw.dtypes import LARGEST_FP8
from rmsnorm_raw.errors import BackendUnavailable, InvalidInput

Gpu = Literal["cuda", "rocm"]
#: device types of dlpack.h that a CPU can read: kDLCPU, kDLCUDAHost, kDLROCMHost
DLPACK_CPU = (1, 3, 11)
#: those that a GPU can read: kDLCUDA, kDLROCM, kDLCUDAManaged
DLPACK_GPU: dict[int, Gpu] = {2: "cuda", 10: "rocm", 13: "cuda"}
#: XLA's CPU client takes over a buffer on such a boundary and copies any other
XLA_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Device:
    """Where memory lies: the backend that can reach it, and the index of the device."""

    kind: Literal["cpu", "cuda", "rocm"]
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


class View(NamedTuple):
    """An array without its library.

    Attributes:
        address: of the first element.
        shape: in elements.
        strides: in elements, one a dimension.
        dtype: the dtype's name, "bfloat16" for every library's.
        element_bytes: bytes of one element.
        device: where it lies.
        writable: False where the library forbids writing into it.
        library: where it came from.
        owner: keeps the memory alive as long as the view.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    element_bytes: int
    device: Device
    writable: bool
    library: Library
    owner: Any

    def __repr__(self) -> str:  # the owner's would print its elements
        return f"<View: {self.dtype} {self.shape} on {self.device}>"


class Library(abc.ABC):
    """What is asked of a library that arrays come from.

    Attributes:
        name: as it is imported.
        give: for a library met through DLPack alone, what hands it an array of NumPy or CuPy, which
            do the work; None for those two and torch.
    """

    def __init__(self, name: str, give: Callable[[Any], Any] | None = None) -> None:
        self.name = name
        self.give = give

    @abc.abstractmethod
    def view(self, array: Any) -> View:
        """The view of an array of this library."""

    @abc.abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        """An uninitialised array that :meth:`view` can read and ``[...] =`` can fill."""

    def stored_as(self, dtype: str) -> str:
        """What the library has an array of a dtype as: its bits, where it knows no such dtype."""
        return dtype

    def result(self, array: Any) -> Any:
        """What the caller gets for an array made by :meth:`empty`; it shares its memory."""
        return array if self.give is None else self.give(array)

    def current_stream(self, device: Device) -> int:
        """The raw handle of the library's current stream on a device; 0 on a CPU."""
        return 0

    def on(self, device: Device, stream: int) -> AbstractContextManager[Any]:
        """A context in which the library allocates and copies on a device's stream."""
        return contextlib.nullcontext()


def view(array: Any, stream: int | None = None) -> View:
    """The view of any array that the package accepts; nothing is copied.

    Args:
        array: NumPy, torch (CPU, CUDA, ROCm), CuPy, JAX, or any object with ``__dlpack__``; results
            go back through its ``__array_namespace__``, or as NumPy's or CuPy's if it has none.
        stream: the raw stream that a DLPack exchange on a GPU is ordered on; None for CuPy's.

    Raises:
        InvalidInput: it is no array, or one in a layout or on a device that no kernel can read.
        BackendUnavailable: it lies on a GPU, and CuPy, which is needed to read it, is missing.
    """
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(array, torch.Tensor):
        seen = TORCH.view(array)
    elif cupy is not None and isinstance(array, cupy.ndarray):
        seen = CUPY.view(array)
    elif isinstance(array, np.ndarray):
        seen = NUMPY.view(array)
    elif hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        seen = _through_dlpack(array, stream)
    else:
        raise InvalidInput(
            f"a {type(array).__name__} is no array: pass one of NumPy, CuPy, torch, JAX or DLPack"
        )
    if not seen.address and 0 not in seen.shape:
        raise InvalidInput(f"a {type(array).__name__} without memory: pass one that holds data")
    if seen.address % seen.element_bytes and 0 not in seen.shape:
        raise InvalidInput(
            f"the array's address is not a multiple of its element's {seen.element_bytes} bytes: "
            "pass a copy of it"
        )
    return seen


def contiguous(seen: View) -> View:
    """A view of a fresh contiguous copy, made by the array's own library."""
    copy = seen.library.empty(seen.shape, seen.dtype, seen.device)
    if seen.library is TORCH:
        copy[...] = seen.owner
    else:  # as bits: a copy needs no arithmetic on bfloat16
        bits = f"u{seen.element_bytes}"
        copy.view(bits)[...] = seen.owner.view(bits)
    return seen.library.view(copy)


def overlap(one: View, other: View) -> bool:
    """Whether two views on the same device share a byte, by NumPy's exact solver."""
    (first, end), (other_first, other_end) = _span(one), _span(other)
    if end <= other_first or other_end <= first:
        return False
    return bool(np.shares_memory(np.asarray(_Extent(one)), np.asarray(_Extent(other))))


def _span(seen: View) -> tuple[int, int]:
    """The address of a view's first byte, and the one after its last."""
    below = above = 0
    for size, stride in zip(seen.shape, seen.strides, strict=True):
        if stride < 0:
            below += stride * (size - 1)
        else:
            above += stride * (size - 1)
    each = seen.element_bytes
    return seen.address + below * each, seen.address + (above + 1) * each


class _Extent:
    """A view's addresses for NumPy's bookkeeping; the memory itself is never touched."""

    def __init__(self, seen: View) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (seen.address, True),
            "shape": seen.shape,
            "strides": tuple(stride * seen.element_bytes for stride in seen.strides),
            "typestr": f"|V{seen.element_bytes}",
        }


def mark_written(seen: View) -> None:
    """Tell torch's autograd that a tensor was written in place, so that a stale use is an error."""
    if seen.library is TORCH:
        sys.modules["torch"].autograd.graph.increment_version(seen.owner)


# ---- streams -------------------------------------------------------------------------------------


def raw_stream(stream: Any) -> int:
    """The raw handle of a stream given as an int, a torch or CuPy stream, or ``__cuda_stream__``.

    Raises:
        InvalidInput: it is none of these.
    """
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "cuda_stream"):
        return int(stream.cuda_stream)
    if hasattr(stream, "ptr"):
        return int(stream.ptr)
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    raise InvalidInput(
        f"stream is a {type(stream).__name__}: pass a torch or CuPy stream, an object with "
        "__cuda_stream__, or the raw handle as an int (0 is the default stream)"
    )


def work_stream(x: View, handle: int | None) -> int:
    """The raw stream for work on x: the one asked for, else the current one of x's library.

    Raises:
        InvalidInput: a CPU has no streams, or it is a handle that HIP does not know (1 and 2 are
            CUDA's names for its default streams).
    """
    if handle is None:
        return x.library.current_stream(x.device)
    if x.device.kind == "cpu":
        raise InvalidInput("stream= is for GPU arrays, and x is in host memory: leave it out")
    if handle < 0 or (x.device.kind == "rocm" and handle in (1, 2)):
        raise InvalidInput(f"{handle} is no stream of {x.device}: 0 is the default stream")
    return handle


def wait(device: Device, waiting: int, finishing: int) -> None:
    """Let one stream wait for all that another was given so far; the host does not wait."""
    cuda = _cupy().cuda
    with cuda.Device(device.index):
        event = cuda.Event(disable_timing=True)
        event.record(RawStream(finishing))
        cuda.runtime.streamWaitEvent(waiting, event.ptr)


# ---- libraries -----------------------------------------------------------------------------------

CPU = Device("cpu")
_gpu = functools.cache(Device)


class _NumPy(Library):
    def view(self, array: np.ndarray) -> View:
        address = array.__array_interface__["data"][0]
        return _strided(array, address, CPU, array.flags.writeable, self)

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        own = np.dtype(dtype)  # ml_dtypes' too
        if self.give is None:
            return np.empty(shape, own)
        size_bytes = math.prod(shape) * own.itemsize
        room = np.empty(size_bytes + XLA_ALIGNMENT_BYTES, np.uint8)
        start = -room.ctypes.data % XLA_ALIGNMENT_BYTES
        return room[start : start + size_bytes].view(own).reshape(shape)


class _Cupy(Library):
    def view(self, array: Any) -> View:
        kind: Gpu = "rocm" if _cupy().cuda.runtime.is_hip else "cuda"
        return _strided(array, array.data.ptr, _gpu(kind, array.device.id), True, self)

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        return _cupy().empty(shape, np.dtype(self.stored_as(dtype)))

    def stored_as(self, dtype: str) -> str:
        return "uint8" if dtype in LARGEST_FP8 else dtype

    def current_stream(self, device: Device) -> int:
        return int(_cupy().cuda.get_current_stream(device.index).ptr)

    @contextlib.contextmanager
    def on(self, device: Device, stream: int) -> Any:
        cuda = _cupy().cuda
        with cuda.Device(device.index):
            if cuda.get_current_stream().ptr == stream:
                yield
            else:
                with cuda.Stream.from_external(RawStream(stream)):
                    yield


class _Torch(Library):
    def view(self, array: Any) -> View:
        torch = sys.modules["torch"]
        if array.layout != torch.strided or array.device.type not in ("cpu", "cuda"):
            raise InvalidInput(
                f"a {array.layout} tensor on {array.device} cannot be read: pass a dense one on a "
                "CPU or GPU (.to_dense(), .to(...))"
            )
        tensor = array.resolve_neg()  # a negated view's memory holds the opposite sign
        if array.requires_grad:
            tensor = tensor.detach()
        return View(
            address=tensor.data_ptr(),
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
            dtype=str(tensor.dtype).removeprefix("torch."),
            element_bytes=tensor.element_size(),
            device=torch_device(tensor.device),
            writable=tensor is array,  # else: under autograd, or negated on the way
            library=self,
            owner=tensor,
        )

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        torch = sys.modules["torch"]
        where = "cpu" if device.kind == "cpu" else f"cuda:{device.index}"
        return torch.empty(shape, dtype=getattr(torch, dtype), device=where)

    def current_stream(self, device: Device) -> int:
        if device.kind == "cpu":
            return 0
        return int(sys.modules["torch"].cuda.current_stream(device.index).cuda_stream)

    def on(self, device: Device, stream: int) -> AbstractContextManager[Any]:
        if stream == self.current_stream(device):
            return contextlib.nullcontext()
        cuda = sys.modules["torch"].cuda
        external = cuda.ExternalStream(stream, device=f"cuda:{device.index}")
        context: AbstractContextManager[Any] = cuda.stream(external)
        return context


def torch_device(device: Any) -> Device:
    """The device that torch means; its "cuda" is ROCm's name too."""
    gpu: Gpu = "rocm" if sys.modules["torch"].version.hip else "cuda"
    return CPU if device.type == "cpu" else _gpu(gpu, device.index)


NUMPY, CUPY, TORCH = _NumPy("numpy"), _Cupy("cupy"), _Torch("torch")


def _strided(array: Any, address: int, device: Device, writable: bool, library: Library) -> View:
    element_bytes = array.itemsize or 1  # an empty string's itemsize is 0
    if any(stride % element_bytes for stride in array.strides):
        raise InvalidInput(
            f"the array's strides {array.strides} are no multiples of its element's "
            f"{element_bytes} bytes: pass a copy of it"
        )
    return View(
        address=address,
        shape=array.shape,
        strides=tuple(stride // element_bytes for stride in array.strides),
        dtype=str(array.dtype),  # .name would hide a foreign byte order
        element_bytes=element_bytes,
        device=device,
        writable=writable and library.give is None,
        library=library,
        owner=array,
    )


def _through_dlpack(array: Any, stream: int | None) -> View:
    kind, index = (int(number) for number in array.__dlpack_device__())
    name = type(array).__module__.partition(".")[0]
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(array, jax.Array):
        name = "jax"
        if kind in DLPACK_CPU:  # NumPy's DLPack knows no bfloat16; these two do, and alias
            put = functools.partial(jax.device_put, device=min(array.devices()), may_alias=True)
            return _NumPy(name, put).view(np.asarray(array))
    has_namespace = hasattr(array, "__array_namespace__")
    give = array.__array_namespace__().from_dlpack if has_namespace else lambda made: made
    if kind in DLPACK_CPU:
        try:
            return _NumPy(name, give).view(np.from_dlpack(array))
        except (BufferError, RuntimeError) as error:
            raise InvalidInput(
                f"NumPy cannot read this {name} array ({error}); for bfloat16 pass a NumPy array "
                "of ml_dtypes.bfloat16 or a torch tensor"
            ) from error
    if kind not in DLPACK_GPU:
        raise InvalidInput(f"a {name} array on DLPack device type {kind}: pass one on a CPU or GPU")
    device = _gpu(DLPACK_GPU[kind], index)
    if (reason := why_unavailable(device.kind)) is not None:
        raise BackendUnavailable(reason)
    library = _Cupy(name, give)
    # CuPy lets the stream wait for the array's producer
    with library.on(device, library.current_stream(device) if stream is None else stream):
        return library.view(_cupy().from_dlpack(array))


def _cupy() -> Any:
    import cupy

    return cupy

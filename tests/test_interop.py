"""Views of arrays, and how results go back: no kernel runs here."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rmsnorm_raw import interop
from rmsnorm_raw.errors import BackendUnavailable, InvalidInput
from rmsnorm_raw.interop import CUPY, NUMPY, TORCH, Device, View, view
from rmsnorm_raw.strides import collapse

torch = pytest.importorskip("torch", reason="torch is not installed")
fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")

CPU = Device("cpu")
DTYPES = ["float16", "bfloat16", "float32"]


def gpu_view(kind: str = "cuda") -> View:
    """A view of memory on a GPU that is not there; nothing reads it."""
    return View(4096, (2, 2), (2, 1), "float32", 4, Device(kind), True, CUPY, None)  # type: ignore[arg-type]


# ---- views ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_and_torch_are_seen_alike(dtype: str) -> None:
    host = np.arange(24, dtype=np.float32).astype(np.dtype(dtype)).reshape(2, 3, 4)
    tensor = torch.arange(24).to(getattr(torch, dtype)).reshape(2, 3, 4)
    for seen, address, library in (
        (view(host[:, ::2, 1:]), host.ctypes.data, NUMPY),
        (view(tensor[:, ::2, 1:]), tensor.data_ptr(), TORCH),
    ):
        size = seen.element_bytes
        assert (seen.address, seen.shape) == (address + size, (2, 2, 3))
        assert (seen.strides, seen.dtype, seen.device) == ((12, 8, 1), dtype, CPU)
        assert size == (4 if dtype == "float32" else 2)
        assert seen.writable
        assert seen.library is library


def test_a_view_keeps_the_memory_alive() -> None:
    seen = view(np.full(1000, 7, np.float32))
    assert sys.getrefcount(seen.owner) > 1
    assert seen.owner.ctypes.data == seen.address


def test_read_only_and_grad_requiring_arrays_are_not_writable() -> None:
    locked = np.ones(3, np.float32)
    locked.flags.writeable = False
    assert not view(locked).writable
    leaf = torch.ones(3, requires_grad=True)
    assert not view(leaf).writable
    assert view(leaf).address == leaf.data_ptr()


def test_a_negated_torch_view_is_resolved() -> None:
    """imag of a conjugate: its memory holds the opposite sign until it is resolved."""
    tensor = torch.complex(torch.ones(4, 1), torch.full((4, 1), 3.0)).conj().imag
    assert tensor.is_neg()
    assert view(tensor).owner.is_neg() is False
    assert not view(tensor).writable  # the copy would be written in its place
    assert view(tensor).owner.tolist() == [[-3.0]] * 4


def freed() -> torch.Tensor:
    tensor = torch.ones(4, 8)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    with fake_tensor.FakeTensorMode():
        return torch.ones(4, 8)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (freed(), "a Tensor without memory"),
        (fake(), "a FakeTensor without memory"),
        ([1.0, 2.0], "list is no array"),
        (3.0, "float is no array"),
        (torch.ones(3, 3).to_sparse(), "to_dense"),
        (torch.ones(3, device="meta"), "on meta"),
        (np.zeros(4, [("a", "f4"), ("b", "i1")])["a"], "copy"),
        (np.zeros(17, np.uint8)[1:].view(np.float32), "copy"),
    ],
)
def test_what_no_kernel_can_read_is_refused(array: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        view(array)


def test_a_foreign_byte_order_is_not_taken_for_a_native_one() -> None:
    assert view(np.ones(3, ">f4")).dtype == ">f4"


class Producer:
    """Speaks DLPack and nothing else."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **wishes: Any) -> Any:
        return self.array.__dlpack__(**wishes)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class WithNamespace(Producer):
    def __array_namespace__(self) -> Any:
        class Namespace:
            from_dlpack = staticmethod(lambda array: ("theirs", array))

        return Namespace


def test_any_dlpack_producer_is_viewed_in_place() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    seen = view(Producer(array))
    assert (seen.address, seen.shape, seen.strides) == (array.ctypes.data, (2, 3), (3, 1))
    made = seen.library.empty((2,), "float32", CPU)
    assert seen.library.result(made) is made


def test_a_producers_memory_lives_as_long_as_the_view() -> None:
    freed: list[str] = []

    class Memory(np.ndarray):
        """An array that says when it goes."""

    def seen_alone() -> View:
        array = np.full((2, 3), 7, np.float32).view(Memory)
        weakref.finalize(array, freed.append, "freed")
        return view(Producer(array))

    seen = seen_alone()
    gc.collect()
    assert freed == []
    assert (ctypes.c_float * 6).from_address(seen.address)[:] == [7] * 6
    del seen
    gc.collect()
    assert freed == ["freed"]


def test_results_go_back_through_the_producers_namespace() -> None:
    seen = view(WithNamespace(np.ones(3, np.float32)))
    made = seen.library.empty((2,), "float32", CPU)
    assert seen.library.result(made) == ("theirs", made)
    assert not seen.writable


def test_bfloat16_that_numpy_cannot_import_names_the_package() -> None:
    with pytest.raises(InvalidInput, match="ml_dtypes"):
        view(Producer(torch.ones(3, dtype=torch.bfloat16)))


def test_a_gpu_array_without_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interop, "why_unavailable", lambda name: f"install CuPy for {name}")
    with pytest.raises(BackendUnavailable, match="install CuPy for cuda"):
        view(Producer(np.ones(3), device=(2, 0)))
    with pytest.raises(BackendUnavailable, match="install CuPy for rocm"):
        view(Producer(np.ones(3), device=(10, 1)))


def test_other_dlpack_devices_are_refused() -> None:
    with pytest.raises(InvalidInput, match="DLPack device type 8"):
        view(Producer(np.ones(3), device=(8, 0)))


# ---- JAX -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_arrays_go_in_and_out_without_a_copy(dtype: str) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    array = jax.numpy.arange(6, dtype=dtype).reshape(2, 3)
    seen = view(array)
    assert seen.address == array.unsafe_buffer_pointer()
    assert (seen.shape, seen.strides, seen.dtype) == ((2, 3), (3, 1), dtype)
    assert (seen.library.name, seen.writable) == ("jax", False)
    made = seen.library.empty((5, 3), dtype, CPU)
    made[...] = 7
    result = seen.library.result(made)
    assert isinstance(result, jax.Array)
    assert (result.shape, result.dtype.name) == ((5, 3), dtype)
    assert result.unsafe_buffer_pointer() == made.ctypes.data
    assert (result == 7).all()


def test_a_traced_jax_array_is_refused() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    with pytest.raises(InvalidInput, match="Tracer is no array"):
        jax.jit(view)(jax.numpy.ones(3))


# ---- copies, overlap, autograd -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_contiguous_copies_the_bits(dtype: str) -> None:
    host = np.random.default_rng(0).standard_normal((4, 6, 5)).astype(np.dtype(dtype))
    tensor = torch.randn(4, 6, 5).to(getattr(torch, dtype)).requires_grad_()
    for array in (host.transpose(1, 2, 0), tensor.permute(1, 2, 0), tensor[..., 2]):
        copy = interop.contiguous(view(array))
        assert collapse(copy.shape, copy.strides) is not None
        assert copy.address != view(array).address
        assert type(copy.owner) is type(array)
        assert (copy.owner == array).all()
        assert not getattr(copy.owner, "requires_grad", False)


def test_overlap_is_exact() -> None:
    buffer = np.zeros((8, 12), np.float32)
    left, right, bottom = view(buffer[:, :6]), view(buffer[:, 6:]), view(buffer[4:])
    assert not interop.overlap(left, right)  # interleaved, and apart
    assert interop.overlap(left, bottom)
    assert interop.overlap(left, left)
    assert not interop.overlap(left, view(np.zeros((8, 6), np.float32)))
    assert not interop.overlap(view(buffer[:0]), left)


def test_overlap_never_touches_the_memory() -> None:
    one = gpu_view()
    assert interop.overlap(one, one)


def test_autograd_learns_of_a_write() -> None:
    a = torch.ones(3, requires_grad=True)
    saved = torch.ones(3)
    product = a * saved
    interop.mark_written(view(saved))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# ---- streams -------------------------------------------------------------------------------------


class TorchLike:
    cuda_stream = 70


class CupyLike:
    ptr = 71


class ProtocolLike:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 72


@pytest.mark.parametrize(
    ("stream", "handle"),
    [(0, 0), (69, 69), (TorchLike(), 70), (CupyLike(), 71), (ProtocolLike(), 72)],
)
def test_streams_of_all_kinds(stream: Any, handle: int) -> None:
    assert interop.raw_stream(stream) == handle
    assert interop.work_stream(gpu_view(), interop.raw_stream(stream)) == handle


def test_what_is_no_stream_is_refused() -> None:
    with pytest.raises(InvalidInput, match="stream is a str"):
        interop.raw_stream("default")
    with pytest.raises(InvalidInput, match="-1 is no stream"):
        interop.work_stream(gpu_view(), -1)


@pytest.mark.parametrize("handle", [1, 2])
def test_cudas_names_for_default_streams_are_errors_on_rocm(handle: int) -> None:
    with pytest.raises(InvalidInput, match=f"{handle} is no stream of rocm:0"):
        interop.work_stream(gpu_view("rocm"), handle)
    assert interop.work_stream(gpu_view("cuda"), handle) == handle


def test_a_cpu_has_no_streams() -> None:
    seen = view(np.ones(3, np.float32))
    assert interop.work_stream(seen, None) == 0
    with pytest.raises(InvalidInput, match="host memory"):
        interop.work_stream(seen, 0)


def test_bfloat16_is_ml_dtypes() -> None:
    assert view(np.ones(3, ml_dtypes.bfloat16)).dtype == "bfloat16"

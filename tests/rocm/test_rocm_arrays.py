"""The operations on arrays on the device: CuPy's, another library's through DLPack, and streams.

Nothing happens on the stand-in before somebody waits for it. A hand-over that is missing is
therefore wrong every time, and each test of one also runs with it taken out.
"""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gfx950_stand_in import StandIn, require_stand_in

from rmsnorm_raw import array, bounds, interop
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.ops import Forward, rmsnorm_bwd, rmsnorm_fwd

require_stand_in()

Array = np.ndarray
ROCM, CHAIN = 10, 64  # kDLROCM of dlpack.h; more than the longest chain of these rows


def randn(*shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    return array.randn(shape, dtype, seed=seed, backend="rocm")


def bits(made: Any) -> Array:
    host = np.ascontiguousarray(array.to_numpy(made))
    return host.view(f"u{host.itemsize}")


def check_forward(result: Forward, x: Array, weight: Array | None = None) -> None:
    rows = x.astype(np.float64).reshape(-1, x.shape[-1])
    scale = np.ones(x.shape[-1]) if weight is None else weight.astype(np.float64)
    y, rstd = bounds.reference_forward(rows, scale, 1e-6)
    for output, got, want in (("y", result.y, y), ("rstd", result.rstd, rstd[None])):
        factor = bounds.bound_factor(output, CHAIN)
        stored = bits(got).reshape(want.shape)
        worst = bounds.worst_of(stored, want, np.abs(want), factor, str(got.dtype))
        assert worst.ratio <= 1, (output, worst)


class Foreign:
    """An array of another library for AMD's GPUs, as far as DLPack shows it.

    Attributes:
        own: the stream on which that library works on it.
        asked: the streams on which it was asked for.
    """

    def __init__(self, held: Any, own: Any = None) -> None:
        self.held, self.own = held, own or contextlib.nullcontext()
        self.asked: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.held.__dlpack_device__()
        return int(kind), index

    def __dlpack__(self, stream: Any = None, **how: Any) -> Any:
        self.asked.append(stream)
        with self.own:  # CuPy lets the stream wait for the one that is current
            return self.held.__dlpack__(stream=stream, **how)

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda made: Foreign(made, self.own))


# ---- CuPy's arrays -------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_dtype", ["float16", "bfloat16", "float32", None])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_both_operations_on_cupys_arrays(
    cupy: Any, stand_in: StandIn, dtype: str, weight_dtype: str | None
) -> None:
    x, dout = randn(2, 19, 768, dtype=dtype), randn(2, 19, 768, dtype=dtype, seed=1)
    weight = None if weight_dtype is None else randn(768, dtype=weight_dtype, seed=2)
    forward = rmsnorm_fwd(x, weight)
    backward = rmsnorm_bwd(dout, x, weight, forward.rstd)
    assert not stand_in.ran, "a call waited for the device"
    hosts = [None if each is None else array.to_numpy(each) for each in (dout, x, weight)]
    check_forward(forward, hosts[1], hosts[2])
    rstd = array.to_numpy(forward.rstd)
    for got, want in zip(backward, rmsnorm_bwd(*hosts, rstd), strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert isinstance(got, cupy.ndarray)
            apart = array.to_numpy(got).astype("f8") - want.astype("f8")
            # the persistent grids differ, so dweight's sums are taken in another order
            assert np.abs(apart).max() <= 2**-7 * np.abs(want.astype("f8")).max()
    assert stand_in.ran[0].args[0] == x.data.ptr, "x was copied on the way"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_layouts_that_are_read_in_place(cupy: Any, stand_in: StandIn, dtype: str) -> None:
    """Sliced, misaligned by one element, one row, one row repeated."""
    flat = randn(8 * 8 * 400 + 1, dtype=dtype)
    whole, odd = flat[:-1].reshape(8, 8, 400), flat[1:].reshape(8, 8, 400)
    repeated = cupy.broadcast_to(whole[0, 0], (5, 400))
    for x in (whole[:, :, 100:228], whole[:, 0], odd, whole[3, 4], repeated):
        stand_in.ran.clear()
        result = rmsnorm_fwd(x)
        assert result.y.shape == x.shape
        host = np.lib.stride_tricks.as_strided(
            bits(flat)[(x.data.ptr - flat.data.ptr) // x.itemsize :], x.shape, x.strides
        )
        check_forward(result, host.view(array.numpy_dtype(dtype)))
        assert stand_in.ran[0].args[0] == x.data.ptr


def test_forward_in_place(stand_in: StandIn) -> None:
    x = randn(9, 768, dtype="bfloat16")
    expected = bits(rmsnorm_fwd(x).y)
    assert rmsnorm_fwd(x, out=x).y is x
    assert np.array_equal(bits(x), expected)


@pytest.mark.parametrize("slug", ["b256-t128-v16-reg", "b64-v16-2p", "b256-t256-v16-lds3-p1"])
def test_a_config_by_its_slug(stand_in: StandIn, slug: str) -> None:
    x = randn(9, 2048, dtype="bfloat16")
    check_forward(rmsnorm_fwd(x, config=slug), array.to_numpy(x))
    assert stand_in.ran[0].block == int(slug[1:].partition("-")[0])


def test_arrays_on_the_host_are_refused_beside_it() -> None:
    x = randn(4, 64)
    with pytest.raises(InvalidInput, match="weight is on cpu and x on rocm:0"):
        rmsnorm_fwd(x, np.ones(64, np.float32))
    with pytest.raises(InvalidInput, match="out is on cpu"):
        rmsnorm_fwd(x, out=np.ones((4, 64), np.float32))


@pytest.mark.parametrize("handle", [1, 2, -1])
def test_cudas_names_for_streams_are_refused(handle: int) -> None:
    with pytest.raises(InvalidInput, match="no stream of rocm:0"):
        rmsnorm_fwd(randn(4, 64), stream=handle)


# ---- DLPack --------------------------------------------------------------------------------------


class DlTensor(ctypes.Structure):
    """The head of DLManagedTensor of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
    )  # fmt: skip


def exported(made: Any) -> DlTensor:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    capsule = made.__dlpack__()
    return DlTensor.from_buffer_copy(
        ctypes.string_at(pointer(capsule, b"dltensor"), ctypes.sizeof(DlTensor))
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dlpack_in_and_out_is_kdlrocm(stand_in: StandIn, dtype: str) -> None:
    x, weight = randn(2, 9, 768, dtype=dtype), randn(768, seed=2)
    theirs = Foreign(x)
    assert theirs.__dlpack_device__() == (ROCM, 0)
    forward = rmsnorm_fwd(theirs, Foreign(weight))
    dx, dweight = rmsnorm_bwd(theirs, theirs, Foreign(weight), forward.rstd)
    for made in (*forward, dx, dweight):
        assert isinstance(made, Foreign)
        out = exported(made.held)
        assert (out.device_type, out.device_id) == (ROCM, 0)
        assert out.data == made.held.data.ptr
    ours = rmsnorm_fwd(x, weight)
    for one, other in zip(forward, ours, strict=True):
        assert np.array_equal(bits(one.held), bits(other))
    assert stand_in.ran[0].args[0] == x.data.ptr, "x was copied on the way"


def test_without_a_namespace_results_are_cupys(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Foreign, "__array_namespace__")
    x = randn(4, 768)
    result = rmsnorm_fwd(Foreign(x))
    assert isinstance(result.y, cupy.ndarray)
    check_forward(result, array.to_numpy(x))


def test_a_producer_is_asked_for_a_stream_that_hip_has(cupy: Any, side: Any) -> None:
    """1 and 2 are CUDA's: on ROCm CuPy and torch refuse them."""
    theirs = Foreign(randn(4, 768))
    rmsnorm_fwd(theirs)
    with side:
        rmsnorm_fwd(theirs)
    rmsnorm_fwd(theirs, stream=side)
    assert theirs.asked == [0, side.ptr, side.ptr]


# ---- streams -------------------------------------------------------------------------------------


def enqueue_copy(cupy: Any, stream: Any, target: Any, origin: Any) -> None:
    runtime = cupy.cuda.runtime
    kind = runtime.memcpyDeviceToDevice
    runtime.memcpyAsync(target.data.ptr, origin.data.ptr, origin.nbytes, kind, stream.ptr)


@pytest.fixture
def filled(cupy: Any) -> Any:
    made = randn(16, 768, seed=3)
    cupy.cuda.runtime.deviceSynchronize()
    return made


@pytest.fixture
def zeros(cupy: Any) -> Any:
    made = array.zeros((16, 768), backend="rocm")
    cupy.cuda.runtime.deviceSynchronize()
    return made


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library with its hand-over taken out."""
    monkeypatch.setattr(interop, "wait", lambda *_: None)


def test_the_current_stream_is_the_one_used(
    cupy: Any, side: Any, filled: Any, zeros: Any, stand_in: StandIn
) -> None:
    with side:
        enqueue_copy(cupy, side, zeros, filled)
        forward = rmsnorm_fwd(zeros)
        backward = rmsnorm_bwd(zeros, zeros, None, forward.rstd)
        assert not side.done, "a call waited for the producer"
    early = rmsnorm_fwd(zeros)  # on the default stream, which does not wait
    assert not bits(early.y).any(), "this shows that a missing hand-over would show"
    assert not side.done
    side.synchronize()
    check_forward(forward, array.to_numpy(filled))
    want = rmsnorm_bwd(filled, filled, None, forward.rstd)
    assert np.array_equal(bits(backward.dx), bits(want.dx))


@pytest.mark.parametrize("form", ["object", "handle", "protocol"])
def test_a_given_stream_is_the_one_used(
    cupy: Any, side: Any, filled: Any, zeros: Any, form: str
) -> None:
    """It has work before this one, so that y is not there until somebody waits for it."""
    out = cupy.zeros_like(zeros)
    cupy.cuda.runtime.deviceSynchronize()
    given = {"object": side, "handle": side.ptr, "protocol": interop.RawStream(side.ptr)}[form]
    enqueue_copy(cupy, side, zeros, filled)
    result = rmsnorm_fwd(zeros, out=out, stream=given)
    assert not bits(out).any()
    side.synchronize()
    check_forward(result, array.to_numpy(filled))


def test_the_default_stream_waits_for_an_ordinary_one(cupy: Any, filled: Any, zeros: Any) -> None:
    """As HIP's null stream does, so what is read there is all there."""
    ordinary = cupy.cuda.Stream()
    enqueue_copy(cupy, ordinary, zeros, filled)
    check_forward(rmsnorm_fwd(zeros), array.to_numpy(filled))


def test_a_dlpack_producer_is_waited_for(
    cupy: Any, side: Any, filled: Any, zeros: Any, stand_in: StandIn
) -> None:
    """Its last write is on its own stream when we are given the array."""
    enqueue_copy(cupy, side, zeros, filled)
    theirs = Foreign(zeros, own=side)
    with cupy.cuda.Stream(non_blocking=True) as work:
        result = rmsnorm_fwd(theirs)
        assert not stand_in.ran, "the host waited"
        assert not side.done
    work.synchronize()
    check_forward(Forward(*(made.held for made in result)), array.to_numpy(filled))


def test_a_producer_that_hands_nothing_over_would_be_seen(
    cupy: Any, side: Any, filled: Any, zeros: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Foreign, "__dlpack__", lambda self, **_: self.held.__dlpack__(stream=-1))
    enqueue_copy(cupy, side, zeros, filled)
    with cupy.cuda.Stream(non_blocking=True) as work:
        result = rmsnorm_fwd(Foreign(zeros, own=side))
    work.synchronize()
    assert not bits(result.y.held).any()


class Lent:
    """A weight of CuPy's, current on ``lender``, for an x of another library on ``work``."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.lender, self.work = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        self.x, self.filled = randn(16, 768), randn(768, seed=5)
        self.weight = array.zeros(768, backend="rocm")
        cupy.cuda.runtime.deviceSynchronize()

    def forward(self) -> Forward:
        """The weight is written before the call, and overwritten after it, on the lender."""
        enqueue_copy(self.cupy, self.lender, self.weight, self.filled)
        with self.lender:
            result = rmsnorm_fwd(Foreign(self.x), self.weight, stream=self.work)
            self.cupy.cuda.runtime.memsetAsync(
                self.weight.data.ptr, 0, self.weight.nbytes, self.lender.ptr
            )
        return Forward(*(made.held for made in result))


@pytest.fixture
def lent(cupy: Any) -> Lent:
    return Lent(cupy)


def test_a_weight_is_waited_for(lent: Lent, stand_in: StandIn) -> None:
    result = lent.forward()
    assert not stand_in.ran, "the host waited"
    lent.work.synchronize()
    check_forward(result, array.to_numpy(lent.x), array.to_numpy(lent.filled))


def test_a_weight_is_given_back_when_it_was_read(lent: Lent) -> None:
    """What its library does next on its own stream comes after our work on another."""
    result = lent.forward()
    lent.lender.synchronize()
    assert not bits(lent.weight).any()
    lent.work.synchronize()
    check_forward(result, array.to_numpy(lent.x), array.to_numpy(lent.filled))


@pytest.mark.parametrize("first", ["work", "lender"])
def test_without_the_wait_the_weight_is_not_there(lent: Lent, no_wait: None, first: str) -> None:
    result = lent.forward()
    getattr(lent, first).synchronize()
    lent.work.synchronize()
    assert not array.to_numpy(result.y).any()


@pytest.fixture
def two_streams(cupy: Any) -> list[Any]:
    return [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]


@pytest.mark.parametrize("slug", [None, "b256-t256-v16-reg-p2-fl"])
def test_calls_on_two_streams_share_no_scratch(
    rocm: Backend, cupy: Any, two_streams: list[Any], stand_in: StandIn, slug: str | None
) -> None:
    """Worked off in the other order than they were given."""
    work = [randn(30, 2048, dtype="bfloat16", seed=k) for k in range(2)]
    weight = randn(2048, seed=9)
    wanted = [rmsnorm_bwd(x, x, weight, config=slug) for x in work]
    cupy.cuda.runtime.deviceSynchronize()
    stand_in.ran.clear()
    got: list[list[Any]] = [[], []]
    for _ in range(2):
        for k, stream in enumerate(two_streams):
            with stream:
                got[k].append(rmsnorm_bwd(work[k], work[k], weight, config=slug))
    for stream in reversed(two_streams):
        stream.synchronize()
    for want, results in zip(wanted, got, strict=True):
        for result in results:
            assert np.array_equal(bits(result.dx), bits(want.dx))
            assert np.array_equal(bits(result.dweight), bits(want.dweight))


def test_scratch_is_not_given_away_while_it_is_used(cupy: Any, side: Any) -> None:
    """It is free again when the call returns, and the work on it has not begun."""
    x, weight = randn(30, 2048, dtype="bfloat16"), randn(2048, seed=9)
    config = "b256-t256-v16-reg-p2"
    want = rmsnorm_bwd(x, x, weight, config=config)
    cupy.cuda.runtime.deviceSynchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    got = rmsnorm_bwd(x, x, weight, config=config, stream=side)
    later = [cupy.empty(2048, "u1") for _ in range(64)]  # what is free is taken in pieces
    for each in later:
        cupy.cuda.runtime.memsetAsync(each.data.ptr, 0x55, each.nbytes, 0)
    cupy.cuda.get_current_stream().synchronize()
    assert not side.done
    side.synchronize()
    assert all((array.to_numpy(each) == 0x55).all() for each in later)
    assert np.array_equal(bits(got.dweight), bits(want.dweight))

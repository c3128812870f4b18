"""The operations and the array layer on a GPU: every library, every layout, every stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rmsnorm_raw import array, bounds, interop, launch
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.launch import Tensor
from rmsnorm_raw.ops import Forward, rmsnorm_bwd, rmsnorm_fwd

pytestmark = pytest.mark.gpu

Array = np.ndarray
DTYPES = ["float16", "bfloat16", "float32"]
CHAIN = 64
#: some 0.2 s on an H200: the host is long done with a call before it ends
SPIN_TICKS = 400_000_000
SPIN = r"""
extern "C" __global__ void spin(long long ticks) {
  const long long start = clock64();
  while (clock64() - start < ticks) {}
}
"""


@pytest.fixture
def cupy(gpu: Backend) -> Any:
    import cupy

    return cupy


@pytest.fixture
def torch(gpu: Backend) -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this torch is built for CPUs")
    return torch


def spin(cupy: Any, stream: Any) -> None:
    cupy.RawKernel(SPIN, "spin")((1,), (1,), (np.int64(SPIN_TICKS),), stream=stream)


def bits(made: Any) -> Array:
    if not hasattr(made, "get"):  # torch
        import cupy

        made = cupy.from_dlpack(made)
    host = array.to_numpy(made)
    return np.ascontiguousarray(host).view(f"u{host.itemsize}")


def check_forward(result: Forward, x: Array, weight: Array) -> None:
    y, rstd = bounds.reference_forward(
        x.astype(np.float64).reshape(-1, x.shape[-1]), weight.astype(np.float64), 1e-6
    )
    for output, got, want in (("y", result.y, y), ("rstd", result.rstd, rstd[None])):
        factor = bounds.bound_factor(output, CHAIN)
        dtype = str(got.dtype).removeprefix("torch.")
        stored = bits(got).reshape(want.shape)
        worst = bounds.worst_of(stored, want, np.abs(want), factor, dtype)
        assert worst.ratio <= 1, (output, worst)


# ---- arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_array_layer_gives_the_same_bits_as_on_a_cpu(gpu: Backend, dtype: str) -> None:
    made = array.randn((5, 40), dtype, seed=3, backend=gpu.name)
    assert np.array_equal(bits(made), bits_of(array.randn((5, 40), dtype, seed=3, backend="cpu")))
    assert not bits(array.zeros((5, 40), dtype, backend=gpu.name)).any()
    assert array.empty((5, 40), dtype, backend=gpu.name).shape == (5, 40)
    assert array.to_numpy(made).dtype == made.dtype


def bits_of(host: Array) -> Array:
    return host.view(f"u{host.itemsize}")


def inputs(gpu: Backend, dtype: str, weight_dtype: str) -> tuple[Any, Any, Any]:
    x = array.randn((2, 37, 768), dtype, seed=0, backend=gpu.name)
    dout = array.randn((2, 37, 768), dtype, seed=1, backend=gpu.name)
    return x, dout, array.randn(768, weight_dtype, seed=2, backend=gpu.name)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float32", "float32"),
    ],
)
def test_cupy_torch_and_jax_get_the_same_right_bits(
    gpu: Backend, torch: Any, dtype: str, weight_dtype: str
) -> None:
    x, dout, weight = inputs(gpu, dtype, weight_dtype)
    forward = rmsnorm_fwd(x, weight)
    check_forward(forward, array.to_numpy(x), array.to_numpy(weight))
    expected = [*forward, *rmsnorm_bwd(dout, x, weight, forward.rstd)]
    assert {type(made).__module__.partition(".")[0] for made in expected} == {"cupy"}
    a, d, w = (torch.from_dlpack(each) for each in (x, dout, weight))
    theirs = rmsnorm_fwd(a, w)
    got = [*theirs, *rmsnorm_bwd(d, a, w, theirs.rstd)]
    assert {type(made).__module__.partition(".")[0] for made in got} == {"torch"}
    assert {made.device for made in got} == {a.device}
    for one, other in zip(got, expected, strict=True):
        assert np.array_equal(bits(one), bits(other))


def test_jax_arrays_come_back_as_jax_arrays(gpu: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes most of the GPU
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() not in ("gpu", "cuda", "rocm"):
        pytest.skip("this JAX is built for CPUs")
    host = array.randn((37, 768), "bfloat16", seed=0, backend="cpu")
    x, weight = jax.numpy.asarray(host), jax.numpy.ones(768, "float32")
    forward = rmsnorm_fwd(x, weight)
    backward = rmsnorm_bwd(x, x, weight, forward.rstd)
    for made in (*forward, *backward):
        assert isinstance(made, jax.Array)
        assert made.devices() == x.devices()
    expected = rmsnorm_fwd(array.asarray(host, "bfloat16", backend=gpu.name), weight)
    assert np.array_equal(bits_of(np.asarray(forward.y)), bits(expected.y))


def test_nothing_is_copied_on_the_way(
    gpu: Backend, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Tensor]] = []
    make_plan = launch.make_plan
    monkeypatch.setattr(
        launch, "make_plan", lambda p, c, b, t: seen.append(dict(t)) or make_plan(p, c, b, t)
    )
    x, dout, weight = inputs(gpu, "bfloat16", "float32")
    a, d = torch.from_dlpack(x), torch.from_dlpack(dout)
    assert a.data_ptr() == x.data.ptr
    forward = rmsnorm_fwd(a, weight)
    backward = rmsnorm_bwd(d, x, weight, forward.rstd)
    assert seen[0] == {
        "x": Tensor(x.data.ptr, 768),
        "weight": Tensor(weight.data.ptr),
        "y": Tensor(forward.y.data_ptr(), 768),
        "rstd": Tensor(forward.rstd.data_ptr()),
    }
    assert seen[1]["dout"] == Tensor(dout.data.ptr, 768)
    assert seen[1]["dx"] == Tensor(backward.dx.data.ptr, 768)
    assert seen[1]["dweight"] == Tensor(backward.dweight.data.ptr)


def test_results_share_memory_with_their_dlpack_source(gpu: Backend, torch: Any) -> None:
    buffer = array.zeros((4, 64), backend=gpu.name)
    result = rmsnorm_fwd(torch.ones(4, 64, device="cuda"), out=torch.from_dlpack(buffer))
    torch.cuda.synchronize()
    assert np.array_equal(bits(buffer), bits(result.y))
    assert float(buffer[0, 0]) > 0.9


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_layouts(gpu: Backend, torch: Any, dtype: str) -> None:
    """Sliced, transposed, misaligned, expanded; torch sees the same memory."""
    flat = array.randn(64 * 400 + 1, dtype, seed=4, backend=gpu.name)
    whole = flat[:-1].reshape(8, 8, 400)
    odd = flat[1:].reshape(8, 8, 400)
    for x in (whole[:, :, 100:228], whole[:, :3], whole.transpose(2, 0, 1), odd, whole[3, 4]):
        result = rmsnorm_fwd(x)
        assert tuple(result.y.shape) == x.shape
        check_forward(result, array.to_numpy(x), np.ones(x.shape[-1]))
        theirs = rmsnorm_fwd(torch.from_dlpack(flat).as_strided(*placed(x, flat)))
        assert np.array_equal(bits(theirs.y), bits(result.y))
    dout = torch.ones((), device="cuda", dtype=getattr(torch, dtype)).expand(8, 8, 400)
    a = torch.from_dlpack(whole)
    got, want = rmsnorm_bwd(dout, a), rmsnorm_bwd(dout.contiguous(), a)
    assert np.array_equal(bits(got.dx), bits(want.dx))


def placed(x: Any, flat: Any) -> tuple[Any, Any, int]:
    offset = (x.data.ptr - flat.data.ptr) // x.itemsize
    return x.shape, tuple(stride // x.itemsize for stride in x.strides), offset


@pytest.mark.parametrize("config", [None, "b64-v16-2p"])
def test_forward_in_place(gpu: Backend, config: str | None) -> None:
    x, _, weight = inputs(gpu, "bfloat16", "float32")
    expected = bits(rmsnorm_fwd(x, weight, config=config).y)
    assert rmsnorm_fwd(x, weight, out=x, config=config).y is x
    assert np.array_equal(bits(x), expected)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_nothing_to_do(gpu: Backend, torch: Any, shape: tuple[int, ...]) -> None:
    for x in (array.zeros(shape, backend=gpu.name), torch.zeros(shape, device="cuda")):
        weight = x.sum(0)
        y, rstd = rmsnorm_fwd(x, weight, eps=0.25)
        dx, dweight = rmsnorm_bwd(x, x, weight, rstd)
        assert (tuple(y.shape), tuple(dx.shape)) == (shape, shape)
        assert (rstd == 2).all()
        assert (dweight == 0).all()


def test_arrays_on_different_devices_are_refused(gpu: Backend) -> None:
    x, _, weight = inputs(gpu, "float32", "float32")
    with pytest.raises(InvalidInput, match=f"weight is on cpu and x on {gpu.name}:0"):
        rmsnorm_fwd(x, array.to_numpy(weight))
    with pytest.raises(InvalidInput, match="out is on cpu"):
        rmsnorm_fwd(x, weight, out=array.to_numpy(x))


# ---- streams -------------------------------------------------------------------------------------


def test_a_torch_side_stream_is_honoured(torch: Any) -> None:
    filled, weight = torch.randn(64, 1024, device="cuda"), torch.randn(1024, device="cuda")
    expected = rmsnorm_fwd(filled, weight).y.cpu()
    x = torch.zeros_like(filled)
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN_TICKS)
        x.copy_(filled)
        result = rmsnorm_fwd(x, weight)
        assert not side.query(), "the call waited for the producer"
    early = rmsnorm_fwd(x, weight, stream=other)
    other.synchronize()
    assert not side.query()
    assert (early.y == 0).all(), "another stream was to run ahead of the producer"
    side.synchronize()
    assert torch.equal(result.y.cpu(), expected)


def test_a_cupy_stream_is_honoured(gpu: Backend, cupy: Any) -> None:
    filled, _, weight = inputs(gpu, "float32", "float32")
    expected = bits(rmsnorm_fwd(filled, weight).y)
    x = cupy.zeros_like(filled)
    side = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with side:
        spin(cupy, side)
        x[...] = filled
        result = rmsnorm_fwd(x, weight)
        backward = rmsnorm_bwd(x, x, weight, result.rstd)
        assert not side.done, "a call waited for the producer"
    side.synchronize()
    assert np.array_equal(bits(result.y), expected)
    want = rmsnorm_bwd(filled, filled, weight, result.rstd)
    assert np.array_equal(bits(backward.dweight), bits(want.dweight))


@pytest.mark.parametrize("form", ["object", "handle", "foreign"])
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_given_stream_is_the_one_used(
    gpu: Backend, cupy: Any, torch: Any, library: str, form: str
) -> None:
    """Behind a slow kernel on a stream that no other one waits for, y is not there yet."""
    x, _, weight = inputs(gpu, "float32", "float32")
    expected = bits(rmsnorm_fwd(x, weight).y)
    out = cupy.zeros_like(x)
    own = torch.cuda.Stream() if library == "torch" else cupy.cuda.Stream(non_blocking=True)
    handle = interop.raw_stream(own)
    given = {"object": own, "handle": handle, "foreign": interop.RawStream(handle)}[form]
    move = torch.from_dlpack if library == "torch" else lambda each: each
    arguments = move(x), move(weight), move(out)
    torch.cuda.synchronize()
    spin(cupy, interop.RawStream(handle))
    result = rmsnorm_fwd(*arguments[:2], out=arguments[2], stream=given)
    with cupy.cuda.Stream(non_blocking=True):
        assert not out.get().any()
    cupy.cuda.runtime.streamSynchronize(handle)
    assert np.array_equal(bits(out), expected)
    check_forward(result, array.to_numpy(x), array.to_numpy(weight))


def test_a_weight_of_another_library_is_waited_for(gpu: Backend, cupy: Any, torch: Any) -> None:
    x = torch.randn(64, 768, device="cuda")
    filled = array.randn(768, seed=5, backend=gpu.name)
    expected = rmsnorm_fwd(x, filled).y.cpu()
    weight = cupy.zeros_like(filled)
    side, work = cupy.cuda.Stream(non_blocking=True), torch.cuda.Stream()
    torch.cuda.synchronize()
    with side, torch.cuda.stream(work):
        spin(cupy, side)
        weight[...] = filled
        result = rmsnorm_fwd(x, weight)
        assert not work.query(), "the host waited"
    work.synchronize()
    assert torch.equal(result.y.cpu(), expected)

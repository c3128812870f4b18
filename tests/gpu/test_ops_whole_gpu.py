"""The whole operation on arrays of a GPU: right, in place, and without an allocation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from whole_formula import check_backward, check_forward

import rmsnorm_raw as rr
from rmsnorm_raw import array
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.ops import rmsnorm_bwd, rmsnorm_fwd

pytestmark = pytest.mark.gpu

Array = np.ndarray
RESULTS = ("y", "rstd", "residual_out", "scale", "dx", "dweight", "dbias", "dresidual")
ROWS, COLS = 67, 1536


@pytest.fixture
def torch(gpu: Backend) -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this torch is built for CPUs")
    return torch


@pytest.fixture(params=["cupy", "torch"])
def make(request: pytest.FixtureRequest, gpu: Backend) -> Any:
    """Random arrays of a library, the same numbers in each."""

    def cupys(*shape: int, dtype: str = "bfloat16", seed: int = 0) -> Any:
        return array.randn(shape, dtype, seed=seed, backend=gpu.name)

    if request.param == "cupy":
        return cupys
    torch = request.getfixturevalue("torch")
    return lambda *shape, **how: torch.from_dlpack(cupys(*shape, **how))


def host(made: Any) -> Any:
    if made is None:
        return None
    if not hasattr(made, "get"):  # torch
        torch = __import__("torch")
        name = str(made.dtype).removeprefix("torch.")
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[made.element_size()]
        return made.contiguous().view(bits).cpu().numpy().view(np.dtype(name))
    found = made.get()
    return found.view("float8_e4m3fn") if found.dtype == np.uint8 else found


def on_host(result: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: host(getattr(result, name, None)) for name in RESULTS})


def test_all_at_once_in_both_directions(make: Any) -> None:
    x, dout = make(ROWS, COLS), make(ROWS, COLS, dtype="float16", seed=1)
    residual, bias = make(ROWS, COLS, dtype="float32", seed=2), make(COLS, dtype="float16", seed=3)
    weight = make(COLS, dtype="float32", seed=4)
    made = rmsnorm_fwd(
        x, weight, bias=bias, residual=residual, weight_offset=0.5, casting="llama",
        out_dtype="float16",
    )  # fmt: skip
    check_forward(
        on_host(made), host(x), host(weight), bias=host(bias), residual=host(residual),
        weight_offset=0.5, casting="llama",
    )  # fmt: skip
    back = rmsnorm_bwd(
        dout, made.residual_out, weight, made.rstd, dresidual_out=residual, need_dbias=True,
        bias_dtype="float16", dx_dtype="bfloat16", residual_dtype="float32", weight_offset=0.5,
    )  # fmt: skip
    check_backward(
        on_host(back), host(dout), host(made.residual_out), host(weight), rstd=host(made.rstd),
        dresidual_out=host(residual), weight_offset=0.5,
    )  # fmt: skip
    again = rmsnorm_bwd(dout, made.residual_out, weight, made.rstd, need_dbias=True)
    for _ in range(3):
        more = rmsnorm_bwd(dout, made.residual_out, weight, made.rstd, need_dbias=True)
        assert host(more.dbias).tobytes() == host(again.dbias).tobytes()
        assert host(more.dweight).tobytes() == host(again.dweight).tobytes()


@pytest.mark.parametrize("per_head", [True, False])
def test_heads_of_a_packed_qkv(make: Any, per_head: bool) -> None:
    qkv, grads = make(ROWS, 48, 128), make(ROWS, 48, 128, seed=1)
    for first, heads in ((0, 32), (32, 8)):
        cut = np.s_[:, first : first + heads]
        weight = make(*((heads, 128) if per_head else (128,)), dtype="float32", seed=2)
        made = rmsnorm_fwd(qkv[cut], weight)
        check_forward(on_host(made), host(qkv)[cut], host(weight))
        back = rmsnorm_bwd(grads[cut], qkv[cut], weight, made.rstd)
        check_backward(
            on_host(back), host(grads)[cut], host(qkv)[cut], host(weight), rstd=host(made.rstd)
        )


@pytest.mark.parametrize("residual", [True, False])
def test_an_8_bit_y(make: Any, residual: bool) -> None:
    x, weight = make(ROWS, COLS), make(COLS, dtype="float32", seed=1)
    beside = make(ROWS, COLS, seed=2) if residual else None
    made = rmsnorm_fwd(x, weight, residual=beside, out_dtype="fp8", scale="dynamic")
    check_forward(on_host(made), host(x), host(weight), residual=host(beside))
    for scale in (0.0078125, abs(make(1, dtype="float32", seed=3))):
        number = scale if isinstance(scale, float) else float(host(scale)[0])
        made = rmsnorm_fwd(x, weight, residual=beside, out_dtype="fp8", scale=scale)
        check_forward(on_host(made), host(x), host(weight), residual=host(beside), scale=number)


@pytest.mark.parametrize("config", [None, "b256-v16-2p"])
def test_residual_in_place(make: Any, config: str | None) -> None:
    x, residual = make(ROWS, COLS), make(ROWS, COLS, seed=1)
    want = rmsnorm_fwd(x, residual=residual, config=config)
    made = rmsnorm_fwd(x, residual=residual, residual_out=residual, config=config)
    assert made.residual_out is residual
    for one, other in zip((*made, residual), (*want, want.residual_out), strict=True):
        assert host(one).tobytes() == host(other).tobytes()


def test_no_allocation_with_all_memory_given(torch: Any, gpu: Backend) -> None:
    """Neither torch's allocator nor CuPy's pool is asked, and a graph's capture goes the same."""
    import cupy

    def empty(*shape: int, dtype: str = "bfloat16") -> Any:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")

    x, residual, dout = (torch.randn(ROWS, COLS, device="cuda").bfloat16() for _ in range(3))
    weight, bias = (torch.randn(COLS, device="cuda") for _ in range(2))
    forward = {
        "out": empty(ROWS, COLS, dtype="float8_e4m3fn"), "rstd_out": empty(ROWS, dtype="float32"),
        "residual_out": empty(ROWS, COLS), "scale_out": empty(ROWS, dtype="float32"),
    }  # fmt: skip
    backward = {
        "dx": empty(ROWS, COLS), "dweight": empty(COLS, dtype="float32"),
        "dbias": empty(COLS, dtype="float32"), "dresidual": empty(ROWS, COLS, dtype="float32"),
    }  # fmt: skip
    problem = rr.Problem.backward(
        ROWS, COLS, "bf16", weight_dtype="fp32", bias_dtype="fp32", dresidual_out_dtype="bf16",
        residual_dtype="fp32",
    )  # fmt: skip
    backward["workspace"] = empty(rr.workspace_bytes(problem), dtype="uint8")

    def call() -> None:
        rmsnorm_fwd(
            x, weight, bias=bias, residual=residual, out_dtype="fp8", scale="dynamic", **forward
        )
        rmsnorm_bwd(
            dout, forward["residual_out"], weight, forward["rstd_out"], dresidual_out=residual,
            **backward,
        )  # fmt: skip

    call()  # builds
    torch.cuda.synchronize()
    kept = {name: host(each).tobytes() for name, each in (forward | backward).items()}
    asked: list[int] = []

    def malloc(size_bytes: int) -> Any:
        asked.append(size_bytes)
        return cupy.cuda.alloc(size_bytes)

    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with cupy.cuda.using_allocator(malloc):
        call()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert asked == []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for each in (*forward.values(), *backward.values()):
        each.view(torch.uint8).fill_(0x5A)
    graph.replay()
    torch.cuda.synchronize()
    del kept["workspace"]
    for name, bytes_ in kept.items():
        assert host((forward | backward)[name]).tobytes() == bytes_, name

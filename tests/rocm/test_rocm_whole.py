"""The whole operation on CuPy's arrays on the device: what stands beside x and the weight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gfx950_stand_in import StandIn, require_stand_in
from whole_formula import check_backward, check_forward

import rmsnorm_raw as rr
from rmsnorm_raw import array
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.ops import Backward, Forward, rmsnorm_bwd, rmsnorm_fwd

require_stand_in()

Array = np.ndarray
RESULTS = ("y", "rstd", "residual_out", "scale", "dx", "dweight", "dbias", "dresidual")


def randn(*shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    return array.randn(shape, dtype, seed=seed, backend="rocm")


def hosts(**arrays: Any) -> dict[str, Array]:
    return {name: array.to_numpy(each) for name, each in arrays.items() if each is not None}


def on_host(result: Forward | Backward) -> SimpleNamespace:
    """The result in NumPy's arrays, bytes of an 8-bit y as what they stand for."""
    found = {name: getattr(result, name, None) for name in RESULTS}
    found = {n: None if each is None else array.to_numpy(each) for n, each in found.items()}
    if found["y"] is not None and found["y"].dtype == np.uint8:
        found["y"] = found["y"].view("float8_e4m3fn")
    return SimpleNamespace(**found)


def test_all_at_once_in_both_directions(cupy: Any, stand_in: StandIn) -> None:
    x, dout = randn(19, 768, dtype="bfloat16"), randn(19, 768, dtype="float16", seed=1)
    beside = {"residual": randn(19, 768, seed=2), "bias": randn(768, dtype="float16", seed=3)}
    weight = randn(768, seed=4)
    numbers = {"weight_offset": 0.5, "casting": "llama"}
    made = rmsnorm_fwd(x, weight, out_dtype="float16", **beside, **numbers)
    back = rmsnorm_bwd(
        dout, made.residual_out, weight, made.rstd, dresidual_out=beside["residual"],
        need_dbias=True, bias_dtype="float16", dx_dtype="bfloat16", residual_dtype="float32",
        weight_offset=0.5,
    )  # fmt: skip
    assert not stand_in.ran, "a call waited for the device"
    found = on_host(made)
    check_forward(found, *hosts(x=x, weight=weight).values(), **hosts(**beside), **numbers)
    check_backward(
        on_host(back), *hosts(dout=dout, x=made.residual_out, weight=weight).values(),
        rstd=found.rstd, dresidual_out=array.to_numpy(beside["residual"]), weight_offset=0.5,
    )  # fmt: skip
    kinds = {
        name: str(each.dtype) for name, each in vars(on_host(back)).items() if each is not None
    }
    assert kinds == {
        "dx": "bfloat16", "dweight": "float32", "dbias": "float16", "dresidual": "float32",
    }  # fmt: skip
    assert isinstance(back.dresidual, cupy.ndarray)


@pytest.mark.parametrize("per_head", [True, False])
def test_heads_of_a_packed_array_are_read_where_they_are(per_head: bool, stand_in: StandIn) -> None:
    qkv, grads = (randn(5, 12, 128, dtype="bfloat16", seed=n) for n in (0, 1))
    weight = randn(*((4, 128) if per_head else (128,)), seed=2)
    x, dout = qkv[:, 4:8], grads[:, 4:8]
    made = rmsnorm_fwd(x, weight)
    back = rmsnorm_bwd(dout, x, weight, made.rstd, need_dbias=True)
    arrays = {"dout": array.to_numpy(grads)[:, 4:8], "x": array.to_numpy(qkv)[:, 4:8]}
    w = array.to_numpy(weight)
    check_forward(on_host(made), arrays["x"], w)
    check_backward(on_host(back), *arrays.values(), w, rstd=array.to_numpy(made.rstd))
    assert stand_in.ran[0].args[0] == x.data.ptr, "x was copied on the way"


@pytest.mark.parametrize("scale", ["dynamic", "static"])
def test_an_8_bit_y_is_bytes(cupy: Any, scale: str) -> None:
    x, weight = randn(9, 768, dtype="bfloat16"), randn(768, seed=1)
    given: Any = "dynamic" if scale == "dynamic" else cupy.asarray(np.full(1, 0.25, np.float32))
    made = rmsnorm_fwd(x, weight, out_dtype="fp8", scale=given)
    assert made.y.dtype == np.uint8
    out = cupy.empty(x.shape, np.uint8)
    again = rmsnorm_fwd(x, weight, out_dtype="float8_e4m3fn", scale=given, out=out)
    assert again.y is out
    number = None if scale == "dynamic" else 0.25
    for result in (made, again):
        found = on_host(result)
        check_forward(found, *hosts(x=x, weight=weight).values(), scale=number)
    with pytest.raises(InvalidInput, match=r"out is bfloat16 .* must be float8_e4m3fn"):
        rmsnorm_fwd(x, weight, out_dtype="fp8", scale=given, out=cupy.empty_like(x))


def test_residual_in_place_with_all_memory_given(cupy: Any, stand_in: StandIn) -> None:
    """CuPy's pool hands out nothing, in either direction."""
    x, residual = randn(9, 768, dtype="bfloat16"), randn(9, 768, dtype="bfloat16", seed=1)
    weight, dout = randn(768, seed=2), randn(9, 768, dtype="bfloat16", seed=3)
    before = array.to_numpy(residual).copy()
    want = rmsnorm_fwd(x, weight, residual=residual)
    want_back = rmsnorm_bwd(dout, x, weight, want.rstd)
    y, dx = (array.empty(x.shape, "bfloat16", backend="rocm") for _ in range(2))
    rstd, dweight = (array.empty(n, "float32", backend="rocm") for n in (9, 768))
    problem = rr.Problem.backward(9, 768, "bf16", weight_dtype="fp32")
    size = rr.workspace_bytes(problem, backend="rocm")
    workspace = array.empty(size // 4, "float32", backend="rocm")
    handed_out: list[int] = []

    def malloc(size_bytes: int) -> Any:
        handed_out.append(size_bytes)
        return cupy.cuda.alloc(size_bytes)

    with cupy.cuda.using_allocator(malloc):
        made = rmsnorm_fwd(
            x, weight, residual=residual, residual_out=residual, out=y, rstd_out=rstd
        )
        back = rmsnorm_bwd(dout, x, weight, rstd, dx=dx, dweight=dweight, workspace=workspace)
    assert handed_out == []
    assert made.residual_out is residual
    check_forward(on_host(made), *hosts(x=x, weight=weight).values(), residual=before)
    for one, other in (
        (made.y, want.y),
        (back.dx, want_back.dx),
        (back.dweight, want_back.dweight),
    ):
        assert array.to_numpy(one).tobytes() == array.to_numpy(other).tobytes()

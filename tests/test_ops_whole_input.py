"""Input of the whole operation that is refused, and input with no elements: nothing is launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from library_arrays import LIBRARIES, host, into, library_of, normal

from rmsnorm_raw import interop
from rmsnorm_raw.errors import InvalidConfig, InvalidInput
from rmsnorm_raw.ops import rmsnorm_bwd, rmsnorm_fwd

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.usefixtures("no_launch")

Array = np.ndarray
X, W, H = normal(4, 64), normal(64), normal(6, 4, 64)
FP8 = {"out_dtype": "fp8"}


def of(*shape: int, dtype: str = "float32") -> Array:
    return np.empty(shape, np.dtype(dtype))


def read_only(*shape: int) -> Array:
    array = of(*shape)
    array.flags.writeable = False
    return array


FORWARD: list[tuple[str, dict[str, Any], str]] = [
    ("bias float64", {"bias": W.astype(np.float64)}, "bias is float64, which no kernel takes"),
    ("bias too short", {"bias": W[:63]}, r"bias has shape \(63,\) and must have \(64,\), as the w"),
    ("bias alone", {"weight": None, "bias": W[:63]}, r"must have \(64,\), as rows of x do"),
    ("bias a number", {"bias": 1.0}, "float is no array"),
    ("bias of one for all heads", {"x": H, "weight": of(4, 64), "bias": W}, r"have \(4, 64\), as"),
    ("bias for each head alone", {"x": H, "weight": None, "bias": of(4, 64)}, r"have \(64,\)"),
    ("residual shape", {"residual": X[:3]}, r"residual is float32 \(3, 64\) and must be like x"),
    ("residual flat", {"residual": X.reshape(-1)}, r"residual is float32 \(256,\)"),
    ("residual int8", {"residual": X.astype(np.int8)}, "residual is int8, which no kernel takes"),
    ("heads that x has not", {"x": H, "weight": of(3, 64)}, r"\(3, 64\) .* or \(4, 64\), one for"),
    ("heads of other rows", {"weight": of(3, 64)}, r"weight has shape \(3, 64\)"),
    ("heads 3-D", {"x": H, "weight": of(6, 4, 64)}, r"weight has shape \(6, 4, 64\)"),
    ("wide heads", {"x": of(2, 2, 5000), "weight": of(2, 5000)}, "heads of 5000 elements"),
    ("offset too large", {"weight_offset": 10**400}, "weight_offset is a number that no float"),
    ("eps too large", {"eps": 10**400}, "eps is a number that no float can hold"),
    ("scale too large", FP8 | {"scale": 10**400}, "scale is a number that no float can hold"),
    ("offset a word", {"weight_offset": "1"}, "weight_offset is '1': pass a number"),
    ("offset NaN", {"weight_offset": float("nan")}, "weight_offset is nan: it must be finite"),
    ("offset inf", {"weight_offset": float("inf")}, "weight_offset is inf"),
    ("offset without a weight", {"weight": None, "weight_offset": 1.0}, "there is none"),
    ("casting", {"casting": "mistral"}, "casting is 'mistral': use 'none', 'llama' or 'gemma'"),
    ("out_dtype", {"out_dtype": "float64"}, "dtype 'float64' is not supported.*y may also be"),
    ("residual_dtype", {"residual": X, "residual_dtype": "int8"}, "dtype 'int8' is not supported"),
    ("residual_dtype fp8", {"residual": X, "residual_dtype": "float8_e4m3fn"}, "not supported"),
    ("fp8 without a scale", FP8, "out_dtype is float8_e4m3fn and scale is 'none'"),
    ("a scale without fp8", {"scale": 1.0}, "out_dtype is float32 and scale is 'static'"),
    ("dynamic without fp8", {"scale": "dynamic"}, "out_dtype is float32 and scale is 'dynamic'"),
    ("scale a word", FP8 | {"scale": "static"}, "scale is 'static': pass 'dynamic'"),
    ("scale 0", FP8 | {"scale": 0.0}, "scale is 0.0: y is divided by it"),
    ("scale < 0", FP8 | {"scale": -1}, "scale is -1: y is divided by it"),
    ("scale NaN", FP8 | {"scale": float("nan")}, "scale is nan"),
    ("scale inf", FP8 | {"scale": float("inf")}, "scale is inf"),
    ("scale tiny", FP8 | {"scale": 1e-39}, "scale is 1e-39"),
    ("scale a bool", FP8 | {"scale": True}, "scale is True"),
    ("scales", FP8 | {"scale": of(2)}, r"scale is float32 \(2,\): pass 'dynamic'"),
    ("scale float64", FP8 | {"scale": of(1, dtype="float64")}, r"scale is float64 \(1,\)"),
    ("e5m2", {"out_dtype": "float8_e5m2", "scale": 1.0}, "float8_e5m2' is not supported"),
    ("out of x's dtype", {"out_dtype": "bf16", "out": of(4, 64)}, "out is float32 .* be bfloat16"),
    ("out of another", {"out": of(4, 64, dtype="bfloat16")}, "out is bfloat16 .* be float32"),
    ("out as bits", FP8 | {"scale": 1.0, "out": of(4, 64, dtype="uint8")}, "out is uint8"),
    ("rstd_out shape", {"rstd_out": of(4, 1)}, r"rstd_out is float32 \(4, 1\) and must be float32"),
    ("rstd_out dtype", {"rstd_out": of(4, dtype="float64")}, "rstd_out is float64"),
    ("rstd_out strided", {"rstd_out": of(8)[::2]}, "rstd_out is not contiguous"),
    ("rstd_out unwanted", {"rstd_out": of(4), "store_rstd": False}, "rstd_out is given, and for"),
    ("scale_out unwanted", {"scale_out": of(4)}, "scale_out is given, and forward"),
    ("scale_out static", FP8 | {"scale": 1.0, "scale_out": of(4)}, "scale_out is given, and forw"),
    ("residual_out alone", {"residual_out": of(4, 64)}, "residual_out is given, and forward"),
    ("residual_out dtype", {"residual": X, "residual_out": of(4, 64, dtype="float16")},
     "residual_out is float16 .* must be float32"),
    ("residual_out shape", {"residual": X, "residual_out": of(4, 65)}, r"residual_out is .*65\)"),
    ("residual_out read-only", {"residual": X, "residual_out": read_only(4, 64)},
     "residual_out cannot be written"),
    ("residual_out repeated", {"residual": X, "residual_out": torch.empty(64).expand(4, 64)},
     r"residual_out has strides \(0, 1\)"),
    ("out of heads, repeated",
     {"x": H, "weight": of(4, 64), "out": torch.empty(6, 1, 64).expand(6, 4, 64)}, "has strides"),
    ("out of heads, one in another",
     {"x": H, "weight": of(4, 64), "out": torch.empty(900).as_strided((6, 4, 64), (96, 64, 1))},
     "has strides"),
]  # fmt: skip

BACKWARD: list[tuple[str, dict[str, Any], str]] = [
    ("dresidual_out shape", {"dresidual_out": X[:3]}, r"dresidual_out is float32 \(3, 64\)"),
    ("dresidual_out dtype", {"dresidual_out": X.astype(np.int32)}, "dresidual_out is int32, which"),
    ("dout fp8", {"dout": X.astype("float8_e4m3fn")}, "dout is float8_e4m3fn, which no kernel"),
    ("heads that x has not", {"x": H, "dout": H, "weight": of(3, 64)}, r"or \(4, 64\), one for"),
    ("offset without a weight", {"weight": None, "weight_offset": 1.0}, "there is none"),
    ("offset None", {"weight_offset": None}, "weight_offset is None: pass a number"),
    ("dx_dtype", {"dx_dtype": "float64"}, "dtype 'float64' is not supported"),
    ("bias_dtype", {"need_dbias": True, "bias_dtype": "int8"}, "dtype 'int8' is not supported"),
    ("residual_dtype", {"residual_dtype": "fp8"}, "dtype 'fp8' is not supported"),
    ("dx dtype", {"dx": of(4, 64, dtype="bfloat16")}, "dx is bfloat16 .* must be float32"),
    ("dx shape", {"dx": of(64, 4)}, r"dx is float32 \(64, 4\) and must be float32 \(4, 64\)"),
    ("dx unwanted", {"dx": of(4, 64), "need_dx": False}, "dx is given, and backward"),
    ("dx read-only", {"dx": read_only(4, 64)}, "dx cannot be written"),
    ("dweight dtype", {"dweight": of(64, dtype="float16")}, "dweight is float16"),
    ("dweight shape", {"dweight": of(1, 64)}, r"dweight is float32 \(1, 64\)"),
    ("dweight strided", {"dweight": of(128)[::2]}, "dweight is not contiguous"),
    ("dweight unwanted", {"dweight": of(64), "need_dweight": False}, "dweight is given, and back"),
    ("dweight without a weight", {"dweight": of(64), "weight": None}, "dweight is given, and back"),
    ("dbias shape", {"dbias": of(63)}, r"dbias is float32 \(63,\) and must be float32 \(64,\)"),
    ("dbias float64", {"dbias": of(64, dtype="float64")}, "dtype 'float64' is not supported"),
    ("dbias dtype", {"dbias": of(64), "bias_dtype": "fp16"}, "dbias is float32 .* must be float16"),
    ("dresidual unwanted", {"dresidual": of(4, 64), "need_dx": False}, "dresidual is given, and"),
    ("dresidual shape", {"dresidual": of(4, 63)}, r"dresidual is float32 \(4, 63\)"),
    ("dresidual dtype", {"dresidual": of(4, 64), "residual_dtype": "bf16"}, "must be bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words"), [pytest.param(*case[1:], id=case[0]) for case in FORWARD]
)
def test_bad_input_of_the_forward(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        rmsnorm_fwd(**({"x": X, "weight": W} | given))


@pytest.mark.parametrize(
    ("given", "words"), [pytest.param(*case[1:], id=case[0]) for case in BACKWARD]
)
def test_bad_input_of_the_backward(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        rmsnorm_bwd(**({"dout": X, "x": X, "weight": W} | given))


@pytest.mark.parametrize("name", ["weight", "bias", "residual", "scale", "out", "workspace"])
def test_an_array_of_another_device_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = {"weight": W, "bias": W, "residual": X, "scale": of(1), "out": of(4, 64)}
    elsewhere["workspace"] = of(64)
    view = interop.view

    def placed(array: Any, stream: Any = None) -> interop.View:
        seen = view(array, stream)
        return seen._replace(device=interop.Device("cuda", 1)) if array is there else seen

    there = elsewhere[name].copy()
    monkeypatch.setattr(interop, "view", placed)
    with pytest.raises(InvalidInput, match=f"{name} is on cuda:1 and x on cpu: move one"):
        rmsnorm_fwd(X, **({"weight": W} | {name: there} | (FP8 if name == "scale" else {})))


def test_the_8_bit_float_of_another_device_is_refused() -> None:
    with pytest.raises(
        InvalidConfig, match="gfx950 converts to float8_e4m3fn, not float8_e4m3fnuz"
    ):
        rmsnorm_fwd(X, out_dtype="float8_e4m3fnuz", scale="dynamic")


@pytest.mark.parametrize("name", ["residual_out", "rstd_out", "out"])
def test_jax_arrays_cannot_be_written(name: str) -> None:
    array = into("jax", X if name != "rstd_out" else X[:, 0])
    with pytest.raises(InvalidInput, match=f"{name} cannot be written"):
        rmsnorm_fwd(X, residual=X, **{name: array})


# ---- no rows, no columns -------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("shape", "per_head"),
    [
        ((0, 8), False), ((3, 0), False), ((0, 0), False), ((0, 4, 8), False), ((0, 4, 8), True),
        ((3, 0, 8), False), ((3, 0, 8), True), ((3, 4, 0), False), ((3, 4, 0), True),
    ],
)  # fmt: skip
def test_nothing_to_do(library: str, shape: tuple[int, ...], per_head: bool) -> None:
    lists = shape[-2:] if per_head else shape[-1:]
    x, residual = (into(library, np.zeros(shape, np.dtype(d))) for d in ("bfloat16", "float32"))
    weight, bias = into(library, normal(*lists)), into(library, normal(*lists, dtype="float16"))
    made = rmsnorm_fwd(
        x, weight, bias=bias, residual=residual, out_dtype="fp8", scale="dynamic", eps=0.25,
        weight_offset=1.0,
    )  # fmt: skip
    back = rmsnorm_bwd(
        x, x, weight, made.rstd, dresidual_out=residual, need_dbias=True, bias_dtype="float16",
        residual_dtype="float32",
    )  # fmt: skip
    wide = [made.y, made.residual_out, back.dx, back.dresidual]
    assert [tuple(each.shape) for each in wide] == [shape] * 4
    assert [tuple(each.shape) for each in (made.rstd, made.scale)] == [shape[:-1]] * 2
    assert [tuple(each.shape) for each in (back.dweight, back.dbias)] == [lists] * 2
    everything = (*wide, made.rstd, made.scale, back.dweight, back.dbias)
    assert {library_of(each) for each in everything} == {library}
    assert [host(each).dtype.name for each in everything] == [
        "float8_e4m3fn", "float32", "bfloat16", "float32", "float32", "float32", "float32",
        "float16",
    ]  # fmt: skip
    assert (host(made.rstd) == 2).all()
    assert (host(made.scale) == 2.0**-100).all()
    assert (host(back.dweight) == 0).all()
    assert (host(back.dbias) == 0).all()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_results_that_are_given_are_filled_with_nothing_to_do(library: str) -> None:
    x, weight = into(library, np.zeros((0, 8), np.float32)), into(library, normal(8))
    dweight, dbias = into(library, normal(8)), into(library, normal(8, dtype="float16"))
    back = rmsnorm_bwd(x, x, weight, dweight=dweight, dbias=dbias)
    assert (back.dweight is dweight, back.dbias is dbias) == (True, True)
    assert (host(dweight) == 0).all()
    assert (host(dbias) == 0).all()
    rstd = into(library, np.zeros(3, np.float32))
    none = into(library, np.zeros((3, 0), np.float32))
    assert rmsnorm_fwd(none, rstd_out=rstd, eps=0.25).rstd is rstd
    assert (host(rstd) == 2).all()


def test_nothing_asked_for_is_nothing_launched() -> None:
    made = rmsnorm_bwd(X, X, W, need_dx=False, need_dweight=False, dresidual_out=X)
    assert (made.dx, made.dweight, made.dbias, made.dresidual) == (None,) * 4

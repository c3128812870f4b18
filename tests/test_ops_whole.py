"""The whole operation on CPU arrays of every library, in the simulator, against float64."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from library_arrays import LIBRARIES, address_of, bits, host, into, library_of, normal
from whole_formula import check_backward, check_forward

from rmsnorm_raw.launch import Tensor
from rmsnorm_raw.ops import Backward, Forward, rmsnorm_bwd, rmsnorm_fwd

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils._pytree import tree_map  # noqa: E402

Array = np.ndarray


def on_host(result: Forward | Backward) -> SimpleNamespace:
    """The same result in NumPy's arrays."""
    names = ("y", "rstd", "residual_out", "scale", "dx", "dweight", "dbias", "dresidual")
    found = {name: getattr(result, name, None) for name in names}
    return SimpleNamespace(
        **{name: None if each is None else host(each) for name, each in found.items()}
    )


# ---- values --------------------------------------------------------------------------------------

#: x's dtype, the weight's, what stands beside them, and numbers
FORWARDS: dict[str, tuple[str, str | None, dict[str, str], dict[str, Any]]] = {
    "bias": ("bfloat16", "float32", {"bias": "bfloat16"}, {}),
    "bias alone": ("float32", None, {"bias": "float16"}, {}),
    "residual": ("bfloat16", "bfloat16", {"residual": "bfloat16"}, {}),
    "fp32 residual": ("bfloat16", "float32", {"residual": "float32"}, {}),
    "residual_out in fp32": (
        "float16", None, {"residual": "float16"}, {"residual_dtype": "float32"},
    ),
    "x given in bf16": ("float32", "float32", {}, {"residual_dtype": "bfloat16"}),
    "offset": ("bfloat16", "bfloat16", {}, {"weight_offset": 1.0}),
    "gemma": ("float32", "float16", {}, {"weight_offset": 1.0, "casting": "gemma"}),
    "llama": ("bfloat16", "float32", {}, {"casting": "llama"}),
    "out in fp32": ("bfloat16", "bfloat16", {}, {"out_dtype": "float32"}),
    "out in fp16": ("float32", "float32", {}, {"out_dtype": "fp16"}),
    "all": (
        "bfloat16", "float16", {"bias": "float32", "residual": "float32"},
        {
            "weight_offset": 0.5, "casting": "llama", "out_dtype": "float16",
            "residual_dtype": "bf16",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", FORWARDS)
def test_forward(library: str, case: str) -> None:
    dtype, weight_dtype, beside, numbers = FORWARDS[case]
    x = normal(2, 9, 96, dtype=dtype)
    weight = normal(96, dtype=weight_dtype, seed=1) if weight_dtype else None
    shapes = {"bias": (96,), "residual": x.shape}
    arrays = {name: normal(*shapes[name], dtype=kind, seed=2) for name, kind in beside.items()}
    result = rmsnorm_fwd(
        into(library, x), None if weight is None else into(library, weight),
        **{name: into(library, each) for name, each in arrays.items()}, **numbers,
    )  # fmt: skip
    formula = {n: v for n, v in numbers.items() if n in ("weight_offset", "casting")}
    got = on_host(result)
    check_forward(got, x, weight, **arrays, **formula)
    out_dtype = {"fp16": "float16"}.get(numbers.get("out_dtype", dtype), numbers.get("out_dtype"))
    assert got.y.dtype == np.dtype(out_dtype or dtype)
    assert (got.residual_out is not None) == ("residual" in beside or "residual_dtype" in numbers)
    made = [each for each in (*result, result.residual_out) if each is not None]
    assert {library_of(each) for each in made} == {library}
    if got.residual_out is not None:
        kind = numbers.get("residual_dtype") or beside["residual"]
        assert got.residual_out.dtype == np.dtype({"bf16": "bfloat16"}.get(kind, kind))


#: x's dtype, the weight's, dout's, dresidual_out's, and what is asked for
BACKWARDS: dict[str, tuple[str, str | None, str, str | None, dict[str, Any]]] = {
    "dbias": ("bfloat16", "float32", "bfloat16", None, {"need_dbias": True}),
    "dbias of its own dtype": (
        "float32", None, "float32", None, {"need_dbias": True, "bias_dtype": "float16"},
    ),
    "dbias alone": (
        "bfloat16", "bfloat16", "bfloat16", None,
        {"need_dbias": True, "need_dx": False, "need_dweight": False},
    ),
    "dresidual_out": ("bfloat16", "bfloat16", "bfloat16", "bfloat16", {"residual_dtype": "bf16"}),
    "fp32 h": (
        "float32", "bfloat16", "bfloat16", "float32",
        {"dx_dtype": "bfloat16", "residual_dtype": "float32"},
    ),
    "dresidual without its out": (
        "bfloat16", None, "bfloat16", None, {"residual_dtype": "float32"},
    ),
    "offset": ("float16", "float16", "float16", None, {"weight_offset": 1.0}),
    "dout in fp32": ("bfloat16", "float32", "float32", None, {}),
    "all": (
        "float32", "float16", "bfloat16", "float16",
        {
            "need_dbias": True, "bias_dtype": "float32", "weight_offset": 0.5,
            "dx_dtype": "float16", "residual_dtype": "bfloat16",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", BACKWARDS)
def test_backward(library: str, case: str) -> None:
    dtype, weight_dtype, dout_dtype, beside_dtype, asked = BACKWARDS[case]
    x, dout = normal(2, 9, 96, dtype=dtype), normal(2, 9, 96, dtype=dout_dtype, seed=1)
    weight = normal(96, dtype=weight_dtype, seed=2) if weight_dtype else None
    beside = normal(*x.shape, dtype=beside_dtype, seed=3) if beside_dtype else None
    rstd = np.full((2, 9), 1.25, np.float32)  # not that of x, so that what is given is used
    result = rmsnorm_bwd(
        into(library, dout), into(library, x), None if weight is None else into(library, weight),
        into(library, rstd), dresidual_out=None if beside is None else into(library, beside),
        **asked,
    )  # fmt: skip
    got, offset = on_host(result), asked.get("weight_offset", 0.0)
    check_backward(got, dout, x, weight, rstd=rstd, dresidual_out=beside, weight_offset=offset)
    long = {"bf16": "bfloat16"}
    dx_dtype, residual_dtype = asked.get("dx_dtype", dtype), asked.get("residual_dtype")
    residual_dtype = long.get(residual_dtype, residual_dtype)
    dbias_dtype = asked.get("bias_dtype", weight_dtype or dtype)
    expected = {
        "dx": dx_dtype if asked.get("need_dx", True) else None,
        "dweight": weight_dtype if asked.get("need_dweight", True) else None,
        "dbias": dbias_dtype if "need_dbias" in asked else None,
        "dresidual": residual_dtype,
    }
    for name, kind in expected.items():
        made = getattr(got, name)
        assert (None if made is None else str(made.dtype)) == kind, name
        if made is not None:
            assert library_of(getattr(result, name)) == library
    assert (result.dresidual is result.dx) == (residual_dtype == expected["dx"])


def test_all_libraries_get_the_same_bits() -> None:
    x, residual, dout = (normal(5, 96, dtype="bfloat16", seed=n) for n in range(3))
    weight, bias = normal(96, seed=4), normal(96, seed=5)

    def run(library: str) -> list[bytes]:
        a, r, d, w, b = (into(library, each) for each in (x, residual, dout, weight, bias))
        forward = rmsnorm_fwd(a, w, bias=b, residual=r)
        back = rmsnorm_bwd(
            d, forward.residual_out, w, forward.rstd, dresidual_out=d, need_dbias=True
        )
        made = (*forward, forward.residual_out, *back, back.dbias)
        return [bits(each).tobytes() for each in made]

    expected = run("numpy")
    for library in LIBRARIES[1:]:
        assert run(library) == expected, library


def test_forward_and_backward_fit_together() -> None:
    """dx is the derivative of the sum of y * dout + residual_out * dresidual_out along x."""
    x, residual, dout, beside = (normal(3, 64, seed=n) for n in range(4))
    weight, step = normal(64, seed=4), 2.0**-8
    along = normal(3, 64, seed=5)

    def total(by: float) -> float:
        moved = (x + by * along).astype(np.float32)
        made = rmsnorm_fwd(moved, weight, residual=residual, weight_offset=1.0)
        y, h = made.y.astype(np.float64), made.residual_out.astype(np.float64)
        return float((y * dout).sum() + (h * beside).sum())

    made = rmsnorm_fwd(x, weight, residual=residual, weight_offset=1.0)
    back = rmsnorm_bwd(
        dout, made.residual_out, weight, made.rstd, dresidual_out=beside, weight_offset=1.0
    )
    slope = (total(step) - total(-step)) / (2 * step)
    assert float((back.dx.astype(np.float64) * along).sum()) == pytest.approx(slope, rel=1e-3)


# ---- results -------------------------------------------------------------------------------------


def test_results_unpack_as_they_always_have() -> None:
    x, weight = normal(3, 64), normal(64)
    made = rmsnorm_fwd(x, weight, residual=x)
    y, rstd = made
    assert (y is made.y, rstd is made.rstd) == (True, True)
    assert (made[0] is y, made[1] is rstd, made[-1] is rstd, len(made)) == (True, True, True, 2)
    back = rmsnorm_bwd(x, x, weight, need_dbias=True, residual_dtype="fp32")
    dx, dweight = back
    assert (dx is back.dx, dweight is back.dweight) == (True, True)
    assert (back[0] is dx, back[1] is dweight) == (True, True)
    assert (Forward(1, 2).residual_out, Forward(1, 2).scale) == (None, None)
    assert (Backward(1, 2).dbias, Backward(1, 2).dresidual) == (None, None)


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (Forward(*"abcd"), ("y", "rstd", "residual_out", "scale")),
        (Backward(*"abcd"), ("dx", "dweight", "dbias", "dresidual")),
    ],
    ids=["forward", "backward"],
)
@pytest.mark.parametrize(
    "rebuild",
    [
        copy.copy,
        copy.deepcopy,
        lambda result: pickle.loads(pickle.dumps(result)),
        lambda result: dataclasses.replace(result),
        lambda result: tree_map(lambda leaf: leaf, result),
    ],
    ids=["copy", "deepcopy", "pickle", "replace", "tree_map"],
)
def test_a_rebuilt_result_has_lost_nothing(
    rebuild: Callable[[Any], Any], result: Any, names: tuple[str, ...]
) -> None:
    made = rebuild(result)
    assert type(made) is type(result)
    assert [getattr(made, name) for name in names] == [*"abcd"]


def test_results_say_what_there_is() -> None:
    x, weight = normal(3, 64, dtype="bfloat16"), normal(64)
    assert repr(rmsnorm_fwd(x, weight, residual=x, out_dtype="fp8", scale="dynamic")) == (
        "Forward(y=<numpy float8_e4m3fn (3, 64)>, rstd=<numpy float32 (3,)>, "
        "residual_out=<numpy bfloat16 (3, 64)>, scale=<numpy float32 (3,)>)"
    )
    assert repr(rmsnorm_bwd(x, x, weight, need_dbias=True, need_dx=False)) == (
        "Backward(dx=None, dweight=<numpy float32 (64,)>, dbias=<numpy float32 (64,)>)"
    )


# ---- 8-bit y -------------------------------------------------------------------------------------

FP8 = {"numpy": "float8_e4m3fn", "torch": "torch.float8_e4m3fn", "jax": "float8_e4m3fn"}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("out_dtype", ["fp8", "float8_e4m3fn"])
def test_a_scale_for_each_row(library: str, out_dtype: str) -> None:
    x, residual = normal(2, 9, 96, dtype="bfloat16"), normal(2, 9, 96, seed=1)
    weight, bias = normal(96, seed=2), normal(96, seed=3)
    x[0, 0] = 0
    result = rmsnorm_fwd(
        into(library, x), into(library, weight), bias=into(library, bias),
        residual=into(library, residual), out_dtype=out_dtype, scale="dynamic",
    )  # fmt: skip
    assert str(result.y.dtype) == FP8[library]
    assert library_of(result.scale) == library_of(result.y) == library
    check_forward(on_host(result), x, weight, bias=bias, residual=residual)
    assert np.abs(host(result.y).astype(np.float32)).max(axis=-1).min() == 448


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("as_array", [True, False])
def test_one_scale_for_all(library: str, as_array: bool) -> None:
    x, weight = normal(9, 96, dtype="float16"), normal(96)
    scale: Any = into(library, np.full((), 0.0078125, np.float32)) if as_array else 0.0078125
    made = rmsnorm_fwd(into(library, x), into(library, weight), out_dtype="fp8", scale=scale)
    assert str(made.y.dtype) == FP8[library]
    assert made.scale is None
    check_forward(on_host(made), x, weight, scale=0.0078125)
    assert np.abs(host(made.y).astype(np.float32)).max() == 448  # and some are too large for it


def test_rows_of_zeros_have_a_scale_that_can_be_divided_by() -> None:
    made = rmsnorm_fwd(np.zeros((3, 64), np.float32), out_dtype="fp8", scale="dynamic")
    assert (made.scale == 2.0**-100).all()
    assert (made.y.astype(np.float32) == 0).all()


# ---- heads ---------------------------------------------------------------------------------------


def packed(dtype: str = "bfloat16", seed: int = 0) -> Array:
    """(batch, sequence, heads of q, k and v, head_dim)."""
    return normal(2, 5, 8, 64, dtype=dtype, seed=seed)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("per_head", [True, False])
def test_q_and_k_of_a_packed_qkv(
    library: str, per_head: bool, places: list[dict[str, Tensor]]
) -> None:
    """Both directions, each head with its weight or all with one, nothing copied."""
    qkv, grads = packed(), packed(seed=1)
    a, d = into(library, qkv), into(library, grads)
    for first, heads in ((0, 4), (4, 2)):
        lists = (heads, 64) if per_head else (64,)
        weight, bias = normal(*lists, seed=2), normal(*lists, dtype="float16", seed=3)
        x, dout = qkv[:, :, first : first + heads], grads[:, :, first : first + heads]
        mine, theirs = (each[:, :, first : first + heads] for each in (a, d))
        w, b = into(library, weight), into(library, bias)
        made = rmsnorm_fwd(mine, w, bias=b, weight_offset=1.0)
        check_forward(on_host(made), x, weight, bias=bias, weight_offset=1.0)
        back = rmsnorm_bwd(theirs, mine, w, made.rstd, need_dbias=True, weight_offset=1.0)
        check_backward(on_host(back), dout, x, weight, rstd=host(made.rstd), weight_offset=1.0)
        assert {tuple(each.shape) for each in (back.dweight, back.dbias)} == {lists}
    if library == "jax":
        return  # whose slices are arrays of their own
    for call, (tensor, array) in enumerate([("x", a[:, :, 4:]), ("x", a[:, :, 4:])], start=2):
        assert places[call][tensor] == Tensor(address_of(array), 8 * 64, 64)
    assert places[3]["dout"] == Tensor(address_of(d[:, :, 4:]), 8 * 64, 64)
    assert places[3]["dx"][1:] == (2 * 64, 64)


def test_results_go_into_a_packed_array() -> None:
    qkv, weight = packed(), normal(4, 64)
    into_qkv = np.full_like(qkv, 7)
    out = into_qkv[:, :, :4]
    made = rmsnorm_fwd(qkv[:, :, :4], weight, out=out)
    assert made.y is out
    check_forward(on_host(made), qkv[:, :, :4], weight)
    assert (into_qkv[:, :, 4:] == 7).all()
    dx = np.full_like(qkv, 7)
    back = rmsnorm_bwd(out, qkv[:, :, :4], weight, made.rstd, dx=dx[:, :, :4])
    check_backward(on_host(back), out, qkv[:, :, :4], weight, rstd=made.rstd)
    assert (dx[:, :, 4:] == 7).all()


@pytest.mark.parametrize(
    ("take", "in_place"),
    [
        (lambda a: a, True),
        (lambda a: a.reshape(10, 8, 64)[:, 2:6], True),
        (lambda a: a[0].transpose(1, 0, 2)[:4], True),  # a row's stride is less than a head's
        (lambda a: a[:, ::2, :4], False),  # three strides
        (lambda a: a[..., ::2], False),
        (lambda a: a[:, :, ::-1], False),
    ],
)
def test_layouts_of_heads(take: Any, in_place: bool, places: list[dict[str, Tensor]]) -> None:
    x, dout = take(packed("float32")), take(packed("float32", seed=1))
    weight = normal(*x.shape[-2:], seed=2)
    made = rmsnorm_fwd(x, weight)
    check_forward(on_host(made), x, weight)
    back = rmsnorm_bwd(dout, x, weight, made.rstd)
    check_backward(on_host(back), dout, x, weight, rstd=made.rstd)
    assert (places[0]["x"].address == x.ctypes.data) == in_place
    assert (places[1]["dout"].address == dout.ctypes.data) == in_place


def test_a_lone_head_and_wide_ones(places: list[dict[str, Tensor]]) -> None:
    x, weight = normal(5, 1, 64), normal(1, 64)
    made = rmsnorm_fwd(x, weight)
    check_forward(on_host(made), x, weight)
    assert rmsnorm_bwd(x, x, weight, made.rstd).dweight.shape == (1, 64)
    wide = normal(2, 3, 5000)[:, :2]  # too wide to be heads: copied, as rows
    check_forward(on_host(rmsnorm_fwd(wide)), wide)
    assert places[-1]["x"].row_stride == 5000


@pytest.mark.parametrize("slug", ["b256-t64-v16-2p", "b64-t128-v16-reg"])
def test_a_config_for_one_head_copies_the_heads_of_a_packed_qkv(slug: str) -> None:
    q = normal(3, 5, 12, 64)[:, :, :4]
    assert np.array_equal(rmsnorm_fwd(q, config=slug).y, rmsnorm_fwd(q.copy(), config=slug).y)


def test_so_does_one_whose_last_block_finishes() -> None:
    x, weight, slug = normal(3, 5, 12, 64)[:, :, :4], normal(64, seed=1), "b64-t16-v16-reg-p1-fl"
    made = rmsnorm_bwd(x, x, weight, config=slug)
    dense = rmsnorm_bwd(x.copy(), x.copy(), weight, config=slug)
    assert np.array_equal(made.dx, dense.dx)
    assert np.array_equal(made.dweight, dense.dweight)

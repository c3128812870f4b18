"""The operations on CPU arrays of every library, in the simulator, against float64.

Long, for the bad inputs of both operations stand in it as tables, a line each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from library_arrays import LIBRARIES, address_of, bits, into, library_of, normal

from rmsnorm_raw import bounds, interop, launch, ops, ready
from rmsnorm_raw.config import Config
from rmsnorm_raw.errors import BackendUnavailable, InvalidConfig, InvalidInput
from rmsnorm_raw.launch import Tensor
from rmsnorm_raw.ops import rmsnorm_bwd, rmsnorm_fwd
from rmsnorm_raw.problem import Problem

torch = pytest.importorskip("torch", reason="torch is not installed")

Array = np.ndarray
#: S and D of the bounds, over what the kernels' chains are at these sizes
CHAIN = 64


def wide(array: Array) -> Array:
    return array.astype(np.float64).reshape(-1, array.shape[-1])


def check(output: str, got: Any, want: Array, scale: Array) -> None:
    dtype = str(got.dtype).removeprefix("torch.")
    factor = bounds.bound_factor(output, CHAIN)
    worst = bounds.worst_of(bits(got).reshape(want.shape), want, scale, factor, dtype)
    assert worst.ratio <= 1, (output, worst)


def check_forward(result: ops.Forward, x: Array, weight: Array | None, eps: float = 1e-6) -> None:
    w = None if weight is None else weight.astype(np.float64)
    y, rstd = bounds.reference_forward(wide(x), w, eps)
    assert tuple(result.y.shape) == x.shape
    check("y", result.y, y, np.abs(y))
    if result.rstd is not None:
        assert tuple(result.rstd.shape) == x.shape[:-1]
        check("rstd", result.rstd, rstd[None], rstd[None])


def check_backward(
    result: ops.Backward, dout: Array, x: Array, weight: Array | None, rstd: Any = None
) -> None:
    w = None if weight is None else weight.astype(np.float64)
    given = None if rstd is None else np.asarray(rstd, np.float64).reshape(-1)
    dx, dweight = bounds.reference_backward(wide(dout), wide(x), w, given, 1e-6)
    if result.dx is not None:
        sums = bounds.row_sums(wide(dout), wide(x), w)
        terms = bounds.row_terms(sums, x.shape[-1], 1e-6)
        assert tuple(result.dx.shape) == x.shape
        check("dx", result.dx, dx, bounds.dx_and_scale(wide(dout), wide(x), w, terms)[1])
    if result.dweight is not None:
        assert weight is not None
        assert tuple(result.dweight.shape) == weight.shape
        xhat = wide(x) / np.sqrt((wide(x) ** 2).mean(axis=1, keepdims=True) + 1e-6)
        spread = np.abs(wide(dout) * xhat).sum(axis=0)
        check("dweight", result.dweight, dweight[None], spread[None])


# ---- every library -------------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32"), ("float32", None)],
)
def test_right_and_in_the_callers_library(
    library: str, dtype: str, weight_dtype: str | None
) -> None:
    x, dout = normal(2, 3, 96, dtype=dtype), normal(2, 3, 96, dtype=dtype, seed=1)
    weight = normal(96, dtype=weight_dtype, seed=2) if weight_dtype else None
    w = None if weight is None else into(library, weight)
    forward = rmsnorm_fwd(into(library, x), w)
    check_forward(forward, x, weight)
    backward = rmsnorm_bwd(into(library, dout), into(library, x), w, forward.rstd)
    check_backward(backward, dout, x, weight, forward.rstd)
    results = [*forward, backward.dx] + ([] if weight is None else [backward.dweight])
    assert {library_of(result) for result in results} == {library}
    assert (backward.dweight is None) == (weight is None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_libraries_get_the_same_bits(dtype: str) -> None:
    x, dout, weight = normal(5, 96, dtype=dtype), normal(5, 96, dtype=dtype), normal(96)

    def run(library: str) -> list[Array]:
        a, d, w = into(library, x), into(library, dout), into(library, weight)
        forward = rmsnorm_fwd(a, w)
        return [bits(made) for made in (*forward, *rmsnorm_bwd(d, a, w, forward.rstd))]

    expected = run("numpy")
    for library in LIBRARIES[1:]:
        for got, want in zip(run(library), expected, strict=True):
            assert np.array_equal(got, want), library


@pytest.mark.parametrize("library", LIBRARIES)
def test_nothing_is_copied_on_the_way(library: str, places: list[dict[str, Tensor]]) -> None:
    x, dout, weight = (into(library, normal(*shape)) for shape in ((4, 64), (4, 64), (64,)))
    forward = rmsnorm_fwd(x, weight)
    backward = rmsnorm_bwd(dout, x, weight, forward.rstd)
    arrays = {"x": x, "weight": weight, "y": forward.y, "rstd": forward.rstd}
    assert {name: place.address for name, place in places[0].items()} == {
        name: address_of(array) for name, array in arrays.items()
    }
    arrays |= {"dout": dout, "dx": backward.dx, "dweight": backward.dweight}
    del arrays["y"]
    got = {
        name: place.address
        for name, place in places[1].items()
        if name not in ("workspace", "counter")
    }
    assert got == {name: address_of(array) for name, array in arrays.items()}


def test_results_share_memory_with_their_dlpack_source() -> None:
    buffer = np.zeros((4, 64), np.float32)
    y = rmsnorm_fwd(torch.from_numpy(normal(4, 64)), out=torch.from_dlpack(buffer)).y
    assert np.array_equal(buffer, y.numpy())
    y[0, 0] = 123
    assert buffer[0, 0] == 123


def test_libraries_mix_on_one_device_and_x_decides() -> None:
    x, weight = normal(4, 64), normal(64, seed=1)
    result = rmsnorm_fwd(into("torch", x), weight, out=np.empty_like(x))
    assert type(result.y) is np.ndarray  # it is out itself
    assert library_of(result.rstd) == "torch"
    check_forward(result, x, weight)
    backward = rmsnorm_bwd(x, into("torch", x), weight, result.rstd.numpy())
    assert {library_of(made) for made in backward} == {"torch"}


def test_tensors_that_require_grad_are_inputs_like_others() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    result = rmsnorm_fwd(x.expand(2, 4, 64).transpose(0, 1), torch.ones(64, requires_grad=True))
    assert not result.y.requires_grad
    check_forward(result, x.detach().expand(2, 4, 64).transpose(0, 1).numpy(), np.ones(64))


# ---- layouts -------------------------------------------------------------------------------------


def layouts() -> Iterator[tuple[str, Callable[[Array], Array], bool]]:
    """(name, view of a (6, 4, 200) array, whether it is read in place)."""
    yield "whole", lambda a: a, True
    yield "1-D", lambda a: a[0, 0], True
    yield "2-D", lambda a: a[:, 0], True
    yield "4-D", lambda a: a.reshape(3, 2, 4, 200), True
    yield "5-D", lambda a: a.reshape(3, 2, 2, 2, 200), True
    yield "columns", lambda a: a[:, :, 40:104], True
    yield "every other row", lambda a: a[::2, 0], True
    yield "one row repeated", lambda a: np.broadcast_to(a[1, 2], (6, 4, 200)), True
    yield "misaligned", lambda a: a.reshape(-1)[1:4001].reshape(20, 200), True
    yield "odd row stride", lambda a: a.reshape(-1)[:4788].reshape(12, 399)[:, :64], True
    yield "two strides", lambda a: a[:, :3, :64], True
    yield "three strides", lambda a: a.reshape(2, 3, 4, 200)[:, :2, :3, :64], False
    yield "transposed", lambda a: a.transpose(2, 0, 1)[:40], False
    yield "reversed", lambda a: a[::-1, 0], False
    yield "every other element", lambda a: a[..., ::2], False
    yield "rows repeat", lambda a: np.broadcast_to(a[:, :1], (6, 4, 200)), True


LAYOUTS = [
    pytest.param(library, take, in_place, id=f"{library}, {name}")
    for library in ("numpy", "torch")
    for name, take, in_place in layouts()
    if (library, name) != ("torch", "reversed")  # torch has no negative strides
]


@pytest.mark.parametrize(("library", "take", "in_place"), LAYOUTS)
def test_layouts(
    library: str,
    take: Callable[[Array], Array],
    in_place: bool,
    places: list[dict[str, Tensor]],
) -> None:
    """In place where the layout allows, and never written; torch gets the same memory."""
    x, dout = take(normal(6, 4, 200)), take(normal(6, 4, 200, seed=1))
    weight = normal(x.shape[-1], seed=2)
    before = x.copy(), dout.copy(), weight.copy()
    a, d = x, dout
    if library == "torch":
        a, d = (torch.from_numpy(take_base(each)).as_strided(*place(each)) for each in (x, dout))
    forward = rmsnorm_fwd(a, weight)
    check_forward(forward, x, weight)
    backward = rmsnorm_bwd(d, a, weight, forward.rstd)
    check_backward(backward, dout, x, weight, np.asarray(forward.rstd))
    assert (places[0]["x"].address == x.ctypes.data) == in_place
    assert (places[1]["dout"].address == dout.ctypes.data) == in_place
    for now, then in zip((x, dout, weight), before, strict=True):
        assert np.array_equal(now, then)


def take_base(array: Array) -> Array:
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    return base.reshape(-1)


def place(array: Array) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """shape, strides and offset in elements, as torch's as_strided takes them."""
    offset = (array.ctypes.data - take_base(array).ctypes.data) // array.itemsize
    return array.shape, tuple(stride // array.itemsize for stride in array.strides), offset


@pytest.mark.parametrize("offset", range(1, 9))
@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float32"])
def test_any_alignment_of_any_array(offset: int, weight_dtype: str) -> None:
    """Views into a flat buffer (TransformerEngine PR#886); a store past a row would show."""

    def shifted(*shape: int, dtype: str = "bfloat16", by: int = offset, seed: int = 0) -> Array:
        size = int(np.prod(shape))
        flat = normal(size + 16, dtype=dtype, seed=seed)
        return flat[by : by + size].reshape(shape)

    x, dout, weight = shifted(3, 64), shifted(3, 64, seed=1), shifted(64, dtype=weight_dtype)
    flat = np.full(3 * 64 + 16, 7, x.dtype)
    out = flat[offset : offset + 3 * 64].reshape(3, 64)
    forward = rmsnorm_fwd(x, weight, out=out)
    assert forward.y is out
    check_forward(forward, x, weight)
    assert (flat[:offset] == 7).all()
    assert (flat[offset + 3 * 64 :] == 7).all()
    check_backward(rmsnorm_bwd(dout, x, weight, forward.rstd), dout, x, weight, forward.rstd)


def test_a_weight_with_a_stride_is_copied() -> None:
    x, weight = normal(4, 64), normal(128)[::2]
    check_forward(rmsnorm_fwd(x, weight), x, weight)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "x", "weight", "expected"),
    [
        ("bfloat16", "float32", Tensor(64, 64), Tensor(64), 16),
        ("bfloat16", "float32", Tensor(64, 64), Tensor(64 + 8), 4),  # two fp32 are 8 bytes
        ("bfloat16", "float32", Tensor(64, 64), Tensor(64 + 4), 2),
        ("bfloat16", "bfloat16", Tensor(64, 64), Tensor(64 + 8), 8),
        ("float32", "bfloat16", Tensor(64, 64), Tensor(64 + 8), 16),  # four bf16 are 8 bytes
        ("float32", "bfloat16", Tensor(64, 64), Tensor(64 + 4), 8),
        ("float32", "bfloat16", Tensor(64, 64), Tensor(64 + 2), 4),
        ("float32", None, Tensor(64 + 8, 64), None, 8),
        ("float32", None, Tensor(64, 66), None, 8),
        ("float16", None, Tensor(64, 65), None, 2),
        ("float16", None, Tensor(64, 0), None, 16),
    ],
)
def test_alignment_takes_each_arrays_own_element_into_account(
    dtype: str, weight_dtype: str | None, x: Tensor, weight: Tensor | None, expected: int
) -> None:
    problem = Problem.forward(4, 64, dtype, weight_dtype=weight_dtype)
    tensors = {"x": x, "y": Tensor(64, 64)} | ({} if weight is None else {"weight": weight})
    assert ready.alignment_bytes_of(problem, tensors) == expected


# ---- what is asked for ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("need_dx", "need_dweight"), list(itertools.product([True, False], repeat=2))
)
def test_gradients_not_asked_for_are_none(need_dx: bool, need_dweight: bool) -> None:
    x, weight = normal(4, 64), normal(64)
    result = rmsnorm_bwd(x, x, weight, need_dx=need_dx, need_dweight=need_dweight)
    assert (result.dx is not None) == need_dx
    assert (result.dweight is not None) == need_dweight
    check_backward(result, x, x, weight)


def test_rstd_is_optional_in_both_directions() -> None:
    x, weight = normal(4, 64), normal(64)
    assert rmsnorm_fwd(x, weight, store_rstd=False).rstd is None
    check_backward(rmsnorm_bwd(x, x, weight), x, x, weight)


def test_the_rstd_given_is_the_one_used() -> None:
    x = normal(4, 64)
    rstd = np.full(4, 3.0, np.float32)
    dx, dweight = bounds.reference_backward(wide(x), wide(x), np.ones(64), rstd, 1e-6)
    result = rmsnorm_bwd(x, x, np.ones(64, np.float32), rstd)
    assert np.allclose(result.dx, dx, rtol=1e-5, atol=1e-5)
    assert np.allclose(result.dweight, dweight, rtol=1e-5, atol=1e-5)


def test_eps_counts() -> None:
    x = normal(4, 64)
    check_forward(rmsnorm_fwd(x, eps=3.0), x, None, eps=3.0)
    assert np.isnan(rmsnorm_fwd(np.zeros((1, 64), np.float32), eps=0.0).y).all()


def test_fp16_squares_do_not_overflow() -> None:
    x = (normal(4, 64) * 1000).astype(np.float16)
    check_forward(rmsnorm_fwd(x), x, None)


@pytest.mark.parametrize("config", [None, "b64-t32-v8-reg-p2-fl"])
def test_dweight_is_right_and_the_same_bits_in_every_run(config: str | None) -> None:
    """Also with a finish by the last block, whose counter starts at 0 whatever memory it got."""
    x, weight = normal(37, 64, dtype="bfloat16"), normal(64)
    one, other = (rmsnorm_bwd(x, x, weight, config=config) for _ in range(2))
    check_backward(one, x, x, weight)
    assert np.array_equal(bits(one.dweight), bits(other.dweight))


@pytest.mark.parametrize("config", [None, "ladder", "b128-t32-v16-reg", Config(128, 32)])
def test_configs_in_every_form(config: Any) -> None:
    x, weight = normal(6, 96), normal(96)
    check_forward(rmsnorm_fwd(x, weight, config=config), x, weight)


def test_a_config_reaches_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    make_plan = launch.make_plan
    monkeypatch.setattr(
        launch, "make_plan", lambda p, c, b, t: seen.append(c.slug) or make_plan(p, c, b, t)
    )
    rmsnorm_fwd(normal(6, 96), config="b64-t16-v8-reg")
    assert seen == ["b64-t16-v8-reg"]


def test_one_build_serves_all_rows_and_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    slug = "b128-t32-v16-reg"
    rmsnorm_fwd(normal(6, 96), config=slug)
    monkeypatch.setattr(ready, "render", None)  # not to be called again
    for rows, eps in ((7, 1e-6), (6, 1e-5)):
        x = normal(rows, 96)
        check_forward(rmsnorm_fwd(x, eps=eps, config=slug), x, None, eps)


@pytest.mark.parametrize("name", ["cuda", "rocm", "nonsense"])
def test_the_environment_redirects_no_array(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMSNORM_RAW_BACKEND", name)
    x = normal(4, 64)
    check_forward(rmsnorm_fwd(x), x, None)


# ---- out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_out_is_written_and_returned(library: str) -> None:
    x, weight = normal(4, 64), normal(64)
    buffer = into(library, np.full((4, 100), 7, np.float32))
    out = buffer[:, 20:84]
    result = rmsnorm_fwd(into(library, x), weight, out=out)
    assert result.y is out
    check_forward(rmsnorm_fwd(x, weight), x, weight)
    assert np.array_equal(np.asarray(out), rmsnorm_fwd(x, weight).y)
    assert (np.asarray(buffer)[:, :20] == 7).all()
    assert (np.asarray(buffer)[:, 84:] == 7).all()


@pytest.mark.parametrize("config", [None, "b64-v16-2p"])
def test_forward_in_place(config: str | None) -> None:
    x, weight = normal(3, 5, 400, dtype="bfloat16"), normal(400)
    expected = rmsnorm_fwd(x, weight, config=config)
    work = x.copy()
    result = rmsnorm_fwd(work, weight, out=work, config=config)
    assert result.y is work
    assert np.array_equal(bits(work), bits(expected.y))
    assert np.array_equal(result.rstd, expected.rstd)


def test_out_between_the_rows_of_x_is_no_overlap() -> None:
    buffer = normal(6, 128)
    x = buffer[:, :64].copy()
    check_forward(rmsnorm_fwd(buffer[:, :64], out=buffer[:, 64:]), x, None)
    assert np.array_equal(buffer[:, :64], x)


def test_autograd_learns_that_out_was_written() -> None:
    saved = torch.ones(4, 64)
    product = torch.ones(4, 64, requires_grad=True) * saved
    rmsnorm_fwd(torch.randn(4, 64), out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# ---- rows that blocks share ----------------------------------------------------------------------


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("rows", "cols", "config"),
    [(5, 3000, "b64-t256"), (1, 8192, "b128-t1024"), (37, 520, "b64-t128")],
)
def test_blocks_that_share_a_row_have_their_words(
    library: str, rows: int, cols: int, config: str, places: list[dict[str, Tensor]]
) -> None:
    x, weight = normal(rows, cols, dtype="bfloat16"), normal(cols)
    blocks = Config.parse(config).blocks_per_row
    a, w, out = into(library, x), into(library, weight), into(library, np.empty_like(x))
    fresh = rmsnorm_fwd(a, w, config=config)
    check_forward(fresh, x, weight)
    assert fresh.y.shape == x.shape
    assert places[0]["workspace"].address % 8 == 0
    given = rmsnorm_fwd(a, w, out=out, config=config)
    in_place = rmsnorm_fwd(a, w, out=a, config=config)
    for result in (given, in_place):
        assert np.array_equal(bits(result.y), bits(fresh.y))
        assert np.array_equal(bits(result.rstd), bits(fresh.rstd))
    assert given.y is out
    assert in_place.y is a
    problem = Problem.forward(rows, cols, "bf16", weight_dtype="fp32")
    built = ready.prepare(problem, 16, Config.parse(config), interop.view(x).device)
    assert built.scratch == (("workspace", 8 * (rows * blocks + 1)),)


def test_shared_rows_without_a_weight_rstd_or_rows() -> None:
    x = normal(3, 3000, dtype="float16")
    result = rmsnorm_fwd(x, store_rstd=False, config="b64-t256")
    assert result.rstd is None
    check_forward(result, x, None)
    assert rmsnorm_fwd(x[:0], config="b64-t256").y.shape == (0, 3000)


# ---- no rows, no columns -------------------------------------------------------------------------


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0,), (2, 3, 0), (0, 0)])
def test_nothing_to_do(library: str, shape: tuple[int, ...]) -> None:
    x = into(library, np.zeros(shape, np.float32))
    weight = into(library, normal(shape[-1], dtype="float16"))
    y, rstd = rmsnorm_fwd(x, weight, eps=0.25)
    assert (tuple(y.shape), tuple(rstd.shape)) == (shape, shape[:-1])
    assert (np.asarray(rstd) == 2).all()
    dx, dweight = rmsnorm_bwd(x, x, weight, rstd)
    assert tuple(dx.shape) == shape
    assert tuple(dweight.shape) == shape[-1:]
    assert (np.asarray(dweight) == 0).all()
    assert {library_of(made) for made in (y, rstd, dx, dweight)} == {library}
    assert str(dweight.dtype).removeprefix("torch.") == "float16"


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("eps", [0.0, 1e-60])
def test_rstd_of_no_columns_without_eps_is_infinite(eps: float) -> None:
    assert np.isposinf(rmsnorm_fwd(torch.zeros(3, 0), eps=eps).rstd.numpy()).all()


@pytest.mark.usefixtures("no_launch")
def test_out_may_be_empty_too() -> None:
    out = np.empty((0, 8), np.float32)
    assert rmsnorm_fwd(np.zeros((0, 8), np.float32), out=out).y is out


# ---- bad input -----------------------------------------------------------------------------------

X = normal(4, 64)
W = normal(64)
R = np.ones(4, np.float32)


def read_only() -> Array:
    array = np.empty((4, 64), np.float32)
    array.flags.writeable = False
    return array


def overlapping() -> tuple[Array, Array]:
    buffer = normal(5, 64)
    return buffer[:4], buffer[1:]


def same_start() -> tuple[Array, Array]:
    buffer = normal(8, 64)
    return buffer[:4], buffer.reshape(4, 128)[:, :64]


FORWARD_FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("a scalar", {"x": np.float32(1)}, "float32 is no array"),
    ("0-d", {"x": np.ones((), np.float32)}, "no dimensions"),
    ("a list", {"x": [[1.0, 2.0]]}, "list is no array"),
    ("too wide", {"x": np.ones((1 << 20) + 1, np.float32), "weight": None}, "cols is 1048577"),
    ("float64", {"x": X.astype(np.float64)}, "x is float64.*convert it to float16, bfloat16"),
    ("integers", {"x": X.astype(np.int32)}, "x is int32.*convert"),
    ("byte order", {"x": X.astype(">f4")}, "x is >f4"),
    ("weight float64", {"weight": W.astype(np.float64)}, "weight is float64"),
    ("weight too long", {"weight": normal(65)}, r"weight has shape \(65,\) and must have \(64,\)"),
    ("weight 2-D", {"weight": W.reshape(1, 64)}, r"weight has shape \(1, 64\)"),
    ("weight a number", {"weight": 1.0}, "float is no array"),
    ("eps < 0", {"eps": -1e-6}, "eps is -1e-06"),
    ("eps NaN", {"eps": float("nan")}, "eps is nan"),
    ("eps inf", {"eps": float("inf")}, "eps is inf"),
    ("eps a word", {"eps": "1e-6"}, "eps is '1e-6': pass a number"),
    ("eps a list", {"eps": [1e-6]}, r"eps is \[1e-06\]: pass a number"),
    ("eps too large", {"eps": 1e39}, r"eps is 1e\+39: it must be a number >= 0 that float32"),
    ("stream on a CPU", {"stream": 0}, "stream= is for GPU arrays"),
    ("no stream", {"stream": "main"}, "stream is a str"),
    ("out shape", {"out": np.empty((4, 65), np.float32)}, r"out is float32 \(4, 65\)"),
    ("out dtype", {"out": np.empty((4, 64), np.float16)}, "out is float16"),
    ("out read-only", {"out": read_only()}, "out cannot be written"),
    ("out of autograd", {"out": torch.empty(4, 64, requires_grad=True)}, "out cannot be written"),
    ("out repeated", {"out": torch.empty(64).expand(4, 64)}, r"out has strides \(0, 1\)"),
    ("out transposed", {"out": np.empty((64, 4), np.float32).T}, "out has strides"),
    ("out reversed", {"out": np.empty((4, 64), np.float32)[::-1]}, "out has strides"),
    ("out over x", dict(zip(("x", "out"), overlapping(), strict=True)), "out overlaps x"),
    ("out apart", dict(zip(("x", "out"), same_start(), strict=True)), "out overlaps x"),
]  # fmt: skip

BACKWARD_FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("dout shape", {"dout": normal(5, 64)}, r"dout is float32 \(5, 64\) and must be like x"),
    ("dout dtype", {"dout": X.astype(np.float64)}, "dout is float64"),
    ("dout left out", {"dout": None}, "NoneType is no array"),
    ("rstd shape", {"rstd": np.ones((4, 1), np.float32)}, r"rstd is float32 \(4, 1\)"),
    ("rstd dtype", {"rstd": R.astype(np.float16)}, "rstd is float16"),
    ("rstd float64", {"rstd": R.astype(np.float64)}, "rstd is float64"),
    ("rstd strided", {"rstd": np.ones(8, np.float32)[::2]}, "rstd is not contiguous"),
    ("rstd repeated", {"rstd": np.broadcast_to(np.float32(1), 4)}, "rstd is not contiguous"),
    ("weight too short", {"weight": normal(63)}, r"weight has shape \(63,\)"),
    ("eps < 0", {"eps": -1.0}, "eps is -1.0"),
    ("stream on a CPU", {"stream": 5}, "stream= is for GPU arrays"),
]


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("arguments", "words"), [pytest.param(*fault[1:], id=fault[0]) for fault in FORWARD_FAULTS]
)
def test_bad_input_of_the_forward(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        rmsnorm_fwd(**({"x": X, "weight": W} | arguments))


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("arguments", "words"), [pytest.param(*fault[1:], id=fault[0]) for fault in BACKWARD_FAULTS]
)
def test_bad_input_of_the_backward(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        rmsnorm_bwd(**({"dout": X, "x": X, "weight": W, "rstd": R} | arguments))


@pytest.mark.usefixtures("no_launch")
def test_out_over_the_weight_is_refused() -> None:
    buffer = normal(5, 64)
    with pytest.raises(InvalidInput, match="out overlaps weight"):
        rmsnorm_fwd(X, buffer[4], out=buffer[1:])


@pytest.mark.usefixtures("no_launch")
def test_a_jax_array_cannot_be_out() -> None:
    with pytest.raises(InvalidInput, match="out cannot be written"):
        rmsnorm_fwd(X, out=into("jax", X))


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("b256-q7", "'q7' names no knob; a slug reads like 'b256-"),
        ("b128-t32-v2-reg", "does not fit.*vec is"),
        (Config(2048), "does not fit.*1024 threads"),
        (256, "pass a slug, a Config"),
    ],
)
def test_configs_that_cannot_be(config: Any, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        rmsnorm_fwd(X, W, config=config)


@pytest.mark.usefixtures("no_launch")
def test_a_bad_slug_is_an_error_even_with_nothing_to_do() -> None:
    with pytest.raises(InvalidConfig, match="names no knob"):
        rmsnorm_fwd(np.zeros((0, 8), np.float32), config="nonsense")


@pytest.mark.usefixtures("no_launch")
def test_without_a_backend_the_message_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(name: str) -> None:
        raise BackendUnavailable("install a compiler")

    ready.prepare.cache_clear()
    ready._backend.cache_clear()
    monkeypatch.setattr(ready, "get_backend", unavailable)
    with pytest.raises(BackendUnavailable, match="install a compiler"):
        rmsnorm_fwd(X, W)


def test_results_are_one_line_in_a_repl() -> None:
    x, w = torch.ones(2, 3, 8, dtype=torch.bfloat16), torch.ones(8)
    assert repr(rmsnorm_fwd(x, w)) == (
        "Forward(y=<torch bfloat16 (2, 3, 8)>, rstd=<torch float32 (2, 3)>)"
    )
    x, w = np.ones((3, 8), np.float16), np.ones(8, np.float32)
    assert repr(rmsnorm_bwd(x, x, w, need_dx=False)) == (
        "Backward(dx=None, dweight=<numpy float32 (8,)>)"
    )

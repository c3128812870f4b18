"""Results and scratch memory that the caller gives; then nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from library_arrays import bits, into, normal

import rmsnorm_raw as rr
from rmsnorm_raw import interop
from rmsnorm_raw.errors import InvalidConfig, InvalidInput
from rmsnorm_raw.ops import rmsnorm_bwd, rmsnorm_fwd

torch = pytest.importorskip("torch", reason="torch is not installed")

Array = np.ndarray
ROWS, COLS = 9, 96
X, RESIDUAL, DOUT = (normal(ROWS, COLS, dtype="bfloat16", seed=n) for n in range(3))
WEIGHT, BIAS = normal(COLS, seed=3), normal(COLS, dtype="float16", seed=4)
FORWARD = {"bias": BIAS, "residual": RESIDUAL, "out_dtype": "float32", "residual_dtype": "float32"}
BACKWARD = {
    "dresidual_out": RESIDUAL, "need_dbias": True, "bias_dtype": "float16",
    "residual_dtype": "float32",
}  # fmt: skip


def same(one: Any, other: Any) -> None:
    assert bits(one).tobytes() == bits(other).tobytes()


def guarded(shape: tuple[int, ...], dtype: str) -> tuple[Array, Array]:
    """A view with a gap after each row, and the array around it, filled with sevens."""
    whole = np.full((*shape[:-1], shape[-1] + 16), 7, np.dtype(dtype))
    return whole[..., : shape[-1]], whole


# ---- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_every_result_of_the_forward_goes_where_it_is_told(library: str) -> None:
    want = rmsnorm_fwd(X, WEIGHT, **FORWARD)
    out, around = guarded(X.shape, "float32")
    h, around_h = guarded(X.shape, "float32")
    rstd = np.empty(ROWS, np.float32)
    given = {"out": out, "residual_out": h, "rstd_out": rstd}
    if library == "torch":
        given = {name: torch.from_numpy(each) for name, each in given.items()}
    made = rmsnorm_fwd(into(library, X), into(library, WEIGHT), **FORWARD, **given)
    assert made.y is given["out"]
    assert made.rstd is given["rstd_out"]
    assert made.residual_out is given["residual_out"]
    for got, expected in ((out, want.y), (rstd, want.rstd), (h, want.residual_out)):
        same(got, expected)
    for whole in (around, around_h):
        assert (whole[:, COLS:] == 7).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn"])
def test_an_8_bit_y_and_its_scales_go_where_they_are_told(dtype: str) -> None:
    want = rmsnorm_fwd(X, WEIGHT, out_dtype="fp8", scale="dynamic")
    out, scale = np.empty(X.shape, dtype), np.empty(ROWS, np.float32)
    made = rmsnorm_fwd(X, WEIGHT, out_dtype="fp8", scale="dynamic", out=out, scale_out=scale)
    assert (made.y is out, made.scale is scale) == (True, True)
    same(out, want.y)
    same(scale, want.scale)
    theirs = torch.empty(X.shape, dtype=torch.float8_e4m3fn)
    rmsnorm_fwd(X, WEIGHT, out_dtype="fp8", scale="dynamic", out=theirs)
    same(theirs, want.y)


def test_every_result_of_the_backward_goes_where_it_is_told() -> None:
    want = rmsnorm_bwd(DOUT, X, WEIGHT, **BACKWARD)
    (dx, around), (dresidual, around_r) = guarded(X.shape, "bfloat16"), guarded(X.shape, "float32")
    dweight, dbias = np.empty(COLS, np.float32), np.empty(COLS, np.float16)
    made = rmsnorm_bwd(
        DOUT, X, WEIGHT, **BACKWARD, dx=dx, dweight=dweight, dbias=dbias, dresidual=dresidual
    )
    assert (made.dx is dx, made.dweight is dweight, made.dbias is dbias) == (True,) * 3
    assert made.dresidual is dresidual
    for got, expected in zip(
        (dx, dweight, dbias, dresidual), (want.dx, want.dweight, want.dbias, want.dresidual),
        strict=True,
    ):  # fmt: skip
        same(got, expected)
    for whole in (around, around_r):
        assert (whole[:, COLS:].astype(np.float32) == 7).all()


def test_a_result_that_is_given_is_asked_for_in_its_dtype() -> None:
    dbias, dresidual = np.empty(COLS, np.float16), np.empty(X.shape, np.float32)
    made = rmsnorm_bwd(DOUT, X, WEIGHT, dbias=dbias, dresidual=dresidual)
    want = rmsnorm_bwd(
        DOUT, X, WEIGHT, need_dbias=True, bias_dtype="fp16", residual_dtype="float32"
    )
    assert (made.dbias is dbias, made.dresidual is dresidual) == (True, True)
    same(dbias, want.dbias)
    same(dresidual, want.dresidual)


def test_dresidual_may_be_dx_or_an_array_of_its_own() -> None:
    want = rmsnorm_bwd(DOUT, X, WEIGHT).dx
    dx, dresidual = np.empty_like(X), np.empty_like(X)
    made = rmsnorm_bwd(DOUT, X, WEIGHT, dx=dx, dresidual=dx)
    assert made.dx is made.dresidual is dx
    same(dx, want)
    made = rmsnorm_bwd(DOUT, X, WEIGHT, dx=dx, dresidual=dresidual)
    assert (made.dx is dx, made.dresidual is dresidual) == (True, True)
    same(dresidual, want)
    with pytest.raises(InvalidInput, match=r"dresidual is bfloat16 .* and must be float32"):
        rmsnorm_bwd(DOUT, X, WEIGHT, dx=dx, dresidual=dx, residual_dtype="float32")


def test_the_sum_may_be_left_unwritten() -> None:
    want = rmsnorm_fwd(X, WEIGHT, residual=RESIDUAL)
    made = rmsnorm_fwd(X, WEIGHT, residual=RESIDUAL, residual_out=False)
    assert made.residual_out is None
    same(made.y, want.y)


def test_autograd_learns_of_every_result_that_was_written() -> None:
    x = into("torch", X)
    given = {
        "out": torch.empty(X.shape, dtype=torch.bfloat16), "rstd_out": torch.empty(ROWS),
        "residual_out": torch.empty(X.shape, dtype=torch.bfloat16),
    }  # fmt: skip
    before = {name: each._version for name, each in given.items()}
    rmsnorm_fwd(x, residual=x, **given)
    assert all(each._version > before[name] for name, each in given.items())


# ---- in place ------------------------------------------------------------------------------------

CONFIGS = [None, "b64-v16-2p", "b64-t16-v16-pp-p1", "b64-v16-lds2-p1", "b64-v16-lds2r-p1"]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_residual_in_place(library: str, config: str | None) -> None:
    """On every memory path, also where rows are read twice."""
    x, weight = normal(67, 392, dtype="bfloat16"), normal(392)
    residual = normal(67, 392, dtype="bfloat16", seed=1)
    want = rmsnorm_fwd(x, weight, residual=residual, config=config)
    work = into(library, residual.copy())
    made = rmsnorm_fwd(
        into(library, x), into(library, weight), residual=work, residual_out=work, config=config
    )
    assert made.residual_out is work
    same(work, want.residual_out)
    same(made.y, want.y)
    same(made.rstd, want.rstd)


def test_residual_in_place_of_a_view() -> None:
    whole = np.full((ROWS, 3 * COLS), 7, X.dtype)
    view = whole[:, COLS : 2 * COLS]
    view[...] = RESIDUAL
    want = rmsnorm_fwd(X, WEIGHT, residual=RESIDUAL)
    made = rmsnorm_fwd(X, WEIGHT, residual=view, residual_out=view)
    assert made.residual_out is view
    same(view, want.residual_out)
    assert (whole[:, :COLS].astype(np.float32) == 7).all()
    assert (whole[:, 2 * COLS :].astype(np.float32) == 7).all()


def test_residual_in_place_must_be_the_very_same_array() -> None:
    buffer = np.zeros((ROWS + 1, COLS), X.dtype)
    with pytest.raises(InvalidInput, match="residual_out overlaps residual"):
        rmsnorm_fwd(X, residual=buffer[1:], residual_out=buffer[:-1])
    wide = np.zeros((ROWS, COLS), np.float32)
    with pytest.raises(InvalidInput, match="residual_out overlaps residual"):
        rmsnorm_fwd(
            X, residual=wide.view("bfloat16")[:, :COLS], residual_out=wide, residual_dtype="fp32"
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"residual_out": X.copy()}, "with a residual or residual_dtype"),
        ({"rstd_out": np.zeros(ROWS, "f4"), "store_rstd": False}, "with store_rstd=True"),
        ({"scale_out": np.zeros(ROWS, "f4")}, 'with scale="dynamic"'),
    ],
)
def test_a_result_that_is_not_written_says_what_asks_for_it(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput, match=f"leave {next(iter(arguments))} out, .* {words}$"):
        rmsnorm_fwd(X, WEIGHT, **arguments)


@pytest.mark.parametrize(
    "config", [None, "b64-t32-v16-reg", "b256-t64-v16-pp-p1", "b64-t64-v16-2p"]
)
@pytest.mark.parametrize(
    "more",
    [
        {"bias": BIAS}, {"weight_offset": 1.0}, {"casting": "llama"},
        {"residual": normal(ROWS, COLS, dtype="bfloat16")},
    ],
    ids=lambda more: next(iter(more)),
)  # fmt: skip
def test_y_in_place_of_x(more: dict[str, Any], config: str | None) -> None:
    x = normal(ROWS, COLS, dtype="bfloat16")
    want = rmsnorm_fwd(x.copy(), WEIGHT, config=config, **more)
    found = rmsnorm_fwd(x, WEIGHT, out=x, config=config, **more)
    assert found.y is x
    assert np.array_equal(x.view("u2"), want.y.view("u2"))
    assert np.array_equal(found.rstd, want.rstd)


def test_heads_of_a_packed_qkv_in_place() -> None:
    packed = normal(ROWS, 4 * COLS, dtype="bfloat16")
    before, weight = packed.copy(), np.stack([WEIGHT, 2 * WEIGHT])
    q = packed[:, : 2 * COLS].reshape(ROWS, 2, COLS)
    assert np.shares_memory(q, packed)
    want = rmsnorm_fwd(q.copy(), weight).y
    rmsnorm_fwd(q, weight, out=q)
    assert np.array_equal(q.view("u2"), want.view("u2"))
    assert np.array_equal(packed[:, 2 * COLS :].view("u2"), before[:, 2 * COLS :].view("u2"))


# ---- memory --------------------------------------------------------------------------------------


def flat(*shape: int, dtype: str = "bfloat16") -> Array:
    return np.empty(shape, np.dtype(dtype))


BUFFER = np.zeros(4 * ROWS * COLS, np.dtype("bfloat16"))
A, B = (BUFFER[n * ROWS * COLS :][: ROWS * COLS].reshape(ROWS, COLS) for n in (0, 1))
AB = BUFFER[ROWS * COLS // 2 :][: ROWS * COLS].reshape(ROWS, COLS)  # half of each
LIST = BUFFER[:COLS]
FORWARD_OVERLAPS: list[tuple[str, dict[str, Any], str]] = [
    ("out, bias", {"out": A, "bias": LIST}, "out overlaps bias"),
    ("out, residual", {"out": A, "residual": A}, "out overlaps residual"),
    ("out, other dtype", {"x": A, "out": A.view("f2"), "out_dtype": "fp16"}, "out overlaps x"),
    ("out, x and residual", {"x": A, "out": A, "residual": A}, "out overlaps residual"),
    ("out, part of x", {"x": A, "out": AB}, "out overlaps x"),
    ("residual_out, x", {"x": A, "residual": B, "residual_out": A}, "residual_out overlaps x"),
    ("both", {"out": A, "residual": B, "residual_out": AB}, "residual_out overlaps residual"),
    ("each other", {"out": A, "residual": X, "residual_out": AB}, "residual_out overlaps out"),
    ("rstd", {"rstd_out": BUFFER.view("f4")[:ROWS], "weight": LIST}, "rstd_out overlaps weight"),
    ("workspace", {"out": A, "workspace": BUFFER}, "out overlaps workspace"),
    (
        "scales", {
            "out": flat(ROWS, COLS, dtype="float8_e4m3fn"), "out_dtype": "fp8", "scale": "dynamic",
            "scale_out": BUFFER.view("f4")[:ROWS], "rstd_out": BUFFER.view("f4")[1 : ROWS + 1],
        }, "scale_out overlaps rstd_out",
    ),
    (
        "the scale", {
            "out_dtype": "fp8", "scale": BUFFER.view("f4")[:1],
            "rstd_out": BUFFER.view("f4")[:ROWS],
        }, "rstd_out overlaps scale",
    ),
]  # fmt: skip
BACKWARD_OVERLAPS: list[tuple[str, dict[str, Any], str]] = [
    ("dx, dout", {"dout": A, "dx": A}, "dx overlaps dout"),
    ("dx, x", {"x": A, "dx": AB}, "dx overlaps x"),
    ("dx, dresidual_out", {"dresidual_out": A, "dx": A}, "dx overlaps dresidual_out"),
    ("dweight, weight", {"weight": LIST, "dweight": LIST}, "dweight overlaps weight"),
    ("dbias, dweight", {"weight": flat(COLS), "dweight": LIST, "dbias": LIST}, "dbias overlaps"),
    ("dresidual, dx", {"dx": A, "dresidual": AB}, "dresidual overlaps dx"),
    ("workspace, dweight", {"weight": flat(COLS), "dweight": LIST, "workspace": BUFFER},
     "dweight overlaps workspace"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words"), [pytest.param(*case[1:], id=case[0]) for case in FORWARD_OVERLAPS]
)
def test_results_of_the_forward_over_other_arrays(
    given: dict[str, Any], words: str, no_launch: None
) -> None:
    with pytest.raises(InvalidInput, match=words):
        rmsnorm_fwd(**({"x": X} | given))


@pytest.mark.parametrize(
    ("given", "words"), [pytest.param(*case[1:], id=case[0]) for case in BACKWARD_OVERLAPS]
)
def test_results_of_the_backward_over_other_arrays(
    given: dict[str, Any], words: str, no_launch: None
) -> None:
    with pytest.raises(InvalidInput, match=words):
        rmsnorm_bwd(**({"dout": DOUT, "x": X} | given))


@pytest.mark.parametrize("name", ["x", "dout", "weight", "rstd", "dresidual_out"])
def test_a_workspace_over_an_input_is_refused(name: str, no_launch: None) -> None:
    given = {"x": X, "dout": DOUT, "weight": WEIGHT, "rstd": np.ones(ROWS, np.float32)}
    given["dresidual_out"] = RESIDUAL
    room = np.zeros(1 << 20, np.uint8)
    kept = room[4096:][: given[name].nbytes].view(given[name].dtype).reshape(given[name].shape)
    with pytest.raises(InvalidInput, match=f"workspace overlaps {name}, which it would overwrite"):
        rmsnorm_bwd(**given | {name: kept}, workspace=room)


def test_interleaved_arrays_do_not_overlap() -> None:
    buffer = np.zeros((ROWS, 2 * COLS), X.dtype)
    x, out = buffer[:, :COLS], buffer[:, COLS:]
    x[...] = X
    same(rmsnorm_fwd(x, WEIGHT, out=out, bias=BIAS).y, rmsnorm_fwd(X, WEIGHT, bias=BIAS).y)


# ---- scratch memory, and no allocation -----------------------------------------------------------


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the arrays that calls have made on the device: results, scratch and copies."""
    made: list[tuple[int, ...]] = []

    def count(library: interop.Library) -> None:
        empty = library.empty

        def counted(shape: tuple[int, ...], *args: Any) -> Any:
            made.append(shape)
            return empty(shape, *args)

        monkeypatch.setattr(library, "empty", counted)

    count(interop.NUMPY)
    count(interop.TORCH)
    return made


def preallocated(library: str) -> list[tuple[str, Callable[[], Any], dict[str, Any]]]:
    """(what, a call, the results and scratch that it can be given)."""
    x, residual, dout = (into(library, each) for each in (X, RESIDUAL, DOUT))
    weight, bias = into(library, WEIGHT), into(library, BIAS)
    rstd = into(library, np.ones(ROWS, np.float32))
    scale = into(library, np.ones(1, np.float32))

    def of(shape: tuple[int, ...], dtype: str) -> Any:
        if library == "numpy":
            return np.empty(shape, np.dtype(dtype))
        return torch.empty(shape, dtype=getattr(torch, dtype))

    def forward(**given: Any) -> Any:
        return rmsnorm_fwd(x, weight, bias=bias, residual=residual, **given)

    def plain(**given: Any) -> Any:
        return rmsnorm_fwd(x, weight, config="b64-t128-v16", **given)

    def static(**given: Any) -> Any:
        return rmsnorm_fwd(x, weight, out_dtype="fp8", scale=scale, store_rstd=False, **given)

    def dynamic(**given: Any) -> Any:
        return rmsnorm_fwd(
            x, weight, out_dtype="fp8", scale="dynamic", residual=residual,
            residual_out=residual, **given,
        )  # fmt: skip

    def backward(**given: Any) -> Any:
        return rmsnorm_bwd(
            dout, x, weight, rstd, dresidual_out=residual, need_dbias=True,
            residual_dtype="float32", **given,
        )  # fmt: skip

    def counted(**given: Any) -> Any:
        return rmsnorm_bwd(dout, x, weight, config="b64-t16-v16-reg-p2-fl", **given)

    matrix, floats = of((ROWS, COLS), "bfloat16"), of((ROWS,), "float32")
    return [
        ("forward", forward, {
            "out": matrix, "rstd_out": floats, "residual_out": of((ROWS, COLS), "bfloat16")}),
        ("shared rows", plain, {"out": matrix, "rstd_out": floats}),
        ("static", static, {"out": of((ROWS, COLS), "float8_e4m3fn")}),
        ("dynamic", dynamic, {"out": of((ROWS, COLS), "float8_e4m3fn"), "rstd_out": floats,
                              "scale_out": of((ROWS,), "float32")}),
        ("backward", backward, {
            "dx": matrix, "dweight": of((COLS,), "float32"), "dbias": of((COLS,), "float32"),
            "dresidual": of((ROWS, COLS), "float32")}),
        ("last block", counted, {"dx": matrix, "dweight": of((COLS,), "float32")}),
    ]  # fmt: skip


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("at", range(6))
def test_with_results_and_scratch_given_nothing_is_allocated(
    library: str, at: int, allocations: list[tuple[int, ...]]
) -> None:
    what, call, given = preallocated(library)[at]
    workspace = np.full(1 << 16, 0xFF, np.uint8)  # the word of a last block begins as it will
    workspace = workspace if library == "numpy" else torch.from_numpy(workspace)
    first = call(**given, workspace=workspace)
    assert allocations == [], what
    kept = [bits(array).tobytes() for array in given.values()]
    second = call(**given, workspace=workspace)  # which is a used one now
    assert allocations == [], what
    if what != "dynamic":  # whose residual has grown
        assert [bits(array).tobytes() for array in given.values()] == kept
    for made in (first, second):
        results = {id(each) for each in vars(made).values() if each is not None}
        assert {id(array) for array in given.values()} <= results
    call()
    assert len(allocations) >= len(given), "the count counts nothing"


def test_results_on_a_given_workspace_are_the_same_bits() -> None:
    for config in (None, "b64-t16-v16-reg-p2-fl", "b64-v16-2p-p1"):
        want = rmsnorm_bwd(DOUT, X, WEIGHT, config=config)
        workspace = torch.full((1 << 14,), float("nan"))
        made = rmsnorm_bwd(DOUT, X, WEIGHT, config=config, workspace=workspace)
        same(made.dweight, want.dweight)
        same(made.dx, want.dx)


def test_workspace_bytes_are_enough_and_no_more_than_that() -> None:
    cases = [
        (rr.Problem.backward(ROWS, COLS, "bf16", weight_dtype="fp32", has_rstd=False), None),
        (rr.Problem.backward(ROWS, COLS, "bf16", weight_dtype="fp32", has_rstd=False),
         "b64-t16-v16-reg-p2-fl"),
    ]  # fmt: skip
    for problem, config in cases:
        size = rr.workspace_bytes(problem, config, backend="cpu")
        rmsnorm_bwd(DOUT, X, WEIGHT, config=config, workspace=np.empty(size, np.uint8))
        short = np.empty(size, np.uint8)[: size - 1]
        with pytest.raises(InvalidInput, match=rf"workspace has {size - 1} bytes, .* wants {size}"):
            rmsnorm_bwd(DOUT, X, WEIGHT, config=config, workspace=short)
    assert rr.workspace_bytes(rr.Problem.forward(ROWS, COLS, "bf16"), backend="cpu") == 0
    assert rr.workspace_bytes(rr.Problem.backward(0, COLS, "bf16"), backend="cpu") == 0


def test_workspace_bytes_refuses_what_a_call_would() -> None:
    with pytest.raises(InvalidConfig, match="does not fit"):
        rr.workspace_bytes(rr.Problem.backward(9, 96, "bf16"), "b64-v2", backend="cpu")
    with pytest.raises(InvalidInput, match="give a Problem"):
        rr.workspace_bytes((9, 96), backend="cpu")


READ_ONLY = np.zeros(4096, np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    "workspace",
    [
        np.zeros(4096, np.float32)[::2],
        np.zeros(4096, np.uint8)[1:],
        READ_ONLY,
        torch.zeros(4096, requires_grad=True),
    ],
    ids=["strided", "misaligned", "read-only", "of autograd"],
)
def test_a_workspace_that_cannot_be_used(workspace: Any, no_launch: None) -> None:
    with pytest.raises(InvalidInput, match="workspace is not contiguous, not writable or not"):
        rmsnorm_bwd(DOUT, X, WEIGHT, workspace=workspace)

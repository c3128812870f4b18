"""rms_norm and RMSNorm with more than x and a weight, on CPU tensors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch_cases as plain  # noqa: E402
import torch_whole_cases as cases  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_whole_cases import BF16, CASES, FP16, FP32, Case  # noqa: E402

from rmsnorm_raw import nn  # noqa: E402
from rmsnorm_raw.errors import InvalidConfig, InvalidInput  # noqa: E402
from rmsnorm_raw.nn import whole  # noqa: E402

FORWARD = torch.ops.rmsnorm_raw.rmsnorm_whole_fwd
BACKWARD = torch.ops.rmsnorm_raw.rmsnorm_whole_bwd
COLS = plain.COLS
FP8 = torch.float8_e4m3fn


@pytest.fixture(params=["formula", "simulator"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("RMSNORM_RAW_BACKEND", raising=False)
    if request.param == "simulator":
        monkeypatch.setenv("RMSNORM_RAW_BACKEND", "cpu")
    return str(request.param)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(backend: str, case: Case) -> None:
    cases.check(nn.rms_norm, case, "cpu")


@pytest.mark.parametrize(
    "dtypes", [(BF16, BF16), (FP16, FP16), (BF16, FP32), (FP16, BF16), (FP32, FP32), (FP32, BF16)],
    ids=str,
)  # fmt: skip
def test_the_families_round_as_their_own_modules_do(dtypes: tuple[Any, Any]) -> None:
    """Bit for bit, in the plain formula: Llama's is in the promoted dtype, Gemma's in x's."""
    x, weight = plain.maker(dtypes[0], "cpu")(64, COLS), plain.maker(dtypes[1], "cpu", 1)(COLS)
    hidden = x.to(FP32)
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
    llama = weight * hidden.to(x.dtype)
    promoted = torch.promote_types(*dtypes)
    got = nn.rms_norm(x, weight, 1e-6, casting="llama", out_dtype=promoted)
    assert plain.same(got, llama)
    gemma = (hidden * (1.0 + weight.float())).type_as(x)
    assert plain.same(nn.rms_norm(x, weight, 1e-6, casting="gemma", weight_offset=1.0), gemma)
    if dtypes == (BF16, BF16):
        assert not plain.same(nn.rms_norm(x, weight, 1e-6), llama)


def test_an_fp32_residual_is_rounded_once(backend: str) -> None:
    x, r = plain.maker(BF16, "cpu")(5, COLS), plain.maker(BF16, "cpu", 1)(5, COLS)
    _, out = nn.rms_norm(x, residual=r, prenorm=True, residual_dtype=FP32)
    assert plain.same(out, x.float() + r.float())
    y, out = nn.rms_norm(x, residual=r, prenorm=True)
    assert plain.same(out, (x.float() + r.float()).to(BF16))
    # the variance is that of the sum before it is rounded
    close = nn.rms_norm(x.float() + r.float(), out_dtype=BF16)
    assert (y == close).float().mean() > 0.99


def test_prenorm_without_a_residual(backend: str) -> None:
    x = plain.maker(BF16, "cpu")(5, COLS)
    y, out = nn.rms_norm(x, prenorm=True)
    assert out is x
    assert plain.same(y, nn.rms_norm(x))
    x.requires_grad_()
    y, out = nn.rms_norm(x, prenorm=True)
    assert plain.same(out, x)
    assert out.data_ptr() != x.data_ptr()


def test_residual_out_is_never_x_where_a_gradient_is_wanted(backend: str) -> None:
    x = torch.ones(3, COLS, requires_grad=True)
    _, residual_out = nn.rms_norm(x, torch.ones(COLS), prenorm=True)
    residual_out.add_(1)  # torch refuses this of a view
    assert torch.equal(x, torch.ones(3, COLS))
    given = x.detach()
    made = FORWARD(given, None, None, None, None, 1e-6, residual_out_dtype=FP32)
    assert made[2].data_ptr() != given.data_ptr()


def test_dbias_of_one_row_is_not_dout(backend: str) -> None:
    dout, h = torch.ones(COLS), torch.ones(COLS)
    made = BACKWARD(dout, h, None, torch.ones(()), None, 0.0, False, False, None, None, FP32)
    assert torch.equal(made[2], dout)
    assert made[2].data_ptr() != dout.data_ptr()


@pytest.mark.parametrize("way", ["eager", "operator"])
def test_residual_out_depends_on_no_weight(backend: str, way: str) -> None:
    weight, residual = torch.ones(COLS, requires_grad=True), torch.ones(3, COLS)
    norm = nn.rms_norm if way == "eager" else torch.compile(nn.rms_norm, backend="aot_eager")
    y, residual_out = norm(torch.ones(3, COLS), weight, residual=residual, prenorm=True)
    assert (y.requires_grad, residual_out.requires_grad) == (True, False)
    y.sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("only", ["y", "residual_out"])
def test_one_output_alone_has_gradients(backend: str, only: str) -> None:
    case = Case(residual=FP32, more={"prenorm": True})
    given = cases.made(case, "cpu")
    y, out = cases.called(nn.rms_norm, case, given)
    if only == "y":
        given.dresidual_out = None
        grads = torch.autograd.grad(y, given.leaves, given.dout)
        h, rstd = cases.check_forward(case, given, y, out)
        cases.check_backward(case, given, h, rstd, grads)
    else:
        dx, dweight, dresidual = torch.autograd.grad(
            out, given.leaves, given.dresidual_out, allow_unused=True
        )
        assert dweight is None
        assert plain.same(dx, given.dresidual_out.to(BF16))
        assert plain.same(dresidual, given.dresidual_out)


@pytest.mark.parametrize("leaf", range(4))
def test_one_input_alone_wants_a_gradient(backend: str, leaf: int) -> None:
    case = Case(BF16, FP32, FP32, FP32, {"prenorm": True})
    given = cases.made(case, "cpu")
    want = cases.gradients(case, given, *cases.called(nn.rms_norm, case, given))[leaf]
    for index, tensor in enumerate(given.leaves):
        tensor.requires_grad_(index == leaf)
    y, out = cases.called(nn.rms_norm, case, given)
    if leaf in (1, 2):  # residual_out depends on neither weight nor bias
        (got,) = torch.autograd.grad(y, given.leaves[leaf], given.dout)
    else:
        (got,) = torch.autograd.grad(
            (y, out), given.leaves[leaf], (given.dout, given.dresidual_out)
        )
    assert plain.same(got, want)


def test_a_gradient_that_is_one_number_repeated(backend: str) -> None:
    case = Case(BF16, FP32, FP32, BF16, {"prenorm": True}, "3-D")
    given = cases.made(case, "cpu")
    y, out = cases.called(nn.rms_norm, case, given)
    grads = torch.autograd.grad(y.sum() + out.sum(), given.leaves)
    given.dout, given.dresidual_out = torch.ones_like(y), torch.ones_like(out)
    h, rstd = cases.check_forward(case, given, y, out)
    cases.check_backward(case, given, h, rstd, grads)


def test_weights_of_several_dimensions_are_those_of_one(backend: str) -> None:
    """As torch's normalized_shape; per_head=True means another thing by the same shape."""
    x, r = (plain.maker(FP32, "cpu", seed)(5, 4, 6) for seed in (0, 1))
    w, b = (plain.maker(FP32, "cpu", seed)(4, 6) for seed in (2, 3))
    more = {"prenorm": True, "weight_offset": 0.5}
    got = nn.rms_norm(x, w, bias=b, residual=r, **more)
    flat = nn.rms_norm(x.flatten(1), w.flatten(), bias=b.flatten(), residual=r.flatten(1), **more)
    for one, other in zip(got, flat, strict=True):
        assert plain.same(one, other.view(x.shape))
    heads = nn.rms_norm(x, w, per_head=True)
    rows = [nn.rms_norm(x[:, head], w[head]) for head in range(4)]
    assert plain.same(heads, torch.stack(rows, 1))
    assert not torch.allclose(heads, nn.rms_norm(x, w))
    y, scale = nn.rms_norm(x, w, scale="dynamic", out_dtype=FP8)
    assert (y.shape, scale.shape) == (x.shape, (5,))


# ---- 8 bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [FP8, torch.float8_e4m3fnuz], ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_scale_of_each_row(backend: str, with_residual: bool, fp8: Any) -> None:
    make = plain.maker(BF16, "cpu")
    if (backend, fp8) == ("simulator", torch.float8_e4m3fnuz):
        with pytest.raises(InvalidConfig, match="gfx950 converts to"):
            nn.rms_norm(make(2, 7, COLS), out_dtype=fp8, scale="dynamic")
        return
    x, r = make(2, 7, COLS), make(2, 7, COLS) if with_residual else None
    x[0, 3] = 0
    if with_residual:
        r[0, 3] = 0
    w = 1 + 0.1 * make(COLS)
    exact = nn.rms_norm(x, w, residual=r, out_dtype=FP32)
    results = nn.rms_norm(x, w, residual=r, out_dtype=fp8, scale="dynamic", prenorm=with_residual)
    y, scale = results[0], results[-1]
    assert (y.dtype, y.shape) == (fp8, x.shape)
    assert (scale.dtype, scale.shape) == (FP32, (2, 7))
    largest = torch.finfo(fp8).max
    torch.testing.assert_close(
        scale, (exact.abs().amax(-1) / largest).clamp(min=2.0**-100), rtol=1e-5, atol=0
    )
    back = y.float() * scale.unsqueeze(-1)
    half = torch.maximum(exact.abs() * 2.0**-4, scale.unsqueeze(-1) * 2.0**-10)
    assert ((back - exact).abs() <= half * 1.001).all()
    assert y.float().abs().amax() == largest
    assert (y[0, 3].float() == 0).all()
    if with_residual:
        assert plain.same(results[1], (x.float() + r.float()).to(BF16))


def test_a_scale_of_a_row_passes_over_nan(backend: str) -> None:
    x, weight = torch.tensor([[1.0, -1.0, 1.0, -1.0]]), torch.tensor([1.0, 2.0, torch.nan, 4.0])
    y, scale = nn.rms_norm(x, weight, out_dtype=FP8, scale="dynamic")
    assert torch.allclose(scale, torch.tensor([4 / 448]))
    want = torch.tensor([[112.0, -224.0, torch.nan, -448.0]])
    assert torch.equal(y.float().nan_to_num(7), want.nan_to_num(7))


def test_a_scale_that_is_given(backend: str) -> None:
    x, w = plain.maker(BF16, "cpu")(7, COLS), plain.maker(FP32, "cpu", 1)(COLS)
    scale = torch.tensor([0.01])
    y = nn.rms_norm(x, w, out_dtype=FP8, scale=scale)
    exact = nn.rms_norm(x, w, out_dtype=FP32) / scale
    assert exact.abs().amax() > 448  # what is larger than the dtype's largest number becomes that
    want = exact.clamp(-448, 448).to(FP8).float()
    assert torch.isclose(y.float(), want, rtol=2.0**-3, atol=2.0**-9).all()
    assert (y.float() == want).float().mean() > 0.99


@pytest.mark.parametrize("shape", [(3, 0), (0, COLS)])
def test_no_elements(backend: str, shape: tuple[int, int]) -> None:
    x, r = torch.ones(shape, dtype=BF16), torch.ones(shape)
    y, out, scale = nn.rms_norm(x, residual=r, prenorm=True, out_dtype=FP8, scale="dynamic")
    assert (y.shape, out.shape, scale.shape) == (shape, shape, shape[:1])
    assert (scale == 2.0**-100).all()
    w, b = (torch.ones(shape[1:]).requires_grad_() for _ in range(2))
    y, out = nn.rms_norm(x.requires_grad_(), w, bias=b, residual=r.requires_grad_(), prenorm=True)
    grads = torch.autograd.grad((y.sum(), out.sum()), (x, w, b, r))
    assert [grad.shape for grad in grads] == [shape, shape[1:], shape[1:], shape]
    assert not any(grad.any() for grad in grads)


def test_8_bits_have_no_gradient(backend: str) -> None:
    x = torch.ones(3, COLS, requires_grad=True)
    for scale in ("dynamic", torch.ones(1)):
        with pytest.raises(InvalidInput, match=r"no gradient.*torch\.no_grad"):
            nn.rms_norm(x, out_dtype=FP8, scale=scale)
        with torch.no_grad():
            nn.rms_norm(x, out_dtype=FP8, scale=scale)


# ---- in place ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["matrix", "rows apart", "every other column", "4-D"])
@pytest.mark.parametrize("prenorm", [True, False])
def test_a_residual_in_place(backend: str, layout: str, prenorm: bool) -> None:
    x, r = (plain.LAYOUTS[layout](plain.maker(BF16, "cpu", seed)) for seed in (0, 1))
    y, want = nn.rms_norm(x, residual=r.clone(), prenorm=True)
    was = r._version
    got = nn.rms_norm(x, residual=r, prenorm=prenorm, residual_inplace=True)
    if prenorm:
        got, out = got
        assert out is r
    assert plain.same(got, y)
    assert plain.same(r, want)
    assert r._version > was
    with torch.inference_mode():
        r2 = torch.zeros(x.shape, dtype=BF16)
        nn.rms_norm(x, residual=r2, residual_inplace=True)
        assert plain.same(r2, x)


def test_a_residual_in_place_that_is_x_itself(backend: str) -> None:
    x = plain.maker(BF16, "cpu")(5, COLS)
    twice = x + x
    want = nn.rms_norm(twice)
    assert plain.same(nn.rms_norm(x, residual=x, residual_inplace=True), want)
    assert plain.same(x, twice)


def test_a_residual_in_place_that_overlaps_x(backend: str) -> None:
    """Rows of x are written while others are still to be read."""
    memory = plain.maker(BF16, "cpu")(301, COLS)
    x, r = memory[:300], memory[1:]
    want, out = nn.rms_norm(x, residual=r.clone(), prenorm=True)
    assert plain.same(nn.rms_norm(x, residual=r, residual_inplace=True), want)
    assert plain.same(r, out)


def test_no_gradient_goes_through_what_is_written_in_place(backend: str) -> None:
    x, r = torch.ones(3, COLS, requires_grad=True), torch.ones(3, COLS)
    with pytest.raises(InvalidInput, match="residual_inplace=True overwrites"):
        nn.rms_norm(x, residual=r, residual_inplace=True)
    assert (r == 1).all()
    kept = (r.requires_grad_() * 2).requires_grad_()
    y = kept.sin()
    with torch.no_grad():
        nn.rms_norm(x, residual=kept, residual_inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- what no kernel can serve --------------------------------------------------------------------

ONES = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"residual": torch.ones(3, 5)}, r"residual is float32 \(3, 5\)"),
        ({"residual": torch.ones(1, 4)}, r"residual is float32 \(1, 4\)"),
        ({"residual": torch.ones(3, 4).int()}, "int32"),
        ({"residual": [1.0]}, "residual is list"),
        ({"residual": torch.ones(3, 4, dtype=torch.float64)}, "float64"),
        ({"bias": torch.ones(5)}, "bias has shape"),
        ({"bias": torch.ones(4, device="meta")}, "bias is on meta"),
        ({"bias": torch.ones(4).to_sparse()}, "bias is of layout"),
        ({"weight": torch.ones(3, 4), "bias": torch.ones(4)}, "the weight's"),
        ({"casting": "mistral"}, "casting is 'mistral'"),
        ({"out_dtype": "bf16"}, r"out_dtype is 'bf16': pass a torch.dtype"),
        ({"out_dtype": torch.float64}, "float64"),
        ({"out_dtype": torch.int8}, "int8"),
        ({"out_dtype": FP8}, "scale"),
        ({"scale": "dynamic"}, "scale"),
        ({"scale": "static", "out_dtype": FP8}, "scale is 'static': pass a tensor"),
        ({"scale": torch.ones(2), "out_dtype": FP8}, "pass one float32 number"),
        ({"scale": 1.0, "out_dtype": FP8}, "scale is 1.0: pass a tensor of one float32"),
        ({"weight_offset": 1.0}, "there is none"),
        ({"weight": torch.ones(4), "weight_offset": float("nan")}, "finite"),
        ({"per_head": True}, "there is none"),
        ({"per_head": True, "weight": torch.ones(4)}, "does not end with it"),
        ({"residual_inplace": True}, "no residual to write to"),
        ({"residual_inplace": True, "prenorm": True}, "no residual to write to"),
        (
            {"residual": ONES[:1].expand(3, 4), "residual_inplace": True},
            "as repeated rows do",
        ),
        (
            {"residual": torch.ones(9).as_strided((3, 4), (2, 1)), "residual_inplace": True},
            "elements overlap",
        ),
        ({"weight_offset": "1"}, "weight_offset is '1': pass a number"),
        ({"weight_offset": None}, "weight_offset is None: pass a number"),
        ({"weight_offset": 10**400}, "weight_offset is a number that no float can hold"),
        ({"casting": ["llama"]}, "casting is"),
        ({"weight_offset": [1]}, "pass a number"),
        (
            {"residual": torch.ones(3, 4), "residual_inplace": True, "residual_dtype": BF16},
            "in place it is the residual's",
        ),
    ],
)
def test_what_no_kernel_can_serve(backend: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        nn.rms_norm(ONES, **more)


# ---- registered operators ------------------------------------------------------------------------

OPERATED = [
    Case(BF16, FP32, FP32, FP32, {"prenorm": True, "weight_offset": 0.5}),
    Case(BF16, BF16, more={"casting": "llama", "out_dtype": FP32}),
    Case(bias_dtype=BF16, layout="heads of packed qkv", more={"per_head": True}),
    Case(FP16, None, residual=FP16),
    Case(more={"prenorm": True}),
]


@pytest.mark.parametrize("case", OPERATED, ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_gives_the_same_bits_in_one_graph(backend: str, case: Case, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(nn.rms_norm, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    given = cases.made(case, "cpu")
    results = []
    for function in (nn.rms_norm, compiled):
        y, out = cases.called(function, case, given)
        results.append([y, *([out] if out is not None else [])])
        results[-1] += cases.gradients(case, given, y, out)
    assert all(map(plain.same, *results))
    with torch.no_grad():
        y, out = cases.called(compiled, case, given)
    assert plain.same(y, results[0][0])


def test_a_dynamic_m_is_compiled_once(backend: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(nn.rms_norm, fullgraph=True, dynamic=True, backend=counter)
    make = plain.maker(BF16, "cpu")
    w = make(COLS)
    counts = []
    for rows in (5, 6, 17):
        x, r = make(rows, COLS), make(rows, COLS)
        got = compiled(x, w, residual=r, prenorm=True)
        assert all(map(plain.same, got, nn.rms_norm(x, w, residual=r, prenorm=True)))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


@pytest.mark.parametrize("scale", ["dynamic", torch.tensor([0.5])])
def test_compiled_inference(backend: str, scale: Any) -> None:
    """8 bits, and a residual in place."""
    torch._dynamo.reset()
    compiled = torch.compile(nn.rms_norm, fullgraph=True, backend="aot_eager")
    x = plain.maker(BF16, "cpu")(5, COLS)
    residuals = [plain.maker(BF16, "cpu", 1)(5, COLS) for _ in range(2)]
    results = [
        function(x, residual=r, prenorm=True, residual_inplace=True, out_dtype=FP8, scale=scale)
        for function, r in zip((nn.rms_norm, compiled), residuals, strict=True)
    ]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.float(), other.float())
    assert plain.same(*residuals)


def test_inductor() -> None:
    torch._dynamo.reset()
    module = nn.RMSNorm(COLS, bias=True, weight_offset=1.0, casting="gemma", dtype=BF16)
    x, r = plain.maker(BF16, "cpu")(4, COLS), plain.maker(BF16, "cpu", 1)(4, COLS)
    compiled = torch.compile(module, fullgraph=True)
    got, want = (m(x, residual=r, prenorm=True) for m in (compiled, module))
    assert all(map(plain.same, got, want))


def test_opcheck(backend: str) -> None:
    case = Case(BF16, FP32, FP32, FP32, {"prenorm": True})
    given = cases.made(case, "cpu")
    x, w, b, r = given.leaves
    torch.library.opcheck(FORWARD, (x, w, b, r, None, 1e-6, 0.5, "none", False, FP16, FP32))
    torch.library.opcheck(FORWARD, (x, w, None, None, None, 1e-6, 0.0, "llama"))
    heads = plain.maker(BF16, "cpu")(4, 3, COLS)
    torch.library.opcheck(
        FORWARD, (heads, torch.ones(3, COLS), None, None, None, 1e-6, 0.0, "none", True)
    )
    x, w, b, r = (leaf.detach() for leaf in given.leaves)
    torch.library.opcheck(FORWARD, (x, w, b, r, None, 1e-6, 0.0, "none", False, FP8, FP32, True))
    _, rstd, h, _ = FORWARD(x, w, b, r, None, 1e-6, residual_out_dtype=FP32)
    torch.library.opcheck(
        BACKWARD,
        (given.dout, h, w, rstd, given.dresidual_out, 0.5, False, True, BF16, FP32, FP16),
    )
    torch.library.opcheck(
        BACKWARD, (given.dout, h, None, rstd, None, 0.0, False, False, None, None, FP32)
    )


def test_the_operators_own_backward_says_what_it_lacks(backend: str) -> None:
    x, r = (torch.ones(3, COLS, requires_grad=True) for _ in range(2))
    y = FORWARD(x, None, None, r, None, 1e-6)[0]
    with pytest.raises(InvalidInput, match="residual_out was not asked for"):
        y.sum().backward()


def test_tensors_that_stand_for_others_see_the_operator(backend: str) -> None:
    x = torch.empty(3, COLS, dtype=BF16, device="meta")
    y, out, scale = nn.rms_norm(x, residual=x.float(), prenorm=True, out_dtype=FP8, scale="dynamic")
    assert (y.dtype, out.dtype, scale.shape) == (FP8, FP32, (3,))
    assert {t.device.type for t in (y, out, scale)} == {"meta"}


# ---- derivatives of derivatives ------------------------------------------------------------------


@pytest.mark.parametrize("way", ["eager", "operator"])
@pytest.mark.parametrize(
    "more",
    [{"prenorm": True}, {"prenorm": True, "weight_offset": 0.5}, {"per_head": True}],
    ids=str,
)
def test_double_backward(way: str, more: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    lists = (2, 5) if "per_head" in more else (5,)
    given = make(3, 2, 5), make(*lists), make(*lists), make(3, 2, 5)

    def call(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        if way == "eager":
            return nn.rms_norm(x, weight, 1e-3, bias=bias, residual=residual, **more)
        y, _, out, _ = FORWARD(
            x, weight, bias, residual, None, 1e-3, more.get("weight_offset", 0.0), "none",
            "per_head" in more, None, torch.float64,
        )  # fmt: skip
        return (y, out) if "prenorm" in more else y

    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, given)


def test_forward_mode_is_the_formulas(backend: str) -> None:
    make = plain.maker(FP32, "cpu")
    given = make(4, COLS), make(COLS), make(COLS), make(4, COLS)
    tangents = make(4, COLS), make(COLS), make(COLS), make(4, COLS)

    def reference(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        h = x + residual
        normalised = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        return normalised * (weight + 1) + bias, h

    def ours(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        return nn.rms_norm(
            x, weight, 1e-6, bias=bias, residual=residual, weight_offset=1.0, prenorm=True
        )

    torch.testing.assert_close(
        torch.func.jvp(ours, given, tangents), torch.func.jvp(reference, given, tangents)
    )


def test_vmap(backend: str) -> None:
    make = plain.maker(BF16, "cpu")
    x, r, w = make(3, 4, COLS), make(3, 4, COLS), make(COLS)

    def call(x: Any, r: Any) -> Any:
        return nn.rms_norm(x, w, residual=r, prenorm=True, casting="llama")

    for got, want in zip(torch.func.vmap(call)(x, r), call(x, r), strict=True):
        assert plain.same(got, want)


def test_what_is_kept_for_backward(backend: str) -> None:
    """residual_out in x's place, and no copy of what is strided."""
    case = Case(BF16, FP32, FP32, FP32, {"prenorm": True}, "every other column")
    given = cases.made(case, "cpu")
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, out = cases.called(nn.rms_norm, case, given)
    assert [t.data_ptr() for t in kept[:2]] == [out.data_ptr(), given.weight.data_ptr()]
    assert [tuple(t.shape) for t in kept[2:]] == [(5,)]  # rstd
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        nn.rms_norm(given.x, given.weight, prenorm=True)
    assert kept[0].data_ptr() == given.x.data_ptr()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(backend: str, reentrant: bool) -> None:
    case = Case(BF16, FP32, FP32, FP32)
    given = cases.made(case, "cpu")

    def block(x: Any, residual: Any) -> Any:
        y, out = nn.rms_norm(x, given.weight, bias=given.bias, residual=residual, prenorm=True)
        return nn.rms_norm(y.sin(), given.weight, residual=out, casting="llama")

    results = []
    for y in (
        block(given.x, given.residual),
        checkpoint(block, given.x, given.residual, use_reentrant=reentrant),
    ):
        y.backward(given.dout)
        results.append((y, *(leaf.grad for leaf in given.leaves)))
        for leaf in given.leaves:
            leaf.grad = None
    assert all(map(plain.same, *results))


def test_torch_func_grad_is_refused(backend: str) -> None:
    x = plain.maker(FP32, "cpu")(3, COLS)
    with pytest.raises(InvalidInput, match=r"torch\.func\.grad"):
        torch.func.grad(lambda x: nn.rms_norm(x, residual=x).sum())(x)


def test_export(backend: str) -> None:
    module = nn.RMSNorm(COLS, casting="llama", dtype=BF16)
    x = plain.maker(BF16, "cpu")(7, COLS)
    rows = torch.export.Dim("rows")
    exported = torch.export.export(module, (x[:3],), dynamic_shapes=({0: rows},))
    assert plain.same(exported.module()(x), module(x))


def test_autocast_leaves_the_dtypes_alone(backend: str) -> None:
    case = Case(FP32, FP32, FP32, FP32, {"prenorm": True})
    given = cases.made(case, "cpu")
    want = cases.called(nn.rms_norm, case, given)
    with torch.autocast("cpu", BF16):
        got = cases.called(nn.rms_norm, case, given)
    assert all(map(plain.same, got, want))


# ---- the module ----------------------------------------------------------------------------------


def test_the_modules_extras() -> None:
    module = nn.RMSNorm(COLS, 1e-5, bias=True, weight_offset=1.0, casting="gemma", out_dtype=FP32)
    assert sorted(module.state_dict()) == ["bias", "weight"]
    assert (module.weight == 0).all()
    assert (module.bias == 0).all()
    assert repr(module) == (
        f"RMSNorm(({COLS},), eps=1e-05, elementwise_affine=True, bias=True, weight_offset=1.0, "
        "casting='gemma', out_dtype=torch.float32)"
    )
    with torch.no_grad():
        module.weight.copy_(torch.randn(COLS))
        module.bias.copy_(torch.randn(COLS))
    x, r = plain.maker(BF16, "cpu")(3, COLS), plain.maker(BF16, "cpu", 1)(3, COLS)
    want = nn.rms_norm(
        x, module.weight, 1e-5, bias=module.bias, residual=r, prenorm=True, weight_offset=1.0,
        out_dtype=FP32,
    )  # fmt: skip
    for same in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(map(plain.same, same(x, residual=r, prenorm=True), want))
    with pytest.raises(TypeError, match="scale: RMSNorm takes"):
        nn.RMSNorm(COLS, scale="dynamic")


def test_a_module_of_several_dimensions() -> None:
    x, r = plain.maker(FP32, "cpu")(5, 4, 6), plain.maker(FP32, "cpu", 1)(5, 4, 6)
    heads = nn.RMSNorm((4, 6), per_head=True, bias=True)
    with torch.no_grad():
        heads.weight.copy_(torch.randn(4, 6))
    assert plain.same(heads(x), nn.rms_norm(x, heads.weight, bias=heads.bias, per_head=True))
    bare = nn.RMSNorm((4, 6), elementwise_affine=False)
    y, out = bare(x, residual=r, prenorm=True)
    want, total = nn.rms_norm(x.flatten(1), residual=r.flatten(1), prenorm=True)
    assert plain.same(y, want.view(x.shape))
    assert plain.same(out, total.view(x.shape))


def test_a_swapped_class_takes_a_residual_too() -> None:
    module = torch.nn.RMSNorm(COLS)
    module.__class__ = nn.RMSNorm
    x, r = plain.maker(FP32, "cpu")(3, COLS), plain.maker(FP32, "cpu", 1)(3, COLS)
    got = module(x, r, prenorm=True)
    want = nn.rms_norm(x, module.weight, residual=r, prenorm=True)
    assert all(map(plain.same, got, want))


def test_the_signature_is_there_to_read() -> None:
    import inspect

    names = list(inspect.signature(nn.rms_norm).parameters)
    assert names[:3] == ["x", "weight", "eps"]
    assert set(names[3:]) == set(nn.norm.Keywords.__annotations__)
    with pytest.raises(TypeError, match="scales"):
        nn.rms_norm(ONES, scales="dynamic")


def test_the_plain_call_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where keywords say what is so anyway."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the long way")

    monkeypatch.setattr(whole, "call", refuse)
    x, w = torch.ones(3, COLS), torch.ones(COLS)
    nn.rms_norm(x, w)
    nn.RMSNorm(COLS)(x)
    nn.rms_norm(x, w, casting="llama", out_dtype=FP32, weight_offset=0.0, prenorm=False)
    with pytest.raises(AssertionError, match="the long way"):
        nn.rms_norm(x, w, prenorm=True)

"""Reports from users of such kernels, about the residual and packed heads; see test_cases.py."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import whole_formula as whole

from rmsnorm_raw import launch, rmsnorm_bwd, rmsnorm_fwd
from rmsnorm_raw.problem import Problem

torch = pytest.importorskip("torch", reason="torch is not installed")

import library_arrays  # noqa: E402
import torch_cases as cases  # noqa: E402

from rmsnorm_raw import nn  # noqa: E402

Array = np.ndarray
DTYPES = ("float16", "bfloat16", "float32")
#: a forward and a backward of each path
PATHS = [
    ("b64-t32-v8-reg", "b64-t32-v8-reg-p1"), ("b256-t128-v8-pp-p1",) * 2,
    ("b128-t64-v8-lds3-p1",) * 2, ("b64-t64-v8-2p", "b256-t256-v8-2p-p1"),
]  # fmt: skip
each_path = pytest.mark.parametrize(("forward", "backward"), PATHS, ids=[p[1] for p in PATHS])


normal = functools.partial(library_arrays.normal, dtype="bfloat16")


def same(one: Array, other: Array) -> bool:
    return (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())


@pytest.fixture(params=["formula", "simulator"])
def nn_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMSNORM_RAW_BACKEND", "cpu" if request.param == "simulator" else "")


# ---- 2: quack PR#53, #52, the residual's gradient ------------------------------------------------


@each_path
def test_the_residuals_gradient_is_added_after_the_norms_backward_case_2(
    forward: str, backward: str
) -> None:
    """Without a dout it comes through to the bit; added before, the norm would project it."""
    h, dout, dres = (normal(5, 512, seed=seed) for seed in range(3))
    weight = normal(512, dtype="float32", seed=3)
    rstd = rmsnorm_fwd(h, weight, config=forward).rstd
    alone = rmsnorm_bwd(dout, h, weight, rstd, config=backward)
    none = rmsnorm_bwd(0 * dout, h, weight, rstd, dresidual_out=dres, config=backward)
    assert same(none.dx, dres)
    zero = rmsnorm_bwd(dout, h, weight, rstd, dresidual_out=0 * dres, config=backward)
    assert same(zero.dx, alone.dx)
    both = rmsnorm_bwd(
        dout, h, weight, rstd, dresidual_out=dres, residual_dtype="float32", config=backward
    )
    whole.check_backward(both, dout, h, weight, rstd=rstd, dresidual_out=dres)
    assert same(both.dweight, alone.dweight)
    assert both.dresidual.dtype == np.float32


@pytest.mark.usefixtures("nn_backend")
@pytest.mark.parametrize(
    ("prenorm", "used"), [(False, "y"), (True, "y"), (True, "residual_out"), (True, "both")]
)
def test_x_and_residual_get_the_same_gradient_case_2(prenorm: bool, used: str) -> None:
    """dx = norm_bwd(dout) + dresidual_out, and none of it is lost where h is not asked for."""
    make = cases.maker(torch.float32, "cpu")
    x, residual, dout, dres = (make(3, 5, 96) for _ in range(4))
    weight = (1 + 0.1 * make(96)).requires_grad_()
    for leaf in (x, residual):
        leaf.requires_grad_()
    results = nn.rms_norm(x, weight, cases.EPS, residual=residual, prenorm=prenorm)
    y, h = results if prenorm else (results, None)
    outputs = {"y": [y], "residual_out": [h], "both": [y, h]}[used]
    grads = {"y": [dout], "residual_out": [dres], "both": [dout, dres]}[used]
    torch.autograd.backward(outputs, grads)
    assert cases.same(x.grad, residual.grad)
    total = (x + residual).detach().double().requires_grad_()
    scale = weight.detach().double()
    want = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + cases.EPS) * scale
    expected = torch.zeros_like(total)
    if used != "residual_out":
        (expected,) = torch.autograd.grad(want, total, dout.double())
    if used != "y":
        expected = expected + dres.double()
    torch.testing.assert_close(x.grad.double(), expected, rtol=1e-5, atol=1e-5)


# ---- 5: quack 63094d3, residual_dtype ignored ----------------------------------------------------


@pytest.mark.parametrize("wanted", [None, *DTYPES])
@pytest.mark.parametrize("residual_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_out_is_the_fp32_sum_in_the_dtype_asked_for_case_5(
    dtype: str, residual_dtype: str, wanted: str | None
) -> None:
    """With float32, bit-equal to x.float() + r.float(); otherwise that, rounded once."""
    x, residual = normal(5, 96, dtype=dtype), normal(5, 96, dtype=residual_dtype, seed=1)
    result = rmsnorm_fwd(x, residual=residual, residual_dtype=wanted)
    total = x.astype(np.float32) + residual.astype(np.float32)
    assert same(result.residual_out, total.astype(wanted or residual_dtype))
    whole.check_forward(result, x, residual=residual)


@pytest.mark.usefixtures("nn_backend")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_an_fp32_residual_stream_over_16_bit_layers_case_5(dtype: Any) -> None:
    """As a model has it: the stream stays fp32, both ways, whatever the layers are in."""
    make = cases.maker(dtype, "cpu")
    x, residual = make(4, 96).requires_grad_(), make(4, 96).float().requires_grad_()
    weight = torch.ones(96, requires_grad=True)
    y, h = nn.rms_norm(x, weight, residual=residual, prenorm=True, residual_dtype=torch.float32)
    assert cases.same(h, x.float() + residual.float())
    (y.float().sum() + h.sum()).backward()
    assert (y.dtype, x.grad.dtype, residual.grad.dtype) == (dtype, dtype, torch.float32)
    assert cases.same(x.grad, residual.grad.to(dtype))


# ---- 19: aiter PR#1507, fp32 to bf16 and back in the middle of the residual path -----------------


@each_path
def test_y_is_of_the_sum_before_it_is_rounded_case_19(forward: str, backward: str) -> None:
    """256 + 0.75 is no bf16. Rounded before the norm it would put y off by up to 2**-9."""
    x = (256 + normal(5, 512, dtype="float32")).astype("bfloat16")
    residual = (0.75 + 0.1 * normal(5, 512, dtype="float32", seed=1)).astype("bfloat16")
    result = rmsnorm_fwd(x, residual=residual, out_dtype="float32", config=forward)
    total = x.astype(np.float64) + residual.astype(np.float64)

    def norm(h: Array) -> Array:
        return h / np.sqrt(np.square(h).mean(-1, keepdims=True) + 1e-6)

    np.testing.assert_allclose(result.y, norm(total), rtol=2e-6)
    rounded = total.astype("bfloat16")
    assert np.abs(norm(rounded.astype(np.float64)) / norm(total) - 1).max() > 1e-3
    assert same(result.residual_out, rounded)
    np.testing.assert_allclose(result.rstd, 1 / np.sqrt(np.square(total).mean(-1) + 1e-6), 2e-6)


@each_path
def test_dx_and_dresidual_are_one_fp32_sum_each_rounded_once_case_19(
    forward: str, backward: str
) -> None:
    """A gradient of 256 beside the norm's own of about 1: in bf16 halfway, half of it is lost."""
    h, dout = normal(5, 512), normal(5, 512, seed=1)
    dres = (256 + normal(5, 512, dtype="float32", seed=2)).astype("bfloat16")
    made = rmsnorm_bwd(dout, h, dresidual_out=dres, residual_dtype="float32", config=backward)
    whole.check_backward(made, dout, h, dresidual_out=dres)  # dresidual to fp32's last bits
    assert same(made.dx, made.dresidual.astype("bfloat16"))
    alone = rmsnorm_bwd(dout, h, config=backward).dx.astype(np.float32)
    twice = (alone + dres.astype(np.float32)).astype(np.float32)
    assert np.abs(twice - made.dresidual).max() > 1e-3


# ---- 16: vllm#24247, LightLLM#1467, q and k sliced from a packed qkv -----------------------------


TOKENS, Q, KV, DIM = 5, 6, 2, 64


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Where the kernels were told that their tensors lie, call by call."""
    seen: list[dict[str, Any]] = []
    make_plan = launch.make_plan

    def record(problem: Problem, config: Any, binary: Any, tensors: Any) -> Any:
        seen.append(dict(tensors))
        return make_plan(problem, config, binary, tensors)

    monkeypatch.setattr(launch, "make_plan", record)
    return seen


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("first", "heads"), [(0, Q), (Q, KV)], ids=["q", "k"])
def test_heads_of_a_packed_qkv_are_read_where_they_lie_case_16(
    first: int, heads: int, per_head: bool, plans: list[dict[str, Any]]
) -> None:
    """Also written: into a packed gradient, and nothing beside it."""
    qkv, dqkv = normal(TOKENS, Q + 2 * KV, DIM), normal(TOKENS, Q + 2 * KV, DIM, seed=1)
    x, dout = (packed[:, first : first + heads] for packed in (qkv, dqkv))
    weight = normal(*([heads] * per_head), DIM, dtype="float32", seed=2)
    made = rmsnorm_fwd(x, weight)
    whole.check_forward(made, x, weight)
    packed = np.full_like(qkv, 7)
    into = packed[:, first : first + heads]
    back = rmsnorm_bwd(dout, x, weight, made.rstd, dx=into)
    assert back.dx is into
    whole.check_backward(back, dout, x, weight, rstd=made.rstd)
    packed[:, first : first + heads] = 7
    assert (packed == 7).all()
    for tensors in plans:
        assert tensors["x"].address == x.ctypes.data
        assert tensors["x"][1:] == ((Q + 2 * KV) * DIM, DIM)


@pytest.mark.parametrize("per_head", [False, True])
def test_a_last_stride_that_is_not_1_is_copied_case_16(per_head: bool) -> None:
    qkv = normal(TOKENS, Q + 2 * KV, 2 * DIM)
    weight = normal(*([Q] * per_head), DIM, dtype="float32", seed=2)
    for x in (qkv[:, :Q, ::2], qkv[:, :Q, ::-2], qkv[:, :Q, :DIM][::-1], qkv[::2, 1 : Q + 1, DIM:]):
        made = rmsnorm_fwd(x, weight)
        whole.check_forward(made, x, weight)
        whole.check_backward(rmsnorm_bwd(x, x, weight), x, x, weight)


@pytest.mark.usefixtures("nn_backend")
def test_q_and_k_norms_of_an_attention_layer_case_16() -> None:
    """One packed projection, a weight a head, gradients into one packed gradient."""
    make = cases.maker(torch.bfloat16, "cpu")
    qkv = make(2, TOKENS, Q + 2 * KV, DIM).requires_grad_()
    weights = [(1 + 0.1 * make(n, DIM)).detach().requires_grad_() for n in (Q, KV)]
    parts = qkv.split([Q, KV, KV], dim=2)[:2]
    norms = [nn.rms_norm(x, w, per_head=True) for x, w in zip(parts, weights, strict=True)]
    sum(y.float().sum() for y in norms).backward()
    for x, w, y in zip(parts, weights, norms, strict=True):
        heads = [nn.rms_norm(x[:, :, h], w[h]) for h in range(w.shape[0])]
        assert cases.same(y, torch.stack(heads, 2))
        assert w.grad.shape == w.shape
    assert qkv.grad[:, :, : Q + KV].abs().sum() > 0
    assert not qkv.grad[:, :, Q + KV :].any()

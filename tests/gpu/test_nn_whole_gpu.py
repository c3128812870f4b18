"""rms_norm with more than x and a weight, and patched models, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch_cases as plain  # noqa: E402
import torch_whole_cases as cases  # noqa: E402
from torch_whole_cases import BF16, CASES, FP16, FP32, Case  # noqa: E402

from rmsnorm_raw import dtypes, interop, nn, ops, ready  # noqa: E402
from rmsnorm_raw.backends import Backend  # noqa: E402
from rmsnorm_raw.errors import InvalidInput  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
FORWARD = torch.ops.rmsnorm_raw.rmsnorm_whole_fwd
BACKWARD = torch.ops.rmsnorm_raw.rmsnorm_whole_bwd
#: some 0.2 s on an H200: the host is long done with a call before it ends
SPIN_TICKS = 400_000_000
FULL = Case(BF16, FP32, FP32, FP32, {"prenorm": True, "weight_offset": 0.5})


@pytest.fixture(autouse=True)
def device(gpu: Backend) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this torch is built for CPUs")


def make(*shape: int, dtype: Any = BF16, seed: int = 0) -> Any:
    return plain.maker(dtype, DEVICE, seed)(*shape)


def fp8() -> Any:
    """The 8-bit float that this GPU converts to."""
    where = interop.torch_device(torch.device(DEVICE, 0))
    return getattr(torch, dtypes.fp8_dtype(ready.arch_of(where)))


def step(case: Case, given: cases.Made) -> list[Any]:
    """Outputs and gradients."""
    y, out = cases.called(nn.rms_norm, case, given)
    results = [y.detach(), *([] if out is None else [out.detach()])]
    return results + cases.gradients(case, given, y, out)


def all_same(got: Any, want: Any) -> bool:
    return all(plain.same(a, b) for a, b in zip(got, want, strict=True))


# ---- right ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case: Case) -> None:
    cases.check(nn.rms_norm, case, DEVICE)


#: of each path of the ladder: few and many rows, shared rows, rings, two passes
SHAPES = [(1, 4096), (8, 4096), (300, 3000), (8192, 1024), (8, 16384), (4096, 8192), (64, 65536)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_bits_as_the_array_operations(shape: tuple[int, int]) -> None:
    x, r = make(*shape).requires_grad_(), make(*shape, dtype=FP32, seed=1).requires_grad_()
    w, b = (1 + 0.1 * make(shape[1], seed=seed) for seed in (2, 3))
    dout, dres = make(*shape, seed=4), make(*shape, dtype=FP32, seed=5)
    for leaf in (w, b):
        leaf.requires_grad_()
    more = {"bias": b, "residual": r, "weight_offset": 0.5}
    y, out = nn.rms_norm(x, w, 1e-6, prenorm=True, **more)
    got = torch.autograd.grad((y, out), (x, w, b, r), (dout, dres))
    forward = ops.rmsnorm_fwd(x, w, eps=1e-6, **more)
    assert all_same((y, out), (forward.y, forward.residual_out))
    backward = ops.rmsnorm_bwd(
        dout, forward.residual_out, w, forward.rstd, dresidual_out=dres, weight_offset=0.5,
        need_dbias=True, dx_dtype=BF16, bias_dtype=BF16, residual_dtype=FP32,
    )  # fmt: skip
    want = backward.dx, backward.dweight, backward.dbias, backward.dresidual
    assert all_same(got, want)
    with torch.no_grad():
        quiet = nn.rms_norm(x, w, 1e-6, **more)
    assert plain.same(quiet, y)


@pytest.mark.parametrize("per_head", [True, False])
def test_heads_of_a_packed_qkv_are_read_in_place(per_head: bool) -> None:
    """The same bits as of a copy, and no memory but for results, rstd and partial rows."""
    tokens, heads, cols = 2048, 32, 128
    q = make(tokens, 3, heads, cols)[:, 1]
    w = 1 + 0.1 * make(*((heads, cols) if per_head else (cols,)), seed=1)
    q, w = q.detach().requires_grad_(), w.requires_grad_()
    dout = make(tokens, heads, cols, seed=2)

    def run(x: Any) -> list[Any]:
        y = nn.rms_norm(x, w, per_head=per_head)
        return [y.detach(), *torch.autograd.grad(y, (x, w), dout)]

    got = run(q)
    if per_head:
        want = run(q.detach().contiguous().requires_grad_())
        assert all_same(got, want)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    with torch.no_grad():
        nn.rms_norm(q, w, per_head=per_head)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert peak <= q.numel() * 2
    case = Case(BF16, BF16, more={"per_head": True} if per_head else {})
    given = cases.Made(q, w, None, None, dout, None)
    h, rstd = cases.check_forward(case, given, got[0], None)
    cases.check_backward(case, given, h, rstd, got[1:])


@pytest.mark.parametrize("shape", [(7, 96), (300, 3000), (4096, 8192)], ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
def test_8_bits(shape: tuple[int, int], with_residual: bool) -> None:
    """The scales, and y within half a step of 8 bits, of y without them."""
    x, w = make(*shape), make(shape[1], seed=1)
    r = make(*shape, seed=2) if with_residual else None
    more = {"residual": r, "prenorm": True}
    exact, want_out = nn.rms_norm(x, w, out_dtype=FP32, **more)
    largest = torch.finfo(fp8()).max
    y, out, scale = nn.rms_norm(x, w, out_dtype=fp8(), scale="dynamic", **more)
    torch.testing.assert_close(scale, exact.abs().amax(-1) / largest, rtol=1e-5, atol=0)
    one = torch.tensor([0.01], device=DEVICE)
    given, given_out = nn.rms_norm(x, w, out_dtype=fp8(), scale=one, **more)
    for got, by in ((y, scale.unsqueeze(-1)), (given, one)):
        assert got.dtype == fp8()
        want = (exact / by).clamp(-largest, largest)
        half = torch.maximum(want.abs() * 2.0**-4, torch.tensor(2.0**-10, device=DEVICE))
        assert ((got.float() - want).abs() <= half * 1.001).all()
    assert all_same((out, given_out), (want_out, want_out))


@pytest.mark.parametrize("shape", [(7, 96), (4096, 8192), (64, 65536)], ids=str)
def test_a_residual_in_place(shape: tuple[int, int]) -> None:
    """The same bits, the same memory, and nothing allocated but y."""
    x, w, r = make(*shape), make(shape[1], seed=1), make(*shape, seed=2)
    want = nn.rms_norm(x, w, residual=r, prenorm=True)
    mine = r.clone()
    nn.rms_norm(x, w, residual=r.clone(), prenorm=True, residual_inplace=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, address = torch.cuda.memory_stats()["requested_bytes.all.current"], mine.data_ptr()
    y, out = nn.rms_norm(x, w, residual=mine, prenorm=True, residual_inplace=True)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert out is mine
    assert out.data_ptr() == address
    assert all_same((y, out), want)
    assert peak <= y.numel() * 2 + 4096 * shape[0]


def test_what_no_kernel_can_serve() -> None:
    x = make(3, 64)
    for name in ("bias", "residual"):
        other = make(3, 64)[0] if name == "bias" else make(3, 64)
        with pytest.raises(InvalidInput, match=f"{name} is .*cpu"):
            nn.rms_norm(x, **{name: other.cpu()})
    with pytest.raises(InvalidInput, match="pass one float32 number on cuda:0"):
        nn.rms_norm(x, out_dtype=fp8(), scale=torch.ones(1))


# ---- operators and torch.compile -----------------------------------------------------------------


def test_opcheck() -> None:
    given = cases.made(FULL, DEVICE)
    x, w, b, r = given.leaves
    torch.library.opcheck(FORWARD, (x, w, b, r, None, 1e-6, 0.5, "none", False, FP16, FP32))
    x, w, b, r = (leaf.detach() for leaf in given.leaves)
    torch.library.opcheck(FORWARD, (x, w, b, r, None, 1e-6, 0.0, "none", False, fp8(), FP32, True))
    _, rstd, h, _ = FORWARD(x, w, b, r, None, 1e-6, residual_out_dtype=FP32)
    torch.library.opcheck(
        BACKWARD,
        (given.dout, h, w, rstd, given.dresidual_out, 0.5, False, True, BF16, FP32, FP16),
    )


COMPILED = [
    FULL,
    Case(BF16, BF16, more={"casting": "llama"}),
    Case(bias_dtype=BF16, layout="heads of packed qkv", more={"per_head": True}),
]


@pytest.mark.parametrize("case", COMPILED, ids=str)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_gives_the_same_bits_in_one_graph(mode: str, case: Case) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(nn.rms_norm, fullgraph=True, dynamic=False, mode=mode)
    given = cases.made(case, DEVICE)
    want = step(case, given)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        y, out = cases.called(compiled, case, given)
        got = [y.detach().clone(), *([] if out is None else [out.detach().clone()])]
        got += cases.gradients(case, given, y, out)
        assert all_same(got, want)


# ---- streams and graphs --------------------------------------------------------------------------


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_a_graph_is_replayed_after_its_inputs_change(case: Case) -> None:
    given = cases.made(case, DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(case, given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(case, given)
    for seed in range(3):
        with torch.no_grad():
            for leaf in (*given.leaves, given.dout):
                leaf.copy_(2 * make(*leaf.shape, dtype=leaf.dtype, seed=10 + seed))
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        assert all_same(captured, step(case, given))


def test_a_side_stream_with_a_slow_producer() -> None:
    given = cases.made(FULL, DEVICE)
    filled = [leaf.detach().clone() for leaf in given.leaves]
    want = step(FULL, given)
    with torch.no_grad():
        for leaf in given.leaves:
            leaf.zero_()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN_TICKS)
        with torch.no_grad():
            for leaf, full in zip(given.leaves, filled, strict=True):
                leaf.copy_(full)
        got = step(FULL, given)
        assert not side.query(), "a call waited for the producer"
    side.synchronize()
    assert all_same(got, want)


def test_dweight_and_dbias_are_the_same_in_every_run() -> None:
    x, r = make(8192, 2048).requires_grad_(), make(8192, 2048, seed=1).requires_grad_()
    w, b = (make(2048, seed=seed).requires_grad_() for seed in (2, 3))
    dout = make(8192, 2048, seed=4)
    y, out = nn.rms_norm(x, w, bias=b, residual=r, prenorm=True)
    runs = [
        torch.autograd.grad((y, out), (x, w, b, r), (dout, dout), retain_graph=True)
        for _ in range(100)
    ]
    assert all(all_same(run, runs[0]) for run in runs)


# ---- patched models ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_a_patched_model_computes_what_it_did(family: str, dtype: Any) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from test_patch import TOKENS, tiny

    torch._dynamo.reset()
    model, tokens = tiny(family, dtype).to(DEVICE), TOKENS.to(DEVICE)

    def logits(function: Any) -> Any:
        with torch.no_grad():
            return function(input_ids=tokens, use_cache=False).logits.float()

    def gradients() -> list[Any]:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    before, want = logits(model), gradients()
    assert nn.patch(model).left == ()
    # a rounding that falls the other way moves what follows by some units of the dtype
    close = {"rtol": 0.05, "atol": 0.05} if dtype is BF16 else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(logits(model), before, **close)
    for got, gradient in zip(gradients(), want, strict=True):
        torch.testing.assert_close(got, gradient, **close)
    eager = logits(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(compiled), eager, **close)
    nn.unpatch(model)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("kind", ["LlamaRMSNorm", "GemmaRMSNorm"])
@pytest.mark.parametrize("pair", [(BF16, BF16), (FP16, FP16), (BF16, FP32)], ids=str)
def test_a_patched_norm_rounds_as_it_did(kind: str, pair: tuple[Any, Any]) -> None:
    """All but the elements whose fp32 value lies at a tie: no more than one in a thousand."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    family = {"LlamaRMSNorm": LlamaRMSNorm, "GemmaRMSNorm": GemmaRMSNorm}[kind]
    module = family(4096).to(DEVICE, pair[1])
    with torch.no_grad():
        module.weight.copy_(make(4096, dtype=pair[1], seed=1))
    x = make(256, 4096, dtype=pair[0])
    want = module(x)
    nn.patch(module)
    got = module(x)
    assert got.dtype == want.dtype
    if want.dtype is FP32:
        torch.testing.assert_close(got, want, rtol=2.0**-7, atol=0)
        near = torch.isclose(got, want, rtol=1e-5, atol=0)
    else:
        near = got == want
        torch.testing.assert_close(got, want, rtol=2.0**-6, atol=1e-6)
    assert (~near).float().mean() < 1e-3

"""Reports from users of such kernels, about the arrays that they pass; see test_cases.py."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from rmsnorm_raw import launch, rmsnorm_bwd, rmsnorm_fwd
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.problem import Problem

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch_cases as cases  # noqa: E402

from rmsnorm_raw import nn  # noqa: E402
from rmsnorm_raw.nn import plain  # noqa: E402

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def random(dtype: Any, *shape: int, seed: int = 0) -> Any:
    return cases.maker(dtype, "cpu", seed)(*shape)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Problem, dict[str, Any]]]:
    """What the kernels were given, call by call: the problem, and where its tensors lie."""
    seen: list[tuple[Problem, dict[str, Any]]] = []
    make_plan = launch.make_plan

    def record(problem: Problem, config: Any, binary: Any, tensors: Any) -> Any:
        seen.append((problem, dict(tensors)))
        return make_plan(problem, config, binary, tensors)

    monkeypatch.setattr(launch, "make_plan", record)
    return seen


# ---- 4: quack#18, torch.compile traces into DLPack on a FakeTensor -------------------------------


@pytest.mark.parametrize("simulates", [False, True], ids=["formula", "simulator"])
def test_compile_sees_an_opaque_operator_with_a_fake_case_4(
    simulates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it traces no kernel runs and no tensor is asked for its memory."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    monkeypatch.setenv("RMSNORM_RAW_BACKEND", "cpu" if simulates else "")
    torch._dynamo.reset()
    graphs: list[list[str]] = []
    touched: list[str] = []
    for name in ("forward", "backward"):
        real = getattr(plain, name)

        def watched(*args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            touched.append(name)
            assert not any(isinstance(each, torch._subclasses.FakeTensor) for each in args)
            return real(*args, **options)

        monkeypatch.setattr(plain, name, watched)

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        assert touched == ["forward"] * (len(graphs) - 1), "a kernel ran during the trace"
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    compiled = torch.compile(nn.rms_norm, fullgraph=True, backend=backend)
    x, weight = random(BF16, 5, 96).requires_grad_(), random(FP32, 96, seed=1).requires_grad_()
    dout = random(BF16, 5, 96, seed=2)
    y = compiled(x, weight)
    y.backward(dout)
    forward, backward = graphs
    assert "rmsnorm_raw.rmsnorm_fwd.default" in forward
    assert "rmsnorm_raw.rmsnorm_bwd.default" in backward
    assert touched == ["forward", "backward"]
    cases.check_backward(x.grad, weight.grad, dout, x, weight)


def test_tensors_without_memory_get_shapes_and_dtypes_case_4() -> None:
    with torch._subclasses.FakeTensorMode():
        x, weight = torch.empty(2, 3, 96, dtype=BF16), torch.empty(96)
        y, rstd = torch.ops.rmsnorm_raw.rmsnorm_fwd(x, weight, 1e-6)
        dx, dweight = torch.ops.rmsnorm_raw.rmsnorm_bwd(x, x, weight, rstd, True, True)
        assert nn.rms_norm(x, weight).shape == x.shape
    assert [(t.shape, t.dtype) for t in (y, rstd, dx, dweight)] == [
        ((2, 3, 96), BF16), ((2, 3), FP32), ((2, 3, 96), BF16), ((96,), FP32),
    ]  # fmt: skip


# ---- 16: vllm#24247, LightLLM#1467, q and k sliced from a packed qkv -----------------------------

#: (tokens, q + k + v heads, head_dim): what a projection leaves
QKV, HEADS = (5, 12, 64), {"q": slice(0, 8), "k": slice(8, 10), "v": slice(10, 12)}
VIEWS = {
    "q, heads apart": lambda qkv: qkv[:, HEADS["q"]],
    "k, heads apart": lambda qkv: qkv[:, HEADS["k"]],
    "one head": lambda qkv: qkv[:, 9],
    "one token": lambda qkv: qkv[2, HEADS["k"]],
    "k, flattened": lambda qkv: qkv.view(5, -1)[:, 8 * 64 : 10 * 64],
    "heads first": lambda qkv: qkv[:, HEADS["q"]].transpose(0, 1),
    "last stride 2": lambda qkv: qkv[:, :, ::2],
    "last stride of a token": lambda qkv: qkv.permute(1, 2, 0),
}
#: those that a kernel reads where they lie, by their row stride alone
IN_PLACE = {"one head", "one token", "k, flattened"}


@pytest.mark.parametrize("seen", VIEWS)
def test_strides_of_a_packed_qkv_are_honoured_or_copied_case_16(
    seen: str, plans: list[tuple[Problem, dict[str, Any]]]
) -> None:
    qkv, dqkv = random(BF16, *QKV), random(BF16, *QKV, seed=1)
    view = VIEWS[seen]
    x, dout = view(qkv), view(dqkv)
    weight = random(BF16, x.shape[-1], seed=2)
    y, rstd = rmsnorm_fwd(x, weight)
    cases.check_forward(y, x, weight)
    dx, dweight = rmsnorm_bwd(dout, x, weight, rstd)
    cases.check_backward(dx, dweight, dout, x, weight)
    for _, tensors in plans:
        inside = tensors["x"].address == x.data_ptr()
        assert inside or seen not in IN_PLACE
        if inside:
            assert tensors["x"].row_stride == (64 if seen == "one token" else x.stride(0))


def test_numpy_views_with_any_strides_are_right_case_16() -> None:
    """Backwards, transposed and thinned out in all dimensions; last strides of 1 and not."""
    base = np.random.default_rng(0).standard_normal((8, 6, 40)).astype(np.float32)
    steps = (slice(None), slice(None, None, 2), slice(None, None, -1), slice(1, -1))
    for axes in itertools.permutations(range(3)):
        for picks in itertools.product(steps, repeat=3):
            x = base.transpose(axes)[picks]
            y = rmsnorm_fwd(x).y
            wide = x.astype(np.float64)
            want = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + 1e-6)
            np.testing.assert_allclose(y, want, rtol=2e-6)


# ---- 17: TE PR#886, a view into a flat buffer whose base is not 16-byte aligned ------------------


@pytest.mark.parametrize("which", ["x", "weight", "dout", "out"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 6, 8])
def test_a_view_off_16_bytes_gets_narrower_vectors_and_the_right_result_case_17(
    offset: int, dtype: Any, which: str, plans: list[tuple[Problem, dict[str, Any]]]
) -> None:
    """Of a flat buffer, as parameters of an optimizer lie; no other byte of it is written."""
    element = dtype.itemsize
    flat = {name: random(dtype, 4 * 96 + 16, seed=k) for k, name in enumerate(("x", "dout", "out"))}
    flat["weight"] = random(dtype, 96 + 16, seed=3)

    def view(name: str) -> Any:
        start = (offset if name == which else 0) + -flat[name].data_ptr() % 16 // element
        size = 96 if name == "weight" else 4 * 96
        part = flat[name][start : start + size]
        return part if name == "weight" else part.view(4, 96)

    x, dout, out, weight = (view(name) for name in ("x", "dout", "out", "weight"))
    whole = flat["out"].clone()
    y, rstd = rmsnorm_fwd(x, weight, out=out)
    assert y is out
    cases.check_forward(y.contiguous(), x, weight)
    outside = torch.ones_like(whole, dtype=torch.bool)
    first = (out.data_ptr() - flat["out"].data_ptr()) // element
    outside[first : first + out.numel()] = False
    assert torch.equal(flat["out"][outside], whole[outside])
    dx, dweight = rmsnorm_bwd(dout, x, weight, rstd)
    cases.check_backward(dx, dweight, dout, x, weight)
    widest = (offset * element) & -(offset * element)
    reads = {"forward": {"x", "weight", "out"}, "backward": {"x", "weight", "dout"}}
    for problem, _ in plans:
        assert problem.alignment == (min(16, widest) if which in reads[problem.op] else 16)


def test_a_base_that_is_off_its_own_element_is_refused_in_words_case_17() -> None:
    x = np.frombuffer(bytes(4 * 96 + 1), np.uint8)[1:].view(np.float32)
    with pytest.raises(InvalidInput, match="not a multiple of its element's 4 bytes"):
        rmsnorm_fwd(x)


# ---- 20: cupy#8801, PR#9480, bf16 through DLPack without ml_dtypes -------------------------------


class Producer:
    """An array of an unknown library, which speaks DLPack."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def test_bf16_through_dlpack_works_or_names_the_package_case_20() -> None:
    x = random(BF16, 3, 96)
    try:
        y = rmsnorm_fwd(Producer(x)).y
    except InvalidInput as error:
        assert "ml_dtypes" in str(error)  # noqa: PT017
    else:
        assert y.dtype == "bfloat16"
    fp16 = rmsnorm_fwd(Producer(x.half())).y
    assert (type(fp16), fp16.dtype) == (np.ndarray, np.float16)
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    mine, theirs = rmsnorm_fwd(x).y, rmsnorm_fwd(jax.numpy.asarray(x.float(), jax.numpy.bfloat16)).y
    assert theirs.dtype == jax.numpy.bfloat16
    assert np.asarray(theirs).view(np.uint16).tolist() == cases.bits(mine).tolist()


def test_without_ml_dtypes_the_error_names_it_case_20() -> None:
    code = """
import sys
sys.modules["ml_dtypes"] = None
import rmsnorm_raw
try:
    rmsnorm_raw.array.zeros((2, 8), "bf16", backend="cpu")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ml_dtypes" in done.stdout

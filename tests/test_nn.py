"""The PyTorch front on CPU tensors: by the plain formula, and by the kernels in the simulator."""

from __future__ import annotations

import functools
import gc
import itertools
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch_cases as cases  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from rmsnorm_raw import layouts, nn, ready  # noqa: E402
from rmsnorm_raw.errors import InvalidInput  # noqa: E402
from rmsnorm_raw.nn import plain  # noqa: E402
from rmsnorm_raw.problem import Problem  # noqa: E402

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FORWARD, BACKWARD = torch.ops.rmsnorm_raw.rmsnorm_fwd, torch.ops.rmsnorm_raw.rmsnorm_bwd
COLS = cases.COLS


@pytest.fixture(params=["formula", "simulator"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("RMSNORM_RAW_BACKEND", raising=False)
    if request.param == "simulator":
        monkeypatch.setenv("RMSNORM_RAW_BACKEND", "cpu")
    return str(request.param)


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The kernels in the simulator, and the problems that they are prepared for."""
    monkeypatch.setenv("RMSNORM_RAW_BACKEND", "cpu")
    seen: list[Problem] = []
    prepare = ready.prepare

    def spy(problem: Problem, *rest: Any) -> Any:
        seen.append(problem)
        return prepare(problem, *rest)

    monkeypatch.setattr(ready, "prepare", spy)
    for cache in (layouts.forward, layouts.backward):
        cache.cache_clear()
    return seen


def tensors(
    dtype: torch.dtype = torch.bfloat16, weight_dtype: torch.dtype = torch.float32, rows: int = 5
) -> tuple[Any, Any, Any]:
    """(x, weight, dout); the first two want gradients."""
    make = cases.maker(dtype, "cpu")
    weight = 1 + 0.1 * cases.maker(weight_dtype, "cpu", seed=1)(COLS)
    x, dout = make(rows, COLS), make(rows, COLS)
    return x.requires_grad_(), weight.requires_grad_(), dout


# ---- a drop-in -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [(64,), ([3, 4], 1e-5), ((2, 3, 4), None, False), (8, 1e-6, True, "cpu", torch.float16)],
)
def test_the_module_is_made_as_torchs(arguments: tuple[Any, ...]) -> None:
    ours, theirs = nn.RMSNorm(*arguments), torch.nn.RMSNorm(*arguments)
    assert isinstance(ours, torch.nn.RMSNorm)
    assert repr(ours) == repr(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(COLS,), (4, 6), (2, 3, 4)])
def test_every_normalized_shape(backend: str, shape: tuple[int, ...], affine: bool) -> None:
    theirs = torch.nn.RMSNorm(shape, elementwise_affine=affine)
    x = torch.randn(2, 5, *shape).requires_grad_()
    expected = theirs(x)
    (dx,) = torch.autograd.grad(expected.square().sum(), x)
    theirs.__class__ = nn.RMSNorm  # as one swaps it in a finished model
    y = theirs(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    (got,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(got, dx, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_dtype", [None, *DTYPES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_eps_none_is_what_f_rms_norm_takes(
    backend: str, dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    """Rows so small that eps decides: any other eps would change y by its ratio."""
    x = torch.full((2, 64), 2.0**-14, dtype=dtype)
    weight = None if weight_dtype is None else torch.ones(64, dtype=weight_dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that mixed dtypes are slow
        expected = functional.rms_norm(x, (64,), weight, None)
    assert expected.dtype == dtype
    assert cases.same(nn.rms_norm(x, weight), expected)
    assert not cases.same(nn.rms_norm(x, weight, 1e-6), expected)


def test_float64_is_for_the_formula_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RMSNORM_RAW_BACKEND", raising=False)
    x = torch.full((2, 64), 2.0**-28, dtype=torch.float64)
    assert torch.equal(nn.rms_norm(x), functional.rms_norm(x, (64,)))
    monkeypatch.setenv("RMSNORM_RAW_BACKEND", "cpu")
    with pytest.raises(InvalidInput, match="float64"):
        nn.rms_norm(x)


# ---- right in every layout -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("pair", cases.PAIRS, ids=str)
def test_gradients(backend: str, pair: tuple[torch.dtype, torch.dtype], layout: str) -> None:
    cases.check_layout(nn.rms_norm, layout, pair, "cpu")


def test_without_a_weight(backend: str) -> None:
    x, _, dout = tensors()
    y = nn.rms_norm(x, eps=cases.EPS)
    (dx,) = torch.autograd.grad(y, x, dout)
    cases.check_forward(y, x, None)
    cases.check_backward(dx, None, dout, x, None)


def test_a_gradient_that_is_one_number_repeated(backend: str) -> None:
    _, weight, _ = tensors()
    x = cases.maker(torch.bfloat16, "cpu")(2, 5, COLS).requires_grad_()
    dx, dweight = torch.autograd.grad(nn.rms_norm(x, weight, cases.EPS).sum(), (x, weight))
    cases.check_backward(dx, dweight, torch.ones_like(x), x, weight)


def test_weights_of_any_stride(backend: str) -> None:
    x, _, dout = tensors()
    weight = torch.randn(COLS, 2)[:, 0].requires_grad_()
    y = nn.rms_norm(x, weight, cases.EPS)
    dx, dweight = torch.autograd.grad(y, (x, weight), dout)
    cases.check_forward(y, x, weight)
    cases.check_backward(dx, dweight, dout, x, weight)


def test_a_negated_view(backend: str) -> None:
    """imag of a conjugate: its memory holds the opposite sign."""
    x = torch.complex(torch.ones(4, COLS), torch.randn(4, COLS)).conj().imag
    assert x.is_neg()
    assert cases.same(nn.rms_norm(x), nn.rms_norm(x.resolve_neg()))


def test_no_columns(backend: str) -> None:
    x, weight = torch.ones(3, 0, requires_grad=True), torch.ones(0, requires_grad=True)
    y = nn.rms_norm(x, weight, 0.25)
    y.sum().backward()
    assert (y.shape, x.grad.shape, weight.grad.shape) == ((3, 0), (3, 0), (0,))


def backward(dout: Any, x: Any, rstd: Any) -> Any:
    return BACKWARD(dout, x, None, rstd, True, False)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: nn.rms_norm(torch.ones(3, 4), torch.ones(5)), r"\(5,\), and x, \(3, 4\)"),
        (lambda: nn.rms_norm(torch.ones(2, 6), torch.ones(3, 4)), r"\(3, 4\), and x, \(2, 6\)"),
        (lambda: nn.RMSNorm(4)(torch.ones(3, 5)), r"\(4,\), and x, \(3, 5\)"),
        (lambda: nn.RMSNorm(4, None, False)(torch.ones(3, 5)), "must end with"),
        (lambda: nn.RMSNorm((3, 4), None, False)(torch.ones(2, 6)), "must end with"),
        (lambda: nn.rms_norm(torch.tensor(1.0)), "no dimensions"),
        (lambda: nn.rms_norm(torch.ones(3, 4).int()), "int32"),
        (lambda: nn.rms_norm(torch.ones(3, 4), torch.ones(4, device="meta")), "on meta"),
        (lambda: backward(torch.ones(3, 4), torch.ones(3, 4), torch.ones(3, 1)), "rstd is"),
        (lambda: backward(torch.ones(3, 4), torch.ones(3, 4), torch.ones(3).double()), "rstd is"),
        (lambda: backward(torch.ones(3, 4), torch.ones(2, 4), torch.ones(2)), "dout is"),
    ],
)
def test_what_no_kernel_can_serve(backend: str, call: Callable[[], Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        call()


# ---- nothing more than is asked for --------------------------------------------------------------


def test_no_gradient_no_rstd(simulator: list[Problem]) -> None:
    x, weight, _ = tensors()
    with torch.no_grad():
        quiet = nn.rms_norm(x, weight)
    loud = nn.rms_norm(x, weight)
    assert [problem.store_rstd for problem in simulator] == [False, True]
    assert not quiet.requires_grad
    assert cases.same(quiet, loud)


@pytest.mark.parametrize(("need_dx", "need_dweight"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("way", ["eager", "operator"])
def test_backward_skips_what_nobody_wants(
    simulator: list[Problem], way: str, need_dx: bool, need_dweight: bool
) -> None:
    x, weight, dout = tensors()
    x.requires_grad_(need_dx)
    weight.requires_grad_(need_dweight)
    y = nn.rms_norm(x, weight) if way == "eager" else FORWARD(x, weight, nn.EPS)[0]
    y.backward(dout)
    assert (simulator[-1].need_dx, simulator[-1].need_dweight) == (need_dx, need_dweight)
    assert [tensor.grad is not None for tensor in (x, weight)] == [need_dx, need_dweight]


def test_x_is_kept_and_neither_y_nor_a_copy(backend: str) -> None:
    x, weight, _ = tensors()
    kept: list[Any] = []

    def keep(tensor: Any) -> Any:
        kept.append(tensor)
        return tensor

    for given in (x, x[:, ::2]):  # the second one must be copied to be read
        kept.clear()
        w = weight[: given.shape[1]]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            nn.rms_norm(given, w)
        assert [tensor.data_ptr() for tensor in kept[:2]] == [given.data_ptr(), w.data_ptr()]
        assert [tuple(tensor.shape) for tensor in kept[2:]] == [(5,)]  # rstd


def test_a_layout_is_prepared_once(simulator: list[Problem]) -> None:
    x, weight, dout = tensors()
    for _ in range(3):
        nn.rms_norm(x, weight).backward(dout)
        nn.rms_norm(x.detach().clone(), weight.detach().clone())
    assert len(simulator) == 3
    nn.rms_norm(x[:4], weight.detach())
    nn.rms_norm(x.detach()[:4], weight.detach())
    assert [problem.rows for problem in simulator[3:]] == [4, 4]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_shapes_that_change_leave_no_memory_behind(
    simulator: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far more shapes than are kept: what is forgotten is freed."""
    forward = functools.lru_cache(maxsize=8)(layouts.forward.__wrapped__)
    monkeypatch.setattr(layouts, "forward", forward)
    make = cases.maker(torch.float32, "cpu")
    rows = itertools.cycle(range(1, 25))

    def call(count: int) -> None:
        for _ in range(count):
            nn.rms_norm(make(next(rows), 32))
        gc.collect()

    call(200)
    before = resident_bytes()
    call(1000)
    assert forward.cache_info().currsize == 8
    assert resident_bytes() - before < 1 << 20


def test_threads_do_not_disturb_each_other(backend: str) -> None:
    x = torch.randn(8, 4, COLS)
    expected = [nn.rms_norm(row) for row in x]
    wrong: list[int] = []

    def work(first: int) -> None:
        for step in range(16):
            index = (first + step) % len(x)
            if not cases.same(nn.rms_norm(x[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- registered operators ------------------------------------------------------------------------


@pytest.mark.parametrize("pair", cases.PAIRS, ids=str)
def test_both_ways_give_the_same_bits(backend: str, pair: Any) -> None:
    x, weight, dout = tensors(*pair)
    eager = nn.rms_norm(x, weight)
    operator = FORWARD(x, weight, nn.EPS)[0]
    one, other = (torch.autograd.grad(y, (x, weight), dout) for y in (eager, operator))
    for a, b in zip((eager, *one), (operator, *other), strict=True):
        assert cases.same(a, b)


@pytest.mark.parametrize("with_weight", [True, False])
def test_opcheck(backend: str, with_weight: bool) -> None:
    x, weight, dout = tensors(rows=3)
    w = weight if with_weight else None
    torch.library.opcheck(FORWARD, (x, w, 1e-6))
    torch.library.opcheck(FORWARD, (x.detach()[:, 1:], None, 1e-6))
    x = x.detach()
    w = None if w is None else w.detach()
    rstd = FORWARD(x, w, 1e-6)[1]
    torch.library.opcheck(BACKWARD, (dout, x, w, rstd, True, with_weight))
    torch.library.opcheck(BACKWARD, (dout.t().contiguous().t(), x, w, rstd, not with_weight, False))


def test_rstd_of_the_operator_takes_no_gradient(backend: str) -> None:
    x, weight, _ = tensors()
    y, rstd = FORWARD(x, weight, 1e-6)
    assert y.requires_grad
    assert not rstd.requires_grad


def test_tensors_that_stand_for_others_see_the_operator(backend: str) -> None:
    meta = nn.RMSNorm(COLS, device="meta")
    y = meta(torch.empty(3, COLS, dtype=torch.bfloat16, device="meta"))
    assert (y.shape, y.dtype, y.device.type) == ((3, COLS), torch.bfloat16, "meta")
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 3, COLS)
        assert nn.rms_norm(x).shape == x.shape
    x, weight, _ = tensors()
    seen: list[str] = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        y = nn.rms_norm(x, weight)
    assert seen == ["rmsnorm_raw.rmsnorm_fwd.default"]
    assert cases.same(y, nn.rms_norm(x, weight))
    exported = torch.export.export(
        nn.RMSNorm(COLS), (torch.ones(3, COLS),), dynamic_shapes=({0: torch.export.Dim("rows")},)
    )
    assert exported.module()(torch.ones(7, COLS)).shape == (7, COLS)


# ---- what models do ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_autocast_leaves_the_dtypes_alone(backend: str, way: str) -> None:
    function = nn.rms_norm
    if way == "compiled":
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, dout = tensors(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            y = function(x, weight)
        assert y.dtype == dtype
        assert cases.same(y, nn.rms_norm(x, weight))
        y.backward(dout)
        assert (x.grad.dtype, weight.grad.dtype) == (dtype, torch.float32)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_in_one_graph(backend: str, dynamic: bool) -> None:
    """The same bits, and with a dynamic M nothing is compiled for another one."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x, w: nn.rms_norm(x + 1, w) * 2, fullgraph=True, dynamic=dynamic, backend=counter
    )
    counts = []
    for rows in (5, 6, 9, 17) if dynamic else (5, 5):
        x, weight, dout = tensors(rows=rows)
        y = compiled(x, weight)
        counts.append(counter.frame_count)
        expected = nn.rms_norm(x + 1, weight) * 2
        assert cases.same(y, expected)
        got, want = (torch.autograd.grad(each, (x, weight), dout) for each in (y, expected))
        assert all(map(cases.same, got, want))
    assert counts[0] >= 1
    assert len(set(counts)) == 1


def test_inductor() -> None:
    torch._dynamo.reset()
    module = nn.RMSNorm(COLS)
    x = torch.randn(4, COLS)
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(backend: str, reentrant: bool) -> None:
    x, weight, dout = tensors()

    def block(x: Any) -> Any:
        return nn.rms_norm(nn.rms_norm(x, weight).sin(), weight)

    results = []
    for y in (block(x), checkpoint(block, x, use_reentrant=reentrant)):
        y.backward(dout)
        results.append((y, x.grad, weight.grad))
        x.grad = weight.grad = None
    assert all(map(cases.same, *results))


def test_selective_checkpointing_can_keep_y(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy sees the operator: where it saves that, no forward runs twice."""
    x, weight, dout = tensors()
    calls: list[int] = []
    forward = plain.forward
    monkeypatch.setattr(plain, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))

    def policy(context: Any, operator: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
        saves = operator is FORWARD.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    def block(x: Any) -> Any:
        return nn.rms_norm(nn.rms_norm(x, weight).sin(), weight)

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    y = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    got = torch.autograd.grad(y, (x, weight), dout)
    assert len(calls) == 2
    want = torch.autograd.grad(block(x), (x, weight), dout)
    assert all(map(cases.same, got, want))


@pytest.mark.parametrize("way", ["eager", "operator"])
def test_double_backward(backend: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right to any order in float64, and for the kernels' own y close to that in float32."""

    def call(x: Any, weight: Any) -> Any:
        return nn.rms_norm(x, weight) if way == "eager" else FORWARD(x, weight, nn.EPS)[0]

    def second(x: Any, weight: Any) -> Any:
        first = torch.autograd.grad(call(x, weight).sin().sum(), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight))

    x, weight, _ = tensors(torch.float32)
    got = second(x, weight)
    monkeypatch.delenv("RMSNORM_RAW_BACKEND", raising=False)
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in (x, weight))
    for one, other in zip(got, second(*exact), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    few = tuple(tensor.detach()[..., :6].double().requires_grad_() for tensor in (x, weight))
    assert torch.autograd.gradgradcheck(call, few)


def test_forward_mode_is_the_formulas(backend: str) -> None:
    x, weight, dout = (t.detach() for t in tensors(torch.float32))

    def reference(x: Any, weight: Any) -> Any:
        return functional.rms_norm(x, (x.shape[-1],), weight)

    want = torch.func.jvp(reference, (x, weight), (dout, weight))
    for call in (nn.rms_norm, torch.compile(nn.rms_norm, backend="eager")):
        torch.testing.assert_close(torch.func.jvp(call, (x, weight), (dout, weight)), want)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.jvp(nn.rms_norm, (x, weight), (dout, weight)), want)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, dout)
        got = torch.autograd.forward_ad.unpack_dual(nn.rms_norm(dual, weight))
    tangent = torch.func.jvp(lambda x: reference(x, weight), (x,), (dout,))[1]
    torch.testing.assert_close(got.tangent, tangent)
    row = x[:1]
    torch.testing.assert_close(
        torch.func.jacfwd(nn.RMSNorm(row.shape[-1]))(row),
        torch.func.jacfwd(torch.nn.RMSNorm(row.shape[-1]))(row),
    )


def test_torch_func_grad_is_refused(backend: str) -> None:
    x = tensors(torch.float32)[0].detach()
    grad = torch.func.grad(lambda x: nn.rms_norm(x).sum())
    for call in (grad, torch.func.vmap(grad), torch.func.jacrev(nn.RMSNorm(x.shape[-1]))):
        with pytest.raises(InvalidInput, match=r"torch\.func\.grad.* take torch\.autograd"):
            call(x)


@pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf")])
def test_an_eps_that_makes_no_sense_is_refused(backend: str, eps: float) -> None:
    with pytest.raises(InvalidInput, match="eps"):
        nn.rms_norm(torch.ones(2, 8), eps=eps)


def test_two_processes(tmp_path: Path) -> None:
    """DDP and FSDP2 over gloo: the gradients of one process on the whole batch."""
    script = Path(__file__).with_name("two_processes.py")
    done = subprocess.run(
        [sys.executable, str(script), "gloo", str(tmp_path / "meet")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["DDP", "FSDP2"]


def test_without_torch_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import rmsnorm_raw as rr; rr.nn"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'pip install -e ".[torch]"' in done.stderr.splitlines()[-1]


def test_negated_views_count_with_their_sign(backend: str) -> None:
    x, weight, dout = tensors(torch.float32)
    weight, dout = torch._neg_view(weight.detach()), torch._neg_view(dout)
    y, want = nn.rms_norm(x, weight), functional.rms_norm(x, x.shape[-1:], weight)
    torch.testing.assert_close(y, want)
    (dx,), (expected,) = (torch.autograd.grad(each, x, dout) for each in (y, want))
    torch.testing.assert_close(dx, expected)


def test_gradients_that_have_no_memory_of_their_own(backend: str) -> None:
    """Batched ones, and those of a subclass that only wraps a tensor."""
    x, weight, _ = tensors(torch.float32)
    y, want = nn.rms_norm(x, weight), functional.rms_norm(x, x.shape[-1:], weight)
    several = torch.randn(3, *x.shape)
    for got, expected in zip(
        torch.autograd.grad(y, (x, weight), several, is_grads_batched=True, retain_graph=True),
        torch.autograd.grad(want, (x, weight), several, is_grads_batched=True, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)
    wrapped = TwoTensor(several[0], several[0])
    for got, expected in zip(
        torch.autograd.grad(y, (x, weight), wrapped),
        torch.autograd.grad(want, (x, weight), several[0]),
        strict=True,
    ):
        torch.testing.assert_close(got.a, expected)


def test_what_is_no_dense_tensor_is_refused(backend: str) -> None:
    x = torch.ones(2, 8)
    for bad in (x.to_sparse(), x.to_mkldnn()):
        with pytest.raises(InvalidInput, match="pass a dense tensor"):
            nn.rms_norm(bad)
    with pytest.raises(InvalidInput, match=r"x is list: pass a torch\.Tensor"):
        nn.rms_norm([1.0])
    with pytest.raises(InvalidInput, match="weight is ndarray"):
        nn.rms_norm(x, np.ones(8))

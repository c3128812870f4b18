"""The PyTorch front on a GPU: right in every layout, on every stream, in graphs and in models."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch_cases as cases  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from rmsnorm_raw import interop, layouts, nn, ops, ready, space  # noqa: E402
from rmsnorm_raw.backends import Backend  # noqa: E402
from rmsnorm_raw.config import Config  # noqa: E402
from rmsnorm_raw.errors import InvalidInput  # noqa: E402
from rmsnorm_raw.problem import Problem  # noqa: E402

pytestmark = pytest.mark.gpu

FORWARD, BACKWARD = torch.ops.rmsnorm_raw.rmsnorm_fwd, torch.ops.rmsnorm_raw.rmsnorm_bwd
#: some 0.2 s on an H200: the host is long done with a call before it ends
SPIN_TICKS = 400_000_000
MIB = 1 << 20


@pytest.fixture(autouse=True)
def device(gpu: Backend) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this torch is built for CPUs")


def tensors(
    *shape: int, dtype: torch.dtype = torch.bfloat16, weight_dtype: torch.dtype | None = None
) -> tuple[Any, Any, Any]:
    """(x, weight, dout); the first two want gradients."""
    make = cases.maker(dtype, "cuda")
    weight = 1 + 0.1 * cases.maker(weight_dtype or dtype, "cuda", seed=1)(shape[-1])
    x, dout = make(*shape), make(*shape)
    return x.requires_grad_(), weight.requires_grad_(), dout


def step(x: Any, weight: Any, dout: Any) -> tuple[Any, ...]:
    """(y, dx, dweight)."""
    y = nn.rms_norm(x, weight)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dout)


def all_same(got: Any, want: Any) -> bool:
    return all(cases.same(a, b) for a, b in zip(got, want, strict=True))


# ---- right ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("pair", cases.PAIRS, ids=str)
def test_gradients(pair: tuple[torch.dtype, torch.dtype], layout: str) -> None:
    cases.check_layout(nn.rms_norm, layout, pair, "cuda")


#: of each path of the ladder: few and many rows, shared rows, a paced ring, a ring read again, two
#: passes, one row that finishes dweight itself
SHAPES = [(1, 4096), (8, 4096), (300, 3000), (8192, 1024), (512, 8192), (8, 16384), (8000, 8192)]
WIDE = [(300, 16384), (64, 65536)]


@pytest.mark.parametrize("shape", [*SHAPES, *WIDE], ids=str)
def test_the_same_bits_as_the_array_operations(shape: tuple[int, int]) -> None:
    x, weight, dout = tensors(*shape)
    y, dx, dweight = step(x, weight, dout)
    forward = ops.rmsnorm_fwd(x, weight, eps=nn.EPS)
    backward = ops.rmsnorm_bwd(dout, x, weight, forward.rstd, eps=nn.EPS)
    assert all_same((y, dx, dweight), (forward.y, *backward))
    with torch.no_grad():
        assert cases.same(nn.rms_norm(x, weight), y)


@pytest.mark.parametrize(
    "slug", ["b256-t128-v16-reg-p2-fl", "b128-t128-v16-pp-p1", "b128-v16-2p-p2"]
)
def test_scratch_memory_may_hold_anything(slug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other configs than the ladder's, one with a counter that must be 0 among them."""
    prepare = ready.prepare

    def other(problem: Problem, alignment: int, _: None, where: Any) -> Any:
        config = Config.parse(slug) if problem.op == "backward" else None
        return prepare(problem, alignment, config, where)

    x, weight, dout = tensors(2000, 1024)
    expected = step(x, weight, dout)
    monkeypatch.setattr(ready, "prepare", other)
    layouts.backward.cache_clear()
    for _ in range(3):
        dirt = [torch.full((1 << 18,), float("nan"), device="cuda") for _ in range(4)]
        del dirt
        y, dx, dweight = step(x, weight, dout)
        cases.check_backward(dx, dweight, dout, x, weight)
        assert cases.same(y, expected[0])
    layouts.backward.cache_clear()


@pytest.mark.parametrize("weight_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_eps_none_is_what_f_rms_norm_takes(
    dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    x = torch.full((2, 64), 2.0**-14, dtype=dtype, device="cuda")
    weight = None if weight_dtype is None else torch.ones(64, dtype=weight_dtype, device="cuda")
    expected = functional.rms_norm(x, (64,), weight, None)
    torch.testing.assert_close(nn.rms_norm(x, weight), expected, rtol=0.01, atol=0)
    assert (nn.rms_norm(x, weight, 1e-6) < 0.6 * expected).all()


def test_what_no_kernel_can_serve() -> None:
    x, weight, _ = tensors(3, 64)
    with pytest.raises(InvalidInput, match="weight is on cpu and x on cuda:0"):
        nn.rms_norm(x, weight.detach().cpu())
    with pytest.raises(InvalidInput, match="float64"):
        nn.rms_norm(x.detach().double())


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_nothing_to_do(shape: tuple[int, int]) -> None:
    x, weight, dout = tensors(*shape)
    y, dx, dweight = step(x, weight, dout)
    assert (y.shape, dx.shape, dweight.shape) == (shape, shape, shape[1:])
    assert (dweight == 0).all()
    assert (FORWARD(x, weight, 0.25)[1] == 2).all()


# ---- operators and torch.compile -----------------------------------------------------------------


@pytest.mark.parametrize("pair", cases.PAIRS, ids=str)
def test_both_ways_give_the_same_bits(pair: tuple[torch.dtype, torch.dtype]) -> None:
    x, weight, dout = tensors(37, 768, dtype=pair[0], weight_dtype=pair[1])
    y = FORWARD(x, weight, nn.EPS)[0]
    assert all_same((y, *torch.autograd.grad(y, (x, weight), dout)), step(x, weight, dout))


def test_opcheck() -> None:
    x, weight, dout = tensors(5, 256)
    torch.library.opcheck(FORWARD, (x, weight, 1e-6))
    torch.library.opcheck(FORWARD, (x.detach()[:, 1:], None, 1e-6))
    x, weight = x.detach(), weight.detach()
    rstd = FORWARD(x, weight, 1e-6)[1]
    torch.library.opcheck(BACKWARD, (dout, x, weight, rstd, True, True))
    torch.library.opcheck(BACKWARD, (dout.t().contiguous().t(), x, weight, rstd, False, True))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "dynamic"])
def test_compile(mode: str) -> None:
    """In one graph, with the same bits; a dynamic M is compiled once."""
    torch._dynamo.reset()
    keywords = {"dynamic": True} if mode == "dynamic" else {"dynamic": False, "mode": mode}
    compiled = torch.compile(nn.rms_norm, fullgraph=True, **keywords)
    for rows in (5, 6, 9, 1000) if mode == "dynamic" else (8, 8, 8, 8):
        x, weight, dout = tensors(rows, 1024)
        torch.compiler.cudagraph_mark_step_begin()
        stance = "default" if rows in (5, 8) else "fail_on_recompile"
        with torch.compiler.set_stance(stance):
            y = compiled(x, weight)
            got = (y.detach().clone(), *torch.autograd.grad(y, (x, weight), dout))
        assert all_same(got, step(x, weight, dout))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_leaves_the_dtypes_alone(compiled: bool) -> None:
    """And what a Linear makes of y is the same as of F.rms_norm's, which is float32 there."""
    torch._dynamo.reset()
    function = torch.compile(nn.rms_norm, fullgraph=True) if compiled else nn.rms_norm
    x, weight, dout = tensors(37, 768, weight_dtype=torch.float32)
    linear = torch.nn.Linear(768, 64, bias=False, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        y = function(x, weight, 1e-6)
        theirs = functional.rms_norm(x, (768,), weight, 1e-6)
        outputs = [linear(each).float() for each in (y, theirs)]
    assert y.dtype == torch.bfloat16
    assert cases.same(y, nn.rms_norm(x, weight, 1e-6))
    torch.testing.assert_close(*outputs, rtol=0.02, atol=0.02)
    y.backward(dout)
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)


# ---- streams, graphs, threads, devices -----------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 1024), (300, 8192)], ids=str)
def test_a_graph_is_replayed_after_its_inputs_change(shape: tuple[int, int]) -> None:
    x, weight, dout = tensors(*shape)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(x, weight, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, weight, dout)
    for seed in range(3):
        with torch.no_grad():
            for tensor, scale in ((x, 3.0), (weight, 1.0), (dout, 2.0)):
                fresh = cases.maker(tensor.dtype, "cuda", seed=10 + seed)(*tensor.shape)
                tensor.copy_(scale * fresh)
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        assert all_same(captured, step(x, weight, dout))


def test_a_side_stream_with_a_slow_producer() -> None:
    filled, weight, dout = tensors(64, 1024)
    expected = step(filled, weight, dout)
    x = torch.zeros_like(filled).requires_grad_()
    side = torch.cuda.Stream()
    step(x, weight, dout)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN_TICKS)
        with torch.no_grad():
            x.copy_(filled)
        got = step(x, weight, dout)
        with torch.no_grad():
            quiet = nn.rms_norm(x, weight)
        assert not side.query(), "a call waited for the producer"
    early = nn.rms_norm(x.detach(), weight.detach())  # on the default stream
    torch.cuda.default_stream().synchronize()
    assert not side.query()
    assert (early == 0).all(), "the default stream was to run ahead of the producer"
    side.synchronize()
    assert all_same((*got, quiet), (*expected, expected[0]))


def test_a_new_thread(gpu: Backend) -> None:
    x, weight, dout = tensors(64, 1024)
    expected = step(x, weight, dout)
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(step(x, weight, dout))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(all_same(result, expected) for result in results)


def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"it takes two GPUs, and {torch.cuda.device_count()} is here")


def test_several_devices_in_one_process() -> None:
    two_gpus()
    first = tensors(64, 1024)
    expected = step(*first)
    second = [tensor.detach().to("cuda:1") for tensor in first]
    for tensor in second[:2]:
        tensor.requires_grad_()
    assert torch.cuda.current_device() == 0
    for _ in range(2):
        got = step(*second)
        again = step(*first)
    assert {tensor.device.index for tensor in got} == {1}
    assert all_same(got, expected)
    assert all_same(again, expected)
    with pytest.raises(InvalidInput, match="weight is on cuda:1 and x on cuda:0"):
        nn.rms_norm(first[0], second[1])


def test_two_processes(tmp_path: Path) -> None:
    """DDP and FSDP2 over NCCL: the gradients of one process on the whole batch."""
    two_gpus()
    script = Path(__file__).resolve().parents[1] / "two_processes.py"
    done = subprocess.run(
        [sys.executable, str(script), "nccl", str(tmp_path / "meet")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["DDP", "FSDP2"]


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    x, weight, dout = tensors(37, 768)

    def block(x: Any) -> Any:
        return nn.rms_norm(nn.rms_norm(x, weight).sin(), weight)

    results = []
    for y in (block(x), checkpoint(block, x, use_reentrant=reentrant)):
        y.backward(dout)
        results.append((y.detach(), x.grad, weight.grad))
        x.grad = weight.grad = None
    assert all_same(*results)


def test_double_backward() -> None:
    def second(x: Any, weight: Any) -> Any:
        y = nn.rms_norm(x, weight)
        first = torch.autograd.grad(y.sin().sum(), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight))

    x, weight, _ = tensors(7, 96, dtype=torch.float32)
    exact = tuple(each.detach().cpu().double().requires_grad_() for each in (x, weight))
    for got, want in zip(second(x, weight), second(*exact), strict=True):
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-5)


# ---- memory --------------------------------------------------------------------------------------


def peak_bytes(function: Callable[..., Any], x: Any, weight: Any, dout: Any) -> int:
    """The most that a forward and its backward ask torch for at a time, over their inputs."""

    def run() -> None:
        torch.autograd.grad(function(x, weight), (x, weight), dout)

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    run()
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)


@pytest.mark.parametrize("shape", [(8, 4096), (4096, 4096), (8192, 8192)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_of_a_step(gpu: Backend, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """No more than F.rms_norm's and the partial rows of dweight, programs * N * 4 bytes.

    And a word, where programs are paced.
    """
    x, weight, dout = tensors(*shape, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    problem = Problem.backward(*shape, name)
    config = ready.prepare(problem, 16, None, interop.torch_device(x.device)).config
    partials = space.grid_programs(problem, config, gpu.device) * shape[1] * 4
    ours = peak_bytes(nn.rms_norm, x, weight, dout)
    theirs = peak_bytes(lambda x, w: functional.rms_norm(x, shape[1:], w), x, weight, dout)
    print(
        f"\n{shape} {name}: ours {ours:,} B, F.rms_norm {theirs:,} B, partial rows {partials:,} B"
    )
    assert ours <= theirs + partials + 4 * config.paced


def test_calls_with_changing_shapes_leave_no_memory_behind() -> None:
    """From call 1,000 to 10,000, forward and backward; three times the shapes that are kept."""
    weight = torch.ones(512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    rows = list(range(1, 3 * layouts.KEPT))
    random.Random(0).shuffle(rows)
    whole = torch.randn(len(rows) + 1, 512, device="cuda", dtype=torch.bfloat16)

    def call(first: int, last: int) -> None:
        for number in range(first, last):
            x = whole[: rows[number % len(rows)]].requires_grad_()
            nn.rms_norm(x, weight).sum().backward()
            x.grad = weight.grad = None

    def used() -> tuple[int, int, int]:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        host = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        return total - free, torch.cuda.memory_allocated(), host

    call(0, 1000)
    before = used()
    call(1000, 10_000)
    grown = [after - was for after, was in zip(used(), before, strict=True)]
    print(f"\ngrown: device {grown[0]:,} B, allocated {grown[1]:,} B, host {grown[2]:,} B")
    assert max(grown) < MIB

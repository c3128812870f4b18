"""Reports from users of such kernels that only a GPU can show; see tests/test_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from rmsnorm_raw import launch, nn, rmsnorm_bwd, rmsnorm_fwd, space  # noqa: E402
from rmsnorm_raw.backends import Backend  # noqa: E402
from rmsnorm_raw.check import verify  # noqa: E402
from rmsnorm_raw.config import Config  # noqa: E402
from rmsnorm_raw.ladder import default_config  # noqa: E402
from rmsnorm_raw.module import build  # noqa: E402
from rmsnorm_raw.problem import Problem  # noqa: E402
from rmsnorm_raw.source import render  # noqa: E402

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
#: some 0.2 s on an H200: the host is long done with a call before it ends
SPIN_TICKS = 400_000_000
SEED = 7


@pytest.fixture(autouse=True)
def device(gpu: Backend) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this torch is built for CPUs")


def random(*shape: int) -> Any:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def want_memory(gpu: Backend, gib: int) -> None:
    if gpu.device.memory_bytes < gib << 30:
        pytest.skip(f"{gib} GiB of device memory are needed, and there are less")
    torch.cuda.empty_cache()


# ---- 10: a launch of 2^32 threads or more --------------------------------------------------------


def test_more_threads_than_a_launch_may_have_case_10(gpu: Backend) -> None:
    """8 lanes a row: the last rows belong to a second launch. Each is as in a small call."""
    want_memory(gpu, 40)
    rows, config = (1 << 29) + 1000, "b64-t8-v16-reg"
    problem = Problem.forward(rows, 8, "bf16", weight_dtype=None)
    binary = build(render(problem, Config.parse(config), gpu.device), gpu)
    assert len(launch.launches(problem, Config.parse(config), binary)) == 2
    x = torch.randn(1 << 20, 8, device="cuda", dtype=BF16).repeat((rows >> 20) + 1, 1)[:rows]
    y, rstd = rmsnorm_fwd(x, config=config)
    small_y, small_rstd = rmsnorm_fwd(x[: 1 << 20], config=config)
    wide = x[: 1 << 20].float()
    want = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(small_y.float(), want, rtol=0.005, atol=1e-6)
    for first in range(0, rows, 1 << 20):
        count = min(1 << 20, rows - first)
        assert torch.equal(y[first : first + count], small_y[:count])
        assert torch.equal(rstd[first : first + count], small_rstd[:count])


# ---- 12: more than 2^31 elements -----------------------------------------------------------------


@pytest.mark.parametrize(
    "problem",
    [
        *(
            make(elements // cols + 5, cols, "bf16", weight_dtype=weight)
            for cols, weight in ((8192, "bf16"), (8200, "fp32"))
            for elements in (1 << 31, 1 << 32)
            for make in (Problem.forward, Problem.backward)
        ),
        Problem.backward(4099, 1 << 20, "bf16"),  # over 2^32 in rows that are read twice
    ],
    ids=str,
)
def test_more_than_two_to_the_31_and_32_elements_case_12(problem: Problem, gpu: Backend) -> None:
    want_memory(gpu, 60)
    config = default_config(problem, gpu.device)
    verdict = verify(problem, config, build(render(problem, config, gpu.device), gpu), seed=SEED)
    assert verdict.passed, verdict.message


# ---- 18: dW that differs from run to run ---------------------------------------------------------


def test_dweight_of_100_runs_is_bitwise_equal_case_18(gpu: Backend) -> None:
    x, dout, weight = random(8192, 2048), random(8192, 2048), random(2048)
    rstd = rmsnorm_fwd(x, weight).rstd
    first = rmsnorm_bwd(dout, x, weight, rstd).dweight
    for _ in range(99):
        assert torch.equal(rmsnorm_bwd(dout, x, weight, rstd).dweight, first)


# ---- 21: a kernel on CuPy's stream while torch uses another --------------------------------------


def step(x: Any, weight: Any, dout: Any, way: str) -> tuple[Any, ...]:
    """(y, dx, dweight)."""
    if way == "arrays":
        y, rstd = rmsnorm_fwd(x, weight)
        return y, *rmsnorm_bwd(dout, x, weight, rstd)
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = nn.rms_norm(x, weight, 1e-6)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dout)


@pytest.mark.parametrize("way", ["arrays", "nn"])
@pytest.mark.parametrize("stream", ["default", "side"])
def test_a_slow_producer_on_torchs_stream_is_waited_for_whatever_cupys_is_case_21(
    stream: str, way: str
) -> None:
    import cupy

    filled, dout, weight = random(64, 1024), random(64, 1024), random(1024)
    expected = step(filled, weight, dout, way)
    x = torch.zeros_like(filled)
    theirs = torch.cuda.default_stream() if stream == "default" else torch.cuda.Stream()
    torch.cuda.synchronize()
    with cupy.cuda.Stream(non_blocking=True), torch.cuda.stream(theirs):
        torch.cuda._sleep(SPIN_TICKS)
        x.copy_(filled)
        got = step(x, weight, dout, way)
        assert not theirs.query(), "a call waited for the producer"
    theirs.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


# ---- 23: dynamic LDS beyond what a kernel has without asking -------------------------------------


@pytest.mark.parametrize("make", [Problem.forward, Problem.backward])
def test_a_ring_that_nearly_fills_the_lds_runs_case_23(
    make: Callable[..., Problem], gpu: Backend
) -> None:
    """Where CUDA wants to be asked (48 KiB and more), and HIP raises if one does."""
    problem = make(300, 4096, "bf16")
    rings = (Config.parse(f"b256-t256-v16-lds{stages}-p1") for stages in range(8, 1, -1))
    fits = (ring for ring in rings if not space.reject_reason(problem, gpu.device, ring))
    config = next(fits)
    assert max(space.lds_bytes(problem, config, gpu.device).values()) > 48 << 10
    verdict = verify(problem, config, build(render(problem, config, gpu.device), gpu), seed=SEED)
    assert verdict.passed, verdict.message

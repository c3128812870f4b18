"""Programs that meet on a GPU: blocks that share a row, and programs that are paced."""

from __future__ import annotations

import random
from typing import Any

import pytest

import rmsnorm_raw as rr
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.check import verify
from rmsnorm_raw.config import Config
from rmsnorm_raw.module import build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render

pytestmark = pytest.mark.gpu

SHARED = "b128-t1024-v16-reg-lk"


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize(
    "slug", ["b128-t512", "b128-t1024-v16-lk-ss-m1", "b512-t1024", "b256-t2048"]
)
@pytest.mark.parametrize(
    "problem",
    [
        Problem.forward(1, 65536, "bf16"),
        Problem.forward(4099, 16384, "fp16"),
        Problem.forward(300, 32760, "fp32", weight_dtype=None),
    ],
    ids=str,
)
def test_rows_of_several_blocks_are_right(problem: Problem, slug: str, gpu: Backend) -> None:
    config = Config.parse(slug)
    verdict = verify(problem, config, build(render(problem, config, gpu.device), gpu))
    assert verdict.passed, f"{config}: {verdict}"


def test_shared_rows_on_concurrent_streams_end(gpu: Backend, torch: Any) -> None:
    """More blocks than the device has room for, of several launches at once."""
    weight = torch.randn(32768, device="cuda", dtype=torch.bfloat16)
    work = [torch.randn(400 + k, 32768, device="cuda", dtype=torch.bfloat16) for k in range(8)]
    wanted = [rr.rmsnorm_fwd(x, weight, config=SHARED).y for x in work]
    streams = [torch.cuda.Stream() for _ in work]
    torch.cuda.synchronize()
    results: list[list[Any]] = [[] for _ in work]
    for _ in range(20):
        for k in random.sample(range(8), 8):
            with torch.cuda.stream(streams[k]):
                results[k].append(rr.rmsnorm_fwd(work[k], weight, config=SHARED).y)
    torch.cuda.synchronize()
    for want, got in zip(wanted, results, strict=True):
        assert all(torch.equal(y, want) for y in got)


def test_captured_shared_rows_replay_on_new_inputs(gpu: Backend, torch: Any) -> None:
    x = torch.randn(64, 32768, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(32768, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        rr.rmsnorm_fwd(x, weight, config=SHARED)  # built before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = rr.rmsnorm_fwd(x, weight, config=SHARED)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured.y, rr.rmsnorm_fwd(x, weight, config=SHARED).y)


@pytest.mark.parametrize("ring", ["b512-t256-v16-lds3b", "b512-t512-v16-lds3br"])
def test_paced_programs_give_the_same_bits_in_every_run(
    gpu: Backend, torch: Any, ring: str
) -> None:
    """Whatever waits for whom: four launches at once, too. Not those of the ring without pacing:
    NVRTC may contract another build's sums otherwise (16 of 36,864,000 elements, by 2 ulps).
    """
    if gpu.device.arch != "sm_90":
        pytest.skip(f"bulk copies are sm_90's, and this is {gpu.device.arch}")
    x = torch.randn(9000, 4096, device="cuda", dtype=torch.bfloat16)
    dout, weight = torch.randn_like(x), torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    args = dout, x, weight, rr.rmsnorm_fwd(x, weight).rstd
    want = rr.rmsnorm_bwd(*args, config=f"{ring}p-p1")
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for stream in 10 * streams:
        with torch.cuda.stream(stream):
            results.append(rr.rmsnorm_bwd(*args, config=f"{ring}p-p1"))
    torch.cuda.synchronize()
    for got in results:
        assert torch.equal(got.dx, want.dx)
        assert torch.equal(got.dweight, want.dweight)

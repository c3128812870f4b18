"""The kernels on a GPU: the space by pairs of knob values, large tensors, the last-block finish."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from covering import covering_array

import rmsnorm_raw as rr
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.check import verify
from rmsnorm_raw.config import Config
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.launch import Tensor, make_plan
from rmsnorm_raw.module import Binary, build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render
from rmsnorm_raw.space import enumerate_configs

pytestmark = pytest.mark.gpu

SPACES = [
    Problem.forward(3001, 3000, "bf16", weight_dtype="fp32"),
    Problem.forward(2000, 8192, "fp16"),
    Problem.backward(3001, 3000, "bf16", weight_dtype="fp32"),
    Problem.backward(2000, 8192, "bf16"),
    Problem.backward(3001, 1024, "fp32"),
    Problem.backward(2000, 769, "fp16"),
]


@pytest.mark.parametrize("problem", SPACES, ids=str)
def test_every_pair_of_knob_values_is_right(problem: Problem, gpu: Backend) -> None:
    configs = covering_array(enumerate_configs(problem, gpu.device).kept)

    def built(config: Config) -> Binary:
        return build(render(problem, config, gpu.device), gpu)

    with ThreadPoolExecutor() as pool:
        binaries = list(pool.map(built, configs))
    for config, binary in zip(configs, binaries, strict=True):
        verdict = verify(problem, config, binary, seed=11)
        assert verdict.passed, f"{config}: {verdict}"


@pytest.mark.parametrize("make", [Problem.forward, Problem.backward])
@pytest.mark.parametrize("cols", [1, 7, 256, 16384, 65536, 262144, 1 << 20])
def test_the_ladder_is_right_at_the_ends(make: Any, cols: int, gpu: Backend) -> None:
    for rows in (3, 300):
        problem = make(rows, cols, "bf16")
        config = default_config(problem, gpu.device)
        verdict = verify(problem, config, build(render(problem, config, gpu.device), gpu))
        assert verdict.passed, f"{problem} {config}: {verdict}"


def test_narrow_rows_by_the_million(gpu: Backend) -> None:
    for problem in (Problem.forward(70_000_000, 8, "bf16"), Problem.backward(3_000_000, 8, "bf16")):
        config = default_config(problem, gpu.device)
        verdict = verify(problem, config, build(render(problem, config, gpu.device), gpu))
        assert verdict.passed, f"{problem} {config}: {verdict}"


LAST_BLOCK = "b256-t256-v16-reg-p2-fl"
EARLY = "b256-t256-v16-lds3b-lk-ss-p2-fe"
finishes = pytest.mark.parametrize("config", [LAST_BLOCK, EARLY])


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def inputs(torch: Any, rows: int) -> tuple[Any, Any, Any, Any]:
    x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
    dout, weight = torch.randn_like(x), torch.randn(2048, device="cuda", dtype=torch.bfloat16)
    return dout, x, weight, rr.rmsnorm_fwd(x, weight).rstd


@finishes
def test_dweight_is_bitwise_repeatable(gpu: Backend, torch: Any, config: str) -> None:
    args = inputs(torch, 300)
    first = rr.rmsnorm_bwd(*args, config=config).dweight
    for _ in range(100):
        assert torch.equal(rr.rmsnorm_bwd(*args, config=config).dweight, first)


def test_an_early_finish_gives_the_bits_of_a_later_one(gpu: Backend, torch: Any) -> None:
    """Call after call on one workspace, so that a finish that did not wait would find old sums."""
    work = [inputs(torch, 20_000 + 700 * k) for k in range(4)]
    wanted = [rr.rmsnorm_bwd(*args, config=EARLY.removesuffix("-fe")).dweight for args in work]
    for _ in range(50):
        got = [rr.rmsnorm_bwd(*args, config=EARLY).dweight for args in work]
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@finishes
def test_finishes_on_concurrent_streams_do_not_meet(gpu: Backend, torch: Any, config: str) -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    work = [inputs(torch, 200 + 10 * k) for k in range(4)]
    wanted = [rr.rmsnorm_bwd(*args, config=config).dweight for args in work]
    torch.cuda.synchronize()
    results: list[list[Any]] = [[] for _ in work]
    for _ in range(50):
        for k in random.sample(range(4), 4):
            with torch.cuda.stream(streams[k]):
                results[k].append(rr.rmsnorm_bwd(*work[k], config=config).dweight)
    torch.cuda.synchronize()
    for want, got in zip(wanted, results, strict=True):
        assert all(torch.equal(dweight, want) for dweight in got)


@finishes
def test_a_captured_finish_replays_on_new_inputs(gpu: Backend, torch: Any, config: str) -> None:
    dout, x, weight, rstd = inputs(torch, 300)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        rr.rmsnorm_bwd(dout, x, weight, rstd, config=config)  # built before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = rr.rmsnorm_bwd(dout, x, weight, rstd, config=config)
    for _ in range(3):
        dout.copy_(torch.randn_like(dout))
        graph.replay()
        torch.cuda.synchronize()
        want = rr.rmsnorm_bwd(dout, x, weight, rstd, config=config)
        assert torch.equal(captured.dweight, want.dweight)
        assert torch.equal(captured.dx, want.dx)


def test_a_refused_launch_leaves_the_last_block_usable(gpu: Backend, torch: Any) -> None:
    args = inputs(torch, 300)
    want = rr.rmsnorm_bwd(*args, config=LAST_BLOCK).dweight
    problem = Problem.forward(4, 2048, "bf16")
    config = default_config(problem, gpu.device)
    kernel = build(render(problem, config, gpu.device), gpu)
    (launch,) = make_plan(problem, config, kernel, dict.fromkeys(("x", "y"), Tensor(0))).launches
    with pytest.raises(rr.errors.LaunchError):
        gpu.launch(kernel.code.functions[launch.entry_point], 1, 2048, launch.args, 0, 0)
    assert torch.equal(rr.rmsnorm_bwd(*args, config=LAST_BLOCK).dweight, want)

"""The whole operator on a GPU: extras by pairs of knob values, and with more than 2^32 elements."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from covering import covering_array
from whole_problems import whole_problems

import rmsnorm_raw as rr
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.check import verify
from rmsnorm_raw.config import Config
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.module import Binary, build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render
from rmsnorm_raw.space import enumerate_configs

pytestmark = pytest.mark.gpu


def require_right(gpu: Backend, pairs: list[tuple[Problem, Config]]) -> None:
    def built(pair: tuple[Problem, Config]) -> Binary:
        return build(render(*pair, gpu.device), gpu)

    with ThreadPoolExecutor() as pool:
        binaries = list(pool.map(built, pairs))
    for (problem, config), binary in zip(pairs, binaries, strict=True):
        verdict = verify(problem, config, binary, seed=11)
        assert verdict.passed, f"{problem} {config}: {verdict}"


@pytest.mark.parametrize("cols", [7, 769, 1024, 5120, 65536])
def test_the_ladder_is_right_with_every_extra(cols: int, gpu: Backend) -> None:
    problems = whole_problems(3001 if cols < 65536 else 301, cols)
    require_right(gpu, [(problem, default_config(problem, gpu.device)) for problem in problems])


@pytest.mark.parametrize("at", range(len(whole_problems(1, 8))))
def test_every_pair_of_knob_values_is_right_with_every_extra(at: int, gpu: Backend) -> None:
    problem = whole_problems(2003, 2048)[at]
    configs = covering_array(enumerate_configs(problem, gpu.device).kept)
    require_right(gpu, [(problem, config) for config in configs[:10]])


@pytest.mark.parametrize(
    "problem",
    [
        Problem.forward(524_289, 8192, "bf16", residual_dtype="bf16"),
        Problem.forward(8_388_640 * 4, 128, "bf16", heads=32, per_head=True),
    ],
    ids=str,
)
def test_more_than_two_to_the_32_elements(problem: Problem, gpu: Backend) -> None:
    need = sum(operand.size_bytes for operand in problem.operands)
    if need * 1.1 > gpu.device.memory_bytes:
        pytest.skip(f"wants {need >> 30} GiB, and the device has {gpu.device.memory_bytes >> 30}")
    require_right(gpu, [(problem, default_config(problem, gpu.device))])


def test_dweight_has_the_same_bits_a_hundred_times(gpu: Backend) -> None:
    torch: Any = pytest.importorskip("torch")
    x = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16)
    dout, weight = torch.randn_like(x), torch.randn(2048, device="cuda", dtype=torch.bfloat16)
    rstd = rr.rmsnorm_fwd(x, weight).rstd
    first = rr.rmsnorm_bwd(dout, x, weight, rstd, need_dbias=True)
    for _ in range(100):
        again = rr.rmsnorm_bwd(dout, x, weight, rstd, need_dbias=True)
        assert torch.equal(again.dweight, first.dweight)
        assert torch.equal(again.dbias, first.dbias)


def test_a_call_with_everything_given_allocates_nothing(gpu: Backend) -> None:
    torch: Any = pytest.importorskip("torch")
    x = torch.randn(512, 4096, device="cuda", dtype=torch.bfloat16)
    residual, weight = torch.randn_like(x), torch.ones(4096, device="cuda", dtype=x.dtype)
    y, rstd = torch.empty_like(x), torch.empty(512, device="cuda")
    given = {"out": y, "rstd_out": rstd, "residual": residual, "residual_out": residual}
    rr.rmsnorm_fwd(x, weight, **given)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        rr.rmsnorm_fwd(x, weight, **given)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("cols", [1024, 8192, 65536])
def test_y_in_place_of_x_has_the_bits_of_a_y_of_its_own(gpu: Backend, cols: int) -> None:
    torch: Any = pytest.importorskip("torch")
    x = torch.randn(300, cols, device="cuda", dtype=torch.bfloat16)
    weight, residual = torch.randn(cols, device="cuda"), torch.randn_like(x)
    want = rr.rmsnorm_fwd(x.clone(), weight, residual=residual, casting="llama")
    found = rr.rmsnorm_fwd(x, weight, residual=residual, casting="llama", out=x)
    assert torch.equal(x, want.y)
    assert torch.equal(found.residual_out, want.residual_out)

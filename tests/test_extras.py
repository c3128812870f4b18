"""Extras: what they refuse and say, their bytes, where their configs and launches differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from whole_problems import whole_problems

from rmsnorm_raw import launch, space
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.extras import MAX_HEAD_COLS
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.launch import Tensor
from rmsnorm_raw.module import build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render

FP8 = {"out_dtype": "float8_e4m3fn", "scale": "dynamic"}
GFX950, GFX942, SM_90 = (KNOWN[name] for name in ("gfx950", "gfx942", "sm_90"))


@pytest.mark.parametrize("problem", whole_problems(4, 256), ids=str)
def test_a_problem_is_the_call_that_makes_it(problem: Problem) -> None:
    assert eval(repr(problem), {"Problem": Problem}) == problem
    assert str(replace(problem, extras=type(problem.extras)())) != str(problem)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"out_dtype": "float8_e4m3fn"}, "a scale, and it alone"),
        ({"scale": "static"}, "a scale, and it alone"),
        ({"scale": "dynamic", "out_dtype": "fp32"}, "a scale, and it alone"),
        ({"out_dtype": "int8"}, "y may also be float8_e4m3fn"),
        ({"casting": "mistral"}, "use 'none', 'llama' or 'gemma'"),
        ({"weight_offset": float("nan")}, "it must be finite in float32"),
        ({"weight_offset": 1.0, "weight_dtype": None}, "and there is none"),
        ({"heads": 3}, "not a multiple of the 3 heads"),
        ({"heads": 0}, "a token has 1 to"),
        ({"per_head": True}, "wants several heads"),
        ({"heads": 4, "per_head": True, "weight_dtype": None}, "and there is none"),
        ({"residual_dtype": "fp8"}, "use fp16, bf16, fp32"),
    ],
)
def test_what_does_not_go_together(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Problem.forward(8, 64, "bf16", **arguments)


def test_rows_of_several_heads_have_a_limit() -> None:
    assert Problem.forward(8, MAX_HEAD_COLS, "bf16", heads=2).tokens == 4
    with pytest.raises(InvalidInput, match="rows of up to 4,096"):
        Problem.forward(8, MAX_HEAD_COLS + 1, "bf16", heads=2)


def test_gemma_is_fp32_to_the_end_as_ours_is_anyway() -> None:
    assert Problem.forward(8, 64, "bf16", casting="gemma") == Problem.forward(8, 64, "bf16")


def test_every_tensor_adds_its_bytes() -> None:
    m, n = 32768, 8192
    plain = Problem.forward(m, n, "bf16").logical_bytes()

    def added(**extras: Any) -> int:
        return Problem.forward(m, n, "bf16", **extras).logical_bytes() - plain

    assert added(residual_dtype="bf16") == 4 * m * n  # read, and x + residual written
    assert added(residual_dtype="fp32") == 8 * m * n
    assert added(residual_dtype="bf16", residual_out_dtype=None) == 2 * m * n
    assert added(bias_dtype="fp32") == 4 * n
    assert added(out_dtype="fp32") == 2 * m * n
    assert added(**FP8) == -m * n + 4 * m
    assert added(out_dtype="float8_e4m3fn", scale="static") == -m * n + 4
    assert added(weight_offset=1.0) == added(casting="llama") == 0
    per_head = Problem.forward(m, 128, "bf16", heads=32, per_head=True)
    assert per_head.logical_bytes() - Problem.forward(m, 128, "bf16").logical_bytes() == 31 * 256
    backward = Problem.backward(m, n, "bf16")
    beside = Problem.backward(m, n, "bf16", dresidual_out_dtype="bf16", bias_dtype="bf16")
    assert beside.logical_bytes() - backward.logical_bytes() == 2 * m * n + 2 * n
    apart = Problem.backward(m, n, "fp32", dx_dtype="bf16", residual_dtype="fp32", out_dtype="bf16")
    assert apart.logical_bytes() == m * n * (2 + 4 + 2 + 4) + 2 * 4 * n + 4 * m


@pytest.mark.parametrize(
    ("problem", "slug", "device", "words"),
    [
        (Problem.forward(64, 1024, "bf16", residual_dtype="fp32"), "b256-lds3-p1", SM_90,
         "a ring holds rows of one dtype, and beside bfloat16 there is float32"),
        (Problem.backward(64, 1024, "bf16", out_dtype="fp32"), "b256-pp-p1", SM_90, None),
        (Problem.backward(64, 1024, "bf16", out_dtype="fp32"), "b256-lds3-p1", SM_90,
         "there is float32"),
        (Problem.forward(64, 128, "bf16", heads=4), "b256-2p", SM_90, "are read once"),
        (Problem.forward(64, 8192, "bf16", **FP8), "b128-t256-reg", SM_90, "all of the row in one"),
        (Problem.backward(64, 1024, "bf16", bias_dtype="bf16"), "b256-reg-p1-fl", SM_90, "dbias"),
        (Problem.forward(64, 1024, "bf16", **FP8), "b256-reg", GFX942, "float8_e4m3fnuz, not"),
        (Problem.forward(64, 1024, "bf16", **FP8), "b256-reg", replace(SM_90, arch="sm_80"),
         "sm_89 is the first"),
    ],
    ids=str,
)  # fmt: skip
def test_configs_that_extras_rule_out(
    problem: Problem, slug: str, device: Any, words: str | None
) -> None:
    reason = space.reject_reason(problem, device, Config.parse(slug))
    assert (words in reason) if words and reason else reason is words


@pytest.mark.parametrize("device", [GFX950, SM_90], ids=lambda d: str(d.arch))
@pytest.mark.parametrize("cols", [7, 769, 1024, 8192, 65536])
def test_the_ladder_serves_every_extra(cols: int, device: Any) -> None:
    for problem in whole_problems(4096, cols):
        config = default_config(problem, device)
        kept = space.enumerate_configs(problem, device).kept
        assert len(kept) <= (300 if problem.op == "forward" else 1000) or config.vec != 16
        render(problem, config, device)


@pytest.mark.parametrize("device", [GFX950, SM_90], ids=lambda d: str(d.arch))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gradients_of_a_residual_are_not_read_where_no_dx_is_asked_for(
    dtype: str, device: Any
) -> None:
    beside = {"dresidual_out_dtype": dtype, "residual_dtype": dtype}

    def dweight(more: Any, cols: int = 4096, need_dx: bool = False) -> Problem:
        return Problem.backward(4096, cols, "bf16", need_dx=need_dx, bias_dtype="bf16", **more)

    assert space.ring_tensors(dweight(beside)) == 2
    assert space.ring_tensors(dweight(beside, need_dx=True)) == 3
    assert space.ring_stranger(dweight(beside)) is None
    stranger = "float32" if dtype == "fp32" else None
    assert space.ring_stranger(dweight(beside, need_dx=True)) == stranger
    for cols in (769, 4096, 16384):
        one, other = dweight(beside, cols), dweight({}, cols)
        assert space.enumerate_configs(one, device) == space.enumerate_configs(other, device)
        config = default_config(one, device)
        assert config == default_config(other, device)
        assert render(one, config, device).digest == render(other, config, device).digest


def test_plain_sources_know_nothing_of_extras() -> None:
    for op in (Problem.forward, Problem.backward):
        problem = op(64, 1024, "bf16")
        source = render(problem, default_config(problem, SM_90), SM_90)
        assert not any(name == "RR_EXTRAS" for name, _ in source.defines)
        assert "RR_WEIGHT_OFFSET" not in source.text


def test_a_ring_waits_for_every_store_of_a_row() -> None:
    config = Config.parse("b256-t256-v16-lds3-p1")
    plain = Problem.forward(64, 4096, "bf16")
    assert space.row_stores(plain, config) == 1
    assert space.row_stores(replace_residual(plain), config) == 2
    wide = Problem.forward(64, 4096, "bf16", out_dtype="fp32", residual_dtype="bf16")
    assert space.row_stores(wide, config) == 3  # 8 elements of fp32 are two stores of 16 bytes
    quantised = Problem.forward(64, 4096, "bf16", **FP8)
    assert space.row_stores(quantised, config) == 1


def replace_residual(problem: Problem) -> Problem:
    return Problem.forward(problem.rows, problem.cols, problem.dtype, residual_dtype=problem.dtype)


def test_a_launch_of_heads_stays_under_the_thread_limit(cpu32: Backend) -> None:
    """All rows are there once, each launch's pointers further on by the tokens before it."""
    problem = Problem.forward(1 << 30, 128, "bf16", heads=32, per_head=True)
    config = Config.parse("b128-t8-v16-reg")
    source = render(replace(problem, rows=32), config, cpu32.device, runtime_cols=True)
    stride = 48 * 128
    tensors = {name: Tensor(1 << 50, stride, 128) for name in ("x", "y")}
    tensors |= {"weight": Tensor(1 << 50), "rstd": Tensor(1 << 50)}
    plan = launch.make_plan(problem, config, build(source, cpu32), tensors)
    assert len(plan.launches) > 1
    first = 0
    for each in plan.launches:
        assert each.grid * each.block < 1 << 32
        assert each.grid % 32 == 0
        x, rstd, tokens = each.args[0], each.args[5], int(each.args[7])
        assert int(x) - (1 << 50) == first * stride * 2
        assert int(rstd) - (1 << 50) == first * 32 * 4
        assert each.grid == -(-tokens // config.rows_per_block) * 32
        first += tokens
    assert first == problem.tokens


def test_a_persistent_grid_gives_every_head_as_many_programs() -> None:
    problem = Problem.backward(8192 * 32, 128, "bf16", heads=32, per_head=True)
    config = Config.parse("b128-t16-v16-reg-p8")
    programs = space.grid_programs(problem, config, SM_90)
    assert programs % 32 == 0
    assert programs <= 8 * SM_90.compute_units
    assert space.dweight_chain(problem, config, SM_90) >= programs // 32
    assert np.prod([programs]) * 128 * 4 == launch.tensor_bytes(problem, config, SM_90)["workspace"]

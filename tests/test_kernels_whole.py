"""The whole operator's kernels in the simulator, and faults planted in their text."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from whole_problems import whole_problems

from rmsnorm_raw.backends import Backend
from rmsnorm_raw.check import verify
from rmsnorm_raw.config import Config
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.module import build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render
from rmsnorm_raw.space import enumerate_configs


@pytest.fixture(params=[64, 32], ids=["wave64", "wave32"])
def cpu(request: pytest.FixtureRequest, cpu64: Backend, cpu32: Backend) -> Backend:
    return cpu64 if request.param == 64 else cpu32


def check(problem: Problem, config: Config, backend: Backend) -> None:
    source = render(problem, config, backend.device, runtime_cols=True)
    verdict = verify(problem, config, build(source, backend))
    assert verdict.passed, f"{problem} {config} on {backend.device.name}: {verdict}"


@pytest.mark.parametrize("at", range(len(whole_problems(1, 8))))
def test_the_ladder_is_right_with_every_extra(cpu: Backend, at: int) -> None:
    for cols in (7, 769, 1152, 9000):
        problem = whole_problems(9, cols)[at]
        check(problem, default_config(problem, cpu.device), cpu)


@pytest.mark.parametrize("at", range(len(whole_problems(1, 8))))
def test_every_path_is_right_with_every_extra(cpu: Backend, at: int) -> None:
    choose = random.Random(f"{at} {cpu.device.wave}")
    problem = whole_problems(19, 1024)[at]
    by_path: dict[tuple[object, ...], list[Config]] = {}
    for config in enumerate_configs(problem, cpu.device).kept:
        path = config.path, config.bulk, config.reread, config.blocks_per_row > 1, config.finish
        by_path.setdefault(path, []).append(config)
    for configs in by_path.values():
        check(problem, choose.choice(configs), cpu)


RESIDUAL = Problem.forward(9, 768, "bf16", residual_dtype="bf16", bias_dtype="bf16",
                           weight_offset=1.0)  # fmt: skip
HEADS = Problem.forward(36, 128, "bf16", heads=4, per_head=True, bias_dtype="bf16")
QUANTISED = Problem.forward(9, 768, "bf16", out_dtype="float8_e4m3fn", scale="dynamic")
LLAMA = Problem.forward(9, 768, "bf16", casting="llama", out_dtype="fp32")
BACKWARD = Problem.backward(9, 768, "bf16", dresidual_out_dtype="bf16", bias_dtype="bf16",
                            weight_offset=1.0)  # fmt: skip
HEADS_BACKWARD = Problem.backward(36, 128, "bf16", heads=4, per_head=True)


@pytest.mark.parametrize(
    ("problem", "sound", "fault", "output"),
    [
        (RESIDUAL, "if constexpr (HAS_BIAS) value += b[e];", "", "y"),
        (RESIDUAL, "return x[e] + residual[e];", "return x[e];", "residual_out"),
        (RESIDUAL, "return x[e] + residual[e];", "return rounded<RR_X>(x[e] + residual[e]);", "y"),
        (RESIDUAL, "w[e] + RR_WEIGHT_OFFSET", "w[e]", "y"),
        (RESIDUAL, "out[e] = in[e];", "out[e] = in.residual[e];", "residual_out"),
        (LLAMA, "if constexpr (RR_LLAMA) value = rounded<RR_X>(value);", "", "y"),
        (HEADS, "RR_PER_HEAD ? (u64)head() * cols : 0", "0", "y"),
        (HEADS, "return row * RR_HEADS + head();", "return row;", "rstd"),
        (QUANTISED, "largest * (1.0f /", "largest * (1.01f /", "scale"),
        (QUANTISED, "fmaxf(largest, fabsf(", "fmaxf(largest, (", "scale"),
        (QUANTISED, "low = low > MOST ? MOST : low < -MOST ? -MOST : low;", "low *= 1.1f;", "y"),
        (BACKWARD, "if constexpr (HAS_RESIDUAL_OUT) out[e] += beside[e];", "", "dx"),
        (BACKWARD, "bias_sums[c][e] += dout_kept[c][e];", "bias_sums[c][e] += x_kept[c][e];",
         "dbias"),
        (BACKWARD, "dout[e] * weight_at(w, e)", "dout[e] * w[e]", "dx"),
        (HEADS_BACKWARD, "return blockIdx.x / RR_HEADS;", "return blockIdx.x;", "dweight"),
    ],
    ids=lambda v: v if isinstance(v, str) and " " not in v else "",
)  # fmt: skip
def test_a_planted_fault_is_found(
    cpu64: Backend, problem: Problem, sound: str, fault: str, output: str
) -> None:
    config = default_config(problem, cpu64.device)
    source = render(problem, config, cpu64.device, runtime_cols=True)
    assert sound in source.text, "the text has changed: plant this fault anew"
    assert verify(problem, config, build(source, cpu64), seed=5).passed
    planted = replace(source, text=source.text.replace(sound, fault))
    verdict = verify(problem, config, build(planted, cpu64), seed=5)
    assert not verdict.passed
    assert output in verdict.message

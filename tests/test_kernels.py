"""The kernels in the simulator: every pair of knob values of the space, over widths and dtypes.

A seeded sample runs always; ``-m slow`` (tox -e cpu-full) runs the two-way covering array of each
problem's space.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from covering import covering_array

from rmsnorm_raw.backends import Backend
from rmsnorm_raw.check import verify
from rmsnorm_raw.config import Config
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.module import build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render
from rmsnorm_raw.space import enumerate_configs

# one element; an odd row of single elements; one short of a power of two; a wave's worth of
# vectors; odd and over a wave; whole vectors but no power of two (1152, 3000, 12288); the study's
# widths; wide
WIDTHS = (1, 7, 127, 256, 769, 1152, 3000, 4096, 8192, 12288, 65536, 262144)
ROWS = (3, 37)  # fewer rows than programs; more, and no multiple of rows a block
PAIRS = (("fp16", "fp16"), ("fp16", "fp32"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"))


def problems(widths: tuple[int, ...] = WIDTHS) -> Iterator[Problem]:
    for cols in widths:
        for rows in ROWS:
            for x, w in PAIRS:
                yield Problem.forward(rows, cols, x, weight_dtype=w)
                yield Problem.backward(rows, cols, x, weight_dtype=w)


def check(problem: Problem, config: Config, backend: Backend, seed: int | None = None) -> None:
    # N at run time, so that widths share builds
    source = render(problem, config, backend.device, runtime_cols=True)
    verdict = verify(problem, config, build(source, backend), seed=seed)
    assert verdict.passed, f"{problem} {config} on {backend.device.name}: {verdict}"


@pytest.fixture(params=[64, 32], ids=["wave64", "wave32"])
def cpu(request: pytest.FixtureRequest, cpu64: Backend, cpu32: Backend) -> Backend:
    return cpu64 if request.param == 64 else cpu32


@pytest.mark.parametrize("cols", WIDTHS)
def test_the_ladder_is_right_at_every_width(cpu: Backend, cols: int) -> None:
    for problem in problems((cols,)):
        # the widest rows are slow here: three of them, and 16-bit with fp32 and fp32 alone
        if cols <= 12288 or (problem.rows == 3 and problem.weight_dtype == "float32"):
            check(problem, default_config(problem, cpu.device), cpu)


@pytest.mark.parametrize("cols", [w for w in WIDTHS if w <= 12288])
def test_a_sample_of_the_space_is_right(cpu: Backend, cols: int) -> None:
    choose = random.Random(f"{cols} {cpu.device.wave}")
    for problem in choose.sample(list(problems((cols,))), 3):
        kept = enumerate_configs(problem, cpu.device).kept
        for config in choose.sample(kept, min(4, len(kept))):
            check(problem, config, cpu)


@pytest.mark.parametrize(
    ("problem", "slug"),
    [
        (Problem.forward(37, 1152, "bf16", weight_dtype=None), "b128-t64-v16-reg"),
        (Problem.forward(37, 1152, "bf16", store_rstd=False), "b256-t256-v8-reg"),
        (Problem.forward(37, 1152, "fp16", eps=0.0), "b256-t64-v16-pp-p1"),
        (Problem.forward(37, 40, "fp32"), "b64-t16-v16-reg"),
        (Problem.backward(37, 1152, "bf16", weight_dtype=None), "b256-t64-v16-reg-p1"),
        (Problem.backward(37, 1152, "bf16", has_rstd=False), "b256-t256-v16-pp-p1"),
        (Problem.backward(37, 1152, "bf16", need_dx=False), "b256-t64-v16-pp-p2"),
        (Problem.backward(37, 1152, "bf16", need_dx=False, has_rstd=False), "b256-t64-v16-reg-p1"),
        (Problem.backward(37, 1152, "bf16", need_dweight=False), "b256-t256-v16-reg-p1"),
        (Problem.backward(37, 9000, "bf16", has_rstd=False), "b256-t128-v16-2p-p1"),
        (Problem.backward(37, 9000, "bf16", need_dx=False), "b256-t256-v16-2p-p4"),
        (Problem.backward(37, 9000, "bf16", need_dx=False, has_rstd=False), "b256-v16-2p-p1"),
        (Problem.backward(37, 9000, "bf16", need_dweight=False), "b512-t256-v16-2p-p1"),
        (Problem.backward(1, 4096, "bf16"), "b256-t256-v16-reg-p1-fl"),
        (Problem.backward(37, 1152, "bf16"), "b256-t64-v16-reg-p1-fl"),
        (Problem.backward(37, 1152, "fp16", weight_dtype="fp32"), "b256-t256-v16-pp-p2-fl"),
    ],
    ids=lambda v: str(v),
)
def test_what_is_not_asked_for_is_left_out(cpu: Backend, problem: Problem, slug: str) -> None:
    check(problem, Config.parse(slug), cpu)


def test_a_last_block_leaves_its_counter_ready_for_the_next_run(cpu: Backend) -> None:
    # verify runs backward twice, the second time on a used workspace and counter
    problem = Problem.backward(300, 256, "fp32")
    for programs in (1, 2, 4):
        check(problem, Config(64, 64, 16, programs=programs, finish="last_block"), cpu)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
@pytest.mark.parametrize("cols", WIDTHS)
def test_every_pair_of_knob_values_is_right(cpu: Backend, cols: int, pair: tuple[str, str]) -> None:
    for make in (Problem.forward, Problem.backward):
        both = [make(rows, cols, pair[0], weight_dtype=pair[1]) for rows in ROWS]
        configs = [c for p in both for c in enumerate_configs(p, cpu.device).kept]
        for config in covering_array(list(dict.fromkeys(configs))):
            for problem in both:
                if config in enumerate_configs(problem, cpu.device).kept:
                    check(problem, config, cpu)

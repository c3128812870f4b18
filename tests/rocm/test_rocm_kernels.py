"""Our kernels through CuPy, hiprtc and the launch: the gate holds what they compute there.

The gate's own kernels (data, float64 sums, comparison) go the same way. A launch differs from one
in the simulator by all that lies between a plan and a driver, and by its size: plans are those for
256 compute units.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from covering import covering_array
from gfx950_stand_in import StandIn, require_stand_in
from whole_problems import whole_problems

import rmsnorm_raw as rr
from rmsnorm_raw import bandwidth
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.bandwidth import PROBES, Variant
from rmsnorm_raw.check import verify
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.errors import CompileError
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.module import build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render
from rmsnorm_raw.space import enumerate_configs

require_stand_in()

Case = tuple[Problem, Config]

#: rows that fill no block, and more than one round of a persistent grid would want; widths with a
#: ragged end, of whole chunks, of odd elements, and of rows that several blocks share
SPACES = [
    Problem.forward(37, 3000, "bf16", weight_dtype="fp32"),
    Problem.forward(4, 131072, "bf16"),
    Problem.backward(37, 3000, "bf16", weight_dtype="fp32"),
    Problem.backward(30, 8192, "bf16"),
    Problem.backward(30, 769, "fp16"),
    Problem.backward(3, 65536, "bf16"),
]
DTYPES = ("fp16", "bf16", "fp32")


def spaces() -> list[Case]:
    """Every pair of knob values of the spaces."""
    return [
        (problem, config)
        for problem in SPACES
        for config in covering_array(enumerate_configs(problem, KNOWN["gfx950"]).kept)
    ]


def check(rocm: Backend, problem: Problem, config: Config) -> None:
    verdict = verify(problem, config, build(render(problem, config, rocm.device), rocm), seed=11)
    assert verdict.passed, f"{problem} {config}: {verdict}"


@pytest.mark.parametrize("case", spaces(), ids=lambda case: case and " ".join(map(str, case)))
def test_every_pair_of_knob_values_is_right(rocm: Backend, case: Case) -> None:
    check(rocm, *case)


@pytest.mark.parametrize(
    ("make", "dtype", "weight_dtype"),
    list(itertools.product([Problem.forward, Problem.backward], DTYPES, [*DTYPES, None])),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_pair_of_dtypes_is_right(
    rocm: Backend, make: Any, dtype: str, weight_dtype: str | None
) -> None:
    problem = make(20, 1536, dtype, weight_dtype=weight_dtype)
    check(rocm, problem, default_config(problem, rocm.device))


@pytest.mark.parametrize(
    ("has_rstd", "need_dx", "need_dweight"),
    [flags for flags in itertools.product([True, False], repeat=3) if any(flags[1:])],
)
@pytest.mark.parametrize("slug", [None, "b256-t256-v16-2p-p2", "b256-t128-v16-reg-p2-fl"])
def test_what_is_not_wanted_is_not_asked_for(
    rocm: Backend, has_rstd: bool, need_dx: bool, need_dweight: bool, slug: str | None
) -> None:
    problem = Problem.backward(
        40, 1024, "bf16", has_rstd=has_rstd, need_dx=need_dx, need_dweight=need_dweight
    )
    config = Config.parse(slug) if slug else default_config(problem, rocm.device)
    if slug and (reason := rr.space.reject_reason(problem, rocm.device, config)):
        pytest.skip(f"no config of this problem: {reason}")
    check(rocm, problem, config)


def whole() -> list[Case]:
    """Every extra, by the ladder and by a config of each other path."""
    cases = []
    for problem in whole_problems(19, 1000):
        default = default_config(problem, KNOWN["gfx950"])
        paths = {default.path: default}
        kept = list(enumerate_configs(problem, KNOWN["gfx950"]).kept)
        random.Random(str(problem)).shuffle(kept)
        for config in kept:
            paths.setdefault(config.path, config)
        cases += [(problem, config) for config in paths.values()]
    return cases


@pytest.mark.parametrize("case", whole(), ids=lambda case: case and " ".join(map(str, case)))
def test_every_extra_is_right(rocm: Backend, case: Case) -> None:
    check(rocm, *case)


@pytest.mark.parametrize("make", [Problem.forward, Problem.backward])
@pytest.mark.parametrize("cols", [1, 7, 256, 16384, 65536, 262144])
@pytest.mark.parametrize("alignment", [2, 16])
def test_the_ladder_is_right_at_the_ends(
    rocm: Backend, make: Any, cols: int, alignment: int
) -> None:
    problem = replace(make(3, cols, "bf16"), alignment=alignment)
    check(rocm, problem, default_config(problem, rocm.device))


def test_rows_that_blocks_share_are_two_launches(rocm: Backend, stand_in: StandIn) -> None:
    """AMD's blocks pass words through a workspace, which the first launch clears."""
    x = rr.array.randn((4, 262144), "bfloat16", seed=0, backend="rocm")
    result = rr.rmsnorm_fwd(x)
    y = rr.array.to_numpy(result.y).astype(np.float64)
    names = [ran.entry_point for ran in stand_in.ran]
    assert names == ["rmsnorm_forward_clear", "rmsnorm_forward"]
    assert stand_in.ran[1].grid > 4
    want = rr.array.to_numpy(x).astype(np.float64)
    want /= np.sqrt((want**2).mean(1, keepdims=True) + 1e-6)
    assert np.abs(y - want).max() <= 2**-8 * np.abs(want).max()


def test_the_gate_sees_a_wrong_kernel(rocm: Backend) -> None:
    kernel = rr.build(Problem.backward(20, 1536, "bf16"), backend="rocm")
    assert kernel.check().passed
    wrong = kernel.source.text.replace("- x[e] * row.rstd * row.mean", "")
    assert wrong != kernel.source.text
    assert not kernel.with_source(wrong).check().passed


def test_a_kernel_that_does_not_compile_says_where(rocm: Backend) -> None:
    kernel = rr.build(Problem.forward(20, 1536, "bf16"), backend="rocm")
    line = 1 + kernel.source.text[: kernel.source.text.index("chain[e % 4]")].count("\n")
    with pytest.raises(CompileError, match=rf"rmsnorm_forward\.hip:{line}:\d+: error") as caught:
        kernel.with_source(kernel.source.text.replace("chain[e % 4]", "chain[e %% 4]"))
    assert caught.value.slug == str(kernel.config)


# ---- probes --------------------------------------------------------------------------------------


def variants() -> list[tuple[str, Variant]]:
    return [
        (probe, Variant(block, unroll, persistent, load, store, gap_bytes))
        for probe in PROBES
        for block, unroll, persistent, (load, store), gap_bytes in [
            (256, 1, False, ("default", "default"), 0),
            (512, 4, False, ("stream", "stream"), 4096),
            (512, 8, True, ("default", "stream"), 256),
            (1024, 8, True, ("stream", "default"), 0),
            (1024, 2, False, ("default", "default"), 2 << 20),
        ]
    ]


@pytest.mark.parametrize(
    ("probe", "variant"), variants(), ids=lambda value: getattr(value, "slug", value)
)
def test_probes_do_what_they_are_to_do(
    rocm: Backend, stand_in: StandIn, probe: Any, variant: Variant
) -> None:
    """The buffers are smaller than those that measure; the check before the timing is the same."""
    bench = bandwidth._Bench(rocm, 4 * bandwidth.STEP_BYTES, 0)
    (reading,) = bench.read(probe, [variant], {"min_samples": 6, "max_samples": 6})
    assert {ran.entry_point for ran in stand_in.ran} == {bandwidth.ENTRY_POINT[probe]}
    assert reading.samples.median_us > 0

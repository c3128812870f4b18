"""Random problems in the simulator against float64; ``--fuzz N`` says how many, 500 by default.

Most go through the gate, which has guard bands around every buffer, NaN where nothing was written,
strides of each matrix's own and addresses no better aligned than promised; the others through the
operations, on NumPy views of any strides and offsets. A build serves a handful of problems: other
rows, widths of as many chunks, data, and orders in which waves run.

What fails is printed as it can be repeated: problem, config, architecture, order and seed.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import float64
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from planted import replaced, simulated
from views import Buffer, Placed, layouts

from rmsnorm_raw import rmsnorm_bwd, rmsnorm_fwd, space
from rmsnorm_raw.backends.cpu import CpuBackend, Order
from rmsnorm_raw.check import verify
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.errors import SimulatorError
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.module import build
from rmsnorm_raw.problem import Op, Problem
from rmsnorm_raw.source import Source, render

DTYPES = ("float16", "bfloat16", "float32")
ORDERS: tuple[Order, ...] = ("forward", "reverse", "shuffle")
MOST_ROWS, MOST_COLS = 40, 700
#: one build in so many is of rows up to WIDEST, few of them
WIDE_ONE_IN, WIDEST, WIDE_ROWS = 8, 9000, 5
PER_BUILD = 5
#: of all problems, those that go through the gate
GATED = 0.8


class Run(NamedTuple):
    """A problem, the seed of its data, and the order in which waves and lanes take turns."""

    problem: Problem
    seed: int
    order: Order


class Built(NamedTuple):
    """What shares a build."""

    arch: str
    config: Config
    problem: Problem
    runs: list[Run]


def fuzz(name: str, count: float, test: Callable[..., None]) -> None:
    """Run a hypothesis test on so many examples: always the same ones under the steady profile."""
    test = settings(
        max_examples=math.ceil(count), suppress_health_check=list(HealthCheck), deadline=None
    )(test)
    if settings.default is not None and settings.default.derandomize:
        test = seed(zlib.crc32(name.encode()))(test)
    test()


@pytest.fixture
def wanted(request: pytest.FixtureRequest) -> int:
    """How many problems, all tests together."""
    return int(request.config.getoption("--fuzz"))


# ---- through the gate ----------------------------------------------------------------------------


@st.composite
def builds(draw: st.DrawFn, op: Op, arch: str) -> Built:
    """A problem, any config of its space or the ladder's, and others that the build serves."""
    # evenly: Hypothesis's own draws repeat themselves, and ten thousand of them had few configs
    pick, device = random.Random(draw(st.binary(min_size=8, max_size=8))).choice, simulated(arch)
    mostly = (True, True, True, False)
    options = {
        "weight_dtype": pick((*DTYPES, None)), "alignment": pick((2, 4, 8, 16)),
        "eps": pick((1e-6, 1e-5, 0.5, 0.0)),
    }  # fmt: skip
    if op == "forward":
        options["store_rstd"] = pick(mostly)
    else:
        options |= {name: pick(mostly) for name in ("has_rstd", "need_dx", "need_dweight")}
    wide = pick((True, *[False] * (WIDE_ONE_IN - 1)))
    most_rows, most_cols = (WIDE_ROWS, WIDEST) if wide else (MOST_ROWS, MOST_COLS)
    whole = pick((1, 8))  # widths that allow wide vectors are rare otherwise
    cols = pick((whole, *[pick(range(whole, most_cols + 1, whole))] * 15))
    make = Problem.forward if op == "forward" else Problem.backward
    problem = make(pick(range(1, most_rows + 1)), cols, pick(DTYPES), **options)
    kept = space.enumerate_configs(problem, device).kept
    path = pick(sorted({config.path for config in kept}))  # most are of one path
    config = pick((*[config for config in kept if config.path == path],))
    config = pick((default_config(problem, device), *[config] * 7))
    source = render(problem, config, device, runtime_cols=True)
    step = space.elements(problem, config)
    chunk = step * config.threads_per_row
    last = space.chunks(problem, config) * chunk
    runs = []
    for _ in range(PER_BUILD):
        cols = pick(range(last - chunk + step, min(last, most_cols) + 1, step))
        other = replace(problem, rows=pick(range(most_rows + 1)), cols=cols)
        if (
            space.reject_reason(other, device, config)
            or render(other, config, device, runtime_cols=True).digest != source.digest
        ):
            other = replace(problem, rows=other.rows)
        if pick(range(20)) == 0:
            other = replace(other, cols=0)
        runs.append(Run(other, pick(range(1 << 32)), pick(ORDERS)))
    return Built(arch, config, problem, runs)


def judge(built: Built, edit: Callable[[Source], Source] = lambda source: source) -> None:
    """Every run passes the gate."""
    device = simulated(built.arch)
    source = edit(render(built.problem, built.config, device, runtime_cols=True))
    for run in built.runs:
        backend = CpuBackend(KNOWN[built.arch].wave, order=run.order, seed=run.seed)
        verdict = verify(run.problem, built.config, build(source, backend), seed=run.seed)
        assert verdict.passed, f"{run} {built.config} on {built.arch}: {verdict}"


@pytest.mark.parametrize("arch", ["gfx950", "gfx942", "sm_90"])
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_random_problems_pass_the_gate(op: Op, arch: str, wanted: int) -> None:
    @given(builds(op, arch))
    def test(built: Built) -> None:
        judge(built)

    fuzz(f"{op} {arch}", wanted * GATED / 6 / PER_BUILD, test)


@pytest.mark.parametrize(
    ("op", "old", "new"),
    [
        ("forward", "+ lane < vectors", "+ lane <= vectors"),
        ("forward", "row * y_stride", "row * x_stride"),
        ("backward", "row < rows ? row : rows - 1", "0"),
        ("backward", "HAS_RSTD = RR_HAS_RSTD", "HAS_RSTD = false"),
    ],
)
def test_a_fault_in_the_text_is_found_among_random_problems(op: Op, old: str, new: str) -> None:
    @settings(max_examples=40, phases=[Phase.generate], database=None)
    @seed(0)
    @given(builds(op, "gfx950"))
    def test(built: Built) -> None:
        judge(built, lambda source: replaced(source, (old, new)))

    with pytest.raises((AssertionError, SimulatorError)):
        test()


# ---- through the operations, on views ------------------------------------------------------------

EPS = st.sampled_from((1e-6, 1e-5, 0.5, 0.0))
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, (1 << 32) - 1)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """Up to MOST_ROWS rows in up to three dimensions, and the columns."""
    leading: list[int] = []
    for _ in range(draw(st.integers(0, 3))):
        leading.append(draw(st.integers(0, MOST_ROWS // max(1, math.prod(leading)))))
    return (*leading, draw(st.integers(0, MOST_COLS)))


@st.composite
def arrays(draw: st.DrawFn, shape: tuple[int, ...], dtype: str, *, near: float = 0.0) -> Placed:
    """Random numbers with rows of many scales, or near one number, in any layout."""
    return Placed(shape, dtype, draw(layouts(len(shape))), draw(seeds), near)


def fresh(*inputs: Placed | None) -> list[Buffer | None]:
    return [None if placed is None else Buffer(placed) for placed in inputs]


@st.composite
def forwards(draw: st.DrawFn) -> dict[str, Any]:
    shape = draw(shapes())
    dtype = draw(dtypes)
    weight = st.one_of(st.none(), dtypes.flatmap(lambda w: arrays(shape[-1:], w, near=1.0)))
    out = st.one_of(st.none(), layouts(len(shape), written=True))
    layout = draw(out)
    return {
        "x": draw(arrays(shape, dtype)), "weight": draw(weight), "eps": draw(EPS),
        "out": None if layout is None else Placed(shape, dtype, layout, 0, 0.0),
    }  # fmt: skip


@st.composite
def backwards(draw: st.DrawFn) -> dict[str, Any]:
    shape = draw(shapes())
    dtype = draw(dtypes)
    weight = st.one_of(st.none(), dtypes.flatmap(lambda w: arrays(shape[-1:], w, near=1.0)))
    return {
        "dout": draw(arrays(shape, dtype)), "x": draw(arrays(shape, dtype)), "weight": draw(weight),
        "eps": draw(EPS), "given": draw(st.booleans()), "need_dx": draw(st.integers(0, 3)) > 0,
        "need_dweight": draw(st.integers(0, 3)) > 0,
    }  # fmt: skip


def run_forward(x: Placed, weight: Placed | None, eps: float, out: Placed | None) -> None:
    a, w, target = fresh(x, weight, out)
    assert a is not None
    into = None if target is None else target.array
    result = rmsnorm_fwd(a.array, None if w is None else w.array, eps=eps, out=into)
    float64.hold_forward(result, a.array, None if w is None else w.array, eps)
    assert all(each is None or each.untouched() for each in (a, w)), "an input was written"
    assert target is None or target.untouched(outside=True), "written outside of out"
    assert target is None or result.y is into


def run_backward(
    dout: Placed, x: Placed, weight: Placed | None, eps: float, given: bool, **needs: bool
) -> None:
    d, a, w = fresh(dout, x, weight)
    assert a is not None
    assert d is not None
    scales = None if w is None else w.array
    rstd = rmsnorm_fwd(a.array, eps=eps).rstd if given else None
    if rstd is not None:
        rstd[...] *= np.float32(1.03125)  # a backward that computed its own would differ
    result = rmsnorm_bwd(d.array, a.array, scales, rstd, eps=eps, **needs)
    assert (result.dx is None, result.dweight is None) == (
        not needs["need_dx"], not needs["need_dweight"] or w is None,
    )  # fmt: skip
    float64.hold_backward(result, d.array, a.array, scales, rstd, eps)
    assert all(each is None or each.untouched() for each in (d, a, w)), "an input was written"


def test_forward_of_random_views(wanted: int) -> None:
    @given(forwards())
    def test(call: dict[str, Any]) -> None:
        run_forward(**call)

    fuzz("views forward", wanted * (1 - GATED) / 2, test)


def test_backward_of_random_views(wanted: int) -> None:
    @given(backwards())
    def test(call: dict[str, Any]) -> None:
        run_backward(**call)

    fuzz("views backward", wanted * (1 - GATED) / 2, test)

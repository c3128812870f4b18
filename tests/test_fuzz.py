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
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 - makes np.dtype("bfloat16") known
import numpy as np
import pytest
import whole_formula
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from planted import simulated
from views import Buffer, Placed, layouts

from rmsnorm_raw import rmsnorm_bwd, rmsnorm_fwd, space
from rmsnorm_raw.backends.cpu import CpuBackend, Order
from rmsnorm_raw.check import verify
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.dtypes import fp8_dtype
from rmsnorm_raw.errors import SimulatorError
from rmsnorm_raw.extras import MAX_HEAD_COLS
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


Pick = Callable[[Sequence[Any]], Any]


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
    if pick((True, False)):
        options |= extras(pick, op, arch, options)
    wide = pick((True, *[False] * (WIDE_ONE_IN - 1)))
    most_rows, most_cols = (WIDE_ROWS, WIDEST) if wide else (MOST_ROWS, MOST_COLS)
    heads = options.get("heads", 1)
    tokens, most_cols = most_rows // heads, min(most_cols, MAX_HEAD_COLS if heads > 1 else WIDEST)
    whole = pick((1, 8))  # widths that allow wide vectors are rare otherwise
    cols = pick((whole, *[pick(range(whole, most_cols + 1, whole))] * 15))
    make = Problem.forward if op == "forward" else Problem.backward
    problem = make(heads * (1 + pick(range(tokens + 1))), cols, pick(DTYPES), **options)
    kept = space.enumerate_configs(problem, device).kept

    def kind(config: Config) -> tuple[Any, ...]:
        return config.path, config.blocks_per_row > 1, config.bulk, config.finish

    chosen = pick(sorted({kind(config) for config in kept}))  # most are of one kind
    config = pick([config for config in kept if kind(config) == chosen])
    config = pick((default_config(problem, device), *[config] * 7))
    source = render(problem, config, device, runtime_cols=True)
    step = space.elements(problem, config)
    chunk = step * config.threads_per_row
    last = space.chunks(problem, config) * chunk
    runs = []
    for _ in range(PER_BUILD):
        cols = pick(range(last - chunk + step, min(last, most_cols) + 1, step))
        other = replace(problem, rows=heads * pick(range(tokens + 1)), cols=cols)
        if (
            space.reject_reason(other, device, config)
            or render(other, config, device, runtime_cols=True).digest != source.digest
        ):
            other = replace(problem, rows=other.rows)
        if pick(range(20)) == 0:
            other = replace(other, cols=0)
        runs.append(Run(other, pick(range(1 << 32)), pick(ORDERS)))
    return Built(arch, config, problem, runs)


def extras(pick: Pick, op: Op, arch: str, options: dict[str, Any]) -> dict[str, Any]:
    """A few of what a problem may have beyond the plain operation."""
    weighted = options["weight_dtype"] is not None
    found: dict[str, Any] = {
        "bias_dtype": pick((None, *DTYPES)), "out_dtype": pick((None, *DTYPES)),
        "weight_offset": pick((0.0, 1.0, -0.75)) if weighted else 0.0,
    }  # fmt: skip
    if pick((True, False)):
        found["heads"] = pick((2, 3, 8))
        found["per_head"] = weighted and pick((True, False))
    if op == "forward":
        found |= {
            "residual_dtype": pick((None, *DTYPES)), "casting": pick(("none", "llama", "gemma")),
            "residual_out_dtype": pick(("same", None, *DTYPES)),
        }  # fmt: skip
        if pick((True, False, False)):
            found |= {"out_dtype": fp8_dtype(arch), "scale": pick(("static", "dynamic"))}
    elif options["need_dx"]:
        names = ("residual_dtype", "dresidual_out_dtype", "dx_dtype")
        found |= {name: pick((None, *DTYPES)) for name in names}
    kept = {"scale", "per_head"} | ({"out_dtype"} if "scale" in found else set())
    dropped = {name for name in found if name not in kept and pick((True, False))}
    if "heads" in dropped:
        dropped.add("per_head")
    return {name: value for name, value in found.items() if name not in dropped}


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
        ("forward", "value += b[e];", "value -= b[e];"),
        ("backward", "row * dresidual_stride", "row * dx_stride"),
    ],
)
def test_a_fault_in_the_text_is_found_among_random_problems(op: Op, old: str, new: str) -> None:
    @settings(max_examples=40, phases=[Phase.generate], database=None)
    @seed(0)
    @given(builds(op, "gfx950"))
    def test(built: Built) -> None:
        judge(built, lambda source: replace(source, text=source.text.replace(old, new)))

    with pytest.raises((AssertionError, SimulatorError)):
        test()


# ---- through the operations, on views ------------------------------------------------------------

Options = dict[str, Any]
EPS = st.sampled_from((1e-6, 1e-5, 0.5, 0.0))
DTYPE = st.sampled_from(DTYPES)
MAYBE_DTYPE = st.sampled_from((None, *DTYPES))
OFFSET = st.sampled_from((0.0, 1.0, -0.75))
FP8 = fp8_dtype("gfx950")


class Call(NamedTuple):
    """One call.

    Attributes:
        arrays: by name, those that are read.
        options: what else is passed.
        out: where y goes, if anywhere.
        in_place: those that a result is written to: "x" by y, "residual" by residual_out.
    """

    arrays: dict[str, Placed]
    options: Options
    out: Placed | None = None
    in_place: frozenset[str] = frozenset()


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """Up to MOST_ROWS rows in up to three dimensions, and the columns."""
    leading: list[int] = []
    for _ in range(draw(st.integers(0, 3))):
        leading.append(draw(st.integers(0, MOST_ROWS // max(1, math.prod(leading)))))
    return (*leading, draw(st.integers(0, MOST_COLS)))


@st.composite
def placed(
    draw: st.DrawFn, shape: tuple[int, ...], dtype: Any = DTYPE, *, near: float = 0.0,
    written: bool = False,
) -> Placed:  # fmt: skip
    """Random numbers in any layout, or in one that may be written."""
    seeds = st.integers(0, (1 << 32) - 1)
    layout = draw(layouts(len(shape), written=written))
    return Placed(shape, draw(dtype), layout, draw(seeds), near)


@st.composite
def lists_of(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of weight and bias: one for all rows, or for each of the last leading dimension."""
    return shape[-2:] if len(shape) > 1 and draw(st.booleans()) else shape[-1:]


@st.composite
def forwards(draw: st.DrawFn) -> Call:
    shape = draw(shapes())
    arrays = {"x": draw(placed(shape))}
    options: Options = {"eps": draw(EPS), "store_rstd": draw(st.booleans())}
    lists = draw(lists_of(shape))
    in_place = set()
    if draw(st.booleans()):
        arrays["weight"] = draw(placed(lists, near=1.0))
    y_dtype = arrays["x"].dtype
    if draw(st.booleans()):
        options["casting"] = draw(st.sampled_from(("none", "llama", "gemma")))
        options["weight_offset"] = draw(OFFSET) if "weight" in arrays else 0.0
        if draw(st.booleans()):
            shape_of_bias = lists if "weight" in arrays else shape[-1:]
            arrays["bias"] = draw(placed(shape_of_bias, near=0.5))
        if draw(st.booleans()):
            in_place |= {"residual"} if draw(st.booleans()) else set()
            arrays["residual"] = draw(placed(shape, written=bool(in_place)))
            options["residual_dtype"] = None if in_place else draw(MAYBE_DTYPE)
        if draw(st.integers(0, 2)):
            options["out_dtype"] = draw(MAYBE_DTYPE)
        else:
            options |= {"out_dtype": FP8, "scale": draw(st.sampled_from((0.03, 1.5, "dynamic")))}
        y_dtype = options["out_dtype"] or y_dtype
    out = None
    if y_dtype == arrays["x"].dtype and draw(st.integers(0, 3)) == 0:
        arrays["x"] = draw(placed(shape, st.just(y_dtype), written=True))
        in_place.add("x")
    elif draw(st.booleans()):
        out = draw(placed(shape, st.just(y_dtype), written=True))
    return Call(arrays, options, out, frozenset(in_place))


@st.composite
def backwards(draw: st.DrawFn) -> Call:
    shape = draw(shapes())
    x = draw(placed(shape))
    arrays = {"dout": draw(placed(shape, st.just(x.dtype))), "x": x}
    options: Options = {"eps": draw(EPS), "given": draw(st.booleans())}
    options |= {name: draw(st.integers(0, 3)) > 0 for name in ("need_dx", "need_dweight")}
    lists = draw(lists_of(shape))
    if draw(st.booleans()):
        arrays["weight"] = draw(placed(lists, near=1.0))
    if draw(st.booleans()):
        arrays["dout"] = arrays["dout"]._replace(dtype=draw(DTYPE))
        options["weight_offset"] = draw(OFFSET) if "weight" in arrays else 0.0
        options |= {"need_dbias": draw(st.booleans()), "bias_dtype": draw(MAYBE_DTYPE)}
        options |= {"dx_dtype": draw(MAYBE_DTYPE), "residual_dtype": draw(MAYBE_DTYPE)}
        if draw(st.booleans()):
            arrays["dresidual_out"] = draw(placed(shape))
    return Call(arrays, options)


def run_forward(call: Call) -> None:
    buffers = {name: Buffer(each) for name, each in call.arrays.items()}
    given = {name: buffer.array for name, buffer in buffers.items()}
    before = {name: array.copy() for name, array in given.items()}
    target = None if call.out is None else Buffer(call.out)
    results = {"out": None if target is None else target.array}
    if "x" in call.in_place:
        results["out"] = given["x"]
    if "residual" in call.in_place:
        results["residual_out"] = given["residual"]
    made = rmsnorm_fwd(**given, **call.options, **results)
    for name, buffer in buffers.items():
        assert buffer.untouched(outside=name in call.in_place), f"{name} was written"
    assert target is None or target.untouched(outside=True), "written beside out"
    names = {"out": made.y, "residual_out": made.residual_out}
    assert all(names[name] is array for name, array in results.items() if array is not None)
    own = before["x"] if "residual" not in before else before["residual"]
    if made.residual_out is not None:
        assert made.residual_out.dtype == (call.options.get("residual_dtype") or own.dtype)
    assert made.y.dtype == (call.options.get("out_dtype") or before["x"].dtype)
    assert (made.rstd is not None) == call.options["store_rstd"]
    if before["x"].size:
        names = ("eps", "weight_offset", "casting")
        rest = {name: call.options[name] for name in names if name in call.options}
        scale = call.options.get("scale")
        whole_formula.check_forward(
            made, **before, **rest, scale=None if isinstance(scale, str) else scale
        )


def run_backward(call: Call) -> None:
    buffers = {name: Buffer(each) for name, each in call.arrays.items()}
    given = {name: buffer.array for name, buffer in buffers.items()}
    options = dict(call.options)
    rstd = rmsnorm_fwd(given["x"], eps=options["eps"]).rstd if options.pop("given") else None
    if rstd is not None:
        rstd[...] *= np.float32(1.03125)  # a backward that computed its own would differ
    made = rmsnorm_bwd(**given, **options, rstd=rstd)
    for name, buffer in buffers.items():
        assert buffer.untouched(), f"{name} was written"
    x, weight = given["x"], given.get("weight")
    want = {
        "dx": (options.get("dx_dtype") or x.dtype) if options["need_dx"] else None,
        "dweight": weight.dtype if weight is not None and options["need_dweight"] else None,
        "dresidual": options.get("residual_dtype") if options["need_dx"] else None,
    }  # fmt: skip
    for name, dtype in want.items():
        got = getattr(made, name)
        assert (None if got is None else got.dtype) == dtype, name
    assert (made.dbias is not None) == options.get("need_dbias", False)
    if x.size:
        rest = {k: v for k, v in options.items() if k in ("eps", "weight_offset")}
        whole_formula.check_backward(made, **given, **rest, rstd=rstd)
    else:
        sums = (made.dweight, made.dbias)
        assert not any(each.any() for each in sums if each is not None)


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_random_views_are_right(op: Op, wanted: int) -> None:
    calls, run = (forwards(), run_forward) if op == "forward" else (backwards(), run_backward)

    @given(calls)
    def test(call: Call) -> None:
        run(call)

    fuzz(f"views {op}", wanted * (1 - GATED) / 2, test)

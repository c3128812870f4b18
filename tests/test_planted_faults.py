"""The gate on the real kernels: they pass, and with a fault planted in their text they do not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np
import pytest
from planted import replaced

from rmsnorm_raw import check, gate_data, trial
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.check import Verdict, verify, write_inputs
from rmsnorm_raw.config import Config
from rmsnorm_raw.errors import SimulatorError, WrongResult
from rmsnorm_raw.gate import HostEngine
from rmsnorm_raw.gate_device import DeviceEngine
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.launch import Tensor
from rmsnorm_raw.module import Binary, build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render

SEED = 7


def built(
    problem: Problem, backend: Backend, slug: str = "", old: str = "", new: str = ""
) -> tuple[Config, Binary]:
    """The kernels of a problem, with every ``old`` in their text replaced by ``new``."""
    config = Config.parse(slug) if slug else default_config(problem, backend.device)
    source = render(problem, config, backend.device)
    assert old in source.text, "the text has changed: plant this fault anew"
    text = source.text.replace(old, new) if old else source.text
    return config, build(dataclasses.replace(source, text=text), backend)


REAL = [
    make(rows, cols, x, weight_dtype=w, alignment=alignment)
    for make in (Problem.forward, Problem.backward)
    # whole vectors; the exact case; single elements, odd; a row of the two-pass path at wave 32
    for rows, cols, x, w, alignment in (
        (37, 200, "bf16", "fp32", 16), (6, 256, "fp16", "fp16", 16), (5, 1001, "bf16", None, 2),
        (3, 40000, "fp32", "bf16", 16),
    )
]  # fmt: skip


@pytest.mark.parametrize("problem", REAL, ids=str)
def test_a_real_kernel_passes_by_either_engine(
    problem: Problem, cpu64: Backend, cpu32: Backend
) -> None:
    for backend in (cpu64, cpu32):
        config, binary = built(problem, backend)
        first, second = (
            verify(problem, config, binary, seed=SEED, _engine=engine)
            for engine in (HostEngine, DeviceEngine)
        )
        assert first.passed, first.message
        assert second.passed, second.message
        assert first.worst == pytest.approx(second.worst, rel=1e-6)


FORWARD = Problem.forward(6, 200, "bf16")  # 25 vectors of 16 bytes: a tail in every block
BACKWARD = Problem.backward(6, 200, "bf16")
ONE_BY_ONE = Problem.forward(6, 201, "bf16", alignment=2)


@pytest.mark.parametrize(
    ("problem", "slug", "old", "new", "found"),
    [
        pytest.param(
            FORWARD, "b64-t64-v16-reg",
            "rr_sim_bf16_bits(low) | (u32)rr_sim_bf16_bits(high) << 16",
            "as_bits(low) >> 16 | (as_bits(high) & 0xffff0000u)", r"y\[", id="truncating store",
        ),
        pytest.param(
            BACKWARD, "b64-t64-v16-reg-p1", "- x[e] * row.rstd * row.mean", "", r"dx\[",
            id="dx without its row term",
        ),
        pytest.param(
            FORWARD, "b64-t64-v16-reg", "+ lane < vectors", "+ lane >= vectors",
            r"y\[0, 0\] is nan", id="swapped tail mask",
        ),
        pytest.param(
            ONE_BY_ONE, "b256-t256-v2-reg", "+ lane < vectors", "+ lane <= vectors",
            "y: byte 0 after the last row", id="one element past the row",
        ),
        pytest.param(
            FORWARD, "b256-t64-v16-reg", "if (slot_has_row(row, rows) && in_row", "if (in_row",
            "after the last row", id="rows past the last",
        ),
        pytest.param(
            FORWARD, "b64-t64-v16-reg", "row * y_stride", "row * cols", "y: byte 0 after row 0",
            id="a stride taken for N",
        ),
        pytest.param(
            FORWARD, "b256-t64-v16-reg", "row * y_stride", "row * x_stride", "after row",
            id="y by the stride of x",
        ),
        pytest.param(
            BACKWARD, "b256-t64-v16-reg-p1", "from * x_stride", "from * dout_stride", r"dx\[",
            id="x by the stride of dout",
        ),
        pytest.param(
            BACKWARD, "b256-t64-v16-reg-p1", "row * dx_stride", "row * x_stride", "after row",
            id="dx by the stride of x",
        ),
        pytest.param(
            BACKWARD, "b64-t64-v16-reg-p1", "HAS_RSTD = RR_HAS_RSTD", "HAS_RSTD = false", r"dx\[",
            id="rstd computed though it is given",
        ),
        pytest.param(
            BACKWARD, "b256-t64-v16-lds3-p1", "__syncthreads();  // nobody reads the ring any more",
            "", "dweight", id="sums written into a ring that is still read",
        ),
        pytest.param(
            FORWARD, "b64-t64-v16-reg", "+ eps)", ")", r"rstd\[", id="eps left out"
        ),
        pytest.param(
            BACKWARD, "b64-t64-v16-reg-p1", "x[e] * row.rstd *", "bf16_value(round_pair<BF16>("
            "x[e] * row.rstd, 0.0f)) *", r"dx\[", id="xhat rounded on the way",
        ),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(
    cpu64: Backend, problem: Problem, slug: str, old: str, new: str, found: str
) -> None:
    config, binary = built(problem, cpu64, slug)
    assert verify(problem, config, binary, seed=SEED).passed
    config, binary = built(problem, cpu64, slug, old, new)
    verdict = verify(problem, config, binary, seed=SEED)
    assert not verdict.passed
    assert re.search(found, verdict.message)


#: right on every row that holds anything but zeros
OF_ZEROS = [
    pytest.param(
        Problem.forward(6, 200, "bf16", out_dtype="float8_e4m3fn", scale="dynamic"),
        "7.888609e-31f", "0.0f", [r"y\[1, 0\] is nan", r"scale\[1, 0\] is 0.0"],
        id="an 8-bit y's scale has no floor",
    ),
    pytest.param(
        FORWARD, "reciprocal_sqrt(sum[0] * (1.0f / (float)cols) + eps)",
        "(sum[0] > 0.0f ? reciprocal_sqrt(sum[0] * (1.0f / (float)cols) + eps) : 0.0f)",
        [r"rstd\[1, 0\] is 0.0, want 1000.0"], id="rstd is 0 without a sum",
    ),
    pytest.param(
        FORWARD, "reciprocal_sqrt(sum[0] * (1.0f / (float)cols) + eps)",
        "-fmaxf(-reciprocal_sqrt(sum[0] * (1.0f / (float)cols) + eps), -256.0f)",
        [r"rstd\[1, 0\] is 256.0"], id="rstd is capped below eps's part",
    ),
    pytest.param(
        Problem.forward(6, 200, "bf16", bias_dtype="bf16"), "float value = in[e] * rstd;",
        "if (in[e] == 0.0f) return 0.0f; float value = in[e] * rstd;", [r"y\[1, \d+\] is 0.0"],
        id="no bias where xhat is 0",
    ),
    pytest.param(
        Problem.forward(6, 200, "bf16", residual_dtype="bf16"), "float value = in[e] * rstd;",
        "float value = in[e] / fabsf(in[e]) * fabsf(in[e]) * rstd;", [r"y\[1, 0\] is nan"],
        id="xhat is 0 / 0",
    ),
    pytest.param(
        BACKWARD, "- x[e] * row.rstd * row.mean", "- x[e] / x[e] * x[e] * row.rstd * row.mean",
        [r"dx\[1, 0\] is nan"], id="dx's row term is 0 / 0",
    ),
    pytest.param(
        dataclasses.replace(BACKWARD, has_rstd=False),
        "rstd = reciprocal_sqrt(sum[1] * inverse_cols + eps);",
        "rstd = sum[1] > 0.0f ? reciprocal_sqrt(sum[1] * inverse_cols + eps) : 0.0f;",
        [r"dx\[1, \d+\] is -?0.0"], id="dx is 0 without a sum",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "old", "new", "found"), OF_ZEROS)
def test_a_fault_that_only_a_row_of_zeros_shows_is_found(
    cpu64: Backend, monkeypatch: pytest.MonkeyPatch, problem: Problem, old: str, new: str,
    found: list[str],
) -> None:  # fmt: skip
    config, binary = built(problem, cpu64, "", old, new)
    verdict = verify(problem, config, binary, seed=SEED)
    assert not verdict.passed
    for each in found:
        assert re.search(each, verdict.message)
    monkeypatch.setattr(check, "_zero_row", lambda problem: None)
    monkeypatch.setattr(trial, "_with_a_nan", lambda *args: [])  # which shows some of them too
    assert verify(problem, config, binary, seed=SEED).passed


#: right where every weight is positive
OF_SIGNS = [
    pytest.param(FORWARD, "out[e] *= w[e];", "out[e] *= fabsf(w[e]);", "y", id="|w|"),
    pytest.param(
        FORWARD, "out[e] *= w[e];", "out[e] *= w[e] == 0.0f ? 1.0f : w[e];", "y", id="0 is 1"
    ),
    pytest.param(
        FORWARD, "out[e] *= w[e];", "out[e] *= fmaxf(w[e], 0.0f);", "y", id="0 is the least"
    ),
    pytest.param(
        BACKWARD, "dout[e] * weight_at(w, e)", "dout[e] * fabsf(weight_at(w, e))", "dx",
        id="|w| in g",
    ),
    pytest.param(
        BACKWARD, "dout[e] * weight_at(w, e)",
        "dout[e] * (weight_at(w, e) == 0.0f ? 1.0f : weight_at(w, e))", "dx", id="0 is 1 in g",
    ),
    *(
        pytest.param(
            make(6, 200, "bf16", weight_offset=1.0), "w[e] + RR_WEIGHT_OFFSET",
            "fabsf(w[e]) + RR_WEIGHT_OFFSET", output, id=f"{output} of an offset + |w|",
        )
        for make, output in ((Problem.forward, "y"), (Problem.backward, "dx"))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "old", "new", "output"), OF_SIGNS)
def test_a_fault_that_only_negative_or_zero_weights_show_is_found(
    cpu64: Backend, monkeypatch: pytest.MonkeyPatch, problem: Problem, old: str, new: str,
    output: str,
) -> None:  # fmt: skip
    config, binary = built(problem, cpu64, "", old, new)
    verdict = verify(problem, config, binary, seed=SEED)
    assert not verdict.passed
    assert verdict.worst[output] > 1
    monkeypatch.setattr(gate_data, "_signs", np.ones_like)
    assert verify(problem, config, binary, seed=SEED + 1).passed


HALF = Problem.forward(40, 256, "fp16")
HALF_BACKWARD = Problem.backward(40, 256, "fp16")
WITHIN = "(x[e] > {most} ? {most} : x[e] < -{most} ? -{most} : x[e])"
CLAMPED_X = ("x[e] * rstd;", f"{WITHIN} * rstd;")
CLAMPED_Y = (
    "if constexpr (HAS_WEIGHT) out[e] *= w[e];",
    "out[e] *= w[e]; out[e] = out[e] > {most} ? {most} : out[e] < -{most} ? -{most} : out[e];",
)
#: right on numbers of an ordinary size: what is wrong, and what shows it
OF_SIZES = [
    pytest.param(HALF, CLAMPED_X, "1000.f", "large row", r"y\[2, \d+\]", id="x within 1000"),
    pytest.param(FORWARD, CLAMPED_X, "65504.f", "large row", r"y\[2, ", id="bf16 x within fp16"),
    pytest.param(
        HALF, ("reciprocal_sqrt(sum[0] * (1.0f / (float)cols) + eps)",
        "fmaxf(reciprocal_sqrt(sum[0] * (1.0f / (float)cols) + eps), {most})"), "1e-3f",
        "large row", r"rstd\[2, 0\] is 0.001", id="rstd of 1e-3 at least",
    ),
    pytest.param(
        HALF_BACKWARD, ("- x[e] * row.rstd", f"- {WITHIN} * row.rstd"),
        "1000.f", "large row", r"dx\[2, ", id="x within 1000 in dx",
    ),
    pytest.param(
        dataclasses.replace(HALF, weight_dtype="float32"), CLAMPED_Y, "100.f", "large weights",
        r"y\[\d+, \d+\] is -?100.0", id="y within 100",
    ),
    pytest.param(
        HALF, CLAMPED_Y, "65504.f", "large weights",
        r"y\[\d+, \d+\] is -?65504.0, want -?65536.0", id="y that overflows is the largest number",
    ),
    pytest.param(
        HALF, ("x[e] * rstd;", "fmaxf(x[e] * rstd, -{most});"), "1e4f", "NaN",
        r"^y\[0, 0\] is -\d+\.0, though x\[0, 0\] is nan$", id="a NaN is a number",
    ),
    pytest.param(
        HALF, ("x[e] * rstd;", "x[e] * (rstd == rstd ? rstd : {most});"), "1.0f", "NaN",
        r"^y\[0, 1\] is ", id="a NaN is one in one column",
    ),
    pytest.param(
        HALF_BACKWARD,
        ("- x[e] * row.rstd * row.mean", "- fmaxf(x[e] * row.rstd * row.mean, -{most})"), "1e4f",
        "NaN", r"^dx\[0, 0\] is .*, though x\[0, 0\] is nan$", id="a NaN is a number in dx",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "fault", "most", "shown_by", "found"), OF_SIZES)
def test_a_fault_that_only_large_numbers_or_a_nan_show_is_found(
    cpu64: Backend, monkeypatch: pytest.MonkeyPatch, problem: Problem, fault: tuple[str, str],
    most: str, shown_by: str, found: str,
) -> None:  # fmt: skip
    old, new = fault
    config, binary = built(problem, cpu64, "", old, new.replace("{most}", most))
    verdict = verify(problem, config, binary, seed=SEED)
    assert not verdict.passed
    assert re.search(found, verdict.message)
    if shown_by == "large row":
        monkeypatch.setattr(check, "_large_row", lambda problem: None)
    elif shown_by == "large weights":
        monkeypatch.setattr(gate_data, "LARGE_WEIGHT", 1.0)
    if shown_by == "NaN" or "fmaxf" in new:  # which lets a NaN go
        monkeypatch.setattr(trial, "_with_a_nan", lambda *args: [])
    assert verify(problem, config, binary, seed=SEED + 1).passed


#: where y is stored, and where it and x lie
KEPT = (
    "store_normalised(y, (u64)(row * y_stride) + element, kept[c], w, scale);",
    "(u64)(row * y_stride)", "(u64)(row * x_stride)",
)  # fmt: skip
AGAIN = ("store_normalised(y, y_row + element, again, w, scale);", "y_row", "x_row")
#: without it a compiler need not read x again
RESTRICT = ("void* __restrict__", "void*")


@pytest.mark.parametrize(
    ("slug", "store", "y_row", "x_row"),
    [
        ("b256-t64-v16-reg", *KEPT), ("b256-t64-v16-pp-p1", *KEPT), ("b64-v16-lds2-p1", *KEPT),
        ("b64-t64-v16-2p", *AGAIN),
    ],
)  # fmt: skip
def test_an_x_that_is_read_after_y_is_stored_is_found_in_place(
    cpu64: Backend, slug: str, store: str, y_row: str, x_row: str
) -> None:
    late = (
        f"{store} In late; x_of(late) = load_vector(x, {x_row} + element);"
        f" store_normalised(y, {y_row} + element, late, w, scale);"
    )
    config = Config.parse(slug)
    source = render(FORWARD, config, cpu64.device)
    for pieces, passes in (((RESTRICT,), True), ((RESTRICT, (store, late)), False)):
        binary = build(replaced(source, *pieces), cpu64)
        verdict = verify(FORWARD, config, binary, seed=SEED)
        assert verdict.passed == passes
        assert verdict.worst["y"] <= 1  # it is right out of place
    assert verdict.message.startswith("in place (y over x), and only there: y[0, ")


#: a row that is loaded, and stored, once more when it has been stored
STORE = "store_row(row, kept, sum_row(row, kept, area), area);"
ONCE_MORE = f"load_row(row, kept); {STORE}"


@pytest.mark.parametrize(
    ("slug", "store", "again"),
    [
        (
            "b256-t256-v16-pp-p1",
            STORE + "\n  };", f"{STORE} {ONCE_MORE} }};",
        ),
        (
            "b64-v16-lds2-p1", "area ^= 1;",
            f"if (group > first + step) {{ {ONCE_MORE} }} area ^= 1;",
        ),
    ],
    ids=["pp", "lds"],
)  # fmt: skip
def test_a_persistent_loop_that_is_wrong_in_place_alone_is_found(
    cpu64: Backend, monkeypatch: pytest.MonkeyPatch, slug: str, store: str, again: str
) -> None:
    """Right in the only row of a program, or in its second, and wrong in the third."""
    problem, config = Problem.forward(64, 200, "bf16"), Config.parse(slug)
    source = replaced(render(problem, config, cpu64.device), RESTRICT)
    binary = build(replaced(source, (store, again)), cpu64)
    verdict = verify(problem, config, binary, seed=SEED)
    assert not verdict.passed
    assert verdict.worst["y"] <= 1
    assert verdict.message.startswith("in place (y over x), and only there: y[")
    monkeypatch.setattr(check, "_few_tokens", lambda *args: 1)
    assert verify(problem, config, binary, seed=SEED).passed


def test_a_residual_that_is_read_after_residual_out_is_stored_is_found_in_place(
    cpu64: Backend,
) -> None:
    problem = Problem.forward(6, 200, "bf16", residual_dtype="fp32")
    store = "store_residual_out(residual_out, (u64)(row * residual_out_stride) + element, again);"
    late = f"{store} RR_LOAD_RESIDUAL(again, row, element);"
    assert verify(problem, *built(problem, cpu64, "b64-t64-v16-2p"), seed=SEED).passed
    verdict = verify(problem, *built(problem, cpu64, "b64-t64-v16-2p", store, late), seed=SEED)
    assert not verdict.passed
    assert verdict.worst["y"] <= 1
    where = "y over x and residual_out over residual"
    assert verdict.message.startswith(f"in place ({where}), and only there: y[0, ")


def test_a_hard_coded_wave_width_is_found(cpu64: Backend, cpu32: Backend) -> None:
    fault = ("threadIdx.x / RR_WAVE", "threadIdx.x / 32")
    config, binary = built(FORWARD, cpu32, "b256-t256-v16-reg", *fault)
    assert verify(FORWARD, config, binary, seed=SEED).passed
    config, binary = built(FORWARD, cpu64, "b256-t256-v16-reg", *fault)
    with pytest.raises((SimulatorError, WrongResult)):
        check.require(verify(FORWARD, config, binary, seed=SEED), FORWARD, config)


@pytest.mark.parametrize("make", [Problem.forward, Problem.backward])
@pytest.mark.parametrize(("rows", "cols"), [(0, 64), (4, 0)])
def test_nothing_is_launched_for_no_elements(
    cpu64: Backend, make: Callable[..., Problem], rows: int, cols: int
) -> None:
    config, binary = built(make(4, 64, "bf16"), cpu64)
    empty = make(rows, cols, "bf16")
    verdict = verify(empty, config, binary, seed=SEED)
    assert verdict == Verdict(True, {}, SEED, "")
    write_inputs(empty, cpu64, dict.fromkeys(("x", "dout", "weight", "rstd"), Tensor(0)), SEED)


def test_seeds_are_fresh_and_can_be_repeated(cpu64: Backend) -> None:
    config, binary = built(FORWARD, cpu64)
    first, second = (verify(FORWARD, config, binary) for _ in range(2))
    assert first.seed != second.seed
    assert verify(FORWARD, config, binary, seed=first.seed) == first


def test_a_row_of_a_million_columns_is_judged(cpu64: Backend) -> None:
    problem = Problem.forward(2, 1 << 20, "bf16")
    config, binary = built(problem, cpu64)
    verdict = verify(problem, config, binary, seed=SEED)
    assert verdict.passed, verdict.message

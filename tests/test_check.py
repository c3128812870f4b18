from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy_kernel import (
    BACKWARDS,
    CHAINS,
    FN,
    FNUZ,
    FORWARDS,
    SEED,
    NumpyKernel,
    Stored,
    Tensors,
    backward,
    forward,
    judge,
    subject,
)

from rmsnorm_raw import bounds, check, trial
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.check import Verdict, write_inputs
from rmsnorm_raw.config import Config
from rmsnorm_raw.dtypes import stored_bytes
from rmsnorm_raw.errors import InvalidInput, WrongResult
from rmsnorm_raw.gate import Case, HostEngine
from rmsnorm_raw.gate_data import gate_data
from rmsnorm_raw.gate_device import DeviceEngine
from rmsnorm_raw.guarded import allocate
from rmsnorm_raw.launch import Tensor
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.space import grid_programs
from rmsnorm_raw.trial import Subject, reference, write

DTYPES = ("fp16", "bf16", "fp32")
PAIRS = [(x, w) for x in DTYPES for w in (*DTYPES, None)]

# ---- what is right passes ------------------------------------------------------------------------


@pytest.mark.parametrize(("x", "w"), PAIRS)
@pytest.mark.parametrize("cols", [200, 256])  # 256: with the exact case
def test_a_correct_kernel_passes(cpu64: Backend, x: str, w: str | None, cols: int) -> None:
    for problem in (forward(x, w, cols), backward(x, w, cols)):
        verdict = judge(NumpyKernel(problem, cpu64), problem, cpu64)
        assert verdict.passed, verdict.message
        assert verdict.worst.keys() == {each.name for each in problem.outputs}
        main = "y" if problem.op == "forward" else "dx"
        # of 8,000 roundings some come close to half a spacing: the bound has no slack to hide in
        assert verdict.worst[main] > (0.02 if x == "fp32" else 0.95)


@pytest.mark.parametrize(
    "flags",
    [{"has_rstd": False}, {"need_dx": False}, {"need_dweight": False}],
    ids=lambda flags: next(iter(flags)),
)
def test_every_form_of_backward_is_judged(cpu64: Backend, flags: dict[str, bool]) -> None:
    problem = backward(cols=256, **flags)
    verdict = judge(NumpyKernel(problem, cpu64), problem, cpu64)
    assert verdict.passed, verdict.message
    assert verdict.worst.keys() == {
        name for name in ("dx", "dweight") if flags.get(f"need_{name}", True)
    }


def test_forward_without_rstd_is_judged_on_y_alone(cpu64: Backend) -> None:
    problem = dataclasses.replace(forward(), store_rstd=False)
    assert judge(NumpyKernel(problem, cpu64), problem, cpu64).worst.keys() == {"y"}


@pytest.mark.parametrize("cols", [200, 256])  # 256: with the exact case
@pytest.mark.parametrize("problem", [*FORWARDS, *BACKWARDS], ids=str)
def test_a_correct_kernel_of_the_whole_operator_passes(
    cpu64: Backend, problem: Problem, cols: int
) -> None:
    problem = dataclasses.replace(problem, cols=cols)
    verdict = judge(NumpyKernel(problem, cpu64), problem, cpu64)
    assert verdict.passed, verdict.message
    assert verdict.worst.keys() == {each.name for each in problem.operands if each.is_output}
    for name in ("y", "dx", "dresidual"):
        if name in verdict.worst and Case(problem, 0, False).shape(name)[2] != "float32":
            assert verdict.worst[name] > 0.95


@pytest.mark.parametrize(
    ("more", "cols", "exact"),
    [
        ({}, 256, True),
        ({}, 200, False),
        ({}, 1 << 18, True),
        ({}, 1 << 19, False),
        ({"weight_offset": 1.0, "dresidual_out_dtype": "fp32"}, 1 << 17, True),
        ({"weight_offset": 1.0}, 1 << 18, False),
        ({"dresidual_out_dtype": "fp32"}, 1 << 18, False),
        ({"weight_offset": 0.1}, 256, False),
        ({"has_rstd": False}, 256, False),
    ],
)
def test_the_exact_case_is_tried_where_fp32_rounds_nothing(
    more: dict[str, Any], cols: int, exact: bool
) -> None:
    assert check._has_exact_case(Problem.backward(4, cols, "bf16", **more)) == exact
    assert not check._has_exact_case(Problem.forward(4, cols, "bf16"))


@pytest.mark.parametrize(
    ("problem", "row"),
    [
        (forward(), 1),
        (backward(heads=4), 4),
        (Problem.forward(3, 8, "bf16"), 1),
        # the first row and the last say more
        (Problem.forward(2, 8, "bf16"), None),
        (Problem.backward(16, 8, "bf16", heads=8), None),
        # rstd would be an infinity there, or rough where fp32 flushes
        (Problem.forward(3, 8, "bf16", eps=0.0), None),
        (Problem.forward(3, 8, "bf16", eps=1e-38), None),
        (Problem.forward(3, 8, "bf16", eps=2e-38), 1),
    ],
    ids=str,
)
def test_a_row_of_zeros_is_there_where_it_can_be(
    cpu64: Backend, problem: Problem, row: int | None
) -> None:
    kernel = NumpyKernel(problem, cpu64)
    seen: list[np.ndarray] = []

    def run(tensors: Tensors, rows: int) -> None:
        kernel(tensors, rows)
        seen.append(kernel.read("x"))

    assert check._zero_row(problem) == row
    judge(run, problem, cpu64)
    zeros = np.flatnonzero(~seen[0].any(axis=1))
    assert zeros.tolist() == ([] if row is None else [row])


# ---- what is wrong fails -------------------------------------------------------------------------


def fails(problem: Problem, backend: Backend, output: str, **faults: Any) -> Verdict:
    verdict = judge(NumpyKernel(problem, backend, **faults), problem, backend)
    assert not verdict.passed
    assert verdict.worst[output] > 1
    assert f"{output}[" in verdict.message
    return verdict


@pytest.mark.parametrize("w", ["bf16", "fp32"])
def test_a_truncating_store_fails(cpu64: Backend, w: str) -> None:
    verdict = fails(forward("bf16", w), cpu64, "y", fault="stores are cut")
    assert verdict.worst["y"] < 2  # within one ulp
    fails(backward("bf16", w), cpu64, "dx", fault="stores are cut")


@pytest.mark.parametrize("x", DTYPES)
def test_a_dx_without_its_row_term_fails(cpu64: Backend, x: str) -> None:
    assert "dweight" not in fails(backward(x), cpu64, "dx", fault="dx has no row term").message


@pytest.mark.parametrize("x", DTYPES)
def test_one_nan_fails(cpu64: Backend, x: str) -> None:
    def spoil(outputs: Stored) -> None:
        output = outputs.get("y", outputs.get("dx"))
        assert output is not None
        output[3, 77] = {"fp16": 0x7E00, "bf16": 0x7FC0, "fp32": 0x7FC00000}[x]

    for problem, output in ((forward(x), "y"), (backward(x), "dx")):
        verdict = fails(problem, cpu64, output, spoil=spoil)
        assert verdict.worst[output] == np.inf
        assert f"{output}[3, 77] is nan" in verdict.message


@pytest.mark.parametrize("x", ["fp16", "bf16"])
@pytest.mark.parametrize("output", ["y", "dx"])
def test_one_element_of_thousands_off_by_an_ulp_fails(cpu64: Backend, x: str, output: str) -> None:
    def spoil(outputs: Stored) -> None:
        outputs[output][17, 111] += 1

    problem = forward(x) if output == "y" else backward(x)
    assert f"{output}[17, 111]" in fails(problem, cpu64, output, spoil=spoil).message


def test_an_element_that_is_not_written_fails(cpu64: Backend) -> None:
    def spoil(outputs: Stored) -> None:
        outputs["y"][39, 199] = 0xFFFF  # what outputs begin as

    assert "y[39, 199] is nan" in fails(forward(), cpu64, "y", spoil=spoil).message


@pytest.mark.parametrize("output", ["rstd", "dweight"])
@pytest.mark.parametrize("x", DTYPES)
def test_a_biased_list_fails(cpu64: Backend, output: str, x: str) -> None:
    relative = 2.0**-18 if output == "rstd" or x == "fp32" else {"fp16": 2e-3, "bf16": 1e-2}[x]

    def spoil(outputs: Stored) -> None:
        dtype = Case(problem, 0, False).shape(output)[2]
        values = bounds.decode(outputs[output], dtype)
        outputs[output][:] = bounds.encode(values * (1 + relative), dtype)

    problem = forward(x) if output == "rstd" else backward(x)
    fails(problem, cpu64, output, spoil=spoil)


#: what it is judged by, what it does wrong, an output that shows it
FAULTS = [
    (forward("bf16", bias_dtype="bf16"), "the bias of another column", "y"),
    (forward("fp16", residual_dtype="fp16"), "the residual is added twice", "y"),
    (forward("fp16", residual_dtype="fp16"), "the residual is added twice", "residual_out"),
    (forward("bf16", residual_dtype="fp32"), "the residual is rounded to x's dtype", "y"),
    (forward("bf16", residual_dtype="fp32"), "the residual is rounded to x's dtype",
     "residual_out"),
    (forward("bf16", residual_dtype="bf16"), "the variance is the rounded sum's", "y"),
    (forward("bf16", residual_dtype="bf16"), "the variance is the rounded sum's", "rstd"),
    (forward("fp32", residual_dtype="bf16"), "y is of the rounded sum", "y"),
    (forward("bf16", residual_dtype="bf16"), "y is of the rounded sum", "y"),
    (forward("bf16", residual_dtype="fp32"), "the sum is rounded to bf16 on the way",
     "residual_out"),
    (forward("bf16", residual_dtype="fp16"), "the sum is rounded to bf16 on the way",
     "residual_out"),
    (forward("fp16", heads=4, per_head=True), "the weight of another head", "y"),
    (forward("fp16", heads=4, per_head=True, bias_dtype="fp32"), "the bias of another head", "y"),
    *((forward(x, out_dtype=dtype, scale=scale), "stores are cut", "y")
      for x in ("bf16", "fp32") for dtype in (FN, FNUZ) for scale in ("static", "dynamic")),
    *((forward("bf16", out_dtype=dtype, scale="static"), fault, "y")
      for dtype in (FN, FNUZ) for fault in ("nothing is clamped", "large numbers wrap")),
    (forward("bf16", out_dtype=FN, scale="dynamic"), "y has the scale of another row", "y"),
    (forward("bf16", out_dtype=FN, scale="dynamic", heads=4), "y has the scale of another row",
     "y"),
    (forward("bf16", out_dtype=FN, scale="dynamic"), "the scale is max|h|'s", "scale"),
    (forward("bf16", None, out_dtype=FNUZ, scale="dynamic"), "the scale is max|h|'s", "scale"),
    (backward("bf16", dresidual_out_dtype="bf16"), "dresidual_out goes through the norm", "dx"),
    (backward("bf16", dresidual_out_dtype="fp32"), "dx is rounded before dresidual_out is added",
     "dx"),
    (backward("bf16", dresidual_out_dtype="fp32", residual_dtype="fp32"),
     "dx is rounded before dresidual_out is added", "dresidual"),
    (backward("bf16", bias_dtype="bf16"), "dbias lacks the last row", "dbias"),
    (backward("fp16", bias_dtype="fp32", heads=4, per_head=True), "dbias lacks the last row",
     "dbias"),
    (backward("bf16", None, bias_dtype="bf16"), "dbias is dweight", "dbias"),
    (backward("fp16", heads=4, per_head=True), "the sums over rows are another head's", "dweight"),
    (backward("fp16", heads=4, per_head=True, bias_dtype="fp16"),
     "the sums over rows are another head's", "dbias"),
    (backward("fp16", heads=4, per_head=True), "the weight of another head", "dx"),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "fault", "output"), FAULTS, ids=str)
def test_a_fault_in_the_whole_operator_fails(
    cpu64: Backend, problem: Problem, fault: str, output: str
) -> None:
    fails(problem, cpu64, output, fault=fault)


#: what it is judged by, what it computes, an output that shows it
LEFT_OUT = [
    (forward("bf16", bias_dtype="bf16"), forward("bf16"), "y"),
    (forward("bf16", weight_offset=1.0), forward("bf16"), "y"),
    (backward("bf16", weight_offset=1.0), backward("bf16"), "dx"),
    (forward("bf16", casting="llama"), forward("bf16"), "y"),
    (forward("fp16", casting="llama"), forward("fp16"), "y"),
    (forward("bf16"), forward("bf16", casting="llama"), "y"),
    (forward("fp16", "fp32"), forward("fp16", "fp32", casting="llama"), "y"),
    (forward("bf16", residual_dtype="bf16", casting="llama"),
     forward("bf16", residual_dtype="bf16"), "y"),
    (forward("bf16", heads=4, per_head=True), forward("bf16", heads=4), "y"),
    (forward("bf16", residual_dtype="bf16", residual_out_dtype=None), forward("bf16"), "y"),
    (backward("bf16", dresidual_out_dtype="bf16"), backward("bf16"), "dx"),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "computed", "output"), LEFT_OUT, ids=str)
def test_the_result_of_another_problem_fails(
    cpu64: Backend, problem: Problem, computed: Problem, output: str
) -> None:
    verdict = judge(NumpyKernel(computed, cpu64), problem, cpu64)
    assert not verdict.passed
    assert verdict.worst[output] > 1


@pytest.mark.parametrize("dtype", [FN, FNUZ])
def test_an_8_bit_y_that_is_not_written_fails(cpu64: Backend, dtype: str) -> None:
    problem = forward(out_dtype=dtype, scale="dynamic")
    verdict = judge(lambda tensors, rows: None, problem, cpu64)
    assert verdict.worst == dict.fromkeys(("y", "rstd", "scale"), np.inf)


@pytest.mark.parametrize("dtype", [FN, FNUZ])
@pytest.mark.parametrize("scale", ["static", "dynamic"])
def test_one_8_bit_element_of_thousands_off_by_one_fails(
    cpu64: Backend, dtype: str, scale: str
) -> None:
    def spoil(outputs: Stored) -> None:
        outputs["y"][17, 111] ^= 1

    problem = forward(out_dtype=dtype, scale=scale)
    assert "y[17, 111]" in fails(problem, cpu64, "y", spoil=spoil).message


@pytest.mark.parametrize("dtype", [FN, FNUZ])
def test_a_given_scale_has_elements_clamped_and_others_subnormal(
    cpu64: Backend, dtype: str
) -> None:
    seen: list[np.ndarray] = []
    problem = forward(out_dtype=dtype, scale="static")
    kernel = NumpyKernel(
        problem, cpu64, spoil=lambda outputs: seen.append(bounds.decode(outputs["y"], dtype))
    )
    assert judge(kernel, problem, cpu64).passed
    clamped, small = seen[:2]
    largest, least_normal = {FN: (448, 2.0**-6), FNUZ: (240, 2.0**-7)}[dtype]
    assert 0.005 < (np.abs(clamped) == largest).mean() < 0.1
    assert 0.2 < (np.abs(small) < least_normal).mean() < 0.6


def test_llama_allows_either_side_of_a_tie_and_no_more(cpu64: Backend) -> None:
    """Elements whose xhat is within fp32's error of a tie may be rounded either way."""
    problem = Problem.forward(400, 2048, "bf16", weight_dtype=None, casting="llama")
    case, kernel = Case(problem, SEED, False, check.GIVEN_RSTD), NumpyKernel(problem, cpu64)
    buffers = {name: allocate(cpu64, case, name, 0xFF) for name in ("x", "y", "rstd")}
    tensors = {name: buffer.tensor for name, buffer in buffers.items()}
    host = HostEngine(cpu64)
    write(host, case, tensors)
    x = host._rows(case, tensors, "x", 0, 400)
    xhat = x * reference(host, case, tensors).terms[0][:, None]
    factor = bounds.bound_factor("y", 16)
    ends = [bounds.rounded(xhat * (1 + way * factor), "bfloat16") for way in (-1, 1)]
    near = ends[0] != ends[1]
    assert 0 < near.sum() < 1e-3 * near.size
    for stored in (*ends, np.where(near, 2 * ends[1] - ends[0], ends[0])):
        kernel.tensors = tensors
        kernel.write("y", bounds.encode(stored, "bfloat16"))
        terms = reference(host, case, tensors).terms
        right = stored is ends[0] or stored is ends[1]
        for engine in (host, DeviceEngine(cpu64)):
            assert (engine.worst(case, tensors, "y", terms, factor).ratio <= 1) == right


def test_swapped_rows_fail(cpu64: Backend) -> None:
    def spoil(outputs: Stored) -> None:
        for stored in outputs.values():
            if len(stored) > 1:
                stored[[11, 24]] = stored[[24, 11]]  # rows of one scale

    fails(forward(), cpu64, "y", spoil=spoil)
    fails(backward(), cpu64, "dx", spoil=spoil)


def test_a_bias_of_dweight_s_last_bit_fails_only_in_the_exact_case(cpu64: Backend) -> None:
    """fp32 has no half spacing: the gate's bound allows a last bit, equality does not."""

    def spoil(outputs: Stored) -> None:
        outputs["dweight"][0, 5] += 1

    rough = backward("fp32", cols=200)
    assert judge(NumpyKernel(rough, cpu64, spoil=spoil), rough, cpu64).passed
    verdict = fails(backward("fp32", cols=256), cpu64, "dweight", spoil=spoil)
    assert "dweight[0, 5]" in verdict.message
    assert "want exactly" in verdict.message


# ---- what is touched beside the outputs ----------------------------------------------------------


def judge_with(after: Callable[[NumpyKernel], None], problem: Problem, backend: Backend) -> Verdict:
    """The verdict on a correct kernel that then does something else."""
    kernel = NumpyKernel(problem, backend)

    def run(tensors: Tensors, rows: int) -> None:
        kernel(tensors, rows)
        after(kernel)

    return judge(run, problem, backend)


PREQUANTISED = forward(bias_dtype="bf16", residual_dtype="fp32", out_dtype=FNUZ, scale="dynamic")


@pytest.mark.parametrize(
    ("problem", "name", "where"),
    [
        (problem, operand.name, where)
        for problem in (forward(), PREQUANTISED)
        for operand in problem.operands
        for where in ("before", "gap", "after")
        if operand.is_matrix or where != "gap"
    ],
    ids=str,
)
def test_a_store_outside_a_tensor_fails(
    cpu64: Backend, problem: Problem, name: str, where: str
) -> None:
    def stray(kernel: NumpyKernel) -> None:
        rows, cols, dtype = Case(problem, 0, False).shape(name)
        tensor, item = kernel.tensors[name], stored_bytes(dtype)
        row = {"before": 0, "gap": 6, "after": rows - 1}[where]
        start = tensor.address + row * (tensor.row_stride or cols) * item
        kernel.put(start + (-1 if where == "before" else cols * item), np.zeros(1, np.uint8))

    verdict = judge_with(stray, problem, cpu64)
    assert not verdict.passed
    text = {
        "before": "byte 1 before the first row",
        "gap": "byte 0 after row 6",
        "after": "byte 0 after the last row",
    }
    assert verdict.message == f"{name}: {text[where]} was written, outside the tensor"


def test_a_nan_read_past_a_row_of_x_cannot_hide_past_a_row_of_y(cpu64: Backend) -> None:
    """Gaps of inputs and of outputs begin differently, so even a copied NaN leaves a trace."""

    def copy_gap(kernel: NumpyKernel) -> None:
        x, y = kernel.tensors["x"], kernel.tensors["y"]
        kernel.put(y.address + 400, cpu64.to_host(x.address + 400, 2, 0))

    assert "y: byte 0 after row 0" in judge_with(copy_gap, forward(), cpu64).message


WHOLE = [
    forward(bias_dtype="fp32", residual_dtype="fp16", out_dtype=FN, scale="static"),
    backward(dresidual_out_dtype="fp32", bias_dtype="bf16", heads=4, per_head=True),
]


@pytest.mark.parametrize(
    ("problem", "name"),
    [(p, each.name) for p in WHOLE for each in p.operands if not each.is_output],
    ids=str,
)
def test_a_changed_input_fails(cpu64: Backend, problem: Problem, name: str) -> None:
    def overwrite(kernel: NumpyKernel) -> None:
        if kernel.calls % 2 or problem.op == "forward":  # the first of two runs
            address = kernel.tensors[name].address
            kernel.put(address, cpu64.to_host(address, 1, 0) ^ np.uint8(1))

    verdict = judge_with(overwrite, problem, cpu64)
    assert not verdict.passed
    assert f"{name}[0, 0] was written, and it is an input" in verdict.message


@pytest.mark.parametrize("name", ["dweight", "dbias"])
def test_a_sum_over_rows_that_changes_from_run_to_run_fails(cpu64: Backend, name: str) -> None:
    def wobble(kernel: NumpyKernel) -> None:
        address = kernel.tensors[name].address
        kernel.put(address, cpu64.to_host(address, 1, 0) ^ np.uint8(kernel.calls % 2))

    verdict = judge_with(wobble, backward("fp32", bias_dtype="fp32"), cpu64)
    assert verdict.message == f"{name} has other bits in a second run on the same data"
    assert verdict.worst[name] <= 1


@pytest.mark.parametrize("name", ["x", "y", "residual", "residual_out"])
def test_a_store_between_the_rows_of_a_token_s_heads_fails(cpu64: Backend, name: str) -> None:
    def stray(kernel: NumpyKernel) -> None:
        tensor, item = kernel.tensors[name], stored_bytes(Case(problem, 0, False).shape(name)[2])
        at = 7 * tensor.row_stride + 2 * tensor.head_stride + problem.cols
        kernel.put(tensor.address + at * item, np.zeros(1, np.uint8))

    problem = forward(heads=4, residual_dtype="fp32", out_dtype="fp16")
    verdict = judge_with(stray, problem, cpu64)
    assert verdict.message.startswith(f"{name}: byte 0 after row ")


# ---- in place ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "over"),
    [
        (forward(), "y over x"),
        (forward(heads=4, per_head=True, casting="llama"), "y over x"),
        (forward(residual_dtype="bf16"), "y over x and residual_out over residual"),
        (forward("fp16", residual_dtype="fp32"), "y over x and residual_out over residual"),
        (forward("fp16", residual_dtype="fp16", residual_out_dtype="fp32"), "y over x"),
        (forward(residual_dtype="bf16", residual_out_dtype=None), "y over x"),
        (forward(residual_dtype="bf16", out_dtype=FN, scale="static"),
         "residual_out over residual"),
        (forward(residual_dtype="bf16", out_dtype="fp32"), "residual_out over residual"),
        (forward(out_dtype=FN, scale="dynamic"), ""),
        (forward(out_dtype="fp32"), ""),
        (backward(dresidual_out_dtype="bf16", residual_dtype="fp32"), ""),
    ],
    ids=str,
)  # fmt: skip
def test_a_kernel_that_is_wrong_in_place_alone_fails(
    cpu64: Backend, problem: Problem, over: str
) -> None:
    """Wherever a call may write a result over an input, and nowhere else."""
    main = "y" if problem.op == "forward" else "dx"

    def spoil(kernel: NumpyKernel) -> None:
        if len({tensor.address for tensor in kernel.tensors.values()}) < len(kernel.tensors):
            kernel.put(kernel.tensors[main].address, np.full(4, 0xFF, np.uint8))

    verdict = judge_with(spoil, problem, cpu64)
    assert verdict.passed == (not over)
    if over:
        start = f"in place ({over}), and only there: y[0, 0] is nan, want "
        assert verdict.message.splitlines()[0].startswith(start)
    assert judge(NumpyKernel(problem, cpu64), problem, cpu64).passed


def judge_in_place(
    kernel: NumpyKernel, problem: Problem, tokens: int, after: Callable[[Tensors], object]
) -> tuple[Verdict, list[tuple[Problem, Tensors]]]:
    """The verdict with so many tokens in place, ``after`` done there, and what was run."""
    runs: list[tuple[Problem, Tensors]] = []

    def run(some: Problem, tensors: Tensors) -> None:
        runs.append((some, tensors))
        kernel(tensors, some.rows)
        if len(runs) == 2:
            after(tensors)

    judged = Subject(run, CHAINS, {}, tokens)
    return check._judge(problem, judged, HostEngine(kernel.backend), SEED), runs


def test_a_few_rows_are_run_in_place_where_all_else_is_right(cpu64: Backend) -> None:
    problem = forward(heads=4, residual_dtype="bf16")
    kernel = NumpyKernel(problem, cpu64)
    verdict, runs = judge_in_place(kernel, problem, 2, lambda tensors: None)
    assert verdict.passed
    (whole, apart), (some, within), _ = runs  # the last is of a NaN
    assert whole == problem
    assert some == dataclasses.replace(problem, rows=4 * 2)
    assert len({*apart.values()}) == len(apart)
    assert within["x"] == within["y"]
    assert within["residual"] == within["residual_out"]
    kernel.fault = "the residual is added twice"
    verdict, runs = judge_in_place(kernel, problem, 2, lambda tensors: None)
    assert not verdict.passed
    assert len(runs) == 1


@pytest.mark.parametrize("rows", [40, 39, 2])
@pytest.mark.parametrize("name", ["y", "residual_out"])
def test_a_store_beside_the_rows_in_place_fails(cpu64: Backend, name: str, rows: int) -> None:
    """Past the last of them too, where other rows lie if all are run."""
    problem = forward(residual_dtype="bf16")

    def stray(tensors: Tensors) -> None:
        tensor = tensors[name]
        cpu64.from_host(tensor.address + rows * tensor.row_stride * 2, np.zeros(1, np.uint8), 0)

    verdict, _ = judge_in_place(NumpyKernel(problem, cpu64), problem, rows, stray)
    where = "y over x and residual_out over residual"
    start = f"in place ({where}), and only there: {name}: byte "
    assert verdict.message.startswith(start)
    assert verdict.message.endswith("after the last row was written, outside the tensor")


def test_an_input_that_is_changed_in_place_alone_fails(cpu64: Backend) -> None:
    problem = forward(bias_dtype="fp32")

    def overwrite(tensors: Tensors) -> None:
        address = tensors["bias"].address + 12
        cpu64.from_host(address, cpu64.to_host(address, 1, 0) ^ np.uint8(1), 0)

    verdict, _ = judge_in_place(NumpyKernel(problem, cpu64), problem, 3, overwrite)
    wrong = "bias[0, 3] was written, and it is an input"
    assert verdict.message == f"in place (y over x), and only there: {wrong}"


@pytest.mark.parametrize(
    ("problem", "slug", "tokens"),
    [
        # the simulator has 4 units: so many programs, three turns for each of a block's rows
        (forward(), "b256-t256-v16-pp-p1", 12),
        (forward(), "b256-t256-v16-pp-p2", 24),
        (forward(), "b256-t128-v16-lds2-p1", 24),
        (forward(), "b256-t64-v16-pp-p1", 40),  # all
        # 4 units for 2 heads
        (forward(heads=2), "b64-t64-v16-pp-p1", 6),
        # 12 programs could be, and 11 have 41 rows in as few turns
        (dataclasses.replace(forward(), rows=41), "b64-t64-v16-pp-p3", 33),
        (forward(), "b256-t64-v16-reg", 1),
        (dataclasses.replace(forward(), rows=65), "b256-t64-v16-reg", 2),
        (dataclasses.replace(forward(heads=4), rows=4 * 65), "b256-t64-v16-2p", 2),
    ],
    ids=str,
)  # fmt: skip
def test_each_program_goes_round_its_loop_in_place(
    cpu64: Backend, problem: Problem, slug: str, tokens: int
) -> None:
    config = Config.parse(slug)
    assert check._few_tokens(problem, config, cpu64.device) == tokens
    if config.programs and tokens < problem.tokens:
        few = dataclasses.replace(problem, rows=tokens * problem.extras.heads)
        programs = grid_programs(few, config, cpu64.device)
        assert programs == grid_programs(problem, config, cpu64.device)
        turns = tokens * problem.extras.heads / (programs * config.rows_per_block)
        assert turns == check.IN_PLACE_ROUNDS


# ---- seeds, data and the verdict -----------------------------------------------------------------


def test_sums_are_taken_once_for_one_data_set_and_inputs_written_each_time(
    cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"row_sums": 0, "write": 0}
    for name in counts:
        original = getattr(HostEngine, name)

        def counted(*args: Any, name: str = name, original: Any = original) -> Any:
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(HostEngine, name, counted)
    trial._references.clear()
    problem = backward(cols=256)
    kernel = NumpyKernel(problem, cpu64)
    judged = subject(kernel)
    for _ in range(3):
        assert check._judge(problem, judged, HostEngine(cpu64), SEED).passed
    assert counts == {"row_sums": 2, "write": 3 * 2 * 3}  # the gate's data and the exact case's
    for seed in range(5):
        check._judge(problem, judged, HostEngine(cpu64), seed)
    assert len(trial._references) == trial.REFERENCES_KEPT


def test_write_inputs_fills_what_is_there_and_leaves_gaps_alone(cpu64: Backend) -> None:
    problem = Problem.backward(5, 24, "bf16", weight_dtype="fp32")
    sizes = {"x": 5 * 32 * 2, "dout": 5 * 24 * 2, "weight": 24 * 4, "rstd": 5 * 4}
    memory = {name: cpu64.allocate(size) for name, size in sizes.items()}
    tensors = {name: Tensor(address) for name, (address, _) in memory.items()}
    tensors["x"] = Tensor(memory["x"][0], 32)
    tensors["dout"] = Tensor(memory["dout"][0], 24)
    write_inputs(problem, cpu64, tensors, SEED)
    read = {name: cpu64.to_host(memory[name][0], size, 0) for name, size in sizes.items()}
    x = read["x"].view(np.uint16).reshape(5, 32)
    want = gate_data("x", 0, 5, 24, "bfloat16", SEED, exact=False)
    np.testing.assert_array_equal(x[:, :24], want)
    assert np.all(x[:, 24:] == 0xFFFF)
    want = gate_data("dout", 0, 5, 24, "bfloat16", SEED, exact=False)
    np.testing.assert_array_equal(read["dout"].view(np.uint16).reshape(5, 24), want)
    want = gate_data("weight", 0, 1, 24, "float32", SEED, exact=False)[0]
    np.testing.assert_array_equal(read["weight"].view(np.uint32), want)
    values = bounds.decode(np.ascontiguousarray(x[:, :24]), "bfloat16")
    _, rstd = bounds.reference_forward(values, None, problem.eps)
    np.testing.assert_array_equal(read["rstd"].view(np.float32), rstd.astype(np.float32))


@pytest.mark.parametrize("has_rstd", [False, True])
def test_a_given_rstd_is_exact_to_the_reference(cpu64: Backend, has_rstd: bool) -> None:
    problem = backward(has_rstd=has_rstd)
    assert judge(NumpyKernel(problem, cpu64), problem, cpu64).passed
    case = check._general_case(problem, SEED)
    rstd = trial._references[HostEngine, case].terms[0]
    assert np.array_equal(rstd, rstd.astype(np.float32)) == has_rstd


def test_write_inputs_wants_every_input(cpu64: Backend) -> None:
    with pytest.raises(InvalidInput, match="backward 40x200 bf16/bf16 also reads dout, rstd"):
        write_inputs(backward(), cpu64, {"x": Tensor(256, 200), "weight": Tensor(256)}, SEED)


def test_a_failing_verdict_raises_with_the_slug_and_the_seed() -> None:
    config, problem = Config.parse("b256-t128-v16-reg"), forward()
    check.require(Verdict(True, {"y": 0.5}, 3, ""), problem, config)
    bad = Verdict(False, {"y": 9.0}, 3, "y[0, 1] is 2.0, want 1.0 +- 0.004 (250 of its bound)")
    with pytest.raises(
        WrongResult, match=r"b256-t128-v16-reg.*forward 40x200.*y\[0, 1\] is 2.*\n.*seed=3"
    ):
        check.require(bad, problem, config)
    assert str(bad) == f"failed (seed 3): {bad.message}"
    good = Verdict(True, {"y": 0.9876, "rstd": 0.1}, 3, "")
    assert repr(good) == "<Verdict: passed (worst error / bound: y 0.988, rstd 0.1; seed 3)>"


def test_a_ratio_below_its_limit_never_reads_as_the_limit() -> None:
    shown = str(Verdict(True, {"dx": 0.9998, "dweight": 0.99999999, "rstd": 1.0}, 3, ""))
    assert "dx 0.999, dweight 0.999, rstd 1;" in shown


def test_a_failure_names_the_call_that_repeats_it() -> None:
    problem = Problem.forward(5, 256, "bf16")
    with pytest.raises(WrongResult, match=r"k\.check\(seed=3\)"):
        check.require(Verdict(False, {"y": 9.0}, 3, "y is off"), problem, Config())

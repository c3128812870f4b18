"""What a process keeps for its calls; test_ops.py has the calls themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from virtual_gpu import VirtualGpu

import rmsnorm_raw as rr
from rmsnorm_raw import ladder, launch, store
from rmsnorm_raw.backends import Backend, cpu, host_compiler
from rmsnorm_raw.errors import InvalidConfig, InvalidInput
from rmsnorm_raw.interop import Device
from rmsnorm_raw.launch import Tensor, dense_tensor
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.ready import alignment_bytes_of, prepare, serving

CPU = Device("cpu", 0)
PROBLEM = Problem.forward(5, 256, "fp32")
TUNED = rr.Config.parse("b128-t32-v16-reg")
X = np.random.default_rng(0).standard_normal((5, 256)).astype(np.float32)
WEIGHT = np.ones(256, np.float32)
SAMPLES = {"cold": {"tuned": (1.0,), "ladder": (2.0,)}}


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """No records, but for those that a test saves."""
    monkeypatch.setattr(store, "folder", lambda: tmp_path / "tuned")
    store.forget()
    yield
    store.forget()


def tune(backend: Backend, problem: Problem = PROBLEM, config: rr.Config = TUNED) -> None:
    store.save(
        store.key(problem, backend), store.Record(config, "FASTER", SAMPLES, {}, "", "quick")
    )


def launched(monkeypatch: pytest.MonkeyPatch, **given: Any) -> rr.Config:
    """The config of one call of rmsnorm_fwd."""
    seen: list[rr.Config] = []
    plan = launch.make_plan

    def make_plan(problem: Problem, config: rr.Config, *args: Any) -> launch.Plan:
        seen.append(config)
        return plan(problem, config, *args)

    with monkeypatch.context() as patched:
        patched.setattr(launch, "make_plan", make_plan)
        rr.rmsnorm_fwd(X, WEIGHT, **given)
    (config,) = seen
    return config


def test_a_record_saved_in_this_process_takes_effect_at_the_next_call(
    cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = ladder.default_config(PROBLEM, cpu64.device)
    assert launched(monkeypatch) == default != TUNED
    tune(cpu64)
    assert launched(monkeypatch) == TUNED
    assert launched(monkeypatch, config="ladder") == default
    assert launched(monkeypatch, config="b64-t64-v8") == rr.Config.parse("b64-t64-v8")
    tune(cpu64, config=default)
    assert launched(monkeypatch) == default


def test_a_call_of_the_same_problem_asks_for_no_record(
    cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(cpu64)
    first = prepare(PROBLEM, 16, None, CPU)
    monkeypatch.setattr(store, "resolve", None)
    assert prepare(PROBLEM, 16, None, CPU) is first


def test_other_rows_of_the_bucket_and_other_alignments(cpu64: Backend) -> None:
    tune(cpu64)
    default = ladder.default_config(PROBLEM, cpu64.device)
    for rows, alignment, want in ((4, 16, TUNED), (7, 16, TUNED), (8, 16, default)):
        problem = Problem.forward(rows, 256, "fp32")
        assert prepare(problem, alignment, None, CPU).config == want
    assert prepare(PROBLEM, 4, None, CPU).config.vec == 4


def test_a_kernel_of_one_device_takes_no_arrays_of_another(
    cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = prepare(PROBLEM, 16, None, CPU)
    assert serving(built, PROBLEM, 16, CPU) is built
    gpu = VirtualGpu()
    monkeypatch.setattr(gpu, "name", "cuda")
    built = built._replace(binary=replace(built.binary, backend=gpu))
    assert serving(built, PROBLEM, 16, Device("cuda", 0)) is built
    with pytest.raises(InvalidInput, match="built for cuda:0, and the arrays are on cuda:1"):
        serving(built, PROBLEM, 16, Device("cuda", 1))


def test_another_number_of_rows_looks_for_no_compiler(
    cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(PROBLEM, 16, None, CPU)
    monkeypatch.setattr(host_compiler, "compilers", None)
    monkeypatch.setattr(cpu, "compilers", None)
    assert prepare(replace(PROBLEM, rows=6), 16, None, CPU).problem.rows == 6


def test_the_scratch_of_a_tuned_config_is_its_own(cpu64: Backend) -> None:
    problem = Problem.backward(37, 256, "fp32")
    assert [name for name, _ in prepare(problem, 16, None, CPU).scratch] == ["workspace"]
    tune(cpu64, problem, rr.Config.parse("b64-t32-pp-p2-fl"))
    assert [name for name, _ in prepare(problem, 16, None, CPU).scratch] == ["workspace", "counter"]


def test_a_given_config_that_does_not_fit_is_refused_whatever_is_tuned(cpu64: Backend) -> None:
    tune(cpu64)
    with pytest.raises(InvalidConfig, match=r"b96.*whole waves of 64"):
        prepare(PROBLEM, 16, rr.Config.parse("b96"), CPU)


def test_the_workbench_takes_the_tuned_config_and_says_so(cpu64: Backend) -> None:
    assert rr.build(PROBLEM, backend=cpu64).origin == "ladder"
    tune(cpu64)
    kernel = rr.build(PROBLEM, backend=cpu64)
    assert (kernel.config, kernel.origin) == (TUNED, "tuned")
    assert "b128-t32-v16-reg (tuned) on cpu" in repr(kernel)
    assert rr.build(PROBLEM, "ladder", backend=cpu64).origin == "ladder"
    assert rr.build(PROBLEM, TUNED, backend=cpu64).origin == "given"
    assert rr.default_config(PROBLEM, cpu64.device) == ladder.default_config(PROBLEM, cpu64.device)


def test_explain_says_what_is_in_use_where_it_is_not_the_ladders(
    cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RMSNORM_RAW_BACKEND", "cpu")
    assert "in use" not in repr(rr.explain(PROBLEM))
    tune(cpu64)
    explained = rr.explain(PROBLEM)
    assert "in use: b128-t32-v16-reg (tuned)" in repr(explained)
    assert explained.choice == ladder.default_config(PROBLEM, cpu64.device)
    assert rr.explain(PROBLEM, "gfx950").origin == "ladder"


@pytest.mark.usefixtures("rocm_stand_in")
def test_a_device_that_is_not_here_has_the_ladders_config() -> None:
    kernel = rr.build(Problem.forward(64, 4096, "bf16"), device="gfx950")
    assert kernel.origin == "ladder"


# ---- alignment -----------------------------------------------------------------------------------

#: x in bf16, so that 16 bytes hold 8 elements; the others' sizes are all that there are
FORWARD = Problem.forward(
    12, 64, "bf16", weight_dtype="fp32", bias_dtype="bf16", residual_dtype="fp32",
    residual_out_dtype="bf16", out_dtype="float8_e4m3fn", scale="dynamic", heads=3, per_head=True,
)  # fmt: skip
BACKWARD = Problem.backward(
    12, 64, "fp32", weight_dtype="bf16", bias_dtype="fp32", out_dtype="bf16", dx_dtype="fp16",
    residual_dtype="fp32", dresidual_out_dtype="bf16",
)  # fmt: skip
ELEMENT = {"float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}


def dense(problem: Problem) -> dict[str, Tensor]:
    return {each.name: dense_tensor(problem, each.name, 4096) for each in problem.operands}


@pytest.mark.parametrize(
    ("problem", "name", "field"),
    [
        pytest.param(problem, each.name, field, id=f"{problem.op}-{each.name}-{field}")
        for problem in (FORWARD, BACKWARD)
        for each in problem.operands
        for field in ("address", "row_stride", "head_stride")
        if each.is_matrix or field == "address"
    ],
)
@pytest.mark.parametrize("elements", [1, 2, 4, 8])
def test_alignment_is_of_every_tensor(
    problem: Problem, name: str, field: str, elements: int
) -> None:
    """A tensor that is aligned to so many of its elements has no more of them moved at once.

    Or to 16 bytes of them, for more are moved in pieces. Those of a row are moved one by one.
    """
    places = dense(problem)
    assert alignment_bytes_of(problem, places) == 16
    (operand,) = (each for each in problem.operands if each.name == name)
    whole, each_bytes = 16 // problem.element_bytes, ELEMENT[operand.dtype]
    off = elements * (each_bytes if field == "address" else 1)
    place = places[name]
    places[name] = place._replace(**{field: getattr(place, field) + off})
    enough = name in ("rstd", "scale") or elements * each_bytes % 16 == 0
    moved = whole if enough else min(elements, whole)
    assert alignment_bytes_of(problem, places) == moved * problem.element_bytes


def test_tensors_that_are_not_named_are_taken_to_be_aligned() -> None:
    assert alignment_bytes_of(FORWARD, {}) == 16
    assert alignment_bytes_of(FORWARD, {"x": Tensor(4096 + 2, 192, 64)}) == 2


def test_what_differs_is_said_of_extras_too(cpu64: Backend) -> None:
    built = prepare(PROBLEM, 16, None, CPU)
    other = Problem.forward(5, 256, "fp32", weight_offset=1.0, bias_dtype="bf16")
    words = "built for bias_dtype=None, weight_offset=0.0, and .*='bfloat16', weight_offset=1.0"
    with pytest.raises(InvalidInput, match=words):
        serving(built, other, 16, CPU)

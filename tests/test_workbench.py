from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - makes np.dtype("bfloat16") known
import numpy as np
import pytest

import rmsnorm_raw as rr
from rmsnorm_raw import bandwidth, ladder, measure, space, workbench
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.bandwidth import Roofline
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.errors import (
    BackendUnavailable,
    CompileError,
    InvalidConfig,
    InvalidInput,
    WrongResult,
)
from rmsnorm_raw.measure import Unmeasurable
from rmsnorm_raw.workbench import Kernel

FORWARD = rr.Problem.forward(5, 256, "bfloat16", weight_dtype="float32")
BACKWARD = rr.Problem.backward(5, 256, "bfloat16", weight_dtype="float32")
#: a statement of the forward, and what makes every y twice too large
NORMALISE, DOUBLED = "out[e] = x[e] * rstd;", "out[e] = 2.0f * x[e] * rstd;"


@pytest.fixture
def forward(cpu64: Backend) -> Kernel:
    return rr.build(FORWARD, backend=cpu64)


@pytest.fixture
def backward(cpu64: Backend) -> Kernel:
    return rr.build(BACKWARD, backend=cpu64)


@pytest.fixture
def doubled(forward: Kernel) -> Kernel:
    assert NORMALISE in forward.source.text
    return forward.with_source(forward.source.text.replace(NORMALISE, DOUBLED))


def normal(*shape: int, dtype: str = "bfloat16") -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.dtype(dtype))


# ---- the space ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gfx950", "gfx942", "sm_90"])
def test_a_device_known_by_name_needs_no_gpu(name: str) -> None:
    problem = rr.Problem.backward(32768, 8192, "bf16")
    assert rr.default_config(problem, name) == ladder.default_config(problem, KNOWN[name])
    assert rr.enumerate_configs(problem, name) == space.enumerate_configs(problem, KNOWN[name])


def test_without_a_device_it_is_the_one_that_is_here(
    cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RMSNORM_RAW_BACKEND", "cpu")
    assert rr.explain(FORWARD).device == cpu64.device


def test_an_unknown_device_is_refused_with_those_known() -> None:
    with pytest.raises(InvalidInput, match=r"'gfx906'.*gfx950, gfx942, sm_90"):
        rr.explain(FORWARD, "gfx906")


# a narrow row, an odd width, the widest published cell, a row too wide to keep
@pytest.mark.parametrize("cols", [8, 769, 8192, 262144])
@pytest.mark.parametrize("name", ["gfx950", "sm_90"])
@pytest.mark.parametrize("build", [rr.Problem.forward, rr.Problem.backward])
def test_explain_shows_every_kept_config_and_every_kind_of_refusal(
    build: Callable[..., rr.Problem], name: str, cols: int
) -> None:
    explained = rr.explain(build(4096, cols, "bf16"), name)
    text = repr(explained)
    marked = [part for part in text.split() if part == "->"]
    assert len(marked) == 2  # the legend, and the choice
    assert f"-> {explained.choice.slug}" in text
    words = set(text.split())
    assert words >= {config.slug for config in explained.space.kept}
    assert sum(count for count, _, _ in explained.reasons) == len(explained.space.rejected)
    for _, reason, config in explained.reasons:
        about = (explained.problem, explained.device, config)
        assert reason == (space.reject_reason(*about) or space.inert_reason(*about))
        assert config.slug in text


# ---- building ----------------------------------------------------------------------------------


def test_a_slug_and_a_config_build_the_same_kernel(cpu64: Backend) -> None:
    config = rr.Config(block=128, threads_per_row=32)
    by_slug = rr.build(FORWARD, "b128-t32", backend=cpu64)
    by_config = rr.build(FORWARD, config, backend=cpu64)
    assert by_slug.config == by_config.config == config
    assert by_slug.source == by_config.source


def test_a_config_that_does_not_fit_is_refused_with_its_reason(cpu64: Backend) -> None:
    with pytest.raises(InvalidConfig, match=r"b96.*whole waves of 64"):
        rr.build(FORWARD, "b96", backend=cpu64)


def test_text_takes_the_place_of_the_rendered_source(forward: Kernel, doubled: Kernel) -> None:
    built = rr.build(FORWARD, backend=forward.binary.backend, text=doubled.source.text)
    assert built.source == doubled.source


def test_a_kernel_names_itself_in_one_short_line(forward: Kernel) -> None:
    assert "\n" not in repr(forward)
    for part in (str(FORWARD), forward.config.slug, "cpu"):
        assert part in repr(forward)


# ---- building for a device that is not here ----------------------------------------------------


def test_without_amds_compiler_the_error_names_the_command_that_fetches_it(no_rocm: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"rocm_libraries fetch 7\.0\.0"):
        rr.build(FORWARD, device="gfx950")


def test_a_device_that_no_compiler_here_knows_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'sm_90': use one of gfx950, gfx942"):
        rr.build(FORWARD, device="sm_90")


@pytest.mark.parametrize(
    "call",
    [rr.build, rr.explain, rr.default_config, rr.enumerate_configs],
    ids=lambda it: it.__name__,
)
def test_what_is_no_problem_is_refused(call: Callable[..., object]) -> None:
    with pytest.raises(InvalidInput, match="the problem is 'forward': give a Problem, such as"):
        call("forward")


@pytest.mark.parametrize("config", [7, {"block": 256}, b"b256"])
def test_what_is_no_config_is_refused(config: Any, cpu64: Backend) -> None:
    with pytest.raises(InvalidInput, match=r"config is .*: give a slug such as"):
        rr.build(rr.Problem.forward(5, 256, "bf16"), config, backend=cpu64)


def test_faults_of_a_kernel_without_amds_machine_code_are_refused(forward: rr.Kernel) -> None:
    with pytest.raises(BackendUnavailable, match=r"build it with rr\.build\(p, device='gfx950'\)"):
        forward.faults  # noqa: B018


def test_a_device_and_a_backend_are_refused(cpu64: Backend) -> None:
    with pytest.raises(InvalidInput, match="give one of the two"):
        rr.build(FORWARD, device="gfx950", backend=cpu64)


@pytest.mark.usefixtures("rocm_stand_in")
def test_a_kernel_of_an_absent_device_is_the_ladders_for_that_device() -> None:
    problem = rr.Problem.backward(32768, 8192, "bf16")
    kernel = rr.build(problem, device="gfx950")
    assert kernel.config == rr.default_config(problem, "gfx950")
    assert kernel.source == workbench.render(problem, kernel.config, KNOWN["gfx950"])
    assert dict(kernel.source.defines)["RR_GFX"] == "950"
    assert "gfx950 (no device)" in repr(kernel)
    with pytest.raises(InvalidConfig, match="on gfx942"):
        rr.build(problem, "b256-lds3-p1", device="gfx942")  # 96 KiB of LDS


@pytest.mark.usefixtures("rocm_stand_in")
def test_its_resources_are_those_of_its_launches() -> None:
    kernel = rr.build(rr.Problem.backward(32768, 8192, "bf16"), "b512-lds3-p1", device="gfx950")
    rows, finish = kernel.resources["rmsnorm_backward"], kernel.resources["rmsnorm_dweight"]
    assert [it.entry_point for it in kernel.launches] == list(kernel.resources)
    assert rows.dynamic_lds_bytes == kernel.launches[0].lds_bytes > 3 * 2 * 16384
    assert (rows.waves_per_simd, rows.limit) == (2, "LDS")
    # two rows in flight when the older is waited for
    assert (rows.bytes_before_first_wait, rows.cu_bytes_before_first_wait) == (32, 32 * 2 * 256)
    assert (finish.waves_per_simd, finish.limit) == (1, "grid")
    assert kernel.asm.count("|     8  s_waitcnt vmcnt(2)") == 2
    assert kernel.asm.startswith("rmsnorm_backward:\n|     0  buffer_load_dwordx4")


def test_an_edit_that_changes_nothing_is_refused(forward: rr.Kernel) -> None:
    with pytest.raises(InvalidInput, match="the text is the kernel's own"):
        forward.with_source(forward.source.text.replace("no such line", ""))


@pytest.mark.usefixtures("rocm_stand_in")
def test_an_absent_device_compiles_edits_and_runs_nothing() -> None:
    kernel = rr.build(FORWARD, device="gfx950")
    edited = kernel.with_source(kernel.source.text + "\n")
    assert edited.release == kernel.release == "7.0.0"
    assert edited.binary.object_digest != kernel.binary.object_digest
    for run in (kernel, kernel.check, kernel.bench):
        with pytest.raises(BackendUnavailable, match=r"MI355X \(gfx950\) without a device"):
            run()
    with pytest.raises(BackendUnavailable, match="without a device"):
        kernel(X, WEIGHT)
    with pytest.raises(BackendUnavailable, match="without a device"):
        rr.compare(kernel, edited)
    with pytest.raises(BackendUnavailable, match="without a device"):
        rr.roofline(kernel.binary.backend)


def test_the_simulator_has_no_machine_code_and_says_who_has(forward: Kernel) -> None:
    with pytest.raises(BackendUnavailable, match=r"rr\.build\(problem, device='gfx950'\)\.asm"):
        _ = forward.asm


# ---- the edit loop -----------------------------------------------------------------------------


def test_an_edited_kernel_keeps_all_but_its_text(forward: Kernel, doubled: Kernel) -> None:
    assert (doubled.problem, doubled.config) == (forward.problem, forward.config)
    assert doubled.source.defines == forward.source.defines
    assert doubled.source.entry_points == forward.source.entry_points
    assert doubled.source.digest != forward.source.digest


def test_text_that_does_not_compile_is_refused_with_slug_and_line(forward: Kernel) -> None:
    lines = forward.source.text.splitlines()
    number = next(n for n, line in enumerate(lines, start=1) if NORMALISE in line)
    broken = forward.source.text.replace(NORMALISE, "out[e] = nothing_of_this_name;")
    with pytest.raises(CompileError, match=rf"rmsnorm_forward\.hip:{number}\b") as caught:
        forward.with_source(broken)
    assert caught.value.slug == forward.config.slug


def test_a_right_kernel_passes_and_a_seed_repeats_its_data(forward: Kernel) -> None:
    verdict = forward.check()
    assert verdict.passed, verdict
    assert forward.check(seed=verdict.seed) == verdict


def test_a_right_kernel_has_simulated_times(backward: Kernel) -> None:
    samples = backward.bench()
    assert samples.simulated
    assert samples.regime == "cold"


def test_a_wrong_kernel_has_no_time(doubled: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "time_calls", lambda *args, **kwargs: pytest.fail("was timed"))
    assert not doubled.check().passed
    with pytest.raises(WrongResult, match=doubled.config.slug):
        doubled.bench()


@pytest.mark.parametrize("make", [rr.Problem.forward, rr.Problem.backward])
def test_from_an_edited_text_to_a_verdict_and_a_time_in_under_3_seconds(
    cpu64: Backend, make: Callable[..., rr.Problem]
) -> None:
    kernel = rr.build(make(64, 8192, "bf16"), backend=cpu64)
    text = f"{kernel.source.text}// {time.time_ns()}\n"  # which no cache has seen
    opened = os.times()
    edited = kernel.with_source(text)
    said = f"{edited.check()!r}\n{edited.bench()!r}"
    # of this process and of the compiler, which run in turns: what a core of their own takes. By
    # the clock on the wall, other processes that want the cores would count
    took_s = sum(os.times()[:4]) - sum(opened[:4])
    assert re.fullmatch(r"<Verdict: passed .*>\n<Samples .* simulated us .*>", said)
    assert took_s <= 3


# ---- calling -----------------------------------------------------------------------------------


def test_a_forward_call_gives_what_the_operation_gives(forward: Kernel) -> None:
    x, weight = normal(5, 256), normal(256, dtype="float32")
    got, want = forward(x, weight), rr.rmsnorm_fwd(x, weight)
    assert got.y.tobytes() == want.y.tobytes()
    assert got.rstd.tobytes() == want.rstd.tobytes()


def test_a_backward_call_gives_what_the_operation_gives(backward: Kernel) -> None:
    x, weight = normal(5, 256), normal(256, dtype="float32")
    rstd = rr.rmsnorm_fwd(x, weight).rstd
    got, want = backward(x[::-1].copy(), x, weight, rstd), rr.rmsnorm_bwd(x[::-1], x, weight, rstd)
    assert got.dx.tobytes() == want.dx.tobytes()
    assert got.dweight.tobytes() == want.dweight.tobytes()


def test_a_last_block_finish_gives_the_same_in_call_after_call(cpu64: Backend) -> None:
    x, weight = normal(37, 256), normal(256)
    rstd = rr.rmsnorm_fwd(x, weight).rstd
    problem = rr.Problem.backward(37, 256, "bf16")
    kernel = rr.build(problem, "b64-t32-p2-fl", backend=cpu64)
    want = rr.rmsnorm_bwd(x, x, weight, rstd, config="b64-t32-p2-fl")
    for _ in range(2):
        assert kernel(x, x, weight, rstd).dweight.tobytes() == want.dweight.tobytes()


def test_inputs_and_results_that_the_problem_leaves_out(cpu64: Backend) -> None:
    x = normal(5, 256)
    plain = rr.Problem.forward(5, 256, "bf16", weight_dtype=None, store_rstd=False)
    assert rr.build(plain, backend=cpu64)(x).rstd is None
    recomputed = rr.Problem.backward(5, 256, "bf16", has_rstd=False, need_dx=False)
    result = rr.build(recomputed, backend=cpu64)(x, x, normal(256))
    assert result.dx is None
    assert result.dweight.tobytes() == rr.rmsnorm_bwd(x, x, normal(256)).dweight.tobytes()


def test_a_call_runs_the_edited_text(forward: Kernel, doubled: Kernel) -> None:
    x, weight = normal(5, 256), normal(256, dtype="float32")
    y, twice = (kernel(x, weight).y.astype(np.float32) for kernel in (forward, doubled))
    assert np.array_equal(twice, 2 * y)


def test_leading_dimensions_and_the_library_come_back(forward: Kernel) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, weight = torch.randn(5, 1, 256, dtype=torch.bfloat16), torch.randn(256)
    result = forward(x, weight)
    assert torch.equal(result.y, rr.rmsnorm_fwd(x, weight).y)
    assert tuple(result.rstd.shape) == (5, 1)


def arrays_of(problem: rr.Problem) -> list[np.ndarray]:
    """An array for each tensor that a problem reads, in its order."""
    heads, found = problem.extras.heads, []
    for operand in problem.operands:
        if operand.is_output:
            continue
        shape: tuple[int, ...] = (operand.cols,)
        if operand.is_matrix:
            shape = (operand.rows, heads, problem.cols)
        elif operand.name == "rstd":
            shape = (problem.tokens, heads)
        elif operand.cols > problem.cols:
            shape = (heads, problem.cols)
        found.append(np.abs(normal(*shape, dtype=operand.dtype)))
    return found


@pytest.mark.parametrize(
    ("problem", "names", "asked"),
    [
        (
            rr.Problem.forward(
                5, 256, "bf16", bias_dtype="fp32", residual_dtype="fp32", weight_offset=1.0,
                casting="llama", out_dtype="fp16", residual_out_dtype="bf16", eps=1e-3,
            ),
            ["x", "weight", "bias", "residual"],
            {
                "weight_offset": 1.0, "casting": "llama", "out_dtype": "fp16", "eps": 1e-3,
                "residual_dtype": "bf16",
            },
        ),
        (
            rr.Problem.forward(5, 256, "bf16", residual_dtype="bf16", residual_out_dtype=None),
            ["x", "weight", "residual"],
            {"residual_out": False},
        ),
        (
            rr.Problem.forward(5, 256, "fp32", out_dtype="float8_e4m3fn", scale="static"),
            ["x", "weight", "scale"],
            {"out_dtype": "fp8"},
        ),
        (
            rr.Problem.forward(
                15, 256, "bf16", out_dtype="float8_e4m3fn", scale="dynamic", heads=3, per_head=True
            ),
            ["x", "weight"],
            {"out_dtype": "fp8", "scale": "dynamic"},
        ),
        (rr.Problem.forward(15, 256, "bf16", heads=3), ["x", "weight"], {}),
        (
            rr.Problem.backward(
                5, 256, "fp32", bias_dtype="bf16", dresidual_out_dtype="fp16", out_dtype="bf16",
                dx_dtype="bf16", residual_dtype="fp32", weight_offset=0.5,
            ),
            ["dout", "x", "weight", "rstd", "dresidual_out"],
            {
                "need_dbias": True, "bias_dtype": "bf16", "dx_dtype": "bf16",
                "residual_dtype": "fp32", "weight_offset": 0.5,
            },
        ),
        (
            rr.Problem.backward(15, 256, "bf16", residual_dtype="bf16", heads=3, has_rstd=False),
            ["dout", "x", "weight"],
            {"residual_dtype": "bf16"},
        ),
    ],
)  # fmt: skip
def test_a_call_of_the_whole_operation(
    cpu64: Backend, problem: rr.Problem, names: list[str], asked: dict[str, Any]
) -> None:
    kernel, arrays = rr.build(problem, backend=cpu64), arrays_of(problem)
    if problem.extras.heads == 1:
        arrays = [a.reshape(a.shape[0], -1) if a.ndim == 3 else a for a in arrays]
        arrays = [
            a.reshape(-1) if name == "rstd" else a for a, name in zip(arrays, names, strict=True)
        ]
    got = kernel(*arrays)
    call = rr.rmsnorm_fwd if problem.op == "forward" else rr.rmsnorm_bwd
    want = call(**dict(zip(names, arrays, strict=True)), **asked)
    for name in vars(want):
        one, other = getattr(got, name), getattr(want, name)
        assert (one is None) == (other is None), name
        assert one is None or one.tobytes() == other.tobytes(), name
    with pytest.raises(InvalidInput, match=re.escape(f"takes ({', '.join(names)}), not")):
        kernel(*arrays[:-1])


def test_kernels_of_several_heads_want_their_rows(cpu64: Backend) -> None:
    kernel = rr.build(rr.Problem.forward(15, 256, "bf16", heads=3), backend=cpu64)
    x, weight = normal(15, 256), normal(256)
    want = rr.rmsnorm_fwd(x, weight).y.tobytes()
    for shape in ((15, 256), (5, 3, 256), (3, 5, 256)):  # rows are numbered the same way in each
        assert kernel(x.reshape(shape), weight).y.tobytes() == want
    packed = np.empty((5, 6, 256), x.dtype)
    packed[:, :3] = x.reshape(5, 3, 256)
    assert kernel(packed[:, :3], weight).y.tobytes() == want
    with pytest.raises(InvalidInput, match="rows is 16, not a multiple of the 3 heads"):
        kernel(normal(16, 256), weight)
    with pytest.raises(InvalidInput, match=r"per_head=False.*per_head=True"):
        kernel(x.reshape(5, 3, 256), normal(3, 256))


X, WEIGHT = normal(5, 256), normal(256, dtype="float32")


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ((X,), r"\(x, weight\), not 1 array"),
        ((X, WEIGHT, WEIGHT), "not 3 arrays"),
        ((X, WEIGHT.astype(np.float16)), "built for .*weight_dtype='float32'.*='float16'"),
        ((X.astype(np.float16), WEIGHT), "built for .*dtype='bfloat16'.*dtype='float16'"),
        ((X, WEIGHT[:255]), r"weight has shape \(255,\)"),
        ((normal(5, 128), WEIGHT[:128]), "built for .*cols=256.*cols=128"),
        ((X[:4], WEIGHT), "built for .*rows=5.*rows=4"),
        ((normal(1288).ravel()[1:1281].reshape(5, 256), WEIGHT), "alignment=16.*alignment=2"),
        ((X, "weight"), "a str is no array"),
    ],
)
def test_arrays_that_a_kernel_was_not_built_for_are_refused(
    forward: Kernel, arrays: tuple[Any, ...], complaint: str
) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        forward(*arrays)


def test_a_call_reads_strided_rows(forward: Kernel) -> None:
    wide = normal(5, 512)
    want = rr.rmsnorm_fwd(wide[:, :256].copy(), WEIGHT)
    assert forward(wide[:, :256], WEIGHT).y.tobytes() == want.y.tobytes()


def test_a_call_with_no_rows_gives_no_rows(cpu64: Backend) -> None:
    empty = rr.build(rr.Problem.forward(0, 256, "fp32"), backend=cpu64)
    result = empty(np.empty((0, 256), np.float32), np.ones(256, np.float32))
    assert result.y.shape == (0, 256)


# ---- comparing, and the roofline ---------------------------------------------------------------


def test_simulated_kernels_are_not_compared(forward: Kernel, doubled: Kernel) -> None:
    with pytest.raises(Unmeasurable, match="compare on a GPU"):
        rr.compare(forward, doubled)


def test_kernels_of_different_problems_are_not_compared(forward: Kernel, backward: Kernel) -> None:
    with pytest.raises(InvalidInput, match="one problem"):
        rr.compare(forward, backward)


def test_kernels_of_different_backends_are_not_compared(forward: Kernel, cpu32: Backend) -> None:
    with pytest.raises(InvalidInput, match="one backend"):
        rr.compare(forward, rr.build(FORWARD, backend=cpu32))


def test_the_roofline_is_measured_once_a_device(
    cpu64: Backend, cpu32: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmsnorm_raw.workbench._rooflines", {})
    measured: list[str] = []

    def roofline(backend: Backend) -> Roofline:
        measured.append(backend.device.name)
        return Roofline(backend.device.name, 0, (), simulated=True)

    monkeypatch.setattr(bandwidth, "roofline", roofline)
    found = [rr.roofline(cpu64), rr.roofline(cpu32), rr.roofline(cpu64), rr.roofline("cpu")]
    assert measured == [cpu64.device.name, cpu32.device.name]
    assert found[2] is found[3] is found[0]

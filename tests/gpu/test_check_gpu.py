"""The gate on a GPU: its own kernels against NumPy, at full size, and on faults."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from numpy_kernel import BACKWARDS, FN, FNUZ, FORWARDS

from rmsnorm_raw import check, trial
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.check import verify
from rmsnorm_raw.gate import Case, HostEngine
from rmsnorm_raw.gate_data import DATA
from rmsnorm_raw.gate_device import DeviceEngine
from rmsnorm_raw.guarded import allocate
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.module import build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render

pytestmark = pytest.mark.gpu

SEED = 11
SMALL = [
    make(61, cols, x, weight_dtype=w, alignment=alignment)
    for make in (Problem.forward, Problem.backward)
    for x, w in (("bf16", "fp32"), ("fp16", "fp16"), ("fp32", "bf16"), ("bf16", None))
    for cols, alignment in ((1024, 16), (999, 4))  # with and without the exact case
]


@pytest.mark.parametrize("problem", [*SMALL, *FORWARDS, *BACKWARDS], ids=str)
def test_the_device_s_verdict_is_numpy_s(problem: Problem, gpu: Backend) -> None:
    if problem.out_dtype == (FN if gpu.device.arch == "gfx942" else FNUZ):
        pytest.skip(f"{gpu.device.arch} has another 8-bit float than {problem.out_dtype}")
    config = default_config(problem, gpu.device)
    binary = build(render(problem, config, gpu.device), gpu)
    device, host = (
        verify(problem, config, binary, seed=SEED, _engine=engine)
        for engine in (DeviceEngine, HostEngine)
    )
    assert device.passed, device.message
    assert host.passed, host.message
    assert device.worst == pytest.approx(host.worst, rel=1e-6)


@pytest.mark.parametrize("problem", [*SMALL[-8:], *FORWARDS, *BACKWARDS], ids=str)
def test_both_engines_write_the_same_bytes(problem: Problem, gpu: Backend) -> None:
    general = check._general_case(problem, SEED)
    exact = [Case(problem, SEED, exact=True)] * check._has_exact_case(problem)
    for case in (general, *exact):
        buffers = {name: allocate(gpu, case, name, 0x7F) for name in case.inputs}
        for name in set(DATA) & buffers.keys():
            buffer = buffers[name]
            written = []
            for engine in (HostEngine(gpu), DeviceEngine(gpu)):
                gpu.fill(buffer.base, 0x7F, buffer.size_bytes, 0)
                engine.write(case, name, buffer.tensor)
                assert engine.changed(case, name, buffer.tensor) is None
                written.append(gpu.to_host(buffer.base, buffer.size_bytes, 0))
            np.testing.assert_array_equal(*written)


@pytest.mark.parametrize("make", [Problem.forward, Problem.backward])
def test_the_largest_shape_of_the_study_is_judged_in_under_a_second(make, gpu: Backend) -> None:  # type: ignore[no-untyped-def]
    problem = make(32768, 8192, "bf16")
    config = default_config(problem, gpu.device)
    binary = build(render(problem, config, gpu.device), gpu)
    trial._references.clear()
    DeviceEngine(gpu)  # builds the gate's kernels
    start = time.perf_counter()
    first = verify(problem, config, binary, seed=SEED)
    first_s = time.perf_counter() - start
    second = verify(problem, config, binary, seed=SEED)  # on the same data: as a tuner does
    second_s = time.perf_counter() - start - first_s
    print(f"{problem}: {first_s:.3f} s, again {second_s:.3f} s; {first}")
    assert first.passed, first.message
    assert second == first
    assert first_s < 1.0


# by the dialect that the text is compiled in: the line that rounds, and one that cuts
TRUNCATE = {
    "cuda": ("cvt.rn.bf16x2.f32", "cvt.rz.bf16x2.f32"),
    "amd": (
        "{(__bf16)low, (__bf16)high}",
        "{(__bf16)as_float(as_bits(low) & 0xffff0000u), "
        "(__bf16)as_float(as_bits(high) & 0xffff0000u)}",
    ),
}


def faulty(problem: Problem, gpu: Backend, old: str, new: str) -> check.Verdict:
    config = default_config(problem, gpu.device)
    source = render(problem, config, gpu.device)
    assert old in source.text, "the text has changed: plant this fault anew"
    source = dataclasses.replace(source, text=source.text.replace(old, new))
    return verify(problem, config, build(source, gpu), seed=SEED)


def test_a_truncating_store_is_found(gpu: Backend) -> None:
    verdict = faulty(Problem.forward(512, 4096, "bf16"), gpu, *TRUNCATE[gpu.device.dialect])
    assert 1 < verdict.worst["y"] < 2.1
    assert not verdict.passed


def test_a_dx_without_its_row_term_is_found(gpu: Backend) -> None:
    problem = Problem.backward(512, 4096, "bf16")
    verdict = faulty(problem, gpu, "- x[e] * row.rstd * row.mean", "")
    assert verdict.worst["dx"] > 1
    assert "dx[" in verdict.message


def test_a_store_past_the_row_is_found(gpu: Backend) -> None:
    problem = Problem.forward(64, 1000, "bf16", alignment=2)  # lanes left over in the last chunk
    verdict = faulty(problem, gpu, "+ lane < vectors", "+ lane <= vectors")
    assert "y: byte 0 after" in verdict.message

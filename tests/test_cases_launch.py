"""Reports from users of such kernels, about devices and launches; see test_cases.py."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import replaced, simulated

import rmsnorm_raw
from rmsnorm_raw import launch, rmsnorm_fwd, space
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.backends.cpu import CpuBackend
from rmsnorm_raw.backends.driver_facts import device_spec
from rmsnorm_raw.check import verify
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN, MIB, SIMULATED
from rmsnorm_raw.errors import (
    BackendUnavailable,
    CompileError,
    InvalidConfig,
    LaunchError,
    SimulatorError,
)
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.launch import Tensor, make_plan
from rmsnorm_raw.module import build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render

GFX950, GFX942, SM_90 = (KNOWN[arch] for arch in ("gfx950", "gfx942", "sm_90"))
MI300X = {
    "name": b"AMD Instinct MI300X", "gcnArchName": b"gfx942:sramecc+:xnack-", "major": 9,
    "warpSize": 64, "multiProcessorCount": 304, "sharedMemPerBlock": 64 * 1024,
    "l2CacheSize": 4 * MIB,
}  # fmt: skip
MAKE = [Problem.forward, Problem.backward]


# ---- 8: pytorch PR#185644, gfx942 reports capability 9.x and is taken for an H100 ----------------


@pytest.mark.parametrize("minor", [0, 4, 5])
def test_gfx942_with_capability_9_is_told_by_its_name_case_8(minor: int, tmp_path: Path) -> None:
    found = device_spec(MI300X | {"minor": minor}, "rocm", kfd_nodes=tmp_path)
    assert (found.arch, found.dialect, found.wave) == ("gfx942", "amd", 64)
    problem = Problem.forward(4096, 4096, "bf16")
    bulk = Config.parse("b256-t256-v16-lds3b-p1")
    assert space.reject_reason(problem, dataclasses.replace(found, arch="sm_90"), bulk) is None
    assert "sm_90's" in str(space.reject_reason(problem, found, bulk))
    assert ("RR_GFX", "942") in render(problem, default_config(problem, found), found).defines


def test_nothing_in_the_package_asks_for_a_capability_case_8() -> None:
    asks = re.compile(r"compute_capability|get_device_capability|ComputeCapability")
    package = Path(rmsnorm_raw.__file__).parent
    assert [path for path in package.rglob("*.py") if asks.search(path.read_text())] == []


# ---- 9: pytorch#183861, lane maths with a hard-coded wave width ----------------------------------


def test_a_device_with_other_waves_than_the_kernels_is_refused_case_9(tmp_path: Path) -> None:
    radeon = MI300X | {"gcnArchName": b"gfx1100", "warpSize": 32}
    with pytest.raises(BackendUnavailable, match=r"gfx1100.* has waves of 32 lanes .* for 64"):
        device_spec(radeon, "rocm", kfd_nodes=tmp_path)
    source = render(Problem.forward(4, 256, "bf16"), Config(64, 32), SIMULATED[32])
    with pytest.raises(CompileError, match="wave"):
        CpuBackend(64).compile(source)


@pytest.mark.parametrize("wave", [64, 32])
@pytest.mark.parametrize("make", MAKE)
def test_a_hard_coded_wave_width_is_found_and_there_is_none_case_9(
    make: Callable[..., Problem], wave: int
) -> None:
    backend, problem = CpuBackend(wave), make(9, 2048, "bf16")
    config = Config.parse("b256-t256-v16-reg" + "-p1" * (problem.op == "backward"))
    right = render(problem, config, backend.device)
    assert verify(problem, config, build(right, backend)).passed
    other = replaced(right, ("threadIdx.x / RR_WAVE;", f"threadIdx.x / {96 - wave};"))
    try:
        verdict = verify(problem, config, build(other, backend))
    except SimulatorError:
        return  # a wave that there is not writes past the exchange area
    assert not verdict.passed


# ---- 10: pytorch#184826, #136291, HIP's limit of 2^32 threads a launch ---------------------------


@given(st.integers(1, 1 << 36), st.sampled_from([1, 8, 127, 1024, 8192, 65536]), st.data())
def test_grids_stay_under_two_to_the_32_threads_and_cover_all_rows_case_10(
    rows: int, cols: int, data: st.DataObject
) -> None:
    for make, device in ((make, device) for make in MAKE for device in (GFX950, GFX942, SM_90)):
        problem = make(rows, cols, "bf16")
        kept = space.enumerate_configs(dataclasses.replace(problem, rows=min(rows, 4096)), device)
        config = data.draw(st.sampled_from(kept.kept))
        if space.reject_reason(problem, device, config):
            assert config.blocks_per_row > 1  # one launch only, so few rows only: said in words
            continue
        binary: Any = SimpleNamespace(backend=SimpleNamespace(device=device))
        launches = make_plan(
            problem, config, binary, dict.fromkeys(("x", "y", "dout", "dx"), Tensor(0, cols))
        ).launches
        assert all(0 < each.grid * each.block < 1 << 32 for each in launches)
        if problem.op == "forward" and not config.programs:
            row_launches = [each for each in launches if each.entry_point == "rmsnorm_forward"]
        else:
            row_launches = [each for each in launches if each.entry_point.endswith("_rows")]
        if row_launches:
            assert sum(int(each.args[7]) for each in row_launches) == rows


@pytest.mark.parametrize("wave", [64, 32])
@pytest.mark.parametrize(
    "problem",
    [
        Problem.forward(37, 512, "bf16"), Problem.forward(37, 512, "fp16", weight_dtype=None),
        Problem.backward(37, 512, "bf16"), Problem.backward(37, 512, "bf16", has_rstd=False),
    ],
    ids=str,
)  # fmt: skip
def test_rows_dealt_over_several_launches_are_all_right_case_10(
    problem: Problem, wave: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit as if it were 1024 threads, so that few rows exceed it."""
    monkeypatch.setattr(launch, "MAX_THREADS", 1024)
    backend = CpuBackend(wave)
    slugs = ("b64-t64-v16-reg", "b256-t64-v16-reg", "b64-t64-v16-2p")
    if problem.op == "backward":
        slugs = ("b256-t256-v16-2p-p1", "b256-t64-v16-2p-p1")
    for slug in slugs:
        config = Config.parse(slug)
        binary = build(render(problem, config, backend.device, runtime_cols=True), backend)
        assert len(launch.launches(problem, config, binary)) > 2
        verdict = verify(problem, config, binary)
        assert verdict.passed, (slug, verdict.message)


# ---- 14: Liger#231, 32 "warps" of 64 lanes -------------------------------------------------------


def test_a_config_over_1024_threads_is_refused_with_its_reason_case_14(cpu64: Backend) -> None:
    problem, many = Problem.forward(8, 65536, "bf16"), Config(block=32 * 64, threads_per_row=2048)
    for device in KNOWN.values():
        reason = space.reject_reason(problem, device, many)
        assert reason == f"a block has 64 to 1024 threads in whole waves of {device.wave}, not 2048"
        for make in MAKE:
            kept = space.enumerate_configs(make(8, 65536, "bf16"), device).kept
            assert {config.block for config in kept} <= {*range(64, 1025, device.wave)}
    with pytest.raises(InvalidConfig, match="64 to 1024 threads"):
        render(problem, many, cpu64.device)
    with pytest.raises(InvalidConfig, match="64 to 1024 threads"):
        rmsnorm_fwd(np.ones((2, 65536), np.float16), config=many)
    binary = build(render(Problem.forward(8, 512, "bf16"), Config(), cpu64.device), cpu64)
    with pytest.raises(LaunchError, match="a block of 2048 threads"):
        cpu64.launch(binary.code.functions["rmsnorm_forward"], 1, 2048, (), 0, 0)


# ---- 15: flashinfer PR#718, LDS over the limit ---------------------------------------------------


@pytest.mark.parametrize(("arch", "stages"), [("gfx942", 8), ("gfx950", 8), ("sm_90", 8)])
def test_lds_over_the_limit_is_refused_with_its_bytes_before_a_launch_case_15(
    arch: str, stages: int
) -> None:
    device = KNOWN[arch]
    problem = Problem.backward(64, 16384, "bf16")
    config = Config.parse(f"b512-t512-v16-lds{stages}r-p1")
    need = max(space.lds_bytes(problem, config, device).values())
    assert need > device.lds_bytes
    with pytest.raises(InvalidConfig, match=f"{need} bytes of LDS a block.*{device.lds_bytes}"):
        render(problem, config, device)


def test_a_launch_with_too_much_lds_is_named_with_its_bytes_case_15(cpu64: Backend) -> None:
    binary = build(render(Problem.forward(8, 512, "bf16"), Config(), cpu64.device), cpu64)
    with pytest.raises(LaunchError, match=r"163841 bytes of LDS: .* has 163840"):
        cpu64.launch(binary.code.functions["rmsnorm_forward"], 1, 256, (), 160 * 1024 + 1, 0)


# ---- 29: triton PR#9087, LDS use rises with stages -----------------------------------------------


@pytest.mark.parametrize("make", MAKE)
def test_lds_is_counted_by_path_and_what_overflows_is_pruned_case_29(
    make: Callable[..., Problem],
) -> None:
    """Of a ring its rows, of the other paths the exchange alone, whatever else is asked for."""
    for device, cols in ((d, c) for d in KNOWN.values() for c in (512, 8192, 32768)):
        problem = make(4096, cols, "bf16")
        tensors = 1 if problem.op == "forward" else 2
        found = space.enumerate_configs(problem, device)
        for config in found.kept:
            need = max(space.lds_bytes(problem, config, device).values())
            assert need * max(1, config.programs) <= device.lds_bytes
            if config.path == "lds":
                assert need >= config.stages * tensors * config.rows_per_block * cols * 2
            elif config.rows_per_block == 1:
                assert need <= 1024
        if cols == 32768 and problem.op == "backward":
            refused = [why for config, why in found.rejected if config.path == "lds"]
            assert any(f"and {device.arch} has {device.lds_bytes}" in why for why in refused)


@pytest.mark.parametrize("arch", ["gfx950", "gfx942", "sm_90"])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("make", MAKE)
def test_a_ring_uses_all_the_lds_that_is_counted_and_no_more_case_29(
    make: Callable[..., Problem], stages: int, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, config = make(40, 512, "bf16"), Config.parse(f"b64-t64-v16-lds{stages}-p1")
    binary = build(render(problem, config, simulated(arch)), CpuBackend(KNOWN[arch].wave))
    assert verify(problem, config, binary).passed
    counted = space.lds_bytes
    monkeypatch.setattr(
        launch, "lds_bytes", lambda *a: {name: size - 16 for name, size in counted(*a).items()}
    )
    with pytest.raises(SimulatorError, match="LDS"):
        verify(problem, config, binary)

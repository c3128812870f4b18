"""Reports from users of such kernels, about the machine and its drivers; see test_cases.py."""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from machines import GFX942, GFX950, Machine
from planted_lab import PlantedLab

from rmsnorm_raw import ladder, rmsnorm_fwd, space
from rmsnorm_raw.backends import cupy_backend
from rmsnorm_raw.backends.cupy_backend import CupyBackend
from rmsnorm_raw.backends.prepared import OpenLaunch
from rmsnorm_raw.device import KNOWN, SIMULATED
from rmsnorm_raw.errors import BackendUnavailable, LaunchError
from rmsnorm_raw.lab import Fault
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.worker import Worker

# ---- 22: cupy#9529, #9718, ROCm without hipcc, or a release that CuPy does not know --------------


@pytest.mark.parametrize("gpu", [GFX950, GFX942])
def test_doctor_says_that_hipcc_is_missing_and_what_to_install_case_22(
    gpu: int, machine: Machine
) -> None:
    machine.amd_node(gpu)
    machine.installed["cupy-rocm-7-0"] = "14.2.0"
    machine.rocm("7.0.2")
    hipcc = machine.check("hipcc")
    assert hipcc.ok is False
    assert "apt install rocm" in hipcc.mend
    (machine.root / "rocm" / "bin").mkdir()
    (machine.root / "rocm" / "bin" / "hipcc").touch()
    assert f'PATH="{machine.root}/rocm/bin:$PATH"' in machine.check("hipcc").mend
    machine.tool("hipcc")
    assert machine.check("hipcc").ok is True


@pytest.mark.parametrize(("release", "ok"), [("7.0.2", True), ("6.4.3", False), ("8.0.0", False)])
def test_doctor_says_which_rocm_the_wheel_of_cupy_wants_case_22(
    release: str, ok: bool, machine: Machine
) -> None:
    machine.amd_node(GFX950)
    machine.installed["cupy-rocm-7-0"] = "14.2.0"
    machine.rocm(release)
    rocm = machine.check("ROCm")
    assert (rocm.ok, rocm.found.startswith(release)) == (ok, True)
    assert ok or "apt install rocm" in rocm.mend


def test_a_backend_without_hipcc_is_unavailable_in_words_case_22(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = SimpleNamespace(is_hip=True, getDeviceCount=lambda: 1, CUDARuntimeError=OSError)
    cupy: Any = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime), __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setenv("PATH", os.devnull)
    assert "hipcc" in str(cupy_backend.why_unavailable("rocm"))
    assert "add /opt/rocm/bin to PATH" in str(cupy_backend.why_unavailable("rocm"))
    cupy_backend.backend_of_device.cache_clear()
    with pytest.raises(BackendUnavailable, match="hipcc"):
        cupy_backend.backend_of_device("rocm", 0)


# ---- a driver that remembers, in CuPy's words ----------------------------------------------------


class DriverError(Exception):
    pass


class Kernel:
    """CuPy's: its setter for dynamic LDS raises on HIP (cupy#9961)."""

    num_regs, shared_size_bytes, local_size_bytes, kernel = 64, 512, 0, SimpleNamespace(ptr=7)

    def __init__(self, is_hip: bool) -> None:
        self._is_hip = is_hip
        self.granted: int | None = None

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self.granted or 48 * 1024

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size_bytes: int) -> None:
        if self._is_hip:
            raise DriverError("hipErrorInvalidValue")
        self.granted = size_bytes


class Driver:
    """A runtime whose failed call is reported again by the next one, as HIP 7's are (cupy#9976)."""

    CUDADriverError = CUDARuntimeError = DriverError

    def __init__(self, is_hip: bool) -> None:
        self.is_hip = is_hip
        self.last_error = 0
        self.launched: list[tuple[int, int]] = []

    def getDevice(self) -> int:
        return 0

    def setDevice(self, index: int) -> None:
        pass

    def check_status(self, status: int) -> None:
        self.last_error = 0
        raise DriverError(f"status {status}")

    def launchKernel(self, handle: int, grid: int, y: int, z: int, block: int, *rest: Any) -> None:
        if self.is_hip and self.last_error:
            raise DriverError("the error of an earlier call")
        if block > 1024:
            self.last_error = 1
            raise DriverError("hipErrorInvalidValue")
        self.launched.append((grid, block))


def backend_on(driver: Driver) -> CupyBackend:
    backend = object.__new__(CupyBackend)
    cuda = SimpleNamespace(driver=driver, Device=contextlib.nullcontext)
    backend._cupy = SimpleNamespace(cuda=cuda)
    backend._runtime = driver
    backend.index = 0
    backend.device = KNOWN["gfx950" if driver.is_hip else "sm_90"]
    return backend


# ---- 23: cupy#9961, setting the dynamic LDS attribute raises on HIP ------------------------------


def test_dynamic_lds_is_asked_for_on_cuda_and_not_set_on_hip_case_23() -> None:
    amd, nvidia = Kernel(is_hip=True), Kernel(is_hip=False)
    assert backend_on(Driver(is_hip=True))._resources(amd).lds_bytes == 512
    assert amd.granted is None
    backend_on(Driver(is_hip=False))._resources(nvidia)
    assert nvidia.granted == KNOWN["sm_90"].lds_bytes - 512


# ---- 24: cupy#9976, a failed HIP call poisons the next launch ------------------------------------


def test_a_failed_launch_does_not_poison_the_next_case_24(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(is_hip=True)
    backend = backend_on(driver)

    def launch(block: int) -> None:
        opened = OpenLaunch("k", 3, block, (np.int64(1),))
        backend.prepare(Kernel.kernel, opened)(0, ())

    with pytest.raises(LaunchError, match=r"3 blocks of 2048 threads.*hipErrorInvalidValue"):
        launch(2048)
    launch(256)
    assert driver.launched == [(3, 256)]
    monkeypatch.setattr(CupyBackend, "_clear_last_error", lambda self: None)
    with pytest.raises(LaunchError):
        launch(2048)
    with pytest.raises(LaunchError, match="the error of an earlier call"):
        launch(256)


def test_failing_candidates_die_in_their_own_process_case_24() -> None:
    """Two abort: each costs its own result, and the caller goes on."""
    problem, device = Problem.forward(9, 256, "bfloat16"), SIMULATED[32]
    base = ladder.default_config(problem, device)
    kept = space.enumerate_configs(problem, device).kept
    shapes = {(c.block, c.threads_per_row): c for c in kept if c.path == "registers"}
    configs = [base, *[config for config in shapes.values() if config != base][:3]]
    fates = {configs[1].slug: "crash", configs[2].slug: "crash"}
    with Worker(partial(PlantedLab, fates)) as worker:
        found = worker.gate(problem, configs)
    kinds = [each.kind if isinstance(each, Fault) else each for each in found.values()]
    assert kinds == ["", "runtime", "runtime", ""]
    assert rmsnorm_fwd(np.ones((2, 64), np.float32)).y.shape == (2, 64)

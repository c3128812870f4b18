"""What the library sees of an MI355X, and of machines on which something is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gfx950_stand_in import FOLDER, require_stand_in

import rmsnorm_raw as rr
from rmsnorm_raw.backends import Backend, available, get_backend
from rmsnorm_raw.backends.driver_facts import device_spec
from rmsnorm_raw.backends.offline import compile_offline
from rmsnorm_raw.device import INFINITY_CACHE_BYTES, KNOWN
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render

require_stand_in()

FACTS = ("name", "arch", "dialect", "wave", "compute_units", "lds_bytes", "register_file")


def test_the_first_backend_is_rocm_on_a_gfx950(rocm: Backend) -> None:
    assert available("rocm") is None
    assert "built for ROCm" in str(available("cuda"))
    assert get_backend() is rocm
    for fact in FACTS:
        assert getattr(rocm.device, fact) == getattr(KNOWN["gfx950"], fact), fact


def test_the_toolchain_is_rocms_runtime_and_cupy(rocm: Backend, cupy: Any) -> None:
    version = cupy.cuda.runtime.runtimeGetVersion()
    assert rocm.toolchain == (f"ROCm {version}", cupy.__version__)
    assert version // 10_000_000 == 7


def test_without_kfd_the_cache_is_the_floor(cupy: Any, tmp_path: Path) -> None:
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    assert properties["l2CacheSize"] == 4 << 20
    spec = device_spec(properties, "rocm", kfd_nodes=tmp_path / "absent")
    assert spec.last_level_cache_bytes == INFINITY_CACHE_BYTES
    assert "floor" in spec.last_level_cache_source


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_the_driver_says_of_a_kernel_what_the_compiler_says(rocm: Backend, op: str) -> None:
    """CuPy's hiprtc and ours make the same code of a text."""
    problem = getattr(Problem, op)(64, 4096, "bf16", weight_dtype="fp32")
    source = render(problem, default_config(problem, rocm.device), rocm.device)
    assert rocm.compile(source).resources == {
        name: rr.backends.Resources(each.registers, each.lds_bytes, each.spill_bytes)
        for name, each in compile_offline(source, "gfx950").resources.items()
    }


def test_a_kernels_machine_code_is_that_of_its_device(rocm: Backend) -> None:
    problem = Problem.backward(64, 4096, "bf16")
    kernel = rr.build(problem, backend=rocm)
    assert kernel.asm == rr.build(problem, device="gfx950").asm
    assert "s_endpgm" in kernel.asm


# ---- other machines, each a process of its own ---------------------------------------------------


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def doctor(**variables: str) -> tuple[dict[str, Any], dict[str, str | None]]:
    """The checks by name, and why a backend cannot run."""
    done = python("from rmsnorm_raw.cli import app; app(['doctor', '--json'])", **variables)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    return {check["name"]: check for check in told["checks"]}, told["backends"]


def without_hipcc() -> str:
    folders = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if not Path(folder, "hipcc").exists())


def test_the_doctor_finds_all_that_rocm_needs() -> None:
    checks, backends = doctor()
    for name, found in (
        ("CuPy", "cupy-rocm-7-0"), ("ROCm SDK 7", "7.0.0"), ("hipcc on PATH", f"{FOLDER}/bin/hipcc")
    ):  # fmt: skip
        assert checks[name]["ok"], checks[name]
        assert found in checks[name]["found"]
    assert backends["rocm"] is None


def test_the_doctor_does_not_deny_a_gpu_that_kfd_hides() -> None:
    checks, backends = doctor()
    assert backends["rocm"] is None
    assert checks["GPU and driver"]["found"].startswith("neither nvidia-smi nor KFD lists one")


def test_without_hipcc_the_doctor_says_how_to_mend_it() -> None:
    checks, backends = doctor(PATH=without_hipcc())
    assert checks["hipcc on PATH"]["ok"] is False
    assert checks["hipcc on PATH"]["mend"].startswith(f"export ROCM_HOME={FOLDER} PATH=")
    assert "hipcc" in str(backends["rocm"])


ON_A_CUPY_ARRAY = """
import cupy, rmsnorm_raw
try:
    rmsnorm_raw.rmsnorm_fwd(cupy.zeros((2, 64), "float32"))
except rmsnorm_raw.errors.BackendUnavailable as error:
    print(error)
print(rmsnorm_raw.get_backend().name)
"""


def test_without_hipcc_a_gpu_array_is_refused_and_the_cpu_is_next() -> None:
    done = python(ON_A_CUPY_ARRAY, PATH=without_hipcc())
    message, backend = done.stdout.splitlines()
    assert "hipcc" in message
    assert "add /opt/rocm/bin to PATH" in message
    assert backend == "cpu"


def test_a_hipcc_that_fails_is_named(tmp_path: Path) -> None:
    """One of another ROCm, or a broken one."""
    hipcc = tmp_path / "hipcc"
    hipcc.write_text("#!/bin/sh\necho 'no such option' >&2\nexit 1\n")
    hipcc.chmod(0o755)
    code = """
from rmsnorm_raw import build, Problem
from rmsnorm_raw.errors import BackendUnavailable
try:
    build(Problem.forward(4, 1024, "bf16"), backend="rocm")
except BackendUnavailable as error:
    print(error)
"""
    done = python(code, PATH=os.pathsep.join((str(tmp_path), without_hipcc())))
    assert "run hipcc -x hip -E -v /dev/null" in done.stdout, done.stderr


def test_a_hidden_gpu_is_named() -> None:
    _, backends = doctor(HIP_VISIBLE_DEVICES="")
    assert "CuPy finds no GPU" in str(backends["rocm"])
    done = python("import rmsnorm_raw; rmsnorm_raw.get_backend()", RMSNORM_RAW_BACKEND="rocm",
                  HIP_VISIBLE_DEVICES="")  # fmt: skip
    assert "BackendUnavailable: CuPy finds no GPU" in done.stderr


def test_without_the_hip_library_cupy_does_not_import() -> None:
    libraries = os.environ["LD_LIBRARY_PATH"].split(os.pathsep)[1:]
    code = "from rmsnorm_raw.backends import available; print(available('rocm'))"
    done = python(code, LD_LIBRARY_PATH=os.pathsep.join(libraries))
    assert "CuPy does not import" in done.stdout, done.stderr


def test_inspect_prints_what_the_driver_says(rocm: Backend) -> None:
    code = """
from rmsnorm_raw.cli import app
app("inspect --op forward --rows 64 --cols 4096 --backend rocm --json".split())
"""
    # CuPy loads the code object of a child without a device behind it: nothing is launched there
    stand_in = "import sys, pathlib; sys.path.insert(0, {!r}); import gfx950_stand_in as s; "
    stand_in += "s.install(pathlib.Path(s.FOLDER))"
    done = python(stand_in.format(str(Path(__file__).parent)) + code)
    told = json.loads(done.stdout)
    assert "gfx950" in done.stdout
    assert '"registers": ' in json.dumps(told)


def test_arrays_live_on_the_device(cupy: Any) -> None:
    made = rr.array.randn((3, 40), "bfloat16", seed=1)
    assert isinstance(made, cupy.ndarray)
    there = rr.array.to_numpy(made).view(np.uint16)
    assert (there == rr.array.randn((3, 40), "bfloat16", seed=1, backend="cpu").view("u2")).all()
    assert not rr.array.to_numpy(rr.array.zeros((3, 40))).any()

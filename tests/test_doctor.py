"""doctor: each made-up machine, and the command that mends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from machines import GFX950, H200, Machine

from rmsnorm_raw import doctor
from rmsnorm_raw.backends import rocm_libraries
from rmsnorm_raw.environment import Check


def test_the_checks_import_neither_cupy_nor_torch() -> None:
    code = (
        "import sys; from rmsnorm_raw import doctor; doctor.checks();"
        "print(sorted({'cupy', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_bare_machine_needs_a_compiler_only(machine: Machine) -> None:
    compiler = machine.check("C++")
    assert (compiler.ok, compiler.mend) == (False, "pip install ziglang")
    for start in ("GPU", "CuPy", "ROCm", "hipcc", "torch"):
        assert machine.check(start).ok is None


def test_the_systems_compiler_is_enough(machine: Machine) -> None:
    machine.tool("c++", "c++ (Debian) 12.2.0")
    assert machine.check("C++") == Check("C++ compiler (cpu backend)", True, "c++ (Debian) 12.2.0")


def test_ziglang_is_enough(machine: Machine) -> None:
    machine.installed["ziglang"] = "0.15.2"
    assert machine.check("C++").ok is True


def test_a_compiler_that_does_not_start_is_not_enough(machine: Machine) -> None:
    machine.tool("c++", "cannot execute cc1plus", exit_code=1)
    compiler = machine.check("C++")
    assert compiler.ok is False
    assert "cc1plus" in compiler.found


def test_an_mi355x_with_nothing_installed(machine: Machine) -> None:
    machine.amd_node(GFX950)
    assert machine.check("GPU") == Check("GPU and driver", True, "gfx950")
    assert machine.check("CuPy").mend == "pip install cupy-rocm-7-0"
    for start in ("ROCm", "hipcc"):
        assert machine.check(start).ok is False
        assert "apt install rocm" in machine.check(start).mend


def test_an_mi355x_that_is_ready(machine: Machine) -> None:
    machine.amd_node(GFX950)
    machine.rocm("7.0.2")
    machine.tool("hipcc")
    machine.installed["cupy-rocm-7-0"] = "14.2.0"
    for start, found in (("GPU", "gfx950"), ("CuPy", "cupy-rocm-7-0 14.2.0"), ("ROCm", "7.0.2")):
        assert (machine.check(start).ok, machine.check(start).found) == (True, found)
    assert machine.check("hipcc").ok is True


@pytest.mark.parametrize("release", ["6.4.3", "8.0.0"])  # the wheel loads libhiprtc.so.7
def test_a_rocm_that_the_wheel_cannot_load(machine: Machine, release: str) -> None:
    machine.installed["cupy-rocm-7-0"] = "14.2.0"
    machine.rocm(release)
    rocm = machine.check("ROCm")
    assert rocm.ok is False
    assert rocm.found.startswith(release)
    assert "apt install rocm" in rocm.mend


def test_hipcc_that_is_not_on_path(machine: Machine) -> None:
    machine.amd_node(GFX950)
    (machine.root / "rocm" / "bin").mkdir()
    (machine.root / "rocm" / "bin" / "hipcc").touch()
    rocm = machine.root / "rocm"
    assert machine.check("hipcc").mend == f'export ROCM_HOME={rocm} PATH="{rocm}/bin:$PATH"'


def test_an_amd_gpu_that_the_user_may_not_open(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.amd_node(GFX950)
    monkeypatch.setattr(doctor, "KFD_DEVICE", machine.root / "absent")
    driver = machine.check("GPU")
    assert driver.ok is False
    assert "usermod -aG render,video" in driver.mend


def test_an_nvidia_driver_that_fails(machine: Machine) -> None:
    machine.tool("nvidia-smi", "driver/library version mismatch", exit_code=18)
    driver = machine.check("GPU")
    assert driver.ok is False
    assert "mismatch" in driver.found


@pytest.mark.parametrize(
    ("driver", "installed", "ok", "mend"),
    [
        ("580.159.04", [], False, "pip install cupy-cuda13x"),
        ("570.86.10", [], False, "pip install cupy-cuda12x"),
        ("580.159.04", ["cupy-cuda13x"], True, ""),
        ("580.159.04", ["cupy-cuda12x"], True, ""),  # drivers run older CUDA
        ("570.86.10", ["cupy-cuda13x"], False,
         "pip uninstall -y cupy-cuda13x && pip install cupy-cuda12x"),
        ("580.159.04", ["cupy-rocm-7-0"], False,
         "pip uninstall -y cupy-rocm-7-0 && pip install cupy-cuda13x"),
        ("580.159.04", ["cupy-cuda12x", "cupy-cuda13x"], False,
         "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install cupy-cuda13x"),
        ("580.159.04", ["cupy"], True, ""),  # built from source for what is here
    ],
)  # fmt: skip
def test_the_cupy_that_an_nvidia_gpu_needs(
    machine: Machine, driver: str, installed: list[str], ok: bool, mend: str
) -> None:
    machine.tool("nvidia-smi", H200.replace("580.159.04", driver))
    machine.installed.update(dict.fromkeys(installed, "14.2.0"))
    cupy = machine.check("CuPy")
    assert (cupy.ok, cupy.mend) == (ok, mend)


def test_ml_dtypes_is_required_and_torch_is_not(machine: Machine) -> None:
    ml_dtypes, torch = machine.check("ml_dtypes"), machine.check("torch")
    assert (ml_dtypes.ok, ml_dtypes.mend) == (False, "pip install ml_dtypes")
    assert (torch.ok, torch.mend) == (None, "pip install torch")


@pytest.mark.parametrize(
    ("gpu", "build", "ok", "mend"),
    [
        ("", "CPU", True, ""),
        ("nvidia", "CUDA 12.6", True, ""),
        ("nvidia", "CPU", False, "CUDA build of torch"),
        ("amd", "ROCm 7.0", True, ""),
        ("amd", "CPU", False, "PyTorch's ROCm index"),
        ("amd", "CUDA 12.6", False, "PyTorch's ROCm index"),
    ],
)
def test_torch_is_built_for_the_gpu_that_is_here(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, gpu: str, build: str, ok: bool, mend: str
) -> None:
    if gpu == "nvidia":
        machine.tool("nvidia-smi", H200)
    elif gpu == "amd":
        machine.amd_node(GFX950)
    machine.installed["torch"] = "2.13.0"
    monkeypatch.setattr(doctor, "torch_build", lambda: build)
    torch = machine.check("torch")
    assert torch.ok is ok
    assert torch.found.startswith(f"2.13.0, built for {build}")
    assert mend in torch.mend


def test_a_torch_for_cpus_is_no_fault_where_there_is_no_gpu(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.installed |= {"torch": "2.13.0", "cupy-rocm-7-0": "14.2.0"}
    monkeypatch.setattr(doctor, "torch_build", lambda: "CPU")
    assert machine.check("torch").ok is True


@pytest.mark.parametrize("here", ["gpu", "cupy-rocm-7-0", "amd-cupy"])
def test_a_torch_that_is_not_installed_is_asked_for_by_the_gpu(machine: Machine, here: str) -> None:
    if here == "gpu":
        machine.amd_node(GFX950)
    else:
        machine.installed[here] = "14.2.0"
    torch = machine.check("torch")
    assert torch.ok is None
    assert "PyTorch's ROCm index" in torch.mend


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "CPU"),
        ("cuda: Optional[str] = '12.6'\nhip: Optional[str] = None\n", "CUDA 12.6"),
        ("cuda = None\nhip = '7.0.51831-a3e329ad8'\n", "ROCm 7.0"),
    ],
)
def test_torchs_build_is_read_off_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, build: str
) -> None:
    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    (tmp_path / "torch-2.13.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.13.0\n")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.torch_build() == build


def test_amds_compiler_or_the_command_that_fetches_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = machine.check("AMD's compiler")
    assert (compiler.ok, compiler.mend) == (None, rocm_libraries.FETCH)
    folder = rocm_libraries.wheel_folder("7.0.0")
    folder.mkdir(parents=True)
    for name in rocm_libraries.NEEDED:
        (folder / f"{name}.0.70000").touch()
        (folder / name).symlink_to(f"{name}.0.70000")
    compiler = machine.check("AMD's compiler")
    assert (compiler.ok, compiler.found) == (True, f"7.0.0 in {folder}")
    monkeypatch.setenv(rocm_libraries.VARIABLE, str(machine.root))
    compiler = machine.check("AMD's compiler")
    assert (compiler.ok, compiler.mend) == (False, f"unset {rocm_libraries.VARIABLE}")


@pytest.mark.parametrize(
    ("value", "ok", "found"),
    [
        (None, None, "not set"),
        ("cpu", True, "cpu"),
        ("cuda", False, "cuda, which cannot run here"),
        ("metal", False, "'metal' is not one of rocm, cuda, cpu"),
    ],
)
def test_a_backend_that_the_environment_asks_for(
    monkeypatch: pytest.MonkeyPatch, value: str | None, ok: bool | None, found: str
) -> None:
    if value is None:
        monkeypatch.delenv("RMSNORM_RAW_BACKEND", raising=False)
    else:
        monkeypatch.setenv("RMSNORM_RAW_BACKEND", value)
    no_gpu = {"rocm": "no CuPy", "cuda": "no CuPy", "cpu": None}
    monkeypatch.setattr("rmsnorm_raw.backends.available", no_gpu.get)
    checks, _ = doctor.examine()
    (asked,) = (check for check in checks if check.name == "RMSNORM_RAW_BACKEND")
    assert asked.ok is ok
    assert asked.found.startswith(found)
    assert asked.mend == ("unset RMSNORM_RAW_BACKEND" if ok is False else "")


def test_a_python_that_is_too_old(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.9.19")
    assert machine.check("Python").ok is False


def test_a_cache_folder_that_cannot_be_written(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.check("cache").ok is True
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(machine.root / "kfd" / "cache"))  # under a file
    cache = machine.check("cache")
    assert cache.ok is False
    assert "RMSNORM_RAW_CACHE_DIR" in cache.mend

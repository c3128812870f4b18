from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rmsnorm_raw import environment

H200 = "NVIDIA H200, 580.159.04, 345, 3201, 29, 76.52, 143771, 0"
GFX950, GFX942, GFX90A = 90500, 90402, 90010  # gfx_target_version, as the kernel driver writes it


class Machine:
    """A made-up machine: its PATH, its installed packages, its AMD GPUs and its ROCm."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.bin = root / "bin"
        self.nodes = root / "nodes"
        self.installed: dict[str, str | None] = {"ziglang": None, "ml_dtypes": None, "torch": None}
        for folder in (self.bin, self.nodes, root / "rocm" / ".info"):
            folder.mkdir(parents=True)
        (root / "kfd").touch()
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setenv("ROCM_HOME", str(root / "rocm"))
        monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(root / "cache"))
        monkeypatch.setattr(environment, "KFD_NODES", self.nodes)
        monkeypatch.setattr(environment, "KFD_DEVICE", root / "kfd")
        monkeypatch.setattr(environment, "packages", lambda: self.installed)

    def tool(self, name: str, prints: str = "", exit_code: int = 0) -> None:
        script = self.bin / name
        stream = "&2" if exit_code else "&1"
        script.write_text(f"#!/bin/sh\necho '{prints}' >{stream}\nexit {exit_code}\n")
        script.chmod(0o755)

    def amd_node(self, gfx_target_version: int) -> None:
        node = self.nodes / str(len(list(self.nodes.iterdir())))
        node.mkdir()
        (node / "properties").write_text(
            f"cpu_cores_count 0\ngfx_target_version {gfx_target_version}\nsimd_count 1024\n"
        )

    def rocm(self, version: str) -> None:
        (self.root / "rocm" / ".info" / "version").write_text(f"{version}-38\n")

    def check(self, start: str) -> environment.Check:
        (found,) = (check for check in environment.checks() if check.name.startswith(start))
        return found


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_collect_is_json_and_names_every_part() -> None:
    facts = json.loads(json.dumps(environment.collect()))
    assert facts.keys() == {
        "time_utc", "python", "os", "cpu", "packages", "git", "compilers", "rocm_version",
        "nvidia_gpus", "amd_gpus", "amd_tools", "variables",
    }  # fmt: skip
    assert facts["packages"]["numpy"]


def test_a_published_command_names_no_machines_folders() -> None:
    args = ["/home/me/venv/bin/rmsnorm-raw", "sweep", "--quick", "--out", "out/run"]
    assert environment.command(args) == [".../bin/rmsnorm-raw", *args[1:]]


def test_collect_imports_neither_cupy_nor_torch() -> None:
    code = (
        "import sys; from rmsnorm_raw import environment as e; e.collect(); e.checks();"
        "print(sorted({'cupy', 'torch', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_collect_on_a_machine_without_any_tool_leaves_errors_as_values(machine: Machine) -> None:
    facts = environment.collect()
    for value in (facts["nvidia_gpus"], facts["rocm_version"], facts["git"]):
        assert isinstance(value, dict)
        assert "No such file" in value["error"]
    assert facts["amd_gpus"] == []


def test_collect_keeps_the_variables_that_change_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMSNORM_RAW_BACKEND", "cpu")
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    text = json.dumps(environment.collect())
    assert '"RMSNORM_RAW_BACKEND": "cpu"' in text
    assert "hush" not in text


def fails_with(error: Exception) -> Callable[[], object]:
    def probe() -> object:
        raise error

    return probe


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("no such tool"),
        subprocess.TimeoutExpired("smi", 20),
        ValueError("not a number"),
        KeyError("a line is missing"),
    ],
)
def test_guarded_makes_a_failing_probe_a_value(error: Exception) -> None:
    assert environment.guarded(fails_with(error)) == {"error": f"{type(error).__name__}: {error}"}


def test_guarded_does_not_hide_a_mistake_in_a_probe() -> None:
    with pytest.raises(TypeError, match="mistake"):
        environment.guarded(fails_with(TypeError("mistake")))


def test_nvidia_gpus_read_the_units_they_name(machine: Machine) -> None:
    machine.tool("nvidia-smi", f"{H200}\nNVIDIA T4, 550.90, [N/A], 5001, 40, [N/A], 15360, 12")
    first, second = environment.nvidia_gpus()
    assert first == {
        "name": "NVIDIA H200",
        "driver_version": "580.159.04",
        "clock_sm_mhz": 345.0,
        "clock_memory_mhz": 3201.0,
        "temperature_c": 29.0,
        "power_w": 76.52,
        "memory_total_mib": 143771.0,
        "memory_used_mib": 0.0,
    }
    assert second["driver_version"] == "550.90"  # a version, though it reads as a number
    assert second["power_w"] == "[N/A]"


def test_nvidia_smi_that_answers_something_else_is_an_error(machine: Machine) -> None:
    machine.tool("nvidia-smi", "NVIDIA H200, 580.159.04")
    with pytest.raises(ValueError, match="shorter"):
        environment.nvidia_gpus()


def test_a_failing_tool_says_what_it_said(machine: Machine) -> None:
    machine.tool("nvidia-smi", "driver/library version mismatch", exit_code=18)
    with pytest.raises(OSError, match=r"exited with 18: driver/library version mismatch"):
        environment.nvidia_gpus()


def test_amd_gpus_decode_the_target_version(machine: Machine) -> None:
    for version in (0, GFX950, GFX942, GFX90A):  # 0: the CPU's own node
        machine.amd_node(version)
    assert environment.amd_gpus() == ["gfx950", "gfx942", "gfx90a"]


def test_amd_gpus_pass_over_a_gpu_that_is_withheld(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.amd_node(GFX942)
    machine.amd_node(GFX950)
    read_text = Path.read_text

    def refuse_the_first(path: Path, encoding: str) -> str:
        if path.parent.name == "0":
            raise PermissionError(path)
        return read_text(path, encoding=encoding)

    monkeypatch.setattr(Path, "read_text", refuse_the_first)
    assert environment.amd_gpus() == ["gfx950"]


def test_checkout_state_follows_the_work_tree(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ("git", "-C", str(tmp_path), *identity, *arguments)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    clean = {"commit": git("rev-parse", "HEAD"), "dirty": False}
    assert environment.checkout_state(tmp_path) == clean
    (tmp_path / "inner" / "file").write_text("2")
    assert environment.checkout_state(tmp_path) == {**clean, "dirty": True}
    with pytest.raises(LookupError, match="not the top"):
        environment.checkout_state(tmp_path / "inner")


def test_write_merges_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "new" / "environment.json"
    environment.write(path, {"device": "H200", "os": "mine"})
    facts = json.loads(path.read_text())
    assert (facts["device"], facts["os"]) == ("H200", "mine")
    assert facts["python"].endswith(sys.version.split()[0])
    with pytest.raises(TypeError):
        environment.write(path, {"bad": {1, 2}})
    assert json.loads(path.read_text()) == facts
    assert os.listdir(path.parent) == ["environment.json"]


def test_cache_dir_is_the_variable_or_the_users_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", "/somewhere")
    assert environment.cache_dir() == Path("/somewhere")
    monkeypatch.delenv("RMSNORM_RAW_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert environment.cache_dir() == Path("/caches/rmsnorm-raw")


# --- doctor: each made-up machine, and the command that mends it ----------------------------------


def test_a_bare_machine_needs_a_compiler_only(machine: Machine) -> None:
    compiler = machine.check("C++")
    assert (compiler.ok, compiler.mend) == (False, "pip install ziglang")
    for start in ("GPU", "CuPy", "ROCm", "hipcc", "torch"):
        assert machine.check(start).ok is None


def test_the_systems_compiler_is_enough(machine: Machine) -> None:
    machine.tool("c++", "c++ (Debian) 12.2.0")
    assert machine.check("C++") == environment.Check(
        "C++ compiler (cpu backend)", True, "c++ (Debian) 12.2.0"
    )


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
    assert machine.check("GPU") == environment.Check("GPU and driver", True, "gfx950")
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
    monkeypatch.setattr(environment, "KFD_DEVICE", machine.root / "absent")
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


def test_a_python_that_is_too_old(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.platform, "python_version", lambda: "3.9.19")
    assert machine.check("Python").ok is False


def test_a_cache_folder_that_cannot_be_written(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.check("cache").ok is True
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(machine.root / "kfd" / "cache"))  # under a file
    cache = machine.check("cache")
    assert cache.ok is False
    assert "RMSNORM_RAW_CACHE_DIR" in cache.mend

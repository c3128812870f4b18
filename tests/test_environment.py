from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from machines import GFX90A, GFX942, GFX950, H200, Machine

from rmsnorm_raw import environment


def test_collect_is_json_and_names_every_part() -> None:
    facts = json.loads(json.dumps(environment.collect()))
    assert facts.keys() == {
        "time_utc", "python", "os", "cpu", "packages", "git", "compilers", "rocm_version",
        "nvidia_gpus", "amd_gpus", "amd_tools", "variables",
    }  # fmt: skip
    assert facts["packages"]["numpy"]


def test_a_package_is_found_under_every_way_to_write_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for written, version in (("liger_kernel", "1.2"), ("Quack.Kernels", "3.4")):
        folder = tmp_path / f"{written}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {written}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = environment.packages()
    assert (found["liger-kernel"], found["quack-kernels"]) == ("1.2", "3.4")
    assert found["ml_dtypes"]


def test_a_published_command_names_no_machines_folders() -> None:
    args = ["/home/me/venv/bin/rmsnorm-raw", "sweep", "--quick", "--out", "out/run"]
    assert environment.command(args) == [".../bin/rmsnorm-raw", *args[1:]]


def test_collect_imports_neither_cupy_nor_torch() -> None:
    code = (
        "import sys; from rmsnorm_raw import environment as e; e.collect();"
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


def test_of_several_files_none_is_replaced_where_one_cannot_be_written(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "below/second"
    environment.replace_texts({first: "old\r\n", second: "old"})
    assert first.read_bytes() == b"old\r\n"
    with pytest.raises(OSError, match="too long"):  # of its temporary file's name
        environment.replace_texts({first: "new", tmp_path / ("x" * 255): "new"})
    assert first.read_bytes() == b"old\r\n"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["below", "first", "second"]
    environment.replace_texts({first: "new", second: "new"})
    assert first.read_bytes() == second.read_bytes() == b"new"


def test_cache_dir_is_the_variable_or_the_users_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", "/somewhere")
    assert environment.cache_dir() == Path("/somewhere")
    monkeypatch.delenv("RMSNORM_RAW_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert environment.cache_dir() == Path("/caches/rmsnorm-raw")

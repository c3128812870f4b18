from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from simulated import each_compiler

from rmsnorm_raw.backends import host_compiler
from rmsnorm_raw.backends.host_compiler import HostObject, build, compilers
from rmsnorm_raw.errors import BackendUnavailable, CompileError

UNIT = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def counted(tmp_path: Path) -> tuple[tuple[str, ...], Path]:
    """(a compiler that notes each call, the file with its notes)."""
    notes, script = tmp_path / "notes", tmp_path / "compiler"
    real = " ".join(compilers()[0])
    script.write_text(f'#!/bin/sh\necho "$@" >> {notes}\nexec {real} "$@"\n')
    script.chmod(0o755)
    return (str(script),), notes


def answer(built: HostObject) -> int:
    """What the object's function returns; in a new process, for dlopen knows objects by name."""
    code = f"import ctypes; print(ctypes.CDLL({str(built.path)!r}).answer())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


@each_compiler
def test_an_object_is_the_same_wherever_it_is_built(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(UNIT, command, "")
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(tmp_path / "elsewhere"))
    second = build(UNIT, command, "")
    assert first.digest == second.digest
    assert first.path != second.path
    assert answer(second) == 42


def test_the_cache_answers_without_the_compiler(counted: tuple[tuple[str, ...], Path]) -> None:
    command, notes = counted
    first = build(UNIT, command, "")
    calls = notes.read_text()
    assert calls.count("unit.cpp") == 1
    assert build(UNIT, command, "") == first
    assert notes.read_text() == calls


def test_what_the_compiler_sees_is_the_key(
    counted: tuple[tuple[str, ...], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, _ = counted
    first = build(UNIT, command, "")
    other_text = build(UNIT.replace("42", "43"), command, "")
    other_compiler = build(UNIT, compilers()[0], "")
    monkeypatch.setattr(host_compiler, "_cpu_flags", lambda: ("-DOTHER",))
    other_flags = build(UNIT, command, "")
    monkeypatch.setattr(host_compiler, "SCHEMA_VERSION", -1)
    other_schema = build(UNIT, command, "")
    entries = {
        built.path.parent
        for built in (first, other_text, other_compiler, other_flags, other_schema)
    }
    assert len(entries) == 5
    assert answer(other_text) == 43


@pytest.mark.parametrize("damage", ["cut short", "one bit", "emptied"])
def test_a_damaged_object_is_built_again(
    damage: str, counted: tuple[tuple[str, ...], Path]
) -> None:
    command, notes = counted
    first = build(UNIT, command, "")
    data = bytearray(first.path.read_bytes())
    data[len(data) // 2] ^= 1
    damaged = {"cut short": bytes(data[:-1]), "one bit": bytes(data), "emptied": b""}
    first.path.write_bytes(damaged[damage])
    assert build(UNIT, command, "") == first
    assert notes.read_text().count("unit.cpp") == 2
    assert answer(first) == 42
    build(UNIT, command, "")
    assert notes.read_text().count("unit.cpp") == 2


def test_builders_at_the_same_time(counted: tuple[tuple[str, ...], Path], cache: Path) -> None:
    command, notes = counted
    host_compiler.version(command)
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: build(UNIT, command, ""), range(4)))
    assert notes.read_text().count("unit.cpp") > 1  # or nobody was in anybody's way
    assert len(set(built)) == 1
    (entry,) = (cache / "simulator").iterdir()  # and no scratch folder is left
    assert [path.stem for path in entry.iterdir()] == [built[0].digest]


def test_what_a_killed_build_left_is_removed_and_a_running_ones_is_not(cache: Path) -> None:
    killed, running = cache / "simulator" / "tmpkilled", cache / "simulator" / "tmprunning"
    for scratch in (killed, running):
        scratch.mkdir(parents=True)
        (scratch / "unit.cpp").write_text(UNIT)
    long_ago = time.time() - 2 * host_compiler.STALE_S
    os.utime(killed, (long_ago, long_ago))
    build(UNIT, compilers()[0], "")
    assert not killed.exists()
    assert (running / "unit.cpp").exists()


def test_a_compilers_own_files_lie_in_the_scratch_folder(tmp_path: Path, cache: Path) -> None:
    script, seen = tmp_path / "compiler", tmp_path / "seen"
    real = " ".join(compilers()[0])
    script.write_text(f'#!/bin/sh\necho "$TMPDIR" > {seen}\nexec {real} "$@"\n')
    script.chmod(0o755)
    build(UNIT, (str(script),), "")
    assert Path(seen.read_text().strip()).parent == cache / "simulator"


def test_a_refused_text_leaves_nothing(cache: Path) -> None:
    with pytest.raises(CompileError, match=r"^config 'b64' does not compile\n") as caught:
        build('#line 7 "wrong.hip"\nint f() { return nothing; }', compilers()[0], "b64")
    assert "wrong.hip:7" in caught.value.log
    assert list((cache / "simulator").iterdir()) == []


@pytest.mark.parametrize("at", ["cache", "cache/simulator", "entry", "object"])
def test_a_cache_that_cannot_be_used_names_the_variable(cache: Path, at: str) -> None:
    first = build(UNIT, compilers()[0], "")
    if at == "object":  # a folder where the object was
        first.path.unlink()
        first.path.mkdir()
    else:  # a file where a folder was
        folder = first.path.parent if at == "entry" else cache.parent / at
        shutil.rmtree(folder)
        folder.touch()
    with pytest.raises(BackendUnavailable, match=r"cannot be used .*set RMSNORM_RAW_CACHE_DIR"):
        build(UNIT, compilers()[0], "")


def test_a_compiler_that_does_not_run(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    for command in ((str(broken),), (str(tmp_path / "missing"),)):
        with pytest.raises(BackendUnavailable, match=r'does not run .*pip install -e "\.\[cpu\]"'):
            build(UNIT, command, "")


def test_the_system_compiler_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert compilers() == (("/bin/c++",), (sys.executable, "-m", "ziglang", "c++"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert compilers() == (("/bin/c++",),)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert compilers() == ()

"""Where AMD's compiler is found, how the wheel with it is fetched, and what is said without it."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from rmsnorm_raw.backends import rocm_libraries
from rmsnorm_raw.backends.offline import compile_offline
from rmsnorm_raw.backends.rocm_libraries import fetch_wheel, find_libraries
from rmsnorm_raw.errors import BackendUnavailable, InvalidInput
from rmsnorm_raw.source import Source

EMPTY = Source("empty.hip", 'extern "C" __global__ void empty() {}\n', (), ("empty",))


# ---- finding the libraries -----------------------------------------------------------------------


def fake_libraries(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in rocm_libraries.NEEDED:
        (folder / name).touch()
    return folder


def test_without_rocm_the_message_names_the_command(no_rocm: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"no ROCm 7 in .*rocm(.|\n)*fetch 7\.0\.0"):
        compile_offline(EMPTY, "gfx950")


def test_installed_rocm_comes_before_the_wheels(no_rocm: Path) -> None:
    newer = fake_libraries(rocm_libraries.wheel_folder("7.2.4"))
    older = fake_libraries(rocm_libraries.wheel_folder("7.0.0"))
    assert find_libraries() == (older, newer)
    installed = fake_libraries(no_rocm / "rocm" / "lib")
    assert find_libraries() == (installed, older, newer)


def test_the_variable_comes_before_all(no_rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_libraries(no_rocm / "rocm" / "lib")
    one, other = fake_libraries(no_rocm / "one"), fake_libraries(no_rocm / "other")
    monkeypatch.setenv(rocm_libraries.VARIABLE, f"{one}:{other}")
    assert find_libraries() == (one, other)


def test_a_variable_that_names_nothing_is_not_passed_over(
    no_rocm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_libraries(no_rocm / "rocm" / "lib")
    monkeypatch.setenv(rocm_libraries.VARIABLE, str(no_rocm / "absent"))
    with pytest.raises(BackendUnavailable, match=r"absent has no libhiprtc\.so\.7"):
        find_libraries()


def test_libraries_that_do_not_load(no_rocm: Path) -> None:
    with pytest.raises(
        BackendUnavailable, match=r"do not load: .*libhiprtc\.so\.7: file too short"
    ):
        compile_offline(EMPTY, "gfx950", libraries=fake_libraries(no_rocm / "empty"))


# ---- fetching the wheel, from a folder instead of an index ---------------------------------------

FILES = (
    "libhiprtc-1a2b.so.7.0.70000", "libamd_comgr-1a2b.so.3.0.70000",
    "libamdhip64-1a2b.so.7.0.70000", "libhsa-runtime64-1a2b.so.1.18.70000", "libelf-0-1a2b.190.so",
)  # fmt: skip


@pytest.fixture
def index(no_rocm: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees one wheel, made here: version 10, for Python 3.12 and later."""
    name = "vapoursynth_dfttest2_hiprtc"
    folder = no_rocm / "index"
    folder.mkdir()
    wheel = folder / f"{name}-10-py3-none-manylinux_2_28_x86_64.whl"
    info = f"{name}-10.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in FILES:
            archive.writestr(f"{name}.libs/{file}", file)
        archive.writestr("vapoursynth/plugins/libplugin.so", "left alone")
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {rocm_libraries.PACKAGE}\nVersion: 10\n"
            "Requires-Python: >=3.12\n",
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-manylinux_2_28_x86_64\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return wheel


def trust(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(rocm_libraries.WHEELS, "7.0.0", rocm_libraries.Wheel("10", digest))


def test_a_fetched_wheel_is_found(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust(index, monkeypatch)
    folder = fetch_wheel("7.0.0")
    assert find_libraries() == (folder,)
    assert {each.name for each in folder.iterdir()} == {*FILES, *rocm_libraries.LINKED}
    assert (folder / "libhiprtc.so.7").read_text() == FILES[0]
    assert rocm_libraries.rocm_release(folder) == "7.0.0"
    index.unlink()
    assert fetch_wheel("7.0.0") == folder  # what is here is not fetched again


def test_a_wheel_of_another_hash_is_refused(index: Path, no_rocm: Path) -> None:
    with pytest.raises(BackendUnavailable, match="not the file that this version") as caught:
        fetch_wheel("7.0.0", no_rocm / "target")
    assert rocm_libraries.WHEELS["7.0.0"].sha256 in str(caught.value)
    assert not (no_rocm / "target").exists()


def test_a_wheel_that_is_not_to_be_had(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert rocm_libraries.main(["fetch", "7.2.4"]) == 1
    message = capfd.readouterr().err
    assert "10.3 could not be downloaded" in message
    assert "check pip and the network" in message


def test_a_release_without_a_wheel() -> None:
    with pytest.raises(InvalidInput, match=r"use one of 7\.0\.0, 7\.2\.4"):
        fetch_wheel("6.4.0")


def test_a_folder_of_something_else_is_left_alone(no_rocm: Path) -> None:
    target = no_rocm / "target"
    target.mkdir()
    with pytest.raises(BackendUnavailable, match=r"has no libhiprtc\.so\.7 .*remove it and fetch"):
        fetch_wheel("7.0.0", target)


def test_a_folder_that_cannot_be_written_is_one_line(
    no_rocm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (no_rocm / "file").touch()
    folder = no_rocm / "file" / "libraries"
    assert rocm_libraries.main(["fetch", "7.0.0", str(folder)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{folder} cannot be made (")
    assert line.endswith("give another folder")

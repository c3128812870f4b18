"""The libraries of AMD's compiler, hiprtc and comgr: where they are here, and how to fetch them.

They are those of an installed ROCm 7, else of a wheel that carries them::

    python -m rmsnorm_raw.backends.rocm_libraries fetch 7.0.0
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rmsnorm_raw.environment import cache_dir, rocm_home
from rmsnorm_raw.errors import BackendUnavailable, InvalidInput, RmsnormRawError

VARIABLE = "RMSNORM_RAW_ROCM_LIBS"
PACKAGE = "vapoursynth-dfttest2-hiprtc"


class Wheel(NamedTuple):
    """A release of :data:`PACKAGE` that carries a ROCm release's hiprtc, comgr and LLVM."""

    version: str
    sha256: str


#: by ROCm release, the one first that CuPy's wheel (cupy-rocm-7-0) is built for
WHEELS = {
    "7.0.0": Wheel("10", "1c59ba03602f578273676010cf3d08bbf29e0afe756e1bf8e4308ba331517c13"),
    "7.2.4": Wheel("10.3", "3496d98c6e0f38f07ec5abae23aa631c4d191f13b1132ff92d42c5ec61a2bebe"),
}
NEEDED = ("libhiprtc.so.7", "libamd_comgr.so.3")
#: names that the libraries load one another by; the wheel's files carry a hash in theirs, and
#: hiprtc ends in a segmentation fault where it does not find comgr
LINKED = (*NEEDED, "libamdhip64.so.7", "libhsa-runtime64.so.1")
FETCH = f"python -m rmsnorm_raw.backends.rocm_libraries fetch {next(iter(WHEELS))}"


def wheel_folder(release: str) -> Path:
    """Where :func:`fetch_wheel` puts the libraries of a ROCm release, unless told otherwise."""
    return cache_dir() / f"rocm-{release}"


def find_libraries() -> tuple[Path, ...]:
    """The folders here with ROCm 7's hiprtc and comgr, the preferred one first.

    ``RMSNORM_RAW_ROCM_LIBS`` names them, separated as in PATH; where it is not set they are those
    of the installed ROCm (ROCM_HOME, ROCM_PATH or /opt/rocm), then of the fetched wheels.

    Raises:
        BackendUnavailable: none is found, or the variable names a folder without them.
    """
    if chosen := os.environ.get(VARIABLE):
        folders = tuple(Path(folder) for folder in chosen.split(os.pathsep))
        for folder in folders:
            require_libraries(folder)
        return folders
    candidates = (rocm_home() / "lib", *map(wheel_folder, WHEELS))
    found = tuple(folder for folder in candidates if not _missing(folder))
    if not found:
        raise BackendUnavailable(
            f"no ROCm 7 in {rocm_home()} and no wheel with its compiler in {cache_dir()}: install "
            f"ROCm 7, or fetch the compiler alone (77 MB, no GPU needed) with\n  {FETCH}"
        )
    return found


def _missing(folder: Path) -> list[str]:
    return [name for name in NEEDED if not (folder / name).exists()]


def require_libraries(folder: Path) -> None:
    """Raises BackendUnavailable, naming what is missing, unless a folder has the libraries."""
    if missing := _missing(folder):
        raise BackendUnavailable(
            f"{folder} has no {' and no '.join(missing)}: give the lib folder of a ROCm 7 (unset "
            f"{VARIABLE} to have one looked for), or fetch the wheel with\n  {FETCH}"
        )


def rocm_release(libraries: Path) -> str:
    """The release that libraries belong to, e.g. "7.2.4", by the file name behind their link."""
    file = (libraries / NEEDED[0]).resolve().name
    found = re.search(r"\.(\d+)(\d\d)(\d\d)$", file)  # libhiprtc.so.7.2.70204
    return ".".join(str(int(number)) for number in found.groups()) if found else file


def fetch_wheel(release: str, target_dir: Path | None = None) -> Path:
    """Download the wheel with a ROCm release's compiler, checked by hash; the libraries' folder.

    pip downloads; nothing is installed, and of the wheel only its libraries are kept. What is
    already there is not fetched again.

    Args:
        release: one of :data:`WHEELS`.
        target_dir: the folder to make; by default :func:`wheel_folder`, where it is looked for.

    Raises:
        InvalidInput: another release.
        BackendUnavailable: pip fails, or the hash differs, or the folder holds something else, and
            what to do about it.
    """
    if release not in WHEELS:
        raise InvalidInput(f"ROCm {release!r} has no wheel here: use one of {', '.join(WHEELS)}")
    target = target_dir or wheel_folder(release)
    if target.exists():
        if missing := _missing(target):
            raise BackendUnavailable(
                f"{target} is there already and has no {' and no '.join(missing)}: remove it and "
                "fetch again, or give another folder"
            )
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        libraries = Path(scratch, "libraries")
        _unpack(_download(WHEELS[release], Path(scratch)), libraries)
        libraries.rename(target)
    return target


def _download(wheel: Wheel, folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    # the wheel asks for Python 3.12, for a plug-in that is left alone; its libraries need none
    command = (
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
        "--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_28_x86_64",
        f"--dest={folder}", f"--requirement={requirements}",
    )  # fmt: skip
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        return next(folder.glob("*.whl"))
    if "DO NOT MATCH THE HASHES" in done.stderr:
        problem = "is not the file that this version of rmsnorm_raw knows, and was not unpacked"
        next_step = "look at the index or proxy that pip uses"
    else:
        problem = "could not be downloaded"
        next_step = "check pip and the network"
    raise BackendUnavailable(
        f"{PACKAGE} {wheel.version} {problem}:\n{done.stderr.rstrip()}\n{next_step}, or install "
        f"ROCm 7, or fetch it on another machine and name the folder in {VARIABLE}"
    )


def _unpack(wheel: Path, target: Path) -> None:
    target.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            folder, _, name = member.rpartition("/")
            if folder.endswith(".libs") and name:
                (target / name).write_bytes(archive.read(member))
    for link in LINKED:
        stem, _, version = link.partition(".so.")
        file = next(target.glob(f"{stem}-*.so.{version}*"))
        (target / link).symlink_to(file.name)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: ``fetch RELEASE [FOLDER]``; 0, or 1 after a message on stderr."""
    parser = argparse.ArgumentParser(prog="python -m rmsnorm_raw.backends.rocm_libraries")
    commands = parser.add_subparsers(required=True)
    fetch = commands.add_parser("fetch", help="download AMD's compiler as a wheel (77 MB)")
    fetch.add_argument("release", choices=WHEELS, help="of ROCm")
    fetch.add_argument("folder", nargs="?", type=Path, help="default: in the user's cache")
    given = parser.parse_args(arguments)
    try:
        print(fetch_wheel(given.release, given.folder))
    except RmsnormRawError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        folder = given.folder or wheel_folder(given.release)
        print(f"{folder} cannot be made ({error}): give another folder", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

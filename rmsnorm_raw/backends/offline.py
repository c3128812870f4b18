"""Code objects for gfx950 and gfx942 without a device: AMD's own hiprtc and comgr, from ROCm 7.

The libraries are those of an installed ROCm, else of a wheel that carries them::

    python -m rmsnorm_raw.backends.offline fetch 7.0.0

A compiler crash ends the process that it happens in, so sources are compiled by a child process
(:mod:`.rocm_child`), which goes on to the next one, or is started afresh after a crash or time-out.
"""

from __future__ import annotations

import argparse
import base64
import functools
import hashlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rmsnorm_raw.backends.kernel_report import KernelReport
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.environment import cache_dir, rocm_home
from rmsnorm_raw.errors import BackendUnavailable, CompileError, InvalidInput, RmsnormRawError
from rmsnorm_raw.source import Source

ARCHITECTURES = tuple(name for name, device in KNOWN.items() if device.dialect == "amd")
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
FETCH = f"python -m rmsnorm_raw.backends.offline fetch {next(iter(WHEELS))}"
START_TIMEOUT_S = 60.0


# ---- where the libraries are ---------------------------------------------------------------------


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
            _require_libraries(folder)
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


def _require_libraries(folder: Path) -> None:
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
        BackendUnavailable: pip fails, or the hash differs, or the folder holds something else.
    """
    if release not in WHEELS:
        raise InvalidInput(f"ROCm {release!r} has no wheel here: use one of {', '.join(WHEELS)}")
    target = target_dir or wheel_folder(release)
    if target.exists():
        _require_libraries(target)
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


# ---- compiling -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OfflineCode:
    """A source compiled for an architecture that need not be here.

    Attributes:
        arch: "gfx950" or "gfx942".
        release: of the ROCm that compiled it, e.g. "7.0.0".
        code_object: the ELF file that a driver would load.
        log: the compiler's warnings and remarks.
        kernels: a report of each entry point.
    """

    arch: str
    release: str
    code_object: bytes = field(repr=False)
    log: str = field(repr=False)
    kernels: dict[str, KernelReport]

    @property
    def object_digest(self) -> str:
        """SHA-256 of the code object, as hex: equal digests are the same kernels."""
        return hashlib.sha256(self.code_object).hexdigest()


def compile_offline(
    source: Source, arch: str, *, libraries: Path | None = None, timeout_s: float = 120.0
) -> OfflineCode:
    """Compile a source for gfx950 or gfx942 with the options that CuPy gives hiprtc.

    A config takes about 0.3 s (one core); from ROCm 7.2 on comgr's cache, which is kept in
    :func:`rmsnorm_raw.environment.cache_dir`, makes that 0.02 s the next time.

    Args:
        source: rendered for a device of that architecture.
        arch: one of :data:`ARCHITECTURES`.
        libraries: a folder of :func:`find_libraries`; None for its first.
        timeout_s: after which the compiler is stopped.

    Raises:
        InvalidInput: another architecture, or a source rendered for another one.
        BackendUnavailable: there is no ROCm, or its libraries do not load.
        CompileError: the compiler refuses the source, crashes or takes too long.
    """
    _require_architecture(source, arch)
    folder = libraries or find_libraries()[0]
    _require_libraries(folder)
    # CuPy 14.2: RawModule's own options, then on HIP the flush flag, which is -ftz there
    options = ["-std=c++17", *(f"-D{name}={value}" for name, value in source.defines)]
    options += ["-fcuda-flush-denormals-to-zero", f"--offload-arch={arch}"]
    request = {"name": source.name, "text": source.text, "options": options, "arch": arch}
    try:
        reply = _child(folder).ask(request, timeout_s)
    except _ChildEnded as end:
        log = f"hiprtc of ROCm {rocm_release(folder)} {end.how}\n{end.log}"
        raise CompileError(source.slug, log, end.next_step) from end
    if reply["code"] is None:
        next_step = f"fix the text at the lines of {source.name} above, or use another config"
        raise CompileError(source.slug, reply["log"], next_step)
    reports = (KernelReport.read(arch, *kernel) for kernel in reply["kernels"])
    kernels = {report.name: report for report in reports}
    if absent := [name for name in source.entry_points if name not in kernels]:
        raise CompileError(
            source.slug,
            f"{source.name} has no kernel {', '.join(absent)}; it has {', '.join(kernels)}",
            'name the entry points as the text does, each extern "C" __global__',
        )
    return OfflineCode(
        arch, rocm_release(folder), base64.b64decode(reply["code"]), reply["log"], kernels
    )


def _require_architecture(source: Source, arch: str) -> None:
    if arch not in ARCHITECTURES:
        raise InvalidInput(
            f"no offline compilation for {arch!r}: use one of {', '.join(ARCHITECTURES)}"
        )
    generation = dict(source.defines).get("RR_GFX", arch.removeprefix("gfx"))
    if generation != arch.removeprefix("gfx"):
        raise InvalidInput(
            f"{source.name} is rendered for gfx{generation}: render it for {arch}, whose branch of "
            "the text differs"
        )


class _ChildEnded(Exception):
    """The child process ended instead of answering."""

    def __init__(self, how: str, log: str, next_step: str) -> None:
        super().__init__(how)
        self.how = how
        self.log = log
        self.next_step = next_step


class _Child:
    """A :mod:`.rocm_child` over one folder of libraries, started when it is first asked.

    It ends with this process, for its stdin does.
    """

    def __init__(self, libraries: Path) -> None:
        self._libraries = libraries
        self._lock = threading.Lock()
        # of its own, since a compiler that crashes leaves its temporary files behind
        self._scratch = tempfile.TemporaryDirectory(prefix="rmsnorm-raw-")
        self._stderr = Path(self._scratch.name, "stderr")
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The reply to one request; starts the child where there is none.

        Raises:
            _ChildEnded: it crashed or was stopped.
            BackendUnavailable: the libraries do not load.
        """
        with self._lock:
            process, self._process = self._process, None
            if process is None or process.poll() is not None:
                process = self._start()
            os.truncate(self._stderr, 0)
            assert process.stdin is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            reply = self._reply(process, timeout_s)
            self._process = process  # not before: an interrupted request's reply is still to come
            return reply

    def _start(self) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("rocm_child.py")
        search = os.pathsep.join(
            filter(None, (str(self._libraries), os.environ.get("LD_LIBRARY_PATH")))
        )
        environment = {
            "AMD_COMGR_CACHE_DIR": str(cache_dir() / "comgr"),
            **os.environ,
            "LD_LIBRARY_PATH": search,
            "TMPDIR": self._scratch.name,
        }
        with self._stderr.open("ab") as stderr:
            process = subprocess.Popen(
                (sys.executable, "-I", str(script), str(self._libraries)),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
                encoding="utf-8", env=environment,
            )  # fmt: skip
        try:
            problem = self._reply(process, START_TIMEOUT_S).get("unavailable")
        except _ChildEnded as end:
            problem = f"loading them {end.how}\n{end.log}"
        if problem is not None:
            raise BackendUnavailable(
                f"the ROCm libraries in {self._libraries} do not load: {problem}\ninstall what is "
                f"missing, or fetch the wheel, which has all it needs, with\n  {FETCH}"
            )
        return process

    def _reply(self, process: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
        # a reply is one line, so nothing is left in the reader's buffer from the one before
        assert process.stdout is not None
        in_time, _, _ = select.select([process.stdout], [], [], timeout_s)
        line = process.stdout.readline() if in_time else ""
        if line.endswith("\n"):
            reply: dict[str, Any] = json.loads(line)
            return reply
        process.kill()
        process.communicate()
        log = self._stderr.read_text(encoding="utf-8", errors="replace").rstrip()
        if not in_time:
            raise _ChildEnded(
                f"was stopped after {timeout_s:g} s",
                log,
                "look for a template or an unrolled loop without an end, or raise timeout_s",
            )
        code = process.returncode
        raise _ChildEnded(
            f"died with {signal.Signals(-code).name}" if code < 0 else f"exited with {code}",
            log or "(it wrote no log)",
            "simplify the source, use another config, or try another ROCm release: "
            f"{' or '.join(WHEELS)} can be fetched",
        )


@functools.cache
def _child(libraries: Path) -> _Child:
    return _Child(libraries)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: ``fetch RELEASE [FOLDER]``; 0, or 1 after a message on stderr."""
    parser = argparse.ArgumentParser(prog="python -m rmsnorm_raw.backends.offline")
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
    return 0


if __name__ == "__main__":
    sys.exit(main())

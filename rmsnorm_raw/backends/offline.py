"""Code objects for gfx950 and gfx942 without a device: AMD's own hiprtc and comgr, from ROCm 7.

A compiler crash ends the process that it happens in, so sources are compiled by a child process
(:mod:`.rocm_child`), which goes on to the next one, or is started afresh after a crash or time-out.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rmsnorm_raw.backends import Code, Resources, Toolchain
from rmsnorm_raw.backends.kernel_report import KernelReport
from rmsnorm_raw.backends.rocm_libraries import (
    FETCH,
    VARIABLE,
    WHEELS,
    find_libraries,
    require_libraries,
    rocm_release,
)
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.environment import cache_dir
from rmsnorm_raw.errors import BackendUnavailable, CompileError, InvalidInput
from rmsnorm_raw.source import Source

ARCHITECTURES = tuple(name for name, device in KNOWN.items() if device.dialect == "amd")
#: of the target that the driver of an MI300X or MI355X names (rocminfo)
FEATURES = ":sramecc+:xnack-"
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineCode(Code):
    """A source compiled for an architecture that need not be here.

    With no device there are no functions to launch; in their place stand the kernels' reports.

    Attributes:
        arch: "gfx950" or "gfx942".
        release: of the ROCm that compiled it, e.g. "7.0.0".
        code_object: the ELF file that a driver would load.
    """

    arch: str
    release: str
    code_object: bytes = field(repr=False)

    @property
    def kernels(self) -> dict[str, KernelReport]:
        """A report of each entry point."""
        return self.functions

    @property
    def listing(self) -> str:
        """The machine code, a line an instruction; those of the row loop begin with "|"."""
        return "\n\n".join(f"{name}:\n{each.listing}" for name, each in self.kernels.items())

    @property
    def code_digest(self) -> str:
        """SHA-256 of the instructions of all entry points, as hex; metadata is left out."""
        lines = itertools.chain.from_iterable(
            (name, *(f"{one.offset} {one.text}" for one in kernel.asm))
            for name, kernel in sorted(self.kernels.items())
        )
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class OfflineBackend:
    """The backend of a device that is not here: it compiles, and can do nothing else."""

    index = 0

    def __init__(self, arch: str, libraries: Path | None = None) -> None:
        """Compile for ``arch``, one of :data:`ARCHITECTURES`; see :func:`compile_offline`.

        Raises:
            InvalidInput: another architecture.
        """
        _require_architecture(arch)
        self.libraries = libraries
        self.name = f"{arch} (no device)"
        self.device = KNOWN[arch]

    @property
    def toolchain(self) -> Toolchain:
        """The hiprtc that :func:`compile_offline` takes.

        Raises:
            BackendUnavailable: there is no ROCm.
        """
        return Toolchain(f"hiprtc of ROCm {rocm_release(self.libraries or find_libraries()[0])}")

    def compile(self, source: Source) -> OfflineCode:
        """See :func:`compile_offline`."""
        return compile_offline(source, self.device.arch, libraries=self.libraries)

    def assembly(self, source: Source) -> str:
        """See :attr:`OfflineCode.listing`."""
        return self.compile(source).listing

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises BackendUnavailable, whatever is asked for."""
        raise BackendUnavailable(
            f"nothing can run or be timed: the kernel is compiled for {self.device.name} "
            f"({self.device.arch}) without a device. Build it where one is, with backend='rocm', "
            "or with backend='cpu' for the simulator"
        )

    launch = prepare = allocate = copy = fill = to_host = from_host = refuse
    synchronize = record = elapsed_us = refuse


@functools.cache
def offline_backend(arch: str) -> OfflineBackend:
    """The one :class:`OfflineBackend` of an architecture."""
    return OfflineBackend(arch)


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
    _require_architecture(arch)
    generation = dict(source.defines).get("RR_GFX", arch.removeprefix("gfx"))
    if generation != arch.removeprefix("gfx"):
        raise InvalidInput(
            f"{source.name} is rendered for gfx{generation}: render it for {arch}, whose branch of "
            "the text differs"
        )
    folder = libraries or find_libraries()[0]
    require_libraries(folder)
    # CuPy 14.2: RawModule's own options, then on HIP the flush flag, which is -ftz there. It names
    # no target, and hiprtc takes the driver's gcnArchName, features and all: without them
    # rmsnorm_dweight took 36 VGPRs for 30 (4096 bf16, ROCm 7.0.0)
    options = ["-std=c++17", *(f"-D{name}={value}" for name, value in source.defines)]
    options += ["-fcuda-flush-denormals-to-zero", f"--offload-arch={arch}{FEATURES}"]
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
    code_object = base64.b64decode(reply["code"])
    return OfflineCode(
        functions=kernels,
        resources={
            name: Resources(kernel.vgpr, kernel.lds_bytes, kernel.scratch_bytes)
            for name, kernel in kernels.items()
        },
        log=reply["log"],
        object_digest=hashlib.sha256(code_object).hexdigest(),
        arch=arch,
        release=rocm_release(folder),
        code_object=code_object,
    )


def _require_architecture(arch: str) -> None:
    if arch not in ARCHITECTURES:
        raise InvalidInput(
            f"no offline compilation for {arch!r}: use one of {', '.join(ARCHITECTURES)}"
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
            "simplify the source, use another config, or try another ROCm release: fetch "
            f"{' or '.join(WHEELS)} with the command below, and name the folder that it prints in "
            f"{VARIABLE}\n  {FETCH}",
        )


@functools.cache
def _child(libraries: Path) -> _Child:
    return _Child(libraries)

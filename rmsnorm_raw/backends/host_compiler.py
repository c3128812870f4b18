"""From a source to a shared object of the simulator: the C++ compilers here, and their cache.

Also what an object says of its kernels, the parameters that each takes and how they are packed, and
how a launch of one is asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.environment import cache_dir
from rmsnorm_raw.errors import BackendUnavailable, CompileError, LaunchError, install
from rmsnorm_raw.source import Source, target_defines

#: of the cache; raise it when a key would have to give another object than it did
SCHEMA_VERSION = 1
# -ffp-contract=fast: hiprtc and NVRTC fuse by default too.
# -nostdlib: nothing here needs a C++ runtime, and zig would first build its own (55 s, zig 0.17.1).
# -g0: zig's debug information names the folder that it ran in, and no two objects would be equal.
_FLAGS = (
    "-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast",
    "-fno-math-errno", "-g0", "-fdiagnostics-color=never", "-nostdlib",
)  # fmt: skip
_LIBRARIES = ("-lm", "-lc")
#: a scratch folder this old is of a build that was killed; no build of a unit takes a minute
STALE_S = 3600.0
_SIMULATOR = ("simulator.h", "simulator_leaves.h", "simulator_barriers.h")


class HostObject(NamedTuple):
    """A shared object: where it lies, the SHA-256 of its bytes, and the compiler's log."""

    path: Path
    digest: str
    log: str


def compilers() -> tuple[tuple[str, ...], ...]:
    """The command lines of the C++ compilers found: the system's ``c++``, then ziglang's."""
    found: list[tuple[str, ...]] = []
    if path := shutil.which("c++"):
        found.append((path,))
    if importlib.util.find_spec("ziglang") is not None:
        found.append((sys.executable, "-m", "ziglang", "c++"))
    return tuple(found)


def translation_unit(source: Source, device: DeviceSpec) -> str:
    """The C++ text of a source: the machine first, and at the end a launcher for each entry point.

    Raises:
        CompileError: the source is rendered for waves of another width than the device's.
    """
    defines = dict(target_defines(device) + source.defines)
    if defines["RR_WAVE"] != str(device.wave):
        raise CompileError(
            source.slug,
            f"{source.name} is rendered for waves of {defines['RR_WAVE']} lanes",
            f"render it for this backend's device, {device.name}",
        )
    lines = ["#define RR_SIMULATOR 1"]
    lines += [f"#define {name} {value}" for name, value in defines.items()]
    for name in _SIMULATOR:
        text = Path(__file__).with_name(name).read_text(encoding="utf-8")
        lines += [f'#line 1 "{name}"', text]
    lines += [f'#line 1 "{source.name}"', source.text, '#line 1 "entry points"']
    lines += [f"RR_SIM_ENTRY({entry})" for entry in source.entry_points]
    return "\n".join((*lines, ""))


class Parameter(NamedTuple):
    """A kernel's parameter: kind "p" (pointer), "i" (integer) or "f" (float), and its bytes."""

    kind: str
    size_bytes: int

    @classmethod
    def all_of(cls, library: ctypes.CDLL, entry_point: str) -> tuple[Parameter, ...]:
        """The parameters of a kernel, from the signature in its object."""
        signature = library[f"rr_sim_signature_{entry_point}"]
        signature.restype = ctypes.c_char_p
        text = signature().decode()
        return tuple(cls(k, int(n)) for k, n in zip(text[::2], text[1::2], strict=True))

    def takes(self, value: np.generic) -> bool:
        """Whether a NumPy scalar has this kind and size."""
        kinds = {"p": "u", "i": "biu", "f": "f"}[self.kind]
        return value.dtype.kind in kinds and value.nbytes == self.size_bytes

    def __str__(self) -> str:
        kind = {"p": "pointer (uint64)", "i": "integer", "f": "float"}[self.kind]
        return f"{kind} of {self.size_bytes} bytes"


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel of a loaded object.

    ``file`` is its source's name, for messages; ``slots`` is how many of its blocks are resident;
    ``run`` takes the launch by its address.
    """

    entry_point: str
    file: str
    parameters: tuple[Parameter, ...]
    slots: int
    run: Any = field(repr=False)

    @classmethod
    def of(cls, library: ctypes.CDLL, entry_point: str, file: str) -> Function:
        """The kernel of that name in an object."""
        run = library[f"rr_sim_run_{entry_point}"]
        run.argtypes, run.restype = (ctypes.c_void_p,), None
        parameters = Parameter.all_of(library, entry_point)
        return cls(entry_point, file, parameters, library.rr_sim_slots(), run)

    def packed(self, args: Sequence[np.generic]) -> bytes:
        """The arguments as the launcher reads them: 8 bytes each.

        Raises:
            LaunchError: their number, or the kind of one, is not the kernel's.
        """
        name, parameters = self.entry_point, self.parameters
        if len(args) != len(parameters):
            raise LaunchError(f"{name} takes {len(parameters)} arguments: {len(args)} were given")
        for index, (arg, parameter) in enumerate(zip(args, parameters, strict=True)):
            if not isinstance(arg, np.generic) or not parameter.takes(arg):
                kind = arg.dtype if isinstance(arg, np.generic) else type(arg).__name__
                raise LaunchError(
                    f"{name}: argument {index} ({arg}, {kind}) should be a NumPy scalar for "
                    f"{parameter}"
                )
        return b"".join(arg.tobytes().ljust(8, b"\0") for arg in args)


def build(unit: str, compiler: tuple[str, ...], slug: str) -> HostObject:
    """Compile a translation unit, or take it from :func:`rmsnorm_raw.environment.cache_dir`.

    The key is all that decides the object: the text, the compiler and its version, the flags. An
    object's file name is the digest of its bytes, so a damaged one is seen and built again; files
    are renamed into place, so that processes may share a cache.

    Args:
        unit: C++ text that includes what it needs.
        compiler: a command line, such as one of :func:`compilers`.
        slug: the config's slug, for the error message.

    Raises:
        CompileError: the compiler refused the text.
        BackendUnavailable: the compiler does not run, or the cache folder cannot be used.
    """
    command = (*compiler, *_FLAGS, *_cpu_flags(), "unit.cpp", *_LIBRARIES, "-o", "unit.so")
    seen = "\0".join((str(SCHEMA_VERSION), version(compiler), *command, unit))
    entry = cache_dir() / "simulator" / hashlib.sha256(seen.encode()).hexdigest()
    try:
        for path in entry.glob("*.so"):
            if _digest(path) == path.stem:
                return HostObject(path, path.stem, "")
        return _compile(unit, command, entry, slug)
    except OSError as error:
        raise BackendUnavailable(
            f"the cache folder {entry.parent} cannot be used ({error}): empty it, or set "
            "RMSNORM_RAW_CACHE_DIR to a folder that you can write"
        ) from error


def _compile(unit: str, command: tuple[str, ...], entry: Path, slug: str) -> HostObject:
    entry.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(entry.parent)
    with tempfile.TemporaryDirectory(dir=entry.parent) as scratch:
        Path(scratch, "unit.cpp").write_text(unit, encoding="utf-8")
        done = subprocess.run(
            command,
            cwd=scratch,
            # zig would keep a second copy, and what a killed compiler leaves lies here
            env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": scratch, "TMPDIR": scratch},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            raise CompileError(slug, done.stderr, "Correct the lines that the compiler names.")
        built = Path(scratch, "unit.so")
        digest = _digest(built)
        entry.mkdir(exist_ok=True)
        path = built.replace(entry / f"{digest}.so")
    return HostObject(path, digest, done.stderr)


def _remove_stale(folder: Path) -> None:
    """Remove what killed builds have left; another process may be building, or removing too."""
    for scratch in folder.glob(f"{tempfile.gettempprefix()}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - scratch.stat().st_mtime > STALE_S:
                shutil.rmtree(scratch, ignore_errors=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def version(compiler: tuple[str, ...]) -> str:
    """What a compiler says of itself.

    Raises:
        BackendUnavailable: it does not run.
    """
    try:
        asked = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendUnavailable(
            f"the C++ compiler {' '.join(compiler)!r} does not run ({error}): repair it, or take "
            f"it off PATH and {install('cpu')}"
        ) from error
    return asked.stdout


@functools.cache
def _cpu_flags() -> tuple[str, ...]:
    """-mfma where this CPU has it: fmaf is a library call otherwise."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return ()
    return ("-mfma",) if " fma " in Path("/proc/cpuinfo").read_text(encoding="utf-8") else ()


class Request(ctypes.Structure):
    """What an object is asked to run: ``rr_sim::Launch`` of simulator.h, field by field."""

    _fields_ = (
        ("stacks", ctypes.c_void_p),
        ("stack_bytes", ctypes.c_uint64),
        ("lds", ctypes.c_void_p),
        ("guard", ctypes.c_char_p),
        ("threads", ctypes.c_void_p),
        ("args", ctypes.c_char_p),
        *((name, ctypes.c_uint32) for name in ("guard_bytes", "lds_bytes", "grid", "block")),
        *((name, ctypes.c_uint32) for name in ("lds_stride", "scattered", "land_late", "early")),
        *((name, ctypes.c_uint32) for name in ("fault_line", "fault_block")),
        ("fault", ctypes.c_char * 256),
    )

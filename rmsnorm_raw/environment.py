"""What a run stood on: guarded probes for ``environment.json``.

Nothing here imports CuPy or torch: versions come from package metadata and devices from the kernel
driver and the vendors' tools, so that a broken GPU stack can still be described.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, ParamSpec

import platformdirs

P = ParamSpec("P")

TOOL_TIMEOUT_S = 20
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")

_PACKAGES = (
    "rmsnorm-raw", "numpy", "scipy", "ml_dtypes", "torch", "triton", "quack-kernels",
    "nvidia-cutlass-dsl", "liger-kernel", "ziglang", "pytest-benchmark", "nvidia-ml-py", "amdsmi",
)  # fmt: skip
_CUPY_WHEELS = ("cupy-cuda", "cupy-rocm", "amd-cupy")
#: variables that change what is compiled or which device runs it
_VARIABLES = ("RMSNORM_RAW_", "AMD_COMGR", "CUDA_", "CUPY_", "HIP", "HSA_", "ROCM_", "ROCR_")
_NVIDIA_FIELDS = {
    "name": "name",
    "driver_version": "driver_version",
    "clocks.sm": "clock_sm_mhz",
    "clocks.mem": "clock_memory_mhz",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_w",
    "memory.total": "memory_total_mib",
    "memory.used": "memory_used_mib",
}
_AMD_TOOLS = {
    "amd-smi static": "amd-smi static --asic --driver --json",
    "amd-smi metric": "amd-smi metric --clock --temperature --power --mem-usage --json",
    "rocm-smi": "rocm-smi --showproductname --showdriverversion --showclocks --showtemp --showpower"
    " --showmeminfo vram --json",
}


def cache_dir() -> Path:
    """Folder of kernels and records: ``RMSNORM_RAW_CACHE_DIR``, else the user's cache folder.

    It need not exist yet.
    """
    chosen = os.environ.get("RMSNORM_RAW_CACHE_DIR")
    return Path(chosen) if chosen else platformdirs.user_cache_path("rmsnorm-raw")


def collect() -> dict[str, object]:
    """The facts of ``environment.json``; a probe that fails leaves ``{"error": ...}`` in its place.

    Keys: time_utc, python, os, cpu, packages (None: not installed), git, compilers, rocm_version,
    nvidia_gpus, amd_gpus, amd_tools, variables.
    """
    return {
        "time_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "os": platform.platform(),
        "cpu": {"model": guarded(cpu_model), "logical_cores": os.cpu_count()},
        "packages": guarded(packages),
        "git": guarded(checkout_state, Path(__file__).resolve().parent.parent),
        "compilers": {tool: guarded(version_lines, tool) for tool in ("c++", "hipcc", "nvcc")},
        "rocm_version": guarded(rocm_version),
        "nvidia_gpus": guarded(nvidia_gpus),
        "amd_gpus": guarded(amd_gpus),
        "amd_tools": {
            name: guarded(_parsed_output, command) for name, command in _AMD_TOOLS.items()
        },
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
    }


def write(path: Path, extra: Mapping[str, object]) -> None:
    """Write :func:`collect` and ``extra`` (whose keys win) to ``path`` as JSON.

    The folder is created, and the file renamed into place, so that nobody reads half of it.

    Raises:
        OSError: the folder cannot be written.
        TypeError: ``extra`` holds what JSON cannot.
    """
    replace_text(path, json.dumps({**collect(), **extra}, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file as a whole: a reader finds the old text or the new one. Creates the folder.

    Raises:
        OSError: it cannot be written; the old file stays.
    """
    replace_texts({path: text})


def replace_texts(files: Mapping[Path, str]) -> None:
    """:func:`replace_text` of several files: none is replaced before all are written.

    Raises:
        OSError: one cannot be written, and the old files stay; or, seldom, one cannot be renamed.
    """
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in files}
    for folder in {path.parent for path in files}:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        for path, text in files.items():
            temporary[path].write_text(text, encoding="utf-8", newline="")
        for path, written in temporary.items():
            written.replace(path)
    finally:
        for written in temporary.values():
            written.unlink(missing_ok=True)


def command(args: Sequence[str]) -> list[str]:
    """A command line fit to be published: of an absolute path its last two parts remain."""
    return [
        str(Path("...", *Path(arg).parts[-2:])) if Path(arg).is_absolute() else arg for arg in args
    ]


def guarded(probe: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> object:
    """The probe's value, or ``{"error": ...}``: one broken tool must not cost a benchmark run."""
    try:
        return probe(*args, **kwargs)
    except (OSError, subprocess.SubprocessError, LookupError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    raise LookupError("/proc/cpuinfo has no model name")


def cupy_is_for(package: str) -> str:
    """The backend that an installed CuPy serves, by its package's name; "" where that is open."""
    if "rocm" in package or package == "amd-cupy":
        return "rocm"
    return "cuda" if "cuda" in package else ""  # a plain "cupy" was built from source


def packages() -> dict[str, str | None]:
    """Installed versions of the packages that matter (None: not installed) and of any CuPy."""
    found: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    listed = {_one_name(name): name for name in _PACKAGES}
    for distribution in metadata.distributions():
        name = distribution.name or ""  # a half-removed package has no name
        name = listed.get(_one_name(name), name)
        if name in found or name == "cupy" or name.startswith(_CUPY_WHEELS):
            found[name] = distribution.version
    return found


def _one_name(name: str) -> str:
    """A package's name as the index compares it: liger_kernel is liger-kernel."""
    return re.sub(r"[-_.]+", "-", name).lower()


def checkout_state(root: Path) -> dict[str, object]:
    """Commit and dirty state of the git checkout whose top folder is ``root``.

    Raises:
        LookupError: ``root`` is not the top of a checkout (a wheel in a virtual environment that
            lies inside some other repository, say, whose commit would mislead).
        OSError: git is missing or refuses the folder.
    """
    if commit := os.environ.get("RMSNORM_RAW_COMMIT"):
        return {"commit": commit, "dirty": "unknown: the commit is from RMSNORM_RAW_COMMIT"}
    git = ("git", "-C", str(root))
    if Path(_output(*git, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
        raise LookupError(f"{root} is not the top of a git checkout")
    return {
        "commit": _output(*git, "rev-parse", "HEAD"),
        "dirty": bool(_output(*git, "status", "--porcelain")),
    }


def fork_safe_lock() -> threading.Lock:
    """A lock that a fork waits for: no child begins with it held by a thread that it has not."""
    lock = threading.Lock()
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )
    return lock


def rocm_home() -> Path:
    """Where ROCm is installed, or would be: ``ROCM_HOME``, ``ROCM_PATH``, else /opt/rocm."""
    return Path(os.environ.get("ROCM_HOME") or os.environ.get("ROCM_PATH") or "/opt/rocm")


def rocm_version() -> str:
    """ROCm's release, e.g. "7.0.2".

    Raises:
        OSError: no ROCm in :func:`rocm_home`.
    """
    text = (rocm_home() / ".info" / "version").read_text(encoding="utf-8")
    return text.strip().partition("-")[0]


def nvidia_gpus() -> list[dict[str, str | float]]:
    """NVIDIA's GPUs as nvidia-smi lists them: name, driver, clocks, temperature, power, memory.

    Raises:
        OSError: nvidia-smi is missing or failed.
        ValueError: it printed something else than asked for.
    """
    query = ",".join(_NVIDIA_FIELDS)
    text = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits")
    gpus = []
    for line in text.splitlines():
        gpu: dict[str, str | float] = {}
        for field, value in zip(_NVIDIA_FIELDS.values(), line.split(", "), strict=True):
            is_number = field not in ("name", "driver_version") and not value.startswith("[")
            gpu[field] = float(value) if is_number else value  # "[N/A]" stays what it is
        gpus.append(gpu)
    return gpus


def drivers(gpus: Any) -> Any:
    """A line for each of :func:`nvidia_gpus`, without what changes by the minute; errors as is."""
    if not isinstance(gpus, list):
        return gpus
    return [f"{gpu['name']}, driver {gpu['driver_version']}" for gpu in gpus]


def amd_gpus() -> list[str]:
    """Architectures of the AMD GPUs that the kernel driver shows, e.g. ["gfx950"]; [] for none."""
    gpus = []
    for node in sorted(KFD_NODES.glob("*/properties")):
        try:
            text = node.read_text(encoding="ascii")
        except PermissionError:  # a GPU that this container was not given
            continue
        facts = dict(line.split() for line in text.splitlines())
        # gfx_target_version is major * 10000 + minor * 100 + stepping; a CPU's node has 0
        if version := int(facts.get("gfx_target_version", "0")):
            gpus.append(f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}")
    return gpus


def _output(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=TOOL_TIMEOUT_S
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-500:]
        raise OSError(f"{command[0]} exited with {done.returncode}: {said}")
    return done.stdout.strip()


def version_lines(tool: str) -> list[str]:
    """The lines of ``tool --version``.

    Raises:
        OSError: the tool is missing or failed.
    """
    return _output(tool, "--version").splitlines()


def _parsed_output(command: str) -> object:
    return json.loads(_output(*command.split()))


@dataclass(frozen=True, slots=True)
class Check:
    """One line of ``rmsnorm-raw doctor``.

    Attributes:
        name: what was looked at.
        ok: True where it serves, False where it needs mending, None where nothing here needs it.
        found: what is there.
        mend: the command that mends it; "" where nothing needs mending.
    """

    name: str
    ok: bool | None
    found: str
    mend: str = ""

"""What a run stood on: guarded probes for ``environment.json``, and the checks behind ``doctor``.

Nothing here imports CuPy or torch: versions come from package metadata and devices from the kernel
driver and the vendors' tools, so that a broken GPU stack can still be described.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import ParamSpec

import platformdirs

P = ParamSpec("P")

TOOL_TIMEOUT_S = 20
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
KFD_DEVICE = Path("/dev/kfd")
#: CUDA 13's minimum driver, by the CUDA toolkit's release notes; older ones serve CUDA 12
CUDA13_DRIVER = 580

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
        "compilers": {tool: guarded(_version_lines, tool) for tool in ("c++", "hipcc", "nvcc")},
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
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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


def packages() -> dict[str, str | None]:
    """Installed versions of the packages that matter (None: not installed) and of any CuPy."""
    found: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for distribution in metadata.distributions():
        name = distribution.name or ""  # a half-removed package has no name
        if name in found or name == "cupy" or name.startswith(_CUPY_WHEELS):
            found[name] = distribution.version
    return found


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


def _version_lines(tool: str) -> list[str]:
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


def checks() -> list[Check]:
    """What is here, what is missing, and the command that mends it."""
    installed = packages()
    try:
        nvidia, nvidia_error = nvidia_gpus(), ""
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        nvidia, nvidia_error = [], str(error)
    amd = amd_gpus()
    flavours = {name: version for name, version in installed.items() if "cupy" in name}
    wants_rocm = bool(amd) or any("rocm" in name for name in flavours)
    return [
        _check_python(),
        _check_host_compiler(installed),
        _check_driver(nvidia, nvidia_error, amd),
        _check_cupy(flavours, nvidia, amd),
        _check_rocm(wants_rocm),
        _check_hipcc(wants_rocm),
        _check_package("ml_dtypes", installed, "bfloat16 outside torch", required=True),
        _check_package("torch", installed, "PyTorch arrays", required=False),
        _check_cache(),
    ]


def _check_python() -> Check:
    version = platform.python_version()
    ok = tuple(int(part) for part in version.split(".")[:2]) >= (3, 10)
    return Check("Python", ok, version, "" if ok else "install Python 3.10 or newer")


def _check_host_compiler(installed: Mapping[str, str | None]) -> Check:
    name = "C++ compiler (cpu backend)"
    if shutil.which("c++"):
        try:
            return Check(name, True, _version_lines("c++")[0])
        except (OSError, subprocess.SubprocessError) as error:
            return Check(name, False, str(error), "pip install ziglang, and take that c++ off PATH")
    if installed["ziglang"]:
        return Check(name, True, f"ziglang {installed['ziglang']}")
    return Check(name, False, "neither c++ nor ziglang", "pip install ziglang")


def _check_driver(nvidia: list[dict[str, str | float]], nvidia_error: str, amd: list[str]) -> Check:
    name = "GPU and driver"
    if amd:
        found = ", ".join(amd)
        if os.access(KFD_DEVICE, os.R_OK | os.W_OK):
            return Check(name, True, found)
        mend = "sudo usermod -aG render,video $USER   # then log in again"
        return Check(name, False, f"{found}, but no access to {KFD_DEVICE}", mend)
    if nvidia:
        found = "; ".join(f"{gpu['name']}, driver {gpu['driver_version']}" for gpu in nvidia)
        return Check(name, True, found)
    if shutil.which("nvidia-smi"):
        return Check(name, False, nvidia_error, "sudo modprobe nvidia && nvidia-smi")
    return Check(name, None, "neither nvidia-smi nor KFD lists one; the cpu backend needs none")


def _check_cupy(
    flavours: Mapping[str, str | None], nvidia: list[dict[str, str | float]], amd: list[str]
) -> Check:
    name = "CuPy"
    found = ", ".join(f"{flavour} {version}" for flavour, version in flavours.items())
    if amd:
        wanted = "cupy-rocm-7-0"
    elif nvidia:
        driver = str(nvidia[0]["driver_version"]).partition(".")[0]
        is_new = driver.isdigit() and int(driver) >= CUDA13_DRIVER
        wanted = "cupy-cuda13x" if is_new else "cupy-cuda12x"
    else:
        return Check(name, True if flavours else None, found or "not installed; no GPU needs it")
    if not flavours:
        return Check(name, False, "not installed", f"pip install {wanted}")
    swap = f"pip uninstall -y {' '.join(flavours)} && pip install {wanted}"
    if len(flavours) > 1:
        return Check(name, False, f"{found} overwrite each other's files", swap)
    # a plain "cupy" was built from source for what is here; a CUDA 13 driver runs CUDA 12 too
    also = {"cupy-rocm-7-0": "amd-cupy", "cupy-cuda13x": "cupy-cuda12x"}.get(wanted)
    if not flavours.keys() & {"cupy", wanted, also}:
        return Check(name, False, f"{found} does not serve this GPU and driver", swap)
    return Check(name, True, found)


_INSTALL_ROCM = (
    "sudo apt install rocm   # with AMD's repository of a 7.x release, "
    "https://rocm.docs.amd.com/projects/install-on-linux"
)


def _check_rocm(wanted: bool) -> Check:
    name = "ROCm SDK 7"
    if not wanted:
        return Check(name, None, "not needed: no AMD GPU, no CuPy for ROCm")
    try:
        version = rocm_version()
    except OSError:
        return Check(name, False, f"none in {rocm_home()}", _INSTALL_ROCM)
    if version.partition(".")[0] != "7":
        found = f"{version}, but cupy-rocm-7-0 loads libhiprtc.so.7"
        return Check(name, False, found, _INSTALL_ROCM)
    return Check(name, True, version)


def _check_hipcc(wanted: bool) -> Check:
    name = "hipcc on PATH"
    if not wanted:
        return Check(name, None, "not needed: no AMD GPU, no CuPy for ROCm")
    if found := shutil.which("hipcc"):
        return Check(name, True, found)
    # CuPy asks hipcc for its include folders at every compilation, through hiprtc too
    if (rocm_home() / "bin" / "hipcc").exists():
        mend = f'export ROCM_HOME={rocm_home()} PATH="{rocm_home()}/bin:$PATH"'
        return Check(name, False, f"{rocm_home()}/bin is not on PATH", mend)
    return Check(name, False, "not installed; CuPy needs it even for hiprtc", _INSTALL_ROCM)


def _check_package(
    package: str, installed: Mapping[str, str | None], use: str, *, required: bool
) -> Check:
    name = f"{package} ({use})"
    if version := installed[package]:
        return Check(name, True, version)
    return Check(name, False if required else None, "not installed", f"pip install {package}")


def _check_cache() -> Check:
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        mend = "export RMSNORM_RAW_CACHE_DIR=a/folder/you/can/write"
        return Check("cache folder", False, f"{folder}: {error.strerror}", mend)
    return Check("cache folder", True, str(folder))

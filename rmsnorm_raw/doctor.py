"""The checks behind ``rmsnorm-raw doctor``: what is here, what is missing, what mends it.

Nothing here imports CuPy or torch, so that a broken GPU stack can still be described.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from rmsnorm_raw import backends, environment, store
from rmsnorm_raw.backends import rocm_libraries
from rmsnorm_raw.environment import Check
from rmsnorm_raw.errors import BackendUnavailable

KFD_DEVICE = Path("/dev/kfd")
#: CUDA 13's minimum driver, by the CUDA toolkit's release notes; older ones serve CUDA 12
CUDA13_DRIVER = 580
VARIABLE = "RMSNORM_RAW_BACKEND"


def examine() -> tuple[list[Check], dict[str, str | None]]:
    """All checks, with those that ask which backends run here; and why a backend cannot.

    Returns:
        The checks, and by backend None where it runs or the reason.
    """
    found = checks()
    refusals = {name: backends.available(name) for name in backends.NAMES}
    records = []
    here = next((name for name, refusal in refusals.items() if refusal is None), None)
    if here is not None:
        try:
            records.append(store.check(backends.get_backend(here)))
        except BackendUnavailable as error:  # a device that no kernel is written for
            refusals[here] = str(error)
    return [*found, check_variable(refusals), *records], refusals


def checks() -> list[Check]:
    """What is here, what is missing, and the command that mends it."""
    installed = environment.packages()
    try:
        nvidia, nvidia_error = environment.nvidia_gpus(), ""
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        nvidia, nvidia_error = [], str(error)
    amd = environment.amd_gpus()
    flavours = {name: version for name, version in installed.items() if "cupy" in name}
    has_rocms = any(environment.cupy_is_for(name) == "rocm" for name in flavours)
    wants_rocm = bool(amd) or has_rocms
    gpu = "ROCm" if amd else "CUDA" if nvidia else ""
    return [
        _check_python(),
        _check_host_compiler(installed),
        _check_driver(nvidia, nvidia_error, amd),
        _check_cupy(flavours, nvidia, amd),
        _check_rocm(wants_rocm),
        _check_hipcc(wants_rocm),
        _check_offline_compiler(),
        _check_ml_dtypes(installed["ml_dtypes"]),
        _check_torch(installed["torch"], gpu, gpu or ("ROCm" if has_rocms else "")),
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
            return Check(name, True, environment.version_lines("c++")[0])
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
        found = "; ".join(environment.drivers(nvidia))
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
        version = environment.rocm_version()
    except OSError:
        return Check(name, False, f"none in {environment.rocm_home()}", _INSTALL_ROCM)
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
    if (environment.rocm_home() / "bin" / "hipcc").exists():
        mend = (
            f'export ROCM_HOME={environment.rocm_home()} PATH="{environment.rocm_home()}/bin:$PATH"'
        )
        return Check(name, False, f"{environment.rocm_home()}/bin is not on PATH", mend)
    return Check(name, False, "not installed; CuPy needs it even for hiprtc", _INSTALL_ROCM)


def _check_offline_compiler() -> Check:
    name = "AMD's compiler (inspect --arch)"
    try:
        folders = rocm_libraries.find_libraries()
    except BackendUnavailable as error:
        if os.environ.get(rocm_libraries.VARIABLE):
            return Check(name, False, str(error), f"unset {rocm_libraries.VARIABLE}")
        return Check(name, None, "not here", rocm_libraries.FETCH)
    found = (f"{rocm_libraries.rocm_release(folder)} in {folder}" for folder in folders)
    return Check(name, True, "; ".join(found))


def _check_ml_dtypes(version: str | None) -> Check:
    name = "ml_dtypes (bfloat16 outside torch)"
    if version:
        return Check(name, True, version)
    return Check(name, False, "not installed", "pip install ml_dtypes")


#: by what torch is to be built for; the empty string is no GPU, and no CuPy for ROCm
_INSTALL_TORCH = {
    "ROCm": "install torch from PyTorch's ROCm index, or as the ROCm documentation says: what a "
    "plain pip install finds is for CUDA",
    "CUDA": "install a CUDA build of torch: PyTorch's installation page gives the command",
    "": "pip install torch",
}


def torch_build() -> str:
    """What the installed torch is built for: "CPU", "CUDA 12.6" or "ROCm 7.0". It is not imported.

    Raises:
        LookupError: torch is not installed.
        OSError: it is laid out otherwise than a wheel of PyTorch.
    """
    try:
        torch = metadata.distribution("torch")
    except metadata.PackageNotFoundError as error:
        raise LookupError("torch is not installed") from error
    text = Path(str(torch.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    found = dict(re.findall(r"^(cuda|hip)\b.*= *['\"](\d+\.\d+)", text, re.MULTILINE))
    if "hip" in found:
        return f"ROCm {found['hip']}"
    return f"CUDA {found['cuda']}" if "cuda" in found else "CPU"


def _check_torch(version: str | None, gpu: str, wanted: str) -> Check:
    """Of the torch that is here: whether it serves the GPU, if any; else which one is wanted."""
    name = "torch (PyTorch arrays)"
    if not version:
        return Check(name, None, "not installed", _INSTALL_TORCH[wanted])
    try:
        build = torch_build()
    except (OSError, LookupError) as error:
        return Check(name, None, f"{version}, and what it is built for cannot be read: {error}")
    found = f"{version}, built for {build}"
    if gpu and not build.startswith(gpu):
        return Check(name, False, f"{found}, not for this GPU", _INSTALL_TORCH[gpu])
    return Check(name, True, found)


def _check_cache() -> Check:
    folder = environment.cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        mend = "export RMSNORM_RAW_CACHE_DIR=a/folder/you/can/write"
        return Check("cache folder", False, f"{folder}: {error.strerror}", mend)
    return Check("cache folder", True, str(folder))


def check_variable(refusals: Mapping[str, str | None]) -> Check:
    """Of the backend that the environment asks for, by :func:`examine`'s refusals."""
    asked = os.environ.get(VARIABLE)
    if not asked:
        return Check(VARIABLE, None, "not set: arrays decide, or the first backend that is here")
    if asked in refusals:
        if refusals[asked] is None:
            return Check(VARIABLE, True, asked)
        return Check(VARIABLE, False, f"{asked}, which cannot run here", f"unset {VARIABLE}")
    names = ", ".join(backends.NAMES)
    return Check(VARIABLE, False, f"{asked!r} is not one of {names}", f"unset {VARIABLE}")

"""NVRTC without a GPU: ctypes is enough to drive the library of the wheel ``nvidia-cuda-nvrtc``."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

Defines = Sequence[tuple[str, str]]


@cache
def library() -> ctypes.CDLL:
    """The library; skips the test where it is not installed."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    found = [lib for f in folders or () for lib in Path(f).rglob("libnvrtc.so*")]
    if not found:
        pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    return ctypes.CDLL(str(found[0]))


def release() -> str:
    """Its version, e.g. "13.0"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compiled(name: str, text: str, defines: Defines, kind: str = "PTX") -> tuple[bytes, str]:
    """(code, log) of a text built for sm_90; raises with the log where NVRTC refuses.

    Args:
        name: of the text, for the log.
        text: CUDA.
        defines: (name, value) pairs.
        kind: "PTX" or "CUBIN".
    """
    nvrtc, program, size = library(), ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    options = [b"-arch=sm_90", b"-std=c++17", *(f"-D{n}={v}".encode() for n, v in defines)]
    status = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if status:
        raise ValueError(log.value.decode())
    getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{kind}")(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw, log.value.decode()

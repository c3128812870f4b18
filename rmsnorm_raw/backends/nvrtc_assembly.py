"""What NVRTC makes of a source, as text: SASS where CUDA's ``nvdisasm`` is found, else PTX."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from rmsnorm_raw.errors import BackendUnavailable, CompileError
from rmsnorm_raw.source import Source

TIMEOUT_S = 60
#: RawModule's own options in CuPy 14.2, and what it adds to them
OPTIONS = ("-std=c++17", "-ftz=true")
NO_SASS = """\
// PTX, for which registers are yet to be allocated. SASS is shown where nvdisasm is found: on PATH,
// with a CUDA toolkit, or by pip install nvidia-cuda-nvdisasm.
"""


def assembly(source: Source, arch: str, nvrtc: Any) -> str:
    """SASS or PTX of a source, compiled as CuPy compiles it.

    Args:
        arch: "sm_90", ...
        nvrtc: ``cupy.cuda.nvrtc``.

    Raises:
        CompileError: NVRTC refuses the source.
        BackendUnavailable: nvdisasm is there and fails.
    """
    defines = (f"-D{name}={value}" for name, value in source.defines)
    program = nvrtc.createProgram(source.text, source.name, (), ())
    try:
        nvrtc.compileProgram(program, (*OPTIONS, f"-arch={arch}", *defines))
        ptx, cubin = nvrtc.getPTX(program), nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program) or str(error)
        raise CompileError(source.slug, log, "fix the text, or use another config") from error
    finally:
        nvrtc.destroyProgram(program)
    tool = nvdisasm()
    return _sass(tool, cubin) if tool else NO_SASS + _text(ptx)


def nvdisasm() -> str | None:
    """Where ``nvdisasm`` is: on PATH, else in NVIDIA's wheel of it; None for nowhere."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations if spec else None) or ()
    in_wheels = [str(path) for folder in folders for path in Path(folder).glob("*/bin/nvdisasm")]
    return shutil.which("nvdisasm") or next(iter(in_wheels), None)


def _sass(tool: str, cubin: bytes) -> str:
    with tempfile.TemporaryDirectory(prefix="rmsnorm-raw-") as scratch:
        path = Path(scratch, "kernel.cubin")
        path.write_bytes(cubin)
        try:
            done = subprocess.run(
                (tool, "--print-code", str(path)), capture_output=True, text=True, check=True,
                timeout=TIMEOUT_S,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", "") or "").strip() or error
            raise BackendUnavailable(
                f"{tool} fails ({said}): take one that is as new as CuPy's NVRTC, or none, to see "
                "PTX"
            ) from error
    return done.stdout


def _text(ptx: bytes | str) -> str:
    return ptx.decode() if isinstance(ptx, bytes) else ptx

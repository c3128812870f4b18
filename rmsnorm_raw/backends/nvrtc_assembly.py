"""What NVRTC makes of a source, as text: SASS where an ``nvdisasm`` reads it, else PTX."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from rmsnorm_raw.errors import CompileError
from rmsnorm_raw.source import Source

TIMEOUT_S = 60
#: RawModule's own options in CuPy 14.2, and what it adds to them
OPTIONS = ("-std=c++17", "-ftz=true")
NO_SASS = """\
// PTX, for which registers are yet to be allocated: {why}. SASS is shown where there is an nvdisasm
// as new as CuPy's NVRTC: on PATH, with a CUDA toolkit, or by pip install nvidia-cuda-nvdisasm.
"""


def assembly(source: Source, arch: str, nvrtc: Any) -> str:
    """SASS of a source, compiled as CuPy compiles it; or PTX, which then begins by saying why.

    Args:
        arch: "sm_90", ...
        nvrtc: ``cupy.cuda.nvrtc``.

    Raises:
        CompileError: NVRTC refuses the source.
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
    tools, why = nvdisasm(), "there is no nvdisasm"
    for tool in tools:
        sass, why = _sass(tool, cubin)
        if sass:
            return sass
    return NO_SASS.format(why=why) + (ptx.decode() if isinstance(ptx, bytes) else ptx)


def nvdisasm() -> list[str]:
    """Where ``nvdisasm`` is: in NVIDIA's wheel of it, and on PATH."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations if spec else None) or ()
    in_wheels = [str(path) for folder in folders for path in Path(folder).glob("*/bin/nvdisasm")]
    on_path = shutil.which("nvdisasm")
    return [*in_wheels, *([on_path] if on_path else [])]


def _sass(tool: str, cubin: bytes) -> tuple[str, str]:
    """(SASS, ""), or ("", why there is none)."""
    with tempfile.TemporaryDirectory(prefix="rmsnorm-raw-") as scratch:
        path = Path(scratch, "kernel.cubin")
        path.write_bytes(cubin)
        try:
            done = subprocess.run(
                (tool, "--print-code", str(path)), capture_output=True, text=True, check=True,
                timeout=TIMEOUT_S,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            said = " ".join((getattr(error, "stderr", "") or str(error)).split())
            return "", f"{tool} fails ({said})"
    return done.stdout, ""

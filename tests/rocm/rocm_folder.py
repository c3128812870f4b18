"""A ROCm 7.0 without a GPU, in one folder, and a command that runs in it.

    python tests/rocm/rocm_folder.py FOLDER pytest tests/rocm

AMD's hiprtc and comgr are those that ``rocm_libraries`` finds; libamdhip64 is the stand-in, built
here by ``cc``. CuPy's wheel links to more of ROCm than is used here: each library that it names is
the stand-in too, under another name, and each function that it wants and nobody has fails loudly.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rmsnorm_raw.backends.rocm_libraries import find_libraries, rocm_release

CUPY = "cupy-rocm-7-0"
#: tells the tests that they run in such a folder: what they then miss is a failure
VARIABLE = "HIP_STAND_IN"
HERE = Path(__file__).resolve().parent
SOURCES = ("hip_stand_in.c", "hip_device.c")
LIBRARY = "libamdhip64.so.7"
HIPCC = """\
#!/bin/sh
# CuPy reads the include folders that the real one prints; the kernels include nothing.
[ "$1" = --version ] && {{ echo "HIP version: {release} (stand-in)"; exit 0; }}
echo '#include <...> search starts here:
 {include}
End of search list.' >&2
"""
MISSING = """\
#include <stdio.h>
#define NO(name) int name(void) {{ fputs(#name " has no stand-in\\n", stderr); return 801; }}
{}
"""


def build(folder: Path) -> dict[str, str]:
    """Make the folder anew; the environment variables of a process that is to find it.

    Raises:
        PackageNotFoundError: CuPy for ROCm is not installed.
        BackendUnavailable: AMD's compiler is not here, and how to fetch it.
        CalledProcessError: ``cc`` or ``nm`` failed.
    """
    extensions = cupy_extensions()
    libraries = find_libraries()[0]
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("lib", "bin", "include", ".info", "comgr"):
        (folder / name).mkdir(parents=True)
    lib = folder / "lib"
    build_stand_in(lib / LIBRARY, folder / "missing.c", wanted_functions(extensions))
    for name in linked_libraries(extensions) - {LIBRARY} | {"libamdhip64.so"}:  # hiprtc's name
        (lib / name).symlink_to(LIBRARY)
    release = rocm_release(libraries)
    (folder / ".info" / "version").write_text(f"{release}\n")
    hipcc = folder / "bin" / "hipcc"
    hipcc.write_text(HIPCC.format(release=release, include=folder / "include"))
    hipcc.chmod(0o755)
    return {
        VARIABLE: str(folder),
        "ROCM_HOME": str(folder),
        "PATH": os.pathsep.join((str(folder / "bin"), os.environ["PATH"])),
        # AMD's libraries find their own neighbours by where they lie, so they stay there
        "LD_LIBRARY_PATH": os.pathsep.join((str(lib), str(libraries))),
        "CUPY_CACHE_DIR": str(folder / "cupy"),  # new, so that hiprtc has to compile
        "AMD_COMGR_CACHE_DIR": str(folder / "comgr"),
    }


def cupy_extensions() -> list[Path]:
    """The extension modules of the installed CuPy for ROCm."""
    files = metadata.distribution(CUPY).files or ()
    return [Path(str(file.locate())) for file in files if file.suffix == ".so"]


def wanted_functions(extensions: Sequence[Path]) -> set[str]:
    """What extension modules want of ROCm's libraries."""
    text = run("nm", "-D", "--undefined-only", *map(str, extensions))
    return set(re.findall(r" U ((?:__)?(?:hip|roc|nccl)\w+)", text))


def linked_libraries(extensions: Sequence[Path]) -> set[str]:
    """The libraries of ROCm that extension modules name."""
    text = run("readelf", "-d", *map(str, extensions))
    return set(re.findall(r"NEEDED.*\[(lib(?:amd|hip|roc|rccl)\S+)\]", text))


def build_stand_in(target: Path, missing: Path, wanted: set[str]) -> None:
    """Compile the stand-in, with a refusal for each wanted function that it does not have."""
    command = ("cc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-shared", "-fPIC", "-pthread")
    command += (f"-Wl,-soname,{LIBRARY}", "-o", str(target))
    sources = [str(HERE / name) for name in SOURCES]
    run(*command, *sources)
    has = set(run("nm", "-D", "--defined-only", str(target)).split())
    missing.write_text(MISSING.format("\n".join(f"NO({name})" for name in sorted(wanted - has))))
    run(*command, *sources, str(missing))


def run(*command: str) -> str:
    """The output of a command.

    Raises:
        CalledProcessError: it failed; what it said is on stderr.
    """
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> None:
    """Build the folder and become the command."""
    folder, *command = sys.argv[1:]
    variables = build(Path(folder).resolve())
    os.execvpe(command[0], command, {**os.environ, **variables})


if __name__ == "__main__":
    main()

"""The plain operation's machine code as it was before there were extras, and as it is.

    python tests/plain_code.py

Writes ``golden/plain_code_*.json``: for each of the study's 90 cells the ladder's config and a
digest of what compilers make of it. The files were written from the text of commit d13df75, the
last one without extras, by this command with PYTHONPATH at a checkout of it; so they say that the
extras left the plain machine code alone. Write them anew where a change is meant, with what it
measures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import nvrtc

from rmsnorm_raw.backends.offline import OfflineCode, compile_offline
from rmsnorm_raw.backends.rocm_libraries import WHEELS, fetch_wheel
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import Source, render
from rmsnorm_raw.study.cells import cells

GOLDEN = Path(__file__).parent / "golden"
#: digests of a compiler's release, by cell and config
Digests = Mapping[str, Mapping[str, str]]


def ladder_source(problem: Problem, arch: str) -> tuple[str, Source]:
    """A name for a cell's kernel, and its source."""
    config = default_config(problem, KNOWN[arch])
    return f"{problem} {config}", render(problem, config, KNOWN[arch])


def cubin_digest(source: Source) -> str:
    """Of what NVRTC makes for sm_90."""
    return _digest(nvrtc.compiled(source.name, source.text, source.defines, "CUBIN")[0])


def listing_digest(code: OfflineCode) -> str:
    """Of the instructions alone, for a code object of AMD's carries a hash of the text."""
    return _digest(code.listing.encode())


def _digest(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()[:16]


def nvrtc_wheel() -> str:
    """The version of NVRTC's wheel, as "13.5.37"; "" where it comes from no wheel."""
    nvrtc.library()  # or skip the test
    try:
        return metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        return ""


def known(arch: str) -> Digests:
    """What was written, by the compiler's release."""
    found: Digests = json.loads((GOLDEN / f"plain_code_{arch}.json").read_text(encoding="utf-8"))
    return found


def write(arch: str, digests: Digests) -> None:
    text = json.dumps(digests, indent=1)
    (GOLDEN / f"plain_code_{arch}.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Both files: sm_90 by the NVRTC that is installed, gfx950 by each ROCm of the wheels."""
    sources = dict(ladder_source(problem, "sm_90") for problem in cells())
    made = {name: cubin_digest(source) for name, source in sources.items()}
    write("sm_90", {nvrtc_wheel(): made})
    sources = dict(ladder_source(problem, "gfx950") for problem in cells())
    write("gfx950", {rocm: amd_digests(sources, fetch_wheel(rocm)) for rocm in WHEELS})


def amd_digests(sources: Mapping[str, Source], libraries: Path) -> dict[str, str]:
    return {
        name: listing_digest(compile_offline(source, "gfx950", libraries=libraries))
        for name, source in sources.items()
    }


if __name__ == "__main__":
    main()

"""AMD's compiler for the tests of this folder; no GPU is needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rmsnorm_raw.backends.rocm_libraries import VARIABLE, find_libraries, rocm_release
from rmsnorm_raw.errors import BackendUnavailable

FOUND: tuple[Path, ...] = ()
REASON = ""
if os.environ.get(VARIABLE):
    FOUND = find_libraries()  # a wrong folder stops the run: it was asked for
else:
    try:
        FOUND = find_libraries()
    except BackendUnavailable as error:
        REASON = str(error)


@pytest.fixture(
    scope="session",
    params=FOUND or (None,),
    ids=lambda folder: f"rocm{rocm_release(folder)}" if folder else "no-rocm",
)
def libraries(request: pytest.FixtureRequest) -> Path:
    """Each ROCm found here in turn; skips, and says why, where there is none."""
    if request.param is None:
        pytest.skip(REASON)
    folder: Path = request.param
    return folder

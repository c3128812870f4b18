"""A gfx950 of host memory for the tests of this folder; ``tox -e rocm`` brings what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gfx950_stand_in import FOLDER, StandIn, install

from rmsnorm_raw.backends import Backend, get_backend

#: whatever is missing for it ends the run: it was asked for
STAND_IN = install(Path(FOLDER)) if FOLDER else None


@pytest.fixture(scope="session")
def stand_in() -> StandIn:
    """The device."""
    assert STAND_IN is not None, "require_stand_in() skips the modules that want it"
    return STAND_IN


@pytest.fixture(autouse=True)
def no_fault(stand_in: StandIn) -> Iterator[None]:
    """A fault on the device fails the test in which it happens, unless the test mends it."""
    stand_in.ran.clear()
    yield
    stand_in.finish()
    faults = stand_in.faults[:]
    stand_in.mend()
    if faults:
        raise AssertionError("the device failed") from faults[0]


@pytest.fixture
def rocm(stand_in: StandIn) -> Backend:
    """The library's backend of the device."""
    return get_backend("rocm")


@pytest.fixture
def cupy(stand_in: StandIn) -> Any:
    import cupy

    return cupy


@pytest.fixture
def side(cupy: Any) -> Any:
    """A stream that the default one does not wait for."""
    return cupy.cuda.Stream(non_blocking=True)

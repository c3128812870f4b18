"""Backends: where a Source is compiled and run. ``get_backend`` picks one.

``rocm`` and ``cuda`` are CuPy (:mod:`.cupy_backend`), ``cpu`` is the strict simulator
(:mod:`.cpu`). A backend knows sources, functions, pointers and streams; it knows nothing of
problems or configs.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from rmsnorm_raw.backends.prepared import OpenLaunch, PreparedLaunch
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.errors import BackendUnavailable, InvalidInput
from rmsnorm_raw.source import Source

NAMES = ("rocm", "cuda", "cpu")


@dataclass(frozen=True, slots=True)
class Resources:
    """What one built kernel takes; None where the toolchain does not say.

    Attributes:
        registers: 32-bit registers a lane.
        lds_bytes: static LDS (shared memory) of a block.
        spill_bytes: scratch (local memory) bytes a lane.
    """

    registers: int | None = None
    lds_bytes: int | None = None
    spill_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Code:
    """A compiled source: its functions by entry point, and what the toolchain says of them."""

    functions: dict[str, Any] = field(repr=False)
    resources: dict[str, Resources]
    log: str = field(repr=False)
    object_digest: str


class Toolchain(NamedTuple):
    """What makes machine code here, and so what a measured time depends on.

    Attributes:
        compiler: its name and version, e.g. "NVRTC 12.9".
        cupy: CuPy's version; "" where it takes no part.
    """

    compiler: str
    cupy: str = ""


class Backend(Protocol):
    """What every backend offers. Streams are integers: the raw handle, 0 for the default stream.

    ``index`` is the device's among those that the name serves; 0 where there is one.
    """

    name: str
    index: int
    device: DeviceSpec

    @property
    def toolchain(self) -> Toolchain:
        """The compiler behind :meth:`compile`."""

    def compile(self, source: Source) -> Code:
        """Compile, or load from the cache. Raises CompileError with the compiler's log."""

    def assembly(self, source: Source) -> str:
        """The machine code of a source, as text to be read."""

    def launch(
        self,
        function: Any,
        grid: int,
        block: int,
        args: Sequence[np.generic],
        lds_bytes: int,
        stream: int,
        early: bool = False,
    ) -> None:
        """Enqueue one launch; ``args`` are NumPy scalars, pointers as uint64.

        An ``early`` one may start while the launch before it ends.
        """

    def prepare(self, function: Any, opened: OpenLaunch) -> PreparedLaunch:
        """A launch for many calls, by any threads, in each of which this device is current."""

    def allocate(self, size_bytes: int) -> tuple[int, Any]:
        """(address, owner) of fresh uninitialised device memory; it lives as long as the owner."""

    def copy(self, target: int, origin: int, size_bytes: int, stream: int) -> None:
        """Enqueue a device-to-device copy between addresses."""

    def fill(self, target: int, byte: int, size_bytes: int, stream: int) -> None:
        """Enqueue a memset."""

    def to_host(self, origin: int, size_bytes: int, stream: int) -> np.ndarray:
        """The bytes at a device address as a NumPy uint8 array; synchronises the stream."""

    def from_host(self, target: int, data: np.ndarray, stream: int) -> None:
        """Write a contiguous NumPy array's bytes to a device address; synchronises the stream."""

    def synchronize(self, stream: int) -> None:
        """Wait until the stream is idle."""

    def record(self, stream: int) -> Any:
        """Enqueue a timing event and return it."""

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Device microseconds between two recorded events; waits for the second."""


class _Provider(Protocol):
    """What a module that brings backends has."""

    def why_unavailable(self, name: str) -> str | None: ...

    def make_backend(self, name: str, wave: int) -> Backend: ...


def _provider(name: str) -> _Provider:
    module = "cpu" if name == "cpu" else "cupy_backend"
    provider: _Provider = importlib.import_module(f"rmsnorm_raw.backends.{module}")
    return provider


def available(name: str) -> str | None:
    """None where the backend can run here, else why not and what to install."""
    return _provider(name).why_unavailable(name)


def _make(name: str, wave: int) -> Backend:
    reason = available(name)
    if reason is not None:
        raise BackendUnavailable(reason)
    return _provider(name).make_backend(name, wave)


def get_backend(name: str | None = None, *, wave: int = 64) -> Backend:
    """The backend of that name; without a name, ``RMSNORM_RAW_BACKEND`` or the first one here.

    Args:
        name: "rocm", "cuda" or "cpu"; None to choose: rocm, then cuda, then cpu.
        wave: lanes of a wave in the simulator, 64 (AMD branch) or 32 (CUDA branch); a GPU has its
            own.

    Raises:
        InvalidInput: no backend has that name.
        BackendUnavailable: it cannot run here; the message names what to install.
    """
    asked = os.environ.get("RMSNORM_RAW_BACKEND")
    origin = f" (from RMSNORM_RAW_BACKEND={asked})" if asked and not name else ""
    name = name or asked or None
    if name is None:
        for candidate in NAMES:
            if available(candidate) is None:
                return _make(candidate, wave)
        raise BackendUnavailable(
            "no backend can run here:\n  " + "\n  ".join(f"{n}: {available(n)}" for n in NAMES)
        )
    if name not in NAMES:
        raise InvalidInput(f"backend {name!r} is not one of {', '.join(NAMES)}{origin}")
    return _make(name, wave)

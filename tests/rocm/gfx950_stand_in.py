"""The device behind the stand-in for HIP: a launch runs the simulator's build of the same Source.

What CuPy loads is what AMD's compiler made. Its metadata says where each argument lies in the
segment that the hardware would be given; from there the arguments are read, as a kernel would read
them, and handed to the simulator with the pointers as they are, for the device's memory is the
host's. That every argument has the kind and the size that the kernel's text says is then a check of
the whole way from a plan to the driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import threading
from collections.abc import Iterator, Sequence
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from rmsnorm_raw.backends import Code
from rmsnorm_raw.backends.cpu import CpuBackend
from rmsnorm_raw.backends.cupy_backend import CupyBackend
from rmsnorm_raw.backends.host_compiler import Parameter
from rmsnorm_raw.backends.rocm_child import Comgr
from rmsnorm_raw.backends.rocm_libraries import find_libraries
from rmsnorm_raw.source import Source

#: where the ROCm is that this process runs in; None where it is none of ours
FOLDER = os.environ.get("HIP_STAND_IN")
REASON = "no stand-in for HIP under this process: tox -e rocm builds one and runs these tests in it"
if importlib.util.find_spec("cupy_backends") is None:
    REASON = "cupy-rocm-7-0 is not installed: tox -e rocm installs it, and what stands in for a GPU"
INVALID_IMAGE, ILLEGAL_ADDRESS, LAUNCH_FAILURE = 200, 700, 719
LOAD = CFUNCTYPE(c_int, c_void_p, c_int, c_void_p, c_size_t)
RUN = CFUNCTYPE(c_int, c_int, c_char_p, c_void_p, POINTER(c_uint32), POINTER(c_uint32), c_uint32)


class NotOnDevice(Exception):
    """A pointer of a launch to memory that a GPU could not reach."""


class Ran(NamedTuple):
    """A launch that the device worked off."""

    entry_point: str
    grid: int
    block: int
    lds_bytes: int
    args: tuple[np.generic, ...]


class Loaded(NamedTuple):
    """A code object on the device: the source that it was made of, if one is known."""

    source: Source | None
    kernels: dict[str, dict[str, Any]]


class StandIn:
    """The one device of this process.

    Attributes:
        ran: the launches so far, in the order in which they happened.
        loaded: code objects, by the number of their module.
        faults: what kernels did wrong; the driver has only a number for it.
    """

    def __init__(self, folder: Path) -> None:
        self.ran: list[Ran] = []
        self.loaded: dict[int, Loaded] = {}
        self.faults: list[Exception] = []
        self._simulator = CpuBackend(64)
        self._built: dict[int, Code] = {}  # in the simulator
        self._compiling = threading.local()
        self._comgr = Comgr(find_libraries()[0])
        self._hip = ctypes.CDLL(str(folder / "lib" / "libamdhip64.so.7"))
        self._hip.stand_in_is_device.argtypes = (c_void_p,)
        self._callbacks = LOAD(self._load), RUN(self._run)
        self._hip.stand_in_connect(*self._callbacks)

    def finish(self) -> None:
        """Work off all that is queued."""
        self._hip.hipDeviceSynchronize()

    def mend(self) -> None:
        """Forget a fault, as only a new process could."""
        self.faults.clear()
        self._hip.stand_in_mend()

    @contextlib.contextmanager
    def compiling(self, source: Source) -> Iterator[None]:
        """What this thread loads meanwhile is the source's."""
        self._compiling.source = source
        try:
            yield
        finally:
            self._compiling.source = None

    def _load(self, module: int, number: int, image: int, size_bytes: int) -> int:
        try:
            code = ctypes.string_at(image, size_bytes)
            kernels = {kernel[".name"]: kernel for kernel in self._comgr.kernels(code)}
        except Exception as error:  # noqa: BLE001 - C has no use for it
            self.faults.append(error)
            return INVALID_IMAGE
        self.loaded[number] = Loaded(getattr(self._compiling, "source", None), kernels)
        for name, kernel in kernels.items():
            given = arguments_of(kernel)
            row = c_int * len(given)
            self._hip.stand_in_add_kernel(
                c_void_p(module), name.encode(), int(kernel[".max_flat_workgroup_size"]),
                int(kernel[".group_segment_fixed_size"]),
                int(kernel[".private_segment_fixed_size"]), int(kernel[".vgpr_count"]),
                int(kernel[".kernarg_segment_size"]), len(given),
                row(*(int(each[".offset"]) for each in given)),
                row(*(int(each[".size"]) for each in given)),
            )  # fmt: skip
        return 0

    def _run(
        self, number: int, name: bytes, arguments: int, grid: Any, block: Any, lds_bytes: int
    ) -> int:
        try:
            loaded, entry_point = self.loaded[number], name.decode()
            if number not in self._built:
                if loaded.source is None:
                    raise LookupError(f"{entry_point} is no kernel of ours, and has no text here")
                self._built[number] = self._simulator.compile(loaded.source)
            function = self._built[number].functions[entry_point]
            given = arguments_of(loaded.kernels[entry_point])
            args = unpack(arguments, given, function.parameters)
            for arg, parameter in zip(args, function.parameters, strict=True):
                if parameter.kind == "p" and arg and not self.is_device(int(arg)):
                    raise NotOnDevice(f"{entry_point}: {int(arg):#x} is not the device's memory")
            self.ran.append(Ran(entry_point, grid[0], block[0], lds_bytes, args))
            self._simulator.launch(function, grid[0], block[0], args, lds_bytes, 0)
        except NotOnDevice as error:
            self.faults.append(error)
            return ILLEGAL_ADDRESS
        except Exception as error:  # noqa: BLE001 - C has no use for it
            self.faults.append(error)
            return LAUNCH_FAILURE
        return 0

    def is_device(self, address: int) -> bool:
        """Whether an address lies in the device's memory, or where some of it ends."""
        return bool(self._hip.stand_in_is_device(address))


def arguments_of(kernel: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments that a launch gives, of a kernel's metadata."""
    return [each for each in kernel[".args"] if not each[".value_kind"].startswith("hidden")]


def unpack(
    arguments: int, given: Sequence[dict[str, Any]], parameters: Sequence[Parameter]
) -> tuple[np.generic, ...]:
    """The arguments of a launch, out of the segment that the hardware would be given."""
    return tuple(
        read(arguments + int(each[".offset"]), int(each[".size"]), each, parameter)
        for each, parameter in zip(given, parameters, strict=True)
    )


def read(address: int, size_bytes: int, given: dict[str, Any], parameter: Parameter) -> np.generic:
    """One argument; the code object and the simulator's build must agree on what it is."""
    is_pointer = given[".value_kind"] == "global_buffer"
    if size_bytes != parameter.size_bytes or is_pointer != (parameter.kind == "p"):
        raise TypeError(f"{given} of the code object is {parameter} in the simulator")
    kind = "u" if is_pointer else parameter.kind
    return np.frombuffer(ctypes.string_at(address, size_bytes), f"{kind}{size_bytes}")[0]


def require_stand_in() -> None:
    """Skips a module, and says why, in a process that does not run in such a ROCm."""
    if FOLDER is None:
        pytest.skip(REASON, allow_module_level=True)


def install(folder: Path) -> StandIn:
    """Put a device behind the stand-in of this process; the backend tells it its sources."""
    stand_in = StandIn(folder)
    compile_source = CupyBackend._compile

    def compile_here(self: CupyBackend, source: Source, digest: str) -> Any:
        with stand_in.compiling(source):
            return compile_source(self, source, digest)

    CupyBackend._compile = compile_here  # type: ignore[method-assign]
    return stand_in

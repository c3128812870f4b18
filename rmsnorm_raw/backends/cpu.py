"""The ``cpu`` backend: kernels compiled by a C++ compiler and run by the strict simulator.

The simulated machine is in ``simulator.h``, what kernels use of it in the headers beside it.
This module has kernels built for it, launches them, and turns the faults that it finds into
:class:`SimulatorError`. Its times mean nothing.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import time
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, get_args

import numpy as np

from rmsnorm_raw.backends import Backend, Code, Resources, Toolchain
from rmsnorm_raw.backends.host_compiler import (
    Function,
    Request,
    build,
    compilers,
    translation_unit,
    version,
)
from rmsnorm_raw.backends.prepared import OpenLaunch, PreparedLaunch
from rmsnorm_raw.device import SIMULATED
from rmsnorm_raw.environment import fork_safe_lock
from rmsnorm_raw.errors import (
    BackendUnavailable,
    InvalidInput,
    LaunchError,
    SimulatorError,
    install,
)
from rmsnorm_raw.source import Source

Order = Literal["forward", "reverse", "shuffle"]
Landing = Literal["issue", "wait"]

MAX_BLOCK = 1024
#: an odd number of 64-byte lines: stacks a power of two apart would keep what every fiber uses in
#: the same few sets of the CPU's cache (a forward of 64x1024 bf16 took 20 % longer)
STACK_BYTES = 64 * 1024 + 64
#: what lies before and after LDS and every allocation. 0x7fa5 is NaN in fp16 and bf16, and twice in
#: fp32, so that a kernel which reads it does not get away with that either
GUARD = np.full(2048, 0x7FA5, "<u2").tobytes()
ALIGNMENT_BYTES = 256

#: what a text with asynchronous copies to LDS has: AMD's, or CUDA's by lanes or in bulk
COPY_LEAVES = ("__builtin_amdgcn_raw_ptr_buffer_load_lds", "rr_sim_copy_async", "rr_sim_copy_bulk")


def why_unavailable(name: str) -> str | None:
    """None where a C++ compiler is found, else what to install."""
    if compilers():
        return None
    return (
        f"backend {name!r} needs a C++ compiler: {install('cpu')} (it brings ziglang), or "
        "install the system's c++"
    )


@functools.cache
def make_backend(name: str, wave: int) -> Backend:
    """The simulator with waves of 64 lanes (AMD's branch of the kernels) or 32 (CUDA's).

    Raises:
        InvalidInput: another wave width.
        BackendUnavailable: there is no C++ compiler.
    """
    return CpuBackend(wave)


def _aligned(address: int) -> int:
    return -(-address // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class _Machine:
    """The memory that blocks run in. A process has one, and one launch runs in it at a time.

    Backends may share an object, and an object keeps its fibers in static variables: no two
    launches could run side by side whoever owned the stacks.
    """

    def __init__(self) -> None:
        most_lds = max(device.lds_bytes for device in SIMULATED.values())
        self.lock = fork_safe_lock()
        self.lds_bytes = most_lds + 2 * len(GUARD)  # for the LDS of all resident blocks
        self._stacks = np.empty(MAX_BLOCK * STACK_BYTES, np.uint8)
        self._lds = np.empty(ALIGNMENT_BYTES + self.lds_bytes, np.uint8)
        self.lds = _aligned(self._lds.ctypes.data + len(GUARD))

    def stacks(self, threads: int) -> int:
        """The address of a stack for each thread; for the holder of the lock."""
        if threads * STACK_BYTES > self._stacks.size:
            self._stacks = np.empty(threads * STACK_BYTES, np.uint8)
        return self._stacks.ctypes.data


_MACHINE = _Machine()  # its pages cost nothing before a launch touches them


class CpuBackend:
    """A strict simulator of a GPU; see :class:`rmsnorm_raw.backends.Backend`.

    Streams are accepted and ignored: everything has happened when a call returns.

    Args:
        wave: lanes of a wave, 64 or 32.
        order: in which the waves of a block, and the lanes of a wave, take their turns between
            barriers. "shuffle" draws a new one for each launch, and scatters AMD's blocks.
        landing: when asynchronous copies to LDS land: at their "issue", or at the last moment that
            the "wait" for them allows.
        seed: of "shuffle".
        compiler: a command line; by default the first of :func:`compilers`.

    Raises:
        InvalidInput: a wave width, an order or a landing that there is not.
        BackendUnavailable: no compiler was given or found.
    """

    def __init__(
        self,
        wave: int = 64,
        *,
        order: Order = "forward",
        landing: Landing = "wait",
        seed: int = 0,
        compiler: Sequence[str] | None = None,
    ) -> None:
        if wave not in SIMULATED:
            raise InvalidInput(f"wave is {wave}: the simulator has waves of 64 or 32 lanes")
        if order not in get_args(Order):
            raise InvalidInput(f"order {order!r} is not one of {', '.join(get_args(Order))}")
        if landing not in get_args(Landing):
            raise InvalidInput(f"landing {landing!r} is not one of {', '.join(get_args(Landing))}")
        if compiler is None:
            if reason := why_unavailable("cpu"):
                raise BackendUnavailable(reason)
            compiler = compilers()[0]
        self.name = "cpu"
        self.index = 0
        self.device = SIMULATED[wave]
        self.landing = landing
        self._order = order
        self._random = np.random.default_rng(seed)
        self._compiler = tuple(compiler)
        self._allocations: weakref.WeakValueDictionary[tuple[int, int], np.ndarray] = (
            weakref.WeakValueDictionary()
        )

    # ---- building ------------------------------------------------------------------------------

    @property
    def toolchain(self) -> Toolchain:
        """The C++ compiler, by the first line that it says of itself."""
        return Toolchain(next(iter(version(self._compiler).splitlines()), ""))

    def compile(self, source: Source) -> Code:
        """Compile, or load from the cache; see :func:`rmsnorm_raw.backends.host_compiler.build`.

        Raises:
            CompileError: the compiler's log names the lines of ``source.name``; or the source is
                rendered for waves of another width.
        """
        unit = translation_unit(source, self.device)
        built = build(unit, self._compiler, source.slug)
        library = ctypes.CDLL(str(built.path))
        functions = {
            entry: Function.of(library, entry, source.name) for entry in source.entry_points
        }
        resources = {entry: Resources() for entry in functions}
        return Code(functions, resources, built.log, built.digest)

    def assembly(self, source: Source) -> NoReturn:
        """Raises BackendUnavailable: what runs here is the host's machine code."""
        raise BackendUnavailable(
            "the simulator runs the host's machine code, which says nothing of a GPU's: "
            "rr.build(problem, device='gfx950').asm is AMD's, with no device"
        )

    # ---- launching -----------------------------------------------------------------------------

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
        """Run one launch to its end; an ``early`` one after the launch before it all the same.

        Raises:
            LaunchError: a grid, block, LDS size or argument that the device would not take.
            SimulatorError: a fault in the kernel, with its line, or a store outside a buffer.
        """
        _require_stream(stream)
        self._require_geometry(function.entry_point, grid, block, lds_bytes)
        threads, lds_stride = self._running_order(block), _aligned(lds_bytes + 2 * len(GUARD))
        if function.slots * lds_stride > _MACHINE.lds_bytes:
            raise LaunchError(
                f"{function.entry_point}: {function.slots} resident blocks of {lds_bytes} bytes of "
                f"LDS: {function.slots * lds_stride} with their guards, of {_MACHINE.lds_bytes}"
            )
        request = Request(
            stack_bytes=STACK_BYTES,
            lds=_MACHINE.lds,
            guard=GUARD,
            threads=threads.ctypes.data,
            args=function.packed(args),
            guard_bytes=len(GUARD),
            lds_bytes=lds_bytes,
            grid=grid,
            block=block,
            lds_stride=lds_stride,
            scattered=self._order == "shuffle" and self.device.dialect == "amd",
            land_late=self.landing == "wait",
            early=early,
        )
        with _MACHINE.lock:
            request.stacks = _MACHINE.stacks(function.slots * block)
            function.run(ctypes.byref(request))
            if request.fault:
                line = f":{request.fault_line}" if request.fault_line else ""
                raise SimulatorError(
                    f"{function.file}{line}: {request.fault.decode()} "
                    f"(kernel {function.entry_point}, block {request.fault_block})"
                )
            self._check_guards(function.entry_point)

    def prepare(self, function: Any, opened: OpenLaunch) -> PreparedLaunch:
        """See :class:`rmsnorm_raw.backends.Backend`."""
        _, grid, block, _, lds_bytes, early = opened
        return lambda stream, addresses: self.launch(
            function, grid, block, opened.filled(addresses), lds_bytes, stream, early
        )

    def _require_geometry(self, entry_point: str, grid: int, block: int, lds_bytes: int) -> None:
        wave, most_lds = self.device.wave, self.device.lds_bytes
        if not (0 < block <= MAX_BLOCK and block % wave == 0):
            raise LaunchError(
                f"{entry_point}: a block of {block} threads: whole waves of {wave}, at most "
                f"{MAX_BLOCK} threads"
            )
        if not 0 < grid * block < 1 << 32:
            raise LaunchError(
                f"{entry_point}: {grid} blocks of {block} threads: at least one block, and less "
                "than 2**32 threads in all"
            )
        if not 0 <= lds_bytes <= most_lds:
            raise LaunchError(
                f"{entry_point}: {lds_bytes} bytes of LDS: {self.device.name} has {most_lds}"
            )

    def _running_order(self, block: int) -> np.ndarray:
        waves = np.arange(block, dtype=np.uint16).reshape(-1, self.device.wave)
        if self._order == "reverse":
            return np.ascontiguousarray(waves[::-1, ::-1])
        if self._order == "shuffle":
            return self._random.permuted(self._random.permutation(waves), axis=1)
        return waves

    # ---- memory --------------------------------------------------------------------------------

    def allocate(self, size_bytes: int) -> tuple[int, np.ndarray]:
        """(address, owner) of memory full of NaN, aligned to 256 bytes, between guards.

        The owner is a uint8 array of the bytes themselves. The guards are checked after each launch
        while it, or a view of it, lives.
        """
        whole = np.empty(len(GUARD) + size_bytes + len(GUARD) + ALIGNMENT_BYTES, np.uint8)
        address = _aligned(whole.ctypes.data + len(GUARD))
        start = address - whole.ctypes.data
        owner = whole[start : start + size_bytes]
        owner.fill(0xFF)
        for _, guard in _guards(whole, address, size_bytes):
            guard[:] = np.frombuffer(GUARD, np.uint8)
        with _MACHINE.lock:
            self._allocations[address, size_bytes] = whole
        return address, owner

    def _check_guards(self, entry_point: str) -> None:
        intact = np.frombuffer(GUARD, np.uint8)
        for (address, size_bytes), whole in self._allocations.items():
            for first, guard in _guards(whole, address, size_bytes):
                if guard.tobytes() == GUARD:
                    continue
                offset = first + int(np.flatnonzero(guard != intact)[0])
                guard[:] = intact  # the next launch is not to blame
                raise SimulatorError(
                    f"store outside a buffer: at byte {offset} of {size_bytes} "
                    f"(kernel {entry_point})"
                )

    def copy(self, target: int, origin: int, size_bytes: int, stream: int) -> None:
        """Copy between addresses."""
        _require_stream(stream)
        ctypes.memmove(target, origin, size_bytes)

    def fill(self, target: int, byte: int, size_bytes: int, stream: int) -> None:
        """Set bytes at an address."""
        _require_stream(stream)
        ctypes.memset(target, byte, size_bytes)

    def to_host(self, origin: int, size_bytes: int, stream: int) -> np.ndarray:
        """A copy of the bytes at an address, as uint8."""
        _require_stream(stream)
        data = np.empty(size_bytes, np.uint8)
        ctypes.memmove(data.ctypes.data, origin, size_bytes)
        return data

    def from_host(self, target: int, data: np.ndarray, stream: int) -> None:
        """Write a contiguous array's bytes to an address.

        Raises:
            InvalidInput: the array is not C-contiguous.
        """
        _require_stream(stream)
        if not data.flags.c_contiguous:
            raise InvalidInput("from_host takes a C-contiguous array: use np.ascontiguousarray")
        ctypes.memmove(target, data.ctypes.data, data.nbytes)

    # ---- time ----------------------------------------------------------------------------------

    def synchronize(self, stream: int) -> None:
        """Nothing to wait for."""
        _require_stream(stream)

    def record(self, stream: int) -> int:
        """The host's clock in nanoseconds."""
        _require_stream(stream)
        return time.perf_counter_ns()

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Host microseconds between two records: simulated time, good for no comparison."""
        return float(end - start) / 1e3


def landings(backend: Backend, source: Source) -> tuple[Backend, ...]:
    """The backends on which a source has to be right, in the place of one.

    For asynchronous copies in the simulator: one for each Landing. Only late copies show a missing
    wait, only early ones a copy into LDS that is still being read. The early ones run with shuffled
    waves besides: in order, the first wave never overtakes one that reads the ring. Otherwise: the
    backend itself.
    """
    if not isinstance(backend, CpuBackend) or not any(leaf in source.text for leaf in COPY_LEAVES):
        return (backend,)
    variants = []
    for landing in get_args(Landing):
        variants.append(copy.copy(backend))  # with the same allocations, whose guards it checks
        variants[-1].landing = landing
        if landing == "issue":
            variants[-1]._order = "shuffle"
    return tuple(variants)


def _require_stream(stream: int) -> None:
    if not isinstance(stream, int):
        raise InvalidInput(f"stream is {stream!r}: pass the raw handle, an int (0: the default)")


def _guards(
    whole: np.ndarray, address: int, size_bytes: int
) -> tuple[tuple[int, np.ndarray], tuple[int, np.ndarray]]:
    """The guards of an allocation, each with the offset of its first byte from ``address``."""
    start = address - whole.ctypes.data
    end = start + size_bytes
    return (
        (-len(GUARD), whole[start - len(GUARD) : start]),
        (size_bytes, whole[end : end + len(GUARD)]),
    )

"""GPU backends: ``rocm`` and ``cuda``, both through CuPy's RawModule.

Which one a machine offers is CuPy's build (``runtime.is_hip``), never a device's capability number:
gfx942 reports 9.x and has been taken for an H100.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rmsnorm_raw import environment
from rmsnorm_raw.backends import Code, Resources, Toolchain, nvrtc_assembly
from rmsnorm_raw.backends.cuda_driver import launch_early
from rmsnorm_raw.backends.driver_facts import device_spec
from rmsnorm_raw.backends.offline import compile_offline
from rmsnorm_raw.backends.prepared import Arguments, OpenLaunch, Pointer, PreparedLaunch
from rmsnorm_raw.errors import BackendUnavailable, CompileError, LaunchError, install
from rmsnorm_raw.source import Source

INSTALL = {
    "rocm": f"{install('rocm')} (it needs the SDK of ROCm 7, hipcc included)",
    "cuda": f"{install('cuda13')} (or cuda12, by the driver's CUDA version)",
}
#: what a CuPy that is installed, and does not import, lacks
LIBRARIES = {
    "rocm": "install ROCm 7, hipcc included; if it is here, name its lib folder in LD_LIBRARY_PATH",
    "cuda": "install NVIDIA's driver and the CUDA toolkit; if they are here, name their lib folder "
    "in LD_LIBRARY_PATH",
}
HIP_ERROR_INVALID_VALUE = 1


def why_unavailable(name: str) -> str | None:
    """None where "rocm" or "cuda" can run here, else what is missing and how to mend it."""
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed: {INSTALL[name]}"
    try:
        import cupy
    except ImportError as error:
        served = {environment.cupy_is_for(package) for package in environment.packages()} - {""}
        if served and name not in served:
            return _serves_another(name)
        return f"CuPy does not import ({_first_line(_innermost(error))}): {LIBRARIES[name]}"
    runtime = cupy.cuda.runtime
    if runtime.is_hip != (name == "rocm"):
        return _serves_another(name)
    try:
        devices = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return f"CuPy finds no GPU ({error}): check the driver and that the device is visible"
    if devices == 0:
        return "CuPy finds no GPU: check the driver, HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES"
    if name == "rocm" and shutil.which("hipcc") is None:
        return "CuPy asks hipcc for include folders and PATH has none: add /opt/rocm/bin to PATH"
    return None


def make_backend(name: str, wave: int) -> CupyBackend:
    """The backend of the current device; a GPU has its own wave width, so ``wave`` is not used."""
    import cupy

    return backend_of_device(name, cupy.cuda.runtime.getDevice())


@functools.cache
def backend_of_device(name: str, index: int) -> CupyBackend:
    """The one backend of a device, by its index.

    Raises:
        BackendUnavailable: CuPy or the device is missing, or its waves are not the kernels'.
    """
    reason = why_unavailable(name)
    if reason is not None:
        raise BackendUnavailable(reason)
    return CupyBackend(name, index)


def _serves_another(name: str) -> str:
    built_for = "CUDA" if name == "rocm" else "ROCm"
    return (
        f"the installed CuPy is built for {built_for}, and two in one environment break each "
        f"other: {name} wants an environment of its own"
    )


def _innermost(error: BaseException) -> BaseException:
    """What an error began with: CuPy's own says nothing of the library that is missing."""
    deeper = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error if deeper is None else _innermost(deeper)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip(" =")), repr(error))


class RawStream(NamedTuple):
    """A raw stream handle in both forms that CuPy takes.

    Its launches and events read ``.ptr`` and nothing else, so that a foreign stream costs them no
    wrapper; ``Stream.from_external`` asks for the CUDA stream protocol.
    """

    ptr: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """(protocol version, handle)."""
        return 0, self.ptr


class CupyBackend:
    """One GPU under CuPy; every call runs on this device, whichever is current."""

    def __init__(self, name: str, index: int) -> None:
        """Read the device's facts.

        Raises:
            BackendUnavailable: see :func:`device_spec`.
        """
        import cupy

        self._cupy: Any = cupy
        self._runtime: Any = cupy.cuda.runtime
        self.name = name
        self.index = index
        self.device = device_spec(self._runtime.getDeviceProperties(index), name)
        self._codes: dict[str, Code] = {}

    @functools.cached_property
    def toolchain(self) -> Toolchain:
        """ROCm by its runtime, for hiprtc comes with it; NVRTC by itself, for it need not."""
        if self._runtime.is_hip:
            compiler = f"ROCm {self._runtime.runtimeGetVersion()}"
        else:
            compiler = "NVRTC {}.{}".format(*self._cupy.cuda.nvrtc.getVersion())
        return Toolchain(compiler, self._cupy.__version__)

    def compile(self, source: Source) -> Code:
        """Compile with hiprtc or NVRTC, or take it from this process; CuPy's disk cache is below.

        ``object_digest`` is the source's digest: RawModule does not hand out the code object.

        Raises:
            CompileError: with the slug and the compiler's log.
            BackendUnavailable: hipcc, which CuPy asks for include folders, fails.
        """
        digest = source.digest
        if digest not in self._codes:
            self._codes[digest] = self._compile(source, digest)
        return self._codes[digest]

    def _compile(self, source: Source, digest: str) -> Code:
        options = ("-std=c++17", *(f"-D{name}={value}" for name, value in source.defines))
        text = f'#line 1 "{source.name}"\n{source.text}'  # CuPy's own file name is a hash
        compiler_error = self._cupy.cuda.compiler.CompileException
        driver_error = self._cupy.cuda.driver.CUDADriverError
        try:
            with self._current():
                module = self._cupy.RawModule(code=text, options=options)
                kernels = {name: module.get_function(name) for name in source.entry_points}
                resources = {name: self._resources(kernel) for name, kernel in kernels.items()}
                functions = {name: kernel.kernel for name, kernel in kernels.items()}
        except compiler_error as error:
            next_step = "fix the text, or use another config"
            raise CompileError(source.slug, str(error), next_step) from error
        except driver_error as error:
            self._clear_last_error()
            raise CompileError(
                source.slug,
                f"{source.name} compiles, and the driver does not load it: {error}",
                "check the entry points, static LDS and the driver's version",
            ) from error
        except (OSError, RuntimeError) as error:
            if "hipcc" not in str(error):
                raise
            raise BackendUnavailable(
                f"CuPy asks hipcc for include folders, and it fails ({error}): run "
                "hipcc -x hip -E -v /dev/null, and put the hipcc of ROCm 7 first on PATH"
            ) from error
        return Code(functions, resources, log="", object_digest=digest)

    def _resources(self, kernel: Any) -> Resources:
        if not self._runtime.is_hip:
            # CUDA grants over 48 KiB of dynamic shared memory on request only. HIP grants all of
            # it, and CuPy's setter raises there (cupy#9961).
            kernel.max_dynamic_shared_size_bytes = self.device.lds_bytes - kernel.shared_size_bytes
        registers, lds_bytes, spill_bytes = (
            value if value >= 0 else None  # CuPy's -1: the driver does not know the attribute
            for value in (kernel.num_regs, kernel.shared_size_bytes, kernel.local_size_bytes)
        )
        return Resources(registers, lds_bytes, spill_bytes)

    def assembly(self, source: Source) -> str:
        """AMD's machine code by the installed ROCm's own compiler; SASS or PTX of NVRTC's.

        Raises:
            CompileError: with the slug and the compiler's log.
            BackendUnavailable: a tool that shows it is missing or fails.
            InvalidInput: AMD's compiler is not asked for this architecture.
        """
        if self._runtime.is_hip:
            return compile_offline(source, self.device.arch).listing
        return nvrtc_assembly.assembly(source, self.device.arch, self._cupy.cuda.nvrtc)

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
        """Enqueue one launch; an ``early`` one, CUDA's alone, see :func:`launch_early`.

        Raises:
            LaunchError: the driver refused it, or an earlier kernel failed.
        """
        current = self._runtime.getDevice() == self.index
        with contextlib.nullcontext() if current else self._current():
            opened = OpenLaunch("", grid, block, args, lds_bytes, early)
            self.prepare(function, opened)(stream, ())

    def prepare(self, function: Any, opened: OpenLaunch) -> PreparedLaunch:
        """See :class:`rmsnorm_raw.backends.Backend`; calls go to the driver, past CuPy's launch."""
        _, grid, block, args, lds_bytes, early = opened
        pointers = [(k, *arg) for k, arg in enumerate(args) if isinstance(arg, Pointer)]
        driver, handle = self._cupy.cuda.driver, function.ptr
        own = Arguments(args, self._enter)

        def run(stream: int, addresses: Sequence[int]) -> None:
            words, table = own.words, own.table
            for index, which, offset in pointers:
                words[index] = addresses[which] + offset
            try:
                if early:
                    driver.check_status(launch_early(handle, grid, block, table, lds_bytes, stream))
                else:
                    driver.launchKernel(
                        handle, grid, 1, 1, block, 1, 1, lds_bytes, stream, table, 0
                    )
            except driver.CUDADriverError as error:
                self._clear_last_error()
                raise LaunchError(
                    f"{self.device.name} refused a launch of {grid} blocks of {block} threads with "
                    f"{lds_bytes} bytes of dynamic LDS: {error}; if a kernel has failed, only a "
                    "new process helps"
                ) from error

        return run

    def _enter(self) -> None:
        with self._current():  # a new thread has no context of a device before it sets it
            self._runtime.setDevice(self.index)

    def allocate(self, size_bytes: int) -> tuple[int, Any]:
        """(address, owner) of memory from CuPy's pool, ordered on CuPy's current stream."""
        with self._current():
            memory = self._cupy.cuda.alloc(size_bytes)
        return memory.ptr, memory

    def copy(self, target: int, origin: int, size_bytes: int, stream: int) -> None:
        """Enqueue a device-to-device copy between addresses."""
        self._copy(target, origin, size_bytes, self._runtime.memcpyDeviceToDevice, stream)

    def fill(self, target: int, byte: int, size_bytes: int, stream: int) -> None:
        """Enqueue a memset."""
        with self._current():
            self._runtime.memsetAsync(target, byte, size_bytes, stream)

    def to_host(self, origin: int, size_bytes: int, stream: int) -> np.ndarray:
        """The bytes at a device address as a NumPy uint8 array; synchronises the stream."""
        host = np.empty(size_bytes, np.uint8)
        self._copy(host.ctypes.data, origin, size_bytes, self._runtime.memcpyDeviceToHost, stream)
        self.synchronize(stream)
        return host

    def from_host(self, target: int, data: np.ndarray, stream: int) -> None:
        """Write a contiguous NumPy array's bytes to a device address; synchronises the stream."""
        self._copy(target, data.ctypes.data, data.nbytes, self._runtime.memcpyHostToDevice, stream)
        self.synchronize(stream)

    def synchronize(self, stream: int) -> None:
        """Wait until the stream is idle.

        Raises:
            LaunchError: a kernel failed on the device, on this stream or another.
        """
        with self._current():
            self._runtime.streamSynchronize(stream)

    def record(self, stream: int) -> Any:
        """Enqueue a timing event and return it."""
        with self._current():
            event = self._cupy.cuda.Event()
            event.record(RawStream(stream))
        return event

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Device microseconds between two recorded events; waits for the second."""
        with self._current():
            end.synchronize()
            return float(self._cupy.cuda.get_elapsed_time(start, end)) * 1e3

    def _copy(self, target: int, origin: int, size_bytes: int, kind: int, stream: int) -> None:
        with self._current():
            self._runtime.memcpyAsync(target, origin, size_bytes, kind, stream)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        # stream 0 is the default stream of the current device, so even a memset needs the switch
        with self._cupy.cuda.Device(self.index):
            try:
                yield
            except self._runtime.CUDARuntimeError as error:
                raise LaunchError(
                    f"{self.device.name}: {error}; if a kernel has failed, only a new process helps"
                ) from error

    def _clear_last_error(self) -> None:
        # HIP 7 keeps a failed driver call's error and reports it at the next launch (cupy#9976).
        # CuPy offers no getLastError; its check_status calls it before raising.
        if self._runtime.is_hip:
            with contextlib.suppress(self._runtime.CUDARuntimeError):
                self._runtime.check_status(HIP_ERROR_INVALID_VALUE)

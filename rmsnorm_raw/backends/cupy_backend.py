"""GPU backends: ``rocm`` and ``cuda``, both through CuPy's RawModule.

Which one a machine offers is CuPy's build (``runtime.is_hip``), never a device's capability number:
gfx942 reports 9.x and has been taken for an H100. What the driver says of a device becomes a
DeviceSpec in pure functions, :func:`device_spec` and :func:`kfd_cache_bytes`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rmsnorm_raw.backends import Code, Resources
from rmsnorm_raw.backends.cuda_driver import launch_early
from rmsnorm_raw.backends.prepared import Arguments, OpenLaunch, PreparedLaunch
from rmsnorm_raw.device import INFINITY_CACHE_BYTES, KNOWN, DeviceSpec
from rmsnorm_raw.errors import BackendUnavailable, CompileError, LaunchError
from rmsnorm_raw.source import Source

INSTALL = {
    "rocm": "pip install 'rmsnorm-raw[rocm]' (it needs the ROCm 7.0 SDK, hipcc included)",
    "cuda": "pip install 'rmsnorm-raw[cuda13]' (or cuda12, by the driver's CUDA version)",
}
WAVE = {"rocm": 64, "cuda": 32}
#: 4 SIMDs of 512 registers for each of 64 lanes (AMD's CDNA 3 and CDNA 4 ISA guides); HIP does not
#: report regsPerMultiprocessor
AMD_REGISTER_FILE = 4 * 512 * 64
HIP_ERROR_INVALID_VALUE = 1
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def why_unavailable(name: str) -> str | None:
    """None where "rocm" or "cuda" can run here, else what is missing and how to mend it."""
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed: {INSTALL[name]}"
    try:
        import cupy
    except ImportError as error:
        return f"CuPy does not import ({_first_line(error)}): {INSTALL[name]}"
    runtime = cupy.cuda.runtime
    if runtime.is_hip != (name == "rocm"):
        built_for = "ROCm" if runtime.is_hip else "CUDA"
        return f"the installed CuPy is built for {built_for}: {INSTALL[name]}"
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


def device_spec(
    properties: Mapping[str, Any], backend: str, kfd_nodes: Path = KFD_NODES
) -> DeviceSpec:
    """A DeviceSpec from what the runtime's getDeviceProperties says; no key is taken for granted.

    On HIP sharedMemPerBlockOptin and regsPerMultiprocessor are absent and l2CacheSize is one XCD's
    4 MiB; the cache in front of memory then comes from KFD, with a floor known by architecture.

    Args:
        properties: names, as bytes or str, and numbers by CUDA's field names.
        backend: "rocm" or "cuda".
        kfd_nodes: the kernel driver's topology folder.

    Raises:
        BackendUnavailable: a fact without a substitute is missing, or the wave width is not the one
            that the kernels are compiled for.
    """
    amd = backend == "rocm"
    name = _text(properties.get("name", b"unnamed device"))
    if amd:
        arch = _text(properties.get("gcnArchName", b"")).partition(":")[0]
        if not arch:
            raise BackendUnavailable(f"{name}: the driver does not report gcnArchName")
    else:
        arch = f"sm_{properties.get('major', 0)}{properties.get('minor', 0)}"
    wave = properties.get("warpSize")
    if wave != WAVE[backend]:
        raise BackendUnavailable(
            f"{name} ({arch}) has waves of {wave} lanes and the {backend} kernels are written for "
            f"{WAVE[backend]}: use another device, or backend='cpu'"
        )
    known = KNOWN.get(arch)

    def fact(key: str, substitute: int) -> int:
        value = int(properties.get(key) or substitute)
        if value <= 0:
            raise BackendUnavailable(f"{name} ({arch}): the driver does not report {key}")
        return value

    if amd:
        lds_bytes = fact("sharedMemPerBlock", known.lds_bytes if known else 0)
        register_file = AMD_REGISTER_FILE
    else:
        lds_bytes = fact("sharedMemPerBlockOptin", properties.get("sharedMemPerBlock", 0))
        register_file = fact("regsPerMultiprocessor", properties.get("regsPerBlock", 0))
    cache_bytes, cache_source = _last_level_cache(properties, arch, kfd_nodes if amd else None)
    return DeviceSpec(
        name=name,
        arch=arch,
        dialect="amd" if amd else "cuda",
        wave=wave,
        compute_units=fact("multiProcessorCount", known.compute_units if known else 0),
        lds_bytes=lds_bytes,
        register_file=register_file,
        last_level_cache_bytes=cache_bytes,
        last_level_cache_source=cache_source,
    )


def _last_level_cache(
    properties: Mapping[str, Any], arch: str, kfd_nodes: Path | None
) -> tuple[int, str]:
    candidates = [(int(properties.get("l2CacheSize") or 0), "l2CacheSize of the driver")]
    if kfd_nodes is not None:
        candidates.append((kfd_cache_bytes(arch, kfd_nodes), "level 3 in the KFD topology"))
    if arch.startswith(("gfx94", "gfx95")):
        floor = f"floor known for {arch}: the Infinity Cache"
        candidates.append((INFINITY_CACHE_BYTES, floor))
    return max(candidates, key=lambda candidate: candidate[0])


def kfd_cache_bytes(arch: str, nodes: Path = KFD_NODES) -> int:
    """Bytes of the largest level 3 cache that KFD lists for a GPU of an architecture; 0 for none.

    A node's ``gfx_target_version`` is major * 10000 + minor * 100 + step (gfx950: 90500); CPU nodes
    have 0 there. A cache's ``size`` is in KiB (kfd_topology.c of the Linux kernel).
    """
    target = _gfx_target_version(arch)
    largest = 0
    for node in sorted(nodes.glob("*/properties")):
        if target and _kfd_numbers(node).get("gfx_target_version") == target:
            for cache in node.parent.glob("caches/*/properties"):
                numbers = _kfd_numbers(cache)
                if numbers.get("level") == 3:
                    largest = max(largest, numbers.get("size", 0) * 1024)
    return largest


def _gfx_target_version(arch: str) -> int:
    digits = arch.removeprefix("gfx")
    if not digits[:-2].isdigit():
        return 0
    return int(digits[:-2]) * 10000 + int(digits[-2], 16) * 100 + int(digits[-1], 16)


def _kfd_numbers(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:  # the kernel hides the GPUs that a container was not given
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _first_line(error: Exception) -> str:
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
            self.prepare(OpenLaunch(function, grid, block, args, lds_bytes, (), early))(stream, ())

    def prepare(self, opened: OpenLaunch) -> PreparedLaunch:
        """See :class:`rmsnorm_raw.backends.Backend`; calls go to the driver, past CuPy's launch."""
        function, grid, block, args, lds_bytes, pointers, early = opened
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

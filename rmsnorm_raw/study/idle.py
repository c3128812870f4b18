"""Whether a GPU is idle: memory, activity and processes, as its vendor's library says.

NVML comes as ``nvidia-ml-py``, AMD SMI as ``amdsmi``; neither is required. Where the library is not
there, or does not say, the answer is "unknown" with the reason, never "idle".
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.errors import RmsnormRawError

#: an idle GPU shows 0; a desktop that redraws a clock shows 1 or 2
MOST_ACTIVITY_PCT = 5.0
#: in use by others: room for a context or two that wait for their user. One of them may be ours,
#: for a container may hide which process is this one
MOST_USED_BYTES = 2 << 30
#: NVML averages over up to a second and shows the load of its own start: the median counts
LOOKS, LOOK_EVERY_S = 5, 0.2


class Unknown(RmsnormRawError, RuntimeError):
    """Nobody says whether the GPU is idle; the message says why and what to install."""


class Busy(RmsnormRawError, RuntimeError):
    """The GPU is not idle; the message says what holds it."""


@dataclass(frozen=True, slots=True)
class Process:
    """One that has a context on the GPU.

    Attributes:
        pid: as the driver sees it, which in a container may not be as ``ps`` does.
        name: of its program.
        used_bytes: of device memory; None where the driver does not say.
    """

    pid: int
    name: str
    used_bytes: int | None

    def __str__(self) -> str:
        used = "memory unknown" if self.used_bytes is None else _gib(self.used_bytes)
        return f"{self.pid} {self.name} ({used})"


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What a GPU is doing besides us.

    Attributes:
        library: who says so.
        activity_pct: of the time, that something ran.
        used_bytes: of device memory, less what this process has.
        processes: other processes.
    """

    library: str
    activity_pct: float
    used_bytes: int
    processes: tuple[Process, ...]

    @property
    def busy(self) -> bool:
        """Whether it is over a limit."""
        return self.activity_pct > MOST_ACTIVITY_PCT or self.used_bytes > MOST_USED_BYTES

    def __str__(self) -> str:
        return (
            f"{self.activity_pct:g} % active (limit {MOST_ACTIVITY_PCT:g} %), "
            f"{_gib(self.used_bytes)} in use by others (limit {_gib(MOST_USED_BYTES)}); "
            f"processes: {', '.join(map(str, self.processes)) or 'none that can be seen'}"
        )


def check(device: DeviceSpec, *, allow_busy: bool = False) -> dict[str, object]:
    """Refuse a busy GPU; what was found, for ``environment.json``.

    ``state`` is "idle", "busy" (allowed), "unknown" (and ``why``) or "simulated".

    Raises:
        Busy: it is not idle, and that is not allowed.
    """
    if device.simulated:
        return {"state": "simulated"}
    try:
        found = look(device)
    except Unknown as unknown:
        return {"state": "unknown", "why": str(unknown), "allow_busy": allow_busy}
    if found.busy and not allow_busy:
        raise Busy(
            f"{device.name} at {device.pci_address} is not idle: {found}. Wait for them or end "
            "them, or give --allow-busy, which will be recorded"
        )
    state = "busy" if found.busy else "idle"
    return {"state": state, "allow_busy": allow_busy, **asdict(found)}


def look(device: DeviceSpec) -> Occupancy:
    """What a GPU is doing; takes a second.

    Raises:
        Unknown: the library is missing, or does not say.
    """
    if not device.pci_address:
        raise Unknown(f"the driver does not say where {device.name} is on the PCI bus")
    ask = _ask_amd if device.dialect == "amd" else _ask_nvidia
    return ask(device.pci_address)


def _ask_nvidia(address: str) -> Occupancy:
    try:
        import pynvml
    except ImportError as error:
        raise Unknown("NVML's Python package is missing: pip install nvidia-ml-py") from error

    def name_of(pid: int) -> str:
        try:
            name = pynvml.nvmlSystemGetProcessName(pid)
        except pynvml.NVMLError:  # it ended meanwhile, or another container has it
            return "unknown"
        return str(name.decode() if isinstance(name, bytes) else name)

    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(address)
            activity_pct = _several(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            # the second version leaves out what the driver keeps for itself
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            processes = [Process(it.pid, name_of(it.pid), it.usedGpuMemory) for it in running]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise Unknown(f"NVML does not say of {address}: {error}") from error
    return _without_us("NVML", activity_pct, int(memory.used), processes)


def _ask_amd(address: str) -> Occupancy:
    try:
        import amdsmi
    except (ImportError, LookupError, OSError) as error:  # the package, or its library: a KeyError
        raise Unknown(
            f"AMD SMI's Python package does not load ({error}): pip install amdsmi, "
            "or the one in /opt/rocm/share/amd_smi"
        ) from error
    try:
        amdsmi.amdsmi_init()
        try:
            handle = amdsmi.amdsmi_get_processor_handle_from_bdf(address)
            activity_pct = _several(
                lambda: float(amdsmi.amdsmi_get_gpu_activity(handle)["gfx_activity"])
            )
            used_mib = int(amdsmi.amdsmi_get_gpu_vram_usage(handle)["vram_used"])
            processes = [
                Process(int(it["pid"]), str(it["name"]), int(it["memory_usage"]["vram_mem"]))
                for it in amdsmi.amdsmi_get_gpu_process_list(handle)
            ]
        finally:
            amdsmi.amdsmi_shut_down()
    except (amdsmi.AmdSmiException, LookupError, TypeError, ValueError) as error:  # "N/A" too
        raise Unknown(f"AMD SMI does not say of {address}: {error!r}") from error
    return _without_us("AMD SMI", activity_pct, used_mib << 20, processes)


def _several(activity: Callable[[], Any]) -> float:
    looks = []
    for _ in range(LOOKS):
        looks.append(float(activity()))
        time.sleep(LOOK_EVERY_S)
    return median(looks)


def _without_us(
    library: str, activity_pct: float, used_bytes: int, processes: Iterable[Process]
) -> Occupancy:
    others = []
    for process in processes:
        if process.pid == os.getpid():
            used_bytes -= process.used_bytes or 0
        else:
            others.append(process)
    return Occupancy(library, activity_pct, max(0, used_bytes), tuple(others))


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"

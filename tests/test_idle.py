"""Is a GPU idle: by stand-ins for the vendors' libraries, as their documents describe them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rmsnorm_raw.device import KNOWN, SIMULATED, DeviceSpec
from rmsnorm_raw.study import idle
from rmsnorm_raw.study.idle import Busy, Unknown, check, look

NVIDIA = replace(KNOWN["sm_90"], pci_address="0000:17:00.0")
AMD = replace(KNOWN["gfx950"], pci_address="0000:c1:00.0")
GIB = 1 << 30


class Nvml(ModuleType):
    """nvidia-ml-py on a machine with one GPU."""

    nvmlMemory_v2 = 2

    class NVMLError(Exception):
        pass

    def __init__(
        self, activity: Sequence[float], used_bytes: int, processes: dict[int, int | None]
    ) -> None:
        super().__init__("pynvml")
        self.activity, self.used_bytes, self.processes = list(activity), used_bytes, processes
        self.open = 0
        self.asked: list[str] = []

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> str:
        self.asked.append(address)
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if not self.activity:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.activity.pop(0))

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int) -> Any:
        assert version == self.nvmlMemory_v2
        return SimpleNamespace(used=self.used_bytes)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=p, usedGpuMemory=used) for p, used in self.processes.items()]

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        if pid == 13:
            raise self.NVMLError("Not Found")
        return f"program{pid}"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle.time, "sleep", lambda seconds: None)


def nvml(
    monkeypatch: pytest.MonkeyPatch,
    activity: Sequence[float] = (0,) * 5,
    used_bytes: int = 0,
    processes: dict[int, int | None] | None = None,
) -> Nvml:
    library = Nvml(activity, used_bytes, processes or {})
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_an_idle_gpu_is_asked_after_by_its_place_on_the_bus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = nvml(monkeypatch)
    found = check(NVIDIA)
    assert (found["state"], found["library"], found["activity_pct"]) == ("idle", "NVML", 0)
    assert library.asked == ["0000:17:00.0"]
    assert library.open == 0


def test_memory_of_others_makes_it_busy_and_they_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml(monkeypatch, used_bytes=12 * GIB, processes={12: 11 * GIB, 13: None})
    with pytest.raises(Busy) as refused:
        check(NVIDIA)
    assert "NVIDIA H200 at 0000:17:00.0 is not idle: 0 % active" in str(refused.value)
    assert "12.0 GiB in use by others (limit 2.0 GiB)" in str(refused.value)
    assert "12 program12 (11.0 GiB), 13 unknown (memory unknown)" in str(refused.value)
    assert "--allow-busy" in str(refused.value)


def test_what_this_process_has_is_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, used_bytes=9 * GIB, processes={os.getpid(): 9 * GIB - 5})
    found = check(NVIDIA)
    assert (found["state"], found["used_bytes"], found["processes"]) == ("idle", 5, ())


@pytest.mark.parametrize(
    ("activity", "state"), [((100, 0, 0, 0, 0), "idle"), ((100, 0, 90, 80, 0), "busy")]
)
def test_activity_is_the_median_of_several_looks(
    activity: tuple[float, ...], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(monkeypatch, activity)
    assert check(NVIDIA, allow_busy=True)["state"] == state


def test_what_was_allowed_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, used_bytes=3 * GIB, processes={12: 3 * GIB})
    found = check(NVIDIA, allow_busy=True)
    assert (found["state"], found["allow_busy"]) == ("busy", True)
    assert found["processes"] == ({"pid": 12, "name": "program12", "used_bytes": 3 * GIB},)


def test_a_missing_library_is_said_and_not_taken_for_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert check(NVIDIA)["state"] == check(AMD)["state"] == "unknown"
    assert "pip install nvidia-ml-py" in str(check(NVIDIA)["why"])
    assert "pip install amdsmi" in str(check(AMD)["why"])


def test_a_library_that_does_not_say_is_not_taken_for_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    library = nvml(monkeypatch, activity=())
    with pytest.raises(Unknown, match=r"NVML does not say of 0000:17:00\.0: Not Supported"):
        look(NVIDIA)
    assert library.open == 0
    with pytest.raises(Unknown, match="where NVIDIA H200 is on the PCI bus"):
        look(KNOWN["sm_90"])


def test_the_simulator_is_nobodys_gpu() -> None:
    assert check(SIMULATED[64]) == {"state": "simulated"}


# ---- AMD -----------------------------------------------------------------------------------------


def amdsmi(
    monkeypatch: pytest.MonkeyPatch, activity: object, used_mib: int, processes: list[Any]
) -> list[str]:
    library: Any = ModuleType("amdsmi")
    asked: list[str] = []
    library.AmdSmiException = type("AmdSmiException", (Exception,), {})
    library.amdsmi_init = lambda: asked.append("init")
    library.amdsmi_shut_down = lambda: asked.append("shut down")
    library.amdsmi_get_processor_handle_from_bdf = asked.append
    library.amdsmi_get_gpu_activity = lambda handle: {"gfx_activity": activity, "umc_activity": 0}
    library.amdsmi_get_gpu_vram_usage = lambda handle: {"vram_total": 9, "vram_used": used_mib}
    library.amdsmi_get_gpu_process_list = lambda handle: processes
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    return asked


def amd_process(pid: int, vram_bytes: int) -> dict[str, Any]:
    memory = {"gtt_mem": 0, "cpu_mem": 0, "vram_mem": vram_bytes}
    return {"pid": pid, "name": f"program{pid}", "mem": 0, "memory_usage": memory}


def test_an_amd_gpu_is_asked_after_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [amd_process(12, 3 * GIB), amd_process(os.getpid(), GIB)]
    asked = amdsmi(monkeypatch, 1, 4096, processes)
    found = look(AMD)
    assert asked == ["init", "0000:c1:00.0", "shut down"]
    assert (found.library, found.used_bytes, found.busy) == ("AMD SMI", 3 * GIB, True)
    assert [str(each) for each in found.processes] == ["12 program12 (3.0 GiB)"]
    amdsmi(monkeypatch, 0, 100, [])
    assert check(AMD)["state"] == "idle"


@pytest.mark.parametrize("device", [AMD])
def test_a_figure_that_amd_leaves_out_is_not_taken_for_idle(
    device: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = amdsmi(monkeypatch, "N/A", 100, [])
    assert check(device)["state"] == "unknown"
    assert asked[-1] == "shut down"


def test_amds_package_without_its_library_is_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "amdsmi.py").write_text("{}['libamd_smi.so']")  # as amdsmi 7.0.2 does it
    assert check(AMD)["state"] == "unknown"
    assert "does not load ('libamd_smi.so')" in str(check(AMD)["why"])

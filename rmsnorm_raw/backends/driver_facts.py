"""What a GPU's driver says of it, as a DeviceSpec: pure functions of what was read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rmsnorm_raw.device import INFINITY_CACHE_BYTES, KNOWN, DeviceSpec
from rmsnorm_raw.errors import BackendUnavailable

WAVE = {"rocm": 64, "cuda": 32}
#: 4 SIMDs of 512 registers for each of 64 lanes (AMD's CDNA 3 and CDNA 4 ISA guides); HIP does not
#: report regsPerMultiprocessor
AMD_REGISTER_FILE = 4 * 512 * 64
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


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
        memory_bytes=int(properties.get("totalGlobalMem") or 0),
        pci_address=_pci_address(properties),
    )


def _pci_address(properties: Mapping[str, Any]) -> str:
    names = ("pciDomainID", "pciBusID", "pciDeviceID")
    if not set(names) <= properties.keys():
        return ""
    domain, bus, device = (int(properties[name]) for name in names)
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


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

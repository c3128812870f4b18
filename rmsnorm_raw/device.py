"""DeviceSpec: the facts of a device that decide a config, and the specs known by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rmsnorm_raw.errors import InvalidInput

MIB = 1 << 20
#: the Infinity Cache of gfx94x and gfx95x; every API reports the 4 MiB L2 of one XCD instead, and
#: results of working sets up to 256 MiB then come out about 1.3x too fast
INFINITY_CACHE_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What the enumerator, the ladder and the timer need to know of a device.

    Attributes:
        name: as the driver says it.
        arch: "gfx950", "gfx942", "sm_90", ... (gcnArchName without its feature flags); the
            simulator's devices carry the arch whose branch of the kernels they compile.
        dialect: "amd" or "cuda", the branch of the kernel text.
        wave: lanes of a wave (64) or warp (32).
        compute_units: CUs or multiprocessors.
        lds_bytes: the most LDS (shared memory) one block may have.
        register_file: 32-bit registers of one CU or multiprocessor, all lanes together.
        last_level_cache_bytes: the cache in front of device memory.
        last_level_cache_source: where that figure came from.
        memory_bytes: of device memory, in use or not; 0 where it is not known.
        pci_address: "0000:17:00.0", by which a vendor's library finds it; "" where it is not known.
        simulated: True for the CPU simulator, whose times mean nothing.
    """

    name: str
    arch: str
    dialect: Literal["amd", "cuda"]
    wave: int
    compute_units: int
    lds_bytes: int
    register_file: int
    last_level_cache_bytes: int
    last_level_cache_source: str = "known by name"
    memory_bytes: int = 0
    pci_address: str = ""
    simulated: bool = False

    def registers_per_lane(self, block: int, resident_blocks: int = 1) -> int:
        """The most 32-bit registers a lane may have so that ``resident_blocks`` blocks fit.

        CUDA: the file is shared by the lanes, at most 255 a lane. AMD: 512 a lane on each of four
        SIMDs, of which 256 are architectural (beyond those the compiler moves values through
        accumulation registers).
        """
        lanes = block * resident_blocks
        if self.dialect == "amd":
            lanes = max(lanes, 4 * self.wave)  # a wave sits on one SIMD and owns its file alone
            return min(256, self.register_file // lanes // 8 * 8)
        return min(248, self.register_file // lanes // 8 * 8)  # in steps of 8


KNOWN = {
    # CUs, LDS and cache: AMD's GPU specification tables for ROCm 7
    "gfx950": DeviceSpec(
        "AMD Instinct MI355X", "gfx950", "amd", 64, 256, 160 * 1024, 131072, INFINITY_CACHE_BYTES
    ),
    "gfx942": DeviceSpec(
        "AMD Instinct MI300X", "gfx942", "amd", 64, 304, 64 * 1024, 131072, INFINITY_CACHE_BYTES
    ),
    # multiprocessors and L2 read off an H200, 2026-10; 227 KiB a block by the CUDA guide
    "sm_90": DeviceSpec("NVIDIA H200", "sm_90", "cuda", 32, 132, 227 * 1024, 65536, 60 * MIB),
}

#: The simulator stands in for gfx950 at wave 64 and for sm_90 at wave 32; few compute units, so
#: that persistent loops go round more than once at test sizes.
SIMULATED = {
    64: replace(KNOWN["gfx950"], name="CPU simulator, wave 64", compute_units=4, simulated=True),
    32: replace(KNOWN["sm_90"], name="CPU simulator, wave 32", compute_units=4, simulated=True),
}


def known_device(name: str) -> DeviceSpec:
    """The spec of an architecture known by name.

    Raises:
        InvalidInput: the name is not in :data:`KNOWN`.
    """
    if name not in KNOWN:
        raise InvalidInput(f"device {name!r} is not known by name: use one of {', '.join(KNOWN)}")
    return KNOWN[name]

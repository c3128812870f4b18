"""What a gfx9 kernel takes and shows: registers, LDS, spills, resident waves, its instructions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rmsnorm_raw.backends import Resources
from rmsnorm_raw.backends.flow import find_row_loop
from rmsnorm_raw.backends.isa import (
    Instruction,
    Wait,
    bytes_before_first_wait,
    waits,
)
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.errors import InvalidInput

#: of a CU (AMD's CDNA 3 and CDNA 4 ISA guides; rocminfo)
SIMDS = 4
MAX_WAVES_PER_SIMD = 8
#: 32-bit registers a lane on a SIMD, VGPRs and AGPRs together, given out in eights (LLVM,
#: AMDGPUBaseInfo: getTotalNumVGPRs and getVGPRAllocGranule from gfx90a on)
VGPRS_PER_SIMD = 512
VGPR_GRANULE = 8
#: above this a SIMD holds seven waves (LLVM, GCNSubtarget::getOccupancyWithNumSGPRs: 800 in all)
SGPRS_OF_EIGHT_WAVES = 100
#: LDS is given out in these steps (llvm-project#167614 for gfx950)
LDS_GRANULE_BYTES = {"gfx950": 1280, "gfx942": 512}
#: of a CU's loads, what its lanes should have asked for when the first of them has to wait: at 1 us
#: of latency 6.7 TB/s (the best write probe published for MI355X) over 256 CUs take 26 KiB, and
#: nearly twice as much leaves room for latency under load
CU_BYTES_WANTED = 48 * 1024


class Pointer(NamedTuple):
    """An argument that is an address: its number among the arguments, and its offset in bytes."""

    number: int
    offset: int


class Occupancy(NamedTuple):
    """How full a CU gets.

    Attributes:
        waves_per_simd: resident waves over the four SIMDs of a CU; a fraction where the blocks do
            not spread evenly.
        limit: what stops the next block: "hardware" (eight waves a SIMD), "registers", "LDS",
            "block size" (there is room for waves, and not for all those of a block), or "grid"
            (there is no next block).
    """

    waves_per_simd: float
    limit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchReport(Resources):
    """What a launch of a kernel takes, and what it shows of the memory path.

    ``registers`` are vector registers of a lane, AGPRs included; ``spill_bytes`` is scratch.

    Attributes:
        agpr: accumulation registers among the vector registers.
        sgpr: scalar registers of a wave.
        vgpr_spills: vector registers that the compiler could not keep.
        sgpr_spills: scalar registers that it could not keep.
        dynamic_lds_bytes: LDS of a block that is given at the launch.
        waves_per_simd: resident waves, of the fullest CU.
        limit: what limits them; see :class:`Occupancy`.
        bytes_before_first_wait: of a lane; see :attr:`KernelReport.bytes_before_first_wait`.
        cu_bytes_before_first_wait: of all its resident lanes.
        mix: instructions by kind; see :attr:`KernelReport.mix`.
        waits: see :meth:`KernelReport.row_waits`.
    """

    agpr: int
    sgpr: int
    vgpr_spills: int
    sgpr_spills: int
    dynamic_lds_bytes: int
    waves_per_simd: float
    limit: str
    bytes_before_first_wait: int
    cu_bytes_before_first_wait: int
    mix: dict[str, int] = field(repr=False)
    waits: tuple[Wait, ...] = field(repr=False)

    @property
    def in_flight(self) -> str:
        """How ``cu_bytes_before_first_wait`` comes about, and what is wanted."""
        return (
            f"{self.waves_per_simd:g} waves per SIMD x 256 lanes x {self.bytes_before_first_wait} "
            f"bytes a lane = {self.cu_bytes_before_first_wait / 1024:g} KiB a CU before the first "
            f"wait that needs them ({CU_BYTES_WANTED // 1024} KiB keep memory busy)"
        )


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What the compiler says of one kernel, and what its machine code shows.

    Attributes:
        name: the entry point.
        arch: "gfx950" or "gfx942".
        vgpr: vector registers of a lane, AGPRs included.
        agpr: accumulation registers among them.
        sgpr: scalar registers of a wave.
        vgpr_spills: vector registers that the compiler could not keep.
        sgpr_spills: scalar registers that it could not keep.
        scratch_bytes: scratch memory of a lane; any at all is traffic beside the rows'.
        lds_bytes: static LDS of a block; what is given at the launch comes on top.
        max_flat_workgroup_size: threads of the largest block that may be launched.
        wave: lanes of a wave.
        kernarg_bytes: size of the argument segment, hidden arguments included.
        pointers: the arguments that are addresses.
        asm: the instructions in order.
    """

    name: str
    arch: str
    vgpr: int
    agpr: int
    sgpr: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    max_flat_workgroup_size: int
    wave: int
    kernarg_bytes: int
    pointers: tuple[Pointer, ...]
    asm: tuple[Instruction, ...] = field(repr=False)

    @classmethod
    def read(
        cls, arch: str, metadata: Mapping[str, Any], asm: Iterable[Sequence[Any]]
    ) -> KernelReport:
        """A report from one entry of ``amdhsa.kernels`` and (offset, text) pairs.

        The keys are those of code object V5, in LLVM's AMDGPU usage guide.
        """
        return cls(
            name=metadata[".name"],
            arch=arch,
            vgpr=int(metadata[".vgpr_count"]),
            agpr=int(metadata[".agpr_count"]),
            sgpr=int(metadata[".sgpr_count"]),
            vgpr_spills=int(metadata[".vgpr_spill_count"]),
            sgpr_spills=int(metadata[".sgpr_spill_count"]),
            scratch_bytes=int(metadata[".private_segment_fixed_size"]),
            lds_bytes=int(metadata[".group_segment_fixed_size"]),
            max_flat_workgroup_size=int(metadata[".max_flat_workgroup_size"]),
            wave=int(metadata[".wavefront_size"]),
            kernarg_bytes=int(metadata[".kernarg_segment_size"]),
            pointers=tuple(
                Pointer(number, int(each[".offset"]))
                for number, each in enumerate(metadata.get(".args", ()))
                if each[".value_kind"] == "global_buffer"
            ),
            asm=tuple(Instruction(*pair) for pair in asm),
        )

    @property
    def mix(self) -> Counter[str]:
        """Instructions by group.

        Vector memory by space, kind, bytes a lane and ``nt`` ("global load 16 B nt"); LDS and
        conversions by mnemonic; "dpp", "permlane", "read lane", "barrier", "wait"; "vector",
        "scalar load" and "scalar" for the rest.
        """
        return Counter(instruction.group for instruction in self.asm)

    @property
    def bytes_before_first_wait(self) -> int:
        """Bytes of loads that a lane has in flight when a wait first needs one of them.

        In the row loop, once it has settled; in a kernel without one, from first to last
        instruction. See :func:`.isa.bytes_before_first_wait`.
        """
        body = self.row_loop()
        return bytes_before_first_wait(body or self.asm, loop=bool(body))

    def row_loop(self) -> tuple[Instruction, ...]:
        """The instructions of :func:`.flow.find_row_loop`; () in a kernel without a row loop."""
        return find_row_loop(self.asm)

    def row_waits(self) -> tuple[Wait, ...]:
        """The waits by ``vmcnt`` of the settled row loop, or of a kernel without one."""
        body = self.row_loop()
        return waits(body or self.asm, loop=bool(body))

    @property
    def listing(self) -> str:
        """The machine code as text, a line an instruction; those of the row loop begin with "|"."""
        body = {instruction.offset for instruction in self.row_loop()}
        return "\n".join(
            f"{'|' if one.offset in body else ' '} {one.offset:5x}  {one.text}" for one in self.asm
        )

    def launched(self, grid: int, block: int, dynamic_lds_bytes: int = 0) -> LaunchReport:
        """The report of one launch.

        Args:
            grid: blocks.
            block: threads of a block.
            dynamic_lds_bytes: LDS given at the launch.

        Raises:
            InvalidInput: see :meth:`occupancy`.
        """
        waves, limit = self.occupancy(block, dynamic_lds_bytes, grid)
        lane_bytes = self.bytes_before_first_wait
        return LaunchReport(
            registers=self.vgpr,
            lds_bytes=self.lds_bytes,
            spill_bytes=self.scratch_bytes,
            agpr=self.agpr,
            sgpr=self.sgpr,
            vgpr_spills=self.vgpr_spills,
            sgpr_spills=self.sgpr_spills,
            dynamic_lds_bytes=dynamic_lds_bytes,
            waves_per_simd=waves,
            limit=limit,
            bytes_before_first_wait=lane_bytes,
            cu_bytes_before_first_wait=int(waves * SIMDS * self.wave * lane_bytes),
            mix=dict(sorted(self.mix.items())),
            waits=self.row_waits(),
        )

    def occupancy(
        self, block: int, dynamic_lds_bytes: int = 0, grid: int | None = None
    ) -> Occupancy:
        """Resident waves for a launch, by registers, LDS, block size and grid.

        Args:
            block: threads of a block.
            dynamic_lds_bytes: LDS given at the launch.
            grid: blocks; None for as many as fit. The fullest CU counts.

        Raises:
            InvalidInput: the launch would fail: too many threads, or too much LDS.
        """
        device, lds_bytes = KNOWN[self.arch], self.lds_bytes + dynamic_lds_bytes
        if not 0 < block <= self.max_flat_workgroup_size or lds_bytes > device.lds_bytes:
            raise InvalidInput(
                f"{self.name} cannot be launched with {block} threads and {lds_bytes} bytes of "
                f"LDS: it is built for at most {self.max_flat_workgroup_size} threads, and "
                f"{self.arch} has {device.lds_bytes} bytes"
            )
        waves_of_block = -(-block // self.wave)
        by_registers = self.waves_by_registers
        slots = SIMDS * by_registers
        blocks, limit = slots // waves_of_block, "hardware"
        if slots % waves_of_block:
            limit = "block size"
        elif by_registers < MAX_WAVES_PER_SIMD:
            limit = "registers"
        granule = LDS_GRANULE_BYTES[self.arch]
        taken = -(-lds_bytes // granule) * granule
        if taken and device.lds_bytes // taken < blocks:
            blocks, limit = device.lds_bytes // taken, "LDS"
        if grid is not None and -(-grid // device.compute_units) < blocks:
            blocks, limit = -(-grid // device.compute_units), "grid"
        return Occupancy(blocks * waves_of_block / SIMDS, limit)

    @property
    def waves_by_registers(self) -> int:
        """Waves that a SIMD's registers have room for."""
        granules = max(1, -(-self.vgpr // VGPR_GRANULE))
        by_vgpr = VGPRS_PER_SIMD // (granules * VGPR_GRANULE)
        by_sgpr = MAX_WAVES_PER_SIMD - (self.sgpr > SGPRS_OF_EIGHT_WAVES)
        return min(by_vgpr, by_sgpr)

"""What a gfx9 kernel takes and shows: registers, LDS, spills, resident waves, its instructions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rmsnorm_raw.backends.isa import Instruction, bytes_before_first_wait, find_row_loop
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


class Occupancy(NamedTuple):
    """How full a CU gets.

    Attributes:
        waves_per_simd: resident waves over the four SIMDs of a CU; a fraction where the blocks do
            not spread evenly.
        limit: what stops the next block: "hardware" (eight waves a SIMD), "registers", "LDS", or
            "block size" (there is room for waves, and not for all those of a block).
    """

    waves_per_simd: float
    limit: str


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
        """The instructions of :func:`.isa.find_row_loop`; () in a kernel without a row loop."""
        return find_row_loop(self.asm)

    def row_waits(self) -> tuple[int, ...]:
        """The N of every ``vmcnt(N)`` in the row loop, or in the kernel where there is none."""
        waits = (instruction.vmcnt for instruction in self.row_loop() or self.asm)
        return tuple(count for count in waits if count is not None)

    def occupancy(self, block: int, dynamic_lds_bytes: int = 0) -> Occupancy:
        """Resident waves for a launch, by registers, LDS and block size.

        Args:
            block: threads of a block.
            dynamic_lds_bytes: LDS given at the launch.

        Raises:
            InvalidInput: the launch would fail: too many threads, or too much LDS.
        """
        lds_bytes, file_bytes = self.lds_bytes + dynamic_lds_bytes, KNOWN[self.arch].lds_bytes
        if not 0 < block <= self.max_flat_workgroup_size or lds_bytes > file_bytes:
            raise InvalidInput(
                f"{self.name} cannot be launched with {block} threads and {lds_bytes} bytes of "
                f"LDS: it is built for at most {self.max_flat_workgroup_size} threads, and "
                f"{self.arch} has {file_bytes} bytes"
            )
        waves_of_block = -(-block // self.wave)
        by_registers = self._waves_by_registers()
        slots = SIMDS * by_registers
        blocks, limit = slots // waves_of_block, "hardware"
        if slots % waves_of_block:
            limit = "block size"
        elif by_registers < MAX_WAVES_PER_SIMD:
            limit = "registers"
        granule = LDS_GRANULE_BYTES[self.arch]
        taken = -(-lds_bytes // granule) * granule
        if taken and file_bytes // taken < blocks:
            blocks, limit = file_bytes // taken, "LDS"
        return Occupancy(blocks * waves_of_block / SIMDS, limit)

    def _waves_by_registers(self) -> int:
        granules = max(1, -(-self.vgpr // VGPR_GRANULE))
        by_vgpr = VGPRS_PER_SIMD // (granules * VGPR_GRANULE)
        by_sgpr = MAX_WAVES_PER_SIMD - (self.sgpr > SGPRS_OF_EIGHT_WAVES)
        return min(by_vgpr, by_sgpr)

"""Faults of asynchronous copies: each is caught, and where it can be said, with its line."""

from __future__ import annotations

import re

import numpy as np
import pytest
from simulated import AMD_BUFFER, AMD_COPY, GFX942, coded, run, small, words

from rmsnorm_raw.backends.cpu import CpuBackend
from rmsnorm_raw.errors import CompileError, SimulatorError

RSRC = AMD_BUFFER.format(bytes=256)
LANE = "threadIdx.x * 4"
BARRIER = "unsigned long long* barrier = (unsigned long long*)lds;"
INIT = BARRIER + "if (threadIdx.x == 0) rr_sim_barrier_init(barrier, 1); __syncthreads();"
FIRST = "if (threadIdx.x == 0)"
#: wave, what comes before, the line to be named, and what is said
FAULTS = {
    "in flight": (64, RSRC, f"{AMD_COPY}(buffer, lds, 4, {LANE}, 0, 0, 0);",
                  "copies in flight when the block ends: 64"),
    "in flight, in no group": (32, "", f"rr_sim_copy_async(lds + {LANE}, in, 4);",
                               "copies in flight when the block ends: 64"),
    "in flight, in bulk": (
        32, INIT + FIRST + "rr_sim_barrier_expect(barrier, 16);",
        f"{FIRST} rr_sim_copy_bulk(lds + 16, in, 16, barrier);",
        "copies in flight when the block ends: 1",
    ),
    "65 thousand in flight": (
        64, RSRC + "for (int i = 0; i < 1025; ++i)",
        f"{AMD_COPY}(buffer, lds, 4, {LANE}, 0, 0, 0);",
        "more than 65536 copies in flight",
    ),
    "a destination a lane": (64, RSRC, f"{AMD_COPY}(buffer, lds + {LANE}, 4, {LANE}, 0, 0, 0);",
                             "lanes of a wave with different LDS addresses"),
    "a buffer a lane": (
        64, RSRC, f"buffer.base += {LANE}; {AMD_COPY}(buffer, lds, 4, 0, 0, 0, 0);",
        "lanes of a wave with different buffers",
    ),
    "a scalar offset a lane": (64, RSRC, f"{AMD_COPY}(buffer, lds, 4, 0, {LANE}, 0, 0);",
                               "lanes of a wave with different buffers or scalar offsets"),
    "a count a lane": (64, "", "rr_sim_wait_vmcnt(threadIdx.x);",
                       "lanes of a wave with different counts"),
    "a count of 7 bits": (64, "", "rr_sim_wait_vmcnt(64);", "vmcnt(64): the counter has 6 bits"),
    "part of a wave copies": (
        64, RSRC, f"if (threadIdx.x < 40) {AMD_COPY}(buffer, lds, 4, {LANE}, 0, 0, 0);",
        "divergent wave operation: 40 of 64 lanes of wave 0 arrived, lane 40 has returned",
    ),
    "part of a wave waits": (
        64, "", "if (threadIdx.x < 40) rr_sim_wait_vmcnt(0);",
        "divergent wave operation: 40 of 64 lanes of wave 0 arrived, lane 40 has returned",
    ),
    "a buffer with a stride": (
        64, "", "__builtin_amdgcn_make_buffer_rsrc((void*)in, 4, 256, 0x00020000);",
        "buffer of stride 4 and flags 0x20000: a raw buffer has 0 and 0x20000",
    ),
    "a buffer of another format": (
        64, "", "__builtin_amdgcn_make_buffer_rsrc((void*)in, 0, 256, 0);",
        "buffer of stride 0 and flags 0: a raw buffer has 0 and 0x20000",
    ),
    "over the end of a buffer": (
        64, AMD_BUFFER.format(bytes=40), f"{AMD_COPY}(buffer, lds, 16, {LANE} * 4, 0, 0, 0);",
        "copy over the end of its buffer: from byte 32 of 40",
    ),
    "past the end of LDS": (64, RSRC, f"{AMD_COPY}(buffer, lds + 4096 - 128, 4, {LANE}, 0, 0, 0);",
                            "4 bytes at byte 4096 of LDS, which has 4096"),
    "before LDS": (64, RSRC, f"{AMD_COPY}(buffer, lds - 16, 4, {LANE}, 0, 0, 0);",
                   "4 bytes at byte -16 of LDS, which has 4096"),
    "a misaligned destination": (64, RSRC, f"{AMD_COPY}(buffer, lds + 8, 16, {LANE} * 0, 0, 0, 0);",
                                 "misaligned access of 16 bytes: 8 past a multiple of them"),
    "a misaligned source": (64, RSRC, f"{AMD_COPY}(buffer, lds, 4, 2, 0, 0, 0);",
                            "misaligned access of 4 bytes: 2 past a multiple of them"),
    "cp.async to a misaligned address": (
        32, "", "rr_sim_copy_async(lds + 8, in, 16);",
        "misaligned access of 16 bytes: 8 past a multiple of them",
    ),
    "cp.async from a misaligned address": (
        32, "", "rr_sim_copy_async(lds, in + 1, 8);",
        "misaligned access of 8 bytes: 4 past a multiple of them",
    ),
    "cp.async past LDS": (32, "", "rr_sim_copy_async(lds + 4096, in, 4);",
                          "4 bytes at byte 4096 of LDS, which has 4096"),
    "a bulk copy of 24 bytes": (32, INIT, "rr_sim_copy_bulk(lds + 16, in, 24, barrier);",
                                "bulk copy of 24 bytes: a multiple of 16"),
    "a bulk copy of no bytes": (32, INIT, "rr_sim_copy_bulk(lds + 16, in, 0, barrier);",
                                "bulk copy of 0 bytes: a multiple of 16"),
    "a bulk copy to a misaligned address": (
        32, INIT, "rr_sim_copy_bulk(lds + 24, in, 32, barrier);",
        "misaligned access of 16 bytes: 8 past a multiple of them",
    ),
    "a bulk copy from a misaligned address": (
        32, INIT, "rr_sim_copy_bulk(lds + 16, in + 1, 32, barrier);",
        "misaligned access of 16 bytes: 4 past a multiple of them",
    ),
    "an arrival before the init": (32, BARRIER, "rr_sim_barrier_expect(barrier, 16);",
                                   "mbarrier at byte 0 of LDS used before its init"),
    "a wait before the init": (32, BARRIER, "rr_sim_barrier_wait(barrier, 0);",
                               "mbarrier at byte 0 of LDS used before its init"),
    "a copy before the init": (32, BARRIER, "rr_sim_copy_bulk(lds + 16, in, 16, barrier);",
                               "mbarrier at byte 0 of LDS used before its init"),
    "an mbarrier of nobody": (32, BARRIER, "rr_sim_barrier_init(barrier, 0);",
                              "mbarrier of 0 arrivals: 1 to 1048575"),
    "an mbarrier past LDS": (32, BARRIER, "rr_sim_barrier_init(barrier + 512, 1);",
                             "8 bytes at byte 4096 of LDS, which has 4096"),
    "a misaligned mbarrier": (
        32, "", "rr_sim_barrier_init((unsigned long long*)(lds + 4), 1);",
        "misaligned access of 8 bytes: 4 past a multiple of them",
    ),
    "an arrival too many": (32, INIT, "rr_sim_barrier_expect(barrier, 16);",
                            "mbarrier: more than 1 arrivals in a phase"),
    "too many bytes": (32, INIT, "rr_sim_barrier_expect(barrier, 1 << 20);",
                       "mbarrier: more than 1048575 bytes expected"),
    "an mbarrier a lane": (32, INIT, "rr_sim_barrier_wait(barrier, threadIdx.x % 2);",
                           "lanes of a wave with different mbarriers or parities"),
    "nobody arrives": (
        32, INIT, "rr_sim_barrier_wait(barrier, 0);",
        "deadlock: no wave can go on (missing at this mbarrier: arrivals 1, bytes 0)",
    ),
    "nobody copies": (
        32, INIT + FIRST + "rr_sim_barrier_expect(barrier, 32);",
        "rr_sim_barrier_wait(barrier, 0);",
        "deadlock: no wave can go on (missing at this mbarrier: arrivals 0, bytes 32)",
    ),
    "who would arrive is at a barrier": (
        32, INIT, "if (threadIdx.x < 32) rr_sim_barrier_wait(barrier, 0);\n  __syncthreads();\n"
        "  if (threadIdx.x == 32) rr_sim_barrier_expect(barrier, 0);",
        "deadlock: no wave can go on (missing at this mbarrier: arrivals 1, bytes 0)",
    ),
    "a lane waits and the others do not": (
        32, INIT, "if (threadIdx.x == 3) rr_sim_barrier_wait(barrier, 0);",
        "divergent wave operation: 1 of 32 lanes of wave 0 arrived, lane 0 has returned",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_names_its_line(case: str) -> None:
    wave, before, line, said = FAULTS[case]
    body = f"  char* lds = rr_sim_lds(); {before}\n  {line}"
    source = small(body, "const unsigned* in")
    message = rf"^small\.hip:3: {re.escape(said)} \(kernel k, block 0\)$"
    with pytest.raises(SimulatorError, match=message):
        run(CpuBackend(wave), source, words(1024), lds_bytes=4096)


@pytest.mark.parametrize(
    ("wave", "statement", "said"),
    [
        (64, f"{RSRC} {AMD_COPY}(buffer, lds, 8, 0, 0, 0, 0);", "4 bytes, or on gfx950 16"),
        (64, f"{RSRC} {AMD_COPY}(buffer, lds, 16, 0, 0, 0, 0);", "4 bytes, or on gfx950 16"),
        (32, "rr_sim_copy_async(lds, in, 12);", "cp.async copies 4, 8 or 16 bytes"),
    ],
)
def test_widths_that_the_hardware_does_not_copy(wave: int, statement: str, said: str) -> None:
    source = small(f"char* lds = rr_sim_lds();\n{statement}", "const unsigned* in", GFX942)
    with pytest.raises(CompileError, match=said) as caught:
        CpuBackend(wave).compile(source)
    assert "small.hip:3" in caught.value.log


@pytest.mark.parametrize("wave", [64, 32])
def test_a_launch_begins_without_what_a_fault_left(wave: int) -> None:
    """Of one object, whose queues and flags outlive a launch. The first wave waits for the last."""
    amd = (
        f"{RSRC} {AMD_COPY}(buffer, lds + 16, 4, {LANE}, 0, 0, 0); if (right) rr_sim_wait_vmcnt(0);"
    )
    cuda = f"""{INIT} if (threadIdx.x == 63) {{
      if (right) rr_sim_barrier_expect(barrier, 256);
      rr_sim_copy_bulk(lds + 16, in, 256, barrier);
    }}
    rr_sim_barrier_wait(barrier, 0);"""
    body = f"""
  char* lds = rr_sim_lds();
  {amd if wave == 64 else cuda}
  out[threadIdx.x] = ((unsigned*)lds)[4 + threadIdx.x];
"""
    source = small(body, "const unsigned* in, unsigned* out, int right")
    given, out, backend = coded(64), words(64), CpuBackend(wave)
    for _ in range(2):
        with pytest.raises(SimulatorError, match="in flight" if wave == 64 else "deadlock"):
            run(backend, source, given, out, np.int32(0), lds_bytes=272)
        run(backend, source, given, out, np.int32(1), grid=2, lds_bytes=272)
        np.testing.assert_array_equal(out, given)

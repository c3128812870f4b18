"""The static gate on faults planted in the kernels' text: AMD's compiler builds, it names them.

Each stands beside the same kernel as it is, which passes.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from amd_kernels import Edits, compiled, edited

from rmsnorm_raw.backends.static_gate import gate, inert_knobs
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.problem import Problem

pytestmark = pytest.mark.gfx950

FORWARD = Problem.forward(32768, 8192, "bf16")
BACKWARD = Problem.backward(32768, 8192, "bf16")
NARROW_FORWARD = Problem.forward(32768, 1024, "bf16")
NARROW_BACKWARD = Problem.backward(32768, 1024, "bf16")


def check(
    problem: Problem, slug: str, said: str, edits: Edits, libraries: Path, arch: str = "gfx950"
) -> None:
    """The kernel passes as it is, and with the edits has a fault that says so."""
    assert gate(problem, *compiled(problem, arch, libraries, slug)) == []
    faults = gate(problem, *edited(problem, slug, arch, libraries, edits))
    assert re.search(said, "\n".join(faults)), faults


# ---- the ring ------------------------------------------------------------------------------------

ALL, COPIES = "wait_memory<ALL < 63 ? ALL : 63>();", "wait_memory<COPIES < 63 ? COPIES : 63>();"
DRAIN = "wait_memory<0>();"
#: reads that the compiler sees, a stage buffer that is one static LDS object and sums that have
#: another: it cannot tell that a read is not of what is being copied
SEEN_READ = (
    'asm volatile("ds_read_b128 %0, %1" : "=v"(value) : "v"(address) : "memory");',
    "value = *(const __attribute__((address_space(3))) typename Native<BYTES>::type*)address;",
)
DYNAMIC = "extern __shared__ __attribute__((aligned(16))) unsigned char rr_lds_bytes[]; "
STATIC = "__shared__ __attribute__((aligned(16))) unsigned char rr_lds_bytes[66000]; "
SUMS = "row_sum(sum, lds + area * 2 * BLOCK_WAVES);"
TWO_OBJECTS = (
    SEEN_READ, (DYNAMIC, STATIC),
    (SUMS, "__shared__ float second[64]; row_sum(sum, second + area * 2 * BLOCK_WAVES);"),
)  # fmt: skip
LATE_ROW = r"reads a stage while copies of its row are in flight"


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        (TWO_OBJECTS, r"reads a stage with (no younger row|\d younger operations) in flight"),
        (TWO_OBJECTS, r"bytes of static LDS: a second LDS object"),
        (((ALL, ""), (COPIES, "")), LATE_ROW),
        (((ALL, ""),), "can go round without a wait"),
        (((COPIES, ""),), "can go round without a wait"),
        (((ALL, "wait_memory<ALL + 1>();"),), LATE_ROW),
        (((ALL, "wait_memory<COPIES>();"),), r"8 younger operations in flight, not 16"),
        (((ALL, DRAIN), (COPIES, DRAIN)), "with no younger row in flight"),
        ((("  ring.close();", ""),), "copies are in flight at s_endpgm .*after the row loop"),
    ],
    ids=[
        "two LDS objects", "two LDS objects are seen", "no wait", "no wait later",
        "no wait at first", "one too loose", "too strict", "drained", "not drained at the end",
    ],
)  # fmt: skip
def test_a_faulty_ring(edits: Edits, said: str, libraries: Path) -> None:
    check(FORWARD, "b256-lds3-p2", said, edits, libraries)


def test_a_wait_that_is_too_loose_for_the_first_rows(libraries: Path) -> None:
    # without a weight, whose own wait, before the loop, would cover the first rows too
    problem = Problem.forward(32768, 8192, "bf16", weight_dtype=None)
    edits = ((COPIES, "wait_memory<ALL>();"),)
    check(problem, "b256-lds3-p2", LATE_ROW, edits, libraries)


def test_a_ring_of_gfx942_whose_wait_is_one_too_loose(libraries: Path) -> None:
    edits = ((ALL, "wait_memory<ALL + 1>();"),)
    check(FORWARD, "b256-lds2-p1", LATE_ROW, edits, libraries, "gfx942")


def test_a_wait_that_counts_a_store_which_some_waves_skip(libraries: Path) -> None:
    # 1000 elements are two chunks of 64 lanes, and the last lanes have no second one
    counted = "(FULL_CHUNKS ? RR_CHUNKS : RR_CHUNKS - 1)"
    problem = Problem.forward(32768, 1000, "bf16")
    check(problem, "b256-t64-lds3-p2", LATE_ROW, ((counted, "RR_CHUNKS"),), libraries)
    # and of a lone row, whose stores have no other condition
    problem = Problem.forward(32768, 7000, "bf16")
    check(problem, "b256-lds3-p2", LATE_ROW, ((counted, "RR_CHUNKS"),), libraries)


def test_a_stage_that_is_refilled_while_it_is_read(libraries: Path) -> None:
    edits = (('asm volatile("s_waitcnt lgkmcnt(0)" : "+v"(v)::"memory");', ""),)
    said = "refills a stage before its reads have come back"
    check(NARROW_FORWARD, "b256-t64-lds4-p2", said, edits, libraries)


def test_lds_that_other_waves_use_while_copies_land(libraries: Path) -> None:
    # 7.2.4's own barrier drains; 7.0.0's does so too late
    merge = "#if RR_NEED_DW\n  if constexpr (BLOCK_ROWS > 1) {\n    "
    edits = (("  ring.close();", ""), (merge + "__syncthreads();", merge + "exchange_barrier();"))
    said = r"copies are in flight at s_barrier .*after the row loop"
    check(NARROW_BACKWARD, "b256-t64-lds3-p2", said, edits, libraries)


# ---- ping-pong -----------------------------------------------------------------------------------


def test_a_pingpong_that_works_before_it_asks(libraries: Path) -> None:
    fences = ("__builtin_amdgcn_sched_barrier(0);", 'asm volatile("" : "+v"(v)::"memory");')
    said = "(of the youngest row|before the next one is on its way)"
    check(BACKWARD, "b512-pp-p1", said, tuple((it, "") for it in fences), libraries)


def test_a_pingpong_that_is_drained(libraries: Path) -> None:
    ask = "    load_row(row + step, next);\n"
    edits = ((ask, ask + '    asm volatile("s_waitcnt vmcnt(0)" ::: "memory");\n'),)
    check(FORWARD, "b256-pp-p2", "leaves 0 of 4 loads of the youngest row", edits, libraries)


# ---- registers, widths, policies, arithmetic -----------------------------------------------------

BOUNDS = "#define RR_BOUNDS __launch_bounds__(RR_BLOCK)"
EIGHT_WAVES = "#define RR_BOUNDS __launch_bounds__(RR_BLOCK, 8)"
LOAD = "pack.piece[i] = load_words<POLICY, pack.PIECE>(address + i * pack.PIECE);"
STORE = "store_words<POLICY, pack.PIECE>(address + i * pack.PIECE, pack.piece[i]);"
NARROW_LOAD = """{
      const volatile u64* from = (const volatile u64*)(address + i * pack.PIECE);
      const u64 half[2] = {from[0], from[1]};
      __builtin_memcpy(&pack.piece[i], half, 16);
    }"""
NARROW_STORE = """{
      volatile u64* to = (volatile u64*)(address + i * pack.PIECE);
      u64 half[2];
      __builtin_memcpy(half, &pack.piece[i], 16);
      to[0] = half[0];
      to[1] = half[1];
    }"""
ROWS = "load_pack<RR_X, RR_ELEMENTS, RR_LOAD_POLICY>"
WEIGHT = "return load_pack<RR_W, RR_ELEMENTS, POLICY_DEFAULT>(weight, element);"
OUTPUT = "store_pack<RR_X, RR_ELEMENTS, RR_STORE_POLICY>"
RING_NT = "constexpr int NT = RR_LOAD_POLICY == POLICY_STREAM ? 2 : 0;"
NEIGHBOUR = "if constexpr (LANES >= 2) v = combine(v, dpp<0xb1>(v));"
SHUFFLE = """v = combine(v, as_float((u32)__builtin_amdgcn_ds_bpermute(
      (threadIdx.x ^ 1) * 4, (int)as_bits(v))));"""
ROUNDED = "const pair v = {(__bf16)low, (__bf16)high};\n    return __builtin_bit_cast(u32, v);"
TRUNCATED = "return as_bits(low) >> 16 | (as_bits(high) & 0xffff0000u);"
BY_HAND = """
    const u32 a = as_bits(low), b = as_bits(high);
    return (a + 0x7fff + (a >> 16 & 1)) >> 16 | ((b + 0x7fff + (b >> 16 & 1)) & 0xffff0000u);"""


@pytest.mark.parametrize(
    ("problem", "slug", "edits", "said"),
    [
        (BACKWARD, "b512-pp-p1", ((BOUNDS, EIGHT_WAVES),), r"[1-9]\d* VGPRs .*are spilled"),
        (BACKWARD, "b512-pp-p1", ((BOUNDS, EIGHT_WAVES),), r"[1-9]\d* bytes of scratch"),
        (FORWARD, "b256-reg", ((BOUNDS, "#define RR_BOUNDS"),), "blocks of 1024 threads, not 256"),
        (FORWARD, "b256-v16-reg", ((LOAD, NARROW_LOAD),), "load of x by 8 bytes a lane, not 16"),
        (FORWARD, "b256-v16-reg", ((STORE, NARROW_STORE),), "store of y by 8 bytes a lane, not 16"),
        (FORWARD, "b256-reg-ls", ((ROWS, ROWS.replace("RR_LOAD_POLICY", "POLICY_DEFAULT")),),
         r"load of x without nt, and load_policy is stream \(4 times\)"),
        (FORWARD, "b256-reg", ((ROWS, ROWS.replace("RR_LOAD_POLICY", "POLICY_STREAM")),),
         "load of x with nt, and load_policy is default"),
        (FORWARD, "b256-reg-ls", ((WEIGHT, WEIGHT.replace("DEFAULT", "STREAM")),),
         "load of weight with nt, which is for rows alone"),
        (BACKWARD, "b512-pp-ss-p1",
         ((OUTPUT, OUTPUT.replace("RR_STORE_POLICY", "POLICY_DEFAULT")),),
         "store of dx without nt, and store_policy is stream"),
        (BACKWARD, "b512-lds3-ls-p1", ((RING_NT, "constexpr int NT = 0;"),),
         "load of dout without nt, and load_policy is stream"),
        (BACKWARD, "b256-2p-ls-p4", ((ROWS, ROWS.replace("RR_LOAD_POLICY", "POLICY_DEFAULT")),),
         "rmsnorm_backward_columns: load of x without nt"),
        (FORWARD, "b256-reg", ((NEIGHBOUR, SHUFFLE),), "1 shuffles through LDS"),
        (FORWARD, "b256-reg", ((ROUNDED, TRUNCATED),), "0 v_cvt_pk_bf16_f32 for 16 pairs"),
        (FORWARD, "b256-reg", ((ROUNDED, BY_HAND),), "0 v_cvt_pk_bf16_f32 for 16 pairs"),
    ],
    ids=[
        "spilled", "scratch", "no bound", "narrow loads", "narrow stores", "load policy ignored",
        "load policy unasked", "weight streamed", "store policy ignored", "ring's policy ignored",
        "two passes' policy ignored", "shuffles", "truncated", "rounded by hand",
    ],
)  # fmt: skip
def test_a_planted_fault(
    problem: Problem, slug: str, edits: Edits, said: str, libraries: Path
) -> None:
    check(problem, slug, said, edits, libraries)


def test_gfx942_rounds_by_hand_and_must(libraries: Path) -> None:
    said = "0 bf16 are rounded, and 32 are stored"
    check(FORWARD, "b256-reg", said, ((ROUNDED, TRUNCATED),), libraries, "gfx942")


# ---- rows that are moved again -------------------------------------------------------------------

FORGET = 'asm volatile("" ::: "memory");'
KEPT = "store_row(first + slot, kept, sum_row(first + slot, kept, 0), 0);"
KEPT_AGAIN = f"""const float sum = sum_row(first + slot, kept, 0); {FORGET}
  Row again; load_row(first + slot, again); store_row(first + slot, again, sum, 0);"""
BOTH = "store_row(row, x_kept, dout_kept, beside, sum_row(given, x_kept, dout_kept, area));"
BOTH_AGAIN = f"""const RowResult sum = sum_row(given, x_kept, dout_kept, area); {FORGET}
    float g; XRow x; DRow d; load_row(row, g, x, d, beside);
    store_row(row, x, d, beside, sum);"""
LOOP, UNROLLED = "\n    area ^= 1;", "\n  };"
PINGPONG = "store_row(row, kept, sum_row(row, kept, area), area);"
PINGPONG_AGAIN = f"""const float sum = sum_row(row, kept, area); {FORGET}
    Row again; load_row(row, again); store_row(row, again, sum, area);"""
RING_STORE, RING_REFILL = (
    "store_row(row, kept, scale, area);",
    "if (!RR_BULK) ring.refill(row, step);",
)
SQUARES = """x_of(in) = load_vector(x, x_row + element);
          RR_LOAD_RESIDUAL(in, row, element);
          add_squares(in, chain);"""
NORMALISED = "store_normalised(y, y_row + element, again, w, scale);"
CHAINS = "chains.add(dout_part, load_vector(x, x_row + element), w);"
COLUMN = "const XPack x_part = load_vector(x, (u64)(row * x_stride) + column);"
COLUMN_AGAIN = f"""float all = 0.0f;
    for (int e = 0; e < RR_ELEMENTS; ++e) all += x_part[e];
    asm volatile("" ::"v"(all), "s"(x) : "memory");
    {COLUMN.replace("x_part", "x_again")}"""
DX = "if (NEED_DX) store_dx(dx, (u64)(row * dx_stride) + column, dout_part, x_part, w, result);"
DW_ALONE = Problem.backward(32768, 8192, "bf16", need_dx=False, has_rstd=False)


def twice(code: str, pointer: str) -> tuple[str, str]:
    """The same once more; what the pointer goes to may have changed."""
    return code, f'{{ {code} asm volatile("" ::"s"({pointer}) : "memory"); {code} }}'


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
@pytest.mark.parametrize(
    ("problem", "slug", "edit", "said"),
    [
        (FORWARD, "b256-reg", (KEPT, KEPT_AGAIN), "x is read again: 128 .*, not 64"),
        (BACKWARD, "b512-reg-p1", (BOTH + LOOP, BOTH_AGAIN + LOOP),
         "dout is read again: 64 .*, not 32"),
        (DW_ALONE, "b512-reg-p1", (BOTH + LOOP, BOTH_AGAIN + LOOP), "x is read again: 64 .* 32"),
        (Problem.backward(32768, 1000, "bf16"), "b256-t64-reg-p2",  # a tail; several rows
         (BOTH + LOOP, BOTH_AGAIN + LOOP), "x is read again: 48 .*, not 32"),
        (FORWARD, "b256-pp-p2", (PINGPONG, PINGPONG_AGAIN), "x is read again: 256 .*, not 128"),
        (BACKWARD, "b512-pp-p1", (BOTH + UNROLLED, BOTH_AGAIN + UNROLLED),
         "dout is read again: 128 .*, not 64"),
        (FORWARD, "b256-lds2-p1", twice(RING_REFILL, "x"), "x is read again: 128 .*, not 64"),
        (FORWARD, "b256-lds2-p1", twice(RING_STORE, "y"), "y is stored again: 128 .*, not 64"),
        (FORWARD, "b256-reg", twice(KEPT, "y"), "y is stored again: 128 .*, not 64"),
        (FORWARD, "b256-2p", twice(SQUARES, "x"), "x is read again: 192 .*, not 128"),
        (FORWARD, "b256-2p", twice(NORMALISED, "y"), "y is stored again: 32 .*, not 16"),
        (BACKWARD, "b256-2p-p4", twice(CHAINS, "x"), "_rows: x is read again: 128 .*, not 64"),
        (BACKWARD, "b256-2p-p4", (COLUMN, COLUMN + COLUMN_AGAIN + "\n#define x_part x_again\n"),
         "backward_columns: x is read again"),
        (BACKWARD, "b256-2p-p4", twice(DX, "dx"), "backward_columns: dx is stored again"),
        (DW_ALONE, "b256-2p-p4", (COLUMN, COLUMN + COLUMN_AGAIN + "\n#define x_part x_again\n"),
         "backward_columns: x is read again"),
    ],
    ids=[
        "kept", "kept backward", "kept for dW", "kept with a tail", "ping-pong",
        "ping-pong backward", "ring copied", "ring stored", "stored", "first pass",
        "stored by the second pass", "rows", "columns", "columns stored", "columns for dW",
    ],
)  # fmt: skip
def test_a_row_that_is_moved_again(
    problem: Problem, slug: str, edit: tuple[str, str], said: str, arch: str, libraries: Path
) -> None:
    check(problem, slug, said, (edit,), libraries, arch)


# ---- fences between blocks -----------------------------------------------------------------------

FEW_ROWS = Problem.backward(64, 512, "bf16")
COUNTED = """__threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *shared ="""
SEEN = "__syncthreads();\n  __threadfence();\n  return *shared;"
RELEASE = r"no write-back \(buffer_wbl2 sc1\), .* between the stores of partial and the block's"
ACQUIRE = r"no invalidate \(buffer_inv sc1\) between the block's count and the loads of partial"


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
@pytest.mark.parametrize("slug", ["b64-t64-v16-reg-p2-fl", "b128-t64-v16-reg-p2-fl"])
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ((COUNTED, COUNTED.replace("__threadfence();", "")), RELEASE),
        ((COUNTED, COUNTED.replace("__threadfence", "__threadfence_block")), RELEASE),
        ((SEEN, SEEN.replace("__threadfence();", "")), ACQUIRE),
        ((SEEN, SEEN.replace("__threadfence", "__threadfence_block")), ACQUIRE),
        ((SEEN, SEEN.replace("__threadfence", "if (threadIdx.x & 64) __threadfence")), ACQUIRE),
        (("atomicAdd(finished, 1u)", "(*finished)++"), "no atomic of finished"),
    ],
    ids=["not written back", "written back to the block", "not invalidated",
         "invalidated for the block", "invalidated by some waves", "counted by hand"],
)  # fmt: skip
def test_a_last_block_without_a_fence(
    slug: str, edit: tuple[str, str], said: str, arch: str, libraries: Path
) -> None:
    check(FEW_ROWS, slug, said, (edit,), libraries, arch)


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ((COUNTED, COUNTED.replace("  __syncthreads();\n", "")),
         "no barrier between the stores of partial and the block's count"),
        ((SEEN, SEEN.replace("__syncthreads();", "")),
         r"no barrier, invalidate .* between the block's count and the loads of partial"),
    ],
    ids=["before the count", "after the count"],
)  # fmt: skip
def test_a_last_block_without_a_barrier(
    edit: tuple[str, str], said: str, arch: str, libraries: Path
) -> None:
    check(FEW_ROWS, "b128-t64-v16-reg-p2-fl", said, (edit,), libraries, arch)


PUBLISH = "__hip_atomic_store(to, word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);"
ASK = "word = __hip_atomic_load(from, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);"
HALVES = """
  u32* half = (u32*)to;
  __hip_atomic_store(half, (u32)word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  __hip_atomic_store(half + 1, (u32)(word >> 32), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);"""
NUMBER = "atomicAdd((u32*)(row_words + rows * RR_ROW_BLOCKS), 1u)"


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ((PUBLISH, PUBLISH.replace("AGENT", "WORKGROUP")), "store of words without sc1"),
        ((PUBLISH, HALVES), "store of words by 4 bytes, not 8 at once"),
        ((ASK, ASK.replace("AGENT", "WORKGROUP")), "load of words without sc1"),
        ((NUMBER, "blockIdx.x"), "no atomic of the words"),
    ],
    ids=["published to the block", "in halves", "asked of the block", "no number"],
)  # fmt: skip
def test_words_that_other_blocks_do_not_see(
    edit: tuple[str, str], said: str, arch: str, libraries: Path
) -> None:
    check(FORWARD, "b128-t256", said, (edit,), libraries, arch)


# ---- knobs ---------------------------------------------------------------------------------------


def test_a_knob_that_does_nothing(libraries: Path) -> None:
    pair = ("b256-reg", "b256-reg-ls")
    ignored = ((ROWS, ROWS.replace("RR_LOAD_POLICY", "POLICY_DEFAULT")),)
    for edits, inert in (((), 0), (ignored, 1)):
        codes = dict(edited(FORWARD, slug, "gfx950", libraries, edits) for slug in pair)
        digests = {config: code.code_digest for config, code in codes.items()}
        faults = inert_knobs(FORWARD, KNOWN["gfx950"], digests)
        assert len(faults) == inert
        assert all("load_policy is inert" in fault for fault in faults)


# ---- what is not in the text ---------------------------------------------------------------------


def test_a_code_object_of_another_target(libraries: Path) -> None:
    config, code = compiled(FORWARD, "gfx942", libraries, "b256-reg")
    (fault, *_) = gate(FORWARD, config, replace(code, arch="gfx950"))
    assert fault == "the code object is not for gfx950: its processor is 0x4c"


def test_a_config_that_asks_for_more_than_there_is(libraries: Path) -> None:
    _, code = compiled(BACKWARD, "gfx950", libraries, "b512-lds3-p1")
    more = Config.parse("b512-lds6-p1")
    assert "196736 bytes of LDS a block, and gfx950 has 163840" in "\n".join(
        gate(BACKWARD, more, code)
    )
    _, code = compiled(BACKWARD, "gfx950", libraries, "b512-pp-p1")
    more = replace(Config.parse("b512-pp-p1"), waves_per_eu=4)
    assert "waves a SIMD, not 4" in "\n".join(gate(BACKWARD, more, code))

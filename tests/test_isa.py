"""Reading machine code: widths, operands and waits, on instructions written by hand."""

from __future__ import annotations

import pytest
from assembly import COPY, LOAD, STORE, code, wait

from rmsnorm_raw.backends.isa import (
    MAX_VMCNT,
    Access,
    Instruction,
    bytes_before_first_wait,
    operands,
    replay,
    waits,
)


@pytest.mark.parametrize(
    ("text", "access"),
    [
        (LOAD, Access("global", "load", 16, False, False)),
        (f"{LOAD} offset:-4096 nt", Access("global", "load", 16, False, True)),
        (f"{STORE} sc0 nt sc1", Access("global", "store", 16, False, True)),
        ("global_load_dwordx3 v[0:2], v3, s[0:1]", Access("global", "load", 12, False, False)),
        ("global_store_short v[0:1], v4, off", Access("global", "store", 2, False, False)),
        ("global_load_short_d16_hi v4, v[0:1], off", Access("global", "load", 2, False, False)),
        ("buffer_load_ubyte v4, v0, s[0:3], 0 offen", Access("buffer", "load", 1, False, False)),
        (COPY, Access("buffer", "load", 16, True, False)),
        ("global_load_lds_dword v[0:1], off", Access("global", "load", 4, True, False)),
        ("flat_load_dwordx2 v[0:1], v[2:3]", Access("flat", "load", 8, False, False)),
        ("scratch_store_dword off, v0, s32", Access("scratch", "store", 4, False, False)),
        ("global_atomic_add v0, v1, v2, s[0:1] sc0", Access("global", "atomic", 0, False, False)),
        ("buffer_wbl2 sc1", None),
        ("s_load_dwordx4 s[4:7], s[0:1], 0x0", None),
        ("ds_read_b128 v[0:3], v0", None),
    ],
)
def test_what_an_instruction_moves(text: str, access: Access | None) -> None:
    assert Instruction(0, text).access == access


def test_a_load_of_unknown_width_is_not_counted_as_nothing() -> None:
    with pytest.raises(ValueError, match="b128"):
        _ = Instruction(0, "global_load_b128 v[0:3], v[4:5], off").access


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (wait(7), 7),
        ("s_waitcnt vmcnt(0) lgkmcnt(0)", 0),
        ("s_waitcnt lgkmcnt(0) vmcnt(12)", 12),
        ("s_waitcnt lgkmcnt(0)", None),
        (LOAD, None),
    ],
)
def test_what_a_wait_waits_for(text: str, count: int | None) -> None:
    assert Instruction(0, text).vmcnt == count


def test_branches_go_both_ways() -> None:
    assert Instruction(0x9EC, "s_cbranch_execz 65101").branch_target == 0x324
    assert Instruction(0x9C, "s_cbranch_vccnz 602").branch_target == 0xA08
    assert Instruction(0, "s_barrier").branch_target is None


@pytest.mark.parametrize(
    ("text", "group"),
    [
        (f"{LOAD} nt", "global load 16 B nt"),
        (COPY, "buffer load to LDS 16 B"),
        ("ds_bpermute_b32 v0, v1, v2", "ds_bpermute_b32"),
        ("v_cvt_pk_bf16_f32 v0, v1, v2", "v_cvt_pk_bf16_f32"),
        ("v_cvt_f32_f16_e32 v0, v1", "v_cvt_f32_f16"),
        ("v_add_f32_dpp v1, v1, v1 row_mirror row_mask:0xf bank_mask:0xf", "dpp"),
        ("v_permlane32_swap_b32_e32 v1, v60", "permlane"),
        ("v_readlane_b32 s0, v1, 16", "read lane"),
        ("v_readfirstlane_b32 s4, v1", "read lane"),
        ("v_mov_b32_e32 v0, 0", "vector"),
        ("s_load_dword s0, s[0:1], 0x3c", "scalar load"),
        ("s_barrier", "barrier"),
        ("s_waitcnt lgkmcnt(0)", "wait"),
        ("s_endpgm", "scalar"),
    ],
)
def test_groups(text: str, group: str) -> None:
    assert Instruction(0, text).group == group


@pytest.mark.parametrize(
    ("text", "results", "sources", "address"),
    [
        ("v_add_u32_e32 v1, s2, v3", "v1", "s2 v3", ""),
        ("v_lshl_add_u64 v[2:3], s[4:5], 0, v[6:7]", "v2 v3", "s4 s5 v6 v7", ""),
        ("v_addc_co_u32_e32 v5, vcc, 0, v3, vcc", "v5 vcc", "v3 vcc", ""),
        ("v_mad_u64_u32 v[2:3], s[0:1], s17, v4, v[6:7]", "v2 v3 s0 s1", "s17 v4 v6 v7", ""),
        ("v_fmac_f32_e32 v1, v2, v3", "v1", "v1 v2 v3", ""),
        ("v_permlane32_swap_b32_e32 v1, v2", "v1 v2", "v1 v2", ""),
        ("v_cmp_lt_i64_e32 vcc, s[2:3], v[4:5]", "vcc", "s2 s3 v4 v5", ""),
        ("s_cmp_lg_u32 s2, 3", "", "s2", ""),
        ("s_add_i32 m0, s22, 0x80", "m0", "s22", ""),
        ("s_load_dwordx2 s[8:9], s[0:1], 0x10", "s8 s9", "s0 s1", "s0 s1"),
        (LOAD, "v0 v1 v2 v3", "v4 v5", "v4 v5"),
        ("global_load_dwordx2 v[0:1], v4, s[8:9]", "v0 v1", "v4 s8 s9", "v4 s8 s9"),
        (STORE, "", "v4 v5 v0 v1 v2 v3", "v4 v5"),
        ("global_store_dword v4, v0, s[8:9]", "", "v4 v0 s8 s9", "v4 s8 s9"),
        ("buffer_store_dword v0, v1, s[0:3], 0 offen", "", "v0 v1 s0 s1 s2 s3", "v1 s0 s1 s2 s3"),
        (COPY, "", "v8 s0 s1 s2 s3", "v8 s0 s1 s2 s3"),
        ("global_atomic_add v0, v1, v2, s[0:1] sc0", "v0", "v1 v2 s0 s1", "v1 v2 s0 s1"),
        ("global_atomic_add v1, v2, s[0:1]", "", "v1 v2 s0 s1", "v1 s0 s1"),
        ("ds_read_b64 v[0:1], v2", "v0 v1", "v2", ""),
        ("ds_write_b32 v2, v0", "", "v2 v0", ""),
        ("s_waitcnt vmcnt(0)", "", "", ""),
    ],
)
def test_operands(text: str, results: str, sources: str, address: str) -> None:
    found = operands(text)
    assert [" ".join(part) for part in found[:3]] == [results, sources, address]


def test_the_lower_half_of_a_sum_knows_nothing_of_upper_halves() -> None:
    assert operands("v_mad_u64_u32 v[2:3], s[0:1], s17, v4, v[6:7]").lower == ("s17", "v4", "v6")
    assert operands("v_mov_b64_e32 v[2:3], s[0:1]").lower == ("s0",)
    assert operands("v_add_u32_e32 v1, s2, v3").lower is None


# ---- what is in flight ---------------------------------------------------------------------------


def test_a_wait_retires_the_oldest() -> None:
    first, second = f"{LOAD} offset:16", f"{LOAD} offset:32"
    seen = list(replay(code(first, STORE, second, wait(1), "s_endpgm"), loop=False))
    assert [each.text for each in seen[3][1]] == [first, STORE, second]
    assert [each.text for each in seen[4][1]] == [second]


def test_bytes_at_the_first_wait_that_needs_a_load() -> None:
    assert bytes_before_first_wait(code(LOAD, LOAD, LOAD, wait(2), wait(0)), loop=False) == 48


def test_only_what_is_asked_for_before_the_wait_counts() -> None:
    assert bytes_before_first_wait(code(LOAD, wait(0), LOAD, wait(0)), loop=False) == 16


def test_a_wait_that_needs_no_load_does_not_count() -> None:
    assert bytes_before_first_wait(code(LOAD, LOAD, wait(2), "s_endpgm"), loop=False) == 0
    # the wait is for the store before the loads
    assert bytes_before_first_wait(code(STORE, LOAD, LOAD, wait(2)), loop=False) == 0
    assert bytes_before_first_wait(code(LOAD, "s_waitcnt lgkmcnt(0)"), loop=False) == 0


def test_stores_take_places_and_no_bytes() -> None:
    assert bytes_before_first_wait(code(LOAD, STORE, LOAD, wait(2)), loop=False) == 32


def test_a_ring_keeps_the_stages_of_earlier_rows_in_flight() -> None:
    # three stages: each row copies the row after next, then waits for its own two copies back
    body = code(COPY, wait(2), "ds_read_b128 v[0:3], v0", "s_cbranch_scc1 @0")
    assert bytes_before_first_wait(body, loop=True) == 3 * 16
    assert bytes_before_first_wait(body, loop=False) == 0


def test_a_loop_that_waits_at_its_top_drains() -> None:
    body = code(wait(0), "v_mov_b32_e32 v0, 0", LOAD, LOAD, "s_cbranch_scc1 @0")
    assert bytes_before_first_wait(body, loop=True) == 32


def test_a_loop_without_waits_stops_at_the_counter() -> None:
    seen = list(replay(code(LOAD, LOAD, "s_cbranch_scc1 @0"), loop=True))
    assert max(len(flying) for _, flying in seen) == MAX_VMCNT


def test_a_wait_names_what_it_ends_and_what_it_leaves() -> None:
    body = code(COPY, COPY, wait(3), STORE, "s_cbranch_scc1 @0", "s_endpgm")
    (found,) = waits(body[:-1], loop=True)
    # once settled: the copies of the row before, after the store of the one before that
    row = ["global store 16 B", "buffer load to LDS 16 B", "buffer load to LDS 16 B"]
    assert found.instruction is body[2]
    assert [each.group for each in found.ends] == row
    assert [each.group for each in found.leaves] == row
    (first,) = waits(body, loop=False)
    assert (first.ends, len(first.leaves)) == ((), 2)

"""Reading machine code: widths, waits and loops, on instructions written by hand."""

from __future__ import annotations

import pytest

from rmsnorm_raw.backends.flow import find_row_loop, loops
from rmsnorm_raw.backends.isa import (
    MAX_VMCNT,
    Access,
    Instruction,
    bytes_before_first_wait,
    replay,
    waits,
)

LOAD = "global_load_dwordx4 v[0:3], v[4:5], off"
STORE = "global_store_dwordx4 v[4:5], v[0:3], off"
COPY = "buffer_load_dwordx4 v8, s[0:3], 0 offen lds"


def code(*lines: str) -> list[Instruction]:
    """Four bytes each; a branch names the index of the line that it goes to: "s_branch @3"."""
    made = []
    for index, line in enumerate(lines):
        head, _, target = line.partition("@")
        words = str((int(target) - index - 1) & 0xFFFF) if target else ""
        made.append(Instruction(4 * index, head + words))
    return made


def wait(count: int) -> str:
    return f"s_waitcnt vmcnt({count})"


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


# ---- loops ---------------------------------------------------------------------------------------


def offsets(body: tuple[Instruction, ...]) -> list[int]:
    return [each.offset // 4 for each in body]


def test_a_plain_loop() -> None:
    body = code("s_nop 0", LOAD, wait(0), STORE, "s_cbranch_scc1 @1", "s_endpgm")
    assert [offsets(each) for each in loops(body)] == [[1, 2, 3, 4]]
    assert offsets(find_row_loop(body)) == [1, 2, 3, 4]


def test_a_kernel_without_a_loop_has_no_row_loop() -> None:
    assert find_row_loop(code(LOAD, "s_cbranch_execz @3", STORE, "s_endpgm")) == ()


def test_a_loop_that_asks_for_a_word_is_no_row_loop() -> None:
    ask = ("global_load_dwordx2 v[0:1], v[2:3], off sc1", wait(0), "s_cbranch_execnz @1")
    body = code(LOAD, *ask, wait(0), STORE, "s_endpgm")
    assert [offsets(each) for each in loops(body)] == [[1, 2, 3]]
    assert find_row_loop(body) == ()
    assert [each.agent_scope for each in body[:2]] == [False, True]


def test_a_loop_entered_in_its_middle_begins_there() -> None:
    # as hiprtc 7 lays out the backward kernel: stores on top, loads below, entered at the loads
    body = code("s_branch @4", wait(0), STORE, "s_cbranch_vccz @6", LOAD, "s_branch @1", "s_endpgm")
    assert offsets(find_row_loop(body)) == [4, 5, 1, 2, 3]


def test_a_block_moved_out_of_line_is_no_loop() -> None:
    # as hiprtc 7.0.0 does for rows that need not exist: line 6 jumps back to 3, forward in time
    body = code(
        "s_nop 0",
        LOAD,
        "s_cbranch_execnz @5",
        "v_mov_b32_e32 v0, 0",
        "s_cbranch_scc0 @7",
        f"{LOAD} offset:16",
        "s_branch @3",
        wait(0),
        STORE,
        "s_cbranch_scc1 @1",
        "s_endpgm",
    )
    assert [sorted(offsets(each)) for each in loops(body)] == [list(range(1, 10))]
    assert bytes_before_first_wait(find_row_loop(body), loop=True) == 32


def test_the_row_loop_is_the_one_that_stores_and_loads_the_most() -> None:
    pass_one = (LOAD, LOAD, LOAD, "s_cbranch_scc1 @0")
    unrolled = (LOAD, LOAD, STORE, STORE, "s_cbranch_scc1 @4")
    remainder = (LOAD, STORE, "s_cbranch_scc1 @9")
    body = code(*pass_one, *unrolled, *remainder, "s_endpgm")
    assert offsets(find_row_loop(body)) == [4, 5, 6, 7, 8]
    # without stores anywhere: the loop that loads the most
    assert offsets(find_row_loop(code(*pass_one, "s_endpgm"))) == [0, 1, 2, 3]


def test_the_row_loop_is_an_inner_one() -> None:
    body = code("s_nop 0", LOAD, LOAD, STORE, "s_cbranch_scc1 @2", "s_cbranch_scc1 @1", "s_endpgm")
    assert [len(each) for each in sorted(loops(body), key=len)] == [3, 5]
    assert offsets(find_row_loop(body)) == [2, 3, 4]


# ---- waits that exclude each other ---------------------------------------------------------------


def counts(body: tuple[Instruction, ...]) -> list[int | None]:
    return [each.vmcnt for each in body if each.vmcnt is not None]


def test_of_two_waits_that_a_flag_chooses_between_the_loosest_is_the_loops() -> None:
    # as hiprtc 7.0.0 does: the first sets the flag that skips the second
    body = code(
        COPY, "s_mov_b64 vcc, -1", "s_cbranch_scc0 @5", wait(2), "s_mov_b64 vcc, 0",
        "s_cbranch_vccnz @7", wait(1), STORE, "s_cbranch_scc1 @0", "s_endpgm",
    )  # fmt: skip
    assert counts(find_row_loop(body)) == [2]


def test_of_two_waits_in_the_branches_of_a_choice_the_loosest_is_the_loops() -> None:
    # as hiprtc 7.2.4 does: one way leads out of line, the other over a branch that is always taken
    body = code(
        COPY, "s_cbranch_scc0 @9", wait(1), "s_mov_b32 s0, 2", "s_cbranch_execnz @6", wait(2),
        STORE, "s_cbranch_scc1 @0", "s_endpgm", "s_mov_b32 s0, 2", "s_branch @5",
    )  # fmt: skip
    assert counts(find_row_loop(body)) == [2]


def test_waits_that_follow_each_other_are_all_the_loops() -> None:
    in_line = code(LOAD, LOAD, wait(1), wait(0), STORE, "s_cbranch_scc1 @0", "s_endpgm")
    assert counts(find_row_loop(in_line)) == [1, 0]
    # behind a mask, which never hides all lanes
    masked = code(
        LOAD, LOAD, wait(1), "s_cbranch_execz @5", wait(0), STORE, "s_cbranch_scc1 @0", "s_endpgm"
    )
    assert counts(find_row_loop(masked)) == [1, 0]
    # on one side of a branch, and each before work of its own
    aside = code(
        LOAD, LOAD, "s_cbranch_scc0 @7", wait(1), wait(0), STORE, STORE, "s_cbranch_scc1 @0",
        "s_endpgm",
    )  # fmt: skip
    assert counts(find_row_loop(aside)) == [1, 0]
    apart = code(
        LOAD, LOAD, "s_cbranch_scc0 @5", wait(1), STORE, "s_cbranch_vccz @8", wait(0), STORE,
        "s_cbranch_scc1 @0", "s_endpgm",
    )  # fmt: skip
    assert counts(find_row_loop(apart)) == [1, 0]

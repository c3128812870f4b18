"""Loops and the way through them, on instructions written by hand."""

from __future__ import annotations

from assembly import COPY, LOAD, STORE, code, wait

from rmsnorm_raw.backends.flow import RowPath, find_row_loop, loops, row_path
from rmsnorm_raw.backends.isa import Instruction, bytes_before_first_wait


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


# ---- the way through -----------------------------------------------------------------------------

# rows are asked for ahead of the loop; the first waits tighter; a mask may skip the second store
RING = (
    COPY, "s_cbranch_scc1 @13", COPY, "s_cbranch_scc0 @6", wait(3), "s_branch @7", wait(1),
    "ds_read_b128 v[0:3], v0", STORE, "s_cbranch_execz @11", f"{STORE} offset:16",
    "s_nop 0", "s_cbranch_scc1 @2", wait(0), "s_endpgm",
)  # fmt: skip


def path(*lines: str, all_runs: bool, surely: tuple[int, ...] = ()) -> RowPath:
    found = row_path(code(*lines), all_runs=all_runs, surely=surely)
    assert found is not None
    return found


def test_the_way_of_a_wave_that_runs_all() -> None:
    before, first, settled, after, unwaited = path(*RING, all_runs=True)
    assert offsets(before) == [0, 1]
    assert counts(first) == [1]
    assert counts(settled) == [3]
    assert [one.offset // 4 for one in settled if one.access] == [2, 8, 10]
    assert offsets(after) == [13, 14]
    assert not unwaited


def test_the_way_of_a_wave_that_skips_what_it_may() -> None:
    found = path(*RING, all_runs=False)
    assert [one.offset // 4 for one in found.settled if one.access] == [2, 8]
    assert counts(found.first) == [1]
    kept = path(*RING, all_runs=False, surely=(40,))
    assert [one.offset // 4 for one in kept.settled if one.access] == [2, 8, 10]


def test_a_way_round_without_a_wait_is_seen() -> None:
    no_first = list(RING)
    no_first[6] = "s_nop 0"
    assert path(*no_first, all_runs=True).unwaited
    # not where a flag, which the first branch leaves, decides on the second wait
    flag = (
        COPY, "s_mov_b64 s[2:3], -1", "s_cbranch_scc0 @5", wait(2), "s_mov_b64 s[2:3], 0",
        "s_andn2_b64 vcc, exec, s[2:3]", "s_cbranch_vccnz @8", wait(1), STORE, "s_cbranch_scc1 @0",
        "s_endpgm",
    )  # fmt: skip
    assert not path(*flag, all_runs=True).unwaited
    lost = list(flag)
    lost[3] = "s_nop 0"
    assert path(*lost, all_runs=True).unwaited
    unknown = list(flag)
    unknown[4] = "s_mov_b32 s3, s9"
    assert path(*unknown, all_runs=True).unwaited is False  # either way, it waits for one of two
    unknown[1] = "s_mov_b64 s[2:3], s[8:9]"
    assert path(*unknown, all_runs=True).unwaited


def test_no_loop_has_no_way_through() -> None:
    assert row_path(code(LOAD, wait(0), STORE, "s_endpgm"), all_runs=True) is None

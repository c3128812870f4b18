"""The fences between blocks, on instructions written by hand; AMD's own are in ``tests/gfx950``."""

from __future__ import annotations

import pytest
from assembly import kernel, wait

from rmsnorm_raw.backends.fences import last_block_faults, word_faults

PARTIAL, FINISHED = "global_store_dword v[4:5], v0, off", "global_atomic_add v2, v3, v4, s[0:1] sc0"
TOTAL, BARRIER = "global_load_dword v6, v[4:5], off", "s_barrier"
WRITE_BACK, INVALIDATE = "buffer_wbl2 sc1", "buffer_inv sc1"
GOES_TO = {PARTIAL: "dweight|partial", FINISHED: "finished", TOTAL: "partial"}
RIGHT = (PARTIAL, WRITE_BACK, wait(0), BARRIER, FINISHED, BARRIER, INVALIDATE, TOTAL, "s_endpgm")


def last_block(*lines: str, waves: int = 4) -> list[str]:
    built = kernel(*lines)
    goes_to = {one.offset: GOES_TO[one.text] for one in built.asm if one.text in GOES_TO}
    return list(last_block_faults(built, goes_to, waves))


def without(*left_out: int) -> list[str]:
    return [line for at, line in enumerate(RIGHT) if at not in left_out]


def test_all_fences_are_there() -> None:
    assert last_block(*RIGHT) == []
    assert last_block(*without(3, 5), waves=1) == []  # no barriers where a block is one wave


@pytest.mark.parametrize(
    ("at", "said"),
    [(1, "no write-back"), (2, "no wait for it"), (3, "no barrier between the stores"),
     (5, "no barrier, invalidate"), (6, "no invalidate")],
)  # fmt: skip
def test_a_step_is_missing(at: int, said: str) -> None:
    (fault,) = last_block(*without(at))
    assert fault.startswith(said)


@pytest.mark.parametrize(("at", "other"), [(1, "buffer_wbl2 sc0"), (2, wait(1)), (6, "buffer_inv")])
def test_a_step_is_too_weak(at: int, other: str) -> None:
    assert len(last_block(*RIGHT[:at], other, *RIGHT[at + 1 :])) == 1


def test_a_fence_in_the_wrong_place() -> None:
    before = (WRITE_BACK, wait(0), PARTIAL, BARRIER, *RIGHT[4:])
    assert "no write-back" in last_block(*before)[0]
    early = (*RIGHT[:5], INVALIDATE, BARRIER, TOTAL, "s_endpgm")
    assert last_block(*early) == [
        "no invalidate (buffer_inv sc1) between the block's count and the loads of partial"
    ]


def test_a_way_that_leaves_a_fence_out() -> None:
    write_back = (PARTIAL, "s_cbranch_scc0 @4", WRITE_BACK, wait(0), BARRIER, *RIGHT[4:])
    assert "no write-back" in last_block(*write_back)[0]
    # only the wave that counts invalidates
    lone = (*RIGHT[:4], "s_cbranch_execz @6", FINISHED, BARRIER, "s_cbranch_scc0 @9", INVALIDATE,
            TOTAL, "s_endpgm")  # fmt: skip
    assert "no invalidate" in last_block(*lone)[0]
    # a store that some wave skips has nothing to be written back
    skipped = ("s_cbranch_execz @2", PARTIAL, *RIGHT[1:])
    assert last_block(*skipped) == []


def test_no_last_block_at_all() -> None:
    assert last_block(*without(4)) == ["no atomic of finished, and so no last block"]
    assert last_block(*without(7)) == ["no load of partial, and so no last block"]


PUBLISH = "global_store_dwordx2 v[0:1], v[2:3], off sc1"
ASK = "global_load_dwordx2 v[2:3], v[0:1], off sc1"


def words(*lines: str) -> list[str]:
    built = kernel(*lines, "s_endpgm")
    return list(word_faults(built, {one.offset: "words" for one in built.asm if one.access}))


def test_words_of_a_row_that_blocks_share() -> None:
    assert words(FINISHED, PUBLISH, ASK) == []
    assert words(FINISHED, PUBLISH.removesuffix(" sc1"), ASK) == [
        "store of words without sc1, which other dies need"
    ]
    assert words(FINISHED, PUBLISH, ASK.replace("x2 v[2:3]", " v2")) == [
        "load of words by 4 bytes, not 8 at once"
    ]
    assert words(FINISHED, PUBLISH) == ["no load of the words by which blocks meet"]

"""Row loops replayed, on instructions written by hand: rings and ping-pongs, right and wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from assembly import COPY, LOAD, STORE, kernel, wait

from rmsnorm_raw.backends.isa import Instruction
from rmsnorm_raw.backends.overlap import Ring, pingpong_faults, ring_faults

READ = "ds_read_b128 v[0:3], v0"
HERE = "s_waitcnt lgkmcnt(0)"


# ---- rings ---------------------------------------------------------------------------------------

# three stages of one copy; two rows are asked for ahead of the loop. A row's copy is followed by
# the copies of two rows and, when settled, by the stores of two
SETTLED = wait(4)


def ring(
    *, settled: str = SETTLED, first: str = wait(2), after_read: str = HERE, end: str = wait(0),
    ahead: Sequence[str] = (COPY, COPY), stores: int = 1, made: Sequence[str] = (COPY,),
) -> list[str]:  # fmt: skip
    """The faults of a ring whose loop begins at line 3 and chooses between two waits."""
    head = [*ahead, "s_nop 0"]
    top = len(head)
    choice = top + len(made)
    lines = [
        *head, *made, f"s_cbranch_scc0 @{choice + 3}", settled, f"s_branch @{choice + 4}", first,
        READ, after_read, *[STORE] * stores, f"s_cbranch_scc1 @{top}", end, "s_endpgm",
    ]  # fmt: skip
    return ring_faults(
        kernel(*lines), Ring(3, copies=1, stores=frozenset(), reads=1, read="ds_read_b128")
    )


def test_a_ring_that_is_right() -> None:
    assert ring() == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"settled": wait(5)}, "reads a stage while copies of its row are in flight"),
        ({"first": wait(3)}, "reads a stage while copies of its row are in flight"),
        ({"settled": wait(3)}, "3 younger operations in flight, not 4: a younger row was waited"),
        ({"settled": wait(0), "first": wait(0)}, "with no younger row in flight"),
        ({"settled": "s_nop 0"}, "can go round without a wait"),
        ({"first": "s_nop 0"}, "can go round without a wait"),
        ({"after_read": "s_nop 0"}, "refills a stage before its reads have come back"),
        ({"end": "s_barrier"}, "copies are in flight at s_barrier"),
        ({"end": "s_nop 0"}, "copies are in flight at s_endpgm"),
        ({"ahead": (COPY,)}, "1 copies before the row loop"),
        ({"made": (COPY, COPY)}, "2 in it, of 1 a row"),
    ],
)
def test_a_ring_that_is_wrong(changed: dict[str, str], said: str) -> None:
    faults = ring(**changed)  # type: ignore[arg-type]
    assert any(said in fault for fault in faults), faults


def test_a_first_row_that_was_peeled_off() -> None:
    peeled = (COPY, COPY, COPY, wait(2), READ, HERE, STORE)
    assert ring(ahead=peeled) == []
    assert ring(ahead=(COPY, COPY, COPY, READ, HERE, wait(2), STORE))


def test_a_ring_without_a_loop() -> None:
    one = Ring(2, copies=1, stores=frozenset(), reads=1, read="ds_read_b128")
    assert ring_faults(kernel(COPY, wait(0), READ, "s_endpgm"), one) == [
        "there is no loop over rows"
    ]


# ---- ping-pong -----------------------------------------------------------------------------------

PING, PONG = (f"global_load_dwordx4 v[{n}:{n + 3}], v[20:21], off" for n in (0, 4))
OUT = "global_store_dword v[20:21], v9, off"
USE_PING, USE_PONG = "v_add_f32_e32 v9, v0, v0", "v_add_f32_e32 v9, v4, v4"


def pingpong(*body: str) -> list[str]:
    """The faults of a loop of two rows, of one load each, the first of which is asked for ahead."""
    built = kernel(PING, *body, "s_cbranch_scc1 @1", "s_endpgm")
    loads = {one.offset for one in built.asm if is_load(one)}
    return pingpong_faults(built, loads, 1)


def is_load(one: Instruction) -> bool:
    return one.access is not None and one.access.kind == "load"


def test_a_pingpong_that_is_right() -> None:
    # of two rows' operations the older row's load and the store after it may be waited for
    assert pingpong(PONG, wait(1), USE_PING, OUT, PING, wait(1), USE_PONG, OUT) == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ((PONG, wait(0), USE_PING, OUT, PING, wait(1), USE_PONG, OUT), "leaves 0 of 1 loads"),
        ((PONG, USE_PING, OUT, PING, wait(1), USE_PONG, OUT), "uses what is still on its way"),
        ((wait(0), USE_PING, PONG, OUT, PING, wait(1), USE_PONG, OUT), "before the next one"),
        ((PONG, wait(1), USE_PING, OUT, OUT), "1 loads of the row loop, not 2 x 1"),
    ],
)
def test_a_pingpong_that_is_wrong(body: tuple[str, ...], said: str) -> None:
    faults = pingpong(*body)
    assert any(said in fault for fault in faults), faults


def test_a_pingpong_without_a_loop() -> None:
    assert pingpong_faults(kernel(LOAD, wait(0), "s_endpgm"), {0}, 1) == [
        "there is no loop over rows"
    ]

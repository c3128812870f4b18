"""The paths that overlap rows: right wherever copies land, and with a fault planted not."""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

import pytest

from rmsnorm_raw import check
from rmsnorm_raw.backends.cpu import CpuBackend, Landing, Order
from rmsnorm_raw.check import verify
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import SIMULATED
from rmsnorm_raw.errors import SimulatorError
from rmsnorm_raw.module import Binary, build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import Source, render

SEED = 7
ORDERS: tuple[Order, ...] = ("forward", "reverse", "shuffle")
WAVES = {"gfx950": 64, "gfx942": 64, "sm_90": 32}


def rendered(problem: Problem, slug: str, arch: str) -> Source:
    device = dataclasses.replace(SIMULATED[WAVES[arch]], arch=arch)
    return render(problem, Config.parse(slug), device)


def judged(problem: Problem, slug: str, binary: Binary) -> str:
    """What is wrong, "" for nothing."""
    try:
        return verify(problem, Config.parse(slug), binary, seed=SEED).message
    except SimulatorError as error:
        return str(error)


# ---- what is right passes ------------------------------------------------------------------------

FORWARD = Problem.forward(41, 2048, "bf16")  # whole chunks, and 10 or 11 rows a program
TAIL = Problem.forward(41, 2000, "bf16", weight_dtype="fp32")
FEW = Problem.forward(3, 1000, "bf16", weight_dtype=None)  # fewer rows than programs
NARROW = Problem.forward(37, 1002, "bf16", alignment=4)
BACKWARD = Problem.backward(41, 2048, "bf16")
TAIL_BACKWARD = Problem.backward(29, 1000, "fp16")

RIGHT = [
    (problem, slug, arch)
    for arch, cases in {
        "gfx950": (
            (FORWARD, "b256-t256-v16-pp-p1"), (BACKWARD, "b256-t128-v16-pp-p1"),
            (FORWARD, "b256-t256-v16-lds3-p1"), (FORWARD, "b256-t64-v8-lds2r-p2"),
            (TAIL, "b256-t128-v16-lds2r-p1"), (TAIL, "b256-t64-v16-lds4-ls-ss-p1"),
            (FEW, "b256-t64-v16-lds4-p1"), (FEW, "b128-t128-v8-lds3-p1"),
            (NARROW, "b128-t128-v4-lds3-p1"),
            (Problem.forward(20, 512, "fp32"), "b64-t64-v16-lds8r-p1"),
            (BACKWARD, "b256-t256-v16-lds3-p1"), (TAIL_BACKWARD, "b256-t64-v16-lds2r-p1"),
            (dataclasses.replace(BACKWARD, need_dx=False), "b256-t128-v16-lds2-p1"),
            (dataclasses.replace(TAIL_BACKWARD, has_rstd=False), "b256-t128-v8-lds3-p1-fl"),
        ),
        # every lane copies 4 bytes; six stages of two tensors count more than vmcnt can
        "gfx942": (
            (TAIL, "b256-t256-v16-lds3-p1"), (TAIL_BACKWARD, "b64-t64-v16-lds6-p1"),
            (FORWARD, "b128-t64-v8-lds2r-p1"),
        ),
        "sm_90": (
            (FORWARD, "b256-t256-v16-pp-p1"), (BACKWARD, "b256-t128-v16-pp-p1"),
            (FORWARD, "b256-t256-v16-lds3-p1"), (TAIL, "b256-t32-v16-lds2r-p1"),
            (FEW, "b256-t16-v16-lds2-p1"), (NARROW, "b128-t128-v4-lds3-p1"),
            (FORWARD, "b128-t64-v8-lds4-p2"),
            (BACKWARD, "b256-t128-v16-lds3-p1"), (TAIL_BACKWARD, "b128-t32-v16-lds2r-p1-fl"),
            (FORWARD, "b256-t256-v16-lds3b-p1"), (TAIL, "b128-t64-v16-lds3br-lk-p1"),
            (FEW, "b128-t16-v16-lds2b-p1"), (FORWARD, "b64-t32-v16-lds8br-p1"),
            (BACKWARD, "b128-t64-v16-lds3b-p1"), (TAIL_BACKWARD, "b128-t32-v16-lds2br-p1"),
            (dataclasses.replace(BACKWARD, need_dx=False), "b256-t128-v16-lds2b-p1"),
            (dataclasses.replace(TAIL_BACKWARD, has_rstd=False), "b256-t64-v16-lds2br-ls-p1"),
        ),
    }.items()
    for problem, slug in cases
]  # fmt: skip


@pytest.mark.parametrize(("problem", "slug", "arch"), RIGHT, ids=str)
def test_rows_on_their_way_are_right_wherever_they_land(
    problem: Problem, slug: str, arch: str
) -> None:
    source = rendered(problem, slug, arch)
    for order in ORDERS:
        backend = CpuBackend(WAVES[arch], order=order)
        assert judged(problem, slug, build(source, backend)) == "", order


# ---- and what is wrong fails ---------------------------------------------------------------------


class Fault(NamedTuple):
    """Pieces of the text and what takes their place; what is said where it shows, by landing."""

    problem: Problem
    slug: str
    arch: str
    pieces: dict[str, str]
    shows: dict[Landing, str]


AMD = (FORWARD, "b256-t128-v16-lds3-p1", "gfx950")
LANES = (FORWARD, "b256-t128-v16-lds3-p1", "sm_90")
BULK = (FORWARD, "b128-t64-v16-lds3b-p1", "sm_90")
BULK_AGAIN = (FORWARD, "b128-t64-v16-lds3br-p1", "sm_90")
EARLY_COUNT = "wait_memory<COPIES < 63 ? COPIES : 63>();"
LATER_COUNT = "wait_memory<ALL < 63 ? ALL : 63>();"
ROW_BEFORE = "fill(now == 0 ? RR_STAGES - 1 : now - 1,"
AMD_FILL = "    const u32 wave = uniform(lane / RR_WAVE);\n"
BULK_WAIT = "barrier_wait(barriers + now, trip & 1);"
REFILL_LATE = "    if (RR_BULK) ring.refill(row, step);\n"
REFILL_EARLY = "    if (!RR_BULK) ring.refill(row, step);\n    ring.wait();\n"
STALE = r"y\[\d+, \d+\] is "
IN_FLIGHT = "copies in flight when the block ends"
ONE_MORE = "mbarrier: more than 2 arrivals in a phase"

FAULTS = {
    "AMD: no wait": Fault(*AMD, {EARLY_COUNT: "", LATER_COUNT: ""}, {"wait": r"y\[0, 0\] is nan"}),
    "AMD: no wait at the end": Fault(*AMD, {"wait_memory<0>();": ""}, {"wait": IN_FLIGHT}),
    "AMD: a wait one row too loose": Fault(
        *AMD, {"COPIES = (RR_STAGES - 1) * ROW": "COPIES = RR_STAGES * ROW"},
        {"wait": r"y\[0, 0\] is nan"},
    ),
    "AMD: stores of one row too many counted": Fault(
        *AMD, {"COPIES + (RR_STAGES - 1) * ROW": "COPIES + RR_STAGES * ROW"}, {"wait": STALE}
    ),
    "AMD: stores counted before there are any": Fault(
        *AMD, {"if (worked_on < RR_STAGES - 1) {": "if (false) {"}, {"wait": r"y\[0, 0\] is nan"}
    ),
    "AMD: stores counted that only some waves make": Fault(
        TAIL, "b256-t128-v16-lds3-p1", "gfx950",
        {"(FULL_CHUNKS ? RR_CHUNKS : RR_CHUNKS - 1)": "RR_CHUNKS"}, {"wait": STALE},
    ),
    "AMD: no copies past the last row": Fault(
        *AMD, {AMD_FILL: "    if (!exists) return;\n" + AMD_FILL}, {"wait": STALE}
    ),
    "AMD: a copy into the stage that is read": Fault(
        *AMD, {ROW_BEFORE: "fill(now,"}, {"issue": STALE, "wait": r"is nan"}
    ),
    "AMD: a destination for every lane": Fault(
        *AMD, {"slot_offset + skip)": "slot_offset + skip + lane % RR_WAVE * COPY_BYTES)"},
        dict.fromkeys(("issue", "wait"), "lanes of a wave with different LDS addresses"),
    ),
    "lanes: no wait": Fault(*LANES, {"wait_groups(RR_STAGES - 1);": ""}, {"wait": IN_FLIGHT}),
    "lanes: a wait one row too loose": Fault(
        *LANES, {"wait_groups(RR_STAGES - 1);": "wait_groups(RR_STAGES);"}, {"wait": IN_FLIGHT}
    ),
    "lanes: no group past the last row": Fault(
        *LANES, {"    commit_copies();\n": "    if (exists) commit_copies();\n"},
        {"wait": IN_FLIGHT},
    ),
    "lanes: a copy into the stage that is read": Fault(
        *LANES, {ROW_BEFORE: "fill(now,"}, {"issue": STALE, "wait": r"is nan"}
    ),
    "bulk: no wait": Fault(*BULK, {BULK_WAIT: ""}, {"issue": r"is nan", "wait": ONE_MORE}),
    "bulk: the other parity": Fault(
        *BULK, {BULK_WAIT: "barrier_wait(barriers + now, (trip & 1) ^ 1);"},
        {"issue": "deadlock: no wave can go on", "wait": ONE_MORE},
    ),
    "bulk: a refill before the row's barrier": Fault(
        *BULK, {REFILL_LATE: "", REFILL_EARLY: "    ring.wait();\n" + REFILL_LATE},
        dict.fromkeys(("issue", "wait"), r"divergent wave operation|deadlock"),
    ),
    "bulk, read again: a refill before the row's barrier": Fault(
        *BULK_AGAIN, {REFILL_LATE: "", REFILL_EARLY: "    ring.wait();\n" + REFILL_LATE},
        {"issue": STALE},
    ),
    "bulk, read again: a refill after the first row": Fault(
        *BULK_AGAIN, {"!RR_BULK || trip || now": "true"},
        {"issue": "deadlock: no wave can go on", "wait": ONE_MORE},
    ),
    "bulk: no arrival for a row that does not exist": Fault(
        *BULK, {"    if (lane == 0) {\n": "    if (lane == 0 && exists) {\n"},
        dict.fromkeys(("issue", "wait"), r"deadlock: .* arrivals 1, "),
    ),
    "bulk: an arrival too few": Fault(
        *BULK, {"barriers + stage, BLOCK_ROWS)": "barriers + stage, BLOCK_ROWS + 1)"},
        dict.fromkeys(("issue", "wait"), r"deadlock: .* arrivals 1, "),
    ),
    "bulk: the bytes of one tensor of two": Fault(
        BACKWARD, *BULK[1:], {"exists ? RR_RING_TENSORS * bytes": "exists ? bytes"},
        {"issue": r"deadlock: .* arrivals 0, bytes -", "wait": IN_FLIGHT},
    ),
    "bulk: mbarriers used at once": Fault(
        *BULK, {"    __syncthreads();\n#endif\n#pragma": "#endif\n#pragma"},
        dict.fromkeys(("issue", "wait"), r"mbarrier at byte \d+ of LDS used before its init"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_ring_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    monkeypatch.setattr(check, "landings", lambda backend, source: (backend,))
    right = rendered(fault.problem, fault.slug, fault.arch)
    text = right.text
    for old, new in fault.pieces.items():
        assert old in text, "the text has changed: plant this fault anew"
        text = text.replace(old, new)
    wrong = dataclasses.replace(right, text=text)
    seen: dict[Landing, list[str]] = {"issue": [], "wait": []}
    for landing, found in seen.items():
        for order in ORDERS:
            backend = CpuBackend(WAVES[fault.arch], order=order, landing=landing)
            assert judged(fault.problem, fault.slug, build(right, backend)) == ""
            found.append(judged(fault.problem, fault.slug, build(wrong, backend)))
        said = [message for message in found if message]
        assert bool(said) == (landing in fault.shows), (landing, said)
        assert all(re.search(fault.shows[landing], message) for message in said), said


@pytest.mark.parametrize(
    "name", ["AMD: no wait", "bulk, read again: a refill before the row's barrier"]
)
def test_the_gate_finds_what_shows_in_one_landing_alone(name: str) -> None:
    fault = FAULTS[name]
    source = rendered(fault.problem, fault.slug, fault.arch)
    text = source.text
    for old, new in fault.pieces.items():
        text = text.replace(old, new)
    binary = build(dataclasses.replace(source, text=text), CpuBackend(WAVES[fault.arch]))
    (landing,) = fault.shows
    assert re.search(fault.shows[landing], judged(fault.problem, fault.slug, binary))

"""The memory paths in machine code, by each ROCm that is here: what hides memory and what does not.

Beside what the static gate holds. A check gives the faults that it finds, so that planted ones can
show that it sees them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from amd_kernels import compiled, edited, rows_kernel

from rmsnorm_raw.backends.isa import MAX_VMCNT, Instruction
from rmsnorm_raw.backends.kernel_report import KernelReport
from rmsnorm_raw.backends.static_gate import gate
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.space import chunks, enumerate_configs, reject_reason

pytestmark = pytest.mark.gfx950

#: the headline width, whose rows take whole blocks, and a narrow one, with a wave or two a row
WIDE_FORWARD = Problem.forward(32768, 8192, "bf16")
NARROW_FORWARD = Problem.forward(32768, 1024, "bf16")
WIDE_BACKWARD = Problem.backward(32768, 8192, "bf16")
NARROW_BACKWARD = Problem.backward(32768, 1024, "bf16")
#: a weight that takes as many registers as the row
FP32_WEIGHT = Problem.forward(32768, 8192, "bf16", weight_dtype="fp32")

REGISTERS = (
    (WIDE_FORWARD, "b256-reg"), (NARROW_FORWARD, "b256-t64-reg"), (NARROW_FORWARD, "b128-reg"),
    (WIDE_BACKWARD, "b512-reg-p1"), (NARROW_BACKWARD, "b256-t64-reg-p2"),
    (NARROW_BACKWARD, "b128-reg-p4"),
)  # fmt: skip
PINGPONG = (
    (WIDE_FORWARD, "b256-pp-p2"), (FP32_WEIGHT, "b256-pp-p2"), (NARROW_FORWARD, "b256-t64-pp-p2"),
    (NARROW_FORWARD, "b128-pp-p4"), (WIDE_BACKWARD, "b512-pp-p1"),
    (NARROW_BACKWARD, "b256-t64-pp-p2"),
    (NARROW_BACKWARD, "b128-pp-p4"),
)  # fmt: skip
LDS = (
    (WIDE_FORWARD, "b256-lds3-p2"), (FP32_WEIGHT, "b256-lds3-p2"), (WIDE_FORWARD, "b512-lds2r-p1"),
    (NARROW_FORWARD, "b256-t64-lds4-p2"), (WIDE_BACKWARD, "b512-lds3-p1"),
    (WIDE_BACKWARD, "b512-lds3r-p1"), (NARROW_BACKWARD, "b256-t64-lds3-p2"),
    (NARROW_BACKWARD, "b128-lds8-p2"),
)  # fmt: skip
TWO_PASS = (
    (WIDE_FORWARD, "b256-2p"), (NARROW_FORWARD, "b64-2p"),
    (WIDE_BACKWARD, "b256-2p-p4"), (NARROW_BACKWARD, "b64-2p-p4"),
)  # fmt: skip
LADDER = tuple(
    (problem, None) for problem in (WIDE_FORWARD, NARROW_FORWARD, WIDE_BACKWARD, NARROW_BACKWARD)
)


def name(value: object) -> str:
    return str(value).replace(" ", "-") if isinstance(value, Problem) else str(value or "ladder")


def cases(these: Iterable[tuple[Problem, str | None]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("problem", "slug"), these, ids=name)


def row_moves(problem: Problem, config: Config) -> int:
    """Times that a lane moves ``vec`` bytes to have a row of each tensor that is read."""
    return chunks(problem, config) * (1 if problem.op == "forward" else 2)


# ---- all paths -----------------------------------------------------------------------------------


@cases((*LADDER, *REGISTERS, *PINGPONG, *LDS, *TWO_PASS))
def test_the_static_gate(problem: Problem, slug: str | None, libraries: Path) -> None:
    config, code = compiled(problem, "gfx950", libraries, slug)
    assert code.log == ""
    assert gate(problem, config, code) == []
    assert bool(rows_kernel(code).row_loop()) >= (config.path in ("pingpong", "lds"))


def spills(kernel: KernelReport) -> bool:
    """Whether values move through accumulation registers or through memory."""
    return bool(kernel.agpr or kernel.vgpr_spills or kernel.scratch_bytes)


def test_what_the_space_keeps_to_overlap_rows_does_not_spill(libraries: Path) -> None:
    kept = enumerate_configs(WIDE_BACKWARD, KNOWN["gfx950"]).kept
    # neither policies nor stages nor programs change what a lane keeps: one of each other kind
    kinds = {(it.block, it.threads_per_row, it.path, it.reread): it for it in kept[::-1]}
    slugs = [it.slug for it in kinds.values() if it.path in ("pingpong", "lds")]
    assert len(slugs) >= 12
    assert [
        slug
        for slug in slugs
        if spills(rows_kernel(compiled(WIDE_BACKWARD, "gfx950", libraries, slug)[1]))
    ] == []


@pytest.mark.parametrize(
    "slug",
    [
        "b128-lds2-p1", "b256-t128-lds2-p1", "b128-t64-lds2r-p1", "b256-pp-p1", "b1024-t512-pp-p1",
        "b128-reg-p1", "b128-reg-w2-p1", "b512-t128-reg-p1",
    ],
)  # fmt: skip
def test_what_the_space_refuses_for_its_registers_spills(
    slug: str, libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = reject_reason(WIDE_BACKWARD, KNOWN["gfx950"], Config.parse(slug))
    assert "registers a lane" in (reason or "")
    monkeypatch.setattr("rmsnorm_raw.source.require_fit", lambda *_: None)
    assert spills(rows_kernel(compiled(WIDE_BACKWARD, "gfx950", libraries, slug)[1]))


# ---- registers -----------------------------------------------------------------------------------


def late_loads(kernel: KernelReport) -> list[str]:
    """Loads that are issued between the first wait for a load and the stores: a second latency."""
    body = kernel.row_loop() or kernel.asm
    first = next(i for i, each in enumerate(body) if is_load(each))
    late, waited = [], False
    for each in (*body[first:], *body[:first]):
        if each.vmcnt is not None:
            waited = True
        elif each.access and each.access.kind == "store":
            waited = False
        elif waited and is_load(each):
            late.append(f"{each.offset:#x} {each.text}")
    return late


def is_load(each: Instruction) -> bool:
    return each.access is not None and each.access.kind == "load"


@cases(REGISTERS)
def test_a_row_in_registers_waits_for_memory_once(
    problem: Problem, slug: str, libraries: Path
) -> None:
    _, code = compiled(problem, "gfx950", libraries, slug)
    assert late_loads(rows_kernel(code)) == []


def test_a_row_that_asks_for_its_rstd_at_the_last_moment_is_seen(libraries: Path) -> None:
    atomic = "return __hip_atomic_load(base + row, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WAVEFRONT);"
    edit = (atomic, "return base[row];")
    _, code = edited(NARROW_BACKWARD, "b256-t64-reg-p2", "gfx950", libraries, (edit,))
    assert late_loads(rows_kernel(code))


# ---- LDS ring ------------------------------------------------------------------------------------


@cases(LDS)
def test_every_stage_of_a_ring_is_full_when_a_row_is_waited_for(
    problem: Problem, slug: str, libraries: Path
) -> None:
    config, code = compiled(problem, "gfx950", libraries, slug)
    in_flight_bytes = config.stages * row_moves(problem, config) * config.vec
    counted = MAX_VMCNT * config.vec
    assert rows_kernel(code).bytes_before_first_wait == in_flight_bytes or in_flight_bytes > counted


# 160 KiB of LDS become 64, copies 4 bytes; the last has more copies than the counter can count
@cases(
    (
        (WIDE_FORWARD, "b256-lds3-p1"), (NARROW_BACKWARD, "b256-t64-lds3-p1"),
        (NARROW_BACKWARD, "b128-lds4-p1"), (Problem.backward(32768, 4096, "bf16"), "b128-lds3-p1"),
    )
)  # fmt: skip
def test_a_ring_of_gfx942_copies_four_bytes_a_lane(
    problem: Problem, slug: str, libraries: Path
) -> None:
    config, code = compiled(problem, "gfx942", libraries, slug)
    assert gate(problem, config, code) == []
    copies = {group for group in rows_kernel(code).mix if "to LDS" in group}
    assert copies == {"buffer load to LDS 4 B"}


# ---- rstd of a row -------------------------------------------------------------------------------


def scalar_stalls(kernel: KernelReport) -> list[str]:
    """Scalar loads of the row loop whose wait comes before the wait for a row.

    Scalar loads come back in any order: the next ``lgkmcnt`` wait, be it for LDS, waits for them.
    Only a wait for a row, which takes as long as they do, hides them.
    """
    body = kernel.row_loop()
    stalls = []
    for i, each in enumerate(body):
        if each.group == "scalar load":
            for later in (*body[i + 1 :], *body[:i]):
                if later.vmcnt is not None:
                    break
                if "lgkmcnt" in later.text:
                    stalls.append(f"{each.offset:#x} {each.text}, waited for at {later.offset:#x}")
                    break
    return stalls


@cases([case for case in (*REGISTERS, *PINGPONG, *LDS) if case[0].op == "backward"])
def test_rstd_comes_with_its_row(problem: Problem, slug: str, libraries: Path) -> None:
    _, code = compiled(problem, "gfx950", libraries, slug)
    assert scalar_stalls(rows_kernel(code)) == []


def test_an_rstd_that_is_asked_for_after_the_rings_wait_is_seen(libraries: Path) -> None:
    ask, wait = "    const float next = load_rstd(row + step);\n", "    ring.wait();\n"
    edits = ((ask + wait, wait + ask),)
    _, code = edited(WIDE_BACKWARD, "b512-lds3-p1", "gfx950", libraries, edits)
    assert scalar_stalls(rows_kernel(code))

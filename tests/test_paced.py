"""Programs that are paced: the bits of those that are not, and waits that have an end."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from by_hand import SEED, assert_same, outputs

from rmsnorm_raw.backends.cpu import CpuBackend, Order
from rmsnorm_raw.check import verify
from rmsnorm_raw.config import Config
from rmsnorm_raw.module import Binary, build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render

ORDERS: tuple[Order, ...] = ("forward", "reverse", "shuffle")
PROGRAMS = 4  # the simulated device has as many multiprocessors
BACKEND = CpuBackend(32)


def built(problem: Problem, slug: str, old: str = "", new: str = "") -> Binary:
    source = render(problem, Config.parse(slug), BACKEND.device, runtime_cols=True)
    assert old in source.text, "the text has changed: plant this fault anew"
    text = source.text.replace(old, new) if old else source.text
    return build(dataclasses.replace(source, text=text), BACKEND)


LONG = Problem.backward(60, 1024, "bf16")
RIGHT = [
    (LONG, "b256-t128-v16-lds3bp-p1"),
    (LONG, "b128-t64-v16-lds2brp-p1"),
    (Problem.backward(41, 1000, "fp16", weight_dtype="fp32"), "b128-t32-v16-lds3brp-lk-ss-p1"),
    (Problem.backward(41, 1000, "fp32", has_rstd=False), "b128-t128-v16-lds2bp-p2"),
    (Problem.backward(41, 1000, "bf16", need_dx=False), "b256-t64-v16-lds2bp-p1"),
    (Problem.backward(41, 1000, "bf16", need_dweight=False), "b64-t64-v16-lds4bp-p1"),
    (Problem.backward(41, 1000, "bf16", weight_dtype=None), "b64-t64-v16-lds2brp-p1"),
    (Problem.backward(41, 1000, "bf16"), "b128-t64-v16-lds2bp-p1-fl"),
    (Problem.backward(3, 1000, "bf16"), "b64-t64-v16-lds2bp-p1"),
]


@pytest.mark.parametrize(("problem", "slug"), RIGHT, ids=str)
def test_paced_programs_pass_the_gate(problem: Problem, slug: str) -> None:
    source = render(problem, Config.parse(slug), BACKEND.device, runtime_cols=True)
    for order in ORDERS:
        binary = build(source, CpuBackend(32, order=order))
        verdict = verify(problem, Config.parse(slug), binary, seed=SEED)
        assert verdict.passed, f"{order}: {verdict}"


@pytest.mark.parametrize("ring", ["b256-t128-v16-lds3b", "b128-t128-v16-lds2br"])
def test_pacing_changes_no_bit_whatever_the_count_was(ring: str) -> None:
    plain = outputs(LONG, f"{ring}-p1", built(LONG, f"{ring}-p1"))
    slug = f"{ring}p-p1"
    binary = built(LONG, slug)
    steps = sum(len(range(first, 60, 4 * rows)) for rows in [int(ring[1:4]) // 128]
                for first in range(0, 4 * rows, rows))  # fmt: skip
    for count in (0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF - 20, 0x9E3779B9):
        got = outputs(LONG, slug, binary, np.array([count], np.uint32))
        assert_same(got, plain)
        after = got["workspace"][-4:].view(np.uint32)[0]
        assert after == (count + steps) % (1 << 32)  # each program has counted each of its steps


def naps(steps: int, nap: str, count: int = 0) -> tuple[np.ndarray, int]:
    """How often each program naps, where all have so many steps, and the count at the end.

    Blocks run one after another here: to each the others seem to stand still. The dx and dweight
    are those of a kernel as it is.
    """
    problem = Problem.backward(PROGRAMS * 2 * steps, 1024, "bf16")
    slug = "b256-t128-v16-lds3bp-p1"  # two rows of 2 KiB a step
    counted = built(problem, slug, "        nap();\n", f"        nap(); {nap}\n")
    before = np.array([count, *[0] * PROGRAMS], np.uint32)
    got = outputs(problem, slug, counted, before, beyond_bytes=4 * PROGRAMS)
    assert_same(got, outputs(problem, slug, built(problem, slug)))
    end, *of_programs = got["workspace"].view(np.uint32)[-1 - PROGRAMS :]
    return np.array(of_programs), int(end)


COUNT = "atomicAdd(progress + 1 + blockIdx.x, 1u);"


@pytest.mark.parametrize("count", [0, 0xFFFFFFFF, 0x7FFFFFF0])
@pytest.mark.parametrize(
    ("steps", "each"),
    [
        (1, 0),
        (6, 0),  # 4 * 6 steps of all wanted, 5 seen: ahead by 19, of one step of each and 16 KiB
        (7, 10),  # ahead by 22 of at most 20: ten naps, and nobody has come nearer
        (40, 10),  # who has given up does not wait again
    ],
)
def test_a_program_gives_up_on_others_that_do_not_run(steps: int, each: int, count: int) -> None:
    of_programs, end = naps(steps, COUNT, count)
    np.testing.assert_array_equal(of_programs, each)
    assert end == (count + PROGRAMS * steps) % (1 << 32)


def test_a_program_goes_on_waiting_for_others_that_come_nearer() -> None:
    """While it naps the three others do a step each: one nap a step, from the seventh on."""
    of_programs, _ = naps(40, COUNT + " atomicAdd(progress, 3u);")
    np.testing.assert_array_equal(of_programs, 40 - 6)


def test_a_count_outside_the_workspace_is_found() -> None:
    slug = "b256-t128-v16-lds3bp-p1"
    binary = built(LONG, slug, "pace.open(progress)", "pace.open(progress + 1)")
    verdict = verify(LONG, Config.parse(slug), binary, seed=SEED)
    assert not verdict.passed
    assert "workspace: byte 0 after the last row was written" in verdict.message

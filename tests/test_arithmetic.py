"""Roundings in machine code, on instructions written by hand; AMD's own are in ``tests/gfx950``."""

from __future__ import annotations

import pytest
from assembly import kernel

from rmsnorm_raw.backends.arithmetic import arithmetic_faults
from rmsnorm_raw.config import Config
from rmsnorm_raw.problem import Problem

FP8 = Problem.forward(32, 128, "bf16", out_dtype="float8_e4m3fn", scale="static")
MOST, LEAST = "s_mov_b32 s0, 0x43e00000", "v_mov_b32_e32 v9, 0xc3e00000"
BELOW, ABOVE = "v_cndmask_b32_e32 v1, v9, v1, vcc", "v_cndmask_b32_e64 v1, s0, v1, s[2:3]"
CONVERT, STORE = "v_cvt_pk_fp8_f32 v2, v1, v1", "global_store_short v3, v2, s[4:5]"
DPP = "v_add_f32_dpp v6, v6, v6 row_mirror row_mask:0xf bank_mask:0xf"
RIGHT = (MOST, LEAST, BELOW, ABOVE, CONVERT, STORE, DPP, "s_endpgm")


def faults(*lines: str, problem: Problem = FP8) -> list[str]:
    """What is said of a kernel whose stores are all of y."""
    built = kernel(*lines)
    goes_to = {one.offset: "y" for one in built.asm if one.access}
    return list(arithmetic_faults(problem, Config(), built, goes_to))


def replaced(at: int, *lines: str) -> list[str]:
    return [*RIGHT[:at], *lines, *RIGHT[at + 1 :]]


NOT_HELD = ["2 numbers go to v_cvt_pk_fp8_f32 and are not held to +-448"]


@pytest.mark.parametrize(
    "lines",
    [
        RIGHT,
        replaced(2, "v_max_f32_e32 v1, 0xc3e00000, v1"),
        replaced(3, "v_min_f32_e32 v1, s0, v1", "v_mov_b32_e32 v4, v1", "v_mov_b32_e32 v1, v4"),
        (MOST, LEAST, "v_med3_f32 v1, v1, v9, s0", *RIGHT[4:]),
        replaced(4, "v_cvt_pk_fp8_f32 v2, v1, 0"),
    ],
)
def test_numbers_that_are_held_before_they_are_converted(lines: tuple[str, ...]) -> None:
    assert faults(*lines) == []


@pytest.mark.parametrize(
    "lines",
    [
        replaced(2),
        replaced(3),
        (MOST, LEAST, ABOVE, CONVERT, BELOW, STORE, DPP, "s_endpgm"),
        replaced(1, "v_mov_b32_e32 v9, 0xc2e00000"),  # another number
        replaced(3, ABOVE, "v_add_f32_e32 v1, v1, v1"),
        replaced(3, "v_cndmask_b32_e64 v1, s0, -v1, s[2:3]"),
        replaced(2, BELOW, "s_mov_b32 s0, s7"),
        replaced(3, ABOVE, "v_cndmask_b32_e32 v1, v1, v5, vcc"),  # or one that is not held
        replaced(3, "s_cbranch_scc0 @5", ABOVE),  # or by one way alone
    ],
)
def test_numbers_that_are_not(lines: tuple[str, ...]) -> None:
    assert faults(*lines) == NOT_HELD


def test_bounds_that_a_loop_finds_set() -> None:
    loop = (MOST, LEAST, BELOW, ABOVE, CONVERT, STORE, "s_cbranch_scc1 @2", DPP, "s_endpgm")
    assert faults(*loop) == []
    assert faults(*loop[:6], "s_mov_b32 s0, 0", "s_cbranch_scc1 @2",
                  DPP, "s_endpgm") == NOT_HELD  # fmt: skip


def test_a_conversion_that_is_not_the_hardwares() -> None:
    assert faults(*replaced(4, "v_perm_b32 v2, v1, v1, s9")) == [
        "0 v_cvt_pk_fp8_f32 for 1 pairs of fp8 that are stored"
    ]


@pytest.mark.parametrize(
    ("problem", "roundings"),
    [
        (Problem.forward(32, 128, "bf16"), 4),  # eight of y
        (Problem.forward(32, 128, "fp16", residual_dtype="bf16"), 0),  # residual_out is not stored
        (Problem.forward(32, 128, "bf16", casting="llama"), 8),
        (Problem.forward(32, 128, "fp16", casting="llama", out_dtype="bf16"), 4),
    ],
    ids=str,
)
def test_pairs_of_bf16(problem: Problem, roundings: int) -> None:
    store = ("global_store_dwordx4 v3, v[4:7], s[4:5]", DPP, "s_endpgm")
    packed = ["v_cvt_pk_bf16_f32 v4, v1, v2"] * roundings
    assert faults(*packed, *store, problem=problem) == []
    if roundings:
        (fault,) = faults(*packed[1:], *store, problem=problem)
        assert fault.startswith(f"{roundings - 1} v_cvt_pk_bf16_f32 for {roundings} pairs of bf16")


def test_a_gradient_of_one_dtype_is_rounded_once() -> None:
    problem = Problem.backward(32, 128, "bf16", residual_dtype="bf16")
    stores = ("global_store_dwordx4 v3, v[4:7], s[4:5]", "global_store_dwordx4 v3, v[4:7], s[6:7]")
    for packed, right in ((4, True), (3, False)):
        built = kernel(*["v_cvt_pk_bf16_f32 v4, v1, v2"] * packed, *stores, DPP, "s_endpgm")
        written = [one.offset for one in built.asm if one.access]
        goes_to = dict(zip(written, ("dx", "dresidual"), strict=True))
        assert (not list(arithmetic_faults(problem, Config(), built, goes_to))) is right

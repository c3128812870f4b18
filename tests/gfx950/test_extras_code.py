"""The static gate on problems with extras: every one of them passes, and planted faults are named.

As in ``test_ladder_and_knobs.py`` and ``test_gate_faults.py``, which have the plain operation.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from amd_kernels import compiled
from test_gate_faults import (
    ALL,
    KEPT,
    KEPT_AGAIN,
    LATE_ROW,
    LOAD,
    NARROW_LOAD,
    ROUNDED,
    SQUARES,
    TRUNCATED,
    check,
    twice,
)
from whole_problems import whole_problems

from rmsnorm_raw.backends.kernel_report import CU_BYTES_WANTED
from rmsnorm_raw.backends.offline import OfflineBackend
from rmsnorm_raw.backends.static_gate import gate, tensors
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.dtypes import fp8_dtype
from rmsnorm_raw.launch import launches
from rmsnorm_raw.module import build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render
from rmsnorm_raw.space import inert_reason, lane_registers, reject_reason

pytestmark = pytest.mark.gfx950

OCP, GFX950 = "float8_e4m3fn", KNOWN["gfx950"]


def forward(cols: int, dtype: str, **more: Any) -> Problem:
    return Problem.forward(32768, cols, dtype, **more)


def backward(cols: int, dtype: str, **more: Any) -> Problem:
    return Problem.backward(32768, cols, dtype, **more)


RESIDUAL = forward(8192, "bf16", residual_dtype="bf16")
WIDE_RESIDUAL = forward(8192, "bf16", residual_dtype="fp32")
NARROW_RESIDUAL = forward(1000, "bf16", residual_dtype="bf16", bias_dtype="bf16")
DYNAMIC = forward(4096, "bf16", out_dtype=OCP, scale="dynamic", residual_dtype="bf16")
STATIC = forward(4096, "bf16", out_dtype=OCP, scale="static")
HEADS = forward(128, "bf16", heads=8, per_head=True, bias_dtype="bf16")
GRADIENT = backward(8192, "bf16", dresidual_out_dtype="bf16")
BOTH_GRADIENTS = backward(4096, "bf16", dresidual_out_dtype="fp32", residual_dtype="fp32")
BIAS = backward(1024, "bf16", bias_dtype="bf16")
HEADS_BACKWARD = backward(128, "bf16", heads=8, per_head=True, bias_dtype="bf16")
PATHS = (
    (RESIDUAL, "b256-pp-ls-ss-p1"), (RESIDUAL, "b256-lds3-p1"), (RESIDUAL, "b512-lds2r-p1"),
    (RESIDUAL, "b256-2p-ss"), (RESIDUAL, "b128-t256-ls"), (WIDE_RESIDUAL, "b512-pp-p1"),
    (WIDE_RESIDUAL, "b256-2p"), (NARROW_RESIDUAL, "b256-t64-lds3-p2"),
    (NARROW_RESIDUAL, "b256-t64-pp-p2"), (DYNAMIC, "b256-lds2-ss-p1"), (DYNAMIC, "b256-pp-p1"),
    (DYNAMIC, "b256-2p-ls"), (STATIC, "b256-lds3-p1"), (STATIC, "b128-t256"),
    (HEADS, "b128-t16-pp-p2"), (HEADS, "b64-t64-lds2-p1"), (GRADIENT, "b512-lds3-ls-ss-p1"),
    (GRADIENT, "b512-lds2r-p1"), (GRADIENT, "b512-2p-ss-p1"), (GRADIENT, "b512-reg-ls-p1"),
    (BOTH_GRADIENTS, "b256-2p-p2"), (BOTH_GRADIENTS, "b512-pp-ls-ss-p1"), (BIAS, "b128-t64-p2"),
    (BIAS, "b256-t64-lds3-p1"), (BIAS, "b256-2p-p4"), (HEADS_BACKWARD, "b128-t16-p2"),
)  # fmt: skip


#: rows of whole chunks, with a tail, and too wide to be kept; those of one head are often the same
LADDER = list(
    dict.fromkeys(
        problem for cols in (4096, 1000, 65536) for problem in whole_problems(32768, cols)
    )
)
#: dbias is all that is asked for
BIAS_ALONE = [
    problem for problem in LADDER
    if problem.op == "backward" and not (problem.need_dx or problem.need_dweight)
]  # fmt: skip


def name(value: object) -> str:
    return re.sub("[ ,+]+", "-", str(value))


def fitting(problem: Problem, arch: str) -> Problem:
    """The problem with the 8-bit y that a device converts to."""
    if problem.extras.scale == "none":
        return problem
    return replace(problem, extras=replace(problem.extras, out_dtype=fp8_dtype(arch)))


def passes(problem: Problem, arch: str, libraries: Path, slug: str | None = None) -> None:
    """A config, by default the ladder's, compiles without a word and has no fault."""
    config, code = compiled(problem, arch, libraries, slug)
    assert code.log == ""
    assert gate(problem, config, code) == []


@pytest.mark.parametrize("problem", LADDER, ids=name)
def test_the_ladder_with_extras(problem: Problem, libraries: Path) -> None:
    passes(problem, "gfx950", libraries)


@pytest.mark.parametrize("problem", LADDER[::2], ids=name)
def test_the_ladder_of_gfx942_with_extras(problem: Problem, libraries: Path) -> None:
    passes(fitting(problem, "gfx942"), "gfx942", libraries)


@pytest.mark.parametrize(("problem", "slug"), PATHS, ids=name)
def test_a_path_with_extras(problem: Problem, slug: str, libraries: Path) -> None:
    passes(problem, "gfx950", libraries, slug)


FITS_GFX942 = [
    case for case in PATHS
    if not reject_reason(fitting(case[0], "gfx942"), KNOWN["gfx942"], Config.parse(case[1]))
]  # fmt: skip


@pytest.mark.parametrize(("problem", "slug"), FITS_GFX942[::3], ids=name)
def test_a_path_of_gfx942_with_extras(problem: Problem, slug: str, libraries: Path) -> None:
    passes(fitting(problem, "gfx942"), "gfx942", libraries, slug)


@pytest.mark.parametrize("bias", [None, "bf16", "fp32"])
@pytest.mark.parametrize("scale", [{}, {"out_dtype": OCP, "scale": "static"},
                                   {"out_dtype": OCP, "scale": "dynamic"}], ids=name)  # fmt: skip
def test_two_passes_take_no_more_registers_than_was_foreseen(
    bias: str | None, scale: dict[str, Any], libraries: Path
) -> None:
    """With a weight and a bias of 16 bits, and an 8-bit y, 1024 lanes have not enough."""
    problem = forward(65536, "bf16", bias_dtype=bias, **scale)
    for block in (1024, 512, 256):
        slug = f"b{block}-2p"
        if reject_reason(problem, GFX950, Config.parse(slug)):
            assert (block, bias, bool(scale)) == (1024, "bf16", True)
            continue
        passes(problem, "gfx950", libraries, slug)
        config, code = compiled(problem, "gfx950", libraries, slug)
        foreseen = lane_registers(problem, config, GFX950)
        assert code.kernels["rmsnorm_forward"].vgpr <= foreseen


@pytest.mark.parametrize(
    ("cols", "more"),
    [(66560, {}), (65536, {"residual_dtype": "bf16"}), (65536, {"residual_out_dtype": "bf16"})],
    ids=["tail", "residual", "residual_out"],
)
def test_two_passes_that_do_not_load_a_tile_at_once_fit_1024_lanes(
    cols: int, more: dict[str, Any], libraries: Path
) -> None:
    problem = forward(cols, "bf16", bias_dtype="bf16", out_dtype=OCP, scale="dynamic", **more)
    passes(problem, "gfx950", libraries, "b1024-2p")


@pytest.mark.parametrize("problem", BIAS_ALONE[:2], ids=name)
def test_dbias_alone_has_no_pingpong_for_its_waits_would_drain(
    problem: Problem, libraries: Path
) -> None:
    config, code = compiled(problem, "gfx950", libraries)
    assert config.path == "registers"
    assert gate(problem, config, code) == []
    binary = build(render(problem, config, GFX950), OfflineBackend("gfx950", libraries))
    launch, _ = launches(problem, config, binary)  # and dbias's finish
    kernel = binary.code.functions[launch.entry_point]
    taken = kernel.launched(launch.grid, launch.block, launch.lds_bytes)
    assert taken.cu_bytes_before_first_wait >= CU_BYTES_WANTED
    slug = "b256-pp-p2" if problem.cols == 4096 else "b256-t64-pp-p2"
    assert "barrier" in (inert_reason(problem, GFX950, Config.parse(slug)) or "")
    faults = gate(problem, *compiled(problem, "gfx950", libraries, slug))
    assert any("leaves 0 of 2 loads of the youngest row" in fault for fault in faults)


def test_every_access_of_extras_goes_to_one_tensor(libraries: Path) -> None:
    for problem, slug, more in (
        (DYNAMIC, "b256", {"x", "weight", "residual", "y", "rstd", "residual_out", "scales"}),
        (BOTH_GRADIENTS, "b512-pp-p1", {"dout", "x", "weight", "rstd", "dresidual_out", "dx",
                                        "dresidual", "partial"}),
        (HEADS_BACKWARD, "b128-t16-p2", {"dout", "x", "weight", "rstd", "dx", "partial",
                                         "bias_partial"}),
    ):  # fmt: skip
        _, code = compiled(problem, "gfx950", libraries, slug)
        assert set(tensors(code.kernels[f"rmsnorm_{problem.op}"]).values()) == more


# ---- planted faults ------------------------------------------------------------------------------

LOADED, STORED = "RR_ELEMENTS, RR_LOAD_POLICY>", "RR_ELEMENTS, RR_STORE_POLICY>"
DEFAULT = "RR_ELEMENTS, POLICY_DEFAULT>"
STORE_RESIDUAL_OUT = """store_residual_out(
              residual_out, (u64)(row * residual_out_stride) + element, kept[c]);"""
STORE_DRESIDUAL = f"store_pack<RR_RESIDUAL, {STORED}(dresidual, dresidual_at, out);"
STORE_BIAS_SUMS = f"""store_pack<FP32, {DEFAULT}(
            bias_partial, (u64)blockIdx.x * cols + element, bias_sums[c]);"""
CLAMP = "high = high > MOST ? MOST : high < -MOST ? -MOST : high;"
CONVERTED = "return (u32)__builtin_amdgcn_cvt_pk_fp8_f32(low, high, 0, false) & 0xffffu;"
IN_SOFTWARE = "return as_bits(low) >> 24 | as_bits(high) >> 24 << 8;"
STORE = "store_words<POLICY, pack.PIECE>(address + i * pack.PIECE, pack.piece[i]);"
FOURS = """{
      for (int k = 0; k < pack.PIECE / 4; ++k) ((volatile u32*)address)[k] = pack.piece[i].w[k];
    }"""
STORE_SCALE = "if (lane == 0 && slot_has_row(row, rows)) scales[list_at(row)] = row_scale;"
FIND_LARGEST = """x_of(in) = load_vector(x, x_row + (u64)at * RR_ELEMENTS);
    RR_LOAD_RESIDUAL(in, row, (u64)at * RR_ELEMENTS);
    add_largest(in, w, b, scale, largest);"""
READ_RING = "if (!RR_REREAD) ring.read(2, beside.row);"
READ_PAST = """for (int c = 0; c < RR_CHUNKS; ++c)
      beside.row[c] = load_beside(dresidual_out, (u64)(row * dresidual_out_stride) +
                                                     safe_element(c, lane, vectors));"""
LLAMA = "if constexpr (RR_LLAMA) value = rounded<RR_X>(value);"
ALL_BF16 = forward(8192, "bf16", residual_dtype="bf16", bias_dtype="bf16")
TWO_PASS = forward(65536, "bf16", residual_dtype="bf16", out_dtype=OCP, scale="dynamic")


@pytest.mark.parametrize(
    ("problem", "slug", "edit", "said"),
    [
        (RESIDUAL, "b256-reg-ls", (f"<RR_RESIDUAL, {LOADED}", f"<RR_RESIDUAL, {DEFAULT}"),
         r"load of residual without nt, and load_policy is stream \(4 times\)"),
        (RESIDUAL, "b256-reg-ss", (f"<RR_RESIDUAL_OUT, {STORED}", f"<RR_RESIDUAL_OUT, {DEFAULT}"),
         r"store of residual_out without nt, and store_policy is stream"),
        (ALL_BF16, "b256-reg", (f"<RR_B, {DEFAULT}", "<RR_B, RR_ELEMENTS, POLICY_STREAM>"),
         "load of bias with nt, which is for rows alone"),
        (GRADIENT, "b512-2p-ls-p1", (f"<RR_RESIDUAL_OUT, {LOADED}", f"<RR_RESIDUAL_OUT, {DEFAULT}"),
         "columns: load of dresidual_out without nt"),
        (ALL_BF16, "b256-reg", (LOAD, NARROW_LOAD), "load of residual by 8 bytes a lane, not 16"),
        (ALL_BF16, "b256-reg", (LOAD, NARROW_LOAD), "load of bias by 8 bytes a lane, not 16"),
        (ALL_BF16, "b256-reg", (LOAD, NARROW_LOAD), "load of weight by 8 bytes a lane, not 16"),
        (STATIC, "b256-reg", (STORE, FOURS), "store of y by 4 bytes a lane, not 8"),
        (WIDE_RESIDUAL, "b256-2p", (STORE, FOURS),
         "store of residual_out by 4 bytes a lane, not 16"),
        (RESIDUAL, "b256-reg", (KEPT, KEPT_AGAIN), "residual is read again: 128 .*, not 64"),
        (WIDE_RESIDUAL, "b256-reg", (KEPT, KEPT_AGAIN), "residual is read again: 256 .*, not 128"),
        (RESIDUAL, "b256-reg", twice(STORE_RESIDUAL_OUT, "residual_out"),
         "residual_out is stored again: 128 .*, not 64"),
        (RESIDUAL, "b256-2p", twice(SQUARES, "residual"),
         "residual is read again: 192 .*, not 128"),
        (TWO_PASS, "b256-2p", twice(FIND_LARGEST, "residual"), "x is read again: 160 .*, not 144"),
        (TWO_PASS, "b256-2p", twice(FIND_LARGEST, "residual"),
         "residual is read again: 160 .*, not 144"),
        (BOTH_GRADIENTS, "b512-reg-p1", (STORE_DRESIDUAL, "{}"),
         "0 bytes of dresidual a lane in all, and a row has 32"),
        (BIAS, "b128-p1", (STORE_BIAS_SUMS, "{}"), "0 bytes of bias_partial a lane in all"),
        (BIAS, "b128-p1", ("__launch_bounds__(RR_FINISH_BLOCK) rmsnorm_dbias", "rmsnorm_dbias"),
         "rmsnorm_dbias: built for blocks of 1024 threads, not 256"),
        (DYNAMIC, "b256-reg", (STORE_SCALE, ""), "0 bytes of scales a lane in all, and it has 4"),
        (GRADIENT, "b512-lds3-p1", (READ_RING, READ_PAST), "load of dresidual_out past LDS"),
        (forward(1024, "fp16", residual_dtype="bf16"), "b128", (ROUNDED, TRUNCATED),
         "0 v_cvt_pk_bf16_f32 for 4 pairs of bf16 that are stored"),
        (forward(1024, "bf16", casting="llama"), "b128", (LLAMA, ""),
         "4 v_cvt_pk_bf16_f32 for 8 pairs of bf16 that are stored or weighted"),
    ],
    ids=[
        "residual's policy ignored", "residual_out's policy ignored", "bias streamed",
        "dresidual_out's policy ignored", "narrow residual", "narrow bias", "narrow weight",
        "narrow fp8", "narrow residual_out", "residual kept", "fp32 residual kept",
        "residual_out stored", "first pass", "scale's pass", "scale's pass of residual",
        "no dresidual", "no dbias", "no bound", "no scale", "past the ring",
        "residual_out truncated", "not rounded ahead of the weight",
    ],
)  # fmt: skip
def test_a_planted_fault_of_extras(
    problem: Problem, slug: str, edit: tuple[str, str], said: str, libraries: Path
) -> None:
    check(problem, slug, said, (edit,), libraries)


@pytest.mark.parametrize(
    ("arch", "slug"),
    [("gfx950", "b256-reg"), ("gfx950", "b256-lds2-p1"), ("gfx950", "b256-pp-p1"),
     ("gfx950", "b256-2p"), ("gfx942", "b256-reg")],
)  # fmt: skip
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ((CONVERTED, IN_SOFTWARE), r"0 v_cvt_pk_fp8_f32 for \d+ pairs of fp8 that are stored"),
        ((CLAMP, ""), r"\d+ numbers go to v_cvt_pk_fp8_f32 and are not held to \+-"),
        ((CLAMP, CLAMP.replace("high < -MOST ? -MOST : ", "")), r"\d+ numbers .* are not held"),
        ((CLAMP, CLAMP.replace("high > MOST ? MOST : ", "")), r"\d+ numbers .* are not held"),
    ],
    ids=["in software", "not held", "not held below", "not held above"],
)
def test_an_8_bit_y_that_is_not_converted_right(
    edit: tuple[str, str], said: str, slug: str, arch: str, libraries: Path
) -> None:
    check(fitting(STATIC, arch), slug, said, (edit,), libraries, arch)


@pytest.mark.parametrize(
    ("problem", "slug"),
    [(RESIDUAL, "b256-lds2-p1"), (DYNAMIC, "b256-lds3-p1"), (GRADIENT, "b512-lds2-p1"),
     (GRADIENT, "b512-lds2r-p1")],
    ids=name,
)  # fmt: skip
def test_a_ring_of_more_tensors_whose_wait_is_one_too_loose(
    problem: Problem, slug: str, libraries: Path
) -> None:
    check(problem, slug, LATE_ROW, ((ALL, "wait_memory<ALL + 1>();"),), libraries)


def test_a_ring_that_counts_stores_of_residual_out_which_some_waves_skip(libraries: Path) -> None:
    counted = ("(FULL_CHUNKS ? RR_CHUNKS : RR_CHUNKS - 1)", "RR_CHUNKS")
    check(NARROW_RESIDUAL, "b256-t64-lds3-p2", LATE_ROW, (counted,), libraries)


@pytest.mark.parametrize(
    ("problem", "ask"),
    [
        (RESIDUAL, "    load_row(row + step, next);\n"),
        (BOTH_GRADIENTS, "    load_row(row + step, next, x_next, dout_next, beside_next);\n"),
    ],
    ids=["residual", "dresidual_out"],
)
def test_a_pingpong_with_extras_that_is_drained(
    problem: Problem, ask: str, libraries: Path
) -> None:
    drain = (ask, ask + '    asm volatile("s_waitcnt vmcnt(0)" ::: "memory");\n')
    said = r"leaves 0 of \d+ loads of the youngest row"
    check(problem, "b512-pp-p1", said, (drain,), libraries)

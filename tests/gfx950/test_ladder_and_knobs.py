"""The static gate over the ladder and every value of every knob, by each ROCm that is here.

Problems and configs of one source are compiled once. Whole spaces: ``tox -e gfx950-full``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from amd_kernels import compiled

from rmsnorm_raw.backends.kernel_report import CU_BYTES_WANTED
from rmsnorm_raw.backends.offline import OfflineBackend
from rmsnorm_raw.backends.static_gate import (
    ARGUMENTS,
    EXTRA_ARGUMENTS,
    gate,
    inert_knobs,
    tensors,
)
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.launch import launches
from rmsnorm_raw.module import build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render
from rmsnorm_raw.space import enumerate_configs, reject_reason
from rmsnorm_raw.study.cells import cells

pytestmark = pytest.mark.gfx950

GFX950 = KNOWN["gfx950"]
PAIRS = (("fp16", "fp16"), ("fp16", "fp32"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"))
#: beside the study's cells: less than a vector, single odd elements, whole vectors that are no
#: power of two, and rows that no block keeps; of those, few are shared by blocks
WIDTHS = ((4096, 7), (4096, 769), (4096, 3000), (4096, 65536), (32, 65536), (1024, 262144),
          (8, 262144))  # fmt: skip


def name(value: object) -> str:
    return str(value).replace(" ", "-") if isinstance(value, Problem) else str(value)


def ladder(arch: str) -> list[Problem]:
    """Problems whose ladder configs are all that there are, one for each source."""
    makes = (Problem.forward, Problem.backward)
    wide = [
        make(rows, cols, x, weight_dtype=w)
        for make, (rows, cols), (x, w) in itertools.product(makes, WIDTHS, PAIRS)
    ]
    sources: dict[str, Problem] = {}
    for problem in (*cells(), *wide):
        config = default_config(problem, KNOWN[arch])
        sources.setdefault(render(problem, config, KNOWN[arch]).digest, problem)
    return list(sources.values())


def passes(problem: Problem, arch: str, libraries: Path, slug: str | None = None) -> None:
    """A config, by default the ladder's, compiles without a word and has no fault."""
    config, code = compiled(problem, arch, libraries, slug)
    assert code.log == ""
    assert gate(problem, config, code) == []


@pytest.mark.parametrize("problem", ladder("gfx950"), ids=name)
def test_the_ladder(problem: Problem, libraries: Path) -> None:
    passes(problem, "gfx950", libraries)


@pytest.mark.parametrize("problem", ladder("gfx942")[::5], ids=name)
def test_the_ladder_of_gfx942(problem: Problem, libraries: Path) -> None:
    passes(problem, "gfx942", libraries)


# ---- every value of every knob -------------------------------------------------------------------


class Knob(NamedTuple):
    """Two configs of a problem that differ in one knob, or where one comes with others in those."""

    problem: Problem
    slug: str
    neighbour: str


def forward(cols: int, dtype: str = "bf16") -> Problem:
    return Problem.forward(32768, cols, dtype)


def backward(cols: int, dtype: str = "bf16") -> Problem:
    return Problem.backward(32768, cols, dtype)


def chain(problem: Problem, *slugs: str) -> list[Knob]:
    return [Knob(problem, *pair) for pair in itertools.pairwise(slugs)]


KNOBS = [
    *chain(forward(1024), *(f"b{n}-t64" for n in (64, 128, 256, 512, 1024))),
    *chain(backward(1024), *(f"b{n}-t64-pp-p1" for n in (64, 128, 256, 512))),
    *chain(forward(512), *(f"b256-t{n}" for n in (8, 16, 32, 64, 128, 256))),
    *chain(backward(256), *(f"b256-t{n}-p1" for n in (8, 16, 32, 64, 128, 256))),
    *chain(forward(8192), *(f"b1024-t{n}" for n in (128, 256, 512, 1024))),
    *chain(forward(65536), *(f"b512-t{n}" for n in (1024, 2048, 4096))),
    *chain(forward(3000), "b192-t192", "b384-t192"),
    *chain(backward(3000), "b192-pp-p1", "b192-p1"),
    *chain(forward(1024), "b64-v16", "b64-v8"), *chain(backward(1024), "b64-v16-p1", "b64-v8-p1"),
    *chain(forward(1028), "b64-v8", "b64-v4"), *chain(backward(1028), "b64-v8-p1", "b64-v4-p1"),
    *chain(forward(770), "b128-v4", "b128-v2"), *chain(backward(770), "b128-v4-p1", "b128-v2-p1"),
    # a ring of vectors of every width: copies of 16 bytes, and of 4 where a lane's are 8 or 4
    *chain(backward(1024), "b64-v16-lds2-p1", "b64-v8-lds2-p1"),
    *chain(forward(1028), "b64-v8-lds2-p1", "b64-v4-lds2-p1"),
    *chain(forward(8192), "b256", "b256-pp-p2", "b256-lds3-p2", "b256-2p"),
    *chain(backward(8192), "b512-p1", "b512-pp-p1", "b512-lds3-p1", "b512-2p-p1"),
    *chain(forward(1024), *(f"b128-lds{n}-p1" for n in range(2, 9))),
    *chain(backward(1024), *(f"b128-lds{n}-p1" for n in range(2, 9))),
    *chain(forward(8192), "b256-lds2-p1", "b256-lds2r-p1"),
    *chain(backward(8192), "b512-lds2-p1", "b512-lds2r-p1"),
    *(
        Knob(make(8192), f"{shape}-{policy}{programs}", f"{shape}{programs}")
        for policy in ("ls", "ss")
        for make, shape, programs in (
            (forward, "b256", ""), (forward, "b256-pp", "-p2"), (forward, "b256-lds3", "-p2"),
            (forward, "b256-2p", ""), (forward, "b128-t256", ""), (backward, "b512", "-p1"),
            (backward, "b512-pp", "-p1"), (backward, "b512-lds3", "-p1"),
            (backward, "b256-2p", "-p4"),
        )
    ),
    *chain(forward(8192), "b128-w4", "b128"), *chain(forward(12288), "b256-w4", "b256"),
    *chain(backward(8192), *(f"b256-t256-lds2-p{n}" for n in (1, 2))),
    *chain(backward(1024), *(f"b128-p{n}" for n in (1, 2, 3, 4, 8))),
    *chain(backward(1024), "b128-p1-fl", "b128-p1"),
    *chain(Problem.backward(1, 4096, "bf16"), "b256-p1-fl", "b256-p1"),
]  # fmt: skip


def differing(knob: Knob) -> set[str]:
    one, other = Config.parse(knob.slug), Config.parse(knob.neighbour)
    return {it.name for it in fields(Config) if getattr(one, it.name) != getattr(other, it.name)}


@pytest.mark.parametrize("knob", KNOBS, ids=lambda it: f"{name(it.problem)}-{it.slug}")
def test_a_knob_does_what_it_says(knob: Knob, libraries: Path) -> None:
    problem, *slugs = knob
    codes = dict(compiled(problem, "gfx950", libraries, slug) for slug in slugs)
    for config, code in codes.items():
        assert gate(problem, config, code) == []
    digests = {config: code.code_digest for config, code in codes.items()}
    assert inert_knobs(problem, GFX950, digests) == []
    # paths come with knobs of their own; programs are the grid's alone
    if differing(knob) != {"programs"}:
        assert len(set(digests.values())) == 2


FITS_GFX942 = [
    knob for knob in KNOBS
    if not reject_reason(knob.problem, KNOWN["gfx942"], Config.parse(knob.slug))
]  # fmt: skip


@pytest.mark.parametrize("knob", FITS_GFX942[::3], ids=lambda it: f"{name(it.problem)}-{it.slug}")
def test_a_knob_of_gfx942(knob: Knob, libraries: Path) -> None:
    passes(knob.problem, "gfx942", libraries, knob.slug)


def values(configs: Iterable[Config]) -> set[tuple[str, object]]:
    return {(it.name, getattr(config, it.name)) for config in configs for it in fields(Config)}


def test_no_value_of_a_knob_is_left_out() -> None:
    tried = values(Config.parse(slug) for knob in KNOBS for slug in knob[1:])
    problems = {knob.problem for knob in KNOBS} | {forward(8192), backward(8192), forward(65536)}
    kept = values(c for problem in problems for c in enumerate_configs(problem, GFX950).kept)
    # blocks and rows of lanes that just cover a row are as many as there are widths: one is tried
    covering = {(knob, n) for knob, n in kept if isinstance(n, int) and n > 8 and n & (n - 1)}
    assert {knob for knob, _ in covering} == {"block", "threads_per_row"}
    assert kept - covering <= tried
    for knob in KNOBS:
        only = differing(knob) - {"path", "stages", "programs"}
        assert len(only) <= 1, knob
        for slug in knob[1:]:
            assert reject_reason(knob.problem, GFX950, Config.parse(slug)) is None, knob


# ---- what else the gate rests on -----------------------------------------------------------------


@pytest.mark.parametrize("make", [forward, backward])
def test_the_ladder_keeps_memory_busy(make: type[Problem], libraries: Path) -> None:
    problem: Problem = make(8192)  # type: ignore[arg-type, assignment]
    config = default_config(problem, GFX950)
    binary = build(render(problem, config, GFX950), OfflineBackend("gfx950", libraries))
    (launch,) = (it for it in launches(problem, config, binary) if it.entry_point[8:] == problem.op)
    kernel = binary.code.functions[launch.entry_point]
    taken = kernel.launched(launch.grid, launch.block, launch.lds_bytes)
    assert (taken.vgpr_spills, taken.sgpr_spills, taken.spill_bytes) == (0, 0, 0)
    lanes = taken.waves_per_simd * 4 * 64
    assert taken.cu_bytes_before_first_wait >= CU_BYTES_WANTED == 48 * 1024
    # of the rows alone, without the weight
    rows = {at for at, tensor in tensors(kernel).items() if tensor in ("x", "dout")}
    in_flight = max(
        sum(16 for each in wait.ends + wait.leaves if each.offset in rows)
        for wait in kernel.row_waits()
    )
    assert lanes * in_flight >= CU_BYTES_WANTED


def test_a_pingpong_of_dweight_alone_is_not_yet_right(libraries: Path) -> None:
    """Nobody planted it: without a sum, and so a barrier, hiprtc copies a row at the loop's end."""
    problem = Problem.backward(32768, 8192, "bf16", need_dx=False)
    config, code = compiled(problem, "gfx950", libraries)
    assert config.path == "pingpong"
    faults = gate(problem, config, code)
    assert any("loads of the youngest row" in fault for fault in faults)
    assert all("youngest row" in it or "before the next one" in it for it in faults)


def test_every_access_goes_to_one_tensor(libraries: Path) -> None:
    _, code = compiled(backward(8192), "gfx950", libraries, "b512-lds3-p1")
    kernel = code.kernels["rmsnorm_backward"]
    goes_to = tensors(kernel)
    assert set(goes_to) == {one.offset for one in kernel.asm if one.access}
    assert set(goes_to.values()) == {"x", "dout", "weight", "dx", "partial"}


@pytest.mark.parametrize("extras", [{}, {"bias_dtype": "bf16"}], ids=["plain", "extras"])
@pytest.mark.parametrize("slug", ["b256", "b128-t256", "b512-p1", "b256-2p-p4"])
def test_arguments_are_those_of_the_text(slug: str, extras: dict[str, Any]) -> None:
    make = Problem.backward if "-p" in slug else Problem.forward
    problem = make(32768, 8192, "bf16", **extras)
    source = render(problem, Config.parse(slug), GFX950)
    # what a define stands for: of two, the later is that of a problem with extras
    stands_for = {}
    for name in ("RR_FORWARD_EXTRAS", "RR_BACKWARD_EXTRAS", "RR_BACKWARD_HEADS"):
        *_, define = re.findall(rf"#define {name}((?:.*\\\n)*.*)\n", source.text)
        stands_for[name] = define.replace("\\", " ")
    for entry_point in source.entry_points:
        _, _, after = source.text.partition(f" {entry_point}(")
        arguments = after.partition(")")[0]
        for name, define in stands_for.items():
            arguments = arguments.replace(f" {name}", define)
        given = [it.split()[-1].lstrip("*") for it in arguments.split(",")]
        known = ARGUMENTS[entry_point] + " " + EXTRA_ARGUMENTS.get(entry_point, "") * bool(extras)
        assert given == known.split()

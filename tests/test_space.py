"""The space: refusals carry their reason, what is kept is legal, distinct and small; the ladder."""

from __future__ import annotations

import csv
from dataclasses import replace
from importlib import resources

import pytest
from covering import covering_array, pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN, SIMULATED, DeviceSpec
from rmsnorm_raw.dtypes import DTYPE_BYTES
from rmsnorm_raw.errors import InvalidConfig
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render
from rmsnorm_raw.space import (
    PROGRAMS,
    STAGES,
    chunks,
    dweight_chain,
    elements,
    enumerate_configs,
    grid_programs,
    inert_reason,
    lds_bytes,
    reject_reason,
    require_fit,
    row_chain,
)

GFX950, SM_90 = KNOWN["gfx950"], KNOWN["sm_90"]
WIDE = Problem.forward(32768, 8192, "bfloat16")
WIDE_BACKWARD = Problem.backward(32768, 8192, "bfloat16")


def study_problems() -> list[Problem]:
    """The 90 problems of the published study."""
    archive = resources.files("rmsnorm_raw.study") / "archive" / "hopper_quack_cells.csv"
    rows = [r for r in csv.DictReader(archive.read_text().splitlines()) if r["host"] == "H200"]
    make = {"fwd": Problem.forward, "bwd": Problem.backward}
    return [
        make[r["op"]](int(r["m"]), int(r["n"]), r["act"], weight_dtype=r["weight"]) for r in rows
    ]


@pytest.mark.parametrize("device", KNOWN.values(), ids=KNOWN)
def test_the_space_of_every_study_cell_is_small_and_holds_the_ladder(device: DeviceSpec) -> None:
    problems = study_problems()
    assert len(problems) == 90
    for problem in problems:
        space = enumerate_configs(problem, device)
        assert 20 <= len(space.kept) <= (300 if problem.op == "forward" else 1000), problem
        assert default_config(problem, device) in space.kept
        assert all(reason for _, reason in space.rejected)


@pytest.mark.parametrize(
    "problem",
    [
        WIDE,
        WIDE_BACKWARD,
        Problem.backward(1, 4096, "bfloat16"),  # grids smaller than the device
        Problem.backward(256, 4096, "bfloat16"),
        Problem.backward(256, 4096, "bfloat16", need_dx=False),
        Problem.backward(256, 4096, "bfloat16", need_dweight=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", [GFX950, SM_90], ids=lambda d: d.arch)
def test_no_two_kept_configs_are_the_same_kernel(problem: Problem, device: DeviceSpec) -> None:
    # the grid of a persistent kernel is not in its text, so the launch counts too
    seen: dict[tuple[str, int], Config] = {}
    for config in enumerate_configs(problem, device).kept:
        what = (render(problem, config, device).digest, grid_programs(problem, config, device))
        twin = seen.setdefault(what, config)
        assert twin is config, f"{twin} and {config} are one kernel"


problems = st.builds(
    lambda op, rows, cols, dtype, weight, align: getattr(Problem, op)(
        rows, cols, dtype, weight_dtype=weight, alignment=align
    ),
    st.sampled_from(["forward", "backward"]),
    st.one_of(st.integers(0, 600), st.integers(0, 1 << 34)),
    st.one_of(st.integers(0, 5000), st.integers(0, 1 << 20)),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.sampled_from([None, *sorted(DTYPE_BYTES)]),
    st.sampled_from([2, 4, 8, 16]),
)
devices = st.sampled_from([*KNOWN.values(), *SIMULATED.values()])


@given(problems, devices)
@settings(max_examples=300, deadline=None)
def test_the_ladder_serves_every_problem(problem: Problem, device: DeviceSpec) -> None:
    config = default_config(problem, device)
    assert reject_reason(problem, device, config) is None
    covered = chunks(problem, config) * elements(problem, config) * config.threads_per_row
    assert covered >= problem.cols
    assert max(lds_bytes(problem, config, device).values()) <= device.lds_bytes
    assert row_chain(problem, config) <= 1 + 4 * max(64, problem.cols // 1024)
    assert dweight_chain(problem, config, device) >= 1


FP8 = {"out_dtype": "float8_e4m3fn", "scale": "dynamic"}
DBIAS_ALONE = Problem.backward(
    32768, 4096, "bf16", bias_dtype="bf16", need_dx=False, need_dweight=False
)
FEW_UNITS, OLD_CUDA = replace(GFX950, compute_units=63), replace(SM_90, arch="sm_80")
REFUSED = [
    (WIDE, GFX950, "b2048", "64 to 1024 threads"),
    (WIDE, GFX950, "b96-t96", "whole waves of 64"),
    (WIDE, SM_90, "b1000-t1000", "whole waves of 32"),
    (WIDE, GFX950, "b256-t96", "threads_per_row is 8 to block=256"),
    (WIDE, GFX950, "b256-t768", "over block=256 is 512, 1024, 2048, not 768"),
    (WIDE, SM_90, "b64-t1024", "over block=64 is 128, 256, 512, not 1024"),
    (WIDE, SM_90, "b256-t512-2p", "blocks share a row on forward's path registers alone"),
    (WIDE_BACKWARD, GFX950, "b256-t512-p1", "blocks share a row on forward's path registers alone"),
    (WIDE, FEW_UNITS, "b256-t2048", "wants 64 compute units, and gfx950 has 63"),
    (WIDE, OLD_CUDA, "b256-t512", "sm_80 is not sm_90"),
    (Problem.forward(1 << 22, 65536, "bf16"), SM_90, "b256-t1024", "less than 2\\*\\*32"),
    (WIDE_BACKWARD, SM_90, "b256-lds3p-p1", "paced belongs to backward's rings of bulk copies"),
    (WIDE, SM_90, "b256-lds3bp-p1", "paced belongs to backward's rings of bulk copies"),
    (WIDE_BACKWARD, SM_90, "b64-t64-v16-m2-p1", "inert"),
    (WIDE, GFX950, "b256-t4", "threads_per_row is 8 to"),
    (WIDE, GFX950, "b384-t96", "power of two or whole waves of 64"),
    (WIDE, GFX950, "b256-v4", "vec is 16 or 8 bytes here"),
    (Problem.forward(8, 769, "fp16"), GFX950, "b256-v16", "vec is 2 bytes here.*1538 bytes"),
    (Problem.forward(8, 768, "fp16", alignment=4), GFX950, "b256-v16", "aligned to 4"),
    (WIDE, GFX950, "b256-pp", "the grid is persistent: add programs, one of -p1"),
    (WIDE, GFX950, "b256-lds9-p1", "2 to 8 stages, not 9"),
    (WIDE, GFX950, "b256-lds3b-p1", "bulk row copies are sm_90's; gfx950 copies by lanes"),
    (WIDE, SM_90, "b256-v8-lds3b-p1", "whole 16-byte vectors"),
    (WIDE, GFX950, "b256-t32-lds3-p1", "threads_per_row is whole waves of 64"),
    (WIDE, SM_90, "b256-lds3-lk-p1", "cp.async by lanes takes no policy"),
    (Problem.forward(8, 769, "fp16"), SM_90, "b256-v2-lds3-p1", "at least 4 bytes a lane"),
    (WIDE, SM_90, "b256-fl", "forward has no dW"),
    (WIDE_BACKWARD, SM_90, "b256-2p-p1-fl", "two_pass its own"),
    (WIDE_BACKWARD, GFX950, "b256-lds6-p1", "196736 bytes of LDS a block, and gfx950 has 163840"),
    (WIDE_BACKWARD, SM_90, "b256-lds4-p2", "131200 bytes of LDS a block x 2 programs"),
    (WIDE, GFX950, "b256-lk", "AMD has no keep"),
    (WIDE, GFX950, "b256-sk", "AMD has no keep"),
    (WIDE, GFX950, "b256-m2", "min_blocks is CUDA's"),
    (WIDE, GFX950, "b256-w3", "waves_per_eu is 1, 2 or 4"),
    (WIDE, GFX950, "b256-w1", "inert: one block already has 1"),
    (WIDE, GFX950, "b1024-w4", "inert: one block already has 4"),
    (WIDE, SM_90, "b256-w2", "waves_per_eu is AMD's"),
    (WIDE, SM_90, "b1024-m4", "cannot share a multiprocessor"),
    (WIDE, SM_90, "b64-t64-v16-m2", "inert"),
    (WIDE, SM_90, "b256-p2", "leave programs out"),
    (WIDE_BACKWARD, SM_90, "b256", "the grid is persistent"),
    (WIDE_BACKWARD, SM_90, "b1024-p4", "cannot share a compute unit"),
    (WIDE_BACKWARD, GFX950, "b128-lds2-p1", "about 356 registers a lane.* leave 256"),
    (WIDE_BACKWARD, GFX950, "b128-t64-lds2r-p1", "about 428 registers a lane"),
    (WIDE_BACKWARD, GFX950, "b256-pp-p1", "about 304 registers a lane"),
    (WIDE_BACKWARD, GFX950, "b1024-t512-pp-p1", "about 134 registers a lane.* leave 128"),
    (WIDE_BACKWARD, GFX950, "b128-reg-w2-p1", "about 356 registers a lane"),
    # estimates with none to spare: both spilled
    (
        Problem.backward(37, 16384, "fp16", weight_dtype=None),
        GFX950,
        "b1024-t512-pp-p1",
        "about 128 registers a lane.* leave 128",
    ),
    (Problem.backward(1, 769, "bf16"), GFX950, "b128-t32-v2-pp-p1", "about 278 registers a lane"),
    (Problem.forward(8, 32768, "fp16"), GFX950, "b256-pp-p2", "about 428 registers a lane"),
    # two registers were spilled, with a static scale two or three
    (
        Problem.forward(8, 65536, "bf16", bias_dtype="bf16", **FP8),
        GFX950,
        "b1024-2p",
        "about 132 registers a lane.* leave 128",
    ),
    (WIDE_BACKWARD, SM_90, "b64-t8-v16-p1", "registers a lane"),
    (Problem.forward(8, 262144, "fp16"), SM_90, "b1024", "registers a lane"),
]


@pytest.mark.parametrize(
    ("problem", "device", "slug", "says"), REFUSED, ids=[r[2] for r in REFUSED]
)
def test_refusals_carry_their_reason(
    problem: Problem, device: DeviceSpec, slug: str, says: str
) -> None:
    with pytest.raises(InvalidConfig, match=says) as error:
        require_fit(problem, device, Config.parse(slug))
    assert error.value.slug == Config.parse(slug).slug


@pytest.mark.parametrize(
    ("problem", "device", "slug", "says"),
    [
        (Problem.backward(8, 4096, "bf16", need_dweight=False), SM_90, "b256-p1-fl",
         "finish is inert"),
        (Problem.backward(8, 4096, "bf16", need_dweight=False), SM_90, "b256-p1-fe",
         "finish is inert"),
        (Problem.backward(8, 4096, "bf16", need_dx=False), SM_90, "b256-p1-ss",
         "store_policy is inert"),
        (Problem.backward(8, 4096, "bf16"), SM_90, "b256-p2", "8 blocks are the whole grid"),
        (Problem.forward(8, 8192, "bf16"), GFX950, "b256-w4", "about 60 registers a lane leave"),
        (Problem.forward(8, 8192, "bf16"), GFX950, "b128-w2", "waves_per_eu=2 is inert"),
        (DBIAS_ALONE, GFX950, "b256-pp-p2", "pingpong is inert: dbias alone has no barrier"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_what_is_inert_serves_and_is_not_searched(
    problem: Problem, device: DeviceSpec, slug: str, says: str
) -> None:
    config = Config.parse(slug)
    require_fit(problem, device, config)
    assert says in (inert_reason(problem, device, config) or "")
    assert config not in enumerate_configs(problem, device).kept


def test_pingpong_of_dbias_alone_is_what_it_is_on_amd_and_with_a_barrier_elsewhere() -> None:
    config = Config.parse("b256-pp-p2")
    for device, problem in (
        (SM_90, DBIAS_ALONE),
        (GFX950, replace(DBIAS_ALONE, has_rstd=False)),
        (GFX950, replace(DBIAS_ALONE, need_dx=True)),
        (GFX950, replace(DBIAS_ALONE, need_dweight=True)),
    ):
        assert inert_reason(problem, device, config) is None
        assert config in enumerate_configs(problem, device).kept
    kept = enumerate_configs(DBIAS_ALONE, GFX950).kept
    assert {each.path for each in kept} == {"registers", "lds", "two_pass"}


def test_a_bound_that_may_do_something_is_searched() -> None:
    problem = Problem.forward(8, 8192, "bf16")
    assert Config.parse("b128-w4") in enumerate_configs(problem, GFX950).kept


def test_lds_over_the_limit_is_refused_with_its_bytes() -> None:
    # rows of a block meet in LDS for dW: two rows of 8192 want 32 KiB more than a small device has
    tiny = replace(GFX950, lds_bytes=16 * 1024)
    problem = Problem.backward(64, 8192, "bfloat16")
    reason = reject_reason(problem, tiny, Config.parse("b512-t256-p1"))
    assert reason == f"{16 * 8 + 32768} bytes of LDS a block, and gfx950 has 16384"


def test_rows_of_375_vectors_get_192_lanes() -> None:
    # 3000 bf16 columns: 256 lanes would leave a quarter of them idle in the second chunk
    assert default_config(Problem.forward(4096, 3000, "bf16"), GFX950).threads_per_row == 192


@pytest.mark.parametrize("device", [GFX950, SM_90], ids=lambda d: d.arch)
def test_every_knob_is_in_the_space(device: DeviceSpec) -> None:
    few_rows = Problem.backward(8, 2048, "bfloat16")
    configs = [
        config
        for problem in (
            Problem.forward(32768, 8192, "bfloat16"),
            WIDE_BACKWARD,
            Problem.backward(32768, 2048, "bfloat16"),
            few_rows,
        )
        for config in enumerate_configs(problem, device).kept
    ]
    varied = {k for c in configs for pair in pairs(c) for k in pair}
    wanted = {("load_policy", "stream"), ("store_policy", "stream"), ("vec", 8), ("reread", True)}
    wanted |= {("path", path) for path in ("registers", "pingpong", "lds", "two_pass")}
    wanted |= {("stages", n) for n in STAGES} | {("programs", n) for n in PROGRAMS}
    wanted |= {("finish", "kernel"), ("finish", "last_block")}
    wanted |= {("waves_per_eu", 4)} if device is GFX950 else {("min_blocks", 1), ("min_blocks", 4)}
    if device is SM_90:
        wanted |= {
            ("load_policy", "keep"),
            ("store_policy", "keep"),
            ("bulk", True),
            ("paced", True),
            ("finish", "early"),
        }
    assert wanted <= varied


def test_covering_array_covers() -> None:
    configs = enumerate_configs(WIDE_BACKWARD, GFX950).kept
    chosen = covering_array(configs)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, configs))
    assert len(chosen) < len(configs) // 4

"""Plans: the launches, their grids under HIP's limit, and the rows that each of them covers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.errors import InvalidConfig
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.launch import (
    MAX_THREADS,
    Launch,
    Plan,
    Tensor,
    make_plan,
    run,
    tensor_bytes,
)
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.space import require_fit

GFX950, SM_90 = KNOWN["gfx950"], KNOWN["sm_90"]
BINARY: Any = SimpleNamespace(backend=SimpleNamespace(device=GFX950))
CUDA_BINARY: Any = SimpleNamespace(backend=SimpleNamespace(device=SM_90))
NAMES = ("x", "weight", "y", "rstd", "dout", "dx", "dweight", "workspace")


def plan(
    problem: Problem, config: Config | None = None, binary: Any = BINARY
) -> tuple[Launch, ...]:
    tensors = {name: Tensor((k + 1) << 44, problem.cols) for k, name in enumerate(NAMES)}
    return make_plan(problem, config or default_config(problem, GFX950), binary, tensors).launches


@given(st.integers(1, 1 << 36), st.sampled_from([1, 8, 127, 1024, 1 << 20]))
@settings(deadline=None)
def test_forward_launches_cover_every_row_once_under_the_limit(rows: int, cols: int) -> None:
    problem = Problem.forward(rows, cols, "float16")
    config = default_config(problem, GFX950)
    next_row = 0
    for launch in plan(problem, config):
        x, _, _, y, _, rstd, _, launch_rows = (int(v) for v in launch.args[:8])
        assert launch.grid * launch.block <= MAX_THREADS
        assert launch.grid == -(-launch_rows // config.rows_per_block)
        assert x - (1 << 44) == y - (3 << 44) == next_row * cols * 2
        assert rstd - (4 << 44) == next_row * 4
        next_row += launch_rows
    assert next_row == rows


SHARED = [("b64-t256-v16-reg", 4), ("b128-t1024-v16-reg-ls", 8), ("b256-t512-v8-reg", 2)]


@pytest.mark.parametrize(("slug", "blocks"), SHARED)
@pytest.mark.parametrize("rows", [1, 3, 4099])
def test_shared_rows_on_cuda_are_one_launch_of_whole_clusters(
    rows: int, slug: str, blocks: int
) -> None:
    problem, config = Problem.forward(rows, 8192, "bf16"), Config.parse(slug)
    (launch,) = plan(problem, config, CUDA_BINARY)
    assert launch.entry_point == "rmsnorm_forward"
    assert (launch.grid, launch.block) == (rows * blocks, config.block)
    # two floats a wave in two areas, an mbarrier and a float from each block
    assert launch.lds_bytes == 16 * (config.block // 32) + 8 + 4 * blocks
    assert int(launch.args[7]) == rows
    assert "workspace" not in tensor_bytes(problem, config, SM_90)


@pytest.mark.parametrize(("slug", "blocks"), SHARED)
@pytest.mark.parametrize("rows", [1, 3, 4099])
def test_shared_rows_on_amd_begin_with_a_launch_that_clears_every_word(
    rows: int, slug: str, blocks: int
) -> None:
    problem, config = Problem.forward(rows, 8192, "bf16"), Config.parse(slug)
    clear, launch = plan(problem, config)
    count = rows * blocks + 1  # a word a block, and how many have started
    assert clear.entry_point == "rmsnorm_forward_clear"
    assert [int(arg) for arg in clear.args] == [8 << 44, count]
    assert [arg.dtype for arg in clear.args] == ["uint64", "uint64"]
    assert (clear.grid - 1) * config.block < count <= clear.grid * clear.block
    assert (clear.block, clear.lds_bytes) == (config.block, 0)
    assert launch.entry_point == "rmsnorm_forward"
    assert (launch.grid, launch.block) == (rows * blocks, config.block)
    assert [int(launch.args[k]) for k in (6, 7, 8)] == [8 << 44, rows, 8192]
    assert tensor_bytes(problem, config, GFX950)["workspace"] == 8 * count


@pytest.mark.parametrize("binary", [BINARY, CUDA_BINARY], ids=["gfx950", "sm_90"])
def test_no_rows_to_share_want_nothing(binary: Any) -> None:
    config = Config.parse("b64-t256-v16-reg")
    for problem in (Problem.forward(0, 8192, "bf16"), Problem.forward(8, 0, "bf16")):
        assert plan(problem, config, binary) == ()
        assert "workspace" not in tensor_bytes(problem, config, binary.backend.device)


def test_as_many_shared_rows_as_are_allowed_are_one_launch_under_the_limit() -> None:
    config = Config.parse("b128-t1024-v16-reg")
    rows = ((1 << 32) - 1) // 1024
    problem = Problem.forward(rows, 8192, "bf16")
    require_fit(problem, GFX950, config)
    for launch in plan(problem, config):
        assert launch.grid * launch.block <= MAX_THREADS
    with pytest.raises(InvalidConfig, match=r"less than 2\*\*32"):
        require_fit(Problem.forward(rows + 1, 8192, "bf16"), GFX950, config)


@pytest.mark.parametrize("has_dweight", [True, False])
def test_paced_programs_count_behind_the_partial_rows(has_dweight: bool) -> None:
    problem = Problem.backward(4096, 1024, "bf16", need_dweight=has_dweight)
    plain = Config.parse("b256-t128-v16-lds3b-p1")
    paced = Config.parse("b256-t128-v16-lds3bp-p1")
    partials = 132 * 1024 * 4 * has_dweight
    assert tensor_bytes(problem, plain, SM_90).get("workspace", 0) == partials
    assert tensor_bytes(problem, paced, SM_90)["workspace"] == partials + 4
    launch = plan(problem, paced, CUDA_BINARY)[0]
    assert int(launch.args[11]) == (8 << 44) + partials
    assert int(plan(problem, plain, CUDA_BINARY)[0].args[11]) == 0
    assert "counter" not in tensor_bytes(problem, paced, SM_90)


@pytest.mark.parametrize("slug", ["b256-t64-v16-pp-p2", "b256-t64-v16-lds3-p1"])
def test_a_persistent_forward_is_one_launch(slug: str) -> None:
    config = Config.parse(slug)
    (few,) = plan(Problem.forward(100, 1024, "float16"), config)
    assert few.grid == 25  # row groups of 4
    (many,) = plan(Problem.forward(1 << 36, 1024, "float16"), config)
    assert many.grid == 256 * config.programs
    assert int(many.args[7]) == 1 << 36


def test_two_pass_backward_offsets_its_row_results() -> None:
    problem = Problem.backward(1 << 25, 1 << 20, "float16", weight_dtype=None)
    config = Config(block=256, path="two_pass", programs=1)
    rows = [p for p in plan(problem, config) if p.entry_point == "rmsnorm_backward_rows"]
    assert len(rows) == 3  # 2**32 / 256 rows a launch
    step = MAX_THREADS // 256
    results = [int(p.args[6]) for p in rows]
    assert results == [(8 << 44) + 8 * step * k for k in range(3)]


@pytest.mark.parametrize(
    ("problem", "entries"),
    [
        (Problem.forward(64, 1024, "bf16"), ["forward"]),
        (Problem.backward(64, 1024, "bf16"), ["backward", "dweight"]),
        (Problem.backward(64, 1024, "bf16", need_dweight=False), ["backward"]),
        (Problem.backward(64, 1024, "bf16", need_dx=False), ["backward", "dweight"]),
        (Problem.backward(64, 1024, "bf16", need_dx=False, need_dweight=False), []),
        (Problem.backward(64, 1 << 18, "bf16"), ["backward_rows", "backward_columns", "dweight"]),
        (Problem.backward(64, 1 << 18, "bf16", need_dx=False), ["backward_columns", "dweight"]),
        (
            Problem.backward(64, 1 << 18, "bf16", need_dx=False, has_rstd=False),
            ["backward_rows", "backward_columns", "dweight"],
        ),
        (Problem.forward(0, 1024, "bf16"), []),
        (Problem.backward(64, 0, "bf16"), []),
    ],
    ids=str,
)
def test_only_what_is_needed_is_launched(problem: Problem, entries: list[str]) -> None:
    assert [p.entry_point for p in plan(problem)] == [f"rmsnorm_{name}" for name in entries]


def test_tensor_bytes() -> None:
    problem = Problem.backward(100, 1024, "bf16", weight_dtype="fp32")
    config = Config(block=256, threads_per_row=64, programs=1)
    assert tensor_bytes(problem, config, GFX950) == {
        "dout": 204800,
        "x": 204800,
        "weight": 4096,
        "rstd": 400,
        "dx": 204800,
        "dweight": 4096,
        "workspace": 25 * 1024 * 4,  # 25 row groups of 4, fewer than the 256 programs
    }
    assert "weight" not in tensor_bytes(
        Problem.forward(100, 1024, "bf16", weight_dtype=None), config, GFX950
    )


def test_workspace_of_two_passes_holds_row_results_then_partials() -> None:
    problem = Problem.backward(1000, 1 << 18, "bf16")
    config = Config(block=256, path="two_pass", programs=4)
    shares = 4 * 256 // ((1 << 18) // (256 * 8))
    assert tensor_bytes(problem, config, GFX950)["workspace"] == 8 * 1000 + 4 * shares * (1 << 18)
    columns = plan(problem, config)[1]
    assert int(columns.args[9]) - (8 << 44) == 8 * 1000
    assert columns.grid == 128 * shares


def test_run_enqueues_in_order_on_the_stream() -> None:
    calls: list[tuple[Any, ...]] = []
    backend = SimpleNamespace(launch=lambda *args: calls.append(args))
    binary: Any = SimpleNamespace(
        backend=backend, code=SimpleNamespace(functions={"a": "A", "b": "B"})
    )
    run(Plan(binary, (Launch("a", 1, 64, (), 16), Launch("b", 2, 128, (), early=True))), stream=7)
    assert calls == [("A", 1, 64, (), 16, 7, False), ("B", 2, 128, (), 0, 7, True)]

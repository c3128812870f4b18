"""Plans: the launches, their grids under HIP's limit, and the rows that each of them covers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.launch import (
    MAX_THREADS,
    Launch,
    Plan,
    Tensor,
    make_plan,
    run,
    tensor_bytes,
    workspace_bytes,
)
from rmsnorm_raw.problem import Problem

GFX950 = KNOWN["gfx950"]
BINARY: Any = SimpleNamespace(backend=SimpleNamespace(device=GFX950))
NAMES = ("x", "weight", "y", "rstd", "dout", "dx", "dweight", "workspace")


def plan(problem: Problem, config: Config | None = None) -> tuple[Launch, ...]:
    tensors = {name: Tensor((k + 1) << 44, problem.cols) for k, name in enumerate(NAMES)}
    return make_plan(problem, config or default_config(problem, GFX950), BINARY, tensors).launches


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
    assert workspace_bytes(problem, config, GFX950) == 8 * 1000 + 4 * shares * (1 << 18)
    columns = plan(problem, config)[1]
    assert int(columns.args[9]) - (8 << 44) == 8 * 1000
    assert columns.grid == 128 * shares


def test_run_enqueues_in_order_on_the_stream() -> None:
    calls: list[tuple[Any, ...]] = []
    backend = SimpleNamespace(launch=lambda *args: calls.append(args))
    binary: Any = SimpleNamespace(
        backend=backend, code=SimpleNamespace(functions={"a": "A", "b": "B"})
    )
    run(Plan(binary, (Launch("a", 1, 64, (), 16), Launch("b", 2, 128, ()))), stream=7)
    assert calls == [("A", 1, 64, (), 16, 7), ("B", 2, 128, (), 0, 7)]

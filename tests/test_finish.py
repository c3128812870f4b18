"""The finish of dW: any width, any number of partial rows, and with a fault planted not."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from rmsnorm_raw import bounds
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.backends.cpu import CpuBackend, Order
from rmsnorm_raw.check import verify
from rmsnorm_raw.config import Config
from rmsnorm_raw.errors import SimulatorError
from rmsnorm_raw.module import Binary, build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render
from rmsnorm_raw.space import FINISH_BLOCK, finish_columns, lds_bytes

SEED = 7
ORDERS: tuple[Order, ...] = ("forward", "reverse", "shuffle")
#: one column; a few; odd; by two, four and eight elements; a tail in the last block
WIDTHS = (1, 7, 769, 770, 772, 3000)


@pytest.fixture(params=[64, 32], ids=["wave64", "wave32"])
def cpu(request: pytest.FixtureRequest) -> Backend:
    return CpuBackend(request.param)


def configured(problem: Problem, programs: int) -> Config:
    return Config(block=64, threads_per_row=64, vec=problem.widest_vec, programs=programs)


def built(
    problem: Problem, config: Config, backend: Backend, old: str = "", new: str = ""
) -> Binary:
    source = render(problem, config, backend.device, runtime_cols=True)
    assert old in source.text, "the text has changed: plant this fault anew"
    text = source.text.replace(old, new) if old else source.text
    return build(dataclasses.replace(source, text=text), backend)


@pytest.mark.parametrize(
    ("wave", "weight"), [(64, "float16"), (64, "float32"), (32, "bfloat16"), (32, "float32")]
)
@pytest.mark.parametrize("cols", WIDTHS)
def test_dweight_is_right_at_every_width(wave: int, cols: int, weight: str) -> None:
    cpu = CpuBackend(wave)
    for rows in (3, 37):  # as many partial rows, or 32
        problem = Problem.backward(rows, cols, "bf16", weight_dtype=weight, need_dx=False)
        config = configured(problem, 8)
        verdict = verify(problem, config, built(problem, config, cpu), seed=SEED)
        assert verdict.passed, f"{rows} rows: {verdict}"


# ---- the kernel by itself, over as many rows as a GPU leaves -------------------------------------

#: around the rows that lanes take at once (groups of 32, 64, 256; four at a time)
PARTIALS = (1, 2, 31, 32, 33, 63, 65, 127, 128, 129, 255, 257, 1024, 1025, 1056)


def finish(problem: Problem, binary: Binary, partial: np.ndarray) -> np.ndarray:
    """The bits of dweight for partial rows; a column is summed over all rows."""
    backend = binary.backend
    rows, cols = partial.shape
    assert cols == problem.cols
    given, memory = backend.allocate(partial.nbytes)
    memory[:] = np.ascontiguousarray(partial).view(np.uint8).ravel()
    out, result = backend.allocate(cols * problem.weight_bytes)
    args = (np.uint64(given), np.uint32(rows), np.uint32(cols), np.uint64(out))
    lds = lds_bytes(problem, configured(problem, 1), backend.device)["rmsnorm_dweight"]
    backend.launch(
        binary.code.functions["rmsnorm_dweight"], -(-cols // finish_columns(problem)),
        FINISH_BLOCK, args, lds, 0,
    )  # fmt: skip
    assert problem.weight_dtype is not None
    return result.view(bounds.STORAGE[problem.weight_dtype]).copy()


def whole_numbers(rows: int, cols: int) -> np.ndarray:
    """Small enough for sums of fp32 without rounding; each row and column has its own."""
    return np.random.default_rng(rows * cols).integers(-99, 100, (rows, cols)).astype(np.float32)


@pytest.mark.parametrize(
    ("cols", "weight"),
    [(1, "float32"), (511, "float32"), (770, "float32"), (772, "float16"), (1000, "bfloat16"),
     (2056, "float32")],
)  # fmt: skip
def test_any_number_of_partial_rows_is_added(cpu: Backend, cols: int, weight: str) -> None:
    problem = Problem.backward(64, cols, "bf16", weight_dtype=weight, need_dx=False)
    binary = built(problem, configured(problem, 1), cpu)
    for rows in PARTIALS:
        partial = whole_numbers(rows, cols)
        want = bounds.encode(partial.sum(axis=0, dtype=np.float64), weight)
        np.testing.assert_array_equal(finish(problem, binary, partial), want, str(rows))


@pytest.mark.parametrize("wave", [64, 32])
def test_the_order_of_the_lanes_changes_no_bit(wave: int) -> None:
    problem = Problem.backward(64, 772, "bf16", weight_dtype="fp32", need_dx=False)
    partial = np.random.default_rng(SEED).standard_normal((300, 772)).astype(np.float32)
    first, *others = (
        finish(
            problem, built(problem, configured(problem, 1), CpuBackend(wave, order=order)), partial
        )
        for order in ORDERS
    )
    for other in others:
        np.testing.assert_array_equal(other, first)
    worst = np.abs(first.view(np.float32) - partial.sum(axis=0, dtype=np.float64)).max()
    assert worst < 1e-4


# ---- planted faults ------------------------------------------------------------------------------

FAULTS = {
    "the first row left out": ("u32 row = group;", "u32 row = group + 1;", r"dweight\["),
    "a group left out": (
        "if (column < cols) {", "if (column < cols && group != 5) {", r"dweight\[",
    ),
    "a run left out": (
        "part[i] = lds[i * RR_FINISH_COLUMNS + threadIdx.x]",
        "part[i] = i ? lds[i * RR_FINISH_COLUMNS + threadIdx.x] : 0.0f", r"dweight\[",
    ),
    "rows past the last added": (
        "if (row + k * FINISH_GROUPS < partials) sum", "if (true) sum", r"dweight\["
    ),
    "the columns of a vector the other way round": (
        "RR_FINISH_COLUMNS + in_block + e]", "RR_FINISH_COLUMNS + in_block + FINISH_VEC - 1 - e]",
        r"dweight\[",
    ),
    "columns past the last stored": (
        "RR_FINISH_COLUMNS && last < cols", "RR_FINISH_COLUMNS", "dweight: byte 0 after the last"
    ),
    "the last column not stored": ("last < cols", "last + 1 < cols", r"dweight\[0, 771\] is nan"),
    "one lane's sum for all of a run": (
        "lane_sum<FINISH_RUN>(sum[e])", "lane_sum<1>(sum[e])", r"dweight\["
    ),
    "no barrier": (
        "  __syncthreads();\n  const u32 last", "  const u32 last", r"dweight\["
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_finish_is_found(cpu64: Backend, name: str) -> None:
    old, new, shows = FAULTS[name]
    problem = Problem.backward(37, 772, "bf16", need_dx=False)
    config = configured(problem, 8)
    assert verify(problem, config, built(problem, config, cpu64), seed=SEED).passed
    verdict = verify(problem, config, built(problem, config, cpu64, old, new), seed=SEED)
    assert not verdict.passed
    assert re.search(shows, verdict.message)


def test_an_early_finish_that_does_not_wait_for_the_rows_is_found(cpu32: Backend) -> None:
    problem = Problem.backward(37, 772, "bf16", need_dx=False)
    config = Config.parse("b64-t64-v8-reg-p1-fe")
    assert verify(problem, config, built(problem, config, cpu32), seed=SEED).passed
    call = "  wait_for_launch_before();\n"
    with pytest.raises(SimulatorError, match="the launch before this one may still be running"):
        verify(problem, config, built(problem, config, cpu32, call, ""), seed=SEED)


def test_columns_of_the_next_block_stored_too_are_found_where_blocks_run_backwards() -> None:
    """Forwards the next block puts them right."""
    problem = Problem.backward(37, 772, "bf16", need_dx=False)
    config = configured(problem, 8)
    old, new = "threadIdx.x < RR_FINISH_COLUMNS && last < cols", "last < cols"
    backwards = CpuBackend(64, order="reverse")
    assert verify(problem, config, built(problem, config, backwards), seed=SEED).passed
    verdict = verify(problem, config, built(problem, config, backwards, old, new), seed=SEED)
    assert re.search(r"dweight\[", verdict.message), verdict


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("row += AT_ONCE * FINISH_GROUPS", "row += FINISH_GROUPS"),  # added again and again
        ("row += AT_ONCE * FINISH_GROUPS", "row += (AT_ONCE + 1) * FINISH_GROUPS"),  # left out
    ],
)
def test_a_fault_that_only_many_partial_rows_show(cpu64: Backend, old: str, new: str) -> None:
    problem = Problem.backward(64, 772, "bf16", weight_dtype="fp32", need_dx=False)
    config = configured(problem, 1)
    right, wrong = built(problem, config, cpu64), built(problem, config, cpu64, old, new)
    for rows, same in ((32, True), (1056, False)):
        partial = whole_numbers(rows, 772)
        want, got = finish(problem, right, partial), finish(problem, wrong, partial)
        assert np.array_equal(got, want) == same

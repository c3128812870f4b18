"""Plan: the ordered launches of one operation, and how they are run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rmsnorm_raw.backends.prepared import OpenLaunch, PreparedLaunch
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.module import Binary
from rmsnorm_raw.problem import Op, Problem
from rmsnorm_raw.space import (
    FINISH_BLOCK,
    column_tiles,
    finish_columns,
    grid_programs,
    lds_bytes,
)

#: HIP refuses a launch of 2**32 threads or more
MAX_THREADS = (1 << 32) - 1
#: the tensors of (rows, cols), which have a row stride
MATRICES = ("x", "dout", "y", "dx")
#: the tensors of an operation, in the order of the addresses that prepared launches take
TENSORS: dict[Op, tuple[str, ...]] = {
    "forward": ("x", "weight", "y", "rstd", "workspace"),
    "backward": ("dout", "x", "weight", "rstd", "dx", "dweight", "workspace", "counter"),
}


class Tensor(NamedTuple):
    """Where a tensor lies: its device address and the elements from one row to the next."""

    address: int
    row_stride: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch.

    Attributes:
        entry_point: the kernel's name in the Binary.
        grid: blocks; grid * block stays under 2**32, HIP's limit.
        block: threads of a block.
        args: NumPy scalars in the kernel's order, pointers as uint64.
        lds_bytes: dynamic LDS (shared memory) of a block.
        early: it may start while the launch before it ends, and waits for that in its own text.
    """

    entry_point: str
    grid: int
    block: int
    args: tuple[np.generic, ...] = field(repr=False)
    lds_bytes: int = 0
    early: bool = False


class Pointer(NamedTuple):
    """An argument that is known once a tensor has an address."""

    tensor: str
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Template:
    """A launch whose pointers are still open; else as :class:`Launch`."""

    entry_point: str
    grid: int
    block: int
    args: tuple[np.generic | Pointer, ...]
    lds_bytes: int = 0
    early: bool = False

    def fill(self, tensors: Mapping[str, Tensor]) -> Launch:
        """The launch on tensors at known addresses."""
        args = (
            np.uint64(tensors[arg.tensor].address + arg.offset_bytes)
            if isinstance(arg, Pointer)
            else arg
            for arg in self.args
        )
        return Launch(
            self.entry_point, self.grid, self.block, tuple(args), self.lds_bytes, self.early
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches of one operation, in order; empty where there is nothing to do."""

    binary: Binary
    launches: tuple[Launch, ...]


def run(plan: Plan, stream: int = 0) -> None:
    """Enqueue a plan's launches on a stream (a raw handle; 0 is the default stream)."""
    backend, functions = plan.binary.backend, plan.binary.code.functions
    for launch in plan.launches:
        backend.launch(
            functions[launch.entry_point], launch.grid, launch.block, launch.args,
            launch.lds_bytes, stream, launch.early,
        )  # fmt: skip


def tensor_bytes(problem: Problem, config: Config, device: DeviceSpec) -> dict[str, int]:
    """Bytes of each tensor that a plan wants, rows contiguous; empty tensors are left out.

    Forward: x, weight, y, rstd; the workspace has the words of blocks that share rows, which a
    plan's first launch clears. Backward: dout, x, weight, rstd, dx, dweight; the workspace has fp32
    partial rows of dW, after fp32 {rstd, mean} of each row on the two-pass path, and then what
    paced programs count by. It begins at a multiple of 16 bytes, the others where problem.alignment
    says, and streams must not share one. Nor a counter: that of a last-block finish is 0 before a
    launch and again after it.
    """
    rows, cols = problem.rows, problem.cols
    matrix, vector = rows * cols * problem.element_bytes, cols * problem.weight_bytes
    if problem.op == "forward":
        sizes = {
            "x": matrix,
            "weight": vector,
            "y": matrix,
            "rstd": 4 * rows * problem.store_rstd,
            "workspace": workspace_bytes(problem, config, device),
        }
    else:
        sizes = {
            "dout": matrix,
            "x": matrix,
            "weight": vector,
            "rstd": 4 * rows * problem.has_rstd,
            "dx": matrix * problem.need_dx,
            "dweight": vector * problem.need_dweight,
            "workspace": workspace_bytes(problem, config, device),
            "counter": 4 * _counts_blocks(problem, config, device),
        }
    return {name: size for name, size in sizes.items() if size}


def workspace_bytes(problem: Problem, config: Config, device: DeviceSpec) -> int:
    """Bytes of scratch memory that a plan wants; 0 where it wants none."""
    if not problem.rows or not problem.cols:
        return 0
    if problem.op == "forward":
        return 8 * _shared_words(problem, config, device)
    return _progress_at(problem, config, device) + 4 * config.paced


def make_plan(
    problem: Problem, config: Config, binary: Binary, tensors: Mapping[str, Tensor]
) -> Plan:
    """The launches of one operation on tensors at known addresses.

    Args:
        problem: what is computed; with rows or cols of 0 there is nothing to launch.
        config: what the binary was rendered for.
        binary: the built kernels.
        tensors: by the names of :func:`tensor_bytes`; unused ones may be absent.
    """
    strides = {name: tensor.row_stride for name, tensor in tensors.items()}
    open_launches = _templates(problem, config, binary, strides)
    return Plan(binary, tuple(template.fill(tensors) for template in open_launches))


def launches(problem: Problem, config: Config, binary: Binary) -> tuple[Launch, ...]:
    """What a plan launches, in order, whatever the tensors: their addresses are left at 0."""
    names = tensor_bytes(problem, config, binary.backend.device)
    return make_plan(problem, config, binary, dict.fromkeys(names, Tensor(0))).launches


def prepare(
    problem: Problem, config: Config, binary: Binary, strides: Mapping[str, int]
) -> tuple[PreparedLaunch, ...]:
    """A plan's launches, to be made many times on tensors at other addresses.

    Call each, in order, with a raw stream and the addresses of all :data:`TENSORS` of the
    operation, anything for those that there are not; the binary's device must be the current one.

    Args:
        problem: see :func:`make_plan`, and so for config and binary.
        strides: the row stride of each tensor that there is, in elements; 0 for the others.
    """
    backend, functions = binary.backend, binary.code.functions
    place = TENSORS[problem.op].index
    prepared = []
    for template in _templates(problem, config, binary, strides):
        pointers = [
            (index, place(arg.tensor), arg.offset_bytes)
            for index, arg in enumerate(template.args)
            if isinstance(arg, Pointer)
        ]
        args = [_NULL if isinstance(arg, Pointer) else arg for arg in template.args]
        opened = OpenLaunch(
            functions[template.entry_point], template.grid, template.block, args,
            template.lds_bytes, pointers, template.early,
        )  # fmt: skip
        prepared.append(backend.prepare(opened))
    return tuple(prepared)


Strides = Mapping[str, int]
_NULL = np.uint64(0)


def _templates(
    problem: Problem, config: Config, binary: Binary, strides: Strides
) -> Iterator[Template]:
    """The launches on tensors of these row strides; one that has none is not there."""
    if problem.rows and problem.cols:
        build = _forward if problem.op == "forward" else _backward
        yield from build(problem, config, binary, strides)


def _forward(
    problem: Problem, config: Config, binary: Binary, strides: Strides
) -> Iterator[Template]:
    device = binary.backend.device
    lds = lds_bytes(problem, config, device)["rmsnorm_forward"]
    words = _at("workspace", strides)
    if count := _shared_words(problem, config, device):
        grid = -(-count // config.block)
        yield Template("rmsnorm_forward_clear", grid, config.block, (words, np.uint64(count)))
    parts = _row_launches(problem, config) if not config.programs else [(0, problem.rows)]
    for first, rows in parts:
        args = (
            *_rows_from("x", first, problem, strides), _at("weight", strides),
            *_rows_from("y", first, problem, strides), _at("rstd", strides, 4 * first), words,
            np.int64(rows), np.uint32(problem.cols), np.float32(problem.eps),
        )  # fmt: skip
        grid = -(-rows // config.rows_per_block) * config.blocks_per_row
        if config.programs:
            grid = grid_programs(problem, config, device)
        yield Template("rmsnorm_forward", grid, config.block, args, lds)


def _backward(
    problem: Problem, config: Config, binary: Binary, strides: Strides
) -> Iterator[Template]:
    device = binary.backend.device
    lds = lds_bytes(problem, config, device)
    partial = _at("workspace", strides, _row_results_bytes(problem, config))
    partials = grid_programs(problem, config, device)
    rows, cols = np.int64(problem.rows), np.uint32(problem.cols)
    dout, x, dx = (_rows_from(name, 0, problem, strides) for name in ("dout", "x", "dx"))
    weight, rstd, dweight = (_at(name, strides) for name in ("weight", "rstd", "dweight"))
    if not (problem.need_dx or problem.need_dweight):
        return
    args: tuple[np.generic | Pointer, ...]
    if config.path == "two_pass":
        if _row_results_bytes(problem, config):
            for first, some in _row_launches(problem, config):
                args = (
                    *_rows_from("dout", first, problem, strides),
                    *_rows_from("x", first, problem, strides), weight,
                    _at("rstd", strides, 4 * first), _at("workspace", strides, 8 * first),
                    np.int64(some), cols, np.float32(problem.eps),
                )  # fmt: skip
                grid = -(-some // config.rows_per_block)
                entry = "rmsnorm_backward_rows"
                yield Template(entry, grid, config.block, args, lds[entry])
        args = (
            *dout, *x, weight, rstd, _at("workspace", strides), *dx, partial, rows, cols,
            np.uint32(partials),
        )  # fmt: skip
        grid = column_tiles(problem, config) * partials
        yield Template("rmsnorm_backward_columns", grid, config.block, args)
    else:
        progress = _at("workspace", strides, _progress_at(problem, config, device))
        args = (
            *dout, *x, weight, rstd, *dx, partial, dweight, _at("counter", strides),
            progress if config.paced else _NULL, rows, cols, np.float32(problem.eps),
        )  # fmt: skip
        yield Template("rmsnorm_backward", partials, config.block, args, lds["rmsnorm_backward"])
    if problem.need_dweight and config.finish != "last_block":
        args = (partial, np.uint32(partials), cols, dweight)
        grid = -(-problem.cols // finish_columns(problem))
        early = config.finish == "early"
        yield Template("rmsnorm_dweight", grid, FINISH_BLOCK, args, lds["rmsnorm_dweight"], early)


def _shared_words(problem: Problem, config: Config, device: DeviceSpec) -> int:
    """AMD: the words of blocks that share rows, one a block, and the count of those started."""
    blocks = config.blocks_per_row
    return problem.rows * blocks + 1 if blocks > 1 and device.dialect == "amd" else 0


def _counts_blocks(problem: Problem, config: Config, device: DeviceSpec) -> bool:
    """Whether the last block to leave must be found; a lone block knows that it is."""
    last_block = config.finish == "last_block" and problem.need_dweight
    return last_block and grid_programs(problem, config, device) > 1


def _progress_at(problem: Problem, config: Config, device: DeviceSpec) -> int:
    """Where in backward's workspace paced programs count, behind the partial rows of dW."""
    partials = grid_programs(problem, config, device) * problem.cols * problem.need_dweight
    return _row_results_bytes(problem, config) + 4 * partials


def _row_results_bytes(problem: Problem, config: Config) -> int:
    needed = config.path == "two_pass" and (problem.need_dx or not problem.has_rstd)
    return -(-8 * problem.rows // 16) * 16 * needed  # what follows is stored 16 bytes at a time


def _row_launches(problem: Problem, config: Config) -> Iterator[tuple[int, int]]:
    """(first row, rows) of launches with one block a row group, each under HIP's thread limit."""
    most = MAX_THREADS // config.block * config.rows_per_block
    for first in range(0, problem.rows, most):
        yield first, min(most, problem.rows - first)


def _rows_from(
    name: str, first: int, problem: Problem, strides: Strides
) -> tuple[np.generic | Pointer, np.int64]:
    stride = strides.get(name, 0)
    return _at(name, strides, first * stride * problem.element_bytes), np.int64(stride)


def _at(name: str, strides: Strides, offset_bytes: int = 0) -> np.generic | Pointer:
    """Where a tensor's bytes from an offset on lie; null where there is no such tensor."""
    return Pointer(name, offset_bytes) if name in strides else _NULL

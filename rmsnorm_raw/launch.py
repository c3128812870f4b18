"""Plan: the ordered launches of one operation, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rmsnorm_raw.backends.prepared import OpenLaunch, Pointer, PreparedLaunch
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.dtypes import stored_bytes
from rmsnorm_raw.module import Binary
from rmsnorm_raw.problem import MATRICES, Op, Problem
from rmsnorm_raw.space import (
    FINISH_BLOCK,
    column_tiles,
    finish_columns,
    grid_programs,
    lds_bytes,
    sums_rows,
)

#: HIP refuses a launch of 2**32 threads or more
MAX_THREADS = (1 << 32) - 1
#: the tensors that no caller sees
SCRATCH = ("workspace", "counter")
#: the tensors of an operation, in the order of the addresses that prepared launches take; a plain
#: problem's come first
TENSORS: dict[Op, tuple[str, ...]] = {
    "forward": (
        "x", "weight", "y", "rstd", "workspace", "bias", "residual", "residual_out", "scale",
    ),
    "backward": (
        "dout", "x", "weight", "rstd", "dx", "dweight", "workspace", "counter", "dresidual_out",
        "dresidual", "dbias",
    ),
}  # fmt: skip


class Tensor(NamedTuple):
    """Where a tensor lies.

    Attributes:
        address: on the device.
        row_stride: of a matrix, elements from one token's rows to the next's.
        head_stride: elements from one head's row of a token to the next's.
    """

    address: int
    row_stride: int = 0
    head_stride: int = 0


Tensors = Mapping[str, Tensor]  # by their usual names


def dense_tensor(problem: Problem, name: str, address: int) -> Tensor:
    """A tensor of a problem whose rows are contiguous."""
    if name not in MATRICES:
        return Tensor(address)
    heads = problem.extras.heads
    return Tensor(address, heads * problem.cols, problem.cols if heads > 1 else 0)


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

    Those of ``problem.operands``, and scratch memory. Forward's workspace has the words of blocks
    that share rows, which a plan's first launch clears. Backward's has fp32 partial rows of dW and
    then of dbias, after fp32 {rstd, mean} of each row on the two-pass path, and then what paced
    programs count by. It begins at a multiple of 16 bytes, the others where problem.alignment says,
    and streams must not share one. Nor a counter: that of a last-block finish is 0 before a launch
    and again after it.
    """
    sizes = {operand.name: operand.size_bytes for operand in problem.operands}
    sizes["workspace"] = _workspace_bytes(problem, config, device)
    if problem.op == "backward":
        sizes["counter"] = 4 * _counts_blocks(problem, config, device)
    return {name: size for name, size in sizes.items() if size}


def make_plan(problem: Problem, config: Config, binary: Binary, tensors: Tensors) -> Plan:
    """The launches of one operation on tensors at known addresses.

    Args:
        problem: what is computed; with rows or cols of 0 there is nothing to launch.
        config: what the binary was rendered for.
        binary: the built kernels.
        tensors: by the names of :func:`tensor_bytes`; unused ones may be absent.
    """
    addresses = [tensors.get(name, _NOWHERE).address for name in TENSORS[problem.op]]
    opened = _open_launches(problem, config, binary, tensors)
    return Plan(
        binary,
        tuple(
            Launch(it.entry_point, it.grid, it.block, it.filled(addresses), it.lds_bytes, it.early)
            for it in opened
        ),
    )


def launches(problem: Problem, config: Config, binary: Binary) -> tuple[Launch, ...]:
    """What a plan launches, in order, whatever the tensors: their addresses are left at 0."""
    names = tensor_bytes(problem, config, binary.backend.device)
    return make_plan(problem, config, binary, dict.fromkeys(names, Tensor(0))).launches


def prepare(
    problem: Problem, config: Config, binary: Binary, tensors: Tensors
) -> tuple[PreparedLaunch, ...]:
    """A plan's launches, to be made many times on tensors at other addresses.

    Call each, in order, with a raw stream and the addresses of all :data:`TENSORS` of the
    operation, anything for those that there are not; the binary's device must be the current one.

    Args:
        problem: see :func:`make_plan`, and so for config and binary.
        tensors: every one that there is, with its strides; the addresses are not read.
    """
    functions = binary.code.functions
    opened = _open_launches(problem, config, binary, tensors)
    return tuple(binary.backend.prepare(functions[it.entry_point], it) for it in opened)


Arg = np.generic | Pointer
Args = tuple[Arg, ...]
_NULL = np.uint64(0)
_NOWHERE = Tensor(0)


def _open_launches(
    problem: Problem, config: Config, binary: Binary, tensors: Tensors
) -> Iterator[OpenLaunch]:
    """The launches on tensors of these strides."""
    if not problem.is_empty:
        build = _forward if problem.op == "forward" else _backward
        yield from build(problem, config, binary.backend.device, tensors)


def _forward(
    problem: Problem, config: Config, device: DeviceSpec, tensors: Tensors
) -> Iterator[OpenLaunch]:
    heads = problem.extras.heads
    at, matrix = _places(problem, tensors)
    lds = lds_bytes(problem, config, device)["rmsnorm_forward"]
    words = at("workspace")
    if count := _shared_words(problem, config, device):
        grid = -(-count // config.block)
        yield OpenLaunch("rmsnorm_forward_clear", grid, config.block, (words, np.uint64(count)))
    parts = _row_launches(problem, config) if not config.programs else [(0, problem.tokens)]
    for first, tokens in parts:
        args: Args = (
            *matrix("x", first), at("weight"), *matrix("y", first),
            at("rstd", 4 * first * heads), words,
            np.int64(tokens), np.uint32(problem.cols), np.float32(problem.eps),
        )  # fmt: skip
        if problem.extras:
            row_scale = 4 * first * heads * (problem.extras.scale == "dynamic")
            args += (
                at("bias"), *matrix("residual", first), *matrix("residual_out", first),
                at("scale", row_scale),
                *_head_strides(("x", "y", "residual", "residual_out"), tensors),
            )  # fmt: skip
        grid = -(-tokens // config.rows_per_block) * config.blocks_per_row * heads
        if config.programs:
            grid = grid_programs(problem, config, device)
        yield OpenLaunch("rmsnorm_forward", grid, config.block, args, lds)


def _backward(
    problem: Problem, config: Config, device: DeviceSpec, tensors: Tensors
) -> Iterator[OpenLaunch]:
    rows = _backward_two_pass if config.path == "two_pass" else _backward_one_pass
    yield from rows(problem, config, device, tensors)
    yield from _finishes(problem, config, device, tensors)


def _backward_one_pass(
    problem: Problem, config: Config, device: DeviceSpec, tensors: Tensors
) -> Iterator[OpenLaunch]:
    at, matrix = _places(problem, tensors)
    partial, bias_partial = _partial_rows(problem, config, device, at)
    args: Args = (
        *matrix("dout"), *matrix("x"), at("weight"), at("rstd"), *matrix("dx"), partial,
        at("dweight"), at("counter"),
        at("workspace", _progress_at(problem, config, device)) if config.paced else _NULL,
        np.int64(problem.tokens), np.uint32(problem.cols), np.float32(problem.eps),
    )  # fmt: skip
    if problem.extras:
        names = ("dout", "x", "dx", "dresidual_out", "dresidual")
        args += (
            *matrix("dresidual_out"), *matrix("dresidual"), bias_partial,
            *_head_strides(names, tensors),
        )  # fmt: skip
    grid, entry = grid_programs(problem, config, device), "rmsnorm_backward"
    yield OpenLaunch(entry, grid, config.block, args, lds_bytes(problem, config, device)[entry])


def _backward_two_pass(
    problem: Problem, config: Config, device: DeviceSpec, tensors: Tensors
) -> Iterator[OpenLaunch]:
    at, matrix = _places(problem, tensors)
    cols = np.uint32(problem.cols)
    args: Args
    if _row_results_bytes(problem, config):
        entry = "rmsnorm_backward_rows"
        lds = lds_bytes(problem, config, device)[entry]
        for first, rows in _row_launches(problem, config):
            args = (
                *matrix("dout", first), *matrix("x", first), at("weight"), at("rstd", 4 * first),
                at("workspace", 8 * first), np.int64(rows), cols, np.float32(problem.eps),
            )  # fmt: skip
            yield OpenLaunch(entry, -(-rows // config.rows_per_block), config.block, args, lds)
    partial, bias_partial = _partial_rows(problem, config, device, at)
    partials = grid_programs(problem, config, device)
    args = (
        *matrix("dout"), *matrix("x"), at("weight"), at("rstd"), at("workspace"), *matrix("dx"),
        partial, np.int64(problem.tokens), cols, np.uint32(partials),
    )  # fmt: skip
    if problem.extras:
        args += (*matrix("dresidual_out"), *matrix("dresidual"), bias_partial)
    grid = column_tiles(problem, config) * partials
    yield OpenLaunch("rmsnorm_backward_columns", grid, config.block, args)


def _finishes(
    problem: Problem, config: Config, device: DeviceSpec, tensors: Tensors
) -> Iterator[OpenLaunch]:
    """dweight and dbias from the partial rows."""
    at, _ = _places(problem, tensors)
    partial, bias_partial = _partial_rows(problem, config, device, at)
    more, lds = problem.extras, lds_bytes(problem, config, device)
    partials, columns = grid_programs(problem, config, device), problem.cols
    if more.per_head:  # a row of partial sums has all heads
        partials, columns = partials // more.heads, columns * more.heads
    size = np.uint32(partials), np.uint32(columns)
    grid = -(-columns // finish_columns(problem))
    if problem.need_dweight and config.finish != "last_block":
        entry, early = "rmsnorm_dweight", config.finish == "early"
        args = (partial, *size, at("dweight"))
        yield OpenLaunch(entry, grid, FINISH_BLOCK, args, lds[entry], early)
    if more.bias_dtype:
        entry = "rmsnorm_dbias"
        args = (bias_partial, *size, at("dbias"))
        yield OpenLaunch(entry, grid, FINISH_BLOCK, args, lds[entry])


def _partial_rows(
    problem: Problem, config: Config, device: DeviceSpec, at: Callable[..., Arg]
) -> tuple[Arg, Arg]:
    """Where the partial rows of dW and of dbias lie."""
    of_bias = problem.extras.bias_dtype is not None
    return (
        at("workspace", _row_results_bytes(problem, config)),
        at("workspace", _bias_partial_at(problem, config, device)) if of_bias else _NULL,
    )


def _workspace_bytes(problem: Problem, config: Config, device: DeviceSpec) -> int:
    if not problem.rows or not problem.cols:
        return 0
    if problem.op == "forward":
        return 8 * _shared_words(problem, config, device)
    return _progress_at(problem, config, device) + 4 * config.paced


def _shared_words(problem: Problem, config: Config, device: DeviceSpec) -> int:
    """AMD: the words of blocks that share rows, one a block, and the count of those started."""
    blocks = config.blocks_per_row
    return problem.rows * blocks + 1 if blocks > 1 and device.dialect == "amd" else 0


def _counts_blocks(problem: Problem, config: Config, device: DeviceSpec) -> bool:
    """Whether the last block to leave must be found; a lone block knows that it is."""
    last_block = config.finish == "last_block" and problem.need_dweight
    return last_block and grid_programs(problem, config, device) > 1


def _bias_partial_at(problem: Problem, config: Config, device: DeviceSpec) -> int:
    """Where in backward's workspace the partial rows of dbias lie, behind those of dW."""
    return _row_results_bytes(problem, config) + problem.need_dweight * _partial_bytes(
        problem, config, device
    )


def _progress_at(problem: Problem, config: Config, device: DeviceSpec) -> int:
    """Where in backward's workspace paced programs count, behind all partial rows."""
    of_bias = _partial_bytes(problem, config, device) if problem.extras.bias_dtype else 0
    return _bias_partial_at(problem, config, device) + of_bias


def _partial_bytes(problem: Problem, config: Config, device: DeviceSpec) -> int:
    return 4 * grid_programs(problem, config, device) * problem.cols


def _row_results_bytes(problem: Problem, config: Config) -> int:
    needed = config.path == "two_pass" and sums_rows(problem)
    return -(-8 * problem.rows // 16) * 16 * needed  # what follows is stored 16 bytes at a time


def _row_launches(problem: Problem, config: Config) -> Iterator[tuple[int, int]]:
    """(first token, tokens) of launches with a block a row group, each under HIP's thread limit."""
    most = MAX_THREADS // config.block // problem.extras.heads * config.rows_per_block
    for first in range(0, problem.tokens, most):
        yield first, min(most, problem.tokens - first)


def _places(
    problem: Problem, tensors: Tensors
) -> tuple[Callable[..., Arg], Callable[..., tuple[Arg, np.int64]]]:
    """What gives a tensor's bytes from an offset on, and a matrix from a token on with its stride.

    Null where there is no such tensor.
    """
    place = TENSORS[problem.op].index
    element_bytes = {each.name: stored_bytes(each.dtype) for each in problem.operands}

    def at(name: str, offset_bytes: int = 0) -> Arg:
        return Pointer(place(name), offset_bytes) if name in tensors else _NULL

    def matrix(name: str, first: int = 0) -> tuple[Arg, np.int64]:
        if name not in tensors or name not in element_bytes:
            return _NULL, np.int64(0)
        stride = tensors[name].row_stride
        return at(name, first * stride * element_bytes[name]), np.int64(stride)

    return at, matrix


def _head_strides(names: Sequence[str], tensors: Tensors) -> Iterator[np.int64]:
    return (np.int64(tensors[name].head_stride if name in tensors else 0) for name in names)

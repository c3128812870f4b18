"""Source: the HIP text and the defines that make one kernel, ready for any of the compilers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from rmsnorm_raw.config import Config
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.kernels import (
    backward,
    backward_two_pass,
    blocks,
    extras,
    finish,
    forward,
    pace,
    prelude,
    ring,
    rows,
)
from rmsnorm_raw.problem import Op, Problem
from rmsnorm_raw.space import (
    FINISH_BLOCK,
    TILE_CHUNKS,
    chunks,
    elements,
    finish_columns,
    require_fit,
    ring_tensors,
    row_stores,
)


@dataclass(frozen=True, repr=False)
class Source:
    """What a backend compiles.

    Attributes:
        name: the file name that compilers print, e.g. "rmsnorm_forward.hip".
        text: the whole HIP text, prelude first; it includes nothing.
        defines: (name, value) pairs, passed as ``-D`` options; they carry the config.
        entry_points: the ``extern "C"`` kernels in the text.
        slug: the config's slug, for messages; "" where there is none.
    """

    name: str
    text: str
    defines: tuple[tuple[str, str], ...]
    entry_points: tuple[str, ...]
    slug: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of all that the compiler sees (text and defines), as hex."""
        seen = "\0".join((self.text, *(f"{name}={value}" for name, value in self.defines)))
        return hashlib.sha256(seen.encode()).hexdigest()

    def __repr__(self) -> str:
        lines = len(self.text.splitlines())
        return f"<Source {self.name} {self.slug}, {lines} lines, digest {self.digest[:8]}>"


_KIND = {
    "float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "float8_e4m3fn": "E4M3",
    "float8_e4m3fnuz": "E4M3_FNUZ",
}  # fmt: skip
_PATH = {
    "registers": "PATH_REGISTERS",
    "pingpong": "PATH_PINGPONG",
    "lds": "PATH_LDS",
    "two_pass": "PATH_TWO_PASS",
}
_POLICY = {"default": "POLICY_DEFAULT", "keep": "POLICY_KEEP", "stream": "POLICY_STREAM"}


def target_defines(device: DeviceSpec) -> tuple[tuple[str, str], ...]:
    """The defines that name a target to the prelude: wave width, and the AMD generation."""
    target = [("RR_WAVE", str(device.wave))]
    if device.dialect == "amd":
        target.append(("RR_GFX", device.arch.removeprefix("gfx")))
    return tuple(target)


def whole_text(op: Op) -> str:
    """All the text that the configs of an operation are rendered from."""
    shared = prelude.TEXT + rows.TEXT + extras.TEXT + blocks.TEXT + ring.TEXT + pace.TEXT
    if op == "forward":
        return shared + forward.TEXT
    return shared + finish.TEXT + backward.TEXT + backward_two_pass.TEXT + finish.BIAS_TEXT


def render(
    problem: Problem, config: Config, device: DeviceSpec, *, runtime_cols: bool = False
) -> Source:
    """The kernels of one problem and config for one target.

    Args:
        problem: what is computed; rows and eps do not enter the text.
        config: a config that fits it.
        device: the target.
        runtime_cols: take N as a run-time argument, so that rows of other widths with as many
            chunks share the build (the simulator does); a GPU's kernels are built for one N.

    Raises:
        InvalidConfig: the config does not fit, with the reason.
    """
    require_fit(problem, device, config)
    weight_dtype = problem.weight_dtype or problem.dtype
    bound = config.waves_per_eu if device.dialect == "amd" else config.min_blocks
    common: dict[str, str | int] = {
        "RR_BLOCK": config.block,
        "RR_SECOND_BOUND": bound,
        "RR_THREADS_PER_ROW": config.threads_per_row,
        "RR_ROW_BLOCKS": config.blocks_per_row,
        "RR_PATH": _PATH[config.path],
        "RR_X": _KIND[problem.dtype],
        "RR_W": _KIND[weight_dtype],
        "RR_HAS_WEIGHT": int(problem.weight_dtype is not None),
        "RR_ELEMENTS": elements(problem, config),
        "RR_COLS": 0 if runtime_cols else problem.cols,
        "RR_LOAD_POLICY": _POLICY[config.load_policy],
        "RR_STORE_POLICY": _POLICY[config.store_policy],
    }
    if config.path == "two_pass":
        common["RR_TILE_CHUNKS"] = TILE_CHUNKS
    else:
        common["RR_CHUNKS"] = max(1, chunks(problem, config))
    forward_op = problem.op == "forward"
    last_block = problem.need_dweight and config.finish == "last_block"
    if config.path == "lds":
        common |= {
            "RR_STAGES": config.stages,
            "RR_BULK": int(config.bulk),
            "RR_REREAD": int(config.reread),
            "RR_PACED": int(config.paced),
            "RR_RING_TENSORS": ring_tensors(problem),
            "RR_ROW_STORES": row_stores(problem, config),
        }
    if forward_op:
        own = {"RR_STORE_RSTD": int(problem.store_rstd)}
        entry_points: tuple[str, ...] = ("rmsnorm_forward",)
        if config.blocks_per_row > 1 and device.dialect == "amd":
            entry_points = ("rmsnorm_forward_clear", "rmsnorm_forward")
    else:
        own = {
            "RR_HAS_RSTD": int(problem.has_rstd),
            "RR_NEED_DX": int(problem.need_dx),
            "RR_NEED_DW": int(problem.need_dweight),
            "RR_LAST_BLOCK": int(last_block),
            "RR_EARLY_FINISH": int(problem.need_dweight and config.finish == "early"),
            "RR_FINISH_BLOCK": FINISH_BLOCK,
            "RR_FINISH_COLUMNS": finish_columns(problem),
        }
        entry_points = ("rmsnorm_backward",)
        if config.path == "two_pass":
            entry_points = ("rmsnorm_backward_rows", "rmsnorm_backward_columns")
        if problem.need_dweight and not last_block:
            entry_points += ("rmsnorm_dweight",)
        if problem.extras.bias_dtype:
            entry_points += ("rmsnorm_dbias",)
    text = prelude.TEXT + rows.TEXT
    if problem.extras:
        common |= _extras_defines(problem)
        text += extras.TEXT
    if config.blocks_per_row > 1 or config.bulk:
        text += blocks.TEXT
    if config.path == "lds":
        text += ring.TEXT + pace.TEXT * config.paced
    text += forward.TEXT if forward_op else finish.TEXT + backward.TEXT
    if not forward_op and config.path == "two_pass":
        text += backward_two_pass.TEXT
    if not forward_op and problem.extras.bias_dtype:
        text += finish.BIAS_TEXT
    defines = target_defines(device) + tuple((k, str(v)) for k, v in (common | own).items())
    name = f"rmsnorm_{problem.op}.hip"
    return Source(name, text, defines, entry_points, config.slug)


def _extras_defines(problem: Problem) -> dict[str, str | int]:
    """What the kernels want to know of a problem's extras; a dtype that is not there is x's."""
    more, own = problem.extras, problem.dtype
    residual, residual_out = more.residual_dtype, more.residual_out_dtype
    if problem.op == "backward" and not problem.need_dx:
        residual = residual_out = None
    return {
        "RR_EXTRAS": 1,
        "RR_Y": _KIND[problem.out_dtype],
        "RR_DX": _KIND[more.dx_dtype or own],
        "RR_HAS_BIAS": int(more.bias_dtype is not None),
        "RR_B": _KIND[more.bias_dtype or own],
        "RR_HAS_RESIDUAL": int(residual is not None),
        "RR_RESIDUAL": _KIND[residual or own],
        "RR_HAS_RESIDUAL_OUT": int(residual_out is not None),
        "RR_RESIDUAL_OUT": _KIND[residual_out or own],
        "RR_WEIGHT_OFFSET": f"{float(np.float32(more.weight_offset)).hex()}f",
        "RR_LLAMA": int(more.casting == "llama"),
        "RR_HEADS": more.heads,
        "RR_PER_HEAD": int(more.per_head),
        "RR_SCALE": f"SCALE_{more.scale.upper()}",
    }

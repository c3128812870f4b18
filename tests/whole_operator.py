"""Problems that between them have every extra of both operations, and every dtype of each."""

from __future__ import annotations

from dataclasses import replace

from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.problem import Problem

OCP, FNUZ = "float8_e4m3fn", "float8_e4m3fnuz"
ROWS = 32768


def forward(cols: int, dtype: str, **more: object) -> Problem:
    return Problem.forward(ROWS, cols, dtype, **more)  # type: ignore[arg-type]


def backward(cols: int, dtype: str, **more: object) -> Problem:
    return Problem.backward(ROWS, cols, dtype, **more)  # type: ignore[arg-type]


#: widths of whole chunks, with a tail, of odd elements, of one head, and too wide to be kept
FORWARD = (
    forward(8192, "bf16", residual_dtype="bf16"),
    forward(8192, "bf16", residual_dtype="fp32"),
    forward(8192, "bf16", residual_dtype="bf16", residual_out_dtype=None, weight_dtype="fp32"),
    forward(1024, "fp16", residual_dtype="fp16", bias_dtype="fp32", weight_offset=1.0),
    forward(3000, "fp32", residual_dtype="bf16", residual_out_dtype="fp16", store_rstd=False),
    forward(1000, "bf16", residual_dtype="bf16", bias_dtype="bf16"),
    forward(65536, "bf16", residual_dtype="bf16"),
    forward(8192, "bf16", out_dtype="fp32", bias_dtype="fp16"),
    forward(8192, "fp32", out_dtype="bf16", weight_dtype=None, bias_dtype="bf16"),
    forward(4096, "fp32", out_dtype="fp16"),
    forward(1024, "bf16", casting="llama"),
    forward(1024, "fp16", casting="llama", out_dtype="fp32", residual_dtype="fp32"),
    forward(128, "bf16", heads=32),
    forward(128, "bf16", heads=8, per_head=True, bias_dtype="bf16", weight_offset=1.0),
    forward(4096, "bf16", out_dtype=OCP, scale="static"),
    forward(4096, "bf16", out_dtype=OCP, scale="dynamic", residual_dtype="bf16"),
    forward(3000, "fp32", out_dtype=OCP, scale="dynamic", weight_dtype=None),
    forward(770, "fp16", out_dtype=OCP, scale="static", casting="llama"),
    forward(128, "bf16", out_dtype=OCP, scale="dynamic", heads=8),
    forward(65536, "bf16", out_dtype=OCP, scale="dynamic"),
)
BACKWARD = (
    backward(8192, "bf16", dresidual_out_dtype="bf16"),
    backward(4096, "bf16", dresidual_out_dtype="fp32", residual_dtype="fp32"),
    backward(1000, "fp16", dresidual_out_dtype="fp16", bias_dtype="fp16", has_rstd=False),
    backward(1024, "bf16", bias_dtype="bf16", weight_offset=1.0),
    backward(4096, "bf16", bias_dtype="fp32", dresidual_out_dtype="bf16", residual_dtype="bf16"),
    backward(4096, "bf16", out_dtype="fp32", residual_dtype="fp16"),
    backward(4096, "fp32", out_dtype="bf16", dx_dtype="bf16"),
    backward(3000, "fp16", dx_dtype="fp32", need_dweight=False),
    backward(128, "bf16", heads=32),
    backward(128, "bf16", heads=8, per_head=True, bias_dtype="bf16", dresidual_out_dtype="bf16"),
    backward(65536, "bf16", dresidual_out_dtype="bf16", bias_dtype="bf16"),
    backward(65536, "fp32", dresidual_out_dtype="bf16", residual_dtype="bf16"),
)


def fitting(problem: Problem, arch: str) -> Problem:
    """The problem with the 8-bit y that a device converts to."""
    if problem.extras.scale == "none":
        return problem
    fp8 = FNUZ if KNOWN[arch].arch == "gfx942" else OCP
    return replace(problem, extras=replace(problem.extras, out_dtype=fp8))

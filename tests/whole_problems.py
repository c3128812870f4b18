"""Problems with extras that between them have every extra, in both operations."""

from __future__ import annotations

from rmsnorm_raw.problem import Problem


def whole_problems(tokens: int, cols: int) -> list[Problem]:
    """A dozen and a half of problems of some tokens; those of several heads have narrow rows."""
    head, fp8 = min(cols, 128), "float8_e4m3fn"
    forward, backward = Problem.forward, Problem.backward
    return [
        forward(tokens, cols, "bf16", residual_dtype="bf16"),
        forward(tokens, cols, "bf16", residual_dtype="fp32", bias_dtype="fp16", weight_offset=1.0),
        forward(tokens, cols, "fp32", residual_dtype="bf16", out_dtype="fp16", casting="llama"),
        forward(tokens, cols, "fp16", residual_dtype="fp16", residual_out_dtype=None),
        forward(tokens, cols, "fp16", residual_out_dtype="fp32", weight_dtype=None),
        forward(tokens, cols, "bf16", casting="llama", weight_dtype="fp32", out_dtype="fp32"),
        forward(tokens, cols, "bf16", out_dtype=fp8, scale="dynamic", bias_dtype="bf16"),
        forward(tokens, cols, "bf16", out_dtype=fp8, scale="dynamic", residual_dtype="bf16"),
        forward(tokens, cols, "fp32", out_dtype=fp8, scale="static", weight_dtype=None),
        forward(3 * tokens, head, "bf16", heads=3, per_head=True, bias_dtype="fp32"),
        forward(4 * tokens, head, "fp32", heads=4, weight_offset=0.5),
        forward(
            5 * tokens, head, "fp16", heads=5, out_dtype=fp8, scale="dynamic",
            residual_dtype="fp32",
        ),
        backward(tokens, cols, "bf16", dresidual_out_dtype="bf16"),
        backward(tokens, cols, "bf16", bias_dtype="bf16", weight_offset=1.0, has_rstd=False),
        backward(
            tokens, cols, "fp32", dresidual_out_dtype="fp32", out_dtype="bf16", dx_dtype="bf16",
            residual_dtype="fp32", bias_dtype="fp32",
        ),
        backward(tokens, cols, "fp16", dresidual_out_dtype="fp32", need_dweight=False),
        backward(tokens, cols, "bf16", bias_dtype="fp16", need_dx=False, weight_dtype=None),
        backward(3 * tokens, head, "bf16", heads=3, per_head=True, bias_dtype="bf16"),
        backward(4 * tokens, head, "fp32", heads=4, dresidual_out_dtype="fp32"),
    ]  # fmt: skip

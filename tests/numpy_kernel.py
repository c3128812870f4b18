"""RMSNorm as a kernel in NumPy, to be broken on purpose, and the gate's verdict on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rmsnorm_raw import bounds, check
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.bounds import Bits
from rmsnorm_raw.check import Verdict
from rmsnorm_raw.dtypes import LARGEST_FP8
from rmsnorm_raw.gate import Case, HostEngine
from rmsnorm_raw.gate_device import DeviceEngine
from rmsnorm_raw.launch import Tensors
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.trial import Subject, bits_of

SEED = 7
CHAINS = dict.fromkeys(("rstd", "y", "residual_out", "scale", "dx", "dresidual"), 16)
CHAINS |= {"dweight": 64, "dbias": 64}
Stored = dict[str, Bits]
Array = np.ndarray
Kernel = Callable[[Tensors, int], None]  # it computes so many rows on tensors


class NumpyKernel:
    """RMSNorm in fp32, by the formulas that the HIP kernels use, on tensors in a backend's memory.

    Attributes:
        problem: what it computes; where it is judged by another, what it leaves out is its fault.
        fault: what it does wrong, in the words that are asked for below.
        spoil: changes the stored outputs, by name, before they are written.
        calls: the runs so far.
    """

    def __init__(
        self,
        problem: Problem,
        backend: Backend,
        *,
        fault: str = "",
        spoil: Callable[[Stored], object] = lambda outputs: None,
    ) -> None:
        self.problem, self.backend = problem, backend
        self.fault, self.spoil = fault, spoil
        self.tensors: Tensors = {}
        self.calls = 0
        self.asked: set[str] = set()

    def __call__(self, tensors: Tensors, rows: int) -> None:
        self.problem = dataclasses.replace(self.problem, rows=rows)
        self.tensors = tensors
        self.calls += 1
        results = self.forward() if self.problem.op == "forward" else self.backward()
        outputs = {name: self.store(name, results[name]) for name in self.outputs}
        assert not self.fault or self.fault in self.asked, f"no such fault: {self.fault}"
        self.spoil(outputs)
        for name, stored in outputs.items():
            self.write(name, stored)

    def wrong(self, fault: str) -> bool:
        self.asked.add(fault)
        return fault == self.fault

    # ---- the operation ---------------------------------------------------------------------------

    def forward(self) -> dict[str, Array]:
        problem, more = self.problem, self.problem.extras
        h = self.read("x")
        if more.residual_dtype:
            residual = self.read("residual")
            if self.wrong("the residual is rounded to x's dtype"):
                residual = nearest(residual, problem.dtype)
            h = h + residual * np.float32(1 + self.wrong("the residual is added twice"))
        kept = h
        if more.residual_out_dtype:
            if self.wrong("the sum is rounded to bf16 on the way"):
                kept = nearest(h, "bfloat16")
            rounded = nearest(h, more.residual_out_dtype)
            h = rounded if self.wrong("y is of the rounded sum") else h
        else:
            rounded = h
        rstd = self.rstd(rounded if self.wrong("the variance is the rounded sum's") else h)
        xhat = h * rstd
        if more.casting == "llama":
            xhat = nearest(xhat, problem.dtype)
        y = xhat * self.weight()
        if more.bias_dtype:
            bias = self.list("bias")
            bias = np.roll(bias, 1, axis=-1) if self.wrong("the bias of another column") else bias
            y = y + bias
        results = {"rstd": rstd, "residual_out": kept}
        if more.scale == "static":
            y = y / self.read("scale")
        elif more.scale == "dynamic":
            of = h if self.wrong("the scale is max|h|'s") else y
            top = np.abs(of).max(axis=1, keepdims=True)
            scale = np.maximum(top / np.float32(LARGEST_FP8[problem.out_dtype]), 2.0**-100)
            results["scale"] = scale.astype(np.float32)
            other = self.wrong("y has the scale of another row")
            y = y / np.roll(results["scale"], int(other), axis=0)
        return results | {"y": y}

    def backward(self) -> dict[str, Array]:
        problem, more = self.problem, self.problem.extras
        x, dout, weight = self.read("x"), self.read("dout"), self.weight()
        rstd = self.read("rstd") if problem.has_rstd else self.rstd(x)
        g, xhat = dout * weight, x * rstd
        added = np.float32(0)
        if problem.need_dx and more.residual_out_dtype:
            added = self.read("dresidual_out")
            if self.wrong("dresidual_out goes through the norm"):
                g, added = g + added, np.float32(0)
        dot = (g * xhat).sum(axis=1, keepdims=True) / np.float32(problem.cols)
        row_term = xhat * dot * np.float32(not self.wrong("dx has no row term"))
        norm = rstd * (g - row_term)
        if self.wrong("dx is rounded before dresidual_out is added"):
            norm = nearest(norm, problem.dtype)
        dx = norm + added
        if self.wrong("dbias lacks the last row"):
            of_bias = np.concatenate([dout[: -more.heads], 0 * dout[-more.heads :]])
        else:
            of_bias = dout * xhat if self.wrong("dbias is dweight") else dout
        return {
            "dx": dx,
            "dresidual": dx,
            "dweight": self.over_rows(dout * xhat),
            "dbias": self.over_rows(of_bias),
        }

    def rstd(self, h: Array) -> Array:
        mean = np.square(h).sum(axis=1, keepdims=True) / np.float32(self.problem.cols)
        return 1 / np.sqrt(mean + np.float32(self.problem.eps))

    def weight(self) -> Array:
        problem = self.problem
        if not problem.weight_dtype:
            return np.ones(1, np.float32)
        return self.list("weight") + np.float32(problem.extras.weight_offset)

    def list(self, name: str) -> Array:
        """(1, cols), or (rows, cols) where heads have their own."""
        problem, more = self.problem, self.problem.extras
        parts = self.read(name).reshape(-1, problem.cols)
        if more.per_head and self.wrong(f"the {name} of another head"):
            parts = np.roll(parts, 1, axis=0)
        return np.tile(parts, (problem.tokens, 1)) if more.per_head else parts

    def over_rows(self, terms: Array) -> Array:
        steps = terms.reshape(-1, self.case.columns[1])
        if self.wrong("the sums over rows are another head's"):
            steps = np.roll(steps, self.problem.cols, axis=1)
        return steps.sum(axis=0, keepdims=True)

    # ---- memory ----------------------------------------------------------------------------------

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.case.outputs

    @property
    def case(self) -> Case:
        return Case(self.problem, 0, False)

    def store(self, name: str, values: Array) -> Bits:
        dtype = self.case.shape(name)[2]
        if dtype in LARGEST_FP8:
            return self.store_fp8(values, dtype)
        if dtype == "bfloat16" and self.wrong("stores are cut"):
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return bounds.encode(values.astype(np.float64), dtype)

    def store_fp8(self, values: Array, dtype: str) -> Bits:
        largest = np.float32(LARGEST_FP8[dtype])
        if self.wrong("large numbers wrap"):
            values = np.fmod(values, largest)
        if not self.wrong("nothing is clamped"):
            values = np.clip(values, -largest, largest)
        if self.wrong("stores are cut"):
            step = bounds.spacing(values.astype(np.float64), dtype)
            values = (np.trunc(values / step) * step).astype(np.float32)
        return values.astype(np.dtype(getattr(ml_dtypes, dtype))).view(np.uint8)

    def read(self, name: str) -> Array:
        engine, case = HostEngine(self.backend), self.case
        operand = case.operand(name)
        if operand.is_matrix:
            return engine._rows(case, self.tensors, name, 0, operand.rows).astype(np.float32)
        bits = bits_of(engine, case, self.tensors, name)
        return bounds.decode(bits, operand.dtype).astype(np.float32)

    def write(self, name: str, stored: Bits) -> None:
        tensor, item, heads = self.tensors[name], stored.itemsize, self.case.heads(name)
        if not self.case.operand(name).is_matrix:
            self.put(tensor.address, stored)
            return
        for row, bits in enumerate(stored):
            at = row // heads * tensor.row_stride + row % heads * tensor.head_stride
            self.put(tensor.address + at * item, bits)

    def put(self, address: int, data: Array) -> None:
        self.backend.from_host(address, np.ascontiguousarray(data), 0)


def nearest(values: Array, dtype: str) -> Array:
    """float32 values rounded to a dtype, as float32."""
    return bounds.decode(bounds.encode(values.astype(np.float64), dtype), dtype).astype(np.float32)


def subject(kernel: Kernel) -> Subject:
    """What the gate judges: one token is run in place."""
    return Subject(lambda problem, tensors: kernel(tensors, problem.rows), CHAINS, {}, 1)


def judge(kernel: Kernel, problem: Problem, backend: Backend) -> Verdict:
    """Both engines' verdict, which must be the same."""
    verdicts = [
        check._judge(problem, subject(kernel), engine(backend), SEED)
        for engine in (HostEngine, DeviceEngine)
    ]
    assert verdicts[0].passed == verdicts[1].passed
    assert verdicts[0].worst == pytest.approx(verdicts[1].worst, rel=1e-6)
    return verdicts[0]


def forward(x: str = "bf16", w: str | None = "same", cols: int = 200, **more: Any) -> Problem:
    return Problem.forward(40, cols, x, weight_dtype=w, **more)


def backward(x: str = "bf16", w: str | None = "same", cols: int = 200, **more: Any) -> Problem:
    return Problem.backward(40, cols, x, weight_dtype=w, **more)


FN, FNUZ = LARGEST_FP8
#: each operand in each dtype, each way of scaling, heads with and without a weight each
FORWARDS = [
    forward("bf16", bias_dtype="bf16"),
    forward("bf16", "fp32", bias_dtype="fp32", residual_dtype="fp32", weight_offset=1.0),
    forward("fp16", "fp16", residual_dtype="fp16", residual_out_dtype="fp32", out_dtype="fp32"),
    forward("fp32", "bf16", bias_dtype="fp16", residual_dtype="bf16", residual_out_dtype="fp16",
            out_dtype="bf16"),
    forward("fp32", None, bias_dtype="bf16", residual_dtype="fp32", residual_out_dtype="bf16"),
    forward("bf16", "fp16", residual_dtype="bf16", residual_out_dtype=None, out_dtype="fp16"),
    forward("bf16", residual_out_dtype="fp16"),
    forward("bf16", casting="llama"),
    forward("bf16", "fp32", casting="llama", out_dtype="fp32", bias_dtype="fp32"),
    forward("fp16", casting="llama", residual_dtype="bf16", weight_offset=1.0),
    forward("fp32", casting="llama"),
    forward("bf16", "fp32", heads=4, per_head=True, residual_dtype="fp32"),
    forward("fp16", heads=5, residual_dtype="fp16", bias_dtype="fp16"),
    forward("bf16", heads=8, per_head=True, bias_dtype="bf16", weight_offset=1.0, store_rstd=False),
    forward("bf16", out_dtype=FN, scale="static"),
    forward("fp16", out_dtype=FNUZ, scale="static", bias_dtype="fp32", residual_dtype="fp16"),
    forward("fp32", None, out_dtype=FN, scale="dynamic"),
    forward("bf16", out_dtype=FNUZ, scale="dynamic", residual_dtype="bf16", bias_dtype="bf16"),
    forward("bf16", out_dtype=FN, scale="dynamic", casting="llama"),
    forward("fp16", "fp32", out_dtype=FN, scale="dynamic", heads=10, per_head=True),
]  # fmt: skip
BACKWARDS = [
    backward("bf16", bias_dtype="bf16"),
    backward("bf16", None, bias_dtype="fp32"),
    backward("fp16", bias_dtype="fp16", need_dweight=False, need_dx=False),
    backward("bf16", "fp32", dresidual_out_dtype="fp32", residual_dtype="fp16", weight_offset=1.0),
    backward("fp32", "bf16", dresidual_out_dtype="bf16", out_dtype="fp16", dx_dtype="bf16"),
    backward("fp16", dresidual_out_dtype="fp16", has_rstd=False, residual_dtype="bf16"),
    backward("bf16", weight_offset=0.1, out_dtype="fp32", dx_dtype="fp32"),
    backward("bf16", "fp32", heads=4, per_head=True, bias_dtype="bf16", residual_dtype="fp32",
             dresidual_out_dtype="fp32"),
    backward("fp16", heads=5, bias_dtype="fp32"),
    backward("fp32", heads=8, per_head=True, weight_offset=-0.5, dx_dtype="fp16", has_rstd=False),
]  # fmt: skip

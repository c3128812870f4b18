"""RMSNorm as a kernel in NumPy, to be broken on purpose, and the gate's verdict on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from rmsnorm_raw import bounds, check
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.bounds import Bits
from rmsnorm_raw.check import Verdict
from rmsnorm_raw.gate import Case, DeviceEngine, HostEngine
from rmsnorm_raw.launch import Tensor
from rmsnorm_raw.problem import Problem

SEED = 7
CHAINS = {"rstd": 16, "y": 16, "dx": 16, "dweight": 64}
Tensors = Mapping[str, Tensor]
Stored = dict[str, Bits]


class NumpyKernel:
    """RMSNorm in fp32, by the formulas that the HIP kernels use, on tensors in a backend's memory.

    Attributes:
        row_term: dx subtracts its projection on xhat.
        truncate: the store cuts fp32 instead of rounding it.
        spoil: changes the stored outputs, by name, before they are written.
        calls: the runs so far.
    """

    def __init__(
        self,
        problem: Problem,
        backend: Backend,
        *,
        row_term: bool = True,
        truncate: bool = False,
        spoil: Callable[[Stored], object] = lambda outputs: None,
    ) -> None:
        self.problem, self.backend = problem, backend
        self.row_term, self.truncate, self.spoil = row_term, truncate, spoil
        self.tensors: Tensors = {}
        self.calls = 0

    def __call__(self, tensors: Tensors) -> None:
        problem = self.problem
        self.tensors = tensors
        self.calls += 1
        x = self.read("x")
        weight = self.read("weight") if problem.weight_dtype else np.ones(1, np.float32)
        mean = np.square(x).sum(axis=1) / np.float32(problem.cols)
        rstd = 1 / np.sqrt(mean + np.float32(problem.eps))
        results = {"y": x * rstd[:, None] * weight, "rstd": rstd[:, None]}
        if problem.op == "backward":
            dout = self.read("dout")
            if problem.has_rstd:
                rstd = self.read("rstd")[:, 0]
            g, xhat = dout * weight, x * rstd[:, None]
            dot = (g * xhat).sum(axis=1, keepdims=True) / np.float32(problem.cols)
            dx = rstd[:, None] * (g - xhat * dot * np.float32(self.row_term))
            results = {"dx": dx, "dweight": (dout * xhat).sum(axis=0)[None]}
        outputs = {name: self.store(name, results[name]) for name in self.outputs}
        self.spoil(outputs)
        for name, stored in outputs.items():
            self.write(name, stored)

    @property
    def outputs(self) -> list[str]:
        return check._names(self.problem)[1]

    def store(self, name: str, values: np.ndarray) -> Bits:
        dtype = Case(self.problem, 0, False).shape(name)[2]
        if self.truncate and dtype == "bfloat16":
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return bounds.encode(values.astype(np.float64), dtype)

    def read(self, name: str) -> np.ndarray:
        engine, case = HostEngine(self.backend), Case(self.problem, 0, False)
        rows = case.shape(name)[0]
        if name == "rstd":
            return check._bits(engine, case, self.tensors, "rstd").view(np.float32)
        return engine._rows(case, self.tensors, name, 0, rows).astype(np.float32)

    def write(self, name: str, stored: Bits) -> None:
        tensor, item = self.tensors[name], stored.itemsize
        for row, bits in enumerate(stored):
            stride = tensor.row_stride or len(bits)
            self.put(tensor.address + row * stride * item, bits)

    def put(self, address: int, data: np.ndarray) -> None:
        self.backend.from_host(address, np.ascontiguousarray(data), 0)


def judge(kernel: Callable[[Tensors], None], problem: Problem, backend: Backend) -> Verdict:
    """Both engines' verdict, which must be the same."""
    verdicts = [
        check._judge(problem, kernel, engine(backend), CHAINS, {}, SEED)
        for engine in (HostEngine, DeviceEngine)
    ]
    assert verdicts[0].passed == verdicts[1].passed
    assert verdicts[0].worst == pytest.approx(verdicts[1].worst, rel=1e-6)
    return verdicts[0]


def forward(x: str = "bf16", w: str | None = "same", cols: int = 200) -> Problem:
    return Problem.forward(40, cols, x, weight_dtype=w)


def backward(x: str = "bf16", w: str | None = "same", cols: int = 200, **flags: bool) -> Problem:
    return Problem.backward(40, cols, x, weight_dtype=w, **flags)

from __future__ import annotations

import numpy as np
import pytest
from numpy_kernel import Tensors, forward, judge

from rmsnorm_raw import bounds
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.guarded import INPUT_FILL, output_fill
from rmsnorm_raw.problem import Problem


@pytest.mark.parametrize("dtype", bounds.STORAGE)
def test_outputs_begin_as_nan_and_inputs_as_something_else(dtype: str) -> None:
    item = bounds.STORAGE[dtype].itemsize
    stored = np.full(item, output_fill(dtype), np.uint8).view(bounds.STORAGE[dtype])
    assert np.isnan(bounds.decode(stored, dtype)).all()
    assert output_fill(dtype) != INPUT_FILL


@pytest.mark.parametrize("alignment", [2, 4, 8, 16])
@pytest.mark.parametrize(("x", "w"), [("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "fp16")])
def test_tensors_are_aligned_as_promised_and_no_better(
    cpu64: Backend, x: str, w: str, alignment: int
) -> None:
    problem = Problem.backward(9, 24, x, weight_dtype=w, alignment=alignment)
    seen: Tensors = {}

    def look(tensors: Tensors, rows: int) -> None:
        nonlocal seen
        seen = tensors

    judge(look, problem, cpu64)
    elements = max(1, alignment // problem.element_bytes)
    for name in ("x", "dout", "dx"):
        unit, tensor = elements * problem.element_bytes, seen[name]
        stride = tensor.row_stride * problem.element_bytes
        assert stride >= 24 * problem.element_bytes + 16
        assert (tensor.address % unit, stride % unit) == (0, 0)
        # never better than promised; a promise of 16 is the best there is
        assert stride % (2 * unit) == unit
        assert alignment == 16 or tensor.address % (2 * unit) == unit
    for name in ("weight", "dweight"):
        unit = elements * problem.weight_bytes
        assert seen[name].address % unit == 0
        assert alignment == 16 or seen[name].address % (2 * unit) == unit


@pytest.mark.parametrize("heads", [1, 4])
def test_every_matrix_has_strides_of_its_own(cpu64: Backend, heads: int) -> None:
    problem = forward(heads=heads, residual_dtype="bf16")
    seen: Tensors = {}

    def look(tensors: Tensors, rows: int) -> None:
        nonlocal seen
        seen = tensors

    judge(look, problem, cpu64)
    matrices = [seen[each.name] for each in problem.operands if each.is_matrix]
    rows = {min(tensor.row_stride, tensor.head_stride or 1 << 30) for tensor in matrices}
    assert len(rows) == len(matrices)
    assert min(rows) > problem.cols
    assert {tensor.head_stride != 0 for tensor in matrices} == {heads > 1}
    if heads > 1:  # a head's row may be nearer to the next head's, or to the next token's
        nearer = {tensor.head_stride < tensor.row_stride for tensor in matrices}
        assert nearer == {False, True}

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy_kernel import BACKWARDS, FORWARDS, NumpyKernel

from rmsnorm_raw import bounds, check
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.dtypes import stored_bytes
from rmsnorm_raw.gate import Case, Engine, HostEngine
from rmsnorm_raw.gate_data import DATA, gate_data
from rmsnorm_raw.gate_device import DeviceEngine
from rmsnorm_raw.guarded import allocate
from rmsnorm_raw.launch import Tensor
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.trial import bits_of, reference, write

SEED = 0xDEAD_BEEF_0BAD_F00D  # all 64 bits count
PAIRS = [
    (x, w) for x in ("fp16", "bf16", "fp32") for w in ("fp16", "bf16", "fp32", None)
]  # fmt: skip
# 13 row scales and one row more than a block of threads; columns beyond one block of 256, odd, and
# wide enough for two shares of a row sum
ROWS, COLS = 14, 259
PLAIN = [
    make(ROWS, COLS, x, weight_dtype=w)
    for x, w in PAIRS
    for make in (Problem.forward, Problem.backward)
]
WHOLE = [
    replace(problem, rows=-(-ROWS // problem.extras.heads) * problem.extras.heads, cols=COLS)
    for problem in (*FORWARDS, *BACKWARDS)
]


@pytest.fixture(params=[64, 32])
def backend(request: pytest.FixtureRequest, cpu64: Backend, cpu32: Backend) -> Backend:
    return cpu64 if request.param == 64 else cpu32


class Inputs:
    """A case's tensors in memory of its own: rows apart, everything around them 0x7f."""

    def __init__(self, backend: Backend, case: Case, outputs: tuple[str, ...] = ()) -> None:
        names = (*case.inputs, *outputs)
        self.buffers = {name: allocate(backend, case, name, 0x7F) for name in names}
        self.tensors = {name: buffer.tensor for name, buffer in self.buffers.items()}


def cases(problem: Problem) -> Iterator[Case]:
    yield Case(problem, SEED, exact=False)
    yield check._general_case(problem, SEED)
    if problem.op == "backward":
        yield Case(problem, SEED, exact=True)


@pytest.mark.parametrize("problem", [*PLAIN, *WHOLE], ids=str)
def test_both_engines_write_the_same_bytes(backend: Backend, problem: Problem) -> None:
    for case in cases(problem):
        spans = []
        for engine in (HostEngine(backend), DeviceEngine(backend)):
            inputs = Inputs(backend, case)
            for name in set(DATA) & inputs.tensors.keys():
                engine.write(case, name, inputs.tensors[name])
                assert engine.changed(case, name, inputs.tensors[name]) is None
            spans.append(
                {
                    name: backend.to_host(buffer.base, buffer.size_bytes, 0).tobytes()
                    for name, buffer in inputs.buffers.items()
                }
            )
        assert spans[0] == spans[1]


@pytest.mark.parametrize("problem", [*PLAIN, *WHOLE], ids=str)
def test_both_engines_sum_alike(cpu64: Backend, problem: Problem) -> None:
    for case in cases(problem):
        inputs = Inputs(cpu64, case)
        host, device = HostEngine(cpu64), DeviceEngine(cpu64)
        for name in set(DATA) & inputs.tensors.keys():
            host.write(case, name, inputs.tensors[name])
        sums = host.row_sums(case, inputs.tensors)
        found = [(device.row_sums(case, inputs.tensors), sums)]
        rstd = 1 / np.sqrt(sums[0] / COLS + problem.eps)
        take = "row_maxima" if problem.op == "forward" else "column_sums"
        more = (2.0**-22,) if problem.op == "forward" else ()
        found.append(
            tuple(getattr(each, take)(case, inputs.tensors, rstd, *more) for each in (device, host))
        )
        for ours, wanted in found:
            np.testing.assert_allclose(ours, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("problem", [*PLAIN, *WHOLE], ids=str)
def test_the_float64_values_are_the_formulas(cpu64: Backend, problem: Problem) -> None:
    """Written once more, by token and head: sums, y, dx and what their bounds are made of."""
    case = check._general_case(problem, SEED)
    inputs, host = Inputs(cpu64, case), HostEngine(cpu64)
    tensors = inputs.tensors
    write(host, case, tensors)
    more, shape = problem.extras, (problem.tokens, problem.extras.heads, COLS)
    values = {}
    for name in tensors:
        operand = case.operand(name)
        if operand.is_matrix:
            values[name] = host._rows(case, tensors, name, 0, operand.rows).reshape(shape)
        else:
            stored = bounds.decode(bits_of(host, case, tensors, name), operand.dtype)
            parts = (-1, COLS) if name in ("weight", "bias") else (-1, more.heads, 1)
            values[name] = stored.reshape(parts) if name != "scale" else stored
    h = values["x"] + values.get("residual", 0.0)
    w = values.get("weight", np.ones(1)) + float(np.float32(more.weight_offset))
    rstd = values.get("rstd", 1 / np.sqrt(np.square(h).mean(axis=2, keepdims=True) + problem.eps))
    terms = reference(host, case, tensors).terms
    np.testing.assert_allclose(terms[0], rstd.ravel(), rtol=1e-12)
    if problem.op == "forward":
        if case.cast:
            return  # test_bounds.py has it
        y = h * rstd * w + values.get("bias", 0.0)
        scale = np.abs(h * rstd * w) + np.abs(values.get("bias", 0.0))
        maxima = host.row_maxima(case, tensors, terms[0], 0.0)
        want = np.abs(y).max(axis=2).ravel(), scale.max(axis=2).ravel()
        np.testing.assert_allclose(maxima[:2], want, rtol=1e-12)
        assert not maxima[2].any()
        return
    dout, xhat = values["dout"], h * rstd
    g = dout * w
    np.testing.assert_allclose(terms[1], (g * xhat).mean(axis=2).ravel(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(terms[2], np.abs(g * xhat).mean(axis=2).ravel(), rtol=1e-12)
    columns = host.column_sums(case, tensors, terms[0])
    over = (0,) if more.per_head else (0, 1)
    sums = [part.sum(axis=over).ravel() for part in (dout * xhat, np.abs(dout * xhat))]
    if more.bias_dtype:
        sums += [part.sum(axis=over).ravel() for part in (dout, np.abs(dout))]
    np.testing.assert_allclose(columns, sums, rtol=1e-9, atol=1e-12)


#: an infinity or NaN, and others that most dtypes have
PATTERNS = {
    2: (0x7E00, 0x7C00, 0xFF80, 0x7F80, 0x7F81, 0x8000, 0x0001, 0x7BFF, 0x3F80),
    4: (0x7FC00000, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x33800000, 0x7E967699),
    1: (0x7F, 0xFF, 0x80, 0x7E, 0xFE, 0x01, 0x00, 0x38),
}


EXACT = [replace(problem, cols=512) for problem in (*PLAIN, *WHOLE)]


@pytest.mark.parametrize(
    ("problem", "exact"),
    [(problem, False) for problem in (*PLAIN, *WHOLE)]
    + [(problem, True) for problem in EXACT if check._has_exact_case(problem)],
    ids=str,
)
def test_both_engines_name_the_same_worst_element(
    cpu64: Backend, problem: Problem, exact: bool
) -> None:
    case = check._general_case(problem, SEED)._replace(given=1.0)
    case = Case(problem, SEED, exact=True) if exact else case
    kernel = NumpyKernel(problem, cpu64)
    outputs = {each.name: each for each in problem.operands if each.is_output}
    inputs = Inputs(cpu64, case, tuple(outputs))
    tensors = inputs.tensors
    engines: tuple[Engine, Engine] = (HostEngine(cpu64), DeviceEngine(cpu64))
    write(engines[0], case, tensors)
    kernel(tensors, problem.rows)
    terms = reference(engines[0], case, tensors).terms
    for name, operand in outputs.items():
        if not operand.is_matrix:
            continue
        item = stored_bytes(operand.dtype)
        for wrong in (None, *PATTERNS[item]):
            if wrong is not None:
                place(cpu64, case, tensors[name], name, 5, 258, wrong)
            factor = 2.0**-22
            host, device = (e.worst(case, tensors, name, terms, factor) for e in engines)
            assert device.ratio == pytest.approx(host.ratio, rel=1e-9)
            if wrong is None:
                assert host.ratio <= 1
            if host.ratio > 1:
                assert host[1:3] == (5, 258)
            if host.ratio > 1 or not (exact or item == 1 or name == "residual_out"):
                # of elements that are as wrong as each other any will do
                assert device[1:3] == host[1:3]
                np.testing.assert_allclose(device[3:], host[3:], rtol=1e-12)
        assert host.ratio > 1 or item == 1


def place(
    backend: Backend, case: Case, tensor: Tensor, name: str, row: int, col: int, bits: int
) -> None:
    """Store one element of a matrix."""
    storage, heads = bounds.STORAGE[case.shape(name)[2]], case.heads(name)
    at = row // heads * tensor.row_stride + row % heads * tensor.head_stride + col
    address = tensor.address + at * storage.itemsize
    backend.from_host(address, np.array([bits], storage), 0)


def test_both_engines_want_an_infinity_where_the_reference_overflows(cpu64: Backend) -> None:
    case = Case(Problem.forward(ROWS, COLS, "fp16"), SEED, exact=False)
    inputs, host = Inputs(cpu64, case, ("y",)), HostEngine(cpu64)
    for name in ("x", "weight"):
        host.write(case, name, inputs.tensors[name])
    terms = bounds.row_terms(host.row_sums(case, inputs.tensors), COLS, 1e-6)
    terms[0] *= 2.0**16
    x, weight = (host._rows(case, inputs.tensors, *of) for of in (("x", 0, ROWS), ("weight", 0, 1)))
    right = bounds.encode(x * terms[0][:, None] * weight, "float16")
    assert (right == 0x7C00).any()  # +inf
    for stored, passes in ((right, True), (np.where(right == 0x7C00, 0x7BFF, right), False)):
        kernel = NumpyKernel(case.problem, cpu64)
        kernel.tensors = inputs.tensors
        kernel.write("y", stored.astype(np.uint16))
        for engine in (host, DeviceEngine(cpu64)):
            worst = engine.worst(case, inputs.tensors, "y", terms, 2.0**-22)
            assert (worst.ratio <= 1) == passes
            assert passes or worst.want == 65536


@pytest.mark.parametrize("engine_type", [HostEngine, DeviceEngine])
@pytest.mark.parametrize("name", DATA)
def test_a_changed_input_is_found(
    cpu64: Backend, engine_type: type[HostEngine | DeviceEngine], name: str
) -> None:
    general = (Case(problem, SEED, exact=False) for problem in reversed(WHOLE))
    case = next(case for case in general if name in case.inputs)
    engine, inputs = engine_type(cpu64), Inputs(cpu64, case)
    tensor, (rows, cols, dtype) = inputs.tensors[name], case.shape(name)
    engine.write(case, name, tensor)
    bits = gate_data(name, rows - 1, rows, cols, dtype, SEED, exact=False)[0, -1] ^ 1
    place(cpu64, case, tensor, name, rows - 1, cols - 1, int(bits))
    assert engine.changed(case, name, tensor) == (rows - 1, cols - 1)


@pytest.mark.parametrize("engine_type", [HostEngine, DeviceEngine])
@pytest.mark.parametrize("name", ["x", "residual"])
def test_a_change_beside_and_in_a_row_of_zeros_is_found(
    cpu64: Backend, engine_type: type[HostEngine | DeviceEngine], name: str
) -> None:
    problem = Problem.forward(15, COLS, "bf16", heads=3, residual_dtype="fp32")
    zero_row = check._zero_row(problem)
    assert zero_row == 3
    case = Case(problem, SEED, exact=False, zero_row=zero_row)
    engine, inputs = engine_type(cpu64), Inputs(cpu64, case)
    buffer = inputs.buffers[name]

    def memory() -> bytes:
        return cpu64.to_host(buffer.base, buffer.size_bytes, 0).tobytes()

    engine.write(case, name, buffer.tensor)
    written = memory()
    assert engine.changed(case, name, buffer.tensor) is None
    assert memory() == written  # looking leaves the zeros there
    assert not buffer.broken(engine)
    for row, col in ((4, 7), (3, 100)):
        place(cpu64, case, buffer.tensor, name, row, col, 1)
        assert engine.changed(case, name, buffer.tensor) == (min(row, 4), col)
        engine.write(case, name, buffer.tensor)
    # what the row would hold without the zeros is a change too
    plain = case._replace(zero_row=None)
    engine.write(plain, name, buffer.tensor)
    assert engine.changed(case, name, buffer.tensor) == (3, 0)


@pytest.mark.parametrize("engine_type", [HostEngine, DeviceEngine])
def test_a_broken_gap_is_found(
    cpu64: Backend, engine_type: type[HostEngine | DeviceEngine]
) -> None:
    engine = engine_type(cpu64)
    address, _owner = cpu64.allocate(4096)
    cpu64.fill(address, 0xFF, 4096, 0)
    for byte in (*range(64), *range(100, 164), 1064):  # three rows; the gaps begin at byte 64
        cpu64.from_host(address + byte, np.zeros(1, np.uint8), 0)
    assert engine.broken(address + 64, 10, 36, 100, 0xFF) is None
    cpu64.from_host(address + 999, np.array([0xFE], np.uint8), 0)
    assert engine.broken(address + 64, 10, 36, 100, 0xFF) == (9, 35)


def test_an_element_of_a_later_block_of_rows_is_named_by_its_own_row(cpu64: Backend) -> None:
    cols = 1 << 19
    case = Case(Problem.forward(3, cols, "bf16"), SEED, exact=False)
    assert [*bounds.row_blocks(3, cols)] == [(0, 2), (2, 3)]
    inputs, engine = Inputs(cpu64, case, ("y",)), HostEngine(cpu64)
    x, y = inputs.tensors["x"], inputs.tensors["y"]
    for name in ("x", "weight"):
        engine.write(case, name, inputs.tensors[name])
    cpu64.fill(inputs.buffers["y"].base, 0, inputs.buffers["y"].size_bytes, 0)
    place(cpu64, case, y, "y", 2, 77, 0x7FC0)
    terms = bounds.row_terms(engine.row_sums(case, inputs.tensors), cols, 1e-6)
    assert engine.worst(case, inputs.tensors, "y", terms, 2.0**-20)[:3] == (np.inf, 2, 77)
    place(cpu64, case, x, "x", 2, 5, 0)
    assert engine.changed(case, "x", x) == (2, 5)


def test_a_row_of_a_million_columns_is_worked_on_in_pieces(cpu64: Backend) -> None:
    """1,048,576 columns, the widest row there is: shares of a row sum are at their limit."""
    case = Case(Problem.backward(2, 1 << 20, "bf16"), SEED, exact=False)
    inputs = Inputs(cpu64, case)
    host, device = HostEngine(cpu64), DeviceEngine(cpu64)
    for name in set(DATA) & inputs.tensors.keys():
        device.write(case, name, inputs.tensors[name])
        assert host.changed(case, name, inputs.tensors[name]) is None
    np.testing.assert_allclose(
        device.row_sums(case, inputs.tensors), host.row_sums(case, inputs.tensors), rtol=1e-12
    )

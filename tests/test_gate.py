from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rmsnorm_raw import bounds, check
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.bounds import Floats
from rmsnorm_raw.gate import DATA, Case, DeviceEngine, Engine, HostEngine
from rmsnorm_raw.launch import Tensor
from rmsnorm_raw.problem import Problem

SEED = 0xDEAD_BEEF_0BAD_F00D  # all 64 bits count
PAIRS = [
    (x, w) for x in ("fp16", "bf16", "fp32") for w in ("fp16", "bf16", "fp32", None)
]  # fmt: skip
# 13 row scales and one row more than a block of threads; columns beyond one block of 256, odd, and
# wide enough for two shares of a row sum
ROWS, COLS = 14, 259


@pytest.fixture(params=[64, 32])
def backend(request: pytest.FixtureRequest, cpu64: Backend, cpu32: Backend) -> Backend:
    return cpu64 if request.param == 64 else cpu32


class Inputs:
    """A case's tensors in memory of its own: rows apart, everything around them 0x7f."""

    def __init__(self, backend: Backend, case: Case, outputs: tuple[str, ...] = ()) -> None:
        inputs, _ = check._names(case.problem)
        self.buffers = {
            name: check._allocate(backend, case, name, 0x7F) for name in (*inputs, *outputs)
        }
        self.tensors = {name: buffer.tensor for name, buffer in self.buffers.items()}


def cases(problem: Problem) -> Iterator[Case]:
    yield Case(problem, SEED, exact=False)
    if problem.op == "backward":
        yield Case(problem, SEED, exact=True)


def problems(x: str, w: str | None) -> list[Problem]:
    return [make(ROWS, COLS, x, weight_dtype=w) for make in (Problem.forward, Problem.backward)]


@pytest.mark.parametrize(("x", "w"), PAIRS)
def test_both_engines_write_the_same_bytes(backend: Backend, x: str, w: str | None) -> None:
    for problem in problems(x, w):
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


@pytest.mark.parametrize(("x", "w"), PAIRS)
def test_both_engines_sum_alike(cpu64: Backend, x: str, w: str | None) -> None:
    for problem in problems(x, w):
        for case in cases(problem):
            inputs = Inputs(cpu64, case)
            host, device = HostEngine(cpu64), DeviceEngine(cpu64)
            for name in set(DATA) & inputs.tensors.keys():
                host.write(case, name, inputs.tensors[name])
            sums = host.row_sums(case, inputs.tensors)
            np.testing.assert_allclose(
                device.row_sums(case, inputs.tensors), sums, rtol=1e-12, atol=1e-12
            )
            if problem.op == "backward":
                rstd = 1 / np.sqrt(sums[0] / COLS)
                np.testing.assert_allclose(
                    device.column_sums(case, inputs.tensors, rstd),
                    host.column_sums(case, inputs.tensors, rstd),
                    rtol=1e-12,
                    atol=1e-12,
                )


@pytest.mark.parametrize("x", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("output", ["y", "dx"])
@pytest.mark.parametrize("exact", [False, True])
def test_both_engines_name_the_same_worst_element(
    cpu64: Backend, x: str, output: str, exact: bool
) -> None:
    problem = problems(x, "fp32")[output == "dx"]
    case = Case(problem, SEED, exact)
    inputs = Inputs(cpu64, case, (output,))
    tensors = inputs.tensors
    engines: tuple[Engine, Engine] = (HostEngine(cpu64), DeviceEngine(cpu64))
    for name in set(DATA) & tensors.keys():
        engines[0].write(case, name, tensors[name])
    terms = bounds.row_terms(engines[0].row_sums(case, tensors), COLS, 1e-6)
    right = reference(case, tensors, engines[0], output, terms)
    special = [np.nan, np.inf, -np.inf, 0.0, 2.0**-24, 1e-40, 65504.0, 1e38]
    for wrong in (None, *special):
        values = right.copy()
        if wrong is not None:
            values[5, 258] = wrong
        stored = bounds.encode(values, problem.dtype)
        put(cpu64, tensors[output], stored)
        host, device = (e.worst(case, tensors, output, terms, 2.0**-22) for e in engines)
        if exact and wrong is None:  # ratios of 0 and inf: any element will do
            assert host.ratio == device.ratio
            continue
        assert device.ratio == pytest.approx(host.ratio, rel=1e-9)
        assert (device.row, device.col) == (host.row, host.col)
        if wrong is not None and not exact:
            assert (host.row, host.col) == (5, 258)
            assert host.ratio > 1
        np.testing.assert_allclose(device[3:], host[3:], rtol=1e-12)


def test_both_engines_want_an_infinity_where_the_reference_overflows(cpu64: Backend) -> None:
    case = Case(Problem.forward(ROWS, COLS, "fp16"), SEED, exact=False)
    inputs, host = Inputs(cpu64, case, ("y",)), HostEngine(cpu64)
    for name in ("x", "weight"):
        host.write(case, name, inputs.tensors[name])
    terms = bounds.row_terms(host.row_sums(case, inputs.tensors), COLS, 1e-6)
    terms[0] *= 2.0**16
    right = bounds.encode(reference(case, inputs.tensors, host, "y", terms), "float16")
    assert (right == 0x7C00).any()  # +inf
    for stored, passes in ((right, True), (np.where(right == 0x7C00, 0x7BFF, right), False)):
        put(cpu64, inputs.tensors["y"], stored.astype(np.uint16))
        for engine in (host, DeviceEngine(cpu64)):
            worst = engine.worst(case, inputs.tensors, "y", terms, 2.0**-22)
            assert (worst.ratio <= 1) == passes
            assert passes or worst.want == 65536


def reference(
    case: Case, tensors: dict[str, Tensor], engine: HostEngine, output: str, terms: Floats
) -> Floats:
    """The float64 result for data that was written, from the formulas of bounds.py."""
    x = engine._rows(case, tensors, "x", 0, ROWS)
    weight = engine._rows(case, tensors, "weight", 0, 1)[0]
    if output == "y":
        return bounds.y_and_scale(x, weight, terms[0])[0]
    return bounds.dx_and_scale(engine._rows(case, tensors, "dout", 0, ROWS), x, weight, terms)[0]


def put(backend: Backend, tensor: Tensor, stored: bounds.Bits) -> None:
    """Write rows one by one."""
    for row, bits in enumerate(stored):
        address = tensor.address + row * tensor.row_stride * bits.itemsize
        backend.from_host(address, np.ascontiguousarray(bits), 0)


@pytest.mark.parametrize("engine_type", [HostEngine, DeviceEngine])
@pytest.mark.parametrize("name", DATA)
def test_a_changed_input_is_found(
    cpu64: Backend, engine_type: type[HostEngine | DeviceEngine], name: str
) -> None:
    case = Case(Problem.backward(ROWS, COLS, "bf16", weight_dtype="fp32"), SEED, exact=False)
    engine, inputs = engine_type(cpu64), Inputs(cpu64, case)
    tensor, (rows, cols, dtype) = inputs.tensors[name], case.shape(name)
    engine.write(case, name, tensor)
    item = bounds.STORAGE[dtype].itemsize
    last = tensor.address + ((rows - 1) * tensor.row_stride + cols - 1) * item
    byte = cpu64.to_host(last, 1, 0)
    cpu64.from_host(last, byte ^ np.uint8(1), 0)
    assert engine.changed(case, name, tensor) == (rows - 1, cols - 1)


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
    put(cpu64, y, np.zeros((3, cols), np.uint16))
    cpu64.from_host(y.address + (2 * y.row_stride + 77) * 2, np.array([0x7FC0], np.uint16), 0)
    terms = bounds.row_terms(engine.row_sums(case, inputs.tensors), cols, 1e-6)
    assert engine.worst(case, inputs.tensors, "y", terms, 2.0**-20)[:3] == (np.inf, 2, 77)
    cpu64.from_host(x.address + (2 * x.row_stride + 5) * 2, np.zeros(1, np.uint16), 0)
    assert engine.changed(case, "x", x) == (2, 5)


def test_a_row_of_a_million_columns_is_worked_on_in_pieces(cpu64: Backend) -> None:
    """1,048,576 columns, the widest row there is: shares of a row sum are at their limit."""
    case = Case(Problem.backward(2, 1 << 20, "bf16"), SEED, exact=False)
    inputs = Inputs(cpu64, case)
    host, device = HostEngine(cpu64), DeviceEngine(cpu64)
    for name in DATA:
        device.write(case, name, inputs.tensors[name])
        assert host.changed(case, name, inputs.tensors[name]) is None
    np.testing.assert_allclose(
        device.row_sums(case, inputs.tensors), host.row_sums(case, inputs.tensors), rtol=1e-12
    )

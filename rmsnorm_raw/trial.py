"""One data set of the gate: a kernel is run on it, apart and in place, and all is looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rmsnorm_raw import bounds
from rmsnorm_raw.bounds import Bits, Floats, Reference, Worst
from rmsnorm_raw.dtypes import LARGEST_FP8, stored_bytes
from rmsnorm_raw.environment import fork_safe_lock
from rmsnorm_raw.extras import LEAST_SCALE
from rmsnorm_raw.gate import Case, Engine
from rmsnorm_raw.gate_data import DATA, static_scale
from rmsnorm_raw.guarded import INPUT_FILL, Buffer, allocate, guarded, output_fill
from rmsnorm_raw.launch import Tensors
from rmsnorm_raw.problem import IN_PLACE, MATRICES, Problem

#: what scratch tensors begin as: a counter counts from zero
SCRATCH_FILL = {"workspace": 0xFF, "counter": 0}


class Subject(NamedTuple):
    """Whatever computes a problem of rows and cols >= 1 on tensors at given addresses.

    Attributes:
        run: enqueues the computation, of the problem or of its first rows, on the default stream.
        chains: S and D of the bounds, by output.
        scratch: the bytes of the tensors "workspace" and "counter", where there are any.
        few_tokens: that are also run in place, at most all.
    """

    run: Callable[[Problem, Tensors], None]
    chains: Mapping[str, int]
    scratch: Mapping[str, int]
    few_tokens: int


Found = tuple[dict[str, Worst], list[str]]  # the worst element of each output; what else is wrong


def trial(case: Case, subject: Subject, engine: Engine) -> Found:
    """Run on one data set: the worst element of each output, and what else is wrong."""
    buffers = _buffers(case, subject, engine)
    tensors = _tensors(buffers)
    write(engine, case, tensors)
    wanted = reference(engine, case, tensors)
    subject.run(case.problem, tensors)
    faults = _run_again(case, subject, engine, buffers)
    if "counter" in tensors and engine.backend.to_host(tensors["counter"].address, 4, 0).any():
        faults.append("counter is not 0 again after a run")
    worst, more = _judged(case, subject, engine, buffers, wanted)
    faults += more
    if not faults and all(element.ratio <= 1.0 for element in worst.values()):
        faults = _in_place(case, subject, engine, wanted)
        faults = faults or _with_a_nan(case, subject, engine, tensors)
    return worst, faults


def describe(case: Case, name: str, element: Worst) -> str:
    """An element that is wrong, in words."""
    at = f"{name}[{element.row}, {element.col}] is {element.got!r}"
    if case.exact:
        return f"{at}, want exactly {element.want!r} (the case without rounding errors)"
    return f"{at}, want {element.want!r} +- {element.bound:.3g} ({element.ratio:.3g} of its bound)"


def _buffers(case: Case, subject: Subject, engine: Engine) -> dict[str, Buffer]:
    fills = dict.fromkeys(case.inputs, INPUT_FILL)
    fills |= {name: output_fill(case.shape(name)[2]) for name in case.outputs}
    buffers = {name: allocate(engine.backend, case, name, fill) for name, fill in fills.items()}
    for name, size_bytes in subject.scratch.items():
        buffers[name] = guarded(engine.backend, size_bytes // 4, 4, 4, 0, SCRATCH_FILL[name])
    return buffers


def _tensors(buffers: Mapping[str, Buffer]) -> Tensors:
    return {name: buffer.tensor for name, buffer in buffers.items()}


def _run_again(
    case: Case, subject: Subject, engine: Engine, buffers: Mapping[str, Buffer]
) -> list[str]:
    """Run a second time, on a used workspace: which sums over rows have other bits."""
    tensors = _tensors(buffers)
    first = {n: bits_of(engine, case, tensors, n) for n in case.outputs if n in OVER_ROWS}
    if not first:
        return []
    for name in case.outputs:
        buffer = buffers[name]
        engine.backend.fill(buffer.base, buffer.fill, buffer.size_bytes, 0)
    subject.run(case.problem, tensors)
    return [
        f"{name} has other bits in a second run on the same data"
        for name, bits in first.items()
        if not np.array_equal(bits, bits_of(engine, case, tensors, name))
    ]


def _judged(
    case: Case, subject: Subject, engine: Engine, buffers: Mapping[str, Buffer], wanted: Reference
) -> Found:
    """After a run: every output, what lies around the tensors, and every input."""
    tensors, faults = _tensors(buffers), []
    for name, buffer in buffers.items():
        if where := buffer.broken(engine):
            faults.append(f"{name}: {where} was written, outside the tensor")
    faults += [
        f"{name}[{at[0]}, {at[1]}] was written, and it is an input"
        for name in case.inputs
        if (at := _changed(engine, case, tensors, name))
    ]
    chains = subject.chains
    worst = {n: _compare(engine, case, tensors, n, wanted, chains[n]) for n in case.outputs}
    return worst, faults


def _in_place(case: Case, subject: Subject, engine: Engine, wanted: Reference) -> list[str]:
    """What is wrong in place with a kernel that is right elsewhere.

    The first tokens are run in tensors of their own. The inputs that are written over lie in the
    outputs' memory, and where they usually do as well, for the reference is of them.
    """
    dtypes = {each.name: each.dtype for each in case.problem.operands}
    over = {o: i for o, i in IN_PLACE.items() if o in dtypes and dtypes[o] == dtypes.get(i)}
    if not over:
        return []
    few = replace(case.problem, rows=subject.few_tokens * case.problem.extras.heads)
    case = case._replace(problem=few)
    wanted = wanted._replace(terms=wanted.terms[:, : few.rows])
    buffers = _buffers(case, subject, engine)
    tensors = _tensors(buffers)
    write(engine, case, tensors)
    for output, name in over.items():
        engine.write(case, name, tensors[output])
    subject.run(few, {**tensors, **{name: tensors[output] for output, name in over.items()}})
    worst, faults = _judged(case, subject, engine, buffers, wanted)
    faults += [describe(case, n, each) for n, each in worst.items() if each.ratio > 1.0]
    where = " and ".join(f"{output} over {name}" for output, name in over.items())
    return [f"in place ({where}), and only there: {fault}" for fault in faults]


def _with_a_nan(case: Case, subject: Subject, engine: Engine, tensors: Tensors) -> list[str]:
    """Whether a NaN in x makes one of its whole row. x and the outputs are of no use afterwards.

    An 8-bit y is clamped, and in backward sums over rows need not be asked for.
    """
    problem = case.problem
    name = "y" if problem.op == "forward" else "dx"
    if case.exact or name not in case.outputs or problem.extras.scale != "none":
        return []
    x, dtype = tensors["x"], case.shape(name)[2]
    nan = bounds.encode(np.full(1, np.nan), problem.dtype)
    engine.backend.from_host(x.address, nan, engine.stream)
    subject.run(replace(problem, rows=problem.extras.heads), tensors)
    size_bytes = problem.cols * stored_bytes(dtype)
    memory = engine.backend.to_host(tensors[name].address, size_bytes, engine.stream)
    row = bounds.decode(memory.view(bounds.STORAGE[dtype]), dtype)
    numbers = np.flatnonzero(~np.isnan(row))
    return [f"{name}[0, {at}] is {row[at]}, though x[0, 0] is nan" for at in numbers[:1].tolist()]


# ---- data and reference --------------------------------------------------------------------------

#: outputs that are sums over rows
OVER_ROWS = {"dweight", "dbias"}
#: the last references by (engine, data set): what the next config of a problem wants again
_references: dict[tuple[type[Engine], Case], Reference] = {}
REFERENCES_KEPT = 2  # the gate's and the exact case's
_references_lock = fork_safe_lock()


def write(engine: Engine, case: Case, tensors: Tensors) -> None:
    """Write every input. Each time, for a kernel under test may have spoiled the last ones."""
    for name in DATA:
        if name in case.inputs:
            engine.write(case, name, tensors[name])
    for name, bits in _given(engine, case, tensors).items():
        engine.backend.from_host(tensors[name].address, bits, engine.stream)


def _given(engine: Engine, case: Case, tensors: Tensors) -> dict[str, Bits]:
    """The inputs that are no hash of the seed, as they are stored."""
    given = {}
    if "rstd" in case.inputs:
        given["rstd"] = reference(engine, case, tensors).terms[0]
    if "scale" in case.inputs:
        scale = static_scale(case.problem.out_dtype, case.seed) * case.given
        given["scale"] = np.array([scale])
    return {name: bounds.encode(values, "float32") for name, values in given.items()}


def reference(engine: Engine, case: Case, tensors: Tensors) -> Reference:
    """The float64 sums over inputs that hold a case's data, computed once for the last cases."""
    key = (type(engine), case)
    problem = case.problem
    backward = problem.op == "backward"
    given = case.given if backward and problem.has_rstd else 0.0
    eps = 0.0 if case.exact else problem.eps
    with _references_lock:
        if key not in _references:
            terms = bounds.row_terms(engine.row_sums(case, tensors), problem.cols, eps, given=given)
            columns = np.empty((4, 0))
            if OVER_ROWS & {*case.outputs}:
                columns = engine.column_sums(case, tensors, terms[0])
            if len(_references) >= REFERENCES_KEPT:
                del _references[next(iter(_references))]
            _references[key] = Reference(terms, columns)
        return _references[key]


def bits_of(engine: Engine, case: Case, tensors: Tensors, name: str) -> Bits:
    """A list (rstd, dweight, ...) as it is stored, in the shape of :meth:`Case.shape`."""
    rows, cols, dtype = case.shape(name)
    size_bytes = rows * cols * stored_bytes(dtype)
    memory = engine.backend.to_host(tensors[name].address, size_bytes, engine.stream)
    return memory.view(bounds.STORAGE[dtype]).reshape(rows, cols)


def _changed(engine: Engine, case: Case, tensors: Tensors, name: str) -> tuple[int, int] | None:
    if name in DATA:
        return engine.changed(case, name, tensors[name])
    want = _given(engine, case, tensors)[name]
    wrong = np.flatnonzero(bits_of(engine, case, tensors, name)[:, 0] != want)
    return (int(wrong[0]), 0) if wrong.size else None


def _compare(
    engine: Engine, case: Case, tensors: Tensors, name: str, wanted: Reference, chain: int
) -> Worst:
    factor = bounds.bound_factor(name, chain)
    if name in MATRICES:
        return engine.worst(case, tensors, name, wanted.terms, factor)
    slack: Floats | float = 0.0
    if name == "rstd":
        want = scale = wanted.terms[0][:, None]
    elif name == "scale":
        of_y = bounds.bound_factor("y", chain)
        maxima = engine.row_maxima(case, tensors, wanted.terms[0], of_y)[:, :, None]
        want, scale, slack = maxima / LARGEST_FP8[case.problem.out_dtype]
        want = np.maximum(want, LEAST_SCALE)
    else:
        first = 0 if name == "dweight" else 2
        want, scale = wanted.columns[first : first + 2, None]
    got, (_, _, dtype) = bits_of(engine, case, tensors, name), case.shape(name)
    return bounds.worst_of(got, want, scale, factor, dtype, slack=slack, exact=case.exact)

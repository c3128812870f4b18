"""The correctness gate: does a built kernel compute what it must, and nothing else?

``verify`` runs a kernel on data of its own and holds every element of every output against the
float64 reference and the bounds of :mod:`rmsnorm_raw.bounds`. Beyond the numbers it checks that

* rows further apart than they are long are honoured, by each matrix's own stride, and so are
  addresses that are aligned to ``problem.alignment`` and no better;
* nothing outside the tensors is written, and nothing read there is used: outputs, their gaps and
  their guard bands begin as NaN, the gaps of inputs as numbers whose squares overflow;
* inputs are bitwise what they were, and dweight is the same bits in a second run, on a used
  workspace;
* backward is bit-equal to the reference on data that no fp32 sum has to round.

On a GPU, data and comparison are kernels too (:mod:`rmsnorm_raw.kernels.reference`): nothing of
full size is copied to the host. On the simulator they are NumPy. Both make the same data.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rmsnorm_raw import bounds, launch, space
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.backends.cpu import landings
from rmsnorm_raw.bounds import Bits, Reference, Worst
from rmsnorm_raw.config import Config
from rmsnorm_raw.dtypes import DTYPE_BYTES
from rmsnorm_raw.environment import fork_safe_lock
from rmsnorm_raw.errors import InvalidInput, WrongResult
from rmsnorm_raw.gate import DATA, Case, DeviceEngine, Engine, HostEngine
from rmsnorm_raw.launch import Tensor
from rmsnorm_raw.module import Binary
from rmsnorm_raw.problem import MATRICES, Problem

#: byte that outputs begin as: NaN in every dtype
OUTPUT_FILL = 0xFF
#: byte around inputs: NaN in float16, 3.4e38 in the others. Not OUTPUT_FILL: a NaN that is read
#: past a row and stored past another would leave no trace
INPUT_FILL = 0x7F
#: bytes between rows, at least: a lane's widest store
GAP_BYTES = 16
#: guard bytes on both sides of a tensor, beside one whole row
GUARD_BYTES = 4096
ALLOCATION_ALIGNMENT = 256
#: what scratch tensors begin with: a counter counts from zero
SCRATCH_FILL = {"workspace": OUTPUT_FILL, "counter": 0}
Tensors = Mapping[str, Tensor]  # by their usual names
#: The exact case keeps to fp32's 24 bits: sum(g * x) / scale is at most 16 N in steps of 1/2,
#: g - xhat * mean is at most 32 in steps of 1 / (2 N), sum(dout * xhat) is at most 8 M.
EXACT_COLS, EXACT_ROWS = 1 << 18, 1 << 21
#: Backward is given this multiple of rstd, or a kernel that computes its own would pass.
GIVEN_RSTD = 1 + 2**-5


@dataclass(frozen=True, slots=True, repr=False)
class Verdict:
    """What the gate found.

    Attributes:
        passed: whether every check passed.
        worst: by output, the largest |error| / bound; at most 1 is right, inf stands for a NaN or
            for an exact value missed.
        seed: of the data; ``k.check(seed=verdict.seed)`` repeats the run.
        message: what is wrong, one line a fault; "" where nothing is.
    """

    passed: bool
    worst: dict[str, float]
    seed: int
    message: str

    def __str__(self) -> str:
        shown = {name: min(r, 0.999) if r < 1 else r for name, r in self.worst.items()}  # not "1"
        ratios = ", ".join(f"{name} {ratio:.3g}" for name, ratio in shown.items())
        if self.passed:
            return f"passed (worst error / bound: {ratios or 'no elements'}; seed {self.seed})"
        return f"failed (seed {self.seed}): {self.message}"

    def __repr__(self) -> str:
        return f"<Verdict: {self}>"


def require(verdict: Verdict, problem: Problem, config: Config) -> None:
    """Raises WrongResult, with the slug and what was found, unless the verdict is a pass."""
    if not verdict.passed:
        raise WrongResult(
            f"config {config.slug!r} computes {problem} wrongly: {verdict}\n"
            f"repeat it on the kernel that rr.build returned: k.check(seed={verdict.seed})"
        )


def verify(
    problem: Problem,
    config: Config,
    binary: Binary,
    *,
    seed: int | None = None,
    _engine: Callable[[Backend], Engine] | None = None,
) -> Verdict:
    """Run a built kernel on gate data and judge everything that it wrote.

    What it needs it allocates on the binary's backend, about the problem's own tensors, and frees.
    All work is on the default stream. The simulator runs a kernel with asynchronous copies once for
    each moment at which they may land; the verdict is that on the first run that is wrong.

    Args:
        problem: what the binary computes; its eps and alignment are used as they are. With rows or
            cols of 0 the one right plan is an empty one.
        config: what the binary was rendered for.
        binary: the built kernels.
        seed: of the data, 0 <= seed < 2**64; None for a fresh one. The float64 sums of the last
            data set are kept, so that many configs of one problem should share a seed.

    Raises:
        LaunchError: a kernel cannot be launched, or fails on the device.
    """
    backend = binary.backend
    seed = secrets.randbits(32) if seed is None else seed
    if not problem.rows or not problem.cols:
        launches = launch.make_plan(problem, config, binary, {}).launches
        return Verdict(not launches, {}, seed, f"{launches} for no elements" if launches else "")

    def run(on: Backend, tensors: Tensors) -> None:
        launch.run(launch.make_plan(problem, config, replace(binary, backend=on), tensors))

    chain = space.row_chain(problem, config)
    chains = {"y": chain, "rstd": chain}
    if problem.op == "backward":
        chains = {"dx": chain, "dweight": space.dweight_chain(problem, config, backend.device)}
    sizes = launch.tensor_bytes(problem, config, backend.device)
    scratch = {name: sizes[name] for name in SCRATCH_FILL if name in sizes}
    engine = _engine or (HostEngine if backend.device.simulated else DeviceEngine)
    judge = partial(_judge, problem, chains=chains, scratch=scratch, seed=seed)
    verdicts = [judge(partial(run, on), engine(on)) for on in landings(backend, binary.source)]
    return min(verdicts, key=lambda verdict: verdict.passed)


def write_inputs(
    problem: Problem, backend: Backend, tensors: Tensors, seed: int, stream: int = 0
) -> None:
    """Write the gate's data to a problem's inputs; waits for the stream.

    Args:
        problem: whose inputs; nothing is written where rows or cols are 0.
        backend: where the tensors lie.
        tensors: every input that the problem has, of x, weight, dout, rstd; others are left alone.
        seed: of the data, 0 <= seed < 2**64.
        stream: a raw handle.

    Raises:
        InvalidInput: an input is missing.
    """
    if missing := [name for name in _names(problem)[0] if name not in tensors]:
        raise InvalidInput(f"{problem} also reads {', '.join(missing)}: pass every input")
    if problem.rows and problem.cols:
        engine = (HostEngine if backend.device.simulated else DeviceEngine)(backend, stream)
        _write(engine, Case(problem, seed, exact=False), tensors)
        backend.synchronize(stream)


def _judge(
    problem: Problem,
    run: Callable[[Tensors], None],
    engine: Engine,
    chains: Mapping[str, int],
    scratch: Mapping[str, int],
    seed: int,
) -> Verdict:
    """Judge whatever computes a problem of rows and cols >= 1 on tensors at given addresses.

    ``run`` enqueues the computation on the default stream. ``chains`` are S and D of the bounds, by
    output; ``scratch`` the bytes of the tensors "workspace" and "counter", where there are any.
    """
    cases = [Case(problem, seed, exact=False, given=GIVEN_RSTD)]
    power_of_two = problem.cols & (problem.cols - 1) == 0
    small = problem.cols <= EXACT_COLS and problem.rows <= EXACT_ROWS
    if problem.op == "backward" and problem.has_rstd and power_of_two and small:
        cases.append(Case(problem, seed, exact=True))
    ratios: dict[str, float] = {}
    faults: list[str] = []
    for case in cases:
        worst, found = _trial(case, run, engine, chains, scratch)
        faults += found
        for name, element in worst.items():
            ratios[name] = max(ratios.get(name, 0.0), element.ratio)
            if element.ratio > 1.0:
                faults.append(_describe(case, name, element))
    return Verdict(not faults, ratios, seed, "\n".join(faults))


def _describe(case: Case, name: str, element: Worst) -> str:
    at = f"{name}[{element.row}, {element.col}] is {element.got!r}"
    if case.exact:
        return f"{at}, want exactly {element.want!r} (the case without rounding errors)"
    return f"{at}, want {element.want!r} +- {element.bound:.3g} ({element.ratio:.3g} of its bound)"


def _trial(
    case: Case,
    run: Callable[[Tensors], None],
    engine: Engine,
    chains: Mapping[str, int],
    scratch: Mapping[str, int],
) -> tuple[dict[str, Worst], list[str]]:
    """Run on one data set: the worst element of each output, and what else is wrong."""
    inputs, outputs = _names(case.problem)
    buffers = {name: _allocate(engine.backend, case, name, INPUT_FILL) for name in inputs}
    buffers |= {name: _allocate(engine.backend, case, name, OUTPUT_FILL) for name in outputs}
    for name, size_bytes in scratch.items():
        buffers[name] = _guarded(engine.backend, size_bytes // 4, 4, 4, 4, 0, SCRATCH_FILL[name])
    tensors = {name: buffer.tensor for name, buffer in buffers.items()}
    _write(engine, case, tensors)
    reference = _reference(engine, case, tensors)
    run(tensors)
    faults = []
    if "dweight" in outputs:
        first = _bits(engine, case, tensors, "dweight")
        for name in outputs:
            engine.backend.fill(buffers[name].base, OUTPUT_FILL, buffers[name].size_bytes, 0)
        run(tensors)
        if not np.array_equal(first, _bits(engine, case, tensors, "dweight")):
            faults.append("dweight has other bits in a second run on the same data")
    if "counter" in scratch and engine.backend.to_host(tensors["counter"].address, 4, 0).any():
        faults.append("counter is not 0 again after a run")
    for name, buffer in buffers.items():
        if where := buffer.broken(engine):
            faults.append(f"{name}: {where} was written, outside the tensor")
    faults += [
        f"{name}[{at[0]}, {at[1]}] was written, and it is an input"
        for name in inputs
        if (at := _changed(engine, case, tensors, name, reference))
    ]
    return {
        name: _compare(engine, case, tensors, name, reference, chains[name]) for name in outputs
    }, faults


def _names(problem: Problem) -> tuple[list[str], list[str]]:
    """The tensors that a problem reads and those that it writes."""
    inputs = ["x"] + ["weight"] * (problem.weight_dtype is not None)
    if problem.op == "forward":
        return inputs, ["y"] + ["rstd"] * problem.store_rstd
    inputs += ["dout"] + ["rstd"] * problem.has_rstd
    return inputs, ["dx"] * problem.need_dx + ["dweight"] * problem.need_dweight


# ---- data and reference of a trial --------------------------------------------------------------

#: the last references by (engine, data set): what the next config of a problem wants again
_references: dict[tuple[type[Engine], Case], Reference] = {}
REFERENCES_KEPT = 2  # the gate's and the exact case's
_references_lock = fork_safe_lock()


def _write(engine: Engine, case: Case, tensors: Tensors) -> None:
    """Write every input. Each time, for a kernel under test may have spoiled the last ones."""
    inputs, _ = _names(case.problem)
    for name in DATA:
        if name in inputs:
            engine.write(case, name, tensors[name])
    if "rstd" in inputs:
        rstd = _reference(engine, case, tensors).terms[0].astype(np.float32)
        engine.backend.from_host(tensors["rstd"].address, rstd, engine.stream)


def _reference(engine: Engine, case: Case, tensors: Tensors) -> Reference:
    """The float64 sums over inputs that hold a case's data, computed once for the last cases."""
    key = (type(engine), case)
    problem = case.problem
    backward = problem.op == "backward"
    given = case.given if backward and problem.has_rstd else 0.0
    eps = 0.0 if case.exact else problem.eps
    with _references_lock:
        if key not in _references:
            terms = bounds.row_terms(engine.row_sums(case, tensors), problem.cols, eps, given=given)
            columns = np.empty((2, 0))
            if backward and problem.need_dweight:
                columns = engine.column_sums(case, tensors, terms[0])
            if len(_references) >= REFERENCES_KEPT:
                del _references[next(iter(_references))]
            _references[key] = Reference(terms, columns)
        return _references[key]


def _bits(engine: Engine, case: Case, tensors: Tensors, name: str) -> Bits:
    """A list (rstd, dweight) as it is stored, in the shape of :meth:`Case.shape`."""
    rows, cols, dtype = case.shape(name)
    size_bytes = rows * cols * DTYPE_BYTES[dtype]
    memory = engine.backend.to_host(tensors[name].address, size_bytes, engine.stream)
    return memory.view(bounds.STORAGE[dtype]).reshape(rows, cols)


def _changed(
    engine: Engine, case: Case, tensors: Tensors, name: str, reference: Reference
) -> tuple[int, int] | None:
    if name != "rstd":
        return engine.changed(case, name, tensors[name])
    want = bounds.encode(reference.terms[0], "float32")
    wrong = np.flatnonzero(_bits(engine, case, tensors, "rstd")[:, 0] != want)
    return (int(wrong[0]), 0) if wrong.size else None


def _compare(
    engine: Engine, case: Case, tensors: Tensors, name: str, reference: Reference, chain: int
) -> Worst:
    factor = bounds.bound_factor(name, chain)
    if name in MATRICES:
        return engine.worst(case, tensors, name, reference.terms, factor)
    if name == "rstd":
        want = scale = reference.terms[0][:, None]
    else:
        want, scale = reference.columns[:, None]
    got = _bits(engine, case, tensors, name)
    return bounds.worst_of(got, want, scale, factor, case.shape(name)[2], exact=case.exact)


# ---- buffers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A tensor between guard bands, its rows between gaps; all of it begins as one byte.

    Attributes:
        tensor: as a plan takes it.
        rows: of the tensor.
        row_bytes: bytes of a row.
        stride_bytes: bytes from one row to the next.
        base: where the allocation begins.
        size_bytes: its size.
        fill: the byte.
        owner: keeps the memory.
    """

    tensor: Tensor
    rows: int
    row_bytes: int
    stride_bytes: int
    base: int
    size_bytes: int
    fill: int
    owner: Any

    def broken(self, engine: Engine) -> str:
        """Where something was written outside the tensor, in words; "" for nowhere."""
        front = self.tensor.address - self.base
        end = front + (self.rows - 1) * self.stride_bytes + self.row_bytes
        back, gap = self.size_bytes - end, self.stride_bytes - self.row_bytes
        if at := engine.broken(self.base, 1, front, front, self.fill):
            return f"byte {front - at[1]} before the first row"
        if at := engine.broken(self.base + end, 1, back, back, self.fill):
            return f"byte {at[1]} after the last row"
        if gap and self.rows > 1:
            first = self.tensor.address + self.row_bytes
            if at := engine.broken(first, self.rows - 1, gap, self.stride_bytes, self.fill):
                return f"byte {at[1]} after row {at[0]}"
        return ""


def _allocate(backend: Backend, case: Case, name: str, fill: int) -> _Buffer:
    """A buffer for a tensor, aligned as the problem promises, and no better where it could be."""
    rows, cols, dtype = case.shape(name)
    problem, element = case.problem, DTYPE_BYTES[dtype]
    # rstd is read one by one; of the others a lane moves as many elements at once as of x
    elements = 1 if name == "rstd" else max(1, problem.alignment // problem.element_bytes)
    row_bytes = stride_bytes = cols * element
    if name in MATRICES:
        # an odd number of vectors, or every second row would be better aligned; each matrix its
        # own, or a kernel that takes one's stride for another's would pass
        vector = elements * element
        least = -(-row_bytes // vector) + -(-GAP_BYTES // vector) | 1
        stride_bytes = (least + 2 * MATRICES.index(name)) * vector
    skew = elements * element if problem.alignment < 16 else 0
    return _guarded(backend, rows, row_bytes, stride_bytes, element, skew, fill)


def _guarded(
    backend: Backend,
    rows: int,
    row_bytes: int,
    stride_bytes: int,
    element: int,
    skew: int,
    fill: int,
) -> _Buffer:
    """A buffer whose first row is ``skew`` bytes off a multiple of ALLOCATION_ALIGNMENT."""
    guard_bytes = GUARD_BYTES + stride_bytes
    size_bytes = 2 * guard_bytes + rows * stride_bytes + 2 * ALLOCATION_ALIGNMENT
    base, owner = backend.allocate(size_bytes)
    backend.fill(base, fill, size_bytes, 0)
    address = -(-(base + guard_bytes) // ALLOCATION_ALIGNMENT) * ALLOCATION_ALIGNMENT + skew
    stride = stride_bytes // element if stride_bytes > row_bytes else 0
    return _Buffer(
        Tensor(address, stride), rows, row_bytes, stride_bytes, base, size_bytes, fill, owner
    )

"""The correctness gate: does a built kernel compute what it must, and nothing else?

``verify`` runs a kernel on data of its own and holds every element of every output against the
float64 reference and the bounds of :mod:`rmsnorm_raw.bounds`. Beyond the numbers it checks that

* rows further apart than they are long are honoured, by each matrix's own stride, and so are
  addresses that are aligned to ``problem.alignment`` and no better;
* nothing outside the tensors is written, and nothing read there is used: outputs, their gaps and
  their guard bands begin as NaN, the gaps of inputs as numbers whose squares overflow;
* inputs are bitwise what they were, and dweight and dbias are the same bits in a second run, on a
  used workspace;
* a row of zeros, which there is from three tokens on, has rstd = eps^-1/2, y = bias, dx = g * rstd
  and, without a bias, the least scale of an 8-bit y;
* forward is right in place too, y over x and residual_out over the residual where their dtypes
  agree: a few rows are run so, last of all;
* backward is bit-equal to the reference on data that no fp32 sum has to round;
* an 8-bit y is right both where a given scale has many elements clamped and where many are
  subnormal.

On a GPU, data and comparison are kernels too (:mod:`rmsnorm_raw.kernels.reference`): nothing of
full size is copied to the host. On the simulator they are NumPy. Both make the same data.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rmsnorm_raw import bounds, launch, space
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.backends.cpu import landings
from rmsnorm_raw.bounds import Bits, Floats, Reference, Worst
from rmsnorm_raw.config import Config
from rmsnorm_raw.dtypes import LARGEST_FP8, stored_bytes
from rmsnorm_raw.environment import fork_safe_lock
from rmsnorm_raw.errors import InvalidInput, WrongResult
from rmsnorm_raw.extras import LEAST_SCALE
from rmsnorm_raw.gate import Case, Engine, HostEngine
from rmsnorm_raw.gate_data import DATA, static_scale
from rmsnorm_raw.gate_device import DeviceEngine
from rmsnorm_raw.guarded import INPUT_FILL, allocate, guarded, output_fill
from rmsnorm_raw.launch import SCRATCH, Tensors
from rmsnorm_raw.module import Binary
from rmsnorm_raw.problem import IN_PLACE, MATRICES, Problem

#: what scratch tensors begin as: a counter counts from zero
SCRATCH_FILL = {"workspace": 0xFF, "counter": 0}
#: The exact case keeps to fp32's 24 bits: sum(g * x) / scale is at most 16 N in steps of 1/2,
#: g - xhat * mean is at most 32 in steps of 1 / (2 N), sum(dout * xhat) is at most 8 M. An offset
#: of up to 1 makes half as much again of the first two, dresidual_out at most 8 / scale more.
EXACT_COLS, EXACT_ROWS = 1 << 18, 1 << 21
#: Backward is given this multiple of rstd, or a kernel that computes its own would pass.
GIVEN_RSTD = 1 + 2**-5
#: A second time y is over this multiple of a given scale: about 2 in 5 elements are subnormal.
LARGE_SCALE = 2.0**13
#: One token of so many, at least one, is also run in place: a lane stores into its own row alone.
IN_PLACE_SHARE = 64


@dataclass(frozen=True, slots=True, repr=False)
class Verdict:
    """What the gate found.

    Attributes:
        passed: whether every check passed.
        worst: by output, the largest |error| / bound; at most 1 is right, and near 1 usual, for
            half an ulp of rounding is part of the bound; inf stands for a NaN or for an exact value
            missed.
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

    def run(on: Backend, some: Problem, tensors: Tensors) -> None:
        launch.run(launch.make_plan(some, config, replace(binary, backend=on), tensors))

    outputs = (each.name for each in problem.outputs)
    chains = dict.fromkeys(outputs, space.row_chain(problem, config))
    if problem.op == "backward":
        of_columns = space.dweight_chain(problem, config, backend.device)
        chains |= dict.fromkeys(OVER_ROWS & chains.keys(), of_columns)
    sizes = launch.tensor_bytes(problem, config, backend.device)
    scratch = {name: sizes[name] for name in SCRATCH if name in sizes}
    engine = _engine or _engine_of(backend)
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
        tensors: every input that the problem has; others are left alone.
        seed: of the data, 0 <= seed < 2**64.
        stream: a raw handle.

    Raises:
        InvalidInput: an input is missing.
    """
    if missing := [each.name for each in problem.inputs if each.name not in tensors]:
        raise InvalidInput(f"{problem} also reads {', '.join(missing)}: pass every input")
    if problem.rows and problem.cols:
        engine = _engine_of(backend)(backend, stream)
        _write(engine, Case(problem, seed, exact=False), tensors)
        backend.synchronize(stream)


def _engine_of(backend: Backend) -> type[HostEngine | DeviceEngine]:
    return HostEngine if backend.device.simulated else DeviceEngine


def _judge(
    problem: Problem,
    run: Callable[[Problem, Tensors], None],
    engine: Engine,
    chains: Mapping[str, int],
    scratch: Mapping[str, int],
    seed: int,
) -> Verdict:
    """Judge whatever computes a problem of rows and cols >= 1 on tensors at given addresses.

    ``run`` enqueues the computation, of the problem or of its first rows, on the default stream.
    ``chains`` are S and D of the bounds, by output; ``scratch`` the bytes of the tensors
    "workspace" and "counter", where there are any.
    """
    general = Case(problem, seed, exact=False, given=GIVEN_RSTD, zero_row=_zero_row(problem))
    cases = [general]
    if problem.extras.scale == "static":
        cases.append(general._replace(given=LARGE_SCALE))
    if _has_exact_case(problem):
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


def _zero_row(problem: Problem) -> int | None:
    """The row of x and its residual that is zeros: the first of token 1.

    None with fewer than three tokens: the first row and the last say more of a kernel. None with an
    eps that fp32 has no normal number for: a device may take it for 0, whose rstd is an infinity.
    """
    return problem.extras.heads if problem.tokens >= 3 and problem.eps >= 2.0**-126 else None


def _has_exact_case(problem: Problem) -> bool:
    """Whether gate data exists that no fp32 sum of the problem has to round."""
    more = problem.extras
    longer = more.weight_offset != 0 or more.residual_out_dtype is not None
    power_of_two = problem.cols & (problem.cols - 1) == 0
    small = problem.cols <= EXACT_COLS >> longer and problem.rows <= EXACT_ROWS
    offset = more.weight_offset in (-1.0, -0.5, 0.0, 0.5, 1.0)
    return problem.op == "backward" and problem.has_rstd and power_of_two and small and offset


def _describe(case: Case, name: str, element: Worst) -> str:
    at = f"{name}[{element.row}, {element.col}] is {element.got!r}"
    if case.exact:
        return f"{at}, want exactly {element.want!r} (the case without rounding errors)"
    return f"{at}, want {element.want!r} +- {element.bound:.3g} ({element.ratio:.3g} of its bound)"


def _trial(
    case: Case,
    run: Callable[[Problem, Tensors], None],
    engine: Engine,
    chains: Mapping[str, int],
    scratch: Mapping[str, int],
) -> tuple[dict[str, Worst], list[str]]:
    """Run on one data set: the worst element of each output, and what else is wrong."""
    outputs = case.outputs
    fills = dict.fromkeys(case.inputs, INPUT_FILL)
    fills |= {name: output_fill(case.shape(name)[2]) for name in outputs}
    buffers = {name: allocate(engine.backend, case, name, fill) for name, fill in fills.items()}
    for name, size_bytes in scratch.items():
        buffers[name] = guarded(engine.backend, size_bytes // 4, 4, 4, 0, SCRATCH_FILL[name])
    tensors = {name: buffer.tensor for name, buffer in buffers.items()}
    _write(engine, case, tensors)
    reference = _reference(engine, case, tensors)
    run(case.problem, tensors)
    faults = []
    if first := {n: _bits(engine, case, tensors, n) for n in outputs if n in OVER_ROWS}:
        for name in outputs:
            buffer = buffers[name]
            engine.backend.fill(buffer.base, buffer.fill, buffer.size_bytes, 0)
        run(case.problem, tensors)
        faults += [
            f"{name} has other bits in a second run on the same data"
            for name, bits in first.items()
            if not np.array_equal(bits, _bits(engine, case, tensors, name))
        ]
    if "counter" in scratch and engine.backend.to_host(tensors["counter"].address, 4, 0).any():
        faults.append("counter is not 0 again after a run")
    for name, buffer in buffers.items():
        if where := buffer.broken(engine):
            faults.append(f"{name}: {where} was written, outside the tensor")
    faults += [
        f"{name}[{at[0]}, {at[1]}] was written, and it is an input"
        for name in case.inputs
        if (at := _changed(engine, case, tensors, name))
    ]
    worst = {
        name: _compare(engine, case, tensors, name, reference, chains[name]) for name in outputs
    }
    if not faults and all(element.ratio <= 1.0 for element in worst.values()):
        faults = _in_place(case, run, engine, chains, tensors, reference)
    return worst, faults


def _in_place(
    case: Case,
    run: Callable[[Problem, Tensors], None],
    engine: Engine,
    chains: Mapping[str, int],
    tensors: Tensors,
    reference: Reference,
) -> list[str]:
    """What is wrong in place with a kernel that is right elsewhere; outputs are overwritten.

    Their memory gets the inputs' data once more; the inputs stay, for the reference is of them.
    """
    dtypes = {each.name: each.dtype for each in case.problem.operands}
    over = {o: i for o, i in IN_PLACE.items() if o in dtypes and dtypes[o] == dtypes.get(i)}
    if not over:
        return []
    tokens = -(-case.problem.tokens // IN_PLACE_SHARE)
    few = replace(case.problem, rows=tokens * case.problem.extras.heads)
    case = case._replace(problem=few, zero_row=case.zero_row if tokens > 1 else None)
    reference = reference._replace(terms=reference.terms[:, : few.rows])
    for output, name in over.items():
        engine.write(case, name, tensors[output])
    run(few, {**tensors, **{name: tensors[output] for output, name in over.items()}})
    found = {n: _compare(engine, case, tensors, n, reference, chains[n]) for n in case.outputs}
    where = " and ".join(f"{output} over {name}" for output, name in over.items())
    return [
        f"in place ({where}), and only there: {_describe(case, name, element)}"
        for name, element in found.items()
        if element.ratio > 1.0
    ]


# ---- data and reference of a trial --------------------------------------------------------------

#: outputs that are sums over rows
OVER_ROWS = {"dweight", "dbias"}
#: the last references by (engine, data set): what the next config of a problem wants again
_references: dict[tuple[type[Engine], Case], Reference] = {}
REFERENCES_KEPT = 2  # the gate's and the exact case's
_references_lock = fork_safe_lock()


def _write(engine: Engine, case: Case, tensors: Tensors) -> None:
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
        given["rstd"] = _reference(engine, case, tensors).terms[0]
    if "scale" in case.inputs:
        scale = static_scale(case.problem.out_dtype, case.seed) * case.given
        given["scale"] = np.array([scale])
    return {name: bounds.encode(values, "float32") for name, values in given.items()}


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
            columns = np.empty((4, 0))
            if OVER_ROWS & {*case.outputs}:
                columns = engine.column_sums(case, tensors, terms[0])
            if len(_references) >= REFERENCES_KEPT:
                del _references[next(iter(_references))]
            _references[key] = Reference(terms, columns)
        return _references[key]


def _bits(engine: Engine, case: Case, tensors: Tensors, name: str) -> Bits:
    """A list (rstd, dweight, ...) as it is stored, in the shape of :meth:`Case.shape`."""
    rows, cols, dtype = case.shape(name)
    size_bytes = rows * cols * stored_bytes(dtype)
    memory = engine.backend.to_host(tensors[name].address, size_bytes, engine.stream)
    return memory.view(bounds.STORAGE[dtype]).reshape(rows, cols)


def _changed(engine: Engine, case: Case, tensors: Tensors, name: str) -> tuple[int, int] | None:
    if name in DATA:
        return engine.changed(case, name, tensors[name])
    want = _given(engine, case, tensors)[name]
    wrong = np.flatnonzero(_bits(engine, case, tensors, name)[:, 0] != want)
    return (int(wrong[0]), 0) if wrong.size else None


def _compare(
    engine: Engine, case: Case, tensors: Tensors, name: str, reference: Reference, chain: int
) -> Worst:
    factor = bounds.bound_factor(name, chain)
    if name in MATRICES:
        return engine.worst(case, tensors, name, reference.terms, factor)
    slack: Floats | float = 0.0
    if name == "rstd":
        want = scale = reference.terms[0][:, None]
    elif name == "scale":
        of_y = bounds.bound_factor("y", chain)
        maxima = engine.row_maxima(case, tensors, reference.terms[0], of_y)[:, :, None]
        want, scale, slack = maxima / LARGEST_FP8[case.problem.out_dtype]
        want = np.maximum(want, LEAST_SCALE)
    else:
        first = 0 if name == "dweight" else 2
        want, scale = reference.columns[first : first + 2, None]
    got, (_, _, dtype) = _bits(engine, case, tensors, name), case.shape(name)
    return bounds.worst_of(got, want, scale, factor, dtype, slack=slack, exact=case.exact)

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
* a row of large x, which there is from four tokens on, is right too, and so is a large y of
  forward, up to infinity in fp16;
* forward is right in place too, y over x and residual_out over the residual where their dtypes
  agree: a few rows are run so, of which each persistent program has three;
* a NaN in x makes a row of y, or of dx, NaN: the last run of all, of one token;
* backward is bit-equal to the reference on data that no fp32 sum has to round;
* an 8-bit y is right both where a given scale has many elements clamped and where many are
  subnormal.

On a GPU, data and comparison are kernels too (:mod:`rmsnorm_raw.kernels.reference`): nothing of
full size is copied to the host. On the simulator they are NumPy. Both make the same data.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from rmsnorm_raw import launch, space
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.backends.cpu import landings
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.errors import InvalidInput, WrongResult
from rmsnorm_raw.gate import Case, Engine, HostEngine
from rmsnorm_raw.gate_device import DeviceEngine
from rmsnorm_raw.launch import SCRATCH, Tensors
from rmsnorm_raw.module import Binary
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.trial import OVER_ROWS, Subject, describe, trial, write

#: The exact case keeps to fp32's 24 bits: sum(g * x) / scale is at most 16 N in steps of 1/2,
#: g - xhat * mean is at most 32 in steps of 1 / (2 N), sum(dout * xhat) is at most 8 M. An offset
#: of up to 1 makes half as much again of the first two, dresidual_out at most 8 / scale more.
EXACT_COLS, EXACT_ROWS = 1 << 18, 1 << 21
#: Backward is given this multiple of rstd, or a kernel that computes its own would pass.
GIVEN_RSTD = 1 + 2**-5
#: A second time y is over this multiple of a given scale: about 2 in 5 elements are subnormal.
LARGE_SCALE = 2.0**13
#: So many tokens for each slot of a persistent program are also run in place: two by turns and a
#: last one. Where a slot has one row in all, a token of so many, at least one.
IN_PLACE_ROUNDS, IN_PLACE_SHARE = 3, 64


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
    few = _few_tokens(problem, config, backend.device)
    verdicts = [
        _judge(problem, Subject(partial(run, on), chains, scratch, few), engine(on), seed)
        for on in landings(backend, binary.source)
    ]
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
        write(engine, Case(problem, seed, exact=False), tensors)
        backend.synchronize(stream)


def _engine_of(backend: Backend) -> type[HostEngine | DeviceEngine]:
    return HostEngine if backend.device.simulated else DeviceEngine


def _judge(problem: Problem, subject: Subject, engine: Engine, seed: int) -> Verdict:
    general = _general_case(problem, seed)
    cases = [general]
    if problem.extras.scale == "static":
        cases.append(general._replace(given=LARGE_SCALE))
    if _has_exact_case(problem):
        cases.append(Case(problem, seed, exact=True))
    ratios: dict[str, float] = {}
    faults: list[str] = []
    for case in cases:
        worst, found = trial(case, subject, engine)
        faults += found
        for name, element in worst.items():
            ratios[name] = max(ratios.get(name, 0.0), element.ratio)
            if element.ratio > 1.0:
                faults.append(describe(case, name, element))
    return Verdict(not faults, ratios, seed, "\n".join(faults))


def _general_case(problem: Problem, seed: int) -> Case:
    """The case that every problem has.

    Some of forward's weights are large. A scale of y's largest would make 0 of all the others, and
    in backward they would drown the rest of a row.
    """
    large_weights = problem.op == "forward" and problem.extras.scale == "none"
    rows = _zero_row(problem), _large_row(problem)
    return Case(problem, seed, False, GIVEN_RSTD, *rows, large_weights)


def _large_row(problem: Problem) -> int | None:
    """The row of x and its residual that is large: the first of token 2.

    None with fewer than four tokens: in fp16 its dx is subnormal, so the last is none.
    """
    return 2 * problem.extras.heads if problem.tokens >= 4 else None


def _zero_row(problem: Problem) -> int | None:
    """The row of x and its residual that is zeros: the first of token 1.

    None with fewer than three tokens: the first row and the last say more of a kernel. None with an
    eps that fp32 has no normal number for: a device may take it for 0, whose rstd is an infinity.
    """
    return problem.extras.heads if problem.tokens >= 3 and problem.eps >= 2.0**-126 else None


def _few_tokens(problem: Problem, config: Config, device: DeviceSpec) -> int:
    """The tokens that are also run in place: each persistent program goes round its loop."""
    tokens = -(-problem.tokens // IN_PLACE_SHARE)
    if config.programs:
        programs = space.grid_programs(problem, config, device) // problem.extras.heads
        tokens = IN_PLACE_ROUNDS * programs * config.rows_per_block
    return min(tokens, problem.tokens)


def _has_exact_case(problem: Problem) -> bool:
    """Whether gate data exists that no fp32 sum of the problem has to round."""
    more = problem.extras
    longer = more.weight_offset != 0 or more.residual_out_dtype is not None
    power_of_two = problem.cols & (problem.cols - 1) == 0
    small = problem.cols <= EXACT_COLS >> longer and problem.rows <= EXACT_ROWS
    offset = more.weight_offset in (-1.0, -0.5, 0.0, 0.5, 1.0)
    return problem.op == "backward" and problem.has_rstd and power_of_two and small and offset

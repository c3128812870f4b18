"""``tune``: a search for one problem, and what was decided.

>>> rr.tune(p)                            # quick; or effort="full", or "none" for what is known
>>> print(_)                              # the finals, what failed, and a line to paste

A search that has been made is not made again: its record is found, whether a candidate has won or
the ladder's config stays. Records are kept of times on a GPU alone, and not of a search that was
interrupted, or that a budget cut short; a winner found by then is kept, as of a quick search, where
none was known. The winner known so far is tried first, and is among the finalists of a full search.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import json
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from rmsnorm_raw import environment, ladder, store
from rmsnorm_raw.backends import Backend, get_backend
from rmsnorm_raw.backends.offline import OfflineBackend
from rmsnorm_raw.config import Config
from rmsnorm_raw.effort import FULL, QUICK, Effort
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.lab import Fault, Steps, counted
from rmsnorm_raw.problem import Problem, require_problem
from rmsnorm_raw.records import Times
from rmsnorm_raw.search import NOISE_PCT, Final, Search
from rmsnorm_raw.stats import MIN_SAMPLES, Comparison, compare
from rmsnorm_raw.worker import Worker

#: by rising thoroughness; a record of a higher one serves a lower one
EFFORTS: dict[str, Effort | None] = {"none": None, "quick": QUICK, "full": FULL}
SHOWN = 8  # of the failures and of the standings


@dataclass(frozen=True, slots=True, repr=False)
class Decision:
    """Which config a problem is served with, and why. ``print`` shows the whole of it.

    Attributes:
        problem: what was decided for.
        device: its name.
        config: the winner; the ladder's, unless another is faster beyond doubt.
        ladder: the ladder's config.
        why: a sentence.
        origin: "searched", "record" (of an earlier search), or what :func:`.store.resolve` says.
        effort: "none", "quick" or "full".
        counts: configs by what became of them.
        faults: what was wrong with each config that failed in this search.
        standings: each timed candidate beside the ladder's config, the fastest first.
        finals: what the finalists achieved.
        samples: times at the problem's rows, as a record has them.
        took_s: seconds of the search.
        simulated: the times are the simulator's, and mean nothing.
        interrupted: the search did not end by itself.
    """

    problem: Problem
    device: str
    config: Config
    ladder: Config
    why: str
    origin: str
    effort: str
    counts: Mapping[str, int] = field(default_factory=dict)
    faults: Mapping[Config, Fault] = field(default_factory=dict)
    standings: tuple[tuple[Config, Comparison], ...] = ()
    finals: tuple[Final, ...] = ()
    samples: Times = field(default_factory=dict)
    took_s: float = 0.0
    simulated: bool = False
    interrupted: bool = False

    @property
    def tuned(self) -> bool:
        """Whether another config than the ladder's was chosen."""
        return self.config != self.ladder

    @property
    def comparisons(self) -> dict[str, Comparison]:
        """By regime, the chosen config beside the ladder's at the problem's rows, both orders."""
        return {
            regime: compare(sides["ladder"], sides["tuned"], NOISE_PCT)
            for regime, sides in self.samples.items()
            if min(len(sides.get(side, ())) for side in ("tuned", "ladder")) >= MIN_SAMPLES
        }

    @property
    def line(self) -> str:
        """The call to paste."""
        p, more = self.problem, self.problem.extras
        weight = ["w"] * (p.weight_dtype is not None)
        if p.op == "forward":
            call, arrays = "rmsnorm_fwd", ["x", *weight]
            flags = {"store_rstd": p.store_rstd}
        else:
            call, arrays = "rmsnorm_bwd", ["dout", "x", *weight]
            if p.has_rstd:
                arrays.append("rstd" if weight else "rstd=rstd")
            flags = {"need_dx": p.need_dx, "need_dweight": p.need_dweight or not weight}
        arrays += _extra_arguments(p)
        arrays += [f"{name}=False" for name, value in flags.items() if not value]
        arrays += [f"eps={p.eps!r}"] * (p.eps != Problem.forward(1, 1, "fp32").eps)
        heads = f"  # x is (..., {more.heads}, {p.cols})" * (more.heads > 1)
        heads += ", cut out of more heads" * (more.heads > 1 and not more.per_head)
        return f'rr.{call}({", ".join(arrays)}, config="{self.config.slug}"){heads}'

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept = "; its times are simulated, and nothing is kept" if self.simulated else ""
        yield f"{self.problem} on {self.device}: {self.config.slug}{kept}"
        yield self.why
        if self.counts:
            yield f"{counted(self.counts)}; {self.effort}, {self.took_s:.1f} s"
        for config, fault in itertools.islice(self.faults.items(), SHOWN):
            yield f"{config.slug}: {fault.brief}"
        unit = "simulated " if self.simulated else ""
        if self.standings:
            table = Table("candidate", f"{unit}cold, beside the ladder's {self.ladder.slug}")
            table.box = None
            for config, found in self.standings[:SHOWN]:
                table.add_row(config.slug, f"{found.ratio:.2f}x" if self.simulated else str(found))
            yield table
        if self.finals:
            table = Table("finalist", "rows", "regime", "ladder first", "candidate first", box=None)
            for final in self.finals:
                table.add_row(
                    final.config.slug, str(final.rows), final.regime, str(final.first),
                    str(final.swapped),
                )  # fmt: skip
            yield table
        elif self.tuned:
            for regime, comparison in self.comparisons.items():
                yield f"{regime}: {comparison}"
        yield self.line

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=200, markup=False, highlight=False).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def __repr__(self) -> str:
        verdict = ", ".join(f"{name} {c}" for name, c in self.comparisons.items()) or "the ladder's"
        if not self.tuned:
            verdict = "the ladder's"
        return (
            f"<Decision {self.problem}: {self.config.slug}, {verdict}; {self.origin}"
            f"{', simulated' * self.simulated}{', interrupted' * self.interrupted}; {self.line}>"
        )


def _extra_arguments(problem: Problem) -> list[str]:
    """What a call is given for a problem's extras; heads are in the shape of x."""
    more, found = problem.extras, []
    if problem.op == "forward":
        found += ["bias=bias"] * (more.bias_dtype is not None)
        found += ["residual=residual"] * (more.residual_dtype is not None)
        if more.residual_out_dtype != more.residual_dtype:
            written = more.residual_out_dtype
            found.append(f'residual_dtype="{written}"' if written else "residual_out=False")
        found += [f'casting="{more.casting}"'] * (more.casting != "none")
        found += [f'out_dtype="{more.out_dtype}"'] * (more.out_dtype is not None)
        if more.scale != "none":
            found.append("scale=scale" if more.scale == "static" else 'scale="dynamic"')
    else:
        found += ["dresidual_out=dresidual_out"] * (more.residual_out_dtype is not None)
        found += [f'need_dbias=True, bias_dtype="{more.bias_dtype}"'] * bool(more.bias_dtype)
        found += [f'dx_dtype="{more.dx_dtype}"'] * (more.dx_dtype is not None)
        found += [f'residual_dtype="{more.residual_dtype}"'] * (more.residual_dtype is not None)
    return found + [f"weight_offset={more.weight_offset!r}"] * bool(more.weight_offset)


def tune(
    problem: Problem,
    effort: str = "quick",
    *,
    backend: str | Backend | None = None,
    budget_s: float | None = None,
    resume: bool = True,
    steps: Steps | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Decision:
    """Search for a config that is faster than the ladder's, and keep what was found.

    The kernels run in a process of their own, so that one which fails or hangs costs neither the
    search nor the caller's own use of the GPU. Ctrl-C ends the search, and what is known is
    returned.

    Args:
        effort: "none" (no search: what is known), "quick" (seconds: a part of the space) or "full"
            (minutes: all of it).
        backend: "rocm", "cuda", "cpu" or a Backend; None for the one that is here. On the simulator
            the ladder's config and a few candidates are built and gated, whatever the effort; the
            ladder's stays, and nothing is kept.
        budget_s: seconds after which nothing more is begun; by default the effort's, and on the
            simulator none.
        resume: take the record of an earlier search that was as thorough, if there is one.
        steps: who does the work; by default a new :class:`.worker.Worker`.
        progress: called with what begins.

    Raises:
        InvalidInput: see :func:`require_tunable`.
        BackendUnavailable: the backend is of a device that is not here.
        InvalidConfig: nothing fits the problem.
        SearchFailed: the ladder's config does not compile or run.
        WrongResult: it fails the gate.
        MemoryError: the problem's tensors do not fit the device.
        WorkerLost: the worker does not start.
    """
    require_tunable(problem, effort, budget_s)
    where = get_backend(backend) if backend is None or isinstance(backend, str) else backend
    asked = EFFORTS[effort]
    if asked is None:
        config, origin = store.resolve(problem, where)
        base = ladder.default_config(problem, where.device)
        why = f"no search: {origin}"
        return Decision(problem, where.device.name, config, base, why, origin, effort)
    if isinstance(where, OfflineBackend):
        where.refuse()
    simulated = where.device.simulated
    key = None if simulated else store.key(problem, where)
    found = store.lookup(key) if key is not None and resume else None
    if found is not None and _rank(found.effort) >= _rank(effort):
        return _recorded(problem, where, found)
    known = None if key is None else _winner(problem, where)
    interrupted = False
    with contextlib.ExitStack() as stack:
        if steps is None:
            steps = stack.enter_context(Worker.on(where))
        search = Search(
            problem, where.device, steps, asked, budget_s=budget_s, known=known, progress=progress
        )
        try:
            steps.start()
            search.run()
        except KeyboardInterrupt:
            interrupted = True
            search.why = f"interrupted; {search.why}"
    decision = _decided(search, effort, interrupted)
    if key is not None and (search.finished or (decision.tuned and known is None)):
        config = decision.config if decision.tuned else _stays(problem, where)
        record = store.Record(
            config, decision.why, decision.samples, decision.counts, environment_digest(),
            effort if search.finished else "quick",
        )  # fmt: skip
        store.save(key, record)
    return decision


def require_tunable(problem: Problem, effort: str, budget_s: float | None) -> None:
    """Raises InvalidInput, with what to give, where :func:`tune` has nothing to begin with."""
    if isinstance(getattr(problem, "problem", None), Problem):
        raise InvalidInput("tune takes a problem: pass kernel.problem; edited text is not searched")
    require_problem(problem)
    if effort not in EFFORTS:
        raise InvalidInput(f"effort {effort!r} is not one of {', '.join(EFFORTS)}")
    if budget_s is not None and not (isinstance(budget_s, numbers.Real) and budget_s > 0):
        raise InvalidInput(f"a budget of {budget_s!r} s: give seconds above 0, or None")
    if problem.is_empty:
        raise InvalidInput(f"{problem} launches nothing: there is nothing to tune")


def _winner(problem: Problem, backend: Backend) -> Config | None:
    """What an earlier search found, the user's or the package's; None where it was the ladder's."""
    config, origin = store.resolve(problem, backend)
    return None if origin == "ladder" else config


def _stays(problem: Problem, backend: Backend) -> Config:
    """What a record has where the ladder stays: its choice at the lower end of the bucket."""
    first, _ = store.bucket(problem.rows, problem.extras.heads)
    return ladder.default_config(replace(problem, rows=first), backend.device)


def _rank(effort: str) -> int:
    return list(EFFORTS).index(effort) if effort in EFFORTS else -1


def _decided(search: Search, effort: str, interrupted: bool) -> Decision:
    own = [final for final in search.finals if final.rows == search.problem.rows]
    samples: dict[str, dict[str, tuple[float, ...]]] = {}
    for final in own:
        if final.config == search.config:
            samples[final.regime] = {"tuned": final.tuned_us, "ladder": final.ladder_us}
        elif search.config == search.ladder:  # it stays, and these are its times
            samples[final.regime] = {"ladder": final.ladder_us}
    ranked = sorted(search.standings.items(), key=lambda item: -item[1].ratio)
    return Decision(
        search.problem, search.device.name, search.config, search.ladder, search.why, "searched",
        effort, dict(search.counts), dict(search.faults), tuple(ranked), tuple(search.finals),
        samples, search.took_s, search.device.simulated, interrupted,
    )  # fmt: skip


def _recorded(problem: Problem, backend: Backend, record: store.Record) -> Decision:
    base = ladder.default_config(problem, backend.device)
    config, _ = store.resolve(problem, backend)
    return Decision(
        problem, backend.device.name, config, base, record.reason, "record", record.effort,
        record.counts, samples=record.samples,
    )  # fmt: skip


@functools.cache
def environment_digest() -> str:
    """SHA-256 of what times depend on beside the key: packages, compilers, OS, driver."""
    facts = environment.collect()
    steady = {name: facts[name] for name in ("python", "os", "cpu", "packages", "compilers")}
    gpus = facts["nvidia_gpus"]
    drivers = [gpu.get("driver_version") for gpu in gpus] if isinstance(gpus, list) else gpus
    text = json.dumps(steady | {"drivers": drivers, "rocm": facts["rocm_version"]}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()

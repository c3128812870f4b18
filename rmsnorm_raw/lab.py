"""The lab: compiles, gates, tries out and times many configs of a problem on one device.

A search asks for steps and never touches the device itself. In :mod:`.worker` the lab stands in a
process of its own; in tests something else may answer. A config that fails is a :class:`Fault`
among the results and not an exception, so that one does not cost the others theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Literal, Protocol

from rmsnorm_raw import check, clones, launch, measure, module, source
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.config import Config
from rmsnorm_raw.errors import CompileError, LaunchError, RmsnormRawError, WrongResult
from rmsnorm_raw.measure import Limits, Regime, Samples
from rmsnorm_raw.problem import Problem

#: what a config can fail by. "memory" is no fault of the config: the device has too little free
Kind = Literal["constraints", "compile", "runtime", "correctness", "timeout", "memory"]
#: after a number of configs: those that are right, that failed by a kind, or were left out
WORDS = {
    "correct": "correct", "constraints": "refused by the space", "compile": "that do not compile",
    "runtime": "that fail when run", "correctness": "with wrong results",
    "timeout": "that take too long", "memory": "that found too little memory",
    "duplicates": "that compile to the same code as another",
}  # fmt: skip
#: of the gate's data; one for all configs, for the reference sums of a data set are kept
SEED = 1


def counted(counts: Mapping[str, int]) -> str:
    """Counts by the keys of :data:`WORDS`, in words: "0 correct" too, of others what there is."""
    shown = {kind: counts.get(kind, 0) for kind in WORDS}
    return ", ".join(f"{n} {WORDS[kind]}" for kind, n in shown.items() if n or kind == "correct")


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a config went no further.

    Attributes:
        kind: in one word.
        message: the compiler's, the gate's or the driver's own words.
    """

    kind: Kind
    message: str

    @property
    def brief(self) -> str:
        """The kind, and the first line of the message."""
        first_line = self.message.partition("\n")[0]
        return f"{self.kind}: {first_line}"


def few_rows(problem: Problem, rows: int) -> Problem:
    """The problem with about so many rows at most: an odd number of tokens, each with its heads."""
    heads = problem.extras.heads
    return replace(problem, rows=heads * min(problem.tokens, (rows // heads) | 1))


Begun = Callable[[Config], None]
Ended = Callable[[Config, "str | Fault"], None]


class Steps(Protocol):
    """What a search asks for.

    ``until`` is a time of :func:`time.monotonic`: a config whose turn comes later has no result.
    """

    def start(self) -> None:
        """Whatever takes long and is done once; a search's time begins after it."""

    def compile(
        self, problem: Problem, configs: Sequence[Config], until: float = math.inf
    ) -> dict[Config, str | Fault]:
        """The digest of each config's code object and launches: equal ones are one candidate."""

    def gate(
        self, problem: Problem, configs: Sequence[Config], until: float = math.inf
    ) -> dict[Config, str | Fault]:
        """Runs the correctness gate on each config, alone; "" is a pass."""

    def try_out(
        self, problem: Problem, configs: Sequence[Config], until: float = math.inf
    ) -> dict[Config, str | Fault]:
        """Launches each config once, alone, on the tensors that it will be timed on."""

    def time(
        self, problem: Problem, configs: Sequence[Config], regime: Regime, limits: Limits
    ) -> dict[Config, Samples] | Fault:
        """Times the configs interleaved, in this order; one fault for all where that fails."""


class Lab:
    """The steps on a backend, in this process.

    Each reports a config as it begins and its result as it ends, so that whoever watches knows what
    is known when the process dies.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._arena: clones.Arena | None = None

    @property
    def healthy(self) -> bool:
        """Whether the device still does as it is told: on CUDA a fault ends a whole process's."""
        try:
            address, owner = self.backend.allocate(256)
            self.backend.fill(address, 0, 256, 0)
            self.backend.synchronize(0)
            del owner
        except LaunchError:
            return False
        return True

    def compile(
        self,
        problem: Problem,
        configs: Sequence[Config],
        until: float,
        begun: Begun,
        ended: Ended,
    ) -> None:
        """See :class:`Steps`. Each distinct source is compiled once, on all cores."""
        sources = {config: self._render(problem, config) for config in configs}
        sharing: dict[str, list[Config]] = {}
        for config, text in sources.items():
            sharing.setdefault(text.digest, []).append(config)

        def found(text: source.Source, binary: module.Binary | CompileError) -> None:
            for config in sharing[text.digest]:
                if isinstance(binary, CompileError):
                    ended(config, Fault("compile", str(binary)))
                else:
                    ended(config, self._identity(problem, config, binary))

        module.build_all(
            sources.values(),
            self.backend,
            until=until,
            begun=lambda text: begun(sharing[text.digest][0]),
            ended=found,
        )

    def gate(
        self,
        problem: Problem,
        configs: Sequence[Config],
        until: float,
        begun: Begun,
        ended: Ended,
    ) -> None:
        """See :class:`Steps`."""
        self._each(partial(self._gate, problem), configs, until, begun, ended)

    def try_out(
        self,
        problem: Problem,
        configs: Sequence[Config],
        until: float,
        begun: Begun,
        ended: Ended,
    ) -> None:
        """See :class:`Steps`."""
        self._each(partial(self._try_out, problem, configs), configs, until, begun, ended)

    def time(
        self, problem: Problem, configs: Sequence[Config], regime: Regime, limits: Limits
    ) -> dict[Config, Samples] | Fault:
        """See :class:`Steps`."""
        try:
            arena = self._arena_for(problem, configs)
            contenders = [arena.clones(each, self._binary(problem, each)) for each in configs]
            if regime == "steady" and not contenders[0].exceed_cache:
                return Fault("constraints", "clones of the tensors do not exceed the cache")
            taken = measure.time_interleaved(
                [each.calls() for each in contenders], self.backend, regime=regime, **limits
            )
        except (LaunchError, measure.Unmeasurable) as error:
            if not self.healthy:
                raise Unhealthy from error
            return Fault("runtime", str(error))
        except MemoryError as error:
            return Fault("memory", str(error))
        return dict(zip(configs, taken, strict=True))

    def _each(
        self,
        step: Callable[[Config], str | Fault],
        configs: Sequence[Config],
        until: float,
        begun: Begun,
        ended: Ended,
    ) -> None:
        for config in configs:
            if monotonic() > until:
                return
            begun(config)
            ended(config, self._guarded(step, config))
            if not self.healthy:
                raise Unhealthy

    def _guarded(self, step: Callable[[Config], str | Fault], config: Config) -> str | Fault:
        try:
            return step(config)
        except CompileError as error:
            return Fault("compile", str(error))
        except LaunchError as error:
            return Fault("runtime", str(error))
        except MemoryError as error:
            if self._arena is None:
                return Fault("memory", str(error))
            self._arena = None  # make room, and try again
            return self._guarded(step, config)

    def _gate(self, problem: Problem, config: Config) -> str | Fault:
        verdict = check.verify(problem, config, self._binary(problem, config), seed=SEED)
        return "" if verdict.passed else Fault("correctness", str(verdict))

    def _try_out(self, problem: Problem, configs: Sequence[Config], config: Config) -> str | Fault:
        arena = self._arena_for(problem, configs)
        arena.clones(config, self._binary(problem, config)).calls()[0]()
        self.backend.synchronize(0)
        return ""

    def _arena_for(self, problem: Problem, configs: Sequence[Config]) -> clones.Arena:
        """One arena at a time: its inputs are written once for all configs of a problem."""
        if not (self._arena and all(self._arena.serves(problem, each) for each in configs)):
            self._arena = None  # before the next one is allocated
            self._arena = clones.arena(problem, configs, self.backend)
        return self._arena

    def _render(self, problem: Problem, config: Config) -> source.Source:
        device = self.backend.device
        return source.render(problem, config, device, runtime_cols=device.simulated)

    def _binary(self, problem: Problem, config: Config) -> module.Binary:
        return module.build(self._render(problem, config), self.backend)

    def _identity(self, problem: Problem, config: Config, binary: module.Binary) -> str:
        launches = launch.launches(problem, config, binary)
        shapes = [(each.entry_point, each.grid, each.block, each.lds_bytes) for each in launches]
        return f"{binary.object_digest} {shapes}"


class Unhealthy(Exception):
    """A kernel has failed, and with it everything that this process asks of the device."""


class SearchFailed(RmsnormRawError, RuntimeError):
    """The ladder's own config fails, so there is nothing to hold a candidate against."""


def ladder_failed(config: Config, fault: Fault) -> Exception:
    """What to raise where the ladder's own config fails."""
    message = f"the ladder's config {config.slug!r} ({fault.kind}): {fault.message}"
    kinds: dict[str, type[Exception]] = {"memory": MemoryError, "correctness": WrongResult}
    return kinds.get(fault.kind, SearchFailed)(message)

"""Candidates: in which order a search tries the configs of a space, and the walk of an ablation.

A search that cannot try all begins near the ladder's config and looks everywhere once: first the
configs one group of knobs away, and for each value of each knob the nearest config that has it;
then the neighbours of what has been fastest so far, mixed with a drawn sample of the rest. The draw
is seeded, so that a search can be repeated.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from rmsnorm_raw.config import Config, Path
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.space import enumerate_configs

#: knobs that a kernel changes together: a step from one config to its neighbour
GROUPS = (
    ("block", "threads_per_row"), ("vec",), ("path", "stages", "bulk", "reread", "paced"),
    ("load_policy", "store_policy"), ("waves_per_eu", "min_blocks"), ("programs",), ("finish",),
)  # fmt: skip
RING = GROUPS[2][1:]
KNOBS = tuple(field.name for field in fields(Config))
#: of a round after the first, the neighbours of the leaders; the rest is drawn
NEIGHBOURS_SHARE = 2 / 3


def knobs_apart(one: Config, other: Config) -> tuple[int, int]:
    """(groups of knobs, knobs) in which two configs differ."""
    knobs = {name for name in KNOBS if getattr(one, name) != getattr(other, name)}
    return sum(not knobs.isdisjoint(group) for group in GROUPS), len(knobs)


class Explorer:
    """Hands out the configs of a space, each once, in the order of the module's head.

    Args:
        kept: the configs to try; the ladder's is left out.
        ladder: where to begin.
        seed: of the draw.
        known: what an earlier search has found; it comes first.
    """

    def __init__(
        self, kept: Sequence[Config], ladder: Config, seed: int = 0, known: Config | None = None
    ) -> None:
        near = sorted(
            (config for config in kept if config != ladder),
            key=lambda config: knobs_apart(config, ladder),
        )
        first = [config for config in near if knobs_apart(config, ladder)[0] == 1]
        self._first = list(dict.fromkeys((*_cover(near, ladder), *first)))
        drawn = [config for config in near if config not in set(self._first)]
        random.Random(seed).shuffle(drawn)
        foremost = [config for config in near if config == known]
        self._left = dict.fromkeys((*foremost, *self._first, *drawn))

    def __len__(self) -> int:
        return len(self._left)

    def take(self, count: int, leaders: Sequence[Config] = ()) -> list[Config]:
        """The next ``count`` configs, or what is left.

        Args:
            count: at most.
            leaders: what has been fastest so far, the fastest first; none in the first round.
        """
        wanted: dict[Config, None] = {}
        for leader in leaders:
            reach = [config for config in self._left if knobs_apart(config, leader)[0] == 1]
            wanted |= dict.fromkeys(sorted(reach, key=lambda c: knobs_apart(c, leader)[1]))
        near = itertools.islice(wanted, int(count * NEIGHBOURS_SHARE))
        taken = list(itertools.islice(dict.fromkeys((*near, *self._left)), count))
        for config in taken:
            del self._left[config]
        return taken


def _cover(near: Sequence[Config], ladder: Config) -> Iterator[Config]:
    """For each value of each knob that the ladder's config lacks, the nearest config with it."""
    seen = {(name, getattr(ladder, name)) for name in KNOBS}
    for config in near:
        values = {(name, getattr(config, name)) for name in KNOBS}
        if not values <= seen:
            seen |= values
            yield config


def one_factor(problem: Problem, device: DeviceSpec, base: Config) -> Iterator[tuple[str, Config]]:
    """(change, config) with one knob of ``base`` changed, over all values that the space knows.

    A change reads "block=512". What cannot stay as it was beside it goes with it: a path takes the
    ring knobs it wants, two_pass its own finish, a ring by lanes loses policy and pace. A config
    may still not fit: :func:`.space.reject_reason` says.
    """
    known = [base, *enumerate_configs(problem, device).kept]
    for name in KNOBS:
        if name in RING and base.path != "lds":
            continue
        for value in sorted({getattr(config, name) for config in known} - {getattr(base, name)}):
            if name == "path":
                config = _on_path(problem, device, base, value)
            elif name == "bulk" and not value:
                config = replace(base, bulk=False, paced=False, load_policy="default")
            elif name == "stages" and not value:
                continue
            else:
                config = replace(base, **{name: value})
            yield f"{name}={value}", config


def _on_path(problem: Problem, device: DeviceSpec, base: Config, path: Path) -> Config:
    ring = path == "lds"
    single = problem.op == "forward" and path in ("registers", "two_pass")
    return replace(
        base, path=path, stages=3 * ring, bulk=ring and device.arch == "sm_90" and base.vec == 16,
        reread=False, paced=False, finish="kernel" if path == "two_pass" else base.finish,
        programs=0 if single else base.programs or 2,
    )  # fmt: skip

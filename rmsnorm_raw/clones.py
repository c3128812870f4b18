"""Clones: a problem's tensors several times over, so that a call never finds its data in cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rmsnorm_raw import check, launch
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.module import Binary
from rmsnorm_raw.problem import Problem

#: clones together exceed this many last-level caches; on an MI355X a working set of 1.1 caches
#: still came out too fast
ROTATED_CACHES = 3
MIN_CLONES, MAX_CLONES = 2, 64
#: for all clones together, though there are never fewer than two
BUDGET_BYTES = 16 << 30
#: tensors of a clone start on multiples of this, as an allocator's would
ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class Clones:
    """One operation over several copies of its tensors.

    Attributes:
        plans: one a clone, in the order of rotation.
        clone_bytes: of one clone, the workspace not counted.
        cache_bytes: what a rotation must exceed to find nothing of it in cache.
        owner: keeps the tensors alive.
    """

    plans: tuple[launch.Plan, ...]
    clone_bytes: int
    cache_bytes: int
    owner: Any = field(repr=False)

    @property
    def exceed_cache(self) -> bool:
        """Whether a rotation is large enough for steady times."""
        return len(self.plans) * self.clone_bytes > self.cache_bytes

    def calls(self, stream: int = 0) -> list[functools.partial[None]]:
        """What the timer rotates over."""
        return [functools.partial(launch.run, plan, stream) for plan in self.plans]


@dataclass(frozen=True, slots=True)
class Arena:
    """A problem's tensors several times over, inputs written, for any config that it was made for.

    Attributes:
        problem: whose tensors.
        backend: where they lie.
        tensors: of each clone, by name; the workspace is one for all.
        clone_bytes: of one clone, the workspace not counted.
        workspace_bytes: the most that a config of it may want.
        owner: keeps the tensors alive.
    """

    problem: Problem
    backend: Backend
    tensors: tuple[dict[str, launch.Tensor], ...]
    clone_bytes: int
    workspace_bytes: int
    owner: Any = field(repr=False)

    def serves(self, problem: Problem, config: Config) -> bool:
        """Whether the tensors are all that a config of a problem wants."""
        sizes = launch.tensor_bytes(problem, config, self.backend.device)
        enough = sizes.get("workspace", 0) <= self.workspace_bytes
        return problem == self.problem and enough and sizes.keys() <= self.tensors[0].keys()

    def clones(self, config: Config, binary: Binary) -> Clones:
        """A plan on each clone."""
        plans = (launch.make_plan(self.problem, config, binary, each) for each in self.tensors)
        cache_bytes = ROTATED_CACHES * self.backend.device.last_level_cache_bytes
        return Clones(tuple(plans), self.clone_bytes, cache_bytes, self.owner)


def require_launches(problem: Problem) -> None:
    """Raise InvalidInput where there is nothing to time: no elements, or no result asked for."""
    if problem.is_empty:
        raise InvalidInput(f"{problem} launches nothing: there is nothing to time")


def clone_plans(
    problem: Problem,
    config: Config,
    binary: Binary,
    *,
    stream: int = 0,
) -> Clones:
    """Clones in an arena of their own, inputs written, and a plan for each; see :func:`arena`.

    Raises:
        InvalidInput: the problem launches nothing (no elements, or no result asked for).
    """
    require_launches(problem)
    made = arena(problem, [config], binary.backend, stream=stream)
    return made.clones(config, binary)


def arena(
    problem: Problem,
    configs: Sequence[Config],
    backend: Backend,
    *,
    stream: int = 0,
) -> Arena:
    """Clones of a problem that launches something, for any of some configs.

    As many as together exceed three last-level caches; at least 2, at most 64 and 16 GiB.
    Inputs and outputs rotate, the weight with them. The workspace does not: real use, too, hands
    call after call on a stream the same one, so it is as warm here as there.
    """
    sizes: dict[str, int] = {}
    for config in configs:
        for name, size_bytes in launch.tensor_bytes(problem, config, backend.device).items():
            sizes[name] = max(size_bytes, sizes.get(name, 0))
    workspace_bytes = _aligned(sizes.pop("workspace", 0))
    offsets, clone_bytes = {}, 0
    for name, size_bytes in sizes.items():
        offsets[name] = clone_bytes
        clone_bytes += _aligned(size_bytes)
    count = clone_count(backend.device, clone_bytes)
    base, owner = backend.allocate(workspace_bytes + count * clone_bytes)
    first = base + workspace_bytes
    clones = []
    for at in range(first, first + count * clone_bytes, clone_bytes):
        tensors = {
            name: launch.dense_tensor(problem, name, at + offset)
            for name, offset in offsets.items()
        }
        if workspace_bytes:
            tensors["workspace"] = launch.Tensor(base)
        if at == first:
            check.write_inputs(problem, backend, tensors, seed=0, stream=stream)
            if "counter" in tensors:
                backend.fill(tensors["counter"].address, 0, sizes["counter"], stream)
        else:
            backend.copy(at, first, clone_bytes, stream)
        clones.append(tensors)
    return Arena(problem, backend, tuple(clones), clone_bytes, workspace_bytes, owner)


def clone_count(device: DeviceSpec, clone_bytes: int) -> int:
    """As many clones as :func:`arena` says."""
    if device.simulated:
        return MIN_CLONES  # there is no cache to exceed
    cache_bytes = ROTATED_CACHES * device.last_level_cache_bytes
    wanted = min(cache_bytes // clone_bytes + 1, BUDGET_BYTES // clone_bytes, MAX_CLONES)
    return max(MIN_CLONES, wanted)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES

"""Clones: a problem's tensors several times over, so that a call never finds its data in cache."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from rmsnorm_raw import check, launch
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.module import Binary
from rmsnorm_raw.problem import Problem

#: clones together exceed this many last-level caches; on an MI355X a working set of 1.1 caches
#: still came out too fast
ROTATED_CACHES = 3
MAX_CLONES = 64
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


def clone_plans(
    problem: Problem,
    config: Config,
    binary: Binary,
    *,
    limit: int = MAX_CLONES,
    stream: int = 0,
) -> Clones:
    """Clones in one arena, inputs written, and a plan for each.

    As many as together exceed three last-level caches; at least 2, at most ``limit`` and 16 GiB.
    Inputs and outputs rotate, the weight with them. The workspace does not: real use, too, hands
    call after call on a stream the same one, so it is as warm here as there.

    Raises:
        InvalidInput: the problem launches nothing (no elements, or no result asked for).
    """
    backend = binary.backend
    sizes = launch.tensor_bytes(problem, config, backend.device)
    if not launch.launches(problem, config, binary):
        raise InvalidInput(f"{problem} launches nothing: there is nothing to time")
    workspace_bytes = _aligned(sizes.pop("workspace", 0))
    offsets, clone_bytes = {}, 0
    for name, size_bytes in sizes.items():
        offsets[name] = clone_bytes
        clone_bytes += _aligned(size_bytes)
    cache_bytes = ROTATED_CACHES * backend.device.last_level_cache_bytes
    count = clone_count(backend.device, clone_bytes, limit)
    base, owner = backend.allocate(workspace_bytes + count * clone_bytes)
    first = base + workspace_bytes
    plans = []
    for at in range(first, first + count * clone_bytes, clone_bytes):
        tensors = {
            name: launch.Tensor(at + offset, problem.cols if name in launch.MATRICES else 0)
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
        plans.append(launch.make_plan(problem, config, binary, tensors))
    return Clones(tuple(plans), clone_bytes, cache_bytes, owner)


def clone_count(device: DeviceSpec, clone_bytes: int, limit: int = MAX_CLONES) -> int:
    """As many clones as :func:`clone_plans` says."""
    if device.simulated:
        return 2  # there is no cache to exceed
    cache_bytes = ROTATED_CACHES * device.last_level_cache_bytes
    return max(2, min(cache_bytes // clone_bytes + 1, limit, BUDGET_BYTES // clone_bytes))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES

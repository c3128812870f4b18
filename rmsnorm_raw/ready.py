"""Ready: the built kernels of one problem, found once a process and used by every call.

What does not depend on addresses is decided here: the backend, the config, the binary, the scratch
memory. Of the addresses only their alignment enters.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Literal, NamedTuple

from rmsnorm_raw import launch, module, space, store
from rmsnorm_raw.backends import Backend, get_backend
from rmsnorm_raw.backends.cupy_backend import backend_of_device
from rmsnorm_raw.config import Config
from rmsnorm_raw.dtypes import stored_bytes
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.interop import Device
from rmsnorm_raw.launch import SCRATCH, Tensor
from rmsnorm_raw.problem import OF_ROWS, Problem, require_problem
from rmsnorm_raw.source import render

#: problems, and binaries, kept by a process; a model needs a few dozen
KEPT = 1024
#: what each scratch tensor is aligned to, in bytes
SCRATCH_ALIGNMENT = 16


class Ready(NamedTuple):
    """Built kernels of one problem; the workbench passes its own, edited text and all, as config.

    Attributes:
        problem: what they compute.
        config: their knobs.
        binary: the kernels.
        scratch: (name, bytes) of the tensors that no caller sees.
    """

    problem: Problem
    config: Config
    binary: module.Binary
    scratch: tuple[tuple[str, int], ...]

    @property
    def scratch_offsets(self) -> tuple[tuple[str, int], ...]:
        """(name, offset) of these tensors in one piece of memory."""
        offsets, offset = [], 0
        for name, size_bytes in self.scratch:
            offsets.append((name, offset))
            offset += _aligned(size_bytes)
        return tuple(offsets)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of that piece."""
        return sum(_aligned(size_bytes) for _, size_bytes in self.scratch)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT


def ready(problem: Problem, config: Config, binary: module.Binary) -> Ready:
    """Built kernels, with the scratch memory that a call of them wants."""
    sizes = launch.tensor_bytes(problem, config, binary.backend.device)
    scratch = tuple((name, sizes[name]) for name in SCRATCH if name in sizes)
    return Ready(problem, config, binary, scratch)


@store.until_saved(maxsize=KEPT)
def prepare(
    problem: Problem, alignment_bytes: int, chosen: Config | Literal["ladder"] | None, where: Device
) -> Ready:
    """What calls of a problem on a device need; found once, and anew when a record is saved.

    Raises:
        InvalidConfig: the config does not fit, with the reason.
        BackendUnavailable: the device's backend cannot run here.
        CompileError: with the slug, the compiler's log and the next step.
    """
    backend = _backend(where)
    problem = replace(problem, alignment=alignment_bytes)
    config, _ = store.choose(problem, backend, chosen)
    space.require_fit(problem, backend.device, config)
    alike = replace(problem, rows=problem.extras.heads, eps=0.0)
    return ready(problem, config, _build(alike, config, where))


def workspace_bytes(
    problem: Problem,
    config: Config | str | None = None,
    *,
    backend: str | Backend | None = None,
) -> int:
    """Bytes of the ``workspace`` that calls of a problem want; 0 where they want none.

    Args:
        problem: as the call has it, with its alignment.
        config: as the call's.
        backend: "rocm", "cuda", "cpu" or a Backend; None for the one that is here.

    Raises:
        InvalidInput: no Problem was given.
        InvalidConfig: the config does not fit.
    """
    require_problem(problem)
    where = get_backend(backend) if backend is None or isinstance(backend, str) else backend
    if not problem.rows or not problem.cols:
        return 0
    knobs, _ = store.choose(problem, where, config)
    space.require_fit(problem, where.device, knobs)
    sizes = launch.tensor_bytes(problem, knobs, where.device)
    return sum(_aligned(sizes.get(name, 0)) for name in SCRATCH)


def arch_of(where: Device) -> str:
    """The architecture of a device that arrays lie on."""
    return _backend(where).device.arch


@functools.lru_cache(maxsize=KEPT)
def _build(problem: Problem, config: Config, where: Device) -> module.Binary:
    """The kernels of a problem; rows and eps do not enter them, so any will do."""
    backend = _backend(where)
    source = render(problem, config, backend.device, runtime_cols=backend.device.simulated)
    return module.build(source, backend)


@functools.cache
def _backend(device: Device) -> Backend:
    if device.kind == "cpu":
        return get_backend("cpu")
    return backend_of_device(device.kind, device.index)


def serving(built: Ready, problem: Problem, alignment_bytes: int, where: Device) -> Ready:
    """``built``, if it is for this problem, such addresses and where the arrays lie.

    Raises:
        InvalidInput: it is not.
    """
    found = replace(problem, alignment=alignment_bytes)
    alike = replace(found, alignment=built.problem.alignment) == built.problem
    if not alike or found.alignment < built.problem.alignment:
        raise InvalidInput(
            f"the kernel is built for {_what_differs(built.problem, found)}, and the arrays are of "
            f"{_what_differs(found, built.problem)}"
        )
    backend = built.binary.backend
    if (where.kind, where.index) != (backend.name, backend.index):
        here = backend.name if backend.device.simulated else f"{backend.name}:{backend.index}"
        raise InvalidInput(f"the kernel is built for {here}, and the arrays are on {where}")
    return built


def _what_differs(one: Problem, other: Problem) -> str:
    differing = []
    for mine, theirs in ((one, other), (one.extras, other.extras)):
        names = [field.name for field in fields(mine) if field.name != "extras"]
        changed = [name for name in names if getattr(mine, name) != getattr(theirs, name)]
        differing += [f"{name}={getattr(mine, name)!r}" for name in changed]
    return ", ".join(differing)


def alignment_bytes_of(problem: Problem, places: Mapping[str, Tensor]) -> int:
    """Bytes of x that a lane may move at once, by all addresses and strides.

    Elements have sizes of their own: as many of each tensor as v bytes of x hold are moved in
    pieces of at most 16 bytes, and these must be aligned. Those of a row are moved one by one.

    Args:
        problem: whose alignment is asked for.
        places: of its tensors; those that are left out are taken to be aligned.
    """
    vec = 16
    for operand in problem.operands:
        place = places.get(operand.name)
        if place is None or operand.name in OF_ROWS:
            continue
        each = stored_bytes(operand.dtype)
        bits = place.address | (place.row_stride | place.head_stride) * each
        while bits % min(16, vec // problem.element_bytes * each):
            vec //= 2
    return vec

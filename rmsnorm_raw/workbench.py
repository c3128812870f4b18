"""The workbench: what a kernel engineer drives in a REPL.

>>> p = rr.Problem.forward(32768, 8192, "bfloat16")
>>> k = rr.build(p)                       # the best config known; or rr.build(p, "b512-t256-v16")
>>> k.check()                             # the gate
>>> k.bench()                             # the gate, then the timer
>>> k2 = k.with_source(k.source.text.replace(...))
>>> rr.compare(k, k2)                     # FASTER 1.03x [1.02, 1.04]
>>> rr.build(p, device="gfx950").asm      # AMD's machine code, with no device
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar, overload

from rmsnorm_raw import (
    bandwidth,
    check,
    clones,
    ladder,
    launch,
    measure,
    module,
    ops,
    source,
    space,
    stats,
    store,
)
from rmsnorm_raw.backends import Backend, Resources, get_backend, static_gate
from rmsnorm_raw.backends.kernel_report import LaunchReport
from rmsnorm_raw.backends.offline import OfflineCode, offline_backend
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import DeviceSpec, known_device
from rmsnorm_raw.errors import BackendUnavailable, InvalidInput
from rmsnorm_raw.explanation import Explanation
from rmsnorm_raw.problem import Problem, require_problem
from rmsnorm_raw.ready import ready

K = TypeVar("K", bound="Kernel")


def default_config(problem: Problem, device: str | DeviceSpec | None = None) -> Config:
    """The ladder's config for a problem, whatever a search has found: ``config="ladder"``.

    Args:
        device: a spec, a name of :data:`rmsnorm_raw.device.KNOWN` ("gfx950"), or None for the
            device that is here.

    Raises:
        InvalidInput: no device has that name.
        InvalidConfig: nothing fits, with the reason.
    """
    require_problem(problem)
    return ladder.default_config(problem, _device(device))


def enumerate_configs(problem: Problem, device: str | DeviceSpec | None = None) -> space.Space:
    """The configs worth a search, and those refused with the reason.

    Args:
        device: as in :func:`default_config`.
    """
    require_problem(problem)
    return space.enumerate_configs(problem, _device(device))


def explain(problem: Problem, device: str | DeviceSpec | None = None) -> Explanation:
    """The space of a problem in words: what is kept, the ladder's choice, what is refused and why.

    Args:
        device: as in :func:`default_config`; records are those of the device that is here.
    """
    require_problem(problem)
    spec = _device(device)
    found, choice = space.enumerate_configs(problem, spec), ladder.default_config(problem, spec)
    used, origin = (choice, "ladder") if device else store.resolve(problem, get_backend())
    return Explanation(problem, spec, found, choice, used, origin)


@dataclass(frozen=True, slots=True, repr=False)
class Kernel:
    """A built kernel: one problem, one config, one source on one backend. :func:`build` makes it.

    Attributes:
        problem: what it computes.
        config: its knobs.
        binary: the compiled source and the backend where it lives.
        origin: where the config is from: "given", "tuned", "known best" or "ladder".
    """

    problem: Problem
    config: Config
    binary: module.Binary
    origin: str = "given"

    @property
    def source(self) -> source.Source:
        """The text, the defines and the entry points that were compiled."""
        return self.binary.source

    @property
    def resources(self) -> Mapping[str, Resources]:
        """Registers, LDS and spills by entry point, as the toolchain says them."""
        return self.binary.resources

    @property
    def asm(self) -> str:
        """The machine code, as the backend shows it: AMD's, or SASS or PTX.

        Raises:
            BackendUnavailable: on the simulator; or a tool that shows it is missing.
        """
        return self.binary.backend.assembly(self.source)

    @property
    def faults(self) -> list[str]:
        """What the static gate finds wrong with AMD's machine code; [] if nothing.

        Raises:
            BackendUnavailable: the kernel was not built with ``device=``.
        """
        raise BackendUnavailable(
            f"the static gate reads AMD's machine code, and {self!r} has none: build it with "
            "rr.build(p, device='gfx950')"
        )

    @property
    def launches(self) -> tuple[launch.Launch, ...]:
        """What a call launches, in order; the addresses are left at 0."""
        return launch.launches(self.problem, self.config, self.binary)

    def __call__(self, *arrays: Any) -> ops.Forward | ops.Backward:
        """Run this very source on arrays: k(x, w), or k(dout, x, w, rstd) for backward.

        The arrays are those of ``k.problem.inputs``, in its order: x, weight, bias, residual,
        scale; or dout, x, weight, rstd, dresidual_out. What the problem does not have is left out.
        Arrays and results are those of :func:`rmsnorm_fwd` and :func:`rmsnorm_bwd`.

        Raises:
            InvalidInput: an array is not what the kernel was built for.
        """
        p, more = self.problem, self.problem.extras
        names = [each.name for each in p.inputs]
        if len(arrays) != len(names):
            raise InvalidInput(f"{self!r} takes ({', '.join(names)}), not {len(arrays)} arrays")
        given: dict[str, Any] = dict(zip(names, arrays, strict=True))
        given |= {"eps": p.eps, "weight_offset": more.weight_offset}
        given["config"] = ready(p, self.config, self.binary)
        if p.op == "backward":
            return ops.rmsnorm_bwd(
                **given, need_dx=p.need_dx, need_dweight=p.need_dweight,
                need_dbias=more.bias_dtype is not None, bias_dtype=more.bias_dtype,
                dx_dtype=more.dx_dtype, residual_dtype=more.residual_dtype,
            )  # fmt: skip
        if more.scale == "dynamic":
            given["scale"] = "dynamic"
        if more.residual_out_dtype is None:
            given["residual_out"] = False
        return ops.rmsnorm_fwd(
            **given, store_rstd=p.store_rstd, casting=more.casting, out_dtype=more.out_dtype,
            residual_dtype=more.residual_out_dtype,
        )  # fmt: skip

    def check(self, seed: int | None = None) -> check.Verdict:
        """The correctness gate, on fresh data.

        Args:
            seed: of the data; None draws one, which the verdict names.
        """
        return check.verify(self.problem, self.config, self.binary, seed=seed)

    def bench(self, regime: measure.Regime = "cold") -> measure.Samples:
        """Device times, after the gate: a wrong kernel has no time.

        Args:
            regime: "cold" (one call on an evicted cache) or "steady" (a train of calls).

        Raises:
            WrongResult: the gate failed.
            Unmeasurable: no honest time is to be had, with the reason.
        """
        return measure.measure(self.problem, self.config, self.binary, self.check(), regime=regime)

    def with_source(self: K, text: str) -> K:
        """The same problem, config, defines and entry points with another text: the edit loop.

        Raises:
            InvalidInput: the text is the kernel's own: a replacement matched nothing.
            CompileError: with the compiler's log.
        """
        if text == self.source.text:
            raise InvalidInput("the text is the kernel's own: what was to be replaced is not in it")
        edited = replace(self.source, text=text)
        return replace(self, binary=module.build(edited, self.binary.backend))

    def __repr__(self) -> str:
        return (
            f"<Kernel {self.problem} {self.config.slug} ({self.origin}) on "
            f"{self.binary.backend.name}, source {self.source.digest[:8]}>"
        )


class OfflineKernel(Kernel):
    """A kernel for a device that is not here, by AMD's own compiler: to be read, not to be run.

    Calls, ``check`` and ``bench`` raise BackendUnavailable; ``with_source`` compiles the edited
    text for the same device.
    """

    __slots__ = ()

    def __call__(self, *arrays: Any) -> NoReturn:
        """Raises BackendUnavailable: there is no device to run on."""
        offline_backend(self.binary.backend.device.arch).refuse()

    @property
    def release(self) -> str:
        """The ROCm release of the compiler, e.g. "7.0.0"."""
        return self._code.release

    @property
    def resources(self) -> Mapping[str, LaunchReport]:
        """What the launch of each entry point takes of a CU, and what its machine code shows."""
        kernels = self._code.kernels
        return {
            it.entry_point: kernels[it.entry_point].launched(it.grid, it.block, it.lds_bytes)
            for it in self.launches
        }

    @property
    def faults(self) -> list[str]:
        """What the static gate finds wrong with the machine code; [] if nothing."""
        return static_gate.gate(self.problem, self.config, self._code)

    @property
    def asm(self) -> str:
        """The machine code, a line an instruction; those of the row loop begin with "|"."""
        return self._code.listing

    @property
    def _code(self) -> OfflineCode:
        code = self.binary.code
        assert isinstance(code, OfflineCode)
        return code


@overload
def build(
    problem: Problem,
    config: str | Config | None = None,
    *,
    device: str,
    text: str | None = None,
) -> OfflineKernel: ...
@overload
def build(
    problem: Problem,
    config: str | Config | None = None,
    *,
    backend: str | Backend | None = None,
    text: str | None = None,
) -> Kernel: ...
def build(
    problem: Problem,
    config: str | Config | None = None,
    *,
    device: str | None = None,
    backend: str | Backend | None = None,
    text: str | None = None,
) -> Kernel:
    """Render and compile a kernel.

    Args:
        config: a slug or a Config; None for the best one known (:func:`rmsnorm_raw.store.resolve`:
            tuned here, known best, or the ladder's), "ladder" for the ladder's, as it is for a
            device that is not here.
        device: "gfx950" or "gfx942", to compile for it with no device; None for the one that is
            here.
        backend: "rocm", "cuda", "cpu" or a Backend; None for the one that is here.
        text: HIP text in place of the rendered one (see :meth:`Kernel.with_source`).

    Raises:
        InvalidInput: no Problem or config was given; or no compiler here makes code for that
            device, or a backend was given too.
        InvalidConfig: the slug does not parse, or the config does not fit the problem.
        BackendUnavailable: the backend cannot run here, or AMD's compiler is not here, with what
            to install.
        CompileError: with the slug, the compiler's log and the next step.
    """
    require_problem(problem)
    if device is not None and backend is not None:
        raise InvalidInput(
            f"device {device!r} is compiled for with no device, backend {backend!r} is where "
            "kernels run: give one of the two"
        )
    where = _backend(backend) if device is None else offline_backend(device)
    if device is not None and config is None:
        config = "ladder"  # a record is of a device that was there
    knobs, origin = store.choose(problem, where, config)
    rendered = render(problem, knobs, where.device)
    if text is not None:
        rendered = replace(rendered, text=text)
    kind = Kernel if device is None else OfflineKernel
    return kind(problem, knobs, module.build(rendered, where), origin)


def render(problem: Problem, config: Config, device: DeviceSpec) -> source.Source:
    """What :func:`build` compiles; on the simulator, rows of other widths share it.

    Raises:
        InvalidConfig: the config does not fit, with the reason.
    """
    return source.render(problem, config, device, runtime_cols=device.simulated)


def compare(baseline: Kernel, candidate: Kernel) -> stats.Comparison:
    """Whether a kernel is faster than another on the same problem: both gated, cold, interleaved.

    Raises:
        InvalidInput: they compute different problems, or live on different backends; or the problem
            launches nothing.
        WrongResult: one of them fails the gate.
        Unmeasurable: they live on the simulator, whose times say nothing about speed.
    """
    backend = baseline.binary.backend
    if candidate.problem != baseline.problem or candidate.binary.backend is not backend:
        raise InvalidInput(
            f"{baseline!r} and {candidate!r} cannot be compared: build both for one problem on one "
            "backend"
        )
    if backend.device.simulated:
        raise measure.Unmeasurable("simulated times say nothing about speed: compare on a GPU")
    clones.require_launches(baseline.problem)
    kernels = (baseline, candidate)
    for kernel in kernels:
        check.require(kernel.check(), kernel.problem, kernel.config)
    # on the same memory: at 4096x4096 bf16 forward one kernel came out 4 % slower than itself on
    # memory of its own (H200, 2026-11)
    made = clones.arena(baseline.problem, [k.config for k in kernels], backend)
    calls = [made.clones(kernel.config, kernel.binary).calls() for kernel in kernels]
    before, after = measure.time_interleaved(calls, backend)
    return stats.compare(before.times_us, after.times_us)


def roofline(backend: str | Backend | None = None) -> bandwidth.Roofline:
    """The three probes of a device, measured once a process.

    Args:
        backend: as in :func:`build`.
    """
    where = _backend(backend)
    if where not in _rooflines:
        _rooflines[where] = bandwidth.roofline(where)
    return _rooflines[where]


_rooflines: dict[Backend, bandwidth.Roofline] = {}


def _backend(backend: str | Backend | None) -> Backend:
    return get_backend(backend) if backend is None or isinstance(backend, str) else backend


def _device(device: str | DeviceSpec | None) -> DeviceSpec:
    if isinstance(device, DeviceSpec):
        return device
    return get_backend().device if device is None else known_device(device)

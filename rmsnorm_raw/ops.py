"""``rmsnorm_fwd`` and ``rmsnorm_bwd``: the two operations on arrays of any library.

An array decides where it is worked on: CPU arrays in the simulator, GPU arrays on their own device,
on the current stream of x's library. Everything is checked before anything is launched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import numpy as np

from rmsnorm_raw import interop, launch
from rmsnorm_raw.config import Config
from rmsnorm_raw.dtypes import DTYPE_BYTES
from rmsnorm_raw.errors import InvalidConfig, InvalidInput
from rmsnorm_raw.interop import View
from rmsnorm_raw.launch import Tensor
from rmsnorm_raw.problem import MATRICES, Problem
from rmsnorm_raw.ready import Ready, alignment_bytes_of, prepare, serving

#: what is left of a caller's ``config`` when its slug is parsed
Chosen = Config | Ready | Literal["ladder"] | None


class Forward(NamedTuple):
    """What :func:`rmsnorm_fwd` gives: y like x; rstd float32 of x's leading shape, or None."""

    y: Any
    rstd: Any

    def __repr__(self) -> str:
        return f"Forward(y={_brief(self.y)}, rstd={_brief(self.rstd)})"


class Backward(NamedTuple):
    """What :func:`rmsnorm_bwd` gives: dx like x, dweight like weight; None if not asked for."""

    dx: Any
    dweight: Any

    def __repr__(self) -> str:
        return f"Backward(dx={_brief(self.dx)}, dweight={_brief(self.dweight)})"


def rmsnorm_fwd(
    x: Any,
    weight: Any = None,
    *,
    eps: float = 1e-6,
    store_rstd: bool = True,
    out: Any = None,
    config: Config | Ready | str | None = None,
    stream: Any = None,
) -> Forward:
    """y = x * rstd * weight with rstd = (mean(x²) + eps)^-½, over the last dimension.

    Args:
        x: (..., N), float16, bfloat16 or float32, of NumPy, torch, CuPy, JAX or any library that
            speaks DLPack. It is read in place if its last dimension is dense and the leading ones
            have one common stride; else one copy is made.
        weight: (N,), of any of the three dtypes, on x's device; its library may be another one.
        eps: finite and >= 0.
        store_rstd: also give rstd, which :func:`rmsnorm_bwd` can use.
        out: where y goes: of x's shape, dtype and device, its rows dense. It may be x itself, and
            may not share memory with x or weight in any other way.
        config: a Config or slug; None for the best one known (:func:`rmsnorm_raw.store.resolve`:
            tuned here, known best, or the ladder's), "ladder" for the ladder's.
        stream: a torch or CuPy stream, an object with ``__cuda_stream__``, or a raw handle; None
            for the current stream of x's library. Results are allocated on it. Whoever gives one
            sees to it that x is ready there.

    Returns:
        Arrays of x's library on x's device; ``y`` is ``out`` where that was given. With no rows or
        no columns nothing is launched, and rstd is eps^-½.

    Raises:
        InvalidInput: a shape, dtype, device, eps or overlap that no kernel can serve.
        InvalidConfig: a slug that does not parse, or a config that does not fit.
        BackendUnavailable: the array's backend cannot run here; the message names what to install.
    """
    chosen = _parse(config)
    call = _Call(x, stream)
    w = None if weight is None else call.weight(weight)
    target = None if out is None else call.out(out, w)
    problem = Problem.forward(
        call.rows, call.cols, call.x.dtype, weight_dtype=_dtype(w), eps=_number(eps),
        store_rstd=store_rstd,
    )  # fmt: skip
    with call.on_stream():
        y = target or call.new(call.x.shape, call.x.dtype)
        rstd = call.new(call.x.shape[:-1], "float32") if store_rstd else None
        if call.is_empty:
            _fill(rstd, rstd_of_nothing(problem.eps))
        else:
            call.run(problem, chosen, {"x": call.x, "weight": w, "y": y, "rstd": rstd})
        if target is None:
            return Forward(call.give(y), call.give(rstd))
        interop.mark_written(target)
        return Forward(out, call.give(rstd))


def rmsnorm_bwd(
    dout: Any,
    x: Any,
    weight: Any = None,
    rstd: Any = None,
    *,
    eps: float = 1e-6,
    need_dx: bool = True,
    need_dweight: bool = True,
    config: Config | Ready | str | None = None,
    stream: Any = None,
) -> Backward:
    """The gradients of :func:`rmsnorm_fwd`: with x̂ = x * rstd and g = dout * weight.

    dx = rstd * (g - x̂ * mean(g * x̂)); dweight = sum of dout * x̂ over all rows, in fp32, rounded
    once and the same bits in every run.

    Args:
        dout: of x's shape and dtype.
        x: what was normalised; see :func:`rmsnorm_fwd`.
        weight: (N,), or None as in the forward.
        rstd: float32 of x's leading shape, contiguous, from the forward; None to recompute it.
        eps: the forward's; used where rstd is None.
        need_dx: give dx.
        need_dweight: give dweight; without a weight there is none.
        config: see :func:`rmsnorm_fwd`.
        stream: see :func:`rmsnorm_fwd`.

    Returns:
        Arrays of x's library on x's device; with no rows dweight is zeros.

    Raises:
        InvalidInput: see :func:`rmsnorm_fwd`.
        InvalidConfig: see :func:`rmsnorm_fwd`.
        BackendUnavailable: see :func:`rmsnorm_fwd`.
    """
    chosen = _parse(config)
    call = _Call(x, stream)
    d = call.like_x("dout", dout)
    w = None if weight is None else call.weight(weight)
    r = None if rstd is None else call.rstd(rstd)
    problem = Problem.backward(
        call.rows, call.cols, call.x.dtype, weight_dtype=_dtype(w), eps=_number(eps),
        has_rstd=r is not None, need_dx=need_dx, need_dweight=need_dweight,
    )  # fmt: skip
    with call.on_stream():
        dx = call.new(call.x.shape, call.x.dtype) if problem.need_dx else None
        dweight = call.new((call.cols,), w.dtype) if w and problem.need_dweight else None
        if call.is_empty:
            _fill(dweight, 0.0)
        elif dx or dweight:
            tensors = {"dout": d, "x": call.x, "weight": w, "rstd": r, "dx": dx, "dweight": dweight}
            call.run(problem, chosen, tensors)
        return Backward(call.give(dx), call.give(dweight))


class _Call:
    """One call: x, the stream that the work goes to, and the other arrays as they are checked."""

    def __init__(self, x: Any, stream: Any) -> None:
        handle = None if stream is None else interop.raw_stream(stream)
        self.x = _supported("x", interop.view(x, handle))
        if not self.x.shape:
            raise InvalidInput("x has no dimensions: pass at least one, the row that is normalised")
        self.stream = interop.work_stream(self.x, handle)
        self.rows, self.cols = math.prod(self.x.shape[:-1]), self.x.shape[-1]
        self.is_empty = self.rows == 0 or self.cols == 0
        self._lenders: set[int] = set()  # streams of other libraries whose arrays joined

    def on_stream(self) -> AbstractContextManager[Any]:
        return self.x.library.on(self.x.device, self.stream)

    def new(self, shape: tuple[int, ...], dtype: str) -> View:
        library = self.x.library
        return library.view(library.empty(shape, dtype, self.x.device))

    def give(self, made: View | None) -> Any:
        return None if made is None else self.x.library.result(made.owner)

    def _join(self, name: str, array: Any) -> View:
        seen = interop.view(array, self.stream)
        if seen.device != self.x.device:
            raise InvalidInput(
                f"{name} is on {seen.device} and x on {self.x.device}: move one of them"
            )
        if seen.library.name != self.x.library.name:
            theirs = seen.library.current_stream(seen.device)
            if theirs != self.stream:
                interop.wait(seen.device, self.stream, theirs)
                self._lenders.add(theirs)
        return _supported(name, seen)

    def weight(self, array: Any) -> View:
        seen = self._join("weight", array)
        if seen.shape != (self.cols,):
            raise InvalidInput(
                f"weight has shape {seen.shape} and must have ({self.cols},), as rows of x do"
            )
        return seen

    def like_x(self, name: str, array: Any) -> View:
        seen = self._join(name, array)
        if seen.shape != self.x.shape or seen.dtype != self.x.dtype:
            raise InvalidInput(
                f"{name} is {seen.dtype} {seen.shape} and must be like x, {self.x.dtype} "
                f"{self.x.shape}"
            )
        return seen

    def rstd(self, array: Any) -> View:
        seen = self._join("rstd", array)
        leading = self.x.shape[:-1]
        if seen.shape != leading or seen.dtype != "float32":
            raise InvalidInput(
                f"rstd is {seen.dtype} {seen.shape} and must be float32 {leading}, as rmsnorm_fwd "
                "gives it; leave it out to have it recomputed"
            )
        found = interop.collapse((*leading, 1), (*seen.strides, 1))
        if found is None or (self.rows > 1 and found[2] != 1):
            raise InvalidInput("rstd is not contiguous: pass a contiguous copy of it")
        return seen

    def out(self, array: Any, weight: View | None) -> View:
        seen = self.like_x("out", array)
        if not seen.writable:
            raise InvalidInput(
                "out cannot be written: it is read-only, requires grad, or belongs to a library "
                "whose arrays never change; pass a writable NumPy, CuPy or torch array"
            )
        found = interop.collapse(seen.shape, seen.strides)
        if found is None or (found[2] == 0 and self.rows > 1):
            raise InvalidInput(
                f"out has strides {seen.strides}: its rows must be dense, evenly spaced and apart"
            )
        in_place = seen.address == self.x.address and found == _collapsed(self.x)
        if not in_place and interop.overlap(seen, self.x):
            raise InvalidInput(
                "out overlaps x without being x: y would overwrite rows not yet read"
            )
        if weight is not None and interop.overlap(seen, weight):
            raise InvalidInput("out overlaps weight: y would overwrite it; pass another out")
        return seen

    def run(self, problem: Problem, chosen: Chosen, tensors: Mapping[str, View | None]) -> None:
        """Launch a problem on checked arrays; x's stream must be current in x's library."""
        used = {name: seen for name, seen in tensors.items() if seen is not None}
        placed = {name: self._placed(name, seen) for name, seen in used.items()}
        places = {name: place for name, (place, _) in placed.items()}
        alignment_bytes = alignment_bytes_of(problem, places)
        if isinstance(chosen, Ready):
            use = serving(chosen, problem, alignment_bytes, self.x.device)
        else:
            use = prepare(problem, alignment_bytes, chosen, self.x.device)
        scratch = {name: self.new((-(-size // 4),), "float32") for name, size in use.scratch}
        places |= {name: Tensor(seen.address) for name, seen in scratch.items()}
        if "counter" in scratch:
            backend = use.binary.backend
            backend.fill(scratch["counter"].address, 0, 4, self.stream)
        plan = launch.make_plan(use.problem, use.config, use.binary, places)
        launch.run(plan, self.stream)
        # memory that other libraries lent is free for them again when this work is done
        for theirs in self._lenders:
            interop.wait(self.x.device, theirs, self.stream)

    def _placed(self, name: str, seen: View) -> tuple[Tensor, View]:
        """Where a kernel finds an array, and the view that keeps it there."""
        if name == "rstd":
            return Tensor(seen.address), seen
        found = _collapsed(seen)
        if found is None:
            with seen.library.on(seen.device, self.stream):
                seen = interop.contiguous(seen)
            found = (self.rows, self.cols, self.cols)
        return Tensor(seen.address, found[2] if name in MATRICES else 0), seen


def _collapsed(seen: View) -> tuple[int, int, int] | None:
    return interop.collapse(seen.shape, seen.strides)


def _supported(name: str, seen: View) -> View:
    if seen.dtype not in DTYPE_BYTES:
        raise InvalidInput(
            f"{name} is {seen.dtype}, which no kernel takes: convert it to float16, bfloat16 or "
            "float32 first (.astype(...), or .to(...) in torch)"
        )
    return seen


def _dtype(seen: View | None) -> str | None:
    return None if seen is None else seen.dtype


def _number(eps: Any) -> float:
    if isinstance(eps, (str, bytes, bool)):
        raise InvalidInput(f"eps is {eps!r}: pass a number >= 0")
    try:
        return float(eps)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"eps is {eps!r}: pass a number >= 0") from error


def _brief(array: Any) -> str:
    """An array of any library without its elements."""
    if array is None:
        return "None"
    library, dtype = type(array).__module__.partition(".")[0], str(array.dtype)
    return f"<{library} {dtype.rpartition('.')[2]} {tuple(array.shape)}>"


def _parse(config: Config | Ready | str | None) -> Chosen:
    if isinstance(config, str):
        return "ladder" if config == "ladder" else Config.parse(config)
    if config is None or isinstance(config, (Config, Ready)):
        return config
    raise InvalidConfig(repr(config), 'pass a slug, a Config, "ladder" or None')


def _fill(made: View | None, value: float) -> None:
    if made is not None:
        made.owner[...] = value


def rstd_of_nothing(eps: float) -> float:
    """eps^-½ in fp32, the limit of rstd for rows of no elements (mean 0); infinite for eps = 0."""
    rounded = float(np.float32(eps))
    return 1 / math.sqrt(rounded) if rounded > 0 else math.inf

"""A call on arrays: x and its stream, the other arrays as they are checked, and where results go.

Arrays join a call under the names of the tensors that they are (:attr:`.Problem.operands`).
Everything is checked before anything is allocated or launched.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np

from rmsnorm_raw import interop, launch, space, strides
from rmsnorm_raw.config import Config
from rmsnorm_raw.dtypes import DTYPE_BYTES
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.extras import LEAST_SCALE, MAX_HEAD_COLS, MAX_SHARED_HEADS, number
from rmsnorm_raw.interop import View
from rmsnorm_raw.launch import Tensor
from rmsnorm_raw.problem import IN_PLACE, MATRICES, OF_ROWS, Operand, Problem
from rmsnorm_raw.ready import SCRATCH_ALIGNMENT, Ready, alignment_bytes_of, prepare, serving

#: what is left of a caller's ``config`` when its slug is parsed
Chosen = Config | Ready | Literal["ladder"] | None
#: a caller's name of a result, where it is not the tensor's
ARGUMENT = {"y": "out", "rstd": "rstd_out", "scale": "scale_out"}
#: what makes a call write a result that it need not
ASKED_WITH = {
    "rstd": "store_rstd=True", "residual_out": "a residual or residual_dtype",
    "scale": 'scale="dynamic"', "dx": "need_dx=True",
    "dweight": "a weight and need_dweight=True", "dbias": "need_dbias=True",
    "dresidual": "need_dx=True",
}  # fmt: skip
#: numbers that float32 can divide by, and one by them
SCALES = 2.0**-126, 2.0**126


class Call:
    """One call: x, the stream that the work goes to, and the other arrays by tensor.

    Attributes:
        x: what is normalised.
        stream: the raw stream of the work.
        rows, cols: of x.
        lists: the shape of the weight and of what goes with it: (cols,), or (heads, cols).
        inputs: what is read.
        targets: what the caller gave to be written.
    """

    def __init__(self, x: Any, stream: Any) -> None:
        handle = None if stream is None else interop.raw_stream(stream)
        self.x = _supported("x", interop.view(x, handle))
        if not self.x.shape:
            raise InvalidInput("x has no dimensions: pass at least one, the row that is normalised")
        self.stream = interop.work_stream(self.x, handle)
        self.rows, self.cols = math.prod(self.x.shape[:-1]), self.x.shape[-1]
        self.is_empty = self.rows == 0 or self.cols == 0
        self.lists: tuple[int, ...] = (self.cols,)
        self.inputs: dict[str, View] = {"x": self.x}
        self.targets: dict[str, View] = {}
        self._given: dict[str, Any] = {}  # the caller's own arrays, which become results
        self._workspace: View | None = None
        self._lenders: set[int] = set()  # streams of other libraries whose arrays joined

    def on_stream(self) -> AbstractContextManager[Any]:
        """x's stream, current in x's library, which then allocates there."""
        return self.x.library.on(self.x.device, self.stream)

    def dtype(self, name: str) -> str | None:
        """The dtype of an array that joined; None where none did."""
        seen = self.inputs.get(name) or self.targets.get(name)
        return None if seen is None else seen.dtype

    # ---- joining ---------------------------------------------------------------------------------

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
        return seen

    def weight(self, array: Any) -> None:
        """A weight of (cols,), or (heads, cols) for x of (..., heads, cols)."""
        if array is None:
            return
        seen = _supported("weight", self._join("weight", array))
        per_head = len(seen.shape) == 2 and seen.shape == self.x.shape[-2:]
        if not per_head and seen.shape != (self.cols,):
            heads = f", or {self.x.shape[-2:]}, one for each head" * (len(seen.shape) == 2)
            raise InvalidInput(
                f"weight has shape {seen.shape} and must have ({self.cols},), as rows of x "
                f"do{heads}"
            )
        self.lists, self.inputs["weight"] = seen.shape, seen

    def bias(self, array: Any) -> None:
        """A bias of the weight's shape, (cols,) without one; the weight joins first."""
        if array is None:
            return
        seen = _supported("bias", self._join("bias", array))
        if seen.shape != self.lists:
            like = "the weight does" if "weight" in self.inputs else "rows of x do"
            raise InvalidInput(f"bias has shape {seen.shape} and must have {self.lists}, as {like}")
        self.inputs["bias"] = seen

    def like_x(self, name: str, array: Any) -> None:
        """An input of x's shape, in any of the three dtypes."""
        seen = _supported(name, self._join(name, array))
        if seen.shape != self.x.shape:
            raise InvalidInput(
                f"{name} is {seen.dtype} {seen.shape} and must be like x, {self.x.shape}"
            )
        self.inputs[name] = seen

    def rstd(self, array: Any) -> None:
        """What the forward made of x."""
        if array is None:
            return
        seen = self._join("rstd", array)
        leading = self.x.shape[:-1]
        if seen.shape != leading or seen.dtype != "float32":
            raise InvalidInput(
                f"rstd is {seen.dtype} {seen.shape} and must be float32 {leading}, as rmsnorm_fwd "
                "gives it; leave it out to have it recomputed"
            )
        if not strides.is_contiguous(seen.shape, seen.strides):
            raise InvalidInput("rstd is not contiguous: pass a contiguous copy of it")
        self.inputs["rstd"] = seen

    def scale(self, given: Any) -> None:
        """The one scale that y is divided by: a number, or an array of one float32."""
        if isinstance(given, numbers.Real):
            if isinstance(given, bool) or not SCALES[0] <= number("scale", given) <= SCALES[1]:
                raise InvalidInput(
                    f"scale is {given!r}: y is divided by it, so it is a number from "
                    f"{SCALES[0]:.3g} to {SCALES[1]:.3g}"
                )
            with self.on_stream():
                seen = self.new((1,), "float32")
                seen.owner[...] = given
        else:
            seen = self._join("scale", given)
            if math.prod(seen.shape) != 1 or seen.dtype != "float32":
                raise InvalidInput(
                    f"scale is {seen.dtype} {seen.shape}: pass 'dynamic', a number, or an array of "
                    "one float32"
                )
        self.inputs["scale"] = seen

    def target(self, name: str, array: Any) -> None:
        """Where a result goes; checked by :meth:`compute`."""
        if array is not None:
            self.targets[name] = self._join(ARGUMENT.get(name, name), array)
            self._given[name] = array

    def workspace(self, array: Any) -> None:
        """Scratch memory of the caller's."""
        if array is None:
            return
        seen = self._workspace = self._join("workspace", array)
        contiguous = strides.is_contiguous(seen.shape, seen.strides)
        if not (seen.writable and contiguous) or seen.address % SCRATCH_ALIGNMENT:
            raise InvalidInput(
                f"workspace is not contiguous, not writable or not aligned to {SCRATCH_ALIGNMENT} "
                "bytes: pass an array as your library allocates it"
            )

    # ---- the problem -----------------------------------------------------------------------------

    def heads(self, chosen: Chosen) -> tuple[int, bool]:
        """(heads, per_head) of the problem: by the weight, else by where the rows lie.

        Args:
            chosen: a kernel that is built decides itself, and a config for one head wants one.
        """
        if self.is_empty:
            return 1, False
        if len(self.lists) == 2 and self.lists[0] > 1:
            return self.lists[0], True
        if isinstance(chosen, Ready):
            return chosen.problem.extras.heads, False
        if isinstance(chosen, Config) and space.one_head_reason(chosen):
            return 1, False
        matrices = [seen for name, seen in self.inputs.items() if name in MATRICES]
        written = [seen for name, seen in self.targets.items() if name in MATRICES]
        odd = [s for s in (*matrices, *written) if strides.collapse(s.shape, s.strides) is None]
        if not odd or self.cols > MAX_HEAD_COLS:
            return 1, False

        def cost(heads: int) -> tuple[int, int, int]:
            """Results that cannot be written, copies to be made, heads."""
            unfit = [
                sum(strides.rows_in_place(s.shape, s.strides, heads) is None for s in some)
                for some in (written, matrices)
            ]
            return unfit[0], unfit[1], heads

        choices = {strides.heads_of(seen.shape, seen.strides) for seen in odd}
        return min({1} | {n for n in choices if n <= MAX_SHARED_HEADS}, key=cost), False

    def _require_targets(self, problem: Problem) -> None:
        """Raise InvalidInput where a given target cannot take its result."""
        if not self.targets:
            return
        written = {each.name: each for each in problem.outputs}
        for name, seen in self.targets.items():
            argument = ARGUMENT.get(name, name)
            if name not in written:
                raise InvalidInput(
                    f"{argument} is given, and {problem} writes no such thing: leave "
                    f"{argument} out, or ask for it with {ASKED_WITH[name]}"
                )
            shape, dtype = self._shape(written[name]), written[name].dtype
            if seen.shape != shape or seen.dtype not in (dtype, seen.library.stored_as(dtype)):
                raise InvalidInput(
                    f"{argument} is {seen.dtype} {seen.shape} and must be {dtype} {shape}"
                )
            if not seen.writable:
                raise InvalidInput(
                    f"{argument} cannot be written: it is read-only, requires grad, or belongs to "
                    "a library whose arrays never change; pass a writable NumPy, CuPy or torch "
                    "array"
                )
            if not self.is_empty:
                self._require_layout(argument, written[name], seen, problem.extras.heads)

    def _require_layout(self, argument: str, operand: Operand, seen: View, heads: int) -> None:
        if not operand.is_matrix:
            if not strides.is_contiguous(seen.shape, seen.strides):
                raise InvalidInput(f"{argument} is not contiguous: pass an array that is")
            return
        found = strides.rows_in_place(seen.shape, seen.strides, heads)
        if found is None or not strides.rows_are_apart(seen.shape, *found, heads):
            raise InvalidInput(
                f"{argument} has strides {seen.strides}: its rows must be dense, evenly spaced and "
                "apart"
            )

    def _require_apart(self) -> None:
        """Raise InvalidInput where what is written overlaps another array, but for IN_PLACE."""
        written = dict(self.targets)
        if self._workspace is not None:
            written = {"workspace": self._workspace} | written
        others = dict(self.inputs)
        for name, seen in written.items():
            argument = ARGUMENT.get(name, name)
            for other, read in others.items():
                in_place = IN_PLACE.get(name) == other and _is_same(seen, read)
                if not in_place and interop.overlap(seen, read):
                    raise InvalidInput(
                        f"{argument} overlaps {other}, which it would overwrite: pass another "
                        f"{argument}; in place are residual_out over the residual, and out over x, "
                        "each the very same array, and nothing else of it read or written"
                    )
            others[argument] = seen

    # ---- results ---------------------------------------------------------------------------------

    def new(self, shape: tuple[int, ...], dtype: str) -> View:
        """A fresh array of x's library."""
        library = self.x.library
        return library.view(library.empty(shape, dtype, self.x.device))

    def _shape(self, operand: Operand) -> tuple[int, ...]:
        if operand.is_matrix:
            return self.x.shape
        return self.x.shape[:-1] if operand.name in OF_ROWS else self.lists

    def compute(self, problem: Problem, chosen: Chosen) -> dict[str, Any]:
        """Launch a problem on the arrays that joined.

        Returns:
            The results by tensor, in the caller's library; the targets themselves where given.
        """
        self._require_targets(problem)
        self._require_apart()
        with self.on_stream():
            made = {
                each.name: self.targets.get(each.name) or self.new(self._shape(each), each.dtype)
                for each in problem.outputs
            }
            if self.is_empty:
                of_nothing = {
                    "rstd": rstd_of_nothing(problem.eps), "scale": LEAST_SCALE, "dweight": 0,
                    "dbias": 0,
                }  # fmt: skip
                for name in made.keys() & of_nothing:
                    made[name].owner[...] = of_nothing[name]
            elif made:
                self._run(problem, chosen, self.inputs | made)
            for seen in self.targets.values():
                interop.mark_written(seen)
            return {
                name: self._given[name]
                if name in self._given
                else self.x.library.result(seen.owner)
                for name, seen in made.items()
            }

    def _run(self, problem: Problem, chosen: Chosen, arrays: Mapping[str, View]) -> None:
        """Launch on checked arrays; x's stream must be current in x's library."""
        heads = problem.extras.heads
        placed = {name: self._placed(name, seen, heads) for name, seen in arrays.items()}
        places = {name: place for name, (place, _) in placed.items()}
        alignment_bytes = alignment_bytes_of(problem, places)
        if isinstance(chosen, Ready):
            use = serving(chosen, problem, alignment_bytes, self.x.device)
        else:
            use = prepare(problem, alignment_bytes, chosen, self.x.device)
        scratch = self._scratch(use)
        places |= {name: Tensor(address) for name, (address, _) in scratch.items()}
        if "counter" in scratch:
            use.binary.backend.fill(places["counter"].address, 0, 4, self.stream)
        plan = launch.make_plan(use.problem, use.config, use.binary, places)
        launch.run(plan, self.stream)
        # memory that other libraries lent is free for them again when this work is done
        for theirs in self._lenders:
            interop.wait(self.x.device, theirs, self.stream)

    def _scratch(self, use: Ready) -> dict[str, tuple[int, View]]:
        """The addresses of the tensors that no caller sees, and what keeps them."""
        found: dict[str, tuple[int, View]] = {}
        if self._workspace is None:
            for name, size_bytes in use.scratch:
                seen = self.new((-(-size_bytes // 4),), "float32")
                found[name] = seen.address, seen
            return found
        seen = self._workspace
        size_bytes = math.prod(seen.shape) * seen.element_bytes
        if size_bytes < use.scratch_bytes:
            raise InvalidInput(
                f"workspace has {size_bytes} bytes, and {use.problem} with {use.config.slug} wants "
                f"{use.scratch_bytes} (rr.workspace_bytes)"
            )
        for name, offset in use.scratch_offsets:
            found[name] = seen.address + offset, seen
        return found

    def _placed(self, name: str, seen: View, heads: int) -> tuple[Tensor, View]:
        """Where a kernel finds an array, and the view that keeps it there."""
        if name in MATRICES:
            found = strides.rows_in_place(seen.shape, seen.strides, heads)
            if found is None:
                seen = self._copied(seen)
                found = heads * self.cols, self.cols if heads > 1 else 0
            return Tensor(seen.address, *found), seen
        if not strides.is_contiguous(seen.shape, seen.strides):
            seen = self._copied(seen)
        return Tensor(seen.address), seen

    def _copied(self, seen: View) -> View:
        with seen.library.on(seen.device, self.stream):
            return interop.contiguous(seen)


def _is_same(one: View, other: View) -> bool:
    """Whether two views are of the same elements in the same order."""
    alike = one.address == other.address and one.dtype == other.dtype
    steps = zip(one.shape, one.strides, other.strides, strict=True)
    return alike and all(size == 1 or mine == theirs for size, mine, theirs in steps)


def _supported(name: str, seen: View) -> View:
    if seen.dtype not in DTYPE_BYTES:
        raise InvalidInput(
            f"{name} is {seen.dtype}, which no kernel takes: convert it to float16, bfloat16 or "
            "float32 first (.astype(...), or .to(...) in torch)"
        )
    return seen


def rstd_of_nothing(eps: float) -> float:
    """eps^-½ in fp32, the limit of rstd for rows of no elements (mean 0); infinite for eps = 0."""
    rounded = float(np.float32(eps))
    return 1 / math.sqrt(rounded) if rounded > 0 else math.inf

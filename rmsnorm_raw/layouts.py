"""What a call on torch tensors of one layout needs, found once and looked up from then on.

Keys are what torch says of a tensor: (shape, dtype, device), its kind, and with strides its layout;
True stands for the strides of a contiguous tensor, and costs a call less. Addresses enter by their
alignment alone. The config comes from :func:`rmsnorm_raw.ready.prepare`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rmsnorm_raw import launch, ready, store
from rmsnorm_raw.backends.prepared import PreparedLaunch
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.interop import collapse, torch_device
from rmsnorm_raw.launch import Tensor
from rmsnorm_raw.problem import Problem

#: layouts whose launches are kept, those used last
KEPT = 1024

Kind = tuple[Any, ...]


class Prepared(NamedTuple):
    """What a layout needs.

    Attributes:
        shape: x's, and that of the result that is like x.
        strides: of that result, which is contiguous.
        launches: in order; none where there are no elements.
        workspace: elements of fp32 scratch memory.
        counter: whether a word is wanted that is 0 at first.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    launches: tuple[PreparedLaunch, ...] = ()
    workspace: int = 0
    counter: bool = False


@store.until_saved(maxsize=KEPT)
def forward(
    x: Kind, weight: Kind | None, low: int, weight_low: int, eps: float, store_rstd: bool
) -> Prepared | None:
    """The forward's launches; None where x must be copied first.

    Args:
        x: its layout.
        weight: its kind; it is contiguous, and so are the results.
        low: x's address modulo 16.
        weight_low: the weight's.
        eps: finite and >= 0.
        store_rstd: whether there is an rstd to write.

    Raises:
        InvalidInput: what no kernel can serve.
        BackendUnavailable: CuPy is missing, or does not fit the device.
    """
    require_fit(x, weight)
    if (found := collapse(x[0], _strides(x))) is None:
        return None
    rows, cols, row_stride = found
    problem = Problem.forward(
        rows, cols, str(_dtype(x)), weight_dtype=_dtype(weight), eps=eps, store_rstd=store_rstd
    )
    places = {"x": Tensor(low, row_stride), "weight": Tensor(weight_low), "y": Tensor(0, cols)}
    return _prepare(problem, x, places)


@store.until_saved(maxsize=KEPT)
def backward(
    dout: Kind, x: Kind, weight: Kind | None, rstd: Kind, low: int, weight_low: int, need_dx: bool,
    need_dweight: bool,
) -> Prepared | None:  # fmt: skip
    """The backward's launches; None where x and dout must be copied first.

    Args:
        dout: its layout.
        x: its layout.
        weight: its kind.
        rstd: its kind; it is contiguous too.
        low: the addresses of x and dout, or'ed, modulo 16.
        weight_low: the weight's.
        need_dx: whether there is a dx to write.
        need_dweight: whether there is a dweight.

    Raises:
        InvalidInput: what no kernel can serve.
        BackendUnavailable: CuPy is missing, or does not fit the device.
    """
    require_fit(x, weight)
    require_like(x, dout, rstd)
    found, of_dout = (collapse(x[0], _strides(layout)) for layout in (x, dout))
    if found is None or of_dout is None:
        return None
    rows, cols, row_stride = found
    problem = Problem.backward(
        rows, cols, str(_dtype(x)), weight_dtype=_dtype(weight), need_dx=need_dx,
        need_dweight=need_dweight,
    )  # fmt: skip
    places = {
        "dout": Tensor(low, of_dout[2]), "x": Tensor(low, row_stride),
        "weight": Tensor(weight_low), "dx": Tensor(0, cols),
    }  # fmt: skip
    return _prepare(problem, x, places)


def _prepare(problem: Problem, x: Kind, places: Mapping[str, Tensor]) -> Prepared:
    result = tuple(x[0]), _contiguous(x[0])
    if not problem.rows or not problem.cols:
        return Prepared(*result)
    alignment_bytes = ready.alignment_bytes_of(problem, places)
    built = ready.prepare(problem, alignment_bytes, None, torch_device(x[2]))
    sizes = launch.tensor_bytes(built.problem, built.config, built.binary.backend.device)
    row_strides = {name: places[name].row_stride if name in places else 0 for name in sizes}
    launches = launch.prepare(built.problem, built.config, built.binary, row_strides)
    return Prepared(*result, launches, -(-sizes.get("workspace", 0) // 4), "counter" in sizes)


def _strides(layout: Kind) -> tuple[int, ...]:
    shape, *_, strides = layout
    return _contiguous(shape) if strides is True else strides


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that torch gives a new tensor."""
    sizes = [max(size, 1) for size in shape]
    return tuple(math.prod(sizes[at:]) for at in range(1, len(sizes) + 1))


def require_fit(x: Kind, weight: Kind | None) -> None:
    """Raise InvalidInput unless a weight's shape and device are those of x's rows."""
    shape, _, device, *_ = x
    if not shape:
        raise InvalidInput("x has no dimensions: pass at least one, the row that is normalised")
    if weight is None:
        return
    if weight[0] != shape[-1:]:
        raise InvalidInput(
            f"weight has shape {tuple(weight[0])}, and x, {tuple(shape)}, does not end with it"
        )
    if weight[2] != device:
        raise InvalidInput(f"weight is on {weight[2]} and x on {device}: move one of them")


def require_eps(eps: float) -> None:
    """Raise InvalidInput unless eps is finite and >= 0."""
    Problem.forward(1, 1, "float32", eps=eps)


def require_like(x: Kind, dout: Kind, rstd: Kind) -> None:
    """Raise InvalidInput unless dout is like x, and rstd what the forward makes of x."""
    shape, dtype, device, *_ = x
    if dout[:3] != (shape, dtype, device):
        raise InvalidInput(f"dout is {_text(dout)} and must be like x, {_text(x)}")
    wide = "float64" if _dtype(x) == "float64" else "float32"
    if (rstd[0], _dtype(rstd), rstd[2]) != (shape[:-1], wide, device):
        raise InvalidInput(
            f"rstd is {_text(rstd)} and must be {wide} {tuple(shape[:-1])}, as the forward gives it"
        )


def _text(kind: Kind) -> str:
    return f"{_dtype(kind)} {tuple(kind[0])} on {kind[2]}"


def _dtype(kind: Kind | None) -> str | None:
    return None if kind is None else str(kind[1]).removeprefix("torch.")

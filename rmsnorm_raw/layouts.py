"""What a call on torch tensors of one layout needs, found once and looked up from then on.

Keys are what torch says of a tensor: (shape, dtype, device), its kind, and with strides its layout;
True stands for the strides of a contiguous tensor, and costs a call less. Addresses enter by their
alignment alone. The config comes from :func:`rmsnorm_raw.ready.prepare`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rmsnorm_raw import launch, ready, store
from rmsnorm_raw.backends.prepared import PreparedLaunch
from rmsnorm_raw.dtypes import optional_dtype_name
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.extras import MAX_HEAD_COLS, MAX_SHARED_HEADS, Casting, Scale
from rmsnorm_raw.interop import torch_device
from rmsnorm_raw.launch import Tensor, dense_tensor
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.strides import rows_in_place

#: layouts whose launches are kept, those used last
KEPT = 1024

Kind = tuple[Any, ...]


class Prepared(NamedTuple):
    """What a layout needs.

    Attributes:
        shape: of a result that is like x.
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
    shape, _, _, strides = x
    if (found := collapse_all(shape, (strides,))) is None:
        return None
    rows, heads, (of_x,) = found
    problem = Problem.forward(
        rows, shape[-1], str(_dtype(x)), weight_dtype=_dtype(weight), eps=eps,
        store_rstd=store_rstd, heads=heads,
    )  # fmt: skip
    places = {
        "x": Tensor(low, *of_x), "weight": Tensor(weight_low), "y": dense_tensor(problem, "y", 0),
    }  # fmt: skip
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
    shape, _, _, strides = x
    require_like(x, dout, rstd)
    if (found := collapse_all(shape, (dout[3], strides))) is None:
        return None
    rows, heads, (of_dout, of_x) = found
    problem = Problem.backward(
        rows, shape[-1], str(_dtype(x)), weight_dtype=_dtype(weight), need_dx=need_dx,
        need_dweight=need_dweight, heads=heads,
    )  # fmt: skip
    places = {
        "dout": Tensor(low, *of_dout), "x": Tensor(low, *of_x), "weight": Tensor(weight_low),
        "dx": dense_tensor(problem, "dx", 0),
    }  # fmt: skip
    return _prepare(problem, x, places)


class Whole(NamedTuple):
    """What of a call beyond the plain one is no tensor; dtypes are torch's.

    Attributes:
        eps: finite and >= 0.
        weight_offset: see :class:`rmsnorm_raw.extras.Extras`, and so for casting.
        casting: "none", "llama" or "gemma".
        per_head: the weight and the bias are (H, N), and x is (..., H, N).
        out_dtype: of y; None for x's.
        residual_out_dtype: None where it is not to be written.
        scale: "none", "static" or "dynamic".
    """

    eps: float
    weight_offset: float = 0.0
    casting: Casting = "none"
    per_head: bool = False
    out_dtype: Any = None
    residual_out_dtype: Any = None
    scale: Scale = "none"


@store.until_saved(maxsize=KEPT)
def whole_forward(
    x: Kind, weight: Kind | None, bias: Kind | None, residual: Kind | None,
    lows: tuple[int, int, int, int], more: Whole, store_rstd: bool, in_place: bool = False,
) -> Prepared | None:  # fmt: skip
    """The launches of a forward with extras; None where x and the residual must be copied first.

    Args:
        x: its layout.
        weight: its kind, contiguous.
        bias: its kind, contiguous.
        residual: its layout.
        lows: the addresses of the four modulo 16.
        more: all else.
        store_rstd: whether there is an rstd to write.
        in_place: residual_out is the residual itself.

    Raises:
        InvalidInput: what no kernel can serve.
        BackendUnavailable: CuPy is missing, or does not fit the device.
    """
    require_whole(x, weight, bias, residual, more)
    shape, _, _, strides = x
    matrices = (strides,) if residual is None else (strides, residual[3])
    per_head = more.per_head and shape[-2] > 1
    if (found := collapse_all(shape, matrices, per_head)) is None:
        return None
    rows, heads, (of_x, *of_residual) = found
    problem = Problem.forward(
        rows, shape[-1], str(_dtype(x)), weight_dtype=_dtype(weight), eps=more.eps,
        store_rstd=store_rstd, bias_dtype=_dtype(bias), residual_dtype=_dtype(residual),
        residual_out_dtype=more.residual_out_dtype, out_dtype=more.out_dtype,
        weight_offset=more.weight_offset, casting=more.casting, heads=heads,
        per_head=per_head and heads > 1, scale=more.scale,
    )  # fmt: skip
    low, weight_low, bias_low, residual_low = lows
    places = {"x": Tensor(low, *of_x), "weight": Tensor(weight_low), "bias": Tensor(bias_low)}
    if residual is not None:
        places["residual"] = Tensor(residual_low, *of_residual[0])
        if in_place:
            places["residual_out"] = places["residual"]
    return _prepare(problem, x, places)


@store.until_saved(maxsize=KEPT)
def whole_backward(
    dout: Kind, h: Kind, weight: Kind | None, dresidual_out: Kind | None, rstd: Kind,
    lows: tuple[int, int, int, int], weight_offset: float, per_head: bool, need_dweight: bool,
    dx_dtype: Any, dresidual_dtype: Any, dbias_dtype: Any,
) -> Prepared | None:  # fmt: skip
    """The launches of a backward with extras; None where its matrices must be copied first.

    Args:
        dout: its layout.
        h: that of what was normalised.
        weight: its kind, contiguous.
        dresidual_out: its layout; None for none, and where there is no dx.
        rstd: its kind, contiguous.
        lows: the addresses of dout, h, the weight and dresidual_out modulo 16.
        weight_offset: the forward's.
        per_head: the forward's.
        need_dweight: whether there is a dweight to write.
        dx_dtype: of dx; None for no dx.
        dresidual_dtype: of dx once more; None for no dresidual.
        dbias_dtype: of dbias; None for no dbias.

    Raises:
        InvalidInput: what no kernel can serve.
        BackendUnavailable: CuPy is missing, or does not fit the device.
    """
    shape, _, _, strides = h
    matrices = [dout[3], strides] + ([] if dresidual_out is None else [dresidual_out[3]])
    per_head = per_head and shape[-2] > 1
    if (found := collapse_all(shape, matrices, per_head)) is None:
        return None
    rows, heads, (of_dout, of_h, *of_dresidual_out) = found
    problem = Problem.backward(
        rows, shape[-1], str(_dtype(h)), weight_dtype=_dtype(weight), need_dx=dx_dtype is not None,
        need_dweight=need_dweight, bias_dtype=dbias_dtype, residual_dtype=dresidual_dtype,
        dresidual_out_dtype=_dtype(dresidual_out), out_dtype=_dtype(dout), dx_dtype=dx_dtype,
        weight_offset=weight_offset, heads=heads, per_head=per_head and heads > 1,
    )  # fmt: skip
    dout_low, low, weight_low, dresidual_out_low = lows
    places = {
        "dout": Tensor(dout_low, *of_dout), "x": Tensor(low, *of_h), "weight": Tensor(weight_low),
    }  # fmt: skip
    if dresidual_out is not None:
        places["dresidual_out"] = Tensor(dresidual_out_low, *of_dresidual_out[0])
    return _prepare(problem, h, places)


def collapse_all(
    shape: tuple[int, ...], matrices: Sequence[Any], per_head: bool = False
) -> tuple[int, int, list[tuple[int, int]]] | None:
    """(rows, heads, (token stride, head stride) of each matrix); None where one must be copied.

    The leading dimensions are seen as one of evenly spaced rows, with heads 1 and a head stride of
    0, else as two: evenly spaced tokens, of evenly spaced heads.

    Args:
        shape: of all the matrices.
        matrices: their strides; True for those of a contiguous tensor.
        per_head: the heads are those of the last leading dimension.
    """
    leading, cols, rows = len(shape) - 1, shape[-1], math.prod(shape[:-1])
    if not rows or not cols:  # and torch calls any strides of it contiguous
        return rows, 1, [(cols, 0)] * len(matrices)
    matrices = [_contiguous(shape) if strides is True else strides for strides in matrices]
    splits = [leading - 1] if per_head else range(leading, 0, -1) or [0]
    for split in splits:
        heads = math.prod(shape[split:-1])
        shared = heads > 1 and not per_head
        if shared and (heads > MAX_SHARED_HEADS or cols > MAX_HEAD_COLS):
            continue
        found = [rows_in_place(shape, strides, heads) for strides in matrices]
        if None not in found:
            return rows, heads, [place for place in found if place]
    return None


def _prepare(problem: Problem, x: Kind, given: Mapping[str, Tensor]) -> Prepared:
    """The launches of a problem; tensors that are not given are contiguous, and aligned."""
    result = tuple(x[0]), _contiguous(x[0])
    if not problem.rows or not problem.cols:
        return Prepared(*result)
    places = {
        name: given.get(name, dense_tensor(problem, name, 0))
        for name in (operand.name for operand in problem.operands)
    }
    alignment_bytes = ready.alignment_bytes_of(problem, places)
    built = ready.prepare(problem, alignment_bytes, None, torch_device(x[2]))
    sizes = launch.tensor_bytes(built.problem, built.config, built.binary.backend.device)
    tensors = {name: places.get(name, Tensor(0)) for name in sizes}
    launches = launch.prepare(built.problem, built.config, built.binary, tensors)
    return Prepared(*result, launches, -(-sizes.get("workspace", 0) // 4), "counter" in sizes)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that torch gives a new tensor."""
    sizes = [max(size, 1) for size in shape]
    return tuple(math.prod(sizes[at:]) for at in range(1, len(sizes) + 1))


def require_fit(x: Kind, weight: Kind | None, name: str = "weight", dims: int = 1) -> None:
    """Raise InvalidInput unless a weight's shape and device are those of x's last dimensions."""
    shape, _, device, *_ = x
    if not shape:
        raise InvalidInput("x has no dimensions: pass at least one, the row that is normalised")
    if weight is None:
        return
    if len(weight[0]) != dims or weight[0] != shape[-dims:]:
        raise InvalidInput(
            f"{name} has shape {tuple(weight[0])}, and x, {tuple(shape)}, does not end with it"
        )
    if weight[2] != device:
        raise InvalidInput(f"{name} is on {weight[2]} and x on {device}: move one of them")


def require_whole(
    x: Kind, weight: Kind | None, bias: Kind | None, residual: Kind | None, more: Whole
) -> None:
    """Raise InvalidInput unless the tensors of a forward fit x, and all else goes together."""
    if more.per_head and len(x[0]) < 2:
        raise InvalidInput(f"x has shape {tuple(x[0])}, and with per_head it is (..., H, N)")
    for name, kind in (("weight", weight), ("bias", bias)):
        require_fit(x, kind, name, 1 + more.per_head)
    if residual is not None and (residual[0], residual[2]) != (x[0], x[2]):
        raise InvalidInput(f"residual is {_text(residual)} and must be of x's shape, {_text(x)}")
    if _dtype(x) == "float64":  # for the formula alone
        if {str(d) for d in (residual and residual[1], more.residual_out_dtype) if d} - {str(x[1])}:
            raise InvalidInput("x is float64: so must be the residual, and residual_dtype")
        is_wide = str(more.out_dtype) == str(x[1])
        more = more._replace(out_dtype=None if is_wide else more.out_dtype, residual_out_dtype=None)
    else:
        for kind in (weight, bias, residual):
            optional_dtype_name(_dtype(kind))
    _require_together(more, weight is None)


@functools.lru_cache(maxsize=KEPT)
def _require_together(more: Whole, unweighted: bool) -> None:
    heads = 1 + more.per_head
    Problem.forward(
        heads, 1, "float32", weight_dtype=None if unweighted else "same", eps=more.eps,
        residual_out_dtype=more.residual_out_dtype, out_dtype=more.out_dtype,
        weight_offset=more.weight_offset, casting=more.casting, heads=heads,
        per_head=more.per_head, scale=more.scale,
    )  # fmt: skip


def require_eps(eps: float) -> None:
    """Raise InvalidInput unless eps is finite and >= 0."""
    Problem.forward(1, 1, "float32", eps=eps)


def require_like(
    x: Kind, dout: Kind, rstd: Kind, out_dtype: Any = None, dresidual_out: Kind | None = None
) -> None:
    """Raise InvalidInput unless gradients are like x, and rstd what the forward makes of x.

    Args:
        x: its kind or layout.
        dout: likewise; of x's dtype, or ``out_dtype``.
        rstd: likewise.
        out_dtype: None for x's.
        dresidual_out: of x's shape and device.
    """
    shape, dtype, device, *_ = x
    if dout[:3] != (shape, out_dtype or dtype, device):
        raise InvalidInput(f"dout is {_text(dout)} and must be like x, {_text(x)}")
    if dresidual_out is not None and (dresidual_out[0], dresidual_out[2]) != (shape, device):
        raise InvalidInput(
            f"dresidual_out is {_text(dresidual_out)} and must be of x's shape, {_text(x)}"
        )
    wide = "float64" if _dtype(x) == "float64" else "float32"
    if (rstd[0], _dtype(rstd), rstd[2]) != (shape[:-1], wide, device):
        raise InvalidInput(
            f"rstd is {_text(rstd)} and must be {wide} {tuple(shape[:-1])}, as the forward gives it"
        )


def _text(kind: Kind) -> str:
    return f"{_dtype(kind)} {tuple(kind[0])} on {kind[2]}"


def _dtype(kind: Kind | None) -> str | None:
    return None if kind is None else str(kind[1]).removeprefix("torch.")

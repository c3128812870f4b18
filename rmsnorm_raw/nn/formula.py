"""The plain formula in torch's operations: for tensors on a CPU, and for what kernels cannot do.

It computes in float32, in float64 for a float64 x, and rounds once. Torch can differentiate it, as
often as one likes and in forward mode. The results of both directions have the kernels' order.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from rmsnorm_raw.dtypes import LARGEST_FP8
from rmsnorm_raw.extras import LEAST_SCALE


def wide_dtype(tensor: Any) -> Any:
    """The dtype that is computed in."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def wide(tensor: Any) -> Any:
    """The tensor in that dtype."""
    return tensor.to(wide_dtype(tensor))


def rstd_of(h: Any, eps: float) -> Any:
    """(mean(h²) + eps)^-½ of each row."""
    return torch.rsqrt(wide(h).square().mean(-1) + eps)


def forward(
    x: Any, weight: Any, eps: float, *, bias: Any = None, residual: Any = None, scale: Any = None,
    weight_offset: float = 0.0, casting: str = "none", out_dtype: Any = None,
    residual_out_dtype: Any = None,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """(y, rstd, residual_out, scale of each row); the last two None where not asked for.

    Args:
        x: (..., N).
        weight: (N,), or (H, N) of an x (..., H, N); None for 1.
        eps: added to the mean square.
        bias: like the weight.
        residual: like x, in its own dtype.
        scale: what y is divided by: one number, or "dynamic" for one of each row.
        weight_offset: added to the weight.
        casting: "llama": h * rstd is rounded to x's dtype.
        out_dtype: None for x's.
        residual_out_dtype: None for no residual_out.
    """
    h = wide(x) if residual is None else wide(x) + wide(residual)
    rstd = rstd_of(h, eps)
    y = h * rstd.unsqueeze(-1)
    if casting == "llama":
        y = wide(y.to(x.dtype))
    if weight is not None:
        y = y * (weight_offset + wide(weight) if weight_offset else wide(weight))
    if bias is not None:
        y = y + wide(bias)
    scales = None
    if scale is not None:
        largest = LARGEST_FP8[str(out_dtype).removeprefix("torch.")]
        if isinstance(scale, str):
            sizes = y.abs().nan_to_num(0.0, posinf=math.inf)  # as a kernel's maxima pass over NaN
            most = sizes.amax(-1) if y.shape[-1] else y.new_zeros(y.shape[:-1])
            scales = (most.float() / largest).clamp(min=LEAST_SCALE)
            y = y / scales.unsqueeze(-1)
        else:
            y = y / scale.reshape(())
        y = y.clamp(-largest, largest)  # torch's own cast gives NaN for what is larger
    residual_out = None
    if residual_out_dtype is not None:  # never x itself
        residual_out = h.to(residual_out_dtype, copy=h is x).contiguous()
    y = y.to(out_dtype or x.dtype)
    return y.contiguous(), rstd.contiguous(), residual_out, scales


def backward(
    dout: Any, h: Any, weight: Any, rstd: Any, dresidual_out: Any, weight_offset: float,
    per_head: bool, need_dweight: bool, dx_dtype: Any, dresidual_dtype: Any, dbias_dtype: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """(dx, dweight, dbias, dresidual), None where not needed; casting is passed straight through.

    Args:
        dout: like y.
        h: what was normalised, x or x + residual.
        weight: the forward's.
        rstd: the forward's.
        dresidual_out: is added to dx; None for none.
        weight_offset: the forward's.
        per_head: dweight and dbias are of the last two dimensions.
        need_dweight: whether dweight is needed.
        dx_dtype: of dx; None for no dx.
        dresidual_dtype: of dx once more; None for no dresidual.
        dbias_dtype: of dbias; None for no dbias.
    """
    dx = dweight = dbias = dresidual = None
    dout, rstd = wide(dout), rstd.unsqueeze(-1)
    normalised = wide(h) * rstd
    if dx_dtype is not None:
        g = dout
        if weight is not None:
            g = dout * (weight_offset + wide(weight) if weight_offset else wide(weight))
        mean = (g * normalised).mean(-1, keepdim=True)
        wide_dx = rstd * (g - normalised * mean)
        if dresidual_out is not None:
            wide_dx = wide_dx + wide(dresidual_out)
        dx = wide_dx.to(dx_dtype).contiguous()
        if dresidual_dtype is not None:
            dresidual = wide_dx.to(dresidual_dtype).contiguous()
    if need_dweight:
        dweight = _sum(dout * normalised, per_head).to(weight.dtype)
    if dbias_dtype is not None:
        dbias = _sum(dout, per_head).to(dbias_dtype)
    return dx, dweight, dbias, dresidual


def _sum(terms: Any, per_head: bool) -> Any:
    """Over all rows, or over those of each head."""
    leading = terms.dim() - 1 - per_head
    return terms.flatten(0, leading - 1).sum(0) if leading else terms.clone()  # may be dout

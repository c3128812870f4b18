"""Providers on the cells of the whole operator: ours and its peers, each gated.

As in :mod:`.providers`, a peer is the lowest function of its package that does just this, it
allocates its outputs through torch's allocator, and what a clone got is kept until its next turn.

    ours      the ladder's config, no search; into tensors that are there
    quack     rmsnorm_fwd with a residual or a weight for each head, rmsnorm_bwd with dresidual_out:
              its analytical default, rstd stored
    liger     fused_add_rms_norm_forward and _backward. Its sum is rounded before it is normalised;
              casting_mode="gemma", which rounds nothing else. in_place=False
    compile   torch.compile of the plain formula, rstd stored
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from rmsnorm_raw import check, launch, module, workbench
from rmsnorm_raw.config import Config
from rmsnorm_raw.dtypes import LARGEST_FP8
from rmsnorm_raw.extras import LEAST_SCALE
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.measure import Call
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.study.providers import Contender, Provider, Results, over
from rmsnorm_raw.study.runs import OURS
from rmsnorm_raw.study.tensors import Tensors, placed
from rmsnorm_raw.study.whole_cells import WholeCell

#: of the gate's data of ours; one for all configs, for the reference sums of a data set are kept
SEED = 1


def whole_providers(problem: Problem) -> tuple[Provider, ...]:
    """Ours, then the peers that have this operation."""
    ours = Provider(OURS, "rmsnorm_raw.workbench", "rmsnorm-raw", _ours)
    quack = Provider("quack", "quack.rmsnorm", "quack-kernels", _quack)
    liger = Provider("liger", "liger_kernel.ops.fused_add_rms_norm", "liger-kernel", _liger)
    compiled = Provider("compile", "torch", "torch", _compile)
    more = problem.extras
    if more.scale != "none":
        return ours, compiled
    if not more.residual_out_dtype:
        return ours, quack
    return (ours, quack, liger) + (compiled,) * (problem.op == "forward")


# ---- ours ----------------------------------------------------------------------------------------


def _ours(cell: WholeCell) -> Contender:
    config = default_config(cell.problem, cell.backend.device)
    rendered = workbench.render(cell.problem, config, cell.backend.device)
    return of_config(cell, config, module.build(rendered, cell.backend))


def of_config(cell: WholeCell, config: Config, binary: module.Binary) -> Contender:
    """One of our kernels on a cell: through its own gate, then through the peers'.

    Raises:
        WrongResult: a gate failed.
    """
    import torch

    verdict = check.verify(cell.problem, config, binary, seed=SEED)
    check.require(verdict, cell.problem, config)
    calls = _calls(cell, config, binary)
    for output in cell.outputs[0].values():
        output.view(torch.uint8).fill_(0xFF)  # NaN in every dtype
    calls[0]()
    cell.backend.synchronize(cell.stream)
    check.require(cell.judge(cell.outputs[0]), cell.problem, config)
    return Contender(calls, config.slug, verdict, cell)


def _calls(cell: WholeCell, config: Config, binary: module.Binary) -> list[Call]:
    """A call a clone; the workspace is one for all, as in use."""
    import torch

    problem = cell.problem
    sizes = launch.tensor_bytes(problem, config, cell.backend.device)
    where = next(iter(cell.inputs[0].values())).device
    scratch = {
        name: torch.zeros(sizes[name], dtype=torch.uint8, device=where)
        for name in launch.SCRATCH
        if name in sizes
    }
    calls: list[Call] = []
    for inputs, outputs in zip(cell.inputs, cell.outputs, strict=True):
        tensors = placed(problem, inputs | outputs | scratch)
        plan = launch.make_plan(problem, config, binary, tensors)
        calls.append(functools.partial(_run, plan, cell.stream, scratch))
    return calls


def _run(plan: launch.Plan, stream: int, owner: object) -> None:
    launch.run(plan, stream)


# ---- peers ---------------------------------------------------------------------------------------


def _quack(cell: WholeCell) -> Contender:
    # the package has a function of the module's name, so an attribute would not do
    quack = importlib.import_module("quack.rmsnorm")

    def forward(t: Tensors) -> Results:
        y, residual_out, _ = quack.rmsnorm_fwd(
            t["x"], t["weight"], residual=t.get("residual"), eps=cell.problem.eps, store_rstd=True
        )
        return {"y": y, "residual_out": residual_out}

    def backward(t: Tensors) -> Results:
        given = (t["x"], t["weight"], t["dout"], t["rstd"])
        dx, dweight, _, _ = quack.rmsnorm_bwd(*given, dresidual_out=t.get("dresidual_out"))
        return {"dx": dx, "dweight": dweight}

    operation = forward if cell.problem.op == "forward" else backward
    return over(cell, operation, "analytical default")


def _liger(cell: WholeCell) -> Contender:
    liger = importlib.import_module("liger_kernel.ops.fused_add_rms_norm")

    def forward(t: Tensors, residual: Any) -> Any:
        eps, offset = cell.problem.eps, 0.0
        return liger.fused_add_rms_norm_forward(t["x"], residual, t["weight"], eps, offset, "gemma")

    def both(t: Tensors) -> Results:
        y, residual_out, rstd, *_ = forward(t, t["residual"])
        return {"y": y, "residual_out": residual_out, "rstd": rstd}

    if cell.problem.op == "forward":
        return over(cell, both, "casting_mode='gemma'")
    t = cell.inputs[0]
    *_, block, warps, stages, mode = forward(t, t["dresidual_out"])

    def backward(t: Tensors) -> Results:
        in_place, offset = False, 0.0
        dx, _, dweight = liger.fused_add_rms_norm_backward(
            t["dout"], t["dresidual_out"], t["x"], t["weight"], t["rstd"], offset, mode, block,
            warps, stages, in_place,
        )  # fmt: skip
        return {"dx": dx, "dweight": dweight}

    return over(cell, backward, "casting_mode='gemma', in_place=False")


def _compile(cell: WholeCell) -> Contender:
    import torch

    problem, static = cell.problem, cell.problem.extras.scale == "static"
    out, largest = getattr(torch, problem.out_dtype), LARGEST_FP8.get(problem.out_dtype)

    def formula(x: Any, weight: Any, residual: Any = None, scale: Any = None) -> Results:
        h = x.float() if residual is None else x.float() + residual.float()
        rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + problem.eps)
        y = h * rstd * weight.float()
        found = {"rstd": rstd}
        if residual is not None:
            found["residual_out"] = h.to(residual.dtype)
        if largest is None:
            return found | {"y": y.to(out)}
        if not static:
            scale = found["scale"] = (y.abs().amax(-1, keepdim=True) / largest).clamp(LEAST_SCALE)
        return found | {"y": (y * (1.0 / scale)).clamp(-largest, largest).to(out)}

    torch._dynamo.reset()
    compiled = torch.compile(formula, dynamic=False, fullgraph=True)
    return over(cell, lambda t: compiled(**t), "dynamic=False")

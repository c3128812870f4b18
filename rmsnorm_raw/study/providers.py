"""Providers: our kernel and its peers, each as calls on one cell that have passed a gate.

All are held to one contract. Forward gives y (and stores rstd, where the peer can); backward gets
x, weight, dout and rstd, gives dx and a finished dweight, and does not repeat the forward. Tensors
are the gate's data, cloned so that no call finds them in cache, and a call leaves them as they
were. A peer allocates its outputs through torch's allocator, as in use; the results of a clone are
kept until its next turn, so that outputs rotate too.

What is called: the lowest function of each package that does just this.

    ours            the ladder's config, no search
    quack           rmsnorm_fwd, rmsnorm_bwd: its analytical default
    quack_searched  rmsnorm_fwd_tuned, rmsnorm_bwd_tuned with the winner that
                    archive/quack_searched.json has for the cell, else the default
    liger           rms_norm_forward, rms_norm_backward. in_place=False, for its default writes dx
                    over dout; it costs Liger a fill of dx
    torch           F.rms_norm; backward is torch.autograd.grad of it, the graph retained
    compile         the same with torch.compile of the plain formula, bf16/bf16
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from typing import Any

import rmsnorm_raw
from rmsnorm_raw import check, workbench
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.clones import clone_plans
from rmsnorm_raw.config import Config
from rmsnorm_raw.errors import WrongResult
from rmsnorm_raw.measure import Call
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.study.runs import OURS
from rmsnorm_raw.study.tensors import Cloned, Tensors

Results = Mapping[str, Any]  # torch's, by the outputs' names


@dataclass(frozen=True)
class Cell(Cloned):
    """What every provider of a comparison works on.

    Attributes:
        problem: the operation; it has a weight, and backward is given rstd.
        config: our kernel's.
        backend: see :class:`.tensors.Cloned`, and so for stream.
    """

    problem: Problem
    config: Config
    backend: Backend
    stream: int = 0

    def __str__(self) -> str:
        return str(self.problem)


@dataclass(frozen=True, slots=True)
class Contender:
    """A provider on a cell, ready to be timed: it has passed its gate.

    Attributes:
        calls: one a clone, for the timer to rotate over.
        config: what was chosen, in the provider's own words.
        verdict: of the gate; ``worst`` is error over bound or limit for every provider.
        owner: keeps the memory that calls work on, where they do not hold it themselves.
    """

    calls: Sequence[Call]
    config: str
    verdict: check.Verdict
    owner: object = None


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation.

    Attributes:
        name: in tables, test ids and CSV files.
        module: what is called.
        package: as it is installed.
        prepare: builds, gates and binds it to a Cell. Raises WrongResult where the gate fails, and
            whatever the package raises.
        pairs: (activation, weight) dtypes that it is compared on; empty for all.
    """

    name: str
    module: str
    package: str
    prepare: Callable[[Any], Contender]
    pairs: tuple[tuple[str, str], ...] = ()

    def serves(self, problem: Problem) -> bool:
        """Whether it is compared on a problem."""
        return not self.pairs or (problem.dtype, problem.weight_dtype) in self.pairs

    def missing(self) -> str | None:
        """None where it is installed, else what to install."""
        if importlib.util.find_spec(self.module.partition(".")[0]) is not None:
            return None
        return f"{self.name} is not installed: pip install {self.package}"

    @property
    def version(self) -> str:
        """The installed version."""
        if self.package == "rmsnorm-raw":  # a checkout need not be installed
            return rmsnorm_raw.__version__
        return metadata.version(self.package)


def providers(*, quack_search: bool = False) -> tuple[Provider, ...]:
    """Ours, then the five peers.

    Args:
        quack_search: let ``quack_searched`` search every cell (10 to 100 s each) in place of the
            recorded winners.
    """
    searched = functools.partial(_quack_searched, search=quack_search)
    return (
        Provider(OURS, "rmsnorm_raw.workbench", "rmsnorm-raw", _ours),
        Provider("quack", "quack.rmsnorm", "quack-kernels", _quack),
        Provider("quack_searched", "quack.rmsnorm", "quack-kernels", searched),
        Provider("liger", "liger_kernel.ops.rms_norm", "liger-kernel", _liger),
        Provider("torch", "torch.nn.functional", "torch", _torch),
        Provider("compile", "torch", "torch", _compile, (("bfloat16", "bfloat16"),)),
    )


def current_stream(backend: Backend) -> int:
    """torch's current stream as a raw handle; 0 on the simulator, and without a torch for GPUs."""
    if backend.device.simulated or importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return int(torch.cuda.current_stream().cuda_stream) if torch.cuda.is_available() else 0


# ---- ours ----------------------------------------------------------------------------------------


def _ours(cell: Cell) -> Contender:
    kernel = workbench.build(cell.problem, cell.config, backend=cell.backend)
    verdict = kernel.check()
    check.require(verdict, cell.problem, cell.config)
    arena = clone_plans(cell.problem, cell.config, kernel.binary, stream=cell.stream)
    return Contender(arena.calls(cell.stream), cell.config.slug, verdict, arena.owner)


# ---- Quack ---------------------------------------------------------------------------------------


def _quack(cell: Cell, config: str = "analytical default") -> Contender:
    # the package has a function of the module's name, so an attribute would not do
    quack = importlib.import_module("quack.rmsnorm")
    eps = cell.problem.eps

    def forward(t: Tensors) -> Results:
        y, _, _ = quack.rmsnorm_fwd(t["x"], t["weight"], eps=eps, store_rstd=True)
        return {"y": y}

    def backward(t: Tensors) -> Results:
        dx, dweight, _, _ = quack.rmsnorm_bwd(t["x"], t["weight"], t["dout"], t["rstd"])
        return {"dx": dx, "dweight": dweight}

    return over(cell, forward if cell.problem.op == "forward" else backward, config)


def _quack_searched(cell: Cell, search: bool) -> Contender:
    problem = cell.problem
    winner = {} if search else recorded_winner(problem)
    if winner is None:
        return _quack(cell, "analytical default: no winner is recorded for this cell")
    import torch

    quack = importlib.import_module("quack.rmsnorm")
    configs = importlib.import_module("quack.rmsnorm_config")

    def forward(t: Tensors, run: Callable[..., None]) -> Results:
        y = torch.empty_like(t["x"])
        rstd = torch.empty(problem.rows, dtype=torch.float32, device=y.device)
        run(t["x"], t["weight"], y, rstd=rstd, eps=problem.eps)
        return {"y": y}

    def backward(t: Tensors, run: Callable[..., None]) -> Results:
        dx = torch.empty_like(t["x"])
        programs = configs.get_sm_count(problem.cols, dx.device)
        partials = torch.empty((programs, problem.cols), dtype=torch.float32, device=dx.device)
        run(t["x"], t["weight"], t["dout"], t["rstd"], dx, partials, has_dw_partial=True)
        dweight = partials.sum(dim=0).to(t["weight"].dtype)  # as rmsnorm_bwd finishes it
        return {"dx": dx, "dweight": dweight}

    if problem.op == "forward":
        operation, tuned, make = forward, quack.rmsnorm_fwd_tuned, configs.RmsNormFwdConfig
    else:
        operation, tuned, make = backward, quack.rmsnorm_bwd_tuned, configs.RmsNormBwdConfig
    if search:
        operation(cell.inputs[0], tuned)
    config = tuned.best_config.kwargs["config"] if search else make(**winner)
    run = functools.partial(tuned.fn, config=config)
    return over(cell, functools.partial(operation, run=run), repr(config))


def recorded_winner(problem: Problem) -> dict[str, Any] | None:
    """The fields of Quack's fastest known config for a cell; None where none is recorded."""
    archive = resources.files("rmsnorm_raw.study").joinpath("archive", "quack_searched.json")
    winners: dict[str, dict[str, Any]] = json.loads(archive.read_text(encoding="utf-8"))
    return winners[str(problem)]["config"] if str(problem) in winners else None


# ---- Liger ---------------------------------------------------------------------------------------


def _liger(cell: Cell) -> Contender:
    liger = importlib.import_module("liger_kernel.ops.rms_norm")

    def forward(t: Tensors) -> Any:
        return liger.rms_norm_forward(t["x"], t["weight"], cell.problem.eps, 0.0, "llama", None)

    if cell.problem.op == "forward":
        return over(cell, lambda t: {"y": forward(t)[0]}, "casting_mode='llama'")
    *_, block, warps, mode = forward(cell.inputs[0])

    def backward(t: Tensors) -> Results:
        arrays = (t["dout"], t["x"], t["weight"], t["rstd"])
        in_place, row_mode, offset = False, None, 0.0
        dx, dweight = liger.rms_norm_backward(
            *arrays, offset, mode, block, warps, in_place, row_mode
        )
        return {"dx": dx, "dweight": dweight}

    return over(cell, backward, "casting_mode='llama', in_place=False")


# ---- torch ---------------------------------------------------------------------------------------


def _torch(cell: Cell) -> Contender:
    from torch.nn import functional

    def rms_norm(x: Any, weight: Any) -> Any:
        return functional.rms_norm(x, (cell.problem.cols,), weight, cell.problem.eps)

    return _autograd(cell, rms_norm, "F.rms_norm")


def _compile(cell: Cell) -> Contender:
    import torch
    import torch._functorch.config as functorch

    eps = cell.problem.eps

    def formula(x: Any, weight: Any) -> Any:
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * rstd * weight.float()).to(x.dtype)

    torch._dynamo.reset()
    # with donated buffers a compiled backward refuses to run twice on one graph
    with functorch.patch(donated_buffer=False):
        return _autograd(cell, torch.compile(formula, dynamic=False), "dynamic=False")


def _autograd(cell: Cell, function: Callable[[Any, Any], Any], config: str) -> Contender:
    """A differentiable function of x and weight: itself, or its gradients by autograd."""
    import torch

    if cell.problem.op == "forward":
        return over(cell, lambda t: {"y": function(t["x"], t["weight"])}, config)

    def backward(y: Any, leaves: Sequence[Any], dout: Any) -> Results:
        dx, dweight = torch.autograd.grad(y, leaves, dout, retain_graph=True)
        return {"dx": dx, "dweight": dweight}

    operations = []
    for t in cell.inputs:
        leaves = tuple(t[name].detach().requires_grad_() for name in ("x", "weight"))
        operations.append(functools.partial(backward, function(*leaves), leaves, t["dout"]))
    return gated(cell, operations, config)


# ---- calls and their gate ------------------------------------------------------------------------


def over(cell: Cloned, operation: Callable[[Tensors], Results], config: str) -> Contender:
    """A contender of an operation on every clone; see :func:`gated`."""
    return gated(cell, [functools.partial(operation, clone) for clone in cell.inputs], config)


def gated(cell: Cloned, operations: Sequence[Callable[[], Results]], config: str) -> Contender:
    """A contender of one operation a clone, the first of which is judged.

    Args:
        cell: whose clones.
        operations: each gives its results, which are kept until its next turn.
        config: see :class:`Contender`.

    Raises:
        WrongResult: the peers' gate failed.
    """
    verdict = cell.judge(operations[0]())
    if not verdict.passed:
        raise WrongResult(f"{cell}, {config}: {verdict.message}; it gets no time")
    return Contender([_keeping(operation) for operation in operations], config, verdict)


def _keeping(operation: Callable[[], Any]) -> Call:
    kept: list[Any] = []

    def run() -> None:
        kept[:] = [operation()]  # the old results are freed once the new ones have their memory

    return run

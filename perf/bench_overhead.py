"""Host time of a call from torch at 8x4096 bf16, where kernels are done before the host is.

The calls are those of ``python -m perf.overhead``, which holds them to their bars. A round is the
mean of many, by the host's clock. Each is held against float64 first.
"""

from __future__ import annotations

from typing import Any

import pytest

from rmsnorm_raw import workbench
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.study.peer_gate import LIMITS

torch = pytest.importorskip("torch", reason="the calls are torch's: pip install torch")

import overhead  # noqa: E402 - it wants torch

WHAT = {
    "host-forward": "forward, no grad",
    "host-forward-grad": "forward, grad",
    "host-forward-backward": "forward + backward",
}
CONTESTS = dict.fromkeys(WHAT, ("ours", "quack", "torch"))
ON_DEVICE = False
MODULES = {"ours": "rmsnorm_raw.nn", "quack": "quack.rmsnorm", "torch": "torch.nn.functional"}
#: the simulator takes milliseconds a call
ROUNDS, CALLS = (20, 500), (6, 1)


def test_host(contest: str, benchmark: Any, session: Any) -> None:
    where = "cpu" if session.simulated else "cuda"
    torch.manual_seed(0)
    tensors = overhead.tensors(where)
    calls = overhead.contests(*tensors)[WHAT[benchmark.group]]
    if contest not in calls:
        benchmark.skipped = True
        pytest.skip(f"{contest} is not installed: pip install quack-kernels")
    require_right(calls[contest](), *tensors)
    rounds, iterations = CALLS if session.simulated else ROUNDS
    benchmark.pedantic(calls[contest], rounds=rounds, iterations=iterations, warmup_rounds=1)
    make = Problem.backward if "backward" in benchmark.group else Problem.forward
    problem = make(*overhead.SHAPE, "bf16")
    slug = workbench.default_config(problem, session.backend.device).slug
    moved_bytes = problem.logical_bytes()
    session.note(
        benchmark, contest, MODULES[contest], slug if contest == "ours" else "",
        moved_bytes=moved_bytes,
    )  # fmt: skip


def require_right(found: Any, x: Any, weight: Any, dout: Any) -> None:
    """Relative L2 errors against float64, at the peers' limits: a wrong call gets no time."""
    wide = [it.double().requires_grad_() for it in (x, weight)]
    y = torch.nn.functional.rms_norm(wide[0], weight.shape, wide[1], overhead.EPS)
    want = (y.detach(),)
    if isinstance(found, tuple) and len(found) == 2 and found[1] is not None:
        want = torch.autograd.grad(y, wide, dout.double())
    for got, right in zip(found if isinstance(found, tuple) else (found,), want, strict=False):
        error = float((got.detach().double() - right).norm() / right.norm())
        assert error <= LIMITS["bfloat16"], f"relative L2 error {error:.3g}"

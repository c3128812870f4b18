"""Launches prepared for many calls: the gate holds what they compute, arguments and all."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from gfx950_stand_in import StandIn, require_stand_in
from whole_problems import whole_problems

from rmsnorm_raw import launch
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.backends.prepared import OpenLaunch
from rmsnorm_raw.check import verify
from rmsnorm_raw.config import Config
from rmsnorm_raw.errors import LaunchError
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.launch import TENSORS, Tensor
from rmsnorm_raw.module import Binary, build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render

require_stand_in()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs a plan's launches runs prepared ones in their place."""

    def make_plan(
        problem: Problem, config: Config, binary: Binary, tensors: Mapping[str, Tensor]
    ) -> Any:
        nowhere = Tensor(12345)
        addresses = [tensors.get(name, nowhere).address for name in TENSORS[problem.op]]
        strides = {name: tensor._replace(address=54321) for name, tensor in tensors.items()}
        return launch.prepare(problem, config, binary, strides), addresses

    def run(plan: tuple[Sequence[Any], Sequence[int]], stream: int = 0) -> None:
        for each in plan[0]:
            each(stream, plan[1])

    monkeypatch.setattr(launch, "make_plan", make_plan)
    monkeypatch.setattr(launch, "run", run)


@pytest.mark.parametrize(
    ("problem", "slug"),
    [
        (Problem.forward(37, 3000, "bf16", weight_dtype="fp32"), None),
        (Problem.forward(37, 3000, "fp16", weight_dtype=None, store_rstd=False), None),
        (Problem.forward(4, 131072, "bf16"), None),  # blocks share rows: two launches and words
        (Problem.backward(37, 3000, "bf16", weight_dtype="fp32"), None),
        (Problem.backward(40, 1024, "bf16", has_rstd=False), "b256-t256-v16-2p-p2"),
        (Problem.backward(40, 1024, "bf16", need_dx=False), "b256-t128-v16-reg-p2-fl"),
        (Problem.backward(40, 1024, "bf16", need_dweight=False), None),
        *((problem, None) for problem in whole_problems(19, 1000)),
        (Problem.forward(9, 65536, "bf16", residual_dtype="fp32"), "b256-t2048-v16-reg"),
        (
            Problem.backward(40, 1024, "bf16", bias_dtype="fp32", dresidual_out_dtype="fp32"),
            "b256-t256-v16-2p-p2",
        ),
    ],
    ids=str,
)
def test_prepared_launches_pass_the_gate(
    prepared: None, rocm: Backend, problem: Problem, slug: str | None
) -> None:
    config = Config.parse(slug) if slug else default_config(problem, rocm.device)
    verdict = verify(problem, config, build(render(problem, config, rocm.device), rocm), seed=11)
    assert verdict.passed, verdict


def test_a_new_thread_may_launch(rocm: Backend, stand_in: StandIn) -> None:
    problem = Problem.forward(2, 256, "fp32", weight_dtype=None, store_rstd=False)
    config = default_config(problem, rocm.device)
    binary = build(render(problem, config, rocm.device), rocm)
    memory = [rocm.allocate(2 * 256 * 4) for _ in range(2)]
    (x, _), (y, _) = memory
    rocm.from_host(x, np.ones(512, np.float32).view(np.uint8), 0)
    rows = {name: Tensor(0, 256) for name in ("x", "y")}
    (only,) = launch.prepare(problem, config, binary, rows)
    addresses = [{"x": x, "y": y}.get(name, 0) for name in TENSORS["forward"]]
    thread = threading.Thread(target=only, args=(0, addresses))
    thread.start()
    thread.join()
    made = rocm.to_host(y, 2048, 0).view(np.float32)
    assert np.allclose(made, 1.0, atol=1e-5)


def test_a_refused_launch_says_what_was_asked(rocm: Backend) -> None:
    problem = Problem.forward(2, 256, "fp32")
    config = default_config(problem, rocm.device)
    binary = build(render(problem, config, rocm.device), rocm)
    (template,) = launch.launches(problem, config, binary)
    function = binary.code.functions[template.entry_point]
    run = rocm.prepare(function, OpenLaunch(template.entry_point, 1, 2048, template.args))
    with pytest.raises(LaunchError, match="refused a launch of 1 blocks of 2048 threads"):
        run(0, [])

"""A plan run by hand: the bytes of what it wrote, from a workspace of one's choice."""

from __future__ import annotations

import numpy as np

from rmsnorm_raw import check, launch
from rmsnorm_raw.config import Config
from rmsnorm_raw.module import Binary
from rmsnorm_raw.problem import Problem

SEED = 7
OUTPUTS = ("y", "dx", "dweight", "workspace")
Bytes = dict[str, np.ndarray]


def outputs(
    problem: Problem,
    slug: str,
    binary: Binary,
    before: np.ndarray | None = None,
    beyond_bytes: int = 0,
) -> Bytes:
    """The bytes of the outputs and of the workspace.

    The workspace has so many bytes beyond what the plan asks for, and ends as ``before``.
    """
    backend, config = binary.backend, Config.parse(slug)
    sizes = launch.tensor_bytes(problem, config, backend.device)
    if "workspace" in sizes:
        sizes["workspace"] += beyond_bytes
    made = {name: backend.allocate(size) for name, size in sizes.items()}
    tensors = {
        name: launch.dense_tensor(problem, name, address) for name, (address, _) in made.items()
    }
    check.write_inputs(problem, backend, tensors, SEED)
    if before is not None:
        made["workspace"][1][-before.nbytes :] = before.view(np.uint8)
    launch.run(launch.make_plan(problem, config, binary, tensors))
    names = (*OUTPUTS, *(["rstd"] if problem.op == "forward" else []))
    return {name: made[name][1].copy() for name in names if name in made}


def assert_same(got: Bytes, want: Bytes) -> None:
    """The same bits, but for the workspace."""
    assert got.keys() | {"workspace"} == want.keys() | {"workspace"}
    for name in got.keys() - {"workspace"}:
        np.testing.assert_array_equal(got[name], want[name], name)

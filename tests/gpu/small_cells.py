"""Small problems through the kernels, for compute-sanitizer to watch: no gate, a launch each.

python tests/gpu/small_cells.py [WANTED], with a part of the problems' names
"""

from __future__ import annotations

import sys

from whole_problems import whole_problems

from rmsnorm_raw import check, launch
from rmsnorm_raw.backends import get_backend
from rmsnorm_raw.config import Config
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.module import build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render

#: the paths of the plain kernels, with knobs that change what memory they touch
PLAIN = [
    (Problem.forward(37, 1000, "bf16"), "b128-t128-v16-reg-lk-m1"),
    (Problem.forward(37, 1000, "bf16", weight_dtype="fp32"), "b256-t64-v16-pp-lk-ss-p1"),
    (Problem.forward(37, 1000, "fp16"), "b256-t128-v16-lds3-p1"),
    (Problem.forward(37, 1024, "bf16"), "b256-t128-v16-lds4br-lk-ss-p1"),
    (Problem.forward(5, 20000, "fp32"), "b256-v16-2p"),
    (Problem.forward(5, 16384, "bf16"), "b128-t512-v16-reg-lk"),
    (Problem.forward(37, 769, "fp16"), None),
    (Problem.backward(37, 1000, "bf16"), "b128-t64-v16-reg-p1"),
    (Problem.backward(1000, 1000, "bf16", weight_dtype="fp32"), "b256-t128-v16-pp-p1"),
    (Problem.backward(1000, 1024, "fp16"), "b256-t128-v16-lds3-p1"),
    (Problem.backward(1000, 1024, "bf16"), "b256-t128-v16-lds3b-lk-ss-p1-fe"),
    (Problem.backward(1000, 1024, "bf16"), "b128-t128-v16-lds2br-p2"),
    (Problem.backward(3000, 1024, "bf16"), "b256-t128-v16-lds3bp-lk-ss-p1"),
    (Problem.backward(37, 1000, "bf16"), "b256-t128-v16-reg-p2-fl"),
    (Problem.backward(37, 20000, "bf16"), "b256-v16-2p-p1"),
    (Problem.backward(37, 769, "fp32", has_rstd=False), None),
]


def main(wanted: str = "") -> None:
    """Run them all, each on memory of its own."""
    import cupy

    cupy.cuda.set_allocator(None)  # no pool, in which a step past a tensor would go unseen
    backend = get_backend("cuda")
    problems = PLAIN + [(problem, None) for problem in whole_problems(9, 1000)]
    for problem, slug in problems:
        if wanted not in str(problem):
            continue
        config = Config.parse(slug) if slug else default_config(problem, backend.device)
        binary = build(render(problem, config, backend.device), backend)
        sizes = launch.tensor_bytes(problem, config, backend.device)
        owned = {name: backend.allocate(size) for name, size in sizes.items()}
        tensors = {name: launch.dense_tensor(problem, name, at) for name, (at, _) in owned.items()}
        check.write_inputs(problem, backend, tensors, seed=1)
        if "counter" in tensors:
            backend.fill(tensors["counter"].address, 0, 4, 0)
        if config.paced:  # programs count from whatever the last word of the workspace holds
            backend.fill(tensors["workspace"].address + sizes["workspace"] - 4, 0, 4, 0)
        launch.run(launch.make_plan(problem, config, binary, tensors))
        backend.synchronize(0)
        print(problem, config.slug, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

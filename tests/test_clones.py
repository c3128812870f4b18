"""Clones: how many there are, where their tensors lie, and that each call reads its own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from virtual_gpu import VirtualGpu

from rmsnorm_raw import check, clones, ladder, launch, measure, module, source
from rmsnorm_raw.backends import Backend, Code
from rmsnorm_raw.clones import ALIGN_BYTES, BUDGET_BYTES, clone_plans
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.measure import Unmeasurable
from rmsnorm_raw.module import Binary
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import Source

MIB = 1 << 20


def make(problem: Problem, gpu: VirtualGpu, **kwargs: int) -> clones.Clones:
    binary = Binary(Source("", "", (), ()), gpu, Code({}, {}, "", ""))
    return clone_plans(problem, ladder.default_config(problem, gpu.device), binary, **kwargs)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, launch.Tensor]]:
    """Where inputs are written; a VirtualGpu has no memory."""
    calls: list[Mapping[str, launch.Tensor]] = []

    def write_inputs(problem, backend, tensors, seed, stream=0):  # type: ignore[no-untyped-def]
        calls.append(tensors)

    monkeypatch.setattr(check, "write_inputs", write_inputs)
    return calls


@pytest.mark.parametrize(
    ("problem", "device", "count"),
    [
        # 16 KiB: as many as allowed, and still far under the cache
        (Problem.forward(1, 4096, "bfloat16"), "sm_90", 64),
        # 64 MiB and a little against 3 x 60 MiB and 3 x 256 MiB
        (Problem.forward(4096, 4096, "bfloat16"), "sm_90", 3),
        (Problem.forward(4096, 4096, "bfloat16"), "gfx950", 12),
        # 1 GiB: more than the cache at once; outputs still rotate
        (Problem.forward(32768, 8192, "bfloat16"), "sm_90", 2),
        (Problem.backward(32768, 8192, "bfloat16"), "gfx950", 2),
        # 24 GiB: over the budget, and two all the same
        (Problem.forward(24576, 262144, "bfloat16"), "sm_90", 2),
    ],
    ids=str,
)
@pytest.mark.usefixtures("written")
def test_there_are_as_many_as_exceed_three_caches(
    problem: Problem, device: str, count: int
) -> None:
    gpu = VirtualGpu(KNOWN[device])
    found = make(problem, gpu)
    assert len(found.plans) == count
    assert found.exceed_cache == (count < 64)
    assert found.cache_bytes == 3 * gpu.device.last_level_cache_bytes
    assert (len(found.plans) * found.clone_bytes <= BUDGET_BYTES) or count == 2
    if 2 < count < 64:
        assert (count - 1) * found.clone_bytes <= found.cache_bytes
    assert sum(gpu.allocated) >= count * found.clone_bytes


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_tensors_are_aligned_apart_and_inside_the_arena(
    op: str, written: list[Mapping[str, launch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = getattr(Problem, op)(37, 1000, "bfloat16", weight_dtype="float32")
    gpu = VirtualGpu()
    plans: list[Mapping[str, launch.Tensor]] = []
    make_plan = launch.make_plan

    def spy(problem, config, binary, tensors):  # type: ignore[no-untyped-def]
        plans.append(tensors)
        return make_plan(problem, config, binary, tensors)

    monkeypatch.setattr(launch, "make_plan", spy)
    copies: list[tuple[int, int, int]] = []
    monkeypatch.setattr(gpu, "copy", lambda *args: copies.append(args[:3]))
    monkeypatch.setattr(clones, "MAX_CLONES", 3)
    found = make(problem, gpu)
    config = ladder.default_config(problem, gpu.device)
    sizes = launch.tensor_bytes(problem, config, gpu.device)
    assert written == plans[:1]
    spans = []
    for tensors in plans:
        assert set(tensors) == set(sizes)
        for name, tensor in tensors.items():
            assert tensor.address % ALIGN_BYTES == 0
            assert tensor.row_stride == (1000 if name in ("x", "y", "dout", "dx") else 0)
            if name != "workspace":
                spans.append((tensor.address, tensor.address + sizes[name]))
    workspaces = {tensors["workspace"].address for tensors in plans if "workspace" in tensors}
    assert len(workspaces) == (op == "backward"), "one serves every call"
    spans += [(address, address + sizes["workspace"]) for address in workspaces]
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[0][0] >= 1 << 40
    assert spans[-1][1] <= (1 << 40) + sum(gpu.allocated)
    # the inputs of the first clone, whole, to each of the others
    first = plans[0][next(iter(sizes))].address
    assert copies == [
        (first + i * found.clone_bytes, first, found.clone_bytes) for i in range(1, 3)
    ]


@pytest.mark.parametrize(
    "problem",
    [
        Problem.forward(0, 64, "float16"),
        Problem.forward(64, 0, "float16"),
        Problem.forward(0, 0, "float16", weight_dtype=None, store_rstd=False),
        Problem.backward(8, 64, "float16", need_dx=False, need_dweight=False),
    ],
    ids=str,
)
def test_where_nothing_is_launched_there_is_nothing_to_time(problem: Problem) -> None:
    with pytest.raises(InvalidInput, match="nothing to time"):
        make(problem, VirtualGpu())


@pytest.mark.usefixtures("written")
def test_steady_is_refused_where_the_clones_fit_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.forward(256, 4096, "bfloat16")
    gpu = VirtualGpu(KNOWN["gfx950"])
    monkeypatch.setattr(measure, "perf_counter", gpu.perf_counter)
    config = ladder.default_config(problem, gpu.device)
    binary = Binary(Source("", "", (), ()), gpu, Code({"rmsnorm_forward": "f"}, {}, "", ""))
    verdict = check.Verdict(passed=True, worst={}, seed=0, message="")
    with pytest.raises(Unmeasurable, match=r"64 clones of 4,2\d\d,\d\d\d B do not exceed 3"):
        measure.measure(problem, config, binary, verdict, regime="steady")
    assert measure.measure(problem, config, binary, verdict).clones == 64


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_every_clone_computes_the_same_from_its_own_tensors(
    cpu64: Backend, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = getattr(Problem, op)(3, 256, "float16")
    config = ladder.default_config(problem, cpu64.device)
    binary = module.build(source.render(problem, config, cpu64.device), cpu64)
    arenas: list[tuple[int, int]] = []
    allocate = cpu64.allocate

    def spy(size_bytes: int):  # type: ignore[no-untyped-def]
        base, owner = allocate(size_bytes)
        cpu64.fill(base, 0xFF, size_bytes, 0)
        arenas.append((base, size_bytes))
        return base, owner

    monkeypatch.setattr(cpu64, "allocate", spy)
    found = clone_plans(problem, config, binary)
    base, size_bytes = arenas[-1]
    for call in found.calls():
        call()
    cpu64.synchronize(0)
    arena = cpu64.to_host(base, size_bytes, 0)
    first, second = arena[-2 * found.clone_bytes :].reshape(2, -1)
    assert np.array_equal(first, second)
    output = launch.tensor_bytes(problem, config, cpu64.device)["dx" if op == "backward" else "y"]
    assert np.count_nonzero(first != 0xFF) > output  # it was written, inputs beside it

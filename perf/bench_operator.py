"""The whole operator: residual and norm, its backward, norms of heads, 8-bit outputs.

The cells are those of ``python -m perf.whole_operator``, which holds them to their bars.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from rmsnorm_raw.backends import get_backend
from rmsnorm_raw.study.whole_cells import WholeCell, whole_cells
from rmsnorm_raw.study.whole_providers import whole_providers

pytest.importorskip("torch", reason="the tensors are torch's: pip install torch")

CONTESTS = {
    f"operator-{cell.name}": tuple(provider.name for provider in whole_providers(cell.problem))
    for cell in whole_cells(get_backend())
}
ON_DEVICE = True


@functools.lru_cache(maxsize=1)  # the tensors of the cell before it are let go
def cell_of(name: str, stream: int) -> WholeCell:
    return next(cell for cell in whole_cells(get_backend(), stream) if cell.name == name)


def test_operator(contest: str, benchmark: Any, session: Any) -> None:
    cell = cell_of(benchmark.group.removeprefix("operator-"), session.stream)
    provider = next(it for it in whole_providers(cell.problem) if it.name == contest)
    reason = provider.missing()
    if session.simulated and contest != "ours":
        reason = "the simulator runs our kernel alone"
    if reason:
        benchmark.skipped = True
        pytest.skip(reason)
    contender = provider.prepare(cell)
    samples = session.time(benchmark, contender.calls)
    benchmark.extra_info["version"] = provider.version
    session.note(
        benchmark, contest, provider.module, contender.config,
        moved_bytes=cell.problem.logical_bytes(), samples=samples,
    )  # fmt: skip

"""The edit loop at full size: a kernel engineer does not wait."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import pytest

from rmsnorm_raw.backends import Backend
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.workbench import build

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("make", [Problem.forward, Problem.backward], ids=["forward", "backward"])
def test_an_edit_is_judged_and_timed_in_two_seconds(
    gpu: Backend, make: Callable[..., Problem]
) -> None:
    kernel = build(make(32768, 8192, "bf16"), backend=gpu)
    print(kernel.check(), kernel.bench())  # the first: tensors, probes' context, references
    for edit in range(3):
        text = kernel.source.text.replace("__restrict__ weight", f"__restrict__ weight /*{edit}*/")
        began = perf_counter()
        edited = kernel.with_source(text)
        print(edited.check(), edited.bench())
        assert perf_counter() - began <= 2.0

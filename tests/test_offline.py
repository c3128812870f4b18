"""What AMD's compiler is refused before it is asked, and what a device that is not here refuses."""

from __future__ import annotations

import pytest

from rmsnorm_raw.backends import Backend
from rmsnorm_raw.backends.offline import compile_offline, offline_backend
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.errors import BackendUnavailable, InvalidInput
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import Source, render

EMPTY = Source("empty.hip", 'extern "C" __global__ void empty() {}\n', (), ("empty",))


@pytest.mark.parametrize("arch", ["gfx90a", "gfx9999", "sm_90"])
def test_an_unknown_architecture(arch: str) -> None:
    with pytest.raises(InvalidInput, match="use one of gfx950, gfx942"):
        compile_offline(EMPTY, arch)


def test_a_source_of_another_architecture() -> None:
    problem = Problem.forward(64, 1024, "bf16")
    source = render(problem, default_config(problem, KNOWN["gfx942"]), KNOWN["gfx942"])
    with pytest.raises(InvalidInput, match="rendered for gfx942: render it for gfx950"):
        compile_offline(source, "gfx950")


def test_an_unknown_device_has_no_backend() -> None:
    with pytest.raises(InvalidInput, match="'sm_90': use one of gfx950, gfx942"):
        offline_backend("sm_90")


WHAT_A_COMPILER_CAN_SAY = {"assembly", "compile", "toolchain"}
WHAT_NEEDS_A_DEVICE = sorted(
    name for name in vars(Backend).keys() - WHAT_A_COMPILER_CAN_SAY if not name.startswith("_")
)


@pytest.mark.parametrize("name", WHAT_NEEDS_A_DEVICE)
def test_a_device_that_is_not_here_refuses_all_but_to_compile(name: str) -> None:
    backend = offline_backend("gfx942")
    assert backend.device is KNOWN["gfx942"]
    with pytest.raises(BackendUnavailable, match=r"MI300X \(gfx942\) without a device.*'rocm'"):
        getattr(backend, name)()

"""Backends shared by the tests. GPU tests skip themselves, and say why (-ra is on)."""

from __future__ import annotations

import pytest
from hypothesis import settings

from rmsnorm_raw.backends import Backend, available, get_backend

# no deadline: the first example of a test may compile a kernel. "steady" tries the same examples in
# every run, so that a build never fails by luck; look further with --hypothesis-profile=explore
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("steady")


def gpu_name() -> str:
    """The GPU backend that runs here; skips the test where none does."""
    reasons = {name: available(name) for name in ("rocm", "cuda")}
    for name, reason in reasons.items():
        if reason is None:
            return name
    pytest.skip("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        gpu_name()


@pytest.fixture(scope="session")
def cpu64() -> Backend:
    """The simulator at wave 64: the AMD branch of the kernels."""
    return get_backend("cpu", wave=64)


@pytest.fixture(scope="session")
def cpu32() -> Backend:
    """The simulator at wave 32: the CUDA branch of the kernels."""
    return get_backend("cpu", wave=32)


@pytest.fixture(scope="session")
def gpu() -> Backend:
    """The GPU backend of this machine."""
    return get_backend(gpu_name())

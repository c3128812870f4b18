"""Backends shared by the tests.

GPU tests skip themselves, and say why (-ra is on). Those marked gfx950 need no GPU; what they do
need, their own conftest.py looks for.
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from machines import Machine

from rmsnorm_raw import launch
from rmsnorm_raw.backends import Backend, available, get_backend, offline
from rmsnorm_raw.backends.kernel_report import KernelReport
from rmsnorm_raw.backends.rocm_libraries import VARIABLE
from rmsnorm_raw.source import Source

# no deadline: the first example of a test may compile a kernel. "steady" tries the same examples in
# every run, so that a build never fails by luck; look further with --hypothesis-profile=explore
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rmsnorm_raw")
    group.addoption("--sample", type=int, help="of each test, at most so many of its cases")
    group.addoption("--sample-seed", default="0", help="which ones")
    group.addoption("--fuzz", type=int, default=500, help="so many random problems (test_fuzz.py)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    most = config.getoption("sample")
    if most is None:
        return
    cases: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[str(item.path), getattr(item, "originalname", item.name)].append(item)
    kept = set()
    for (_, name), some in cases.items():
        draw = random.Random(f"{config.getoption('sample_seed')} {name}")
        kept |= set(draw.sample(some, min(most, len(some))))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


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


@pytest.fixture
def no_rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without ROCm: no variables, an empty cache, nothing in ``tmp_path / "rocm"``."""
    for name in (VARIABLE, "ROCM_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A made-up machine on which nothing is installed."""
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, launch.Tensor]]:
    """Where the kernels of calls on arrays found their tensors, call by call."""
    seen: list[dict[str, launch.Tensor]] = []
    make_plan = launch.make_plan

    def record(problem: Any, config: Any, binary: Any, tensors: dict[str, launch.Tensor]) -> Any:
        seen.append(dict(tensors))
        return make_plan(problem, config, binary, tensors)

    monkeypatch.setattr(launch, "make_plan", record)
    return seen


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch fails the test."""

    def fail(*args: Any) -> None:
        raise AssertionError("a launch was made")

    monkeypatch.setattr(launch, "run", fail)


#: a loop that copies a row to LDS and stores one, with one row in flight
RING_LOOP = (
    (0, "buffer_load_dwordx4 v8, s[0:3], 0 offen lds"),
    (8, "s_waitcnt vmcnt(2)"),
    (12, "ds_read_b128 v[0:3], v8"),
    (20, "global_store_dwordx4 v[4:5], v[0:3], off"),
    (28, "s_cbranch_scc1 65528"),
    (32, "s_endpgm"),
)


@pytest.fixture
def rocm_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler in the place of AMD's: every kernel takes 64 registers and is RING_LOOP."""

    def compile_offline(
        source: Source, arch: str, *, libraries: Path | None = None
    ) -> offline.OfflineCode:
        metadata = dict.fromkeys(
            (".agpr_count", ".vgpr_spill_count", ".sgpr_spill_count", ".kernarg_segment_size",
             ".private_segment_fixed_size", ".group_segment_fixed_size"), "0",
        )  # fmt: skip
        metadata |= {
            ".vgpr_count": "64", ".sgpr_count": "32", ".wavefront_size": "64",
            ".max_flat_workgroup_size": "1024",
        }  # fmt: skip
        return offline.OfflineCode(
            functions={
                name: KernelReport.read(arch, metadata | {".name": name}, RING_LOOP)
                for name in source.entry_points
            },
            resources={},
            log="",
            object_digest=source.digest,
            arch=arch,
            release="7.0.0",
            code_object=b"",
        )

    monkeypatch.setattr(offline, "compile_offline", compile_offline)


@pytest.fixture
def compile_options(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each torch.compile of a test, which does all but the code generator's work."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    compiled = torch.compile
    seen: list[dict[str, Any]] = []

    def quickly(function: Any, **options: Any) -> Any:
        seen.append(options)
        return compiled(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", quickly)
    return seen

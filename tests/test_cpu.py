from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from simulated import AMD_BUFFER, AMD_COPY, compiler_name, each_compiler, run, small

from rmsnorm_raw.backends import Resources, cpu, get_backend
from rmsnorm_raw.backends.cpu import CpuBackend
from rmsnorm_raw.backends.host_compiler import compilers
from rmsnorm_raw.device import SIMULATED
from rmsnorm_raw.errors import (
    BackendUnavailable,
    CompileError,
    InvalidInput,
    LaunchError,
    SimulatorError,
)
from rmsnorm_raw.source import Source


@pytest.fixture(scope="module", params=compilers(), ids=compiler_name)
def wave64(request: pytest.FixtureRequest) -> CpuBackend:
    """A simulator with each compiler that is here."""
    return CpuBackend(64, compiler=request.param)


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend(64)


# ---- launches ------------------------------------------------------------------------------------


def turns_of(backend: CpuBackend, grid: int = 1) -> np.ndarray:
    turns, count = np.zeros((grid, 256), np.int32), np.zeros(1, np.int32)
    source = small("turns[(*next)++] = threadIdx.x;", "int* turns, int* next")
    run(backend, source, turns, count, grid=grid, block=256)
    return turns


def test_orders() -> None:
    np.testing.assert_array_equal(turns_of(CpuBackend(64))[0], np.arange(256))
    np.testing.assert_array_equal(
        turns_of(CpuBackend(64, order="reverse"))[0], np.arange(256)[::-1]
    )
    shuffled = CpuBackend(64, order="shuffle", seed=3)
    first, second = turns_of(shuffled, grid=2), turns_of(shuffled)[0]
    np.testing.assert_array_equal(first[0], first[1])  # one order a launch
    assert (first[0] != second).any()
    np.testing.assert_array_equal(turns_of(CpuBackend(64, order="shuffle", seed=3))[0], first[0])
    waves = first[0].reshape(4, 64) // 64
    np.testing.assert_array_equal(waves, waves[:, :1].repeat(64, 1))  # a wave runs as a whole
    np.testing.assert_array_equal(np.sort(first[0]), np.arange(256))
    assert (waves[:, 0] != np.arange(4)).any()
    with pytest.raises(InvalidInput, match="'sideways' is not one of forward, reverse, shuffle"):
        CpuBackend(64, order="sideways")  # type: ignore[arg-type]


def test_a_source_with_copies_is_to_be_right_in_both_landings(backend: CpuBackend) -> None:
    assert cpu.landings(backend, small("out[0] = 1;")) == (backend,)
    buffer = AMD_BUFFER.format(bytes=256)
    copy = f"{AMD_COPY}(buffer, rr_sim_lds(), 4, 4 * threadIdx.x, 0, 0, 0);"
    read = "out[threadIdx.x] = ((float*)rr_sim_lds())[threadIdx.x];"
    source = small(f"{buffer}\n{copy}\n{read}\nrr_sim_wait_vmcnt(0);", "float* in, float* out")
    given, out = np.ones(64, np.float32), np.zeros((2, 64), np.float32)
    for landing, result in zip(cpu.landings(backend, source), out, strict=True):
        run(landing, source, given, result, lds_bytes=256)
    assert (out[0] == 1).all()
    assert np.isnan(out[1]).all()
    address, _owner = backend.allocate(4)
    for landing in cpu.landings(backend, source):  # which watch the guards of one memory
        with pytest.raises(SimulatorError, match="store outside a buffer: at byte 4 of 4"):
            run(landing, small("out[1] = 1;"), np.uint64(address))
    with pytest.raises(InvalidInput, match="landing 'soon' is not one of issue, wait"):
        CpuBackend(64, landing="soon")  # type: ignore[arg-type]


def test_threads_launch_one_at_a_time(backend: CpuBackend) -> None:
    body = """
  for (int i = 0; i < 200; ++i) {
    __syncthreads();
    out[blockIdx.x * 64 + threadIdx.x] += 1;
  }
"""
    outs = [np.zeros((8, 64), np.float32) for _ in range(8)]
    source = small(body)
    run(backend, source, outs[0], grid=8)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda out: run(backend, source, out, grid=8), outs[1:]))
    np.testing.assert_array_equal(outs, 200)


# ---- what a launch refuses -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "block", "lds_bytes", "reason"),
    [
        (1, 96, 0, "block of 96 threads: whole waves of 64"),
        (1, 0, 0, "block of 0 threads"),
        (1, 1088, 0, "block of 1088 threads"),
        (0, 64, 0, "at least one block"),
        (1 << 26, 64, 0, r"less than 2\*\*32 threads"),
        (1, 64, 160 * 1024 + 1, "163841 bytes of LDS: CPU simulator, wave 64 has 163840"),
        (1, 64, -1, "-1 bytes of LDS"),
    ],
)
def test_launches_that_a_device_would_not_take(
    backend: CpuBackend, grid: int, block: int, lds_bytes: int, reason: str
) -> None:
    out = np.zeros(64, np.float32)
    with pytest.raises(LaunchError, match=f"^k: .*{reason}"):
        run(backend, small("out[0] = 1;"), out, grid=grid, block=block, lds_bytes=lds_bytes)
    assert not out.any()


EVERY_KIND = "void* p, const float* q, int i, unsigned u, long long l, float f, double d"


def test_arguments_reach_the_kernel(wave64: CpuBackend) -> None:
    body = "*(double*)p = q[0] + 10.0 * i + 100.0 * u + 1000.0 * l + 10000.0 * f + 100000.0 * d;"
    out, q = np.zeros(1), np.ones(1, np.float32)
    scalars = (np.int32(-2), np.uint32(3), np.int64(4), np.float32(5), np.float64(6))
    run(wave64, small(body, EVERY_KIND), out, q, *scalars)
    assert out[0] == 1 - 20 + 300 + 4000 + 50000 + 600000


@pytest.mark.parametrize(
    ("index", "value", "reason"),
    [
        (0, np.int64(4096), r"argument 0 .*int64.* pointer \(uint64\) of 8 bytes"),
        (1, np.uint32(4096), "argument 1 .*uint32.* pointer"),
        (2, np.int64(1), "argument 2 .*int64.* integer of 4 bytes"),
        (3, np.float32(1), "argument 3 .*float32.* integer of 4 bytes"),
        (5, np.int32(1), "argument 5 .*int32.* float of 4 bytes"),
        (5, np.float64(1), "argument 5 .*float64.* float of 4 bytes"),
        (6, 1.0, "argument 6 .*1.0, float.* NumPy scalar"),
    ],
)
def test_arguments_of_another_type(
    backend: CpuBackend, index: int, value: object, reason: str
) -> None:
    args: list[object] = [np.uint64(0), np.uint64(0), np.int32(0), np.uint32(0), np.int64(0)]
    args += [np.float32(0), np.float64(0)]
    args[index] = value
    with pytest.raises(LaunchError, match=f"^k: {reason}"):
        run(backend, small("", EVERY_KIND), *args)  # type: ignore[arg-type]


def test_arguments_too_few(backend: CpuBackend) -> None:
    with pytest.raises(LaunchError, match=r"^k takes 1 arguments: 0 were given"):
        run(backend, small("out[0] = 1;"))
    run(backend, small("", ""))


# ---- memory and time -----------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, 1_000_003])
def test_allocations_are_nan_and_aligned(backend: CpuBackend, size_bytes: int) -> None:
    address, owner = backend.allocate(size_bytes)
    assert address % 256 == 0
    assert owner.nbytes == size_bytes
    data = backend.to_host(address, size_bytes, 0)
    np.testing.assert_array_equal(data, 0xFF)
    backend.fill(address, 7, size_bytes, 0)
    np.testing.assert_array_equal(owner, 7)
    np.testing.assert_array_equal(data, 0xFF)  # a copy


def test_copies_between_host_and_device(backend: CpuBackend) -> None:
    given = np.random.default_rng(2).standard_normal((3, 5)).astype(np.float32)
    (first, one), (second, other) = backend.allocate(60), backend.allocate(60)
    backend.from_host(first, given, 0)
    backend.copy(second, first, 60, 0)
    np.testing.assert_array_equal(other.view(np.float32).reshape(3, 5), given)
    np.testing.assert_array_equal(one, other)
    with pytest.raises(InvalidInput, match="C-contiguous"):
        backend.from_host(first, given.T, 0)


def test_time_goes_on_and_streams_are_integers(backend: CpuBackend) -> None:
    start = backend.record(0)
    time.sleep(0.002)
    backend.synchronize(0)
    assert 2000 <= backend.elapsed_us(start, backend.record(0)) < 1e6
    with pytest.raises(InvalidInput, match="stream is None: pass the raw handle"):
        backend.synchronize(None)  # type: ignore[arg-type]


# ---- building ------------------------------------------------------------------------------------


def test_a_refused_source_shows_its_line(wave64: CpuBackend) -> None:
    source = small("out[0] = 1;\nout[1] = undeclared;")
    with pytest.raises(CompileError, match=r"config 'b64' does not compile") as caught:
        wave64.compile(source)
    assert caught.value.slug == "b64"
    assert "small.hip:3" in caught.value.log
    assert "undeclared" in caught.value.log


def test_a_missing_entry_point_does_not_compile(backend: CpuBackend) -> None:
    with pytest.raises(CompileError, match="nothing_here"):
        backend.compile(Source("small.hip", "", (), ("nothing_here",)))


def test_a_source_for_the_other_wave_is_refused(backend: CpuBackend) -> None:
    with pytest.raises(CompileError, match="rendered for waves of 32 lanes"):
        backend.compile(small("", defines=(("RR_WAVE", "32"),)))


@each_compiler
@pytest.mark.parametrize("wave", [64, 32])
def test_a_build_is_quick_and_clean(wave: int, command: tuple[str, ...]) -> None:
    source = small(f"out[threadIdx.x] = {time.time_ns() % 10**9}.0f; __syncthreads();")
    backend = CpuBackend(wave, compiler=command)
    backend.compile(small("out[0] = 0;"))  # asks the compiler for its version
    start = time.perf_counter()
    code = backend.compile(source)
    assert time.perf_counter() - start < 2
    assert code.log == ""
    assert code.resources == {"k": Resources(None, None, None)}


def test_equal_sources_give_equal_objects(wave64: CpuBackend) -> None:
    one, same, other = small("out[0] = 1;"), small("out[0] = 1;"), small("out[0] = 2;")
    digests = [wave64.compile(source).object_digest for source in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]


def test_the_backend_is_found_by_name() -> None:
    for wave in (64, 32):
        found = get_backend("cpu", wave=wave)
        assert found.name == "cpu"
        assert found.device == SIMULATED[wave]
    with pytest.raises(InvalidInput, match="wave is 16"):
        get_backend("cpu", wave=16)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "compilers", lambda: ())
    assert 'pip install -e ".[cpu]"' in str(cpu.why_unavailable("cpu"))
    with pytest.raises(BackendUnavailable, match="or install the system's c"):
        CpuBackend(64)


def test_a_child_of_a_fork_can_launch_whatever_threads_its_parent_had() -> None:
    text = """
import os, threading, numpy as np, rmsnorm_raw as rr
x, w = np.ones((64, 1024), np.float16), np.ones(1024, np.float16)
go = True
def loop():
    while go:
        rr.rmsnorm_fwd(x, w)
rr.rmsnorm_fwd(x, w)
thread = threading.Thread(target=loop)
thread.start()
for _ in range(5):
    child = os.fork()
    if not child:
        os._exit(0 if float(rr.rmsnorm_fwd(x, w).y[0, 0]) == 1 else 3)
    assert os.waitpid(child, 0)[1] == 0
go = False
thread.join()
"""
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)

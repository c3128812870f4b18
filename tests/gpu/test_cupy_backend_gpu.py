"""The CuPy backend on a GPU: compiling, launching, memory, failures."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from rmsnorm_raw.backends import Backend
from rmsnorm_raw.errors import CompileError, LaunchError
from rmsnorm_raw.source import Source

pytestmark = pytest.mark.gpu


def source(body: str, *, slug: str = "") -> Source:
    text = f'extern "C" __global__ void probe(unsigned* out) {{\n{body}\n}}\n'
    return Source("probe.hip", text, (("WORD", "7"),), ("probe",), slug)


def test_the_device_is_described(gpu: Backend) -> None:
    device = gpu.device
    assert device.wave == {"rocm": 64, "cuda": 32}[gpu.name]
    assert device.arch.startswith({"rocm": "gfx", "cuda": "sm_"}[gpu.name])
    assert device.compute_units > 1
    assert device.lds_bytes >= 48 * 1024
    assert device.register_file >= 65536
    assert device.last_level_cache_bytes >= 1 << 20
    assert device.last_level_cache_source


def test_the_toolchain_and_the_machine_code_are_named(gpu: Backend) -> None:
    compiler, cupy = gpu.toolchain
    assert compiler.startswith({"rocm": "ROCm 7", "cuda": "NVRTC 1"}[gpu.name])
    assert cupy.split(".")[0].isdigit()
    text = gpu.assembly(source("out[threadIdx.x] = WORD + blockIdx.x;"))
    assert "probe" in text
    assert any(word in text for word in ("s_endpgm", "EXIT", ".visible .entry"))


def test_a_source_is_compiled_once_and_described(gpu: Backend) -> None:
    code = gpu.compile(source("out[threadIdx.x] = WORD + blockIdx.x;"))
    assert gpu.compile(source("out[threadIdx.x] = WORD + blockIdx.x;")) is code
    resources = code.resources["probe"]
    assert resources.registers is not None
    assert 0 < resources.registers <= 512
    assert (resources.lds_bytes, resources.spill_bytes) == (0, 0)
    static = gpu.compile(
        source(
            "__shared__ unsigned a[64]; a[threadIdx.x] = out[0]; __syncthreads(); out[1] = a[WORD];"
        )
    )
    assert static.resources["probe"].lds_bytes == 256


def test_memory_goes_there_and_back(gpu: Backend) -> None:
    round_trip(gpu)


def round_trip(gpu: Backend) -> None:
    address, owner = gpu.allocate(4 * 64)
    gpu.fill(address, 0xAB, 4 * 64, 0)
    assert (gpu.to_host(address, 4 * 64, 0) == 0xAB).all()
    code = gpu.compile(source("out[threadIdx.x] = WORD + threadIdx.x;"))
    gpu.launch(code.functions["probe"], 1, 32, (np.uint64(address),), 0, 0)
    gpu.copy(address + 128, address, 128, 0)
    words = gpu.to_host(address, 4 * 64, 0).view(np.uint32)
    assert words.tolist() == 2 * list(range(7, 39))
    gpu.from_host(address, np.arange(64, dtype=np.uint32), 0)
    assert (gpu.to_host(address, 4 * 64, 0).view(np.uint32) == np.arange(64)).all()
    del owner


def test_events_measure_what_lies_between(gpu: Backend) -> None:
    body = "const long long start = clock64(); while (clock64() - start < 400000000) out[0] = WORD;"
    function = gpu.compile(source(body)).functions["probe"]
    address, owner = gpu.allocate(4)
    start = gpu.record(0)
    gpu.launch(function, 1, 1, (np.uint64(address),), 0, 0)
    end = gpu.record(0)
    quick = gpu.record(0)
    assert gpu.elapsed_us(start, end) > 10_000
    assert gpu.elapsed_us(end, quick) < 10_000
    del owner


def test_all_of_the_lds_can_be_used(gpu: Backend) -> None:
    size_bytes = gpu.device.lds_bytes
    body = """
      extern __shared__ __align__(16) unsigned char room[];
      unsigned* words = (unsigned*)room;
      words[COUNT - 1 - threadIdx.x] = WORD + threadIdx.x;
      __syncthreads();
      out[threadIdx.x] = words[COUNT - 32 + threadIdx.x];
    """.replace("COUNT", str(size_bytes // 4))
    address, owner = gpu.allocate(4 * 32)
    function = gpu.compile(source(body)).functions["probe"]
    gpu.launch(function, 1, 32, (np.uint64(address),), size_bytes, 0)
    assert gpu.to_host(address, 4 * 32, 0).view(np.uint32).tolist() == list(range(38, 6, -1))
    del owner


def test_a_compiler_failure_has_the_slug_the_log_and_the_line(gpu: Backend) -> None:
    with pytest.raises(CompileError, match=r"probe\.hip.*2.*nonsense") as caught:
        gpu.compile(source("nonsense;", slug="b256-t256-v16-reg"))
    assert caught.value.slug == "b256-t256-v16-reg"
    assert "b256-t256-v16-reg" in str(caught.value)


def test_a_missing_entry_point_is_named_and_poisons_nothing(gpu: Backend) -> None:
    whole = source("out[0] = WORD;")
    with pytest.raises(CompileError, match="entry points"):
        gpu.compile(Source(whole.name, whole.text, whole.defines, ("absent",)))
    round_trip(gpu)


def test_a_refused_launch_is_named_and_poisons_nothing(gpu: Backend) -> None:
    address, owner = gpu.allocate(4 * 32)
    function = gpu.compile(source("out[0] = WORD;")).functions["probe"]
    with pytest.raises(LaunchError, match="2048 threads"):
        gpu.launch(function, 1, 2048, (np.uint64(address),), 0, 0)
    round_trip(gpu)
    del owner


def test_a_fault_on_the_device_is_a_launch_error() -> None:
    """In a process of its own: no later call in it can succeed."""
    code = """
import numpy as np
from rmsnorm_raw import get_backend
from rmsnorm_raw.errors import LaunchError
from rmsnorm_raw.source import Source
gpu = get_backend()
text = 'extern "C" __global__ void probe(unsigned* out) { out[threadIdx.x] = 7; }'
function = gpu.compile(Source("probe.hip", text, (), ("probe",))).functions["probe"]
gpu.launch(function, 1, 32, (np.uint64(64),), 0, 0)
try:
    gpu.synchronize(0)
except LaunchError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "only a new process helps" in done.stdout + done.stderr

"""AMD's own compiler, no device: what it makes of the kernels, and what is said when it fails."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from amd_kernels import compiled

from rmsnorm_raw.backends.isa import replay
from rmsnorm_raw.backends.offline import OfflineBackend, compile_offline
from rmsnorm_raw.backends.rocm_libraries import VARIABLE, rocm_release
from rmsnorm_raw.errors import CompileError
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import Source

pytestmark = pytest.mark.gfx950

ARCHITECTURES = ("gfx950", "gfx942")
EMPTY = Source("empty.hip", 'extern "C" __global__ void empty() {}\n', (), ("empty",), "b64-t64")


# ---- the kernels ---------------------------------------------------------------------------------


def test_a_loop_is_found_through_blocks_out_of_line(libraries: Path) -> None:
    problem = Problem.backward(32768, 1024, "bf16", need_dx=False)
    _, code = compiled(problem, "gfx950", libraries, "b256-t64-v16-reg-p4")
    groups = [each.group for each in code.kernels["rmsnorm_backward"].row_loop()]
    assert groups.count("global load 16 B") == 4


def test_a_toolchain_is_of_the_libraries_that_were_given(libraries: Path) -> None:
    toolchain = OfflineBackend("gfx950", libraries).toolchain
    assert toolchain.compiler == f"hiprtc of ROCm {rocm_release(libraries)}"


def test_equal_sources_make_equal_objects_and_knobs_do_not(libraries: Path) -> None:
    problem = Problem.forward(4096, 4096, "bf16")
    objects = [
        compiled(problem, "gfx950", libraries, slug)[1].object_digest
        for slug in ("b256-t256-v16", "b256-t256-v16", "b256-t256-v16-ss", "b256-t256-v8")
    ]
    assert objects[0] == objects[1]
    assert len(set(objects)) == 3


RING = Source(
    "ring.hip",
    r"""
typedef float Four __attribute__((ext_vector_type(4)));
__device__ __forceinline__ Four read_stage(unsigned address) {
  Four value;
#if INLINE_READS
  asm volatile("ds_read_b128 %0, %1" : "=v"(value) : "v"(address) : "memory");
  asm volatile("s_waitcnt lgkmcnt(0)" : "+v"(value) :: "memory");
#else
  value = *(__attribute__((address_space(3))) Four*)address;
#endif
  return value;
}
extern "C" __global__ void __launch_bounds__(256) ring(const float* x, Four* y, int bytes) {
  HIP_DYNAMIC_SHARED(char, lds);
  __amdgpu_buffer_rsrc_t rows = __builtin_amdgcn_make_buffer_rsrc((void*)x, 0, bytes, 0x00020000);
  __attribute__((address_space(3))) char* stages = (__attribute__((address_space(3))) char*)lds;
  __attribute__((address_space(3))) char* own =
      stages + __builtin_amdgcn_readfirstlane(threadIdx.x / 64) * 1024;
  __builtin_amdgcn_raw_ptr_buffer_load_lds(rows, own, 16, threadIdx.x * 16, 0, 0, 0);
  __builtin_amdgcn_raw_ptr_buffer_load_lds(rows, own + 4096, 16, threadIdx.x * 16 + 4096, 0, 0, 0);
  const unsigned first = (unsigned)(unsigned long long)stages + threadIdx.x * 16;
  asm volatile("s_waitcnt vmcnt(1)" ::: "memory");
  const Four one = read_stage(first);
  asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
  y[threadIdx.x] = one + read_stage(first + 4096);
}
""",
    (("INLINE_READS", "1"),),
    ("ring",),
)


def ring_waits(source: Source, libraries: Path) -> list[int | None]:
    """The last count that was waited for before each stage read, and None before any wait."""
    waits, last = [], None
    for each in compile_offline(source, "gfx950", libraries=libraries).kernels["ring"].asm:
        last = each.vmcnt if each.vmcnt is not None else last
        if each.mnemonic == "ds_read_b128":
            waits.append(last)
    return waits


def test_inline_reads_keep_a_ring_in_flight(libraries: Path) -> None:
    kernel = compile_offline(RING, "gfx950", libraries=libraries).kernels["ring"]
    assert kernel.mix["buffer load to LDS 16 B"] == 2
    assert ring_waits(RING, libraries) == [1, 0]
    assert kernel.bytes_before_first_wait == 32
    flying = [
        len(before) for each, before in replay(kernel.asm, loop=False) if each.group[:3] == "ds_"
    ]
    assert flying == [1, 0]


def test_rocm_7_0_drains_a_ring_that_the_compiler_can_see(libraries: Path) -> None:
    """Why the stage reads of the kernels are inline."""
    source = replace(RING, defines=(("INLINE_READS", "0"),))
    drains = rocm_release(libraries).startswith("7.0.")
    assert ring_waits(source, libraries)[0] == (0 if drains else 1)


# the compiler's own remark is the judge. Values kept by a lane: eight waves, then each step of the
# register file, accumulation registers (120), spills (200); and LDS that just divides gfx950's
KEPT = ((8, 20480, 256), *((n, 0, 64) for n in (20, 30, 40, 60, 90, 120, 200)))
KEEPER = r"""
extern "C" __global__ void __launch_bounds__(THREADS) keeper(float* y, int rounds) {
  float kept[KEEP];
  for (int i = 0; i < KEEP; ++i) kept[i] = y[threadIdx.x + i * THREADS];
#if LDS
  __shared__ float shared[LDS / 4];
  shared[threadIdx.x] = kept[0];
  __syncthreads();
  kept[0] = shared[threadIdx.x * 7 % THREADS];
#endif
  for (int round = 0; round < rounds; ++round)
    for (int i = 0; i < KEEP; ++i) kept[i] = kept[i] * kept[i] + kept[(i + 1) % KEEP];
  for (int i = 0; i < KEEP; ++i) y[threadIdx.x + i * THREADS] = kept[i];
}
"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_report_says_what_the_compiler_says(
    arch: str, libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIPRTC_COMPILE_OPTIONS_APPEND", "-Rpass-analysis=kernel-resource-usage")
    fresh = tmp_path / "libraries"  # another name, so that another child sees the variable
    fresh.symlink_to(libraries)
    met = set()
    for keep, lds_bytes, threads in KEPT:
        defines = (("KEEP", str(keep)), ("LDS", str(lds_bytes)), ("THREADS", str(threads)))
        source = Source("keeper.hip", KEEPER, defines, ("keeper",))
        code = compile_offline(source, arch, libraries=fresh)
        kernel = code.kernels["keeper"]
        waves = kernel.occupancy(threads).waves_per_simd
        remarks = re.findall(r"remark: +([A-Z][^:\n]*): (\d+) \[-R", code.log)
        said = {name.partition(" [")[0]: int(value) for name, value in remarks}
        assert said == {
            "TotalSGPRs": kernel.sgpr,
            "VGPRs": kernel.vgpr - kernel.agpr,
            "AGPRs": kernel.agpr,
            "ScratchSize": kernel.scratch_bytes,
            "Occupancy": waves,
            "SGPRs Spill": kernel.sgpr_spills,
            "VGPRs Spill": kernel.vgpr_spills,
            "LDS Size": kernel.lds_bytes,
        }
        met.add((waves, kernel.agpr > 0, kernel.vgpr_spills > 0))
    assert {(5, False, False), (2, False, False), (1, True, False), (1, True, True)} <= met


# ---- failures ------------------------------------------------------------------------------------


def test_a_compile_error_carries_slug_line_and_log(libraries: Path) -> None:
    source = replace(EMPTY, text=EMPTY.text + "int broken = undeclared;\n")
    with pytest.raises(CompileError) as caught:
        compile_offline(source, "gfx950", libraries=libraries)
    assert caught.value.slug == "b64-t64"
    assert "empty.hip:2:14: error: use of undeclared identifier" in caught.value.log
    assert str(caught.value).endswith("lines of empty.hip above, or use another config")


def test_a_compiler_crash_is_a_compile_error_and_the_next_source_compiles(libraries: Path) -> None:
    crashing = replace(EMPTY, text="#pragma clang __debug llvm_fatal_error\n" + EMPTY.text)
    with pytest.raises(CompileError, match="died with SIGABRT") as caught:
        compile_offline(crashing, "gfx950", libraries=libraries)
    assert "LLVM ERROR" in caught.value.log
    assert "try another ROCm release" in str(caught.value)
    assert compile_offline(EMPTY, "gfx950", libraries=libraries).kernels["empty"].vgpr >= 0


def test_a_compiler_that_does_not_end_is_stopped(libraries: Path) -> None:
    text = r"""
template <int N, int M> struct Sum { static constexpr int value = Sum<N - 1, 2 * M>::value + Sum<N - 1, 2 * M + 1>::value; };
template <int M> struct Sum<0, M> { static constexpr int value = 1; };
static_assert(Sum<28, 0>::value > 0, "2^28 instantiations");
"""  # noqa: E501
    endless = replace(EMPTY, text=text + EMPTY.text)
    with pytest.raises(CompileError, match=r"was stopped after 0\.5 s[^$]*raise timeout_s"):
        compile_offline(endless, "gfx950", libraries=libraries, timeout_s=0.5)
    assert compile_offline(EMPTY, "gfx950", libraries=libraries).kernels["empty"].scratch_bytes == 0


def test_an_entry_point_that_the_text_lacks(libraries: Path) -> None:
    source = replace(EMPTY, entry_points=("empty", "other"))
    with pytest.raises(CompileError, match="has no kernel other; it has empty"):
        compile_offline(source, "gfx950", libraries=libraries)


def test_an_installed_rocm_is_used(
    libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (VARIABLE, "ROCM_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    (tmp_path / "lib").symlink_to(libraries)
    code = compile_offline(EMPTY, "gfx950")
    assert code.release == rocm_release(libraries)
    assert re.fullmatch(r"7\.\d+\.\d+", code.release)

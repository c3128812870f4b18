from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest
from simulated import PORTABLE, Defines, compiler_name, each_compiler, run, small

from rmsnorm_raw.backends.cpu import CpuBackend, Order
from rmsnorm_raw.backends.host_compiler import compilers
from rmsnorm_raw.device import SIMULATED
from rmsnorm_raw.source import Source

each_switch = pytest.mark.parametrize("defines", [(), PORTABLE], ids=["assembly", "portable"])


@pytest.fixture(scope="module", params=compilers(), ids=compiler_name)
def wave64(request: pytest.FixtureRequest) -> CpuBackend:
    """A simulator with each compiler that is here."""
    return CpuBackend(64, compiler=request.param)


# ---- numbers -------------------------------------------------------------------------------------


def hard_floats() -> np.ndarray:
    """Float32 values that rounding gets wrong: ties and their neighbours, specials, any pattern."""
    special = [0x7F800000, 0x7F800001, 0x7FC00001, 0x7FFFFFFF, 0x7F7FFFFF, 0, 1, 0x007FFFFF]
    bf16_ties = np.arange(0x7F80, dtype=np.uint32) << 16 | 0x8000
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    f16_ties = ((halves[1:] + halves[:-1]) / 2).view(np.uint32)
    f16_overflow = np.array([65504, 65519.996, 65520, 65536], np.float32).view(np.uint32)
    ties = np.concatenate([bf16_ties, f16_ties, f16_overflow])
    anything = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, np.uint32)
    positive = np.concatenate([np.array(special, np.uint32), ties - 1, ties, ties + 1])
    return np.concatenate([positive, positive | 0x80000000, anything]).view(np.float32)


CONVERT = """
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
    bf16[i] = rr_sim_bf16_bits(in[i]);
    f16[i] = rr_sim_f16_bits(in[i]);
  }
  for (unsigned i = threadIdx.x; i < 65536; i += blockDim.x) value[i] = rr_sim_f16_value(i);
"""
CONVERT_PARAMETERS = (
    "const float* in, unsigned short* bf16, unsigned short* f16, float* value, unsigned count"
)


def test_conversions_round_to_nearest_even(wave64: CpuBackend) -> None:
    given = hard_floats()
    bf16, f16 = np.zeros(given.size, np.uint16), np.zeros(given.size, np.uint16)
    value = np.zeros(1 << 16, np.float32)
    run(wave64, small(CONVERT, CONVERT_PARAMETERS), given, bf16, f16, value, np.uint32(given.size))
    number = ~np.isnan(given)
    for bits, dtype in ((bf16, ml_dtypes.bfloat16), (f16, np.float16)):
        with np.errstate(over="ignore"):
            right = given[number].astype(dtype).view(np.uint16)
        np.testing.assert_array_equal(bits[number], right)
    sign = given.view(np.uint32)[~number] >> 31
    for bits, exponent, quiet in ((bf16[~number], 0x7F80, 0x40), (f16[~number], 0x7C00, 0x200)):
        np.testing.assert_array_equal(bits & (exponent | quiet), exponent | quiet)
        np.testing.assert_array_equal(bits >> 15, sign)
    right = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(value, right)  # NaN where NaN is right
    np.testing.assert_array_equal(np.signbit(value), np.signbit(right))


def test_arithmetic_leaves(wave64: CpuBackend) -> None:
    body = """
  out[0] = fmaf(in[0], in[0], -1.0f);
  out[1] = (float)(fma((double)in[1], (double)in[1], -1.0) * 0x1p29);
  out[2] = (float)sqrt((double)in[2]);
  out[3] = (float)fabs((double)in[3]) + fabsf(in[3]);
"""
    tiny = np.float32(2**-12)
    given = np.array([1 + tiny, 1 + 2 * tiny, 2, -3], np.float32)
    out = np.zeros(4, np.float32)
    run(wave64, small(body, "const float* in, float* out"), given, out)
    # one rounding: (1 + t)^2 - 1 = 2t + t^2 keeps t^2, which a rounded square loses
    assert out[0] == np.float32(2 * 2.0**-12 + 2.0**-24)
    assert out[1] == np.float32((4 * 2.0**-12 + 4 * 2.0**-24) * 2.0**29)
    assert out[2] == np.float32(np.sqrt(2.0))
    assert out[3] == 6


def test_reciprocal_square_root_is_rounded_once(wave64: CpuBackend) -> None:
    given = np.exp(np.random.default_rng(0).uniform(-60, 60, 64)).astype(np.float32)
    given[0] = 0
    out = np.zeros(64, np.float32)
    body = "out[threadIdx.x] = rr_sim_rsqrt(in[threadIdx.x]);"
    run(wave64, small(body, "const float* in, float* out"), given, out)
    with np.errstate(divide="ignore"):
        np.testing.assert_array_equal(out, (1 / np.sqrt(given.astype(np.float64))).astype("f4"))


# ---- lanes ---------------------------------------------------------------------------------------

LANES = np.arange(64)


def row(lanes: np.ndarray, step: np.ndarray | int) -> np.ndarray:
    """Lanes ``step`` further, or -1 where that is another row of 16."""
    source = lanes + step
    return np.where(source // 16 == lanes // 16, source, -1)


DPP = {  # control -> the lane that each lane reads, -1 for none
    0xB1: LANES ^ 1,
    0x4E: LANES ^ 2,
    0x1B: LANES ^ 3,
    0x00: LANES // 4 * 4,
    0x141: LANES ^ 7,
    0x140: LANES ^ 15,
    0x101: row(LANES, 1),
    0x10F: row(LANES, 15),
    0x111: row(LANES, -1),
    0x112: row(LANES, -2),
    0x118: row(LANES, -8),
    0x121: LANES // 16 * 16 + (LANES - 1) % 16,
    0x12C: LANES // 16 * 16 + (LANES - 12) % 16,
    0x142: np.where(LANES < 16, -1, LANES // 16 * 16 - 1),
    0x143: np.where(LANES < 32, -1, 31),
}
MASKS = ((0xF, 0xF), (0xA, 0xF), (0xC, 0xF), (0xF, 0x5))


def test_dpp_moves_lanes_as_the_isa_says(wave64: CpuBackend) -> None:
    cases = list(product(DPP, MASKS, ("true", "false")))
    body = "\n".join(
        f"out[{i} * 64 + threadIdx.x] = __builtin_amdgcn_update_dpp("
        f"1000 + (int)threadIdx.x, 2000 + (int)threadIdx.x, {control}, {rows}, {banks}, {bound});"
        for i, (control, (rows, banks), bound) in enumerate(cases)
    )
    out = np.zeros((len(cases), 64), np.int32)
    run(wave64, small(body, "int* out"), out)
    for got, (control, (rows, banks), bound) in zip(out, cases, strict=True):
        source = DPP[control]
        fallback = 0 if bound == "true" else 1000 + LANES
        enabled = (rows >> LANES // 16 & 1) & (banks >> LANES // 4 % 4 & 1)
        moved = np.where(source < 0, fallback, 2000 + source)
        np.testing.assert_array_equal(got, np.where(enabled, moved, 1000 + LANES), f"{control:#x}")


def test_permlane_swaps_and_reads(wave64: CpuBackend) -> None:
    body = """
  const unsigned a = 1000 + threadIdx.x, b = 2000 + threadIdx.x;
  auto rows = __builtin_amdgcn_permlane16_swap(a, b, false, false);
  auto halves = __builtin_amdgcn_permlane32_swap(a, b, false, false);
  unsigned* mine = out + threadIdx.x;
  mine[0] = rows[0], mine[64] = rows[1], mine[128] = halves[0], mine[192] = halves[1];
  mine[256] = __builtin_amdgcn_readlane(a, 63);
  mine[320] = __builtin_amdgcn_readfirstlane(b);
"""
    out = np.zeros((6, 64), np.uint32)
    run(wave64, small(body, "unsigned* out"), out)
    for results, size in ((out[0:2], 16), (out[2:4], 32)):
        a, b = (1000 + LANES).reshape(-1, size), (2000 + LANES).reshape(-1, size)
        a[1::2], b[0::2] = b[0::2].copy(), a[1::2].copy()
        np.testing.assert_array_equal(results, [a.ravel(), b.ravel()])
    np.testing.assert_array_equal(out[4], 1063)
    np.testing.assert_array_equal(out[5], 2000)


@each_switch
@each_compiler
def test_shuffles(command: tuple[str, ...], defines: Defines) -> None:
    body = """
  float* mine = out + threadIdx.x;
  for (int m = 1; m < 32; m *= 2) *mine += __shfl_xor_sync(0xffffffffu, *mine, m);
  bits[threadIdx.x] = __shfl_xor_sync(0xffffffffu, threadIdx.x, 5);
"""
    out = np.arange(64, dtype=np.float32)
    bits = np.zeros(64, np.uint32)
    source = small(body, "float* out, unsigned* bits", defines)
    run(CpuBackend(32, compiler=command), source, out, bits)
    np.testing.assert_array_equal(out, np.repeat([sum(range(32)), sum(range(32, 64))], 32))
    np.testing.assert_array_equal(bits, LANES ^ 5)


# ---- blocks --------------------------------------------------------------------------------------

BLOCK_SUM = """
  float v = in[blockIdx.x * blockDim.x + threadIdx.x];
  for (int m = 0; m < 2; ++m) {
    auto both = m ? __builtin_amdgcn_permlane32_swap(as_bits(v), as_bits(v), false, false)
                  : __builtin_amdgcn_permlane16_swap(as_bits(v), as_bits(v), false, false);
    v = as_float(both[0]) + as_float(both[1]);
  }
  float* scratch = (float*)rr_sim_lds();
  scratch[threadIdx.x] = v;
  __syncthreads();
  if (threadIdx.x >= 16) return;
  for (unsigned wave = 1; wave < blockDim.x / 64; ++wave) v += scratch[64 * wave + threadIdx.x];
  out[blockIdx.x * 16 + threadIdx.x] = v;
"""
CASTS = """
static inline float as_float(unsigned b) { float f; __builtin_memcpy(&f, &b, 4); return f; }
static inline unsigned as_bits(float f) { unsigned b; __builtin_memcpy(&b, &f, 4); return b; }
"""


@each_switch
@each_compiler
@pytest.mark.parametrize("order", ["forward", "reverse", "shuffle"])
def test_waves_meet_at_barriers_in_any_order(
    order: Order, command: tuple[str, ...], defines: Defines
) -> None:
    kernel = small(BLOCK_SUM, "const float* in, float* out", defines)
    source = Source(kernel.name, CASTS + kernel.text, kernel.defines, ("k",))
    given = np.random.default_rng(1).integers(-99, 99, (3, 16, 4, 16)).astype(np.float32)
    out = np.zeros((3, 16), np.float32)
    backend = CpuBackend(64, order=order, compiler=command)
    run(backend, source, given, out, grid=3, block=1024, lds_bytes=4096)
    np.testing.assert_array_equal(out, given.sum((1, 2)))


def test_lds_starts_as_nan_in_every_block(wave64: CpuBackend) -> None:
    body = """
  unsigned short* lds = (unsigned short*)rr_sim_lds();
  out[blockIdx.x * blockDim.x + threadIdx.x] = lds[threadIdx.x];
  if (threadIdx.x == 0) out[0] |= (unsigned)(unsigned long long)lds % 16 << 16;
  lds[threadIdx.x] = 0;
"""
    out = np.zeros((2, 64), np.uint32)
    run(wave64, small(body, "unsigned* out"), out, grid=2, lds_bytes=128)
    np.testing.assert_array_equal(out, 0xFFFF)


def test_the_last_block_sees_what_the_others_stored(wave64: CpuBackend) -> None:
    body = """
  partial[blockIdx.x * 64 + threadIdx.x] = threadIdx.x + blockIdx.x;
  __threadfence();
  unsigned* last = (unsigned*)rr_sim_lds();
  if (threadIdx.x == 0) *last = atomicAdd(count, 2u) == 2 * (gridDim.x - 1);
  __syncthreads();
  if (!*last) return;
  for (unsigned i = threadIdx.x; i < 64 * gridDim.x; i += 64) out[threadIdx.x] += partial[i];
"""
    out, partial, count = np.zeros(64), np.zeros((3, 64)), np.zeros(1, np.uint32)
    source = small(body, "double* out, double* partial, unsigned* count")
    run(wave64, source, out, partial, count, grid=3, lds_bytes=4)
    np.testing.assert_array_equal(out, 3 * np.arange(64) + 3)
    assert count[0] == 6


def test_index_variables(wave64: CpuBackend) -> None:
    body = """
  unsigned* mine = out + 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  mine[0] = threadIdx.x, mine[1] = blockIdx.x, mine[2] = blockDim.x, mine[3] = gridDim.x;
"""
    out = np.zeros((3, 128, 4), np.uint32)
    run(wave64, small(body, "unsigned* out"), out, grid=3, block=128)
    block, thread = np.mgrid[:3, :128]
    np.testing.assert_array_equal(
        out, np.stack([thread, block, np.full_like(block, 128), np.full_like(block, 3)], -1)
    )


def test_the_largest_lds_of_each_wave() -> None:
    for wave, device in SIMULATED.items():
        out = np.zeros(1, np.float32)
        body = f"((char*)rr_sim_lds())[{device.lds_bytes - 1}] = 1; out[0] = 1;"
        run(CpuBackend(wave), small(body), out, lds_bytes=device.lds_bytes)
        assert out[0] == 1

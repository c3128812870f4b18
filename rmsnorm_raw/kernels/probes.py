"""The three probes: what a device's memory gives to the plainest code that reads and writes it.

Version 1: 16 bytes a lane and access, RR_UNROLL of them a step, cache policies by define; one step
a block or a persistent grid, as launched. How many loads precede the first store is the compiler's
choice: NVRTC 13.5 begins with 4 or 5 of 8 (block 512), which is why the unroll is searched.

The bytes must fill whole steps of RR_BLOCK * RR_UNROLL vectors, so no access is masked.
"""

ENTRY_POINTS = ("probe_copy", "probe_write", "probe_add")

TEXT = r"""
typedef Words<16> Vector;
constexpr u64 STEP = (u64)RR_BLOCK * RR_UNROLL;

RR_FN u64 first_vector() { return blockIdx.x * STEP + threadIdx.x; }
RR_FN u64 grid_vectors() { return gridDim.x * STEP; }

RR_FN void load_step(Vector (&v)[RR_UNROLL], const void* base, u64 first) {
#pragma unroll
  for (int k = 0; k < RR_UNROLL; ++k)
    v[k] = load_words<RR_LOAD_POLICY, 16>((const Vector*)base + first + k * RR_BLOCK);
}

RR_FN void store_step(void* base, u64 first, const Vector (&v)[RR_UNROLL]) {
#pragma unroll
  for (int k = 0; k < RR_UNROLL; ++k)
    store_words<RR_STORE_POLICY, 16>((Vector*)base + first + k * RR_BLOCK, v[k]);
}

// out = a
extern "C" __global__ void RR_BOUNDS probe_copy(
    void* __restrict__ out, const void* __restrict__ a, const void* __restrict__, u64 vectors) {
  for (u64 first = first_vector(); first < vectors; first += grid_vectors()) {
    Vector v[RR_UNROLL];
    load_step(v, a, first);
    store_step(out, first, v);
  }
}

// Every word of vector i is i, so that a store to the wrong place shows.
extern "C" __global__ void RR_BOUNDS probe_write(
    void* __restrict__ out, const void* __restrict__, const void* __restrict__, u64 vectors) {
  for (u64 first = first_vector(); first < vectors; first += grid_vectors()) {
    Vector v[RR_UNROLL];
#pragma unroll
    for (int k = 0; k < RR_UNROLL; ++k) {
      const u32 word = (u32)(first + k * RR_BLOCK);
      v[k] = {{word, word, word, word}};
    }
    store_step(out, first, v);
  }
}

// out = a + b, fp32
extern "C" __global__ void RR_BOUNDS probe_add(
    void* __restrict__ out, const void* __restrict__ a, const void* __restrict__ b, u64 vectors) {
  for (u64 first = first_vector(); first < vectors; first += grid_vectors()) {
    Vector v[RR_UNROLL], w[RR_UNROLL];
    load_step(v, a, first);
    load_step(w, b, first);
#pragma unroll
    for (int k = 0; k < RR_UNROLL; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) v[k].w[e] = as_bits(as_float(v[k].w[e]) + as_float(w[k].w[e]));
    }
    store_step(out, first, v);
  }
}
"""

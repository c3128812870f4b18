"""RMSNorm forward: y = x * rstd * weight, rstd = rsqrt(mean(x^2) + eps), one row at a time.

Version 1, ``reg``: a row is read once and kept in registers; one block for one or more rows.
Version 2, ``2p``:  a row too wide to keep is read again, from cache where it still lies there.

A lane's squares go into four chains that end in a tree, lanes and waves add up as trees too; fp32
throughout. Arithmetic of the second pass: (x * rstd) * weight, rounded once, at the store.
"""

TEXT = r"""
constexpr int PER_CHUNK = RR_THREADS_PER_ROW * RR_ELEMENTS;  // elements that a row's lanes move at once
// the last chunk of a row needs no mask where N is known and divides
[[maybe_unused]] constexpr bool FULL_CHUNKS = RR_COLS != 0 && RR_COLS % PER_CHUNK == 0;
constexpr bool HAS_WEIGHT = RR_HAS_WEIGHT, STORE_RSTD = RR_STORE_RSTD;
typedef Pack<RR_X, RR_ELEMENTS> XPack;
typedef Pack<RR_W, RR_ELEMENTS> WPack;

RR_FN void add_squares(const XPack& x, float (&chain)[4]) {
#pragma unroll
  for (int e = 0; e < RR_ELEMENTS; ++e) chain[e % 4] = fmaf(x[e], x[e], chain[e % 4]);
}

RR_FN void store_normalised(void* y, u64 element, const XPack& x, const WPack& w, float rstd) {
  float out[RR_ELEMENTS];
#pragma unroll
  for (int e = 0; e < RR_ELEMENTS; ++e) {
    out[e] = x[e] * rstd;
    if constexpr (HAS_WEIGHT) out[e] *= w[e];
  }
  store_pack<RR_X, RR_ELEMENTS, RR_STORE_POLICY>(y, element, out);
}

// x, y: (rows, cols), rows x_stride and y_stride elements apart. weight: (cols). rstd: (rows) fp32.
// LDS: one float a wave.
extern "C" __global__ void RR_BOUNDS rmsnorm_forward(
    const void* __restrict__ x, i64 x_stride, const void* __restrict__ weight, void* __restrict__ y,
    i64 y_stride, float* __restrict__ rstd, i64 rows, u32 run_time_cols, float eps) {
  RR_LDS(scratch);
  const u32 cols = RR_COLS ? RR_COLS : run_time_cols;
  const u32 vectors = cols / RR_ELEMENTS;
  const u32 lane = threadIdx.x % RR_THREADS_PER_ROW;
  const i64 row = (i64)blockIdx.x * BLOCK_ROWS + threadIdx.x / RR_THREADS_PER_ROW;
  const bool row_exists = BLOCK_ROWS == 1 || row < rows;
  const u64 x_row = (u64)(row * x_stride), y_row = (u64)(row * y_stride);
  float chain[4] = {0.0f, 0.0f, 0.0f, 0.0f};

#if RR_PATH == PATH_REGISTERS
  XPack kept[RR_CHUNKS];
#pragma unroll
  for (int c = 0; c < RR_CHUNKS; ++c) {
    const u32 at = c * RR_THREADS_PER_ROW + lane;
    const bool inside = row_exists && (FULL_CHUNKS || at < vectors);
    kept[c] = inside ? load_pack<RR_X, RR_ELEMENTS, RR_LOAD_POLICY>(x, x_row + at * RR_ELEMENTS)
                     : zero_pack<RR_X, RR_ELEMENTS>();
  }
  // Few registers: the weight is asked for with the row, so that a short launch waits only once.
  constexpr bool EARLY_WEIGHT = HAS_WEIGHT && RR_CHUNKS * (XPack::BYTES + WPack::BYTES) <= 128;
  WPack early[EARLY_WEIGHT ? RR_CHUNKS : 1];
  if constexpr (EARLY_WEIGHT) {
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c) {
      const u32 at = c * RR_THREADS_PER_ROW + lane;
      early[c] = FULL_CHUNKS || at < vectors
                     ? load_pack<RR_W, RR_ELEMENTS, POLICY_DEFAULT>(weight, (u64)at * RR_ELEMENTS)
                     : zero_pack<RR_W, RR_ELEMENTS>();
    }
  }
#pragma unroll
  for (int c = 0; c < RR_CHUNKS; ++c) add_squares(kept[c], chain);
#else
  float tile_sum = 0.0f;
  for (u32 tile = lane; tile < vectors; tile += TILE_CHUNKS * RR_THREADS_PER_ROW) {
    XPack part[TILE_CHUNKS];
#pragma unroll
    for (int c = 0; c < TILE_CHUNKS; ++c) {
      const u32 at = tile + c * RR_THREADS_PER_ROW;
      part[c] = row_exists && at < vectors
                    ? load_pack<RR_X, RR_ELEMENTS, RR_LOAD_POLICY>(x, x_row + (u64)at * RR_ELEMENTS)
                    : zero_pack<RR_X, RR_ELEMENTS>();
    }
    float tile_chain[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < TILE_CHUNKS; ++c) add_squares(part[c], tile_chain);
    tile_sum += tree_sum<4>(tile_chain);
  }
  chain[0] = tile_sum;
#endif

  float sum[1] = {tree_sum<4>(chain)};
  row_sum(sum, scratch);
  const float scale = reciprocal_sqrt(sum[0] * (1.0f / (float)cols) + eps);
  if (STORE_RSTD && lane == 0 && row_exists) rstd[row] = scale;
  if (!row_exists) return;

#if RR_PATH == PATH_REGISTERS
#pragma unroll
  for (int c = 0; c < RR_CHUNKS; ++c) {
    const u32 at = c * RR_THREADS_PER_ROW + lane;
    if (FULL_CHUNKS || at < vectors) {
      WPack w = {};
      if constexpr (EARLY_WEIGHT) {
        w = early[c];
      } else if constexpr (HAS_WEIGHT) {
        w = load_pack<RR_W, RR_ELEMENTS, POLICY_DEFAULT>(weight, (u64)at * RR_ELEMENTS);
      }
      store_normalised(y, y_row + (u64)at * RR_ELEMENTS, kept[c], w, scale);
    }
  }
#else
#pragma unroll TILE_CHUNKS
  for (u32 at = lane; at < vectors; at += RR_THREADS_PER_ROW) {
    const XPack again = load_pack<RR_X, RR_ELEMENTS, RR_LOAD_POLICY>(x, x_row + (u64)at * RR_ELEMENTS);
    WPack w = {};
    if constexpr (HAS_WEIGHT)
      w = load_pack<RR_W, RR_ELEMENTS, POLICY_DEFAULT>(weight, (u64)at * RR_ELEMENTS);
    store_normalised(y, y_row + (u64)at * RR_ELEMENTS, again, w, scale);
  }
#endif
}
"""

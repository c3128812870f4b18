"""RMSNorm backward: dx and dW from dout, x, weight and rstd.

With xhat = x * rstd and g = dout * weight:

    dx = rstd * (g - xhat * mean(g * xhat)),    dW = sum over rows of dout * xhat

Version 1, ``reg``: a persistent grid; every program keeps its weight and its share of dW in fp32
    registers, reads each of its rows once, and leaves one row of partial sums.
Version 2, ``2p``:  rows too wide to keep. ``rmsnorm_backward_rows`` leaves rstd and mean(g * xhat) of
    each row in the workspace; ``rmsnorm_backward_columns`` then works on column tiles, each with a
    share of the rows, so that few wide rows still fill the device.
Both end with ``rmsnorm_dweight``, which adds the partial rows in a fixed order and rounds once, so dW
is the same bits in every run.
"""

TEXT = r"""
constexpr int PER_CHUNK = RR_THREADS_PER_ROW * RR_ELEMENTS;
[[maybe_unused]] constexpr bool FULL_CHUNKS = RR_COLS != 0 && RR_COLS % PER_CHUNK == 0;
typedef Pack<RR_X, RR_ELEMENTS> XPack;
typedef Pack<RR_W, RR_ELEMENTS> WPack;
constexpr bool HAS_WEIGHT = RR_HAS_WEIGHT, HAS_RSTD = RR_HAS_RSTD;
constexpr bool NEED_DX = RR_NEED_DX, NEED_DW = RR_NEED_DW;
// mean(g * xhat) is needed for dx; a row's own rstd only where none was given
constexpr bool SUMS_NEEDED = NEED_DX || !HAS_RSTD;

RR_FN XPack load_row(const void* base, u64 element) {
  return load_pack<RR_X, RR_ELEMENTS, RR_LOAD_POLICY>(base, element);
}
RR_FN WPack load_w(const void* weight, u32 at) {
  return load_pack<RR_W, RR_ELEMENTS, POLICY_DEFAULT>(weight, (u64)at * RR_ELEMENTS);
}
RR_FN float weighted(const XPack& dout, const WPack& w, int e) {
  return HAS_WEIGHT ? dout[e] * w[e] : dout[e];
}

// Four chains each of sum(g * x) and, where rstd has to be found, sum(x^2).
struct RowChains {
  float dot[4] = {0.0f, 0.0f, 0.0f, 0.0f}, square[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  RR_FN void add(const XPack& dout, const XPack& x, const WPack& w) {
#pragma unroll
    for (int e = 0; e < RR_ELEMENTS; ++e) {
      if (NEED_DX) dot[e % 4] = fmaf(weighted(dout, w, e), x[e], dot[e % 4]);
      if (!HAS_RSTD) square[e % 4] = fmaf(x[e], x[e], square[e % 4]);
    }
  }
};

struct RowResult { float rstd, mean; };  // mean(g * xhat)

RR_FN RowResult finish_row(float dot, float square, float given_rstd, u32 cols, float eps, float* scratch) {
  const float inverse_cols = 1.0f / (float)cols;
  RowResult row = {given_rstd, 0.0f};
  if constexpr (HAS_RSTD) {
    float sum[1] = {dot};
    row_sum(sum, scratch);
    row.mean = sum[0] * row.rstd * inverse_cols;
  } else {
    float sum[2] = {dot, square};
    row_sum(sum, scratch);
    row.rstd = reciprocal_sqrt(sum[1] * inverse_cols + eps);
    row.mean = sum[0] * row.rstd * inverse_cols;
  }
  return row;
}

RR_FN void store_dx(void* dx, u64 element, const XPack& dout, const XPack& x, const WPack& w, RowResult row) {
  float out[RR_ELEMENTS];
#pragma unroll
  for (int e = 0; e < RR_ELEMENTS; ++e)
    out[e] = (weighted(dout, w, e) - x[e] * row.rstd * row.mean) * row.rstd;
  store_pack<RR_X, RR_ELEMENTS, RR_STORE_POLICY>(dx, element, out);
}

#if RR_PATH == PATH_REGISTERS
// dout, x, dx: (rows, cols) with row strides in elements. weight: (cols). rstd: (rows) fp32.
// partial: (gridDim.x, cols) fp32, one row a program.
// LDS: two areas of 2 floats a wave; then, for more rows a block, the block's partial row.
extern "C" __global__ void RR_BOUNDS rmsnorm_backward(
    const void* __restrict__ dout, i64 dout_stride, const void* __restrict__ x, i64 x_stride,
    const void* __restrict__ weight, const float* __restrict__ rstd, void* __restrict__ dx, i64 dx_stride,
    float* __restrict__ partial, i64 rows, u32 run_time_cols, float eps) {
  RR_LDS(lds);
  const u32 cols = RR_COLS ? RR_COLS : run_time_cols;
  const u32 vectors = cols / RR_ELEMENTS;
  const u32 lane = threadIdx.x % RR_THREADS_PER_ROW;
  const u32 row_slot = threadIdx.x / RR_THREADS_PER_ROW;

  WPack w[RR_CHUNKS];
  float dweight[RR_CHUNKS][RR_ELEMENTS];
#pragma unroll
  for (int c = 0; c < RR_CHUNKS; ++c) {
    const u32 at = c * RR_THREADS_PER_ROW + lane;
    w[c] = zero_pack<RR_W, RR_ELEMENTS>();
    if (HAS_WEIGHT && NEED_DX && (FULL_CHUNKS || at < vectors)) w[c] = load_w(weight, at);
#pragma unroll
    for (int e = 0; e < RR_ELEMENTS; ++e) dweight[c][e] = 0.0f;
  }

  int area = 0;
  for (i64 first = (i64)blockIdx.x * BLOCK_ROWS; first < rows; first += (i64)gridDim.x * BLOCK_ROWS) {
    const i64 row = first + row_slot;
    const bool row_exists = BLOCK_ROWS == 1 || row < rows;
    const u64 x_row = (u64)(row * x_stride), dout_row = (u64)(row * dout_stride);
    XPack x_kept[RR_CHUNKS], dout_kept[RR_CHUNKS];
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c) {
      const u32 at = c * RR_THREADS_PER_ROW + lane;
      const bool inside = row_exists && (FULL_CHUNKS || at < vectors);
      x_kept[c] = inside ? load_row(x, x_row + at * RR_ELEMENTS) : zero_pack<RR_X, RR_ELEMENTS>();
      dout_kept[c] = inside ? load_row(dout, dout_row + at * RR_ELEMENTS) : zero_pack<RR_X, RR_ELEMENTS>();
    }
    RowResult result = {HAS_RSTD && row_exists ? rstd[row] : 0.0f, 0.0f};
    if constexpr (SUMS_NEEDED) {
      RowChains chains;
#pragma unroll
      for (int c = 0; c < RR_CHUNKS; ++c) chains.add(dout_kept[c], x_kept[c], w[c]);
      float* scratch = lds + area * 2 * (RR_BLOCK / RR_WAVE);
      area ^= 1;
      result = finish_row(tree_sum<4>(chains.dot), tree_sum<4>(chains.square), result.rstd, cols, eps, scratch);
    }
    if (row_exists) {
#pragma unroll
      for (int c = 0; c < RR_CHUNKS; ++c) {
        const u32 at = c * RR_THREADS_PER_ROW + lane;
        if (NEED_DW) {
#pragma unroll
          for (int e = 0; e < RR_ELEMENTS; ++e)
            dweight[c][e] = fmaf(dout_kept[c][e], x_kept[c][e] * result.rstd, dweight[c][e]);
        }
        if (NEED_DX && (FULL_CHUNKS || at < vectors)) {
          const u64 element = (u64)(row * dx_stride) + at * RR_ELEMENTS;
          store_dx(dx, element, dout_kept[c], x_kept[c], w[c], result);
        }
      }
    }
  }

#if RR_NEED_DW
  // The rows of a block take turns to add into LDS, element-major so that no two lanes share a bank.
  float* shared = lds + 4 * (RR_BLOCK / RR_WAVE);
#pragma unroll 1
  for (u32 turn = 1; turn < BLOCK_ROWS; ++turn) {
    if (row_slot == turn) {
#pragma unroll
      for (int c = 0; c < RR_CHUNKS; ++c)
#pragma unroll
        for (int e = 0; e < RR_ELEMENTS; ++e) {
          float* sum = shared + (c * RR_ELEMENTS + e) * RR_THREADS_PER_ROW + lane;
          *sum = turn == 1 ? dweight[c][e] : *sum + dweight[c][e];
        }
    }
    __syncthreads();
  }
  if (row_slot == 0) {
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c) {
      const u32 at = c * RR_THREADS_PER_ROW + lane;
      if (BLOCK_ROWS > 1) {
#pragma unroll
        for (int e = 0; e < RR_ELEMENTS; ++e)
          dweight[c][e] += shared[(c * RR_ELEMENTS + e) * RR_THREADS_PER_ROW + lane];
      }
      if (FULL_CHUNKS || at < vectors)
        store_pack<FP32, RR_ELEMENTS, POLICY_DEFAULT>(
            partial, (u64)blockIdx.x * cols + at * RR_ELEMENTS, dweight[c]);
    }
  }
#endif
}

#else
// Leaves {rstd, mean(g * xhat)} of each row in row_results: (rows, 2) fp32. LDS: 2 floats a wave.
extern "C" __global__ void RR_BOUNDS rmsnorm_backward_rows(
    const void* __restrict__ dout, i64 dout_stride, const void* __restrict__ x, i64 x_stride,
    const void* __restrict__ weight, const float* __restrict__ rstd, float* __restrict__ row_results,
    i64 rows, u32 run_time_cols, float eps) {
  RR_LDS(scratch);
  const u32 cols = RR_COLS ? RR_COLS : run_time_cols;
  const u32 vectors = cols / RR_ELEMENTS;
  const u32 lane = threadIdx.x % RR_THREADS_PER_ROW;
  const i64 row = (i64)blockIdx.x * BLOCK_ROWS + threadIdx.x / RR_THREADS_PER_ROW;
  const bool row_exists = BLOCK_ROWS == 1 || row < rows;
  const u64 x_row = (u64)(row * x_stride), dout_row = (u64)(row * dout_stride);
  float dot = 0.0f, square = 0.0f;
  if (SUMS_NEEDED && row_exists) {
    for (u32 tile = lane; tile < vectors; tile += TILE_CHUNKS * RR_THREADS_PER_ROW) {
      RowChains chains;
#pragma unroll
      for (int c = 0; c < TILE_CHUNKS; ++c) {
        const u32 at = tile + c * RR_THREADS_PER_ROW;
        if (at < vectors) {
          WPack w = zero_pack<RR_W, RR_ELEMENTS>();
          if constexpr (HAS_WEIGHT && NEED_DX) w = load_w(weight, at);
          const u64 element = (u64)at * RR_ELEMENTS;
          const XPack dout_part = NEED_DX ? load_row(dout, dout_row + element) : zero_pack<RR_X, RR_ELEMENTS>();
          chains.add(dout_part, load_row(x, x_row + element), w);
        }
      }
      dot += tree_sum<4>(chains.dot);
      square += tree_sum<4>(chains.square);
    }
  }
  const float given = HAS_RSTD && row_exists ? rstd[row] : 0.0f;
  const RowResult result = finish_row(dot, square, given, cols, eps, scratch);
  if (lane == 0 && row_exists) {
    row_results[2 * row] = result.rstd;
    row_results[2 * row + 1] = result.mean;
  }
}

// A block takes one tile of RR_BLOCK vectors of columns and every `shares`-th row; gridDim.x is
// tiles * shares. partial: (shares, cols) fp32. No LDS, no barrier.
extern "C" __global__ void RR_BOUNDS rmsnorm_backward_columns(
    const void* __restrict__ dout, i64 dout_stride, const void* __restrict__ x, i64 x_stride,
    const void* __restrict__ weight, const float* __restrict__ rstd, const float* __restrict__ row_results,
    void* __restrict__ dx, i64 dx_stride, float* __restrict__ partial, i64 rows, u32 run_time_cols,
    u32 shares) {
  const u32 cols = RR_COLS ? RR_COLS : run_time_cols;
  const u32 at = blockIdx.x / shares * RR_BLOCK + threadIdx.x;
  const u32 share = blockIdx.x % shares;
  if (at >= cols / RR_ELEMENTS) return;
  const u64 column = (u64)at * RR_ELEMENTS;
  WPack w = zero_pack<RR_W, RR_ELEMENTS>();
  if constexpr (HAS_WEIGHT && NEED_DX) w = load_w(weight, at);
  float dweight[RR_ELEMENTS] = {};
#pragma unroll TILE_CHUNKS
  for (i64 row = share; row < rows; row += shares) {
    const XPack dout_part = load_row(dout, (u64)(row * dout_stride) + column);
    const XPack x_part = load_row(x, (u64)(row * x_stride) + column);
    RowResult result = {0.0f, 0.0f};
    if constexpr (SUMS_NEEDED) {
      result.rstd = row_results[2 * row];
      result.mean = row_results[2 * row + 1];
    } else {
      result.rstd = rstd[row];
    }
    if (NEED_DW) {
#pragma unroll
      for (int e = 0; e < RR_ELEMENTS; ++e)
        dweight[e] = fmaf(dout_part[e], x_part[e] * result.rstd, dweight[e]);
    }
    if (NEED_DX) store_dx(dx, (u64)(row * dx_stride) + column, dout_part, x_part, w, result);
  }
  if (NEED_DW)
    store_pack<FP32, RR_ELEMENTS, POLICY_DEFAULT>(partial, (u64)share * cols + column, dweight);
}
#endif

#if RR_NEED_DW
// Adds `partials` rows of fp32 sums, 32 columns a block: lane groups take every FINISH_GROUPS-th row, then
// their sums meet in LDS as a tree. dweight: (cols) in its own dtype. LDS: FINISH_BLOCK floats.
constexpr int FINISH_BLOCK = 256, FINISH_COLUMNS = 32, FINISH_GROUPS = FINISH_BLOCK / FINISH_COLUMNS;
extern "C" __global__ void __launch_bounds__(FINISH_BLOCK) rmsnorm_dweight(
    const float* __restrict__ partial, u32 partials, u32 cols, void* __restrict__ dweight) {
  RR_LDS(lds);
  const u32 group = threadIdx.x / FINISH_COLUMNS, in_block = threadIdx.x % FINISH_COLUMNS;
  const u32 column = blockIdx.x * FINISH_COLUMNS + in_block;
  float chain[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (column < cols) {
    for (u32 first = group; first < partials; first += 4 * FINISH_GROUPS) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const u32 row = first + k * FINISH_GROUPS;
        if (row < partials) chain[k] += partial[(u64)row * cols + column];
      }
    }
  }
  lds[threadIdx.x] = tree_sum<4>(chain);
  __syncthreads();
  if (group == 0 && column < cols) {
    const float sum[1] = {tree_sum<FINISH_GROUPS>(lds + in_block, FINISH_COLUMNS)};
    store_pack<RR_W, 1, POLICY_DEFAULT>(dweight, column, sum);
  }
}
#endif
"""


// Leaves {rstd, mean(g * xhat)} of each row in row_results: (rows, 2) fp32. LDS: 2 floats a wave.
extern "C" __global__ void RR_BOUNDS rmsnorm_backward_rows(
    const void* __restrict__ dout, i64 dout_stride, const void* __restrict__ x, i64 x_stride,
    const void* __restrict__ weight, const float* __restrict__ rstd,
    float* __restrict__ row_results, i64 rows, u32 run_time_cols, float eps) {
  RR_LDS(area);
  const u32 cols = RR_COLS ? RR_COLS : run_time_cols;
  const u32 vectors = cols / RR_ELEMENTS;
  const u32 lane = threadIdx.x % RR_THREADS_PER_ROW;
  const i64 row = (i64)blockIdx.x * BLOCK_ROWS + threadIdx.x / RR_THREADS_PER_ROW;
  const bool row_exists = BLOCK_ROWS == 1 || row < rows;
  const u64 x_row = (u64)(row * x_stride), dout_row = (u64)(row * dout_stride);
  float dot = 0.0f, square = 0.0f;
  if (row_exists) {
    for (u32 tile = lane; tile < vectors; tile += RR_TILE_CHUNKS * RR_THREADS_PER_ROW) {
      RowChains chains;
#pragma unroll
      for (int c = 0; c < RR_TILE_CHUNKS; ++c) {
        const u32 at = tile + c * RR_THREADS_PER_ROW;
        if (at < vectors) {
          const u64 element = (u64)at * RR_ELEMENTS;
          WPack w = {};
          DPack dout_part = {};
          if constexpr (HAS_WEIGHT && NEED_DX) w = load_weight(weight, element);
          if constexpr (NEED_DX) dout_part = load_dout(dout, dout_row + element);
          chains.add(dout_part, load_vector(x, x_row + element), w);
        }
      }
      dot += tree_sum(chains.dot);
      square += tree_sum(chains.square);
    }
  }
  const float given = HAS_RSTD && row_exists ? rstd[row] : 0.0f;
  const RowResult result = finish_row(dot, square, given, cols, eps, area);
  if (lane == 0 && row_exists) {
    row_results[2 * row] = result.rstd;
    row_results[2 * row + 1] = result.mean;
  }
}

// A block takes one tile of RR_BLOCK vectors of columns and every `shares`-th row; gridDim.x is
// tiles * shares. partial: (shares, cols) fp32. No LDS, no barrier.
extern "C" __global__ void RR_BOUNDS rmsnorm_backward_columns(
    const void* __restrict__ dout, i64 dout_stride, const void* __restrict__ x, i64 x_stride,
    const void* __restrict__ weight, const float* __restrict__ rstd,
    const float* __restrict__ row_results, void* __restrict__ dx, i64 dx_stride,
    float* __restrict__ partial, i64 rows, u32 run_time_cols, u32 shares RR_BACKWARD_EXTRAS) {
  const u32 cols = RR_COLS ? RR_COLS : run_time_cols;
  const u32 at = blockIdx.x / shares * RR_BLOCK + threadIdx.x;
  const u32 share = blockIdx.x % shares;
  if (at >= cols / RR_ELEMENTS) return;
  const u64 column = (u64)at * RR_ELEMENTS;
  WPack w = {};
  if constexpr (HAS_WEIGHT && NEED_DX) w = load_weight(weight, column);
  float sums[RR_ELEMENTS] = {};
#if RR_EXTRAS
  float bias_sums[RR_ELEMENTS] = {};
#endif
#pragma unroll RR_TILE_CHUNKS
  for (i64 row = share; row < rows; row += shares) {
    const DPack dout_part = load_dout(dout, (u64)(row * dout_stride) + column);
    const XPack x_part = load_vector(x, (u64)(row * x_stride) + column);
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
        sums[e] = fmaf(dout_part[e], x_part[e] * result.rstd, sums[e]);
    }
#if RR_EXTRAS
    if (HAS_BIAS) {
#pragma unroll
      for (int e = 0; e < RR_ELEMENTS; ++e) bias_sums[e] += dout_part[e];
    }
    GPack beside = {};
    if constexpr (NEED_DX && HAS_RESIDUAL_OUT)
      beside = load_beside(dresidual_out, (u64)(row * dresidual_out_stride) + column);
    if (NEED_DX)
      store_gradient(dx, (u64)(row * dx_stride) + column, dresidual,
                     (u64)(row * dresidual_stride) + column, dout_part, x_part, w, beside, result);
#else
    if (NEED_DX) store_dx(dx, (u64)(row * dx_stride) + column, dout_part, x_part, w, result);
#endif
  }
#if RR_EXTRAS
  if (HAS_BIAS)
    store_pack<FP32, RR_ELEMENTS, POLICY_DEFAULT>(
        bias_partial, (u64)share * cols + column, bias_sums);
#endif
  if (NEED_DW)
    store_pack<FP32, RR_ELEMENTS, POLICY_DEFAULT>(partial, (u64)share * cols + column, sums);
}


constexpr bool HAS_RSTD = RR_HAS_RSTD;
constexpr bool NEED_DX = RR_NEED_DX, NEED_DW = RR_NEED_DW;
// mean(g * xhat) is needed for dx; a row's own rstd only where none was given
constexpr bool SUMS_NEEDED = NEED_DX || !HAS_RSTD;

#if RR_EXTRAS
typedef Pack<RR_Y, RR_ELEMENTS> DPack;             // dout
typedef Pack<RR_RESIDUAL_OUT, RR_ELEMENTS> GPack;  // the gradient of residual_out
RR_FN DPack load_dout(const void* dout, u64 element) {
  return load_pack<RR_Y, RR_ELEMENTS, RR_LOAD_POLICY>(dout, element);
}
RR_FN GPack load_beside(const void* dresidual_out, u64 element) {
  return load_pack<RR_RESIDUAL_OUT, RR_ELEMENTS, RR_LOAD_POLICY>(dresidual_out, element);
}
#else
typedef XPack DPack;
RR_FN DPack load_dout(const void* dout, u64 element) { return load_vector(dout, element); }
#endif
#if defined(RR_CHUNKS)
typedef DPack DRow[RR_CHUNKS];  // of dout
// What a lane keeps of the gradient of residual_out, where there is one.
struct Beside {
#if RR_EXTRAS && RR_HAS_RESIDUAL_OUT
  GPack row[RR_CHUNKS];
#endif
};
#endif

RR_FN float weighted(const DPack& dout, const WPack& w, int e) {
  return HAS_WEIGHT ? dout[e] * weight_at(w, e) : dout[e];
}

// Four chains each of sum(g * x) and, where rstd has to be found, sum(x^2).
struct RowChains {
  float dot[4] = {0.0f, 0.0f, 0.0f, 0.0f}, square[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  RR_FN void add(const DPack& dout, const XPack& x, const WPack& w) {
#pragma unroll
    for (int e = 0; e < RR_ELEMENTS; ++e) {
      if (NEED_DX) dot[e % 4] = fmaf(weighted(dout, w, e), x[e], dot[e % 4]);
      if (!HAS_RSTD) square[e % 4] = fmaf(x[e], x[e], square[e % 4]);
    }
  }
};

struct RowResult { float rstd, mean; };  // mean(g * xhat)

RR_FN RowResult finish_row(float dot, float square, float given_rstd, u32 cols, float eps,
                           float* area) {
  const float inverse_cols = 1.0f / (float)cols;
  float rstd = given_rstd;
  if constexpr (HAS_RSTD) {
    float sum[1] = {dot};
    row_sum(sum, area);
    dot = sum[0];
  } else {
    float sum[2] = {dot, square};
    row_sum(sum, area);
    dot = sum[0];
    rstd = reciprocal_sqrt(sum[1] * inverse_cols + eps);
  }
  return {rstd, dot * rstd * inverse_cols};
}

RR_FN float dx_of(const DPack& dout, const XPack& x, const WPack& w, RowResult row, int e) {
  return (weighted(dout, w, e) - x[e] * row.rstd * row.mean) * row.rstd;
}
#if !RR_EXTRAS
RR_FN void store_dx(void* dx, u64 element, const DPack& dout, const XPack& x, const WPack& w,
                    RowResult row) {
  float out[RR_ELEMENTS];
#pragma unroll
  for (int e = 0; e < RR_ELEMENTS; ++e) out[e] = dx_of(dout, x, w, row, e);
  store_pack<RR_X, RR_ELEMENTS, RR_STORE_POLICY>(dx, element, out);
}
#else
// The gradient of x + residual: the norm's, and that of residual_out; dresidual, where there is
// one, is the same in another dtype.
RR_FN void store_gradient(void* dx, u64 dx_at, void* dresidual, u64 dresidual_at,
                          const DPack& dout, const XPack& x, const WPack& w, const GPack& beside,
                          RowResult row) {
  float out[RR_ELEMENTS];
#pragma unroll
  for (int e = 0; e < RR_ELEMENTS; ++e) {
    out[e] = dx_of(dout, x, w, row, e);
    if constexpr (HAS_RESIDUAL_OUT) out[e] += beside[e];
  }
  store_pack<RR_DX, RR_ELEMENTS, RR_STORE_POLICY>(dx, dx_at, out);
  if constexpr (HAS_RESIDUAL)
    store_pack<RR_RESIDUAL, RR_ELEMENTS, RR_STORE_POLICY>(dresidual, dresidual_at, out);
}
#endif

#if RR_PATH != PATH_TWO_PASS
// dout, x, dx: (rows, cols), row strides in elements. weight, dweight: (cols). rstd: (rows) fp32.
// partial: (gridDim.x, cols) fp32, one row a program. finished: 0 before and after, for the last
// block. progress: whatever it holds, for programs that are paced. LDS: two areas of 2 floats a
// wave, then the ring, or at the end the block's partial row.
extern "C" __global__ void RR_BOUNDS rmsnorm_backward(
    const void* __restrict__ dout, i64 dout_stride, const void* __restrict__ x, i64 x_stride,
    const void* __restrict__ weight, const float* __restrict__ rstd, void* __restrict__ dx,
    i64 dx_stride, float* partial, void* __restrict__ dweight, u32* finished, u32* progress,
    i64 rows, u32 run_time_cols, float eps RR_BACKWARD_EXTRAS RR_BACKWARD_HEADS) {
  RR_LDS(lds);
  const u32 cols = RR_COLS ? RR_COLS : run_time_cols;
  const u32 vectors = cols / RR_ELEMENTS;
  const u32 lane = threadIdx.x % RR_THREADS_PER_ROW, slot = threadIdx.x / RR_THREADS_PER_ROW;
  const i64 first = (i64)program() * BLOCK_ROWS;  // of the block's rows, one a slot
  const i64 step = (i64)programs() * BLOCK_ROWS;
#if RR_EXTRAS
  dout = of_head<RR_Y>(dout, dout_head);
  x = of_head<RR_X>(x, x_head);
  dx = of_head<RR_DX>(dx, dx_head);
  weight = columns_of_head<RR_W>(weight, cols);
  dresidual_out = of_head<RR_RESIDUAL_OUT>(dresidual_out, dresidual_out_head);
  dresidual = of_head<RR_RESIDUAL>(dresidual, dresidual_head);
  float bias_sums[RR_CHUNKS][RR_ELEMENTS] = {};  // this lane's share of dbias
#endif

  WPack w[RR_CHUNKS];
  float sums[RR_CHUNKS][RR_ELEMENTS];  // this lane's share of dW
  auto load_weights = [&] {
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c) {
      w[c] = {};
      if (HAS_WEIGHT && NEED_DX) w[c] = load_weight(weight, safe_element(c, lane, vectors));
#pragma unroll
      for (int e = 0; e < RR_ELEMENTS; ++e) sums[c][e] = 0.0f;
    }
  };
  auto load_rstd = [&](i64 row) {
    return HAS_RSTD ? load_row_float(rstd, list_at(row < rows ? row : rows - 1)) : 0.0f;
  };
  [[maybe_unused]] auto load_row = [&](i64 row, float& given, XRow& x_kept, DRow& dout_kept,
                                       [[maybe_unused]] Beside& beside) {
    const i64 from = row < rows ? row : rows - 1;  // past the end: loaded and never used
    given = load_rstd(row);
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c) {
      const u64 element = safe_element(c, lane, vectors);
      x_kept[c] = load_vector(x, (u64)(from * x_stride) + element);
      dout_kept[c] = load_dout(dout, (u64)(from * dout_stride) + element);
#if RR_EXTRAS && RR_HAS_RESIDUAL_OUT
      beside.row[c] = load_beside(dresidual_out, (u64)(from * dresidual_out_stride) + element);
#endif
    }
  };
  auto sum_row = [&](float given, const XRow& x_kept, const DRow& dout_kept, int area) {
    RowResult result = {given, 0.0f};
    if constexpr (SUMS_NEEDED) {
      RowChains chains;
#pragma unroll
      for (int c = 0; c < RR_CHUNKS; ++c)
        if (in_row(c, lane, vectors)) chains.add(dout_kept[c], x_kept[c], w[c]);
      result = finish_row(tree_sum(chains.dot), tree_sum(chains.square), result.rstd, cols, eps,
                          lds + area * 2 * BLOCK_WAVES);
    }
    return result;
  };
  auto store_row = [&](i64 row, const XRow& x_kept, const DRow& dout_kept,
                       [[maybe_unused]] const Beside& beside, RowResult result) {
    if (!slot_has_row(row, rows)) return;
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c) {
      if (NEED_DW) {
#pragma unroll
        for (int e = 0; e < RR_ELEMENTS; ++e)
          sums[c][e] = fmaf(dout_kept[c][e], x_kept[c][e] * result.rstd, sums[c][e]);
      }
#if RR_EXTRAS
      if (HAS_BIAS) {
#pragma unroll
        for (int e = 0; e < RR_ELEMENTS; ++e) bias_sums[c][e] += dout_kept[c][e];
      }
      const u64 element = chunk_element(c, lane);
      GPack added = {};
#if RR_HAS_RESIDUAL_OUT
      added = beside.row[c];
#endif
      if (NEED_DX && in_row(c, lane, vectors))
        store_gradient(dx, (u64)(row * dx_stride) + element, dresidual,
                       (u64)(row * dresidual_stride) + element, dout_kept[c], x_kept[c], w[c],
                       added, result);
#else
      const u64 element = (u64)(row * dx_stride) + chunk_element(c, lane);
      if (NEED_DX && in_row(c, lane, vectors))
        store_dx(dx, element, dout_kept[c], x_kept[c], w[c], result);
#endif
    }
  };

#if RR_PATH == PATH_REGISTERS
  load_weights();
  int area = 0;
  for (i64 group = first; group < rows; group += step) {
    const i64 row = group + slot;
    float given;
    XRow x_kept;
    DRow dout_kept;
    Beside beside;
    load_row(row, given, x_kept, dout_kept, beside);
    store_row(row, x_kept, dout_kept, beside, sum_row(given, x_kept, dout_kept, area));
    area ^= 1;
  }

#elif RR_PATH == PATH_PINGPONG
  float ping, pong;  // rstd
  XRow x_ping, x_pong;
  DRow dout_ping, dout_pong;
  Beside beside_ping, beside_pong;
  load_weights();
  load_row(first + slot, ping, x_ping, dout_ping, beside_ping);
  if constexpr (HAS_WEIGHT && NEED_DX) after_loads(w);  // or the loop's wait for it is for rows too
  auto work = [&](i64 row, float given, XRow& x_kept, DRow& dout_kept, Beside& beside, float& next,
                  XRow& x_next, DRow& dout_next, Beside& beside_next, int area) {
    load_row(row + step, next, x_next, dout_next, beside_next);
    after_loads(x_kept);
    after_loads(dout_kept);
#if RR_EXTRAS && RR_HAS_RESIDUAL_OUT
    after_loads(beside.row);
#endif
    store_row(row, x_kept, dout_kept, beside, sum_row(given, x_kept, dout_kept, area));
  };
  i64 group = first;
  for (; group + step < rows; group += 2 * step) {
    work(group + slot, ping, x_ping, dout_ping, beside_ping, pong, x_pong, dout_pong, beside_pong,
         0);
    work(group + step + slot, pong, x_pong, dout_pong, beside_pong, ping, x_ping, dout_ping,
         beside_ping, 1);
  }
  if (group < rows)
    store_row(group + slot, x_ping, dout_ping, beside_ping, sum_row(ping, x_ping, dout_ping, 0));

#else
  Ring ring = {};
  ring.tensor[0] = {x, x_stride};
  ring.tensor[1] = {dout, dout_stride};
#if RR_EXTRAS && RR_HAS_RESIDUAL_OUT
  ring.tensor[2] = {dresidual_out, dresidual_out_stride};
#endif
  ring.open(lds, rows, vectors, lane, slot);
  ring.start(first + slot, step);
  load_weights();
  float given = load_rstd(first + slot);
#if RR_PACED
  Pace pace;
  pace.open(progress);
#endif
  int area = 0;
  for (i64 group = first; group < rows; group += step) {
    const i64 row = group + slot;
    if (!RR_BULK) ring.refill(row, step);
    const float next = load_rstd(row + step);
    ring.wait();
    XRow x_kept;
    DRow dout_kept;
    Beside beside;
    ring.read(0, x_kept);
    ring.read(1, dout_kept);
#if RR_EXTRAS && RR_HAS_RESIDUAL_OUT
    if (!RR_REREAD) ring.read(2, beside.row);
#endif
    const RowResult result = sum_row(given, x_kept, dout_kept, area);
    area ^= 1;
    if (RR_BULK && !SUMS_NEEDED) __syncthreads();
#if RR_PACED
    pace.step();
#endif
    if (RR_BULK) ring.refill(row, step);
    if (RR_REREAD) {
      ring.read(0, x_kept);
      ring.read(1, dout_kept);
#if RR_EXTRAS && RR_HAS_RESIDUAL_OUT
      ring.read(2, beside.row);
#endif
    }
    store_row(row, x_kept, dout_kept, beside, result);
    given = next;
    ring.next();
  }
  ring.close();
#endif

  // The rows of a block take turns to add into LDS, element-major: no two lanes share a bank.
  [[maybe_unused]] float* shared = lds + 4 * BLOCK_WAVES;
#if RR_NEED_DW
  if constexpr (BLOCK_ROWS > 1) {
    __syncthreads();  // nobody reads the ring any more
#pragma unroll 1
    for (u32 turn = 1; turn < BLOCK_ROWS; ++turn) {
      if (slot == turn) {
#pragma unroll
        for (int c = 0; c < RR_CHUNKS; ++c)
#pragma unroll
          for (int e = 0; e < RR_ELEMENTS; ++e) {
            float* sum = shared + (c * RR_ELEMENTS + e) * RR_THREADS_PER_ROW + lane;
            *sum = turn == 1 ? sums[c][e] : *sum + sums[c][e];
          }
      }
      __syncthreads();
    }
  }
  if (slot == 0) {
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c) {
      if (BLOCK_ROWS > 1) {
#pragma unroll
        for (int e = 0; e < RR_ELEMENTS; ++e)
          sums[c][e] += shared[(c * RR_ELEMENTS + e) * RR_THREADS_PER_ROW + lane];
      }
      if (in_row(c, lane, vectors)) {
        const u64 element = chunk_element(c, lane);
        if (RR_LAST_BLOCK && gridDim.x == 1)
          store_pack<RR_W, RR_ELEMENTS, POLICY_DEFAULT>(dweight, element, sums[c]);
        else
          store_pack<FP32, RR_ELEMENTS, POLICY_DEFAULT>(
              partial, (u64)blockIdx.x * cols + element, sums[c]);
      }
    }
  }
#endif
#if RR_EXTRAS && RR_HAS_BIAS
  if constexpr (BLOCK_ROWS > 1) {
    __syncthreads();  // nobody reads the ring any more
#pragma unroll 1
    for (u32 turn = 1; turn < BLOCK_ROWS; ++turn) {
      if (slot == turn) {
#pragma unroll
        for (int c = 0; c < RR_CHUNKS; ++c)
#pragma unroll
          for (int e = 0; e < RR_ELEMENTS; ++e) {
            float* sum = shared + (c * RR_ELEMENTS + e) * RR_THREADS_PER_ROW + lane;
            *sum = turn == 1 ? bias_sums[c][e] : *sum + bias_sums[c][e];
          }
      }
      __syncthreads();
    }
  }
  if (slot == 0) {
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c) {
      if (BLOCK_ROWS > 1) {
#pragma unroll
        for (int e = 0; e < RR_ELEMENTS; ++e)
          bias_sums[c][e] += shared[(c * RR_ELEMENTS + e) * RR_THREADS_PER_ROW + lane];
      }
      if (in_row(c, lane, vectors)) {
        const u64 element = chunk_element(c, lane);
        store_pack<FP32, RR_ELEMENTS, POLICY_DEFAULT>(
            bias_partial, (u64)blockIdx.x * cols + element, bias_sums[c]);
      }
    }
  }
#endif
#if RR_NEED_DW
#if RR_EARLY_FINISH
  allow_next_launch();
#endif
#if RR_LAST_BLOCK
  if (gridDim.x > 1 && last_block(finished, (u32*)lds)) {
    for (u32 column = threadIdx.x; column < cols; column += RR_BLOCK) {
      const float sum[1] = {sum_partials(partial + column, cols, gridDim.x)};
      store_pack<RR_W, 1, POLICY_DEFAULT>(dweight, column, sum);
    }
  }
#endif
#endif
}

#endif

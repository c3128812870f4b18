
constexpr bool STORE_RSTD = RR_STORE_RSTD;
#if RR_ROW_BLOCKS > 1 && !RR_AMD && !defined(RR_SIMULATOR)
#define RR_CLUSTER __cluster_dims__(RR_ROW_BLOCKS, 1, 1)
#else
#define RR_CLUSTER
#endif

#if defined(RR_CHUNKS)
typedef In Row[RR_CHUNKS];
#endif

RR_FN void add_squares(const In& x, float (&chain)[4]) {
#pragma unroll
  for (int e = 0; e < RR_ELEMENTS; ++e) chain[e % 4] = fmaf(x[e], x[e], chain[e % 4]);
}

#if !RR_EXTRAS
RR_FN void store_normalised(void* y, u64 element, const In& x, const WPack& w, float rstd) {
  float out[RR_ELEMENTS];
#pragma unroll
  for (int e = 0; e < RR_ELEMENTS; ++e) {
    out[e] = x[e] * rstd;
    if constexpr (HAS_WEIGHT) out[e] *= w[e];
  }
  store_pack<RR_X, RR_ELEMENTS, RR_STORE_POLICY>(y, element, out);
}
#endif

// x, y: (rows, cols), rows x_stride and y_stride elements apart. weight: (cols). rstd: (rows) fp32.
// words: where blocks share a row on AMD, (rows, RR_ROW_BLOCKS) and a count, 0 before the launch.
// LDS: two areas of 2 floats a wave, then the ring or 2 + RR_ROW_BLOCKS floats.
extern "C" __global__ void RR_CLUSTER RR_BOUNDS rmsnorm_forward(
    const void* __restrict__ x, i64 x_stride, const void* __restrict__ weight, void* __restrict__ y,
    i64 y_stride, float* __restrict__ rstd, u64* words, i64 rows, u32 run_time_cols,
    float eps RR_FORWARD_EXTRAS) {
  RR_LDS(lds);
  const u32 cols = RR_COLS ? RR_COLS : run_time_cols;
  const u32 vectors = cols / RR_ELEMENTS;
#if RR_AMD && !defined(RR_SIMULATOR)
  // hiprtc would load these arguments where they are used, one by one after a barrier
  asm volatile("" ::"s"(x), "s"(x_stride), "s"(y), "s"(y_stride), "s"(rstd), "s"(eps));
#endif
#if RR_ROW_BLOCKS > 1
  RowBlocks blocks;
  const i64 first = blocks.open(words, rows, lds + 4 * BLOCK_WAVES);
  const u32 lane = blocks.part * RR_BLOCK + threadIdx.x, slot = 0;
#else
  const u32 lane = threadIdx.x % RR_THREADS_PER_ROW, slot = threadIdx.x / RR_THREADS_PER_ROW;
  const i64 first = (i64)program() * BLOCK_ROWS;  // of the block's rows, one a slot
#endif
#if RR_EXTRAS
  x = of_head<RR_X>(x, x_head);
  y = of_head<RR_Y>(y, y_head);
  weight = columns_of_head<RR_W>(weight, cols);
  bias = columns_of_head<RR_B>(bias, cols);
  residual = of_head<RR_RESIDUAL>(residual, residual_head);
  residual_out = of_head<RR_RESIDUAL_OUT>(residual_out, residual_out_head);
#endif

  // rstd of a row, from what this lane has added up
  auto finish_sum = [&](i64 row, float lane_squares, int area) {
    float sum[1] = {lane_squares};
    row_sum(sum, lds + area * 2 * BLOCK_WAVES);
#if RR_ROW_BLOCKS > 1
    sum[0] = blocks.sum(sum[0]);
#endif
    const float scale = reciprocal_sqrt(sum[0] * (1.0f / (float)cols) + eps);
    if (STORE_RSTD && lane == 0 && slot_has_row(row, rows)) rstd[list_at(row)] = scale;
    return scale;
  };

#if RR_PATH == PATH_TWO_PASS
  const i64 row = first + slot;
  const bool row_exists = row < rows;
  const u64 x_row = (u64)(row * x_stride), y_row = (u64)(row * y_stride);
  float squares = 0.0f;
  if (row_exists) {
    for (u32 tile = lane; tile < vectors; tile += RR_TILE_CHUNKS * RR_THREADS_PER_ROW) {
      float chain[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int c = 0; c < RR_TILE_CHUNKS; ++c) {
        const u32 at = tile + c * RR_THREADS_PER_ROW;
        if (at < vectors) {
          const u64 element = (u64)at * RR_ELEMENTS;
          In in;
          x_of(in) = load_vector(x, x_row + element);
          RR_LOAD_RESIDUAL(in, row, element);
          add_squares(in, chain);
        }
      }
      squares += tree_sum(chain);
    }
  }
  const float scale = finish_sum(row, squares, 0);
#if RR_EXTRAS
  float inverse = 1.0f;
  auto parts = [&](u64 element, WPack& w, BPack& b) {
    if constexpr (HAS_WEIGHT) w = load_weight(weight, element);
    if constexpr (HAS_BIAS) b = load_bias(bias, element);
  };
#if RR_SCALE == SCALE_STATIC
  inverse = 1.0f / scales[0];
#elif RR_SCALE == SCALE_DYNAMIC
  float largest = 0.0f;
  for (u32 at = lane; row_exists && at < vectors; at += RR_THREADS_PER_ROW) {
    WPack w = {};
    BPack b = {};
    parts((u64)at * RR_ELEMENTS, w, b);
    In in;
    x_of(in) = load_vector(x, x_row + (u64)at * RR_ELEMENTS);
    RR_LOAD_RESIDUAL(in, row, (u64)at * RR_ELEMENTS);
    add_largest(in, w, b, scale, largest);
  }
  const float row_scale = scale_of(row_max(largest, lds + BLOCK_WAVES));
  if (lane == 0 && row_exists) scales[list_at(row)] = row_scale;
  inverse = 1.0f / row_scale;
#endif
#endif
  if (!row_exists) return;
#pragma unroll RR_TILE_CHUNKS
  for (u32 at = lane; at < vectors; at += RR_THREADS_PER_ROW) {
    const u64 element = (u64)at * RR_ELEMENTS;
    In again;
    x_of(again) = load_vector(x, x_row + element);
    RR_LOAD_RESIDUAL(again, row, element);
    WPack w = {};
#if RR_EXTRAS
    BPack b = {};
    parts(element, w, b);
    if constexpr (HAS_RESIDUAL_OUT)
      store_residual_out(residual_out, (u64)(row * residual_out_stride) + element, again);
    store_normalised(y, y_row + element, again, w, b, scale, inverse);
#else
    if constexpr (HAS_WEIGHT) w = load_weight(weight, element);
    store_normalised(y, y_row + element, again, w, scale);
#endif
  }

#else
  [[maybe_unused]] auto load_row = [&](i64 row, Row& kept) {
    const i64 from = row < rows ? row : rows - 1;  // past the end: loaded and never used
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c) {
      x_of(kept[c]) = load_vector(x, (u64)(from * x_stride) + safe_element(c, lane, vectors));
      RR_LOAD_RESIDUAL(kept[c], from, safe_element(c, lane, vectors));
    }
  };
  auto sum_row = [&](i64 row, const Row& kept, int area) {
    float chain[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c)
      if (in_row(c, lane, vectors)) add_squares(kept[c], chain);
    return finish_sum(row, tree_sum(chain), area);
  };
  // The weight is asked for early where registers allow: a persistent program keeps it, and a lone
  // row then waits for memory once (NVRTC puts it off all the same unless min_blocks is 1). On AMD
  // a persistent program always does: memory operations end in order there, and to load the weight
  // again would drain the rows in flight.
  constexpr bool EARLY_WEIGHT =
      HAS_WEIGHT && ((RR_AMD && RR_PATH != PATH_REGISTERS) ||
                     RR_CHUNKS * (XPack::BYTES + WPack::BYTES) <= 128);
  WPack early[EARLY_WEIGHT ? RR_CHUNKS : 1];
#if RR_EXTRAS
  constexpr bool EARLY_BIAS = HAS_BIAS && (EARLY_WEIGHT || (RR_AMD && RR_PATH != PATH_REGISTERS));
  BPack early_bias[EARLY_BIAS ? RR_CHUNKS : 1];
#if RR_SCALE == SCALE_STATIC
  const float given_scale = scales[0];
#endif
#endif
  auto load_early = [&] {
    if constexpr (EARLY_WEIGHT) {
#pragma unroll
      for (int c = 0; c < RR_CHUNKS; ++c)
        early[c] = load_weight(weight, safe_element(c, lane, vectors));
    }
#if RR_EXTRAS
    if constexpr (EARLY_BIAS) {
#pragma unroll
      for (int c = 0; c < RR_CHUNKS; ++c)
        early_bias[c] = load_bias(bias, safe_element(c, lane, vectors));
    }
#endif
  };
#if RR_EXTRAS
  auto store_row = [&](i64 row, const Row& kept, float scale, [[maybe_unused]] int area) {
    WPack w[RR_CHUNKS];
    BPack b[RR_CHUNKS];
    auto parts = [&](int c) {
      w[c] = {}, b[c] = {};
      const u64 element = chunk_element(c, lane);
      if constexpr (EARLY_WEIGHT) w[c] = early[c];
      else if constexpr (HAS_WEIGHT) w[c] = load_weight(weight, element);
      if constexpr (EARLY_BIAS) b[c] = early_bias[c];
      else if constexpr (HAS_BIAS) b[c] = load_bias(bias, element);
    };
    float inverse = 1.0f;
#if RR_SCALE == SCALE_STATIC
    inverse = 1.0f / given_scale;
#elif RR_SCALE == SCALE_DYNAMIC
    float largest = 0.0f;
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c) {
      if (in_row(c, lane, vectors)) {
        parts(c);
        add_largest(kept[c], w[c], b[c], scale, largest);
      }
    }
    const float row_scale = scale_of(row_max(largest, lds + (2 * area + 1) * BLOCK_WAVES));
    if (lane == 0 && slot_has_row(row, rows)) scales[list_at(row)] = row_scale;
    inverse = 1.0f / row_scale;
#endif
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c) {
      if (slot_has_row(row, rows) && in_row(c, lane, vectors)) {
        const u64 element = chunk_element(c, lane);
        if (RR_SCALE != SCALE_DYNAMIC) parts(c);
        if constexpr (HAS_RESIDUAL_OUT)
          store_residual_out(
              residual_out, (u64)(row * residual_out_stride) + element, kept[c]);
        store_normalised(  // last, for y may be x
            y, (u64)(row * y_stride) + element, kept[c], w[c], b[c], scale, inverse);
      }
    }
  };
#else
  auto store_row = [&](i64 row, const Row& kept, float scale, int) {
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c) {
      if (slot_has_row(row, rows) && in_row(c, lane, vectors)) {
        WPack w = {};
        const u64 element = chunk_element(c, lane);
        if constexpr (EARLY_WEIGHT) w = early[c];
        else if constexpr (HAS_WEIGHT) w = load_weight(weight, element);
        store_normalised(y, (u64)(row * y_stride) + element, kept[c], w, scale);
      }
    }
  };
#endif

#if RR_PATH == PATH_REGISTERS
  Row kept;
  load_row(first + slot, kept);
  load_early();
  loads_first();
  store_row(first + slot, kept, sum_row(first + slot, kept, 0), 0);

#elif RR_PATH == PATH_PINGPONG
  const i64 step = (i64)programs() * BLOCK_ROWS;
  Row ping, pong;
  load_early();
  load_row(first + slot, ping);
  if constexpr (EARLY_WEIGHT) after_loads(early);  // or the loop's wait for it is for rows too
  auto work = [&](i64 row, Row& kept, Row& next, int area) {
    load_row(row + step, next);
    after_loads(kept);
    store_row(row, kept, sum_row(row, kept, area), area);
  };
  i64 group = first;
  for (; group + step < rows; group += 2 * step) {
    work(group + slot, ping, pong, 0);
    work(group + step + slot, pong, ping, 1);
  }
  if (group < rows) store_row(group + slot, ping, sum_row(group + slot, ping, 0), 0);

#else
  const i64 step = (i64)programs() * BLOCK_ROWS;
  Ring ring = {};
  ring.tensor[0] = {x, x_stride};
#if RR_EXTRAS && RR_HAS_RESIDUAL
  ring.tensor[1] = {residual, residual_stride};
  auto read_ring = [&](Row& kept) {
    XRow x_row, residual_row;
    ring.read(0, x_row);
    ring.read(1, residual_row);
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c) kept[c] = {x_row[c], residual_row[c]};
  };
#else
  auto read_ring = [&](Row& kept) { ring.read(0, kept); };
#endif
  ring.open(lds, rows, vectors, lane, slot);
  ring.start(first + slot, step);
  load_early();
  int area = 0;
  for (i64 group = first; group < rows; group += step) {
    const i64 row = group + slot;
    if (!RR_BULK) ring.refill(row, step);
    ring.wait();
    Row kept;
    read_ring(kept);
    const float scale = sum_row(row, kept, area);
    if (RR_BULK) ring.refill(row, step);
    if (RR_REREAD) read_ring(kept);
    store_row(row, kept, scale, area);
    area ^= 1;
    ring.next();
  }
  ring.close();
#endif
#endif
}

#if RR_ROW_BLOCKS > 1 && RR_AMD
// Before rmsnorm_forward: its words and its counter, `count` in all.
extern "C" __global__ void RR_BOUNDS rmsnorm_forward_clear(u64* words, u64 count) {
  const u64 at = (u64)blockIdx.x * RR_BLOCK + threadIdx.x;
  if (at < count) words[at] = 0;
}
#endif

"""RMSNorm forward: y = x * rstd * weight, rstd = rsqrt(mean(x^2) + eps), one row at a time.

Version 1, ``reg``: a row is read once and kept in registers; one block for one or more rows.
Version 2, ``2p``:  a row too wide to keep is read again, from cache where it still lies there.
Version 3, ``pp``:  a persistent grid; the next row is loaded into a second register set while this
    one is reduced. Unrolled by two, since a rolled loop would wait for the load to copy it over.
Version 4, ``lds``: a persistent grid over a ring of rows in LDS; after the reduction the row comes
    from registers, or (``r``) from the ring again.
Version 5, ``t`` over ``b``: several blocks share a row (blocks.py) that is too wide for one, or
    where rows are too few for the device: 134.8 -> 126.9 us at 4096x32768 bf16, 23.4 -> 7.7 at
    8x262144 (H200, 2026-11).

A lane's squares go into four chains that end in a tree, lanes and waves add up as trees too; fp32
throughout. The result is (x * rstd) * weight, rounded once, at the store.
"""

TEXT = r"""
constexpr bool STORE_RSTD = RR_STORE_RSTD;
#if RR_ROW_BLOCKS > 1 && !RR_AMD && !defined(RR_SIMULATOR)
#define RR_CLUSTER __cluster_dims__(RR_ROW_BLOCKS, 1, 1)
#else
#define RR_CLUSTER
#endif

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
// words: where blocks share a row on AMD, (rows, RR_ROW_BLOCKS) and a count, 0 before the launch.
// LDS: two areas of 2 floats a wave, then the ring or 2 + RR_ROW_BLOCKS floats.
extern "C" __global__ void RR_CLUSTER RR_BOUNDS rmsnorm_forward(
    const void* __restrict__ x, i64 x_stride, const void* __restrict__ weight, void* __restrict__ y,
    i64 y_stride, float* __restrict__ rstd, u64* words, i64 rows, u32 run_time_cols,
    float eps) {
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
  const i64 first = (i64)blockIdx.x * BLOCK_ROWS;  // of the block's rows, one a slot
#endif

  // rstd of a row, from what this lane has added up
  auto finish_sum = [&](i64 row, float lane_squares, int area) {
    float sum[1] = {lane_squares};
    row_sum(sum, lds + area * 2 * BLOCK_WAVES);
#if RR_ROW_BLOCKS > 1
    sum[0] = blocks.sum(sum[0]);
#endif
    const float scale = reciprocal_sqrt(sum[0] * (1.0f / (float)cols) + eps);
    if (STORE_RSTD && lane == 0 && slot_has_row(row, rows)) rstd[row] = scale;
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
        if (at < vectors) add_squares(load_vector(x, x_row + (u64)at * RR_ELEMENTS), chain);
      }
      squares += tree_sum(chain);
    }
  }
  const float scale = finish_sum(row, squares, 0);
  if (!row_exists) return;
#pragma unroll RR_TILE_CHUNKS
  for (u32 at = lane; at < vectors; at += RR_THREADS_PER_ROW) {
    const u64 element = (u64)at * RR_ELEMENTS;
    const XPack again = load_vector(x, x_row + element);
    WPack w = {};
    if constexpr (HAS_WEIGHT) w = load_weight(weight, element);
    store_normalised(y, y_row + element, again, w, scale);
  }

#else
  [[maybe_unused]] auto load_row = [&](i64 row, Row& kept) {
    const i64 from = row < rows ? row : rows - 1;  // past the end: loaded and never used
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c)
      kept[c] = load_vector(x, (u64)(from * x_stride) + safe_element(c, lane, vectors));
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
  auto load_early = [&] {
    if constexpr (EARLY_WEIGHT) {
#pragma unroll
      for (int c = 0; c < RR_CHUNKS; ++c)
        early[c] = load_weight(weight, safe_element(c, lane, vectors));
    }
  };
  auto store_row = [&](i64 row, const Row& kept, float scale) {
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

#if RR_PATH == PATH_REGISTERS
  Row kept;
  load_row(first + slot, kept);
  load_early();
  loads_first();
  store_row(first + slot, kept, sum_row(first + slot, kept, 0));

#elif RR_PATH == PATH_PINGPONG
  const i64 step = (i64)gridDim.x * BLOCK_ROWS;
  Row ping, pong;
  load_early();
  load_row(first + slot, ping);
  if constexpr (EARLY_WEIGHT) after_loads(early);  // or the loop's wait for it is for rows too
  auto work = [&](i64 row, Row& kept, Row& next, int area) {
    load_row(row + step, next);
    after_loads(kept);
    store_row(row, kept, sum_row(row, kept, area));
  };
  i64 group = first;
  for (; group + step < rows; group += 2 * step) {
    work(group + slot, ping, pong, 0);
    work(group + step + slot, pong, ping, 1);
  }
  if (group < rows) store_row(group + slot, ping, sum_row(group + slot, ping, 0));

#else
  const i64 step = (i64)gridDim.x * BLOCK_ROWS;
  Ring ring = {};
  ring.tensor[0] = {x, x_stride};
  ring.open(lds, rows, vectors, lane, slot);
  ring.start(first + slot, step);
  load_early();
  int area = 0;
  for (i64 group = first; group < rows; group += step) {
    const i64 row = group + slot;
    if (!RR_BULK) ring.refill(row, step);
    ring.wait();
    Row kept;
    ring.read(0, kept);
    const float scale = sum_row(row, kept, area);
    area ^= 1;
    if (RR_BULK) ring.refill(row, step);
    if (RR_REREAD) ring.read(0, kept);
    store_row(row, kept, scale);
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
"""


#define PATH_REGISTERS 0
#define PATH_TWO_PASS 1
#define PATH_PINGPONG 2
#define PATH_LDS 3
// RR_ROW_BLOCKS blocks share a row, or a block has BLOCK_ROWS rows. Lanes and waves of a row in one
// block:
constexpr int BLOCK_LANES = RR_THREADS_PER_ROW / RR_ROW_BLOCKS;
constexpr int ROW_LANES = BLOCK_LANES < RR_WAVE ? BLOCK_LANES : RR_WAVE;
constexpr int ROW_WAVES = BLOCK_LANES / ROW_LANES;
constexpr int BLOCK_ROWS = RR_BLOCK / BLOCK_LANES;
constexpr int BLOCK_WAVES = RR_BLOCK / RR_WAVE;
static_assert(BLOCK_LANES * RR_ROW_BLOCKS == RR_THREADS_PER_ROW, "a row has whole blocks, or one");
static_assert(ROW_LANES * ROW_WAVES == BLOCK_LANES, "a row has whole waves, or part of one");
static_assert(BLOCK_ROWS * BLOCK_LANES == RR_BLOCK, "a block has whole rows");
static_assert(RR_ROW_BLOCKS == 1 || BLOCK_ROWS == 1, "blocks share one row at a time");
static_assert(BLOCK_WAVES * RR_WAVE == RR_BLOCK, "a block has whole waves");

typedef Pack<RR_X, RR_ELEMENTS> XPack;
typedef Pack<RR_W, RR_ELEMENTS> WPack;
constexpr bool HAS_WEIGHT = RR_HAS_WEIGHT;
RR_FN XPack load_vector(const void* base, u64 element) {
  return load_pack<RR_X, RR_ELEMENTS, RR_LOAD_POLICY>(base, element);
}
// The weight is read by every row: it never has a policy.
RR_FN WPack load_weight(const void* weight, u64 element) {
  return load_pack<RR_W, RR_ELEMENTS, POLICY_DEFAULT>(weight, element);
}
#if defined(RR_CHUNKS)
constexpr int CHUNK_ELEMENTS = RR_THREADS_PER_ROW * RR_ELEMENTS;
// Only the last chunk of a row can be a tail, and only where N is not a multiple of a whole chunk.
[[maybe_unused]] constexpr bool FULL_CHUNKS = RR_COLS != 0 && RR_COLS % CHUNK_ELEMENTS == 0;
RR_FN bool in_row(int c, u32 lane, u32 vectors) {
  return FULL_CHUNKS || c < RR_CHUNKS - 1 || c * RR_THREADS_PER_ROW + lane < vectors;
}
// The first element of a lane in chunk c of a row. 64 bits from the start: a 32-bit sum could wrap,
// and the compiler would keep an address a chunk instead of one address and constant offsets.
RR_FN u64 chunk_element(int c, u32 lane) {
  return (u64)lane * RR_ELEMENTS + (u64)c * CHUNK_ELEMENTS;
}
// Where a lane may load from in any case: past the end of a row, its last vector. A load under a
// condition would be waited for where the branches meet; what it brought is left out of the sum.
RR_FN u64 safe_element(int c, u32 lane, u32 vectors) {
  return in_row(c, lane, vectors) ? chunk_element(c, lane) : (u64)(vectors - 1) * RR_ELEMENTS;
}
typedef XPack XRow[RR_CHUNKS];  // what a lane keeps of a row

// Nothing moves across this: hiprtc would work on what has come before it asks for the rest.
RR_FN void loads_first() {
#if RR_AMD && !defined(RR_SIMULATOR)
  __builtin_amdgcn_sched_barrier(0);
#endif
}

// Waits for loaded vectors: after the loads before this are issued, before any work on them.
template <typename Kept> RR_FN void await_pack([[maybe_unused]] Kept& pack) {
#if RR_AMD && !defined(RR_SIMULATOR)
#pragma unroll
  for (int i = 0; i < Kept::PIECES; ++i) {
    typedef typename Native<Kept::PIECE>::type T;
    Words<Kept::PIECE>& piece = pack.piece[i];
    T v = __builtin_bit_cast(T, piece);
    asm volatile("" : "+v"(v)::"memory");
    piece = __builtin_bit_cast(Words<Kept::PIECE>, v);
  }
#endif
}
template <typename Kept, int COUNT> RR_FN void after_loads(Kept (&pack)[COUNT]) {
  loads_first();
#pragma unroll
  for (int c = 0; c < COUNT; ++c) await_pack(pack[c]);
}
#endif

// Whether a row slot of the block has a row: always, where a block takes one row at a time. A store
// that some path skips does not count: hiprtc would wait for it before the next row's sum.
RR_FN bool slot_has_row(i64 row, i64 rows) { return BLOCK_ROWS == 1 || row < rows; }

// A float of a row, which the kernel does not write. On AMD a plain load would be put off to its
// use, and the row would wait for memory twice. A relaxed atomic one stays where it is and is a
// vector load: it comes in order, with the row that is loaded after it. Over an LDS ring it must
// not count as a memory operation: there it is a scalar load, asked for before the ring's wait,
// since the next access to LDS waits for it too.
RR_FN float load_row_float(const float* base, i64 row) {
#if RR_AMD && !defined(RR_SIMULATOR)
#if RR_PATH == PATH_LDS
  typedef const __attribute__((address_space(4))) float* Constant;
  return *(Constant)uniform((u64)(base + row));
#else
  return __hip_atomic_load(base + row, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WAVEFRONT);
#endif
#else
  return base[row];
#endif
}

// How the waves of a block exchange sums. Over an LDS ring AMD's accesses and barrier are written
// out: before an access that it can see (ROCm 7.0.0) and at __syncthreads (7.2.4) the compiler
// waits for every copy in flight.
#if RR_AMD && RR_PATH == PATH_LDS && !defined(RR_SIMULATOR)
RR_FN u32 lds_address(const void* p) {
  return (u32)(u64)(__attribute__((address_space(3))) const char*)p;
}
RR_FN void write_sum(float* to, float value) {
  asm volatile("ds_write_b32 %0, %1" ::"v"(lds_address(to)), "v"(value) : "memory");
}
RR_FN float read_sum(const float* from) {
  float value;
  asm volatile("ds_read_b32 %0, %1" : "=v"(value) : "v"(lds_address(from)) : "memory");
  return value;
}
RR_FN void wait_for_sum(float& value) {
  asm volatile("s_waitcnt lgkmcnt(0)" : "+v"(value)::"memory");
}
RR_FN void exchange_barrier() { asm volatile("s_waitcnt lgkmcnt(0)\ns_barrier" ::: "memory"); }
#else
RR_FN void write_sum(float* to, float value) { *to = value; }
RR_FN float read_sum(const float* from) { return *from; }
RR_FN void wait_for_sum(float&) {}
#define exchange_barrier() __syncthreads()
#endif

// Sums each of COUNT values over the lanes of a row; every lane of the row gets the same bits.
// `area`: COUNT floats a wave of the block. A loop alternates between two such areas, so that one
// barrier a row is enough: nobody can be two rows ahead of a reader.
template <int COUNT> RR_FN void row_sum(float (&value)[COUNT], float* area) {
#pragma unroll
  for (int k = 0; k < COUNT; ++k) value[k] = lane_sum<ROW_LANES>(value[k]);
  if constexpr (ROW_WAVES > 1) {
    const int wave = threadIdx.x / RR_WAVE;
    if (threadIdx.x % RR_WAVE == 0) {
#pragma unroll
      for (int k = 0; k < COUNT; ++k) write_sum(area + wave * COUNT + k, value[k]);
    }
    exchange_barrier();
    const float* first = area + wave / ROW_WAVES * ROW_WAVES * COUNT;
    float part[COUNT][ROW_WAVES];
#pragma unroll
    for (int i = 0; i < ROW_WAVES; ++i)
#pragma unroll
      for (int k = 0; k < COUNT; ++k) part[k][i] = read_sum(first + i * COUNT + k);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
#pragma unroll
      for (int i = 0; i < ROW_WAVES; ++i) wait_for_sum(part[k][i]);
      value[k] = tree_sum(part[k]);
    }
  }
}

#if !RR_EXTRAS
// What is normalised, the weight as it is applied, which rows a block has: extras.py has others.
typedef XPack In;
RR_FN XPack& x_of(In& in) { return in; }
RR_FN float weight_at(const WPack& w, int e) { return w[e]; }
RR_FN u32 program() { return blockIdx.x; }
RR_FN u32 programs() { return gridDim.x; }
RR_FN i64 list_at(i64 row) { return row; }  // a row's place in rstd
#define RR_LOAD_RESIDUAL(in, row, element)
#define RR_FORWARD_EXTRAS
#define RR_BACKWARD_EXTRAS
#define RR_BACKWARD_HEADS
#endif

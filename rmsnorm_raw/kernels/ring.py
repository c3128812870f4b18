"""A ring of rows in LDS that asynchronous copies fill while earlier rows are worked on.

RR_STAGES stages, each with RR_RING_TENSORS rows for every row slot of the block. Vector v of a row
lies at byte v * vec of its slot, whoever copied it: lanes (CUDA ``cp.async``), whole waves (AMD
buffer copies to LDS), or the bulk copy engine of sm_90 (RR_BULK). Except in bulk, a wave reads back
only what it copied itself, so its own wait is enough and no barrier guards the ring.

AMD counts every memory operation of a wave in order (``vmcnt``), CUDA counts groups of copies, the
bulk engine counts bytes in an mbarrier a stage. On AMD rows past the end are copied too, through a
descriptor of no bytes: a wait by count is only right if the count never changes.
"""

TEXT = r"""
constexpr int VEC_BYTES = RR_ELEMENTS * ELEMENT_BYTES(RR_X);
constexpr int SLOT_BYTES = RR_CHUNKS * RR_THREADS_PER_ROW * VEC_BYTES;
constexpr int STAGE_BYTES = RR_RING_TENSORS * BLOCK_ROWS * SLOT_BYTES;
// The ring begins after the exchange areas and the barriers, at a multiple of 128 bytes: bulk
// copies to 64 past one took 4 % longer on an H200 (32768x8192 bf16 backward, 2026-11).
constexpr int RING_OFFSET = (16 * BLOCK_WAVES + 8 * 8 * RR_BULK + 127) / 128 * 128;

#if RR_AMD
// A lane copies 16 bytes on gfx950 and 4 on gfx942; no chip copies 8.
constexpr int COPY_BYTES = RR_GFX >= 950 && VEC_BYTES == 16 ? 16 : 4;
constexpr int ROW_COPIES = RR_RING_TENSORS * RR_CHUNKS * (VEC_BYTES / COPY_BYTES);
// Stores that every wave makes for a row: the last chunk may be a tail that some waves skip.
constexpr int ROW_STORES = RR_ROW_STORES * (FULL_CHUNKS ? RR_CHUNKS : RR_CHUNKS - 1);

#if defined(RR_SIMULATOR)
#define RR_LDS_POINTER(p) (p)
template <int N> RR_FN void wait_memory() { rr_sim_wait_vmcnt(N); }
#else
#define RR_LDS_POINTER(p) ((__attribute__((address_space(3))) char*)(p))
// Until at most N memory operations of this wave are outstanding. Inline assembly: the builtin does
// not hold memory accesses in place.
template <int N> RR_FN void wait_memory() {
  asm volatile("s_waitcnt vmcnt(%0)" ::"n"(N) : "memory");
}
// A read that the compiler cannot see: before one that it can, ROCm 7.0.0 drains every copy. The
// value is there after wait_read.
template <int BYTES> RR_FN Words<BYTES> read_lds(const char* from) {
  typename Native<BYTES>::type value;
  const u32 address = lds_address(from);
  if constexpr (BYTES == 16)
    asm volatile("ds_read_b128 %0, %1" : "=v"(value) : "v"(address) : "memory");
  else if constexpr (BYTES == 8)
    asm volatile("ds_read_b64 %0, %1" : "=v"(value) : "v"(address) : "memory");
  else
    asm volatile("ds_read_b32 %0, %1" : "=v"(value) : "v"(address) : "memory");
  return __builtin_bit_cast(Words<BYTES>, value);
}
template <int BYTES> RR_FN void wait_read(Words<BYTES>& value) {
  typedef typename Native<BYTES>::type T;
  T v = __builtin_bit_cast(T, value);
  asm volatile("s_waitcnt lgkmcnt(0)" : "+v"(v)::"memory");
  value = __builtin_bit_cast(Words<BYTES>, v);
}
#endif

#elif defined(RR_SIMULATOR)
#define copy_async(to, from) rr_sim_copy_async(to, from, VEC_BYTES)
#define commit_copies() rr_sim_commit_copies()
#define wait_groups(n) rr_sim_wait_groups(n)
#define barrier_invalidate(barrier)
#define copy_bulk(to, from, bytes, barrier) rr_sim_copy_bulk(to, from, bytes, barrier)
#else
// No cache policy: cp.async with an L2 hint was an illegal instruction on an H200 (NVRTC 13.0).
RR_FN void copy_async(char* to, const void* from) {
  if constexpr (VEC_BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 ::"r"(lds_address(to)), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                 ::"r"(lds_address(to)), "l"(from), "n"(VEC_BYTES) : "memory");
}
RR_FN void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
#define wait_groups(n) asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory")
#if RR_BULK
RR_FN void barrier_invalidate(u64* barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(lds_address(barrier)) : "memory");
}
#define RR_BULK_COPY "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
RR_FN void copy_bulk(char* to, const void* from, u32 bytes, u64* barrier) {
#if RR_LOAD_POLICY == POLICY_DEFAULT
  asm volatile(RR_BULK_COPY " [%0], [%1], %2, [%3];"
               ::"r"(lds_address(to)), "l"(from), "r"(bytes), "r"(lds_address(barrier)) : "memory");
#else
  asm volatile(RR_BULK_COPY ".L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(lds_address(to)), "l"(from), "r"(bytes), "r"(lds_address(barrier)),
                 "l"(l2_policy<RR_LOAD_POLICY>()) : "memory");
#endif
}
#endif
#endif

#if !RR_AMD || defined(RR_SIMULATOR)
template <int BYTES> RR_FN Words<BYTES> read_lds(const char* from) {
  return *(const Words<BYTES>*)from;
}
template <int BYTES> RR_FN void wait_read(Words<BYTES>&) {}
#endif

struct RingTensor { const void* base; i64 stride; };

struct Ring {
  RingTensor tensor[RR_RING_TENSORS];
  u64* barriers;  // bulk: one a stage
  char* stages;   // RR_STAGES * STAGE_BYTES of LDS
  i64 rows;
  u32 vectors, lane, slot;
  int now;        // the stage being read
  int trip;       // how often the ring went round
  int worked_on;  // rows so far, up to RR_STAGES - 1

  RR_FN char* at(int stage, int which) const {
    return stages + stage * STAGE_BYTES + (which * BLOCK_ROWS + slot) * SLOT_BYTES;
  }
  RR_FN const char* row_address(int which, i64 row) const {
    const u64 element = (u64)(row * tensor[which].stride);
    return (const char*)tensor[which].base + element * ELEMENT_BYTES(RR_X);
  }

  // Asks for one row of each tensor.
  RR_FN void fill(int stage, i64 row) {
    const bool exists = row < rows;
#if RR_BULK
    if (lane == 0) {
      const u32 bytes = vectors * VEC_BYTES;
      barrier_expect(barriers + stage, exists ? RR_RING_TENSORS * bytes : 0);
      if (exists) {
#pragma unroll
        for (int which = 0; which < RR_RING_TENSORS; ++which)
          copy_bulk(at(stage, which), row_address(which, row), bytes, barriers + stage);
      }
    }
#elif RR_AMD
    const u32 wave = uniform(lane / RR_WAVE);
#pragma unroll
    for (int which = 0; which < RR_RING_TENSORS; ++which) {
      const u64 from = uniform((u64)row_address(which, exists ? row : 0));
      const u32 bytes = uniform(exists ? vectors * VEC_BYTES : 0);
      auto buffer = __builtin_amdgcn_make_buffer_rsrc((void*)from, 0, bytes, 0x00020000);
      const u32 slot_offset = uniform((u32)(at(stage, which) - stages));
#pragma unroll
      for (int c = 0; c < RR_CHUNKS; ++c) {
        const u32 first = (c * RR_THREADS_PER_ROW + wave * RR_WAVE) * VEC_BYTES;
#pragma unroll
        for (int piece = 0; piece < VEC_BYTES / COPY_BYTES; ++piece) {
          const u32 skip = first + piece * RR_WAVE * COPY_BYTES;
          constexpr int NT = RR_LOAD_POLICY == POLICY_STREAM ? 2 : 0;
          __builtin_amdgcn_raw_ptr_buffer_load_lds(
              buffer, RR_LDS_POINTER(stages + slot_offset + skip), COPY_BYTES,
              skip + lane % RR_WAVE * COPY_BYTES, 0, 0, NT);
        }
      }
    }
#else
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c) {
      if (exists && in_row(c, lane, vectors)) {
        const u64 skip = chunk_element(c, lane) * ELEMENT_BYTES(RR_X);
#pragma unroll
        for (int which = 0; which < RR_RING_TENSORS; ++which)
          copy_async(at(stage, which) + skip, row_address(which, row) + skip);
      }
    }
    commit_copies();
#endif
  }

  RR_FN void open(float* lds, i64 row_count, u32 row_vectors, u32 row_lane, u32 row_slot) {
    barriers = (u64*)(lds + 4 * BLOCK_WAVES);
    stages = (char*)lds + RING_OFFSET;
    rows = row_count;
    vectors = row_vectors;
    lane = row_lane;
    slot = row_slot;
  }

  // The first rows, `step` apart. In bulk the whole ring is asked for, else one stage stays free.
  RR_FN void start(i64 row, i64 step) {
#if RR_BULK
    if (threadIdx.x == 0) {
#pragma unroll
      for (int stage = 0; stage < RR_STAGES; ++stage) barrier_init(barriers + stage, BLOCK_ROWS);
    }
    __syncthreads();
#endif
#pragma unroll
    for (int stage = 0; stage < (RR_BULK ? RR_STAGES : RR_STAGES - 1); ++stage)
      fill(stage, row + stage * step);
  }

  // Asks for the next row. The stage before `now` is free, and lanes refill it before they wait.
  // The bulk engine could write into what others still read, so it refills after the row's sum, for
  // which every lane has read: then `now` itself is free too, unless the row is to be read again.
  RR_FN void refill(i64 row, i64 step) {
    if (RR_BULK && !RR_REREAD) {
      fill(now, row + RR_STAGES * step);
    } else if (!RR_BULK || trip || now) {  // in bulk the first row has none before it
      fill(now == 0 ? RR_STAGES - 1 : now - 1, row + (RR_STAGES - 1) * step);
    }
  }

  // Until the row of stage `now` is there.
  RR_FN void wait() {
#if RR_BULK
    barrier_wait(barriers + now, trip & 1);
#elif RR_AMD
    // Younger than this row's copies: the copies of RR_STAGES - 1 rows and, once so many rows have
    // been worked on, their stores. The counter has six bits; to wait for more is only stricter.
    constexpr int COPIES = (RR_STAGES - 1) * ROW_COPIES;
    constexpr int ALL = COPIES + (RR_STAGES - 1) * ROW_STORES;
    if (worked_on < RR_STAGES - 1) {
      ++worked_on;
      wait_memory<COPIES < 63 ? COPIES : 63>();
    } else {
      wait_memory<ALL < 63 ? ALL : 63>();
    }
#else
    wait_groups(RR_STAGES - 1);
#endif
  }

  // A tensor's row of stage `now`; what lies past its end is undefined.
  RR_FN void read(int which, XRow& kept) const {
    const char* from = at(now, which) + lane * VEC_BYTES;
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c)
      kept[c].piece[0] = read_lds<VEC_BYTES>(from + c * RR_THREADS_PER_ROW * VEC_BYTES);
#pragma unroll
    for (int c = 0; c < RR_CHUNKS; ++c) wait_read(kept[c].piece[0]);
  }

  RR_FN void next() {
    if (++now == RR_STAGES) {
      now = 0;
      ++trip;
    }
  }

  // Nothing is in flight any more: LDS may be used for something else, or given back.
  RR_FN void close() {
#if RR_BULK
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
      for (int stage = 0; stage < RR_STAGES; ++stage) barrier_invalidate(barriers + stage);
    }
#elif RR_AMD
    wait_memory<0>();
#endif
  }
};
"""

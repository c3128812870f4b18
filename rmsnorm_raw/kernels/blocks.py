"""Blocks: mbarriers, and how blocks that share a row meet.

Version 1: on AMD by words in global memory, on CUDA as a cluster, whose blocks store into each
    other's LDS.
"""

TEXT = r"""
#if RR_AMD
#if defined(RR_SIMULATOR)
#define publish_word(to, word) rr_sim_publish(to, word)
#define await_word(from) rr_sim_await(from)
#else
// A word in global memory that other blocks read; and the word once it is not 0.
RR_FN void publish_word(u64* to, u64 word) {
  __hip_atomic_store(to, word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
RR_FN u64 await_word(const u64* from) {
  u64 word;
  do word = __hip_atomic_load(from, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  while (!word);
  return word;
}
#endif
#elif defined(RR_SIMULATOR)
#define barrier_init(barrier, arrivals) rr_sim_barrier_init(barrier, arrivals)
#define barrier_expect(barrier, bytes) rr_sim_barrier_expect(barrier, bytes)
#define barrier_wait(barrier, parity) rr_sim_barrier_wait(barrier, parity)
#define store_to_block(place, value, barrier, block) \
  rr_sim_store_to_block(place, value, barrier, block)
#define arrive_at_cluster() rr_sim_arrive_at_cluster()
#define wait_for_cluster() rr_sim_wait_for_cluster()
#else
// mbarriers. One of so many arrivals a phase, to which the other blocks of a cluster may store:
RR_FN void barrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               ::"r"(lds_address(barrier)), "r"(arrivals) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// An arrival, which announces bytes.
RR_FN void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(lds_address(barrier)), "r"(bytes) : "memory");
}
// The end of a phase. It acquires for this block alone: what is read after it lies in LDS, and no
// cache holds that; the wider scope would empty L1 as well (one CCTL.IVALL more, NVRTC 13).
RR_FN void barrier_wait(u64* barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra WAIT_%=;\n}"
      ::"r"(lds_address(barrier)), "r"(parity) : "memory");
}
// The address in the LDS of a block of the cluster that `own` has in this block's.
RR_FN u32 in_block(const void* own, u32 block) {
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(lds_address(own)), "r"(block));
  return address;
}
// Stores a float into another block's LDS, 4 bytes for the mbarrier there.
RR_FN void store_to_block(float* place, float value, u64* barrier, u32 block) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
               ::"r"(in_block(place, block)), "r"(as_bits(value)), "r"(in_block(barrier, block))
               : "memory");
}
// The barrier of a cluster, in halves. Arriving releases nothing but what the fence in barrier_init
// covers; waiting acquires it, so that every block's mbarrier may be stored to.
RR_FN void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
RR_FN void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif

#if RR_ROW_BLOCKS > 1
// Blocks that share a row, and how their sums meet. `open` gives the row and sets `part`, `sum` is
// of a value that a block has in all its lanes; all lanes of all its blocks get the same bits.
#if RR_AMD
// A word for each block in global memory: a flag beside the value, so that neither has to be
// ordered before the other. A block must only wait for blocks that have started, or that start as
// soon as some other ends; the device promises no order, so blocks take numbers from a count. One
// wave of a block asks for the words: with all of them asking 2048x131072 bf16 took 332 us instead
// of 300 (words tried on an H200, 2026-11).
struct RowBlocks {
  u64* words;
  float* exchange;  // a number, and then a total
  u32 part;

  // `row_words`: for each row of the launch, and the count; all are 0 before it.
  RR_FN i64 open(u64* row_words, i64 rows, float* lds) {
    exchange = lds;
    u32* shared = (u32*)exchange;
    if (threadIdx.x == 0) *shared = atomicAdd((u32*)(row_words + rows * RR_ROW_BLOCKS), 1u);
    __syncthreads();
    const u32 number = uniform(*shared);
    part = number % RR_ROW_BLOCKS;
    words = row_words + (number - part);
    return number / RR_ROW_BLOCKS;
  }
  RR_FN float sum(float value) {
    if (threadIdx.x < RR_WAVE) {
      if (threadIdx.x == 0) publish_word(words + part, 1ull << 32 | as_bits(value));
      const u64 word = await_word(words + threadIdx.x % RR_ROW_BLOCKS);
      const float sum = lane_sum<RR_ROW_BLOCKS>(as_float((u32)word));
      if (threadIdx.x == 0) exchange[1] = sum;
    }
    __syncthreads();
    return exchange[1];
  }
};
#else
// A cluster: its blocks run at the same time and store into each other's LDS. A block that has all
// sums has nothing to come any more, and may end.
struct RowBlocks {
  u64* arrived;
  float* sums;
  u32 part;

  RR_FN i64 open(u64*, i64, float* exchange) {
    arrived = (u64*)exchange;
    sums = exchange + 2;
    part = blockIdx.x % RR_ROW_BLOCKS;
    if (threadIdx.x == 0) {
      barrier_init(arrived, 1);
      barrier_expect(arrived, 4 * RR_ROW_BLOCKS);
    }
    arrive_at_cluster();
    return blockIdx.x / RR_ROW_BLOCKS;
  }
  RR_FN float sum(float value) {
    wait_for_cluster();  // every block's mbarrier is ready
    if (threadIdx.x < RR_ROW_BLOCKS) store_to_block(sums + part, value, arrived, threadIdx.x);
    barrier_wait(arrived, 0);
    return lane_sum<RR_ROW_BLOCKS>(sums[threadIdx.x % RR_ROW_BLOCKS]);
  }
};
#endif
#endif
"""


#if RR_LAST_BLOCK
// One column of `count` rows of partial sums, in eight chains. All eight loads are issued before
// the first is masked, or each would be waited for in turn.
RR_FN float sum_partials(const float* column, u32 cols, u32 count) {
  float chain[8] = {};
  for (u32 row = 0; row < count; row += 8) {
    float part[8];
#pragma unroll
    for (u32 k = 0; k < 8; ++k) part[k] = column[(u64)(row + k < count ? row + k : 0) * cols];
#pragma unroll
    for (u32 k = 0; k < 8; ++k)
      if (row + k < count) chain[k] += part[k];
  }
  return tree_sum(chain);
}

// True in the last block that comes here, to which all the other blocks' stores are then visible.
// Every thread fences its own stores before the barrier, so that the count says they have arrived.
RR_FN bool last_block(u32* finished, u32* shared) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *shared = atomicAdd(finished, 1u) == gridDim.x - 1;
    if (*shared) *finished = 0;  // for the next launch
  }
  __syncthreads();
  __threadfence();
  return *shared;
}
#endif

// An early finish, sm_90's: its blocks may start once every block of the rows' kernel has allowed
// it or left. They wait until that kernel has ended and its stores can be seen.
#if RR_EARLY_FINISH
#if defined(RR_SIMULATOR)
#define allow_next_launch()
#define wait_for_launch_before() rr_sim_wait_for_launch_before()
#else
RR_FN void allow_next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
RR_FN void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif
#endif

#if (RR_NEED_DW && !RR_LAST_BLOCK) || (RR_EXTRAS && RR_HAS_BIAS)
// Adds `partials` rows of fp32 sums. A block has RR_FINISH_COLUMNS columns, a lane a vector of them
// from every FINISH_GROUPS-th row: little for each to do, for this kernel runs alone and its length
// is latency. Sums meet over FINISH_RUN lanes first, then in LDS. dweight: (cols) in its own dtype.
// LDS: RR_FINISH_COLUMNS floats for each of FINISH_RUNS. `partial` may be written while this
// starts, so it is not restrict: the compiler may not load from it ahead of the wait.
constexpr int FINISH_VEC = RR_ELEMENTS < 4 ? RR_ELEMENTS : 4;
constexpr int FINISH_VECTORS = RR_FINISH_COLUMNS / FINISH_VEC;
constexpr int FINISH_RUN = 8;
constexpr int FINISH_RUNS = RR_FINISH_BLOCK / (FINISH_RUN * FINISH_VECTORS);
constexpr int FINISH_GROUPS = FINISH_RUNS * FINISH_RUN;
static_assert(FINISH_VECTORS * FINISH_VEC == RR_FINISH_COLUMNS, "a block has whole vectors");
static_assert(FINISH_GROUPS * FINISH_VECTORS == RR_FINISH_BLOCK, "and every lane one of them");
#endif
#if RR_NEED_DW && !RR_LAST_BLOCK
extern "C" __global__ void __launch_bounds__(RR_FINISH_BLOCK) rmsnorm_dweight(
    const float* partial, u32 partials, u32 cols, void* __restrict__ dweight) {
  RR_LDS(lds);
#if RR_EARLY_FINISH
  wait_for_launch_before();
#endif
  const u32 run = threadIdx.x / (FINISH_RUN * FINISH_VECTORS);
  const u32 group = run * FINISH_RUN + threadIdx.x % FINISH_RUN;
  const u32 in_block = threadIdx.x / FINISH_RUN % FINISH_VECTORS * FINISH_VEC;
  const u32 column = blockIdx.x * RR_FINISH_COLUMNS + in_block;
  float sum[FINISH_VEC] = {};
  if (column < cols) {
    constexpr u32 AT_ONCE = 4;  // loads issued before the first is masked
    for (u32 row = group; row < partials; row += AT_ONCE * FINISH_GROUPS) {
      Pack<FP32, FINISH_VEC> part[AT_ONCE];
#pragma unroll
      for (u32 k = 0; k < AT_ONCE; ++k) {
        const u32 from = row + k * FINISH_GROUPS;
        const u64 element = (u64)(from < partials ? from : group) * cols + column;
        part[k] = load_pack<FP32, FINISH_VEC, POLICY_DEFAULT>(partial, element);
      }
#pragma unroll
      for (u32 k = 0; k < AT_ONCE; ++k) {
#pragma unroll
        for (int e = 0; e < FINISH_VEC; ++e)
          if (row + k * FINISH_GROUPS < partials) sum[e] += part[k][e];
      }
    }
  }
#pragma unroll
  for (int e = 0; e < FINISH_VEC; ++e) {
    sum[e] = lane_sum<FINISH_RUN>(sum[e]);
    if (threadIdx.x % FINISH_RUN == 0) lds[run * RR_FINISH_COLUMNS + in_block + e] = sum[e];
  }
  __syncthreads();
  const u32 last = blockIdx.x * RR_FINISH_COLUMNS + threadIdx.x;  // column of this lane now
  if (threadIdx.x < RR_FINISH_COLUMNS && last < cols) {
    float part[FINISH_RUNS];
#pragma unroll
    for (int i = 0; i < FINISH_RUNS; ++i) part[i] = lds[i * RR_FINISH_COLUMNS + threadIdx.x];
    const float total[1] = {tree_sum(part)};
    store_pack<RR_W, 1, POLICY_DEFAULT>(dweight, last, total);
  }
}
#endif

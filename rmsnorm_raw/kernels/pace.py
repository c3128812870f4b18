"""Pacing: programs of a persistent grid that get ahead of the others wait for them.

Every program has as many rows as the others, for dW is to be the same bits in every run. But memory
that is busy does not serve all multiprocessors alike: at 32768x8192 bf16 backward those of an H200
ended between 314 and 386 us (512 threads, 2026-11), and a launch ends with its last.

Version 1: all count their steps in one word, and whoever is ahead of the average naps before it
    asks for its next row: 389 -> 375 us at 32768x8192 bf16, 762 -> 737 fp32, 209 -> 201 at
    8192x16384 bf16 (H200, 2026-11).
"""

TEXT = r"""
#if defined(RR_SIMULATOR)
RR_FN u32 read_count(const u32* count) { return *(const volatile u32*)count; }
#define nap() rr_sim_nap()
#else
RR_FN u32 read_count(const u32* count) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
  return value;
}
RR_FN void nap() { asm volatile("nanosleep.u32 100;"); }
#endif

// `progress` counts the steps of all programs, from whatever it held before: nothing but time
// depends on it. A program that waits costs nothing while the others move. Where they do not, for
// want of a multiprocessor, it waits once, about 8 us, and never again: it then takes itself to be
// far behind. (A flag for that took 374.9 us at 32768x8192 bf16 instead of 373.6.)
struct Pace {
  u32* progress;
  u32 done;  // by all programs if all were where this one is
  u32 seen;  // done by all, one step ago

  RR_FN void open(u32* count) {
    progress = count;
    done = seen = read_count(count);
  }
  // After a step of this program. Only thread 0 waits: it asks for rows of the first row slot, and
  // the other slots are held at the next step's barrier. It may be ahead by the step that `seen` is
  // old and by 16 KiB of each tensor: that took 375.7 us at 32768x8192 bf16, 8 KiB 377.4 and 24
  // more than 377.4; at 8192x16384, where 16 KiB are half a step, 201.2 and a whole step 204.4.
  RR_FN void step() {
    constexpr u32 STEP_BYTES = BLOCK_ROWS * SLOT_BYTES;
    const u32 ahead = gridDim.x + gridDim.x * (16 << 10) / STEP_BYTES;
    constexpr int MOST_NAPS = 10;
    if (threadIdx.x == 0) {
      atomicAdd(progress, 1u);
      done += gridDim.x;
      int naps = 0;
#pragma unroll 1
      for (; naps < MOST_NAPS && (int)(done - seen - ahead) > 0; ++naps) {
        nap();
        seen = read_count(progress);
      }
      if (naps == MOST_NAPS) done -= 1u << 30;
      seen = read_count(progress);
    }
  }
};
"""

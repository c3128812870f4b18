// How waves and blocks of the simulated machine wait for each other: words in global memory, mbarriers with
// the bulk copies that arrive at them, and clusters. Faults: a wait that nobody can end, an mbarrier before its
// init or with more arrivals or bytes than it holds, a store into the LDS of a block that does not run.

namespace rr_sim {
// ---- words between resident blocks -----------------------------------------------------------------------------
static inline void publish(u64* to, u64 word, u32 line) { store(to, &word, 8, line); }

// The word there, once it is not zero. As one for the wave: nobody goes on while the word of a lane is zero.
static u64 await(const u64* from, u32 line) {
  require_aligned(from, 8, line);
  for (;;) {
    const u64 word = *(const volatile u64*)from;
    const u64* words = exchange(word, line);
    u32 lane = 0;
    while (lane < WAVE && words[lane]) ++lane;
    if (lane == WAVE) {
      ++waits_ended;
      return word;
    }
    if (nobody_runs)
      fail(line, "deadlock: no wave can go on (no word for lane %u; of %u blocks %u have started, %u are resident "
           "and at most %u may be)", lane, launch->grid, started, resident, SLOTS);
    stop_at(WAITING | line);
  }
}

// Time passes for nobody else here. A launch that naps for ever is a fault.
static void nap(u32 line) {
  if (++naps > 1000000) fail(line, "%u naps in one launch: a wait that has no end", naps);
}

#define rr_sim_nap() rr_sim::nap(__LINE__)
#define rr_sim_publish(to, word) rr_sim::publish(to, word, __LINE__)
#define rr_sim_await(from) rr_sim::await(from, __LINE__)

#if RR_WAVE == 32
// ---- mbarriers ------------------------------------------------------------------------------------------------
// An mbarrier (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").
struct Barrier {
  u64 arrivals : 20;      // of every phase
  u64 pending : 20;       // of them in this phase
  u64 parity : 1;         // of this phase
  u64 uninitialised : 1;  // LDS begins as ones
  long long bytes : 22;   // expected in this phase and not there yet; negative where they came first
};
static_assert(sizeof(Barrier) == 8, "an mbarrier has 8 bytes");
constexpr u32 MOST_ARRIVALS = (1 << 20) - 1, MOST_BYTES = (1 << 20) - 1;

static void end_phase(Barrier* barrier) {
  if (barrier->pending || barrier->bytes) return;
  barrier->parity ^= 1;
  barrier->pending = barrier->arrivals;
}

static void bytes_arrived(Barrier* barrier, u32 bytes) {
  barrier->bytes -= bytes;
  end_phase(barrier);
}

static Barrier* barrier_at(u64* address, u32 line) {
  require_in_lds(address, 8, line);
  require_aligned(address, 8, line);
  return (Barrier*)address;
}

static Barrier* live_barrier(u64* address, u32 line) {
  Barrier* barrier = barrier_at(address, line);
  if (barrier->uninitialised)
    fail(line, "mbarrier at byte %u of LDS used before its init", (u32)((char*)address - current->lds));
  return barrier;
}

static void barrier_init(u64* address, u32 arrivals, u32 line) {
  if (!arrivals || arrivals > MOST_ARRIVALS)
    fail(line, "mbarrier of %u arrivals: 1 to %u", arrivals, MOST_ARRIVALS);
  *barrier_at(address, line) = {arrivals, arrivals, 0, 0, 0};
}

static void barrier_expect(u64* address, u32 bytes, u32 line) {
  Barrier* barrier = live_barrier(address, line);
  if (!barrier->pending) fail(line, "mbarrier: more than %u arrivals in a phase", (u32)barrier->arrivals);
  if ((long long)barrier->bytes + bytes > MOST_BYTES)
    fail(line, "mbarrier: more than %u bytes expected", MOST_BYTES);
  barrier->bytes += bytes;
  --barrier->pending;
  end_phase(barrier);
}

static void copy_bulk(char* to, const void* from, u32 bytes, u64* address, u32 line) {
  if (!bytes || bytes % 16) fail(line, "bulk copy of %u bytes: a multiple of 16", bytes);
  Barrier* barrier = live_barrier(address, line);
  issue(queues[BULK], {to, (const char*)from, bytes, line, 0, barrier, nullptr});
  if (!launch->land_late) bytes_arrived(barrier, bytes);
}

// Whether the phase of a parity is over. The last moment of its copies is when they alone are missing.
static bool phase_over(Barrier* barrier, u32 parity) {
  Queue& bulk = queues[BULK];
  for (Copy** link = &bulk.first; *link && barrier->parity == parity && !barrier->pending;) {
    const Copy* copy = *link;
    if (copy->barrier == barrier) {
      bytes_arrived(barrier, copy->bytes);
      retire(bulk, link);
    } else {
      link = &(*link)->next;
    }
  }
  return barrier->parity != parity;
}

// As one for the wave: the lane that asks for the copies may have yet to run.
static void barrier_wait(u64* address, u32 parity, u32 line) {
  Barrier* barrier = live_barrier(address, line);
  require_same((u64)address | parity, "mbarriers or parities", line);
  while (!phase_over(barrier, parity)) {
    if (nobody_runs)
      fail(line, "deadlock: no wave can go on (missing at this mbarrier: arrivals %u, bytes %d)",
           (u32)barrier->pending, (int)barrier->bytes);
    stop_at(WAITING | line);
  }
  ++waits_ended;
}

// ---- clusters -------------------------------------------------------------------------------------------------
// SLOTS blocks side by side in the grid. Their barrier comes in halves.
static Block* of_cluster(u32 rank) {
  const u32 index = current->index / SLOTS * SLOTS + rank;
  for (Block& block : blocks)
    if (block.resident && block.index == index) return &block;
  return nullptr;
}

static void arrive_at_cluster(u32 line) {
  if (launch->grid % SLOTS) fail(line, "a grid of %u blocks is not whole clusters of %u", launch->grid, SLOTS);
  ++current->arrived[threadIdx.x];
  ++current->arrivals;
}

// As one for the wave. A block that has returned is waited for no more.
static void wait_for_cluster(u32 line) {
  const u32 phase = current->arrived[threadIdx.x];
  if (!phase) fail(line, "lane %u waits at its cluster's barrier and has not arrived there", threadIdx.x % WAVE);
  require_same(phase, "arrivals at the cluster's barrier", line);
  for (u32 rank = 0; rank < SLOTS;) {
    const Block* other = of_cluster(rank);
    const bool ended = !other && current->index / SLOTS * SLOTS + rank < started;
    if (ended || (other && other->arrivals >= phase * launch->block)) {
      ++rank;
      continue;
    }
    if (nobody_runs)
      fail(line, "deadlock: no wave can go on (block %u of the cluster has not arrived at its barrier)", rank);
    stop_at(WAITING | line);
  }
  ++waits_ended;
}

// Where an address of this block's LDS lies in that of another block of the cluster.
static char* in_block(const void* own, u32 bytes, u32 rank, u32 line) {
  require_in_lds(own, bytes, line);
  require_aligned(own, bytes, line);
  if (rank >= SLOTS) fail(line, "block %u of a cluster of %u", rank, SLOTS);
  Block* other = of_cluster(rank);
  if (!other && current->index / SLOTS * SLOTS + rank < started)
    fail(line, "block %u of the cluster has ended, and its LDS with it", rank);
  if (!other) fail(line, "block %u of the cluster may not run: wait for the cluster first", rank);
  return other->lds + ((const char*)own - current->lds);
}

static void store_to_block(float* place, float value, u64* address, u32 rank, u32 line) {
  Barrier* barrier = (Barrier*)in_block(address, 8, rank, line);
  if (barrier->uninitialised) fail(line, "mbarrier of block %u of the cluster used before its init", rank);
  __builtin_memcpy(in_block(place, 4, rank, line), &value, 4);
  bytes_arrived(barrier, 4);
}

#define rr_sim_arrive_at_cluster() rr_sim::arrive_at_cluster(__LINE__)
#define rr_sim_wait_for_cluster() rr_sim::wait_for_cluster(__LINE__)
#define rr_sim_store_to_block(place, value, barrier, rank) \
  rr_sim::store_to_block(place, value, barrier, rank, __LINE__)
#define rr_sim_barrier_init(barrier, arrivals) rr_sim::barrier_init(barrier, arrivals, __LINE__)
#define rr_sim_barrier_expect(barrier, bytes) rr_sim::barrier_expect(barrier, bytes, __LINE__)
#define rr_sim_copy_bulk(to, from, bytes, barrier) rr_sim::copy_bulk(to, from, bytes, barrier, __LINE__)
#define rr_sim_barrier_wait(barrier, parity) rr_sim::barrier_wait(barrier, parity, __LINE__)
#endif
}  // namespace rr_sim

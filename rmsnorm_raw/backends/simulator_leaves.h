// What the dialect's leaves are on the simulated machine of simulator.h: barriers, wave operations, loads,
// stores, asynchronous copies, conversions. Faults: a lane number outside the wave, a misaligned vector, a copy
// that the hardware does not have, one that is in flight when its block ends.

namespace rr_sim {
// ---- barriers and wave operations ----------------------------------------------------------------------------
#define __syncthreads() rr_sim::stop_at(rr_sim::BARRIER | __LINE__)

// Posts a lane's value, waits for the others, and returns what lanes 0, 1, ... of the wave posted.
static inline const u64* exchange(u64 value, u32 line) {
  u64* values = posted[turn];
  values[threadIdx.x] = value;
  stop_at(line);
  return values + threadIdx.x / WAVE * WAVE;
}

#if RR_WAVE == 64
// The lane that a DPP control reads (AMD CDNA3 ISA guide, "DPP controls"); -1 where there is none; -2 for
// controls that the simulator does not have.
constexpr int dpp_source(int control, int lane) {
  const int row = lane & ~15, at = lane & 15, by = control & 15;
  if (control >= 0 && control <= 0xff) return (lane & ~3) + (control >> 2 * (lane & 3) & 3);  // quad_perm
  if (control > 0x100 && control <= 0x10f) return at + by <= 15 ? lane + by : -1;             // row_shl
  if (control > 0x110 && control <= 0x11f) return at >= by ? lane - by : -1;                  // row_shr
  if (control > 0x120 && control <= 0x12f) return row + ((at - by) & 15);                     // row_ror
  if (control == 0x140) return row + 15 - at;                                                 // row_mirror
  if (control == 0x141) return row + (at & 8) + 7 - (at & 7);                                 // row_half_mirror
  if (control == 0x142) return row ? row - 1 : -1;                                            // row_bcast:15
  if (control == 0x143) return lane >= 32 ? 31 : -1;                                          // row_bcast:31
  return -2;
}

template <int CONTROL, int ROWS, int BANKS, bool BOUND>
static inline int update_dpp(int old, int value, u32 line) {
  static_assert(dpp_source(CONTROL, 0) != -2, "DPP control not known to the simulator, or not on gfx950");
  const u64* wave = exchange((u32)value, line);
  const int lane = (int)(threadIdx.x % WAVE), source = dpp_source(CONTROL, lane);
  if (!((ROWS >> lane / 16) & (BANKS >> lane / 4 % 4) & 1)) return old;
  return source < 0 ? (BOUND ? 0 : old) : (int)wave[source];
}

struct Pair {
  u32 first, second;
  u32 operator[](int i) const { return i == 0 ? first : second; }
};

// v_permlane16_swap (ROW = 16) and v_permlane32_swap (ROW = 32): the odd rows of `first` change places
// with the even rows of `second`.
template <u32 ROW> static inline Pair permlane_swap(u32 first, u32 second, u32 line) {
  const u64* wave = exchange(first | (u64)second << 32, line);
  const u32 lane = threadIdx.x % WAVE;
  if (lane & ROW) return {(u32)(wave[lane - ROW] >> 32), second};
  return {first, (u32)wave[lane + ROW]};
}

static inline int read_lane(int value, u32 source, u32 line) {
  const u64* wave = exchange((u32)value | (u64)source << 32, line);
  const u32 of_lane_0 = (u32)(wave[0] >> 32);
  if (source >= WAVE) fail(line, "readlane of lane %u in a wave of %u", source, WAVE);
  if (source != of_lane_0) fail(line, "readlane of lane %u here and of lane %u there", of_lane_0, source);
  return (int)wave[source];
}

#define __builtin_amdgcn_update_dpp(old, value, control, rows, banks, bound) \
  rr_sim::update_dpp<control, rows, banks, bound>(old, value, __LINE__)
// the last two parameters speak of lanes that are switched off: none is
#define __builtin_amdgcn_permlane16_swap(a, b, fi, bc) rr_sim::permlane_swap<16>(a, b, __LINE__)
#define __builtin_amdgcn_permlane32_swap(a, b, fi, bc) rr_sim::permlane_swap<32>(a, b, __LINE__)
#define __builtin_amdgcn_readlane(value, lane) rr_sim::read_lane(value, lane, __LINE__)
#define __builtin_amdgcn_readfirstlane(value) rr_sim::read_lane(value, 0, __LINE__)
#else
template <class T> static inline T shuffle_xor(u32 mask, T value, u32 distance, u32 line) {
  static_assert(sizeof(T) == 4, "shuffles move 4 bytes");
  const u32 source = (threadIdx.x % WAVE) ^ distance;
  if (mask != 0xffffffffu) fail(line, "shuffle with mask %#x: all 32 lanes take part", mask);
  if (source >= WAVE) fail(line, "shuffle from lane %u in a wave of %u", source, WAVE);
  u32 bits;
  __builtin_memcpy(&bits, &value, 4);
  bits = (u32)exchange(bits, line)[source];
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

#define __shfl_xor_sync(mask, value, distance) rr_sim::shuffle_xor(mask, value, distance, __LINE__)
#endif

// ---- memory --------------------------------------------------------------------------------------------------
static __forceinline__ void require_aligned(const void* address, u32 bytes, u32 line) {
  const u32 past = (u32)((u64)address % bytes);
  if (past) fail(line, "misaligned access of %u bytes: %u past a multiple of them", bytes, past);
}

static void require_in_lds(const void* address, u32 bytes, u32 line) {
  const long long at = (const char*)address - current->lds;
  if (at < 0 || at + bytes > launch->lds_bytes)
    fail(line, "%u bytes at byte %lld of LDS, which has %u", bytes, at, launch->lds_bytes);
}

// What waits by count go by: the asynchronous copies in flight of a thread, oldest first, and how many
// operations it has made. One more queue holds the bulk copies of the block.
struct Copy;
struct Queue {
  Copy* first;
  Copy** end;  // the link that the next copy hangs on
  u64 made;    // AMD: copies and stores; CUDA: groups of copies
};
constexpr u32 BULK = MAX_BLOCK;
static Queue queues[MAX_BLOCK + 1];

static __forceinline__ void require_waited(u32 line) {
  if (!running->waited)
    fail(line, "thread %u uses memory while the launch before this one may still be running", threadIdx.x);
}
static __forceinline__ void load(void* to, const void* from, u32 bytes, u32 line) {
  require_waited(line);
  require_aligned(from, bytes, line);
  __builtin_memcpy(to, from, bytes);
}
static __forceinline__ void store(void* to, const void* from, u32 bytes, u32 line) {
  require_waited(line);
  require_aligned(to, bytes, line);
  __builtin_memcpy(to, from, bytes);
#if RR_WAVE == 64
  ++queues[threadIdx.x].made;
#endif
}
#define rr_sim_load(to, from, bytes) rr_sim::load(to, from, bytes, __LINE__)
#define rr_sim_store(to, from, bytes) rr_sim::store(to, from, bytes, __LINE__)
#define rr_sim_wait_for_launch_before() ((void)(rr_sim::running->waited = true))
#define rr_sim_lds() (rr_sim::current->lds)
#define __threadfence() ((void)0)  // whoever runs next sees every store

// ---- asynchronous copies to LDS --------------------------------------------------------------------------------
// Hardware may land a copy at any time from its issue to the end of the wait that covers it. A launch tries
// one end or the other. At its issue, a copy spoils what is still being read there. At the last moment that
// waits allow, from what the source then holds, whoever has not waited finds what was there before.
//
// vmcnt counts the operations of a wave, here every lane counts its own. Lanes that skip an operation count
// fewer than the wave, so that N operations reach further back and copies land later than on hardware: a
// wrong wait is never hidden. For the same reason loads do not count. The compiler may move a load over a
// wait, or drop it, and no wait may depend on it; copies and stores stay where they are written.
struct Barrier;  // simulator_barriers.h
struct Copy {
  char* to;
  const char* from;  // nullptr: zeros
  u32 bytes, line;
  u64 number;        // of the operation or group, counted by Queue::made
  Barrier* barrier;  // of a bulk copy
  Copy* next;
};
constexpr u32 MOST_COPIES = 1 << 16;  // 4 bytes each would fill any LDS
static Copy copies[MOST_COPIES];
static Copy* spare;
static u32 copies_used, in_flight;

static void land(const Copy& copy) {
  if (copy.from) __builtin_memcpy(copy.to, copy.from, copy.bytes);
  else __builtin_memset(copy.to, 0, copy.bytes);
}

static void issue(Queue& queue, const Copy& copy) {
  if (SLOTS > 1) fail(copy.line, "%s", "asynchronous copies in blocks that share rows are not modelled");
  require_in_lds(copy.to, copy.bytes, copy.line);
  require_aligned(copy.to, copy.bytes < 16 ? copy.bytes : 16, copy.line);
  require_aligned(copy.from, copy.bytes < 16 ? copy.bytes : 16, copy.line);
  if (!launch->land_late) return land(copy);
  Copy* place = spare;
  if (place) spare = place->next;
  else if (copies_used < MOST_COPIES) place = &copies[copies_used++];
  else fail(copy.line, "more than %u copies in flight", MOST_COPIES);
  *place = copy;
  if (!queue.first) queue.end = &queue.first;
  *queue.end = place;
  queue.end = &place->next;
  ++in_flight;
}

// Lands the copy that hangs on a link of a queue, and takes it off.
static void retire(Queue& queue, Copy** link) {
  Copy* copy = *link;
  *link = copy->next;
  if (!*link) queue.end = link;
  land(*copy);
  copy->next = spare;
  spare = copy;
  --in_flight;
}

static void land_all_but(u64 youngest, Queue& queue) {
  while (queue.first && queue.first->number + youngest <= queue.made) retire(queue, &queue.first);
}

static bool no_copy_in_flight() {
  if (!in_flight) return true;
  const Queue* queue = queues;
  while (!queue->first) ++queue;
  report(queue->first->line, "copies in flight when the block ends: %u", in_flight);
  return false;
}

static void forget_copies() {
  if (!in_flight) return;
  for (Queue& queue : queues) queue.first = nullptr;
  spare = nullptr;
  copies_used = in_flight = 0;
}

// An operand that a wave has once, and not every lane of its own. All lanes are here when it returns.
static void require_same(u64 value, const char* what, u32 line) {
  if (value != exchange(value, line)[0]) fail(line, "lanes of a wave with different %s", what);
}

#if RR_WAVE == 64
struct Buffer {
  const char* base;
  u32 bytes;
};

static inline Buffer make_buffer(const void* base, u32 stride, u32 bytes, u32 flags, u32 line) {
  if (stride || flags != 0x00020000u)
    fail(line, "buffer of stride %u and flags %#x: a raw buffer has 0 and 0x20000", stride, flags);
  return {(const char*)base, bytes};
}

// The destination is one address for the wave: lanes land side by side from there on, wherever each of them
// copies from. The immediate offset moves both ends.
template <u32 BYTES>
static void copy_to_lds(Buffer buffer, char* lds, u32 voffset, u32 soffset, u32 immediate, u32 line) {
  static_assert(BYTES == 4 || (BYTES == 16 && RR_GFX >= 950), "a lane copies 4 bytes, or on gfx950 16");
  require_same((u64)lds, "LDS addresses", line);
  require_same((u64)buffer.base, "buffers", line);
  require_same((u64)soffset << 32 | buffer.bytes, "buffers or scalar offsets", line);
  const u64 offset = (u64)voffset + soffset + immediate;
  if (offset < buffer.bytes && offset + BYTES > buffer.bytes)
    fail(line, "copy over the end of its buffer: from byte %llu of %u", offset, buffer.bytes);
  Queue& queue = queues[threadIdx.x];
  char* to = lds + immediate + threadIdx.x % WAVE * BYTES;
  const char* from = offset < buffer.bytes ? buffer.base + offset : nullptr;
  issue(queue, {to, from, BYTES, line, ++queue.made, nullptr, nullptr});
}

// One instruction for the wave: nothing lands before all lanes are here, and nobody goes on before it has.
static void wait_vmcnt(u32 count, u32 line) {
  if (count > 63) fail(line, "vmcnt(%u): the counter has 6 bits", count);
  require_same(count, "counts", line);
  land_all_but(count, queues[threadIdx.x]);
  stop_at(line);
}

#define __builtin_amdgcn_make_buffer_rsrc(base, stride, bytes, flags) \
  rr_sim::make_buffer(base, stride, bytes, flags, __LINE__)
#define __builtin_amdgcn_raw_ptr_buffer_load_lds(buffer, lds, bytes, voffset, soffset, immediate, policy) \
  rr_sim::copy_to_lds<bytes>(buffer, lds, voffset, soffset, immediate, __LINE__)
#define rr_sim_wait_vmcnt(count) rr_sim::wait_vmcnt(count, __LINE__)
#else
template <u32 BYTES> static void copy_async(char* to, const void* from, u32 line) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  Queue& queue = queues[threadIdx.x];
  issue(queue, {to, (const char*)from, BYTES, line, queue.made + 1, nullptr, nullptr});
}

#define rr_sim_copy_async(to, from, bytes) rr_sim::copy_async<bytes>(to, from, __LINE__)
#define rr_sim_commit_copies() ((void)++rr_sim::queues[threadIdx.x].made)
// A thread waits for its own copies; others see them after a barrier.
#define rr_sim_wait_groups(groups) rr_sim::land_all_but(groups, rr_sim::queues[threadIdx.x])
#endif

// ---- numbers -------------------------------------------------------------------------------------------------
static inline u32 bits_of(float value) {
  u32 bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

// value / 2^shift, to nearest even
static inline u32 round_shift(u32 value, u32 shift) {
  return (value + (1u << (shift - 1)) - 1 + ((value >> shift) & 1)) >> shift;
}
}  // namespace rr_sim

static inline unsigned atomicAdd(unsigned* address, unsigned value) { return (*address += value) - value; }
static inline float rr_sim_rsqrt(float value) { return (float)(1.0 / sqrt((double)value)); }

static inline rr_sim::u16 rr_sim_bf16_bits(float value) {
  const rr_sim::u32 bits = rr_sim::bits_of(value);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return (rr_sim::u16)(nan ? bits >> 16 | 0x40u : rr_sim::round_shift(bits, 16));  // NaN: made quiet
}

static inline rr_sim::u16 rr_sim_f16_bits(float value) {
  const rr_sim::u32 bits = rr_sim::bits_of(value), size = bits & 0x7fffffffu, exponent = size >> 23;
  rr_sim::u32 half = 0;  // under 2^-25; then: NaN, made quiet; infinity from 65520; normal; subnormal
  if (size > 0x7f800000u) half = 0x7e00u | (size >> 13 & 0x1ffu);
  else if (size >= 0x477ff000u) half = 0x7c00u;
  else if (exponent >= 113) half = rr_sim::round_shift(size - (112u << 23), 13);
  else if (exponent >= 102) half = rr_sim::round_shift((size & 0x7fffffu) | 0x800000u, 126 - exponent);
  return (rr_sim::u16)((bits >> 16 & 0x8000u) | half);
}

// An 8-bit float of a value that it can hold: OCP's e4m3, or gfx942's, whose exponents begin one lower and
// whose only NaN has the bits of a negative zero.
static inline unsigned char rr_sim_e4m3_bits(float value, bool fnuz) {
  const rr_sim::u32 bits = rr_sim::bits_of(value), size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return fnuz ? 0x80 : (unsigned char)(bits >> 24 & 0x80u | 0x7fu);
  const int least = fnuz ? -7 : -6, exponent = (int)(size >> 23) - 127;
  const int binade = exponent < least ? least : exponent, shift = 20 + binade - exponent;
  const rr_sim::u32 steps = shift > 25 ? 0 : rr_sim::round_shift((size & 0x7fffffu) | 0x800000u, shift);
  const rr_sim::u32 magnitude = ((rr_sim::u32)(binade - least) << 3) + steps;
  return (unsigned char)(fnuz && !magnitude ? 0 : (bits >> 24 & 0x80u) | magnitude);
}

static inline float rr_sim_f16_value(rr_sim::u16 half) {
  const rr_sim::u32 sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ffu;
  if (exponent == 0) return (sign ? -0x1p-24f : 0x1p-24f) * (float)fraction;
  const rr_sim::u32 bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

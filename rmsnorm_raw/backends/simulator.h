// A strict simulator of GPU kernels. A translation unit of backends/cpu.py is: the source's defines,
// RR_SIMULATOR and RR_WAVE, this file, the kernels, and one RR_SIM_ENTRY for each entry point.
//
// The threads of a block are fibers of one OS thread. A fiber runs until it reaches a barrier or a wave
// operation; then the next lane of its wave runs, and after the last one the scheduler looks at where
// they all stopped. A wave goes on to its next barrier before another wave runs, in an order that the
// host chooses: a value that passes between waves without a barrier is missing in one order or another.
//
// Faults, each with its line: a barrier or a wave operation that part of a wave or block misses, a lane
// number outside the wave, a misaligned vector, a store just outside LDS. LDS starts as NaN. A place is
// known by its line, so a helper called on both sides of a branch counts as one place.
//
// No C++ headers: <cmath> and <utility> alone double the time of a build (0.15 to 0.29 s, g++ 12).

#if !defined(__x86_64__) || defined(RR_PORTABLE_SWITCH)
#define RR_SIM_UCONTEXT 1
#define _XOPEN_SOURCE 700  // macOS declares ucontext only with it
#include <ucontext.h>
#endif

extern "C" {
int snprintf(char*, __SIZE_TYPE__, const char*, ...);
float fmaf(float, float, float);
float fabsf(float);
double fma(double, double, double);
double sqrt(double);
double fabs(double);
}

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

struct RrSimIndex { unsigned x; };  // grids and blocks have one dimension here
static RrSimIndex threadIdx, blockIdx, blockDim, gridDim;

namespace rr_sim {
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 WAVE = RR_WAVE, MAX_BLOCK = 1024;
static_assert(WAVE == 64 || WAVE == 32, "a wave has 64 lanes (AMD) or 32 (CUDA)");

// ---- fibers --------------------------------------------------------------------------------------------
#if defined(RR_SIM_UCONTEXT)
typedef ucontext_t Context;

static inline void switch_context(Context* from, Context* to) { swapcontext(from, to); }

static void make_context(Context* context, char* stack, u64 stack_bytes, void (*body)()) {
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = stack_bytes;
  context->uc_link = nullptr;
  makecontext(context, body, 0);
}
#else
typedef void* Context;  // the stack pointer of a fiber that is not running

// Saves what the x86-64 ABI calls callee-saved on this stack and takes it from the other. It ends in a
// jump: `ret` would be predicted to go back to this fiber's caller, and a forward of 64x1024 bf16 took
// 1.8 ms with it instead of 0.95 ms (ucontext: 32 ms).
extern "C" __attribute__((visibility("hidden")))
void rr_sim_switch(Context* from, Context to) __asm__("rr_sim_switch");
__asm__(".text\n"
        "rr_sim_switch:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
        "  popq %rcx\n"
        "  jmp *%rcx\n");
static inline void switch_context(Context* from, Context* to) { rr_sim_switch(from, *to); }

static void make_context(Context* context, char* stack, u64 stack_bytes, void (*body)()) {
  void** top = (void**)((u64)(stack + stack_bytes) & ~15ull);
  *--top = nullptr;  // where a caller's return address would be: body() never returns
  *--top = (void*)body;
  *context = top - 6;  // the six registers, whatever they hold
}
#endif

// Where a fiber stopped: the line of a wave operation, the line of a barrier + BARRIER, or RETURNED.
constexpr u32 BARRIER = 1u << 30, RETURNED = 1u << 31;

struct Fiber {
  Context context;
  u32 thread;  // its threadIdx.x
  u32 site;
};

// What the host asks for and the fault that it gets back; cpu.py has the same fields.
struct Launch {
  char* stacks;  // one of stack_bytes for each thread
  u64 stack_bytes;
  char* lds;           // between guard_bytes bytes before it and as many after lds_bytes
  const char* guard;   // what the guards hold
  const u16* threads;  // the threads of a block in running order, wave by wave
  const char* args;    // the kernel's arguments, 8 bytes each
  u32 guard_bytes, lds_bytes, grid, block;
  u32 fault_line, fault_block;
  char fault[256];  // empty: no fault
};

// The fibers of a wave follow each other in running order, and the one after them is the scheduler.
constexpr u32 CHAIN = WAVE + 1;
static Fiber fibers[MAX_BLOCK / WAVE * CHAIN];
static Fiber *running, *scheduler;
static Launch* launch;
static void (*kernel_body)(const char* args);
// What lanes post to each other. Two turns alternate: a lane that is ahead posts its next value while
// others have yet to read this one.
static u64 posted[2][MAX_BLOCK];
static u32 turn;

static inline void resume(Fiber* from, Fiber* to) {
  running = to;
  threadIdx.x = to->thread;
  switch_context(&from->context, &to->context);
}

static __attribute__((noinline)) void stop_at(u32 site) {
  Fiber* self = running;
  self->site = site;
  resume(self, self + 1);
}

static void fiber_main() {
  for (;;) {
    kernel_body(launch->args);
    stop_at(RETURNED);  // resumed for the next block
  }
}

template <class... Values> static void report(u32 line, const char* format, Values... values) {
  launch->fault_line = line;
  launch->fault_block = blockIdx.x;
  snprintf(launch->fault, sizeof launch->fault, format, values...);
}

// Ends the launch from inside a fiber.
template <class... Values>
[[noreturn]] static __attribute__((noinline, cold)) void fail(u32 line, const char* format, Values... values) {
  report(line, format, values...);
  resume(running, scheduler);
  __builtin_unreachable();
}

// ---- the scheduler ---------------------------------------------------------------------------------------
static const char* noun(u32 site) { return site & BARRIER ? "barrier" : "wave operation"; }

static void report_divergence(const Fiber* first, const Fiber* other, u32 step, u32 count) {
  const Fiber* waiting = first->site == RETURNED ? other : first;
  if (waiting == other) other = first;
  u32 arrived = 0;
  for (u32 i = 0; i < count; ++i) arrived += first[i * step].site == waiting->site;
  const bool waves = step != 1;
  char who[32], where[64] = "has returned";
  snprintf(who, sizeof who, waves ? "waves" : "lanes of wave %u", first->thread / WAVE);
  if (other->site != RETURNED)
    snprintf(where, sizeof where, "is at the %s of line %u", noun(other->site), other->site & ~BARRIER);
  report(waiting->site & ~BARRIER, "divergent %s: %u of %u %s arrived, %s %u %s", noun(waiting->site), arrived,
         count, who, waves ? "wave" : "lane", waves ? other->thread / WAVE : other->thread % WAVE, where);
}

// Whether `count` fibers, `step` apart, stopped at one place: the lanes of a wave, or the first lanes of
// the waves of a block.
static bool all_together(const Fiber* first, u32 step, u32 count) {
  for (u32 i = 1; i < count; ++i)
    if (first[i * step].site != first->site) {
      report_divergence(first, first + i * step, step, count);
      return false;
    }
  return true;
}

// Runs a wave until its lanes are at a barrier or have returned; false after a fault.
static bool run_wave(Fiber* lanes) {
  scheduler = lanes + WAVE;
  do {
    turn ^= 1;
    resume(scheduler, lanes);
    if (launch->fault[0] || !all_together(lanes, 1, WAVE)) return false;
  } while (lanes->site < BARRIER);
  return true;
}

static bool guards_hold() {
  const int size = (int)launch->guard_bytes;
  const char *before = launch->lds - size, *after = launch->lds + launch->lds_bytes;
  int at = 0;
  if (__builtin_memcmp(after, launch->guard, launch->guard_bytes)) {
    while (after[at] == launch->guard[at]) ++at;
    at += (int)launch->lds_bytes;
  } else if (__builtin_memcmp(before, launch->guard, launch->guard_bytes)) {
    do --at;
    while (before[size + at] == launch->guard[size + at]);
  } else {
    return true;
  }
  report(0, "store past the end of LDS: at byte %d of %u", at, launch->lds_bytes);
  return false;
}

static bool run_block() {
  __builtin_memset(launch->lds, 0xff, launch->lds_bytes);  // NaN in fp16, bf16 and fp32
  const u32 waves = launch->block / WAVE;
  do {
    for (u32 wave = 0; wave < waves; ++wave)
      if (!run_wave(fibers + wave * CHAIN)) return false;
    if (!all_together(fibers, CHAIN, waves)) return false;
  } while (fibers->site != RETURNED);
  return guards_hold();
}

static void run_grid(Launch* request, void (*body)(const char*)) {
  launch = request;
  kernel_body = body;
  gridDim.x = launch->grid;
  blockDim.x = launch->block;
  for (u32 i = 0; i < launch->block; ++i) {
    Fiber* fiber = fibers + i / WAVE * CHAIN + i % WAVE;
    fiber->thread = launch->threads[i];
    make_context(&fiber->context, launch->stacks + i * launch->stack_bytes, launch->stack_bytes, fiber_main);
  }
  __builtin_memcpy(launch->lds - launch->guard_bytes, launch->guard, launch->guard_bytes);
  __builtin_memcpy(launch->lds + launch->lds_bytes, launch->guard, launch->guard_bytes);
  for (blockIdx.x = 0; blockIdx.x < launch->grid; ++blockIdx.x)
    if (!run_block()) return;
}

// ---- entry points ------------------------------------------------------------------------------------------
template <u32... I> struct Indices {};
template <u32 N, u32... I> struct Count : Count<N - 1, N - 1, I...> {};
template <u32... I> struct Count<0, I...> { typedef Indices<I...> type; };

template <class T> struct Parameter {
  static_assert(sizeof(T) <= 8, "an argument has at most 8 bytes");
  static constexpr char kind = (T)0.5 != (T)0 ? 'f' : 'i';
};
template <class T> struct Parameter<T*> { static constexpr char kind = 'p'; };

template <class Function, Function* kernel> struct Entry;
template <class... Args, void (*kernel)(Args...)> struct Entry<void(Args...), kernel> {
  // a kind (pointer, integer, float) and a size for each parameter: "p8i4f4"
  static const char* signature() {
    static const char text[][2] = {{Parameter<Args>::kind, '0' + sizeof(Args)}..., {0, 0}};
    return text[0];
  }
  template <u32... I> static void call(const char* at, Indices<I...>) { kernel(*(const Args*)(at + 8 * I)...); }
  static void body(const char* args) { call(args, typename Count<sizeof...(Args)>::type()); }
};

#define RR_SIM_EXPORT extern "C" __attribute__((visibility("default")))
#define RR_SIM_ENTRY(kernel)                                                                        \
  typedef rr_sim::Entry<decltype(kernel), kernel> RrSimEntry_##kernel;                              \
  RR_SIM_EXPORT const char* rr_sim_signature_##kernel() { return RrSimEntry_##kernel::signature(); } \
  RR_SIM_EXPORT void rr_sim_run_##kernel(rr_sim::Launch* request) {                                 \
    rr_sim::run_grid(request, RrSimEntry_##kernel::body);                                           \
  }

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
static __forceinline__ void load(void* to, const void* from, u32 bytes, u32 line) {
  require_aligned(from, bytes, line);
  __builtin_memcpy(to, from, bytes);
}
static __forceinline__ void store(void* to, const void* from, u32 bytes, u32 line) {
  require_aligned(to, bytes, line);
  __builtin_memcpy(to, from, bytes);
}
#define rr_sim_load(to, from, bytes) rr_sim::load(to, from, bytes, __LINE__)
#define rr_sim_store(to, from, bytes) rr_sim::store(to, from, bytes, __LINE__)
#define rr_sim_lds() (rr_sim::launch->lds)

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

static inline float rr_sim_f16_value(rr_sim::u16 half) {
  const rr_sim::u32 sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ffu;
  if (exponent == 0) return (sign ? -0x1p-24f : 0x1p-24f) * (float)fraction;
  const rr_sim::u32 bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

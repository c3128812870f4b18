// A strict simulator of GPU kernels. A translation unit of backends/cpu.py is: the source's defines,
// RR_SIMULATOR and those of the target, this file, simulator_leaves.h, the kernels, and one RR_SIM_ENTRY for
// each entry point.
//
// The threads of a block are fibers of one OS thread. A fiber runs until it reaches a barrier or a wave
// operation; then the next lane of its wave runs, and after the last one the scheduler looks at where
// they all stopped. A wave goes on to its next barrier before another wave runs, in an order that the
// host chooses: a value that passes between waves without a barrier is missing in one order or another.
//
// Blocks run one after another. Where the source defines RR_ROW_BLOCKS, as many of them may be resident at
// a time: the next one starts when all that are resident wait for others, at a word, an mbarrier or their
// cluster's barrier. It starts no earlier, so that what is read without a wait is missing.
//
// Faults, each with its line: a barrier or a wave operation that part of a wave or block misses, a lane
// number outside the wave, a store just outside LDS, a wait that no wave can end, memory used by a launch
// that starts early before it waits for the one before it. LDS starts as NaN. A place
// is known by its line, so a helper called on both sides of a branch counts as one place.
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
float fmaxf(float, float);
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
#if defined(RR_ROW_BLOCKS)
constexpr u32 SLOTS = RR_ROW_BLOCKS;  // each has room for a resident block
#else
constexpr u32 SLOTS = 1;
#endif
static_assert(SLOTS > 0, "at least one block is resident");

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

// Where a fiber stopped: the line of a wave operation, that of a wait for others' copies + WAITING, that of
// a barrier + BARRIER, or RETURNED.
constexpr u32 WAITING = 1u << 29, BARRIER = 1u << 30, RETURNED = 1u << 31, LINE = WAITING - 1;

struct Fiber {
  Context context;
  u32 thread;   // its threadIdx.x
  u32 site;
  bool waited;  // the launch before this one has ended, for all that it knows
};

// What the host asks for and the fault that it gets back; cpu.py has the same fields.
struct Launch {
  char* stacks;  // one of stack_bytes for each thread of each slot
  u64 stack_bytes;
  char* lds;           // of the first slot: between guard_bytes bytes before it and as many after lds_bytes
  const char* guard;   // what the guards hold
  const u16* threads;  // the threads of a block in running order, wave by wave
  const char* args;    // the kernel's arguments, 8 bytes each
  u32 guard_bytes, lds_bytes, grid, block;
  u32 lds_stride;  // from the LDS of a slot to that of the next one, both guards included
  u32 scattered;   // blocks that wait for each other start half a grid apart, and not in their order
  u32 land_late;  // asynchronous copies land when they are waited for, and not when they are issued
  u32 early;      // the launch before this one may still be running, until a thread waits for it
  u32 fault_line, fault_block;
  char fault[256];  // empty: no fault
};

// A slot and the block that is resident in it. The fibers of a wave follow each other in running order, and
// the one after them is the scheduler.
constexpr u32 CHAIN = WAVE + 1;
struct Block {
  Fiber fibers[MAX_BLOCK / WAVE * CHAIN];
  char* lds;
  u32 index;  // its blockIdx.x
  bool resident, waits;
  u32 arrivals;            // of its lanes at its cluster's barrier, all together
  u16 arrived[MAX_BLOCK];  // of each lane
};
static Block blocks[SLOTS], *current;
static u32 resident, started;  // how many blocks
static Fiber *running, *scheduler;
static Launch* launch;
static void (*kernel_body)(const char* args);
// What lanes post to each other. Two turns alternate: a lane that is ahead posts its next value while
// others have yet to read this one. What is posted has been read when another wave runs, of whichever block.
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
    running->waited = !launch->early;
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
static const char* noun(u32 site) {
  return site & BARRIER ? "barrier" : site & WAITING ? "wait" : "wave operation";
}

static void report_divergence(const Fiber* first, const Fiber* other, u32 step, u32 count) {
  const Fiber* waiting = first->site == RETURNED ? other : first;
  if (waiting == other) other = first;
  u32 arrived = 0;
  for (u32 i = 0; i < count; ++i) arrived += first[i * step].site == waiting->site;
  const bool waves = step != 1;
  char who[32], where[64] = "has returned";
  snprintf(who, sizeof who, waves ? "waves" : "lanes of wave %u", first->thread / WAVE);
  if (other->site != RETURNED)
    snprintf(where, sizeof where, "is at the %s of line %u", noun(other->site), other->site & LINE);
  report(waiting->site & LINE, "divergent %s: %u of %u %s arrived, %s %u %s", noun(waiting->site), arrived,
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

// Runs a wave until its lanes wait for other waves, are at a barrier or have returned; false after a fault.
static bool run_wave(Fiber* lanes) {
  scheduler = lanes + WAVE;
  do {
    turn ^= 1;
    resume(scheduler, lanes);
    if (launch->fault[0] || !all_together(lanes, 1, WAVE)) return false;
  } while (lanes->site < WAITING);
  return true;
}

static u32 naps;          // of a launch
static u32 waits_ended;   // of those that stop at WAITING
// Every resident wave waits, is at a barrier or has returned, and no block can start: a lane that waits says so.
static bool nobody_runs;

// Runs waves that wait for others again, for as long as that ends the wait of any of them.
static bool finish_waits(Block* block, u32 waves) {
  u32 before;
  do {
    before = waits_ended;
    block->waits = false;
    for (u32 wave = 0; wave < waves; ++wave) {
      Fiber* lanes = block->fibers + wave * CHAIN;
      if (!(lanes->site & WAITING)) continue;
      block->waits = true;
      if (!run_wave(lanes)) return false;
    }
  } while (block->waits && waits_ended != before);
  return true;
}

// simulator_leaves.h
static bool no_copy_in_flight();
static void forget_copies();

// Whether nobody stored into the guard that begins at this byte of LDS.
static bool guard_holds(int first) {
  const char* at = current->lds + first;
  if (__builtin_memcmp(at, launch->guard, launch->guard_bytes) == 0) return true;
  int broken = 0;
  while (at[broken] == launch->guard[broken]) ++broken;
  report(0, "store %s of LDS: at byte %d of %u", first < 0 ? "before the start" : "past the end",
         first + broken, launch->lds_bytes);
  return false;
}

// Runs a block until it has returned, or waits for what none of its own waves can do; false after a fault.
static bool run_block(Block* block) {
  current = block;
  blockIdx.x = block->index;
  Fiber* fibers = block->fibers;
  const u32 waves = launch->block / WAVE;
  for (;;) {
    if (!finish_waits(block, waves)) return false;
    if (block->waits) return true;
    if (!all_together(fibers, CHAIN, waves)) return false;
    if (fibers->site == RETURNED) break;
    for (u32 wave = 0; wave < waves; ++wave)
      if (!run_wave(fibers + wave * CHAIN)) return false;
  }
  block->resident = false;
  --resident;
  return no_copy_in_flight() && guard_holds((int)launch->lds_bytes) && guard_holds(-(int)launch->guard_bytes);
}

// Blocks take their turns as threads do: the last is first where the last thread is, so that what one block
// leaves outside its part is not always put right by the next. AMD promises no order of blocks that wait.
static bool last_first() { return launch->threads[0] > launch->threads[launch->block - 1]; }
static u32 common_factor(u32 a, u32 b) { return b ? common_factor(b, a % b) : a; }
static u32 next_block() {
  const u32 place = started++;
  if (SLOTS == 1) return last_first() ? launch->grid - 1 - place : place;
  if (!launch->scattered) return place;
  u32 stride = launch->grid / 2 + 1;
  while (common_factor(stride, launch->grid) != 1) ++stride;  // so that every block has its turn
  return (u32)((u64)place * stride % launch->grid);
}

// Starts the next block, as from a barrier in front of its first line.
static bool start_block(Block* block) {
  __builtin_memset(block->lds, 0xff, launch->lds_bytes);  // NaN in fp16, bf16 and fp32
  for (u32 first = 0; first < launch->block / WAVE * CHAIN; first += CHAIN) block->fibers[first].site = BARRIER;
  block->arrivals = 0;
  __builtin_memset(block->arrived, 0, sizeof block->arrived);
  block->index = next_block();
  block->resident = true;
  ++resident;
  return run_block(block);
}

// Gives a slot its LDS and its fibers. They outlive its blocks, but not the launch.
static void make_slot(u32 slot) {
  Block* block = blocks + slot;
  block->resident = false;
  block->lds = launch->lds + (u64)slot * launch->lds_stride;
  __builtin_memcpy(block->lds - launch->guard_bytes, launch->guard, launch->guard_bytes);
  __builtin_memcpy(block->lds + launch->lds_bytes, launch->guard, launch->guard_bytes);
  char* stacks = launch->stacks + (u64)slot * launch->block * launch->stack_bytes;
  for (u32 i = 0; i < launch->block; ++i) {
    Fiber* fiber = block->fibers + i / WAVE * CHAIN + i % WAVE;
    fiber->thread = launch->threads[i];
    make_context(&fiber->context, stacks + i * launch->stack_bytes, launch->stack_bytes, fiber_main);
  }
}

static void run_grid(Launch* request, void (*body)(const char*)) {
  launch = request;
  kernel_body = body;
  nobody_runs = false;
  resident = started = naps = 0;
  forget_copies();
  gridDim.x = launch->grid;
  blockDim.x = launch->block;
  for (u32 slot = 0; slot < SLOTS; ++slot) make_slot(slot);
  while (started < launch->grid || resident) {
    const u32 before = waits_ended;
    for (u32 i = 0; i < SLOTS; ++i) {
      Block* block = blocks + (last_first() ? SLOTS - 1 - i : i);
      if (block->resident && !run_block(block)) return;
    }
    if (waits_ended != before) continue;
    if (resident == SLOTS || started == launch->grid) {
      nobody_runs = true;
      continue;
    }
    Block* vacant = blocks;
    while (vacant->resident) ++vacant;
    if (!start_block(vacant)) return;
  }
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
RR_SIM_EXPORT unsigned rr_sim_slots() { return rr_sim::SLOTS; }
#define RR_SIM_ENTRY(kernel)                                                                        \
  typedef rr_sim::Entry<decltype(kernel), kernel> RrSimEntry_##kernel;                              \
  RR_SIM_EXPORT const char* rr_sim_signature_##kernel() { return RrSimEntry_##kernel::signature(); } \
  RR_SIM_EXPORT void rr_sim_run_##kernel(rr_sim::Launch* request) {                                 \
    rr_sim::run_grid(request, RrSimEntry_##kernel::body);                                           \
  }
}  // namespace rr_sim

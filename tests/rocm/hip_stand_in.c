// A HIP runtime with one gfx950 that is host memory. It stands in for libamdhip64.so.7 where there
// is no AMD GPU: whoever links to it, CuPy or hiprtc, sees an MI355X.
//
// Work is lazy. A stream keeps what it is given in a queue, and nothing of it happens before
// somebody waits: for the stream, for an event behind it, or for the device. Who reads what another
// stream is to write, and does not wait for that stream, therefore reads the old bytes every time.
//
// A launch copies the kernel's arguments at once, by the sizes that the code object states, and
// calls back when its turn comes. The other side of the callbacks is gfx950_stand_in.py.
#include "hip_stand_in.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct Kernel {
  struct Kernel* next;
  int module, max_threads, lds_bytes, scratch_bytes, registers, kernarg_bytes, arguments;
  int *offsets, *sizes;
  char name[];
} Kernel;
typedef struct { int number; Kernel* kernels; } Module;

typedef struct Stream Stream;
typedef struct Op {
  struct Op* next;
  enum { COPY, FILL, LAUNCH, RECORD, WAIT } kind;
  char *target, *origin;
  size_t bytes;
  int byte;
  Kernel* kernel;
  U32 grid[3], block[3], lds_bytes;
  struct Event* event; // RECORD
  Stream* other;       // WAIT: until this stream has done so many
  U64 until;
  char kept[]; // a launch's arguments, or what a copy took from memory that is not pinned
} Op;
struct Stream {
  Stream* next;
  Op *first, *last;
  U64 given, done;
  U32 flags;
  int destroyed;
};
typedef struct Event {
  Stream* stream;
  U64 until; // the stream has done so many when the event has happened
  U32 flags;
  struct timespec time;
} Event;

// ---- the other side -----------------------------------------------------------------------------

// Called with a code object: the error, after stand_in_add_kernel for each kernel in it.
typedef Error (*Load)(void* module, int number, const char* image, size_t bytes);
typedef Error (*Run)(int module, const char* name, const char* arguments, const U32* grid,
                     const U32* block, U32 lds_bytes);
static Load load;
static Run run;
static Error fault;      // of a kernel: from then on the device does nothing more
static int running;      // kernels' callbacks
static Stream null_stream;
static Stream* streams;  // never freed, so that a stale handle is known for what it is
static pthread_mutex_t lock;

__attribute__((constructor)) static void start(void) {
  pthread_mutexattr_t recursive; // a kernel's callback may ask for memory
  pthread_mutexattr_init(&recursive);
  pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&lock, &recursive);
}

void stand_in_connect(Load l, Run r) { load = l, run = r; }

void stand_in_add_kernel(Module* module, const char* name, int max_threads, int lds_bytes,
                         int scratch_bytes, int registers, int kernarg_bytes, int arguments,
                         const int* offsets, const int* sizes) {
  Kernel* made = malloc(sizeof *made + strlen(name) + 1);
  int* layout = malloc(2 * arguments * sizeof *layout);
  memcpy(layout, offsets, arguments * sizeof *layout);
  memcpy(layout + arguments, sizes, arguments * sizeof *layout);
  *made = (Kernel){module->kernels, module->number, max_threads, lds_bytes, scratch_bytes,
                   registers, kernarg_bytes, arguments, layout, layout + arguments};
  strcpy(made->name, name);
  module->kernels = made;
}

static void enter(void) { pthread_mutex_lock(&lock); }
static Error leave(Error error) {
  pthread_mutex_unlock(&lock);
  return stand_in_tell(error);
}

// ---- memory -------------------------------------------------------------------------------------

typedef struct Room { struct Room* next; char* start; size_t bytes; int pinned; } Room;
static Room* rooms;

static Room* room_of(const void* address) {
  for (Room* room = rooms; room; room = room->next)
    if ((char*)address >= room->start && (char*)address < room->start + room->bytes) return room;
  return NULL;
}

static size_t left_of(const void* address, int pinned) {
  Room* room = room_of(address);
  return room && room->pinned == pinned ? (size_t)(room->start + room->bytes - (char*)address) : 0;
}

// Whether an address lies in device memory, or where some of it ends: an empty tensor may be there.
int stand_in_is_device(const char* address) {
  enter();
  int is_device = left_of(address, 0) || left_of(address - 1, 0);
  leave(OK);
  return is_device;
}

static Error allocate(void** address, size_t bytes, int pinned) {
  *address = NULL;
  if (!bytes) return OK;
  if (bytes > (size_t)8 << 30) return stand_in_tell(OUT_OF_MEMORY); // it is a host after all
  enter();
  size_t whole = (bytes + 255) & ~(size_t)255;
  Room* room = malloc(sizeof *room);
  *room = (Room){rooms, aligned_alloc(256, whole), bytes, pinned};
  if (!room->start) return free(room), leave(OUT_OF_MEMORY);
  memset(room->start, 0xff, whole); // NaN in every dtype
  rooms = room;
  *address = room->start;
  return leave(OK);
}

static Error finish_all(void);

static Error release(void* address, int pinned) {
  if (!address) return OK;
  enter();
  Error error = running ? fault : finish_all(); // hipFree waits for the device
  for (Room** at = &rooms; *at; at = &(*at)->next) {
    Room* room = *at;
    if (room->start != address || room->pinned != pinned) continue;
    *at = room->next;
    free(room->start);
    free(room);
    return leave(error);
  }
  return leave(INVALID_VALUE);
}

Error hipMalloc(void** address, size_t bytes) { return allocate(address, bytes, 0); }
Error hipFree(void* address) { return release(address, 0); }
Error hipHostMalloc(void** address, size_t bytes, U32 flags) { return allocate(address, bytes, 1); }
Error hipHostFree(void* address) { return release(address, 1); }
Error hipMemGetInfo(size_t* unused, size_t* total) {
  *total = MEMORY_BYTES, *unused = MEMORY_BYTES / 8 * 7;
  return OK;
}

typedef struct { int type, device; void *on_device, *on_host; int managed; U32 flags; } Attributes;
Error hipPointerGetAttributes(Attributes* found, const void* address) {
  enter();
  Room* room = room_of(address);
  *found = (Attributes){0, 0, NULL, (void*)address, 0, 0}; // hipMemoryTypeUnregistered
  if (room) found->type = room->pinned ? 1 : 2, found->on_device = (void*)address;
  return leave(OK);
}

// ---- streams and events -------------------------------------------------------------------------

static Stream* stream_of(void* handle) {
  if (!handle) return &null_stream;
  for (Stream* known = streams; known; known = known->next)
    if (known == handle && !known->destroyed) return known;
  return NULL;
}

static Error execute(Op* op);

static Error finish(Stream* stream, U64 until) {
  while (stream->done < until && fault == OK) {
    Op* op = stream->first;
    Error error = execute(op);
    stream->first = op->next;
    if (!stream->first) stream->last = NULL;
    ++stream->done;
    free(op);
    if (fault == OK) fault = error;
  }
  return fault;
}

static Error finish_all(void) {
  finish(&null_stream, null_stream.given);
  for (Stream* each = streams; each; each = each->next) finish(each, each->given);
  return fault;
}

static void forget(Stream* stream) {
  for (Op* op = stream->first; op; free(op), op = stream->first) stream->first = op->next;
  stream->last = NULL;
  stream->done = stream->given;
}

// What only a new process could: no fault, and nothing left to do.
void stand_in_mend(void) {
  enter();
  forget(&null_stream);
  for (Stream* each = streams; each; each = each->next) forget(each);
  fault = OK;
  leave(OK);
  hipGetLastError();
}

static Op* push(Stream* stream, int kind, size_t kept) {
  Op* op = calloc(1, sizeof *op + kept);
  op->kind = kind;
  if (stream->last) stream->last->next = op;
  else stream->first = op;
  stream->last = op;
  ++stream->given;
  return op;
}

static void push_wait(Stream* stream, Stream* other, U64 until) {
  if (stream == other || other->done >= until) return;
  Op* op = push(stream, WAIT, 0);
  op->other = other, op->until = until;
}

// The null stream and every stream made without hipStreamNonBlocking wait for one another.
static void join_null(Stream* stream) {
  if (stream != &null_stream) {
    if (!(stream->flags & 1)) push_wait(stream, &null_stream, null_stream.given);
    return;
  }
  for (Stream* each = streams; each; each = each->next)
    if (!(each->flags & 1)) push_wait(stream, each, each->given);
}

static Op* give(Stream* stream, int kind, size_t kept) {
  join_null(stream);
  return push(stream, kind, kept);
}

static Error execute(Op* op) {
  switch (op->kind) {
    case COPY: memmove(op->target, op->origin ? op->origin : op->kept, op->bytes); return OK;
    case FILL: memset(op->target, op->byte, op->bytes); return OK;
    case RECORD: clock_gettime(CLOCK_MONOTONIC, &op->event->time); return OK;
    case WAIT: return finish(op->other, op->until);
    case LAUNCH: break;
  }
  ++running;
  Error error = run(op->kernel->module, op->kernel->name, op->kept, op->grid, op->block,
                    op->lds_bytes);
  --running;
  return error;
}

Error hipStreamCreateWithPriority(Stream** made, U32 flags, int priority) {
  enter();
  *made = calloc(1, sizeof **made);
  (*made)->flags = flags, (*made)->next = streams;
  streams = *made;
  return leave(OK);
}
Error hipStreamCreateWithFlags(Stream** made, U32 flags) {
  return hipStreamCreateWithPriority(made, flags, 0);
}
Error hipStreamCreate(Stream** made) { return hipStreamCreateWithPriority(made, 0, 0); }
Error hipStreamDestroy(void* handle) {
  enter();
  Stream* stream = handle ? stream_of(handle) : NULL;
  if (stream) stream->destroyed = 1; // what it was given still happens
  return leave(stream ? OK : INVALID_HANDLE);
}
Error hipStreamSynchronize(void* handle) {
  enter();
  Stream* stream = stream_of(handle);
  if (!stream) return leave(INVALID_HANDLE);
  join_null(stream);
  return leave(finish(stream, stream->given));
}
Error hipDeviceSynchronize(void) { return enter(), leave(finish_all()); }
Error hipStreamQuery(void* handle) {
  if (pthread_mutex_trylock(&lock)) return NOT_READY; // the caller holds what a kernel waits for
  Stream* stream = stream_of(handle);
  return leave(!stream ? INVALID_HANDLE : fault ? fault : stream->first ? NOT_READY : OK);
}
Error hipStreamIsCapturing(void* handle, int* status) { return *status = 0, OK; }
Error hipStreamGetFlags(Stream* stream, U32* flags) { return *flags = stream->flags, OK; }
Error hipStreamGetPriority(Stream* stream, int* priority) { return *priority = 0, OK; }
int hipGetStreamDeviceId(void* handle) { return 0; }

Error hipEventCreateWithFlags(Event** made, U32 flags) {
  *made = calloc(1, sizeof **made);
  (*made)->flags = flags;
  return OK;
}
Error hipEventCreate(Event** made) { return hipEventCreateWithFlags(made, 0); }
Error hipEventDestroy(Event* event) { return OK; } // a queue may still hold it
Error hipEventRecord(Event* event, void* handle) {
  enter();
  Stream* stream = stream_of(handle);
  if (!stream) return leave(INVALID_HANDLE);
  give(stream, RECORD, 0)->event = event;
  event->stream = stream, event->until = stream->given;
  return leave(fault);
}
Error hipStreamWaitEvent(void* handle, Event* event, U32 flags) {
  enter();
  Stream* stream = stream_of(handle);
  if (!stream) return leave(INVALID_HANDLE);
  join_null(stream);
  if (event->stream) push_wait(stream, event->stream, event->until);
  return leave(fault);
}
Error hipEventQuery(Event* event) {
  if (pthread_mutex_trylock(&lock)) return NOT_READY;
  int happened = !event->stream || event->stream->done >= event->until;
  return leave(fault ? fault : happened ? OK : NOT_READY);
}
Error hipEventSynchronize(Event* event) {
  enter();
  return leave(event->stream ? finish(event->stream, event->until) : OK);
}
Error hipEventElapsedTime(float* ms, Event* start, Event* end) {
  if (!start->stream || !end->stream || (start->flags | end->flags) & 2) // hipEventDisableTiming
    return stand_in_tell(INVALID_HANDLE);
  if (hipEventQuery(start) != OK || hipEventQuery(end) != OK) return NOT_READY;
  *ms = (end->time.tv_sec - start->time.tv_sec) * 1e3f +
        (end->time.tv_nsec - start->time.tv_nsec) * 1e-6f;
  return OK;
}

// ---- copies -------------------------------------------------------------------------------------

static Error copy(void* target, const void* origin, size_t bytes, int kind, Stream* stream,
                  int wait) {
  if (!stream) return INVALID_HANDLE;
  if (!bytes || fault) return fault;
  int to_device = left_of(target, 0) >= bytes, from_device = left_of(origin, 0) >= bytes;
  if ((kind == HOST_TO_DEVICE || kind == DEVICE_TO_DEVICE) && !to_device) return INVALID_VALUE;
  if ((kind == DEVICE_TO_HOST || kind == DEVICE_TO_DEVICE) && !from_device) return INVALID_VALUE;
  int keeps = !from_device && left_of(origin, 1) < bytes; // the caller may reuse it at once
  Op* op = give(stream, COPY, keeps ? bytes : 0);
  op->target = target, op->origin = (char*)origin, op->bytes = bytes;
  if (keeps) memcpy(op->kept, origin, bytes), op->origin = NULL;
  int pageable = !to_device && left_of(target, 1) < bytes; // and HIP returns when it is there
  return wait || pageable ? finish(stream, stream->given) : fault;
}
Error hipMemcpyAsync(void* target, const void* origin, size_t bytes, int kind, void* handle) {
  enter();
  return leave(copy(target, origin, bytes, kind, stream_of(handle), 0));
}
Error hipMemcpy(void* target, const void* origin, size_t bytes, int kind) {
  enter();
  return leave(copy(target, origin, bytes, kind, &null_stream, 1));
}
Error hipMemsetAsync(void* target, int byte, size_t bytes, void* handle) {
  enter();
  Stream* stream = stream_of(handle);
  if (!stream) return leave(INVALID_HANDLE);
  if (left_of(target, 0) < bytes) return leave(INVALID_VALUE);
  Op* op = give(stream, FILL, 0);
  op->target = target, op->byte = byte, op->bytes = bytes;
  return leave(fault);
}
Error hipMemset(void* target, int byte, size_t bytes) {
  return hipMemsetAsync(target, byte, bytes, NULL);
}

// ---- modules and launches -----------------------------------------------------------------------

Error hipModuleLoadData(Module** made, const char* image) {
  static int modules;
  if (memcmp(image, "\177ELF", 4)) return stand_in_tell(INVALID_IMAGE);
  size_t sections;
  unsigned short size, count; // e_shoff, e_shentsize, e_shnum: the section table is the file's end
  memcpy(&sections, image + 0x28, 8);
  memcpy(&size, image + 0x3a, 2), memcpy(&count, image + 0x3c, 2);
  size_t bytes = sections + (size_t)size * count;
  char* whole = calloc(1, bytes);
  memcpy(whole, image, bytes - 1); // CuPy takes the last byte off, which is a zero
  Module* module = calloc(1, sizeof *module);
  module->number = __sync_fetch_and_add(&modules, 1);
  Error error = load ? load(module, module->number, whole, bytes) : INVALID_IMAGE;
  free(whole);
  *made = module;
  return stand_in_tell(error);
}
Error hipModuleLoad(Module** made, const char* path) { return stand_in_tell(FILE_NOT_FOUND); }
Error hipModuleUnload(Module* module) { return OK; } // a queue may still hold its kernels
Error hipModuleGetFunction(Kernel** found, Module* module, const char* name) {
  for (Kernel* each = module->kernels; each; each = each->next)
    if (!strcmp(each->name, name)) return *found = each, OK;
  return stand_in_tell(NOT_FOUND);
}
Error hipFuncGetAttribute(int* value, int attribute, Kernel* kernel) {
  switch (attribute) {
    case 0: return *value = kernel->max_threads, OK;
    case 1: return *value = kernel->lds_bytes, OK;
    case 3: return *value = kernel->scratch_bytes, OK;
    case 4: return *value = kernel->registers, OK;
  }
  return stand_in_tell(INVALID_VALUE);
}

// In the order in which ihipModuleLaunchKernel refuses (ROCm/clr, hip_module.cpp).
static Error refusal(Kernel* kernel, U64 grid, U64 block, U32 lds_bytes, void** extra) {
  if (grid * block >> 32) return INVALID_CONFIGURATION;
  if (extra || !grid) return INVALID_VALUE;
  if (!block) return INVALID_CONFIGURATION;
  if (lds_bytes > LDS_BYTES || block > MOST_THREADS) return INVALID_VALUE;
  if (block > (U64)kernel->max_threads) return LAUNCH_FAILURE; // over its __launch_bounds__
  return hipPeekAtLastError() ? LAUNCH_FAILURE : OK; // an error that nobody fetched (cupy#9976)
}

Error hipModuleLaunchKernel(Kernel* kernel, U32 gx, U32 gy, U32 gz, U32 bx, U32 by, U32 bz,
                            U32 lds_bytes, void* handle, void** arguments, void** extra) {
  enter();
  Stream* stream = stream_of(handle);
  if (!stream) return leave(INVALID_HANDLE);
  if (gy * gz * by * bz != 1) return leave(NOT_SUPPORTED); // the simulator's launches are lines
  Error error = fault ? fault : refusal(kernel, gx, bx, lds_bytes, extra);
  if (error) return leave(error);
  Op* op = give(stream, LAUNCH, kernel->kernarg_bytes);
  op->kernel = kernel, op->lds_bytes = lds_bytes;
  memcpy(op->grid, (U32[]){gx, gy, gz}, sizeof op->grid);
  memcpy(op->block, (U32[]){bx, by, bz}, sizeof op->block);
  for (int i = 0; i < kernel->arguments; ++i)
    memcpy(op->kept + kernel->offsets[i], arguments[i], kernel->sizes[i]);
  return leave(OK);
}

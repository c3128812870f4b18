// hip_runtime_api.h, as far as the two files of the stand-in have it in common.
#include <stddef.h>

typedef int Error; // hipError_t
enum {
  OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONFIGURATION = 9, NO_DEVICE = 100,
  INVALID_DEVICE = 101, INVALID_IMAGE = 200, FILE_NOT_FOUND = 301, INVALID_HANDLE = 400,
  NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, LAUNCH_FAILURE = 719,
  NOT_SUPPORTED = 801,
};
enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS };
typedef unsigned U32;
typedef unsigned long long U64;

enum { WAVE = 64, COMPUTE_UNITS = 256, MOST_THREADS = 1024, LDS_BYTES = 160 * 1024 };
#define MEMORY_BYTES ((size_t)288 << 30)

Error stand_in_tell(Error error); // returns it
Error hipPeekAtLastError(void);
Error hipGetLastError(void);

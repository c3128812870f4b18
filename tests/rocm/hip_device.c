// What the stand-in says of its device, and the rest that CuPy asks for before it does any work.
#include "hip_stand_in.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int devices = 1; // HIP_VISIBLE_DEVICES hides it
static __thread Error last_error;

__attribute__((constructor)) static void look(void) {
  const char* visible = getenv("HIP_VISIBLE_DEVICES");
  devices = !visible || !strcmp(visible, "0");
}

// HIP 7 keeps the first error until somebody asks for it.
Error stand_in_tell(Error error) {
  if (error != OK && error != NOT_READY && last_error == OK) last_error = error;
  return error;
}

Error hipGetDeviceCount(int* count) {
  return *count = devices, stand_in_tell(devices ? OK : NO_DEVICE);
}
Error hipGetDevice(int* device) { return *device = 0, stand_in_tell(devices ? OK : NO_DEVICE); }
Error hipSetDevice(int device) { return stand_in_tell(device < devices ? OK : INVALID_DEVICE); }
Error hipDriverGetVersion(int* version) { return *version = 70051831, OK; }
Error hipRuntimeGetVersion(int* version) { return *version = 70051831, OK; }
Error hipGetLastError(void) {
  Error error = last_error;
  last_error = OK;
  return error;
}
Error hipPeekAtLastError(void) { return last_error; }
const char* hipGetErrorName(Error error) {
  switch (error) {
    case OK: return "hipSuccess";
    case INVALID_VALUE: return "hipErrorInvalidValue";
    case OUT_OF_MEMORY: return "hipErrorOutOfMemory";
    case INVALID_CONFIGURATION: return "hipErrorInvalidConfiguration";
    case NO_DEVICE: return "hipErrorNoDevice";
    case INVALID_DEVICE: return "hipErrorInvalidDevice";
    case INVALID_IMAGE: return "hipErrorInvalidImage";
    case FILE_NOT_FOUND: return "hipErrorFileNotFound";
    case INVALID_HANDLE: return "hipErrorInvalidHandle";
    case NOT_FOUND: return "hipErrorNotFound";
    case NOT_READY: return "hipErrorNotReady";
    case ILLEGAL_ADDRESS: return "hipErrorIllegalAddress";
    case LAUNCH_FAILURE: return "hipErrorLaunchFailure";
  }
  return "hipErrorNotSupported";
}
const char* hipGetErrorString(Error error) { return hipGetErrorName(error); }

Error hipDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) { // hipDeviceAttribute_t of HIP 7
    case 23: return *value = 9, OK;       // ComputeCapabilityMajor
    case 61: return *value = 5, OK;       // ComputeCapabilityMinor
    case 87: return *value = WAVE, OK;    // WarpSize
  }
  return *value = 0, OK;
}

// hipDeviceProp_tR0600 of hip_runtime_api.h, by offset.
Error hipGetDevicePropertiesR0600(char* found, int device) {
  memset(found, 0, 1472);
  strcpy(found, "AMD Instinct MI355X");
  strcpy(found + 1160, "gfx950:sramecc+:xnack-"); // gcnArchName
  *(size_t*)(found + 288) = MEMORY_BYTES;
  *(size_t*)(found + 296) = LDS_BYTES; // sharedMemPerBlock
  *(int*)(found + 304) = 65536;        // regsPerBlock
  *(int*)(found + 308) = WAVE;
  *(int*)(found + 320) = MOST_THREADS;
  *(int*)(found + 348) = 2400000; // clockRate
  *(int*)(found + 360) = 9, *(int*)(found + 364) = 5;
  *(int*)(found + 388) = COMPUTE_UNITS;
  *(int*)(found + 608) = 2000000; // memoryClockRate
  *(int*)(found + 612) = 8192;    // memoryBusWidth
  *(int*)(found + 616) = 4 << 20; // l2CacheSize: of one XCD
  *(int*)(found + 624) = 2048;    // maxThreadsPerMultiProcessor
  return stand_in_tell(device < devices ? OK : INVALID_DEVICE);
}
Error hipDeviceGetPCIBusId(char* id, int bytes, int device) {
  return snprintf(id, bytes, "0000:00:00.0"), OK;
}
Error hipDeviceGetByPCIBusId(int* device, const char* id) { return *device = 0, OK; }
Error hipDeviceGetLimit(size_t* value, int limit) { return *value = 1 << 20, OK; }
Error hipDeviceCanAccessPeer(int* can, int device, int peer) { return *can = 0, OK; }

// CuPy's own compiled kernels (cub, thrust) register themselves when they are loaded.
void** __hipRegisterFatBinary(const void* data) { static void* none; return &none; }
void __hipUnregisterFatBinary(void** modules) {}
void __hipRegisterFunction(void** modules, const void* host, char* text, const char* name,
                           U32 limit, void* thread, void* index, void* block, void* grid,
                           int* size) {}

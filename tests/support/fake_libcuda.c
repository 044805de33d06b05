// Stands in for libcuda.so.1: loads nothing, and appends what it is asked to launch to the file FAKE_CUDA_LOG.
// The counts of parameters of the launches, in their order, stand in FAKE_CUDA_COUNTS.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAP 0x70616d726f736e74ull

struct config {
  uint32_t grid[3], block[3], shared;
  void* stream;
  int32_t* attributes;
  uint32_t count;
};

int cuInit(unsigned flags) { return flags != 0; }
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)(0xC0L + device), 0; }
int cuCtxPushCurrent_v2(void* context) { return context != (void*)0xC0L; }
int cuCtxPopCurrent_v2(void** context) { return *context = (void*)0xC0L, 0; }
int cuDeviceGetAttribute(int* value, int which, int device) {
  const int sm = atoi(getenv("FAKE_CUDA_SM"));
  *value = which == 75 ? sm / 10 : which == 76 ? sm % 10 : which == 16 ? 132 : -1;
  return *value < 0 || device != 0;
}
int cuModuleLoadData(void** module, const char* image) {
  *module = (void*)image;
  return memcmp(image, "\177ELF", 4) != 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = strdup(name);
  return module == NULL || memcmp(module, "\177ELF", 4) != 0;
}
int cuFuncSetAttribute(void* function, int which, int value) { return function == NULL || which != 8 || value < 49152; }
int cuFuncSetCacheConfig(void* function, int which) { return function == NULL || which != 1; }
int cuGetErrorString(int status, const char** text) { return *text = status ? "refused" : "", 0; }

int cuTensorMapEncodeTiled(uint64_t* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                           const uint64_t* steps, const uint32_t* box, const uint32_t* ones, int interleave,
                           int swizzle, int promotion, int fill) {
  memset(map, 0, 128);
  map[0] = MAP;
  map[1] = (uint64_t)address;
  map[2] = (uint64_t)type << 16 | rank << 8 | swizzle;
  for (uint32_t k = 0; k < rank; ++k) {
    if (ones[k] != 1) return 1;
    map[3 + k] = sizes[k];
    map[8 + k] = k + 1 < rank ? steps[k] : 0;
    map[13] |= (uint64_t)box[k] << 12 * k;
  }
  return (uint64_t)map % 64 != 0 || interleave != 0 || promotion != 2 || fill != 0;
}

int cuLaunchKernelEx(const struct config* config, void* function, void** parameters, void** extra) {
  static char* counts;
  if (!counts) counts = getenv("FAKE_CUDA_COUNTS");
  const long count = strtol(counts, &counts, 10);
  FILE* const log = fopen(getenv("FAKE_CUDA_LOG"), "a");
  fprintf(log, "[\"%s\", [%u, %u, %u], %u, %u, %u, [", (char*)function, config->grid[0], config->grid[1],
          config->grid[2], config->block[0], config->shared, config->count);
  for (long k = 0; k < count; ++k) {
    const uint64_t* const words = parameters[k];
    fprintf(log, "%s[", k ? ", " : "");
    for (int word = 0; word < (words[0] == MAP ? 14 : 1); ++word)
      fprintf(log, "%s%llu", word ? ", " : "", (unsigned long long)words[word]);
    fprintf(log, "]");
  }
  fprintf(log, "]]\n");
  fclose(log);
  if (config->count && (config->attributes[0] != 6 || config->attributes[2] != 1)) return 1;
  return extra != NULL || config->stream != NULL || config->block[1] != 1 || config->block[2] != 1;
}

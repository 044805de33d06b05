#include "driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <mutex>

namespace dmattn {
namespace {

constexpr int kSharedMemory = 8;               // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr uint32_t kUsualSharedMemory = 49152;  // that a kernel has without asking
constexpr int kPreferShared = 1;               // CU_FUNC_CACHE_PREFER_SHARED
constexpr int kProgrammaticSerialization = 6;  // CUlaunchAttributeID
constexpr int kMajor = 75, kMinor = 76, kMultiprocessors = 16;  // CUdevice_attribute
constexpr int kPromotion128 = 2;                                // CUtensorMapL2promotion, as Triton chooses it

struct alignas(64) TensorMap {
  uint64_t words[16];
};

struct Attribute {
  int id, padding;
  int value, rest[15];
};

struct Config {
  uint32_t grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  uint32_t count;
};

// Functions of libcuda.so.1; each returns 0 or what went wrong.
struct Cuda {
  int (*init)(unsigned);
  int (*device)(int*, int);
  int (*retain)(void**, int);
  int (*push)(void*);
  int (*pop)(void**);
  int (*attribute)(int*, int, int);
  int (*load)(void**, const void*);
  int (*find)(void**, void*, const char*);
  int (*set)(void*, int, int);
  int (*cache)(void*, int);
  int (*launch)(const Config*, void*, void**, void**);
  int (*encode)(TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*,
                int, int, int, int);
  int (*text)(int, const char**);
};

[[noreturn]] void refuse_gpu(const std::string& why) { refuse("RuntimeError: ", "libdmattn.so cannot launch: ", why); }

template <typename Function>
void find_function(void* library, const char* name, Function*& found) {
  found = reinterpret_cast<Function*>(dlsym(library, name));
  if (!found) refuse_gpu(std::string("the driver has no ") + name + ", which came with CUDA 12");
}

const Cuda& cuda() {
  static const Cuda found = [] {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) refuse_gpu(dlerror());
    Cuda made;
    find_function(library, "cuInit", made.init);
    find_function(library, "cuDeviceGet", made.device);
    find_function(library, "cuDevicePrimaryCtxRetain", made.retain);
    find_function(library, "cuCtxPushCurrent_v2", made.push);
    find_function(library, "cuCtxPopCurrent_v2", made.pop);
    find_function(library, "cuDeviceGetAttribute", made.attribute);
    find_function(library, "cuModuleLoadData", made.load);
    find_function(library, "cuModuleGetFunction", made.find);
    find_function(library, "cuFuncSetAttribute", made.set);
    find_function(library, "cuFuncSetCacheConfig", made.cache);
    find_function(library, "cuLaunchKernelEx", made.launch);
    find_function(library, "cuTensorMapEncodeTiled", made.encode);
    find_function(library, "cuGetErrorString", made.text);
    return made;
  }();
  return found;
}

void check(int status, const char* what) {
  if (status == 0) return;
  const char* text = nullptr;
  cuda().text(status, &text);
  refuse_gpu(std::string(what) + ": " + (text ? text : std::to_string(status)));
}

// A device, and kernels that were loaded into its context.
struct Device {
  Gpu gpu;
  void* context;
  std::map<const Kernel*, void*> kernels;

  explicit Device(int index) {
    int device;
    check(cuda().init(0), "cuInit");
    check(cuda().device(&device, index), "cuDeviceGet");
    check(cuda().retain(&context, device), "cuDevicePrimaryCtxRetain");
    const auto attribute = [device](int which) {
      int value;
      check(cuda().attribute(&value, which, device), "cuDeviceGetAttribute");
      return value;
    };
    gpu = {10 * attribute(kMajor) + attribute(kMinor), attribute(kMultiprocessors)};
  }

  void* function(const Kernel& kernel) {
    void*& found = kernels[&kernel];
    if (found) return found;
    void *module, *made;
    check(cuda().load(&module, kernel.cubin.data()), "cuModuleLoadData");
    check(cuda().find(&made, module, kernel.name.c_str()), "cuModuleGetFunction");
    if (kernel.shared > kUsualSharedMemory) {
      check(cuda().cache(made, kPreferShared), "cuFuncSetCacheConfig");
      check(cuda().set(made, kSharedMemory, static_cast<int>(kernel.shared)), "cuFuncSetAttribute");
    }
    return found = made;
  }
};

std::mutex mutex;  // of the devices and their kernels

Device& device_of(int index) {
  static auto* const devices = new std::map<int, Device>;  // which outlives the operators
  return devices->try_emplace(index, index).first->second;
}

// The current stream. The function is part of torch's stable interface, and lies in the library that tensors on a GPU need.
void* current_stream(int device) {
  using Function = int (*)(int32_t, void**);
  static const auto function = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library ? reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  void* stream;
  if (!function || function(device, &stream) != 0) refuse_gpu("torch knows no current stream");
  return stream;
}

}  // namespace

const Gpu& gpu(int device) {
  const std::lock_guard lock(mutex);
  return device_of(std::max(0, device)).gpu;
}

Launcher::Launcher(int device) : device_(std::max(0, device)), stream_(device < 0 ? nullptr : current_stream(device)) {
  const std::lock_guard lock(mutex);
  check(cuda().push(device_of(device_).context), "cuCtxPushCurrent");
}

Launcher::~Launcher() {
  void* context;
  cuda().pop(&context);
}

void Launcher::launch(const Kernel& kernel, const Step& step, const std::vector<MaybeTensor>& tensors) const {
  static const uint32_t ones[5] = {1, 1, 1, 1, 1};
  const size_t count = step.parameters.size();
  std::vector<uint64_t> words(count);
  std::vector<TensorMap> maps(count);
  std::vector<void*> places(count);
  for (size_t k = 0; k < count; ++k) {
    const Parameter& of = step.parameters[k];
    words[k] = of.value;
    places[k] = &words[k];
    if (of.kind == Parameter::kNumber) continue;
    words[k] += reinterpret_cast<uint64_t>(tensors.at(of.tensor).value().data_ptr());
    if (of.kind == Parameter::kAddress) continue;
    const MapOf& map = of.map;
    check(cuda().encode(&maps[k], static_cast<int>(map.type), map.rank, reinterpret_cast<void*>(words[k]), map.sizes,
                        map.steps, map.box, ones, 0, static_cast<int>(map.swizzle), kPromotion128, 0),
          "cuTensorMapEncodeTiled");
    places[k] = &maps[k];
  }
  void* function;
  {
    const std::lock_guard lock(mutex);
    function = device_of(device_).function(kernel);
  }
  Attribute overlaps{kProgrammaticSerialization, 0, 1, {}};
  const Config config{{step.grid[0], step.grid[1], step.grid[2]}, {kernel.threads, 1, 1}, kernel.shared, stream_,
                      kernel.overlaps ? &overlaps : nullptr, kernel.overlaps ? 1u : 0u};
  check(cuda().launch(&config, function, places.data(), nullptr), "cuLaunchKernelEx");
}

}  // namespace dmattn

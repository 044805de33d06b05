#include "driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>

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

using Launch = int(const Config*, void*, void**, void**);
using Encode = int(TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int,
                   int, int, int);

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
  Launch* launch;
  Encode* encode;
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

int encode(Encode* encode, const MapOf& map, uint64_t address, TensorMap& made) {
  static const uint32_t ones[5] = {1, 1, 1, 1, 1};
  return encode(&made, static_cast<int>(map.type), map.rank, reinterpret_cast<void*>(address), map.sizes, map.steps,
                map.box, ones, 0, static_cast<int>(map.swizzle), kPromotion128, 0);
}

// Launch a kernel with tensors at addresses; map_at(k, address) returns the tensor map of parameter k there, null where there is none.
template <typename MapAt>
int launch_kernel(Launch* launch, void* function, const Kernel& kernel, const Step& step, const uint64_t* addresses,
                  void* stream, const MapAt& map_at) {
  const size_t count = step.parameters.size();
  std::vector<uint64_t> words(count);
  std::vector<void*> places(count);
  for (size_t k = 0; k < count; ++k) {
    const Parameter& of = step.parameters[k];
    words[k] = of.value + (of.kind == Parameter::kNumber ? 0 : addresses[of.tensor]);
    places[k] = of.kind == Parameter::kMap ? static_cast<void*>(map_at(k, words[k])) : &words[k];
    if (!places[k]) return -1;
  }
  Attribute overlaps{kProgrammaticSerialization, 0, 1, {}};
  const Config config{{step.grid[0], step.grid[1], step.grid[2]}, {kernel.threads, 1, 1}, kernel.shared, stream,
                      kernel.overlaps ? &overlaps : nullptr, kernel.overlaps ? 1u : 0u};
  return launch(&config, function, places.data(), nullptr);
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
  std::vector<uint64_t> addresses;
  for (const MaybeTensor& tensor : tensors)
    addresses.push_back(tensor.has_value() ? reinterpret_cast<uint64_t>(tensor->data_ptr()) : 0);
  std::vector<TensorMap> maps(step.parameters.size());
  const auto map_at = [&](size_t k, uint64_t address) {
    check(encode(cuda().encode, step.parameters[k].map, address, maps[k]), "cuTensorMapEncodeTiled");
    return &maps[k];
  };
  void* function;
  {
    const std::lock_guard lock(mutex);
    function = device_of(device_).function(kernel);
  }
  check(launch_kernel(cuda().launch, function, kernel, step, addresses.data(), stream_, map_at), "cuLaunchKernelEx");
}

namespace {

constexpr size_t kMostMaps = 128;    // that one parameter keeps
constexpr uint64_t kAlignment = 16;  // of every address: what kernels are compiled for

// Launches of kernels that Python has loaded, one behind the other: what a plan does without waiting for Python.
struct Launches {
  struct One {
    void* function;
    Kernel kernel;  // without a cubin
    Step step;
    std::vector<std::unordered_map<uint64_t, TensorMap>> maps;  // of each parameter, by address
  };
  Launch* launch;
  Encode* encode;
  std::mutex mutex;  // of the maps
  size_t tensors;
  std::vector<One> all;
};

// Reads whole numbers of 64 bits one after the other.
struct Words {
  const uint64_t* next;

  template <typename T>
  void fill(T* values, size_t count) {
    for (size_t k = 0; k < count; ++k) values[k] = static_cast<T>(*next++);
  }

  Parameter parameter() {
    Parameter made{};
    made.kind = static_cast<Parameter::Kind>(*next++);
    if (made.kind != Parameter::kNumber) made.tensor = *next++;
    made.value = *next++;
    if (made.kind != Parameter::kMap) return made;
    MapOf& map = made.map;
    fill(&map.type, 1);
    fill(&map.rank, 1);
    fill(map.sizes, map.rank);
    fill(map.steps, map.rank);
    fill(map.box, map.rank);
    fill(&map.swizzle, 1);
    return made;
  }

  Launches::One launch() {
    Launches::One made{};
    made.function = reinterpret_cast<void*>(*next++);
    fill(made.step.grid, 3);
    fill(&made.kernel.threads, 1);
    fill(&made.kernel.shared, 1);
    made.kernel.overlaps = *next++ != 0;
    made.step.parameters.resize(*next++);
    for (Parameter& parameter : made.step.parameters) parameter = this->parameter();
    made.maps.resize(made.step.parameters.size());
    return made;
  }
};

}  // namespace

#define DMATTN_PYTHON extern "C" __attribute__((visibility("default")))

// The launches that `words` describe, as dmattn_ops/launching/driver.py lays them out, by two functions of the driver.
DMATTN_PYTHON void* dmattn_new_launches(const uint64_t* words, void* launch, void* encode) {
  auto made = std::make_unique<Launches>();
  made->launch = reinterpret_cast<Launch*>(launch);
  made->encode = reinterpret_cast<Encode*>(encode);
  Words reader{words};
  made->tensors = *reader.next++;
  made->all.resize(*reader.next++);
  for (Launches::One& one : made->all) one = reader.launch();
  return made.release();
}

DMATTN_PYTHON void dmattn_delete_launches(void* launches) { delete static_cast<Launches*>(launches); }

// Launch with tensors at these addresses. Returns how many launches the driver did before one that it refused; -1, with nothing
// launched, where an address is not aligned.
DMATTN_PYTHON int dmattn_launch(void* launches, const uint64_t* addresses, void* stream) {
  auto& of = *static_cast<Launches*>(launches);
  for (size_t k = 0; k < of.tensors; ++k)
    if (addresses[k] % kAlignment != 0) return -1;
  const std::lock_guard lock(of.mutex);
  int done = 0;
  for (Launches::One& one : of.all) {
    bool right = true;
    const auto map_at = [&](size_t k, uint64_t address) {
      auto& maps = one.maps[k];
      const auto found = maps.find(address);
      if (found != maps.end()) return &found->second;
      if (maps.size() >= kMostMaps) maps.clear();
      TensorMap& made = maps[address];
      right = right && encode(of.encode, one.step.parameters[k].map, address, made) == 0;
      if (!right) maps.clear();
      return right ? &made : nullptr;
    };
    if (launch_kernel(of.launch, one.function, one.kernel, one.step, addresses, stream, map_at) != 0) break;
    ++done;
  }
  return done;
}

}  // namespace dmattn

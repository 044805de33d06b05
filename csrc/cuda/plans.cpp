#include "plans.h"

#include <dlfcn.h>

#include <charconv>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <locale>
#include <mutex>
#include <type_traits>
#include <utility>

namespace dmattn {
namespace {

const std::pair<const char*, ScalarType> kTypes[] = {
    {"bool", kBool},
    {"uint8", ScalarType::Byte},
    {"int8", ScalarType::Char},
    {"int16", ScalarType::Short},
    {"int32", kInt},
    {"int64", kLong},
    {"float16", kHalf},
    {"bfloat16", kBFloat16},
    {"float32", kFloat},
    {"float64", kDouble},
};

// Reads words and numbers; what is not there raises.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path), stream_(path, std::ios::binary) {
    DMATTN_CHECK_VALUE(stream_.good(), path, " cannot be read");
    stream_.imbue(std::locale::classic());
    stream_.seekg(0, std::ios::end);
    size_ = static_cast<uint64_t>(stream_.tellg());
    stream_.seekg(0);
  }

  template <typename T>
  T next() {
    T value{};
    if constexpr (std::is_unsigned_v<T>) check((stream_ >> std::ws).peek() != '-');  // which a stream would wrap around
    stream_ >> value;
    check(!stream_.fail());
    return value;
  }

  template <typename T>
  void fill(T* values, size_t count) {
    check(count <= 5);
    for (size_t k = 0; k < count; ++k) values[k] = next<T>();
  }

  void fill(std::vector<int64_t>& numbers, size_t count) {
    for (size_t k = 0; k < count; ++k) numbers.push_back(next<int64_t>());
  }

  bool word(std::string& found) { return static_cast<bool>(stream_ >> found); }

  std::string line() {
    std::string found;
    std::getline(stream_ >> std::ws, found);
    check(!stream_.fail());
    return found;
  }

  std::string bytes(size_t count) {
    check(stream_.get() == '\n' && count <= size_ - static_cast<uint64_t>(stream_.tellg()));
    std::string found;
    found.resize(count);
    stream_.read(found.data(), static_cast<std::streamsize>(count));
    check(!stream_.fail());
    return found;
  }

  double number() {  // streams read no "-inf"
    const auto value = number_of(next<std::string>());
    check(value.has_value());
    return *value;
  }

  void check(bool right) const {
    DMATTN_CHECK_VALUE(right, path_, " is no file of dmattn_ops.export_kernels of this version, or is damaged");
  }

 private:
  std::string path_;
  std::ifstream stream_;
  uint64_t size_;
};

Layout read_layout(Reader& reader) {
  Layout made{type_of(reader.next<std::string>()), {}, {}};
  const auto rank = reader.next<size_t>();
  for (std::vector<int64_t>* numbers : {&made.sizes, &made.strides}) reader.fill(*numbers, rank);
  return made;
}

Parameter read_parameter(Reader& reader) {
  Parameter made{};
  const auto kind = reader.next<std::string>();
  reader.check(kind == "number" || kind == "address" || kind == "map");
  made.kind = kind == "number" ? Parameter::kNumber : kind == "address" ? Parameter::kAddress : Parameter::kMap;
  if (made.kind != Parameter::kNumber) made.tensor = reader.next<size_t>();
  made.value = reader.next<uint64_t>();
  if (made.kind != Parameter::kMap) return made;
  MapOf& map = made.map;
  map.type = reader.next<uint32_t>();
  map.rank = reader.next<uint32_t>();
  reader.fill(map.sizes, map.rank);
  reader.fill(map.steps, map.rank);
  reader.fill(map.box, map.rank);
  map.swizzle = reader.next<uint32_t>();
  return made;
}

Step read_step(Reader& reader, const std::string& kind, size_t kernels) {
  static const std::map<std::string, Step::Kind> kinds{{"allocate", Step::kAllocate}, {"zeros", Step::kZeros},
                                                       {"contiguous", Step::kContiguous}, {"zero", Step::kZero},
                                                       {"fill", Step::kFill}, {"sum", Step::kSum}, {"launch", Step::kLaunch}};
  const auto found = kinds.find(kind);
  reader.check(found != kinds.end());
  Step made{};
  made.kind = found->second;
  if (made.kind == Step::kAllocate || made.kind == Step::kZeros) {
    made.layout = read_layout(reader);
  } else if (made.kind != Step::kLaunch) {
    made.tensor = reader.next<size_t>();
    if (made.kind == Step::kFill) made.value = reader.number();
    if (made.kind == Step::kSum) {
      made.source = reader.next<size_t>();
      for (std::vector<int64_t>* numbers : {&made.layout.sizes, &made.layout.strides})
        reader.fill(*numbers, reader.next<size_t>());
    }
  } else {
    made.kernel = reader.next<size_t>();
    reader.check(made.kernel < kernels);
    reader.fill(made.grid, 3);
    const auto count = reader.next<size_t>();
    for (size_t k = 0; k < count; ++k) made.parameters.push_back(read_parameter(reader));
  }
  return made;
}

Kernel read_kernel(Reader& reader) {
  Kernel made{};
  made.name = reader.next<std::string>();
  made.threads = reader.next<uint32_t>();
  made.shared = reader.next<uint32_t>();
  made.overlaps = reader.next<int>() != 0;
  made.cubin = reader.bytes(reader.next<size_t>());
  return made;
}

struct Files {
  std::mutex mutex;
  std::deque<PlanFile> read;  // which stay where they are
  bool looked = false;        // for files that nobody loaded

  static Files& get() {
    static Files* const files = new Files;  // which outlives the operators
    return *files;
  }

  void look() {
    if (looked) return;
    std::deque<PlanFile> found;
    Dl_info library{};
    if (const char* const named = std::getenv("DMATTN_KERNELS")) {
      std::istringstream paths(named);
      for (std::string path; std::getline(paths, path, ':');)
        if (!path.empty()) found.push_back(read_plans(path));
    } else if (dladdr(reinterpret_cast<const void*>(&Files::get), &library)) {
      const std::string place = library.dli_fname, beside = place.substr(0, place.rfind('/') + 1) + "kernels.dmattn";
      if (std::ifstream(beside).good()) found.push_back(read_plans(beside));
    }
    for (PlanFile& file : found) read.push_back(std::move(file));
    looked = true;
  }
};

}  // namespace

const char* name_of(ScalarType type) {
  for (const auto& [name, known] : kTypes)
    if (known == type) return name;
  return "another dtype";
}

ScalarType type_of(const std::string& name) {
  for (const auto& [known, type] : kTypes)
    if (name == known) return type;
  refuse("ValueError: ", "a plan has a tensor of type ", name);
}

std::optional<double> number_of(const std::string& text) {
  double value = 0.0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value);
  return error == std::errc{} && end == last ? std::optional(value) : std::nullopt;
}

PlanFile read_plans(const std::string& path) {
  Reader reader(path);
  reader.check(reader.next<std::string>() == "dmattn-kernels" && reader.next<int>() == 1);
  PlanFile made{};
  made.path = path;
  made.sm = reader.next<int>();
  made.multiprocessors = reader.next<int>();
  for (std::string kind; reader.word(kind);) {
    if (kind == "kernel") {
      made.kernels.push_back(read_kernel(reader));
      continue;
    }
    reader.check(kind == "plan");
    const auto [place, is_new] = made.plans.try_emplace(reader.line());
    reader.check(is_new);
    Plan& plan = place->second;
    for (kind = reader.next<std::string>(); kind != "end"; kind = reader.next<std::string>()) {
      if (kind == "output")
        plan.outputs.push_back(read_layout(reader));
      else
        plan.steps.push_back(read_step(reader, kind, made.kernels.size()));
    }
  }
  return made;
}

std::vector<const PlanFile*> plan_files() {
  Files& files = Files::get();
  const std::lock_guard lock(files.mutex);
  files.look();
  std::vector<const PlanFile*> found;
  for (const PlanFile& file : files.read) found.push_back(&file);
  return found;
}

// Load a file of dmattn_ops.export_kernels; returns what is wrong, or nullptr.
extern "C" __attribute__((visibility("default"))) const char* dmattn_load_kernels(const char* path) {
  static thread_local std::string said;
  try {
    PlanFile made = read_plans(path);
    Files& files = Files::get();
    const std::lock_guard lock(files.mutex);
    files.read.push_back(std::move(made));
    return nullptr;
  } catch (const std::exception& error) {
    said = error.what();
    return said.c_str();
  }
}

}  // namespace dmattn

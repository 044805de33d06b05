#include "plans.h"

#include <dlfcn.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <locale>
#include <mutex>
#include <sstream>
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

#ifndef DMATTN_VERSION
#error "setup.py names the version of the library, DMATTN_VERSION"
#endif
constexpr int kFormat = 2;              // as in dmattn_ops/launching/plan_file.py
constexpr size_t kMostCalls = 1 << 24;  // of one family: more are a damaged file
constexpr size_t kListed = 4;           // values that a refusal lists one by one
using Columns = std::vector<std::vector<int64_t>>;

// Reads words and numbers from a text of a file; what is not there raises.
class Reader {
 public:
  Reader(const std::string& path, const std::string& text) : path_(path), stream_(text), size_(text.size()) {
    stream_.imbue(std::locale::classic());
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
    DMATTN_CHECK_VALUE(right, path_, " is no file of dmattn_ops.export_kernels, or is damaged");
  }

 private:
  std::string path_;
  std::istringstream stream_;
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

Plan read_plan(Reader reader, size_t kernels) {
  Plan made;
  for (std::string kind; reader.word(kind);) {
    if (kind == "output")
      made.outputs.push_back(read_layout(reader));
    else
      made.steps.push_back(read_step(reader, kind, kernels));
  }
  return made;
}

std::vector<int64_t> read_column(Reader& reader) {
  std::vector<int64_t> made;
  const auto count = reader.next<size_t>(), runs = reader.next<size_t>();
  reader.check(count <= kMostCalls);
  for (size_t run = 0; run < runs; ++run) {
    auto value = static_cast<uint64_t>(reader.next<int64_t>());
    const auto step = static_cast<uint64_t>(reader.next<int64_t>());
    const auto length = reader.next<size_t>();
    reader.check(length <= count - made.size());
    for (size_t k = 0; k < length; ++k, value += step) made.push_back(static_cast<int64_t>(value));
  }
  reader.check(made.size() == count);
  return made;
}

// A text with other words in the place of each column ("$7"); words(7) returns them.
template <typename Words>
std::string replaced(const std::string& text, const Words& words) {
  std::string made;
  size_t done = 0;
  for (size_t at; (at = text.find('$', done)) != std::string::npos;) {
    made.append(text, done, at - done);
    size_t column = SIZE_MAX;
    done = std::from_chars(&text[at + 1], text.data() + text.size(), column).ptr - text.data();
    made += words(column);
  }
  return made.append(text, done, std::string::npos);
}

std::string filled(const std::string& text, const Columns& columns, size_t call) {
  return replaced(text, [&](size_t column) { return std::to_string(columns[column][call]); });
}

// The calls of a family, whose columns are there and have a value for each of them.
Family read_family(Reader& reader, const Columns& columns) {
  Family made{};
  made.calls = reader.next<size_t>();
  made.text = reader.line();
  for (std::string line; (line = reader.line()) != "end";) made.steps += line + '\n';
  reader.check(made.calls > 0);
  replaced(made.text + made.steps, [&](size_t column) {
    reader.check(column < columns.size() && columns[column].size() == made.calls);
    return "";
  });
  return made;
}

std::string content_of(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream content;
  DMATTN_CHECK_VALUE(stream.good(), path, " cannot be read");
  if (stream.peek() != std::ifstream::traits_type::eof()) content << stream.rdbuf();
  DMATTN_CHECK_VALUE(stream.good() || stream.eof(), path, " cannot be read");
  return content.str();
}

// Refuse a file of another format, or of another version of the library, whose masks and operators may be others.
void check_versions(Reader& reader, const std::string& path) {
  reader.check(reader.next<std::string>() == "dmattn-kernels");
  const auto format = reader.next<int>();
  DMATTN_CHECK_VALUE(format == kFormat, path, " has format ", format, " of dmattn_ops.export_kernels, and libdmattn.so of"
                     " dmattn_ops " DMATTN_VERSION " reads format ", kFormat, ": write the file with that version");
  const auto version = reader.next<std::string>();
  DMATTN_CHECK_VALUE(version == DMATTN_VERSION, path, " was written by dmattn_ops ", version,
                     ", and libdmattn.so is that of dmattn_ops " DMATTN_VERSION ": write the file with that version");
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

struct PlanFile::Read {
  std::mutex mutex;
  std::map<std::pair<size_t, size_t>, Plan> plans;  // by family and call
};

const Plan& PlanFile::plan(const Served& served) const {
  const std::lock_guard lock(read_->mutex);
  const std::pair place(served.family, served.call);
  const auto found = read_->plans.find(place);
  if (found != read_->plans.end()) return found->second;
  Plan made = read_plan(Reader(path, filled(families[served.family].steps, columns, served.call)), kernels.size());
  return read_->plans.emplace(place, std::move(made)).first->second;
}

std::string PlanFile::shown(const Family& family) const {
  return replaced(family.text, [&](size_t column) {
    const std::vector<int64_t>& values = columns[column];
    const auto [least, most] = std::minmax_element(values.begin(), values.end());
    const auto between = [&](size_t k) { return static_cast<uint64_t>(values[k]) - static_cast<uint64_t>(values[k - 1]); };
    bool even = true;
    for (size_t k = 2; k < values.size(); ++k) even = even && between(k) == between(1);
    std::string text;
    if (values.size() <= kListed) {
      for (const int64_t value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
    } else if (even) {
      text = std::to_string(values.front()) + " to " + std::to_string(values.back()) + " by " +
             std::to_string(static_cast<int64_t>(between(1)));
    } else {
      text = std::to_string(values.size()) + " values from " + std::to_string(*least) + " to " + std::to_string(*most);
    }
    return '{' + text + '}';
  });
}

PlanFile read_plans(const std::string& path) {
  Reader reader(path, content_of(path));
  PlanFile made{};
  made.path = path;
  check_versions(reader, path);
  made.sm = reader.next<int>();
  made.multiprocessors = reader.next<int>();
  made.read_ = std::make_shared<PlanFile::Read>();
  for (std::string kind; reader.word(kind);) {
    reader.check(kind == "kernel" || kind == "column" || kind == "plan");
    if (kind == "kernel") made.kernels.push_back(read_kernel(reader));
    if (kind == "column") made.columns.push_back(read_column(reader));
    if (kind != "plan") continue;
    made.families.push_back(read_family(reader, made.columns));
    const Family& family = made.families.back();
    const size_t place = made.families.size() - 1;
    for (size_t call = 0; call < family.calls; ++call)
      reader.check(made.calls.try_emplace(filled(family.text, made.columns, call), Served{place, call}).second);
    made.plan({place, 0});  // a damaged one is refused now
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
    files.looked = true;
    return nullptr;
  } catch (const std::exception& error) {
    said = error.what();
    return said.c_str();
  }
}

}  // namespace dmattn

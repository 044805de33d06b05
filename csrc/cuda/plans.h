// Plans: what an operator launches for a call, as dmattn_ops/launching/plan_file.py writes it.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "../cpu/tensor.h"

namespace dmattn {

// The name that Python has for a dtype, and the dtype of such a name.
const char* name_of(ScalarType type);
ScalarType type_of(const std::string& name);

// The number that a text is, whatever the locale is; nothing where it is none.
std::optional<double> number_of(const std::string& text);

struct Layout {
  ScalarType type;
  std::vector<int64_t> sizes, strides;
};

// A tensor map as cuTensorMapEncodeTiled takes it.
struct MapOf {
  uint32_t type, rank, swizzle;
  uint64_t sizes[5], steps[5];
  uint32_t box[5];
};

struct Parameter {
  enum Kind { kNumber, kAddress, kMap } kind;
  uint64_t value;  // a number's 8 bytes, or bytes behind the tensor's start
  size_t tensor;
  MapOf map;
};

struct Kernel {
  std::string name;
  uint32_t threads, shared;
  bool overlaps;  // it may begin before the kernel in front of it ends
  std::string cubin;
};

struct Step {
  enum Kind { kAllocate, kZeros, kContiguous, kZero, kFill, kSum, kLaunch } kind;
  Layout layout;  // of a sum: the sizes of what it reads, and the dimensions that it sums over
  size_t tensor, source;
  double value;
  size_t kernel;
  uint32_t grid[3];
  std::vector<Parameter> parameters;
};

struct Plan {
  std::vector<Layout> outputs;
  std::vector<Step> steps;
};

// A plan as it stands in a file, of calls that differ in numbers alone: $7 stands for the value that column 7 has for a call.
struct Family {
  std::string text, steps;
  size_t calls;
};

// One call of a family.
struct Served {
  size_t family, call;
};

struct PlanFile {
  std::string path;
  int sm, multiprocessors;
  std::vector<Kernel> kernels;
  std::vector<std::vector<int64_t>> columns;
  std::vector<Family> families;
  std::map<std::string, Served> calls;  // by their text

  // The plan of a call, which is read at its first use and stays.
  const Plan& plan(const Served& served) const;
  // The text of the calls of a family, with the values of each column in it.
  std::string shown(const Family& family) const;

 private:
  struct Read;
  std::shared_ptr<Read> read_;
  friend PlanFile read_plans(const std::string& path);
};

PlanFile read_plans(const std::string& path);

// The files that are there, in the order in which they came: at the first call those of DMATTN_KERNELS, or kernels.dmattn beside the
// library.
std::vector<const PlanFile*> plan_files();

}  // namespace dmattn

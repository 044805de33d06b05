// The operators `dmattn::*` on a GPU for programs without Python: a call is looked up by its text among plans.
#include "../cpu/operators.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <locale>
#include <utility>

#include "../cpu/schemas.h"
#include "driver.h"

namespace dmattn {
namespace {

constexpr uint64_t kAlignment = 16;  // of every address: what kernels are compiled for
constexpr size_t kShown = 8;         // plans that a refusal shows

// As "%.17g" writes it, whatever the locale is.
std::string text_of(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value, std::chars_format::general, 17).ptr};
}

struct Argument {
  std::string type, name, standard;  // the text of the default, where there is one
};

struct Schema {
  std::string name;
  std::vector<Argument> arguments;
  size_t results;

  explicit Schema(const std::string& text) : name(text.substr(0, text.find('('))), results(0) {
    for (size_t at = text.find(") -> "); (at = text.find("Tensor", at)) != std::string::npos; ++at) ++results;
    std::istringstream declared(text.substr(name.size() + 1, text.find(") -> ") - name.size() - 1));
    for (std::string one; declared >> one;) {
      Argument made{one, "", ""};
      declared >> made.name;
      if (made.name.back() == ',') made.name.pop_back();
      const size_t place = made.name.find('=');
      if (place != std::string::npos) {
        made.standard = made.name.substr(place + 1);
        made.name.resize(place);
        const auto number = number_of(made.standard);
        if (number.has_value() && made.type.starts_with("float")) made.standard = text_of(*number);
      }
      arguments.push_back(made);
    }
  }
};

std::string text_of(const Tensor& tensor) {
  std::ostringstream text, strides;
  text.imbue(std::locale::classic());
  strides.imbue(std::locale::classic());
  text << name_of(tensor.scalar_type()) << '[';
  bool apart = false;
  int64_t expected = 1;
  for (int64_t dim = tensor.dim() - 1; dim >= 0; --dim) {
    const int64_t size = tensor.size(dim);
    apart = apart || (size > 1 && tensor.stride(dim) != expected);
    expected *= std::max<int64_t>(size, 1);
  }
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const char* const between = dim == 0 ? "" : ",";
    text << between << tensor.size(dim);
    strides << between << (tensor.size(dim) > 1 ? tensor.stride(dim) : 0);
  }
  text << ']';
  if (apart) text << "/(" << strides.str() << ')';
  return text.str();
}

// The arguments of a call, and its text as dmattn_ops/launching/plan_file.py writes it.
struct Asked {
  std::string text;
  std::vector<MaybeTensor> tensors;

  Asked(const Schema& schema, StableIValue* stack) : text(schema.name) {
    Taken taken(stack);
    for (const Argument& argument : schema.arguments) {
      const std::string value = next(taken, argument.type);
      if (value != "None" && value != argument.standard) text += " " + argument.name + "=" + value;
    }
  }

 private:
  std::string next(Taken& taken, const std::string& type) {
    if (type.starts_with("Tensor")) {
      tensors.push_back(type.back() == '?' ? taken.maybe_tensor() : taken.tensor());
      return tensors.back().has_value() ? text_of(*tensors.back()) : "None";
    }
    if (type == "bool") return taken.flag() ? "True" : "False";
    if (type == "SymInt") return std::to_string(taken.integer());
    if (type == "float") return text_of(taken.number());
    if (type == "SymInt?") {
      const auto value = taken.maybe_integer();
      return value.has_value() ? std::to_string(*value) : "None";
    }
    const auto value = taken.maybe_number();
    return value.has_value() ? text_of(*value) : "None";
  }
};

[[noreturn]] void refuse_call(const std::string& name, const std::string& text, const Gpu& on) {
  std::ostringstream there;
  size_t more = 0, shown = 0, files = 0;
  for (const PlanFile* file : plan_files()) {
    there << "\n" << file->path << " for SM " << file->sm / 10 << '.' << file->sm % 10 << " with "
          << file->multiprocessors << " multiprocessors:";
    ++files;
    for (const Family& family : file->families) {
      if (family.text.substr(0, family.text.find(' ')) != name || shown == kShown) {
        ++more;
        continue;
      }
      there << "\n  " << file->shown(family);
      ++shown;
    }
  }
  if (more > 0) there << "\nand " << more << " plans more, also of other operators";
  if (files == 0)
    there << "\nno file: write one with dmattn_ops.export_kernels, and name it in DMATTN_KERNELS, pass it to"
             " dmattn_load_kernels, or lay it beside libdmattn.so as kernels.dmattn";
  refuse("NotImplementedError: ", "there is no plan for this call on SM ", on.sm / 10, ".", on.sm % 10, " with ",
         on.multiprocessors, " multiprocessors. Asked:\n  ", text, "\nThere is:", there.str());
}

struct Found {
  const PlanFile* file;
  const Plan* plan;
};

Found find_plan(const std::string& name, const std::string& text, const Gpu& on) {
  for (const PlanFile* file : plan_files()) {
    const auto found = file->calls.find(text);
    if (found != file->calls.end() && file->sm == on.sm && file->multiprocessors <= on.multiprocessors)
      return {file, &file->plan(found->second)};
  }
  refuse_call(name, text, on);
}

// Its type and index.
std::pair<int32_t, int32_t> device_of(const Tensor& tensor) {
  int32_t type, index;
  answered(aoti_torch_get_device_type(tensor.get(), &type), "the device");
  answered(aoti_torch_get_device_index(tensor.get(), &index), "the device");
  return {type, index};
}

Tensor empty(const Layout& layout, const Tensor& on) {
  const auto [type, index] = device_of(on);
  AtenTensorHandle made = nullptr;
  const bool right = aoti_torch_empty_strided(static_cast<int64_t>(layout.sizes.size()), layout.sizes.data(),
                                              layout.strides.data(), static_cast<int32_t>(layout.type), type, index,
                                              &made) == 0;
  if (!right) refuse("RuntimeError: ", "torch could not allocate a tensor of shape ", Extents(layout.sizes));
  return Tensor(made);
}

Tensor made_by(const Step& step, const std::vector<MaybeTensor>& tensors, const Tensor& on) {
  if (step.kind == Step::kAllocate || step.kind == Step::kZeros) {
    Tensor made = empty(step.layout, on);
    if (step.kind == Step::kZeros) torch::stable::zero_(made);
    return made;
  }
  Tensor given = tensors.at(step.tensor).value();
  if (step.kind == Step::kSum) {
    Tensor summed = torch::stable::view(tensors.at(step.source).value(), step.layout.sizes);
    if (!step.layout.strides.empty()) summed = torch::stable::sum(summed, Extents(step.layout.strides), true);
    return torch::stable::copy_(given, torch::stable::view(summed, given.sizes()));
  }
  if (step.kind == Step::kContiguous) return torch::stable::contiguous(given);
  return step.kind == Step::kZero ? torch::stable::zero_(given) : torch::stable::fill_(given, step.value);
}

// Refuse a plan that a damaged file made: with other results than the operator has, or tensors that are not there yet.
void check_plan(const Found& found, size_t arguments, size_t results) {
  size_t known = arguments + found.plan->outputs.size();
  bool right = found.plan->outputs.size() == results;
  for (const Step& step : found.plan->steps) {
    const bool makes = step.kind == Step::kAllocate || step.kind == Step::kZeros;
    right = right && (makes || step.kind == Step::kLaunch || std::max(step.tensor, step.source) < known);
    for (const Parameter& parameter : step.parameters)
      right = right && (parameter.kind == Parameter::kNumber || parameter.tensor < known);
    known += step.kind != Step::kLaunch;
  }
  DMATTN_CHECK_VALUE(right, found.file->path, " is damaged: a plan does not fit its operator");
}

// Run a plan; `tensors` are the arguments. Returns the results.
std::vector<Tensor> run(const Found& found, std::vector<MaybeTensor> tensors, const Tensor& on, int device) {
  std::vector<Tensor> outputs;
  for (const Layout& layout : found.plan->outputs) outputs.push_back(empty(layout, on));
  tensors.insert(tensors.end(), outputs.begin(), outputs.end());
  for (const MaybeTensor& tensor : tensors)
    DMATTN_CHECK_VALUE(!tensor.has_value() || reinterpret_cast<uint64_t>(tensor->data_ptr()) % kAlignment == 0,
                       "without Python the addresses of tensors must be multiples of ", kAlignment, " bytes");
  const Launcher launcher(device);
  for (const Step& step : found.plan->steps) {
    if (step.kind == Step::kLaunch)
      launcher.launch(found.file->kernels[step.kernel], step, tensors);
    else
      tensors.push_back(made_by(step, tensors, on));
  }
  return outputs;
}

template <size_t number>
void planned_operator(StableIValue* stack, uint64_t, uint64_t) {
  static const Schema schema(kSchemas[number]);
  Asked asked(schema, stack);
  MaybeTensor on;
  for (const MaybeTensor& tensor : asked.tensors)
    if (!on.has_value()) on = tensor;
  for (const MaybeTensor& tensor : asked.tensors)
    DMATTN_CHECK_VALUE(!tensor.has_value() || device_of(*tensor) == device_of(*on), schema.name,
                       " takes tensors of one GPU, and these are on several devices");
  const int device = on->get_device_index();
  const Found found = find_plan(schema.name, asked.text, gpu(device));
  check_plan(found, asked.tensors.size(), schema.results);
  for (const Tensor& output : run(found, std::move(asked.tensors), *on, device)) give(stack++, output);
}

template <size_t... numbers>
void serve(torch::stable::detail::StableLibrary& library, std::index_sequence<numbers...>) {
  (library.impl(Schema(kSchemas[numbers]).name.c_str(), planned_operator<numbers>), ...);
}

}  // namespace

// Let the operators that the library defined look for plans where tensors have this dispatch key, which is CUDA elsewhere.
extern "C" __attribute__((visibility("default"))) void dmattn_serve_plans(const char* key) {
  using torch::stable::detail::StableLibrary;
  auto* const library = new StableLibrary(StableLibrary::Kind::IMPL, "dmattn", key, __FILE__, __LINE__);
  constexpr size_t count = sizeof(kSchemas) / sizeof(*kSchemas) - 1;  // the last one needs no kernel
  serve(*library, std::make_index_sequence<count>());
  library->impl("mask_as_exported", mask_as_exported_operator);
}

}  // namespace dmattn

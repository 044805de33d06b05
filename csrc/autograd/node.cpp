// Attention calls that repeat a plan, and their derivative as a node of torch's autograd: what dmattn_ops/ops/autograd.py and
// dmattn_ops/launching/plans.py do for any call, for plain ones without Python. Unlike libdmattn this is made for one torch and
// one Python (setup.py); where it is not there, Python does all of it (dmattn_ops/launching/node.py).
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace py = pybind11;

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Addresses = std::vector<uint64_t>;
using Strides = std::vector<int64_t>;
using Layout = std::tuple<std::vector<int64_t>, Strides, at::ScalarType>;  // of a tensor that a plan makes
using Launch = int (*)(void* launches, const uint64_t* addresses, void* stream);  // dmattn_launch of csrc/cuda/driver.cpp

constexpr size_t kPrimals = 3;       // query, key and value: the first inputs of a forward
constexpr size_t kSavedOutputs = 3;  // out, lse and lse_tail: its first outputs
constexpr size_t kMostBackwards = 16;

std::atomic<bool> replays{true};  // backwards by their plans; while calls are exported Python sees them all
std::vector<std::string> variables;  // of the environment, that a backward follows: Python computes it while one is set

Tensor unpacked(PyObject* given) { return given == Py_None ? Tensor() : THPVariable_Unpack(given); }

py::object wrapped(const Tensor& tensor) {
  if (!tensor.defined()) return py::none();
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

uint64_t address_of(const Tensor& tensor) {
  return tensor.defined() ? reinterpret_cast<uint64_t>(tensor.data_ptr()) : 0;
}

// Something of Python's that is dropped in whichever thread the last user of it ends.
struct Owned {
  py::object held;

  explicit Owned(py::object object) : held(std::move(object)) {}
  Owned(const Owned&) = delete;
  ~Owned() {
    if (!Py_IsInitialized()) {
      held.release();
      return;
    }
    const py::gil_scoped_acquire acquired;
    held = py::object();
  }
};

// What a call allocates and launches.
class Plan {
 public:
  // `launches` are pairs of what dmattn_launch takes and how many launches that are; `owner` keeps them alive. Workspaces without
  // a layout are given to each call.
  Plan(int device, std::vector<std::optional<Layout>> outputs, std::vector<std::optional<Layout>> workspaces,
       std::vector<std::pair<uintptr_t, int>> launches, uintptr_t launch, py::object owner)
      : device_(device < 0 ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device))),
        outputs_(std::move(outputs)), workspaces_(std::move(workspaces)), launches_(std::move(launches)),
        launch_(reinterpret_cast<Launch>(launch)), owner_(std::move(owner)) {}

  // Launch everything on the current stream, with inputs at `addresses`, behind which those of the outputs are put. Returns the
  // outputs, undefined where they have no elements; nothing where a launch was refused, so that another way is to be taken.
  variable_list run(Addresses& addresses, const variable_list& given = {}) const {
    const c10::DeviceGuard guard(device_);
    variable_list outputs, made;
    const auto make = [&](variable_list& into, const Tensor& tensor) {
      into.push_back(tensor);
      addresses.push_back(address_of(tensor));
    };
    addresses.reserve(addresses.size() + outputs_.size() + workspaces_.size());
    for (const auto& layout : outputs_) make(outputs, layout.has_value() ? empty(*layout) : Tensor());
    const size_t known = addresses.size();
    auto next = given.begin();
    for (const auto& layout : workspaces_) make(made, layout.has_value() ? empty(*layout) : *next++);
    void* const stream = device_.is_cpu() ? nullptr : current_stream();
    for (const auto& [launches, count] : launches_)
      if (launch_(reinterpret_cast<void*>(launches), addresses.data(), stream) != count) return {};
    addresses.resize(known);
    return outputs;
  }

 private:
  Tensor empty(const Layout& layout) const {
    const auto& [sizes, strides, type] = layout;
    return at::empty_strided(sizes, strides, at::TensorOptions().dtype(type).device(device_));
  }

  void* current_stream() const {
    return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).native_handle();
  }

  at::Device device_;
  std::vector<std::optional<Layout>> outputs_, workspaces_;
  std::vector<std::pair<uintptr_t, int>> launches_;
  Launch launch_;
  Owned owner_;
};

// The plan of a forward, and those of its backward by the strides of out's gradient.
struct Forward {
  Plan plan;
  std::vector<std::optional<Strides>> strides;  // of what is saved: inputs, then outputs
  Owned backward;  // backward(this, saved, addresses of saved, grad_out) computes the gradients of the primals in Python
  std::mutex mutex;
  std::vector<std::pair<Strides, std::shared_ptr<Plan>>> backwards;

  std::shared_ptr<Plan> backward_of(const Tensor& grad_out) {
    const std::lock_guard lock(mutex);
    for (const auto& [strides_of, planned] : backwards)
      if (grad_out.strides() == strides_of) return planned;
    return nullptr;
  }
};

// What the backward of one call knows of its forward.
struct Call {
  std::shared_ptr<Forward> of;
  variable_list saved;  // until autograd has it
  Addresses addresses;  // of what is saved
};

// Whether a tensor is an ordinary one, with memory: no subclass, no batch of torch.func, no zero tensor without memory.
bool is_plain(const Tensor& tensor, const c10::DeviceType device) {
  using c10::DispatchKey;
  if (tensor.device().type() != device || tensor.layout() != at::kStrided) return false;
  const c10::DispatchKeySet usual =
      c10::DispatchKeySet(tensor.is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU) | c10::autograd_dispatch_keyset |
      c10::autocast_dispatch_keyset | c10::DispatchKeySet(DispatchKey::ADInplaceOrView);
  return (tensor.key_set().raw_repr() & ~usual.raw_repr()) == 0;
}

// Whether nothing else wants to see what is called: no mode of torch, no profiler, no derivative of a derivative.
bool is_unseen() {
  return !at::GradMode::is_enabled() && !at::hasCallbacks() && !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         at::impl::PythonTorchFunctionTLS::stack_len() == 0 &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer);
}

bool is_any_variable_set() {
  return std::any_of(variables.begin(), variables.end(), [](const auto& name) { return std::getenv(name.c_str()); });
}

// Give this thread CUDA's context, once, as `plans.enter_thread` says.
void enter_thread() {
  static thread_local bool entered = false;
  if (entered) return;
  const py::gil_scoped_acquire acquired;
  py::module_::import("dmattn_ops.launching.plans").attr("enter_thread")();
  entered = true;
}

// Gradients by the plan of the backward, where there is one and the saved tensors are those of the forward: autograd has checked
// their versions, and a hook may have put others in their place.
variable_list repeated(const Call& call, const Tensor& grad_out, const variable_list& saved) {
  if (!replays || is_any_variable_set() || !is_unseen() || !is_plain(grad_out, saved[0].device().type())) return {};
  const std::shared_ptr<Plan> plan = call.of->backward_of(grad_out);
  if (!plan || grad_out.sizes() != saved[saved.size() - kSavedOutputs].sizes()) return {};
  for (size_t k = 0; k < saved.size(); ++k) {
    const Tensor& tensor = saved[k];
    if (tensor.defined() && !is_plain(tensor, grad_out.device().type())) return {};
    if (address_of(tensor) != call.addresses[k]) return {};
    if (tensor.defined() && tensor.strides() != *call.of->strides[k]) return {};
  }
  if (grad_out.is_cuda()) enter_thread();
  const auto first = call.addresses.begin(), outputs = call.addresses.end() - kSavedOutputs;
  Addresses addresses{address_of(grad_out), 0};  // of lse no gradient
  addresses.insert(addresses.end(), first, first + kPrimals);
  addresses.insert(addresses.end(), outputs, call.addresses.end());
  addresses.insert(addresses.end(), first + kPrimals, outputs);
  return plan->run(addresses);
}

[[noreturn]] void throw_error_of_python() {
  python_error error;
  error.persist();
  throw error;
}

variable_list in_python(const Call& call, const Tensor& grad_out, const variable_list& saved) {
  const py::gil_scoped_acquire acquired;
  py::tuple tensors(saved.size());
  for (size_t k = 0; k < saved.size(); ++k) tensors[k] = wrapped(saved[k]);
  const py::object of = py::cast(call.of), addresses = py::cast(call.addresses), grad = wrapped(grad_out);
  const auto found = py::reinterpret_steal<py::object>(PyObject_CallFunctionObjArgs(
      call.of->backward.held.ptr(), of.ptr(), tensors.ptr(), addresses.ptr(), grad.ptr(), nullptr));
  if (!found) throw_error_of_python();
  variable_list grads;
  for (const py::handle one : found) grads.push_back(unpacked(one.ptr()));
  return grads;
}

class Attention : public torch::autograd::Function<Attention> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor&, const Tensor&, const Tensor&, Call* call) {
    const Tensor out = call->saved[call->saved.size() - kSavedOutputs];
    ctx->set_materialize_grads(false);
    ctx->save_for_backward(std::exchange(call->saved, {}));
    // A context holds tensors and numbers, so that what owns the call is a tensor.
    ctx->saved_data["call"] = at::from_blob(call, {1}, [](void* owned) { delete static_cast<Call*>(owned); }, at::kByte);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto& call = *static_cast<const Call*>(ctx->saved_data["call"].toTensor().data_ptr());
    variable_list found;
    if (grads[0].defined()) {
      found = repeated(call, grads[0], saved);
      if (found.empty()) found = in_python(call, grads[0], saved);
    }
    found.resize(kPrimals + 1);  // nothing for the call
    return found;
  }
};

// Compute a forward by its plan with these inputs and workspaces, and record its derivative where one may be asked for; undefined
// where a launch was refused.
Tensor computed(const std::shared_ptr<Forward>& of, variable_list inputs, const variable_list& workspaces) {
  auto call = std::make_unique<Call>();
  call->of = of;
  for (const Tensor& tensor : inputs) call->addresses.push_back(address_of(tensor));
  const variable_list outputs = of->plan.run(call->addresses, workspaces);
  if (outputs.empty()) return {};
  const Tensor query = inputs[0], key = inputs[1], value = inputs[2];
  if (!at::GradMode::is_enabled() || !(query.requires_grad() || key.requires_grad() || value.requires_grad()))
    return outputs[0];
  call->addresses.resize(inputs.size() + kSavedOutputs);
  call->saved = std::move(inputs);
  call->saved.insert(call->saved.end(), outputs.begin(), outputs.begin() + kSavedOutputs);
  return Attention::apply(query, key, value, call.release());
}

variable_list unpacked(const py::tuple& given, size_t more = 0) {
  variable_list tensors;
  tensors.reserve(given.size() + more);
  for (const py::handle one : given) tensors.push_back(unpacked(one.ptr()));
  return tensors;
}

// The same with what the operator takes in Python, None where there is no tensor.
py::object attend(const std::shared_ptr<Forward>& of, const py::tuple& given, const py::tuple& workspaces) {
  variable_list inputs = unpacked(given, kSavedOutputs);
  const variable_list made = unpacked(workspaces);
  Tensor out;
  {
    const py::gil_scoped_release released;
    out = computed(of, std::move(inputs), made);
  }
  return wrapped(out);
}

std::shared_ptr<Forward> forward_of(int device, std::vector<std::optional<Layout>> outputs,
                                    std::vector<std::optional<Layout>> workspaces,
                                    std::vector<std::pair<uintptr_t, int>> launches, uintptr_t launch,
                                    py::object owner, std::vector<std::optional<Strides>> inputs, py::object backward) {
  for (size_t k = 0; k < kSavedOutputs; ++k)
    inputs.push_back(outputs[k].has_value() ? std::optional(std::get<1>(*outputs[k])) : std::nullopt);
  return std::shared_ptr<Forward>(
      new Forward{{device, std::move(outputs), std::move(workspaces), std::move(launches), launch, std::move(owner)},
                  std::move(inputs), Owned(std::move(backward)), {}, {}});
}

void add_backward(Forward& of, Strides grad_out, std::shared_ptr<Plan> plan) {
  const std::lock_guard lock(of.mutex);
  for (const auto& [strides, planned] : of.backwards)
    if (strides == grad_out) return;
  if (of.backwards.size() >= kMostBackwards) of.backwards.clear();
  of.backwards.emplace_back(std::move(grad_out), std::move(plan));
}

}  // namespace

PYBIND11_MODULE(DMATTN_NODE, module) {
  py::class_<Plan, std::shared_ptr<Plan>>(module, "Plan")
      .def(py::init<int, std::vector<std::optional<Layout>>, std::vector<std::optional<Layout>>,
                    std::vector<std::pair<uintptr_t, int>>, uintptr_t, py::object>());
  py::class_<Forward, std::shared_ptr<Forward>>(module, "Forward")
      .def(py::init(&forward_of))
      .def("add_backward", &add_backward)
      .def("attend", &attend);
  module.def("set_replays", [](bool value) { replays = value; });
  module.def("set_variables", [](std::vector<std::string> names) { variables = std::move(names); });
}

// What the operators `dmattn::*` of this library are made of: arguments from a stack, results onto it.
#pragma once

#include "tensor.h"

namespace dmattn {

// The arguments of a call, in the order of its schema; all of them have to be taken, whatever is wrong with one.
class Taken {
 public:
  explicit Taken(StableIValue* stack) : next_(stack) {}

  Tensor tensor() { return next<Tensor>(); }
  MaybeTensor maybe_tensor() { return next<MaybeTensor>(); }
  int64_t integer() { return next<int64_t>(); }
  std::optional<int64_t> maybe_integer() { return next<std::optional<int64_t>>(); }
  double number() { return next<double>(); }
  std::optional<double> maybe_number() { return next<std::optional<double>>(); }
  bool flag() { return next<bool>(); }

 private:
  template <typename T>
  T next() {
    return torch::stable::detail::to<T>(*next_++);
  }

  StableIValue* next_;
};

template <typename... T>
void give(StableIValue* stack, const T&... results) {
  ((*stack++ = torch::stable::detail::from(results)), ...);
}

inline Tensor rows(const Tensor& tensor) {
  return tensor.dim() == 0 || tensor.stride(-1) == 1 ? tensor : torch::stable::contiguous(tensor);
}

inline MaybeTensor rows(const MaybeTensor& tensor) {
  return tensor.has_value() ? MaybeTensor(rows(*tensor)) : std::nullopt;
}

inline Tensor allocate(const Tensor& on, const std::vector<int64_t>& sizes, ScalarType type) {
  return torch::stable::new_empty(on, sizes, type);
}

inline Tensor allocate_like(const Tensor& tensor) { return torch::stable::new_empty(tensor, tensor.sizes()); }

inline Tensor nothing(const Tensor& on) { return torch::stable::new_empty(on, std::vector<int64_t>{0}); }

// What the package has and this library does not. Arguments are taken, so that what they hold is let go.
[[noreturn]] inline void refuse_operator(const char* what) {
  refuse("NotImplementedError: ", what, " needs Python and the package dmattn_ops: libdmattn.so alone does not have it");
}

// Of operators on a GPU (csrc/cuda/operators.cpp).
extern "C" void dmattn_serve_plans(const char* key);

// Of masks (mask_operators.cpp).
void pack_mask_operator(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void pack_intervals_operator(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void list_tiles_operator(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void key_lifetimes_operator(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void rank_ids_operator(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void spread_lists_operator(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void pack_selection_operator(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void selection_mass_operator(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void key_mass_operator(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void mask_as_exported_operator(StableIValue* stack, uint64_t inputs, uint64_t outputs);

}  // namespace dmattn

// Tensors by torch's stable interface, which one library shares with every torch from 2.11 on, and what is refused.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace dmattn {

using Tensor = torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
using torch::headeronly::ScalarType;
using Extents = torch::headeronly::IntHeaderOnlyArrayRef;

constexpr ScalarType kBool = ScalarType::Bool, kInt = ScalarType::Int, kLong = ScalarType::Long;
constexpr ScalarType kHalf = ScalarType::Half, kBFloat16 = ScalarType::BFloat16;
constexpr ScalarType kFloat = ScalarType::Float, kDouble = ScalarType::Double;

template <typename T>
constexpr ScalarType kTypeOf = sizeof(T) == 8 ? kDouble : kFloat;  // of float and double

inline std::ostream& operator<<(std::ostream& stream, Extents sizes) {
  stream << '[';
  for (size_t dim = 0; dim < sizes.size(); ++dim) stream << (dim == 0 ? "" : ", ") << sizes[dim];
  return stream << ']';
}

// An error's text begins with the type that Python raises (dmattn_ops/kernels/native.py): the stable interface knows
// RuntimeError alone.
template <typename... Parts>
[[noreturn]] void refuse(const char* type, const Parts&... parts) {
  std::ostringstream text;
  text << type;
  ((text << parts), ...);
  throw std::runtime_error(text.str());
}

#define DMATTN_CHECK_VALUE(condition, ...) \
  do {                                     \
    if (!(condition)) ::dmattn::refuse("ValueError: ", __VA_ARGS__); \
  } while (false)
#define DMATTN_CHECK_TYPE(condition, ...) \
  do {                                    \
    if (!(condition)) ::dmattn::refuse("TypeError: ", __VA_ARGS__); \
  } while (false)

// Refuse where torch's interface in C answers with an error. The macros that do this have other names in torch 2.11 than later.
inline void answered(int32_t error, const char* asked) {
  if (error != 0) refuse("RuntimeError: ", "torch could not tell ", asked, " of a tensor");
}

inline bool same_sizes(Extents a, Extents b) {
  bool same = a.size() == b.size();
  for (size_t dim = 0; same && dim < a.size(); ++dim) same = a[dim] == b[dim];
  return same;
}

inline bool is_floating(ScalarType type) {
  return type == kDouble || type == kFloat || type == kHalf || type == kBFloat16;
}

inline bool is_integral(ScalarType type) {
  return type == ScalarType::Byte || type == ScalarType::Char || type == ScalarType::Short || type == kInt ||
         type == kLong || type == ScalarType::UInt16 || type == ScalarType::UInt32 || type == ScalarType::UInt64;
}

// The tensor itself where it has that type and no strides of its own, else a copy.
inline Tensor contiguous_as(const Tensor& tensor, ScalarType type) {
  const Tensor typed = tensor.scalar_type() == type ? tensor : torch::stable::to(tensor, type);
  return typed.is_contiguous() ? typed : torch::stable::contiguous(typed);
}

inline void fill(Tensor tensor, double value) { torch::stable::fill_(tensor, value); }

inline MaybeTensor contiguous_or_none(const MaybeTensor& tensor, ScalarType type) {
  return tensor.has_value() ? MaybeTensor(contiguous_as(*tensor, type)) : std::nullopt;
}

}  // namespace dmattn

// One call, as the kernels see it: plain views of the tensors, dense and variable lengths alike.
#pragma once


#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "buffer.h"
#include "intervals.h"
#include "tensor.h"
#include "tile_math.h"

namespace dmattn {

constexpr int64_t kUnbounded = int64_t{1} << 30;  // a band limit that limits nothing, as in call.py
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max() / 4;

inline int64_t ceil_div(int64_t size, int64_t divisor) { return (size + divisor - 1) / divisor; }

// Rows or columns that are computed for `valid` ones: whole vectors, and eight extents in all, since oneDNN compiles
// (in 20 us) and keeps a kernel for each combination.
inline int64_t padded_extent(int64_t valid) { return ceil_div(valid, 16) * 16; }

// Element y of the other axis is visible to element x of the own axis iff x + lo <= y <= x + hi.
struct Band {
  int64_t lo = -kNoLimit;
  int64_t hi = kNoLimit;

  static Band from(int64_t band_lo, int64_t band_hi, int64_t offset = 0) {
    return {limit(band_lo, offset), limit(band_hi, offset)};
  }
  static int64_t limit(int64_t value, int64_t offset) {
    return value <= -kUnbounded ? -kNoLimit : value >= kUnbounded ? kNoLimit : value + offset;
  }
  Band transposed() const { return {-hi, -lo}; }
};

// A batch element: where its rows start (0 for dense tensors) and how many there are.
struct Sequence {
  int64_t q_start, q_length, k_start, k_length;
  Band band;
};

// [B, S, heads, width], or [total, heads, width] with `batch_stride` 0. Strides in bytes; the last dimension is
// contiguous.
struct Rows {
  char* data = nullptr;
  Element element = Element::f32;
  int64_t width = 0, batch_stride = 0, row_stride = 0, head_stride = 0;

  char* at(int64_t batch, int64_t row, int64_t head) const {
    return data + batch * batch_stride + row * row_stride + head * head_stride;
  }
};

// [B, H, Sq] or [H, total_q] of T; strides in elements, which may be 0.
template <typename T>
struct PerQuery {
  T* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0;

  T& at(int64_t batch, int64_t head, int64_t row) const {
    return data[batch * batch_stride + head * head_stride + row * row_stride];
  }
};

// Bias [B or 1, H or Hkv or 1, Sq or 1, Sk] or [H or Hkv or 1, total_k]. Byte strides, 0 in broadcast dimensions.
struct Bias {
  char* data = nullptr;
  Element element = Element::f32;
  int64_t heads = 1, batch_stride = 0, head_stride = 0, row_stride = 0;

  explicit operator bool() const { return data != nullptr; }
  char* at(int64_t batch, int64_t head_of_bias, int64_t row, int64_t key) const {
    return data + batch * batch_stride + head_of_bias * head_stride + row * row_stride + key * element_size(element);
  }
};

// A mask (DESIGN.md): tile lists, bits, segments and intervals; each may be missing.
struct MaskTensors {
  MaybeTensor row_tiles, col_tiles, row_bits, col_bits, q_segments, k_segments, start, end, hidden_from, hidden_to;
};

struct Dropout {
  std::vector<uint64_t> seeds;  // [1 or B, 1 or H]
  int64_t seed_batches = 1, seed_heads = 1;
  bool used = false;
  uint32_t last_dropped = 0;  // the greatest random word that drops its weight
  double scale = 1;           // of the weights that are kept
  int64_t q_origin = 0, k_origin = 0;

  explicit operator bool() const { return used; }
  uint64_t seed(int64_t batch, int64_t head) const {
    return seeds[(seed_batches == 1 ? 0 : batch) * seed_heads + (seed_heads == 1 ? 0 : head)];
  }
};

struct Problem {
  int64_t batch, heads, kv_heads, group, dim, value_dim;
  bool varlen = false, covers_everything = true;  // no row outside every sequence
  std::vector<Sequence> sequences;
  Rows query, key, value;
  Bias bias;
  MaskTensors mask;
  std::vector<Intervals> intervals;  // [1 or B, heads of the mask], of the tensors in `mask`
  int64_t interval_heads = 0;
  Dropout dropout;
  double scale, softcap;

  const Sequence& sequence(int64_t batch_index) const { return sequences[batch_index]; }
  // The place in `intervals` of a query head, and those intervals; null where the mask has none.
  int64_t interval_head(int64_t batch_index, int64_t head) const {
    const bool shared = static_cast<int64_t>(intervals.size()) == interval_heads;
    return (shared ? 0 : batch_index * interval_heads) + head * interval_heads / heads;
  }
  const Intervals* intervals_of(int64_t batch_index, int64_t head) const {
    return intervals.empty() ? nullptr : &intervals[interval_head(batch_index, head)];
  }
};

// The arguments that forward and backward share, in the order of the operators' schemas.
struct Arguments {
  const Tensor &query, &key, &value;
  const MaybeTensor &bias, &row_tiles, &col_tiles, &row_bits, &col_bits, &q_segments, &k_segments, &start, &end,
      &hidden_from, &hidden_to;
  std::optional<int64_t> at_most;
  const MaybeTensor &seed, &cu_seqlens_q, &cu_seqlens_k;
  bool top_left;
  int64_t band_lo, band_hi, q_origin, k_origin;
  double softmax_scale, softcap;
  int64_t drop_below;
  double dropout_scale;
};

Element element_of(const Tensor& tensor);
Rows rows_of(const Tensor& tensor);
Bias bias_of(const Tensor& tensor);
Problem make_problem(const Arguments& arguments);

// `x` as a finite T of its sign, where it is finite.
template <typename T>
T in_range(double x) {
  constexpr double largest = std::numeric_limits<T>::max();
  return static_cast<T>(std::isfinite(x) ? std::clamp(x, -largest, largest) : x);
}

// Zeros where the call has no soft cap.
template <typename T>
SoftCap<T> softcap_of(const Problem& problem) {
  if (problem.softcap == 0) return {};
  return {in_range<T>(problem.scale), in_range<T>(problem.scale / problem.softcap), in_range<T>(problem.softcap)};
}

template <typename T>
PerQuery<T> per_query_of(const Tensor& tensor) {
  const bool packed = tensor.dim() == 2;
  return {static_cast<T*>(tensor.data_ptr()), packed ? 0 : tensor.stride(0), tensor.stride(-2), tensor.stride(-1)};
}

// Head `head` of `heads` in a tensor with 1, Hkv or H heads.
inline int64_t broadcast_head(int64_t head, int64_t heads, int64_t tensor_heads) { return head * tensor_heads / heads; }

}  // namespace dmattn

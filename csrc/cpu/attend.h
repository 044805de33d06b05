// The forward of one tile of queries: it is shown tiles of keys, one after another, and keeps an online softmax.
#pragma once

#include <cmath>
#include <utility>

#include "product.h"
#include "kernels.h"
#include "strips.h"
#include "tile_pack.h"
#include "visibility.h"

namespace dmattn {

// Rows [extent][stride] in the compute type.
template <typename T>
struct RowTile {
  const T* data = nullptr;
  int64_t stride = 0;
};

// A tile of keys with their values: `valid` of them, the rest of a multiple of 16 being zeros.
template <typename T>
struct KeyTileView {
  const T* columns = nullptr;  // [width][kTile]; null where `rows` are given
  RowTile<T> rows, values;
  bool finite_values = true;
  int64_t valid = 0;
  // Of the first query and the first key; null where there is none.
  const char* bias = nullptr;
  Element bias_element = Element::f32;
  int64_t bias_row_stride = 0;
  KeyPositions positions;
};

// Where the rows of a call go.
template <typename T>
struct Outputs {
  Rows out;
  PerQuery<T> lse, lse_tail, row_max;  // row_max has no data where nobody asked

  explicit Outputs(const Results& results)
      : out(rows_of(results.out)), lse(per_query_of<T>(results.lse)), lse_tail(per_query_of<T>(results.lse_tail)) {
    if (results.row_max.has_value()) row_max = per_query_of<T>(*results.row_max);
  }
};

// lse rounded to T, and what that rounding lost: together max + log(sum).
template <typename T>
std::pair<T, T> split_lse(T max, T sum) {
  if (sum == 0) return {-std::numeric_limits<T>::infinity(), 0};
  const double log_sum = std::log(double{sum}), total = max + log_sum, added = total - max;
  const double lost = (max - (total - added)) + (log_sum - added);  // of the sum of two numbers (Knuth)
  const T lse = static_cast<T>(total);
  return {lse, static_cast<T>((total - lse) + lost)};
}

template <typename T>
class Attend {
 public:
  // `by_rows`: keys come as rows, not transposed.
  Attend(const Problem& problem, const Outputs<T>& outputs, bool by_rows)
      : problem_(problem), outputs_(outputs), by_rows_(by_rows) {}

  void begin(int64_t batch, int64_t head, int64_t tile) {
    const Sequence& sequence = problem_.sequence(batch);
    batch_ = batch;
    head_ = head;
    first_ = tile * kTile;
    valid_ = std::min(kTile, sequence.q_length - first_);
    rows_ = padded_extent(valid_);
    std::fill(max_, max_ + kTile, -std::numeric_limits<T>::infinity());
    std::fill(sum_, sum_ + kTile, T(0));
    has_acc_ = false;
    pack_rows<T>(problem_.query, batch, sequence.q_start + first_, valid_, head, query_.data());
    if (by_rows_) pack_columns<T>(query_.data(), valid_, width_, query_columns_.data());
  }

  void step(const KeyTileView<T>& keys, const Bits& visible) {
    const int64_t cols = padded_extent(keys.valid);
    const Strips strips(by_rows_ ? Bits{} : visible, rows_, cols);
    if (strips.empty()) return;
    if (!has_acc_ && !strips.whole(rows_, cols)) {
      std::fill(acc_.data(), acc_.at(rows_ * value_width_), T(0));
      has_acc_ = true;
    }
    if (const Dropout& dropout = problem_.dropout)
      dropout_bits(dropout, dropout.seed(batch_, head_), first_, valid_, keys.positions, keep_.data());
    for (const Strip& strip : strips) attend(keys, visible, strip);
    has_acc_ = true;
  }

  void finish() {
    if (!has_acc_) std::fill(acc_.data(), acc_.at(valid_ * value_width_), T(0));
    const int64_t first_row = problem_.sequence(batch_).q_start + first_;
    for (int64_t r = 0; r < valid_; ++r) {
      const int64_t row = first_row + r;
      math_.store(acc_.at(r * value_width_), sum_[r] == 0 ? T(0) : 1 / sum_[r], problem_.value_dim,
                  outputs_.out.at(batch_, row, head_), outputs_.out.element);
      const auto [lse, tail] = split_lse(max_[r], sum_[r]);
      outputs_.lse.at(batch_, head_, row) = lse;
      outputs_.lse_tail.at(batch_, head_, row) = tail;
      if (outputs_.row_max.data) outputs_.row_max.at(batch_, head_, row) = max_[r];
    }
  }

 private:
  void attend(const KeyTileView<T>& keys, const Bits& visible, const Strip& strip) {
    const auto [first_row, rows, columns] = strip;
    T* const scores = scores_.at(first_row * kTile);
    T* const part = scores + columns.first;
    if (by_rows_) {
      math_.product(columns.count(), rows, width_, keys.rows.data, keys.rows.stride, query_columns_.data(), kTile,
                    false, columns_.data(), kTile);
      math_.transpose(columns_.data(), kTile, columns.count(), rows, part, kTile);
    } else {
      math_.product(rows, columns.count(), width_, query_.at(first_row * width_), width_, keys.columns + columns.first,
                    kTile, false, part, kTile);
    }
    T factor = in_range<T>(problem_.scale);
    if (problem_.softcap != 0) {
      math_.cap(part, rows, columns.count(), softcap_, nullptr);
      factor = 1;
    }
    if (keys.bias) {
      const char* const bias =
          keys.bias + first_row * keys.bias_row_stride + columns.first * element_size(keys.bias_element);
      math_.add_bias(part, std::min(rows, valid_ - first_row), std::min(columns.last, keys.valid) - columns.first,
                     factor, bias, keys.bias_element, keys.bias_row_stride);
      factor = 1;
    }
    T* const acc = acc_.at(first_row * value_width_);
    math_.softmax_step(scores, rows, columns, factor, visible.from_row(first_row),
                       {max_ + first_row, sum_ + first_row, acc, value_width_, has_acc_});
    if (const Dropout& dropout = problem_.dropout)
      math_.drop(scores, rows, columns, {keep_.at(first_row * kTileWords), kTileWords}, static_cast<T>(dropout.scale));
    auto* const multiply = keys.finite_values ? math_.product : product_of_nonzero<T>;
    multiply(rows, value_width_, columns.count(), part, kTile, keys.values.data + columns.first * keys.values.stride,
             keys.values.stride, has_acc_, acc, value_width_);
  }

  const Problem& problem_;
  const Outputs<T>& outputs_;
  const bool by_rows_;
  const SoftCap<T> softcap_ = softcap_of<T>(problem_);
  const TileMath<T>& math_ = tile_math<T>();
  const int64_t width_ = padded_width(problem_.dim), value_width_ = padded_width(problem_.value_dim);
  Buffer<T> query_{kTile * width_}, scores_{kTile * kTile}, acc_{kTile * value_width_};
  // Only where keys come as rows: the queries transposed, and scores transposed.
  Buffer<T> query_columns_{by_rows_ ? kTile * width_ : 0}, columns_{by_rows_ ? kTile * kTile : 0};
  Buffer<uint32_t> keep_{kTile * kTileWords};
  T max_[kTile], sum_[kTile];
  int64_t batch_ = 0, head_ = 0, first_ = 0, valid_ = 0, rows_ = 0;
  bool has_acc_ = false;
};

}  // namespace dmattn

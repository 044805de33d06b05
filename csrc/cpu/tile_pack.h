// Tiles of the inputs in the compute type: padded with zeros, row-major or transposed.
#pragma once

#include <cstring>

#include "problem.h"

namespace dmattn {

// Widths are padded to multiples of 16: few kernel shapes, and whole blocks to transpose.
inline int64_t padded_width(int64_t width) { return std::max<int64_t>(16, ceil_div(width, 16) * 16); }

constexpr int64_t kRowsAhead = 8;

// Load `valid` rows of `source`, those that row_of numbers, into target[kTile][padded_width], zero in the padding.
template <typename T, typename RowOf>
void pack_chosen_rows(const Rows& source, int64_t batch, const RowOf& row_of, int64_t valid, int64_t head, T* target) {
  const TileMath<T>& math = tile_math<T>();
  const int64_t width = padded_width(source.width), extent = padded_extent(valid);
  const int64_t bytes = source.width * element_size(source.element);
  for (int64_t r = 0; r < extent; ++r) {
    // Rows lie apart, further than processors look ahead.
    if (r + kRowsAhead < valid)
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(source.at(batch, row_of(r + kRowsAhead), head) + b);
    T* row = target + r * width;
    const int64_t filled = r < valid ? source.width : 0;
    if (filled) math.load(source.at(batch, row_of(r), head), source.element, filled, row);
    std::fill(row + filled, row + width, T(0));
  }
}

template <typename T>
void pack_rows(const Rows& source, int64_t batch, int64_t first_row, int64_t valid, int64_t head, T* target) {
  pack_chosen_rows<T>(source, batch, [&](int64_t r) { return first_row + r; }, valid, head, target);
}

// Whether `valid` rows, padded to `width` and to a multiple of 16 of them, hold neither infinity nor NaN.
template <typename T>
bool rows_are_finite(const T* rows, int64_t valid, int64_t width, int64_t stride) {
  const TileMath<T>& math = tile_math<T>();
  if (stride == width) return math.finite(rows, valid * width);
  for (int64_t r = 0; r < valid; ++r)
    if (!math.finite(rows + r * stride, width)) return false;
  return true;
}

template <typename T>
bool rows_are_finite(const T* rows, int64_t valid, int64_t width) {
  return rows_are_finite(rows, valid, width, width);
}

// target[width][kTile] from source[extent][width].
template <typename T>
void pack_columns(const T* source, int64_t valid, int64_t width, T* target) {
  tile_math<T>().transpose(source, width, padded_extent(valid), width, target, kTile);
}

}  // namespace dmattn

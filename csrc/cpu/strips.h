// The parts of a partly visible tile that are computed: rows in strips, each with the columns that its rows see.
#pragma once

#include <algorithm>
#include <bit>

#include "tile_math.h"

namespace dmattn {

struct Strip {
  int64_t first_row, rows;
  Columns columns;

  int64_t area() const { return rows * columns.count(); }
  int64_t at(int64_t stride) const { return first_row * stride + columns.first; }
};

// A tile that is visible as a whole is one strip. Else strips hold kRows rows, or a multiple of it where that costs
// little; rows that see nothing are in none. Rows and columns outside of strips are computed nowhere.
class Strips {
 public:
  Strips(const Bits& visible, int64_t rows, int64_t cols) {
    if (!visible.words) add({0, rows, {0, cols}});
    for (int64_t first = 0; visible.words && first < rows; first += kRows) {
      const int64_t count = std::min(kRows, rows - first);
      const Columns seen = seen_by(visible, first, count, cols);
      if (seen.count() > 0) add({first, count, seen});
    }
  }

  const Strip* begin() const { return strips_; }
  const Strip* end() const { return strips_ + count_; }
  bool empty() const { return count_ == 0; }
  // Whether they hold all elements of a tile.
  bool whole(int64_t rows, int64_t cols) const { return count_ == 1 && strips_[0].area() == rows * cols; }

 private:
  static constexpr int64_t kRows = 32, kSmall = 512;

  // Columns, in multiples of 16, from the first to the last one that some of the rows see.
  static Columns seen_by(const Bits& visible, int64_t first_row, int64_t rows, int64_t cols) {
    uint32_t words[kTileWords] = {};
    for (int64_t r = first_row; r < first_row + rows; ++r)
      for (int64_t w = 0; w < kTileWords; ++w) words[w] |= visible.words[r * visible.stride + w];
    int64_t first = 0, last = kTileWords;
    while (first < kTileWords && !words[first]) ++first;
    if (first == kTileWords) return {0, 0};
    while (!words[last - 1]) --last;
    first = first * 32 + std::countr_zero(words[first]);
    last = last * 32 - std::countl_zero(words[last - 1]);
    return {first / 16 * 16, std::min(cols, (last + 15) / 16 * 16)};
  }

  void add(const Strip& strip) {
    if (count_ > 0) {
      Strip& before = strips_[count_ - 1];
      const Strip both{before.first_row,
                       strip.first_row + strip.rows - before.first_row,
                       {std::min(before.columns.first, strip.columns.first),
                        std::max(before.columns.last, strip.columns.last)}};
      if (both.area() <= before.area() + strip.area() + kSmall) {
        before = both;
        return;
      }
    }
    strips_[count_++] = strip;
  }

  Strip strips_[kTile / kRows];
  int64_t count_ = 0;
};

}  // namespace dmattn

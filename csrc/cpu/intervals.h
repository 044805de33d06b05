// Masks of intervals: each key is visible to the queries of one interval, less those of another one.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tile_math.h"

namespace dmattn {

struct Band;
struct Problem;

// A key and an interval of queries that see it. A key whose hidden interval lies inside its own has two pieces.
struct Piece {
  int32_t key, first, last;  // first <= query < last
};

// One head of such a mask.
class Intervals {
 public:
  // Hidden intervals may be null. The queries that see a key are cut to [0, queries).
  Intervals(const int32_t* start, const int32_t* end, const int32_t* hidden_from, const int32_t* hidden_to,
            int64_t keys, int64_t queries);

  enum class Kind { empty, partial, full };
  // What a tile is as far as intervals decide it, from hulls: one that is empty may count as partial.
  Kind kind(int64_t key_tile, int64_t query_tile) const;
  // The tiles of queries from the first to one past the last that see a tile of keys.
  std::pair<int64_t, int64_t> query_tiles(int64_t key_tile) const;
  // Bits of a tile, one row of kTileWords words per key, inside intervals and band. False: nothing is visible.
  bool key_rows(int64_t key_tile, int64_t query_tile, const Band& band, uint32_t* words) const;
  // All pieces inside the band, sorted by their first query, then by key.
  std::vector<Piece> pieces(const Band& band) const;

  int64_t keys() const { return keys_; }
  int64_t queries() const { return queries_; }

 private:
  struct Span {
    int64_t first, last;
    bool empty() const { return first >= last; }
  };
  // Of a tile of keys: where one is visible at all, where all are, where one is hidden, where all are.
  struct Hull {
    Span any, all, some_hidden, all_hidden;
  };
  Span visible(int64_t key) const;
  Span hidden(int64_t key) const;
  Hull hull(int64_t key_tile) const;

  const int32_t *start_, *end_, *hidden_from_, *hidden_to_;
  int64_t keys_, queries_;
  std::vector<Hull> hulls_;
};

// How many keys the query that sees most of them sees.
int64_t most_visible(const std::vector<Piece>& pieces, int64_t queries);

// Raise an error where a query sees more than `at_most` keys of a head.
void check_promise(const Problem& problem, int64_t at_most);

}  // namespace dmattn

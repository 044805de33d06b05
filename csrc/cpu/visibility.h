// Which tiles a tile sees, and which elements inside them: from lists, bits, segments,
// intervals and the band.
#pragma once

#include <vector>

#include "problem.h"

namespace dmattn {

struct TileRef {
  int64_t index;
  bool full;  // every pair of the tile is visible: no bits needed
};

// One axis seen from the other: "own" is queries in the forward and keys in the backward.
struct Side {
  int64_t own_length = 0, other_length = 0;
  Band band;
  const int64_t* own_ids = nullptr;  // segments; null where all are 0
  const int64_t* other_ids = nullptr;
  const int32_t* records = nullptr;  // tile lists of the own axis, `record_words` each
  int64_t record_words = 0;
  const uint32_t* bits = nullptr;  // rows of the own axis, `bit_words` each
  int64_t bit_words = 0;
  const Intervals* intervals = nullptr;
  bool own_is_keys = false;

  bool has_segments() const { return own_ids || other_ids; }
  // First and one past the last tile of the other axis inside the band.
  std::pair<int64_t, int64_t> band_tiles(int64_t tile) const;
  bool inside_band(int64_t tile, int64_t other) const;
  void visible_tiles(int64_t tile, std::vector<TileRef>& tiles) const;
  // Bits of a partial tile: the mask's own, or built in `scratch` (kTile * kTileWords words). False: nothing is
  // visible.
  bool tile_bits(int64_t tile, int64_t other, uint32_t* scratch, Bits& bits) const;
  // The same built from band, segments and the ends of the axes, whatever the mask holds.
  bool build_bits(int64_t tile, int64_t other, uint32_t* words) const;

 private:
  void interval_tiles(int64_t tile, std::vector<TileRef>& tiles) const;
  bool interval_bits(int64_t tile, int64_t other, uint32_t* words) const;
};

Side query_side(const Problem& problem, int64_t batch, int64_t head);
Side key_side(const Problem& problem, int64_t batch, int64_t head);

// Which keys of their sequence the keys of a tile are: kTile neighbours from `first`, or those of `count` pieces.
struct KeyPositions {
  int64_t first = 0;
  const Piece* pieces = nullptr;
  int64_t count = 0;
};

// Keep bits of dropout for a tile of keys, one row of kTileWords words per query; rows from `queries` to kTile are 0.
// Queries and keys count from the first one of their sequence.
void dropout_bits(const Dropout& dropout, uint64_t seed, int64_t first_query, int64_t queries,
                  const KeyPositions& keys, uint32_t* words);

// Bits [first, last) of the four words of a row.
void range_bits(int64_t first, int64_t last, uint32_t* words);

}  // namespace dmattn

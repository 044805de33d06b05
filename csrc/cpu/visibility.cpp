#include "visibility.h"

#include <cstring>

namespace dmattn {
namespace {

// Segment ids [B or 1, heads or 1, S] (or [B or 1, S]) of one head, from the start of its sequence.
const int64_t* segment_row(const MaybeTensor& segments, int64_t batch, int64_t head, int64_t heads, int64_t start) {
  if (!segments.has_value()) return nullptr;
  const int64_t length = segments->size(-1);
  const int64_t b = segments->size(0) == 1 ? 0 : batch;
  const int64_t tensor_heads = segments->dim() == 3 ? segments->size(1) : 1;
  const int64_t h = broadcast_head(head, heads, tensor_heads);
  return segments->const_data_ptr<int64_t>() + (b * tensor_heads + h) * length + start;
}

// The start of the (batch, head) part of lists or bits [Bm, Hm, rows, words].
template <typename Word>
const Word* mask_part(const MaybeTensor& tensor, int64_t batch, int64_t head, int64_t heads) {
  if (!tensor.has_value()) return nullptr;
  const Extents sizes = tensor->sizes();
  const int64_t b = sizes[0] == 1 ? 0 : batch, h = broadcast_head(head, heads, sizes[1]);
  const auto* data = reinterpret_cast<const Word*>(tensor->const_data_ptr<int32_t>());
  return data + (b * sizes[1] + h) * sizes[2] * sizes[3];
}

void add_lists(Side& side, const MaybeTensor& tiles, const MaybeTensor& bits, int64_t batch, int64_t head,
               int64_t heads) {
  side.records = mask_part<int32_t>(tiles, batch, head, heads);
  side.record_words = tiles.has_value() ? tiles->size(3) : 0;
  side.bits = mask_part<uint32_t>(bits, batch, head, heads);
  side.bit_words = bits.has_value() ? bits->size(3) : 0;
}

}  // namespace

Side query_side(const Problem& problem, int64_t batch, int64_t head) {
  const Sequence& sequence = problem.sequence(batch);
  Side side;
  side.own_length = sequence.q_length;
  side.other_length = sequence.k_length;
  side.band = sequence.band;
  side.intervals = problem.intervals_of(batch, head);
  side.own_ids = segment_row(problem.mask.q_segments, batch, head, problem.heads, sequence.q_start);
  side.other_ids = segment_row(problem.mask.k_segments, batch, head, problem.heads, sequence.k_start);
  add_lists(side, problem.mask.row_tiles, problem.mask.row_bits, batch, head, problem.heads);
  return side;
}

Side key_side(const Problem& problem, int64_t batch, int64_t head) {
  Side side = query_side(problem, batch, head);
  std::swap(side.own_length, side.other_length);
  std::swap(side.own_ids, side.other_ids);
  side.band = side.band.transposed();
  side.own_is_keys = true;
  add_lists(side, problem.mask.col_tiles, problem.mask.col_bits, batch, head, problem.heads);
  return side;
}

std::pair<int64_t, int64_t> Side::band_tiles(int64_t tile) const {
  const int64_t first_own = tile * kTile, last_own = std::min(first_own + kTile, own_length) - 1;
  const int64_t first = std::max<int64_t>(0, first_own + band.lo);
  const int64_t last = std::min(other_length - 1, last_own + band.hi);
  if (first > last) return {0, 0};
  return {first / kTile, last / kTile + 1};
}

bool Side::inside_band(int64_t tile, int64_t other) const {
  const int64_t first_own = tile * kTile, first_other = other * kTile;
  const bool whole = first_own + kTile <= own_length && first_other + kTile <= other_length;
  return whole && first_own + kTile - 1 + band.lo <= first_other && first_other + kTile - 1 <= first_own + band.hi;
}

void Side::visible_tiles(int64_t tile, std::vector<TileRef>& tiles) const {
  tiles.clear();
  if (records) {
    const int32_t* record = records + tile * record_words;
    const int64_t partial = record[1], total = partial + record[2];
    for (int64_t k = 0; k < total; ++k) tiles.push_back({record[4 + k], k >= partial});
    return;
  }
  if (intervals) return interval_tiles(tile, tiles);
  const auto [first, last] = band_tiles(tile);
  for (int64_t other = first; other < last; ++other)
    tiles.push_back({other, !has_segments() && inside_band(tile, other)});
}

void Side::interval_tiles(int64_t tile, std::vector<TileRef>& tiles) const {
  auto [first, last] = band_tiles(tile);
  if (own_is_keys) {
    const auto [first_seen, last_seen] = intervals->query_tiles(tile);
    first = std::max(first, first_seen);
    last = std::min(last, last_seen);
  }
  for (int64_t other = first; other < last; ++other) {
    const Intervals::Kind kind = own_is_keys ? intervals->kind(tile, other) : intervals->kind(other, tile);
    if (kind == Intervals::Kind::empty) continue;
    tiles.push_back({other, kind == Intervals::Kind::full && inside_band(tile, other)});
  }
}

bool Side::interval_bits(int64_t tile, int64_t other, uint32_t* words) const {
  if (own_is_keys) return intervals->key_rows(tile, other, band.transposed(), words);
  uint32_t by_key[kTile * kTileWords];
  if (!intervals->key_rows(other, tile, band, by_key)) return false;
  bit_math().transpose(by_key, kTileWords, words, kTileWords);
  return true;
}

bool Side::tile_bits(int64_t tile, int64_t other, uint32_t* scratch, Bits& result) const {
  if (bits) {
    result = {bits + tile * kTile * bit_words + other * kTileWords, bit_words};
    return true;
  }
  result = {scratch, kTileWords};
  return build_bits(tile, other, scratch);
}

void range_bits(int64_t first, int64_t last, uint32_t* words) {
  for (int64_t w = 0; w < kTileWords; ++w) {
    const int64_t from = std::clamp<int64_t>(first - 32 * w, 0, 32), to = std::clamp<int64_t>(last - 32 * w, from, 32);
    const uint64_t bits = (uint64_t{1} << to) - (uint64_t{1} << from);
    words[w] = static_cast<uint32_t>(bits);
  }
}

bool Side::build_bits(int64_t tile, int64_t other, uint32_t* words) const {
  if (intervals) return interval_bits(tile, other, words);
  const int64_t first_own = tile * kTile, first_other = other * kTile;
  const int64_t rows = std::min(kTile, own_length - first_own), cols = std::min(kTile, other_length - first_other);
  const BitMath& math = bit_math();
  uint32_t equal[kTileWords] = {};
  int64_t equal_id = 0;
  bool have_equal = false;
  uint32_t any = 0;
  for (int64_t r = 0; r < kTile; ++r) {
    uint32_t* row = words + r * kTileWords;
    const int64_t own = first_own + r;
    if (r >= rows) {
      std::memset(row, 0, kTileWords * sizeof(uint32_t));
      continue;
    }
    range_bits(own + band.lo - first_other, std::min(cols, own + band.hi + 1 - first_other), row);
    if (has_segments()) {
      const int64_t id = own_ids ? own_ids[own] : 0;
      if (!have_equal || id != equal_id) {
        std::memset(equal, id == 0 && !other_ids ? 0xFF : 0, sizeof(equal));
        if (other_ids) math.equal(other_ids + first_other, cols, id, equal);
        equal_id = id;
        have_equal = true;
      }
      for (int64_t w = 0; w < kTileWords; ++w) row[w] &= equal[w];
    }
    for (int64_t w = 0; w < kTileWords; ++w) any |= row[w];
  }
  return any != 0;
}

namespace {

// The same for keys that lie anywhere: a generator call for each.
void scattered_dropout_bits(const Dropout& dropout, uint64_t seed, int64_t first_query, int64_t queries,
                            const KeyPositions& keys, uint32_t* words) {
  const BitMath& math = bit_math();
  uint32_t positions[kTile] = {};
  for (int64_t c = 0; c < keys.count; ++c) positions[c] = static_cast<uint32_t>(dropout.k_origin + keys.pieces[c].key);
  for (int64_t r = 0; r < queries; ++r)
    math.philox_keep_at(seed, static_cast<uint32_t>(dropout.q_origin + first_query + r), positions, dropout.last_dropped,
                        words + r * kTileWords);
}

}  // namespace

void dropout_bits(const Dropout& dropout, uint64_t seed, int64_t first_query, int64_t queries,
                  const KeyPositions& keys, uint32_t* words) {
  std::fill(words + queries * kTileWords, words + kTile * kTileWords, 0u);
  if (keys.pieces) return scattered_dropout_bits(dropout, seed, first_query, queries, keys, words);
  const BitMath& math = bit_math();
  const int64_t key = dropout.k_origin + keys.first;
  const auto skipped = static_cast<uint32_t>(key & 15);
  for (int64_t r = 0; r < queries; ++r) {
    const int64_t query = dropout.q_origin + first_query + r;
    const bool second = (query & 8) != 0;
    if (second && r >= 8) continue;  // written with the query 8 before it
    // 256 keys of both queries from the multiple of 16 before `key` on; the second tile only where `key` is none
    uint32_t both[2][2 * kTileWords] = {};
    for (int64_t tile = 0; tile <= (skipped != 0); ++tile)
      math.philox_keep(seed, static_cast<uint32_t>(query & ~int64_t{8}),
                       static_cast<uint32_t>(key - skipped + tile * kTile), dropout.last_dropped,
                       both[0] + tile * kTileWords, both[1] + tile * kTileWords);
    for (int64_t half = second; half < 2 && r + 8 * (half - second) < queries; ++half) {
      uint32_t* const row = words + (r + 8 * (half - second)) * kTileWords;
      for (int64_t w = 0; w < kTileWords; ++w)
        row[w] = static_cast<uint32_t>((uint64_t{both[half][w + 1]} << 32 | both[half][w]) >> skipped);
    }
  }
}

}  // namespace dmattn

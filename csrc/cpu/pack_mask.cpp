// Lists and bits of masks (layout: DESIGN.md). A tile is classified by an exact look at every pair it holds.
#include "kernels.h"


#include <cstring>
#include <numeric>

#include "check.h"
#include "schedule.h"
#include "visibility.h"

namespace dmattn {
namespace {

enum class TileClass : uint8_t { empty, partial, full };

TileClass classify(const uint32_t* words, int64_t stride, bool whole) {
  uint32_t any = 0, all = ~0u;
  for (int64_t r = 0; r < kTile; ++r) {
    for (int64_t w = 0; w < kTileWords; ++w) {
      any |= words[r * stride + w];
      all &= words[r * stride + w];
    }
  }
  return any == 0 ? TileClass::empty : whole && all == ~0u ? TileClass::full : TileClass::partial;
}

// Classes [own, other] of one head, from which both lists are written.
struct Grid {
  std::vector<TileClass> classes;
  int64_t q_tiles, k_tiles;

  Grid(int64_t q_tiles, int64_t k_tiles)
      : classes(static_cast<size_t>(q_tiles * k_tiles), TileClass::empty), q_tiles(q_tiles), k_tiles(k_tiles) {}
  TileClass& at(int64_t q_tile, int64_t k_tile) { return classes[q_tile * k_tiles + k_tile]; }
};

// Write `count` records of one axis: of `own` tiles whose classes lie `own_step` apart, each over `other` tiles, and
// empty ones behind them.
void write_records(const TileClass* classes, int64_t own, int64_t own_step, int64_t other, int64_t other_step,
                   int32_t* records, int64_t count, int64_t record_words) {
  const int64_t capacity = record_words - 4;
  std::vector<int64_t> work(static_cast<size_t>(count)), ranked(static_cast<size_t>(count));
  for (int64_t t = 0; t < own; ++t) {
    int32_t* record = records + t * record_words;
    int64_t total = 0;
    record[3] = 0;
    for (const TileClass kind : {TileClass::partial, TileClass::full}) {
      const int64_t before = total;
      for (int64_t u = 0; u < other; ++u) {
        if (classes[t * own_step + u * other_step] != kind) continue;
        DMATTN_CHECK_VALUE(total < capacity, "a tile list is too short for its band");
        record[4 + total++] = static_cast<int32_t>(u);
      }
      record[kind == TileClass::partial ? 1 : 2] = static_cast<int32_t>(total - before);
    }
    work[t] = total;
  }
  std::iota(ranked.begin(), ranked.end(), 0);
  std::stable_sort(ranked.begin(), ranked.end(), [&](int64_t a, int64_t b) { return work[a] > work[b]; });
  for (int64_t t = own; t < count; ++t) std::fill_n(records + t * record_words, 4, 0);
  for (int64_t r = 0; r < count; ++r) records[r * record_words] = static_cast<int32_t>(ranked[r]);
}

void write_lists(std::vector<Grid>& grids, const Tensor& row_tiles, const Tensor& col_tiles) {
  int32_t* rows = row_tiles.mutable_data_ptr<int32_t>();
  int32_t* cols = col_tiles.mutable_data_ptr<int32_t>();
  const int64_t row_records = row_tiles.size(2), col_records = col_tiles.size(2);
  const int64_t row_words = row_tiles.size(3), col_words = col_tiles.size(3);
  for_each_item(static_cast<int64_t>(grids.size()), [&] {
    return [&](int64_t item) {
      const Grid& grid = grids[item];
      const TileClass* classes = grid.classes.data();
      write_records(classes, grid.q_tiles, grid.k_tiles, grid.k_tiles, 1, rows + item * row_records * row_words,
                    row_records, row_words);
      write_records(classes, grid.k_tiles, 1, grid.q_tiles, grid.k_tiles, cols + item * col_records * col_words,
                    col_records, col_words);
    };
  });
}

// Segment ids of one head of a mask with `heads` heads.
Side segment_side(const MaybeTensor& q_segments, const MaybeTensor& k_segments, int64_t batch, int64_t head,
                  int64_t heads, int64_t seqlen_q, int64_t seqlen_k, const Band& band) {
  Side side;
  side.own_length = seqlen_q;
  side.other_length = seqlen_k;
  side.band = band;
  if (q_segments.has_value()) {
    const int64_t b = q_segments->size(0) == 1 ? 0 : batch;
    side.own_ids = q_segments->const_data_ptr<int64_t>() + b * seqlen_q;
  }
  if (k_segments.has_value()) {
    const int64_t b = k_segments->size(0) == 1 ? 0 : batch, tensor_heads = k_segments->size(1);
    const int64_t h = broadcast_head(head, heads, tensor_heads);
    side.other_ids = k_segments->const_data_ptr<int64_t>() + (b * tensor_heads + h) * seqlen_k;
  }
  return side;
}

// A dense mask, read row by row inside the band.
class MaskReader {
 public:
  MaskReader(const Tensor& mask, int64_t heads)
      : data_(static_cast<const char*>(mask.const_data_ptr())),
        size_(static_cast<int64_t>(mask.element_size())),
        heads_(heads),
        mask_heads_(mask.size(1)) {
    check_keeps(mask);
    for (int64_t dim = 0; dim < 4; ++dim) strides_[dim] = mask.size(dim) == 1 && dim < 3 ? 0 : mask.stride(dim) * size_;
  }

  bool same_rows() const { return strides_[2] == 0; }
  void read(int64_t batch, int64_t head, int64_t row, int64_t first_key, int64_t keys, uint32_t* words) const {
    const char* at = data_ + batch * strides_[0] + broadcast_head(head, heads_, mask_heads_) * strides_[1] +
                     row * strides_[2] + first_key * strides_[3];
    bit_math().nonzero(at, strides_[3], size_, keys, words);
  }

 private:
  const char* data_;
  int64_t size_, heads_, mask_heads_;
  int64_t strides_[4];
};

// AND the band and the segments of query `row` into words that begin at `first_key` and hold `keys` bits.
void restrict_row(const Side& side, int64_t row, int64_t first_key, int64_t keys, std::vector<uint32_t>& equal,
                  int64_t& equal_id, uint32_t* words) {
  const int64_t first = row + side.band.lo - first_key, last = row + side.band.hi + 1 - first_key;
  if (first > 0 || last < keys) {
    uint32_t inside[kTileWords];
    for (int64_t base = 0; base < keys; base += kTile) {
      if (first <= base && last >= base + kTile) continue;
      range_bits(first - base, last - base, inside);
      for (int64_t w = 0; w < kTileWords; ++w) words[(base >> 5) + w] &= inside[w];
    }
  }
  if (!side.has_segments()) return;
  const int64_t id = side.own_ids ? side.own_ids[row] : 0;
  if (equal.empty() || equal_id != id) {
    equal.assign(static_cast<size_t>(ceil_div(keys, 32)), id == 0 && !side.other_ids ? ~0u : 0u);
    if (side.other_ids) bit_math().equal(side.other_ids + first_key, keys, id, equal.data());
    equal_id = id;
  }
  for (size_t w = 0; w < equal.size(); ++w) words[w] &= equal[w];
}

// AND intervals into the bits of a tile.
void restrict_tile(const Side& side, int64_t tile, int64_t other, uint32_t* words, int64_t row_words) {
  uint32_t by_key[kTile * kTileWords], by_query[kTile * kTileWords];
  side.intervals->key_rows(other, tile, side.band, by_key);
  bit_math().transpose(by_key, kTileWords, by_query, kTileWords);
  for (int64_t r = 0; r < kTile; ++r)
    for (int64_t w = 0; w < kTileWords; ++w) words[r * row_words + w] &= by_query[r * kTileWords + w];
}

// Bits of the query tile `tile` inside its band, its classes, and the transposed bits of its partial tiles.
void pack_tile_row(const MaskReader& mask, const Side& side, int64_t batch, int64_t head, int64_t tile, Grid& grid,
                   uint32_t* row_bits, uint32_t* col_bits) {
  const auto [first_tile, last_tile] = side.band_tiles(tile);
  if (first_tile == last_tile) return;
  const int64_t row_words = grid.k_tiles * kTileWords, col_words = grid.q_tiles * kTileWords;
  const int64_t first_key = first_tile * kTile, keys = std::min(side.other_length, last_tile * kTile) - first_key;
  const auto bytes = static_cast<size_t>((last_tile - first_tile) * kTileWords) * sizeof(uint32_t);
  const int64_t valid = std::min(kTile, side.own_length - tile * kTile);
  std::vector<uint32_t> equal, shared(mask.same_rows() ? bytes / sizeof(uint32_t) : 0);
  int64_t equal_id = 0;
  if (mask.same_rows()) mask.read(batch, head, 0, first_key, keys, shared.data());
  for (int64_t r = 0; r < kTile; ++r) {
    uint32_t* words = row_bits + (tile * kTile + r) * row_words + first_tile * kTileWords;
    std::memset(words, 0, bytes);
    if (r >= valid) continue;
    if (mask.same_rows())
      std::memcpy(words, shared.data(), bytes);
    else
      mask.read(batch, head, tile * kTile + r, first_key, keys, words);
    restrict_row(side, tile * kTile + r, first_key, keys, equal, equal_id, words);
  }
  for (int64_t other = first_tile; other < last_tile; ++other) {
    uint32_t* words = row_bits + tile * kTile * row_words + other * kTileWords;
    if (side.intervals) restrict_tile(side, tile, other, words, row_words);
    const bool whole = valid == kTile && (other + 1) * kTile <= side.other_length;
    const TileClass kind = classify(words, row_words, whole);
    grid.at(tile, other) = kind;
    if (kind != TileClass::partial) continue;
    bit_math().transpose(words, row_words, col_bits + other * kTile * col_words + tile * kTileWords, col_words);
  }
}

// The class of a tile of segments: from the ids' ranges where they decide it, else from its bits.
TileClass segment_class(const Side& side, int64_t tile, int64_t other, uint32_t* scratch) {
  const bool inside = side.inside_band(tile, other);
  const auto range = [](const int64_t* ids, int64_t length, int64_t index) {
    if (!ids) return std::pair<int64_t, int64_t>{0, 0};
    const auto ends = std::minmax_element(ids + index * kTile, ids + std::min(length, (index + 1) * kTile));
    return std::pair<int64_t, int64_t>{*ends.first, *ends.second};
  };
  const auto own = range(side.own_ids, side.own_length, tile);
  const auto others = range(side.other_ids, side.other_length, other);
  if (own.second < others.first || others.second < own.first) return TileClass::empty;
  const bool uniform = own.first == own.second && others == own;
  if (uniform && inside) return TileClass::full;
  return side.build_bits(tile, other, scratch) ? TileClass::partial : TileClass::empty;
}

}  // namespace

void check_keeps(const Tensor& mask) {
  const ScalarType dtype = mask.scalar_type();
  DMATTN_CHECK_TYPE(dtype == kBool || is_integral(dtype),
                    "mask must have dtype bool (True keeps) or an integer dtype (non-zero keeps), got ", dtype);
}

namespace {

// The same for both operators that write bits; intervals [B or 1, heads of theirs] stand beside the mask, or not.
void pack(const Tensor& mask, const MaybeTensor& q_segments, const MaybeTensor& k_segments, int64_t seqlen_q,
          const Band& band, const Tensor& row_tiles, const Tensor& col_tiles, const Tensor& row_bits,
          const Tensor& col_bits, const std::vector<Intervals>& intervals = {}, int64_t interval_heads = 1) {
  const int64_t batch = row_tiles.size(0), heads = row_tiles.size(1), seqlen_k = mask.size(3);
  const int64_t q_tiles = ceil_div(seqlen_q, kTile), k_tiles = ceil_div(seqlen_k, kTile);
  const MaybeTensor q_ids = contiguous_or_none(q_segments, kLong), k_ids = contiguous_or_none(k_segments, kLong);
  const MaskReader reader(mask, heads);
  std::vector<Grid> grids(static_cast<size_t>(batch * heads), Grid(q_tiles, k_tiles));
  const int64_t bits_per_head = q_tiles * k_tiles * kTile * kTileWords;
  auto* rows = reinterpret_cast<uint32_t*>(row_bits.mutable_data_ptr<int32_t>());
  auto* cols = reinterpret_cast<uint32_t*>(col_bits.mutable_data_ptr<int32_t>());
  const bool shared = static_cast<int64_t>(intervals.size()) == interval_heads;
  for_each_item(batch * heads * q_tiles, [&] {
    return [&](int64_t item) {
      const int64_t part = item / q_tiles, b = part / heads, h = part % heads;
      Side side = segment_side(q_ids, k_ids, b, h, heads, seqlen_q, seqlen_k, band);
      if (!intervals.empty())
        side.intervals = &intervals[(shared ? 0 : b * interval_heads) + broadcast_head(h, heads, interval_heads)];
      pack_tile_row(reader, side, b, h, item % q_tiles, grids[part], rows + part * bits_per_head,
                    cols + part * bits_per_head);
    };
  });
  write_lists(grids, row_tiles, col_tiles);
}

}  // namespace

void pack_mask(const Tensor& mask, const MaybeTensor& q_segments, const MaybeTensor& k_segments, int64_t seqlen_q,
               int64_t band_lo, int64_t band_hi, const Tensor& row_tiles, const Tensor& col_tiles,
               const Tensor& row_bits, const Tensor& col_bits) {
  check_mask_arguments(&mask, q_segments, k_segments, seqlen_q, {row_tiles, col_tiles, &row_bits, &col_bits});
  pack(mask, q_segments, k_segments, seqlen_q, Band::from(band_lo, band_hi), row_tiles, col_tiles, row_bits, col_bits);
}

void pack_intervals(const IntervalTensors& given, const MaybeTensor& mask, const MaybeTensor& q_segments,
                    const MaybeTensor& k_segments, int64_t seqlen_q, int64_t band_lo, int64_t band_hi,
                    const Tensor& row_tiles, const Tensor& col_tiles, const Tensor& row_bits, const Tensor& col_bits) {
  const int64_t batch = row_tiles.size(0), heads = row_tiles.size(1);
  check_intervals(given, batch, heads);
  const int64_t of_batch = given.end.size(0), of_heads = given.end.size(1), keys = given.end.size(2);
  Tensor shown = mask.has_value() ? *mask : torch::stable::new_empty(given.end, std::vector<int64_t>{1, 1, 1, keys}, kBool);
  if (!mask.has_value()) fill(shown, 1);
  DMATTN_CHECK_VALUE(shown.dim() == 4 && shown.size(3) == keys, "intervals must have the keys of the mask, got ", keys);
  check_mask_arguments(&shown, q_segments, k_segments, seqlen_q, {row_tiles, col_tiles, &row_bits, &col_bits});
  const Tensor ends = contiguous_as(given.end, kInt);
  const MaybeTensor starts = contiguous_or_none(given.start, kInt);
  const MaybeTensor from = contiguous_or_none(given.hidden_from, kInt), to = contiguous_or_none(given.hidden_to, kInt);
  const std::vector<int32_t> zeros(static_cast<size_t>(keys));
  std::vector<Intervals> intervals;
  for (int64_t index = 0; index < of_batch * of_heads; ++index) {
    const auto part = [&](const MaybeTensor& tensor) -> const int32_t* {
      return tensor.has_value() ? tensor->const_data_ptr<int32_t>() + index * keys : nullptr;
    };
    intervals.emplace_back(starts.has_value() ? part(starts) : zeros.data(), part(ends), part(from), part(to), keys,
                           seqlen_q);
  }
  pack(shown, q_segments, k_segments, seqlen_q, Band::from(band_lo, band_hi), row_tiles, col_tiles, row_bits, col_bits,
       intervals, of_heads);
}

void list_tiles(const MaybeTensor& q_segments, const Tensor& k_segments, int64_t seqlen_q, int64_t band_lo,
                int64_t band_hi, const Tensor& row_tiles, const Tensor& col_tiles) {
  check_mask_arguments(nullptr, q_segments, k_segments, seqlen_q, {row_tiles, col_tiles});
  const int64_t batch = row_tiles.size(0), heads = row_tiles.size(1), seqlen_k = k_segments.size(-1);
  const int64_t q_tiles = ceil_div(seqlen_q, kTile), k_tiles = ceil_div(seqlen_k, kTile);
  const MaybeTensor q_ids = contiguous_or_none(q_segments, kLong), k_ids = contiguous_or_none(k_segments, kLong);
  const Band band = Band::from(band_lo, band_hi);
  std::vector<Grid> grids(static_cast<size_t>(batch * heads), Grid(q_tiles, k_tiles));
  for_each_item(batch * heads * q_tiles, [&] {
    return [&, scratch = std::make_unique<Buffer<uint32_t>>(kTile * kTileWords)](int64_t item) {
      const int64_t part = item / q_tiles, tile = item % q_tiles;
      const Side side = segment_side(q_ids, k_ids, part / heads, part % heads, heads, seqlen_q, seqlen_k, band);
      const auto [first, last] = side.band_tiles(tile);
      for (int64_t other = first; other < last; ++other)
        grids[part].at(tile, other) = segment_class(side, tile, other, scratch->data());
    };
  });
  write_lists(grids, row_tiles, col_tiles);
}

}  // namespace dmattn

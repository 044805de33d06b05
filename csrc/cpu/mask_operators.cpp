// Operators that make masks, or say what is in one: those of operators.cpp compute attention.
#include <algorithm>
#include <sstream>
#include <unordered_set>

#include "check.h"
#include "kernels.h"
#include "operators.h"
#include "selection.h"

namespace dmattn {
namespace {

constexpr int64_t kHeader = 4;  // words of a record before its indices

int64_t tile_records(int64_t length) { return std::max<int64_t>(2, ceil_div(length, kTile)); }

// The most tiles of the other side that one tile can see inside the band (meta.list_capacity).
int64_t list_capacity(int64_t tiles, int64_t band_lo, int64_t band_hi) {
  if (-band_lo >= kUnbounded || band_hi >= kUnbounded) return tiles;
  const int64_t span = band_hi - band_lo + kTile;
  return std::max<int64_t>(0, std::min(tiles, ceil_div(span, kTile) + 1));
}

struct MaskResults {
  Tensor row_tiles, col_tiles, row_bits, col_bits;

  MaskResults(const Tensor& on, int64_t batch, int64_t heads, int64_t seqlen_q, int64_t seqlen_k, int64_t band_lo,
              int64_t band_hi, bool with_bits) {
    DMATTN_CHECK_VALUE(seqlen_q >= 0 && seqlen_q < kUnbounded, "seqlen_q must be between 0 and ", kUnbounded - 1,
                       ", got ", seqlen_q);
    band_lo = std::clamp(band_lo, -kUnbounded, kUnbounded);
    band_hi = std::clamp(band_hi, -kUnbounded, kUnbounded);
    const int64_t q = tile_records(seqlen_q), k = tile_records(seqlen_k);
    row_tiles = allocate(on, {batch, heads, q, kHeader + list_capacity(k, band_lo, band_hi)}, kInt);
    col_tiles = allocate(on, {batch, heads, k, kHeader + list_capacity(q, band_lo, band_hi)}, kInt);
    if (!with_bits) return;
    const int64_t q_tiles = ceil_div(seqlen_q, kTile), k_tiles = ceil_div(seqlen_k, kTile);
    row_bits = allocate(on, {batch, heads, q_tiles * kTile, k_tiles * kTileWords}, kInt);
    col_bits = allocate(on, {batch, heads, k_tiles * kTile, q_tiles * kTileWords}, kInt);
  }
};

// The greater of the sizes of some tensors; which other sizes there may be is checked later.
int64_t widest(std::initializer_list<const MaybeTensor*> tensors, int64_t dim) {
  int64_t most = 0;
  bool one = false;
  for (const MaybeTensor* tensor : tensors) {
    if (!tensor->has_value()) continue;
    DMATTN_CHECK_VALUE((*tensor)->dim() > dim, "a part of a mask has too few dimensions: ", (*tensor)->dim());
    one = one || (*tensor)->size(dim) == 1;
    if ((*tensor)->size(dim) != 1) most = std::max(most, (*tensor)->size(dim));
  }
  return most == 0 && one ? 1 : most;
}

// Rows of ids [B, S].
struct Ids {
  Tensor held;
  int64_t batch, length;

  Ids(const char* name, const Tensor& ids) : batch(0), length(0) {
    check_memory(name, ids);
    DMATTN_CHECK_VALUE(ids.dim() == 2, name, " must have shape [B, S], got ", ids.sizes());
    DMATTN_CHECK_TYPE(is_integral(ids.scalar_type()), name, " must hold integers, got ", ids.scalar_type());
    held = contiguous_as(ids, kLong);
    batch = ids.size(0);
    length = ids.size(1);
  }
  const int64_t* row(int64_t b) const { return held.const_data_ptr<int64_t>() + b * length; }
};

std::string mask_text(int64_t seqlen_q, int64_t seqlen_k, const std::vector<int64_t>& sizes) {
  std::ostringstream text;
  text << "lengths (" << seqlen_q << ", " << seqlen_k << "), band_lo " << sizes[0] / 2 - kUnbounded << ", band_hi "
       << sizes[2] - kUnbounded << ", at_most ";
  sizes[3] ? text << sizes[3] - 1 : text << "None";
  text << ", from_bottom_right " << (sizes[0] % 2 ? "True" : "False");
  return text.str();
}

}  // namespace

void pack_mask_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  const MaybeTensor mask = taken.tensor(), q_segments = taken.maybe_tensor(), k_segments = taken.maybe_tensor();
  const int64_t seqlen_q = taken.integer(), band_lo = taken.integer(), band_hi = taken.integer();
  check_memory("mask", *mask);
  const int64_t batch = widest({&mask, &q_segments, &k_segments}, 0), heads = widest({&mask, &k_segments}, 1);
  const MaskResults made(*mask, batch, heads, seqlen_q, mask->size(-1), band_lo, band_hi, true);
  pack_mask(*mask, q_segments, k_segments, seqlen_q, band_lo, band_hi, made.row_tiles, made.col_tiles, made.row_bits,
            made.col_bits);
  give(stack, made.row_tiles, made.col_tiles, made.row_bits, made.col_bits);
}

void pack_intervals_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  const Tensor end = taken.tensor();
  const MaybeTensor start = taken.maybe_tensor(), hidden_from = taken.maybe_tensor();
  const MaybeTensor hidden_to = taken.maybe_tensor(), mask = taken.maybe_tensor();
  const MaybeTensor q_segments = taken.maybe_tensor(), k_segments = taken.maybe_tensor();
  const int64_t seqlen_q = taken.integer(), band_lo = taken.integer(), band_hi = taken.integer();
  check_memory("end", end);
  const MaybeTensor ends = end;
  const int64_t batch = widest({&ends, &mask, &q_segments, &k_segments}, 0);
  const int64_t heads = widest({&ends, &mask, &k_segments}, 1);
  const MaskResults made(end, batch, heads, seqlen_q, end.size(-1), band_lo, band_hi, true);
  pack_intervals({end, start, hidden_from, hidden_to}, mask, q_segments, k_segments, seqlen_q, band_lo, band_hi,
                 made.row_tiles, made.col_tiles, made.row_bits, made.col_bits);
  give(stack, made.row_tiles, made.col_tiles, made.row_bits, made.col_bits);
}

void list_tiles_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  const MaybeTensor q_segments = taken.maybe_tensor(), k_segments = taken.tensor();
  const int64_t seqlen_q = taken.integer(), band_lo = taken.integer(), band_hi = taken.integer();
  check_memory("k_segments", *k_segments);
  const int64_t batch = widest({&q_segments, &k_segments}, 0), heads = widest({&k_segments}, 1);
  const MaskResults made(*k_segments, batch, heads, seqlen_q, k_segments->size(-1), band_lo, band_hi, false);
  list_tiles(q_segments, *k_segments, seqlen_q, band_lo, band_hi, made.row_tiles, made.col_tiles);
  give(stack, made.row_tiles, made.col_tiles);
}

void key_lifetimes_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  const MaybeTensor scores = taken.tensor(), documents = taken.maybe_tensor();
  const int64_t keep = taken.integer(), keep_first = taken.integer(), keep_last = taken.integer();
  const bool is_causal = taken.flag();
  check_memory("scores", *scores);
  DMATTN_CHECK_VALUE(scores->dim() == 3, "scores must have shape [B, heads, S], got ", scores->sizes());
  if (documents.has_value()) {
    const Ids ids("documents", *documents);
    for (int64_t b = 0; b < ids.batch; ++b) {
      std::unordered_set<int64_t> before;
      for (int64_t j = 0; j < ids.length; ++j) {
        const int64_t id = ids.row(b)[j];
        if (j > 0 && id == ids.row(b)[j - 1]) continue;
        DMATTN_CHECK_VALUE(before.insert(id).second, "documents must be contiguous runs of equal ids, got id ", id,
                           ", which returns at position ", j, " of row ", b, " after another one");
      }
    }
  }
  const int64_t batch = widest({&scores, &documents}, 0);
  const Tensor start = allocate(*scores, {batch, scores->size(1), scores->size(2)}, kInt), end = allocate_like(start);
  lifetimes(*scores, documents, keep, keep_first, keep_last, is_causal, start, end);
  give(stack, start, end);
}

void rank_ids_operator(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor given = Taken(stack).tensor();
  const Ids ids("ids", given);
  const Tensor ranks = allocate(given, {ids.batch, ids.length}, kInt);
  std::vector<int64_t> ordered;
  for (int64_t b = 0; b < ids.batch; ++b) {
    const int64_t* const row = ids.row(b);
    ordered.assign(row, row + ids.length);
    std::sort(ordered.begin(), ordered.end());
    ordered.erase(std::unique(ordered.begin(), ordered.end()), ordered.end());
    int32_t* const written = ranks.mutable_data_ptr<int32_t>() + b * ids.length;
    for (int64_t j = 0; j < ids.length; ++j)
      written[j] = static_cast<int32_t>(std::lower_bound(ordered.begin(), ordered.end(), row[j]) - ordered.begin());
  }
  give(stack, ranks);
}

void spread_lists_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  const Tensor counts = taken.tensor(), indices = taken.tensor();
  const int64_t columns = taken.integer();
  for (const auto& [name, tensor] : {std::pair{"counts", &counts}, {"indices", &indices}}) {
    check_memory(name, *tensor);
    DMATTN_CHECK_TYPE(tensor->scalar_type() == kInt, name, " must be int32, got ", tensor->scalar_type());
  }
  DMATTN_CHECK_VALUE(indices.dim() >= 1 && columns >= 0, "indices must have slots, and columns not be negative");
  std::vector<int64_t> sizes(indices.sizes().begin(), indices.sizes().end());
  const int64_t slots = sizes.back();
  sizes.pop_back();
  DMATTN_CHECK_VALUE(same_sizes(counts.sizes(), sizes), "counts must have shape ", Extents(sizes), ", got ",
                     counts.sizes());
  sizes.push_back(columns);
  const Tensor listed = allocate(indices, sizes, kBool);
  fill(listed, 0);
  const Tensor lists = contiguous_as(indices, kInt), lengths = contiguous_as(counts, kInt);
  const int32_t *const index = lists.const_data_ptr<int32_t>(), *const length = lengths.const_data_ptr<int32_t>();
  bool* const written = listed.mutable_data_ptr<bool>();
  for (int64_t list = 0; list < lengths.numel(); ++list)
    for (int64_t slot = 0; slot < std::min<int64_t>(slots, length[list]); ++slot) {
      const int64_t column = index[list * slots + slot];
      DMATTN_CHECK_VALUE(column >= 0 && column <= columns, "indices must be between 0 and ", columns, ", got ", column);
      if (column < columns) written[list * columns + column] = true;
    }
  give(stack, listed);
}

// A copy of a tensor of a mask whose lengths and numbers are those that a program was exported with: the latter are the
// sizes of a tensor (dmattn_ops/masks/taken_apart.py).
void mask_as_exported_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  const Tensor part = taken.tensor(), lengths = taken.tensor(), numbers = taken.tensor();
  const int64_t seqlen_q = taken.integer(), seqlen_k = taken.integer();
  const int64_t band_lo = taken.integer(), band_hi = taken.integer();
  const std::optional<int64_t> at_most = taken.maybe_integer();
  const bool from_bottom_right = taken.flag();
  const auto size_of = [](int64_t limit) { return std::max<int64_t>(0, kUnbounded + std::min(kUnbounded, limit)); };
  const std::vector<int64_t> expected{2 * size_of(band_lo) + from_bottom_right, 0, size_of(band_hi),
                                      at_most.has_value() ? 1 + std::min(kUnbounded, *at_most) : 0};
  const std::vector<int64_t> given(numbers.sizes().begin(), numbers.sizes().end());
  DMATTN_CHECK_VALUE(given.size() == 4 && lengths.dim() >= 2, "a mask must bring its lengths and numbers");
  DMATTN_CHECK_VALUE(given == expected && lengths.size(0) == seqlen_q && lengths.size(1) == seqlen_k,
                     "the program was exported with a mask of ", mask_text(seqlen_q, seqlen_k, expected),
                     ", got one of ", mask_text(lengths.size(0), lengths.size(1), given),
                     ": export it again with this one");
  give(stack, torch::stable::clone(part));
}

// Masks of chosen blocks and the masses of attention are refused.
void pack_selection_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  taken.tensor();
  for (int k = 0; k < 2; ++k) taken.maybe_tensor();
  refuse_operator("pack_selection");
}

void selection_mass_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  for (int k = 0; k < 3; ++k) taken.tensor();
  for (int k = 0; k < 4; ++k) taken.maybe_tensor();
  for (int k = 0; k < 3; ++k) taken.integer();
  taken.maybe_number();
  refuse_operator("selection_mass");
}

void key_mass_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  for (int k = 0; k < 2; ++k) taken.tensor();
  for (int k = 0; k < 12; ++k) taken.maybe_tensor();  // bias, the tensors of a mask, lse
  for (int k = 0; k < 2; ++k) taken.integer();
  taken.maybe_integer();
  taken.maybe_number();
  refuse_operator("key_mass");
}

}  // namespace dmattn

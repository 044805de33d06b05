#include "backward_workspace.h"

#include <ATen/Functions.h>

#include <map>

namespace dmattn {
namespace {

constexpr int64_t kPartialBytes = int64_t{256} << 20;  // of all partial dq of a wave
// Items per wave at least, where there are enough key tiles: results are the same for every number of threads up to
// half of it.
constexpr int64_t kItems = 16;

// Elements of a query slot without dq.
int64_t slot_size(const Problem& problem) {
  return (2 * (padded_width(problem.dim) + padded_width(problem.value_dim)) + 3) * kTile;
}

std::vector<std::vector<int64_t>> make_groups(const Wave& wave, bool per_batch, bool per_kv_head) {
  std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> groups;
  for (size_t index = 0; index < wave.pairs.size(); ++index) {
    const Pair& pair = wave.pairs[index];
    groups[{per_batch ? pair.batch : 0, per_kv_head ? pair.kv_head : 0}].push_back(static_cast<int64_t>(index));
  }
  std::vector<std::vector<int64_t>> result;
  for (auto& [key, members] : groups) result.push_back(std::move(members));
  return result;
}

// Each chunk beyond the first costs a partial dq, so that there are no more than keep the threads busy and the memory
// allows.
int64_t make_chunks(const Wave& wave, int64_t groups, int64_t dq_bytes) {
  int64_t items = kItems;
  while (items < 2 * at::get_num_threads()) items *= 2;
  int64_t most = 1;
  for (const Pair& pair : wave.pairs) most = std::max(most, pair.k_tiles);
  const int64_t affordable = std::max<int64_t>(1, kPartialBytes / std::max<int64_t>(1, dq_bytes));
  return std::clamp<int64_t>(ceil_div(items, std::max<int64_t>(1, groups)), 1, std::min(most, affordable));
}

}  // namespace

template <typename T>
BackwardCall<T>::BackwardCall(const Problem& problem, const Gradients& gradients, at::Tensor& sums)
    : problem(problem),
      grad_out(rows_of(gradients.grad_out)),
      out(rows_of(gradients.out)),
      dq(rows_of(gradients.dq)),
      dk(rows_of(gradients.dk)),
      dv(rows_of(gradients.dv)),
      lse(per_query_of<T>(gradients.lse)),
      lse_tail(per_query_of<T>(gradients.lse_tail)) {
  constexpr at::ScalarType compute = c10::CppTypeToScalarType<T>::value;
  if (gradients.grad_lse.has_value()) {
    TORCH_CHECK_TYPE(gradients.grad_lse->scalar_type() == compute, "grad_lse must have the dtype of lse");
    grad_lse = per_query_of<T>(*gradients.grad_lse);
  }
  if (!gradients.dbias.has_value() || !problem.bias) return;
  const at::Tensor& target = *gradients.dbias;
  const bool direct = target.scalar_type() == compute && target.is_contiguous();
  sums = direct ? target.zero_() : at::zeros(target.sizes(), target.options().dtype(compute));
  const bool packed = sums.dim() == 2;
  const auto stride = [&](int64_t dim) { return sums.size(dim) == 1 ? 0 : sums.stride(dim); };
  dbias.data = sums.data_ptr<T>();
  dbias.heads = sums.size(packed ? 0 : 1);
  dbias.head_stride = stride(packed ? 0 : 1);
  dbias.batch_stride = packed ? 0 : stride(0);
  dbias.row_stride = packed ? 0 : stride(2);
  dbias.per_batch = packed || sums.size(0) != 1;
  dbias.per_kv_head = dbias.heads != 1;
}

template <typename T>
std::vector<Wave> BackwardWave<T>::cut(const BackwardCall<T>& call) {
  const int64_t elements = slot_size(call.problem) + padded_width(call.problem.dim) * kTile;
  return make_waves(call.problem, elements * int64_t{sizeof(T)}, 0);
}

template <typename T>
BackwardWave<T>::BackwardWave(const BackwardCall<T>& call, const Wave& wave)
    : wave(wave),
      width(padded_width(call.problem.dim)),
      value_width(padded_width(call.problem.value_dim)),
      groups(make_groups(wave, call.dbias.per_batch, call.dbias.per_kv_head)),
      chunks(make_chunks(wave, static_cast<int64_t>(groups.size()),
                         static_cast<int64_t>(wave.query_tiles.size()) * kTile * width * int64_t{sizeof(T)})),
      query_slots_(static_cast<int64_t>(wave.query_tiles.size())),
      slot_size_(slot_size(call.problem)),
      storage_(query_slots_ * (slot_size_ + chunks * kTile * width)),
      touched_(static_cast<size_t>(chunks * query_slots_)) {}

template <typename T>
void BackwardWave<T>::fill(const BackwardCall<T>& call) const {
  for_each_item(query_slots_, [&] {
    return [&, out_tile = std::make_unique<Buffer<T>>(2 * kTile * value_width)](int64_t item) {
      fill_slot(call, wave.query_tiles[item], out_tile->data());
    };
  });
}

template <typename T>
void BackwardWave<T>::fill_slot(const BackwardCall<T>& call, const QueryTile& tile, T* out_tile) const {
  const Pair& pair = wave.pairs[tile.pair];
  const Sequence& sequence = call.problem.sequence(pair.batch);
  const int64_t offset = tile.tile * kTile, valid = std::min(kTile, sequence.q_length - offset);
  const int64_t first = sequence.q_start + offset;
  const int64_t head = pair.kv_head * call.problem.group + tile.head_in_group;
  const int64_t slot = pair.query_slot(tile.head_in_group, tile.tile);
  pack_rows<T>(call.problem.query, pair.batch, first, valid, head, query_rows(slot));
  pack_rows<T>(call.grad_out, pair.batch, first, valid, head, grad_rows(slot));
  T *lse_at = lse(slot), *tail_at = lse_tail(slot), *delta_at = delta(slot);
  std::fill(lse_at, lse_at + kTile, std::numeric_limits<T>::infinity());
  std::fill(tail_at, tail_at + kTile, T(0));
  for (int64_t r = 0; r < valid; ++r) {
    const T lse = call.lse.at(pair.batch, head, first + r);
    if (lse != -std::numeric_limits<T>::infinity()) {
      lse_at[r] = lse;
      tail_at[r] = call.lse_tail.at(pair.batch, head, first + r);
      continue;
    }
    // An empty row gives nothing to anybody, not even 0 * NaN.
    std::fill(query_rows(slot) + r * width, query_rows(slot) + (r + 1) * width, T(0));
    std::fill(grad_rows(slot) + r * value_width, grad_rows(slot) + (r + 1) * value_width, T(0));
  }
  pack_columns<T>(query_rows(slot), valid, width, query_columns(slot));
  pack_columns<T>(grad_rows(slot), valid, value_width, grad_columns(slot));
  pack_rows<T>(call.out, pair.batch, first, valid, head, out_tile);
  pack_columns<T>(out_tile, valid, value_width, out_tile + kTile * value_width);
  tile_math<T>().column_dots(grad_columns(slot), out_tile + kTile * value_width, value_width, padded_extent(valid),
                             delta_at);
  for (int64_t r = 0; r < valid; ++r)
    if (call.grad_lse.data && lse_at[r] != std::numeric_limits<T>::infinity())
      delta_at[r] -= call.grad_lse.at(pair.batch, head, first + r);
}

template <typename T>
void BackwardWave<T>::write_dq(const BackwardCall<T>& call) const {
  for_each_item(query_slots_, [&] {
    return [&](int64_t item) {
      const TileMath<T>& math = tile_math<T>();
      const QueryTile& tile = wave.query_tiles[item];
      const Pair& pair = wave.pairs[tile.pair];
      const Sequence& sequence = call.problem.sequence(pair.batch);
      const int64_t valid = std::min(kTile, sequence.q_length - tile.tile * kTile);
      const int64_t first = sequence.q_start + tile.tile * kTile;
      const int64_t head = pair.kv_head * call.problem.group + tile.head_in_group;
      T* sum = nullptr;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        if (!touched(chunk, item)) continue;
        if (sum)
          math.add(sum, dq(chunk, item), valid * width);
        else
          sum = dq(chunk, item);
      }
      for (int64_t r = 0; r < valid; ++r) {
        char* target = call.dq.at(pair.batch, first + r, head);
        if (sum)
          math.store(sum + r * width, in_range<T>(call.problem.scale), call.problem.dim, target, call.dq.element);
        else
          std::memset(target, 0, static_cast<size_t>(call.problem.dim * element_size(call.dq.element)));
      }
    };
  });
}

template struct BackwardCall<float>;
template struct BackwardCall<double>;
template class BackwardWave<float>;
template class BackwardWave<double>;

}  // namespace dmattn

#include "backward_workspace.h"


#include <map>

namespace dmattn {
namespace {

constexpr int64_t kPartialBytes = int64_t{256} << 20;  // of all partial dq of a wave
// Items per wave at least, where there are enough key tiles: results are the same for every number of threads up to
// half of it.
constexpr int64_t kItems = 16;

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
  while (items < 2 * thread_count()) items *= 2;
  int64_t most = 1;
  for (const Pair& pair : wave.pairs) most = std::max(most, pair.k_tiles);
  const int64_t affordable = std::max<int64_t>(1, kPartialBytes / std::max<int64_t>(1, dq_bytes));
  return std::clamp<int64_t>(ceil_div(items, std::max<int64_t>(1, groups)), 1, std::min(most, affordable));
}

}  // namespace

template <typename T>
BackwardCall<T>::BackwardCall(const Problem& problem, const Gradients& gradients, MaybeTensor& kept)
    : problem(problem),
      grad_out(rows_of(gradients.grad_out)),
      out(rows_of(gradients.out)),
      dq(rows_of(gradients.dq)),
      dk(rows_of(gradients.dk)),
      dv(rows_of(gradients.dv)),
      lse(per_query_of<T>(gradients.lse)),
      lse_tail(per_query_of<T>(gradients.lse_tail)) {
  if (gradients.grad_lse.has_value()) grad_lse = per_query_of<T>(*gradients.grad_lse);
  if (!gradients.dbias.has_value() || !problem.bias) return;
  const Tensor& target = *gradients.dbias;
  direct_bias = target.scalar_type() == kTypeOf<T> && target.is_contiguous();
  const Tensor sums = direct_bias ? target : torch::stable::new_empty(target, target.sizes(), kTypeOf<T>);
  fill(sums, 0);
  kept = sums;
  const bool packed = sums.dim() == 2;
  const auto stride = [&](int64_t dim) { return sums.size(dim) == 1 ? 0 : sums.stride(dim); };
  dbias.data = sums.mutable_data_ptr<T>();
  dbias.heads = sums.size(packed ? 0 : 1);
  dbias.head_stride = stride(packed ? 0 : 1);
  dbias.batch_stride = packed ? 0 : stride(0);
  dbias.row_stride = packed ? 0 : stride(2);
  dbias.per_batch = packed || sums.size(0) != 1;
  dbias.per_kv_head = dbias.heads != 1;
}

template <typename T>
std::vector<Wave> BackwardWave<T>::cut(const BackwardCall<T>& call) {
  const int64_t width = padded_width(call.problem.dim), value_width = padded_width(call.problem.value_dim);
  const int64_t elements = QueryPanel<T>::size(width, value_width) + width * kTile;
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
      slot_size_(QueryPanel<T>::size(width, value_width)),
      storage_(query_slots_ * (slot_size_ + chunks * kTile * width)),
      touched_(static_cast<size_t>(chunks * query_slots_)),
      finite_(static_cast<size_t>(query_slots_)) {}

template <typename T>
bool QueryPanel<T>::fill(const BackwardCall<T>& call, int64_t batch, int64_t head, int64_t tile, T* scratch) const {
  constexpr T infinity = std::numeric_limits<T>::infinity();
  const Sequence& sequence = call.problem.sequence(batch);
  const int64_t offset = tile * kTile, valid = std::min(kTile, sequence.q_length - offset);
  const int64_t first = sequence.q_start + offset;
  const int64_t width = padded_width(call.problem.dim), value_width = padded_width(call.problem.value_dim);
  pack_rows<T>(call.problem.query, batch, first, valid, head, rows);
  pack_rows<T>(call.grad_out, batch, first, valid, head, grad_rows);
  std::fill(lse, lse + kTile, infinity);
  std::fill(lse_tail, lse_tail + kTile, T(0));
  for (int64_t r = 0; r < valid; ++r) {
    const T whole = call.lse.at(batch, head, first + r);
    if (whole != -infinity) {
      lse[r] = whole;
      lse_tail[r] = call.lse_tail.at(batch, head, first + r);
      continue;
    }
    // An empty row gives nothing to anybody, not even 0 * NaN.
    std::fill(rows + r * width, rows + (r + 1) * width, T(0));
    std::fill(grad_rows + r * value_width, grad_rows + (r + 1) * value_width, T(0));
  }
  pack_columns<T>(rows, valid, width, columns);
  pack_columns<T>(grad_rows, valid, value_width, grad_columns);
  pack_rows<T>(call.out, batch, first, valid, head, scratch);
  pack_columns<T>(scratch, valid, value_width, scratch + kTile * value_width);
  tile_math<T>().column_dots(grad_columns, scratch + kTile * value_width, value_width, padded_extent(valid), delta);
  for (int64_t r = 0; r < valid; ++r)
    if (call.grad_lse.data && lse[r] != infinity) delta[r] -= call.grad_lse.at(batch, head, first + r);
  return rows_are_finite(rows, valid, width) && rows_are_finite(grad_rows, valid, value_width);
}

template <typename T>
void BackwardWave<T>::fill(const BackwardCall<T>& call) const {
  for_each_item(query_slots_, [&] {
    return [&, scratch = std::make_unique<Buffer<T>>(2 * kTile * value_width)](int64_t item) {
      const QueryTile& tile = wave.query_tiles[item];
      const Pair& pair = wave.pairs[tile.pair];
      const int64_t head = pair.kv_head * call.problem.group + tile.head_in_group;
      const int64_t slot = pair.query_slot(tile.head_in_group, tile.tile);
      finite_[slot] = panel(slot).fill(call, pair.batch, head, tile.tile, scratch->data());
    };
  });
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
      for (int64_t r = 0; r < valid; ++r)
        store_gradient<T>(sum ? sum + r * width : nullptr, in_range<T>(call.problem.scale), call.dq, pair.batch,
                          first + r, head);
    };
  });
}

template struct BackwardCall<float>;
template struct BackwardCall<double>;
template struct QueryPanel<float>;
template struct QueryPanel<double>;
template class BackwardWave<float>;
template class BackwardWave<double>;

}  // namespace dmattn

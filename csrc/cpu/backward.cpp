// Backward: one item owns some key tiles of some pairs: it writes their dk and dv, and its own partial dq; partials are
// added in a fixed order afterwards. No atomics: results do not depend on timing.
#include "backward_workspace.h"
#include "check.h"
#include "differentiate.h"
#include "packed.h"

namespace dmattn {
namespace {

template <typename T>
class BackwardWorker {
 public:
  BackwardWorker(const BackwardCall<T>& call, const BackwardWave<T>& wave)
      : call_(call), problem_(call.problem), wave_(wave), differentiate_(call.problem) {}

  void operator()(int64_t item) {
    const int64_t chunk = item % wave_.chunks;
    for (const int64_t index : wave_.groups[item / wave_.chunks]) {
      const Pair& pair = wave_.wave.pairs[index];
      // Strided, because a causal band gives the first key tiles the most work.
      for (int64_t tile = chunk; tile < pair.k_tiles; tile += wave_.chunks) own_tile(pair, tile, chunk);
    }
  }

 private:
  void own_tile(const Pair& pair, int64_t tile, int64_t chunk) {
    const Sequence& sequence = problem_.sequence(pair.batch);
    const int64_t valid_keys = std::min(kTile, sequence.k_length - tile * kTile);
    has_acc_ = has_keys_ = false;
    for (int64_t g = 0; g < problem_.group; ++g) {
      const int64_t head = pair.kv_head * problem_.group + g;
      const Side side = key_side(problem_, pair.batch, head);
      side.visible_tiles(tile, tiles_);
      for (const TileRef& other : tiles_) {
        Bits visible;
        if (!other.full && !side.tile_bits(tile, other.index, visible_.data(), visible)) continue;
        if (!has_keys_) pack_keys(pair, tile, valid_keys);
        visit(pair, g, other.index, tile, visible, chunk);
      }
    }
    for (int64_t r = 0; r < valid_keys; ++r) {
      const int64_t row = sequence.k_start + tile * kTile + r;
      store_gradient<T>(has_acc_ ? dk_.at(r * wave_.width) : nullptr, in_range<T>(problem_.scale), call_.dk,
                        pair.batch, row, pair.kv_head);
      store_gradient<T>(has_acc_ ? dv_.at(r * wave_.value_width) : nullptr, 1, call_.dv, pair.batch, row,
                        pair.kv_head);
    }
  }

  void pack_keys(const Pair& pair, int64_t tile, int64_t valid_keys) {
    const int64_t first = problem_.sequence(pair.batch).k_start + tile * kTile;
    pack_rows<T>(problem_.key, pair.batch, first, valid_keys, pair.kv_head, key_.data());
    pack_rows<T>(problem_.value, pair.batch, first, valid_keys, pair.kv_head, value_.data());
    has_keys_ = true;
    finite_ = rows_are_finite(key_.data(), valid_keys, wave_.width);
  }

  void visit(const Pair& pair, int64_t head_in_group, int64_t query_tile, int64_t key_tile, const Bits& visible,
             int64_t chunk) {
    const Sequence& sequence = problem_.sequence(pair.batch);
    const int64_t head = pair.kv_head * problem_.group + head_in_group;
    const int64_t slot = pair.query_slot(head_in_group, query_tile);
    uint8_t& touched = wave_.touched(chunk, slot);
    const TilePair<T> tiles{.batch = pair.batch,
                            .head = head,
                            .first_query = query_tile * kTile,
                            .queries = std::min(kTile, sequence.q_length - query_tile * kTile),
                            .keys = std::min(kTile, sequence.k_length - key_tile * kTile),
                            .positions = {.first = key_tile * kTile},
                            .panel = wave_.panel(slot),
                            .key = key_.data(),
                            .value = value_.data(),
                            .dk = dk_.data(),
                            .dv = dv_.data(),
                            .dq = wave_.dq(chunk, slot),
                            .has_keys = has_acc_,
                            .has_dq = touched != 0,
                            .finite_keys = finite_,
                            .finite_queries = wave_.finite(slot) != 0,
                            .bias = bias_of_tile(pair.batch, head, query_tile, sequence.k_start + key_tile * kTile)};
    differentiate_(tiles, visible);
    touched = 1;
    has_acc_ = true;
  }

  TileBias<T> bias_of_tile(int64_t batch, int64_t head, int64_t query_tile, int64_t first_key) const {
    TileBias<T> tile;
    if (const Bias& bias = problem_.bias) {
      const int64_t bias_head = broadcast_head(head, problem_.heads, bias.heads);
      tile.bias = bias.at(batch, bias_head, query_tile * kTile, first_key);
      tile.element = bias.element;
      tile.row_stride = bias.row_stride;
    }
    if (const BiasGradient<T>& dbias = call_.dbias; dbias.data) {
      tile.grad = dbias.at(batch, broadcast_head(head, problem_.heads, dbias.heads), query_tile * kTile, first_key);
      tile.grad_row_stride = dbias.row_stride;
    }
    return tile;
  }

  const BackwardCall<T>& call_;
  const Problem& problem_;
  const BackwardWave<T>& wave_;
  Differentiate<T> differentiate_;
  Buffer<T> key_{kTile * wave_.width}, value_{kTile * wave_.value_width};
  Buffer<T> dk_{kTile * wave_.width}, dv_{kTile * wave_.value_width};
  Buffer<uint32_t> visible_{kTile * kTileWords};
  std::vector<TileRef> tiles_;
  bool has_acc_ = false, has_keys_ = false, finite_ = true;
};

template <typename T>
void run_by_tiles(const BackwardCall<T>& call) {
  for (const Wave& part : BackwardWave<T>::cut(call)) {
    const BackwardWave<T> wave(call, part);
    wave.fill(call);
    const auto items = static_cast<int64_t>(wave.groups.size()) * wave.chunks;
    for_each_item(items, [&] {
      return [worker = std::make_unique<BackwardWorker<T>>(call, wave)](int64_t item) { (*worker)(item); };
    });
    wave.write_dq(call);
  }
}

template <typename T>
void run(const Problem& problem, const Gradients& gradients) {
  if (!problem.covers_everything)
    for (const Tensor* gradient : {&gradients.dq, &gradients.dk, &gradients.dv}) fill(*gradient, 0);
  MaybeTensor dbias_sums;
  const BackwardCall<T> call(problem, gradients, dbias_sums);
  if (const auto packing = plan_packing(problem))
    backward_packed<T>(call, *packing);
  else
    run_by_tiles<T>(call);
  if (call.direct_bias) return;
  Tensor dbias = *gradients.dbias;
  torch::stable::copy_(dbias, *dbias_sums);
}

}  // namespace

void backward(const Arguments& arguments, const Gradients& gradients) {
  const Problem problem = make_problem(arguments);
  check_gradients(arguments, gradients);
  check_column_lists(arguments);
  if (problem.query.element == Element::f64)
    run<double>(problem, gradients);
  else
    run<float>(problem, gradients);
}

}  // namespace dmattn

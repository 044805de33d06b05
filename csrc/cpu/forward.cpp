// Forward: one item is a tile of queries of one head; it walks its visible tiles of keys with an online softmax.
#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "gemm.h"
#include "schedule.h"
#include "tile_pack.h"
#include "visibility.h"

namespace dmattn {
namespace {

// lse rounded to T, and what that rounding lost: together max + log(sum).
template <typename T>
std::pair<T, T> split_lse(T max, T sum) {
  const double log_sum = std::log(double{sum}), total = max + log_sum, added = total - max;
  const double lost = (max - (total - added)) + (log_sum - added);  // of the sum of two numbers (Knuth)
  const T lse = static_cast<T>(total);
  return {lse, static_cast<T>((total - lse) + lost)};
}

// Where the rows of a call go.
template <typename T>
struct Outputs {
  Rows out;
  PerQuery<T> lse, lse_tail, row_max;  // row_max has no data where nobody asked

  explicit Outputs(const Results& results)
      : out(rows_of(results.out)), lse(per_query_of<T>(results.lse)), lse_tail(per_query_of<T>(results.lse_tail)) {
    if (results.row_max.has_value()) row_max = per_query_of<T>(*results.row_max);
  }
};

// Keys transposed and values of a wave: [slots][width + value_width][kTile].
template <typename T>
struct Panels {
  int64_t width, value_width;
  Buffer<T> tiles;

  Panels(const Problem& problem, const Wave& wave)
      : width(padded_width(problem.dim)),
        value_width(padded_width(problem.value_dim)),
        tiles(static_cast<int64_t>(wave.key_tiles.size()) * kTile * (width + value_width)) {}

  T* key_tile(int64_t slot) const { return tiles.at(slot * kTile * (width + value_width)); }
  T* value_tile(int64_t slot) const { return key_tile(slot) + kTile * width; }
};

template <typename T>
void fill_panels(const Problem& problem, const Wave& wave, const Panels<T>& panels) {
  for_each_item(static_cast<int64_t>(wave.key_tiles.size()), [&] {
    return [&, rows = std::make_unique<Buffer<T>>(kTile * panels.width)](int64_t item) {
      const KeyTile& tile = wave.key_tiles[item];
      const Pair& pair = wave.pairs[tile.pair];
      const Sequence& sequence = problem.sequence(pair.batch);
      const int64_t first = sequence.k_start + tile.tile * kTile;
      const int64_t valid = std::min(kTile, sequence.k_length - tile.tile * kTile);
      const int64_t slot = pair.key_slot(tile.tile);
      pack_rows<T>(problem.key, pair.batch, first, valid, pair.kv_head, rows->data());
      pack_columns<T>(rows->data(), valid, panels.width, panels.key_tile(slot));
      pack_rows<T>(problem.value, pair.batch, first, valid, pair.kv_head, panels.value_tile(slot));
    };
  });
}

// Whether one tile of queries reads each key (decoding): packing keys would then cost more than the attention itself.
bool reads_keys_once(const Problem& problem) {
  return problem.group == 1 && std::all_of(problem.sequences.begin(), problem.sequences.end(),
                                           [](const Sequence& sequence) { return sequence.q_length <= kTile; });
}

// Rows [extent][stride] in the compute type.
template <typename T>
struct RowTile {
  const T* data;
  int64_t stride;
};

// Rows as they lie in the tensor where a product can take them from there, else packed into `scratch`.
template <typename T>
RowTile<T> rows_or_packed(const Rows& source, int64_t batch, int64_t first_row, int64_t valid, int64_t head,
                          T* scratch) {
  constexpr Element own = sizeof(T) == 4 ? Element::f32 : Element::f64;
  if (source.element == own && source.width == padded_width(source.width) && valid == padded_extent(valid))
    return {reinterpret_cast<const T*>(source.at(batch, first_row, head)),
            source.row_stride / static_cast<int64_t>(sizeof(T))};
  pack_rows<T>(source, batch, first_row, valid, head, scratch);
  return {scratch, padded_width(source.width)};
}

template <typename T>
class ForwardWorker {
 public:
  // `panels` is null where keys are read once, and so not packed beforehand.
  ForwardWorker(const Problem& problem, const Wave& wave, const Panels<T>* panels, const Gemm& gemm,
                const Outputs<T>& outputs)
      : problem_(problem), wave_(wave), panels_(panels), gemm_(gemm), outputs_(outputs) {}
  ~ForwardWorker() { gemm_.release(); }

  void operator()(int64_t item) {
    const QueryTile& work = wave_.query_tiles[item];
    const Pair& pair = wave_.pairs[work.pair];
    const int64_t head = pair.kv_head * problem_.group + work.head_in_group;
    const Sequence& sequence = problem_.sequence(pair.batch);
    const Side side = query_side(problem_, pair.batch, head);
    // Longest first: the lists say which tile that is (a single one has an empty record beside its own); a causal band
    // gives its last tiles the most work.
    const bool ranked = side.records && pair.q_tiles > 1;
    const int64_t tile = ranked ? side.records[work.tile * side.record_words] : pair.q_tiles - 1 - work.tile;
    const int64_t first = tile * kTile, valid = std::min(kTile, sequence.q_length - first);
    rows_ = padded_extent(valid);
    std::fill(max_, max_ + kTile, -std::numeric_limits<T>::infinity());
    std::fill(sum_, sum_ + kTile, T(0));
    has_acc_ = false;
    pack_rows<T>(problem_.query, pair.batch, sequence.q_start + first, valid, head, query_.data());
    if (!panels_) pack_columns<T>(query_.data(), valid, width_, query_columns_.data());
    side.visible_tiles(tile, tiles_);
    for (const TileRef& other : tiles_) {
      Bits visible;
      if (!other.full && !side.tile_bits(tile, other.index, visible_.data(), visible)) continue;
      visit(pair, head, tile, valid, other.index, visible);
    }
    finish(pair.batch, sequence.q_start + first, valid, head);
  }

 private:
  void visit(const Pair& pair, int64_t head, int64_t tile, int64_t valid, int64_t key_tile, const Bits& visible) {
    const Sequence& sequence = problem_.sequence(pair.batch);
    const int64_t first_key = key_tile * kTile;
    const int64_t valid_keys = std::min(kTile, sequence.k_length - first_key), cols = padded_extent(valid_keys);
    RowTile<T> values;
    if (panels_) {
      const int64_t slot = pair.key_slot(key_tile);
      gemm_(rows_, cols, width_, query_.data(), width_, panels_->key_tile(slot), kTile, false, scores_.data(), kTile);
      values = {panels_->value_tile(slot), value_width_};
    } else {
      const int64_t row = sequence.k_start + first_key;
      const RowTile<T> keys =
          rows_or_packed<T>(problem_.key, pair.batch, row, valid_keys, pair.kv_head, key_rows_.data());
      gemm_(cols, rows_, width_, keys.data, keys.stride, query_columns_.data(), kTile, false, columns_.data(), kTile);
      math_.transpose(columns_.data(), kTile, cols, rows_, scores_.data(), kTile);
      values = rows_or_packed<T>(problem_.value, pair.batch, row, valid_keys, pair.kv_head, value_rows_.data());
    }
    T factor = in_range<T>(problem_.scale);
    if (problem_.softcap != 0) {
      math_.cap(scores_.data(), rows_, cols, softcap_, nullptr);
      factor = 1;
    }
    if (problem_.bias) {
      const Bias& bias = problem_.bias;
      const int64_t bias_head = broadcast_head(head, problem_.heads, bias.heads);
      const char* at = bias.at(pair.batch, bias_head, tile * kTile, sequence.k_start + first_key);
      math_.add_bias(scores_.data(), valid, valid_keys, factor, at, bias.element, bias.row_stride);
      factor = 1;
    }
    math_.softmax_step(scores_.data(), rows_, cols, factor, visible,
                       {max_, sum_, acc_.data(), value_width_, has_acc_});
    if (const Dropout& dropout = problem_.dropout) {
      dropout_bits(dropout, dropout.seed(pair.batch, head), tile * kTile, valid, first_key, keep_.data());
      math_.drop(scores_.data(), rows_, cols, {keep_.data(), kTileWords}, static_cast<T>(dropout.scale));
    }
    gemm_(rows_, value_width_, cols, scores_.data(), kTile, values.data, values.stride, has_acc_, acc_.data(),
          value_width_);
    has_acc_ = true;
  }

  void finish(int64_t batch, int64_t first_row, int64_t valid, int64_t head) {
    if (!has_acc_) std::fill(acc_.data(), acc_.at(valid * value_width_), T(0));
    for (int64_t r = 0; r < valid; ++r) {
      const bool empty = sum_[r] == 0;
      math_.store(acc_.at(r * value_width_), empty ? T(0) : 1 / sum_[r], problem_.value_dim,
                  outputs_.out.at(batch, first_row + r, head), outputs_.out.element);
      const auto [lse, tail] = empty ? std::pair<T, T>{-std::numeric_limits<T>::infinity(), 0} : split_lse(max_[r], sum_[r]);
      outputs_.lse.at(batch, head, first_row + r) = lse;
      outputs_.lse_tail.at(batch, head, first_row + r) = tail;
      if (outputs_.row_max.data) outputs_.row_max.at(batch, head, first_row + r) = max_[r];
    }
  }

  const Problem& problem_;
  const Wave& wave_;
  const Panels<T>* panels_;
  const Gemm& gemm_;
  const Outputs<T>& outputs_;
  const SoftCap<T> softcap_ = softcap_of<T>(problem_);
  const TileMath<T>& math_ = tile_math<T>();
  const int64_t width_ = padded_width(problem_.dim), value_width_ = padded_width(problem_.value_dim);
  Buffer<T> query_{kTile * width_}, scores_{kTile * kTile}, acc_{kTile * value_width_};
  // Only without panels: the queries transposed, a tile of keys and of values, scores transposed.
  Buffer<T> query_columns_{panels_ ? 0 : kTile * width_}, key_rows_{panels_ ? 0 : kTile * width_},
      value_rows_{panels_ ? 0 : kTile * value_width_}, columns_{panels_ ? 0 : kTile * kTile};
  Buffer<uint32_t> visible_{kTile * kTileWords}, keep_{kTile * kTileWords};
  std::vector<TileRef> tiles_;
  T max_[kTile], sum_[kTile];
  int64_t rows_ = 0;
  bool has_acc_ = false;
};

template <typename T>
void run(const Problem& problem, const Results& results) {
  if (!problem.covers_everything) {
    results.out.zero_();
    results.lse_tail.zero_();
    results.lse.fill_(-std::numeric_limits<double>::infinity());
    if (results.row_max.has_value()) results.row_max->fill_(-std::numeric_limits<double>::infinity());
  }
  const Outputs<T> outputs(results);
  const int64_t widths = padded_width(problem.dim) + padded_width(problem.value_dim);
  const bool packed = !reads_keys_once(problem);
  const Gemm gemm;
  for (const Wave& wave : make_waves(problem, 0, packed ? widths * kTile * int64_t{sizeof(T)} : 0)) {
    std::optional<Panels<T>> panels;
    if (packed) fill_panels(problem, wave, panels.emplace(problem, wave));
    const Panels<T>* const given = packed ? &*panels : nullptr;
    for_each_item(static_cast<int64_t>(wave.query_tiles.size()), [&] {
      return [worker = std::make_unique<ForwardWorker<T>>(problem, wave, given, gemm, outputs)](int64_t item) {
        (*worker)(item);
      };
    });
  }
}

}  // namespace

void forward(const Arguments& arguments, const Results& results) {
  const Problem problem = make_problem(arguments);
  if (problem.query.element == Element::f64)
    run<double>(problem, results);
  else
    run<float>(problem, results);
}

}  // namespace dmattn

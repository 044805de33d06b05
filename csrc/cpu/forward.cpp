// Forward: one item is a tile of queries of one head; it walks its visible tiles of keys with an online softmax.
#include <optional>

#include "attend.h"
#include "check.h"
#include "packed.h"
#include "schedule.h"

namespace dmattn {
namespace {

// Keys transposed and values of a wave: [slots][width + value_width][kTile].
template <typename T>
struct Panels {
  int64_t width, value_width;
  Buffer<T> tiles;
  mutable std::vector<uint8_t> finite;  // whether all values of a slot are

  Panels(const Problem& problem, const Wave& wave)
      : width(padded_width(problem.dim)),
        value_width(padded_width(problem.value_dim)),
        tiles(static_cast<int64_t>(wave.key_tiles.size()) * kTile * (width + value_width)),
        finite(wave.key_tiles.size()) {}

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
      panels.finite[slot] = rows_are_finite(panels.value_tile(slot), valid, panels.value_width);
    };
  });
}

// Whether one tile of queries reads each key (decoding): packing keys would then cost more than the attention itself.
bool reads_keys_once(const Problem& problem) {
  return problem.group == 1 && std::all_of(problem.sequences.begin(), problem.sequences.end(),
                                           [](const Sequence& sequence) { return sequence.q_length <= kTile; });
}

// Rows as they lie in the tensor where a product can take them from there, else packed into `scratch`.
template <typename T>
RowTile<T> rows_or_packed(const Rows& source, int64_t batch, int64_t first_row, int64_t valid, int64_t head,
                          T* scratch) {
  constexpr Element own = sizeof(T) == 4 ? Element::f32 : Element::f64;
  const int64_t stride = source.row_stride / static_cast<int64_t>(sizeof(T));
  // BLAS refuses rows that overlap; oneDNN has no code for tiles whose first and last rows lie more than 2 GiB apart.
  constexpr int64_t kFarthest = std::numeric_limits<int>::max() / (kTile * static_cast<int64_t>(sizeof(T)));
  const bool strided = stride >= source.width && stride <= kFarthest;
  if (strided && source.element == own && source.width == padded_width(source.width) && valid == padded_extent(valid))
    return {reinterpret_cast<const T*>(source.at(batch, first_row, head)), stride};
  pack_rows<T>(source, batch, first_row, valid, head, scratch);
  return {scratch, padded_width(source.width)};
}

template <typename T>
class ForwardWorker {
 public:
  // `panels` is null where keys are read once, and so not packed beforehand.
  ForwardWorker(const Problem& problem, const Wave& wave, const Panels<T>* panels,
                const Outputs<T>& outputs)
      : problem_(problem), wave_(wave), panels_(panels), attend_(problem, outputs, !panels) {}

  void operator()(int64_t item) {
    const QueryTile& work = wave_.query_tiles[item];
    const Pair& pair = wave_.pairs[work.pair];
    const int64_t head = pair.kv_head * problem_.group + work.head_in_group;
    const Side side = query_side(problem_, pair.batch, head);
    // Longest first: the lists say which tile that is (a single one has an empty record beside its own); a causal band
    // gives its last tiles the most work.
    const bool ranked = side.records && pair.q_tiles > 1;
    const int64_t tile = ranked ? side.records[work.tile * side.record_words] : pair.q_tiles - 1 - work.tile;
    attend_.begin(pair.batch, head, tile);
    side.visible_tiles(tile, tiles_);
    for (const TileRef& other : tiles_) {
      Bits visible;
      if (!other.full && !side.tile_bits(tile, other.index, visible_.data(), visible)) continue;
      attend_.step(keys(pair, head, tile, other.index), visible);
    }
    attend_.finish();
  }

 private:
  KeyTileView<T> keys(const Pair& pair, int64_t head, int64_t tile, int64_t key_tile) const {
    const Sequence& sequence = problem_.sequence(pair.batch);
    KeyTileView<T> view;
    view.positions.first = key_tile * kTile;
    view.valid = std::min(kTile, sequence.k_length - key_tile * kTile);
    const int64_t row = sequence.k_start + key_tile * kTile;
    if (panels_) {
      const int64_t slot = pair.key_slot(key_tile);
      view.columns = panels_->key_tile(slot);
      view.values = {panels_->value_tile(slot), panels_->value_width};
      view.finite_values = panels_->finite[slot];
    } else {
      view.rows = rows_or_packed<T>(problem_.key, pair.batch, row, view.valid, pair.kv_head, key_rows_.data());
      view.values = rows_or_packed<T>(problem_.value, pair.batch, row, view.valid, pair.kv_head, value_rows_.data());
      view.finite_values = rows_are_finite(view.values.data, view.valid, padded_width(problem_.value_dim),
                                           view.values.stride);
    }
    if (const Bias& bias = problem_.bias) {
      const int64_t bias_head = broadcast_head(head, problem_.heads, bias.heads);
      view.bias = bias.at(pair.batch, bias_head, tile * kTile, row);
      view.bias_element = bias.element;
      view.bias_row_stride = bias.row_stride;
    }
    return view;
  }

  const Problem& problem_;
  const Wave& wave_;
  const Panels<T>* panels_;
  Attend<T> attend_;
  Buffer<T> key_rows_{panels_ ? 0 : kTile * padded_width(problem_.dim)},
      value_rows_{panels_ ? 0 : kTile * padded_width(problem_.value_dim)};
  Buffer<uint32_t> visible_{kTile * kTileWords};
  std::vector<TileRef> tiles_;
};

template <typename T>
void run(const Problem& problem, const Results& results) {
  if (!problem.covers_everything) {
    fill(results.out, 0);
    fill(results.lse_tail, 0);
    fill(results.lse, -std::numeric_limits<double>::infinity());
    if (results.row_max.has_value()) fill(*results.row_max, -std::numeric_limits<double>::infinity());
  }
  const Outputs<T> outputs(results);
  if (const auto packing = plan_packing(problem)) return forward_packed<T>(problem, *packing, outputs);
  const int64_t widths = padded_width(problem.dim) + padded_width(problem.value_dim);
  const bool packed = !reads_keys_once(problem);
  for (const Wave& wave : make_waves(problem, 0, packed ? widths * kTile * int64_t{sizeof(T)} : 0)) {
    std::optional<Panels<T>> panels;
    if (packed) fill_panels(problem, wave, panels.emplace(problem, wave));
    const Panels<T>* const given = packed ? &*panels : nullptr;
    for_each_item(static_cast<int64_t>(wave.query_tiles.size()), [&] {
      return [worker = std::make_unique<ForwardWorker<T>>(problem, wave, given, outputs)](int64_t item) {
        (*worker)(item);
      };
    });
  }
}

}  // namespace

void forward(const Arguments& arguments, const Results& results) {
  const Problem problem = make_problem(arguments);
  check_results(arguments, results);
  check_row_lists(arguments);
  if (problem.query.element == Element::f64)
    run<double>(problem, results);
  else
    run<float>(problem, results);
}

}  // namespace dmattn

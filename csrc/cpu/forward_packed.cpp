// Forward over gathered keys: one item is an epoch of the query heads that share its keys.
#include "packed.h"
#include "schedule.h"

namespace dmattn {
namespace {

template <typename T>
class PackedForward {
 public:
  PackedForward(const Problem& problem, const Packing& packing, const Outputs<T>& outputs)
      : problem_(problem), packing_(packing), attend_(problem, outputs, false), seen_(packing) {
    int64_t rows = 0, blocks = 0;
    for (const Epochs& head : packing.heads) {
      rows = std::max(rows, head.most_rows);
      blocks = std::max(blocks, head.most_blocks);
    }
    keys_.emplace(blocks * kTile * width_);  // they lie transposed, so that each block takes a whole tile
    values_.emplace(rows * value_width_);
  }

  void operator()(const PackedItem& item) {
    epochs_ = &packing_.heads[problem_.interval_head(item.batch, item.first_head)];
    gather(item);
    bias_.fill(problem_, packing_, *epochs_, item);
    const int64_t first_tile = item.epoch * packing_.length / kTile;
    const int64_t queries = problem_.sequence(item.batch).q_length;
    const int64_t tiles = std::min(packing_.length / kTile, ceil_div(queries, kTile) - first_tile);
    for (int64_t t = first_tile; t < first_tile + tiles; ++t) {
      seen_.find(*epochs_, item.epoch, t * kTile, std::min(queries, (t + 1) * kTile), true);
      for (int64_t g = 0; g < packing_.heads_of_unit; ++g) query_tile(item, item.first_head + g, t);
    }
  }

 private:
  void gather(const PackedItem& item) {
    const int64_t first_block = epochs_->first_block[item.epoch], last_block = epochs_->first_block[item.epoch + 1];
    finite_.assign(static_cast<size_t>(last_block - first_block), true);
    for (int64_t b = first_block; b < last_block; ++b) {
      const Block& block = epochs_->blocks[b];
      const Piece* const pieces = epochs_->pieces.data() + block.first_piece;
      const auto row_of = [&](int64_t r) { return int64_t{pieces[r].key}; };
      pack_chosen_rows<T>(problem_.key, item.batch, row_of, block.count, item.kv_head, rows_.data());
      pack_columns<T>(rows_.data(), block.count, width_, key_tile(b - first_block));
      T* const values = values_->at(block.first_row * value_width_);
      pack_chosen_rows<T>(problem_.value, item.batch, row_of, block.count, item.kv_head, values);
      finite_[b - first_block] = rows_are_finite(values, block.count, value_width_);
    }
  }

  void query_tile(const PackedItem& item, int64_t head, int64_t tile) {
    attend_.begin(item.batch, head, tile);
    for (const auto& [b, visible] : seen_) {
      const Block& block = epochs_->blocks[b];
      const int64_t number = b - epochs_->first_block[item.epoch];
      KeyTileView<T> view;
      view.columns = key_tile(number);
      view.values = {values_->at(block.first_row * value_width_), value_width_};
      view.finite_values = finite_[number];
      view.valid = block.count;
      view.positions = {0, epochs_->pieces.data() + block.first_piece, block.count};
      if (problem_.bias) {
        view.bias = reinterpret_cast<const char*>(bias_.at(problem_, head, block.first_row));
        view.bias_element = sizeof(T) == 8 ? Element::f64 : Element::f32;
      }
      attend_.step(view, visible);
    }
    attend_.finish();
  }

  T* key_tile(int64_t block) const { return keys_->at(block * kTile * width_); }

  const Problem& problem_;
  const Packing& packing_;
  Attend<T> attend_;
  const Epochs* epochs_ = nullptr;
  const int64_t width_ = padded_width(problem_.dim), value_width_ = padded_width(problem_.value_dim);
  std::optional<Buffer<T>> keys_, values_;
  std::vector<uint8_t> finite_;
  GatheredBias<T> bias_;
  Buffer<T> rows_{kTile * width_};
  SeenBlocks seen_;
};

}  // namespace

template <typename T>
void forward_packed(const Problem& problem, const Packing& packing, const Outputs<T>& outputs) {
  const std::vector<PackedItem> items = packed_items(problem, packing);
  for_each_item(static_cast<int64_t>(items.size()), [&] {
    return [&, worker = std::make_unique<PackedForward<T>>(problem, packing, outputs)](int64_t index) {
      (*worker)(items[index]);
    };
  });
}

template void forward_packed<float>(const Problem&, const Packing&, const Outputs<float>&);
template void forward_packed<double>(const Problem&, const Packing&, const Outputs<double>&);

}  // namespace dmattn

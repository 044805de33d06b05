// Backward over gathered keys: one item is an epoch of the query heads that share its keys. It writes dq of its
// queries; dk and dv of gathered keys are added up afterwards, in the order of the items.
#include "differentiate.h"
#include "packed.h"
#include "schedule.h"

namespace dmattn {
namespace {

// What items give to their keys: dk and dv of gathered keys, those of an item one after the other, and dbias.
template <typename T>
struct KeySums {
  int64_t width, value_width;
  std::vector<int64_t> first_row, first_bias;  // of each item; behind the last row stands where they end
  Buffer<T> rows;
  std::vector<T> bias;
  std::vector<std::vector<uint8_t>> written;  // by item and block; rows of others are uninitialised

  T* dk(int64_t item, int64_t row) const { return of_item(item) + row * width; }
  T* dv(int64_t item, int64_t row) const {
    return of_item(item) + (first_row[item + 1] - first_row[item]) * width + row * value_width;
  }

 private:
  T* of_item(int64_t item) const { return rows.at(first_row[item] * (width + value_width)); }
};

template <typename T>
class PackedBackward {
 public:
  PackedBackward(const BackwardCall<T>& call, const Packing& packing)
      : call_(call), problem_(call.problem), packing_(packing), differentiate_(call.problem), seen_(packing) {
    int64_t rows = 0;
    for (const Epochs& head : packing.heads) rows = std::max(rows, head.most_rows);
    keys_.emplace(rows * width_);
    values_.emplace(rows * value_width_);
  }

  void operator()(const PackedItem& item, int64_t index, KeySums<T>& sums) {
    epochs_ = &packing_.heads[problem_.interval_head(item.batch, item.first_head)];
    first_block_ = epochs_->first_block[item.epoch];
    last_block_ = epochs_->first_block[item.epoch + 1];
    written_.assign(static_cast<size_t>(last_block_ - first_block_), false);
    gather(item);
    bias_.fill(problem_, packing_, *epochs_, item);
    dk_ = sums.dk(index, 0);
    dv_ = sums.dv(index, 0);
    bias_sums_ = call_.dbias.data ? sums.bias.data() + sums.first_bias[index] : nullptr;
    const int64_t first_tile = item.epoch * packing_.length / kTile;
    const int64_t queries = problem_.sequence(item.batch).q_length;
    const int64_t tiles = std::min(packing_.length / kTile, ceil_div(queries, kTile) - first_tile);
    for (int64_t t = first_tile; t < first_tile + tiles; ++t) {
      seen_.find(*epochs_, item.epoch, t * kTile, std::min(queries, (t + 1) * kTile), false);
      for (int64_t g = 0; g < packing_.heads_of_unit; ++g) query_tile(item, item.first_head + g, t);
    }
    sums.written[index] = written_;
  }

 private:
  void gather(const PackedItem& item) {
    finite_.assign(written_.size(), true);
    for (int64_t b = first_block_; b < last_block_; ++b) {
      const Block& block = epochs_->blocks[b];
      const Piece* const pieces = epochs_->pieces.data() + block.first_piece;
      const auto row_of = [&](int64_t r) { return int64_t{pieces[r].key}; };
      T* const keys = keys_->at(block.first_row * width_);
      pack_chosen_rows<T>(problem_.key, item.batch, row_of, block.count, item.kv_head, keys);
      pack_chosen_rows<T>(problem_.value, item.batch, row_of, block.count, item.kv_head,
                          values_->at(block.first_row * value_width_));
      finite_[b - first_block_] = rows_are_finite(keys, block.count, width_);
    }
  }

  void query_tile(const PackedItem& item, int64_t head, int64_t tile) {
    const int64_t first = tile * kTile, valid = std::min(kTile, problem_.sequence(item.batch).q_length - first);
    const QueryPanel<T> panel(panel_.data(), width_, value_width_);
    bool filled = false, finite_queries = true, has_dq = false;
    for (const auto& [b, visible] : seen_) {
      const Block& block = epochs_->blocks[b];
      if (!filled) finite_queries = panel.fill(call_, item.batch, head, tile, scratch_.data());
      filled = true;
      uint8_t& written = written_[b - first_block_];
      const TilePair<T> tiles{.batch = item.batch,
                              .head = head,
                              .first_query = first,
                              .queries = valid,
                              .keys = block.count,
                              .positions = {0, epochs_->pieces.data() + block.first_piece, block.count},
                              .panel = panel,
                              .key = keys_->at(block.first_row * width_),
                              .value = values_->at(block.first_row * value_width_),
                              .dk = dk_ + block.first_row * width_,
                              .dv = dv_ + block.first_row * value_width_,
                              .dq = dq_.data(),
                              .has_keys = written != 0,
                              .has_dq = has_dq,
                              .finite_keys = finite_[b - first_block_] != 0,
                              .finite_queries = finite_queries,
                              .bias = bias_of_block(head, block)};
      differentiate_(tiles, visible);
      written = has_dq = true;
    }
    const int64_t first_row = problem_.sequence(item.batch).q_start + first;
    for (int64_t r = 0; r < valid; ++r)
      store_gradient<T>(has_dq ? dq_.at(r * width_) : nullptr, in_range<T>(problem_.scale), call_.dq, item.batch,
                        first_row + r, head);
  }

  TileBias<T> bias_of_block(int64_t head, const Block& block) {
    TileBias<T> tile;
    if (!problem_.bias) return tile;
    const T* const values = bias_.at(problem_, head, block.first_row);
    tile.bias = reinterpret_cast<const char*>(values);
    tile.element = sizeof(T) == 8 ? Element::f64 : Element::f32;
    if (bias_sums_) tile.grad = bias_sums_ + (values - bias_.values.data());
    return tile;
  }

  const BackwardCall<T>& call_;
  const Problem& problem_;
  const Packing& packing_;
  Differentiate<T> differentiate_;
  const Epochs* epochs_ = nullptr;
  int64_t first_block_ = 0, last_block_ = 0;
  const int64_t width_ = padded_width(problem_.dim), value_width_ = padded_width(problem_.value_dim);
  std::optional<Buffer<T>> keys_, values_;
  T *dk_ = nullptr, *dv_ = nullptr;  // of the gathered keys of an item
  Buffer<T> panel_{QueryPanel<T>::size(width_, value_width_)}, scratch_{2 * kTile * value_width_}, dq_{kTile * width_};
  std::vector<uint8_t> written_, finite_;
  SeenBlocks seen_;
  GatheredBias<T> bias_;
  T* bias_sums_ = nullptr;
};

// Key heads [first, last) of the list of all, whose sums are held together.
template <typename T>
class KeyHeads {
 public:
  KeyHeads(const BackwardCall<T>& call, const Packing& packing, int64_t first, int64_t last)
      : call_(call), problem_(call.problem), packing_(packing), first_(first), count_(last - first),
        totals_(count_ * keys_ * row_) {
    std::fill(totals_.data(), totals_.at(count_ * keys_ * row_), T(0));
  }

  // Add what items gave, in their order. Threads share heads and columns, so that each element has one order.
  void add(const std::vector<PackedItem>& items, int64_t first_item, const KeySums<T>& sums) const {
    const auto number = static_cast<int64_t>(sums.written.size());
    for_each_item(2 * count_, [&] {
      return [&](int64_t part) {
        const int64_t offset = part % 2 == 0 ? 0 : width_, columns = part % 2 == 0 ? width_ : value_width_;
        for (int64_t index = 0; index < number; ++index) {
          const PackedItem& item = items[first_item + index];
          const int64_t head = item.batch * problem_.kv_heads + item.kv_head - first_;
          if (head != part / 2) continue;
          each_row(item, index, sums, [&](int64_t key, int64_t row) {
            const T* const own = part % 2 == 0 ? sums.dk(index, row) : sums.dv(index, row);
            tile_math<T>().add(totals_.at((head * keys_ + key) * row_ + offset), own, columns);
          });
        }
      };
    });
  }

  void write() const {
    for_each_item(count_, [&] {
      return [&](int64_t head) {
        const int64_t batch = (first_ + head) / problem_.kv_heads, kv_head = (first_ + head) % problem_.kv_heads;
        for (int64_t key = 0; key < keys_; ++key) {
          const T* const total = totals_.at((head * keys_ + key) * row_);
          store_gradient<T>(total, in_range<T>(problem_.scale), call_.dk, batch, key, kv_head);
          store_gradient<T>(total + width_, 1, call_.dv, batch, key, kv_head);
        }
      };
    });
  }

  // Call use(key, row) for each gathered row that an item wrote.
  template <typename Use>
  void each_row(const PackedItem& item, int64_t index, const KeySums<T>& sums, const Use& use) const {
    const Epochs& epochs = packing_.heads[problem_.interval_head(item.batch, item.first_head)];
    const int64_t first_block = epochs.first_block[item.epoch];
    for (int64_t b = first_block; b < epochs.first_block[item.epoch + 1]; ++b) {
      if (!sums.written[index][b - first_block]) continue;
      const Block& block = epochs.blocks[b];
      for (int64_t r = 0; r < block.count; ++r) use(epochs.pieces[block.first_piece + r].key, block.first_row + r);
    }
  }

 private:
  const BackwardCall<T>& call_;
  const Problem& problem_;
  const Packing& packing_;
  const int64_t first_, count_, keys_ = problem_.sequence(0).k_length;
  const int64_t width_ = padded_width(problem_.dim), value_width_ = padded_width(problem_.value_dim),
                row_ = width_ + value_width_;
  const Buffer<T> totals_;
};

// dbias of gathered keys, added in the order of the items on one thread: pairs may share its elements.
template <typename T>
void add_bias_sums(const BackwardCall<T>& call, const Packing& packing, const KeyHeads<T>& heads,
                   const std::vector<PackedItem>& items, int64_t first_item, const KeySums<T>& sums) {
  const Problem& problem = call.problem;
  for (size_t index = 0; index < sums.written.size(); ++index) {
    const PackedItem& item = items[first_item + index];
    const int64_t last_head = item.first_head + packing.heads_of_unit - 1;
    const int64_t first = broadcast_head(item.first_head, problem.heads, call.dbias.heads);
    const int64_t last = broadcast_head(last_head, problem.heads, call.dbias.heads);
    const int64_t rows = packing.heads[problem.interval_head(item.batch, item.first_head)].rows(item.epoch);
    for (int64_t head = first; head <= last; ++head) {
      const T* const source = sums.bias.data() + sums.first_bias[index] + (head - first) * rows;
      heads.each_row(item, static_cast<int64_t>(index), sums, [&](int64_t key, int64_t row) {
        *call.dbias.at(item.batch, head, 0, key) += source[row];
      });
    }
  }
}

template <typename T>
KeySums<T> make_sums(const BackwardCall<T>& call, const Packing& packing, const std::vector<PackedItem>& items,
                     int64_t first, int64_t last) {
  const Problem& problem = call.problem;
  const int64_t width = padded_width(problem.dim), value_width = padded_width(problem.value_dim);
  std::vector<int64_t> first_row, first_bias;
  int64_t rows = 0, bias = 0;
  for (int64_t index = first; index < last; ++index) {
    const PackedItem& item = items[index];
    const int64_t own = packing.heads[problem.interval_head(item.batch, item.first_head)].rows(item.epoch);
    first_row.push_back(rows);
    first_bias.push_back(bias);
    rows += own;
    if (call.dbias.data) bias += own * packing.heads_of_unit;
  }
  first_row.push_back(rows);
  return {width,
          value_width,
          std::move(first_row),
          std::move(first_bias),
          Buffer<T>(rows * (width + value_width)),
          std::vector<T>(static_cast<size_t>(bias), T(0)),
          std::vector<std::vector<uint8_t>>(static_cast<size_t>(last - first))};
}

}  // namespace

template <typename T>
void backward_packed(const BackwardCall<T>& call, const Packing& packing) {
  const Problem& problem = call.problem;
  const std::vector<PackedItem> items = packed_items(problem, packing);
  const int64_t row_bytes =
      (padded_width(problem.dim) + padded_width(problem.value_dim)) * static_cast<int64_t>(sizeof(T));
  const auto key_head = [&](int64_t index) { return items[index].batch * problem.kv_heads + items[index].kv_head; };
  const auto bytes_of = [&](int64_t index) {
    const PackedItem& item = items[index];
    return packing.heads[problem.interval_head(item.batch, item.first_head)].rows(item.epoch) * row_bytes;
  };
  const int64_t total_heads = problem.batch * problem.kv_heads;
  const auto count = static_cast<int64_t>(items.size());
  const int64_t together =
      std::max<int64_t>(1, kWaveBytes / std::max<int64_t>(1, problem.sequence(0).k_length * row_bytes));
  int64_t item = 0;
  for (int64_t first_head = 0; first_head < total_heads; first_head += together) {
    const int64_t last_head = std::min(total_heads, first_head + together);
    const KeyHeads<T> heads(call, packing, first_head, last_head);
    while (item < count && key_head(item) < last_head) {
      int64_t last = item, bytes = 0;  // the items of one wave
      while (last < count && key_head(last) < last_head && (last == item || bytes + bytes_of(last) <= kWaveBytes))
        bytes += bytes_of(last++);
      KeySums<T> sums = make_sums(call, packing, items, item, last);
      for_each_item(last - item, [&] {
        return [&, worker = std::make_unique<PackedBackward<T>>(call, packing)](int64_t index) {
          (*worker)(items[item + index], index, sums);
        };
      });
      heads.add(items, item, sums);
      if (call.dbias.data) add_bias_sums(call, packing, heads, items, item, sums);
      item = last;
    }
    heads.write();
  }
}

template void backward_packed<float>(const BackwardCall<float>&, const Packing&);
template void backward_packed<double>(const BackwardCall<double>&, const Packing&);

}  // namespace dmattn

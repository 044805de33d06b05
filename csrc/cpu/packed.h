// Masks of intervals whose keys lie scattered, such as dynamic masks: no tile of 128 x 128 is empty, though each query
// sees few keys. So queries are cut into epochs, and for each epoch the keys that it sees are gathered side by side:
// those that it sees from its start sorted by their last query, and then the others by their first one. The tiles of
// gathered keys are few and mostly full.
#pragma once

#include <optional>
#include <vector>

#include "attend.h"
#include "product.h"
#include "intervals.h"
#include "problem.h"

namespace dmattn {

template <typename T>
struct BackwardCall;

// Up to kTile gathered keys of an epoch.
struct Block {
  int64_t first_piece, count;
  int64_t first_row;               // of its rows among those of the epoch, each block padded to a multiple of 16
  int64_t any_first, any_last;     // some are visible in this span of queries only
  int64_t all_first, all_last;     // all are visible here

  int64_t rows() const { return padded_extent(count); }
};

// The gathered keys of one head of intervals.
struct Epochs {
  std::vector<Piece> pieces;
  std::vector<Block> blocks;
  std::vector<int64_t> first_block;  // [epochs + 1]
  int64_t most_rows = 0, most_blocks = 0;  // of an epoch

  int64_t rows(int64_t epoch) const {
    if (first_block[epoch] == first_block[epoch + 1]) return 0;
    const Block& last = blocks[first_block[epoch + 1] - 1];
    return last.first_row + last.rows();
  }
};

struct Packing {
  int64_t length = 0;         // queries of an epoch, a multiple of kTile
  int64_t epochs = 0;
  int64_t heads_of_unit = 1;  // query heads that share gathered keys: those of a key head, or one
  std::vector<Epochs> heads;  // beside Problem::intervals
};

// An epoch of the query heads that share its keys.
struct PackedItem {
  int64_t batch, kv_head, first_head, epoch;
};

// How to gather keys, where that is less work than the tiles of the mask as it is.
std::optional<Packing> plan_packing(const Problem& problem);

// All items, those of a key head one after another, in the order in which what they give to its keys is added.
std::vector<PackedItem> packed_items(const Problem& problem, const Packing& packing);

// What tiles of queries see of the blocks of an epoch. It is found once for all heads that share gathered keys.
class SeenBlocks {
 public:
  struct Seen {
    int64_t block;  // beside Epochs::blocks
    Bits visible;   // rows are queries or keys, as `find` was told
  };

  explicit SeenBlocks(const Packing& packing);
  // The blocks of which queries [first_query, last_query), those of one tile, see something.
  void find(const Epochs& epochs, int64_t epoch, int64_t first_query, int64_t last_query, bool rows_are_queries);

  const Seen* begin() const { return seen_.data(); }
  const Seen* end() const { return seen_.data() + seen_.size(); }

 private:
  std::vector<Seen> seen_;
  Buffer<uint32_t> by_key_, words_;
};

// Values of a bias per key, for each head of `heads` from `first_head` and each gathered row: [heads of them][rows].
template <typename T>
struct GatheredBias {
  std::vector<T> values;
  int64_t rows = 0, first = 0;  // the first head of the bias

  void fill(const Problem& problem, const Packing& packing, const Epochs& epochs, const PackedItem& item);
  const T* at(const Problem& problem, int64_t head, int64_t row) const {
    return values.data() + (broadcast_head(head, problem.heads, problem.bias.heads) - first) * rows + row;
  }
};

template <typename T>
void forward_packed(const Problem& problem, const Packing& packing, const Outputs<T>& outputs);
template <typename T>
void backward_packed(const BackwardCall<T>& call, const Packing& packing);

}  // namespace dmattn

#include "packed.h"

#include <algorithm>

#include "schedule.h"

namespace dmattn {
namespace {

// Gathering a key costs about as much as its products with this many rows of queries, and a plan is worth making where
// it saves this share of the work (one core of an EPYC 9005, head dimension 64).
constexpr int64_t kRowsToGather = 96;
constexpr double kWorthwhile = 1.2;
constexpr int64_t kItems = 16;  // at least, where there are enough queries, whatever the number of threads
constexpr int64_t kLengths[] = {256, 512, 1024, 2048};  // of epochs

// Elements of scores that the tiles of a mask of intervals hold, as it is.
int64_t area_of_tiles(const Intervals& head, const Band& band) {
  int64_t tiles = 0;
  for (int64_t tile = 0; tile < ceil_div(head.keys(), kTile); ++tile) {
    const auto [seen_first, seen_last] = head.query_tiles(tile);
    const int64_t first_key = tile * kTile, last_key = std::min(head.keys(), first_key + kTile) - 1;
    const int64_t first = std::max(seen_first * kTile, first_key - band.hi);
    const int64_t last = std::min(seen_last * kTile, last_key - band.lo + 1);
    if (first < last) tiles += ceil_div(last, kTile) - first / kTile;
  }
  return tiles * kTile * kTile;
}

// What one head of intervals costs: elements of its tiles, its keys, and the keys that epochs of each length gather.
struct Costs {
  int64_t area = 0, keys = 0;
  std::vector<int64_t> gathered;

  Costs() = default;
  Costs(const Intervals& head, const Band& band, const std::vector<int64_t>& lengths)
      : area(area_of_tiles(head, band)), keys(head.keys()), gathered(lengths.size(), 0) {
    for (const Piece& piece : head.pieces(band))
      for (size_t k = 0; k < lengths.size(); ++k)
        gathered[k] += (piece.last - 1) / lengths[k] - piece.first / lengths[k] + 1;
  }
  void add(const Costs& other) {
    area += other.area;
    keys += other.keys;
    for (size_t k = 0; k < gathered.size(); ++k) gathered[k] += other.gathered[k];
  }
};

void add_blocks(Epochs& epochs, std::vector<Piece>& chosen, int64_t first_query, int64_t last_query, int64_t& row) {
  for (size_t first = 0; first < chosen.size(); first += kTile) {
    const size_t last = std::min(chosen.size(), first + kTile);
    Block block{static_cast<int64_t>(epochs.pieces.size()), static_cast<int64_t>(last - first), row, last_query,
                first_query, first_query, last_query};
    for (size_t index = first; index < last; ++index) {
      const Piece& piece = chosen[index];
      const int64_t begin = std::max<int64_t>(piece.first, first_query);
      const int64_t end = std::min<int64_t>(piece.last, last_query);
      block.any_first = std::min(block.any_first, begin);
      block.any_last = std::max(block.any_last, end);
      block.all_first = std::max(block.all_first, begin);
      block.all_last = std::min(block.all_last, end);
      epochs.pieces.push_back(piece);
    }
    row += block.rows();
    epochs.blocks.push_back(block);
  }
}

// `pieces` are sorted by their first query.
Epochs cut_into_epochs(const std::vector<Piece>& pieces, int64_t queries, int64_t length) {
  Epochs epochs;
  epochs.first_block.push_back(0);
  std::vector<Piece> alive, born;
  size_t next = 0;
  for (int64_t first = 0; first < queries; first += length) {
    const int64_t last = std::min(queries, first + length);
    std::erase_if(alive, [&](const Piece& piece) { return piece.last <= first; });
    for (; next < pieces.size() && pieces[next].first <= first; ++next) alive.push_back(pieces[next]);
    born.clear();
    for (; next < pieces.size() && pieces[next].first < last; ++next) born.push_back(pieces[next]);
    const auto end = [&](const Piece& piece) { return std::min<int64_t>(piece.last, last); };
    std::sort(alive.begin(), alive.end(), [&](const Piece& a, const Piece& b) {
      return end(a) != end(b) ? end(a) < end(b) : a.key < b.key;  // a key has one piece that is alive
    });
    int64_t rows = 0;
    add_blocks(epochs, alive, first, last, rows);
    add_blocks(epochs, born, first, last, rows);
    epochs.most_rows = std::max(epochs.most_rows, rows);
    epochs.most_blocks =
        std::max(epochs.most_blocks, static_cast<int64_t>(epochs.blocks.size()) - epochs.first_block.back());
    epochs.first_block.push_back(static_cast<int64_t>(epochs.blocks.size()));
    alive.insert(alive.end(), born.begin(), born.end());
  }
  return epochs;
}

// Bits of a block for a tile of queries, one row of kTileWords words per key.
void block_bits(const Epochs& epochs, const Block& block, int64_t first_query, uint32_t* words) {
  for (int64_t r = 0; r < block.count; ++r) {
    const Piece& piece = epochs.pieces[block.first_piece + r];
    range_bits(piece.first - first_query, piece.last - first_query, words + r * kTileWords);
  }
  std::fill(words + block.count * kTileWords, words + kTile * kTileWords, 0u);
}

int64_t most_blocks(const Packing& packing) {
  int64_t most = 0;
  for (const Epochs& head : packing.heads) most = std::max(most, head.most_blocks);
  return most;
}

bool per_key(const Bias& bias) { return !bias || bias.row_stride == 0; }

}  // namespace

std::optional<Packing> plan_packing(const Problem& problem) {
  if (problem.intervals.empty() || problem.batch == 0 || problem.heads == 0 || !per_key(problem.bias))
    return std::nullopt;
  const Band& band = problem.sequence(0).band;
  const int64_t queries = problem.sequence(0).q_length;
  Packing packing;
  packing.heads_of_unit = problem.interval_heads == problem.heads ? 1 : problem.group;
  const int64_t to_gather = kRowsToGather / packing.heads_of_unit;
  const int64_t units = problem.batch * problem.heads / packing.heads_of_unit;
  std::vector<int64_t> lengths{kLengths[0]};
  for (const int64_t length : kLengths)
    if (length > lengths.back() && units * ceil_div(queries, length) >= kItems) lengths.push_back(length);
  const auto heads = static_cast<int64_t>(problem.intervals.size());
  std::vector<Costs> costs(problem.intervals.size());
  for_each_item(heads, [&] {
    return [&](int64_t head) { costs[head] = Costs(problem.intervals[head], band, lengths); };
  });
  Costs total = costs[0];
  for (int64_t head = 1; head < heads; ++head) total.add(costs[head]);
  double best = static_cast<double>(total.area + total.keys * to_gather) / kWorthwhile;
  for (size_t k = 0; k < lengths.size(); ++k) {
    const double work = static_cast<double>(total.gathered[k]) * static_cast<double>(lengths[k] + to_gather);
    if (work >= best) continue;
    best = work;
    packing.length = lengths[k];
  }
  if (packing.length == 0) return std::nullopt;
  packing.epochs = ceil_div(queries, packing.length);
  packing.heads.resize(problem.intervals.size());
  for_each_item(heads, [&] {
    return [&](int64_t head) {
      packing.heads[head] = cut_into_epochs(problem.intervals[head].pieces(band), queries, packing.length);
    };
  });
  return packing;
}

std::vector<PackedItem> packed_items(const Problem& problem, const Packing& packing) {
  std::vector<PackedItem> items;
  for (int64_t batch = 0; batch < problem.batch; ++batch)
    for (int64_t head = 0; head < problem.heads; head += packing.heads_of_unit)
      for (int64_t epoch = 0; epoch < packing.epochs; ++epoch)
        items.push_back({batch, head / problem.group, head, epoch});
  return items;
}

SeenBlocks::SeenBlocks(const Packing& packing)
    : by_key_(kTile * kTileWords), words_(most_blocks(packing) * kTile * kTileWords) {}

void SeenBlocks::find(const Epochs& epochs, int64_t epoch, int64_t first_query, int64_t last_query,
                      bool rows_are_queries) {
  seen_.clear();
  for (int64_t b = epochs.first_block[epoch]; b < epochs.first_block[epoch + 1]; ++b) {
    const Block& block = epochs.blocks[b];
    if (block.any_first >= last_query || block.any_last <= first_query) continue;
    const bool whole = block.all_first <= first_query && block.all_last >= last_query && block.count == block.rows();
    seen_.push_back({b, {}});
    if (whole) continue;
    uint32_t* const words = words_.at((b - epochs.first_block[epoch]) * kTile * kTileWords);
    if (rows_are_queries) {
      block_bits(epochs, block, first_query, by_key_.data());
      bit_math().transpose(by_key_.data(), kTileWords, words, kTileWords);
    } else {
      block_bits(epochs, block, first_query, words);
    }
    seen_.back().visible = {words, kTileWords};
  }
}

template <typename T>
void GatheredBias<T>::fill(const Problem& problem, const Packing& packing, const Epochs& epochs,
                           const PackedItem& item) {
  const Bias& bias = problem.bias;
  if (!bias) return;
  const int64_t last_head = item.first_head + packing.heads_of_unit - 1;
  first = broadcast_head(item.first_head, problem.heads, bias.heads);
  const int64_t last = broadcast_head(last_head, problem.heads, bias.heads);
  rows = epochs.rows(item.epoch);
  values.assign(static_cast<size_t>((last - first + 1) * rows), T(0));
  const TileMath<T>& math = tile_math<T>();
  for (int64_t head = first; head <= last; ++head) {
    for (int64_t b = epochs.first_block[item.epoch]; b < epochs.first_block[item.epoch + 1]; ++b) {
      const Block& block = epochs.blocks[b];
      T* const target = values.data() + (head - first) * rows + block.first_row;
      for (int64_t r = 0; r < block.count; ++r)
        math.load(bias.at(item.batch, head, 0, epochs.pieces[block.first_piece + r].key), bias.element, 1, target + r);
    }
  }
}

template struct GatheredBias<float>;
template struct GatheredBias<double>;

}  // namespace dmattn

#include "intervals.h"


#include <algorithm>
#include <cstring>

#include "problem.h"
#include "schedule.h"
#include "visibility.h"

namespace dmattn {

Intervals::Intervals(const int32_t* start, const int32_t* end, const int32_t* hidden_from, const int32_t* hidden_to,
                     int64_t keys, int64_t queries)
    : start_(start), end_(end), hidden_from_(hidden_from), hidden_to_(hidden_to), keys_(keys), queries_(queries) {
  const int64_t tiles = ceil_div(keys, kTile);
  hulls_.reserve(static_cast<size_t>(tiles));
  for (int64_t tile = 0; tile < tiles; ++tile) hulls_.push_back(hull(tile));
}

Intervals::Span Intervals::visible(int64_t key) const {
  return {std::max<int64_t>(0, start_[key]), std::min<int64_t>(queries_, end_[key])};
}

Intervals::Span Intervals::hidden(int64_t key) const {
  if (!hidden_from_) return {0, 0};
  return {std::max<int64_t>(0, hidden_from_[key]), std::min<int64_t>(queries_, hidden_to_[key])};
}

Intervals::Hull Intervals::hull(int64_t key_tile) const {
  Hull hull{{queries_, 0}, {0, queries_}, {queries_, 0}, {0, queries_}};
  const int64_t last_key = std::min(keys_, (key_tile + 1) * kTile);
  bool all = last_key == (key_tile + 1) * kTile;
  for (int64_t key = key_tile * kTile; key < last_key; ++key) {
    const Span seen = visible(key);
    if (seen.empty()) {
      all = false;
      continue;
    }
    hull.any = {std::min(hull.any.first, seen.first), std::max(hull.any.last, seen.last)};
    hull.all = {std::max(hull.all.first, seen.first), std::min(hull.all.last, seen.last)};
    const Span without = hidden(key);
    hull.all_hidden = {std::max(hull.all_hidden.first, without.first), std::min(hull.all_hidden.last, without.last)};
    if (!without.empty())
      hull.some_hidden = {std::min(hull.some_hidden.first, without.first),
                          std::max(hull.some_hidden.last, without.last)};
  }
  if (!all) hull.all = {0, 0};
  return hull;
}

Intervals::Kind Intervals::kind(int64_t key_tile, int64_t query_tile) const {
  const Hull& hull = hulls_[key_tile];
  const int64_t first = query_tile * kTile, last = std::min(queries_, first + kTile);
  const auto holds = [&](const Span& span) { return span.first <= first && last <= span.last; };
  const auto meets = [&](const Span& span) { return std::max(span.first, first) < std::min(span.last, last); };
  if (!meets(hull.any) || holds(hull.all_hidden)) return Kind::empty;
  return holds(hull.all) && !meets(hull.some_hidden) ? Kind::full : Kind::partial;
}

std::pair<int64_t, int64_t> Intervals::query_tiles(int64_t key_tile) const {
  const Span& any = hulls_[key_tile].any;
  if (any.empty()) return {0, 0};
  return {any.first / kTile, ceil_div(any.last, kTile)};
}

bool Intervals::key_rows(int64_t key_tile, int64_t query_tile, const Band& band, uint32_t* words) const {
  const int64_t first_query = query_tile * kTile, queries = std::min(kTile, queries_ - first_query);
  const int64_t first_key = key_tile * kTile, keys = std::min(kTile, keys_ - first_key);
  uint32_t any = 0;
  for (int64_t r = 0; r < keys; ++r) {
    uint32_t* const row = words + r * kTileWords;
    const int64_t key = first_key + r;
    const Span seen = visible(key), without = hidden(key);
    const int64_t first = std::max(seen.first, key - band.hi), last = std::min(seen.last, key - band.lo + 1);
    range_bits(first - first_query, std::min(queries, last - first_query), row);
    if (!without.empty()) {
      uint32_t gone[kTileWords];
      range_bits(without.first - first_query, without.last - first_query, gone);
      for (int64_t w = 0; w < kTileWords; ++w) row[w] &= ~gone[w];
    }
    for (int64_t w = 0; w < kTileWords; ++w) any |= row[w];
  }
  std::fill(words + keys * kTileWords, words + kTile * kTileWords, 0u);
  return any != 0;
}

std::vector<Piece> Intervals::pieces(const Band& band) const {
  std::vector<Piece> found;
  found.reserve(static_cast<size_t>(keys_));
  const auto add = [&](int64_t key, int64_t first, int64_t last) {
    first = std::max(first, key - band.hi);
    last = std::min(last, key - band.lo + 1);
    if (first < last)
      found.push_back({static_cast<int32_t>(key), static_cast<int32_t>(first), static_cast<int32_t>(last)});
  };
  for (int64_t key = 0; key < keys_; ++key) {
    const Span seen = visible(key), without = hidden(key);
    if (without.empty()) {
      add(key, seen.first, seen.last);
    } else {
      add(key, seen.first, std::min(seen.last, without.first));
      add(key, std::max(seen.first, without.last), seen.last);
    }
  }
  // Counted, not compared: by the first query, and equal ones in the order of their keys.
  std::vector<int64_t> place(static_cast<size_t>(queries_ + 1), 0);
  for (const Piece& piece : found) ++place[piece.first + 1];
  for (int64_t query = 0; query < queries_; ++query) place[query + 1] += place[query];
  std::vector<Piece> sorted(found.size());
  for (const Piece& piece : found) sorted[place[piece.first]++] = piece;
  return sorted;
}

int64_t most_visible(const std::vector<Piece>& pieces, int64_t queries) {
  std::vector<int64_t> change(static_cast<size_t>(queries + 1), 0);
  for (const Piece& piece : pieces) {
    ++change[piece.first];
    --change[piece.last];
  }
  int64_t seen = 0, most = 0;
  for (int64_t query = 0; query < queries; ++query) most = std::max(most, seen += change[query]);
  return most;
}

void check_promise(const Problem& problem, int64_t at_most) {
  if (problem.batch == 0) return;
  for_each_item(static_cast<int64_t>(problem.intervals.size()), [&] {
    return [&](int64_t index) {
      const Intervals& head = problem.intervals[index];
      const int64_t most = most_visible(head.pieces(problem.sequence(0).band), head.queries());
      DMATTN_CHECK_VALUE(most <= at_most, "at_most promised that no query sees more than ", at_most,
                        " keys of a head, but one sees ", most);
    };
  });
}

}  // namespace dmattn

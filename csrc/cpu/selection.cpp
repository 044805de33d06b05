// A heap of the best keys of a document, worst on top: the key that leaves it is not seen from that query on.
#include "selection.h"


#include <bit>
#include <limits>
#include <type_traits>

#include "check.h"
#include "schedule.h"

namespace dmattn {
namespace {

// The place of a score among all scores as an unsigned number, the best first: -0 is 0, NaN is behind -inf.
template <typename Word, typename Float>
Word place_of(Float score) {
  constexpr Word sign = Word{1} << (std::numeric_limits<Word>::digits - 1);
  Word bits = std::bit_cast<Word>(score);
  if (bits == sign) bits = 0;
  const Word infinity = std::bit_cast<Word>(std::numeric_limits<Float>::infinity());
  if ((bits & ~sign) > infinity) return ~Word{0};
  return ~((bits & sign) ? ~bits : (bits | sign));
}

// A key of a row, in the order of its score and, of equal scores, its position: a smaller one is better.
class Key {
 public:
  Key() = default;
  Key(float score, int64_t position)
      : word_(uint64_t{place_of<uint32_t>(score)} << 32 | static_cast<uint64_t>(position)) {}

  int64_t position() const { return static_cast<int64_t>(word_ & 0xFFFFFFFFu); }
  bool operator<(const Key& other) const { return word_ < other.word_; }

 private:
  uint64_t word_;
};

class DoubleKey {
 public:
  DoubleKey() = default;
  DoubleKey(double score, int64_t position) : place_(place_of<uint64_t>(score)), position_(position) {}

  int64_t position() const { return position_; }
  bool operator<(const DoubleKey& other) const {
    return place_ < other.place_ || (place_ == other.place_ && position_ < other.position_);
  }

 private:
  uint64_t place_;
  int64_t position_;
};

// Put `key` in the place of the largest key of a heap, the first.
template <typename K>
void replace_first(std::vector<K>& heap, K key) {
  const size_t size = heap.size();
  size_t at = 0;
  for (size_t child = 1; child < size; child = 2 * at + 1) {
    if (child + 1 < size && heap[child] < heap[child + 1]) ++child;
    if (!(key < heap[child])) break;
    heap[at] = heap[child];
    at = child;
  }
  heap[at] = key;
}

struct Rule {
  int64_t keep, keep_first, keep_last;
  bool is_causal;
};

// One document of a row: keys `first` to `last - 1`.
struct Document {
  int64_t first, last;
  int32_t *start, *end;  // of the row

  // Note that `key` is not among the best from query `death` on; `death` is `last` for a key that stays.
  void write(int64_t key, int64_t death, const Rule& rule) const {
    const bool stays = death == last || key - first < rule.keep_first;
    int64_t begin = key, stop = stays ? last : std::min(last, std::max(death, key + rule.keep_last));
    if (!rule.is_causal) {
      begin = first;
      stop = stays ? last : first;
    }
    start[key] = static_cast<int32_t>(begin);
    end[key] = static_cast<int32_t>(stop);
  }
};

template <typename K, typename T>
void select(const T* scores, int64_t stride, const Document& document, const Rule& rule, std::vector<K>& heap) {
  using Float = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const auto key_at = [&](int64_t j) { return K(static_cast<Float>(scores[j * stride]), j); };
  heap.clear();
  const int64_t filled = std::min(document.last, document.first + rule.keep);
  for (int64_t j = document.first; j < filled; ++j) heap.push_back(key_at(j));
  std::make_heap(heap.begin(), heap.end());
  for (int64_t j = filled; j < document.last; ++j) {
    const K key = key_at(j);
    if (heap.empty() || heap.front() < key) {
      document.write(j, j, rule);
    } else {
      document.write(heap.front().position(), j, rule);
      replace_first(heap, key);
    }
  }
  for (const K& key : heap) document.write(key.position(), document.last, rule);
}

void check(const Tensor& scores, const MaybeTensor& documents, const Rule& rule, const Tensor& start,
           const Tensor& end) {
  check_memory("scores", scores);
  check_memory("start", start);
  check_memory("end", end);
  if (documents.has_value()) check_memory("documents", *documents);
  DMATTN_CHECK_VALUE(scores.dim() == 3, "scores must have 3 dimensions, got ", scores.dim());
  const int64_t seqlen = scores.size(2);
  DMATTN_CHECK_VALUE(seqlen <= std::numeric_limits<int32_t>::max(), "scores have too many keys: ", seqlen);
  for (const Tensor* output : {&start, &end}) {
    DMATTN_CHECK_TYPE(output->scalar_type() == kInt, "start and end must be int32");
    DMATTN_CHECK_VALUE(output->is_contiguous() && output->is_cpu(), "start and end must be contiguous, on the CPU");
    DMATTN_CHECK_VALUE(output->dim() == 3 && output->size(1) == scores.size(1) && output->size(2) == seqlen &&
                          output->size(0) == start.size(0),
                      "start and end must have shape [B, ", scores.size(1), ", ", seqlen, "], got ", output->sizes());
  }
  const auto fits = [&](int64_t batch) { return batch == 1 || batch == start.size(0); };
  DMATTN_CHECK_VALUE(fits(scores.size(0)) && scores.is_cpu(), "scores must have batch 1 or ", start.size(0),
                    " and lie on the CPU, got ", scores.sizes());
  if (documents.has_value()) {
    DMATTN_CHECK_TYPE(documents->scalar_type() == kBool || is_integral(documents->scalar_type()), "documents must be integers");
    DMATTN_CHECK_VALUE(documents->dim() == 2 && documents->size(1) == seqlen && fits(documents->size(0)) &&
                          documents->is_cpu(),
                      "documents must have shape [", start.size(0), " or 1, ", seqlen, "] and lie on the CPU, got ",
                      documents->sizes());
  }
  DMATTN_CHECK_VALUE(rule.keep >= 0 && rule.keep_first >= 0 && rule.keep_last >= 0,
                    "keep, keep_first and keep_last must not be negative");
  DMATTN_CHECK_VALUE(rule.is_causal || rule.keep_last == 0, "keep_last must be 0 where queries see later keys");
}

template <typename T>
void lifetimes_of(const Tensor& scores, const MaybeTensor& ids, const Rule& rule, const Tensor& start,
                  const Tensor& end) {
  using K = std::conditional_t<std::is_same_v<T, double>, DoubleKey, Key>;
  const int64_t heads = start.size(1), seqlen = start.size(2);
  const int64_t batch_stride = scores.size(0) == 1 ? 0 : scores.stride(0);
  const int64_t head_stride = scores.stride(1), key_stride = scores.stride(2);
  const int64_t ids_stride = ids.has_value() && ids->size(0) > 1 ? seqlen : 0;
  const int64_t* all_ids = ids.has_value() ? ids->const_data_ptr<int64_t>() : nullptr;
  const T* all_scores = scores.const_data_ptr<T>();
  int32_t *starts = start.mutable_data_ptr<int32_t>(), *ends = end.mutable_data_ptr<int32_t>();
  for_each_item(start.size(0) * heads, [&] {
    return [&, heap = std::vector<K>()](int64_t row) mutable {
      const int64_t b = row / heads, h = row % heads;
      const T* row_scores = all_scores + b * batch_stride + h * head_stride;
      const int64_t* row_ids = all_ids ? all_ids + b * ids_stride : nullptr;
      for (int64_t first = 0, last; first < seqlen; first = last) {
        last = row_ids ? first + 1 : seqlen;
        while (last < seqlen && row_ids[last] == row_ids[first]) ++last;
        select<K>(row_scores, key_stride, {first, last, starts + row * seqlen, ends + row * seqlen}, rule, heap);
      }
    };
  });
}

}  // namespace

void lifetimes(const Tensor& scores, const MaybeTensor& documents, int64_t keep, int64_t keep_first,
               int64_t keep_last, bool is_causal, const Tensor& start, const Tensor& end) {
  check(scores, documents, {keep, keep_first, keep_last, is_causal}, start, end);
  const int64_t seqlen = scores.size(2);
  const Rule rule{std::min(keep, seqlen), keep_first, std::min(keep_last, seqlen), is_causal};
  const MaybeTensor ids = contiguous_or_none(documents, kLong);
  switch (scores.scalar_type()) {
    case kDouble:
      return lifetimes_of<double>(scores, ids, rule, start, end);
    case kFloat:
      return lifetimes_of<float>(scores, ids, rule, start, end);
    case kHalf:
      return lifetimes_of<c10::Half>(scores, ids, rule, start, end);
    case kBFloat16:
      return lifetimes_of<c10::BFloat16>(scores, ids, rule, start, end);
    default:
      refuse("TypeError: ", "scores must be float64, float32, float16 or bfloat16, got ", scores.scalar_type());
  }
}

}  // namespace dmattn

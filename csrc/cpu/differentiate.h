// The backward of one pair of tiles: five products, scores held transposed ([keys][queries]), so that dk and dv need no
// transposition and only dS is turned, for dq.
#pragma once

#include "product.h"
#include "kernels.h"
#include "strips.h"
#include "tile_pack.h"
#include "visibility.h"

namespace dmattn {

// Sums of dbias: contiguous, the shape of bias, in the compute type. `data` is null where nobody asked.
template <typename T>
struct BiasGradient {
  T* data = nullptr;
  int64_t heads = 1, batch_stride = 0, head_stride = 0, row_stride = 0;  // elements, 0 in broadcast dimensions
  bool per_batch = true, per_kv_head = true;  // false: pairs that differ there share elements

  T* at(int64_t batch, int64_t head, int64_t row, int64_t key) const {
    return data + batch * batch_stride + head * head_stride + row * row_stride + key;
  }
};

template <typename T>
struct BackwardCall {
  const Problem& problem;
  Rows grad_out, out, dq, dk, dv;
  PerQuery<T> lse, lse_tail, grad_lse;
  BiasGradient<T> dbias;
  bool direct_bias = true;  // no sums are to be copied to dbias

  // `sums` receives the accumulator of dbias: dbias itself where its dtype and layout allow.
  BackwardCall(const Problem& problem, const Gradients& gradients, MaybeTensor& sums);
};

// A tile of queries as the backward reads it, in a piece of memory of `size` elements: rows are [kTile][width], columns
// [width][kTile].
template <typename T>
struct QueryPanel {
  T *rows, *columns, *grad_rows, *grad_columns, *lse, *lse_tail, *delta;  // lse is +inf for empty rows

  static int64_t size(int64_t width, int64_t value_width) { return (2 * (width + value_width) + 3) * kTile; }
  QueryPanel(T* memory, int64_t width, int64_t value_width)
      : rows(memory),
        columns(rows + kTile * width),
        grad_rows(columns + kTile * width),
        grad_columns(grad_rows + kTile * value_width),
        lse(grad_columns + kTile * value_width),
        lse_tail(lse + kTile),
        delta(lse_tail + kTile) {}

  // Load a tile of `head`; `scratch` has room for two tiles of values. Returns whether query and grad_out are finite.
  bool fill(const BackwardCall<T>& call, int64_t batch, int64_t head, int64_t tile, T* scratch) const;
};

// A bias or its gradient at the first query and the first key of a tile, which lie one after another.
template <typename T>
struct TileBias {
  const char* bias = nullptr;
  Element element = Element::f32;
  int64_t row_stride = 0;  // bytes; 0: the same for each query
  T* grad = nullptr;
  int64_t grad_row_stride = 0;
};

// A pair of tiles, and where its gradients are added.
template <typename T>
struct TilePair {
  int64_t batch, head, first_query, queries, keys;  // queries and keys: how many
  KeyPositions positions;
  const QueryPanel<T>& panel;
  const T *key, *value;  // rows
  T *dk, *dv, *dq;
  bool has_keys, has_dq;  // whether dk and dv, and dq, hold sums; they are uninitialised else
  bool finite_keys, finite_queries;
  TileBias<T> bias;
};

template <typename T>
class Differentiate {
 public:
  Differentiate(const Problem& problem) : problem_(problem) {}

  void operator()(const TilePair<T>& pair, const Bits& visible) {
    const int64_t rows = padded_extent(pair.keys), cols = padded_extent(pair.queries);
    const Strips strips(visible, rows, cols);
    const bool whole = strips.whole(rows, cols);
    if (!whole && !pair.has_keys) {
      std::fill_n(pair.dk, rows * width_, T(0));
      std::fill_n(pair.dv, rows * value_width_, T(0));
    }
    if (!whole && !pair.has_dq) std::fill_n(pair.dq, cols * width_, T(0));
    if (pair.bias.bias && !strips.empty()) load_bias(pair, rows, cols);
    Bits keep;
    if (const Dropout& dropout = problem_.dropout) {
      dropout_bits(dropout, dropout.seed(pair.batch, pair.head), pair.first_query, pair.queries, pair.positions,
                   turned_bits_.data());
      bit_math().transpose(turned_bits_.data(), kTileWords, keep_.data(), kTileWords);
      keep = {keep_.data(), kTileWords};
    }
    for (const Strip& strip : strips)
      differentiate(pair, strip, visible.from_row(strip.first_row), keep.from_row(strip.first_row),
                    {pair.has_keys || !whole, pair.has_dq || !whole});
  }

 private:
  // Whether sums are added to what is there.
  struct Added {
    bool keys, dq;
  };

  // Rows of a strip are keys, columns are queries.
  void differentiate(const TilePair<T>& pair, const Strip& strip, const Bits& visible, const Bits& keep, Added added) {
    const auto [first_key, rows, columns] = strip;
    const int64_t cols = columns.count(), first_query = columns.first;
    const T* const key = pair.key + first_key * width_;
    T *const scores = scores_.at(strip.at(kTile)), *const grad_scores = grad_scores_.at(strip.at(kTile));
    math_.product(rows, cols, width_, key, width_, pair.panel.columns + first_query, kTile, false, scores, kTile);
    math_.product(rows, cols, value_width_, pair.value + first_key * value_width_, value_width_,
                  pair.panel.grad_columns + first_query, kTile, false, grad_scores, kTile);
    const T factor = finish_scores(pair, strip);
    math_.gradient_step(scores - first_query, grad_scores - first_query, rows, columns, factor, visible, keep,
                        static_cast<T>(problem_.dropout.scale),
                        {pair.panel.lse, pair.panel.lse_tail, pair.panel.delta});
    product(pair.finite_queries, rows, value_width_, cols, scores, pair.panel.grad_rows + first_query * value_width_,
            added.keys, pair.dv + first_key * value_width_);
    if (pair.bias.grad) add_bias_gradient(pair, strip);
    if (problem_.softcap != 0) math_.multiply(grad_scores, slope_.at(strip.at(kTile)), rows, cols);
    product(pair.finite_queries, rows, width_, cols, grad_scores, pair.panel.rows + first_query * width_, added.keys,
            pair.dk + first_key * width_);
    math_.transpose(grad_scores, kTile, rows, cols, scores_.data(), kTile);
    product(pair.finite_keys, cols, width_, rows, scores_.data(), key, added.dq, pair.dq + first_query * width_);
  }

  // sums [rows][width] += weights [rows][kTile] * values [inner][width].
  void product(bool finite, int64_t rows, int64_t width, int64_t inner, const T* weights, const T* values,
               bool accumulate, T* sums) const {
    if (finite)
      math_.product(rows, width, inner, weights, kTile, values, width, accumulate, sums, width);
    else
      product_of_nonzero(rows, width, inner, weights, kTile, values, width, accumulate, sums, width);
  }

  // Load the bias of a pair of tiles: of its keys into bias_, or of keys and queries into turned_.
  void load_bias(const TilePair<T>& pair, int64_t rows, int64_t cols) {
    const TileBias<T>& bias = pair.bias;
    if (bias.row_stride == 0) {
      std::fill(bias_.at(pair.keys), bias_.at(rows), T(0));
      math_.load(bias.bias, bias.element, pair.keys, bias_.data());
      return;
    }
    std::fill(bias_.data(), bias_.at(kTile * kTile), T(0));
    for (int64_t r = 0; r < pair.queries; ++r)
      math_.load(bias.bias + r * bias.row_stride, bias.element, pair.keys, bias_.at(r * kTile));
    math_.transpose(bias_.data(), kTile, cols, rows, turned_.data(), kTile);
  }

  // Softcap and bias; returns the factor that the scores are still to be multiplied by.
  T finish_scores(const TilePair<T>& pair, const Strip& strip) {
    constexpr Element own = sizeof(T) == 8 ? Element::f64 : Element::f32;
    const int64_t at = strip.at(kTile), cols = strip.columns.count();
    T factor = in_range<T>(problem_.scale);
    if (problem_.softcap != 0) {
      math_.cap(scores_.at(at), strip.rows, cols, softcap_, slope_.at(at));
      factor = 1;
    }
    if (!pair.bias.bias) return factor;
    if (pair.bias.row_stride == 0)
      math_.add_row_bias(scores_.at(at), strip.rows, cols, factor, bias_.at(strip.first_row));
    else
      math_.add_bias(scores_.at(at), strip.rows, cols, factor, turned_.at(at), own, kTile * int64_t{sizeof(T)});
    return 1;
  }

  // dbias += dS, over the bias's own shape; only this item touches these elements.
  void add_bias_gradient(const TilePair<T>& pair, const Strip& strip) {
    const TileBias<T>& bias = pair.bias;
    const auto [first_key, rows, columns] = strip;
    const T* const grad_scores = grad_scores_.at(strip.at(kTile));
    const int64_t keys = std::min(rows, pair.keys - first_key);
    if (bias.grad_row_stride == 0)
      return math_.add_row_sums(bias.grad + first_key, grad_scores, keys, columns.count());
    math_.transpose(grad_scores, kTile, rows, columns.count(), bias_.at(columns.first * kTile), kTile);
    for (int64_t r = columns.first; r < std::min(columns.last, pair.queries); ++r)
      math_.add(bias.grad + r * bias.grad_row_stride + first_key, bias_.at(r * kTile), keys);
  }

  const Problem& problem_;
  const TileMath<T>& math_ = tile_math<T>();
  const SoftCap<T> softcap_ = softcap_of<T>(problem_);
  const int64_t width_ = padded_width(problem_.dim), value_width_ = padded_width(problem_.value_dim);
  Buffer<T> scores_{kTile * kTile}, grad_scores_{kTile * kTile};
  Buffer<T> slope_{problem_.softcap != 0 ? kTile * kTile : 0};
  Buffer<T> bias_{problem_.bias ? kTile * kTile : 0}, turned_{problem_.bias ? kTile * kTile : 0};
  Buffer<uint32_t> keep_{kTile * kTileWords}, turned_bits_{kTile * kTileWords};
};

// Write a row of a gradient from its sums, or zeros where there are none.
template <typename T>
void store_gradient(const T* sums, T factor, const Rows& target, int64_t batch, int64_t row, int64_t head) {
  char* const at = target.at(batch, row, head);
  if (sums)
    tile_math<T>().store(sums, factor, target.width, at, target.element);
  else
    std::memset(at, 0, static_cast<size_t>(target.width * element_size(target.element)));
}

}  // namespace dmattn

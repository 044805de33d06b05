#include "sinks.h"

#include "schedule.h"

namespace dmattn {
namespace {

template <typename T>
std::vector<T> logits(const Tensor& sink) {
  const Tensor held = contiguous_as(sink, sink.scalar_type());
  std::vector<T> values(static_cast<size_t>(held.numel()));
  tile_math<T>().load(held.const_data_ptr(), element_of(held), held.numel(), values.data());
  return values;
}

// lse - sink, -inf for a row without visible keys.
template <typename T>
T log_odds(T lse, T sink) {
  return lse == -std::numeric_limits<T>::infinity() ? lse : lse - sink;
}

template <typename T>
T sigmoid(T x) {
  return 1 / (1 + std::exp(-x));
}

// ln(sigmoid(x)), without loss where the exponential is large or small.
template <typename T>
T log_sigmoid(T x) {
  return std::min<T>(x, 0) - std::log1p(std::exp(-std::abs(x)));
}

struct RowCount {
  int64_t batch, heads, rows;
  explicit RowCount(const Tensor& lse)
      : batch(lse.dim() == 2 ? 1 : lse.size(0)), heads(lse.size(-2)), rows(lse.size(-1)) {}
};

template <typename T>
void take_share_of(const Tensor& sink, const Tensor& out, const Tensor& lse) {
  const RowCount count(lse);
  const Rows rows = rows_of(out);
  const PerQuery<T> sums = per_query_of<T>(lse);
  const std::vector<T> sinks = logits<T>(sink);
  for_each_item(count.batch * count.heads, [&] {
    return [&, row = std::vector<T>(static_cast<size_t>(rows.width))](int64_t item) mutable {
      const int64_t b = item / count.heads, h = item % count.heads;
      for (int64_t i = 0; i < count.rows; ++i) {
        char* const at = rows.at(b, i, h);
        tile_math<T>().load(at, rows.element, rows.width, row.data());
        tile_math<T>().store(row.data(), sigmoid(log_odds(sums.at(b, h, i), sinks[h])), rows.width, at, rows.element);
      }
    };
  });
}

template <typename T>
void sink_gradient_of(const Tensor& sink, const Tensor& grad_out, const Tensor& out, const Tensor& lse,
                      const Tensor& dsink) {
  const RowCount count(lse);
  const Rows grads = rows_of(grad_out), outs = rows_of(out);
  const PerQuery<T> sums = per_query_of<T>(lse);
  const std::vector<T> sinks = logits<T>(sink);
  std::vector<T> gradient(sinks.size());
  for_each_item(count.heads, [&] {
    return [&, grad_row = std::vector<T>(static_cast<size_t>(outs.width)),
            out_row = std::vector<T>(static_cast<size_t>(outs.width))](int64_t h) mutable {
      double total = 0;
      for (int64_t b = 0; b < count.batch; ++b) {
        for (int64_t i = 0; i < count.rows; ++i) {
          const T odds = log_odds(sums.at(b, h, i), sinks[h]);
          // An empty row gives nothing, not even where its grad_out is NaN.
          if (sums.at(b, h, i) == -std::numeric_limits<T>::infinity()) continue;
          tile_math<T>().load(grads.at(b, i, h), grads.element, grads.width, grad_row.data());
          tile_math<T>().load(outs.at(b, i, h), outs.element, outs.width, out_row.data());
          double product = 0;
          for (size_t k = 0; k < out_row.size(); ++k) product += double{grad_row[k]} * out_row[k];
          total -= sigmoid<double>(-odds) * product;
        }
      }
      gradient[h] = static_cast<T>(total);
    };
  });
  tile_math<T>().store(gradient.data(), 1, static_cast<int64_t>(gradient.size()), dsink.mutable_data_ptr(),
                       element_of(dsink));
}

template <typename T>
Tensor tail_of(const Tensor& sink, const Tensor& lse, const Tensor& lse_tail) {
  const RowCount count(lse);
  const Tensor made = torch::stable::new_empty(lse_tail, lse_tail.sizes());
  const PerQuery<T> sums = per_query_of<T>(lse), tails = per_query_of<T>(lse_tail), written = per_query_of<T>(made);
  const std::vector<T> sinks = logits<T>(sink);
  for (int64_t b = 0; b < count.batch; ++b)
    for (int64_t h = 0; h < count.heads; ++h)
      for (int64_t i = 0; i < count.rows; ++i) {
        const T sum = sums.at(b, h, i), tail = tails.at(b, h, i);
        const bool empty = sum == -std::numeric_limits<T>::infinity();
        written.at(b, h, i) = empty ? tail : tail - log_sigmoid(sum - sinks[h]);
      }
  return made;
}

}  // namespace

void take_share(const Tensor& sink, const Tensor& out, const Tensor& lse) {
  lse.scalar_type() == kDouble ? take_share_of<double>(sink, out, lse) : take_share_of<float>(sink, out, lse);
}

void sink_gradient(const Tensor& sink, const Tensor& grad_out, const Tensor& out, const Tensor& lse,
                   const Tensor& dsink) {
  lse.scalar_type() == kDouble ? sink_gradient_of<double>(sink, grad_out, out, lse, dsink)
                               : sink_gradient_of<float>(sink, grad_out, out, lse, dsink);
}

Tensor tail_with_sinks(const Tensor& sink, const Tensor& lse, const Tensor& lse_tail) {
  return lse.scalar_type() == kDouble ? tail_of<double>(sink, lse, lse_tail) : tail_of<float>(sink, lse, lse_tail);
}

}  // namespace dmattn

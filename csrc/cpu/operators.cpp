// The operators `dmattn::*` for programs without Python: read, refuse, allocate and run, as dmattn_ops/dispatch does.
//
// A process defines the namespace once. Where Python runs, the package dmattn_ops does it when it is imported; everywhere
// else this library does, when it is loaded.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <unordered_set>

#include "check.h"
#include "kernels.h"
#include "schemas.h"
#include "selection.h"
#include "sinks.h"

namespace dmattn {
namespace {

constexpr int64_t kLargestHeadDim = 1024;                   // as in checks/validation.py
constexpr int64_t kHeader = 4;                              // words of a record before its indices
constexpr double kLargest = 3.4028234663852886e38, kSmallest = 1.1754943508222875e-38;  // of float32

// The arguments of a call, in the order of its schema; all of them have to be taken, whatever is wrong with one.
class Taken {
 public:
  explicit Taken(StableIValue* stack) : next_(stack) {}

  Tensor tensor() { return next<Tensor>(); }
  MaybeTensor maybe_tensor() { return next<MaybeTensor>(); }
  int64_t integer() { return next<int64_t>(); }
  std::optional<int64_t> maybe_integer() { return next<std::optional<int64_t>>(); }
  double number() { return next<double>(); }
  std::optional<double> maybe_number() { return next<std::optional<double>>(); }
  bool flag() { return next<bool>(); }

 private:
  template <typename T>
  T next() {
    return torch::stable::detail::to<T>(*next_++);
  }

  StableIValue* next_;
};

template <typename... T>
void give(StableIValue* stack, const T&... results) {
  ((*stack++ = torch::stable::detail::from(results)), ...);
}

Tensor rows(const Tensor& tensor) {
  return tensor.dim() == 0 || tensor.stride(-1) == 1 ? tensor : torch::stable::contiguous(tensor);
}

MaybeTensor rows(const MaybeTensor& tensor) { return tensor.has_value() ? MaybeTensor(rows(*tensor)) : std::nullopt; }

Tensor allocate(const Tensor& on, const std::vector<int64_t>& sizes, ScalarType type) {
  return torch::stable::new_empty(on, sizes, type);
}

Tensor allocate_like(const Tensor& tensor) { return torch::stable::new_empty(tensor, tensor.sizes()); }

Tensor nothing(const Tensor& on) { return torch::stable::new_empty(on, std::vector<int64_t>{0}); }

// What forward and backward have in common. Members stand in the order of the schemas.
struct Call {
  Tensor query, key, value;
  MaybeTensor cu_seqlens_q, cu_seqlens_k;
  MaybeTensor bias, row_tiles, col_tiles, row_bits, col_bits, q_segments, k_segments, start, end, hidden_from,
      hidden_to, key_mask, sink, seed;
  int64_t max_seqlen_q = 0, max_seqlen_k = 0, band_lo = 0, band_hi = 0, q_origin = 0, k_origin = 0;
  std::optional<int64_t> at_most;
  bool top_left = false;
  std::optional<double> softmax_scale;
  double softcap = 0, dropout_p = 0;

  void take_dense(Taken& taken) {
    for (MaybeTensor* part : {&bias, &row_tiles, &col_tiles, &row_bits, &col_bits, &q_segments, &k_segments, &start,
                              &end, &hidden_from, &hidden_to, &sink, &seed})
      *part = taken.maybe_tensor();
    take_limits(taken);
    at_most = taken.maybe_integer();
    take_scalars(taken);
  }

  void take_varlen(Taken& taken) {
    cu_seqlens_q = taken.tensor();
    cu_seqlens_k = taken.tensor();
    for (MaybeTensor* part : {&bias, &key_mask, &sink, &seed}) *part = taken.maybe_tensor();
    max_seqlen_q = taken.integer();
    max_seqlen_k = taken.integer();
    take_limits(taken);
    top_left = taken.flag();
    take_scalars(taken);
  }

  bool is_empty() const { return query.numel() == 0 || key.numel() == 0; }
  ScalarType wide() const { return query.scalar_type() == kDouble ? kDouble : kFloat; }

  Arguments arguments() const {
    const double threshold = std::max(std::nearbyint(dropout_p * 0x1p32), dropout_p > 0 ? 1.0 : 0.0);
    const double kept = 0x1p32 - threshold;
    return {query,      key,        value,      bias,         row_tiles,     col_tiles,
            row_bits,   col_bits,   q_segments, k_segments,   start,         end,
            hidden_from, hidden_to, at_most,    seed,         cu_seqlens_q,  cu_seqlens_k,
            top_left,   band_lo,    band_hi,    q_origin,     k_origin,      *softmax_scale,
            softcap,    static_cast<int64_t>(threshold),      kept == 0 ? 0 : 0x1p32 / kept};
  }

  // Refuse what does not fit, and bring the rest into the form that kernels take.
  void prepare();

 private:
  void take_limits(Taken& taken) {
    for (int64_t* number : {&band_lo, &band_hi, &q_origin, &k_origin}) *number = taken.integer();
  }
  void take_scalars(Taken& taken) {
    softmax_scale = taken.maybe_number();
    softcap = taken.number();
    dropout_p = taken.number();
    [[maybe_unused]] const bool deterministic = taken.flag();  // the CPU kernels always are
  }
  void check_numbers() const;
  void check_offsets(const char* name, const Tensor& offsets, int64_t total, const char* longest_name,
                     int64_t longest) const;
  void hide_masked_keys();
};

void Call::check_numbers() const {
  const double scale = *softmax_scale;
  DMATTN_CHECK_VALUE(std::abs(scale) <= kLargest, "softmax_scale must be finite, got ", scale);
  DMATTN_CHECK_VALUE(softcap == 0 || (softcap >= kSmallest && softcap <= kLargest),
                     "softcap must be finite and not negative, got ", softcap);
  DMATTN_CHECK_VALUE(dropout_p >= 0 && dropout_p <= 1, "dropout_p must be between 0 and 1, got ", dropout_p);
  for (const auto& [name, origin] : {std::pair{"q_origin", q_origin}, {"k_origin", k_origin}})
    DMATTN_CHECK_VALUE(origin >= 0 && origin < kUnbounded, name, " must be between 0 and ", kUnbounded - 1, ", got ",
                       origin);
}

void Call::check_offsets(const char* name, const Tensor& offsets, int64_t total, const char* longest_name,
                         int64_t longest) const {
  const Tensor held = contiguous_as(offsets, kLong);
  const int64_t* const at = held.const_data_ptr<int64_t>();
  const int64_t count = held.numel();
  DMATTN_CHECK_VALUE(at[0] == 0 && at[count - 1] <= total, name, " must go from 0 to at most ", total, ", got ", at[0],
                     " to ", at[count - 1]);
  for (int64_t b = 0; b + 1 < count; ++b) {
    DMATTN_CHECK_VALUE(at[b] <= at[b + 1], name, " must not decrease, got ", at[b], " before ", at[b + 1]);
    DMATTN_CHECK_VALUE(at[b + 1] - at[b] <= longest, longest_name, " must be at least the longest sequence, ",
                       at[b + 1] - at[b], ", got ", longest);
  }
}

// A mask of keys [H or Hkv or 1, total_k] as segments [1, heads, total_k]: 0 is visible, -1 hidden.
void Call::hide_masked_keys() {
  const Tensor mask = rows(*key_mask);
  check_memory("mask", mask);
  const int64_t total = key.size(0), heads = mask.dim() == 2 ? mask.size(0) : 0;
  DMATTN_CHECK_VALUE(
      mask.dim() == 2 && mask.size(1) == total && (heads == 1 || heads == key.size(1) || heads == query.size(1)),
      "mask must have shape [1 or ", key.size(1), " or ", query.size(1), ", ", total, "], got ", mask.sizes());
  const Tensor ids = allocate(mask, {1, heads, total}, kInt);
  const auto size = static_cast<int64_t>(mask.element_size());
  std::vector<uint32_t> words(static_cast<size_t>(ceil_div(total, 32)));
  for (int64_t h = 0; h < heads; ++h) {
    const char* const row = static_cast<const char*>(mask.const_data_ptr()) + h * mask.stride(0) * size;
    bit_math().nonzero(row, size, size, significant_bits(mask), total, words.data());
    int32_t* const written = ids.mutable_data_ptr<int32_t>() + h * total;
    for (int64_t j = 0; j < total; ++j) written[j] = static_cast<int32_t>(words[j >> 5] >> (j & 31) & 1) - 1;
  }
  k_segments = ids;
}

void Call::prepare() {
  check_memory("query", query);
  const int64_t rank = cu_seqlens_q.has_value() ? 3 : 4;
  DMATTN_CHECK_VALUE(query.dim() == rank, "query must have ", rank, " dimensions, got ", query.dim());
  check_memory("value", value);
  if (!softmax_scale.has_value()) softmax_scale = std::pow(static_cast<double>(query.size(-1)), -0.5);
  check_numbers();
  query = rows(query);
  key = rows(key);
  value = rows(value);
  bias = rows(bias);
  if (end.has_value() && !start.has_value()) {
    start = allocate_like(*end);
    fill(*start, 0);
  }
  if (key_mask.has_value()) hide_masked_keys();
  check_arguments(arguments());
  DMATTN_CHECK_VALUE(query.size(-1) >= 1 && value.size(-1) >= 1 && query.size(-1) <= kLargestHeadDim &&
                         value.size(-1) <= kLargestHeadDim,
                     "the last dimension of query and value must be between 1 and ", kLargestHeadDim, ", got ",
                     query.size(-1), " and ", value.size(-1));
  const auto check_like_query = [&](const char* name, const MaybeTensor& tensor) {
    if (!tensor.has_value()) return;
    const ScalarType type = tensor->scalar_type();
    DMATTN_CHECK_TYPE(type == kFloat || type == query.scalar_type(), name, " must be float32 or ", query.scalar_type(),
                      ", got ", type);
  };
  check_like_query("bias", bias);
  check_like_query("sink", sink);
  if (sink.has_value()) {
    check_memory("sink", *sink);
    DMATTN_CHECK_VALUE(sink->dim() == 1 && sink->size(0) == query.size(-2), "sink must have shape [", query.size(-2),
                       "], got ", sink->sizes());
  }
  if (cu_seqlens_q.has_value()) {
    check_offsets("cu_seqlens_q", *cu_seqlens_q, query.size(0), "max_seqlen_q", max_seqlen_q);
    check_offsets("cu_seqlens_k", *cu_seqlens_k, key.size(0), "max_seqlen_k", max_seqlen_k);
  }
}

// out, lse, lse_tail and row_max.
void run_forward(Call& call, bool needs_max, StableIValue* stack) {
  call.prepare();
  std::vector<int64_t> sizes(call.query.sizes().begin(), call.query.sizes().end());
  sizes.back() = call.value.size(-1);
  const Tensor out = allocate(call.query, sizes, call.query.scalar_type());
  sizes.pop_back();
  std::swap(sizes[sizes.size() - 1], sizes[sizes.size() - 2]);
  const Tensor lse = allocate(call.query, sizes, call.wide()), lse_tail = allocate_like(lse);
  const MaybeTensor row_max = needs_max ? MaybeTensor(allocate_like(lse)) : std::nullopt;
  if (call.is_empty()) {
    fill(out, 0);
    fill(lse_tail, 0);
    fill(lse, -std::numeric_limits<double>::infinity());
    if (row_max.has_value()) fill(*row_max, -std::numeric_limits<double>::infinity());
  } else {
    forward(call.arguments(), {out, lse, lse_tail, row_max});
    if (call.sink.has_value()) take_share(*call.sink, out, lse);
  }
  give(stack, out, lse, lse_tail, row_max.has_value() ? *row_max : nothing(lse));
}

// What a backward is given beside the call.
struct Given {
  Tensor grad_out;
  MaybeTensor grad_lse;
  Tensor out, lse, lse_tail;
};

// Write dq, dk and dv; return dbias and dsink, which are empty where they are not wanted.
std::pair<Tensor, Tensor> run_backward(Call& call, Given given, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                                       bool needs_dbias, bool needs_dsink) {
  const bool of_bias = needs_dbias && call.bias.has_value(), of_sink = needs_dsink && call.sink.has_value();
  const Tensor dbias = of_bias ? allocate_like(*call.bias) : nothing(call.query);
  const Tensor dsink = of_sink ? allocate_like(*call.sink) : nothing(call.query);
  if (call.is_empty()) {
    for (const Tensor* gradient : {&dq, &dk, &dv, &dbias, &dsink}) fill(*gradient, 0);
    return {dbias, dsink};
  }
  for (Tensor* tensor : {&given.grad_out, &given.out, &given.lse, &given.lse_tail}) *tensor = rows(*tensor);
  given.grad_lse = rows(given.grad_lse);
  const MaybeTensor wanted = of_bias ? MaybeTensor(dbias) : std::nullopt;
  const auto check = [&] {
    check_gradients(call.arguments(), {given.out, given.lse, given.lse_tail, given.grad_out, given.grad_lse, dq, dk, dv,
                                       wanted});
  };
  if (call.sink.has_value()) {
    check();
    if (of_sink) sink_gradient(*call.sink, given.grad_out, given.out, given.lse, dsink);
    if (given.grad_lse.has_value()) {
      // lse has no sinks: its gradient is one of probabilities without them.
      const Tensor scaled = allocate_like(given.grad_out);
      Tensor target = scaled;
      torch::stable::copy_(target, given.grad_out);
      take_share(*call.sink, scaled, given.lse);
      given.grad_out = scaled;
    } else {
      given.lse_tail = tail_with_sinks(*call.sink, given.lse, given.lse_tail);
    }
  }
  backward(call.arguments(), {given.out, given.lse, given.lse_tail, given.grad_out, given.grad_lse, dq, dk, dv, wanted});
  return {dbias, dsink};
}

void take_qkv(Taken& taken, Call& call) {
  for (Tensor* tensor : {&call.query, &call.key, &call.value}) *tensor = taken.tensor();
}

// Query, key and value of qkv [B, S, 3, H, D].
void split_qkv(const Tensor& qkv, Tensor& query, Tensor& key, Tensor& value) {
  check_memory("qkv", qkv);
  DMATTN_CHECK_VALUE(qkv.dim() == 5 && qkv.size(2) == 3, "qkv must have shape [B, S, 3, H, D], got ", qkv.sizes());
  const Tensor held = rows(qkv);
  query = torch::stable::select(held, 2, 0);
  key = torch::stable::select(held, 2, 1);
  value = torch::stable::select(held, 2, 2);
}

void forward_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  Call call;
  take_qkv(taken, call);
  call.take_dense(taken);
  const bool needs_max = taken.flag();
  run_forward(call, needs_max, stack);
}

void varlen_forward_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  Call call;
  take_qkv(taken, call);
  call.take_varlen(taken);
  const bool needs_max = taken.flag();
  run_forward(call, needs_max, stack);
}

void qkvpacked_forward_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  const Tensor qkv = taken.tensor();
  Call call;
  call.take_dense(taken);
  const bool needs_max = taken.flag();
  split_qkv(qkv, call.query, call.key, call.value);
  run_forward(call, needs_max, stack);
}

void take_grads(Taken& taken, Given& given) {
  given.grad_out = taken.tensor();
  given.grad_lse = taken.maybe_tensor();
}

void take_saved(Taken& taken, Given& given) {
  for (Tensor* tensor : {&given.out, &given.lse, &given.lse_tail}) *tensor = taken.tensor();
}

template <bool varlen>
void backward_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  Call call;
  Given given;
  take_grads(taken, given);
  take_qkv(taken, call);
  take_saved(taken, given);
  varlen ? call.take_varlen(taken) : call.take_dense(taken);
  const bool needs_dbias = taken.flag(), needs_dsink = taken.flag();
  call.prepare();
  const Tensor dq = allocate_like(call.query), dk = allocate_like(call.key), dv = allocate_like(call.value);
  const auto [dbias, dsink] = run_backward(call, given, dq, dk, dv, needs_dbias, needs_dsink);
  give(stack, dq, dk, dv, dbias, dsink);
}

void qkvpacked_backward_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  Call call;
  Given given;
  take_grads(taken, given);
  const Tensor qkv = taken.tensor();
  take_saved(taken, given);
  call.take_dense(taken);
  const bool needs_dbias = taken.flag(), needs_dsink = taken.flag();
  split_qkv(qkv, call.query, call.key, call.value);
  call.prepare();
  const Tensor dqkv = allocate_like(qkv);
  Tensor dq, dk, dv;
  split_qkv(dqkv, dq, dk, dv);
  const auto [dbias, dsink] = run_backward(call, given, dq, dk, dv, needs_dbias, needs_dsink);
  give(stack, dqkv, dbias, dsink);
}

// Masks.

int64_t tile_records(int64_t length) { return std::max<int64_t>(2, ceil_div(length, kTile)); }

// The most tiles of the other side that one tile can see inside the band (meta.list_capacity).
int64_t list_capacity(int64_t tiles, int64_t band_lo, int64_t band_hi) {
  if (-band_lo >= kUnbounded || band_hi >= kUnbounded) return tiles;
  const int64_t span = band_hi - band_lo + kTile;
  return std::max<int64_t>(0, std::min(tiles, ceil_div(span, kTile) + 1));
}

struct MaskResults {
  Tensor row_tiles, col_tiles, row_bits, col_bits;

  MaskResults(const Tensor& on, int64_t batch, int64_t heads, int64_t seqlen_q, int64_t seqlen_k, int64_t band_lo,
              int64_t band_hi, bool with_bits) {
    DMATTN_CHECK_VALUE(seqlen_q >= 0 && seqlen_q < kUnbounded, "seqlen_q must be between 0 and ", kUnbounded - 1,
                       ", got ", seqlen_q);
    band_lo = std::clamp(band_lo, -kUnbounded, kUnbounded);
    band_hi = std::clamp(band_hi, -kUnbounded, kUnbounded);
    const int64_t q = tile_records(seqlen_q), k = tile_records(seqlen_k);
    row_tiles = allocate(on, {batch, heads, q, kHeader + list_capacity(k, band_lo, band_hi)}, kInt);
    col_tiles = allocate(on, {batch, heads, k, kHeader + list_capacity(q, band_lo, band_hi)}, kInt);
    if (!with_bits) return;
    const int64_t q_tiles = ceil_div(seqlen_q, kTile), k_tiles = ceil_div(seqlen_k, kTile);
    row_bits = allocate(on, {batch, heads, q_tiles * kTile, k_tiles * kTileWords}, kInt);
    col_bits = allocate(on, {batch, heads, k_tiles * kTile, q_tiles * kTileWords}, kInt);
  }
};

// The greater of the sizes of some tensors; which other sizes there may be is checked later.
int64_t widest(std::initializer_list<const MaybeTensor*> tensors, int64_t dim) {
  int64_t most = 0;
  bool one = false;
  for (const MaybeTensor* tensor : tensors) {
    if (!tensor->has_value()) continue;
    DMATTN_CHECK_VALUE((*tensor)->dim() > dim, "a part of a mask has too few dimensions: ", (*tensor)->dim());
    one = one || (*tensor)->size(dim) == 1;
    if ((*tensor)->size(dim) != 1) most = std::max(most, (*tensor)->size(dim));
  }
  return most == 0 && one ? 1 : most;
}

void pack_mask_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  const MaybeTensor mask = taken.tensor(), q_segments = taken.maybe_tensor(), k_segments = taken.maybe_tensor();
  const int64_t seqlen_q = taken.integer(), band_lo = taken.integer(), band_hi = taken.integer();
  check_memory("mask", *mask);
  const int64_t batch = widest({&mask, &q_segments, &k_segments}, 0), heads = widest({&mask, &k_segments}, 1);
  const MaskResults made(*mask, batch, heads, seqlen_q, mask->size(-1), band_lo, band_hi, true);
  pack_mask(*mask, q_segments, k_segments, seqlen_q, band_lo, band_hi, made.row_tiles, made.col_tiles, made.row_bits,
            made.col_bits);
  give(stack, made.row_tiles, made.col_tiles, made.row_bits, made.col_bits);
}

void pack_intervals_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  const Tensor end = taken.tensor();
  const MaybeTensor start = taken.maybe_tensor(), hidden_from = taken.maybe_tensor();
  const MaybeTensor hidden_to = taken.maybe_tensor(), mask = taken.maybe_tensor();
  const MaybeTensor q_segments = taken.maybe_tensor(), k_segments = taken.maybe_tensor();
  const int64_t seqlen_q = taken.integer(), band_lo = taken.integer(), band_hi = taken.integer();
  check_memory("end", end);
  const MaybeTensor ends = end;
  const int64_t batch = widest({&ends, &mask, &q_segments, &k_segments}, 0);
  const int64_t heads = widest({&ends, &mask, &k_segments}, 1);
  const MaskResults made(end, batch, heads, seqlen_q, end.size(-1), band_lo, band_hi, true);
  pack_intervals({end, start, hidden_from, hidden_to}, mask, q_segments, k_segments, seqlen_q, band_lo, band_hi,
                 made.row_tiles, made.col_tiles, made.row_bits, made.col_bits);
  give(stack, made.row_tiles, made.col_tiles, made.row_bits, made.col_bits);
}

void list_tiles_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  const MaybeTensor q_segments = taken.maybe_tensor(), k_segments = taken.tensor();
  const int64_t seqlen_q = taken.integer(), band_lo = taken.integer(), band_hi = taken.integer();
  check_memory("k_segments", *k_segments);
  const int64_t batch = widest({&q_segments, &k_segments}, 0), heads = widest({&k_segments}, 1);
  const MaskResults made(*k_segments, batch, heads, seqlen_q, k_segments->size(-1), band_lo, band_hi, false);
  list_tiles(q_segments, *k_segments, seqlen_q, band_lo, band_hi, made.row_tiles, made.col_tiles);
  give(stack, made.row_tiles, made.col_tiles);
}

// Rows of ids [B, S].
struct Ids {
  Tensor held;
  int64_t batch, length;

  Ids(const char* name, const Tensor& ids) : batch(0), length(0) {
    check_memory(name, ids);
    DMATTN_CHECK_VALUE(ids.dim() == 2, name, " must have shape [B, S], got ", ids.sizes());
    DMATTN_CHECK_TYPE(is_integral(ids.scalar_type()), name, " must hold integers, got ", ids.scalar_type());
    held = contiguous_as(ids, kLong);
    batch = ids.size(0);
    length = ids.size(1);
  }
  const int64_t* row(int64_t b) const { return held.const_data_ptr<int64_t>() + b * length; }
};

void key_lifetimes_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  const MaybeTensor scores = taken.tensor(), documents = taken.maybe_tensor();
  const int64_t keep = taken.integer(), keep_first = taken.integer(), keep_last = taken.integer();
  const bool is_causal = taken.flag();
  check_memory("scores", *scores);
  DMATTN_CHECK_VALUE(scores->dim() == 3, "scores must have shape [B, heads, S], got ", scores->sizes());
  if (documents.has_value()) {
    const Ids ids("documents", *documents);
    for (int64_t b = 0; b < ids.batch; ++b) {
      std::unordered_set<int64_t> before;
      for (int64_t j = 0; j < ids.length; ++j) {
        const int64_t id = ids.row(b)[j];
        if (j > 0 && id == ids.row(b)[j - 1]) continue;
        DMATTN_CHECK_VALUE(before.insert(id).second, "documents must be contiguous runs of equal ids, got id ", id,
                           ", which returns at position ", j, " of row ", b, " after another one");
      }
    }
  }
  const int64_t batch = widest({&scores, &documents}, 0);
  const Tensor start = allocate(*scores, {batch, scores->size(1), scores->size(2)}, kInt), end = allocate_like(start);
  lifetimes(*scores, documents, keep, keep_first, keep_last, is_causal, start, end);
  give(stack, start, end);
}

void rank_ids_operator(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor given = Taken(stack).tensor();
  const Ids ids("ids", given);
  const Tensor ranks = allocate(given, {ids.batch, ids.length}, kInt);
  std::vector<int64_t> ordered;
  for (int64_t b = 0; b < ids.batch; ++b) {
    const int64_t* const row = ids.row(b);
    ordered.assign(row, row + ids.length);
    std::sort(ordered.begin(), ordered.end());
    ordered.erase(std::unique(ordered.begin(), ordered.end()), ordered.end());
    int32_t* const written = ranks.mutable_data_ptr<int32_t>() + b * ids.length;
    for (int64_t j = 0; j < ids.length; ++j)
      written[j] = static_cast<int32_t>(std::lower_bound(ordered.begin(), ordered.end(), row[j]) - ordered.begin());
  }
  give(stack, ranks);
}

void spread_lists_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  const Tensor counts = taken.tensor(), indices = taken.tensor();
  const int64_t columns = taken.integer();
  for (const auto& [name, tensor] : {std::pair{"counts", &counts}, {"indices", &indices}}) {
    check_memory(name, *tensor);
    DMATTN_CHECK_TYPE(tensor->scalar_type() == kInt, name, " must be int32, got ", tensor->scalar_type());
  }
  DMATTN_CHECK_VALUE(indices.dim() >= 1 && columns >= 0, "indices must have slots, and columns not be negative");
  std::vector<int64_t> sizes(indices.sizes().begin(), indices.sizes().end());
  const int64_t slots = sizes.back();
  sizes.pop_back();
  DMATTN_CHECK_VALUE(same_sizes(counts.sizes(), sizes), "counts must have shape ", Extents(sizes), ", got ",
                     counts.sizes());
  sizes.push_back(columns);
  const Tensor listed = allocate(indices, sizes, kBool);
  fill(listed, 0);
  const Tensor lists = contiguous_as(indices, kInt), lengths = contiguous_as(counts, kInt);
  const int32_t *const index = lists.const_data_ptr<int32_t>(), *const length = lengths.const_data_ptr<int32_t>();
  bool* const written = listed.mutable_data_ptr<bool>();
  for (int64_t list = 0; list < lengths.numel(); ++list)
    for (int64_t slot = 0; slot < std::min<int64_t>(slots, length[list]); ++slot) {
      const int64_t column = index[list * slots + slot];
      DMATTN_CHECK_VALUE(column >= 0 && column <= columns, "indices must be between 0 and ", columns, ", got ", column);
      if (column < columns) written[list * columns + column] = true;
    }
  give(stack, listed);
}

std::string mask_text(int64_t seqlen_q, int64_t seqlen_k, const std::vector<int64_t>& sizes) {
  std::ostringstream text;
  text << "lengths (" << seqlen_q << ", " << seqlen_k << "), band_lo " << sizes[0] / 2 - kUnbounded << ", band_hi "
       << sizes[2] - kUnbounded << ", at_most ";
  sizes[3] ? text << sizes[3] - 1 : text << "None";
  text << ", from_bottom_right " << (sizes[0] % 2 ? "True" : "False");
  return text.str();
}

// A copy of a tensor of a mask whose lengths and numbers are those that a program was exported with: the latter are the
// sizes of a tensor (dmattn_ops/masks/taken_apart.py).
void mask_as_exported_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  const Tensor part = taken.tensor(), lengths = taken.tensor(), numbers = taken.tensor();
  const int64_t seqlen_q = taken.integer(), seqlen_k = taken.integer();
  const int64_t band_lo = taken.integer(), band_hi = taken.integer();
  const std::optional<int64_t> at_most = taken.maybe_integer();
  const bool from_bottom_right = taken.flag();
  const auto size_of = [](int64_t limit) { return std::max<int64_t>(0, kUnbounded + std::min(kUnbounded, limit)); };
  const std::vector<int64_t> expected{2 * size_of(band_lo) + from_bottom_right, 0, size_of(band_hi),
                                      at_most.has_value() ? 1 + std::min(kUnbounded, *at_most) : 0};
  const std::vector<int64_t> given(numbers.sizes().begin(), numbers.sizes().end());
  DMATTN_CHECK_VALUE(given.size() == 4 && lengths.dim() >= 2, "a mask must bring its lengths and numbers");
  DMATTN_CHECK_VALUE(given == expected && lengths.size(0) == seqlen_q && lengths.size(1) == seqlen_k,
                     "the program was exported with a mask of ", mask_text(seqlen_q, seqlen_k, expected),
                     ", got one of ", mask_text(lengths.size(0), lengths.size(1), given),
                     ": export it again with this one");
  give(stack, torch::stable::clone(part));
}

bool python_runs() {
  const auto is_initialized = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  return is_initialized && is_initialized();
}

}  // namespace

// Define the operators `dmattn::*`, once. Loading the library calls it where no Python runs; a program that embeds Python
// without the package dmattn_ops calls it itself.
extern "C" __attribute__((visibility("default"))) void dmattn_define_operators() {
  using torch::stable::detail::StableLibrary;
  [[maybe_unused]] static const bool defined = [] {
    static StableLibrary definitions(StableLibrary::Kind::DEF, "dmattn", nullptr, __FILE__, __LINE__);
    for (const char* schema : kSchemas) definitions.def(schema);
    static StableLibrary kernels(StableLibrary::Kind::IMPL, "dmattn", "CPU", __FILE__, __LINE__);
    kernels.impl("forward", forward_operator);
    kernels.impl("backward", backward_operator<false>);
    kernels.impl("qkvpacked_forward", qkvpacked_forward_operator);
    kernels.impl("qkvpacked_backward", qkvpacked_backward_operator);
    kernels.impl("varlen_forward", varlen_forward_operator);
    kernels.impl("varlen_backward", backward_operator<true>);
    kernels.impl("pack_mask", pack_mask_operator);
    kernels.impl("list_tiles", list_tiles_operator);
    kernels.impl("key_lifetimes", key_lifetimes_operator);
    kernels.impl("pack_intervals", pack_intervals_operator);
    kernels.impl("rank_ids", rank_ids_operator);
    kernels.impl("spread_lists", spread_lists_operator);
    kernels.impl("mask_as_exported", mask_as_exported_operator);
    return true;
  }();
}

namespace {

[[maybe_unused]] const bool defined_when_loaded = [] {
  if (!python_runs()) dmattn_define_operators();
  return true;
}();

}  // namespace
}  // namespace dmattn

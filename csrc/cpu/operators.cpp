// The operators `dmattn::*` for programs without Python: read, refuse, allocate and run, as dmattn_ops/dispatch does.
//
// A process defines the namespace once. Where Python runs, the package dmattn_ops does it when it is imported; everywhere
// else this library does, when it is loaded.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "check.h"
#include "kernels.h"
#include "operators.h"
#include "schemas.h"
#include "sinks.h"

namespace dmattn {
namespace {

constexpr int64_t kLargestHeadDim = 1024;  // as in checks/validation.py
constexpr double kLargest = 3.4028234663852886e38, kSmallest = 1.1754943508222875e-38;  // of float32

// A part of a tensor along one dimension.
struct Part {
  int64_t dim, first, length;

  Tensor of(Tensor tensor) const { return torch::stable::narrow(tensor, dim, first, length); }
  MaybeTensor of(const MaybeTensor& tensor) const {
    return tensor.has_value() ? MaybeTensor(of(*tensor)) : std::nullopt;
  }
  // The same of a tensor in which entries may share one batch of 1.
  MaybeTensor of_own(const MaybeTensor& tensor) const {
    return tensor.has_value() && tensor->size(0) != 1 ? of(tensor) : tensor;
  }
};

struct Entry;

// What forward and backward have in common. Members stand in the order of the schemas.
struct Call {
  Tensor query, key, value;
  MaybeTensor cu_seqlens_q, cu_seqlens_k;
  MaybeTensor bias, row_tiles, col_tiles, row_bits, col_bits, q_segments, k_segments, start, end, hidden_from,
      hidden_to, key_mask, sink, seed;
  int64_t max_seqlen_q = 0, max_seqlen_k = 0, band_lo = 0, band_hi = 0, q_origin = 0, k_origin = 0;
  std::optional<int64_t> at_most;
  bool top_left = false, batch_invariant = false;
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

  // A call for each batch entry, or for each packed sequence that has queries and keys (dmattn_ops/dispatch/entries.py).
  std::vector<Entry> entries() const;

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
  check_keeps(mask);
  const int64_t total = key.size(0), heads = mask.dim() == 2 ? mask.size(0) : 0;
  DMATTN_CHECK_VALUE(
      mask.dim() == 2 && mask.size(1) == total && (heads == 1 || heads == key.size(1) || heads == query.size(1)),
      "mask must have shape [1 or ", key.size(1), " or ", query.size(1), ", ", total, "], got ", mask.sizes());
  const Tensor ids = allocate(mask, {1, heads, total}, kInt);
  const auto size = static_cast<int64_t>(mask.element_size());
  std::vector<uint32_t> words(static_cast<size_t>(ceil_div(total, 32)));
  for (int64_t h = 0; h < heads; ++h) {
    const char* const row = static_cast<const char*>(mask.const_data_ptr()) + h * mask.stride(0) * size;
    bit_math().nonzero(row, size, size, total, words.data());
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

// The offsets of one sequence.
Tensor offsets_of(const Tensor& on, int64_t length) {
  const Tensor made = allocate(on, {2}, kLong);
  int64_t* const at = made.mutable_data_ptr<int64_t>();
  at[0] = 0;
  at[1] = length;
  return made;
}

// A call with one entry, and where that lies: in query and out, in key and value, in lse, and in bias.
struct Entry {
  Call call;
  Part queries, keys, rows, bias;
};

std::vector<Entry> Call::entries() const {
  std::vector<Entry> found;
  if (!cu_seqlens_q.has_value()) {
    for (int64_t number = 0; number < query.size(0); ++number) {
      const Part part{0, number, 1};
      Call one = *this;
      for (Tensor* tensor : {&one.query, &one.key, &one.value}) *tensor = part.of(*tensor);
      for (MaybeTensor* tensor : {&one.bias, &one.row_tiles, &one.col_tiles, &one.row_bits, &one.col_bits,
                                  &one.q_segments, &one.k_segments, &one.start, &one.end, &one.hidden_from,
                                  &one.hidden_to, &one.seed})
        *tensor = part.of_own(*tensor);
      found.push_back({one, part, part, part, part});
    }
    return found;
  }
  const Tensor held_q = contiguous_as(*cu_seqlens_q, kLong), held_k = contiguous_as(*cu_seqlens_k, kLong);
  const int64_t *const at_q = held_q.const_data_ptr<int64_t>(), *const at_k = held_k.const_data_ptr<int64_t>();
  for (int64_t number = 0; number + 1 < held_q.numel(); ++number) {
    const int64_t of_q = at_q[number + 1] - at_q[number], of_k = at_k[number + 1] - at_k[number];
    if (of_q == 0 || of_k == 0) continue;
    const Part queries{0, at_q[number], of_q}, keys{0, at_k[number], of_k};
    const Part rows{1, at_q[number], of_q}, columns{1, at_k[number], of_k};
    Call one = *this;
    one.query = queries.of(query);
    one.key = keys.of(key);
    one.value = keys.of(value);
    one.bias = columns.of(bias);
    one.k_segments = Part{2, at_k[number], of_k}.of(k_segments);
    one.seed = Part{0, number, 1}.of_own(seed);
    one.cu_seqlens_q = offsets_of(held_q, of_q);
    one.cu_seqlens_k = offsets_of(held_k, of_k);
    found.push_back({one, queries, keys, rows, columns});
  }
  return found;
}

void write_outputs(const Call& call, const Tensor& out, const Tensor& lse, const Tensor& lse_tail,
                   const MaybeTensor& row_max) {
  forward(call.arguments(), {out, lse, lse_tail, row_max});
  if (call.sink.has_value()) take_share(*call.sink, out, lse);
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
  if (call.is_empty() || (call.batch_invariant && call.cu_seqlens_q.has_value())) {  // rows without an entry
    fill(out, 0);
    fill(lse_tail, 0);
    fill(lse, -std::numeric_limits<double>::infinity());
    if (row_max.has_value()) fill(*row_max, -std::numeric_limits<double>::infinity());
  }
  if (call.batch_invariant && !call.is_empty()) {
    for (const Entry& one : call.entries())
      write_outputs(one.call, one.queries.of(out), one.rows.of(lse), one.rows.of(lse_tail), one.rows.of(row_max));
  } else if (!call.is_empty()) {
    write_outputs(call, out, lse, lse_tail, row_max);
  }
  give(stack, out, lse, lse_tail, row_max.has_value() ? *row_max : nothing(lse));
}

// What a backward is given beside the call.
struct Given {
  Tensor grad_out;
  MaybeTensor grad_lse;
  Tensor out, lse, lse_tail;
};

void write_gradients(const Call& call, Given given, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                     const MaybeTensor& dbias, const MaybeTensor& dsink) {
  if (call.sink.has_value()) {
    check_gradients(call.arguments(), {given.out, given.lse, given.lse_tail, given.grad_out, given.grad_lse, dq, dk, dv,
                                       dbias});
    if (dsink.has_value()) sink_gradient(*call.sink, given.grad_out, given.out, given.lse, *dsink);
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
  backward(call.arguments(), {given.out, given.lse, given.lse_tail, given.grad_out, given.grad_lse, dq, dk, dv, dbias});
}

// The sum over entries of a gradient that they share, which is rounded once.
class Shared {
 public:
  Shared(const Tensor& target, ScalarType type)
      : target_(target), total_(allocate(target, {target.sizes().begin(), target.sizes().end()}, type)) {
    fill(total_, 0);
  }

  void add(const Tensor& part) {
    const Tensor added = contiguous_as(part, total_.scalar_type());
    total_.scalar_type() == kDouble ? add_as<double>(added) : add_as<float>(added);
  }
  void write() { torch::stable::copy_(target_, total_); }
  Tensor like_total() const { return allocate_like(total_); }

 private:
  template <typename T>
  void add_as(const Tensor& part) {
    T* const total = total_.mutable_data_ptr<T>();
    const T* const added = part.const_data_ptr<T>();
    for (int64_t k = 0; k < part.numel(); ++k) total[k] += added[k];
  }

  Tensor target_, total_;
};

void write_gradients_by_entry(Call call, const Given& given, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                              const MaybeTensor& dbias, const MaybeTensor& dsink) {
  const bool varlen = call.cu_seqlens_q.has_value();
  if (varlen) {  // positions without an entry
    for (const Tensor* gradient : {&dq, &dk, &dv}) fill(*gradient, 0);
    if (dbias.has_value()) fill(*dbias, 0);
  }
  std::optional<Shared> dbias_sum, dsink_sum;
  if (dbias.has_value() && !varlen && dbias->size(0) == 1) {
    dbias_sum.emplace(*dbias, call.wide());
    call.bias = torch::stable::to(*call.bias, call.wide());
  }
  if (dsink.has_value()) {
    dsink_sum.emplace(*dsink, call.wide());
    call.sink = torch::stable::to(*call.sink, call.wide());
  }
  for (const Entry& one : call.entries()) {
    const Given own{one.queries.of(given.grad_out), one.rows.of(given.grad_lse), one.queries.of(given.out),
                    one.rows.of(given.lse), one.rows.of(given.lse_tail)};
    const MaybeTensor own_dbias = dbias_sum.has_value() ? MaybeTensor(dbias_sum->like_total()) : one.bias.of(dbias);
    const MaybeTensor own_dsink = dsink_sum.has_value() ? MaybeTensor(dsink_sum->like_total()) : std::nullopt;
    write_gradients(one.call, own, one.queries.of(dq), one.keys.of(dk), one.keys.of(dv), own_dbias, own_dsink);
    if (dbias_sum.has_value()) dbias_sum->add(*own_dbias);
    if (dsink_sum.has_value()) dsink_sum->add(*own_dsink);
  }
  if (dbias_sum.has_value()) dbias_sum->write();
  if (dsink_sum.has_value()) dsink_sum->write();
}

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
  const MaybeTensor wanted_sink = of_sink ? MaybeTensor(dsink) : std::nullopt;
  if (call.batch_invariant) {  // whole, before parts are taken of it
    check_gradients(call.arguments(), {given.out, given.lse, given.lse_tail, given.grad_out, given.grad_lse, dq, dk, dv,
                                       wanted});
    write_gradients_by_entry(call, given, dq, dk, dv, wanted, wanted_sink);
  } else {
    write_gradients(call, given, dq, dk, dv, wanted, wanted_sink);
  }
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
  call.batch_invariant = taken.flag();
  run_forward(call, needs_max, stack);
}

void varlen_forward_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  Call call;
  take_qkv(taken, call);
  call.take_varlen(taken);
  const bool needs_max = taken.flag();
  call.batch_invariant = taken.flag();
  run_forward(call, needs_max, stack);
}

void qkvpacked_forward_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  const Tensor qkv = taken.tensor();
  Call call;
  call.take_dense(taken);
  const bool needs_max = taken.flag();
  call.batch_invariant = taken.flag();
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
  call.batch_invariant = taken.flag();
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
  call.batch_invariant = taken.flag();
  split_qkv(qkv, call.query, call.key, call.value);
  call.prepare();
  const Tensor dqkv = allocate_like(qkv);
  Tensor dq, dk, dv;
  split_qkv(dqkv, dq, dk, dv);
  const auto [dbias, dsink] = run_backward(call, given, dq, dk, dv, needs_dbias, needs_dsink);
  give(stack, dqkv, dbias, dsink);
}

// Attention to a part of the keys is refused.
template <bool backward, bool packed>
void used_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  Call call;
  Given given;
  if (backward) take_grads(taken, given);
  for (int k = 0; k < (packed ? 1 : 3); ++k) taken.tensor();
  if (backward) take_saved(taken, given);
  taken.tensor();  // seqlen_k_used
  call.take_dense(taken);
  refuse_operator("attention to a part of the keys (seqlen_k_used)");
}

// Blocks of keys that queries name are refused: a mask of bits says the same, which `pack_selection` makes of them.
template <bool backward>
void chosen_operator(StableIValue* stack, uint64_t, uint64_t) {
  Taken taken(stack);
  Call call;
  Given given;
  if (backward) take_grads(taken, given);
  for (int k = 0; k < 3; ++k) taken.tensor();
  if (backward) take_saved(taken, given);
  taken.tensor();  // chosen
  call.take_dense(taken);
  refuse_operator("attention to chosen blocks (chosen) without pack_selection");
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
    kernels.impl("forward.used", used_operator<false, false>);
    kernels.impl("backward.used", used_operator<true, false>);
    kernels.impl("qkvpacked_forward.used", used_operator<false, true>);
    kernels.impl("qkvpacked_backward.used", used_operator<true, true>);
    kernels.impl("forward.chosen", chosen_operator<false>);
    kernels.impl("backward.chosen", chosen_operator<true>);
    kernels.impl("pack_selection", pack_selection_operator);
    kernels.impl("selection_mass", selection_mass_operator);
    kernels.impl("key_mass", key_mass_operator);
    kernels.impl("pack_mask", pack_mask_operator);
    kernels.impl("list_tiles", list_tiles_operator);
    kernels.impl("key_lifetimes", key_lifetimes_operator);
    kernels.impl("pack_intervals", pack_intervals_operator);
    kernels.impl("rank_ids", rank_ids_operator);
    kernels.impl("spread_lists", spread_lists_operator);
    kernels.impl("mask_as_exported", mask_as_exported_operator);
    dmattn_serve_plans("CUDA");
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

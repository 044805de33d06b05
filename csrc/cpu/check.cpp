#include "check.h"

#include <initializer_list>
#include <string>

namespace dmattn {

namespace {

bool is_strided(const Tensor& tensor) {
  int32_t layout = 0;
  answered(aoti_torch_get_layout(tensor.get(), &layout), "the layout");
  return layout == aoti_torch_layout_strided();
}

}  // namespace

void check_memory(const char* name, const Tensor& tensor) {
  DMATTN_CHECK_VALUE(tensor.defined(), name, " must be a tensor");
  DMATTN_CHECK_VALUE(is_strided(tensor) && tensor.is_cpu(), name,
                    " must be a strided tensor on the CPU");
  const Extents sizes = tensor.sizes(), strides = tensor.strides();
  int64_t last = tensor.storage_offset(), held = 0;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] == 0) return;
    last += (sizes[dim] - 1) * strides[dim];
  }
  const int64_t needed = (last + 1) * static_cast<int64_t>(tensor.element_size());
  answered(aoti_torch_get_storage_size(tensor.get(), &held), "the storage");
  DMATTN_CHECK_VALUE(held >= needed, name, " needs ", needed, " bytes of memory, but its storage holds ", held);
}

namespace {

constexpr int64_t kHeader = 4;                       // words of a record before its indices
constexpr int64_t kLongest = int64_t{1} << 30;       // positions are held in 32 bits
constexpr int64_t kAny = -1;

// An allowed size of a dimension: one of up to three, or any.
struct Size {
  int64_t allowed[3];
  Size(int64_t only) : allowed{only, only, only} {}  // NOLINT: shapes are written as lists of numbers
  Size(int64_t a, int64_t b) : allowed{a, b, b} {}
  Size(int64_t a, int64_t b, int64_t c) : allowed{a, b, c} {}

  bool takes(int64_t size) const {
    return allowed[0] == kAny || size == allowed[0] || size == allowed[1] || size == allowed[2];
  }
  std::string text() const {
    if (allowed[0] == kAny) return "any";
    std::string text = std::to_string(allowed[0]);
    for (int k = 1; k < 3; ++k)
      if (allowed[k] != allowed[k - 1]) text += " or " + std::to_string(allowed[k]);
    return text;
  }
};

using Shape = std::initializer_list<Size>;

std::string text_of(const Shape& shape) {
  std::string text;
  for (const Size& size : shape) text += (text.empty() ? "" : ", ") + size.text();
  return "(" + text + ")";
}

void check_shape(const char* name, const Tensor& tensor, const Shape& shape) {
  check_memory(name, tensor);
  const Extents sizes = tensor.sizes();
  bool fits = sizes.size() == shape.size();
  size_t dim = 0;
  for (const Size& size : shape) fits = fits && size.takes(sizes[dim++]);
  DMATTN_CHECK_VALUE(fits, name, " must have shape ", text_of(shape), ", got ", sizes);
}

void check_dtype(const char* name, const Tensor& tensor, ScalarType dtype) {
  DMATTN_CHECK_TYPE(tensor.scalar_type() == dtype, name, " must be ", dtype, ", got ", tensor.scalar_type());
}

void check_floating(const char* name, const Tensor& tensor) {
  DMATTN_CHECK_TYPE(is_floating(tensor.scalar_type()), name,
                    " must be float64, float32, float16 or bfloat16, got ", tensor.scalar_type());
}

void check_integers(const char* name, const Tensor& tensor) {
  DMATTN_CHECK_TYPE(is_integral(tensor.scalar_type()), name, " must hold integers, got ",
                   tensor.scalar_type());
}

void check_both(const char* one, const MaybeTensor& a, const char* other, const MaybeTensor& b) {
  DMATTN_CHECK_VALUE(a.has_value() == b.has_value(), one, " and ", other, " belong together");
}

int64_t tiles_of(int64_t length) { return ceil_div(length, kTile); }
int64_t records_of(int64_t length) { return std::max<int64_t>(2, tiles_of(length)); }  // as meta.tile_records

// Sizes of a call, after query, key and value were checked.
struct Sizes {
  int64_t batch, heads, kv_heads, seqlen_q, seqlen_k;
  bool varlen;
  ScalarType dtype, wide;

  explicit Sizes(const Arguments& a)
      : batch(a.query.dim() == 3 ? a.cu_seqlens_q->numel() - 1 : a.query.size(0)),
        heads(a.query.size(-2)),
        kv_heads(a.key.size(-2)),
        seqlen_q(a.query.size(-3)),
        seqlen_k(a.key.size(-3)),
        varlen(a.query.dim() == 3),
        dtype(a.query.scalar_type()),
        wide(dtype == kDouble ? kDouble : kFloat) {}
};

void check_rows(const char* name, const Tensor& tensor, const Sizes& sizes, int64_t length, int64_t heads,
                int64_t width) {
  if (sizes.varlen)
    check_shape(name, tensor, {length, heads, width});
  else
    check_shape(name, tensor, {sizes.batch, length, heads, width});
}

void check_statistic(const char* name, const Tensor& tensor, const Sizes& sizes) {
  if (sizes.varlen)
    check_shape(name, tensor, {sizes.heads, sizes.seqlen_q});
  else
    check_shape(name, tensor, {sizes.batch, sizes.heads, sizes.seqlen_q});
  check_dtype(name, tensor, sizes.wide);
}

Sizes check_inputs(const Arguments& a) {
  const bool varlen = a.cu_seqlens_q.has_value();
  check_both("cu_seqlens_q", a.cu_seqlens_q, "cu_seqlens_k", a.cu_seqlens_k);
  if (varlen) {
    check_shape("cu_seqlens_q", *a.cu_seqlens_q, {kAny});
    check_shape("cu_seqlens_k", *a.cu_seqlens_k, {a.cu_seqlens_q->numel()});
    check_integers("cu_seqlens_q", *a.cu_seqlens_q);
    check_integers("cu_seqlens_k", *a.cu_seqlens_k);
    DMATTN_CHECK_VALUE(a.cu_seqlens_q->numel() > 0, "cu_seqlens_q must have at least one element");
    check_shape("query", a.query, {kAny, kAny, kAny});
    check_shape("key", a.key, {kAny, kAny, a.query.size(2)});
    check_shape("value", a.value, {a.key.size(0), a.key.size(1), kAny});
  } else {
    check_shape("query", a.query, {kAny, kAny, kAny, kAny});
    check_shape("key", a.key, {a.query.size(0), kAny, kAny, a.query.size(3)});
    check_shape("value", a.value, {a.query.size(0), a.key.size(1), a.key.size(2), kAny});
  }
  check_floating("query", a.query);
  check_dtype("key", a.key, a.query.scalar_type());
  check_dtype("value", a.value, a.query.scalar_type());
  const Sizes sizes(a);
  DMATTN_CHECK_VALUE(sizes.kv_heads > 0 && sizes.heads % sizes.kv_heads == 0, "query must have a multiple of key's ",
                    sizes.kv_heads, " heads, got ", sizes.heads);
  DMATTN_CHECK_VALUE(sizes.seqlen_q <= kLongest && sizes.seqlen_k <= kLongest,
                    "query and key must have at most 2^30 positions");
  return sizes;
}

void check_numbers(const Arguments& a) {
  DMATTN_CHECK_VALUE(std::isfinite(a.softmax_scale), "softmax_scale must be finite, got ", a.softmax_scale);
  DMATTN_CHECK_VALUE(std::isfinite(a.softcap) && a.softcap >= 0, "softcap must be finite and at least 0, got ",
                    a.softcap);
  DMATTN_CHECK_VALUE(a.drop_below >= 0 && a.drop_below <= int64_t{1} << 32,
                    "drop_below must be an integer from 0 to 2^32, got ", a.drop_below);
  DMATTN_CHECK_VALUE(std::isfinite(a.dropout_scale), "dropout_scale must be finite, got ", a.dropout_scale);
}

// Lists and bits of one axis, `own` positions long.
void check_axis(const char* tiles_name, const Tensor& tiles, const char* bits_name, const MaybeTensor& bits,
                const Sizes& sizes, int64_t own, int64_t other) {
  const Size batch{1, sizes.batch}, heads{1, sizes.kv_heads, sizes.heads};
  check_shape(tiles_name, tiles, {batch, heads, records_of(own), kAny});
  check_dtype(tiles_name, tiles, kInt);
  DMATTN_CHECK_VALUE(tiles.size(3) >= kHeader, tiles_name, " must have records of at least ", kHeader, " words, got ",
                    tiles.size(3));
  if (!bits.has_value()) return;
  check_shape(bits_name, *bits, {batch, heads, tiles_of(own) * kTile, tiles_of(other) * kTileWords});
  check_dtype(bits_name, *bits, kInt);
}

void check_mask(const Arguments& a, const Sizes& sizes) {
  check_both("row_tiles", a.row_tiles, "col_tiles", a.col_tiles);
  check_both("row_bits", a.row_bits, "col_bits", a.col_bits);
  check_both("start", a.start, "end", a.end);
  check_both("hidden_from", a.hidden_from, "hidden_to", a.hidden_to);
  DMATTN_CHECK_VALUE(a.row_bits.has_value() + a.k_segments.has_value() + a.start.has_value() <= 1,
                    "a mask holds bits, segments or intervals, and no two of them");
  DMATTN_CHECK_VALUE(a.k_segments.has_value() || !a.q_segments.has_value(), "q_segments needs k_segments");
  DMATTN_CHECK_VALUE(a.start.has_value() || !a.hidden_from.has_value(), "hidden_from needs start");
  DMATTN_CHECK_VALUE(a.row_tiles.has_value() || !a.row_bits.has_value(), "row_bits needs row_tiles");
  DMATTN_CHECK_VALUE(!a.row_tiles.has_value() || a.row_bits.has_value() || a.k_segments.has_value(),
                    "row_tiles needs row_bits or k_segments");
  DMATTN_CHECK_VALUE(!sizes.varlen || !(a.row_tiles.has_value() || a.q_segments.has_value() || a.start.has_value()),
                    "variable lengths take no mask but k_segments");
  if (a.row_tiles.has_value()) {
    check_axis("row_tiles", *a.row_tiles, "row_bits", a.row_bits, sizes, sizes.seqlen_q, sizes.seqlen_k);
    check_axis("col_tiles", *a.col_tiles, "col_bits", a.col_bits, sizes, sizes.seqlen_k, sizes.seqlen_q);
  }
  const Size batch{1, sizes.varlen ? 1 : sizes.batch}, heads{1, sizes.kv_heads, sizes.heads};
  if (a.q_segments.has_value()) {
    check_shape("q_segments", *a.q_segments, {batch, sizes.seqlen_q});
    check_integers("q_segments", *a.q_segments);
  }
  if (a.k_segments.has_value()) {
    check_shape("k_segments", *a.k_segments, {batch, heads, sizes.seqlen_k});
    check_integers("k_segments", *a.k_segments);
  }
  if (!a.start.has_value()) return;
  check_shape("start", *a.start, {batch, heads, sizes.seqlen_k});
  const auto like_start = [&](const char* name, const MaybeTensor& tensor) {
    if (!tensor.has_value()) return;
    check_shape(name, *tensor, {a.start->size(0), a.start->size(1), sizes.seqlen_k});
    check_dtype(name, *tensor, kInt);
  };
  like_start("start", a.start);
  like_start("end", a.end);
  like_start("hidden_from", a.hidden_from);
  like_start("hidden_to", a.hidden_to);
  DMATTN_CHECK_VALUE(!a.at_most.has_value() || *a.at_most >= 0, "at_most must be at least 0, got ", *a.at_most);
}

void check_bias(const char* name, const Tensor& bias, const Sizes& sizes) {
  const Size heads{1, sizes.kv_heads, sizes.heads};
  if (sizes.varlen)
    check_shape(name, bias, {heads, sizes.seqlen_k});
  else
    check_shape(name, bias, {{1, sizes.batch}, heads, {1, sizes.seqlen_q}, sizes.seqlen_k});
  check_floating(name, bias);
}

// A list of `own` tiles over `other` ones, of axes `own_length` and `other_length` long.
class ListCheck {
 public:
  ListCheck(const char* name, const Tensor& lists, int64_t own_length, int64_t other_length)
      : name_(name),
        lists_(contiguous_as(lists, kInt)),
        own_length_(own_length),
        other_length_(other_length),
        seen_(static_cast<size_t>(lists.size(2))) {}

  void run() {
    const int64_t records = lists_.size(2), words = lists_.size(3);
    const auto* data = lists_.const_data_ptr<int32_t>();
    for (int64_t part = 0; part < lists_.size(0) * lists_.size(1); ++part) {
      std::fill(seen_.begin(), seen_.end(), false);
      for (int64_t tile = 0; tile < records; ++tile) record(data + (part * records + tile) * words, tile);
    }
  }

 private:
  void record(const int32_t* words, int64_t tile) {
    const int64_t ranked = words[0], partial = words[1], full = words[2];
    const auto records = static_cast<int64_t>(seen_.size());
    DMATTN_CHECK_VALUE(ranked >= 0 && ranked < records && !seen_[ranked], name_,
                      " must rank each of its ", records, " tiles once, got ", ranked, " in record ", tile);
    seen_[ranked] = true;
    const int64_t capacity = lists_.size(3) - kHeader;
    DMATTN_CHECK_VALUE(partial >= 0 && full >= 0 && partial + full <= capacity, name_, " counts ", partial, " and ",
                      full, " tiles in record ", tile, ", which has room for ", capacity);
    DMATTN_CHECK_VALUE(tile * kTile < own_length_ || partial + full == 0, name_, " lists tiles in record ", tile,
                      ", which lies behind the last position");
    for (int64_t k = 0; k < partial + full; ++k) {
      const int64_t other = words[kHeader + k];
      const bool first = k == 0 || k == partial;
      DMATTN_CHECK_VALUE(other >= 0 && other < tiles_of(other_length_) && (first || other > words[kHeader + k - 1]),
                        name_, " must list tiles below ", tiles_of(other_length_), " in ascending order, got ", other,
                        " in record ", tile);
      const bool whole = (tile + 1) * kTile <= own_length_ && (other + 1) * kTile <= other_length_;
      DMATTN_CHECK_VALUE(k < partial || whole, name_, " calls tile ", other, " of record ", tile,
                        " wholly visible, which reaches behind the last position");
    }
  }

  const char* name_;
  const Tensor lists_;
  const int64_t own_length_, other_length_;
  std::vector<uint8_t> seen_;
};

}  // namespace

void check_arguments(const Arguments& a) {
  const Sizes sizes = check_inputs(a);
  check_numbers(a);
  check_mask(a, sizes);
  if (a.bias.has_value()) check_bias("bias", *a.bias, sizes);
  if (a.drop_below == 0) return;
  DMATTN_CHECK_VALUE(a.seed.has_value(), "dropout needs a seed");
  check_shape("seed", *a.seed, {{1, sizes.batch}, {1, sizes.heads}});
  check_dtype("seed", *a.seed, kLong);
}

void check_row_lists(const Arguments& a) {
  if (a.row_tiles.has_value())
    ListCheck("row_tiles", *a.row_tiles, a.query.size(-3), a.key.size(-3)).run();
}

void check_column_lists(const Arguments& a) {
  if (a.col_tiles.has_value())
    ListCheck("col_tiles", *a.col_tiles, a.key.size(-3), a.query.size(-3)).run();
}

void check_results(const Arguments& a, const Results& results) {
  const Sizes sizes(a);
  check_rows("out", results.out, sizes, sizes.seqlen_q, sizes.heads, a.value.size(-1));
  check_dtype("out", results.out, sizes.dtype);
  check_statistic("lse", results.lse, sizes);
  check_statistic("lse_tail", results.lse_tail, sizes);
  if (results.row_max.has_value()) check_statistic("row_max", *results.row_max, sizes);
}

void check_gradients(const Arguments& a, const Gradients& gradients) {
  const Sizes sizes(a);
  const int64_t dim = a.query.size(-1), value_dim = a.value.size(-1);
  check_rows("out", gradients.out, sizes, sizes.seqlen_q, sizes.heads, value_dim);
  check_floating("out", gradients.out);
  check_rows("grad_out", gradients.grad_out, sizes, sizes.seqlen_q, sizes.heads, value_dim);
  check_floating("grad_out", gradients.grad_out);
  check_statistic("lse", gradients.lse, sizes);
  check_statistic("lse_tail", gradients.lse_tail, sizes);
  if (gradients.grad_lse.has_value()) check_statistic("grad_lse", *gradients.grad_lse, sizes);
  check_rows("dq", gradients.dq, sizes, sizes.seqlen_q, sizes.heads, dim);
  check_rows("dk", gradients.dk, sizes, sizes.seqlen_k, sizes.kv_heads, dim);
  check_rows("dv", gradients.dv, sizes, sizes.seqlen_k, sizes.kv_heads, value_dim);
  check_dtype("dq", gradients.dq, sizes.dtype);
  check_dtype("dk", gradients.dk, sizes.dtype);
  check_dtype("dv", gradients.dv, sizes.dtype);
  if (!gradients.dbias.has_value()) return;
  DMATTN_CHECK_VALUE(a.bias.has_value(), "dbias needs bias");
  check_memory("dbias", *gradients.dbias);
  DMATTN_CHECK_VALUE(same_sizes(gradients.dbias->sizes(), a.bias->sizes()), "dbias must have shape ", a.bias->sizes(), ", got ",
                    gradients.dbias->sizes());
  check_floating("dbias", *gradients.dbias);
}

void check_mask_arguments(const Tensor* mask, const MaybeTensor& q_segments, const MaybeTensor& k_segments,
                          int64_t seqlen_q, const MaskOutputs& outputs) {
  DMATTN_CHECK_VALUE(seqlen_q >= 0 && seqlen_q <= kLongest, "seqlen_q must lie between 0 and 2^30, got ", seqlen_q);
  check_shape("row_tiles", outputs.row_tiles, {kAny, kAny, records_of(seqlen_q), kAny});
  const int64_t batch = outputs.row_tiles.size(0), heads = outputs.row_tiles.size(1);
  // Heads of keys say the same to all of their queries.
  const auto heads_of = [&](const Tensor& part) {
    const int64_t own = part.dim() > 1 ? part.size(1) : 0;
    return own > 0 && heads % own == 0 ? Size(own) : Size(1, heads);
  };
  if (mask) check_shape("mask", *mask, {{1, batch}, heads_of(*mask), {1, seqlen_q}, kAny});
  if (k_segments.has_value()) {
    check_shape("k_segments", *k_segments, {{1, batch}, heads_of(*k_segments), mask ? mask->size(3) : kAny});
    check_integers("k_segments", *k_segments);
  }
  if (q_segments.has_value()) {
    check_shape("q_segments", *q_segments, {{1, batch}, seqlen_q});
    check_integers("q_segments", *q_segments);
  }
  const int64_t seqlen_k = mask ? mask->size(3) : k_segments->size(2);
  DMATTN_CHECK_VALUE(seqlen_k <= kLongest, "keys must have at most 2^30 positions, got ", seqlen_k);
  check_shape("col_tiles", outputs.col_tiles, {batch, heads, records_of(seqlen_k), kAny});
  if (outputs.row_bits) {
    check_shape("row_bits", *outputs.row_bits,
                {batch, heads, tiles_of(seqlen_q) * kTile, tiles_of(seqlen_k) * kTileWords});
    check_shape("col_bits", *outputs.col_bits,
                {batch, heads, tiles_of(seqlen_k) * kTile, tiles_of(seqlen_q) * kTileWords});
  }
  for (const auto& [name, tensor] : {std::pair{"row_tiles", &outputs.row_tiles}, {"col_tiles", &outputs.col_tiles},
                                     {"row_bits", outputs.row_bits}, {"col_bits", outputs.col_bits}}) {
    if (!tensor) continue;
    check_dtype(name, *tensor, kInt);
    DMATTN_CHECK_VALUE(tensor->is_contiguous(), name, " must be contiguous");
    const bool list = tensor == &outputs.row_tiles || tensor == &outputs.col_tiles;
    DMATTN_CHECK_VALUE(!list || tensor->size(3) >= kHeader, name, " must have records of at least ", kHeader,
                      " words, got ", tensor->size(3));
  }
}

void check_intervals(const IntervalTensors& intervals, int64_t batch, int64_t heads) {
  check_both("hidden_from", intervals.hidden_from, "hidden_to", intervals.hidden_to);
  check_shape("end", intervals.end, {{1, batch}, kAny, kAny});
  const int64_t own = intervals.end.size(1);
  DMATTN_CHECK_VALUE(own > 0 && heads % own == 0, "intervals must have heads that divide ", heads, ", got ", own);
  for (const auto& [name, part] : {std::pair{"end", MaybeTensor(intervals.end)}, {"start", intervals.start},
                                   {"hidden_from", intervals.hidden_from}, {"hidden_to", intervals.hidden_to}}) {
    if (!part.has_value()) continue;
    check_shape(name, *part, {intervals.end.size(0), own, intervals.end.size(2)});
    check_dtype(name, *part, kInt);
  }
}

}  // namespace dmattn

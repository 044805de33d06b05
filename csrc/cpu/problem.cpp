#include "problem.h"


#include "check.h"

namespace dmattn {

Element element_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case kDouble:
      return Element::f64;
    case kFloat:
      return Element::f32;
    case kHalf:
      return Element::f16;
    case kBFloat16:
      return Element::bf16;
    default:
      DMATTN_CHECK_TYPE(false, "expected float64, float32, float16 or bfloat16, got ", tensor.scalar_type());
  }
}

Rows rows_of(const Tensor& tensor) {
  DMATTN_CHECK_VALUE(tensor.stride(-1) == 1 || tensor.size(-1) <= 1, "the last dimension must be contiguous");
  const Element element = element_of(tensor);
  const int64_t size = element_size(element);
  const bool packed = tensor.dim() == 3;
  return {static_cast<char*>(tensor.data_ptr()),
          element,
          tensor.size(-1),
          packed ? 0 : tensor.stride(0) * size,
          tensor.stride(-3) * size,
          tensor.stride(-2) * size};
}

Bias bias_of(const Tensor& tensor) {
  DMATTN_CHECK_VALUE(tensor.stride(-1) == 1 || tensor.size(-1) <= 1, "bias must be contiguous in its last dimension");
  const Element element = element_of(tensor);
  const int64_t size = element_size(element);
  const auto stride = [&](int64_t dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim) * size; };
  Bias bias{static_cast<char*>(tensor.data_ptr()), element};
  const bool packed = tensor.dim() == 2;
  bias.heads = tensor.size(packed ? 0 : 1);
  bias.head_stride = stride(packed ? 0 : 1);
  bias.batch_stride = packed ? 0 : stride(0);
  bias.row_stride = packed ? 0 : stride(2);
  return bias;
}

namespace {

// Start and length of each sequence, inside the tensor and behind the one before, whatever the offsets say.
std::vector<std::pair<int64_t, int64_t>> ranges(const Tensor& cu_seqlens, int64_t total) {
  const Tensor offsets = contiguous_as(cu_seqlens, kLong);
  const int64_t* at = offsets.const_data_ptr<int64_t>();
  std::vector<std::pair<int64_t, int64_t>> result;
  int64_t end = 0;
  for (int64_t b = 0; b + 1 < offsets.numel(); ++b) {
    const int64_t start = std::clamp<int64_t>(at[b], end, total);
    end = std::clamp<int64_t>(at[b + 1], start, total);
    result.emplace_back(start, end - start);
  }
  return result;
}

bool covers(const std::vector<std::pair<int64_t, int64_t>>& parts, int64_t total) {
  int64_t next = 0;
  for (const auto& [start, length] : parts) {
    if (start != next) return false;
    next += length;
  }
  return next == total;
}

void add_sequences(Problem& problem, const Arguments& arguments) {
  if (!problem.varlen) {
    const Sequence sequence{0, arguments.query.size(1), 0, arguments.key.size(1),
                            Band::from(arguments.band_lo, arguments.band_hi)};
    problem.sequences.assign(static_cast<size_t>(problem.batch), sequence);
    return;
  }
  const auto q = ranges(*arguments.cu_seqlens_q, arguments.query.size(0));
  const auto k = ranges(*arguments.cu_seqlens_k, arguments.key.size(0));
  problem.batch = static_cast<int64_t>(q.size());
  problem.covers_everything = covers(q, arguments.query.size(0)) && covers(k, arguments.key.size(0));
  for (size_t b = 0; b < q.size(); ++b) {
    const int64_t offset = arguments.top_left ? 0 : k[b].second - q[b].second;
    problem.sequences.push_back(
        {q[b].first, q[b].second, k[b].first, k[b].second, Band::from(arguments.band_lo, arguments.band_hi, offset)});
  }
}

void add_dropout(Problem& problem, const Arguments& arguments) {
  if (arguments.drop_below == 0) return;
  Dropout& dropout = problem.dropout;
  const Tensor seeds = contiguous_as(*arguments.seed, kLong);
  const int64_t* first = seeds.const_data_ptr<int64_t>();
  dropout.seeds.assign(first, first + seeds.numel());
  dropout.seed_batches = seeds.size(0);
  dropout.seed_heads = seeds.size(1);
  dropout.used = true;
  dropout.last_dropped = static_cast<uint32_t>(arguments.drop_below - 1);
  dropout.scale = arguments.dropout_scale;
  dropout.q_origin = arguments.q_origin;
  dropout.k_origin = arguments.k_origin;
}

void add_intervals(Problem& problem, const Arguments& arguments) {
  if (!arguments.start.has_value()) return;
  const MaskTensors& mask = problem.mask;
  const int64_t batch = mask.start->size(0), heads = mask.start->size(1), keys = mask.start->size(2);
  const auto part = [&](const MaybeTensor& tensor, int64_t index) {
    return tensor.has_value() ? tensor->const_data_ptr<int32_t>() + index * keys : nullptr;
  };
  problem.interval_heads = heads;
  for (int64_t index = 0; index < batch * heads; ++index)
    problem.intervals.emplace_back(part(mask.start, index), part(mask.end, index), part(mask.hidden_from, index),
                                   part(mask.hidden_to, index), keys, arguments.query.size(1));
  if (arguments.at_most.has_value()) check_promise(problem, *arguments.at_most);
}

}  // namespace

Problem make_problem(const Arguments& arguments) {
  check_arguments(arguments);
  Problem problem;
  problem.varlen = arguments.cu_seqlens_q.has_value();
  problem.batch = problem.varlen ? 0 : arguments.query.size(0);
  problem.heads = arguments.query.size(-2);
  problem.kv_heads = arguments.key.size(-2);
  problem.group = problem.heads / problem.kv_heads;
  problem.query = rows_of(arguments.query);
  problem.key = rows_of(arguments.key);
  problem.value = rows_of(arguments.value);
  problem.dim = problem.query.width;
  problem.value_dim = problem.value.width;
  add_sequences(problem, arguments);
  if (arguments.bias.has_value()) problem.bias = bias_of(*arguments.bias);
  problem.mask.row_tiles = contiguous_or_none(arguments.row_tiles, kInt);
  problem.mask.col_tiles = contiguous_or_none(arguments.col_tiles, kInt);
  problem.mask.row_bits = contiguous_or_none(arguments.row_bits, kInt);
  problem.mask.col_bits = contiguous_or_none(arguments.col_bits, kInt);
  problem.mask.q_segments = contiguous_or_none(arguments.q_segments, kLong);
  problem.mask.k_segments = contiguous_or_none(arguments.k_segments, kLong);
  problem.mask.start = contiguous_or_none(arguments.start, kInt);
  problem.mask.end = contiguous_or_none(arguments.end, kInt);
  problem.mask.hidden_from = contiguous_or_none(arguments.hidden_from, kInt);
  problem.mask.hidden_to = contiguous_or_none(arguments.hidden_to, kInt);
  problem.scale = arguments.softmax_scale;
  problem.softcap = arguments.softcap;
  add_dropout(problem, arguments);
  add_intervals(problem, arguments);
  return problem;
}

}  // namespace dmattn

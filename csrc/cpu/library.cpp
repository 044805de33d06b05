// Registers the CPU kernels in a namespace of their own; dmattn_ops/kernels/native.py is the only caller.
#include <torch/csrc/stable/library.h>

#include "kernels.h"
#include "selection.h"

namespace {

using dmattn::MaybeTensor;
using dmattn::Tensor;

#define DMATTN_CALL                                                                                                \
  "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? row_tiles, Tensor? col_tiles, Tensor? row_bits, " \
  "Tensor? col_bits, Tensor? q_segments, Tensor? k_segments, Tensor? start, Tensor? end, Tensor? hidden_from, "    \
  "Tensor? hidden_to, int? at_most, Tensor? seed, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, bool top_left, "     \
  "int band_lo, int band_hi, int q_origin, int k_origin, float softmax_scale, float softcap, int drop_below, "     \
  "float dropout_scale"

void forward(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& bias,
             const MaybeTensor& row_tiles, const MaybeTensor& col_tiles, const MaybeTensor& row_bits,
             const MaybeTensor& col_bits, const MaybeTensor& q_segments, const MaybeTensor& k_segments,
             const MaybeTensor& start, const MaybeTensor& end, const MaybeTensor& hidden_from,
             const MaybeTensor& hidden_to, std::optional<int64_t> at_most, const MaybeTensor& seed,
             const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k, bool top_left, int64_t band_lo,
             int64_t band_hi, int64_t q_origin, int64_t k_origin, double softmax_scale, double softcap,
             int64_t drop_below, double dropout_scale, const Tensor& out, const Tensor& lse, const Tensor& lse_tail,
             const MaybeTensor& row_max) {
  dmattn::forward({query,       key,           value,        bias,         row_tiles,  col_tiles, row_bits,
                   col_bits,    q_segments,    k_segments,   start,        end,        hidden_from, hidden_to,
                   at_most,     seed,          cu_seqlens_q, cu_seqlens_k, top_left,   band_lo,   band_hi,
                   q_origin,    k_origin,      softmax_scale, softcap,     drop_below, dropout_scale},
                  {out, lse, lse_tail, row_max});
}

void backward(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& bias,
              const MaybeTensor& row_tiles, const MaybeTensor& col_tiles, const MaybeTensor& row_bits,
              const MaybeTensor& col_bits, const MaybeTensor& q_segments, const MaybeTensor& k_segments,
              const MaybeTensor& start, const MaybeTensor& end, const MaybeTensor& hidden_from,
              const MaybeTensor& hidden_to, std::optional<int64_t> at_most, const MaybeTensor& seed,
              const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k, bool top_left, int64_t band_lo,
              int64_t band_hi, int64_t q_origin, int64_t k_origin, double softmax_scale, double softcap,
              int64_t drop_below, double dropout_scale, const Tensor& out, const Tensor& lse, const Tensor& lse_tail,
              const Tensor& grad_out, const MaybeTensor& grad_lse, const Tensor& dq, const Tensor& dk,
              const Tensor& dv, const MaybeTensor& dbias) {
  dmattn::backward({query,       key,           value,        bias,         row_tiles,  col_tiles, row_bits,
                    col_bits,    q_segments,    k_segments,   start,        end,        hidden_from, hidden_to,
                    at_most,     seed,          cu_seqlens_q, cu_seqlens_k, top_left,   band_lo,   band_hi,
                    q_origin,    k_origin,      softmax_scale, softcap,     drop_below, dropout_scale},
                   {out, lse, lse_tail, grad_out, grad_lse, dq, dk, dv, dbias});
}

}  // namespace

STABLE_TORCH_LIBRARY(dmattn_native, library) {
  library.def("forward(" DMATTN_CALL
              ", Tensor(a!) out, Tensor(b!) lse, Tensor(c!) lse_tail, Tensor(d!)? row_max) -> ()");
  library.def("backward(" DMATTN_CALL
              ", Tensor out, Tensor lse, Tensor lse_tail, Tensor grad_out, Tensor? grad_lse, Tensor(a!) dq, "
              "Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dbias) -> ()");
  library.def(
      "pack_mask(Tensor mask, Tensor? q_segments, Tensor? k_segments, int seqlen_q, int band_lo, int band_hi, "
      "Tensor(a!) row_tiles, Tensor(b!) col_tiles, Tensor(c!) row_bits, Tensor(d!) col_bits) -> ()");
  library.def(
      "list_tiles(Tensor? q_segments, Tensor k_segments, int seqlen_q, int band_lo, int band_hi, "
      "Tensor(a!) row_tiles, Tensor(b!) col_tiles) -> ()");
  library.def(
      "lifetimes(Tensor scores, Tensor? documents, int keep, int keep_first, int keep_last, bool is_causal, "
      "Tensor(a!) start, Tensor(b!) end) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dmattn_native, CompositeExplicitAutograd, library) {
  library.impl("forward", TORCH_BOX(&forward));
  library.impl("backward", TORCH_BOX(&backward));
  library.impl("pack_mask", TORCH_BOX(&dmattn::pack_mask));
  library.impl("list_tiles", TORCH_BOX(&dmattn::list_tiles));
  library.impl("lifetimes", TORCH_BOX(&dmattn::lifetimes));
}

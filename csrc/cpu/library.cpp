// Registers the CPU kernels in a namespace of their own; dmattn_ops/native.py is the only caller.
#include <torch/library.h>
#include <torch/version.h>

#include "kernels.h"
#include "selection.h"

namespace {

using at::Tensor;
using dmattn::MaybeTensor;

#define DMATTN_CALL                                                                                    \
  "Tensor? bias, Tensor? row_tiles, Tensor? col_tiles, Tensor? row_bits, Tensor? col_bits, "           \
  "Tensor? q_segments, Tensor? k_segments, Tensor? seed, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, " \
  "bool top_left, int band_lo, int band_hi, float softmax_scale, float softcap, float dropout_p, int drop_below"

void forward(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& bias,
             const MaybeTensor& row_tiles, const MaybeTensor& col_tiles, const MaybeTensor& row_bits,
             const MaybeTensor& col_bits, const MaybeTensor& q_segments, const MaybeTensor& k_segments,
             const MaybeTensor& seed, const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k, bool top_left,
             int64_t band_lo, int64_t band_hi, double softmax_scale, double softcap, double dropout_p,
             int64_t drop_below, const Tensor& out, const Tensor& lse) {
  dmattn::forward({query,    key,        value,         bias,    row_tiles,    col_tiles,    row_bits,
                   col_bits, q_segments, k_segments,    seed,    cu_seqlens_q, cu_seqlens_k, top_left,
                   band_lo,  band_hi,    softmax_scale, softcap, dropout_p,    drop_below},
                  out, lse);
}

void backward(const Tensor& grad_out, const MaybeTensor& grad_lse, const Tensor& query, const Tensor& key,
              const Tensor& value, const Tensor& out, const Tensor& lse, const MaybeTensor& bias,
              const MaybeTensor& row_tiles, const MaybeTensor& col_tiles, const MaybeTensor& row_bits,
              const MaybeTensor& col_bits, const MaybeTensor& q_segments, const MaybeTensor& k_segments,
              const MaybeTensor& seed, const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k, bool top_left,
              int64_t band_lo, int64_t band_hi, double softmax_scale, double softcap, double dropout_p,
              int64_t drop_below, const Tensor& dq, const Tensor& dk, const Tensor& dv, const MaybeTensor& dbias) {
  dmattn::backward({query,    key,        value,         bias,    row_tiles,    col_tiles,    row_bits,
                    col_bits, q_segments, k_segments,    seed,    cu_seqlens_q, cu_seqlens_k, top_left,
                    band_lo,  band_hi,    softmax_scale, softcap, dropout_p,    drop_below},
                   {grad_out, out, lse, grad_lse, dq, dk, dv, dbias});
}

// The torch this was built against: its C++ interface is not stable, so another one must not load it.
std::string built_for() { return TORCH_VERSION; }

}  // namespace

TORCH_LIBRARY(dmattn_native, library) {
  library.def("built_for() -> str", &built_for);
  library.def("forward(Tensor query, Tensor key, Tensor value, " DMATTN_CALL ", Tensor(a!) out, Tensor(b!) lse) -> ()",
              &forward);
  library.def(
      "backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor "
      "lse, " DMATTN_CALL ", Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dbias) -> ()",
      &backward);
  library.def(
      "pack_mask(Tensor mask, Tensor? q_segments, Tensor? k_segments, int seqlen_q, int band_lo, int band_hi, "
      "Tensor(a!) row_tiles, Tensor(b!) col_tiles, Tensor(c!) row_bits, Tensor(d!) col_bits) -> ()",
      &dmattn::pack_mask);
  library.def(
      "list_tiles(Tensor? q_segments, Tensor k_segments, int seqlen_q, int band_lo, int band_hi, "
      "Tensor(a!) row_tiles, Tensor(b!) col_tiles) -> ()",
      &dmattn::list_tiles);
  library.def(
      "lifetimes(Tensor scores, Tensor? documents, int keep, int keep_first, int keep_last, bool is_causal, "
      "Tensor(a!) start, Tensor(b!) end) -> ()",
      &dmattn::lifetimes);
}

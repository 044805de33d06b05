// The entry points. Outputs arrive uninitialised and are written completely.
#pragma once

#include "problem.h"

namespace dmattn {

struct Results {
  const Tensor &out, &lse, &lse_tail;
  const MaybeTensor& row_max;
};
void forward(const Arguments& arguments, const Results& results);

struct Gradients {
  const Tensor &out, &lse, &lse_tail, &grad_out;
  const MaybeTensor& grad_lse;
  const Tensor &dq, &dk, &dv;
  const MaybeTensor& dbias;
};
void backward(const Arguments& arguments, const Gradients& gradients);

void pack_mask(const Tensor& mask, const MaybeTensor& q_segments, const MaybeTensor& k_segments, int64_t seqlen_q,
               int64_t band_lo, int64_t band_hi, const Tensor& row_tiles, const Tensor& col_tiles,
               const Tensor& row_bits, const Tensor& col_bits);
// Intervals [B or 1, heads, Sk] of int32 (DESIGN.md); without `start` they begin at the first query.
struct IntervalTensors {
  Tensor end;
  MaybeTensor start, hidden_from, hidden_to;
};
// The lists and bits of intervals, beside a mask where there is one.
void pack_intervals(const IntervalTensors& intervals, const MaybeTensor& mask, const MaybeTensor& q_segments,
                    const MaybeTensor& k_segments, int64_t seqlen_q, int64_t band_lo, int64_t band_hi,
                    const Tensor& row_tiles, const Tensor& col_tiles, const Tensor& row_bits, const Tensor& col_bits);
void list_tiles(const MaybeTensor& q_segments, const Tensor& k_segments, int64_t seqlen_q, int64_t band_lo,
                int64_t band_hi, const Tensor& row_tiles, const Tensor& col_tiles);

// Refuses a mask that may be meant as an additive one.
void check_keeps(const Tensor& mask);

}  // namespace dmattn

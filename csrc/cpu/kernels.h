// The four entry points. Outputs arrive uninitialised and are written completely.
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
void list_tiles(const MaybeTensor& q_segments, const Tensor& k_segments, int64_t seqlen_q, int64_t band_lo,
                int64_t band_hi, const Tensor& row_tiles, const Tensor& col_tiles);

}  // namespace dmattn

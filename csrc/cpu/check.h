// What every entry point checks before it reads an argument: devices, dtypes, shapes, that memory is there, and the
// contents of tensors that are used as indices. Errors name the argument.
#pragma once

#include "kernels.h"

namespace dmattn {

// A strided tensor on the CPU whose memory holds all that its sizes and strides name.
void check_memory(const char* name, const Tensor& tensor);

// The arguments that forward and backward share. Contents of lists are checked by the side that walks them.
void check_arguments(const Arguments& arguments);
void check_results(const Arguments& arguments, const Results& results);
void check_gradients(const Arguments& arguments, const Gradients& gradients);
void check_row_lists(const Arguments& arguments);
void check_column_lists(const Arguments& arguments);

// The arguments of pack_mask; of list_tiles, where `mask` and the bits are null.
struct MaskOutputs {
  const Tensor &row_tiles, &col_tiles;
  const Tensor *row_bits = nullptr, *col_bits = nullptr;
};
void check_mask_arguments(const Tensor* mask, const MaybeTensor& q_segments, const MaybeTensor& k_segments,
                          int64_t seqlen_q, const MaskOutputs& outputs);

// Intervals beside which a mask of `batch` and `heads` stands.
void check_intervals(const IntervalTensors& intervals, int64_t batch, int64_t heads);

}  // namespace dmattn

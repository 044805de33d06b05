// For which queries each key of a dynamic mask is visible (semantics: dmattn_ops/kernels/selection/__init__.py).
#pragma once

#include "problem.h"

namespace dmattn {

// Write the first query that sees each key to `start` and the one behind the last to `end`, both int32 [B, heads, S].
// Scores are [B or 1, heads, S], ids of documents [B or 1, S]; neighbours of one id are one document.
void lifetimes(const Tensor& scores, const MaybeTensor& documents, int64_t keep, int64_t keep_first,
               int64_t keep_last, bool is_causal, const Tensor& start, const Tensor& end);

}  // namespace dmattn

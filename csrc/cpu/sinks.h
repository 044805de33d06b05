// Learnable sinks: a logit of each head that takes its share of the softmax and gives nothing (dmattn_ops/dispatch/sinks.py).
#pragma once

#include "problem.h"

namespace dmattn {

// Multiply each row of out by the share of the keys, sigmoid(lse - sink).
void take_share(const Tensor& sink, const Tensor& out, const Tensor& lse);

// Write the gradient of the sinks, minus the sum over all rows of (1 - share) * (grad_out . out).
void sink_gradient(const Tensor& sink, const Tensor& grad_out, const Tensor& out, const Tensor& lse,
                   const Tensor& dsink);

// lse_tail of a softmax that counts the sinks: a backward that knows no sinks computes with these probabilities.
Tensor tail_with_sinks(const Tensor& sink, const Tensor& lse, const Tensor& lse_tail);

}  // namespace dmattn

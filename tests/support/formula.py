"""The differentiable formula of attention, called like the public function."""

import torch

from dmattn_ops.kernels import reference


def textbook(query, key, value, mask=None, bias=None, *, is_causal=False, softmax_scale=None, softcap=0.0):
    """Out and lse of the differentiable formula."""
    seqlen_q, seqlen_k = query.shape[1], key.shape[1]
    keep = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)[None, None] if mask is None else mask
    if is_causal:
        keep = keep & torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return reference.attention(query, key, value, keep, bias, softmax_scale=scale, softcap=softcap)

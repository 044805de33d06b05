"""One call, as one thing: what the operators pass to dispatch, and dispatch to a launcher.

A launcher is two functions, the same on every device:

    forward(call: Call, result: Result, config) -> None
    backward(call: Call, saved: Saved, grads: Gradients, config) -> None

They write every element of their outputs, which arrive uninitialised. A launcher whose kernels serve sinks says so
(`TAKES_SINKS`); others compute without them, and `sinks` does the rest. Tensors may have any strides with a contiguous last
dimension. Dense tensors are `[B, S, heads, D]` with row statistics `[B, H, Sq]`; packed sequences (`call.varlen`) are
`[total, heads, D]` with row statistics `[H, total_q]`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dmattn_ops.choose import Demand
from dmattn_ops.problem import Mask, Options, Varlen


class Call(NamedTuple):
    """What forward and backward are asked alike."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    mask: Mask
    sink: Tensor | None  # [H]
    seed: Tensor | None  # of dropout: [B|1, H|1]
    varlen: Varlen | None
    options: Options

    @property
    def demand(self) -> Demand:
        """The numbers that the choice of a kernel depends on; variable lengths count as their upper bounds, at most all rows."""
        *batch, seqlen_q, heads, dim = self.query.shape
        size, seqlen_k = batch[0] if batch else 1, self.key.shape[-3]
        if self.varlen is not None:
            size = self.varlen.cu_seqlens_q.shape[0] - 1
            seqlen_q, seqlen_k = min(self.varlen.max_seqlen_q, seqlen_q), min(self.varlen.max_seqlen_k, seqlen_k)
        return Demand(size, heads, seqlen_q, seqlen_k, dim, self.value.shape[-1], self.query.element_size())


class Result(NamedTuple):
    """What a forward writes.

    `lse + lse_tail` is the logarithm of the sum of exp(score): `lse` alone, rounded to float32, cannot hold the logarithm of
    a sum beside a score of 1e9, and the backward needs probabilities that add up to 1 there too. A query without visible
    keys has `lse = -inf` and `lse_tail = 0`.
    """

    out: Tensor
    lse: Tensor
    lse_tail: Tensor
    row_max: Tensor | None  # the largest visible score, where it is asked for


class Saved(NamedTuple):
    """What a backward knows of its forward. `lse` and `lse_tail` may be those of more keys than the call has."""

    out: Tensor
    lse: Tensor
    lse_tail: Tensor


class Gradients(NamedTuple):
    """The gradients of the outputs that a backward is given, and those that it writes."""

    grad_out: Tensor
    grad_lse: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsink: Tensor | None = None


def bias_kind(bias: Tensor | None) -> str:
    """Return how a bias meets a block: "none", a value per "key", or one per query and key ("full")."""
    if bias is None:
        return "none"
    return "key" if bias.dim() == 2 or bias.shape[2] == 1 else "full"


def hides_packed_keys(call: Call) -> bool:
    """Return whether a call of packed sequences has a mask of keys, which the SM 9.0 kernels take as a bias."""
    return call.varlen is not None and call.mask.k_segments is not None


def in_natural_units(call: Call) -> bool:
    """Return whether the CUDA kernels compute a call's scores in natural units instead of products times log2(e).

    That costs an instruction for each score, and is right for any finite ones: a bias may be the lowest float32, which times
    log2(e) is -inf, and what products times a large scale lose by rounding would be a factor of more than 2 ** 127.

    Both directions of a call have to agree, whichever kernels take them: float32 rounds a score of 2.4e6 to a multiple of
    0.25, in natural units to another score than in log2 units. So what some kernels take as a bias counts as one for all.
    """
    biased = call.bias is not None or hides_packed_keys(call)
    return biased or abs(call.options.softmax_scale) > 64.0 or call.options.softcap > 2.0**60


def is_whole(bias: Tensor | None, query: Tensor) -> bool:
    """Return whether a bias has an element for every score; the portable kernels write its gradient as they go."""
    return bias_kind(bias) == "full" and bias.shape[:2] == (query.shape[0], query.shape[-2])  # type: ignore[union-attr]


def is_pairwise(bias: Tensor | None, options: Options) -> bool:
    """Return whether each pair of query and key has a number of its own: a bias, or a weight's dropout."""
    return bias_kind(bias) == "full" or options.dropout_p > 0


def mappable(tensor: Tensor) -> bool:
    """Return whether TMA can address `tensor`: start and strides in whole 16 bytes, the last dimension contiguous."""
    step = 16 // tensor.element_size()
    outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    aligned = all(size == 1 or (stride > 0 and stride % step == 0) for size, stride in outer)
    inner = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return aligned and inner and tensor.data_ptr() % 16 == 0


def bias_fits_tiles(bias: Tensor | None) -> bool:
    """Return whether a bias has queries, and TMA can load it in tiles of 16 bits."""
    return bias_kind(bias) == "full" and bias.element_size() == 2 and mappable(bias)  # type: ignore[union-attr, arg-type]


def rows_are_aligned(*tensors: Tensor) -> bool:
    """Return whether every row of `[.., S, heads, D]` starts at a multiple of 16 bytes and is one long."""
    offsets = 0
    for tensor in tensors:
        elements = tensor.shape[-1]
        for stride in tensor.stride()[:-1]:
            elements |= stride
        offsets |= elements * tensor.element_size() | tensor.data_ptr()
    return offsets % 16 == 0

"""One call, as one thing: what the operators pass to dispatch, and dispatch to a launcher.

A launcher is two functions, the same on every device:

    forward(call: Call, result: Result, config) -> None
    backward(call: Call, saved: Saved, grads: Gradients, config) -> None

They write every element of their outputs, which arrive uninitialised. Beside them stands `TAKES`, a `Takes` that declares
what the kernels take. Tensors may have any strides with a contiguous last dimension. Dense tensors are `[B, S, heads, D]`
with row statistics `[B, H, Sq]`; packed sequences (`call.varlen`) are `[total, heads, D]` with row statistics `[H, total_q]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 128  # granularity of TileMask in queries and in keys; independent of the kernels' own tiles
# Words before the indices of a tile list: ranked, n_partial, n_full, 0. The last one is 1 for a block of slots without keys
# (`kernels/epochs`), whose gradients nobody reads.
HEADER = 4
WORD_BITS = 32
UNBOUNDED = 1 << 30  # a band limit that limits nothing


class Options(NamedTuple):
    """The numbers of one call. Key `j` is visible to query `i` iff `i + band_lo <= j <= i + band_hi`.

    `q_origin` and `k_origin` are the positions of the first query and key in the whole sequence, where a call is a part
    of it; dropout counts positions from there. With `batch_invariant`, results of a sequence have bits that do not depend
    on the other sequences of the call; it implies `deterministic`.
    """

    band_lo: int
    band_hi: int
    q_origin: int
    k_origin: int
    softmax_scale: float
    softcap: float
    dropout_p: float
    deterministic: bool
    batch_invariant: bool = False


def plain_options(
    softmax_scale: float, band_lo: int = -UNBOUNDED, band_hi: int = UNBOUNDED, **others: float | bool
) -> Options:
    """Return options in which everything that is not given is off."""
    return Options(band_lo, band_hi, 0, 0, softmax_scale, 0.0, 0.0, False)._replace(**others)  # type: ignore[arg-type]


class Mask(NamedTuple):
    """A mask as operators and kernels take it (layout: DESIGN.md); all None where there is none.

    One of three kinds says what is visible: bits, segments, or intervals of queries for each key. Lists of tiles stand
    beside bits and segments. Without `start`, intervals begin at the first query, and so where the band begins: those of a
    causal dynamic mask. `at_most` is a promise: no query sees more keys of a head.
    """

    row_tiles: Tensor | None = None
    col_tiles: Tensor | None = None
    row_bits: Tensor | None = None
    col_bits: Tensor | None = None
    q_segments: Tensor | None = None
    k_segments: Tensor | None = None
    start: Tensor | None = None
    end: Tensor | None = None
    hidden_from: Tensor | None = None
    hidden_to: Tensor | None = None
    at_most: int | None = None

    @property
    def kind(self) -> str:
        """ "none", "bits", "segments" or "intervals"."""
        if self.row_bits is not None:
            return "bits"
        if self.k_segments is not None:
            return "segments"
        return "none" if self.end is None else "intervals"


MASK_TENSORS = Mask._fields[:-1]
# Of a `TileMask` of chosen blocks, beside segments: their numbers [B|1, Hm, Sq, k], and [block, 0], whose shape is their size.
CHOSEN_TENSORS = ("chosen", "block_keys")
NO_MASK = Mask()


class Takes(NamedTuple):
    """The calls that a launcher takes, declared in its module as `TAKES`; `dispatch` gives it no others."""

    masks: tuple[str, ...]  # kinds of masks, as `Call.kind` names them; a kind that is not listed is refused
    sinks: bool = False  # False: they compute without sinks, and `dispatch.sinks` scales their outputs and gradients
    starts: bool = False  # True: they take intervals without `start`; False: `dispatch` makes zeros of it
    oldest: int = 0  # the oldest and the newest architecture that they run on, 90 for SM 9.0
    newest: int = 1000


class Varlen(NamedTuple):
    """Packed sequences: `[B + 1]` int32 offsets, upper bounds of the lengths, and where the diagonal starts."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    top_left: bool


class Used(NamedTuple):
    """How many keys of each batch entry there are, `lengths` int32 `[B]`, and a band that is aligned with the last of them.

    Of batch entry `b`, keys from `lengths[b]` on are hidden, and key `j` is visible to query `i` iff `i + off + lo <= j <= i +
    off + hi` with `off = lengths[b] - Sq`.
    """

    lengths: Tensor
    lo: int
    hi: int


class Chosen(NamedTuple):
    """The blocks of keys that queries name: block `n` holds keys from `n * block` on.

    Query `i` sees key `j` iff `j // block` is among `indices[b, h, i]`, and segments of the mask and the band show it.
    """

    indices: Tensor  # int32 or int64 [B|1, Hm, Sq, k]; other numbers than those of blocks are none
    block: int


def dropout_threshold(dropout_p: float) -> int:
    """Return the integer, from 1 to 2^32, below which a random word of 32 bits drops its element; 0 without dropout."""
    return max(round(dropout_p * (1 << 32)), int(dropout_p > 0))


def last_dropped(dropout_p: float) -> int:
    """Return the greatest word that drops its element, as kernels take it: its 32 bits as an int32. 0 without dropout."""
    last = max(dropout_threshold(dropout_p) - 1, 0)
    return last - (last >> 31 << 32)


def dropout_scale(dropout_p: float) -> float:
    """Return the factor of kept weights: one over the probability, in steps of 2^-32, that one is kept."""
    kept = (1 << 32) - dropout_threshold(dropout_p)
    return (1 << 32) / kept if kept else 0.0


def float32_precision() -> str:
    """Return the precision of float32 products: "ieee", or "tf32" where the user allows it in torch."""
    matmul = torch.backends.cuda.matmul
    allowed = getattr(matmul, "fp32_precision", None)  # since torch 2.9; reading the older name may then raise
    if allowed is None:
        allowed = "tf32" if matmul.allow_tf32 else "ieee"
    return "tf32" if allowed == "tf32" else "ieee"


class Demand(NamedTuple):
    """The sizes of a call that the choice of a kernel depends on, besides the architecture."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    dim: int
    dim_v: int
    itemsize: int
    full_bias: bool = False  # there is a bias with queries

    @property
    def width(self) -> int:
        """The wider of both head dimensions: the tile that a kernel needs."""
        return max(self.dim, self.dim_v)

    @property
    def tiles(self) -> int:
        """Tiles of 128 queries over all heads: what there is to spread over the multiprocessors."""
        return self.batch * self.heads * -(-self.seqlen_q // TILE)


# What packed sequences of a batch-invariant call count as, whatever their lengths are: a choice that asked for those of the
# longest one would depend on the neighbours of a sequence.
INVARIANT_LENGTH = 2048


class Call(NamedTuple):
    """The inputs that forward and backward have in common: tensors, mask and options."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    mask: Mask
    sink: Tensor | None  # [H]
    seed: Tensor | None  # of dropout: [B|1, H|1]
    varlen: Varlen | None
    options: Options
    used: Used | None = None  # in calls that kernels get, `dispatch/used.py` has made it part of the mask
    # Beside segments of `mask` without lists; kernels of other masks get bits in its place
    chosen: Chosen | None = None

    @property
    def kind(self) -> str:
        """The kind of its mask, as `Mask.kind` names it, or "chosen"."""
        return self.mask.kind if self.chosen is None else "chosen"

    @property
    def demand(self) -> Demand:
        """The numbers that the choice of a kernel depends on: the sizes, in batch-invariant calls those of one entry."""
        sizes = self.sizes
        if not self.options.batch_invariant:
            return sizes
        lengths = (sizes.seqlen_q, sizes.seqlen_k) if self.varlen is None else (INVARIANT_LENGTH, INVARIANT_LENGTH)
        return sizes._replace(batch=1, seqlen_q=lengths[0], seqlen_k=lengths[1])

    @property
    def sizes(self) -> Demand:
        """The sizes of a call; variable lengths count as their upper bounds, at most all rows."""
        *batch, seqlen_q, heads, dim = self.query.shape
        size, seqlen_k = batch[0] if batch else 1, self.key.shape[-3]
        if self.varlen is not None:
            size = self.varlen.cu_seqlens_q.shape[0] - 1
            seqlen_q, seqlen_k = min(self.varlen.max_seqlen_q, seqlen_q), min(self.varlen.max_seqlen_k, seqlen_k)
        full_bias, itemsize = bias_kind(self.bias) == "full", self.query.element_size()
        return Demand(size, heads, seqlen_q, seqlen_k, dim, self.value.shape[-1], itemsize, full_bias)


class Result(NamedTuple):
    """The outputs of a forward, which it writes.

    `lse + lse_tail` is the logarithm of the sum of exp(score): `lse` alone, rounded to float32, cannot hold the logarithm of
    a sum beside a score of 1e9, and the backward needs probabilities that add up to 1 there too. A query without visible
    keys has `lse = -inf` and `lse_tail = 0`.
    """

    out: Tensor
    lse: Tensor
    lse_tail: Tensor
    row_max: Tensor | None  # the largest visible score, where it is asked for


class Saved(NamedTuple):
    """The outputs of the forward that its backward reads. `lse` and `lse_tail` may be those of more keys than the call has."""

    out: Tensor
    lse: Tensor
    lse_tail: Tensor


class Gradients(NamedTuple):
    """The gradients of the outputs that a backward is given, and those that it writes; dbias is contiguous."""

    grad_out: Tensor
    grad_lse: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsink: Tensor | None = None


def bias_kind(bias: Tensor | None) -> str:
    """Return the kind of a bias: "none", "key" (one value for each key), or "full" (one for each query and key)."""
    return "none" if bias is None else kind_of_shape(bias.shape)


def kind_of_shape(shape: Sequence[int]) -> str:
    """Return the kind of a bias of this shape, "key" or "full"."""
    return "key" if len(shape) == 2 or shape[2] == 1 else "full"


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


def is_unshared(call: Call) -> bool:
    """Return whether kernels that sum up the gradient of a bias have nothing to sum: each score has an element of its own.

    In batch-invariant calls batch entries that share a bias do not count, since a call of one of them shares it with none.
    """
    if call.options.batch_invariant:
        return bias_kind(call.bias) == "full" and call.bias.shape[1] == call.query.shape[-2]  # type: ignore[union-attr]
    return is_whole(call.bias, call.query)


def owns_bias(call: Call) -> bool:
    """Return whether portable kernels write the gradient of a call's bias as they go.

    In a batch-invariant call another kernel does, whatever shares the bias: they compute dq alike for one and many batch entries.
    """
    return not call.options.batch_invariant and is_whole(call.bias, call.query)


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

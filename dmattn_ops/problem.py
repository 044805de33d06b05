"""The vocabulary of a call below the public functions: constants, and small tuples in which every default is resolved."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TILE = 128  # granularity of TileMask in queries and in keys; independent of the kernels' own tiles
# Words before the indices of a tile list: ranked, n_partial, n_full, 0. The last one is 1 for a block of slots without keys
# (`kernels/packing`), whose gradients nobody reads.
HEADER = 4
WORD_BITS = 32
UNBOUNDED = 1 << 30  # a band limit that limits nothing


class Options(NamedTuple):
    """The numbers of one call. Key `j` is visible to query `i` iff `i + band_lo <= j <= i + band_hi`.

    `q_origin` and `k_origin` are the positions of the first query and key in the whole sequence, where a call is a part
    of it; dropout counts positions from there.
    """

    band_lo: int
    band_hi: int
    q_origin: int
    k_origin: int
    softmax_scale: float
    softcap: float
    dropout_p: float
    deterministic: bool


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
NO_MASK = Mask()


class Varlen(NamedTuple):
    """Packed sequences: `[B + 1]` int32 offsets, upper bounds of the lengths, and where the diagonal starts."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    top_left: bool


def dropout_threshold(dropout_p: float) -> int:
    """Return the integer, from 1 to 2^32, below which a random word of 32 bits drops its element; 0 without dropout."""
    return max(round(dropout_p * (1 << 32)), int(dropout_p > 0))


def last_dropped(dropout_p: float) -> int:
    """Return the greatest word that drops its element, as kernels take it: its 32 bits as an int32. 0 without dropout."""
    last = max(dropout_threshold(dropout_p) - 1, 0)
    return last - (last >> 31 << 32)


def dropout_scale(dropout_p: float) -> float:
    """Return what kept weights are multiplied by: one over the probability, in steps of 2^-32, that one is kept."""
    kept = (1 << 32) - dropout_threshold(dropout_p)
    return (1 << 32) / kept if kept else 0.0


def float32_precision() -> str:
    """Return how float32 products may be computed: "ieee", or "tf32" where the user allows it in torch."""
    matmul = torch.backends.cuda.matmul
    allowed = getattr(matmul, "fp32_precision", None)  # since torch 2.9; reading the older name may then raise
    if allowed is None:
        allowed = "tf32" if matmul.allow_tf32 else "ieee"
    return "tf32" if allowed == "tf32" else "ieee"

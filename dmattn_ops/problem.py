"""What reaches a kernel: small tuples in which every default and alignment is already resolved."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TILE = 128  # granularity of TileMask in queries and in keys; independent of the kernels' own tiles
HEADER = 4  # words before the indices of a tile list: ranked, n_partial, n_full, 0
WORD_BITS = 32
UNBOUNDED = 1 << 30  # a band limit that limits nothing


class Options(NamedTuple):
    """Scalars of one call. Key `j` is visible to query `i` iff `i + band_lo <= j <= i + band_hi`."""

    band_lo: int
    band_hi: int
    softmax_scale: float
    softcap: float
    dropout_p: float
    deterministic: bool


class Tiles(NamedTuple):
    """The tensors of a mask (layout: DESIGN.md); all None where there is none."""

    row_tiles: Tensor | None = None
    col_tiles: Tensor | None = None
    row_bits: Tensor | None = None
    col_bits: Tensor | None = None
    q_segments: Tensor | None = None
    k_segments: Tensor | None = None


class Varlen(NamedTuple):
    """Packed sequences: `[B + 1]` int32 offsets, upper bounds of the lengths, and where the diagonal starts."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    top_left: bool


def dropout_threshold(dropout_p: float) -> int:
    """Return the 24-bit integer below which a Philox word drops its element."""
    return round(dropout_p * (1 << 24))


def float32_precision() -> str:
    """Return how float32 products may be computed: "ieee", or "tf32" where the user allows it in torch."""
    matmul = torch.backends.cuda.matmul
    allowed = getattr(matmul, "fp32_precision", None)  # since torch 2.9; reading the older name may then raise
    if allowed is None:
        allowed = "tf32" if matmul.allow_tf32 else "ieee"
    return "tf32" if allowed == "tf32" else "ieee"

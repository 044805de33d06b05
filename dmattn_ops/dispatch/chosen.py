"""The operators of blocks of keys that queries choose, on real tensors: their mask, and the masses of attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dmattn_ops.checks import chosen as checks
from dmattn_ops.dispatch import run
from dmattn_ops.dispatch.operators import _below_autograd, _contiguous, _launch, _reads_values
from dmattn_ops.launching import plans
from dmattn_ops.masks import chosen
from dmattn_ops.masks.chunks import pack_in_chunks
from dmattn_ops.meta import fakes
from dmattn_ops.ops import schemas


def pack_selection(*arguments: Any) -> tuple[Tensor, ...]:
    """Compute row_tiles, col_tiles, row_bits and col_bits of chosen blocks `[B|1, Hm, Sq, k]` and segments."""
    outputs = fakes.pack_selection(*arguments)
    read = schemas.SIGNATURES["pack_selection"].read(arguments)
    indices, block, seqlen_k = read.indices, read.block, read.seqlen_k
    if _reads_values(indices):
        checks.in_range(indices, checks.block_count(seqlen_k, block))
    segments = _contiguous(read.q_segments), _contiguous(read.k_segments)
    limits = read.band_lo, read.band_hi
    kernels = run.kernels_of_chosen_blocks(indices.device)
    if kernels is not None:
        _launch(indices, kernels.pack_selection, indices, *segments, block, seqlen_k, *limits, *outputs)
        return outputs

    def visible(start: int, stop: int) -> Tensor:
        return chosen.shown_keys(indices[:, :, start:stop], block, seqlen_k)

    batch, heads = outputs[0].shape[:2]
    return pack_in_chunks(visible, segments, (batch * heads, indices.shape[2], seqlen_k), limits)


_planned = _below_autograd(pack_selection)
schemas.implement("pack_selection", plans.planned(_planned, schemas.SIGNATURES["pack_selection"]))

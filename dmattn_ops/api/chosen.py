"""Calls with a mask of blocks that queries name: what their operator takes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dmattn_ops.api import arguments
from dmattn_ops.bands import Band
from dmattn_ops.call import NO_MASK
from dmattn_ops.checks import validation
from dmattn_ops.masks.tile_mask import TileMask


def call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: TileMask,
    bias: Tensor | None,
    sink: Tensor | None,
    band: Band,
    scalars: tuple[Any, ...],
) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
    """Return the tensors and the numbers that `forward.chosen` takes; `scalars` are scale, soft cap, dropout and determinism."""
    (query, key, value), bias, sink = arguments.prepared_inputs(4, bias, sink, query=query, key=key, value=value)
    validation.dense_tensors(query, key, value, bias, sink)
    (batch, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _) = query.shape, key.shape
    arguments.check_mask(mask, query, (1, batch), (1, heads_kv, heads), (1, seqlen_q), (seqlen_k,))
    mask, seed = mask.also(band), arguments.dropout_seed(query) if scalars[2] != 0.0 else None
    assert mask.chosen is not None and mask.block_keys is not None
    beside = NO_MASK._replace(q_segments=mask.q_segments, k_segments=mask.k_segments)
    limits = mask.band.limits(seqlen_q, seqlen_k)
    tensors = (query, key, value, mask.chosen, bias, *beside[:-1], sink, seed)
    return tensors, (*limits, 0, 0, None, *scalars, mask.block_keys.shape[0])

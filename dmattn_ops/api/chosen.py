"""Calls with a mask of blocks that queries name: what their operator takes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dmattn_ops.api import arguments
from dmattn_ops.bands import Band
from dmattn_ops.call import NO_MASK, Call, Chosen, plain_options
from dmattn_ops.checks import validation
from dmattn_ops.dispatch import run
from dmattn_ops.masks.tile_mask import TileMask


def call_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: TileMask,
    sink: Tensor | None,
    band: Band,
    scalars: tuple[Any, ...],
) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
    """Return the tensors and the numbers that `forward.chosen` takes of a call without a bias and dropout.

    `scalars` are scale, soft cap, dropout and determinism.
    """
    (query, key, value), _, sink = arguments.prepared_inputs(4, None, sink, query=query, key=key, value=value)
    validation.dense_tensors(query, key, value, None, sink)
    (batch, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _) = query.shape, key.shape
    arguments.check_mask(mask, query, (1, batch), (1, heads_kv, heads), (1, seqlen_q), (seqlen_k,))
    mask = mask.also(band)
    assert mask.chosen is not None and mask.block_keys is not None
    beside = NO_MASK._replace(q_segments=mask.q_segments, k_segments=mask.k_segments)
    limits = mask.band.limits(seqlen_q, seqlen_k)
    tensors = (query, key, value, mask.chosen, None, *beside[:-1], sink, None)
    return tensors, (*limits, 0, 0, None, *scalars, mask.block_keys.shape[0])


def is_gathered(tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]) -> bool:
    """Return whether kernels gather what a call of `call_of` names; others take bits."""
    query, key, value, indices = tensors[:4]
    assert query is not None and key is not None and value is not None and indices is not None
    named = Chosen(indices, numbers[-1])
    call = Call(query, key, value, None, NO_MASK, None, None, None, plain_options(1.0), chosen=named)
    return not run.reasons_against_lists("forward", call)

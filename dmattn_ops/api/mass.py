"""How much attention keys get: `selection_mass` of the blocks that queries chose, `key_mass` of every key."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from dmattn_ops.api import arguments
from dmattn_ops.bands import CausalFrom, Window
from dmattn_ops.checks import chosen, dtensors, require, validation
from dmattn_ops.masks import prepare
from dmattn_ops.masks.chosen import segments_beside
from dmattn_ops.masks.documents import Documents
from dmattn_ops.masks.tile_mask import TileMask


def selection_mass(
    query: Tensor,
    key: Tensor,
    indices: Tensor,
    *,
    block: int = 1,
    is_causal: bool = True,
    causal_from: CausalFrom = "bottom_right",
    window_size: Window = (None, None),
    documents: Documents | None = None,
    bias: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0,
    lse: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Return the attention that each chosen block gets, which is what an indexer learns to predict. Has no gradient.

    For each number among the indices, the probabilities of the visible keys of its block, summed over these keys and over the
    query heads that share a key head. The probabilities of a query and head are those of attention under
    `selection_mask(indices, ...)`, and add up to 1 where it sees a key; sinks take no share. They are computed anew from
    query and key, in float32 (float64 for float64), in O(Sq * k) memory.

    Args:
        query: with shape `[B, Sq, H, D]`.
        key: with shape `[B, Sk, Hkv, D]`.
        indices: int32 or int64 `[B|1, H|Hkv|1, Sq, k]`, as in `selection_mask`. The result is 0 where an index is -1, and where it
            repeats one before it in the row.
        block: how many keys a block has.
        is_causal, causal_from, window_size: as in `selection_mask`.
        documents: ids `[B|1, S]` or a pair of ids, as in `selection_mask`.
        bias: as in `flash_dmattn_func`.
        softmax_scale, softcap: as in `flash_dmattn_func`.
        lse: `[B, H, Sq]`, as `flash_dmattn_func(..., return_lse=True)` returns it under the same mask: saves half of the work.
            With the lse of attention to more keys, the probabilities are those among all these keys, and add up to less than 1.

    Returns:
        float32 (float64 for float64) `[B, Hkv, Sq, k]`. Where each of the `H` query heads has its own indices, `[B, H, Sq, k]`,
            not summed over heads.

    Raises:
        ValueError, TypeError: as `selection_mask` and `flash_dmattn_func`.
    """
    if unknown:
        arguments.unknown_names("selection_mass", unknown)
    validation.dense(indices=indices)
    dtensors.load_rules(query, key, indices, documents, lse)
    (query, key), bias, _ = arguments.prepared_inputs(4, bias, None, query=query, key=key)
    block = require.integer("block", block)
    chosen.indices_alone(indices, block)
    band, (scale, softcap, _) = arguments.read_numbers(is_causal, causal_from, window_size, softmax_scale, softcap, 0.0)
    lse = _as_saved(lse)
    seqlen_q, seqlen_k = query.shape[1], key.shape[1]
    segments = segments_beside(indices, documents, None, query.shape[0], seqlen_q, seqlen_k)
    bias = None if bias is None else bias.detach()
    tensors = (query.detach(), key.detach(), indices, *segments, bias, lse)
    return torch.ops.dmattn.selection_mass(*tensors, block, *band.limits(seqlen_q, seqlen_k), scale, softcap)


def key_mass(
    query: Tensor,
    key: Tensor,
    mask: Tensor | TileMask | None = None,
    *,
    is_causal: bool = False,
    causal_from: CausalFrom = "bottom_right",
    window_size: Window = (None, None),
    bias: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0,
    lse: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Return the attention that each key gets from all queries, by which H2O and SnapKV keep keys. Has no gradient.

    The probabilities are those of `flash_dmattn_func` with the same arguments, without dropout and sinks, summed over the
    queries and over the query heads that share a key head. They are computed anew from query and key, in float32 (float64 for
    float64); on a GPU without more memory than the result and the rows' statistics take.

    Args:
        query: with shape `[B, Sq, H, D]`.
        key: with shape `[B, Sk, Hkv, D]`.
        mask: as in `flash_dmattn_func`.
        is_causal, causal_from, window_size: as in `flash_dmattn_func`.
        bias: as in `flash_dmattn_func`.
        softmax_scale, softcap: as in `flash_dmattn_func`.
        lse: `[B, H, Sq]`, as `flash_dmattn_func(..., return_lse=True)` returns it: saves half of the work.

    Returns:
        float32 (float64 for float64) `[B, Hkv, Sk]`.

    Raises:
        ValueError, TypeError: as `flash_dmattn_func`.
    """
    if unknown:
        arguments.unknown_names("key_mass", unknown)
    dtensors.load_rules(query, key, lse)
    (query, key), bias, _ = arguments.prepared_inputs(4, bias, None, query=query, key=key)
    validation.query_key_value(query, key, key, 4)
    (batch, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _) = query.shape, key.shape
    band, (scale, softcap, _) = arguments.read_numbers(is_causal, causal_from, window_size, softmax_scale, softcap, 0.0)
    lse = _as_saved(lse)
    arguments.check_mask(mask, query, (1, batch), (1, heads_kv, heads), (1, seqlen_q), (seqlen_k,))
    parts, *limits = prepare.resolve(mask, band, seqlen_q, seqlen_k)
    bias = None if bias is None else bias.detach()
    tensors = (query.detach(), key.detach(), bias, *parts[:-1], lse)
    return torch.ops.dmattn.key_mass(*tensors, *limits, parts.at_most, scale, softcap)


def _as_saved(lse: Tensor | None) -> Tensor | None:
    """Return an lse without its gradient; refuse what is no tensor."""
    if lse is None:
        return None
    validation.dense(lse=lse)
    return lse.detach()


for _function in (selection_mass, key_mass):
    require.without_unknown(_function)

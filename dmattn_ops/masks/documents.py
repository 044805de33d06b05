"""Documents: ids that say which queries and keys belong together, checked, and as the segments of a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dmattn_ops import symbolic
from dmattn_ops.checks import dtensors, require, validation
from dmattn_ops.masks import layout
from dmattn_ops.masks.tile_mask import Segments

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_NARROW_INTEGERS = (torch.uint8, torch.int8, torch.int16)  # twice any of these fits int32
Documents = Tensor | tuple[Tensor, Tensor]
Pair = tuple[Tensor, Tensor]
Intervals = tuple[Tensor | None, Tensor]  # start and end; without a start, nothing but a band says where a key begins


def id_pair(documents: Any) -> tuple[Tensor, Tensor]:
    """Return the ids of queries and of keys, `[B|1, S]`; refuse what is neither ids nor a pair of them."""
    pair = _pair(documents)
    if len(pair) != 2:
        raise TypeError(f"documents must be ids or a pair of ids, got {len(pair)} of them")
    for ids in pair:
        validation.dense(documents=ids)
        require.rank("documents", ids, 2, require.DOCUMENTS)
        require.dtype("documents", ids, *validation.INTEGERS)
    require.device("documents of keys", pair[1], pair[0].device, "those of queries")
    return pair[0], pair[1]


def as_integers(documents: Any) -> Any:
    """Return documents with integers for ids that are bool; anything else as it is, to be checked."""
    if isinstance(documents, (tuple, list)):
        pair = [as_integers(ids) for ids in documents]
        return pair if isinstance(documents, list) else tuple(pair)
    is_bool = isinstance(documents, Tensor) and documents.dtype == torch.bool
    return documents.to(torch.uint8) if is_bool else documents


def _pair(documents: Any) -> Any:
    return documents if isinstance(documents, (tuple, list)) else (documents, documents)


def require_fitting(
    mask: Tensor | BlockMask | None,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    known_q: int | None,
    seqlen_k: int,
) -> None:
    """Refuse ids that do not fit the mask beside them."""
    if of_queries is None or of_keys is None:
        return
    if isinstance(mask, Tensor):
        require.device("documents", of_keys, mask.device, "mask")
    parts = [part for part in (mask, of_queries, of_keys) if isinstance(part, Tensor)]
    batch = symbolic.wider(part.shape[0] for part in parts)
    for ids in (of_keys, of_queries):
        require.sizes("documents", ids, (1, batch), (ids.shape[1],))
    if not symbolic.same(seqlen_k, of_keys.shape[1]):
        raise ValueError(
            f"documents must have shape (B|1, {require.size_text(seqlen_k)}), got {require.text(of_keys.shape)}"
        )
    assert known_q is not None
    if not symbolic.same(known_q, of_queries.shape[1]):
        got = f"got {require.size_text(known_q)} and {require.size_text(of_queries.shape[1])}"
        if of_queries is of_keys:
            raise ValueError(f"mask must have as many queries as keys where documents are given, {got}")
        raise ValueError(f"mask must have as many queries as documents has, {got}")


def clipped_to_runs(intervals: Intervals, documents: Tensor) -> Pair | None:
    """Return intervals that end with the document of their key, or None where an id returns later. Reads the ids."""
    first, last = dtensors.row_by_row(layout.runs, documents)
    if not layout.is_one_run_each(documents):
        return None
    start, end = intervals
    first, last = first.unsqueeze(1), torch.minimum(end, last.unsqueeze(1))
    return first.expand_as(last) if start is None else torch.maximum(start, first), last


def segments_of(documents: Documents | None, keep: Tensor | None) -> Segments:
    """Return int32 segments `[B|1, Sq]` of queries and `[B|1, Hm, Sk]` of keys; `keep` `[B|1, Hm, Sk]` is not 0 at visible keys.

    With both, a dropped key gets an odd number next to its own document's even one: no query has it, and the range of
    numbers in a tile of keys stays that of its documents. Both are contiguous, whatever they come from.
    """
    if keep is not None and keep.dtype != torch.bool:
        keep = keep != 0
    if documents is None:
        return None, None if keep is None else (keep.to(torch.int32) - 1).contiguous()
    of_queries, of_keys = _numbered(documents, keep is not None)
    if keep is None:
        return of_queries, of_keys.unsqueeze(1).clone()
    return 2 * of_queries, (2 * of_keys.unsqueeze(1) + (~keep).to(torch.int32)).contiguous()


def _numbered(documents: Documents, doubled: bool) -> tuple[Tensor, Tensor]:
    """Return ids `[B|1, Sq]` and `[B|1, Sk]` as int32 numbers, small enough to be `doubled`."""
    of_queries, of_keys = _pair(documents)
    narrow = all(
        ids.dtype in _NARROW_INTEGERS or (not doubled and ids.dtype == torch.int32) for ids in (of_queries, of_keys)
    )
    if narrow:
        return tuple(ids.to(torch.int32, copy=True).contiguous() for ids in (of_queries, of_keys))  # type: ignore[return-value]
    if of_queries is of_keys:
        numbers = torch.ops.dmattn.rank_ids(of_keys)
        return numbers, numbers
    batch = symbolic.wider((of_queries.shape[0], of_keys.shape[0]))
    both = torch.cat([ids.to(torch.int64).expand(batch, -1) for ids in (of_queries, of_keys)], dim=1)
    ranks = torch.ops.dmattn.rank_ids(both)
    return layout.own(ranks[:, : of_queries.shape[1]]), layout.own(ranks[:, of_queries.shape[1] :])

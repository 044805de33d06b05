"""What is refused of blocks of keys that queries choose by indices, and of the masses of attention over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dmattn_ops import environment, symbolic
from dmattn_ops.call import TILE, UNBOUNDED, Call
from dmattn_ops.checks import require, validation
from dmattn_ops.meta import ceil_div, lse_dtype

AXES = "[B, heads, Sq, k]"


def indices_alone(indices: Tensor, block: int) -> None:
    """Refuse what are no indices int32 or int64 `[B|1, Hm, Sq, k]` of blocks of `block` keys."""
    require.rank("indices", indices, 4, AXES)
    require.dtype("indices", indices, torch.int32, torch.int64)
    if symbolic.certainly(block < 1) or symbolic.certainly(block > TILE):
        raise ValueError(f"block must be between 1 and {TILE}, got {block}")
    if symbolic.certainly(indices.shape[2] >= UNBOUNDED):
        raise ValueError(f"indices must have fewer than {UNBOUNDED} queries, got {indices.shape[2]}")


def blocks(
    indices: Tensor, q_segments: Tensor | None, k_segments: Tensor | None, block: int, seqlen_k: int
) -> tuple[int, int]:
    """Refuse indices and segments that do not fit each other; return the batch and the heads of the whole."""
    indices_alone(indices, block)
    [seqlen_k] = require.lengths(seqlen_k=seqlen_k)
    parts = [part for part in (indices, q_segments, k_segments) if part is not None]
    batch = symbolic.wider(part.shape[0] for part in parts)
    require.sizes("indices", indices, (1, batch), *((size,) for size in indices.shape[1:]))
    _segments(indices, q_segments, k_segments, batch, seqlen_k)
    return batch, indices.shape[1]


def _segments(indices: Tensor, q_segments: Tensor | None, k_segments: Tensor | None, batch: int, seqlen_k: int) -> None:
    """Refuse segments of other shapes than `[B|1, Sq]` and `[B|1, 1, Sk]`."""
    named = (("q_segments", q_segments, (indices.shape[2],)), ("k_segments", k_segments, (1, seqlen_k)))
    for name, part, sizes in named:
        if part is not None:
            require.sizes(name, part, (1, batch), *((size,) for size in sizes))
            require.dtype(name, part, torch.int32)
            require.device(name, part, indices.device, "indices")
    if q_segments is not None and k_segments is None:
        raise ValueError("k_segments must be a tensor where q_segments is one, got None")


def of_call(call: Call) -> None:
    """Refuse chosen blocks and other parts of a mask that do not fit the tensors of a dense call."""
    assert call.chosen is not None
    mask, (indices, block) = call.mask, call.chosen
    (batch, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _) = call.query.shape, call.key.shape
    beside = [name for name, part in mask._asdict().items() if part is not None and not name.endswith("segments")]
    if beside:
        raise ValueError(f"beside chosen a mask has q_segments and k_segments at most, got {', '.join(beside)}")
    blocks(indices, mask.q_segments, mask.k_segments, block, seqlen_k)
    require.sizes("chosen", indices, (1, batch), (1, heads_kv, heads), (seqlen_q,), (indices.shape[3],))
    require.device("chosen", indices, call.query.device)
    for name, part in (("q_segments", mask.q_segments), ("k_segments", mask.k_segments)):
        if part is not None:
            require.sizes(name, part, (1, batch), *((size,) for size in part.shape[1:]))


def mass_of_selection(read: Any) -> None:
    """Refuse arguments of `selection_mass`, given by name, that do not belong together."""
    query, key, indices = read.query, read.key, read.indices
    validation.dense_tensors(query, key, key, read.bias, None)
    indices_alone(indices, read.block)
    (batch, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _) = query.shape, key.shape
    require.sizes("indices", indices, (1, batch), (1, heads_kv, heads), (seqlen_q,), (indices.shape[3],))
    require.device("indices", indices, query.device)
    _segments(indices, read.q_segments, read.k_segments, batch, seqlen_k)
    row_sums(read.lse, query)
    validation.scalars(read.softmax_scale, read.softcap, 0.0)


def row_sums(lse: Tensor | None, query: Tensor) -> None:
    """Refuse what is no lse `[B, H, Sq]` of a call with this query."""
    if lse is None:
        return
    batch, seqlen_q, heads, _ = query.shape
    require.shape("lse", lse, (batch, heads, seqlen_q))
    require.dtype("lse", lse, lse_dtype(query.dtype))
    require.device("lse", lse, query.device)


def block_count(seqlen_k: int, block: int) -> int:
    """Return the number of blocks of `block` keys; the last one may be shorter."""
    return ceil_div(seqlen_k, block)


def in_range_if_asked(indices: Tensor, count: int) -> None:
    """Refuse as `in_range` does where values on a GPU are to be checked (`DMATTN_CHECK=1`)."""
    if not is_compiling() and type(indices) is Tensor and environment.checks():
        in_range(indices, count)


def in_range(indices: Tensor, count: int) -> None:
    """Refuse indices of blocks other than -1 (none) and 0 to `count - 1`. Reads them on the host."""
    wrong = (indices < -1) | (indices >= count)
    if bool(wrong.any()):
        got = int(indices[wrong][0])
        raise ValueError(f"indices must be -1 (none) or between 0 and {count - 1}, the last block, got {got}")

"""The outputs of each operator: shape, dtype and strides, stated once for the fakes and for the launchers.

Every function allocates uninitialised, contiguous tensors on its first tensor's device and asks nothing of that device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn_ops.call import HEADER, TILE, UNBOUNDED, WORD_BITS
from dmattn_ops.symbolic import known_equal, larger, smaller


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)  # 0.9 us; new_empty(shape) takes 1.6


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of lse for inputs of `dtype`: float32, or float64 where the inputs are."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward_outputs(query: Tensor, value: Tensor, needs_max: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate out `[B, Sq, H, Dv]`, and lse, lse_tail and row_max `[B, H, Sq]`; row_max is empty where it is not asked for.

    For packed sequences, query `[total_q, H, D]`: out `[total_q, H, Dv]`, and the others `[H, total_q]`.
    """
    *batch, seqlen_q, heads, _ = query.shape
    rows, wide = (*batch, heads, seqlen_q), lse_dtype(query.dtype)
    out = query.new_empty((*batch, seqlen_q, heads, value.shape[-1]))
    lse = query.new_empty(rows, dtype=wide)
    return out, lse, _like(lse), _like(lse) if needs_max else lse.new_empty((0,))


def backward_outputs(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate dq, dk, dv, dbias and dsink, each with its input's shape (dense and variable lengths); empty for None."""
    return (_like(query), _like(key), _like(value), _gradient(query, bias), _gradient(query, sink))


def qkvpacked_backward_outputs(qkv: Tensor, bias: Tensor | None, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the packed gradient `[B, S, 3, H, D]`, dbias and dsink."""
    return _like(qkv), _gradient(qkv, bias), _gradient(qkv, sink)


def _gradient(on: Tensor, of: Tensor | None) -> Tensor:
    return on.new_empty((0,)) if of is None else _like(of)


def key_lifetimes_outputs(scores: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Allocate start and end `[batch, Hm, S]` for scores `[B|1, Hm, S]`."""
    shape = (batch, *scores.shape[1:])
    return scores.new_empty(shape, dtype=torch.int32), scores.new_empty(shape, dtype=torch.int32)


def keep_step_outputs(places: Tensor) -> Tensor:
    """Allocate which slots are seen, int32 `[B, Hkv, N]`, for places `[B, Hkv, 4, N]`."""
    batch, heads, _, slots = places.shape
    return places.new_empty((batch, heads, slots), dtype=torch.int32)


def keep_chunk_outputs(
    key_cache: Tensor, value_cache: Tensor, bias_cache: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate what the queries of `count` new positions attend to: the slots of a cache and, behind them, the new keys.

    ends int32 `[B, Hkv, N + n]`, keys `[B, N + n, Hkv, D]`, values, and biases `[B, Hkv|H, N + n]`, which are empty without a bias.
    """
    batch, heads, slots, dim = key_cache.shape
    seqlen = slots + count
    ends = key_cache.new_empty((batch, heads, seqlen), dtype=torch.int32)
    keys = key_cache.new_empty((batch, seqlen, heads, dim))
    values = value_cache.new_empty((batch, seqlen, heads, value_cache.shape[3]))
    if bias_cache is None:
        return ends, keys, values, key_cache.new_empty((0,))
    return ends, keys, values, bias_cache.new_empty((batch, bias_cache.shape[1], seqlen))


def rank_ids_outputs(ids: Tensor) -> Tensor:
    """Allocate int32 ranks like ids `[B, S]`."""
    return ids.new_empty(ids.shape, dtype=torch.int32)


def spread_lists_outputs(indices: Tensor, columns: int) -> Tensor:
    """Allocate bool `[..., columns]` for lists `[..., slots]`."""
    return indices.new_empty((*indices.shape[:-1], columns), dtype=torch.bool)


def ceil_div(size: int, divisor: int) -> int:
    """Return `size / divisor`, rounded up: always by this formula, so that tracers see equal sizes as equal."""
    return (size + divisor - 1) // divisor


def tile_records(seqlen: int) -> int:
    """Return the number of records that a list of tiles has for `seqlen` positions: one for each tile, but at least two.

    The second one of a short sequence is empty. A dimension that is 1 for some lengths only would be a special case to
    compilers and exporters: one graph more, or a range of lengths that ends at 128. Two and a number that is not negative,
    not the larger of two numbers: from that, a tracer proves that a row of lists is shorter than all rows together, which
    torch asks of every map of tiles; the exporter refuses the same as a guard that may not hold for every length.

    `torch.compile` gets that number as a quotient: torch keeps guards as text of Python beside the graphs that it caches, and
    where it finds one again, it runs this text on its symbols, for which `max` makes a guard of which one is larger. The
    exporter gets it by `larger`: it cannot solve for a length that is in a divisor.
    """
    tiles = ceil_div(seqlen, TILE)
    if torch.compiler.is_exporting():
        return 2 + larger(0, tiles - 2)
    return 2 + tiles * (tiles - 1) // (tiles + 1)


def list_capacity(tiles: int, band_lo: int, band_hi: int) -> int:
    """Return the most tiles of the other side that one tile can see inside the band."""
    for limit in (-band_lo, band_hi):
        if isinstance(limit, int) and limit >= UNBOUNDED:
            return tiles  # a symbolic minimum would be a guard that export cannot prove
    span = band_hi - band_lo + 1  # keys a single query sees; a tile of queries sees TILE - 1 more
    return larger(0, smaller(tiles, ceil_div(span + TILE - 1, TILE) + 1))


def list_tiles_outputs(
    like: Tensor, batch: int, heads: int, seqlen_q: int, seqlen_k: int, band_lo: int, band_hi: int
) -> tuple[Tensor, Tensor]:
    """Allocate row_tiles `[batch, heads, nQ, 4 + capacity]` and col_tiles `[batch, heads, nK, 4 + capacity]`.

    `nQ` and `nK` are `tile_records` of the lengths.
    """
    rows, cols = tile_records(seqlen_q), tile_records(seqlen_k)
    row_tiles = like.new_empty((batch, heads, rows, HEADER + list_capacity(cols, band_lo, band_hi)), dtype=torch.int32)
    col_tiles = like.new_empty((batch, heads, cols, HEADER + list_capacity(rows, band_lo, band_hi)), dtype=torch.int32)
    return row_tiles, col_tiles


def pack_mask_outputs(
    mask: Tensor, batch: int, heads: int, seqlen_q: int, band_lo: int, band_hi: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate lists and bits of a dense mask `[Bm, Hm, Sq or 1, Sk]`, or of another whose last dimension is `Sk`."""
    return bits_outputs(mask, batch, heads, seqlen_q, mask.shape[-1], band_lo, band_hi)


def bits_outputs(
    like: Tensor, batch: int, heads: int, seqlen_q: int, seqlen_k: int, band_lo: int, band_hi: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate lists and bits of a mask of `seqlen_q` queries and `seqlen_k` keys."""
    rows, cols = ceil_div(seqlen_q, TILE), ceil_div(seqlen_k, TILE)
    words = TILE // WORD_BITS
    row_bits = like.new_empty((batch, heads, rows * TILE, cols * words), dtype=torch.int32)
    col_bits = like.new_empty((batch, heads, cols * TILE, rows * words), dtype=torch.int32)
    return (*list_tiles_outputs(like, batch, heads, seqlen_q, seqlen_k, band_lo, band_hi), row_bits, col_bits)


def selection_mass_outputs(query: Tensor, key: Tensor, indices: Tensor) -> Tensor:
    """Allocate masses `[B, Hkv, Sq, k]`, or `[B, H, Sq, k]` for indices `[B|1, Hm, Sq, k]` of all `H` heads."""
    batch, seqlen_q, heads, _ = query.shape
    heads = heads if known_equal(indices.shape[1], heads) else key.shape[2]
    return query.new_empty((batch, heads, seqlen_q, indices.shape[3]), dtype=lse_dtype(query.dtype))


def key_mass_outputs(query: Tensor, key: Tensor) -> Tensor:
    """Allocate masses `[B, Hkv, Sk]`."""
    batch, seqlen_k, heads_kv, _ = key.shape
    return query.new_empty((batch, heads_kv, seqlen_k), dtype=lse_dtype(query.dtype))

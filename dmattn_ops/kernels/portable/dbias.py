"""The gradient of a bias that several batches or heads share: sums of dS, without atomics or a `[B, H, Sq, Sk]` tensor.

For a bias per key, the dk/dv kernel has written sums over the queries of each head, and they are added up here. For a bias
with a query dimension, each program computes one block of dbias: it recomputes dS for every batch and head that reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.call import TILE as _TILE
from dmattn_ops.call import Call, Gradients, Saved, bias_kind, is_pairwise, owns_bias, rows_are_aligned
from dmattn_ops.choice import arch
from dmattn_ops.choice.config import PortableBackward
from dmattn_ops.kernels.interval_lists import listed
from dmattn_ops.kernels.portable.arguments import (
    ROW_TENSORS,
    UNSPECIALIZED,
    Extent,
    Shape,
    broadcast_stride,
    ceil_div,
    extent,
    features_of,
    is_banded,
    list_arguments,
    shape_of,
)
from dmattn_ops.kernels.portable.dropout import Seeds, dropout_of
from dmattn_ops.kernels.portable.heads import Head
from dmattn_ops.kernels.portable.places import HEADER, TILE, Band, Place, counts_of, head_offset
from dmattn_ops.kernels.portable.primitives import (
    load_rows,
    rows_of,
    statistics_of,
    store_scores,
)
from dmattn_ops.kernels.portable.queries import load_queries, step_gradient
from dmattn_ops.kernels.portable.scores import Bias, BiasArray, Factors, bias_of
from dmattn_ops.kernels.portable.statistics import gradient_arguments
from dmattn_ops.kernels.portable.visibility import BitArray, KeyArrays, MaskArrays, mask_of_head
from dmattn_ops.launching.launch import computed, launch, makes_zeros, sum_into, workspace

ENTRIES = 128  # list entries that one iteration marks
PROGRAMS = 2  # that share a multiprocessor
ADDED_UP = 4  # batches, or members of a sum, in whose time the sum of a part is written and added to others
MOST_PARTS = 16  # float32 sums of a shared bias that a call has room for


@triton.jit(do_not_specialize=["tiles_w", "key_tiles"])
def mark_kernel(tiles, states, tiles_w, key_tiles, ENTRIES: tl.constexpr):
    """Write the states of one query tile, `[key_tiles]`: 1 where its list has a partial tile, 2 where a full one."""
    program = tl.program_id(0).to(tl.int64)
    record = tiles + program * tiles_w
    n_partial, n_full = counts_of(record, tiles_w - HEADER)
    count = n_partial + n_full
    for first in tl.range(0, count, ENTRIES):
        entries = first + tl.arange(0, ENTRIES)
        tile = tl.load(record + HEADER + entries, mask=entries < count, other=0)
        state = tl.where(entries < n_partial, 1, 2).to(tl.int8)
        known = (entries < count) & (tile >= 0) & (tile < key_tiles)
        tl.store(states + program * key_tiles + tile, state, mask=known)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def dbias_kernel(
    query, key, value, bias, grad_out, log_sum, log_rest, delta, dbias, states, bits,
    q_segments, k_segments, start, end, hidden_from, hidden_to, seed,
    query_b, query_s, query_h, key_b, key_s, key_h, value_b, value_s, value_h, grad_out_b, grad_out_s, grad_out_h,
    dbias_b, dbias_h, dbias_q,
    bias_b, bias_h, bias_q, bias_group, states_b, states_h, states_q, bits_b, bits_h, bits_r, mask_group,
    q_segments_b, keys_b, keys_h, key_group, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin,
    blocks, key_blocks, dbias_heads, batches, heads, seqlen_q, seqlen_k, band_lo, band_hi, ratio, factor,
    shape: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """Write one block of dbias `[parts, heads, Sq, Sk]`: the sum of dS over `batches` batches and `bias_group` heads."""
    KEY_ROWS: tl.constexpr = shape.key_rows
    VALUE_ROWS: tl.constexpr = shape.value_rows
    BLOCK_M: tl.constexpr = shape.block_m
    BLOCK_N: tl.constexpr = shape.block_n
    masks = MaskArrays(
        BitArray(bits, bits_b, bits_h, bits_r, mask_group),
        KeyArrays(k_segments, start, end, hidden_from, hidden_to, keys_b, keys_h, key_group),
        q_segments,
        q_segments_b,
    )
    biases = BiasArray(bias, bias_b, bias_h, bias_q, bias_group)
    seeds = Seeds(seed, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin)
    program = tl.program_id(0)
    start_k = program % key_blocks * BLOCK_N
    start_q = (program // key_blocks) % blocks * BLOCK_M
    first_head = (program // key_blocks // blocks) % dbias_heads * bias_group
    written = program // key_blocks // blocks // dbias_heads
    first_batch = written * batches
    in_band = (start_k + BLOCK_N > start_q + band_lo) & (start_k < start_q + BLOCK_M + band_hi)
    zero = tl.cast(0, tl.int32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for member in tl.range(batches * bias_group):
        batch = first_batch + member // bias_group
        index = first_head + member % bias_group
        kv_head = index // features.group
        place = Place(batch, batch, index, zero, seqlen_q, zero, seqlen_k, zero)
        if features.listed:
            at = head_offset(batch, index // mask_group, states_b, states_h) + start_k // TILE
            state = tl.load(states + at + (start_q // TILE).to(tl.int64) * states_q).to(tl.int32)
            state = tl.where(start_k + BLOCK_N > seqlen_k, tl.minimum(state, 1), state)  # whatever lists hold
        else:
            state = in_band.to(tl.int32)
        mask = mask_of_head(masks, place, index, Band(band_lo, band_hi), features)
        dropout = dropout_of(seeds, place, index, features)
        head_query = rows_of(query, query_b, query_s, query_h, batch, index, zero)
        head_grad_out = rows_of(grad_out, grad_out_b, grad_out_s, grad_out_h, batch, index, zero)
        head_key = rows_of(key, key_b, key_s, key_h, batch, kv_head, zero)
        head_value = rows_of(value, value_b, value_s, value_h, batch, kv_head, zero)
        head = Head(place, 0, bias_of(biases, place, index, features), dropout, mask, Factors(ratio, factor))
        first = (batch.to(tl.int64) * heads + index) * seqlen_q
        for PARTIAL in tl.static_range(2):
            if state == 2 - PARTIAL:
                statistics = statistics_of(log_sum, log_rest, delta, first)
                queries = load_queries(head_query, head_grad_out, statistics, start_q, head, shape, features)
                k = load_rows(head_key, start_k, seqlen_k, KEY_ROWS, PARTIAL)
                v = load_rows(head_value, start_k, seqlen_k, VALUE_ROWS, PARTIAL)
                ds, _, _ = step_gradient(queries, k, v, start_k, head, shape, features, PARTIAL)
                total += ds
    place = Place(first_batch, first_batch, first_head, zero, seqlen_q, zero, seqlen_k, zero)
    head_dbias = dbias + head_offset(written, first_head // bias_group, dbias_b, dbias_h)
    own_queries, own_keys = start_q + tl.arange(0, BLOCK_M), start_k + tl.arange(0, BLOCK_N)
    store_scores(Bias(head_dbias, dbias_q), total, own_queries, own_keys, place)


class BiasRoom(NamedTuple):
    """Workspaces for the gradient of a bias; None where it is not asked for, or another kernel computes it."""

    key_sums: Tensor | None  # of dS over the queries of each head, `[B, H, Sk]`, or packed `[1, H, total_k]`
    scores: Tensor | None  # dS itself: dbias of a bias that nothing shares


def room_for_bias(call: Call, dbias: Tensor | None, size: Extent) -> BiasRoom:
    """Return workspaces for the sums of dS, or for dS itself, that `dbias` is made of."""
    if dbias is None:
        return BiasRoom(None, None)
    if bias_kind(call.bias) == "key":
        batch = 1 if size.packed else size.batch
        key_sums = workspace(call.query, batch, size.heads, size.seqlen_k)
        if size.packed:
            computed(Tensor.zero_, key_sums)
        return BiasRoom(key_sums, None)
    if not owns_bias(call):
        return BiasRoom(None, None)
    if call.mask.row_tiles is not None or is_banded(call.options):
        computed(Tensor.zero_, dbias)  # tiles that are skipped
    return BiasRoom(None, dbias)


def gradient_of_bias(call: Call, dbias: Tensor | None, room: BiasRoom, broadcast: Callable[[Tensor], None]) -> None:
    """Write what is left of dbias once the other gradients are there; `broadcast` computes one that is shared."""
    if dbias is None or room.scores is not None:
        return
    if room.key_sums is not None:
        computed(*reduction(room.key_sums, dbias, one_by_one=call.options.batch_invariant))
    else:
        broadcast(dbias)


def reduction(key_sums: Tensor, dbias: Tensor, *, one_by_one: bool = False) -> tuple[Any, ...]:
    """Return a function and its arguments, for `computed`, that write sums `[B, H, Sk]` into dbias `[B|1, H|Hkv|1, 1, Sk]`.

    Those of packed sequences are `[1, H, total_k]` and `[H|Hkv|1, total_k]`. `one_by_one` adds one head after another, as torch
    orders a sum by the size of the whole tensor.
    """
    batch, heads, seqlen_k = key_sums.shape
    of_batch, own = (1, dbias.shape[0]) if dbias.dim() == 2 else dbias.shape[:2]
    sizes = (batch, own, heads // own, seqlen_k)
    dims = tuple(dim for dim, shared in ((0, of_batch != batch), (2, own != heads)) if shared)
    return (_add_heads if one_by_one else sum_into), dbias, key_sums, sizes, dims


def _add_heads(dbias: Tensor, key_sums: Tensor, sizes: tuple[int, ...], dims: tuple[int, ...]) -> Tensor:
    grouped = key_sums.view(sizes)
    summed = grouped[:, :, 0]
    for head in range(1, sizes[2]):
        summed = summed + grouped[:, :, head]
    return sum_into(dbias, summed, summed.shape, tuple(dim for dim in dims if dim == 0))


def mark_tiles(tiles: Tensor, key_tiles: int) -> Tensor:
    """Turn lists `[Bm, Hm, nQ, 4 + capacity]` into states `[Bm, Hm, nQ, key_tiles]`: 0 empty, 1 partial, 2 full."""
    states = computed(_empty_states, tiles, (*tiles.shape[:3], key_tiles))
    records = tiles.shape[0] * tiles.shape[1] * tiles.shape[2]
    if states.numel():
        launch(
            mark_kernel,
            (records,),
            tiles,
            states,
            tiles_w=tiles.shape[3],
            key_tiles=key_tiles,
            ENTRIES=ENTRIES,
        )
    return states


@makes_zeros
def _empty_states(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return like.new_zeros(shape, dtype=torch.int8)


def dbias_arguments(dbias: Tensor | None) -> dict[str, Any]:
    """Return dbias `[B|1, H|Hkv|1, Sq, Sk]` and its strides as arguments of kernels that write it; zeros for None."""
    strides = (0, 0, 0) if dbias is None else dbias.stride()[:3]
    return {"dbias": dbias, **dict(zip(("dbias_b", "dbias_h", "dbias_q"), strides, strict=True))}


def recompute_dbias(call: Call, saved: Saved, grads: Gradients, config: PortableBackward) -> None:
    """Write dbias `[B|1, H|Hkv|1, Sq, Sk]` beside kernels that leave it out, and nothing else."""
    assert grads.dbias is not None
    call, grads = listed(call), grads._replace(dsink=None)
    size = extent(call)
    aligned = rows_are_aligned(call.query, call.key, call.value, grads.grad_out)
    arguments = gradient_arguments(call, saved, grads, size)
    config = config.for_call(aligned, is_pairwise(call.bias, call.options))
    broadcast_dbias(call, arguments, size, grads.dbias, aligned, config)


def broadcast_dbias(
    call: Call, arguments: dict[str, Any], size: Extent, dbias: Tensor, aligned: bool, config: PortableBackward
) -> None:
    """Write dbias `[B|1, H|Hkv|1, Sq, Sk]`: a program for each of its blocks."""
    launch_blocks(
        dbias_kernel,
        call,
        arguments,
        size,
        dbias,
        shape=shape_of(call, config.dq_block_m, config.dq_block_n, aligned),
        num_warps=config.dq_num_warps,
        num_stages=1,
    )


def divisors(batches: int) -> list[int]:
    """Return into how many parts as large as each other a number of batches can be divided, 1 first."""
    return [1, *(parts for parts in range(2, min(batches, MOST_PARTS) + 1) if batches % parts == 0)]


def parts_of(batches: int, programs: int, sms: int) -> int:
    """Return into how many parts batches are divided, each of which takes `programs`, so that all are done soonest.

    Programs run in rounds of `PROGRAMS` on each multiprocessor, and the last round takes as long as the others.
    """

    def time(parts: int) -> int:
        rounds = -(-programs * parts // (PROGRAMS * sms))
        return rounds * (batches // parts + (ADDED_UP if parts > 1 else 0))

    return min(divisors(batches), key=time)


def room_for_parts(call: Call, dbias: Tensor, parts: int) -> Tensor:
    """Return what programs write: dbias, or float32 sums over one of several `parts` of the batches, `[parts, heads, Sq, Sk]`."""
    return dbias if parts == 1 else workspace(call.query, parts, *dbias.shape[1:])


def add_parts(dbias: Tensor, written: Tensor) -> None:
    """Add the sums over parts of the batches up, where there are several."""
    if written is not dbias:
        computed(sum_into, dbias, written, written.shape, (0,))


def launch_blocks(
    kernel: Any, call: Call, arguments: dict[str, Any], size: Extent, dbias: Tensor, shape: Shape, **options: Any
) -> None:
    """Launch a kernel that takes the arguments of `dbias_kernel`, a program for each block of dbias of a `shape`.

    Where that are too few, the batches that share a bias are divided into parts, as many for each.
    """
    mask = call.mask
    blocks = ceil_div(size.seqlen_q, shape.block_m)
    key_blocks = ceil_div(size.seqlen_k, shape.block_n)
    programs = blocks * key_blocks * dbias.shape[0] * dbias.shape[1]
    if programs == 0:
        return
    batches = size.batch if dbias.shape[0] == 1 else 1
    parts = parts_of(batches, programs, arch.physical(call.query.device).num_sms)
    written = room_for_parts(call, dbias, parts)
    lists = list_arguments(mask.row_tiles, mask.row_bits, size.heads)
    states = None if mask.row_tiles is None else mark_tiles(mask.row_tiles, ceil_div(size.seqlen_k, _TILE))
    wanted = kernel.arg_names
    given = {name: value for name, value in (arguments | lists).items() if name in wanted}
    launch(
        kernel,
        (programs * parts,),
        **given,
        **dbias_arguments(written),
        states=states,
        states_b=broadcast_stride(states, 0),
        states_h=broadcast_stride(states, 1),
        states_q=0 if states is None else states.stride(2),
        blocks=blocks,
        key_blocks=key_blocks,
        dbias_heads=dbias.shape[1],
        batches=batches // parts,
        shape=shape,
        features=features_of(call, mask.row_tiles),
        **options,
    )
    add_parts(dbias, written)

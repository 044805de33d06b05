"""Device code of `key_mass`: each program owns a block of keys of one head, and walks the queries of every head that reads it."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.portable.arguments import UNSPECIALIZED
from dmattn_ops.kernels.portable.dropout import Seeds
from dmattn_ops.kernels.portable.heads import Operands, head_of, program_of
from dmattn_ops.kernels.portable.places import (
    SEARCHED,
    Band,
    Lengths,
    Lists,
    band_of,
    last_owned,
    part_of,
    plan_walk,
    walked_start,
)
from dmattn_ops.kernels.portable.primitives import load_rows, load_statistics, rows_of
from dmattn_ops.kernels.portable.scores import (
    BiasArray,
    Factors,
    capped,
    load_bias,
    load_key_bias,
    log_terms,
    probabilities,
)
from dmattn_ops.kernels.portable.visibility import (
    BitArray,
    KeyArrays,
    MaskArrays,
    key_marks,
    query_marks,
    rows_in_reach,
    visibility,
)


class Queries(NamedTuple):
    """The queries of one head, which are walked: their rows, and where their statistics begin."""

    query: Any  # Rows
    lse: Any
    lse_tail: Any  # 0 where there is none


class Keys(NamedTuple):
    """A block of keys, which is owned."""

    k: Any
    start: Any
    last: Any


@triton.jit
def mass_of_part(
    keys,
    queries,
    part,
    head,
    shape: tl.constexpr,
    features: tl.constexpr,
    TAIL: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Return the sums `[keys]` of the probabilities that the queries of one part of a walk give to a block of keys."""
    QUERY_ROWS: tl.constexpr = shape.query_rows
    BLOCK_M: tl.constexpr = shape.block_m
    BLOCK_N: tl.constexpr = shape.block_n
    place, factors = head.place, head.factors
    total = tl.zeros((BLOCK_N,), tl.float32)
    own_keys = keys.start + tl.arange(0, BLOCK_N)
    key_bias = 0.0
    if features.bias == "key":
        key_bias = load_key_bias(head, own_keys)[:, None]
    k_marks = key_marks(head, own_keys, features)
    reach = rows_in_reach(head.mask, keys.start, keys.last, place.length_q, features)
    for step in tl.range(part.begin, part.end):
        first = walked_start(part, step, BLOCK_M, features)
        own_queries = first + tl.arange(0, BLOCK_M)
        q = load_rows(queries.query, first, reach.end, QUERY_ROWS, PARTIAL, reach.begin, features.banded)
        lse = load_statistics(queries.lse, first, place.length_q, float("-inf"), BLOCK_M, PARTIAL)
        tail = tl.zeros((BLOCK_M,), tl.float32)
        if TAIL:
            tail = load_statistics(queries.lse_tail, first, place.length_q, 0.0, BLOCK_M, PARTIAL)
        log_sum, log_rest = log_terms(lse, tail, features.natural)
        products, _ = capped(tl.dot(keys.k, tl.trans(q), input_precision=features.precision), factors, features)
        added = key_bias
        if features.bias == "full":
            added = load_bias(head, own_queries, own_keys, True, PARTIAL)
        p = probabilities(products, added, factors, log_sum[None, :], log_rest[None, :], features.natural)
        p = tl.where((log_sum == float("inf"))[None, :], 0.0, p)
        if PARTIAL:
            q_marks = query_marks(head, own_queries, features)
            visible = visibility(head, q_marks, k_marks, own_keys, own_queries, first, features, True)
            p = tl.where(visible, p, 0.0)
        total += tl.sum(p, 1)
    return total


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=["query", "key"])
def key_mass_kernel(
    query, key, bias, lse, lse_tail, mass, tiles, bits, q_segments, k_segments, start, end, hidden_from, hidden_to,
    query_b, query_s, query_h, key_b, key_s, key_h,
    bias_b, bias_h, bias_q, bias_group,
    tiles_b, tiles_h, tiles_w, bits_b, bits_h, bits_r, mask_group, q_segments_b, keys_b, keys_h, key_group,
    blocks, heads, seqlen_q, seqlen_k, band_lo, band_hi, ratio, factor,
    shape: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """Write the sums of the probabilities of one block of keys of one key head."""
    KEY_ROWS: tl.constexpr = shape.key_rows
    lengths = Lengths(heads, seqlen_q, seqlen_k, seqlen_q, seqlen_k, 0, 0)
    lists = Lists(tiles, tiles_b, tiles_h, tiles_w, mask_group)
    operands = Operands(
        lists,
        MaskArrays(
            BitArray(bits, bits_b, bits_h, bits_r, mask_group),
            KeyArrays(k_segments, start, end, hidden_from, hidden_to, keys_b, keys_h, key_group),
            q_segments,
            q_segments_b,
        ),
        BiasArray(bias, bias_b, bias_h, bias_q, bias_group),
        Seeds(0, 0, 0, 0, 0, 0, 0),
        Factors(ratio, factor),
    )
    place, start_k = program_of(tl.program_id(0), tl.arange(0, SEARCHED), blocks, lengths, lists, shape, features, True)
    if start_k >= place.length_k:
        return
    BLOCK_N: tl.constexpr = shape.block_n
    GROUP: tl.constexpr = features.group
    TAIL: tl.constexpr = lse_tail is not None
    kv_head = place.head
    rows = rows_of(key, key_b, key_s, key_h, place.batch, kv_head, place.k_begin)
    keys = Keys(
        load_rows(rows, start_k, place.length_k, KEY_ROWS, True), start_k, last_owned(place, start_k, shape, True)
    )
    band = band_of(Band(band_lo, band_hi), place, True)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for member in tl.range(GROUP):
        index = kv_head * GROUP + member
        statistics = (place.batch.to(tl.int64) * heads + index) * seqlen_q
        tail = 0
        if TAIL:
            tail = lse_tail + statistics
        query_rows = rows_of(query, query_b, query_s, query_h, place.batch, index, place.q_begin)
        queries = Queries(query_rows, lse + statistics, tail)
        head = head_of(operands, place, index, start_k, band, features)
        walk = plan_walk(head, keys.start, keys.last, lists, shape, features, True)
        for PARTIAL in tl.static_range(2):
            total += mass_of_part(keys, queries, part_of(walk, PARTIAL), head, shape, features, TAIL, PARTIAL)
    columns = start_k + tl.arange(0, BLOCK_N)
    row = (place.batch.to(tl.int64) * (heads // GROUP) + kv_head) * seqlen_k
    tl.store(mass + row + columns, total, columns < seqlen_k)

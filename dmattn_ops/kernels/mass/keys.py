"""Device code of `key_mass`: each program owns a block of keys of one head, and walks the queries of every head that reads it."""

from __future__ import annotations

import triton
import triton.language as tl

from dmattn_ops.kernels.portable.arguments import UNSPECIALIZED
from dmattn_ops.kernels.portable.places import (
    TILE,
    Lengths,
    head_offset,
    head_rows,
    owned_start,
    part_of,
    place_of,
    plan_walk,
    walked_start,
)
from dmattn_ops.kernels.portable.primitives import Features, Rows, load_rows, load_statistics
from dmattn_ops.kernels.portable.scores import Bias, Factors, capped, load_bias, load_key_bias, log_terms, probabilities
from dmattn_ops.kernels.portable.visibility import (
    MaskArrays,
    key_marks,
    mask_of_head,
    met_rows,
    query_marks,
    visibility,
)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=["query", "key"])
def key_mass_kernel(
    query, key, bias, lse, lse_tail, mass, tiles, bits, q_segments, k_segments, start, end, hidden_from, hidden_to,
    query_b, query_s, query_h, key_b, key_s, key_h,
    bias_b, bias_h, bias_q, bias_k, bias_group,
    tiles_b, tiles_h, tiles_r, tiles_w, bits_b, bits_h, bits_r, mask_group, q_segments_b, keys_b, keys_h, key_group,
    blocks, heads, seqlen_q, seqlen_k, band_lo, band_hi, ratio, factor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_HEAD: tl.constexpr,
    ALIGNED: tl.constexpr, GROUP: tl.constexpr, LISTED: tl.constexpr, MASK: tl.constexpr, QUERY_SEGMENTS: tl.constexpr,
    HIDDEN: tl.constexpr, BANDED: tl.constexpr, BIAS: tl.constexpr, NATURAL: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the sums of the probabilities of one block of keys of one key head."""
    features: tl.constexpr = Features(
        LISTED, MASK, QUERY_SEGMENTS, HIDDEN, BANDED, BIAS, NATURAL, SOFTCAP, False, False, PRECISION
    )
    arrays = MaskArrays(
        bits, bits_b, bits_h, bits_r, mask_group, q_segments, q_segments_b,
        k_segments, start, end, hidden_from, hidden_to, keys_b, keys_h, key_group,
    )  # fmt: skip
    lengths = Lengths(seqlen_q, seqlen_k, seqlen_q, seqlen_k, 0, 0)
    place, block, blocks = place_of(tl.program_id(0), blocks, heads // GROUP, lengths, BLOCK_N, True, False, False)
    ranking = 0
    if LISTED:
        ranking = tiles + head_offset(place.batch, place.head * GROUP // mask_group, tiles_b, tiles_h)
    start_k = owned_start(ranking, tiles_r, block, blocks, BLOCK_N, LISTED, False)
    if start_k >= seqlen_k:
        return
    last_k = tl.minimum(start_k + BLOCK_N, seqlen_k) - 1
    keys = Rows(head_rows(key, place.batch, place.head, place.k_begin, key_b, key_s, key_h), key_s)
    k = load_rows(keys, start_k, seqlen_k, BLOCK_N, HEAD_DIM, PADDED_HEAD, ALIGNED, True)
    low, high = -band_hi, -band_lo
    total = tl.zeros((BLOCK_N,), tl.float32)
    for member in tl.range(GROUP):
        head = place.head * GROUP + member
        statistics = (place.batch.to(tl.int64) * heads + head) * seqlen_q
        queries = Rows(head_rows(query, place.batch, head, place.q_begin, query_b, query_s, query_h), query_s)
        record = 0
        if LISTED:
            record = tiles + head_offset(place.batch, head // mask_group, tiles_b, tiles_h)
            record += (start_k // TILE).to(tl.int64) * tiles_r
        head_bias = Bias(0, 0, 0)
        key_bias = 0.0
        if BIAS != "none":
            begin = head_rows(bias, place.batch, head // bias_group, place.k_begin, bias_b, bias_k, bias_h)
            head_bias = Bias(begin, bias_q, bias_k)
            if BIAS == "key":
                key_bias = load_key_bias(head_bias, start_k, seqlen_k, BLOCK_N)[:, None]
        mask = mask_of_head(arrays, place, head, low, high, features)
        k_marks = key_marks(mask, start_k, seqlen_k, seqlen_q, BLOCK_N, features)
        first_met, end_met = met_rows(mask, start_k, last_k, seqlen_q, features)
        plan = plan_walk(
            record, tiles_w, start_k, last_k, low, high, seqlen_q, BLOCK_M, LISTED,
            MASK == "segments" or MASK == "intervals",
        )  # fmt: skip
        for PARTIAL in tl.static_range(2):
            part = part_of(plan, PARTIAL)
            for step in tl.range(part.steps):
                first = walked_start(part, step, BLOCK_M, LISTED)
                q = load_rows(
                    queries, first, end_met, BLOCK_M, HEAD_DIM, PADDED_HEAD, ALIGNED, PARTIAL, first_met, BANDED
                )
                row_lse = load_statistics(lse + statistics, first, seqlen_q, float("-inf"), BLOCK_M, PARTIAL)
                row_tail = tl.zeros((BLOCK_M,), tl.float32)
                if lse_tail is not None:
                    row_tail = load_statistics(lse_tail + statistics, first, seqlen_q, 0.0, BLOCK_M, PARTIAL)
                log_sum, log_rest = log_terms(row_lse, row_tail, NATURAL)
                factors = Factors(ratio, factor)
                products, _ = capped(tl.dot(k, tl.trans(q), input_precision=PRECISION), factors, features)
                added = key_bias
                if BIAS == "full":
                    added = load_bias(head_bias, first, start_k, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, True, PARTIAL)
                p = probabilities(products, added, factors, log_sum[None, :], log_rest[None, :], NATURAL)
                p = tl.where((log_sum == float("inf"))[None, :], 0.0, p)
                if PARTIAL:
                    q_marks = query_marks(mask, first, seqlen_q, BLOCK_M, features)
                    visible = visibility(
                        mask, q_marks, k_marks, start_k, first, seqlen_q, BLOCK_N, BLOCK_M, True, features
                    )
                    p = tl.where(visible, p, 0.0)
                total += tl.sum(p, 1)
    columns = start_k + tl.arange(0, BLOCK_N)
    row = (place.batch.to(tl.int64) * (heads // GROUP) + place.head) * seqlen_k
    tl.store(mass + row + columns, total, columns < seqlen_k)

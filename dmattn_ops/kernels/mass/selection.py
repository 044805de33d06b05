"""Device code of `selection_mass`: each program has a query and the heads that share a list, and gathers the keys that it names.

The lists come from `first_numbers`, which leaves of a number that repeats the first one. Where lse is not given, the keys are
read twice: for the rows' sums, then for the probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.constants import Constants
from dmattn_ops.kernels.portable.places import head_offset
from dmattn_ops.kernels.portable.scores import LOG2E, tanh


@triton.jit(do_not_specialize=["count", "blocks", "heads", "seqlen_q", "indices_b", "indices_h", "indices_q"])
def first_numbers(
    indices, firsts, count, blocks, heads, seqlen_q, indices_b, indices_h, indices_q, indices_k, ENTRIES: tl.constexpr
):
    """Write a list of numbers as int32: -1 in the place of those of no block, and of those that stand further in front."""
    row = tl.program_id(0)
    query, head = row % seqlen_q, row // seqlen_q % heads
    listed = (
        indices + head_offset(row // seqlen_q // heads, head, indices_b, indices_h) + query.to(tl.int64) * indices_q
    )
    firsts += row.to(tl.int64) * count
    for at in range(0, count, ENTRIES):
        entry = at + tl.arange(0, ENTRIES)
        number = tl.load(listed + entry * indices_k, entry < count, other=-1)
        again = tl.zeros([ENTRIES], tl.int32)
        for before in range(0, at + ENTRIES, ENTRIES):
            other = before + tl.arange(0, ENTRIES)
            others = tl.load(listed + other * indices_k, other < count, other=-1)
            equal = (number[:, None] == others[None, :]) & (other[None, :] < entry[:, None])
            again += tl.sum(equal.to(tl.int32), 1)
        kept = (again == 0) & (number >= 0) & (number < blocks)
        tl.store(firsts + entry, tl.where(kept, number, -1).to(tl.int32), entry < count)


@dataclass(frozen=True, eq=False, repr=False)
class Traits(Constants):
    """What `selection_mass_kernel` is compiled for."""

    group: int  # query heads whose masses are summed
    key_group: int  # query heads that share a head of keys
    list_group: int  # query heads that share a list
    rows: int  # query heads in a product
    entries: int  # of a list, read at once
    wide: int  # keys of a block, read at once
    head_dim: int
    padded_head: int  # a power of two
    softcap: bool
    precision: str  # of products of float32


class Gathered(NamedTuple):
    """Pointers and strides by which a program reads keys, its query's row, and its heads of queries."""

    key: Any  # where key 0 of the head lies
    key_s: Any
    bias: Any  # where the query's bias of key 0 lies, for each head; keys follow each other
    k_segments: Any
    segment: Any  # of the query
    low: Any  # the first key that the band shows, and the last
    high: Any
    seqlen_k: Any
    block: Any
    ratio: Any  # factors of products before and after the soft cap (`arguments.factor_arguments`)
    factor: Any


@triton.jit
def scores_of(q, number, part, gathered, is_head, BIAS: tl.constexpr, SEGMENTS: tl.constexpr, T: tl.constexpr):
    """Return scores `[heads, entries * WIDE]` of keys `part ...` of the blocks of that `number`; -inf of what is hidden."""
    ENTRIES: tl.constexpr = number.shape[0]
    WIDE: tl.constexpr = T.wide
    PADDED: tl.constexpr = q.shape[1]
    place = part + tl.arange(0, WIDE)[None, :]
    key = number[:, None] * gathered.block + place
    shown = (number >= 0)[:, None] & (place < gathered.block) & (key < gathered.seqlen_k)
    shown = shown & (key >= gathered.low) & (key <= gathered.high)
    key = tl.reshape(key, [ENTRIES * WIDE])
    shown = tl.reshape(shown, [ENTRIES * WIDE])
    if SEGMENTS:
        shown = shown & (tl.load(gathered.k_segments + key, shown, other=0) == gathered.segment)
    columns = tl.arange(0, PADDED)
    rows = gathered.key + key.to(tl.int64)[:, None] * gathered.key_s + columns[None, :]
    k = tl.load(rows, shown[:, None] & (columns < T.head_dim)[None, :], other=0.0)
    score = tl.dot(q, tl.trans(k), input_precision=T.precision)
    if T.softcap:
        score = tanh(score * gathered.ratio)
    score *= gathered.factor
    if BIAS:
        added = gathered.bias[:, None] + key.to(tl.int64)[None, :]
        score += tl.load(added, is_head[:, None] & shown[None, :], other=0.0).to(tl.float32)
    return tl.where(shown[None, :], score, float("-inf"))


@triton.jit(
    do_not_specialize=["count", "block", "lists", "units", "heads", "seqlen_q", "seqlen_k", "band_lo", "band_hi", "query_b",
                       "query_s", "query_h", "key_b", "key_s", "key_h", "firsts_b", "firsts_h", "q_segments_b",
                       "k_segments_b", "bias_b", "bias_h", "bias_q", "bias_group"],
    do_not_specialize_on_alignment=["query", "key"],
)  # fmt: skip
def selection_mass_kernel(
    query, key, firsts, q_segments, k_segments, bias, lse, mass,
    count, block, units, heads, seqlen_q, seqlen_k, band_lo, band_hi, ratio, factor,
    query_b, query_s, query_h, key_b, key_s, key_h, firsts_b, firsts_h, q_segments_b, k_segments_b,
    bias_b, bias_h, bias_q, bias_group,
    T: tl.constexpr,
):  # fmt: skip
    """Write the masses of the list of one query, for one of the `units` of `T.group` query heads.

    `bias_group` query heads share a head of the bias.
    """
    GROUP: tl.constexpr = T.group
    ROWS: tl.constexpr = T.rows
    ENTRIES: tl.constexpr = T.entries
    WIDE: tl.constexpr = T.wide
    i = tl.program_id(0) % seqlen_q
    unit = tl.program_id(0) // seqlen_q % units
    batch = tl.program_id(0) // seqlen_q // units
    first_head = unit * GROUP
    listed = firsts + head_offset(batch, first_head // T.list_group, firsts_b, firsts_h) + i.to(tl.int64) * count
    written = mass + ((batch.to(tl.int64) * units + unit) * seqlen_q + i) * count
    BIAS: tl.constexpr = bias is not None
    SEGMENTS: tl.constexpr = k_segments is not None
    segments, segment = 0, 0
    if SEGMENTS:
        segments = k_segments + batch.to(tl.int64) * k_segments_b
        if q_segments is not None:
            segment = tl.load(q_segments + batch.to(tl.int64) * q_segments_b + i)
    keys = key + head_offset(batch, first_head // T.key_group, key_b, key_h)
    for start in range(0, GROUP, ROWS):
        member = start + tl.arange(0, ROWS)
        is_head = member < GROUP
        head = first_head + member
        columns = tl.arange(0, T.padded_head)
        rows = query + batch.to(tl.int64) * query_b + head.to(tl.int64)[:, None] * query_h + i.to(tl.int64) * query_s
        q = tl.load(rows + columns[None, :], is_head[:, None] & (columns < T.head_dim)[None, :], other=0.0)
        biases = 0
        if BIAS:
            biases = bias + batch.to(tl.int64) * bias_b + (head // bias_group).to(tl.int64) * bias_h
            biases += i.to(tl.int64) * bias_q
        gathered = Gathered(
            keys, key_s, biases, segments, segment, i + band_lo, i + band_hi, seqlen_k, block, ratio, factor
        )
        if lse is not None:
            place = (batch.to(tl.int64) * heads + head) * seqlen_q + i
            peak = tl.load(lse + place, is_head, other=float("-inf"))
            total = tl.full([ROWS], 1.0, tl.float32)
        else:
            peak = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            for at in range(0, count, ENTRIES):
                entry = at + tl.arange(0, ENTRIES)
                number = tl.load(listed + entry, entry < count, other=-1)
                for part in range(0, block, WIDE):
                    score = scores_of(q, number, part, gathered, is_head, BIAS, SEGMENTS, T)
                    higher = tl.maximum(peak, tl.max(score, 1))
                    base = tl.where(higher == float("-inf"), 0.0, higher)
                    total = total * tl.exp2((peak - base) * LOG2E) + tl.sum(tl.exp2((score - base[:, None]) * LOG2E), 1)
                    peak = higher
        is_seeing = is_head & (peak != float("-inf"))
        base = tl.where(is_seeing, peak, 0.0)
        share = tl.where(is_seeing, 1.0 / tl.where(total == 0.0, 1.0, total), 0.0)
        for at in range(0, count, ENTRIES):
            entry = at + tl.arange(0, ENTRIES)
            number = tl.load(listed + entry, entry < count, other=-1)
            found = tl.zeros([ENTRIES], tl.float32)
            for part in range(0, block, WIDE):
                score = scores_of(q, number, part, gathered, is_head, BIAS, SEGMENTS, T)
                exponent = tl.minimum((score - base[:, None]) * LOG2E, 0.0, propagate_nan=tl.PropagateNan.ALL)
                p = tl.where(is_seeing[:, None], tl.exp2(exponent) * share[:, None], 0.0)
                found += tl.sum(tl.reshape(tl.sum(p, 0), [ENTRIES, WIDE]), 1)
            if start > 0:  # more heads than one product takes
                found += tl.load(written + entry, entry < count, other=0.0)
            tl.store(written + entry, found, entry < count)
        tl.debug_barrier()

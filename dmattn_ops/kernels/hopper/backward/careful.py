"""Blocks of the SM 9.0 backward that are careful: keys that no query sees, and queries that see no key, are 0 (`hopper/unseen.py`)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.backward.walk import (
    BIT_LISTS,
    INTERVAL_LISTS,
    NO_LISTS,
    RAGGED,
    head_steps,
    partial_tile,
)
from dmattn_ops.kernels.hopper.scores import head_of


@gluon.jit
def keys_at_edge(first, seqlen_q, seqlen_k, lo, hi):
    """Return whether the band hides one of 64 keys from `first` on from every query."""
    return (first < lo) | (gl.minimum(first + 64, seqlen_k) > seqlen_q + hi)


@gluon.jit
def queries_at_edge(m, seqlen_k, lo, hi, BM: gl.constexpr):
    """Return whether the band hides every key from one of the queries of tile `m`."""
    return (m * BM < 0 - hi) | ((m + 1) * BM > seqlen_k - lo)


@gluon.jit
def seen_keys(
    keys, own_keys, record, masks, steps, limits, bits_row, bias, first_head, group,
    BM: gl.constexpr, LISTS: gl.constexpr, HAS_Q_SEG: gl.constexpr, HIDDEN: gl.constexpr, BY_BIAS: gl.constexpr,
):  # fmt: skip
    """Return 1 for those of 64 keys of a block that a query of some head of the group sees, else 0.

    `keys` count inside the block, `own_keys` inside the sequence, and `masks` are at the block's batch entry and first head.
    """
    seqlen_q, seqlen_k, lo, hi, _ = limits
    _, bits, q_segments, k_segments, start, end, hidden_from, hidden_to = masks
    list_step, bits_step, numbers_step, _, _ = steps
    inside = own_keys < seqlen_k
    seen = gl.zeros_like(own_keys)
    for g in range(group):
        begin = gl.maximum(own_keys - hi, 0)
        stop = gl.minimum(own_keys - lo + 1, seqlen_q)
        if LISTS == NO_LISTS or LISTS == RAGGED:
            now = (stop > begin).to(gl.int32)
            if BY_BIAS:
                added = gl.load(head_of(bias, first_head + g) + own_keys, mask=inside, other=0.0)
                now = gl.where(added.to(gl.float32) != float("-inf"), now, 0)
        elif LISTS == INTERVAL_LISTS:
            begin = gl.maximum(begin, gl.load(start + g * numbers_step + own_keys, mask=inside, other=0))
            stop = gl.minimum(stop, gl.load(end + g * numbers_step + own_keys, mask=inside, other=0))
            count = gl.maximum(stop - begin, 0)
            if HIDDEN:
                begin = gl.maximum(begin, gl.load(hidden_from + g * numbers_step + own_keys, mask=inside, other=0))
                stop = gl.minimum(stop, gl.load(hidden_to + g * numbers_step + own_keys, mask=inside, other=0))
                count -= gl.maximum(stop - begin, 0)
            now = (count > 0).to(gl.int32)
        else:
            own_record = record + g * list_step
            n_full, n_partial = head_steps(own_record, (0, 0, 0, 0), LISTS, BM)
            now = gl.zeros_like(own_keys) + (n_full > 0).to(gl.int32)
            for t in range(n_partial):
                m = partial_tile(t, own_record, n_partial, (0, 0, 0, 0), LISTS, BM, False)
                if LISTS == BIT_LISTS:
                    at = bits + g * bits_step + m * (BM // 64) + keys * bits_row
                    words = gl.load(at)
                    if BM == 128:
                        words = words | gl.load(at + 1)
                    now = now | (words != 0).to(gl.int32)
                else:
                    segment = gl.load(k_segments + g * numbers_step + own_keys, mask=inside, other=-1)
                    for query in range(m * BM, gl.minimum((m + 1) * BM, seqlen_q)):
                        of_query = 0
                        if HAS_Q_SEG:
                            of_query = gl.load(q_segments + query)
                        near = (own_keys >= query + lo) & (own_keys <= query + hi)
                        now = now | ((segment == of_query) & near).to(gl.int32)
        seen = seen | now
    return gl.where(inside, seen, 0)

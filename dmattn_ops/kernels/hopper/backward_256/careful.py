"""Blocks of the SM 9.0 backward for wide heads that are careful: what nobody of the other side sees is 0 (`hopper/unseen.py`)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.backward_256.walk import (
    BITS,
    INTERVALS,
    NO_LISTS,
    RAGGED,
    SEGMENTS,
    STEP,
    count_steps,
    head_view,
    partial_step,
)
from dmattn_ops.kernels.hopper.scores import head_of


@gluon.jit
def columns_at_edge(first, n_rows, n_columns, low, high):
    """Return whether the band hides one of `STEP` columns from `first` on from every row."""
    return (first < low) | (gl.minimum(first + STEP, n_columns) > n_rows + high)


@gluon.jit
def columns_in_interval(begin, stop, view, key, inside, HIDDEN: gl.constexpr):
    """Return 1 for keys that one of the queries from `begin` to before `stop` sees by their intervals, else 0."""
    begin = gl.maximum(begin, gl.load(view.intervals.start + key, mask=inside, other=0))
    stop = gl.minimum(stop, gl.load(view.intervals.end + key, mask=inside, other=0))
    count = gl.maximum(stop - begin, 0)
    if HIDDEN:
        begin = gl.maximum(begin, gl.load(view.intervals.hidden_from + key, mask=inside, other=0))
        stop = gl.minimum(stop, gl.load(view.intervals.hidden_to + key, mask=inside, other=0))
        count -= gl.maximum(stop - begin, 0)
    return (count > 0).to(gl.int32)


@gluon.jit
def same_segment(own, segments, first, end, view, own_places, OWN_ARE_ROWS: gl.constexpr):
    """Return 1 where one of the other side's places `first` to before `end` has the same segment inside the band, else 0."""
    seen = gl.zeros_like(own)
    for other in range(first, end):
        if OWN_ARE_ROWS:
            near = (other >= own_places + view.low) & (other <= own_places + view.high)
        else:
            near = (own_places >= other + view.low) & (own_places <= other + view.high)
        seen = seen | ((own == gl.load(segments + other)) & near).to(gl.int32)
    return seen


@gluon.jit
def seen_keys(keys, n_keys, n_queries, view, mask, tile, first_head, group, bias, LISTS: gl.constexpr, HIDDEN: gl.constexpr,
              BY_BIAS: gl.constexpr):  # fmt: skip
    """Return 1 for those of a block's keys, its rows, that a query of some head of the group sees, else 0."""
    inside = keys < n_keys
    seen = gl.zeros_like(keys)
    for g in range(group):
        here = head_view(view, mask, tile // 2, first_head + g, LISTS, HIDDEN)
        begin = gl.maximum(keys + here.low, 0)
        stop = gl.minimum(keys + here.high + 1, n_queries)
        if LISTS == NO_LISTS or LISTS == RAGGED:
            now = (stop > begin).to(gl.int32)
            if BY_BIAS:
                added = gl.load(head_of(bias, first_head + g) + keys, mask=inside, other=0.0)
                now = gl.where(added.to(gl.float32) != float("-inf"), now, 0)
        elif LISTS == INTERVALS:
            now = columns_in_interval(begin, stop, here, keys, inside, HIDDEN)
        else:
            n_full, n_partial = count_steps(here, LISTS)
            now = gl.zeros_like(keys) + (n_full > 0).to(gl.int32)
            for t in range(n_partial):
                at = partial_step(t, here, n_partial, LISTS)
                if LISTS == BITS:
                    now = now | (gl.load(here.bits + keys.to(gl.int64) * here.bits_row + at) != 0).to(gl.int32)
                else:
                    own = gl.load(here.row_segments + keys, mask=inside, other=-1)
                    end = gl.minimum((at + 1) * STEP, n_queries)
                    now = now | same_segment(own, here.column_segments, at * STEP, end, here, keys, True)
        seen = seen | now
    return gl.where(inside, seen, 0)


@gluon.jit
def keys_that_block_sees(at, keys, first_query, n_queries, n_keys, view, head, bias, ROWS: gl.constexpr, LISTS: gl.constexpr,
                         HIDDEN: gl.constexpr, BY_BIAS: gl.constexpr):  # fmt: skip
    """Return 1 for those of the keys of step `at`, its columns, that one of a block's `ROWS` queries sees, else 0."""
    inside = keys < n_keys
    end = gl.minimum(first_query + ROWS, n_queries)
    begin = gl.maximum(keys - view.high, first_query)
    stop = gl.minimum(keys - view.low + 1, end)
    if LISTS == BITS:
        word = gl.load(view.bits + first_query.to(gl.int64) * view.bits_row + at)
        for query in range(first_query + 1, end):
            word = word | gl.load(view.bits + query.to(gl.int64) * view.bits_row + at)
        seen = ((word >> (keys % STEP).to(gl.int64)) & 1).to(gl.int32)
    elif LISTS == SEGMENTS:
        own = gl.load(view.column_segments + keys, mask=inside, other=-2)
        seen = same_segment(own, view.row_segments, first_query, end, view, keys, False)
    elif LISTS == INTERVALS:
        seen = columns_in_interval(begin, stop, view, keys, inside, HIDDEN)
    else:
        seen = (stop > begin).to(gl.int32)
    if BY_BIAS:
        added = gl.load(head_of(bias, head) + keys, mask=inside, other=0.0)
        seen = gl.where(added.to(gl.float32) != float("-inf"), seen, 0)
    return gl.where(inside, seen, 0)

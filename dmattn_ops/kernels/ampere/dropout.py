"""Which weights dropout keeps, for a product of mma.sync: what `reference.philox_keep` states.

The four weights that share an evaluation of Philox are eight rows and eight columns apart. A thread holds rows r and r + 8 of a
product, and where one warp has all columns, columns c and c + 8 as well; else every other evaluation is another warp's, too.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.portable.dropout import philox


@gluon.jit
def upper_rows(numbers, M: gl.constexpr, N: gl.constexpr):
    """Return the rows of `numbers` `[M, N]` without bit 3 of their place, `[M / 16, 8, N]`."""
    upper, _ = gl.split(gl.permute(gl.reshape(numbers, [M // 16, 2, 8, N]), [0, 2, 3, 1]))
    return upper


@gluon.jit
def left_columns(numbers, M: gl.constexpr, N: gl.constexpr):
    """Return the columns of what `upper_rows` returns without bit 3 of their place, `[M / 16, 8, N / 16, 8]`."""
    left, _ = gl.split(gl.permute(gl.reshape(numbers, [M // 16, 8, N // 16, 2, 8]), [0, 1, 2, 4, 3]))
    return left


@gluon.jit
def beside(left, right, M: gl.constexpr, N: gl.constexpr):
    """Return the columns of two times what `left_columns` returns, `[M / 16, 8, N]`."""
    return gl.reshape(gl.permute(gl.join(left, right), [0, 1, 2, 4, 3]), [M // 16, 8, N])


@gluon.jit
def dropout_keep(
    dropout,
    query_first,
    key_first,
    M: gl.constexpr,
    N: gl.constexpr,
    features: gl.constexpr,
    LAYOUT: gl.constexpr,
    ALL_COLUMNS: gl.constexpr,
):
    """Return which elements `[M, N]` of a step dropout keeps; `ALL_COLUMNS`: a warp has all columns of its rows.

    Where the origins are no multiples of 16 (not `whole_groups`), a block begins inside a group of elements that share an
    evaluation of Philox, and every element has one of its own.
    """
    queries = dropout.q_origin + query_first + gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))
    keys = dropout.k_origin + key_first + gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))
    zeros = gl.zeros([M, N], gl.int32, layout=LAYOUT)
    query = zeros + (queries & ~8)[:, None]
    key = zeros + keys[None, :]
    low = dropout.seed.to(gl.uint32)
    high = (dropout.seed >> 32).to(gl.uint32)
    limit = dropout.last_dropped.to(gl.uint32)
    if features.whole_groups:
        query = upper_rows(query, M, N)
        key = upper_rows(key, M, N)
        if ALL_COLUMNS:
            query = left_columns(query, M, N).to(gl.uint32)
            key = left_columns(key, M, N).to(gl.uint32)
            words = philox(query, key, query * 0 + low, query * 0 + high)
            upper = beside((words.first > limit).to(gl.int32), (words.second > limit).to(gl.int32), M, N)
            lower = beside((words.third > limit).to(gl.int32), (words.fourth > limit).to(gl.int32), M, N)
        else:
            query = query.to(gl.uint32)
            words = philox(query, (key & ~8).to(gl.uint32), query * 0 + low, query * 0 + high)
            upper = (gl.where((key & 8) == 0, words.first, words.second) > limit).to(gl.int32)
            lower = (gl.where((key & 8) == 0, words.third, words.fourth) > limit).to(gl.int32)
        kept = gl.reshape(gl.permute(gl.join(upper, lower), [0, 3, 1, 2]), [M, N])
        keep = gl.convert_layout(kept, LAYOUT, assert_trivial=True) != 0
    else:
        query = query.to(gl.uint32)
        words = philox(query, (key & ~8).to(gl.uint32), query * 0 + low, query * 0 + high)
        upper = gl.where((key & 8) == 0, words.first, words.second)
        lower = gl.where((key & 8) == 0, words.third, words.fourth)
        keep = gl.where((queries & 8)[:, None] == 0, upper, lower) > limit
    return keep

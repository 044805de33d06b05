"""Which weights dropout keeps, in the SM 9.0 kernels: what `reference.philox_keep` states, for tiles of scores.

A thread of a warp group holds rows r and r + 8 of a tile `[64, N]`, and columns 2 c, 2 c + 1, 2 c + 8, 2 c + 9 ... The four
weights that share an evaluation of Philox are eight rows and eight columns apart, so that one thread holds them all, whether
queries are rows or columns, and nothing moves between threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Dropout(NamedTuple):
    """The dropout of a call, or (with `seed` loaded) of one head; queries and keys are counted from the origins."""

    seed: Any
    seed_b: Any
    seed_h: Any
    last: Any  # the greatest random word that drops its weight, as an int32
    rescale: Any
    q_origin: Any
    k_origin: Any


@gluon.jit
def dropout_of_head(dropout, batch, head):
    """Return the dropout of a query head, its seed loaded."""
    seed = gl.load(dropout.seed + batch.to(gl.int64) * dropout.seed_b + head.to(gl.int64) * dropout.seed_h)
    return Dropout(seed, 0, 0, dropout.last, dropout.rescale, dropout.q_origin, dropout.k_origin)


@gluon.jit
def philox(word0, word1, word2, word3):
    """Return the four words of Philox4x32-7 (Salmon et al. 2011) of a counter of uint32 words, under the key 0.

    What depends on a tile's rows alone is computed once for them: products of the first two rounds, and one of the third.
    """
    for i in gl.static_range(7):
        first = word0.to(gl.uint64) * 0xD2511F53
        second = word2.to(gl.uint64) * 0xCD9E8D57
        word0 = (second >> 32).to(gl.uint32) ^ word1 ^ (i * 0x9E3779B9 & 0xFFFFFFFF)
        word1 = second.to(gl.uint32)
        word2 = (first >> 32).to(gl.uint32) ^ word3 ^ (i * 0xBB67AE85 & 0xFFFFFFFF)
        word3 = first.to(gl.uint32)
    return word0, word1, word2, word3


@gluon.jit
def random_words(dropout, first_query, first_key, N: gl.constexpr, QUERIES_ARE_ROWS: gl.constexpr):
    """Return the random words, uint32 `[64, N]`, of the tile whose first query and key these are, in an accumulator's layout."""
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    cube = gl.zeros([64, N], gl.int32, layout=TILE).reshape([4, 2, 8, N // 16, 2, 8])
    GROUPS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(4, cube.type.layout))  # of [4, 8, N // 16, 8]
    ROW_BLOCKS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, GROUPS)))
    ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, GROUPS)))
    COLUMN_BLOCKS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, GROUPS)))
    COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, GROUPS)))
    row_block = gl.arange(0, 4, layout=ROW_BLOCKS)[:, None, None, None] * 16
    row = gl.arange(0, 8, layout=ROWS)[None, :, None, None]
    column_block = gl.arange(0, N // 16, layout=COLUMN_BLOCKS)[None, None, :, None] * 16
    column = gl.arange(0, 8, layout=COLUMNS)[None, None, None, :]
    first_query += dropout.q_origin
    first_key += dropout.k_origin
    if QUERIES_ARE_ROWS:
        query = first_query + row_block + row
        key = first_key + column_block + column
    else:
        query = first_query + column_block + column
        key = first_key + row_block + row
    low = gl.zeros_like(query).to(gl.uint32) + dropout.seed.to(gl.uint32)
    high = gl.zeros_like(query).to(gl.uint32) + (dropout.seed >> 32).to(gl.uint32)
    word0, word1, word2, word3 = philox(query.to(gl.uint32), key.to(gl.uint32), low, high)
    if QUERIES_ARE_ROWS:
        words = gl.join(gl.join(word0, word2), gl.join(word1, word3))  # [..., row, column]
    else:
        words = gl.join(gl.join(word0, word1), gl.join(word2, word3))
    words = words.permute([0, 4, 1, 2, 5, 3]).reshape([64, N])
    return gl.convert_layout(words, TILE, assert_trivial=True)


@gluon.jit
def drop_pairs(p, dropout, first_query, first_key, N: gl.constexpr):
    """Return P of 16 bits `[64, N]`, rows queries, with 0 where dropout drops it: an instruction clears half of a register."""
    words = random_words(dropout, first_query, first_key, N, True)
    limit = gl.full([64, N], 0, gl.uint32, layout=words.type.layout) + dropout.last.to(gl.uint32)
    return gl.inline_asm_elementwise(
        "{ .reg .pred low, high; setp.ls.u32 low, $2, $4; setp.ls.u32 high, $3, $5; mov.b32 $0, $1; "
        "@low and.b32 $0, $0, 0xffff0000; @high and.b32 $0, $0, 0xffff; }",
        "=r,r,r,r,r,r", [p, words, limit], p.dtype, is_pure=True, pack=2,
    )  # fmt: skip

"""Intervals of queries that see a key, as a word for each key of a step: one addition and one test for each pair.

The limits count from the first query of the step, so that both fit into a word: `first - 1` in the upper half and `-end` in the
lower one, where a query adds minus its number and its number. What results has a bit in the upper half where the interval begins
behind the query, and one in the lower half where it ends before. Bands are folded in.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.portable.visibility import key_marks

BIAS = gl.constexpr(0x4000)  # more than a block has queries, so that neither half is ever negative
OUTSIDE = gl.constexpr(0x40004000)


@gluon.constexpr_function
def in_words(features):
    """Return whether a mask is tested by words: intervals without others hidden inside."""
    return features.mask == "intervals" and not features.hidden


@gluon.jit
def words_of(marks, keys, head, first_query, M: gl.constexpr, features: gl.constexpr):
    """Return the words of keys with these marks for `M` queries."""
    first, end = marks.start, marks.end
    if features.banded:
        first = gl.maximum(first, keys - head.mask.hi)
        end = gl.minimum(end, keys - head.mask.lo + 1)
    last_query = first_query + M
    first = gl.minimum(gl.maximum(first, first_query), last_query) - first_query
    end = gl.minimum(gl.maximum(end, first_query), last_query) - first_query
    return ((first + (BIAS - 1)) << 16) - end + BIAS


@gluon.jit
def loaded_words(head, first_query, start, M: gl.constexpr, N: gl.constexpr, features: gl.constexpr):
    """Return the words of keys `start ...`, in a layout in which a thread has few of them."""
    keys = start + gl.arange(0, N, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return words_of(key_marks(head, keys, features), keys, head, first_query, M, features)


@gluon.jit
def sums_of_words(words, queries, first_query):
    """Return the sums `[queries, keys]` of words and of what each query adds."""
    row = queries - first_query
    return words[None, :] + (row - (row << 16))[:, None]


@gluon.jit
def where_visible(pairs, value, other, features: gl.constexpr):
    """Return `value` where pairs are visible, else `other`; `pairs` are booleans, or sums of words with `in_words`."""
    if in_words(features):
        # LLVM would gather the tests of many pairs in vectors of bits.
        value = gl.inline_asm_elementwise(
            """{
            .reg .pred seen;
            .reg .b32 outside;
            and.b32 outside, $3, 0x40004000;
            setp.eq.u32 seen, outside, 0;
            selp.f32 $0, $1, $2, seen;
            }""",
            "=f,f,f,r",
            [value, gl.full(value.shape, other, gl.float32, layout=value.type.layout), pairs],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        value = gl.where(pairs, value, other)
    return value

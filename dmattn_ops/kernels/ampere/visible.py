"""What a mask shows of a step, in few registers, and tested by few instructions.

The booleans of a tile would be kept in registers until dS needs them, packed and unpacked by several instructions for each pair. So
what is kept are words, and the test is a part of the selection.

Bits: a word of a row has those of 32 keys. A thread's keys are 8 k + 2 (lane & 3) + {0, 1}, so that shifts of words leave each bit
in the highest place of a byte, whose number is a constant of the register.

Intervals without others hidden inside: a word for each key of a step, one addition and one test for each pair. The limits count
from the first query of the step, so that both fit into a word: `first - 1` in the upper half and `-end` in the lower one, where a
query adds minus its number and its number. What results has a bit in the upper half where the interval begins behind the query, and
one in the lower half where it ends before. Bands are folded in.

Keys that are hidden from all queries alike, without a band: a word for each key, all of whose bits are set where it is visible. It
selects without a test.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.portable.visibility import WORD_BITS, key_marks, query_marks, visibility

BIAS = gl.constexpr(0x4000)  # more than a block has queries, so that neither half is ever negative
OUTSIDE = gl.constexpr(0x40004000)


@gluon.constexpr_function
def in_words(features):
    """Return whether a mask is tested by words: intervals without others hidden inside."""
    return features.mask == "intervals" and not features.hidden


@gluon.constexpr_function
def hides_whole_keys(features):
    """Return whether a mask hides keys from all queries alike: segments of keys alone, inside no band."""
    return features.mask == "segments" and not features.query_segments and not features.banded


@gluon.constexpr_function
def has_key_words(features):
    """Return whether each key of a step has a word."""
    return in_words(features) or hides_whole_keys(features)


@gluon.jit
def words_of(marks, keys, head, first_query, M: gl.constexpr, features: gl.constexpr):
    """Return the words of keys with these marks for `M` queries."""
    if hides_whole_keys(features):
        words = gl.where((marks.segment == 0) & (keys < head.place.length_k), -1, 0)
    else:
        words = words_of_intervals(marks, keys, head, first_query, M, features)
    return words


@gluon.jit
def words_of_intervals(marks, keys, head, first_query, M: gl.constexpr, features: gl.constexpr):
    """Return the words of keys with these intervals for `M` queries."""
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
def pairs_of_words(words, queries, first_query, features: gl.constexpr):
    """Return the words of pairs `[queries, keys]`: of intervals with what each query adds, of whole keys theirs `[1, keys]`."""
    pairs = words[None, :]
    if in_words(features):
        row = queries - first_query
        pairs += (row - (row << 16))[:, None]
    return pairs


@gluon.jit
def shown(pairs, features: gl.constexpr):
    """Return which pairs are visible by their `pairs_of_words`."""
    if in_words(features):
        visible = (pairs & OUTSIDE) == 0
    else:
        visible = pairs != 0
    return visible


@gluon.jit
def words_of_rows(head, rows, end, start, M: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the bits of `rows` and the keys `start ...` as `where_visible` takes them; rows from `end` on see nothing.

    They are words `[M, N / 32, 32]`; the one of key `8 k + n` of 32 has that key's bit at place `8 k + 7`.
    """
    cube = gl.reshape(gl.zeros([M, N], gl.int32, layout=LAYOUT), [M, N // WORD_BITS, WORD_BITS])
    CUBE: gl.constexpr = cube.type.layout
    WORDS: gl.constexpr = gl.SliceLayout(2, CUBE)
    rows = gl.convert_layout(rows, gl.SliceLayout(1, WORDS), assert_trivial=True)
    number = gl.arange(0, N // WORD_BITS, layout=gl.SliceLayout(0, WORDS))
    pointers = head.mask.bits + rows.to(gl.int64) * head.mask.bits_r + start // WORD_BITS
    words = gl.load(pointers[:, None] + number[None, :])
    words = gl.where((rows < end)[:, None], words, 0)
    column = gl.arange(0, WORD_BITS, layout=gl.SliceLayout(0, gl.SliceLayout(0, CUBE)))
    column = gl.expand_dims(gl.expand_dims(column, 0), 0)
    return (gl.expand_dims(words, 2) >> (column & 6)) << (7 - (column & 1))


@gluon.jit
def visible_pairs(head, queries, keys, marks, start_k, features: gl.constexpr):
    """Return which pairs of `queries` and `keys`, the step's from `start_k` on with `marks`, are visible, as booleans.

    What lies behind the last query sees nothing.
    """
    visible = visibility(head, query_marks(head, queries, features), marks, queries, keys, start_k, features, False)
    return visible & (queries < head.place.length_q)[:, None]


@gluon.jit
def pairs_of(head, queries, keys, marks, start_q, start_k, features: gl.constexpr):
    """Return the same of a step of queries from `start_q` on, as `where_visible` takes it where the mask is not bits.

    Whole keys are also visible to what lies behind the last query.
    """
    M: gl.constexpr = queries.shape[0]
    if has_key_words(features):
        pairs = pairs_of_words(words_of(marks, keys, head, start_q, M, features), queries, start_q, features)
    else:
        pairs = visible_pairs(head, queries, keys, marks, start_k, features)
    return pairs


@gluon.jit
def where_bits(words, value, other):
    """Return `value` `[M, N]` where `words_of_rows` have a bit, else `other`."""
    M: gl.constexpr = value.shape[0]
    N: gl.constexpr = value.shape[1]
    LAYOUT: gl.constexpr = value.type.layout
    cube = gl.reshape(value, [M, N // WORD_BITS, WORD_BITS])
    CUBE: gl.constexpr = cube.type.layout
    column = gl.arange(0, WORD_BITS, layout=gl.SliceLayout(0, gl.SliceLayout(0, CUBE)))
    byte = 0x8888 + 0x1111 * (gl.expand_dims(gl.expand_dims(column, 0), 0) >> 3)
    # prmt spreads the sign of a byte over a word, lop3 selects by it.
    chosen = gl.inline_asm_elementwise(
        "{ .reg .b32 seen; prmt.b32 seen, $3, 0, $4; lop3.b32 $0, seen, $1, $2, 0xca; }",
        "=f,f,f,r,r",
        [cube, gl.full(cube.shape, other, gl.float32, layout=CUBE), words, byte],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    return gl.convert_layout(gl.reshape(chosen, [M, N]), LAYOUT, assert_trivial=True)


@gluon.jit
def where_key(words, value, other):
    """Return `value` where the words `[1, keys]` of whole keys show one, else `other`."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $3, $1, $2, 0xca;",
        "=f,f,f,r",
        [value, gl.full(value.shape, other, gl.float32, layout=value.type.layout), words],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def where_sums(sums, value, other):
    """Return `value` where the `pairs_of_words` of intervals show a pair, else `other`."""
    # With operators, LLVM would gather the tests of many pairs in vectors of bits.
    return gl.inline_asm_elementwise(
        """{
        .reg .pred seen;
        .reg .b32 outside;
        and.b32 outside, $3, 0x40004000;
        setp.eq.u32 seen, outside, 0;
        selp.f32 $0, $1, $2, seen;
        }""",
        "=f,f,f,r",
        [value, gl.full(value.shape, other, gl.float32, layout=value.type.layout), sums],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def where_visible(pairs, value, other, features: gl.constexpr):
    """Return `value` where pairs are visible, else `other`.

    `pairs` are `words_of_rows` where the mask is bits, `pairs_of_words` with `has_key_words`, and else booleans.
    """
    if features.mask == "bits":
        value = where_bits(pairs, value, other)
    elif in_words(features):
        value = where_sums(pairs, value, other)
    elif hides_whole_keys(features):
        value = where_key(pairs, value, other)
    else:
        value = gl.where(pairs, value, other)
    return value

"""Columns of a tile that follow each other, as bits: for rows that hold them in few registers, and test a bit for each column."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def ones_between(low, high, first):
    """Return words of 32 bits, of which bit `i` says that `low <= first + i <= high`.

    `high` is below the largest int32, and `low - first` does not overflow.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 from, to;
        shl.b32 from, -1, $1;
        shl.b32 to, -1, $2;
        not.b32 to, to;
        and.b32 $0, from, to;
        }""",  # shifts by more than 31 give 0
        "=r,r,r",
        [gl.maximum(low - first, 0), gl.maximum(high - first + 1, 0)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def words_between(low, high, COLUMNS: gl.constexpr):
    """Return `COLUMNS / 32` words for each row, of which bit `i` of word `w` says that `low <= 32 w + i <= high`."""
    if COLUMNS == 64:
        return (ones_between(low, high, 0), ones_between(low, high, 32))
    else:
        return (
            ones_between(low, high, 0),
            ones_between(low, high, 32),
            ones_between(low, high, 64),
            ones_between(low, high, 96),
        )


@gluon.jit
def word_of(words, column):
    """Return the word of each row and column, of `[rows]` words for 32 columns each: which one is known when it is compiled."""
    word = gl.where(column < 32, words[0][:, None], words[1][:, None])
    if len(words) == 4:
        word = gl.where(column < 64, word, gl.where(column < 96, words[2][:, None], words[3][:, None]))
    return word


@gluon.jit
def words_without(words, less):
    """Return two or four words without the bits that are set in those of `less`."""
    if len(words) == 2:
        return (words[0] & ~less[0], words[1] & ~less[1])
    else:
        return (words[0] & ~less[0], words[1] & ~less[1], words[2] & ~less[2], words[3] & ~less[3])

"""Which weights dropout keeps, in the SM 9.0 kernels: what `reference.philox_keep` states, for tiles of scores.

A thread of a warp group holds rows r and r + 8 of a tile `[64, N]`, and columns 2 c, 2 c + 1, 2 c + 8, 2 c + 9 ... The four
weights that share an evaluation of Philox are eight rows and eight columns apart, so that one thread holds them all, whether
queries are rows or columns, and nothing moves between threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.constants import accumulator


class Dropout(NamedTuple):
    """The dropout of a call, of one batch, or (with `seed` loaded) of one head; queries and keys are counted from the origins."""

    seed: Any  # [B, H]
    batch: Any  # stride
    head: Any
    last: Any  # the greatest random word that drops its weight, as an int32
    rescale: Any
    q_origin: Any
    k_origin: Any


@gluon.jit
def dropout_of_batch(dropout, batch):
    """Return the dropout of a batch."""
    seed = dropout.seed + batch.to(gl.int64) * dropout.batch
    return Dropout(seed, 0, dropout.head, dropout.last, dropout.rescale, dropout.q_origin, dropout.k_origin)


@gluon.jit
def dropout_of_head(dropout, head):
    """Return the dropout of a query head of a batch, its seed loaded."""
    seed = gl.load(dropout.seed + head.to(gl.int64) * dropout.head)
    return Dropout(seed, 0, 0, dropout.last, dropout.rescale, dropout.q_origin, dropout.k_origin)


@gluon.constexpr_function
def philox_code(k, query, key, low, high):
    """Return PTX of Philox4x32-7 (Salmon et al. 2011) of a counter, under the key 0; its words are in `w{k}0` to `w{k}3`.

    The compiler shares what evaluations of the same query have in common: products of the first two rounds and one of the third.
    """
    word = [query, key, low, high]
    lines = [f".reg .b32 {', '.join(f'w{k}{place}, h{k}{place}' for place in range(4))}; .reg .b64 p{k}, q{k};"]
    for i in range(7):
        lines.append(f"mul.wide.u32 p{k}, {word[0]}, 0xD2511F53; mul.wide.u32 q{k}, {word[2]}, 0xCD9E8D57;")
        lines.append(f"mov.b64 {{h{k}3, h{k}0}}, p{k}; mov.b64 {{h{k}1, h{k}2}}, q{k};")
        for to, other, product, weyl in ((0, 1, 2, 0x9E3779B9), (2, 3, 0, 0xBB67AE85)):
            lines.append(f"lop3.b32 w{k}{to}, h{k}{product}, {word[other]}, 0x{i * weyl & 0xFFFFFFFF:08X}, 0x96;")
        lines.append(f"mov.b32 w{k}1, h{k}1; mov.b32 w{k}3, h{k}3;")
        word = [f"w{k}{place}" for place in range(4)]
    return " ".join(lines)


@gluon.constexpr_function
def drop_code(queries_are_rows, packed):
    """Return PTX for what dropout drops of eight neighbouring elements of a thread: those of two evaluations of Philox.

    An element's place is, in bits: column 1, row 8, column 8. Outputs: (`packed`) four pairs of 16 bits, of which what is
    dropped is cleared, or eight floats, of which it is negated.
    Inputs: the same, then eight each of row, column, low and high word of the seed, the greatest word that drops.
    """
    width = 4 if packed else 8
    row, column, low, high, limit = (2 * width + 8 * k for k in range(5))
    lines = ["{"] + [f"mov.b32 ${k}, ${width + k};" for k in range(width)]
    for k in range(2):
        positions = (f"${row}", f"${column + k}") if queries_are_rows else (f"${column + k}", f"${row}")
        lines.append(philox_code(k, *positions, f"${low}", f"${high}"))
        lines.append(f".reg .pred {', '.join(f'd{k}{place}' for place in range(4))};")
        for place in range(4):
            further = (place >> 1, place & 1) if queries_are_rows else (place & 1, place >> 1)  # by 8 in row and column
            register = k + 2 * further[0] + 4 * further[1]
            lines.append(f"setp.ls.u32 d{k}{place}, w{k}{place}, ${limit};")
            if packed:
                kept = "0x0000FFFF" if k else "0xFFFF0000"
                lines.append(f"@d{k}{place} and.b32 ${register // 2}, ${register // 2}, {kept};")
            else:
                lines.append(f"@d{k}{place} neg.f32 ${register}, ${register};")
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def drop_operands(packed):
    """Return the constraints of `drop_code`."""
    outputs = ["=r"] * 4 if packed else ["=f"] * 8
    return ",".join([*outputs, *(str(k) for k in range(len(outputs))), *["r"] * 40])


@gluon.jit
def _dropped(p, dropout, first_query, first_key, N: gl.constexpr, QUERIES_ARE_ROWS: gl.constexpr, PACKED: gl.constexpr):
    TILE: gl.constexpr = accumulator(N)
    CODE: gl.constexpr = drop_code(QUERIES_ARE_ROWS, PACKED)
    OPERANDS: gl.constexpr = drop_operands(PACKED)
    p = gl.convert_layout(p, TILE, assert_trivial=True)
    zeros = gl.zeros([64, N], gl.int32, layout=TILE)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, TILE))
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, TILE))
    if QUERIES_ARE_ROWS:
        rows += first_query + dropout.q_origin
        columns += first_key + dropout.k_origin
    else:
        rows += first_key + dropout.k_origin
        columns += first_query + dropout.q_origin
    low = zeros + dropout.seed.to(gl.int32)
    high = zeros + (dropout.seed >> 32).to(gl.int32)
    operands = [p, zeros + rows[:, None], zeros + columns[None, :], low, high, zeros + dropout.last]
    return gl.inline_asm_elementwise(CODE, OPERANDS, operands, p.dtype, is_pure=True, pack=8)


@gluon.jit
def drop(p, dropout, first_query, first_key, N: gl.constexpr):
    """Return P of 16 bits `[64, N]`, whose rows are queries, with 0 where dropout drops it."""
    return _dropped(p, dropout, first_query, first_key, N, True, True)


@gluon.jit
def mark_dropped(p, dropout, first_query, first_key, N: gl.constexpr, QUERIES_ARE_ROWS: gl.constexpr):
    """Return P of 32 bits `[64, N]` with the sign of a minus where dropout drops it: no second tile of registers is needed."""
    return _dropped(p, dropout, first_query, first_key, N, QUERIES_ARE_ROWS, False)


@gluon.jit
def kept(marked, dtype: gl.constexpr):
    """Return P that is kept, in 16 bits, from what `mark_dropped` returns."""
    KIND: gl.constexpr = "bf16" if dtype == gl.bfloat16 else "f16"
    CODE: gl.constexpr = "cvt.rn.relu." + KIND + "x2.f32 $0, $2, $1;"
    narrow = marked.to(dtype)  # for its type: the compiler leaves it out
    return gl.inline_asm_elementwise(CODE, "=r,f,f", [marked], narrow.dtype, is_pure=True, pack=2)


@gluon.jit
def score_gradient(marked, dp, delta):
    """Return the gradient of scores, over the factor that dropout rescales by: of kept P times dP, less P times delta."""
    return gl.fma(gl.maximum(marked, 0.0), dp, -gl.abs(marked) * delta)

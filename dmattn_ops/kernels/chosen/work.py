"""What the kernels of chosen blocks are compiled for, and the sizes of their problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.call import UNBOUNDED, Call
from dmattn_ops.kernels.constants import Constants
from dmattn_ops.kernels.portable.arguments import broadcast_stride, padded

# Scalars that no address depends on, or whose alignment buys nothing.
UNSPECIALIZED = (
    *(f"{name}_{dim}" for name in ("query", "key", "value", "out", "grad_out", "dq", "dk", "dv") for dim in "bsh"),
    "indices_b", "indices_h", "indices_q", "count", "block", "blocks", "heads_kv", "list_heads", "seqlen_q", "seqlen_k",
    "band_lo", "band_hi", "q_segments_b", "k_segments_b", "tiles", "programs", "total", "capacity", "words", "heads",
    "parts", "lists_b", "lists_h", "wide", "most",
)  # fmt: skip
ROWS = ("query", "key", "value", "out", "grad_out", "dq", "dk", "dv")


@dataclass(frozen=True, eq=False, repr=False)
class Work(Constants):
    """The blocks of a kernel: `queries` times `padded_group` rows by `columns` keys, of blocks that are `wide`."""

    queries: int  # of a tile
    group: int  # query heads that share a list and a key head
    padded_group: int  # a power of two
    columns: int
    block: int  # keys of a chosen block
    wide: int  # the same, rounded up to a power of two
    keys: Width  # of query and key
    values: Width  # of value and out
    aligned: bool  # every row starts at a multiple of 16 bytes
    segments: bool
    query_segments: bool
    tested: bool  # what a chosen block shows is not a matter of its last keys alone

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.queries * self.padded_group

    @property
    def entries(self) -> int:
        """Blocks that a step gathers."""
        return max(1, self.columns // self.wide)

    @property
    def parts(self) -> int:
        """Steps that a block takes."""
        return max(1, self.wide // self.columns)


@dataclass(frozen=True, eq=False, repr=False)
class Width(Constants):
    """How the columns of rows are held: in one block, or the first 128 and the others beside them, so that 192 stay 192."""

    dim: int

    @property
    def first(self) -> int:
        """Columns of the first block, a power of two."""
        return min(padded(self.dim), 128)

    @property
    def more(self) -> int:
        """Columns of the second, or 0."""
        return padded(self.dim - 128) if self.dim > 128 else 0

    @property
    def whole(self) -> int:
        """Columns of both."""
        return self.first + self.more


class Parts(NamedTuple):
    """The columns of rows in two blocks (`Width`); nobody reads the second where there is one."""

    first: Any
    more: Any


class Columns(NamedTuple):
    """The keys of a step, `[columns]`."""

    key: Any  # numbers of keys
    word: Any  # which queries of the tile chose its block: bit `q` is query `q`
    inside: Any  # whether there is such a key


def work_of(call: Call, queries: int, columns: int, aligned: bool) -> Work:
    """Return the blocks of a kernel for tiles of so many queries and keys."""
    assert call.chosen is not None
    heads, heads_kv, block = call.query.shape[2], call.key.shape[2], call.chosen.block
    group = heads // heads_kv
    mask = call.mask
    return Work(
        queries, group, triton.next_power_of_2(group), columns, block, triton.next_power_of_2(block),
        Width(call.query.shape[-1]), Width(call.value.shape[-1]), aligned,
        mask.k_segments is not None, mask.q_segments is not None,
        mask.k_segments is not None or call.options.band_lo > -UNBOUNDED,
    )  # fmt: skip


def segment_arguments(q_segments: Tensor | None, k_segments: Tensor | None) -> dict[str, Any]:
    """Return the arguments of segments `[B|1, Sq]` and `[B|1, 1, Sk]`."""
    return {
        "q_segments": q_segments,
        "k_segments": k_segments,
        "q_segments_b": broadcast_stride(q_segments, 0),
        "k_segments_b": broadcast_stride(k_segments, 0),
    }


def index_arguments(indices: Tensor) -> dict[str, Any]:
    """Return the arguments of choices `[B|1, Hm, Sq, k]`."""
    return {
        "indices": indices,
        "count": indices.shape[3],
        "list_heads": indices.shape[1],
        "indices_b": broadcast_stride(indices, 0),
        "indices_h": indices.stride(1),
        "indices_q": indices.stride(2),
        "indices_k": indices.stride(3),
    }


def list_batch(indices: Tensor, segments: dict[str, Any]) -> int:
    """Return for how many batch entries there are lists: 1 where neither choices nor segments differ among them."""
    parts = (segments["q_segments"], segments["k_segments"])
    return max(indices.shape[0], *(1 if part is None else part.shape[0] for part in parts))


@triton.jit
def columns_of(entries, words, step, count, seqlen_k, work: tl.constexpr):
    """Return the keys of one step of a walk through `count` entries."""
    column = tl.arange(0, work.columns)
    WIDE: tl.constexpr = work.wide
    PARTS: tl.constexpr = work.parts
    if PARTS == 1:
        at = step * work.entries + column // WIDE
        place = column % WIDE
    else:
        at = step // PARTS + column * 0
        place = step % PARTS * work.columns + column
    listed = at < count
    number = tl.load(entries + at, listed, other=0)
    word = tl.load(words + at, listed, other=0)
    key = number * work.block + place
    inside = listed & (key < seqlen_k)
    if WIDE != work.block:
        inside = inside & (place < work.block)
    return Columns(key, word, inside)


@triton.jit
def gathered(pointer, stride, row, inside, width: tl.constexpr, ALIGNED: tl.constexpr, CHECKED: tl.constexpr):
    """Load rows of a head by their numbers: 0 past the width, and where they are not `inside` if that is `CHECKED`."""
    pointers = pointer + row.to(tl.int64)[:, None] * stride
    if width.more != 0:
        first = columns_from(pointers, inside, width.first, width.first, ALIGNED, CHECKED)
        more = columns_from(pointers + width.first, inside, width.dim - width.first, width.more, ALIGNED, CHECKED)
    else:
        first = columns_from(pointers, inside, width.dim, width.first, ALIGNED, CHECKED)
        more = first
    return Parts(first, more)


@triton.jit
def columns_from(
    pointers, inside, DIM: tl.constexpr, PADDED: tl.constexpr, ALIGNED: tl.constexpr, CHECKED: tl.constexpr
):
    """Load `PADDED` columns of rows `[rows, 1]`, of which there are `DIM`."""
    column = tl.arange(0, PADDED)[None, :]
    pointers = pointers + column
    if ALIGNED:
        pointers = tl.multiple_of(pointers, [1, 16])
    if CHECKED:
        kept = inside[:, None]
        if DIM != PADDED:
            kept = kept & (column < DIM)
        values = tl.load(pointers, kept, other=0.0)
    elif DIM != PADDED:
        values = tl.load(pointers, column < DIM, other=0.0)
    else:
        values = tl.load(pointers)
    return values


@triton.jit
def stored(pointer, stride, row, inside, parts, width: tl.constexpr):
    """Store rows of a head by their numbers, where they are `inside`."""
    pointers = pointer + row.to(tl.int64)[:, None] * stride
    column = tl.arange(0, width.first)[None, :]
    tl.store(pointers + column, parts.first.to(pointer.dtype.element_ty), inside[:, None] & (column < width.dim))
    if width.more != 0:
        column = width.first + tl.arange(0, width.more)[None, :]
        tl.store(pointers + column, parts.more.to(pointer.dtype.element_ty), inside[:, None] & (column < width.dim))


@triton.jit
def added(pointer, row, inside, weights, rows, width: tl.constexpr, features: tl.constexpr):
    """Add `weights [row, rows]` times rows to sums `[.., width.whole]` by their numbers, where they are `inside`, in any order.

    One block of columns after the other, so that registers hold one.
    """
    pointers = pointer + row.to(tl.int64)[:, None] * width.whole
    column = tl.arange(0, width.first)[None, :]
    products = tl.dot(weights, rows.first, input_precision=features.precision)
    tl.atomic_add(pointers + column, products, mask=inside[:, None] & (column < width.dim), sem="relaxed")
    if width.more != 0:
        column = width.first + tl.arange(0, width.more)[None, :]
        products = tl.dot(weights, rows.more, input_precision=features.precision)
        tl.atomic_add(pointers + column, products, mask=inside[:, None] & (column < width.dim), sem="relaxed")


@triton.jit
def scaled(parts, factor, width: tl.constexpr):
    """Return rows times a factor."""
    more = parts.more
    if width.more != 0:
        more *= factor
    return Parts(parts.first * factor, more)


@triton.jit
def together(parts, others, width: tl.constexpr):
    """Return rows plus others, element by element."""
    more = parts.more
    if width.more != 0:
        more += others.more
    return Parts(parts.first + others.first, more)


@triton.jit
def no_rows(ROWS: tl.constexpr, width: tl.constexpr):
    """Return sums of rows `[ROWS, ..]` that are 0."""
    FIRST: tl.constexpr = width.first
    MORE: tl.constexpr = width.more if width.more != 0 else width.first
    return Parts(tl.zeros((ROWS, FIRST), tl.float32), tl.zeros((ROWS, MORE), tl.float32))


@triton.jit
def inner(rows, others, width: tl.constexpr, features: tl.constexpr):
    """Return the products of rows with others, `[rows, others]`."""
    products = tl.dot(rows.first, tl.trans(others.first), input_precision=features.precision)
    if width.more != 0:
        products = tl.dot(rows.more, tl.trans(others.more), products, input_precision=features.precision)
    return products


@triton.jit
def combined(weights, rows, sums, width: tl.constexpr, features: tl.constexpr):
    """Return sums plus `weights [.., rows]` times rows."""
    more = sums.more
    if width.more != 0:
        more = tl.dot(weights, rows.more, more, input_precision=features.precision)
    return Parts(tl.dot(weights, rows.first, sums.first, input_precision=features.precision), more)

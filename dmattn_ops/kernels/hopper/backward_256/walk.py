"""Where a block of the SM 9.0 backward for wide heads goes, and what it may see there.

A block owns rows and walks over columns in steps: dk and dv own keys and walk over queries, dq owns queries and walks
over keys. Steps that are seen whole come first, then those with a test.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.ragged import load_tile

STEP = gl.constexpr(64)  # columns of a step; a tile of a list is two steps
HEADER = gl.constexpr(4)
NO_LISTS = gl.constexpr(0)  # kinds of masks: the band alone, bits, segments, intervals, or the band of packed sequences
BITS = gl.constexpr(1)
SEGMENTS = gl.constexpr(2)
INTERVALS = gl.constexpr(3)
RAGGED = gl.constexpr(4)  # no list, but a record for each tile of rows (`kernels/ragged.py`)


class Intervals(NamedTuple):
    """The queries that see each key, at one batch or head: from `start` to `end` but for `hidden_from` to `hidden_to`."""

    start: Any
    end: Any
    hidden_from: Any
    hidden_to: Any


class Mask(NamedTuple):
    """A mask's tensors at one batch, strides of its heads, and how many query heads share one of them."""

    lists: Any
    bits: Any
    row_segments: Any
    column_segments: Any
    list_head: Any
    list_width: Any
    bits_head: Any
    bits_row: Any
    row_segments_head: Any
    column_segments_head: Any
    group: Any
    segment_group: Any
    intervals: Any


class View(NamedTuple):
    """What the rows of a block see of one head."""

    record: Any  # list of the rows' tile
    bits: Any  # of row 0
    row_segments: Any
    column_segments: Any
    intervals: Any
    bits_row: Any
    low: Any  # row r sees column c iff r + low <= c <= r + high
    high: Any
    columns: Any
    first: Any  # steps first ... end are inside the band, full_first ... full_end seen whole
    full_first: Any
    full_end: Any
    end: Any


class Select(NamedTuple):
    """The test of one step: columns low ... high of each row, or 64 bits, or equal segments and low ... high.

    Of intervals, columns low ... high but for drop_low ... drop_high where rows are keys; else low ... high, and rows
    begin ... end - 1 of each column but for drop_low ... drop_high - 1.
    """

    low: Any
    high: Any
    words: Any
    row_segments: Any
    column_segments: Any
    begin: Any
    end: Any
    drop_low: Any
    drop_high: Any


@gluon.jit
def no_test(rows):
    """Return a `Select` that fills the place of a test where nothing is tested; its fields are never read."""
    return Select(rows, rows, rows, rows, rows, rows, rows, rows, rows)


@gluon.jit
def at_batch(
    start, end, hidden_from, hidden_to, batch, stride, LISTS: gl.constexpr, HIDDEN: gl.constexpr
):  # fmt: skip
    """Return the intervals of a batch, of which there are some only where LISTS says so."""
    if LISTS == INTERVALS:
        start += batch.to(gl.int64) * stride
        end += batch.to(gl.int64) * stride
        if HIDDEN:
            hidden_from += batch.to(gl.int64) * stride
            hidden_to += batch.to(gl.int64) * stride
    return Intervals(start, end, hidden_from, hidden_to)


@gluon.jit
def block_of(pid, n_blocks, n_heads, heads_per_group):
    """Return (rank, head): groups of heads share L2; inside a group rank 0, the longest, comes first."""
    per_group = n_blocks * heads_per_group
    group = pid // per_group
    inside = pid - group * per_group
    width = gl.minimum(heads_per_group, n_heads - group * heads_per_group)
    rank = inside // width
    return rank, group * heads_per_group + inside - rank * width


@gluon.jit
def ranked_tile(rank, mask, head):
    """Return the tile of 128 rows that has the `rank`-th most work."""
    return gl.load(
        mask.lists + (head // mask.group).to(gl.int64) * mask.list_head + rank.to(gl.int64) * mask.list_width
    )


class Sight(NamedTuple):
    """Where a block's rows and the columns that they see lie: in the whole call, or in one of packed sequences."""

    tile: Any  # of rows
    rows: Any  # their place (`hopper/ragged.py`)
    columns: Any
    n_rows: Any
    n_columns: Any
    low: Any
    high: Any
    padded: Any  # columns before these, where each sequence is padded to whole tiles
    begin: Any  # of the rows and columns in tensors with a number for each one of all sequences
    columns_begin: Any


@gluon.jit
def sight_of(tile, batch, mask, n_rows, n_columns, low, high, LISTS: gl.constexpr, ROWS: gl.constexpr):
    """Return the sight of tile `tile` of a batch entry, or of the tile of packed sequences with this record."""
    sight = Sight(tile, batch, batch, n_rows, n_columns, low, high, 0, 0, 0)
    if LISTS == RAGGED:
        own = load_tile(mask.lists + tile.to(gl.int64) * mask.list_width)
        sight = Sight(
            own.first // ROWS, own.own, own.other, own.own.length, own.other.length, low + own.diagonal, high + own.diagonal,
            own.padded, own.own.begin, own.other.begin,
        )  # fmt: skip
    return sight


@gluon.jit
def band_view(mask, row, ROWS: gl.constexpr, n_rows, low, high, columns, TEST_END: gl.constexpr):
    """View rows `row ... row + ROWS` of a head that has no list; TEST_END: columns past the end need a test."""
    last = gl.minimum(row + ROWS, n_rows) - 1
    begin = gl.maximum(row + low, 0)
    stop = gl.minimum(last + high + 1, columns)
    first = begin // STEP
    end = gl.where(stop > begin, (stop + STEP - 1) // STEP, first)
    full_stop = row + high + 1
    if TEST_END:
        full_stop = gl.minimum(full_stop, columns)
    full_first = gl.minimum(gl.maximum((gl.maximum(last + low, 0) + STEP - 1) // STEP, first), end)
    full_end = gl.maximum(gl.minimum(full_stop // STEP, end), full_first)
    return View(mask.lists, mask.bits, mask.row_segments, mask.column_segments, mask.intervals, mask.bits_row, low, high, columns,
                first, full_first, full_end, end)  # fmt: skip


@gluon.jit
def head_view(view, mask, tile, head, LISTS: gl.constexpr, HIDDEN: gl.constexpr):
    """View the tile of rows that has record `tile`, of query head `head`."""
    record = view.record
    bits = view.bits
    row_segments = view.row_segments
    column_segments = view.column_segments
    if LISTS != NO_LISTS and LISTS != RAGGED:
        mask_head = (head // mask.group).to(gl.int64)
        record = mask.lists + mask_head * mask.list_head + tile * mask.list_width.to(gl.int64)
    if LISTS == BITS:
        bits = mask.bits + mask_head * mask.bits_head
    if LISTS == SEGMENTS:
        segment_head = (head // mask.segment_group).to(gl.int64)
        row_segments = mask.row_segments + segment_head * mask.row_segments_head
        column_segments = mask.column_segments + segment_head * mask.column_segments_head
    intervals = view.intervals
    if LISTS == INTERVALS:
        of_head = (head // mask.segment_group).to(gl.int64) * (mask.row_segments_head + mask.column_segments_head)
        hidden_from = intervals.hidden_from
        hidden_to = intervals.hidden_to
        if HIDDEN:
            hidden_from += of_head
            hidden_to += of_head
        intervals = Intervals(intervals.start + of_head, intervals.end + of_head, hidden_from, hidden_to)
    return View(record, bits, row_segments, column_segments, intervals, view.bits_row, view.low, view.high, view.columns,
                view.first, view.full_first, view.full_end, view.end)  # fmt: skip


@gluon.jit
def count_steps(view, LISTS: gl.constexpr):
    """Return (steps without a test, steps with one)."""
    if LISTS == NO_LISTS or LISTS == RAGGED:
        n_full = view.full_end - view.full_first
        n_partial = view.end - view.first - n_full
    else:
        n_full = gl.load(view.record + 2) * 2
        n_partial = gl.load(view.record + 1) * 2
    return n_full, n_partial


@gluon.jit
def full_step(t, view, n_partial, LISTS: gl.constexpr):
    """Return where the `t`-th step without a test is, in steps."""
    if LISTS == NO_LISTS or LISTS == RAGGED:
        at = view.full_first + t
    else:
        at = gl.load(view.record + HEADER + (n_partial + t) // 2) * 2 + (t & 1)
    return at


@gluon.jit
def partial_step(t, view, n_partial, LISTS: gl.constexpr):
    """Return where the `t`-th step with a test is, in steps; any number past the last one."""
    if LISTS == NO_LISTS or LISTS == RAGGED:
        before = view.full_first - view.first
        at = gl.where(t < before, view.first + t, view.full_end + t - before)
    else:
        at = gl.load(view.record + HEADER + t // 2, mask=t < n_partial, other=0) * 2 + (t & 1)
    return at


class RowNumbers(NamedTuple):
    """What is loaded of a block's rows once: segments, or, where rows are keys, their intervals of queries."""

    segments: Any
    low: Any
    high: Any
    drop_low: Any
    drop_high: Any


@gluon.jit
def load_row_numbers(view, rows, n_rows, LISTS: gl.constexpr, HIDDEN: gl.constexpr, KEYS: gl.constexpr):
    """Return the numbers of `rows`; KEYS: whether rows are keys. Intervals of keys are cut to the band."""
    segments = rows
    low = rows
    high = rows
    drop_low = rows
    drop_high = rows
    if LISTS == SEGMENTS:
        segments = gl.load(view.row_segments + rows, mask=rows < n_rows, other=-1)
    elif LISTS == INTERVALS and KEYS:
        inside = rows < n_rows  # 0 below: any int32 may be an end, and nothing that is computed from it overflows
        low = gl.maximum(gl.load(view.intervals.start + rows, mask=inside, other=1), rows + view.low)
        high = gl.minimum(gl.maximum(gl.load(view.intervals.end + rows, mask=inside, other=0), 0) - 1, rows + view.high)
        if HIDDEN:
            drop_low = gl.maximum(gl.load(view.intervals.hidden_from + rows, mask=inside, other=0), 0)
            drop_high = gl.maximum(gl.load(view.intervals.hidden_to + rows, mask=inside, other=0), 0) - 1
    return RowNumbers(segments, low, high, drop_low, drop_high)


@gluon.jit
def load_select(
    at, view, rows, numbers, LISTS: gl.constexpr, HAS_HIGH: gl.constexpr, HIDDEN: gl.constexpr, KEYS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Return the test of step `at` for scores of `layout`; KEYS: whether rows are keys."""
    column = at * STEP + gl.arange(0, STEP, layout=gl.SliceLayout(0, layout))
    low = rows
    high = rows
    words = rows
    column_segments = column
    begin = column
    end = column
    drop_low = rows
    drop_high = rows
    if LISTS == BITS:
        words = gl.load(view.bits + rows.to(gl.int64) * view.bits_row + at)
    elif LISTS == INTERVALS and KEYS:
        low = numbers.low - at * STEP
        high = numbers.high - at * STEP
        if HIDDEN:
            drop_low = numbers.drop_low - at * STEP
            drop_high = numbers.drop_high - at * STEP
    else:
        low = rows + (view.low - at * STEP)
        if HAS_HIGH:
            high = gl.minimum(rows + view.high, view.columns - 1) - at * STEP
    if LISTS == SEGMENTS:
        column_segments = gl.load(view.column_segments + column, mask=column < view.columns, other=-2)
    if LISTS == INTERVALS and not KEYS:
        inside = column < view.columns
        begin = gl.load(view.intervals.start + column, mask=inside, other=0)
        end = gl.load(view.intervals.end + column, mask=inside, other=0)
        drop_low = begin
        drop_high = begin
        if HIDDEN:
            drop_low = gl.load(view.intervals.hidden_from + column, mask=inside, other=0)
            drop_high = gl.load(view.intervals.hidden_to + column, mask=inside, other=0)
    return Select(low, high, words, numbers.segments, column_segments, begin, end, drop_low, drop_high)


@gluon.jit
def visible(
    p, rows, select, LISTS: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, HIDDEN: gl.constexpr,
    KEYS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return `p[row, column]` where the row sees the column, else 0; KEYS: whether rows are keys."""
    column = gl.arange(0, STEP, layout=gl.SliceLayout(0, layout))[None, :]
    lane = column & 6  # the part of a column that depends on the lane: what is left is known when compiling
    if LISTS == BITS:
        words = select.words[:, None]
        half = gl.where(column < 32, words.to(gl.int32), (words >> 32).to(gl.int32))
        p = gl.where(((half >> lane) & (1 << (column & 25))) != 0, p, 0.0)
    else:
        if HAS_LOW or (LISTS == INTERVALS and KEYS):
            p = gl.where(column - lane >= select.low[:, None] - lane, p, 0.0)
        if HAS_HIGH or (LISTS == INTERVALS and KEYS):
            p = gl.where(column - lane <= select.high[:, None] - lane, p, 0.0)
    if LISTS == INTERVALS and not KEYS:
        row = rows[:, None]
        p = gl.where((row >= select.begin[None, :]) & (row < select.end[None, :]), p, 0.0)
        if HIDDEN:
            p = gl.where((row >= select.drop_low[None, :]) & (row < select.drop_high[None, :]), 0.0, p)
    if LISTS == INTERVALS and KEYS and HIDDEN:
        p = gl.where((column >= select.drop_low[:, None]) & (column <= select.drop_high[:, None]), 0.0, p)
    if LISTS == SEGMENTS:
        p = gl.where(select.row_segments[:, None] == select.column_segments[None, :], p, 0.0)
    return p

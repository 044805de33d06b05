"""Where a block of SM 9.0 kernels goes, and what it may see there: of the backward for wide heads, and of a shared bias's gradient.

A block owns rows and walks over columns in steps: dk and dv own keys and walk over queries, dq and dbias own queries and walk
over keys. Steps that are seen whole come first, then those with a test.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.constants import HEADER
from dmattn_ops.kernels.hopper.kinds import BITS, INTERVALS, RAGGED, SEGMENTS, has_lists
from dmattn_ops.kernels.hopper.lists import counts_of, last_tile, named_tile
from dmattn_ops.kernels.hopper.ragged import load_tile

STEP = gl.constexpr(64)  # columns of a step; a tile of a list is two steps


class Maps(NamedTuple):
    """Tensor maps of what a block loads, in parts (`columns.py`)."""

    q: Any
    k: Any
    v: Any
    o: Any  # grad_out


class Test(NamedTuple):
    """What the test of a step is compiled for."""

    MASK: str  # one of `kinds.py`
    HAS_LO: bool  # whether rows have a first column, of the band
    HAS_HI: bool  # whether rows have a last one, of the band or of all
    HIDDEN: bool  # whether intervals have a part that does not see the key
    KEYS: bool  # whether rows are keys


class MaskTensors(NamedTuple):
    """The tensors and strides of one side's mask, in the order and with the names in which kernels take them from launchers."""

    lists: Any  # RAGGED: records (`kernels/ragged.py`)
    bits: Any  # 64-bit words
    q_segments: Any
    k_segments: Any
    start: Any  # intervals have the strides of `k_segments`
    end: Any
    hidden_from: Any
    hidden_to: Any
    list_b: Any
    list_h: Any
    list_width: Any
    bits_b: Any
    bits_h: Any
    bits_row: Any
    q_segments_b: Any
    k_segments_b: Any
    k_segments_h: Any
    mask_group: Any  # query heads that share a list
    segment_group: Any  # query heads that share segments or intervals of keys


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
    segments_head: Any  # of segments and intervals of keys
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
    band_lo: Any  # row r sees column c iff r + band_lo <= c <= r + band_hi
    band_hi: Any
    columns: Any
    # Steps first ... end are inside the band, full_first ... full_end seen whole. Of a head with a list `full_end` is how many
    # words that has, and `end` the last tile that it may name.
    first: Any
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
def at_batch(given, batch, stride, TEST: gl.constexpr):
    """Return the intervals of a batch, of which there are some only where the kind of mask says so."""
    start = given.start
    end = given.end
    hidden_from = given.hidden_from
    hidden_to = given.hidden_to
    if TEST.MASK == INTERVALS:
        start += batch.to(gl.int64) * stride
        end += batch.to(gl.int64) * stride
        if TEST.HIDDEN:
            hidden_from += batch.to(gl.int64) * stride
            hidden_to += batch.to(gl.int64) * stride
    return Intervals(start, end, hidden_from, hidden_to)


@gluon.jit
def mask_of(given, batch, TEST: gl.constexpr):
    """Return the mask of a batch."""
    at = batch.to(gl.int64)
    lists = given.lists + at * given.list_b
    bits = given.bits + at * given.bits_b
    if TEST.KEYS:
        row_segments = given.k_segments + at * given.k_segments_b
        column_segments = given.q_segments + at * given.q_segments_b
    else:
        row_segments = given.q_segments + at * given.q_segments_b
        column_segments = given.k_segments + at * given.k_segments_b
    intervals = at_batch(given, batch, given.k_segments_b, TEST)
    return Mask(lists, bits, row_segments, column_segments, given.list_h, given.list_width, given.bits_h, given.bits_row,
                given.k_segments_h, given.mask_group, given.segment_group, intervals)  # fmt: skip


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
def ranked_tile(rank, mask, head, last, TEST: gl.constexpr):
    """Return the tile of 128 rows that has the `rank`-th most work; `last` is the last one that a list may name."""
    at = (head // mask.group).to(gl.int64) * mask.list_head + rank.to(gl.int64) * mask.list_width
    tile = gl.load(mask.lists + at)
    if has_lists(TEST.MASK):
        tile = named_tile(tile, last)
    return tile


class Sight(NamedTuple):
    """Where a block's rows and the columns that they see lie: in the whole call, or in one of packed sequences."""

    tile: Any  # of rows
    rows: Any  # their place (`hopper/ragged.py`)
    columns: Any
    n_rows: Any
    n_columns: Any
    band_lo: Any
    band_hi: Any
    padded: Any  # columns before these, where each sequence is padded to whole tiles
    begin: Any  # of the rows and columns in tensors with a number for each one of all sequences
    columns_begin: Any


@gluon.jit
def sight_of(tile, batch, mask, n_rows, n_columns, band_lo, band_hi, ROWS: gl.constexpr, TEST: gl.constexpr):
    """Return the sight of tile `tile` of a batch entry, or of the tile of packed sequences with this record."""
    sight = Sight(tile, batch, batch, n_rows, n_columns, band_lo, band_hi, 0, 0, 0)
    if TEST.MASK == RAGGED:
        own = load_tile(mask.lists + tile.to(gl.int64) * mask.list_width)
        sight = Sight(
            own.first // ROWS, own.own, own.other, own.own.length, own.other.length, band_lo + own.diagonal,
            band_hi + own.diagonal, own.padded, own.own.begin, own.other.begin,
        )  # fmt: skip
    return sight


@gluon.jit
def band_view(mask, row, ROWS: gl.constexpr, n_rows, band_lo, band_hi, columns, TEST_END: gl.constexpr):
    """View rows `row ... row + ROWS` of a head that has no list; TEST_END: columns past the end need a test."""
    last = gl.minimum(row + ROWS, n_rows) - 1
    begin = gl.maximum(row + band_lo, 0)
    stop = gl.minimum(last + band_hi + 1, columns)
    first = begin // STEP
    end = gl.where(stop > begin, (stop + STEP - 1) // STEP, first)
    full_stop = row + band_hi + 1
    if TEST_END:
        full_stop = gl.minimum(full_stop, columns)
    full_first = gl.minimum(gl.maximum((gl.maximum(last + band_lo, 0) + STEP - 1) // STEP, first), end)
    full_end = gl.maximum(gl.minimum(full_stop // STEP, end), full_first)
    return View(mask.lists, mask.bits, mask.row_segments, mask.column_segments, mask.intervals, mask.bits_row, band_lo, band_hi,
                columns, first, full_first, full_end, end)  # fmt: skip


@gluon.jit
def head_view(view, mask, tile, head, TEST: gl.constexpr):
    """View the tile of rows that has record `tile`, of query head `head`."""
    record = view.record
    bits = view.bits
    row_segments = view.row_segments
    column_segments = view.column_segments
    if has_lists(TEST.MASK):
        mask_head = (head // mask.group).to(gl.int64)
        record = mask.lists + mask_head * mask.list_head + tile * mask.list_width.to(gl.int64)
    if TEST.MASK == BITS:
        bits = mask.bits + mask_head * mask.bits_head
    if TEST.MASK == SEGMENTS:
        segment_head = (head // mask.segment_group).to(gl.int64)
        row_segments = mask.row_segments
        column_segments = mask.column_segments
        if TEST.KEYS:
            row_segments += segment_head * mask.segments_head
        else:
            column_segments += segment_head * mask.segments_head
    full_end = view.full_end
    end = view.end
    if has_lists(TEST.MASK):
        full_end = mask.list_width
        end = last_tile(view.columns)
    intervals = view.intervals
    if TEST.MASK == INTERVALS:
        of_head = (head // mask.segment_group).to(gl.int64) * mask.segments_head
        hidden_from = intervals.hidden_from
        hidden_to = intervals.hidden_to
        if TEST.HIDDEN:
            hidden_from += of_head
            hidden_to += of_head
        intervals = Intervals(intervals.start + of_head, intervals.end + of_head, hidden_from, hidden_to)
    return View(record, bits, row_segments, column_segments, intervals, view.bits_row, view.band_lo, view.band_hi,
                view.columns, view.first, view.full_first, full_end, end)  # fmt: skip


@gluon.jit
def count_steps(view, TEST: gl.constexpr):
    """Return (steps without a test, steps with one)."""
    if has_lists(TEST.MASK):
        n_partial, n_full = counts_of(view.record, view.full_end)
        n_partial *= 2
        n_full *= 2
    else:
        n_full = view.full_end - view.full_first
        n_partial = view.end - view.first - n_full
    return n_full, n_partial


@gluon.jit
def full_step(t, view, n_partial, TEST: gl.constexpr):
    """Return where the `t`-th step without a test is, in steps."""
    if has_lists(TEST.MASK):
        at = named_tile(gl.load(view.record + HEADER + (n_partial + t) // 2), view.end) * 2 + (t & 1)
    else:
        at = view.full_first + t
    return at


@gluon.jit
def partial_step(t, view, n_partial, TEST: gl.constexpr):
    """Return where the `t`-th step with a test is, in steps; any number past the last one."""
    if has_lists(TEST.MASK):
        at = named_tile(gl.load(view.record + HEADER + t // 2, mask=t < n_partial, other=0), view.end) * 2 + (t & 1)
    else:
        before = view.full_first - view.first
        at = gl.where(t < before, view.first + t, view.full_end + t - before)
    return at


class RowNumbers(NamedTuple):
    """What is loaded of a block's rows once: segments, or, where rows are keys, their intervals of queries."""

    segments: Any
    low: Any
    high: Any
    drop_low: Any
    drop_high: Any


@gluon.jit
def load_row_numbers(view, rows, n_rows, TEST: gl.constexpr):
    """Return the numbers of `rows`. Intervals of keys are cut to the band."""
    segments = rows
    low = rows
    high = rows
    drop_low = rows
    drop_high = rows
    if TEST.MASK == SEGMENTS:
        segments = gl.load(view.row_segments + rows, mask=rows < n_rows, other=-1)
    elif TEST.MASK == INTERVALS and TEST.KEYS:
        inside = rows < n_rows  # 0 below: any int32 may be an end, and nothing that is computed from it overflows
        low = gl.maximum(gl.load(view.intervals.start + rows, mask=inside, other=1), rows + view.band_lo)
        high = gl.minimum(
            gl.maximum(gl.load(view.intervals.end + rows, mask=inside, other=0), 0) - 1, rows + view.band_hi
        )
        if TEST.HIDDEN:
            drop_low = gl.maximum(gl.load(view.intervals.hidden_from + rows, mask=inside, other=0), 0)
            drop_high = gl.maximum(gl.load(view.intervals.hidden_to + rows, mask=inside, other=0), 0) - 1
    return RowNumbers(segments, low, high, drop_low, drop_high)


@gluon.jit
def load_select(at, view, rows, numbers, TEST: gl.constexpr, layout: gl.constexpr):
    """Return the test of step `at` for scores of `layout`."""
    column = at * STEP + gl.arange(0, STEP, layout=gl.SliceLayout(0, layout))
    low = rows
    high = rows
    words = rows
    column_segments = column
    begin = column
    end = column
    drop_low = rows
    drop_high = rows
    if TEST.MASK == BITS:
        words = gl.load(view.bits + rows.to(gl.int64) * view.bits_row + at)
    elif TEST.MASK == INTERVALS and TEST.KEYS:
        low = numbers.low - at * STEP
        high = numbers.high - at * STEP
        if TEST.HIDDEN:
            drop_low = numbers.drop_low - at * STEP
            drop_high = numbers.drop_high - at * STEP
    else:
        low = rows + (view.band_lo - at * STEP)
        if TEST.HAS_HI:
            high = gl.minimum(rows + view.band_hi, view.columns - 1) - at * STEP
    if TEST.MASK == SEGMENTS:
        column_segments = gl.load(view.column_segments + column, mask=column < view.columns, other=-2)
    if TEST.MASK == INTERVALS and not TEST.KEYS:
        inside = column < view.columns
        begin = gl.load(view.intervals.start + column, mask=inside, other=0)
        end = gl.load(view.intervals.end + column, mask=inside, other=0)
        drop_low = begin
        drop_high = begin
        if TEST.HIDDEN:
            drop_low = gl.load(view.intervals.hidden_from + column, mask=inside, other=0)
            drop_high = gl.load(view.intervals.hidden_to + column, mask=inside, other=0)
    return Select(low, high, words, numbers.segments, column_segments, begin, end, drop_low, drop_high)


@gluon.jit
def visible(p, rows, select, TEST: gl.constexpr, layout: gl.constexpr):
    """Return `p[row, column]` where the row sees the column, else 0."""
    column = gl.arange(0, STEP, layout=gl.SliceLayout(0, layout))[None, :]
    lane = column & 6  # the part of a column that depends on the lane: what is left is known when compiling
    if TEST.MASK == BITS:
        words = select.words[:, None]
        half = gl.where(column < 32, words.to(gl.int32), (words >> 32).to(gl.int32))
        p = gl.where(((half >> lane) & (1 << (column & 25))) != 0, p, 0.0)
    else:
        if TEST.HAS_LO or (TEST.MASK == INTERVALS and TEST.KEYS):
            p = gl.where(column - lane >= select.low[:, None] - lane, p, 0.0)
        if TEST.HAS_HI or (TEST.MASK == INTERVALS and TEST.KEYS):
            p = gl.where(column - lane <= select.high[:, None] - lane, p, 0.0)
    if TEST.MASK == INTERVALS and not TEST.KEYS:
        row = rows[:, None]
        p = gl.where((row >= select.begin[None, :]) & (row < select.end[None, :]), p, 0.0)
        if TEST.HIDDEN:
            p = gl.where((row >= select.drop_low[None, :]) & (row < select.drop_high[None, :]), 0.0, p)
    if TEST.MASK == INTERVALS and TEST.KEYS and TEST.HIDDEN:
        p = gl.where((column >= select.drop_low[:, None]) & (column <= select.drop_high[:, None]), 0.0, p)
    if TEST.MASK == SEGMENTS:
        p = gl.where(select.row_segments[:, None] == select.column_segments[None, :], p, 0.0)
    return p

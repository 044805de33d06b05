"""Triton primitives of the portable kernels: row blocks, walks over tiles, visibility, scores and dropout.

A program *owns* a block of rows, whose results it writes, and *walks* over the rows of the other side in steps. In the
forward and in dq it owns queries and walks over keys; in dk/dv it owns keys and walks over queries. The functions here are
written for owned and walked rows, so that all kernels share them. Blocks of scores are `[owned, walked]` throughout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmattn_ops import problem

TILE = tl.constexpr(problem.TILE)
HEADER = tl.constexpr(problem.HEADER)
WORD_BITS = tl.constexpr(problem.WORD_BITS)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(
    pointer,
    start,
    row_stride,
    end,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Load rows `start ...` as `[ROWS, PADDED]`: 0 past `WIDTH`, and past row `end` where `CHECKED`.

    `ALIGNED`: every row starts at a multiple of 16 bytes. Triton sees that by itself only of strides that are multiples
    of 16 elements; 8 (head dimensions 40, 72 ...) are enough for 16-byte loads.
    """
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    offsets = rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    pointers = pointer + start.to(tl.int64) * row_stride + offsets
    if ALIGNED:
        pointers = tl.multiple_of(pointers, [1, 16])
    if CHECKED:
        inside = (start + rows < end)[:, None]
        if WIDTH != PADDED:
            inside = inside & (columns < WIDTH)[None, :]
        block = tl.load(pointers, mask=inside, other=0.0)
    elif WIDTH != PADDED:
        block = tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        block = tl.load(pointers)
    return block


@triton.jit
def store_rows(
    pointer,
    start,
    row_stride,
    end,
    block,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store `[ROWS, PADDED]` at rows `start ...`, up to row `end` and column `WIDTH`."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    offsets = rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    inside = (start + rows < end)[:, None]
    if WIDTH != PADDED:
        inside = inside & (columns < WIDTH)[None, :]
    pointers = pointer + start.to(tl.int64) * row_stride + offsets
    if ALIGNED:
        pointers = tl.multiple_of(pointers, [1, 16])
    tl.store(pointers, block.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_statistics(pointer, start, end, default, ROWS: tl.constexpr, CHECKED: tl.constexpr):
    """Load a statistic `[ROWS]` of rows `start ...`; `default` past `end` where `CHECKED`."""
    rows = start + tl.arange(0, ROWS)
    if CHECKED:
        statistic = tl.load(pointer + rows, mask=rows < end, other=default)
    else:
        statistic = tl.load(pointer + rows)
    return statistic


@triton.jit
def packed_sequence(cu_seqlens, index, total, longest):
    """Return the begin and the length of a packed sequence. Offsets are clamped, so that they lie inside the tensor."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + index), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + index + 1), begin), total)
    return begin, tl.minimum(end - begin, longest)


@triton.jit
def sequences(
    cu_seqlens_q,
    cu_seqlens_k,
    batch,
    seqlen_q,
    seqlen_k,
    longest_q,
    longest_k,
    VARLEN: tl.constexpr,
    TOP_LEFT: tl.constexpr,
):
    """Return `(row, q_begin, length_q, k_begin, length_k, shift)`: the index of the batch dimension, and the sequences.

    `shift` is what a packed sequence adds to the band; `row` is 0 where sequences are packed.
    """
    zero = tl.full((), 0, tl.int32)
    if VARLEN:
        q_begin, length_q = packed_sequence(cu_seqlens_q, batch, seqlen_q, longest_q)
        k_begin, length_k = packed_sequence(cu_seqlens_k, batch, seqlen_k, longest_k)
        row = zero
        shift = zero
        if not TOP_LEFT:
            shift = length_k - length_q
    else:
        q_begin, length_q, k_begin, length_k = zero, seqlen_q, zero, seqlen_k
        row = batch
        shift = zero
    return row, q_begin, length_q, k_begin, length_k, shift


@triton.jit
def head_offset(row, head, stride_b, stride_h):
    """Return where one head of a tensor with a batch dimension begins."""
    return row.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h


@triton.jit
def head_rows(pointer, row, head, begin, stride_b, stride_s, stride_h):
    """Return where row `begin` of one head of `[B, S, heads, D]` lies."""
    return pointer + head_offset(row, head, stride_b, stride_h) + begin.to(tl.int64) * stride_s


@triton.jit
def owned_start(tiles, tile_stride, block, blocks, BLOCK: tl.constexpr, LISTED: tl.constexpr, DESCENDING: tl.constexpr):
    """Return the first row of the `block`-th program of a head: programs take the longest walks first."""
    if LISTED:
        per_tile: tl.constexpr = TILE // BLOCK
        tile = tl.load(tiles + (block // per_tile).to(tl.int64) * tile_stride)
        start = (tile * per_tile + block % per_tile) * BLOCK
    elif DESCENDING:
        start = (blocks - 1 - block) * BLOCK
    else:
        start = block * BLOCK
    return start


@triton.jit
def walk(
    record,
    first_owned,
    last_owned,
    low,
    high,
    length,
    STEP: tl.constexpr,
    LISTED: tl.constexpr,
    TEST_ALL: tl.constexpr,
):
    """Plan the walk of rows `first_owned ... last_owned`: `(n_full, full_first, n_partial, partial_first, left, gap)`.

    Counts are in steps of `STEP` rows. Walked row `w` is inside the band of owned row `o` iff `o + low <= w <= o + high`.

    ```
    band of a block:   . . [partial: left steps][full: gap steps][partial: the rest] . .
    ```
    `partial_first` and `full_first` count steps too: from row 0 without lists, from a record's first entry with them.
    """
    zero = tl.full((), 0, tl.int32)
    if LISTED:
        per_tile: tl.constexpr = TILE // STEP
        n_partial = tl.load(record + 1) * per_tile
        n_full = tl.load(record + 2) * per_tile
        partial_first = zero
        full_first = n_partial
        left = zero
        gap = zero
    else:
        partial_first = tl.maximum(first_owned + low, 0) // STEP
        end = tl.maximum((tl.minimum(last_owned + high + 1, length) + STEP - 1) // STEP, partial_first)
        if TEST_ALL:
            full_first = end
            n_full = zero
        else:
            full_first = (tl.maximum(last_owned + low, 0) + STEP - 1) // STEP
            full_first = tl.minimum(tl.maximum(full_first, partial_first), end)
            full_end = tl.maximum(tl.minimum(first_owned + high + 1, length), 0) // STEP
            n_full = tl.maximum(tl.minimum(full_end, end) - full_first, 0)
        left = full_first - partial_first
        gap = n_full
        n_partial = end - partial_first - n_full
    return n_full, full_first, n_partial, partial_first, left, gap


@triton.jit
def walked_start(part, step, STEP: tl.constexpr, LISTED: tl.constexpr):
    """Return the first row of step `step` of a part `(record, first, left, gap)` of a walk."""
    record, first, left, gap = part
    if LISTED:
        per_tile: tl.constexpr = TILE // STEP
        entry = first + step
        start = (tl.load(record + HEADER + entry // per_tile) * per_tile + entry % per_tile) * STEP
    else:
        start = (first + step + tl.where(step < left, 0, gap)) * STEP
    return start


@triton.jit
def segment_ids(segments, start, end, ROWS: tl.constexpr, PRESENT: tl.constexpr):
    """Load the segment ids `[ROWS]` of rows `start ...`; 0 where there are none."""
    rows = start + tl.arange(0, ROWS)
    if PRESENT:
        ids = tl.load(segments + rows, mask=rows < end, other=0)
    else:
        ids = tl.zeros((ROWS,), tl.int32)
    return ids


@triton.jit
def visibility(
    mask,
    owned_ids,
    walked_ids,
    owned_first,
    walked_first,
    walked_end,
    OWNED: tl.constexpr,
    WALKED: tl.constexpr,
    MASK: tl.constexpr,
):
    """Return which pairs `[OWNED, WALKED]` of a partial step are visible: by bits alone, or by ids, band and lengths.

    `mask` is `(bits, bits_stride, low, high)`, `MASK` is `(BITS, SEGMENTS, BANDED)`.
    """
    BITS: tl.constexpr = MASK[0]
    SEGMENTS: tl.constexpr = MASK[1]
    BANDED: tl.constexpr = MASK[2]
    bits, bits_stride, low, high = mask
    owned = owned_first + tl.arange(0, OWNED)
    walked = walked_first + tl.arange(0, WALKED)
    if BITS:
        # A word holds 32 walked rows. One column of words at a time keeps the block in the layout of the scores: a
        # [OWNED, words, 32] tensor would have to pass through shared memory.
        words = bits + owned.to(tl.int64) * bits_stride + walked_first // WORD_BITS
        word = tl.broadcast_to(tl.load(words)[:, None], (OWNED, WALKED))
        for index in tl.static_range(1, WALKED // WORD_BITS):
            within = tl.arange(0, WALKED) // WORD_BITS == index
            word = tl.where(within[None, :], tl.load(words + index)[:, None], word)
        visible = ((word >> (walked % WORD_BITS)[None, :]) & 1) != 0
    else:
        visible = tl.broadcast_to((walked < walked_end)[None, :], (OWNED, WALKED))
        if BANDED:
            distance = walked[None, :] - owned[:, None]
            visible = visible & (distance >= low) & (distance <= high)
        if SEGMENTS:
            visible = visible & (owned_ids[:, None] == walked_ids[None, :])
    return visible


@triton.jit
def load_bias(
    pointer,
    owned_stride,
    walked_stride,
    owned_first,
    walked_first,
    owned_end,
    walked_end,
    OWNED: tl.constexpr,
    WALKED: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Load the bias `[OWNED, WALKED]` of a step as float32; `CHECKED`: the step may reach past `walked_end`."""
    owned = owned_first + tl.arange(0, OWNED)
    walked = walked_first + tl.arange(0, WALKED)
    pointers = pointer + (owned.to(tl.int64) * owned_stride)[:, None] + (walked.to(tl.int64) * walked_stride)[None, :]
    inside = (owned < owned_end)[:, None]
    if CHECKED:
        inside = inside & (walked < walked_end)[None, :]
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_block(
    pointer,
    owned_stride,
    walked_stride,
    owned_first,
    walked_first,
    owned_end,
    walked_end,
    block,
    OWNED: tl.constexpr,
    WALKED: tl.constexpr,
):
    """Store a block `[OWNED, WALKED]`, up to the ends."""
    owned = owned_first + tl.arange(0, OWNED)
    walked = walked_first + tl.arange(0, WALKED)
    pointers = pointer + (owned.to(tl.int64) * owned_stride)[:, None] + (walked.to(tl.int64) * walked_stride)[None, :]
    inside = (owned < owned_end)[:, None] & (walked < walked_end)[None, :]
    tl.store(pointers, block.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_key_bias(bias, start, stride, end, KEYS: tl.constexpr):
    """Load the bias `[KEYS]` of keys `start ...` as float32."""
    keys = start + tl.arange(0, KEYS)
    return tl.load(bias + keys.to(tl.int64) * stride, mask=keys < end, other=0.0).to(tl.float32)


@triton.jit
def tanh(x):
    """Return tanh to a few units in the last place. Near 0, where the usual quotient loses digits, a series is used."""
    square = x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    quotient = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def scores(raw, bias, numbers, SOFTCAP: tl.constexpr, BIAS: tl.constexpr):
    """Return the base-2 scores of dot products `raw`, and the derivative of the softcap (1 without one).

    `numbers` is `(softmax_scale, softcap)`.
    """
    softmax_scale, softcap = numbers
    if SOFTCAP:
        capped = tanh(raw * (softmax_scale / softcap))
        score = capped * (softcap * LOG2E)
        slope = 1.0 - capped * capped
    else:
        score = raw * (softmax_scale * LOG2E)
        slope = 1.0
    if BIAS != "none":
        score += bias * LOG2E
    return score, slope


@triton.jit
def score_gradient(p, grad_p, delta, keep, dropout, DROPOUT: tl.constexpr):
    """Return the gradient of the scores: `p * (grad_p - delta)`, where `grad_p` passes through dropout."""
    if DROPOUT:
        grad_p = tl.where(keep, grad_p * dropout[2], 0.0)
    return p * (grad_p - delta)


@triton.jit
def dropout_keep(dropout, query_first, key_first, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Return which elements `[QUERIES, KEYS]` dropout keeps: Philox4x32-10 at (key // 4, query, stream, 0), word key % 4.

    One evaluation makes four words, which serve four neighbouring keys. `dropout` is `(seed, threshold, rescale, stream)`.
    """
    seed, threshold, _, stream = dropout
    GROUPS: tl.constexpr = KEYS // 4
    groups = key_first // 4 + tl.arange(0, GROUPS)
    queries = query_first + tl.arange(0, QUERIES)
    zeros = tl.zeros((QUERIES, GROUPS), tl.int32)
    word0, word1, word2, word3 = tl.philox(
        seed, zeros + groups[None, :], zeros + queries[:, None], zeros + stream, zeros
    )
    limit = threshold.to(tl.uint32)
    even = tl.join(((word0 >> 8) >= limit).to(tl.int8), ((word2 >> 8) >= limit).to(tl.int8))
    odd = tl.join(((word1 >> 8) >= limit).to(tl.int8), ((word3 >> 8) >= limit).to(tl.int8))
    return tl.reshape(tl.join(even, odd), (QUERIES, KEYS)) != 0

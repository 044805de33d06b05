"""What the SM 9.0 forward works on and in which order: pieces of work, the key tiles of each, and the warp that loads them.

`MASK` is "band" (and no mask at all), "bits", "segments", "intervals" or "ragged" (the band of packed sequences, whose tiles
`kernels/ragged.py` records); `BIAS` is "none", "key" (one per key), "full" (one per pair) or "tiles" (that, by TMA).
Constants are local to the functions: a launch compares every global that a kernel reads, at 2 us each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.gluon_compat import mbarrier, meet, tma_load
from dmattn_ops.kernels.hopper.ragged import count_tiles, head_corner_of, load_tile


@gluon.jit
def piece_of(item, tiles, heads, group):
    """Return (rank of the tile, batch * head): `group` heads share L2, and inside a group rank 0 comes first."""
    per_group = tiles * group
    g = item // per_group
    inside = item - g * per_group
    width = gl.minimum(group, heads - g * group)
    rank = inside // width
    return rank, g * group + inside - rank * width


@gluon.jit
def band_tiles(
    q_first, seqlen_q, seqlen_k, lo, hi, M: gl.constexpr, BN: gl.constexpr, HAS_LO: gl.constexpr, HAS_HI: gl.constexpr
):
    """Return (begin, end, full_begin, full_end): key tiles that any of `M` queries sees, and those all see whole."""
    q_last = gl.minimum(q_first + M, seqlen_q) - 1
    begin = 0
    full_begin = 0
    end = seqlen_k
    full_end = seqlen_k
    if HAS_LO:
        begin = gl.minimum(gl.maximum(q_first + lo, 0), seqlen_k) // BN
        full_begin = (gl.maximum(q_last + lo, 0) + BN - 1) // BN
    if HAS_HI:
        end = gl.maximum(gl.minimum(end, q_last + hi + 1), 0)
        full_end = gl.maximum(gl.minimum(full_end, q_first + hi + 1), 0)
    end = gl.maximum((end + BN - 1) // BN, begin)
    full_begin = gl.minimum(full_begin, end)
    full_end = gl.maximum(gl.minimum(full_end // BN, end), full_begin)
    return begin, end, full_begin, full_end


@gluon.jit
def band_tile(i, begin, end, full_begin, full_end):
    """Return the `i`-th key tile of a walk: partial ones from the right, then on the left, full ones from the right."""
    right = end - full_end
    partial = right + full_begin - begin
    inner = gl.where(i < partial, begin + i - right, full_end - 1 - i + partial)
    return gl.where(i < right, end - 1 - i, inner)


@gluon.jit
def list_tile(lists, record, i, n, PER_TILE: gl.constexpr):
    """Return the `i`-th key tile (of `TILE / PER_TILE` keys) of a record; past its end the last one, never used."""
    HEADER: gl.constexpr = 4
    return gl.load(lists + record + HEADER + gl.minimum(i, n - 1) // PER_TILE) * PER_TILE + i % PER_TILE


@gluon.jit
def take(item, lists, masks, tiles, heads, group, H, MASK: gl.constexpr, REVERSED: gl.constexpr):
    """Return (query tile, batch * head, offset of its record, what that holds) of a piece of work, longest first.

    A list holds n_partial and n_full, and the record of packed sequences a `ragged.Tile`; without records it may be anything.
    """
    rank, head = piece_of(item, tiles, heads, group)
    tile = rank
    record = rank.to(gl.int64)
    words = (rank, rank)
    if MASK != "band":
        lists_b, lists_h, width, mask_group = masks
        batch = head // H
        first = batch.to(gl.int64) * lists_b + ((head - batch * H) // mask_group).to(gl.int64) * lists_h
        tile = gl.load(lists + first + rank.to(gl.int64) * width)
        record = first + tile.to(gl.int64) * width
        at = lists + record
        if MASK == "ragged":
            words = load_tile(at)
        else:
            words = (gl.load(at + 1), gl.load(at + 2))
    elif REVERSED:
        tile = tiles - 1 - rank
    return tile, head, record, words


@gluon.jit
def bias_of_head(bias, places, batch, h):
    """Return where the bias of one batch and query head begins; `places` holds its strides and heads per bias head."""
    bias_b, bias_h, _, bias_group = places
    return bias + batch.to(gl.int64) * bias_b + (h // bias_group).to(gl.int64) * bias_h


@gluon.jit
def load_parts(descs, place, head, row, full, buffers, i, WIDTH: gl.constexpr):
    """Load rows `row ...` of a head at a place (`ragged.py`) into the `i`-th buffer of each part."""
    tma_load(descs[0], head_corner_of(descs[0], place, row, head, 0), full, buffers[0].index(i))
    if len(descs) > 1:
        tma_load(descs[1], head_corner_of(descs[1], place, row, head, WIDTH), full, buffers[1].index(i))


@gluon.jit
def prefetch_bias(bias, bias_q, j, q_first, seqlen_q, seqlen_k, BM: gl.constexpr, BN: gl.constexpr):
    """Ask L2 for the 16-bit bias of a block's queries and of key tile `j`, which the consumers will read a step or two later."""
    LINE: gl.constexpr = 64  # elements of 16 bits
    LINES: gl.constexpr = BN // LINE
    KEYS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, layout=KEYS)
    column = gl.minimum(j * BN + lane % LINES * LINE, seqlen_k - 1)
    for first in gl.static_range(0, BM, 32 // LINES):
        row = gl.minimum(q_first + first + lane // LINES, seqlen_q - 1)
        at = (bias + (row.to(gl.int64) * bias_q + column)).to(gl.int64, bitcast=True)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], gl.int32, is_pure=False, pack=1
        )  # fmt: skip


@gluon.jit
def load_keys(
    k_descs, pair_descs, keys, words, k_full, k_empty, step, j, place, kv_head, corners, q_first,
    biases, key_bias, bias_q, ranges, of_keys, tile_first, seqlen_q, seqlen_k,
    NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """Load key tile `j`, with what the mask says of the block's queries and its bias, as step `step` of this block.

    `pair_descs` are the maps of mask words and of a bias in tiles, and `corners` the batch and head of each.
    `ranges` takes, for each key, which of the block's queries from `tile_first` on see it: the last one less 2^16 times the
    first, to which `hide` adds queries times 2^16 - 1.
    """
    ROWS: gl.constexpr = 64
    TILE: gl.constexpr = 128
    BLOCK: gl.constexpr = NC * ROWS
    BYTES: gl.constexpr = BN * (D + D2) * 2
    b = step % STAGES
    bits_desc, bias_desc = pair_descs
    bits_b, bits_h, bias_b, bias_h = corners
    KEYS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    key = j * BN + gl.arange(0, BN, layout=KEYS)
    if BIAS == "key":  # on its way while the stage becomes free
        added = gl.load(key_bias + key, mask=key < seqlen_k, other=0.0)
    if (
        BIAS == "full" and D + D2 <= 128 and key_bias.dtype.element_ty.primitive_bitwidth == 16
    ):  # else registers are short
        prefetch_bias(key_bias, bias_q, j, q_first, seqlen_q, seqlen_k, BLOCK, BN)
    if MASK == "intervals":
        start, end = of_keys
        begin = gl.load(start + key, mask=key < seqlen_k, other=0)
        stop = gl.load(end + key, mask=key < seqlen_k, other=0)
    mbarrier.wait(k_empty.index(b), ((step // STAGES) & 1) ^ 1)
    OF_BITS: gl.constexpr = NC * bits_desc.block_type.nbytes if MASK == "bits" else 0
    OF_BIAS: gl.constexpr = NC * bias_desc.block_type.nbytes if BIAS == "tiles" else 0
    mbarrier.expect(k_full.index(b), BYTES + OF_BITS + OF_BIAS)
    for c in gl.static_range(NC):
        if MASK == "bits":
            corner = [bits_b, bits_h, q_first + c * ROWS, j * BN // TILE * (TILE // 32)]
            tma_load(bits_desc, corner, k_full.index(b), words.index(b * NC + c))
        if BIAS == "tiles":
            corner = [bias_b, bias_h, q_first + c * ROWS, j * BN]
            tma_load(bias_desc, corner, k_full.index(b), biases.index(b * NC + c))
    load_parts(k_descs, place, kv_head, j * BN, k_full.index(b), keys, b, D)
    if BIAS == "key":
        biases.index(b).store(added)
    if MASK == "intervals":
        # at least 0 before anything is taken away: limits may be any int32
        begin = gl.minimum(gl.maximum(begin, tile_first) - tile_first, BLOCK)
        stop = gl.minimum(gl.maximum(stop, tile_first) - tile_first, BLOCK)
        ranges.index(b).store(stop - 1 - begin * 65536)
    if BIAS == "key" or MASK == "intervals":
        mbarrier.arrive(k_full.index(b), count=1)


@gluon.jit
def load_values(
    v_descs, values, v_full, k_empty, step, j, place, kv_head,
    BN: gl.constexpr, DV: gl.constexpr, DV2: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the values of key tile `j` as step `step` of this block."""
    b = step % STAGES
    if step >= STAGES:
        release = step + 1 - STAGES
        mbarrier.wait(k_empty.index(release % STAGES), (release // STAGES) & 1)
    mbarrier.expect(v_full.index(b), BN * (DV + DV2) * 2)
    load_parts(v_descs, place, kv_head, j * BN, v_full.index(b), values, b, DV)


@gluon.jit
def produce(
    q_descs, k_descs, v_descs, pair_descs, lists, starts, ends, counter, bias, work, broadcast, number_places, bias_places,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr,
    DV2: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, NC: gl.constexpr,
    MASK: gl.constexpr, BIAS: gl.constexpr, HAS_LO: gl.constexpr, HAS_HI: gl.constexpr,
):  # fmt: skip
    """Take pieces of work, tell the consumers, load q, k, v, bits and the bias of keys.

    Release `e` of the consumers (`k_empty`) means: done with k of step e and with v of step e - 1.
    """
    ROWS: gl.constexpr = 64
    TILE: gl.constexpr = 128
    smem, bars, sizes, band, masks = work
    queries, keys, values, words, biases, ranges, piece = smem
    q_full, q_empty, k_full, k_empty, v_full = bars
    seqlen_q, seqlen_k, H, kv_group, heads, tiles, group, items = sizes
    lo, hi = band
    bits_b, bits_h, mask_group = broadcast
    LISTS: gl.constexpr = MASK != "band" and MASK != "ragged"
    WORDS: gl.constexpr = 8 if MASK == "ragged" else 4
    PER_TILE: gl.constexpr = TILE // BN
    AHEAD: gl.constexpr = 4  # steps; their loads take longer than it takes to draw and to look up a piece
    CAUSAL: gl.constexpr = MASK == "band" and HAS_HI and not HAS_LO
    PIECE: gl.constexpr = gl.BlockedLayout([WORDS], [32], [1], [0])
    slots = gl.arange(0, WORDS, layout=PIECE)
    if MASK == "ragged":
        tiles = count_tiles(lists)
        items = tiles * heads
    blocks = gl.num_programs(0)
    item = gl.program_id(0)
    turn = 0
    step = 0
    first_item = item
    if MASK == "ragged":  # there may be more blocks than pieces
        first_item = gl.minimum(item, items - 1)
    tile, head, record, words_of = take(first_item, lists, masks, tiles, heads, group, H, MASK, HAS_HI)
    while item < items:
        slot = turn % Q_STAGES
        batch = head // H
        h = head - batch * H
        kv_head = h // kv_group
        q_first = tile * BM
        query_rows = batch
        key_rows = batch
        if MASK == "ragged":
            q_first = words_of.first
            query_rows = words_of.own
            key_rows = words_of.other
            seqlen_q = words_of.own.length
            seqlen_k = words_of.other.length
            lo = band[0] + words_of.diagonal
            hi = band[1] + words_of.diagonal
        begin, end, full_begin, full_end = band_tiles(q_first, seqlen_q, seqlen_k, lo, hi, BM, BN, HAS_LO, HAS_HI)
        n = end - begin
        if LISTS:
            n = (words_of[0] + words_of[1]) * PER_TILE
        mbarrier.wait(q_empty.index(slot), ((turn // Q_STAGES) & 1) ^ 1)
        if MASK == "ragged":
            parts = gl.where(slots == 0, head, gl.where(slots == 1, q_first, words_of.diagonal))
            parts = gl.where(slots == 2, query_rows.begin, gl.where(slots == 3, seqlen_q, parts))
            parts = gl.where(slots == 4, key_rows.begin, gl.where(slots == 5, seqlen_k, parts))
        else:
            n_partial, n_full = words_of
            parts = gl.where(slots == 0, head, gl.where(slots == 1, tile, gl.where(slots == 2, n_partial, n_full)))
        piece.index(slot).store(parts)
        meet()  # triton 3.6 lets threads meet before an arrival, but not before one that announces bytes
        mbarrier.expect(q_full.index(slot), BM * (D + D2) * 2)
        for c in gl.static_range(NC):
            load_parts(q_descs, query_rows, h, q_first + c * ROWS, q_full.index(slot), queries, slot * NC + c, D)
        bias_b, bias_h, _, bias_group = bias_places
        # heads of a bias of one head are one group
        corners = (batch * bits_b, h // mask_group * bits_h, gl.where(bias_b > 0, batch, 0), h // bias_group)
        key_bias = bias
        if BIAS != "none":
            key_bias = bias_of_head(bias, bias_places, batch, h)
            if MASK == "ragged":
                key_bias += key_rows.begin
        of_keys = (starts, ends)
        if MASK == "intervals":
            numbers_b, numbers_h, numbers_group = number_places
            of_head = batch.to(gl.int64) * numbers_b + (h // numbers_group).to(gl.int64) * numbers_h
            of_keys = (starts + of_head, ends + of_head)
        j = 0
        j_next = 0
        if n > 0:
            if LISTS:
                j = list_tile(lists, record, 0, n, PER_TILE)
                j_next = list_tile(lists, record, 1, n, PER_TILE)
            else:
                j = band_tile(0, begin, end, full_begin, full_end)
            load_keys(
                k_descs, pair_descs, keys, words, k_full, k_empty, step, j, key_rows, kv_head, corners, q_first,
                biases, key_bias, bias_places[2], ranges, of_keys, q_first, seqlen_q, seqlen_k, NC, BN, D, D2, STAGES, MASK, BIAS,
            )  # fmt: skip
        # Pieces of a causal mask differ in length, and the next one is taken near the end of this one, by whom is free first:
        # taken earlier, a long piece may wait behind another one (H200, D 64, B1 H16 S2048: 0.049 ms, and 0.032 so; D 128,
        # B4 H16 S4096: 0.400 and 0.384). Else it is taken at once, while the first tiles of this one are on their way.
        drawn_at = gl.maximum(n - AHEAD, 0) if CAUSAL else 0
        for i in range(drawn_at):
            following_j = j_next
            if LISTS:
                j_next = list_tile(lists, record, i + 2, n, PER_TILE)
            else:
                following_j = band_tile(i + 1, begin, end, full_begin, full_end)
            load_keys(
                k_descs, pair_descs, keys, words, k_full, k_empty, step + 1, following_j, key_rows, kv_head, corners, q_first,
                biases, key_bias, bias_places[2], ranges, of_keys, q_first, seqlen_q, seqlen_k, NC, BN, D, D2, STAGES, MASK, BIAS,
            )  # fmt: skip
            load_values(v_descs, values, v_full, k_empty, step, j, key_rows, kv_head, BN, DV, DV2, STAGES)
            j = following_j
            step += 1
        following = items
        if items > blocks:
            following = gl.atomic_add(counter, 1, sem="relaxed") + blocks
        tile_2, head_2, record_2, words_2 = take(
            gl.minimum(following, items - 1), lists, masks, tiles, heads, group, H, MASK, HAS_HI
        )
        for i in range(drawn_at, n):
            j_value = j
            if i + 1 < n:
                if LISTS:
                    j = j_next
                    j_next = list_tile(lists, record, i + 2, n, PER_TILE)
                else:
                    j = band_tile(i + 1, begin, end, full_begin, full_end)
                load_keys(
                    k_descs, pair_descs, keys, words, k_full, k_empty, step + 1, j, key_rows, kv_head, corners, q_first,
                    biases, key_bias, bias_places[2], ranges, of_keys, q_first, seqlen_q, seqlen_k,
                    NC, BN, D, D2, STAGES, MASK, BIAS,
                )  # fmt: skip
            load_values(v_descs, values, v_full, k_empty, step, j_value, key_rows, kv_head, BN, DV, DV2, STAGES)
            step += 1
        turn += 1
        item = following
        tile = tile_2
        head = head_2
        record = record_2
        words_of = words_2
    slot = turn % Q_STAGES
    mbarrier.wait(q_empty.index(slot), ((turn // Q_STAGES) & 1) ^ 1)
    piece.index(slot).store(gl.full([WORDS], -1, gl.int32, layout=PIECE))
    mbarrier.arrive(q_full.index(slot), count=1)
    if items > blocks:
        # the last block to finish resets the counters to 0
        done = gl.atomic_add(counter + 1, 1, sem="relaxed")
        if done == blocks - 1:
            gl.store(counter, 0)
            gl.store(counter + 1, 0)

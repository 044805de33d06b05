"""What the SM 9.0 forward works on and in which order: pieces of work, the key tiles of each, and the warp that loads them."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.constants import HEADER, ROWS, TILE
from dmattn_ops.kernels.hopper.forward.types import Tiles, Walk
from dmattn_ops.kernels.hopper.gluon_compat import mbarrier, thread_barrier, tma_load
from dmattn_ops.kernels.hopper.kinds import BAND, BITS, INTERVALS, RAGGED, SEGMENTS, has_lists
from dmattn_ops.kernels.hopper.lists import bounded, last_tile, named_tile
from dmattn_ops.kernels.hopper.ragged import count_tiles, head_corner_of, load_tile
from dmattn_ops.kernels.hopper.scores import FULL_BIAS, KEY_BIAS, NO_BIAS, TILED_BIAS
from dmattn_ops.kernels.hopper.views import block_of


class Record(NamedTuple):
    """What the record of a list of tiles begins with."""

    partial: Any  # how many tiles are partly visible
    full: Any  # and how many wholly
    first: Any  # under segments the words that name the key tiles of the first two steps, if there are so many
    second: Any


class Work(NamedTuple):
    """A piece of work."""

    tile: Any  # of queries; of packed sequences the number of a record
    head: Any  # batch * heads + head
    record: Any  # where its list begins, or its record of packed sequences
    words: Any  # what that holds: `Record`, or `ragged.Tile`; without one anything


class Source(NamedTuple):
    """What the keys of a piece of work are loaded from."""

    rows: Any  # the place of its keys (`ragged.py`)
    kv_head: Any
    q_first: Any
    seqlen_q: Any
    seqlen_k: Any
    band_lo: Any
    band_hi: Any
    bits_batch: Any  # where the map of mask words has the batch and the head
    bits_head: Any
    bias_batch: Any  # and the map of a bias
    bias_head: Any
    bias: Any  # where the bias of the head begins
    bias_query: Any  # stride
    start: Any  # intervals of the keys of the head
    end: Any


@gluon.constexpr_function
def words_of_piece(traits):
    """Return how many words the producer tells the consumers of a piece of work."""
    return 8 if traits.MASK in (RAGGED.value, SEGMENTS.value) else 4


@gluon.jit
def band_tiles(q_first, seqlen_q, seqlen_k, lo, hi, M: gl.constexpr, T: gl.constexpr):
    """Return the key tiles that any of `M` queries sees inside the band, and those that all of them see whole."""
    q_last = gl.minimum(q_first + M, seqlen_q) - 1
    begin = 0
    full_begin = 0
    end = seqlen_k
    full_end = seqlen_k
    if T.HAS_LO:
        begin = gl.minimum(gl.maximum(q_first + lo, 0), seqlen_k) // T.BN
        full_begin = (gl.maximum(q_last + lo, 0) + T.BN - 1) // T.BN
    if T.HAS_HI:
        end = gl.maximum(gl.minimum(end, q_last + hi + 1), 0)
        full_end = gl.maximum(gl.minimum(full_end, q_first + hi + 1), 0)
    end = gl.maximum((end + T.BN - 1) // T.BN, begin)
    full_begin = gl.minimum(full_begin, end)
    full_end = gl.maximum(gl.minimum(full_end // T.BN, end), full_begin)
    return Tiles(begin, end, full_begin, full_end)


@gluon.jit
def band_tile(i, tiles):
    """Return the `i`-th key tile of a walk: partial ones from the right, then on the left, full ones from the right."""
    right = tiles.end - tiles.full_end
    partial = right + tiles.full_begin - tiles.begin
    inner = gl.where(i < partial, tiles.begin + i - right, tiles.full_end - 1 - i + partial)
    return gl.where(i < right, tiles.end - 1 - i, inner)


@gluon.jit
def key_word(i, walk, T: gl.constexpr):
    """Return the word of the list that names the `i`-th key tile of a walk, or the tile itself, of BN keys, where there is no list.

    Past the end of a list its last word, never used. Whoever loads a word ahead asks for its tile (`tile_of`) when that is needed:
    then nothing waits for the load before.
    """
    if has_lists(T.MASK):
        return gl.load(walk.lists + walk.record + HEADER + gl.minimum(i, walk.n - 1) // (TILE // T.BN))
    else:
        return band_tile(i, walk.tiles)


@gluon.jit
def tile_of(word, i, walk, T: gl.constexpr):
    """Return the `i`-th key tile (of BN keys) of a walk, which a word names."""
    PER_TILE: gl.constexpr = TILE // T.BN
    if has_lists(T.MASK):
        return named_tile(word, walk.last) * PER_TILE + i % PER_TILE
    else:
        return word


@gluon.jit
def key_tile(i, walk, T: gl.constexpr):
    """Return the `i`-th key tile (of BN keys) of a walk."""
    return tile_of(key_word(i, walk, T), i, walk, T)


@gluon.jit
def load_record(at, width, T: gl.constexpr):
    """Return the `Record` of `width` words at a pointer, as it is there: nothing waits for one of its words here.

    Walks of segments are often short, so that each load that waits for another one counts. Other kinds are short of registers.
    """
    partial, full = gl.load(at + 1), gl.load(at + 2)
    if T.MASK == SEGMENTS:
        first = gl.load(at + gl.minimum(HEADER, width - 1))
        second = gl.load(at + gl.minimum(HEADER + 1 // (TILE // T.BN), width - 1))
        return Record(partial, full, first, second)
    else:
        return Record(partial, full, partial, full)


@gluon.jit
def take(item, tiles, sizes, lists, T: gl.constexpr):
    """Return a piece of work, longest first; `tiles` of queries has each head."""
    rank, head = block_of(item, tiles, sizes.heads, sizes.group)
    tile = rank
    record = rank.to(gl.int64)
    words = Record(rank, rank, rank, rank)
    if T.MASK != BAND:
        batch = head // sizes.H
        first = batch.to(gl.int64) * lists.batch + ((head - batch * sizes.H) // lists.group).to(gl.int64) * lists.head
        tile = gl.load(lists.start + first + rank.to(gl.int64) * lists.width)
        if T.MASK != RAGGED:
            tile = named_tile(tile, tiles - 1)
        record = first + tile.to(gl.int64) * lists.width
        at = lists.start + record
        if T.MASK == RAGGED:
            words = load_tile(at)
        else:
            words = load_record(at, lists.width, T)
    elif T.HAS_HI:
        tile = tiles - 1 - rank
    return Work(tile, head, record, words)


@gluon.jit
def bias_of_head(bias, batch, h):
    """Return where the bias of one batch and query head begins."""
    return bias.start + batch.to(gl.int64) * bias.batch + (h // bias.group).to(gl.int64) * bias.head


@gluon.jit
def numbers_of_head(keys, batch, h):
    """Return where the numbers of keys of one batch and query head begin, in elements."""
    return batch.to(gl.int64) * keys.batch + (h // keys.group).to(gl.int64) * keys.head


@gluon.jit
def load_parts(descs, place, head, row, full, buffers, i, WIDTH: gl.constexpr):
    """Load rows `row ...` of a head at a place (`ragged.py`) into the `i`-th buffer of each part."""
    tma_load(descs[0], head_corner_of(descs[0], place, row, head, 0), full, buffers[0].index(i))
    if len(descs) > 1:
        tma_load(descs[1], head_corner_of(descs[1], place, row, head, WIDTH), full, buffers[1].index(i))


@gluon.jit
def prefetch_bias(j, source, T: gl.constexpr):
    """Ask L2 for the 16-bit bias of a block's queries and of key tile `j`, which the consumers will read a step or two later."""
    LINE: gl.constexpr = 64  # elements of 16 bits
    LINES: gl.constexpr = T.BN // LINE
    BM: gl.constexpr = T.BM
    KEYS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, layout=KEYS)
    column = gl.minimum(j * T.BN + lane % LINES * LINE, source.seqlen_k - 1)
    for first in gl.static_range(0, BM, 32 // LINES):
        row = gl.minimum(source.q_first + first + lane // LINES, source.seqlen_q - 1)
        at = (source.bias + (row.to(gl.int64) * source.bias_query + column)).to(gl.int64, bitcast=True)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def load_keys(step, j, source, maps, smem, bars, T: gl.constexpr):
    """Load key tile `j`, with what the mask says of the block's queries and its bias, as step `step` of this block.

    `ranges` takes, for each key, which of the block's 128 queries see it inside the band: 127 and the first, and in a byte above
    128 less the number behind the last. `show_ranges` takes a query from the one and adds it to the other.
    """
    NC: gl.constexpr = T.BM // ROWS
    BYTES: gl.constexpr = T.BN * (T.D + T.D2) * 2
    KEYS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    b = step % T.STAGES
    key = j * T.BN + gl.arange(0, T.BN, layout=KEYS)
    if T.BIAS == KEY_BIAS:  # on its way while the stage becomes free
        added = gl.load(source.bias + key, mask=key < source.seqlen_k, other=0.0)
    if T.BIAS == FULL_BIAS and T.D + T.D2 <= 128:  # else registers are short
        if source.bias.dtype.element_ty.primitive_bitwidth == 16:
            prefetch_bias(j, source, T)
    if T.MASK == INTERVALS:
        begin = gl.load(source.start + key, mask=key < source.seqlen_k, other=0)
        stop = gl.load(source.end + key, mask=key < source.seqlen_k, other=0)
        if T.HAS_HI:
            begin = gl.maximum(begin, key - source.band_hi)
        if T.HAS_LO:
            stop = gl.minimum(stop, key - source.band_lo + 1)
    mbarrier.wait(bars.k_empty.index(b), ((step // T.STAGES) & 1) ^ 1)
    OF_BITS: gl.constexpr = NC * maps.bits.block_type.nbytes if T.MASK == BITS else 0
    OF_BIAS: gl.constexpr = NC * maps.bias.block_type.nbytes if T.BIAS == TILED_BIAS else 0
    mbarrier.expect(bars.k_full.index(b), BYTES + OF_BITS + OF_BIAS)
    for c in gl.static_range(NC):
        if T.MASK == BITS:
            at = [source.bits_batch, source.bits_head, source.q_first + c * ROWS, j * T.BN // TILE * (TILE // 32)]
            tma_load(maps.bits, at, bars.k_full.index(b), smem.words.index(b * NC + c))
        if T.BIAS == TILED_BIAS:
            at = [source.bias_batch, source.bias_head, source.q_first + c * ROWS, j * T.BN]
            tma_load(maps.bias, at, bars.k_full.index(b), smem.biases.index(b * NC + c))
    load_parts(maps.k, source.rows, source.kv_head, j * T.BN, bars.k_full.index(b), smem.k, b, T.D)
    if T.BIAS == KEY_BIAS:
        smem.biases.index(b).store(added)
    if T.MASK == INTERVALS:
        # at least 0 before anything is taken away: limits may be any int32
        begin = gl.minimum(gl.maximum(begin, source.q_first) - source.q_first, T.BM)
        stop = gl.minimum(gl.maximum(stop, source.q_first) - source.q_first, T.BM)
        smem.ranges.index(b).store((127 + begin + (128 - stop) * 256).to(gl.int16))
    if T.BIAS == KEY_BIAS or T.MASK == INTERVALS:
        mbarrier.arrive(bars.k_full.index(b), count=1)


@gluon.jit
def load_values(step, j, source, maps, smem, bars, T: gl.constexpr):
    """Load the values of key tile `j` as step `step` of this block."""
    b = step % T.STAGES
    if step >= T.STAGES:
        release = step + 1 - T.STAGES
        mbarrier.wait(bars.k_empty.index(release % T.STAGES), (release // T.STAGES) & 1)
    mbarrier.expect(bars.v_full.index(b), T.BN * (T.DV + T.DV2) * 2)
    load_parts(maps.v, source.rows, source.kv_head, j * T.BN, bars.v_full.index(b), smem.v, b, T.DV)


@gluon.jit
def load_step(i, step, j, word, walk, source, maps, smem, bars, MORE: gl.constexpr, T: gl.constexpr):
    """Load the keys behind tile `j`, the `i`-th of a walk, whose `word` is there, and the values of `j`; MORE: there are such keys.

    Return the tile of those keys, and the word behind theirs. Under segments, whose walks are often short, it is loaded last,
    since the compiler waits for it at once: the copies of this step are under way then, and the next ones need a stage first.
    """
    following = j
    if MORE or i + 1 < walk.n:
        if has_lists(T.MASK):
            following = tile_of(word, i + 1, walk, T)
            if T.MASK != SEGMENTS:
                word = key_word(i + 2, walk, T)
        else:
            following = key_tile(i + 1, walk, T)
        load_keys(step + 1, following, source, maps, smem, bars, T)
    load_values(step, j, source, maps, smem, bars, T)
    if T.MASK == SEGMENTS:
        if i + 2 < walk.n:
            word = key_word(i + 2, walk, T)
    return following, word


@gluon.jit
def produce(operands, smem, bars, T: gl.constexpr):
    """Take pieces of work, tell the consumers, load q, k, v, bits and the bias of keys.

    Release `e` of the consumers (`k_empty`) means: done with k of step e and with v of step e - 1.
    """
    NC: gl.constexpr = T.BM // ROWS
    LISTS: gl.constexpr = has_lists(T.MASK)
    WORDS: gl.constexpr = words_of_piece(T)
    PER_TILE: gl.constexpr = TILE // T.BN
    AHEAD: gl.constexpr = 4  # steps; their loads take longer than it takes to draw and to look up a piece
    CAUSAL: gl.constexpr = T.MASK == BAND and T.HAS_HI and not T.HAS_LO
    PIECE: gl.constexpr = gl.BlockedLayout([WORDS], [32], [1], [0])
    maps = operands.maps
    sizes = operands.sizes
    mask = operands.mask
    bias = operands.bias
    seqlen_q = sizes.seqlen_q
    seqlen_k = sizes.seqlen_k
    lo = operands.band.lo
    hi = operands.band.hi
    tiles = sizes.tiles
    items = sizes.items
    slots = gl.arange(0, WORDS, layout=PIECE)
    if T.MASK == RAGGED:
        tiles = count_tiles(mask.lists.start)
        items = tiles * sizes.heads
    blocks = gl.num_programs(0)
    item = gl.program_id(0)
    turn = 0
    step = 0
    first_item = item
    if T.MASK == RAGGED:  # there may be more blocks than pieces
        first_item = gl.minimum(item, items - 1)
    work = take(first_item, tiles, sizes, mask.lists, T)
    while item < items:
        slot = turn % T.Q_STAGES
        batch = work.head // sizes.H
        h = work.head - batch * sizes.H
        kv_head = h // sizes.kv_group
        q_first = work.tile * T.BM
        query_rows = batch
        key_rows = batch
        if T.MASK == RAGGED:
            q_first = work.words.first
            query_rows = work.words.own
            key_rows = work.words.other
            seqlen_q = work.words.own.length
            seqlen_k = work.words.other.length
            lo = operands.band.lo + work.words.diagonal
            hi = operands.band.hi + work.words.diagonal
        seen = band_tiles(q_first, seqlen_q, seqlen_k, lo, hi, T.BM, T)
        n = seen.end - seen.begin
        if T.MASK != RAGGED:
            n_partial, n_full = work.words.partial, work.words.full
        if LISTS:
            n_partial, n_full = bounded(n_partial, n_full, mask.lists.width)
            if T.BIAS == FULL_BIAS:  # which full tiles load without a test
                n_full = gl.where(seqlen_k >= TILE, n_full, 0)
            n = (n_partial + n_full) * PER_TILE
        walk = Walk(seen, mask.lists.start, work.record, n, last_tile(seqlen_k) if LISTS else 0)
        j = 0
        word = 0
        if T.MASK == SEGMENTS:
            j = tile_of(work.words.first, 0, walk, T)
            word = work.words.second
        mbarrier.wait(bars.q_empty.index(slot), ((turn // T.Q_STAGES) & 1) ^ 1)
        if T.MASK == RAGGED:
            parts = gl.where(slots == 0, work.head, gl.where(slots == 1, q_first, work.words.diagonal))
            parts = gl.where(slots == 2, query_rows.begin, gl.where(slots == 3, seqlen_q, parts))
            parts = gl.where(slots == 4, key_rows.begin, gl.where(slots == 5, seqlen_k, parts))
        else:
            counts = gl.where(slots == 2, n_partial, n_full)
            parts = gl.where(slots == 0, work.head, gl.where(slots == 1, work.tile, counts))
            if T.MASK == SEGMENTS:
                parts = gl.where(slots == 4, j, parts)
        smem.pieces.index(slot).store(parts)
        thread_barrier()  # triton 3.6 adds one before an arrival, but not before one that announces bytes
        mbarrier.expect(bars.q_full.index(slot), T.BM * (T.D + T.D2) * 2)
        for c in gl.static_range(NC):
            row = q_first + c * ROWS
            load_parts(maps.q, query_rows, h, row, bars.q_full.index(slot), smem.q, slot * NC + c, T.D)
        bits_batch = batch * mask.bits_batch
        bits_head = h // mask.lists.group * mask.bits_head
        bias_batch = gl.where(bias.batch > 0, batch, 0)
        bias_head = h // bias.group  # heads of a bias of one head are one group
        key_bias = bias.start
        if T.BIAS != NO_BIAS:
            key_bias = bias_of_head(bias, batch, h)
            if T.MASK == RAGGED:
                key_bias += key_rows.begin
        start = mask.keys.start
        end = mask.keys.end
        if T.MASK == INTERVALS:
            numbers = numbers_of_head(mask.keys, batch, h)
            start += numbers
            end += numbers
        source = Source(
            rows=key_rows,
            kv_head=kv_head,
            q_first=q_first,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            band_lo=lo,
            band_hi=hi,
            bits_batch=bits_batch,
            bits_head=bits_head,
            bias_batch=bias_batch,
            bias_head=bias_head,
            bias=key_bias,
            bias_query=bias.query,
            start=start,
            end=end,
        )
        if n > 0:
            if T.MASK != SEGMENTS:
                j = key_tile(0, walk, T)
                if LISTS:
                    word = key_word(1, walk, T)
            load_keys(step, j, source, maps, smem, bars, T)
        # Pieces of a causal mask differ in length, and the next one is taken near the end of this one, by whom is free first:
        # taken earlier, a long piece may wait behind another one (H200, D 64, B1 H16 S2048: 0.049 ms, and 0.032 so; D 128,
        # B4 H16 S4096: 0.400 and 0.384). Else it is taken at once, while the first tiles of this one are on their way.
        drawn_at = gl.maximum(n - AHEAD, 0) if CAUSAL else 0
        for i in range(drawn_at):
            j, word = load_step(i, step, j, word, walk, source, maps, smem, bars, True, T)
            step += 1
        following = items
        if items > blocks:
            following = gl.atomic_add(operands.counter, 1, sem="relaxed") + blocks
        next_work = take(gl.minimum(following, items - 1), tiles, sizes, mask.lists, T)
        for i in range(drawn_at, n):
            j, word = load_step(i, step, j, word, walk, source, maps, smem, bars, False, T)
            step += 1
        turn += 1
        item = following
        work = next_work
    slot = turn % T.Q_STAGES
    mbarrier.wait(bars.q_empty.index(slot), ((turn // T.Q_STAGES) & 1) ^ 1)
    smem.pieces.index(slot).store(gl.full([WORDS], -1, gl.int32, layout=PIECE))
    mbarrier.arrive(bars.q_full.index(slot), count=1)
    if items > blocks:
        # the last block to finish resets the counters to 0
        done = gl.atomic_add(operands.counter + 1, 1, sem="relaxed")
        if done == blocks - 1:
            gl.store(operands.counter, 0)
            gl.store(operands.counter + 1, 0)

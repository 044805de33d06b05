"""What the functions of the SM 9.0 backward pass to each other: traits, shared memory, barriers, work, and the call itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon

from dmattn_ops.kernels.constants import Constants
from dmattn_ops.kernels.hopper.scores import KEY_BIAS


@dataclass(frozen=True, eq=False, repr=False)
class Traits(Constants):
    """What the kernel is compiled for."""

    BM: int  # queries of a step
    BN: int  # keys of a block
    D: int  # columns of query and key in their first part, and (else 0) in their second one (`columns.py`)
    D2: int
    DV: int  # of value and grad_out
    DV2: int
    MASK: str  # one of `kinds.py`
    BIAS: int  # one of `scores.py`
    SOFTCAP: bool
    HAS_LO: bool  # whether the band has a lower limit
    HAS_Q_SEG: bool  # whether queries have segments
    HIDDEN: bool  # whether intervals of keys have a part that does not see them
    NATURAL: bool  # whether exact exponents are in natural units
    GROUPED: bool  # whether several query heads read a key head
    TWO_PHASE: bool  # the order of a step (`steps.step`)
    ORDERED: bool  # whether additions to dq have a fixed order (`order.py`)
    INTERLEAVED: bool  # whether the query heads of a group take turns at each query tile
    DROPOUT: bool
    EDGES: bool  # whether the band may hide keys from every query, or every key from a query (`hopper/unseen.py`)
    WATCH: bool  # whether a NaN in a result is noted (`hopper/unseen.py`)
    ALONE: bool  # whether each key head decides by its own rows whether it takes pairs, or all of them by all rows of the call


@gluon.constexpr_function
def key_buffers(T):
    """Return how many buffers of K shared memory has room for."""
    narrow = T.D == 64 if T.D2 == 0 else T.D + T.D2 + T.DV + T.DV2 <= 208
    return 2 if narrow and T.BIAS != KEY_BIAS.value else 1


@gluon.constexpr_function
def rows_of_flag(columns):
    """Return of how many rows a flag says whether they need pairs, where dq has that many `columns`: two pieces of dq."""
    return 128 if columns == 64 else 64


@gluon.constexpr_function
def downwards(T):
    """Return whether the query tiles of a block are walked from the last one to the first."""
    return T.ORDERED or T.INTERLEAVED


class Shared(NamedTuple):
    """Shared memory as it is multiplied; all but the last four in parts (`columns.py`)."""

    q: Any  # [2, BM, D]
    do: Any  # grad_out, [2, BM, DV]
    k: Any  # [key_buffers, BN, D]
    v: Any  # [4, 64, DV]: two buffers, each in halves
    stats: Any  # [4, 1, BM]: lse and delta of each stage
    ds: Any  # [2, BN, BM]
    dq: Any  # the pieces of the consumers, [2, 16, 256]
    ones: Any  # [1, 8, BM], where the bias is one per key


class Signals(NamedTuple):
    """The barriers of the consumers."""

    q_full: Any  # [2]: a stage of queries
    made: Any  # [consumer, stage]: dS, and dq of the step before; in a block's last step dk and dv
    read: Any  # [consumer, stage]: query and grad_out
    dq_empty: Any  # [consumer]
    k_full: Any  # [2]
    k_empty: Any  # [2]
    v_full: Any  # [2]


class Loads(NamedTuple):
    """What the producer needs: tensor maps, the buffers as TMA fills them, and their barriers."""

    k_map: Any  # maps and buffers of rows are in parts
    v_map: Any
    k: Any
    v: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    sent: Any  # dk and dv of a block
    q_map: Any
    do_map: Any
    stat_map: Any
    q: Any
    do: Any
    stats: Any
    q_full: Any
    read: Any


class Stores(NamedTuple):
    """What a reducer needs: where dq, dk and dv lie in shared memory, their tensor maps, and barriers."""

    pieces_map: Any  # of the workspace that dq is added to
    dq: Any
    made: Any
    dq_empty: Any
    counters: Any  # of additions to each piece of dq
    q: Any
    ds: Any
    v: Any
    sent: Any
    dk_map: Any
    dv_map: Any


class Pieces(NamedTuple):
    """Shared memory, barriers and counters with which a reducer adds a block's pieces of dq to the workspace."""

    map: Any
    dq: Any  # its consumer's
    made: Any
    dq_empty: Any  # its consumer's
    counters: Any
    tile: Any  # of keys
    band_lo: Any


class Own(NamedTuple):
    """Shared memory and barriers, and the parts of them that one consumer uses for a block."""

    smem: Any  # Shared
    signals: Any
    dq: Any  # its piece
    k_buffer: Any
    v_half: Any
    dq_empty: Any


class Mask(NamedTuple):
    """The tensors of a mask and their strides: `_b` of batches, `_kv` of key heads, `_step` of the query heads of a group."""

    lists: Any  # of key tiles; RAGGED: their records (`kernels/ragged.py`)
    bits: Any  # the 64-bit words of `col_bits`
    q_segments: Any
    k_segments: Any
    start: Any  # the intervals have the strides of `k_segments`
    end: Any
    hidden_from: Any
    hidden_to: Any
    list_b: Any
    list_kv: Any
    list_width: Any
    bits_b: Any
    bits_kv: Any
    bits_row: Any
    q_segments_b: Any
    k_segments_b: Any
    k_segments_kv: Any
    list_step: Any
    bits_step: Any
    k_segments_step: Any


class Problem(NamedTuple):
    """The mask, sizes, scales and bias of a call, which all partitions are given."""

    mask: Any  # Mask
    kv_heads: Any
    group: Any  # query heads of a key head
    scales: Any
    seqlen_q: Any
    seqlen_k: Any
    band_lo: Any
    band_hi: Any
    shares: Any  # how many blocks divide the query tiles of a key tile, or None
    bias: Any
    bias_b: Any  # its stride of batches
    dropout: Any
    exact: Any
    rows: Any  # Sq padded to 128, sequence by sequence


class Output(NamedTuple):
    """The sums of dq in the workspace, and what writes dq from them: shared memory, tensor maps, a scale (`finish.py`)."""

    accumulator: Any
    dq: Any  # pieces of shared memory that it passes through
    dq_map: Any  # in parts
    scale: Any
    heads: Any
    rows: Any  # of a head in the workspace
    query_tiles: Any  # the records of packed sequences, or None
    counts: Any  # what `unseen.note_nan` writes is among them


class Flags(NamedTuple):
    """Which rows of a call need the pairs of their statistics."""

    start: Any  # a byte for each `rows_of_flag` rows
    raised: Any  # whether one of them is not 0


class Order(NamedTuple):
    """How blocks are numbered (`work.block_of`), and how many tiles of dq are drawn at once."""

    n_blocks: Any  # of a key head
    n_heads: Any  # key heads of all batches
    heads_per_group: Any
    first_ranks: Any
    ranks_in_row: Any
    tiles_at_once: Any


class Work(NamedTuple):
    """Shared memory and barriers through which the producer announces the next place to the other partitions."""

    places: Any  # shared memory [2, 4]
    full: Any
    empty: Any


class Place(NamedTuple):
    """A block, or a tile of dq (then of its query head)."""

    tile: Any  # -1: there are no more
    batch: Any  # times `shares`, plus the share, where a key tile has several blocks
    head: Any


class Draw(NamedTuple):
    """Tiles of dq that a program draws at once; heads are counted over all batches."""

    kv_head: Any
    head: Any
    tile: Any  # the first
    end: Any


class Span(NamedTuple):
    """The query tiles that see a key tile, `first` to before `end`, and those that see it all; of lists see `span_of`."""

    first: Any
    full_first: Any
    full_end: Any
    end: Any


class Block(NamedTuple):
    """Where a block's keys and the queries that may see them lie: in the whole call, or in one of packed sequences."""

    tile: Any  # of keys
    queries: Any  # the place of rows (`ragged.py`)
    keys: Any
    seqlen_q: Any
    seqlen_k: Any
    band_lo: Any
    band_hi: Any
    padded: Any  # rows of the workspaces before the first query
    first_key: Any  # in tensors that have a number for each key of all sequences


class Walk(NamedTuple):
    """A block, its query tiles, and what a consumer needs in all steps through them."""

    block: Any
    span: Any
    width: Any  # query heads at each query tile
    rows: Any
    scales: Any
    exact: Any
    bias: Any  # of the block's batch
    dropout: Any


class KeyNumbers(NamedTuple):
    """Pointers to the numbers that a mask gives to the queries and keys of one head."""

    bits: Any
    bits_row: Any
    q_segments: Any
    k_segments: Any
    start: Any
    end: Any
    hidden_from: Any
    hidden_to: Any


class Select(NamedTuple):
    """The test of a query tile: which columns each key, a row, is seen by. Each kind of mask reads its own fields."""

    low: Any  # columns of the band or of an interval, both ends included
    high: Any
    words: Any  # 64 columns in each of two words
    more_words: Any
    drop_low: Any  # columns inside an interval that do not see the key
    drop_high: Any
    q_segments: Any
    k_segments: Any


class Step(NamedTuple):
    """One query tile, and what a consumer of 64 keys needs to add it to dk and dv."""

    row: Any  # of the statistics
    head: Any
    query: Any  # the first
    key: Any
    queries: Any  # [1, BM]
    keys: Any  # [64, 1]
    bias: Any  # what `step_bias` returned
    dropout: Any  # of the head
    select: Any
    at_edge: Any  # whether some of its queries see no key

"""What the SM 9.0 forward is compiled for, and what its functions are given, as records with names.

The launcher passes pointers, strides and sizes to the kernel one by one, by the names of its parameters, since Triton 3.6 would
specialize the numbers of a tuple; the kernel puts them together. Only `Traits` is one argument, known when it is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from dmattn_ops.kernels.constants import Constants


@dataclass(frozen=True, eq=False, repr=False)
class Traits(Constants):
    """What a kernel is compiled for."""

    BM: int  # queries of a piece of work, 64 for each consumer
    BN: int  # keys of a step
    PER_SM: int  # blocks of a multiprocessor, which share its registers: 1, or 2 of two consumers
    D: int  # columns of queries and keys
    D2: int  # of their second part (`columns.py`), or 0
    DV: int  # columns of values
    DV2: int
    STAGES: int  # tiles of keys, and of values, in shared memory
    Q_STAGES: int  # tiles of queries there
    MASK: str  # `kinds.py`
    BIAS: int  # `scores.py`
    HAS_LO: bool  # the band has a limit on the left
    HAS_HI: bool  # and on the right
    SOFTCAP: bool
    HIDDEN: bool  # intervals hide some queries again
    WHOLE_KEYS: bool  # segments of keys alone, which hide them from all queries alike
    NATURAL: bool  # scores are in natural units, not in log2 units
    DROPOUT: bool
    ROW_MAX: bool  # the largest score of each row is written
    EDGES: bool  # the band may hide keys from every query (`unseen.py`)
    WATCH: bool  # a NaN in a result is noted (`unseen.py`)


class Sizes(NamedTuple):
    """The sizes of a call, and of its work."""

    seqlen_q: Any
    seqlen_k: Any
    H: Any  # query heads of a batch entry
    kv_group: Any  # query heads that read a key head
    heads: Any  # query heads of the batch
    tiles: Any  # of queries of a head
    group: Any  # heads whose tiles alternate
    items: Any  # pieces of work


class Band(NamedTuple):
    """The limits of the band: query i sees keys from i + lo to i + hi."""

    lo: Any
    hi: Any


class Lists(NamedTuple):
    """Lists of key tiles, or the records of the tiles of packed sequences."""

    start: Any
    batch: Any  # strides
    head: Any
    width: Any  # words of a list
    group: Any  # query heads that share one


class KeyNumbers(NamedTuple):
    """What a mask says of each key, `[B, heads, Sk]`; None where the kind of mask has none of it."""

    segments: Any
    start: Any
    end: Any
    hidden_from: Any
    hidden_to: Any
    batch: Any  # strides
    head: Any
    group: Any  # query heads that share a row


class Mask(NamedTuple):
    """A mask; what its kind does not have is None, or anything where it is a stride."""

    lists: Lists
    q_segments: Any  # [B, Sq]
    q_segments_batch: Any  # stride
    keys: KeyNumbers
    bits_batch: Any  # 1 where words have a batch, else 0
    bits_head: Any


class Bias(NamedTuple):
    """A bias, one per key or per query and key."""

    start: Any
    batch: Any  # strides
    head: Any
    query: Any
    group: Any  # query heads that read one of its heads


class Statistics(NamedTuple):
    """Where the statistics of rows go, `[B, H, Sq]`."""

    lse: Any
    lse_tail: Any
    row_max: Any  # None where nobody asks for it
    batch: Any  # strides
    head: Any


class Scales(NamedTuple):
    """What products are multiplied by; with a soft cap `scale` is the cap, and its tanh is of products times `cap_inner`."""

    scale: Any
    cap_inner: Any


class Maps(NamedTuple):
    """Tensor maps: of rows one for each part of their columns (`columns.py`)."""

    q: Any
    k: Any
    v: Any
    out: Any
    bits: Any
    bias: Any


class Operands(NamedTuple):
    """All that the kernel reads and writes."""

    maps: Maps
    statistics: Statistics
    sink: Any  # [H] or None
    sizes: Sizes
    band: Band
    mask: Mask
    bias: Bias
    dropout: Any  # `dropout.Dropout`
    scales: Scales
    counter: Any  # of pieces that are taken, behind it of blocks that have ended, and what `unseen.note_nan` writes
    counts_b: Any  # words from the counts of one batch entry to those of the next, or None: the call has them


class Shared(NamedTuple):
    """Shared memory; what a kind of mask or bias does not need is 0."""

    q: Any  # of each part `[Q_STAGES * consumers, .., 64, D]`
    k: Any  # `[STAGES, .., BN, D]`
    v: Any
    words: Any  # bits of the mask, `[STAGES * consumers, .., 64, 4]`
    biases: Any  # of keys `[STAGES, BN]`, or tiles `[STAGES * consumers, .., 64, BN]`
    ranges: Any  # the queries of the block that see each key, `[STAGES, BN]`
    pieces: Any  # what the producer tells the consumers of a piece of work, `[Q_STAGES, words]`


class Barriers(NamedTuple):
    """Barriers of the stages: when they are filled, and when they are free again."""

    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any


class Tiles(NamedTuple):
    """The key tiles, `begin` to before `end`, that a band shows to some of a block's queries, and those it shows them whole."""

    begin: Any
    end: Any
    full_begin: Any
    full_end: Any


class Walk(NamedTuple):
    """The key tiles of a piece of work in their order: those of a band, or of a list."""

    tiles: Tiles
    lists: Any
    record: Any  # where the list begins
    n: Any  # how many there are
    last: Any  # the last tile (of 128 keys) that a list may name


class Visible(NamedTuple):
    """Which keys of a walk the 64 queries of a consumer see: what their tests read."""

    walk: Walk
    n_partial: Any  # the first tiles of a list, which are partly visible
    q_first: Any
    q_lo: Any  # the first key inside the band, of each query
    q_hi: Any  # and the last
    q_segment: Any  # the segment of each query, or under intervals its number inside the block
    block_first: Any  # the first query of the block
    segments: Any  # of the keys of the head
    hidden_from: Any  # of the keys of the head
    hidden_to: Any
    seqlen_k: Any
    bias: Any  # where the rows of a full bias begin
    dropout: Any  # of the head
    some_unseen: Any  # with EDGES: whether values are cleared of keys that no query sees
    seen: Any  # and which keys are seen (`unseen.Seen`)


class Sums(NamedTuple):
    """What a walk carries from tile to tile, beside P of the last one (`softmax.py`)."""

    acc: Any  # parts of out, yet to be divided by the sums
    total: Any
    top: Any
    peak: Any  # the largest scores that each lane has seen of its rows, where they are asked for


class Place(NamedTuple):
    """The 64 queries of a consumer."""

    batch: Any
    h: Any
    rows: Any  # the place of the block's queries (`ragged.py`)
    first: Any
    seqlen_q: Any
    buffer: Any  # the number of the buffer that holds them

"""The decision whether keys are packed, into how many slots, and for how many heads at a time: from sizes alone.

A mask that keeps at most `at_most` keys of each query, scattered over the sequence, has no empty 128 x 128 tile. But if
queries are cut into epochs, the keys that one epoch sees fit into little more than `at_most` slots. Copied there side
by side (`kernels/epochs`), they cost attention what is kept instead of what is there.
"""

from __future__ import annotations

from typing import NamedTuple

from dmattn_ops.call import TILE, UNBOUNDED, Call, is_pairwise

LEAST_EPOCH = 512  # shorter ones cost more to look for keys than they save: that work grows with the number of epochs
WORKSPACE = 4 << 30  # bytes that the copies of one pass may take
# The same for one batch entry of a call that is batch-invariant: how many heads a pass has may not depend on the others, since
# kernels are chosen by it.
INVARIANT_WORKSPACE = 256 << 20

# What the estimate of `pays` is made of, in the time that one head needs for a 128 x 128 tile, forward and backward, in a
# launch that fills an H200 (41 ns: 1.375 and 4.05 us of one of 132 SMs, D 128, bfloat16).
# The time of visible pairs over that of as many in a dense causal call is `_PACKED + _ENDS / tiles`, for `tiles` of 128 kept
# keys, and at most `_MOST`: lists end in tiles that are seldom filled, and those are tested. Measured 1.3 to 1.5 with 1024
# keys kept, 1.2 to 1.3 with 2048.
_PACKED = 1.05
_ENDS = 3.6
_MOST = 1.5
_TILE_ENDS = 1.0  # blocks that an epoch ends with are seldom filled
_VISIBLE_BIRTHS = 0.2  # keys that are visible at all: few where the sequence is much longer than what is kept
_COPIES = 3.0  # copying a block of slots twice and summing its gradients once: 400 KB at 3.5 TB/s
_LAUNCHES = 400.0  # 16 us: a dozen launches
_PLANNED = 60.0  # 2.5 us: what the program that plans the last epoch does with 1024 keys, forward and backward
_LEAST_PLANNED = 1100.0  # 45 us: two plans of short sequences, forward and backward
_MARGIN = 1.15  # the estimate has to win by this much
# Keys as they lie: tiles are found in lists and tested, and the lists are made first (66 us, since made of one side 20 to 40).
# Measured, in CUDA graphs: 1.09 to 1.12 times dense attention with 16384 keys kept. With a bias per key a tested tile costs more
# (H200, 2026-11-26, 22 sizes of 1024 to 16384 positions): 1.17 to 1.31 times dense attention without one.
_LISTED = 1.09
_LISTED_WITH_BIAS = 1.25
_LISTS = 1600.0
# Epochs of at least so many queries are not made twice as long: that would save fewer copies than it adds tiles. Nor are those of
# half as many where only two would be left (H200, 2026-11-26, B2 H16 S8192 D64 with 2048 kept: 1.38 ms, twice as long 1.48).
_LONG_EPOCH = 4096


class Epochs(NamedTuple):
    """How queries are cut, and how many slots each epoch has: for keys older than the epoch, and for those born in it."""

    length: int  # queries; a multiple of 128
    number: int
    old_slots: int
    born_slots: int

    @property
    def slots_per_epoch(self) -> int:
        """Return the slots of one epoch."""
        return self.old_slots + self.born_slots

    @property
    def slots(self) -> int:
        """Return the slots of one head: the packed number of keys."""
        return self.number * self.slots_per_epoch


def refusals(at_most: int | None, from_position: bool, hidden: bool, pairwise: bool, varlen: bool) -> list[str]:
    """Return why keys cannot be packed; empty where they can.

    `from_position`: every key that is seen at all is seen from its position on the diagonal on, or from the first query
    if that is later (a causal dynamic mask), or the mask is the same for all queries. Otherwise nothing bounds how many
    keys become visible in one epoch. `hidden`: intervals have a second interval hidden inside. `pairwise`: a bias
    or dropout depends on the pair of query and key, whose position a slot does not have.
    """
    reasons = []
    if at_most is None:
        reasons.append("nothing says how many keys a query sees at most (at_most)")
    if not from_position:
        reasons.append("keys become visible at other queries than their own position")
    if hidden:
        reasons.append("intervals have hidden intervals inside")
    if pairwise:
        reasons.append("dropout or a bias with a query dimension depends on positions of keys")
    if varlen:
        reasons.append("sequences are packed (varlen)")
    return reasons


class Packing(NamedTuple):
    """How the keys of one call are packed."""

    epochs: Epochs
    heads: int  # packed heads: the key heads, or the query heads where the mask tells them apart
    group: int  # packed heads that copy one key head
    heads_per_pass: int
    evidence: str = ""  # why epochs have this length, where sizes alone do not say so


def reasons_against(call: Call) -> list[str]:
    """Return why the keys of a call with intervals cannot be packed; empty where they can."""
    mask = call.mask
    pairwise = is_pairwise(call.bias, call.options)
    return refusals(mask.at_most, mask.start is None, mask.hidden_from is not None, pairwise, call.varlen is not None)


def sizes_of(call: Call) -> Sizes:
    """Return the sizes by which `epoch_by_sizes` decides whether the keys of a call are packed; `reasons_against` must be empty."""
    mask, options, demand = call.mask, call.options, call.demand
    assert mask.end is not None and mask.at_most is not None
    key_heads, mask_heads = call.key.shape[2], mask.end.shape[1]
    heads = key_heads if mask_heads in (1, key_heads) else demand.heads
    at_most, band_hi = min(mask.at_most, demand.seqlen_k), min(options.band_hi, demand.seqlen_k)
    lengths = demand.seqlen_q, demand.seqlen_k
    return Sizes(
        demand.batch, demand.heads, heads, *lengths, at_most, options.band_lo, band_hi, biased=call.bias is not None
    )


def epoch_by_sizes(sizes: Sizes) -> int:
    """Return the number of queries in an epoch, by the rule from sizes alone; 0 where packing is not expected to pay."""
    if not pays(sizes):
        return 0
    group = sizes.heads // sizes.packed_heads
    return epoch_length(sizes.seqlen_q, sizes.seqlen_k, sizes.at_most, sizes.band_hi, group)


def offered_epochs(sizes: Sizes) -> tuple[int, ...]:
    """Return the lengths of epochs that tuning may choose from, ascending: around that of the rule, and 0 for not packed."""
    group = sizes.heads // sizes.packed_heads
    length = epoch_length(sizes.seqlen_q, sizes.seqlen_k, sizes.at_most, sizes.band_hi, group)
    if sizes.band_hi >= sizes.seqlen_k:
        return 0, length
    whole = _round_up(max(1, sizes.seqlen_q))
    near = {min(whole, _round_up(length * part // 4)) for part in (2, 3, 4, 6, 8)}
    return (0, *sorted(near))


def packing_for(call: Call, length: int | None = None) -> Packing | None:
    """Return the packing of a call's keys in epochs of `length` queries; None where keys stay as they lie (`length` 0).

    Without a `length` it is that of the rule (`epoch_by_sizes`). Keys stay as they lie too where a head would get more slots
    than a sequence may have keys. The caller has checked all other conditions of packing.
    """
    sizes, demand = sizes_of(call), call.demand
    length = epoch_by_sizes(sizes) if length is None else length
    if length == 0:
        return None
    group = sizes.packed_heads // call.key.shape[2]
    cut = epochs(sizes.seqlen_q, sizes.seqlen_k, sizes.at_most, sizes.band_hi, length)
    if cut.slots >= UNBOUNDED:
        return None
    row_bytes = 2 * (demand.dim + demand.dim_v) * demand.itemsize  # copies of key and value, and their gradients
    limit = INVARIANT_WORKSPACE if call.options.batch_invariant else WORKSPACE
    passes = heads_per_pass(demand.batch, sizes.packed_heads, group, cut.slots, row_bytes, limit)
    return Packing(cut, sizes.packed_heads, group, passes)


def epoch_length(seqlen_q: int, seqlen_k: int, at_most: int, band_hi: int, group: int) -> int:
    """Return the number of queries in an epoch, a multiple of 128. `group` query heads share one packed head.

    About as many as keys are kept, since then as many keys are born in an epoch as it begins with: listed tiles are 1.14
    times the ideal (S 32k, 1024 kept; 1.19 with epochs twice as long). Longer epochs save copies, which weigh more where
    no group shares them, so that epochs are twice as long there, unless they are long anyway. Where no key is born
    behind the first query, one epoch is all.
    """
    whole = _round_up(max(seqlen_q, 1))
    if band_hi >= seqlen_k:
        return whole
    kept = _round_up(max(1, min(at_most, seqlen_k)))
    twice = group == 1 and kept < _LONG_EPOCH and (2 * kept < _LONG_EPOCH or whole > 4 * kept)
    return min(whole, max(LEAST_EPOCH, 2 * kept if twice else kept))


def epochs(seqlen_q: int, seqlen_k: int, at_most: int, band_hi: int, length: int) -> Epochs:
    """Cut queries into epochs of `length`, a multiple of 128, with room for what may be visible in each.

    The capacity is the same for all epochs, and at least a tile: no kernel takes a call without keys. A key is born at
    query `key - band_hi`; behind that limit none is.
    """
    if length <= 0 or length % TILE:
        raise ValueError(f"an epoch must be a positive multiple of {TILE} queries, got {length}")
    old_slots = _round_up(min(at_most, seqlen_k))
    born_slots = min(length, _round_up(max(0, seqlen_k - band_hi)))
    return Epochs(length, -(-seqlen_q // length), max(old_slots, TILE - born_slots), born_slots)


class Sizes(NamedTuple):
    """The sizes of a call that the estimate reads; `packed_heads` are the heads of the packed copies."""

    batch: int
    heads: int
    packed_heads: int
    seqlen_q: int
    seqlen_k: int
    at_most: int
    band_lo: int
    band_hi: int
    biased: bool = False  # with a bias, which costs more where tiles are tested


def pays(sizes: Sizes) -> bool:
    """Return whether forward and backward are expected to take less time with packed keys than without.

    Measured on an H200 (B1 D128 bfloat16, selection, forward and backward, against dense causal), H 32/8 and H 16/16:
    S 8192 with 1024 kept 2.5 and 1.9 times as fast, S 32768 with 1024 kept 10.3 and 8.0, with 2048 kept 6.1 and 5.1,
    S 131072 with 2048 kept 27.7 and 23.4. The estimate says 2.3 and 2.0, 9.1 and 8.2, 5.8 and 5.4, 22.9 and 21.4.
    Where little is gained, both ways were measured for 21 sizes (S 1024 to 32768, 2 to 32 heads, a sixteenth to half of the keys
    kept): packing was 1.08 to 3.7 times as fast in all, and 1.16 at least in the 19 for which this function says so.
    """
    return _MARGIN * packed_cost(sizes) < listed_cost(sizes)


def listed_cost(sizes: Sizes) -> float:
    """Estimate the time without packing, in tiles: scattered keys leave all in the lists that the band does not rule out."""
    return (_LISTED_WITH_BIAS if sizes.biased else _LISTED) * dense_cost(sizes) + _LISTS


def dense_cost(sizes: Sizes) -> float:
    """Estimate the time of dense attention, in tiles: all that the band does not rule out."""
    return sizes.batch * sizes.heads * _tiles(sizes, sizes.seqlen_k)


def packed_cost(sizes: Sizes) -> float:
    """Estimate the time with packing, in the same unit."""
    group = max(1, sizes.heads // max(1, sizes.packed_heads))
    kept = _round_up(max(1, min(sizes.at_most, sizes.seqlen_k)))
    length = epoch_length(sizes.seqlen_q, sizes.seqlen_k, sizes.at_most, sizes.band_hi, group)
    factor = min(_MOST, _PACKED + _ENDS * TILE / kept)
    attention = _tiles(sizes, sizes.at_most) * factor + -(-sizes.seqlen_q // TILE) * _TILE_ENDS
    births = max(_VISIBLE_BIRTHS, min(1.0, sizes.at_most / max(1, sizes.seqlen_k)))
    blocks = -(-sizes.seqlen_q // length) * (kept + length * births) / TILE
    planning = max(_LEAST_PLANNED, _PLANNED * (sizes.seqlen_k + 4 * kept + 2 * length) / 1024)
    return sizes.batch * (sizes.heads * attention + sizes.packed_heads * blocks * _COPIES) + planning + _LAUNCHES


def heads_per_pass(
    batch: int, packed_heads: int, group: int, slots: int, row_bytes: int, limit: int = WORKSPACE
) -> int:
    """Return for how many packed heads at a time there is room: a multiple of `group`, and at least one group.

    `row_bytes` are those of everything that one slot has: the copies of key and value, and their gradients. `group`
    packed heads copy one key head, whose gradient is their sum: they stay together.
    """
    fitting = limit // max(1, batch * slots * row_bytes)
    return min(packed_heads, max(group, fitting // group * group))


def _tiles(sizes: Sizes, at_most: int) -> float:
    """Return the tiles of 128 x 128 that hold as many pairs as the band lets a head have, at most `at_most` a query."""
    samples = min(64, sizes.seqlen_q)
    pairs = 0
    for sample in range(samples):
        query = (2 * sample + 1) * sizes.seqlen_q // (2 * samples)
        seen = min(sizes.seqlen_k, query + sizes.band_hi + 1) - max(0, query + sizes.band_lo)
        pairs += min(at_most, max(0, seen))
    return pairs * sizes.seqlen_q / (max(1, samples) * TILE * TILE)


def _round_up(size: int) -> int:
    """Round up to whole tiles."""
    return -(-size // TILE) * TILE

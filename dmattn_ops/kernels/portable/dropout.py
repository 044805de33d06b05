"""Which weights dropout keeps, in the portable kernels: what `reference.philox_keep` states, for a block of queries and keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.portable.places import head_offset


class Seeds(NamedTuple):
    """The seeds `[B|1, H|1]` of a call's dropout with their strides, and its numbers."""

    seed: Any
    seed_b: Any
    seed_h: Any
    last_dropped: Any  # the greatest random word that drops its weight, as an int32
    rescale: Any
    q_origin: Any
    k_origin: Any


class Dropout(NamedTuple):
    """The dropout of one head: queries and keys are counted from the origins."""

    seed: Any
    last_dropped: Any
    rescale: Any
    q_origin: Any
    k_origin: Any


class Words(NamedTuple):
    """The four words of a counter of Philox, or what it makes of them."""

    first: Any
    second: Any
    third: Any
    fourth: Any


@triton.jit
def dropout_of(seeds, place, head, features: tl.constexpr):
    """Return the dropout of a query head."""
    seed = 0
    if features.dropout:
        seed = tl.load(seeds.seed + head_offset(place.sequence, head, seeds.seed_b, seeds.seed_h))
    return Dropout(seed, seeds.last_dropped, seeds.rescale, seeds.q_origin, seeds.k_origin)


@triton.jit
def philox(word0, word1, word2, word3):
    """Return the four words of Philox4x32-7 (Salmon et al. 2011) of a counter of uint32 words, under the key 0.

    A product of 64 bits is one instruction; with a known key, so are the two exclusive ors of each word.
    """
    for i in tl.static_range(7):
        first = word0.to(tl.uint64) * 0xD2511F53
        second = word2.to(tl.uint64) * 0xCD9E8D57
        word0 = (second >> 32).to(tl.uint32) ^ word1 ^ (i * 0x9E3779B9 & 0xFFFFFFFF)
        word1 = second.to(tl.uint32)
        word2 = (first >> 32).to(tl.uint32) ^ word3 ^ (i * 0xBB67AE85 & 0xFFFFFFFF)
        word3 = first.to(tl.uint32)
    return Words(word0, word1, word2, word3)


@triton.jit
def without_bit_3(first, BLOCKS: tl.constexpr):
    """Return `[BLOCKS, 8]`: of each block of 16 positions from `first` on, the eight without bit 3."""
    return (first + 16 * tl.arange(0, BLOCKS)[:, None] + tl.arange(0, 8)[None, :]).to(tl.uint32)


@triton.jit
def dropout_keep(dropout, query_first, key_first, shape: tl.constexpr, features: tl.constexpr):
    """Return the elements `[queries, keys]` of a step that dropout keeps.

    Four elements, eight rows and columns apart, share an evaluation of Philox. Where the origins are no multiples of 16
    (not `whole_groups`), a block begins inside such a group, and every element has an evaluation of its own.
    """
    QUERIES: tl.constexpr = shape.block_m
    KEYS: tl.constexpr = shape.block_n
    first_query = dropout.q_origin + query_first
    first_key = dropout.k_origin + key_first
    low = dropout.seed.to(tl.uint32)
    high = (dropout.seed >> 32).to(tl.uint32)
    limit = dropout.last_dropped.to(tl.uint32)
    if features.whole_groups:
        zeros = tl.zeros((QUERIES // 16, 8, KEYS // 16, 8), tl.uint32)
        queries = without_bit_3(first_query, QUERIES // 16)[:, :, None, None]
        keys = without_bit_3(first_key, KEYS // 16)[None, None, :, :]
        words = philox(zeros + queries, zeros + keys, zeros + low, zeros + high)
        upper = tl.join((words.first > limit).to(tl.int8), (words.second > limit).to(tl.int8))
        lower = tl.join((words.third > limit).to(tl.int8), (words.fourth > limit).to(tl.int8))
        both = tl.permute(tl.join(upper, lower), (0, 5, 1, 2, 4, 3))
        keep = tl.reshape(both, (QUERIES, KEYS)) != 0
    else:
        zeros = tl.zeros((QUERIES, KEYS), tl.uint32)
        queries = (first_query + tl.arange(0, QUERIES))[:, None]
        keys = (first_key + tl.arange(0, KEYS))[None, :]
        words = philox(
            zeros + (queries & ~8).to(tl.uint32), zeros + (keys & ~8).to(tl.uint32), zeros + low, zeros + high
        )
        upper = tl.where((keys & 8) == 0, words.first, words.second)
        lower = tl.where((keys & 8) == 0, words.third, words.fourth)
        keep = tl.where((queries & 8) == 0, upper, lower) > limit
    return keep

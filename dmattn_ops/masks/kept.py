"""What a cache knows of its keys: which of them a causal dynamic mask can still show (`dmattn_ops.generation`).

Letters: `B` batch, `Hkv` key heads, `N` slots of the cache, `n` new positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NEVER = 1 << 62  # a position that no sequence reaches
UNNAMED = -(1 << 63)  # the id of a document of which no id was given yet


class Known(NamedTuple):
    """What is known of keys `[B, Hkv, N or n]`. Positions are those of their sequence, int64; -1 in all four is no key.

    Query `i` sees a key iff `position <= i`, `i < ended`, and `i < outranked` or `i < protected`.
    """

    scores: Tensor  # float32 or float64
    position: Tensor
    outranked: Tensor  # the first query for which the key is not among the best
    protected: Tensor  # the first query that does not see the key as one of the last or the first keys
    ended: Tensor  # where the next document begins

    def seen_until(self) -> Tensor:
        """Return the first query that no longer sees each key."""
        return torch.minimum(torch.maximum(self.outranked, self.protected), self.ended)

    def needed(self, length: Tensor, rollback: int) -> Tensor:
        """Return which keys a query at `length` (`[B]`), or up to `rollback` positions before it, may see.

        What happened at a position that is taken back has not happened. `rollback` is at least 1 here, so that a step may
        store its key before it attends.
        """
        oldest = (length - rollback).view(-1, 1, 1)
        best, shown = self.outranked >= oldest, self.protected > oldest
        return (self.position >= 0) & (self.ended >= oldest) & (best | shown)


class Stored(NamedTuple):
    """The tensors of a cache. Steps and chunks change them in place."""

    key: Tensor  # [B, Hkv, N, D]
    value: Tensor  # [B, Hkv, N, Dv]
    scores: Tensor  # [B, Hkv, N], float32 or float64
    places: Tensor  # int64 [B, Hkv, 4, N]: what `Known` holds beside the scores
    length: Tensor  # int64 [B]: how many positions there are
    floor: Tensor  # int64 [B]: the shortest length that can be gone back to
    first: Tensor  # int64 [B]: where the first key of the document stands
    arrived: Tensor  # int32 [B], zeros: how many programs of a step have read the numbers of a sequence
    bias: Tensor | None  # [B, Hkv|H, N]
    document: Tensor | None  # int64 [B]: its id
    trail: Tensor | None  # int64 [B, rollback + 1, 2]: `first` and `document` of the last lengths, modulo their number


class Token(NamedTuple):
    """New positions of each sequence; `n` is 1 in a step."""

    key: Tensor  # [B, n, Hkv, D]
    value: Tensor  # [B, n, Hkv, Dv]
    scores: Tensor  # [B|1, Hkv|1, n]
    bias: Tensor | None  # [B|1, H|Hkv|1, 1, n]
    padding: Tensor | None  # bool or integer [B|1, n]: 0 is no key
    documents: Tensor | None  # integer [B|1, n]


class Appended(NamedTuple):
    """What the queries of a chunk attend to: the keys of all slots, as they were before, and the new ones behind them."""

    ends: Tensor  # int32 [B, Hkv, N + n]: the first query of the chunk that no longer sees each key
    keys: Tensor  # [B, N + n, Hkv, D]
    values: Tensor  # [B, N + n, Hkv, Dv]
    biases: Tensor | None  # [B, Hkv|H, N + n]


class Rule(NamedTuple):
    """Which keys a query sees, how many positions may be taken back, and whether padding takes a position."""

    keep: int
    keep_first: int
    keep_last: int
    rollback: int
    padding_counts: bool

    @property
    def stored_back(self) -> int:
        """How many of the last positions are stored in any case: a step stores its key before it attends."""
        return max(1, self.rollback)

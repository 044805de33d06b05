"""Which keys of a cache a causal dynamic mask can still show, and which leave it, with plain torch operations.

A key that has left the `keep` best of its prefix never returns, because later keys only add competitors. So the best keys of a
prefix, together with those that follow, decide about all queries that follow. Nothing is read on the host, and sizes depend on
shapes alone. Letters: `B` batch, `Hkv` key heads, `N` slots of the cache, `n` new positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NEVER = 1 << 62  # a position that no sequence reaches


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


def outranked(cached: Known, new: Known, length: Tensor, changes: Tensor | None, keep: int) -> tuple[Tensor, Tensor]:
    """Return `outranked` of the cached keys `[B, Hkv, N]`, and of those at positions from `length` (`[B]`) on, `[B, Hkv, n]`.

    `changes` `[B, n]` are True where a document begins; `ended` of both says so already.
    """
    if new.position.shape[-1] == 1:
        return _by_one_key(cached, new, keep)
    return _by_many_keys(cached, new, length, changes, keep)


def _by_one_key(cached: Known, new: Known, keep: int) -> tuple[Tensor, Tensor]:
    """Let one key `[B, Hkv, 1]` compete with the best: the worst of them leaves."""
    from dmattn_ops.kernels.selection import order

    if keep == 0:
        return cached.outranked, new.position
    best = (cached.outranked == NEVER) & (cached.ended == NEVER)
    place, own = order.places(cached.scores), order.places(new.scores)  # a smaller place is a better score
    worst = torch.where(best, place, torch.iinfo(place.dtype).min).amax(-1, keepdim=True)
    last = torch.where(best & (place == worst), cached.position, -1)  # of equal ones the later key is worse
    full = best.sum(-1, keepdim=True) >= keep
    better = (new.position >= 0) & (own < worst)
    leaves = full & better & (last >= 0) & (last == last.amax(-1, keepdim=True))
    stays = (new.position >= 0) & (~full | better)
    return torch.where(leaves, new.position, cached.outranked), torch.where(stays, NEVER, new.position)


def _by_many_keys(
    cached: Known, new: Known, length: Tensor, changes: Tensor | None, keep: int
) -> tuple[Tensor, Tensor]:
    """Let keys `[B, Hkv, n]` compete with the best and with each other.

    The best keys of the document that goes on, in the order of their positions, and the new ones are a short sequence, in
    which a key leaves the best where it does in the whole. What is no key, or of an earlier document, stands before it, as a
    document of its own.
    """
    slots = cached.position.shape[-1]
    best = (cached.outranked == NEVER) & (cached.ended >= length.view(-1, 1, 1))
    position, order = torch.cat([torch.where(best, cached.position, -1), new.position], -1).sort(dim=-1, stable=True)
    document = torch.where(position < 0, -1, 0)
    if changes is not None:
        number = torch.nn.functional.pad(changes.cumsum(-1), (slots, 0)).unsqueeze(1).expand_as(order)
        document = torch.where(position < 0, -1, number.gather(-1, order))
    scores = torch.cat([cached.scores, new.scores], -1).gather(-1, order)
    rows = scores.flatten(0, 1).unsqueeze(1), document.flatten(0, 1)
    _, stop = torch.ops.dmattn.key_lifetimes(*rows, keep, 0, 0, True)
    # The column in which a key leaves; behind the last one, or where a document begins, it has stayed.
    left = torch.nn.functional.pad(position, (0, 1), value=NEVER).gather(-1, stop.view_as(order).long())
    left = torch.empty_like(left).scatter_(-1, order, left)
    of_cached, of_new = left.split([slots, new.position.shape[-1]], -1)
    of_cached = torch.where(best, torch.where(of_cached >= cached.ended, NEVER, of_cached), cached.outranked)
    of_new = torch.where(of_new >= new.ended, NEVER, of_new)
    return of_cached, torch.where(new.position < 0, -1, of_new)

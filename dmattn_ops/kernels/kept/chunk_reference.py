"""A chunk of positions for a cache of kept keys with plain torch operations (definition: `dmattn_ops.kernels.kept`).

A key that has left the `keep` best of its prefix never returns, because later keys only add competitors. So the best keys of a
prefix, together with those that follow, decide about all queries that follow. Nothing is read on the host, and sizes depend on
shapes alone. Letters: `B` batch, `Hkv` key heads, `N` slots of the cache, `n` new positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dmattn_ops.masks.kept import NEVER, UNNAMED, Appended, Known, Rule, Stored, Token


def keep_chunk(stored: Stored, token: Token, rule: Rule, appended: Appended) -> None:
    """Append positions to each sequence, and write until where each key is seen, and keys, values and biases side by side."""
    scores, bias = _as_stored(stored, token)
    chunk = _positions(stored, token, rule)
    known, first = _compete(stored, scores, chunk, rule)
    appended.ends.copy_(chunk.place_of(known.seen_until()))
    slots = stored.scores.shape[-1]
    for rows, own, new in ((appended.keys, stored.key, token.key), (appended.values, stored.value, token.value)):
        # Two copies, since `torch.cat` is slow with such strides: 56 us for 21 MB (H200, 2026-11-26).
        rows[:, :slots].copy_(own.transpose(1, 2))
        rows[:, slots:].copy_(new)
    if stored.bias is not None and appended.biases is not None and bias is not None:
        torch.cat([stored.bias, bias], -1, out=appended.biases)
    _store(stored, known, appended, chunk, first, rule)


class _Chunk(NamedTuple):
    """The positions of one call."""

    begin: Tensor  # int64 [B]: the length before
    position: Tensor  # int64 [B, n]: of what is none, that of the next one
    length: Tensor  # int64 [B], afterwards
    is_key: Tensor | None  # bool [B, n]; None is all
    counted: Tensor | None  # bool [B, n]: which are positions; None is all
    documents: Tensor | None  # int64 [B, n]
    changes: Tensor | None  # bool [B, n]: where a document begins

    def place_of(self, position: Tensor) -> Tensor:
        """Return the places in the call of positions `[B, heads, any]`: 0 where they come before it, `n` behind it."""
        count, ahead = self.position.shape[1], position - self.begin.view(-1, 1, 1)
        if self.counted is None:
            return ahead.clamp(0, count)
        numbers = (ahead.clamp(-1, count) + 1).flatten(1)
        return torch.searchsorted(self.counted.cumsum(-1), numbers).view_as(position)

    def leave_trail(self, trail: Tensor, states: Tensor) -> None:
        """Note for each of the last lengths where its document began and its id: `states` `[B, n, 2]` are those of the self."""
        count = trail.shape[1]
        number = torch.arange(count, device=trail.device)
        length = self.length[:, None] - (self.length[:, None] - number) % count
        index = self.place_of((length - 1)[:, None]).squeeze(1).clamp(max=states.shape[1] - 1)
        made = states.gather(1, index.unsqueeze(-1).expand(-1, -1, 2))
        trail.copy_(torch.where((length > self.begin[:, None]).unsqueeze(-1), made, trail))


def _as_stored(stored: Stored, token: Token) -> tuple[Tensor, Tensor | None]:
    """Return scores `[B, Hkv, n]` and biases `[B, Hkv|H, n]` as they are stored."""
    batch, heads = stored.scores.shape[:2]
    count = token.key.shape[1]
    scores = token.scores.to(stored.scores.dtype).expand(batch, heads, count)
    if stored.bias is None:
        return scores, None
    if token.bias is None:
        return scores, stored.bias.new_zeros(*stored.bias.shape[:2], count)
    return scores, token.bias.squeeze(2).expand(batch, stored.bias.shape[1], -1)


def _positions(stored: Stored, token: Token, rule: Rule) -> _Chunk:
    """Return where the new positions stand, and in which documents."""
    begin, count = stored.length.clone(), token.key.shape[1]
    places = torch.arange(count, device=begin.device)
    is_key = None if token.padding is None else (token.padding != 0).expand(begin.shape[0], -1)
    counted = None if rule.padding_counts else is_key
    if counted is None:
        position, length = begin[:, None] + places, begin + count
    else:
        total = counted.cumsum(-1)
        position, length = begin[:, None] + total - counted.long(), begin + total[:, -1]
    if stored.document is None:
        return _Chunk(begin, position, length, is_key, counted, None, None)
    last = stored.document[:, None]
    if token.documents is None:
        return _Chunk(begin, position, length, is_key, counted, last.expand(-1, count).clone(), None)
    documents = token.documents.long().expand(begin.shape[0], -1)
    if is_key is not None:  # padding belongs to the document before it
        place = torch.where(is_key, places, -1).cummax(-1).values
        documents = torch.where(place < 0, last, documents.gather(-1, place.clamp(min=0)))
    before = torch.cat([last, documents[:, :-1]], -1)
    changes = (documents != before) & (before != UNNAMED)
    return _Chunk(begin, position, length, is_key, counted, documents, changes)


def _compete(stored: Stored, scores: Tensor, chunk: _Chunk, rule: Rule) -> tuple[Known, Tensor]:
    """Return what is known of stored and new keys after these positions, and where the document of each begins, `[B, n]`."""
    position, is_key, changes = chunk.position, chunk.is_key, chunk.changes
    last = never = torch.full_like(position, NEVER)
    begin = chunk.begin if is_key is None else torch.where(is_key, position, NEVER).amin(-1)
    first = torch.minimum(stored.first, begin)[:, None].expand_as(position)
    places = stored.places
    if changes is not None:
        begun = torch.where(changes, position, -1).cummax(-1).values
        first = torch.where(begun < 0, first, begun)
        coming = torch.where(changes, position, NEVER).flip(-1).cummin(-1).values.flip(-1)
        *others, ended = places.unbind(2)
        places = torch.stack([*others, torch.where(ended == NEVER, coming[:, None, :1], ended)], 2)
        last = torch.cat([coming[:, 1:], last[:, :1]], -1)
    protected = position + rule.keep_last
    if rule.keep_first:
        protected = torch.where(first + rule.keep_first > position, NEVER, protected)
    new = torch.stack([position, never, protected, last], 1)
    if is_key is not None:
        new = torch.where(is_key[:, None], new, -1)
    places = torch.cat([places, new[:, None].expand(-1, places.shape[1], -1, -1)], -1)
    known = Known(torch.cat([stored.scores, scores], -1), *places.unbind(2))
    left = _outranked(known, stored.scores.shape[-1], chunk, rule.keep)
    return known._replace(outranked=left), first


def _outranked(known: Known, slots: int, chunk: _Chunk, keep: int) -> Tensor:
    """Return `outranked` of keys `[B, Hkv, N + n]`: those of the slots, and behind them the new ones.

    New keys are among the best until they are outranked here. `known.ended` tells already where documents end.

    The keys compete with the best and with each other. The best keys of the document that goes on, in the order of their
    positions, and the new ones are a short sequence, in which a key leaves the best where it does in the whole. What is no key,
    or of an earlier document, stands before it, as a document of its own.
    """
    changes = chunk.changes
    best = (known.outranked == NEVER) & (known.ended >= chunk.begin.view(-1, 1, 1))
    position = torch.where(best, known.position, -1)
    if chunk.is_key is not None:
        position, order = position.sort(dim=-1, stable=True)
    else:  # the new ones are in order, and stand behind: sorting few is much faster
        stored, new = position.split([slots, position.shape[-1] - slots], -1)
        stored, order = stored.sort(dim=-1, stable=True)
        behind = torch.arange(slots, position.shape[-1], device=order.device)
        position, order = torch.cat([stored, new], -1), torch.cat([order, behind.expand_as(new)], -1)
    document = position.clamp(-1, 0)
    if changes is not None:
        number = torch.nn.functional.pad(changes.cumsum(-1), (slots, 0)).unsqueeze(1).expand_as(order)
        document = torch.where(position < 0, -1, number.gather(-1, order))
    rows = known.scores.gather(-1, order).flatten(0, 1).unsqueeze(1), document.flatten(0, 1)
    _, stop = torch.ops.dmattn.key_lifetimes(*rows, keep, 0, 0, True)
    # The column in which a key leaves; behind the last one, or where a document begins, it has stayed.
    left = torch.nn.functional.pad(position, (0, 1), value=NEVER).gather(-1, stop.view_as(order).long())
    left = torch.empty_like(left).scatter_(-1, order, left)
    if changes is not None:  # else nothing of the best ends
        left = torch.where(left >= known.ended, NEVER, left)
    return torch.where(best, left, known.outranked)


def _store(stored: Stored, known: Known, appended: Appended, chunk: _Chunk, first: Tensor, rule: Rule) -> None:
    """Put the new keys that are needed into slots whose keys no longer are; all tensors hold those of the slots before them."""
    index = _refilled(known.needed(chunk.length, rule.stored_back), stored.scores.shape[-1])
    for own, rows in ((stored.key, appended.keys), (stored.value, appended.values)):
        own.copy_(rows.transpose(1, 2).gather(2, index.unsqueeze(-1).expand_as(own)))
    stored.scores.copy_(known.scores.gather(2, index))
    stored.places.copy_(torch.stack(known[1:], 2).gather(3, index.unsqueeze(2).expand_as(stored.places)))
    if stored.bias is not None and appended.biases is not None:
        groups = stored.bias.shape[1] // max(1, index.shape[1])
        stored.bias.copy_(appended.biases.gather(2, index.repeat_interleave(groups, 1)))
    if stored.document is not None and stored.trail is not None and chunk.documents is not None:
        stored.document.copy_(chunk.documents[:, -1])
        chunk.leave_trail(stored.trail, torch.stack([first, chunk.documents], -1))
    stored.first.copy_(first[:, -1])
    stored.length.copy_(chunk.length)
    stored.floor.copy_(torch.maximum(stored.floor, chunk.length - rule.rollback))


def _refilled(needed: Tensor, slots: int) -> Tensor:
    """Return which key each slot holds afterwards, `[B, heads, N]`: an index into its keys and the new ones behind them.

    `needed` `[B, heads, N + n]` says which are needed. New keys that are go, in their order, into slots whose keys are not.
    """
    occupied, wanted = needed.split([slots, needed.shape[-1] - slots], -1)
    source = torch.searchsorted(wanted.cumsum(-1), (~occupied).cumsum(-1))  # the n-th wanted one, of the n-th free slot
    stays = occupied | (source == wanted.shape[-1])
    return torch.where(stays, torch.arange(slots, device=needed.device), source + slots)

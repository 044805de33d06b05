"""A step of a cache of kept keys with plain torch operations (definition: `dmattn_ops.kernels.kept`)."""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn_ops.kernels.selection import order
from dmattn_ops.masks.kept import NEVER, UNNAMED, Known, Rule, Stored, Token


def keep_step(stored: Stored, token: Token, rule: Rule, seen: Tensor) -> None:
    """Append one position to each sequence, and write which slots its query sees, int32 `[B, Hkv, N]`."""
    begin = stored.length.clone()
    is_key = torch.ones_like(begin, dtype=torch.bool)
    if token.padding is not None:
        is_key = (token.padding != 0).expand(begin.shape[0], 1)[:, 0]
    counted = torch.ones_like(is_key) if rule.padding_counts else is_key
    length = begin + counted.long()
    first = torch.where(is_key, torch.minimum(stored.first, begin), stored.first)
    known = Known(stored.scores, *stored.places.unbind(2))
    document = stored.document
    if document is not None and token.documents is not None:
        given = torch.where(is_key, token.documents.long().expand(begin.shape[0], 1)[:, 0], document)
        changes = (given != document) & (document != UNNAMED)
        first, document = torch.where(changes, begin, first), given
        ends = changes.view(-1, 1, 1) & (known.ended == NEVER)
        known = known._replace(ended=torch.where(ends, begin.view(-1, 1, 1), known.ended))

    new = _new_key(stored, token, rule, begin, first, is_key)
    known, new = _compete(known, new, rule.keep)
    slot = known.needed(length, rule.stored_back).int().argmin(-1, keepdim=True)  # the first that is not needed
    stored.places.copy_(torch.stack(known[1:], 2))
    _store(stored, token, new, slot, is_key)
    until = Known(stored.scores, *stored.places.unbind(2)).seen_until()
    seen.copy_((until > begin.view(-1, 1, 1)) & counted.view(-1, 1, 1))
    if document is not None and stored.document is not None and stored.trail is not None:
        stored.document.copy_(document)
        index = (length % stored.trail.shape[1]).view(-1, 1, 1).expand(-1, 1, 2)
        state = torch.stack([first, document], -1)[:, None]
        state = torch.where(counted.view(-1, 1, 1), state, stored.trail.gather(1, index))
        stored.trail.scatter_(1, index, state)
    stored.first.copy_(first)
    stored.length.copy_(length)
    stored.floor.copy_(torch.maximum(stored.floor, length - rule.rollback))


def _new_key(stored: Stored, token: Token, rule: Rule, begin: Tensor, first: Tensor, is_key: Tensor) -> Known:
    """Return the `Known` of the new keys `[B, Hkv, 1]`, before they compete with the cached ones."""
    shape = (*stored.scores.shape[:2], 1)
    protected = torch.where(first + rule.keep_first > begin, NEVER, begin + rule.keep_last)
    never = torch.full_like(begin, NEVER)
    parts = (torch.where(is_key, part, -1).view(-1, 1, 1).expand(shape) for part in (begin, never, protected, never))
    return Known(token.scores.to(stored.scores.dtype).expand(shape), *parts)


def _compete(cached: Known, new: Known, keep: int) -> tuple[Known, Known]:
    """Let one key `[B, Hkv, 1]` compete with the best: the worst of them leaves."""
    best = (cached.outranked == NEVER) & (cached.ended == NEVER)
    place, own = order.places(cached.scores), order.places(new.scores)  # a smaller place is a better score
    worst = torch.where(best, place, torch.iinfo(place.dtype).min).amax(-1, keepdim=True)
    last = torch.where(best & (place == worst), cached.position, -1)  # of equal ones the later key is worse
    full = best.sum(-1, keepdim=True) >= keep
    better = (new.position >= 0) & (own < worst)
    leaves = full & better & (last >= 0) & (last == last.amax(-1, keepdim=True))
    stays = (new.position >= 0) & (~full | better)
    outranked = torch.where(leaves, new.position, cached.outranked)
    return cached._replace(outranked=outranked), new._replace(outranked=torch.where(stays, NEVER, new.position))


def _store(stored: Stored, token: Token, new: Known, slot: Tensor, is_key: Tensor) -> None:
    """Write new keys into slots `[B, Hkv, 1]`, where they are keys."""
    write = is_key.view(-1, 1, 1)
    rows = [(stored.key, token.key), (stored.value, token.value)]
    for part, given in rows:
        index = slot.unsqueeze(-1).expand(-1, -1, -1, part.shape[-1])
        part.scatter_(2, index, torch.where(write.unsqueeze(-1), given.transpose(1, 2), part.gather(2, index)))
    stored.scores.scatter_(2, slot, torch.where(write, new.scores, stored.scores.gather(2, slot)))
    index = slot.unsqueeze(2).expand(-1, -1, 4, -1)
    known = torch.stack(new[1:], 2)
    stored.places.scatter_(3, index, torch.where(write.unsqueeze(2), known, stored.places.gather(3, index)))
    if stored.bias is not None:
        index = slot.repeat_interleave(stored.bias.shape[1] // slot.shape[1], 1)
        bias = torch.zeros_like(index, dtype=stored.bias.dtype)
        if token.bias is not None:
            bias = token.bias.squeeze(2).expand(index.shape)
        stored.bias.scatter_(2, index, torch.where(write, bias, stored.bias.gather(2, index)))

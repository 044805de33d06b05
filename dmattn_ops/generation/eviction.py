"""Which keys of a cache leave the best ones of a causal dynamic mask while a chunk of positions is appended.

A key that has left the `keep` best of its prefix never returns, because later keys only add competitors. So the best keys of a
prefix, together with those that follow, decide about all queries that follow. Nothing is read on the host, and sizes depend on
shapes alone. Letters: `B` batch, `Hkv` key heads, `N` slots of the cache, `n` new positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn_ops.masks.kept import NEVER, Known


def outranked(
    known: Known, slots: int, length: Tensor, changes: Tensor | None, keep: int, with_padding: bool
) -> Tensor:
    """Return `outranked` of keys `[B, Hkv, N + n]`: those of the slots, and the new ones at positions from `length` (`[B]`) on.

    New keys are among the best until they are outranked here. `changes` `[B, n]` are True where a document begins; `ended` says so
    already. Without padding, all new keys are keys.

    The keys compete with the best and with each other. The best keys of the document that goes on, in the order of their
    positions, and the new ones are a short sequence, in which a key leaves the best where it does in the whole. What is no key,
    or of an earlier document, stands before it, as a document of its own.
    """
    best = (known.outranked == NEVER) & (known.ended >= length.view(-1, 1, 1))
    position = torch.where(best, known.position, -1)
    if with_padding:
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

"""Lifetimes of keys with plain torch operations on any device: O(S log^2 S) work, O(S) memory, nothing read on the host.

Divide and conquer over the queries. A span of `n` queries can hide at most `n` of the keys that are among the best when
it begins: the `n` worst of them, its candidates. Those of its first half are the `n / 2` worst candidates; those of its
second half are found by sorting the candidates together with the first half's keys. A span of one query has one
candidate and one new key, and hides the worse of the two if `keep` keys were there before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn_ops.kernels.selection.order import places


def lifetimes(
    scores: Tensor,
    documents: Tensor | None,
    keep: int,
    keep_first: int,
    keep_last: int,
    is_causal: bool,
    start: Tensor,
    end: Tensor,
) -> None:
    """Write the queries `[start, end)` that see each key `[B, Hm, S]` (definition: `dmattn_ops.kernels.selection`)."""
    batch, heads, seqlen = start.shape
    if start.numel() == 0:
        return
    position = torch.arange(seqlen, device=start.device)
    first, last = _bounds(documents, position)
    order = torch.sort(places(scores).expand(batch, -1, -1).flatten(0, 1), dim=-1, stable=True).indices
    spread = first.expand(batch, -1)[:, None].expand(-1, heads, -1).flatten(0, 1)
    death = _deaths(order, spread, min(keep, seqlen)).view(batch, heads, seqlen)
    first, last = first[:, None], last[:, None]
    stays = (death >= last) | (position - first < keep_first)
    if is_causal:
        hidden = torch.minimum(torch.maximum(death, position + min(keep_last, seqlen)), last)
        start.copy_(position)
    else:
        hidden = first
        start.copy_(first)
    end.copy_(torch.where(stays, last, hidden))


def _bounds(documents: Tensor | None, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first position of each position's document, and the position after its last, `[B or 1, S]` each."""
    seqlen = position.shape[0]
    if documents is None:
        return torch.zeros_like(position)[None], torch.full_like(position, seqlen)[None]
    changes = documents[:, 1:] != documents[:, :-1]
    begins = torch.where(changes, position[1:], 0)
    ends = torch.where(changes, position[1:], seqlen)
    first = torch.cat([begins.new_zeros(len(begins), 1), begins], 1).cummax(1).values
    last = torch.cat([ends, ends.new_full((len(ends), 1), seqlen)], 1).flip(1).cummin(1).values.flip(1)
    return first, last


def _deaths(order: Tensor, first: Tensor, keep: int) -> Tensor:
    """Return the query at which each key leaves the best `keep` of its document, `[rows, S]`; S or later where none does.

    `order` holds the keys of each row from the best to the worst, `first` where the document of each position begins.
    Keys are their ranks here, and a rank `size` stands for none. Lengths are rounded up to `size`, a power of two, by keys
    that are worse than all others, each in a document of its own.
    """
    rows, seqlen = order.shape
    size = 1 << (seqlen - 1).bit_length()
    padding = torch.arange(seqlen, size, device=order.device).expand(rows, -1)
    order, first = torch.cat([order, padding], 1), torch.cat([first, padding], 1)
    position = torch.arange(size, device=order.device)
    rank = torch.empty_like(order).scatter_(1, order, position.expand(rows, -1))
    candidates = torch.full_like(order, size)[:, None]
    span = size
    while span > 1:
        candidates = _halve(candidates, rank.unflatten(1, (-1, span)), first, keep)
        span //= 2
    candidates = candidates.squeeze(2)
    full = (position - first).clamp(max=keep) == keep
    leaving = torch.maximum(rank, torch.where(candidates < size, candidates, -1))
    leaving = torch.where(full, order.gather(1, leaving), size)
    death = torch.full((rows, size + 1), size, device=order.device)
    return death.scatter_(1, leaving, position.expand(rows, -1))[:, :seqlen]


def _halve(candidates: Tensor, rank: Tensor, first: Tensor, keep: int) -> Tensor:
    """Return the candidates of both halves of each span `[rows, spans, n]`, in ascending order, as `[.., 2 spans, n / 2]`."""
    rows, spans, span = rank.shape
    size, half = spans * span, span // 2
    slot = torch.arange(half, device=rank.device)
    begin = torch.arange(0, size, span, device=rank.device)
    middle = begin + half
    first_begin, first_middle = first[:, ::span], first[:, half::span]
    best_begin = (begin - first_begin).clamp(max=keep)  # how many keys are among the best
    best_middle = (middle - first_middle).clamp(max=keep)
    count = best_begin.clamp(max=span)
    left = candidates.gather(2, (count - half).clamp(min=0)[..., None] + slot)
    continues = first_middle < begin
    own = torch.where(middle[:, None] - half + slot >= first_middle[..., None], rank[..., :half], size)
    both = torch.cat([torch.where(continues[..., None], candidates, size), own], 2).sort(2).values
    # The best keys that are no candidates are the best at `middle` too; those after them are in `both`.
    count = best_middle - torch.where(continues, best_begin - count, 0)
    index = (count - half).clamp(min=0)[..., None] + slot
    right = torch.where(index < count[..., None], both.gather(2, index), size)
    return torch.stack([left, right], 2).view(rows, 2 * spans, half)

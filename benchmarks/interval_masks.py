"""The twelve masks of FlashMask (Wang et al., arXiv 2410.01359), each as intervals of queries for each key and as a predicate.

Key `j` is seen by query `i` iff `start[j] <= i < end[j]` and not `hidden_from[j] <= i < hidden_to[j]`. Documents have random
lengths of at least 128; where the paper leaves a number open, the docstring of the mask says what it is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

TILE = 128
Predicate = Callable[
    [Tensor, Tensor, Tensor, Tensor], Tensor
]  # of batch, head, query and key, as flex_attention takes it


class IntervalMask(NamedTuple):
    """One mask for all heads: int32 `[1, 1, S]` each, and the same as a predicate."""

    start: Tensor
    end: Tensor
    hidden: tuple[Tensor, Tensor] | None
    predicate: Predicate
    causal: bool = False  # nothing but the diagonal
    window: int | None = None  # nothing but the diagonal and a window of so many earlier keys
    documents: Tensor | None = None  # ids [1, S]: nothing but documents, and the diagonal where `causal`
    # no query sees more keys; each is seen from the diagonal on, and `start` says nothing more
    at_most: int | None = None


class Layout(NamedTuple):
    """A sequence cut into documents: the id, the first position and the end of the document of each position, int64 `[S]`."""

    ids: Tensor
    first: Tensor
    last: Tensor


def layout(lengths: list[int], device: str) -> Layout:
    """Return the documents of these lengths."""
    sizes = torch.tensor(lengths, device=device)
    ids = torch.repeat_interleave(torch.arange(len(lengths), device=device), sizes)
    ends = sizes.cumsum(0)
    return Layout(ids, (ends - sizes)[ids], ends[ids])


def lengths_of_documents(seqlen: int, count: int, seed: int = 0) -> list[int]:
    """Return `count` random lengths of at least 128 (or of an equal share, where that is less) that sum to `seqlen`."""
    generator = torch.Generator().manual_seed(seed)
    least = min(TILE, seqlen // count)
    shares = torch.rand(count, generator=generator, dtype=torch.float64)
    lengths = (least + (seqlen - least * count) * shares / shares.sum()).long().tolist()
    lengths[-1] += seqlen - sum(lengths)
    return lengths


def _mask(
    start: Tensor | int,
    end: Tensor | int,
    predicate: Predicate,
    like: Tensor,
    hidden: tuple[Tensor, Tensor] | None = None,
    **more: Any,
) -> IntervalMask:
    """Return a mask of int32 `[1, 1, S]`; limits that are single numbers hold for all keys."""

    def limits(limit: Tensor | int) -> Tensor:
        return torch.as_tensor(limit, device=like.device).expand(like.shape).int()[None, None].contiguous()

    pair = None if hidden is None else (limits(hidden[0]), limits(hidden[1]))
    return IntervalMask(limits(start), limits(end), pair, predicate, **more)


def full(seqlen: int, device: str) -> IntervalMask:
    """Every query sees every key."""
    return _mask(0, seqlen, lambda b, h, i, j: i >= 0, torch.arange(seqlen, device=device))


def causal(seqlen: int, device: str) -> IntervalMask:
    """A query sees the keys up to its own."""
    key = torch.arange(seqlen, device=device)
    return _mask(key, seqlen, lambda b, h, i, j: i >= j, key, causal=True)


def sliding(seqlen: int, device: str) -> IntervalMask:
    """Causal, with a window of S / 16 keys."""
    key, window = torch.arange(seqlen, device=device), seqlen // 16
    end = (key + window).clamp(max=seqlen)
    return _mask(key, end, lambda b, h, i, j: (i >= j) & (i - j < window), key, causal=True, window=window)


def causal_document(seqlen: int, device: str) -> IntervalMask:
    """Causal inside of 12 documents."""
    of, key = layout(lengths_of_documents(seqlen, 12), device), torch.arange(seqlen, device=device)
    ids = of.ids
    return _mask(key, of.last, lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), key, causal=True, documents=ids[None])


def document(seqlen: int, device: str) -> IntervalMask:
    """Everything inside of 12 documents."""
    of = layout(lengths_of_documents(seqlen, 12), device)
    ids = of.ids
    return _mask(of.first, of.last, lambda b, h, i, j: ids[i] == ids[j], ids, documents=ids[None])


def share_question(seqlen: int, device: str) -> IntervalMask:
    """Causal; 4 documents are a question and 2 to 6 answers each, and an answer sees the question and itself."""
    generator = torch.Generator().manual_seed(1)
    ends: list[int] = []
    asked: list[tuple[bool, int]] = []
    for length in lengths_of_documents(seqlen, 4):
        answers = int(torch.randint(2, 7, (1,), generator=generator))
        parts = lengths_of_documents(length, answers + 1, seed=length)
        at, last = sum(part for _, part in asked), sum(part for _, part in asked) + length
        for index, part in enumerate(parts):
            at += part
            ends.append(last if index == 0 else at)
            asked.append((index == 0, part))
    of = layout([part for _, part in asked], device)
    key, end = torch.arange(seqlen, device=device), torch.tensor(ends, device=device)[of.ids]
    return _mask(key, end, lambda b, h, i, j: (i >= j) & (i < end[j]), key)


def global_sliding(seqlen: int, device: str) -> IntervalMask:
    """A window of fewer than S / 16 keys on both sides; 16 global tokens see and are seen by all."""
    key, window = torch.arange(seqlen, device=device), seqlen // 16
    end = torch.where(key < 16, seqlen, (key + window).clamp(max=seqlen))
    hidden_to = torch.where(key < 16, 0, (key - window + 1).clamp(min=16))
    hidden = (torch.where(key < 16, 0, 16), hidden_to)

    def predicate(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i < 16) | (j < 16) | ((i - j < window) & (j - i < window))

    return _mask(0, end, predicate, key, hidden=hidden)


def causal_blockwise(seqlen: int, device: str) -> IntervalMask:
    """Causal inside of 8 documents; the last one sees all of them (demonstrations, then the question)."""
    lengths = lengths_of_documents(seqlen, 8)
    of, key, last = layout(lengths, device), torch.arange(seqlen, device=device), seqlen - lengths[-1]
    hidden = (torch.minimum(of.last, torch.tensor(last, device=device)), torch.full_like(key, last))
    ids = of.ids
    return _mask(key, seqlen, lambda b, h, i, j: (i >= j) & ((ids[i] == ids[j]) | (i >= last)), key, hidden=hidden)


def prefix_document(seqlen: int, device: str) -> IntervalMask:
    """Causal inside of 12 documents, of which every query sees the first half."""
    of, key = layout(lengths_of_documents(seqlen, 12), device), torch.arange(seqlen, device=device)
    inside = key < (of.first + of.last) // 2
    ids = of.ids
    start = torch.where(inside, of.first, key)
    return _mask(start, of.last, lambda b, h, i, j: (ids[i] == ids[j]) & ((i >= j) | inside[j]), key)


def prefix(seqlen: int, device: str) -> IntervalMask:
    """Causal, and every query sees the first half of the sequence."""
    key, half = torch.arange(seqlen, device=device), seqlen // 2
    return _mask(torch.where(key < half, 0, key), seqlen, lambda b, h, i, j: (i >= j) | (j < half), key)


def qk_sparse(seqlen: int, device: str) -> IntervalMask:
    """Causal; the keys of 2 spans of S / 16 (at 1/4 and 5/8 of the sequence) are hidden until their span ends."""
    key, width = torch.arange(seqlen, device=device), seqlen // 16
    first = [seqlen // 4, seqlen * 5 // 8]
    start = key.clone()
    for begin in first:
        start[begin : begin + width] = begin + width
    return _mask(start, seqlen, lambda b, h, i, j: i >= start[j], key)


def random_eviction(seqlen: int, device: str) -> IntervalMask:
    """Causal; from row S / 2 on, one random earlier key leaves at each row."""
    generator = torch.Generator().manual_seed(2)
    half = seqlen // 2
    gone = torch.randperm(half, generator=generator).to(device)  # of the first half: earlier than any of these rows
    key = torch.arange(seqlen, device=device)
    end = torch.full_like(key, seqlen)
    end[gone] = half + torch.arange(half, device=device)
    return _mask(key, end, lambda b, h, i, j: (i >= j) & (i < end[j]), key, at_most=half)


MASKS: dict[str, Callable[[int, str], IntervalMask]] = {
    "full": full,
    "causal": causal,
    "sliding window": sliding,
    "causal document": causal_document,
    "document": document,
    "share question": share_question,
    "global + sliding": global_sliding,
    "causal blockwise": causal_blockwise,
    "prefix LM document": prefix_document,
    "prefix LM": prefix,
    "QK-sparse": qk_sparse,
    "random eviction": random_eviction,
}
# FlashMask V3's own figures on Hopper, S 32768, B1 H32 D128: TFLOP/s forward, backward over non-empty tiles (arXiv 2410.01359).
PUBLISHED = {
    "full": (672, 620),
    "causal": (665, 588),
    "sliding window": (527, 445),
    "causal document": (495, 413),
    "document": (509, 464),
    "share question": (452, 341),
    "global + sliding": (495, 339),
    "causal blockwise": (487, 511),
    "prefix LM document": (485, 425),
    "prefix LM": (598, 597),
    "QK-sparse": (585, 586),
    "random eviction": (468, 540),
}


def rows_of_tiles(mask: IntervalMask) -> Iterator[Tensor]:
    """Return what the queries of each tile see, bool `[128, S]`, by the intervals."""
    start, end = mask.start[0, 0], mask.end[0, 0]
    seqlen = len(start)
    for first in range(0, seqlen, TILE):
        query = torch.arange(first, min(first + TILE, seqlen), device=start.device)[:, None]
        seen = (start <= query) & (query < end)
        if mask.hidden is not None:
            hidden_from, hidden_to = (part[0, 0] for part in mask.hidden)
            seen &= ~((hidden_from <= query) & (query < hidden_to))
        yield seen


def nonempty_tiles(mask: IntervalMask) -> int:
    """Count the tiles of 128 x 128 in which something is visible."""
    counts = []
    for seen in rows_of_tiles(mask):
        columns = torch.nn.functional.pad(seen.any(0), (0, -seen.shape[1] % TILE))
        counts.append(columns.view(-1, TILE).any(1).sum())
    return int(torch.stack(counts).sum())

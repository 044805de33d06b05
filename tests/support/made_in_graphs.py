"""Masks of every kind, made inside a graph of what the graph itself computes: documents of end-of-text tokens, scores, padding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dmattn_ops import TileMask, dynamic_mask, flash_dmattn_func, prepare_mask

Maker = Callable[[Tensor], "Tensor | TileMask"]


def documents(score: Tensor) -> Tensor:
    """Return ids as everybody writes them of end-of-text tokens."""
    return (score[:, 0] > 1.5).long().cumsum(-1)


def returning(score: Tensor) -> Tensor:
    """Return ids that come back."""
    return (score[:, 1] > 0.3).long() * 7


def padding(score: Tensor) -> Tensor:
    return score[:, 1] > -1.5


def dense(score: Tensor) -> Tensor:
    return score[:, :1, :, None] > score[:, 1:2, None, :] - 1.0


def ends(score: Tensor) -> tuple[Tensor, Tensor]:
    """Return the queries that see each key, as int32 `[B, heads, S]`."""
    place = torch.arange(score.shape[-1], device=score.device)
    start = (place - (score.abs() * 50).long()).to(torch.int32)
    return start, (place + (score.flip(1).abs() * 90).long()).to(torch.int32)


def intervals(score: Tensor, **beside: object) -> TileMask:
    return prepare_mask(intervals=ends(score), seqlen_q=score.shape[-1], **beside)  # type: ignore[arg-type]


def hidden(score: Tensor) -> TileMask:
    start, end = ends(score)
    return intervals(score, hidden=(start + 3, end - 3), at_most=1 << 20)


def part(mask: TileMask, stop: int) -> TileMask:
    return mask.queries(0, stop).keys(0, stop)


def part_of_bits(score: Tensor) -> TileMask:
    """Return a mask that was cut out of a larger one, and got another band."""
    seqlen = score.shape[-1]
    twice = torch.cat((score, score), dim=-1)
    made = prepare_mask(dense(twice), documents=documents(twice))
    return (
        made.queries(seqlen, 2 * seqlen).keys(seqlen, 2 * seqlen).also(prepare_mask(dense(score), is_causal=True).band)
    )


# how each kind of mask is made of a score of each token and head, [B, heads, S]
KINDS: dict[str, Maker] = {
    "dense": dense,
    "prepared dense": lambda score: prepare_mask(dense(score), window_size=(300, 40)),
    "dense and documents": lambda score: prepare_mask(dense(score), documents=documents(score)),
    "part of dense": part_of_bits,
    "padding": lambda score: prepare_mask(padding(score), seqlen_q=score.shape[-1]),
    "padding of each head": lambda score: (score > -1.5).unsqueeze(2),
    "documents": lambda score: prepare_mask(documents=documents(score)),
    "documents of int32": lambda score: prepare_mask(documents=documents(score).int(), is_causal=True),
    "returning documents": lambda score: prepare_mask(documents=returning(score)),
    "pair of documents": lambda score: prepare_mask(documents=(documents(score), returning(score))),
    "documents and padding": lambda score: prepare_mask(padding(score), documents=documents(score), is_causal=True),
    "intervals": intervals,
    "ends": lambda score: prepare_mask(intervals=(None, ends(score)[1]), seqlen_q=score.shape[-1], is_causal=True),
    "hidden": hidden,
    "intervals and documents": lambda score: intervals(score, documents=documents(score)),
    "intervals, documents, padding": lambda score: intervals(score, documents=returning(score), mask=padding(score)),
    "intervals and dense": lambda score: intervals(score, mask=dense(score), is_causal=True),
    "dynamic": lambda score: dynamic_mask(score, 32, keep_first=2, keep_last=3),
    "dynamic, for all": lambda score: dynamic_mask(score, 32, is_causal=False),
    "dynamic in documents": lambda score: dynamic_mask(score[:, :1], 32, documents=documents(score)),
    "part of dynamic": lambda score: part(dynamic_mask(torch.cat((score, score), -1), 32), score.shape[-1]),
}  # fmt: skip


class Attention(torch.nn.Module):
    """Attention under a mask that it makes of the scores of its own tokens."""

    def __init__(self, kind: str, heads: int, dim: int) -> None:
        super().__init__()
        self.kind = kind
        generator = torch.Generator().manual_seed(0)
        self.score = torch.nn.Parameter(torch.randn(dim, generator=generator) / dim**0.5)
        self.scale = torch.nn.Parameter(torch.ones(heads, 1))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return attention of `[B, S, heads, D]`."""
        query = hidden * self.scale
        score = (query.float() @ self.score.float()).transpose(1, 2)
        # what a mask is made of must not depend on how a compiler rounds a product
        mask = KINDS[self.kind]((score.detach() * 8).round() / 8)
        return flash_dmattn_func(query, query, query, mask)

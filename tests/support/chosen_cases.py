"""Blocks of keys that queries choose, drawn at random, and what they mean, read from the definition in float64."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Case:
    """Arguments of `selection_mask`, with band and documents as tests read them."""

    indices: Tensor  # [B|1, Hm, Sq, k]
    block: int
    seqlen_k: int
    batch: int
    heads: int
    heads_kv: int
    keywords: dict[str, Any]  # is_causal, causal_from, window_size
    documents: Pair | None
    padding: Tensor | None

    def __repr__(self) -> str:
        return (
            f"indices {tuple(self.indices.shape)}, block={self.block}, Sk={self.seqlen_k}, {self.keywords},"
            f" documents={self.documents is not None}, padding={self.padding is not None}"
        )

    @property
    def mask_arguments(self) -> dict[str, Any]:
        """The keywords of `selection_mask`."""
        return {
            "block": self.block,
            "seqlen_k": self.seqlen_k,
            **self.keywords,
            "documents": self.documents,
            "padding": self.padding,
        }


def draw(seed: int, longest: int = 60) -> Case:
    """Draw a case; every kind of list, of block and of condition comes often."""
    pick = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    seqlen_q = pick.choice((1, pick.randint(1, longest), pick.randint(1, longest)))
    seqlen_k = pick.choice((seqlen_q, pick.randint(1, longest)))
    block = pick.choice((1, 1, 2, 3, 4, 7, 16, 31, 32, 33, 48, 64, 100, 127, 128, pick.randint(1, 128)))
    count = -(-seqlen_k // block)
    heads_kv = pick.choice((1, 2, 3))
    heads = heads_kv * pick.choice((1, 2, 3))
    batch = pick.choice((1, 2, 2, 3))
    named = pick.choice((0, 1, pick.randint(1, 2 * count + 3), pick.randint(1, max(1, count // 2))))
    shape = (pick.choice((1, batch)), pick.choice((1, heads_kv, heads)), seqlen_q, named)
    indices = torch.randint(-pick.choice((0, 1, 1, 5)), count, shape, generator=generator).clamp(min=-1)
    if pick.random() < 0.3:  # most of them none; some queries choose nothing at all
        indices = indices.masked_fill(torch.rand(shape, generator=generator) < 0.8, -1)
    if pick.random() < 0.2:
        indices = indices.sort(dim=-1).values
    indices = indices.to(pick.choice((torch.int32, torch.int64)))
    if pick.random() < 0.2:  # any strides
        indices = indices.transpose(2, 3).contiguous().transpose(2, 3)
    window = pick.choice((None, None, pick.randint(0, longest)))
    keywords = {
        "is_causal": pick.random() < 0.6,
        "causal_from": pick.choice(("bottom_right", "top_left", pick.randint(-longest, longest))),
        "window_size": (window, pick.choice((None, pick.randint(0, longest)))),
    }
    documents = padding = None
    if pick.random() < 0.4:
        ids = [
            torch.randint(0, 3, (pick.choice((1, batch)), length), generator=generator)
            for length in (seqlen_q, seqlen_k)
        ]
        documents = ids[0], ids[1]
    if pick.random() < 0.4:
        padding = torch.rand((pick.choice((1, batch)), seqlen_k), generator=generator) < 0.7
    return Case(indices, block, seqlen_k, batch, heads, heads_kv, keywords, documents, padding)


def limits(keywords: dict[str, Any], seqlen_q: int, seqlen_k: int) -> tuple[float, float]:
    """Return the least and the greatest `j - i` that causal condition and window show."""
    where = keywords["causal_from"]
    off = where if isinstance(where, int) else seqlen_k - seqlen_q if where == "bottom_right" else 0
    left, right = keywords["window_size"]
    low = -math.inf if left is None else off - left
    high = math.inf if right is None else off + right
    return low, off if keywords["is_causal"] else high


def chosen(case: Case) -> Tensor:
    """Return which entry of its list shows a key, bool `[B|1, Hm, Sq, k, Sk]`: repeats do, each by itself."""
    keys = torch.arange(case.seqlen_k)
    return case.indices.unsqueeze(-1) == keys // case.block


def conditions(case: Case) -> Tensor:
    """Return what the other conditions show, bool `[B|1, 1, Sq, Sk]`."""
    seqlen_q = case.indices.shape[2]
    distance = torch.arange(case.seqlen_k) - torch.arange(seqlen_q).unsqueeze(-1)
    low, high = limits(case.keywords, seqlen_q, case.seqlen_k)
    shown = ((distance >= low) & (distance <= high))[None, None]
    if case.documents is not None:
        of_queries, of_keys = case.documents
        shown = shown & (of_queries[:, None, :, None] == of_keys[:, None, None])
    if case.padding is not None:
        shown = shown & case.padding[:, None, None]
    return shown


def visible(case: Case) -> Tensor:
    """Return the mask by definition, bool `[Bm, Hm, Sq, Sk]`."""
    return chosen(case).any(-2) & conditions(case)


def per_head(part: Tensor, heads: int) -> Tensor:
    """Return `[B|1, H|Hkv|1, ...]` with `H` heads."""
    return part.repeat_interleave(heads // part.shape[1], dim=1)


def probabilities(
    query: Tensor,
    key: Tensor,
    shown: Tensor,
    bias: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    lse: Tensor | None = None,
) -> Tensor:
    """Return the weights of attention in float64, `[B, H, Sq, Sk]`; rows that see nothing are 0."""
    heads = query.shape[2]
    scores = torch.einsum(
        "bihd,bjhd->bhij", query.double(), per_head(key.double().transpose(1, 2), heads).transpose(1, 2)
    )
    scores = scores * (query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if bias is None else scores + per_head(bias.double(), heads)
    scores = torch.where(per_head(shown, heads), scores, -torch.inf)
    if lse is None:
        lse = scores.logsumexp(-1)
    return torch.where(scores == -torch.inf, 0.0, torch.exp(scores - lse.double().unsqueeze(-1)))


def masses(case: Case, query: Tensor, key: Tensor, **keywords: Any) -> Tensor:
    """Return what `selection_mass` is by definition, float64."""
    weights = probabilities(query, key, visible(case), **keywords)
    by_entry = chosen(case)
    numbers = case.indices.unsqueeze(-1) == case.indices.unsqueeze(-2)
    again = (numbers & torch.ones(numbers.shape[-2:], dtype=torch.bool).tril(-1)).any(-1)
    by_entry = per_head(by_entry & ~again.unsqueeze(-1) & conditions(case).unsqueeze(-2), case.heads)
    each = (by_entry * weights.unsqueeze(-2)).sum(-1)
    return each if case.indices.shape[1] == case.heads else each.unflatten(1, (case.heads_kv, -1)).sum(2)


def draw_inputs(case: Case, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return query, key, and the keywords of a call: a bias, a scale and a soft cap in some of them."""
    pick = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dim, seqlen_q = pick.choice((8, 16, 17, 40)), case.indices.shape[2]
    query = torch.randn((case.batch, seqlen_q, case.heads, dim), generator=generator).to(dtype)
    key = torch.randn((case.batch, case.seqlen_k, case.heads_kv, dim), generator=generator).to(dtype)
    keywords: dict[str, Any] = {}
    if pick.random() < 0.4:
        shape = (pick.choice((1, case.batch)), pick.choice((1, case.heads_kv, case.heads)), pick.choice((1, seqlen_q)))
        keywords["bias"] = torch.randn((*shape, case.seqlen_k), generator=generator).to(dtype)
    if pick.random() < 0.3:
        keywords["softmax_scale"] = pick.choice((0.3, -0.5, 2.0))
    if pick.random() < 0.3:
        keywords["softcap"] = pick.choice((1.5, 20.0))
    return query, key, keywords

"""Which keys a dynamic mask shows, read from its definition, and cases that are nasty for whoever computes it faster."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES_OF_SCORES = ("independent", "rising", "falling", "constant", "clustered", "tied", "walk", "special")
Launcher = Callable[[Tensor, Tensor | None, int, int, int, bool, Tensor, Tensor], None]


@dataclass(frozen=True, eq=False)
class Case:
    """Arguments of `lifetimes`, but for its outputs."""

    scores: Tensor
    documents: Tensor | None
    keep: int
    keep_first: int = 0
    keep_last: int = 0
    is_causal: bool = True

    def __repr__(self) -> str:
        documents = None if self.documents is None else tuple(self.documents.shape)
        rule = f"keep={self.keep}+{self.keep_first}+{self.keep_last}, is_causal={self.is_causal}"
        return f"{tuple(self.scores.shape)}, {self.scores.dtype}, documents={documents}, {rule}"


def draw_scores(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> Tensor:
    """Return float64 scores `[B, H, S]`."""
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    position = torch.arange(shape[-1], dtype=torch.float64)
    if kind == "rising":
        return position + 0.5 * noise
    if kind == "falling":
        return -position - 0.5 * noise
    if kind == "constant":
        return torch.zeros(shape, dtype=torch.float64)
    if kind == "clustered":
        return (position // 7 * 37 % 11) + 0.01 * noise
    if kind == "tied":
        return noise.round()
    if kind == "walk":
        return noise.cumsum(-1)
    if kind == "special":
        values = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-41, -1e-41, 1.0, -1.0])
        return values.double()[torch.randint(0, len(values), shape, generator=generator)]
    return noise


def draw_documents(batch: int, seqlen: int, pick: random.Random) -> Tensor:
    """Return ids `[batch, seqlen]` that are contiguous, in any order of their values."""
    rows = []
    for _ in range(batch):
        longest, row = pick.choice((2, 10, seqlen)), []
        names = random.Random(pick.random()).sample(range(-seqlen, seqlen), seqlen)
        while len(row) < seqlen:
            row += [names.pop()] * pick.randint(1, longest)
        rows.append(row[:seqlen])
    dtypes = (torch.int32, torch.int64, torch.int16) if seqlen < 1 << 15 else (torch.int32, torch.int64)
    return torch.tensor(rows, dtype=pick.choice(dtypes))


def draw(seed: int, longest: int, batches: tuple[int, ...] = (1, 2, 3)) -> Case:
    """Return a case of any features, of at most `longest` keys."""
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    seqlen = pick.choice((1, 2, 3, pick.randint(1, longest), pick.randint(1, longest), longest))
    batch, heads = pick.choice(batches), pick.choice((1, 2))
    scores_batch = pick.choice((1, batch))
    scores = draw_scores((scores_batch, heads, seqlen), pick.choice(SHAPES_OF_SCORES), generator)
    if pick.random() < 0.2:
        scores[torch.rand(scores.shape, generator=generator) < 0.1] = math.nan
    scores = scores.to(pick.choice(DTYPES))
    if pick.random() < 0.3:  # other strides, and rows that begin anywhere
        wider = torch.zeros(heads, scores_batch, seqlen + 3, dtype=scores.dtype)
        wider[..., 1 : 1 + seqlen] = scores.transpose(0, 1)
        scores = wider[..., 1 : 1 + seqlen].transpose(0, 1)
    documents = draw_documents(pick.choice((1, batch)), seqlen, pick) if pick.random() < 0.5 else None
    if documents is not None and scores_batch == 1 and pick.random() < 0.5:
        documents = draw_documents(batch, seqlen, pick)
    small, any_number = pick.randint(0, 4), pick.randint(0, seqlen)
    keep = pick.choice((0, 1, small, any_number, any_number, seqlen - 1, seqlen, seqlen + 5, 1 << 40))
    is_causal = pick.random() < 0.75
    keep_first = pick.choice((0, 0, 1, small, seqlen, 1 << 40))
    keep_last = pick.choice((0, 0, 1, small, any_number, seqlen, 1 << 40)) if is_causal else 0
    return Case(scores, documents, keep, keep_first, keep_last, is_causal)


def visible(case: Case) -> Tensor:
    """Return the mask `[B, H, S queries, S keys]` by its definition."""
    scores, seqlen = case.scores.double()[..., None, :], case.scores.shape[-1]
    position = torch.arange(seqlen)
    query, key = position[:, None], position[None, :]
    # better[j, k]: key k is better than key j
    own = scores.transpose(-1, -2)
    higher = (scores > own) | (own.isnan() & ~scores.isnan())
    equal = (scores == own) | (own.isnan() & scores.isnan())
    better = higher | (equal & (key < query))
    seen = (key <= query).expand(1, 1, seqlen, seqlen) if case.is_causal else torch.ones(1, 1, seqlen, seqlen).bool()
    first = torch.zeros(1, seqlen, dtype=torch.int64)
    if case.documents is not None:
        begins = [[0] + [j for j in range(1, seqlen) if row[j] != row[j - 1]] for row in case.documents.tolist()]
        first = torch.tensor([[max(b for b in row if b <= j) for j in range(seqlen)] for row in begins])
        seen = seen & (first[:, None, :, None] == first[:, None, None, :])
    # ahead[i, j]: how many keys that query i may see are better than key j
    ahead = torch.matmul(seen.double(), better.double().transpose(-1, -2))
    chosen = ahead < case.keep
    if case.is_causal:
        chosen = chosen | (query - key < case.keep_last)
    return seen & (chosen | (position - first < case.keep_first)[:, None, None, :])


def expected(case: Case) -> tuple[Tensor, Tensor]:
    """Return start and end `[B, H, S]`, having checked that they say all of the mask."""
    mask = visible(case)
    position = torch.arange(mask.shape[-1])
    query = position[:, None]
    never = ~mask.any(-2)
    empty = position.expand(never.shape)
    if not case.is_causal:
        # Within a document every query sees the same, so that a hidden key takes the first query of its document.
        empty = torch.zeros_like(empty)
        if case.documents is not None:
            changes = (case.documents[:, 1:] != case.documents[:, :-1]).long() * position[1:]
            empty = (
                torch.cat([changes.new_zeros(len(changes), 1), changes], 1)
                .cummax(1)
                .values[:, None]
                .expand(never.shape)
            )
    start = torch.where(never, empty, mask.long().argmax(-2))
    end = torch.where(never, empty, mask.shape[-2] - mask.flip(-2).long().argmax(-2))
    assert torch.equal((query >= start[..., None, :]) & (query < end[..., None, :]), mask)
    return start.int(), end.int()


def answer(launcher: Launcher, case: Case) -> tuple[Tensor, Tensor]:
    """Return what a launcher writes into memory that was full of something else."""
    batch = max(case.scores.shape[0], 1 if case.documents is None else case.documents.shape[0])
    start = torch.full((batch, *case.scores.shape[1:]), -77, dtype=torch.int32)
    end = torch.full_like(start, -78)
    launcher(
        case.scores, case.documents, case.keep, case.keep_first, case.keep_last, case.is_causal, start, end
    )  # fmt: skip
    return start, end


def check(launcher: Launcher, case: Case) -> None:
    """Compare a launcher with the definition."""
    for name, got, want in zip(("start", "end"), answer(launcher, case), expected(case), strict=True):
        assert torch.equal(got, want), f"{case!r}: {name} is {got.tolist()}, not {want.tolist()}"

"""The kernel of a step of kept keys against plain torch operations, bit for bit, and attention of one query against the oracle."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dmattn_ops.kernels.kept import launch, reference
from dmattn_ops.masks.kept import NEVER, UNNAMED, Rule, Stored, Token

SCORES = (0.0, -0.0, 1.0, 1.0, -2.5, float("inf"), float("-inf"), float("nan"), 1e-42, 3.0)


class Use:
    """Steps of a cache drawn from a seed, made by the kernel and by torch side by side."""

    def __init__(self, seed: int) -> None:
        self.pick = pick = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.batch, self.heads, self.group = pick.choice((1, 2, 3)), pick.choice((1, 2, 3)), pick.choice((1, 2))
        self.dim, self.value_dim = pick.choice((1, 8, 24)), pick.choice((4, 16))
        keep, keep_first, keep_last = (pick.choice((0, 1, 3, pick.randint(0, 12))) for _ in range(3))
        self.rule = Rule(keep, keep_first, keep_last, pick.choice((0, 0, 1, 4)), pick.random() < 0.3)
        self.slots = keep + keep_first + keep_last + self.rule.stored_back + pick.randint(0, 5)
        self.score_dtype = pick.choice((torch.float32, torch.bfloat16, torch.float64))
        self.dtype = pick.choice((torch.float32, torch.bfloat16))
        self.with_bias, self.with_documents, self.with_padding = (pick.random() < 0.5 for _ in range(3))
        self.stored = self.empty()

    def empty(self) -> Stored:
        rows = (self.batch, self.heads, self.slots)
        length = torch.zeros(self.batch, dtype=torch.int64)
        wide = torch.float64 if self.score_dtype == torch.float64 else torch.float32
        document = trail = None
        if self.with_documents:
            document = torch.full_like(length, UNNAMED)
            trail = torch.stack([torch.full_like(length, NEVER), document], -1)[:, None]
            trail = trail.repeat(1, self.rule.rollback + 1, 1)
        return Stored(
            torch.zeros(*rows, self.dim, dtype=self.dtype),
            torch.zeros(*rows, self.value_dim, dtype=self.dtype),
            torch.zeros(rows, dtype=wide),
            torch.full((*rows[:2], 4, self.slots), -1),
            length,
            length.clone(),
            torch.full_like(length, NEVER),
            torch.zeros(self.batch, dtype=torch.int32),
            torch.zeros(self.batch, self.heads * self.group, self.slots) if self.with_bias else None,
            document,
            trail,
        )

    def token(self) -> Token:
        pick, batch, heads = self.pick, self.batch, self.heads
        score_shape = pick.choice((batch, 1)), pick.choice((heads, 1)), 1
        worth = [pick.choice(SCORES) if pick.random() < 0.7 else pick.gauss(0, 1) for _ in range(9)]
        scores = torch.tensor([pick.choice(worth) for _ in range(score_shape[0] * score_shape[1])])
        bias = padding = documents = None
        if self.with_bias and pick.random() < 0.8:
            bias = self.normal(pick.choice((batch, 1)), pick.choice((heads * self.group, 1)), 1, 1)
        if self.with_padding and pick.random() < 0.8:
            padding = (torch.rand(pick.choice((batch, 1)), 1, generator=self.generator) < 0.6).to(
                pick.choice((torch.bool, torch.int64))
            )
        if self.with_documents and pick.random() < 0.8:
            documents = torch.randint(0, 3, (pick.choice((batch, 1)), 1), generator=self.generator) // 2
            documents = documents.to(pick.choice((torch.int32, torch.int64)))
        return Token(
            self.normal(batch, 1, heads, self.dim).to(self.dtype),
            self.normal(batch, 1, heads, self.value_dim).to(self.dtype),
            scores.view(score_shape).to(self.score_dtype),
            bias,
            padding,
            documents,
        )

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


def copy_of(stored: Stored) -> Stored:
    return Stored._make(None if part is None else part.clone() for part in stored)


def same(one: Any, other: Any) -> bool:
    return one is other or torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("first", range(0, 30, 3))
def test_a_step_of_the_kernel_leaves_the_bits_of_torch(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, first + 3):
        use = Use(seed)
        monkeypatch.setattr(launch, "MOST_AT_ONCE", use.pick.choice((16, 4096)))
        ours, theirs = use.stored, copy_of(use.stored)
        for step in range(14):
            token = use.token()
            shape = (use.batch, use.heads, use.slots)
            seen = [torch.full(shape, -7, dtype=torch.int32) for _ in range(2)]
            launch.keep_step(ours, token, use.rule, seen[0])
            reference.keep_step(theirs, token, use.rule, seen[1])
            for name, one, other in zip((*Stored._fields, "seen"), (*ours, seen[0]), (*theirs, seen[1]), strict=True):
                assert same(one, other), (seed, step, name, one, other)
            if (
                use.rule.rollback and use.pick.random() < 0.2
            ):  # numbers of what comes back, as `KeptKeys.crop` leaves them
                for stored in (ours, theirs):
                    gone = stored.places[:, :, 0] >= (stored.length - 1).view(-1, 1, 1)
                    stored.places.masked_fill_(gone.unsqueeze(2) & (stored.length > 0).view(-1, 1, 1, 1), -1)
                    stored.length.sub_((stored.length > 0).long())

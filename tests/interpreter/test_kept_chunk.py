"""The kernels of a chunk of kept keys against plain torch operations, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dmattn_ops.kernels.kept import chunk_launch, chunk_reference, launch
from dmattn_ops.kernels.selection import reference as selection
from dmattn_ops.masks.kept import NEVER, Appended, Stored, Token
from dmattn_ops.meta import keep_chunk_outputs
from tests.interpreter.test_kept_step import SCORES, Use, copy_of, same

SIZES = {"LANES": 16, "BLOCK": 4, "_ORDERED": 4, "_COMPARED": 8, "_MOST_AT_ONCE": 16}  # so short that there are several


def chunk_of(use: Use, count: int) -> Token:
    """Draw new positions, as views of other memory where it so happens."""
    pick, batch, heads = use.pick, use.batch, use.heads
    worth = torch.tensor([pick.choice(SCORES) if pick.random() < 0.5 else pick.gauss(0, 1) for _ in range(12)])
    shape = pick.choice((batch, 1)), pick.choice((heads, 1)), count
    scores = worth[torch.randint(0, 12, shape, generator=use.generator)].to(use.score_dtype)
    bias = None
    if use.with_bias and pick.random() < 0.8:
        bias = use.normal(pick.choice((batch, 1)), pick.choice((heads * use.group, 1)), 1, count)

    def rows(dim: int) -> Tensor:
        drawn = use.normal(batch, heads, count, dim).to(use.dtype).transpose(1, 2)
        return drawn if pick.random() < 0.5 else drawn.contiguous()

    return Token(rows(use.dim), rows(use.value_dim), scores, bias, None, None)


def appended(stored: Stored, count: int) -> Appended:
    """Return where a chunk is written to, full of other numbers."""
    *parts, biases = keep_chunk_outputs(stored.key, stored.value, stored.bias, count)
    for part in (*parts, biases):
        part.fill_(-7)
    return Appended(*parts, None if stored.bias is None else biases)


def take_back(stored: Stored) -> None:
    """Take back the last position, as `KeptKeys.crop` does."""
    after = (stored.length - 1).view(-1, 1, 1)
    position, outranked, protected, ended = stored.places.unbind(2)
    undone = [position, torch.where(outranked >= after, NEVER, outranked), protected, ended]
    stored.places.copy_(torch.where((position >= after).unsqueeze(2), -1, torch.stack(undone, 2)))
    stored.length.sub_(1)


@pytest.mark.parametrize("first", range(0, 24, 3))
def test_a_chunk_of_the_kernels_leaves_the_bits_of_torch(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after steps, and where positions were taken back. `test_selection.py` has the kernels of deaths."""
    monkeypatch.setattr(chunk_launch, "lifetimes", selection.lifetimes)
    for name, size in SIZES.items():
        monkeypatch.setattr(chunk_launch, name, size)
    for seed in range(first, first + 3):
        use = Use(seed)
        use.with_documents = use.with_padding = False
        ours = use.empty()
        theirs = copy_of(ours)
        for turn, count in enumerate((use.pick.randint(2, 40), 1, use.pick.randint(2, 20), 50, 2)):
            token, made = chunk_of(use, count), [appended(ours, count) for _ in range(2)]
            assert chunk_launch.takes(ours, token)
            if count == 1:
                seen = torch.empty(use.batch, use.heads, use.slots, dtype=torch.int32)
                for stored in (ours, theirs):
                    launch.keep_step(stored, token, use.rule, seen)
            else:
                chunk_launch.keep_chunk(ours, token, use.rule, made[0])
                chunk_reference.keep_chunk(theirs, token, use.rule, made[1])
                for name, one, other in zip(Appended._fields, *made, strict=True):
                    assert one is other or same(one, other), (seed, turn, name, one, other)
            for name, one, other in zip(Stored._fields, ours, theirs, strict=True):
                assert same(one, other), (seed, turn, name, one, other)
            if use.rule.rollback and use.pick.random() < 0.7:
                for stored in (ours, theirs):
                    take_back(stored)

"""A model whose queries choose their keys by an index that learns, in two stages as DeepSeek-V3.2 (arXiv 2512.02556).

The task is to recall: a sequence holds pairs of a letter and a digit, and then asks for the digit of some letters, which stand far
before. First attention sees all keys, while the indexer learns to predict it; then each query sees the best keys of its index.

    python examples/indexed_attention.py
    python examples/indexed_attention.py --dim 256 --keep 32 --pairs 60 --device cuda
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmattn_ops.nn import IndexedAttention

DIGITS = 8


class Step(NamedTuple):
    """What a step of training printed."""

    stage: str
    loss: float
    index_loss: float
    right: float  # share of answers


class Layer(nn.Module):
    """A layer of a transformer; returns the loss of its indexer too."""

    def __init__(self, dim: int, heads: int, keep: int) -> None:
        super().__init__()
        self.attention = IndexedAttention(dim, heads, keep=keep, index_heads=2, index_dim=16)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, hidden: Tensor, warm_up: bool) -> tuple[Tensor, Tensor]:
        out, loss = self.attention(_normed(hidden), return_loss=True, warm_up=warm_up)
        hidden = hidden + out
        return hidden + self.down(F.gelu(self.up(_normed(hidden)))), loss


class Model(nn.Module):
    """Tokens to logits, and the mean loss of the indexers."""

    def __init__(self, vocabulary: int, dim: int, heads: int, layers: int, keep: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList([Layer(dim, heads, keep) for _ in range(layers)])
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor, warm_up: bool) -> tuple[Tensor, Tensor]:
        hidden, losses = self.embedding(tokens), []
        for layer in self.layers:
            hidden, loss = layer(hidden, warm_up)
            losses.append(loss)
        return self.head(_normed(hidden)), torch.stack(losses).mean()


def _normed(hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:])


def draw(batch: int, pairs: int, device: str) -> Tensor:
    """Return tokens `[batch, 4 * pairs]`: each letter with its digit, then each letter with its digit in another order."""
    digits = torch.randint(DIGITS, (batch, pairs), device=device)
    letters = DIGITS + torch.arange(pairs, device=device).expand(batch, -1)
    told = torch.stack((letters, digits), dim=-1)
    order = torch.rand(batch, pairs, device=device).argsort(-1).unsqueeze(-1)
    return torch.cat((told, told.gather(1, order.expand(-1, -1, 2))), dim=1).flatten(1)


def main(arguments: Sequence[str] | None = None) -> list[Step]:
    """Train in both stages; return what was printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (
        ("dim", 64), ("heads", 4), ("layers", 2), ("keep", 8), ("pairs", 12), ("batch", 16), ("warm-up", 400), ("steps", 100),
        ("every", 50), ("seed", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    torch.manual_seed(given.seed)
    model = Model(DIGITS + given.pairs, given.dim, given.heads, given.layers, given.keep).to(given.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    printed = []
    for step in range(given.warm_up + given.steps):
        warm_up = step < given.warm_up
        tokens = draw(given.batch, given.pairs, given.device)
        logits, index_loss = model(tokens[:, :-1], warm_up)
        asked = slice(2 * given.pairs, None, 2)  # letters of the second half, whose digits follow
        answers = tokens[:, 1:][:, asked]
        loss = F.cross_entropy(logits[:, asked].flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        (loss + index_loss).backward()
        optimizer.step()
        if step % given.every == 0 or step in (given.warm_up, given.warm_up + given.steps - 1):
            right = (logits[:, asked].argmax(-1) == answers).float().mean().item()
            printed.append(Step("warm-up" if warm_up else "sparse", loss.item(), index_loss.item(), right))
            stage, *numbers = printed[-1]
            print(f"{step:5d}  {stage:7s}  loss {numbers[0]:.4f}  index loss {numbers[1]:.4f}  right {numbers[2]:.0%}")
    return printed


if __name__ == "__main__":
    main()

"""Attention with pair biases, as models of proteins have it: triangle attention, and attention of a sequence with a pair bias.

A pair representation `[B, N, N, C]` says something of each pair of residues. Triangle attention takes each of its rows for a
sequence, and adds a bias that all rows of a batch entry share, `[B, H, N, N]`; the attention of the residues `[B, N, C]` adds a
bias made from the pairs too. The bias is learned: its gradient is summed over the rows by the kernels, and neither the bias nor
its gradient is ever expanded to `[B, N, H, N, N]`. This trains one block of both for some steps, and prints the loss and the
memory that a step takes, beside the same block on torch's own attention.

    python examples/pair_bias.py
    python examples/pair_bias.py --residues 384 --heads 4 --dim 32 --steps 20
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmattn_ops import flash_dmattn_func

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def rows_with_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, keep: Tensor) -> Tensor:
    """Return attention within each row, `[B, N, S, H, D]`, of query, key and value of that shape.

    The rows of a batch entry share `bias` `[B, H, S, S]`, which gets a gradient of that shape; `keep`, bool `[B, N, S]`, says which
    keys a row has. A call takes the rows of one batch entry as its batch, so that the bias broadcasts over them.
    """
    entries = zip(query.unbind(), key.unbind(), value.unbind(), bias.unbind(), keep.unbind(), strict=True)
    found = [flash_dmattn_func(q, k, v, seen[:, None, None], shared[None]) for q, k, v, shared, seen in entries]
    return torch.stack(found)


def rows_by_torch(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, keep: Tensor) -> Tensor:
    """Return the same by torch's attention, which takes one tensor for bias and mask, expanded to `[B, N, H, S, S]`."""
    added = bias.unsqueeze(1).masked_fill(~keep[:, :, None, None], -torch.inf)
    q, k, v = (tensor.transpose(2, 3) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=added).transpose(2, 3)


class TriangleAttention(nn.Module):
    """Triangle attention around starting nodes; `transposed` makes it that around ending nodes."""

    def __init__(self, channels: int, heads: int, dim: int, *, transposed: bool = False) -> None:
        super().__init__()
        self.heads, self.transposed = heads, transposed
        self.norm = nn.LayerNorm(channels)
        self.project = nn.Linear(channels, 4 * heads * dim, bias=False)  # query, key, value and a gate
        self.bias = nn.Linear(channels, heads, bias=False)
        self.out = nn.Linear(heads * dim, channels)

    def forward(self, pairs: Tensor, keep: Tensor, attend: Attend) -> Tensor:
        """Return the update of pairs `[B, N, N, C]`; `keep` is bool `[B, N, N]`, False for pairs that do not exist."""
        if self.transposed:
            pairs, keep = pairs.transpose(1, 2), keep.transpose(1, 2)
        pairs = self.norm(pairs)
        query, key, value, gate = self.project(pairs).unflatten(-1, (4, self.heads, -1)).unbind(3)
        bias = self.bias(pairs).permute(0, 3, 1, 2).contiguous()  # [B, H, N, N], the same for all rows
        update = self.out((attend(query, key, value, bias, keep) * gate.sigmoid()).flatten(-2))
        return update.transpose(1, 2) if self.transposed else update


class AttentionWithPairBias(nn.Module):
    """Attention of residues `[B, N, C]`, to whose scores a bias made from the pairs is added."""

    def __init__(self, channels: int, pair_channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_pairs = nn.LayerNorm(channels), nn.LayerNorm(pair_channels)
        self.project = nn.Linear(channels, 3 * channels, bias=False)
        self.bias = nn.Linear(pair_channels, heads, bias=False)
        self.out = nn.Linear(channels, channels)

    def forward(self, residues: Tensor, pairs: Tensor, keep: Tensor, attend: Attend) -> Tensor:
        """Return the update of the residues; `keep` is bool `[B, N]`, False for padding."""
        query, key, value = self.project(self.norm(residues)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        bias = self.bias(self.norm_pairs(pairs)).permute(0, 3, 1, 2).contiguous()
        rows = [tensor.unsqueeze(1) for tensor in (query, key, value)]  # one row for each batch entry
        return self.out(attend(rows[0], rows[1], rows[2], bias, keep.unsqueeze(1)).squeeze(1).flatten(-2))


class Block(nn.Module):
    """A block that updates residues and pairs, and predicts a distance for each pair."""

    def __init__(self, channels: int, heads: int, dim: int) -> None:
        super().__init__()
        self.residues = AttentionWithPairBias(channels, channels, heads)
        self.starting = TriangleAttention(channels, heads, dim)
        self.ending = TriangleAttention(channels, heads, dim, transposed=True)
        self.distance = nn.Linear(channels, 1)

    def forward(self, residues: Tensor, pairs: Tensor, keep: Tensor, attend: Attend) -> Tensor:
        """Return a distance for each pair, `[B, N, N]`, of residues `[B, N, C]` and pairs `[B, N, N, C]`."""
        both = keep.unsqueeze(1) & keep.unsqueeze(2)
        residues = residues + self.residues(residues, pairs, keep, attend)
        pairs = pairs + residues.unsqueeze(1) * residues.unsqueeze(2)
        pairs = pairs + self.starting(pairs, both, attend)
        pairs = pairs + self.ending(pairs, both, attend)
        return self.distance(pairs).squeeze(-1)


def train(attend: Attend, options: argparse.Namespace) -> list[float]:
    """Train a block from the same start on the same drawn data; print what a step takes, and return the losses."""
    torch.manual_seed(0)
    device, dtype = options.device, torch.bfloat16 if options.device == "cuda" else torch.float32
    batch, count, channels = options.batch, options.residues, options.channels
    block = Block(channels, options.heads, options.dim).to(device, dtype)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    places = torch.randn(batch, count, 3, device=device).cumsum(1)
    residues = torch.randn(batch, count, channels, device=device, dtype=dtype)
    residues[..., :3] = (places / count**0.5).to(dtype)
    pairs = torch.randn(batch, count, count, channels, device=device, dtype=dtype)
    keep = (
        torch.arange(count, device=device) < torch.tensor([count - 3 * n for n in range(batch)], device=device)[:, None]
    )
    wanted = torch.cdist(places, places) / count**0.5
    both = keep.unsqueeze(1) & keep.unsqueeze(2)
    losses: list[float] = []
    for _ in range(options.steps):
        began = time.perf_counter()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss = F.mse_loss(block(residues, pairs, keep, attend).float()[both], wanted[both])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds = time.perf_counter() - began
    memory = f", {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB at most" if device == "cuda" else ""
    print(f"{attend.__name__}: loss {losses[0]:.4f} to {losses[-1]:.4f}, last step {1e3 * seconds:.1f} ms{memory}")
    return losses


def main(arguments: list[str]) -> dict[str, list[float]]:
    """Train on these kernels and on torch's attention; return the losses of both."""
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in (
        ("residues", 48), ("batch", 2), ("channels", 32), ("heads", 4), ("dim", 16), ("steps", 5),
    ):  # fmt: skip
        own.add_argument(f"--{name}", type=int, default=number, help=f"default {number}")
    own.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = own.parse_args(arguments)
    return {attend.__name__: train(attend, options) for attend in (rows_with_bias, rows_by_torch)}


if __name__ == "__main__":
    main(sys.argv[1:])

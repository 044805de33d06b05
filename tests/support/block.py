"""A transformer block around the library: RMS norm, projections, rotary embedding, attention."""

import torch
from torch import Tensor, nn

import dmattn_ops


class RMSNorm(nn.Module):
    """Normalise the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(heads: Tensor) -> Tensor:
    """Embed positions of `[B, S, heads, D]` as angles."""
    seqlen, dim = heads.shape[1], heads.shape[3]
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=heads.device) / dim)
    angles = torch.arange(seqlen, dtype=torch.float32, device=heads.device)[:, None, None] * frequencies
    even, odd = heads.float().chunk(2, dim=-1)
    rotated = (even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin())
    return torch.cat(rotated, dim=-1).to(heads.dtype)


class Block(nn.Module):
    """Attention with grouped heads, a mask that comes from the data, and a bias per key that is learned."""

    def __init__(self, heads: int = 4, heads_kv: int = 2, dim: int = 16) -> None:
        super().__init__()
        self.heads, self.heads_kv, self.dim = heads, heads_kv, dim
        width = heads * dim
        self.norm = RMSNorm(width)
        self.project = nn.Linear(width, (heads + 2 * heads_kv) * dim, bias=False)
        self.score = nn.Linear(width, heads_kv)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, **keywords: object) -> Tensor:
        normed = self.norm(hidden)
        batch, seqlen, _ = hidden.shape
        projected = self.project(normed).view(batch, seqlen, -1, self.dim)
        query, key, value = projected.split((self.heads, self.heads_kv, self.heads_kv), dim=2)
        bias = self.score(normed).transpose(1, 2)[:, :, None, :]
        attended = dmattn_ops.flash_dmattn_func(
            rotate(query), rotate(key), value, bias.detach() > -1.0, bias, is_causal=True, **keywords
        )
        return hidden + self.out(attended.flatten(2))

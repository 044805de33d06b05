"""Models of the scores that dynamic masks select by. Only their order matters, and how it depends on the position.

Six models: independent scores; correlated ones (autoregressive, 0.99); rising and falling ones (half a standard deviation in
`keep` keys), of which the latest or the earliest are the best; clusters of 32 to 512 keys that share a level; and constant
ones, whose first `keep` keys stay for good.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CORRELATION = 0.99
SLOPE = 0.5  # standard deviations over `keep` keys
SPAN = 4096  # positions that one matrix product correlates: the memory of 0.99 is a few hundred


def independent(noise: Tensor, keep: int, generator: torch.Generator) -> Tensor:
    """Return the noise itself."""
    return noise


def correlated(noise: Tensor, keep: int, generator: torch.Generator) -> Tensor:
    """Return `x[i] = 0.99 x[i - 1] + noise`, of unit variance: each position from the noise of up to 2 `SPAN` before it."""
    heads, seqlen = noise.shape
    span = min(SPAN, seqlen)
    padded = torch.nn.functional.pad(noise, (span, -seqlen % span)).view(heads, -1, span)
    lag = torch.arange(span, device=noise.device)[:, None] - torch.arange(span, device=noise.device)
    decay = torch.full((), CORRELATION, dtype=torch.float64, device=noise.device)
    own = torch.where(lag >= 0, decay**lag, 0.0).to(noise.dtype)
    before = (decay ** (lag + span)).to(noise.dtype)
    mixed = padded[:, 1:] @ own.T + padded[:, :-1] @ before.T
    return mixed.flatten(1)[:, :seqlen] * (1 - CORRELATION**2) ** 0.5


def rising(noise: Tensor, keep: int, generator: torch.Generator) -> Tensor:
    """Return noise on a slope: later keys tend to be better."""
    return noise + SLOPE * torch.arange(noise.shape[1], device=noise.device) / max(1, keep)


def falling(noise: Tensor, keep: int, generator: torch.Generator) -> Tensor:
    """Return noise on a slope: earlier keys tend to be better."""
    return noise - SLOPE * torch.arange(noise.shape[1], device=noise.device) / max(1, keep)


def clustered(noise: Tensor, keep: int, generator: torch.Generator) -> Tensor:
    """Return a level for each cluster of 32 to 512 keys, and a little noise."""
    heads, seqlen = noise.shape
    sizes = torch.randint(32, 513, (heads, seqlen // 32 + 1), generator=generator, device=noise.device)
    ends = sizes.cumsum(1)
    position = torch.arange(seqlen, device=noise.device).expand(heads, -1).contiguous()
    cluster = torch.searchsorted(ends, position, right=True)
    levels = torch.randn(sizes.shape, generator=generator, device=noise.device, dtype=noise.dtype)
    return levels.gather(1, cluster) + 0.3 * noise


def constant(noise: Tensor, keep: int, generator: torch.Generator) -> Tensor:
    """Return zeros: of equal scores the earlier key is better."""
    return torch.zeros_like(noise)


MODELS: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {
    "independent": independent,
    "correlated": correlated,
    "rising": rising,
    "falling": falling,
    "clustered": clustered,
    "constant": constant,
}


def make_scores(model: str, heads: int, seqlen: int, keep: int, device: str, seed: int = 0) -> Tensor:
    """Return float32 scores `[1, heads, S]`."""
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.randn(heads, seqlen, generator=generator, device=device)
    return MODELS[model](noise, keep, generator)[None]

"""A byte-level transformer whose attention computes its mask from the data at every step.

The mask is the one of Trainable Dynamic Mask Sparse Attention (arXiv 2508.02124): each key gets a score from its value,
each query sees the `keep` keys with the highest scores among its own causal prefix (`dynamic_mask`), and the score is also
added to the attention scores, so that the network learns which keys are worth keeping. A learned slope over positions (as in ALiBi,
arXiv 2108.12409) is part of the score: without it nothing favours near keys, and 4 layers of 192 reached a validation
loss of 1.99 instead of 1.66 nats per byte in 300 steps of 8 sequences of 256 bytes.

Letters: `B` batch, `S` sequence length, `H` query heads, `Hkv` key/value heads, `D` head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmattn_ops import TileMask, dynamic_mask, flash_dmattn_func
from sizes import ModelConfig as ModelConfig

BYTES = 256
# Without it a key that gets all attention can make its own score grow without end: with 6 layers of 1024 at a rate of 1e-3 scores
# reached 1e32, and gradients infinity, within 40 to 250 steps, through torch's own attention as well (H200, 7 of 8 runs).
LARGEST_EXPONENT = 3
Attend = Callable[[Tensor, Tensor, Tensor, TileMask, Tensor], Tensor]


class Cache(Protocol):
    """What a layer keeps of earlier positions: `dmattn_ops.KeptKeys`, or all keys (`generate.py`)."""

    length: Tensor

    @property
    def nbytes(self) -> int: ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor, bias: Tensor) -> Tensor: ...


def attend_dmattn(query: Tensor, key: Tensor, value: Tensor, mask: TileMask, bias: Tensor) -> Tensor:
    """Attend with `flash_dmattn_func`: out `[B, S, H, D]` for mask `[B, Hkv, S, S]` and bias `[B, Hkv, 1, S]`."""
    return flash_dmattn_func(query, key, value, mask, bias)


def attend_dense(query: Tensor, key: Tensor, value: Tensor, mask: TileMask, bias: Tensor) -> Tensor:
    """Attend to every earlier key by the same kernels, with neither mask nor bias: what dense causal attention costs."""
    return flash_dmattn_func(query, key, value, is_causal=True)


def attend_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: TileMask, bias: Tensor) -> Tensor:
    """Compute the same with torch's own attention, which wants one dense additive mask `[B, H, S, S]`."""
    groups = query.shape[2] // key.shape[2]
    dense = torch.where(mask.to_dense(), bias, float("-inf")).repeat_interleave(groups, dim=1)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=dense.to(query.dtype))
    return out.transpose(1, 2)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and a dynamic mask for each key/value head."""

    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.config, self.attend = config, attend
        heads = config.heads + 2 * config.kv_heads
        self.project = nn.Linear(config.dim, heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.delta = nn.Linear(config.kv_heads * config.head_dim, config.kv_heads, bias=False)
        self.gain = nn.Parameter(torch.linspace(-1.0, 1.0, config.kv_heads))
        self.slope = nn.Parameter(torch.logspace(1, -3, config.kv_heads, base=2.0))  # 2 to 1/8 over `keep` keys

    def score(self, value: Tensor, begin: Tensor | None = None) -> Tensor:
        """Return what each key is worth, `exp(gain * softplus(value @ delta)) + slope * position`, shape `[B, Hkv, S]`.

        `begin`, `[B]`, is where the first position stands; None is 0. The exponent stops at `LARGEST_EXPONENT`.

        The slope needs no distance to the query: a softmax does not change when all its scores move by one amount.
        """
        with torch.autocast(value.device.type, enabled=False):  # in float32: ranks of rounded scores would be ties
            worth = F.softplus(self.delta(value.flatten(2).float()))
            position = torch.arange(value.shape[1], device=value.device)[:, None]
            if begin is not None:
                position = begin[:, None, None] + position
            exponent = (self.gain * worth).clamp(max=LARGEST_EXPONENT)
            return (torch.exp(exponent) + self.slope * (position / self.config.keep)).transpose(1, 2)

    def forward(
        self, hidden: Tensor, rotation: Tensor, scores: list[Tensor] | None, cache: Cache | None = None
    ) -> Tensor:
        batch, seqlen, _ = hidden.shape
        heads, kv_heads = self.config.heads, self.config.kv_heads
        packed = self.project(hidden).view(batch, seqlen, heads + 2 * kv_heads, self.config.head_dim)
        query, key, value = packed.split((heads, kv_heads, kv_heads), dim=2)
        if cache is not None:
            score = self.score(value, cache.length)
            query, key = rotate(query, rotation), rotate(key, rotation)
            return self.out(cache.attend(query, key, value, score, score[:, :, None, :]).flatten(2))
        score = self.score(value)
        mask = dynamic_mask(score, self.config.keep)
        if scores is not None:
            scores.append(score)
        out = self.attend(rotate(query, rotation), rotate(key, rotation), value, mask, score[:, :, None, :])
        return self.out(out.flatten(2))


def rotations(config: ModelConfig, position: Tensor) -> Tensor:
    """Return cosine and sine of the rotary angles of positions `[..., S]`, `[2, ..., S, 1, D / 2]`."""
    frequency = 10000.0 ** -torch.linspace(0, 1, config.head_dim // 2, device=position.device)
    angle = position[..., None, None] * frequency
    return torch.stack((angle.cos(), angle.sin()))


def rotate(tensor: Tensor, rotation: Tensor) -> Tensor:
    """Turn the pairs of `[B, S, heads, D]` by their positions' angles."""
    cosine, sine = rotation[..., : tensor.shape[1], :, :].to(tensor.dtype)
    left, right = tensor.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = (8 * config.dim // 3 + 31) // 32 * 32
        self.up = nn.Linear(config.dim, 2 * inner, bias=False)
        self.down = nn.Linear(inner, config.dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.up(hidden).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to the stream."""

    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config, attend)
        self.feed_forward_norm = nn.RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(
        self, hidden: Tensor, rotation: Tensor, scores: list[Tensor] | None, cache: Cache | None = None
    ) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation, scores, cache)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class ByteModel(nn.Module):
    """A language model over bytes."""

    rotation: Tensor

    def __init__(self, config: ModelConfig, attend: Attend = attend_dmattn) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(BYTES, config.dim)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, BYTES, bias=False)
        self.register_buffer("rotation", rotations(config, torch.arange(config.seqlen)), persistent=False)
        self.apply(self.reset)
        self.head.weight = self.embedding.weight

    def reset(self, module: nn.Module) -> None:
        """Draw a layer's weights; what adds to the stream starts smaller, the more layers add."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Attention):
            nn.init.normal_(module.out.weight, std=0.02 / (2 * self.config.layers) ** 0.5)
        if isinstance(module, FeedForward):
            nn.init.normal_(module.down.weight, std=0.02 / (2 * self.config.layers) ** 0.5)

    def forward(
        self, inputs: Tensor, scores: list[Tensor] | None = None, caches: Sequence[Cache] | None = None
    ) -> Tensor:
        """Return logits `[B, S, 256]` for bytes `[B, S]`; a list given as `scores` gets those of each layer's keys.

        With a cache for each layer, the bytes are the next ones of texts of any length.
        """
        hidden, rotation = self.embedding(inputs), self.rotation
        if caches is not None:
            position = caches[0].length[:, None] + torch.arange(inputs.shape[1], device=inputs.device)
            rotation = rotations(self.config, position)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, rotation, scores, None if caches is None else caches[index])
        return self.head(self.norm(hidden))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy in nats per byte."""
        return F.cross_entropy(self(inputs).flatten(0, 1).float(), targets.flatten())

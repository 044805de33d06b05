"""How large the model of the examples is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; `keep` is the number of keys that a query may see."""

    layers: int = 4
    dim: int = 192
    heads: int = 6
    kv_heads: int = 2
    keep: int = 64
    seqlen: int = 256

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

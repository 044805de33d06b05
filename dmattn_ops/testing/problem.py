"""Random problems: one attention call as a frozen row of data, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Problem:
    """One call of the library; its repr is the line that reproduces it."""

    seed: int = 0
    variant: str = "dense"  # dense, varlen, qkvpacked
    dtype: str = "float32"
    batch: int = 1
    heads: int = 1
    heads_k: int = 1
    seqlen_q: int = 8
    seqlen_k: int = 8
    dim: int = 16
    dim_v: int = 16
    layout: str = "bshd"  # bshd, bhsd (a transposed view), sliced (inside a larger buffer), strided (last stride 2)
    mask: str = ""  # "", random, block, rows (whole query rows empty), keys (whole keys unseen), none (nothing visible)
    mask_shape: str = "bhq"  # which of the first three dimensions are not broadcast; "k" stands for Hkv heads
    mask_dtype: str = "bool"
    prepared: bool = False  # through prepare_mask
    documents: bool = False
    bias: bool = False
    bias_shape: str = "bhq"
    bias_float32: bool = False
    nan_bias: bool = False  # NaN wherever no query sees the element
    is_causal: bool = False
    causal_from: str = "bottom_right"
    left: int | None = None
    right: int | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    magnitude: float = 1.0
    lse_grad: bool = False
    compiled: bool = False


def draw(seed: int, device: str = "cpu") -> Problem:
    """Draw a problem; the same seed gives the same problem on every machine."""
    random = Random(seed)
    on_gpu = device != "cpu"
    dtype = (
        random.of("float32", "float16", "bfloat16")
        if on_gpu
        else random.of("float64", "float32", "float32", "bfloat16", "float16")
    )
    variant = random.of("dense", "dense", "dense", "dense", "varlen", "qkvpacked")
    heads_k = random.of(1, 1, 2, 3)
    heads = heads_k * (1 if variant == "qkvpacked" else random.of(1, 1, 2, 4))
    longest = 700 if on_gpu else 300
    seqlen_q = random.of(
        0, 1, 2, 17, 63, 64, 127, 128, 129, 256, random.below(longest), random.below(longest), random.below(longest)
    )
    same = variant == "qkvpacked" or random.chance(0.5)
    seqlen_k = seqlen_q if same else random.of(0, 1, 3, 65, 128, 255, random.below(longest), random.below(longest))
    dim = random.of(1, 8, 16, 32, 40, 64, 64, 64, 80, 96, 128, 128, 192, 256, 1 + random.below(256))
    dim_v = dim if variant == "qkvpacked" or random.chance(0.7) else random.of(1, 8, 32, 64, 128, 1 + random.below(256))
    window = random.chance(0.25)
    mask = random.of("", "", "random", "random", "block", "block", "rows", "keys", "none")
    dense = variant != "varlen"
    documents = dense and seqlen_q == seqlen_k and random.chance(0.15)
    return Problem(
        seed=seed,
        variant=variant,
        dtype=dtype,
        batch=random.of(1, 1, 2, 3, 0 if random.chance(0.05) else 2),
        heads=heads,
        heads_k=heads_k,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        dim=dim,
        dim_v=dim_v,
        layout=random.of("bshd", "bshd", "bhsd", "sliced", "strided") if variant == "dense" else "bshd",
        mask=mask,
        mask_shape=random.of("bhq", "bq", "q", "hq", "bkq", "bh", "b", "k", "") if dense else random.of("h", "k", ""),
        mask_dtype=random.of("bool", "bool", "bool", "uint8", "int64", "float32"),
        prepared=dense and random.chance(0.4),
        documents=documents,
        bias=random.chance(0.45),
        bias_shape=random.of("bhq", "bq", "q", "hq", "bkq", "bh", "b", "k", "") if dense else random.of("h", "k", ""),
        bias_float32=random.chance(0.4),
        nan_bias=random.chance(0.3),
        is_causal=random.chance(0.45),
        causal_from=random.of("bottom_right", "bottom_right", "top_left"),
        left=random.below(longest // 2) if window and random.chance(0.7) else None,
        right=random.below(longest // 2) if window and random.chance(0.5) else None,
        softmax_scale=random.of(None, None, None, 0.3, 1.0 / max(dim, 1)),
        softcap=random.of(0.0, 0.0, 0.0, 5.0, 30.0),
        dropout_p=random.of(0.0, 0.0, 0.0, 0.0, 0.1, 0.5, 1.0),
        deterministic=random.chance(0.2),
        magnitude=random.of(1.0, 1.0, 1.0, 0.1, 3.0),
        lse_grad=random.chance(0.3),
    )


class Random:
    """Draws from a torch generator, so that a problem depends on its seed alone."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed * 2654435761 % (1 << 62))

    def below(self, limit: int) -> int:
        return int(torch.randint(max(limit, 1), (1,), generator=self.generator))

    def chance(self, probability: float) -> bool:
        return float(torch.rand(1, generator=self.generator)) < probability

    def of(self, *options: Any) -> Any:
        return options[self.below(len(options))]

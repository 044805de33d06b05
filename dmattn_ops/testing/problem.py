"""Random problems: one attention call as a frozen row of data, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

KERNELS = 48  # combinations of compiled features among 10000 problems for a GPU
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
    layout: str = (
        "bshd"  # bshd, bhsd (a transposed view), sliced (inside a larger buffer), strided (last stride 2), expanded
    )
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
    place: str = ""  # "", stream (a second one), threads (two at once), backward thread (forward in this one)


def draw(seed: int, device: str = "cpu") -> Problem:
    """Draw a problem; the same seed gives the same problem on every machine.

    On a GPU, where a new combination of features takes seconds to compile, seeds that differ by a multiple of `KERNELS`
    (and share their ten thousands) agree in what kernels are compiled for; sizes, strides and values differ freely.
    """
    on_gpu = device != "cpu"
    free = Random(seed)
    kernel = Random(-1 - (seed // 10000 * KERNELS + seed % KERNELS)) if on_gpu else free
    longest = 700 if on_gpu else 300
    variant, dtype, dim, dim_v = _draw_types(kernel, on_gpu)
    dense = variant != "varlen"
    seqlen_q = free.of(0, 1, 2, 17, 63, 64, 127, 128, 129, 256, *(free.below(longest) for _ in range(3)))
    seqlen_k = free.of(0, 1, 3, 65, 128, 255, free.below(longest), free.below(longest))
    documents = dense and kernel.chance(0.1)
    if variant == "qkvpacked" or documents or free.chance(0.5):
        seqlen_k = seqlen_q
    heads_k = free.of(1, 1, 2, 3)
    window = kernel.chance(0.25)
    return Problem(
        seed=seed,
        variant=variant,
        dtype=dtype,
        batch=free.of(1, 1, 2, 3, 0 if free.chance(0.05) else 2),
        heads=heads_k * (1 if variant == "qkvpacked" else kernel.of(1, 1, 2, 4)),
        heads_k=heads_k,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        dim=dim,
        dim_v=dim_v,
        layout=kernel.of("bshd", "bshd", "bhsd", "sliced", "strided", "expanded") if variant == "dense" else "bshd",
        mask=kernel.of("", "", "random", "random", "block", "block", "rows", "keys", "none"),
        mask_shape=_draw_shape(kernel.chance(0.6), dense, free),
        mask_dtype=kernel.of("bool", "bool", "bool", "uint8", "int64", "float32"),
        prepared=dense and free.chance(0.4),
        documents=documents,
        bias=kernel.chance(0.2 if _suits_hopper(dtype, dim, dim_v) else 0.6),
        bias_shape=_draw_shape(kernel.chance(0.6), dense, free),
        bias_float32=kernel.chance(0.4),
        nan_bias=free.chance(0.3),
        is_causal=kernel.chance(0.45),
        causal_from=kernel.of("bottom_right", "bottom_right", "top_left"),
        left=free.below(longest // 2) if kernel.chance(0.7) and window else None,
        right=free.below(longest // 2) if kernel.chance(0.5) and window else None,
        softmax_scale=free.of(None, None, None, 0.3, 1.0 / max(dim, 1)),
        softcap=kernel.of(0.0, 0.0, 0.0, 5.0, 30.0),
        dropout_p=free.of(0.1, 0.5, 1.0) if kernel.chance(0.3) else 0.0,
        deterministic=kernel.chance(0.2),
        magnitude=free.of(1.0, 1.0, 1.0, 0.1, 3.0),
        lse_grad=kernel.chance(0.3),
        place=free.of("", "", "", "stream", "threads", "backward thread"),
    )


def _draw_types(random: Random, on_gpu: bool) -> tuple[str, str, int, int]:
    """Draw `(variant, dtype, dim, dim_v)`."""
    dtypes = ("float32", "float16", "bfloat16") if on_gpu else ("float64", "float32", "float32", "bfloat16", "float16")
    variant = random.of("dense", "dense", "dense", "dense", "varlen", "qkvpacked")
    common = random.of(1, 8, 16, 32, 40, 64, 64, 64, 80, 96, 128, 128, 192, 256, 1 + random.below(256))
    dim = random.of(320, 512, 1024, 257 + random.below(768)) if random.chance(0.05) else common
    other = random.of(1, 8, 32, 64, 128, 1 + random.below(256), 300)
    return variant, random.of(*dtypes), dim, dim if variant == "qkvpacked" or random.chance(0.7) else other


def _suits_hopper(dtype: str, dim: int, dim_v: int) -> bool:
    """Return whether types fit the kernels of SM 9.0, which take no bias: so that many problems reach them."""
    return dtype in ("float16", "bfloat16") and dim == dim_v and dim % 8 == 0


def _draw_shape(of_queries: bool, dense: bool, random: Random) -> str:
    """Draw which dimensions a mask or bias has; varlen ones have no batch and no queries."""
    if not dense:
        return random.of("h", "k", "")
    return random.of("bhq", "bq", "q", "hq", "bkq") if of_queries else random.of("bh", "b", "k", "")


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

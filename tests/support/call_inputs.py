"""Small inputs of attention calls, in every layout that callers use."""

from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("bshd", "bhsd", "sbhd", "sliced", "strided")


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return the values of `[B, S, heads, D]` with other strides."""
    if layout == "bshd":
        return tensor.clone()
    if layout == "bhsd":  # a dense permutation: what projections with `view(...).transpose(1, 2)` give
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sbhd":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "sliced":  # as in a packed projection
        wide = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 3))
        wide[..., 1:-2] = tensor
        return wide[..., 1:-2]
    if layout == "strided":  # the last dimension is not contiguous
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")


def qkv(
    batch: int = 2,
    seqlen_q: int = 33,
    heads: int = 4,
    dim: int = 16,
    *,
    seqlen_k: int | None = None,
    heads_kv: int | None = None,
    dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    layout: str = "bshd",
    requires_grad: bool = True,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw query, key and value in `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    seqlen_k, heads_kv, dim_v = seqlen_k or seqlen_q, heads_kv or heads, dim_v or dim
    shapes = (batch, seqlen_q, heads, dim), (batch, seqlen_k, heads_kv, dim), (batch, seqlen_k, heads_kv, dim_v)
    query, key, value = (
        laid_out(torch.randn(shape, generator=generator).to(dtype), layout).requires_grad_(requires_grad)
        for shape in shapes
    )
    return query, key, value


def random_mask(*shape: int, keep: float = 0.6, seed: int = 1) -> Tensor:
    """Draw a bool mask."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < keep


def random_bias(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True, seed: int = 2) -> Tensor:
    """Draw a bias in `dtype`."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return drawn.requires_grad_(requires_grad)


def packed(lengths_q: list[int], lengths_k: list[int], **keywords: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Draw packed query, key and value, and what describes their lengths."""
    drawn = qkv(1, sum(lengths_q), seqlen_k=sum(lengths_k), **{"requires_grad": False, **keywords})
    rows = tuple(tensor[0].detach().requires_grad_(keywords.get("requires_grad", True)) for tensor in drawn)
    offsets = (
        torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    )
    return rows, (*offsets, max(lengths_q), max(lengths_k))

"""What adversarial calls of the operators are made of: inputs, masks whose tensors may be altered, and both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dmattn_ops
from dmattn_ops.call import MASK_TENSORS, UNBOUNDED, Mask

ops = torch.ops.dmattn
BATCH, HEADS, KV_HEADS, SEQLEN_Q, SEQLEN_K, DIM = 2, 4, 2, 300, 260, 32
LEAST, MOST = -(1 << 31), (1 << 31) - 1
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
INTEGERS = (-(1 << 63), -(1 << 62), -(1 << 31), -UNBOUNDED, -5, 0, 5, UNBOUNDED, 1 << 31, 1 << 62, (1 << 63) - 1)
REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError, OverflowError)
Change = Callable[[Tensor], Any]


class Wrong(Exception):
    """A call returned something else than it must."""


class Case(NamedTuple):
    """What is called; whether it must be refused (True), must not be (False), or either (None). `nan`: NaN is no fault."""

    name: str
    run: Callable[[], object]
    refused: bool | None = None
    nan: bool = False


def qkv(dtype: torch.dtype = torch.float32, **size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value; sizes by the names b, sq, sk, h, hk, d, dv."""
    n = {"b": BATCH, "sq": SEQLEN_Q, "sk": SEQLEN_K, "h": HEADS, "hk": KV_HEADS, "d": DIM} | size
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query, key = normal(n["b"], n["sq"], n["h"], n["d"]), normal(n["b"], n["sk"], n["hk"], n["d"])
    return query, key, normal(n["b"], n["sk"], n["hk"], n.get("dv", n["d"]))


def keep(*shape: int) -> Tensor:
    """Return a mask with wholly and partly visible tiles."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[..., :128, :128] = True
    return mask


def bits(**size: int) -> Mask:
    """Return a mask of bits; sizes by the names sq and sk."""
    return dmattn_ops.prepare_mask(keep(BATCH, KV_HEADS, size.get("sq", SEQLEN_Q), size.get("sk", SEQLEN_K))).mask


def segments() -> Mask:
    """Return a mask of segments whose tiles are listed."""
    return dmattn_ops.prepare_mask(keep(BATCH, KV_HEADS, 1, SEQLEN_K), seqlen_q=SEQLEN_Q).mask


def intervals() -> Mask:
    """Return a mask of intervals, a part of each hidden."""
    start = torch.arange(SEQLEN_K, dtype=torch.int32).expand(BATCH, KV_HEADS, -1).contiguous()
    return Mask(start=start, end=start + 90, hidden_from=start + 5, hidden_to=start + 9, at_most=90)


KINDS: dict[str, Callable[[], Mask]] = {"bits": bits, "segments": segments, "intervals": intervals}


def copied(mask: Mask) -> dict[str, Any]:
    """Return the arguments of a mask, each tensor a copy."""
    tensors = {name: getattr(mask, name) for name in MASK_TENSORS}
    return {name: part if part is None else part.clone() for name, part in tensors.items()} | {"at_most": mask.at_most}


def forward(mask: dict[str, Any] | None = None, inputs: Any = None, **others: Any) -> Any:
    return ops.forward(*(inputs or qkv()), **(mask or {}), **others)


def backward(mask: dict[str, Any] | None = None, good: Any = None, inputs: Any = None, **others: Any) -> Any:
    """Run the backward after a forward with a good mask; `others` are changes of its arguments, or more of them."""
    inputs = inputs or qkv()
    numbers = {name: others[name] for name in ("band_lo", "band_hi", "bias", "seed", "dropout_p") if name in others}
    out, lse, tail, _ = ops.forward(*inputs, **((mask if good is None else good) or {}), **numbers)
    given = {"grad_out": torch.ones_like(out), "grad_lse": None, "out": out, "lse": lse, "lse_tail": tail}
    for name in given:
        change = others.pop(name, None)
        given[name] = given[name] if change is None else change(lse if name == "grad_lse" else given[name])
    return ops.backward(**given, **dict(zip(("query", "key", "value"), inputs, strict=True)), **(mask or {}), **others)


def freed(tensor: Tensor) -> Tensor:
    """Return a tensor without memory."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor

"""Problems for dynamic masks across ranks: on one process, and on ranks that share the sequence. `compare` runs on every rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import ranks
import torch
import torch.distributed as dist
from context_cases import error
from torch import Tensor

from dmattn_ops import dynamic_mask, flash_dmattn_func
from dmattn_ops.distributed import dynamic_context_attention, shard_sequence

SEQUENCE = (1, 1, 1, 2, 3)  # the dimension of the sequence of query, key, value, scores and bias


class Case(NamedTuple):
    """A call, and sizes; `length` is that of a rank's part."""

    keep: int = 40
    exchange: str = "counts"
    score_heads: str = "k"  # "1", "k" or "q"
    score_batch: int = 1
    bias: str = "scores"  # "none", "scores", "1", "k" or "q"
    batch: int = 2
    heads: int = 4
    heads_kv: int = 2
    length: int = 150
    dim: int = 16
    dim_v: int = 24
    dtype: torch.dtype = torch.float32
    slope: float = 0.0  # by how much scores rise over the sequence: late keys live
    documents: bool = False
    compiled: str = ""  # the backend of torch.compile
    sink: bool = False
    keywords: tuple[tuple[str, Any], ...] = ()
    seed: int = 0


def inputs_of(case: Case, world: int) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Draw query, key, value, scores, bias (or scores again) and sink; the gradient of out; documents."""
    torch.manual_seed(case.seed + 3)
    total, device = case.length * world, ranks.device()

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device, case.dtype)

    of_heads = {"1": 1, "k": case.heads_kv, "q": case.heads}
    scores = draw(case.score_batch, of_heads[case.score_heads], total)
    scores = scores + case.slope * torch.linspace(0, 1, total, dtype=case.dtype, device=device)
    scores[..., ::7] = scores[..., 3:4]  # equal ones
    found = [draw(case.batch, total, case.heads, case.dim)]
    found += [draw(case.batch, total, case.heads_kv, size) for size in (case.dim, case.dim_v)]
    found.append(scores)
    if case.bias in of_heads:
        found.append(draw(1 if case.seed % 2 else case.batch, of_heads[case.bias], 1, total))
    if case.sink:
        found.append(draw(case.heads))
    ids = torch.arange(total, device=device).unsqueeze(0) // 97 if case.documents else None
    return found, draw(case.batch, total, case.heads, case.dim_v), ids


def arguments(tensors: list[Tensor], case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    """Return query, key, value and scores; bias and sink by name."""
    more = tensors[4:]
    bias = None
    if case.bias == "scores":
        bias = tensors[3].unsqueeze(2)
    elif case.bias != "none":
        bias = more.pop(0)
    return tensors[:4], {"bias": bias, "sink": more.pop(0) if case.sink else None, "return_lse": True}


def compare(case: Case) -> dict[str, float]:
    """Return the errors of out, lse and all gradients, relative to the largest element; runs on every rank."""
    world = dist.get_world_size()
    whole, grad, ids = inputs_of(case, world)
    selection = {name: value for name, value in case.keywords if name.startswith("keep_")}
    others = {name: value for name, value in case.keywords if name not in selection}
    leaves = [tensor.clone().requires_grad_() for tensor in whole]
    (query, key, value, scores), more = arguments(leaves, case)
    torch.manual_seed(5)
    mask = dynamic_mask(scores.detach(), case.keep, documents=ids, **selection)
    expected = flash_dmattn_func(query, key, value, mask, **more, **others)
    wanted = gradients(expected, grad, leaves)
    own = [part(tensor, place, case).clone().requires_grad_() for place, tensor in enumerate(whole)]
    tensors, more = arguments(own, case)
    attend = dynamic_context_attention
    if case.compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, fullgraph=True, dynamic=False, backend=case.compiled)
    own_ids = None if ids is None else shard_sequence(ids, None, layout="contiguous")
    torch.manual_seed(5 + dist.get_rank())  # the first rank's numbers count
    found = attend(
        *tensors, case.keep, group=None, documents=own_ids, exchange=case.exchange, **more, **dict(case.keywords)
    )
    got = gradients(found, shard_sequence(grad, None, layout="contiguous"), own)
    errors = {"out": error(found[0], shard_sequence(expected[0], None, layout="contiguous"))}
    errors["lse"] = error(found[1], shard_sequence(expected[1], None, dim=2, layout="contiguous"))
    for place, (one, other) in enumerate(zip(wanted, got, strict=True)):
        if one is None or other is None:
            errors[f"gradient {place}"] = 0.0 if one is other else float("inf")
            continue
        if one.dim() == 1:
            other = ranks.summed(other)
        errors[f"gradient {place}"] = error(other, part(one, place, case))
    return errors


def part(tensor: Tensor, place: int, case: Case) -> Tensor:
    """Return this rank's part of an input, or of its gradient."""
    if tensor.dim() == 1:
        return tensor
    return shard_sequence(tensor, None, dim=SEQUENCE[place], layout="contiguous")


def gradients(outputs: Any, grad: Tensor, inputs: list[Tensor]) -> list[Tensor | None]:
    """Return the gradients through out and lse; None for scores that are not the bias."""
    out, lse = outputs
    of_lse = grad.sum(-1).transpose(1, 2).to(lse.dtype)
    lse = torch.where(lse == -torch.inf, 0.0, lse)
    return list(torch.autograd.grad((out, lse), inputs, (grad, of_lse), allow_unused=True))

"""Calls on DTensors and the same calls on one device. A rank makes both from one seed and says how far they are apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ranks
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dmattn_ops import (
    dynamic_mask,
    flash_dmattn_func,
    flash_dmattn_qkvpacked_func,
    flash_dmattn_varlen_func,
    prepare_mask,
)

CLOSE = 2e-5  # of the largest element; float32 on both sides


class Case(NamedTuple):
    """A kind of call, its sizes, and what is split over each dimension of the mesh: "batch", "heads", "length" or "none"."""

    kind: str
    split: Sequence[str]
    batch: int = 2
    heads: int = 4
    heads_kv: int = 2
    length: int = 192
    compiled: str | None = None


class Report(NamedTuple):
    """What one rank saw: the error of each tensor relative to its largest element, and where outputs and gradients were."""

    errors: dict[str, float]
    placements: dict[str, str]


def mesh_of(*sizes: int) -> DeviceMesh:
    """Return a mesh of all ranks; of one dimension unless told otherwise."""
    import torch.distributed as dist

    return init_device_mesh(ranks.device().type, sizes or (dist.get_world_size(),))


def tensors_of(case: Case) -> dict[str, Tensor]:
    """Return the tensors of a call by the names of its arguments, and the gradients of out and lse."""
    batch, heads, heads_kv, length, dim = case.batch, case.heads, case.heads_kv, case.length, 32
    made = {
        "query": torch.randn(batch, length, heads, dim),
        "key": torch.randn(batch, length, heads_kv, dim),
        "value": torch.randn(batch, length, heads_kv, dim),
        "grad_out": torch.randn(batch, length, heads, dim),
        "grad_lse": torch.randn(batch, heads, length),
    }
    shapes = {
        "mask of keys": (batch, heads_kv, 1, length),
        "mask of keys, one head": (batch, 1, 1, length),
        "dense mask": (batch, heads, length, length),
        "dense mask for all": (1, 1, length, length),
        "prepared mask": (batch, heads_kv, length, length),
        "bias of keys": (batch, heads_kv, 1, length),
        "bias for all": (1, 1, length, length),
        "bias for all sequences": (1, heads, length, length),
        "dynamic mask": (batch, heads_kv, 1, length),
        "dynamic mask with documents": (batch, heads_kv, 1, length),
        "dropout": (batch, 1, 1, length),
    }
    shape = shapes.get(case.kind)
    if shape is not None and "bias" in case.kind:
        made["bias"] = torch.randn(shape)
    elif shape is not None and "dynamic" in case.kind:
        made["scores"] = torch.randn(shape)
    elif shape is not None:
        made["mask"] = torch.rand(shape) > 0.4
    if "documents" in case.kind:
        made["documents"] = torch.sort(torch.randint(0, 3, (batch, length)), -1).values
    if case.kind == "intervals":
        start = torch.randint(0, length, (batch, heads_kv, length), dtype=torch.int32)
        made |= {"start": start, "end": start + length // 2}
    if case.kind == "sink":
        made["sink"] = torch.randn(heads)
    return {name: tensor.to(ranks.device()) for name, tensor in made.items()}


def dim_of(name: str, split: str) -> int | None:
    """Return which dimension of a tensor is split."""
    if name in ("query", "key", "value", "grad_out"):
        return {"batch": 0, "length": 1, "heads": 2}.get(split)
    if name == "sink":
        return 0 if split == "heads" else None
    if name == "documents":
        return 0 if split == "batch" else None
    return {"batch": 0, "heads": 1}.get(split)


def shard(name: str, tensor: Tensor, mesh: DeviceMesh, split: Sequence[str]) -> DTensor:
    """Return a DTensor, split where its own size is not 1."""
    dims = [dim_of(name, each) for each in split]
    placements = [Replicate() if dim is None or tensor.shape[dim] == 1 else Shard(dim) for dim in dims]
    return distribute_tensor(tensor, mesh, placements)


def call(kind: str, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Call the public function as the kind of a case says."""
    query, key, value = given["query"], given["key"], given["value"]
    length = query.shape[1]
    mask, bias, keywords = given.get("mask"), given.get("bias"), {}
    if kind == "prepared mask":
        mask = prepare_mask(mask, is_causal=True)
    elif kind == "documents":
        mask = prepare_mask(documents=given["documents"])
    elif kind == "mask of keys and documents":
        mask = prepare_mask(given["mask"], documents=given["documents"])
    elif kind == "intervals":
        mask = prepare_mask(intervals=(given["start"], given["end"]), seqlen_q=length)
    elif "scores" in given:
        bias = given["scores"]
        mask = dynamic_mask(bias.squeeze(2), 24, keep_first=2, keep_last=8, documents=given.get("documents"))
    if kind == "dropout":
        keywords["dropout_p"] = 0.3
    if kind == "window":
        keywords["window_size"] = (40, 3)
    return flash_dmattn_func(
        query, key, value, mask, bias, is_causal=True, sink=given.get("sink"), return_lse=True, **keywords
    )


def outcome(case: Case, given: dict[str, Tensor], attend: Any) -> dict[str, Tensor]:
    """Return out, lse and the gradients of a call."""
    leaves = {
        name: tensor.detach().requires_grad_()
        for name, tensor in given.items()
        if name in ("query", "key", "value", "bias", "scores", "sink")
    }
    torch.manual_seed(11)  # of dropout
    out, lse = attend(case.kind, {**given, **leaves})
    finite = lse.masked_fill(lse == float("-inf"), 0.0)
    ((out * given["grad_out"]).sum() + (finite * given["grad_lse"]).sum()).backward()
    return {"out": out, "lse": lse, **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}


def compare(case: Case, *sizes: int) -> Report:
    """Compute a case on DTensors over a mesh and on one device; return how far they are apart, on this rank."""
    mesh = mesh_of(*sizes)
    whole = tensors_of(case)
    parts = {name: shard(name, tensor, mesh, case.split) for name, tensor in whole.items()}
    attend: Any = call
    if case.compiled is not None:
        torch._dynamo.reset()
        attend = torch.compile(call, fullgraph=True, backend=case.compiled)
    expected, got = outcome(case, whole, call), outcome(case, parts, attend)
    placements = {name: str(tuple(tensor.placements)) for name, tensor in got.items()}
    errors = {name: relative(tensor.full_tensor(), expected[name]) for name, tensor in got.items()}
    return Report(errors, placements)


def relative(got: Tensor, expected: Tensor) -> float:
    """Return the largest error relative to the largest expected element; infinite where infinities differ."""
    if got.shape != expected.shape or not torch.equal(got.isfinite(), expected.isfinite()):
        return float("inf")
    finite = expected.isfinite()
    if not finite.any():
        return 0.0
    error = (got[finite] - expected[finite]).abs().max() / expected[finite].abs().max().clamp_min(1e-30)
    return error.item()

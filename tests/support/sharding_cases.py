"""Calls on DTensors and the same calls on one device. A rank makes both from one seed and says how far they are apart."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import ranks
import torch
import torch.distributed as dist
from far_away import values_out_of_reach
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from dmattn_ops import (
    TileMask,
    dynamic_mask,
    flash_dmattn_func,
    flash_dmattn_qkvpacked_func,
    flash_dmattn_varlen_func,
    key_mass,
    prepare_mask,
    selection_mask,
    selection_mass,
)

DIM = 16
LEAVES = ("query", "key", "value", "qkv", "bias", "scores", "sink")
# Shapes of what stands beside query, key and value: b, h and g are the batch, the heads of query and those of key, s the length.
BESIDE = {
    "mask of keys": {"mask": "bg1s"},
    "mask of keys, one head": {"mask": "b11s"},
    "dense mask": {"mask": "bhss"},
    "dense mask of key heads": {"mask": "bgss"},
    "dense mask for all": {"mask": "11ss"},
    "prepared mask": {"mask": "bgss"},
    "prepared mask of keys": {"mask": "bg1s"},
    "part of a prepared mask": {"mask": "bgss"},
    "documents": {"documents": "bs"},
    "documents and a mask of keys": {"documents": "bs", "mask": "b11s"},
    "intervals": {"start": "bgs"},
    "intervals in documents": {"start": "bgs", "documents": "bs"},
    "hidden intervals in documents": {"start": "bgs", "documents": "bs"},
    "intervals in two kinds of documents": {"start": "bgs", "documents": "bs"},
    "intervals and a mask": {"start": "bgs", "mask": "bhss"},
    "intervals and a mask of keys": {"start": "b1s", "mask": "bg1s", "documents": "bs"},
    "bias of keys": {"bias": "bg1s"},
    "bias for all": {"bias": "11ss"},
    "bias for all sequences": {"bias": "1hss"},
    "bias for all heads": {"bias": "b1ss"},
    "dynamic mask": {"scores": "bg1s"},
    "dynamic mask with documents": {"scores": "bg1s", "documents": "bs"},
    "dropout": {"mask": "b11s"},
    "sink": {"sink": "h"},
    "used keys": {"used": "b", "mask": "b1ss"},
    "packed qkv": {"mask": "bh1s", "bias": "1hss"},
    "packed sequences": {"mask": "gs", "bias": "hs", "sink": "h"},
    "packed sequences, dropout": {"bias": "1s"},
}


class Case(NamedTuple):
    """A kind of call, what is split over each dimension of the mesh ("batch", "heads", "length" or "none"), and sizes.

    `apart` names tensors that are split in another way than the others. With `far` the host reads no values, as on a GPU.
    """

    kind: str
    split: Sequence[str]
    batch: int = 2
    heads: int = 4
    heads_kv: int = 2
    length: int = 160
    compiled: str | None = None
    apart: dict[str, Sequence[str]] = {}  # noqa: RUF012 - never changed
    far: bool = False


class Report(NamedTuple):
    """What one rank saw: the error of each tensor relative to its largest element, and the placements of each."""

    errors: dict[str, float]
    placements: dict[str, tuple[Placement, ...]]


def mesh_of(*sizes: int) -> DeviceMesh:
    """Return a mesh of all ranks; of one dimension unless told otherwise."""
    return init_device_mesh(ranks.device().type, sizes or (dist.get_world_size(),))


def tensors_of(case: Case) -> dict[str, Tensor]:
    """Return the tensors of a call by their names, the gradients of out and lse among them."""
    torch.manual_seed(0)
    sizes = {"b": case.batch, "h": case.heads, "g": case.heads_kv, "s": case.length, "d": DIM, "1": 1, "3": 3}
    packed = case.kind.startswith("packed sequences")
    shapes = {"query": "bshd", "key": "bsgd", "value": "bsgd", "grad_out": "bshd", "grad_lse": "bhs"}
    if packed:
        shapes = {"query": "shd", "key": "sgd", "value": "sgd", "grad_out": "shd", "grad_lse": "hs"}
    if case.kind == "packed qkv":
        shapes = {"qkv": "bs3hd", "grad_out": "bshd", "grad_lse": "bhs"}
    made = {}
    for name, letters in {**shapes, **BESIDE.get(case.kind, {})}.items():
        made[name] = torch.randn([sizes[letter] for letter in letters])
        if name == "mask":
            made[name] = made[name] > -0.3
        elif name == "documents":
            made[name] = made[name].abs().mul(1.5).long().sort(-1).values
        elif name == "start":
            made[name] = made[name].abs().mul(case.length / 2).to(torch.int32)
        elif name == "used":
            made[name] = made[name].abs().mul(case.length / 2).clamp(max=case.length).to(torch.int32)
    if packed:
        made["offsets"] = torch.tensor([0, case.length // 3, case.length], dtype=torch.int32)
    return {name: tensor.to(ranks.device()) for name, tensor in made.items()}


def dim_of(name: str, split: str, dims: int) -> int | None:
    """Return which dimension of a tensor is split."""
    if name in ("offsets", "documents") or split == "none":
        return 0 if split == "batch" and name == "documents" else None
    if name == "used":
        return 0 if split == "batch" else None
    if name == "sink":
        return 0 if split == "heads" else None
    if name == "qkv":
        return {"batch": 0, "length": 1, "heads": 3}[split]
    rows = name in ("query", "key", "value", "grad_out")  # [B, S, heads, D], or without B; the others [B, heads, ..]
    packed = dims == 3 if rows else dims == 2
    if packed:
        return {"heads": 1 if rows else 0, "length": 0 if rows else None}.get(split)
    return {"batch": 0, "heads": 2 if rows else 1, "length": 1 if rows else None}[split]


def shard(name: str, tensor: Tensor, mesh: DeviceMesh, split: Sequence[str]) -> DTensor:
    """Return a DTensor, split where its own size is not 1."""
    dims = [dim_of(name, each, tensor.dim()) for each in split]
    broadcast = name not in ("query", "key", "value", "qkv", "grad_out", "grad_lse")
    placements = [Replicate() if dim is None or (broadcast and tensor.shape[dim] == 1) else Shard(dim) for dim in dims]
    return distribute_tensor(tensor, mesh, placements)


def call(kind: str, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Call the public function of a kind of case; return out, lse and the maximum."""
    mask, bias, sink = given.get("mask"), given.get("bias"), given.get("sink")
    keywords: dict[str, Any] = {"is_causal": True, "sink": sink, "return_lse": True, "return_max": True}
    keywords["dropout_p"] = 0.3 if "dropout" in kind else 0.0
    if "used" in given:
        keywords["seqlen_k_used"] = given["used"]
    if kind == "window":
        keywords["window_size"] = (40, 3)
    if kind == "packed qkv":
        return flash_dmattn_qkvpacked_func(given["qkv"], mask, bias, **keywords)
    query, key, value = given["query"], given["key"], given["value"]
    length = query.shape[-3]
    if kind.startswith("packed sequences"):
        offsets = given["offsets"]
        return flash_dmattn_varlen_func(
            query, key, value, offsets, offsets, length, length, mask, bias, **keywords
        )  # fmt: skip
    if kind == "prepared mask":
        mask = prepare_mask(mask, is_causal=True)
    elif kind == "prepared mask of keys":
        mask = prepare_mask(mask, seqlen_q=length)
    elif kind == "part of a prepared mask":
        mask = prepare_mask(mask, is_causal=True).queries(32, length)
        query = query[:, 32:]
    elif "dynamic" in kind:
        bias = given["scores"]
        mask = dynamic_mask(bias.squeeze(2), 24, keep_first=2, keep_last=8, documents=given.get("documents"))
    elif kind.startswith("documents"):
        mask = prepare_mask(mask, documents=given["documents"])
    elif "start" in given:
        mask = mask_of_intervals(kind, given, length)
    return flash_dmattn_func(query, key, value, mask, bias, **keywords)


def mask_of_intervals(kind: str, given: dict[str, Any], length: int) -> TileMask:
    """Prepare a mask of intervals and of what stands beside them."""
    start, documents = given["start"], given.get("documents")
    beside: dict[str, Any] = {"documents": documents, "seqlen_q": length}
    if documents is not None and "two kinds" in kind:
        beside["documents"] = documents, documents + documents % 2  # of queries and of keys
    if "hidden" in kind:
        beside["hidden"] = start + 5, start + 20
    if "two kinds" in kind or "hidden" in kind:
        beside["at_most"] = length
    return prepare_mask(given.get("mask"), intervals=(start, start + length // 2), **beside)


def outcome(case: Case, given: dict[str, Any], attend: Any) -> dict[str, Tensor]:
    """Return out, lse, the maximum and the gradients of a call."""
    leaves = {name: given[name].detach().requires_grad_() for name in LEAVES if name in given}
    torch.manual_seed(11)  # of dropout
    out, lse, row_max = attend(case.kind, {**given, **leaves})
    grad_out, grad_lse = given["grad_out"], given["grad_lse"]
    if case.kind == "part of a prepared mask":
        grad_out, grad_lse = grad_out[:, 32:], grad_lse[..., 32:]
    finite = lse.masked_fill(lse == float("-inf"), 0.0)
    ((out * grad_out).sum() + (finite * grad_lse).sum()).backward()
    return {"out": out, "lse": lse, "row_max": row_max, **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}


def compare(case: Case, *sizes: int) -> Report:
    """Compute a case on DTensors over a mesh and on one device; return how far they are apart, on this rank."""
    mesh = mesh_of(*sizes)
    whole = tensors_of(case)
    parts = {name: shard(name, each, mesh, case.apart.get(name, case.split)) for name, each in whole.items()}
    attend: Any = call
    if case.compiled is not None:
        torch._dynamo.reset()
        attend = torch.compile(call, fullgraph=True, backend=case.compiled)
    expected = outcome(case, whole, call)
    with values_out_of_reach() if case.far else nullcontext():
        got = outcome(case, parts, attend)
    placements = {name: tuple(tensor.placements) for name, tensor in got.items()}
    return Report({name: relative(each.full_tensor(), expected[name]) for name, each in got.items()}, placements)


def relative(got: Tensor, expected: Tensor) -> float:
    """Return the largest error relative to the largest expected element; infinite where infinities differ."""
    finite = expected.isfinite()
    if got.shape != expected.shape or not torch.equal(got.isfinite(), finite):
        return float("inf")
    if not finite.any():
        return 0.0
    error = (got[finite] - expected[finite]).abs().max() / expected[finite].abs().max().clamp_min(1e-30)
    return error.item()


def gradients_that_arrive_otherwise() -> float:
    """Return the largest error of gradients where the gradient of out is replicated, or a part of a sum on each rank."""
    mesh, case = mesh_of(), Case("plain", ["heads"])
    whole = tensors_of(case)
    leaves = {name: shard(name, whole[name], mesh, case.split).requires_grad_() for name in ("query", "key", "value")}
    plain = {name: whole[name].clone().requires_grad_() for name in leaves}
    expected = torch.autograd.grad(flash_dmattn_func(**plain), list(plain.values()), whole["grad_out"])
    out = flash_dmattn_func(**leaves)
    worst = 0.0
    for share, placement in ((1.0, Replicate()), (1.0 / mesh.size(), Partial())):
        grad = DTensor.from_local(whole["grad_out"] * share, mesh, [placement])
        found = torch.autograd.grad(out, list(leaves.values()), grad, retain_graph=True)
        worst = max(worst, *(relative(a.full_tensor(), b) for a, b in zip(found, expected, strict=True)))
    return worst


def dropout_where_generators_differ() -> tuple[Tensor, Tensor, Tensor]:
    """Return a replicated output under dropout, heads that were split, and the next number of the generator."""
    mesh = mesh_of()
    ones = torch.ones(1, 64, 4, DIM, device=ranks.device())
    eye = torch.eye(64, device=ranks.device())[None, :, None, :].expand(1, 64, 4, 64)  # out shows what is dropped
    torch.manual_seed(5 + dist.get_rank())
    found = []
    for placement in (Replicate(), Shard(2)):
        query, value = (distribute_tensor(each, mesh, [placement]) for each in (ones, eye.contiguous()))
        found.append(flash_dmattn_func(query, query, value, dropout_p=0.5))
    return found[0].to_local(), found[1].full_tensor(), torch.rand(1)


def plain_mask(prepared: bool) -> Tensor:
    """Pass a plain mask beside DTensors."""
    mesh, case = mesh_of(), Case("mask of keys", ["heads"])
    whole = tensors_of(case)
    query, key, value = (shard(name, whole[name], mesh, case.split) for name in ("query", "key", "value"))
    mask = whole["mask"]
    return flash_dmattn_func(query, key, value, prepare_mask(mask, seqlen_q=case.length) if prepared else mask)


def sharded_mask_beside_plain_tensors() -> Tensor:
    """Pass a DTensor as a mask beside plain tensors."""
    whole = tensors_of(Case("mask of keys", ["heads"]))
    mask = distribute_tensor(whole["mask"], mesh_of(), [Replicate()])
    return flash_dmattn_func(whole["query"], whole["key"], whole["value"], mask)


def plain_mask_replicated_implicitly() -> float:
    """Return the error of a plain mask beside DTensors where torch is told to take it as replicated."""
    whole = tensors_of(Case("mask of keys", ["heads"]))
    expected = flash_dmattn_func(whole["query"], whole["key"], whole["value"], whole["mask"])
    with implicit_replication():
        return relative(plain_mask(prepared=False).full_tensor(), expected)


def operators_called_directly() -> list[float]:
    """Return the errors of `torch.ops.dmattn.forward` on DTensors, with seeds of dropout split as lse is, and for all heads."""
    import dmattn_ops.distributed  # noqa: F401 - registers the rules

    mesh, whole = mesh_of(), tensors_of(Case("plain", ["heads"]))
    found = []
    for shape in ((2, 4), (1, 4), (2, 1), (1, 1)):
        seed = torch.randint(1 << 62, shape, device=ranks.device())
        given = {name: whole[name] for name in ("query", "key", "value")} | {"seed": seed}
        expected = torch.ops.dmattn.forward(**given, dropout_p=0.4)[0]
        for split in ("heads", "batch"):
            parts = {name: shard(name, tensor, mesh, [split]) for name, tensor in given.items()}
            got = torch.ops.dmattn.forward(**parts, dropout_p=0.4)[0]
            found.append(relative(got.full_tensor(), expected))
    return found


def masks_of_dtensors() -> list[bool]:
    """Return whether masks prepared from DTensors, and their densities, are those prepared on one device."""
    mesh, found = mesh_of(), []
    given = tensors_of(Case("dense mask", ["heads"])) | tensors_of(Case("dynamic mask with documents", ["heads"]))

    def made(given: dict[str, Tensor]) -> list[TileMask]:
        scores, documents = given["scores"].squeeze(2), given["documents"]
        return [
            prepare_mask(given["mask"], window_size=(50, 0)),
            prepare_mask(documents=documents),
            dynamic_mask(scores, 20, keep_last=4),
            dynamic_mask(scores, 20, documents=documents).queries(20, 60),
        ]

    for split in ("none", "batch", "heads"):
        parts = {name: shard(name, tensor, mesh, [split]) for name, tensor in given.items()}
        for one, other in zip(made(parts), made(given), strict=True):
            found.append(torch.equal(one.to_dense().full_tensor(), other.to_dense()))
            found.append(torch.allclose(one.density().full_tensor(), other.density()))
    return found


def chosen_blocks_of_dtensors() -> list[float]:
    """Return how far masks of chosen blocks and masses of DTensors are from those of one device."""
    mesh, found = mesh_of(), []
    torch.manual_seed(0)
    for heads_kv, list_heads in ((2, 1), (2, 2), (2, 4), (1, 1), (1, 4)):
        query, key = torch.randn(2, 40, 4, 8), torch.randn(2, 40, heads_kv, 8)
        indices = torch.randint(-1, 10, (2, list_heads, 40, 3))
        documents = (torch.arange(40) // 15)[None].expand(2, -1).contiguous()
        given = {"query": query, "key": key, "indices": indices, "documents": documents}
        given = {name: tensor.to(ranks.device()) for name, tensor in given.items()}

        def made(query: Tensor, key: Tensor, indices: Tensor, documents: Tensor) -> list[Tensor]:
            mask = selection_mask(indices, block=4, documents=documents)
            mass = selection_mass(query, key, indices, block=4, documents=documents)
            return [mask.to_dense().float(), mass, key_mass(query, key, mask), key_mass(query, key, is_causal=True)]

        for split in ("none", "batch", "heads"):
            parts = {name: shard(name, tensor, mesh, [split]) for name, tensor in given.items()}
            for one, other in zip(made(**parts), made(**given), strict=True):
                found.append(relative(one.full_tensor(), other))
    return found

"""Calls whose results are compared bit by bit: a batch, parts of it, and the same entries among other neighbours."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dmattn_ops
from dmattn_ops import TileMask

ROWS = ("query", "key", "value")
MASKS = ("none", "dense", "shared", "padding", "documents", "dynamic", "folded")


class Batch(NamedTuple):
    """What a call is given: tensors with a batch of their own, or of 1."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | TileMask | None
    bias: Tensor | None
    sink: Tensor | None

    def part(self, first: int, stop: int) -> Batch:
        """Return the call of some entries."""

        def cut(given: Any) -> Any:
            if isinstance(given, TileMask):
                return given.batch(first, stop)
            return given if given is None or given.shape[0] == 1 else given[first:stop]

        return Batch(*map(cut, self[:5]), self.sink)

    def among_others(self, entry: int) -> Batch:
        """Return a call with that entry alone unchanged; all others hold huge numbers, which every sum could feel."""
        return self.changed(entry, lambda tensor: torch.full_like(tensor, 60.0))

    def changed(self, entry: int, change: Callable[[Tensor], Tensor], names: tuple[str, ...] = ROWS) -> Batch:
        """Return a call whose entries, but for that one, hold in these tensors what `change` makes of them."""
        made = {name: change(getattr(self, name)) for name in names}
        for name, other in made.items():
            other[entry] = getattr(self, name)[entry]
        return self._replace(**made)


def draw(
    seed: int, kind: str, batch: int = 4, dtype: torch.dtype = torch.float32, device: str = "cpu", longest: int = 300
) -> Batch:
    """Draw a call with a mask of that kind."""
    random = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=random))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype).to(device)

    heads_kv, group, dim = 1 + below(3), 1 + below(2), (16, 20, 64)[below(3)]
    heads = heads_kv * group
    seqlen_q, seqlen_k = (1, 7, 128, 1 + below(longest))[below(4)], 1 + below(longest)
    if kind in ("documents", "dynamic"):
        seqlen_q = seqlen_k
    keep = (torch.rand(batch, heads_kv, seqlen_q, seqlen_k, generator=random) < 0.6).to(device)
    mask: Tensor | TileMask | None = None
    if kind == "dense":
        mask = keep
    elif kind == "shared":
        mask = keep[:1, :1]
    elif kind == "padding":
        mask = dmattn_ops.prepare_mask(keep[:, 0, 0], seqlen_q=seqlen_q)
    elif kind == "documents":
        ids = torch.randint(3, (batch, seqlen_q), generator=random).sort(-1).values.to(device)
        mask = dmattn_ops.prepare_mask(documents=ids)
    elif kind == "dynamic":
        mask = dmattn_ops.dynamic_mask(normal(batch, heads_kv, seqlen_k).float(), 30, keep_last=4)
    elif kind == "folded":
        mask = dmattn_ops.prepare_mask(keep, seqlen_q=seqlen_q, is_causal=True)
    shapes = (None, (batch, 1, 1, seqlen_k), (batch, heads, seqlen_q, seqlen_k), (1, 1, seqlen_q, seqlen_k))
    shape = shapes[below(4)]
    bias, sink = None if shape is None else normal(*shape), normal(heads) if below(2) else None
    rows = (seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv)
    query, key, value = (normal(batch, *each, dim) for each in rows)
    return Batch(query, key, value, mask, bias, sink)


def of_kind(
    kind: str, batch: int, seqlen: int, heads: tuple[int, int], dim: int, device: str
) -> tuple[Batch, dict[str, Any]]:
    """Return a call in bfloat16 of a kind of mask or band, with `heads` of queries and of keys, and its keywords."""
    random = torch.Generator().manual_seed(seqlen + dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device, torch.bfloat16)

    query, key, value = (normal(batch, seqlen, each, dim) for each in (heads[0], heads[1], heads[1]))
    mask: Tensor | TileMask | None = None
    bias = None
    if kind == "bits":
        mask = (torch.rand(batch, heads[1], seqlen, seqlen, generator=random) < 0.6).to(device)
    elif kind == "documents":
        ids = torch.randint(4, (batch, seqlen), generator=random).sort(-1).values.to(device)
        mask = dmattn_ops.prepare_mask(documents=ids)
    elif kind == "dynamic":
        mask = dmattn_ops.dynamic_mask(normal(batch, heads[1], seqlen).float(), seqlen // 4)
    elif kind == "key bias":
        bias = normal(batch, heads[1], 1, seqlen)
    elif kind == "bias":
        bias = normal(batch, 1, seqlen, seqlen)
    keywords: dict[str, Any] = {"is_causal": kind in ("causal", "documents", "soft cap", "key bias")}
    if kind == "window":
        keywords["window_size"] = (100, 20)
    elif kind == "soft cap":
        keywords["softcap"] = 20.0
    return Batch(query, key, value, mask, bias, None), keywords


def check_neighbours(
    given: Batch, change: Callable[[Tensor], Tensor], names: tuple[str, ...] = ROWS, **keywords: Any
) -> None:
    """Compare entries with themselves alone, and among neighbours that `change` has made; and those of them with theirs alone."""
    batch = given.query.shape[0]
    for entry in (0, batch - 1):
        others = given.changed(entry, change, names)
        together = results(others, **keywords)
        for number in (entry, batch - 1 - entry):
            alone = results(others.part(number, number + 1), number, **keywords)
            for name, found in alone.items():
                if name in together:
                    assert bits_equal(together[name][number], found[0]), (name, entry, number)


def bits_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same bit for bit, but for the bits of a NaN."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def results(given: Batch, first: int = 0, **keywords: Any) -> dict[str, Tensor]:
    """Return out, lse, the row maximum, dq, dk, dv, and dbias where no entries share it. `first` is the first entry's number."""
    leaves = {"dq": given.query, "dk": given.key, "dv": given.value, "dbias": given.bias, "dsink": given.sink}
    leaves = {name: each.detach().clone().requires_grad_() for name, each in leaves.items() if each is not None}
    sink = leaves.get("dsink")
    rows = leaves["dq"], leaves["dk"], leaves["dv"]
    switches = {"return_lse": True, "return_max": True, "batch_invariant": True} | keywords
    out, lse, row_max = dmattn_ops.flash_dmattn_func(*rows, given.mask, leaves.get("dbias"), sink=sink, **switches)
    grads = []
    for entry in range(first, first + given.query.shape[0]):
        random = torch.Generator().manual_seed(entry)
        grads.append([torch.randn(each.shape[1:], generator=random).to(each) for each in (out, lse)])
    grad_out, grad_lse = (torch.stack(each) for each in zip(*grads, strict=True))
    grad_lse = grad_lse.masked_fill(lse.isinf(), 0.0)
    found = torch.autograd.grad((out, lse), list(leaves.values()), (grad_out, grad_lse))
    named = {"out": out, "lse": lse, "row_max": row_max} | dict(zip(leaves, found, strict=True))
    named.pop("dsink", None)
    if given.bias is not None and given.bias.shape[0] == 1:
        del named["dbias"]
    return named


def check_parts(given: Batch, whole_batch: int, entries: list[tuple[int, int]], **keywords: Any) -> None:
    """Compare a batch with parts of it, and with entries among other neighbours."""
    together = results(given, **keywords)
    for first, stop in entries:
        alone = results(given.part(first, stop), first, **keywords)
        for name, found in alone.items():  # a bias that all entries share is not in both
            if name in together:
                assert torch.equal(together[name][first:stop], found), (name, first, stop)
    entry = whole_batch - 1
    others = results(given.among_others(entry), **keywords)
    for name, found in others.items():
        assert torch.equal(together[name][entry], found[entry]), (name, "among others")


def packed_results(
    rows: tuple[Tensor, Tensor, Tensor],
    offsets: list[list[int]],
    mask: Tensor | None,
    bias: Tensor | None,
    longest: int,
    **keywords: Any,
) -> list[dict[str, Tensor]]:
    """Return out, lse, the row maximum and the gradients of each packed sequence."""
    leaves = {"dq": rows[0], "dk": rows[1], "dv": rows[2], "dbias": bias}
    leaves = {name: each.detach().clone().requires_grad_() for name, each in leaves.items() if each is not None}
    given = [torch.tensor(each, dtype=torch.int32, device=rows[0].device) for each in offsets]
    switches = {"return_lse": True, "return_max": True, "batch_invariant": True} | keywords
    out, lse, row_max = dmattn_ops.flash_dmattn_varlen_func(
        leaves["dq"], leaves["dk"], leaves["dv"], *given, longest, longest, mask, leaves.get("dbias"), **switches
    )
    grad_out = torch.zeros_like(out)
    for first, stop in pairwise(offsets[0]):
        random = torch.Generator().manual_seed(7)
        grad_out[first:stop] = torch.randn((stop - first, *out.shape[1:]), generator=random).to(out)
    found = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad_out), strict=True))
    by_query = {"out": out, "lse": lse.T, "row_max": row_max.T, "dq": found["dq"]}
    by_key = {"dk": found["dk"], "dv": found["dv"]} | ({"dbias": found["dbias"].T} if bias is not None else {})
    sequences = []
    for number in range(len(offsets[0]) - 1):
        queries, keys = (slice(each[number], each[number + 1]) for each in offsets)
        sequences.append({n: t[queries] for n, t in by_query.items()} | {n: t[keys] for n, t in by_key.items()})
    return sequences


def check_packed(seed: int, dtype: torch.dtype, device: str = "cpu", longest: int = 200) -> None:
    """Compare each of some packed sequences with itself, alone and with another bound of its length."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype).to(device)

    heads_kv, group, dim = 1 + seed % 2, 1 + seed // 2 % 2, (16, 64)[seed % 2]
    lengths = torch.randint(longest, (2, 4), generator=random)
    offsets = [[0, *each.cumsum(0).tolist()] for each in lengths]
    total_q, total_k = (each[-1] + 2 for each in offsets)  # some rows belong to no sequence
    rows = normal(total_q, heads_kv * group, dim), normal(total_k, heads_kv, dim), normal(total_k, heads_kv, dim)
    mask = (torch.rand(1, total_k, generator=random) < 0.7).to(device) if seed % 3 else None
    bias = normal(heads_kv, total_k) if seed % 4 > 1 else None
    keywords = {"is_causal": seed % 2 == 0, "softcap": 3.0 * (seed % 3 == 1)}
    together = packed_results(rows, offsets, mask, bias, 1000, **keywords)
    for number, found in enumerate(together):
        queries, keys = (slice(each[number], each[number + 1]) for each in offsets)
        alone = packed_results(
            (rows[0][queries], rows[1][keys], rows[2][keys]),
            [[0, int(each[number])] for each in lengths],
            None if mask is None else mask[:, keys],
            None if bias is None else bias[:, keys],
            max(1, int(lengths[:, number].max())),
            **keywords,
        )[0]
        for name, part in alone.items():
            assert torch.equal(found[name], part), (name, number)

"""Random calls of which a part of the keys is used, and attention by its definition in float64."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dmattn_ops
from dmattn_ops import TileMask
from dmattn_ops.kernels import reference

KINDS = ("none", "keys", "dense", "bits", "padding", "documents", "pair", "intervals", "hidden", "dynamic", "folded")
EPS = {torch.float64: 1e-10, torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    """One call: what it is given, and which pairs its mask shows by itself, bool `[B|1, heads, Sq, Sk]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    used: Tensor
    mask: Tensor | TileMask | None
    shown: Tensor
    bias: Tensor | None
    sink: Tensor | None
    keywords: dict[str, Any]


def draw(seed: int, kind: str, dtype: torch.dtype = torch.float64, largest: int = 150) -> Case:
    """Draw a call with a mask of that kind."""
    random = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=random))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    batch, heads_kv, group = 1 + below(3), 1 + below(2), 1 + below(2)
    heads, dim, dim_v = heads_kv * group, 4 + below(20), 4 + below(20)
    seqlen_q, seqlen_k = (1 if below(4) == 0 else 1 + below(largest)), 1 + below(2 * largest)
    if kind in ("documents", "dynamic"):
        seqlen_q = seqlen_k
    used = torch.randint(seqlen_k + 1, (batch,), generator=random, dtype=torch.int32)
    if below(3) == 0:
        used[below(batch)] = (0, seqlen_k)[below(2)]
    keywords: dict[str, Any] = {
        "is_causal": below(2) == 0,
        "causal_from": ("bottom_right", "bottom_right", "top_left", below(40) - 20)[below(4)],
        "window_size": ((None, None), (below(60), None), (below(60), below(60)))[below(3)],
        "softcap": (0.0, 4.0)[below(2)],
    }
    mask, shown = draw_mask(kind, random, batch, heads, heads_kv, seqlen_q, seqlen_k)
    bias_shapes = (
        None,
        (batch, 1, 1, seqlen_k),
        (1, heads_kv, 1, seqlen_k),
        (batch, heads, seqlen_q, seqlen_k),
        (1, 1, seqlen_q, seqlen_k),
    )
    bias_shape = bias_shapes[below(len(bias_shapes))]
    bias = None if bias_shape is None else normal(*bias_shape)
    sink = normal(heads) if below(2) == 0 else None
    query, key, value = (
        normal(batch, seqlen_q, heads, dim),
        normal(batch, seqlen_k, heads_kv, dim),
        normal(batch, seqlen_k, heads_kv, dim_v),
    )
    return Case(query, key, value, used, mask, shown, bias, sink, keywords)


def draw_mask(
    kind: str, random: torch.Generator, batch: int, heads: int, heads_kv: int, seqlen_q: int, seqlen_k: int
) -> tuple[Tensor | TileMask | None, Tensor]:
    def chance(*shape: int, keep: float = 0.7) -> Tensor:
        return torch.rand(shape, generator=random) < keep

    def ends(*shape: int) -> tuple[Tensor, Tensor]:
        return tuple(torch.randint(seqlen_q + 1, shape, generator=random, dtype=torch.int32) for _ in range(2))  # type: ignore[return-value]

    rows, columns = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    if kind == "none":
        return None, torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool)
    if kind == "keys":
        keep = chance(batch, heads_kv, 1, seqlen_k)
        return keep, keep.expand(-1, -1, seqlen_q, -1)
    if kind == "dense":
        keep = chance(1, heads, seqlen_q, seqlen_k)
        return keep, keep
    if kind == "bits":
        keep = chance(batch, 1, seqlen_q, seqlen_k)
        return dmattn_ops.prepare_mask(keep, seqlen_q=seqlen_q), keep
    if kind == "folded":  # its condition stays where it is
        keep = chance(batch, heads_kv, seqlen_q, seqlen_k)
        return dmattn_ops.prepare_mask(keep, seqlen_q=seqlen_q, is_causal=True), keep & (
            columns <= rows + seqlen_k - seqlen_q
        )
    if kind == "padding":
        keep = chance(batch, seqlen_k)
        return dmattn_ops.prepare_mask(keep, seqlen_q=seqlen_q), keep[:, None, None].expand(-1, 1, seqlen_q, -1)
    if kind == "documents":
        ids = torch.randint(3, (batch, seqlen_q), generator=random).sort(-1).values
        return dmattn_ops.prepare_mask(documents=ids), (ids[:, :, None] == ids[:, None])[:, None]
    if kind == "pair":
        of_queries, of_keys = (torch.randint(3, (1, size), generator=random) for size in (seqlen_q, seqlen_k))
        keep = (of_queries[:, :, None] == of_keys[:, None])[:, None]
        return dmattn_ops.prepare_mask(documents=(of_queries, of_keys)), keep
    if kind in ("intervals", "hidden"):
        start, end = ends(batch, heads_kv, seqlen_k)
        keep = (rows >= start[:, :, None]) & (rows < end[:, :, None])
        hidden = None
        if kind == "hidden":
            hidden = ends(batch, heads_kv, seqlen_k)
            keep = keep & ~((rows >= hidden[0][:, :, None]) & (rows < hidden[1][:, :, None]))
        return dmattn_ops.prepare_mask(intervals=(start, end), hidden=hidden, seqlen_q=seqlen_q), keep
    assert kind == "dynamic"
    mask = dmattn_ops.dynamic_mask(torch.randn(1, heads_kv, seqlen_k, generator=random), 7, keep_last=3)
    return mask, mask.to_dense()


def visible(case: Case) -> Tensor:
    """Return which pairs a call shows, bool `[B, H, Sq, Sk]`: pair by pair, as the documentation says it."""
    (batch, seqlen_q, heads, _), seqlen_k = case.query.shape, case.key.shape[1]
    shown = case.shown.repeat_interleave(heads // case.shown.shape[1], dim=1).expand(batch, -1, -1, -1).clone()
    rows, columns = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    left, right = case.keywords["window_size"]
    for entry, used in enumerate(case.used.tolist()):
        where = case.keywords["causal_from"]
        off = {"bottom_right": used - seqlen_q, "top_left": 0}.get(where, where)
        keep = columns < used
        if case.keywords["is_causal"]:
            keep = keep & (columns <= rows + off)
        if left is not None:
            keep = keep & (columns >= rows + off - left)
        if right is not None and not case.keywords["is_causal"]:
            keep = keep & (columns <= rows + off + right)
        shown[entry] &= keep
    return shown


def unseen_keys(case: Case) -> Tensor:
    """Return the keys that no query of their entry and group sees, bool `[B, Sk, Hkv]`."""
    heads_kv = case.key.shape[2]
    return ~visible(case).any(2).unflatten(1, (heads_kv, -1)).any(2).transpose(1, 2)


def poisoned(case: Case, number: float = float("nan")) -> Case:
    """Return a call whose unseen keys, with their values and the elements of a bias that only they have, hold `number`."""
    unseen = unseen_keys(case)
    bias = case.bias
    if bias is not None:
        hidden = ~visible(case)
        for dim in range(3):
            if bias.shape[dim] == 1:
                hidden = hidden.all(dim, keepdim=True)
            elif bias.shape[dim] != hidden.shape[dim]:
                hidden = hidden.unflatten(dim, (bias.shape[dim], -1)).all(dim + 1)
        bias = bias.masked_fill(hidden, number)
    key, value = (rows.masked_fill(unseen[..., None], number) for rows in (case.key, case.value))
    return case._replace(key=key, value=value, bias=bias)


def gradients_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Draw gradients of outputs, the same numbers on every device."""
    random = torch.Generator().manual_seed(1)
    return [torch.randn(each.shape, generator=random, dtype=torch.float64).to(each) for each in outputs]


def results_of(case: Case, attend: Any, grads: list[Tensor] | None = None, **keywords: Any) -> dict[str, Tensor]:
    """Return out, lse, the row maximum and all gradients of `attend(query, key, value, mask, bias, sink=...)`.

    `grads` are those of out and lse; by default they are drawn.
    """
    leaves = {"dq": case.query, "dk": case.key, "dv": case.value, "dbias": case.bias, "dsink": case.sink}
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items() if leaf is not None}
    given = (leaves["dq"], leaves["dk"], leaves["dv"], case.mask, leaves.get("dbias"))
    outputs = attend(*given, sink=leaves.get("dsink"), **keywords)
    grads = gradients_of(outputs[:2]) if grads is None else grads
    found = torch.autograd.grad(outputs[:2], list(leaves.values()), grads, allow_unused=True, materialize_grads=True)
    return dict(zip(("out", "lse", "row_max"), outputs, strict=False)) | dict(zip(leaves, found, strict=True))


def ours(
    case: Case, function: Any = dmattn_ops.flash_dmattn_func, grads: list[Tensor] | None = None, **more: Any
) -> dict[str, Tensor]:
    """Return the results of the library."""
    keywords = case.keywords | {"seqlen_k_used": case.used, "return_lse": True, "return_max": True} | more
    return results_of(case, function, grads, **keywords)


def defined(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the results of the definition, computed in `dtype`."""
    keep, heads = visible(case), case.query.shape[2]

    def attend(query: Tensor, key: Tensor, value: Tensor, _: Any, bias: Tensor | None, sink: Tensor | None) -> Any:
        def per_head(part: Tensor) -> Tensor:
            return part.repeat_interleave(heads // part.shape[1], dim=1)

        keys, values = (per_head(part.transpose(1, 2)) for part in (key, value))
        score = query.transpose(1, 2) @ keys.transpose(-1, -2) / case.query.shape[-1] ** 0.5
        if cap := case.keywords["softcap"]:
            score = cap * torch.tanh(score / cap)
        if bias is not None:
            score = score + per_head(bias)
        score = score.masked_fill(~keep, float("-inf"))
        empty = ~keep.any(-1)
        lse = torch.logsumexp(score.masked_fill(empty[..., None], 0.0), -1)
        weight = torch.exp(score - lse[..., None]).masked_fill(~keep, 0.0)
        if sink is not None:
            weight = weight * torch.sigmoid(lse - sink[:, None])[..., None]
        out = (weight @ values).transpose(1, 2)
        return out, lse.masked_fill(empty, float("-inf")), score.detach().amax(-1)

    parts = (case.query, case.key, case.value, case.bias, case.sink)
    cast = [None if part is None else part.to(dtype) for part in parts]
    whole = case._replace(query=cast[0], key=cast[1], value=cast[2], bias=cast[3], sink=cast[4])
    return results_of(whole, attend)


def check(case: Case, actual: dict[str, Tensor]) -> None:
    """Compare results with the definition within the error budget; gradients of what is hidden are exactly 0."""
    dtype = case.query.dtype
    expected = defined(case, torch.float64)
    eager = expected if dtype == torch.float64 else defined(case, dtype)
    assert actual.keys() == expected.keys()
    for name, exact in expected.items():
        budget = 2 * _error(eager[name], exact) + EPS[dtype]
        assert _error(actual[name], exact) <= budget, (name, _error(actual[name], exact), budget)
    unseen = unseen_keys(case)
    for name in ("dk", "dv"):
        assert not actual[name][unseen].any(), name
    empty = ~visible(case).any(-1)
    assert not actual["out"].transpose(1, 2)[empty].any()
    assert not actual["dq"].transpose(1, 2)[empty].any()
    assert (actual["lse"][empty] == float("-inf")).all()


def _error(actual: Tensor, exact: Tensor) -> float:
    actual, exact = actual.double(), exact.double()
    infinite = exact.isinf()
    assert torch.equal(actual[infinite], exact[infinite])
    actual, exact = actual.detach(), exact.detach()
    difference = (actual - exact)[~infinite].norm()
    assert difference.isfinite()
    return float(difference / exact[~infinite].norm().clamp_min(1e-30)) if difference.item() else 0.0


def dropped(case: Case, seed: int, dropout_p: float) -> Tensor:
    """Return which weights of a call dropout keeps behind `torch.manual_seed(seed)`."""
    torch.manual_seed(seed)
    seeds = torch.ops.dmattn.draw_seed(case.query)
    return reference.philox_keep(seeds, case.query.shape[1], case.key.shape[1], dropout_p)

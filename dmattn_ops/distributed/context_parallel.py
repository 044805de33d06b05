"""Attention over a sequence that several ranks share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmattn_ops.api import arguments
from dmattn_ops.bands import NO_BAND, CausalFrom, Window, visibility
from dmattn_ops.checks import require, validation
from dmattn_ops.distributed import agreement, ulysses
from dmattn_ops.distributed.all_gather import AllGather, Plan
from dmattn_ops.distributed.context_bias import BiasPlan
from dmattn_ops.distributed.context_mask import (
    METHODS,
    ContextMask,
    Work,
    check_choice,
    parts_of,
    refuse_two_packings,
    work_of,
)
from dmattn_ops.distributed.key_exchange import KeyExchange, exchange_of
from dmattn_ops.distributed.mask_source import is_per_key, source_of
from dmattn_ops.distributed.pieces import Numbers, Piece, Sight, Spans, Visible, sight_of, spans_of, visible_by
from dmattn_ops.distributed.ring import Ring, RingPlan
from dmattn_ops.distributed.sequence import (
    GatheredRows,
    Layout,
    check_ids,
    check_length,
    check_offsets,
    checked_layout,
    in_order,
    runs,
)
from dmattn_ops.distributed.team import Group, Team, same_on_all, share_a_host, team_of
from dmattn_ops.masks.documents import Documents, as_integers
from dmattn_ops.masks.tile_mask import TileMask

GATHERED_BYTES = 4 << 30  # of keys and values on one rank, from which on `auto` lets them travel in a ring instead
PIPELINED_BYTES = 16 << 20  # of keys and values that some rank receives, from which on they travel in groups of heads
GROUPED_HEADS = (
    4  # key heads of a group, at least: kernels with fewer leave more SMs idle at their end, and read more often
)
# How many halves of the bytes of fetching may be exchanged by heads. Fetching is hidden behind computing, exchanging is not; but
# the kernels of "ulysses" are those of one GPU. Within a host it was faster with 2.5 times the bytes (2 H200, 131072 positions).
HALVES_BETWEEN_HOSTS, HALVES_IN_A_HOST = 1, 8


class _Request(NamedTuple):
    """A call, checked: its tensors, and what is the same on every rank."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sink: Tensor | None
    team: Team
    layout: Layout
    method: str
    sight: Sight
    numbers: Numbers
    needs_max: bool
    reduce_dtype: torch.dtype


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | TileMask | ContextMask | None = None,
    bias: Tensor | None = None,
    *,
    group: Group | None,
    documents: Documents | None = None,
    layout: Layout = "head_tail",
    method: str = "all_gather",
    is_causal: bool = False,
    causal_from: CausalFrom = "bottom_right",
    window_size: Window = (None, None),
    cu_seqlens: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0,
    dropout_p: float = 0,
    deterministic: bool | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    reduce_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, ...]:
    """Compute `flash_dmattn_func` of a sequence of which every rank holds a part (`shard_sequence`), for this rank's queries.

    All ranks of the group call it alike, forward and backward. In eager mode that is checked (`agreement`), and what one rank
    refuses is an error on all, if the group has a CPU backend ("cpu:gloo,cuda:nccl"). Conditions count positions of the whole
    sequence. Results and gradients are those of one process. `s` is the part of a rank and `S` the whole, `s * N` on `N` ranks.

    Args:
        query: with shape `[B, s, H, D]`.
        key: with shape `[B, s, Hkv, D]`. Its part may be of another length than that of query, as may the whole.
        value: with shape `[B, s, Hkv, Dv]`.
        mask: which of this rank's keys to keep, `[B|1, H|Hkv|1, 1, s]` or padding `[B|1, s]`; or which of all keys its queries
            see, `[B|1, H|Hkv|1, s, S]`, keys in the order of the sequence; or a `TileMask` of the whole sequence, the same on every
            rank; or what `prepare_context_mask` returned, which saves the work for each layer.
        bias: of this rank's keys, `[B|1, H|Hkv|1, 1, s]`, or of its queries and all keys, `[B|1, H|Hkv|1, s, S]`.
        group: the ranks: a process group, a mesh of one dimension, or None for the default group.
        documents: integer ids `[B|1, s]` of this rank's positions, or a pair (of queries, of keys).
        layout: "head_tail", which gives every rank the same work under a causal mask; "contiguous", for windows; or a tuple
            of chunk numbers (`balanced_layout`).
        method: "all_gather" fetches the keys and values that are seen; "ulysses" deals heads to ranks; in "ring" keys and
            values travel around, which takes the least memory; "auto" chooses by shapes.
        is_causal, causal_from, window_size, softmax_scale, softcap: as in `flash_dmattn_func`, for the whole sequence.
        cu_seqlens: offsets int32 `[n + 1]` of sequences packed into the whole one, the same on every rank; batch 1. The same
            as documents with an id for each.
        dropout_p: weights are dropped as on one process whose generator is that of the group's first rank.
        deterministic: as in `flash_dmattn_func`. What ranks add up is always added in the order of the ranks.
        sink: `[H]`, the same on every rank. Its gradient is of this rank's queries: sum it over the ranks, as for any weight.
        return_lse, return_max: as in `flash_dmattn_func`, `[B, H, s]`.
        reduce_dtype: in which gradients of keys and values are added over the ranks, at least.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flash_dmattn_func`, and for parts that do not fit each other.
    """
    team = team_of(group)
    documents = as_integers(documents)
    if isinstance(mask, ContextMask) and method == "auto":
        method = mask.method
    named = {
        "query": query, "key": key, "value": value, "mask": mask, "bias": bias, "documents": documents, "layout": layout,
        "method": method, "is_causal": is_causal, "causal_from": causal_from, "window_size": window_size,
        "cu_seqlens": cu_seqlens, "softmax_scale": softmax_scale, "softcap": softcap, "dropout_p": dropout_p,
        "deterministic": deterministic, "sink": sink, "return_lse": return_lse, "return_max": return_max,
        "reduce_dtype": reduce_dtype,
    }  # fmt: skip
    asked: list[_Request] = []

    def describe() -> dict[str, str]:
        asked.append(_checked(named, group, team))
        texts = {name: agreement.text_of(value) for name, value in named.items()}
        return texts | {"method": repr(asked[-1].method), "autocast": str(asked[-1].query.dtype)}

    agreement.agreed("context_parallel_attention", group, team, describe)
    out, lse, row_max = _attention(asked[0], mask, documents, cu_seqlens)
    if sink is not None:
        out = share_of_keys(out, lse, asked[0].sink)
    if not return_lse and not return_max:
        return out
    return (out, *((lse,) if return_lse else ()), *((row_max,) if return_max else ()))


def _checked(named: dict[str, Any], group: Group | None, team: Team) -> _Request:
    """Refuse what does not fit; return the call."""
    query, key, value, bias, sink = (named[name] for name in ("query", "key", "value", "bias", "sink"))
    plain(query=query, key=key, value=value, bias=bias)
    (query, key, value), bias, sink = arguments.prepared_inputs(4, bias, sink, query=query, key=key, value=value)
    numbers = ("is_causal", "causal_from", "window_size", "softmax_scale", "softcap", "dropout_p")
    _, scalars = arguments.read_numbers(*[named[name] for name in numbers])
    named["causal_from"], named["window_size"] = visibility(*[named[name] for name in numbers[:3]])
    named.update(zip(numbers[3:], scalars, strict=True))
    same_bits = arguments.switches(named["deterministic"], named["return_lse"], named["return_max"])
    validation.dense_tensors(query, key, value, None, sink)
    reduce_dtype = named["reduce_dtype"]
    if not isinstance(reduce_dtype, torch.dtype) or not reduce_dtype.is_floating_point:
        raise TypeError(f"reduce_dtype must be a floating-point torch.dtype, got {reduce_dtype!r}")
    layout = named["layout"] = checked_layout(named["layout"], team.size)
    method, mask = named["method"], named["mask"]
    length_q, length_k = query.shape[1], key.shape[1]
    check_length("query", length_q, layout, team.size)
    check_length("key", length_k, layout, team.size)
    whole_q, whole_k = length_q * team.size, length_k * team.size
    sight = sight_of(named["is_causal"], named["causal_from"], named["window_size"], whole_q, whole_k)
    check_choice(method, (*METHODS, "auto"))
    if method == "auto":
        method = chosen_method(query, key, value, mask, bias, sight, layout, team, share_a_host(group))
    if method == "ulysses" and (reasons := ulysses.refusals(query.shape[2], key.shape[2], team.size)):
        raise ValueError(f"method 'ulysses' cannot take this call: {'; '.join(reasons)}")
    documents, cu_seqlens = named["documents"], named["cu_seqlens"]
    refuse_two_packings(mask, documents, cu_seqlens)
    if isinstance(mask, ContextMask) and (documents is not None or cu_seqlens is not None):
        raise ValueError("documents and cu_seqlens stand beside a ContextMask: pass them to prepare_context_mask")
    if documents is not None:
        check_ids(documents, query, key, team.size)
    if cu_seqlens is not None and (query.shape[0] != 1 or length_q != length_k):
        raise ValueError(
            f"cu_seqlens needs batch 1 and as many queries as keys, got {query.shape[0]} and {length_q}, {length_k}"
        )
    if cu_seqlens is not None:
        check_offsets(cu_seqlens, sight.seqlen_k)
    _check_mask(mask, query, key, team, layout, method, sight)
    if bias is not None:
        _check_part("bias", bias, query, key, team)
        require.dtype("bias", bias, query.dtype, torch.float32)
    asked = Numbers(*scalars, same_bits)
    return _Request(
        query, key, value, bias, sink, team, layout, method, sight, asked, named["return_max"], reduce_dtype
    )


def plain(**tensors: Any) -> None:
    """Refuse tensors that know of other ranks themselves."""
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise TypeError(
                f"{name} must be the part of this rank, a plain tensor, got a DTensor: pass {name}.to_local()"
            )


def _check_mask(mask: Any, query: Tensor, key: Tensor, team: Team, layout: Layout, method: str, sight: Sight) -> None:
    """Refuse a mask that does not fit the call."""
    if mask is None:
        return
    if isinstance(mask, Tensor):
        validation.keep_mask(mask)
        if mask.dim() == 2:
            mask = mask[:, None, None, :]
        _check_part("mask", mask, query, key, team)
    elif isinstance(mask, TileMask):
        heads = (1, key.shape[2], query.shape[2])
        lengths = ((sight.seqlen_q,), (sight.seqlen_k,))
        require.sizes("mask", mask, (1, query.shape[0]), heads, *lengths, axes=require.AXES)
        require.device("mask", mask, query.device)
    elif isinstance(mask, ContextMask):
        made = (mask.team, mask.layout, mask.method, mask.sight.seqlen_q, mask.sight.seqlen_k)
        for name, of_mask, asked in zip(
            ("group", "layout", "method", "query length", "key length"),
            made,
            (team, layout, method, sight.seqlen_q, sight.seqlen_k),
            strict=True,
        ):
            if of_mask != asked:
                raise ValueError(f"mask was prepared for {name} {of_mask!r}, got {asked!r}")
        of_rank = team.size if method == "ulysses" else 1
        heads = (1, max(1, key.shape[2] // of_rank), query.shape[2] // of_rank)
        for part in mask.parts:
            require.sizes(
                "mask", part, (1, query.shape[0]), heads, *((size,) for size in part.shape[2:]), axes=require.AXES
            )
            require.device("mask", part, query.device)
    else:
        raise TypeError(f"mask must be a tensor, a TileMask or a ContextMask, got {type(mask).__name__}")


def _check_part(name: str, part: Tensor, query: Tensor, key: Tensor, team: Team) -> None:
    """Refuse what is neither of this rank's keys nor of its queries and all keys."""
    require.rank(name, part, 4)
    (batch, length_q, heads, _), (_, length_k, heads_kv, _) = query.shape, key.shape
    per_key = is_per_key(part, length_k * team.size, team.size)
    rows, columns = (1, length_k) if per_key else (length_q, length_k * team.size)
    require.sizes(name, part, (1, batch), (1, heads_kv, heads), (rows,), (columns,), axes=require.AXES)
    require.device(name, part, query.device)


def chosen_method(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    bias: Tensor | None,
    sight: Sight,
    layout: Layout,
    team: Team,
    near: bool,
) -> str:
    """Return the method for a call, from its shapes and from whether the ranks are `near`, on one host.

    Heads are exchanged where they can be dealt and where that sends few enough bytes, else keys are fetched; they travel in a
    ring where those that are fetched would take too much memory.
    """
    (batch, length, heads, dim), (heads_kv, dim_v) = query.shape, value.shape[2:]
    exchange = exchange_of(team, layout, sight.seqlen_k, spans_of(sight, layout, team.size))
    per_key = batch * heads_kv * (dim + dim_v) * key.element_size()
    fetched = exchange.most_received * per_key
    rows = any(isinstance(part, Tensor) and part.dim() == 4 and part.shape[2] > 1 for part in (mask, bias))
    if not rows and not ulysses.refusals(heads, heads_kv, team.size):
        of_keys = key.shape[1] * max(heads_kv, team.size) * (dim + dim_v)
        of_queries = length * heads * (dim + dim_v)
        exchanged = batch * (of_keys + of_queries) * key.element_size() * (team.size - 1) // team.size
        if 2 * exchanged < (HALVES_IN_A_HOST if near else HALVES_BETWEEN_HOSTS) * fetched:
            return "ulysses"
    return "ring" if exchange.longest * per_key > GATHERED_BYTES else "all_gather"


def _attention(
    of: _Request, mask: Any, documents: Documents | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse and row_max, without sinks."""
    spans: Spans
    if isinstance(mask, ContextMask):
        by_position = of.numbers.dropout_p != 0.0 or (of.bias is not None and not _is_per_key(of))
        parts: tuple[TileMask | None, ...]
        work, parts = mask.work(of.sight, by_position)
    else:
        spans = spans_of(of.sight, of.layout, of.team.size)
        source = source_of(mask, documents, cu_seqlens, of.team, of.layout, of.method, of.sight)
        by_place = source.nothing and of.bias is None and of.numbers.dropout_p == 0.0
        work = work_of(of.method, of.sight, spans, of.layout, of.team, by_place=by_place)
        parts = (None,) * len(work.pieces) if source.nothing else parts_of(source, of.sight, work.pieces)
    seed = None
    if of.numbers.dropout_p != 0.0:
        seed = same_on_all(arguments.dropout_seed(of.query), of.team)
    if of.method == "ulysses":
        return _by_heads(of, parts[0], seed)
    if of.method == "ring":
        return _by_ring(of, work, parts, seed)
    return _by_fetching(of, work, parts, seed)


def _by_fetching(
    of: _Request, work: Work, parts: tuple[TileMask | None, ...], seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    assert work.exchange is not None
    groups = head_groups(work.exchange, of.key, of.value)
    tensors: list[Tensor | None] = []
    limits: list[tuple[int, int, int | None]] = []
    for group in range(groups):
        for part, piece in zip(parts, work.pieces, strict=True):
            own = _of_group(part, group, groups)
            visible = visible_by(own, NO_BAND, piece) if work.one_call else _visible(of, own, piece)
            tensors += visible.tensors
            if group == 0:
                limits.append(visible[1:])
    bias = BiasPlan(_is_per_key(of), work.exchange, by_position=False)
    alone = work.one_call or all(
        len(runs(of.layout, of.team.size, rank, of.query.shape[1])) == 1 for rank in range(of.team.size)
    )
    plan = Plan(
        work.exchange, bias, work.pieces, tuple(limits), of.numbers, groups, of.needs_max, of.reduce_dtype, alone
    )
    masks = tensors if any(tensor is not None for tensor in tensors) else []
    return AllGather.apply(plan, of.query, of.key, of.value, of.bias, seed, *masks)


def _by_ring(
    of: _Request, work: Work, parts: tuple[TileMask | None, ...], seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    seen = [_visible(of, part, piece) for part, piece in zip(parts, work.pieces, strict=True)]
    everything = (((0, of.sight.seqlen_k),),) * of.team.size
    bias = BiasPlan(_is_per_key(of), KeyExchange(of.team, of.layout, of.sight.seqlen_k, everything), by_position=True)
    limits = tuple(visible[1:] for visible in seen)
    plan = RingPlan(of.team, bias, of.query.shape[1], work.steps(), limits, of.numbers, of.needs_max, of.reduce_dtype)
    tensors = [tensor for visible in seen for tensor in visible.tensors]
    masks = tensors if any(tensor is not None for tensor in tensors) else []
    return Ring.apply(plan, of.query, of.key, of.value, of.bias, seed, *masks)


def _by_heads(of: _Request, part: TileMask | None, seed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    team, layout, wide = of.team, of.layout, torch.promote_types(of.query.dtype, of.reduce_dtype)
    query, key, value = ulysses.ToHeads.apply(team, layout, wide, of.query, of.key, of.value)
    piece = Piece(0, 0, of.sight.seqlen_q, 0, 0, of.sight.seqlen_k, 0)
    visible = _visible(of, part, piece)
    bias = None if of.bias is None else _bias_by_heads(of, of.bias)
    if seed is not None:
        seed = seed[:, ulysses.own_heads(seed.shape[1], team)]
    out, lse, _, row_max = torch.ops.dmattn.forward.default(
        query, key, value, bias, *visible.tensors, None, seed, visible.band_lo, visible.band_hi, 0, 0, visible.at_most,
        *of.numbers, of.needs_max,
    )  # fmt: skip
    out, lse = ulysses.ToSequence.apply(team, layout, out, lse.transpose(1, 2).unsqueeze(-1))
    lse = lse.squeeze(-1).transpose(1, 2)
    if of.needs_max:
        row_max = row_max.detach().transpose(1, 2).unsqueeze(-1)
        row_max = ulysses.ToSequence.apply(team, layout, row_max)[0].squeeze(-1).transpose(1, 2)
    return out, lse, row_max


def _bias_by_heads(of: _Request, bias: Tensor) -> Tensor:
    """Return the bias of this rank's heads for the whole sequence, differentiable."""
    team, layout = of.team, of.layout
    own = ulysses.own_heads(bias.shape[1], team)
    wide = torch.promote_types(bias.dtype, of.reduce_dtype)
    if not _is_per_key(of) and bias.shape[1] != 1:
        return ulysses.ToHeads.apply(team, layout, wide, bias.transpose(1, 2))[0].transpose(1, 2)
    dim = 3 if _is_per_key(of) else 2
    rows = GatheredRows.apply(team, wide, bias.movedim(dim, 0).to(wide))
    return in_order(rows, layout, team.size, 0).movedim(0, dim)[:, own].contiguous()


def _is_per_key(of: _Request) -> bool:
    return of.bias is not None and is_per_key(of.bias, of.sight.seqlen_k, of.team.size)


def _visible(of: _Request, part: TileMask | None, piece: Piece) -> Visible:
    return visible_by(part, of.sight.band(piece.query, piece.key), piece)


def _of_group(part: TileMask | None, group: int, groups: int) -> TileMask | None:
    """Return the mask of a group of heads."""
    if part is None or groups == 1 or part.shape[1] == 1:
        return part
    each = part.shape[1] // groups
    return part.heads(group * each, (group + 1) * each)


def head_groups(exchange: KeyExchange, key: Tensor, value: Tensor) -> int:
    """Return in how many groups key heads travel, the same on every rank: the first is all that computing does not hide."""
    row = key.shape[0] * key.shape[2] * (key.shape[3] + value.shape[3]) * key.element_size()
    if exchange.most_received * row < PIPELINED_BYTES:
        return 1
    heads = key.shape[2]
    return next((groups for groups in (4, 2) if heads % groups == 0 and heads // groups >= GROUPED_HEADS), 1)


def share_of_keys(out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    """Return out `[B, s, H, Dv]` times the share that a sink leaves for the keys, differentiable in all three."""
    if sink is None:
        return out
    odds = torch.where(lse == -torch.inf, 0.0, lse) - sink.to(lse.dtype).unsqueeze(-1)
    share = torch.sigmoid(odds).transpose(1, 2).unsqueeze(-1)
    return (out * share).to(out.dtype)

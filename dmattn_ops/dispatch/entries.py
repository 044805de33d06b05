"""One call for each batch entry, or for each packed sequence: results that depend on that entry alone.

How the C++ kernels divide their work, and whether torch's elementwise operations on a CPU use vector instructions for an
element, depends on everything that a call holds. So on a CPU a batch-invariant call is as many calls as it has entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn_ops.call import Call, Gradients, Mask, Result, Saved


class _Entry(NamedTuple):
    """A call with one batch entry, and where that lies in tensors of the whole call."""

    call: Call
    queries: tuple[slice, ...]  # in query, out and their gradients
    keys: tuple[slice, ...]
    rows: tuple[slice, ...]  # in lse and the other statistics
    bias: tuple[slice, ...]


def forward(call: Call, result: Result, run: Callable[[Call, Result], None]) -> None:
    """Write the outputs of a call by `run` on each of its entries."""
    if call.varlen is not None:  # rows that belong to no sequence
        result.out.zero_()
        result.lse_tail.zero_()
        for statistic in (result.lse, result.row_max):
            if statistic is not None:
                statistic.fill_(-math.inf)
    for entry in _entries(call):
        row_max = None if result.row_max is None else result.row_max[entry.rows]
        run(entry.call, Result(result.out[entry.queries], result.lse[entry.rows], result.lse_tail[entry.rows], row_max))


def backward(call: Call, saved: Saved, grads: Gradients, run: Callable[[Call, Saved, Gradients], None]) -> None:
    """Write the gradients of a call by `run` on each of its entries; add up those of a bias or a sink that entries share."""
    if call.varlen is not None:
        for gradient in (grads.dq, grads.dk, grads.dv, grads.dbias):
            if gradient is not None:
                gradient.zero_()
    shared_bias = grads.dbias is not None and call.varlen is None and grads.dbias.shape[0] == 1
    wide = saved.lse.dtype  # of what is added up, so that a sum is rounded once
    if shared_bias and call.bias is not None:
        call = call._replace(bias=call.bias.to(wide))
    if grads.dsink is not None and call.sink is not None:
        call = call._replace(sink=call.sink.to(wide))
    dbias_sum, dsink_sum = _zeros(grads.dbias if shared_bias else None, saved), _zeros(grads.dsink, saved)
    for entry in _entries(call):
        dbias = grads.dbias if shared_bias or grads.dbias is None else grads.dbias[entry.bias]
        if dbias_sum is not None:
            dbias = torch.empty_like(dbias_sum)
        dsink = None if dsink_sum is None else torch.empty_like(dsink_sum)
        run(
            entry.call,
            Saved(saved.out[entry.queries], saved.lse[entry.rows], saved.lse_tail[entry.rows]),
            Gradients(
                grads.grad_out[entry.queries],
                None if grads.grad_lse is None else grads.grad_lse[entry.rows],
                grads.dq[entry.queries], grads.dk[entry.keys], grads.dv[entry.keys], dbias, dsink,
            ),
        )  # fmt: skip
        for total, part in ((dbias_sum, dbias), (dsink_sum, dsink)):
            if total is not None and part is not None:
                total += part
    for total, target in ((dbias_sum, grads.dbias), (dsink_sum, grads.dsink)):
        if total is not None and target is not None:
            target.copy_(total)


def _zeros(like: Tensor | None, saved: Saved) -> Tensor | None:
    return None if like is None else torch.zeros_like(like, dtype=saved.lse.dtype)


def _entries(call: Call) -> Iterator[_Entry]:
    """Return a call for each batch entry, or for each packed sequence that has queries and keys."""
    if call.varlen is None:
        for number in range(call.query.shape[0]):
            part = (slice(number, number + 1),)
            mask = Mask._make([_of_entry(each, number) for each in call.mask[:-1]] + [call.mask.at_most])
            bias, seed = _of_entry(call.bias, number), _of_entry(call.seed, number)
            query, key, value = call.query[part], call.key[part], call.value[part]
            one = call._replace(query=query, key=key, value=value, bias=bias, mask=mask, seed=seed)
            yield _Entry(one, part, part, part, part)
        return
    varlen, mask = call.varlen, call.mask
    offsets = (pairwise(each.tolist()) for each in (varlen.cu_seqlens_q, varlen.cu_seqlens_k))
    for number, ((first_q, end_q), (first_k, end_k)) in enumerate(zip(*offsets, strict=True)):
        queries, keys, columns = (
            (slice(first_q, end_q),),
            (slice(first_k, end_k),),
            (slice(None), slice(first_k, end_k)),
        )
        if first_q == end_q and first_k == end_k:
            continue
        one = call._replace(
            query=call.query[queries],
            key=call.key[keys],
            value=call.value[keys],
            bias=None if call.bias is None else call.bias[columns],
            mask=mask if mask.k_segments is None else Mask(k_segments=mask.k_segments[(slice(None), *columns)]),
            seed=_of_entry(call.seed, number),
            varlen=varlen._replace(
                cu_seqlens_q=varlen.cu_seqlens_q.new_tensor([0, end_q - first_q]),
                cu_seqlens_k=varlen.cu_seqlens_k.new_tensor([0, end_k - first_k]),
                max_seqlen_q=end_q - first_q,
                max_seqlen_k=end_k - first_k,
            ),
        )
        if one.query.numel() and one.key.numel():
            yield _Entry(one, queries, keys, (slice(None), *queries), columns)


def _of_entry(part: Tensor | None, number: int) -> Tensor | None:
    """Return the part of a tensor `[B|1, ...]` for one batch entry, with a batch of 1."""
    return part if part is None or part.shape[0] == 1 else part[number : number + 1]

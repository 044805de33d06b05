"""Documents that are one run of positions each: what a rank needs follows from where they end, which the host reads.

A key is then visible to neighbouring queries of the sequence, and so to neighbouring ones of a rank whose chunks ascend: the mask
of all its queries and of all keys in its buffer is one of intervals, and attention is one call instead of one for each chunk.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from dmattn_ops.distributed.key_exchange import KeyExchange
from dmattn_ops.distributed.mask_source import sent
from dmattn_ops.distributed.pieces import Sight, Spans
from dmattn_ops.distributed.sequence import Layout, Run, runs
from dmattn_ops.masks.tile_mask import TileMask, from_intervals

Ends = tuple[tuple[int, ...], ...]  # of each batch entry: 0, and where each document ends


def read_ends(documents: tuple[Tensor, Tensor]) -> Ends | None:
    """Return where documents end, read from their ids once; None where an id returns, or queries have other ids than keys."""
    ids, of_keys = documents
    if ids is not of_keys:
        return None
    ends = []
    for row in ids.cpu():
        found, lengths = torch.unique_consecutive(row, return_counts=True)
        if len(found.unique()) != len(found):
            return None
        ends.append((0, *lengths.cumsum(0).tolist()))
    return tuple(ends)


def read_offsets(offsets: Tensor, seqlen: int) -> Ends:
    """Return where packed sequences end that are not empty, read from their offsets."""
    inside = [end for end in offsets.tolist() if 0 < end < seqlen]  # those of a GPU are not checked
    return (tuple(sorted({0, *inside, seqlen})),)


def spans_within(ends: Ends, spans: Spans, layout: Layout, size: int) -> Spans:
    """Return spans that begin and end with the documents of their queries."""

    def within_documents(span: tuple[int, int], run: Run) -> tuple[int, int]:
        first = max(span[0], min(each[bisect_right(each, run.origin) - 1] for each in ends))
        stop = max(each[bisect_right(each, run.origin + run.length - 1)] for each in ends)
        return first, max(first, min(span[1], stop))

    by_rank = [runs(layout, size, rank, ends[0][-1] // size) for rank in range(size)]
    return tuple(
        tuple(within_documents(span, run) if run.length else span for run, span in zip(own, of_rank, strict=True))
        for own, of_rank in zip(by_rank, spans, strict=True)
    )


def ascends(layout: Layout, size: int) -> bool:
    """Return whether every rank holds its chunks in the order of the sequence."""
    return all(
        one.origin < other.origin for rank in range(size) for one, other in pairwise(runs(layout, size, rank, 1 << 30))
    )


def mask_of_rank(
    ends: Ends, keep: Tensor | None, sight: Sight, exchange: KeyExchange, device: torch.device
) -> TileMask:
    """Return which of all queries of this rank see which keys of its buffer, as intervals.

    `keep` `[B|1, 1, 1, Sk]` says which keys any query sees. Conditions of `sight` are folded in. Nothing is read from the device.
    """
    team = exchange.team
    own = runs(exchange.layout, team.size, team.rank, sight.seqlen_q // team.size)
    spans = exchange.needed[team.rank]
    before = [0, *accumulate(stop - first for first, stop in spans)]
    ahead = [first - place for (first, _), place in zip(spans, before, strict=False)]
    by_run = [list(column) for column in zip(*[(run.origin, run.local, run.length) for run in own], strict=True)]
    stops, ahead_of, origins, places, lengths, *of_entries = _numbers(
        [before[1:], ahead, *by_run, *map(list, ends)], device
    )

    def local(position: Tensor) -> Tensor:
        """Return how many queries of this rank lie before a position."""
        run = (torch.bucketize(position, origins, right=True) - 1).clamp_(min=0)
        return places[run] + torch.minimum((position - origins[run]).clamp_(min=0), lengths[run])

    columns = torch.arange(exchange.length, device=device)
    keys = columns + ahead_of[torch.bucketize(columns, stops, right=True)]
    lo, hi = sight.band(0, 0).limits(sight.seqlen_q, sight.seqlen_k)
    starts, stop_rows = [], []
    for entry in of_entries:
        document = torch.bucketize(keys, entry[1:], right=True)
        starts.append(local(torch.maximum(entry[document], keys - hi)))
        stop_rows.append(local(torch.minimum(entry[document + 1], keys - lo + 1)))
    start, end = (torch.stack(rows).unsqueeze(1).to(torch.int32) for rows in (starts, stop_rows))
    if keep is not None:
        end = torch.where(keep[:, :, 0, keys], end, start)
        start = start.expand_as(end).contiguous()
    return from_intervals((start, end), None, None, sight.seqlen_q // team.size)


def _numbers(rows: list[list[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Return rows of numbers on a device, by one copy."""
    numbers = sent(torch.tensor([number for row in rows for number in row], dtype=torch.int64), device)
    return numbers.split([len(row) for row in rows])

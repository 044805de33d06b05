"""Which keys each rank needs of the others, and how they come and their gradients go home.

All of it follows from sizes, the band and the layout, so that every rank knows what every other one sends and receives.
Where most keys are needed by most ranks, all are gathered; otherwise (windows, documents) only those that are needed travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn_ops.distributed.sequence import Layout, Run, by_rank, in_order, runs
from dmattn_ops.distributed.team import Team, arrived, start_all_gather, start_all_to_all

Span = tuple[int, int]  # the first position, and the one after the last
Block = tuple[int, int]  # the first position, and how many there are
GATHER_ALL = 60  # percent of the keys of others that ranks need, from which on all are gathered: one copy less


class Started(NamedTuple):
    """Rows on their way between ranks: what comes from others, and the parts of this rank that stay."""

    coming: Tensor
    staying: list[Tensor]


class KeyExchange(NamedTuple):
    """The keys that each rank needs: spans of the sequence, ascending and apart, which its buffer holds one after the other."""

    team: Team
    layout: Layout
    seqlen: int
    needed: tuple[tuple[Span, ...], ...]
    most_received: int = (
        0  # keys of the rank that receives most, as `exchange_of` counts: ranks that decide by it decide alike
    )

    @property
    def gathers_all(self) -> bool:
        """Whether every rank receives all keys."""
        return all(spans == ((0, self.seqlen),) for spans in self.needed)

    @property
    def length(self) -> int:
        """The keys in this rank's buffer."""
        return self.length_of(self.team.rank)

    def length_of(self, rank: int) -> int:
        """Return the number of keys in a rank's buffer."""
        return sum(stop - first for first, stop in self.needed[rank])

    def received_by(self, rank: int) -> int:
        """Return the number of keys that a rank receives from others."""
        return self.length_of(rank) - sum(length for _, length in self._blocks(rank, rank))

    @property
    def longest(self) -> int:
        """The keys in the longest buffer of all ranks: ranks that decide by it decide alike."""
        return max(map(self.length_of, range(self.team.size)))

    def place(self, key: int) -> int:
        """Return the place of a key in this rank's buffer."""
        before = 0
        for first, stop in self.needed[self.team.rank]:
            if first <= key < stop:
                return before + key - first
            before += stop - first
        raise ValueError(f"key {key} is not among {self.needed[self.team.rank]}")

    def start(self, rows: Tensor) -> Started:
        """Start to fetch, of rows `[keys of this rank, ...]`, those that each rank needs."""
        team = self.team
        if self.gathers_all:
            return Started(start_all_gather(rows, team), [])
        parts = [
            [rows.narrow(0, self._local(first), length) for first, length in blocks] for blocks in self._by_reader()
        ]
        return self._sent(parts, self._by_owner(), rows)

    def finish(self, started: Started) -> Tensor:
        """Return the buffer `[length, ...]`, in the order of the sequence."""
        rows = arrived(started.coming)
        if self.gathers_all:
            return in_order(rows, self.layout, self.team.size, 0)
        parts = dict(self._together(rows, started, self._by_owner()))
        return torch.cat([parts[block] for block in sorted(parts)]) if parts else rows

    def start_back(self, grads: Tensor) -> Started:
        """Start to send the gradients of a buffer to the ranks that its keys came from."""
        team = self.team
        if self.gathers_all:
            each = [grads.shape[0] // team.size] * team.size
            return Started(start_all_to_all(by_rank(grads, self.layout, team.size, 0), each, each, team), [])
        by_owner = self._by_owner()
        ordered = sorted(chain.from_iterable(by_owner))
        parts = dict(zip(ordered, grads.split([length for _, length in ordered]), strict=True))
        return self._sent([[parts[block] for block in blocks] for blocks in by_owner], self._by_reader(), grads)

    def finish_back(self, started: Started, dtype: torch.dtype) -> Tensor:
        """Return the sum of the gradients of this rank's keys, added in the order of the ranks and in a dtype."""
        rows, team = arrived(started.coming), self.team
        if self.gathers_all:
            return rows.unflatten(0, (team.size, rows.shape[0] // team.size)).sum(0, dtype=dtype)
        parts = self._together(rows, started, self._by_reader())
        placed = [(self._local(first), part) for (first, _), part in parts]
        return added(placed, self.seqlen // team.size, 0, rows[:0].to(dtype))

    def _sent(self, parts: list[list[Tensor]], awaited: list[list[Block]], like: Tensor) -> Started:
        """Start to send each rank its parts, and to receive blocks of each: what is this rank's own stays where it is."""
        team = self.team
        send, receive = (
            [0 if rank == team.rank else sum(lengths) for rank, lengths in enumerate(of_ranks)]
            for of_ranks in ([map(len, of) for of in parts], [[length for _, length in of] for of in awaited])
        )
        travelling = [part for rank, of in enumerate(parts) if rank != team.rank for part in of]
        coming = start_all_to_all(torch.cat(travelling) if travelling else like[:0], receive, send, team)
        return Started(coming, parts[team.rank])

    def _together(self, rows: Tensor, started: Started, by_rank: list[list[Block]]) -> list[tuple[Block, Tensor]]:
        """Return each block with its rows, rank by rank: those that came, and those that stayed."""
        own = self.team.rank
        came = iter(rows.split([length for rank, blocks in enumerate(by_rank) if rank != own for _, length in blocks]))
        stayed = iter(started.staying)
        return [
            (block, next(stayed if rank == own else came)) for rank, blocks in enumerate(by_rank) for block in blocks
        ]

    def _by_owner(self) -> list[list[Block]]:
        """Return the blocks that this rank needs, of each rank that holds them."""
        return [self._blocks(owner, self.team.rank) for owner in range(self.team.size)]

    def _by_reader(self) -> list[list[Block]]:
        """Return the blocks of this rank that each rank needs."""
        return [self._blocks(self.team.rank, reader) for reader in range(self.team.size)]

    def _blocks(self, owner: int, rank: int) -> list[Block]:
        """Return start and length of the parts of the sequence that `owner` holds and `rank` needs, ascending."""
        found = []
        for run in self._runs(owner):
            for first, stop in self.needed[rank]:
                low, high = max(first, run.origin), min(stop, run.origin + run.length)
                if low < high:
                    found.append((low, high - low))
        return sorted(found)

    def _local(self, key: int) -> int:
        """Return the place of a key among those that this rank holds."""
        run = next(run for run in self._runs(self.team.rank) if run.origin <= key < run.origin + run.length)
        return run.local + key - run.origin

    def _runs(self, rank: int) -> tuple[Run, ...]:
        return runs(self.layout, self.team.size, rank, self.seqlen // self.team.size)


def exchange_of(team: Team, layout: Layout, seqlen: int, seen: Sequence[Sequence[Span]]) -> KeyExchange:
    """Return the exchange by which every rank gets the spans that it sees."""
    exchange = KeyExchange(team, layout, seqlen, tuple(_joined(spans) for spans in seen))
    received = [exchange.received_by(rank) for rank in range(team.size)]
    if 100 * sum(received) >= GATHER_ALL * (team.size - 1) * seqlen:
        return exchange._replace(needed=(((0, seqlen),),) * team.size, most_received=seqlen - seqlen // team.size)
    return exchange._replace(most_received=max(received))


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the union of spans, ascending and apart."""
    found: list[Span] = []
    for first, stop in sorted(spans):
        if first >= stop:
            continue
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((first, stop))
    return tuple(found)


def added(parts: Sequence[tuple[int, Tensor]], length: int, dim: int, like: Tensor) -> Tensor:
    """Return the sum of parts that begin at places of a tensor of `length` along `dim`, zero where there are none.

    Parts are added in their order, as `like` is: every stretch between two ends by itself, and then all are joined. Adding
    in place into slices makes a chain of nested scatters of a graph, for which Inductor takes exponential time.
    """
    ends = [(place, place + part.shape[dim]) for place, part in parts]
    cuts = sorted({0, length, *(end for pair in ends for end in pair)})
    stretches = []
    for low, high in pairwise(cuts):
        covering = [
            part.narrow(dim, low - first, high - low)
            for (first, stop), (_, part) in zip(ends, parts, strict=True)
            if first <= low and high <= stop
        ]
        if not covering:
            shape = list(like.shape)
            shape[dim] = high - low
            stretches.append(like.new_zeros(shape))
            continue
        total = covering[0].to(like.dtype)
        for part in covering[1:]:
            total = total + part
        stretches.append(total)
    if len(stretches) == 1:
        return stretches[0]
    return torch.cat(stretches, dim) if stretches else like.narrow(dim, 0, 0)

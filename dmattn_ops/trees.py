"""Prefix trees: sequences that begin alike, packed so that what they share is computed once.

Rollouts of one prompt, answers to one question, branches of a search: each token of the tree is there once, in depth-first
order, and sees itself and its ancestors. In that order the descendants of a token are the tokens behind it up to the end of
its subtree, so that one interval of queries for each key says everything (`prepare_mask(intervals=...)`): O(S) memory.

A dynamic mask inside a tree would keep other keys on each branch, which no interval says: there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dmattn_ops import symbolic
from dmattn_ops.bands import Window, visibility
from dmattn_ops.call import UNBOUNDED
from dmattn_ops.checks import require, validation, values
from dmattn_ops.masks.prepare import prepare_mask
from dmattn_ops.masks.tile_mask import TileMask


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Sequences packed by `pack_prefix_tree` into `S` places."""

    tokens: Tensor  # int64 [S]; 0 in padding
    positions: Tensor  # int64 [S], the depth: the position of a token in its sequences; 0 in padding
    ends: Tensor  # int32 [S], the end of the subtree of each token, for `tree_mask`; 0 in padding
    index: tuple[Tensor, ...]  # int64, for each sequence the places of its tokens

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PrefixTree:
        """Return the tree on another device."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        return PrefixTree(moved(self.tokens), moved(self.positions), moved(self.ends), tuple(map(moved, self.index)))


def pack_prefix_tree(sequences: Sequence[Any], *, pad_to: int | None = None) -> PrefixTree:
    """Find the prefixes that sequences share, and pack them as a tree in depth-first order, on the CPU.

    Sequences that begin with another token become trees in a row. Branches follow each other as their first sequences do.
    `out[tree.index[n]]` are the rows of sequence `n` in what a model computes of the tree; a sequence may be the beginning of
    another, or there twice.

    Args:
        sequences: of token ids: lists of ints, or tensors or NumPy arrays with one dimension of integers.
        pad_to: the length of the result: what is behind the tree is padding, which sees nothing and which nothing sees.

    Raises:
        ValueError: for shapes, and where the tree is longer than `pad_to`.
        TypeError: for types and dtypes.
    """
    if not isinstance(sequences, Sequence) or isinstance(sequences, str):
        raise TypeError(f"sequences must be a list of sequences of token ids, got {require.type_text(sequences)}")
    rows = [_tokens(number, sequence) for number, sequence in enumerate(sequences)]
    order, shared = _sorted(rows)
    nothing = torch.empty(0, dtype=torch.int64)
    tokens, depths, pieces = [nothing], [nothing], [[nothing] for _ in rows]
    runs: list[list[int]] = []  # where runs without a branch begin, and where their subtrees end
    place = 0
    pending: list[Any] = _branches(rows, order, shared, (0, len(rows)), 0)
    while pending:
        branch = pending.pop()
        if isinstance(branch, int):  # everything below this run has its place
            runs[branch][1] = place
            continue
        (first, stop), depth = branch
        end = min(shared[first + 1 : stop], default=len(rows[order[first]]))
        tokens.append(rows[order[first]][depth:end])
        depths.append(torch.arange(depth, end))
        runs.append([place, place])
        places = depths[-1] + place - depth
        for member in order[first:stop]:
            pieces[member].append(places)
        place += end - depth
        pending += [len(runs) - 1, *_branches(rows, order, shared, (first, stop), end)]
    begin, end_of = torch.tensor(runs, dtype=torch.int64).reshape(-1, 2).unbind(1)
    ends = end_of.repeat_interleave(torch.diff(begin, append=torch.tensor([place]))).to(torch.int32)
    padding = _padding(place, pad_to)
    of_tree = (torch.nn.functional.pad(part, (0, padding)) for part in (torch.cat(tokens), torch.cat(depths), ends))
    whole, positions, ends = of_tree
    return PrefixTree(whole, positions, ends, tuple(torch.cat(of_row) for of_row in pieces))


def tree_mask(ends: Tensor, *, positions: Tensor | None = None, window_size: Window = (None, None)) -> TileMask:
    """Return the mask of packed trees: a token sees itself and its ancestors.

    Query `i` sees key `j` iff `j <= i < ends[j]`, inside the window. Takes O(S) memory, and the host reads nothing. With a window
    the mask is stored as bits, since the queries that see a key are no longer one interval: `S^2 / 4` bytes for each row of
    the batch, and `2 S^2` while it is made.

    Args:
        ends: int32 `[B, S]`, the end of the subtree of each token: `tree.ends[None]` of `pack_prefix_tree`, or of several trees
            in a row, each moved to its place. A place with `ends[i] <= i` is padding: it sees nothing and nothing sees it.
            Padding stands between trees or behind them. Padding inside a subtree would see its ancestors on a GPU and in
            compiled graphs, where values are not read; on a CPU the mask is stored as bits then, and is right.
        positions: integers `[B, S]`, the depth of each token, which a window counts.
        window_size: `(left, right)`: a token at position `p` sees those of its ancestors at positions `p - left` to `p + right`.

    Raises:
        ValueError: for shapes and sizes, and for a window without positions.
        TypeError: for types and dtypes.
    """
    _, window_size = visibility(True, "top_left", window_size)
    validation.dense(ends=ends)
    require.rank("ends", ends, 2, "[B, S], and the ends of one packed tree are passed as tree.ends[None]")
    require.dtype("ends", ends, torch.int32)
    if positions is not None:
        validation.dense(positions=positions)
        require.shape("positions", positions, tuple(ends.shape))
        require.dtype("positions", positions, *validation.INTEGERS)
        require.device("positions", positions, ends.device, "ends")
    windowed = any(limit is not None for limit in window_size)
    if windowed and positions is None:
        raise ValueError("window_size counts positions in a tree: positions must be given with it, got None")
    if windowed or (values.on_the_host(ends) and _has_padding_inside(ends)):
        keep = _dense(ends, positions, window_size).unsqueeze(1)
        return prepare_mask(keep, seqlen_q=ends.shape[1])
    return prepare_mask(intervals=(None, ends.unsqueeze(1)), seqlen_q=ends.shape[1], is_causal=True)


def _tokens(number: int, sequence: Any) -> Tensor:
    """Return a sequence as int64 on the CPU."""
    name = f"sequences[{number}]"
    try:
        tokens = torch.as_tensor(sequence, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise _no_tokens(name, sequence) from None
    if isinstance(sequence, (list, tuple)) and bool in map(type, sequence):
        raise _no_tokens(name, sequence)
    validation.dense(**{name: tokens})
    if tokens.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {require.text(tokens.shape)}")
    if tokens.numel():  # an empty list says nothing about its dtype
        require.dtype(name, tokens, *validation.INTEGERS)
    return tokens.to(torch.int64)


def _no_tokens(name: str, sequence: Any) -> Exception:
    """Return the error that says why a sequence is not one of token ids."""
    got = require.type_text(sequence)
    if isinstance(sequence, (list, tuple)):
        strange = [token for token in sequence if not require.is_integer(token)]
        if sequence and not strange:
            return ValueError(f"{name} must have token ids of at most 64 bits, got {max(sequence, key=abs)}")
        got = f"a {got} that holds {require.type_text(strange[0])}" if strange else got
    return TypeError(f"{name} must be a list, a tensor or an array of token ids, got {got}")


def _sorted(rows: list[Tensor]) -> tuple[list[int], list[int]]:
    """Return sequences in lexical order, by number, and how many tokens each of them shares with the one before it."""
    lists = [row.tolist() for row in rows]
    order = sorted(range(len(rows)), key=lambda number: lists[number])
    shared = [0]
    for one, other in pairwise(order):
        length = min(len(rows[one]), len(rows[other]))
        differing = (rows[one][:length] != rows[other][:length]).nonzero()
        shared.append(int(differing[0]) if len(differing) else length)
    return order, shared


def _branches(
    rows: list[Tensor], order: list[int], shared: list[int], members: tuple[int, int], depth: int
) -> list[tuple[tuple[int, int], int]]:
    """Return the branches of sequences that are alike up to a depth, the last one first: ranges of `order`, and the depth."""
    first, stop = members
    while first < stop and len(rows[order[first]]) == depth:  # these end here
        first += 1
    cuts = [first, *(place for place in range(first + 1, stop) if shared[place] == depth), stop]
    found = [pair for pair in pairwise(cuts) if pair[0] < pair[1]]
    found.sort(key=lambda pair: min(order[pair[0] : pair[1]]), reverse=True)
    return [(pair, depth) for pair in found]


def _padding(length: int, pad_to: int | None) -> int:
    """Return the number of padding positions that a tree of this length gets."""
    if pad_to is None:
        return 0
    [pad_to] = require.lengths(pad_to=pad_to)
    if pad_to < length:
        raise ValueError(f"pad_to must be at least the length of the tree, {length}, got {pad_to}")
    return pad_to - length


def _has_padding_inside(ends: Tensor) -> bool:
    """Return whether padding stands in the subtree of a token. Reads the values."""
    place = torch.arange(ends.shape[1])
    padding = ends <= place
    reached = torch.where(padding, 0, ends).cummax(1).values
    return bool((padding & (reached > place)).any())


def _dense(ends: Tensor, positions: Tensor | None, window_size: Window) -> Tensor:
    """Return the mask as bool `[B, S, S]`."""
    place = torch.arange(ends.shape[1], device=ends.device)
    query, key = place.unsqueeze(-1), place
    keep = (key <= query) & (query < ends.unsqueeze(-2)) & (ends > place).unsqueeze(-1)
    if positions is not None:
        of_query, of_key = positions.long().unsqueeze(-1), positions.unsqueeze(-2)
        left, right = window_size
        if left is not None:
            keep = keep & (of_query - symbolic.smaller(left, UNBOUNDED) <= of_key)
        if right is not None:
            keep = keep & (of_query + symbolic.smaller(right, UNBOUNDED) >= of_key)
    return keep

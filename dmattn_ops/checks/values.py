"""What is refused for the values that a tensor holds. Reading them waits for a GPU: there only with `DMATTN_CHECK=1`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dmattn_ops import environment
from dmattn_ops.call import HEADER, Varlen
from dmattn_ops.checks import require


def on_the_host(tensor: Tensor) -> bool:
    """Return whether there are values that can be read without waiting for a device: not while tracing, of fakes or under vmap."""
    return tensor.is_cpu and not is_compiling() and _storage(tensor) is not None


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the memory of a CPU tensor: None for fakes, whose storage is on the meta device, and for wrappers of torch.func."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return storage if storage.device.type == "cpu" else None


def memory(arguments: tuple[Any, ...]) -> None:
    """Refuse tensors of a CPU whose memory was given back: `untyped_storage().resize_(0)`, which torch's own operators read."""
    for tensor in arguments:
        if not isinstance(tensor, Tensor) or not tensor.is_cpu or tensor.layout != torch.strided:
            continue
        storage = _storage(tensor)  # what wrappers of torch.func hold comes here by itself
        if storage is not None and tensor.numel() and not storage.nbytes():
            shape = tuple(tensor.shape)
            raise ValueError(f"a tensor of shape {shape} has no memory: its storage was resized to 0 bytes")


def offsets(query: Tensor, key: Tensor, lengths: Varlen) -> None:
    """Refuse offsets that do not describe the packed tensors; rows behind the last one belong to no sequence."""
    for letter, name, packed, cu_seqlens, longest in (
        ("q", "query", query, lengths.cu_seqlens_q, lengths.max_seqlen_q),
        ("k", "key", key, lengths.cu_seqlens_k, lengths.max_seqlen_k),
    ):
        total = packed.shape[0]
        values = offsets_of(f"cu_seqlens_{letter}", cu_seqlens, name, total, rows_behind=True)
        widest = max((b - a for a, b in pairwise(values)), default=0)
        if widest > longest:
            raise ValueError(f"max_seqlen_{letter} must be at least the longest sequence, {widest}, got {longest}")


def offsets_of(name: str, cu_seqlens: Tensor, of: str, total: int, *, rows_behind: bool = False) -> list[int]:
    """Return offsets that are not empty; refuse those that do not go from 0 to the length `total` of what they divide.

    With `rows_behind` they may end before.
    """
    values = cu_seqlens.tolist()
    if not values or values[0] != 0 or values[-1] > total or (values[-1] < total and not rows_behind):
        got = f"{values[0]} to {values[-1]}" if values else "none"
        hint = ""
        if sum(values) == total:
            hint = ": lengths become offsets by torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))"
        raise ValueError(
            f"{name} must go from 0 to {'at most ' if rows_behind else ''}the length of {of}, {total}, got {got}{hint}"
        )
    if values != sorted(values):
        raise ValueError(f"{name} must not decrease, got {values}")
    return values


def used_keys(seqlen_k_used: Tensor, seqlen_k: int) -> None:
    """Refuse numbers of keys `[B]` that are negative, or more than there are."""
    for number in seqlen_k_used.tolist():
        if not 0 <= number <= seqlen_k:
            raise ValueError(f"seqlen_k_used must be between 0 and the length of key, {seqlen_k}, got {number}")


def contiguous_runs(name: str, ids: Tensor) -> None:
    """Refuse ids `[B, S]` of which one returns after another."""
    ordered, order = torch.sort(ids, dim=-1, stable=True)
    returns = (ordered[:, 1:] == ordered[:, :-1]) & (order[:, 1:] != order[:, :-1] + 1)
    if not returns.any():
        return
    places = torch.where(returns, order[:, 1:], ids.shape[1])
    position, row = min((int(position), row) for row, position in enumerate(places.amin(-1).tolist()))
    raise ValueError(
        f"{name} must be contiguous runs of equal ids, got id {int(ids[row, position])}, which returns at position"
        f" {position} of row {row} after another one"
    )


def promise(at_most: int, seen: Tensor) -> None:
    """Refuse a promise that a query breaks; `seen` are the keys that each sees."""
    most = int(seen.max()) if seen.numel() else 0
    if most > at_most:
        raise ValueError(f"at_most must be at least the most keys that a query sees, {most}, got {at_most}")


def lists(name: str, records: Tensor, tiles: int) -> None:
    """Refuse lists of tiles `[..., rows, 4 + capacity]` that are no lists of the numbers 0 to `tiles - 1`."""
    ranked, partial, full, indices = records[..., 0], records[..., 1], records[..., 2], records[..., HEADER:]
    rows, capacity = records.shape[-2], indices.shape[-1]
    order = torch.arange(rows, device=records.device)
    if bool((ranked.sort(-1).values != order).any()):
        raise ValueError(f"word 0 of the records of {name} must name each of {rows} rows once")
    if bool(((partial < 0) | (full < 0) | (partial.long() + full > capacity)).any()):
        raise ValueError(f"each record of {name} must list between 0 and {capacity} tiles")
    listed = torch.arange(capacity, device=records.device) < (partial + full).unsqueeze(-1)
    if bool((listed & ((indices < 0) | (indices >= tiles))).any()):
        raise ValueError(f"{name} must list tiles from 0 to {tiles - 1}, got another number")


def warn_of_pairs(mask: Any, seqlen_q: int) -> None:
    """Warn, once, of padding `[B, Sk]` that may be meant as a mask `[Sq, Sk]`."""
    if not is_compiling() and isinstance(mask, Tensor) and mask.shape == (seqlen_q, seqlen_q) and seqlen_q > 1:
        text = f"dmattn_ops: mask of shape {require.text(mask.shape)} is padding [B, Sk] of {seqlen_q} sequences. If it says"
        environment.warn_once(f"{text} which query sees which key, [Sq, Sk], pass mask[None, None].")

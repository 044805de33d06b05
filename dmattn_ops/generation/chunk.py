"""The positions of one call of a cache, and where what belongs to them is stored."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling


class Chunk(NamedTuple):
    """The positions of one call."""

    begin: Tensor  # int64 [B]: the length before
    position: Tensor  # int64 [B, n]: of what is none, that of the next one
    length: Tensor  # int64 [B], afterwards
    is_key: Tensor | None  # bool [B, n]; None is all
    counted: Tensor | None  # bool [B, n]: which are positions; None is all
    documents: Tensor | None  # int64 [B, n]
    changes: Tensor | None  # bool [B, n]: where a document begins

    def place_of(self, position: Tensor) -> Tensor:
        """Return the places in the call of positions `[B, heads, any]`: 0 where they come before it, `n` behind it."""
        count, ahead = self.position.shape[1], position - self.begin.view(-1, 1, 1)
        if self.counted is None:
            return ahead.clamp(0, count)
        numbers = (ahead.clamp(-1, count) + 1).flatten(1)
        return torch.searchsorted(self.counted.cumsum(-1), numbers).view_as(position)

    def leave_trail(self, trail: Tensor, states: Tensor) -> None:
        """Note for each of the last lengths where its document began and its id: `states` `[B, n, 2]` are those of the self."""
        count = trail.shape[1]
        number = torch.arange(count, device=trail.device)
        length = self.length[:, None] - (self.length[:, None] - number) % count
        index = self.place_of((length - 1)[:, None]).squeeze(1).clamp(max=states.shape[1] - 1)
        made = states.gather(1, index.unsqueeze(-1).expand(-1, -1, 2))
        trail.copy_(torch.where((length > self.begin[:, None]).unsqueeze(-1), made, trail))


def refilled(needed: Tensor, slots: int) -> Tensor:
    """Return which key each slot holds afterwards, `[B, heads, N]`: an index into its keys and the new ones behind them.

    `needed` `[B, heads, N + n]` says which are needed. New keys that are go, in their order, into slots whose keys are not.
    """
    occupied, wanted = needed.split([slots, needed.shape[-1] - slots], -1)
    source = torch.searchsorted(wanted.cumsum(-1), (~occupied).cumsum(-1))  # the n-th wanted one, of the n-th free slot
    stays = occupied | (source == wanted.shape[-1])
    return torch.where(stays, torch.arange(slots, device=needed.device), source + slots)


def side_by_side(stored: Tensor, new: Tensor) -> Tensor:
    """Return keys `[B, N + n, Hkv, D]`: those of slots `[B, Hkv, N, D]`, then new ones `[B, n, Hkv, D]`.

    Two copies, since `torch.cat` is slow with such strides: 56 us for 21 MB (H200, 2026-11-26).
    """
    batch, heads, slots, dim = stored.shape
    whole = new.new_empty(batch, slots + new.shape[1], heads, dim)
    whole[:, :slots].copy_(stored.transpose(1, 2))
    whole[:, slots:].copy_(new)
    return whole


def blank(results: Any, counted: Tensor) -> Any:
    """Return results whose rows that are not counted, bool `[B, n]`, are empty: out 0, lse and the maximum -inf."""
    if isinstance(results, Tensor):
        return torch.where(counted[:, :, None, None], results, 0)
    out, *statistics = results
    statistics = [torch.where(counted[:, None], part, -torch.inf) for part in statistics]
    return torch.where(counted[:, :, None, None], out, 0), *statistics


def lasting() -> AbstractContextManager[Any]:
    """Return a context that makes tensors which can be changed inside and outside of inference mode."""
    return nullcontext() if is_compiling() else torch.inference_mode(False)

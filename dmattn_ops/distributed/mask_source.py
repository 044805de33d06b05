"""A mask of the whole sequence, as far as a rank has to know it: what describes keys is gathered from all ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dmattn_ops.distributed.pieces import Sight
from dmattn_ops.distributed.sequence import Layout, in_order
from dmattn_ops.distributed.team import Team, all_ranks
from dmattn_ops.distributed.ulysses import own_heads, to_heads
from dmattn_ops.masks.documents import Documents, id_pair
from dmattn_ops.masks.tile_mask import TileMask


class Source(NamedTuple):
    """A mask of the whole sequence, as far as this rank has to know it, before it is cut into pieces."""

    # Per key `[B|1, Hm, 1, Sk]`, rows of this rank `[B|1, Hm, rows, Sk]`, or of everything.
    mask: Tensor | TileMask | None
    documents: tuple[Tensor, Tensor] | None  # ids of all queries and of all keys
    offsets: Tensor | None  # of packed sequences, instead of ids

    @property
    def nothing(self) -> bool:
        """Whether only causal and window conditions hide keys."""
        return self.mask is None and self.documents is None and self.offsets is None

    @property
    def of_keys(self) -> bool:
        """Whether the mask beside documents, if any, is one of keys alone, the same for all heads."""
        return self.mask is None or (isinstance(self.mask, Tensor) and tuple(self.mask.shape[1:3]) == (1, 1))

    @property
    def device(self) -> torch.device:
        """The device of documents or of offsets, of which there are some."""
        told = (self.offsets, *(self.documents or ()))
        return next(tensor.device for tensor in told if tensor is not None)

    def ids(self, seqlen: int) -> tuple[Tensor, Tensor] | None:
        """Return the ids of all queries and of all keys; those of packed sequences are their numbers."""
        if self.offsets is None:
            return self.documents
        places = torch.arange(seqlen, device=self.offsets.device)
        of_all = torch.bucketize(places, self.offsets[1:], right=True, out_int32=True).unsqueeze(0)
        return of_all, of_all

    def to(self, device: torch.device) -> Source:
        """Return the source on a device."""
        documents = self.documents
        if documents is not None:
            of_queries = sent(documents[0], device)
            documents = of_queries, of_queries if documents[1] is documents[0] else sent(documents[1], device)
        mask = self.mask
        if mask is not None:
            mask = sent(mask, device) if isinstance(mask, Tensor) else mask.to(device)
        return Source(mask, documents, None if self.offsets is None else sent(self.offsets, device))


def source_of(
    mask: Tensor | TileMask | None,
    documents: Documents | None,
    cu_seqlens: Tensor | None,
    team: Team,
    layout: Layout,
    method: str,
    sight: Sight,
) -> Source:
    """Return the description of a mask that this rank needs. It gathers the parts about keys, so all ranks call it alike."""
    ids: tuple[Tensor, Tensor] | None = None
    if documents is not None:
        pair = id_pair(documents)
        of_queries = _whole(pair[0], 1, team, layout)
        ids = of_queries, of_queries if pair[1] is pair[0] else _whole(pair[1], 1, team, layout)
    if isinstance(mask, Tensor):
        mask = _whole_tensor(mask, team, layout, method, sight)
    elif mask is not None and method == "ulysses":
        mask = mask.heads(*_bounds(own_heads(mask.shape[1], team), mask.shape[1]))
    return Source(mask, ids, cu_seqlens)


def _whole_tensor(mask: Tensor, team: Team, layout: Layout, method: str, sight: Sight) -> Tensor:
    """Return a mask of keys for all keys; one of this rank's rows as it is, or for Ulysses all rows of the rank's heads."""
    if mask.dim() == 2:
        mask = mask[:, None, None, :]
    mask = mask != 0
    per_key = is_per_key(mask, sight.seqlen_k, team.size)
    if per_key:
        mask = _whole(mask, 3, team, layout)
    if method != "ulysses":
        return mask
    heads = mask.shape[1]
    if per_key or heads == 1:
        return mask[:, own_heads(heads, team)] if per_key else _whole(mask, 2, team, layout)
    rows = mask.transpose(1, 2).to(torch.uint8)
    if heads < team.size:
        rows = rows.repeat_interleave(team.size // heads, 2)
    return to_heads(rows, team, layout).transpose(1, 2).bool()


def is_per_key(tensor: Tensor, seqlen_k: int, size: int) -> bool:
    """Return whether a mask or a bias is one of the keys that a rank holds."""
    return tensor.shape[2] == 1 and tensor.shape[3] * size == seqlen_k


def _whole(part: Tensor, dim: int, team: Team, layout: Layout) -> Tensor:
    """Gather a tensor from all ranks, in the order of the sequence."""
    return in_order(all_ranks(part.movedim(dim, 0), team), layout, team.size, 0).movedim(0, dim)


def _bounds(own: slice, size: int) -> tuple[int, int]:
    return (0, size) if own.start is None else (own.start, own.stop)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. A GPU gets it behind what it was given to compute before, and the host does not wait."""
    if device.type != "cuda":
        return tensor.to(device)
    return (tensor.pin_memory() if tensor.device.type == "cpu" else tensor).to(device, non_blocking=True)

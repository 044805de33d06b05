"""What the queries of one forward of a model see: made once from what transformers describes, and shared by its layers.

All of its usual masks (causal, sliding windows, padding on either side, packed sequences, chunks, bidirectional, caches) show
each key to the queries of one interval. So a mask takes O(S) memory, and a cache's length may be a tensor that nobody reads.
Other masks are evaluated and packed into bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dmattn_ops import layout
from dmattn_ops.bands import NO_BAND, Band
from dmattn_ops.masks import dynamic_mask, prepare_mask
from dmattn_ops.tile_mask import TileMask, from_intervals

Interval = tuple[Tensor, Tensor]  # of queries for each key: int32 [B|1, H|1, Sk], from and to


@dataclass(frozen=True, eq=False)
class ForwardMask:
    """Which keys the queries of one forward see. Query `i` stands where key `i + offset` stands.

    A key is visible where the band shows it, in the query's own document, and unless it is padding; or where a `dense` mask
    of all that says so. It takes a mask's place in models of transformers, and in `generate`.
    """

    q_length: int
    kv_length: int
    offset: int | Tensor
    is_causal: bool
    left: int | None = None  # how many keys before the query's own are visible; None is all
    right: int | None = None
    documents: Tensor | None = None  # of keys: ids [B|1, Sk], runs of equal ones
    padding: Tensor | None = None  # bool [B, Sk]: True is a key
    prepared: TileMask | None = None  # None where the band says all
    dense: bool = False  # whether `prepared` was evaluated as a whole
    ndim: int = field(default=4, init=False)  # as transformers asks it: not a padding mask of two

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(1, 1, Sq, Sk)`: it broadcasts."""
        return (1, 1, self.q_length, self.kv_length)

    @property
    def keywords(self) -> dict[str, Any]:
        """The causal and window conditions as `flash_dmattn_func` takes them; `prepared` holds them too."""
        if not isinstance(self.offset, int) and not isinstance(self.offset, torch.SymInt):
            return {}
        window = (self.left, self.right)
        return {"is_causal": self.is_causal, "causal_from": self.offset, "window_size": window}

    def contiguous(self) -> ForwardMask:
        """Return itself: `generate` asks that of masks."""
        return self

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ForwardMask:
        """Return the mask on another device: models spread over several move the inputs of their layers."""
        names = ("offset", "documents", "padding", "prepared")
        parts = {name: getattr(self, name) for name in names}
        moved = {
            name: part.to(device, non_blocking=non_blocking) for name, part in parts.items() if hasattr(part, "to")
        }
        return replace(self, **moved)

    def intervals(self, device: torch.device) -> Interval:
        """Return the queries that each key is visible to, by everything but a `dense` mask."""
        keys = torch.arange(self.kv_length, dtype=torch.int32, device=device)[None, None]
        own = keys - self.offset  # the query that stands where the key stands
        right = 0 if self.is_causal else self.right
        start = torch.zeros_like(own) if right is None else own - right
        end = torch.full_like(own, self.q_length) if self.left is None else own + self.left + 1
        if self.documents is not None:
            first, last = (part.unsqueeze(1) - self.offset for part in layout.runs(self.documents))
            start, end = torch.maximum(start, first), torch.minimum(end, last)
        if self.padding is not None:
            end = torch.where(self.padding.unsqueeze(1), end, 0)
        start, end = torch.broadcast_tensors(start, end)
        return tuple(part.clamp(0, self.q_length).to(torch.int32).contiguous() for part in (start, end))  # type: ignore[return-value]

    def with_best(self, scores: Tensor, keep: int, keep_first: int, keep_last: int) -> TileMask:
        """Return the mask that shows the keys of the best scores `[B, H|Hkv|1, Sk]` as well as these conditions.

        Padding is never among the best. See `dynamic_mask`.
        """
        if self.dense:
            raise NotImplementedError(
                "dynamic masks take causal, sliding, packed and padded ones beside them, but no mask function of a model's own"
            )
        if self.padding is not None:
            scores = scores.masked_fill(~self.padding.unsqueeze(1), -torch.inf)
        best = dynamic_mask(
            scores,
            keep,
            keep_first=keep_first,
            keep_last=keep_last if self.is_causal else 0,
            documents=self.documents,
            is_causal=self.is_causal,
        )
        assert best.end is not None
        start, end = self.intervals(scores.device)
        end = torch.minimum(end, (best.end - self.offset).clamp(0, self.q_length))
        right = 0 if self.is_causal else self.right
        if isinstance(self.offset, (int, torch.SymInt)) and (self.documents is None or right == 0):
            # the band says where each key begins, so that kernels may pack the keys
            band = NO_BAND if right is None else Band(hi=self.offset + right)
            return from_intervals((None, end.to(torch.int32)), None, best.at_most, self.q_length, band)
        if best.start is not None:  # else the band begins later
            start = torch.maximum(start, (best.start - self.offset).clamp(0, self.q_length))
        both = start.to(torch.int32), end.to(torch.int32)
        return prepare_mask(intervals=both, at_most=best.at_most, seqlen_q=self.q_length)


torch.export.register_dataclass(ForwardMask, serialized_type_name="dmattn_ops.ForwardMask")


def make(
    q_length: int,
    kv_length: int,
    offset: int | Tensor,
    *,
    is_causal: bool,
    left: int | None = None,
    right: int | None = None,
    documents: Tensor | None = None,
    padding: Tensor | None = None,
    device: torch.device,
) -> ForwardMask:
    """Return the mask of a band, documents and padding; tensors are made only where the band does not say all."""
    if padding is not None and _known_to_be_all(padding):
        padding = None
    made = ForwardMask(q_length, kv_length, offset, is_causal, left, right, documents, padding)
    if documents is None and padding is None and not isinstance(offset, Tensor):
        return made
    prepared = prepare_mask(intervals=made.intervals(device), seqlen_q=q_length, **made.keywords)
    return replace(made, prepared=prepared)


def make_dense(keep: Tensor) -> ForwardMask:
    """Return the mask that a bool `[B|1, H|1, Sq, Sk]` says."""
    q_length, kv_length = keep.shape[-2:]
    prepared = prepare_mask(keep, seqlen_q=q_length)
    return ForwardMask(q_length, kv_length, 0, False, prepared=prepared, dense=True)


def runs_of(visible: Callable[..., Tensor], batch: int, kv_length: int, kv_offset: int, device: torch.device) -> Tensor:
    """Return ids `[B, Sk]` of runs in which each position sees the one before: documents or chunks, by a mask function."""
    places = torch.arange(kv_length, device=device)[None] + kv_offset
    sequences = torch.arange(batch, device=device)[:, None]
    sees = visible(sequences, torch.zeros_like(sequences), places, (places - 1).clamp(min=0))
    return (~sees).expand(batch, -1).cumsum(-1, dtype=torch.int32)


def _known_to_be_all(padding: Tensor) -> bool:
    """Return whether nothing is padding, where that may be asked: it waits for a GPU once in a forward, as SDPA's mask does."""
    if is_compiling() or (padding.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(padding.all())

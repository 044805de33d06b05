"""What the queries of one forward of a model see: made once from what transformers describes, and shared by its layers.

All of its usual masks (causal, sliding windows, padding on either side, packed sequences, chunks, bidirectional, caches) are a
band of keys and one number for each query and key. They are prepared with lists of tiles, once for all layers, forward and
backward. Each of these masks also shows each key to the queries of one interval: that takes O(S) memory where lists would be
long, and a cache's length may be a tensor that nobody reads. Other masks are evaluated and packed into bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dmattn_ops import symbolic
from dmattn_ops.bands import NO_BAND, Band, band_of
from dmattn_ops.call import HEADER
from dmattn_ops.integrations import packed
from dmattn_ops.integrations.acts_as_tensor import ActsAsTensor
from dmattn_ops.masks import layout
from dmattn_ops.masks.prepare import dynamic_mask, prepare_mask
from dmattn_ops.masks.tile_mask import Segments, TileMask, from_intervals, from_segments
from dmattn_ops.meta import list_capacity, tile_records
from dmattn_ops.nn.dynamic import without_padding

_LONGEST_LISTS = 1 << 24  # words that the lists of one forward may take, 64 MiB: 8 sequences of 128k
Interval = tuple[Tensor, Tensor]  # of queries for each key: int32 [B|1, H|1, Sk], from and to


@dataclass(eq=False)
class ForwardMask(ActsAsTensor):
    """Which keys the queries of one forward see. Query `i` stands where key `i + offset` stands.

    A key is visible where the band shows it, in the query's own document, and unless it is padding; or where a `dense` mask
    of all that says so. It takes a mask's place in models of transformers, and in `generate`: to a model's own code it is a
    bool tensor `[B, 1, Sq, Sk]`, which is made where that code computes with it. It is never modified, and a plain dataclass,
    so that what moves, casts, splits or copies the inputs of layers (FSDP, Lightning, accelerate) can take it apart.
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
    anchor: Tensor | None = None  # [B, 0]: has no elements; its batch size and its device are those of the mask

    @property
    def ndim(self) -> int:
        """4, as transformers asks it: not a padding mask of two."""
        return 4

    @property
    def shape(self) -> torch.Size:
        """`(B, 1, Sq, Sk)`; a mask of heads has them too."""
        heads = 1 if self.prepared is None else self.prepared.shape[1]
        return torch.Size((self._sized().shape[0], heads, self.q_length, self.kv_length))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor that it stands for: bool."""
        return torch.bool

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self._sized().device

    def _sized(self) -> Any:
        """Return the part whose first dimension is the batch size and whose device is the mask's."""
        parts = (self.anchor, self.padding, self.documents, self.prepared)
        return next((part for part in parts if part is not None), torch.empty(1, 0))

    def tensor(self) -> Tensor:
        """Return the mask as bool `[B, 1, Sq, Sk]`."""
        if self.prepared is None:
            limits = band_of(**self.keywords).limits(self.q_length, self.kv_length)
            keep = layout.band_mask(*limits, self.q_length, self.kv_length, self.device)[None, None]
        else:
            keep = self.prepared.to_dense()
        return keep.expand(self.shape)

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

    def to(self, *arguments: Any, **options: Any) -> Any:
        """Return the mask on another device, given as for `Tensor.to`; with another dtype, the tensor that it stands for.

        Models spread over several devices move the inputs of their layers.
        """
        given = [*arguments, *(options.get(name) for name in ("device", "dtype", "other"))]
        if any(isinstance(part, (Tensor, torch.dtype)) and part is not torch.bool for part in given):
            return self.tensor().to(*arguments, **options)
        device = next((part for part in given if isinstance(part, (torch.device, str, int)) and part is not True), None)
        if device is None:
            return self
        blocking = {"non_blocking": bool(options.get("non_blocking", False))}
        names = ("offset", "documents", "padding", "prepared", "anchor")
        parts = {name: getattr(self, name) for name in names}
        return replace(
            self, **{name: part.to(device, **blocking) for name, part in parts.items() if hasattr(part, "to")}
        )

    def prepare(self, device: torch.device) -> ForwardMask:
        """Return the mask with what kernels read of its documents, its padding and its tensor of an offset.

        Its tiles are listed here, where that takes little memory, so that no layer does it again.
        """
        segments = self._segments()
        if segments is None or self._lists_are_long():
            made = prepare_mask(intervals=self.intervals(device), seqlen_q=self.q_length, **self.keywords)
        else:
            made = from_segments(segments, self.q_length, self.kv_length, band_of(**self.keywords))
        return replace(self, prepared=made)

    def _segments(self) -> Segments | None:
        """Return numbers `[B|1, Sq]` of queries and `[B|1, 1, Sk]` of keys that are equal where the query sees the key, inside
        the band. None where it is not known in which documents queries stand.

        A document has an even number where there is padding, and its padding the odd one behind it.
        """
        if not isinstance(self.offset, (int, torch.SymInt)):
            return None
        keep, documents = self.padding if self.padding is None else self.padding.unsqueeze(1), self.documents
        if documents is None:
            return None if keep is None else (None, keep.to(torch.int32) - 1)
        last = self.offset + self.q_length
        if not (symbolic.certainly(self.offset >= 0) and symbolic.certainly(last <= self.kv_length)):
            return None
        of_queries = documents[:, self.offset : last].contiguous()
        if keep is None:
            return of_queries, documents.unsqueeze(1).clone()
        return 2 * of_queries, 2 * documents.unsqueeze(1) + (~keep).to(torch.int32)

    def _lists_are_long(self) -> bool:
        """Return whether lists of tiles are known to take more than `_LONGEST_LISTS` words."""
        limits = band_of(**self.keywords).limits(self.q_length, self.kv_length)
        rows, cols = tile_records(self.q_length), tile_records(self.kv_length)
        words = rows * (HEADER + list_capacity(cols, *limits)) + cols * (HEADER + list_capacity(rows, *limits))
        batch = symbolic.wider(part.shape[0] for part in (self.documents, self.padding) if part is not None)
        return symbolic.certainly(batch * words > _LONGEST_LISTS)

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

        Padding is never among the best, and the first keys are those behind the padding on the left. See `dynamic_mask`.
        """
        if self.dense:
            raise NotImplementedError(
                "dynamic masks take causal, sliding, packed and padded ones beside them, but no mask function of a model's own"
            )
        documents = self.documents
        if self.padding is not None:
            scores, documents = without_padding(scores, self.padding, documents, keep_first)
        best = dynamic_mask(
            scores,
            keep,
            keep_first=keep_first,
            keep_last=keep_last if self.is_causal else 0,
            documents=documents,
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
    batch: int = 1,
    device: torch.device,
) -> ForwardMask:
    """Return the mask of a band, documents and padding; tensors are made only where the band does not say all."""
    if padding is not None and _known_to_be_all(padding):
        padding = None
    anchor = torch.empty(batch, 0, device=device)
    made = ForwardMask(q_length, kv_length, offset, is_causal, left, right, documents, padding, anchor=anchor)
    if documents is None and padding is None and not isinstance(offset, Tensor):
        return made
    return made.prepare(device)


def make_dense(keep: Tensor) -> ForwardMask:
    """Return the mask that a bool `[B, H|1, Sq, Sk]` says."""
    q_length, kv_length = keep.shape[-2:]
    prepared, anchor = prepare_mask(keep, seqlen_q=q_length), torch.empty(keep.shape[0], 0, device=keep.device)
    return ForwardMask(q_length, kv_length, 0, False, prepared=prepared, dense=True, anchor=anchor)


def runs_of(
    visible: Callable[..., Tensor],
    batch: int,
    kv_length: int,
    kv_offset: int,
    padding: Tensor | None,
    documents: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Return ids `[B, Sk]` of runs in which each position sees the one before: documents or chunks, by a mask function.

    Inside given `documents` `[B, Sk]`, the function is asked as if each of them were alone.
    """
    if documents is None:
        places = torch.arange(kv_length, device=device)[None] + kv_offset
    else:
        places = packed.own_places(documents, padding, kv_offset)
    sequences = torch.arange(batch, device=device)[:, None]
    sees = visible(sequences, torch.zeros_like(sequences), places, (places - 1).clamp(min=0))
    if documents is not None:
        sees = sees & (documents == layout.before(documents))
    return (~sees).expand(batch, -1).cumsum(-1, dtype=torch.int32)


def _known_to_be_all(padding: Tensor) -> bool:
    """Return whether nothing is padding, where that may be asked: it waits for a GPU once in a forward, as SDPA's mask does."""
    if is_compiling() or (padding.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(padding.all())

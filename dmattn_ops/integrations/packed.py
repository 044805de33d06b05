"""Which sequences are packed in a forward of a model, as its `position_ids` or `cu_seq_lens_q` tell.

Few models pass that on to what makes their masks. So it is noted where a model is called, and read where a mask is made.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from dmattn_ops import symbolic
from dmattn_ops.masks import layout


class Packing:
    """The packed sequences of one call of a model: its positions or offsets, as the call gave them."""

    def __init__(
        self,
        positions: Tensor | None,
        offsets: Tensor | None,
        own_mask: bool,
        refusal: str | None,
        followed: bool = False,
    ) -> None:
        self.positions = positions  # [B|1, S], or [3|4, B|1, S] of models with several axes
        self.offsets = offsets  # int [N + 1], into all tokens of the batch, one row after the other
        self.own_mask = own_mask  # whether the caller brought a whole mask, which says everything
        self.refusal = refusal  # why this model cannot keep packed sequences apart
        self.followed = followed  # whether a mask was made that follows it

    def documents(self, batch: int, q_length: int, keep: Tensor | None) -> Tensor | None:
        """Return ids `[B, Sq]` of the sequences that the queries belong to, from 0 on; None where there is only one.

        Positions are read on the host once in a mask, but not while compiling. `keep` is bool `[B, Sq]`, False where a query
        is padding.
        """
        self.followed = True
        if not symbolic.certainly(q_length > 1) and not is_compiling():
            return None
        ids = self._ids(batch, q_length, keep)
        if ids is None or (not is_compiling() and not bool(ids[:, -1].any())):
            return None
        if self.refusal is not None:
            raise NotImplementedError(
                f"position_ids or cu_seq_lens_q tell of packed sequences (while compiling: they may), and {self.refusal}"
            )
        return ids

    def _ids(self, batch: int, q_length: int, keep: Tensor | None) -> Tensor | None:
        if self.offsets is not None:
            places = torch.arange(batch * q_length, device=self.offsets.device)
            ids = torch.bucketize(places, self.offsets[1:], right=True).view(batch, q_length)
            return (ids - ids[:, :1]).to(torch.int32)
        positions = self.positions
        assert positions is not None
        # axes of images; with a fourth, the first is the text's
        several = positions.dim() == 3 and positions.shape[0] == 3
        positions = positions[0] if positions.dim() == 3 else positions
        if positions.dim() != 2 or positions.shape[1] != q_length or positions.shape[0] not in (1, batch):
            return None
        return runs(positions.expand(batch, -1), keep, several)


def runs(positions: Tensor, keep: Tensor | None, several: bool = False) -> Tensor:
    """Return ids of sequences for positions `[B, S]`: a new one begins where a token is not the next one of that before it.

    Padding lies between tokens without being one, whether positions count it or not. Of positions with `several` axes, the
    first one stands still in an image, and only begins anew in a new sequence.
    """
    places = torch.arange(positions.shape[1], device=positions.device).expand(positions.shape)
    last = places[:, :-1]
    if keep is not None:
        last = torch.where(keep, places, -1).cummax(-1).values[:, :-1]
    step = positions[:, 1:] - positions.gather(1, last.clamp(min=0))
    begins = step < 0 if several else (step != 1) & (step != places[:, 1:] - last)
    if keep is not None:
        begins = begins & keep[:, 1:] & (last >= 0)
    return torch.nn.functional.pad(begins.cumsum(-1), (1, 0)).to(torch.int32)


def of_keys(documents: Tensor, packing: Packing, q_offset: int | Tensor, kv_offset: int, kv_length: int) -> Tensor:
    """Return ids `[B, Sk]` of keys for those of queries. Keys of a cache belong to the first sequence, if it goes on."""
    first = q_offset - kv_offset
    if isinstance(first, int) and first == 0 and kv_length == documents.shape[1]:
        return documents
    places = torch.arange(kv_length, device=documents.device) - first
    ids = documents[:, places.clamp(0, documents.shape[1] - 1)]
    if packing.positions is None:
        return ids
    start = packing.positions[0] if packing.positions.dim() == 3 else packing.positions
    anew = (start[:, :1] == 0).to(torch.int32)
    return torch.where(places < 0, ids - anew, ids)


def own_places(documents: Tensor, padding: Tensor | None, kv_offset: int) -> Tensor:
    """Return the position `[B, Sk]` that each key would have if its sequence were alone, after the padding on the left."""
    batch, length = documents.shape
    places = torch.arange(length, device=documents.device).expand(batch, -1) + kv_offset
    left = 0 if padding is None else (padding.cumsum(-1) == 0).sum(-1, keepdim=True)
    start = layout.runs(documents)[0] + kv_offset
    return torch.where(documents == documents[:, :1], places, places - start + left)


class _Noted(threading.local):
    def __init__(self) -> None:
        self.packing: Packing | None = None  # of each thread: compiled code asks whether there is one


_noted = _Noted()


def noted() -> Packing | None:
    """Return the packed sequences that the running call of a model was told, or None."""
    return _noted.packing


def note(packing: Packing | None) -> Packing | None:
    """Note what the call of a model tells, and return what was noted before."""
    before, _noted.packing = _noted.packing, packing
    return before


def told(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Packing | None:
    """Read packed sequences from the arguments of a model's call; None where they name none."""
    given = dict(zip(_names(type(model)), arguments, strict=False)) | keywords if len(arguments) > 1 else keywords
    positions, offsets, mask = (given.get(name) for name in ("position_ids", "cu_seq_lens_q", "attention_mask"))
    if not isinstance(positions, Tensor) and not isinstance(offsets, Tensor):
        return None
    own_mask = mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2)
    refusal = None
    if given.get("encoder_hidden_states") is not None:
        refusal = (
            "nothing says which part of the encoder's output, to which this model attends too, belongs to which sequence: pass"
            " one sequence in a row, with padding"
        )
    elif _mixes_otherwise(model) and offsets is None and given.get("seq_idx") is None:
        refusal = (
            f"{type(model).__name__} also has layers that mix them without attention (convolutions, state spaces): pass"
            " cu_seq_lens_q or seq_idx, if those layers follow it, or one sequence in a row"
        )
    return Packing(positions, offsets, own_mask, refusal)


def _mixes_otherwise(model: Any) -> bool:
    """Return whether a model has layers beside attention in which a token learns of others."""
    kinds = getattr(model.config, "layer_types", None) or ()
    return (
        getattr(model, "_is_stateful", False)
        or any(("attention" not in kind and "sliding" not in kind) or "linear" in kind for kind in kinds)
        or any(getattr(model.config, name, None) for name in ("conv_kernel_size", "conv_L_cache", "trigram_input"))
    )


@torch.compiler.assume_constant_result
def _names(kind: type) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]  # type: ignore[attr-defined]


def refuse_unfollowed(batch: int, q_length: int) -> None:
    """Refuse packed sequences that no mask of this forward follows: its model makes its masks itself, from padding alone."""
    packing = _noted.packing
    if packing is None or packing.followed or packing.own_mask:
        return
    packing.refusal = packing.refusal or (
        "this model makes its masks itself, without them: pass attention_mask as a mask [B, 1, S, S] that keeps the sequences"
        " apart, or one sequence in a row"
    )
    packing.documents(batch, q_length, None)

"""`TileMask`: a mask made once and used by many calls, in the form that kernels read."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dmattn_ops import symbolic
from dmattn_ops.bands import NO_BAND, Band
from dmattn_ops.call import CHOSEN_TENSORS, MASK_TENSORS, TILE, UNBOUNDED, Mask
from dmattn_ops.checks import dtensors, require, values
from dmattn_ops.masks import layout, taken_apart
from dmattn_ops.meta import ceil_div


@dataclass(frozen=True, eq=False, repr=False)
class TileMask:
    """A mask of `[Bm, Hm, Sq, Sk]` in the form that kernels read; made by `prepare_mask` and others, never modified.

    `dynamic_mask`, `selection_mask` and `trees.tree_mask` make masks too. There are four kinds. Bits and segments have `row_tiles`
    and `col_tiles`, lists of the 128 x 128 tiles in which something is visible. `row_bits` and `col_bits`, or `q_segments`,
    `k_segments` and the band, say what is visible inside these tiles. Intervals show key `j` to the queries
    `start[j] <= i < end[j]` but for `hidden_from[j] <= i < hidden_to[j]`, inside the band; without `start` from the first query
    on. Chosen blocks are stored as their numbers, `chosen [Bm, Hm, Sq, k]`, with segments; the property `mask` returns them as
    bits. Registered as a pytree: it may be an argument or a result of compiled and exported functions. Lengths stay dynamic
    there, since `Sq` and `Sk` are the sizes of the tensor `lengths`.
    """

    lengths: Tensor  # [Sq, Sk, 0]: has no elements
    row_tiles: Tensor | None = None
    col_tiles: Tensor | None = None
    row_bits: Tensor | None = None
    col_bits: Tensor | None = None
    q_segments: Tensor | None = None
    k_segments: Tensor | None = None
    start: Tensor | None = None
    end: Tensor | None = None
    hidden_from: Tensor | None = None
    hidden_to: Tensor | None = None
    at_most: int | None = None
    band_lo: int = -UNBOUNDED
    band_hi: int = UNBOUNDED
    from_bottom_right: bool = False
    chosen: Tensor | None = None
    block_keys: Tensor | None = None  # [block, 0]: has no elements

    _leaves = None  # of one that tree_map made of something else than tensors

    def __post_init__(self) -> None:
        if not is_compiling():
            self.__dict__.update(taken_apart.require_fitting(self))

    def __getstate__(self) -> dict[str, Any]:
        return taken_apart.state_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        taken_apart.restore(self, state)

    def __copy__(self) -> TileMask:
        return self._with({})

    def __deepcopy__(self, memo: dict[int, Any]) -> TileMask:
        return self._with({name: deepcopy(getattr(self, name), memo) for name in _FIELDS})

    @property
    def mask(self) -> Mask:
        """The tensors as the operators take them; bits of chosen blocks."""
        if self.chosen is not None:
            return as_bits(self).mask
        held = self._held()
        if not is_compiling():
            values.memory(held)
        return held

    @property
    def band(self) -> Band:
        """The causal and window conditions that are folded in."""
        return Band(self.band_lo, self.band_hi, self.from_bottom_right)

    @property
    def kind(self) -> str:
        """ "bits", "segments", "intervals" or "chosen"."""
        return self._held().kind if self.chosen is None else "chosen"

    @property
    def seqlen_q(self) -> int:
        """`Sq`."""
        return self.lengths.shape[0]

    @property
    def seqlen_k(self) -> int:
        """`Sk`."""
        return self.lengths.shape[1]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(Bm, Hm, Sq, Sk)`: `Bm` and `Hm` are 1 where the mask is the same for all."""
        if self.chosen is not None:
            parts = (self.chosen, self.q_segments, self.k_segments)
            batch = symbolic.wider(part.shape[0] for part in parts if part is not None)
            return (batch, self.chosen.shape[1], self.seqlen_q, self.seqlen_k)
        leading = self.end if self.row_tiles is None else self.row_tiles
        assert leading is not None
        return (leading.shape[0], leading.shape[1], self.seqlen_q, self.seqlen_k)

    @property
    def ndim(self) -> int:
        """4, like a mask that is a tensor: models of transformers ask it."""
        return 4

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.lengths.device

    @property
    def nbytes(self) -> int:
        """The memory that the tensors take."""
        held = (getattr(self, name) for name in (*MASK_TENSORS, *CHOSEN_TENSORS))
        return sum(part.nbytes for part in held if part is not None)

    def density(self) -> Tensor:
        """Return the share of the 128 x 128 tiles that kernels visit, a float32 scalar on the mask's device."""
        mask = self.mask
        if mask.row_tiles is None:
            limits = self.band.limits(self.seqlen_q, self.seqlen_k)
            with dtensors.constants_beside(self.lengths):
                tiles = layout.interval_tiles(mask, *limits, self.seqlen_q, self.seqlen_k)
        else:
            tiles = mask.row_tiles[..., 1:3]  # how many of each row are listed
        batch, heads, _, _ = self.shape
        rows, columns = (ceil_div(length, TILE) for length in (self.seqlen_q, self.seqlen_k))
        return tiles.sum(dtype=torch.float32) / symbolic.larger(1, batch * heads * rows * columns)

    def to_dense(self) -> Tensor:
        """Return the mask as bool `[Bm, Hm, Sq, Sk]`."""
        limits = self.band.limits(self.seqlen_q, self.seqlen_k)
        with dtensors.constants_beside(self.lengths):
            return layout.dense(self.mask, *limits, self.seqlen_q, self.seqlen_k)

    def queries(self, start: int, stop: int) -> TileMask:
        """Return the mask of queries `start` to `stop - 1`: for chunked prefill, decoding and context parallelism.

        A band that is folded in is shifted. A causal condition that a call adds is aligned by the lengths of the part: fold
        it in before, or pass the diagonal as `causal_from`.
        """
        start, stop = require.part("queries", start, stop, self.seqlen_q)
        if self.kind == "intervals":
            moved: dict[str, Tensor | None] = {
                name: part.clamp(start, stop).sub_(start)  # in this order: any int32 may be an end
                for name, part in self._parts("start", "end", "hidden_from", "hidden_to")
            }
        else:
            moved = {name: layout.own(part[:, start:stop]) for name, part in self._parts("q_segments")}
            moved |= {name: layout.own(part[:, :, start:stop]) for name, part in self._parts("chosen")}
        band = self.band.moved(start, self.seqlen_q, self.seqlen_k)
        return self._part(moved, band, stop - start, self.seqlen_k, lambda dense: dense[:, :, start:stop])

    def keys(self, start: int, stop: int) -> TileMask:
        """Return the mask of keys `start` to `stop - 1`. A band that is folded in is shifted, as by `queries`."""
        start, stop = require.part("keys", start, stop, self.seqlen_k)
        if self.chosen is not None:
            return as_bits(self).keys(start, stop)
        names = ("k_segments", "start", "end", "hidden_from", "hidden_to")
        moved = {name: layout.own(part[..., start:stop]) for name, part in self._parts(*names)}
        band = self.band.moved(-start, self.seqlen_q, self.seqlen_k)
        return self._part(moved, band, self.seqlen_q, stop - start, lambda dense: dense[..., start:stop])

    def batch(self, start: int, stop: int) -> TileMask:
        """Return the mask of sequences `start` to `stop - 1` of its own batch; itself where that is 1."""
        return self._indexed(0, start, stop)

    def heads(self, start: int, stop: int) -> TileMask:
        """Return the mask of heads `start` to `stop - 1` of its own heads; itself where that is 1."""
        return self._indexed(1, start, stop)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TileMask:
        """Return the mask on another device."""
        return self._map(lambda tensor: tensor.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> TileMask:
        """Return the mask in pinned memory."""
        return self._map(lambda tensor: tensor.pin_memory() if tensor.numel() else tensor)

    def clone(self) -> TileMask:
        """Return a copy with tensors of its own."""
        return self._map(torch.clone)

    def promising(self, at_most: int) -> TileMask:
        """Return the mask with the promise that no query sees more keys of a head."""
        return self._with({"at_most": at_most})

    def also(self, band: Band) -> TileMask:
        """Return the mask with a causal or window condition added; itself where that is known to hide nothing more."""
        if band.contains(self.band):
            return self
        both = self.band.also(band, self.seqlen_q, self.seqlen_k)
        return self._part({}, both, self.seqlen_q, self.seqlen_k, lambda dense: dense)

    def __repr__(self) -> str:
        return self.text(str(self.device))

    def text(self, device: str) -> str:
        """Return the representation with another name of the device: ranks that hold the same mask have a device each."""
        band = ""
        if not self.band.unlimited:
            lo, hi, _ = self.band
            ends = "" if lo <= -UNBOUNDED else f"{lo:+d}", "" if hi >= UNBOUNDED else f"{hi:+d}"
            band = ", band=[{}..{}{}]".format(*ends, " from the bottom right" if self.from_bottom_right else "")
        most = "" if self.at_most is None else f", at_most={self.at_most}"
        return (
            f"TileMask(shape={tuple(self.shape)}, kind={self.kind}{band}{most}, device={device!r},"
            f" nbytes={self.nbytes})"
        )

    def _held(self) -> Mask:
        """Return the tensors, whether there is memory behind them or not."""
        return Mask._make([*[getattr(self, name) for name in MASK_TENSORS], self.at_most])

    def _parts(self, *names: str) -> list[tuple[str, Tensor]]:
        """Return the tensors of these names that there are."""
        named = [(name, getattr(self, name)) for name in names]
        if not is_compiling():
            values.memory(tuple(part for _, part in named))
        return [(name, part) for name, part in named if part is not None]  # Dynamo cannot read what `:=` binds in here

    def _map(self, function: Callable[[Tensor], Tensor]) -> TileMask:
        return self._with(
            {name: function(part) for name, part in self._parts("lengths", *MASK_TENSORS, *CHOSEN_TENSORS)}
        )

    def _with(self, changes: dict[str, Any]) -> TileMask:
        return made(**{**{name: getattr(self, name) for name in _FIELDS}, **changes})

    def _indexed(self, dim: int, start: int, stop: int) -> TileMask:
        size = self.shape[dim]
        start, stop = require.part(("batch", "heads")[dim], start, stop, UNBOUNDED if size == 1 else size)
        if size == 1:  # for any batch, or for any number of heads
            return self

        def index(part: Tensor) -> Tensor:
            return part if part.shape[dim] == 1 else layout.own(part.narrow(dim, start, stop - start))

        names = *MASK_TENSORS, "chosen"
        kept = {name: index(part) for name, part in self._parts(*names) if name != "q_segments" or dim == 0}
        return self._with(kept)

    def _part(
        self, moved: dict[str, Any], band: Band, seqlen_q: int, seqlen_k: int, of_dense: Callable[[Tensor], Tensor]
    ) -> TileMask:
        """Return the mask of `seqlen_q` queries and `seqlen_k` keys that `moved` tensors, or a part of the dense mask, describe."""
        if self.kind in ("intervals", "chosen"):
            lengths = self.lengths.new_empty((seqlen_q, seqlen_k, 0))
            return self._with({**moved, "lengths": lengths, **band_fields(band)})
        if self.kind == "segments":
            segments = moved.get("q_segments", self.q_segments), moved.get("k_segments", self.k_segments)
            return from_segments(segments, seqlen_q, seqlen_k, band)
        return from_dense(of_dense(self.to_dense()), (None, None), seqlen_q, band)


class Read(NamedTuple):
    """The properties of a mask that eager calls read. They never change, and to read them anew takes longer than a launch."""

    shape: tuple[int, int, int, int]
    device: int  # index; -1 of the CPU and of meta tensors
    on_cpu: bool
    band: Band
    taken: tuple[Mask, int, int]  # as the operators take it


_read: WeakKeyDictionary[TileMask, Read] = WeakKeyDictionary()


def read(mask: TileMask) -> Read:
    """Return the fields of a mask that an eager call reads, cached at its first use."""
    found = _read.get(mask)
    if found is None:
        band, lengths = mask.band, mask.lengths
        taken = (mask.mask, *band.limits(mask.seqlen_q, mask.seqlen_k))
        found = _read[mask] = Read(mask.shape, lengths.get_device(), lengths.is_cpu, band, taken)
    return found


def made(**given: Any) -> TileMask:
    """Return a mask of fields that fit each other, which nobody checks: that takes as long as some launches."""
    if is_compiling():
        return TileMask(**given)
    mask = object.__new__(TileMask)
    mask.__dict__.update(_DEFAULTS | given)
    return mask


_FIELDS = tuple(field.name for field in fields(TileMask))
_DEFAULTS = {field.name: field.default for field in fields(TileMask) if field.name != "lengths"}
TileMask.__setattr__ = taken_apart.assign(lambda mask: mask in _read)  # type: ignore[method-assign, assignment]
taken_apart.register(TileMask, made)
# Files of older versions name it by the place that it had.
torch.serialization.add_safe_globals([TileMask, (TileMask, "dmattn_ops.tile_mask.TileMask")])

Segments = tuple[Tensor | None, Tensor | None]  # of queries and keys


def lengths_of(like: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return a tensor without elements whose shape holds the lengths."""
    return like.new_empty((seqlen_q, seqlen_k, 0), dtype=torch.uint8)


def from_chosen(indices: Tensor, block: int, segments: Segments, seqlen_k: int, band: Band) -> TileMask:
    """Return the mask of the blocks that `indices [B|1, Hm, Sq, k]` name, with segments and band beside them."""
    return made(
        lengths=lengths_of(indices, indices.shape[2], seqlen_k),
        chosen=layout.own(indices),
        block_keys=indices.new_empty((block, 0), dtype=torch.uint8),
        q_segments=segments[0],
        k_segments=segments[1],
        **band_fields(band),
    )


_bits: WeakKeyDictionary[TileMask, TileMask] = WeakKeyDictionary()


def as_bits(mask: TileMask) -> TileMask:
    """Return a mask of chosen blocks as one of bits, which is made once; others as they are."""
    if mask.chosen is None:
        return mask
    found = None if is_compiling() else _bits.get(mask)
    if found is None:
        assert mask.block_keys is not None
        limits = mask.band.limits(mask.seqlen_q, mask.seqlen_k)
        block = mask.block_keys.shape[0]
        packed = torch.ops.dmattn.pack_selection(
            mask.chosen, mask.q_segments, mask.k_segments, block, mask.seqlen_k, *limits
        )
        found = from_packed(mask.lengths, packed, mask.band)
        if not is_compiling():
            _bits[mask] = found
    return found


def from_dense(mask: Tensor, segments: Segments, seqlen_q: int, band: Band) -> TileMask:
    """Pack a mask `[Bm, Hm, Sq, Sk]`, with segments and band folded in."""
    seqlen_k = mask.shape[-1]
    packed = torch.ops.dmattn.pack_mask(mask, *segments, seqlen_q, *band.limits(seqlen_q, seqlen_k))
    return from_packed(lengths_of(mask, seqlen_q, seqlen_k), packed, band)


def from_packed(lengths: Tensor, packed: tuple[Tensor, ...], band: Band) -> TileMask:
    """Return the mask of row_tiles, col_tiles, row_bits and col_bits, into which segments and band were folded."""
    parts = dict(zip(MASK_TENSORS, packed, strict=False))
    return made(lengths=lengths, **parts, **band_fields(band))


def from_segments(segments: Segments, seqlen_q: int, seqlen_k: int, band: Band) -> TileMask:
    """List the tiles of segments `[B|1, Sq]` and `[B|1, Hm, Sk]` inside the band."""
    queries, keys = segments
    assert keys is not None
    listed = dtensors.segments_of_queries(queries, keys, seqlen_q)
    row_tiles, col_tiles = torch.ops.dmattn.list_tiles(listed, keys, seqlen_q, *band.limits(seqlen_q, seqlen_k))
    return made(
        lengths=lengths_of(keys, seqlen_q, seqlen_k),
        row_tiles=row_tiles,
        col_tiles=col_tiles,
        q_segments=queries,
        k_segments=keys,
        **band_fields(band),
    )


def from_intervals(
    intervals: tuple[Tensor | None, Tensor],
    hidden: tuple[Tensor, Tensor] | None,
    at_most: int | None,
    seqlen_q: int,
    band: Band = NO_BAND,
) -> TileMask:
    """Return the mask that shows key `j` to the queries of an interval, `[B|1, Hm, Sk]`, less those of a hidden one."""
    start, end = intervals
    hidden_from, hidden_to = (None, None) if hidden is None else hidden
    return made(
        lengths=lengths_of(end, seqlen_q, end.shape[-1]),
        start=start,
        end=end,
        hidden_from=hidden_from,
        hidden_to=hidden_to,
        at_most=at_most,
        **band_fields(band),
    )


def band_fields(band: Band) -> dict[str, Any]:
    """Return a band as the fields of a `TileMask`."""
    return {"band_lo": band.lo, "band_hi": band.hi, "from_bottom_right": band.bottom_right}

"""Masks made once and used by many calls: `prepare_mask` and what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from dmattn_ops import layout, ops, validation
from dmattn_ops.meta import list_capacity
from dmattn_ops.problem import TILE, UNBOUNDED, Tiles

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

CausalFrom = Literal["bottom_right", "top_left"]
Window = tuple[int | None, int | None]
_Segments = tuple[Tensor | None, Tensor | None]  # of queries and keys

_NARROW_INTEGERS = (torch.uint8, torch.int8, torch.int16)  # twice any of these fits int32
_INTEGERS = (*_NARROW_INTEGERS, torch.int32, torch.int64)
_CHUNK = 1 << 24  # elements of a BlockMask that are evaluated at a time: 16 MiB of bool and a few times that in between


@dataclass(frozen=True, eq=False, repr=False)
class TileMask:
    """A mask of `[Bm, Hm, Sq, Sk]` in the form that kernels read; made by `prepare_mask`, never modified.

    `row_tiles` and `col_tiles` list the 128 x 128 tiles in which something is visible. What is visible inside them say
    either `row_bits` and `col_bits` or `q_segments`, `k_segments` and the band (`i + band_lo <= j <= i + band_hi`).
    Registered as a pytree: it may be an argument or a result of compiled and exported functions.
    """

    row_tiles: Tensor
    col_tiles: Tensor
    row_bits: Tensor | None
    col_bits: Tensor | None
    q_segments: Tensor | None
    k_segments: Tensor | None
    seqlen_q: int
    seqlen_k: int
    band_lo: int
    band_hi: int

    @property
    def tiles(self) -> Tiles:
        """The tensors as the operators take them."""
        return Tiles(self.row_tiles, self.col_tiles, self.row_bits, self.col_bits, self.q_segments, self.k_segments)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(Bm, Hm, Sq, Sk)`: `Bm` and `Hm` are 1 where the mask is the same for all."""
        return (self.row_tiles.shape[0], self.row_tiles.shape[1], self.seqlen_q, self.seqlen_k)

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.row_tiles.device

    @property
    def nbytes(self) -> int:
        """The memory that the tensors take."""
        return sum(tensor.nbytes for tensor in self.tiles if tensor is not None)

    def density(self) -> Tensor:
        """Return the share of the 128 x 128 tiles that kernels visit, a float32 scalar on the mask's device."""
        batch, heads, rows, _ = self.row_tiles.shape
        listed = self.row_tiles[..., 1:3].sum(dtype=torch.float32)
        return listed / max(1, batch * heads * rows * self.col_tiles.shape[2])

    def to_dense(self) -> Tensor:
        """Return the mask as bool `[Bm, Hm, Sq, Sk]`."""
        return layout.dense(self.tiles, self.band_lo, self.band_hi, self.seqlen_q, self.seqlen_k)

    def __repr__(self) -> str:
        kind = "segments" if self.row_bits is None else "bits"
        band = ""
        if self.band_lo > -UNBOUNDED or self.band_hi < UNBOUNDED:
            ends = ("" if abs(end) == UNBOUNDED else f"{end:+d}" for end in (self.band_lo, self.band_hi))
            band = ", band=[{}..{}]".format(*ends)
        return (
            f"TileMask(shape={tuple(self.shape)}, kind={kind}{band}, device={str(self.device)!r}, nbytes={self.nbytes})"
        )


torch.export.register_dataclass(TileMask, serialized_type_name="dmattn_ops.TileMask")


def prepare_mask(
    mask: Tensor | BlockMask | None = None,
    *,
    documents: Tensor | None = None,
    seqlen_q: int | None = None,
    is_causal: bool = False,
    causal_from: CausalFrom = "bottom_right",
    window_size: Window = (None, None),
) -> TileMask:
    """Do the work of a mask once, to use it for many layers, forward and backward.

    A key is visible where all conditions given here hold, and those that a call adds. Nothing is read on the host.

    Args:
        mask: `[B|1, H|Hkv|1, Sq|1, Sk]` or, for padding, `[B|1, Sk]`: bool (True keeps) or any numeric dtype (non-zero
            keeps: an additive mask of 0 and -inf is a `bias`, not a `mask`); or a `BlockMask` of flex_attention, whose
            `mask_mod` is evaluated here. Not differentiable. A mask without a query dimension takes O(S) memory
            for ids and, without a window, `S^2 / 2048` bytes for lists of tiles.
        documents: integer ids `[B|1, S]` in any order, for `Sq == Sk == S`: a query sees keys of its own document only.
            Offsets `cu_seqlens` become ids by `torch.bucketize(torch.arange(S), cu_seqlens[1:], right=True)[None]`, with
            which a call on `[1, S, H, D]` computes what `flash_dmattn_varlen_func` does on `[S, H, D]`. Lists of tiles
            take `S^2 / 2048` bytes (8 MiB at 131072) without a window, and `O(S)` with one: documents of at most `L`
            keys may add `window_size=(L - 1, L - 1)`, which hides nothing.
        seqlen_q: `Sq`, only where neither the mask nor the documents tell it.
        is_causal, causal_from, window_size: as in `flash_dmattn_func`.

    Raises:
        ValueError: for shapes, sizes and values that do not fit each other.
        TypeError: for types and dtypes.
    """
    validation.visibility(is_causal, causal_from, window_size)
    seqlen_q, seqlen_k = _lengths(mask, documents, seqlen_q)
    limits = band(is_causal, causal_from, window_size, seqlen_q, seqlen_k)
    if isinstance(mask, Tensor):
        return _from_tensor(_narrowed(mask), documents, seqlen_q, limits)
    segments = _segments(documents, None)
    if mask is not None:
        return _from_block_mask(mask, segments, limits)
    return _from_segments(segments, seqlen_q, seqlen_k, limits)


def resolve(
    mask: Tensor | TileMask | None, band_lo: int, band_hi: int, seqlen_q: int, seqlen_k: int
) -> tuple[Tiles, int, int]:
    """Return the tiles and the band that the operators take, for the mask and the band `band(...)` of one call.

    A plain mask `[B|1, H|Hkv|1, Sq|1, Sk]` is prepared with the band folded in. A prepared one is used as it is, unless
    the call adds a condition: then it is listed (segments) or packed (bits) again.
    """
    if mask is None:
        return ops.NO_TILES, band_lo, band_hi
    if isinstance(mask, Tensor):
        mask = _from_tensor(_narrowed(mask), None, seqlen_q, (band_lo, band_hi))
    elif isinstance(mask, TileMask):
        if mask.seqlen_q != seqlen_q or mask.seqlen_k != seqlen_k:
            raise ValueError(
                f"mask must be prepared for query length {seqlen_q} and key length {seqlen_k}, "
                f"got {mask.seqlen_q} and {mask.seqlen_k}"
            )
        mask = _refined(mask, band_lo, band_hi)
    else:
        raise TypeError(f"mask must be a 4-D tensor or come from prepare_mask, got {type(mask).__name__}")
    return mask.tiles, mask.band_lo, mask.band_hi


def band(
    is_causal: bool, causal_from: CausalFrom, window_size: Window, seqlen_q: int, seqlen_k: int
) -> tuple[int, int]:
    """Return the band: key `j` is visible to query `i` iff `i + band_lo <= j <= i + band_hi`."""
    left, right = window_size
    diagonal = seqlen_k - seqlen_q if causal_from == "bottom_right" else 0
    if is_causal:
        right = 0
    band_lo = -UNBOUNDED if left is None else max(-UNBOUNDED, min(UNBOUNDED, diagonal - left))
    band_hi = UNBOUNDED if right is None else max(-UNBOUNDED, min(UNBOUNDED, diagonal + right))
    return band_lo, band_hi


def _lengths(mask: Tensor | BlockMask | None, documents: Tensor | None, seqlen_q: int | None) -> tuple[int, int]:
    """Return Sq and Sk; refuse shapes and types that do not fit each other."""
    if documents is not None:
        validation.tensors(documents=documents)
        validation.require_rank("documents", documents, 2)
        validation.require_dtype("documents", documents, *_INTEGERS)
    known_q: int | None = None if documents is None else documents.shape[1]
    if isinstance(mask, Tensor):
        known_q, seqlen_k = _tensor_lengths(mask, known_q)
    elif mask is not None:
        from torch.nn.attention.flex_attention import BlockMask

        if not isinstance(mask, BlockMask):
            raise TypeError(f"mask must be a tensor, a BlockMask or None, got {type(mask).__name__}")
        known_q, seqlen_k = mask.shape[-2:]
    elif documents is not None:
        seqlen_k = documents.shape[1]
    else:
        raise ValueError("prepare_mask needs a mask or documents; causal and window conditions alone need no mask")
    if isinstance(mask, Tensor) and documents is not None:
        validation.require_device("documents", documents, mask.device)
        if mask.shape[0] != documents.shape[0] and mask.shape[0] != 1 and documents.shape[0] != 1:
            raise ValueError(f"documents must have shape ({mask.shape[0]}|1, {seqlen_k}), got {tuple(documents.shape)}")
    if documents is not None and seqlen_k != documents.shape[1]:
        raise ValueError(f"documents must have shape (B|1, {seqlen_k}), got {tuple(documents.shape)}")
    if documents is not None and known_q != seqlen_k:
        raise ValueError(
            f"mask must have as many queries as keys where documents are given, got {known_q} and {seqlen_k}"
        )
    if known_q is None:
        if seqlen_q is None:
            raise ValueError("seqlen_q must be given for a mask without a query dimension, got None")
        if isinstance(seqlen_q, bool) or not isinstance(seqlen_q, (int, torch.SymInt)):
            raise TypeError(f"seqlen_q must be an int, got {type(seqlen_q).__name__}")
        if seqlen_q < 0:
            raise ValueError(f"seqlen_q must not be negative, got {seqlen_q}")
        return seqlen_q, seqlen_k
    if seqlen_q is not None and seqlen_q != known_q:
        raise ValueError(f"seqlen_q must be {known_q}, as the mask or the documents have it, got {seqlen_q}")
    return known_q, seqlen_k


def _tensor_lengths(mask: Tensor, known_q: int | None) -> tuple[int | None, int]:
    """Return Sq, where mask or documents tell it, and Sk of a mask `[B|1, Hm, Sq|1, Sk]` or `[B|1, Sk]`."""
    if mask.dim() == 2:
        return known_q, mask.shape[1]
    if mask.dim() != 4:
        raise ValueError(f"mask must have shape (B|1, H|Hkv|1, Sq|1, Sk) or (B|1, Sk), got {tuple(mask.shape)}")
    return (known_q if mask.shape[2] == 1 else mask.shape[2]), mask.shape[3]


def _narrowed(mask: Tensor) -> Tensor:
    """Cut expanded dimensions back to 1, so that what they repeat is read once."""
    mask = mask != 0 if mask.is_complex() else mask.detach()
    for dim in range(mask.dim() - 1):
        if mask.shape[dim] > 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _from_tensor(mask: Tensor, documents: Tensor | None, seqlen_q: int, limits: tuple[int, int]) -> TileMask:
    """Prepare a mask `[B|1, Hm, Sq|1, Sk]` or `[B|1, Sk]`, and documents."""
    if mask.dim() == 2:
        mask = mask[:, None, None, :]
    if mask.shape[2] == 1:
        return _from_segments(_segments(documents, mask.squeeze(2) != 0), seqlen_q, mask.shape[3], limits)
    return _from_dense(mask, _segments(documents, None), seqlen_q, limits)


def _from_dense(mask: Tensor, segments: _Segments, seqlen_q: int, limits: tuple[int, int]) -> TileMask:
    """Pack a mask `[Bm, Hm, Sq, Sk]`, with segments and band folded in."""
    row_tiles, col_tiles, row_bits, col_bits = torch.ops.dmattn.pack_mask(mask, *segments, seqlen_q, *limits)
    return TileMask(row_tiles, col_tiles, row_bits, col_bits, None, None, seqlen_q, mask.shape[-1], *limits)


def _from_segments(segments: _Segments, seqlen_q: int, seqlen_k: int, limits: tuple[int, int]) -> TileMask:
    """List the tiles of segments `[B|1, Sq]` and `[B|1, Hm, Sk]` inside the band."""
    row_tiles, col_tiles = torch.ops.dmattn.list_tiles(*segments, seqlen_q, *limits)
    return TileMask(row_tiles, col_tiles, None, None, *segments, seqlen_q, seqlen_k, *limits)


def lies_inside(mask: TileMask, band_lo: int, band_hi: int) -> bool:
    """Return whether a band hides nothing more of a mask (`1 - Sq <= j - i <= Sk - 1` always)."""
    return band_lo <= max(mask.band_lo, 1 - mask.seqlen_q) and band_hi >= min(mask.band_hi, mask.seqlen_k - 1)


def _refined(mask: TileMask, band_lo: int, band_hi: int) -> TileMask:
    """Return `mask` with a band added; the same one if that hides nothing more."""
    if lies_inside(mask, band_lo, band_hi):
        return mask
    limits = max(band_lo, mask.band_lo), min(band_hi, mask.band_hi)
    if mask.k_segments is not None:
        return _from_segments((mask.q_segments, mask.k_segments), mask.seqlen_q, mask.seqlen_k, limits)
    return _from_dense(mask.to_dense(), (None, None), mask.seqlen_q, limits)


def _segments(documents: Tensor | None, keep: Tensor | None) -> _Segments:
    """Return int32 segments `[B|1, S]` of queries and `[B|1, Hm, S]` of keys; `keep` is bool `[B|1, Hm, S]`.

    With both, a dropped key gets an odd number next to its own document's even one: no query has it, and the range of
    numbers in a tile of keys stays that of its documents. Both are contiguous, whatever they come from.
    """
    documents = documents if documents is None else documents.contiguous()
    keep = keep if keep is None else keep.contiguous()
    if documents is None:
        return None, None if keep is None else keep.to(torch.int32) - 1
    if documents.dtype in _NARROW_INTEGERS or (keep is None and documents.dtype == torch.int32):
        numbers = documents.to(torch.int32, copy=True)
    else:
        numbers = _ranks(documents)
    if keep is None:
        return numbers, numbers.unsqueeze(1).clone()
    return 2 * numbers, 2 * numbers.unsqueeze(1) + (~keep).to(torch.int32)


def _ranks(ids: Tensor) -> Tensor:
    """Number the distinct ids of each row of `[B, S]` in ascending order, int32; no id is read on the host."""
    ordered, order = ids.sort(dim=-1)
    before = ordered.roll(1, dims=-1)
    changes = (ordered != before).cumsum(-1, dtype=torch.int32)
    numbers = changes - changes[:, :1]
    return torch.zeros_like(numbers).scatter(-1, order, numbers)


def _from_block_mask(mask: BlockMask, segments: _Segments, limits: tuple[int, int]) -> TileMask:
    """Evaluate a BlockMask in chunks of query tiles, and join what each chunk packs into."""
    *leading, seqlen_q, seqlen_k = mask.shape
    rows = TILE * max(1, _CHUNK // (TILE * max(1, math.prod(leading) * seqlen_k)))
    visible = _visible_in_blocks(mask)
    chunks = []
    for start in range(0, max(seqlen_q, 1), rows):
        stop = min(start + rows, seqlen_q)
        queries = None if segments[0] is None else segments[0][:, start:stop]
        shifted = (_shift(limit, start) for limit in limits)
        chunks.append(torch.ops.dmattn.pack_mask(visible(start, stop), queries, segments[1], stop - start, *shifted))
    row_tiles, _, row_bits, col_bits = zip(*chunks, strict=True)
    columns = (seqlen_k + TILE - 1) // TILE
    classes = torch.cat([layout.classes_from_lists(lists, columns) for lists in row_tiles], dim=-2)
    return TileMask(
        layout.lists_from_classes(classes, list_capacity(columns, *limits)),
        layout.lists_from_classes(classes.transpose(-1, -2), list_capacity(classes.shape[-2], *limits)),
        torch.cat(row_bits, dim=-2),
        torch.cat(col_bits, dim=-1),
        None,
        None,
        seqlen_q,
        seqlen_k,
        *limits,
    )


def _visible_in_blocks(mask: BlockMask) -> Callable[[int, int], Tensor]:
    """Return a function from a range of queries to what a BlockMask shows them: bool `[B|1, H|1, stop - start, Sk]`."""
    from torch.nn.attention.flex_attention import create_mask

    *leading, _, seqlen_k = mask.shape
    batch, heads = (1,) * (2 - len(leading)) + tuple(leading)
    device = mask.kv_indices.device
    block_q, block_k = mask.BLOCK_SIZE
    blocks = (batch, heads, -1, (seqlen_k + block_k - 1) // block_k)
    partial = _listed_blocks(mask.kv_num_blocks, mask.kv_indices, blocks[-1]).reshape(blocks)
    full = None
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _listed_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, blocks[-1]).reshape(blocks)
    columns = torch.arange(seqlen_k, device=device) // block_k

    def visible(start: int, stop: int) -> Tensor:
        rows = torch.arange(start, stop, device=device).unsqueeze(-1) // block_q
        inside = create_mask(
            lambda b, h, i, j: mask.mask_mod(b, h, i + start, j), batch, heads, stop - start, seqlen_k, device
        )
        keep = partial[:, :, rows, columns] & inside
        return keep if full is None else keep | full[:, :, rows, columns]

    return visible


def _listed_blocks(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return bool `[..., rows, columns]`: the blocks that the first `counts` of `indices [..., rows, slots]` name."""
    slot = torch.arange(indices.shape[-1], device=indices.device)
    target = torch.where(slot < counts.unsqueeze(-1), indices, columns).long()
    listed = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return listed.scatter(-1, target, True)[..., :columns]


def _shift(limit: int, by: int) -> int:
    """Move a limit of the band to queries that begin at `by`."""
    return limit if abs(limit) == UNBOUNDED else limit + by

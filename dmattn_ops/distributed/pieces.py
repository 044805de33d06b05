"""The rectangles of the scores that a rank computes: some of its queries with neighbouring keys, and what is visible there."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn_ops.bands import Band, CausalFrom, Window, band_of
from dmattn_ops.call import MASK_TENSORS
from dmattn_ops.distributed.key_exchange import Span
from dmattn_ops.distributed.sequence import Layout, Run, runs
from dmattn_ops.masks.tile_mask import TileMask


class Sight(NamedTuple):
    """Causal and window conditions over the whole sequence; `diagonal` is the key that query 0 is aligned with."""

    is_causal: bool
    window: Window
    diagonal: int
    seqlen_q: int
    seqlen_k: int

    def band(self, query: int, key: int) -> Band:
        """Return the band of a part of the scores that begins at that query and key."""
        return band_of(self.is_causal, self.diagonal + query - key, self.window)

    def span(self, run: Run) -> Span:
        """Return the keys that some query of a run may see."""
        lo, hi = self.band(run.origin, 0).limits(run.length, self.seqlen_k)
        first = min(max(0, lo), self.seqlen_k)
        return first, max(first, min(self.seqlen_k, run.length + hi))


def sight_of(is_causal: bool, causal_from: CausalFrom, window: Window, seqlen_q: int, seqlen_k: int) -> Sight:
    """Return the conditions of a call whose whole lengths are these."""
    diagonal = causal_from
    if isinstance(diagonal, str):
        diagonal = seqlen_k - seqlen_q if diagonal == "bottom_right" else 0
    return Sight(is_causal, (window[0], window[1]), diagonal, seqlen_q, seqlen_k)


class Piece(NamedTuple):
    """Queries of one run of this rank, and neighbouring keys: where they lie in the tensors at hand, and in the sequence."""

    run: int  # which of the rank's runs of queries
    row: int
    rows: int
    query: int  # the position of the first query
    column: int
    columns: int
    key: int  # the position of the first key


Spans = tuple[tuple[Span, ...], ...]  # for each rank and each of its runs of queries: the keys that it may see


def spans_of(sight: Sight, layout: Layout, size: int) -> Spans:
    """Return the keys that every run of queries of every rank may see by the band."""
    length = sight.seqlen_q // size
    return tuple(tuple(sight.span(run) for run in runs(layout, size, rank, length)) for rank in range(size))


class Numbers(NamedTuple):
    """The numbers of a call that are the same for every piece."""

    softmax_scale: float | None
    softcap: float
    dropout_p: float
    deterministic: bool


class Visible(NamedTuple):
    """The mask and band of a piece, as an operator takes them."""

    tensors: tuple[Tensor | None, ...]
    band_lo: int
    band_hi: int
    at_most: int | None


NO_TENSORS: tuple[Tensor | None, ...] = (None,) * len(MASK_TENSORS)


def visible_at(number: int, limits: tuple[int, int, int | None], masks: tuple[Tensor | None, ...]) -> Visible:
    """Return the mask and band of piece `number`; `limits` are (band_lo, band_hi, at_most), `masks` the tensors of all pieces."""
    width = len(NO_TENSORS)
    return Visible(masks[number * width : (number + 1) * width] if masks else NO_TENSORS, *limits)


def visible_by(mask: TileMask | None, band: Band, piece: Piece) -> Visible:
    """Return the mask and band of a piece: its own mask, and the band of the call."""
    if mask is None:
        return Visible(NO_TENSORS, *band.limits(piece.rows, piece.columns), None)
    mask = mask.also(band)
    *tensors, at_most = mask.mask
    return Visible(tuple(tensors), *mask.band.limits(piece.rows, piece.columns), at_most)


class Statistics(NamedTuple):
    """Results of rows over some of their keys: out (in float32 or wider once parts were merged), the logarithm of the
    sum of exp(score) as `lse + lse_tail`, and the largest score (empty where it is not asked for)."""

    out: Tensor
    lse: Tensor
    lse_tail: Tensor
    row_max: Tensor


def forward(
    tensors: tuple[Tensor | None, ...], visible: Visible, piece: Piece, numbers: Numbers, needs_max: bool
) -> Statistics:
    """Compute a piece. `tensors` are query, key, value, bias and seed of the piece."""
    *inputs, seed = tensors
    found = torch.ops.dmattn.forward.default(
        *inputs, *visible.tensors, None, seed, visible.band_lo, visible.band_hi, piece.query, piece.key, visible.at_most,
        *numbers, needs_max,
    )  # fmt: skip
    return Statistics(*found)


def backward(
    grads: tuple[Tensor, Tensor | None],
    tensors: tuple[Tensor | None, ...],
    rows: Statistics,
    visible: Visible,
    piece: Piece,
    numbers: Numbers,
    needs_dbias: bool,
) -> tuple[Tensor, ...]:
    """Return dq, dk, dv and dbias of a piece (the last empty if not needed), given the statistics of all keys of its rows."""
    *inputs, bias, seed = tensors
    return torch.ops.dmattn.backward.default(
        *grads, *inputs, *rows[:3], bias, *visible.tensors, None, seed, visible.band_lo, visible.band_hi, piece.query,
        piece.key, visible.at_most, *numbers, needs_dbias, False,
    )[:4]  # fmt: skip


def merged(old: Statistics, new: Statistics) -> Statistics:
    """Return the statistics of rows over the keys of both, which have none in common.

    The weights come from the difference of the logarithms. Their rounded parts are subtracted first, which is exact where
    they are close, so that rows whose scores are 1e9 are merged as exactly as any.
    """
    difference = (new.lse - old.lse) + (new.lse_tail - old.lse_tail)
    nothing = (old.lse == -torch.inf) & (new.lse == -torch.inf)
    difference = torch.where(nothing, 0.0, difference)
    # out may be narrower: products with the weights are float32, without a copy in it
    out = old.out * _like_out(torch.sigmoid(-difference))
    out = torch.addcmul(out, new.out, _like_out(torch.sigmoid(difference)))
    ahead = difference > 0
    lse, tail = torch.where(ahead, new.lse, old.lse), torch.where(ahead, new.lse_tail, old.lse_tail)
    more = tail + torch.log1p(torch.exp(-difference.abs()))
    total = lse + more
    part = total - lse
    rest = (lse - (total - part)) + (more - part)  # what rounding the total lost (Knuth's two-sum)
    row_max = torch.maximum(old.row_max, new.row_max)
    return Statistics(out, torch.where(nothing, lse, total), torch.where(nothing, tail, rest), row_max)


def no_keys(query: Tensor, dim_v: int, needs_max: bool) -> Statistics:
    """Return the statistics of query rows `[B, n, H, D]` that have seen no key."""
    batch, length, heads, _ = query.shape
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = query.new_full((batch, heads, length), -torch.inf, dtype=wide)
    out = query.new_zeros((batch, length, heads, dim_v))
    return Statistics(out, lse, torch.zeros_like(lse), lse.clone() if needs_max else lse.new_empty(0))


def joined(parts: list[Statistics], dims: tuple[int, int]) -> Statistics:
    """Join statistics along a dimension of out and one of the others."""
    if len(parts) == 1:
        return parts[0]
    out = torch.cat([part.out for part in parts], dims[0])
    others: list[Any] = []
    for name in ("lse", "lse_tail", "row_max"):
        tensors = [getattr(part, name) for part in parts]
        others.append(tensors[0] if tensors[0].dim() == 1 else torch.cat(tensors, dims[1]))
    return Statistics(out, *others)


def cut(rows: Statistics, first: int, length: int) -> Statistics:
    """Return the statistics of neighbouring rows."""
    out, *others = rows
    parts = [other if other.dim() == 1 else other.narrow(2, first, length) for other in others]
    return Statistics(out.narrow(1, first, length), *parts)


def of_rows(rows: Statistics, piece: Piece, heads: slice = slice(None)) -> Statistics:
    """Return the statistics of a piece's queries, and of some heads."""
    own = slice(piece.row, piece.row + piece.rows)
    return Statistics(rows.out[:, own, heads], rows.lse[:, heads, own], rows.lse_tail[:, heads, own], rows.row_max)


def _like_out(weights: Tensor) -> Tensor:
    """Return weights `[B, H, n]` as they multiply out `[B, n, H, D]`."""
    return weights.transpose(1, 2).unsqueeze(-1)

"""A bias under context parallelism: what a piece of the scores sees of it, and its gradient.

Per key, `[B|1, Hb, 1, keys of the rank]`: its values travel as keys do, and its gradients go home as theirs do. For each query
and key, `[B|1, Hb, queries of the rank, Sk]` with all keys in the order of the sequence: nothing travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn_ops.distributed.key_exchange import KeyExchange, added
from dmattn_ops.distributed.pieces import Piece


class BiasPlan(NamedTuple):
    """How a bias reaches the pieces; `exchange` is that of a bias per key."""

    per_key: bool
    exchange: KeyExchange
    by_position: bool  # whether the exchange brings all keys, so that a piece finds its own by their position

    def fetched(self, bias: Tensor | None) -> Tensor | None:
        """Return the bias of all keys at hand. One per key becomes float32, so that its gradients add up in it."""
        if bias is None or not self.per_key:
            return bias
        rows = self.exchange.finish(self.exchange.start(bias.movedim(3, 0))).movedim(0, 3)
        return rows.to(torch.promote_types(rows.dtype, torch.float32)).contiguous()

    def of_piece(self, fetched: Tensor | None, piece: Piece, heads: slice) -> Tensor | None:
        """Return the bias of a piece and some heads."""
        if fetched is None:
            return None
        place = self._place(piece)
        columns = slice(place, place + piece.columns)
        rows = slice(None) if self.per_key else slice(piece.row, piece.row + piece.rows)
        return fetched[:, heads, rows, columns]

    def gradient(self, pieces: Sequence[Piece], parts: Sequence[Tensor], fetched: Tensor, wide: torch.dtype) -> Tensor:
        """Return the gradient of the bias at hand, for the heads of `parts`, which are the gradients of the pieces."""
        like = fetched.new_empty((*_leading(fetched, parts), *fetched.shape[2:]), dtype=wide)
        if self.per_key:
            return added(
                [(self._place(piece), part) for piece, part in zip(pieces, parts, strict=True)], like.shape[3], 3, like
            )
        rows = []
        for run in sorted({piece.run for piece in pieces}):
            own = [(piece, part) for piece, part in zip(pieces, parts, strict=True) if piece.run == run]
            first = own[0][0]
            of_run = like[:, :, first.row : first.row + first.rows]
            rows.append((first.row, added([(piece.key, part) for piece, part in own], like.shape[3], 3, of_run)))
        return added(rows, like.shape[2], 2, like)

    def returned(self, groups: Sequence[Tensor], bias: Tensor) -> Tensor:
        """Return the gradient of this rank's bias, from those of the groups of heads."""
        whole = torch.cat(list(groups), 1) if bias.shape[1] > 1 else torch.stack(list(groups)).sum(0)
        if self.per_key:
            whole = self.exchange.finish_back(self.exchange.start_back(whole.movedim(3, 0)), whole.dtype).movedim(0, 3)
        return whole.to(bias.dtype).contiguous()

    def _place(self, piece: Piece) -> int:
        return piece.key if self.by_position or not self.per_key else piece.column


def _leading(fetched: Tensor, parts: Sequence[Tensor]) -> tuple[int, int]:
    """Return batch and heads of the gradients of pieces."""
    return (parts[0].shape[0], parts[0].shape[1]) if parts else (fetched.shape[0], fetched.shape[1])

"""What the kernels of chosen blocks run with (`kernels/chosen`)."""

from __future__ import annotations

from dataclasses import dataclass

from dmattn_ops.call import Demand

LEAST_BLOCK = 16  # keys of blocks that gradients are computed by; smaller ones fill no product


@dataclass(frozen=True, slots=True)
class Gathering:
    """A program has `rows` of some queries and the heads that share their lists, and gathers `columns` keys a step."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    # Of tiles of some queries that chose more than `limit` times as many blocks together as one of them names: a query at a time.
    apart: Gathering | None = None
    limit: float = 0.0


# By the widest head dimension, 128 or 256.
FORWARD = {128: Gathering(128, 64, 8, 2), 256: Gathering(128, 64, 8, 2)}
BY_KEYS = {128: Gathering(128, 64, 8, 1), 256: Gathering(64, 64, 8, 1)}
BY_QUERIES = {128: Gathering(128, 64, 8, 1), 256: Gathering(128, 64, 8, 1)}


def forward_tiles(demand: Demand) -> Gathering:
    """Return the tiles of a forward."""
    return FORWARD[_width(demand)]


def backward_tiles(demand: Demand, block: int) -> tuple[Gathering, bool]:
    """Return the tiles of a backward, and whether it goes by blocks of keys."""
    by_keys = block >= LEAST_BLOCK
    return (BY_KEYS if by_keys else BY_QUERIES)[_width(demand)], by_keys


def _width(demand: Demand) -> int:
    return 128 if demand.width <= 128 else 256

"""What the kernels of chosen blocks run with (`kernels/chosen`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dmattn_ops.call import Demand
from dmattn_ops.choice.arch import Arch

LEAST_BLOCK = 16  # keys of blocks that gradients can be computed by; smaller ones fill no product


@dataclass(frozen=True, slots=True)
class Gathering:
    """A program has `rows` of some queries and the heads that share their lists, and gathers `columns` keys a step.

    A tile of queries that chose more than `limit` times as many blocks together as one of them names goes by `apart`: in the
    forward a query at a time, in the backward by blocks of keys, `rows` of the queries that chose it at a time.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    apart: Gathering | None = None
    limit: float = 0.0


EVIDENCE = (
    "clustered choices of 32 blocks of 64 at S 32768: 29 ms forward and backward, dense causal attention 107; one H100"
)

# Milliseconds on one H100, 2026-11-26, B1 S32768 H64/4 D128, 32 blocks of 64, lists included: choices in which neighbours agree
# 7.2 forward and 21.7 backward, independent ones 17.9 and 30; dense causal attention 24.4 and 80.
_OF_ALONE = Gathering(16, 64, 2, 2)
_OF_KEYS = Gathering(128, 64, 8, 2)
FORWARD = Gathering(64, 64, 4, 2, _OF_ALONE, 2.6)
BACKWARD = Gathering(128, 64, 8, 1, _OF_KEYS, 1.6)
# B1 S16384 H32/2 D256, 512 blocks of 4: 3.8 and 14.2, dense 5.5 and 22. H64/1 D192/128, 2048 keys: 5.7 and 18, dense 7.0 and 31.
WIDE_FORWARD = Gathering(128, 64, 8, 2)
NARROW_VALUES = Gathering(64, 64, 4, 2)
WIDE_BACKWARD = Gathering(128, 64, 8, 1, Gathering(64, 64, 8, 1), 2.5)


# For all others: they fit into 99 KB of shared memory, and were not measured.
SMALL_FORWARD = Gathering(64, 32, 4, 2, Gathering(16, 32, 4, 2), 2.6)
SMALL_BACKWARD = Gathering(32, 32, 4, 1, Gathering(32, 32, 4, 1), 1.6)
MEASURED = 90  # SM 9.0, whose instructions and shared memory the tiles above are for


def forward_tiles(demand: Demand, block: int, on: Arch) -> Gathering:
    """Return the tiles of a forward."""
    if on.sm != MEASURED:
        return _fitting(SMALL_FORWARD, block)
    wide = NARROW_VALUES if demand.dim_v <= 128 else WIDE_FORWARD
    return _fitting(FORWARD if demand.width <= 128 else wide, block)


def backward_tiles(demand: Demand, block: int, on: Arch) -> Gathering:
    """Return the tiles of a backward."""
    if on.sm != MEASURED:
        return _fitting(SMALL_BACKWARD, block)
    return _fitting(BACKWARD if demand.width <= 128 else WIDE_BACKWARD, block)


def largest_group(on: Arch) -> int:
    """Return how many query heads may share a key head: all of them are rows of one tile."""
    return SMALL_BACKWARD.rows if on.sm != MEASURED else 128


def _fitting(tiles: Gathering, block: int) -> Gathering:
    """Return tiles for blocks of a size: small ones go one way only."""
    return tiles if block >= LEAST_BLOCK else replace(tiles, apart=None)

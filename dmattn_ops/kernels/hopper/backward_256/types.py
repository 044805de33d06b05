"""What both kernels of the SM 9.0 backward for wide heads are compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon

from dmattn_ops.kernels.constants import Constants
from dmattn_ops.kernels.hopper.views import Test


@dataclass(frozen=True, eq=False, repr=False)
class Traits(Constants):
    """What a kernel is compiled for."""

    D: int  # columns of query and key in their first part, and (else 0) in their second one (`columns.py`)
    D2: int
    DV: int  # of value and grad_out
    DV2: int
    MASK: str  # one of `kinds.py`
    BIAS: int  # one of `scores.py`
    SOFTCAP: bool
    PARTIAL: bool  # whether some steps take a test
    HAS_LO: bool  # whether rows have a first column, of the band: rows are keys, or queries
    HAS_HI: bool
    HIDDEN: bool  # whether intervals of keys have a part that does not see them
    NATURAL: bool  # whether exact exponents are in natural units
    EDGES: bool  # whether the band may hide keys from every query, or every key from a query (`hopper/unseen.py`)
    WATCH: bool  # whether a NaN in a result is noted (`hopper/unseen.py`)


@gluon.constexpr_function
def test_of_keys(T):
    """Return the test of queries, where rows are keys. Queries past the end have a statistic that makes P = 0."""
    return Test(T.MASK, T.HAS_LO, T.HAS_HI, T.HIDDEN, True)


@gluon.constexpr_function
def test_of_queries(T):
    """Return the test of keys, where rows are queries: the keys end somewhere."""
    return Test(T.MASK, T.HAS_LO, True, T.HIDDEN, False)


class Scores(NamedTuple):
    """How products become probabilities (`scores.py`)."""

    bias: Any
    scales: Any
    exact: Any

"""Records that functions of the gradient of a shared bias on SM 9.0 take: traits, shared memory, members, statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon

from dmattn_ops.kernels.constants import Constants
from dmattn_ops.kernels.hopper.views import Test


@dataclass(frozen=True, eq=False, repr=False)
class Traits(Constants):
    """What the kernel is compiled for."""

    D: int  # columns of query and key in their first part, and (else 0) in their second one (`columns.py`)
    D2: int
    DV: int  # of value and grad_out
    DV2: int
    STAGES: int  # buffers of 64 keys and of their values
    CHUNKS: int  # blocks of 64 keys that are written together
    QUERY_BUFFERS: int
    RESIDENT: bool  # whether the queries of all members stay in shared memory
    MASK: str  # one of `kinds.py`
    HAS_LO: bool  # whether the band has a lower limit
    HAS_HI: bool
    HIDDEN: bool  # whether intervals of keys have a part that does not see them
    DROPOUT: bool


@gluon.constexpr_function
def test_of(T):
    """Return the test of keys, where rows are queries. Those past the end are not written."""
    return Test(T.MASK, T.HAS_LO, T.HAS_HI, T.HIDDEN, False)


@gluon.constexpr_function
def banded(T):
    """Return whether the band has a limit."""
    return T.HAS_LO or T.HAS_HI


class Shared(NamedTuple):
    """Shared memory: buffers of queries and of keys, and their barriers."""

    q: Any  # [2 * QUERY_BUFFERS, 64, D], in parts (`columns.py`) as all of them
    o: Any  # grad_out, [2 * QUERY_BUFFERS, 64, DV]
    k: Any  # [STAGES, 64, D]
    v: Any  # [STAGES, 64, DV]
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class Members(NamedTuple):
    """The batches and query heads whose dS is added up."""

    batch: Any  # the first
    head: Any
    group: Any  # query heads
    count: Any


class Walk(NamedTuple):
    """Where the queries of a program are, and which blocks of `CHUNKS * 64` keys it writes."""

    row: Any
    first: Any
    end: Any
    seqlen_q: Any
    seqlen_k: Any
    view: Any  # what the band shows the program's 128 queries


class States(NamedTuple):
    """What lists say of each tile of 128 x 128 scores: 0 where it is empty, 1 where it needs a test, 2 where it is seen whole."""

    start: Any
    batch: Any  # strides
    head: Any
    query: Any
    group: Any  # query heads that share one


class AllRows(NamedTuple):
    """The row statistics of a call (`hopper/statistics.py`)."""

    stats: Any
    heads: Any
    rows: Any  # of a head
    total: Any


class Problem(NamedTuple):
    """The members, mask, statistics and scales of a call, which all partitions are given."""

    members: Any
    states: Any
    mask: Any  # `views.MaskTensors`
    rows: Any  # AllRows
    scales: Any
    exact: Any
    flags: Any
    n_flags: Any
    bias: Any  # of the head of dbias
    dropout: Any
    dbias: Any
    dbias_q: Any  # its stride of queries


class Rows(NamedTuple):
    """Pointers to the statistics of a member's queries."""

    minus_lse: Any
    delta: Any
    first: Any  # of the pair
    second: Any


class Own(NamedTuple):
    """The 64 queries of a consumer."""

    row: Any  # the first
    queries: Any
    exact: Any


class Member(NamedTuple):
    """A batch and query head that reads the bias, as a consumer sees it."""

    slot: Any  # of its queries in shared memory
    full: Any  # the phase in which they are there
    rows: Any
    view: Any
    dropout: Any

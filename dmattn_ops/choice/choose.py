"""From an architecture and a problem to a row of `config.py`, with the reason for every row that was passed over."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from dmattn_ops.call import Demand
from dmattn_ops.choice import config
from dmattn_ops.choice.arch import Arch, nearest

Refusals = Callable[[str], list[str]]  # from a kernel's name to why it cannot take the call


class PassedOver(NamedTuple):
    """A row that was not taken, and why."""

    row: config.Row
    reason: str

    def __str__(self) -> str:
        return f"{self.row.name}: {self.reason}"


class Choice(NamedTuple):
    """A row for one launch, and why those before it were not taken."""

    arch: Arch | None  # None is the CPU
    row: config.Row
    passed_over: tuple[PassedOver, ...]

    @property
    def label(self) -> str:
        """The name of the choice, such as SM90_MediumBlock_64x128: the blocks that run (dk/dv's in a backward)."""
        place = "CPU" if self.arch is None else f"SM{self.arch.sm}"
        return f"{place}_{self.row.tier}_{self.row.config.block_m}x{self.row.config.block_n}"


@lru_cache(maxsize=1024)
def candidates(
    rows: tuple[config.Row, ...], arch: Arch, demand: Demand
) -> tuple[tuple[config.Row, ...], tuple[PassedOver, ...]]:
    """Return the rows that suit an architecture and a problem, best first, and the others of that architecture.

    An architecture without rows of its own gets those of the nearest older one, since it has at least the same resources.
    """
    known = {row.sm for row in rows}
    family = max((sm for sm in known if sm <= nearest(arch.sm).sm), default=min(known))
    suited, passed_over = [], []
    for row in rows:
        if row.sm != family:
            continue
        reason = _mismatch(row, arch, demand)
        if reason:
            passed_over.append(PassedOver(row, reason))
        else:
            suited.append(row)
    return tuple(suited), tuple(passed_over)


def choose(rows: tuple[config.Row, ...], arch: Arch, demand: Demand, refusals: Refusals) -> Choice:
    """Return the first row that suits and whose kernel does not refuse; NotImplementedError with every reason if none."""
    suited, passed_over = candidates(rows, arch, demand)
    refused: dict[str, list[str]] = {}
    for row in suited:
        if row.kernel not in refused:
            refused[row.kernel] = refusals(row.kernel)
        if not refused[row.kernel]:
            return Choice(arch, row, passed_over)
        passed_over = (*passed_over, PassedOver(row, "; ".join(refused[row.kernel])))
    raise NotImplementedError("no kernel takes this call: " + "; ".join(map(str, passed_over)))


def _mismatch(row: config.Row, arch: Arch, demand: Demand) -> str:
    """Return why a row does not suit, or nothing."""
    if row.one_query and demand.seqlen_q != 1:
        return f"{demand.seqlen_q} queries of a head are not one"
    if row.full_bias and not demand.full_bias:
        return "there is no bias with queries"
    if demand.width > row.dim:
        return f"head dimension {demand.width} is wider"
    if row.dim_v and demand.dim_v > row.dim_v:
        return f"head dimension {demand.dim_v} of values is wider"
    if demand.itemsize > row.itemsize:
        return f"it takes elements of {row.itemsize} bytes, and these have {demand.itemsize}"
    if demand.seqlen_k < row.min_seqlen:
        return f"{demand.seqlen_k} keys are under {row.min_seqlen}"
    if row.few_tiles and demand.tiles >= arch.num_sms:
        return f"{demand.tiles} tiles of queries are enough for {arch.num_sms} multiprocessors"
    if row.shared_memory > arch.shared_memory:
        return f"needs {row.shared_memory} bytes of shared memory, {arch} gives a block {arch.shared_memory}"
    return ""

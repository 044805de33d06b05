"""What tuning may change of a row: the fields that one kernel reads, and the values that they may have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from dmattn_ops.choice.configurations import (
    AmpereBackward,
    AmpereForward,
    Config,
    HopperBackward,
    HopperBackward256,
    HopperForward,
    PortableBackward,
    PortableForward,
    Row,
)


@dataclass(frozen=True, slots=True)
class Part:
    """Fields of a configuration that one kernel reads, and the values that tuning may give them, the row's own first."""

    name: str
    fields: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]
    replaces: tuple[str, ...] = ()  # fields for calls of their own, which take other values than the row's too

    def of(self, config: Config) -> tuple[Any, ...]:
        """Return the values of these fields."""
        return tuple(getattr(config, field) for field in self.fields)

    def put(self, config: Config, values: tuple[Any, ...]) -> Config:
        """Return the configuration with these values in these fields."""
        changes: dict[str, Any] = dict(zip(self.fields, values, strict=True))
        if values != self.values[0]:
            changes |= dict.fromkeys(self.replaces)
        return replace(config, **changes)


_BLOCKS = ("block_m", "block_n", "num_warps", "num_stages")
_SCALES = {"block_m": (16, 32, 64, 128), "block_n": (16, 32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3, 4)}
_TRIED_FORWARD = {
    32: tuple((128, 64, stages, 2) for stages in (3, 2)),
    64: tuple((rows, 128, stages, 2) for rows in (192, 128) for stages in (2, 3)),
    128: ((128, 128, 2, 1), (128, 64, 4, 2)),
}
_TRIED_AMPERE_FORWARD = {
    64: ((128, 64, 4), (64, 64, 4), (128, 32, 4), (128, 128, 4)),
    128: ((128, 64, 4), (64, 64, 4), (128, 32, 4)),
    256: ((64, 64, 4), (64, 32, 4), (128, 64, 8)),
}
_TRIED_AMPERE_BACKWARD = {
    32: ((64, 128, 4, 2, 4, 2, 2, 2), (64, 64, 4, 2, 2, 2, 2, 2)),
    64: ((64, 64, 4, 2, 2, 2, 2, 2), (64, 128, 8, 2, 4, 4, 2, 2), (128, 128, 8, 4, 4, 4, 2, 1)),
    128: ((64, 64, 4, 2, 2, 2, 1, 1), (64, 128, 8, 2, 4, 2, 2, 1)),
    256: ((64, 64, 8, 4, 2, 2, 1, 1), (32, 64, 8, 2, 4, 2, 2, 2), (32, 32, 4, 2, 2, 2, 1, 1)),
}
_TRIED_BACKWARD = {
    64: ((128, 128, "overlapped"), (128, 128, "two_phase")),
    128: ((64, 128, "two_phase"), (64, 128, "overlapped")),
}


def _neighbours(own: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return blocks, warps and stages next to `own`: at most two of the four moved by one place of `_SCALES`."""
    near = []
    for place, scale in zip(own, _SCALES.values(), strict=True):
        smaller, larger = [value for value in scale if value < place], [value for value in scale if value > place]
        near.append((*smaller[-1:], place, *larger[:1]))
    grid = product(*near)
    return tuple(sorted(tried for tried in grid if sum(a != b for a, b in zip(tried, own, strict=True)) <= 2))


def _part(name: str, fields: tuple[str, ...], config: Config, tried: tuple[tuple[Any, ...], ...] = ()) -> Part:
    own = tuple(getattr(config, field) for field in fields)
    others = tried or _neighbours(own)
    return Part(name, fields, (own, *(values for values in others if values != own)))


def parts(row: Row) -> tuple[Part, ...]:
    """Return the tunable parts of a row, one for each kernel; empty if there is only one configuration."""
    config = row.config
    if isinstance(config, PortableForward):
        return (_part("out", _BLOCKS, config),)
    if isinstance(config, PortableBackward):
        return _part("dk/dv", _BLOCKS, config), _part("dq", tuple(f"dq_{field}" for field in _BLOCKS), config)
    if isinstance(config, AmpereForward):
        part = _part("out", ("block_m", "block_n", "num_warps"), config, _TRIED_AMPERE_FORWARD[row.dim])
        return (replace(part, replaces=("plain",)),)
    if isinstance(config, AmpereBackward):
        warps = ("num_warps", "score_warps", "key_warps", "query_warps")
        fields = ("block_m", "block_n", *warps, "query_stages", "grad_stages")
        return (replace(_part("gradients", fields, config, _TRIED_AMPERE_BACKWARD[row.dim]), replaces=("plain",)),)
    if isinstance(config, HopperForward):
        tried = _TRIED_FORWARD.get(row.dim)
        return (_part("out", ("block_m", "block_n", "stages", "query_stages"), config, tried),) if tried else ()
    if isinstance(config, HopperBackward):
        return (_part("gradients", ("block_m", "block_n", "variant"), config, _TRIED_BACKWARD[row.dim]),)
    if isinstance(config, HopperBackward256):
        return (_part("gradients", ("heads_per_group",), config, ((1,), (2,), (4,), (8,))),)
    return ()


def shared_memory(row: Row, part: Part, values: tuple[Any, ...]) -> int:
    """Return the bytes of shared memory that the operands of a block take, at the width of the row; 0 is unknown."""
    made: Any = part.put(row.config, values)
    line = row.dim * row.itemsize  # bytes of one row of an operand
    if isinstance(made, AmpereForward):
        return line * (made.block_m + 2 * made.block_n)
    if isinstance(made, AmpereBackward):
        rows = (made.query_stages + made.grad_stages) * made.block_m + 2 * made.block_n
        statistics = 4 * made.block_m * (2 * made.query_stages + made.grad_stages)
        return line * rows + 4 * made.block_m * made.block_n + statistics
    if isinstance(made, HopperForward):
        return line * (made.query_stages * made.block_m + 2 * made.stages * made.block_n)
    if isinstance(made, HopperBackward):
        exchanged = 4 * made.block_m * made.block_n + 32768  # two buffers of dS, and dq on its way out
        keys = 4 if row.dim <= 64 else 3  # buffers of V and, where there is room, of K
        return line * (4 * made.block_m + keys * made.block_n) + exchanged
    if not isinstance(made, PortableForward | PortableBackward):
        return row.shared_memory
    block_m, block_n, _, stages = values
    owned, walked = (block_n, block_m) if part.name == "dk/dv" else (block_m, block_n)
    # Triton keeps the step that is computed in shared memory for wgmma, in registers otherwise
    buffers = stages if row.sm == 90 and owned >= 64 else max(1, stages - 1)
    return line * (2 * buffers * walked + (owned if part.name == "out" else 2 * owned))

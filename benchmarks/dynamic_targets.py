"""What dynamic masks are meant to reach, and what a result file of `bench_dynamic.py` says of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Row = dict[str, Any]


class Target(NamedTuple):
    """A number that must be reached, and the one that is aimed at; `at_most` where less is better."""

    name: str
    must: float
    aim: float
    measured: Callable[[list[Row]], float | None]
    at_most: bool = False


def _ours(rows: list[Row], part: str, words: str) -> Row | None:
    """Return our row of the case that holds all words."""
    for row in rows:
        named = row["part"] == part and row["implementation"] == "dmattn" and "missing" not in row
        if named and set(words.split()) <= set(row["case"].split()):
            return row
    return None


def value_of(part: str, words: str, field: str) -> Callable[[list[Row]], float | None]:
    """Return what reads a field of our row of a part whose case holds all words."""

    def read(rows: list[Row]) -> float | None:
        row = _ours(rows, part, words)
        return None if row is None else row.get(field)

    return read


def _speed_up(part: str, words: str) -> Callable[[list[Row]], float | None]:
    """Return what reads the speed-up over dense attention: of the earlier checkout where that was measured."""

    def read(rows: list[Row]) -> float | None:
        row = _ours(rows, part, words)
        return None if row is None else row.get("speed_up_over_old", row.get("speed_up"))

    return read


def _growth(shorter: str, longer: str) -> Callable[[list[Row]], float | None]:
    def read(rows: list[Row]) -> float | None:
        pair = [_ours(rows, "lengths", words) for words in (shorter, longer)]
        if pair[0] is None or pair[1] is None:
            return None
        return pair[1]["whole_ms"] / pair[0]["whole_ms"]

    return read


def _slowest_model(rows: list[Row]) -> float | None:
    """Return the speed under the slowest model of scores over the mean speed of all six."""
    speeds = [
        1 / row["whole_ms"]
        for row in rows
        if row["part"] == "models" and row["implementation"] == "dmattn" and row.get("model") != "documents"
        and "missing" not in row
    ]  # fmt: skip
    return min(speeds) / statistics.mean(speeds) if len(speeds) == 6 else None


def _scaled(part: str, words: str, field: str, unit: float) -> Callable[[list[Row]], float | None]:
    def read(rows: list[Row]) -> float | None:
        found = value_of(part, words, field)(rows)
        return None if found is None else found / unit

    return read


LAYER = "S1048576 keep2048 H32/8"
TARGETS = (
    *(
        Target(f"{words}: speed-up over dense causal", must, aim, _speed_up(part, words))
        for part, words, must, aim in (
            ("heads32", "S8192 keep1024 H32/8", 2.5, 3.0),
            ("heads32", "S32768 keep1024 H32/8", 10, 12),
            ("heads32", "S32768 keep2048 H32/8", 5.8, 6.6),
            ("heads32", "S131072 keep2048 H32/8", 23, 27),
            ("heads16", "S8192 keep1024 H16/16", 2.0, 2.5),
            ("heads16", "S32768 keep1024 H16/16", 7, 9),
            ("heads16", "S32768 keep2048 H16/16", 5, 6),
            ("heads16", "S131072 keep2048 H16/16", 19, 23),
        )
    ),
    Target("slowest model of scores over the mean", 0.75, 0.85, _slowest_model),
    Target(
        "share beside attention, H32/8", 0.14, 0.08, value_of("heads32", "S32768 keep1024 H32/8", "share"), at_most=True
    ),
    Target(
        "share beside attention, H16/16",
        0.25,
        0.15,
        value_of("heads16", "S32768 keep1024 H16/16", "share"),
        at_most=True,
    ),
    Target("time of 131072 over 32768 positions", 4.5, 4.2, _growth("S32768", "S131072"), at_most=True),
    Target("time of 1048576 over 262144 positions", 4.5, 4.2, _growth("S262144", "S1048576"), at_most=True),
    Target("a layer of 1048576 positions, s", 0.3, 0.24, _scaled("lengths", LAYER, "whole_ms", 1e3), at_most=True),
    Target(
        "its memory beyond outputs, gradients and a float32 dq, GB",
        16,
        8,
        _scaled("lengths", LAYER, "workspace_bytes", 1e9),
        at_most=True,
    ),
    Target("CPU: speed-up over dense causal", 4, 6, _speed_up("cpu", "S8192 keep512 H8/2 D64")),
)


def targets_of(rows: list[Row], targets: Iterable[Target] = TARGETS) -> list[Row]:
    """Return each target that rows say something about, what was measured, and what was reached: "aim", "must" or "no"."""
    found = []
    for target in targets:
        measured = target.measured(rows)
        if measured is None:
            continue
        sign = -1 if target.at_most else 1
        reached = [name for name in ("aim", "must") if sign * measured >= sign * getattr(target, name)]
        found.append(
            {
                "target": target.name,
                "must": target.must,
                "aim": target.aim,
                "measured": round(measured, 3),
                "reached": reached[0] if reached else "no",
            }
        )
    return found

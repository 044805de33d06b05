"""Rows of a table: one call, as this library and its peers compute it, and what must hold of the fastest peer's time over ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from peers import Run, Unavailable
from timing import Gauge, interleaved, kernels_ms

HELD = 0.98  # of a must, since noise is a few percent
AGAIN = 0.97  # rows below this are measured a second time
OURS = "dmattn"
PARTS = ("forward", "backward")


@dataclass(frozen=True)
class Case:
    """A row: `runs` make what is timed, by implementation, ours first."""

    name: str
    must: tuple[float, float]  # forward, backward
    runs: Mapping[str, Callable[[], Run]]


def _set_up(case: Case) -> dict[str, Run]:
    """Return what can run a case. A peer that fails is reported and left out; a failure of this library is raised."""
    runs = {}
    for name, make in case.runs.items():
        try:
            runs[name] = make()
        except Exception as error:
            if name == OURS and not isinstance(error, Unavailable):
                raise
            print(f"  {name} does not run {case.name}: {(str(error).splitlines() or [''])[0][:200]}", file=sys.stderr)
    return runs


def measure(case: Case, rounds: int, gauge: Gauge) -> dict[str, Any]:
    """Time every implementation of a case in turns; a row with a ratio under `AGAIN` is timed again, and the better one kept."""
    runs = _set_up(case)
    functions = {
        (name, part): function
        for name, run in runs.items()
        for part, function in zip(PARTS, (run.forward, run.backward), strict=True)
        if function is not None
    }
    row = _row(case, functions, rounds, gauge)
    ratios = [row[f"{part}_ratio"] for part in PARTS if row[f"{part}_ratio"] is not None]
    if any(ratio < AGAIN for ratio in ratios):
        second = _row(case, functions, rounds, gauge)
        for part in PARTS:
            if second[f"{part}_ratio"] is not None and second[f"{part}_ratio"] > row[f"{part}_ratio"]:
                row |= {name: value for name, value in second.items() if name.startswith(part)}
        row["measured"] = 2
    return row


def _row(case: Case, functions: dict[tuple[str, str], Callable[[], Any]], rounds: int, gauge: Gauge) -> dict[str, Any]:
    samples = interleaved(functions, "cuda", rounds=rounds, gauge=gauge, timer=kernels_ms)
    row: dict[str, Any] = {"case": case.name, "implementation": OURS, "measured": 1}
    for part, must in zip(PARTS, case.must, strict=True):
        times = {name: round(sample.median, 4) for (name, of), sample in samples.items() if of == part}
        ours, peers = times[OURS], {name: time for name, time in times.items() if name != OURS}
        best = min(peers, key=lambda name: peers[name]) if peers else None
        ratio = None if best is None else round(peers[best] / ours, 3)
        held = None if ratio is None else ratio >= HELD * must
        row |= {f"{part}_ms": ours, f"{part}_peers_ms": peers, f"{part}_best_peer": best}
        row |= {f"{part}_ratio": ratio, f"{part}_must": must, f"{part}_held": held}
    return row


def text(row: dict[str, Any]) -> str:
    """Return the printed line of a row."""
    parts = []
    for part in PARTS:
        peers = ", ".join(f"{name} {time:.4f}" for name, time in row[f"{part}_peers_ms"].items())
        verdict = {True: "held", False: "NOT HELD", None: "no peer"}[row[f"{part}_held"]]
        ratio = "" if row[f"{part}_ratio"] is None else f" {row[f'{part}_ratio']:.3f} of must {row[f'{part}_must']:.2f}"
        parts.append(f"{part} {row[f'{part}_ms']:.4f} ms ({peers}){ratio} {verdict}")
    return f"{row['case']}\n    " + "\n    ".join(parts)


def missed(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return the rows and parts in which a must is not held."""
    return [f"{row['case']}, {part}" for row in rows for part in PARTS if row[f"{part}_held"] is False]

"""Draw a result file: `python benchmarks/plot.py results.json picture.png`.

Files with a mask's preparation show the whole time of a call (preparation, forward and backward); files without show
the TFLOP/s of forward and backward; files with a summary, how many times as fast masks make a call, by density. Files of
`bench_dynamic.py` show time over sequence length, dense and dynamic; those of `bench_intervals.py` TFLOP/s of each mask.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
COLOURS = {
    "dmattn": "#c0392b",
    "dmattn-unmasked": "#e59a90",
    "dmattn-sm80": "#8e44ad",
    "dmattn-dense": "#34495e",
    "dmattn-intervals": "#e59a90",
    "fa4-dense": "#9ecae1",
    "fa4": "#2c7fb8",
    "cudnn": "#4daf4a",
    "flex": "#e6a817",
    "sdpa": "#7f8c8d",
    "sdpa-efficient": "#b2babb",
}


def total_ms(row: Row) -> float | None:
    """Return preparation, forward and backward together, or None where one could not run."""
    if row["backward_ms"] is None:
        return None
    return row["forward_ms"] + row["backward_ms"] + (row["prepare_ms"] or 0.0)


def _rate(row: Row, part: str, factor: int) -> float | None:
    rate = row[f"{part}_tflops"]
    return None if rate is None else rate * factor


def _bars(axes: Any, rows: list[Row], value: Callable[[Row], float | None]) -> None:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    shown = {row["implementation"] for row in rows if value(row) is not None}
    names = [name for name in COLOURS if name in shown]
    height = 0.8 / len(names)
    for index, name in enumerate(names):
        bars = [(cases.index(row["case"]), value(row)) for row in rows if row["implementation"] == name]
        places = [case + index * height for case, size in bars if size is not None]
        sizes = [size for _, size in bars if size is not None]
        axes.barh(places, sizes, height, color=COLOURS[name], label=name)
    axes.set_yticks([case + 0.4 - height / 2 for case in range(len(cases))], cases)
    axes.set_ylim(len(cases), -0.2)  # the first case on top
    axes.grid(axis="x", alpha=0.3)


def draw(source: Path, picture: Path) -> None:
    """Draw the rows of a result file as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    results = json.loads(source.read_text())
    if "summary" in results:
        figure = _speed_ups(plt, results["summary"])
    elif "published_tflops" in results:
        figure = _rates_of_masks(plt, results["rows"])
    elif "targets" in results:
        figure = _times_over_length(plt, results["rows"])
    else:
        figure = _times_or_rates(plt, results["rows"])
    figure.suptitle(f"{results['gpu']}, {results['date']}, torch {results['versions']['torch']}")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)
    print(f"drawn: {picture}")


def _speed_ups(plt: Any, summary: list[Row]) -> Any:
    """Draw, against the part of the elements kept, the time of each other way over ours; a line for each pattern."""
    labels = {"dense": "our dense kernels", "sdpa": "SDPA with the mask", "flex": "flex_attention"}
    peers = [peer for peer in labels if any(_speed_up(line, peer) is not None for line in summary)]
    figure, panels = plt.subplots(1, len(peers), figsize=(4 * len(peers), 4), layout="constrained", squeeze=False)
    for axes, peer in zip(panels[0], peers, strict=True):
        for pattern in dict.fromkeys(line["case"].split()[0] for line in summary):
            lines = [line for line in summary if line["case"].startswith(pattern)]
            points = [(line["density"], _speed_up(line, peer)) for line in lines]
            known = sorted((density, factor) for density, factor in points if factor is not None)
            if known:
                axes.plot(*zip(*known, strict=True), marker="o", label=pattern)
        axes.axhline(1, color="black", linewidth=0.5)
        axes.set(title=f"times as fast as {labels[peer]}", xlabel="part of the elements kept", ylim=(0, None))
        axes.grid(alpha=0.3)
    panels[0, 0].legend()
    return figure


def _speed_up(line: Row, peer: str) -> float | None:
    if peer == "dense":
        return 1 / (1 - line["saved"])
    return line.get(f"{peer}_over_ours")


def _times_over_length(plt: Any, rows: list[Row]) -> Any:
    """Draw, log-log, the milliseconds of a whole call over its number of positions: dense, and with a dynamic mask."""
    labels = {"dmattn": "dynamic mask, selection included", "dmattn-dense": "dense causal"}
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    shown = [row for row in rows if row["part"] == "lengths" and "missing" not in row]
    for name, label in labels.items():
        points = sorted((_length(row), row["whole_ms"]) for row in shown if row["implementation"] == name)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=COLOURS[name], label=label)
    kept = ", ".join(dict.fromkeys(row["case"].split(maxsplit=1)[1] for row in shown))
    axes.set(xlabel="positions", ylabel="ms, forward + backward", yscale="log", title=kept)
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    return figure


def _length(row: Row) -> int:
    """Return the positions that a case such as "S8192 keep1024 H32/8" names."""
    return int(row["case"].split()[0].removeprefix("S"))


def _rates_of_masks(plt: Any, rows: list[Row]) -> Any:
    """Draw TFLOP/s of forward and backward of each mask, at the part with the most masks (the first of them)."""
    parts = [row["part"] for row in rows]
    part = max(dict.fromkeys(parts), key=parts.count)
    shown = [row for row in rows if row["part"] == part and "missing" not in row]
    return _rates(plt, shown, 1.5 + 0.12 * len(shown))


def _times_or_rates(plt: Any, rows: list[Row]) -> Any:
    masked = any(row["prepare_ms"] is not None for row in rows)
    height = 1.5 + 0.12 * len(rows)
    if masked:
        figure, axes = plt.subplots(figsize=(8, height), layout="constrained")
        _bars(axes, rows, total_ms)
        axes.set_xlabel("milliseconds, mask work + forward + backward (less is better)")
    else:
        return _rates(plt, rows, height)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _rates(plt: Any, rows: list[Row], height: float) -> Any:
    figure, panels = plt.subplots(1, 2, figsize=(11, height), layout="constrained", sharey=True)
    fast = any((row["forward_tflops"] or 0) > 1 for row in rows)
    unit, factor = ("TFLOP/s", 1) if fast else ("GFLOP/s", 1000)
    for axes, part in zip(panels, ("forward", "backward"), strict=True):
        _bars(axes, rows, functools.partial(_rate, part=part, factor=factor))
        axes.set(title=part, xlabel=f"{unit} (more is better)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))

"""Measure problems with several implementations: the loop and the command line that all benchmarks share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from peers import IMPLEMENTATIONS, Problem, Run, Unavailable
from plot import draw
from timing import Gauge, Sample, interleaved, kernels_ms, processor, write_results

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
BACKWARD_FLOPS = 2.5  # five matrix products where the forward has two


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--rounds", type=int, default=5, help="rounds of the interleaved measurement")
    options.add_argument("--implementations", nargs="+", choices=sorted(IMPLEMENTATIONS), help="only these")
    options.add_argument("--output", type=Path, help="the result file; benchmarks/results/<date>-<device>-<what>.json")
    options.add_argument("--plot", type=Path, help="draw the result file's rows to this picture")
    return options


def default_output(device: str, what: str) -> Path:
    """Return the path of a result file that was not named."""
    words = processor(device).split(",")[0].replace("(R)", "").replace("NVIDIA", "").split()
    return RESULTS / f"{date.today().isoformat()}-{'-'.join(words).lower().replace('@', 'at')}-{what}.json"


def _runs(problem: Problem, names: Iterable[str]) -> dict[str, Run]:
    """Set up what can run the problem. A peer that fails is reported and left out; a failure of this library is raised."""
    runs = {}
    for name in names:
        try:
            runs[name] = IMPLEMENTATIONS[name](problem)
        except Exception as error:
            if name.startswith("dmattn") and not isinstance(error, Unavailable):
                raise
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"  {name} does not run {problem.case}: {first_line[:200]}", file=sys.stderr)
    return runs


def measure(problem: Problem, names: Iterable[str], rounds: int, gauge: Gauge) -> list[Row]:
    """Time every implementation that runs the problem; return a row for each."""
    runs = _runs(problem, names)
    functions: dict[tuple[str, str], Callable[[], object]] = {}
    for name, run in runs.items():
        parts = {"forward": run.forward, "backward": run.backward, "prepare": run.prepare}
        functions.update({(name, part): function for part, function in parts.items() if function is not None})
    samples = interleaved(functions, problem.device, rounds=rounds, gauge=gauge, timer=kernels_ms)
    return [_row(problem.case, name, problem.forward_flops, samples) for name in runs]


def _row(case: str, name: str, flops: float, samples: dict[tuple[str, str], Sample]) -> Row:
    row: Row = {"case": case, "implementation": name}
    for part in ("forward", "backward", "prepare"):
        sample = samples.get((name, part))
        row[f"{part}_ms"] = round(sample.median, 4) if sample else None
        row[f"{part}_range_ms"] = [round(sample.low, 4), round(sample.high, 4)] if sample else None
    for part, factor in (("forward", 1.0), ("backward", BACKWARD_FLOPS)):
        milliseconds = row[f"{part}_ms"]
        row[f"{part}_tflops"] = round(factor * flops / milliseconds / 1e9, 4) if milliseconds else None
    return row


def _line(row: Row) -> str:
    """Format one row of the printed table."""
    times = (row["prepare_ms"], row["forward_ms"], row["backward_ms"])
    cells = [f"{'':>9}" if value is None else f"{value:9.3f}" for value in times]
    cells += [
        f"{'':>8}" if value is None else f"{value:8.3f}" for value in (row["forward_tflops"], row["backward_tflops"])
    ]
    return f"{row['case']:<34} {row['implementation']:<16}" + " ".join(cells)


def run_table(
    problems: Iterable[Problem],
    names: Iterable[str],
    options: argparse.Namespace,
    what: str,
    describe: Callable[[Problem], Row] | None = None,
) -> tuple[Path, list[Row]]:
    """Measure all problems, print each row, write the result file and draw it where asked; return file and rows.

    `describe` gives more fields for the rows of a problem.
    """
    gauge = Gauge()
    rows: list[Row] = []
    names = options.implementations or list(names)
    heads = " ".join(f"{name:>9}" for name in ("prepare", "forward", "backward"))
    print(f"{'case':<34} {'implementation':<16}{heads} ms, TFLOP/s forward and backward")
    for problem in problems:
        facts = describe(problem) if describe else {}
        for row in measure(problem, names, options.rounds, gauge):
            rows.append({**row, **facts})
            print(_line(row), flush=True)
    output = options.output or default_output(options.device, what)
    write_results(output, rows, options.device, gauge)
    if options.plot:
        draw(output, options.plot)
    return output, rows

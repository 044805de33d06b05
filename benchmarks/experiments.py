"""Experiments of a benchmark that has little time: each is bounded, and its rows are in the result file as soon as they exist.

GPUs are often lent for some minutes at a time. So an experiment that takes longer than `--seconds` is given up, none begins
after `--minutes`, `--rows` chooses parts, and `--append` adds to a result file that another command began on the same
machine with the same versions. What could not be measured is a row of its own, with the reason under `missing`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from table import default_output
from timing import Gauge, interleaved, kernels_ms, result_facts

Row = dict[str, Any]


class OutOfTime(RuntimeError):
    """An experiment took longer than it may."""


def parser(description: str | None, parts: Iterable[str]) -> argparse.ArgumentParser:
    """Return a parser with the options of bounded benchmarks; `parts` are the names that `--rows` takes."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--rows", nargs="+", choices=list(parts), help="only these parts")
    options.add_argument("--rounds", type=int, default=3, help="rounds of the interleaved measurement")
    options.add_argument("--minutes", type=float, default=9.0, help="begin no experiment after this time")
    options.add_argument("--seconds", type=float, default=120.0, help="give up an experiment after this time")
    options.add_argument(
        "--tiny", action="store_true", help="small sizes, in seconds on a CPU: to see that all of it runs"
    )
    options.add_argument("--output", type=Path, help="the result file; benchmarks/results/<date>-<device>-<what>.json")
    options.add_argument(
        "--append", action="store_true", help="add to the result file; parts measured again are replaced"
    )
    return options


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the main thread after so many seconds, and again after as many, between two steps of Python.

    The first may end one peer that compiles for too long, and the next what comes after it. Other threads know no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Session:
    """The result file of one run of a benchmark, written again after each experiment."""

    def __init__(self, options: argparse.Namespace, what: str) -> None:
        self.options, self.gauge, self.began = options, Gauge(), time.perf_counter()
        self.output: Path = options.output or default_output(options.device, what)
        self.facts = result_facts(options.device)
        if options.device == "cpu":  # what else runs there takes time from what is measured
            self.facts["load_before"] = round(os.getloadavg()[0], 2)
        self.rows: list[Row] = []
        self.commands: list[str] = []
        if options.append and self.output.exists():
            self._continue(json.loads(self.output.read_text()))

    def _continue(self, earlier: Row) -> None:
        """Take the rows of an earlier command; refuse those of another machine or of other versions."""
        for fact in ("gpu", "versions"):
            if earlier[fact] != self.facts[fact]:
                raise SystemExit(
                    f"--append: {self.output} was measured with {fact} {earlier[fact]}, not {self.facts[fact]}"
                )
        self.rows, self.commands = earlier["rows"], earlier["commands"]

    def wants(self, part: str) -> bool:
        """Return whether a part was asked for."""
        return not self.options.rows or part in self.options.rows

    def run(self, part: str, case: str, experiment: Callable[[], list[Row]], **facts: Any) -> list[Row]:
        """Run one experiment; keep its rows under the names of the part and the case, instead of earlier ones.

        `facts` are further fields of each row.
        """
        if not self.wants(part):
            return []
        spent = (time.perf_counter() - self.began) / 60
        if spent > self.options.minutes:
            print(
                f"{part}: {case}: left out, since {spent:.1f} of {self.options.minutes} minutes are over",
                file=sys.stderr,
            )
            return []
        try:
            with limited(self.options.seconds):
                found = experiment()
        except (OutOfTime, torch.cuda.OutOfMemoryError) as error:
            found = [missing("dmattn", error)]
        if self.options.device == "cuda":
            torch.cuda.empty_cache()
        found = [{"part": part, "case": case, **facts, **row} for row in found]
        self.rows = [row for row in self.rows if (row["part"], row["case"]) != (part, case)] + found
        for row in found:
            print(line_of(row), flush=True)
        self.write()
        return found

    def measured(
        self, functions: dict[tuple[str, str], Callable[[], Any]], *, least: Callable[..., float] | None = None
    ) -> list[Row]:
        """Time functions by (implementation, part) in turns; return a row for each implementation, in milliseconds.

        A time is the median over the rounds, or, with a timer of the fastest call, `least`, the least. `whole_ms` is the sum of
        mask work, forward and backward where they are not timed as one.
        """
        device, rounds = self.options.device, self.options.rounds
        samples = interleaved(functions, device, rounds=rounds, gauge=self.gauge, timer=least or kernels_ms)
        rows: dict[str, Row] = {}
        for (name, part), sample in samples.items():
            time_ms = sample.low if least else sample.median
            rows.setdefault(name, {"implementation": name})[f"{part}_ms"] = round(time_ms, 4)
        for row in rows.values():
            whole = sum(row.get(f"{part}_ms", 0.0) for part in ("prepare", "forward", "backward"))
            row.setdefault("whole_ms", round(whole, 4))
        return list(rows.values())

    def write(self, **more: Any) -> None:
        """Write what there is so far; `more` are further entries of the file."""
        own = self.facts["command"]
        commands = self.commands if own in self.commands else [*self.commands, own]
        results = {**self.facts, "commands": commands, **self.gauge.facts(), **more, "rows": self.rows}
        self.output.parent.mkdir(parents=True, exist_ok=True)
        partial = self.output.with_suffix(".partial")
        partial.write_text(json.dumps(results, indent=1) + "\n")
        partial.replace(self.output)

    def finish(self, **more: Any) -> list[Row]:
        """Write the file for the last time, and return all of its rows; entries `ratios` and `targets` are printed as well."""
        self.write(**more)
        print(f"written: {self.output}")
        for entry in (*more.get("ratios", ()), *more.get("targets", ())):
            print("  ".join(f"{name} {value}" for name, value in entry.items()))
        return self.rows


def missing(implementation: str, reason: object) -> Row:
    """Return the row of an implementation that was not measured, with the reason in one line."""
    words = str(reason).splitlines() or [type(reason).__name__]
    return {"implementation": implementation, "missing": words[0][:200]}


def line_of(row: Row) -> str:
    """Return a row as a line of text."""
    facts = (f"{name} {value}" for name, value in row.items() if name not in ("part", "case", "mask", "implementation"))
    return f"{row['part']}: {row['case']:<34} {row['implementation']:<18} " + "  ".join(facts)


def begun(options: argparse.Namespace, what: str, script: str) -> Session:
    """Return the session of a benchmark, after a seed.

    With `--cpu`, which some have, it measures the part "cpu" there; a `script` raises SystemExit for other work on a CPU but
    `--tiny`.
    """
    on_cpu = getattr(options, "cpu", None)
    if on_cpu:
        options.device, options.rows = "cpu", ["cpu"]
    elif options.device == "cpu" and not options.tiny:
        takes = "--tiny" if on_cpu is None else "--cpu or --tiny"
        raise SystemExit(f"{script} needs a GPU; on a CPU it takes {takes}")
    torch.manual_seed(0)
    return Session(options, what)

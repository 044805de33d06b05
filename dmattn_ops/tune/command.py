"""Measure configurations on this GPU and keep those that are faster than the rows' own: `python -m dmattn_ops.tune`.

    python -m dmattn_ops.tune --shape "B4 H32 S4096 D128 causal" --shape "B1 H16 Hkv4 S16384 D64 masked"
    python -m dmattn_ops.tune --shape "B1 H32 Hkv8 S32768 D128 keep1024"
    DMATTN_RECORD=shapes.jsonl python train.py; python -m dmattn_ops.tune --recorded shapes.jsonl

Of dynamic masks, the length of the epochs comes first in which keys are packed, and whether to pack them (`tune/epochs.py`).
What is found goes to the cache that dispatch reads (`tuning.py`). Nothing else ever tunes: no call of the library does.
A model (`cost.py`) ranks the candidates, so that few are compiled. Each has to agree with the row's own configuration.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn_ops import meta
from dmattn_ops.call import Call, Gradients, Saved
from dmattn_ops.call import Result as Outputs
from dmattn_ops.choice import resolve, tunable, tuning
from dmattn_ops.choice.arch import Arch
from dmattn_ops.choice.configurations import Config, Row
from dmattn_ops.choice.tunable import Part
from dmattn_ops.choice.tuning import Case, EpochCase, Shape
from dmattn_ops.dispatch import run
from dmattn_ops.launching import plans
from dmattn_ops.launching.recording import one_call
from dmattn_ops.tune import cost, epochs
from dmattn_ops.tune.calls import (
    MARGIN,
    Measure,
    disagreement,
    interleaved,
    make_call,
    parse_shape,
    written,
)

DIRECTIONS = ("forward", "backward")
CANDIDATES = 6  # of each kernel, besides the row's own
DEFAULT_SHAPES = ("B4 H32 S4096 D64 causal", "B4 H16 S4096 D128 causal", "B1 H16 S1024 D64 causal")

Launch = Callable[[Config], None]


class Trial(NamedTuple):
    """One candidate of one kernel: its prediction in cycles, and its milliseconds or why there are none."""

    part: str
    values: tuple[Any, ...]
    predicted: float
    milliseconds: float = math.nan
    refused: str = ""


class Result(NamedTuple):
    """The fastest configuration of a task and its time; the row's own configuration where nothing was faster."""

    task: Task
    config: Config
    own_ms: float
    ms: float
    trials: tuple[Trial, ...]

    def correlations(self) -> dict[str, float]:
        """Return the rank correlation of predictions and measurements over the candidates of each kernel."""
        found = {}
        for part in dict.fromkeys(trial.part for trial in self.trials):
            pairs = [(t.predicted, t.milliseconds) for t in self.trials if t.part == part and not t.refused]
            found[part] = cost.rank_correlation([first for first, _ in pairs], [second for _, second in pairs])
        return found

    def table(self) -> str:
        """Return a line for each candidate under that of the result."""
        lines = [str(self)]
        for trial in self.trials:
            outcome = trial.refused or f"{trial.milliseconds:.4f} ms"
            lines.append(f"  {trial.part:<9} {trial.values!s:<26} {trial.predicted / 1e3:10.1f} kcycles  {outcome}")
        return "\n".join(lines)

    def __str__(self) -> str:
        known = self.correlations().items()
        ranks = ", ".join(f"{part} {'undefined' if math.isnan(value) else f'{value:.2f}'}" for part, value in known)
        kept = "the row's own stays" if self.config == self.task.row.config else f"now {self.ms:.4f} ms"
        return f"{self.task.case}: {self.own_ms:.4f} ms, {kept} ({len(self.trials)} tried, rank correlation: {ranks})"


class Progress:
    """One line on a terminal's standard error; silent elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.shown = total, 0, sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Tell what runs now."""
        if self.shown:
            filled = 24 * self.done // self.total
            bar = "#" * filled + "." * (24 - filled)
            sys.stderr.write(f"\r\033[K[{bar}] {self.done}/{self.total} {text[:80]}")
            sys.stderr.flush()

    def finish(self, text: str) -> None:
        """Count one more as done, and print what came out."""
        self.done += 1
        self.note(text)

    def note(self, text: str) -> None:
        """Print what came out of a part."""
        if self.shown:
            sys.stderr.write("\r\033[K")
        print(text, flush=True)


class Task(NamedTuple):
    """One direction of one shape: the call, and the row that takes it."""

    direction: str
    shape: Shape
    call: Call
    row: Row
    on: Arch
    case: Case


def prepare(direction: str, shape: Shape, device: torch.device, on: Arch | None = None) -> Task | None:
    """Return the configurations to measure for one direction of a shape, dispatched as `on`; None where there is no choice."""
    call = make_call(shape, device)
    packed, _ = run.packing_of(direction, call, epochs.architecture(device, on))
    if packed is not None:  # kernels get packed keys
        call = run.first_packed(call, packed)
        shape = tuning.shape_of(call)
    choice = run.offered(direction, call, on, tuned=False)
    if choice.arch is None or not tunable.parts(choice.row):
        return None
    masked = call.mask.row_tiles is not None
    case = tuning.case_of(direction, choice.row, choice.arch, shape.demand, masked, shape.deterministic)
    return Task(direction, shape, call, choice.row, choice.arch, case)


def _launch(task: Task) -> tuple[Launch, list[Tensor]]:
    """Return a function that launches a configuration, and the outputs that it writes."""
    call = task.call
    out, lse, lse_tail, _ = meta.forward_outputs(call.query, call.value, False)
    result = Outputs(out, lse, lse_tail, None)
    if task.direction == "forward":
        forward = run.launcher("forward", task.row.kernel).forward
        launch = one_call()(lambda made: forward(call, result, resolve.forward_config(made, call, result)))
        return launch, [out, lse]
    row = run.forward_choice(call, result, task.on, tuned=False).row
    run.launcher("forward", row.kernel).forward(call, result, row.config)
    dq, dk, dv, dbias, _ = meta.backward_outputs(call.query, call.key, call.value, call.bias, None)
    saved = Saved(out, lse, lse_tail)
    grads = Gradients(torch.randn_like(out), None, dq, dk, dv, None if call.bias is None else dbias)
    backward = run.launcher("backward", task.row.kernel).backward
    outputs = [dq, dk, dv] if call.bias is None else [dq, dk, dv, dbias]
    launch = one_call()(lambda made: backward(call, saved, grads, resolve.backward_config(made, call, saved, grads)))
    return launch, outputs


def tune(
    task: Task,
    candidates: int = CANDIDATES,
    measure: Measure | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> Result:
    """Find the fastest configuration of a task.

    Args:
        task: what `prepare` returned.
        candidates: how many to try of each kernel besides the row's own, best predictions first; 0 is all.
        measure: from functions to their milliseconds; None times them in turns.
        show: called with a line of text before each candidate.
    """
    row, measure = task.row, measure or interleaved
    launch, outputs = _launch(task)
    expected = written(partial(launch, row.config), outputs)
    best, trials = row.config, []
    for part in tunable.parts(row):
        usable: dict[tuple[Any, ...], Callable[[], None]] = {}
        refused: dict[tuple[Any, ...], str] = {}
        tried = _ranked(part, task, candidates)
        for values in tried:
            show(f"{task.case} {part.name} {values}")
            attempt = partial(launch, part.put(best, values))
            refused[values] = disagreement(attempt, outputs, expected)
            if not refused[values]:
                usable[values] = attempt
        times = measure(usable)
        for values, predicted in tried.items():
            trials.append(Trial(part.name, values, predicted, times.get(values, math.nan), refused[values]))
        best = part.put(best, min(times, key=times.__getitem__))
    final = measure({"own": partial(launch, row.config), "tuned": partial(launch, best)})
    if best == row.config or final["tuned"] > MARGIN * final["own"]:
        return Result(task, row.config, final["own"], final["own"], tuple(trials))
    return Result(task, best, final["own"], final["tuned"], tuple(trials))


def _ranked(part: Part, task: Task, count: int) -> dict[tuple[Any, ...], float]:
    """Return predictions of the row's own values and of the most promising others among what fits, best first."""
    own, *others = part.values
    fitting = [values for values in others if tunable.shared_memory(task.row, part, values) <= task.on.shared_memory]
    predicted = {values: cost.predict(part, values, task.row, task.on, task.shape) for values in (own, *fitting)}
    ranked = sorted(fitting, key=predicted.__getitem__)
    return {values: predicted[values] for values in (own, *(ranked[:count] if count else ranked))}


def tune_shapes(
    shapes: Iterable[Shape],
    device: torch.device,
    directions: Iterable[str] = DIRECTIONS,
    *,
    on: Arch | None = None,
    candidates: int = CANDIDATES,
    measure: Measure | None = None,
    store: bool = True,
    table: bool = False,
) -> list[Result]:
    """Tune each case among the shapes, that of the most work first, print what is found, and store it in the cache.

    Where the cache cannot be written to, tuning goes on and tries again after the next case. `NotStored`, at the end, if
    something was found that is not stored.
    """
    tasks = [(shape, direction) for shape in sorted(shapes, key=_work, reverse=True) for direction in directions]
    progress = Progress(len(tasks))
    results: dict[Case, Result] = {}
    lengths: set[EpochCase] = set()
    pending = _Pending()
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # where Triton launches
        for shape, direction in tasks:
            length = epochs.prepare(direction, shape, device, on)
            if length is not None and length.case not in lengths:
                lengths.add(length.case)
                chosen = epochs.tune(length, measure, progress.show)
                if store:
                    pending.add(tuning.place(device, length.on), length.case, chosen.entry(date.today().isoformat()))
                progress.note(chosen.table() if table else str(chosen))
            task = prepare(direction, shape, device, on)
            if task is None:
                progress.finish(f"{direction} of {shape}: nothing to tune")
            elif task.case in results:
                progress.finish(f"{direction} of {shape}: tuned as {task.case}")
            else:
                found = results[task.case] = tune(task, candidates, measure, progress.show)
                if store:
                    entry = tuning.entry_of(task.row, found.config, found.own_ms, found.ms, date.today().isoformat())
                    pending.add(tuning.place(device, task.on), task.case, entry)
                progress.finish(found.table() if table else str(found))
    if pending.failure is not None:
        raise NotStored(str(pending.failure)) from pending.failure
    return list(results.values())


class NotStored(OSError):
    """Something was found, and the cache cannot be written to."""


class _Pending:
    """Entries that were found and are not stored yet, and the error that kept them from it."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[Case | EpochCase, tuning.Entry]] = {}
        self.failure: OSError | None = None

    def add(self, at: str, case: Case | EpochCase, entry: tuning.Entry) -> None:
        """Store an entry of a place with those that could not be stored before."""
        self.entries.setdefault(at, {})[case] = entry
        try:
            for place in list(self.entries):
                tuning.merge(place, self.entries[place])
                del self.entries[place]
        except OSError as error:
            self.failure = error
        else:
            self.failure = None
            plans.forget()


def _work(shape: Shape) -> float:
    return shape.batch * shape.heads * shape.seqlen_q * shape.seqlen_k * shape.dim * cost.visible_share(shape)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        "python -m dmattn_ops.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        help='such as "B4 H32 Hkv8 S4096 D128 causal masked"; keep1024 is a dynamic mask',
    )
    parser.add_argument("--recorded", type=Path, help="a file that DMATTN_RECORD wrote")
    parser.add_argument("--direction", choices=DIRECTIONS, help="only this one")
    parser.add_argument("--candidates", type=int, default=CANDIDATES, help="tried of each kernel; 0 is all")
    parser.add_argument("--table", action="store_true", help="print every candidate")
    parser.add_argument("--dry-run", action="store_true", help="keep nothing")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("tuning needs a GPU: the kernels of the CPU have no configurations")
    store = not options.dry_run
    try:
        shapes = [parse_shape(text) for text in options.shape]
        shapes += tuning.read_record(options.recorded) if options.recorded else []
        with tuning.locked() if store else nullcontext():  # to know before anything is measured
            pass
    except (ValueError, OSError) as error:
        parser.error(str(error))
    device = torch.device("cuda", torch.cuda.current_device())
    directions = (options.direction,) if options.direction else DIRECTIONS
    try:
        tune_shapes(
            shapes or [parse_shape(text) for text in DEFAULT_SHAPES], device, directions,
            candidates=options.candidates, store=store, table=options.table,
        )  # fmt: skip
    except NotStored as error:
        print(f"not all of it is stored: {error}", file=sys.stderr)
        return 1
    if store:
        print(f"written: {tuning.path()}")
    return 0

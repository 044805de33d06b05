"""What `train.py` does: train, compare, and say what came of it."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch._dynamo.utils import counters

import benefit
import settings
from corpus import Text, unigram_entropy
from model import ModelConfig
from pictures import draw_pictures
from settings import INTERRUPTED, Plan, SettingError
from trainer import Trainer, load_state

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

MEANING = {"dense": "every earlier key", "sdpa": "the same keys, through torch's attention"}  # of what is compared


class Facts(NamedTuple):
    """What a run measured: tokens per second after warm-up, seconds of it, share of empty tiles, graph breaks, recompiles."""

    speed: float
    warm_up: float
    skipped: float
    breaks: int
    recompiles: int


class StopRequest:
    """Ctrl-C, kept until the step that runs is over; where a trainer has nothing to save, it acts at once.

    A second one acts at once in any case.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.asked = trainer, False

    def __enter__(self) -> StopRequest:
        self.listens = threading.current_thread() is threading.main_thread()
        if self.listens:
            self.before = signal.signal(signal.SIGINT, self.ask)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.listens:
            signal.signal(signal.SIGINT, self.before)

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Note a request to stop."""
        if self.asked or self.trainer.step == self.trainer.saved:
            raise KeyboardInterrupt
        self.asked = True
        print("\nstopping after this step (Ctrl-C again: at once, without saving)", flush=True)


class Progress:
    """A progress bar: tqdm where it is installed, else a line at every validation."""

    def __init__(self, total: int, initial: int, label: str) -> None:
        # disable=None: no bar where the output is a file
        self.bar = tqdm(total=total, initial=initial, desc=label, unit="step", disable=None) if tqdm else None

    def update(self, facts: dict[str, str]) -> None:
        if self.bar is not None:
            self.bar.set_postfix(facts, refresh=False)
            self.bar.update()

    def note(self, line: str) -> None:
        print(line) if self.bar is None else self.bar.write(line)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def fit(
    trainer: Trainer,
    label: str,
    checkpoint: Path | None = None,
    until: int | None = None,
    stop: StopRequest | None = None,
) -> Facts:
    """Train to the plan's end, to step `until` or until asked to stop, validating and saving on the way."""
    plan, history, first = trainer.plan, trainer.history, trainer.step
    until = plan.steps if until is None else until
    print(f"{label}: compiling the model (a minute or so, less where it was compiled before)", flush=True)
    began, breaks_before = time.perf_counter(), graph_breaks()
    validation = trainer.validate()
    if first == 0:
        history.validation.append((0, validation))
    speed, seconds, warm_up, graphs, skipped = 0.0, 0.0, 0.0, 0, 0.0
    progress: Progress | None = None
    while trainer.step < until and not (stop and stop.asked):
        start = time.perf_counter()
        loss = trainer.train_step()
        if not math.isfinite(loss):
            raise SettingError(f"the loss is {loss} at step {trainer.step}: try a smaller --rate than {plan.rate}")
        if progress is None:  # a validation and a step have run: all that is needed is compiled
            graphs, warm_up = counters["stats"]["unique_graphs"], time.perf_counter() - began
            skipped = benefit.tiles_skipped(trainer.masks())
            print(f"{label}: compiled in {warm_up:.0f} s", flush=True)
            progress = Progress(until, first, label)
        else:
            seconds += time.perf_counter() - start
            speed = (trainer.step - first - 1) * plan.batch * trainer.model.config.seqlen / seconds
        if trainer.step % plan.validate_every == 0 or trainer.step == plan.steps:
            validation, skipped = trainer.validate(), benefit.tiles_skipped(trainer.masks())
            history.validation.append((trainer.step, validation))
            scores = f"loss {loss:.3f}, validation {validation:.3f}"
            progress.note(f"{label} step {trainer.step}: {scores}, {speed:,.0f} tokens/s, tiles skipped {skipped:.0%}")
            if checkpoint is not None:
                trainer.save(checkpoint)
        progress.update({"loss": f"{loss:.3f}", "tokens/s": f"{speed:,.0f}", "tiles skipped": f"{skipped:.0%}"})
    if progress is not None:
        progress.close()
    recompiles = counters["stats"]["unique_graphs"] - graphs if trainer.step > first else 0
    return Facts(speed, warm_up, skipped, graph_breaks() - breaks_before, recompiles)


def graph_breaks() -> int:
    """Return how often the compiler has divided a function of this process into several graphs."""
    return sum(counters["graph_break"].values())


@torch.no_grad()
def sample(trainer: Trainer, prompt: bytes, length: int) -> str:
    """Write `length` bytes after a prompt, at temperature 0.8."""
    generator = torch.Generator().manual_seed(trainer.plan.seed)
    written = list(prompt)
    for _ in range(length):
        context = torch.tensor([written[-trainer.model.config.seqlen :]], device=trainer.device)
        with trainer.autocast():
            logits = trainer.model(context)[0, -1]
        weights = torch.softmax(logits.float().cpu() / 0.8, dim=-1)
        written.append(int(torch.multinomial(weights, 1, generator=generator)))
    return bytes(written).decode(errors="replace")


def print_dense_speed(trainer: Trainer) -> None:
    """Time steps of a trained model in turns with those of the same model with dense causal attention; print both speeds."""
    plan, config = trainer.plan, trainer.model.config
    print(f"dense: compiling the model with dense causal attention, then {plan.dense_steps} steps of both in turns")
    dense = Trainer(config, plan, trainer.text, trainer.device, "dense")
    rounds = [[each.trial_seconds() for each in (trainer, dense)] for _ in range(1 + plan.dense_steps)][1:]
    masked, causal = (statistics.median(times) for times in zip(*rounds, strict=True))  # without the first: it compiles
    speeds = (f"{plan.batch * config.seqlen / seconds:,.0f}" for seconds in (masked, causal))
    print("dense causal    {} tokens/s with the masks, {} with".format(*speeds), end=" ")
    print(f"dense causal attention: {causal / masked:.2f} times as fast")


def report(trainer: Trainer, facts: Facts, entropy: float) -> None:
    """Print what happened, from the compiler's own counters and the graphs it was given."""
    validation = trainer.history.validation
    backward = ", ".join(f"{count} x {name}" for name, count in trainer.recorder.operators["backward"].items())
    print(f"loss            {validation[0][1]:.3f} -> {validation[-1][1]:.3f} nats per byte (validation)")
    print(f"unigram entropy {entropy:.3f} nats per byte of the validation text")
    print(
        f"speed           {facts.speed:,.0f} tokens/s, after {facts.warm_up:.0f} s for compilation and the first step"
    )
    config, dtype = trainer.model.config, torch.bfloat16 if trainer.device == "cuda" else torch.float32
    print(
        f"tiles skipped   {facts.skipped:.0%} of those that causal attention visits, 128 x 128 (query, key) pairs each"
    )
    scores = trainer.scores(trainer.plan.batch)
    print(f"packing         {benefit.how_keys_are_read(config, scores[0], dtype)}")
    masked, causal = benefit.measure(config, scores, dtype)
    print(
        f"attention       {1e3 * masked:.1f} ms a step with the masks, {1e3 * causal:.1f} ms without:"
        f" {causal / masked:.2f} times as fast"
    )
    print(f"compilation     {facts.breaks} graph breaks, {facts.recompiles} recompiles after warm-up")
    print(f"backward graph  {backward or 'not compiled in this run'}")


def compare(
    config: ModelConfig, plan: Plan, text: Text, device: str, ours: Trainer, facts: Facts, attention: str
) -> tuple[Trainer, str]:
    """Train the same model with another attention; print loss and speed of both. Returns its trainer, and what came of it."""
    torch._dynamo.reset()
    theirs = Trainer(config, plan, text, device, attention)
    other = fit(theirs, attention, until=ours.step)
    losses = [trainer.history.validation[-1][1] for trainer in (ours, theirs)]
    rows = {"dmattn": f"the best {config.keep} of up to {config.seqlen} keys", attention: MEANING[attention]}
    print(f"\n{'trained with':<14}{'loss':>8}{'tokens/s':>12}   a query sees")
    for (name, meaning), loss, speed in zip(rows.items(), losses, (facts.speed, other.speed), strict=True):
        print(f"{name:<14}{loss:>8.3f}{speed:>12,.0f}   {meaning}")
    faster, apart = facts.speed / max(other.speed, 1e-9), losses[0] - losses[1]
    side = "higher" if apart > 0 else "lower"
    said = f"dmattn trains {faster:.2f} times as fast as {attention}, to a loss {abs(apart):.3f} {side}"
    print(said)
    if attention == "sdpa":
        print_difference(ours, theirs)
    return theirs, said


def print_difference(ours: Trainer, theirs: Trainer) -> None:
    """Print how far the curves of two trainers part that compute the same."""
    train = max(abs(a - b) for a, b in zip(ours.history.train, theirs.history.train, strict=True))
    # A run that was resumed with more steps validated at its first end as well.
    ours_at, theirs_at = dict(ours.history.validation), dict(theirs.history.validation)
    validation = max(abs(ours_at[step] - loss) for step, loss in theirs_at.items() if step in ours_at)
    print(f"dmattn and sdpa differ by at most {train:.2e} in a step's loss, {validation:.2e} in a validation")


def how_to_resume(options: argparse.Namespace) -> str:
    """Return the command that goes on with a run; what it does not name, it takes from the checkpoint."""
    here = Path.cwd()

    def short(path: Path) -> str:
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    command = [short(Path(sys.executable)), short(Path(__file__).resolve().with_name("train.py")), "--resume"]
    standard = settings.parse([])
    standard.device = settings.default_device()
    for name in ("data", "out", "device", "compare"):  # the checkpoint knows the rest
        if getattr(options, name) != getattr(standard, name):
            command += [f"--{name}", str(getattr(options, name))]
    return shlex.join(command + ["--deterministic"] * options.deterministic)


def run(trainer: Trainer, checkpoint: Path, options: argparse.Namespace) -> Facts:
    """Train and save; where Ctrl-C ends it, say what is kept and how to go on, and end the program."""
    try:
        with StopRequest(trainer) as stop:
            facts = fit(trainer, "dmattn", checkpoint, options.stop_at, stop)
            trainer.save(checkpoint)
        if not stop.asked:
            return facts
    except KeyboardInterrupt:
        if trainer.saved == 0:
            print("\nstopped; nothing was saved")
            raise SystemExit(INTERRUPTED) from None
    print(f"\nstopped: {checkpoint} holds step {trainer.saved} of {trainer.plan.steps}")
    print(f"go on with: {how_to_resume(options)}")
    raise SystemExit(INTERRUPTED)


def run_all(options: argparse.Namespace) -> dict[str, Trainer]:
    """Train as the options say; return the trainers by the name of their attention."""
    options.device = options.device or settings.default_device()
    checkpoint = settings.checkpoint_path(options)
    stored = load_state(checkpoint, "cpu")["settings"] if options.resume else None
    config, plan = settings.chosen(options, stored)
    settings.refuse_what_cannot_work(config, plan, options)
    text = settings.read_text(options.data, config.seqlen)
    settings.make_folder(options.out)
    # Without this, Inductor adds up the gradient of the embedding with atomics, on the CPU too.
    torch.use_deterministic_algorithms(options.deterministic or options.device == "cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks of deterministic runs
    os.environ.setdefault("DMATTN_COMPILE_AHEAD", "1")  # kernels are compiled while the graph is
    entropy = unigram_entropy(text.validation)
    trainer = Trainer(config, plan, text, options.device, "dmattn")
    if options.resume:
        trainer.load(checkpoint)
        if trainer.step >= (options.stop_at or plan.steps) and not options.compare:
            raise SettingError(f"{checkpoint} is at step {trainer.step} already: give a larger --steps to go on")
        print(f"resumed from {checkpoint} at step {trainer.step} of {plan.steps}")
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {len(text.train) / 1e6:.1f} MB of text, on {options.device}")
    facts = run(trainer, checkpoint, options)
    print(f"\n{sample(trainer, b'def ', 300)}\n")
    trainers, said = {"dmattn": trainer}, ""
    report(trainer, facts, entropy)
    if plan.dense_steps and options.compare != "dense":
        print_dense_speed(trainer)
    if options.compare:
        trainers[options.compare], said = compare(config, plan, text, options.device, trainer, facts, options.compare)
    for path in draw_pictures(trainers, entropy, options.out, said):
        print(f"drawn: {path}")
    return trainers

"""Train a small language model with dynamic-mask attention under `torch.compile(fullgraph=True)`.

`python examples/train.py` learns the source of Python's standard library; `--data FILE` any other text, `--resume`
goes on where the last run stopped, `--compare sdpa` trains the same model again through torch's own attention.
`--preset long` trains on long sequences, 131072 bytes each on a GPU, and says how fast dense causal attention would be. What
a run writes goes to `--out`: a checkpoint and, where matplotlib is installed, the loss curve and a picture of the masks.
Ctrl-C stops after the step that runs, saves, and says how to go on.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
import shlex
import signal
import statistics
import sys
import threading
import time
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

import benefit
import settings
from corpus import Text, batch, unigram_entropy
from dmattn_ops import TileMask, dynamic_mask
from model import ByteModel, ModelConfig, attend_dense, attend_dmattn, attend_sdpa
from pictures import draw_pictures
from settings import Plan, SettingError

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

ATTENTIONS = {"dmattn": attend_dmattn, "sdpa": attend_sdpa, "dense": attend_dense}
INTERRUPTED = 128 + signal.SIGINT  # the exit status of a program that Ctrl-C ended


@dataclass
class History:
    """Loss of every step, and (step, loss) of every validation."""

    train: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)


class GraphRecorder:
    """A `torch.compile` backend: Inductor, noting the `dmattn` operators of each graph that it is given."""

    def __init__(self) -> None:
        self.operators: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        # A hit of this cache would skip `compile_graph`; the cache of generated code below it stays on.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(module, inputs, inner_compile=self.compile_graph)

    def compile_graph(self, module: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Any:
        found = self.operators["backward" if options.get("is_backward") else "forward"]
        for node in module.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "dmattn":
                found[str(node.target)] += 1
        return compile_fx_inner(module, inputs, **options)


def learning_rate(step: int, plan: Plan) -> float:
    """Return the rate of one step: a linear start, then a cosine down to a tenth."""
    if step < plan.warm_up:
        return plan.rate * (step + 1) / plan.warm_up
    progress = (step - plan.warm_up) / max(1, plan.steps - plan.warm_up)
    return plan.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


class Trainer:
    """A model, its optimizer and its history; every batch is drawn from the step's number alone."""

    def __init__(self, config: ModelConfig, plan: Plan, text: Text, device: str, attention: str) -> None:
        self.plan, self.text, self.device = plan, text, device
        torch.manual_seed(plan.seed)
        self.model = ByteModel(config, ATTENTIONS[attention]).to(device)
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.95), fused=True)
        self.step, self.saved, self.history = 0, 0, History()
        self.recorder = GraphRecorder()
        self.loss = torch.compile(self.model.loss, fullgraph=True, backend=self.recorder)

    def draw(self, data: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        inputs, targets = batch(data, self.plan.batch, self.model.config.seqlen, seed)
        return inputs.to(self.device), targets.to(self.device)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda")

    def train_step(self) -> float:
        """Take one step of AdamW and return the loss before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.plan)
        with self.autocast():
            loss = self.loss(*self.draw(self.text.train, (self.plan.seed << 32) + self.step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.history.train.append(loss.item())
        return self.history.train[-1]

    def trial_seconds(self) -> float:
        """Return how long forward and backward of a step take; nothing is learned."""
        began = time.perf_counter()
        with self.autocast():
            loss = self.loss(*self.draw(self.text.train, self.plan.seed))
        loss.backward()
        self.optimizer.zero_grad()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean loss over fixed windows of the held-out text."""
        count = self.plan.validation_batches
        with self.autocast():
            losses = [self.loss(*self.draw(self.text.validation, -1 - index)) for index in range(count)]
        return torch.stack(losses).mean().item()

    @torch.no_grad()
    def scores(self, count: int = 1) -> list[Tensor]:
        """Return what each layer's keys are worth, `[count, Hkv, S]`, in held-out windows."""
        scores: list[Tensor] = []
        with self.autocast():
            self.model(self.draw(self.text.validation, -1)[0][:count], scores)
        return scores

    def masks(self, count: int = 1) -> list[TileMask]:
        """Return each layer's mask `[count, Hkv, S, S]` for held-out windows, the causal condition included."""
        return [dynamic_mask(score, self.model.config.keep) for score in self.scores(count)]

    def save(self, path: Path) -> None:
        """Write everything that the next step depends on, all at once."""
        state = {
            "settings": self.settings(),
            "step": self.step,
            "history": asdict(self.history),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)
        self.saved = self.step

    def load(self, path: Path) -> None:
        """Go on from a checkpoint; the next steps give the same bits as without the interruption."""
        state = load_state(path, self.device)
        if state["settings"]["text"] != self.settings()["text"]:
            raise SettingError(f"{path} was written with another text: give the same --data")
        if state["step"] > self.plan.steps:
            raise SettingError(f"{path} is at step {state['step']} already, beyond --steps {self.plan.steps}")
        self.step, self.history = state["step"], History(**state["history"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.saved = self.step

    def settings(self) -> dict[str, Any]:
        """Return all that decides a run: sizes, plan and a checksum of the text."""
        checksum = zlib.crc32(torch.cat(self.text).numpy().tobytes())
        return {"model": asdict(self.model.config), "plan": asdict(self.plan), "text": checksum}


def load_state(path: Path, device: str) -> dict[str, Any]:
    """Read what `Trainer.save` wrote."""
    refusal = SettingError(f"{path} is not a checkpoint of this program")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise refusal from error
    if not (isinstance(state, dict) and {"settings", "step", "history", "model", "optimizer"} <= state.keys()):
        raise refusal
    return state


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
    print(f"{label}: compiling the model (about a minute on two cores, less where it was compiled before)", flush=True)
    began, breaks_before = time.perf_counter(), graph_breaks()
    validation, skipped = trainer.validate(), benefit.tiles_skipped(trainer.masks())
    if first == 0:
        history.validation.append((0, validation))
    speed, seconds, warm_up, graphs = 0.0, 0.0, 0.0, 0
    progress: Progress | None = None
    while trainer.step < until and not (stop and stop.asked):
        start = time.perf_counter()
        loss = trainer.train_step()
        if not math.isfinite(loss):
            raise SettingError(f"the loss is {loss} at step {trainer.step}: try a smaller --rate than {plan.rate}")
        if progress is None:  # a validation and a step have run: all that is needed is compiled
            graphs, warm_up = counters["stats"]["unique_graphs"], time.perf_counter() - began
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


def compare(config: ModelConfig, plan: Plan, text: Text, device: str, ours: Trainer) -> Trainer:
    """Train the same model through torch's attention with the same masks and bias; print how far the curves part."""
    torch._dynamo.reset()
    theirs = Trainer(config, plan, text, device, "sdpa")
    fit(theirs, "sdpa", until=ours.step)
    train = max(abs(a - b) for a, b in zip(ours.history.train, theirs.history.train, strict=True))
    # A run that was resumed with more steps validated at its first end as well.
    ours_at, theirs_at = dict(ours.history.validation), dict(theirs.history.validation)
    validation = max(abs(ours_at[step] - loss) for step, loss in theirs_at.items() if step in ours_at)
    print(f"dmattn and sdpa differ by at most {train:.2e} in a step's loss, {validation:.2e} in a validation")
    return theirs


def how_to_resume(options: argparse.Namespace) -> str:
    """Return the command that goes on with a run; what it does not name, it takes from the checkpoint."""
    here = Path.cwd()

    def short(path: Path) -> str:
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    command = [short(Path(sys.executable)), short(Path(__file__).resolve()), "--resume"]
    standard = settings.parse([])
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


def main(arguments: list[str]) -> dict[str, Trainer]:
    """Train as the command line says; return the trainers by the name of their attention."""
    options = settings.parse(arguments, __doc__)
    checkpoint = settings.checkpoint_path(options)
    stored = load_state(checkpoint, "cpu")["settings"] if options.resume else None
    config, plan = settings.chosen(options, stored)
    settings.refuse_what_cannot_work(config, plan, options)
    text = settings.read_text(options.data, config.seqlen)
    settings.make_folder(options.out)
    # Without this, Inductor adds up the gradient of the embedding with atomics, on the CPU too.
    torch.use_deterministic_algorithms(options.deterministic or options.device == "cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks of deterministic runs
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
    trainers = {"dmattn": trainer}
    report(trainer, facts, entropy)
    if plan.dense_steps:
        print_dense_speed(trainer)
    if options.compare:
        trainers["sdpa"] = compare(config, plan, text, options.device, trainer)
    for path in draw_pictures(trainers, entropy, options.out):
        print(f"drawn: {path}")
    return trainers


def command() -> None:
    """Run `main` on the command line's arguments; end with one line where a setting cannot work."""
    try:
        main(sys.argv[1:])
    except SettingError as error:
        print(f"train.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    command()

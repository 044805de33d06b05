"""Train a small language model with dynamic-mask attention under `torch.compile(fullgraph=True)`.

`python examples/train.py` learns the source of Python's standard library; `--data FILE` any other text, `--resume`
goes on where the last run stopped, `--compare sdpa` trains the same model again through torch's own attention. What it
writes goes to `--out`: a checkpoint and, where matplotlib is installed, the loss curve and a picture of the masks.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from corpus import Text, batch, from_file, standard_library, unigram_entropy
from model import ByteModel, ModelConfig, attend_dmattn, attend_sdpa

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

ATTENTIONS = {"dmattn": attend_dmattn, "sdpa": attend_sdpa}


@dataclass(frozen=True)
class Plan:
    """What a run does: with the model's sizes and the text, this decides every number that comes out."""

    steps: int = 400
    batch: int = 8
    rate: float = 2e-3
    warm_up: int = 30
    weight_decay: float = 0.1
    clip: float = 1.0
    validate_every: int = 50
    validation_batches: int = 8
    seed: int = 0


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
        self.step, self.history = 0, History()
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

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean loss over fixed windows of the held-out text."""
        count = self.plan.validation_batches
        with self.autocast():
            losses = [self.loss(*self.draw(self.text.validation, -1 - index)) for index in range(count)]
        return torch.stack(losses).mean().item()

    @torch.no_grad()
    def masks(self) -> list[Tensor]:
        """Return each layer's mask `[Hkv, S, S]` for one held-out window, the causal condition included."""
        masks: list[Tensor] = []
        with self.autocast():
            self.model(self.draw(self.text.validation, -1)[0][:1], masks)
        return [mask[0].tril() for mask in masks]

    def density(self) -> float:
        """Return which part of all causal (query, key) pairs the masks keep."""
        masks = self.masks()
        seqlen = masks[0].shape[-1]
        return sum(mask.sum().item() / len(mask) for mask in masks) / (len(masks) * seqlen * (seqlen + 1) / 2)

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

    def load(self, path: Path) -> None:
        """Go on from a checkpoint; the next steps give the same bits as without the interruption."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["settings"] != self.settings():
            raise ValueError(f"{path} was written with {state['settings']}, this run has {self.settings()}")
        self.step, self.history = state["step"], History(**state["history"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def settings(self) -> dict[str, Any]:
        """Return all that decides a run: sizes, plan and a checksum of the text."""
        checksum = zlib.crc32(torch.cat(self.text).numpy().tobytes())
        return {"model": asdict(self.model.config), "plan": asdict(self.plan), "text": checksum}


class Facts(NamedTuple):
    """What a run measured: tokens per second after warm-up, seconds of warm-up, density of the masks, recompiles."""

    speed: float
    warm_up: float
    density: float
    recompiles: int


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


def fit(trainer: Trainer, label: str, checkpoint: Path | None = None, until: int | None = None) -> Facts:
    """Train to the plan's end (or to step `until`), validating and saving on the way."""
    plan, history, first = trainer.plan, trainer.history, trainer.step
    until = plan.steps if until is None else until
    progress = Progress(until, first, label)
    began = time.perf_counter()
    validation, density = trainer.validate(), trainer.density()
    if first == 0:
        history.validation.append((0, validation))
    speed, seconds, warm_up, graphs = 0.0, 0.0, 0.0, 0
    while trainer.step < until:
        start = time.perf_counter()
        loss = trainer.train_step()
        if trainer.step == first + 1:  # a validation and a step have run: all that is needed is compiled
            graphs, warm_up = counters["stats"]["unique_graphs"], time.perf_counter() - began
        else:
            seconds += time.perf_counter() - start
            speed = (trainer.step - first - 1) * plan.batch * trainer.model.config.seqlen / seconds
        if trainer.step % plan.validate_every == 0 or trainer.step == plan.steps:
            validation, density = trainer.validate(), trainer.density()
            history.validation.append((trainer.step, validation))
            scores = f"loss {loss:.3f}, validation {validation:.3f}"
            progress.note(f"{label} step {trainer.step}: {scores}, {speed:,.0f} tokens/s, mask {density:.1%}")
            if checkpoint is not None:
                trainer.save(checkpoint)
        progress.update({"loss": f"{loss:.3f}", "tokens/s": f"{speed:,.0f}", "mask": f"{density:.1%}"})
    progress.close()
    recompiles = counters["stats"]["unique_graphs"] - graphs if trainer.step > first else 0
    return Facts(speed, warm_up, density, recompiles)


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


def draw_pictures(trainers: dict[str, Trainer], entropy: float, out: Path) -> list[Path]:
    """Draw the loss curves and the masks of one layer's heads; nothing where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, trainer in trainers.items():
        axes.plot(
            range(1, trainer.step + 1), trainer.history.train, alpha=0.4, linewidth=0.8, label=f"{name}, training"
        )
        axes.plot(*zip(*trainer.history.validation, strict=True), marker="o", markersize=3, label=f"{name}, validation")
    axes.axhline(entropy, color="grey", linestyle=":", label="entropy of single bytes")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend()
    figure.savefig(out / "loss.png", dpi=150)

    trainer = next(iter(trainers.values()))
    heads = trainer.masks()[len(trainer.model.blocks) // 2]
    figure, panels = plt.subplots(1, len(heads), figsize=(4 * len(heads), 4.3), layout="constrained", squeeze=False)
    for index, (panel, mask) in enumerate(zip(panels[0], heads, strict=True)):
        panel.imshow(mask.cpu().numpy(), cmap="binary", interpolation="nearest")
        panel.set(title=f"key head {index}", xlabel="key", ylabel="query")
    figure.suptitle(f"Keys that each query sees, layer {len(trainer.model.blocks) // 2}")
    figure.savefig(out / "mask.png", dpi=150)
    return [out / "loss.png", out / "mask.png"]


def report(trainer: Trainer, facts: Facts, entropy: float) -> None:
    """Print what happened, from the compiler's own counters and the graphs it was given."""
    validation = trainer.history.validation
    breaks = sum(counters["graph_break"].values())
    backward = ", ".join(f"{count} x {name}" for name, count in trainer.recorder.operators["backward"].items())
    print(f"loss            {validation[0][1]:.3f} -> {validation[-1][1]:.3f} nats per byte (validation)")
    print(f"unigram entropy {entropy:.3f} nats per byte of the validation text")
    print(
        f"speed           {facts.speed:,.0f} tokens/s, after {facts.warm_up:.0f} s for compilation and the first step"
    )
    print(f"mask            {facts.density:.1%} of the causal pairs visible")
    print(f"compilation     {breaks} graph breaks, {facts.recompiles} recompiles after warm-up")
    print(f"backward graph  {backward or 'not compiled in this run'}")


def compare(config: ModelConfig, plan: Plan, text: Text, device: str, ours: Trainer) -> Trainer:
    """Train the same model with torch's attention under the same masks and bias; print how far the loss curves differ."""
    torch._dynamo.reset()
    theirs = Trainer(config, plan, text, device, "sdpa")
    fit(theirs, "sdpa", until=ours.step)
    train = max(abs(a - b) for a, b in zip(ours.history.train, theirs.history.train, strict=True))
    pairs = zip(ours.history.validation, theirs.history.validation, strict=True)
    validation = max(abs(a[1] - b[1]) for a, b in pairs)
    print(f"dmattn and sdpa differ by at most {train:.2e} in a step's loss, {validation:.2e} in a validation")
    return theirs


def defaults(device: str) -> tuple[ModelConfig, Plan]:
    """Return sizes for a run of about two minutes on two CPU cores, or larger ones that keep a GPU busy."""
    if device == "cuda":
        return ModelConfig(8, 768, 12, 4, keep=512, seqlen=2048), Plan(600, 8, 1e-3, warm_up=60, validate_every=100)
    return ModelConfig(), Plan()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file to learn instead of the standard library's source")
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="folder for checkpoint and pictures")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--compare", choices=["sdpa"], help="train again through torch's attention and compare")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--deterministic", action="store_true", help="repeatable bit for bit, as on a CPU always")
    parser.add_argument("--stop-at", type=int, help="stop at this step, as an interruption would")
    for name in (
        "layers",
        "dim",
        "heads",
        "kv_heads",
        "keep",
        "seqlen",
        "steps",
        "batch",
        "warm_up",
        "validate_every",
        "seed",
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--rate", type=float, help="highest learning rate")
    return parser.parse_args(arguments)


def override(values: ModelConfig | Plan, options: argparse.Namespace) -> dict:
    """Return the fields of `values`, replaced by what the command line gives."""
    given = {name: getattr(options, name, None) for name in asdict(values)}
    return {name: value if given[name] is None else given[name] for name, value in asdict(values).items()}


def main(arguments: list[str]) -> dict[str, Trainer]:
    """Train as the command line says; return the trainers by the name of their attention."""
    options = parse(arguments)
    # Without this, Inductor adds up the gradient of the embedding with atomics, on the CPU too.
    torch.use_deterministic_algorithms(options.deterministic or options.device == "cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks of deterministic runs
    config, plan = defaults(options.device)
    config, plan = ModelConfig(**override(config, options)), Plan(**override(plan, options))
    text = from_file(options.data) if options.data else standard_library()
    entropy = unigram_entropy(text.validation)
    trainer = Trainer(config, plan, text, options.device, "dmattn")
    checkpoint = options.out / "checkpoint.pt"
    if options.resume:
        trainer.load(checkpoint)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {len(text.train) / 1e6:.1f} MB of text, on {options.device}")
    facts = fit(trainer, "dmattn", checkpoint, options.stop_at)
    trainer.save(checkpoint)
    print(f"\n{sample(trainer, b'def ', 300)}\n")
    trainers = {"dmattn": trainer}
    report(trainer, facts, entropy)
    if options.compare:
        trainers["sdpa"] = compare(config, plan, text, options.device, trainer)
    for path in draw_pictures(trainers, entropy, options.out):
        print(f"drawn: {path}")
    return trainers


if __name__ == "__main__":
    main(sys.argv[1:])

"""What `train.py` trains: a model, its optimizer and its history, saved and loaded so that a run goes on bit for bit."""

from __future__ import annotations

import math
import os
import time
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from corpus import Text, batch
from dmattn_ops import TileMask, dynamic_mask
from model import ByteModel, ModelConfig, attend_dense, attend_dmattn, attend_sdpa
from settings import Plan, SettingError

VERSION = 2  # of checkpoints; 1 had no checksum
ATTENTIONS = {"dmattn": attend_dmattn, "sdpa": attend_sdpa, "dense": attend_dense}


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

    def validate(self) -> float:
        """Return the mean loss over fixed windows of the held-out text.

        Gradients stay enabled, though none is asked for: without them torch would compile a second graph, a quarter of all the
        compiling before the first step.
        """
        count = self.plan.validation_batches
        with self.autocast():
            losses = [self.loss(*self.draw(self.text.validation, -1 - index)).detach() for index in range(count)]
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
            "version": VERSION,
        }
        state["checksum"] = checksum(state)
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
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            for parameter, moments in self.optimizer.state.items():
                for name in ("exp_avg", "exp_avg_sq"):
                    if moments[name].shape != parameter.shape:
                        raise ValueError(
                            f"{name} of a parameter {tuple(parameter.shape)} is {tuple(moments[name].shape)}"
                        )
        except (RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
            raise SettingError(f"{path} is damaged: {' '.join(str(error).split())}") from error
        self.saved = self.step

    def settings(self) -> dict[str, Any]:
        """Return all that decides a run: sizes, plan and a checksum of the text."""
        checksum = zlib.crc32(torch.cat(self.text).numpy().tobytes())
        return {"model": asdict(self.model.config), "plan": asdict(self.plan), "text": checksum}


def load_state(path: Path, device: str) -> dict[str, Any]:
    """Read what `Trainer.save` wrote; refuse what is something else, or was damaged since."""
    refusal = SettingError(f"{path} is not a checkpoint of this program")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # a damaged file can raise anything
        raise refusal from error
    if not (isinstance(state, dict) and {"settings", "step", "history", "model", "optimizer"} <= state.keys()):
        raise refusal
    version = state.get("version", 1)
    if type(version) is not int or version > VERSION:
        raise SettingError(f"{path} has version {version!r}, and this program reads up to {VERSION}")
    if version > 1 and state.pop("checksum", None) != checksum(state):
        raise SettingError(f"{path} is damaged: its content does not fit its checksum")
    if what := _damage(state):
        raise SettingError(f"{path} is damaged: {what}")
    return state


def checksum(part: Any, before: int = 0) -> int:
    """Return a checksum of tensors and numbers in dictionaries and lists."""
    if isinstance(part, dict):
        part = [each for item in part.items() for each in item]
    if isinstance(part, list | tuple):
        for each in part:
            before = checksum(each, before)
        return before
    if not isinstance(part, Tensor):
        return zlib.crc32(repr(part).encode(), before)
    before = zlib.crc32(f"{part.dtype} {tuple(part.shape)}".encode(), before)
    return zlib.crc32(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, before)


def _damage(state: dict[str, Any]) -> str:
    """Return what a checkpoint lacks; empty where it lacks nothing."""
    stored, step, history = state["settings"], state["step"], state["history"]
    if not (isinstance(stored, dict) and {"model", "plan", "text"} <= stored.keys()):
        return "it must hold settings of the model, the plan and the text"
    for name, known in (("model", asdict(ModelConfig())), ("plan", asdict(Plan()))):
        given = stored[name]
        if (
            not isinstance(given, dict)
            or not given.keys() <= known.keys()
            or (name == "model" and given.keys() != known.keys())
        ):
            return f"its settings of the {name} must be {', '.join(known)}"
        wrong = [key for key, value in given.items() if type(value) not in (int, type(known[key]))]
        if wrong:
            return f"{wrong[0]} must be a number, got {given[wrong[0]]!r}"
    if type(step) is not int or step < 0:
        return f"its step must be a number from 0 on, got {step!r}"
    if not (isinstance(history, dict) and history.keys() == {"train", "validation"} and len(history["train"]) == step):
        return f"its history must hold the losses of {step} steps"
    return ""

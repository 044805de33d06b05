"""A training step of a Llama of transformers: these kernels beside SDPA and flex_attention.

B2 S4096, 8 layers, hidden 2048, H16 with 4 key heads, D128, bfloat16, compiled: forward, backward and a step of AdamW. `causal`
has whole sequences, `padded` sequences of several lengths padded on the left, and `packed` has documents one behind the other in
one sequence. Models are compiled with fullgraph=True but for flex_attention (see `BREAKS`); `graphs` of a row says how many
graphs a forward is. Needs transformers: `pip install dmattn-ops[hf]`.

**A process for each implementation.** torch.compile keeps what it compiled with the code object of a function, for all models of
the process, and tries the newest first. The part of LlamaForCausalLM.forward that is compiled up to the first graph break of
flex_attention reads nothing of the attention, so that its guards hold for every model of that class: in one process the other
models run it too, and with fullgraph=True Dynamo compiles nothing that compiled code calls, so that the rest of them runs eagerly.

**What is measured** is how many steps a second a model trains: a sample is the mean over at least `STEPS` steps in a row that
take about `SAMPLE_SECONDS`, after `IDLE_SECONDS` of rest. A single step after a rest would measure how long the first launches
take. The processes have equal weights. They compile at the same time, so that what a compiler times is disturbed by the others,
and then take turns, one sample each in every round, while the others wait. After the last round one more step is profiled: an
implementation that calls an operator which no compiled graph calls (`EAGER`) gets no time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import dmattn_ops
from experiments import Row, Session, missing, parser
from timing import IDLE_SECONDS, Gauge, elapsed_ms

IMPLEMENTATIONS = {"dmattn": "dmattn", "sdpa": "sdpa", "flex": "flex_attention"}  # our names, and those of transformers
# Transformers asks whether anything is padding, and has torch warn that it compiles what makes a BlockMask by itself. Dynamo can
# trace neither of them (torch 2.11 and 2.13), so that the model's graph has breaks there, as it has for users.
BREAKS = ("flex_attention",)
PARTS = ("causal", "padded", "packed")
PADDING = (0, 1 / 4)  # the share of each sequence that is padding, in turns
DOCUMENTS = (0.25, 0.2, 0.15, 0.1, 0.1, 0.08, 0.06, 0.04, 0.02)  # the share of each; one more takes the rest
TOLERANCE = 2e-2  # relative, of losses in bfloat16
IGNORED = -100  # a label without a loss
STEPS = 3  # in a row, at least
SAMPLE_SECONDS = 0.2  # what a sample takes, about, where more steps fit
# Operators that the model's own code calls, and that compiled graphs never do: they call what these are made of.
EAGER = ("aten::linear", "aten::scaled_dot_product_attention")
OPTIMIZER = "aten::_fused_adamw_"  # called by every step, compiled or not


class Sizes(NamedTuple):
    """What the model and its batch measure."""

    batch: int = 2
    seqlen: int = 4096
    layers: int = 8
    hidden: int = 2048
    wide: int = 5632
    heads: int = 16
    key_heads: int = 4
    vocabulary: int = 32000

    @property
    def case(self) -> str:
        """The name of the problem."""
        dim = self.hidden // self.heads
        return f"B{self.batch} S{self.seqlen} {self.layers} layers H{self.heads}/{self.key_heads} D{dim}"


TINY = Sizes(2, 96, 2, 32, 48, 4, 2, 64)


def llama(sizes: Sizes, device: str) -> nn.Module:
    """Return a model with random weights: bfloat16 on a GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.wide,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_heads,
        max_position_embeddings=2 * sizes.seqlen,
        use_cache=False,
    )
    with torch.device(device):  # a CPU takes half a minute to draw the weights
        model = LlamaForCausalLM(config)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32)


def batch_of(part: str, sizes: Sizes, device: str) -> dict[str, Tensor]:
    """Return what the model is called with."""
    ids = torch.randint(sizes.vocabulary, (sizes.batch, sizes.seqlen), device=device)
    if part == "causal":
        return {"input_ids": ids, "labels": ids}
    if part == "padded":
        shares = [PADDING[row % len(PADDING)] for row in range(sizes.batch)]
        begins = torch.tensor([int(share * sizes.seqlen) for share in shares], device=device)
        keep = torch.arange(sizes.seqlen, device=device) >= begins[:, None]
        return {"input_ids": ids, "attention_mask": keep.long(), "labels": ids.where(keep, IGNORED)}
    ids, total = ids.view(1, -1), ids.numel()
    lengths = [int(share * total) for share in DOCUMENTS]
    lengths.append(total - sum(lengths))
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.where(positions > 0, IGNORED)}


def compiled(model: nn.Module, device: str) -> Callable[..., Any]:
    """Compile a model, in one graph where that is possible with its attention."""
    whole = model.config._attn_implementation not in BREAKS  # type: ignore[operator, union-attr]
    backend = "inductor" if device == "cuda" else "aot_eager"
    return torch.compile(model, fullgraph=whole, dynamic=False, backend=backend)


def step_of(model: nn.Module, batch: dict[str, Tensor], device: str) -> Callable[[], Tensor]:
    """Return a function that trains one step of a compiled model and returns the loss before it."""
    run = compiled(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> Tensor:
        loss = run(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def eager_calls(step: Callable[[], object]) -> int:
    """Run a step, and return how many of its operators show that the model's own code ran instead of compiled graphs."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    calls = Counter(event.name for event in found.events() or ())
    if not calls[OPTIMIZER]:
        raise RuntimeError(f"the profiler did not record {OPTIMIZER}, so that it is not known what ran")
    return sum(calls[name] for name in EAGER)


class Training:
    """The model with one implementation and its batch, in a process where no other model is compiled."""

    def __init__(self, implementation: str, part: str, sizes: Sizes, device: str) -> None:
        self.device = device
        torch.manual_seed(0)
        model, batch = llama(sizes, device), batch_of(part, sizes, device)
        model.set_attn_implementation(IMPLEMENTATIONS[implementation])  # type: ignore[operator]
        self.step = step_of(model, batch, device)

    def first(self) -> Row:
        """Compile; return the loss of the first step and the number of graphs."""
        before = counters["stats"]["unique_graphs"]
        return {"loss": self.step().item(), "graphs": counters["stats"]["unique_graphs"] - before}

    def sample(self, steps: int) -> Row:
        """Return the milliseconds of a step, the mean over so many in a row, and clock and power of the GPU meanwhile."""
        gauge = Gauge()
        milliseconds = elapsed_ms(self.step, steps, self.device, gauge)
        return {"ms": milliseconds, "sm_mhz": gauge.megahertz, "power_w": gauge.watts}

    def check(self) -> Row:
        """Run one more step; return how many operators it calls that show that it is not compiled."""
        return {"eager_calls": eager_calls(self.step)}


def serve(implementation: str, part: str, device: str, tiny: bool) -> None:
    """Train as the lines of standard input say, each the name of a method of `Training` with its arguments, in JSON.

    Each is answered by a line of JSON on standard output: what the method returns, or the reason why it failed under `error`.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to standard error
    training: Training | None = None
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            if training is None:
                from dmattn_ops.integrations.transformers import register

                register()
                training = Training(implementation, part, TINY if tiny else Sizes(), device)
            answer = getattr(training, name)(*arguments)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": str(error) or type(error).__name__}
        print(json.dumps(answer), file=answers, flush=True)


def command(implementation: str, part: str, options: argparse.Namespace) -> list[str]:
    """Return the command of the process that trains with one implementation (`serve`)."""
    words = [sys.executable, __file__, "--serve", implementation, part, options.device]
    return [*words, "tiny"] if options.tiny else words


class Worker:
    """A process that trains with one implementation, and rests until it is asked."""

    def __init__(self, words: list[str]) -> None:
        root = str(Path(dmattn_ops.__file__).parent.parent)  # the same package there as here
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": paths}
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, name: str, *arguments: Any) -> Row:
        """Put a question, and return the answer; see `answer`."""
        self.put(name, *arguments)
        return self.answer()

    def put(self, name: str, *arguments: Any) -> None:
        """Put a question, and do not wait. Of a process that has ended, `answer` tells."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([name, *arguments]), file=self.process.stdin, flush=True)

    def answer(self) -> Row:
        """Return what the process answers. Raise RuntimeError where it fails or ends; `OutOfTime` may end the waiting."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"its process ended with exit status {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def stop(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        with contextlib.suppress(BrokenPipeError), self.process:  # closes the pipes and waits
            pass


class Race:
    """Processes of several implementations that take turns; one that fails leaves, with the reason in its row of `absent`."""

    def __init__(self, part: str, session: Session) -> None:
        self.options, self.gauge = session.options, session.gauge
        self.absent: list[Row] = []
        self.workers: dict[str, Worker] = {}
        for name in IMPLEMENTATIONS:
            if self.options.device == "cpu" and name == "flex":
                self.absent.append(missing(name, "flex_attention has no backward on a CPU"))
            else:
                self.workers[name] = Worker(command(name, part, self.options))

    def each(self, question: Callable[[str], Row]) -> dict[str, Row]:
        """Return the answers of all that are left, by name, asked one after the other. That dmattn fails is an error."""
        answers: dict[str, Row] = {}
        for name in list(self.workers):
            try:
                answers[name] = question(name)
            except Exception as error:
                if name == "dmattn":
                    raise
                self.leave(name, error)
        return answers

    def leave(self, name: str, reason: object) -> None:
        """Measure this implementation no longer."""
        self.workers.pop(name).stop()
        self.absent.append(missing(name, reason))

    def stop(self) -> None:
        """End all processes."""
        for worker in self.workers.values():
            worker.stop()

    def start(self) -> dict[str, Row]:
        """Have all compile their models at once; return the facts of those whose first loss is that of dmattn."""
        for worker in self.workers.values():
            worker.put("first")
        facts = self.each(lambda name: self.workers[name].answer())
        expected = facts["dmattn"]["loss"]
        if not math.isfinite(expected):
            raise RuntimeError(f"the loss with dmattn is {expected}")
        for name in list(self.workers):
            loss = facts[name]["loss"]
            if not abs(loss - expected) <= TOLERANCE * abs(expected):  # NaN is another loss, too
                self.leave(name, f"the loss is {loss:.4f}, and {expected:.4f} with dmattn")
        return facts

    def sample(self, name: str, steps: int) -> Row:
        """Return a sample of one implementation, taken after a rest."""
        time.sleep(IDLE_SECONDS)
        found = self.workers[name].ask("sample", steps)
        self.gauge.megahertz += found["sm_mhz"]
        self.gauge.watts += found["power_w"]
        return found

    def run(self) -> dict[str, list[float]]:
        """Return the milliseconds of a step in each round, of all that ran compiled to the end."""
        self.each(lambda name: self.sample(name, STEPS))  # what the second step compiles, and caches
        short = self.each(lambda name: self.sample(name, STEPS))
        steps = {name: max(STEPS, math.ceil(SAMPLE_SECONDS * 1000 / found["ms"])) for name, found in short.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(self.options.rounds):
            for name, found in self.each(lambda name: self.sample(name, steps[name])).items():
                times[name].append(found["ms"])
        self.each(self.prove)
        return {name: times[name] for name in self.workers}

    def prove(self, name: str) -> Row:
        """Have one implementation show that its steps run compiled; raise RuntimeError where they do not."""
        found = self.workers[name].ask("check")
        if found["eager_calls"]:
            raise RuntimeError(f"it ran eagerly: a step called {found['eager_calls']} operators that no graph calls")
        return found


def experiment(part: str, session: Session) -> list[Row]:
    """Time the steps of all implementations in turns. One that fails, or whose first loss is another, gets no time."""
    race = Race(part, session)
    try:
        facts, times = race.start(), race.run()
    finally:
        race.stop()
    ours = statistics.median(times["dmattn"])
    rows: list[Row] = []
    for name, values in times.items():
        median = statistics.median(values)
        rows.append(
            {
                "implementation": name,
                "step_ms": round(median, 3),
                "step_range_ms": [round(min(values), 3), round(max(values), 3)],
                "times_dmattn": round(median / ours, 3),
                "loss": round(facts[name]["loss"], 4),
                "graphs": facts[name]["graphs"],
                "eager_calls": 0,
            }
        )
    return rows + race.absent


def main(arguments: list[str]) -> list[Row]:
    """Measure the parts that are asked for; return all rows of the result file."""
    chosen = parser(__doc__, PARTS).parse_args(arguments)
    if chosen.device == "cpu" and not chosen.tiny:
        raise SystemExit("bench_transformers.py needs a GPU; on a CPU it takes --tiny")
    try:
        from dmattn_ops.integrations.transformers import register

        register()  # each process does so again
    except ImportError as error:
        raise SystemExit(f"bench_transformers.py needs transformers (pip install dmattn-ops[hf]): {error}") from error
    sizes = TINY if chosen.tiny else Sizes()
    session = Session(chosen, "transformers")
    for part in PARTS:
        session.run(part, sizes.case, functools.partial(experiment, part, session))
    return session.finish(model=sizes._asdict())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:] == ["tiny"])
    else:
        main(sys.argv[1:])

"""A training step of a Llama of transformers: these kernels beside SDPA and flex_attention.

B2 S4096, 8 layers, hidden 2048, H16 with 4 key heads, D128, bfloat16, compiled: forward, backward and a step of AdamW. Each
implementation has a model of its own with the same weights, and they take turns in one process. `causal` has whole sequences,
`padded` sequences of several lengths padded on the left, and `packed` has documents one behind the other in one sequence.
Models are compiled with fullgraph=True but for flex_attention (see `BREAKS`); `graphs` of a row says how many graphs a forward is.
Needs transformers: `pip install dmattn-ops[hf]`.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from experiments import Row, Session, missing, parser
from timing import elapsed_ms, interleaved

IMPLEMENTATIONS = {"dmattn": "dmattn", "sdpa": "sdpa", "flex": "flex_attention"}  # our names, and those of transformers
# Transformers asks whether anything is padding, and has torch warn that it compiles what makes a BlockMask by itself. Dynamo can
# trace neither of them (torch 2.11 and 2.13), so that the model's graph has breaks there, as it has for users.
BREAKS = ("flex_attention",)
PARTS = ("causal", "padded", "packed")
PADDING = (0, 1 / 4)  # the share of each sequence that is padding, in turns
DOCUMENTS = (0.25, 0.2, 0.15, 0.1, 0.1, 0.08, 0.06, 0.04, 0.02)  # the share of each; one more takes the rest
TOLERANCE = 2e-2  # relative, of losses in bfloat16
IGNORED = -100  # a label without a loss


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


def experiment(part: str, sizes: Sizes, session: Session) -> list[Row]:
    """Time the steps of all implementations in turns. One that fails, or whose first loss is another, gets no time."""
    device = session.options.device
    torch.compiler.reset()  # models share their code, and a function is compiled for eight of them at most
    torch.manual_seed(0)
    model, batch = llama(sizes, device), batch_of(part, sizes, device)
    steps: dict[str, Callable[[], object]] = {}
    losses: dict[str, float] = {}
    graphs: dict[str, int] = {}
    absent: list[Row] = []
    for name, attention in IMPLEMENTATIONS.items():
        if device == "cpu" and name == "flex":
            absent.append(missing(name, "flex_attention has no backward on a CPU"))
            continue
        own = copy.deepcopy(model)
        own.set_attn_implementation(attention)  # type: ignore[operator]
        step, before = step_of(own, batch, device), counters["stats"]["unique_graphs"]
        try:
            loss = step().item()
        except Exception as error:
            if name == "dmattn":
                raise
            absent.append(missing(name, error))
            torch.compiler.reset()  # what failed half-way may keep code that others share from being compiled
            continue
        expected = losses.setdefault("dmattn", loss)
        if abs(loss - expected) > TOLERANCE * abs(expected):
            absent.append(missing(name, f"the loss is {loss:.4f}, and {expected:.4f} with dmattn"))
            continue
        steps[name], losses[name] = step, loss
        graphs[name] = counters["stats"]["unique_graphs"] - before
    samples = interleaved(steps, device, rounds=session.options.rounds, gauge=session.gauge, timer=elapsed_ms)
    rows: list[Row] = []
    for name, sample in samples.items():
        rows.append(
            {
                "implementation": name,
                "step_ms": round(sample.median, 3),
                "step_range_ms": [round(sample.low, 3), round(sample.high, 3)],
                "times_dmattn": round(sample.median / samples["dmattn"].median, 3),
                "loss": round(losses[name], 4),
                "graphs": graphs[name],
            }
        )
    return rows + absent


def main(arguments: list[str]) -> list[Row]:
    """Measure the parts that are asked for; return all rows of the result file."""
    chosen = parser(__doc__, PARTS).parse_args(arguments)
    if chosen.device == "cpu" and not chosen.tiny:
        raise SystemExit("bench_transformers.py needs a GPU; on a CPU it takes --tiny")
    try:
        from dmattn_ops.integrations.transformers import register

        register()
    except ImportError as error:
        raise SystemExit(f"bench_transformers.py needs transformers (pip install dmattn-ops[hf]): {error}") from error
    sizes = TINY if chosen.tiny else Sizes()
    session = Session(chosen, "transformers")
    for part in PARTS:
        session.run(part, sizes.case, functools.partial(experiment, part, sizes, session))
    return session.finish(model=sizes._asdict())


if __name__ == "__main__":
    main(sys.argv[1:])

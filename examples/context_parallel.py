"""Train a layer on a sequence that several processes share, and compare with one process.

    torchrun --nproc-per-node 2 examples/context_parallel.py

runs on GPUs with NCCL where there is one for each process, and otherwise on the CPU with gloo; `python
examples/context_parallel.py` alone is one process. Documents are packed into one sequence. Each process holds its part of
the tokens, attention alone looks across, and gradients of weights are added up at the end of a step, as DDP or FSDP do.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dmattn_ops import dynamic_mask, flash_dmattn_func, prepare_mask
from dmattn_ops.distributed import (
    context_parallel_attention,
    dynamic_context_attention,
    prepare_context_mask,
    sequence_positions,
    shard_sequence,
)

SEQLEN, HEADS, KV_HEADS, DIM, KEEP, STEPS = 1024, 8, 2, 32, 64, 3
VOCABULARY = 64


class Model(nn.Module):
    """One layer of attention under documents, one under a dynamic mask, and a guess at the next token."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * DIM
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(SEQLEN, width)
        self.into = nn.ModuleList(nn.Linear(width, (HEADS + 2 * KV_HEADS) * DIM) for _ in range(2))
        self.back = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.scores, self.guess = nn.Linear(width, KV_HEADS), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return logits of the next tokens."""
        hidden = self.tokens(tokens) + self.places(positions)
        for layer, (into, back) in enumerate(zip(self.into, self.back, strict=True)):
            query, key, value = into(hidden).unflatten(-1, (-1, DIM)).split((HEADS, KV_HEADS, KV_HEADS), 2)
            scores = self.scores(hidden).transpose(1, 2) if layer else None
            hidden = hidden + back(attend(query, key, value, scores).flatten(2))
        return self.guess(hidden)


class Attend:
    """Attention of the whole sequence on one process."""

    layout = "contiguous"

    def __init__(self, documents: Tensor) -> None:
        self.documents = prepare_mask(documents=documents, is_causal=True)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None) -> Tensor:
        """Attend under documents, or where there are scores to the best keys before each query."""
        if scores is None:
            return flash_dmattn_func(query, key, value, self.documents)
        return flash_dmattn_func(query, key, value, dynamic_mask(scores, KEEP), scores.unsqueeze(2))


class AttendAcross(Attend):
    """The same, where every process holds a part of the sequence."""

    def __init__(self, documents: Tensor) -> None:
        part = shard_sequence(documents, None, layout=self.layout)
        self.mask = prepare_context_mask(documents=part, group=None, layout=self.layout, is_causal=True)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None) -> Tensor:
        """Attend across processes."""
        if scores is None:
            out = context_parallel_attention(query, key, value, self.mask, group=None, layout=self.layout)
        else:
            out = dynamic_context_attention(query, key, value, scores, KEEP, scores.unsqueeze(2), group=None)
        assert isinstance(out, Tensor)
        return out


def train(
    tokens: Tensor, positions: Tensor, targets: Tensor, attend: Attend, shared: bool
) -> tuple[Model, list[float]]:
    """Take a few steps; return the model and the losses. `shared`: the tensors are a part, other processes hold the rest."""
    torch.manual_seed(0)
    model = Model().to(tokens.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(STEPS):
        logits = model(tokens, positions, attend)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / SEQLEN
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        if shared:
            dist.all_reduce(total)
            for weight in model.parameters():
                dist.all_reduce(weight.grad)
        optimizer.step()
        losses.append(float(total))
    return model, losses


def start() -> torch.device:
    """Join the other processes; return the device of this one."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def main() -> None:
    """Train both ways, and say how far apart they are."""
    device = start()
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (1, SEQLEN), device=device)
    targets = tokens.roll(-1, 1)
    documents = torch.bucketize(
        torch.arange(SEQLEN, device=device), torch.tensor([300, 400, 900], device=device), right=True
    )
    whole = (tokens, torch.arange(SEQLEN, device=device), targets)
    expected, expected_losses = train(*whole, Attend(documents[None]), shared=False)
    layout = Attend.layout
    part = (
        shard_sequence(tokens, None, layout=layout),
        sequence_positions(SEQLEN, None, layout=layout, device=device),
        shard_sequence(targets, None, layout=layout),
    )
    model, losses = train(*part, AttendAcross(documents[None]), shared=True)
    apart = max(
        float((one - other).detach().abs().max())
        for one, other in zip(model.parameters(), expected.parameters(), strict=True)
    )
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes on {device.type}, {SEQLEN // dist.get_world_size()} positions each")
        print("losses on one process: ", " ".join(f"{loss:.5f}" for loss in expected_losses))
        print("losses on all of them: ", " ".join(f"{loss:.5f}" for loss in losses))
        print(f"weights after {STEPS} steps differ by at most {apart:.1e}")
    leave("" if apart < 1e-3 else "the weights differ")


def leave(complaint: str) -> None:
    """End the process at once: with gloo, one that ends in the usual way sometimes aborts (seen with torch 2.13)."""
    print(complaint, end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(1 if complaint else 0)


if __name__ == "__main__":
    main()

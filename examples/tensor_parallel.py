"""Train a small language model with dynamic-mask attention on several GPUs: tensor parallel, FSDP2, or both.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py                     # heads over 2 ranks
    torchrun --nproc-per-node 4 examples/tensor_parallel.py --tensor 2          # heads over 2 ranks, FSDP2 over 2
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --tensor 1          # FSDP2 alone
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --dtensor --compile --checkpoint

Ranks have a GPU each where there are as many; otherwise they run on the CPU. The model learns one batch by heart, so that
its loss must fall; it prints the loss, which does not depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dmattn_ops import dynamic_mask, flash_dmattn_func

VOCABULARY = 64
# What selective checkpointing keeps: out and lse of attention, and the mask, O(S) each. All else is computed again.
SAVED = [torch.ops.dmattn.forward.default, torch.ops.dmattn.key_lifetimes.default]


class Attention(nn.Module):
    """Self-attention to the keys with the best scores. `-1` heads: a rank has its own ones of local tensors."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, keep: int) -> None:
        super().__init__()
        self.head_dim, self.keep = head_dim, keep
        self.query = nn.Linear(dim, heads * head_dim, bias=False)
        self.key = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.value = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.score = nn.Linear(dim, kv_heads, bias=False)  # what each key is worth, for each key head
        self.out = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            linear(hidden).unflatten(-1, (-1, self.head_dim)) for linear in (self.query, self.key, self.value)
        )
        scores = self.score(hidden).transpose(1, 2)  # [B, Hkv, S]
        mask = dynamic_mask(scores, self.keep, keep_last=4)
        return self.out(flash_dmattn_func(query, key, value, mask, scores.unsqueeze(2)).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, keep: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(dim), Attention(dim, heads, kv_heads, head_dim, keep)
        self.norm_up, self.up = nn.RMSNorm(dim), nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden))
        return hidden + self.down(F.silu(self.up(self.norm_up(hidden))))


class Model(nn.Module):
    """A language model of a few blocks."""

    def __init__(
        self, layers: int = 2, dim: int = 64, heads: int = 4, kv_heads: int = 2, head_dim: int = 16, keep: int = 24
    ) -> None:
        super().__init__()
        self.checkpoints = False
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, head_dim, keep) for _ in range(layers))
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        contexts = partial(create_selective_checkpoint_contexts, SAVED)
        for block in self.blocks:
            if self.checkpoints:
                hidden = checkpoint(block, hidden, use_reentrant=False, context_fn=contexts)
            else:
                hidden = block(hidden)
        return self.head(hidden)


def tensor_parallel(model: Model, mesh: DeviceMesh, *, dtensor: bool = False) -> None:
    """Split heads and hidden units over the ranks of a mesh of one dimension.

    Attention gets local tensors, a rank's own heads, which costs nothing on the host. With `dtensor` it gets DTensors of all
    heads: that is for models that do more with them than attention.
    """
    split = partial(ColwiseParallel, use_local_output=not dtensor)
    for block in model.blocks:
        assert isinstance(block, Block)
        kv_heads = block.attention.score.out_features
        if kv_heads % mesh.size():
            raise ValueError(f"{kv_heads} key heads do not divide over {mesh.size()} ranks")
        plan: dict[str, ParallelStyle] = {f"attention.{name}": split() for name in ("query", "key", "value", "score")}
        plan |= {"attention.out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)


def fsdp(model: Model, mesh: DeviceMesh) -> None:
    """Shard parameters, gradients and optimizer states over the ranks of a mesh of one dimension, block by block."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def parallelize(model: Model, mesh: DeviceMesh, *, dtensor: bool = False, compiled: bool = False) -> None:
    """Split a model over a mesh with the dimensions "data" and "tensor"."""
    if mesh["tensor"].size() > 1:
        tensor_parallel(model, mesh["tensor"], dtensor=dtensor)
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True)
    if mesh["data"].size() > 1:
        fsdp(model, mesh["data"])


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of predicting each token from those before it."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def main() -> None:
    """Train for a few steps and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, help="ranks that share the heads; the others share the batch (all)")
    parser.add_argument("--dtensor", action="store_true", help="give attention DTensors instead of local tensors")
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--checkpoint", action="store_true", help="keep only the results of attention of each block")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error(f"start it with torchrun: torchrun --nproc-per-node 2 {sys.argv[0]}")
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    tensor = options.tensor or world
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpus:
        torch.cuda.set_device(local)
    mesh = init_device_mesh("cuda" if on_gpus else "cpu", (world // tensor, tensor), mesh_dim_names=("data", "tensor"))

    torch.manual_seed(0)  # on all ranks alike: they start from the same model
    model = Model().to(mesh.device_type)
    model.checkpoints = options.checkpoint
    parallelize(model, mesh, dtensor=options.dtensor, compiled=options.compile)
    tokens = torch.randint(VOCABULARY, (8, 257)).to(mesh.device_type)
    own = tokens.chunk(mesh["data"].size())[mesh["data"].get_local_rank()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = loss_of(model, own)
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == options.steps - 1:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {shown.item() / world:.4f}")
    leave()


def leave() -> None:
    """End the process at once: with gloo, one that ends in the usual way sometimes aborts (seen with torch 2.13)."""
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()

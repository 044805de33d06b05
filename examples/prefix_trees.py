"""Reinforcement learning on packed trees: the rollouts of a prompt share it, so it is computed once.

A tiny policy samples some answers to each prompt, and learns by a loss as GRPO has it (arXiv 2402.03300): advantages are rewards
compared with those of the same prompt, and ratios to the policy that sampled are clipped. Each step, of which there are two for
the answers to a prompt, computes the loss on the packed tree and on separate sequences, and prints that both are equal, and what
each of them costs.

    python examples/prefix_trees.py
    python examples/prefix_trees.py --prompt 8192 --answers 8 --answer 1024 --dim 1024 --heads 16 --layers 8
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmattn_ops import flash_dmattn_func
from dmattn_ops.trees import pack_prefix_tree, tree_mask

VOCABULARY, CLIP = 64, 0.2
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """A layer of a transformer with rotary positions."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, hidden: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        query, key, value = self.project(_normed(hidden)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        hidden = hidden + self.out(attend(_rotated(query, rotation), _rotated(key, rotation), value).flatten(2))
        return hidden + self.down(F.gelu(self.up(_normed(hidden))))


class Policy(nn.Module):
    """A language model. `attend` says what its tokens see, and `positions` where they are."""

    def __init__(self, layers: int, dim: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.layers = nn.ModuleList([Layer(dim, heads) for _ in range(layers)])
        self.angles = 1e4 ** -torch.linspace(0, 1, dim // heads // 2)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the logarithms of probabilities of the next token, float32 `[B, S, vocabulary]`."""
        angles = (positions.unsqueeze(-1) * self.angles.to(tokens.device)).unsqueeze(2)
        hidden = self.embedding(tokens)
        rotation = torch.stack((angles.cos(), angles.sin())).to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotation, attend)
        return F.linear(_normed(hidden), self.embedding.weight).float().log_softmax(-1)


def _normed(hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:])


def _rotated(tensor: Tensor, rotation: Tensor) -> Tensor:
    (one, other), (cos, sin) = tensor.chunk(2, -1), rotation
    return torch.cat((one * cos - other * sin, one * sin + other * cos), -1)


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Let each token see those before it."""
    return flash_dmattn_func(query, key, value, is_causal=True)


class Rollouts(NamedTuple):
    """Answers to one prompt: whole sequences `[n, prompt + answer]`."""

    sequences: Tensor
    prompt: int
    log_probs: Tensor  # of the answers' tokens when they were sampled, [n, answer]
    advantages: Tensor  # [n]


def sample(policy: Policy, prompt: Tensor, answers: int, length: int) -> Rollouts:
    """Sample answers to a prompt, and compare their rewards: the share of tokens with even numbers."""
    sequences = prompt.repeat(answers, 1)
    with torch.no_grad():
        for _ in range(length):
            places = torch.arange(sequences.shape[1], device=prompt.device).expand_as(sequences)
            next_tokens = torch.multinomial(policy(sequences, places, causal)[:, -1].exp(), 1)
            sequences = torch.cat((sequences, next_tokens), 1)
        rewards = (sequences[:, len(prompt) :] % 2 == 0).float().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        made = Rollouts(sequences, len(prompt), rewards, advantages)
        return made._replace(log_probs=of_sequences(policy, made))


def of_sequences(policy: Policy, rollouts: Rollouts) -> Tensor:
    """Return the log-probabilities of the answers' tokens `[n, answer]`, of separate sequences."""
    sequences, first = rollouts.sequences, rollouts.prompt
    places = torch.arange(sequences.shape[1], device=sequences.device).expand_as(sequences)
    log_probs = policy(sequences, places, causal)[:, first - 1 : -1]
    return log_probs.gather(-1, sequences[:, first:, None]).squeeze(-1)


def of_tree(policy: Policy, rollouts: Rollouts) -> Tensor:
    """Return the same of the packed tree.

    The token after place `index[n][t]` of sequence `n` is at `index[n][t + 1]`, which need not be the next place.
    """
    tree = pack_prefix_tree(list(rollouts.sequences)).to(rollouts.sequences.device)
    mask = tree_mask(tree.ends[None])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flash_dmattn_func(query, key, value, mask)

    log_probs = policy(tree.tokens[None], tree.positions[None], attend)[0]
    index = torch.stack(tree.index)[:, rollouts.prompt - 1 :]  # of the answers, and of the token before each of them
    return log_probs[index[:, :-1], tree.tokens[index[:, 1:]]]


def loss_of(log_probs: Tensor, rollouts: Rollouts) -> Tensor:
    """Return the loss of GRPO without the distance to a reference."""
    ratio, advantages = (log_probs - rollouts.log_probs).exp(), rollouts.advantages.unsqueeze(1)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


class Step(NamedTuple):
    """What one way of computing a step gave and took."""

    loss: float
    gradients: list[Tensor]
    seconds: float
    kept: int  # bytes that the forward keeps for the backward


def step(policy: Policy, log_probs_of: Callable[[Policy, Rollouts], Tensor], rollouts: Rollouts) -> Step:
    """Compute loss and gradients, and measure."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    device = rollouts.sequences.device
    began = _now(device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(log_probs_of(policy, rollouts), rollouts)
    gradients = torch.autograd.grad(loss, list(policy.parameters()))
    seconds = _now(device) - began
    weights = {weight.untyped_storage().data_ptr() for weight in policy.parameters()}
    kept = sum(size for place, size in storages.items() if place not in weights)
    return Step(loss.item(), list(gradients), seconds, kept)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main(arguments: list[str]) -> list[dict[str, Any]]:
    """Train, print what each step gave, and return it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"prompt": 256, "answers": 8, "answer": 16, "steps": 4, "layers": 2, "dim": 64, "heads": 4}
    for name, default in defaults.items():
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = options.parse_args(arguments)
    torch.manual_seed(0)
    policy = Policy(asked.layers, asked.dim, asked.heads).to(asked.device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    found: list[dict[str, Any]] = []
    for number in range(asked.steps):
        if number % 2 == 0:
            prompt = torch.randint(VOCABULARY, (asked.prompt,), device=asked.device)
            rollouts = sample(policy, prompt, asked.answers, asked.answer)
        if number == 0:
            step(policy, of_tree, rollouts)  # kernels are loaded
        separate, tree = (step(policy, way, rollouts) for way in (of_sequences, of_tree))
        pairs = list(zip(separate.gradients, tree.gradients, strict=True))
        difference = max((one - other).norm().item() / (one.norm().item() + 1e-30) for one, other in pairs)
        for weight, gradient in zip(policy.parameters(), tree.gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
        found.append({"separate": separate, "tree": tree, "difference": difference})
        print(f"step {number}: loss {separate.loss:+.6f} of sequences, {tree.loss:+.6f} of the tree")
        print(f"  gradients differ by {difference:.1e} of their norm")
        for name, of in (("sequences", separate), ("tree", tree)):
            rate, mebibytes = rollouts.sequences.numel() / of.seconds, of.kept / 2**20
            print(f"  {name:<10}{rate:>12,.0f} tokens/s {mebibytes:>9.1f} MiB kept for the backward")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])

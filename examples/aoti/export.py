"""Export a model with dynamic masks, compile it with AOTInductor, and save inputs with what Python makes of them.

Usage: `python examples/aoti/export.py FOLDER [DEVICE]` writes `model.pt2`, which run.cpp runs without Python, and `calls.pt`:
for each of some lengths the inputs of the model, in the order in which the package takes them, and the expected output.
`step.pt2` and `steps.pt` are the same of a training step. On a GPU (DEVICE `cuda`) it also writes `kernels.dmattn`, the kernels
for these lengths.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import dmattn_ops
from dmattn_ops import TileMask

HEADS, HEAD_DIM = 4, 16
LENGTHS = (200, 150, 517)  # the model is exported with the first one


class Model(nn.Module):
    """Two layers of attention: one learns its mask and makes it inside, the other is given one."""

    def __init__(self) -> None:
        super().__init__()
        dim = HEADS * HEAD_DIM
        self.learned = dmattn_ops.nn.DynamicMaskAttention(dim, HEADS, kv_heads=2, keep=24, keep_first=2, keep_last=8)
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, hidden: Tensor, mask: TileMask) -> Tensor:
        """Return `[B, S, dim]` of hidden states `[B, S, dim]`."""
        hidden = hidden + self.learned(hidden)
        query, key, value = self.qkv(hidden).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        return hidden + dmattn_ops.flash_dmattn_func(query, key, value, mask).flatten(2)


def inputs_of(seqlen: int, device: str = "cpu") -> tuple[Tensor, TileMask]:
    """Return hidden states, and a mask of the 16 best keys by random scores: a window, where scores are positions."""
    hidden = torch.randn(2, seqlen, HEADS * HEAD_DIM, device=device)
    return hidden, dmattn_ops.dynamic_mask(torch.rand(2, HEADS, seqlen, device=device), 16, keep_last=4)


def tensors_of(inputs: tuple[Tensor, TileMask]) -> list[Tensor]:
    """Return what the package takes: the tensors among the leaves of the inputs. Numbers of a mask are its last tensor's sizes."""
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


def training_step(model: Model, seqlen: int, device: str) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """Return the graph of a step of the layer that learns its mask, and inputs: hidden states and its parameters.

    It returns the loss and the gradients of the parameters.
    """
    names, parameters = zip(*model.learned.named_parameters(), strict=True)

    def step(hidden: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        leaves = [part.detach().requires_grad_() for part in given]
        out = functional_call(model.learned, dict(zip(names, leaves, strict=True)), (hidden,))
        loss = out.square().mean()
        return loss, *torch.autograd.grad(loss, leaves)

    inputs = [inputs_of(seqlen, device)[0], *[parameter.detach() for parameter in parameters]]
    return make_fx(step)(*inputs), inputs


def main(folder: Path, device: str = "cpu") -> None:
    """Write the files."""
    torch.manual_seed(0)
    model, inputs = Model().eval().to(device), inputs_of(LENGTHS[0], device)
    shapes: Any = ShapesCollection()
    for leaf in tensors_of(inputs):
        if LENGTHS[0] in leaf.shape:
            shapes[leaf] = {dim: Dim.DYNAMIC for dim, size in enumerate(leaf.shape) if size == LENGTHS[0]}
    with torch.no_grad():
        program = torch.export.export(model, inputs, dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
        run, calls = program.module(), [inputs_of(length, device) for length in LENGTHS]
        torch.save([(tensors_of(given), [run(*given)]) for given in calls], folder / "calls.pt")
    step, given = training_step(model, LENGTHS[0], device)
    torch._inductor.aoti_compile_and_package(
        torch.export.export(step, tuple(given)), package_path=str(folder / "step.pt2")
    )
    torch.save([(given, list(step(*given)))], folder / "steps.pt")
    if device != "cpu":

        def all_calls() -> None:
            with torch.no_grad():
                for one in calls:
                    run(*one)
                step(*given)

        dmattn_ops.export_kernels(all_calls, folder / "kernels.dmattn")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

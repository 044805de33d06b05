"""The model of `examples/tensor_parallel.py`, parallel in several ways, against the same model on one device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import ranks
import torch
import torch.distributed as dist
from sharding_cases import mesh_of, relative
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import tensor_parallel as example

LENGTH = 161


def model_of() -> example.Model:
    """Return the model, the same on every rank and in every process."""
    torch.manual_seed(0)
    return example.Model().to(ranks.device())


def tokens_of() -> Tensor:
    """Return a batch of four sequences."""
    return torch.randint(example.VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(1)).to(ranks.device())


def own_tokens() -> Tensor:
    """Return the part of the batch of this rank."""
    return tokens_of().chunk(dist.get_world_size())[dist.get_rank()]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return whole gradients by the names of the plain model's parameters."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        found[name.replace("module.", "").replace("_orig_mod.", "")] = whole
    return found


def apart(model: nn.Module, tokens: Tensor, called: Any = None) -> float:
    """Return the largest relative error of the second step's gradients against the model on one device."""
    expected = model_of()
    example.loss_of(expected, tokens_of()).backward()
    for _ in range(2):  # twice: what the first call sets up, the second one uses
        model.zero_grad()
        example.loss_of(model if called is None else called, tokens).backward()
    found, wanted = gradients(model), gradients(expected)
    assert set(found) == set(wanted)
    return max(relative(found[name], wanted[name]) for name in wanted)


def tensor_parallel(dtensor: bool, compiled: bool, checkpoints: bool) -> float:
    """Return the error of tensor parallelism."""
    torch._dynamo.reset()
    model = model_of()
    model.checkpoints = checkpoints
    mesh = init_device_mesh(ranks.device().type, (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    example.parallelize(model, mesh, dtensor=dtensor, compiled=compiled)
    return apart(model, tokens_of())


def sequence_parallel(dtensor: bool) -> float:
    """Return the error of tensor parallelism with sequence-parallel norms: hidden states are split over positions."""
    model, mesh = model_of(), mesh_of()
    split = {"use_local_output": not dtensor}
    for block in model.blocks:
        plan = {f"attention.{name}": ColwiseParallel(**split) for name in ("query", "key", "value", "score")}
        plan |= {
            "norm": SequenceParallel(),
            "norm_up": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=not dtensor
            ),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    whole = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, whole)
    return apart(model, tokens_of())


def fsdp(compiled: bool) -> float:
    """Return the error of FSDP2."""
    torch._dynamo.reset()
    model = model_of()
    mesh = init_device_mesh(ranks.device().type, (dist.get_world_size(), 1), mesh_dim_names=("data", "tensor"))
    example.parallelize(model, mesh, compiled=compiled)
    return apart(model, own_tokens())


def ddp(compiled: bool) -> float:
    """Return the error of DDP; buckets are so small that its optimizer splits the graph between blocks."""
    torch._dynamo.reset()
    model = model_of()
    dist._DEFAULT_FIRST_BUCKET_BYTES = (
        20_000  # what DDP's optimizer of graphs begins with; by default all is one bucket
    )
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.04)
    return apart(model, own_tokens(), torch.compile(wrapped, backend="aot_eager") if compiled else wrapped)


class Count(TorchDispatchMode):
    """Counts the calls of an operator that are computed."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator, self.calls = operator, 0

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.calls += operator is self.operator
        return operator(*arguments, **(keywords or {}))


@contextlib.contextmanager
def saving(operators: list[Any]) -> Iterator[None]:
    """Let the example's checkpoints save the results of these operators."""
    before, example.SAVED = example.SAVED, operators
    try:
        yield
    finally:
        example.SAVED = before


def forwards(model: nn.Module, tokens: Tensor) -> int:
    """Return how many forwards of attention one step of training computes."""
    with Count(torch.ops.dmattn.forward.default) as count:
        example.loss_of(model, tokens).backward()
    return count.calls


def forwards_under_checkpoints(dtensor: bool) -> tuple[int, int]:
    """Return how many forwards of attention a step computes where checkpoints save them, and where they save nothing."""
    found = []
    for operators in (example.SAVED, []):
        model = model_of()
        model.checkpoints = True
        example.tensor_parallel(model, mesh_of(), dtensor=dtensor)
        with saving(operators):
            found.append(forwards(model, tokens_of()))
    return found[0], found[1]


def transformers_llama() -> tuple[float, float]:
    """Return the errors of the logits and gradients of a Llama of transformers under its tensor-parallel plan."""
    import tiny_models

    from dmattn_ops.integrations.transformers import register

    register()
    expected = tiny_models.decoder("llama")
    model = copy.deepcopy(expected)
    for each in (expected, model):
        each.set_attn_implementation("dmattn")
        each.to(ranks.device())
    plan = {
        name.replace("layers.", "model.layers.", 1): {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}[style]()
        for name, style in model.config.base_model_tp_plan.items()
    }
    parallelize_module(model, mesh_of(), plan)
    tokens = tokens_of()[:, :40]
    padding = torch.ones_like(tokens)
    padding[1, :7] = 0
    found = [each(tokens, attention_mask=padding, labels=tokens) for each in (expected, model)]
    for each in found:
        each.loss.backward()
    wanted, got = gradients(expected), gradients(model)
    errors = [relative(got[name], wanted[name]) for name in wanted]
    return relative(found[1].logits.detach(), found[0].logits.detach()), max(errors)


def key_heads_that_do_not_divide() -> None:
    """Ask for more ranks than key heads."""
    example.tensor_parallel(example.Model(kv_heads=1), mesh_of())

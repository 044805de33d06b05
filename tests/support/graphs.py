"""Capture the graphs that a compiled function consists of."""

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd


def captured(function: Callable[..., Any], *inputs: Any, **options: Any) -> list[torch.fx.Graph]:
    """Compile and run a function, and its backward if there is one; return the forward and the backward graph."""
    graphs: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    outputs = torch.compile(function, fullgraph=True, backend=backend, **options)(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum(output.sum() for output in outputs if output.requires_grad)
    if isinstance(total, torch.Tensor):
        total.backward()
    return graphs


def targets(graph: torch.fx.Graph) -> list[str]:
    """Return what a graph calls, in order."""
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def own_targets(graph: torch.fx.Graph) -> list[str]:
    """Return which of the library's operators a graph calls, in order."""
    return [target for target in targets(graph) if target.startswith("dmattn.")]

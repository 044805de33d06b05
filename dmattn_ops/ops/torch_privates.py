"""The private names of torch that derivatives use, and what becomes of calls where a torch lacks one.

There are two gates. Without one of the names of `NEEDED`, derivatives are registered as torch publicly offers it
(`autograd.register_public`). Without one of `SHORT_CUTS`, calls take their way through torch's dispatcher, which costs a few
microseconds; results and errors stay the same. Either is told once, when the package is imported. Without `get_current_meta`
of `torch.fx.traceback` or `CheckpointPolicy`, compiled dropout is refused where torch would draw its seeds twice. Without
`torch.utils._pytree`, masks are registered as dataclasses, and packages of AOTInductor do not see their numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.fx import traceback as fx_traceback
from torch.utils import checkpoint

below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", nullcontext)
single_level_function: Any = getattr(torch.autograd.function, "_SingleLevelFunction", None)
transforms_active: Any = getattr(torch._C, "_are_functorch_transforms_active", None)
dispatch_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
is_tracing: Any = getattr(torch.jit, "is_tracing", None)  # public, while there is TorchScript
profiler_enabled: Any = getattr(torch.autograd, "_profiler_enabled", None)
node_meta: Any = getattr(fx_traceback, "get_current_meta", None)  # of the node that is being traced
region_budget = getattr(fx_traceback, "MEMORY_BUDGET_ANNOTATION_KEY", None)  # of the budget of a region, in "custom"
save_policy: Any = getattr(getattr(checkpoint, "CheckpointPolicy", None), "MUST_SAVE", None)
pytree: Any = getattr(torch.utils, "_pytree", None)

NEEDED = {
    "torch._C._AutoDispatchBelowAutograd": None if below_autograd is nullcontext else below_autograd,
    "torch._C._are_functorch_transforms_active": transforms_active,
    "torch.autograd.function._SingleLevelFunction": single_level_function,
}
SHORT_CUTS = {
    "torch._C._len_torch_dispatch_stack": dispatch_modes,
    "torch.autograd._profiler_enabled": profiler_enabled,
    "torch.jit.is_tracing": is_tracing,
}


def _lost(names: dict[str, Any]) -> list[str]:
    return [name for name, found in names.items() if found is None]


has_needed = not _lost(NEEDED)
has_short_cuts = not _lost(SHORT_CUTS)


@contextmanager
def saved_for_backward() -> Iterator[None]:
    """Let graphs save for their backward what is computed here: torch's partitioner may not compute it a second time.

    Nodes say so in "recompute", as under a policy of selective checkpointing that saves them. A budget of 0 saves the inputs
    of a graph only, whatever nodes say.
    """
    if torch.is_grad_enabled() and (_budget() <= 0.0 or (_cannot_save and (_budget() < 1.0 or _recomputes_more()))):
        raise RuntimeError(
            "torch would draw the seeds of dropout a second time in the backward, which makes gradients wrong, with an activation"
            f" memory budget of {_budget()}: give torch._functorch.config.activation_memory_budget, or the region's budget,"
            f" {_NEEDED_BUDGET}"
        )
    if _cannot_save:
        yield
        return
    meta = node_meta()
    before = meta.get("recompute")
    meta["recompute"] = save_policy
    try:
        yield
    finally:
        meta.pop("recompute", None)
        if before is not None:
            meta["recompute"] = before


_cannot_save = node_meta is None or save_policy is None
_NEEDED_BUDGET = (
    "the value 1, and leave aggressive_recomputation off" if _cannot_save else "a value above 0, such as 0.01"
)


def _budget() -> float:
    """Return the share of its activations that a graph being traced may save, from 0 to 1 (no limit)."""
    meta = {} if node_meta is None else node_meta()
    for budget in ((meta.get("custom") or {}).get(region_budget), meta.get("memory_budget")):
        if isinstance(budget, (int, float)):
            return budget
    return _compiling("activation_memory_budget", 1.0)


def _recomputes_more() -> bool:
    return _compiling("aggressive_recomputation", False)


def _compiling(name: str, missing: Any) -> Any:
    """Return a setting of torch's compiler for derivatives, or what it is where there is none."""
    from torch._functorch import config

    return getattr(config, name, missing)


def tell_what_is_lost() -> None:
    """Warn once of the gates that are closed."""
    if not has_needed:
        warnings.warn(
            f"dmattn_ops: torch {torch.__version__} lacks {', '.join(_lost(NEEDED))}. torch.func is not supported with it, and"
            " torch.ops.dmattn.*, unlike the public functions, does not refuse forward-mode derivatives.",
            stacklevel=2,
        )
    elif not has_short_cuts:
        warnings.warn(
            f"dmattn_ops: torch {torch.__version__} lacks {', '.join(_lost(SHORT_CUTS))}. Calls compute the same, but each takes"
            " some microseconds more on the host.",
            stacklevel=2,
        )

"""torch's own attention through these kernels: `activate()`, `deactivate()`, `activated()`.

While active, `torch.nn.functional.scaled_dot_product_attention` and `torch.nn.attention.varlen.varlen_attn` run here on CUDA,
forward and backward, dropout included, in every library that calls them. It is one of torch's registered implementations
of flash attention (`torch.nn.attention.activate_flash_attention_impl("dmattn")` after the first `activate`), beside FA3 and
FA4, and replaces the kernels of the flash, memory-efficient and cuDNN operators, whichever torch chooses for a call. What they do
not take goes to torch's own kernel.

Only out and lse reach torch's backward, not what lse lost when it was rounded: gradients of rows whose scores exceed about
1e5 are those of any flash attention, less exact than `flash_dmattn_func`'s.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.library import Library
from torch.nn import attention as registry

from dmattn_ops.sdpa import operators
from dmattn_ops.sdpa.calls import Refused

IMPLEMENTATION = "dmattn"
Report = Callable[[str], None]
KERNELS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": operators.flash_forward,
    "_flash_attention_forward_no_dropout_inplace": operators.flash_forward_into,
    "_flash_attention_backward": operators.flash_backward,
    "_scaled_dot_product_flash_attention": operators.sdpa_flash_forward,
    "_scaled_dot_product_flash_attention_backward": operators.sdpa_flash_backward,
    "_scaled_dot_product_efficient_attention": operators.sdpa_efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": operators.sdpa_efficient_backward,
    "_scaled_dot_product_cudnn_attention": operators.sdpa_cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": operators.sdpa_cudnn_backward,
}
_PLACE_OF_BIAS = {
    "_scaled_dot_product_efficient_attention": 3,
    "_scaled_dot_product_efficient_attention_backward": 4,
    "_scaled_dot_product_cudnn_attention": 3,
    "_scaled_dot_product_cudnn_attention_backward": 8,
}


class Options(NamedTuple):
    """The arguments of the last `activate`."""

    masks: bool = False
    report: Report | None = None


_asked = Options()


def activate(*, masks: bool = False, report: Report | None = None) -> None:
    """Let torch's attention on CUDA run here, until `deactivate` or another implementation is activated.

    It holds for the whole process, all threads included. Calls on the CPU stay with torch, and are not reported.

    Args:
        masks: whether calls with an `attn_mask` run here too. torch has then made a bias `[B|1, H|1, Sq, Sk]` of the mask, of
            which what is -inf is packed into tiles at every call, forward and backward: tiles without a visible key are
            skipped. It pays where whole tiles are hidden; a mask that is prepared once costs less (`prepare_mask`).
        report: called with a sentence for each call that is left to torch's own kernel: `print`, or a logger's method.
    """
    global _asked
    if not isinstance(masks, bool):
        raise TypeError(f"masks must be a bool, got {type(masks).__name__}")
    if report is not None and not callable(report):
        raise TypeError(f"report must be a function that takes a sentence, such as print, got {type(report).__name__}")
    _asked = Options(masks, report)
    registry.register_flash_attention_impl(IMPLEMENTATION, register_fn=lambda: Replacement("CUDA", _asked))
    registry.activate_flash_attention_impl(IMPLEMENTATION)


def deactivate() -> None:
    """Let torch's attention run on torch's own kernels again; nothing happens where this library's are not active."""
    if registry.current_flash_attention_impl() == IMPLEMENTATION:
        registry.restore_flash_attention_impl()


@contextmanager
def activated(*, masks: bool = False, report: Report | None = None) -> Iterator[None]:
    """Let torch's attention on CUDA run here inside a block; afterwards, what was active before is active again.

    The backward of a call with dropout belongs into the same block: other kernels would drop other weights, as torch's own
    would after `deactivate`.
    """
    before, asked = registry.current_flash_attention_impl(), _asked
    activate(masks=masks, report=report)
    try:
        yield
    finally:
        deactivate()
        if before == IMPLEMENTATION:
            activate(masks=asked.masks, report=asked.report)
        elif before is not None:
            registry.activate_flash_attention_impl(before)


class Replacement:
    """Kernels of torch's operators that are replaced for one dispatch key, until `remove`."""

    def __init__(self, key: str, asked: Options) -> None:
        self.library = Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Warning only once for all operators"
            )  # overriding is the purpose
            for name, function in KERNELS.items():
                if hasattr(torch.ops.aten, name):  # older releases lack one
                    kernel = partial(_here_or_there, name, function, _kernel_of(name, key), asked)
                    self.library.impl(name, kernel, key, with_keyset=True)

    def remove(self) -> None:
        """Put torch's own kernels back."""
        self.library._destroy()


def _kernel_of(name: str, key: str) -> Any:
    """Return torch's own kernel, or None where it was built without."""
    try:
        return torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:
        return None


def _here_or_there(
    name: str,
    function: Callable[..., Any],
    torchs_own: Any,
    asked: Options,
    keys: Any,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """Run a call here or, where it is refused, on torch's own kernel."""
    try:
        if not asked.masks and _has_mask(name, arguments, keywords):
            raise Refused("it has an attn_mask, and activate was called without masks=True")
        return function(*arguments, **keywords)
    except (Refused, NotImplementedError) as refused:
        if torchs_own is None:
            raise NotImplementedError(
                f"{name}: {refused}; and this build of torch has no kernel of its own"
            ) from refused
        if asked.report is not None:
            asked.report(f"{name} runs on torch's own kernel: {refused}")
        return torchs_own.call_boxed(keys, *arguments, **keywords)


def _has_mask(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Return whether a call of the memory-efficient or cuDNN operators has a mask."""
    place = _PLACE_OF_BIAS.get(name)
    if place is None:
        return False
    bias = arguments[place] if len(arguments) > place else keywords.get("attn_bias")
    return bias is not None and bias.numel() > 0

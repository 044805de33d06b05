"""The implementations that benchmarks compare. Each gets the same problem in the memory layout that it prefers.

An implementation is a function of a `Problem` that returns a `Run`; it raises `Unavailable` where it cannot take part.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import dmattn_ops


class Unavailable(RuntimeError):
    """This implementation cannot run this problem here."""


@dataclass(frozen=True)
class Problem:
    """One attention call: query `[B, S, H, D]`, key and value `[B, S, Hkv, D]`, mask `[B, H, S, S]` or none.

    A mask that broadcasts is for others than `flex`, which indexes it.
    """

    case: str
    batch: int
    heads: int
    seqlen: int
    dim: int
    causal: bool = False
    kv_heads: int | None = None
    mask: Tensor | None = None
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    @property
    def grouped(self) -> bool:
        return self.kv_heads is not None

    @property
    def density(self) -> float:
        """Part of all (query, key) pairs that counts; half of them under causal, as everyone counts."""
        if self.mask is not None:
            return self.mask.float().mean(dtype=torch.float64).item()
        return 0.5 if self.causal else 1.0

    @property
    def forward_flops(self) -> float:
        return 4 * self.batch * self.heads * self.seqlen**2 * self.dim * self.density

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """query, key, value and the gradient of out."""
        generator = torch.Generator(self.device).manual_seed(0)
        heads = (self.heads, self.kv_heads or self.heads, self.kv_heads or self.heads, self.heads)
        shapes = ((self.batch, self.seqlen, count, self.dim) for count in heads)
        drawn = (torch.randn(shape, generator=generator, device=self.device) for shape in shapes)
        query, key, value, grad_out = (tensor.to(self.dtype) for tensor in drawn)
        return query, key, value, grad_out

    def leaves(self, heads_first: bool) -> tuple[list[Tensor], Tensor]:
        """Return new leaves query, key, value and the gradient of out, contiguous in the layout asked for."""
        *inputs, grad_out = (t.transpose(1, 2).contiguous() if heads_first else t.clone() for t in self.tensors)
        return [tensor.requires_grad_() for tensor in inputs], grad_out


@dataclass(frozen=True)
class Run:
    """What is timed: the forward call, its backward (where there is one), and the work on the mask before both."""

    forward: Callable[[], Any]
    backward: Callable[[], Any] | None
    prepare: Callable[[], Any] | None = None
    inputs: tuple[Tensor, ...] = ()
    grad_out: Tensor | None = None


def recorded_run(
    attend: Callable[[], Any], inputs: list[Tensor], grad_out: Tensor, prepare: Callable | None = None
) -> Run:
    """Call once, and keep the graph, so that the backward is timed alone."""
    result = attend()
    out = result[0] if isinstance(result, tuple) else result

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, grad_out, retain_graph=True)

    backward()
    return Run(attend, backward, prepare, tuple(inputs), grad_out)


def dmattn(problem: Problem) -> Run:
    """Run this library; a mask is prepared once, which is timed by itself."""
    inputs, grad_out = problem.leaves(heads_first=False)
    prepare, mask = None, None
    if problem.mask is not None:
        prepare = functools.partial(dmattn_ops.prepare_mask, problem.mask)
        mask = prepare()
    query, key, value = inputs
    attend = functools.partial(dmattn_ops.flash_dmattn_func, query, key, value, mask, is_causal=problem.causal)
    return recorded_run(attend, inputs, grad_out, prepare)


def dmattn_unmasked(problem: Problem) -> Run:
    """Run this library without the problem's mask: what the mask saves is against this."""
    inputs, grad_out = problem.leaves(heads_first=False)
    attend = functools.partial(dmattn_ops.flash_dmattn_func, *inputs, is_causal=problem.causal)
    return recorded_run(attend, inputs, grad_out)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def with_variable(make: Callable[[], Run], name: str, value: str) -> Run:
    """Return a run that is set up, and called each time, while a variable of the environment has a value."""

    def inside(function: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            with _variable(name, value):
                return function()

        return call

    run = inside(make)()
    return replace(run, forward=inside(run.forward), backward=inside(run.backward) if run.backward else None)


def dmattn_sm80(problem: Problem) -> Run:
    """Run this library with the configuration of SM 8.0, whatever the GPU is."""
    if problem.device != "cuda":
        raise Unavailable("an architecture can only be chosen on CUDA")
    return with_variable(functools.partial(dmattn, problem), "DMATTN_ARCH", "8.0")


def sdpa(problem: Problem) -> Run:
    """Run torch's attention, with the kernel that it chooses."""
    inputs, grad_out = problem.leaves(heads_first=True)
    query, key, value = inputs
    attend = functools.partial(
        F.scaled_dot_product_attention,
        query,
        key,
        value,
        attn_mask=problem.mask,
        is_causal=problem.causal and problem.mask is None,
        enable_gqa=problem.grouped,
    )
    return recorded_run(attend, inputs, grad_out)


def cudnn(problem: Problem) -> Run:
    """Run cuDNN's kernels through torch."""
    if problem.device != "cuda":
        raise Unavailable("cuDNN needs CUDA")
    if problem.mask is not None:
        raise Unavailable("cuDNN has no bool mask; torch hands it an additive one, see sdpa")
    return _sdpa_by(SDPBackend.CUDNN_ATTENTION, problem)


def sdpa_efficient(problem: Problem) -> Run:
    """Run the memory-efficient kernel through torch: until torch chose cuDNN, what SDPA ran with a mask."""
    if problem.device != "cuda" or problem.grouped:
        raise Unavailable("the memory-efficient kernel needs CUDA, and as many key heads as query heads")
    return _sdpa_by(SDPBackend.EFFICIENT_ATTENTION, problem)


def _sdpa_by(backend: SDPBackend, problem: Problem) -> Run:
    inputs, grad_out = problem.leaves(heads_first=True)
    query, key, value = inputs
    mask = {"is_causal": problem.causal} if problem.mask is None else {"attn_mask": problem.mask}

    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=problem.grouped, **mask)

    return recorded_run(attend, inputs, grad_out)


def fa4(problem: Problem) -> Run:
    """Run FlashAttention 4 (CuTe DSL)."""
    if problem.device != "cuda" or problem.mask is not None:
        raise Unavailable("FlashAttention 4 is compared without masks, on CUDA")
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        raise Unavailable(f"flash_attn.cute: {error}") from error
    inputs, grad_out = problem.leaves(heads_first=False)
    return recorded_run(functools.partial(flash_attn_func, *inputs, causal=problem.causal), inputs, grad_out)


@functools.cache
def compiled_flex() -> tuple[Callable, Callable]:
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._functorch.config.donated_buffer = False  # a backward would otherwise free what the next timed one needs
    torch._dynamo.config.recompile_limit = 64  # a graph for each shape of a table; past the limit it runs unfused
    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)


def flex(problem: Problem) -> Run:
    """Run flex_attention, compiled; making its BlockMask is timed by itself, compiled too."""
    attention, make_block_mask = compiled_flex()
    inputs, grad_out = problem.leaves(heads_first=True)
    heads: int | None = problem.heads
    if problem.mask is not None:
        batch, mask = problem.batch, problem.mask

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return mask[b, h, i, j]
    else:
        batch, heads = None, None

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i >= j

    def prepare() -> Any:
        return make_block_mask(visible, batch, heads, problem.seqlen, problem.seqlen, device=problem.device)

    needs_mask = problem.causal or problem.mask is not None
    block_mask = prepare() if needs_mask else None
    attend = functools.partial(attention, *inputs, block_mask=block_mask, enable_gqa=problem.grouped)
    if problem.device == "cpu":  # no backward there, and no forward for inputs that want one
        for tensor in inputs:
            tensor.requires_grad_(False)
        attend()
        return Run(attend, None, prepare if problem.mask is not None else None)
    return recorded_run(attend, inputs, grad_out, prepare if problem.mask is not None else None)


IMPLEMENTATIONS: dict[str, Callable[[Problem], Run]] = {
    "dmattn": dmattn,
    "dmattn-unmasked": dmattn_unmasked,
    "dmattn-sm80": dmattn_sm80,
    "fa4": fa4,
    "cudnn": cudnn,
    "flex": flex,
    "sdpa": sdpa,
    "sdpa-efficient": sdpa_efficient,
}

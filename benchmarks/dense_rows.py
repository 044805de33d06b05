"""Calls on whole batches: head dimensions, short and long sequences, dropout, a bias, what features cost, and drawn shapes."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import dmattn_ops
from peers import Run, Unavailable, compiled_flex, recorded_run
from rows import Case

DRAWN = 12
SEED = 2026
# Lists of tensors are spread into it, which a type checker cannot tell from the other arguments.
scaled_dot_product_attention: Any = F.scaled_dot_product_attention


class Shape(NamedTuple):
    """A call: query `[B, S, H, D]`, key `[B, S, Hkv, D]`, value `[B, S, Hkv, Dv]`."""

    batch: int
    heads: int
    seqlen: int
    dim: int
    causal: bool
    kv_heads: int | None = None
    dim_v: int | None = None
    window: int | None = None  # keys before a query that it sees

    @property
    def name(self) -> str:
        """Return the shape in words."""
        heads = f"H{self.heads}" if self.kv_heads is None else f"H{self.heads}/{self.kv_heads}"
        dims = f"D{self.dim}" if self.dim_v is None else f"D{self.dim}/{self.dim_v}"
        band = "causal" if self.causal else "full"
        return f"B{self.batch} {heads} S{self.seqlen} {dims} {band}" + (
            "" if self.window is None else f" window {self.window}"
        )

    def leaves(self, heads_first: bool) -> tuple[list[Tensor], Tensor]:
        """Return query, key and value that want gradients, in the layout asked for, and the gradient of out."""
        generator = torch.Generator("cuda").manual_seed(0)
        kv_heads, dim_v = self.kv_heads or self.heads, self.dim_v or self.dim
        shapes = (
            (self.batch, self.seqlen, self.heads, self.dim),
            (self.batch, self.seqlen, kv_heads, self.dim),
            (self.batch, self.seqlen, kv_heads, dim_v),
            (self.batch, self.seqlen, self.heads, dim_v),
        )
        drawn = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
        *inputs, grad_out = (tensor.transpose(1, 2).contiguous() if heads_first else tensor for tensor in drawn)
        return [tensor.requires_grad_() for tensor in inputs], grad_out


Maker = Callable[[Shape], Run]


def _dmattn(shape: Shape, **options: Any) -> Run:
    inputs, grad_out = shape.leaves(heads_first=False)
    if shape.window is not None:
        options["window_size"] = (shape.window, None)
    attend = functools.partial(dmattn_ops.flash_dmattn_func, *inputs, is_causal=shape.causal, **options)
    return recorded_run(attend, inputs, grad_out)


def _fa4(shape: Shape, **options: Any) -> Run:
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        raise Unavailable(f"flash_attn.cute: {error}") from error
    inputs, grad_out = shape.leaves(heads_first=False)
    if shape.window is not None:
        options["window_size"] = (shape.window, 0 if shape.causal else None)
    return recorded_run(functools.partial(flash_attn_func, *inputs, causal=shape.causal, **options), inputs, grad_out)


def _sdpa(shape: Shape, backend: SDPBackend, **options: Any) -> Run:
    if shape.window is not None:
        raise Unavailable("torch's attention has no window")
    inputs, grad_out = shape.leaves(heads_first=True)

    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                *inputs, is_causal=shape.causal, enable_gqa=shape.kv_heads is not None, **options
            )

    return recorded_run(attend, inputs, grad_out)


_CUDNN = functools.partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION)
_PEERS: dict[str, Maker] = {"fa4": _fa4, "cudnn": _CUDNN}


def _case(name: str, shape: Shape, must: tuple[float, float], ours: Maker, peers: Mapping[str, Maker]) -> Case:
    runs = {who: functools.partial(make, shape) for who, make in {"dmattn": ours, **peers}.items()}
    return Case(f"{name}, {shape.name}", must, runs)


def _shapes() -> Iterator[Case]:
    """Yield plain calls: head dimensions, short and long sequences."""
    for name, shape, must in (
        ("head dimensions", Shape(2, 16, 4096, 192, True, dim_v=128), (1.0, 1.0)),
        ("head dimensions", Shape(2, 16, 4096, 80, False), (1.0, 1.0)),
        ("head dimensions", Shape(2, 16, 4096, 96, True), (1.0, 1.0)),
        ("head dimensions", Shape(4, 8, 4096, 256, True), (1.0, 1.0)),
        ("short", Shape(1, 16, 2048, 64, True), (1.0, 1.0)),
        ("short", Shape(1, 8, 1000, 64, True), (1.0, 1.0)),
        ("short", Shape(64, 12, 512, 64, False), (1.0, 1.0)),
        ("few blocks", Shape(1, 32, 1024, 128, True, kv_heads=8), (0.95, 0.95)),
        ("few blocks", Shape(1, 2, 4096, 128, True), (0.95, 0.95)),
        ("long", Shape(1, 16, 16384, 128, True), (1.0, 1.03)),
        ("long", Shape(1, 4, 131072, 128, True), (1.0, 1.03)),
    ):
        yield _case(name, shape, must, _dmattn, _PEERS)


def _dropout() -> Case:
    shape = Shape(2, 16, 4096, 128, True)
    flash: Maker = functools.partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION, dropout_p=0.1)
    peers: dict[str, Maker] = {"cudnn": functools.partial(_CUDNN, dropout_p=0.1), "flash (torch)": flash}
    return _case("dropout 0.1", shape, (1.0, 1.0), functools.partial(_dmattn, dropout_p=0.1), peers)


def _bias_of(shape: Shape) -> Tensor:
    size = (1, shape.heads, shape.seqlen, shape.seqlen)
    return torch.randn(size, device="cuda", dtype=torch.bfloat16).requires_grad_()


def _biased(shape: Shape) -> Run:
    inputs, grad_out = shape.leaves(heads_first=False)
    bias = _bias_of(shape)
    attend = functools.partial(dmattn_ops.flash_dmattn_func, *inputs, bias=bias, is_causal=shape.causal)
    return recorded_run(attend, [*inputs, bias], grad_out)


def _biased_sdpa(shape: Shape) -> Run:
    inputs, grad_out = shape.leaves(heads_first=True)
    bias = _bias_of(shape)
    return recorded_run(
        functools.partial(scaled_dot_product_attention, *inputs, attn_mask=bias), [*inputs, bias], grad_out
    )


def _biased_flex(shape: Shape) -> Run:
    attention, _ = compiled_flex()
    inputs, grad_out = shape.leaves(heads_first=True)
    bias = _bias_of(shape)

    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[0, h, i, j]

    return recorded_run(functools.partial(attention, *inputs, score_mod=add), [*inputs, bias], grad_out)


def _bias() -> Case:
    peers = {"flex": _biased_flex, "sdpa": _biased_sdpa}
    return _case("bias [1, H, S, S] and its gradient", Shape(2, 16, 4096, 128, False), (1.05, 1.3), _biased, peers)


def _with_sink(shape: Shape) -> Run:
    inputs, grad_out = shape.leaves(heads_first=False)
    sink = torch.randn(shape.heads, device="cuda").requires_grad_()
    attend = functools.partial(dmattn_ops.flash_dmattn_func, *inputs, is_causal=shape.causal, sink=sink)
    return recorded_run(attend, [*inputs, sink], grad_out)


def _against_plain() -> Iterator[Case]:
    """Yield features beside this library's own plain call: what they may cost at most."""
    four = Shape(2, 16, 4096, 128, True)
    for name, shape, at_most, ours in (
        ("soft cap 20", four, (1.25, 1.14), functools.partial(_dmattn, softcap=20.0)),
        ("deterministic", four, (1.06, 1.06), functools.partial(_dmattn, deterministic=True)),
        ("deterministic", four._replace(dim=64), (1.06, 1.06), functools.partial(_dmattn, deterministic=True)),
        ("sink", four, (1.03, 1.03), _with_sink),
        ("row maximum", four, (1.03, 1.03), functools.partial(_dmattn, return_max=True)),
    ):
        must = (round(1 / at_most[0], 4), round(1 / at_most[1], 4))
        yield _case(name, shape, must, ours, {"dmattn, plain": _dmattn})


def drawn(count: int = DRAWN, seed: int = SEED) -> list[Shape]:
    """Return shapes drawn at random, the same ones every time."""
    numbers = random.Random(seed)
    shapes: list[Shape] = []
    while len(shapes) < count:
        dim = 8 * numbers.randint(4, 32)
        dim_v = dim if numbers.random() < 0.6 else 8 * numbers.randint(4, 32)
        heads = numbers.choice((4, 8, 12, 16, 24, 32))
        groups = numbers.choice([1, 1, *(each for each in (2, 4, 8) if heads % each == 0)])
        seqlen = numbers.randint(256, 8192)
        causal = numbers.random() < 0.6
        window = numbers.choice((128, 512, 1024)) if causal and numbers.random() < 0.3 else None
        batch = max(1, min(16, (1 << 27) // (seqlen * seqlen)))
        shape = Shape(
            batch, heads, seqlen, dim, causal, kv_heads=heads // groups if groups > 1 else None, window=window
        )
        shapes.append(shape if dim_v == dim else shape._replace(dim_v=dim_v))
    return shapes


def cases() -> Iterator[Case]:
    """Yield all rows."""
    yield from _shapes()
    yield _dropout()
    yield _bias()
    yield from _against_plain()
    for shape in drawn():
        yield _case("drawn", shape, (0.95, 0.95), _dmattn, _PEERS)

"""Calls of the native launchers, and what they must give: a float64 formula, and the error budget against it.

Everything is written out again here, apart from the shapes of outputs, so that a mistake cannot be on both sides.
"""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import torch
from torch import Tensor

from dmattn_ops import call as calls
from dmattn_ops import meta
from dmattn_ops.call import NO_MASK, UNBOUNDED, Mask, Options, Varlen, plain_options
from dmattn_ops.kernels import native

EPS = {torch.float64: 1e-10, torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
LENGTHS = (1, 2, 7, 16, 33, 64, 100, 127, 128, 129, 200, 256, 257, 300)
WIDTHS = (1, 2, 7, 8, 16, 20, 33, 64, 80, 128)
FREE = (-UNBOUNDED, UNBOUNDED)


@dataclasses.dataclass
class Call:
    """One problem: the launchers' arguments, and the dense `keep` `[B, H, Sq, Sk]` that they stand for."""

    query: Tensor
    key: Tensor
    value: Tensor
    keep: Tensor
    bias: Tensor | None = None
    mask: Mask = NO_MASK
    seed: Tensor | None = None
    band: tuple[int, int] = FREE
    scale: float = 0.3
    softcap: float = 0.0
    dropout_p: float = 0.0
    origins: tuple[int, int] = (0, 0)
    grad_out: Tensor | None = None
    grad_lse: Tensor | None = None
    dropout_keep: Tensor | None = None

    @property
    def options(self) -> Options:
        q_origin, k_origin = self.origins
        numbers = {"softcap": self.softcap, "dropout_p": self.dropout_p, "q_origin": q_origin, "k_origin": k_origin}
        return plain_options(self.scale, *self.band, **numbers)


def band_keep(seqlen_q: int, seqlen_k: int, band: tuple[int, int]) -> Tensor:
    distance = torch.arange(seqlen_k) - torch.arange(seqlen_q).unsqueeze(1)
    return (distance >= band[0]) & (distance <= band[1])


def per_head(tensor: Tensor, heads: int) -> Tensor:
    """Repeat dimension 1 (1, Hkv or H heads) to `heads`."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def philox_keep(
    seed: Tensor, shape: tuple[int, int, int, int], dropout_p: float, origins: tuple[int, int] = (0, 0)
) -> Tensor:
    """Philox4x32-7 as DESIGN.md states it, in numpy's uint64: bool `[B, H, Sq, Sk]` for seeds `[B or 1, H or 1]`."""
    low = np.uint64(0xFFFFFFFF)
    seeds = seed.expand(shape[:2]).contiguous().numpy().view(np.uint64)[:, :, None, None]
    row, col = (first + np.arange(size) for first, size in zip(origins, shape[2:], strict=True))
    row, col = np.broadcast_to(row[:, None], shape), np.broadcast_to(col, shape)
    words = [(part & ~8).astype(np.uint64) for part in (row, col)]
    words += [np.broadcast_to(part, shape) for part in (seeds & low, seeds >> np.uint64(32))]
    keys = [np.uint64(0), np.uint64(0)]
    for _ in range(7):
        first, second = np.uint64(0xD2511F53) * words[0], np.uint64(0xCD9E8D57) * words[2]
        shift = np.uint64(32)
        words = [
            (second >> shift) ^ words[1] ^ keys[0],
            second & low,
            (first >> shift) ^ words[3] ^ keys[1],
            first & low,
        ]
        keys = [(key + np.uint64(weyl)) & low for key, weyl in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    chosen = np.choose(2 * (row >> 3 & 1) + (col >> 3 & 1), words)
    return torch.from_numpy(chosen >= np.uint64(round(dropout_p * (1 << 32))))


def formula(call: Call, dtype: torch.dtype, rounding: float = 0.0) -> list[Tensor | None]:
    """Return out, lse, dq, dk, dv, dbias of plain torch operations in `dtype`, as float64.

    With `rounding`, the gradients are those that one sample of rounding errors of that relative size in `delta` and dP
    makes: where a few keys have all the weight, dS is the small difference of the two.
    """
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in (call.query, call.key, call.value)]
    query, key, value = leaves
    bias = None
    if call.bias is not None:
        bias = call.bias.detach().to(torch.promote_types(dtype, call.bias.dtype)).requires_grad_()
    heads = query.shape[2]
    q, k, v = query.transpose(1, 2), per_head(key.transpose(1, 2), heads), per_head(value.transpose(1, 2), heads)
    scores = q @ k.transpose(-1, -2) * call.scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if bias is not None:
        scores = scores + per_head(bias, heads)
    scores = torch.where(call.keep, scores, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    scores = torch.where(empty, 0.0, scores)
    lse = torch.logsumexp(scores.to(torch.promote_types(dtype, torch.float32)), -1)
    probs = torch.where(empty, 0.0, torch.softmax(scores, -1))
    if call.dropout_p:
        kept = (1 << 32) - round(call.dropout_p * (1 << 32))  # in steps of 2^-32, as the words are compared
        probs = torch.where(call.dropout_keep, probs * ((1 << 32) / kept), 0.0) if kept else probs * 0
    out = (probs.to(dtype) @ v).transpose(1, 2)
    lse = torch.where(empty.squeeze(-1), -math.inf, lse)
    total = (out.double() * call.grad_out.double()).sum()
    if call.grad_lse is not None:
        total = total + (torch.where(empty.squeeze(-1), 0.0, lse).double() * call.grad_lse.double()).sum()
    if rounding:
        sizes = (out * call.grad_out.to(dtype)).transpose(1, 2).norm(dim=-1, keepdim=True).detach()
        signs = torch.randint(0, 2, probs.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        total = (probs.detach() * (rounding * sizes * signs) * scores).sum()
    wanted = [x for x in (query, key, value, bias) if x is not None]
    grads = torch.autograd.grad(total, wanted, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, wanted, strict=True)]
    return [x.detach().double() for x in (out, lse, *grads)] + ([] if bias is not None else [None])


def poisoned(tensor: Tensor) -> Tensor:
    """Return an uninitialised tensor of the same shape, a view into a wider buffer of NaN."""
    wider = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), math.nan, dtype=tensor.dtype)
    return wider[..., 1 : 1 + tensor.shape[-1]]


def asked(call: Call, varlen: Varlen | None = None) -> calls.Call:
    """Return the call as launchers take it."""
    inputs = (call.query, call.key, call.value, call.bias, call.mask)
    return calls.Call(*inputs, None, call.seed, varlen, call.options)


def run_forward(call: Call, varlen: Varlen | None = None) -> calls.Result:
    """Run the forward into poisoned outputs, the row maximum among them."""
    result = calls.Result(*(poisoned(x) for x in meta.forward_outputs(call.query, call.value, True)))
    native.forward(asked(call, varlen), result, None)
    return result


def run_backward(call: Call, saved: calls.Saved, varlen: Varlen | None = None) -> list[Tensor | None]:
    """Run the backward into poisoned outputs; return dq, dk, dv, dbias."""
    grads = [None if x is None else poisoned(x) for x in (call.query, call.key, call.value, call.bias)]
    assert call.grad_out is not None
    native.backward(asked(call, varlen), saved, calls.Gradients(call.grad_out, call.grad_lse, *grads), None)
    return grads


def launch(call: Call, varlen: Varlen | None = None) -> list[Tensor | None]:
    """Run both launchers into poisoned outputs; return out, lse, dq, dk, dv, dbias."""
    result = run_forward(call, varlen)
    saved = calls.Saved(result.out, result.lse, result.lse_tail)
    grads = run_backward(call, saved, varlen)
    assert result.row_max is not None
    assert torch.equal(result.row_max == -math.inf, result.lse == -math.inf)
    assert result.lse_tail[result.lse == -math.inf].eq(0).all()
    return [result.out, result.lse, *grads]


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error, infinite where NaN or Inf stand in different places."""
    actual, expected = actual.double(), expected.double()
    special = ~expected.isfinite()
    if not torch.equal(special, ~actual.isfinite()) or not torch.equal(expected[special], actual[special]):
        return math.inf
    actual, expected = actual[~special], expected[~special]
    if actual.numel() == 0:
        return 0.0
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def check(call: Call, actual: list[Tensor | None] | None = None) -> list[Tensor | None]:
    """Hold out, lse and every gradient to the error budget of contract: twice eager torch plus eps."""
    dtype = call.query.dtype
    actual = launch(call) if actual is None else actual
    exact = formula(call, torch.float64)
    eager = exact if dtype == torch.float64 else formula(call, dtype)
    names, cancelling = ("out", "lse", "dq", "dk", "dv", "dbias"), ("dq", "dk", "dbias")
    for name, got, want, plain in zip(names, actual, exact, eager, strict=True):
        if want is None:
            continue
        assert got.shape == want.shape, name
        eps = max(EPS[dtype], EPS[got.dtype])
        # A gradient that is nothing but cancellation (softmax over one key) has no relative error: absolute, then.
        if want.isfinite().all() and want.norm() <= 1e-3 * math.sqrt(want.numel()) * eps:
            assert got.double().abs().le(eps * call.value.shape[-1]).all(), name
            continue
        allowed = 2 * min(error(plain, want), 1.0) + eps
        if error(got, want) > allowed and name in cancelling:
            lost = formula(call, torch.float64, rounding=torch.finfo(dtype).eps)[names.index(name)]
            allowed += 4 * (lost.norm() / want.norm()).item()
        assert error(got, want) <= allowed, f"{name}: {error(got, want):.2e} > {allowed:.2e}"
    empty = ~call.keep.any(-1)
    assert actual[0].transpose(1, 2)[empty].eq(0).all()
    assert actual[1][empty].eq(-math.inf).all()
    assert actual[2].transpose(1, 2)[empty].eq(0).all()
    unseen = ~call.keep.any(-2).unflatten(1, (call.key.shape[2], -1)).any(2)
    for gradient in actual[3:5]:
        assert gradient.transpose(1, 2)[unseen].eq(0).all()
    return actual


def packed(mask: Tensor, seqlen_q: int, band: tuple[int, int] = FREE, q_segments=None, k_segments=None, **size) -> Mask:
    """Return the mask of a dense one through the launcher, outputs poisoned."""
    outputs = meta.pack_mask_outputs(mask, size["batch"], size["heads"], seqlen_q, *band)
    for output in outputs:
        output.fill_(-559038737)
    native.pack_mask(mask, q_segments, k_segments, seqlen_q, *band, *outputs)
    return Mask(*outputs)


def listed(k_segments: Tensor, seqlen_q: int, band: tuple[int, int] = FREE, q_segments: Tensor | None = None) -> Mask:
    """Return the mask of segments through the launcher, outputs poisoned."""
    batch = max(k_segments.shape[0], 1 if q_segments is None else q_segments.shape[0])
    size = (batch, k_segments.shape[1], seqlen_q, k_segments.shape[2], *band)
    outputs = meta.list_tiles_outputs(k_segments, *size)
    for output in outputs:
        output.fill_(-559038737)
    native.list_tiles(q_segments, k_segments, seqlen_q, *band, *outputs)
    return Mask(*outputs, None, None, q_segments, k_segments)


def blocky(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return a random mask with empty, full and mixed tiles, whatever its shape."""
    density = torch.rand((*shape[:-2], (shape[-2] + 127) // 128, (shape[-1] + 127) // 128), generator=generator)
    density = torch.where(density < 0.3, 0.0, torch.where(density > 0.7, 1.0, density))
    density = density.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., : shape[-2], : shape[-1]]
    return torch.rand(shape, generator=generator) < density


def masked(call: Call, keep: Tensor) -> Call:
    """Return the call under the dense mask `keep` `[1 or B, 1 or H, Sq, Sk]`, prepared as bits."""
    mask = packed(keep, keep.shape[2], batch=keep.shape[0], heads=keep.shape[1])
    return dataclasses.replace(call, keep=keep.expand(call.keep.shape), mask=mask)


def plain(seqlen_q: int = 300, seqlen_k: int = 260, heads: int = 2, dtype: torch.dtype = torch.float32) -> Call:
    """Return a small unmasked problem."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad_out = (
        torch.randn(1, length, heads, 32, generator=generator).to(dtype)
        for length in (seqlen_q, seqlen_k, seqlen_k, seqlen_q)
    )
    keep = torch.ones(1, heads, seqlen_q, seqlen_k, dtype=torch.bool)
    return Call(query, key, value, keep, grad_out=grad_out)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return `[B, S, H, D]` in one of the layouts that must cost no copy."""
    if layout == "heads_first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed":
        return torch.stack((tensor, torch.full_like(tensor, math.nan)), 2)[:, :, 0]
    if layout == "expanded":
        return tensor[:, :, :1].expand(tensor.shape)
    return tensor


def draw(seed: int, dtype: torch.dtype) -> Call:
    """Draw a problem over all features."""
    pick = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    batch, kv_heads, group = pick.choice((1, 2, 3)), pick.choice((1, 2)), pick.choice((1, 1, 2, 3))
    heads, seqlen_q, seqlen_k = kv_heads * group, pick.choice(LENGTHS), pick.choice(LENGTHS)
    dim, value_dim = pick.choice((*WIDTHS, 264)), pick.choice((*WIDTHS, 300))

    def normal(*shape: int) -> Tensor:
        tensor = torch.randn(shape, generator=generator).to(dtype)
        return laid_out(tensor, pick.choice(("plain", "heads_first", "packed", "expanded")))

    query, key = normal(batch, seqlen_q, heads, dim), normal(batch, seqlen_k, kv_heads, dim)
    value, grad_out = normal(batch, seqlen_k, kv_heads, value_dim), normal(batch, seqlen_q, heads, value_dim)
    off = pick.choice((0, seqlen_k - seqlen_q))
    left, right = pick.randrange(0, 150), pick.randrange(0, 150)
    band = pick.choice((FREE, FREE, (-UNBOUNDED, off), (off - left, off + right), (off - left, off)))
    keep = band_keep(seqlen_q, seqlen_k, band).expand(batch, heads, -1, -1)
    prepared, kind = NO_MASK, pick.choice(("none", "bits", "segments", "both"))
    mask_batch, mask_heads = pick.choice((1, batch)), pick.choice((1, kv_heads, heads))
    q_segments = k_segments = None
    if kind in ("segments", "both"):
        k_segments = torch.randint(-1, 2, (mask_batch, mask_heads, seqlen_k), generator=generator, dtype=torch.int32)
        if pick.random() < 0.5:
            k_segments = k_segments.sort(-1).values
        if pick.random() < 0.5:
            q_segments = torch.randint(
                0, 3, (pick.choice((1, batch)), seqlen_q), generator=generator, dtype=torch.int32
            )
        rows = torch.zeros(1, 1, 1, 1) if q_segments is None else q_segments[:, None, :, None]
        keep = keep & per_head(rows == k_segments.unsqueeze(2), heads)
        prepared = listed(k_segments, seqlen_q, band, q_segments)
    if kind in ("bits", "both"):
        mask = blocky((mask_batch, mask_heads, pick.choice((1, seqlen_q)), seqlen_k), generator)
        keep = keep & per_head(mask, heads)
        sizes = [x.shape[0] for x in (mask, q_segments, k_segments) if x is not None]
        prepared = packed(mask, seqlen_q, band, q_segments, k_segments, batch=max(sizes), heads=mask_heads)
    call = Call(query, key, value, keep, mask=prepared, band=band, grad_out=grad_out)
    if pick.random() < 0.5:
        shape = (pick.choice((1, batch)), pick.choice((1, kv_heads, heads)), pick.choice((1, seqlen_q)), seqlen_k)
        call.bias = torch.randn(shape, generator=generator).to(pick.choice((dtype, torch.float32)))
    call.scale = pick.choice((dim**-0.5, 0.2, -0.3, 0.0))
    call.softcap = pick.choice((0.0, 0.0, 1.5))
    if pick.random() < 0.3:
        call.dropout_p = pick.choice((0.1, 0.5, 1.0))
        seeds = (pick.choice((1, batch)), pick.choice((1, heads)))
        call.seed = torch.tensor([pick.randrange(-(1 << 63), 1 << 63) for _ in range(math.prod(seeds))]).view(seeds)
        call.origins = (pick.choice((0, 77)), pick.choice((0, 0, 256, 1001)))
        call.dropout_keep = philox_keep(call.seed, tuple(keep.shape), call.dropout_p, call.origins)
    if pick.random() < 0.5:
        call.grad_lse = torch.randn(batch, heads, seqlen_q, generator=generator).to(meta.lse_dtype(dtype))
    return call

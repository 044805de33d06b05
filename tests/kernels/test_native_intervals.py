"""Masks of intervals through the C++ kernels: as tiles, and with keys gathered for epochs of queries."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from native_calls import Call, asked, band_keep, check, launch, per_head, philox_keep, plain, run_forward
from torch import Tensor

from dmattn_ops import meta
from dmattn_ops.call import UNBOUNDED, Mask
from dmattn_ops.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"THE C++ KERNELS ARE NOT TESTED: {native.reason()}")

FREE = (-UNBOUNDED, UNBOUNDED)


def dense(mask: Mask, seqlen_q: int, band: tuple[int, int] = FREE) -> Tensor:
    """Return a mask of intervals as bool `[Bm, Hm, Sq, Sk]`."""
    start, end, hidden_from, hidden_to = (
        None if x is None else x.unsqueeze(2) for x in (mask.start, mask.end, mask.hidden_from, mask.hidden_to)
    )
    rows = torch.arange(seqlen_q).view(-1, 1)
    keep = (start <= rows) & (rows < end) & band_keep(seqlen_q, start.shape[-1], band)
    return keep if hidden_from is None else keep & ~((hidden_from <= rows) & (rows < hidden_to))


def intervals(shape: tuple[int, int, int], seqlen_q: int, longest: int, pick: random.Random, hidden: bool) -> Mask:
    """Return intervals of up to `longest` queries that begin anywhere, also outside, some of them empty."""
    generator = torch.Generator().manual_seed(pick.randrange(1 << 30))

    def numbers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    start = numbers(-20, seqlen_q + 20)
    if pick.random() < 0.3:
        start = start.sort(-1).values
    end = start + numbers(-3, longest)
    hidden_from = start + numbers(-5, longest)
    nothing = (None, None)
    return Mask(*(None,) * 6, start, end, *((hidden_from, hidden_from + numbers(-5, longest)) if hidden else nothing))


def draw(seed: int, dtype: torch.dtype, lengths: tuple[int, ...], longest: tuple[int, ...]) -> Call:
    """Draw a problem under a mask of intervals."""
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, kv_heads, group = pick.choice((1, 2)), pick.choice((1, 2)), pick.choice((1, 2, 3))
    heads, seqlen_q, seqlen_k = kv_heads * group, pick.choice(lengths), pick.choice(lengths)
    dim, value_dim = pick.choice((1, 16, 33, 64)), pick.choice((1, 16, 20, 64))
    query, key, value, grad_out = (
        torch.randn(batch, length, count, width, generator=generator).to(dtype)
        for length, count, width in (
            (seqlen_q, heads, dim), (seqlen_k, kv_heads, dim), (seqlen_k, kv_heads, value_dim), (seqlen_q, heads, value_dim)
        )
    )  # fmt: skip
    band = pick.choice((FREE, FREE, (-UNBOUNDED, seqlen_k - seqlen_q), (-200, 100)))
    shape = (pick.choice((1, batch)), pick.choice((1, kv_heads, heads)), seqlen_k)
    mask = intervals(shape, seqlen_q, pick.choice(longest), pick, pick.random() < 0.5)
    keep = per_head(dense(mask, seqlen_q, band), heads).expand(batch, -1, -1, -1)
    mask = mask._replace(at_most=pick.choice((None, int(keep.sum(-1).max()))))
    call = Call(query, key, value, keep, mask=mask, band=band, grad_out=grad_out, scale=0.3)
    if pick.random() < 0.5:
        rows = pick.choice((1, 1, seqlen_q))
        bias = (pick.choice((1, batch)), pick.choice((1, kv_heads, heads)), rows, seqlen_k)
        call.bias = torch.randn(bias, generator=generator).to(pick.choice((dtype, torch.float32)))
    call.softcap = pick.choice((0.0, 0.0, 1.5))
    if pick.random() < 0.3:
        call.dropout_p, call.origins = 0.4, (pick.choice((0, 77)), pick.choice((0, 1001)))
        call.seed = torch.tensor([[pick.randrange(-(1 << 63), 1 << 63)]])
        call.dropout_keep = philox_keep(call.seed, tuple(keep.shape), call.dropout_p, call.origins)
    if pick.random() < 0.5:
        call.grad_lse = torch.randn(batch, heads, seqlen_q, generator=generator).to(meta.lse_dtype(dtype))
    return call


DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize("seed", range(80))
def test_random_intervals_hold_the_error_budget(seed):
    check(draw(seed, DTYPES[seed % 4], (1, 16, 33, 127, 128, 129, 256, 300), (1, 30, 300)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(32))
def test_short_scattered_intervals_hold_the_error_budget(seed):
    # Few queries see each key, and neighbouring keys are seen by others: keys are gathered where bias allows.
    check(draw(seed, DTYPES[seed % 4], (700, 800, 1100), (2, 40, 150)))


def key_lifetimes(scores: Tensor, keep: int) -> Mask:
    """Return the mask of the `keep` best keys of each prefix, by sorting every prefix: scores `[B, H, S]`."""
    seqlen = scores.shape[-1]
    end = torch.full(scores.shape, seqlen, dtype=torch.int32)
    for i in range(seqlen - 1, -1, -1):
        worse = scores[..., : i + 1].argsort(dim=-1, descending=True, stable=True)[..., keep:]
        end.scatter_(-1, worse, i)
    start = torch.arange(seqlen, dtype=torch.int32).expand(scores.shape).contiguous()
    return Mask(start=start, end=end, at_most=keep)


def dynamic(seqlen: int, keep: int, heads: tuple[int, int, int]) -> Call:
    """Return a problem under a dynamic mask whose scores, the bias too, are those of `heads[2]` heads."""
    generator = torch.Generator().manual_seed(seqlen)
    query, key, value, grad_out = (
        torch.randn(1, seqlen, count, 32, generator=generator) for count in (heads[0], heads[1], heads[1], heads[0])
    )
    scores = torch.randn(1, heads[2], seqlen, generator=generator)
    mask = key_lifetimes(scores, keep)
    kept = per_head(dense(mask, seqlen), heads[0])
    return Call(query, key, value, kept, bias=scores.unsqueeze(2), mask=mask, grad_out=grad_out)


@pytest.mark.parametrize("heads", [(4, 2, 2), (4, 2, 4), (4, 2, 1), (2, 2, 2)])
def test_a_dynamic_mask_with_its_scores_as_bias_equals_the_dense_one(heads):
    call = dynamic(1000, 96, heads)
    assert call.keep.sum(-1).max() == 96
    check(call)


def test_gathered_keys_do_not_depend_on_timing_or_threads():
    call = dynamic(1500, 100, (4, 2, 2))
    call.dropout_p, call.seed = 0.2, torch.tensor([[99]])
    threads, runs = torch.get_num_threads(), []
    try:
        for number in (1, 2, 8, 2):
            torch.set_num_threads(number)
            runs.append(launch(call))
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("length", [260, 1000])
def test_nan_at_keys_that_nobody_sees_never_arrives(length):
    call = dynamic(length, 50, (2, 1, 1)) if length > 300 else plain()
    if length <= 300:
        start, end = torch.zeros(1, 1, 260, dtype=torch.int32), torch.full((1, 1, 260), 300, dtype=torch.int32)
        call.mask = Mask(start=start, end=end)
    call.mask.end[..., 5::7] = 0
    clean = launch(call)
    call.key[:, 5::7] = math.nan
    call.value[:, 5::7] = math.inf
    for before, after in zip(clean, launch(call), strict=True):
        if before is not None:
            torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


def test_documents_and_causal_intervals_equal_a_band_beside_segments():
    # Wholly visible tiles, wholly hidden ones, and a hidden interval that covers whole tiles.
    call = plain(640, 640)
    first = torch.arange(640).div(256, rounding_mode="floor").mul(256).int()
    hidden_from = torch.full((640,), 512, dtype=torch.int32)
    lists = [x.view(1, 1, -1) for x in (first, torch.full_like(first, 640), hidden_from, hidden_from + 128)]
    call.mask = Mask(*(None,) * 6, *lists)
    call.band = (-UNBOUNDED, 0)
    call.keep = dense(call.mask, 640, call.band).expand(1, 2, -1, -1)
    check(call)


@pytest.mark.parametrize("keep", [50, 3])
def test_a_broken_promise_is_an_error(keep):
    call = dynamic(400, keep, (2, 1, 1))
    check(call)
    call.mask = call.mask._replace(at_most=keep - 1)
    with pytest.raises(ValueError, match=f"no query sees more than {keep - 1} keys of a head, but one sees {keep}"):
        run_forward(call)


def test_a_promise_counts_what_the_band_and_hidden_intervals_leave():
    call = plain(300, 300)
    start, end = torch.zeros(1, 1, 300, dtype=torch.int32), torch.full((1, 1, 300), 300, dtype=torch.int32)
    call.mask = Mask(start=start, end=end, at_most=10)
    call.band = (-9, 0)
    run_forward(call)
    hidden = dataclasses.replace(call, band=(-10, 0))
    with pytest.raises(ValueError, match="one sees 11"):
        run_forward(hidden)
    hidden.mask = call.mask._replace(hidden_from=start + 10, hidden_to=end)
    hidden.keep = dense(hidden.mask, 300, hidden.band).expand(1, 2, -1, -1)
    with pytest.raises(ValueError, match="at_most promised"):
        native.forward(asked(hidden)._replace(mask=hidden.mask._replace(at_most=9)), run_forward(call), None)

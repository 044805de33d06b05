"""`KeptKeys` on a GPU: against the whole sequence and the CPU, in CUDA graphs, compiled, and without reading on the host."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dmattn_ops import KeptKeys, dynamic_mask, flash_dmattn_func
from dmattn_ops.kernels.kept import chunk_launch, chunk_reference, launch, reference
from dmattn_ops.masks.kept import Appended, Rule, Token
from dmattn_ops.meta import keep_chunk_outputs
from tests.support.architecture import needs_hopper

pytestmark = pytest.mark.gpu
Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(
    length: int, batch: int = 2, heads: int = 8, kv_heads: int = 2, dim: int = 64, dtype=torch.bfloat16
) -> Parts:
    query, key, value = (
        torch.randn(batch, length, each, dim, dtype=dtype, device="cuda") for each in (heads, kv_heads, kv_heads)
    )
    scores = torch.randn(batch, kv_heads, length, device="cuda")
    return query, key, value, scores, scores.unsqueeze(2)


def now(parts: Parts, start: int, stop: int) -> Parts:
    return *(part[:, start:stop] for part in parts[:3]), *(part[..., start:stop] for part in parts[3:])  # type: ignore[return-value]


def cache_for(parts: Parts, keep: int, **more) -> KeptKeys:
    key = parts[1]
    return KeptKeys(key.shape[0], key.shape[2], key.shape[3], keep, dtype=key.dtype, device="cuda", **more)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("keep", "rule"), [(5, {"keep_last": 3}), (100, {"keep_first": 4, "keep_last": 16}), (700, {})]
)
def test_prompts_and_steps_are_within_the_error_of_the_whole(dtype: torch.dtype, keep: int, rule: dict):
    parts = inputs(1500, dtype=dtype)
    cache, mask = cache_for(parts, keep, **rule), dynamic_mask(parts[3], keep, **rule)
    outs, start = [], 0
    for size in (900, 1, 1, 398, *[1] * 200):
        outs.append(cache.attend(*now(parts, start, start + size)))
        start += size
    whole = flash_dmattn_func(*parts[:3], mask, parts[4])
    on_cpu = [part.double().cpu() for part in parts]
    exact = flash_dmattn_func(*on_cpu[:3], dynamic_mask(parts[3].cpu(), keep, **rule), on_cpu[4])
    error, theirs = ((each.cpu().double() - exact).norm() / exact.norm() for each in (torch.cat(outs, 1), whole))
    assert error <= 2 * theirs + {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 3e-5}[dtype]


def test_a_captured_step_is_replayed_for_every_position():
    parts = inputs(300)
    cache = cache_for(parts, 64, keep_last=8, rollback=2)
    cache.attend(*now(parts, 0, 100))
    plain = copy.deepcopy(cache)
    given = tuple(part.clone() for part in now(parts, 100, 101))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm = copy.deepcopy(cache)
        for _ in range(3):
            warm.attend(*given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cache.attend(*given)
    for i in range(100, 300):
        for part, new in zip(given, now(parts, i, i + 1), strict=True):
            part.copy_(new)
        graph.replay()
        torch.testing.assert_close(out, plain.attend(*now(parts, i, i + 1)), atol=2e-2, rtol=2e-2)
    assert torch.equal(cache.length, plain.length) and torch.equal(cache.places.sort(-1)[0], plain.places.sort(-1)[0])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_steps_are_those_of_eager_mode(mode: str):
    torch._dynamo.reset()
    parts = inputs(60)
    cache = cache_for(parts, 16, keep_first=1, keep_last=4)
    cache.attend(*now(parts, 0, 30))
    plain = copy.deepcopy(cache)
    step = torch.compile(cache.attend, fullgraph=True, mode=mode)
    for i in range(30, 60):
        out = step(*now(parts, i, i + 1)).clone()
        torch.testing.assert_close(out, plain.attend(*now(parts, i, i + 1)), atol=2e-2, rtol=2e-2)


def test_nothing_is_read_on_the_host():
    parts = inputs(80)
    cache = cache_for(parts, 16, keep_first=1, keep_last=4, rollback=3)
    padding, ids = torch.rand(2, 80, device="cuda") < 0.8, torch.arange(80, device="cuda")[None].expand(2, -1) // 33
    count, index = torch.tensor([1, 9], device="cuda"), torch.tensor([1, 1], device="cuda")
    for step in range(2):  # the first compiles kernels
        with torch.cuda.stream(torch.cuda.current_stream()):
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            try:
                for start, stop in ((0, 50), (50, 51), (51, 80)):
                    here = {"padding": padding[:, start:stop], "documents": ids[:, start:stop]}
                    cache.attend(*now(parts, start, stop), **here)
                cache.crop(2)
                cache.crop(count)  # clamped: more cannot be taken back
                cache.reorder(index)
                cache.reset()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_padding_and_documents_are_those_of_the_cpu():
    parts = inputs(120, dtype=torch.float32)
    padding, ids = torch.rand(2, 120) < 0.7, torch.arange(120)[None].expand(2, -1) // 47
    caches = [cache_for(parts, 9, keep_first=2, keep_last=5, rollback=4)]
    caches.append(caches[0].to("cpu"))
    for start, stop in ((0, 70), (70, 71), (71, 72), (72, 120)):
        here = [now(parts, start, stop), tuple(part.cpu() for part in now(parts, start, stop))]
        outs = []
        for cache, given in zip(caches, here, strict=True):
            more = {
                "padding": padding[:, start:stop].to(cache.device),
                "documents": ids[:, start:stop].to(cache.device),
            }
            outs.append(cache.attend(*given, **more, return_lse=True))
            cache.crop(1)
            outs.append(cache.attend(*(part[:, -1:] if i < 3 else part[..., -1:] for i, part in enumerate(given))))
        for one, other in zip((*outs[0], outs[1]), (*outs[2], outs[3]), strict=True):
            torch.testing.assert_close(one.cpu(), other, atol=1e-4, rtol=1e-4)


def test_memory_does_not_grow_over_a_long_text():
    parts = inputs(4096)
    cache = cache_for(parts, 128, keep_last=16)
    cache.attend(*now(parts, 0, 4000))  # which makes room for the bias, too
    torch.cuda.synchronize()
    size, before = cache.nbytes, torch.cuda.memory_allocated()
    for i in range(4000, 4096):
        cache.attend(*now(parts, i, i + 1))
    torch.cuda.synchronize()
    assert cache.nbytes == size and torch.cuda.memory_allocated() <= before + (1 << 20)


@pytest.mark.parametrize("keep", [5, 300, 5000])
def test_a_step_leaves_the_bits_of_plain_operations(keep: int):
    """With ties and NaN among the scores, documents, padding and a bias; caches of one pass over their slots and of several."""
    rule = Rule(keep, 2, 7, 3, False)
    caches = [KeptKeys(3, 2, 24, keep, keep_first=2, keep_last=7, rollback=3, device="cuda") for _ in range(2)]
    for cache in caches:
        cache._make_room(torch.zeros(1), torch.zeros(1, 4, 1, 1, device="cuda"), torch.zeros(1))
    for i in range(700 if keep < 1000 else 30):
        scores = (
            torch.randn(3, 2, 1, device="cuda")
            .round(decimals=1)
            .masked_fill(torch.rand(3, 2, 1, device="cuda") < 0.1, math.nan)
        )
        rows = [torch.randn(3, 1, 2, 24, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        padding = torch.rand(3, 1, device="cuda") < 0.9
        documents = torch.full((1, 1), i // 250, device="cuda")
        token = Token(*rows, scores, torch.randn(3, 4, 1, 1, device="cuda"), padding, documents)
        seen = [torch.full((3, 2, caches[0].slots), -1, dtype=torch.int32, device="cuda") for _ in range(2)]
        for cache, step, into in zip(caches, (launch.keep_step, reference.keep_step), seen, strict=True):
            step(cache._stored(), token, rule, into)
        assert torch.equal(*seen)
    for name, part in caches[0]._state().items():
        assert torch.equal(part.nan_to_num(7), getattr(caches[1], name).nan_to_num(7)), name


@pytest.mark.parametrize("seed", range(14))
def test_a_chunk_leaves_the_bits_of_plain_operations(seed: int):
    """With ties, NaN and infinities among the scores, and positions that are taken back between the chunks."""
    pick, generator = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
    keep, keep_first, keep_last = pick.choice((0, 1, 7, 300, 2048)), pick.choice((0, 2)), pick.choice((0, 7, 129))
    batch, heads, (dim, value_dim) = pick.choice((1, 3)), pick.choice((1, 4)), pick.choice(((24, 64), (128, 320)))
    rollback, group, wide = pick.choice((0, 3)), pick.choice((0, 1, 2)), pick.random() < 0.3
    named = {"keep_first": keep_first, "keep_last": keep_last, "rollback": rollback, "value_dim": value_dim}
    caches = [KeptKeys(batch, heads, dim, keep, **named, device="cuda") for _ in range(2)]
    rule = Rule(keep, keep_first, keep_last, rollback, False)
    given = torch.zeros(1, heads * group, 1, 1, device="cuda") if group else None
    for cache in caches:
        cache._make_room(torch.zeros(1, dtype=torch.float64 if wide else torch.float32), given, None)
    for count in (pick.randint(2, 3000), 2, pick.randint(2, 3000), 8192, 65):
        scores = torch.randn(batch, heads, count, device="cuda", generator=generator)
        scores = scores.round(decimals=pick.choice((1, 7)))
        scores[torch.rand(scores.shape, device="cuda", generator=generator) < 0.05] = pick.choice((math.nan, math.inf))
        scores = scores.to(torch.float64 if wide else pick.choice((torch.float32, torch.bfloat16)))
        rows = [
            torch.randn(batch, count, heads, each, dtype=torch.bfloat16, device="cuda", generator=generator)
            for each in (dim, value_dim)
        ]
        bias = None
        if group and pick.random() < 0.8:
            bias = torch.randn(pick.choice((1, batch)), heads * group, 1, count, device="cuda", generator=generator)
        token, made = Token(*rows, scores, bias, None, None), []
        for cache, kernels in zip(caches, (chunk_launch, chunk_reference), strict=True):
            stored = cache._stored()
            *outputs, biases = keep_chunk_outputs(stored.key, stored.value, stored.bias, count)
            made.append(Appended(*outputs, biases if group else None))
            kernels.keep_chunk(stored, token, rule, made[-1])
            cache.crop(min(rollback, 2))
        for name, ours, theirs in zip(Appended._fields, *made, strict=True):
            assert ours is theirs or torch.equal(ours, theirs), name
        for name, part in caches[0]._state().items():
            assert torch.equal(part.nan_to_num(7), getattr(caches[1], name).nan_to_num(7)), name


def test_captured_and_compiled_chunks_are_those_of_eager_mode():
    parts = inputs(1800)
    cache = cache_for(parts, 64, keep_last=8, rollback=2)
    cache.attend(*now(parts, 0, 600))
    caches = [cache, *(copy.deepcopy(cache) for _ in range(3))]
    given = tuple(part.clone() for part in now(parts, 600, 1000))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            caches[3].attend(*given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = caches[1].attend(*given)
    torch._dynamo.reset()
    compiled = torch.compile(caches[2].attend, fullgraph=True, dynamic=False)
    for start in (600, 1000, 1400):
        for part, new in zip(given, now(parts, start, start + 400), strict=True):
            part.copy_(new)
        graph.replay()
        eager = caches[0].attend(*given)
        for out in (replayed, compiled(*given)):
            torch.testing.assert_close(eager, out, atol=2e-2, rtol=2e-2)
        for name, part in caches[0]._state().items():
            assert torch.equal(part, getattr(caches[1], name)) and torch.equal(part, getattr(caches[2], name)), name


def launches_of(call: Callable[[], object]) -> list[str]:
    """Return the names of what a call runs on the GPU."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def test_a_chunk_is_few_launches_and_reads_nothing_on_the_host():
    parts = inputs(5000)
    cache = cache_for(parts, 64)
    for start in (0, 1000, 2000):
        cache.attend(*now(parts, start, start + 1000))
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.attend(*now(parts, 3000, 4000))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = launches_of(lambda: cache.attend(*now(parts, 4000, 5000)))
    assert names[:5] == ["begin_chunk", "sort_runs", "write_deaths", "end_chunk", "store_chunk"]


@needs_hopper
def test_a_step_is_two_launches_where_the_batch_fills_the_gpu():
    parts = inputs(200, batch=32, heads=8, kv_heads=4)
    cache = cache_for(parts, 64)
    cache.attend(*now(parts, 0, 150))
    for i in range(150, 155):
        cache.attend(*now(parts, i, i + 1))
    names = launches_of(lambda: cache.attend(*now(parts, 155, 156)))
    assert names == ["keep_step_kernel", "decode_kernel"]

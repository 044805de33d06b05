"""`KeptKeys` against the whole sequence: random uses, steps beside chunks, what is done with a cache, and what is refused."""

from __future__ import annotations

import copy
import io
import math
import pickle
import random

import pytest
import torch
from kept_cases import Problem
from selection_cases import SHAPES_OF_SCORES, draw_documents, draw_scores
from torch import Tensor
from torch._dynamo.utils import counters

import dmattn_ops
from dmattn_ops import KeptKeys, dynamic_mask, flash_dmattn_func


@pytest.mark.sampled(7)
@pytest.mark.parametrize("first", range(0, 2100, 20))
def test_any_use_gives_what_the_whole_sequence_gives(first: int):
    for seed in range(first, first + 20):
        assert Problem(seed).run() > 0


Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(
    batch: int = 2, length: int = 24, heads: int = 4, kv_heads: int = 2, dim: int = 8, dtype=torch.float32
) -> Parts:
    query, key, value = (torch.randn(batch, length, each, dim, dtype=dtype) for each in (heads, kv_heads, kv_heads))
    return query, key, value, torch.randn(batch, kv_heads, length)


def cache_for(parts: Parts, keep: int = 3, **more) -> KeptKeys:
    _, key, value, _ = parts
    return KeptKeys(key.shape[0], key.shape[2], key.shape[3], keep, value_dim=value.shape[3], dtype=key.dtype, **more)


def call(cache: KeptKeys, parts: Parts, start: int, stop: int, bias: Tensor | None = None, **more) -> Tensor:
    query, key, value = (part[:, start:stop] for part in parts[:3])
    more = {name: part[:, start:stop] if isinstance(part, Tensor) else part for name, part in more.items()}
    return cache.attend(
        query, key, value, parts[3][..., start:stop], None if bias is None else bias[..., start:stop], **more
    )


def in_calls(cache: KeptKeys, parts: Parts, sizes: list[int], bias: Tensor | None = None, **more) -> Tensor:
    """Return out `[B, S, H, D]` of calls with so many positions each."""
    outs, start = [], 0
    for size in sizes:
        outs.append(call(cache, parts, start, start + size, bias, **more))
        start += size
    return torch.cat(outs, 1)


@pytest.mark.parametrize("sizes", [[1] * 90, [90], [1, 40, 1, 1, 7, 40], [89, 1]], ids=str)
@pytest.mark.parametrize("kind", SHAPES_OF_SCORES)
def test_it_is_flash_dmattn_func_with_the_whole_mask(kind: str, sizes: list[int]):
    """Chunks are larger than the cache, too; every kind of scores; documents of many lengths."""
    query, key, value, _ = inputs(length=90, dtype=torch.float64)
    scores = draw_scores((2, 2, 90), kind, torch.Generator().manual_seed(5)).float()
    documents, rule = draw_documents(2, 90, random.Random(3)), {"keep_first": 2, "keep_last": 4}
    for ids in (None, documents):
        bias = torch.randn(2, 4, 1, 90)
        whole = flash_dmattn_func(query, key, value, dynamic_mask(scores, 7, **rule, documents=ids), bias)
        parts = (query, key, value, scores)
        out = in_calls(cache_for(parts, 7, **rule), parts, sizes, bias, documents=ids)
        torch.testing.assert_close(out, whole, atol=1e-11, rtol=1e-11)


def test_memory_does_not_grow():
    parts = inputs(length=300)
    cache = cache_for(parts, 5, keep_first=1, keep_last=3)
    addresses, size = cache.key.data_ptr(), cache.nbytes
    in_calls(cache, parts, [100] + [1] * 100 + [100])
    assert (cache.key.data_ptr(), cache.nbytes) == (addresses, size) and cache.slots == 16
    assert size == sum(part.nbytes for part in vars(cache).values() if isinstance(part, Tensor))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_dtype_is_within_the_error_of_the_whole(dtype: torch.dtype):
    parts = inputs(length=50, dtype=dtype)
    exact = flash_dmattn_func(*(part.double() for part in parts[:3]), dynamic_mask(parts[3], 3, keep_last=2))
    whole = flash_dmattn_func(*parts[:3], dynamic_mask(parts[3], 3, keep_last=2))
    out = in_calls(cache_for(parts, 3, keep_last=2), parts, [20] + [1] * 30)
    assert out.dtype == dtype
    error, theirs = ((each.double() - exact).norm() / exact.norm() for each in (out, whole))
    assert error <= 2 * theirs + {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 3e-5}[dtype]


@pytest.mark.parametrize(("rollback", "backend"), [(0, "inductor"), (4, "aot_eager")])
def test_a_compiled_step_is_one_graph_and_is_not_compiled_again(rollback: int, backend: str):
    parts, bias = inputs(length=40), torch.randn(2, 2, 1, 40)
    plain, cache = (cache_for(parts, 5, keep_first=1, keep_last=2, rollback=rollback) for _ in range(2))

    @torch.compile(fullgraph=True, backend=backend)
    def attend(cache, query, key, value, scores, bias):
        return cache.attend(query, key, value, scores, bias, return_lse=True)

    counters.clear()
    torch._dynamo.reset()
    for start, stop in [(0, 9), (9, 10), (10, 11), (11, 20), *((i, i + 1) for i in range(20, 40))]:
        now = (*(part[:, start:stop] for part in parts[:3]), parts[3][..., start:stop], bias[..., start:stop])
        for one, other in zip(attend(cache, *now), plain.attend(*now, return_lse=True), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        if start == 11:
            graphs = counters["stats"]["unique_graphs"]
            if rollback:
                plain.crop(2), cache.crop(2)
                plain.crop(torch.tensor([1, 0])), cache.crop(torch.tensor([1, 0]))
    assert counters["stats"]["unique_graphs"] == graphs <= 4 and not counters["graph_break"]
    assert torch.equal(cache.length, plain.length)


def test_compiled_with_padding_and_documents():
    parts, ids = inputs(length=30, dtype=torch.float64), torch.arange(30).div(11, rounding_mode="floor").expand(2, -1)
    padding = torch.rand(2, 30) < 0.7
    plain, cache = (cache_for(parts, 3, keep_first=1, keep_last=2, rollback=2) for _ in range(2))
    attend = torch.compile(call, fullgraph=True, backend="aot_eager")
    for start, stop in [(0, 12), (12, 13), (13, 14), (14, 30)]:
        more = {"padding": padding, "documents": ids}
        one, other = (function(held, parts, start, stop, **more) for function, held in ((attend, cache), (call, plain)))
        torch.testing.assert_close(one, other)


def test_a_copy_goes_on_by_itself():
    parts = inputs()
    cache = cache_for(parts, rollback=2)
    call(cache, parts, 0, 12, torch.randn(1, 2, 1, 24), documents=torch.zeros(2, 24, dtype=torch.int64))
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), torch.load(buffer, weights_only=False)]
    copies.append(cache.to("meta").to(torch.float64) and cache.to(torch.float64).to(torch.float32))
    expected = call(cache, parts, 12, 24)
    for other in copies:
        torch.testing.assert_close(call(other, parts, 12, 24), expected)
        assert other.length.tolist() == [24, 24] and str(other) == str(cache) and other.nbytes == cache.nbytes
    assert cache.to("cpu") is cache and cache.to("meta").device.type == "meta"
    assert cache.to(dtype=torch.float16).key.dtype == torch.float16 and cache.dtype == torch.float32


def test_reset_forgets():
    parts = inputs()
    cache = cache_for(parts, rollback=3)
    expected = in_calls(cache, parts, [20, 1, 3], documents=torch.zeros(2, 24, dtype=torch.int64))
    cache.reset()
    assert cache.length.tolist() == [0, 0]
    again = in_calls(cache, parts, [20, 1, 3], documents=torch.ones(2, 24, dtype=torch.int64))
    assert torch.equal(again, expected)


def test_keys_that_were_put_out_come_back_with_crop():
    """The best keys come last, and are taken back."""
    query, key, value, scores = inputs(length=20)
    scores[..., 12:] += 100
    parts = (query, key, value, scores)
    cache = cache_for(parts, 3, rollback=8)
    in_calls(cache, parts, [12])
    before = copy.deepcopy(cache)
    in_calls(cache, (*(part[:, 12:] for part in parts[:3]), scores[..., 12:]), [1] * 8)
    cache.crop(8)
    assert cache.length.tolist() == [12, 12]
    other = tuple(part.flip(0) for part in parts)
    assert torch.equal(call(cache, other, 12, 20), call(before, other, 12, 20))


def test_beams_go_on_from_each_other():
    parts = inputs(batch=3)
    cache = cache_for(parts)
    call(cache, parts, 0, 12)
    index = torch.tensor([2, 2, 0])
    cache.reorder(index)
    mixed = tuple(torch.cat([part[index, :12], part[:, 12:]], 1) for part in parts[:3])
    mixed += (torch.cat([parts[3][index, :, :12], parts[3][..., 12:]], 2),)
    whole = flash_dmattn_func(*mixed[:3], dynamic_mask(mixed[3], 3))
    torch.testing.assert_close(call(cache, mixed, 12, 24), whole[:, 12:])


def test_nothing_is_differentiated_and_inputs_stay():
    parts = tuple(part.requires_grad_() for part in inputs())
    out = in_calls(cache_for(parts), parts, [12, 1, 11])
    assert not out.requires_grad


def test_inference_mode_may_end_and_begin_again():
    parts, bias, ids = inputs(), torch.randn(2, 2, 1, 24), torch.zeros(2, 24, dtype=torch.int64)
    expected = in_calls(cache_for(parts), parts, [12, 1, 11], bias, documents=ids)
    with torch.inference_mode():
        cache = cache_for(parts)
        outs = [call(cache, parts, 0, 12, bias, documents=ids)]
    outs += [call(cache, parts, 12, 13, bias, documents=ids)]
    with torch.inference_mode():
        outs += [call(cache, parts, 13, 24, bias, documents=ids)]
    assert torch.equal(torch.cat([out.clone() for out in outs], 1), expected)


def test_an_empty_batch_and_empty_chunks():
    parts = inputs(batch=0)
    assert in_calls(cache_for(parts), parts, [12, 1, 11]).shape == (0, 24, 4, 8)
    parts = inputs()
    cache = cache_for(parts)
    out, lse = call(cache, parts, 0, 0, return_lse=True)
    assert out.shape == (2, 0, 4, 8) and lse.shape == (2, 4, 0) and cache.length.tolist() == [0, 0]


def test_batch_invariant_bits_do_not_depend_on_neighbours():
    parts = inputs(batch=3)
    together = in_calls(cache_for(parts), parts, [12] + [1] * 12, batch_invariant=True)
    for b in range(3):
        own = tuple(part[b : b + 1] for part in parts)
        assert torch.equal(in_calls(cache_for(own), own, [12] + [1] * 12, batch_invariant=True), together[b : b + 1])


REFUSED = {
    "batch": (ValueError, r"query must have shape \(2, 4, 4, 8\), got \(3, 4, 4, 8\)", {"query": (3, 4, 4, 8)}),
    "key heads": (ValueError, r"key must have shape \(2, 4, 2, 8\), got \(2, 4, 4, 8\)", {"key": (2, 4, 4, 8)}),
    "value dim": (ValueError, r"value must have shape \(2, 4, 2, 8\), got \(2, 4, 2, 9\)", {"value": (2, 4, 2, 9)}),
    "positions": (ValueError, r"key must have shape \(2, 4, 2, 8\), got \(2, 5, 2, 8\)", {"key": (2, 5, 2, 8)}),
    "scores of query heads": (ValueError, r"scores must have shape \(2 or 1, 2 or 1, 4\)", {"scores": (2, 4, 4)}),
    "rank of scores": (ValueError, r"scores must have shape \(2 or 1, 2 or 1, 4\)", {"scores": (2, 4)}),
    "rank of query": (ValueError, "query must have 4 dimensions", {"query": (2, 4, 8)}),
    "bias": (ValueError, "bias must have shape", {"bias": (2, 2, 4, 4)}),
    "padding": (ValueError, r"padding must have shape \(2 or 1, 4\), got \(2, 5\)", {"padding": (2, 5)}),
    "documents": (TypeError, "documents must have dtype", {"documents": (2, 4)}),
    "scale": (TypeError, "softmax_scale must be a number, got str", {"softmax_scale": "1"}),
    "softcap": (ValueError, "softcap must", {"softcap": -1.0}),
    "sink": (ValueError, r"sink must have shape \(4,\)", {"sink": (3,)}),
    "lse": (TypeError, "return_lse must be a bool, got int", {"return_lse": 1}),
    "bits": (TypeError, "batch_invariant must be a bool, got int", {"batch_invariant": 1}),
    "none": (TypeError, "key must be a tensor, got NoneType", {"key": None}),
    "no scores": (TypeError, "scores must be a tensor, got list", {"scores": []}),
    "sparse scores": (TypeError, "scores must be a dense tensor", {"scores": torch.ones(2, 2, 4).to_sparse()}),
    "sparse documents": (
        TypeError,
        "documents must be a dense tensor",
        {"documents": torch.ones(2, 4).int().to_sparse()},
    ),
    "dropout": (TypeError, "unexpected keyword argument 'dropout_p'", {"dropout_p": 0.1}),
    "dtype": (
        TypeError,
        "query must have dtype torch.float32 like the cache, got torch.float64",
        {"all": torch.float64},
    ),
    "integer scores": (TypeError, "scores must have dtype", {"scores": torch.zeros(2, 2, 4, dtype=torch.int64)}),
}


COMPILED = ("batch", "scores of query heads", "bias", "softcap")  # the same code decides about the others


@pytest.mark.parametrize(
    ("case", "compiled"), [*((case, False) for case in REFUSED), *((case, True) for case in COMPILED)]
)
def test_what_does_not_fit_is_refused_and_the_cache_stays(case: str, compiled: bool):
    kind, message, changes = REFUSED[case]
    query, key, value, scores = inputs(length=4)
    given = {"query": query, "key": key, "value": value, "scores": scores, "bias": torch.randn(2, 2, 1, 4)}
    if "all" in changes:
        given |= {name: given[name].to(changes["all"]) for name in ("query", "key", "value")}
    else:
        given |= {name: torch.randn(to) if isinstance(to, tuple) else to for name, to in changes.items()}
    if case == "padding":
        given["padding"] = given["padding"] > 0
    cache = cache_for((query, key, value, scores))
    cache.attend(query, key, value, scores, torch.randn(2, 2, 1, 4))
    before = {name: part.clone() for name, part in vars(cache).items() if isinstance(part, Tensor)}
    attend = torch.compile(cache.attend, fullgraph=True, backend="aot_eager") if compiled else cache.attend
    with pytest.raises(Exception if compiled else kind, match=message):
        attend(**given)
    assert all(torch.equal(getattr(cache, name), part) for name, part in before.items())


@pytest.mark.parametrize(
    ("more", "kind", "message"),
    [
        ({"keep": -1}, ValueError, "keep must not be negative, got -1"),
        ({"keep": 2.0}, TypeError, "keep must be an int, got float"),
        ({"kv_heads": 0}, ValueError, "kv_heads must be at least 1, got 0"),
        ({"keep": 1 << 70}, ValueError, f"keep must be less than 1073741824, got {1 << 70}"),
        ({"value_dim": 1 << 70}, ValueError, f"value_dim must be less than 1073741824, got {1 << 70}"),
        ({"rollback": -1}, ValueError, "rollback must not be negative, got -1"),
        ({"dtype": torch.int32}, TypeError, "dtype must be torch.float16 or .*, got torch.int32"),
        ({"dtype": "float32"}, TypeError, "dtype must be a torch.dtype, got str"),
    ],
)
def test_wrong_numbers_are_refused(more: dict, kind: type[Exception], message: str):
    with pytest.raises(kind, match=f"^{message}$"):
        KeptKeys(**({"batch": 1, "kv_heads": 2, "head_dim": 8, "keep": 4} | more))


def test_later_biases_must_fit_the_first():
    parts = inputs()
    cache = cache_for(parts)
    call(cache, parts, 0, 2, torch.randn(2, 2, 1, 24))
    with pytest.raises(ValueError, match=r"bias must have shape .*heads 2.*got"):
        call(cache, parts, 2, 4, torch.randn(2, 4, 1, 24))
    cache = cache_for(parts)
    call(cache, parts, 0, 2, torch.randn(2, 4, 1, 24))
    before = cache.length.clone()
    for heads in (2, 6, 8):
        other = (torch.randn(2, 24, heads, 8), *parts[1:])
        with pytest.raises(ValueError, match=f"query must have 4 heads as the biases before, got {heads}"):
            call(cache, other, 2, 4)
    assert torch.equal(cache.length, before)


def test_no_more_is_taken_back_than_is_stored():
    parts = inputs()
    cache = cache_for(parts, rollback=3)
    call(cache, parts, 0, 2)
    with pytest.raises(ValueError, match=r"^count must be at most rollback, 3, got 4$"):
        cache.crop(4)
    with pytest.raises(ValueError, match=r"^count must be from 0 to what can be taken back, \[2, 2\], got 3$"):
        cache.crop(3)
    call(cache, parts, 2, 12)
    cache.crop(2)
    with pytest.raises(ValueError, match=r"\[1, 1\], got \[1, 2\]$"):
        cache.crop(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"\[1, 1\], got \[-1, 0\]$"):
        cache.crop(torch.tensor([-1, 0]))
    with pytest.raises(TypeError, match="count must be an int, got float"):
        cache.crop(1.0)
    with pytest.raises(TypeError, match="count must have dtype"):
        cache.crop(torch.tensor([1.0, 2.0]))
    with pytest.raises(TypeError, match=r"count must be an int or integers \[B\], got a tensor without dimensions"):
        cache.crop(torch.tensor(1))
    with pytest.raises(ValueError, match=r"index must have numbers from 0 to 1, got \[0, 2\]"):
        cache.reorder(torch.tensor([0, 2]))
    assert cache.length.tolist() == [10, 10]
    cache.crop(torch.tensor([1, 0]))
    assert cache.length.tolist() == [9, 10]


def test_nan_of_hidden_keys_and_of_padding_stays_hidden():
    query, key, value, scores = inputs(length=30)
    scores[..., 4:7] = -math.inf
    clean = in_calls(cache_for((query, key, value, scores), 3), (query, key, value, scores), [10, 1, 19])
    poisoned = [part.clone() for part in (key, value)]
    for part in poisoned:
        part[:, 4:7] = math.nan  # among the best of no later query, and not of their own
    out = in_calls(cache_for((query, key, value, scores), 3), (query, *poisoned, scores), [10, 1, 19])
    assert torch.equal(out, clean)


def test_it_is_a_public_name():
    assert dmattn_ops.KeptKeys is KeptKeys and "KeptKeys" in dmattn_ops.__all__


@pytest.mark.slow
@torch.no_grad()
def test_a_hundred_thousand_steps():
    """Scores drift upwards, have ties and NaN; sampled rows are those of the definition over the whole sequence."""
    length, keep, keep_first, keep_last, generator = 100_000, 6, 2, 3, torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, length, 1, 4, generator=generator) for _ in range(3))
    scores = (torch.randn(1, 1, length, generator=generator) * 2).round() / 2 + torch.arange(length) // 9000 * 0.5
    scores[..., torch.randint(length, (300,), generator=generator)] = math.nan
    cache = KeptKeys(1, 1, 4, keep, keep_first=keep_first, keep_last=keep_last, dtype=torch.float32, rollback=2)
    size, worth, position = cache.nbytes, scores[0, 0].double().nan_to_num(-math.inf), torch.arange(length)
    for i in range(length):
        out = cache.attend(query[:, i : i + 1], key[:, i : i + 1], value[:, i : i + 1], scores[..., i : i + 1])
        if i % 7 == 0:  # the same position again
            cache.crop(1)
            out = cache.attend(query[:, i : i + 1], key[:, i : i + 1], value[:, i : i + 1], scores[..., i : i + 1])
        if i % 997 == 0 or i > length - 20:
            best = torch.sort(worth[: i + 1], descending=True, stable=True).indices[:keep]
            near = position[(position < keep_first) | (i - position < keep_last)]
            seen = torch.cat([best, near[near <= i]]).unique()
            weights = torch.softmax(key[0, seen, 0].double() @ query[0, i, 0].double() / 2, 0)
            torch.testing.assert_close(
                out[0, 0, 0].double(), weights @ value[0, seen, 0].double(), atol=1e-5, rtol=1e-5
            )
    assert cache.length.tolist() == [length] and cache.nbytes == size

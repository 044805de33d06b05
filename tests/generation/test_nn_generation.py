"""`DynamicMaskAttention` with a cache of kept keys: the same as the layer on the whole sequence."""

from __future__ import annotations

import random

import pytest
import torch
from selection_cases import draw_documents

from dmattn_ops import KeptKeys
from dmattn_ops.nn import DynamicMaskAttention


def layer(**more) -> DynamicMaskAttention:
    made = DynamicMaskAttention(
        32, 4, 2, **({"keep": 4, "keep_first": 2, "keep_last": 3, "recency": 0.01} | more)
    ).double()
    torch.nn.init.normal_(made.scores.A)
    torch.nn.init.normal_(made.scores.dt_proj.weight)
    return made.eval()


def in_parts(
    made: DynamicMaskAttention, cache: KeptKeys, hidden: torch.Tensor, sizes: list[int], **more
) -> torch.Tensor:
    outs, start = [], 0
    for size in sizes:
        now = slice(start, start + size)
        here = {name: None if part is None else part[:, now] for name, part in more.items()}
        outs.append(made(hidden[:, now], cache=cache, **here))
        start += size
    return torch.cat(outs, 1)


@pytest.mark.parametrize("sizes", [[40], [1] * 40, [11, 1, 1, 20, 1, 6]], ids=str)
@pytest.mark.parametrize("rule", [{}, {"keep_first": 0, "recency": None}, {"keep": 0}, {"keep_last": 0}], ids=str)
@torch.no_grad()
def test_parts_give_what_the_whole_gives(rule: dict, sizes: list[int]):
    """Padding counts as positions here, as it does in the layer; each document of the middle begins with some."""
    made, hidden = layer(**rule), torch.randn(3, 40, 32, dtype=torch.float64)
    documents, padding = draw_documents(3, 40, random.Random(7)), torch.rand(3, 40) < 0.7
    left = torch.arange(40) >= torch.tensor([[0], [5], [17]])
    for more in (
        {},
        {"documents": documents},
        {"padding": left},
        {"padding": padding},
        {"padding": padding, "documents": documents},
    ):
        whole = made(hidden, **more)
        parts = in_parts(made, made.make_cache(3), hidden, sizes, **more)
        rows = more.get("padding", torch.ones(3, 40)) != 0
        torch.testing.assert_close(parts[rows], whole[rows], atol=1e-6, rtol=1e-5)  # scores are float32


@torch.no_grad()
def test_positions_are_taken_and_taken_back():
    made, hidden = layer(), torch.randn(2, 20, 32, dtype=torch.float64)
    cache = made.make_cache(2, rollback=5)
    positions = torch.arange(20)[None] * 3
    in_parts(made, cache, hidden.flip(1), [15])
    cache.crop(5)
    cache.reset()
    whole = made(hidden, positions=positions)
    parts = in_parts(made, cache, hidden, [15, 5], positions=positions)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-5)
    cache.crop(3)
    again = made(hidden[:, 17:], positions=positions[:, 17:], cache=cache)
    torch.testing.assert_close(again, whole[:, 17:], atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a_first_key_that_is_taken_back_was_not_the_first():
    """The first keys are those behind padding on the left: here it ends at place 4, and after all at place 5."""
    made, hidden = layer(keep=1, keep_last=1), torch.randn(1, 20, 32, dtype=torch.float64)
    places, cache = torch.arange(20)[None], made.make_cache(1, rollback=2)
    in_parts(made, cache, hidden[:, :5], [5], padding=places[:, :5] >= 4)
    cache.crop(1)
    parts = [made(hidden[:, now], cache=cache, padding=places[:, now] >= 5) for now in (slice(4, 6), slice(6, 20))]
    whole = made(hidden, padding=places >= 5)
    torch.testing.assert_close(torch.cat(parts, 1)[:, 1:], whole[:, 5:], atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a_compiled_step_is_that_of_eager_mode():
    made, hidden = layer().float(), torch.randn(2, 16, 32)
    whole, cache = made(hidden), made.make_cache(2)
    step = torch.compile(made, fullgraph=True, backend="aot_eager")
    parts = [made(hidden[:, :9], cache=cache)] + [step(hidden[:, i : i + 1], cache=cache) for i in range(9, 16)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)


def test_a_cache_takes_the_dtype_and_the_device_of_the_layer():
    made = layer(head_dim=8).to(torch.bfloat16)
    cache = made.make_cache(5)
    assert (cache.batch, cache.kv_heads, cache.head_dim, cache.dtype) == (5, 2, 8, torch.bfloat16)
    assert made.make_cache(1, dtype=torch.float16, device="meta").device.type == "meta"
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        made.float()(torch.randn(5, 3, 32), cache=cache)
    assert cache.length.tolist() == [3] * 5


def test_what_is_no_cache_of_the_layer_is_refused():
    made, hidden = layer(), torch.randn(1, 3, 32, dtype=torch.float64)
    with pytest.raises(TypeError, match="cache must be a KeptKeys, as make_cache returns it, got tuple"):
        made(hidden, cache=())
    with pytest.raises(ValueError, match=r"keep_last, \(2, 8, 8, 4, 2, 3\), got \(2, 8, 8, 5, 2, 3\)"):
        made(hidden, cache=layer(keep=5).make_cache(1))
    for batch in (2, 3):
        with pytest.raises(ValueError, match=f"cache must have the batch size of hidden, 1, got {batch}"):
            made(hidden, cache=made.make_cache(batch))
    with pytest.raises(ValueError, match="is_causal is False"):
        layer(is_causal=False, keep_last=0)(hidden, cache=made.make_cache(1))
    with pytest.raises(ValueError, match=r"in training with dropout 0.5: call eval\(\) first"):
        layer(dropout=0.5).train()(hidden, cache=made.make_cache(1))

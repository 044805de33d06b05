"""`nn.IndexedAttention`: the layer, its choice, and the loss of its indexer, against float64 definitions in plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import indexed_attention
from dmattn_ops.nn import IndexedAttention, LightningIndexer
from dmattn_ops.nn.rotary import turned, turns_of


def layer(**changes: Any) -> IndexedAttention:
    torch.manual_seed(3)
    given = {"dim": 24, "heads": 4, "kv_heads": 2, "head_dim": 8, "keep": 4, "index_heads": 3, "index_dim": 6} | changes
    return IndexedAttention(**given).double()


def index_by_definition(indexer: LightningIndexer, hidden: Tensor) -> Tensor:
    """Return scores `[B, S, S]`, pair by pair of heads."""
    batch, seqlen, _ = hidden.shape
    heads, dim = indexer.heads, indexer.head_dim
    query = (hidden @ indexer.q_proj.weight.T).view(batch, seqlen, heads, dim)
    key = hidden @ indexer.k_proj.weight.T
    key = (key - key.mean(-1, keepdim=True)) / (key.var(-1, unbiased=False, keepdim=True) + indexer.k_norm.eps).sqrt()
    key = (key * indexer.k_norm.weight + indexer.k_norm.bias).unsqueeze(2)
    if indexer.rotary_base is not None:
        turns = turns_of(hidden, None, dim, indexer.rotary_base)
        query, key = turned(query, *turns), turned(key, *turns)
    weights = hidden @ indexer.weights_proj.weight.T / (heads * dim) ** 0.5
    products = torch.einsum("bihd,bjd->bhij", query, key.squeeze(2)).clamp(min=0.0)
    return torch.einsum("bhij,bih->bij", products, weights)


def by_definition(
    attention: IndexedAttention, hidden: Tensor, shown: Tensor, indices: Tensor, warm_up: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the layer's output and its loss; `shown` `[B, S, S]` says what documents and padding show.

    Of equal scores (0 behind a ReLU) any may be chosen: those of `indices` `[B, S, k]`, if they are among the best.
    """
    batch, seqlen, _ = hidden.shape
    shown = shown & torch.ones(seqlen, seqlen, dtype=torch.bool).tril()
    block, count = attention.block, -(-seqlen // attention.block)
    scores = index_by_definition(attention.indexer, hidden.detach()).masked_fill(~shown, -torch.inf)
    of_blocks = torch.stack([scores[..., n * block : (n + 1) * block].amax(-1) for n in range(count)], -1)
    chosen = torch.zeros(batch, seqlen, count, dtype=torch.bool)
    if warm_up:
        chosen = of_blocks > -torch.inf
    else:
        chosen = (indices.unsqueeze(-1) == torch.arange(count)).any(-2)
        best = of_blocks.detach().topk(min(attention.keep, count), dim=-1).values
        own = of_blocks.detach().masked_fill(~chosen, -torch.inf).topk(best.shape[-1], dim=-1).values
        torch.testing.assert_close(own, best)
    visible = shown & chosen.repeat_interleave(block, -1)[..., :seqlen]
    query, key, value = (
        projection(hidden).unflatten(-1, (-1, attention.head_dim))
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if attention.rotary_base is not None:
        turns = turns_of(hidden, None, attention.head_dim, attention.rotary_base)
        query, key = turned(query, *turns), turned(key, *turns)
    key, value = (part.repeat_interleave(attention.heads // attention.kv_heads, dim=2) for part in (key, value))
    logits = torch.einsum("bihd,bjhd->bhij", query, key) / attention.head_dim**0.5
    weights = logits.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1)
    weights = torch.where(visible.unsqueeze(1), weights, 0.0)
    out = attention.o_proj(torch.einsum("bhij,bjhd->bihd", weights, value).flatten(2))
    attended = weights.detach().sum(1)
    attended = torch.stack([attended[..., n * block : (n + 1) * block].sum(-1) for n in range(count)], -1)
    loss, rows = torch.zeros((), dtype=torch.float64), 0
    for b in range(batch):
        for i in range(seqlen):
            if not visible[b, i].any():
                continue
            rows += 1
            target = attended[b, i, chosen[b, i]]
            target = target / target.sum()
            index = of_blocks[b, i, chosen[b, i]].log_softmax(-1)
            loss = loss + (torch.xlogy(target, target) - target * index).sum()
    return out, loss / max(rows, 1)


SHOWN = {
    "all": {},
    "documents": {"documents": torch.arange(17)[None] // 6},
    "padding": {"padding": torch.arange(17)[None].expand(2, -1) >= torch.tensor([[4], [0]])},
    "both": {"documents": torch.arange(17)[None] // 6, "padding": (torch.arange(17) % 5 != 2)[None].int()},
}


def shown_by(name: str, seqlen: int) -> Tensor:
    given = SHOWN[name]
    shown = torch.ones(1, seqlen, seqlen, dtype=torch.bool)
    if "documents" in given:
        shown = shown & (given["documents"].unsqueeze(-1) == given["documents"].unsqueeze(-2))
    if "padding" in given:
        shown = shown & (given["padding"] != 0).unsqueeze(-2)
    return shown


@pytest.mark.parametrize("warm_up", [False, True])
@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("name", SHOWN)
def test_output_loss_and_gradients_are_those_of_the_definition(name: str, block: int, warm_up: bool, monkeypatch):
    attention, chosen = layer(block=block), []
    choose = attention._chosen

    def noted(*given: Any) -> tuple[Tensor, Tensor]:
        scores, indices = choose(*given)
        chosen.append(indices)
        return scores, indices

    monkeypatch.setattr(attention, "_chosen", noted)
    hidden = torch.randn(2, 17, 24, dtype=torch.float64, requires_grad=True)
    found, loss = attention(hidden, return_loss=True, warm_up=warm_up, **SHOWN[name])
    [indices] = chosen
    expected, expected_loss = by_definition(attention, hidden, shown_by(name, 17), indices, warm_up)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(loss, expected_loss)
    wanted = [hidden, *attention.parameters()]
    gradients = [
        torch.autograd.grad(out.sin().sum() + 3.0 * part, wanted, allow_unused=True)
        for out, part in ((found, loss), (expected, expected_loss))
    ]
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, torch.zeros_like(own) if other is None else other, atol=1e-9, rtol=1e-7)
    plain = attention(hidden, warm_up=warm_up, **SHOWN[name])
    torch.testing.assert_close(plain, expected)


def test_the_loss_trains_the_indexer_alone_and_the_output_all_else():
    attention = layer()
    hidden = torch.randn(1, 9, 24, dtype=torch.float64, requires_grad=True)
    out, loss = attention(hidden, return_loss=True)
    of_loss = torch.autograd.grad(loss, [hidden, *attention.parameters()], allow_unused=True, retain_graph=True)
    of_out = torch.autograd.grad(out.sum(), list(attention.parameters()), allow_unused=True)
    for (name, _), by_loss, by_out in zip(attention.named_parameters(), of_loss[1:], of_out, strict=True):
        assert (by_loss is not None) == name.startswith("indexer."), name
        assert (by_out is not None) == (not name.startswith("indexer.")), name
    assert of_loss[0] is None


def test_the_loss_is_zero_where_the_index_is_the_attention():
    scores = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    loss = LightningIndexer.loss(scores, 7.0 * scores.detach().softmax(-1))
    torch.testing.assert_close(loss, torch.zeros_like(loss))
    [gradient] = torch.autograd.grad(loss, scores)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_the_gradient_of_the_loss_in_float64():
    mass = torch.rand(2, 5, 4, dtype=torch.float64)
    mass[0, 1] = 0.0  # a row that sees nothing
    scores = torch.randn(2, 5, 4, dtype=torch.float64)
    hidden = torch.rand(2, 5, 4) < 0.3
    scores, mass = scores.masked_fill(hidden, -torch.inf), mass.masked_fill(hidden, 0.0)
    free = scores.clone().requires_grad_()

    def loss(numbers: Tensor) -> Tensor:
        return LightningIndexer.loss(torch.where(hidden, -torch.inf, numbers), mass)

    start = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, start)
    LightningIndexer.loss(free, mass).backward()
    assert free.grad is not None and free.grad.isfinite().all() and not free.grad[hidden].any()


def test_the_loss_falls_when_the_indexer_learns_by_it():
    torch.manual_seed(0)
    attention = IndexedAttention(16, 2, keep=4, index_heads=2, index_dim=8)
    with torch.no_grad():
        attention.q_proj.weight *= 6.0  # attention that prefers some keys
    hidden = torch.randn(2, 24, 16)
    optimizer = torch.optim.Adam(attention.indexer.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        _, loss = attention(hidden, return_loss=True, warm_up=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("warm_up", [False, True])
def test_compiled_in_one_graph_for_every_length(warm_up: bool):
    torch._dynamo.reset()
    attention = layer(block=2)

    def step(hidden: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        return attention(hidden, documents=documents, return_loss=True, warm_up=warm_up)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for seqlen in (20, 33, 150):
            hidden, documents = torch.randn(2, seqlen, 24).double(), torch.arange(seqlen)[None] // 30
            found, expected = compiled(hidden, documents), step(hidden, documents)
            torch.testing.assert_close(found, expected)
            parameters = list(attention.parameters())
            gradients = [torch.autograd.grad(out.sum() + loss, parameters) for out, loss in (found, expected)]
            torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)  # rotary angles are of float32
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads must be a multiple of kv_heads, got 3 and 2"),
        ({"keep": -1}, "keep must not be negative, got -1"),
        ({"block": 0}, "block must be between 1 and 128, got 0"),
        ({"head_dim": 7}, "head_dim must be even for rotary embeddings, got 7"),
        ({"index_dim": 7}, "head_dim must be even for rotary embeddings, got 7"),
        ({"dropout": 2.0}, "dropout must be between 0 and 1, got 2.0"),
        ({"head_dim": None, "dim": 22}, "dim must be a multiple of heads, or head_dim given, got 22 and 4"),
    ],
)
def test_wrong_layers(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        layer(**changes)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"hidden": torch.zeros(2, 5, 23)}, ValueError, r"hidden must have shape \[B, S, 24\], got \(2, 5, 23\)"),
        ({"hidden": torch.zeros(5, 24)}, ValueError, "hidden must have 3 dimensions"),
        ({"padding": torch.ones(2, 5)}, TypeError, "padding must have dtype"),
        ({"documents": torch.ones(2, 4).long()}, ValueError, r"documents must have shape \(2 or 1, 5\), got \(2, 4\)"),
        ({"positions": torch.arange(4)}, ValueError, r"positions must have shape \(2 or 1, 5\), got \(1, 4\)"),
        ({"attention_mask": 1}, TypeError, "here it is called padding"),
        ({"attn_mask": 1}, TypeError, "here it is called padding"),
        ({"segment_ids": 1}, TypeError, "here it is called documents"),
        (
            {"hidden": torch.nested.nested_tensor([torch.zeros(5, 24), torch.zeros(3, 24)], layout=torch.jagged)},
            TypeError,
            "hidden must be a dense tensor, with documents for sequences of other lengths, got a nested one",
        ),
        ({"hidden": torch.zeros(2, 5, 24).to_sparse()}, TypeError, r"hidden must be .*, got layout torch\.sparse_coo"),
        ({"return_loss": 1}, TypeError, "return_loss must be a bool, got int"),
    ],
)
def test_wrong_calls(given: dict, error: type, message: str):
    with pytest.raises(error, match=message):
        layer()(**{"hidden": torch.zeros(2, 5, 24).double(), **given})


@pytest.mark.parametrize("base", [-1.0, 0.0, math.inf, math.nan])
def test_an_indexer_alone_refuses_bases_that_make_no_angles(base: float):
    with pytest.raises(ValueError, match=f"rotary_base must be a positive number, or None, got {base}"):
        LightningIndexer(24, rotary_base=base)


def test_the_example_trains_in_both_stages():
    small = ["--dim=16", "--heads=2", "--keep=3", "--pairs=5", "--batch=2", "--device=cpu"]
    steps = indexed_attention.main([*small, "--warm-up=3", "--steps=3", "--every=1"])
    assert [step.stage for step in steps] == ["warm-up"] * 3 + ["sparse"] * 3
    assert all(0.0 < step.loss < 10.0 and 0.0 <= step.index_loss < 10.0 and 0.0 <= step.right <= 1.0 for step in steps)

"""Modules: against the same written out in plain torch, compiled, exported, and what they refuse."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from dmattn_ops.nn import DynamicMaskAttention, KeyScores
from dmattn_ops.nn.dynamic import LARGEST_EXPONENT

B, S, DIM, H, HKV = 2, 33, 32, 4, 2
D = DIM // H


def layer(**more):
    made = DynamicMaskAttention(DIM, H, HKV, **{"keep": 5, **more})
    for name, parameter in made.named_parameters():
        if name in ("scores.A", "scores.slope"):
            nn.init.normal_(parameter)
    return made


def rotated(tensor, base, positions):
    """Rotary embeddings as complex numbers: one half of the dimensions real, the other imaginary."""
    turn = torch.polar(torch.ones(()), positions[..., None] * base ** -(torch.arange(0, D, 2) / D))
    real, imaginary = tensor.chunk(2, dim=-1)
    turned = torch.complex(real, imaginary) * turn[:, :, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def written_out(made, hidden, documents=None, padding=None, positions=None):
    """The layer in plain torch: sort what each query may see, keep the best."""
    query, key, value = (
        projection(hidden).unflatten(-1, (-1, D)) for projection in (made.q_proj, made.k_proj, made.v_proj)
    )
    positions = torch.arange(S)[None] if positions is None else positions
    if made.rotary_base is not None:
        query, key = (rotated(part, made.rotary_base, positions) for part in (query, key))
    steps = value.flatten(2) @ made.scores.dt_proj.weight.T
    if made.scores.dt_proj.bias is not None:
        steps = steps + made.scores.dt_proj.bias
    scores = torch.exp(made.scores.A * torch.log1p(torch.exp(steps)))
    if made.scores.slope is not None:
        scores = scores + made.scores.slope * torch.arange(S)[:, None]
    scores = scores.transpose(1, 2)
    allowed = torch.ones(hidden.shape[0], S, S, dtype=torch.bool)
    if made.is_causal:
        allowed = allowed.tril()
    if documents is not None:
        allowed = allowed & (documents[:, :, None] == documents[:, None, :])
    first = torch.zeros_like(allowed)
    for b in range(hidden.shape[0]):
        for i in range(S):
            within = allowed[b, i].nonzero().flatten()
            if padding is not None and padding[b, within].any():  # padding in front of the first key does not count
                within = within[padding[b, within].int().argmax() :]
            first[b, i, within[: made.keep_first]] = True
    distance = torch.arange(S)[:, None] - torch.arange(S)
    last = (distance >= 0) & (distance < made.keep_last) & allowed
    if padding is not None:
        allowed = allowed & padding[:, None, :]
    ranked = scores[:, :, None].detach().masked_fill(~allowed[:, None], -math.inf)
    best = ranked >= ranked.sort(dim=-1, descending=True).values[..., min(made.keep, S) - 1 :][..., :1]
    best = best & (made.keep > 0)
    seen = (best | first[:, None] | last[:, None]) & allowed[:, None]
    attention = torch.einsum("bihgd,bjhd->bhgij", query.unflatten(2, (HKV, -1)), key) / math.sqrt(D)
    attention = (attention + scores[:, :, None, None]).masked_fill(~seen[:, :, None], -math.inf)
    weights = attention.softmax(-1).nan_to_num()
    out = torch.einsum("bhgij,bjhd->bihgd", weights, value)
    return made.o_proj(out.flatten(2))


def same(made, **inputs):
    hidden = torch.randn(B, S, DIM, requires_grad=True)
    leaves = [hidden, *made.parameters()]
    out, expected = made(hidden, **inputs), written_out(made, hidden, **inputs)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    target = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(result, leaves, target) for result in (out, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    assert all(gradient.abs().max() > 0 for gradient in ours)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"keep_first": 2, "keep_last": 3},
        {"keep": 100},
        {"keep": 0, "keep_last": 4},
        {"is_causal": False, "keep_first": 1},
        {"rotary_base": None, "bias": True},
        {"recency": 0.1},
    ],
    ids=str,
)
def test_attends_as_written_out(more):
    same(layer(**more))


def test_documents_padding_and_positions():
    documents = torch.tensor([[0] * 10 + [1] * 23, [3] * 33])
    positions = torch.cat([torch.arange(10), torch.arange(23)])[None]
    same(layer(keep_first=1, keep_last=2), documents=documents, positions=positions)
    padding = torch.arange(S) >= torch.tensor([[0], [6]])
    same(layer(keep_first=1, keep_last=2), padding=padding)
    holes = torch.rand(B, S) < 0.6  # in front of documents, in them and behind them
    for each in (documents, documents[:1], -documents - (1 << 40), documents.to(torch.int8) + 120):
        same(layer(keep_first=3, keep_last=2), documents=each.expand(B, S), padding=holes)
    same(layer(keep_first=3), documents=documents, padding=(torch.arange(S) % 10 > 3).expand(B, S))


def test_a_sequence_behind_padding_on_the_left_sees_what_it_sees_alone():
    made, hidden = layer(keep_first=3, keep_last=2, rotary_base=None), torch.randn(1, S, DIM)
    alone = made(hidden[:, 10:])
    torch.testing.assert_close(made(hidden, padding=torch.arange(S)[None] >= 10)[:, 10:], alone)
    holes = torch.arange(S) % 5 != 4  # padding between keys hides these keys, and no others
    seen = made.mask(torch.randn(1, HKV, S), padding=holes[None]).to_dense()
    assert seen[:, :, -1, :3].all() and not seen[..., ~holes].any()


def _best(scores, keep, row, allowed):
    """The keys that a row keeps, by definition: of those allowed, the best; NaN is worst, of equal ones the earlier is better."""
    ranked = sorted(
        (j for j in range(len(scores)) if allowed[row][j]),
        key=lambda j: (math.isnan(scores[j]), 0.0 if math.isnan(scores[j]) else -scores[j], j),
    )
    return set(ranked[:keep])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
def test_padding_never_competes_whatever_the_scores_are(dtype, is_causal):
    made = layer(keep=2)
    seen = made.mask(
        torch.tensor([[[math.nan, 1.0, math.nan, math.nan]]]), padding=torch.tensor([[True, False, True, True]])
    )
    assert seen.to_dense()[0, 0, 3].tolist() == [True, False, True, False]
    random, length = np.random.default_rng(5), 12
    least = torch.finfo(dtype).min
    for case in range(40):
        keep, first, last = (int(random.integers(0, 5)) for _ in range(3))
        last = last if is_causal else 0
        made = layer(keep=keep, keep_first=first, keep_last=last, is_causal=is_causal)
        numbers = torch.tensor([math.nan, -math.inf, least, -1.0, -0.0, 0.0, 2.0, math.inf], dtype=dtype)
        scores = numbers[torch.from_numpy(random.integers(0, 8, (2, HKV, length)))]
        padding = torch.from_numpy(random.random((2, length)) < 0.6)
        ids = torch.from_numpy(random.random((2, length)) < 0.2).cumsum(-1)
        documents = ids if case % 2 else None
        mask = made.mask(scores, padding=padding, documents=documents).to_dense()
        place = torch.arange(length)
        for b in range(2):
            within = ids[b][:, None] == ids[b] if case % 2 else torch.ones(length, length, dtype=torch.bool)
            within = within & (place <= place[:, None]) if is_causal else within
            allowed = within & padding[b]
            for h in range(HKV):
                for i in range(length):
                    if not is_causal and not padding[b, i]:  # what such a query sees is nobody's business
                        continue
                    document = [j for j in range(length) if not case % 2 or ids[b, j] == ids[b, i]]
                    begin = next((j for j in document if padding[b, j]), length)
                    expected = _best(scores[b, h].tolist(), keep, i, allowed)
                    expected |= {j for j in range(length) if allowed[i, j] and begin <= j < begin + first}
                    expected |= {j for j in range(length) if allowed[i, j] and 0 <= i - j < last}
                    assert set(mask[b, h, i].nonzero().flatten().tolist()) == expected, (case, b, h, i)


def test_padding_of_integers_is_that_of_bools_and_no_other():
    made, hidden, keep = layer(), torch.randn(B, S, DIM), torch.rand(B, S) < 0.6
    for numbers in (keep.long(), 2 * keep.int(), keep.short(), keep.byte(), -keep.char()):
        assert torch.equal(made(hidden, padding=numbers), made(hidden, padding=keep))
    with pytest.raises(TypeError, match=r"^padding must have dtype torch.bool or .*, got torch.float32$"):
        made(hidden, padding=keep.float())
    with pytest.raises(ValueError, match=r"^padding must have shape \(2 or 1, 33\), got \(2, 32\)$"):
        made(hidden, padding=keep[:, 1:])


@pytest.mark.parametrize(
    ("more", "kind", "message"),
    [
        (
            {"hidden": torch.zeros(S, DIM)},
            ValueError,
            r"hidden must have 3 dimensions, got 2, shape \(33, 32\): its axes are \[B, S, dim\]",
        ),
        ({"hidden": torch.zeros(1, S, 9)}, ValueError, r"hidden must have shape \[B, S, 32\], got \(1, 33, 9\)"),
        ({"hidden": [[[0.0]]]}, TypeError, "hidden must be a tensor, got list"),
        (
            {"attention_mask": torch.ones(1, S)},
            TypeError,
            r"DynamicMaskAttention.forward\(\) got an unexpected keyword argument 'attention_mask': here it is called padding,"
            r" \[B, S\]",
        ),
        ({"padding": torch.ones(1, S).int(), "documents": [[0]]}, TypeError, "documents must be a tensor, got list"),
        (
            {"padding": torch.ones(1, S).int(), "documents": torch.zeros(1, S)},
            TypeError,
            "documents must have dtype .*, got torch.float32",
        ),
        (
            {"padding": torch.ones(1, S).int(), "documents": torch.zeros(1, S - 1).int()},
            ValueError,
            r"documents must have shape \(2 or 1, 33\), got \(1, 32\)",
        ),
        ({"padding": [[1] * S] * B}, TypeError, "padding must be a tensor, got list"),
        ({"positions": [0] * S}, TypeError, "positions must be a tensor, got list"),
        ({"positions": torch.arange(S + 1)}, ValueError, r"positions must have shape \(2 or 1, 33\), got \(1, 34\)"),
        ({"hidden": torch.zeros(B, S, DIM).to_sparse()}, TypeError, r"hidden must be .*, got layout torch\.sparse_coo"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_words(more, kind, message):
    with pytest.raises(kind, match=f"^{message}$"):
        layer()(**{"hidden": torch.zeros(B, S, DIM)} | more)


def test_positions_of_one_sequence_hold_for_all():
    made, hidden, positions = layer(), torch.randn(B, S, DIM), torch.arange(S) + 5
    assert torch.equal(made(hidden, positions=positions), made(hidden, positions=positions[None]))


def test_key_scores_are_the_formula_of_the_paper_in_float32():
    scores = KeyScores(HKV, D, bias=True)
    nn.init.normal_(scores.A)
    value = torch.randn(B, S, HKV, D)
    expected = torch.exp(scores.A * F.softplus(scores.dt_proj(value.flatten(2)))).transpose(1, 2)
    torch.testing.assert_close(scores(value), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scores(value), scores(value.clone()))
        assert scores(value.bfloat16()).dtype == torch.float32
    assert set(scores.state_dict()) == {"A", "dt_proj.weight", "dt_proj.bias"}
    assert scores.bfloat16()(value.bfloat16()).dtype == torch.float32


def test_scores_and_their_gradients_stay_finite_however_large_the_exponent_becomes():
    """A key that gets all attention could else make its own score grow until gradients are infinite."""
    scores = KeyScores(HKV, D)
    nn.init.constant_(scores.A, 40.0)
    value = torch.randn(B, S, HKV, D, requires_grad=True)
    found = scores(value)
    assert found.max().item() == pytest.approx(math.exp(LARGEST_EXPONENT))
    found.square().sum().backward()
    assert value.grad.isfinite().all() and scores.A.grad.isfinite().all()


class Adapter(nn.Module):
    """A linear layer with a learned change beside it, as adapters put it; its weight is that of the layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.change = base, nn.Linear(base.in_features, base.out_features, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.base(values) + self.change(values)


def test_a_module_in_place_of_the_scores_layer_is_called_and_trained():
    scores = KeyScores(2, 8)
    nn.init.ones_(scores.A)
    value = torch.randn(1, 9, 2, 8)
    of_layer = scores(value)
    scores.dt_proj = Adapter(scores.dt_proj)
    found = scores(value)
    assert found.is_contiguous() and found.dtype == torch.float32
    assert not torch.equal(found, of_layer)
    found.sum().backward()
    assert scores.dt_proj.change.weight.grad.abs().sum() > 0
    nn.init.zeros_(scores.dt_proj.change.weight)
    torch.testing.assert_close(scores(value), of_layer)


def _offloaded(module):
    """Keep the parameters elsewhere but during the forward, as offloading does; until then what lies there is wrong."""
    held = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    def fetch(module, _):
        for name, parameter in module.named_parameters():
            parameter.data.copy_(held[name])

    def drop(module, *_):
        for parameter in module.parameters():
            parameter.data.fill_(float("nan"))

    module.register_forward_pre_hook(fetch)
    module.register_forward_hook(drop)
    drop(module)


def _pruned(module):
    prune.l1_unstructured(module, "weight", amount=0.5)
    module.weight = torch.full_like(module.weight_orig, float("nan"))  # which the hook makes again at each call


def _old_weight_norm(module):
    with warnings.catch_warnings(action="ignore"):
        torch.nn.utils.weight_norm(module)


def _replaced(module):
    kept = module.forward
    module.forward = lambda values: kept(values) + 1.0


CHANGES = {
    "offloaded": _offloaded,
    "pruned": _pruned,
    "old weight norm": _old_weight_norm,
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "replaced forward": _replaced,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", list(CHANGES))
def test_what_is_done_to_the_layer_of_scores_is_done_to_the_scores(change, dtype):
    scores, alone = (KeyScores(HKV, D, bias=True) for _ in range(2))
    nn.init.ones_(scores.A)
    alone.load_state_dict(scores.state_dict())
    scores, alone = scores.to(dtype), alone.to(dtype)
    value = torch.randn(B, S, HKV, D, dtype=dtype)
    torch.manual_seed(0)  # spectral norm draws
    CHANGES[change](scores.dt_proj)
    torch.manual_seed(0)
    CHANGES[change](alone.dt_proj)
    for _ in range(2):  # the second time through a graph, as in training
        found = scores(value)
        steps = alone.dt_proj(value.flatten(2)).float()
        torch.testing.assert_close(found, F.softplus(steps).exp().transpose(1, 2))
        if change != "offloaded":
            found.sum().backward()
    assert found.unique().numel() > 0.9 * found.numel()


def test_scores_of_a_bfloat16_module_are_distinct_and_checkpoints_of_linear_layers_load():
    torch.manual_seed(0)
    scores = KeyScores(1, 64).bfloat16()
    nn.init.ones_(scores.A)
    assert scores(torch.randn(1, 2000, 1, 64).bfloat16()).unique().numel() > 1900
    linear = nn.Linear(64, 1, bias=False)
    scores.load_state_dict({"A": torch.zeros(1), "dt_proj.weight": linear.weight}, strict=True)


def test_without_scores_learned_yet_recency_keeps_the_nearest_keys():
    made = DynamicMaskAttention(DIM, H, HKV, keep=4, recency=1e-3)
    mask = made.mask(made.scores(torch.randn(B, S, HKV, D))).to_dense()
    distance = torch.arange(S)[:, None] - torch.arange(S)
    assert torch.equal(mask[0, 0], (distance >= 0) & (distance < 4))


def test_dropout_acts_in_training_only():
    made, hidden = layer(dropout=0.5), torch.randn(B, S, DIM)
    torch.manual_seed(1)
    first = made(hidden)
    torch.manual_seed(1)
    assert torch.equal(made(hidden), first)
    assert not torch.allclose(made(hidden), first)
    made.eval()
    assert torch.equal(made(hidden), made(hidden))


@pytest.mark.parametrize("names", [(), ("padding",), ("documents",), ("documents", "padding")], ids=" and ".join)
def test_compiles_as_a_whole_and_for_other_lengths(names: tuple[str, ...]):
    torch._dynamo.reset()  # other tests compile the same layer, and there is a limit for all of them
    made = layer(keep_first=2, keep_last=2, recency=0.1)
    graphs = []

    def inputs(seqlen: int) -> dict[str, torch.Tensor]:
        every = {"padding": torch.rand(B, seqlen) < 0.7, "documents": torch.arange(seqlen).expand(B, -1) // 20}
        return {"hidden": torch.randn(B, seqlen, DIM), **{name: every[name] for name in names}}

    def backend(module, inputs):
        graphs.append(module)
        return module

    compiled = torch.compile(made, fullgraph=True, dynamic=True, backend=backend)
    for seqlen in (S, 20, 140, 2):
        given = inputs(seqlen)
        torch.testing.assert_close(compiled(**given), made(**given))
    assert len(graphs) == 1
    given = inputs(S)
    trained = torch.compile(made, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(made(**given).square().sum(), list(made.parameters()))
    gradients = torch.autograd.grad(trained(**given).square().sum(), list(made.parameters()))
    torch.testing.assert_close(gradients, expected, atol=1e-4, rtol=1e-4)


def test_exports_with_any_length():
    made = layer().eval()
    lengths = {"hidden": {1: torch.export.Dim("length", min=2, max=4096)}}
    program = torch.export.export(made, (torch.randn(B, S, DIM),), dynamic_shapes=lengths)
    for seqlen in (S, 7, 200):
        hidden = torch.randn(B, seqlen, DIM)
        torch.testing.assert_close(program.module()(hidden), made(hidden))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads, got 4 and 3"):
        DynamicMaskAttention(DIM, 4, 3, keep=1)
    with pytest.raises(ValueError, match="dim must be a multiple of heads"):
        DynamicMaskAttention(30, 4, keep=1)
    with pytest.raises(TypeError, match=r"^dim must be an int, got str$"):
        DynamicMaskAttention("32", 4, keep=1)
    with pytest.raises(ValueError, match="head_dim must be even"):
        DynamicMaskAttention(DIM, 4, head_dim=7, keep=1)
    DynamicMaskAttention(DIM, 4, head_dim=7, keep=1, rotary_base=None)
    with pytest.raises(ValueError, match=r"^heads and kv_heads must be at least 1, got 4 and 0$"):
        DynamicMaskAttention(DIM, 4, 0, keep=1)
    with pytest.raises(ValueError, match=r"^heads and kv_heads must be at least 1, got 0 and 0$"):
        DynamicMaskAttention(DIM, 0, keep=1)
    with pytest.raises(ValueError, match=r"^keep must not be negative, got -1$"):
        DynamicMaskAttention(DIM, 4, keep=-1)
    with pytest.raises(TypeError, match=r"^keep must be an int, got float$"):
        DynamicMaskAttention(DIM, 4, keep=0.5)
    with pytest.raises(ValueError, match=r"^keep_last must be 0 where is_causal is False, got 2$"):
        DynamicMaskAttention(DIM, 4, keep=1, keep_last=2, is_causal=False)
    assert "keep=5" in repr(layer())
    for base in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=rf"^rotary_base must be a positive number, or None, got {base}$"):
            DynamicMaskAttention(32, 4, keep=4, rotary_base=base)
    for dropout in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=rf"^dropout must be between 0 and 1, got {dropout}$"):
            DynamicMaskAttention(32, 4, keep=4, dropout=dropout)


def test_shapes_can_be_asked_of_a_device_without_autocast():
    layer = DynamicMaskAttention(32, 4, keep=4).to("meta")
    assert layer(torch.empty(2, 9, 32, device="meta")).shape == (2, 9, 32)

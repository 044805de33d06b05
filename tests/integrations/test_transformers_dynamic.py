"""Dynamic masks in models of transformers that have none: against the same in plain torch, cached and packed, and learning."""

import copy
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tiny_models import assert_same, decoder, logits_and_gradients, tokens, under  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

import dmattn_ops.integrations.transformers as integration  # noqa: E402
from dmattn_ops.integrations import forward_mask  # noqa: E402

B, S, KEEP, FIRST, LAST = 2, 19, 5, 1, 2
integration.register()


def sparse(name, keep=KEEP):
    """A model with dynamic masks whose scores say something."""
    model = integration.add_dynamic_masks(under(decoder(name), "dmattn"), keep, keep_first=FIRST, keep_last=LAST)
    for module in model.modules():
        if isinstance(module, integration.DynamicMask):
            torch.nn.init.normal_(module.scores.A, std=0.3)  # larger scores leave one key alone
            torch.nn.init.normal_(module.scores.dt_proj.weight, std=0.5)
    return model


def written_out(module, query, key, value, mask, scaling=None, **unused):
    """Attention of one layer with its dynamic mask in plain torch, for a forward without a cache."""
    groups = query.shape[1] // key.shape[1]
    scores = torch.zeros(key.shape[0], key.shape[1], key.shape[2])
    keep = mask == 0
    if hasattr(module, "dynamic_mask"):
        parts = module.dynamic_mask
        scores = parts.scores(value.transpose(1, 2))
        ranked = scores[:, :, None].detach().masked_fill(~keep, -torch.inf)
        best = ranked >= ranked.topk(parts.keep, dim=-1).values[..., -1:]
        places = torch.arange(key.shape[2])
        begin = keep[:, :, -1:].int().argmax(-1, keepdim=True)  # of each sequence, behind padding on the left
        near = (places[:, None] - places < parts.keep_last) | (places < begin + parts.keep_first)
        keep = keep & (best | near)
    scores, keep = (part.repeat_interleave(groups, dim=1) if part.shape[1] > 1 else part for part in (scores, keep))
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    weights = query @ key.transpose(-1, -2) * scaling + scores[:, :, None]
    weights = weights.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num()
    return (weights @ value).transpose(1, 2), None


transformers.AttentionInterface.register("written-out", written_out)
transformers.AttentionMaskInterface.register(
    "written-out", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["eager"]
)


def padding_of(side):
    keep = torch.ones(B, S, dtype=torch.int64)
    if side is not None:
        keep[0, slice(None, 6) if side == "left" else slice(-6, None)] = 0
    return keep


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_logits_and_gradients(name, side):
    model, ids, keep = sparse(name), tokens(B, S), padding_of(side)
    inputs = {"input_ids": ids, "attention_mask": keep}
    theirs = logits_and_gradients(under(model, "written-out"), keep.bool(), **inputs)
    ours = logits_and_gradients(under(model, "dmattn"), keep.bool(), **inputs)
    assert_same(ours, theirs)
    learned = [name for name in ours[1] if "dynamic_mask" in name]
    assert len(learned) == 3 * (1 if name == "gemma3" else 2)  # its sliding layers stay
    assert all(ours[1][name].abs().max() > 0 for name in learned)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, integration.DynamicMask):
                module.keep = S
        full = model(**inputs).logits[keep.bool()]
    assert (full - ours[0]).abs().max() > 1e-2  # something was hidden


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_decoding_sees_what_a_whole_forward_sees(kind):
    model, ids, keep = under(sparse("llama"), "dmattn"), tokens(B, S), padding_of("left")
    whole = model(ids, attention_mask=keep, use_cache=False).logits
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=32)
    parts, done = [], 0
    for part in ids.split([11, 5, 1, 1, 1], dim=1):
        done += part.shape[1]
        parts.append(model(part, attention_mask=keep[:, :done], past_key_values=cache).logits)
    rows = keep.bool()
    torch.testing.assert_close(torch.cat(parts, dim=1)[rows], whole[rows], atol=5e-5, rtol=1e-4)


@torch.no_grad()
def test_documents_choose_for_themselves():
    model, ids = under(sparse("llama"), "dmattn"), tokens(1, S)
    positions = torch.cat([torch.arange(7), torch.arange(S - 7)])[None]
    alone = torch.cat([model(part).logits for part in ids.split([7, S - 7], dim=1)], dim=1)
    packed = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed, alone, atol=5e-5, rtol=1e-4)
    offsets = torch.tensor([0, 7, S], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 12, "max_length_k": 12}
    by_offsets = model(ids, torch.ones_like(ids), position_ids=positions, use_cache=False, **lengths).logits
    torch.testing.assert_close(by_offsets, alone, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize(("side", "packed"), [(None, False), ("left", False), (None, True)])
def test_keys_of_the_masks_may_be_packed(side, packed):
    """Kernels pack keys that begin on the diagonal, which the band says: padding and documents only end them."""
    module = next(part for part in sparse("llama").modules() if isinstance(part, integration.DynamicMask))
    keep = None if side is None else padding_of(side).bool()
    documents = (torch.arange(S)[None] >= 7).int() if packed else None
    device = torch.device("cpu")
    given = forward_mask.make(S, S, 0, is_causal=True, padding=keep, documents=documents, device=device)
    made, _ = module.select(torch.randn(B, S, 2, 8), given)
    assert made.mask.start is None and made.mask.at_most == KEEP + FIRST + LAST
    assert made.band.limits(S, S)[1] == 0 and (made.to_dense().sum(-1) <= made.mask.at_most).all()


@torch.no_grad()
def test_a_model_is_hardly_changed_at_first_and_keeps_near_keys():
    model, ids = under(decoder("llama"), "dmattn"), tokens(B, S)
    before = model(ids).logits
    integration.add_dynamic_masks(model, S)
    assert (model(ids).logits - before).abs().max() < 2e-2 * before.std()
    [first, _] = [module for module in model.modules() if isinstance(module, integration.DynamicMask)]
    first.keep = 4
    mask, _ = first.select(torch.randn(B, S, 2, 8), integration.make_mask(B, S, S))
    distance = torch.arange(S)[:, None] - torch.arange(S)
    assert torch.equal(mask.to_dense()[0, 0], (distance >= 0) & (distance < 4))


def test_parameters_are_saved_with_the_model(tmp_path):
    model, ids = under(sparse("llama"), "dmattn"), tokens(B, S)
    torch.save(model.state_dict(), tmp_path / "weights")
    again = integration.add_dynamic_masks(
        copy.deepcopy(under(decoder("llama"), "dmattn")), KEEP, keep_first=FIRST, keep_last=LAST
    )
    again.load_state_dict(torch.load(tmp_path / "weights"))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_it_learns():
    model, ids = under(sparse("llama"), "dmattn"), tokens(B, S)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@torch.no_grad()
def test_padding_on_the_left_changes_nothing_also_while_generating():
    model, ids = under(sparse("llama", keep=2), "dmattn"), tokens(1, S)
    padded, keep = torch.cat([torch.zeros(1, 7, dtype=torch.int64), ids], 1), torch.ones(1, 7 + S, dtype=torch.int64)
    keep[:, :7] = 0
    positions = (keep.cumsum(1) - 1).clamp(min=0)
    with_padding = model(padded, attention_mask=keep, position_ids=positions).logits[:, 7:]
    torch.testing.assert_close(with_padding, model(ids).logits, atol=1e-4, rtol=1e-4)
    more = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    generated = model.generate(padded, attention_mask=keep, **more)[:, 7:]
    assert torch.equal(generated, model.generate(ids, attention_mask=torch.ones_like(ids), **more))


def test_a_model_with_other_attention_is_told_that_its_masks_are_not_read():
    words = r"^dmattn_ops: the model attends through 'sdpa', which does not read dynamic masks: call replace_attention"
    with pytest.warns(UserWarning, match=words) as caught:
        integration.add_dynamic_masks(under(decoder("llama"), "sdpa"), 3)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.add_dynamic_masks(under(decoder("llama"), "dmattn"), 3)


@pytest.mark.parametrize(
    ("more", "kind", "message"),
    [
        ({"keep": 0.5}, TypeError, "keep must be an int, got float"),
        ({"keep": -3}, ValueError, "keep must not be negative, got -3"),
        ({"keep": 3, "keep_last": "8"}, TypeError, "keep_last must be an int, got str"),
    ],
)
def test_wrong_numbers_of_keys_are_refused_before_a_model_is_changed(more, kind, message):
    model = under(decoder("llama"), "dmattn")
    with pytest.raises(kind, match=f"^{message}$"):
        integration.add_dynamic_masks(model, **more)
    assert not any(isinstance(module, integration.DynamicMask) for module in model.modules())


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="no attention layer"):
        integration.add_dynamic_masks(torch.nn.Linear(2, 2), 3)
    model, ids = under(sparse("llama"), "dmattn"), tokens(B, S)
    with pytest.raises(NotImplementedError, match="made by transformers beside them, got TileMask"):
        model(ids, attention_mask=torch.ones(B, 1, S, S, dtype=torch.bool))


class Hook:
    """What accelerate leaves at a module whose parameters it has moved away."""

    def __init__(self, device):
        self.execution_device = device


@pytest.mark.parametrize(
    "of_hook", [lambda hook: hook, lambda hook: type("Several", (), {"hooks": [object(), hook]})()]
)
def test_masks_of_an_offloaded_model_are_where_it_computes(of_hook):
    model = under(decoder("llama"), "dmattn")
    for layer in model.model.layers:
        layer.self_attn.v_proj.to("meta")
        layer.self_attn.v_proj._hf_hook = of_hook(Hook(torch.device("cpu")))
    integration.add_dynamic_masks(model, 3)
    made = [module for module in model.modules() if isinstance(module, integration.DynamicMask)]
    assert made and not any(parameter.is_meta for module in made for parameter in module.parameters())
    empty = integration.add_dynamic_masks(under(decoder("llama"), "dmattn").to("meta"), 3)  # to be loaded later
    assert all(parameter.is_meta for parameter in empty.parameters())


@pytest.mark.parametrize("where", ["cpu", "disk"])
@torch.no_grad()
def test_a_model_offloaded_by_accelerate_computes_what_it_did(where, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model, ids = sparse("llama"), tokens(B, S)
    expected = model(ids).logits
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    for _ in range(2):
        assert torch.equal(model(ids).logits, expected)
    integration.add_dynamic_masks(model, KEEP)
    assert model(ids).logits.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_weights_quantised_by_torchao_score_keys(dtype):
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model, ids = sparse("llama", keep=S).to(dtype), tokens(B, S)
    expected = model(ids).logits
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(), filter_fn=lambda _, name: name.endswith("dt_proj"))
    assert (model(ids).logits - expected).abs().max() < 0.2 * expected.std()


def test_adapters_of_peft_are_trained_and_keep_what_is_named_to_be_saved():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    ids = tokens(B, S)
    model = peft.get_peft_model(sparse("llama"), peft.LoraConfig(target_modules="all-linear"))
    model(ids, labels=ids).loss.backward()
    adapters = [each for name, each in model.named_parameters() if "dt_proj.lora_B" in name]
    assert adapters and all(each.grad.abs().max() > 0 for each in adapters)
    settings = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["dynamic_mask"])
    model = peft.get_peft_model(sparse("llama"), settings)
    model(ids, labels=ids).loss.backward()
    learned = {
        name.rsplit(".", 1)[-1]
        for name, each in model.named_parameters()
        if "dynamic" in name and each.grad is not None
    }
    assert learned == {"A", "slope", "weight"}

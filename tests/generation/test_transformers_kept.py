"""`kept_cache`: models with dynamic masks generate what they do with a cache of all keys, in memory of constant size."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tiny_models import decoder, tokens, under  # noqa: E402

import dmattn_ops.integrations.transformers as integration  # noqa: E402
from tests.integrations.test_transformers_dynamic import padding_of, sparse  # noqa: E402

B, S = 2, 19
WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 2.0},
    "beams": {"do_sample": False, "num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("way", WAYS)
def test_generating_is_what_it_is_with_all_keys(way: str, name: str):
    model, ids, keep = under(sparse(name), "dmattn"), tokens(B, S), padding_of("left")
    texts = []
    for cache in (None, integration.kept_cache(model)):
        torch.manual_seed(4)
        more = {"past_key_values": cache} if cache is not None else {}
        texts.append(model.generate(ids, attention_mask=keep, max_new_tokens=14, pad_token_id=0, **WAYS[way], **more))
    assert torch.equal(*texts) and texts[0].shape[1] == S + 14
    assert cache.get_seq_length() == S + 13


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@torch.no_grad()
def test_logits_of_parts_are_those_of_the_whole(name: str, side: str | None):
    model, ids, keep = under(sparse(name), "dmattn"), tokens(B, S), padding_of(side)
    whole = model(ids, attention_mask=keep, use_cache=False).logits
    cache, parts, done = integration.kept_cache(model, rollback=2), [], 0
    for part in ids.split([9, 4, 1, 1, 4], dim=1):
        done += part.shape[1]
        parts.append(model(part, attention_mask=keep[:, :done], past_key_values=cache).logits)
    rows = keep.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[rows], whole[rows], atol=5e-5, rtol=1e-4)
    if name != "gemma3":  # whose sliding windows must be told beforehand that positions are taken back
        cache.crop(-2)
        again = model(ids[:, -2:], attention_mask=keep, past_key_values=cache).logits
        torch.testing.assert_close(again[rows[:, -2:]], whole[:, -2:][rows[:, -2:]], atol=5e-5, rtol=1e-4)


@torch.no_grad()
def test_memory_is_constant_and_copies_go_on_by_themselves():
    model, ids = under(sparse("llama"), "dmattn"), tokens(B, S)
    cache = integration.kept_cache(model)
    model(ids, past_key_values=cache)
    size, copied = cache.nbytes, copy.deepcopy(cache)
    more = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    text = model.generate(torch.cat([ids, ids[:, :1]], 1), past_key_values=cache, **more)
    assert cache.nbytes == size > 0
    assert torch.equal(model.generate(torch.cat([ids, ids[:, :1]], 1), past_key_values=copied, **more), text)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model.generate(torch.cat([ids, ids[:, :1]], 1), past_key_values=cache, **more), text)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="has no dynamic masks: call add_dynamic_masks"):
        integration.kept_cache(under(decoder("llama"), "dmattn"))
    with pytest.raises(TypeError, match="model must be one of transformers, with a config, got Linear"):
        integration.kept_cache(torch.nn.Linear(2, 2))
    model, ids = under(sparse("llama"), "dmattn"), tokens(B, S)
    with pytest.raises(ValueError, match="rollback must not be negative, got -1"):
        integration.kept_cache(model, rollback=-1)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="takes causal masks and padding"):
        model(
            ids, attention_mask=torch.ones(B, 1, S, S, dtype=torch.bool), past_key_values=integration.kept_cache(model)
        )
    cache = integration.kept_cache(model)
    with torch.no_grad(), pytest.raises(RuntimeError, match="did not reach the attention"):
        for _ in range(2):
            under(model, "sdpa")(ids, past_key_values=cache)

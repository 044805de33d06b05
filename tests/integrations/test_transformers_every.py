"""Every type of model that transformers knows: with padding it gives what `eager` gives, or refuses in one sentence."""

import inspect
import re

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import every_model  # noqa: E402

import dmattn_ops.integrations.transformers as integration  # noqa: E402
from dmattn_ops.integrations.acts_as_tensor import as_additive  # noqa: E402

integration.register()
REFUSED = r"does not go through AttentionInterface|is not supported: let this model attend through 'eager'"
APART = (5, 7)  # lengths of two sequences in a row


def check(kind):
    """Compare one type with `eager`, and its packed sequences with each alone; return whether such a model could be made."""
    made = every_model.tiny(kind)
    if made is None:
        return False
    config, inputs, expected = made
    try:
        model = every_model.build(config, "dmattn")
        found = every_model.output(model, inputs)
    except (ValueError, NotImplementedError) as refusal:
        assert refusal.args and re.search(REFUSED, str(refusal)), refusal
        return True
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3, equal_nan=True)
    takes = inspect.signature(type(model).forward).parameters
    if "position_ids" in takes and set(inputs) == {"input_ids", "attention_mask"}:
        row = inputs["input_ids"][1:]
        positions = torch.cat([torch.arange(length) for length in APART])[None]
        parts = zip(row.split(APART, 1), positions.split(APART, 1), strict=True)
        alone = [every_model.output(model, {"input_ids": part, "position_ids": own}) for part, own in parts]
        if alone[0].shape[:2] != (1, APART[0]):
            return True  # nothing for each token
        whole = {"input_ids": row, "position_ids": positions, "attention_mask": torch.ones_like(row)}
        try:
            packed = every_model.output(model, whole)
        except NotImplementedError as refusal:
            assert "tell of packed sequences" in str(refusal), refusal
            return True
        torch.testing.assert_close(packed.flatten(), torch.cat(alone, 1).flatten(), atol=1e-3, rtol=1e-3)
    return True


# models whose own code computes with its mask, and one of each other kind
@pytest.mark.parametrize("kind", ["t5gemma2", "lasr_encoder", "bert", "bloom", "falcon", "git"])
def test_a_model_is_right_or_refuses(kind):
    assert check(kind)


@torch.no_grad()
def test_an_encoder_of_images_that_computes_with_its_mask():
    config = transformers.Siglip2VisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, patch_size=4, num_patches=16
    )
    keep = torch.ones(2, 16, dtype=torch.int64)
    keep[0, 12:] = 0
    inputs = {"pixel_values": torch.randn(2, 16, 48), "pixel_attention_mask": keep, "attention_mask": keep}
    inputs["spatial_shapes"] = torch.tensor([[3, 4], [4, 4]])
    model = every_model.drawn(transformers.Siglip2VisionModel(config))
    takes = inspect.signature(model.forward).parameters
    inputs = {name: value for name, value in inputs.items() if name in takes}
    found = {}
    for name in ("eager", "dmattn"):
        model.set_attn_implementation(name)
        found[name] = model(**inputs)
    rows = keep.bool()
    torch.testing.assert_close(found["dmattn"][0][rows], found["eager"][0][rows], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found["dmattn"].pooler_output, found["eager"].pooler_output, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", every_model.types())
def test_every_type_is_right_or_refuses(kind):
    check(kind)  # of some nothing can be made without a word of their own


@pytest.mark.parametrize("kind", ["causal", "padded"])
def test_a_mask_is_the_tensor_that_a_models_code_expects(kind):
    keep = torch.tensor([[False, True, True, True], [True] * 4]) if kind == "padded" else None
    mask = integration.make_mask(2, 4, 4, attention_mask=keep)
    dense = torch.ones(4, 4, dtype=torch.bool).tril().expand(2, 1, 4, 4) & (
        True if keep is None else keep[:, None, None]
    )
    other, scores = torch.rand(2, 1, 4, 4) > 0.5, torch.randn(2, 3, 4, 4)
    additive = as_additive(dense, torch.float32)
    asked = {
        "index": lambda m: m[:, :, 1:, :3],
        "ellipsis": lambda m: m[..., -1],
        "and": lambda m: m & other,
        "and, from the right": lambda m: other & m,
        "or": lambda m: m | other,
        "invert": lambda m: ~m,
        "equal": lambda m: m == 0,
        "unequal": lambda m: m != 0,
        "torch.where": lambda m: torch.where(m, 0.0, 1.0),
        "torch.cat": lambda m: torch.cat([m, other], dim=-1),
        "torch.logical_not": lambda m: torch.logical_not(m),
        "masked_fill": lambda m: scores.masked_fill(~m, -1.0),
        "masked_fill by itself": lambda m: scores.masked_fill(m, -1.0),
        "bool": lambda m: m.bool(),
        "float": lambda m: m.float(),
        "to a dtype": lambda m: m.to(torch.float32),
        "to a dtype by name": lambda m: m.to(dtype=torch.int64),
        "like another": lambda m: m.to(scores),
        "unsqueeze": lambda m: m.squeeze(1).unsqueeze(1).expand(2, 3, 4, 4),
        "any": lambda m: m.any(-1),
        "size": lambda m: torch.tensor([*m.size(), m.dim(), m.numel(), m.ndim]),
        "shape": lambda m: torch.tensor(m.shape),
    }
    for name, ask in asked.items():
        assert torch.equal(ask(mask), ask(dense)), name
    assert (mask.dtype, mask.device, mask.shape) == (dense.dtype, dense.device, dense.shape)
    assert torch.equal(scores + mask, scores + additive) and torch.equal(mask + scores, scores + additive)
    assert torch.equal(torch.add(scores, mask), scores + additive)
    assert mask == mask and mask != None and mask != "causal"  # noqa: E711
    assert not hasattr(mask, "no_such_name") and mask.to("cpu").shape == mask.shape
    for change in (lambda: mask.masked_fill_(other, False), lambda: mask.__setitem__((0, 0), True)):
        with pytest.raises(NotImplementedError, match=r"^the model's code changes its mask in place .*TENSOR_MASKS$"):
            change()

"""Masks of transformers as one mask of a forward: equal, element by element, to what its own `sdpa_mask` makes."""

import inspect
import itertools

import pytest
import torch

masking_utils = pytest.importorskip("transformers.masking_utils", reason="transformers is not installed")

from types import SimpleNamespace  # noqa: E402

from dmattn_ops.bands import band_of  # noqa: E402
from dmattn_ops.integrations import forward_mask  # noqa: E402
from dmattn_ops.integrations.forward_mask import ForwardMask  # noqa: E402
from dmattn_ops.integrations.transformers import attention_forward, make_mask  # noqa: E402
from dmattn_ops.masks import layout  # noqa: E402

B = 3
CONFIG = SimpleNamespace(model_type="llama", attention_chunk_size=None)
CHUNKED = SimpleNamespace(model_type="llama4_text", attention_chunk_size=5)
LENGTHS = {  # q_length, kv_length, q_offset, kv_offset
    "whole": (12, 12, 0, 0),
    "one": (1, 1, 0, 0),
    "decode": (1, 12, 11, 0),
    "chunk of a prefill": (4, 12, 8, 0),
    "sliding cache": (1, 7, 20, 14),
    "chunk, sliding cache": (4, 10, 20, 14),
    "empty static cache": (5, 12, 0, 0),
    "static cache": (1, 12, torch.tensor(6), 0),
    "static cache, several": (3, 12, torch.tensor(6), 0),
    "static sliding cache": (1, 7, torch.tensor(20), 14),
}


def dense(mask):
    """What a ForwardMask shows, by the keywords or the prepared mask that a call gets."""
    assert isinstance(mask, ForwardMask)
    if mask.prepared is not None:
        return mask.prepared.to_dense()
    keywords = mask.keywords
    band = band_of(keywords["is_causal"], keywords["causal_from"], keywords["window_size"])
    lengths = mask.shape[2:]
    return layout.band_mask(*band.limits(*lengths), *lengths, None)[None, None]


def padding_of(kind, keys):
    if kind is None:
        return None
    places = torch.arange(keys)
    lengths = torch.tensor([0, 3, keys - 1])[:, None]
    return {"left": places >= lengths, "right": places < keys - lengths, "all": torch.ones(B, keys, dtype=torch.bool)}[
        kind
    ]


def same(lengths, function, padding, local_size=None, config=CONFIG, **flags):
    q_length, kv_length, q_offset, kv_offset = lengths
    arguments = {
        "batch_size": B,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": function,
        "attention_mask": padding,
        "local_size": local_size,
        "device": torch.device("cpu"),
    }
    expected = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False, use_vmap=flags.get("use_vmap", False))
    made = make_mask(**arguments, config=config, **flags)
    assert torch.equal(dense(made).expand_as(expected), expected)
    return made


@pytest.mark.parametrize("padding", [None, "all", "left", "right"])
@pytest.mark.parametrize("name", LENGTHS)
def test_causal_and_sliding(name, padding):
    lengths = LENGTHS[name]
    end = lengths[1] + lengths[3]
    given = padding_of(padding, end if not name.startswith("static") else end - 2)  # the rest of a cache is unknown
    made = same(lengths, masking_utils.causal_mask_function, given)
    nothing_hidden = padding is None or (padding == "all" and given.shape[1] == end)
    if name != "one":
        assert (made.prepared is None) == (nothing_hidden and isinstance(lengths[2], int))
    for window in (1, 4, 40):
        same(lengths, masking_utils.sliding_window_causal_mask_function(window), given, window)


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", LENGTHS)
def test_chunks(name, padding):
    lengths = LENGTHS[name]
    given = padding_of(padding, lengths[1] + lengths[3])
    left = torch.zeros(B, dtype=torch.int64) if padding != "left" else (~given).sum(-1)
    function = masking_utils.chunked_causal_mask_function(5, left)
    same(lengths, function, given, 5, CHUNKED)
    same(lengths, function, given, 5, CHUNKED, allow_is_causal_skip=False)


@pytest.mark.parametrize("since_5_24", [False, True])  # the order in which transformers joins both conditions
@pytest.mark.parametrize("window", [None, 1, 3])
def test_packed_sequences(window, since_5_24):
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 5], list(range(12)), [0, *range(11)]])
    ids = masking_utils.find_packed_sequence_indices(positions)
    base = masking_utils.causal_mask_function
    if window is not None:
        base = masking_utils.sliding_window_causal_mask_function(window)
    apart = masking_utils.packed_sequence_mask_function(ids)
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # older releases have none
    inside = base if remap is None else remap(base, positions)
    function = masking_utils.and_masks(*((inside, apart) if since_5_24 else (apart, inside)))
    made = same((12, 12, 0, 0), function, None, window, allow_is_causal_skip=False)
    assert made.prepared.kind == "segments"
    assert made.prepared.row_tiles is not None


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", LENGTHS)
def test_where_lists_of_tiles_would_be_long_masks_are_intervals_and_show_the_same(name, padding, monkeypatch):
    lengths = LENGTHS[name]
    given = padding_of(padding, lengths[1] + lengths[3])
    left = torch.zeros(B, dtype=torch.int64) if padding != "left" else (~given).sum(-1)
    chunks = masking_utils.chunked_causal_mask_function(5, left), given, 5, CHUNKED
    sliding = masking_utils.sliding_window_causal_mask_function(4), given, 4
    on_the_host = isinstance(lengths[2], int)
    for longest, kind in ((None, "segments" if on_the_host else "intervals"), (0, "intervals")):
        if longest is not None:
            monkeypatch.setattr(forward_mask, "_LONGEST_LISTS", longest)
        for described in (chunks, sliding):
            made = same(lengths, *described).prepared
            if made is not None:
                assert made.kind == kind
                assert kind == "segments" or made.nbytes <= 2 * 4 * B * lengths[1]


def test_long_lists_are_told_by_lengths_batch_and_window():
    def kind(batch, length, window=None):
        padding = torch.ones(batch, length, dtype=torch.bool, device="meta")
        lengths = ForwardMask(length, length, 0, True, window, None, None, padding)
        return lengths.prepare(padding.device).prepared.kind

    assert [kind(4, 131072), kind(16, 131072), kind(16, 131072, 4095)] == ["segments", "intervals", "segments"]


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize(("q_length", "kv_length"), [(12, 12), (5, 12), (1, 12)])
def test_both_ways(q_length, kv_length, padding):
    lengths, given = (q_length, kv_length, 0, 0), padding_of(padding, kv_length)
    flags = {"allow_is_bidirectional_skip": True, "allow_is_causal_skip": False}
    same(lengths, masking_utils.bidirectional_mask_function, given, **flags)
    for window in (0, 1, 4):
        function = masking_utils.sliding_window_bidirectional_mask_function(window)
        same(lengths, function, given, window, **flags)


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", ["whole", "chunk of a prefill", "static cache"])
def test_functions_of_a_models_own_are_evaluated(name, padding):
    lengths = LENGTHS[name]
    given = padding_of(padding, lengths[1])
    blocks = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, -1, 2, 2]]).expand(B, -1)
    overlaid = masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(blocks))
    assert same(lengths, overlaid, given, allow_is_causal_skip=False).dense

    def odd(batch, head, query, key):
        return (query + key) % 3 != 0

    both = masking_utils.and_masks(masking_utils.causal_mask_function, odd)
    assert same(lengths, both, given, allow_is_causal_skip=False, use_vmap=True).dense
    assert same(lengths, both, given).dense  # told by what it was made of
    inside = masking_utils.and_masks(masking_utils.causal_mask_function, overlaid)
    assert same(lengths, inside, given).dense
    same(lengths, odd, given)


# until transformers 5.23 the other name; it goes in 5.40
CACHE = "cache" if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters else "past_key_values"
CREATORS = ("causal", "sliding_window_causal", "chunked_causal", "bidirectional", "bidirectional_sliding_window")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("creator", CREATORS)
def test_the_functions_that_models_call_make_the_same(creator, packed, compiled):
    function = getattr(masking_utils, f"create_{creator}_mask")
    masking_utils.AttentionMaskInterface.register("dmattn-test", make_mask)
    causal = "causal" in creator
    skip = "allow_is_causal_skip" if causal else "allow_is_bidirectional_skip"
    chunk = 5 if creator == "chunked_causal" else None
    configs = {
        implementation: SimpleNamespace(
            model_type="x",
            is_causal=True,
            sliding_window=4,
            attention_chunk_size=chunk,
            _attn_implementation=implementation,
        )
        for implementation in ("sdpa", "dmattn-test")
    }

    def made_by(config, embeddings, positions, **keywords):
        given = {"attention_mask": None, CACHE: None, "position_ids": positions}
        return function(config, embeddings, **given, **keywords)

    embeddings = torch.zeros(2, 10, 1)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2]]) if packed and causal else None
    ours = torch.compile(made_by, fullgraph=True, backend="eager") if compiled else made_by
    expected = made_by(configs["sdpa"], embeddings, positions, **{skip: False})
    assert torch.equal(dense(ours(configs["dmattn-test"], embeddings, positions)).expand_as(expected), expected)


def test_models_that_compute_with_their_mask_get_a_tensor():
    mask = make_mask(2, 4, 4, config=SimpleNamespace(model_type="doge"))
    assert torch.equal(mask, torch.ones(4, 4, dtype=torch.bool).tril().expand(2, 1, 4, 4))


def test_models_that_add_to_their_mask_get_an_additive_one():
    padding = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    config = SimpleNamespace(model_type="deepseek_v4")
    mask = make_mask(2, 4, 4, attention_mask=padding, config=config, dtype=torch.bfloat16)
    visible = torch.ones(4, 4, dtype=torch.bool).tril() & padding[:, None, None]
    assert mask.dtype == torch.bfloat16
    assert torch.equal(mask == 0, visible)
    assert torch.equal(mask == torch.finfo(torch.bfloat16).min, ~visible)


def test_keys_that_a_mask_does_not_know_of_are_refused():
    query, key = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 6, 8)
    words = r"^the model attends to 6 keys, and its mask was made for 4: add its config.model_type to .*TENSOR_MASKS"
    with pytest.raises(ValueError, match=words):
        attention_forward(torch.nn.Module(), query, key, key, make_mask(2, 4, 4))


def test_padding_of_another_rank_is_refused_in_words():
    words = (
        r"^attention_mask must be padding \[B, S\], or a mask \[B, 1, S, S\], bool or additive, got shape \(2, 4, 4\)$"
    )
    with pytest.raises(ValueError, match=words):
        make_mask(2, 4, 4, attention_mask=torch.ones(2, 4, 4).tril())


def test_a_mask_that_was_made_before_is_returned():
    mask = make_mask(2, 4, 4)
    assert mask.ndim == 4
    assert mask.contiguous() is mask
    assert make_mask(2, 4, 4, attention_mask=mask) is mask
    assert mask.to("cpu").prepared is None
    padded = make_mask(2, 4, 4, attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]))
    moved = padded.to("meta")
    assert moved.prepared.device.type == moved.padding.device.type == "meta"


@pytest.mark.parametrize(("keep", "first", "last"), [(1, 0, 0), (3, 1, 2), (40, 0, 0)])
def test_best_keys_are_chosen_among_those_that_the_mask_shows(keep, first, last):
    names = ("whole", "chunk of a prefill", "decode", "static cache, several")
    for name, padding in itertools.product(names, (None, "left", "right")):
        q_length, kv_length, q_offset, _ = LENGTHS[name]
        given = padding_of(padding, kv_length)
        mask = make_mask(B, q_length, kv_length, q_offset, attention_mask=given)
        scores = torch.randn(B, 2, kv_length)
        made = mask.with_best(scores, keep, first, last).to_dense().expand(B, 2, -1, -1)
        for b, h, i in itertools.product(range(B), range(2), range(q_length)):
            place = i + int(q_offset)
            shown = [j for j in range(place + 1) if given is None or given[b, j]]
            best = sorted(shown, key=lambda j: -scores[b, h, j])[:keep]
            begin = 0 if given is None else int(given[b].int().argmax())  # behind padding on the left
            seen = {j for j in shown if j in best or j < begin + first or place - j < last}
            assert set(made[b, h, i].nonzero().flatten().tolist()) == seen


@pytest.mark.parametrize("mask", [torch.ones(1, 1, 6, 6, dtype=torch.bool).tril(), torch.zeros(1, 1, 6, 6)])
def test_what_an_evaluation_prepared_serves_the_training_after_it(mask: torch.Tensor) -> None:
    module = torch.nn.Module()
    query = torch.randn(1, 2, 6, 8, requires_grad=True)
    with torch.inference_mode():
        evaluated, _ = attention_forward(module, query.detach(), query.detach(), query.detach(), mask)
    trained, _ = attention_forward(module, query, query, query, mask)
    trained.sum().backward()
    assert torch.equal(evaluated, trained.detach()) and query.grad.isfinite().all()

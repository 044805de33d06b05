"""Masks as flex_attention has them, and back: the same elements, and the same attention."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from dmattn_ops import TileMask, dynamic_mask, flash_dmattn_func, prepare_mask
from dmattn_ops.flex import mask_mod, tile_classes, to_block_mask

B, H, HKV, S = 2, 4, 2, 300


def intervals(queries):
    start = torch.randint(0, queries, (B, HKV, S), dtype=torch.int32)
    end = start + torch.randint(-5, queries, (B, HKV, S), dtype=torch.int32)
    hidden = (start + 3, start + torch.randint(3, 40, (B, HKV, S), dtype=torch.int32))
    return {"intervals": (start, end), "hidden": hidden, "seqlen_q": queries}


def blocks_of_queries():
    keep = torch.zeros(1, 1, S, S, dtype=torch.bool)
    keep[..., :128, 128:256] = True
    keep[..., 128:, :128] = torch.rand(S - 128, 128) < 0.5
    return keep


MASKS = {
    "bits": lambda: prepare_mask(torch.rand(B, H, S, S) < 0.3),
    "bits of key heads": lambda: prepare_mask(torch.rand(1, HKV, 200, S) < 0.3, is_causal=True),
    "blocks": lambda: prepare_mask(blocks_of_queries()),
    "padding": lambda: prepare_mask(torch.arange(S) >= torch.tensor([[0], [140]]), seqlen_q=S),
    "documents": lambda: prepare_mask(documents=(torch.arange(S)[None] // 90), is_causal=True),
    "keys": lambda: prepare_mask(torch.rand(B, HKV, 1, S) < 0.5, seqlen_q=S, window_size=(40, 3)),
    "intervals": lambda: prepare_mask(**intervals(S)),
    "intervals, fewer queries": lambda: prepare_mask(**intervals(130), is_causal=True),
    "dynamic": lambda: dynamic_mask(torch.randn(B, HKV, S), 20, keep_first=1, keep_last=4),
}


@pytest.mark.parametrize("name", MASKS)
def test_there_and_back(name):
    mask: TileMask = MASKS[name]()
    block_mask = to_block_mask(mask)
    assert tuple(block_mask.shape) == tuple(mask.shape)
    assert torch.equal(prepare_mask(block_mask).to_dense(), mask.to_dense())
    for_queries = to_block_mask(mask, heads=H)
    dense = mask.to_dense()
    if dense.shape[1] == HKV:
        dense = dense.repeat_interleave(H // HKV, dim=1)
    assert torch.equal(prepare_mask(for_queries).to_dense(), dense)


@pytest.mark.parametrize("name", MASKS)
def test_flex_attention_computes_the_same(name):
    mask = MASKS[name]()
    query = torch.randn(B, mask.seqlen_q, H, 16)
    key, value = torch.randn(B, S, HKV, 16), torch.randn(B, S, HKV, 16)
    expected = flash_dmattn_func(query, key, value, mask)
    heads_first = [part.transpose(1, 2) for part in (query, key, value)]
    out = flex_attention(*heads_first, block_mask=to_block_mask(mask, heads=H), enable_gqa=True)
    torch.testing.assert_close(out.transpose(1, 2), expected, atol=1e-5, rtol=1e-4)


def test_tiles_that_are_hidden_or_whole_are_known_to_be():
    block_mask = to_block_mask(MASKS["blocks"]())
    assert block_mask.to_dense()[0, 0].tolist() == [[0, 1, 0], [1, 0, 0], [1, 0, 0]]
    assert block_mask.full_kv_num_blocks[0, 0].tolist() == [1, 0, 0]
    near = to_block_mask(dynamic_mask(torch.zeros(1, 1, S), 0, keep_last=5))
    assert near.to_dense()[0, 0].tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_a_block_mask_of_flex_comes_back_as_it_was():
    def odd(b, h, i, j):
        return ((i + j + b + h) % 3 == 0) & (i >= j)

    block_mask = create_block_mask(odd, B, H, S, S, device="cpu")
    again = to_block_mask(prepare_mask(block_mask))
    dense = create_mask(odd, B, H, S, S, device="cpu")
    assert torch.equal(create_mask(mask_mod(prepare_mask(block_mask)), B, H, S, S, device="cpu"), dense)
    assert torch.equal(prepare_mask(again).to_dense(), dense)


def test_heads_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="heads must be a multiple of 2, the heads of the mask, got 3"):
        to_block_mask(MASKS["dynamic"](), heads=3)
    for heads in (0, -2):
        with pytest.raises(ValueError, match=f"heads must be positive, got {heads}"):
            to_block_mask(MASKS["dynamic"](), heads=heads)


@pytest.mark.parametrize("function", [to_block_mask, tile_classes, mask_mod])
def test_a_mask_that_is_not_prepared_is_refused(function):
    with pytest.raises(TypeError, match=r"^mask must come from prepare_mask or dynamic_mask, got Tensor$"):
        function(torch.ones(1, 1, 4, 4, dtype=torch.bool))

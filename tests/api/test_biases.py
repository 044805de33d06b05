"""ALiBi and T5's distances as biases: against their definitions and, where it is installed, transformers' own."""

import math

import pytest
import torch
from formula import textbook

import dmattn_ops
from dmattn_ops import biases


def test_alibi_slopes_are_those_of_its_authors():
    torch.testing.assert_close(biases.alibi_slopes(8), 2.0 ** -torch.arange(1.0, 9.0))
    torch.testing.assert_close(biases.alibi_slopes(12)[:8], biases.alibi_slopes(8))
    torch.testing.assert_close(biases.alibi_slopes(12)[8:], 2.0 ** -torch.tensor([0.5, 1.5, 2.5, 3.5]))
    with pytest.raises(ValueError, match="heads must be positive"):
        biases.alibi_slopes(0)


@pytest.mark.parametrize("lengths", [(9, 9), (4, 9), (1, 9)])
def test_a_number_for_each_key_is_alibi_in_causal_calls(lengths):
    query, key = torch.randn(2, lengths[0], 8, 16), torch.randn(2, lengths[1], 8, 16)
    slopes = biases.alibi_slopes(8)
    out, lse = dmattn_ops.flash_dmattn_func(
        query, key, key, bias=biases.alibi_of_keys(slopes, lengths[1]), is_causal=True, return_lse=True
    )
    dense = biases.alibi_of_distances(slopes, *lengths)
    assert dense.shape == (1, 8, *lengths)
    assert dense[0, 0, 0, lengths[1] - lengths[0]] == 0
    expected, log_sums = textbook(query, key, key, bias=dense, is_causal=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse + biases.alibi_lse(slopes, lengths[0]), log_sums)


def test_alibi_of_packed_sequences_starts_again_in_each():
    slopes, offsets = torch.rand(2, 8), torch.tensor([0, 3, 10], dtype=torch.int32)
    packed = biases.alibi_of_packed_keys(slopes, offsets, 10)
    assert torch.equal(packed[:, :3], biases.alibi_of_keys(slopes[:1], 3)[0, :, 0])
    assert torch.equal(packed[:, 3:], biases.alibi_of_keys(slopes[1:], 7)[0, :, 0])
    moved = biases.alibi_packed_lse(slopes, offsets, 10)
    assert torch.equal(moved[:, 3:], biases.alibi_lse(slopes[1:], 7)[0])
    shared = biases.alibi_of_packed_keys(slopes[0], offsets, 10)
    assert torch.equal(shared[:, 3:], biases.alibi_of_keys(slopes[0], 7)[0, :, 0])


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("lengths", [(200, 200), (3, 200)])
def test_t5_buckets_are_those_of_transformers(lengths, bidirectional):
    pytest.importorskip("transformers")
    from transformers.models.t5.modeling_t5 import T5Attention

    queries = torch.arange(lengths[1] - lengths[0], lengths[1])
    relative = torch.arange(lengths[1]) - queries[:, None]
    expected = T5Attention._relative_position_bucket(relative, bidirectional, 32, 128)
    assert torch.equal(biases.t5_buckets(*lengths, bidirectional=bidirectional), expected)


def test_t5_buckets_are_exact_for_near_keys_and_logarithmic_for_far_ones():
    row = biases.t5_buckets(1, 300, bidirectional=False)[0].flip(0)
    assert row[:16].tolist() == list(range(16))
    assert row[16:].diff().min() >= 0
    assert row[128] == row[-1] == 31
    assert row[64] == 16 + int(math.log(4) / math.log(8) * 16)
    both = biases.t5_buckets(300, 300)
    assert (both.triu(1)[0, 1:] >= 16).all()
    assert both.tril().max() == 15


def test_t5_bias_learns():
    weight = torch.randn(32, 4, requires_grad=True)
    query = torch.randn(2, 40, 4, 16)
    bias = biases.t5_bias(weight, 40, 40)
    out = dmattn_ops.flash_dmattn_func(query, query, query, bias=bias)
    expected = textbook(query, query, query, bias=weight[biases.t5_buckets(40, 40)].permute(2, 0, 1)[None])[0]
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), weight),
        torch.autograd.grad(expected.square().sum(), weight),
        atol=2e-5,
        rtol=2e-4,
    )

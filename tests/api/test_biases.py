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


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_that_leave_no_distance_of_its_own_or_none_beyond_are_refused(bidirectional):
    least = 4 if bidirectional else 2
    biases.t5_buckets(3, 300, least, 2, bidirectional=bidirectional)
    for buckets in (0, 1, least - 1):
        with pytest.raises(
            ValueError, match=f"^buckets must be at least {least} where bidirectional is {bidirectional}"
        ):
            biases.t5_buckets(3, 300, buckets, bidirectional=bidirectional)
    exact = 8 if bidirectional else 16
    for distance in (0, exact - 1, exact):  # between: a logarithm that falls, and far keys in the buckets of near ones
        with pytest.raises(ValueError, match=f"^max_distance must exceed {exact}, .*, got {distance}$"):
            biases.t5_buckets(3, 300, 32, distance, bidirectional=bidirectional)
    row = biases.t5_buckets(1, 300, 32, exact + 1, bidirectional=bidirectional)[0].flip(0)
    assert row.diff().min() >= 0 and row[-1] == 2 * exact - 1


def test_what_is_no_tensor_of_slopes_or_weights_is_refused_in_words():
    offsets = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    for slopes in ([0.5, 0.25], "alibi"):
        for call in (
            biases.alibi_of_keys,
            biases.alibi_lse,
            lambda part, total: biases.alibi_of_distances(part, 3, total),
        ):
            with pytest.raises(TypeError, match=r"^slopes must be a tensor, got (list|str)$"):
                call(slopes, 6)
    for call in (biases.alibi_of_packed_keys, biases.alibi_packed_lse):
        with pytest.raises(TypeError, match=r"^slopes must be a tensor, got list$"):
            call([0.5], offsets, 6)
        for sequences in (2, 4):  # of three
            with pytest.raises(ValueError, match=rf"^slopes must have shape \(3 or 1, 2\), got \({sequences}, 2\)$"):
                call(torch.rand(sequences, 2), offsets, 6)
    with pytest.raises(ValueError, match=r"^weight must have 2 dimensions, got 1"):
        biases.t5_bias(torch.rand(32), 3, 3)


def test_packed_positions_without_a_sequence_have_a_bias_that_nobody_sees():
    none = torch.zeros(1, dtype=torch.int32)
    assert biases.alibi_of_packed_keys(torch.rand(2), none, 3).shape == (2, 3)
    assert biases.alibi_packed_lse(torch.rand(2), none, 3).shape == (2, 3)

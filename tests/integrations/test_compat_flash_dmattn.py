"""flash_dmattn 1.2.2 by its own calls: its README, its benchmarks' reference, every argument and what it meant there."""

import inspect
import math
import types

import pytest
import torch
from formula import textbook
from torch.nn import functional as F

import dmattn_ops.compat.flash_dmattn as flash_dmattn
from dmattn_ops.compat.flash_dmattn import (
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_varlen_func,
    flex_dmattn_func,
    triton_dmattn_func,
)
from dmattn_ops.compat.flash_dmattn.flash_dmattn_flex import flex_attention_forward
from dmattn_ops.compat.flash_dmattn.flash_dmattn_interface import flash_dmattn_func as of_interface
from dmattn_ops.compat.flash_dmattn.flash_dmattn_triton import triton_dmattn_func as of_triton
from dmattn_ops.compat.flash_dmattn.integrations.flash_dynamic_mask_attention import (
    flash_dynamic_mask_attention_forward,
)
from dmattn_ops.compat.flash_dmattn.utils.mask import create_mask, dynamic_mask
from dmattn_ops.compat.flash_dmattn.utils.padding import (
    get_unpad_data,
    index_first_axis,
    pad_input,
    unpad_input,
    upad_input,
)

B, S, H, HKV, D = 2, 40, 4, 2, 16


def inputs(seqlen_q=S, seqlen_k=S, dtype=torch.float32):
    query = torch.randn(B, seqlen_q, H, D, dtype=dtype)
    key, value = (torch.randn(B, seqlen_k, HKV, D, dtype=dtype) for _ in range(2))
    return query, key, value


def reference_of_its_benchmarks(query, key, value, bias, causal, keep):
    """What `dynamic_mask_attention_python` computes: heads first, keys repeated, top-k of the biases of visible keys."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    if not causal:
        visible = torch.ones_like(visible)
    least = torch.finfo(query.dtype).min
    values, indices = torch.topk(bias.masked_fill(~visible, least), keep, dim=-1)
    mask = torch.zeros_like(bias, dtype=torch.bool).scatter(-1, indices, values != least)
    key, value, bias, mask = (part.repeat_interleave(groups, dim=1) for part in (key, value, bias, mask))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + bias
    weights = F.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    return (weights @ value).transpose(1, 2)


def test_the_readme_of_1_2_2_runs_with_its_import_line_changed():
    query, key, value = (part.requires_grad_() for part in inputs())
    attn_bias = torch.randn(B, HKV, S, S, requires_grad=True)
    attn_mask = create_mask(
        attention_bias=attn_bias,
        attention_mask=None,
        batch_size=B,
        query_len=S,
        key_len=S,
        window_size=S,
        min_dtype=torch.finfo(torch.float32).min,
    )
    attend = flash_dmattn_func_auto(backend="cuda")
    output = attend(
        query=query,
        key=key,
        value=value,
        attn_mask=attn_mask,
        attn_bias=attn_bias,
        is_causal=True,
        softmax_scale=1.0 / math.sqrt(D),
    )
    expected = reference_of_its_benchmarks(query, key, value, attn_bias, True, S)
    torch.testing.assert_close(output, expected)
    leaves = (query, key, value, attn_bias)
    gradients = torch.autograd.grad(output.sum(), leaves)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), leaves), atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("backend", ["cuda", "triton", "flex"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(S, S), (7, S), (1, S)])
def test_the_best_biases_of_visible_keys_as_its_benchmarks_compare_them(backend, causal, lengths):
    query, key, value = inputs(*lengths)
    bias = torch.randn(B, HKV, *lengths)
    visible = torch.ones(*lengths, dtype=torch.bool).tril(lengths[1] - lengths[0])
    mask = dynamic_mask(bias, visible[None, None] if causal else None, 11, torch.finfo(torch.float32).min)
    output = flash_dmattn_func_auto(backend)(query, key, value, attn_mask=mask, attn_bias=bias, is_causal=causal)
    torch.testing.assert_close(output, reference_of_its_benchmarks(query, key, value, bias, causal, 11))


def test_positional_orders_of_the_functions_differ():
    query, key, value = inputs()
    expected = textbook(query, key, value, is_causal=True, softmax_scale=0.5)[0]
    torch.testing.assert_close(flash_dmattn_func(query, key, value, None, None, 0.5, True), expected)
    torch.testing.assert_close(triton_dmattn_func(query, key, value, None, None, True, 0.5), expected)
    torch.testing.assert_close(flex_dmattn_func(query, key, value, None, None, True, 0.5), expected)
    assert of_interface is flash_dmattn_func
    assert of_triton is triton_dmattn_func
    assert flex_attention_forward is flex_dmattn_func


def test_none_means_what_it_meant():
    query, key, value = inputs()
    torch.testing.assert_close(
        flash_dmattn_func(query, key, value, is_causal=None, softcap=None, softmax_scale=None),
        textbook(query, key, value)[0],
    )
    torch.testing.assert_close(flex_dmattn_func(query, key, value), textbook(query, key, value, is_causal=True)[0])


def test_flex_no_longer_ignores_its_mask():
    query, key, value = inputs()
    mask = torch.rand(B, H, S, S) < 0.5
    torch.testing.assert_close(
        flex_dmattn_func(query, key, value, attn_mask=mask, is_causal=False, kernel_options={}),
        textbook(query, key, value, mask)[0],
    )


def test_deterministic_none_is_false_whatever_torch_says(monkeypatch):
    seen = []
    real = flash_dmattn.flash_dmattn_interface.functions.flash_dmattn_func

    def spy(*arguments, **keywords):
        seen.append(keywords["deterministic"])
        return real(*arguments, **keywords)

    monkeypatch.setattr(flash_dmattn.flash_dmattn_interface.functions, "flash_dmattn_func", spy)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    flash_dmattn_func(*inputs())
    flash_dmattn_func(*inputs(), deterministic=True)
    assert seen == [False, True]


@pytest.mark.parametrize("last", [1, S, 128])
@pytest.mark.parametrize("heads", [1, HKV, H])
@pytest.mark.parametrize("rows", [1, S])
def test_the_last_dimension_of_mask_and_bias_may_be_one_or_rounded_up_to_128(last, heads, rows):
    query, key, value = inputs()
    whole_mask = torch.rand(B, heads, rows, last) < 0.6
    whole_bias = torch.randn(1, heads, rows, last, requires_grad=True)
    output = flash_dmattn_func(query, key, value, whole_mask, whole_bias)
    mask, bias = (part.expand(-1, -1, -1, S) if last == 1 else part[..., :S] for part in (whole_mask, whole_bias))
    if last == 1:
        output, rest = (part.nan_to_num() for part in (output, textbook(query, key, value, mask, bias)[0]))
    else:
        rest = textbook(query, key, value, mask, bias)[0]
    torch.testing.assert_close(output, rest)
    [gradient] = torch.autograd.grad(output.square().sum(), whole_bias)
    [expected] = torch.autograd.grad(rest.square().sum(), whole_bias)
    torch.testing.assert_close(gradient, expected, atol=2e-5, rtol=2e-4)
    assert gradient.shape == whole_bias.shape


def test_other_last_dimensions_are_refused_by_name():
    with pytest.raises(ValueError, match=r"last dimension of attn_mask must be 1, 40 \(the keys\) or 128"):
        flash_dmattn_func(*inputs(), torch.ones(1, 1, S, 39, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"last dimension of attn_bias must be"):
        flash_dmattn_func(*inputs(), attn_bias=torch.ones(1, 1, S, 64))


def test_masks_of_zeros_and_ones_may_be_floating_point_as_its_triton_kernel_reads_them():
    query, key, value = inputs()
    keep = torch.rand(B, H, S, S) < 0.5
    expected = textbook(query, key, value, keep)[0]
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64):
        torch.testing.assert_close(triton_dmattn_func(query, key, value, keep.to(dtype)), expected)
    with_gradient = keep.float().requires_grad_()
    torch.testing.assert_close(flash_dmattn_func(query, key, value, with_gradient), expected)


def test_probabilities_come_with_lse_and_empty_rows_have_an_lse_of_plus_infinity():
    query, key, value = inputs()
    mask = torch.rand(B, H, S, S) < 0.5
    mask[:, 1, 5] = False
    bias = torch.randn(B, HKV, 1, S)
    output, lse, weights = flash_dmattn_func(
        query, key, value, mask, bias, is_causal=True, softcap=5.0, return_attn_probs=True
    )
    expected, log_sums = textbook(query, key, value, mask, bias, is_causal=True, softcap=5.0)
    torch.testing.assert_close(output, expected)
    assert lse.dtype == torch.float32
    assert (lse[:, 1, 5] == math.inf).all()
    torch.testing.assert_close(lse.where(lse != math.inf, -math.inf), log_sums)
    assert weights.shape == (B, H, 128, 128)
    values = value.repeat_interleave(H // HKV, dim=2).transpose(1, 2)
    torch.testing.assert_close((weights[..., :S, :S] @ values).transpose(1, 2), expected)
    assert weights[..., S:].count_nonzero() == weights[..., S:, :].count_nonzero() == 0


def test_names_of_1_2_0_and_older_still_work():
    query, key, value = inputs()
    expected = textbook(query, key, value, is_causal=True, softmax_scale=0.3)[0]
    torch.testing.assert_close(flash_dmattn_func(query, key, value, scale=0.3, is_causal=True), expected)
    torch.testing.assert_close(triton_dmattn_func(query, key, value, is_causal=True, scale=0.3), expected)
    with pytest.raises(TypeError, match="two names of one argument"):
        flash_dmattn_func(query, key, value, softmax_scale=0.3, scale=0.3)


def test_signatures_are_those_of_1_2_2():
    def positional(function):
        parameters = inspect.signature(function).parameters.values()
        return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]

    tensors = ["query", "key", "value"]
    last = ["softmax_scale", "is_causal", "softcap", "deterministic", "return_attn_probs"]
    offsets = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert positional(flash_dmattn_func) == [*tensors, "attn_mask", "attn_bias", *last]
    assert positional(flash_dmattn_varlen_func) == [*tensors, *offsets, *last, "block_table"]
    order = ["is_causal", "softmax_scale"]
    assert positional(triton_dmattn_func) == [*tensors, "attn_mask", "attn_bias", *order]
    assert positional(flex_dmattn_func) == [*tensors, "attn_mask", "attn_bias", *order]
    assert positional(create_mask) == [
        *("attention_bias", "attention_mask", "batch_size", "query_len", "key_len"),
        *("window_size", "min_dtype", "block_size", "type"),
    ]


def test_backends_by_name():
    assert flash_dmattn.get_available_backends() == ["cuda", "triton", "flex"]
    assert flash_dmattn.CUDA_AVAILABLE and flash_dmattn.TRITON_AVAILABLE and flash_dmattn.FLEX_AVAILABLE
    assert flash_dmattn_func_auto() is flash_dmattn_func
    assert flash_dmattn_func_auto(backend="triton") is triton_dmattn_func
    assert flash_dmattn_func_auto("flex", causal=True) is flex_dmattn_func
    with pytest.raises(ValueError, match="Unknown backend: metal"):
        flash_dmattn_func_auto("metal")


@pytest.mark.parametrize("causal", [True, False])
def test_variable_lengths(causal):
    lengths_q, lengths_k = [3, 0, 9], [5, 4, 9]
    queries = torch.randn(sum(lengths_q), H, D, requires_grad=True)
    keys, values = (torch.randn(sum(lengths_k), HKV, D, requires_grad=True) for _ in range(2))
    offsets = [F.pad(torch.tensor(part).cumsum(0), (1, 0)).int() for part in (lengths_q, lengths_k)]
    output, lse, weights = flash_dmattn_varlen_func(
        queries, keys, values, *offsets, max(lengths_q), max(lengths_k), is_causal=causal, return_attn_probs=True
    )
    assert lse.shape == (H, sum(lengths_q))
    assert weights.shape == (3, H, 128, 128)
    parts = []
    for number in range(3):
        rows, columns = (slice(part[number], part[number + 1]) for part in offsets)
        part = textbook(queries[None, rows], keys[None, columns], values[None, columns], is_causal=causal)[0]
        parts.append(part[0])
        spread = values[columns].repeat_interleave(H // HKV, dim=1).transpose(0, 1)
        inside = weights[number, :, : part.shape[1], : spread.shape[1]]
        torch.testing.assert_close((inside @ spread).transpose(0, 1), part[0])
    expected = torch.cat(parts)
    torch.testing.assert_close(output, expected)
    leaves = (queries, keys, values)
    gradients = torch.autograd.grad(output.square().sum(), leaves)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), leaves), atol=2e-5, rtol=2e-4)
    with pytest.raises(NotImplementedError, match="block_table"):
        flash_dmattn_varlen_func(queries, keys, values, *offsets, 9, 9, block_table=torch.zeros(1, 1))


def test_create_mask_takes_padding_and_smooths_blocks_by_majority():
    least = torch.finfo(torch.float32).min
    bias = torch.tensor([5.0, 1.0, 4.0, 0.0, 3.0, 2.0, -1.0]).view(1, 1, 1, 7).expand(2, 1, 3, 7)
    padding = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]], dtype=torch.bool)
    keep = create_mask(bias, padding, 2, 3, 7, window_size=3, min_dtype=least)
    assert keep[0, 0, 0].tolist() == [True, False, True, False, True, False, False]
    assert keep[1, 0, 0].tolist() == [False, False, False, True, True, True, False]
    assert torch.equal(
        create_mask(bias, padding.long(), 2, 3, 7, window_size=3, min_dtype=least), keep
    )  # as tokenizers have it
    of_last = create_mask(bias, padding[:, 4:], 2, 3, 7, window_size=3, min_dtype=least)
    assert torch.equal(of_last, create_mask(bias, None, 2, 3, 7, window_size=3, min_dtype=least))
    smooth = create_mask(bias, None, 2, 3, 7, 3, least, block_size=3)
    assert smooth[0, 0, 0].tolist() == [True, True, True, False, False, False, False]
    halves = create_mask(bias, None, 2, 3, 7, 3, least, block_size=2)  # half of a block is no majority
    assert not halves.any()
    assert dynamic_mask(bias, None, 99, least).all()
    few = dynamic_mask(bias, torch.tensor([[[[True, *[False] * 6]]]]), 3, least)
    assert few.sum(-1).unique().tolist() == [1]
    with pytest.raises(ValueError, match="not compatible"):
        create_mask(bias, torch.ones(2, 5, dtype=torch.bool), 2, 3, 7, 3, least)
    with pytest.raises(ValueError, match="block_size"):
        dynamic_mask(bias, None, 3, least, block_size=0)


def test_create_mask_of_a_type_keeps_the_largest_or_the_positive():
    bias, least = torch.randn(2, 2, 3, 7), torch.finfo(torch.float32).min
    padding = torch.rand(2, 7) < 0.7
    call = (bias, padding, 2, 3, 7, 3, least)
    assert torch.equal(create_mask(*call, type="topk"), create_mask(*call))
    assert torch.equal(create_mask(*call, type="relu"), (bias > 0) & padding[:, None, None])
    positive = create_mask(bias, None, 2, 3, 7, 3, least, 2, "relu")
    assert torch.equal(positive[..., 0], (bias[..., :2] > 0).all(-1)) and torch.equal(
        positive[..., 6], bias[..., 6] > 0
    )
    with pytest.raises(ValueError, match=r"^type must be 'topk' or 'relu', got 'mean'$"):
        create_mask(*call, type="mean")


def test_padding_helpers_go_there_and_back():
    states = torch.randn(3, 6, HKV, D, requires_grad=True)
    keep = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0]])
    packed, indices, offsets, longest, used = unpad_input(states, keep)
    assert packed.shape == (11, HKV, D)
    assert offsets.tolist() == [0, 3, 9, 11]
    assert offsets.dtype == torch.int32
    assert (longest, used.tolist()) == (6, [3, 6, 2])
    assert torch.equal(packed, index_first_axis(states, indices))
    padded = pad_input(packed, indices, 3, 6)
    assert torch.equal(padded, states * keep[:, :, None, None])
    [gradient] = torch.autograd.grad(padded.sum(), states)
    assert torch.equal(gradient, keep[:, :, None, None].expand_as(states).float())
    assert [part.tolist() if isinstance(part, torch.Tensor) else part for part in get_unpad_data(keep)] == [
        indices.tolist(),
        offsets.tolist(),
        longest,
    ]
    unused = torch.zeros_like(keep)
    unused[0, 3] = 1
    assert unpad_input(states, keep, unused)[2].tolist() == [0, 4, 10, 12]
    assert unpad_input(states, keep, unused)[4].tolist() == [3, 6, 2]


@pytest.mark.parametrize("seqlen_q", [6, 2, 1])
def test_upad_input_packs_query_key_and_value(seqlen_q):
    query, key, value = torch.randn(3, seqlen_q, H, D), torch.randn(3, 8, HKV, D), torch.randn(3, 8, HKV, D)
    keep = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])
    queries, keys, _, indices, offsets, longest = upad_input(query, key, value, keep, seqlen_q, unpad_input)
    assert keys.shape == (12, HKV, D)
    assert torch.equal(keys[:4], key[0, 2:6])
    lengths = {6: [4, 6, 2], 2: [2, 2, 2], 1: [1, 1, 1]}[seqlen_q]
    assert offsets[0].diff().tolist() == lengths
    assert queries.shape[0] == len(indices) == sum(lengths)
    assert longest == (max(lengths), 6)
    assert torch.equal(queries[0], query[0, -min(4, seqlen_q)])


class Module(torch.nn.Module):
    def __init__(self, causal=True, dtype=torch.float32):
        super().__init__()
        self.is_causal, self.layer_idx = causal, 0
        self.config = types.SimpleNamespace()
        self.projection = torch.nn.Linear(2, 2, dtype=dtype)


def heads_first(*tensors):
    return [tensor.transpose(1, 2) for tensor in tensors]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("causal", [True, False])
def test_the_models_function_takes_padding_and_gives_zeros_at_padded_queries(side, causal):
    query, key, value = inputs()
    keep = torch.ones(B, S, dtype=torch.int64)
    keep[1, slice(None, 9) if side == "left" else slice(-9, None)] = 0
    output, nothing = flash_dynamic_mask_attention_forward(
        Module(causal), *heads_first(query, key, value), attention_mask=keep, attention_bias=None
    )
    assert nothing is None
    packed, indices, offsets, longest, _ = unpad_input(query, keep)
    keys, values = (index_first_axis(part, indices) for part in (key, value))
    expected = flash_dmattn_varlen_func(packed, keys, values, offsets, offsets, longest, longest, is_causal=causal)
    torch.testing.assert_close(output, pad_input(expected, indices, B, S))


def test_the_models_function_decodes_and_leaves_the_rest_of_a_static_cache_alone():
    query, key, value = inputs(1, S)
    keep = torch.ones(B, S - 8, dtype=torch.int64)
    keep[0, :5] = 0
    with torch.no_grad():
        key[:, S - 8 :], value[:, S - 8 :] = math.nan, math.nan
    output, _ = flash_dynamic_mask_attention_forward(Module(), *heads_first(query, key, value), keep, None)
    expected = textbook(query, key[:, : S - 8], value[:, : S - 8], keep[:, None, None, :] != 0)[0]
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("name", ["window_size", "keep_window_size"])
@pytest.mark.parametrize("rows", [1, S])
def test_the_models_function_keeps_the_largest_biases_as_doges_example_calls_it(name, rows):
    query, key, value = inputs()
    bias = torch.randn(B, HKV, rows, S)
    output, _ = flash_dynamic_mask_attention_forward(
        Module(),
        *heads_first(query, key, value),
        attention_mask=None,
        attention_bias=bias,
        scale=D**-0.5,
        **{name: 9},
    )
    least = torch.finfo(torch.float32).min
    expected = textbook(query, key, value, dynamic_mask(bias, None, 9, least), bias, is_causal=True)[0]
    torch.testing.assert_close(output, expected)


def test_the_models_function_takes_packed_sequences_either_way():
    query, key, value = inputs()
    query, key, value = (part[:1] for part in (query, key, value))
    positions = torch.cat([torch.arange(15), torch.arange(S - 15)])[None]
    offsets = torch.tensor([0, 15, S], dtype=torch.int32)
    expected = flash_dmattn_varlen_func(
        *(part[0] for part in (query, key, value)), offsets, offsets, S, S, is_causal=True
    )
    tensors = heads_first(query, key, value)
    by_positions, _ = flash_dynamic_mask_attention_forward(Module(), *tensors, None, None, position_ids=positions)
    by_offsets, _ = flash_dynamic_mask_attention_forward(
        Module(), *tensors, None, None, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=S, max_length_k=S
    )
    torch.testing.assert_close(by_positions[0], expected)
    torch.testing.assert_close(by_offsets[0], expected)


def test_the_models_function_casts_float32_inputs_to_the_dtype_of_narrower_weights():
    tensors = heads_first(*inputs())
    output, _ = flash_dynamic_mask_attention_forward(Module(dtype=torch.bfloat16), *tensors, None, None)
    assert output.dtype == torch.bfloat16
    output, _ = flash_dynamic_mask_attention_forward(Module(), *tensors, None, None)
    assert output.dtype == torch.float32

"""What a refused call leaves alone, and what is no error."""

import pytest
import torch

import dmattn_ops
from tests.api.test_errors import dense, tensor
from tests.support import call_inputs

B, S, H, D = 2, 128, 4, 64


def test_a_refused_call_does_not_take_random_numbers_first():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="key must have shape"):
        dmattn_ops.flash_dmattn_func(**dense(key=tensor(B, 5, H, D)), dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_empty_sizes_are_no_error():
    for shape in ((0, 5, 2, 4), (2, 0, 2, 4), (2, 5, 0, 4)):
        query = torch.randn(shape, requires_grad=True)
        key = torch.randn(shape[0], 7, 1, 4, requires_grad=True)
        out, lse = dmattn_ops.flash_dmattn_func(query, key, key, return_lse=True)
        out.sum().backward()
        assert out.shape == shape
        assert lse.shape == (shape[0], shape[2], shape[1])
        assert torch.equal(key.grad, torch.zeros_like(key))
    query = torch.randn(2, 5, 2, 4, requires_grad=True)
    key, bias = torch.randn(2, 0, 2, 4, requires_grad=True), torch.randn(1, 2, 5, 0, requires_grad=True)
    out, lse = dmattn_ops.flash_dmattn_func(query, key, key, bias=bias, is_causal=True, return_lse=True)
    out.sum().backward()
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not query.grad.any()
    assert bias.grad.shape == bias.shape
    rows = torch.randn(0, 2, 4, requires_grad=True)
    for values in ((0,), (0, 0, 0)):
        offsets = torch.tensor(values, dtype=torch.int32)
        out = dmattn_ops.flash_dmattn_varlen_func(rows, rows, rows, offsets, offsets, 0, 0)
        out.sum().backward()
        assert out.shape == rows.shape


def test_nothing_the_caller_owns_is_modified():
    inputs = call_inputs.qkv(heads_kv=2, layout="strided")
    bias, mask = call_inputs.random_bias(1, 4, 33, 33), call_inputs.random_mask(2, 1, 33, 33)
    prepared = dmattn_ops.prepare_mask(mask)
    owned = [*inputs, bias, mask, *(part for part in prepared.mask[:-1] if part is not None)]
    before = [(part.detach().clone(), part._version) for part in owned]
    for given in (mask, prepared):
        out = dmattn_ops.flash_dmattn_func(*inputs, given, bias, is_causal=True, dropout_p=0.2)
        grad = torch.ones_like(out)
        torch.autograd.grad(out, (*inputs, bias), grad)
        assert torch.equal(grad, torch.ones_like(out))
    assert all(
        torch.equal(part, copy) and part._version == version
        for part, (copy, version) in zip(owned, before, strict=True)
    )

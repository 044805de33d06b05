"""What kernels are given, and what calls without the dispatcher may meet: strides, subclasses, batches, zeros, negations."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import dmattn_ops
from dmattn_ops.call import Call
from dmattn_ops.dispatch import run
from dmattn_ops.launching import plans


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor whose last stride is 2."""
    return torch.stack([tensor, tensor], -1)[..., 0]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every tensor of lists, bits, segments, intervals, offsets, seeds and float16 sinks that kernels are given."""
    seen: list[torch.Tensor] = []
    given_dtypes = (torch.int32, torch.int64, torch.float16)

    def watch(module: ModuleType, name: str) -> None:
        launch = getattr(module, name)

        def watched(*arguments):
            parts = list(arguments)
            if isinstance(arguments[0], Call):
                call = arguments[0]
                parts = [*call.mask, call.seed, call.sink, *(call.varlen or ())]
            seen.extend(part for part in parts if isinstance(part, torch.Tensor) and part.dtype in given_dtypes)
            return launch(*arguments)

        monkeypatch.setattr(module, name, watched)

    for name in ("forward", "backward"):
        watch(run, name)
    for name in ("pack_mask", "list_tiles"):
        watch(run.kernels_of_masks(torch.device("cpu")), name)
    return seen


def test_kernels_are_given_contiguous_masks_whatever_they_come_from(given: list[torch.Tensor]) -> None:
    query = torch.randn(2, 200, 2, 16, requires_grad=True)
    padding = (torch.rand(200, 2) < 0.5).t()
    documents = strided(torch.randint(0, 3, (2, 200), dtype=torch.int16).sort().values)
    dense = strided(torch.rand(2, 2, 200, 200) < 0.5)
    for mask in (padding[:, None, None], dense, dmattn_ops.prepare_mask(dense, documents=documents)):
        prepared = mask if isinstance(mask, dmattn_ops.TileMask) else dmattn_ops.prepare_mask(mask, seqlen_q=200)
        assert all(part is None or part.is_contiguous() for part in prepared.mask[:-1])  # not to be copied at each call
        for parts in (prepared, mask):
            dmattn_ops.flash_dmattn_func(query, query, query, parts).sum().backward()
    dmattn_ops.prepare_mask(documents=documents)
    offsets = strided(torch.tensor([0, 150, 400], dtype=torch.int32))
    packed = query.flatten(0, 1)
    kept = (torch.rand(400, 2) < 0.5).t()
    dmattn_ops.flash_dmattn_varlen_func(packed, packed, packed, offsets, offsets, 250, 250, kept).sum().backward()
    assert len(given) > 30
    assert all(part.is_contiguous() for part in given)


def test_only_the_default_stream_keeps_a_counter_of_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another stream allocates may lie in the memory of a CUDA graph."""
    pytest.importorskip("triton.experimental.gluon")
    from dmattn_ops.kernels.hopper.forward import launch as hopper_forward

    stream, captures = [0], [False]
    monkeypatch.setattr(hopper_forward, "raw_stream", lambda index: stream[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures[0])
    monkeypatch.setattr(hopper_forward, "_counters", {})
    device = torch.device("cpu")
    shared = hopper_forward._counter(device)
    assert hopper_forward._counter(device) is shared and list(hopper_forward._counters.values()) == [shared]
    for stream[0], captures[0] in ((7, False), (0, True), (7, True)):
        fresh = hopper_forward._counter(device)
        assert fresh is not shared and not fresh.any()
        assert list(hopper_forward._counters.values()) == [shared]


def test_operators_take_lists_and_segments_of_any_strides(given: list[torch.Tensor]) -> None:
    query = torch.randn(1, 200, 2, 16)
    ends = (torch.randint(0, 200, (1, 2, 200), dtype=torch.int32) for _ in range(4))
    prepared = dmattn_ops.prepare_mask(torch.rand(1, 2, 200, 200) < 0.5)
    by_key = dmattn_ops.prepare_mask(intervals=(next(ends), next(ends)), hidden=(next(ends), next(ends)), seqlen_q=200)
    rest = {"sink": strided(torch.randn(2)), "seed": strided(torch.tensor([[3, 4]])), "dropout_p": 0.5}
    for mask in (prepared.mask, by_key.mask):
        near = list(mask[:-1])
        far = [None if part is None else strided(part) for part in near]
        one, other = (torch.ops.dmattn.forward(query, query, query, None, *parts, **rest)[0] for parts in (near, far))
        assert torch.equal(one, other)
    assert len(given) > 10
    assert all(part.is_contiguous() for part in given)


def test_a_backward_is_repeated_only_for_the_layout_that_it_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "enter_thread", lambda: None)
    query = torch.randn(1, 4, 4, 8)
    saved = (query, query, query, None, query, torch.zeros(1, 4, 4), torch.zeros(1, 4, 4))
    ran: list[str] = []
    origin = plans.Origin(
        SimpleNamespace(backwards={}), [0 if tensor is None else tensor.data_ptr() for tensor in saved], ((0.5,), (7,))
    )
    plan = SimpleNamespace(run=lambda tensors, addresses, all_outputs: ran.append("plan") or ((), []))
    call = ("backward", 3, query, None)
    monkeypatch.setattr(plans, "_plans", {})
    assert origin.backward(*call, saved, (False, False)) is None
    monkeypatch.setattr(plans, "key", lambda name, tensors, numbers: numbers)
    # what is appended stands behind what is needed
    monkeypatch.setattr(plans, "_plans", {(0.5, False, False, 7): plan})
    assert origin.backward(*call, saved, (False, False)) == () and ran == ["plan"]
    monkeypatch.setattr(plans, "_plans", {})
    assert origin.backward(*call, saved, (False, False)) == ()  # found by its layout
    transposed = (query.transpose(1, 2), *saved[1:])  # at the same address
    assert origin.backward(*call, transposed, (False, False)) is None


def test_a_subclass_in_any_place_meets_the_dispatcher() -> None:
    query, bias = torch.randn(1, 8, 2, 16), torch.randn(1, 1, 1, 8)
    out = dmattn_ops.flash_dmattn_func(query, query, query, None, TwoTensor(bias, bias))
    assert isinstance(out, TwoTensor)
    assert torch.equal(out.a, dmattn_ops.flash_dmattn_func(query, query, query, None, bias))


def test_gradients_in_batches_and_of_zeros_without_memory() -> None:
    query = torch.randn(1, 4, 2, 8, dtype=torch.float64, requires_grad=True)
    out = dmattn_ops.flash_dmattn_func(query, query, query)
    grads = torch.randn(3, *out.shape, dtype=torch.float64)
    [batched] = torch.autograd.grad(out, query, grads, is_grads_batched=True, retain_graph=True)
    for grad, found in zip(grads, batched, strict=True):
        [expected] = torch.autograd.grad(out, query, grad, retain_graph=True)
        torch.testing.assert_close(found, expected)
    [nothing] = torch.autograd.grad(out, query, torch._efficientzerotensor(out.shape, dtype=torch.float64))
    assert not nothing.any()


def test_parts_of_zeros_without_memory() -> None:
    """The gradient of a sign is zeros without memory; each call gets a part, which begins somewhere in it."""
    queries = [torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3)]
    for joined in (torch.cat, torch.stack):
        outs = [dmattn_ops.flash_dmattn_func(query, query, query, return_lse=True) for query in queries]
        ends = torch.sgn(joined([out for out, _ in outs])).sum() + torch.sgn(joined([lse for _, lse in outs])).sum()
        for grad in torch.autograd.grad(ends, queries):
            assert grad.shape == queries[0].shape and not grad.any()


def test_a_negated_view_is_negated() -> None:
    query = torch.randn(1, 8, 2, 16)
    expected = dmattn_ops.flash_dmattn_func(-query, query, query)
    assert torch.equal(dmattn_ops.flash_dmattn_func(torch._neg_view(query), query, query), expected)


@pytest.mark.parametrize("wrong", [{"deterministic": "x"}, {"return_lse": "x"}], ids=str)
def test_a_wrong_switch_is_refused_before_a_number_is_drawn_or_a_mask_read(wrong: dict, given: list) -> None:
    query, offsets = torch.randn(1, 8, 2, 16), torch.tensor([0, 8], dtype=torch.int32)
    mask, state = torch.rand(1, 1, 8, 8) < 0.5, torch.get_rng_state()
    packed, lengths = query.flatten(0, 1), (offsets, offsets, 8, 8)
    calls = (
        lambda: dmattn_ops.flash_dmattn_func(query, query, query, mask, dropout_p=0.5, **wrong),
        lambda: dmattn_ops.flash_dmattn_qkvpacked_func(torch.stack([query] * 3, 2), mask, dropout_p=0.5, **wrong),
        lambda: dmattn_ops.flash_dmattn_varlen_func(packed, packed, packed, *lengths, dropout_p=0.5, **wrong),
    )
    for call in calls:
        with pytest.raises(TypeError):
            call()
    assert torch.equal(torch.get_rng_state(), state)
    assert not given


def test_wrong_offsets_and_a_wrong_bias_are_refused_first_too(given: list) -> None:
    query, offsets = torch.randn(1, 8, 2, 16), torch.tensor([0, 9], dtype=torch.int32)
    prepared = dmattn_ops.prepare_mask(torch.rand(1, 1, 8, 8) < 0.5)
    given.clear()
    state, packed = torch.get_rng_state(), query.flatten(0, 1)
    with pytest.raises(ValueError, match="cu_seqlens"):
        dmattn_ops.flash_dmattn_varlen_func(packed, packed, packed, offsets, offsets, 8, 8, dropout_p=0.5)
    with pytest.raises(ValueError, match="bias must have shape"):
        dmattn_ops.flash_dmattn_func(query, query, query, prepared, torch.zeros(1, 1, 3, 8), is_causal=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert not given

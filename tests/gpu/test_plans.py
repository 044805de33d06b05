"""Repeated calls on a GPU: they launch what the first did, whatever the memory, thread, stream or device."""

import threading

import pytest
import torch

import dmattn_ops
from dmattn_ops.launching import plans

pytestmark = pytest.mark.gpu
SHAPE = (2, 300, 4, 64)


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def bits():
    return dmattn_ops.prepare_mask(torch.rand(1, 1, 300, 300, device="cuda") < 0.5)


def padding():
    return dmattn_ops.prepare_mask(torch.rand(2, 300, device="cuda") < 0.7, seqlen_q=300)


@pytest.fixture(autouse=True)
def no_plans():
    plans.forget()


def check_repeated(call, *inputs):
    """Compare out and gradients of later calls, each with inputs in memory of their own, with the first."""
    results, held, grad_out = [], [], None
    for _ in range(5):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        held.append((leaves, draw(1000)))  # so that addresses change
        out = call(*leaves)
        grad_out = torch.randn_like(out) if grad_out is None else grad_out
        results.append((out.detach(), *torch.autograd.grad(out, leaves, grad_out)))
    assert len(plans._plans) == 2
    assert None not in plans._plans.values()
    for result in results[1:]:
        for actual, first in zip(result, results[0], strict=True):
            torch.testing.assert_close(actual, first, rtol=2e-2, atol=2e-3)  # dq is added up in any order


@pytest.mark.parametrize("mask", [None, bits, padding])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_repeated_calls_are_those_of_the_first(dim, mask):
    prepared = None if mask is None else mask()
    plans.forget()
    tensors = [draw(2, 300, 4, dim) for _ in range(3)]
    check_repeated(lambda *qkv: dmattn_ops.flash_dmattn_func(*qkv, prepared), *tensors)


def test_repeated_calls_of_other_kernels():
    tensors = [draw(1, 200, 2, 64, dtype=torch.float32) for _ in range(3)]
    check_repeated(lambda *qkv: dmattn_ops.flash_dmattn_func(*qkv, softcap=5.0), *tensors)


def test_repeated_packed_calls():
    check_repeated(lambda qkv: dmattn_ops.flash_dmattn_qkvpacked_func(qkv, is_causal=True), draw(2, 200, 3, 2, 64))


def test_repeated_calls_of_sequences():
    offsets = torch.tensor([0, 100, 130, 300], device="cuda", dtype=torch.int32)
    tensors = [draw(300, 2, 64) for _ in range(3)]
    check_repeated(lambda *qkv: dmattn_ops.flash_dmattn_varlen_func(*qkv, offsets, offsets.clone(), 170, 170), *tensors)


def test_masks_are_prepared_again_from_other_memory():
    mask = torch.rand(2, 2, 300, 333, device="cuda") < 0.5
    for given in (mask, mask.int(), mask[:, :, :1]):
        for _ in range(4):
            held = given.clone()
            assert torch.equal(
                dmattn_ops.prepare_mask(held, seqlen_q=300).to_dense(), (held != 0).expand(2, 2, 300, -1)
            )


def test_an_expanded_gradient_is_copied_each_time():
    grads = []
    tensors = [draw(*SHAPE) for _ in range(3)]
    for _ in range(4):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        grads.append(torch.autograd.grad(dmattn_ops.flash_dmattn_func(*leaves).sum(), leaves))
    for repeated in grads[1:]:
        torch.testing.assert_close(repeated, grads[0], rtol=2e-2, atol=2e-2)


def test_a_tensor_given_twice_is_not_taken_for_one():
    query, key, value = (draw(*SHAPE) for _ in range(3))
    expected = dmattn_ops.flash_dmattn_func(query, key, value)
    plans._seen.clear()
    for _ in range(3):
        dmattn_ops.flash_dmattn_func(query, query, query)
    assert torch.equal(dmattn_ops.flash_dmattn_func(query, key, value), expected)


def test_threads_and_streams_do_not_mix():
    tensors = [draw(*SHAPE) for _ in range(3)]
    expected = [dmattn_ops.flash_dmattn_func(*(tensor * scale for tensor in tensors)) for scale in (1, 2, 3)]
    torch.cuda.synchronize()
    wrong = []

    def work(scale):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(100):
                leaves = [(tensor * scale).requires_grad_() for tensor in tensors]
                out = dmattn_ops.flash_dmattn_func(*leaves)
                torch.autograd.grad(out, leaves, out.detach())
            stream.synchronize()
        if not torch.equal(out, expected[scale - 1]):
            wrong.append(scale)

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_thread_without_a_context_can_repeat_a_call():
    tensors = [draw(*SHAPE) for _ in range(3)]
    results = [dmattn_ops.flash_dmattn_func(*tensors) for _ in range(3)]
    thread = threading.Thread(target=lambda: results.append(dmattn_ops.flash_dmattn_func(*tensors)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], results[3])


def test_a_captured_plan_is_replayed():
    tensors = [draw(*SHAPE).requires_grad_() for _ in range(3)]
    grad_out = draw(*SHAPE)

    def call():
        out = dmattn_ops.flash_dmattn_func(*tensors, is_causal=True)
        return out.detach(), *torch.autograd.grad(out, tensors, grad_out)

    expected = [call() for _ in range(3)][-1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(2):
        graph.replay()
    torch.testing.assert_close(captured, expected, rtol=2e-2, atol=2e-3)


def test_launch_hooks_are_told_of_repeated_launches():
    from triton import knobs

    tensors = [draw(*SHAPE) for _ in range(3)]
    results = [dmattn_ops.flash_dmattn_func(*tensors) for _ in range(3)]
    told = []

    def hook(metadata):
        told.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        results.append(dmattn_ops.flash_dmattn_func(*tensors))
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert told == ["forward_kernel"]
    assert torch.equal(results[0], results[3])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_plan_runs_on_its_own_device():
    tensors = [draw(*SHAPE) for _ in range(3)]
    expected = [dmattn_ops.flash_dmattn_func(*tensors) for _ in range(3)][-1]
    others = [tensor.to("cuda:1") for tensor in tensors]
    for _ in range(3):
        out = dmattn_ops.flash_dmattn_func(*others)
    assert out.device == others[0].device
    assert torch.equal(out.to("cuda:0"), expected)

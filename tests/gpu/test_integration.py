"""What only a GPU shows about the integration: CUDA graphs, streams, devices, synchronisation, compiled kernels."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.utils import counters

import dmattn_ops
from dmattn_ops.testing import Problem, check
from dmattn_ops.testing.oracle import relative_error
from tests.support import call_inputs
from tests.tools.soak import captured

pytestmark = pytest.mark.gpu
attention = functools.partial(dmattn_ops.flash_dmattn_func, is_causal=True)
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}


def inputs(seed=0, device="cuda", **keywords):
    drawn = call_inputs.qkv(2, 256, 4, 64, dtype=torch.bfloat16, seed=seed, **keywords)
    return tuple(tensor.detach().to(device).requires_grad_() for tensor in drawn)


def out_and_gradients(call, tensors, *rest):
    out = call(*tensors, *rest)
    return out, *torch.autograd.grad(out.float().sin().sum(), tensors)


def test_compiled_results_are_those_of_eager_calls():
    torch._dynamo.reset()
    mask = call_inputs.random_mask(2, 1, 256, 256).cuda()
    for tensors in (inputs(), inputs(layout="bhsd"), inputs(heads_kv=2)):
        actual = out_and_gradients(torch.compile(attention, fullgraph=True), tensors, mask)
        torch.testing.assert_close(actual, out_and_gradients(attention, tensors, mask), **TOLERANCE)


@pytest.mark.parametrize("masked", [False, True])
def test_cuda_graphs_replay_with_fresh_inputs(masked):
    torch._dynamo.reset()
    counters.clear()
    call = torch.compile(attention, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):
        mask = [call_inputs.random_mask(2, 1, 256, 256, seed=seed).cuda()] if masked else []
        tensors = inputs(seed)
        torch.compiler.cudagraph_mark_step_begin()
        actual = [tensor.clone() for tensor in out_and_gradients(call, tensors, *mask)]
        torch.testing.assert_close(actual, list(out_and_gradients(attention, tensors, *mask)), **TOLERANCE)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_a_captured_graph_draws_new_dropout_at_each_replay():
    query, key, value = (tensor.detach() for tensor in inputs())
    call = functools.partial(attention, query, key, value, dropout_p=0.5)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)


def test_nothing_waits_for_the_gpu():
    tensors, mask = inputs(), call_inputs.random_mask(2, 1, 256, 256).cuda()
    padding = mask[:, :, :1].contiguous()
    out_and_gradients(attention, tensors, mask)  # compiles
    out_and_gradients(attention, tensors, padding)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out_and_gradients(attention, tensors, mask)
        out_and_gradients(attention, tensors, padding)
        out_and_gradients(attention, tensors, dmattn_ops.prepare_mask(mask))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_calls_run_on_the_current_stream():
    tensors = inputs()
    expected = out_and_gradients(attention, tensors)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = tuple((tensor * 2 - tensor).detach().requires_grad_() for tensor in tensors)
        torch.cuda._sleep(10_000_000)  # what runs on another stream would be done before
        late[0].data.copy_(tensors[0])
        actual = out_and_gradients(attention, late)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_two_threads_on_two_streams_do_not_meet():
    expected = [out_and_gradients(attention, inputs(seed)) for seed in range(2)]

    def repeat(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            tensors = inputs(seed)
            results = [out_and_gradients(attention, tensors) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(2) as pool:
        for seed, results in enumerate(pool.map(repeat, range(2))):
            for actual in results:
                torch.testing.assert_close(actual, expected[seed], **TOLERANCE)


def test_backward_may_run_in_another_thread():
    tensors = inputs()
    expected = out_and_gradients(attention, tensors)
    out = attention(*tensors)
    with ThreadPoolExecutor(1) as pool:
        grads = pool.submit(torch.autograd.grad, out.float().sin().sum(), tensors).result()
    torch.testing.assert_close((out, *grads), expected, **TOLERANCE)


@pytest.mark.parametrize("deterministic", [False, True])
def test_views_give_what_their_copies_give(deterministic):
    """Storage offsets, odd strides and expanded heads: those that TMA cannot address go to other kernels."""
    call = functools.partial(attention, deterministic=deterministic)
    wide = torch.randn(3, 2, 300, 9, 67, device="cuda", dtype=torch.bfloat16)
    for of in (
        lambda t: t[:, 3:259, 1:5, 2:66],
        lambda t: t[:, :256, :4, :64],
        lambda t: t[:, 1:257, :1, :64].expand(-1, -1, 4, -1),
    ):
        views = [of(tensor).detach().requires_grad_() for tensor in wide]
        copies = [of(tensor).detach().contiguous().requires_grad_() for tensor in wide]
        actual, expected = out_and_gradients(call, views), out_and_gradients(call, copies)
        for name, of_view, of_copy in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
            assert relative_error(of_view, of_copy.double()) < 1e-2, name  # as kernels that round differently


def test_packed_inputs_are_not_copied_and_have_one_gradient():
    packed = torch.randn(2, 4096, 3, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    parts = [part.detach().contiguous().requires_grad_() for part in packed.unbind(2)]
    grad = torch.randn(2, 4096, 8, 128, device="cuda", dtype=torch.bfloat16)

    def peak(function, *tensors):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = function(*tensors, is_causal=True)
        forward = torch.cuda.max_memory_allocated() - before
        gradients = torch.autograd.grad(out, tensors, grad)
        return forward, torch.cuda.max_memory_allocated() - before, gradients

    for _ in range(2):  # the first call may allocate counters that stay
        separate = peak(dmattn_ops.flash_dmattn_func, *parts)
        together = peak(dmattn_ops.flash_dmattn_qkvpacked_func, packed)
    slack = 1 << 20
    assert together[0] <= separate[0] + slack and together[1] <= separate[1] + slack, (together[:2], separate[:2])
    (gradient,) = together[2]
    assert gradient.is_contiguous() and gradient.untyped_storage().nbytes() == packed.untyped_storage().nbytes()
    torch.testing.assert_close(list(gradient.unbind(2)), list(separate[2]), **TOLERANCE)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_calls_run_on_the_device_of_their_tensors():
    mask = call_inputs.random_mask(2, 1, 256, 256)
    expected = out_and_gradients(attention, inputs(device="cuda:0"), mask.to("cuda:0"))
    actual = out_and_gradients(attention, inputs(device="cuda:1"), mask.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close([tensor.to("cuda:0") for tensor in actual], list(expected), **TOLERANCE)


def test_float64_is_refused():
    query = torch.randn(1, 4, 1, 8, dtype=torch.float64, device="cuda")
    with pytest.raises(NotImplementedError, match=r"on a CUDA device, got torch\.float64"):
        attention(query, query, query)


def test_autocast():
    tensors = tuple(tensor.detach().float().requires_grad_() for tensor in inputs())
    with torch.autocast("cuda", torch.bfloat16):
        out, *grads = out_and_gradients(attention, tensors)
    assert out.dtype == torch.bfloat16
    assert {grad.dtype for grad in grads} == {torch.float32}


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_call_that_only_the_reference_computes_is_captured(with_bias: bool) -> None:
    """Head dimensions beyond all kernels: the host must not wait for the GPU inside a graph, also where a hidden bias is NaN."""
    problem = Problem(
        dtype="float32", batch=2, heads=2, heads_k=2, seqlen_q=127, seqlen_k=127, dim=869, dim_v=869, softcap=5.0,
        intervals="random", promise=True, sink="float32", maximum=True, nan_bias=with_bias, bias=with_bias,
    )  # fmt: skip
    check(problem, "cuda", run=captured)

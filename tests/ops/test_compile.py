"""Compiled calls: the eager results, one graph, no recompilation over sizes, and whatever wraps them."""

import contextlib
import functools
import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import dmattn_ops
from dmattn_ops.ops import flops
from tests.support import block, call_inputs, graphs

attention = dmattn_ops.flash_dmattn_func
forward_op = torch.ops.dmattn.forward.default
compiled = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def gradients(function, inputs, wanted):
    """Return outputs and gradients of a fixed function of them."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum(output.nan_to_num(neginf=0.0).sin().sum() for output in outputs)
    return *outputs, *torch.autograd.grad(total, wanted)


def one_call(query, key, value):
    return attention(query, key, value, is_causal=True)


def every_kind_of_call(query, key, value, mask, bias, prepared, cu_seqlens):
    """Many calls in one graph."""
    grouped = attention(query, key, value, mask, bias, is_causal=True, softcap=5.0, return_lse=True)
    per_key = attention(query, key, value, mask[:, :, :1], window_size=(20, 3), causal_from="top_left")
    shared = attention(query, key, value, prepared, bias[:, :1], softmax_scale=0.2)
    prepared_here = attention(query, key, value, dmattn_ops.prepare_mask(mask, is_causal=True))
    packed = dmattn_ops.flash_dmattn_qkvpacked_func(torch.stack((query, query * 2, query * 3), dim=2), mask)
    rows = (tensor.flatten(0, 1) for tensor in (query, key, value))
    lengths = (cu_seqlens, cu_seqlens, query.shape[0] * query.shape[1], key.shape[0] * key.shape[1])
    varlen = dmattn_ops.flash_dmattn_varlen_func(*rows, *lengths, mask[0, :, 0].repeat(1, 2), is_causal=True)
    return *grouped, per_key, shared, prepared_here, packed, varlen


@pytest.mark.parametrize(("backend", "layout"), [("aot_eager", "bshd"), ("aot_eager", "strided"), ("inductor", "bhsd")])
def test_results_are_those_of_eager_calls(backend, layout):
    inputs = call_inputs.qkv(2, 150, heads_kv=2, layout=layout)
    mask, bias = call_inputs.random_mask(2, 1, 150, 150), call_inputs.random_bias(1, 4, 150, 150)
    offsets = torch.tensor([0, 100, 110, 300], dtype=torch.int32)
    arguments = (*inputs, mask, bias, dmattn_ops.prepare_mask(mask), offsets)
    wanted = (*inputs, bias)
    actual = gradients(torch.compile(every_kind_of_call, fullgraph=True, backend=backend), arguments, wanted)
    expected = gradients(every_kind_of_call, arguments, wanted)
    tolerance = {"rtol": 0, "atol": 0} if backend == "aot_eager" else {"rtol": 1e-4, "atol": 1e-5}
    for compiled_result, eager_result in zip(actual, expected, strict=True):
        torch.testing.assert_close(compiled_result, eager_result, **tolerance)
        assert compiled_result.stride() == eager_result.stride()


def test_the_first_call_of_a_process_may_be_a_compiled_one():
    code = """
import torch, dmattn_ops
query, key, value = (torch.randn(2, 40, 2, 8, requires_grad=True) for _ in range(3))
mask = torch.rand(2, 1, 40, 40) > 0.5
call = torch.compile(dmattn_ops.flash_dmattn_func, fullgraph=True)
out = call(query, key, value, mask, is_causal=True)
grads = torch.autograd.grad(out.sum(), (query, key, value))
eager = dmattn_ops.flash_dmattn_func(query, key, value, mask, is_causal=True)
assert torch.equal(out, eager)
assert all(map(torch.equal, grads, torch.autograd.grad(eager.sum(), (query, key, value))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def training_step(module, hidden):
    module.zero_grad()
    out = module(hidden)
    out.sum().backward()
    return out, *(parameter.grad.clone() for parameter in module.parameters())


def test_a_block_trains_in_one_dynamic_graph():
    torch.manual_seed(0)
    module = block.Block()
    whole = torch.compile(module, fullgraph=True, dynamic=True)
    for number, (batch, seqlen) in enumerate(((2, 140), (3, 200), (5, 301), (2, 129))):
        hidden = torch.randn(batch, seqlen, 64)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            actual = training_step(whole, hidden)
        torch.testing.assert_close(actual, training_step(module, hidden), rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    module.zero_grad()


SIZES = [(3, 140), (5, 200), (7, 333), (4, 131)]


@pytest.mark.parametrize("masked", [False, True, "per key", "cross"])
def test_sizes_do_not_recompile(masked):
    call = compiled(functools.partial(attention, is_causal=True, window_size=(100, None)), dynamic=True)
    for number, (batch, seqlen) in enumerate(SIZES):
        longer = seqlen + 9 if masked == "cross" else seqlen
        inputs = call_inputs.qkv(batch, seqlen, seqlen_k=longer)
        mask = call_inputs.random_mask(batch, 1, 1 if masked == "per key" else seqlen, longer) if masked else None
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            call(*inputs, mask).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


def test_as_many_heads_as_no_model_has_do_not_recompile():
    call = compiled(attention, dynamic=True)
    for number, heads in enumerate((100, 129)):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            call(*call_inputs.qkv(2, 10, heads, 8))


def test_sizes_become_dynamic_by_themselves():
    call = compiled(attention)
    for number, (batch, seqlen) in enumerate(SIZES):
        with torch._dynamo.config.patch(error_on_recompile=number > 1):
            call(*call_inputs.qkv(batch, seqlen), call_inputs.random_mask(batch, 1, seqlen, seqlen)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 2


def test_packed_lengths_do_not_recompile():
    call = compiled(functools.partial(dmattn_ops.flash_dmattn_varlen_func, is_causal=True), dynamic=True)
    for number, lengths in enumerate(([5, 9], [3, 40, 12], [20, 0, 7, 31])):
        rows, offsets = call_inputs.packed(lengths, lengths[::-1])
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            out = call(*rows, *offsets)
            out.sum().backward()
        assert torch.equal(out, dmattn_ops.flash_dmattn_varlen_func(*rows, *offsets, is_causal=True))


def test_packed_projections_do_not_recompile():
    call = compiled(dmattn_ops.flash_dmattn_qkvpacked_func, dynamic=True)
    for number, (batch, seqlen) in enumerate([(6, 140), *SIZES]):  # no size twice: equal ones are one symbol
        qkv = torch.randn(batch, seqlen, 3, 4, 8, requires_grad=True)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            call(qkv, call_inputs.random_mask(1, 4, seqlen, seqlen)).sum().backward()


def test_a_prepared_mask_may_be_an_argument_a_constant_or_a_result():
    inputs, mask = call_inputs.qkv(2, 150), call_inputs.random_mask(2, 1, 150, 150)
    prepared = dmattn_ops.prepare_mask(mask, is_causal=True)
    expected = attention(*inputs, prepared)
    assert torch.equal(compiled(attention)(*inputs, prepared), expected)
    assert torch.equal(compiled(lambda *tensors: attention(*tensors, prepared))(*inputs), expected)
    returned = compiled(dmattn_ops.prepare_mask)(mask, is_causal=True)
    assert torch.equal(returned.to_dense(), prepared.to_dense())
    assert torch.equal(attention(*inputs, returned), expected)


def test_lengths_that_only_the_data_tells():
    def over_kept_tokens(hidden, keep):
        rows = hidden[keep]
        offsets = torch.nn.functional.pad(keep.sum(-1).cumsum(0, dtype=torch.int32), (1, 0))
        lengths = (offsets, offsets, hidden.shape[1], hidden.shape[1])
        return dmattn_ops.flash_dmattn_varlen_func(rows, rows, rows, *lengths, is_causal=True)

    hidden, keep = torch.randn(3, 20, 4, 8, requires_grad=True), call_inputs.random_mask(3, 20)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        out = compiled(over_kept_tokens)(hidden, keep)
    assert torch.equal(out, over_kept_tokens(hidden, keep))
    out.sum().backward()


def test_sizes_may_be_unbacked():
    inputs = call_inputs.qkv(requires_grad=False)
    for tensor in inputs:
        torch._dynamo.decorators.mark_unbacked(tensor, 0)
        torch._dynamo.decorators.mark_unbacked(tensor, 1)
    assert torch.equal(compiled(one_call)(*inputs), one_call(*inputs))


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_casts_all_but_a_float32_bias(inside):
    inputs, bias = call_inputs.qkv(), call_inputs.random_bias(1, 4, 33, 33)

    def call(query, key, value, bias):
        with torch.autocast("cpu", torch.bfloat16) if inside else contextlib.nullcontext():
            return attention(query, key, value, bias=bias)

    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        eager, traced = (gradients(function, (*inputs, bias), (*inputs, bias)) for function in (call, compiled(call)))
    assert eager[0].dtype == torch.bfloat16
    assert {grad.dtype for grad in eager[1:]} == {torch.float32}
    assert all(map(torch.equal, eager, traced))
    low = [tensor.detach().bfloat16() for tensor in inputs]
    assert torch.equal(eager[0], attention(*low, bias=bias.detach()))
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*(tensor.double() for tensor in inputs)).dtype == torch.float64  # as torch's own operators
        half = attention(*inputs, bias=bias.detach().half())
        assert torch.equal(half, attention(*low, bias=bias.detach().half().bfloat16()))


CHECKPOINTS = {
    "plain": (None, 1),
    "save": (CheckpointPolicy.MUST_SAVE, 0),
    "recompute": (CheckpointPolicy.MUST_RECOMPUTE, 1),
}


@pytest.mark.filterwarnings("ignore:Detected that context_fn")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpointing_repeats_what_its_policy_says(name):
    policy, repeated = CHECKPOINTS[name]

    def decide(_, function, *arguments, **keywords):
        return policy if function is forward_op else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = {"context_fn": functools.partial(create_selective_checkpoint_contexts, decide)} if policy else {}

    def call(query, key, value):
        body = functools.partial(lambda *x: one_call(*x).sin())
        return checkpoint(body, query, key, value, use_reentrant=False, **contexts)

    inputs = call_inputs.qkv()
    forward, backward = graphs.captured(call, *inputs)
    assert graphs.own_targets(forward) == ["dmattn.forward.default"]
    assert graphs.own_targets(backward) == ["dmattn.forward.default"] * repeated + ["dmattn.backward.default"]
    torch._dynamo.reset()
    assert all(map(torch.equal, gradients(compiled(call), inputs, inputs), gradients(call, inputs, inputs)))


def test_checkpointing_repeats_dropout_when_compiled():
    def call(query, key, value):
        dropped = checkpoint(functools.partial(attention, dropout_p=0.5), query, key, value, use_reentrant=False)
        return dropped, value

    query, key, value = call_inputs.qkv()
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        out, _ = torch.compile(call, fullgraph=True, backend=backend)(query, key, value)
        (dv,) = torch.autograd.grad(out.square().sum() / 2, value)
        # out is linear in value: the same dropout must appear in both directions for this to hold.
        torch.testing.assert_close((dv * value).sum(), out.square().sum(), rtol=1e-4, atol=1e-3)


def test_dropout_under_inductor_follows_the_seed():
    inputs = call_inputs.qkv(requires_grad=False)
    call = torch.compile(functools.partial(attention, dropout_p=0.5), fullgraph=True)
    results = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        results.append(call(*inputs))
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])


def test_compiled_autograd():
    inputs = call_inputs.qkv()

    def step(query, key, value, softcap=0.0):
        return torch.autograd.grad(attention(query, key, value, softcap=softcap).sin().sum(), (query, key, value))

    expected = step(*inputs)
    with torch._dynamo.compiled_autograd._enable(compiled):
        assert all(map(torch.equal, step(*inputs), expected))
        capped = step(*inputs, softcap=1.0)  # another number, which is no tensor, must not meet the first graph
    assert all(map(torch.equal, capped, step(*inputs, softcap=1.0)))
    with torch._dynamo.config.patch(compiled_autograd=True):
        actual = torch.compile(step, backend="aot_eager")(*inputs)
    assert all(map(torch.equal, actual, expected))
    assert counters["compiled_autograd"]["captures"] == 2


def test_functional_gradient_inside_a_graph():
    inputs = call_inputs.qkv(requires_grad=False)

    def call(query, key, value):
        return torch.func.grad(lambda q: one_call(q, key, value).sin().sum())(query)

    assert torch.equal(compiled(call)(*inputs), call(*inputs))


def test_determinism_is_a_constant_of_the_graph():
    inputs = call_inputs.qkv(requires_grad=False)
    backend = CompileCounter()
    call = torch.compile(attention, fullgraph=True, backend=backend)
    call(*inputs)
    torch.use_deterministic_algorithms(True)
    try:
        call(*inputs)
        (graph, *_) = graphs.captured(attention, *inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert backend.frame_count == 2  # the flag is guarded
    (node,) = (node for node in graph.nodes if node.target is forward_op)
    assert True in node.args


def test_a_memory_budget_repeats_cheap_operators_first():
    def layers(query, key, value):
        for _ in range(3):
            query = (attention(query, key, value) * 2).sin().exp().cos()
        return query

    counts = []
    for budget in (0.5, 0.0):
        with functorch_config.patch(activation_memory_budget=budget):
            backward = graphs.captured(layers, *call_inputs.qkv(2, 256, 4, 64))[1]
        counts.append(
            (
                graphs.own_targets(backward).count("dmattn.forward.default"),
                "aten.exp.default" in graphs.targets(backward),
            )
        )
    assert counts == [(0, True), (3, True)]


@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_a_mask_is_made_once_and_not_again_for_the_backward(budget):
    def layers(query, key, value, scores, mask):
        best, kept = dmattn_ops.dynamic_mask(scores, 20), dmattn_ops.prepare_mask(mask)
        for _ in range(2):
            query = (attention(query, key, value, best) * 2).sin().exp().cos()
            query = (attention(query, key, value, kept) * 2).sin().exp().cos()
        return attention(query, key, value, mask[:, :, :1])

    scores, mask = torch.randn(2, 4, 256), call_inputs.random_mask(2, 1, 256, 256)
    with functorch_config.patch(activation_memory_budget=budget):
        forward, backward = graphs.captured(layers, *call_inputs.qkv(2, 256, 4, 64), scores, mask)
    makers = {"dmattn.key_lifetimes.default", "dmattn.pack_mask.default", "dmattn.list_tiles.default"}
    assert makers <= set(graphs.own_targets(forward)) and not makers & set(graphs.own_targets(backward))


def brute_force_pairs(seqlen_q, seqlen_k, band_lo, band_hi):
    return sum(band_lo <= j - i <= band_hi for i in range(seqlen_q) for j in range(seqlen_k))


def test_flops_count_the_pairs_inside_the_band():
    for seqlen_q in (0, 1, 5, 8):
        for seqlen_k in (0, 1, 6, 9):
            for band_lo in range(-11, 12, 3):
                for band_hi in range(-11, 12, 2):
                    shape = (seqlen_q, seqlen_k, band_lo, band_hi)
                    assert flops.visible_pairs(*shape) == brute_force_pairs(*shape), shape


def test_flops_of_calls():
    inputs = call_inputs.qkv(2, 33, 4, 16, seqlen_k=40, heads_kv=2, dim_v=24)
    rows, lengths = call_inputs.packed([5, 9], [7, 8])
    qkv = torch.randn(2, 12, 3, 4, 16, requires_grad=True)
    pairs = brute_force_pairs(33, 40, -(1 << 30), 7)
    cases = {
        "dense": (lambda: attention(*inputs), 2 * 4 * 33 * 40, (16 + 24, 3 * 16 + 2 * 24)),
        "causal": (lambda: attention(*inputs, is_causal=True), 2 * 4 * pairs, (16 + 24, 3 * 16 + 2 * 24)),
        "packed": (lambda: dmattn_ops.flash_dmattn_qkvpacked_func(qkv), 2 * 4 * 144, (32, 80)),
        "varlen": (lambda: dmattn_ops.flash_dmattn_varlen_func(*rows, *lengths), 4 * 14 * 8, (32, 80)),
    }
    for name, (call, visible, (per_pair, per_pair_backward)) in cases.items():
        with FlopCounterMode(display=False) as counter:
            out = call()
            forward = counter.get_total_flops()
            out.sum().backward()
        assert forward == 2 * visible * per_pair, name
        assert counter.get_total_flops() == 2 * visible * (per_pair + per_pair_backward), name


@pytest.mark.slow
def test_public_tests_pass_when_compiled():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/ops/test_autograd.py",
        "-k",
        "textbook and bhsd",
    ]
    environment = {"DMATTN_TEST_COMPILED": "1"}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout

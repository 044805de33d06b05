"""Derivatives: first ones right through every way of asking, all others refused."""

import functools
import threading

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import dmattn_ops
from dmattn_ops.dispatch import chosen, operators
from dmattn_ops.kernels import native, reference
from dmattn_ops.meta import fakes
from dmattn_ops.ops import autograd, schemas, torch_privates
from tests.support import call_inputs
from tests.support.formula import textbook

forward_op = torch.ops.dmattn.forward.default
backward_op = torch.ops.dmattn.backward.default
DOUBLE = {"dtype": torch.float64}


def assert_gradients(outputs, expected, inputs, **tolerance):
    """Both give the same gradients of a fixed sum of the outputs (-inf does not count)."""
    grads = [
        torch.autograd.grad(sum((tensor.nan_to_num(neginf=0.0) * weights(tensor)).sum() for tensor in tensors), inputs)
        for tensors in (outputs, expected)
    ]
    for actual, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(actual, wanted, **tolerance)


def weights(tensor):
    return torch.cos(torch.arange(tensor.numel(), dtype=tensor.dtype)).view(tensor.shape)


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "grouped, lengths differ": {"heads_kv": 2, "seqlen_k": 47, "is_causal": True},
    "value dimension": {"dim_v": 24, "softmax_scale": 0.2},
    "softcap": {"softcap": 3.0},
    "mask": {"mask": (2, 1, 33, 33)},
    "bias": {"bias": (2, 4, 33, 33)},
    "mask and bias broadcast": {"mask": (1, 4, 33, 33), "bias": (1, 1, 1, 33), "softcap": 5.0},
    "bias per group": {"heads_kv": 2, "bias": (2, 2, 33, 33)},
}


def draw(call, **keywords):
    """Split a row of CALLS into the tensors that need gradients, and keywords."""
    call = dict(call)
    shape = {name: call.pop(name) for name in ("heads_kv", "seqlen_k", "dim_v") if name in call}
    inputs = call_inputs.qkv(**shape, **keywords)
    if "mask" in call:
        call["mask"] = call_inputs.random_mask(*call["mask"])
    if "bias" in call:
        call["bias"] = call_inputs.random_bias(*call["bias"], dtype=keywords.get("dtype", torch.float32))
    return inputs, call


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "strided"])
def test_gradients_equal_the_textbook_formula(name, layout, attention):
    inputs, call = draw(CALLS[name], layout=layout, **DOUBLE)
    outputs = attention(*inputs, **call, return_lse=True)
    wanted = (*inputs, call["bias"]) if "bias" in call else inputs
    assert_gradients(outputs, textbook(*inputs, **call), wanted)


def test_packed_gradient_equals_the_separate_ones(attention):
    query, key, value = call_inputs.qkv(**DOUBLE)
    mask, bias = call_inputs.random_mask(2, 1, 33, 33), call_inputs.random_bias(1, 4, 33, 33, **DOUBLE)
    out, lse = attention.flash_dmattn_func(query, key, value, mask, bias, return_lse=True)
    grads = torch.autograd.grad(out.sin().sum() + lse.sum(), (query, key, value, bias))
    qkv = torch.stack((query, key, value), dim=2).detach().requires_grad_()
    out, lse = attention.flash_dmattn_qkvpacked_func(qkv, mask, bias, return_lse=True)
    dqkv, dbias = torch.autograd.grad(out.sin().sum() + lse.sum(), (qkv, bias))
    assert torch.equal(dqkv, torch.stack(grads[:3], dim=2))
    assert torch.equal(dbias, grads[3])


@pytest.mark.parametrize("causal_from", ["bottom_right", "top_left"])
def test_packed_sequences_have_the_gradients_of_each_alone(causal_from, attention):
    lengths_q, lengths_k = [5, 0, 17, 1], [9, 3, 11, 1]
    rows, lengths = call_inputs.packed(lengths_q, lengths_k, heads_kv=2, **DOUBLE)
    bias = call_inputs.random_bias(4, sum(lengths_k), **DOUBLE)
    mask = call_inputs.random_mask(2, sum(lengths_k))
    call = {"is_causal": True, "causal_from": causal_from, "window_size": (6, None)}
    out, lse = attention.flash_dmattn_varlen_func(*rows, *lengths, mask, bias, **call, return_lse=True)
    alone = []
    for b in range(len(lengths_q)):
        queries = slice(*lengths[0][b : b + 2].tolist())
        keys = slice(*lengths[1][b : b + 2].tolist())
        query, key, value = (t[s].unsqueeze(0) for t, s in zip(rows, (queries, keys, keys), strict=True))
        per_key = {"mask": mask[None, :, None, keys], "bias": bias[None, :, None, keys]}
        alone.append(attention.flash_dmattn_func(query, key, value, **per_key, **call, return_lse=True))
    expected = torch.cat([o[0] for o, _ in alone]), torch.cat([s[0] for _, s in alone], dim=-1)
    torch.testing.assert_close((out, lse), expected)
    assert_gradients((out, lse), expected, (*rows, bias))


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "ends", [((0, 3, 7, 7), (0, 9, 11, 11)), ((0, 20, 20), (0, 20, 20)), ((0, 0), (0, 0))], ids=str
)
def test_rows_behind_the_last_sequence_are_zero_and_reach_nothing(ends, dtype, kernels, attention, monkeypatch):
    """A batch padded to one length, as GPUs take it: NaN behind the end is read by nobody."""
    if kernels == "reference":
        monkeypatch.setattr(native, "forward", reference.forward)
        monkeypatch.setattr(native, "backward", reference.backward)
    offsets = [torch.tensor(end, dtype=torch.int32) for end in ends]
    used, totals, generator = [end[-1] for end in ends], (140, 150), torch.Generator().manual_seed(2)

    def draw(*shape, behind, dim):
        made = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        made.narrow(dim, behind, shape[dim] - behind).fill_(float("nan"))
        return made

    tensors = {"query": draw(totals[0], 4, 16, behind=used[0], dim=0)}
    tensors |= {name: draw(totals[1], 2, 16, behind=used[1], dim=0) for name in ("key", "value")}
    tensors |= {"bias": draw(2, totals[1], behind=used[1], dim=1), "sink": torch.zeros(4, dtype=dtype)}
    grads = draw(totals[0], 4, 16, behind=used[0], dim=0), draw(4, totals[0], behind=used[0], dim=1)
    mask = torch.rand(1, totals[1], generator=generator) < 0.7

    def run(rows, keys):
        places = {"query": (rows,), "key": (keys,), "value": (keys,), "bias": (slice(None), keys), "sink": ()}
        given = {name: tensors[name][place].clone().requires_grad_() for name, place in places.items()}
        call = {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1], "max_seqlen_q": 140, "max_seqlen_k": 140}
        more = {"is_causal": True, "dropout_p": 0.3, "return_lse": True, "return_max": True}
        torch.manual_seed(1)
        out, lse, row_max = attention.flash_dmattn_varlen_func(**given, **call, **more, mask=mask[:, keys])
        gradients = torch.autograd.grad((out, lse), given.values(), (grads[0][rows], grads[1][:, rows].to(lse.dtype)))
        return (out, lse, row_max), dict(zip(given, gradients, strict=True))

    whole, gradients = run(slice(None), slice(None))
    expected, of_used = run(slice(used[0]), slice(used[1]))
    for each, want, empty in zip(whole, expected, (0.0, -torch.inf, -torch.inf), strict=True):
        dim = 0 if each.dim() == 3 else 1
        assert torch.equal(each.narrow(dim, 0, used[0]), want)
        assert (each.narrow(dim, used[0], totals[0] - used[0]) == empty).all()
    for name, each in gradients.items():
        dim, length = (1 if name == "bias" else 0), of_used[name].shape[1 if name == "bias" else 0]
        torch.testing.assert_close(each.narrow(dim, 0, length), of_used[name], rtol=0, atol=0)
        assert not each.narrow(dim, length, each.shape[dim] - length).any()


def test_gradcheck_through_both_outputs():
    inputs = call_inputs.qkv(1, 5, 2, 3, heads_kv=1, **DOUBLE)
    bias = call_inputs.random_bias(1, 1, 5, 5, **DOUBLE)
    mask = call_inputs.random_mask(1, 2, 5, 5, keep=0.8) | torch.eye(5, dtype=torch.bool)
    call = functools.partial(dmattn_ops.flash_dmattn_func, softcap=2.0, return_lse=True)
    assert torch.autograd.gradcheck(lambda q, k, v, b: call(q, k, v, mask, b), (*inputs, bias))
    assert torch.autograd.gradcheck(lambda *tensors: forward_op(*tensors)[:2], (*inputs, bias))


@pytest.mark.parametrize("shape", [(2, 4, 33, 33), (1, 1, 1, 33), (2, 2, 1, 33), (1, 4, 33, 33)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bias_alone_may_require_a_gradient(shape, dtype, attention):
    inputs = call_inputs.qkv(heads_kv=2, dtype=torch.bfloat16, requires_grad=False)
    bias = call_inputs.random_bias(*shape, dtype=dtype)
    attention.flash_dmattn_func(*inputs, bias=bias).float().square().sum().backward()
    assert bias.grad.shape == bias.shape
    assert bias.grad.dtype == dtype
    double = [tensor.double() for tensor in inputs]
    exact = bias.detach().double().requires_grad_()
    textbook(*double, bias=exact)[0].square().sum().backward()
    error = (bias.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 2e-2


@pytest.mark.parametrize("requires", [(True, False, False), (False, True, False), (False, False, True)])
def test_one_input_may_require_a_gradient(requires, attention):
    inputs = call_inputs.qkv(requires_grad=False, **DOUBLE)
    for tensor, flag in zip(inputs, requires, strict=True):
        tensor.requires_grad_(flag)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    assert_gradients(attention.flash_dmattn_func(*inputs, return_lse=True), textbook(*inputs), wanted)
    assert [tensor.grad is None for tensor in inputs] == [True] * 3


@pytest.mark.parametrize("part", ["out", "lse", "both"])
def test_each_output_may_be_used_alone(part, attention):
    inputs = call_inputs.qkv(**DOUBLE)
    chosen = {"out": slice(0, 1), "lse": slice(1, 2), "both": slice(0, 2)}[part]
    outputs = attention.flash_dmattn_func(*inputs, return_lse=True)[chosen]
    wanted = inputs if part != "lse" else inputs[:2]
    assert_gradients(outputs, textbook(*inputs)[chosen], wanted)


def test_gradient_of_out_may_have_any_strides():
    inputs = call_inputs.qkv(**DOUBLE)
    out = dmattn_ops.flash_dmattn_func(*inputs)
    dense = weights(out)
    expected = torch.autograd.grad(out, inputs, dense, retain_graph=True)
    for layout in call_inputs.LAYOUTS:
        grads = torch.autograd.grad(out, inputs, call_inputs.laid_out(dense, layout), retain_graph=True)
        assert all(map(torch.equal, grads, expected)), layout
    ones = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), inputs, retain_graph=True), ones))  # an expanded one
    assert all(map(torch.equal, torch.autograd.grad(out.mT.sum(), inputs), ones))


def test_a_mask_is_not_differentiable():
    query, key, value = call_inputs.qkv()
    mask = call_inputs.random_mask(2, 1, 33, 33).float().requires_grad_()
    rows, lengths = call_inputs.packed([7], [7])
    for call in (
        lambda: dmattn_ops.flash_dmattn_func(query, key, value, mask),
        lambda: dmattn_ops.prepare_mask(mask),
        lambda: dmattn_ops.flash_dmattn_varlen_func(*rows, *lengths, torch.ones(1, 7, requires_grad=True)),
        lambda: torch.ops.dmattn.pack_mask(mask, None, None, 33),
    ):
        with pytest.raises(TypeError, match="requires_grad=True: pass an additive mask of 0 and -inf as bias="):
            call()


def test_statistics_besides_lse_have_no_derivative():
    out, lse, lse_tail, row_max = forward_op(*call_inputs.qkv(), needs_max=True)
    assert out.requires_grad and lse.requires_grad
    assert not lse_tail.requires_grad and not row_max.requires_grad


def test_changing_an_input_before_backward_raises():
    query, key, value = call_inputs.qkv()
    out = dmattn_ops.flash_dmattn_func(query, key, value)
    with torch.no_grad():
        key.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_second_derivative_raises_but_create_graph_alone_does_not():
    inputs = call_inputs.qkv()
    for call in (dmattn_ops.flash_dmattn_func, lambda *tensors: forward_op(*tensors)[0]):
        grads = torch.autograd.grad(call(*inputs).square().sum(), inputs, create_graph=True)
        plain = torch.autograd.grad(call(*inputs).square().sum(), inputs)
        assert all(map(torch.equal, grads, plain))
        with pytest.raises(RuntimeError, match="not differentiable"):
            grads[0].sum().backward()


def test_without_gradients_nothing_is_saved():
    query, key, value = call_inputs.qkv()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out, lse = dmattn_ops.flash_dmattn_func(query, key, value, return_lse=True)
        assert not out.requires_grad
        assert not lse.requires_grad
        assert out.grad_fn is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_dropout(reentrant):
    inputs = call_inputs.qkv(**DOUBLE)
    call = functools.partial(dmattn_ops.flash_dmattn_func, dropout_p=0.4)
    torch.manual_seed(3)
    expected = torch.autograd.grad(call(*inputs).sin().sum(), inputs)
    torch.manual_seed(3)
    out = checkpoint(call, *inputs, use_reentrant=reentrant)
    torch.manual_seed(4)  # the recomputation must not take its randomness from here
    out.sin().sum().backward()
    assert all(torch.equal(tensor.grad, wanted) for tensor, wanted in zip(inputs, expected, strict=True))


@pytest.mark.parametrize(("policy", "times"), [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.MUST_RECOMPUTE, 2)])
def test_selective_checkpointing_saves_or_repeats_the_operator(policy, times, monkeypatch):
    calls = []
    forward = schemas.implementations["forward"]
    monkeypatch.setitem(schemas.implementations, "forward", lambda *a: calls.append("direct") or forward(*a))

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            if function is forward_op:
                calls.append("operator")
            return function(*arguments, **(keywords or {}))

    def contexts():
        return create_selective_checkpoint_contexts(
            lambda _, function, *a, **k: policy if function is forward_op else CheckpointPolicy.PREFER_RECOMPUTE
        )

    inputs = call_inputs.qkv()
    expected = torch.autograd.grad(dmattn_ops.flash_dmattn_func(*inputs).sin().sum(), inputs)
    calls.clear()
    with Count():
        out = checkpoint(
            lambda *x: dmattn_ops.flash_dmattn_func(*x).sin(), *inputs, use_reentrant=False, context_fn=contexts
        )
        grads = torch.autograd.grad(out.sum(), inputs)
    assert calls == ["operator"] * times
    assert all(map(torch.equal, grads, expected))


def test_saved_tensor_hooks_see_everything_that_is_saved():
    inputs, bias = call_inputs.qkv(), call_inputs.random_bias(1, 4, 33, 33)
    mask = call_inputs.random_mask(2, 1, 33, 33)
    packed = []
    expected = torch.autograd.grad(dmattn_ops.flash_dmattn_func(*inputs, mask, bias).sum(), (*inputs, bias))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
        out = dmattn_ops.flash_dmattn_func(*inputs, mask, bias)
    assert packed.count(inputs[0].shape) >= 4
    assert bias.shape in packed
    assert len(packed) == 11
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), (*inputs, bias)), expected))


def test_dispatch_modes_and_the_profiler_see_both_operators():
    inputs = call_inputs.qkv()
    seen = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            seen.append(function)
            return function(*arguments, **(keywords or {}))

    with Record():
        dmattn_ops.flash_dmattn_func(*inputs).sum().backward()
    assert [function for function in seen if "dmattn" in str(function)] == [forward_op, backward_op]
    with torch.profiler.profile() as profile:
        dmattn_ops.flash_dmattn_func(*inputs).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"dmattn::forward", "dmattn::backward"} <= names
    with FlopCounterMode(display=False) as counter:
        dmattn_ops.flash_dmattn_func(*inputs).sum().backward()
    assert counter.get_flop_counts()["Global"].keys() >= {torch.ops.dmattn.forward, torch.ops.dmattn.backward}


def test_calling_past_the_dispatcher_changes_nothing(monkeypatch):
    inputs, bias = call_inputs.qkv(heads_kv=2), call_inputs.random_bias(1, 1, 33, 33)
    mask = dmattn_ops.prepare_mask(call_inputs.random_mask(2, 1, 33, 33))
    results = []
    for allowed in (True, False):
        if not allowed:
            monkeypatch.setattr(autograd, "callable_directly", lambda *arguments: False)
        outputs = dmattn_ops.flash_dmattn_func(*inputs, mask, bias, is_causal=True, return_lse=True)
        results.append((*outputs, *torch.autograd.grad(outputs[0].sin().sum(), (*inputs, bias))))
    assert torch_privates.has_needed and torch_privates.has_short_cuts
    assert all(map(torch.equal, *results))


def overload_of(namespace, name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(namespace, packet), overload or "default")


def test_a_torch_without_private_names_gives_the_same_gradients():
    library = torch.library.Library("dmattn_public", "DEF")
    for name, schema in schemas.SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        packet, _, overload = name.partition(".")
        named = {"name": name} if overload else {}
        function = getattr(operators, packet, None) or getattr(chosen, packet)
        library.impl(name, functools.partial(function, **named), "CPU")
        fake = functools.partial(getattr(fakes, packet), **named)
        torch.library.register_fake(f"dmattn_public::{name}", fake, lib=library)
    autograd.register_public(library)
    public = torch.ops.dmattn_public
    inputs, bias = call_inputs.qkv(), call_inputs.random_bias(1, 4, 33, 33)
    rows, lengths = call_inputs.packed([5, 8], [7, 6])
    packed = torch.stack(inputs, dim=2).detach().requires_grad_()
    for name, arguments in {
        "forward": (*inputs, bias),
        "forward.used": (*inputs, torch.tensor([20, 33], dtype=torch.int32), bias),
        "qkvpacked_forward": (packed, bias),
        "varlen_forward": (*rows, *lengths[:2], call_inputs.random_bias(1, 13), None, None, None, *lengths[2:]),
    }.items():
        wanted = [tensor for tensor in arguments if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
        grads = [
            torch.autograd.grad(overload_of(namespace, name)(*arguments)[0].sin().sum(), wanted, create_graph=True)
            for namespace in (public, torch.ops.dmattn)
        ]
        assert all(map(torch.equal, *grads))
        with pytest.raises(RuntimeError, match="not differentiable"):
            grads[0][0].sum().backward()


def test_parameters_and_subclasses_are_accepted():
    class Tagged(torch.Tensor):
        pass

    query, key, value = call_inputs.qkv(requires_grad=False)
    expected = dmattn_ops.flash_dmattn_func(query, key, value)
    parameter = torch.nn.Parameter(query)
    out = dmattn_ops.flash_dmattn_func(parameter, key, value)
    out.sum().backward()
    assert torch.equal(out, expected)
    assert parameter.grad is not None
    assert torch.equal(
        dmattn_ops.flash_dmattn_func(query.as_subclass(Tagged), key, value).as_subclass(torch.Tensor), expected
    )


def test_determinism_follows_torch_unless_it_is_given(monkeypatch):
    seen, place = [], schemas.SIGNATURES["forward"].names.index("deterministic")
    forward = schemas.implementations["forward"]
    monkeypatch.setitem(schemas.implementations, "forward", lambda *a: seen.append(a[place]) or forward(*a))
    inputs = call_inputs.qkv(requires_grad=False)
    torch.use_deterministic_algorithms(True)
    try:
        dmattn_ops.flash_dmattn_func(*inputs)
        dmattn_ops.flash_dmattn_func(*inputs, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    dmattn_ops.flash_dmattn_func(*inputs)
    dmattn_ops.flash_dmattn_func(*inputs, deterministic=True)
    assert seen == [True, False, False, True]


def test_threads_do_not_disturb_each_other():
    inputs = [call_inputs.qkv(seed=seed) for seed in range(4)]
    expected = [torch.autograd.grad(dmattn_ops.flash_dmattn_func(*x).sin().sum(), x) for x in inputs]
    results = [None] * 4

    def work(number):
        for _ in range(5):
            results[number] = torch.autograd.grad(
                dmattn_ops.flash_dmattn_func(*inputs[number]).sin().sum(), inputs[number]
            )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(all(map(torch.equal, *pair)) for pair in zip(results, expected, strict=True))

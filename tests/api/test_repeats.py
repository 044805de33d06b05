"""Calls that repeat an earlier one skip what was decided for it, and nothing else: for SM 9.0, without a GPU."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton.experimental.gluon")
import dmattn_ops
from dmattn_ops.api import arguments
from dmattn_ops.launching import plan, plans
from dmattn_ops.meta import fakes
from dmattn_ops.ops import autograd

B, S, H, D = 2, 256, 2, 64


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*(shape or (B, S, H, D)), dtype=dtype)


def qkv(dtype=torch.bfloat16):
    return [draw(dtype=dtype).requires_grad_() for _ in range(3)]


def documents(**band):
    return dmattn_ops.prepare_mask(documents=torch.arange(S).expand(B, S) // 100, **band)


@pytest.fixture
def longer_ways(launches, monkeypatch):
    """How many calls were looked at in full."""
    found, prepared_inputs = [], arguments.prepared_inputs

    def noted(*given, **named):
        found.append(len(found))
        return prepared_inputs(*given, **named)

    monkeypatch.setattr(arguments, "prepared_inputs", noted)
    return found


def launched(launches, *given, **named):
    """Return what a call launches, and its outputs."""
    before = len(launches)
    outputs = dmattn_ops.flash_dmattn_func(*given, **named)
    return [launch.kernel for launch in launches[before:]], outputs


def places(monkeypatch):
    """Return what each plan is run with, the addresses of its inputs by their names, as calls are made."""
    found, run = [], plan.Plan.run

    def noted(self, inputs, *given, **named):
        found.append([None if each is None else each.data_ptr() for each in inputs])
        return run(self, inputs, *given, **named)

    monkeypatch.setattr(plan.Plan, "run", noted)
    return found


def test_every_tensor_reaches_its_place_on_the_short_way(launches, longer_ways, monkeypatch):
    """Key and value differ from each other, and both ways of the forward and of the backward hand over the same."""
    found, mask = places(monkeypatch), documents()
    for _ in range(2):
        leaves = qkv()
        torch.autograd.grad(dmattn_ops.flash_dmattn_func(*leaves, mask), leaves, draw())
    found.clear()
    leaves, grad_out = qkv(), draw()
    out = dmattn_ops.flash_dmattn_func(*leaves, mask)
    assert len(longer_ways) == 2
    own = [leaf.data_ptr() for leaf in leaves]
    of_mask = [None if part is None else part.data_ptr() for part in mask.mask[:-1]]
    assert found == [[*own, None, *of_mask, None, None]]
    torch.autograd.grad(out, leaves, grad_out)
    (backward,) = found[1:]
    assert backward[:6] == [grad_out.data_ptr(), None, *own, out.data_ptr()] and backward[8:] == found[0][3:]


@pytest.mark.parametrize(("masked", "is_causal"), [(False, True), (True, False), (True, True)])
def test_later_calls_take_the_short_way_and_launch_the_same(launches, longer_ways, masked, is_causal):
    mask = documents(is_causal=is_causal) if masked else None
    ways = [launched(launches, *qkv(), mask, is_causal=is_causal) for _ in range(6)]
    assert len(longer_ways) == 2 and len(plans._repeats) == 1, "one call is seen, one makes a plan"
    assert all(kernels == ways[0][0] for kernels, _ in ways)
    assert all(out.shape == (B, S, H, D) and out.requires_grad for _, out in ways)


def test_gradients_flow_on_the_short_way(launches, longer_ways, monkeypatch):
    in_full, dense_call = [], fakes.dense_call
    by_origin, of_origin = [], plans.Origin.backward

    def repeated(*given):
        by_origin.append(of_origin(*given) is not None)
        return of_origin(*given)

    def noted(name, given):
        in_full.append(name)
        return dense_call(name, given)

    monkeypatch.setattr(fakes, "dense_call", noted)
    monkeypatch.setattr(plans.Origin, "backward", repeated)
    for _ in range(6):
        leaves = qkv()
        out, lse = dmattn_ops.flash_dmattn_func(*leaves, return_lse=True)
        grads = torch.autograd.grad((out, lse), leaves, (draw(), torch.randn(B, H, S)))
        assert [grad.shape for grad in grads] == [(B, S, H, D)] * 3
    assert len(longer_ways) == 2 and in_full.count("backward") == 2
    assert by_origin[-3:] == [True] * 3, "the plan of the backward is found through that of its forward"
    with torch.no_grad():
        assert not dmattn_ops.flash_dmattn_func(*qkv()).requires_grad


def test_a_checkpoint_computes_again_on_the_short_way(longer_ways):
    """Whichever way the forward took, as many tensors are saved."""
    for _ in range(4):
        leaves = qkv()
        out = checkpoint(dmattn_ops.flash_dmattn_func, *leaves, use_reentrant=False)
        assert [grad.shape for grad in torch.autograd.grad(out, leaves, draw())] == [(B, S, H, D)] * 3
    assert len(longer_ways) == 3, "the second one is stopped once it has saved, before it is remembered"


@pytest.mark.parametrize(("return_lse", "return_max"), [(False, False), (True, False), (False, True), (True, True)])
def test_what_is_asked_for_is_returned(longer_ways, return_lse, return_max):
    for _ in range(5):
        outputs = dmattn_ops.flash_dmattn_func(*qkv(), return_lse=return_lse, return_max=return_max)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert [tuple(each.shape) for each in outputs] == [(B, S, H, D), *[(B, H, S)] * (return_lse + return_max)]
    assert len(longer_ways) == 2


def test_other_calls_are_looked_at_in_full(longer_ways, monkeypatch):
    """Each differs in one thing from a call that may be repeated."""

    def call(*tensors, mask=None, **named):
        before = len(longer_ways)
        dmattn_ops.flash_dmattn_func(*(tensors or qkv()), mask, **named)
        return len(longer_ways) > before

    for _ in range(4):
        call()
    assert not call()
    assert call(*qkv(torch.float16)) and call(*[draw(B, S - 1, H, D) for _ in range(3)])
    assert call(*[draw(B, H, S, D).transpose(1, 2) for _ in range(3)])
    assert call(is_causal=True) and call(window_size=(3, None)) and call(softmax_scale=1.0) and call(softcap=5.0)
    assert call(deterministic=True) and call(return_max=True) and call(dropout_p=0.5)
    assert call(bias=torch.zeros(1, 1, 1, S)) and call(sink=torch.zeros(H))
    assert call(mask=documents()) and call(mask=torch.ones(1, 1, 1, S, dtype=torch.bool))
    assert call(mask=torch.ones(1, 1, S, S, dtype=torch.bool))
    assert call(*[torch.nn.Parameter(tensor.detach()) for tensor in qkv()]) is False
    strided = torch.randn(B, S, H, 2 * D).bfloat16()[..., ::2]
    for _ in range(4):
        assert call(strided, *qkv()[1:]), "it is copied each time"
    monkeypatch.setenv("DMATTN_ARCH", "9.0")
    assert call()
    monkeypatch.delenv("DMATTN_ARCH")
    assert not call()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    assert call()


def test_masks_that_differ_in_numbers_alone_are_told_apart(longer_ways):
    ends = torch.arange(S, dtype=torch.int32)[None, None] + 60
    masks = [
        dmattn_ops.prepare_mask(intervals=(None, ends), seqlen_q=S, **named)
        for named in (
            {},
            {"at_most": 70},
            {"is_causal": True},
            {"is_causal": True, "at_most": 90},
            {"window_size": (9, 0)},
        )
    ]
    for mask in masks:
        before = len(longer_ways)
        for _ in range(6):
            dmattn_ops.flash_dmattn_func(*qkv(), mask)
        assert len(longer_ways) == before + 2
    assert len(plans._repeats) == len(masks)
    numbers = [repeat.numbers[:5] for repeat in plans._repeats.values()]
    assert len(set(numbers)) == len(masks)


def pairs(dtype=torch.bool):
    return (torch.rand(1, 1, S, S) < 0.5).to(dtype)


def expanded():
    return pairs().expand(B, H, S, S)


def of_keys():
    return (torch.rand(B, 1, 1, S) < 0.5).contiguous()


@pytest.mark.parametrize("make", [pairs, lambda: pairs(torch.int32), expanded, of_keys])
def test_a_mask_that_is_a_tensor_is_packed_at_each_call(launches, longer_ways, make):
    """And the kernels are those of the longer way, with its arguments."""
    ways, found = [], []
    for number in range(7):
        leaves = qkv()
        kernels, out = launched(launches, *leaves, make(), is_causal=True)
        ways.append(kernels)
        found.append(torch.autograd.grad(out, leaves, draw()))
        assert len(longer_ways) == min(number + 1, 2)
    assert all(kernels == ways[0] for kernels in ways) and len(ways[0]) >= 4
    (repeat,) = plans._repeats.values()
    assert bool(repeat.packing) == (make in (pairs, expanded)), (
        "the others are compared with 0 first, or have no queries"
    )


@pytest.mark.parametrize("make", [pairs, expanded])
def test_every_call_packs_its_own_mask(longer_ways, monkeypatch, make):
    for _ in range(5):
        dmattn_ops.flash_dmattn_func(*qkv(), make())
    (repeat,) = plans._repeats.values()
    (packing,), found, mask = repeat.packing, places(monkeypatch), make()
    dmattn_ops.flash_dmattn_func(*qkv(), mask)
    assert len(longer_ways) == 2 and found[0] == [mask.data_ptr(), None, None]
    assert [layout.shape for layout in packing.outputs][2:] == [(1, 1, S, S // 32)] * 2
    room = torch.zeros(S * S + 1, dtype=torch.bool)[1:].view(1, 1, S, S)
    assert dmattn_ops.flash_dmattn_func(*qkv(), room).shape == (B, S, H, D)  # at an address that no plan takes


def test_a_condition_beside_a_mask_makes_another_mask_at_each_call(longer_ways):
    mask = documents()
    for number in range(1, 5):
        dmattn_ops.flash_dmattn_func(*qkv(), mask, is_causal=True)
        assert len(longer_ways) == number and not plans._repeats


def test_what_is_refused_is_refused_after_a_call_that_was_not(longer_ways):
    for _ in range(5):
        dmattn_ops.flash_dmattn_func(*qkv())
        dmattn_ops.flash_dmattn_func(*qkv(), is_causal=True)
    for named in (
        {"is_causal": 1},
        {"softcap": "0"},
        {"return_lse": 1},
        {"deterministic": 0},
        {"window_size": (True, None)},
    ):
        with pytest.raises(TypeError):
            dmattn_ops.flash_dmattn_func(*qkv(), **named)
    query, key, value = qkv()
    for wrong in ((None, key, value), (query, key.to_sparse(), value), (query, [1], value), (query, key, value, [1])):
        with pytest.raises(TypeError):
            dmattn_ops.flash_dmattn_func(*wrong)
    for wrong in ((query[0], key, value), (query, key[:, :5], value), (query, key, value[:1])):
        with pytest.raises(ValueError, match="must have"):
            dmattn_ops.flash_dmattn_func(*wrong)
    with pytest.raises(ValueError, match="mask must"):
        dmattn_ops.flash_dmattn_func(
            query, key, value, dmattn_ops.prepare_mask(torch.ones(1, 1, 9, S, dtype=torch.bool))
        )


def test_an_address_without_alignment_is_computed_in_full(launches, longer_ways):
    for _ in range(5):
        dmattn_ops.flash_dmattn_func(*qkv())
    room = torch.randn(B * S * H * D + 1).bfloat16()[1:].view(B, S, H, D)
    before = len(launches)
    out = dmattn_ops.flash_dmattn_func(room, *qkv()[1:])
    assert out.shape == (B, S, H, D) and len(launches) > before


def test_repeats_are_bounded_and_forgotten(longer_ways, monkeypatch):
    monkeypatch.setattr(plans, "MAX_PLANS", 3)
    for length in range(S, S - 8, -1):
        for _ in range(4):
            dmattn_ops.flash_dmattn_func(*[draw(B, length, H, D) for _ in range(3)])
        assert 0 < len(plans._repeats) <= 3
    plans.forget()
    assert not plans._repeats


class Nothing(TorchDispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, operator, types, given=(), named=None):
        return operator(*given, **(named or {}))


class NothingOfFunctions(TorchFunctionMode):
    """A function mode that changes nothing."""

    def __torch_function__(self, function, types, given=(), named=None):
        return function(*given, **(named or {}))


CONTEXTS = {
    "a dispatch mode": Nothing,
    "a function mode": NothingOfFunctions,
    "the profiler": torch.profiler.profile,
    "autocast": contextlib.nullcontext,  # torch is made to say that it is on, since CUDA is not there
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_where_others_look_on_calls_are_looked_at_in_full(longer_ways, monkeypatch, context):
    for _ in range(5):
        dmattn_ops.flash_dmattn_func(*qkv())
    assert len(longer_ways) == 2
    if context == "autocast":
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    with CONTEXTS[context]():
        dmattn_ops.flash_dmattn_func(*qkv())
    assert len(longer_ways) == 3


def test_tangents_are_refused_on_the_short_way(longer_ways):
    for _ in range(5):
        dmattn_ops.flash_dmattn_func(*qkv())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(draw(), draw())
        with pytest.raises(NotImplementedError, match="forward-mode"):
            dmattn_ops.flash_dmattn_func(dual, draw(), draw())


def test_masks_of_other_tensors_never_take_the_short_way(longer_ways):
    """The memory of a subclass may not be its own; it is described like a plain tensor of the same shape."""

    class Wrapped(torch.Tensor):
        pass

    end = torch.full((1, 1, S), S, dtype=torch.int32)
    for _ in range(5):
        dmattn_ops.flash_dmattn_func(*qkv(), dmattn_ops.prepare_mask(intervals=(None, end), seqlen_q=S))
    before = len(longer_ways)
    plain = dmattn_ops.prepare_mask(intervals=(None, end), seqlen_q=S)
    wrapped = replace(plain, end=plain.end.as_subclass(Wrapped))
    fake = replace(plain, end=FakeTensorMode().from_tensor(plain.end))
    for mask in (wrapped, fake):
        for _ in range(2):
            with contextlib.suppress(Exception):  # on the longer way each meets what is meant for it
                dmattn_ops.flash_dmattn_func(*qkv(), mask)
    assert len(longer_ways) == before + 4


def test_a_torch_without_private_names_repeats_nothing(longer_ways, monkeypatch):
    monkeypatch.setattr(autograd, "kernels", {})
    for number in range(1, 5):
        dmattn_ops.flash_dmattn_func(*qkv(), return_max=True)
        assert len(longer_ways) == number

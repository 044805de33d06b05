"""Plain calls and their derivatives in C++ (`csrc/autograd/node.cpp`) are those of Python: for SM 9.0, without a GPU.

In place of kernels a function of ctypes computes attention where the addresses say that tensors lie.
"""

import contextlib
import ctypes
import gc
import sysconfig
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton.experimental.gluon")
import dmattn_ops
from dmattn_ops import environment
from dmattn_ops.call import MASK_TENSORS
from dmattn_ops.kernels import native
from dmattn_ops.launching import node, plan, plans

B, S, H, D = 2, 128, 2, 64
INPUTS = 3 + 1 + len(MASK_TENSORS) + 2  # query, key, value, bias, a mask, sink and seed
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=f"THE LIBRARY IS NOT TESTED: {native.reason()}"),
    pytest.mark.skipif(
        not Path(sysconfig.get_path("include"), "Python.h").exists(),
        reason="THE DERIVATIVES IN C++ ARE NOT TESTED: Python's headers are missing",
    ),
]


def at(address):
    """Return the tensor `[B, S, H, D]` that lies at an address."""
    memory = (ctypes.c_char * (B * S * H * D * 2)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.bfloat16).view(B, S, H, D)


def attention(query, key, value):
    scores = torch.einsum("bihd,bjhd->bhij", query.float(), key.float()) * D**-0.5
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), value.float()).to(query.dtype)


class Launches:
    """Stands in for `driver.Launches`: computes a forward, or a backward, which has two inputs more in front and three behind."""

    refused, ran, places = False, [], []  # whether the driver refuses; what was launched, and with which addresses

    def __init__(self, kernels):
        self.made, self.kernels, self.launch = id(self), kernels, LAUNCH(self._launch)

    @staticmethod
    def pack(*addresses):
        return b"".join(address.to_bytes(8, "little") for address in addresses)

    def _launch(self, made, addresses, stream):
        if self.refused:
            return -1
        self.ran.append(self.kernels)
        in_backward = "backward_kernel" in self.kernels
        inputs = INPUTS + 5 * in_backward
        places = list((ctypes.c_uint64 * (inputs + 3)).from_address(addresses))
        self.places.append(places)
        primals = [at(place).clone() for place in places[2 * in_backward :][:3]]
        with torch.enable_grad():
            leaves = [each.requires_grad_() for each in primals]
            out = attention(*leaves)
            outputs = torch.autograd.grad(out, leaves, at(places[0]).clone()) if in_backward else [out.detach()]
        for place, output in zip(places[inputs:], outputs, strict=False):
            at(place).copy_(output)
        return len(self.kernels)


class Launched(plan.Launched):
    """Launches that seem to go through the driver."""

    def __init__(self, relaunches, tensors):
        self.relaunches, self.count = relaunches, len(relaunches)
        self.driven = Launches([relaunch.compiled.src.fn.__name__ for relaunch in relaunches])


@pytest.fixture
def in_python(launches, monkeypatch):
    """Which backwards went through Python: whether a plan computed them."""
    found, backward = [], plans.Origin.backward

    def noted(self, *given):
        grads = backward(self, *given)
        found.append(grads is not None)
        return grads

    monkeypatch.setattr(plans.Origin, "backward", noted)
    monkeypatch.setattr(Launches, "ran", [])
    monkeypatch.setattr(plan, "Launched", Launched)
    for _ in range(3):  # seen, planned, repeated, which is when the backward is planned for C++
        leaves = qkv()
        out = attend(leaves)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert found == [True] and is_native(out)
    found.clear()
    Launches.ran.clear()
    return found


def qkv():
    return [torch.randn(B, S, H, D).to(torch.bfloat16).requires_grad_() for _ in range(3)]


def attend(leaves, *given, **named):
    return dmattn_ops.flash_dmattn_func(*leaves, *given, **named)


def is_native(out):
    return "CppNode" in out.grad_fn.name()


def check(out, leaves, grad_out=None):
    """Compare out and its gradients with those of torch, bit for bit: what stands in for kernels computes the same."""
    grad_out = torch.randn_like(out) if grad_out is None else grad_out
    expected = attention(*leaves)
    assert torch.equal(out, expected)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    for grad, right in zip(
        torch.autograd.grad(out, wanted, grad_out, retain_graph=True),
        torch.autograd.grad(expected, wanted, grad_out),
        strict=True,
    ):
        assert torch.equal(grad, right)


def test_the_library_is_there():
    """Without it every other test here would compare Python with itself."""
    assert node.module() is not None


def test_calls_and_gradients_are_those_of_torch_without_python(in_python):
    for _ in range(3):
        leaves = qkv()
        out = attend(leaves)
        assert is_native(out)
        check(out, leaves)
    assert in_python == [] and [ran[-1] for ran in Launches.ran] == ["forward_kernel", "backward_kernel"] * 3


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)])
def test_only_some_gradients_are_asked_for(in_python, needed):
    leaves = [leaf.detach().requires_grad_(place in needed) for place, leaf in enumerate(qkv())]
    out = attend(leaves)
    assert is_native(out)
    check(out, leaves)


def test_without_gradients_there_is_no_node(in_python):
    with torch.no_grad():
        assert attend(qkv()).grad_fn is None
    with torch.inference_mode():
        assert attend(qkv()).is_inference()
    assert attend([leaf.detach() for leaf in qkv()]).grad_fn is None


def test_a_gradient_that_lies_otherwise_is_planned_once(in_python):
    grad_out = torch.randn(B, H, S, D).to(torch.bfloat16).transpose(1, 2)
    for _ in range(4):
        leaves = qkv()
        out = attend(leaves)
        torch.autograd.grad(out, leaves, grad_out)
    assert in_python == [False, False, True], "seen, planned, taken over"
    assert len(Launches.ran) == 4 + 2


def test_hooks_of_saved_tensors_may_put_others_in_their_place(in_python):
    leaves = qkv()
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor.clone()):
        out = attend(leaves)
    assert is_native(out)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert in_python == [False], "Python looks at each tensor"


def test_what_was_changed_in_place_is_refused(in_python):
    leaves = qkv()
    key = leaves[1].detach().clone()
    out = attend([leaves[0], key, leaves[2]])
    key.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_memory_that_was_exchanged_is_seen(in_python):
    leaves = qkv()
    out = attend(leaves)
    leaves[0].data = leaves[0].detach().clone()
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert in_python == [False]


def test_a_graph_is_used_once_unless_it_is_retained(in_python):
    leaves = qkv()
    out = attend(leaves)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


def test_second_derivatives_are_refused(in_python):
    leaves = qkv()
    grad_out = torch.ones(B, S, H, D, dtype=torch.bfloat16)  # for which there is a plan
    (grad,) = torch.autograd.grad(attend(leaves), leaves[:1], grad_out, create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        grad.sum().backward()


def test_nothing_flows_where_no_gradient_comes(in_python):
    class Undefined(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, grad_out):
            return None

    leaves = qkv()
    grads = torch.autograd.grad(Undefined.apply(attend(leaves)).sum(), leaves, allow_unused=True)
    assert grads == (None, None, None) and in_python == [] and len(Launches.ran) == 1


def test_an_error_of_python_keeps_its_type(in_python, monkeypatch):
    def failing(*given):
        raise KeyError("a message")

    leaves = qkv()
    out = attend(leaves)
    monkeypatch.setattr(plans.Origin, "backward", failing)
    with pytest.raises(KeyError, match="a message"):
        torch.autograd.grad(out, leaves, torch.ones_like(out).transpose(1, 2).contiguous().transpose(1, 2))


def test_a_batch_of_gradients_goes_to_the_operator(in_python, monkeypatch):
    leaves = qkv()
    out = attend(leaves)
    monkeypatch.setattr(Launches, "refused", True)  # what stands in for kernels computes nothing under torch.func
    grads = torch.autograd.grad(out, leaves, torch.ones(3, *out.shape, dtype=out.dtype), is_grads_batched=True)
    assert [grad.shape for grad in grads] == [(3, B, S, H, D)] * 3 and in_python == []


def test_checkpoints_compute_again(in_python):
    for _ in range(2):
        leaves = qkv()
        out = checkpoint(attend, leaves, use_reentrant=False)
        check(out, leaves)


def test_forward_mode_is_refused(in_python):
    query, key, value = qkv()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        attend([forward_ad.make_dual(query.detach(), query.detach()), key, value])


def test_compiled_autograd_takes_the_node_as_it_is(in_python):
    leaves = qkv()
    out, expected = attend(leaves), attention(*leaves)
    grad_out = torch.randn_like(out)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        grads = torch.autograd.grad(out, leaves, grad_out)
    for grad, right in zip(grads, torch.autograd.grad(expected, leaves, grad_out), strict=True):
        assert torch.equal(grad, right)


def test_every_tensor_reaches_its_place(in_python):
    """With a mask, whose tensors lie between the primals and the outputs in a forward, and behind the outputs in a backward."""
    mask = dmattn_ops.prepare_mask(documents=torch.arange(S).expand(B, S) // 100)
    for _ in range(4):
        leaves, grad_out = qkv(), torch.ones(B, S, H, D, dtype=torch.bfloat16)
        Launches.places = []
        out = attend(leaves, mask)
        torch.autograd.grad(out, leaves, grad_out)
    assert is_native(out) and len(in_python) == 1
    own = [leaf.data_ptr() for leaf in leaves]
    of_mask = [0 if part is None else part.data_ptr() for part in mask.mask[:-1]]
    forward, backward = Launches.places
    assert forward[:INPUTS] == [*own, 0, *of_mask, 0, 0] and forward[INPUTS] == out.data_ptr()
    lse, tail = forward[INPUTS + 1 : INPUTS + 3]
    assert backward[: INPUTS + 5] == [grad_out.data_ptr(), 0, *own, out.data_ptr(), lse, tail, 0, *of_mask, 0, 0]


@pytest.mark.parametrize("seen", ["mode", "profiler"])
def test_whoever_watches_the_backward_sees_an_operator(in_python, seen):
    names = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, given=(), named=None):
            names.append(str(function))
            return function(*given, **named or {})

    leaves = qkv()
    out, grad_out = attend(leaves), torch.ones(B, S, H, D, dtype=torch.bfloat16)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with contextlib.suppress(NotImplementedError), Mode() if seen == "mode" else profile as watched:
        torch.autograd.grad(out, leaves, grad_out)
    if seen == "profiler":
        names = [event.name for event in watched.events()]
    assert any("dmattn" in name and "backward" in name for name in names)


def test_what_the_driver_refuses_python_launches(in_python, monkeypatch):
    leaves = qkv()
    out = attend(leaves)
    monkeypatch.setattr(Launches, "refused", True)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert in_python == [False]
    assert not is_native(attend(qkv()))


def test_threads_do_not_mix(in_python):
    def work():
        try:
            for _ in range(5):
                leaves = qkv()
                check(attend(leaves), leaves)
        except BaseException as error:
            failed.append(error)

    failed = []
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [] and in_python == []


def test_nothing_is_kept_of_calls_and_plans_that_are_gone(in_python):
    leaves = qkv()
    out = attend(leaves)
    known = [weakref.ref(repeat.plan) for repeat in plans._repeats.values()]
    tensors = [weakref.ref(leaf) for leaf in leaves]
    plans.forget()
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert in_python == [], "a graph keeps its plan"
    del out, leaves
    gc.collect()
    assert [each() for each in (*known, *tensors)] == [None] * 4


def test_calls_with_lse_or_a_maximum_are_left_to_python(in_python):
    for _ in range(4):
        leaves = qkv()
        for named in ({"return_lse": True}, {"return_max": True}):
            assert not is_native(attend(leaves, **named)[0])


VARIABLES = {"FLASH_DMATTN_PROFILE_BACKWARD": "1", "DMATTN_ARCH": "8.0", "DMATTN_RECORD": "calls.json"}


def test_the_variables_are_all_that_a_backward_follows():
    assert set(VARIABLES) == set(environment.OF_BACKWARD)


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_is_set_before_the_backward_is_followed(in_python, monkeypatch, tmp_path, capfd, name):
    monkeypatch.chdir(tmp_path)
    leaves = qkv()
    out = attend(leaves)
    monkeypatch.setenv(name, VARIABLES[name])
    with contextlib.suppress(RuntimeError):  # kernels for SM 8.0 have no stand-in here
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert is_native(out) and len(in_python) == 1
    assert ("FLASH_DMATTN_PROFILE" in capfd.readouterr().err) == (name == "FLASH_DMATTN_PROFILE_BACKWARD")


@pytest.mark.parametrize("name", VARIABLES)
def test_plans_of_a_backward_under_a_variable_are_not_those_without_it(in_python, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    plans.forget()
    found = []
    for step in range(5):
        leaves = qkv()
        out = attend(leaves)
        with monkeypatch.context() as patch, contextlib.suppress(RuntimeError):
            if step < 4:
                patch.setenv(name, VARIABLES[name])
            torch.autograd.grad(out, leaves, torch.ones_like(out))
        found.append(len(in_python))
    assert is_native(out) and found[-1] == found[-2] + 1, (
        "the first backward without it was repeated by a plan under it"
    )


def test_float32_is_left_to_python_which_reads_the_switch_for_tf32(in_python):
    for _ in range(4):
        leaves = [leaf.detach().float().requires_grad_() for leaf in qkv()]
        with contextlib.suppress(RuntimeError):  # portable kernels have no stand-in here
            assert not is_native(attend(leaves))


def test_exported_calls_are_seen_by_python(in_python):
    leaves = qkv()
    out = attend(leaves)
    with plans.exporting(lambda call: None):
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert in_python == [False]

"""torch.func and forward mode: first derivatives in reverse mode are right at every level, all others raise."""

import functools

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import dmattn_ops
from tests.support import call_inputs
from tests.support.formula import textbook

forward_op = torch.ops.dmattn.forward.default
DOUBLE = {"dtype": torch.float64}


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("call", [forward_op, functools.partial(dmattn_ops.flash_dmattn_func, return_lse=True)])
def test_forward_mode_raises(which, call):
    tensors = [*call_inputs.qkv(requires_grad=False), call_inputs.random_bias(1, 1, 33, 33, requires_grad=False)]
    arguments = (lambda: tensors) if call is forward_op else (lambda: [*tensors[:3], None, tensors[3]])
    with forward_ad.dual_level():
        primal = tensors[which]
        tensors[which] = forward_ad.make_dual(primal, torch.ones_like(primal))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            call(*arguments())
        tensors[which] = primal
        assert call(*arguments())[0].shape == (2, 33, 4, 16)  # no tangent, no refusal


def test_forward_mode_of_other_tensors_still_works():
    query, key, value = call_inputs.qkv(requires_grad=False)
    scale, tangent = torch.tensor(2.0), torch.tensor(1.0)
    out = dmattn_ops.flash_dmattn_func(query, key, value)
    _, directional = torch.func.jvp(lambda s: s * dmattn_ops.flash_dmattn_func(query, key, value), (scale,), (tangent,))
    assert torch.equal(directional, out)


def attention_out(query, key, value):
    return dmattn_ops.flash_dmattn_func(query, key, value, is_causal=True)


def operator_out(query, key, value):
    return forward_op(query, key, value, band_hi=0)[0]


def textbook_out(query, key, value):
    return textbook(query, key, value, is_causal=True)[0]


TRANSFORMS = {
    "grad": lambda f: lambda *x: torch.func.grad(lambda *y: f(*y).sin().sum(), argnums=(0, 1, 2))(*x),
    "vjp": lambda f: lambda *x: torch.func.vjp(f, *x)[1](x[2]),
    "jacrev": lambda f: lambda q, k, v: torch.func.jacrev(lambda q: f(q, k, v).sum((0, 2, 3)))(q),
    "per-sample grad": lambda f: torch.vmap(
        torch.func.grad(lambda *x: f(*(t.unsqueeze(0) for t in x)).sin().sum(), argnums=(0, 1, 2))
    ),
    "grad of vmap": lambda f: torch.func.grad(
        lambda *x: torch.vmap(f)(*(t.unsqueeze(1) for t in x)).sin().sum(), argnums=(0, 1, 2)
    ),
    "vmap over keys": lambda f: lambda q, k, v: torch.vmap(f, in_dims=(None, 0, None))(q, torch.stack((k, 2 * k)), v),
    "outer grad of an inner one": lambda f: (
        lambda q, k, v: torch.func.grad(
            lambda q: (f(q, k, v) * torch.func.grad(lambda s: (s**3).sum())(f(q, k, v).detach())).sum()
        )(q)
    ),
    "inner level apart": lambda f: (
        lambda q, k, v: torch.func.grad(
            lambda q: torch.func.grad(lambda s: (s**2 * f(q, k, v)).sum())(torch.tensor(3.0, dtype=q.dtype))
        )(q)
    ),
}


@pytest.mark.filterwarnings("error:There is a performance drop")  # asks to file an issue at torch
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("call", [attention_out, operator_out])
def test_functional_transforms_equal_the_textbook_formula(name, call):
    inputs = call_inputs.qkv(2, 7, 2, 4, requires_grad=False, **DOUBLE)
    torch.testing.assert_close(TRANSFORMS[name](call)(*inputs), TRANSFORMS[name](textbook_out)(*inputs))


SECOND = {
    "grad of grad": lambda f: torch.func.grad(lambda x: torch.func.grad(lambda y: f(y).sin().sum())(x).sum()),
    "hessian": lambda f: torch.func.hessian(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    "jacfwd": lambda f: torch.func.jacfwd(lambda x: f(x).sum()),
    "jvp of grad": lambda f: lambda x: torch.func.jvp(torch.func.grad(lambda y: f(y).sin().sum()), (x,), (x,)),
    "grad of jvp": lambda f: torch.func.grad(lambda x: torch.func.jvp(lambda y: f(y).sum(), (x,), (x,))[1]),
}


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("call", [attention_out, operator_out])
def test_functional_transforms_that_need_other_derivatives_raise(name, call):
    query, key, value = call_inputs.qkv(2, 7, 2, 4, requires_grad=False)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"dmattn: .*(not differentiable|no forward-mode)"):
        SECOND[name](lambda x: call(x, key, value))(query)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_traced_graph_of_operators_computes_the_same(mode):
    def call(query, key, value, scores):
        return dmattn_ops.flash_dmattn_func(query, key, value, dmattn_ops.dynamic_mask(scores, 5), scores.unsqueeze(2))

    inputs = (*call_inputs.qkv(requires_grad=False), torch.randn(2, 4, 33))
    traced = make_fx(call, tracing_mode=mode)(*inputs)
    torch.testing.assert_close(traced(*inputs), call(*inputs))
    if mode == "symbolic":
        shorter = (*(tensor[:, :20].contiguous() for tensor in inputs[:3]), inputs[3][..., :20].contiguous())
        torch.testing.assert_close(traced(*shorter), call(*shorter))


def test_vmap_over_nothing_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"^torch\.vmap over a dimension of size 0 has no results"):
        torch.vmap(lambda each: dmattn_ops.flash_dmattn_func(each, each, each))(torch.zeros(0, 1, 6, 1, 4))

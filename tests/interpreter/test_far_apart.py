"""The portable kernels read and write elements that lie more than 2^31 elements apart."""

from __future__ import annotations

import pytest
import torch

from dmattn_ops.call import UNBOUNDED, Call, Gradients, Result, Saved
from dmattn_ops.kernels.portable import backward as portable_backward
from dmattn_ops.kernels.portable import forward as portable_forward
from tests.interpreter import oracle
from tests.interpreter.problems import BACKWARD, FORWARD, Problem, build, expected
from tests.support.far_apart import PLACES, SHAPE, far_apart

pytestmark = pytest.mark.usefixtures("strict_memory")


@pytest.mark.parametrize("mask", ["none", "bits"])
@pytest.mark.parametrize("place", PLACES)
def test_far_inputs_and_outputs(place: str, mask: str) -> None:
    batch, seqlen, heads, dim = SHAPE
    problem = Problem(
        batch=batch, heads=heads, kv_heads=heads, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=dim, value_dim=dim,
        dtype=torch.float16, mask=mask, band_lo=-UNBOUNDED, band_hi=0, bias=(1, 1, seqlen), scale=dim**-0.5,
    )  # fmt: skip
    case = build(problem)
    spoiled = [torch.full_like(case.query, float("nan")) for _ in range(4)]
    query, key, value, grad_out, out, dq, dk, dv = far_apart(
        [case.query, case.key, case.value, case.grad_out, *spoiled], place
    )
    assert case.bias is not None
    # the rows of the bias lie as far apart
    bias = far_apart([case.bias.transpose(1, 2)], "rows")[0].transpose(1, 2)
    lse, lse_tail = (torch.full((batch, heads, seqlen), float("nan")) for _ in range(2))
    dbias = torch.full(bias.shape, float("nan"), dtype=bias.dtype)
    call = Call(query, key, value, bias, case.mask, None, None, None, case.options)
    portable_forward.forward(call, Result(out, lse, lse_tail, None), FORWARD)
    portable_backward.backward(call, Saved(out, lse, lse_tail), Gradients(grad_out, None, dq, dk, dv, dbias), BACKWARD)
    truth, eager = expected(problem, case, torch.float64), expected(problem, case, problem.dtype)
    for name, tensor in {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dbias": dbias}.items():
        limit = 2 * oracle.error(eager[name], truth[name]) + oracle.EPSILON[problem.dtype]
        assert oracle.error(tensor, truth[name]) <= limit, name

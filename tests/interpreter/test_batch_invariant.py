"""Portable kernels in batch-invariant calls: bits of one batch entry, or one packed sequence, whatever stands beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dmattn_ops.call import Call, Gradients, Result, Saved
from dmattn_ops.choice import arch
from dmattn_ops.choice.config import PortableBackward, PortableForward
from dmattn_ops.dispatch import entries
from dmattn_ops.kernels.portable import backward as portable_backward
from dmattn_ops.kernels.portable import forward as portable_forward
from tests.interpreter.problems import Problem, build

FORWARD = PortableForward(16, 32, 4, 2, per_sm=2)
BACKWARD = PortableBackward(64, 64, 4, 1, 64, 64, 4, 1)
MULTIPROCESSORS = 10  # so few that a batch of three keeps them busier than one entry does
PROBLEMS = {
    "decoding": Problem(batch=3, seqlen_q=1, seqlen_k=300),
    "few queries, bits": Problem(batch=3, heads=2, seqlen_q=3, seqlen_k=270, mask="bits", mask_batch=3, density=0.2),
    "bias": Problem(batch=2, seqlen_q=40, seqlen_k=50, bias=(2, 2, 40), band_hi=20),
    "shared bias": Problem(batch=2, seqlen_q=40, seqlen_k=50, bias=(1, 2, 40), softcap=2.0),
    "bias of keys": Problem(batch=2, heads=4, seqlen_q=20, seqlen_k=70, bias=(2, 1, 1)),
    "intervals": Problem(batch=2, seqlen_q=40, seqlen_k=150, mask="intervals", mask_batch=2),
    "packed": Problem(lengths_q=(1, 30, 2), lengths_k=(300, 40, 70), band_hi=0, bias=(1, 2, 1)),
}


def results(call: Call, grad_out: Tensor) -> dict[str, Tensor]:
    """Run both directions of a call; outputs hold NaN before."""
    query, key, value = call.query, call.key, call.value
    out = torch.full((*query.shape[:-1], value.shape[-1]), float("nan"), dtype=query.dtype)
    statistics = [torch.full(out.shape[:-1], float("nan")).transpose(-1, -2).contiguous() for _ in range(3)]
    result = Result(out, *statistics)
    portable_forward.forward(call, result, FORWARD)
    dq, dk, dv = (
        torch.full_like(each, float("nan"), memory_format=torch.contiguous_format) for each in (query, key, value)
    )
    dbias = None if call.bias is None else torch.full(call.bias.shape, float("nan"))
    grads = Gradients(grad_out, None, dq, dk, dv, dbias)
    portable_backward.backward(call, Saved(out, *statistics[:2]), grads, BACKWARD)
    found = {"out": out, "lse": statistics[0], "row_max": statistics[2], "dq": dq, "dk": dk, "dv": dv}
    return found if dbias is None else found | {"dbias": dbias}


@pytest.mark.parametrize("name", PROBLEMS)
def test_portable_kernels_give_an_entry_the_same_bits_in_every_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arch, "physical", lambda _: replace(arch.KNOWN[80], num_sms=MULTIPROCESSORS))
    case = build(PROBLEMS[name])
    options = case.options._replace(batch_invariant=True)
    call = Call(case.query, case.key, case.value, case.bias, case.mask, None, None, case.varlen, options)
    together = results(call, case.grad_out)
    splits, plain = (
        portable_forward.splits_of(each, portable_forward.extent(each), FORWARD, MULTIPROCESSORS)
        for each in (call, call._replace(options=case.options))
    )
    if name == "decoding":
        assert splits > plain  # so that the option matters
    for entry in entries._entries(call):
        alone = results(entry.call, case.grad_out[entry.queries])
        places = {"lse": entry.rows, "row_max": entry.rows, "dk": entry.keys, "dv": entry.keys, "dbias": entry.bias}
        for result, found in alone.items():
            if result == "dbias" and case.varlen is None and case.bias is not None and case.bias.shape[0] == 1:
                continue  # a sum over the batch
            assert torch.equal(together[result][places.get(result, entry.queries)], found), result

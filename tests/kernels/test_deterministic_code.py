"""Deterministic calls on SM 8.x: who takes them, what `explain` says, and that their kernels add up in an order of their own."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

import dmattn_ops
from dmattn_ops.api.explain import Launch
from dmattn_ops.api.stand_in import Launch as Compiled
from dmattn_ops.api.stand_in import compiled_launches
from dmattn_ops.choice import arch
from dmattn_ops.choice.resources import Specialization
from dmattn_ops.dispatch import run
from dmattn_ops.masks.prepare import prepare_mask
from tests.tools import configurations
from tests.tools.configurations import BITS, CAUSAL, PLAIN, SEGMENTS, VARLEN

VERSIONS = ("8.0", "8.6", "8.9", "12.0")
S = 300
ADDS = re.compile(r"\b(?:atom|red)\.\S*\badd\S*\.(?:f16|bf16|f32|f64)\S*")  # additions of numbers, in any order
AWAITS = re.compile(r"\bld\.acquire\.gpu\.global\b")  # of the counter that says whose turn it is
REASON = "adds up dq in any order where there is a mask or sequences are packed, which is not deterministic"


def rows(total: int = S, *batch: int) -> Tensor:
    return torch.zeros(*batch, total, 2, 64, dtype=torch.bfloat16)


def masks() -> dict[str, object]:
    ends = torch.full((1, 1, S), S, dtype=torch.int32)
    ids = torch.arange(S)[None] // 100
    return {
        "bits": torch.ones(1, 1, S, S, dtype=torch.bool).tril(),
        "padding": torch.ones(1, 1, 1, S, dtype=torch.bool),
        "documents": prepare_mask(documents=ids, is_causal=True),
        "intervals": prepare_mask(intervals=(ends * 0, ends), seqlen_q=S),
    }


def explained(version: str, mask: object = None, **more: object) -> Launch:
    x = rows(S, 1)
    return dmattn_ops.explain(x, x, x, mask, arch=version, **more).backward


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["bits", "padding", "documents", "intervals"])
def test_explain_says_that_portable_kernels_take_a_deterministic_masked_backward(kind: str, version: str):
    mask = masks()[kind]
    usual, same_bits = explained(version, mask), explained(version, mask, deterministic=True)
    assert usual.kernel == "ampere" and same_bits.kernel == "portable"
    assert REASON in same_bits.passed_over and REASON not in usual.passed_over
    assert REASON in str(same_bits)


@pytest.mark.parametrize("version", VERSIONS)
def test_explain_says_it_of_packed_sequences_and_calls_without_a_mask_keep_their_kernels(version: str):
    x, ends = rows(), torch.tensor([0, 100, S], dtype=torch.int32)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 200, "max_seqlen_k": 200}
    found = dmattn_ops.explain(x, x, x, deterministic=True, arch=version, **packed)
    assert found.backward.kernel == "portable" and REASON in str(found)
    assert dmattn_ops.explain(x, x, x, arch=version, **packed).backward.kernel == "ampere"
    assert explained(version, is_causal=True, deterministic=True).kernel == "ampere"


def deterministic_launches(wanted: Specialization, sm: int) -> tuple[str, list[Compiled]]:
    """Compile what a deterministic backward of such a call launches on an architecture; return its family of kernels as well."""
    wanted = replace(wanted, deterministic=True)
    call = configurations.make_call(wanted, 64)
    kernel = run.offered("backward", call, arch.KNOWN[sm]).row.kernel
    row = next(
        row for row in configurations.reachable(configurations.DIRECTIONS["backward"], sm) if row.kernel == kernel
    )
    with compiled_launches(sm) as launches:
        configurations.launch(configurations.Unit("backward", row, 64, wanted))
    assert launches
    return kernel, launches


CALLS = {
    "bits": replace(BITS, bias="broadcast bias"),
    "segments": SEGMENTS,
    "intervals": replace(CAUSAL, mask="hidden intervals", grouped=True, bias="key bias"),
    "packed": replace(VARLEN, bias="key bias"),
    "plain": PLAIN,
}


@pytest.mark.parametrize("sm", [80, pytest.param(86, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_no_kernel_of_a_deterministic_backward_adds_numbers_in_any_order(name: str, sm: int):
    kernel, launches = deterministic_launches(CALLS[name], sm)
    assert kernel == ("ampere" if name == "plain" else "portable")
    for made in launches:
        ptx = made.compiled.asm["ptx"]
        if (kernel, made.kernel) == (
            "ampere",
            "backward_kernel",
        ):  # without a mask blocks of keys add one after another
            assert ADDS.search(ptx) and AWAITS.search(ptx)
        else:
            assert not ADDS.search(ptx), made.kernel

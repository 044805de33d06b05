"""When dispatch takes the kernels of mma.sync and cp.async: on their architectures, where they take the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from dmattn_ops.call import NO_MASK, Call, Options, plain_options
from dmattn_ops.choice import arch, config, resolve
from dmattn_ops.dispatch import run

PLAIN = plain_options(0.125)
PAIR_BIAS = torch.empty(1, 1, 200, 304, dtype=torch.bfloat16)[..., :300]
KEYS = NO_MASK._replace(k_segments=torch.zeros(1, 1, 300, dtype=torch.int32))


def call(
    dim: int = 64, seqlen_q: int = 200, dtype: torch.dtype = torch.bfloat16, options: Options = PLAIN, spare: int = 0
) -> Call:
    """Return a call whose rows lie `spare` elements apart."""
    query = torch.empty(1, seqlen_q, 4, dim + spare, dtype=dtype)[..., :dim]
    key = torch.empty(1, 300, 2, dim + spare, dtype=dtype)[..., :dim]
    return Call(query, key, key.clone(), None, NO_MASK, None, None, None, options)


def taken(given: Call, sm: int = 80) -> tuple[str, str]:
    """Return the names of the kernels that forward and backward of a call are given to on an architecture."""
    on = arch.KNOWN[sm]
    return tuple(run.offered(direction, given, on).row.kernel for direction in ("forward", "backward"))


@pytest.mark.parametrize("sm", [80, 86, 89, 120])
@pytest.mark.parametrize("dim", [8, 64, 80, 128, 256])
def test_they_are_taken_on_each_of_their_architectures(dim: int, sm: int) -> None:
    assert taken(call(dim), sm) == ("ampere", "ampere")


def test_other_architectures_keep_their_own() -> None:
    assert taken(call(), 90) == ("hopper", "hopper")
    assert taken(call(), 100) == ("portable", "portable")


@pytest.mark.parametrize(
    ("given", "kernels"),
    [
        (call(dtype=torch.float32), ("portable", "portable")),
        (call(dim=20), ("portable", "portable")),
        (call(spare=4), ("portable", "portable")),
        (call(seqlen_q=16), ("portable", "ampere")),
        (call(options=PLAIN._replace(deterministic=True))._replace(mask=KEYS), ("ampere", "portable")),
        (call(options=PLAIN._replace(batch_invariant=True, deterministic=True)), ("portable", "ampere")),
    ],
    ids=[
        "float32",
        "dimension 20",
        "rows of odd distances",
        "16 queries",
        "deterministic with a mask",
        "batch-invariant",
    ],
)
def test_portable_kernels_take_what_these_refuse(given: Call, kernels: tuple[str, str]) -> None:
    assert taken(given) == kernels


def test_rows_are_for_two_bytes_and_have_their_own_kernels_behind_them() -> None:
    for rows in (config.FORWARD, config.BACKWARD):
        own = [row for row in rows if row.kernel == "ampere"]
        assert {row.itemsize for row in own} == {2}
        others = {row.sm for row in rows if (row.kernel, row.dim, row.itemsize) == ("portable", 256, 2)}
        assert {row.sm for row in own if not row.full_bias} == {80, 86, 89, 120} < others


@pytest.mark.parametrize(("dim", "bias", "kernel"), [(32, True, "ampere"), (40, True, "hopper"), (32, False, "hopper")])
def test_narrow_heads_with_a_pair_bias_have_this_backward_on_hopper_too(dim: int, bias: bool, kernel: str) -> None:
    given = call(dim)._replace(bias=PAIR_BIAS if bias else None)
    assert run.offered("backward", given, arch.KNOWN[90]).row.kernel == kernel


@pytest.mark.parametrize("sm", (80, 86, 89, 120))
def test_narrow_heads_with_a_pair_bias_have_blocks_of_their_own(sm: int) -> None:
    """Which fit into the shared memory of the row that offers them."""
    row = next(row for row in config.AMPERE_BACKWARD if (row.sm, row.dim) == (sm, 64))
    nothing: Any = None
    narrow, wide = (
        resolve.backward_config(row.config, call(dim)._replace(bias=PAIR_BIAS), nothing, nothing) for dim in (32, 40)
    )
    assert narrow.block_n == 128 and narrow.shared_bias.stages == 2
    assert wide.block_n == 64 and wide.shared_bias == row.config.shared_bias


def test_plain_calls_may_take_a_forward_of_their_own() -> None:
    """Without a mask, a band, a bias, a soft cap or dropout."""
    plain = config.AmpereForward(128, 64, 4, held=True, ahead=True)
    dropping = config.AmpereForward(64, 64, 4)
    offered = config.AmpereForward(128, 64, 4, plain=plain, dropout=dropping)
    result: Any = None

    def taken_by(given: Call) -> object:
        return resolve.forward_config(offered, given, result)

    assert taken_by(call()) is plain
    assert taken_by(call(options=plain_options(0.125, softcap=1.0))) is offered
    assert taken_by(call(options=plain_options(0.125, dropout_p=0.1))) is dropping
    assert taken_by(call(options=plain_options(0.125, band_hi=0))) is offered
    assert taken_by(call()._replace(mask=KEYS)) is offered
    assert taken_by(call()._replace(bias=torch.zeros(1, 1, 200, 300))) is offered

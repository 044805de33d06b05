"""Kernels that may begin before the one in front of them has ended: each waits for it before it touches memory."""

import re

import pytest

pytest.importorskip("triton.experimental.gluon")
from dmattn_ops.kernels import spans
from dmattn_ops.resources import Specialization
from dmattn_ops.testing import configurations
from dmattn_ops.testing.stand_in import compiled_launches

TOUCHES = re.compile(r"\b(ld|st|ldu|red|atom|prefetch|cp\.async)[.\w:]*\.global")
CALLS = {
    "dense": (64, Specialization(), ["backward_kernel"]),
    "few blocks": (64, Specialization(grouped=True), ["backward_kernel", "add_shares_kernel"]),
    "wide heads": (256, Specialization(band="causal"), ["keys_kernel", "queries_kernel"]),
    "packed sequences": (128, Specialization(varlen=True), ["_write_spans", "backward_kernel"]),
}


def launched(direction, dim, wanted):
    rows = configurations.reachable(configurations.DIRECTIONS[direction], 90)
    row = next(row for row in rows if row.kernel != "portable" and row.dim == dim and not row.dim_v)
    with compiled_launches(90) as launches:
        configurations.launch(configurations.Unit(direction, row, dim, wanted))
    return launches


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_that_follows_waits_before_it_touches_memory(name):
    dim, wanted, expected = CALLS[name]
    launches = launched("backward", dim, wanted)
    follows = [made.compiled.metadata.launch_pdl for made in launches]
    assert [made.kernel for made, does in zip(launches, follows, strict=True) if does] == expected
    assert not follows[0]  # what is in front of a call is not known
    for place, made in enumerate(launches):
        before, wait, _ = made.compiled.asm["ptx"].partition("griddepcontrol.wait")
        if follows[place]:
            assert wait, made.kernel
            assert not TOUCHES.search(before), made.kernel
        if any(follows[place + 1 : place + 2]):
            assert "griddepcontrol.launch_dependents" in before, made.kernel


def test_a_forward_follows_nothing():
    assert not any(made.compiled.metadata.launch_pdl for made in launched("forward", 128, Specialization(varlen=True)))


@pytest.mark.parametrize("of_keys", [False, True])
def test_the_spans_of_a_forward_and_their_order_follow_nothing(of_keys, monkeypatch):
    monkeypatch.setattr(spans, "_RANKED", 1)  # more tiles than that are ranked by a kernel of their own
    call = configurations.make_call(Specialization(varlen=True), 64)
    with compiled_launches(90) as launches:
        spans.spans_of(call, 64, of_keys=of_keys)
    assert [made.kernel for made in launches] == ["_write_spans", "_rank_tiles"]
    assert [made.compiled.metadata.launch_pdl for made in launches] == [of_keys, of_keys]


@pytest.mark.parametrize("sm", [80, 90, 100])
def test_other_architectures_know_nothing_of_it(sm):
    call = configurations.make_call(Specialization(varlen=True), 64)
    with compiled_launches(sm) as launches:
        spans.spans_of(call, 128, of_keys=True)
    (made,) = launches
    assert made.compiled.metadata.launch_pdl == (sm == 90)
    assert ("griddepcontrol" in made.compiled.asm["ptx"]) == (sm == 90)

"""Kernels that may begin before the one in front of them has ended: each waits for it before it touches memory."""

import re
from contextlib import contextmanager

import pytest

pytest.importorskip("triton.experimental.gluon")
from triton.runtime.jit import JITFunction

from dmattn_ops.api.stand_in import compiled_launches
from dmattn_ops.choice.resources import Specialization
from dmattn_ops.kernels.interval_lists import listed
from dmattn_ops.kernels.ragged import tiles_of
from dmattn_ops.launching.recording import one_call, thread
from tests.support import other_launches
from tests.tools import configurations

TOUCHES = re.compile(r"\b(ld|st|ldu|red|atom|prefetch|cp\.async)[.\w:]*\.global")
CALLS = {
    "dense": (64, Specialization(), ["backward_kernel"]),
    "few blocks": (64, Specialization(grouped=True), ["backward_kernel", "add_shares_kernel"]),
    "wide heads": (256, Specialization(band="causal"), ["keys_kernel", "queries_kernel"]),
    "intervals": (
        64,
        Specialization(band="causal", mask="intervals"),
        ["list_tiles_kernel", "prepare_kernel", "backward_kernel", "_queries_again", "_keys_again"],
    ),
    "packed sequences": (
        128,
        Specialization(varlen=True),
        ["prepare_kernel", "_write_tiles", "_rank_tiles", "backward_kernel"],
    ),
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


def test_a_forward_follows_the_lists_that_it_walks():
    launches = launched("forward", 64, Specialization(band="causal", mask="intervals"))
    assert [made.kernel for made in launches] == [
        "_write_hulls", "list_tiles_kernel", "forward_kernel", "_forward_again",
    ]  # fmt: skip
    assert [made.compiled.metadata.launch_pdl for made in launches] == [False, True, True, True]
    for made in launches:
        before, wait, _ = made.compiled.asm["ptx"].partition("griddepcontrol.wait")
        assert wait and not TOUCHES.search(before), made.kernel


@pytest.mark.parametrize("mask", ["bits", "segments"])
def test_a_forward_that_follows_none_lets_the_kernel_behind_begin(mask):
    forward, again = launched("forward", 64, Specialization(band="causal", mask=mask))
    assert [made.kernel for made in (forward, again)] == ["forward_kernel", "_forward_again"]
    assert [made.compiled.metadata.launch_pdl for made in (forward, again)] == [False, True]
    code = forward.compiled.asm["ptx"]
    assert "griddepcontrol.launch_dependents" in code and "griddepcontrol.wait" not in code


def test_the_end_of_a_chunk_of_kept_keys_follows_the_selection():
    with compiled_launches(90) as launches:
        other_launches.keep_chunk()
    follows = [made for made in launches if made.compiled.metadata.launch_pdl]
    assert [made.kernel for made in follows] == ["sort_alive", "end_chunk"]
    for made in follows:
        before, wait, _ = made.compiled.asm["ptx"].partition("griddepcontrol.wait")
        assert wait and not TOUCHES.search(before), made.kernel


def test_of_a_forward_only_the_order_of_its_tiles_follows_what_is_before_it():
    launches = launched("forward", 128, Specialization(varlen=True))
    assert [made.kernel for made in launches if made.compiled.metadata.launch_pdl] == ["_rank_tiles"]


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("of_keys", [False, True])
def test_the_order_of_tiles_follows_and_they_do_where_told(of_keys, follows):
    call = configurations.make_call(Specialization(varlen=True), 64)
    with compiled_launches(90) as launches:
        for _ in range(2):
            tiles_of(call, 64, of_keys=of_keys, follows=follows)
    assert [made.kernel for made in launches] == ["_write_tiles", "_rank_tiles"] * 2
    assert [made.compiled.metadata.launch_pdl for made in launches] == [False, True, follows, True]


@contextmanager
def noted_launches(monkeypatch):
    """Give the names of kernels that are launched on SM 9.0, each with whether it may begin before the one in front of it ends."""
    found = []

    def note(kernel, *arguments, grid, warmup, launch_pdl=False, **named):
        found.append((kernel.__name__, launch_pdl))

    with compiled_launches(90), monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", note)
        patch.setattr("dmattn_ops.launching.launch._compiled", _Forgetful())
        yield found


class _Forgetful(dict):
    """Launches are looked up, and none was made before."""

    def __setitem__(self, key, compiled):
        pass


def every_unit():
    """Return calls of all specializations for the narrowest heads of each launcher for SM 9.0."""
    found = []
    for direction, rows in configurations.DIRECTIONS.items():
        narrowest = {row.kernel: row for row in reversed(configurations.reachable(rows, 90))}
        for row in narrowest.values():
            for wanted in (*configurations.HOPPER, *configurations.PORTABLE):
                unit = configurations.Unit(direction, row, row.dim, wanted)
                refusals = getattr(unit.launcher, "refusals", lambda call: [])
                call = configurations.make_call(wanted, row.dim, row.dim_v)
                if call.kind in unit.launcher.TAKES.masks and not refusals(call):
                    found.append(unit)
    return found


def test_the_first_kernel_of_a_call_never_follows_what_a_caller_launched(monkeypatch):
    given_lists = 0
    for unit in every_unit():
        call, *others = configurations.arguments(unit)
        with noted_launches(monkeypatch) as own, one_call():
            getattr(unit.launcher, unit.direction)(call, *others)
        assert own and own[0][1] is False, unit
        if call.mask.kind != "intervals":
            continue
        with noted_launches(monkeypatch):
            call = listed(call)  # made before the call
        with noted_launches(monkeypatch) as given, one_call():
            getattr(unit.launcher, unit.direction)(call, *others)
        assert given == [(given[0][0], False), *own[len(own) - len(given) + 1 :]], unit
        given_lists += any(follows for _, follows in own)
    assert given_lists >= 4  # both directions of two families


def test_no_kernel_follows_outside_of_a_call(monkeypatch):
    unit = next(unit for unit in every_unit() if unit.wanted.mask == "intervals" and unit.row.kernel == "hopper")
    with noted_launches(monkeypatch) as inside, one_call():
        configurations.launch(unit)
    monkeypatch.setattr("dmattn_ops.api.stand_in.one_call", contextmanager(lambda: iter([None])))
    with noted_launches(monkeypatch) as outside:
        configurations.launch(unit)
    assert [name for name, _ in outside] == [name for name, _ in inside]
    assert not any(follows for _, follows in outside) and any(follows for _, follows in inside)


def test_calls_within_a_call_are_counted_apart():
    assert thread.launches is None
    with one_call():
        thread.launches += 1
        with one_call():
            assert thread.launches == 0
        assert thread.launches == 1
    assert thread.launches is None


@pytest.mark.parametrize("sm", [80, 90, 100])
def test_other_architectures_know_nothing_of_it(sm):
    call = configurations.make_call(Specialization(varlen=True), 64)
    with compiled_launches(sm) as launches:
        tiles_of(call, 128, of_keys=True, follows=True)
    assert len(launches) == 2
    assert [made.compiled.metadata.launch_pdl for made in launches] == [False, sm == 90]
    for made in launches:
        assert ("griddepcontrol" in made.compiled.asm["ptx"]) == (sm == 90)

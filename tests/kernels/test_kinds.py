"""The kind of mask that kernels for SM 9.0 are compiled for, of each mask that a call may have."""

from __future__ import annotations

from dataclasses import replace

import pytest

kinds = pytest.importorskip("dmattn_ops.kernels.hopper.kinds")

from tests.tools.configurations import BITS, CAUSAL, KEYS, PLAIN, SEGMENTS, VARLEN, WINDOW, make_call  # noqa: E402

OF_CALLS = (
    (PLAIN, kinds.BAND),
    (CAUSAL, kinds.BAND),
    (WINDOW, kinds.BAND),
    (BITS, kinds.BITS),
    (SEGMENTS, kinds.SEGMENTS),
    (KEYS, kinds.SEGMENTS),
    (replace(CAUSAL, mask="intervals"), kinds.INTERVALS),
    (replace(CAUSAL, mask="hidden intervals"), kinds.INTERVALS),
    (VARLEN, kinds.RAGGED),
    (replace(VARLEN, band="window"), kinds.RAGGED),
)


@pytest.mark.parametrize(("wanted", "kind"), OF_CALLS, ids=lambda value: str(value))
def test_a_call_has_the_kind_of_its_mask(wanted, kind) -> None:
    assert kinds.kind_of(make_call(wanted, 64)) == kind.value


def test_lists_come_with_all_kinds_but_those_of_the_band() -> None:
    of = {"BAND": False, "BITS": True, "SEGMENTS": True, "INTERVALS": True, "RAGGED": False}
    assert {name: kinds.has_lists(getattr(kinds, name).value) for name in of} == of

"""The SM 9.0 backward's launcher puts each part of a mask where the kernel has its name, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

from dmattn_ops.choice import arch, config
from dmattn_ops.choice.resources import Specialization
from dmattn_ops.kernels.hopper import behind
from dmattn_ops.kernels.hopper.backward import launch as backward
from dmattn_ops.kernels.hopper.backward.kernel import backward_kernel
from dmattn_ops.kernels.hopper.backward.types import Mask
from tests.tools import configurations

ROW = next(row for row in config.BACKWARD if row.kernel == "hopper" and row.dim == 64)
KINDS = ("", "bits", "segments", "key segments", "intervals", "hidden intervals")


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_part_of_a_mask_stands_where_the_kernel_names_it(
    monkeypatch: pytest.MonkeyPatch, kind: str, grouped: bool
) -> None:
    launched: dict[str, Any] = {}

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        if kernel is backward_kernel:
            launched.update(zip(kernel.arg_names, arguments, strict=False), **named)

    masks: list[Mask] = []
    mask_of = backward._mask_of

    def keep(*given: Any) -> Mask:
        masks.append(mask_of(*given))
        return masks[-1]

    monkeypatch.setattr(arch, "physical", lambda device: arch.KNOWN[90])
    monkeypatch.setattr(backward, "launch", note)
    monkeypatch.setattr(behind, "backward_again", lambda *arguments: None)
    monkeypatch.setattr(behind, "listed", with_lists)
    monkeypatch.setattr(backward, "_mask_of", keep)
    unit = configurations.Unit("backward", ROW, 64, Specialization(band="causal", mask=kind, grouped=grouped))
    backward.backward(*(replace_shares(each) for each in configurations.arguments(unit)))
    (mask,) = masks
    assert all(launched[name] is part for name, part in zip(Mask._fields, mask, strict=True))
    assert (kind.split()[-1] if kind else "band") == launched["T"].MASK
    assert set(backward_kernel.arg_names) <= set(launched)


def with_lists(call: Any) -> Any:
    """Return a call whose intervals have lists of tiles, as `interval_lists.listed` makes them on a GPU."""
    if call.mask.start is None:
        return call
    batch, heads, keys = call.mask.start.shape
    lists = call.mask.start.new_empty(batch, heads, keys // 128, 4 + 4)
    return call._replace(mask=call.mask._replace(row_tiles=lists, col_tiles=lists))


def replace_shares(given: Any) -> Any:
    """Return a configuration without shares, and everything else as it is."""
    return replace(given, shares=1) if isinstance(given, config.HopperBackward) else given

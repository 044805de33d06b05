"""Partly visible tiles, of which the C++ kernels compute only strips: every shape that strips can have, against the formula."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from native_calls import Call, check, launch, masked, philox_keep, plain
from torch import Tensor

from dmattn_ops.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"THE C++ KERNELS ARE NOT TESTED: {native.reason()}")

LENGTH = 300


def islands(rows: Tensor, cols: Tensor) -> Tensor:
    """Return a mask of three rectangles, the first of which meets no strip of the others; most rows see nothing."""
    ranges = (((3, 9), (100, 113)), ((70, 95), (0, 5)), ((96, 130), (40, 41)), ((200, 256), (127, 130)))
    shown = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for (first_row, last_row), (first_col, last_col) in ranges:
        shown |= (rows >= first_row) & (rows < last_row) & (cols >= first_col) & (cols < last_col)
    return shown


SHAPES = {
    "stairs down": lambda rows, cols: cols * 2 <= rows,
    "stairs up": lambda rows, cols: rows + cols >= 255,
    "steep": lambda rows, cols: cols <= 5 * (rows % 128),
    "narrow band": lambda rows, cols: (cols - rows).abs() < 3,
    "islands": islands,
    "one key": lambda rows, cols: (cols == 129) & (rows > 40),
    "one query": lambda rows, cols: (rows == 31) & (cols != 17),
    "last rows": lambda rows, cols: (rows % 128 >= 112) & (cols % 128 < 20),
    "checkered": lambda rows, cols: (rows // 16 + cols // 16) % 2 == 0,
}


def shown_by(shape: str, turned: bool) -> Tensor:
    """Return a mask `[S, S]` of one of the shapes, or of its transpose."""
    position = torch.arange(LENGTH)
    shown = SHAPES[shape](position[:, None], position[None])
    return shown.T.contiguous() if turned else shown


def with_everything(call: Call) -> Call:
    """Return the call with a bias of queries and keys, soft cap and dropout."""
    bias = torch.randn(1, 2, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1))
    seed = torch.tensor([[7, -5]])
    dropout_keep = philox_keep(seed, tuple(call.keep.shape), 0.25)
    return dataclasses.replace(call, bias=bias, softcap=1.5, dropout_p=0.25, seed=seed, dropout_keep=dropout_keep)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_strips_hold_all_that_is_visible(shape: str, turned: bool, everything: bool) -> None:
    call = plain(LENGTH, LENGTH)
    call = masked(with_everything(call) if everything else call, shown_by(shape, turned)[None, None])
    check(call)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_those_of_the_same_rows_in_tiles_that_are_seen_at_every_corner(
    shape: str, everything: bool
) -> None:
    """Every strip is whole where one more query of each tile sees its first and last key, and bits stay the same."""
    call = plain(LENGTH, LENGTH)
    call = with_everything(call) if everything else call
    shown = shown_by(shape, False)
    corners = shown.clone()
    for first in range(0, LENGTH, 16):  # in each group of rows one sees a key at both ends of every tile
        corners[first, torch.arange(LENGTH) % 128 == 0] = True
        corners[first, torch.arange(LENGTH) % 128 == 127] = True
        corners[first, LENGTH - 1] = True
    some, all_of_it = (launch(masked(call, keep[None, None]))[:2] for keep in (shown, corners))
    same = (shown == corners).all(-1)
    assert same.sum() > LENGTH / 2
    assert torch.equal(some[0][:, same], all_of_it[0][:, same])
    assert torch.equal(some[1][:, :, same], all_of_it[1][:, :, same])

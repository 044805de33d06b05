"""The steps of a walk in the order in which a kernel takes them: those with a test first, then those that all see whole.

Copies are a step ahead of the products, so that a step asks for the place of the next one before it begins. In this order nothing
is tested once the steps without a test have begun, not even whether what is fetched lies inside of the tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.portable.places import HEADER, SEARCHED, TILE, named_tile


class Steps(NamedTuple):
    """A walk, or a program's share of it."""

    partial: Any  # places.Part of the steps with a test
    full: Any  # and of those without one
    n_partial: Any
    count: Any  # of both


@gluon.jit
def steps_of(partial, full):
    """Return the steps of two parts of a walk."""
    n_partial = partial.end - partial.begin
    return Steps(partial, full, n_partial, n_partial + full.end - full.begin)


@gluon.jit
def start_of(steps, number, STEP: gl.constexpr, features: gl.constexpr, PARTIAL: gl.constexpr):
    """Return the first row of a step; behind the last step that of the last one. Unless `PARTIAL`, it is one without a test."""
    number = gl.minimum(number, steps.count - 1)
    entry = steps.full.first + steps.full.begin + number - steps.n_partial
    last = steps.full.last
    beyond = 0
    if PARTIAL:
        tested = steps.partial.begin + number
        is_tested = number < steps.n_partial
        entry = gl.where(is_tested, steps.partial.first + tested, entry)
        last = gl.where(is_tested, steps.partial.last, last)
        beyond = gl.where(is_tested & (tested >= steps.partial.left), steps.partial.gap, 0)
    if features.listed:
        PER_TILE: gl.constexpr = TILE // STEP
        tile = named_tile(steps.full.record + HEADER + entry // PER_TILE, last)
        start = (tile * PER_TILE + entry % PER_TILE) * STEP
    else:
        start = (entry + beyond) * STEP
    return start


@gluon.jit
def longest_first(blocks, abreast):
    """Return the number of this program: of `abreast` heads all first blocks come first, then all second ones, and so on."""
    program = gl.program_id(0)
    of_heads = abreast * blocks
    first = program // of_heads * abreast
    heads = gl.minimum(abreast, gl.num_programs(0) // blocks - first)
    within = program % of_heads
    return (first + within % heads) * blocks + within // heads


@gluon.jit
def lanes():
    """Return the numbers with which a program looks for its sequence (`heads.program_of`)."""
    return gl.arange(0, SEARCHED, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))

"""The kinds of mask that SM 9.0 kernels are compiled for: launchers pass one as `MASK`, and kernels compare with these names.

All but RAGGED are named as `call.Mask.kind` names them, with BAND for no mask. The limits of the band (`HAS_LO`, `HAS_HI`) come in
addition to every kind but BITS, whose bits hold them already.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.call import Call

NONE = gl.constexpr("none")  # nothing is tested: what a step of a walk is where all of a tile is visible
BAND = gl.constexpr("band")  # the band alone, or no limit at all
BITS = gl.constexpr("bits")
SEGMENTS = gl.constexpr("segments")
INTERVALS = gl.constexpr("intervals")
RAGGED = gl.constexpr("ragged")  # the band of packed sequences, whose tiles `kernels/ragged.py` records


def kind_of(call: Call) -> str:
    """Return the kind of a call's mask, as kernels take it."""
    if call.varlen is not None:
        return RAGGED.value
    return BAND.value if call.mask.kind == "none" else call.mask.kind


@gluon.constexpr_function
def has_lists(kind):
    """Return whether a mask of this kind comes with lists of tiles."""
    return kind in ("bits", "segments", "intervals")

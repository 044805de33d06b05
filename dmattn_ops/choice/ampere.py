"""The configurations of `kernels/ampere`, which dispatch tries first where `DMATTN_AMPERE` is set.

These kernels were compiled for each of their architectures, and ran in an interpreter. They have not run on a GPU yet, so that
nobody gets them who did not ask for them.
"""

from __future__ import annotations

from dataclasses import replace

from dmattn_ops.choice import config
from dmattn_ops.choice.configurations import AmpereBackward, AmpereForward, PortableBackward, Row

_LARGE, _SMALL = (80,), (86, 89, 120)  # architectures by how much shared memory they have
_BOTH = (*_LARGE, *_SMALL)
# The blocks of prototypes with the same loops: H100, Triton's code for SM 8.0, 2026-11-25, bfloat16, B2 H16 S4096.
_PROTOTYPE = (
    "no GPU has run it yet; a prototype with these blocks, H100 with SM 8.0's instructions, TFLOP/s causal / full: "
)
_MORE = " with one buffer more"


def _row(sms: tuple[int, ...], dim: int, made: AmpereForward | AmpereBackward, room: int, told: str) -> tuple[Row, ...]:
    """Return a row for each of some architectures; `room` is the shared memory of a block."""
    tier, evidence = config.tier_of(made.block_m, made.block_n), _PROTOTYPE + told if told else ""
    return tuple(Row(sm, dim, 2, 0, tier, "ampere", _with_shared_bias(made, sm, dim), room, evidence) for sm in sms)


def _with_shared_bias(made: AmpereForward | AmpereBackward, sm: int, dim: int) -> AmpereForward | AmpereBackward:
    """Return a configuration with that of the portable kernel for the gradient of a bias that heads or batches share."""
    if isinstance(made, AmpereForward):
        return made
    portable = (row for row in config.BACKWARD if (row.kernel, row.itemsize) == ("portable", 2))
    found = next(row.config for row in portable if (row.sm, row.dim) == (sm, dim))
    assert isinstance(found, PortableBackward)
    return replace(made, dbias=found)


FORWARD = (
    *_row(_BOTH, 64, AmpereForward(128, 64, 4), 36864, "302 / 316, FlashAttention-2 233 / 294"),
    *_row(_BOTH, 128, AmpereForward(128, 64, 4), 69632, "339 / 369, FlashAttention-2 271 / 354"),
    *_row(_BOTH, 256, AmpereForward(64, 64, 4), 101376, "330 / 339, FlashAttention-2 288 / 330"),
)
BACKWARD = (
    *_row(
        _LARGE, 64, AmpereBackward(128, 128, 8, 4, 4, 4, 2, 1), 154112, f"257 / 294{_MORE}, FlashAttention-2 222 / 273"
    ),
    *_row(_LARGE, 128, AmpereBackward(64, 128, 8, 2, 4, 2, 2, 1), 151552, "291 / 326, FlashAttention-2 255 / 298"),
    *_row(_LARGE, 256, AmpereBackward(32, 64, 8, 2, 4, 2, 2, 2), 143360, "203 / 232, FlashAttention-2 230 / 250"),
    *_row(
        _SMALL, 64, AmpereBackward(64, 128, 8, 2, 4, 4, 2, 1), 101376, f"241 / 275{_MORE}, FlashAttention-2 222 / 273"
    ),
    *_row(_SMALL, 128, AmpereBackward(64, 64, 4, 2, 2, 2, 1, 1), 101376, "250 / 262, FlashAttention-2 255 / 298"),
    *_row(_SMALL, 256, AmpereBackward(32, 32, 4, 2, 2, 2, 1, 1), 101376, ""),
)
FIRST = {"forward": (*FORWARD, *config.FORWARD), "backward": (*BACKWARD, *config.BACKWARD)}

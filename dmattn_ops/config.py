"""Launch configurations: rows of data, each with its evidence. The only place that holds a kernel's tile size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PortableForward:
    """Plain Triton forward: a program owns `block_m` queries and walks keys in steps of `block_n`.

    Where fewer programs than `sm_count` would run, several share one walk over the keys; 0 never splits. `short` is the
    row for calls with no more queries than its `block_m` (decoding).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    sm_count: int = 0
    short: PortableForward | None = None


@dataclass(frozen=True, slots=True)
class PortableBackward:
    """Plain Triton backward: dk/dv programs own `block_n` keys, dq programs own `dq_block_m` queries."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    dq_block_m: int
    dq_block_n: int
    dq_num_warps: int
    dq_num_stages: int


@dataclass(frozen=True, slots=True)
class HopperForward:
    """Gluon forward for SM 9.0: `consumers` warp groups of 64 queries each, keys in `stages` buffers of `block_n`."""

    block_m: int
    block_n: int
    stages: int
    consumers: int


@dataclass(frozen=True, slots=True)
class HopperBackward:
    """Gluon backward for SM 9.0: a block owns `block_n` keys and walks queries in steps of `block_m`.

    `variant` is the order of a step: "overlapped" or "two_phase" (`kernels/hopper_backward_steps.py`).
    """

    block_m: int
    block_n: int
    variant: str


@dataclass(frozen=True, slots=True)
class HopperBackward256:
    """Gluon backward for SM 9.0, head dimensions 129 to 256: dk/dv programs own `block_n` keys, dq ones 128 queries."""

    block_m: int
    block_n: int
    heads_per_group: int  # heads that take turns where blocks differ in length: longest first, and few enough for L2


@dataclass(frozen=True, slots=True)
class Whole:
    """Plain torch operations (`reference.py`) and the C++ kernels (`csrc/cpu`, whose tiles are those of the masks)."""

    block_m: int = 128
    block_n: int = 128


Config = PortableForward | PortableBackward | HopperForward | HopperBackward | HopperBackward256 | Whole


@dataclass(frozen=True, slots=True)
class Row:
    """One launch configuration and what it is for. Rows are tried in order: the first that suits is taken."""

    sm: int  # the architecture it was made for; newer ones without rows of their own use it too
    dim: int  # widest head dimension
    itemsize: int  # widest element in bytes
    min_seqlen: int  # fewest keys
    tier: str
    kernel: str
    config: Config
    shared_memory: int = 0  # bytes of a block
    evidence: str = ""

    @property
    def name(self) -> str:
        """A short name for reasons and tables."""
        return f"{self.kernel} {self.tier} {self.config.block_m}x{self.config.block_n} (D <= {self.dim})"

    @property
    def takes_config(self) -> bool:
        """Whether the launcher is passed the configuration."""
        return not isinstance(self.config, Whole)


OLDEST_TRITON = 80  # the oldest architecture that the Triton kernels are made for
CPU = {kernel: Row(0, 1024, 8, 0, tier, kernel, Whole()) for kernel, tier in (("native", "Standard"), ("reference", "Legacy"))}

# Plain Triton rows: (architectures, widest head dimension, widest element): (forward), (dk/dv), (dq), each block_m, block_n, warps, stages.
# Chosen as the largest tiles that spill nothing or least (`resources.json`); min_seqlen 0.
_PORTABLE = {
    ((80, 86, 89, 90, 100, 120), 32, 2): ((128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),
    ((80, 86, 89, 90, 100, 120), 64, 2): ((128, 64, 8, 3), (64, 128, 8, 2), (128, 64, 8, 2)),
    ((80, 90, 100), 128, 2): ((64, 64, 4, 2), (64, 64, 8, 1), (128, 32, 8, 2)),
    ((86, 89, 120), 128, 2): ((64, 32, 4, 2), (64, 64, 8, 1), (128, 32, 8, 2)),
    ((80, 90, 100), 256, 2): ((64, 64, 8, 2), (32, 64, 8, 1), (32, 64, 8, 1)),
    ((86, 89, 120), 256, 2): ((64, 32, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
    ((80, 86, 89, 90, 100, 120), 512, 2): ((32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ((80, 86, 89, 90, 100, 120), 1024, 2): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ((80, 86, 89, 90, 100, 120), 64, 4): ((64, 32, 4, 2), (32, 64, 8, 1), (64, 32, 8, 1)),
    ((80, 86, 89, 90, 100, 120), 128, 4): ((32, 32, 4, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
    ((80, 86, 89, 90, 100, 120), 256, 4): ((16, 32, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ((80, 86, 89, 90, 100, 120), 1024, 4): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}
_SM_COUNT = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 120: 170}


def _portable(direction: int) -> tuple[Row, ...]:
    rows = []
    for (sms, dim, itemsize), (forward, keys, queries) in _PORTABLE.items():
        for sm in sms:
            block_m, block_n, *_ = keys
            made = PortableForward(*forward, _SM_COUNT[sm]) if direction == 0 else PortableBackward(*keys, *queries)
            rows.append(Row(sm, dim, itemsize, 0, "Standard" if block_m * block_n >= 64 * 64 else "LowMem", "portable", made))
    return tuple(rows)


_LEGACY = Row(75, 1024, 4, 0, "Legacy", "reference", Whole())
FORWARD = (*_portable(0), _LEGACY)
HOPPER_BACKWARD = (
    Row(
        90, 64, 2, 0, "LargeBlock", "hopper", HopperBackward(128, 128, "overlapped"), 199280,
        "H200, 2026-11-20, bf16, B4 H32 S4096: 507 / 563 TFLOP/s causal / full, pre and post included; two_phase 480 / 544",
    ),
    Row(
        90, 128, 2, 0, "MediumBlock", "hopper", HopperBackward(64, 128, "two_phase"), 198208,
        "H200, 2026-11-20, bf16, B4 H16 S4096: 561 / 640 TFLOP/s causal / full, pre and post included; overlapped 553 / 622",
    ),
)  # fmt: skip
HOPPER_BACKWARD_256 = Row(
    90, 256, 2, 0, "Standard", "hopper256", HopperBackward256(64, 64, 4), 229840,
    "H200, 2026-11-20, bf16, D 256, B4 H8 S4096: 511 / 555 TFLOP/s causal / full, all kernels; cuDNN 376 / 399",
)  # fmt: skip
BACKWARD = (*HOPPER_BACKWARD, HOPPER_BACKWARD_256, *_portable(1), _LEGACY)

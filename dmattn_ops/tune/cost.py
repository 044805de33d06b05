"""Predict the cycles of a kernel with given blocks, well enough to rank candidates: tiles, waves, bytes and flops.

A program computes a block of rows (queries, or keys in dk/dv) and loops over the other side in steps. The time of a step is that
of the busiest unit of a multiprocessor (tensor cores, ALUs, shared memory or L2) for all programs that share it, plus the
part of the other units' time that is not hidden behind it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from dmattn_ops.call import UNBOUNDED
from dmattn_ops.choice import config, tunable
from dmattn_ops.choice.arch import Arch
from dmattn_ops.choice.configurations import Row
from dmattn_ops.choice.tunable import Part
from dmattn_ops.choice.tuning import Shape

# Multiplications and additions of a tensor core pass: per cycle and multiprocessor, 16-bit elements, dense (data sheets).
_TENSOR_RATE = {75: 512, 80: 1024, 86: 512, 89: 512, 90: 2048, 100: 4096, 120: 512}
_FLOAT32_RATE = 128  # IEEE products run on the ALUs
_MMA_SHARE = 0.6  # of the rate on SM 9.0 and newer, for blocks that are too small for the newer instructions
_EXP_RATE, _LANES, _SHARED_BYTES = 16, 128, 128  # exponentials, ALU operations, bytes of shared memory: each in a cycle
_L2_BYTES = {75: 32, 80: 40, 86: 16, 89: 16, 90: 32, 100: 32, 120: 16}  # of reads in a cycle, for each multiprocessor
# Fitted to the candidates at D 64, S 4096, on an H200, 2026-11-21.
_EXPOSED = 1.8  # of the shorter of products and ALU work over the chains that run side by side: what they don't hide
_STEP, _HANDOVER, _PROGRAM = 60, 250, 1500  # cycles of a step's barriers, between partitions too; of a program's ends
_STAGES = {1: 1.6, 2: 1.2}  # factor by which loads are waited for, by buffers
_SPLIT, _SPILL = 1.3, 100  # exponent of the warps that share rows; registers over the limit that double the time


class _Kernel(NamedTuple):
    """The work of one kernel for `[owned, walked]` scores."""

    products: tuple[int, int]  # of the width of query and key, of the width of value
    sums: tuple[int, int]  # accumulators of an owned row: of the width of query and key, of value
    tiles: float  # score-shaped float32 tiles alive at once
    operations: int  # ALU operations for a score


_KERNELS = {
    "out": _Kernel((1, 1), (0, 1), 1.25, 12),
    "dk/dv": _Kernel((2, 2), (1, 1), 2.0, 16),
    "dq": _Kernel((2, 1), (1, 0), 1.5, 14),
    "gradients": _Kernel((3, 2), (1, 1), 2.0, 12),
}


class _Blocks(NamedTuple):
    """Candidate values of any kernel, in the model's terms."""

    owned: int
    walked: int
    warps: int  # that compute
    stages: int
    chains: int  # parts of a program that do not wait for each other in every step


def _blocks(part: Part, values: tuple[Any, ...], row: Row) -> _Blocks:
    made: Any = part.put(row.config, values)
    if isinstance(made, config.PortableForward):
        return _Blocks(made.block_m, made.block_n, made.num_warps, made.num_stages, 1)
    if isinstance(made, config.PortableBackward):
        if part.name == "dq":
            return _Blocks(made.dq_block_m, made.dq_block_n, made.dq_num_warps, made.dq_num_stages, 1)
        return _Blocks(made.block_n, made.block_m, made.num_warps, made.num_stages, 1)
    if isinstance(made, config.AmpereForward):
        return _Blocks(made.block_m, made.block_n, made.num_warps, 2, 1)
    if isinstance(made, config.AmpereBackward):
        return _Blocks(made.block_n, made.block_m, made.num_warps, made.query_stages + 1, 1)
    if isinstance(made, config.HopperForward):
        return _Blocks(made.block_m, made.block_n, made.block_m // 16, 3, made.block_m // 64)
    return _Blocks(made.block_n, made.block_m, 8, 3, 2)


def visible_share(shape: Shape) -> float:
    """Return the share of all scores that lies inside the band."""
    lo, hi, seqlen_q, seqlen_k = shape.band_lo, shape.band_hi, shape.seqlen_q, shape.seqlen_k
    if lo <= -UNBOUNDED and hi >= UNBOUNDED:
        return 1.0
    rows = range(0, seqlen_q, max(1, seqlen_q // 256))
    seen = sum(max(0, min(i + hi, seqlen_k - 1) - max(i + lo, 0) + 1) for i in rows)
    return seen / (len(rows) * seqlen_k)


def predict(part: Part, values: tuple[Any, ...], row: Row, on: Arch, shape: Shape) -> float:
    """Return the predicted cycles of one launch."""
    kernel, blocks = _KERNELS[part.name], _blocks(part, values, row)
    by_keys = part.name in ("dk/dv", "gradients")
    owned_length, walked_length = (shape.seqlen_k, shape.seqlen_q) if by_keys else (shape.seqlen_q, shape.seqlen_k)
    heads = shape.kv_heads if by_keys else shape.heads
    programs = shape.batch * heads * math.ceil(owned_length / blocks.owned)
    share = visible_share(shape)
    steps = share * math.ceil(walked_length / blocks.walked) * (shape.heads // heads)
    if share < 1.0:  # blocks at the edge of the band are computed whole
        steps += 0.5 * (1 + blocks.owned / blocks.walked)

    fitting = _resident(part, values, row, on, shape, kernel, blocks)
    resident = min(fitting, math.ceil(programs / on.num_sms))
    waves = programs / (resident * on.num_sms)
    waves = waves + 0.5 if waves > 4 else math.ceil(waves)  # many programs of unequal length fill the gaps
    return waves * (_PROGRAM * resident + steps * _step(resident, on, shape, kernel, blocks))


def _registers(shape: Shape, kernel: _Kernel, blocks: _Blocks) -> float:
    """Return the registers that a thread needs. Whether these exceed 255 agreed with spills in 142 of 150 compiled candidates."""
    accumulators = blocks.owned * (kernel.sums[0] * _padded(shape.dim) + kernel.sums[1] * _padded(shape.dim_v))
    scores = kernel.tiles * blocks.owned * blocks.walked
    operand = blocks.walked * max(_padded(shape.dim), _padded(shape.dim_v))  # on its way to shared memory
    return 64 + (accumulators + scores + operand) / (32 * blocks.warps)


def _resident(
    part: Part, values: tuple[Any, ...], row: Row, on: Arch, shape: Shape, kernel: _Kernel, blocks: _Blocks
) -> int:
    """Return the number of programs that a multiprocessor holds at once."""
    if row.kernel not in ("ampere", "portable"):
        return 1
    registers = min(255.0, _registers(shape, kernel, blocks))
    by_registers = int(on.registers / (registers * 32 * blocks.warps))
    by_memory = on.shared_memory_per_sm // (tunable.shared_memory(row, part, values) + 1024)
    return max(1, min(by_registers, by_memory, on.max_warps // blocks.warps))


def _step(resident: int, on: Arch, shape: Shape, kernel: _Kernel, blocks: _Blocks) -> float:
    """Return the cycles of one step of `resident` programs side by side."""
    dim, dim_v, itemsize = _padded(shape.dim), _padded(shape.dim_v), shape.demand.itemsize
    scores = blocks.owned * blocks.walked
    known = max(sm for sm in _TENSOR_RATE if sm <= max(on.sm, 75))
    rate: float = _TENSOR_RATE[known]
    warp_groups = on.sm in (90, 100) and blocks.owned >= 64
    if itemsize == 4:
        rate = _FLOAT32_RATE
    elif on.sm in (90, 100) and not warp_groups:
        rate *= _MMA_SHARE
    width = kernel.products[0] * dim + kernel.products[1] * dim_v
    tensor = scores * width / rate
    alu = scores * max(1 / _EXP_RATE, kernel.operations / _LANES)
    # every warp (or group of four) reads the walked operands of its products
    readers = max(1, min(blocks.warps, blocks.owned // 16) // (4 if warp_groups else 1))
    shared = readers * blocks.walked * width * itemsize / _SHARED_BYTES
    traffic = blocks.walked * (dim + dim_v) * itemsize / _L2_BYTES[known]
    bound, other = max(tensor, alu), min(tensor, alu)
    chains = resident * blocks.chains
    step = max(bound + other * min(1.0, _EXPOSED / chains), shared, traffic)
    if blocks.chains > 1:  # partitions that were given the registers that they need
        return resident * (step + _HANDOVER)
    # warps that share rows exchange their maxima and sums, and P, through shared memory
    split = max(1.0, 16 * blocks.warps / blocks.owned) ** _SPLIT
    spilled = max(0.0, _registers(shape, kernel, blocks) - 255) / _SPILL
    return resident * (step + _STEP) * (1 + spilled) * split * _STAGES.get(blocks.stages, 1.0)


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Return Spearman's rank correlation, ties at their mean rank; NaN for fewer than two values or without variation."""
    if len(first) < 2:
        return math.nan
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) + 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return covariance / spread if spread else math.nan


def _ranks(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]

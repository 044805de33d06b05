"""Launch configurations: rows of data, each with its evidence. The only place that holds a kernel's tile size."""

from __future__ import annotations

from dataclasses import replace

from dmattn_ops.choice.arch import KNOWN
from dmattn_ops.choice.configurations import AmpereBackward as AmpereBackward
from dmattn_ops.choice.configurations import AmpereForward as AmpereForward
from dmattn_ops.choice.configurations import AmpereSharedBias as AmpereSharedBias
from dmattn_ops.choice.configurations import Config as Config
from dmattn_ops.choice.configurations import DecodeForward as DecodeForward
from dmattn_ops.choice.configurations import HopperBackward as HopperBackward
from dmattn_ops.choice.configurations import HopperBackward256 as HopperBackward256
from dmattn_ops.choice.configurations import HopperForward as HopperForward
from dmattn_ops.choice.configurations import HopperSharedBias as HopperSharedBias
from dmattn_ops.choice.configurations import PortableBackward as PortableBackward
from dmattn_ops.choice.configurations import PortableForward as PortableForward
from dmattn_ops.choice.configurations import Row as Row
from dmattn_ops.choice.configurations import Whole as Whole

OLDEST_TRITON = 80  # the oldest architecture that the Triton kernels are made for
CPU = {
    kernel: Row(0, 1024, 8, 0, tier, kernel, Whole())
    for kernel, tier in (("native", "Standard"), ("reference", "Legacy"))
}

# Plain Triton rows, (architectures, widest head dimension, widest element): (forward), (dk/dv), (dq), each of them
# block_m, block_n, warps, stages. SM 9.0 to 256: the fastest of 6 or 7 candidates, H200, 2026-11-20, bf16, S 4096, 128
# heads at D 64, 64 at 128, 32 at 256; TFLOP/s causal / full: forward 386 / 429, 423 / 483, 391 / 464, backward 327 / 352,
# 355 / 386, 194 causal (flex_attention in the same run, D 64: 345 / 411 and 271 / 314). Two stages make ptxas serialize
# the wgmmas of dk/dv there (C7515). The others were compiled only: the largest tiles that spill nothing, or least.
_Blocks = tuple[int, int, int, int]
_PORTABLE: dict[tuple[tuple[int, ...], int, int], tuple[_Blocks, _Blocks, _Blocks]] = {
    ((90,), 64, 2): ((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3)),
    ((90,), 128, 2): ((64, 64, 4, 3), (32, 64, 4, 3), (128, 64, 8, 3)),
    ((90,), 256, 2): ((128, 32, 8, 3), (32, 64, 8, 3), (64, 32, 4, 3)),
    ((80, 86, 89, 120), 32, 2): ((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),
    ((80,), 64, 2): ((64, 64, 4, 3), (32, 64, 4, 2), (64, 64, 4, 2)),
    ((86, 89, 120), 64, 2): ((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),
    ((80, 86, 89, 120), 128, 2): ((128, 32, 8, 2), (32, 64, 8, 2), (128, 32, 8, 2)),
    ((80,), 256, 2): ((64, 64, 8, 2), (32, 64, 8, 1), (64, 32, 8, 2)),
    ((86, 89, 120), 256, 2): ((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 4, 2)),
    ((100,), 64, 2): ((64, 64, 4, 3), (64, 128, 8, 3), (128, 64, 8, 3)),
    ((100,), 128, 2): ((128, 64, 8, 3), (64, 128, 8, 2), (64, 64, 4, 3)),
    ((100,), 256, 2): ((128, 32, 8, 3), (32, 64, 8, 2), (64, 32, 4, 3)),
    ((80, 86, 89, 90, 100, 120), 512, 2): ((32, 32, 8, 1), (16, 16, 8, 1), (16, 32, 8, 1)),
    ((80, 90, 100), 1024, 2): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ((80, 86, 89, 90, 120), 32, 4): ((64, 32, 4, 2), (32, 32, 4, 2), (64, 32, 4, 2)),
    ((80, 86, 89, 90, 120), 64, 4): ((64, 32, 8, 2), (32, 32, 8, 2), (64, 32, 8, 1)),
    # Triton 3.6 gives some IEEE float32 products with 64 rows to tcgen05, which computes in TF32 (compile-only sweep).
    ((100,), 32, 4): ((32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    ((100,), 64, 4): ((32, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 1)),
    ((80, 86, 89, 90, 100, 120), 128, 4): ((32, 16, 8, 2), (16, 32, 8, 1), (32, 16, 8, 2)),
    ((80, 86, 89, 90, 100, 120), 256, 4): ((32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ((80, 90, 100), 512, 4): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}
# The same for calls of certain sizes, tried before those: (tier, fewest keys, whether for few tiles only). Few tiles take
# blocks small enough to fill the GPU, few keys those of which less lies behind the diagonal, and many keys those that
# read the other side least often.
_SIZED: dict[tuple[tuple[int, ...], int, int], dict[tuple[str, int, bool], tuple[_Blocks, _Blocks, _Blocks]]] = {
    ((80,), 64, 2): {
        ("", 0, True): ((64, 64, 4, 3), (32, 64, 4, 2), (64, 32, 4, 2)),
        ("StandardSeq", 4096, False): ((128, 64, 8, 3), (32, 128, 4, 2), (128, 64, 8, 2)),
    },
    ((86, 89, 120), 64, 2): {
        ("", 0, True): ((64, 64, 4, 3), (32, 64, 4, 2), (64, 32, 4, 2)),
        ("LongSeq", 8192, False): ((128, 128, 8, 2), (64, 128, 8, 2), (128, 64, 8, 2)),
        ("StandardSeq", 4096, False): ((128, 64, 8, 3), (64, 128, 8, 2), (128, 64, 8, 2)),
    },
    ((80, 86, 89, 120), 128, 2): {
        ("", 0, True): ((64, 32, 4, 2), (32, 32, 4, 2), (64, 32, 4, 2)),
        ("LongSeq", 8192, False): ((128, 64, 8, 2), (32, 64, 8, 2), (128, 32, 8, 2)),
    },
}
_COMPILED = "compiled only; tiers ranked by the cost model of tuning"
# Forward with at most 16 queries, by widest head dimension and element: blocks, and programs on one SM. On SM 9.0: the
# fastest of 3 to 5, H200, 2026-11-21, B1 H2 Sq1 bf16, GB/s of keys and values where a copy reads and writes 4244: D 64
# 3618 (Sk 524288), D 128 4167 (Sk 524288; 4124 with 16 queries), D 256 4067 (Sk 262144).
_SHORT: dict[tuple[int, int], tuple[_Blocks, int]] = {
    (128, 2): ((16, 64, 4, 3), 2),
    (256, 2): ((16, 64, 4, 2), 2),
    (128, 4): ((16, 16, 4, 2), 2),
}
_SHORT_HOPPER: dict[tuple[int, int], tuple[_Blocks, int]] = {
    **_SHORT,
    (64, 2): ((16, 128, 8, 3), 2),
    (128, 2): ((16, 128, 8, 3), 1),
    (256, 2): ((16, 64, 8, 3), 1),
}
# Rows that are not whole pieces of 16 bytes, on SM 9.0: blocks too small for wgmma. Among loads of one element each, ptxas
# 12.8 (Triton 3.6) lost the high word of a wgmma descriptor: an address out of range, H200, 2026-11-20.
_UNALIGNED: dict[int, tuple[_Blocks, _Blocks, _Blocks]] = {
    64: ((32, 64, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    128: ((32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    256: ((32, 32, 4, 2), (32, 32, 8, 2), (32, 32, 4, 2)),
}
# Calls with a number to each pair of query and key. SM 9.0, D 64 and 128: the fastest of 3 to 7 for each kernel whose shared
# memory fits beside a float32 bias, H200, 2026-11-21, bf16, B2 S4096 causal, 16 and 8 heads: backward with a bias 2.8 and
# 2.2 ms, with dropout 1.8 and 1.7; at D 128 also where ptxas serializes wgmma. The others were compiled only: the largest
# blocks next to the row's own that spill nothing, or least.
_PAIRWISE: dict[tuple[tuple[int, ...], int], tuple[_Blocks, _Blocks, _Blocks]] = {
    ((80, 86, 89, 120), 32): ((64, 64, 4, 3), (32, 64, 4, 2), (64, 32, 4, 2)),
    ((80,), 64): ((128, 64, 8, 3), (32, 64, 4, 2), (64, 32, 4, 2)),
    ((86, 89, 120), 64): ((64, 64, 4, 2), (32, 64, 4, 2), (64, 32, 4, 2)),
    ((80, 86, 89, 120), 128): ((128, 32, 8, 2), (32, 64, 8, 2), (32, 32, 4, 2)),
    ((80,), 256): ((64, 64, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2)),
    ((86, 89, 120), 256): ((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2)),
    ((90,), 64): ((64, 64, 4, 3), (32, 64, 4, 3), (64, 64, 4, 3)),
    ((90,), 128): ((64, 64, 4, 2), (32, 64, 4, 2), (64, 32, 4, 2)),
    ((90,), 256): ((128, 32, 8, 3), (32, 32, 8, 2), (32, 32, 8, 2)),
    ((100,), 64): ((64, 64, 4, 3), (64, 64, 8, 2), (64, 64, 4, 2)),
    ((100,), 128): ((128, 64, 8, 3), (64, 128, 8, 2), (64, 64, 8, 2)),
}
_PER_SM = 2  # programs on one SM, where the keys of few queries are shared


def _portable_forward(sm: int, dim: int, itemsize: int, blocks: _Blocks) -> PortableForward:
    of_arch = _SHORT_HOPPER if sm == 90 else _SHORT
    short = of_arch.get((dim, itemsize), of_arch.get((max(dim, 128), itemsize)))
    unaligned, pairwise = _unaligned(sm, dim, itemsize), _pairwise(sm, dim, itemsize)
    return PortableForward(
        *blocks,
        _PER_SM,
        short=PortableForward(*short[0], short[1]) if short else None,
        unaligned=PortableForward(*unaligned[0], _PER_SM) if unaligned else None,
        pairwise=PortableForward(*pairwise[0], _PER_SM) if pairwise and pairwise[0] != blocks else None,
    )


def _portable_backward(sm: int, dim: int, itemsize: int, keys: _Blocks, queries: _Blocks) -> PortableBackward:
    unaligned, pairwise = _unaligned(sm, dim, itemsize), _pairwise(sm, dim, itemsize)
    return PortableBackward(
        *keys,
        *queries,
        unaligned=PortableBackward(*unaligned[1], *unaligned[2]) if unaligned else None,
        pairwise=PortableBackward(*pairwise[1], *pairwise[2]) if pairwise else None,
    )


def _unaligned(sm: int, dim: int, itemsize: int) -> tuple[_Blocks, _Blocks, _Blocks] | None:
    return _UNALIGNED.get(dim) if (sm, itemsize) == (90, 2) else None


def _pairwise(sm: int, dim: int, itemsize: int) -> tuple[_Blocks, _Blocks, _Blocks] | None:
    found = (blocks for (sms, width), blocks in _PAIRWISE.items() if itemsize == 2 and (sm in sms and dim == width))
    return next(found, None)


def _portable(direction: int) -> tuple[Row, ...]:
    rows = []
    for (sms, dim, itemsize), usual in _PORTABLE.items():
        for sm in sms:
            sized = [sizes for (of, *key), sizes in _SIZED.items() if sm in of and key == [dim, itemsize]]
            sizes = {**(sized[0] if sized else {}), ("", 0, False): usual}
            evidence = _COMPILED if len(sizes) > 1 else ""
            for (tier, keys, few), blocks in sizes.items():
                made = _portable_config(direction, sm, dim, itemsize, blocks)
                tier = tier or tier_of(made.block_m, made.block_n)
                rows.append(Row(sm, dim, itemsize, keys, tier, "portable", made, 0, evidence, few))
    return tuple(rows)


def tier_of(block_m: int, block_n: int) -> str:
    """Return the tier of blocks that are made for no lengths in particular."""
    return "Standard" if block_m * block_n >= 64 * 64 else "LowMem"


def _portable_config(
    direction: int, sm: int, dim: int, itemsize: int, blocks: tuple[_Blocks, _Blocks, _Blocks]
) -> PortableForward | PortableBackward:
    if direction == 0:
        return _portable_forward(sm, dim, itemsize, blocks[0])
    return _portable_backward(sm, dim, itemsize, blocks[1], blocks[2])


# Plain torch operations, the last row of every architecture: for SM 7.5, and for head dimensions that no tile fits.
_LEGACY = tuple(Row(sm, 1024, 4, 0, "Legacy", "reference", Whole(), evidence="plain torch operations, where no kernel fits")
                for sm in KNOWN)  # fmt: skip
HOPPER_FORWARD = (
    Row(
        90, 32, 2, 0, "MediumBlock", "hopper", HopperForward(128, 64, 3, 2, per_sm=2), 97280,
        "H200, 2026-11-28, bf16, B8 H16 S2048 D32: 0.125 / 0.223 ms causal / full; as the row below 0.169 / 0.264",
    ),
    Row(
        90, 64, 2, 0, "LargeBlock", "hopper", HopperForward(192, 128, 2, 2, step=1.39, step_of_128=1.13), 168472,
        "H200, 2026-11-21, bf16, B4 H32 S4096: 495 / 599 TFLOP/s causal / full, cuDNN 424 / 475; 128 queries 454 / 491",
    ),
    Row(
        90, 128, 2, 0, "LargeBlock", "hopper", HopperForward(128, 128, 2, 2), 229888,
        "H200, 2026-11-21, bf16, B4 H16 S4096: 666 / 756 TFLOP/s causal / full, cuDNN 566 / 663; 192 x 64 650 / 759",
    ),
    Row(
        90, 192, 2, 0, "LargeBlock", "hopper", HopperForward(128, 128, 2, 1), 218704,
        "H200, 2026-11-22, bf16, B2 H16 S4096 causal, Dv 128: 634 TFLOP/s, 128 x 64 610, portable 288", dim_v=128,
    ),
    Row(
        90, 192, 2, 0, "MediumBlock", "hopper", HopperForward(128, 64, 2, 2), 201848,
        "H200, 2026-11-22, bf16, B2 H16 S4096 full: 755 TFLOP/s, padded to 256 631",
    ),
    Row(
        90, 256, 2, 0, "MediumBlock", "hopper", HopperForward(128, 64, 2, 1), 201712,
        "H200, 2026-11-21, bf16, 777 TFLOP/s at B4 H8 S4096, 786 at B1 H8 S16384 causal, cuDNN 720 and 646",
    ),
)  # fmt: skip
# With mma.sync and cp.async, by how much shared memory a block has; SM 12.0 has the instructions of 8.x. Measured with SM 8.0's
# instructions on an H200, torch 2.11, triton 3.6, 2026-11-26, bf16, B2 H16 S4096: ms causal / full, FlashAttention-2 beside them.
_LARGE, _SMALL = (80,), (86, 89, 120)
_AMPERE_128_QUERIES = AmpereForward(128, 64, 4, dropout=AmpereForward(64, 64, 4))
# For heads of at most `NARROW` beside a bias with queries. H200, torch 2.11, triton 3.6, 2026-11-27, bf16, S rows of S positions,
# some keys hidden, microseconds at S384 H4 D32 and S512 H16 D16. SM 9.0 runs this backward too: its own kernels pad heads to 64
# columns and take 667 / 5553 and for the bias 793 / 5870.
NARROW = 32
# From so many batches that share such a bias on, its gradient is added up in memory. The next day, S batches of S positions: all of
# the backward takes 241 us for 359 at S256 H4 D32, 657 for 1078 at S384, 9831 for 15901 at S1024, 4736 for 7111 at S512 H16 D16.
# Fewer than 256 batches were not measured; both ways' work is in proportion to them.
SUMMED_BATCHES = 64
_NARROW_FORWARD = AmpereForward(64, 64, 4)  # 363 / 2646; 128 x 64 369 / 2959
_NARROW_SHARED_BIAS = AmpereSharedBias(128, 64, 4, 4, 2)  # 470 / 2891; 64 x 64 in 168 registers 374 / 3652
_NARROW_BACKWARD = AmpereBackward(64, 128, 4, 2, 4, 2, 2, 2, _NARROW_SHARED_BIAS)  # 492 / 3778; 64 x 64 607 / 4810
_AMPERE_FORWARD = {
    64: (
        replace(_AMPERE_128_QUERIES, narrow_bias=_NARROW_FORWARD, plain=AmpereForward(128, 64, 4, held=True)), 36864,
        "0.239 / 0.430 ms, FlashAttention-2 0.295 / 0.462; 64 x 64 0.255 / 0.528, full with queries in shared memory 0.443",
    ),
    128: (
        _AMPERE_128_QUERIES, 69632,
        "0.416 / 0.761 ms, FlashAttention-2 0.502 / 0.779; 128 x 32 0.402 / 0.773, 64 x 64 0.436 / 0.855",
    ),
    256: (
        AmpereForward(64, 64, 4), 101376,
        "0.865 / 1.62 ms, FlashAttention-2 0.958 / 1.68; 128 x 64 with 8 warps 0.845 / 1.65",
    ),
}  # fmt: skip
_AMPERE_64 = AmpereBackward(
    64, 64, 4, 2, 2, 2, 2, 2, dropout=AmpereBackward(64, 64, 4, 4, 2, 2, 2, 2), narrow_bias=_NARROW_BACKWARD
)
_AMPERE_BACKWARD = {
    (_LARGE, 64): (
        replace(_AMPERE_64, plain=AmpereBackward(128, 128, 8, 4, 4, 4, 2, 2)), 166912,
        "0.651 / 1.20 ms, FlashAttention-2 0.822 / 1.29; 64 x 64 0.690 / 1.28, random bits 1.60 where 128 x 128 takes 1.79",
    ),
    (_SMALL, 64): (_AMPERE_64, 69632, "0.690 / 1.29 ms, FlashAttention-2 0.817 / 1.29; 64 x 128 0.723 / 1.34"),
    ((*_LARGE, *_SMALL), 128): (
        AmpereBackward(64, 64, 4, 2, 2, 2, 1, 1, dropout=AmpereBackward(64, 64, 4, 4, 2, 2, 2, 1)), 101376,
        "1.16 / 2.24 ms, FlashAttention-2 1.42 / 2.38; 64 x 128 1.18 / 2.23, random bits 3.02 where this takes 2.69",
    ),
    (_LARGE, 256): (
        AmpereBackward(64, 64, 8, 4, 2, 2, 1, 1), 151552,
        "2.74 / 5.63 ms, FlashAttention-2 3.15 / 5.59; 32 x 64 3.20 / 6.27",
    ),
    (_SMALL, 256): (AmpereBackward(32, 32, 4, 2, 2, 2, 1, 1), 101376, "3.86 / 7.93 ms, FlashAttention-2 3.15 / 5.59"),
}  # fmt: skip


# By whether shared memory is large. D 64 and 128, SM 8.0's instructions on an H200, 2026-11-26, B2 H16 S2048: the whole backward
# 0.752 and 1.18 ms, flex_attention 1.49 and 2.71; other blocks within 10%. The others were compiled only.
_AMPERE_SHARED_BIAS = {
    (True, 64): AmpereSharedBias(128, 64, 4, 4, 1),
    (True, 128): AmpereSharedBias(64, 64, 4, 2, 1),
    (True, 256): AmpereSharedBias(64, 64, 8, 4, 1),
    (False, 64): AmpereSharedBias(64, 64, 4, 2, 1),
    (False, 128): AmpereSharedBias(64, 64, 4, 2, 1),
    (False, 256): AmpereSharedBias(32, 32, 4, 2, 1),
}


def _dbias(sm: int, dim: int) -> PortableBackward:
    """Return the configuration of the portable kernel for the gradient of a bias beside other kernels' backwards."""
    blocks = next(blocks for (sms, width, size), blocks in _PORTABLE.items() if sm in sms and (width, size) == (dim, 2))
    return _portable_backward(sm, dim, 2, *blocks[1:])


AMPERE_FORWARD = tuple(
    Row(
        sm,
        dim,
        2,
        0,
        tier_of(made.block_m, made.block_n),
        "ampere",
        replace(made, bias_tiles=sm in _LARGE or dim <= 128),
        room,
        evidence,
    )
    for dim, (made, room, evidence) in _AMPERE_FORWARD.items()
    for sm in (*_LARGE, *_SMALL)
)
AMPERE_BACKWARD = tuple(
    Row(
        sm,
        dim,
        2,
        0,
        tier_of(made.block_m, made.block_n),
        "ampere",
        replace(made, shared_bias=_AMPERE_SHARED_BIAS[sm in _LARGE, dim]),
        room,
        evidence,
    )
    for (sms, dim), (made, room, evidence) in _AMPERE_BACKWARD.items()
    for sm in sms
)
# Kernels that compute again what a NaN in hidden rows has spoilt (`kernels/portable/again.py`): seldom, so nothing is tuned
AGAIN_FORWARD = PortableForward(64, 32, 4, 1)
AGAIN_BACKWARD = PortableBackward(32, 32, 4, 1, 32, 32, 4, 1)
# One query of each head, by widest head dimension and fewest keys; the rows of a block are the heads that share a key head.
# Measured on an H200, torch 2.11, triton 3.6, 2026-11-26, bf16, H32/8, in CUDA graphs over caches that take turns.
_DECODE = {
    (64, 0): ((16, 128, 4, 4, 1), _COMPILED),
    (128, 8192): (
        (16, 64, 4, 4, 1),
        "B16 and B1 Sk32768: 4548 and 3588 GB/s of keys and values, where a copy reads and writes 4240; 128 keys, 8 warps 4474",
    ),
    (128, 0): ((16, 128, 8, 3, 1), "B16 Sk2064, intervals: 3536 GB/s; 64 keys, 4 warps, 4 and 5 stages 3145 and 2634"),
    (256, 0): ((16, 64, 8, 3, 1), _COMPILED),
}
DECODE_FORWARD = tuple(
    Row(
        90, dim, 2, keys, "LongSeq" if keys else tier_of(*made[:2]), "decode", DecodeForward(*made), 0, evidence,
        one_query=True,
    )
    for (dim, keys), (made, evidence) in _DECODE.items()
)  # fmt: skip
FORWARD = (*DECODE_FORWARD, *HOPPER_FORWARD, *AMPERE_FORWARD, *_portable(0), *_LEGACY)
# H200, 2026-11-23, bf16, S4096 H16 D128 full: B2 0.94 ms (four buffers 0.97), B4 1.75 ms (two steps of keys at once 3.36).
_SHARED = HopperSharedBias(chunks=1, stages=3, heads_per_group=4)
HOPPER_BACKWARD = (
    Row(
        90, 64, 2, 0, "LargeBlock", "hopper", HopperBackward(128, 128, "overlapped", 16, 32, 2.36, 5.0, 1, _dbias(90, 64), _SHARED),
        232384, "H200, 2026-11-22, bf16, 4k / 16k, both kernels: causal 520 / 609, full 584 / 617 TFLOP/s; 1.05 times FA4"
        "; deterministic takes 2% longer, causal 6 to 8%",
    ),
    Row(
        90, 128, 2, 0, "MediumBlock", "hopper", HopperBackward(64, 128, "two_phase", 8, 8, 1.94, 5.5, 1, _dbias(90, 128), _SHARED),
        232384, "H200, 2026-11-22, bf16, 4k / 16k, both kernels: causal 583 / 684, full 656 / 695 TFLOP/s; 1.02 times FA4"
        "; deterministic takes 7 to 8% longer",
    ),
)  # fmt: skip
HOPPER_BACKWARD_256 = Row(
    90, 256, 2, 0, "Standard", "hopper256", HopperBackward256(64, 64, 4, _dbias(90, 256), _SHARED), 231136,
    "H200, 2026-11-20, bf16, D 256, B4 H8 S4096: 511 / 555 TFLOP/s causal / full, all kernels; cuDNN 376 / 399",
)  # fmt: skip
HOPPER_NARROW_BIAS = Row(
    90, NARROW, 2, 0, "Standard", "ampere", replace(_NARROW_BACKWARD, bias_sums=SUMMED_BATCHES), 69632,
    "H200, 2026-11-27, bf16, 384 rows of 384, H4 D32: 0.49 ms, SM 9.0's own kernel 0.67; the bias's gradient 0.47 and 0.79",
    full_bias=True,
)  # fmt: skip
BACKWARD = (HOPPER_NARROW_BIAS, *HOPPER_BACKWARD, HOPPER_BACKWARD_256, *AMPERE_BACKWARD, *_portable(1), *_LEGACY)

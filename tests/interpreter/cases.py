"""Named problems that kernels get wrong, random ones over everything that they take, and one for each configuration."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from dmattn_ops.call import UNBOUNDED
from dmattn_ops.choice import config
from tests.interpreter.problems import Problem

# Forward and backward of the same architecture, head dimension, element size and tier.
PORTABLE_ROWS = tuple(
    zip(*([row for row in rows if row.kernel == "portable"] for rows in (config.FORWARD, config.BACKWARD)), strict=True)
)
NASTY = {
    "one element": Problem(seqlen_q=1, seqlen_k=1),
    "causal from the bottom right": Problem(seqlen_q=100, seqlen_k=140, band_hi=40),
    "causal with more queries than keys, so rows are empty": Problem(
        seqlen_q=140, seqlen_k=100, band_hi=-40, grad_lse=True
    ),
    "a window on both sides": Problem(seqlen_q=300, seqlen_k=290, band_lo=-70, band_hi=5),
    "a band that lies past the last key": Problem(seqlen_q=64, seqlen_k=64, band_lo=100, grad_lse=True),
    "prime lengths": Problem(seqlen_q=127, seqlen_k=131, band_hi=4),
    "all rows empty": Problem(mask="bits", density=0.0, seqlen_q=60, seqlen_k=60, grad_lse=True),
    "element mask, heads apart": Problem(mask="bits", batch=2, mask_batch=2, mask_heads=2, seqlen_q=130, seqlen_k=300),
    "element mask with a band folded in": Problem(mask="bits", seqlen_q=200, seqlen_k=260, band_hi=60),
    "mask heads of the keys": Problem(mask="bits", heads=4, mask_heads=2, seqlen_q=140),
    "documents": Problem(mask="segments", seqlen_q=300, seqlen_k=300, band_hi=0),
    "documents that differ per head": Problem(mask="segments", mask_heads=2, batch=2, mask_batch=2),
    "keys kept by one bit each": Problem(mask="keys", seqlen_q=130, seqlen_k=300, mask_heads=2),
    "lists of a band alone": Problem(mask="band", seqlen_q=300, seqlen_k=300, band_lo=-130, band_hi=0),
    "intervals of a dynamic mask, with lists": Problem(mask="lifetimes", seqlen_q=300, seqlen_k=300, mask_heads=2),
    "intervals of a dynamic mask under a band": Problem(
        mask="lifetimes", heads=4, mask_heads=2, seqlen_q=200, seqlen_k=260, band_hi=60, grad_lse=True
    ),
    "intervals without lists, batches apart": Problem(
        mask="intervals", batch=2, mask_batch=2, seqlen_q=130, seqlen_k=290, bias=(2, 2, 130)
    ),
    "intervals without lists, grouped heads": Problem(
        mask="intervals", heads=4, kv_heads=2, mask_heads=4, bias=(1, 2, 1), dtype=torch.bfloat16
    ),
    "intervals with hidden ones": Problem(mask="hidden", mask_heads=2, seqlen_q=300, seqlen_k=300, bias=(1, 1, 300)),
    "intervals with hidden ones under a band": Problem(
        mask="hidden", seqlen_q=140, seqlen_k=270, band_lo=-90, band_hi=90
    ),
    "bias per key, grouped heads": Problem(heads=4, bias=(1, 2, 1), dtype=torch.bfloat16, bias_dtype=torch.float32),
    "bias of every element": Problem(bias=(1, 2, 100), mask="bits"),
    "bias of every element under a band": Problem(bias=(1, 2, 100), band_hi=0),
    "bias shared by batches and heads": Problem(batch=2, heads=4, bias=(1, 1, 100), mask="bits", mask_heads=4),
    "bias shared by groups of heads": Problem(batch=2, heads=4, bias=(2, 2, 100), band_hi=0),
    "bias with room between rows": Problem(bias=(1, 2, 100), bias_spacing=3),
    "bias per key of packed keys, most of which nobody sees": Problem(
        seqlen_q=140, seqlen_k=140, lengths_q=(1, 40), lengths_k=(140, 60), top_left=True, band_hi=0, bias=(1, 1, 1)
    ),
    "bias whose gradient nobody asks for": Problem(bias=(1, 2, 100), needs_dbias=False),
    "softcap": Problem(softcap=1.0, scale=1.0),
    "softcap so wide that it caps nothing": Problem(softcap=1e6),
    "negative scale": Problem(scale=-0.5, band_hi=0),
    "scale 0": Problem(scale=0.0, mask="bits"),
    "dropout": Problem(dropout_p=0.25, batch=2, seqlen_q=70, seqlen_k=90),
    "dropout with a seed for each batch and head": Problem(
        dropout_p=0.4, batch=2, heads=4, seeds=(2, 4), seqlen_q=70, seqlen_k=90, bias=(1, 1, 70)
    ),
    "dropout of a part of a sequence": Problem(dropout_p=0.4, q_origin=48, k_origin=64, seeds=(1, 2), band_hi=10),
    "dropout of a part that begins inside a block of 16 queries and keys": Problem(
        dropout_p=0.4, q_origin=5, k_origin=1003, seeds=(1, 2), bias=(1, 2, 1)
    ),
    "dropout of everything": Problem(dropout_p=1.0, grad_lse=True),
    "value dimension of its own": Problem(head_dim=24, value_dim=40),
    "dimension 1": Problem(head_dim=1, value_dim=1),
    "nobody asks for the largest scores": Problem(needs_max=False, seqlen_q=40),
    "float16": Problem(dtype=torch.float16, head_dim=40, value_dim=40),
    "bfloat16": Problem(dtype=torch.bfloat16, head_dim=40, value_dim=40, transposed=True),
    "no keys": Problem(seqlen_k=0, grad_lse=True),
    "no queries": Problem(seqlen_q=0, bias=(1, 2, 1)),
    "no batch": Problem(batch=0, bias=(1, 1, 100)),
    "packed": Problem(lengths_q=(30, 0, 100, 1), lengths_k=(64, 10, 0, 130), grad_lse=True),
    "packed, causal": Problem(lengths_q=(30, 100, 140), lengths_k=(64, 100, 70), band_hi=0),
    "packed, causal from the top left": Problem(lengths_q=(30, 100), lengths_k=(64, 70), band_hi=0, top_left=True),
    "packed, with a seed for each sequence and head": Problem(
        lengths_q=(30, 100, 20), lengths_k=(64, 170, 0), seeds=(3, 4), heads=4, dropout_p=0.3, k_origin=2, q_origin=9
    ),
    "packed, with masked and biased keys": Problem(
        lengths_q=(30, 100), lengths_k=(64, 170), mask="keys", mask_heads=2, bias=(1, 1, 1), heads=4, dropout_p=0.2
    ),
}


# A bias whose tiles the kernels of mma.sync copy, but for the last one, and gradients of shared ones.
BIASED = {
    "a bias of its own for each batch and head": Problem(seqlen_q=70, seqlen_k=136, bias=(1, 2, 70), band_hi=30),
    "one that batches and heads share": Problem(
        batch=2, heads=4, seqlen_q=150, seqlen_k=168, bias=(1, 2, 150), mask="bits", mask_heads=4
    ),
    "one that heads share, without a mask": Problem(heads=4, kv_heads=2, seqlen_q=70, seqlen_k=136, bias=(1, 1, 70)),
    "with dropout and a soft cap": Problem(
        batch=2, seqlen_q=70, seqlen_k=72, bias=(1, 2, 70), dropout_p=0.3, softcap=2.0, band_lo=-20, band_hi=20
    ),
    "keys whose number is no multiple of 8": Problem(batch=2, seqlen_q=70, seqlen_k=141, bias=(1, 2, 70)),
}

# A bias that all batches share, whose gradient the backward with mma.sync may add up in memory.
SUMMED = {
    "one for each head": Problem(
        batch=3,
        heads=4,
        kv_heads=2,
        seqlen_q=150,
        seqlen_k=168,
        bias=(1, 4, 150),
        mask="bits",
        mask_batch=3,
        mask_heads=4,
    ),
    "one for all heads": Problem(batch=3, heads=4, seqlen_q=70, seqlen_k=141, bias=(1, 1, 70)),
    "one for each group of heads": Problem(
        batch=3, heads=4, kv_heads=2, seqlen_q=70, seqlen_k=200, bias=(1, 2, 70), mask="keys", mask_batch=3
    ),
    "one under a band": Problem(batch=3, seqlen_q=257, seqlen_k=200, bias=(1, 2, 257), band_lo=-60, band_hi=40),
    "one beside intervals": Problem(
        batch=3, seqlen_q=150, seqlen_k=190, bias=(1, 2, 150), mask="hidden", mask_batch=3, mask_heads=2
    ),
    "one with dropout and a soft cap": Problem(
        batch=2, seqlen_q=70, seqlen_k=72, bias=(1, 2, 70), bias_dtype=torch.float32, dropout_p=0.3, softcap=2.0
    ),
    "one that one batch has": Problem(batch=1, heads=4, seqlen_q=64, seqlen_k=128, bias=(1, 2, 64)),
    "one without batches": Problem(batch=0, bias=(1, 1, 100)),
}


def random_problem(seed: int) -> Problem:
    """Draw a problem over all features."""
    r = random.Random(seed)
    kv_heads = r.choice([1, 1, 2])
    heads = kv_heads * r.choice([1, 1, 2, 3])
    batch = r.choice([1, 1, 2])
    p = Problem(
        seed=seed,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seqlen_q=r.choice([1, 17, 64, 127, 128, 129, 200, 257]),
        seqlen_k=r.choice([1, 33, 64, 127, 128, 130, 256, 300]),
        head_dim=r.choice([1, 8, 16, 24, 40]),
        value_dim=r.choice([1, 8, 16, 33]),
        dtype=r.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16]),
        scale=r.choice([0.3, 0.3, 1.0, -0.2, 0.0]),
        softcap=r.choice([0.0, 0.0, 2.0, 30.0]),
        dropout_p=r.choice([0.0, 0.0, 0.0, 0.3, 1.0]),
        grad_lse=r.random() < 0.4,
        transposed=r.random() < 0.5,
        mask=r.choice(["none", "bits", "bits", "segments", "keys", "band", "lifetimes", "intervals", "hidden"]),
        mask_batch=r.choice([1, batch]),
        mask_heads=r.choice([1, kv_heads, heads]),
    )
    offset = r.choice([0, p.seqlen_k - p.seqlen_q])
    low, high = r.choice(
        [(-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, offset), (offset - 50, offset + 20), (offset, UNBOUNDED)]
    )
    p = replace(p, band_lo=low, band_hi=high)
    if p.dropout_p:
        origins = {"q_origin": r.choice([0, 7]), "k_origin": r.choice([0, 128, 41])}
        p = replace(p, seeds=(r.choice([1, batch]), r.choice([1, heads])), **origins)
    if r.random() < 0.5:
        sizes = (r.choice([1, batch]), r.choice([1, kv_heads, heads]), r.choice([1, p.seqlen_q]))
        p = replace(p, bias=sizes, bias_dtype=r.choice([None, torch.float32]), bias_spacing=r.choice([1, 1, 2]))
    if r.random() < 0.25:
        lengths = tuple(r.choice([0, 1, 30, 64, 150]) for _ in range(r.choice([1, 3])))
        others = tuple(r.choice([0, 1, 30, 65, 140]) for _ in lengths)
        p = replace(p, lengths_q=lengths, lengths_k=others, mask="keys" if p.mask == "keys" else "none", batch=1)
        p = replace(p, seeds=(1, p.seeds[1]))
        p = replace(p, top_left=r.random() < 0.5, band_lo=r.choice([-UNBOUNDED, -40]), band_hi=r.choice([0, UNBOUNDED]))
        p = replace(p, bias=None if p.bias is None else (1, p.bias[1], 1))
    return p


def row_id(row: config.Row) -> str:
    """Return what tells a row from the others of its direction."""
    tier = f" from {row.min_seqlen}" * (row.min_seqlen > 0) + " few tiles" * row.few_tiles
    return f"SM{row.sm // 10}.{row.sm % 10} D{row.dim} {8 * row.itemsize}-bit{tier}"


def of_row(row: config.Row, pairwise: bool) -> Problem:
    """Return a problem as wide as a row is for; with a number for each pair of query and key, which has other blocks."""
    return Problem(
        heads=1, kv_heads=1, seqlen_q=70, seqlen_k=150, head_dim=row.dim, value_dim=row.dim, band_hi=100, mask="bits",
        dtype=torch.bfloat16 if row.itemsize == 2 else torch.float32, bias=(1, 1, 70) if pairwise else None,
        scale=row.dim**-0.5,
    )  # fmt: skip

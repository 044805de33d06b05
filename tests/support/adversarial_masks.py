"""Adversarial calls of the operators with altered masks, bands, and what makes no mask."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from adversarial_cases import (
    BATCH,
    INTEGERS,
    KINDS,
    KV_HEADS,
    LEAST,
    MOST,
    SEQLEN_K,
    SEQLEN_Q,
    Case,
    Change,
    Wrong,
    backward,
    bits,
    copied,
    forward,
    freed,
    intervals,
    keep,
    ops,
    qkv,
    segments,
)  # fmt: skip
from torch import Tensor

import dmattn_ops
from dmattn_ops.call import MASK_TENSORS, Mask
from dmattn_ops.masks import layout


def lists_of_tiles() -> Iterator[Case]:
    """Yield forwards over altered lists of rows, and backwards over altered lists of columns."""
    changes: list[tuple[str, Change, bool | None]] = [
        (f"word {word} is {value}", lambda t, w=word, v=value: t[..., w].fill_(v), True)
        for word in (0, 1, 2)
        for value in (-1, 50, 100_000, LEAST, MOST)
    ]
    changes += [(f"index {v}", lambda t, v=v: t[..., 4:].fill_(v), True) for v in (3, 10**6, -1, -5, LEAST, MOST)]
    changes += [
        ("ranks of 0", lambda t: t[..., 0].zero_(), True),
        ("one index twice", lambda t: t[..., 4:].zero_(), True),
        ("any numbers", lambda t: t.random_(LEAST, MOST), True),
        ("small numbers", lambda t: t.random_(-3, 8), True),
        ("more than there is room for", lambda t: (t[..., 1].fill_(1), t[..., 2].fill_(t.shape[-1] - 4)), True),
        ("the unused word", lambda t: t[..., 3].fill_(7), False),
    ]
    for (kind, dtype), (what, change, refused) in itertools.product(
        [("bits", torch.float32), ("segments", torch.float32), ("bits", torch.bfloat16)], changes
    ):
        for name in ("row_tiles", "col_tiles"):

            def run(kind: str = kind, dtype: torch.dtype = dtype, change: Change = change, name: str = name) -> object:
                good, bad = copied(KINDS[kind]()), copied(KINDS[kind]())
                change(bad[name])
                return forward(bad, qkv(dtype)) if name == "row_tiles" else backward(bad, good, qkv(dtype))

            yield Case(f"{kind} {dtype} {name}: {what}", run, refused)
    for what, change, refused in changes:

        def public(change: Change = change) -> object:
            mask = dmattn_ops.prepare_mask(keep(BATCH, KV_HEADS, SEQLEN_Q, SEQLEN_K))
            change(mask.row_tiles)
            return dmattn_ops.flash_dmattn_func(*qkv(), mask)

        yield Case(f"a prepared mask, altered in place: {what}", public, refused)


def contents() -> Iterator[Case]:
    """Yield masks whose bits, ids and intervals are any numbers: what they show is read inside them."""
    for kind, make in KINDS.items():
        for seed, direction in itertools.product(range(8), (forward, backward)):

            def run(make: Any = make, seed: int = seed, direction: Any = direction) -> object:
                generator, mask = torch.Generator().manual_seed(seed), copied(make())
                for name in ("row_bits", "col_bits", "q_segments", "k_segments", "start", "end", "hidden_from"):
                    if mask[name] is not None:
                        mask[name].random_(LEAST, MOST, generator=generator)
                return direction(mask | {"at_most": None})

            yield Case(f"{kind} of any numbers, {seed}, {direction.__name__}", run, False)


def shapes() -> Iterator[Case]:
    """Yield masks of which one tensor has another shape, dtype, device or memory."""
    changes: dict[str, Change] = {
        "missing": lambda t: None, "1-D": lambda t: t.flatten(), "0-D": lambda t: torch.tensor(3, dtype=torch.int32),
        "empty": lambda t: t.new_empty(0), "a dimension more": lambda t: t[None], "int64": lambda t: t.long(),
        "float": lambda t: t.float(), "bool": lambda t: t.bool(), "int16": lambda t: t.to(torch.int16),
        "uint8": lambda t: t.to(torch.uint8), "meta": lambda t: t.to("meta"), "last less": lambda t: t[..., :-1],
        "last 0": lambda t: t[..., :0], "last more": lambda t: torch.cat((t, t[..., :1]), -1),
        "rows less": lambda t: t[..., :-1, :], "rows 0": lambda t: t[..., :0, :], "dim 1 of 0": lambda t: t[:, :0],
        "dim 0 of 0": lambda t: t[:0], "heads 3": lambda t: torch.cat((t, t[:, :1]), 1),
        "batch 3": lambda t: torch.cat((t, t[:1]), 0), "batch 1": lambda t: t[:1], "heads 1": lambda t: t[:, :1],
        "width 3": lambda t: t[..., :3], "width 4": lambda t: t[..., :4].contiguous(),
        "strided": lambda t: t.repeat_interleave(2, -1)[..., ::2], "expanded": lambda t: t[:1].expand(t.shape),
        "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2), "sparse": lambda t: t.to_sparse(),
        "complex": lambda t: t.to(torch.complex64), "freed": freed,
    }  # fmt: skip
    for kind, make in KINDS.items():
        for name in MASK_TENSORS:
            if getattr(make(), name) is None:
                continue
            for (what, change), direction in itertools.product(changes.items(), (forward, backward)):

                def run(
                    make: Any = make, name: str = name, change: Change = change, direction: Any = direction
                ) -> object:
                    bad = copied(make())
                    bad[name] = change(bad[name])
                    return direction(bad) if direction is forward else backward(bad, copied(make()))

                needed = what in ("int64", "float", "meta", "heads 3", "batch 3", "complex", "1-D", "freed")
                yield Case(f"{kind} {direction.__name__} {name}: {what}", run, True if needed else None)
    others = {
        "bits and segments": lambda: copied(bits()) | {"k_segments": segments().k_segments},
        "a longer mask": lambda: copied(bits(sq=SEQLEN_Q + 128)), "a shorter mask": lambda: copied(bits(sk=SEQLEN_K - 128)),
        "queries without keys": lambda: {"q_segments": torch.zeros(BATCH, SEQLEN_Q, dtype=torch.int32)},
        **{f"only {name}": lambda name=name: {name: getattr(bits(), name)} for name in MASK_TENSORS[:4]},
        **{f"only {name}": lambda name=name: {name: getattr(intervals(), name)} for name in ("start", "hidden_to")},
    }  # fmt: skip
    for what, mask in others.items():
        yield Case(what, lambda mask=mask: forward(mask()), True)


def shown_by(low: int, high: int) -> Tensor:
    """Return what a band of any integers shows, `[Sq, Sk]`: from 64-bit limits that cannot overflow beside positions."""
    low, high = (max(-(1 << 40), min(1 << 40, limit)) for limit in (low, high))
    distance = torch.arange(SEQLEN_K) - torch.arange(SEQLEN_Q)[:, None]
    return (distance >= low) & (distance <= high)


def bands() -> Iterator[Case]:
    """Yield bands of any integers: what they show is what integers say that do not overflow."""
    for low, high in itertools.product(INTEGERS, INTEGERS):

        def seen(low: int = low, high: int = high) -> object:
            out, lse, *_ = forward(band_lo=low, band_hi=high)
            if not torch.equal(lse == -math.inf, ~shown_by(low, high).any(-1).expand(lse.shape)):
                raise Wrong("other rows see nothing than in Python's integers")
            return out, backward(band_lo=low, band_hi=high)

        def packs(low: int = low, high: int = high) -> object:
            made = ops.pack_mask(
                torch.ones(1, 1, SEQLEN_Q, SEQLEN_K, dtype=torch.bool), None, None, SEQLEN_Q, low, high
            )
            ops.list_tiles(None, torch.zeros(1, 1, SEQLEN_K, dtype=torch.int32), SEQLEN_Q, low, high)
            if not torch.equal(layout.dense(Mask(*made), low, high, SEQLEN_Q, SEQLEN_K)[0, 0], shown_by(low, high)):
                raise Wrong("a packed band shows something else than Python's integers")
            return made

        yield Case(f"band {low} {high}", seen, False)
        yield Case(f"packed band {low} {high}", packs, False)


def masks() -> Iterator[Case]:
    """Yield tensors and numbers that make no mask."""
    ids, queries = torch.zeros(1, 1, SEQLEN_K, dtype=torch.int32), torch.zeros(1, SEQLEN_Q, dtype=torch.int32)

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.bool)

    full = ones(1, 1, SEQLEN_Q, SEQLEN_K)
    for seqlen in (-1, -128, -300, 1 << 62, (1 << 63) - 1):
        yield Case(
            f"pack of {seqlen} queries", lambda s=seqlen: ops.pack_mask(ones(1, 1, 1, SEQLEN_K), None, None, s), True
        )
        yield Case(f"list of {seqlen} queries", lambda s=seqlen: ops.list_tiles(None, ids, s), True)
    for what, (mask, q, k, refused) in {
        "3-D": (full[0], None, None, True), "no keys": (full[..., :0], None, None, None),
        "no heads": (full[:, :0], None, None, None), "no batch": (full[:0], None, None, None),
        "expanded": (ones(1, 1, 1, 1).expand(2, 3, SEQLEN_Q, SEQLEN_K), None, None, False),
        "transposed": (ones(1, 1, SEQLEN_K, SEQLEN_Q).mT, None, None, False),
        "strided": (ones(1, 1, SEQLEN_Q, 2 * SEQLEN_K)[..., ::2], None, None, False),
        "overlapping": (ones(5000).as_strided((1, 1, SEQLEN_Q, SEQLEN_K), (0, 0, 1, 1)), None, None, False),
        "short queries": (full, queries[:, :-1], ids, True), "short keys": (full, None, ids[..., :-1], True),
        "3-D queries": (full, queries[None], None, True), "int64 queries": (full, queries.long(), None, True),
        "queries alone": (full, queries, None, None),
        "batches 2 and 3": (full.expand(2, -1, -1, -1), queries.expand(3, -1), None, True),
        "heads 2 and 4": (full.expand(-1, 2, -1, -1), None, ids.expand(-1, 4, -1), True), "freed": (freed(full), None, None, True),
        "extreme ids": (full, torch.full_like(queries, LEAST), torch.full_like(ids, LEAST), False),
        "meta": (full.to("meta"), None, None, None), "sparse": (full.to_sparse(), None, None, True),
    }.items():  # fmt: skip
        yield Case(f"pack: {what}", lambda m=mask, q=q, k=k: ops.pack_mask(m, q, k, SEQLEN_Q), refused)
    for seqlen in (SEQLEN_Q + 1, SEQLEN_Q - 1):
        yield Case(f"pack: {seqlen} queries", lambda s=seqlen: ops.pack_mask(full, None, None, s), True)
    for what, (q, k, seqlen) in {
        "other queries": (queries, ids, SEQLEN_Q + 200), "2-D": (None, ids[0], SEQLEN_Q), "float": (None, ids.float(), SEQLEN_Q),
    }.items():  # fmt: skip
        yield Case(f"list: {what}", lambda q=q, k=k, s=seqlen: ops.list_tiles(q, k, s), True)
    dtypes = (
        torch.complex64,
        torch.float8_e4m3fn,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.float64,
        torch.bfloat16,
    )
    for dtype in dtypes:
        yield Case(f"mask of {dtype}", lambda d=dtype: ops.pack_mask(full.to(d), None, None, SEQLEN_Q))
    documents = torch.zeros(1, 300, dtype=torch.int64)
    for what, given in {
        "float documents": {"documents": documents.float()}, "least documents": {"documents": documents - (1 << 63)},
        "far documents": {"documents": torch.randint(-(1 << 62), 1 << 62, (2, 300))}, "no batch": {"documents": documents[:0]},
        "no documents": {"documents": documents[:, :0]}, "uint64": {"documents": documents.to(torch.uint64)},
        "sizes": {"mask": ones(1, 1, 300, 300), "documents": documents[:, :-1]},
        "far window": {"mask": ones(1, 100), "seqlen_q": 100, "window_size": (1 << 70, 1 << 70)},
    }.items():  # fmt: skip
        yield Case(f"prepare_mask: {what}", lambda g=given: dmattn_ops.prepare_mask(**g).to_dense())
    for counts in itertools.product((-1, 0, 5, 1 << 62), (-(1 << 62), 0, (1 << 63) - 1), (-1, 0, 1 << 40)):
        refused = min(counts) < 0
        yield Case(
            f"key_lifetimes {counts}", lambda c=counts: ops.key_lifetimes(torch.randn(1, 1, 300), None, *c), refused
        )

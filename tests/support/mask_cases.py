"""Masks for the launchers of `pack_mask` and `list_tiles`, and what they must write, by definition."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dmattn_ops import meta
from dmattn_ops.call import HEADER, TILE, UNBOUNDED, WORD_BITS
from tests.support.tile_builder import tile_states, with_second_record

POISON = 0x5A5A5A5A
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
LAYOUTS = ("contiguous", "transposed", "offset", "padded", "expanded", "steps")
Band = tuple[int, int]
EVERYTHING: Band = (-UNBOUNDED, UNBOUNDED)


@dataclass(frozen=True)
class Case:
    """One mask `[batch, heads, Sq or 1, Sk]`, a band, and segments where they are asked for."""

    seqlen_q: int
    seqlen_k: int
    batch: int = 1
    heads: int = 1
    pattern: str = "random"  # random, blocks (whole tiles), all, none
    dtype: torch.dtype = torch.bool
    layout: str = "contiguous"
    broadcast_queries: bool = False
    band: Band = EVERYTHING
    q_batch: int = 0  # batch of the segments of queries; 0: none
    k_batch: int = 0
    seed: int = 0


NAMED = (
    Case(128, 128, pattern="all"),
    Case(256, 256, 2, 2, pattern="none"),
    Case(384, 512, 2, 3, pattern="blocks"),
    Case(384, 384, pattern="blocks", band=(-UNBOUNDED, 0)),
    Case(384, 384, pattern="all", band=(-130, 129)),
    Case(300, 272, pattern="all", band=(5, 3)),
    Case(1, 1, pattern="all"),
    Case(127, 129, 2, 1),
    Case(257, 400, 1, 2, pattern="blocks", band=(-UNBOUNDED, 143)),
    Case(200, 304, broadcast_queries=True),
    Case(130, 256, 3, 2, layout="expanded"),
    Case(256, 256, 2, 2, layout="transposed", band=(-100, 20)),
    Case(256, 256, 2, 2, layout="offset"),
    Case(256, 240, 2, 2, layout="padded", band=(-UNBOUNDED, -3)),
    Case(140, 256, layout="steps"),
    Case(200, 256, 2, 2, q_batch=2, k_batch=1),
    Case(200, 200, 1, 2, q_batch=3, k_batch=3, band=(-UNBOUNDED, 0)),
    Case(130, 140, 2, 1, k_batch=2),
    Case(8300, 80, pattern="blocks"),
    Case(16500, 16, 1, 2),
    Case(0, 5, 2, 2),
    Case(5, 0, 2, 2),
    Case(5, 5, 0, 2),
    *(Case(130, 144, dtype=dtype) for dtype in DTYPES),
    *(Case(130, 144, dtype=dtype, band=(-60, 60)) for dtype in (torch.uint8, torch.int8)),
)


def draw(seed: int, longest: int = 400) -> Case:
    """Draw a case."""
    chance = random.Random(seed)
    seqlen_k = chance.choice(
        (chance.randint(1, longest), 16 * chance.randint(1, longest // 16), 128 * chance.randint(1, 3))
    )
    seqlen_q = chance.choice((seqlen_k, chance.randint(1, longest)))
    limits = (None, 0, seqlen_k - seqlen_q, chance.randint(-longest, longest))
    low, high = chance.choice(limits), chance.choice(limits)
    batch = chance.choice((1, 1, 2))
    with_keys = chance.random() < 0.3
    return Case(
        seqlen_q,
        seqlen_k,
        batch,
        chance.choice((1, 1, 2)),
        chance.choice(("random", "random", "blocks", "all", "none")),
        chance.choice((torch.bool, torch.bool, torch.uint8, chance.choice(DTYPES))),
        chance.choice(("contiguous", *LAYOUTS)),
        chance.random() < 0.1,
        (-UNBOUNDED if low is None else low, UNBOUNDED if high is None else high),
        chance.choice((0, 1, batch)) if with_keys else 0,
        chance.choice((1, batch)) if with_keys else 0,
        seed,
    )


def check_pack_mask(launch: Callable[..., None], case: Case, device: str = "cpu") -> None:
    """Run a launcher into poisoned buffers and compare lists and bits with the definition."""
    torch.manual_seed(case.seed)
    mask = lay_out(values(case).to(device), case)
    q_segments = segments(case.q_batch, 1, case.seqlen_q, device).squeeze(1) if case.q_batch else None
    k_segments = segments(case.k_batch, 1, case.seqlen_k, device) if case.k_batch else None
    keep = definition(mask, q_segments, k_segments, case.seqlen_q, *case.band)
    before = mask.clone()
    outputs = meta.pack_mask_outputs(mask, *keep.shape[:2], case.seqlen_q, *case.band)
    for output in outputs:
        output.fill_(POISON)
    launch(mask, q_segments, k_segments, case.seqlen_q, *case.band, *outputs)
    row_tiles, col_tiles, row_bits, col_bits = (output.cpu() for output in outputs)
    states = tile_states(keep.cpu())
    check_lists(row_tiles, states)
    check_lists(col_tiles, states.mT)
    partial = states.eq(1).repeat_interleave(TILE, -2).repeat_interleave(TILE, -1)
    padded = torch.nn.functional.pad(keep.cpu(), (0, -case.seqlen_k % TILE, 0, -case.seqlen_q % TILE))
    assert torch.equal(unpack(row_bits) & partial, padded & partial)
    assert torch.equal(unpack(col_bits) & partial.mT, padded.mT & partial.mT)
    assert torch.equal(mask.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8))


def check_list_tiles(
    launch: Callable[..., None], q_segments: Tensor | None, k_segments: Tensor, seqlen_q: int, band: Band
) -> Tensor:
    """Run a launcher into poisoned buffers: what is visible must be listed, and only what is full be full.

    Return the classes that the lists give to tiles, `[Bm, Hm, nQ, nK]`.
    """
    keep = definition(None, q_segments, k_segments, seqlen_q, *band)
    seqlen_k = k_segments.shape[-1]
    outputs = meta.list_tiles_outputs(k_segments, *keep.shape[:2], seqlen_q, seqlen_k, *band)
    for output in outputs:
        output.fill_(POISON)
    launch(q_segments, k_segments, seqlen_q, *band, *outputs)
    row_tiles, col_tiles = (output.cpu() for output in outputs)
    states = tile_states(keep.cpu())
    listed = read_lists(row_tiles, states.shape[-1])[..., : states.shape[-2], :]
    check_lists(row_tiles, listed)
    check_lists(col_tiles, listed.mT)
    assert bool((listed[states == 1] == 1).all())
    assert bool((listed[states == 2] > 0).all())
    assert bool((states[listed == 2] == 2).all())
    return listed


def values(case: Case) -> Tensor:
    """Return the mask's values, 0 where it drops, `[batch, heads, Sq or 1, Sk]`."""
    shape = (case.batch, case.heads, 1 if case.broadcast_queries else case.seqlen_q, case.seqlen_k)
    if case.pattern == "blocks":
        tiles = torch.rand(*shape[:2], -(-shape[2] // TILE), -(-shape[3] // TILE))
        keep = tiles.repeat_interleave(TILE, 2).repeat_interleave(TILE, 3)[:, :, : shape[2], : shape[3]] < 0.5
    else:
        keep = torch.rand(shape) < {"random": 0.5, "all": 1.0, "none": 0.0}[case.pattern]
    if case.dtype == torch.bool:
        return keep
    kinds = torch.randint(1, 4, shape)  # any value but 0 keeps
    kinds = kinds if case.dtype == torch.uint8 else torch.where(kinds == 1, -kinds, kinds)
    return torch.where(keep, kinds, 0).to(case.dtype)


def lay_out(mask: Tensor, case: Case) -> Tensor:
    """Return the same values in another memory layout."""
    if case.layout == "transposed":
        return mask.transpose(2, 3).contiguous().transpose(2, 3)
    if case.layout == "offset":  # by one element: rows are aligned to no vector
        buffer = mask.new_zeros(mask.numel() + 1)
        buffer[1:] = mask.flatten()
        return buffer[1:].view(mask.shape)
    if case.layout == "padded":  # rows of a larger buffer
        wide = torch.cat((mask, torch.ones_like(mask)), -1)
        return wide[..., : mask.shape[-1]]
    if case.layout == "expanded" and mask.shape[0] and mask.shape[2]:
        return mask[:1, :, :1].expand(mask.shape)
    if case.layout == "steps":
        return torch.stack((mask, torch.ones_like(mask)), -1)[..., 0]
    return mask


def segments(batch: int, heads: int, seqlen: int, device: str) -> Tensor:
    """Return random ids, int32 `[batch, heads, seqlen]`: long runs and single ones."""
    runs = torch.randint(-2, 3, (batch, heads, seqlen // 100 + 1)).repeat_interleave(100, -1)[..., :seqlen]
    single = torch.randint(-2, 3, (batch, heads, seqlen))
    return torch.where(torch.rand(batch, heads, 1) < 0.5, runs, single).int().to(device)


def definition(
    mask: Tensor | None, q_segments: Tensor | None, k_segments: Tensor | None, seqlen_q: int, low: int, high: int
) -> Tensor:
    """Return which keys each query sees, bool `[Bm, Hm, Sq, Sk]`."""
    some = k_segments if mask is None else mask
    assert some is not None
    i = torch.arange(seqlen_q, device=some.device)[:, None]
    j = torch.arange(some.shape[-1], device=some.device)[None, :]
    keep = ((j >= i + low) & (j <= i + high))[None, None]
    if mask is not None:
        keep = keep & (mask.to(torch.float32) != 0 if mask.dtype == torch.float8_e4m3fn else mask != 0)
    if k_segments is not None:
        queries = torch.zeros_like(i[None, None]) if q_segments is None else q_segments[:, None, :, None]
        keep = keep & (queries == k_segments[:, :, None, :])
    return keep


def unpack(words: Tensor) -> Tensor:
    """Unpack int32 words `[..., n]` into bool `[..., 32 n]`."""
    return (words.unsqueeze(-1) >> torch.arange(WORD_BITS, dtype=torch.int32) & 1).bool().flatten(-2)


def read_lists(lists: Tensor, columns: int) -> Tensor:
    """Return the states of tiles `[Bm, Hm, R, columns]` that records describe; every index once and in range."""
    states = torch.zeros((*lists.shape[:-1], columns), dtype=torch.int32)
    for place in torch.cartesian_prod(*map(torch.arange, lists.shape[:-1])).tolist() if lists.numel() else ():
        _, partial, full, *indices = lists[tuple(place)].tolist()
        listed = indices[1 : 1 + partial + full]
        assert len(listed) == partial + full
        assert len(set(listed)) == len(listed)
        for slot, index in enumerate(listed):
            assert 0 <= index < columns
            states[(*place, index)] = 1 if slot < partial else 2
    return states


def check_lists(lists: Tensor, states: Tensor) -> None:
    """Compare records with states of tiles `[Bm, Hm, R, C]`: counts, ascending indices, and the order by work."""
    states = with_second_record(states)
    assert torch.equal(read_lists(lists, states.shape[-1]), states.int())
    for place in torch.cartesian_prod(*map(torch.arange, lists.shape[:-1])).tolist() if lists.numel() else ():
        _, partial, full, zero, *indices = lists[tuple(place)].tolist()
        assert zero == 0
        assert indices[:partial] == sorted(indices[:partial])
        assert indices[partial : partial + full] == sorted(indices[partial : partial + full])
    work = (lists[..., 1] + lists[..., 2]).tolist()
    for batch, ranked in zip(work, lists[..., 0].tolist(), strict=True):
        for head, order in zip(batch, ranked, strict=True):
            assert order == sorted(range(len(head)), key=lambda tile: (-head[tile], tile))
    assert lists.shape[-1] >= HEADER

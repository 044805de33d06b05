"""How many blocks of the SM 9.0 backward divide the queries of a key tile, and how many tiles of packed sequences go together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from dmattn_ops.call import NO_MASK, Call, Mask, Varlen, plain_options
from dmattn_ops.choice import arch, config, resolve

SMS = 132


class Size(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    dim: int
    causal: bool


# Milliseconds of the backward with 1, 2, 3, 4, 6 and 8 blocks for each key tile: H200, 2026-11-24, bf16, cold L2
COUNTS = (1, 2, 3, 4, 6, 8)
MEASURED = {
    Size(1, 8, 8, 1000, 1000, 64, True): (0.0383, 0.0363, 0.0362, 0.0375, 0.0415, 0.0447),
    Size(1, 8, 8, 1000, 1000, 64, False): (0.0387, 0.0376, 0.0429, 0.0408, 0.0475, 0.0467),
    Size(1, 8, 8, 1000, 1000, 128, True): (0.0543, 0.0444, 0.0421, 0.0432, 0.0485, 0.0551),
    Size(1, 8, 8, 1000, 1000, 128, False): (0.0555, 0.0461, 0.0533, 0.0506, 0.0561, 0.0615),
    Size(1, 16, 16, 512, 512, 64, True): (0.0292, 0.0320, 0.0345, 0.0344, 0.0386, 0.0412),
    Size(2, 8, 8, 1024, 1024, 64, True): (0.0404, 0.0453, 0.0493, 0.0525, 0.0596, 0.0670),
    Size(2, 8, 8, 1024, 1024, 128, True): (0.0580, 0.0560, 0.0623, 0.0690, 0.0818, 0.0952),
    Size(1, 12, 12, 1024, 1024, 64, True): (0.0396, 0.0404, 0.0434, 0.0451, 0.0512, 0.0560),
    Size(1, 12, 12, 1024, 1024, 64, False): (0.0392, 0.0473, 0.0485, 0.0479, 0.0569, 0.0568),
    Size(1, 32, 8, 1024, 1024, 128, True): (0.1590, 0.1030, 0.0878, 0.0851, 0.0918, 0.0996),
    Size(1, 4, 4, 4096, 4096, 128, True): (0.1539, 0.1014, 0.1098, 0.1139, 0.1253, 0.1372),
    Size(1, 2, 2, 4096, 4096, 128, True): (0.1398, 0.0889, 0.0702, 0.0653, 0.0707, 0.0763),
    Size(1, 2, 2, 4096, 4096, 128, False): (0.1415, 0.0934, 0.1151, 0.0949, 0.1009, 0.1069),
    Size(1, 1, 1, 8192, 8192, 128, True): (0.2564, 0.1477, 0.1141, 0.0956, 0.1040, 0.1073),
    Size(1, 3, 3, 4096, 4096, 128, False): (0.1473, 0.1587, 0.1613, 0.1358, 0.1548, 0.1542),
    Size(2, 10, 10, 4096, 77, 64, False): (0.1036, 0.0764, 0.0665, 0.0615, 0.0584, 0.0625),
    Size(2, 8, 8, 4096, 256, 128, False): (0.1666, 0.1154, 0.0993, 0.0945, 0.0999, 0.1007),
    Size(8, 10, 10, 4096, 77, 64, False): (0.1764, 0.1790, 0.1795, 0.1802, 0.1840, 0.1886),
    Size(1, 8, 8, 2048, 2048, 64, True): (0.0579, 0.0534, 0.0559, 0.0606, 0.0683, 0.0765),
    Size(1, 8, 8, 256, 256, 64, True): (0.0243, 0.0267, 0.0273, 0.0279, 0.0280, 0.0292),
}


@pytest.fixture(autouse=True)
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arch, "physical", lambda device: arch.KNOWN[90])


def offered(dim: int) -> config.HopperBackward:
    return next(row.config for row in config.BACKWARD if row.kernel == "hopper" and row.dim == dim)


def call_of(size: Size, **changes: object) -> Call:
    def rows(seqlen: int, heads: int) -> torch.Tensor:
        return torch.empty(1, dtype=torch.bfloat16).expand(size.batch, seqlen, heads, size.dim)

    key = rows(size.seqlen_k, size.kv_heads)
    options = plain_options(0.1, **({"band_hi": size.seqlen_k - size.seqlen_q} if size.causal else {}))
    call = Call(rows(size.seqlen_q, size.heads), key, key, None, NO_MASK, None, None, None, options)
    return call._replace(**changes)


@pytest.mark.parametrize("size", MEASURED, ids=lambda size: "-".join(map(str, size)))
def test_the_number_of_blocks_is_nearly_the_fastest_that_was_measured(size: Size) -> None:
    times = dict(zip(COUNTS, MEASURED[size], strict=True))
    chosen = resolve._shares(offered(size.dim), call_of(size))
    assert times[chosen] <= 1.1 * min(times.values()), (chosen, times)


def test_where_sms_are_idle_the_rule_saves_a_third_of_the_time() -> None:
    few = [size for size in MEASURED if size.batch * size.kv_heads * -(-size.seqlen_k // 128) <= SMS // 2]
    times = {size: dict(zip(COUNTS, MEASURED[size], strict=True)) for size in few}
    saved = [times[size][resolve._shares(offered(size.dim), call_of(size))] / times[size][1] for size in few]
    assert len(few) > 10 and sum(saved) / len(saved) < 0.75


def test_calls_whose_blocks_cannot_be_divided_keep_one_block_for_each_key_tile() -> None:
    """Lists, ordered additions, sums of keys over all queries, packed sequences, and float16."""
    size = Size(1, 2, 2, 4096, 4096, 128, True)
    plain = call_of(size)
    assert resolve._shares(offered(128), plain) > 1
    assert resolve._shares(offered(128), plain._replace(bias=torch.empty(1, 1, 1, 1).expand(1, 2, 4096, 4096))) > 1
    ids = torch.zeros(1, 2, 1, dtype=torch.int32).expand(1, 2, 4096)
    ends = torch.zeros(2, dtype=torch.int32)
    for changes in (
        {"options": plain.options._replace(deterministic=True)},
        {"bias": torch.empty(1, 2, 1, 4096)},
        {"mask": Mask(start=ids, end=ids)},
        {"varlen": Varlen(ends, ends, 4096, 4096, False)},
        {"query": plain.query.half()},  # what a block makes may overflow where the sum does not
    ):
        assert resolve._shares(offered(128), plain._replace(**changes)) == 1, changes


def test_windows_count_the_queries_that_see_a_key() -> None:
    """A window of 1024 makes 18 steps of 64 queries of each block, however long the sequence is."""
    size = Size(1, 1, 1, 8192, 8192, 128, True)
    narrow = call_of(size)
    narrow = narrow._replace(options=narrow.options._replace(band_lo=-1023))
    assert resolve._shares(offered(128), narrow) < resolve._shares(offered(128), call_of(size))


@pytest.mark.parametrize(
    ("heads", "rounds", "tiles"), [(8, 0.5, 8), (4, 0.5, 16), (1, 0.5, 64), (16, 2.0, 16), (600, 0.5, 1)]
)
def test_tiles_of_packed_sequences_that_go_together(heads: int, rounds: float, tiles: int) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from dmattn_ops.kernels.hopper.arguments import chunk_of_tiles

    assert chunk_of_tiles(heads, rounds, torch.device("cpu")) == tiles


def test_shares_of_a_span_are_all_of_its_tiles_once() -> None:
    pytest.importorskip("triton.experimental.gluon")
    from dmattn_ops.kernels.hopper.backward import walk
    from dmattn_ops.kernels.hopper.backward.types import Span
    from tests.support.device_functions import on_integers

    share_of_tiles = on_integers(walk.share_of_tiles)
    for span in map(Span._make, ((0, 2, 9, 9), (3, 5, 11, 14), (0, 0, 1, 1), (4, 4, 4, 4), (2, 10, 10, 10))):
        for shares in (1, 2, 3, 8):
            parts = [share_of_tiles(span, share, shares) for share in range(shares)]
            walked = [range(part.first, part.end) for part in parts]
            assert [tile for tiles in walked for tile in tiles] == list(range(span.first, span.end))
            assert max(map(len, walked)) - min(map(len, walked)) <= 1
            full = [tile for part in parts for tile in range(part.full_first, part.full_end)]
            assert full == list(range(span.full_first, span.full_end))
            assert all(part.first <= part.full_first <= part.full_end <= part.end for part in parts)


def test_each_share_of_a_key_tile_is_one_block() -> None:
    pytest.importorskip("triton.experimental.gluon")
    from dmattn_ops.kernels.hopper.backward import work
    from dmattn_ops.kernels.hopper.backward.types import Order
    from dmattn_ops.kernels.hopper.kinds import BAND
    from tests.support.device_functions import on_integers

    tiles, batch, kv_heads, shares = 5, 2, 3, 4
    place_of = on_integers(work.place_of, block_of=on_integers(work.block_of))
    split_place = on_integers(work.split_place)
    order = Order(tiles * shares, batch * kv_heads, 4, 0, 1, 1)
    problem, traits = SimpleNamespace(kv_heads=kv_heads, shares=shares), SimpleNamespace(MASK=BAND.value)
    found = set()
    for block in range(tiles * shares * batch * kv_heads):
        place = place_of(block, order, problem, traits)
        own, share = split_place(place, shares)
        assert place.batch == own.batch * shares + share  # where its dk and dv lie
        found.add((*own, share))
    assert found == {
        (tile, b, head, share)
        for tile in range(tiles)
        for b in range(batch)
        for head in range(kv_heads)
        for share in range(shares)
    }

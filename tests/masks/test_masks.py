"""`prepare_mask`, `TileMask` and the launchers behind them, against the definition."""

from __future__ import annotations

import itertools
import resource
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torch.utils import _pytree as pytree

from dmattn_ops import bands, flash_dmattn_func, flash_dmattn_varlen_func
from dmattn_ops.bands import Band
from dmattn_ops.call import NO_MASK, UNBOUNDED, plain_options
from dmattn_ops.kernels import native, reference
from dmattn_ops.masks import chunks, prepare
from dmattn_ops.masks.prepare import prepare_mask
from dmattn_ops.masks.tile_mask import TileMask
from tests.support.mask_cases import EVERYTHING, NAMED, Case, check_list_tiles, check_pack_mask, draw, segments

BANDS = (EVERYTHING, (-UNBOUNDED, 0), (-130, 10), (5, 3), (128, 255), (-1000, -400))
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
CONDITIONS = (
    {},
    {"is_causal": True},
    {"is_causal": True, "causal_from": "top_left"},
    {"window_size": (40, 3)},
    {"is_causal": True, "window_size": (150, None)},
)


@pytest.fixture(params=["reference", "native"])
def launchers(request: pytest.FixtureRequest) -> ModuleType:
    """The launchers for the CPU."""
    if request.param == "native" and not native.available():
        pytest.skip("the C++ kernels are not built: " + native.reason())
    return {"reference": reference, "native": native}[request.param]


def random_keep(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.6


def band_of(conditions: dict, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return the causal and window conditions, dense `[Sq, Sk]`, as the contract words them."""
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]
    diagonal = i if conditions.get("causal_from") == "top_left" else i + seqlen_k - seqlen_q
    left, right = conditions.get("window_size", (None, None))
    keep = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if conditions.get("is_causal"):
        keep &= j <= diagonal
    if left is not None:
        keep &= j >= diagonal - left
    if right is not None:
        keep &= j <= diagonal + right
    return keep


# Launchers.


@pytest.mark.parametrize("case", NAMED, ids=repr)
def test_pack_mask_writes_lists_and_bits_of_nasty_masks(launchers: ModuleType, case: Case):
    check_pack_mask(launchers.pack_mask, case)


@pytest.mark.parametrize("seed", range(30))
def test_pack_mask_writes_lists_and_bits_of_any_mask(launchers: ModuleType, seed: int):
    check_pack_mask(launchers.pack_mask, draw(seed))


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 500), (1, 700), (384, 384), (0, 4), (4, 0)])
def test_list_tiles_lists_what_segments_and_a_band_show(
    launchers: ModuleType, seqlen_q: int, seqlen_k: int, band: tuple[int, int]
):
    torch.manual_seed(seqlen_q + seqlen_k)
    keys = segments(2, 3, seqlen_k, "cpu")
    check_list_tiles(launchers.list_tiles, segments(1, 1, seqlen_q, "cpu").squeeze(1), keys, seqlen_q, band)
    keys = torch.randint(-1, 1, (1, 2, seqlen_k), dtype=torch.int32)
    check_list_tiles(launchers.list_tiles, None, keys, seqlen_q, band)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 300), (300, 5), (256, 256), (1, 1)])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_visible_reads_lists_bits_segments_and_band(heads: int, seqlen_q: int, seqlen_k: int):
    torch.manual_seed(0)
    options = plain_options(1.0, -30, 60)
    band = band_of({"window_size": (30, 60), "causal_from": "top_left"}, seqlen_q, seqlen_k)
    mask = random_keep(2, heads, seqlen_q, seqlen_k)
    device = torch.device("cpu")
    assert torch.equal(reference.visible(NO_MASK, options, 4, seqlen_q, seqlen_k, device), band[None, None])
    for keep in (mask, mask[:, :, :1]):
        prepared, low, high = prepare.resolve(keep, Band(-30, 60), seqlen_q, seqlen_k)
        actual = reference.visible(prepared, options._replace(band_lo=low, band_hi=high), 4, seqlen_q, seqlen_k, device)
        expected = (keep & band).repeat_interleave(4 // heads, 1)
        assert torch.equal(actual.expand(2, 4, -1, -1), expected.expand(2, 4, -1, -1))


# What prepare_mask takes.


@pytest.mark.parametrize("conditions", CONDITIONS, ids=repr)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(130, 300), (300, 130), (1, 257)])
def test_prepare_mask_takes_every_broadcast_shape(conditions: dict, seqlen_q: int, seqlen_k: int):
    torch.manual_seed(0)
    for batch, heads, rows in itertools.product((1, 2), (1, 3), {1, seqlen_q}):
        mask = random_keep(batch, heads, rows, seqlen_k)
        prepared = prepare_mask(mask, seqlen_q=seqlen_q, **conditions)
        assert prepared.shape == (batch, heads, seqlen_q, seqlen_k)
        expected = (mask & band_of(conditions, seqlen_q, seqlen_k)).expand(-1, -1, seqlen_q, -1)
        assert torch.equal(prepared.to_dense(), expected)
        assert (prepared.row_bits is None) == (rows == 1)


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS], ids=str)
def test_prepare_mask_keeps_what_is_not_zero(dtype: torch.dtype):
    torch.manual_seed(0)
    values = torch.randint(0, 3, (1, 2, 70, 90))
    assert torch.equal(prepare_mask(values.to(dtype)).to_dense(), values != 0)
    per_key = prepare_mask(values[:, :, :1].to(dtype), seqlen_q=3)
    assert torch.equal(per_key.to_dense(), (values[:, :, :1] != 0).expand(-1, -1, 3, -1))


def test_prepare_mask_takes_key_padding_in_linear_memory():
    torch.manual_seed(0)
    padding = torch.arange(5000) < torch.tensor([[5000], [1200], [0]])
    prepared = prepare_mask(padding, seqlen_q=4000, is_causal=True, window_size=(256, None))
    assert prepared.shape == (3, 1, 4000, 5000)
    assert prepared.nbytes < 40 * (4000 + 5000)
    expected = padding[:, None, None] & band_of({"is_causal": True, "window_size": (256, None)}, 4000, 5000)
    assert torch.equal(prepared.to_dense(), expected)
    assert prepared.row_tiles[2, 0, :, 1:3].sum() == 0


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("conditions", CONDITIONS[:2], ids=repr)
def test_prepare_mask_separates_documents_with_any_ids(conditions: dict, dtype: torch.dtype):
    torch.manual_seed(0)
    limits = torch.iinfo(dtype)
    choices = [limits.min, limits.max, 0, limits.max - 1] + ([-1] if limits.min else [1])
    choices += [(1 << 32) + 5, 5, -(1 << 62)] if dtype == torch.int64 else []
    documents = torch.tensor(choices, dtype=dtype)[torch.randint(len(choices), (2, 300))]
    padding, per_head, full = random_keep(2, 300), random_keep(1, 3, 1, 300), random_keep(2, 1, 300, 300)
    same = (documents[:, None, :, None] == documents[:, None, None, :]) & band_of(conditions, 300, 300)
    assert torch.equal(prepare_mask(documents=documents, **conditions).to_dense(), same)
    for mask, keep in ((padding, padding[:, None, None]), (per_head, per_head), (full, full), (full[:1], full[:1])):
        assert torch.equal(prepare_mask(mask, documents=documents, **conditions).to_dense(), same & keep)
    same = documents[:1, None, :, None] == documents[:1, None, None, :]
    assert torch.equal(prepare_mask(full, documents=documents[:1]).to_dense(), same & full)


def test_prepare_mask_lists_only_the_tiles_of_each_document():
    documents = (torch.arange(1280) // 256)[None]
    padding = torch.arange(1280)[None] % 256 < 200
    for mask in (None, padding):
        prepared = prepare_mask(mask, documents=documents)
        assert prepared.density() == 0.2
        assert prepared.row_tiles[0, 0, :, 1:3].sum(-1).tolist() == [2] * 10


def test_offsets_become_documents():
    torch.manual_seed(0)
    lengths = [50, 0, 78, 130]
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows = [torch.randn(258, 2, 16) for _ in range(3)]
    expected = flash_dmattn_varlen_func(*rows, cu_seqlens, cu_seqlens, 130, 130, is_causal=True)
    documents = torch.bucketize(torch.arange(258), cu_seqlens[1:], right=True)[None]
    for window in ((None, None), (129, 129)):
        prepared = prepare_mask(documents=documents, is_causal=True, window_size=window)
        actual = flash_dmattn_func(*(tensor[None] for tensor in rows), prepared)
        torch.testing.assert_close(actual[0], expected)


def test_long_sequences_take_memory_in_proportion():
    """131072 squared is 16 GiB of bool; lists without a window are S / 128 squared, and those with one are not."""
    seqlen, longest = 1 << 17, 1000
    documents = (torch.arange(seqlen) // longest)[None]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unlimited = prepare_mask(documents=documents)
    limited = prepare_mask(documents=documents, window_size=(longest - 1, longest - 1))
    padded = prepare_mask(documents < 100, seqlen_q=seqlen, window_size=(longest, 0))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # 256 MiB, in KiB
    assert unlimited.nbytes < 10 << 20
    assert limited.nbytes < 20 * seqlen and padded.nbytes < 20 * seqlen
    assert torch.equal(limited.row_tiles[..., 1:3], unlimited.row_tiles[..., 1:3])


def test_prepare_mask_does_not_share_memory_with_documents():
    documents = torch.zeros((1, 5), dtype=torch.int32)
    prepared = prepare_mask(documents=documents)
    documents.fill_(7)
    documents[0, 2] = 1
    assert prepared.to_dense().all()


@pytest.mark.parametrize("block_size", [128, 64, (256, 128), (192, 320)])
@pytest.mark.parametrize("lengths", [(512, 512), (300, 700)])
def test_prepare_mask_takes_a_block_mask(block_size: int | tuple[int, int], lengths: tuple[int, int], monkeypatch):
    monkeypatch.setattr(chunks, "_CHUNK", 1 << 17)  # several chunks of rows
    start = torch.tensor([0, 200])

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i + h * 50 >= j) & (j >= start[b])

    of_flex = create_block_mask(mask_mod, 2, 3, *lengths, device="cpu", BLOCK_SIZE=block_size)
    expected = create_mask(mask_mod, 2, 3, *lengths, device="cpu")
    assert torch.equal(prepare_mask(of_flex).to_dense(), expected)
    window = {"window_size": (90, None), "causal_from": "top_left"}
    prepared, whole = prepare_mask(of_flex, **window), prepare_mask(expected, **window)
    assert torch.equal(prepared.to_dense(), expected & band_of(window, *lengths))
    assert torch.equal(prepared.row_tiles[..., :4], whole.row_tiles[..., :4])
    assert prepared.col_tiles.shape == whole.col_tiles.shape
    assert torch.equal(prepared.col_tiles[..., :4], whole.col_tiles[..., :4])


def test_prepare_mask_takes_a_block_mask_without_mask_mod_and_documents():
    counts, indices = torch.tensor([[[1, 2, 0]]]), torch.tensor([[[[2, 0, 1], [0, 1, 2], [1, 0, 2]]]])
    of_flex = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64)
    blocks = torch.tensor([[0, 0, 1], [1, 1, 0], [0, 0, 0]]).bool()
    expected = blocks.repeat_interleave(64, 0).repeat_interleave(64, 1)
    assert torch.equal(prepare_mask(of_flex).to_dense()[0, 0], expected)
    documents = torch.randint(0, 2, (2, 192))
    same = documents[:, None, :, None] == documents[:, None, None, :]
    assert torch.equal(prepare_mask(of_flex, documents=documents).to_dense(), same & expected)


def test_prepare_mask_never_expands_a_broadcast_dimension():
    row = random_keep(1, 1, 300, 300)
    assert prepare_mask(row.expand(4, 8, -1, -1)).shape[:2] == (1, 1)
    prepared = prepare_mask(row[:, :, :1].expand(4, 8, 300, -1))
    assert prepared.row_bits is None
    assert torch.equal(prepared.to_dense(), row[:, :, :1].expand(1, 1, 300, 300))


def test_prepare_mask_leaves_its_arguments_alone():
    mask, documents = torch.randint(-1, 2, (1, 1, 200, 200)), torch.randint(-3, 3, (1, 200))
    before, ids = mask.clone(), documents.clone()
    prepare_mask(mask, documents=documents)
    assert torch.equal(mask, before)
    assert torch.equal(documents, ids)


def test_prepare_mask_reads_nothing_on_the_host():
    with FakeTensorMode():
        documents, mask = torch.randint(0, 9, (2, 300)), torch.rand(2, 1, 300, 300) < 0.5
        for prepared in (
            prepare_mask(mask, is_causal=True),
            prepare_mask(documents=documents),
            prepare_mask(mask[:, 0, 0], documents=documents),
            prepare_mask(mask, documents=documents),
        ):
            assert prepared.to_dense().shape == (2, 1, 300, 300)
            assert prepared.density().shape == ()
            assert "TileMask(shape=(2, 1, 300, 300)" in repr(prepared)
            prepare.resolve(prepared, Band(-5, 5), 300, 300)


@pytest.mark.parametrize("shape", [(0, 1, 5, 5), (2, 1, 0, 5), (2, 1, 5, 0)])
def test_prepare_mask_of_nothing(shape: tuple[int, ...]):
    prepared = prepare_mask(torch.ones(shape, dtype=torch.bool), is_causal=True)
    assert prepared.to_dense().shape == shape
    assert prepared.density() == 0
    expanded = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(shape)
    assert prepare_mask(expanded, seqlen_q=shape[2] or None).to_dense().shape[2:] == shape[2:]
    batch, _, seqlen_q, seqlen_k = shape
    assert prepare_mask(torch.ones(batch, seqlen_k, dtype=torch.bool), seqlen_q=seqlen_q).to_dense().shape == shape


# A prepared mask in calls.


@pytest.mark.parametrize("kind", ["bits", "segments", "documents"])
@pytest.mark.parametrize("conditions", CONDITIONS, ids=repr)
def test_resolve_adds_the_conditions_of_a_call(conditions: dict, kind: str):
    torch.manual_seed(0)
    seqlen_q, seqlen_k = (200, 200) if kind == "documents" else (200, 330)
    window = {"window_size": (100, 40)}
    if kind == "documents":
        prepared = prepare_mask(documents=torch.randint(0, 3, (2, 200)), **window)
    else:
        prepared = prepare_mask(random_keep(2, 1, 200 if kind == "bits" else 1, 330), seqlen_q=200, **window)
    asked = bands.band_of(
        conditions.get("is_causal", False),
        conditions.get("causal_from", "bottom_right"),
        conditions.get("window_size", (None, None)),
    )
    mask, low, high = prepare.resolve(prepared, asked, seqlen_q, seqlen_k)
    options = plain_options(1.0, low, high)
    actual = reference.visible(mask, options, 1, seqlen_q, seqlen_k, torch.device("cpu"))
    assert torch.equal(actual, prepared.to_dense() & band_of(conditions, seqlen_q, seqlen_k))
    if not conditions:
        assert all(one is other for one, other in zip(mask, prepared.mask, strict=True))


def test_resolve_keeps_a_prepared_mask_when_the_call_asks_for_the_same_or_for_less():
    prepared = prepare_mask(random_keep(1, 1, 200, 300), is_causal=True)
    for asked in (
        Band(),
        Band(-UNBOUNDED, 0, True),
        Band(-UNBOUNDED, 1, True),
        bands.band_of(True, "bottom_right", (None, None)),
    ):
        mask, *band = prepare.resolve(prepared, asked, 200, 300)
        assert mask.row_tiles is prepared.row_tiles
        assert tuple(band) == (-UNBOUNDED, 100)


def test_tile_mask_is_a_pytree_and_shows_what_it_holds():
    prepared = prepare_mask(random_keep(1, 2, 200, 300), is_causal=True)
    leaves, spec = pytree.tree_flatten(prepared)
    again = pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, TileMask)
    assert torch.equal(again.to_dense(), prepared.to_dense())
    assert (
        repr(prepared)
        == f"TileMask(shape=(1, 2, 200, 300), kind=bits, band=[..+0 from the bottom right], device='cpu', nbytes={prepared.nbytes})"
    )
    assert prepared.nbytes == sum(t.numel() * 4 for t in leaves if isinstance(t, Tensor) and t.dtype == torch.int32)
    with pytest.raises(AttributeError):
        prepared.seqlen_q = 3  # type: ignore[misc]


def test_density_counts_listed_tiles():
    keep = torch.zeros(1, 1, 300, 300, dtype=torch.bool)
    keep[0, 0, 299, 0] = keep[0, 0, :128, :128] = True
    assert prepare_mask(keep).density() == torch.tensor(2 / 9)


def test_hidden_intervals_of_one_batch_stand_beside_documents_of_several():
    start, seqlen = torch.zeros(1, 1, 20, dtype=torch.int32), 20
    documents = torch.stack([torch.arange(seqlen) // size for size in (7, 3, 20)])
    mask = prepare_mask(intervals=(start, start + seqlen), hidden=(start + 2, start + 5), documents=documents)
    hidden = (torch.arange(seqlen) >= 2) & (torch.arange(seqlen) < 5)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    assert torch.equal(mask.to_dense(), same & ~hidden[:, None])
    query = torch.randn(3, seqlen, 2, 16)
    assert flash_dmattn_func(query, query, query, mask)[:, 2:5].isfinite().all()

"""`TileMask` of every kind: parts, copies, files, pytrees; and what `prepare_mask` makes of intervals and pairs of documents."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import zipfile

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import dmattn_ops
from dmattn_ops import TileMask, dynamic_mask, prepare_mask
from dmattn_ops.bands import Band
from dmattn_ops.masks import taken_apart
from dmattn_ops.masks.tile_mask import from_chosen

BATCH, HEADS, SQ, SK = 2, 3, 190, 310
BANDS = {
    "": {},
    "causal": {"is_causal": True},
    "causal from the top": {"is_causal": True, "causal_from": "top_left"},
    "window": {"window_size": (70, 20)},
    "diagonal": {"is_causal": True, "causal_from": 33, "window_size": (90, None)},
    # numbers longer than any sequence, beside diagonals that bring their ends back into it
    "far left end": {"window_size": (1 << 30, (1 << 30) + 5), "causal_from": (1 << 30) - 1},
    "far right end": {"window_size": (1 << 40, (1 << 30) + 5), "causal_from": 3 - (1 << 30)},
    "nothing": {"is_causal": True, "causal_from": 1 - (1 << 30)},
}
PARTS = ((0, 190), (0, 1), (5, 128), (128, 190), (60, 60), (189, 190))


def random_keep(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.6


def random_ends(*shape: int, queries: int = SQ) -> tuple[Tensor, Tensor]:
    start, end = torch.randint(-5, queries + 5, (2, *shape), dtype=torch.int32)
    return start, end


def shown(start: Tensor, end: Tensor, queries: int) -> Tensor:
    """Return which queries lie in the interval of each key, bool `[.., queries, keys]`."""
    rows = torch.arange(queries)[:, None]
    return (rows >= start[..., None, :]) & (rows < end[..., None, :])


def band_of(queries: int, keys: int, is_causal=False, causal_from="bottom_right", window_size=(None, None)) -> Tensor:
    """Return the causal and window conditions, dense, as the contract words them."""
    off = {"bottom_right": keys - queries, "top_left": 0}.get(causal_from, causal_from)
    distance = torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - off
    left, right = window_size
    keep = torch.ones(queries, keys, dtype=torch.bool)
    keep &= distance <= 0 if is_causal else True
    keep &= distance >= -left if left is not None else True
    return keep & (distance <= right if right is not None else True)


def bits(**band) -> tuple[TileMask, Tensor]:
    keep = random_keep(BATCH, HEADS, SQ, SK)
    return prepare_mask(keep, **band), keep


def padding(**band) -> tuple[TileMask, Tensor]:
    keep = random_keep(BATCH, SK)
    return prepare_mask(keep, seqlen_q=SQ, **band), keep[:, None, None]


def by_head(**band) -> tuple[TileMask, Tensor]:
    keep = random_keep(1, HEADS, 1, SK)
    return prepare_mask(keep, seqlen_q=SQ, **band), keep


def documents(**band) -> tuple[TileMask, Tensor]:
    ids = torch.randint(-2, 3, (BATCH, SK)).sort(-1).values
    return prepare_mask(documents=ids, **band), ids[:, None, :, None] == ids[:, None, None]


def pair(**band) -> tuple[TileMask, Tensor]:
    of_queries, of_keys = torch.randint(-2, 3, (1, SQ)) * (1 << 40), torch.randint(-2, 3, (BATCH, SK)) * (1 << 40)
    return prepare_mask(documents=(of_queries, of_keys), **band), of_queries[:, None, :, None] == of_keys[:, None, None]


def intervals(**band) -> tuple[TileMask, Tensor]:
    ends = random_ends(BATCH, HEADS, SK)
    return prepare_mask(intervals=ends, seqlen_q=SQ, at_most=SK, **band), shown(*ends, SQ)


def ends(**band) -> tuple[TileMask, Tensor]:
    end = random_ends(BATCH, HEADS, SK)[1]
    return prepare_mask(intervals=(None, end), seqlen_q=SQ, at_most=SK, **band), shown(torch.zeros_like(end), end, SQ)


def hidden(**band) -> tuple[TileMask, Tensor]:
    ends, gap = random_ends(BATCH, 1, SK), random_ends(1, HEADS, SK)
    made = prepare_mask(intervals=ends, hidden=gap, seqlen_q=SQ, **band)
    return made, shown(*ends, SQ) & ~shown(*gap, SQ)


def best(**band) -> tuple[TileMask, Tensor]:
    scores = torch.randn(BATCH, HEADS, SK)
    made = dynamic_mask(scores, 40, keep_first=2, keep_last=3)
    return made.also(dmattn_ops.bands.band_of(**{**DEFAULT, **band})), made.to_dense()


def chosen(**band) -> tuple[TileMask, Tensor]:
    """Blocks as a GPU keeps them, with documents beside them."""
    indices = torch.randint(-1, -(-SK // 12), (BATCH, HEADS, SQ, 4), dtype=torch.int32)
    of_queries, of_keys = (
        torch.randint(0, 2, (BATCH, SQ), dtype=torch.int32),
        torch.randint(0, 2, (BATCH, 1, SK), dtype=torch.int32),
    )
    made = from_chosen(indices, 12, (of_queries, of_keys), SK, dmattn_ops.bands.band_of(**{**DEFAULT, **band}))
    keep = (indices.unsqueeze(-1) == torch.arange(SK) // 12).any(-2)
    return made, keep & (of_queries[:, None, :, None] == of_keys[:, :, None])


DEFAULT = {"is_causal": False, "causal_from": "bottom_right", "window_size": (None, None)}
KINDS = {
    "bits": bits, "padding": padding, "by head": by_head, "documents": documents, "pair": pair, "intervals": intervals,
    "ends": ends, "hidden": hidden, "best": best,
    "chosen": chosen,
}  # fmt: skip


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_the_dense_mask_inside_its_band(kind: str, band: str):
    made, keep = KINDS[kind](**BANDS[band])
    queries, keys = made.shape[2:]
    expected = (keep & band_of(queries, keys, **BANDS[band])).expand(*made.shape)
    assert torch.equal(made.to_dense(), expected)
    of_keys = ("intervals", "ends", "hidden", "best")
    assert made.kind == (kind if kind in ("bits", "chosen") else "intervals" if kind in of_keys else "segments")


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_mask_are_parts_of_the_dense_one(kind: str, band: str):
    made, _ = KINDS[kind](**BANDS[band])
    dense = made.to_dense()
    batch, heads, _, keys = made.shape
    for start, stop in PARTS:
        assert torch.equal(made.queries(start, stop).to_dense(), dense[:, :, start:stop])
        assert torch.equal(made.keys(start, stop).to_dense(), dense[..., start:stop])
        both = made.keys(start, keys).queries(0, stop)
        assert torch.equal(both.to_dense(), dense[:, :, :stop, start:])
        assert torch.equal(both.keys(1, both.shape[3]).to_dense(), dense[:, :, :stop, start + 1 :])
    for size, part, dim in ((batch, made.batch, 0), (heads, made.heads, 1)):
        if size == 1:
            assert part(0, 1) is made and part(3, 9) is made
            continue
        for start, stop in ((0, size), (0, 1), (1, size), (1, 1)):
            assert torch.equal(part(start, stop).to_dense(), dense.narrow(dim, start, stop - start))
            assert torch.equal(
                part(start, stop).queries(7, 150).to_dense(), dense.narrow(dim, start, stop - start)[:, :, 7:150]
            )


@pytest.mark.parametrize("band", BANDS)
def test_bands_of_calls_are_the_dense_ones(band: str):
    conditions = BANDS[band]
    queries, keys = torch.randn(2, 40, 1, 4), torch.randn(2, 60, 1, 4)
    dense = band_of(40, 60, **conditions)[None, None]
    expected = dmattn_ops.flash_dmattn_func(queries, keys, keys, dense)
    torch.testing.assert_close(dmattn_ops.flash_dmattn_func(queries, keys, keys, **conditions), expected)
    offsets = [torch.arange(3, dtype=torch.int32) * length for length in (40, 60)]
    packed = (rows.flatten(0, 1) for rows in (queries, keys, keys))
    outs = dmattn_ops.flash_dmattn_varlen_func(*packed, *offsets, 40, 60, **conditions)
    torch.testing.assert_close(outs.view(2, 40, 1, 4), expected)


def test_parts_far_along_a_band_are_parts_of_the_dense_one():
    length = (1 << 30) - 1
    end = torch.full((1, 1, 50), length, dtype=torch.int32)
    for conditions in (
        {"window_size": (1 << 30, None), "causal_from": length},
        {"is_causal": True, "causal_from": 20 - length},
    ):
        made = prepare_mask(intervals=(None, end), seqlen_q=length, **conditions)
        for first in (0, 25, length // 2, length - 40):
            part = made.queries(first, first + 40).keys(10, 50).queries(5, 40)
            rows = torch.arange(first + 5, first + 40)[:, None]
            distance = torch.arange(10, 50) - rows - conditions["causal_from"]
            left = conditions.get("window_size", (1 << 40,))[0]
            expected = (distance >= -left) & (distance <= 0 if "is_causal" in conditions else True)
            assert torch.equal(part.to_dense()[0, 0], expected), (conditions, first)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_and_copies_of_a_mask_compile_as_one_graph(kind: str):
    made, _ = KINDS[kind](**BANDS["window"])

    def cut(mask: TileMask, stop: int) -> list[Tensor]:
        parts = (mask.queries(3, stop), mask.keys(3, stop), mask.keys(0, stop).queries(2, stop), mask.batch(0, 1))
        return [part.to_dense() for part in (*parts, mask.heads(0, 1), mask.clone(), mask.to("cpu"))]

    torch._dynamo.reset()
    compiled = torch.compile(cut, fullgraph=True, dynamic=True, backend="aot_eager")
    for stop in (100, 150):
        for part, expected in zip(compiled(made, stop), cut(made, stop), strict=True):
            assert torch.equal(part, expected)


def call_with_joined_masks(device: str) -> list[Tensor]:
    """Call with masks whose values the CPU reads where it can."""
    ends = (
        torch.zeros(2, 1, 40, dtype=torch.int32, device=device),
        torch.ones(2, 1, 40, dtype=torch.int32, device=device),
    )
    ids = torch.zeros(1, 40, dtype=torch.int64, device=device)
    query, offsets = torch.zeros(2, 40, 1, 4, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    joined = (
        prepare_mask(intervals=ends, documents=ids, at_most=40),
        prepare_mask(ids, intervals=ends, at_most=40, seqlen_q=40),
        dynamic_mask(torch.zeros(2, 1, 40, device=device), 3, documents=ids),
    )
    packed = dmattn_ops.flash_dmattn_varlen_func(*[query[0]] * 3, offsets, offsets, 40, 40, dropout_p=0.5)
    return [*(dmattn_ops.flash_dmattn_func(query, query, query, mask) for mask in joined), packed]


def test_shapes_alone_are_computed_on_the_meta_device_and_of_fakes():
    shapes = [torch.Size((2, 40, 1, 4))] * 3 + [torch.Size((40, 1, 4))]
    with FakeTensorMode():
        fakes = call_with_joined_masks("cpu")
    for outs in (call_with_joined_masks("meta"), fakes):
        assert [out.shape for out in outs] == shapes


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_masks_are_made_in_batches_of_vmap():
    ids, (start, end) = torch.randint(0, 2, (3, 1, 40)).sort(-1).values, random_ends(3, 1, 2, 40, queries=40)
    scores = torch.randn(3, 1, 2, 40)

    def joined(ids: Tensor, start: Tensor, end: Tensor, scores: Tensor) -> Tensor:
        made = prepare_mask(intervals=(start, end), documents=ids, at_most=40)
        return made.to_dense() & dynamic_mask(scores, 5, documents=ids).to_dense()

    batch = torch.vmap(joined)(ids, start, end, scores)
    for number, dense in enumerate(batch):
        assert torch.equal(dense, joined(ids[number], start[number], end[number], scores[number]))


def test_the_rows_of_a_dynamic_mask_compile_as_one_graph():
    def rows(scores: Tensor) -> Tensor:
        seqlen = scores.shape[-1]
        return dynamic_mask(scores, 5, queries=(seqlen // 2, seqlen)).to_dense()

    torch._dynamo.reset()
    compiled = torch.compile(rows, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen in (70, 200):
        scores = torch.randn(2, 3, seqlen)
        assert torch.equal(compiled(scores), dynamic_mask(scores, 5).to_dense()[:, :, seqlen // 2 :])


@pytest.mark.parametrize("kind", KINDS)
def test_attention_under_a_part_is_a_part_of_attention(kind: str):
    made, _ = KINDS[kind](**BANDS["causal from the top"])
    _, _, queries, keys = made.shape
    query, key = torch.randn(BATCH, queries, HEADS, 8), torch.randn(BATCH, keys, HEADS, 8)
    whole = dmattn_ops.flash_dmattn_func(query, key, key, made)
    chunks = [made.queries(start, min(start + 70, queries)) for start in range(0, queries, 70)]
    outs = [
        dmattn_ops.flash_dmattn_func(rows, key, key, chunk)
        for rows, chunk in zip(query.split(70, 1), chunks, strict=True)
    ]
    torch.testing.assert_close(torch.cat(outs, 1), whole)
    one = dmattn_ops.flash_dmattn_func(query[1:], key[1:], key[1:], made.batch(1, 2) if made.shape[0] > 1 else made)
    torch.testing.assert_close(one, whole[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_adds_its_band_to_every_kind(kind: str):
    made, _ = KINDS[kind](**BANDS["window"])
    queries, keys = made.shape[2:]
    added = made.also(Band(-100, 5, True))
    expected = made.to_dense() & band_of(queries, keys, window_size=(100, 5))
    assert torch.equal(added.to_dense(), expected)
    query, key = torch.randn(BATCH, queries, HEADS, 8), torch.randn(BATCH, keys, HEADS, 8)
    asked = dmattn_ops.flash_dmattn_func(query, key, key, made, window_size=(100, 5))
    torch.testing.assert_close(asked, dmattn_ops.flash_dmattn_func(query, key, key, expected))


def tensors_of(mask: TileMask) -> list[Tensor]:
    """Return the tensors that a mask holds, but for those without elements."""
    held = [getattr(mask, name) for name in taken_apart.TENSORS]
    return [part for part in held if part is not None and part.numel()]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_files_and_trees_hold_the_same_mask(kind: str):
    made, _ = KINDS[kind](**BANDS["causal"])
    file = io.BytesIO()
    torch.save({"mask": made}, file)
    file.seek(0)
    leaves, spec = pytree.tree_flatten(made)
    again = {
        "copy": copy.copy(made),
        "deep copy": copy.deepcopy(made),
        "pickle": pickle.loads(pickle.dumps(made)),
        "file": torch.load(file, weights_only=True)["mask"],
        "tree": pytree.tree_unflatten(leaves, spec),
        "clone": made.clone(),
        "device": made.to("cpu"),
    }
    for name, other in again.items():
        assert isinstance(other, TileMask), name
        assert repr(other) == repr(made), name
        assert torch.equal(other.to_dense(), made.to_dense()), name
        shared = {t.data_ptr() for t in tensors_of(other)} & {t.data_ptr() for t in tensors_of(made)}
        assert bool(shared) == (name in ("copy", "tree", "device")), name


def test_a_saved_mask_loads_in_a_process_that_imported_the_library(tmp_path):
    made, _ = hidden(**BANDS["diagonal"])
    torch.save((made, made.to_dense()), tmp_path / "mask.pt")
    code = "import sys, torch, dmattn_ops; mask, dense = torch.load(sys.argv[1]); assert torch.equal(mask.to_dense(), dense)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "mask.pt")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_moves_to_another_device_whole(kind: str):
    made, _ = KINDS[kind]()
    moved = made.to("meta")
    assert moved.device.type == "meta" and moved.shape == made.shape and moved.nbytes == made.nbytes
    assert all(part is None or part.is_meta for part in moved.mask[:-1])
    assert made.to(torch.device("cpu"), non_blocking=True).device.type == "cpu"
    with pytest.raises(TypeError, match=r"to\(\)"):  # a mask has no floating-point numbers that a dtype could be for
        made.to(torch.float16)


@pytest.mark.parametrize("kind", KINDS)
def test_density_and_nbytes_are_exact(kind: str):
    made, _ = KINDS[kind](**BANDS["causal"])
    assert made.nbytes == sum(part.numel() * 4 for part in tensors_of(made))
    dense = torch.nn.functional.pad(made.to_dense(), (0, -made.shape[3] % 128, 0, -made.shape[2] % 128))
    batch, heads, rows, columns = dense.shape
    tiles = dense.view(batch, heads, rows // 128, 128, columns // 128, 128).any(-1).any(3)
    visited = made.density()
    assert visited.dtype == torch.float32 and visited.shape == ()
    least = tiles.float().mean()
    if made.kind == "bits":
        assert visited == least
    assert least <= visited <= 1


def test_intervals_take_linear_memory_of_their_own():
    start, end = random_ends(1, 2, 5000)
    made = prepare_mask(intervals=(start, end), seqlen_q=5000, window_size=(100, 0))
    assert made.nbytes == 2 * 2 * 5000 * 4
    dense = made.to_dense()
    start.fill_(7)
    assert torch.equal(made.to_dense(), dense)


def test_ends_of_intervals_broadcast_to_each_other():
    start, end = random_ends(BATCH, 1, SK)[0], random_ends(1, HEADS, SK)[1]
    made = prepare_mask(intervals=(start, end), seqlen_q=SQ)
    assert torch.equal(made.to_dense(), shown(*torch.broadcast_tensors(start, end), SQ))


def test_heads_of_keys_beside_heads_of_queries_say_the_same_to_all_of_their_queries():
    for heads, others in ((4, 2), (2, 4), (4, 1), (1, 4), (6, 3)):
        ends, gap = random_ends(BATCH, heads, SK), random_ends(1, others, SK)
        most = max(heads, others)
        whole = [tuple(end.repeat_interleave(most // end.shape[1], 1) for end in pair) for pair in (ends, gap)]
        made = prepare_mask(intervals=ends, hidden=gap, seqlen_q=SQ, is_causal=True)
        expected = shown(*whole[0], SQ) & ~shown(*whole[1], SQ) & band_of(SQ, SK, is_causal=True)
        assert made.kind == "intervals" and torch.equal(made.to_dense(), expected)
    with pytest.raises(ValueError, match=r"from_ of hidden must have shape \(2 or 1, 3 or 1, 310\), got \(1, 2, 310\)"):
        prepare_mask(intervals=random_ends(BATCH, 3, SK), hidden=random_ends(1, 2, SK), seqlen_q=SQ)


def test_files_of_older_versions_load() -> None:
    """They name the class by the module that it was in."""
    mask = prepare_mask(torch.ones(1, 1, 4, 4, dtype=torch.bool), is_causal=True)
    written, old = io.BytesIO(), io.BytesIO()
    torch.save(mask, written)
    renamed = 0
    with zipfile.ZipFile(written) as new, zipfile.ZipFile(old, "w") as copy:
        for entry in new.infolist():
            data = new.read(entry)
            renamed += data.count(b"cdmattn_ops.masks.tile_mask\nTileMask")
            copy.writestr(
                entry, data.replace(b"cdmattn_ops.masks.tile_mask\nTileMask", b"cdmattn_ops.tile_mask\nTileMask")
            )
    assert renamed == 1
    for weights_only in (True, False):
        loaded = torch.load(io.BytesIO(old.getvalue()), weights_only=weights_only)
        assert torch.equal(loaded.to_dense(), mask.to_dense())

"""`TileMask` of intervals beside documents and masks, promises, diagonals of chunks, and densities."""

from __future__ import annotations

import pytest
import torch

import dmattn_ops
from dmattn_ops import dynamic_mask, prepare_mask
from tests.masks.test_tile_mask import BANDS, band_of, random_ends, random_keep, shown
from tests.support.far_away import values_out_of_reach

BATCH, HEADS, SQ, SK = 2, 3, 190, 310


@pytest.mark.parametrize("sorted_ids", [True, False])
def test_documents_beside_intervals_stay_intervals_where_each_is_one_run(sorted_ids: bool):
    ids = torch.randint(0, 5, (BATCH, SK))
    ids = ids.sort(-1).values if sorted_ids else ids
    ends = random_ends(1, HEADS, SK, queries=SK)
    made = prepare_mask(intervals=ends, documents=ids, is_causal=True)
    assert made.kind == ("intervals" if sorted_ids else "bits")
    same = ids[:, None, :, None] == ids[:, None, None]
    assert torch.equal(made.to_dense(), shown(*ends, SK) & same & band_of(SK, SK, is_causal=True))
    assert torch.equal(made.batch(1, 2).queries(3, 200).to_dense(), made.to_dense()[1:, :, 3:200])


@pytest.mark.parametrize("promised", [False, True])
def test_documents_beside_intervals_show_the_same_where_nobody_reads_their_ids(promised: bool):
    ids = torch.randint(0, 5, (BATCH, SK)).sort(-1).values
    ends, gap = random_ends(1, HEADS, SK, queries=SK), random_ends(1, HEADS, SK, queries=SK)
    at_most = SK if promised else None
    near = prepare_mask(intervals=ends, hidden=gap, documents=ids, at_most=at_most, is_causal=True)
    with values_out_of_reach():
        far = prepare_mask(intervals=ends, hidden=gap, documents=ids, at_most=at_most, is_causal=True)
    assert (near.kind, far.kind, far.at_most) == ("intervals", "bits", at_most)
    assert torch.equal(far.to_dense(), near.to_dense())


def test_a_mask_beside_intervals_makes_bits_of_both():
    ends, keep = random_ends(BATCH, 4, SK), random_keep(1, 2, SQ, SK)  # heads of keys beside those of queries
    made = prepare_mask(keep, intervals=ends, is_causal=True)
    expected = shown(*ends, SQ) & keep.repeat_interleave(2, 1) & band_of(SQ, SK, is_causal=True)
    assert made.kind == "bits" and torch.equal(made.to_dense(), expected)
    alone = prepare_mask(random_keep(BATCH, SK), intervals=ends, seqlen_q=SQ)
    assert alone.shape == (BATCH, 4, SQ, SK)


@pytest.mark.parametrize("band", ["", "causal", "window"])
def test_a_broken_promise_raises_on_the_cpu_and_a_kept_one_does_not(band: str):
    start, end = random_ends(1, 2, SK)
    gap = random_ends(1, 2, SK)
    for hidden_ends in (None, gap):
        made = prepare_mask(intervals=(start, end), hidden=hidden_ends, seqlen_q=SQ, **BANDS[band])
        most = int(made.to_dense().sum(-1).max())
        query, key = torch.randn(1, SQ, 2, 8), torch.randn(1, SK, 2, 8)
        for at_most in (most, most - 1):
            promised = prepare_mask(
                intervals=(start, end), hidden=hidden_ends, at_most=at_most, seqlen_q=SQ, **BANDS[band]
            )
            if at_most == most:
                out = dmattn_ops.flash_dmattn_func(query, key, key, promised)
                assert torch.equal(out, dmattn_ops.flash_dmattn_func(query, key, key, made))
                continue
            words = f"at_most must be at least the most keys that a query sees, {most}, got {at_most}"
            with pytest.raises(ValueError, match=words):
                dmattn_ops.flash_dmattn_func(query, key, key, promised)


@pytest.mark.parametrize("causal_from", [0, 120, -17, 500, -300])
def test_the_diagonal_may_be_given_as_a_number(causal_from: int):
    keep = random_keep(1, 1, SQ, SK)
    query, key = torch.randn(1, SQ, 2, 8), torch.randn(1, SK, 2, 8)
    call = {"is_causal": True, "causal_from": causal_from, "window_size": (60, None)}
    expected = keep & band_of(SQ, SK, **call)
    assert torch.equal(prepare_mask(keep, **call).to_dense(), expected)
    out = dmattn_ops.flash_dmattn_func(query, key, key, keep, **call)
    torch.testing.assert_close(out, dmattn_ops.flash_dmattn_func(query, key, key, expected))
    if causal_from in (0, SK - SQ):
        name = "top_left" if causal_from == 0 else "bottom_right"
        assert torch.equal(dmattn_ops.flash_dmattn_func(query, key, key, keep, **{**call, "causal_from": name}), out)


def test_a_chunk_that_is_causal_at_its_call_is_given_its_own_diagonal():
    keep = random_keep(1, 1, SK, SK)
    query = torch.randn(1, SK, 2, 8)
    made = prepare_mask(keep)
    whole = dmattn_ops.flash_dmattn_func(query, query, query, made, is_causal=True)
    for start in range(0, SK, 100):
        rows = slice(start, min(start + 100, SK))
        out = dmattn_ops.flash_dmattn_func(
            query[:, rows], query, query, made.queries(rows.start, rows.stop), is_causal=True, causal_from=start
        )
        torch.testing.assert_close(out, whole[:, rows])


def test_any_int32_may_be_an_end_of_parts():
    least, most = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    ends = torch.tensor([least, -1, 0, 15, most], dtype=torch.int32)
    start, end, hidden_from, hidden_to = (
        every.reshape(1, 1, -1) for every in torch.meshgrid(ends, ends, ends, ends, indexing="ij")
    )
    made = dmattn_ops.prepare_mask(intervals=(start, end), hidden=(hidden_from, hidden_to), seqlen_q=30)
    assert torch.equal(made.queries(10, 20).to_dense(), made.to_dense()[:, :, 10:20])
    assert torch.equal(made.queries(10, 20).keys(7, 600).to_dense(), made.to_dense()[:, :, 10:20, 7:600])


def test_the_density_of_a_mask_without_pairs_is_zero():
    nothing = torch.zeros(2, 1, 0, dtype=torch.int32)
    ends = torch.zeros(2, 1, 5, dtype=torch.int32)
    without_pairs = (
        prepare_mask(intervals=(nothing, nothing), seqlen_q=4),
        prepare_mask(intervals=(ends, ends), seqlen_q=0),
        dynamic_mask(torch.zeros(0, 1, 5), 2),
        prepare_mask(torch.ones(2, 1, 4, 0, dtype=torch.bool)),
        prepare_mask(documents=torch.zeros(1, 0, dtype=torch.int64)),
    )
    assert [mask.density().item() for mask in without_pairs] == [0.0] * len(without_pairs)


def test_a_mask_for_any_batch_is_itself_for_each_range_and_refuses_what_is_none():
    made = prepare_mask(torch.rand(1, 1, SQ, SK) < 0.5)
    assert made.batch(3, 7) is made and made.heads(0, 0) is made
    for start, stop, error in ((2, 1, ValueError), (-1, 1, ValueError), ("a", 1, TypeError), (0, 1.5, TypeError)):
        for part in (made.batch, made.heads):
            with pytest.raises(error, match=r"batch|heads"):
                part(start, stop)

"""`prepare_mask(intervals=(None, end))`: keys that begin where a causal condition or a window lets them."""

import torch

from dmattn_ops import dynamic_mask, prepare_mask

BATCH, HEADS, S = 2, 3, 310
ROWS, KEYS = torch.arange(S)[:, None], torch.arange(S)[None, :]


def draw_end(*shape):
    return torch.randint(-5, S + 5, (*shape, S), dtype=torch.int32)


def shown(end):
    """Return which queries see each key by its end, bool `[.., S, S]`."""
    return end[..., None, :] > ROWS


def test_a_window_says_where_they_begin():
    end = draw_end(1, HEADS)
    made = prepare_mask(intervals=(None, end), seqlen_q=S, window_size=(50, 20))
    assert made.kind == "intervals" and made.start is None and made.nbytes == end.nbytes
    assert torch.equal(made.to_dense(), shown(end) & (KEYS >= ROWS - 50) & (KEYS <= ROWS + 20))


def test_documents_and_masks_beside_them_hold_as_well():
    ids, end = torch.randint(0, 5, (BATCH, S)).sort(-1).values, draw_end(1, HEADS)
    made = prepare_mask(intervals=(None, end), documents=ids)
    assert made.kind == "intervals"
    assert torch.equal(made.to_dense(), shown(end) & (ids[:, None, :, None] == ids[:, None, None]))
    keep = torch.rand(BATCH, 1, S, S) < 0.6
    assert torch.equal(prepare_mask(keep, intervals=(None, end)).to_dense(), shown(end) & keep)


def test_a_hidden_interval_is_taken_out():
    end, (first, last) = draw_end(1, HEADS), (draw_end(BATCH, 1), draw_end(BATCH, 1))
    made = prepare_mask(intervals=(None, end), hidden=(first, last), seqlen_q=S)
    gap = (first[..., None, :] <= ROWS) & (last[..., None, :] > ROWS)
    assert torch.equal(made.to_dense(), shown(end) & ~gap)


def test_under_a_causal_condition_they_are_what_a_dynamic_mask_is():
    best = dynamic_mask(torch.randn(1, 2, S), 40)
    made = prepare_mask(intervals=(None, best.end), at_most=40, seqlen_q=S, is_causal=True)
    assert made.start is None and best.start is None
    assert torch.equal(made.to_dense(), best.to_dense())

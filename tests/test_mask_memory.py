"""The memory that a mask holds is its own: neither the caller's nor that of a mask it is a part of."""

import pickle

import torch

import dmattn_ops


def test_intervals_made_in_a_graph_are_no_memory_of_the_caller():
    def made_and_changed(start, end):
        mask = dmattn_ops.prepare_mask(intervals=(start, end), hidden=(start, start), seqlen_q=6)
        start.fill_(6)
        return mask

    start, end = torch.zeros(1, 1, 6, dtype=torch.int32), torch.full((1, 1, 6), 6, dtype=torch.int32)
    mask = torch.compile(made_and_changed, fullgraph=True, backend="aot_eager")(start, end)
    end.zero_()
    assert start.eq(6).all() and mask.to_dense().all()


def test_a_part_keeps_no_memory_of_the_whole():
    documents = dmattn_ops.prepare_mask(documents=torch.zeros(1, 5000, dtype=torch.int32), window_size=(4, 0))
    chosen = dmattn_ops.dynamic_mask(torch.randn(4, 1, 5000), 8)
    wide = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 5000, dtype=torch.int64)
    for mask in (
        documents.queries(4999, 5000).keys(4995, 5000), chosen.batch(0, 1), chosen.batch(0, 1).keys(0, 8),
        dmattn_ops.prepare_mask(documents=wide, window_size=(0, 0)),
    ):  # fmt: skip
        assert len(pickle.dumps(mask)) < mask.nbytes + 4000

"""The memory that a mask holds is its own: neither the caller's nor that of a mask it is a part of."""

import pickle
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import dmattn_ops
from dmattn_ops.dispatch import operators


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


class Largest(TorchDispatchMode):
    """Notes the most bytes that a tensor takes while masks are prepared, inside of the library's operators too."""

    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = getattr(function, "_opname", "")
        opaque = function.namespace == "dmattn" and name in ("pack_intervals", "rank_ids", "spread_lists")
        if opaque:
            with self:
                made = getattr(operators, name)(*arguments, **(keywords or {}))
        else:
            made = function(*arguments, **(keywords or {}))
        given, new = (
            [part for part in pytree.tree_leaves(each) if isinstance(part, torch.Tensor)] for each in (arguments, made)
        )
        old = {part.untyped_storage().data_ptr() for part in given}  # a view takes no memory
        sizes = [part.untyped_storage().nbytes() for part in new if part.untyped_storage().data_ptr() not in old]
        self.nbytes = max(self.nbytes, *sizes, 0)
        return made


def test_preparing_intervals_beside_others_takes_little_more_than_their_bits():
    seqlen = 6000
    start = torch.randint(0, seqlen, (1, 1, seqlen), dtype=torch.int32)
    ids, padding = (torch.arange(seqlen) % 3)[None], (torch.arange(seqlen) % 5 > 0)[None]
    hidden = start + 10, start + 20
    for beside in (
        {"documents": ids}, {"mask": padding}, {"mask": padding, "documents": ids}, {"mask": padding[:, None, None]},
        {"mask": torch.ones(1, 1, seqlen, seqlen, dtype=torch.bool), "hidden": hidden},
    ):  # fmt: skip
        with Largest() as largest:
            mask = dmattn_ops.prepare_mask(intervals=(start, start + 99), seqlen_q=seqlen, is_causal=True, **beside)
        assert mask.kind == "bits"
        most = max(mask.row_bits.nbytes, 1 << 24)  # a chunk of pairs, a byte each, but no number of each pair
        assert 1 << 23 < largest.nbytes <= 1.1 * most, (list(beside), largest.nbytes, mask.nbytes)


def test_the_band_of_all_pairs_takes_a_byte_of_each():
    with Largest() as largest:
        dmattn_ops.masks.layout.band_mask(-5, 5, 3000, 3000, None)
    assert largest.nbytes == 3000 * 3000

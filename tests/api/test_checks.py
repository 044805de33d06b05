"""What `DMATTN_CHECK=1` refuses on a GPU. The checks are of torch operations, so that they are tested on the CPU too."""

from dataclasses import replace

import pytest
import torch

import dmattn_ops
from dmattn_ops import environment
from dmattn_ops.checks import values
from dmattn_ops.launching import plans
from dmattn_ops.masks import layout


def lists():
    """Return lists of 3 rows of up to 4 of 5 tiles: of one partial and one full tile, of a full one, and of none."""
    records = torch.full((1, 1, 3, 8), 77, dtype=torch.int32)
    records[..., :4] = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 0], [2, 0, 0, 0]], dtype=torch.int32)
    records[0, 0, 0, 4:6] = torch.tensor([4, 2])
    records[0, 0, 1, 4] = 0
    return records


def test_lists_of_tiles_that_exist_are_taken_and_what_is_behind_them_is_not_read():
    values.lists("row_tiles", lists(), 5)


@pytest.mark.parametrize(
    "place, value, message",
    [
        ((0, 0, 0, 0), 1, "word 0 of the records of row_tiles must name each of 3 rows once"),
        ((0, 0, 2, 0), 3, "word 0 of the records of row_tiles must name each of 3 rows once"),
        ((0, 0, 1, 1), -1, "each record of row_tiles must list between 0 and 4 tiles"),
        ((0, 0, 1, 2), 5, "each record of row_tiles must list between 0 and 4 tiles"),
        ((0, 0, 0, 2), 2**31 - 1, "each record of row_tiles must list between 0 and 4 tiles"),
        ((0, 0, 0, 4), 5, "row_tiles must list tiles from 0 to 4"),
        ((0, 0, 0, 5), -1, "row_tiles must list tiles from 0 to 4"),
    ],
)
def test_a_list_with_one_wrong_number_is_refused(place, value, message):
    records = lists()
    records[place] = value
    with pytest.raises(ValueError, match=message):
        values.lists("row_tiles", records, 5)


def test_lists_made_from_a_mask_pass_their_own_check():
    classes = torch.randint(0, 3, (2, 3, 6, 5), generator=torch.Generator().manual_seed(0))
    values.lists("row_tiles", layout.lists_from_classes(classes, 6, 5), 5)


def test_calls_on_a_gpu_are_computed_in_full_while_each_is_checked(monkeypatch):
    class OnGpu:
        is_cuda = True

    monkeypatch.delenv(environment.CHECK, raising=False)
    assert plans.may_repeat(OnGpu())
    monkeypatch.setenv(environment.CHECK, "1")
    assert not plans.may_repeat(OnGpu())


def test_a_plan_does_not_repeat_a_call_that_another_file_is_to_record(monkeypatch):
    query = torch.zeros(1, 2, 1, 16)
    monkeypatch.delenv(environment.RECORD, raising=False)
    before = plans.key("forward", (query,), ())
    monkeypatch.setenv(environment.RECORD, "shapes.jsonl")
    assert plans.key("forward", (query,), ()) != before


@pytest.mark.gpu
def test_a_gpu_refuses_wrong_lists_and_broken_promises_when_it_is_told_to_check(monkeypatch):
    from dmattn_ops import dynamic_mask, flash_dmattn_func, prepare_mask

    monkeypatch.setenv(environment.CHECK, "1")
    query = torch.randn(1, 512, 2, 64, device="cuda", dtype=torch.bfloat16)
    mask = prepare_mask(torch.rand(1, 1, 512, 512, device="cuda") < 0.5)
    flash_dmattn_func(query, query, query, mask)
    wrong = mask.row_tiles.clone()
    wrong[0, 0, 0, 4] = 9
    with pytest.raises(ValueError, match="row_tiles must list tiles from 0 to 3"):
        flash_dmattn_func(query, query, query, replace(mask, row_tiles=wrong))
    kept = dynamic_mask(torch.randn(1, 1, 512, device="cuda"), keep=64)
    flash_dmattn_func(query, query, query, kept, is_causal=True)
    with pytest.raises(ValueError, match="at_most must be at least the most keys that a query sees"):
        flash_dmattn_func(query, query, query, replace(kept, at_most=63), is_causal=True)


def test_a_call_where_another_attention_shares_the_sequence_is_refused_in_words():
    def elsewhere(*arguments):
        raise AssertionError("not called")

    elsewhere.__module__ = "torch.distributed.tensor.experimental._context_parallel"
    query, functional = torch.randn(1, 4, 2, 8), torch.nn.functional
    before, functional.scaled_dot_product_attention = functional.scaled_dot_product_attention, elsewhere
    try:
        with pytest.raises(RuntimeError, match="attend to this rank's part of the sequence only: call"):
            dmattn_ops.flash_dmattn_func(query, query, query)
    finally:
        functional.scaled_dot_product_attention = before
    dmattn_ops.flash_dmattn_func(query, query, query)

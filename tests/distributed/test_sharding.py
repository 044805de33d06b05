"""DTensors: every kind of call, split over sequences and heads, equals the call on one device."""

from collections.abc import Iterator

import pytest
import ranks
import sharding_cases as cases
import torch
from sharding_cases import BESIDE, Case
from torch.distributed.tensor import Partial, Replicate, Shard

CLOSE = 2e-5  # of the largest element: float32 on both sides, sums in another order
KINDS = ["plain", "window", *BESIDE]


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[ranks.Ranks]:
    """Four processes, for meshes of two dimensions."""
    with ranks.Ranks(4) as processes:
        yield processes


def equal_to_one_device(processes, case, *sizes, limit=ranks.LIMIT):
    """Check all tensors of a case on all ranks; return their placements."""
    for report in processes(cases.compare, case, *sizes, limit=limit):
        assert max(report.errors.values()) < CLOSE, report
    return report.placements


@pytest.mark.parametrize("split", ["batch", "heads", "none", "length"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_on_dtensors_equals_one_on_one_device(two_ranks, kind, split):
    placements = equal_to_one_device(two_ranks, Case(kind, [split]))
    packed = kind.startswith("packed sequences")
    stays = {"heads": Shard(1 if packed else 2), "none": Replicate(), "batch": Replicate() if packed else Shard(0)}
    if split in stays:
        assert placements["out"] == (stays[split],)


@pytest.mark.parametrize("split", ["batch", "heads", "none"])
@pytest.mark.parametrize("kind", [kind for kind, beside in BESIDE.items() if {"start", "documents"} & set(beside)])
def test_masks_of_dtensors_whose_values_nobody_reads_equal_one_device(two_ranks, kind, split):
    equal_to_one_device(two_ranks, Case(kind, [split], far=True))


@pytest.mark.parametrize("split", ["batch", "heads"])
def test_gradients_of_what_all_ranks_share_are_parts_of_a_sum(two_ranks, split):
    placements = equal_to_one_device(two_ranks, Case("bias for all", [split]))
    assert placements["dbias"] == (Partial(),)
    placements = equal_to_one_device(two_ranks, Case("sink", [split]))
    assert placements["dsink"] == ((Partial() if split == "batch" else Shard(0)),)


@pytest.mark.parametrize(("heads", "heads_kv"), [(6, 3), (3, 3), (5, 5), (9, 3), (3, 1)])
def test_heads_that_do_not_divide_are_redistributed(two_ranks, heads, heads_kv):
    for kind in ("plain", "mask of keys", "bias for all sequences"):
        placements = equal_to_one_device(two_ranks, Case(kind, ["heads"], heads=heads, heads_kv=heads_kv))
        assert Shard(2) not in placements["out"]


def test_one_key_head_is_shared_by_the_ranks_that_split_the_query_heads(two_ranks):
    case = Case("plain", ["heads"], heads_kv=1, apart={"key": ["none"], "value": ["none"]})
    placements = equal_to_one_device(two_ranks, case)
    assert placements["out"] == (Shard(2),)
    assert placements["dkey"] == placements["dvalue"] == (Partial(),)
    equal_to_one_device(two_ranks, case._replace(kind="dense mask"))
    equal_to_one_device(two_ranks, Case("bias for all heads", ["heads"], heads_kv=1))  # key is split to no purpose


@pytest.mark.parametrize(
    "apart",
    [
        {"key": ["none"], "value": ["none"]},
        {"key": ["batch"]},
        {"query": ["length"], "value": ["none"]},
        {"grad_out": ["batch"], "grad_lse": ["none"]},
        {"bias": ["none"]},
    ],
    ids=str,
)
def test_tensors_that_are_split_in_different_ways_are_redistributed(two_ranks, apart):
    equal_to_one_device(two_ranks, Case("bias of keys", ["heads"], apart=apart))


@pytest.mark.parametrize("batch", [3, 1])
@pytest.mark.parametrize("kind", ["mask of keys", "dynamic mask", "intervals in documents", "dropout", "bias for all"])
def test_batches_that_do_not_divide_are_right(two_ranks, kind, batch):
    equal_to_one_device(two_ranks, Case(kind, ["batch"], batch=batch))


@pytest.mark.parametrize("kind", ["mask of keys", "bias for all", "dropout"])
def test_a_mesh_of_two_dimensions(four_ranks, kind):
    placements = equal_to_one_device(four_ranks, Case(kind, ["batch", "heads"]), 2, 2)
    assert placements["out"] == (Shard(0), Shard(2))
    placements = equal_to_one_device(four_ranks, Case(kind, ["heads", "heads"], heads=8, heads_kv=4), 2, 2)
    assert placements["out"] == (Shard(2), Shard(2))
    equal_to_one_device(four_ranks, Case(kind, ["heads", "heads"], heads=12, heads_kv=6), 2, 2)
    equal_to_one_device(four_ranks, Case(kind, ["heads"], heads=8, heads_kv=2))
    equal_to_one_device(four_ranks, Case(kind, ["batch"], batch=5))  # the last rank has no sequence


@pytest.mark.parametrize("kind", ["dynamic mask", "dropout", "prepared mask", "bias for all"])
@pytest.mark.parametrize("split", ["heads", "batch"])
def test_compiled_calls_equal_one_device(two_ranks, kind, split):
    equal_to_one_device(two_ranks, Case(kind, [split], compiled="aot_eager"), limit=240.0)


def test_inductor_compiles_calls_on_dtensors(two_ranks):
    equal_to_one_device(two_ranks, Case("dynamic mask", ["heads"], compiled="inductor"), limit=240.0)


def test_gradients_of_out_may_arrive_replicated_or_as_parts_of_a_sum(two_ranks):
    assert max(two_ranks(cases.gradients_that_arrive_otherwise)) < CLOSE


def test_ranks_agree_on_dropout_where_their_generators_differ(two_ranks):
    first, second = two_ranks(cases.dropout_where_generators_differ)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    by_head = first[1][0].unbind(1)
    assert not any(torch.equal(by_head[0], other) for other in by_head[1:])
    assert not torch.equal(first[2], second[2])  # the generators are still those of the ranks


@pytest.mark.parametrize("prepared", [False, True])
def test_a_plain_mask_beside_dtensors_is_refused_on_every_rank(two_ranks, prepared):
    failures = two_ranks.failures(cases.plain_mask, prepared)
    assert {failure.kind for failure in failures} == {"TypeError"}
    assert len({failure.message for failure in failures}) == 1
    assert "query, key, value are DTensors, but mask is a plain tensor" in failures[0].message
    assert "DTensor.from_local(tensor, query.device_mesh, [Replicate()])" in failures[0].message


def test_a_sharded_mask_beside_plain_tensors_is_refused(two_ranks):
    failures = two_ranks.failures(cases.sharded_mask_beside_plain_tensors)
    assert {failure.kind for failure in failures} == {"TypeError"}
    assert "mask is a DTensor, but query, key, value are plain tensors" in failures[0].message


def test_a_plain_mask_is_taken_where_torch_is_told_to_replicate_it(two_ranks):
    assert max(two_ranks(cases.plain_mask_replicated_implicitly)) < CLOSE


def test_operators_take_dtensors_and_seeds_of_any_shape(two_ranks):
    assert all(max(errors) < CLOSE for errors in two_ranks(cases.operators_called_directly))


def test_masks_of_dtensors_are_those_of_one_device(two_ranks):
    for found in two_ranks(cases.masks_of_dtensors):
        assert len(found) == 24 and all(found)


def test_chosen_blocks_and_masses_of_dtensors_are_those_of_one_device(two_ranks):
    for found in two_ranks(cases.chosen_blocks_of_dtensors):
        assert len(found) == 60 and max(found) < CLOSE

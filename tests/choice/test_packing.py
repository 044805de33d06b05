"""What is decided about packing from sizes alone."""

from __future__ import annotations

import pytest

from dmattn_ops.call import UNBOUNDED
from dmattn_ops.choice.epochs import (
    LEAST_EPOCH,
    Sizes,
    dense_cost,
    epoch_length,
    epochs,
    heads_per_pass,
    packed_cost,
    pays,
    refusals,
)


def causal(seqlen: int, at_most: int, heads: int = 32, packed_heads: int = 8, batch: int = 1) -> Sizes:
    return Sizes(batch, heads, packed_heads, seqlen, seqlen, at_most, -UNBOUNDED, 0)


def test_an_epoch_is_about_as_long_as_what_is_kept():
    assert epoch_length(32768, 32768, 1000, 0, group=4) == 1024
    assert epoch_length(32768, 32768, 1024, 0, group=1) == 2048
    assert epoch_length(32768, 32768, 16384, 0, group=1) == 16384
    assert epoch_length(32768, 32768, 1, 0, group=4) == LEAST_EPOCH
    assert epoch_length(700, 700, 600, 0, group=1) == 768  # no longer than all queries
    assert epoch_length(700, 9000, 64, UNBOUNDED, group=4) == 768  # no key is born later: one epoch


@pytest.mark.parametrize("seqlen_q", [0, 1, 127, 128, 1000])
@pytest.mark.parametrize("seqlen_k", [0, 1, 500, 2000])
@pytest.mark.parametrize("at_most", [0, 1, 128, 129, 5000])
@pytest.mark.parametrize("band_hi", [-300, 0, 400, UNBOUNDED])
def test_epochs_have_room_for_all_keys_that_a_promise_allows(seqlen_q, seqlen_k, at_most, band_hi):
    for length in (128, 256, 1024):
        cut = epochs(seqlen_q, seqlen_k, at_most, band_hi, length)
        assert cut.number * length >= seqlen_q > (cut.number - 1) * length
        assert cut.old_slots >= min(at_most, seqlen_k) and cut.slots_per_epoch % 128 == 0
        assert cut.slots == cut.number * (cut.old_slots + cut.born_slots)
        for e in range(cut.number):
            born = range(max(0, e * length + band_hi), max(0, min(seqlen_k, (e + 1) * length + band_hi)))
            assert len(born) <= cut.born_slots <= length


# One H200, 2026-11-26, whole steps with a bias per key as CUDA graphs (benchmarks/results/2026-11-26-nvidia-h200-training.json):
# positions, keys kept, heads, packed heads, ms packed and on keys as they lie, of 16384 positions in all.
TRAINING = [
    (1024, 256, 32, 8, 1.190, 1.399),
    (2048, 256, 32, 8, 1.201, 2.340),
    (2048, 512, 32, 8, 1.579, 2.335),
    (4096, 1024, 32, 8, 2.273, 3.977),
    (8192, 2048, 32, 8, 3.686, 7.392),
    (1024, 256, 16, 16, 0.624, 0.540),
    (2048, 256, 16, 16, 0.643, 0.796),
    (2048, 512, 16, 16, 0.734, 0.802),
    (4096, 1024, 16, 16, 1.003, 1.299),
    (8192, 2048, 16, 16, 1.546, 2.252),
]


@pytest.mark.parametrize(("seqlen", "keep", "heads", "packed_heads", "packed", "lying"), TRAINING)
def test_the_faster_way_is_chosen_where_people_train(seqlen, keep, heads, packed_heads, packed, lying):
    sizes = causal(seqlen, keep, heads, packed_heads, 16384 // seqlen)._replace(biased=True)
    assert pays(sizes) == (packed < lying)


def test_where_two_long_epochs_would_be_left_they_are_shorter():
    assert epoch_length(8192, 8192, 2048, 0, group=1) == 2048
    assert epoch_length(16384, 16384, 2048, 0, group=1) == 4096
    assert epoch_length(4096, 4096, 1024, 0, group=1) == 2048


def test_an_epoch_that_is_no_multiple_of_a_tile_is_refused():
    for length in (0, -128, 100):
        with pytest.raises(ValueError, match=f"got {length}"):
            epochs(1000, 1000, 64, 0, length)


def test_packing_pays_where_far_fewer_keys_are_kept_than_there_are():
    for sizes in (
        causal(8192, 1024),
        causal(32768, 1024),
        causal(32768, 2048),
        causal(32768, 1024, 8),
        causal(1 << 20, 2048),
        causal(32768, 16384),  # half of the keys: a quarter of the pairs is saved
        causal(131072, 65536, 8, 8),
    ):
        assert pays(sizes)
    assert pays(causal(131072, 2048, 4, 1))


def test_packing_does_not_pay_for_what_is_dense_or_short():
    for sizes in (
        causal(8192, 4096),
        causal(32768, 24576),
        causal(1024, 64, 8, 8),
        causal(1024, 128, 32, 32),
        causal(512, 64),
        causal(0, 0),
    ):
        assert not pays(sizes)
    window = causal(32768, 1024)._replace(band_lo=-1500)
    assert not pays(window) and dense_cost(window) < dense_cost(causal(32768, 1024)) / 8


# S, keep, heads and key heads; ms of forward and backward with packed keys and with keys as they lie: one H200, B1 D128 bf16
NEAR_THE_BOUNDARY = (
    (1024, 128, 32, 32, 0.140, 0.151),
    (2048, 128, 8, 8, 0.105, 0.166),
    (2048, 128, 32, 32, 0.221, 0.367),
    (2048, 512, 32, 8, 0.260, 0.432),
    (4096, 512, 8, 8, 0.186, 0.307),
    (4096, 1024, 16, 16, 0.409, 0.540),
    (4096, 1024, 32, 8, 0.589, 0.963),
    (8192, 1024, 2, 2, 0.194, 0.447),
    (8192, 1024, 8, 2, 0.373, 1.381),
    (8192, 2048, 4, 4, 0.383, 0.517),
    (8192, 2048, 8, 8, 0.625, 0.925),
    (8192, 3072, 16, 16, 1.445, 1.680),
    (8192, 3072, 32, 8, 2.269, 3.244),
    (8192, 4096, 32, 32, 2.953, 3.244),
    (16384, 2048, 2, 2, 0.397, 0.929),
    (16384, 4096, 4, 4, 0.955, 1.611),
    (16384, 8192, 32, 32, 10.119, 11.999),
    (32768, 16384, 8, 8, 9.839, 11.674),
    (32768, 16384, 16, 16, 19.039, 23.356),
    (32768, 16384, 32, 8, 37.269, 48.153),
    (32768, 16384, 32, 32, 37.623, 47.455),
)


@pytest.mark.parametrize(("seqlen", "keep", "heads", "kv_heads", "packed", "lying"), NEAR_THE_BOUNDARY)
def test_packing_pays_where_it_was_measured_to_save_a_seventh(seqlen, keep, heads, kv_heads, packed, lying):
    assert pays(causal(seqlen, keep, heads, kv_heads)) == (lying > 1.15 * packed)


def test_the_estimate_is_close_to_what_was_measured():
    # ms of forward and backward on an H200, without finding and copying keys for the packed ones
    measured = (
        (causal(32768, 1024), 43.0, 3.72),
        (causal(32768, 2048), 43.0, 6.60),
        (causal(32768, 1024, 8, 8), 10.6, 0.98),
        (causal(8192, 1024), 2.92, 0.98),
        (causal(131072, 2048, 4, 1), 84.1, 3.25),
    )
    tile = 41e-6
    for sizes, dense, packed in measured:
        assert dense_cost(sizes) * tile == pytest.approx(dense, rel=0.1)
        assert packed < packed_cost(sizes) * tile < 1.4 * packed


def test_costs_grow_with_everything():
    base = causal(8192, 512)
    for name, larger in (("batch", 2), ("heads", 64), ("packed_heads", 32), ("at_most", 1024), ("seqlen_q", 16384)):
        assert packed_cost(base._replace(**{name: larger})) > packed_cost(base)
    assert dense_cost(base._replace(seqlen_k=4096)) < dense_cost(base)


def test_a_pass_has_as_many_heads_as_fit_and_whole_groups():
    row = 128 * 2 * (2 + 4)  # key and value of 128 elements: 2 bytes a copy, 4 bytes a gradient
    assert heads_per_pass(1, 8, 1, 65536, row) == 8
    assert heads_per_pass(1, 8, 1, 2 << 20, row, limit=7 << 30) == 2
    assert heads_per_pass(1, 8, 1, 2 << 20, row) == 1
    assert heads_per_pass(4, 8, 4, 2 << 20, row) == 4
    assert heads_per_pass(1, 32, 4, 1 << 20, row, limit=10 << 30) == 4
    assert heads_per_pass(1, 8, 1, 0, row) == 8


def test_reasons_are_given_for_what_cannot_be_packed():
    def reasons(**changed):
        plain = {"at_most": 64, "from_position": True, "hidden": False, "pairwise": False, "varlen": False}
        return refusals(**(plain | changed))

    assert reasons() == []
    assert "at_most" in reasons(at_most=None)[0]
    for changed in ({"from_position": False}, {"hidden": True}, {"pairwise": True}, {"varlen": True}):
        assert len(reasons(**changed)) == 1
    assert len(reasons(at_most=None, hidden=True, varlen=True)) == 3

"""`explain` says whether the keys of a dynamic mask are packed, how, or why not, from the object that a launch obeys."""

import json

import pytest
import torch

import dmattn_ops
from dmattn_ops.api.explain import explain
from dmattn_ops.call import UNBOUNDED, Call, plain_options
from dmattn_ops.choice import arch, epochs, tuning
from dmattn_ops.dispatch import run

PLACE = "Some GPU"
HEADS, KV_HEADS, DIM = 8, 2, 64


def tensors(seqlen, seqlen_k=None, dtype=torch.bfloat16):
    shapes = ((seqlen, HEADS), (seqlen_k or seqlen, KV_HEADS), (seqlen_k or seqlen, KV_HEADS))
    return [torch.empty(1, length, heads, DIM, dtype=dtype) for length, heads in shapes]


def dynamic(seqlen, keep, heads=KV_HEADS):
    return dmattn_ops.dynamic_mask(torch.randn(1, heads, seqlen), keep)


def launches(seqlen, mask, **keywords):
    found = explain(*tensors(seqlen), mask, arch="9.0", **keywords)
    return found.forward, found.backward


def test_both_directions_say_how_keys_are_packed():
    for launch in launches(8192, dynamic(8192, 512)):
        made = launch.packing.packing
        assert made.epochs == epochs.epochs(8192, 8192, 512, 0, 512)
        expected = "keys are packed in 16 epochs of 512 queries, 1024 slots each, for 2 heads, all at a time"
        meaning = "what the queries of an epoch see is copied side by side into its slots"
        assert str(launch.packing) == f"{expected}: {meaning}"
        assert f"\n    {expected}: {meaning}\n" in str(launch)


def test_heads_that_do_not_fit_a_workspace_are_said_to_take_turns(monkeypatch):
    monkeypatch.setattr(epochs, "WORKSPACE", 1)
    monkeypatch.setattr(epochs.heads_per_pass, "__defaults__", (1,))
    for launch in launches(8192, dynamic(8192, 512)):
        assert "for 2 heads, 1 at a time:" in str(launch.packing)


def test_what_is_shown_is_what_dispatch_gives_the_launcher():
    query, key, value = tensors(8192)
    mask = dynamic(8192, 512)
    options = plain_options(1.0, *mask.band.limits(8192, 8192))
    call = Call(query, key, value, None, mask.mask, None, None, None, options)
    for direction in ("forward", "backward"):
        decided, _ = run.packing_of(direction, call, arch.KNOWN[90])
        shown = getattr(explain(query, key, value, mask, arch="9.0"), direction).packing.packing
        assert shown == decided is not None


def test_each_direction_shows_its_own_decision_and_kernels_are_chosen_for_that_call(monkeypatch):
    seen = {}
    decide, choose = run.packing_of, {way: getattr(run, f"{way}_choice") for way in ("forward", "backward")}

    def packing_of(direction, *arguments):
        made, reasons = decide(direction, *arguments)
        return made._replace(evidence=f"of the {direction}"), reasons

    def choice(direction, call, *arguments):
        seen[direction] = call
        return choose[direction](call, *arguments)

    monkeypatch.setattr(run, "packing_of", packing_of)
    for direction in choose:
        monkeypatch.setattr(run, f"{direction}_choice", lambda *given, way=direction: choice(way, *given))
    for direction, launch in zip(choose, launches(8192, dynamic(8192, 512)), strict=True):
        assert str(launch.packing).endswith(f"; of the {direction}")
        call = seen[direction]
        assert call.key.shape == call.value.shape == (1, 16 * 1024, KV_HEADS, DIM)
        assert call.mask.row_tiles.shape == (1, KV_HEADS, 64, 4 + 8) and call.options.band_hi == UNBOUNDED


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"dropout_p": 0.5}, "dropout or a bias with a query dimension depends on positions of keys"),
        ({"bias": torch.zeros(1, 1, 8192, 8192)}, "dropout or a bias with a query dimension depends on"),
    ],
)
def test_what_packing_cannot_serve_is_said_with_the_reason(keywords, told):
    for launch in launches(8192, dynamic(8192, 512), **keywords):
        assert launch.packing.packing is None
        assert str(launch.packing).startswith(f"keys are not packed beforehand: {told}")


def test_only_the_forward_is_unpacked_for_the_largest_scores():
    forward, backward = launches(8192, dynamic(8192, 512), return_max=True)
    assert str(forward.packing) == "keys are not packed beforehand: the largest score of each row is asked for"
    assert backward.packing.packing is not None


def test_all_reasons_are_given():
    starts = torch.zeros(1, 1, 8192, dtype=torch.int32)
    mask = dmattn_ops.prepare_mask(intervals=(starts, starts + 100), hidden=(starts + 10, starts + 20), seqlen_q=8192)
    for launch in launches(8192, mask):
        text = str(launch.packing)
        assert "(at_most)" in text and "other queries than their own position" in text and "hidden intervals" in text


def test_what_keeps_too_many_keys_is_not_packed():
    for launch in launches(1024, dynamic(1024, 512)):
        reason = "at this length and with this many kept keys, packing would cost more than it saves"
        assert str(launch.packing) == f"keys are not packed beforehand: {reason}"


def test_other_masks_have_nothing_to_say_about_packing():
    for mask in (None, torch.ones(1, 1, 256, 256, dtype=torch.bool)):
        for launch in launches(256, mask):
            assert launch.packing is None and "packed" not in str(launch)


def test_on_the_cpu_its_kernels_gather_keys_themselves(monkeypatch):
    found = explain(*tensors(512, dtype=torch.float32), dynamic(512, 40))
    for launch in (found.forward, found.backward):
        assert launch.packing.packing is None
        assert "the CPU kernels gather the keys that each epoch of queries sees" in str(launch.packing)
    monkeypatch.setattr(run, "cpu_kernels", lambda: "reference")
    found = explain(*tensors(512, dtype=torch.float32), dynamic(512, 40))
    assert "plain torch operations compute every pair" in str(found.forward.packing)


def test_kernels_are_chosen_for_the_call_on_packed_keys():
    pytest.importorskip("triton.experimental.gluon")
    dense = explain(*tensors(8192), is_causal=True, deterministic=True, arch="9.0").backward
    packed = explain(*tensors(8192), dynamic(8192, 512), deterministic=True, arch="9.0").backward
    assert (dense.kernel, packed.kernel) == ("hopper", "hopper256")  # lists of tiles
    assert any("over listed tiles" in reason for reason in packed.passed_over)


# A cache of tuned lengths: of a call on a GPU, which these stand for.


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(tuning.FOLDER, str(tmp_path))
    tuning.forget()
    yield
    tuning.forget()


def call_of(seqlen=8192, keep=512, heads=KV_HEADS):
    mask = dynamic(seqlen, keep, heads)
    options = plain_options(1.0, *mask.band.limits(seqlen, seqlen))
    return Call(*tensors(seqlen), None, mask.mask, None, None, None, options)


def stored(call, length, direction="forward", **changed):
    """Store an entry for a call, and return what a look-up finds."""
    sizes = epochs.sizes_of(call)
    by_rule = epochs.epoch_by_sizes(sizes)
    case = tuning.epoch_case(direction, call, sizes)
    entry = tuning.epoch_entry(by_rule, length, 2.0, 1.0, "2026-11-22") | changed
    tuning.merge(PLACE, {case: entry})
    return tuning.tuned_epoch(direction, call, sizes, by_rule, PLACE)


def test_a_tuned_length_takes_the_place_of_the_rules(cache):
    length, evidence = stored(call_of(), 768)
    assert length == 768
    assert evidence == (
        "tuned: 1.0 ms in epochs of 768 queries, 2.0 ms in epochs of 512 queries (Some GPU, 2026-11-22)"
    )
    call, sizes = call_of(), epochs.sizes_of(call_of())
    assert tuning.tuned_epoch("backward", call, sizes, 512, PLACE) == (512, "")
    assert tuning.tuned_epoch("forward", call, sizes, 512, "Another GPU") == (512, "")
    assert epochs.packing_for(call, 768).epochs.length == 768


def test_tuning_may_turn_packing_off_and_on(cache):
    assert stored(call_of(), 0)[0] == 0 and epochs.packing_for(call_of(), 0) is None
    dense = call_of(2048, 512)
    assert epochs.packing_for(dense) is None
    length, evidence = stored(dense, 512)
    assert length == 512 and epochs.packing_for(dense, length).epochs.number == 4
    assert "2.0 ms with keys as they lie" in evidence


@pytest.mark.parametrize("length", [100, -512, 64, 4096, "512", None, 768.0, [768], True, 1 << 40])
def test_a_length_that_is_not_offered_is_ignored(cache, length):
    assert stored(call_of(), length) == (512, "")


@pytest.mark.parametrize(
    "changed",
    [
        {"own": {"epoch": 1024}},
        {"own": 512},
        {"tuned": 768},
        {"tuned": {"epoch": 768, "more": 1}},
        {"tuned_ms": "fast"},
        {"date": "someday"},
    ],
    ids=str,
)
def test_an_entry_that_is_not_whole_or_of_another_rule_is_ignored(cache, changed):
    assert stored(call_of(), 768, **changed) == (512, "")


def test_calls_of_one_case_share_a_length_and_others_do_not(cache):
    stored(call_of(), 768)

    def found(call):
        sizes = epochs.sizes_of(call)
        return tuning.tuned_epoch("forward", call, sizes, epochs.epoch_by_sizes(sizes), PLACE)[0]

    assert found(call_of(9000, 500)) == 768
    assert found(call_of(16384, 512)) == 512
    assert found(call_of(8192, 640)) == 640
    assert found(call_of(heads=HEADS)) == 1024  # no group shares a copy


def test_dispatch_and_explain_obey_the_cache(cache, monkeypatch):
    stored(call_of(), 768)
    stored(call_of(), 0, direction="backward")
    monkeypatch.setattr(tuning, "place", lambda device, on: PLACE)
    call = call_of()

    class OnGpu:
        """A query that says it lies on a GPU."""

        is_cuda, device = True, torch.device("cpu")

        def __getattr__(self, name):
            return getattr(call.query, name)

    on_gpu = call._replace(query=OnGpu())
    forward, reasons = run.packing_of("forward", on_gpu, arch.KNOWN[90])
    assert forward.epochs.length == 768 and forward.evidence.startswith("tuned: ") and reasons == []
    backward, reasons = run.packing_of("backward", on_gpu, arch.KNOWN[90])
    assert backward is None and reasons[0].startswith("tuned: 1.0 ms with keys as they lie")
    untuned, _ = run.packing_of("forward", on_gpu, arch.KNOWN[90], tuned=False)
    assert untuned.epochs.length == 512 and untuned.evidence == ""


def test_offered_lengths_lie_around_the_rules_own():
    sizes = epochs.sizes_of(call_of(32768, 1024))
    assert epochs.offered_epochs(sizes) == (0, 512, 768, 1024, 1536, 2048)
    assert epochs.offered_epochs(sizes._replace(band_hi=32768)) == (0, 32768)  # nothing is born later
    for seqlen, keep in ((8192, 1), (8192, 8192), (200, 10)):
        offered = epochs.offered_epochs(epochs.sizes_of(call_of(seqlen, keep)))
        assert all(length % 128 == 0 for length in offered) and list(offered) == sorted(set(offered))
        assert offered[-1] <= -(-seqlen // 128) * 128


def test_a_cache_holds_lengths_beside_configurations(cache):
    stored(call_of(), 768)
    [(name, entry)] = json.loads(tuning.path().read_text())["places"][PLACE].items()
    assert name == "forward epochs D64 16 bits S8192+ H2+ group 4 kept 512"
    assert (entry["own"], entry["tuned"]) == ({"epoch": 512}, {"epoch": 768})

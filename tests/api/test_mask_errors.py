"""What `prepare_mask` and calls with a prepared mask refuse, in which words."""

import re
import warnings

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from dmattn_ops import environment, flash_dmattn_func
from dmattn_ops.bands import NO_BAND
from dmattn_ops.checks import require
from dmattn_ops.masks import prepare
from dmattn_ops.masks.prepare import dynamic_mask, prepare_mask

KEEP, IDS, EVERY = torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 4, dtype=torch.int32), torch.zeros(1, 1, 4).int()
FIT = "mask must have shape (B|1, H|Hkv|1, Sq|1, Sk) or (B|1, Sk), got (2, 3, 4)"
QUERIES = (
    "seqlen_q must be given (1 for decoding) for intervals, for padding [B, Sk] and for a mask whose query dimension is 1,"
    " got None; a mask of queries and keys has four dimensions"
)
OTHER_DTYPES = "pass an additive mask of 0 and -inf as bias=, and one of zeros and ones as mask != 0"
INTEGERS = "torch.uint8 or torch.int8 or torch.int16 or torch.int32 or torch.int64"


def keep(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


PREPARE = {
    "nothing": (
        {},
        ValueError,
        "prepare_mask needs a mask, documents or intervals; causal and window conditions alone need no mask",
    ),
    "type": ({"mask": [[1]]}, TypeError, "mask must be a tensor, a BlockMask or None, got list"),
    "additive": (
        {"mask": torch.zeros(1, 1, 4, 4)},
        TypeError,
        "mask must have dtype bool (True keeps) or an integer dtype (non-zero keeps), got dtype torch.float32: "
        + OTHER_DTYPES,
    ),
    "differentiable": (
        {"mask": torch.zeros(1, 1, 4, 4, requires_grad=True)},
        TypeError,
        "mask must have dtype bool (True keeps) or an integer dtype (non-zero keeps), got requires_grad=True: "
        + OTHER_DTYPES,
    ),
    "rank": ({"mask": keep(2, 3, 4)}, ValueError, FIT),
    "padding without queries": ({"mask": KEEP}, ValueError, QUERIES),
    "keys without queries": ({"mask": keep(2, 1, 1, 4)}, ValueError, QUERIES),
    "intervals without queries": ({"intervals": (EVERY, EVERY)}, ValueError, QUERIES),
    "other queries": (
        {"mask": keep(2, 1, 3, 4), "seqlen_q": 4},
        ValueError,
        "seqlen_q must be 3, as the mask or the documents have it, got 4",
    ),
    "a sliced BlockMask": (
        {"mask": create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 300, 300, device="cpu")[:, :, 1:]},
        ValueError,
        "mask must have 3 blocks of queries, as its 300 queries need, got 2: a sliced BlockMask does not say which queries it"
        " holds, so prepare the whole one, and slice that with .queries(start, stop)",
    ),
    "a name of others": (
        {"mask": KEEP, "causal": True},
        TypeError,
        "prepare_mask() got an unexpected keyword argument 'causal': here it is called is_causal",
    ),
    "documents type": ({"documents": 1}, TypeError, "documents must be a tensor, got int"),
    "documents of three": (
        {"documents": (IDS,) * 3},
        TypeError,
        "documents must be ids or a pair of ids, got 3 of them",
    ),
    "documents rank": (
        {"documents": IDS[0]},
        ValueError,
        f"documents must have 2 dimensions, got 1, shape (4,): its axes are {require.DOCUMENTS}",
    ),
    "documents dtype": (
        {"documents": KEEP.float()},
        TypeError,
        f"documents must have dtype {INTEGERS}, got torch.float32",
    ),
    "documents of other keys": (
        {"mask": keep(2, 5), "documents": IDS},
        ValueError,
        "documents must have shape (B|1, 5), got (2, 4)",
    ),
    "documents of as many queries as keys": (
        {"mask": keep(2, 1, 3, 4), "documents": IDS},
        ValueError,
        "mask must have as many queries as keys where documents are given, got 3 and 4",
    ),
    "documents of other queries": (
        {"mask": keep(2, 1, 3, 4), "documents": (IDS, IDS.clone())},
        ValueError,
        "mask must have as many queries as documents has, got 3 and 4",
    ),
    "documents of another batch": (
        {"mask": keep(3, 4), "documents": IDS},
        ValueError,
        "documents must have shape (3 or 1, 4), got (2, 4)",
    ),
    "documents elsewhere": (
        {"mask": KEEP, "documents": IDS.to("meta")},
        ValueError,
        "documents must be on cpu like mask, got meta",
    ),
    "documents of keys elsewhere": (
        {"documents": (IDS, IDS.to("meta"))},
        ValueError,
        "documents of keys must be on cpu like those of queries, got meta",
    ),
    "a prepared mask": (
        {"mask": prepare_mask(documents=IDS)},
        TypeError,
        "mask must be a tensor, a BlockMask or None, got TileMask: a prepared mask goes to calls as it is, with further"
        " conditions beside it",
    ),
    "a function": (
        {"mask": lambda b, h, i, j: i >= j},
        TypeError,
        "mask must be a tensor, a BlockMask or None, got function: create_block_mask of flex_attention makes a BlockMask of a"
        " function",
    ),
    "an array": ({"mask": np.ones((1, 4))}, TypeError, "mask must be a tensor, a BlockMask or None, got numpy.ndarray"),
    "documents and queries": (
        {"documents": IDS, "seqlen_q": 5},
        ValueError,
        "seqlen_q must be 4, as the mask or the documents have it, got 5",
    ),
    "negative": ({"mask": KEEP, "seqlen_q": -1}, ValueError, "seqlen_q must not be negative, got -1"),
    "as many queries": (
        {"mask": KEEP, "seqlen_q": 1 << 70},
        ValueError,
        f"seqlen_q must be less than {1 << 30}, got {1 << 70}",
    ),
    "no length": ({"mask": KEEP, "seqlen_q": 2.0}, TypeError, "seqlen_q must be an int, got float"),
    "window": (
        {"mask": keep(1, 1, 2, 2), "window_size": (-1, None)},
        ValueError,
        "window_size left must not be negative (None is unlimited), got -1",
    ),
    "alignment": (
        {"mask": keep(1, 1, 2, 2), "causal_from": "left"},
        ValueError,
        "causal_from must be 'bottom_right' or 'top_left', got 'left'; an integer is the diagonal itself",
    ),
    "hidden alone": ({"hidden": (EVERY, EVERY)}, ValueError, "hidden needs intervals, got None"),
    "promise alone": (
        {"mask": KEEP, "at_most": 3},
        ValueError,
        "at_most needs intervals, got None: only keys whose queries are given as intervals can be packed",
    ),
    "promise type": ({"intervals": (EVERY, EVERY), "at_most": 3.0}, TypeError, "at_most must be an int, got float"),
    "negative promise": (
        {"intervals": (EVERY, EVERY), "at_most": -1},
        ValueError,
        "at_most must not be negative, got -1",
    ),
    "interval type": (
        {"intervals": EVERY, "seqlen_q": 4},
        TypeError,
        "intervals must be a pair of tensors, got Tensor",
    ),
    "interval of one": (
        {"intervals": (EVERY,), "seqlen_q": 4},
        TypeError,
        "intervals must be a pair of tensors, got a tuple of 1",
    ),
    "interval parts": (
        {"intervals": (EVERY, [4]), "seqlen_q": 4},
        TypeError,
        "end of intervals must be a tensor, got list",
    ),
    "interval without an end": (
        {"intervals": (EVERY, None), "seqlen_q": 4},
        TypeError,
        "end of intervals must be a tensor, got NoneType",
    ),
    "interval without a start": (
        {"intervals": (None, EVERY), "hidden": (EVERY, EVERY.to("meta")), "seqlen_q": 4},
        ValueError,
        "to of hidden must be on cpu like end of intervals, got meta",
    ),
    "interval rank": (
        {"intervals": (EVERY[0], EVERY), "seqlen_q": 4},
        ValueError,
        "start of intervals must have 3 dimensions, got 2, shape (1, 4): its axes are [B, heads, Sk]",
    ),
    "interval dtype": (
        {"intervals": (EVERY, EVERY.long()), "seqlen_q": 4},
        TypeError,
        "end of intervals must have dtype torch.int32, got torch.int64",
    ),
    "interval keys": (
        {"intervals": (EVERY, EVERY[..., 1:]), "seqlen_q": 4},
        ValueError,
        "end of intervals must have shape (1, 1, 4), got (1, 1, 3)",
    ),
    "interval batch": (
        {"intervals": (EVERY.expand(2, 1, 4), EVERY), "hidden": (EVERY, EVERY.expand(3, 1, 4)), "seqlen_q": 4},
        ValueError,
        "to of hidden must have shape (2 or 1, 1, 4), got (3, 1, 4)",
    ),
    "interval elsewhere": (
        {"intervals": (EVERY, EVERY), "hidden": (EVERY.to("meta"), EVERY), "seqlen_q": 4},
        ValueError,
        "from_ of hidden must be on cpu like start of intervals, got meta",
    ),
    "intervals of another batch": (
        {"intervals": (EVERY.expand(3, 1, 4), EVERY), "mask": keep(2, 4), "seqlen_q": 4},
        ValueError,
        "intervals must have the batch of the mask and the documents, 2, or 1, got 3",
    ),
    "intervals of other heads": (
        {"intervals": (EVERY.expand(1, 3, 4), EVERY), "mask": keep(1, 2, 4, 4), "seqlen_q": 4},
        ValueError,
        "intervals must have the heads of the mask, 2, of keys or 1, got 3",
    ),
    "documents of another batch than intervals": (
        {"intervals": (EVERY.expand(3, 1, 4), EVERY), "documents": IDS},
        ValueError,
        "documents must have shape (3 or 1, 4), got (2, 4)",
    ),
    "broken promise": (
        {"intervals": (EVERY, EVERY + 4), "mask": keep(1, 4), "at_most": 3, "seqlen_q": 4},
        ValueError,
        "at_most must be at least the most keys that a query sees, 4, got 3",
    ),
    "intervals of other keys": (
        {"intervals": (EVERY, EVERY), "mask": keep(2, 5), "seqlen_q": 4},
        ValueError,
        "intervals must have 5 keys as the mask or the documents have, got 4",
    ),
}


@pytest.mark.parametrize("name", PREPARE)
def test_prepare_mask_refuses_in_words(name: str):
    arguments, error, words = PREPARE[name]
    with pytest.raises(error, match=f"^{re.escape(words)}$"):
        prepare_mask(**arguments)


def test_a_mask_prepared_for_other_lengths_is_refused():
    prepared = prepare_mask(keep(1, 1, 20, 30))
    words = "mask must be prepared for query length 21 and key length 30, got 20 and 30"
    with pytest.raises(ValueError, match=f"^{words}$"):
        prepare.resolve(prepared, NO_BAND, 21, 30)


@pytest.mark.parametrize("kind", ["bits", "segments", "intervals"])
def test_a_mask_prepared_on_another_device_is_refused_by_its_own_name(kind: str):
    ids = torch.zeros(1, 4, dtype=torch.int32)
    prepared = {
        "bits": prepare_mask(keep(1, 1, 4, 4)),
        "segments": prepare_mask(documents=ids),
        "intervals": prepare_mask(intervals=(EVERY, EVERY), seqlen_q=4),
    }[kind]
    assert prepared.kind == kind
    query = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"^mask must be on cpu like query, got meta$"):
        flash_dmattn_func(query, query, query, prepared.to("meta"))


def test_what_is_no_mask_is_refused():
    words = "mask must be a 4-D tensor or come from prepare_mask, got list"
    with pytest.raises(TypeError, match=f"^{words}$"):
        prepare.resolve([1], NO_BAND, 21, 30)  # type: ignore[arg-type]


PARTS = {
    "behind": (lambda mask: mask.queries(3, 21), "queries must be a range inside 0 to 20, got 3 to 21"),
    "before": (lambda mask: mask.keys(-1, 2), "keys must be a range inside 0 to 30, got -1 to 2"),
    "backwards": (lambda mask: mask.heads(2, 1), "heads must be a range inside 0 to 3, got 2 to 1"),
    "sequences": (lambda mask: mask.batch(0, 3), "batch must be a range inside 0 to 2, got 0 to 3"),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_outside_of_a_mask_is_refused(name: str):
    part, words = PARTS[name]
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        part(prepare_mask(keep(2, 3, 20, 30)))


@pytest.mark.parametrize("cut", ["queries", "keys", "batch", "heads"])
def test_a_part_that_is_no_range_of_ints_is_refused(cut: str):
    dense, intervals = prepare_mask(keep(2, 3, 20, 30)), dynamic_mask(torch.zeros(2, 3, 20), 4)
    for mask in (dense, intervals):
        for start, stop, words in (
            (0.0, 1, f"the start of {cut} must be an int, got float"),
            (0, 1.5, f"the stop of {cut} must be an int, got float"),
            (False, 1, f"the start of {cut} must be an int, got bool"),
            (0, None, f"the stop of {cut} must be an int, got NoneType"),
            (0, np.bool_(True), f"the stop of {cut} must be an int, got numpy.bool"),
        ):
            with pytest.raises(TypeError, match=f"^{re.escape(words)}$"):
                getattr(mask, cut)(start, stop)


SCORES = torch.zeros(2, 1, 4)
DYNAMIC = {
    "type": ({"scores": [1.0]}, TypeError, "scores must be a tensor, got list"),
    "rank": (
        {"scores": SCORES[0]},
        ValueError,
        "scores must have 3 dimensions, got 2, shape (1, 4): its axes are [B, heads, S]",
    ),
    "dtype": (
        {"scores": SCORES.int()},
        TypeError,
        "scores must have dtype torch.float16 or torch.bfloat16 or torch.float32 or torch.float64, got torch.int32",
    ),
    "sparse": (
        {"scores": SCORES.to_sparse()},
        TypeError,
        "scores must be a dense tensor, got layout torch.sparse_coo",
    ),
    "sparse documents": (
        {"documents": IDS.to_sparse()},
        TypeError,
        "documents must be a dense tensor, got layout torch.sparse_coo",
    ),
    "keep": ({"keep": 1.5}, TypeError, "keep must be an int, got float"),
    "negative": ({"keep": -1}, ValueError, "keep must not be negative, got -1"),
    "negative first": ({"keep_first": -2}, ValueError, "keep_first must not be negative, got -2"),
    "negative last": ({"keep_last": -3}, ValueError, "keep_last must not be negative, got -3"),
    "last without order": (
        {"keep_last": 1, "is_causal": False},
        ValueError,
        "keep_last must be 0 where is_causal is False, got 1",
    ),
    "causal": ({"is_causal": 1}, TypeError, "is_causal must be a bool, got int"),
    "documents rank": (
        {"documents": IDS[0]},
        ValueError,
        f"documents must have 2 dimensions, got 1, shape (4,): its axes are {require.DOCUMENTS}",
    ),
    "documents shape": ({"documents": IDS[:, 1:]}, ValueError, "documents must have shape (2 or 1, 4), got (2, 3)"),
    "documents type": ({"documents": [1]}, TypeError, "documents must be a tensor, got list"),
    "documents dtype": (
        {"documents": KEEP.float()},
        TypeError,
        f"documents must have dtype {INTEGERS}, got torch.float32",
    ),
    "padding": (
        {"padding": KEEP},
        TypeError,
        "dynamic_mask() got an unexpected keyword argument 'padding': here it is called documents: padding on one side of each"
        " sequence, [B, S], is a document of its own; DynamicMaskAttention of dmattn_ops.nn takes padding as it is",
    ),
    "documents that return": (
        {"documents": torch.tensor([[1, 2, 2, 1]])},
        ValueError,
        "documents must be contiguous runs of equal ids, got id 1, which returns at position 3 of row 0 after another one",
    ),
    "queries": ({"queries": (3, 5)}, ValueError, "queries must be a range inside 0 to 4, got 3 to 5"),
    "queries type": ({"queries": 3}, TypeError, "queries must be a pair (start, stop), got 3"),
    "queries that are no ints": ({"queries": (0.0, 2)}, TypeError, "the start of queries must be an int, got float"),
    "numpy's bool": ({"is_causal": np.bool_(True)}, TypeError, "is_causal must be a bool, got numpy.bool"),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_mask_refuses_in_words(name: str):
    changes, error, words = DYNAMIC[name]
    with pytest.raises(error, match=f"^{re.escape(words)}$"):
        dynamic_mask(**{"scores": SCORES, "keep": 2, **changes})


def test_documents_of_bools_are_those_of_integers():
    ids = torch.tensor([[False, False, True, True], [False, True, True, True]])
    other = torch.tensor([[True, False, False, True]])
    for given, same in (
        (ids, ids.int()),
        ((ids, other), (ids.int(), other.int())),
        ([ids, other], (ids.int(), other.int())),
    ):
        assert torch.equal(prepare_mask(documents=given).to_dense(), prepare_mask(documents=same).to_dense())
    made = dynamic_mask(torch.randn(2, 1, 4), 1, documents=ids).to_dense()
    assert torch.equal(made.any(-1), torch.ones(2, 1, 4, dtype=torch.bool)) and not made[0, 0, 2:, :2].any()


def test_compiled_documents_that_return_are_refused_on_the_cpu_too():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda ids: dynamic_mask(SCORES, 2, documents=ids).to_dense(), fullgraph=True, backend="aot_eager"
    )
    assert compiled(torch.tensor([[1, 1, 2, 2]])).any()
    with pytest.raises(ValueError, match="documents must be contiguous runs of equal ids"):
        compiled(torch.tensor([[1, 2, 2, 1]]))


def test_counts_beyond_every_length_hide_nothing():
    scores, ends = torch.randn(1, 1, 9), torch.tensor([0, 9], dtype=torch.int32).view(2, 1, 1, 1).expand(2, 1, 1, 9)
    made = dynamic_mask(scores, 1 << 70, keep_first=1 << 64, keep_last=1 << 63)
    assert torch.equal(made.to_dense()[0, 0], torch.ones(9, 9).tril().bool())
    query = torch.randn(1, 9, 1, 4)
    shown = prepare_mask(intervals=(ends[0], ends[1]), at_most=1 << 70, seqlen_q=9)
    whole = flash_dmattn_func(query, query, query)
    torch.testing.assert_close(flash_dmattn_func(query, query, query, shown), whole)


@pytest.mark.parametrize(
    ("shape", "seqlen_q", "unclear"), [((64, 64), 64, True), ((64, 64), 32, False), ((1, 1), 1, False)]
)
def test_padding_that_may_be_meant_as_pairs_is_warned_of_once(shape, seqlen_q, unclear, monkeypatch):
    monkeypatch.setattr(environment, "_said", set())
    mask = torch.ones(shape, dtype=torch.bool)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert prepare_mask(mask, seqlen_q=seqlen_q).shape == (shape[0], 1, seqlen_q, shape[1])
    said = [str(warning.message) for warning in caught if "pass mask[None, None]" in str(warning.message)]
    assert len(said) == unclear
    assert not unclear or prepare_mask(mask[None, None]).shape == (1, 1, *shape)

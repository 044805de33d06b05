"""What `prepare_mask` and calls with a prepared mask refuse, in which words."""

import re

import pytest
import torch

from dmattn_ops import masks
from dmattn_ops.masks import prepare_mask
from dmattn_ops.problem import UNBOUNDED

ONES, IDS = torch.ones(2, 4), torch.ones(2, 4, dtype=torch.int32)
FIT = "mask must have shape (B|1, H|Hkv|1, Sq|1, Sk) or (B|1, Sk), got (2, 3, 4)"
QUERIES = "seqlen_q must be given for a mask without a query dimension, got None"

PREPARE = {
    "nothing": (
        {},
        ValueError,
        "prepare_mask needs a mask or documents; causal and window conditions alone need no mask",
    ),
    "type": ({"mask": [[1]]}, TypeError, "mask must be a tensor, a BlockMask or None, got list"),
    "rank": ({"mask": torch.ones(2, 3, 4)}, ValueError, FIT),
    "padding without queries": ({"mask": ONES}, ValueError, QUERIES),
    "keys without queries": ({"mask": torch.ones(2, 1, 1, 4)}, ValueError, QUERIES),
    "other queries": (
        {"mask": torch.ones(2, 1, 3, 4), "seqlen_q": 4},
        ValueError,
        "seqlen_q must be 3, as the mask or the documents have it, got 4",
    ),
    "documents type": ({"documents": [1]}, TypeError, "documents must be a tensor, got list"),
    "documents rank": (
        {"documents": IDS[0]},
        ValueError,
        "documents must have 2 dimensions, got 1, shape (4,)",
    ),
    "documents dtype": (
        {"documents": ONES},
        TypeError,
        "documents must have dtype torch.uint8 or torch.int8 or torch.int16 or torch.int32 or torch.int64,"
        " got torch.float32",
    ),
    "documents of other keys": (
        {"mask": torch.ones(2, 5), "documents": IDS},
        ValueError,
        "documents must have shape (B|1, 5), got (2, 4)",
    ),
    "documents of other queries": (
        {"mask": torch.ones(2, 1, 3, 4), "documents": IDS},
        ValueError,
        "mask must have as many queries as keys where documents are given, got 3 and 4",
    ),
    "documents of another batch": (
        {"mask": torch.ones(3, 4), "documents": IDS},
        ValueError,
        "documents must have shape (3|1, 4), got (2, 4)",
    ),
    "documents elsewhere": (
        {"mask": ONES, "documents": IDS.to("meta")},
        ValueError,
        "documents must be on cpu like query, got meta",
    ),
    "documents and queries": (
        {"documents": IDS, "seqlen_q": 5},
        ValueError,
        "seqlen_q must be 4, as the mask or the documents have it, got 5",
    ),
    "negative": ({"mask": ONES, "seqlen_q": -1}, ValueError, "seqlen_q must not be negative, got -1"),
    "no length": ({"mask": ONES, "seqlen_q": 2.0}, TypeError, "seqlen_q must be an int, got float"),
    "window": (
        {"mask": torch.ones(1, 1, 2, 2), "window_size": (-1, None)},
        ValueError,
        "window_size left must not be negative (None is unlimited), got -1",
    ),
    "alignment": (
        {"mask": torch.ones(1, 1, 2, 2), "causal_from": "left"},
        ValueError,
        "causal_from must be 'bottom_right' or 'top_left', got 'left'",
    ),
}


@pytest.mark.parametrize("name", PREPARE)
def test_prepare_mask_refuses_in_words(name: str):
    arguments, error, words = PREPARE[name]
    with pytest.raises(error, match=f"^{re.escape(words)}$"):
        prepare_mask(**arguments)


def test_a_mask_prepared_for_other_lengths_is_refused():
    prepared = prepare_mask(torch.ones(1, 1, 20, 30))
    words = "mask must be prepared for query length 21 and key length 30, got 20 and 30"
    with pytest.raises(ValueError, match=f"^{words}$"):
        masks.resolve(prepared, -UNBOUNDED, UNBOUNDED, 21, 30)


def test_what_is_no_mask_is_refused():
    words = "mask must be a 4-D tensor or come from prepare_mask, got list"
    with pytest.raises(TypeError, match=f"^{words}$"):
        masks.resolve([1], -UNBOUNDED, UNBOUNDED, 21, 30)  # type: ignore[arg-type]

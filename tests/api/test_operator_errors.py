"""What direct calls of `torch.ops.dmattn.*` refuse: whatever a kernel could read or write out of bounds with."""

import re

import pytest
import torch

from dmattn_ops.call import UNBOUNDED
from dmattn_ops.checks import validation
from dmattn_ops.ops import schemas
from tests.api.test_errors import DENSE, B, D, H, S, dense, tensor
from tests.api.test_errors_packed import VARLEN, int32, packed


def keeps(*shape):
    return torch.ones(*shape, dtype=torch.bool)


def lists(rows=2, width=6, dtype=torch.int32):
    return torch.zeros(1, 1, rows, width, dtype=dtype)


BITS = {
    "row_tiles": lists(),
    "col_tiles": lists(),
    "row_bits": torch.zeros(1, 1, 128, 4, dtype=torch.int32),
    "col_bits": torch.zeros(1, 1, 128, 4, dtype=torch.int32),
}
SEGMENTS = {"row_tiles": lists(), "col_tiles": lists(), "k_segments": torch.zeros(1, 1, S, dtype=torch.int32)}
EVERY = {name: torch.zeros(1, 1, S, dtype=torch.int32) for name in ("start", "end")}
# What a direct call of the operator must not pass on to a kernel, beyond what is in DENSE.
OPERATOR = {
    "lists too short": (
        {**BITS, "row_tiles": lists(0)},
        ValueError,
        "row_tiles must have shape (2 or 1, 4 or 1, 2, 6), got (1, 1, 0, 6)",
    ),
    "lists too narrow": (
        {**BITS, "col_tiles": lists(2, 3)},
        ValueError,
        "col_tiles must have a last dimension of at least 4, got 3",
    ),
    "lists of int64": (
        {**BITS, "row_tiles": lists(dtype=torch.int64)},
        TypeError,
        "row_tiles must have dtype torch.int32, got torch.int64",
    ),
    "bits too short": (
        {**BITS, "row_bits": BITS["row_bits"][:, :, :100]},
        ValueError,
        "row_bits must have shape (2 or 1, 4 or 1, 128, 4), got (1, 1, 100, 4)",
    ),
    "bits of rows only": (
        {**BITS, "col_bits": None},
        ValueError,
        "col_bits must be a tensor where other parts of the mask are, got None",
    ),
    "bits without lists": (
        {**BITS, "row_tiles": None},
        ValueError,
        "row_tiles must be a tensor where other parts of the mask are, got None",
    ),
    "lists alone": (
        {"row_tiles": lists(), "col_tiles": lists()},
        ValueError,
        "a mask must have either row_bits and col_bits, or k_segments, or end",
    ),
    "segments too short": (
        {**SEGMENTS, "k_segments": torch.zeros(1, 1, 100, dtype=torch.int32)},
        ValueError,
        "k_segments must have shape (2 or 1, 4 or 1, 128), got (1, 1, 100)",
    ),
    "queries too few": (
        {**SEGMENTS, "q_segments": torch.zeros(1, 100, dtype=torch.int32)},
        ValueError,
        "q_segments must have shape (2 or 1, 128), got (1, 100)",
    ),
    "segments of queries beside bits": (
        {**BITS, "q_segments": torch.zeros(1, S, dtype=torch.int32)},
        ValueError,
        "a mask with q_segments must have k_segments",
    ),
    "no seed": (
        {"dropout_p": 0.5},
        ValueError,
        "seed must be an int64 tensor of shape (1, 1) or more where dropout_p is 0.5, got None",
    ),
    "seed shape": (
        {"seed": torch.zeros(2, 3, dtype=torch.int64)},
        ValueError,
        "seed must have shape (2 or 1, 4 or 1), got (2, 3)",
    ),
    "seed dtype": ({"seed": torch.zeros(1, 1)}, TypeError, "seed must have dtype torch.int64, got torch.float32"),
    "origin": ({"q_origin": -1}, ValueError, "q_origin must be between 0 and 1073741823, got -1"),
    "far origin": ({"k_origin": 1 << 30}, ValueError, "k_origin must be between 0 and 1073741823, got 1073741824"),
    "promise": ({**EVERY, "at_most": -1}, ValueError, "at_most must not be negative, got -1"),
    "two kinds": (
        {**SEGMENTS, **EVERY},
        ValueError,
        "a mask must have either row_bits and col_bits, or k_segments, or end",
    ),
    "intervals without ends": (
        {"start": EVERY["start"]},
        ValueError,
        "a mask must have either row_bits and col_bits, or k_segments, or end",
    ),
    "hidden without intervals": (
        {**SEGMENTS, "hidden_from": EVERY["end"]},
        ValueError,
        "a mask with start, hidden_from or hidden_to must have end",
    ),
    "intervals with lists": (
        {**EVERY, "row_tiles": lists()},
        ValueError,
        "a mask by start and end must not have lists of tiles",
    ),
    "intervals too short": (
        {**EVERY, "end": EVERY["end"][..., 1:]},
        ValueError,
        "end must have shape (2 or 1, 4 or 1, 128), got (1, 1, 127)",
    ),
    "hidden by one end": (
        {**EVERY, "hidden_to": EVERY["end"]},
        ValueError,
        "hidden_from must be a tensor where other parts of the mask are, got None",
    ),
}


@pytest.mark.parametrize("name", OPERATOR)
def test_the_operator_refuses_what_would_read_out_of_bounds(name):
    changes, error, words = OPERATOR[name]
    with pytest.raises(error, match=f"^{re.escape(words)}$"):
        torch.ops.dmattn.forward(**dense(**changes))


@pytest.mark.parametrize(
    "name", [name for name, (changes, *_) in DENSE.items() if changes.keys() <= {"key", "value", "bias"}]
)
def test_the_operator_refuses_wrong_tensors_in_the_same_words(name):
    changes, error, words = DENSE[name]
    if any(not isinstance(change, torch.Tensor) for change in changes.values()):
        error, words = RuntimeError, "bias"  # the dispatcher's own words
    if any(isinstance(change, torch.Tensor) and not validation.is_dense(change) for change in changes.values()):
        error, words = NotImplementedError, "dmattn"  # the dispatcher's own words too
    with pytest.raises(error, match=re.escape(words)):
        torch.ops.dmattn.forward(**dense(**changes))


@pytest.mark.parametrize("name", ["start", "end", "decrease", "longest", "batch", "dtype", "value", "mask", "bias"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_packed_operators_refuse_the_same(name, direction):
    changes, error, words = VARLEN[name]
    call = {"bias": None, "mask": None, "sink": None, "seed": None, **packed(**changes)}
    if direction == "backward":
        call |= {"grad_out": tensor(S, H, D), "grad_lse": None, "out": tensor(S, H, D)}
        call |= {name: tensor(H, S) for name in ("lse", "lse_tail")}
    with pytest.raises(error, match=re.escape(words)):
        getattr(torch.ops.dmattn, f"varlen_{direction}")(**call)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"grad_out": tensor(B, S, H, 8)}, ValueError, "grad_out must have shape (2, 128, 4, 64), got (2, 128, 4, 8)"),
        (
            {"grad_out": tensor(B, S, H, D).half()},
            TypeError,
            "grad_out must have dtype torch.float32, got torch.float16",
        ),
        ({"grad_lse": tensor(B, H, 1)}, ValueError, "grad_lse must have shape (2, 4, 128), got (2, 4, 1)"),
        ({"lse": tensor(B, H, 1)}, ValueError, "lse must have shape (2, 4, 128), got (2, 4, 1)"),
        ({"lse_tail": tensor(B, H, 1)}, ValueError, "lse_tail must have shape (2, 4, 128), got (2, 4, 1)"),
        ({"out": tensor(B, 1, H, D)}, ValueError, "out must have shape (2, 128, 4, 64), got (2, 1, 4, 64)"),
        ({"key": tensor(B, 1, H, D)}, ValueError, "key must have shape (2, 128, 4, 64), got (2, 1, 4, 64)"),
    ],
)
def test_the_backward_operator_refuses_what_does_not_belong_together(changes, error, words):
    saved = {"grad_out": tensor(B, S, H, D), "grad_lse": None, "out": tensor(B, S, H, D)}
    saved |= {name: tensor(B, H, S) for name in ("lse", "lse_tail")}
    with pytest.raises(error, match=re.escape(words)):
        torch.ops.dmattn.backward(
            **dense(**saved, **changes) if not changes.keys() & saved.keys() else dense(**{**saved, **changes})
        )


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            (keeps(1, 1, 9, 9), None, None, 8),
            ValueError,
            "mask must have shape (batch 1, heads 1, queries 8 or 1, keys 9), got (1, 1, 9, 9)",
        ),
        ((keeps(1, 1, 1, 9), None, None, -1), ValueError, "seqlen_q must not be negative, got -1"),
        (
            (keeps(1, 1, 1, 9), None, None, 1 << 62),
            ValueError,
            "seqlen_q must be less than 1073741824, got 4611686018427387904",
        ),
        ((keeps(9, 9), None, None, 9), ValueError, "mask must have 4 dimensions, got 2, shape (9, 9)"),
        (
            (keeps(1, 1, 9, 9), int32(*range(9))[None, None], None, 9),
            ValueError,
            "q_segments must have 2 dimensions, got 3, shape (1, 1, 9)",
        ),
        (
            (keeps(2, 1, 9, 9), int32(*range(9)).expand(3, 9), None, 9),
            ValueError,
            "q_segments must have shape (2 or 1, 9), got (3, 9)",
        ),
        (
            (keeps(1, 1, 9, 9), None, int32(*range(8))[None, None], 9),
            ValueError,
            "k_segments must have shape (1, 1, 9), got (1, 1, 8)",
        ),
        (
            (keeps(1, 1, 9, 9), None, torch.zeros(1, 1, 9), 9),
            TypeError,
            "k_segments must have dtype torch.int32, got torch.float32",
        ),
    ],
)
def test_the_mask_operator_refuses_parts_that_do_not_fit(arguments, error, words):
    with pytest.raises(error, match=f"^{re.escape(words)}$"):
        torch.ops.dmattn.pack_mask(*arguments)


ENDS = int32(*range(8))[None, None]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, ENDS, None, None), "hidden_from and hidden_to belong together, got one of them"),
        ((None, None, None, keeps(1, 1, 8, 9)), "intervals must have 9 keys as the mask or the documents have, got 8"),
    ],
)
def test_the_interval_operator_refuses_parts_that_do_not_fit(arguments, words):
    with pytest.raises(ValueError, match=f"^{words}$"):
        torch.ops.dmattn.pack_intervals(ENDS, *arguments, None, None, 8)


def test_tensors_whose_memory_was_given_back_are_refused():
    freed = torch.zeros(1, 1, S, dtype=torch.int32)
    freed.untyped_storage().resize_(0)
    for part in ("end", "start"):
        mask = {name: torch.zeros(1, 1, S, dtype=torch.int32) for name in ("start", "end")} | {part: freed}
        with pytest.raises(ValueError, match=r"a tensor of shape \(1, 1, 128\) has no memory: its storage was resized"):
            torch.ops.dmattn.forward(**dense(**mask))


REQUIRED = [
    (name, signature.names[place]) for name, signature in schemas.SIGNATURES.items() for place in signature.required
]


@pytest.mark.parametrize(("name", "missing"), REQUIRED)
def test_none_for_a_tensor_that_must_be_there_is_refused(name, missing):
    signature = schemas.SIGNATURES[name]
    given = {each for operator, each in REQUIRED if operator == name} | {"q_segments"}
    tensors = [
        torch.zeros(1, 9) if each in given - {missing} else None for each in signature.names[: signature.tensors]
    ]
    numbers = [9] * (4 if name in schemas.CHANGING else 2)
    with pytest.raises(TypeError, match=f"^{missing} must be a tensor, got None$"):
        schemas.overload(name)(*tensors, *numbers[: len(signature.names) - len(tensors)])


@pytest.mark.parametrize("name", schemas.SCHEMAS)
def test_a_call_without_any_tensor_names_the_first_that_must_be_there(name):
    signature = schemas.SIGNATURES[name]
    first = signature.names[signature.required[0]]
    with pytest.raises(TypeError, match=f"^{first} must be a tensor, got None$"):
        schemas.overload(name)(*[None] * signature.tensors, *[9, 9][: len(signature.names) - signature.tensors])


def test_an_unlimited_band_is_the_default_of_the_operators():
    arguments = {a.name: a.default_value for a in torch.ops.dmattn.forward.default._schema.arguments}
    assert (arguments["band_lo"], arguments["band_hi"]) == (-UNBOUNDED, UNBOUNDED)

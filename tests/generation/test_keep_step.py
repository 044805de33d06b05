"""The operators of steps and chunks: what they declare and refuse, and that a compiled call copies nothing of the cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from dmattn_ops import KeptKeys
from dmattn_ops.masks.kept import Rule, Stored, Token


def step(positions: int = 1, **changes) -> list:
    """Return the arguments of a step, or chunk, of a cache with a bias and documents, some of them changed."""
    cache = KeptKeys(2, 2, 8, 3, keep_first=1, keep_last=2, rollback=1, dtype=torch.float32)
    cache._make_room(torch.zeros(1), torch.zeros(2, 4, 1, 1), torch.zeros(2, 1, dtype=torch.int64))
    token = Token(
        torch.randn(2, positions, 2, 8), torch.randn(2, positions, 2, 8), torch.randn(2, 2, positions),
        torch.randn(2, 4, 1, positions), torch.tensor([[True], [False]]).repeat(1, positions), torch.full((2, positions), 3),
    )  # fmt: skip
    named = {
        f"{name}_cache" if name in ("key", "value", "bias") else name: part for name, part in cache._state().items()
    }
    named["score_cache"] = named.pop("scores")
    names = [argument.name for argument in torch.ops.dmattn.keep_step.default._schema.arguments]
    given = named | token._asdict() | Rule(3, 1, 2, 1, False)._asdict() | changes
    return [given[name] for name in names]


PLAIN = {"bias_cache": None, "document": None, "trail": None, "bias": None, "padding": None, "documents": None}


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (torch.ops.dmattn.keep_step.default, step()),
        (torch.ops.dmattn.keep_chunk.default, step(5)),
        (torch.ops.dmattn.keep_chunk.default, step(5, **PLAIN)),
    ],
    ids=["step", "chunk", "plain chunk"],
)
def test_its_schema_fake_and_changes_agree(operator: torch._ops.OpOverload, arguments: list):
    torch.library.opcheck(
        operator, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    )


@pytest.mark.parametrize("operator", [torch.ops.dmattn.keep_step.default, torch.ops.dmattn.keep_chunk.default])
def test_the_arguments_stand_in_the_order_of_the_records(operator: torch._ops.OpOverload):
    names = [argument.name for argument in operator._schema.arguments]
    short = [name.removesuffix("_cache") if name.endswith("_cache") else name for name in names]
    expected = [*Stored._fields, *Token._fields, *Rule._fields]
    assert [name.replace("scores", "score") for name in short] == [name.replace("scores", "score") for name in expected]
    changed = [argument.name for argument in operator._schema.arguments if argument.is_write]
    assert changed == names[: len(Stored._fields)]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"key": torch.zeros(2, 2, 2, 8)}, ValueError, "key must have shape"),
        ({"value": torch.zeros(2, 1, 2, 8, dtype=torch.float64)}, TypeError, "value"),
        ({"scores": torch.zeros(3, 2, 1)}, ValueError, "scores must have shape"),
        ({"bias": torch.zeros(2, 3, 1, 1)}, ValueError, "bias must have shape"),
        ({"bias_cache": torch.zeros(2, 3, 16)}, ValueError, "bias_cache must have a multiple of 2 heads, got 3"),
        ({"padding": torch.zeros(2, 1)}, TypeError, "padding"),
        ({"documents": torch.zeros(2, 2, dtype=torch.int64)}, ValueError, "documents must have shape"),
        ({"document": None}, ValueError, "document and trail must be given together"),
        ({"trail": torch.zeros(2, 5, 2, dtype=torch.int64)}, ValueError, "trail must have shape"),
        (
            {"key_cache": torch.zeros(1).expand(2, 2, (1 << 29) + 1, 8)},
            ValueError,
            "at most 536870912 slots, got 536870913",
        ),
        ({"places": torch.zeros(2, 2, 16, 4, dtype=torch.int64).mT}, ValueError, "places must be contiguous"),
        ({"arrived": torch.zeros(2)}, TypeError, "arrived"),
        ({"keep": -1}, ValueError, "keep"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_what_it_refuses(changes: dict[str, Tensor], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        torch.ops.dmattn.keep_step(*step(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": torch.zeros(2, 5, 8)}, "key must have"),
        ({"key": torch.zeros(2, 0, 2, 8)}, "key must have at least one position, got none"),
        ({"value": torch.zeros(2, 1, 2, 8)}, "value must have shape"),
        ({"scores": torch.zeros(2, 2, 1)}, "scores must have shape"),
        ({"padding": torch.zeros(2, 1, dtype=torch.bool)}, "padding must have shape"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_what_a_chunk_refuses(changes: dict[str, Tensor], words: str):
    with pytest.raises(ValueError, match=words):
        torch.ops.dmattn.keep_chunk(*step(5, **changes))


@pytest.mark.parametrize(("name", "positions"), [("keep_step", 1), ("keep_chunk", 7)])
def test_a_compiled_call_changes_the_cache_where_it_lies(name: str, positions: int):
    cache = KeptKeys(2, 2, 8, 5, keep_last=2, dtype=torch.float32)
    attend = torch.compile(lambda *parts: cache.attend(*parts), fullgraph=True)
    rows = [torch.randn(2, positions, heads, 8) for heads in (4, 2, 2)]
    parts = (*rows, torch.randn(2, 2, positions))
    torch._dynamo.reset()
    _, [code, *_] = run_and_get_code(attend, *parts)
    body = code[code.index("def call") : code.index("def get_args") if "def get_args" in code else None]
    assert body.count(f"= torch.ops.dmattn.{name}.default(") == body.count("= torch.ops.dmattn.forward.default(") == 1
    assert "empty_strided" not in body and "cpp_fused" not in body
    assert cache.length.tolist() == [positions] * 2

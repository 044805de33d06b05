"""The library's own operators, which serve programs without Python, return what the operators of the package return."""

import os
import subprocess
import sys

import pytest
import torch

import dmattn_ops
from dmattn_ops.kernels import native
from dmattn_ops.testing import check, draw
from tests.support.recorded_calls import ALONE, LIBRARY, Recorded, made, repeated

pytestmark = pytest.mark.skipif(not native.available(), reason=f"THE LIBRARY IS NOT TESTED: {native.reason()}")

CASES = 30


def test_random_problems_return_the_same(tmp_path):
    with Recorded() as recorded:
        for seed in range(CASES):
            check(draw(seed))
    names = {name for name, *_ in recorded.calls}
    assert {"forward", "backward", "qkvpacked_backward", "varlen_backward", "pack_mask", "pack_intervals"} <= names
    assert {"forward.used", "backward.used"} <= names
    assert repeated(recorded.calls, tmp_path) == [f"{len(recorded.calls)} calls"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_batch_invariant_calls_return_the_same(tmp_path, dtype):
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, 150, heads, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    shared, own = (torch.randn(batch, 4, 1, 150, dtype=dtype, requires_grad=True) for batch in (1, 3))
    mask, sink = torch.rand(3, 1, 150, 150) < 0.5, torch.randn(4, requires_grad=True)
    packed = [part.flatten(0, 1) for part in (query, key, value)]
    of_keys = torch.randn(2, 450, dtype=dtype, requires_grad=True)
    q_ends, k_ends = (
        torch.tensor(ends, dtype=torch.int32) for ends in ([0, 130, 130, 290, 440], [0, 0, 170, 300, 440])
    )

    def trained():
        for bias, more in ((shared, {}), (own, {"mask": mask}), (shared, {"sink": sink}), (None, {"is_causal": True})):
            leaves = [part for part in (query, key, value, bias, more.get("sink")) if part is not None]
            outs = dmattn_ops.flash_dmattn_func(
                query, key, value, bias=bias, return_lse=True, batch_invariant=True, **more
            )
            torch.autograd.grad(sum(out.sin().sum() for out in outs), leaves)
        for more in ({"bias": of_keys}, {"bias": of_keys, "mask": torch.rand(2, 450) < 0.7}):
            out = dmattn_ops.flash_dmattn_varlen_func(*packed, q_ends, k_ends, 170, 170, batch_invariant=True, **more)
            torch.autograd.grad(out.sin().sum(), (query, key, value, of_keys))

    calls = made(trained)
    names = [name for name, *_ in calls]
    assert names.count("backward") == 4 and names.count("varlen_backward") == 2
    assert repeated(calls, tmp_path) == [f"{len(calls)} calls"]


def test_batch_invariant_calls_round_the_gradient_of_a_sink_once(tmp_path):
    """What two entries add nearly cancels: the sum of two rounded parts would be wrong in its second digit."""
    query, key = (torch.randn(1, 60, heads, 16, dtype=torch.float16).expand(2, -1, -1, -1) for heads in (4, 2))
    sink = torch.zeros(4, dtype=torch.float16, requires_grad=True)
    weights = torch.tensor([8.0, -7.9]).half().view(2, 1, 1, 1)

    def trained():
        out = dmattn_ops.flash_dmattn_func(query, key, key.abs(), sink=sink, batch_invariant=True)
        torch.autograd.grad(out, sink, weights.expand_as(out))

    calls = made(trained)
    assert [name for name, *_ in calls] == ["forward", "backward"]
    assert repeated(calls, tmp_path) == ["2 calls"]


def test_dynamic_masks_sinks_and_documents_return_the_same(tmp_path):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 150, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    documents = torch.arange(150).expand(2, -1) // 40 * 3 % 7
    calls = made(lambda: dmattn_ops.prepare_mask(documents=documents, is_causal=True))
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        scores = torch.randn(2, 2, 150).to(dtype)
        scores[0, 0, 3:9] = float("nan")
        for keywords in ({"documents": documents}, {"keep_first": 3, "keep_last": 5}, {"is_causal": False}):
            calls += made(lambda scores=scores, keywords=keywords: dmattn_ops.dynamic_mask(scores, 20, **keywords))
    mask, sink = dmattn_ops.dynamic_mask(torch.randn(2, 2, 150), 20), torch.randn(4, requires_grad=True)

    def trained():
        for wanted in (False, True):
            outs = dmattn_ops.flash_dmattn_func(query, key, value, mask, sink=sink, return_lse=wanted)
            outs = outs if wanted else (outs,)
            torch.autograd.grad(sum(out.sin().sum() for out in outs), (query, key, value, sink))

    calls += made(trained)
    names = [name for name, *_ in calls]
    assert names.count("key_lifetimes") == 12 and names.count("backward") == 2
    assert {"rank_ids", "list_tiles"} <= set(names)
    assert repeated(calls, tmp_path) == [f"{len(calls)} calls"]


def packed(query, ends):
    """Return arguments for sequences that end there."""
    return (*[query[0]] * 3, *[torch.tensor(ends, dtype=torch.int32)] * 2, None, None, None, None, 9, 9)


def test_operators_that_the_library_defined_before_are_an_import_error_in_words():
    code = "import ctypes, sys, torch; ctypes.CDLL(sys.argv[1]).dmattn_define_operators(); import dmattn_ops"
    environment = {**os.environ, "PYTHONPATH": str(LIBRARY.parent.parent)}
    command = [sys.executable, "-c", code, LIBRARY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "ImportError: the operators torch.ops.dmattn are defined already, by libdmattn.so" in done.stderr


REFUSED = {
    "forward": [
        lambda q: (q, q, q[:, :4]),
        lambda q: (q, q, q[0]),
        lambda q: (q, q, q.half()),
        lambda q: (q, q, q, q.int()),
        lambda q: (q, q, q, *[None] * 10, torch.zeros(3)),
        lambda q: (q, q, q, *[None] * 12, 0, 0, -1),
        lambda q: (q, q, q, *[None] * 12, 0, 0, 0, 0, None, float("nan")),
        lambda q: (q, q, q, *[None] * 12, 0, 0, 0, 0, None, None, -1.0),
        lambda q: (q, q, q, *[None] * 12, 0, 0, 0, 0, None, None, 0.0, 1.5),
        lambda q: (q, q, q, *[None] * 12, 0, 0, 0, 0, None, None, 0.0, 0.5),
    ],
    "varlen_forward": [lambda q: packed(q, [0, 9, 20]), lambda q: packed(q, [1, 4, 9]), lambda q: packed(q, [0, 7, 3])],
    "pack_mask": [lambda q: (torch.ones(1, 1, 3, 9), None, None, 9), lambda q: (torch.ones(9, 9), None, None, 9)],
    "list_tiles": [lambda q: (None, torch.ones(2, 9, dtype=torch.int32), 9)],
    "key_lifetimes": [
        lambda q: (q[0], torch.tensor([[0, 0, 1, 1, 0, 2, 2, 2, 2]]), 3),
        lambda q: (torch.randn(1, 1, 9), torch.tensor([[0, 0, 1, 1, 0, 2, 2, 2, 2]]), 3),
        lambda q: (torch.randn(1, 1, 9), None, -3),
    ],
    "rank_ids": [lambda q: (torch.ones(3, 9),), lambda q: (torch.ones(9, dtype=torch.int64),)],
    "spread_lists": [lambda q: (torch.ones(2, dtype=torch.int32), torch.full((2, 3), 7, dtype=torch.int32), 5)],
    "pack_selection": [lambda q: (torch.ones(1, 1, 9, 1, dtype=torch.int64), None, None, 4, 9)],
    "key_mass": [lambda q: (q, q)],
    "mask_as_exported": [lambda q: (q, torch.empty(9, 9, 0), torch.empty(1, 0, 1, 0), 9, 9, 0, 0, None, False)],
}


def test_what_does_not_fit_is_refused(tmp_path):
    query = torch.randn(1, 9, 2, 8)
    words = dict.fromkeys(("pack_selection", "key_mass"), ALONE)
    calls = [(name, make(query), words.get(name, ""), True) for name, makes in REFUSED.items() for make in makes]
    assert repeated(calls, tmp_path) == [f"{len(calls)} calls"]

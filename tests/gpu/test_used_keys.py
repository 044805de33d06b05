"""`seqlen_k_used` on a GPU: every kind of mask against float64, captured and planned calls, numbers that are clamped."""

from __future__ import annotations

import pytest
import torch

from dmattn_ops import TileMask, flash_dmattn_func

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.support import used_cases  # noqa: E402
from tests.support.used_cases import KINDS, Case, check, draw, ours, poisoned  # noqa: E402

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def on_gpu(case: Case) -> Case:
    """Return a case whose tensors lie on the GPU."""
    moved = [each.to("cuda") if isinstance(each, (torch.Tensor, TileMask)) else each for each in case]
    return Case(*moved)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_random_calls_are_those_of_the_definition(kind: str, seed: int) -> None:
    case = draw(1000 * KINDS.index(kind) + seed, kind, DTYPES[seed % 3], largest=300)
    found = ours(on_gpu(poisoned(case)))
    check(case, {name: each.cpu() for name, each in found.items()})


@pytest.mark.parametrize("width", [64, 128, 256])
def test_static_caches_that_hold_nan_where_nothing_is_written(width: int) -> None:
    query = torch.randn(3, 1, 16, width, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(3, 9000, 4, width, device="cuda", dtype=torch.bfloat16)
    value, used = key.flip(-1), torch.tensor([1, 4097, 9000], dtype=torch.int32, device="cuda")
    written = torch.arange(9000, device="cuda") < used[:, None]
    for rows in (key, value):
        rows.masked_fill_(~written[:, :, None, None], float("nan"))
    out = flash_dmattn_func(query, key, value, is_causal=True, seqlen_k_used=used)
    for entry, number in enumerate(used.tolist()):
        part = (query[entry : entry + 1], *(rows[entry : entry + 1, :number] for rows in (key, value)))
        expected = flash_dmattn_func(*[each.float() for each in part])
        assert (out[entry : entry + 1] - expected).norm() < 1e-2 * expected.norm()


def test_captured_and_planned_calls_read_the_numbers_anew() -> None:
    query, key = (torch.randn(2, length, 4, 64, device="cuda", dtype=torch.bfloat16) for length in (1, 2000))
    used = torch.tensor([5, 2000], dtype=torch.int32, device="cuda")
    steps = [[5, 2000], [6, 3], [0, 77], [1500, 1]]

    def attend() -> torch.Tensor:
        return flash_dmattn_func(query, key, key, is_causal=True, seqlen_k_used=used)

    def expected(numbers: list[int]) -> torch.Tensor:
        keep = torch.arange(2000, device="cuda") < torch.tensor(numbers, device="cuda")[:, None]
        return flash_dmattn_func(query.float(), key.float(), key.float(), keep[:, None, None])

    for numbers in steps:  # a plan is made at the second call
        used.copy_(torch.tensor(numbers, dtype=torch.int32))
        assert torch.allclose(attend().float(), expected(numbers), atol=2e-2)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for numbers in steps:
        used.copy_(torch.tensor(numbers, dtype=torch.int32))
        graph.replay()
        assert torch.allclose(out.float(), expected(numbers), atol=2e-2)


def test_numbers_outside_of_what_there_is_are_clamped(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = (torch.randn(2, length, 4, 64, device="cuda") for length in (3, 100))
    found, expected = (
        flash_dmattn_func(query, key, key, seqlen_k_used=torch.tensor(numbers, dtype=torch.int32, device="cuda"))
        for numbers in ([-7, 1000], [0, 100])
    )
    assert torch.equal(found, expected)
    monkeypatch.setenv("DMATTN_CHECK", "1")
    with pytest.raises(ValueError, match="seqlen_k_used must be between 0 and the length of key, 100, got -7"):
        flash_dmattn_func(query, key, key, seqlen_k_used=torch.tensor([-7, 1000], dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize("kind", ["none", "dense", "padding", "pair", "dynamic"])
def test_nothing_is_read_on_the_host(kind: str) -> None:
    case = on_gpu(draw(5, kind, torch.bfloat16))
    found = ours(case)  # compiles
    grads = used_cases.gradients_of((found["out"], found["lse"]))
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours(case, grads=grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_calls_agree() -> None:
    drawn = draw(8, "bits", torch.bfloat16)
    assert used_cases.visible(drawn).any()
    case = on_gpu(drawn)
    compiled = torch.compile(flash_dmattn_func, fullgraph=True)
    keywords = {**case.keywords, "seqlen_k_used": case.used}
    given = (*case[:3], case.mask)
    assert torch.equal(compiled(*given, **keywords), flash_dmattn_func(*given, **keywords))

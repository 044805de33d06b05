"""`batch_invariant` on a GPU: an entry has the same bits in every batch, a packed sequence beside any others."""

from __future__ import annotations

import pytest
import torch

import dmattn_ops

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.support import invariant_cases as cases  # noqa: E402

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("kind", cases.MASKS)
@pytest.mark.parametrize("seed", range(6))
def test_an_entry_has_the_same_bits_in_every_batch(kind: str, seed: int) -> None:
    given = cases.draw(100 * cases.MASKS.index(kind) + seed, kind, dtype=DTYPES[seed % 3], device="cuda", longest=900)
    cases.check_parts(given, 4, [(0, 1), (2, 3), (1, 4)], is_causal=seed % 2 == 1, softcap=5.0 * (seed % 3 == 2))


@pytest.mark.parametrize("seed", range(8))
def test_a_packed_sequence_has_the_same_bits_beside_any_others(seed: int) -> None:
    cases.check_packed(seed, DTYPES[seed % 3], "cuda", longest=900)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 9000), (16, 5000), (512, 512), (4096, 4096)])
def test_large_batches_of_usual_sizes(width: int, seqlen_q: int, seqlen_k: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(24, seqlen_q, 8, width, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(24, seqlen_k, 2, width, device="cuda", dtype=torch.bfloat16)
    given = cases.Batch(query, key, key.flip(1), None, None, torch.zeros(8, device="cuda"))
    cases.check_parts(given, 24, [(0, 1), (5, 8)], is_causal=True)


def test_packed_keys_of_dynamic_masks() -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(6, 8192, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2))
    mask = dmattn_ops.dynamic_mask(torch.randn(6, 2, 8192, device="cuda"), 512)
    given = cases.Batch(query, key, key.flip(1), mask, None, None)
    assert dmattn_ops.explain(*given[:4], batch_invariant=True).forward.packing.packing is not None
    cases.check_parts(given, 6, [(0, 1), (2, 5)])


def test_an_entry_of_huge_scores_changes_no_bits_of_others() -> None:
    """Large sums are taken in another way, which rows of other entries may not decide."""
    torch.manual_seed(0)
    query, key = (torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    given = cases.Batch(query, key, key.flip(1), None, None, None)
    expected = cases.results(given)
    huge = query.clone()
    huge[1] *= 1e9
    found = cases.results(given._replace(query=huge))
    assert all(torch.equal(found[name][0], each[0]) for name, each in expected.items())


def test_repeats_and_replays_give_the_same_bits() -> None:
    given = cases.draw(4, "dense", dtype=torch.bfloat16, device="cuda")
    first = cases.results(given)
    for _ in range(5):
        assert all(torch.equal(each, first[name]) for name, each in cases.results(given).items())

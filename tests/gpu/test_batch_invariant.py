"""`batch_invariant` on a GPU: an entry has the same bits in every batch, a packed sequence beside any others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dmattn_ops

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.support import invariant_cases as cases  # noqa: E402
from tests.support.architecture import HOPPER  # noqa: E402

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


# By kind: the kernel of the backward up to 128 columns
KERNELS = {
    "full": "hopper", "causal": "hopper", "window": "hopper", "soft cap": "hopper", "key bias": "hopper", "bias": "hopper",
    "bits": "hopper256", "documents": "hopper256", "dynamic": "hopper256",
}  # fmt: skip
HEADS = {64: (4, 4), 96: (4, 4), 128: (8, 2), 256: (4, 2)}  # by columns, of queries and of keys
CASES = [(kind, dim) for dim in HEADS for kind in KERNELS if dim in (64, 128) or kind in ("causal", "documents")]


def large(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor * scale


def spoilt(tensor: Tensor) -> Tensor:
    """Return rows of which some hold NaN."""
    made = tensor.clone()
    made[:, 5::50] = float("nan")
    return made


@pytest.mark.parametrize(("kind", "dim"), CASES)
def test_neighbours_change_no_bits(kind: str, dim: int) -> None:
    """Rows of large scores, from about 1e4 on, take their sums in another way; a NaN has masked calls computed again."""
    given, keywords = cases.of_kind(kind, 3, 333, HEADS[dim], dim, "cuda")
    backward = dmattn_ops.explain(*given[:5], batch_invariant=True, **keywords).backward
    if HOPPER:
        assert backward.kernel == (KERNELS[kind] if dim <= 128 else "hopper256")
    for scale in (1e4, 1e6):
        cases.check_neighbours(given, large(scale), ("query",), **keywords)
    cases.check_neighbours(given, spoilt, **keywords)


@pytest.mark.parametrize(
    ("kind", "dim"), [("full", 64), ("causal", 64), ("causal", 128), ("documents", 128), ("dynamic", 128)]
)
@pytest.mark.parametrize("seqlen", [300, 2048])
def test_the_size_of_the_batch_changes_no_bits(kind: str, dim: int, seqlen: int) -> None:
    """How many blocks there are decides about their order, and without the switch about shares of their work."""
    given, keywords = cases.of_kind(kind, 12, seqlen, HEADS[dim], dim, "cuda")
    cases.check_parts(given, 12, [(0, 1), (11, 12), (2, 5)], **keywords)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e6])
def test_packed_neighbours_change_no_bits(dim: int, scale: float) -> None:
    heads, heads_kv = HEADS[dim]
    lengths = [300, 1, 700, 129]
    random = torch.Generator().manual_seed(dim)
    rows = [
        torch.randn(sum(lengths), each, dim, generator=random).to("cuda", torch.bfloat16)
        for each in (heads, heads_kv, heads_kv)
    ]
    ends = [0, 300, 301, 1001, 1130]
    rows[0][301:1001] *= scale
    together = cases.packed_results(tuple(rows), [ends, ends], None, None, 1000, is_causal=True)
    for number, found in enumerate(together):
        own = slice(ends[number], ends[number + 1])
        alone = cases.packed_results(
            tuple(each[own] for each in rows), [[0, lengths[number]]] * 2, None, None, lengths[number], is_causal=True
        )[0]
        for name, part in alone.items():
            assert torch.equal(found[name], part), (name, number)


def test_repeats_and_replays_give_the_same_bits() -> None:
    given = cases.draw(4, "dense", dtype=torch.bfloat16, device="cuda")
    first = cases.results(given)
    for _ in range(5):
        assert all(torch.equal(each, first[name]) for name, each in cases.results(given).items())

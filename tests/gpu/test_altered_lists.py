"""Lists of tiles that were altered after they were made give any numbers, and lead no kernel outside of its tensors."""

from __future__ import annotations

import pytest
import torch

from dmattn_ops import TileMask, flash_dmattn_func, prepare_mask

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

SQ, SK = 400, 330
GARBAGE = {
    **{f"tiles of {number}": (slice(4, None), number) for number in (2**31 - 1, 10**6, 3, -1, -(2**31))},
    **{
        f"{word} of {number}": (slice(at, at + 1), number)
        for at, word in enumerate(("rank", "partial", "full"))
        for number in (7, 2**31 - 1, -1, -(2**31))
    },
}
CALLS = {
    "64": (64, False, None),
    "128": (128, False, None),
    "256": (256, False, None),
    "deterministic": (64, True, None),
    "a shared bias": (128, False, (1, 1, SQ, SK)),
    "a bias of key heads": (64, False, (2, 2, SQ, SK)),
    "a bias per key": (128, False, (2, 2, 1, SK)),
}


def made(kind: str) -> TileMask:
    """Return a mask with partial and full tiles."""
    if kind == "bits":
        return prepare_mask(torch.rand(2, 1, SQ, SK, device="cuda") < 0.5, is_causal=True)
    ids = torch.arange(SQ, device="cuda").div(150, rounding_mode="floor").expand(2, -1)
    return prepare_mask(documents=(ids, ids[:, :SK]))


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("kind", ["bits", "segments"])
@pytest.mark.parametrize("call", CALLS)
def test_lists_of_any_numbers_lead_no_kernel_out_of_its_tensors(call: str, kind: str, garbage: str) -> None:
    dim, deterministic, shape = CALLS[call]
    torch.manual_seed(0)
    query = torch.randn(2, SQ, 4, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    key, value = (torch.randn(2, SK, 2, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    bias = None if shape is None else torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    inputs = [tensor for tensor in (query, key, value, bias) if tensor is not None]

    def results(mask: TileMask) -> list[torch.Tensor]:
        out = flash_dmattn_func(query, key, value, mask, bias, deterministic=deterministic)
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    mask = made(kind)
    before = results(mask)
    words, number = GARBAGE[garbage]
    altered = made(kind)
    for lists in (altered.row_tiles, altered.col_tiles):
        assert lists is not None
        lists[..., words] = number
    results(altered)
    torch.cuda.synchronize()
    for again, once in zip(results(mask), before, strict=True):  # nothing that other calls use was written
        assert torch.allclose(again.float(), once.float(), atol=0.05, rtol=0.05)

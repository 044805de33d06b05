"""The eager launchers against autograd through the plain formula, and Philox against its published answers."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import Tensor

from dmattn_ops import dynamic_mask, meta, prepare_mask
from dmattn_ops.call import (
    NO_MASK,
    UNBOUNDED,
    Call,
    Gradients,
    Mask,
    Result,
    Saved,
    Varlen,
    dropout_threshold,
    last_dropped,
    plain_options,
)
from dmattn_ops.kernels import reference
from dmattn_ops.masks import layout

FAR = UNBOUNDED
SCALE = 0.3
# batch, Sq, Sk, H, Hkv, D, Dv, mask shape, bias shape, band, softcap, dropout
PROBLEMS = [
    (2, 5, 7, 2, 2, 4, 3, None, None, (-FAR, FAR), 0.0, 0.0),
    (2, 130, 140, 4, 2, 4, 3, (1, 2, 130, 140), (2, 2, 130, 140), (-FAR, 10), 0.0, 0.0),
    (2, 130, 140, 4, 2, 4, 3, (2, 4, 1, 140), (1, 4, 1, 140), (-20, 10), 3.0, 0.2),
    (2, 130, 259, 4, 1, 4, 3, (2, 1, 130, 259), (1, 1, 130, 259), (-20, FAR), 3.0, 1.0),
    (2, 130, 259, 4, 2, 4, 3, None, (2, 1, 1, 259), (-20, -10), 3.0, 0.5),
    (2, 0, 5, 4, 2, 4, 3, None, (2, 1, 1, 5), (-20, -10), 3.0, 0.5),
    (2, 3, 0, 4, 2, 4, 3, (2, 4, 3, 0), None, (-20, 10), 3.0, 0.5),
    (0, 3, 5, 4, 2, 4, 3, None, (1, 4, 3, 5), (-20, 10), 3.0, 0.5),
]


def philox(counter: list[int], key: list[int], rounds: int = 10) -> list[int]:
    """Philox4x32 on Python integers."""
    for _ in range(rounds):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        low = 0xFFFFFFFF
        counter = [second >> 32 ^ counter[1] ^ key[0], second & low, first >> 32 ^ counter[3] ^ key[1], first & low]
        key = [key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low]
    return counter


def poisoned(*like: Tensor) -> list[Tensor]:
    return [torch.full_like(tensor, math.nan, requires_grad=False) for tensor in like]


def finite_loss(out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor) -> Tensor:
    return (out * grad_out).sum() + torch.where(torch.isfinite(lse), lse * grad_lse, 0).sum()


def test_philox_gives_the_published_answers():
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("seed", [0, -1, 123456789012345, -(1 << 63)])
def test_dropout_keeps_what_philox_says(seed: int):
    kept = reference.philox_keep(torch.tensor([[seed], [7]]), 18, 27, 0.3)
    for b, i, j in torch.cartesian_prod(*map(torch.arange, (2, 18, 27))).tolist():
        own = (seed, 7)[b]
        words = philox([i & ~8, j & ~8, own & 0xFFFFFFFF, own >> 32 & 0xFFFFFFFF], [0, 0], rounds=7)
        assert kept[b, 0, i, j].item() == (words[2 * (i >> 3 & 1) + (j >> 3 & 1)] >= dropout_threshold(0.3))


@pytest.mark.parametrize("dropout_p", [0.003, 0.1, 0.5, 0.9])
def test_what_dropout_keeps_looks_like_independent_draws(dropout_p: float):
    """Seeds of which many bits are alike, and pairs of weights at every distance that kernels group or tile by."""
    seeds = torch.tensor([[0, 1, 2, 1 << 32, (1 << 32) + 1, -1, -2, (1 << 63) - 1]])
    kept = reference.philox_keep(seeds, 512, 512, dropout_p).double()
    deviation = (kept - (1 - dropout_p)) / math.sqrt(dropout_p * (1 - dropout_p))

    def in_deviations(sums: Tensor, count: int) -> Tensor:
        return (sums / math.sqrt(count)).abs()

    assert in_deviations(deviation.sum((-1, -2)), 512 * 512).max() < 5
    assert in_deviations(deviation.sum(-1), 512).max() < 6  # of 4096 rows
    assert in_deviations(deviation.sum(-2), 512).max() < 6
    shifts = [0, 1, 2, 7, 8, 9, 15, 16, 24, 64, 128]
    for rows in shifts:
        for columns in shifts:
            if rows == columns == 0:
                continue
            shifted = deviation[..., rows:, columns:] * deviation[..., : 512 - rows, : 512 - columns]
            assert in_deviations(shifted.sum((-1, -2)), shifted[0, 0].numel()).max() < 6, (rows, columns)
            mirrored = deviation[..., rows:, : 512 - columns] * deviation[..., : 512 - rows, columns:]
            assert in_deviations(mirrored.sum((-1, -2)), mirrored[0, 0].numel()).max() < 6, (rows, columns)
    between = torch.einsum("bhij,bgij->hg", deviation, deviation).fill_diagonal_(0)
    assert in_deviations(between, 512 * 512).max() < 5
    turned = torch.einsum("bhij,bgji->hg", deviation, deviation)
    assert in_deviations(turned, 512 * 512).max() < 6


def test_a_chance_too_small_for_32_bits_still_drops_and_one_of_1_drops_all():
    assert [dropout_threshold(p) for p in (0.0, 1e-30, 2.0**-32, 0.5, 1 - 1e-16, 1.0)] == [
        0,
        1,
        1,
        1 << 31,
        1 << 32,
        1 << 32,
    ]
    assert [last_dropped(p) for p in (0.0, 1e-30, 0.5, 0.6, 1.0)] == [0, 0, (1 << 31) - 1, -1717986919, -1]
    assert not reference.philox_keep(torch.tensor([[3]]), 200, 200, 1.0).any()


@pytest.mark.parametrize("q_origin", [0, 3, 1 << 29])
@pytest.mark.parametrize("k_origin", [0, 1, 2, 3, 4, 7, (1 << 29) + 1])
def test_a_part_of_a_sequence_drops_what_the_whole_drops(q_origin: int, k_origin: int):
    seed = torch.tensor([[5, -9]])
    starts = max(0, q_origin - 3), max(0, k_origin - 7)
    whole = reference.philox_keep(seed, q_origin + 6 - starts[0], k_origin + 9 - starts[1], 0.4, *starts)
    part = reference.philox_keep(seed, 6, 9, 0.4, q_origin, k_origin)
    assert torch.equal(part, whole[..., q_origin - starts[0] :, k_origin - starts[1] :])


@pytest.mark.parametrize("problem", PROBLEMS, ids=repr)
def test_forward_and_backward_agree_with_autograd_through_the_formula(problem: tuple):
    batch, seqlen_q, seqlen_k, heads, heads_kv, dim, dim_v, mask_shape, bias_shape, band, softcap, dropout_p = problem
    torch.manual_seed(0)
    shapes = [(batch, seqlen_q, heads, dim), (batch, seqlen_k, heads_kv, dim), (batch, seqlen_k, heads_kv, dim_v)]
    shapes += [] if bias_shape is None else [bias_shape]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    query, key, value, bias = (*inputs, None)[:4]
    options = plain_options(SCALE, *band, softcap=softcap, dropout_p=dropout_p)
    seed, masked = torch.randint(1 << 60, (max(batch, 1), heads)), NO_MASK
    keep = layout.band_mask(*band, seqlen_q, seqlen_k, None)[None, None]
    if mask_shape:
        mask = torch.rand(mask_shape) < 0.6
        mask[..., :1, :] = False  # the first query sees nothing
        packed = meta.pack_mask_outputs(mask, *mask_shape[:2], seqlen_q, *band)
        reference.pack_mask(mask, None, None, seqlen_q, *band, *packed)
        masked, keep = Mask(*packed), keep & mask
    dropped = reference.philox_keep(seed[:batch], seqlen_q, seqlen_k, dropout_p) if dropout_p else None
    expected_out, expected_lse = reference.attention(
        query, key, value, keep, bias,
        softmax_scale=SCALE, softcap=softcap, dropout_keep=dropped, dropout_p=dropout_p,
    )  # fmt: skip
    call = Call(query, key, value, bias, masked, None, seed, None, options)
    out, lse, tail = poisoned(expected_out, expected_lse, expected_lse)
    reference.forward(call, Result(out, lse, tail, None), None)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad(finite_loss(expected_out, expected_lse, grad_out, grad_lse), inputs)
    grads = poisoned(*inputs)
    given = Gradients(grad_out, grad_lse, *(grads if bias is not None else [*grads, None]))
    reference.backward(call, Saved(out, lse, tail), given, None)
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other)


POSITIONS = torch.arange(70, dtype=torch.int32)
KINDS = {
    "none": lambda: NO_MASK,
    "bits": lambda: prepare_mask(torch.rand(2, 1, 70, 70) < 0.5).mask,
    "segments": lambda: prepare_mask(documents=torch.arange(70).expand(2, 70) // 9, is_causal=True).mask,
    "intervals": lambda: prepare_mask(intervals=(POSITIONS[None, None], POSITIONS[None, None] + 9), seqlen_q=70).mask,
    "a dynamic mask": lambda: dynamic_mask(torch.randn(2, 2, 70), 9).mask,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_a_dense_call_never_waits_for_its_device(monkeypatch: pytest.MonkeyPatch, kind: str, dropout_p: float):
    """Tensors on the device "meta" have no elements: whoever asks for one on the host gets an error, as in a captured graph."""
    mask = KINDS[kind]()
    # Autocast does not know this device.
    monkeypatch.setattr(torch, "autocast", lambda device, **options: contextlib.nullcontext())

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tensors = {name: t.to("meta") for name, t in mask._asdict().items() if isinstance(t, Tensor)}
    query, key, value = empty(2, 70, 4, 16), empty(2, 70, 2, 16), empty(2, 70, 2, 24)
    bias, seed, sink = empty(1, 4, 1, 70), empty(2, 4, dtype=torch.int64), empty(4)
    options = plain_options(SCALE, -UNBOUNDED, 0, softcap=5.0, dropout_p=dropout_p)
    call = Call(query, key, value, bias, mask._replace(**tensors), sink, seed, None, options)
    out, grad_out, lse, tail, highest, grad_lse = (*[empty(2, 70, 4, 24)] * 2, *[empty(2, 4, 70)] * 4)
    reference.forward(call, Result(out, lse, tail, highest), None)
    grads = Gradients(grad_out, grad_lse, *(torch.empty_like(leaf) for leaf in (query, key, value, bias, sink)))
    reference.backward(call, Saved(out, lse, tail), grads, None)


@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("bias_heads", [1, 2, 4])
def test_packed_sequences_agree_with_one_call_each(bias_heads: int, top_left: bool):
    torch.manual_seed(0)
    lengths = [(3, 5), (0, 4), (6, 0), (130, 7), (9, 200)]
    starts_q, starts_k = (torch.tensor([0, *side]).cumsum(0).int() for side in zip(*lengths, strict=True))
    total_q, total_k = int(starts_q[-1]) + 2, int(starts_k[-1]) + 3  # rows behind the last sequence
    shapes = (total_q, 4, 8), (total_k, 2, 8), (total_k, 2, 8), (bias_heads, total_k)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    query, key, value, bias = inputs
    keep = torch.rand(2, total_k) < 0.7
    masked, seed = Mask(k_segments=(keep.int() - 1)[None]), torch.randint(1 << 60, (len(lengths), 4))
    options, varlen = plain_options(SCALE, -50, 3, dropout_p=0.25), Varlen(starts_q, starts_k, 130, 200, top_left)
    call = Call(query, key, value, bias, masked, None, seed, varlen, options)
    out, lse, tail = poisoned(query, *[torch.zeros(4, total_q, dtype=torch.float64)] * 2)
    reference.forward(call, Result(out, lse, tail, None), None)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    grads = poisoned(*inputs)
    reference.backward(call, Saved(out, lse, tail), Gradients(grad_out, grad_lse, *grads), None)
    assert torch.all(out[-2:] == 0)
    assert torch.all(lse[:, -2:] == -math.inf)
    loss = torch.zeros((), dtype=torch.float64)
    dropped = reference.philox_keep(seed, 130, 200, 0.25)
    for b, (seqlen_q, seqlen_k) in enumerate(lengths):
        rows, cols = slice(int(starts_q[b]), int(starts_q[b + 1])), slice(int(starts_k[b]), int(starts_k[b + 1]))
        shift = 0 if top_left else seqlen_k - seqlen_q
        visible = layout.band_mask(shift - 50, shift + 3, seqlen_q, seqlen_k, None) & keep[:, None, cols]
        one_out, one_lse = reference.attention(
            query[None, rows], key[None, cols], value[None, cols], visible[None], bias[None, :, None, cols],
            softmax_scale=SCALE, dropout_keep=dropped[b : b + 1, :, :seqlen_q, :seqlen_k], dropout_p=0.25,
        )  # fmt: skip
        torch.testing.assert_close(out[rows], one_out[0])
        torch.testing.assert_close(lse[:, rows], one_lse[0])
        loss = loss + finite_loss(one_out[0], one_lse[0], grad_out[rows], grad_lse[:, rows])
    for one, other in zip(grads, torch.autograd.grad(loss, inputs), strict=True):
        torch.testing.assert_close(one, other)


def test_nan_and_infinity_behind_the_mask_reach_nothing():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 300, 2, 8) for _ in range(3))
    keep = torch.rand(1, 1, 300, 300) < 0.5
    keep[..., 140:280] = False
    keep[:, :, 5] = False
    bias = torch.randn(1, 2, 300, 300).masked_fill(~keep, math.nan)
    grad_out = torch.randn(1, 300, 2, 8)
    packed = meta.pack_mask_outputs(keep, 1, 1, 300, -FAR, FAR)
    reference.pack_mask(keep, None, None, 300, -FAR, FAR, *packed)
    options = plain_options(SCALE)

    def run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, grad_out: Tensor) -> list[Tensor]:
        call = Call(query, key, value, bias, Mask(*packed), None, None, None, options)
        out, lse, tail, peak = poisoned(query, *[torch.zeros(1, 2, 300)] * 3)
        reference.forward(call, Result(out, lse, tail, peak), None)
        grads = poisoned(query, key, value, bias)
        reference.backward(call, Saved(out, lse, tail), Gradients(grad_out, None, *grads), None)
        return [out, lse, *grads, tail, peak]

    expected = run(query, key, value, bias.nan_to_num(0), grad_out)
    key[:, 140:200], value[:, 200:280], query[:, 5], grad_out[:, 5] = math.nan, math.inf, math.nan, math.nan
    actual = run(query, key, value, bias, grad_out)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert torch.all(actual[0][:, 5] == 0)
    assert torch.all(actual[1][..., 5] == -math.inf)
    assert torch.all(actual[3][:, 140:280] == 0)
    assert torch.all(actual[4][:, 140:280] == 0)
    assert torch.all(actual[-2][..., 5] == 0)
    assert torch.all(actual[-1][..., 5] == -math.inf)

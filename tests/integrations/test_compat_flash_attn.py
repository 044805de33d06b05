"""flash-attn 2 by the calls of its own tests: a reference in float32, every function, window sizes, dropout, ALiBi."""

import inspect
import math

import pytest
import torch
from torch.nn import functional as F

import dmattn_ops.compat.flash_attn as flash_attn
from dmattn_ops.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from dmattn_ops.compat.flash_attn.bert_padding import index_first_axis, index_put_first_axis, pad_input, unpad_input
from dmattn_ops.compat.flash_attn.flash_attn_interface import flash_attn_func as of_interface

B, H, HKV, D = 2, 4, 2, 16
EVERYTHING = (-1, -1)


def attention_ref(q, k, v, window_size=EVERYTHING, slopes=None, softcap=0.0, kept=None, dropout_p=0.0, scale=None):
    """Attention, lse and weights as the reference of flash-attn's tests computes them, from the bottom right corner."""
    dtype = q.dtype
    q, k, v = (part.to(torch.promote_types(dtype, torch.float32)).transpose(1, 2) for part in (q, k, v))
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, columns = scores.shape[-2:]
    distance = torch.arange(columns) - (torch.arange(rows).unsqueeze(-1) + columns - rows)
    if slopes is not None:
        scores = scores - slopes.reshape(-1, slopes.shape[-1], 1, 1) * distance.abs()
    left, right = window_size
    hidden = torch.zeros(rows, columns, dtype=torch.bool)
    hidden |= (distance < -left) if left >= 0 else False
    hidden |= (distance > right) if right >= 0 else False
    scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.softmax(scores, dim=-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    dropped = weights if kept is None else weights * kept / (1 - dropout_p)
    return (dropped @ v).transpose(1, 2).to(dtype), lse, weights


def inputs(seqlen_q, seqlen_k, heads_kv=HKV, dtype=torch.float32):
    q = torch.randn(B, seqlen_q, H, D, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(B, seqlen_k, heads_kv, D, dtype=dtype, requires_grad=True) for _ in range(2))
    return q, k, v


def same_gradients(output, expected, leaves):
    target = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(output, leaves, target), torch.autograd.grad(expected, leaves, target), atol=3e-5, rtol=3e-4
    )


@pytest.mark.parametrize("lengths", [(33, 33), (5, 40), (40, 5), (1, 40)])
@pytest.mark.parametrize("window_size", [EVERYTHING, (7, 3), (0, 0), (-1, 4), (4, -1)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_dense(lengths, window_size, causal, softcap):
    q, k, v = inputs(*lengths)
    out, lse, s_dmask = flash_attn_func(
        q, k, v, 0.0, causal=causal, window_size=window_size, softcap=softcap, return_attn_probs=True
    )
    window = (window_size[0], 0) if causal else window_size
    expected, log_sums, _ = attention_ref(q, k, v, window, softcap=softcap)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, log_sums.where(log_sums != -math.inf, math.inf))
    assert s_dmask.numel() == 0
    if log_sums.isfinite().all():
        same_gradients(out, expected, (q, k, v))


def test_a_window_of_none_is_unlimited_as_in_this_library():
    q, k, v = inputs(20, 20)
    assert torch.equal(flash_attn_func(q, k, v, window_size=(None, 3)), flash_attn_func(q, k, v, window_size=(-1, 3)))


def test_rows_without_a_visible_key_have_an_lse_of_plus_infinity():
    q, k, v = inputs(40, 5)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (lse[..., :35] == math.inf).all()
    assert lse[..., 35:].isfinite().all()
    assert out[:, :35].count_nonzero() == 0


@pytest.mark.parametrize("causal", [True, False])
def test_dropout_is_told_by_the_signs_of_s_dmask(causal):
    q, k, v = inputs(40, 33)
    out, _, s_dmask = flash_attn_func(q, k, v, 0.3, causal=causal, return_attn_probs=True)
    assert s_dmask.shape == (B, H, 128, 128)
    window = (-1, 0) if causal else EVERYTHING
    kept = s_dmask[..., :40, :33] >= 0
    expected, _, weights = attention_ref(q, k, v, window, kept=kept, dropout_p=0.3)
    torch.testing.assert_close(s_dmask[..., :40, :33].abs(), weights)
    torch.testing.assert_close(out, expected)
    same_gradients(out, expected, (q, k, v))
    shown = weights > 0
    share = ((~kept) & shown).sum() / shown.sum()
    assert 0.26 < share < 0.34


def test_asking_for_weights_draws_what_is_drawn_without_asking():
    q, k, v = inputs(20, 20)
    torch.manual_seed(5)
    first, then = flash_attn_func(q, k, v, 0.5), torch.rand(3)
    torch.manual_seed(5)
    again, then_again = flash_attn_func(q, k, v, 0.5, return_attn_probs=True)[0], torch.rand(3)
    assert torch.equal(first, again)
    assert torch.equal(then, then_again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("lengths", [(33, 33), (5, 40)])
@pytest.mark.parametrize("causal", [True, False])
def test_alibi(causal, lengths, per_sequence, dtype):
    q, k, v = inputs(*lengths, dtype=dtype)
    slopes = torch.rand(B, H) * 0.3 if per_sequence else torch.rand(H) * 0.3
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, alibi_slopes=slopes, return_attn_probs=True)
    expected, log_sums, _ = attention_ref(q, k, v, (-1, 0) if causal else EVERYTHING, slopes)
    loose = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(out, expected, **loose)
    torch.testing.assert_close(lse, log_sums)
    if dtype == torch.float32:
        same_gradients(out, expected, (q, k, v))


def test_packed_tensors():
    qkv = torch.randn(B, 33, 3, H, D, requires_grad=True)
    expected = attention_ref(*qkv.unbind(2), (5, 0))[0]
    out = flash_attn_qkvpacked_func(qkv, 0.0, causal=True, window_size=(5, -1))
    torch.testing.assert_close(out, expected)
    same_gradients(out, expected, [qkv])
    asked = flash_attn_qkvpacked_func(qkv, causal=True, window_size=(5, -1), return_attn_probs=True)
    torch.testing.assert_close(asked[0], expected)
    slopes = torch.rand(H)
    out = flash_attn_qkvpacked_func(qkv, causal=True, alibi_slopes=slopes)
    torch.testing.assert_close(out, attention_ref(*qkv.unbind(2), (-1, 0), slopes)[0])
    q, kv = torch.randn(B, 7, H, D), torch.randn(B, 33, 2, HKV, D, requires_grad=True)
    expected = attention_ref(q, *kv.unbind(2), (-1, 0))[0]
    out = flash_attn_kvpacked_func(q, kv, causal=True)
    torch.testing.assert_close(out, expected)
    same_gradients(out, expected, [kv])


def generate_random_padding_mask(max_seqlen, batch_size):
    lengths = torch.randint(1, max_seqlen + 1, (batch_size, 1))
    return torch.arange(max_seqlen) < lengths


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_variable_lengths_of_padded_tensors(dropout_p, alibi):
    q, k, v = inputs(19, 33)
    mask_q, mask_k = generate_random_padding_mask(19, B), generate_random_padding_mask(33, B)
    mask_q[0], mask_k[0] = True, True
    packed_q, indices_q, offsets_q, longest_q, _ = unpad_input(q, mask_q)
    packed_k, _, offsets_k, longest_k, _ = unpad_input(k, mask_k)
    packed_v, *_ = unpad_input(v, mask_k)
    slopes = torch.rand(B, H) * 0.2 if alibi else None
    out, lse, s_dmask = flash_attn_varlen_func(
        packed_q,
        packed_k,
        packed_v,
        offsets_q,
        offsets_k,
        longest_q,
        longest_k,
        dropout_p,
        causal=True,
        alibi_slopes=slopes,
        return_attn_probs=True,
    )
    padded = pad_input(out, indices_q, B, 19)
    parts = []
    for number in range(B):
        rows, columns = int(mask_q[number].sum()), int(mask_k[number].sum())
        kept = None if not dropout_p else s_dmask[number : number + 1, :, :rows, :columns] >= 0
        expected, log_sums, _ = attention_ref(
            *(q[number : number + 1, :rows], k[number : number + 1, :columns], v[number : number + 1, :columns]),
            (-1, 0),
            None if slopes is None else slopes[number : number + 1],
            kept=kept,
            dropout_p=dropout_p,
        )
        part = lse[:, offsets_q[number] : offsets_q[number + 1]]
        torch.testing.assert_close(part, log_sums[0].where(log_sums[0] != -math.inf, math.inf))
        parts.append(F.pad(expected, (0, 0, 0, 0, 0, 19 - rows)))
    expected = torch.cat(parts)
    torch.testing.assert_close(padded, expected)
    if lse.isfinite().all():
        same_gradients(padded, expected, (q, k, v))


def test_variable_lengths_of_packed_tensors():
    offsets = torch.tensor([0, 4, 4, 15], dtype=torch.int32)
    qkv = torch.randn(15, 3, H, D, requires_grad=True)
    expected = flash_attn_varlen_func(*qkv.unbind(1), offsets, offsets, 11, 11, causal=True)
    single = attention_ref(*(part[None, 4:] for part in qkv.unbind(1)), (-1, 0))[0]
    torch.testing.assert_close(expected[None, 4:], single)
    out = flash_attn_varlen_qkvpacked_func(qkv, offsets, 11, 0.0, causal=True)
    assert torch.equal(out, expected)
    out = flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], offsets, offsets, 11, 11, causal=True)
    assert torch.equal(out, expected)
    with pytest.raises(NotImplementedError, match="causal attention only"):
        flash_attn_varlen_qkvpacked_func(qkv, offsets, 11, alibi_slopes=torch.rand(H))
    with pytest.raises(NotImplementedError, match="block_table"):
        flash_attn_varlen_func(*qkv.unbind(1), offsets, offsets, 11, 11, block_table=torch.zeros(1, 1))


def test_signatures_are_those_of_flash_attn():
    last = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic"]
    last.append("return_attn_probs")
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    of = {
        "flash_attn_func": ["q", "k", "v", *last],
        "flash_attn_kvpacked_func": ["q", "kv", *last],
        "flash_attn_qkvpacked_func": ["qkv", *last],
        "flash_attn_varlen_func": ["q", "k", "v", *lengths, *last, "block_table"],
        "flash_attn_varlen_kvpacked_func": ["q", "kv", *lengths, *last],
        "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *last],
    }
    assert set(of) | {"flash_attn_with_kvcache"} == set(flash_attn.__all__)
    with pytest.raises(NotImplementedError, match=r"^flash_attn_with_kvcache is not here, .* call flash_attn_func\("):
        flash_attn.flash_attn_with_kvcache(
            torch.zeros(1, 1, 1, 8), torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8), causal=True
        )
    for name, parameters in of.items():
        assert list(inspect.signature(getattr(flash_attn, name)).parameters) == parameters
    assert of_interface is flash_attn_func


def test_padding_helpers_of_flash_attn_index_flattened_tensors():
    rows = torch.randn(6, 3, requires_grad=True)
    indices = torch.tensor([4, 1])
    assert torch.equal(index_first_axis(rows, indices), rows[[4, 1]])
    put = index_put_first_axis(rows[:2], indices, 6)
    assert put.shape == (6, 3)
    assert torch.equal(put[4], rows[0])
    assert put[0].count_nonzero() == 0
    [gradient] = torch.autograd.grad(put.sum(), rows)
    assert gradient.sum(1).tolist() == [3, 3, 0, 0, 0, 0]


def test_no_sequences_are_packed_and_attended_as_any_number_is():
    packed, indices, offsets, longest, used = unpad_input(torch.randn(0, 5, H, D), torch.ones(0, 5, dtype=torch.int64))
    assert (packed.shape, indices.shape, offsets.tolist(), longest, used.shape) == ((0, H, D), (0,), [0], 0, (0,))
    assert pad_input(packed, indices, 0, 5).shape == (0, 5, H, D)
    for behind in (0, 3):  # rows that belong to no sequence
        rows = torch.randn(behind, H, D)
        out, lse, _ = flash_attn_varlen_func(
            *[rows] * 3, offsets, offsets, 0, 0, causal=True, alibi_slopes=torch.rand(H), return_attn_probs=True
        )
        assert torch.equal(out, torch.zeros_like(rows)) and torch.equal(lse, torch.full((H, behind), torch.inf))


def test_dense_calls_compile_as_a_whole():
    q, k, v = inputs(33, 33)
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    expected = flash_attn_func(q, k, v, causal=True, alibi_slopes=torch.full((H,), 0.1), window_size=(9, -1))
    out = compiled(q, k, v, causal=True, alibi_slopes=torch.full((H,), 0.1), window_size=(9, -1))
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("shape", [(), (H - 1,), (B + 1, H), (H, 1), (B, H, 1)])
def test_slopes_of_other_heads_or_sequences_are_refused(shape):
    query = torch.randn(B, 6, H, D)
    offsets = torch.arange(0, 6 * B + 1, 6, dtype=torch.int32)
    packed = query.flatten(0, 1)
    with pytest.raises(ValueError, match=r"^alibi_slopes must have shape \("):
        flash_attn_func(query, query, query, causal=True, alibi_slopes=torch.rand(shape))
    with pytest.raises(ValueError, match=r"^alibi_slopes must have shape \("):
        flash_attn_varlen_func(
            packed, packed, packed, offsets, offsets, 6, 6, causal=True, alibi_slopes=torch.rand(shape)
        )
    with pytest.raises(TypeError, match=r"^alibi_slopes must be a tensor, got list$"):
        flash_attn_func(query, query, query, causal=True, alibi_slopes=[0.5] * H)


def alibi_by_row(q, k, v, slope, row):
    """Out and lse of one row of causal attention with ALiBi, of one head, in float64."""
    distance = torch.arange(row, -1, -1, dtype=torch.float64)
    scores = (k[0, : row + 1, 0].double() @ q[0, row, 0].double()) * q.shape[-1] ** -0.5 - slope * distance
    return scores.softmax(0) @ v[0, : row + 1, 0].double(), scores.logsumexp(0)


@pytest.mark.parametrize(
    ("dtype", "seqlen", "loose"),
    [(torch.bfloat16, 200_000, 4e-3), (torch.float32, 20_000, 2e-5), (torch.float64, 9_000, 1e-11)],
)
@pytest.mark.parametrize("packed", [False, True])
def test_alibi_is_exact_at_any_length(dtype, seqlen, loose, packed):
    """A bias of each key is rounded with the distance to the last one: the first rows would be off by a hundred times as much."""
    slope = torch.tensor([0.83])
    q, k, v = (torch.randn(1, seqlen, 1, 8, dtype=dtype) for _ in range(3))
    call = {"causal": True, "window_size": (200, -1), "alibi_slopes": slope, "return_attn_probs": True}
    if packed:
        offsets = torch.tensor([0, 30, seqlen - 10, seqlen - 10], dtype=torch.int32)
        lengths = (offsets, offsets, seqlen, seqlen)
        out, lse, _ = flash_attn_varlen_func(q[0], k[0], v[0], *lengths, **call)
        assert out[-10:].count_nonzero() == 0 and (lse[:, -10:] == math.inf).all()
        out, lse = out[None, 30:-10], lse[None, :, 30:-10]
        q, k, v = (part[:, 30:-10] for part in (q, k, v))
    else:
        out, lse, _ = flash_attn_func(q, k, v, **call)
    rows = [*range(0, 300, 7), 5000, out.shape[1] - 1]
    expected = [alibi_by_row(q, k, v, float(slope), row) for row in rows]
    outs, log_sums = (torch.stack(each) for each in zip(*expected, strict=True))
    assert (out[0, rows, 0] - outs).norm() < loose * outs.norm()
    assert (lse[0, 0, rows].double() - log_sums).norm() < loose * log_sums.norm()


@pytest.mark.parametrize("packed", [False, True])
def test_alibi_in_parts_has_the_weights_and_gradients_of_the_whole(packed, monkeypatch):
    slopes, lengths = torch.rand(B, H), (300, 340)
    q, k, v = inputs(*lengths)
    leaves = (q, k, v)
    function, given = flash_attn_func, leaves
    if packed:
        offsets = [torch.tensor([0, length, 2 * length], dtype=torch.int32) for length in lengths]
        function = lambda q, k, v, *rest, **more: flash_attn_varlen_func(q, k, v, *offsets, *lengths, *rest, **more)  # noqa: E731
        given = tuple(part.flatten(0, 1) for part in leaves)
    whole = function(*given, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    monkeypatch.setattr("dmattn_ops.biases.exact_rows", lambda dtype: 128)
    out, lse, weights = function(*given, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    assert weights.numel() == 0
    torch.testing.assert_close((out, lse), whole[:2], atol=5e-5, rtol=1e-4)  # the whole is rounded more
    same_gradients(out, whole[0], leaves)
    # In float64, where scores are not rounded with the numbers of keys in them.
    leaves, given = ([part.detach().double() for part in parts] for parts in (leaves, given))
    out, _, weights = function(*given, 0.4, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    assert weights.shape == (B, H, 384, 384)
    kept = weights[..., :300, :340] >= 0
    expected, _, _ = attention_ref(*leaves, (-1, 0), slopes.double(), kept=kept, dropout_p=0.4)
    torch.testing.assert_close(out.view_as(expected), expected)

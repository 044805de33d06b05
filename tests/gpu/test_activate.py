"""torch's own attention on a GPU through these kernels: SDPA by every one of its operators, varlen_attn, compiled, refused."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import dmattn_ops
from dmattn_ops import sdpa

pytestmark = pytest.mark.gpu

B, H, S, D = 2, 4, 300, 64
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@pytest.fixture
def calls(monkeypatch):
    """The names of torch's operators that ran here."""
    seen = []

    def counted(name, function):
        def call(*arguments, **keywords):
            result = function(*arguments, **keywords)
            seen.append(name)
            return result

        return call

    for name, function in sdpa.KERNELS.items():
        monkeypatch.setitem(sdpa.KERNELS, name, counted(name, function))
    yield seen
    dmattn_ops.deactivate()


@pytest.fixture
def said(calls):
    """What was left to torch."""
    sentences = []
    with dmattn_ops.activated(report=sentences.append):
        yield sentences


def inputs(seqlen_q=S, seqlen_k=S, heads_kv=H, dtype=torch.bfloat16):
    query = torch.randn(B, seqlen_q, H, D, device="cuda", dtype=dtype).transpose(1, 2)
    key, value = (torch.randn(B, seqlen_k, heads_kv, D, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(2))
    return [part.detach().requires_grad_() for part in (query, key, value)]


def plain(query, key, value, bias=None, is_causal=False, kept=None, dropout_p=0.0):
    """The definition, in the dtype of its inputs."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril()
        scores = scores.masked_fill(~visible, -math.inf)
    weights = scores.softmax(-1)
    return (weights if kept is None else weights * kept / (1 - dropout_p)) @ value


def distance(result, exact):
    return ((result.double() - exact).norm() / exact.norm()).item()


def within_budget(out, leaves, bias=None, **options):
    """Compare out and gradients with float64: at most twice as far from it as the same formula in the same dtype."""
    target = torch.randn_like(out)
    given = [*leaves] if bias is None or not bias.requires_grad else [*leaves, bias]
    ours = [out, *torch.autograd.grad(out, given, target)]
    results = {}
    for dtype in (out.dtype, torch.float64):
        copies = [part.detach().to(dtype).requires_grad_() for part in given]
        of_bias = copies[3] if len(copies) > 3 else None if bias is None else bias.detach().to(dtype)
        expected = plain(*copies[:3], bias=of_bias, **options)
        results[dtype] = [expected, *torch.autograd.grad(expected, copies, target.to(dtype))]
    eps = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 3e-5}[out.dtype]
    for mine, eager, exact in zip(ours, results[out.dtype], results[torch.float64], strict=True):
        assert distance(mine, exact) <= 2 * distance(eager, exact) + eps


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_runs_here_whichever_operator_torch_chooses(calls, said, backend, is_causal):
    leaves = inputs()
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
        within_budget(out, leaves, is_causal=is_causal)
    assert len(calls) == 2  # forward and backward
    assert said == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sdpa_as_torch_chooses_for_itself(calls, said, dtype):
    leaves = inputs(dtype=dtype)
    within_budget(F.scaled_dot_product_attention(*leaves), leaves)
    assert len(calls) == 2
    assert said == []


def test_grouped_heads(calls, said):
    leaves = inputs(heads_kv=2)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        within_budget(out, leaves, is_causal=True)
    assert len(calls) == 2
    assert said == []


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_dropout_is_the_same_in_the_backward(calls, said, backend):
    query, key, _ = inputs(64, 64)
    identity = torch.eye(64, device="cuda", dtype=torch.bfloat16).expand(B, H, 64, 64).contiguous().requires_grad_()
    leaves = [query, key, identity]
    with sdpa_kernel(backend):
        torch.manual_seed(5)
        out = F.scaled_dot_product_attention(*leaves, dropout_p=0.3)
        kept = (out.detach() != 0).to(out.dtype)
        assert 0.6 < kept.float().mean() < 0.8
        torch.manual_seed(5)
        assert torch.equal(out, F.scaled_dot_product_attention(*leaves, dropout_p=0.3))
        assert not torch.equal(out, F.scaled_dot_product_attention(*leaves, dropout_p=0.3))
    results = {}
    target = torch.randn_like(out)
    ours = torch.autograd.grad(out, leaves, target)
    for dtype in (torch.bfloat16, torch.float64):
        copies = [part.detach().to(dtype).requires_grad_() for part in leaves]
        expected = plain(*copies, kept=kept.to(dtype), dropout_p=0.3)
        results[dtype] = torch.autograd.grad(expected, copies, target.to(dtype))
    for mine, eager, exact in zip(ours, results[torch.bfloat16], results[torch.float64], strict=True):
        assert distance(mine, exact) <= 2 * distance(eager, exact) + 2e-2
    assert said == []


@pytest.mark.parametrize("backend", BACKENDS[1:], ids=lambda backend: backend.name)
@pytest.mark.parametrize("shape", [(B, H, S, S), (1, 1, S, S), (B, 1, 1, S)])
def test_masks_run_here_where_they_are_asked_for(calls, backend, shape):
    keep = torch.rand(shape, device="cuda") < 0.5
    keep[..., 0] = True
    leaves, sentences = inputs(), []
    with dmattn_ops.activated(masks=True, report=sentences.append), sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(*leaves, attn_mask=keep)
        bias = torch.zeros(shape, device="cuda", dtype=torch.bfloat16).masked_fill(~keep, -math.inf)
        within_budget(out, leaves, bias=bias)
    assert len(calls) == 2
    assert sentences == []


def test_a_learned_bias_gets_its_gradient(calls):
    leaves = inputs()
    bias = torch.randn(B, H, S, S, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with dmattn_ops.activated(masks=True), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        within_budget(F.scaled_dot_product_attention(*leaves, attn_mask=bias), leaves, bias=bias)
    assert len(calls) == 2


def test_masks_are_left_to_torch_otherwise_and_that_is_said(calls, said):
    leaves = inputs()
    keep = torch.rand(B, 1, S, S, device="cuda") < 0.5
    keep[..., 0] = True
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = F.scaled_dot_product_attention(*leaves, attn_mask=keep)
        out.sum().backward()
    assert calls == []
    assert len(said) == 2
    assert all("masks=True" in sentence for sentence in said)
    dmattn_ops.deactivate()
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        torch.testing.assert_close(F.scaled_dot_product_attention(*leaves, attn_mask=keep), out)


def test_varlen_attn_and_what_it_asks_for_beyond_us(calls, said):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    lengths = torch.tensor([3, 200, 97])
    offsets = F.pad(lengths.cumsum(0), (1, 0)).int().cuda()
    query, key, value = (
        torch.randn(300, H, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    out = varlen.varlen_attn(query, key, value, offsets, offsets, 200, 200, window_size=(-1, 0))
    expected = dmattn_ops.flash_dmattn_varlen_func(query, key, value, offsets, offsets, 200, 200, is_causal=True)
    torch.testing.assert_close(out, expected)
    target = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(result, (query, key, value), target) for result in (out, expected))
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    assert len(calls) == 2
    assert said == []
    used = torch.tensor([2, 150, 97], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        there = varlen.varlen_attn(query, key, value, offsets, offsets, 200, 200, seqused_k=used)
    assert len(said) == 1 and "seqused_k" in said[0]
    dmattn_ops.deactivate()
    with torch.no_grad():
        own = varlen.varlen_attn(query, key, value, offsets, offsets, 200, 200, seqused_k=used)
    torch.testing.assert_close(there, own)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_compiled_as_a_whole(calls, said, backend):
    for seqlen in (S, 77):
        for contiguous in (False, True):
            leaves = [part.detach().contiguous() if contiguous else part.detach() for part in inputs(seqlen, seqlen)]
            leaves = [part.requires_grad_() for part in leaves]
            torch._dynamo.reset()
            with sdpa_kernel(backend):
                compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v) * 2, fullgraph=True)
                out = compiled(*leaves)
                within_budget(out / 2, leaves)
    assert len(calls) == 8
    assert said == []


def test_a_block_leaves_torchs_kernels_as_they_were(calls):
    leaves = [part.detach() for part in inputs()]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        before = F.scaled_dot_product_attention(*leaves)
        with dmattn_ops.activated():
            F.scaled_dot_product_attention(*leaves)
        assert torch.equal(F.scaled_dot_product_attention(*leaves), before)
    assert calls == ["_scaled_dot_product_flash_attention"]


def test_dropout_in_a_cuda_graph_draws_anew_at_each_replay(calls, said):
    query, key, value = (part.detach() for part in inputs())
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)
    assert out.isfinite().all()

"""torch's attention operators on these kernels: registered as torch registers FA4, the same numbers as their definitions.

On the CPU: the functions that stand in for CUDA kernels are called directly, and registered for the CPU's dispatch key.
"""

import inspect
import math
import warnings

import pytest
import torch
from torch.nn import attention as registry
from torch.nn import functional as F

import dmattn_ops
from dmattn_ops import sdpa
from dmattn_ops.sdpa import calls, operators

B, H, S, D = 2, 4, 40, 16


@pytest.fixture
def on_cpu():
    """Operators of the CPU that run here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replaced = sdpa.Replacement("CPU", sdpa.Options(masks=True))
    yield
    replaced.remove()


@pytest.fixture
def inactive():
    yield
    sdpa.deactivate()


def heads_first(seqlen_q=S, seqlen_k=S, heads_kv=H, dtype=torch.float32, **more):
    query = torch.randn(B, seqlen_q, H, D, dtype=dtype, **more).transpose(1, 2)
    key, value = (torch.randn(B, seqlen_k, heads_kv, D, dtype=dtype, **more).transpose(1, 2) for _ in range(2))
    return [part.detach().requires_grad_() for part in (query, key, value)]


def weights_of(query, key, bias=None, is_causal=False, scale=None):
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return scores


def plain(query, key, value, bias=None, is_causal=False, scale=None, kept=None, dropout_p=0.0):
    """Out and lse by the definition, from the top left corner."""
    scores = weights_of(query, key, bias, is_causal, scale)
    weights = scores.softmax(-1).nan_to_num()
    if kept is not None:
        weights = weights * kept / (1 - dropout_p)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return weights @ value, torch.logsumexp(scores, -1)


def same_gradients(out, expected, leaves):
    target = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(result, leaves, target) for result in (out, expected))
    torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=3e-4)


def kept_by(out_of_identity):
    """Which weights dropout kept, from attention whose values are the identity."""
    return out_of_identity > 0


def test_it_is_one_of_torchs_implementations_while_active(inactive):
    assert registry.current_flash_attention_impl() is None
    dmattn_ops.activate()
    assert registry.current_flash_attention_impl() == "dmattn"
    assert "dmattn" in registry.list_flash_attention_impls()
    dmattn_ops.activate(masks=True)  # again, with another option
    assert registry.current_flash_attention_impl() == "dmattn"
    dmattn_ops.deactivate()
    assert registry.current_flash_attention_impl() is None
    dmattn_ops.deactivate()
    registry.activate_flash_attention_impl("dmattn")  # by torch's own function, once it is known
    assert registry.current_flash_attention_impl() == "dmattn"


def test_a_block_restores_what_was_active(inactive):
    removed = []
    registry.register_flash_attention_impl(
        "other", register_fn=lambda: type("Handle", (), {"remove": removed.append})()
    )
    with dmattn_ops.activated():
        assert registry.current_flash_attention_impl() == "dmattn"
    assert registry.current_flash_attention_impl() is None
    registry.activate_flash_attention_impl("dmattn")
    said = []
    dmattn_ops.activate(report=said.append)
    with pytest.raises(KeyError), dmattn_ops.activated(masks=True):
        assert sdpa._asked.masks
        raise KeyError
    assert registry.current_flash_attention_impl() == "dmattn"
    assert sdpa._asked == sdpa.Options(False, said.append)


def test_wrong_switches_are_refused_before_anything_is_replaced(inactive):
    with pytest.raises(TypeError, match=r"^masks must be a bool, got str$"):
        dmattn_ops.activate(masks="yes")
    words = "^report must be a function that takes a sentence, such as print, got bool$"
    with pytest.raises(TypeError, match=words), dmattn_ops.activated(report=True):
        pass
    assert registry.current_flash_attention_impl() is None


def test_activating_warns_of_nothing_and_leaves_nothing_behind(inactive):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dmattn_ops.activate()
        dmattn_ops.deactivate()
    kernels = torch._C._dispatch_dump("aten::_flash_attention_forward")
    assert "dmattn" not in kernels


@pytest.mark.parametrize("name", sdpa.KERNELS)
def test_signatures_are_those_of_torchs_schemas(name):
    if not hasattr(torch.ops.aten, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    schema = getattr(torch.ops.aten, name).default._schema
    parameters = list(inspect.signature(sdpa.KERNELS[name]).parameters.values())
    if name.endswith("inplace"):  # takes what flash_forward takes
        parameters = parameters[:1] + list(inspect.signature(operators.flash_forward).parameters.values())
    known = [argument.name for argument in schema.arguments]
    later = [parameter for parameter in parameters if parameter.name not in known]  # a newer torch passes these
    assert all(parameter.default is None for parameter in later)
    parameters = [parameter for parameter in parameters if parameter not in later]
    assert [parameter.name for parameter in parameters] == known
    for parameter, argument in zip(parameters, schema.arguments, strict=True):
        assert (parameter.kind is parameter.KEYWORD_ONLY) == argument.kwarg_only, argument.name
        if argument.has_default_value():
            assert parameter.default == argument.default_value, argument.name
        else:
            assert parameter.default is parameter.empty, argument.name


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads_kv", [H, 2])
def test_sdpas_flash_operator(on_cpu, is_causal, heads_kv):
    leaves = heads_first(heads_kv=heads_kv)
    result = torch.ops.aten._scaled_dot_product_flash_attention(*leaves, 0.0, is_causal, scale=0.3)
    expected, lse = plain(*leaves, is_causal=is_causal, scale=0.3)
    torch.testing.assert_close(result[0], expected)
    torch.testing.assert_close(result[1], lse)
    same_gradients(result[0], expected, leaves)


@pytest.mark.parametrize("operator", ["flash", "efficient", "cudnn"])
def test_results_have_the_shapes_and_strides_that_compilers_were_told(on_cpu, operator):
    for contiguous in (False, True):
        leaves = [part.contiguous() if contiguous else part for part in heads_first(S - 1)]
        arguments = [] if operator == "flash" else [None, True]
        function = getattr(torch.ops.aten, f"_scaled_dot_product_{operator}_attention")
        found = function(*(part.detach() for part in leaves), *arguments, 0.1)
        told = function(*(part.detach().to("meta") for part in leaves), *arguments, 0.1)
        for ours, theirs in zip(found, told, strict=True):
            if isinstance(ours, torch.Tensor) and ours.numel():
                assert ours.shape == theirs.shape
                assert ours.dtype == theirs.dtype
                assert ours.dim() < 3 or ours.stride() == theirs.stride()


@pytest.mark.parametrize("shape", [(B, H, S, S), (1, 1, S, S), (B, 1, 1, S), (1, H, S, S)])
@pytest.mark.parametrize(
    ("operator", "learned"), [("efficient", False), ("efficient", True), ("cudnn", False)]
)  # torch's cuDNN operator has no gradient of a bias
def test_masked_operators(on_cpu, operator, shape, learned):
    leaves = heads_first()
    bias = torch.randn(shape).masked_fill(torch.rand(shape) < 0.5, -math.inf)
    bias[..., 0] = 0.5  # no empty rows, of which torch's definition makes NaN
    whole = bias.expand(B, H, S, S)
    if learned:
        whole = whole.clone().requires_grad_()
    expected, lse = plain(*leaves, bias=whole)
    function = getattr(torch.ops.aten, f"_scaled_dot_product_{operator}_attention")
    found = function(*leaves, whole, True)
    torch.testing.assert_close(found[0], expected)
    rows = found[1].squeeze(-1) if operator == "cudnn" else found[1][..., :S]
    torch.testing.assert_close(rows, lse)
    same_gradients(found[0], expected, [*leaves, whole] if learned else leaves)


def test_an_operator_without_a_mask_is_causal_from_the_top_left(on_cpu):
    leaves = heads_first(7, S)
    for operator in ("efficient", "cudnn"):
        function = getattr(torch.ops.aten, f"_scaled_dot_product_{operator}_attention")
        found = function(*leaves, None, True, 0.0, True)[0]
        expected, _ = plain(*leaves, is_causal=True)
        torch.testing.assert_close(found, expected)
        same_gradients(found, expected, leaves)


@pytest.mark.parametrize("operator", ["flash", "efficient", "cudnn"])
def test_dropout_is_the_same_in_the_backward(on_cpu, operator):
    leaves = heads_first()
    arguments = [] if operator == "flash" else [None, True]
    function = getattr(torch.ops.aten, f"_scaled_dot_product_{operator}_attention")
    torch.manual_seed(7)
    with torch.no_grad():
        identity = torch.eye(S).expand(B, H, S, S)
        kept = kept_by(function(*leaves[:2], identity, *arguments, 0.4)[0])
    assert 0.55 < kept.float().mean() < 0.65
    rows = kept.flatten(0, 1).flatten(1)
    assert (rows[0] != rows[1]).float().mean() > 0.3  # heads drop different weights
    torch.manual_seed(7)
    found = function(*leaves, *arguments, 0.4)[0]
    expected, _ = plain(*leaves, kept=kept, dropout_p=0.4)
    torch.testing.assert_close(found, expected)
    same_gradients(found, expected, leaves)
    assert not torch.equal(found, function(*leaves, *arguments, 0.4)[0])


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (3, 2)])
def test_varlen_attn_of_torch(on_cpu, window):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    lengths_q, lengths_k = [3, 9, 20], [7, 9, 31]
    query = torch.randn(sum(lengths_q), H, D, requires_grad=True)
    key, value = (torch.randn(sum(lengths_k), 2, D, requires_grad=True) for _ in range(2))
    offsets = [F.pad(torch.tensor(part).cumsum(0), (1, 0)).int() for part in (lengths_q, lengths_k)]
    keywords = {"window_size": window, "return_aux": varlen.AuxRequest(lse=True)}
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:  # torch 2.11 does not have it yet
        keywords["enable_gqa"] = True
    out, lse = varlen.varlen_attn(query, key, value, *offsets, 20, 31, **keywords)
    options = {"window_size": tuple(None if size < 0 else size for size in window), "return_lse": True}
    expected, log_sums = dmattn_ops.flash_dmattn_varlen_func(query, key, value, *offsets, 20, 31, **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, log_sums)
    same_gradients(out, expected, (query, key, value))


def test_flash_attention_forward_and_its_variant_that_writes_into_a_tensor(on_cpu):
    query, key, value = (part.detach().transpose(1, 2) for part in heads_first(7, S))
    expected = dmattn_ops.flash_dmattn_func(query, key, value, is_causal=True, window_size=(9, None), return_lse=True)
    arguments = (query, key, value, None, None, 7, S, 0.0, True, False)
    found = torch.ops.aten._flash_attention_forward(*arguments, window_size_left=9, window_size_right=-1)
    torch.testing.assert_close(found[:2], expected)
    if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):
        out = torch.full_like(query, math.nan)
        function = torch.ops.aten._flash_attention_forward_no_dropout_inplace
        lse = function(out, *arguments, window_size_left=9, window_size_right=-1)
        torch.testing.assert_close((out, lse), expected)


def test_what_is_refused_goes_to_torchs_own_kernel_and_is_said():
    own = torch.library.get_kernel("aten::_scaled_dot_product_flash_attention_for_cpu", "CPU")
    said = []
    asked = sdpa.Options(report=said.append)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    leaves = [part.detach() for part in heads_first()]

    def refuses(*arguments, **keywords):
        raise sdpa.Refused("it asks for the moon")

    out = sdpa._here_or_there("an_operator", refuses, own, asked, keys, *leaves, 0.0, True)[0]
    torch.testing.assert_close(out, plain(*leaves, is_causal=True)[0])
    assert said == ["an_operator runs on torch's own kernel: it asks for the moon"]
    with pytest.raises(NotImplementedError, match="the moon; and this build of torch has no kernel of its own"):
        sdpa._here_or_there("an_operator", refuses, None, asked, keys, *leaves)


def test_masks_are_left_to_torch_unless_they_are_asked_for():
    query, key, value = (part.detach() for part in heads_first())
    name, bias = "_scaled_dot_product_efficient_attention", torch.zeros(1, 1, S, S)
    for arguments, keywords in (((query, key, value, bias, True), {}), ((query, key, value), {"attn_bias": bias})):
        with pytest.raises(NotImplementedError, match="activate was called without masks=True"):
            sdpa._here_or_there(
                name, operators.sdpa_efficient_forward, None, sdpa.Options(), None, *arguments, **keywords
            )
    found = sdpa._here_or_there(
        name, operators.sdpa_efficient_forward, None, sdpa.Options(), None, query, key, value, None, True
    )
    torch.testing.assert_close(found[0], plain(query, key, value)[0])


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"seqused_k": torch.zeros(1)}, "seqused_k"),
        ({"alibi_slopes": torch.zeros(1), "num_splits": 1}, "alibi_slopes and num_splits"),
        ({"block_table": torch.zeros(1)}, "block_table"),
    ],
)
def test_reasons_of_refusals(keywords, reason):
    query = torch.randn(B, S, H, D)
    with pytest.raises(sdpa.Refused, match=f"asks for {reason}"):
        operators.flash_forward(query, query, query, None, None, S, S, 0.0, False, False, **keywords)
    with pytest.raises(sdpa.Refused, match="a debug mask"):
        operators.sdpa_flash_forward(query, query, query, 0.0, False, True)


def test_rows_that_torch_calls_empty_have_no_gradient():
    query, key, value = (part.detach().transpose(1, 2) for part in heads_first(S, 5))
    out, lse, state, offset, _ = operators.flash_forward(query, key, value, None, None, S, 5, 0.0, True, False)
    assert (lse[..., : S - 5] == -math.inf).all()
    lse = torch.where(lse == -math.inf, math.inf, lse)  # as torch's own forward writes it
    arguments = (torch.ones_like(out), query, key, value, out, lse, None, None, S, 5, 0.0, True, state, offset)
    dq, dk, dv = operators.flash_backward(*arguments)
    assert dq[:, : S - 5].count_nonzero() == 0
    assert all(gradient.isfinite().all() for gradient in (dq, dk, dv))


def test_seeds_differ_for_every_sequence_and_head():
    seeds = calls.seeds_of(torch.tensor([5, 0]), 64, 64)
    assert seeds.unique().numel() == 64 * 64
    bits = (seeds.flatten()[:, None] >> torch.arange(64)) & 1
    assert (bits.float().mean(0) - 0.5).abs().max() < 0.05
    assert not torch.equal(seeds, calls.seeds_of(torch.tensor([6, 0]), 64, 64))

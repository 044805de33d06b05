"""What is written down about schemas and graphs: a change of any of these lines is a change for users.

After a meant change: `EXPECTTEST_ACCEPT=1 pytest tests/ops/test_graphs_expect.py`.
"""

import functools
import textwrap

import pytest
import torch
from expecttest import assert_expected_inline

import dmattn_ops
from dmattn_ops.ops import schemas as ops
from tests.support import call_inputs, graphs

attention = dmattn_ops.flash_dmattn_func
FORBIDDEN = ("clone", "copy_", "auto_functionalized", "triton_kernel_wrapper")  # "copy_" is not in "_to_copy"


def schemas(wanted):
    """Return the wanted schemas of the operators, a name being the argument."""
    found = [str(ops.overload(name)._schema) for name in ops.SCHEMAS | ops.CHANGING | ops.COMPOSITES if wanted(name)]
    return "\n".join(textwrap.fill(schema, 116, subsequent_indent="    ") for schema in found)


def test_schemas_of_attention():
    assert_expected_inline(
        schemas(lambda name: "ward" in name and ".used" not in name),
        """\
dmattn::forward(Tensor query, Tensor key, Tensor value, Tensor? bias=None, Tensor? row_tiles=None, Tensor?
    col_tiles=None, Tensor? row_bits=None, Tensor? col_bits=None, Tensor? q_segments=None, Tensor? k_segments=None,
    Tensor? start=None, Tensor? end=None, Tensor? hidden_from=None, Tensor? hidden_to=None, Tensor? sink=None,
    Tensor? seed=None, SymInt band_lo=-1073741824, SymInt band_hi=1073741824, SymInt q_origin=0, SymInt k_origin=0,
    SymInt? at_most=None, float? softmax_scale=None, float softcap=0., float dropout_p=0., bool deterministic=False,
    bool needs_max=False, bool batch_invariant=False) -> (Tensor out, Tensor lse, Tensor lse_tail, Tensor row_max)
dmattn::backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse,
    Tensor lse_tail, Tensor? bias=None, Tensor? row_tiles=None, Tensor? col_tiles=None, Tensor? row_bits=None,
    Tensor? col_bits=None, Tensor? q_segments=None, Tensor? k_segments=None, Tensor? start=None, Tensor? end=None,
    Tensor? hidden_from=None, Tensor? hidden_to=None, Tensor? sink=None, Tensor? seed=None, SymInt
    band_lo=-1073741824, SymInt band_hi=1073741824, SymInt q_origin=0, SymInt k_origin=0, SymInt? at_most=None,
    float? softmax_scale=None, float softcap=0., float dropout_p=0., bool deterministic=False, bool
    needs_dbias=False, bool needs_dsink=False, bool batch_invariant=False) -> (Tensor dq, Tensor dk, Tensor dv,
    Tensor dbias, Tensor dsink)
dmattn::qkvpacked_forward(Tensor qkv, Tensor? bias=None, Tensor? row_tiles=None, Tensor? col_tiles=None, Tensor?
    row_bits=None, Tensor? col_bits=None, Tensor? q_segments=None, Tensor? k_segments=None, Tensor? start=None,
    Tensor? end=None, Tensor? hidden_from=None, Tensor? hidden_to=None, Tensor? sink=None, Tensor? seed=None, SymInt
    band_lo=-1073741824, SymInt band_hi=1073741824, SymInt q_origin=0, SymInt k_origin=0, SymInt? at_most=None,
    float? softmax_scale=None, float softcap=0., float dropout_p=0., bool deterministic=False, bool needs_max=False,
    bool batch_invariant=False) -> (Tensor out, Tensor lse, Tensor lse_tail, Tensor row_max)
dmattn::qkvpacked_backward(Tensor grad_out, Tensor? grad_lse, Tensor qkv, Tensor out, Tensor lse, Tensor lse_tail,
    Tensor? bias=None, Tensor? row_tiles=None, Tensor? col_tiles=None, Tensor? row_bits=None, Tensor? col_bits=None,
    Tensor? q_segments=None, Tensor? k_segments=None, Tensor? start=None, Tensor? end=None, Tensor?
    hidden_from=None, Tensor? hidden_to=None, Tensor? sink=None, Tensor? seed=None, SymInt band_lo=-1073741824,
    SymInt band_hi=1073741824, SymInt q_origin=0, SymInt k_origin=0, SymInt? at_most=None, float?
    softmax_scale=None, float softcap=0., float dropout_p=0., bool deterministic=False, bool needs_dbias=False, bool
    needs_dsink=False, bool batch_invariant=False) -> (Tensor dqkv, Tensor dbias, Tensor dsink)
dmattn::varlen_forward(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor?
    bias, Tensor? mask, Tensor? sink, Tensor? seed, SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt
    band_lo=-1073741824, SymInt band_hi=1073741824, SymInt q_origin=0, SymInt k_origin=0, bool top_left=False,
    float? softmax_scale=None, float softcap=0., float dropout_p=0., bool deterministic=False, bool needs_max=False,
    bool batch_invariant=False) -> (Tensor out, Tensor lse, Tensor lse_tail, Tensor row_max)
dmattn::varlen_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out,
    Tensor lse, Tensor lse_tail, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? bias, Tensor? mask, Tensor? sink,
    Tensor? seed, SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt band_lo=-1073741824, SymInt band_hi=1073741824,
    SymInt q_origin=0, SymInt k_origin=0, bool top_left=False, float? softmax_scale=None, float softcap=0., float
    dropout_p=0., bool deterministic=False, bool needs_dbias=False, bool needs_dsink=False, bool
    batch_invariant=False) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)
dmattn::forward.chosen(Tensor query, Tensor key, Tensor value, Tensor chosen, Tensor? bias=None, Tensor?
    row_tiles=None, Tensor? col_tiles=None, Tensor? row_bits=None, Tensor? col_bits=None, Tensor? q_segments=None,
    Tensor? k_segments=None, Tensor? start=None, Tensor? end=None, Tensor? hidden_from=None, Tensor? hidden_to=None,
    Tensor? sink=None, Tensor? seed=None, SymInt band_lo=-1073741824, SymInt band_hi=1073741824, SymInt q_origin=0,
    SymInt k_origin=0, SymInt? at_most=None, float? softmax_scale=None, float softcap=0., float dropout_p=0., bool
    deterministic=False, SymInt block=1, bool needs_max=False, bool batch_invariant=False) -> (Tensor out, Tensor
    lse, Tensor lse_tail, Tensor row_max)
dmattn::backward.chosen(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out,
    Tensor lse, Tensor lse_tail, Tensor chosen, Tensor? bias=None, Tensor? row_tiles=None, Tensor? col_tiles=None,
    Tensor? row_bits=None, Tensor? col_bits=None, Tensor? q_segments=None, Tensor? k_segments=None, Tensor?
    start=None, Tensor? end=None, Tensor? hidden_from=None, Tensor? hidden_to=None, Tensor? sink=None, Tensor?
    seed=None, SymInt band_lo=-1073741824, SymInt band_hi=1073741824, SymInt q_origin=0, SymInt k_origin=0, SymInt?
    at_most=None, float? softmax_scale=None, float softcap=0., float dropout_p=0., bool deterministic=False, SymInt
    block=1, bool needs_dbias=False, bool needs_dsink=False, bool batch_invariant=False) -> (Tensor dq, Tensor dk,
    Tensor dv, Tensor dbias, Tensor dsink)""",
    )


def test_schemas_of_attention_to_used_keys():
    assert_expected_inline(
        schemas(lambda name: ".used" in name),
        """\
dmattn::forward.used(Tensor query, Tensor key, Tensor value, Tensor seqlen_k_used, Tensor? bias=None, Tensor?
    row_tiles=None, Tensor? col_tiles=None, Tensor? row_bits=None, Tensor? col_bits=None, Tensor? q_segments=None,
    Tensor? k_segments=None, Tensor? start=None, Tensor? end=None, Tensor? hidden_from=None, Tensor? hidden_to=None,
    Tensor? sink=None, Tensor? seed=None, SymInt band_lo=-1073741824, SymInt band_hi=1073741824, SymInt q_origin=0,
    SymInt k_origin=0, SymInt? at_most=None, float? softmax_scale=None, float softcap=0., float dropout_p=0., bool
    deterministic=False, SymInt used_lo=-1073741824, SymInt used_hi=1073741824, bool needs_max=False, bool
    batch_invariant=False) -> (Tensor out, Tensor lse, Tensor lse_tail, Tensor row_max)
dmattn::backward.used(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor
    lse, Tensor lse_tail, Tensor seqlen_k_used, Tensor? bias=None, Tensor? row_tiles=None, Tensor? col_tiles=None,
    Tensor? row_bits=None, Tensor? col_bits=None, Tensor? q_segments=None, Tensor? k_segments=None, Tensor?
    start=None, Tensor? end=None, Tensor? hidden_from=None, Tensor? hidden_to=None, Tensor? sink=None, Tensor?
    seed=None, SymInt band_lo=-1073741824, SymInt band_hi=1073741824, SymInt q_origin=0, SymInt k_origin=0, SymInt?
    at_most=None, float? softmax_scale=None, float softcap=0., float dropout_p=0., bool deterministic=False, SymInt
    used_lo=-1073741824, SymInt used_hi=1073741824, bool needs_dbias=False, bool needs_dsink=False, bool
    batch_invariant=False) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)
dmattn::qkvpacked_forward.used(Tensor qkv, Tensor seqlen_k_used, Tensor? bias=None, Tensor? row_tiles=None, Tensor?
    col_tiles=None, Tensor? row_bits=None, Tensor? col_bits=None, Tensor? q_segments=None, Tensor? k_segments=None,
    Tensor? start=None, Tensor? end=None, Tensor? hidden_from=None, Tensor? hidden_to=None, Tensor? sink=None,
    Tensor? seed=None, SymInt band_lo=-1073741824, SymInt band_hi=1073741824, SymInt q_origin=0, SymInt k_origin=0,
    SymInt? at_most=None, float? softmax_scale=None, float softcap=0., float dropout_p=0., bool deterministic=False,
    SymInt used_lo=-1073741824, SymInt used_hi=1073741824, bool needs_max=False, bool batch_invariant=False) ->
    (Tensor out, Tensor lse, Tensor lse_tail, Tensor row_max)
dmattn::qkvpacked_backward.used(Tensor grad_out, Tensor? grad_lse, Tensor qkv, Tensor out, Tensor lse, Tensor
    lse_tail, Tensor seqlen_k_used, Tensor? bias=None, Tensor? row_tiles=None, Tensor? col_tiles=None, Tensor?
    row_bits=None, Tensor? col_bits=None, Tensor? q_segments=None, Tensor? k_segments=None, Tensor? start=None,
    Tensor? end=None, Tensor? hidden_from=None, Tensor? hidden_to=None, Tensor? sink=None, Tensor? seed=None, SymInt
    band_lo=-1073741824, SymInt band_hi=1073741824, SymInt q_origin=0, SymInt k_origin=0, SymInt? at_most=None,
    float? softmax_scale=None, float softcap=0., float dropout_p=0., bool deterministic=False, SymInt
    used_lo=-1073741824, SymInt used_hi=1073741824, bool needs_dbias=False, bool needs_dsink=False, bool
    batch_invariant=False) -> (Tensor dqkv, Tensor dbias, Tensor dsink)""",
    )


def test_schemas_of_operators_that_change_their_arguments():
    assert_expected_inline(
        schemas(lambda name: name in ops.CHANGING),
        """\
dmattn::keep_step(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) score_cache, Tensor(d!) places,
    Tensor(e!) length, Tensor(f!) floor, Tensor(g!) first, Tensor(h!) arrived, Tensor(i!)? bias_cache, Tensor(j!)?
    document, Tensor(k!)? trail, Tensor key, Tensor value, Tensor scores, Tensor? bias, Tensor? padding, Tensor?
    documents, SymInt keep, SymInt keep_first, SymInt keep_last, SymInt rollback, bool padding_counts=False) ->
    Tensor seen
dmattn::keep_chunk(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) score_cache, Tensor(d!) places,
    Tensor(e!) length, Tensor(f!) floor, Tensor(g!) first, Tensor(h!) arrived, Tensor(i!)? bias_cache, Tensor(j!)?
    document, Tensor(k!)? trail, Tensor key, Tensor value, Tensor scores, Tensor? bias, Tensor? padding, Tensor?
    documents, SymInt keep, SymInt keep_first, SymInt keep_last, SymInt rollback, bool padding_counts=False) ->
    (Tensor ends, Tensor keys, Tensor values, Tensor biases)""",
    )


def test_schemas_of_masks_and_masses():
    assert_expected_inline(
        schemas(lambda name: "ward" not in name and name not in ops.CHANGING),
        """\
dmattn::pack_mask(Tensor mask, Tensor? q_segments, Tensor? k_segments, SymInt seqlen_q, SymInt band_lo=-1073741824,
    SymInt band_hi=1073741824) -> (Tensor row_tiles, Tensor col_tiles, Tensor row_bits, Tensor col_bits)
dmattn::list_tiles(Tensor? q_segments, Tensor k_segments, SymInt seqlen_q, SymInt band_lo=-1073741824, SymInt
    band_hi=1073741824) -> (Tensor row_tiles, Tensor col_tiles)
dmattn::key_lifetimes(Tensor scores, Tensor? documents, SymInt keep, SymInt keep_first=0, SymInt keep_last=0, bool
    is_causal=True) -> (Tensor start, Tensor end)
dmattn::pack_intervals(Tensor end, Tensor? start, Tensor? hidden_from, Tensor? hidden_to, Tensor? mask, Tensor?
    q_segments, Tensor? k_segments, SymInt seqlen_q, SymInt band_lo=-1073741824, SymInt band_hi=1073741824) ->
    (Tensor row_tiles, Tensor col_tiles, Tensor row_bits, Tensor col_bits)
dmattn::rank_ids(Tensor ids) -> Tensor ranks
dmattn::spread_lists(Tensor counts, Tensor indices, SymInt columns) -> Tensor listed
dmattn::pack_selection(Tensor indices, Tensor? q_segments, Tensor? k_segments, SymInt block, SymInt seqlen_k, SymInt
    band_lo=-1073741824, SymInt band_hi=1073741824) -> (Tensor row_tiles, Tensor col_tiles, Tensor row_bits, Tensor
    col_bits)
dmattn::selection_mass(Tensor query, Tensor key, Tensor indices, Tensor? q_segments, Tensor? k_segments, Tensor?
    bias, Tensor? lse, SymInt block, SymInt band_lo=-1073741824, SymInt band_hi=1073741824, float?
    softmax_scale=None, float softcap=0.) -> Tensor mass
dmattn::key_mass(Tensor query, Tensor key, Tensor? bias=None, Tensor? row_tiles=None, Tensor? col_tiles=None,
    Tensor? row_bits=None, Tensor? col_bits=None, Tensor? q_segments=None, Tensor? k_segments=None, Tensor?
    start=None, Tensor? end=None, Tensor? hidden_from=None, Tensor? hidden_to=None, Tensor? lse=None, SymInt
    band_lo=-1073741824, SymInt band_hi=1073741824, SymInt? at_most=None, float? softmax_scale=None, float
    softcap=0.) -> Tensor mass
dmattn::draw_seed(Tensor query, SymInt? batch=None) -> Tensor seed""",
    )


def test_tags():
    for name in ops.SCHEMAS:
        tags = ops.overload(name).tags
        assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides} <= set(tags), name


def packed_call(query, key, value, cu_seqlens_q, cu_seqlens_k, mask):
    return dmattn_ops.flash_dmattn_varlen_func(
        query, key, value, cu_seqlens_q, cu_seqlens_k, 9, 8, mask, is_causal=True
    )


def calls():
    """Return functions to compile, by name, each with its inputs."""
    inputs = call_inputs.qkv(heads_kv=2, layout="bhsd")
    mask, bias = call_inputs.random_mask(2, 1, 33, 33), call_inputs.random_bias(1, 4, 33, 33)
    prepared = dmattn_ops.prepare_mask(mask)
    qkv = torch.stack(call_inputs.qkv(), dim=2).detach().requires_grad_()
    rows, lengths = call_inputs.packed([5, 9], [7, 8])
    rows_from, rows_to = torch.zeros(1, 1, 33, dtype=torch.int32), torch.full((1, 1, 33), 30, dtype=torch.int32)
    causal = functools.partial(attention, is_causal=True)
    return {
        "plain": (attention, inputs),
        "inference": (attention, tuple(tensor.detach() for tensor in inputs)),
        "causal": (causal, inputs),
        "window": (functools.partial(attention, window_size=(8, 0), causal_from="top_left"), inputs),
        "bias": (lambda q, k, v, b: attention(q, k, v, bias=b, softcap=3.0), (*inputs, bias)),
        "mask": (causal, (*inputs, mask)),
        "mask per key": (causal, (*inputs, mask[:, :, :1])),
        "prepared mask": (attention, (*inputs, prepared)),
        "prepared inside": (lambda q, k, v, m: attention(q, k, v, dmattn_ops.prepare_mask(m)), (*inputs, mask)),
        "two layers, one mask": (
            lambda q, k, v, m: attention(attention(q, k, v, m), k, v, m),
            (*call_inputs.qkv(heads_kv=2), prepared),
        ),
        "dropout": (functools.partial(attention, dropout_p=0.1), inputs),
        "lse": (functools.partial(attention, return_lse=True), inputs),
        "sink and maximum": (
            lambda q, k, v, s: attention(q, k, v, sink=s, return_max=True)[:1],
            (*call_inputs.qkv(), torch.randn(4, requires_grad=True)),
        ),
        "intervals": (attention, (*inputs, dmattn_ops.prepare_mask(intervals=(rows_from, rows_to), seqlen_q=33))),
        "intervals inside": (
            lambda q, k, v, start, end: attention(
                q, k, v, dmattn_ops.prepare_mask(intervals=(start, end), seqlen_q=33), is_causal=True
            ),
            (*inputs, rows_from, rows_to),
        ),
        "qkvpacked": (functools.partial(dmattn_ops.flash_dmattn_qkvpacked_func, is_causal=True), (qkv,)),
        "varlen": (packed_call, (*rows, *lengths[:2], call_inputs.random_mask(1, 15))),
    }


@pytest.fixture(scope="module")
def captured():
    return {name: graphs.captured(function, *inputs) for name, (function, inputs) in calls().items()}


def test_operators_in_graphs(captured):
    lines = []
    for name, parts in captured.items():
        lines.append(f"{name}: {' | '.join(' '.join(graphs.own_targets(graph)) for graph in parts)}")
    assert_expected_inline(
        "\n".join(lines),
        """\
plain: dmattn.forward.default | dmattn.backward.default
inference: dmattn.forward.default
causal: dmattn.forward.default | dmattn.backward.default
window: dmattn.forward.default | dmattn.backward.default
bias: dmattn.forward.default | dmattn.backward.default
mask: dmattn.pack_mask.default dmattn.forward.default | dmattn.backward.default
mask per key: dmattn.list_tiles.default dmattn.forward.default | dmattn.backward.default
prepared mask: dmattn.forward.default | dmattn.backward.default
prepared inside: dmattn.pack_mask.default dmattn.forward.default | dmattn.backward.default
two layers, one mask: dmattn.forward.default dmattn.forward.default | dmattn.backward.default dmattn.backward.default
dropout: dmattn.forward.default | dmattn.backward.default
lse: dmattn.forward.default | dmattn.backward.default
sink and maximum: dmattn.forward.default | dmattn.backward.default
intervals: dmattn.forward.default | dmattn.backward.default
intervals inside: dmattn.forward.default | dmattn.backward.default
qkvpacked: dmattn.qkvpacked_forward.default | dmattn.qkvpacked_backward.default
varlen: dmattn.varlen_forward.default | dmattn.varlen_backward.default""",
    )


def test_graphs_copy_nothing(captured):
    for name, parts in captured.items():
        called = [target.removeprefix("aten.").split(".")[0] for graph in parts for target in graphs.targets(graph)]
        copies = [target for target in called if target.startswith(FORBIDDEN)]
        # a mask that is made from intervals owns them, in a graph as in eager mode: its start and its end, O(S)
        assert copies == (["clone"] * 2 if name == "intervals inside" else []), (name, called)

"""torch's own checks of operators: schema, registration, fakes and traced derivatives; and the strides of fakes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import dmattn_ops
from dmattn_ops.call import NO_MASK
from tests.support import call_inputs

UTILITIES = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)
# Lists and bits hold unspecified words, which two runs need not have alike; test_masks_compiled.py compares what is specified.
OF_MASKS = tuple(name for name in UTILITIES if not name.startswith("test_aot_dispatch"))
dmattn = torch.ops.dmattn


def dense(layout="bshd", dtype=torch.float32, requires_grad=True, mask=None, bias=None, **keywords):
    """The tensors that `forward` takes first: query, key, value, bias and the parts of a mask; and keywords."""
    shapes = {"batch": 2, "seqlen_q": 5, "seqlen_k": 7, "heads": 4, "heads_kv": 2, "dim": 8, "dim_v": 12}
    inputs = call_inputs.qkv(**shapes, dtype=dtype, layout=layout, requires_grad=requires_grad)
    parts = NO_MASK[:-1]
    if mask == "bits":
        parts = dmattn_ops.prepare_mask(call_inputs.random_mask(2, 1, 5, 7)).mask[:-1]
    elif mask == "segments":
        parts = dmattn_ops.prepare_mask(call_inputs.random_mask(1, 2, 1, 7), seqlen_q=5).mask[:-1]
    elif mask == "intervals":
        parts = intervals()[:-1]
    if bias is not None:
        bias = call_inputs.random_bias(*bias, dtype=dtype, requires_grad=requires_grad)
    return (*inputs, bias, *parts), keywords


def intervals():
    """A mask of 5 queries and 7 keys."""
    ends = [
        torch.randint(0, 6, (1, 2, 7), generator=torch.Generator().manual_seed(n), dtype=torch.int32) for n in (4, 5)
    ]
    hidden = torch.full_like(ends[0], 2), torch.full_like(ends[0], 3)
    return dmattn_ops.prepare_mask(intervals=tuple(ends), hidden=hidden, seqlen_q=5).mask


SEED = torch.tensor([[7]])
DENSE = {
    "plain": {},
    "bhsd": {"layout": "bhsd", "band_hi": 2},
    "sbhd, bits": {"layout": "sbhd", "mask": "bits"},
    "strided": {"layout": "strided", "bias": (2, 4, 5, 7)},
    "sliced, float64": {"layout": "sliced", "dtype": torch.float64, "bias": (1, 1, 1, 7)},
    "bfloat16": {"dtype": torch.bfloat16, "bias": (1, 2, 5, 7), "mask": "bits"},
    "float16, inference": {"dtype": torch.float16, "requires_grad": False},
    "segments": {"mask": "segments", "band_hi": 2, "softcap": 2.0, "softmax_scale": 0.3},
    "intervals": {"mask": "intervals", "band_lo": -2, "at_most": 7},
    "sink": {"sink": torch.tensor([0.5, -1.0, 0.0, 2.0]), "needs_max": True},
    "origins": {"seed": torch.arange(8).view(2, 4), "dropout_p": 0.3, "q_origin": 4, "k_origin": 9},
    "dropout": {"seed": SEED, "dropout_p": 0.5, "deterministic": True},
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_forward(name):
    arguments, keywords = dense(**DENSE[name])
    opcheck(dmattn.forward.default, arguments, keywords, test_utils=UTILITIES)


@pytest.mark.parametrize("name", ["plain", "bhsd", "sbhd, bits", "strided", "bfloat16", "intervals", "sink", "dropout"])
def test_dense_backward(name):
    (query, key, value, *others), keywords = dense(**{**DENSE[name], "requires_grad": False})
    outputs = dmattn.forward(query, key, value, *others, **keywords)
    keywords.pop("needs_max", None)
    for grad_lse, needs in ((None, True), (torch.ones_like(outputs[1]), False)):
        arguments = (torch.ones_like(outputs[0]), grad_lse, query, key, value, *outputs[:3], *others)
        keywords["needs_dbias"] = needs and others[0] is not None
        keywords["needs_dsink"] = needs and "sink" in keywords
        opcheck(dmattn.backward.default, arguments, keywords, test_utils=UTILITIES)


@pytest.mark.parametrize("strided", [False, True])
def test_packed_projections(strided):
    qkv = torch.stack(call_inputs.qkv(2, 5, 2, 8, requires_grad=False), dim=2)
    qkv = call_inputs.laid_out(qkv, "strided" if strided else "bshd").requires_grad_()
    arguments = (
        qkv,
        call_inputs.random_bias(1, 2, 5, 5),
        *dmattn_ops.prepare_mask(call_inputs.random_mask(2, 1, 5, 5)).mask[:-1],
    )
    opcheck(dmattn.qkvpacked_forward.default, arguments, test_utils=UTILITIES)
    with torch.no_grad():
        saved = dmattn.qkvpacked_forward(*arguments)[:3]
        saved = (torch.ones_like(saved[0]), None, arguments[0].detach(), *saved, arguments[1].detach(), *arguments[2:])
    opcheck(dmattn.qkvpacked_backward.default, saved, {"needs_dbias": True}, test_utils=UTILITIES)


@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences(masked):
    rows, lengths = call_inputs.packed([3, 0, 5], [4, 2, 6], heads_kv=2, dim=8)
    bias, mask = (call_inputs.random_bias(4, 12), call_inputs.random_mask(2, 12)) if masked else (None, None)
    sink = torch.randn(4) if masked else None
    numbers = lengths[2:]
    keywords = {"band_hi": 0, "top_left": masked}
    others = (*lengths[:2], bias, mask, sink, None, *numbers)
    opcheck(dmattn.varlen_forward.default, (*rows, *others), {**keywords, "needs_max": masked}, test_utils=UTILITIES)
    rows = [row.detach() for row in rows]
    others = tuple(part.detach() if isinstance(part, torch.Tensor) else part for part in others)
    out, lse, lse_tail, _ = dmattn.varlen_forward(*rows, *others, **keywords)
    saved = (torch.ones_like(out), torch.ones_like(lse), *rows, out, lse, lse_tail, *others)
    keywords |= {"needs_dbias": masked, "needs_dsink": masked}
    opcheck(dmattn.varlen_backward.default, saved, keywords, test_utils=UTILITIES)


def test_masks():
    for mask in (call_inputs.random_mask(2, 1, 5, 7), call_inputs.random_mask(1, 2, 5, 7).int()):
        opcheck(dmattn.pack_mask.default, (mask, None, None, 5, -3, 2), test_utils=OF_MASKS)
    segments = torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32), torch.tensor([[[0, 0, 1, 1, 1]]], dtype=torch.int32)
    opcheck(dmattn.pack_mask.default, (call_inputs.random_mask(2, 1, 5, 5), *segments, 5), test_utils=OF_MASKS)
    opcheck(dmattn.list_tiles.default, (*segments, 5, -3, 2), test_utils=OF_MASKS)
    opcheck(dmattn.list_tiles.default, (None, segments[1], 9), test_utils=OF_MASKS)


def test_what_masks_are_made_of():
    start = torch.randint(0, 5, (2, 1, 7), dtype=torch.int32)
    mask, ids = call_inputs.random_mask(1, 2, 5, 7), torch.tensor([[3, 3, 1, 9, 1]])
    segments = torch.zeros(2, 5, dtype=torch.int32), torch.ones(2, 1, 7, dtype=torch.int32)
    for given in (
        (start + 2, start, None, None, mask, None, None, 5, -3, 2),
        (start + 2, None, start, start + 1, mask[:, :, :1], *segments, 5),
    ):
        opcheck(dmattn.pack_intervals.default, given, test_utils=OF_MASKS)
    opcheck(dmattn.rank_ids.default, (ids,), test_utils=OF_MASKS)
    opcheck(dmattn.spread_lists.default, (ids.int()[:, 0], ids.int(), 6), test_utils=OF_MASKS)


def described(outputs):
    return [(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type) for tensor in outputs]


@pytest.mark.parametrize("layout", call_inputs.LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fakes_have_the_shapes_strides_and_dtypes_of_real_outputs(layout, dtype):
    (query, key, value, *_), _ = dense(layout, dtype, requires_grad=False)
    bias = call_inputs.laid_out(call_inputs.random_bias(2, 4, 5, 7, dtype=dtype, requires_grad=False), layout)
    mask = call_inputs.laid_out(call_inputs.random_mask(2, 4, 5, 7), layout)
    grad = call_inputs.laid_out(torch.ones(2, 5, 4, 12, dtype=dtype), layout)

    def everything(query, key, value, bias, mask, grad):
        tiles = dmattn.pack_mask(mask, None, None, 5)
        sink = query[0, 0, :, 0].contiguous()
        outputs = dmattn.forward(query, key, value, bias, *tiles, sink=sink, needs_max=True)
        saved = (query, key, value, *outputs[:3], bias, *tiles)
        grads = dmattn.backward(grad, outputs[1], *saved, sink=sink, needs_dbias=True, needs_dsink=True)
        qkv = torch.stack((query, query, query), dim=2).transpose(3, 4).contiguous().transpose(3, 4)
        packed = dmattn.qkvpacked_forward(qkv)
        packed_grads = dmattn.qkvpacked_backward(packed[0], None, qkv, *packed[:3])
        return *tiles, *outputs, *grads, *packed, *packed_grads

    real = everything(query, key, value, bias, mask, grad)
    with FakeTensorMode() as mode:
        fake = everything(*map(mode.from_tensor, (query, key, value, bias, mask, grad)))
    meta = everything(*(tensor.to("meta") for tensor in (query, key, value, bias, mask, grad)))
    assert described(real) == described(fake)
    assert [row[:3] for row in described(real)] == [row[:3] for row in described(meta)]

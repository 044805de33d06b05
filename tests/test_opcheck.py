"""torch's own checks of operators: schema, registration, fakes and traced derivatives; and the strides of fakes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import dmattn_ops
from tests import call_inputs

UTILITIES = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)
dmattn = torch.ops.dmattn


def dense(layout="bshd", dtype=torch.float32, requires_grad=True, mask=None, bias=None, **keywords):
    """The tensors that `forward` takes first: query, key, value, bias and a mask as its parts."""
    shapes = {"batch": 2, "seqlen_q": 5, "seqlen_k": 7, "heads": 4, "heads_kv": 2, "dim": 8, "dim_v": 12}
    inputs = call_inputs.qkv(**shapes, dtype=dtype, layout=layout, requires_grad=requires_grad)
    tiles = [None] * 6
    if mask == "bits":
        tiles = dmattn_ops.prepare_mask(call_inputs.random_mask(2, 1, 5, 7)).tiles
    elif mask == "segments":
        tiles = dmattn_ops.prepare_mask(call_inputs.random_mask(1, 2, 1, 7), seqlen_q=5).tiles
    if bias is not None:
        bias = call_inputs.random_bias(*bias, dtype=dtype, requires_grad=requires_grad)
    return (*inputs, bias, *tiles), keywords


SEED = torch.tensor([7])
DENSE = {
    "plain": {},
    "bhsd": {"layout": "bhsd", "band_hi": 2},
    "sbhd, bits": {"layout": "sbhd", "mask": "bits"},
    "strided": {"layout": "strided", "bias": (2, 4, 5, 7)},
    "sliced, float64": {"layout": "sliced", "dtype": torch.float64, "bias": (1, 1, 1, 7)},
    "bfloat16": {"dtype": torch.bfloat16, "bias": (1, 2, 5, 7), "mask": "bits"},
    "float16, inference": {"dtype": torch.float16, "requires_grad": False},
    "segments": {"mask": "segments", "band_hi": 2, "softcap": 2.0, "softmax_scale": 0.3},
    "dropout": {"seed": SEED, "dropout_p": 0.5, "deterministic": True},
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_forward(name):
    arguments, keywords = dense(**DENSE[name])
    opcheck(dmattn.forward.default, arguments, keywords, test_utils=UTILITIES)


@pytest.mark.parametrize("name", ["plain", "bhsd", "sbhd, bits", "strided", "bfloat16", "dropout"])
def test_dense_backward(name):
    (query, key, value, bias, *tiles), keywords = dense(**{**DENSE[name], "requires_grad": False})
    out, lse = dmattn.forward(query, key, value, bias, *tiles, **keywords)
    for grad_lse, needs_dbias in ((None, bias is not None), (torch.ones_like(lse), False)):
        arguments = (torch.ones_like(out), grad_lse, query, key, value, out, lse, bias, *tiles)
        keywords["needs_dbias"] = needs_dbias
        opcheck(dmattn.backward.default, arguments, keywords, test_utils=UTILITIES)


@pytest.mark.parametrize("strided", [False, True])
def test_packed_projections(strided):
    qkv = torch.stack(call_inputs.qkv(2, 5, 2, 8, requires_grad=False), dim=2)
    qkv = call_inputs.laid_out(qkv, "strided" if strided else "bshd").requires_grad_()
    arguments = (
        qkv,
        call_inputs.random_bias(1, 2, 5, 5),
        *dmattn_ops.prepare_mask(call_inputs.random_mask(2, 1, 5, 5)).tiles,
    )
    opcheck(dmattn.qkvpacked_forward.default, arguments, test_utils=UTILITIES)
    with torch.no_grad():
        out, lse = dmattn.qkvpacked_forward(*arguments)
        saved = (torch.ones_like(out), None, arguments[0].detach(), out, lse, arguments[1].detach(), *arguments[2:])
    opcheck(dmattn.qkvpacked_backward.default, saved, {"needs_dbias": True}, test_utils=UTILITIES)


@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences(masked):
    rows, lengths = call_inputs.packed([3, 0, 5], [4, 2, 6], heads_kv=2, dim=8)
    bias, mask = (call_inputs.random_bias(4, 12), call_inputs.random_mask(2, 12)) if masked else (None, None)
    keywords = {"band_hi": 0, "top_left": masked}
    opcheck(dmattn.varlen_forward.default, (*rows, *lengths, bias, mask), keywords, test_utils=UTILITIES)
    rows, bias = [row.detach() for row in rows], bias if bias is None else bias.detach()
    out, lse = dmattn.varlen_forward(*rows, *lengths, bias, mask, **keywords)
    saved = (torch.ones_like(out), torch.ones_like(lse), *rows, out, lse, *lengths, bias, mask)
    keywords["needs_dbias"] = masked
    opcheck(dmattn.varlen_backward.default, saved, keywords, test_utils=UTILITIES)


def test_masks():
    for mask in (call_inputs.random_mask(2, 1, 5, 7), call_inputs.random_mask(1, 2, 5, 7).int()):
        opcheck(dmattn.pack_mask.default, (mask, None, None, 5, -3, 2), test_utils=UTILITIES)
    segments = torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32), torch.tensor([[[0, 0, 1, 1, 1]]], dtype=torch.int32)
    opcheck(dmattn.pack_mask.default, (call_inputs.random_mask(2, 1, 5, 5), *segments, 5), test_utils=UTILITIES)
    opcheck(dmattn.list_tiles.default, (*segments, 5, -3, 2), test_utils=UTILITIES)
    opcheck(dmattn.list_tiles.default, (None, segments[1], 9), test_utils=UTILITIES)


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
        out, lse = dmattn.forward(query, key, value, bias, *tiles)
        grads = dmattn.backward(grad, lse, query, key, value, out, lse, bias, *tiles, needs_dbias=True)
        qkv = torch.stack((query, query, query), dim=2).transpose(3, 4).contiguous().transpose(3, 4)
        packed_out, packed_lse = dmattn.qkvpacked_forward(qkv)
        packed = dmattn.qkvpacked_backward(packed_out, None, qkv, packed_out, packed_lse)
        return *tiles, out, lse, *grads, packed_out, packed_lse, *packed

    real = everything(query, key, value, bias, mask, grad)
    with FakeTensorMode() as mode:
        fake = everything(*map(mode.from_tensor, (query, key, value, bias, mask, grad)))
    meta = everything(*(tensor.to("meta") for tensor in (query, key, value, bias, mask, grad)))
    assert described(real) == described(fake)
    assert [row[:3] for row in described(real)] == [row[:3] for row in described(meta)]

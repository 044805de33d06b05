"""The SM 9.0 backward for wide heads, compiled without a GPU: what it takes of an SM, and how it is launched."""

from __future__ import annotations

import inspect

import pytest
import torch

triton = pytest.importorskip("triton", minversion="3.6")

from triton.experimental.gluon import language as gl  # noqa: E402

from dmattn_ops import meta  # noqa: E402
from dmattn_ops.call import NO_MASK, Call, Gradients, Mask, Saved, Varlen, plain_options  # noqa: E402
from dmattn_ops.choice import arch, config  # noqa: E402
from dmattn_ops.kernels.hopper import behind  # noqa: E402
from dmattn_ops.kernels.hopper.backward_256 import launch as hopper_backward_256  # noqa: E402
from dmattn_ops.kernels.hopper.backward_256.keys import keys_kernel  # noqa: E402
from dmattn_ops.kernels.hopper.backward_256.queries import queries_kernel  # noqa: E402
from dmattn_ops.kernels.hopper.backward_256.types import Traits  # noqa: E402
from dmattn_ops.kernels.hopper.dbias.launch import shared_bias_kernel  # noqa: E402
from dmattn_ops.kernels.hopper.views import MaskTensors  # noqa: E402
from dmattn_ops.launching import tensor_maps  # noqa: E402
from tests.support.spills import bytes_at_most  # noqa: E402
from tests.support.tile_builder import build_interval_tiles, build_segment_tiles, build_tiles  # noqa: E402
from tests.tools.compile_only import Resources, compile_only  # noqa: E402

FULL = {"MASK": "band", "PARTIAL": False}
BAND, BITS, SEGMENTS, INTERVALS = (
    {"MASK": kind, "PARTIAL": True} for kind in ("band", "bits", "segments", "intervals")
)
RAGGED = {"MASK": "ragged", "PARTIAL": True, "HAS_LO": False, "HAS_HI": False}
HIDDEN = {"HIDDEN": True}
MLA = {"D": 128, "D2": 64, "DV": 128}  # D 192, Dv 128
KEY_BIAS, FULL_BIAS, SOFTCAP = {"BIAS": 1}, {"BIAS": 2}, {"SOFTCAP": True}
CONFIG = config.HOPPER_BACKWARD_256
EVERYTHING = plain_options(0.1)


def compile_kernel(kernel, dtype=gl.bfloat16, by_entry=False, **constants) -> Resources:
    """Compile for SM 9.0; `by_entry`: each batch entry has counts, as in batch-invariant calls."""

    def tensor_map(element, block, layout):
        name = {gl.bfloat16: "bf16", gl.float16: "fp16", gl.float32: "fp32"}[element]
        return f"tensordesc<{name}{block},{layout!r}>"

    given = {
        "D": 256,
        "D2": 0,
        "DV2": 0,
        "BIAS": 0,
        "SOFTCAP": False,
        "HAS_LO": True,
        "HAS_HI": True,
        "HIDDEN": False,
        "EDGES": False,
        "WATCH": constants.get("MASK") in ("bits", "segments", "intervals"),
    } | constants
    given = {"DV": given["D"], "NATURAL": given["BIAS"] != 0} | given
    traits = Traits(**given)
    constants = {"T": traits}
    absent = {
        "counts": not traits.WATCH,
        "counts_b": not by_entry,
        "bias": traits.BIAS == 0,
        "key_sums": kernel is keys_kernel and traits.BIAS != 1,
    }
    constants |= {name: None for name, holds in absent.items() if holds}

    def rows(name):  # q2_map is the second part of q_map
        of_values, second = name[:-4].rstrip("2") in ("v", "o", "dv"), "2" in name
        width = given[f"{'DV' if of_values else 'D'}{'2' if second else ''}"]
        block = [*[1] * (2 if traits.MASK == "ragged" else 1), 64, 1, width]  # a sequence has two coordinates
        return tensor_map(dtype, block, gl.NVMMASharedLayout.get_default_for(block, dtype))

    seconds = [name for name in kernel.arg_names if name.endswith("2_map")]
    constants |= {name: None for name in seconds if not given["DV2" if name[:-5] in ("v", "o", "dv") else "D2"]}
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    known = {
        "stat_map": tensor_map(gl.float32, [1, 64], plain),
        "stats": "*fp32",
        "flags": "*i8",
        "bits": "*i64",
        "counts": "*i32",
    }
    known |= {"bias": "*bf16", "key_sums": "*fp32"}
    known |= dict.fromkeys(("lists", "q_segments", "k_segments", "start", "end", "hidden_from", "hidden_to"), "*i32")
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            continue
        if name.endswith("_map"):
            signature[name] = known[name] if name in known else rows(name)
        else:
            signature[name] = known.get(name, "fp32" if name.startswith(("scale", "cap")) else "i32")
    aligned = tuple(name for name, kind in signature.items() if kind[0] == "*")
    return compile_only(kernel, signature, constants, aligned, 90, num_warps=4)


@pytest.mark.sampled(3)
# Bytes moved to or from the stack with triton 3.6.0. Steps without a test move none, but for 6 words with a full bias in the
# kernel of the queries; what tests segments or intervals, or loads exact statistics where rows are large, moves the rest.
@pytest.mark.parametrize(
    ("kernel", "constants", "spilled"),
    [
        (keys_kernel, FULL, 0),
        (keys_kernel, BAND | {"HAS_HI": False}, 0),
        (keys_kernel, BITS, 0),
        (keys_kernel, BITS | {"dtype": gl.float16}, 0),
        (keys_kernel, SEGMENTS, 68),
        (queries_kernel, FULL, 0),
        (queries_kernel, BAND | {"HAS_LO": False}, 0),
        (queries_kernel, BITS, 0),
        (queries_kernel, BITS | {"dtype": gl.float16}, 0),
        (queries_kernel, SEGMENTS, 116),
        (keys_kernel, RAGGED, 0),
        (queries_kernel, RAGGED, 0),
        (keys_kernel, RAGGED | KEY_BIAS, 8),
        (queries_kernel, RAGGED | KEY_BIAS, 16),
        (keys_kernel, RAGGED | SOFTCAP, 88),
        (queries_kernel, RAGGED | SOFTCAP, 0),
        (keys_kernel, INTERVALS, 0),
        (keys_kernel, INTERVALS | HIDDEN, 108),
        (queries_kernel, INTERVALS, 432),
        (queries_kernel, INTERVALS | HIDDEN, 620),
        *((kernel, BITS | {"by_entry": True}, 0) for kernel in (keys_kernel, queries_kernel)),
        (keys_kernel, INTERVALS | KEY_BIAS, 28),
        (queries_kernel, INTERVALS | KEY_BIAS, 456),
        (keys_kernel, FULL | KEY_BIAS, 0),
        (keys_kernel, SEGMENTS | KEY_BIAS, 92),
        (queries_kernel, SEGMENTS | KEY_BIAS, 100),
        (keys_kernel, BITS | KEY_BIAS, 40),
        (queries_kernel, BITS | KEY_BIAS, 44),
        (keys_kernel, BITS | FULL_BIAS, 56),
        (queries_kernel, BITS | FULL_BIAS, 564),
        (keys_kernel, BITS | SOFTCAP, 84),
        (queries_kernel, BITS | SOFTCAP, 0),
        *((kernel, SEGMENTS | {"D": width}, 0) for kernel in (keys_kernel, queries_kernel) for width in (64, 128)),
        *((kernel, mask | MLA, 0) for kernel in (keys_kernel, queries_kernel) for mask in (FULL, BAND, BITS)),
        *((kernel, BAND | {"D": 128, "D2": 32, "DV2": 32}, 0) for kernel in (keys_kernel, queries_kernel)),
        (keys_kernel, BAND | {"D": 256, "DV": 128, "DV2": 64}, 0),
        (queries_kernel, BAND | {"D": 64, "DV": 128, "DV2": 64}, 0),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_it_fits_an_sm_without_spills_or_serialized_products(kernel, constants, spilled):
    made = compile_kernel(kernel, **constants)
    assert made.shared_memory <= CONFIG.shared_memory <= arch.KNOWN[90].shared_memory
    assert made.faults == ""
    assert made.spill_bytes <= bytes_at_most(spilled)
    found = made.opcodes
    loops = 2 if constants["PARTIAL"] else 1
    width = constants.get("D", 256)
    second, width_v, second_v = constants.get("D2", 0), constants.get("DV", width), constants.get("DV2", 0)
    # instructions of a product of one step: over columns, and of each part of them
    s, dp, of_dv, of_dk = (width + second) // 16, (width_v + second_v) // 16, 8 if second_v else 4, 8 if second else 4
    if kernel is keys_kernel:  # the dk consumer has one loop for steps with and without a test
        dv_loops = loops * 2 if constants.get("BIAS") == 2 else loops  # loops of its own for exact statistics
        expected = dv_loops * (s + of_dv) + dp + of_dk
    else:
        expected = loops * 2 * (s + dp + of_dk)
    assert found["HGMMA"] == expected
    assert found["UTMALDG"] >= 4
    assert found["UTMASTG"] == 2 + (2 * (second > 0) if kernel is queries_kernel else (second > 0) + (second_v > 0))
    assert not found["RED"] + found["REDG"] + found["ATOM"] + found["ATOMG"], (
        "results must not depend on the order of blocks"
    )


def inputs(dtype=torch.bfloat16, dim=192, dim_v=160, heads=4):
    query, key, value = (
        torch.randn(2, seqlen, count, width).to(dtype)
        for seqlen, count, width in ((333, heads, dim), (411, 2, dim), (411, 2, dim_v))
    )
    return query, key, value


def reasons(query, key, value, bias=None, varlen=None, options=EVERYTHING):
    return hopper_backward_256.refusals(Call(query, key, value, bias, NO_MASK, None, None, varlen, options))


def test_it_takes_16_bit_heads_up_to_256_wide():
    for dtype in (torch.float16, torch.bfloat16):
        for dims in ((136, 136), (256, 256), (64, 256), (256, 8), (64, 64)):
            assert reasons(*inputs(dtype, *dims)) == []
    query, key, value = inputs()
    assert reasons(query.transpose(1, 2).contiguous().transpose(1, 2), key, value) == []
    assert reasons(query[:, :1], key[:1], value[:, :, :1]) == []


def test_it_refuses_with_every_reason():
    query, key, value = inputs(dim=132, dim_v=128)
    offsets = torch.zeros(3, dtype=torch.int32)
    options = EVERYTHING._replace(softcap=2.0, dropout_p=0.5)
    found = reasons(query.float(), key, value, bias=value, options=options)
    for word in (
        "float32",
        "multiples of 8",
        "softcap with a bias",
        "dropout",
        "key is not aligned",
    ):
        assert any(word in reason for reason in found), word
    packed = Call(query[0], key[0], value[0], None, Mask(k_segments=offsets[None, None]), None, None,
                  Varlen(offsets, offsets, 1, 1, False), options)  # fmt: skip
    assert any(
        "softcap with a bias, or with a mask of packed keys" in reason
        for reason in hopper_backward_256.refusals(packed)
    )
    assert any("over 256" in reason for reason in reasons(*inputs(dim=264, dim_v=128)))
    query, key, value = inputs()
    shifted, expanded = query[..., 4:-4], value[:, :1].expand(-1, 411, -1, -1)
    assert any("query is not aligned" in reason for reason in reasons(shifted, key[..., 4:-4].contiguous(), value))
    assert any("value is not aligned" in reason for reason in reasons(query, key, expanded))


class Launched:
    """Stands in for a kernel: keeps grid and arguments by name."""

    def __init__(self, kernel):
        self.signature = inspect.signature(kernel.fn)

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, **constants):
            self.grid, self.arguments = grid, self.signature.bind(*arguments, **constants).arguments

        return launch


@pytest.fixture
def launched(monkeypatch):
    kernels = {}
    for name in ("statistics_kernel", "keys_kernel", "queries_kernel"):
        kernels[name] = Launched(getattr(hopper_backward_256, name))
        monkeypatch.setattr(hopper_backward_256, name, kernels[name])
    monkeypatch.setattr(behind, "backward_again", lambda *arguments: None)
    return kernels


def launch(query, key, value, mask=NO_MASK, options=EVERYTHING, grad_out=None):
    out, lse, lse_tail, _ = meta.forward_outputs(query, value, False)
    dq, dk, dv, *_ = meta.backward_outputs(query, key, value, None, None)
    call = Call(query, key, value, None, mask, None, None, None, options)
    grads = Gradients(out if grad_out is None else grad_out, None, dq, dk, dv, None)
    hopper_backward_256.backward(call, Saved(out, lse, lse_tail), grads, CONFIG.config)


def test_each_kernel_gets_an_argument_for_every_parameter_and_a_grid_that_covers_the_problem(launched):
    launch(*inputs())
    assert {name: kernel.grid for name, kernel in launched.items()} == {
        "statistics_kernel": (2 * 4 * 384 // 64,),
        "keys_kernel": (2 * 2 * 7,),
        "queries_kernel": (2 * 4 * 3,),
    }
    for kernel in launched.values():
        assert len(kernel.arguments) == len(kernel.signature.parameters)
    rows = 2 * 4 * 384
    for name in ("keys_kernel", "queries_kernel"):
        arguments = launched[name].arguments
        assert arguments["total"] == rows
        assert arguments["stats"].numel() == 4 * rows and arguments["flags"].numel() >= rows // 64
        assert arguments["flags"].data_ptr() == arguments["stats"].data_ptr() + 16 * rows  # no flag is a statistic
    assert launched["keys_kernel"].arguments["T"].PARTIAL is False
    assert launched["queries_kernel"].arguments["T"].PARTIAL is True  # 411 keys end inside a step
    launch(*inputs(), options=EVERYTHING._replace(band_hi=0))
    for name, has_lo, has_hi in (("keys_kernel", True, False), ("queries_kernel", False, True)):
        traits = launched[name].arguments["T"]
        assert (True, has_lo, has_hi) == (traits.PARTIAL, traits.HAS_LO, traits.HAS_HI)


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 2), (2, 4)])
def test_lists_and_bits_are_read_with_the_strides_of_their_own_heads(launched, batch, heads):
    keep = torch.rand(batch, heads, 333, 411) < 0.5
    tiles = build_tiles(keep)
    launch(*inputs(), mask=tiles)
    assert launched["keys_kernel"].grid == (2 * 2 * 8,)  # both halves of four tiles
    for name, lists, bits in (
        ("keys_kernel", tiles.col_tiles, tiles.col_bits),
        ("queries_kernel", tiles.row_tiles, tiles.row_bits),
    ):
        arguments = launched[name].arguments
        assert arguments["T"].MASK == "bits"
        assert arguments["lists"] is lists
        assert arguments["mask_group"] == 4 // heads
        assert arguments["list_width"] == lists.stride(2)
        assert arguments["bits_row"] * 2 == bits.stride(2)
        for size, list_name, bits_name, dim in ((batch, "list_b", "bits_b", 0), (heads, "list_h", "bits_h", 1)):
            expected = (0, 0) if size == 1 else (lists.stride(dim), bits.stride(dim) // 2)
            assert (arguments[list_name], arguments[bits_name]) == expected


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 2), (2, 4)])
@pytest.mark.parametrize("hidden", [False, True])
def test_intervals_are_read_with_the_strides_of_their_own_heads(launched, batch, heads, hidden):
    ends = [torch.randint(0, 334, (batch, heads, 411), dtype=torch.int32) for _ in range(4)]
    mask = build_interval_tiles(*ends[: 4 if hidden else 2], seqlen_q=333)
    launch(*inputs(), mask=mask)
    for name, lists in (("keys_kernel", mask.col_tiles), ("queries_kernel", mask.row_tiles)):
        arguments = launched[name].arguments
        traits = arguments["T"]
        assert ("intervals", hidden, True) == (traits.MASK, traits.HIDDEN, traits.PARTIAL)
        assert arguments["lists"] is lists
        found = [arguments[part] for part in ("start", "end", "hidden_from", "hidden_to")]
        assert all(one is other for one, other in zip(found, ends[: 4 if hidden else 2], strict=False))
        assert arguments["mask_group"] == arguments["segment_group"] == 4 // heads
        strides = 0 if batch == 1 else heads * 411, 0 if heads == 1 else 411
        assert (arguments["k_segments_b"], arguments["k_segments_h"]) == strides
        assert arguments["q_segments_b"] == 0


def test_kernels_take_a_mask_in_the_order_of_the_record_that_launchers_pass():
    for kernel in (keys_kernel, queries_kernel, shared_bias_kernel):
        assert tuple(name for name in kernel.arg_names if name in MaskTensors._fields) == MaskTensors._fields


def test_segments_that_queries_lack_are_zero(launched):
    key_segments = -(torch.rand(2, 2, 411) < 0.4).int()
    keep = (key_segments == 0).unsqueeze(2).expand(2, 2, 333, 411)
    launch(*inputs(), mask=build_segment_tiles(keep, None, key_segments))
    arguments = launched["queries_kernel"].arguments
    assert arguments["T"].MASK == "segments"
    assert arguments["segment_group"] == 2
    assert arguments["q_segments"].shape == (1, 333)
    assert not arguments["q_segments"].any()
    assert (arguments["q_segments_b"], arguments["k_segments_b"], arguments["k_segments_h"]) == (0, 822, 411)


def test_an_expanded_gradient_is_copied_for_its_tensor_map(launched):
    query, key, value = inputs()
    launch(query, key, value, grad_out=torch.ones((), dtype=query.dtype).expand(2, 333, 4, 160))
    assert launched["keys_kernel"].arguments["o_map"].strides == [333 * 4 * 160, 4 * 160, 160, 1]


def test_a_cached_tensor_map_keeps_no_tensor_alive():
    tensor = torch.zeros(1, 64, 1, 192, dtype=torch.bfloat16)
    made = tensor_maps.rows_map(tensor, 64, 256).descriptor()
    assert made is tensor_maps.rows_map(tensor, 64, 256).descriptor()
    assert made.base.data_ptr() == tensor.data_ptr()
    assert not isinstance(made.base, torch.Tensor)
    assert made.strides == [1024, 192, 1024, 1]
    assert made.block_shape == [1, 64, 1, 256]

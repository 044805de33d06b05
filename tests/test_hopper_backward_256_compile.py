"""The SM 9.0 backward for wide heads, compiled without a GPU: what it takes of an SM, and how it is launched."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", minversion="3.6")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from dmattn_ops import arch, config, meta  # noqa: E402
from dmattn_ops.kernels.hopper.backward_256 import launch as hopper_backward_256  # noqa: E402
from dmattn_ops.kernels.hopper.backward_256.keys import keys_kernel  # noqa: E402
from dmattn_ops.kernels.hopper.backward_256.queries import queries_kernel  # noqa: E402
from dmattn_ops.kernels.launching import tensor_maps  # noqa: E402
from dmattn_ops.problem import UNBOUNDED, Options, Tiles, Varlen  # noqa: E402
from dmattn_ops.testing.carried import stale_bounds  # noqa: E402
from tests.tile_builder import build_segment_tiles, build_tiles  # noqa: E402

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
FULL, BAND, BITS, SEGMENTS = (
    {"LISTS": 0, "PARTIAL": False},
    {"LISTS": 0, "PARTIAL": True},
    {"LISTS": 1, "PARTIAL": True},
    {"LISTS": 2, "PARTIAL": True},
)
KEY_BIAS = {"BIAS": 1}
CHANGES = (KEY_BIAS, {"BIAS": 2}, {"SOFTCAP": True})
CONFIG = config.HOPPER_BACKWARD_256
EVERYTHING = Options(-UNBOUNDED, UNBOUNDED, 0.1, 0.0, 0.0, False)


def compile_kernel(kernel, dtype=gl.bfloat16, **constants):
    """Compile for SM 9.0; return the kernel and what ptxas says of it."""

    def tensor_map(element, block, layout):
        name = {gl.bfloat16: "bf16", gl.float16: "fp16", gl.float32: "fp32"}[element]
        return f"tensordesc<{name}{block},{layout!r}>"

    constants = {"D": 256, "BIAS": 0, "SOFTCAP": False, "HAS_LOW": True, "HAS_HIGH": True} | constants
    absent = {"bias": constants["BIAS"] == 0, "key_sums": kernel is keys_kernel and constants["BIAS"] != 1}
    constants |= {name: None for name, holds in absent.items() if holds}
    block = [1, 64, 1, constants["D"]]
    rows = tensor_map(dtype, block, gl.NVMMASharedLayout.get_default_for(block, dtype))
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    known = {"stat_map": tensor_map(gl.float32, [1, 64], plain), "stats": "*fp32", "bits": "*i64"}
    known |= {"bias": "*bf16", "key_sums": "*fp32"}
    known |= dict.fromkeys(("lists", "q_segments", "k_segments"), "*i32")
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_map"):
            signature[name] = known.get(name, rows)
        else:
            signature[name] = known.get(name, "fp32" if name.startswith(("scale", "cap")) else "i32")
    at = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*"}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=at, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    said = subprocess.run(
        [PTXAS, "-v", "--gpu-name=sm_90a", "-o", "/dev/null", "-"],
        input=made.asm["ptx"],
        capture_output=True,
        text=True,
        check=True,
    )
    return made, said.stderr


# Spilled bytes, none of them inside a step: with segments or a bias the dv consumer spills what it keeps across query
# heads, the producer of the queries' kernel a few words.
@pytest.mark.parametrize(
    ("kernel", "constants", "spilled"),
    [
        (keys_kernel, FULL, 0),
        (keys_kernel, BAND | {"HAS_HIGH": False}, 0),
        (keys_kernel, BITS, 0),
        (keys_kernel, BITS | {"dtype": gl.float16}, 0),
        (keys_kernel, SEGMENTS, 32),
        (queries_kernel, FULL, 0),
        (queries_kernel, BAND | {"HAS_LOW": False}, 0),
        (queries_kernel, BITS, 0),
        (queries_kernel, BITS | {"dtype": gl.float16}, 0),
        (queries_kernel, SEGMENTS, 4),
        (keys_kernel, FULL | KEY_BIAS, 8),
        (keys_kernel, SEGMENTS | KEY_BIAS, 40),
        (queries_kernel, SEGMENTS | KEY_BIAS, 16),
        *((kernel, BITS | change, 0) for kernel in (keys_kernel, queries_kernel) for change in CHANGES),
        *((kernel, SEGMENTS | {"D": width}, 0) for kernel in (keys_kernel, queries_kernel) for width in (64, 128)),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_it_fits_an_sm_without_spills_or_serialized_products(kernel, constants, spilled):
    made, said = compile_kernel(kernel, **constants)
    assert made.metadata.shared <= CONFIG.shared_memory <= arch.KNOWN[90].shared_memory
    assert not re.findall(r"C75\d\d.*", said), "ptxas serializes matrix products"
    assert stale_bounds(made.asm["source"], 90) == []
    assert sum(map(int, re.findall(r"(\d+) bytes spill stores", said))) <= spilled
    ptx = made.asm["ptx"]
    loops = 2 if constants["PARTIAL"] else 1
    scores, gradient = constants.get("D", 256) // 16, 4  # instructions of a product of one step
    if kernel is keys_kernel:  # the dk consumer has one loop for steps with and without a test
        expected = (loops + 1) * (scores + gradient)
    else:
        expected = loops * 2 * (2 * scores + gradient)
    assert len(re.findall(r"wgmma\.mma_async\S+", ptx)) == expected
    assert "cp.async.bulk.tensor.4d.shared" in ptx
    assert "cp.async.bulk.tensor.4d.global" in ptx
    assert not re.findall(r"\b(?:red|atom)\.\S+", ptx), "results must not depend on the order of blocks"


def inputs(dtype=torch.bfloat16, dim=192, dim_v=160, heads=4):
    query, key, value = (
        torch.randn(2, seqlen, count, width).to(dtype)
        for seqlen, count, width in ((333, heads, dim), (411, 2, dim), (411, 2, dim_v))
    )
    return query, key, value


def reasons(query, key, value, bias=None, varlen=None, options=EVERYTHING):
    return hopper_backward_256.refusals(query, key, value, bias, Tiles(), None, varlen, options)


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
    found = reasons(
        query.float(), key, value, bias=value, varlen=Varlen(offsets, offsets, 1, 1, False), options=options
    )
    for word in (
        "float32",
        "multiples of 8",
        "variable lengths",
        "softcap with a bias",
        "dropout",
        "key is not aligned",
    ):
        assert any(word in reason for reason in found), word
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
    return kernels


def launch(query, key, value, tiles=Tiles(), options=EVERYTHING, grad_out=None):  # noqa: B008 - a tuple
    out, lse = meta.forward_outputs(query, value)
    grads = meta.backward_outputs(query, key, value, None, False)
    grad_out = out if grad_out is None else grad_out
    call = (grad_out, None, query, key, value, out, lse, None, tiles, None, None, options, *grads[:3], None)
    hopper_backward_256.backward(*call, CONFIG.config)
    return grads


def test_each_kernel_gets_an_argument_for_every_parameter_and_a_grid_that_covers_the_problem(launched):
    launch(*inputs())
    assert {name: kernel.grid for name, kernel in launched.items()} == {
        "statistics_kernel": (2 * 4 * 384 // 64,),
        "keys_kernel": (2 * 2 * 7,),
        "queries_kernel": (2 * 4 * 3,),
    }
    for kernel in launched.values():
        assert len(kernel.arguments) == len(kernel.signature.parameters)
    assert launched["keys_kernel"].arguments["PARTIAL"] is False
    assert launched["queries_kernel"].arguments["PARTIAL"] is True  # 411 keys end inside a step
    launch(*inputs(), options=EVERYTHING._replace(band_hi=0))
    for name, low, high in (("keys_kernel", True, False), ("queries_kernel", False, True)):
        arguments = launched[name].arguments
        assert (arguments["PARTIAL"], arguments["HAS_LOW"], arguments["HAS_HIGH"]) == (True, low, high)


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 2), (2, 4)])
def test_lists_and_bits_are_read_with_the_strides_of_their_own_heads(launched, batch, heads):
    keep = torch.rand(batch, heads, 333, 411) < 0.5
    tiles = build_tiles(keep)
    launch(*inputs(), tiles=tiles)
    assert launched["keys_kernel"].grid == (2 * 2 * 8,)  # both halves of four tiles
    for name, lists, bits in (
        ("keys_kernel", tiles.col_tiles, tiles.col_bits),
        ("queries_kernel", tiles.row_tiles, tiles.row_bits),
    ):
        arguments = launched[name].arguments
        assert arguments["LISTS"] == 1
        assert arguments["lists"] is lists
        assert arguments["mask_group"] == 4 // heads
        assert arguments["list_width"] == lists.stride(2)
        assert arguments["bits_row"] * 2 == bits.stride(2)
        for size, list_name, bits_name, dim in ((batch, "list_b", "bits_b", 0), (heads, "list_h", "bits_h", 1)):
            expected = (0, 0) if size == 1 else (lists.stride(dim), bits.stride(dim) // 2)
            assert (arguments[list_name], arguments[bits_name]) == expected


def test_segments_that_queries_lack_are_zero(launched):
    key_segments = -(torch.rand(2, 2, 411) < 0.4).int()
    keep = (key_segments == 0).unsqueeze(2).expand(2, 2, 333, 411)
    launch(*inputs(), tiles=build_segment_tiles(keep, None, key_segments))
    arguments = launched["queries_kernel"].arguments
    assert arguments["LISTS"] == 2
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

"""The Triton kernels of masks compile for each architecture without spilling, and read 16 bytes at a time."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

from dmattn_ops.kernels import interval_lists  # noqa: E402
from dmattn_ops.kernels.masks import launch, lists, pack  # noqa: E402
from tests.tools.compile_only import compile_only  # noqa: E402

ARCHITECTURES = (80, 90, 120)
PACKED = ("mask", "q_segments", "k_segments", "classes", "row_bits", "col_bits")
LISTED = ("source", "row_tiles", "col_tiles")


def signature(kernel: triton.JITFunction, pointers: dict[str, str], constants: dict[str, object]) -> dict[str, str]:
    return {name: pointers.get(name, "i32") for name in kernel.arg_names if name not in constants}


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_pack_compiles(sm: int, aligned: bool, segments: bool):
    constants = {"ALIGNED": aligned, "HAS_Q_SEGMENTS": segments, "HAS_K_SEGMENTS": segments}
    pointers = {**dict.fromkeys(PACKED, "*i32"), "mask": "*u8", "classes": "*i8"}
    multiples = (*PACKED, "seqlen_k", "stride_b", "stride_h", "stride_q") if aligned else PACKED[3:]
    kernel = pack.pack_tiles
    found = compile_only(kernel, signature(kernel, pointers, constants), constants, multiples, sm, num_warps=8)
    assert found.spill_bytes == 0
    assert not found.traps
    if aligned and not segments:
        assert found.opcodes["LDG"] == 16  # two rows of two tiles are 64 KiB: 16 loads of 16 bytes for 256 threads


@pytest.mark.parametrize(
    ("source", "longest"),
    [("classes", 64), ("classes", 128), ("classes", 129), ("ranges", 16), ("ranges", 17), ("hulls", 64), ("hulls", 65)],
)
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_lists_compile(sm: int, source: str, longest: int):
    other, ranked, warps = launch.blocks_of(source, longest)
    assert ranked == 0 or longest <= ranked
    constants = {"T": lists.Traits(source, source == "ranges", 16, other, ranked)}
    pointers = {**dict.fromkeys(LISTED, "*i32"), "source": "*i8" if source == "classes" else "*i32"}
    kernel = lists.list_tiles_kernel
    found = compile_only(kernel, signature(kernel, pointers, constants), constants, LISTED, sm, num_warps=warps)
    assert found.spill_bytes <= (8 if (sm, source, longest) == (80, "hulls", 64) else 0)
    assert not found.traps


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_hulls_of_intervals_compile(sm: int, hidden: bool):
    tensors = ("start", "end", "hidden_from", "hidden_to", "hulls")
    kernel = interval_lists._write_hulls
    constants = {"HIDDEN": hidden, "TILES": 8}
    found = compile_only(
        kernel, signature(kernel, dict.fromkeys(tensors, "*i32"), constants), constants, tensors, sm, num_warps=4
    )
    assert found.spill_bytes == 0
    assert not found.traps

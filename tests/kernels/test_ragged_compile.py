"""The kernels that record tiles of packed sequences and rank them compile for SM 9.0 without spilling."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

from dmattn_ops.kernels import ragged  # noqa: E402
from tests.tools.compile_only import Resources, compile_only  # noqa: E402


def compiled(kernel: triton.JITFunction, constants: dict[str, int | bool]) -> Resources:
    pointers = dict.fromkeys(("own_offsets", "other_offsets", "records"), "*i32")
    signature = {name: pointers.get(name, "i32") for name in kernel.arg_names if name not in constants}
    aligned = tuple(name for name in signature if name in pointers)
    return compile_only(kernel, signature, constants, aligned, 90, num_warps=4)


@pytest.mark.parametrize("at_once", [ragged._FEW, ragged._MANY])
@pytest.mark.parametrize("rows", [64, 128, 192])
def test_writing_tiles_compiles(rows: int, at_once: int) -> None:
    found = compiled(ragged._write_tiles, {"ROWS": rows, "TOP_LEFT": False, "AT_ONCE": at_once})
    assert found.spill_bytes == 0 and not found.traps and found.registers <= 255


@pytest.mark.parametrize("chunk", [0, 2, 16, ragged._OWN])
def test_ranking_tiles_compiles(chunk: int) -> None:
    constants = {"OWN": ragged._OWN, "OTHER": ragged._OTHERS, "CHUNK": chunk}
    found = compiled(ragged._rank_tiles, constants)
    assert found.spill_bytes == 0 and not found.traps

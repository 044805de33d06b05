"""The kernels that write spans of packed sequences compile for SM 9.0 without spilling, for few tiles and for many."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

from dmattn_ops.kernels import spans  # noqa: E402
from dmattn_ops.testing.compile_only import Resources, compile_only  # noqa: E402


def compiled(kernel: triton.JITFunction, constants: dict[str, int | bool]) -> Resources:
    pointers = dict.fromkeys(("cu_own", "cu_other", "starts", "ends", "records"), "*i32")
    signature = {name: pointers.get(name, "i32") for name in kernel.arg_names if name not in constants}
    aligned = tuple(name for name in signature if name in pointers)
    return compile_only(kernel, signature, constants, aligned, 90, num_warps=4)


@pytest.mark.parametrize(("ranked", "chunk"), [(0, 0), (16, 0), (16, 8), (spans._RANKED, 0), (spans._RANKED, 16)])
@pytest.mark.parametrize("rows", [64, 128, 192])
def test_writing_spans_compiles(rows: int, ranked: int, chunk: int) -> None:
    padded = triton.next_power_of_2(rows)
    constants = {
        "ROWS": rows, "PADDED": padded, "KEYS": True, "TOP_LEFT": False, "RANKED": ranked, "CHUNK": chunk,
    }  # fmt: skip
    found = compiled(spans._write_spans, constants)
    assert found.spill_bytes == 0 and not found.traps and found.registers <= 255


@pytest.mark.parametrize("chunk", [0, 16, 128])
def test_ranking_many_tiles_compiles(chunk: int) -> None:
    found = compiled(spans._rank_tiles, {"OWN": max(64, chunk), "OTHER": 128, "CHUNK": chunk})
    assert found.spill_bytes == 0 and not found.traps

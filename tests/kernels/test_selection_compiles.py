"""The Triton kernels of lifetimes compile for each architecture, and spill next to nothing."""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton")

from dmattn_ops.kernels.selection import alive, deaths, documents, keys, launch  # noqa: E402
from tests.tools.compile_only import Resources, compile_only  # noqa: E402

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
CUTS = sorted({*(tuple(cut) for _, *cut in launch.CUTS), launch.LONGEST_CUT})
KINDS = {512: "fp32", 1024: "bf16", 2048: "fp16", 4096: "fp32"}
SCORES = {"fp32": "*i32", "bf16": "*i16", "fp16": "*fp16", "rank": "*i32"}
WIDE = ("coarse_runs", "keys")  # 64-bit


def compiled(kernel: triton.JITFunction, sm: int, num_warps: int, **constants: Any) -> Resources:
    """Compile a kernel; addresses are multiples of 16 as PyTorch allocates them, numbers anything."""
    numbers = {"seqlen", "size", "spans", "bits", "heads", "keep", "keep_first", "keep_last"}
    numbers |= {"scores_b", "scores_h", "bounds_b", "ids_b"}
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            continue
        types[name] = "i32" if name in numbers else "*i64" if name in WIDE else "*i32"
    if "scores" in types:
        types["scores"] = SCORES[str(constants["T"].kind)]
    if "ids" in types:
        types["ids"] = "*i64"
    pointers = tuple(name for name, kind in types.items() if kind.startswith("*") and name != "scores")
    return compile_only(kernel, types, constants, pointers, sm, num_warps=num_warps)


SPILLED = 72  # bytes at most, of a few kernels that sort or search 4096 keys in registers


def check(found: Resources) -> None:
    assert found.spill_bytes <= SPILLED
    assert not found.traps
    assert found.shared_memory <= 48 << 10  # what every GPU gives without asking


@pytest.mark.sampled(11)
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize(("chunk", "fine"), CUTS)
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_runs_are_sorted_in_registers(sm: int, chunk: int, fine: int, has_documents: bool):
    kind = KINDS[chunk]
    traits = keys.Traits(chunk, fine, kind, has_documents, not has_documents)
    check(compiled(keys.sort_runs, sm, launch.SORTING_WARPS, T=traits, COARSE=True))


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("chunk", "runs"), [(512, 16), (512, 64), (1024, 64), (2048, 256), (4096, 256), (4096, 4096)])
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_the_best_at_each_chunk_are_found_and_sorted_in_registers(sm: int, chunk: int, runs: int):
    constants = {"CHUNK": chunk, "RUNS": runs, "LOG_RUNS": runs.bit_length() - 1, "HAS_DOCUMENTS": runs > 16}
    check(compiled(alive.sort_alive, sm, launch.SORTING_WARPS, **constants))


@pytest.mark.sampled(11)
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize(("chunk", "fine", "kind"), [*((*cut, KINDS[cut[0]]) for cut in CUTS), (512, 64, "rank")])
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_deaths_are_written_from_registers(sm: int, chunk: int, fine: int, kind: str, has_documents: bool):
    traits = keys.Traits(chunk, fine, kind, has_documents, True)
    for programs in (1, 1 << 20):
        check(compiled(deaths.write_deaths, sm, launch.deaths_warps(programs), T=traits))


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_bounds_of_documents_are_found_without_spilling(sm: int):
    check(compiled(documents.find_changes, sm, 4, SPAN=launch.SPAN))
    check(compiled(documents.write_bounds, sm, 4, SPAN=launch.SPAN, MANY=256))

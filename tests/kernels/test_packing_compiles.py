"""The Triton kernels that pack keys compile for each architecture without spilling, and move 16 bytes at a time."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

import torch  # noqa: E402

from dmattn_ops.api.stand_in import compiled_launches  # noqa: E402
from dmattn_ops.call import UNBOUNDED  # noqa: E402
from dmattn_ops.choice.epochs import epochs  # noqa: E402
from dmattn_ops.kernels.epochs import launch, rows, slots  # noqa: E402
from dmattn_ops.kernels.masks.ranks import RANKED_AT_ONCE  # noqa: E402
from dmattn_ops.kernels.portable.arguments import RowBlock  # noqa: E402
from dmattn_ops.launching import launch as launching  # noqa: E402
from tests.support.spills import bytes_at_most  # noqa: E402
from tests.tools.compile_only import Resources, compile_only  # noqa: E402

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
STRIDES = ("start_b", "start_h", "end_b", "end_h")
SPILLED = 24  # bytes at most, of planning: ptxas keeps two programs on a multiprocessor at this price


def compiled(
    kernel: triton.JITFunction,
    pointers: dict[str, str],
    constants: dict,
    aligned: tuple,
    sm: int,
    warps: int,
    spilled: int = 0,
) -> Resources:
    """Compile a kernel whose pointers and strides `aligned` are multiples of 16, and see that it is sound."""
    signature = {name: pointers.get(name, "i32") for name in kernel.arg_names if name not in constants}
    found = compile_only(kernel, signature, constants, (*pointers, *aligned), sm, num_warps=warps)
    assert found.spill_bytes <= bytes_at_most(spilled)
    assert not found.traps
    return found


def mask_pointers(*names: str) -> dict[str, str]:
    return dict.fromkeys(("starts", "ends", *names), "*i32")


@pytest.mark.sampled(11)
@pytest.mark.parametrize("buckets", [2, 16, 32])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_planning_epochs_compiles(sm: int, inverse: bool, buckets: int):
    names = ("listed", "slot_keys", "slot_starts", "slot_ends", "broken", "hulls", "row_tiles", "col_tiles")
    pointers = mask_pointers(*names, *(("listed_places", "offsets", "places") if inverse else ()))
    constants: dict[str, object] = {"INVERSE": inverse, "BUCKETS": buckets, "planned": launch.PLANNED}
    constants |= {} if inverse else dict.fromkeys(("listed_places", "offsets", "places"))
    warps = launch.PLANNING_WARPS
    found = compiled(slots.plan_epochs, pointers, constants, STRIDES, sm, warps, SPILLED)
    assert (
        found.registers <= 128
    )  # two of 256 threads on a multiprocessor: epochs are often more than there are of these
    del pointers["starts"]
    without = compiled(slots.plan_epochs, pointers, {"starts": None, **constants}, STRIDES, sm, warps, SPILLED)
    # starts of 1024 keys, 4 a thread: a load of 16 bytes ahead of the loop, one in it, and 4 of the last block, which ends
    # anywhere; then those of listed and born keys, one by one
    assert found.opcodes["LDG"] - without.opcodes["LDG"] == 1 + 1 + 4 + (launch.PLANNED.listed + 1024) // 256


@pytest.mark.parametrize(("tiles", "longest"), [(1, 2**31 - 1), (3, 2**31 - 1), (8, 2**31 - 1), (1023, 2**31 - 1)])
def test_epochs_of_queries_are_found_without_a_division(tiles: int, longest: int):
    epoch = 128 * tiles
    magic, shift = slots.division_by(epoch)
    assert 0 < magic < 2**31
    edges = {
        query
        for at in range(0, longest, max(epoch, longest // 4096 // epoch * epoch))
        for query in (at, at + epoch - 1)
    }
    for query in (*edges, longest):
        if query <= longest:
            assert ((query >> 7 << 2) * magic >> 32) >> shift == query // epoch


@pytest.mark.parametrize(
    ("width", "dtype", "copied"),
    [(128, "bf16", 128), (64, "fp16", 128), (40, "bf16", 128), (256, "fp32", 32), (1, "fp32", 128)],
)
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_copies_compile(sm: int, width: int, dtype: str, copied: int):
    padded = triton.next_power_of_2(width)
    block = RowBlock(copied, width, padded, width > 1)
    constants = {"rows": block, "second_rows": block, "RANKED": RANKED_AT_ONCE}
    pointers = dict.fromkeys(("slot_keys", "row_tiles", "col_tiles"), "*i32")
    pointers |= dict.fromkeys(("source", "second_source", "target", "second_target"), f"*{dtype}")
    found = compiled(rows.gather_kernel, pointers, constants, (), sm, 4)
    if width == 128:
        assert found.opcodes["LDG"] >= 32 and found.opcodes["STG"] >= 32  # 64 KiB by 128 threads, 16 bytes each
        assert found.opcodes["STG"] < 48
    if width == 1:
        alone = {**constants, "RANKED": 0, "second_source": None, "second_target": None}
        pointers = {name: kind for name, kind in pointers.items() if not name.startswith("second")}
        compiled(rows.gather_kernel, pointers, alone, (), sm, 4)


@pytest.mark.parametrize(
    ("width", "second", "dtype", "add"),  # only sums of a bias per key are alone, and added to what is there
    [
        (128, 128, "bf16", False),
        (64, 64, "fp16", False),
        (64, 40, "fp32", False),
        (256, 256, "fp32", False),
        (1, 0, "fp32", False),
        (1, 0, "bf16", True),
    ],
)
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_sums_compile(sm: int, width: int, second: int, dtype: str, add: bool):
    keys = max(1, min(256, 512 // triton.next_power_of_2(width)))
    blocks = [RowBlock(keys, of, triton.next_power_of_2(of), width > 1) for of in (width, second or width)]
    constants = {"rows": blocks[0], "second_rows": blocks[1], "ADD": add}
    pointers = {"source": "*fp32", "offsets": "*i32", "places": "*i32", "target": f"*{dtype}"}
    if second:
        pointers |= {"second_source": "*fp32", "second_target": f"*{dtype}"}
    else:
        constants |= {"second_source": None, "second_target": None}
    found = compiled(rows.sum_kernel, pointers, constants, (), sm, 1)
    if width == second == 128:
        assert found.opcodes["STG"] == 4  # twice 1 KiB by 32 threads, 16 bytes each


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_poisoning_rows_compiles(sm: int):
    for width, dtype in ((128, "bf16"), (256, "fp32"), (1, "fp32")):
        constants = {"ROWS": 2048 // width, "WIDTH": width, "PADDED": width}
        pointers = {"broken": "*i32", "target": f"*{dtype}", "second_target": "*fp32"}
        compiled(rows.poison_kernel, pointers, constants, (), sm, 4)


def pack(seqlen: int, at_most: int, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> None:
    """Pack what a forward and a backward of two of four key heads need, and hand everything back."""
    cut = epochs(seqlen, seqlen, at_most, 0, 512)
    made = launch.plan_slots(inputs["start"], inputs["end"], cut, seqlen, -UNBOUNDED, 0, 2, 2, inverse=True)
    key, value = launch.gather_rows((inputs["key"], inputs["value"]), made, 2, 2, 1)
    bias = launch.gather_bias(inputs["bias"], made, 8, 4, 4)
    launch.poison_rows(outputs["out"][:, :, 4:], outputs["lse"][:, 4:], made)
    launch.sum_rows((key, value), made, (outputs["dk"], outputs["dv"]), 2, 1)
    launch.sum_bias(bias, made, outputs["dbias"], 8, 4, 4)


def test_what_is_launched_can_be_repeated_and_is_compiled_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launching, "Relaunch", lambda compiled, grid, arguments: (grid, arguments))
    compiled = []
    with compiled_launches(90) as launches:
        for seqlen, at_most in ((4096, 256), (4096 + 160, 272), (8192, 1008)):
            inputs = {name: torch.empty(1, 4, seqlen, dtype=torch.int32) for name in ("start", "end")}
            inputs |= {name: torch.empty(1, seqlen, 4, 64) for name in ("key", "value")}
            inputs["bias"] = torch.empty(1, 8, 1, seqlen)
            outputs = {"out": torch.empty(1, seqlen, 8, 64), "lse": torch.empty(1, 8, seqlen)}
            outputs |= {name: torch.empty(1, seqlen, 4, 64) for name in ("dk", "dv")}
            outputs["dbias"] = torch.empty(1, 8, 1, seqlen)
            with launching.recording(list(inputs.values())) as recorded:
                pack(seqlen, at_most, inputs, outputs)
            steps = recorded.named(list(outputs.values()))  # LookupError where a plan could not be made
            assert not recorded.watch.changes
            assert len([step for step in steps if isinstance(step, tuple) and len(step) == 2]) == len(launches) == 6
            compiled.append([(made.kernel, made.compiled.hash) for made in launches])
            launches.clear()
    assert compiled[0] == compiled[1] == compiled[2]

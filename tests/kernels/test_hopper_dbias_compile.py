"""The SM 9.0 kernel of a shared bias's gradient, compiled without a GPU as its launcher does, and how it divides the work."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", minversion="3.6")

from dmattn_ops import explain, meta  # noqa: E402
from dmattn_ops.api.stand_in import compiled_launches  # noqa: E402
from dmattn_ops.call import (  # noqa: E402
    NO_MASK,
    TILE,
    UNBOUNDED,
    Call,
    Mask,
    plain_options,
)
from dmattn_ops.choice import arch, config  # noqa: E402
from dmattn_ops.kernels.hopper.arguments import listed  # noqa: E402
from dmattn_ops.kernels.hopper.dbias import launch as shared_bias  # noqa: E402
from dmattn_ops.kernels.hopper.statistics import Statistics  # noqa: E402
from dmattn_ops.kernels.portable.dbias import parts_of  # noqa: E402
from tests.support.spills import bytes_at_most  # noqa: E402
from tests.tools.compile_only import Resources, read_resources  # noqa: E402
from tests.tools.machine_code import disassemble  # noqa: E402

CONFIG = config.HOPPER_BACKWARD[1].config.shared_bias
SM90 = arch.KNOWN[90]
# Bytes moved to or from the stack with triton 3.6.0.
ALLOWED = {
    "d128": 0, "d128 causal": 12, "d128 window": 28, "d128 bits": 64, "d128 segments": 16, "d128 causal intervals": 276,
    "d128 causal hidden": 108, "d128 dropout": 36, "d128 float32": 16, "d128 odd": 0, "d128 float16 causal": 0,
    "d64": 0, "d64 four causal": 0, "d64 bits": 36, "d96 causal": 12, "d128 grouped": 4, "d128 grouped bits": 88,
    "d128 grouped causal float32": 48, "d64 nine": 4,
}  # fmt: skip


def make_call(case: str) -> Call:
    """Return a call `[2, 512, 4, D]` whose bias all batches share, and with "grouped" both heads of a group."""
    words = case.split()
    dim, dtype = int(words[0][1:]), torch.float16 if "float16" in words else torch.bfloat16
    batch = 4 if "four" in words else 9 if "nine" in words else 2
    seqlen, heads, heads_k = 517 if "odd" in words else 512, 4, 2 if "grouped" in words else 4
    query = torch.empty(batch, seqlen, heads, dim, dtype=dtype)
    key, value = (torch.empty(batch, seqlen, heads_k, dim, dtype=dtype) for _ in range(2))
    bias = torch.empty(1, heads_k, seqlen, seqlen, dtype=torch.float32 if "float32" in words else dtype)
    numbers = torch.empty(batch, heads_k, seqlen, dtype=torch.int32)
    mask = NO_MASK
    if "bits" in words:
        dense = torch.empty(batch, heads, seqlen, seqlen, dtype=torch.bool)
        mask = Mask(*meta.pack_mask_outputs(dense, batch, heads, seqlen, -UNBOUNDED, UNBOUNDED))
    elif "segments" in words:
        lists = meta.list_tiles_outputs(numbers, batch, heads_k, seqlen, seqlen, -UNBOUNDED, UNBOUNDED)
        mask = Mask(*lists, q_segments=torch.empty(batch, seqlen, dtype=torch.int32), k_segments=numbers)
    elif "intervals" in words:
        mask = Mask(start=numbers, end=numbers.clone())
    elif "hidden" in words:
        mask = Mask(start=numbers, end=numbers.clone(), hidden_from=numbers.clone(), hidden_to=numbers.clone())
    low = -100 if "window" in words else -UNBOUNDED
    high = 0 if {"causal", "window"} & set(words) else UNBOUNDED
    options = plain_options(dim**-0.5, low, high, dropout_p=0.1 * ("dropout" in words))
    seed = torch.zeros(1, 1, dtype=torch.int64) if "dropout" in words else None
    return Call(query, key, value, bias, mask, None, seed, None, options)


def compile_case(case: str) -> Resources:
    """Compile what the launcher launches for a call."""
    call = make_call(case)
    batch, seqlen, heads, _ = call.query.shape
    rows = -(-seqlen // TILE) * TILE
    total = batch * heads * rows
    statistics = Statistics(torch.empty(4 * total), torch.empty(total // 64, dtype=torch.int8), rows, total // 64)
    assert call.bias is not None and CONFIG is not None and not shared_bias.refusals(call)
    with compiled_launches(90) as launched:
        shared_bias.write_dbias(
            listed(call), torch.empty_like(call.query), statistics, torch.empty_like(call.bias), CONFIG
        )
    kernel = launched[-1]
    assert kernel.kernel == "shared_bias_kernel"
    return read_resources(kernel.compiled, 90, kernel.log)


@pytest.mark.parametrize("case", ALLOWED)
def test_it_fits_an_sm_without_serialized_products(case: str) -> None:
    made = compile_case(case)
    assert made.shared_memory <= SM90.shared_memory
    assert made.faults == ""
    assert made.products == "wgmma"
    assert made.spill_bytes <= bytes_at_most(ALLOWED[case])
    found = made.opcodes
    chunks = 1 if "grouped" not in case and "nine" not in case else CONFIG.chunks
    columns = {64: 64, 96: 96, 128: 128}[int(case.split()[0][1:])]
    assert found["HGMMA"] == 2 * chunks * 2 * columns // 16  # S and dP of both consumers
    assert not found["RED"] + found["REDG"] + found["ATOM"] + found["ATOMG"], "results must not depend on the order"
    if "odd" not in case:  # pieces of four keys: 8 bytes, or 16 of float32
        assert found["STG"] == 2 * chunks * 8


def test_exponentials_are_computed_before_the_wait_for_dp() -> None:
    """They hide that product: ptxas would move them behind the wait, were there no block boundary between them."""
    code = disassemble(compile_case("d128").cubin)
    of_one = code[code.index("HGMMA") :]
    of_one = of_one[: of_one.index("STG")]
    last_wait = of_one.rindex("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    assert "MUFU.EX2" in of_one[:last_wait]
    assert "MUFU.EX2" not in of_one[last_wait:]


@pytest.mark.parametrize(
    ("members", "columns", "resident", "buffers", "stages"),
    [
        (2, 256, True, 2, 3),
        (3, 256, False, 2, 3),
        (24, 256, False, 2, 3),
        (2, 128, True, 2, 3),
        (4, 128, True, 4, 3),
        (5, 128, True, 5, 3),
        (6, 128, False, 2, 3),
        (2, 192, True, 2, 3),
        (3, 192, True, 3, 3),
    ],
)
def test_queries_stay_in_shared_memory_where_they_leave_room_for_keys(
    members: int, columns: int, resident: bool, buffers: int, stages: int
) -> None:
    assert CONFIG is not None
    plan = shared_bias.plan_of(members, columns, SM90.shared_memory, CONFIG)
    assert plan == shared_bias.Plan(resident, buffers, stages, 1 if resident else CONFIG.chunks)
    taken = (plan.query_buffers * 2 + plan.stages) * 64 * columns * 2
    assert taken + shared_bias.SMALL_BUFFERS <= SM90.shared_memory


@pytest.mark.parametrize("batches", [1, 2, 7, 384])
@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 64, 100])
@pytest.mark.parametrize("programs", [1, 2, 100, 131, 132, 133, 512, 4096])
def test_the_parts_of_keys_and_batches_cover_all_and_fill_the_sms(programs: int, blocks: int, batches: int) -> None:
    splits, parts = shared_bias.division_of(programs, blocks, batches, 2, 132)
    each = -(-blocks // splits)
    assert batches % parts == 0
    assert 1 <= splits <= min(blocks, shared_bias.MOST_SPLITS)
    assert sorted(set().union(*(range(part * each, min((part + 1) * each, blocks)) for part in range(splits)))) == list(
        range(blocks)
    )
    if programs == 4096 and batches == 1:
        assert splits == 1
    if programs == 1 and batches == 1 and blocks <= shared_bias.MOST_SPLITS:
        assert splits == blocks
    if programs == 1 and batches == 384:
        assert splits * parts > 100 or (splits, parts) == (blocks, 16)


@pytest.mark.parametrize(
    ("batches", "programs", "parts"),
    [
        (0, 5, 1),
        (1, 1, 1),
        (2, 1, 1),
        (384, 36, 6),
        (768, 288, 8),
        (512, 512, 1),
        (384, 1, 16),
        (13, 1, 13),
        (17, 1, 1),
    ],
)
def test_other_kernels_divide_batches_into_equal_parts_that_are_done_soonest(
    batches: int, programs: int, parts: int
) -> None:
    assert parts_of(batches, programs, 132) == parts


@pytest.mark.parametrize(
    ("dim", "shared", "told"),
    [
        (64, True, "a kernel of its own computes the gradient of the bias"),
        (128, True, "a kernel of its own computes the gradient of the bias"),
        (192, True, "the portable kernel computes the gradient of the bias: head dimensions (192, 192) are over 128"),
        (128, False, ""),
    ],
)
def test_explain_tells_which_kernel_computes_the_gradient_of_the_bias(dim: int, shared: bool, told: str) -> None:
    rows = torch.empty(2, 512, 4, dim, dtype=torch.bfloat16)
    bias = torch.empty(1, 4, 512 if shared else 1, 512)
    backward = explain(rows, rows, rows, None, bias, arch="9.0").backward
    assert len(backward.notes) == bool(told)
    assert told in str(backward)

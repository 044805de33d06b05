"""No product of 32 bits that may overflow reaches an address of a kernel: each that is not small by itself has a bound here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

triton = pytest.importorskip("triton")

import torch  # noqa: E402
import triton.language as tl  # noqa: E402

from dmattn_ops.call import UNBOUNDED  # noqa: E402
from dmattn_ops.choice import epochs  # noqa: E402
from dmattn_ops.choice.resources import Specialization  # noqa: E402
from dmattn_ops.kernels.epochs import launch as packs  # noqa: E402
from dmattn_ops.kernels.masks import launch as tile_mask  # noqa: E402
from dmattn_ops.kernels.selection import launch as selection  # noqa: E402
from dmattn_ops.meta import list_tiles_outputs, pack_mask_outputs  # noqa: E402
from tests.support import other_launches  # noqa: E402
from tests.support.addresses import code_of, intermediate_code, large_products  # noqa: E402
from tests.support.spills import KNOWN  # noqa: E402
from tests.tools import configurations  # noqa: E402
from tests.tools.configurations import (  # noqa: E402
    BITS,
    CAUSAL,
    EVERYTHING,
    PLAIN,
    SEGMENTS,
    VARLEN,
    Unit,
    launch,
    reachable,
)

# Products are the same whichever Triton compiles them; others than 3.6 name their places in another way.
pytestmark = pytest.mark.skipif(not KNOWN, reason="reads the places in the sources that triton 3.6 writes")
FREE = (-UNBOUNDED, UNBOUNDED)
SEQLEN = 3000

BROADCAST = replace(EVERYTHING, bias="broadcast bias")
PORTABLE = (
    EVERYTHING,
    BROADCAST,
    replace(BROADCAST, mask="hidden intervals", band="causal"),
    replace(EVERYTHING, mask="segments", band="causal"),
    replace(EVERYTHING, mask="hidden intervals", bias="key bias"),
    replace(EVERYTHING, decode=True),
    replace(VARLEN, bias="key bias", dropout=True, band="causal"),
)
AMPERE = (
    BITS,
    PLAIN,
    replace(CAUSAL, mask="hidden intervals", grouped=True),
    replace(SEGMENTS, bias="bias"),
    replace(VARLEN, bias="key bias", dropout=True, band="causal"),
)
HOPPER = (
    replace(BITS, bias="broadcast bias"),
    replace(CAUSAL, dropout=True, bias="key bias", grouped=True),
    replace(SEGMENTS, bias="bias"),
    replace(CAUSAL, mask="hidden intervals"),
    replace(CAUSAL, deterministic=True),
    replace(VARLEN, bias="key bias"),
    PLAIN,
)


def units_of(kernel: str, sm: int, wanted: tuple[Specialization, ...]) -> Iterator[Unit]:
    """Yield units of the narrowest heads that a kernel takes, forward and backward."""
    for direction, rows in configurations.DIRECTIONS.items():
        row = next((row for row in reachable(rows, sm) if (row.kernel, row.itemsize) == (kernel, 2)), None)
        for each in wanted if row is not None else ():
            unit = Unit(direction, row, row.dim, each)
            refusals = getattr(unit.launcher, "refusals", lambda call: [])
            if not refusals(configurations.make_call(each, row.dim, row.dim_v)):
                yield unit


def masks() -> Iterator[Callable[[], object]]:
    """Yield what launches the kernels that make masks."""
    ids, queries = torch.zeros(2, 3, SEQLEN, dtype=torch.int32), torch.zeros(2, SEQLEN, dtype=torch.int32)
    for keep in (
        torch.ones(2, 3, SEQLEN, SEQLEN, dtype=torch.bool),
        torch.ones(2, 3, SEQLEN, SEQLEN + 8, dtype=torch.bool)[..., :-8],
    ):
        outputs = pack_mask_outputs(keep, 2, 3, SEQLEN, *FREE)
        yield partial(tile_mask.pack_mask, keep, queries, ids, SEQLEN, *FREE, *outputs)
    outputs = list_tiles_outputs(ids, 2, 3, SEQLEN, SEQLEN, *FREE)
    yield partial(tile_mask.list_tiles, queries, ids, SEQLEN, *FREE, *outputs)
    start, end = torch.zeros(2, 2, 3, SEQLEN, dtype=torch.int32)
    documents = torch.zeros(2, SEQLEN, dtype=torch.int64)
    yield partial(selection.lifetimes, torch.zeros(2, 3, SEQLEN), documents, 100, 0, 0, True, start, end)
    yield partial(pack_keys, start, end)


def pack_keys(start: torch.Tensor, end: torch.Tensor) -> None:
    """Launch what packed keys need."""
    cut = epochs.epochs(SEQLEN, SEQLEN, 100, 0, 512)
    slots = packs.plan_slots(start, end, cut, SEQLEN, -UNBOUNDED, 0, 0, 3, inverse=True)
    rows, narrow = torch.zeros(2, SEQLEN, 3, 64), torch.zeros(2, SEQLEN, 3, 40)
    packed = packs.gather_rows((rows, narrow), slots, 3, 0, 1)
    packs.sum_rows(packed, slots, (rows, narrow), 0, 1)
    bias = torch.zeros(1, 3, 1, SEQLEN)
    packs.sum_bias(packs.gather_bias(bias, slots, 3, 0, 3), slots, bias, 3, 0, 3)
    packs.poison_rows(rows, torch.zeros(2, 3, SEQLEN), slots)


BOUNDS: dict[str, dict[str, tuple[str, ...]]] = {
    "a position in a sequence, or a tile or step of it times the rows of one: less than 2^30 and one tile": {
        "hopper/backward/finish.py": ("gl.maximum(place.tile, 0) * TILE", "tile * TILE"),
        "hopper/backward/kernel.py": ("block.tile * T.BN", "m * (BM // 64)", "m * T.BM"),
        "hopper/backward/movers.py": ("block.tile * T.BN", "m * T.BM", "pieces.tile * T.BN"),
        "hopper/backward/rows.py": ("(block - bh * (rows // BLOCK)) * BLOCK",),
        "hopper/backward/walk.py": ("tile * BN",),
        "hopper/backward_256/keys.py": ("at * STEP", "at.tile * STEP", "block.tile * STEP"),
        "hopper/backward_256/launch.py": ("(block - index * (rows // BLOCK)) * BLOCK",),
        "hopper/backward_256/queries.py": (
            "(block.tile * 2 + C) * STEP",
            "(block.tile * 2 + c) * STEP",
            "at * STEP",
            "at.tile * 2 * STEP",
            "block.tile * 2",
            "full_step(t, view, n_partial, TEST) * STEP",
            "tile * 2",
            "tile * 2 * STEP",
        ),
        "hopper/dbias/launch.py": ("split * blocks_of_split", "tile * 2 * STEP"),
        "hopper/dbias/steps.py": ("at * STEP",),
        "hopper/forward/kernel.py": ("tile * T.BM",),
        "hopper/forward/step.py": ("key_tile(i, visible.walk, T) * T.BN", "tile * T.BN"),
        "hopper/forward/walk.py": ("j * T.BN", "work.tile * T.BM"),
        "hopper/views.py": ("at * STEP",),
        "interval_lists.py": ("tile % col_count * _TILE",),
        "epochs/lists.py": ("block[:, None] * TILE", "e * epoch_tiles"),
        "epochs/rows.py": ("(e + 1) * epoch", "block * KEYS", "e * epoch"),
        "epochs/slots.py": ("(epoch.number + 1) * epoch.length", "epoch.number * epoch.length"),
        "ampere/walks.py": ("(entry + beyond) * STEP",),
        "chosen/choosers.py": ("start * 32", "tile * QUERIES"),
        "chosen/forward.py": (
            "number * work.queries",
            "tl.cdiv(listed.count, work.entries) * work.parts",
            "tl.load(counts + index * 2 + 1) // work.entries * work.parts",
        ),
        "chosen/keys.py": ("number * work.block", "part * work.columns"),
        "chosen/queries.py": ("tl.cdiv(listed.count, work.entries) * work.parts",),
        "chosen/unions.py": ("number * block", "tile * QUERIES"),
        "chosen/work.py": ("number * work.block",),
        "decode/kernel.py": (
            "program % blocks * BLOCK_M",
            "split * share",
            "tl.cdiv(tl.cdiv(last, BLOCK_N) - first // BLOCK_N, splits) * BLOCK_N",
        ),
        "mass/selection.py": ("number[:, None] * gathered.block",),
        "ampere/dbias.py": ("program % key_blocks * N", "program // key_blocks % blocks * M"),
        "portable/dbias.py": ("program % key_blocks * BLOCK_N", "program // key_blocks % blocks * BLOCK_M"),
        "portable/places.py": (
            "split * share",
            "tl.where(block < blocks, blocks - 1 - block, block) * BLOCK",
            "(part.first + step + tl.where(step < part.left, 0, part.gap)) * STEP",
            "block * BLOCK",
        ),
        "portable/statistics.py": ("program // heads % blocks * ROWS",),
        "selection/alive.py": ("chunk * CHUNK",),
        "selection/documents.py": ("span * SPAN",),
        "selection/keys.py": ("tl.program_id(0) % chunks * CHUNK",),
        "masks/chosen.py": (
            "(share + 1) * TILES",
            "row_tile * _TILE",
            "share * TILES",
            "tile * _TILE",
            "tl.where(is_block, number, 0).to(tl.int32) * block",
        ),
        "masks/lists.py": (
            "(block + 1) * OWN * _TILE",
            "block * OWN",
            "block * OWN * _TILE",
            "tile % count * _TILE",
        ),
        "masks/pack.py": ("2 * block_row", "2 * columns.number", "columns.number * 2 * _TILE", "row * _TILE"),
        "masks/ranks.py": ("block * OWN",),
    },
    "entries of a list, as many as there is room for, or a tile that a list names: one of those that there are": {
        "hopper/backward/walk.py": (
            "n_partial *= TILE // T.BM",
            "n_full *= TILE // T.BM",
            "named_tile(gl.load(record + HEADER + (n_partial + t) // R), span.end) * R",
            "named_tile(gl.load(record + HEADER + t // R, mask=t < n_partial, other=0), span.end) * R",
        ),
        "hopper/backward_256/keys.py": ("ranked_tile(tile // 2, mask, kv_head * group, n_blocks // 2 - 1, TEST) * 2",),
        "hopper/views.py": (
            "n_partial *= 2",
            "n_full *= 2",
            "named_tile(gl.load(view.record + HEADER + (n_partial + t) // 2), view.end) * 2",
            "named_tile(gl.load(view.record + HEADER + t // 2, mask=t < n_partial, other=0), view.end) * 2",
        ),
        "hopper/forward/kernel.py": (
            "word_of_piece(parts, slots, 2) * PER_TILE",
            "word_of_piece(parts, slots, 3) * PER_TILE",
        ),
        "hopper/forward/walk.py": (
            "(n_partial + n_full) * PER_TILE",
            "named_tile(word, walk.last) * PER_TILE",
        ),
        "ampere/walks.py": ("tile * PER_TILE", "(tile * PER_TILE + entry % PER_TILE) * STEP"),
        "portable/places.py": (
            "(tile * per_tile + block % per_tile) * BLOCK",
            "tile * per_tile",
            "(tile * per_tile + entry % per_tile) * STEP",
            "n_partial *= per_tile",
            "tl.where(length >= TILE, n_full, 0) * per_tile",
        ),
    },
    "packed sequences: what a search passes is less than there are": {
        "portable/places.py": ("tl.maximum(tl.sum((known & (begins <= block)).to(tl.int32), 0) - 1, 0) * apart",),
    },
    "rows of a tile, of which the launcher refuses such that lie further apart than 2^31 / 256 elements": {
        "ampere/copies.py": ("AT_ONCE * rows.stride", "group * (AT_ONCE * rows.stride)", "row * rows.stride"),
    },
    "heads of the call, or of one of its batches": {
        "ampere/backward/kernel.py": ("kv_head * GROUP",),
        "chosen/forward.py": ("head_kv * work.group",),
        "chosen/keys.py": ("head_kv * work.group", "heads_kv * work.group"),
        "decode/kernel.py": ("kv_head * GROUP",),
        "mass/keys.py": ("kv_head * GROUP",),
        "mass/selection.py": ("unit * GROUP",),
        "portable/heads.py": ("place.head * GROUP",),
        "hopper/backward/finish.py": ("gl.maximum(place.batch, 0) * out.heads",),
        "hopper/backward/kernel.py": (
            "(place.batch * problem.kv_heads + place.head) * problem.group",
            "kv_heads * group",
            "place.batch * problem.kv_heads",
            "place.head * problem.group",
            "problem.kv_heads * problem.group",
        ),
        "hopper/backward/movers.py": (
            "(own.batch * problem.kv_heads + own.head) * group",
            "kv_head * group",
            "own.batch * problem.kv_heads",
            "place.batch * problem.kv_heads",
            "place.batch * problem.kv_heads * group",
        ),
        "hopper/backward/work.py": ("group * heads_per_group",),
        "hopper/backward_256/keys.py": (
            "batch * kv_heads * group",
            "block.kv_head * block.group",
            "kv_head * group",
            "kv_heads * group",
        ),
        "hopper/dbias/launch.py": ("written * batches", "head * bias_group"),
        "hopper/dbias/steps.py": ("batch * problem.rows.heads",),
        "hopper/forward/walk.py": ("batch * mask.bits_batch", "h // mask.lists.group * mask.bits_head"),
        "hopper/views.py": ("group * heads_per_group",),
        "epochs/rows.py": ("b * group_b", "group_b * group_h", "h * group_h"),
        "ampere/dbias.py": (
            "written * batches",
            "batches * bias_group",
            "program // key_blocks // blocks % dbias_heads * bias_group",
        ),
        "portable/dbias.py": (
            "written * batches",
            "batches * bias_group",
            "program // key_blocks // blocks % dbias_heads * bias_group",
        ),
    },
    "blocks of the call, which are programs of its grid": {
        "ampere/walks.py": (
            "abreast * blocks",
            "program // of_heads * abreast",
            "(first + within % heads) * blocks",
        ),
        "hopper/backward/kernel.py": ("n_blocks *= shares",),
        "hopper/backward/rows.py": ("block * 2",),
        "hopper/backward_256/launch.py": ("block * _COUNTS",),  # of blocks that are batch entries
        "hopper/backward/shares.py": ("tl.program_id(0) * ROWS",),
        "hopper/backward/work.py": (
            "batch * problem.shares",
            "first * width",
            "in_row * width",
            "n_blocks * heads_per_group",
            "row * in_row",
        ),
        "hopper/backward/walk.py": ("tiles * share", "tiles * (share + 1)"),
        "hopper/dbias/launch.py": ("n_tiles * splits",),
        "hopper/forward/walk.py": ("tiles * sizes.heads",),
        "hopper/views.py": ("n_blocks * heads_per_group",),
        "interval_lists.py": ("tl.program_id(0) * TILES",),
        "portable/again.py": ("tl.program_id(0) * count",),
        "ragged.py": ("tl.program_id(0) * OWN",),
        "masks/lists.py": ("program * TILES",),
    },
    "rows of statistics of the call: with query, grad_out, out and dq, 2^31 of them take 190 GB": {
        "hopper/backward/kernel.py": ("(place.batch * problem.kv_heads + place.head) * problem.group * problem.rows",),
        "hopper/backward/movers.py": ("(place.batch * problem.kv_heads * group + head) * problem.rows",),
        "hopper/backward_256/keys.py": (
            "batch * kv_heads * group * stat_rows",
            "block.kv_head * block.group * of_head",  # rows in 64
            "head * block.stat_rows",
        ),
    },
    "rows of statistics of the five-product backward, thrice: its sums of dq take 183 GB for 2^31 / 3 rows": {
        "hopper/backward/rows.py": ("2 * total_rows", "3 * total_rows"),
    },
    "float32 sums of dq in rows of 256: 2^31 rows take 2 TB": {
        "ampere/backward/finish.py": ("(place.q_begin // STEP + place.sequence) * STEP",),
        "hopper/backward/movers.py": (
            "((tile0 + m) * 2 + C) * PIECE_ROWS",
            "(head + t % width) * (problem.rows // T.BM)",
            "(tile0 + m) * 2",
        ),
    },
    "bytes or words of a row of bits, or of a tile's row: a few for each tile of a sequence": {
        "hopper/backward/kernel.py": ("keys * numbers.bits_row",),
        "masks/chosen.py": ("col_count * _WORDS", "row_count * _WORDS", "row_tile * _WORDS", "tile * _WORDS"),
        "masks/lists.py": ("2 * own", "2 * q_tiles", "2 * tile", "_HULL * own"),
        "masks/pack.py": ("16 * row_count", "32 * block_row", "4 * col_count", "8 * block_col"),
    },
    "slots of a cache of kept keys, at most 2^29 (`checks.kept.MOST_SLOTS`)": {
        "kept/kernel.py": ("2 * slots", "3 * slots"),
    },
    "slots of a cache, and new positions behind them, together at most 2^24 (`selection.launch.LONGEST_ROW`)": {
        "kept/chunk_kernels.py": (
            "(part - 1) * NEW",
            "(part - cached_parts) * BLOCK",
            "2 * slots",
            "3 * slots",
            "part * BLOCK",
            "part * NEW",
            "part * SLOTS",
            "rows * order_parts",  # programs of a launch, a few for each thousand of them
        ),
    },
    "slots of one head, less than 2^30 (`epochs.packing_for`)": {
        "epochs/slots.py": ("epochs * per_epoch",),
    },
    "a number that wraps on purpose, or of which only some bits are used": {
        "epochs/lists.py": ("(kinds == 2).to(tl.int32) << 16",),
        "epochs/slots.py": ("tile << 2",),
        "selection/alive.py": ("high - low << 12", "length * (2 * part + 1)", "salt * 1664525"),
        "masks/lists.py": ("(kinds == 2).to(tl.int32) << 16",),
    },
}

KNOWN = {f"{file}:{product}" for files in BOUNDS.values() for file, products in files.items() for product in products}
KERNEL_SETS = (("portable", 80, PORTABLE), ("ampere", 80, AMPERE), ("hopper", 90, HOPPER), ("hopper256", 90, HOPPER))
AT_EACH_CHANGE = 2  # units of each kernel for SM 9.0, which take some seconds each


def cases() -> Iterator[Any]:
    """Yield each architecture with what launches kernels for it."""
    for kernel, sm, wanted in KERNEL_SETS:
        for index, unit in enumerate(units_of(kernel, sm, wanted)):
            slow = [pytest.mark.slow] * (kernel != "portable" and unit.wanted not in wanted[:AT_EACH_CHANGE])
            name = f"{kernel} {unit.direction} {unit.line} {index}"
            yield pytest.param(sm, partial(launch, unit), id=name, marks=slow)
    for index, making in enumerate(masks()):
        yield pytest.param(90, making, id=f"masks {index}")
    for name, sm, launches in other_launches.cases():
        yield pytest.param(sm, launches, id=name)


def unbounded(sm: int, run: Callable[[], object]) -> tuple[set[str], set[str]]:
    """Return (products without a bound, all that int32 may not hold) of the kernels that are launched."""
    with intermediate_code(sm) as codes:
        run()
    assert codes
    found = {product for code in codes for product in large_products(code.text)}
    return found - KNOWN, found


@pytest.mark.parametrize(("sm", "run"), list(cases()))
def test_products_that_reach_an_address_fit_into_32_bits_or_have_64(sm: int, run: Callable[[], object]):
    unknown, _ = unbounded(sm, run)
    assert unknown == set(), "these need a bound in this file, or a factor of 64 bits"


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "sm"), [case[:2] for case in KERNEL_SETS])
def test_products_of_every_configuration_that_reach_an_address_fit(kernel: str, sm: int):
    for lines in configurations.units((sm,), (kernel,)).values():
        for unit in lines.values():
            unknown, _ = unbounded(sm, partial(launch, unit))
            assert unknown == set(), f"{unit.entry}, {unit.line}"


@pytest.mark.slow
def test_each_product_that_has_a_bound_exists():
    found = set()
    for case in cases():
        found |= unbounded(*case.values)[1]
    for kernel, sm, _ in KERNEL_SETS:
        for lines in configurations.units((sm,), (kernel,)).values():
            for unit in list(lines.values())[::2]:
                found |= unbounded(sm, partial(launch, unit))[1]
    assert KNOWN - found == set()


@triton.jit
def _fits(x, width, SIZE: tl.constexpr):
    tile = tl.program_id(0) % 64
    tl.store(x + tile.to(tl.int64) * width + tl.arange(0, SIZE) * 4, 1)


@triton.jit
def _overflows(x, width, SIZE: tl.constexpr):
    tile = tl.program_id(0) % 64
    at = x
    for _step in range(SIZE):
        at += tile * width
    tl.store(at, 1)


def test_a_product_of_32_bits_is_found():
    signature = {"x": "*fp32", "width": "i32", "SIZE": "constexpr"}
    found = [large_products(code_of(kernel, signature, {(2,): 64}, {}, 80).text) for kernel in (_fits, _overflows)]
    assert found[0] == set()
    assert found[1] == {"test_addresses.py:tile * width"}

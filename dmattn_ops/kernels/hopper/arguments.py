"""Arguments and refusals that the SM 9.0 launchers share: sizes, masks, score factors, strides of a bias, dropout.

Packed sequences have no batch: a record for each tile says which sequence it belongs to (`kernels/ragged.py`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn_ops.call import NO_MASK, TILE, UNBOUNDED, Call, Mask, Options, bias_kind, dropout_scale, hides_packed_keys
from dmattn_ops.choice import arch
from dmattn_ops.kernels.hopper import constants
from dmattn_ops.kernels.hopper.views import MaskTensors
from dmattn_ops.kernels.interval_lists import listed as listed
from dmattn_ops.kernels.interval_lists import too_long as too_long
from dmattn_ops.kernels.portable import arguments as portable
from dmattn_ops.launching.launch import computed, makes_zeros, workspace

LOG2E = constants.LOG2E.value
MAX_DIM = 256
PARTS = ((64, 0), (64, 16), (64, 32), (128, 0), (128, 16), (128, 32), (128, 64), (256, 0))
LEAST_HEADS = 4  # side by side: with fewer, what they save in L2 is less than the noise
CAUSAL_ROUNDS = 1.9  # blocks of a group for each SM: the short ones then fill the time in which the longest ones run
FEW_QUERIES = TILE // 2  # of a sequence: most of a block would have nothing to do
FEWEST_ON_AVERAGE = TILE // 4  # queries of a sequence: what is padded to whole tiles is less than five times that


class Sizes(NamedTuple):
    """The sizes of a call; those of packed sequences are of one batch, as long as all of them together."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int


def sizes_of(call: Call) -> Sizes:
    """Read the sizes of `[B, S, heads, D]`, or of packed `[total, heads, D]`."""
    *batch, seqlen_q, heads, _ = call.query.shape
    return Sizes(batch[0] if batch else 1, seqlen_q, call.key.shape[-3], heads, call.key.shape[-2])


def row_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, row and head of `[B, S, heads, D]`, or of packed `[total, heads, D]`."""
    return (0, *tensor.stride()[:2]) if tensor.dim() == 3 else tensor.stride()[:3]


def statistic_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, head and row of `[B, H, S]`, or of packed `[H, total]`."""
    return (0, *tensor.stride()) if tensor.dim() == 2 else tensor.stride()


def key_numbers_as_bias(call: Call) -> Call:
    """Return a call of packed sequences whose mask of keys is part of its bias; other calls as they are.

    Hidden rows may hold anything: what NaN a weight of 0 makes of them is noticed as under any other mask (`unseen.py`).
    """
    if not hides_packed_keys(call):
        return call
    kept = call.mask.k_segments
    return call._replace(bias=computed(_hidden_bias, kept, call.bias), mask=NO_MASK)


def _hidden_bias(kept: Tensor, bias: Tensor | None) -> Tensor:
    """Return a bias `[Hm, total_k]` that is -inf where `[1, Hm, total_k]` does not hold 0, and `bias` elsewhere, or 0."""
    hidden = kept[0] != 0
    if bias is None:
        return torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, -torch.inf)
    heads = max(hidden.shape[0], bias.shape[0])
    hidden, bias = (part.repeat_interleave(heads // part.shape[0], 0) for part in (hidden, bias))
    return bias.masked_fill(hidden, -torch.inf)


def mask_arguments(
    lists: Tensor | None, bits: Tensor | None, mask: Mask, heads: int, seqlen_q: int, placeholder: Tensor
) -> MaskTensors:
    """Return one side's mask as kernels take it.

    Tensors that a kind does not have are the placeholder, so that no kernel is compiled for their absence.
    """
    given = MaskTensors(*[placeholder] * 8, *[0] * 9, *[1] * 2)
    if lists is None:
        return given

    def strides(tensor: Tensor) -> list[int]:
        return [portable.broadcast_stride(tensor, dim) for dim in range(2)]

    list_b, list_h = strides(lists)
    given = given._replace(
        lists=lists, list_b=list_b, list_h=list_h, list_width=lists.shape[-1], mask_group=heads // lists.shape[1]
    )
    if bits is not None:
        words = bits.view(torch.int64)  # of 64 rows or columns each: what one step tests
        bits_b, bits_h = strides(words)
        return given._replace(bits=words, bits_b=bits_b, bits_h=bits_h, bits_row=words.shape[-1])
    numbers = mask.k_segments if mask.start is None else mask.start
    assert numbers is not None
    numbers_b, numbers_h = strides(numbers)
    given = given._replace(k_segments_b=numbers_b, k_segments_h=numbers_h, segment_group=heads // numbers.shape[1])
    if mask.start is not None:
        hidden = [placeholder if part is None else part for part in (mask.hidden_from, mask.hidden_to)]
        return given._replace(start=mask.start, end=mask.end, hidden_from=hidden[0], hidden_to=hidden[1])
    queries = computed(_zeros, numbers, (1, seqlen_q)) if mask.q_segments is None else mask.q_segments
    queries_b = portable.broadcast_stride(queries, 0)
    return given._replace(q_segments=queries, k_segments=numbers, q_segments_b=queries_b)


@makes_zeros
def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return like.new_zeros(shape)


def heads_that_balance(ranks: int, heads: int, device: torch.device, rounds: float = CAUSAL_ROUNDS) -> int:
    """Return how many heads a group has, so that SMs are busy to the end: `ranks` blocks each, in all `rounds` for each SM.

    Groups follow each other, and in each the longest blocks come first. Those of the last group start when little else is left,
    so that it has to have enough blocks. Simulated with causal blocks on 132 SMs, 1024 to 16384 positions and 8 to 256 heads,
    SMs idle 1% of the time on average and 4% at most; with groups of four 3%, and 18% with 48 heads of 1500.
    """
    least = max(LEAST_HEADS, math.ceil(rounds * arch.physical(device).num_sms / max(1, ranks)))
    fitting = (some for some in range(least, heads) if heads % some == 0 or heads % some >= least)
    return next(fitting, heads)


def heads_side_by_side(of_head: int, heads: int, device: torch.device) -> int:
    """Return how many heads work side by side where sequences differ in length: all, or as many as read what L2 holds.

    `of_head` is how many bytes the blocks of one head share. The more heads at once, the less is left to do when the longest
    blocks of the last ones begin; but with more than L2 holds, a group of as many as keep all SMs busy took 3% longer.
    """
    return even_groups(heads, max(LEAST_HEADS, arch.physical(device).l2_bytes // max(1, of_head)))


def even_groups(heads: int, at_once: int) -> int:
    """Return how many heads a group has, at most `at_once`, so that groups are about as large as each other."""
    return -(-heads // -(-heads // at_once))


def chunk_of_tiles(heads: int, rounds: float, device: torch.device) -> int:
    """Return how many tiles of packed sequences a chunk has (`kernels/ragged.py`): a power of two.

    `heads` go side by side, and their blocks of a chunk are at most `rounds` for each SM: what they read of sequences stays in L2,
    and one chunk follows another without a pause.
    """
    tiles = rounds * arch.physical(device).num_sms / heads
    return 1 << int(math.log2(max(1.0, tiles)))


def ragged_refusals(call: Call) -> list[str]:
    """Return why blocks of whole tiles do not serve a call of packed sequences; none for other calls."""
    varlen = call.varlen
    if varlen is None or call.options.batch_invariant:  # which may not depend on how long the others are
        return []
    sequences, total = varlen.cu_seqlens_q.shape[0] - 1, call.query.shape[0]
    if varlen.max_seqlen_q <= FEW_QUERIES and varlen.max_seqlen_k > 2 * TILE:
        return [f"sequences of at most {varlen.max_seqlen_q} queries leave most of each block of {TILE} without work"]
    if total < FEWEST_ON_AVERAGE * sequences:
        return [f"{sequences} sequences of {total} queries in all leave most of each block of {TILE} without work"]
    return []


def unused_refusals(call: Call) -> list[str]:
    """Return why a call with `seqlen_k_used` is refused: where unused keys hold NaN, all is computed again."""
    reason = "unused keys often hold NaN, and where these kernels meet one the call is computed twice"
    return [reason] if call.used is not None else []


def hides_keys(call: Call) -> bool:
    """Return whether the band may hide a key from every query, beside others that are seen (`unseen.py`)."""
    sizes = sizes_of(call)
    low, high = call.options[:2]
    if call.mask.kind != "none":
        return False  # the kernels for masks do not ask for it
    if call.varlen is not None:  # lengths lie on the device; the last query of a causal sequence sees all keys
        return low > -UNBOUNDED or high < 0 or (high < UNBOUNDED and call.varlen.top_left)
    return low > 0 or sizes.seqlen_q + high < sizes.seqlen_k


def hides_rows(call: Call) -> bool:
    """Return whether the band may hide a key from every query, or every key from a query, beside others that are seen."""
    sizes = sizes_of(call)
    low, high = call.options[:2]
    if call.mask.kind != "none":
        return False
    if call.varlen is not None:
        return low > -UNBOUNDED or high < UNBOUNDED
    return hides_keys(call) or high < 0 or sizes.seqlen_q + low > sizes.seqlen_k


def column_parts(dim: int, known: tuple[tuple[int, int], ...] = PARTS) -> tuple[int, int]:
    """Return the widths of one tile or two (else 0) that hold `dim` columns, as `columns.py` multiplies them."""
    return next(parts for parts in known if sum(parts) >= dim)


def score_factors(options: Options) -> tuple[float, float]:
    """Return (factor of products that makes scores in log2 units, 0); with a soft cap, (factor of products before
    `scores.tanh`, the cap in log2 units).
    """
    scale, cap = options.softmax_scale, options.softcap
    return (scale / cap, cap * LOG2E) if cap else (scale * LOG2E, 0.0)


class BiasPlaces(NamedTuple):
    """The strides of a bias, named as kernels name them, and how many query heads read one of its heads."""

    bias_b: int
    bias_h: int
    bias_q: int
    bias_group: int


def bias_places(bias: Tensor | None, heads: int) -> BiasPlaces:
    """Return the strides of a bias."""
    known = portable.bias_arguments(bias, heads)
    return BiasPlaces(*(known[name] for name in BiasPlaces._fields))


def room_for_key_sums(call: Call) -> Tensor | None:
    """Return room `[B, H, Sk]` for the sums of dS over the queries of each head, where the bias is one per key."""
    if bias_kind(call.bias) != "key":
        return None
    sizes = sizes_of(call)
    return workspace(call.query, sizes.batch, sizes.heads, sizes.seqlen_k)


class DropoutArguments(NamedTuple):
    """The arguments of dropout, named as kernels name them; seed is None without dropout."""

    seed: Tensor | None
    seed_b: int
    seed_h: int
    last_dropped: int
    rescale: float
    q_origin: int
    k_origin: int


def dropout_arguments(call: Call) -> DropoutArguments:
    """Return the seeds, their strides, and what follows in `hopper.dropout.Dropout`."""
    known = portable.dropout_arguments(call)
    return DropoutArguments(*(known[name] for name in DropoutArguments._fields))


def delta_factor(options: Options) -> float:
    """Return the factor of delta in the backward: the share of weights that dropout keeps, as gradients are rescaled at the end."""
    rescale = dropout_scale(options.dropout_p)
    return 1.0 / rescale if rescale else 0.0


def dropout_refusals(call: Call) -> list[str]:
    """Return every reason why dropout keeps the SM 9.0 kernels from a call."""
    options = call.options
    if options.dropout_p == 0.0:
        return []
    reasons = {
        "takes no dropout of positions that begin inside a block of 16": any(
            origin % 16 for origin in (options.q_origin, options.k_origin)
        ),
        "takes no dropout of variable lengths": call.varlen is not None,
    }
    return [reason for reason, holds in reasons.items() if holds]

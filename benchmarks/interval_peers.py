"""Peers under masks of intervals: flex_attention and FlashAttention 4 with lists of blocks and a predicate.

Both get lists from flex's compiled `create_block_mask`, which counts as work on the mask. Their inputs are those of this
library; a peer whose results differ from ours is no peer (`Unavailable`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import Tensor

from experiments import Row, missing
from interval_masks import Predicate
from peers import Run, Unavailable, compiled_flex, recorded_run

TOLERANCE = 2e-2  # relative L2, of bfloat16
LARGEST_LISTS = 8 << 30  # bytes of a BlockMask: an entry for each pair of blocks, of four kinds


class Attention(NamedTuple):
    """One call: leaves query `[B, S, H, D]`, key and value `[B, S, Hkv, D]`, and the gradient of out."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


class Intervals(NamedTuple):
    """start, end and, where there are any, the hidden ones: int32 `[B, Hm, S]` each, one head or one for each key head.

    The lists and the predicate of FlashAttention 4 serve one batch entry, those of flex_attention all.
    """

    start: Tensor
    end: Tensor
    hidden: tuple[Tensor, Tensor] | None = None

    def predicate(self, group: int) -> Predicate:
        """Return the same as a predicate, for `group` query heads a key head."""
        start, end, hidden = self
        group = group if start.shape[1] > 1 else 1 << 30  # all heads are head 0

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            head = h // group
            seen = (start[b, head, j] <= i) & (i < end[b, head, j])
            if hidden is not None:
                seen = seen & ~((hidden[0][b, head, j] <= i) & (i < hidden[1][b, head, j]))
            return seen

        return visible


def _block_mask(predicate: Predicate, query: Tensor, heads: int) -> Callable[[], Any]:
    """Return a function that makes the lists of blocks for one head or for all."""
    batch, seqlen = query.shape[:2]
    blocks = -(-seqlen // 128)
    needed = 4 * 4 * batch * heads * blocks * blocks
    if needed > LARGEST_LISTS:
        raise Unavailable(f"its lists of blocks would take {needed / 1e9:.0f} GB")
    make = compiled_flex()[1]
    sizes = (None if count == 1 else count for count in (batch, heads))
    return functools.partial(make, predicate, *sizes, seqlen, seqlen, device=query.device)


def flex(call: Attention, predicate: Predicate, mask_heads: int) -> Run:
    """Run flex_attention, compiled, with a BlockMask for one head or for all."""
    if call.query.device.type == "cpu":
        raise Unavailable("flex_attention has no backward on a CPU")
    prepare = _block_mask(predicate, call.query, mask_heads)
    inputs = [leaf.detach().transpose(1, 2).contiguous().requires_grad_() for leaf in call.leaves]
    grouped = call.query.shape[2] != call.key.shape[2]
    attend = functools.partial(compiled_flex()[0], *inputs, block_mask=prepare(), enable_gqa=grouped)
    return recorded_run(attend, inputs, call.grad_out.transpose(1, 2).contiguous(), prepare)


def _fa4_predicate(group: int, has_hidden: bool) -> Callable[..., Any]:
    """Return the predicate that FlashAttention 4 compiles; limits arrive as tensors `[Hm, S]`."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute import utils

    @cute.jit
    def plain(batch: Any, head: Any, m_idx: Any, n_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        row = head[0] // group
        start = utils.scalar_to_ssa(aux_tensors[0][row, n_idx[0]], cutlass.Int32)
        end = utils.scalar_to_ssa(aux_tensors[1][row, n_idx[0]], cutlass.Int32)
        return (start <= m_idx) & (m_idx < end)

    @cute.jit
    def hidden(batch: Any, head: Any, m_idx: Any, n_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        row = head[0] // group
        start = utils.scalar_to_ssa(aux_tensors[0][row, n_idx[0]], cutlass.Int32)
        end = utils.scalar_to_ssa(aux_tensors[1][row, n_idx[0]], cutlass.Int32)
        hidden_from = utils.scalar_to_ssa(aux_tensors[2][row, n_idx[0]], cutlass.Int32)
        hidden_to = utils.scalar_to_ssa(aux_tensors[3][row, n_idx[0]], cutlass.Int32)
        return (start <= m_idx) & (m_idx < end) & ((m_idx < hidden_from) | (hidden_to <= m_idx))

    return hidden if has_hidden else plain


def fa4(call: Attention, intervals: Intervals, predicate: Predicate) -> Run:
    """Run FlashAttention 4 with lists of blocks and its own predicate over the intervals."""
    if call.query.device.type == "cpu":
        raise Unavailable("FlashAttention 4 needs CUDA")
    try:
        from flash_attn.cute import flash_attn_func
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    except ImportError as error:
        raise Unavailable(f"flash_attn.cute: {error}") from error
    if call.query.shape[0] > 1:
        raise Unavailable("its predicate serves one batch entry here")
    mask_heads = intervals.start.shape[1]
    heads, kv_heads = call.query.shape[2], call.key.shape[2]
    group = heads // kv_heads if mask_heads > 1 else heads
    make = _block_mask(predicate, call.query, 1 if mask_heads == 1 else heads)
    kernel_predicate = _fa4_predicate(group, intervals.hidden is not None)
    limits = [part[0].contiguous() for part in (intervals.start, intervals.end, *(intervals.hidden or ()))]

    def prepare() -> Any:
        made = make()
        rows = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
        columns = (made.q_num_blocks, made.q_indices, made.full_q_num_blocks, made.full_q_indices)
        return [BlockSparseTensorsTorch(*lists, block_size=(128, 128)) for lists in (rows, columns)]

    rows, columns = prepare()
    attend = functools.partial(
        flash_attn_func,
        *call.leaves,
        mask_mod=kernel_predicate,
        aux_tensors=limits,
        block_sparse_tensors=rows,
        block_sparse_tensors_bwd=columns,
    )
    return recorded_run(attend, list(call.leaves), call.grad_out, prepare)


def fa4_dense(call: Attention) -> Run:
    """Run FlashAttention 4 without a mask, causal."""
    if call.query.device.type == "cpu":
        raise Unavailable("FlashAttention 4 needs CUDA")
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        raise Unavailable(f"flash_attn.cute: {error}") from error
    return recorded_run(functools.partial(flash_attn_func, *call.leaves, causal=True), list(call.leaves), call.grad_out)


Maker = tuple[Callable[[], Run], bool]  # sets a peer up; whether its tensors have heads first


def set_up(makers: dict[str, Maker], own: Run, same_mask: Collection[str]) -> tuple[dict[str, Run], list[Row]]:
    """Set up peers; return them, and rows for those that are missing. Those with the same mask must agree with ours."""
    found: dict[str, Run] = {}
    absent: list[Row] = []
    for name, (make, heads_first) in makers.items():
        try:
            run = make()
            if name in same_mask:
                require_same(run, own, heads_first)
            found[name] = run
        except Exception as error:  # a peer may lack a feature, a package, memory or time: it is reported, and left out
            absent.append(missing(name, error))
    return found, absent


def parts_of(runs: dict[str, Run]) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return what is timed of each implementation, by its name and the name of the part."""
    parts = {
        (name, part): getattr(run, part) for name, run in runs.items() for part in ("prepare", "forward", "backward")
    }
    return {key: function for key, function in parts.items() if function is not None}


def require_same(run: Run, ours: Run, heads_first: bool) -> None:
    """Raise `Unavailable` where out or a gradient differs from ours."""
    assert run.backward is not None and ours.backward is not None
    for name, theirs, own in zip(("dq", "dk", "dv"), run.backward(), ours.backward(), strict=True):
        _same(name, theirs.transpose(1, 2) if heads_first else theirs, own)
    theirs, own = (result[0] if isinstance(result, tuple) else result for result in (run.forward(), ours.forward()))
    _same("out", theirs.transpose(1, 2) if heads_first else theirs, own)


def _same(name: str, theirs: Tensor, own: Tensor) -> None:
    difference, size = (theirs - own).norm().item(), own.norm().item()
    if not difference <= TOLERANCE * size:
        raise Unavailable(f"its {name} differs from ours by {difference / max(size, 1e-30):.2g} (relative L2)")

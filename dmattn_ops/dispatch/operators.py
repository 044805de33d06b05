"""The operators on real tensors: read, refuse and allocate as the fakes do, then launch. The same for CPU and CUDA.

Every operator here takes the arguments of the schema of its name (`schemas.SCHEMAS`); defaults at the end may be left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmattn_ops import environment, meta
from dmattn_ops.call import TILE, Call, Gradients, Mask, Result, Saved
from dmattn_ops.checks import chosen, values
from dmattn_ops.dispatch import run, used
from dmattn_ops.launching import plans
from dmattn_ops.launching.recording import computed, one_call
from dmattn_ops.masks import layout
from dmattn_ops.masks.chunks import pack_in_chunks
from dmattn_ops.meta import fakes
from dmattn_ops.ops import schemas

# Tensors of a mask from there on are intervals, which kernels read by their strides.
_FIRST_INTERVAL = Mask._fields.index("start")


def forward(*arguments: Any, name: str = "forward") -> tuple[Tensor, ...]:
    """Compute out, lse, lse_tail and row_max of a dense call."""
    call, read = fakes.dense_call(name, arguments)
    return _forward(call, read.needs_max)


def backward(*arguments: Any, name: str = "backward") -> tuple[Tensor, ...]:
    """Compute dq, dk, dv, dbias and dsink of a dense call."""
    call, read = fakes.dense_call(name, arguments)
    return _backward(call, read)


def qkvpacked_forward(*arguments: Any, name: str = "qkvpacked_forward") -> tuple[Tensor, ...]:
    """Compute out, lse, lse_tail and row_max for qkv `[B, S, 3, H, D]`."""
    call, read = fakes.dense_call(name, arguments)
    return _forward(call, read.needs_max)


def qkvpacked_backward(*arguments: Any, name: str = "qkvpacked_backward") -> tuple[Tensor, ...]:
    """Compute dqkv, in one buffer, dbias and dsink."""
    call, read = fakes.dense_call(name, arguments)
    outputs = meta.qkvpacked_backward_outputs(read.qkv, *_asked(call, read))
    _launch_backward(call, read, (*outputs[0].unbind(2), *outputs[1:]))
    return outputs


def varlen_forward(*arguments: Any) -> tuple[Tensor, ...]:
    """Compute out, lse, lse_tail and row_max of packed sequences."""
    call, read = _varlen_call("varlen_forward", arguments)
    return _forward(call, read.needs_max)


def varlen_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Compute dq, dk, dv, dbias and dsink of packed sequences."""
    call, read = _varlen_call("varlen_backward", arguments)
    return _backward(call, read)


def pack_mask(*arguments: Any) -> tuple[Tensor, ...]:
    """Compute row_tiles, col_tiles, row_bits and col_bits of a mask `[Bm, Hm, Sq or 1, Sk]` and segments."""
    outputs = fakes.pack_mask(*arguments)
    mask, q_segments, k_segments, *numbers = schemas.SIGNATURES["pack_mask"].fill(arguments)
    q_segments, k_segments = as_contiguous(q_segments), as_contiguous(k_segments)
    launch = run.kernels_of_masks(mask.device).pack_mask
    launch_on(mask, launch, mask, q_segments, k_segments, *numbers, *outputs)
    return outputs


def list_tiles(*arguments: Any) -> tuple[Tensor, ...]:
    """Compute row_tiles and col_tiles of segments `[B|1, Sq]` and `[B|1, Hm, Sk]`."""
    outputs = fakes.list_tiles(*arguments)
    q_segments, k_segments, *numbers = schemas.SIGNATURES["list_tiles"].fill(arguments)
    launch = run.kernels_of_masks(k_segments.device).list_tiles
    launch_on(k_segments, launch, as_contiguous(q_segments), as_contiguous(k_segments), *numbers, *outputs)
    return outputs


def key_lifetimes(*arguments: Any) -> tuple[Tensor, ...]:
    """Compute start and end of the queries that see each key, from scores `[B|1, Hm, S]`."""
    outputs = fakes.key_lifetimes(*arguments)
    scores, documents, *numbers = schemas.SIGNATURES["key_lifetimes"].fill(arguments)
    if documents is not None and reads_values(documents):
        values.contiguous_runs("documents", documents)
    if scores.numel():
        launch = run.kernels_of_lifetimes(scores.device).lifetimes
        launch_on(scores, launch, as_rows(scores), as_contiguous(documents), *numbers, *outputs)
    return outputs


def pack_intervals(*arguments: Any) -> tuple[Tensor, ...]:
    """Compute row_tiles, col_tiles, row_bits and col_bits of intervals `[B|1, Hm, Sk]` beside a mask and segments, in chunks."""
    like, *_ = fakes.pack_intervals(*arguments)
    read = schemas.SIGNATURES["pack_intervals"].read(arguments)
    batch, heads, seqlen_k = like.shape[0], like.shape[1], read.end.shape[-1]
    shown = Mask(start=read.start, end=read.end, hidden_from=read.hidden_from, hidden_to=read.hidden_to)

    def of_heads(part: Tensor) -> Tensor:  # one with heads of keys says the same to all of their queries
        own = part.shape[1]
        return part if own in (1, heads) else part.repeat_interleave(heads // own, dim=1)

    def visible(start: int, stop: int) -> Tensor:
        keep = of_heads(layout.intervals_mask(shown, stop, start))
        if read.mask is not None:
            rows = read.mask if read.mask.shape[2] == 1 else read.mask[:, :, start:stop]
            keep = keep & of_heads(rows != 0)
        return keep.expand(keep.shape[0], keep.shape[1], stop - start, seqlen_k)

    segments = read.q_segments, read.k_segments if read.k_segments is None else of_heads(read.k_segments)
    limits = read.band_lo, read.band_hi
    return pack_in_chunks(visible, segments, (batch * heads, read.seqlen_q, seqlen_k), limits)


def rank_ids(*arguments: Any) -> Tensor:
    """Number the distinct ids of each row of `[B, S]` in ascending order."""
    fakes.rank_ids(*arguments)
    return layout.rank_ids(*arguments)


def spread_lists(*arguments: Any) -> Tensor:
    """Compute which of `columns` lists `[..., slots]` name in their first `counts [...]` slots."""
    fakes.spread_lists(*arguments)
    return layout.spread_lists(*arguments)


def reads_values(tensor: Tensor) -> bool:
    """Return whether a call on the tensor's device refuses what tensors hold: always on a CPU, on request on a GPU."""
    return not tensor.is_cuda or environment.checks()


def check_values(call: Call) -> None:
    """Refuse lists that name tiles which do not exist, more keys than there are, and a promise `at_most` that a query breaks."""
    mask, options = call.mask, call.options
    if not reads_values(call.query):
        return
    if call.chosen is not None:
        chosen.in_range(call.chosen.indices, chosen.block_count(call.key.shape[1], call.chosen.block))
        return
    if call.used is not None:
        values.used_keys(call.used.lengths, call.key.shape[1])
    if call.query.numel() == 0 or call.key.numel() == 0:
        return
    if (
        call.query.is_cuda and mask.row_tiles is not None and mask.col_tiles is not None
    ):  # the CPU kernels check their own
        values.lists("row_tiles", mask.row_tiles, meta.ceil_div(call.key.shape[1], TILE))
        values.lists("col_tiles", mask.col_tiles, meta.ceil_div(call.query.shape[1], TILE))
    if mask.at_most is None or mask.kind == "none":
        return
    seqlen_q, seqlen_k = call.query.shape[1], call.key.shape[1]
    if mask.kind == "intervals":
        seen = layout.keys_seen(mask, options.band_lo, options.band_hi, seqlen_q)
    else:
        seen = layout.dense(mask, options.band_lo, options.band_hi, seqlen_q, seqlen_k).sum(-1)
    values.promise(mask.at_most, seen)


def _forward(call: Call, needs_max: bool) -> tuple[Tensor, ...]:
    check_values(call)
    outputs = meta.forward_outputs(call.query, call.value, needs_max)
    out, lse, lse_tail, row_max = outputs
    result = Result(out, lse, lse_tail, row_max if needs_max else None)
    launch_on(call.query, lambda: run.forward(for_kernels(call), result))
    return outputs


def _backward(call: Call, read: Any) -> tuple[Tensor, ...]:
    outputs = meta.backward_outputs(call.query, call.key, call.value, *_asked(call, read))
    _launch_backward(call, read, outputs)
    return outputs


def _launch_backward(call: Call, read: Any, outputs: tuple[Tensor, ...]) -> None:
    """Launch a backward; `outputs` are dq, dk, dv, dbias and dsink, the last two empty where they are not asked for."""
    if call.query.is_cuda:  # on a CPU the forward did
        check_values(call)
    dq, dk, dv, dbias, dsink = outputs
    of_bias, of_sink = _asked(call, read)
    saved = Saved(as_rows(read.out), as_rows(read.lse), as_rows(read.lse_tail))
    grad_lse = None if read.grad_lse is None else as_rows(read.grad_lse)
    grads = Gradients(
        as_rows(read.grad_out), grad_lse, dq, dk, dv,
        None if of_bias is None else dbias, None if of_sink is None else dsink,
    )  # fmt: skip
    launch_on(call.query, lambda: run.backward(for_kernels(call, "backward"), saved, grads))


def _asked(call: Call, read: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the bias and the sink whose gradients are asked for."""
    return call.bias if read.needs_dbias else None, call.sink if read.needs_dsink else None


def for_kernels(call: Call, direction: str = "forward") -> Call:
    """Return a call whose tensors kernels can walk: contiguous last dimensions, and lists, bits and segments without strides.

    How many keys are used is part of its mask, and so are chosen blocks that the kernels for them do not take.
    """
    query, key, value = as_rows(call.query), as_rows(call.key), as_rows(call.value)
    bias = call.bias if call.bias is None else as_rows(call.bias)
    tensors = call.mask[:-1]
    of_tiles = [as_contiguous(part) for part in tensors[:_FIRST_INTERVAL]]
    intervals = [part if part is None else as_rows(part) for part in tensors[_FIRST_INTERVAL:]]
    mask = Mask._make([*of_tiles, *intervals, call.mask.at_most])
    sink, seed = as_contiguous(call.sink), as_contiguous(call.seed)
    call = call._replace(query=query, key=key, value=value, bias=bias, mask=mask, sink=sink, seed=seed)
    return used.in_mask(call) if call.chosen is None else run.with_lists_or_bits(call, direction)


def launch_on(on: Tensor, launch: Callable[..., None], *arguments: Any) -> None:
    """Launch the kernels of one call with the device of `on` as the current one: Triton launches on whichever that is."""
    with one_call():
        if on.is_cuda and on.get_device() != torch.cuda.current_device():
            with torch.cuda.device(on.device):
                launch(*arguments)
        else:
            launch(*arguments)


def as_rows(tensor: Tensor) -> Tensor:
    """Return the tensor with a contiguous last dimension, which kernels ask for: itself, or a copy."""
    return tensor if tensor.stride(-1) == 1 else computed(Tensor.contiguous, tensor)


def as_contiguous(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor of lists, bits, segments or offsets as kernels walk it: without strides of its own."""
    return tensor if tensor is None or tensor.is_contiguous() else computed(Tensor.contiguous, tensor)


def _varlen_call(name: str, arguments: tuple[Any, ...]) -> tuple[Call, Any]:
    """Read a packed call; its mask of keys becomes segments `[1, Hm, total_k]`: 0 keep, -1 drop."""
    call, read = fakes.varlen_call(name, arguments)
    assert call.varlen is not None
    if reads_values(call.query):
        values.offsets(call.query, call.key, call.varlen)
    offsets = call.varlen.cu_seqlens_q.contiguous(), call.varlen.cu_seqlens_k.contiguous()
    varlen = call.varlen._replace(cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])
    mask = call.mask
    if read.mask is not None:
        mask = Mask(k_segments=(read.mask.contiguous() != 0).to(torch.int32).sub_(1).unsqueeze(0))
    return call._replace(varlen=varlen, mask=mask), read


def below_autograd(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator that refuses tensors without memory, and of which autograd sees nothing.

    So it may be called directly, with inputs that require gradients.

    A plan that repeats it needs no such care, and entering takes time.
    """

    @functools.wraps(operator)
    def below(*arguments: Any) -> Any:
        values.memory(arguments)
        with schemas.below_autograd():
            return operator(*arguments)

    return below


def unplanned(operator: Callable[..., Any]) -> schemas.Planned:
    def call(*arguments: Any) -> tuple[Any, None]:
        plans.refuse_export(operator.__name__, arguments[0])
        return operator(*arguments), None

    return call


functions = schemas.with_overloads(
    forward, backward, qkvpacked_forward, qkvpacked_backward, varlen_forward, varlen_backward, pack_mask, list_tiles,
    key_lifetimes,
)  # fmt: skip
for _name, _operator in functions.items():
    _below = below_autograd(_operator)
    schemas.implement(_name, plans.planned(_below, schemas.SIGNATURES[_name], _name))
for _made_of in (pack_intervals, rank_ids, spread_lists):  # torch's operations, of which there is nothing to plan
    schemas.implement(_made_of.__name__, unplanned(below_autograd(_made_of)))

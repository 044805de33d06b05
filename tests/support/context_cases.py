"""Problems for context parallelism: the same call on one process and on ranks that share the sequence, and their difference.

`compare` runs on every rank: all draw the same problem, compute it as one process does, and compare their part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ranks
import torch
import torch.distributed as dist
from torch import Tensor

from dmattn_ops import dynamic_mask, flash_dmattn_func, prepare_mask
from dmattn_ops.distributed import context_parallel, context_parallel_attention, prepare_context_mask, shard_sequence
from dmattn_ops.trees import pack_prefix_tree, tree_mask

# Of the largest error, over the largest element. In bfloat16 a rank rounds gradients of its part before they are added up.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    """A call: what it asks for by name, and sizes for each rank's part."""

    kind: str = "none"
    method: str = "all_gather"
    layout: Any = "head_tail"
    bias: str = "none"
    batch: int = 1
    heads: int = 4
    heads_kv: int = 2
    length: int = 96  # of a rank's queries
    length_k: int = 0  # of a rank's keys; 0: as many
    dim: int = 16
    dim_v: int = 16
    dtype: torch.dtype = torch.float32
    prepared: bool = False
    from_host: bool = False  # prepared for the device of the call, from tensors on the CPU
    # Conditions are asked of a prepared mask and of the call; "once", or windows "partly", of the mask; "late" of the call.
    asked: str = "twice"
    compiled: str = ""  # the backend of torch.compile
    keywords: tuple[tuple[str, Any], ...] = ()
    sink: bool = False
    large: float = 0.0  # added to the scores of some rows
    seed: int = 0


METHODS = ("all_gather", "ulysses", "ring")
CAUSAL = ("is_causal", True)
WINDOW = ("window_size", (40, 3))
SLIDING = ("window_size", (33, None))
KINDS = {
    "nothing": Case(),
    "causal": Case(keywords=(CAUSAL,)),
    "window": Case(keywords=(WINDOW,)),
    "sliding": Case(keywords=(CAUSAL, SLIDING), bias="key1"),
    "padding": Case("padding", batch=2, keywords=(CAUSAL,)),
    "mask of keys, of each key head": Case("keys/k", batch=2, bias="bkeyq"),
    "dense": Case("dense", keywords=(CAUSAL,), bias="fullk"),
    "dense, of each key head": Case("dense/k", bias="full1"),
    "dense, of each head": Case("dense/q", batch=2, keywords=(SLIDING,), bias="bfullq"),
    "dynamic": Case("dynamic/k", batch=2, bias="keyk"),
    "intervals": Case("intervals/q", keywords=(WINDOW,)),
    "tiles": Case("tiles/k", keywords=(CAUSAL,)),
    "trees": Case("trees", bias="keyk"),
    "documents": Case("documents", batch=2, keywords=(CAUSAL,)),
    "documents of queries and of keys": Case("two_kinds", keywords=(CAUSAL,)),
    "documents and padding": Case("padded_documents", bias="keyq"),
    "packed sequences": Case("cu_seqlens", keywords=(CAUSAL, SLIDING)),
}


class Problem(NamedTuple):
    """Whole tensors, and what the call on one process and those on ranks take."""

    inputs: list[Tensor]  # query, key, value, and bias and sink where there are any
    grad: Tensor
    mask: Any  # of the call on one process
    part: Any  # of the calls on ranks
    more: dict[str, Any]  # arguments of the calls on ranks that only they have
    keywords: dict[str, Any]


def build(case: Case, world: int) -> Problem:
    """Draw a problem; the same on every rank."""
    torch.manual_seed(case.seed + 17)
    device, dtype = ranks.device(), case.dtype
    rows, columns = case.length * world, (case.length_k or case.length) * world

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device, dtype)

    query, grad = (draw(case.batch, rows, case.heads, size) for size in (case.dim, case.dim_v))
    key, value = (draw(case.batch, columns, case.heads_kv, size) for size in (case.dim, case.dim_v))
    if case.large:
        query[:, ::3] *= case.large
    mask, part, more, keywords = conditions(case, rows, columns, device)
    inputs = [query, key, value]
    if case.bias != "none":
        heads = {"1": 1, "k": case.heads_kv, "q": case.heads}[case.bias[-1]]
        inputs.append(draw(case.batch if "b" in case.bias else 1, heads, rows if "full" in case.bias else 1, columns))
    if case.sink:
        inputs.append(draw(case.heads))
    return Problem(inputs, grad, mask, part, more, keywords)


def conditions(case: Case, rows: int, columns: int, device: torch.device) -> tuple[Any, Any, dict, dict]:
    """Return the mask for one process, that for ranks, and arguments for ranks and for both."""
    keywords = dict(case.keywords)
    name, _, heads_name = case.kind.partition("/")
    heads = {"": 1, "1": 1, "k": case.heads_kv, "q": case.heads}[heads_name]
    cut = {"group": None, "layout": case.layout}
    causal = {key: keywords[key] for key in ("is_causal", "causal_from", "window_size") if key in keywords}
    if name == "none":
        return None, None, {}, keywords
    if name == "padding":
        keep = torch.rand(case.batch, columns, device=device) > 0.3
        return keep[:, None, None], shard_sequence(keep, **cut), {}, keywords
    if name == "keys":
        keep = torch.rand(case.batch, heads, 1, columns, device=device) > 0.3
        return keep, shard_sequence(keep, dim=3, **cut), {}, keywords
    if name == "dense":
        keep = torch.rand(1, heads, rows, columns, device=device) > 0.5
        keep[:, :, rows // 3 : rows // 3 + 5] = False  # rows that see nothing
        return keep, shard_sequence(keep, dim=2, **cut), {}, keywords
    if name == "dynamic":
        mask = dynamic_mask(torch.randn(case.batch, heads, columns, device=device), 24, keep_last=3)
        return mask, mask, {}, keywords
    if name == "trees":
        prompt, tokens = list(range(columns // 2)), torch.randint(3, (5, columns // 10))
        ends = pack_prefix_tree([prompt + answer for answer in tokens.tolist()], pad_to=columns).ends
        mask = tree_mask(ends[None].to(device))
        return mask, mask, {}, keywords
    if name == "intervals":
        start = torch.randint(rows, (1, heads, columns), dtype=torch.int32, device=device)
        end = start + torch.randint(rows, (1, heads, columns), dtype=torch.int32, device=device)
        mask = prepare_mask(intervals=(start, end), seqlen_q=rows, **causal)
        return mask, mask, {}, keywords
    if name == "tiles":
        mask = prepare_mask(torch.rand(1, heads, rows, columns, device=device) > 0.5, **causal)
        return mask, mask, {}, {}
    ids = torch.bucketize(
        torch.arange(columns, device=device),
        torch.tensor(sorted({columns // 7, columns // 3, max(0, columns - 9)}), device=device),
        right=True,
    )
    if name == "documents":  # of other lengths in each batch entry
        shifts = [min(entry * 5, columns) for entry in range(case.batch)]
        ids = torch.stack([torch.cat((ids[shift:], ids[-1:].repeat(shift))) for shift in shifts])
        mask = prepare_mask(documents=ids, **causal)
        return mask, None, {"documents": shard_sequence(ids, **cut)}, keywords
    if name == "two_kinds":  # of queries, and of keys
        of_queries = torch.arange(rows, device=device) * 4 // rows
        pair = tuple(each.to(torch.int16).unsqueeze(0) for each in (of_queries, ids // 2 * 2))
        own = tuple(shard_sequence(each, **cut) for each in pair)
        return prepare_mask(documents=pair, **causal), None, {"documents": own}, keywords
    if name == "padded_documents":
        ids, keep = ids.unsqueeze(0), torch.rand(case.batch, columns, device=device) > 0.2
        mask = prepare_mask(keep, documents=ids, **causal)
        return mask, shard_sequence(keep, **cut), {"documents": shard_sequence(ids, **cut)}, keywords
    assert name == "cu_seqlens", name
    offsets = torch.tensor(
        [0, *sorted({columns // 7, columns // 3, max(0, columns - 9)}), columns], dtype=torch.int32, device=device
    )
    return prepare_mask(documents=ids.unsqueeze(0), **causal), None, {"cu_seqlens": offsets}, keywords


def parts(problem: Problem, case: Case) -> list[Tensor]:
    """Return this rank's part of each input."""
    found = []
    for number, tensor in enumerate(problem.inputs):
        if number < 3:
            found.append(shard_sequence(tensor, None, dim=1, layout=case.layout))
        elif tensor.dim() == 1:
            found.append(tensor.clone())
        else:
            dim = 2 if "full" in case.bias else 3
            found.append(shard_sequence(tensor, None, dim=dim, layout=case.layout))
    return [tensor.detach().clone().requires_grad_() for tensor in found]


def split(inputs: list[Tensor], case: Case) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """Return query, key and value; the bias; the sink."""
    more = inputs[3:]
    bias = more.pop(0) if case.bias != "none" else None
    return inputs[:3], bias, more.pop(0) if case.sink else None


def gradients(outputs: tuple[Tensor, ...], grad: Tensor, grad_lse: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the gradients of the inputs, through out and lse."""
    out, lse = outputs[0], outputs[1]
    lse = torch.where(lse == -torch.inf, 0.0, lse)
    return list(torch.autograd.grad((out, lse), inputs, (grad, grad_lse)))


def one_process(problem: Problem, case: Case) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return out, lse and row_max, and the gradients, of the whole problem."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in problem.inputs]
    qkv, bias, sink = split(inputs, case)
    torch.manual_seed(5)
    outputs = flash_dmattn_func(
        *qkv, problem.mask, bias, sink=sink, return_lse=True, return_max=True, **problem.keywords
    )
    return outputs, gradients(outputs, problem.grad, problem.grad.sum(-1).transpose(1, 2).to(outputs[1].dtype), inputs)


def on_ranks(problem: Problem, case: Case) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return the same of this rank's part."""
    own = parts(problem, case)
    qkv, bias, sink = split(own, case)
    cut = {"group": None, "layout": case.layout, "method": case.method}
    more, mask, keywords = dict(problem.more), problem.part, dict(problem.keywords)
    if case.prepared:
        folded = {
            name: problem.keywords[name]
            for name in ("is_causal", "window_size", "causal_from")
            if name in problem.keywords
        }
        if case.asked == "once":
            keywords = {name: value for name, value in keywords.items() if name not in folded}
        elif case.asked == "partly":
            keywords.pop("window_size")
        elif case.asked == "late":
            folded = {}
        told = case.kind.partition("/")[0] not in ("padding", "keys", "cu_seqlens")  # by the mask or documents
        lengths = {} if told else {"seqlen_q": case.length}
        if case.from_host:
            mask = mask if mask is None else mask.cpu()
            more = {name: ids.cpu() for name, ids in more.items()}
            lengths["device"] = ranks.device()
        mask = prepare_context_mask(mask, **cut, **more, **folded, **lengths, read_documents=case.seed % 2 == 0)
        more = {}
    attend = context_parallel_attention
    if case.compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, fullgraph=True, dynamic=False, backend=case.compiled)
    torch.manual_seed(5 + dist.get_rank())  # the first rank's numbers count
    outputs = attend(*qkv, mask, bias, sink=sink, return_lse=True, return_max=True, **cut, **more, **keywords)
    grad = shard_sequence(problem.grad, None, layout=case.layout)
    return outputs, gradients(outputs, grad, grad.sum(-1).transpose(1, 2).to(outputs[1].dtype), own)


def compare(case: Case) -> dict[str, float]:
    """Return the error of everything that the call gives, relative to the largest element; runs on every rank."""
    problem = build(case, dist.get_world_size())
    expected, expected_grads = one_process(problem, case)
    found, found_grads = on_ranks(problem, case)
    errors = {}
    for name, one, other in zip(("out", "lse", "row_max"), expected, found, strict=True):
        dim = 1 if name == "out" else 2
        errors[name] = error(other, shard_sequence(one, None, dim=dim, layout=case.layout))
    names = ["dq", "dk", "dv", *(["dbias"] if case.bias != "none" else []), *(["dsink"] if case.sink else [])]
    for name, one, other in zip(names, expected_grads, found_grads, strict=True):
        if name == "dsink":
            other = ranks.summed(other)
        else:
            dim = 1 if name != "dbias" else 2 if "full" in case.bias else 3
            one = shard_sequence(one, None, dim=dim, layout=case.layout)
        errors[name] = error(other, one)
    return errors


def compare_all(cases: list[Case]) -> dict[str, str]:
    """Return what goes wrong with each of these cases where something does; runs on every rank."""
    wrong = {}
    for case in cases:
        try:
            errors = compare(case)
        except Exception as problem:
            wrong[str(case)] = f"{type(problem).__name__}: {problem}"
            continue
        if max(errors.values()) > TOLERANCE[case.dtype]:
            wrong[str(case)] = str(errors)
    return wrong


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest element; infinite where shapes, dtypes or places of -inf and NaN differ."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    fine = torch.isfinite(expected)
    if not torch.equal(fine, torch.isfinite(found)) or not torch.equal(found[~fine], expected[~fine]):
        return float("inf")
    if not fine.any():
        return 0.0
    found, expected = found[fine].double(), expected[fine].double()
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def assert_equal(errors_of_ranks: list[dict[str, float]], dtype: torch.dtype = torch.float32) -> None:
    """Fail where an error is above the tolerance."""
    for rank, errors in enumerate(errors_of_ranks):
        assert max(errors.values()) <= TOLERANCE[dtype], (rank, errors)


def compare_in_groups_of_heads(case: Case) -> dict[str, float]:
    """Compare where key heads travel in groups, as those of long sequences do; runs on every rank."""
    limits = context_parallel.PIPELINED_BYTES, context_parallel.GROUPED_HEADS
    context_parallel.PIPELINED_BYTES, context_parallel.GROUPED_HEADS = 0, 1
    try:
        return compare(case)
    finally:
        context_parallel.PIPELINED_BYTES, context_parallel.GROUPED_HEADS = limits


def repeat(case: Case, times: int) -> bool:
    """Return whether repeated calls give the same bits, gradients included; runs on every rank."""
    problem = build(case, dist.get_world_size())
    found = [on_ranks(problem, case) for _ in range(times)]
    first = [*found[0][0], *found[0][1]]
    return all(
        torch.equal(one, other) for each in found[1:] for one, other in zip(first, [*each[0], *each[1]], strict=True)
    )

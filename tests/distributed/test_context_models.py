"""Context parallelism in models: the module, torch's own context_parallel(), checkpoints, and sequences dealt by work."""

from typing import NamedTuple

import pytest
import ranks
import torch
from context_cases import Case, assert_equal, compare, error
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.utils.checkpoint import checkpoint

from dmattn_ops import (
    dynamic_mask,
    flash_dmattn_func,
    flash_dmattn_qkvpacked_func,
    flash_dmattn_varlen_func,
    prepare_mask,
)
from dmattn_ops.distributed import (
    ContextParallelAttention,
    balanced_layout,
    context_parallel_attention,
    dynamic_context_attention,
    prepare_context_mask,
    sequence_positions,
    shard_sequence,
    unshard_sequence,
)
from dmattn_ops.distributed.balance import dealt, work_of_queries
from dmattn_ops.distributed.context_mask import METHODS, work_of
from dmattn_ops.distributed.pieces import sight_of, spans_of
from dmattn_ops.distributed.sequence import checked_layout, chunks
from dmattn_ops.distributed.team import Team


class Packed(NamedTuple):
    """Packed documents as torchtitan describes them."""

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int


class Layer(nn.Module):
    """A layer of a model, with the attention that it is given as its inner one, and positions that are learned."""

    def __init__(self, inner: nn.Module, seqlen: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.places = nn.Embedding(seqlen, 32)
        self.project, self.back = nn.Linear(32, 3 * 32), nn.Linear(32, 32)
        self.inner = inner

    def forward(self, hidden: Tensor, positions: Tensor, masks: object = None) -> Tensor:
        """Return hidden and what it attends to."""
        hidden = hidden + self.places(positions)
        parts = self.project(hidden).unflatten(-1, (12, 8)).chunk(3, -2)
        return hidden + self.back(self.inner(*parts, attention_masks=masks).flatten(-2))


class OneProcess(nn.Module):
    """The inner attention of one process."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, attention_masks: object = None) -> Tensor:
        """Return attention of the whole sequence."""
        return flash_dmattn_func(query, key, value, attention_masks, is_causal=True)


def train_step(masks: str, compiled: bool, recomputed: bool, layout: str) -> float:
    """Return the largest error of the gradients of a layer's weights, of one process and of ranks."""
    device, seqlen = ranks.device(), 96
    hidden = torch.randn(1, seqlen, 32, device=device)
    offsets = torch.tensor([0, 20, 61, seqlen], dtype=torch.int32, device=device)
    ids = torch.bucketize(torch.arange(seqlen, device=device), offsets[1:], right=True).unsqueeze(0)
    whole, own = None, None
    if masks == "record":
        whole, own = prepare_mask(documents=ids), Packed(offsets, offsets, 41, 41)
    elif masks == "offsets":
        whole, own = prepare_mask(documents=ids), offsets
    elif masks == "prepared":
        whole = prepare_mask(documents=ids)
        own = prepare_context_mask(documents=shard_sequence(ids, None, layout=layout), group=None, layout=layout)
    one = Layer(OneProcess(), seqlen).to(device)
    one(hidden, torch.arange(seqlen, device=device), whole).square().sum().backward()
    many = Layer(ContextParallelAttention(None, layout=layout), seqlen).to(device)
    call = many
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(many, fullgraph=True, backend="aot_eager", dynamic=False)
    inputs = (
        shard_sequence(hidden, None, layout=layout),
        sequence_positions(seqlen, None, layout=layout, device=device),
        own,
    )
    out = checkpoint(call, *inputs, use_reentrant=False) if recomputed else call(*inputs)
    out.square().sum().backward()
    worst = 0.0
    for weight, expected in zip(many.parameters(), one.parameters(), strict=True):
        worst = max(worst, error(ranks.summed(weight.grad), expected.grad))
    return worst


@pytest.mark.parametrize("masks", ["none", "record", "offsets", "prepared"])
@pytest.mark.parametrize(("compiled", "recomputed"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_module_trains_a_layer_as_one_process_does(two_ranks, masks, compiled, recomputed):
    layout = "contiguous" if recomputed else "head_tail"
    assert max(two_ranks(train_step, masks, compiled, recomputed, layout, limit=180)) < 3e-5


def one_sequence_without_batch() -> bool:
    query = torch.randn(64, 4, 16, device=ranks.device())
    attention = ContextParallelAttention(None, dropout_p=0.5, window_size=(10, None)).eval()
    expected = context_parallel_attention(
        query[None], query[None], query[None], group=None, is_causal=True, window_size=(10, None)
    )
    return "window_size=(10, None)" in repr(attention) and torch.equal(attention(query, query, query), expected[0])


def test_the_module_takes_one_sequence_and_drops_nothing_in_evaluation(two_ranks):
    assert two_ranks(one_sequence_without_batch) == [True, True]


def inside_context_parallel() -> tuple[list[str], float, bool]:
    """Return what public functions say inside torch's context_parallel(), and the error of this library's own form there."""
    device = ranks.device()
    mesh = init_device_mesh(device.type, (2,))
    hidden, keep = torch.randn(2, 128, 32, device=device), torch.rand(2, 1, 1, 128, device=device) > 0.3
    weight = torch.randn(32, 64, device=device, requires_grad=True)

    def heads(hidden: Tensor) -> Tensor:
        return (hidden @ weight).unflatten(-1, (4, 16))

    expected = flash_dmattn_func(*[heads(hidden)] * 3, keep, is_causal=True).sum(-1).square().sum()
    (wanted,) = torch.autograd.grad(expected, weight)
    messages = []
    own, own_keep = hidden.clone(), keep.clone()
    with context_parallel(mesh, buffers=[own, own_keep], buffer_seq_dims=[1, 3]):
        part = heads(own)
        offsets = torch.tensor([0, 64], dtype=torch.int32, device=device)
        calls = [
            lambda: flash_dmattn_func(part, part, part, is_causal=True),
            lambda: flash_dmattn_qkvpacked_func(torch.stack((part, part, part), 2)),
            lambda: flash_dmattn_varlen_func(part[0], part[0], part[0], offsets, offsets, 64, 64),
            lambda: torch.compile(flash_dmattn_func, backend="eager", fullgraph=True)(part, part, part),
        ]
        for call in calls:
            try:
                call()
            except Exception as refusal:
                messages.append(str(refusal))
        out = context_parallel_attention(part, part, part, own_keep, group=mesh, is_causal=True)
        (found,) = torch.autograd.grad(out.sum(-1).square().sum(), weight)
    found = ranks.summed(found)
    after = flash_dmattn_func(*[heads(hidden)] * 3, keep, is_causal=True).sum(-1).square().sum()
    return messages, error(found, wanted), torch.equal(after, expected)


def test_inside_torchs_context_parallel_calls_are_right_or_refused(two_ranks):
    for messages, worst, works_after in two_ranks(inside_context_parallel):
        assert len(messages) == 4
        for message in messages:
            assert "dmattn_ops.distributed.context_parallel_attention" in message
        assert worst < 3e-5 and works_after


def layout_for_documents() -> tuple[tuple[int, ...], list[float]]:
    """Return a balanced layout, and the work of each rank by it and by the usual one."""
    ids = torch.bucketize(torch.arange(4096), torch.tensor([100, 300, 420, 3000, 3100]), right=True).unsqueeze(0)
    mask = prepare_mask(documents=ids, is_causal=True)
    layout = balanced_layout(mask, None, chunks_per_rank=4)
    work = work_of_queries(mask)
    return layout, [
        float(shard_sequence(work, None, dim=0, layout=each).sum()) for each in (layout, "head_tail", "contiguous")
    ]


def test_a_balanced_layout_gives_ranks_the_same_work(two_ranks):
    (layout, first), (other, second) = two_ranks(layout_for_documents)
    assert layout == other and sorted(layout) == list(range(8))
    balanced, *usual = (max(pair) / (sum(pair) / 2) for pair in zip(first, second, strict=True))
    assert balanced < 1.06
    assert all(balanced < imbalance for imbalance in usual), (balanced, usual)
    for method in ("all_gather", "ulysses", "ring"):
        case = Case("documents", layout=layout, method=method, keywords=(("is_causal", True),), prepared=True)
        assert_equal(two_ranks(compare, case))


def test_the_work_of_a_dynamic_mask_is_what_its_queries_see():
    mask = dynamic_mask(torch.randn(2, 3, 500), 40)
    assert torch.equal(work_of_queries(mask), mask.to_dense().sum((0, 1, 3)).float())


def test_chunks_go_to_the_rank_with_the_least_work():
    assert dealt([9.0, 1.0, 1.0, 7.0, 2.0, 4.0], 2) == (0, 1, 4, 2, 3, 5)
    assert dealt([0.0] * 4, 2) == (0, 1, 2, 3)


def test_chunk_numbers_are_integers_and_not_bools():
    layout = checked_layout([1, 0], 2)
    assert layout == (1, 0)
    assert [chunks(layout, 2, rank) for rank in range(2)] == [(1,), (0,)]
    with pytest.raises(TypeError, match="a chunk number of layout"):
        checked_layout((True, False), 2)


def like_others():
    """Return whether chunk numbers in a list are as good as in a tuple, and bool ids as good as integers."""
    torch.manual_seed(3)
    device = ranks.device()
    whole, scores = torch.randn(1, 128, 2, 16, device=device), torch.randn(1, 1, 128, device=device)
    ids = torch.arange(128, device=device).gt(50)[None]
    found = []
    for layout, documents in (([0, 2, 1, 3], ids), ((0, 2, 1, 3), ids.to(torch.uint8))):
        own, ids_of_own = (shard_sequence(each, None, layout=layout) for each in (whole, documents))
        mask = prepare_context_mask(documents=ids_of_own, group=None, layout=layout, read_documents=True)
        found.append(context_parallel_attention(own, own, own, mask, group=None, layout=(0, 2, 1, 3)))
        found.append(context_parallel_attention(own, own, own, group=None, documents=ids_of_own, layout=layout))
        found.append(unshard_sequence(own, None, layout=layout))
        run, scores_of_run, ids_of_run = (
            shard_sequence(each, None, dim=dim, layout="contiguous")
            for each, dim in ((whole, 1), (scores, 2), (documents, 1))
        )
        found.append(dynamic_context_attention(run, run, run, scores_of_run, 20, group=None, documents=ids_of_run))
    return all(torch.equal(one, other) for one, other in zip(found[:4], found[4:], strict=True))


def test_lists_of_chunks_and_bool_documents_are_taken_as_elsewhere(two_ranks):
    assert two_ranks(like_others) == [True, True]


def test_the_work_of_a_call_is_found_once():
    sight = sight_of(True, "bottom_right", (None, None), 512, 512)
    layout = (1, 0, 3, 2)
    spans = spans_of(sight, layout, 2)
    for method in METHODS:
        first = work_of(method, sight, spans, layout, Team("", 1, 2))
        assert work_of(method, sight, spans, layout, Team("", 1, 2)) is first
        assert work_of(method, sight, spans, layout, Team("", 0, 2)) != first or method == "ulysses"

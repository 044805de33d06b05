"""Ranks agree before they exchange anything: what differs on one rank is an error on all, in every public function.

And what they agree on is no less than what works: ranks may hold parts of different kinds.
"""

import gc
import inspect
import time
from random import Random

import context_cases
import pytest
import ranks
import torch
import torch.distributed as dist
from context_cases import CAUSAL, KINDS, METHODS

from dmattn_ops import distributed
from dmattn_ops.distributed import (
    ContextParallelAttention,
    agreement,
    context_parallel,
    context_parallel_attention,
    dynamic_context_attention,
    prepare_context_mask,
    record_traffic,
    unshard_sequence,
)
from dmattn_ops.distributed.context_parallel import chosen_method, head_groups
from dmattn_ops.distributed.key_exchange import exchange_of
from dmattn_ops.distributed.pieces import sight_of, spans_of
from dmattn_ops.distributed.team import Team, team_of


def part(length=64, heads=4, **options):
    return torch.randn(1, length, heads, 16, device=ranks.device(), **options)


def calls_that_send(group):
    """Return the functions that exchange something, and arguments with which each of them works, several where needed."""
    device = ranks.device()
    query, key = part(), part(heads=2)
    scores, ids = torch.zeros(1, 2, 64, device=device), torch.zeros(1, 64, dtype=torch.int32, device=device)
    keep, offsets = torch.ones(1, 1, 1, 64, dtype=torch.bool, device=device), torch.tensor([0, 40, 128], device=device)
    of_keys = {
        "query": query,
        "key": key,
        "value": key,
        "bias": scores.unsqueeze(2),
        "sink": torch.zeros(4, device=device),
    }
    return [
        (context_parallel_attention, {**of_keys, "mask": keep, "documents": ids}),
        (context_parallel_attention, {**of_keys, "cu_seqlens": offsets, "method": "ring"}),
        (dynamic_context_attention, {**of_keys, "scores": scores, "keep": 5, "documents": ids}),
        (dynamic_context_attention, {**of_keys, "scores": scores, "keep": 5, "dropout_p": 0.1}),
        (prepare_context_mask, {"mask": keep, "documents": ids, "read_documents": True}),
        (prepare_context_mask, {"cu_seqlens": offsets, "seqlen_q": 64, "method": "ulysses"}),
        (unshard_sequence, {"tensor": query}),
        (unshard_sequence, {"tensor": ids}),
        (ContextParallelAttention(group), {"query": query, "key": key, "value": key, "attention_masks": keep}),
    ]  # fmt: skip


SEND_NOTHING = {
    "ContextMask", "Traffic", "balanced_layout", "record_traffic", "register_sharding_rules", "sequence_positions",
    "shard_sequence",
}  # fmt: skip


def wrong_values(value):
    """Return values that differ from that of the other ranks, most of them wrong."""
    device = ranks.device()
    others = ["nonsense", float("nan"), -7, 10**30, (3, 4), [], object(), torch.zeros(2, 3, 5, device=device)]
    if isinstance(value, torch.Tensor):
        dtype = torch.float64 if value.is_floating_point() else torch.int16
        others += [value.to(dtype), value.to(torch.complex64), value[:0], value.unsqueeze(0), value.to_sparse()]
        others += [torch.cat((value, value), dim) for dim in range(value.dim())]
        others += [value.narrow(dim, 0, value.shape[dim] // 2) for dim in range(value.dim()) if value.shape[dim] > 1]
        others += [value.detach().requires_grad_()] if value.is_floating_point() else []
    return others


def walk():
    """Call everything that sends with one argument that differs on rank 1; return names, calls without an error, the longest."""
    other, walked, silent, longest = dist.get_rank() == 1, set(), [], 0.0
    # Without a backend for the CPU a group compares only what a rank has not asked for before.
    group = dist.new_group(backend="cpu:gloo,cuda:nccl" if dist.get_backend() == "nccl" else None)
    for function, good in calls_that_send(group):
        walked.add(getattr(function, "__name__", type(function).__name__))
        parameters = inspect.signature(getattr(function, "forward", function)).parameters
        good |= {"group": group} if "group" in parameters else {}
        function(**good)
        for name in [name for name in parameters if name != "group"]:  # in the same order on all ranks
            for value in wrong_values(good.get(name)):
                began = time.monotonic()
                try:
                    function(**good | ({name: value} if other else {}))
                    silent.append((str(function), name, repr(value)[:60]))
                except Exception:
                    longest = max(longest, time.monotonic() - began)
    return walked, silent, longest


def test_whatever_differs_on_one_rank_is_an_error_on_every_rank(two_ranks):
    for walked, silent, longest in two_ranks(walk):
        assert walked | SEND_NOTHING == set(distributed.__all__)
        assert silent == [] and longest < 5


def differ_around():
    """Return what a rank hears where something around the call differs: autocast, a module's choice, an error of any kind."""
    other, heard = dist.get_rank() == 1, []
    query, key = part(), part(heads=2)

    def strange():
        raise RuntimeError("no reason")

    calls = {
        "autocast": lambda: context_parallel_attention(query, key, key, group=None),
        "layout": lambda: ContextParallelAttention(None, layout="contiguous" if other else "head_tail")(
            query, key, key
        ),
        "any error": lambda: agreement.agreed("call", None, team_of(None), strange if other else dict),
    }
    for name, call in calls.items():
        try:
            with torch.autocast(query.device.type, torch.bfloat16, enabled=other and name == "autocast"):
                call()
        except Exception as error:
            heard.append(str(error))
    return heard


def test_what_differs_around_a_call_is_an_error_on_every_rank(two_ranks):
    for rank, (autocast, layout, any_error) in enumerate(two_ranks(differ_around)):
        assert "autocast is torch.float32 on rank 0 and torch.bfloat16 on rank 1" in autocast
        assert "layout is 'head_tail' on rank 0 and 'contiguous' on rank 1" in layout
        assert any_error == ["call was refused on rank 1 of the group: RuntimeError: no reason", "no reason"][rank]


def remembered():
    """Return what a group without a CPU backend compares and remembers of calls, of which it can remember two."""
    gathered, gather, query = [], agreement._all_gather, part(80)
    own = dist.new_group([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "has_cpu_backend", lambda members: False)
        patch.setattr(agreement, "_own_gpu", ranks.device)
        patch.setattr(agreement, "_all_gather", lambda *tensors, **more: gathered.append(1) or gather(*tensors, **more))
        patch.setattr(agreement, "MAX_SEEN", 2)
        before = []
        for scale in (0.1, 0.2, 0.1, 0.3, 0.2, 0.1, 0.3, 0.2):
            context_parallel_attention(query, query, query, group=own, softmax_scale=scale)
            before.append(len(gathered))
    kept, groups = len(agreement._seen[own]), len(agreement._seen)
    dist.destroy_process_group(own)
    del own
    gc.collect()
    return before, kept, groups - len(agreement._seen)


def test_groups_without_a_cpu_backend_forget_what_is_old_together(two_ranks):
    for compared, kept, forgotten in two_ranks(remembered):
        assert compared == [1, 2, 2, 3, 3, 4, 4, 5]
        assert (kept, forgotten) == (2, 1)


OF_ONE_LENGTH = ("trees", "dynamic/k", "documents", "padded_documents", "cu_seqlens")
SMALL = [(64, 16), (16, 64), (16, 2), (2, 16), (2, 2)]  # of a rank's queries and keys


@pytest.mark.parametrize("kind", [kind for kind, case in KINDS.items() if case.kind != "none"])
@pytest.mark.parametrize("method", METHODS)
def test_small_masks_of_other_lengths_equal_one_process(two_ranks, kind, method):
    """Ranks have parts of different kinds here, or none: where nothing is visible, or where parts are small."""
    conditions = [(CAUSAL,), (CAUSAL, ("causal_from", "top_left"), ("window_size", (3, None)))]
    cases = [
        KINDS[kind]._replace(
            method=method, length=length, length_k=length_k, layout=layout, prepared=prepared, keywords=keywords, seed=length
        )
        for length, length_k in SMALL
        for keywords, layout in zip(conditions, ("head_tail", "contiguous"), strict=True)
        for prepared in (False, True)
        if length == length_k or KINDS[kind].kind not in OF_ONE_LENGTH
    ]  # fmt: skip
    assert two_ranks(context_cases.compare_all, cases) == [{}, {}]


def drawn_exchanges(seed):
    """Return the exchange of each rank, where ranks need different numbers of keys as under documents, and the sight."""
    random = Random(seed)
    size, length = random.choice((2, 3, 4, 8)), 48 * 128
    layout = random.choice(("contiguous", "head_tail"))
    window = (random.choice((None, 200, 3000)), None)
    sight = sight_of(True, "bottom_right", window, length, length)
    spans = [
        [(random.randrange(max(1, first + 1)), stop) for first, stop in of_rank]
        for of_rank in spans_of(sight, layout, size)
    ]
    return [exchange_of(Team("", rank, size), layout, length, spans) for rank in range(size)], sight


@pytest.mark.parametrize("seed", range(40))
def test_all_ranks_decide_alike(seed, monkeypatch):
    """A rank that cuts heads into other groups than the rest makes other collectives, and all wait forever."""
    exchanges, sight = drawn_exchanges(seed)
    size, layout = len(exchanges), exchanges[0].layout
    row = 2 * 8 * 2 * 16  # bytes of key and value
    between = sorted(exchange.received_by(exchange.team.rank) for exchange in exchanges)
    monkeypatch.setattr(context_parallel, "PIPELINED_BYTES", row * (between[0] + between[-1]) // 2 + 1)
    monkeypatch.setattr(context_parallel, "GROUPED_HEADS", 1)
    monkeypatch.setattr(context_parallel, "GATHERED_BYTES", row * between[0] + 1)
    key = torch.empty(1, sight.seqlen_k // size, 8, 16, dtype=torch.bfloat16, device="meta")
    assert len({head_groups(exchange, key, key) for exchange in exchanges}) == 1
    near = seed % 2 == 0
    methods = {chosen_method(key, key, key, None, None, sight, layout, rank.team, near) for rank in exchanges}
    assert len(methods) == 1


def attend_where_ranks_receive_different_numbers_of_keys():
    """Rank 1 alone receives enough keys for groups of heads; return what it took."""
    query, key = torch.randn(1, 64, 4, 16, device=ranks.device()), torch.randn(1, 64, 2, 16, device=ranks.device())
    with pytest.MonkeyPatch.context() as patch, record_traffic() as traffic:
        patch.setattr(context_parallel, "PIPELINED_BYTES", 1)
        patch.setattr(context_parallel, "GROUPED_HEADS", 1)
        leaves = [query.requires_grad_(), key.requires_grad_(), key.detach().clone().requires_grad_()]
        out = context_parallel_attention(
            *leaves, group=None, method="all_gather", layout="contiguous", is_causal=True, window_size=(20, None)
        )
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    return traffic.received


def test_a_rank_that_receives_nothing_takes_part_in_all_groups_of_heads(two_ranks):
    first, second = two_ranks(attend_where_ranks_receive_different_numbers_of_keys)
    assert second > first

"""Documents whose ends the host reads: the mask of all queries of a rank in one, and calls with it."""

import context_cases
import pytest
import ranks
import torch
import torch.distributed as dist
from called_operators import Called
from context_cases import CAUSAL, SLIDING, WINDOW, Case, assert_equal

from dmattn_ops import prepare_mask
from dmattn_ops.distributed import agreement, context_parallel_attention, prepare_context_mask, record_traffic
from dmattn_ops.distributed.document_runs import ascends, mask_of_rank, read_ends, read_offsets, spans_within
from dmattn_ops.distributed.key_exchange import exchange_of
from dmattn_ops.distributed.pieces import sight_of, spans_of
from dmattn_ops.distributed.sequence import runs
from dmattn_ops.distributed.team import Team

LAYOUTS = ["head_tail", "contiguous", (0, 3, 5, 1, 2, 4)]
CASES = {
    "documents": Case("documents", batch=2, keywords=(CAUSAL,)),
    "full documents": Case("documents", keywords=(WINDOW,), bias="keyk"),
    "documents and padding": Case("padded_documents", batch=2, keywords=(CAUSAL,), bias="keyq", sink=True),
    "packed sequences": Case("cu_seqlens", keywords=(CAUSAL, SLIDING), dtype=torch.bfloat16, dim=64, dim_v=64),
    "a bias of pairs": Case("documents", keywords=(CAUSAL,), bias="fullk"),
    "dropout": Case("cu_seqlens", keywords=(CAUSAL, ("dropout_p", 0.3))),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", [*LAYOUTS, (2, 1, 0, 3)], ids=str)
def test_calls_with_documents_that_were_read_equal_one_process(two_ranks, case, layout):
    case = CASES[case]._replace(prepared=True, layout=layout)
    for asked in ("once", "twice", "late"):
        assert_equal(two_ranks(context_cases.compare, case._replace(asked=asked)), case.dtype)


@pytest.mark.parametrize("method", context_cases.METHODS)
@pytest.mark.parametrize("read", [True, False])
def test_masks_from_the_host_equal_one_process(two_ranks, method, read):
    gathered = () if ranks.backend_for(2) == "nccl" else ("documents", "documents and padding")  # it has no CPU backend
    for kind in (*gathered, "packed sequences"):
        case = CASES[kind]._replace(prepared=True, from_host=True, method=method, seed=0 if read else 1)
        assert_equal(two_ranks(context_cases.compare, case), case.dtype)


@pytest.mark.parametrize("kind", ["documents", "documents and padding"])
def test_heads_that_travel_in_groups_equal_one_process(two_ranks, kind):
    case = CASES[kind]._replace(prepared=True, heads=8, heads_kv=4)
    assert_equal(two_ranks(context_cases.compare_in_groups_of_heads, case))


def calls_of(case):
    problem = context_cases.build(case, 2)
    with Called() as called:
        context_cases.on_ranks(problem, case)
    return [called.names.count(f"dmattn.{name}.default") for name in ("forward", "backward", "list_tiles")]


def test_all_queries_of_a_rank_are_one_call(two_ranks):
    case = CASES["documents"]._replace(prepared=True, layout=(0, 2, 1, 3))
    assert two_ranks(calls_of, case) == [[1, 1, 0]] * 2
    assert two_ranks(calls_of, case._replace(layout=(2, 0, 1, 3))) == [[2, 2, 2]] * 2  # chunks that do not ascend
    assert two_ranks(calls_of, case._replace(seed=1)) == [[2, 2, 2]] * 2  # ids that are not read
    assert two_ranks(calls_of, case._replace(bias="fullk")) == [[2, 2, 0]] * 2
    assert two_ranks(calls_of, case._replace(asked="once")) == [[1, 1, 0]] * 2
    assert two_ranks(calls_of, case._replace(asked="late")) == [[2, 2, 0]] * 2
    assert two_ranks(calls_of, case._replace(asked="partly", keywords=(CAUSAL, SLIDING))) == [[1, 1, 0]] * 2


def evaluated_before_training(case):
    """Call without gradients in inference mode, then with them: a mask holds nothing of the first call."""
    problem = context_cases.build(case, 2)
    *qkv, bias = context_cases.parts(problem, case)
    mask = prepare_context_mask(**problem.more, **dict(problem.keywords), group=None, read_documents=True)
    with torch.inference_mode():
        evaluated = context_parallel_attention(*qkv, mask, bias, group=None)
    out = context_parallel_attention(*qkv, mask, bias, group=None)
    gradients = torch.autograd.grad(out.sum(), [*qkv, bias])
    return torch.equal(evaluated, out) and all(gradient.isfinite().all() for gradient in gradients)


def test_a_mask_that_was_used_in_inference_mode_trains(two_ranks):
    assert two_ranks(evaluated_before_training, CASES["a bias of pairs"]) == [True, True]


def devices_of(read):
    """Return where the parts of masks are that are prepared of padding and of ids and offsets on the CPU."""
    ids, keep, offsets = (
        torch.zeros(1, 64, dtype=torch.int32),
        torch.ones(1, 64, dtype=torch.bool),
        torch.tensor([0, 50, 128], dtype=torch.int32),
    )
    cut = {"group": None, "read_documents": read, "device": "meta"}
    made = (
        prepare_context_mask(documents=ids, **cut),
        prepare_context_mask(keep, documents=ids, **cut),
        prepare_context_mask(cu_seqlens=offsets, seqlen_q=64, is_causal=True, **cut),
    )
    return [part.device.type for mask in made for part in mask.parts]


@pytest.mark.parametrize("read", [True, False])
def test_masks_are_prepared_where_they_are_used(two_ranks, read):
    assert {device for devices in two_ranks(devices_of, read) for device in devices} == {"meta"}


def refused_without_a_backend():
    """Return what is said of ids and of padding on the CPU where the group has no backend for them."""
    ids, said = torch.zeros(1, 64, dtype=torch.int32), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "has_cpu_backend", lambda members: False)
        patch.setattr(agreement, "_own_gpu", lambda: torch.device("cpu"))
        for arguments in ({"documents": ids}, {"mask": ids}):
            try:
                prepare_context_mask(**arguments, group=None)
            except ValueError as error:
                said.append(str(error))
    dist.barrier()
    return said


def test_a_group_without_a_backend_for_the_cpu_gathers_nothing_from_there(two_ranks):
    if ranks.backend_for(2) == "nccl":
        pytest.skip("compares requests by the GPU")
    for said in two_ranks(refused_without_a_backend):
        assert len(said) == 2 and all("need a group with a CPU backend" in each for each in said)


def traffic_of(case):
    """Return the bytes that this rank receives in a forward, and in a backward."""
    problem, found = context_cases.build(case, 2), []
    inputs, mask = context_cases.parts(problem, case), None
    conditions = dict(problem.keywords)
    if case.prepared:
        mask = prepare_context_mask(**problem.more, **conditions, group=None, layout=case.layout, read_documents=True)
    with record_traffic() as traffic:
        out = context_parallel_attention(*inputs, mask, group=None, layout=case.layout, **conditions)
        found.append(traffic.received)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        found.append(traffic.received - found[0])
    return found


@pytest.mark.parametrize("kind", ["documents", "window"])
def test_gradients_travel_as_they_are_where_none_meet(two_ranks, kind):
    case = Case("documents" if kind == "documents" else "none", dtype=torch.bfloat16, prepared=kind == "documents")
    conditions = (CAUSAL,) if kind == "documents" else (CAUSAL, SLIDING)
    alone = case._replace(layout=(0, 2, 1, 3) if kind == "documents" else "contiguous", keywords=conditions)
    forward, backward = map(sum, zip(*two_ranks(traffic_of, alone), strict=True))
    assert backward == 2 * forward > 0  # keys again, and their gradients in bfloat16
    met = alone._replace(layout=(2, 0, 1, 3))
    forward, backward = map(sum, zip(*two_ranks(traffic_of, met), strict=True))
    assert backward == 3 * forward > 0  # gradients in float32


def test_what_a_rank_sees_are_its_rows_and_columns_of_the_whole_mask():
    generator = torch.Generator().manual_seed(3)

    def drawn(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    for number in range(120):
        size, chunk = drawn(1, 5), drawn(1, 40)
        strided = tuple(chunk for rank in range(size) for chunk in range(rank, 3 * size, size))
        layout = (*LAYOUTS[:2], strided)[number % 3]
        each = {"head_tail": 2, "contiguous": 1}.get(layout, 3)
        seqlen, batch = size * each * chunk, drawn(1, 3)
        ids = torch.stack([torch.rand(seqlen, generator=generator).lt(0.05).cumsum(0) for _ in range(batch)])
        keep = torch.rand(drawn(1, batch + 1), 1, 1, seqlen, generator=generator) > 0.2 if number % 2 else None
        window = (drawn(0, 50), drawn(0, 50)) if drawn(0, 2) else (None, None)
        conditions = {"is_causal": bool(drawn(0, 2)), "window_size": window}
        whole = prepare_mask(keep, documents=ids, **conditions).to_dense()
        sight = sight_of(conditions["is_causal"], "bottom_right", window, seqlen, seqlen)
        ends = read_ends((ids, ids))
        spans = spans_within(ends, spans_of(sight, layout, size), layout, size)
        for rank in range(size):
            exchange = exchange_of(Team("", rank, size), layout, seqlen, spans)
            mask = mask_of_rank(ends, keep, sight, exchange, ids.device)
            own = torch.cat(
                [torch.arange(run.origin, run.origin + run.length) for run in runs(layout, size, rank, seqlen // size)]
            )
            keys = torch.cat([torch.arange(*span) for span in exchange.needed[rank]])
            assert torch.equal(mask.to_dense(), whole[:, :, own][..., keys])
            others = torch.ones(seqlen, dtype=torch.bool)
            others[keys] = False
            assert not whole[:, :, own][..., others].any()


@pytest.mark.parametrize("layout", ["contiguous", "head_tail", (3, 0, 1, 2)])
def test_keys_of_other_documents_are_not_asked_for(layout):
    generator = torch.Generator().manual_seed(3)
    cuts = [torch.randperm(63, generator=generator)[:5].add(1).sort().values for _ in range(2)]
    ids = torch.stack([torch.bucketize(torch.arange(64), cut, right=True) for cut in cuts])
    spans = spans_of(sight_of(True, "bottom_right", (None, None), 64, 64), layout, 2)
    read = spans_within(read_ends((ids, ids)), spans, layout, 2)
    for rank, (before, after) in enumerate(zip(spans, read, strict=True)):
        for run, span, found in zip(runs(layout, 2, rank, 32), before, after, strict=True):
            seen = (ids[:, run.origin : run.origin + run.length, None] == ids[:, None, :]).any(0).any(0).nonzero()
            first, stop = max(span[0], int(seen.min())), min(span[1], int(seen.max()) + 1)
            assert found == (first, stop)
    assert read != spans


def test_ids_that_return_and_ids_of_queries_alone_are_not_read_as_runs():
    ids = torch.tensor([[0, 0, 1, 1, 2]])
    assert read_ends((ids, ids)) == ((0, 2, 4, 5),)
    assert read_ends((ids, ids.clone())) is None
    ids = torch.tensor([[0, 0, 1, 0]])
    assert read_ends((ids, ids)) is None


def test_offsets_are_ends_but_of_empty_sequences():
    assert read_offsets(torch.tensor([0, 0, 2, 2, 4, 5]), 5) == ((0, 2, 4, 5),)
    assert read_offsets(torch.tensor([0, 0]), 0) == ((0,),)


def test_only_chunks_in_order_are_rows_of_one_call():
    assert ascends("head_tail", 4) and ascends("contiguous", 3) and ascends((0, 3, 1, 2), 2)
    assert not ascends((3, 0, 1, 2), 2)

"""What goes wrong on one rank is an error on all that names the cause, and nobody waits for long."""

import re
import time
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from dmattn_ops import prepare_mask
from dmattn_ops.checks import require
from dmattn_ops.distributed import (
    ContextParallelAttention,
    agreement,
    balanced_layout,
    context_parallel_attention,
    dynamic_context_attention,
    prepare_context_mask,
    shard_sequence,
    unshard_sequence,
)
from dmattn_ops.distributed.agreement import text_of
from dmattn_ops.masks.tile_mask import TileMask, lengths_of

WITHOUT_GLOO = ranks.backend_for(2) == "nccl"


def part(length=64, heads=4, **options):
    return torch.randn(1, length, heads, 16, device=ranks.device(), **options)


def differ(what):
    """Call with one argument that is another on rank 1."""
    other = dist.get_rank() == 1
    query, key = part(), part(heads=2)
    more = {"group": None, "is_causal": True}
    mask = None
    if what == "length":
        query, key = (part(32), part(32, 2)) if other else (query, key)
    elif what == "odd length":
        query, key = (part(63), part(63, 2)) if other else (query, key)
    elif what == "mask":
        mask = torch.ones(1, 64, dtype=torch.bool, device=query.device) if other else None
    elif what == "prepared mask":
        documents = torch.zeros(1, 64, dtype=torch.int32, device=query.device)
        masks = [prepare_context_mask(documents=documents, group=None, is_causal=causal) for causal in (True, False)]
        mask, more = masks[other], {"group": None}
    elif what == "dtype":
        query, key = (query.bfloat16(), key.bfloat16()) if other else (query, key)
    elif what == "causal":
        more["is_causal"] = other
    elif what == "gradient":
        query.requires_grad_(other)
    elif what == "scale":
        more["softmax_scale"] = float("nan") if other else None
    elif what == "method":
        more["method"] = "ring" if other else "ulysses"
    elif what == "function" and other:
        return dynamic_context_attention(query, key, key, torch.zeros(1, 2, 64, device=query.device), 5, group=None)
    return context_parallel_attention(query, key, key, mask, **more)


@pytest.mark.parametrize(
    ("what", "messages"),
    [
        ("length", ["query is (1, 64, 4, 16) torch.float32", "on rank 0 and (1, 32, 4, 16)"]),
        ("mask", ["mask is None on rank 0 and (1, 64) torch.bool"]),
        ("prepared mask", ["mask is ContextMask(method='all_gather'", "is_causal=True", "on rank 0 and ContextMask("]),
        ("dtype", ["query is (1, 64, 4, 16) torch.float32", "torch.bfloat16"]),
        ("causal", ["is_causal is False on rank 0 and True on rank 1"]),
        ("gradient", ["query is", "requires_grad on rank 1"]),
        ("method", ["method is 'ulysses' on rank 0 and 'ring' on rank 1"]),
        ("function", ["all ranks of a group must call"]),
    ],
)
def test_arguments_that_differ_are_an_error_on_every_rank(two_ranks, what, messages):
    two_ranks(ranks.device)  # they have started
    began = time.monotonic()
    for failure in two_ranks.failures(differ, what):
        assert failure.kind == "ValueError"
        for message in messages:
            assert message in failure.message
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("odd length", "the part of query that a rank holds must be a multiple of 2"),
        ("scale", "softmax_scale must be finite"),
    ],
)
def test_what_one_rank_refuses_is_an_error_on_every_rank(two_ranks, what, message):
    first, second = two_ranks.failures(differ, what)
    assert message in second.message
    assert "was refused on rank 1 of the group" in first.message and message in first.message


IDS = torch.zeros(1, 128, dtype=torch.int32)  # of the whole sequence, of which each of two ranks holds 64 positions
OFFSETS = torch.tensor([0, 40, 128], dtype=torch.int32)
WRONG_PACKINGS = {
    "ids of the whole sequence": (
        {"documents": IDS},
        ValueError,
        "documents must be ids of the 64 positions that this rank holds, got 128: cut the ids of the whole sequence with"
        " shard_sequence",
    ),
    "ids of too few positions": (
        {"documents": IDS[:, :32]},
        ValueError,
        "documents must have shape (1, 64), got (1, 32)",
    ),
    "ids of other batches": (
        {"documents": IDS[:, :64].expand(3, -1)},
        ValueError,
        "documents must have shape (1, 64), got (3, 64)",
    ),
    "ids without a batch": (
        {"documents": IDS[0, :64]},
        ValueError,
        f"documents must have 2 dimensions, got 1, shape (64,): its axes are {require.DOCUMENTS}",
    ),
    "a list of ids": ({"documents": [0] * 64}, TypeError, "documents must be ids or a pair of ids, got 64 of them"),
    "a pair that is no tensors": ({"documents": (0, 1)}, TypeError, "documents must be a tensor, got int"),
    "lengths": (
        {"cu_seqlens": torch.tensor([40, 88], dtype=torch.int32)},
        ValueError,
        "cu_seqlens must go from 0 to the length of the whole sequence, 128, got 40 to 88: lengths become offsets by"
        " torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))",
    ),
    "offsets of this rank": (
        {"cu_seqlens": torch.tensor([0, 40, 64], dtype=torch.int32)},
        ValueError,
        "cu_seqlens must go from 0 to the length of the whole sequence, 128, got 0 to 64",
    ),
    "offsets that decrease": (
        {"cu_seqlens": torch.tensor([0, 90, 40, 128], dtype=torch.int32)},
        ValueError,
        "cu_seqlens must not decrease, got [0, 90, 40, 128]",
    ),
    "no offsets": (
        {"cu_seqlens": OFFSETS[:0]},
        ValueError,
        "cu_seqlens must go from 0 to the length of the whole sequence, 128, got none",
    ),
    "a list of offsets": ({"cu_seqlens": [0, 40, 128]}, TypeError, "cu_seqlens must be a tensor, got list"),
    "floating-point offsets": (
        {"cu_seqlens": OFFSETS.float()},
        TypeError,
        "cu_seqlens must have dtype torch.int32 or torch.int64, got torch.float32",
    ),
    "ids and offsets": (
        {"documents": IDS[:, :64], "cu_seqlens": OFFSETS},
        ValueError,
        "documents and cu_seqlens say the same: give one of them",
    ),
    "ids beside a prepared mask": (
        {"documents": IDS[:, :64], "mask": "prepared"},
        ValueError,
        "documents and cu_seqlens stand beside a ContextMask: pass them to prepare_context_mask",
    ),
    "offsets beside a prepared mask": (
        {"cu_seqlens": OFFSETS, "mask": "prepared"},
        ValueError,
        "documents and cu_seqlens stand beside a ContextMask: pass them to prepare_context_mask",
    ),
}


def with_packing(more):
    """Call with documents or offsets that lie on the CPU, as the call does."""
    query = torch.randn(1, 64, 2, 16)
    if "mask" in more:
        more = more | {"mask": prepare_context_mask(torch.ones(1, 64, dtype=torch.bool), group=None)}
    return context_parallel_attention(query, query, query, group=None, **more)


@pytest.mark.skipif(WITHOUT_GLOO, reason="ranks of NCCL hold no tensors on the CPU")
@pytest.mark.parametrize(("more", "kind", "message"), WRONG_PACKINGS.values(), ids=WRONG_PACKINGS)
def test_documents_and_offsets_that_do_not_fit_are_refused_in_words(two_ranks, more, kind, message):
    for failure in two_ranks.failures(with_packing, more):
        assert (failure.kind, failure.message) == (kind.__name__, message)


def prepared_of(more):
    return prepare_context_mask(group=None, **more)


@pytest.mark.skipif(WITHOUT_GLOO, reason="ranks of NCCL hold no tensors on the CPU")
@pytest.mark.parametrize(
    ("more", "kind", "message"),
    [
        (
            {"documents": IDS[0]},
            "ValueError",
            f"documents must have 2 dimensions, got 1, shape (128,): its axes are {require.DOCUMENTS}",
        ),
        ({"documents": [1, 2]}, "TypeError", "documents must be a tensor, got int"),
        (
            {"cu_seqlens": torch.tensor([0, 64]), "seqlen_q": 64},
            "ValueError",
            "cu_seqlens must go from 0 to the length of the whole sequence, 128, got 0 to 64",
        ),
        (
            {"documents": IDS[:, :64], "cu_seqlens": OFFSETS},
            "ValueError",
            "documents and cu_seqlens say the same: give one of them",
        ),
    ],
    ids=["ids without a batch", "a list of ids", "offsets of this rank", "ids and offsets"],
)
def test_a_mask_is_not_prepared_of_documents_and_offsets_that_do_not_fit(two_ranks, more, kind, message):
    for failure in two_ranks.failures(prepared_of, more):
        assert (failure.kind, failure.message) == (kind, message)


def cut(what):
    if what == "a list":
        return shard_sequence([1, 2, 3], None)
    return shard_sequence(torch.randn(64, device=ranks.device()), None)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a list", "tensor must be a tensor, got list"),
        ("one dimension", "dim must be a dimension of tensor, whose shape is (64,), got 1"),
    ],
)
def test_what_has_no_sequence_is_not_cut(two_ranks, what, message):
    for failure in two_ranks.failures(cut, what):
        assert failure.message == message


def test_masks_on_a_gpu_of_each_rank_are_the_same_mask():
    texts, representations = set(), set()
    for number in range(2):
        with FakeTensorMode():
            ids = torch.zeros(1, 64, dtype=torch.int32, device=f"cuda:{number}")
            mask = TileMask(lengths_of(ids, 64, 64), end=ids.unsqueeze(1), at_most=3, band_hi=0)
        texts.add(text_of((mask, ids)))
        representations.add(repr(mask))
    assert len(representations) == 2 and len(texts) == 1, texts


def compared_where_new():
    """Return what a group without a CPU backend compares of four calls, and what it says of a fifth that differs."""
    gathered, gather = [], agreement._all_gather

    def counted(*tensors, **keywords):
        gathered.append(tensors)
        return gather(*tensors, **keywords)

    query, before = part(72), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "has_cpu_backend", lambda members: False)
        patch.setattr(agreement, "_own_gpu", ranks.device)
        patch.setattr(agreement, "_all_gather", counted)
        for scale in (0.1, 0.1, 0.2, 0.1):
            context_parallel_attention(query, query, query, group=None, softmax_scale=scale)
            before.append(len(gathered))
        try:
            context_parallel_attention(query, query, query, group=None, softmax_scale=0.3 + dist.get_rank())
        except ValueError as error:
            return before, str(error)


def test_groups_without_a_cpu_backend_compare_what_is_new(two_ranks):
    for compared, message in two_ranks(compared_where_new):
        assert compared == [1, 1, 2, 2]
        assert "softmax_scale is 0.3 on rank 0 and 1.3 on rank 1" in message


def unchecked():
    """Return what a call gives on ranks that ask for another scale, where nobody compares."""
    import os

    os.environ["DMATTN_CONTEXT_CHECK"] = "0"
    try:
        query = part()
        return context_parallel_attention(query, query, query, group=None, softmax_scale=0.1 + dist.get_rank())
    finally:
        del os.environ["DMATTN_CONTEXT_CHECK"]


def test_the_comparison_can_be_turned_off(two_ranks):
    assert [tuple(out.shape) for out in two_ranks(unchecked)] == [(1, 64, 4, 16)] * 2


def refused(what):
    """Return what kind of error a call raises, and its message."""
    query, key = part(), part(heads=2)
    documents = torch.zeros(1, 64, dtype=torch.int32, device=query.device)
    scores, full = (torch.zeros(shape, device=query.device) for shape in ((1, 2, 64), (1, 1, 64, 64)))
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    mesh = init_device_mesh(query.device.type, (2, 1))
    whole = prepare_mask(documents=documents.repeat(1, 2))
    made = prepare_context_mask(documents=documents, group=None)
    calls = {
        "method": lambda: context_parallel_attention(query, key, key, group=None, method="tree"),
        "heads": lambda: context_parallel_attention(query[:, :, :3], key[:, :, :1], key[:, :, :1], group=None, method="ulysses"),
        "mesh": lambda: context_parallel_attention(query, key, key, group=mesh),
        "group": lambda: context_parallel_attention(query, key, key, group="cp"),
        "outside": lambda: context_parallel_attention(query, key, key, group=dist.GroupMember.NON_GROUP_MEMBER),
        "other group": lambda: context_parallel_attention(query, key, key, made, group=own),
        "other layout": lambda: context_parallel_attention(query, key, key, made, group=None, layout="contiguous"),
        "other method": lambda: context_parallel_attention(query, key, key, made, group=None, method="ring"),
        "whole mask": lambda: context_parallel_attention(query, key, key, whole, group=own),
        "documents twice": lambda: context_parallel_attention(query, key, key, whole, group=None, documents=documents),
        "bias": lambda: context_parallel_attention(query, key, key, None, full, group=None),
        "dtensor": lambda: context_parallel_attention(DTensor.from_local(query, mesh, [Replicate()] * 2), key, key, group=None),
        "offsets": lambda: context_parallel_attention(
            query, key, key, group=None, documents=documents, cu_seqlens=torch.tensor([0, 128], device=query.device)
        ),
        "layout": lambda: shard_sequence(query, None, layout="zigzag"),
        "chunks": lambda: shard_sequence(query, None, layout=(0, 1, 1)),
        "uneven": lambda: shard_sequence(query[:, :63], None),
        "uneven part": lambda: unshard_sequence(query[:, :63], None),
        "nothing prepared": lambda: prepare_context_mask(group=None, is_causal=True),
        "balance": lambda: balanced_layout(whole, None, chunks_per_rank=5),
        "keep": lambda: dynamic_context_attention(query, key, key, scores, -1, group=None),
        "exchange": lambda: dynamic_context_attention(query, key, key, scores, 1, group=None, exchange="all"),
        "full bias": lambda: dynamic_context_attention(
            query, key, key, scores, 1, full, group=None
        ),
    }  # fmt: skip
    try:
        calls[what]()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("method", "ValueError", "method must be one of 'all_gather', 'ulysses', 'ring', 'auto', got 'tree'"),
        ("heads", "ValueError", "the heads of query must be a multiple of the 2 ranks, got 3"),
        ("mesh", "ValueError", "group must be a mesh of one dimension, got 2"),
        ("group", "TypeError", "group must be a ProcessGroup or a DeviceMesh, got str"),
        ("outside", "TypeError", "got a group that this rank is not in"),
        ("other group", "ValueError", "mask was prepared for group"),
        ("other layout", "ValueError", "mask was prepared for layout 'head_tail', got 'contiguous'"),
        ("other method", "ValueError", "mask was prepared for method 'all_gather', got 'ring'"),
        ("whole mask", "ValueError", "mask must have shape (batch 1, heads 4 or 2 or 1, queries 64, keys 64)"),
        ("documents twice", "ValueError", "documents stand beside a TileMask"),
        ("bias", "ValueError", "bias must have shape (batch 1, heads 4 or 2 or 1, queries 64, keys 128), got (1, 1, 64, 64)"),
        ("dtensor", "TypeError", "query must be the part of this rank, a plain tensor, got a DTensor"),
        ("offsets", "ValueError", "documents and cu_seqlens say the same"),
        ("layout", "ValueError", "layout must be 'head_tail', 'contiguous' or a tuple"),
        ("chunks", "ValueError", "layout must hold each chunk number once"),
        ("uneven", "ValueError", "the sequence must be a multiple of 4 positions long on 2 ranks with layout 'head_tail', got 63"),
        ("uneven part", "ValueError", "the part of tensor that a rank holds must be a multiple of 2 positions"),
        ("nothing prepared", "ValueError", "prepare_context_mask needs a mask or documents"),
        ("balance", "ValueError", "the sequence must be a multiple of 2 ranks times 5 chunks long, got 128"),
        ("keep", "ValueError", "keep must not be negative, got -1"),
        ("exchange", "ValueError", "exchange must be 'counts' or 'fixed', got 'all'"),
        ("full bias", "ValueError", "bias must be one of keys"),
    ],
)  # fmt: skip
def test_refusals_name_the_argument(two_ranks, what, kind, message):
    for found, text in two_ranks(refused, what):
        assert (found, message in text) == (kind, True), text


def call_alone():
    """On rank 0: how long a call waits for a rank that does not call, in a group that allows 2 s; and the error."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    query = part()
    if dist.get_rank() == 1:
        time.sleep(4)
        return None
    began = time.monotonic()
    try:
        context_parallel_attention(query, query, query, group=group)
    except Exception as error:
        return time.monotonic() - began, str(error)
    return "no error"


@pytest.mark.skipif(WITHOUT_GLOO, reason="NCCL ends the process of a rank that waited too long")
def test_a_rank_that_never_calls_is_an_error_within_the_time_of_the_group():
    with ranks.Ranks(2) as processes:
        (waited, message), _ = processes(call_alone)
    assert waited < 8 and ("timed out" in message.lower() or "timeout" in message.lower()), message


def call_while_the_other_dies(path):
    query = part()
    context_parallel_attention(query, query, query, group=None)  # the ranks know each other
    if dist.get_rank() == 1:
        import os

        os._exit(1)
    began = time.monotonic()
    try:
        for _ in range(3):
            context_parallel_attention(query, query, query, group=None)
    except Exception as error:
        with open(path, "w") as file:
            file.write(f"{time.monotonic() - began} {error}")


@pytest.mark.skipif(WITHOUT_GLOO, reason="NCCL ends the process of a rank that waited too long")
def test_a_rank_that_dies_is_an_error_on_the_other(tmp_path):
    path = tmp_path / "error"
    with ranks.Ranks(2) as processes, pytest.raises(ranks.RankError, match="ended"):
        processes(call_while_the_other_dies, str(path))
    seconds, _, message = path.read_text().partition(" ")
    assert float(seconds) < 10 and re.search(r"closed|reset by peer|broken pipe", message, re.IGNORECASE), message


def module_with_wrong_input():
    attention = ContextParallelAttention(None)
    try:
        attention(part(), part(heads=2), part(heads=2), attention_masks="causal")
    except TypeError as error:
        return str(error)


def test_the_module_refuses_what_is_no_mask(two_ranks):
    assert two_ranks(module_with_wrong_input) == ["mask must be a tensor, a TileMask or a ContextMask, got str"] * 2

"""Dynamic masks across ranks equal one process, and only keys that live travel."""

import context_dynamic_cases
import pytest
import ranks
import torch
import torch.distributed as dist
from context_cases import assert_equal
from context_dynamic_cases import Case

from dmattn_ops import dynamic_mask
from dmattn_ops.distributed import dynamic_context_attention, record_traffic
from dmattn_ops.distributed.dynamic import capacity, living

CASES = {
    "scores as bias": Case(),
    "rising scores": Case(slope=5.0),
    "falling scores": Case(slope=-5.0),
    "one score for all heads": Case(score_heads="1", bias="k"),
    "scores of each head": Case(score_heads="q", bias="q"),
    "scores of each sequence and head": Case(score_heads="q", bias="1", score_batch=2),
    "documents and a sink": Case(score_batch=2, documents=True, seed=1, sink=True),
    "a bias of each head": Case(bias="q"),
    "a bias for all": Case(bias="1", seed=1),
    "nothing kept": Case(keep=0, bias="none"),
    "everything kept": Case(keep=10_000),
    "first and last keys": Case(keywords=(("keep_first", 5), ("keep_last", 9), ("softcap", 5.0))),
    "last keys beyond a rank": Case(keep=3, keywords=(("keep_last", 170),)),
    "dropout": Case(keywords=(("dropout_p", 0.3),)),
    "scores that cannot be dealt": Case(heads=3, heads_kv=1, score_heads="q"),
    "bfloat16": Case(dtype=torch.bfloat16, dim=64, dim_v=64),
}


@pytest.fixture(scope="module")
def four_ranks():
    with ranks.Ranks(4) as processes:
        yield processes


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("exchange", ["counts", "fixed"])
def test_two_ranks_equal_one_process(two_ranks, name, exchange):
    case = CASES[name]._replace(exchange=exchange)
    assert_equal(two_ranks(context_dynamic_cases.compare, case), case.dtype)


@pytest.mark.parametrize("name", ["scores as bias", "rising scores", "scores of each head", "documents and a sink"])
@pytest.mark.parametrize("exchange", ["counts", "fixed"])
def test_four_ranks_equal_one_process(four_ranks, name, exchange):
    assert_equal(four_ranks(context_dynamic_cases.compare, CASES[name]._replace(exchange=exchange, length=70)))


@pytest.mark.parametrize("name", ["scores as bias", "documents and a sink", "dropout"])
def test_compiled_calls_equal_one_process(two_ranks, name):
    case = CASES[name]._replace(exchange="fixed", compiled="aot_eager")
    assert_equal(two_ranks(context_dynamic_cases.compare, case, limit=180))


def test_a_call_compiled_by_inductor_equals_one_process(two_ranks):
    assert_equal(two_ranks(context_dynamic_cases.compare, Case(exchange="fixed", compiled="inductor"), limit=180))


def random_case(seed):
    def pick(*choices):
        return choices[int(torch.randint(len(choices), ()))]

    torch.manual_seed(seed)
    heads_kv, group = pick((1, 4), (2, 2), (2, 1), (4, 1), (4, 2))
    length = int(torch.randint(3, 260, ()))
    return Case(
        keep=int(torch.randint(0, length + 20, ())), exchange=pick("counts", "fixed"), score_heads=pick("1", "k", "q"),
        score_batch=pick(1, 2), bias=pick("none", "scores", "1", "k", "q"), batch=2, heads=heads_kv * group,
        heads_kv=heads_kv, length=length, dim=pick(8, 16, 33), dim_v=pick(8, 16, 64), slope=pick(0.0, 4.0, -4.0),
        documents=pick(True, False), sink=pick(True, False),
        keywords=(("keep_first", pick(0, 4)), ("keep_last", pick(0, 12)), ("softcap", pick(0.0, 3.0))), seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_random_calls_equal_one_process(two_ranks, seed):
    assert_equal(two_ranks(context_dynamic_cases.compare, random_case(seed)))


def repeated(exchange):
    whole, _, _ = context_dynamic_cases.inputs_of(Case(batch=1), dist.get_world_size())
    case = Case(exchange=exchange)
    found = []
    for _ in range(3):
        own = [
            context_dynamic_cases.part(tensor, place, case).clone().requires_grad_()
            for place, tensor in enumerate(whole)
        ]
        out = dynamic_context_attention(
            *own, 40, own[3].unsqueeze(2), group=None, exchange=exchange, deterministic=True
        )
        found.append([out, *torch.autograd.grad(out.sum(), own)])
    return all(torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True))


@pytest.mark.parametrize("exchange", ["counts", "fixed"])
def test_deterministic_calls_repeat_bit_for_bit(two_ranks, exchange):
    assert two_ranks(repeated, exchange) == [True, True]


LENGTH, KEPT, HEADS, DIM = 131072, 2048, 8, 128


def received(exchange, scale):
    """Return the bytes that this rank receives in a forward, of a problem that is `scale` times shorter and keeps as much less."""
    own = LENGTH // scale // dist.get_world_size()
    query = torch.zeros(1, own, HEADS, DIM, dtype=torch.bfloat16, device=ranks.device())
    scores = torch.randn(1, HEADS, own, device=ranks.device())
    with torch.no_grad(), record_traffic() as traffic:
        dynamic_context_attention(query, query, query, scores, KEPT // scale, group=None, exchange=exchange)
    return traffic.received


@pytest.mark.parametrize(("exchange", "times_less"), [("counts", 34), ("fixed", 14)])
def test_ranks_receive_a_fraction_of_all_keys(four_ranks, exchange, times_less):
    scale, world = 32, 4
    all_keys = (world - 1) * (LENGTH // scale // world) * HEADS * 2 * DIM * 2
    found = four_ranks(received, exchange, scale)
    assert all_keys / max(found) > times_less, found
    assert max(found) == found[-1]  # the last rank needs the most


def test_at_131072_positions_as_many_keys_live_as_are_kept():
    torch.manual_seed(0)
    end = dynamic_mask(torch.randn(1, HEADS, LENGTH), KEPT).end
    chunk = LENGTH // 4
    rows = sum(int(living(end[..., owner * chunk : (owner + 1) * chunk], owner, 3).sum()) for owner in range(4))
    assert rows == KEPT * HEADS
    assert capacity(KEPT, chunk) == KEPT and capacity(KEPT, 100) == 100
    full = 3 * chunk * HEADS * 2 * DIM * 2
    # keys and values, their deaths, and scores and deaths of the heads that each rank selects for
    by_counts = rows * (2 * DIM * 2 + 4) + 2 * 3 * chunk * HEADS // 4 * 4
    fixed = 3 * KEPT * HEADS * (2 * DIM * 2 + 4) + 2 * 3 * chunk * HEADS // 4 * 4
    assert full / by_counts > 34 and full / fixed > 14

"""Context parallelism on two ranks, and some of it on four, equals one process: out, lse, the maximum and all gradients."""

import context_cases
import pytest
import ranks
import torch
import torch.distributed as dist
from context_cases import CAUSAL, KINDS, METHODS, SLIDING, WINDOW, Case, assert_equal
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

from dmattn_ops.distributed import (
    context_parallel_attention,
    dynamic_context_attention,
    record_traffic,
    sequence_positions,
    shard_sequence,
    unshard_sequence,
)
from dmattn_ops.distributed.context_mask import work_of
from dmattn_ops.distributed.context_parallel import chosen_method, head_groups
from dmattn_ops.distributed.key_exchange import exchange_of
from dmattn_ops.distributed.pieces import Statistics, merged, sight_of, spans_of
from dmattn_ops.distributed.team import Team, share_a_host


@pytest.fixture(scope="module")
def four_ranks():
    with ranks.Ranks(4) as processes:
        yield processes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", ["head_tail", "contiguous", (1, 4, 2, 0, 3, 5)], ids=str)
def test_every_kind_of_mask_equals_one_process(two_ranks, kind, method, layout):
    assert_equal(two_ranks(context_cases.compare, KINDS[kind]._replace(method=method, layout=layout)))


@pytest.mark.parametrize("kind", [kind for kind, case in KINDS.items() if case.kind != "none"])
@pytest.mark.parametrize("method", METHODS)
def test_prepared_masks_equal_plain_ones(two_ranks, kind, method):
    for seed in (0, 1):  # even: where documents end is read
        case = KINDS[kind]._replace(method=method, prepared=True, seed=seed)
        assert_equal(two_ranks(context_cases.compare, case))


@pytest.mark.parametrize("kind", ["sliding", "dense, of each key head", "dynamic", "documents and padding"])
@pytest.mark.parametrize("method", METHODS)
def test_four_ranks_with_two_key_heads_equal_one_process(four_ranks, kind, method):
    for layout in ("head_tail", "contiguous"):
        assert_equal(four_ranks(context_cases.compare, KINDS[kind]._replace(method=method, layout=layout, length=48)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "case",
    [
        Case(keywords=(CAUSAL, ("dropout_p", 0.3)), batch=2),
        Case("documents", keywords=(CAUSAL, ("dropout_p", 0.2)), bias="keyk"),
        Case("keys/q", keywords=(("softcap", 3.0), ("softmax_scale", 0.7)), sink=True),
        Case("dense", keywords=(CAUSAL,), sink=True, dim=24, dim_v=40),
        Case(keywords=(CAUSAL,), heads=6, heads_kv=2, dim=8, dim_v=8, length=50),
        Case(keywords=(CAUSAL,), heads=4, heads_kv=1),
        Case("padding", keywords=(CAUSAL,), dtype=torch.float64, bias="full1"),
        Case(keywords=(CAUSAL,), dtype=torch.bfloat16, length=200, dim=64, dim_v=64),
        Case("keys", keywords=(WINDOW,), dtype=torch.bfloat16, length=200, dim=64, dim_v=64, bias="keyk"),
    ],
    ids=["dropout", "dropout and documents", "soft cap and sink", "sink and sizes", "six heads", "one key head", "float64",
         "bfloat16", "bfloat16 and bias"],
)  # fmt: skip
def test_every_option_equals_one_process(two_ranks, method, case):
    if case.dtype == torch.float64 and ranks.backend_for(2) != "gloo":
        pytest.skip("float64 runs on the CPU only")
    assert_equal(two_ranks(context_cases.compare, case._replace(method=method)), case.dtype)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal_from", ["bottom_right", "top_left", -40, 25])
@pytest.mark.parametrize("keys", [32, 160])
def test_keys_of_another_length_are_aligned_to_either_corner(two_ranks, method, causal_from, keys):
    keywords = (CAUSAL, SLIDING, ("causal_from", causal_from))
    for layout in ("head_tail", "contiguous"):
        case = Case(method=method, layout=layout, keywords=keywords, length_k=keys, bias="keyk")
        assert_equal(two_ranks(context_cases.compare, case))


@pytest.mark.parametrize(
    "kind", ["causal", "dense, of each key head", "mask of keys, of each key head", "dense, of each head"]
)
@pytest.mark.parametrize("heads_kv", [2, 4])
def test_heads_that_travel_in_groups_equal_one_process(two_ranks, kind, heads_kv):
    case = KINDS[kind]._replace(heads=8, heads_kv=heads_kv)
    assert_equal(two_ranks(context_cases.compare_in_groups_of_heads, case))
    dropped = case._replace(keywords=(*case.keywords, ("dropout_p", 0.3)))
    assert_equal(two_ranks(context_cases.compare_in_groups_of_heads, dropped))


@pytest.mark.parametrize("method", METHODS)
def test_rows_with_scores_of_a_million_equal_one_process(two_ranks, method):
    case = Case(method=method, keywords=(CAUSAL,), large=1e6, dtype=torch.float32)
    errors = two_ranks(context_cases.compare, case)
    assert max(error[name] for error in errors for name in ("out", "lse", "row_max", "dv")) < 3e-5
    # the rows' weights are 0 or 1, so that gradients of scores vanish but for rounding: compare what does not
    assert max(error["dq"] for error in errors) < 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_deterministic_calls_repeat_bit_for_bit(two_ranks, method):
    case = Case("documents", method=method, keywords=(CAUSAL, ("deterministic", True)), bias="keyk", heads_kv=1)
    assert two_ranks(context_cases.repeat, case, 3) == [True, True]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        (Case(keywords=(CAUSAL, ("dropout_p", 0.2))), "inductor"),
        (KINDS["sliding"], "aot_eager"),
        (KINDS["documents"]._replace(prepared=True, sink=True), "aot_eager"),
        (KINDS["dense, of each key head"], "aot_eager"),
        (KINDS["packed sequences"], "aot_eager"),
        (KINDS["dynamic"]._replace(layout="contiguous"), "aot_eager"),
    ],
    ids=["inductor", "sliding", "documents", "dense", "packed sequences", "dynamic"],
)
@pytest.mark.parametrize("method", METHODS)
def test_compiled_calls_equal_one_process(two_ranks, method, case, backend):
    if backend == "inductor":
        case = case._replace(keywords=case.keywords[:1])  # Inductor draws other random numbers than eager mode
    assert_equal(two_ranks(context_cases.compare, case._replace(method=method, compiled=backend), limit=180))


def test_a_compiled_call_chooses_its_method(two_ranks):
    case = Case(keywords=(CAUSAL,), method="auto", compiled="aot_eager")
    assert_equal(two_ranks(context_cases.compare, case, limit=180))


class Returned(TorchFunctionMode):
    """Keeps the tensors that an operation returned as it was given them, as `x.to(x.dtype)` does."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        waits = "wait_tensor" in str(func)  # returns another tensor while a graph is made
        if isinstance(result, torch.Tensor) and not waits and any(result is each for each in args):
            self.tensors.append(result)
        return result


def functions_that_return_what_an_operation_returned_unchanged():
    """Return the autograd Functions that methods use, and those of which a result came unchanged out of an operation."""
    seen, faulty = set(), set()

    def watched(name, forward):
        def watching(*arguments):
            with Returned() as returned:
                results = forward(*arguments)
            each_result = results if isinstance(results, tuple) else (results,)
            seen.add(name)
            if any(one is other for one in each_result for other in returned.tensors):
                faulty.add(name)
            return results

        return staticmethod(watching)

    with pytest.MonkeyPatch.context() as patch:
        for function in torch.autograd.Function.__subclasses__():
            if function.__module__.startswith("dmattn_ops."):
                patch.setattr(function, "forward", watched(function.__name__, function.forward))
        for method in METHODS:
            for bias in ("keyk", "fullq"):
                case = Case(method=method, keywords=(CAUSAL,), bias=bias)
                context_cases.on_ranks(context_cases.build(case, dist.get_world_size()), case)
        part = torch.randn(1, 32, 2, 16, device=ranks.device(), requires_grad=True)
        scores = torch.randn(1, 4, 32, device=ranks.device(), requires_grad=True)
        for exchange in ("counts", "fixed"):
            query = part.repeat(1, 1, 2, 1)
            dynamic_context_attention(query, part, part, scores, 8, scores.unsqueeze(2), group=None, exchange=exchange)
    return seen, faulty


def test_no_result_of_a_function_has_two_names_in_a_graph(two_ranks):
    """With torch 2.11 gradients of such a result are lost: it returns all values of a Function, and the last of two counts."""
    for seen, faulty in two_ranks(functions_that_return_what_an_operation_returned_unchanged):
        assert seen == {"AllGather", "GatheredRows", "Repeated", "Ring", "ToHeads", "ToSequence", "WithFetched"}
        assert not faulty


def random_case(seed):
    def pick(*choices):
        return choices[int(torch.randint(len(choices), ()))]

    torch.manual_seed(seed)
    kind = pick(
        "none", "padding", "keys/q", "dense/1", "dense/k", "dynamic/1", "intervals/k", "documents", "padded_documents"
    )
    heads_kv, group = pick((1, 4), (2, 2), (2, 1), (4, 1), (4, 2))
    length = 2 * int(torch.randint(5, 90, ()))
    left, right = (int(torch.randint(0, 3 * length, ())) for _ in range(2))
    keywords = [("is_causal", pick(True, False)), ("window_size", pick((None, None), (left, None), (left, right)))]
    keywords += [("softcap", pick(0.0, 2.0)), ("dropout_p", pick(0.0, 0.0, 0.4))]
    batch = 1 if kind == "padded_documents" else pick(1, 2)
    return Case(
        kind, method=pick(*METHODS), layout=pick("head_tail", "contiguous", (3, 0, 1, 2)), batch=batch, heads=heads_kv * group,
        heads_kv=heads_kv, length=length, dim=pick(3, 16, 40), dim_v=pick(5, 16, 64), prepared=kind != "none" and pick(True, False),
        bias=pick("none", "key1", "bkeyk", "fullq", "full1"), keywords=tuple(keywords), sink=pick(True, False), seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_random_calls_equal_one_process(two_ranks, seed):
    case = random_case(seed)
    if case.method == "ulysses" and case.heads % 2:
        case = case._replace(method="ring")
    assert_equal(two_ranks(context_cases.compare, case))


def positions_and_parts(layout):
    numbers = torch.arange(2 * 48 * 3.0, device=ranks.device())
    whole = numbers.clone().requires_grad_()
    tensor = whole.view(2, 48, 3)
    part = shard_sequence(tensor, None, layout=layout)
    back = unshard_sequence(part, None, layout=layout)
    factor = numbers.view(2, 48, 3) * (1 + dist.get_rank())
    (back * factor).sum().backward()
    positions = sequence_positions(48, None, layout=layout)
    return torch.equal(back, tensor), torch.equal(part, tensor[:, positions]), whole.grad, positions


@pytest.mark.parametrize(
    ("layout", "first", "second"),
    [
        ("contiguous", range(24), range(24, 48)),
        ("head_tail", [*range(12), *range(36, 48)], range(12, 36)),
        ((3, 0, 2, 1), [*range(36, 48), *range(12)], [*range(24, 36), *range(12, 24)]),
    ],
)
def test_parts_of_a_sequence_come_back_and_so_do_their_gradients(two_ranks, layout, first, second):
    found = two_ranks(positions_and_parts, layout)
    assert [each[:2] for each in found] == [(True, True)] * 2
    assert [each[3].tolist() for each in found] == [list(first), list(second)]
    # each rank's share of the gradient lies at its own positions, and holds what both ranks' losses gave
    total = sum(each[2] for each in found).view(2, 48, 3)
    assert torch.equal(total, 3 * torch.arange(2 * 48 * 3.0).view(2, 48, 3))
    assert not found[0][2].view(2, 48, 3)[:, list(second)].any()


def call_in_groups():
    """Return whether calls on a mesh of one dimension, a subgroup of one rank and the default group are right."""
    mesh = init_device_mesh(ranks.device().type, (2,), mesh_dim_names=("cp",))
    query, key = torch.randn(2, 1, 64, 2, 16, device=ranks.device())
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    alone = context_parallel_attention(query, key, key, group=own, is_causal=True)
    parts = [shard_sequence(tensor, mesh) for tensor in (query, key)]
    together = context_parallel_attention(parts[0], parts[1], parts[1], group=mesh["cp"], is_causal=True)
    return torch.allclose(unshard_sequence(together, mesh["cp"]), alone, atol=1e-5)


def test_groups_are_meshes_subgroups_or_the_default(two_ranks):
    assert two_ranks(call_in_groups) == [True, True]


def traffic_of_a_window(layout):
    part = torch.randn(1, 256, 2, 16, device=ranks.device())
    with record_traffic() as traffic:
        context_parallel_attention(part, part, part, group=None, layout=layout, is_causal=True, window_size=(63, None))
    return traffic.received


def test_only_keys_inside_the_window_travel(two_ranks):
    row = 2 * (16 + 16) * 4
    assert two_ranks(traffic_of_a_window, "contiguous") == [0, 63 * row]
    # chunks of 128: rank 0 holds 0 and 3, rank 1 holds 1 and 2
    assert two_ranks(traffic_of_a_window, "head_tail") == [63 * row, 63 * row]


def exchange_on(size, layout, length, **conditions):
    sight = sight_of(
        conditions.get("is_causal", False), "bottom_right", conditions.get("window", (None, None)), length, length
    )
    return exchange_of(Team("", 0, size), layout, length, spans_of(sight, layout, size)), sight


@pytest.mark.parametrize(
    ("size", "length", "heads", "heads_kv", "causal_window", "near", "method"),
    [
        (4, 131072, 32, 8, None, False, "all_gather"),  # grouped heads: few keys travel
        (4, 131072, 32, 8, None, True, "ulysses"),  # within a host 1.25 times as much does not matter
        (2, 131072, 32, 8, None, True, "ulysses"),  # nor does 2.5 times as much
        (2, 131072, 32, 1, None, True, "all_gather"),  # 17 times as much does
        (8, 131072, 32, 32, None, False, "ulysses"),  # as many key heads: a part of all heads is less than all keys
        (8, 131072, 30, 30, None, True, "all_gather"),  # heads that cannot be dealt
        (8, 1048576, 30, 30, None, True, "ring"),  # gathered keys would fill 16 GB
        (8, 1048576, 32, 32, (4095, None), True, "all_gather"),  # a window needs few keys
    ],
)
def test_the_method_is_chosen_by_what_travels_and_what_fits(size, length, heads, heads_kv, causal_window, near, method):
    layout = "contiguous" if causal_window else "head_tail"
    _, sight = exchange_on(size, layout, length, is_causal=True, window=causal_window or (None, None))
    query, key = (
        torch.empty(1, length // size, count, 128, dtype=torch.bfloat16, device="meta") for count in (heads, heads_kv)
    )
    assert chosen_method(query, key, key, None, None, sight, layout, Team("", 0, size), near) == method


def hosts_of_groups():
    """Return whether groups share a host, where the launcher says nothing, two ranks a host and one a host."""
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    found = []
    for local in ("", "2", "1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_WORLD_SIZE", local)
            found.append((share_a_host(None), share_a_host(own)))
    return found


def test_ranks_share_a_host_where_the_launcher_says_so(two_ranks):
    assert two_ranks(hosts_of_groups) == [[(False, False), (True, True), (False, True)]] * 2


def calls_without_a_method(local, length):
    part = torch.randn(1, length, 4, 16, device=ranks.device())
    with pytest.MonkeyPatch.context() as patch, record_traffic() as traffic:
        patch.setenv("LOCAL_WORLD_SIZE", local)
        context_parallel_attention(part, part, part, group=None, method="auto", is_causal=True)
    return traffic.received


def test_ranks_that_choose_different_methods_are_told(two_ranks):
    assert len(set(two_ranks(calls_without_a_method, "2", 64))) == 1
    for failure in two_ranks.failures(calls_of_a_host_that_is_another):
        assert "method is 'ulysses' on rank 0 and 'all_gather' on rank 1" in failure.message


def calls_of_a_host_that_is_another():
    return calls_without_a_method("21"[dist.get_rank()], 96)  # of a length that ranks that only have NCCL compare


def test_keys_travel_in_groups_of_heads_where_they_are_many():
    exchange, _ = exchange_on(4, "head_tail", 131072, is_causal=True)
    key = torch.empty(1, 32768, 16, 128, dtype=torch.bfloat16, device="meta")
    assert head_groups(exchange, key, key) == 4
    assert head_groups(exchange, key[:, :, :8], key[:, :, :8]) == 2
    assert head_groups(exchange, key[:, :, :6], key[:, :, :6]) == 1
    assert head_groups(exchange, key[:, :, :8, :2], key[:, :, :8, :2]) == 1


def shown(pieces, sight, rows, columns):
    """Return what pieces show of a rank's queries and of the keys at hand; each pair at most once."""
    seen = torch.zeros(rows, columns, dtype=torch.int64)
    for piece in pieces:
        limits = sight.band(piece.query, piece.key).limits(piece.rows, piece.columns)
        distance = torch.arange(piece.columns) - torch.arange(piece.rows)[:, None]
        inside = (distance >= limits[0]) & (distance <= limits[1])
        seen[piece.row : piece.row + piece.rows, piece.column : piece.column + piece.columns] += inside
    return seen


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("layout", ["head_tail", "contiguous", "dealt"])
def test_pieces_of_a_ring_that_are_joined_show_the_same(size, layout):
    chunk, joined = 3, 0
    for diagonal in (0, 1, -1, 5, -17, 40):
        if layout == "dealt":
            layout = tuple(torch.randperm(2 * size).tolist())
        length = 2 * chunk * size
        sight = sight_of(True, diagonal, (None, None), length, length)
        spans = spans_of(sight, layout, size)
        for rank in range(size):
            of = [work_of("ring", sight, spans, layout, Team("", rank, size), by_place=each) for each in (False, True)]
            for apart, together in zip(*(work.steps() for work in of), strict=True):
                rows = columns = 2 * chunk
                assert torch.equal(shown(apart, sight, rows, columns), shown(together, sight, rows, columns))
                joined += len(together) < len(apart)
                if layout == "head_tail" and diagonal == 0:
                    assert len(together) == 1
    assert joined or layout == "contiguous"


def test_merging_keeps_what_rounding_lse_loses():
    scores = torch.randn(7, 64, dtype=torch.float64) * 3 + 1e9
    values = torch.randn(64, 5, dtype=torch.float64)

    def statistics(of):
        lse = scores[:, of].logsumexp(-1)
        rounded = lse.float()
        out = scores[:, of].softmax(-1) @ values[of]
        rows = (rounded, (lse - rounded.double()).float(), scores[:, of].amax(-1).float())
        return Statistics(out.float()[None, :, None], *[row[None, None] for row in rows])

    parts = [statistics(slice(first, first + 16)) for first in range(0, 64, 16)]
    found, expected = parts[0], statistics(slice(0, 64))
    for part in parts[1:]:
        found = merged(found, part)
    torch.testing.assert_close(found.out, expected.out, atol=1e-5, rtol=1e-5)
    both = [each.lse.double() + each.lse_tail.double() for each in (found, expected)]
    assert (both[0] - both[1]).abs().max() < 1e-5  # float32 alone is off by up to 32 here
    nothing = Statistics(
        torch.zeros(1, 7, 1, 5), *[torch.full((1, 1, 7), -torch.inf), torch.zeros(1, 1, 7)], parts[0].row_max * 0
    )
    for one, other in ((parts[0], nothing), (nothing, parts[0])):
        assert torch.equal(merged(one, other).out, parts[0].out) and torch.equal(merged(one, other).lse, parts[0].lse)
    assert torch.equal(merged(nothing, nothing).lse, nothing.lse) and not merged(nothing, nothing).out.any()

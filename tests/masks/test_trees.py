"""Prefix trees: what is packed, what is seen, and that a tree computes what its sequences compute one by one."""

import itertools
import json
import random

import numpy as np
import pytest
import torch

import bench_trees
import dmattn_ops
import prefix_trees
from dmattn_ops import flash_dmattn_func, prepare_mask
from dmattn_ops.trees import PrefixTree, pack_prefix_tree, tree_mask


def some_sequences(seed, count=9, longest=14, tokens=3):
    """Return random sequences that often begin alike: some are the beginning of others, some are empty, some there twice."""
    draw = random.Random(seed)
    made = [[draw.randrange(tokens) for _ in range(draw.randrange(longest))] for _ in range(count)]
    for _ in range(count // 3):
        of = draw.choice(made)
        made.insert(draw.randrange(len(made)), of[: draw.randrange(len(of) + 1)])
    return [*made, draw.choice(made)]


def definition(ends, positions=None, window_size=(None, None)):
    """Return what the contract says, place by place."""
    seqlen = ends.shape[1]
    seen = torch.zeros(ends.shape[0], 1, seqlen, seqlen, dtype=torch.bool)
    ends, positions = ends.tolist(), None if positions is None else positions.tolist()
    for b, i, j in itertools.product(range(len(ends)), range(seqlen), range(seqlen)):
        inside = j <= i < ends[b][j] and ends[b][i] > i
        if positions is not None:
            left, right = window_size
            behind = positions[b][i] - positions[b][j]
            inside = inside and (left is None or behind <= left) and (right is None or -behind <= right)
        seen[b, 0, i, j] = inside
    return seen


def in_a_row(trees, gap=0):
    """Return ends and positions `[1, S]` of several trees in a row, with places of padding between them."""
    ends, positions, place = [], [], 0
    for tree in trees:
        ends += [(tree.ends + place), torch.zeros(gap, dtype=torch.int32)]
        positions += [tree.positions, torch.zeros(gap, dtype=torch.int64)]
        place += len(tree.ends) + gap
    return torch.cat(ends)[None], torch.cat(positions)[None]


@pytest.mark.parametrize("seed", range(12))
def test_a_tree_holds_each_sequence_and_shares_what_they_share(seed):
    sequences = some_sequences(seed)
    tree = pack_prefix_tree(sequences, pad_to=200)
    assert [tree.tokens[places].tolist() for places in tree.index] == sequences
    assert all(torch.equal(tree.positions[places], torch.arange(len(places))) for places in tree.index)
    prefixes = {tuple(sequence[:length]) for sequence in sequences for length in range(1, len(sequence) + 1)}
    real = tree.ends > torch.arange(200)
    assert real.sum() == len(prefixes) and real[: len(prefixes)].all()
    seen = tree_mask(tree.ends[None]).to_dense()[0, 0]
    for places in tree.index:  # a token sees its own sequence up to itself, in order, and nothing else
        for number, place in enumerate(places):
            assert torch.equal(seen[place].nonzero().squeeze(-1), places[: number + 1])
    assert not seen[len(prefixes) :].any() and not seen[:, len(prefixes) :].any()


def test_branches_and_trees_follow_the_order_of_their_first_sequences():
    tree = pack_prefix_tree([[5, 9, 1], [5, 2], [3], [5, 9, 0], [5]])
    assert tree.tokens.tolist() == [5, 9, 1, 0, 2, 3]
    assert tree.positions.tolist() == [0, 1, 2, 2, 1, 0]
    assert tree.ends.tolist() == [5, 4, 3, 4, 5, 6]
    assert [places.tolist() for places in tree.index] == [[0, 1, 2], [0, 4], [5], [0, 1, 3], [0]]
    assert (tree.tokens.dtype, tree.positions.dtype, tree.ends.dtype) == (torch.int64, torch.int64, torch.int32)
    assert isinstance(tree.to("cpu"), PrefixTree) and len(tree.to("cpu").index) == 5


@pytest.mark.parametrize("sequences", [[], [[]], [[], []]])
def test_no_tokens_are_a_tree_of_padding(sequences):
    tree = pack_prefix_tree(sequences, pad_to=3)
    assert tree.ends.tolist() == [0, 0, 0] and [len(places) for places in tree.index] == [0] * len(sequences)
    assert not tree_mask(tree.ends[None]).to_dense().any()
    assert len(pack_prefix_tree(sequences).tokens) == 0


def test_tokens_come_as_lists_tensors_and_arrays():
    sequence = [7, 300, 2]
    whole = pack_prefix_tree([sequence, torch.tensor(sequence, dtype=torch.int32), np.array(sequence), tuple(sequence)])
    assert whole.tokens.tolist() == sequence and len(whole.index) == 4
    long = list(range(1500))  # each is the beginning of the next
    assert torch.equal(pack_prefix_tree([long[:length] for length in range(1500)]).tokens, torch.arange(1499))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [(None, None), (3, None), (0, 0), (None, 1), (2**40, 5)])
@pytest.mark.parametrize("gap", [0, 3])
def test_masks_are_what_they_are_defined_to_be(seed, window, gap):
    rows = []
    for row in range(2):
        trees = [pack_prefix_tree(some_sequences(10 * seed + 2 * row + n, count=4)) for n in range(2)]
        ends, positions = in_a_row(trees, gap)
        rows.append([torch.nn.functional.pad(part, (0, 90 - part.shape[1])) for part in (ends, positions)])
    ends, positions = (torch.cat(parts) for parts in zip(*rows, strict=True))
    positions = positions.to([torch.int64, torch.int32, torch.int16][seed % 3])
    before = ends.clone(), positions.clone()
    mask = tree_mask(ends, positions=positions, window_size=window)
    assert torch.equal(mask.to_dense(), definition(ends, positions, window))
    assert torch.equal(ends, before[0]) and torch.equal(positions, before[1])
    if window == (None, None):
        assert mask.kind == "intervals" and mask.nbytes == ends.nbytes
        assert torch.equal(tree_mask(ends).to_dense(), definition(ends))


def test_padding_inside_of_a_subtree_sees_nothing():
    ends = torch.tensor([[9, 9, 0, 6, 5, 6, 0, 9, 9, 0], [10, 10, 10, 10, 10, 10, 10, 10, 10, 10]], dtype=torch.int32)
    assert torch.equal(tree_mask(ends).to_dense(), definition(ends))


def problem(seed, heads, heads_kv, dtype=torch.float64):
    """Return sequences, their tree, and query, key and value of its places."""
    sequences = [[1] * 20 + rest for rest in some_sequences(seed, count=5, longest=9, tokens=4)]
    tree = pack_prefix_tree(sequences, pad_to=100)
    torch.manual_seed(seed)
    return tree, [torch.randn(1, 100, count, 8, dtype=dtype) for count in (heads, heads_kv, heads_kv)]


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("window", [(None, None), (6, None)], ids=str)
def test_a_tree_computes_what_its_sequences_compute_one_by_one(heads, window):
    tree, inputs = problem(3, *heads)
    mask = tree_mask(tree.ends[None], positions=tree.positions[None], window_size=window)
    of_tree = [tensor.clone().requires_grad_() for tensor in inputs]
    out, lse = flash_dmattn_func(*of_tree, mask, return_lse=True)
    alone = [tensor.clone().requires_grad_() for tensor in inputs]
    losses, weights = [], [torch.randn(1, len(places), heads[0], 8, dtype=torch.float64) for places in tree.index]
    for places, weight in zip(tree.index, weights, strict=True):
        each, own_lse = flash_dmattn_func(
            *(tensor[:, places] for tensor in alone), is_causal=True, window_size=window, return_lse=True
        )
        torch.testing.assert_close(out[:, places], each)
        torch.testing.assert_close(lse[..., places], own_lse)
        losses.append((each * weight).sum())
    sum(losses).backward()
    sum((out[:, places] * weight).sum() for places, weight in zip(tree.index, weights, strict=True)).backward()
    padding = tree.ends <= torch.arange(100)
    assert padding.any() and not out[:, padding].any() and (lse[..., padding] == -torch.inf).all()
    for one, other in zip(of_tree, alone, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
        assert not one.grad[:, padding].any()


def test_a_tree_of_one_token_has_windows_too():
    tree = pack_prefix_tree([[7]])
    mask = tree_mask(tree.ends[None], positions=tree.positions[None], window_size=(3, None))
    assert mask.to_dense().tolist() == [[[[True]]]]


def test_trees_compile_into_one_graph():
    tree, inputs = problem(5, 4, 2, torch.float32)

    def attend(query, key, value, ends, positions):
        plain = flash_dmattn_func(query, key, value, tree_mask(ends))
        return plain + flash_dmattn_func(query, key, value, tree_mask(ends, positions=positions, window_size=(5, None)))

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (100, 61):
        part = [tensor[:, :length].contiguous() for tensor in inputs]
        ends, positions = tree.ends[None, :length].clamp(max=length), tree.positions[None, :length]
        torch.testing.assert_close(compiled(*part, ends, positions), attend(*part, ends, positions))


def test_slices_of_a_tree_are_slices_of_its_mask():
    tree, _ = problem(7, 2, 2)
    mask = tree_mask(tree.ends[None])
    whole = mask.to_dense()
    assert torch.equal(mask.queries(30, 70).keys(10, 50).to_dense(), whole[:, :, 30:70, 10:50])


ONE = torch.tensor([[2, 2]], dtype=torch.int32)
REFUSED = [
    (lambda: pack_prefix_tree("abc"), TypeError, "sequences must be a list of sequences of token ids, got str"),
    (lambda: pack_prefix_tree([[1], "ab"]), TypeError, r"sequences\[1\] must be a list, a tensor or an array"),
    (lambda: pack_prefix_tree([[1, "a"]]), TypeError, r"sequences\[0\] must be a list, .* got a list that holds str"),
    (lambda: pack_prefix_tree([(1, True)]), TypeError, r"sequences\[0\] must be a list, .* got a tuple that holds bool"),
    (lambda: pack_prefix_tree([[1, 1 << 63]]), ValueError, r"sequences\[0\] must have token ids of at most 64 bits, got 922"),
    (lambda: pack_prefix_tree([3]), ValueError, r"sequences\[0\] must have one dimension, got shape \(\)"),
    (lambda: pack_prefix_tree([[1.5]]), TypeError, r"sequences\[0\] must have dtype torch.uint8 or .*, got torch.float32"),
    (lambda: pack_prefix_tree([ONE[0].to_sparse()]), TypeError, r"sequences\[0\] must be a dense tensor, got layout"),
    (lambda: pack_prefix_tree([[1, 2]], pad_to=1), ValueError, "pad_to must be at least the length of the tree, 2, got 1"),
    (lambda: pack_prefix_tree([[1]], pad_to=1 << 70), ValueError, "pad_to must be less than 1073741824, got 1180591620"),
    (lambda: pack_prefix_tree([[1]], pad_to=2.0), TypeError, "pad_to must be an int, got float"),
    (lambda: tree_mask([1, 2]), TypeError, "ends must be a tensor, got list"),
    (lambda: tree_mask(ONE[0]), ValueError, r"ends must have 2 dimensions, got 1, .* passed as tree.ends\[None\]"),
    (lambda: tree_mask(ONE.long()), TypeError, "ends must have dtype torch.int32, got torch.int64"),
    (lambda: tree_mask(ONE, window_size=(4, None)), ValueError, "positions must be given with it, got None"),
    (lambda: tree_mask(ONE, positions=ONE[:, :1]), ValueError, r"positions must have shape \(1, 2\), got \(1, 1\)"),
    (lambda: tree_mask(ONE, positions=ONE.float()), TypeError, "positions must have dtype torch.uint8"),
    (lambda: tree_mask(ONE, positions=ONE, window_size=(-1, None)), ValueError, "window_size left must not be negative"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_is_no_tree_is_refused_in_words(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_the_module_is_an_attribute_and_a_mask_of_a_tree_is_one_of_intervals():
    assert dmattn_ops.trees.tree_mask is tree_mask
    tree = pack_prefix_tree([[1, 2, 3], [1, 2, 4]])
    by_hand = prepare_mask(intervals=(None, tree.ends[None, None]), seqlen_q=4, is_causal=True)
    assert torch.equal(tree_mask(tree.ends[None]).to_dense(), by_hand.to_dense())


def test_the_example_computes_the_same_on_trees_and_keeps_less():
    steps = prefix_trees.main(["--prompt=40", "--answers=4", "--answer=6", "--dim=32", "--steps=2", "--device=cpu"])
    assert len(steps) == 2 and abs(steps[1]["tree"].loss) > 1e-4
    for step in steps:
        assert abs(step["tree"].loss - step["separate"].loss) < 1e-6
        assert step["difference"] < 1e-4 and any(gradient.any() for gradient in step["tree"].gradients)
        assert step["tree"].kept < 0.6 * step["separate"].kept


def test_the_benchmark_measures_the_tree_beside_the_sequences(tmp_path):
    output = tmp_path / "results.json"
    rows = bench_trees.main(["--tiny", "--rounds=1", "--device=cpu", f"--output={output}"])
    assert {row["part"] for row in rows} == set(bench_trees.SHAPES)
    for name, mask_work in (("dmattn", True), ("dmattn-sequences", False)):
        for row in (row for row in rows if row["implementation"] == name):
            assert row["forward_ms"] > 0 and row["backward_ms"] > 0 and ("prepare_ms" in row) == mask_work
    assert [row["tokens_of_tree"] for row in rows if "tokens_of_tree" in row] == [150 + 3 * 40, 200 + 4 * 20]
    assert {row["target"] for row in json.loads(output.read_text())["ratios"]} >= {"separate sequences"}
    with pytest.raises(SystemExit, match="needs a GPU; on a CPU it takes"):
        bench_trees.main(["--device=cpu", f"--output={output}"])

"""`seqlen_k_used`: how many keys of each batch entry are used."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor.utils import fresh_cache

import dmattn_ops
from dmattn_ops import flash_dmattn_func, flash_dmattn_qkvpacked_func
from dmattn_ops.dispatch import run, used
from dmattn_ops.launching import recording
from tests.support import used_cases
from tests.support.used_cases import KINDS, check, draw, ours, poisoned


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_random_calls_are_those_of_the_definition(kind, seed):
    case = draw(1000 * KINDS.index(kind) + seed, kind, (torch.float64, torch.float32, torch.bfloat16)[seed % 3])
    check(case, ours(poisoned(case)))


@pytest.mark.parametrize("kind", KINDS)
def test_plain_torch_operations_agree(kind, monkeypatch):
    monkeypatch.setattr(run, "cpu_kernels", lambda: "reference")
    for seed in range(2):
        case = draw(77 + 1000 * KINDS.index(kind) + seed, kind, largest=60)
        check(case, ours(poisoned(case, (float("nan"), -float("inf"))[seed])))


def test_a_part_of_the_keys_is_the_call_on_that_part():
    case = draw(5, "none")._replace(keywords={"is_causal": True, "window_size": (20, None)})
    found = flash_dmattn_func(*case[:3], seqlen_k_used=case.used, **case.keywords)
    for entry, number in enumerate(case.used.tolist()):
        part = (case.query[entry : entry + 1], *(rows[entry : entry + 1, :number] for rows in (case.key, case.value)))
        assert torch.allclose(found[entry : entry + 1], flash_dmattn_func(*part, **case.keywords), atol=1e-12)


def test_dropout_counts_positions_as_ever():
    case = draw(11, "none", largest=40)
    case = case._replace(keywords=case.keywords | {"softcap": 0.0}, bias=None, sink=None)
    kept = used_cases.dropped(case, 3, 0.4)
    torch.manual_seed(3)
    out = flash_dmattn_func(*case[:3], seqlen_k_used=case.used, dropout_p=0.4, **case.keywords)
    torch.manual_seed(3)
    shown = used_cases.visible(case)
    assert torch.allclose(out, flash_dmattn_func(*case[:3], shown, dropout_p=0.4), atol=1e-12)
    assert not kept.all()


def test_ids_of_any_size_leave_one_that_no_query_has():
    least, greatest = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    ids = torch.tensor([[3, 5, 4, 3], [least, 9, 2, greatest], [least, least, least + 1, greatest]], dtype=torch.int32)
    found = used._id_of_nobody(ids)
    assert not (ids == found[:, None]).any()
    assert used._id_of_nobody(ids[1:2, :1]).item() == least + 1
    q_segments = torch.tensor([[least, greatest, 7]], dtype=torch.int32)
    q, k = torch.randn(1, 3, 1, 8), torch.randn(1, 4, 1, 8)
    k_segments = torch.tensor([[[greatest, least, 7, 7]]], dtype=torch.int32)
    lists = torch.ops.dmattn.list_tiles(q_segments, k_segments, 3)
    parts = dict(zip(("row_tiles", "col_tiles"), lists, strict=True))
    _, lse, *_ = torch.ops.dmattn.forward(
        q,
        k,
        k,
        q_segments=q_segments,
        k_segments=k_segments,
        **parts,
        seqlen_k_used=torch.tensor([2], dtype=torch.int32),
    )
    assert (lse[0, 0] == -float("inf")).tolist() == [False, False, True]


def test_the_packed_function_takes_it():
    qkv = torch.randn(2, 40, 3, 2, 16, dtype=torch.float64, requires_grad=True)
    numbers = torch.tensor([0, 23], dtype=torch.int32)
    found = flash_dmattn_qkvpacked_func(qkv, is_causal=True, seqlen_k_used=numbers)
    expected = flash_dmattn_func(*qkv.unbind(2), is_causal=True, seqlen_k_used=numbers)
    assert torch.allclose(found, expected)
    grads = [torch.autograd.grad(out.sin().sum(), qkv)[0] for out in (found, expected)]
    assert torch.allclose(*grads)
    assert not grads[0][:, 23:, 1:].any()


@pytest.mark.parametrize("kind", ["none", "bits", "padding", "pair", "hidden"])
def test_compiled_calls_of_any_length_are_one_graph(kind):
    keywords = {"is_causal": True, "causal_from": "bottom_right", "window_size": (30, None), "softcap": 0.0}
    with fresh_cache():  # graphs that another version of the library left there bring their guards along
        torch.compiler.reset()
        compiled = torch.compile(flash_dmattn_func, fullgraph=True, dynamic=True)
        for seed, seqlen in enumerate((140, 300, 65)):
            random = torch.Generator().manual_seed(seed)
            mask, shown = used_cases.draw_mask(kind, random, 3, 5, 5, seqlen, seqlen)
            query, key = torch.randn(3, seqlen, 5, 16), torch.randn(3, seqlen, 5, 16)
            numbers = torch.tensor([seqlen // 2, seqlen, 1], dtype=torch.int32)
            case = used_cases.Case(query, key, key.flip(1), numbers, mask, shown, None, None, keywords)
            with torch._dynamo.config.patch(error_on_recompile=seed > 0):
                check(case, ours(poisoned(case), compiled))


def test_exported_programs_take_other_lengths():
    class Attention(torch.nn.Module):
        def forward(self, query, key, value, numbers):
            return flash_dmattn_func(query, key, value, is_causal=True, seqlen_k_used=numbers, batch_invariant=True)

    def inputs(seqlen_q, seqlen_k):
        key = torch.randn(2, seqlen_k, 2, 16)
        return torch.randn(2, seqlen_q, 4, 16), key, key.sin(), torch.tensor([3, seqlen_k], dtype=torch.int32)

    lengths = {name: torch.export.Dim(name, min=2) for name in ("seqlen_q", "seqlen_k")}
    shapes = {1: lengths["seqlen_q"]}, {1: lengths["seqlen_k"]}, {1: lengths["seqlen_k"]}, None
    program = torch.export.export(Attention(), inputs(10, 20), dynamic_shapes=shapes)
    for sizes in ((10, 20), (3, 200), (150, 7)):
        given = inputs(*sizes)
        assert torch.equal(program.module()(*given), Attention()(*given))


@pytest.mark.parametrize("name", ["forward", "qkvpacked_forward"])
def test_torch_accepts_the_operators(name):
    packed = torch.randn(2, 7, 3, 2, 8, requires_grad=True)
    primals = (
        (packed,) if name.startswith("qkv") else (torch.randn(2, 5, 4, 8, requires_grad=True), *packed.unbind(2)[1:])
    )
    primals = tuple(each.detach().requires_grad_() for each in primals)
    arguments = (*primals, torch.tensor([0, 5], dtype=torch.int32))
    overload = getattr(torch.ops.dmattn, name).used
    torch.library.opcheck(overload, arguments, {"used_hi": 0, "used_lo": -3})
    mask = dmattn_ops.prepare_mask(torch.rand(1, 1, primals[0].shape[1], 7) < 0.6).mask[:-1]
    torch.library.opcheck(overload, (*arguments, None, *mask), {"used_hi": 0, "batch_invariant": True})


def test_vmap_and_func_go_through_it():
    query, key = torch.randn(3, 2, 4, 2, 8), torch.randn(3, 2, 6, 2, 8)
    numbers = torch.tensor([2, 6], dtype=torch.int32)

    def attend(query, key):
        return flash_dmattn_func(query, key, key, seqlen_k_used=numbers)

    found = torch.vmap(attend)(query, key)
    assert torch.equal(found, torch.stack([attend(*each) for each in zip(query, key, strict=True)]))
    grad = torch.func.grad(lambda key: attend(query[0], key).sum())(key[0])
    assert grad.shape == key[0].shape and not grad[0, 2:].any()


def test_errors_say_what_was_expected():
    query, key = torch.randn(2, 4, 2, 8), torch.randn(2, 6, 2, 8)
    whole = torch.tensor([2, 6], dtype=torch.int32)
    for numbers, error, words in [
        ([2, 6], TypeError, "seqlen_k_used must be a tensor, got list"),
        (whole.long(), TypeError, "seqlen_k_used must have dtype torch.int32, got torch.int64"),
        (whole[:1], ValueError, "seqlen_k_used must have shape (2,), got (1,)"),
        (whole.to("meta"), ValueError, "seqlen_k_used must be on cpu like query, got meta"),
        (whole + 1, ValueError, "seqlen_k_used must be between 0 and the length of key, 6, got 7"),
        (whole - 3, ValueError, "seqlen_k_used must be between 0 and the length of key, 6, got -1"),
    ]:
        for call in (flash_dmattn_func, dmattn_ops.explain):
            with pytest.raises(error, match=re.escape(words)):
                call(query, key, key, seqlen_k_used=numbers)
        if isinstance(numbers, torch.Tensor):
            with pytest.raises(error, match=re.escape(words)):
                torch.ops.dmattn.forward.used(query, key, key, numbers)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="seqlen_k_used must be between"):
        flash_dmattn_func(query, key, key, seqlen_k_used=whole + 1, dropout_p=0.5)
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(TypeError, match="seqlen_k_used"):
        dmattn_ops.flash_dmattn_varlen_func(
            *[query[0]] * 3, *[torch.tensor([0, 4], dtype=torch.int32)] * 2, 4, 4, seqlen_k_used=whole
        )


def test_what_the_caller_owns_stays_as_it_is():
    case = draw(31, "hidden")
    before = [case.used.clone(), *[part.clone() for part in case.mask.mask[:-1] if part is not None]]
    ours(case)
    after = [case.used, *[part for part in case.mask.mask[:-1] if part is not None]]
    assert all(map(torch.equal, before, after))


def test_empty_calls_work():
    numbers = torch.zeros(2, dtype=torch.int32)
    for seqlen_q, seqlen_k in ((0, 5), (5, 0)):
        query, key = torch.randn(2, seqlen_q, 2, 8), torch.randn(2, seqlen_k, 2, 8)
        out, lse = flash_dmattn_func(query, key, key, seqlen_k_used=numbers, is_causal=True, return_lse=True)
        assert not out.any() and (lse == -float("inf")).all()
    none = torch.randn(0, 5, 2, 8)
    assert flash_dmattn_func(none, none, none, seqlen_k_used=numbers[:0]).shape == none.shape


@pytest.mark.parametrize(("arch", "seqlen_k"), [("8.0", 1000), ("8.9", 10000), ("9.0", 1000), ("9.0", 10000)])
def test_decoding_takes_the_kernels_that_it_takes_without(arch, seqlen_k):
    query, key = torch.empty(2, 1, 8, 64, dtype=torch.bfloat16), torch.empty(2, seqlen_k, 2, 64, dtype=torch.bfloat16)
    numbers = torch.tensor([3, seqlen_k], dtype=torch.int32)
    found = dmattn_ops.explain(query, key, key, is_causal=True, seqlen_k_used=numbers, arch=arch)
    plain = dmattn_ops.explain(query, key, key, is_causal=True, arch=arch)
    expected = "decode" if arch == "9.0" else "portable"  # which share the keys among programs
    assert found.forward.kernel == expected
    if plain.forward.kernel == expected:
        assert found.forward.choice == plain.forward.choice
        assert found.forward.configuration == plain.forward.configuration
    else:
        assert all("unused keys often hold NaN" in str(choice) for choice in (found.forward, found.backward))
    assert "an interval of queries for each key" in found.mask
    assert found.visible.endswith("of those before seqlen_k_used, j - seqlen_k_used + Sq <= i")


@pytest.mark.parametrize("kind", ["none", "intervals", "hidden", "padding"])
def test_plans_can_repeat_what_is_done_of_intervals(kind, monkeypatch):
    """Everything is made by `computed`, of tensors that the operators were given or that were made by it."""
    case = draw(101, kind)
    mask = dmattn_ops.call.NO_MASK if case.mask is None else case.mask.mask
    known = {id(part) for part in (case.used, *mask[:-1]) if part is not None}
    count = 0

    def computed(function, *arguments):
        nonlocal count
        assert all(id(each) in known for each in arguments if isinstance(each, torch.Tensor))
        made = recording.computed(function, *arguments)
        known.add(id(made))
        keep.append(made)
        count += 1
        return made

    keep = []
    monkeypatch.setattr(used, "computed", computed)
    monkeypatch.setattr(used, "do_not_repeat", lambda: pytest.fail("cannot be repeated"))
    options = dmattn_ops.call.plain_options(1.0)
    part = dmattn_ops.call.Used(case.used, -3, 0)
    call = dmattn_ops.call.Call(*case[:3], None, mask, None, None, None, options, part)
    found = used.in_mask(call)
    assert found.mask.kind == "intervals"
    assert all(id(each) in known for each in found.mask[:-1] if each is not None) and count <= 5


def test_results_do_not_depend_on_the_other_entries():
    case = draw(9, "none")
    together = flash_dmattn_func(*case[:3], seqlen_k_used=case.used, batch_invariant=True, is_causal=True)
    for entry in range(case.query.shape[0]):
        part = slice(entry, entry + 1)
        alone = flash_dmattn_func(
            *[rows[part] for rows in case[:3]], seqlen_k_used=case.used[part], batch_invariant=True, is_causal=True
        )
        assert torch.equal(together[part], alone)

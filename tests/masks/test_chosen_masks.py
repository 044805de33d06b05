"""Masks that keep the blocks that queries name, as on a GPU, and the operators `.chosen`; on a CPU bits stand in for them."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from chosen_cases import draw, visible
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from dmattn_ops import TileMask, environment, explain, flash_dmattn_func, flash_dmattn_qkvpacked_func, selection_mask
from dmattn_ops.api import chosen as api
from dmattn_ops.api.explain import Explanation
from dmattn_ops.bands import band_of
from dmattn_ops.call import NO_MASK, Call, Chosen, plain_options
from dmattn_ops.choice import arch
from dmattn_ops.choice.chosen import FORWARD, SMALL_FORWARD
from dmattn_ops.dispatch import run
from dmattn_ops.masks.chosen import segments_beside
from dmattn_ops.masks.tile_mask import as_bits, from_chosen
from dmattn_ops.ops import schemas

S, BLOCK = 90, 16


def choices(heads: int = 1) -> Tensor:
    torch.manual_seed(0)
    return torch.randint(-1, -(-S // BLOCK), (1, heads, S, 2), dtype=torch.int32)


def kept(indices: Tensor, **band) -> TileMask:
    band = {"is_causal": True, "causal_from": "bottom_right", "window_size": (None, None)} | band
    return from_chosen(indices, BLOCK, (None, None), S, band_of(**band))


@pytest.fixture(autouse=True)
def gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls take the way of those whose keys are gathered."""
    monkeypatch.setattr(api, "is_gathered", lambda *call: True)


def leaves(heads: int = 4, heads_kv: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(1, S, count, 24, requires_grad=True) for count in (heads, heads_kv, heads_kv)]


@pytest.mark.parametrize("seed", range(60))
def test_any_case_shows_what_the_definition_says(seed: int):
    case = draw(seed)
    seqlen_q = case.indices.shape[2]
    segments = segments_beside(case.indices, case.documents, case.padding, case.batch, seqlen_q, case.seqlen_k)
    mask = from_chosen(case.indices, case.block, segments, case.seqlen_k, band_of(**case.keywords))
    expected = visible(case)
    assert mask.kind == "chosen" and mask.shape == tuple(expected.shape)
    assert torch.equal(mask.to_dense(), expected)
    assert torch.equal(mask.queries(0, seqlen_q).to_dense(), expected)
    assert torch.equal(mask.keys(case.seqlen_k // 2, case.seqlen_k).to_dense(), expected[..., case.seqlen_k // 2 :])


@pytest.mark.parametrize(
    "keywords", [{}, {"softcap": 2.0}, {"dropout_p": 0.3}, {"deterministic": True}, {"window_size": (9, None)}]
)
def test_calls_compute_what_they_do_with_bits(keywords):
    inputs, mask = leaves(), kept(choices())
    bits = as_bits(mask)
    assert bits.kind == "bits" and as_bits(mask) is bits and as_bits(bits) is bits
    results = []
    for each in (mask, bits):
        torch.manual_seed(2)
        out, lse = flash_dmattn_func(*inputs, each, bias=torch.ones(1, 1, 1, S), return_lse=True, **keywords)
        results.append([out, lse, *torch.autograd.grad(out.square().sum() + lse[lse > -9].sum(), inputs)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_calls_that_no_kernel_gathers_share_bits_that_are_made_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    made, pack = [], torch.ops.dmattn.pack_selection
    monkeypatch.setattr(torch.ops.dmattn, "pack_selection", lambda *given: made.append(1) or pack(*given))
    inputs, mask = leaves(), kept(choices())
    for more in ({}, {}, {"dropout_p": 0.3}, {"bias": torch.ones(1, 1, 1, S)}):
        flash_dmattn_func(*inputs, mask, **more).sum().backward()
    assert len(made) == 1


def test_functions_without_the_operator_take_bits():
    qkv, mask = torch.randn(1, S, 3, 2, 24), kept(choices())
    found = flash_dmattn_qkvpacked_func(qkv, mask)
    torch.testing.assert_close(found, flash_dmattn_qkvpacked_func(qkv, as_bits(mask)))
    inputs, used = leaves(), torch.tensor([70], dtype=torch.int32)
    found = flash_dmattn_func(*inputs, mask, seqlen_k_used=used)
    torch.testing.assert_close(found, flash_dmattn_func(*inputs, as_bits(mask), seqlen_k_used=used))


def test_the_operators_pass_the_checks_of_torch():
    signature = schemas.SIGNATURES["forward.chosen"]
    query, key, value = leaves(4, 2)
    given = dict(zip(signature.names, signature.defaults, strict=True))
    given |= {"query": query, "key": key, "value": value, "chosen": choices(2), "band_hi": 0, "block": BLOCK}
    torch.library.opcheck(torch.ops.dmattn.forward.chosen, tuple(given.values()))
    given |= {"k_segments": torch.zeros(1, 1, S, dtype=torch.int32)}
    torch.library.opcheck(torch.ops.dmattn.forward.chosen, tuple(given.values()))


def test_operators_refuse_what_does_not_fit():
    query, key, value = (part.detach() for part in leaves())
    call = torch.ops.dmattn.forward.chosen
    with pytest.raises(ValueError, match="chosen"):
        call(query, key, value, choices()[:, :, :50], block=BLOCK)
    with pytest.raises(ValueError, match="block must be between 1 and 128, got 129"):
        call(query, key, value, choices(), block=129)
    with pytest.raises(ValueError, match="indices must be -1"):
        call(query, key, value, choices() + 9, block=BLOCK)
    with pytest.raises(ValueError, match="beside chosen a mask has q_segments and k_segments at most, got end"):
        call(query, key, value, choices(), end=torch.zeros(1, 1, S, dtype=torch.int32), block=BLOCK)
    with pytest.raises(TypeError, match="indices must have dtype"):
        call(query, key, value, choices().float(), block=BLOCK)


def test_fields_that_are_no_chosen_blocks_are_refused():
    mask = kept(choices())
    parts = {"lengths": mask.lengths, "chosen": mask.chosen, "block_keys": mask.block_keys}
    assert TileMask(**parts).kind == "chosen"
    for changes in (
        {"block_keys": None}, {"chosen": None}, {"at_most": 3}, {"chosen": choices()[:, :, 1:]},
        {"row_tiles": as_bits(mask).row_tiles}, {"block_keys": torch.empty(129, 0)}, {"block_keys": torch.empty(3, 1)},
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError)):
            TileMask(**(parts | changes))


def attend(query: Tensor, key: Tensor, value: Tensor, indices: Tensor) -> Tensor:
    band = band_of(True, "bottom_right", (None, None))
    return flash_dmattn_func(query, key, value, from_chosen(indices, BLOCK, (None, None), key.shape[1], band))


def test_they_are_made_in_compiled_graphs_of_any_length():
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (64, 80, 90):
        inputs = [part.detach()[:, :length].requires_grad_() for part in leaves()]
        indices = choices()[:, :, :length].clamp(max=2)
        found, expected = compiled(*inputs, indices), attend(*inputs, indices)
        torch.testing.assert_close(found, expected)
        weights = torch.randn_like(found)
        for one, other in zip(
            torch.autograd.grad(found, inputs, weights), torch.autograd.grad(expected, inputs, weights), strict=True
        ):
            torch.testing.assert_close(one, other)


def test_exported_programs_take_them():
    class Attend(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: TileMask) -> Tensor:
            return flash_dmattn_func(query, key, value, mask)

    inputs, mask, other = [part.detach() for part in leaves()], kept(choices()), kept(choices().flip(2))
    program = torch.export.export(Attend(), (*inputs, mask)).module()
    for each in (mask, other):
        torch.testing.assert_close(program(*inputs, each), flash_dmattn_func(*inputs, each))
    with pytest.raises(Exception, match=r"exported with|[Gg]uard|shape|size"):
        program(*inputs, from_chosen(choices(), 32, (None, None), S, band_of(True, "bottom_right", (None, None))))


def test_products_are_counted_for_what_is_named():
    inputs, long = leaves(), kept(choices())
    with FlopCounterMode(display=False) as counter:
        flash_dmattn_func(*inputs, long)
    assert counter.get_total_flops() == 4 * 24 * 4 * min(S * (S + 1) // 2, S * 2 * BLOCK)


def shape(heads: int, device: str = "meta") -> Tensor:
    return torch.empty(1, 4096, heads, 128, dtype=torch.bfloat16, device=device)


def chosen_there(device: str = "meta") -> TileMask:
    indices = torch.empty(1, 1, 4096, 16, dtype=torch.int32, device=device)
    return from_chosen(indices, 64, (None, None), 4096, band_of(True, "bottom_right", (None, None)))


def test_explain_says_which_kernels_gather_and_which_take_bits():
    mask = chosen_there()
    found = explain(shape(16), shape(1), shape(1), mask, arch="9.0")
    assert found.forward.kernel == found.backward.kernel == "chosen" and "queries name" in found.mask
    assert found.backward.configuration["apart"] is not None
    few = explain(shape(2), shape(1), shape(1), mask, arch="9.0")
    assert few.forward.kernel == few.backward.kernel == "hopper"
    same = explain(shape(16), shape(1), shape(1), mask, arch="9.0", deterministic=True)
    assert same.forward.kernel == "chosen" and same.backward.kernel != "chosen"


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_explain_tells_of_the_architecture_that_is_asked_for(by: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")

    def explained(heads: int, version: str) -> Explanation:
        if by == "argument":
            return explain(shape(heads), shape(1), shape(1), chosen_there(), arch=version)
        monkeypatch.setenv(environment.ARCHITECTURE, version)
        return explain(shape(heads), shape(1), shape(1), chosen_there())

    for version, gathers in (
        ("9.0", True),
        ("8.6", False),
        ("8.0", False),
        ("7.5", False),
    ):  # tiles of 32 rows but on SM 9.0
        found = explained(64, version)
        for direction in (found.forward, found.backward):
            assert (direction.kernel == "chosen") == gathers, version
            assert direction.arch == f"SM{version}"
    small = explained(16, "8.6")
    assert small.forward.kernel == small.backward.kernel == "chosen" and small.forward.arch == "SM8.6"
    assert small.forward.configuration == asdict(SMALL_FORWARD) and not small.forward.evidence
    assert explained(16, "9.0").forward.configuration == asdict(FORWARD)


@pytest.mark.parametrize(("version", "gathers"), [("", True), ("9.0", True), ("8.6", False), ("7.5", False)])
def test_calls_of_a_gpu_are_dispatched_as_the_variable_says(
    version: str, gathers: bool, monkeypatch: pytest.MonkeyPatch
):
    launch = pytest.importorskip("dmattn_ops.kernels.chosen.launch")
    monkeypatch.setenv(environment.ARCHITECTURE, version)
    monkeypatch.setattr(arch, "_of_device", lambda index: arch.KNOWN[90])
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key = shape(64, "cuda:0"), shape(1, "cuda:0")
        mask = chosen_there("cuda:0")
        named = Chosen(mask.chosen, BLOCK)
        call = Call(query, key, key, None, NO_MASK, None, None, None, plain_options(1.0), chosen=named)
        assert (not run.reasons_against_lists("forward", call)) == gathers
        assert launch._architecture_of(call).sm == int(float(version or "9.0") * 10)


def test_a_cpu_keeps_bits():
    assert selection_mask(choices(), block=BLOCK).kind == "bits"

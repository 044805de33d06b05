"""`batch_invariant`: bits that depend on one batch entry, or on one packed sequence, alone."""

from __future__ import annotations

import pytest
import torch

import dmattn_ops
from dmattn_ops.call import NO_MASK, Call, Varlen, plain_options
from dmattn_ops.choice import config, epochs
from dmattn_ops.dispatch import run
from dmattn_ops.meta import fakes
from dmattn_ops.ops import schemas
from tests.support import invariant_cases as cases

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
ARCHITECTURES = ("8.0", "8.9", "9.0")
BATCHES = (1, 2, 7, 64)


@pytest.mark.parametrize("kind", cases.MASKS)
@pytest.mark.parametrize("seed", range(6))
def test_an_entry_has_the_same_bits_in_every_batch(kind, seed):
    given = cases.draw(100 * cases.MASKS.index(kind) + seed, kind, dtype=DTYPES[seed % 4])
    keywords = {"is_causal": seed % 2 == 1, "softcap": 5.0 * (seed % 3 == 2)}
    cases.check_parts(given, 4, [(0, 1), (2, 3), (1, 4)], **keywords)


@pytest.mark.parametrize("seed", range(8))
def test_a_packed_sequence_has_the_same_bits_beside_any_others(seed):
    cases.check_packed(seed, DTYPES[seed % 4])


def test_gathered_keys_are_those_of_one_entry():
    """Whether keys are gathered, and in which epochs, is decided for all entries of a call together otherwise."""
    query, key = torch.randn(5, 1200, 2, 16), torch.randn(5, 1200, 2, 16)
    scores = torch.randn(5, 2, 1200)
    scores[1:] = torch.arange(1200.0)  # nothing is worth gathering: the best keys are the last ones
    mask = dmattn_ops.dynamic_mask(scores, 100)
    given = cases.Batch(query, key, key.flip(1), mask, None, None)
    cases.check_parts(given, 5, [(0, 1), (1, 3)])


@pytest.mark.parametrize("kind", ["none", "dense", "dynamic"])
def test_plain_torch_operations_hold_it(kind, monkeypatch):
    monkeypatch.setattr(run, "cpu_kernels", lambda: "reference")
    for seed in range(4):
        given = cases.draw(900 + seed, kind, dtype=DTYPES[seed], longest=80)
        cases.check_parts(given, 4, [(0, 1), (1, 4)])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_does_not_matter(threads):
    given = cases.draw(3, "dense")
    expected, before = cases.results(given), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = cases.results(given)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_gradients_that_entries_share_are_their_sums():
    for dtype, close in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        rows = [torch.randn(3, 40, 2, 16, dtype=torch.float64).to(dtype) for _ in range(3)]
        found = []
        for switch in (True, False):
            bias = torch.linspace(-1, 1, 1600).view(1, 1, 40, 40).to(dtype).requires_grad_()
            sink = torch.tensor([0.5, -1.0], dtype=dtype, requires_grad=True)
            out = dmattn_ops.flash_dmattn_func(*rows, bias=bias, sink=sink, batch_invariant=switch)
            found.append(torch.autograd.grad(out.sin().sum(), (bias, sink)))
        for one, other in zip(*found, strict=True):
            assert one.dtype == dtype
            assert (one - other).norm() <= close * other.norm()


@pytest.mark.parametrize("form", ["dense", "packed"])
def test_the_gradient_of_a_sink_is_rounded_once_however_many_entries_share_it(form):
    """64 parts that were rounded to float32 one by one had two and a half times the error of one rounding, 2.9e-8."""
    query, key, value, grad = torch.randn(4, 64, 16, 4, 8, dtype=torch.float64)
    offsets = torch.arange(0, 65 * 16, 16, dtype=torch.int32)

    def gradient(sink, **options):
        if form == "dense":
            out = dmattn_ops.flash_dmattn_func(query, key, value, sink=sink, **options)
        else:
            rows = (part.flatten(0, 1) for part in (query, key, value))
            out = dmattn_ops.flash_dmattn_varlen_func(*rows, offsets, offsets, 16, 16, sink=sink, **options)
        return torch.autograd.grad((out.reshape(grad.shape) * grad).sum(), sink)[0]

    sink = torch.randn(4)
    exact = gradient(sink.double().requires_grad_())
    found = gradient(sink.requires_grad_(), batch_invariant=True)
    assert torch.equal(found, exact.float())


@pytest.mark.parametrize(
    "condition", [{}, {"is_causal": True}, {"is_causal": True, "window_size": (70, None)}, {"window_size": (150, 40)}]
)
@pytest.mark.parametrize("heads_kv", [1, 4])
def test_on_a_cpu_out_of_a_query_does_not_depend_on_how_many_there_are(condition, heads_kv):
    """Without a mask, as the documentation says: what a chunk or a step of decoding computes is what the whole call does."""
    for number, dtype in enumerate(DTYPES):
        seqlen_q, seqlen_k = 300, 333
        query, key = torch.randn(2, seqlen_q, 4, 64).to(dtype), torch.randn(2, seqlen_k, heads_kv, 64).to(dtype)
        keywords = {**condition, "return_lse": True, "batch_invariant": True}
        out, lse = dmattn_ops.flash_dmattn_func(query, key, key, causal_from=seqlen_k - seqlen_q, **keywords)
        for first, stop in ((299, 300), (0, 1), (17 + number, 140), (128, 300), (100, 101)):
            part = query[:, first:stop]
            diagonal = seqlen_k - seqlen_q + first
            of_part = dmattn_ops.flash_dmattn_func(part, key, key, causal_from=diagonal, **keywords)
            assert torch.equal(of_part[0], out[:, first:stop])
            assert torch.equal(of_part[1], lse[..., first:stop])


def test_it_implies_determinism():
    query = torch.randn(2, 4, 2, 8)
    for arguments in ((query, query, query),):
        signature = schemas.SIGNATURES["forward"]
        numbers = {"batch_invariant": True, "deterministic": False}
        given = [numbers.get(name, default) for name, default in zip(signature.names, signature.defaults, strict=True)]
        call, _ = fakes.dense_call("forward", (*arguments, *given[3:]))
        assert call.options.deterministic and call.options.batch_invariant
    with pytest.raises(TypeError, match="batch_invariant must be a bool, got int"):
        dmattn_ops.flash_dmattn_func(query, query, query, batch_invariant=1)
    with pytest.raises(TypeError, match="deterministic must be a bool, got int"):
        dmattn_ops.flash_dmattn_func(query, query, query, batch_invariant=True, deterministic=1)


def test_it_can_be_compiled():
    torch.compiler.reset()
    given = cases.draw(8, "dense")

    def attend(query, key, value, mask):
        return dmattn_ops.flash_dmattn_func(query, key, value, mask, is_causal=True, batch_invariant=True)

    compiled = torch.compile(attend, fullgraph=True)
    assert torch.equal(compiled(*given[:4]), attend(*given[:4]))
    qkv = torch.randn(2, 9, 3, 2, 8)
    found = torch.compile(dmattn_ops.flash_dmattn_qkvpacked_func, fullgraph=True)(qkv, batch_invariant=True)
    assert torch.equal(found, dmattn_ops.flash_dmattn_qkvpacked_func(qkv, batch_invariant=True))


def launches(arch, batch, seqlen_q, seqlen_k, kind="", **keywords):
    """Return what decides about the bits of each direction: kernel, configuration and packing."""
    heads, heads_kv, dim = 8, 2, 64
    query = torch.empty(batch, seqlen_q, heads, dim, dtype=torch.bfloat16)
    key = torch.empty(batch, seqlen_k, heads_kv, dim, dtype=torch.bfloat16)
    mask, bias = None, None
    if kind == "dynamic":
        mask = dmattn_ops.dynamic_mask(torch.zeros(batch, 2, seqlen_k), 512)
    elif kind == "shared bias":
        bias = torch.empty(1, heads, seqlen_q, seqlen_k, dtype=torch.bfloat16)
    elif kind == "bias":
        bias = torch.empty(batch, heads, seqlen_q, seqlen_k, dtype=torch.bfloat16)
    found = dmattn_ops.explain(query, key, key, mask, bias, arch=arch, **keywords)
    return [_decided(each) for each in (found.forward, found.backward)]


def _decided(launch):
    return launch.choice, launch.kernel, launch.configuration, launch.packing and launch.packing.packing


SHAPES = [
    (1, 9000, ""), (1, 300, ""), (512, 512, ""), (1024, 5000, ""), (8192, 8192, "dynamic"), (512, 512, "bias"),
    (512, 512, "shared bias"),
]  # fmt: skip


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "kind"), SHAPES)
def test_what_is_chosen_does_not_depend_on_the_batch(arch, seqlen_q, seqlen_k, kind):
    chosen = [
        launches(arch, batch, seqlen_q, seqlen_k, kind, batch_invariant=True) for batch in BATCHES[: 3 if kind else 4]
    ]
    assert all(each == chosen[0] for each in chosen)


def test_without_it_what_is_chosen_depends_on_the_batch():
    different = [
        shape
        for shape in SHAPES
        if any(launches(arch, 1, *shape) != launches(arch, 7, *shape) for arch in ARCHITECTURES)
    ]
    assert len(different) > 2


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_is_chosen_for_packed_sequences_does_not_depend_on_them(arch):
    def chosen(lengths, longest):
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        rows = torch.empty(int(offsets[-1]), 4, 64, dtype=torch.bfloat16)
        packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}
        found = dmattn_ops.explain(rows, rows, rows, arch=arch, batch_invariant=True, **packed)
        return [_decided(each) for each in (found.forward, found.backward)]

    one = chosen([300], 300)
    for lengths, longest in (([300], 10000), ([300, 9000], 9000), ([300] + [1] * 500, 300), ([40, 3, 300], 400)):
        assert chosen(lengths, longest) == one


@pytest.mark.parametrize(
    ("kind", "dim", "kernels"),
    [
        ("full", 64, ("hopper", "hopper")), ("causal", 128, ("hopper", "hopper")), ("window", 96, ("hopper", "hopper")),
        ("soft cap", 128, ("hopper", "hopper")), ("key bias", 64, ("hopper", "hopper")), ("bias", 128, ("hopper", "hopper")),
        ("bits", 64, ("hopper", "hopper256")), ("documents", 128, ("hopper", "hopper256")),
        ("dynamic", 128, ("hopper", "hopper256")), ("causal", 256, ("hopper", "hopper256")),
    ],
)  # fmt: skip
def test_the_kernels_for_sm_90_take_batch_invariant_calls(kind, dim, kernels):
    for batch in (1, 3):
        given, keywords = cases.of_kind(kind, batch, 512, (8, 2), dim, "cpu")
        found = dmattn_ops.explain(*given[:5], arch="9.0", batch_invariant=True, **keywords)
        assert (found.forward.kernel, found.backward.kernel) == kernels


def test_packed_sequences_on_sm_90_take_them_but_for_hidden_keys():
    rows, offsets = torch.empty(300, 4, 64, dtype=torch.bfloat16), torch.tensor([0, 100, 300], dtype=torch.int32)
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 200, "max_seqlen_k": 200}
    found = dmattn_ops.explain(rows, rows, rows, arch="9.0", batch_invariant=True, **packed)
    assert (found.forward.kernel, found.backward.kernel) == ("hopper", "hopper256")
    hidden = torch.ones(1, 300, dtype=torch.bool)
    found = dmattn_ops.explain(rows, rows, rows, hidden, arch="9.0", batch_invariant=True, **packed)
    assert (found.forward.kernel, found.backward.kernel) == ("portable", "portable")
    assert all("computed again, which is not batch-invariant" in str(each) for each in (found.forward, found.backward))


def test_whether_a_bias_is_shared_does_not_depend_on_the_batch():
    """A bias with a batch of 1 and all heads is shared by the entries of a batch, and by none where there is one entry."""
    for batch in (1, 3):
        rows, bias = (
            torch.empty(batch, 256, 4, 64, dtype=torch.bfloat16),
            torch.empty(1, 4, 256, 256, dtype=torch.bfloat16),
        )
        taken = [
            dmattn_ops.explain(rows, rows, rows, bias=bias, arch="9.0", batch_invariant=switch).backward.kernel
            for switch in (True, False)
        ]
        assert taken == ["portable", "portable" if batch == 1 else "hopper"]


def test_tuned_configurations_are_not_taken(monkeypatch):
    asked = []
    monkeypatch.setattr(run.tuning, "entries", lambda: asked.append(1) or {"some": {}})
    monkeypatch.setattr(run.tuning, "place", lambda *_: pytest.fail("asked for the user's cache"))
    on_gpu = torch.empty(0)
    monkeypatch.setattr(type(on_gpu), "is_cuda", property(lambda _: True))
    monkeypatch.setattr(run.arch, "physical", lambda _: run.arch.KNOWN[80])
    call = call_of(3, 64, 64)
    assert run.offered("forward", call, run.arch.KNOWN[80]).row.kernel == "portable"
    assert not asked


def call_of(batch, seqlen_q, seqlen_k, **more):
    query = torch.empty(batch, seqlen_q, 4, 64, dtype=torch.bfloat16)
    key = torch.empty(batch, seqlen_k, 4, 64, dtype=torch.bfloat16)
    options = plain_options(1.0, deterministic=True, batch_invariant=True)
    return Call(query, key, key, None, NO_MASK, None, None, None, options)._replace(**more)


def test_keys_are_shared_by_as_many_programs_in_every_batch():
    from dmattn_ops.kernels.portable import arguments, forward

    row = config.PortableForward(16, 64, 4, 2, per_sm=2)
    splits = {
        forward.splits_of(call, arguments.extent(call), row, 108)
        for batch in BATCHES
        for call in [call_of(batch, 1, 9000)]
    }
    assert len(splits) == 1 and splits.pop() > 1
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    rows = torch.empty(1, 4, 64)
    packed = call_of(1, 1, 1, query=rows, key=torch.empty(9000, 4, 64), varlen=Varlen(offsets, offsets, 1, 9000, False))
    assert forward.splits_of(packed, arguments.extent(packed), row, 108) == 1


def test_lists_of_intervals_are_made_or_not_by_the_size_of_one_entry(monkeypatch):
    from dmattn_ops.kernels import interval_lists

    limits = torch.empty(1, dtype=torch.int32).expand(64, 4, 2048)
    invariant = call_of(64, 2048, 2048, mask=dmattn_ops.call.Mask(start=limits, end=limits))
    plain = invariant._replace(options=invariant.options._replace(batch_invariant=False))
    words = 4 * 2 * 16 * 20
    monkeypatch.setattr(interval_lists, "_LONGEST_LISTS", words)
    monkeypatch.setattr(interval_lists, "_LONGEST_OF_ENTRY", words)
    assert interval_lists.too_long(plain) and not interval_lists.too_long(invariant)
    monkeypatch.setattr(interval_lists, "_LONGEST_OF_ENTRY", words - 1)
    assert interval_lists.too_long(invariant)


def test_heads_go_in_the_same_passes_in_every_batch():
    found = set()
    for batch in BATCHES:
        end = torch.empty(1, dtype=torch.int32).expand(batch, 4, 32768)
        mask = dmattn_ops.call.Mask(end=end, at_most=1024)
        call = call_of(
            1,
            1,
            1,
            mask=mask,
            query=torch.empty(1).expand(batch, 32768, 4, 128),
            key=torch.empty(1).expand(batch, 32768, 4, 128),
        )
        options = call.options._replace(band_hi=0)
        found.add(epochs.packing_for(call._replace(value=call.key, options=options)))
    assert len(found) == 1 and None not in found


def test_explain_says_what_it_does():
    query = torch.empty(2, 64, 4, 64, dtype=torch.bfloat16)
    assert "one batch entry after another" in str(dmattn_ops.explain(query, query, query, batch_invariant=True))
    found = dmattn_ops.explain(query, query, query, batch_invariant=True, arch="9.0")
    assert found.backward.kernel == "hopper"
    assert "as for one batch entry alone" in str(found.forward) and "as for one batch entry alone" in str(
        found.backward
    )
    with pytest.raises(ValueError, match="seqlen_k_used must be None for packed sequences"):
        offsets = torch.tensor([0, 64], dtype=torch.int32)
        packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 64, "max_seqlen_k": 64}
        dmattn_ops.explain(*[query[0]] * 3, seqlen_k_used=offsets, **packed)

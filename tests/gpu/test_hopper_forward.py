"""The SM 9.0 forward on a GPU: lengths, bands, groups, masks, strides and repeated launches, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.architecture import skip_file_without_hopper

pytestmark = pytest.mark.gpu
skip_file_without_hopper()

from dmattn_ops.call import NO_MASK, UNBOUNDED, Call, Mask, Result, plain_options  # noqa: E402
from dmattn_ops.choice import config, resolve  # noqa: E402
from dmattn_ops.kernels.hopper.forward import launch as hopper_forward  # noqa: E402
from tests.support.tile_builder import build_lists, build_tiles, on_gpu, tile_states  # noqa: E402

DIMS = [64, 128, 256]
LENGTHS = [(512, 512), (640, 640), (333, 517), (517, 333), (1, 300), (100, 77), (700, 1)]
BANDS = [(-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, 0), (-130, 70), (5, 40), (-UNBOUNDED, -200), (-5, UNBOUNDED)]
ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 6e-4}  # relative L2


@pytest.fixture(autouse=True)
def blocks_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep small calls from getting smaller blocks than the row of D 64 has, which the tests are to cover."""
    monkeypatch.setattr(resolve, "_ends_sooner_in_tiles_of_128", lambda *_: False)


def draw(batch: int, seqlen: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(batch, seqlen, heads, dim, device="cuda").to(dtype)


def in_band(seqlen_q: int, seqlen_k: int, band: tuple[int, int]) -> Tensor:
    """Return which keys each query sees, `[1, 1, Sq, Sk]`."""
    i, j = torch.arange(seqlen_q, device="cuda")[:, None], torch.arange(seqlen_k, device="cuda")[None]
    return ((j >= i + band[0]) & (j <= i + band[1]))[None, None]


def launch(
    inputs: tuple[Tensor, Tensor, Tensor],
    band: tuple[int, int] = (-UNBOUNDED, UNBOUNDED),
    tiles: Mask = NO_MASK,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Run the launcher with dispatch's configuration on outputs full of NaN."""
    query, _, value = inputs
    out = query.new_full((*query.shape[:3], value.shape[-1]), math.nan)
    lse = query.new_full((query.shape[0], query.shape[2], query.shape[1]), math.nan, dtype=torch.float32)
    tail = torch.full_like(lse, math.nan)
    options = plain_options(query.shape[-1] ** -0.5, *band, softcap=softcap)
    call = Call(*inputs, None, tiles, None, None, None, options)
    assert hopper_forward.refusals(call) == []
    dim = max(query.shape[-1], value.shape[-1])
    row = next(row for row in config.FORWARD if row.kernel == "hopper" and row.dim >= dim)
    result = Result(out, lse, tail, None)
    hopper_forward.forward(call, result, resolve.forward_config(row.config, call, result))
    return out, lse + tail


def compare(
    found: tuple[Tensor, Tensor], inputs: tuple[Tensor, Tensor, Tensor], visible: Tensor, softcap: float = 0.0
) -> None:
    """Compare with float64; rows without a key must be exactly 0 and -inf. tanh is right to 2 ** -11."""
    query, key, value = (tensor.double().transpose(1, 2) for tensor in inputs)
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).mT * inputs[0].shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1)
    empty = lse == -math.inf
    weights = (scores - lse[..., None]).exp().masked_fill(empty[..., None], 0.0)
    out = (weights @ value.repeat_interleave(group, 1)).transpose(1, 2)
    assert torch.equal(found[1] == -math.inf, empty)
    assert (found[0].transpose(1, 2)[empty] == 0).all()
    assert ((found[1].double() - lse)[~empty].abs() <= 1e-3 + softcap * 2**-11).all()
    rounding = ROUNDING[found[0].dtype] * (1 if softcap == 0 else 2)
    assert (found[0].double() - out).norm() <= rounding * out.norm() + 1e-6


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_any_lengths(dim: int, lengths: tuple[int, int]) -> None:
    inputs = draw(2, lengths[0], 4, dim), draw(2, lengths[1], 2, dim), draw(2, lengths[1], 2, dim)
    for band in ((-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, lengths[1] - lengths[0])):
        compare(launch(inputs, band), inputs, in_band(*lengths, band))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("band", BANDS)
def test_any_band_and_float16(dim: int, band: tuple[int, int]) -> None:
    inputs = (
        draw(1, 700, 2, dim, torch.float16),
        draw(1, 900, 2, dim, torch.float16),
        draw(1, 900, 2, dim, torch.float16),
    )
    compare(launch(inputs, band), inputs, in_band(700, 900, band))


@pytest.mark.parametrize(("dim", "dim_v"), [(8, 64), (40, 16), (96, 128), (120, 72), (192, 136)])
def test_head_dimensions_between_tiles(dim: int, dim_v: int) -> None:
    inputs = draw(2, 300, 3, dim), draw(2, 300, 3, dim), draw(2, 300, 3, dim_v)
    band = (-UNBOUNDED, 0)
    compare(launch(inputs, band), inputs, in_band(300, 300, band))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_small_calls_in_smaller_blocks(
    lengths: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    chosen = []
    forward = hopper_forward.forward
    monkeypatch.setattr(hopper_forward, "forward", lambda *given: chosen.append(given[2].block_m) or forward(*given))
    seqlen_q, seqlen_k = lengths
    inputs = draw(2, seqlen_q, 4, 64, dtype), draw(2, seqlen_k, 2, 64, dtype), draw(2, seqlen_k, 2, 64, dtype)
    for band in ((-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, lengths[1] - lengths[0]), (-130, 70)):
        compare(launch(inputs, band), inputs, in_band(*lengths, band))
    assert set(chosen) == {128}


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("growing", [True, False])
def test_maxima_that_change_with_every_tile(dim: int, dtype: torch.dtype, growing: bool) -> None:
    """P of a tile are first computed with the maxima of earlier ones: here these are far too small, or far too large."""
    query, key, value = draw(1, 1024, 2, dim, dtype), draw(1, 1024, 2, dim), draw(1, 1024, 2, dim, dtype)
    size = torch.linspace(0, 30, 1024, device="cuda")
    key = (key * (size if growing else size.flip(0))[:, None, None]).to(dtype)
    for band in ((-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, 0)):
        compare(launch((query, key, value), band), (query, key, value), in_band(1024, 1024, band))


@pytest.mark.parametrize("dim", DIMS)
def test_a_score_that_is_no_number_reaches_its_row_only(dim: int) -> None:
    query, key, value = draw(1, 512, 2, dim), draw(1, 512, 2, dim), draw(1, 512, 2, dim)
    query[0, 300, 1] = math.nan
    out, lse = launch((query, key, value))
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 300, 1]]
    assert lse.isnan().nonzero().tolist() == [[0, 1, 300]]


@pytest.mark.parametrize("dim", DIMS)
def test_soft_cap(dim: int) -> None:
    inputs = 3 * draw(1, 400, 2, dim), draw(1, 400, 2, dim), draw(1, 400, 2, dim)
    band = (-UNBOUNDED, 0)
    compare(launch(inputs, band, softcap=2.0), inputs, in_band(400, 400, band), softcap=2.0)


@pytest.mark.parametrize("dim", DIMS)
def test_views_are_read_and_written_in_place(dim: int) -> None:
    packed = draw(2, 260, 3, 4 * dim).view(2, 260, 3, 4, dim)
    query, key, value = packed.unbind(2)
    key = key.transpose(1, 2).contiguous().transpose(1, 2)
    inputs = query, key, value
    compare(launch(inputs), inputs, in_band(260, 260, (-UNBOUNDED, UNBOUNDED)))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("mask_heads", [1, 2, 4])
@pytest.mark.parametrize("density", [0.02, 0.5, 1.0])
def test_bits_of_any_heads_and_density(dim: int, mask_heads: int, density: float) -> None:
    torch.manual_seed(3)
    batch, seqlen_q, seqlen_k = 2, 700, 433
    keep = torch.rand(batch, mask_heads, seqlen_q, seqlen_k) < density
    keep[:, :, ::7] = False  # rows without a key
    keep[:, :, 128:256, 128:256] = True  # a full tile
    keep[:, :, 256:384, :128] = False  # an empty one
    inputs = draw(batch, seqlen_q, 4, dim), draw(batch, seqlen_k, 2, dim), draw(batch, seqlen_k, 2, dim)
    tiles = on_gpu(build_tiles(keep))
    visible = keep.cuda().repeat_interleave(4 // mask_heads, 1)
    first = launch(inputs, (-UNBOUNDED, 3), tiles)  # the lists hold the band already: this one must be ignored
    compare(first, inputs, visible)
    for _ in range(5):
        again = launch(inputs, (-UNBOUNDED, 3), tiles)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("band", [(-UNBOUNDED, UNBOUNDED), (-200, 0)])
@pytest.mark.parametrize("documents", [True, False])
def test_segments_inside_a_band(dim: int, band: tuple[int, int], documents: bool) -> None:
    torch.manual_seed(4)
    batch, seqlen, heads = 2, 777, 4
    if documents:
        queries = torch.randint(0, 4, (batch, seqlen), dtype=torch.int32).sort(-1).values
        keys = queries[:, None].contiguous()
    else:
        queries = torch.zeros(batch, seqlen, dtype=torch.int32)
        keys = -torch.randint(0, 2, (batch, heads, seqlen), dtype=torch.int32)
    visible = (queries[:, None, :, None] == keys[:, :, None]).cuda() & in_band(seqlen, seqlen, band)
    lists = build_lists(tile_states(visible.cpu())).cuda()
    tiles = Mask(row_tiles=lists, q_segments=queries.cuda() if documents else None, k_segments=keys.cuda())
    inputs = draw(batch, seqlen, heads, dim), draw(batch, seqlen, heads, dim), draw(batch, seqlen, heads, dim)
    compare(launch(inputs, band, tiles), inputs, visible)


@pytest.mark.parametrize("dim", DIMS)
def test_more_work_than_blocks_repeats_bitwise_and_in_graphs(dim: int) -> None:
    inputs = draw(4, 1024, 16, dim), draw(4, 1024, 16, dim), draw(4, 1024, 16, dim)
    band = (-UNBOUNDED, 0)
    first = launch(inputs, band)
    compare(first, inputs, in_band(1024, 1024, band))
    for _ in range(20):
        assert torch.equal(first[0], launch(inputs, band)[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launch(inputs, band)
    for _ in range(3):
        captured[0].fill_(math.nan)
        graph.replay()
        assert torch.equal(first[0], captured[0])


def test_nan_behind_the_ends_never_arrives() -> None:
    inputs = tuple(torch.full((1, 256, 2, 64), math.nan, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for tensor in inputs:
        tensor[:, :200] = draw(1, 200, 2, 64)
    views = tuple(tensor[:, :200] for tensor in inputs)
    compare(launch(views), views, in_band(200, 200, (-UNBOUNDED, UNBOUNDED)))


def test_refusals_name_every_reason() -> None:
    query, key, value = (draw(1, 64, 2, 64).float() for _ in range(3))
    options = plain_options(-1.0, 0, 0, dropout_p=0.5)._replace(k_origin=8)
    call = Call(query, key, value, None, Mask(k_segments=query), None, None, None, options)
    reasons = hopper_forward.refusals(call)
    assert len(reasons) == 4
    assert any("float32" in reason for reason in reasons)

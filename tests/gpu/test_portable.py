"""The portable kernels on a GPU: every dtype and head dimension, random problems, and bitwise repeats on a busy device."""

from __future__ import annotations

import pytest
import torch

from dmattn_ops.call import Call, Gradients, Result, Saved
from dmattn_ops.choice import arch, config
from dmattn_ops.choice.config import PortableBackward, PortableForward

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from dmattn_ops.call import NO_MASK, plain_options  # noqa: E402
from dmattn_ops.kernels.portable import backward as portable_backward  # noqa: E402
from dmattn_ops.kernels.portable import forward as portable_forward  # noqa: E402
from tests.interpreter.cases import NASTY, PORTABLE_ROWS, of_row, random_problem, row_id  # noqa: E402
from tests.interpreter.problems import Problem, build, check, run  # noqa: E402
from tests.support.architecture import version  # noqa: E402

DIMS = (1, 8, 32, 40, 64, 80, 96, 128, 192, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def portable_row(rows: tuple[config.Row, ...], width: int, itemsize: int) -> config.Config:
    """Return the first portable row for this GPU, a head dimension and an element size; skip the test where none fits."""
    portable = [row for row in rows if row.kernel == "portable" and row.sm <= version()]
    newest = max(row.sm for row in portable)
    fitting = (r.config for r in portable if r.sm == newest and r.dim >= width and r.itemsize >= itemsize)
    return next(fitting, None) or pytest.skip(f"no portable kernel of SM {newest / 10} takes heads of {width}")


def configurations(problem: Problem) -> tuple[PortableForward, PortableBackward]:
    """Return the portable configurations for a problem on this GPU."""
    width, itemsize = max(problem.head_dim, problem.value_dim), problem.dtype.itemsize
    return portable_row(config.FORWARD, width, itemsize), portable_row(config.BACKWARD, width, itemsize)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_element_mask_at_every_dimension(dim: int, dtype: torch.dtype) -> None:
    problem = Problem(
        batch=2, heads=4, seqlen_q=257, seqlen_k=300, head_dim=dim, value_dim=dim, dtype=dtype, mask="bits",
        mask_heads=4, scale=dim**-0.5, transposed=True, grad_lse=True,
    )  # fmt: skip
    check(problem, "cuda", *configurations(problem))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_biased_band_at_every_dimension(dim: int, dtype: torch.dtype) -> None:
    problem = Problem(
        seqlen_q=300, seqlen_k=400, head_dim=dim, value_dim=DIMS[-1 - DIMS.index(dim)], dtype=dtype, band_hi=100,
        bias=(1, 1, 300), softcap=20.0, scale=dim**-0.5, dropout_p=0.2,
    )  # fmt: skip
    check(problem, "cuda", *configurations(problem))


@pytest.mark.parametrize("dim", [*DIMS, 512, 1024])
def test_wide_bias_of_every_element_fits_at_every_dimension(dim: int) -> None:
    """At lengths that are multiples of 16 such a bias is loaded through shared memory, stage by stage."""
    problem = Problem(
        heads=2, seqlen_q=256, seqlen_k=256, head_dim=dim, value_dim=dim, dtype=torch.bfloat16, bias=(1, 2, 256),
        bias_dtype=torch.float32, scale=dim**-0.5,
    )  # fmt: skip
    check(problem, "cuda", *configurations(problem))


@pytest.mark.parametrize("pairwise", [False, True], ids=["", "pairwise"])
@pytest.mark.parametrize(("forward", "backward"), PORTABLE_ROWS, ids=row_id)
def test_row_of_any_architecture(forward: config.Row, backward: config.Row, pairwise: bool) -> None:
    shared = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    if max(forward.shared_memory, backward.shared_memory) > shared or arch.KNOWN[forward.sm].shared_memory > shared:
        pytest.skip("its blocks are made for more shared memory than there is here")
    check(of_row(forward, pairwise), "cuda", forward.config, backward.config)


@pytest.mark.parametrize("name", NASTY)
def test_nasty_case_stays_within_budget(name: str) -> None:
    check(NASTY[name], "cuda", *configurations(NASTY[name]))


@pytest.mark.parametrize("seed", range(1000, 1060))
def test_random_problem_stays_within_budget(seed: int) -> None:
    problem = random_problem(seed)
    check(problem, "cuda", *configurations(problem))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_odd_strides_under_a_biased_softcap(dtype: torch.dtype) -> None:
    """ptxas 12.8 loses the high word of a wgmma descriptor here where blocks of 64 queries are taken."""
    problem = Problem(
        seqlen_q=300, seqlen_k=400, head_dim=128, value_dim=1, dtype=dtype, band_hi=100, bias=(1, 1, 300), softcap=20.0,
        scale=128**-0.5,
    )  # fmt: skip
    check(problem, "cuda", *configurations(problem))


def test_few_queries_and_many_keys() -> None:
    problem = Problem(heads=2, seqlen_q=3, seqlen_k=40000, head_dim=128, value_dim=128, dtype=torch.bfloat16, scale=0.1)
    check(problem, "cuda", *configurations(problem))


@pytest.mark.parametrize("mask", ["none", "bits", "segments"])
def test_repeats_on_a_busy_gpu_are_bitwise_equal(mask: str) -> None:
    problem = Problem(
        batch=2, heads=4, kv_heads=2, seqlen_q=1000, seqlen_k=1100, head_dim=64, value_dim=64, dtype=torch.bfloat16,
        mask=mask, bias=(1, 1, 1000), band_hi=100, dropout_p=0.1,
    )  # fmt: skip
    case = build(problem)
    first = run(problem, case, "cuda", *configurations(problem))
    noise, matrix = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for _ in range(10):
        with torch.cuda.stream(noise):
            matrix = torch.nn.functional.normalize(matrix @ matrix)
        again = run(problem, case, "cuda", *configurations(problem))
        for name in first:
            assert torch.equal(first[name], again[name]), name


def test_offsets_beyond_31_bits() -> None:
    batch, heads, seqlen, dim = 2, 1, 1 << 16, 64
    wide = torch.empty(batch, seqlen, 1 << 14, dtype=torch.bfloat16, device="cuda")  # 2^31 elements
    query = wide[:, :, -dim:].view(batch, seqlen, heads, dim).normal_()
    key, value = (wide[:, -512:, n * dim : (n + 1) * dim].view(batch, 512, heads, dim).normal_() for n in (0, 1))
    out, lse = torch.empty_like(query, memory_format=torch.contiguous_format), torch.empty(2, 1, seqlen, device="cuda")
    call = Call(query, key, value, None, NO_MASK, None, None, None, plain_options(0.125, deterministic=True))
    tail = torch.empty_like(lse)
    row = portable_row(config.FORWARD, dim, 2)
    portable_forward.forward(call, Result(out, lse, tail, None), row)
    last = slice(seqlen - 300, seqlen)
    scores = (query[1, last, 0].double() @ key[1, :, 0].double().T) * 0.125
    truth = scores.softmax(-1) @ value[1, :, 0].double()
    assert (out[1, last, 0].double() - truth).norm() / truth.norm() < 0.01
    backward_row = portable_row(config.BACKWARD, dim, 2)
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))
    portable_backward.backward(call, Saved(out, lse, tail), Gradients(out, None, dq, dk, dv, None), backward_row)
    assert dq[1, last].isfinite().all()
    assert dk.isfinite().all()

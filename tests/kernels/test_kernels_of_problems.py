"""How many kernels random problems for a GPU compile, counted without compiling one and without a GPU."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dmattn_ops.choice import arch
from dmattn_ops.dispatch import run as dispatch
from dmattn_ops.testing.check import _dense_results, _varlen_results
from dmattn_ops.testing.combinations import COMBINATIONS
from dmattn_ops.testing.inputs import make_inputs, make_varlen_inputs
from dmattn_ops.testing.problem import Problem, draw

pytest.importorskip("triton")
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key

from dmattn_ops.api.stand_in import Driver
from dmattn_ops.kernels.hopper.forward import launch as hopper_forward
from dmattn_ops.kernels.masks import launch as masks
from dmattn_ops.launching import launch

HOPPER = arch.KNOWN[90]


@pytest.fixture
def kernels_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Problem], set]:
    """A function that makes a problem's call on the CPU as SM 9.0 would, and returns what it launches, as Triton tells it apart."""
    found: set[tuple[str, ...]] = set()

    def note(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        named |= {"debug": False, "instrumentation_mode": knobs.compilation.instrumentation_mode}
        _, keys, _, _, binder = kernel.device_caches[HOPPER.sm]
        _, specialization, options = binder(*arguments, **named)
        folder = kernel.__module__.removeprefix("dmattn_ops.kernels.")
        found.add((f"{folder}.{kernel.__name__}", compute_cache_key(keys, specialization, options)))
        return None  # so that `launch` asks again next time

    offered, native = dispatch.offered, dispatch.kernels_of_masks(torch.device("cpu"))

    def both(name: str) -> Callable[..., None]:
        def make(*arguments: Any) -> None:
            getattr(masks, name)(*arguments)
            getattr(native, name)(*arguments)  # lists that the CPU accepts

        return make

    monkeypatch.setattr(driver, "_active", Driver(HOPPER.sm))
    monkeypatch.setattr(JITFunction, "run", note)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(arch, "physical", lambda device: HOPPER)
    monkeypatch.setattr(dispatch, "architecture_of", lambda call: HOPPER)
    monkeypatch.setattr(dispatch, "offered", lambda direction, call, *rest: offered(direction, call, HOPPER))
    made = SimpleNamespace(pack_mask=both("pack_mask"), list_tiles=both("list_tiles"))
    monkeypatch.setattr(dispatch, "kernels_of_masks", lambda device: made)
    monkeypatch.setattr(hopper_forward, "_counter", lambda device: torch.zeros(2, dtype=torch.int32))

    def launched(problem: Problem) -> set[tuple[str, ...]]:
        found.clear()
        problem = replace(problem, place="", rows="" if problem.rows == "far" else problem.rows)
        varlen = problem.variant == "varlen"
        inputs = make_varlen_inputs(problem, "cpu") if varlen else make_inputs(problem, "cpu")
        (_varlen_results if varlen else _dense_results)(problem, inputs)
        return set(found)

    return launched


@pytest.mark.filterwarnings("ignore:dmattn_ops has no kernels")
def test_problems_compile_few_kernels_and_launch_each_of_them(kernels_of: Callable[[Problem], set]) -> None:
    found: set[tuple[str, ...]] = set()
    for seed in range(3 * COMBINATIONS):
        found |= kernels_of(draw(seed, "cuda"))
    count = Counter(name for name, _ in found)
    assert sum(count.values()) < 7 * COMBINATIONS, count
    expected = {
        "hopper.forward.kernel.forward_kernel": 40, "hopper.backward.kernel.backward_kernel": 20,
        "hopper.backward_256.keys.keys_kernel": 15, "hopper.backward_256.queries.queries_kernel": 15,
        "hopper.dbias.launch.shared_bias_kernel": 4, "portable.again._forward_again": 15,
        "portable.again._queries_again": 15, "portable.again._keys_again": 15, "portable.forward.forward_kernel": 40,
        "portable.merge.merge_kernel": 10, "portable.keys.keys_kernel": 40, "portable.queries.queries_kernel": 40,
        "portable.dbias.dbias_kernel": 8,
    }  # fmt: skip
    assert {name: count[name] for name, least in expected.items() if count[name] < least} == {}, count


def test_a_sink_or_a_dtype_is_counted_as_a_kernel_of_its_own(kernels_of: Callable[[Problem], set]) -> None:
    plain = Problem(dtype="bfloat16", dim=64, dim_v=64, seqlen_q=200, seqlen_k=200, heads=2, heads_k=2)
    known = kernels_of(plain)
    assert {name for name, _ in known} == {
        "hopper.forward.kernel.forward_kernel", "hopper.backward.kernel.backward_kernel", "hopper.backward.rows.prepare_kernel"
    }  # fmt: skip
    assert kernels_of(replace(plain, seed=7, softmax_scale=0.5, seqlen_q=202, seqlen_k=203)) - known
    assert kernels_of(replace(plain, seed=7, softmax_scale=0.5)) == known, "values decide nothing"
    for change in ({"sink": "own"}, {"dtype": "float16"}, {"maximum": True}, {"lse_grad": True}):
        assert kernels_of(replace(plain, **change)) - known, change


def test_kernels_that_compute_again_come_behind_masked_calls_alone(kernels_of: Callable[[Problem], set]) -> None:
    plain = Problem(dtype="bfloat16", dim=64, dim_v=64, seqlen_q=200, seqlen_k=200, heads=2, heads_k=2, batch=2)
    again = {f"portable.again.{name}" for name in ("_forward_again", "_queries_again", "_keys_again")}
    for changes, behind in (
        ({"is_causal": True, "left": 50}, set()),
        ({"bias": True, "bias_shape": "h"}, set()),
        ({"variant": "varlen", "batch": 3, "is_causal": True}, set()),
        ({"mask": "random"}, again),
        ({"documents": True}, again),
        ({"intervals": "random", "deterministic": True}, again),
        ({"variant": "varlen", "batch": 3, "mask": "keys", "mask_shape": "h"}, again),
    ):
        assert {name for name, _ in kernels_of(replace(plain, **changes))} & again == behind, changes


FEW_QUERIES = Problem(
    seed=91830, variant="varlen", dtype="bfloat16", batch=2, heads=1, heads_k=1, seqlen_q=1, seqlen_k=336, dim=144, dim_v=144,
    mask="random", mask_shape="bhq", steep=1e6,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:dmattn_ops has no kernels")
def test_all_kernels_of_a_call_round_scores_in_the_same_unit(
    kernels_of: Callable[[Problem], set], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of 2.4e6 differ by 0.1 between natural units and log2 units: probabilities of another unit are off by as much.

    The first problem was found on a GPU: dv was off by 5%, since one query over many keys is computed by the portable forward.
    """
    note, natural = JITFunction.run, {}

    def run(kernel: JITFunction, *arguments: Any, **named: Any) -> Any:
        in_records = [record.NATURAL for record in named.values() if hasattr(record, "NATURAL")]
        for unit in (named["NATURAL"],) if "NATURAL" in named else in_records:
            natural[kernel.__module__, kernel.__name__] = unit
        return note(kernel, *arguments, **named)

    monkeypatch.setattr(JITFunction, "run", run)
    for problem in (FEW_QUERIES, *(draw(seed, "cuda") for seed in range(2 * COMBINATIONS))):
        natural.clear()
        kernels_of(problem)
        assert len(set(natural.values())) <= 1, (natural, problem)
        assert problem is not FEW_QUERIES or len(natural) > 1

"""Calls with a mask are repeated by plans, and launch nothing for it that was done before: for SM 9.0, without a GPU."""

from collections import Counter

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
import dmattn_ops
from dmattn_ops.call import NO_MASK, UNBOUNDED
from dmattn_ops.launching import plan, plans
from dmattn_ops.ops import schemas

B, S, H, HKV, D = 2, 384, 4, 2, 128
ATTENTION = {"forward": ["forward_kernel"], "backward": ["prepare_kernel", "backward_kernel"]}
# Behind masked calls comes what computes again where hidden rows made NaN.
AGAIN = {"forward": ["_forward_again"], "backward": ["_queries_again", "_keys_again"]}
MASKED = {direction: kernels + AGAIN[direction] for direction, kernels in ATTENTION.items()}
# Where there are few key tiles, several blocks divide the queries of each.
SHARED = ATTENTION | {"backward": [*ATTENTION["backward"], "add_shares_kernel"]}
PREPARES = 2  # launches that list tiles


def causal():
    return NO_MASK


def documents():
    return dmattn_ops.prepare_mask(documents=torch.zeros(B, S, dtype=torch.int32), is_causal=True).mask


def ends(of_one):
    """Intervals that say the same as a causal condition: what one tensor says, as another one lays it out."""
    start, end = torch.arange(S, dtype=torch.int32), torch.full((S,), S, dtype=torch.int32)
    return NO_MASK._replace(start=of_one(start), end=of_one(end))


def contiguous(numbers):
    return numbers.expand(B, 1, S).contiguous()


def expanded(numbers):
    return numbers.expand(B, HKV, S)


def sliced(numbers):
    return torch.nn.functional.pad(contiguous(numbers), (0, 128))[..., :S]


def call_again(launches, mask, grad_out, calls=4):
    """Call both directions several times, each in memory of its own; return what the last calls launched."""
    numbers = (-UNBOUNDED, 0, 0, 0, mask.at_most, D**-0.5, 0.0, 0.0, False)
    last = {}
    for _ in range(calls):
        query = torch.empty(B, H, S, D, dtype=torch.bfloat16).transpose(1, 2)
        key, value = (torch.empty(B, S, HKV, D, dtype=torch.bfloat16) for _ in range(2))
        others = (None, *mask[:-1], None, None, *numbers)
        before = len(launches)
        (out, lse, lse_tail, _), _ = schemas.implementations["forward"](query, key, value, *others, False)
        last["forward"] = [launch.kernel for launch in launches[before:]]
        before = len(launches)
        saved = (query, key, value, out, lse, lse_tail)
        schemas.implementations["backward"](grad_out, None, *saved, *others, False, False)
        last["backward"] = [launch.kernel for launch in launches[before:]]
    return last


def steps(name):
    """How often the only plan of an operator computes what, beside launching."""
    (found,) = [made for key, made in plans._plans.items() if key[0] == name]
    assert found is not None, "the call runs in full each time"
    return Counter(step.function.__name__ for step in found.steps if isinstance(step, plan.Compute))


@pytest.mark.parametrize("mask", [causal, documents])
def test_prepared_masks_cost_a_call_no_launch(launches, mask):
    found = call_again(launches, mask(), torch.empty(B, S, H, D, dtype=torch.bfloat16))
    assert found == (SHARED if mask is causal else MASKED)
    assert steps("forward") + steps("backward") <= Counter(_counter=1)


@pytest.mark.parametrize("layout", [contiguous, expanded, sliced])
def test_intervals_are_read_where_they_lie(launches, layout):
    mask = ends(layout)
    assert (mask.start.stride() == (S, S, 1)) == (layout is contiguous)
    found = call_again(launches, mask, torch.empty(B, S, H, D, dtype=torch.bfloat16))
    assert {name: kernels[PREPARES:] for name, kernels in found.items()} == MASKED
    assert steps("forward") + steps("backward") <= Counter(_counter=1)


def test_what_has_to_be_copied_is_copied_by_the_plan(launches):
    of = documents()
    strided = of.k_segments.repeat_interleave(2, dim=-1)[..., ::2]
    found = call_again(
        launches, of._replace(k_segments=strided), torch.ones((), dtype=torch.bfloat16).expand(B, S, H, D)
    )
    assert found == MASKED
    assert steps("forward") - Counter(_counter=1) == Counter(contiguous=1)
    assert steps("backward") == Counter(contiguous=2)  # of the ids and of the gradient

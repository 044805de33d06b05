"""The harness that runs functions on several ranks: results, failures, hangs and processes that end."""

import os
import time

import pytest
import ranks
import torch
import torch.distributed as dist


def sum_of_ranks(factor):
    total = torch.full((), float(factor * (dist.get_rank() + 1)), device=ranks.device())
    dist.all_reduce(total)
    return {"total": total, "rank": dist.get_rank()}


def fail_on(rank, message):
    if rank is None or dist.get_rank() == rank:
        raise ValueError(message)


def fail_on_one_while_the_other_waits():
    if dist.get_rank() == 0:
        raise ValueError("rank 0 does not come")
    return sum_of_ranks(1)


def sleep_on(rank, seconds):
    if dist.get_rank() == rank:
        time.sleep(seconds)


def end_on(rank):
    if dist.get_rank() == rank:
        os._exit(1)
    time.sleep(60)


def process_id():
    return os.getpid()


def test_results_come_back_by_rank_and_the_processes_stay(two_ranks):
    first = two_ranks(process_id)
    assert two_ranks(sum_of_ranks, 2) == [{"total": 6.0, "rank": 0}, {"total": 6.0, "rank": 1}]
    assert two_ranks(process_id) == first and len(set(first)) == 2


def test_a_failure_on_one_rank_fails_the_call_with_its_traceback(two_ranks):
    with pytest.raises(ranks.RankError, match=r"rank 1 failed:\n(.|\n)*ValueError: no such thing"):
        two_ranks(fail_on, 1, "no such thing")
    with pytest.raises(ranks.RankError, match=r"ranks \[0\] of 2 raised nothing"):
        two_ranks.failures(fail_on, 1, "no such thing")
    assert [(failure.kind, failure.message) for failure in two_ranks.failures(fail_on, None, "no")] == [
        ("ValueError", "no")
    ] * 2


def test_a_rank_that_waits_for_one_that_failed_is_ended_soon(two_ranks):
    start = time.monotonic()
    with pytest.raises(ranks.RankError, match=r"rank 0 failed:(.|\n)*rank 0 does not come(.|\n)*rank 1 was here:"):
        two_ranks(fail_on_one_while_the_other_waits)
    assert time.monotonic() - start < 30
    assert two_ranks(sum_of_ranks, 1)[0]["total"] == 3.0


def test_a_rank_that_sleeps_too_long_is_named_with_its_place(two_ranks):
    two_ranks(process_id)
    with pytest.raises(ranks.RankError, match=r"ranks \[1\] of 2 did not answer within 1 s(.|\n)*in sleep_on"):
        two_ranks(sleep_on, 1, 60, limit=1)


def test_a_process_that_ends_is_named(two_ranks):
    with pytest.raises(ranks.RankError, match=r"the process of rank 1 ended"):
        two_ranks(end_on, 1)

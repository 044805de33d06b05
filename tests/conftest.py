"""How tests call the public functions, and what is skipped where there is no GPU.

`DMATTN_TEST_COMPILED=1` runs every test that takes the fixture `attention` through `torch.compile(fullgraph=True)`. With
several GPUs, each worker of pytest-xdist sees its share of them, at least one: tests of several ranks use NCCL where a
worker has a GPU for each rank, and gloo on the CPU elsewhere. `DMATTN_TEST_ALL_GPUS=1` lets every worker see all GPUs, so
that tests of several ranks can be divided among workers. The last lines of a run on GPUs say which it was.
`DMATTN_TEST_PASSED=FILE` leaves out what passed before on the same source (`support/passed.py`).
"""

import faulthandler
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import passed
import pytest
import ranks
import torch

import dmattn_ops

COMPILED = os.environ.get("DMATTN_TEST_COMPILED") == "1"
ALL_GPUS = os.environ.get("DMATTN_TEST_ALL_GPUS") == "1"
HANGS = 240.0  # seconds after which a test on a GPU is taken to wait for a kernel that never ends


def share_gpus() -> None:
    """Give a worker of pytest-xdist its share of several GPUs: processes that share one wait for each other."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), torch.cuda.device_count()
    if worker is None or count < 2 or ALL_GPUS:
        return
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    share = gpus_of_worker(int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]), count)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names.split(",")[number] for number in share)


def gpus_of_worker(worker: int, workers: int, count: int) -> range:
    """Return which of `count` GPUs one of `workers` uses: as many as every other, at least one."""
    each = max(1, count // workers)
    first = worker % (count // each) * each
    return range(first, first + each)


share_gpus()  # before anything starts CUDA


def share_cores() -> None:
    """Give a worker of pytest-xdist its share of the cores, unless `OMP_NUM_THREADS` says how many threads it may use.

    Without it each worker starts a thread for every core, and the threads of all workers wait for each other.
    """
    workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if workers is None or "OMP_NUM_THREADS" in os.environ:
        return
    threads = max(1, (os.cpu_count() or 1) // int(workers))
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for programs that tests start
    torch.set_num_threads(threads)


share_cores()


class Attention:
    """The public functions, eager or compiled; calling it calls `flash_dmattn_func`."""

    compiled = COMPILED

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.flash_dmattn_func(*arguments, **keywords)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(dmattn_ops, name)  # looked up at each call, so that tests can patch the package
        return torch.compile(function, fullgraph=True) if COMPILED else function


@pytest.fixture
def attention() -> Iterator[Attention]:
    """The public functions as `attention.flash_dmattn_func` and so on, or `attention(...)` for the first of them."""
    if not COMPILED:
        yield Attention()
        return
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=10_000, accumulated_recompile_limit=10_000):
        yield Attention()
    torch._dynamo.reset()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What calls launch on an H200, without one (`hopper_launches.py`)."""
    from tests.support.hopper_launches import pretended_launches

    with pretended_launches(monkeypatch) as made:
        yield made


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[ranks.Ranks]:
    """Two processes of one group, for all tests of a file: `two_ranks(function, *arguments)` returns results by rank."""
    with ranks.Ranks(2) as processes:
        yield processes


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Let each test draw the same numbers whatever ran before it."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def no_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the process of a GPU test that hangs, which nothing else ends; pytest-xdist then reports the test as failed."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    faulthandler.dump_traceback_later(HANGS, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say where tests of several ranks ran, if there are GPUs: NCCL needs one for each rank."""
    count = torch.cuda.device_count()
    workers = getattr(config.option, "numprocesses", None)
    if not count or os.environ.get("PYTEST_XDIST_WORKER"):
        return
    seen = len(gpus_of_worker(0, workers, count)) if workers and not ALL_GPUS else count
    used = ", ".join(f"{world} ranks by {ranks.backend_for(world, seen)}" for world in (2, 4))
    terminalreporter.write_line(f"tests of several ranks: {used}; GPUs that a test process sees: {seen}")


def pytest_configure(config: pytest.Config) -> None:
    """Note what passes, where that is asked for."""
    config.pluginmanager.register(passed.Notes(config.rootpath))


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark variants of sampled tests as slow, and skip tests that need a GPU where there is none."""
    variants: Counter[str] = Counter()
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            function, _, _ = item.nodeid.partition("[")
            if variants[function] % sampled.args[0]:
                item.add_marker(pytest.mark.slow)
            variants[function] += 1
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(skip)
    if before := passed.left_out(items):
        config.hook.pytest_deselected(items=before)
        gone = set(before)
        items[:] = [item for item in items if item not in gone]

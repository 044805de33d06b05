"""Run functions on several ranks: processes that start once for a file of tests and then take one function after another.

A function is sent by its name, so it must stand at the top level of a module that a fresh process can import; arguments
and results are pickled, tensors as CPU tensors. Ranks use NCCL and a GPU each where there are enough GPUs, and otherwise
gloo on the CPU. `DMATTN_RANKS_BACKEND` decides it by hand: `nccl`, `gloo`, or `shared` for ranks that all compute on the first
GPU and exchange CPU tensors by gloo. What this package does not send itself, such as parts of DTensors, fails then.

    def sum_of_ranks(factor):  # runs on every rank
        total = torch.full((), float(factor * dist.get_rank()), device=ranks.device())
        dist.all_reduce(total)
        return total

    def test_ranks_add_up(two_ranks):
        assert two_ranks(sum_of_ranks, 3) == [3.0, 3.0]

A rank that fails fails the test with its traceback. A rank that does not answer within the time limit fails the test
with the place where it waits; all ranks are then ended, and start again at the next call.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dmattn_ops.distributed import team

SHARED = "shared"
START = 120.0  # seconds until processes have started and know each other: each of them imports torch
LIMIT = 180.0 if torch.cuda.is_available() else 60.0  # seconds for one function: GPUs compile their kernels first
GRACE = 5.0  # seconds that the others have once a rank failed, before they are taken to wait for it
_own = torch.device("cpu")  # of this process; `_serve` sets it


class Failure(NamedTuple):
    """An exception that a rank raised."""

    kind: str
    message: str
    trace: str


class RankError(AssertionError):
    """One or more ranks failed or did not answer."""


def device() -> torch.device:
    """Return the device of this rank; for functions that run on ranks."""
    return _own


def backend_for(world: int, gpus: int | None = None) -> str:
    """Return "nccl", "gloo" or "shared" for so many ranks with so many GPUs, those of this process unless told otherwise."""
    gpus = torch.cuda.device_count() if gpus is None else gpus
    return os.environ.get("DMATTN_RANKS_BACKEND") or ("nccl" if gpus >= world else "gloo")


def summed(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks; for functions that run on ranks, however these exchange tensors."""
    return team.all_ranks(tensor.unsqueeze(0), team.team_of(None)).sum(0)


def over_host(collective: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a functional collective that takes tensors of a GPU to ranks that send each other CPU tensors."""

    def collected(rows: Tensor, *arguments: Any) -> Tensor:
        return team.arrived(collective(rows.cpu(), *arguments)).to(rows.device)

    return collected


class Ranks:
    """`world` processes of one group. They start at the first call; `close` ends them."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def __call__(
        self, function: Callable[..., Any], *arguments: Any, limit: float = LIMIT, **keywords: Any
    ) -> list[Any]:
        """Return what the function returns on each rank, by rank; raise where it fails on any."""
        results = self._run(function, arguments, keywords, limit)
        failed = {rank: result for rank, result in enumerate(results) if isinstance(result, Failure)}
        if failed:
            raise RankError("\n".join(f"rank {rank} failed:\n{failure.trace}" for rank, failure in failed.items()))
        return results

    def failures(
        self, function: Callable[..., Any], *arguments: Any, limit: float = LIMIT, **keywords: Any
    ) -> list[Failure]:
        """Return the exceptions that the function raises, by rank; raise where a rank raises none."""
        results = self._run(function, arguments, keywords, limit)
        fine = [rank for rank, result in enumerate(results) if not isinstance(result, Failure)]
        if fine:
            raise RankError(f"ranks {fine} of {self.world} raised nothing")
        return results

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._connections, self._folder = [], [], None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, function: Callable[..., Any], arguments: Any, keywords: Any, limit: float) -> list[Any]:
        if not self._processes:
            self._start()
        task = pickle.dumps((function, arguments, keywords))
        for connection in self._connections:
            connection.send_bytes(task)
        results = self._answers(limit)
        failures = [result for result in results if isinstance(result, Failure)]
        out_of_step = 0 < len(failures) < self.world  # in what the ranks told each other
        if out_of_step or any("CUDA error" in failure.message for failure in failures):  # which a process keeps
            self.close()
        return results

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        backend, context = backend_for(self.world), get_context("spawn")
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, self.world, backend, self._folder.name), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        self._answers(START)

    def _answers(self, limit: float) -> list[Any]:
        """Return the answer of each rank; end all ranks and raise where one gives none in time."""
        results: dict[int, Any] = {}
        deadline = time.monotonic() + limit
        while len(results) < self.world:
            waiting = {each: rank for rank, each in enumerate(self._connections) if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up(results, f"did not answer within {limit:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                try:
                    results[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    self._give_up(results, f"could not go on, because the process of rank {rank} ended")
                if isinstance(results[rank], Failure):
                    deadline = min(deadline, time.monotonic() + GRACE)
        return [results[rank] for rank in range(self.world)]

    def _give_up(self, results: dict[int, Any], why: str) -> None:
        silent = [rank for rank in range(self.world) if rank not in results]
        for rank in silent:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(1.0)  # until they have written where they are
        text = [f"ranks {silent} of {self.world} {why}"]
        for rank in range(self.world):
            if rank in silent:
                text.append(f"rank {rank} was here:\n{self._log(rank).read_text()}")
            elif isinstance(results[rank], Failure):
                text.append(f"rank {rank} failed:\n{results[rank].trace}")
        self.close()
        raise RankError("\n".join(text))

    def _log(self, rank: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"rank{rank}.log"


def _serve(tasks: Connection, rank: int, world: int, backend: str, folder: str) -> None:
    """Run what `tasks` brings, until the other end is closed."""
    log = (Path(folder) / f"rank{rank}.log").open("w")  # stays open: a signal writes into it
    faulthandler.register(signal.SIGUSR1, file=log)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no processes of Inductor's own beside
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    global _own
    if backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU that nobody uses here changes what checkpoint() and Dynamo do
    else:
        _own = torch.device("cuda", 0 if backend == SHARED else rank)
        torch.cuda.set_device(_own)
        torch.cuda.init()
    store = dist.FileStore(f"{folder}/store", world)
    longer = timedelta(seconds=2 * LIMIT)  # so that `Ranks` ends ranks that wait, and says where they are
    dist.init_process_group(
        "cpu:gloo" if backend == SHARED else backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=longer,
        device_id=_own if backend == "nccl" else None,
    )
    if backend == SHARED:
        team._all_gather, team._all_to_all = over_host(team._all_gather), over_host(team._all_to_all)
    dist.barrier()
    tasks.send_bytes(pickle.dumps(None))
    while True:
        try:
            task = tasks.recv_bytes()
        except (EOFError, ConnectionError):
            os._exit(0)  # without waiting for a group whose other ranks may have gone
        tasks.send_bytes(_answer(task))


def _answer(task: bytes) -> bytes:
    try:
        function, arguments, keywords = pickle.loads(task)
        torch.manual_seed(0)
        result = _on_cpu(function(*arguments, **keywords))
        return pickle.dumps(result)
    except Exception as error:
        return pickle.dumps(Failure(type(error).__name__, str(error), traceback.format_exc()))


def _on_cpu(result: Any) -> Any:
    """Return tensors, and those in lists, tuples and dicts, as CPU tensors without a graph."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), result)

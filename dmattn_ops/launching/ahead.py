"""Kernels that are compiled before they are launched, side by side, in another process: its side that runs in this one.

A call launches up to fifteen kernels. Compiled one after the other, each at its first launch, those of a forward and a backward
keep one core busy for 10 to 20 s. While torch traces a graph, `dispatch/traced.py` says which calls it will make, and `submit`
passes their descriptions to one helper process (`api/compiler.py`). That runs the launchers on tensors without memory, and compiles
each kernel in a process of its own into Triton's cache on disk. `launch` asks `wait_for` before it compiles a kernel: one that is
on its way is waited for, and then found in the cache.

Nothing depends on the helper: where it cannot start, fails, dies or compiles something else, a launch compiles as it always did.
It ends when this process does, however that ends, and where there was nothing to do for a minute.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from typing import Any, NamedTuple

from dmattn_ops import environment

PATIENCE = 120.0  # seconds without news from the helper, after which it is taken for stuck
MOST_WORKERS = 16
_START = "from dmattn_ops.api.compiler import main; main()"


class Described(NamedTuple):
    """A call of an operator, as the helper gets it."""

    name: str
    tensors: tuple[Any, ...]  # of each (shape, strides, offset in elements, dtype), or None
    numbers: tuple[Any, ...]
    arch: Any  # of the GPU, an `Arch`
    gpu: str  # its name, under which a user's tuned configurations are kept
    cache: str  # Triton's folder
    mark: str  # a file to make there when all kernels of the call are in it


def workers() -> int:
    """Return how many kernels may be compiled at a time: a core each, and this rank's share of the cores of a host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return min(MOST_WORKERS, cores // max(1, int(ranks) if ranks.isdecimal() else 1))


def surroundings() -> dict[str, str]:
    """Return the variables of the environment but for those that let calls be recorded and told of: none is made there."""
    told = (environment.RECORD, environment.PROFILE)
    return {name: value for name, value in os.environ.items() if name not in told}


class Helper:
    """The helper process, and what is known of its work."""

    def __init__(self) -> None:
        self.news = threading.Condition()
        self.calls = 0  # whose kernels are not all known yet
        self.kernels: Counter[str] = Counter()  # that are being compiled, by name
        path = os.pathsep.join(filter(None, [os.getcwd() if each == "" else each for each in sys.path]))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, str(workers())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # without locks of Python's, which a fork could leave locked
            # no GPU is touched there; it has its own group, so that Ctrl-C reaches this process alone
            env={**surroundings(), "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self.alive = True
        threading.Thread(target=self._listen, name="dmattn_ops compiler", daemon=True).start()

    def send(self, call: Described) -> None:
        """Let the kernels of a call be compiled."""
        message = pickle.dumps(call)
        rest = len(message).to_bytes(8, "little") + message
        with self.news:
            self.calls += 1
        try:
            while rest:
                rest = rest[os.write(self.input.fileno(), rest) :]
        except (OSError, ValueError):  # it has ended
            self.end()

    def wait_for(self, kernel: str) -> None:
        """Return when no kernel of this name is being compiled, and none may still be found to be needed."""
        with self.news:
            while self.alive and (self.calls or self.kernels[kernel]):
                if not self.news.wait(PATIENCE):
                    self.alive = False

    def end(self) -> None:
        """Let the process end, and wait for nothing any more."""
        with self.news:
            self.alive = False
            self.news.notify_all()
        self.input.close()

    def _listen(self) -> None:
        """Read what the process says: a line for each call that was looked through, and two for each kernel."""
        try:
            for line in self.output:
                said = json.loads(line)
                with self.news:
                    self.calls -= said.get("calls", 0)
                    self.kernels[said.get("kernel", "")] += said.get("more", 0)
                    self.news.notify_all()
        except (OSError, ValueError):
            pass
        with self.news:
            self.alive = False
            self.news.notify_all()
        self.process.wait()

    def forget(self) -> None:
        """Let go of the process, which belongs to the parent of this one."""
        self.input.close()
        self.output.close()


_helper: Helper | None = None
_starting = threading.Lock()


def submit(call: Described) -> bool:
    """Have the kernels of a call compiled; return False where no process can be started for it, or one has failed."""
    global _helper
    if workers() < 2 or not _is_python():
        return False
    with _starting:
        if _helper is not None and not _helper.alive and _helper.process.poll() != 0:
            return False
        if _helper is None or not _helper.alive:
            try:
                _helper = Helper()
            except OSError:
                return False
        _helper.send(call)
    return True


def _is_python() -> bool:
    """Return whether `sys.executable` is a Python: it may be a program that embeds one, which would start a second time."""
    return "python" in os.path.basename(sys.executable or "").lower() and not getattr(sys, "frozen", False)


def wait_for(kernel: str) -> None:
    """Return when a kernel of this name is not being compiled, or being looked for, by the helper."""
    helper = _helper
    if helper is not None:
        helper.wait_for(kernel)


def end() -> None:
    """End the helper."""
    global _helper
    helper, _helper = _helper, None
    if helper is not None:
        helper.end()
        try:
            helper.process.wait(5)
        except subprocess.TimeoutExpired:
            helper.process.kill()
            helper.process.wait()


def _forget() -> None:
    """Leave the helper to the parent of a forked process."""
    global _helper, _starting
    helper, _helper, _starting = _helper, None, threading.Lock()
    if helper is not None:
        helper.forget()


atexit.register(end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

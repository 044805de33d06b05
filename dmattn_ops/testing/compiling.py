"""What Triton compiles in this process, and for how long."""

from __future__ import annotations

import threading
from typing import Any


class Compiling:
    """Kernels that this process compiled or found in Triton's cache, by a digest of what decides them, since it `listen`s."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.made: dict[str, float] = {}  # seconds of each kernel; 0 where the cache had it
        self.lock = threading.Lock()

    def listen(self) -> Compiling:
        """Begin to count, where there is a Triton; return self."""
        try:
            from triton import knobs
        except ImportError:
            return self
        knobs.compilation.listener = self._note
        return self

    def _note(self, *, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
        with self.lock:
            seconds = 0.0 if cache_hit else times.total / 1e6
            self.seconds += seconds
            self.made[metadata["hash"]] = seconds

    def taken(self) -> dict[str, float]:
        """Return the seconds of kernels compiled since the last call, by their digests."""
        with self.lock:
            made, self.made = self.made, {}
        return made

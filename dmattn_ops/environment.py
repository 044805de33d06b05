"""The variables that a call follows, read at each call, so that setting them after the import works.

| variable | value | anything else |
|---|---|---|
| `DMATTN_ARCH` | a compute capability: 9.0, 90, sm_90 or sm90 | a ValueError before any kernel starts (`arch.parse`) |
| `FLASH_DMATTN_PROFILE_BACKWARD`, `DMATTN_CHECK` | 1 or 0; also true, yes, on, false, no, off | a warning, and taken as 0 |
| `DMATTN_COMPILE_AHEAD` | the same | a warning, and taken as 0 |
| `DMATTN_CONTEXT_CHECK` | the same; 1 where it is not set | a warning, and taken as 0 |
| `DMATTN_RECORD` | a file to append to | a warning, and nothing is recorded (`tuning.record`) |

`DMATTN_ARCH` is for debugging: a call that ran on other kernels than the ones asked for would mislead. No other variable
makes a call fail. `DMATTN_CACHE_DIR` belongs to `tuning`, which reads it once in a process.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from typing import Any

ARCHITECTURE = "DMATTN_ARCH"
PROFILE = "FLASH_DMATTN_PROFILE_BACKWARD"
CHECK = "DMATTN_CHECK"
CONTEXT_CHECK = "DMATTN_CONTEXT_CHECK"
COMPILE_AHEAD = "DMATTN_COMPILE_AHEAD"
RECORD = "DMATTN_RECORD"
OF_BACKWARD = (ARCHITECTURE, PROFILE, RECORD)  # what a backward follows
_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")

# What os.environ wraps, by encoded names: a look-up there takes a tenth of one through os.environ, whose writes it sees.
_wrapped: Any = getattr(os.environ, "_data", None)
_HAS_WRAPPED = isinstance(_wrapped, dict) and hasattr(os.environ, "encodekey")
_variables: Any = _wrapped if _HAS_WRAPPED else os.environ
_ARCHITECTURE_KEY, _PROFILE_KEY, _CHECK_KEY, _RECORD_KEY = (
    os.environ.encodekey(name) if _HAS_WRAPPED else name  # type: ignore[attr-defined]
    for name in (ARCHITECTURE, PROFILE, CHECK, RECORD)
)


def architecture() -> str | None:
    """Return the architecture to dispatch for, such as "8.6", where one is asked for."""
    return (os.environ.get(ARCHITECTURE, "").strip() or None) if _ARCHITECTURE_KEY in _variables else None


def profiles_backward() -> bool:
    """Return whether each backward launch tells its choice."""
    return _PROFILE_KEY in _variables and _is_on(PROFILE)


def steers_backward() -> bool:
    """Return whether a variable that a backward follows is set, to whatever value."""
    return any(name in os.environ for name in OF_BACKWARD)


def checks() -> bool:
    """Return whether calls on a GPU check what only the device can tell, at the price of waiting for it."""
    return _CHECK_KEY in _variables and _is_on(CHECK)


def compares_ranks() -> bool:
    """Return whether calls that several ranks share compare their arguments first; that is so unless it is turned off."""
    return not os.environ.get(CONTEXT_CHECK) or _is_on(CONTEXT_CHECK)


def compiles_ahead() -> bool:
    """Return whether kernels of calls in compiled graphs are to be compiled while the graph is traced."""
    return _is_on(COMPILE_AHEAD)


def record_file() -> str | None:
    """Return the name of the file that the shapes of calls are appended to, where there is one."""
    return (os.environ.get(RECORD) or None) if _RECORD_KEY in _variables else None


def _is_on(name: str) -> bool:
    given = os.environ.get(name, "")
    value = given.strip().lower()
    if value not in (*_ON, *_OFF):
        warn_once(f"{name} must be 1 or 0, got {given!r}: dmattn_ops takes it as 0")
    return value in _ON


_said: set[str] = set()
_saying = threading.Lock()


def warn_once(message: str) -> None:
    """Warn with a message that this process was not warned with yet."""
    with _saying:
        if message in _said:
            return
        _said.add(message)
    warn(message)


def warn(message: str) -> None:
    """Warn, and name the user's line: the innermost one that is not of this package or torch, nor of a graph, which has no name."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "dmattn_ops",
        "torch",
        "",
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def tell(line: str) -> None:
    """Write a line to standard error; where that is closed, broken or missing, a call goes on without it."""
    try:
        sys.stderr.write(line + "\n")
    except (OSError, ValueError, AttributeError):  # a broken pipe; a closed file; None, in a process without a console
        return

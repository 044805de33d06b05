"""Two variables that a call follows, read at each call, so that setting them after the import works.

`DMATTN_RECORD` belongs to `tuning`.
"""

from __future__ import annotations

import os
from typing import Any

ARCHITECTURE = "DMATTN_ARCH"
PROFILE = "FLASH_DMATTN_PROFILE_BACKWARD"

# What os.environ wraps, by encoded names: a look-up there takes a tenth of one through os.environ, whose writes it sees.
_wrapped: Any = getattr(os.environ, "_data", None)
_HAS_WRAPPED = isinstance(_wrapped, dict) and hasattr(os.environ, "encodekey")
_variables: Any = _wrapped if _HAS_WRAPPED else os.environ
_ARCHITECTURE_KEY, _PROFILE_KEY = (
    os.environ.encodekey(name) if _HAS_WRAPPED else name  # type: ignore[attr-defined]
    for name in (ARCHITECTURE, PROFILE)
)


def architecture() -> str | None:
    """Return the architecture to dispatch for, such as "8.6", where one is asked for."""
    return (os.environ.get(ARCHITECTURE) or None) if _ARCHITECTURE_KEY in _variables else None


def profiles_backward() -> bool:
    """Return whether each backward launch tells its choice."""
    return _PROFILE_KEY in _variables and os.environ.get(PROFILE) == "1"

"""The two variables that a call follows, read at each call, so that setting them after the import works."""

from __future__ import annotations

import os
from typing import Any

ARCHITECTURE = "DMATTN_ARCH"
PROFILE = "FLASH_DMATTN_PROFILE_BACKWARD"

# What os.environ wraps, by encoded names: a look-up there takes a tenth of one through os.environ, whose writes it sees.
_variables: Any = getattr(os.environ, "_data", None)
_ENCODED = {name: getattr(os.environ, "encodekey", str)(name) for name in (ARCHITECTURE, PROFILE)}


def _given(name: str) -> bool:
    return not isinstance(_variables, dict) or _ENCODED[name] in _variables


def architecture() -> str | None:
    """Return the architecture to dispatch for, such as "8.6", where one is asked for."""
    return (os.environ.get(ARCHITECTURE) or None) if _given(ARCHITECTURE) else None


def profiles_backward() -> bool:
    """Return whether each backward launch tells its choice."""
    return _given(PROFILE) and os.environ.get(PROFILE) == "1"

"""How many bytes a kernel may move to or from the stack: what is known of triton 3.6, more where another version assembles.

Which registers ptxas gives away differs from version to version; triton 3.9 has a newer one, and asks it to allocate differently.
There the tests only see that nothing is far from what is known. `resource_tables` has what each configuration takes.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    KNOWN = version("triton").startswith("3.6.")
except PackageNotFoundError:  # nothing is compiled
    KNOWN = True


def bytes_at_most(known: int) -> int:
    """Return how many bytes of spills are accepted of a kernel that has `known` with triton 3.6."""
    return known if KNOWN else 2 * known + 640


def moves_at_most(known: int) -> int:
    """Return how many instructions of a loop's step may move registers to or from the stack, where there are `known`."""
    return known if KNOWN else known + 16

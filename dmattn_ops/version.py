"""The package's version, written here only: pyproject.toml and setup.py read it without importing the package."""

import sys

__version__ = "0.3.0"


def node_library(torch_version: str) -> str:
    """Return the file name of the library that is made for one torch and this Python: `launching/node.py` loads it."""
    return f"_autograd.{sys.implementation.cache_tag}-torch-{torch_version}.so"

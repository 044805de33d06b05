"""The package's version, written here only: pyproject.toml reads it without importing the package."""

__version__ = "0.3.0"

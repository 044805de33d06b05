"""Records that kernels are compiled for."""

from __future__ import annotations

from typing import Any


class Constants(str):
    """Base of frozen dataclasses, `@dataclass(frozen=True, eq=False, repr=False)`, each the text that names its fields.

    Triton keeps such a record whole. Of a tuple, version 3.9 keeps the fields alone, so that properties are lost. Hooks of
    Triton write constants as JSON, which knows text, and no dataclass.
    """

    def __new__(cls, *values: Any, **named: Any) -> Constants:
        given = dict(zip(cls._names(), values, strict=False)) | named
        return super().__new__(cls, f"{cls.__name__}({', '.join(f'{name}={given[name]!r}' for name in cls._names())})")

    def __repr__(self) -> str:
        return str(self)

    def __getnewargs__(self) -> tuple[Any, ...]:  # type: ignore[override]
        return tuple(getattr(self, name) for name in self._names())

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        return tuple(cls.__dataclass_fields__)  # type: ignore[attr-defined]

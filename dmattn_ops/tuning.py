"""Configurations that were measured to be faster than a row's own: the cache of `python -m dmattn_ops.tune`.

A JSON file in `DMATTN_CACHE_DIR` (`$XDG_CACHE_HOME/dmattn_ops`, else `~/.cache/dmattn_ops`), read once in a process:

    {"version": 1, "places": {<place>: {<case>: {"own": {...}, "tuned": {...}, "own_ms": 1.0, "tuned_ms": 0.9, "date": ...}}}}

A place is a GPU and a compiler, whatever the driver; a case is a class of calls. An entry counts only while the row still
is what the entry was measured against, and only with values that `config.parts` offers for that row.
`DMATTN_RECORD=FILE` appends one line for each new shape that a kernel is chosen for: what tuning can be told to tune.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dmattn_ops import arch, config
from dmattn_ops.arch import Arch
from dmattn_ops.call import Call
from dmattn_ops.choose import Choice, Demand
from dmattn_ops.config import Config, Row
from dmattn_ops.problem import UNBOUNDED

VERSION = 1
FOLDER = "DMATTN_CACHE_DIR"
RECORD = "DMATTN_RECORD"
SEQLEN_TIERS = (8192, 4096, 0)
Entry = dict[str, Any]
Places = dict[str, dict[str, Entry]]


@dataclass(frozen=True)
class Shape:
    """One call without its data: what tuning needs to make another like it. Masks: none, bits or segments."""

    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    seqlen_q: int = 1024
    seqlen_k: int = 1024
    dim: int = 64
    dim_v: int = 64
    dtype: str = "bfloat16"
    band_lo: int = -UNBOUNDED
    band_hi: int = UNBOUNDED
    mask: str = "none"
    bias: tuple[int, ...] | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    varlen: bool = False

    @property
    def demand(self) -> Demand:
        """What a row is chosen by."""
        itemsize = getattr(torch, self.dtype).itemsize
        return Demand(self.batch, self.heads, self.seqlen_q, self.seqlen_k, self.dim, self.dim_v, itemsize)


class Case(NamedTuple):
    """Calls that share one tuned configuration."""

    direction: str
    kernel: str
    dim: int  # of the row
    bits: int  # of an element
    seqlen: int  # fewest keys, of SEQLEN_TIERS
    few: bool  # fewer tiles of 128 queries than multiprocessors
    masked: bool
    deterministic: bool

    def __str__(self) -> str:
        words = [self.direction, self.kernel, f"D{self.dim}", f"{self.bits} bits", f"S{self.seqlen}+"]
        flags = {"few tiles": self.few, "masked": self.masked, "deterministic": self.deterministic}
        return " ".join(words + [name for name, holds in flags.items() if holds])


def case_of(direction: str, row: Row, on: Arch, demand: Demand, masked: bool, deterministic: bool) -> Case:
    """Return the class of a call that a row takes."""
    seqlen = next(tier for tier in SEQLEN_TIERS if demand.seqlen_k >= tier)
    few = demand.tiles < on.num_sms
    return Case(direction, row.kernel, row.dim, 8 * demand.itemsize, seqlen, few, masked, deterministic)


@lru_cache(maxsize=64)
def place(device: torch.device, on: Arch) -> str:
    """Return the GPU and the compiler that entries hold for."""
    import triton

    return f"{arch.name(device)} as {on}, {on.num_sms} SMs, Triton {triton.__version__}"


def path() -> Path:
    """Return where the cache lies."""
    folder = os.environ.get(FOLDER)
    if folder:
        return Path(folder) / "tuned.json"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dmattn_ops" / "tuned.json"


@cache
def entries() -> Places:
    """Return what the cache holds, read once; nothing, with one warning, where it cannot be used."""
    try:
        return _read()
    except ValueError as error:
        warnings.warn(
            f"dmattn_ops ignores its tuned configurations: {path()} {error}. `python -m dmattn_ops.tune` writes it anew.",
            stacklevel=2,
        )
        return {}


def forget() -> None:
    """Read the cache again at the next use."""
    entries.cache_clear()


def _read() -> Places:
    """Return what the file holds; ValueError where it is damaged or of another version."""
    try:
        content = json.loads(path().read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # also bytes that are no text, and endless brackets
        raise ValueError("is damaged") from error
    if not isinstance(content, dict) or "version" not in content:
        raise ValueError("is damaged")
    if content["version"] != VERSION:
        raise ValueError(f"has version {content['version']!r}, not {VERSION}")
    places: Any = content.get("places")
    if not _is_nested(places, 2):
        raise ValueError("is damaged")
    return places


def _is_nested(value: Any, levels: int) -> bool:
    """Return whether a value is a dict of dicts, `levels` deep, with dicts as leaves."""
    return isinstance(value, dict) and (levels == 0 or all(_is_nested(each, levels - 1) for each in value.values()))


def merge(at: str, found: dict[Case, Entry]) -> None:
    """Write entries of one place beside what others wrote: under a lock, and replaced as a whole, so that readers need none."""
    target = path()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        try:
            places = _read()
        except ValueError:
            places = {}
        places[at] = places.get(at, {}) | {str(case): entry for case, entry in found.items()}
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix="tuned-", suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"version": VERSION, "places": places}, file, indent=1, sort_keys=True)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    forget()


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    import fcntl  # not on Windows, where no kernel is tuned

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def entry_of(row: Row, tuned: Config, own_ms: float, tuned_ms: float, date: str) -> Entry:
    """Return the entry that makes `tuned` take the place of the row's own configuration."""
    return {
        "own": _fields(row, row.config),
        "tuned": _fields(row, tuned),
        "own_ms": round(own_ms, 4),
        "tuned_ms": round(tuned_ms, 4),
        "date": date,
    }


def _fields(row: Row, of: Config) -> dict[str, Any]:
    return {field: getattr(of, field) for part in config.parts(row) for field in part.fields}


def tuned_config(row: Row, on: Arch, entry: Entry) -> Config | None:
    """Return the configuration that an entry holds for a row, None unless it is valid there and another than the row's."""
    values, own = entry.get("tuned"), _fields(row, row.config)
    if entry.get("own") != own or not isinstance(values, dict) or set(values) != set(own) or values == own:
        return None
    made = row.config
    for part in config.parts(row):
        wanted = tuple(values[field] for field in part.fields)
        if wanted not in part.values or config.shared_memory(row, part, wanted) > on.shared_memory:
            return None
        made = part.put(made, part.values[part.values.index(wanted)])  # 4 and not 4.0, True and not 1
    return made


def tuned(choice: Choice, direction: str, demand: Demand, masked: bool, deterministic: bool, at: str) -> Choice:
    """Return the choice with the cached configuration of its case at a place, or as it is where there is none."""
    here = entries().get(at)
    if not here or choice.arch is None:
        return choice
    entry = here.get(str(case_of(direction, choice.row, choice.arch, demand, masked, deterministic)))
    made = None if entry is None else tuned_config(choice.row, choice.arch, entry)
    if entry is None or made is None:
        return choice
    own = choice.row.config
    evidence = (
        f"tuned: {entry.get('tuned_ms')} ms, {entry.get('own_ms')} ms with the row's own {own.block_m}x{own.block_n}"
        f" ({at}, {entry.get('date')})"
    )
    return choice._replace(row=replace(choice.row, config=made, evidence=evidence))


def shape_of(call: Call) -> Shape:
    """Return the shape of a call as it reaches a kernel; variable lengths count as their upper bounds."""
    demand, options = call.demand, call.options
    return Shape(
        batch=demand.batch,
        heads=demand.heads,
        kv_heads=call.key.shape[-2],
        seqlen_q=demand.seqlen_q,
        seqlen_k=demand.seqlen_k,
        dim=demand.dim,
        dim_v=demand.dim_v,
        dtype=str(call.query.dtype).removeprefix("torch."),
        band_lo=options.band_lo,
        band_hi=options.band_hi,
        mask=call.mask.kind,
        bias=None if call.bias is None else tuple(call.bias.shape),
        softcap=options.softcap,
        dropout_p=options.dropout_p,
        deterministic=options.deterministic,
        varlen=call.varlen is not None,
    )


_recorded: set[tuple[str, Shape]] = set()


def record(call: Call) -> None:
    """Append the shape of a call to the file that `DMATTN_RECORD` names, if any, once in a process."""
    file = os.environ.get(RECORD)
    if not file:
        return
    shape = shape_of(call)
    if (file, shape) in _recorded:
        return
    _recorded.add((file, shape))
    with open(file, "a") as lines:
        lines.write(json.dumps(asdict(shape)) + "\n")


def read_record(file: Path) -> list[Shape]:
    """Return the shapes of a record, each once; ValueError where a line is none."""
    shapes: dict[Shape, None] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            fields = json.loads(line)
            bias = fields.get("bias")
            shapes[Shape(**{**fields, "bias": None if bias is None else tuple(bias)})] = None
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"line {number} of {file} is no recorded shape: {line[:100]!r}") from error
    return list(shapes)

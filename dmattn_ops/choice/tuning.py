"""Configurations that were measured to be faster than a row's own: the cache of `python -m dmattn_ops.tune`.

A JSON file in `DMATTN_CACHE_DIR` (`$XDG_CACHE_HOME/dmattn_ops`, else `~/.cache/dmattn_ops`), read once in a process:

    {"version": 1, "places": {<place>: {<case>: {"own": {...}, "tuned": {...}, "own_ms": 1.0, "tuned_ms": 0.9, "date": ...}}}}

Beside configurations of rows stand lengths of the epochs in which keys are packed (`choice/epochs.py`), 0 for keys as they lie.
A place is a GPU and a version of Triton; a case is a class of calls. An entry counts only while the row still
is what the entry was measured against, and only with values that `tunable.parts` offers for that row. So a file of anybody
can make a call slower, not wrong, and one that cannot be used costs a warning. A folder named by `DMATTN_CACHE_DIR` may be
shared: whoever can list it can read the cache, and whoever can write to it can tune for all (`shared_files.py`).
`DMATTN_RECORD=FILE` appends one line for each new shape that a kernel is chosen for: what tuning can be told to tune.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import date as Date
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dmattn_ops import environment
from dmattn_ops.call import TILE, UNBOUNDED, Call, Demand, kind_of_shape
from dmattn_ops.choice import arch, shared_files, tunable
from dmattn_ops.choice.arch import Arch
from dmattn_ops.choice.choose import Choice
from dmattn_ops.choice.config import Config, Row
from dmattn_ops.choice.epochs import Sizes, offered_epochs

VERSION = 1
FOLDER = "DMATTN_CACHE_DIR"
OLD = "tuned.json.old"
MAX_BYTES = 16 << 20  # of a cache: an entry has 500
LOCK_SECONDS = 20.0  # a writer holds the lock for some milliseconds
SEQLEN_TIERS = (8192, 4096, 0)
DTYPES = ("float16", "bfloat16", "float32", "float64")
MASKS = ("none", "bits", "segments", "intervals")
Entry = dict[str, Any]
Places = dict[str, dict[str, Entry]]


@dataclass(frozen=True)
class Shape:
    """One call without its data: what tuning needs to make another like it. Masks: none, bits, segments or intervals."""

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
    mask_heads: int = 1  # of intervals
    at_most: int = -1  # keys that a query sees of intervals, as was promised; -1 is no promise

    @property
    def demand(self) -> Demand:
        """The sizes that a row is chosen by."""
        itemsize = getattr(torch, self.dtype).itemsize
        full_bias = self.bias is not None and kind_of_shape(self.bias) == "full"
        return Demand(self.batch, self.heads, self.seqlen_q, self.seqlen_k, self.dim, self.dim_v, itemsize, full_bias)


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


class EpochCase(NamedTuple):
    """Calls that share one tuned length of epochs."""

    direction: str
    width: int  # of the wider head dimension
    bits: int
    keys: int  # fewest keys, a power of two
    heads: int  # packed heads of all sequences, a power of two
    group: int  # query heads that read one packed head
    kept: int  # keys that a query sees at most, rounded up to a tile
    deterministic: bool

    def __str__(self) -> str:
        words = [self.direction, "epochs", f"D{self.width}", f"{self.bits} bits", f"S{self.keys}+"]
        words += [f"H{self.heads}+", f"group {self.group}", f"kept {self.kept}"]
        return " ".join(words + ["deterministic"] * self.deterministic)


def epoch_case(direction: str, call: Call, sizes: Sizes) -> EpochCase:
    """Return the class of a call whose keys may be packed."""
    demand, group = call.demand, sizes.heads // sizes.packed_heads
    keys, heads = (1 << (max(1, size).bit_length() - 1) for size in (sizes.seqlen_k, sizes.batch * sizes.packed_heads))
    kept = -(-sizes.at_most // TILE) * TILE
    deterministic = call.options.deterministic
    return EpochCase(direction, demand.width, 8 * demand.itemsize, keys, heads, group, kept, deterministic)


def tuned_epoch(direction: str, call: Call, sizes: Sizes, own: int, at: str) -> tuple[int, str]:
    """Return the cached length of epochs of a call's case at a place and where it is from, or the rule's `own` and nothing."""
    entry = entries().get(at, {}).get(str(epoch_case(direction, call, sizes)))
    if entry is None or entry.get("own") != {"epoch": own} or not _has_evidence(entry):
        return own, ""
    values = entry.get("tuned")
    length = values.get("epoch") if isinstance(values, dict) and len(values) == 1 else None
    if type(length) is not int or length == own or length not in offered_epochs(sizes):
        return own, ""
    return length, (
        f"tuned: {entry['tuned_ms']} ms {epochs_text(length)}, {entry['own_ms']} ms {epochs_text(own)}"
        f" ({at}, {entry['date']})"
    )


def epochs_text(length: int) -> str:
    """Return words for a length of epochs, for lines that a user reads."""
    return f"in epochs of {length} queries" if length else "with keys as they lie"


def epoch_entry(own: int, tuned: int, own_ms: float, tuned_ms: float, date: str) -> Entry:
    """Return the entry that makes epochs of `tuned` queries take the place of the rule's."""
    lengths = {"own": {"epoch": own}, "tuned": {"epoch": tuned}}
    return {**lengths, "own_ms": round(own_ms, 4), "tuned_ms": round(tuned_ms, 4), "date": date}


def case_of(direction: str, row: Row, on: Arch, demand: Demand, masked: bool, deterministic: bool) -> Case:
    """Return the class of a call that a row takes."""
    seqlen = next(tier for tier in SEQLEN_TIERS if demand.seqlen_k >= tier)
    few = demand.tiles < on.num_sms
    return Case(direction, row.kernel, row.dim, 8 * demand.itemsize, seqlen, few, masked, deterministic)


@lru_cache(maxsize=64)
def place(device: torch.device, on: Arch) -> str:
    """Return the GPU and the compiler that entries hold for."""
    try:
        from triton import __version__ as version
    except ImportError:
        version = "missing"
    return f"{arch.name(device)} as {on}, {on.num_sms} SMs, Triton {version}"


def path() -> Path | None:
    """Return the folder of the cache; None where the environment names no folder and the user has no home."""
    named = os.environ.get(FOLDER)
    if named:
        return Path(os.path.expanduser(named)) / "tuned.json"
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():  # its specification has such values ignored
        try:
            caches = Path.home() / ".cache"
        except RuntimeError:  # HOME is unset, and the user has no name: in containers
            return None
    return caches / "dmattn_ops" / "tuned.json"


@cache
def entries() -> Places:
    """Return the entries of the tuning cache, read once; empty, with one warning, where the file cannot be used."""
    file = path()
    if file is None:
        return {}
    try:
        return _read(file)
    except OSError as error:
        reason = f"cannot be read: {error.strerror}. {FOLDER} names another folder."
    except ValueError as error:
        reason = f"{error}. `python -m dmattn_ops.tune` writes it anew, and keeps this one as {OLD}."
    environment.warn_once(f"dmattn_ops ignores its tuned configurations: {file} {reason}")
    return {}


def forget() -> None:
    """Read the cache again at the next use."""
    entries.cache_clear()


def _read(file: Path) -> Places:
    """Read the entries of a cache file; OSError where it cannot be read, ValueError where it is damaged or of another version."""
    try:
        content = json.loads(shared_files.read(file, MAX_BYTES))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:  # also bytes that are no text, and endless brackets
        raise ValueError("is damaged") from error
    if not isinstance(content, dict) or "version" not in content:
        raise ValueError("is damaged")
    if content["version"] != VERSION:
        raise ValueError(f"has another version than {VERSION}")
    places: Any = content.get("places")
    if not _is_nested(places, 2):
        raise ValueError("is damaged")
    return places


def _is_nested(value: Any, levels: int) -> bool:
    """Return whether a value is a dict of dicts, `levels` deep, with dicts as leaves."""
    return isinstance(value, dict) and (levels == 0 or all(_is_nested(each, levels - 1) for each in value.values()))


@contextmanager
def locked() -> Iterator[tuple[shared_files.Folder, Path]]:
    """Hold the cache for writing; OSError where it has no place, cannot be written to, or another process keeps it."""
    file = path()
    if file is None:
        raise FileNotFoundError(
            f"there is no home directory to keep tuned configurations in: name a folder by {FOLDER}"
        )
    shared = bool(os.environ.get(FOLDER))
    with shared_files.opened(file.parent, shared) as folder, folder.locked("tuned.lock", LOCK_SECONDS):
        yield folder, file


def merge(at: str, found: dict[Case | EpochCase, Entry]) -> None:
    """Write entries of one place beside what others wrote: under a lock, and replaced as a whole, so that readers need none.

    A file that is damaged, no cache, or of another version is kept as `OLD`. OSError: see `locked`.
    """
    with locked() as (folder, file):
        folder.remove_leftovers(file.name)
        try:
            places = _read(file)
        except ValueError:
            folder.set_aside(file.name, OLD)
            places = {}
        places[at] = places.get(at, {}) | {str(case): entry for case, entry in found.items()}
        folder.replace(file.name, json.dumps({"version": VERSION, "places": places}, indent=1, sort_keys=True).encode())
    forget()


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
    return {field: getattr(of, field) for part in tunable.parts(row) for field in part.fields}


def tuned_config(row: Row, on: Arch, entry: Entry) -> Config | None:
    """Return the configuration that an entry holds for a row, None unless it is valid there and another than the row's."""
    values, own = entry.get("tuned"), _fields(row, row.config)
    if (
        entry.get("own") != own
        or not _has_evidence(entry)
        or not isinstance(values, dict)
        or set(values) != set(own)
        or values == own
    ):
        return None
    made = row.config
    for part in tunable.parts(row):
        wanted = tuple(values[field] for field in part.fields)
        if wanted not in part.values or tunable.shared_memory(row, part, wanted) > on.shared_memory:
            return None
        made = part.put(made, part.values[part.values.index(wanted)])  # 4 and not 4.0, True and not 1
    return made


def _has_evidence(entry: Entry) -> bool:
    """Return whether an entry says when it was measured and how fast: `explain` prints it."""
    times = (entry.get("own_ms"), entry.get("tuned_ms"))
    if not all(isinstance(time, int | float) and 0.0 <= time < math.inf for time in times):
        return False
    try:
        Date.fromisoformat(entry.get("date", ""))
    except (TypeError, ValueError):
        return False
    return True


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
        mask_heads=1 if call.mask.end is None else call.mask.end.shape[1],
        at_most=-1 if call.mask.at_most is None else call.mask.at_most,
    )


_recorded: set[tuple[str, Shape]] = set()
_unusable: set[str] = set()  # names of files that could not be appended to


def record(call: Call) -> None:
    """Append the shape of a call to the file that `DMATTN_RECORD` names, if any, once in a process.

    Where that is impossible, it is said once, and nothing more is recorded there.
    """
    file = environment.record_file()
    if file is None or file in _unusable or call.options.batch_invariant:  # which take no tuned configuration
        return
    shape = shape_of(call)
    if (file, shape) in _recorded:
        return
    _recorded.add((file, shape))
    try:
        shared_files.append(Path(file), json.dumps(asdict(shape)))
    except (OSError, ValueError) as error:
        _unusable.add(file)
        reason = error.strerror if isinstance(error, OSError) else error
        environment.warn_once(f"dmattn_ops records no shapes: {environment.RECORD} is {file!r}, and {reason}")


def read_record(file: Path) -> list[Shape]:
    """Return the shapes of a record, each once; ValueError where a line is none."""
    shapes: dict[Shape, None] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            shapes[_shape(json.loads(line))] = None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"line {number} of {file} is no recorded shape: {line[:100]!r}") from error
    return list(shapes)


def _shape(recorded: Any) -> Shape:
    """Return the shape that a line of a record holds; ValueError, TypeError or AttributeError where it holds none."""
    bias = recorded.get("bias")
    shape = Shape(**{**recorded, "bias": None if bias is None else tuple(bias)})
    for field in fields(Shape):
        found = getattr(shape, field.name)
        if field.name != "bias" and type(found) is not type(field.default):
            raise TypeError(f"{field.name} is {found!r}")
    if not all(type(size) is int for size in shape.bias or ()):
        raise TypeError(f"bias is {shape.bias!r}")
    if shape.dtype not in DTYPES or shape.mask not in MASKS:
        raise ValueError(f"{shape.dtype!r} or {shape.mask!r} is unknown")
    return shape

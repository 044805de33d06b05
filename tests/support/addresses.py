"""Products of 32 bits that reach an address in a kernel's intermediate code, named by their places in the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime import driver

from dmattn_ops.api.stand_in import Driver, compiled_launches, target_of
from dmattn_ops.launching.launch import OPTIONS

KERNELS = Path(__file__).resolve().parents[2] / "dmattn_ops" / "kernels"
LEAST, MOST = -(1 << 31), (1 << 31) - 1
UNKNOWN = (LEAST, MOST)
# What is known of arguments by their names: lengths are refused from 2^30 on, and limits of a band are at most that.
ARGUMENTS = dict.fromkeys(
    ("seqlen_q", "seqlen_k", "longest_q", "longest_k", "own_total", "other_total", "seqlen"), (0, 1 << 30)
)
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_RESULT = re.compile(r"\s*(%[\w$.-]+)(?::(\d+))? = (.*)")
_ARGUMENT = re.compile(r"(%[\w$.-]+): ((?:[^(),<]|<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>)+?)(?: \{[^}]*\})? loc\(")
_PAIR = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+(?:#\d+)?)")
_ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_TRAILING = re.compile(r" loc\((#loc\d*|unknown|.*)\)$")
_LABEL = re.compile(r"\s*(\^bb\d+)(?:\((.*)\))?:")
_BRANCH = re.compile(r"(\^bb\d+)(?:\(([^:()]*):[^)]*\))?")


class Code(NamedTuple):
    """The intermediate code of a kernel."""

    kernel: str
    text: str


@dataclass
class Value:
    """A value: the operation that makes it, what that reads, and the place in the sources."""

    operation: str
    operands: list[Value] = field(default_factory=list)
    attributes: str = ""
    location: str = ""
    range: tuple[int, int] | None = None
    busy: bool = False


class _OwnCaches(Driver):
    """A stand-in whose kernels are in caches of their own, so that none was compiled before."""

    def get_current_device(self) -> int:
        return -self.sm


@contextmanager
def intermediate_code(sm: int) -> Iterator[list[Code]]:
    """Give the code of what is launched meanwhile, for `sm` (80 for SM 8.0); nothing is assembled, and nothing runs."""
    found: list[Code] = []

    def keep(*, fn: Any, compile: dict[str, Any], **others: Any) -> bool:
        kernel = fn.jit_function
        numbers = {name: compile[name] for name in ("num_warps", "num_stages")}
        found.append(code_of(kernel, compile["signature"], compile["constants"], compile["configs"][0], sm, **numbers))
        return True  # and so Triton compiles nothing

    hook = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = keep
    try:
        with compiled_launches(sm):
            driver.set_active(_OwnCaches(sm))
            yield found
    finally:
        knobs.runtime.jit_cache_hook = hook


def code_of(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[Any, Any],
    attributes: dict[Any, Any],
    sm: int,
    **options: Any,
) -> Code:
    """Return the code of a kernel after the first stage of the compiler, in which all functions are one."""
    target = GPUTarget("cuda", sm, 32)
    backend = make_backend(target)
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    given = source(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    parsed = backend.parse_options({**OPTIONS, **given.parse_options(), **options})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with target_of(sm):
        module = given.make_ir(
            target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
        )
        stages: dict[str, Callable[..., Any]] = {}
        backend.add_stages(stages, parsed, given.language)
        module = next(iter(stages.values()))(module, {"target": target})
    return Code(kernel.__name__, str(module))


def large_products(text: str) -> set[str]:
    """Return the products on the way to an address of a kernel's code that int32 may not hold, as `file:product`."""
    reader = _Reader()
    lines = text.splitlines()
    for line in lines:
        if alias := _ALIAS.match(line):
            reader.locations[alias[1]] = alias[2]
    for line in lines:
        if not line.startswith("#"):
            reader.read(line)
    reader.close()
    seen: set[int] = set()
    found: set[str] = set()
    todo = list(reader.addresses)
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if value.operation in ("arith.muli", "arith.shli") and _is_int32(value.attributes):
            low, high = _exact(value)
            if low < LEAST or high > MOST:
                found.add(place_of(reader.resolve(value.location)))
        if value.operation == "arith.select":
            todo += value.operands[1:]  # which of two addresses it is
        elif value.operation not in _OPAQUE:
            todo += value.operands
    return found


_OPAQUE = (
    "tt.load",
    "ttg.local_load",
    "tt.atomic_rmw",
    "arith.cmpi",
    "tt.elementwise_inline_asm",
    "tt.reduce_of_loads",
)
_SAME = (
    "arith.extsi", "arith.trunci", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "ttg.convert_layout",
    "tt.unsplat", "phi", "arith.bitcast", "tt.bitcast", "gluon.set_auto_layout", "tt.join", "tt.split", "tt.gather", "tt.cat",
)  # fmt: skip


def _is_int32(attributes: str) -> bool:
    return re.search(r"\bi32\b|xi32\b", attributes) is not None


def _range(value: Value) -> tuple[int, int]:
    """Return the least and the greatest number that a value can be."""
    if value.range is None:
        if value.busy:  # what a loop carries
            return UNKNOWN
        value.busy = True
        low, high = _exact(value)
        value.busy = False
        value.range = (low, high) if low >= LEAST and high <= MOST else UNKNOWN
    return value.range


def _exact(value: Value) -> tuple[int, int]:
    """Return the range of a value where its operation does not overflow."""
    operation, operands = value.operation, value.operands
    if operation == "number":
        return (int(value.attributes),) * 2
    if operation == "argument":
        return ARGUMENTS.get(value.attributes, UNKNOWN)
    if operation == "tt.make_range":
        start, end = (int(re.search(rf"{name} = (\d+)", value.attributes)[1]) for name in ("start", "end"))  # type: ignore[index]
        return start, end - 1
    if operation in ("tt.get_program_id", "tt.get_num_programs"):
        return 0, MOST
    if not operands:
        return UNKNOWN
    if operation in _SAME:
        ranges = [_range(each) for each in operands]
        return min(low for low, _ in ranges), max(high for _, high in ranges)
    if operation == "arith.select":
        ranges = [_range(each) for each in operands[1:]]
        return min(low for low, _ in ranges), max(high for _, high in ranges)
    if operation == "iv":
        (low, _), (_, high) = _range(operands[0]), _range(operands[1])
        return low, max(low, high - 1)
    if len(operands) != 2:
        return UNKNOWN
    (a, b), (c, d) = (_range(each) for each in operands)
    if operation == "arith.addi":
        return a + c, b + d
    if operation == "arith.subi":
        return a - d, b - c
    if operation == "arith.muli":
        for quotient, divisor in (operands, operands[::-1]):  # a // b * b is between 0 and a
            quotient = _behind(quotient)
            if quotient.operation == "arith.divsi" and _same(quotient.operands[1], divisor):
                low, high = _range(quotient.operands[0])
                return min(low, 0), max(high, 0)
        corners = (a * c, a * d, b * c, b * d)
        return min(corners), max(corners)
    if operation == "arith.shli" and 0 <= c <= d < 32:
        corners = (a << c, a << d, b << c, b << d)
        return min(corners), max(corners)
    if operation in ("arith.minsi", "arith.maxsi"):
        choose = min if operation == "arith.minsi" else max
        return choose(a, c), choose(b, d)
    if operation in ("arith.divsi", "arith.divui", "arith.ceildivsi") and a >= 0 and c >= 0:
        return 0, b // max(1, c) + (operation == "arith.ceildivsi")
    if operation == "arith.divsi" and c >= 1:
        return -(-a // c), max(b // c, 0)
    if operation in ("arith.remsi", "arith.remui") and a >= 0 and c >= 0:
        return 0, min(b, max(0, d - 1))
    if operation == "arith.remsi" and c >= 0:
        return -max(0, d - 1), max(0, d - 1)
    if operation == "arith.andi" and (c >= 0 or a >= 0):
        return 0, min(each for each, low in ((b, a), (d, c)) if low >= 0)
    if operation in ("arith.shrsi", "arith.shrui") and a >= 0 and 0 <= c <= d < 32:
        return a >> d, b >> c
    if operation in ("arith.ori", "arith.xori") and a >= 0 and c >= 0:
        return 0, (1 << max(b, d).bit_length()) - 1
    return UNKNOWN


def _behind(value: Value) -> Value:
    """Return what a value is the same number as."""
    while (
        value.operation in ("tt.splat", "tt.broadcast", "tt.expand_dims", "ttg.convert_layout", "phi")
        and len(value.operands) == 1
    ):
        value = value.operands[0]
    return value


def _same(one: Value, other: Value) -> bool:
    one, other = _behind(one), _behind(other)
    return one is other or (one.operation == other.operation == "number" and one.attributes == other.attributes)


class _Reader:
    """Reads code line by line, and makes values of it."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Value]] = [{}]
        self.regions: list[tuple[str, list[Value], list[Value]]] = [("", [], [])]  # operation, results, carried
        self.locations: dict[str, str] = {}
        self.addresses: list[Value] = []
        self.labels: dict[str, list[Value]] = {}
        self.branches: list[tuple[str, list[Value]]] = []
        self.captured: list[Value] = []

    def resolve(self, location: str) -> str:
        """Return where an operation stands in the sources, `"file":line:column`, outermost calls left out."""
        for _ in range(64):
            if location.startswith("callsite("):
                location = location[len("callsite(") :].split(" at ")[0]
            elif location.startswith('"') and (named := re.match(r'"[^"]*"\((.*)\)$', location)):
                location = named[1]
            elif location.startswith("fused"):
                location = re.sub(r"^fused(<.*>)?\[", "", location).split(",")[0].rstrip("]")
            elif location.startswith("#loc"):
                location = self.locations.get(location, "")
            else:
                break
        return location

    def value(self, name: str) -> Value:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return Value("unknown")

    def values(self, text: str) -> list[Value]:
        return [self.value(name) for name in _VALUE.findall(text)]

    def define(self, name: str, count: str | None, values: list[Value]) -> None:
        if count is None:
            self.scopes[-1][name] = values[0]
        else:
            self.scopes[-1].update({f"{name}#{index}": value for index, value in enumerate(values)})

    def read(self, line: str) -> None:
        location = ""
        if trailing := _TRAILING.search(line):
            location, line = trailing[1], line[: trailing.start()]
        stripped = line.strip()
        if stripped.startswith("}"):
            self.scopes.pop()
            operation, results, carried = self.regions.pop()
            if stripped in ("} else {", "} do {"):
                self.open(operation, results, carried if stripped == "} else {" else [])
                if stripped == "} do {":
                    self.regions[-1] = ("scf.while.do", results, carried)
            return
        if stripped.startswith(("partition", "default")):
            self.open("partition", [], [])
            for (name, _), given in zip(_ARGUMENT.findall(line), self.captured, strict=False):
                self.scopes[-1][name] = given
            return
        if label := _LABEL.match(line):
            self.label(label)
            return
        if "tt.func" in stripped:
            self.open("tt.func", [], [])
            for name, _ in _ARGUMENT.findall(line):
                called = re.search(rf'{re.escape(name)}: [^%]*? loc\("(\w+)"', line)
                self.scopes[-1][name] = Value("argument", attributes=called[1] if called else name.strip("%"))
            return
        self.operation(line, stripped, location)

    def open(self, operation: str, results: list[Value], carried: list[Value]) -> None:
        self.scopes.append({})
        self.regions.append((operation, results, carried))

    def label(self, label: re.Match[str]) -> None:
        arguments = [Value("phi") for _ in _ARGUMENT.findall(label[2] or "")]
        names = [name for name, _ in _ARGUMENT.findall(label[2] or "")]
        operation, results, _ = self.regions[-1]
        if operation == "scf.while.do":
            for argument, result in zip(arguments, results, strict=True):
                argument.operands.append(result)
        elif operation in ("tt.func", "partition"):
            self.labels[label[1]] = arguments
        else:  # of a reduction
            arguments = [Value("unknown") for _ in arguments]
        self.scopes[-1].update(zip(names, arguments, strict=True))

    def operation(self, line: str, stripped: str, location: str) -> None:
        result = _RESULT.match(line)
        name, count, body = (result[1], result[2], result[3]) if result else ("", None, stripped)
        kind = re.match(r'"?([\w.]+)"?', body)
        if kind is None:
            return
        operation = kind[1]
        opens = body.endswith("{")
        if operation == "scf.for":
            bounds = re.match(r"scf\.for (?:unsigned )?(%[\w$.-]+) = (\S+) to (\S+) step (\S+)", body)
            assert bounds is not None, body
            iv = Value("iv", [self.value(bounds[2]), self.value(bounds[3])])
            inits = re.search(r"iter_args\((.*?)\) -> ", body)
            self.loop(name, count, inits[1] if inits else "", operation)
            self.scopes[-1][bounds[1]] = iv
        elif operation == "scf.while":
            self.loop(name, count, re.match(r"scf\.while \((.*?)\) : ", body)[1] if " (" in body else "", operation)  # type: ignore[index]
        elif operation == "scf.if":
            results = [Value("phi") for _ in range(int(count or 1))] if name else []
            if name:
                self.define(name, count, results)
            self.open(operation, results, [])
        elif operation == "scf.yield":
            _, results, carried = self.regions[-1]
            given = self.values(body.split(" : ")[0])
            for place in (results, carried):
                for target, value in zip(place, given, strict=False):
                    target.operands.append(value)
        elif operation == "scf.condition":
            _, results, _ = self.regions[-1]
            for target, value in zip(results, self.values(body.split(" : ")[0])[1:], strict=True):
                target.operands.append(value)
        elif operation in ("cf.br", "cf.cond_br"):
            self.branches += [(label, self.values(given)) for label, given in _BRANCH.findall(body)]
        elif operation == "ttg.warp_specialize":
            self.captured = self.values(body.split(")")[0])
        else:
            self.plain(name, count, operation, body, location)
            if opens:
                self.open(operation, [], [])

    def loop(self, name: str, count: str | None, inits: str, operation: str) -> None:
        pairs = [(carried, self.value(init)) for carried, init in _PAIR.findall(inits)]
        values = [Value("phi", [init]) for _, init in pairs]
        results = values
        if operation == "scf.while":
            results = [Value("phi") for _ in range(int(count or 1))] if name else []
        if name:
            self.define(name, count, results)
        self.open(operation, results, values)
        if operation == "scf.for":  # its results are what it carries
            self.regions[-1] = (operation, [], values)
        self.scopes[-1].update({carried: value for (carried, _), value in zip(pairs, values, strict=True)})

    def plain(self, name: str, count: str | None, operation: str, body: str, location: str) -> None:
        operands = self.values(body.split(" : ")[0])
        value = Value(operation, operands, body, location)
        if operation == "arith.constant":
            number = re.match(r"arith\.constant (?:dense<)?(-?\d+|true|false)>? : (?:tensor<[^>]*xi\d+|i\d+)", body)
            if number and number[1].lstrip("-").isdigit():
                value = Value("number", [], number[1])
        if operation == "tt.addptr":
            self.addresses.append(operands[1])
        if ("tma" in operation or "descriptor_" in operation or "memdesc_" in operation) and "[" in body:
            self.addresses += self.values(body.split("[", 1)[1].split("]")[0])
        if name:
            several = [value] if count is None else [Value("phi", [value]) for _ in range(int(count))]
            self.define(name, count, several)

    def close(self) -> None:
        """Give blocks what branches pass to them."""
        for label, given in self.branches:
            for target, value in zip(self.labels.get(label, []), given, strict=False):
                target.operands.append(value)


def place_of(location: str) -> str:
    """Return `file:product` of `"file":line:column`, which stays when lines move."""
    where = re.match(r'"(.*)":(\d+):(\d+)', location)
    if where is None:
        return f"unknown place {location}"
    return _product_at(where[1], int(where[2]), int(where[3]))


@cache
def _product_at(file: str, line: int, column: int) -> str:
    path = Path(file)
    products = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Mult, ast.LShift))
        if _last_part_of(node, line, column)
    ]
    name = path.relative_to(KERNELS) if KERNELS in path.parents else path.name
    texts = sorted(map(ast.unparse, products), key=len)  # the smallest one that the place is in
    return f"{name}:{texts[0] if texts else f'{line}:{column}'}"


def _last_part_of(product: ast.BinOp | ast.AugAssign, line: int, column: int) -> bool:
    """Return whether a place is in the second factor of a product: where a compiler stands that has read both."""
    factor = product.right if isinstance(product, ast.BinOp) else product.value
    return (factor.lineno, factor.col_offset) <= (line, column) < (factor.end_lineno, factor.end_col_offset)

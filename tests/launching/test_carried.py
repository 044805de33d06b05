"""Loop bounds that a compiler may forget: the kernel of a few lines that showed it, and one that avoids it."""

import re

import pytest

pytest.importorskip("triton.experimental.gluon")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tests.tools.carried import stale_bounds


@gluon.jit
def carried_by_for(counts, out, groups):
    total = 0
    n = gl.load(counts)
    for g in range(groups):
        for t in range(n):
            total += gl.load(counts + t)
        n = gl.load(counts + g + 1)
    gl.store(out, total)


@gluon.jit
def carried_by_while(counts, out, groups):
    total = 0
    n = gl.load(counts)
    g = 0
    while g < groups:
        for t in range(n):
            total += gl.load(counts + t)
        n = gl.load(counts + g + 1)
        g += 1
    gl.store(out, total)


def compile_kernel(kernel):
    signature = {"counts": "*i32", "out": "*i32", "groups": "i32"}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs={}, attrs={})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm


def test_a_bound_that_a_for_carries_is_named_where_the_compiler_forgets_it():
    made = compile_kernel(carried_by_for)
    outer = next(line for line in made["ttgir"].splitlines() if "scf.for" in line and "to %groups" in line)
    forgotten = re.search(r"iter_args\(([^)]*)\)", outer)[1].count("=") == 1  # only `total` is left
    assert len(stale_bounds(made["source"], 90)) == forgotten


def test_a_while_forgets_nothing():
    made = compile_kernel(carried_by_while)
    assert stale_bounds(made["source"], 90) == []
    carried = next(line for line in made["ttgir"].splitlines() if "scf.while" in line)
    assert carried.split(" : ")[0].count(" = ") == 4

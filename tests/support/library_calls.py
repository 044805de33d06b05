"""Repeat calls of operators by the library alone: `python library_calls.py LIBRARY CALLS`, without the package dmattn_ops.

CALLS is a file of [(operator, arguments, expected, exact)]: what it returned, or words of the text of its error. Prints a line
for each call that ends in another way, and how many were made.
"""

import ctypes
import sys

import torch


def differs(got, want, exact):
    """Return whether a tensor is not the one that is wanted. NaN equals NaN."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return True
    if exact or not got.is_floating_point():
        return not torch.equal(got.nan_to_num(nan=0.5), want.nan_to_num(nan=0.5))
    budget = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[got.dtype]
    return not torch.allclose(got.double(), want.double(), rtol=budget, atol=budget, equal_nan=True)


def specified(name, outputs):
    """Return the outputs of an operator, with 0 for what is unspecified (DESIGN.md).

    That is what stands behind lists, and the bits of tiles that are not partial.
    """
    if name not in ("pack_mask", "list_tiles", "pack_intervals"):
        return outputs
    lists, bits = [part.clone() for part in outputs[:2]], [part.clone() for part in outputs[2:]]
    for made in lists:
        slots = torch.arange(made.shape[-1] - 4)
        made[..., 4:][slots >= (made[..., 1] + made[..., 2]).unsqueeze(-1)] = 0
    for made, words in zip(lists, bits, strict=False):
        rows, columns = words.shape[2] // 128, words.shape[3] // 4
        slots, indices = torch.arange(made.shape[-1] - 4), made[:, :, :rows, 4:]
        partial = torch.zeros((*indices.shape[:3], columns + 1), dtype=torch.bool)
        partial.scatter_(-1, torch.where(slots < made[:, :, :rows, 1:2], indices, columns).long(), True)
        words[~partial[..., :columns].repeat_interleave(128, 2).repeat_interleave(4, 3)] = 0
    return [*lists, *bits]


def main(library, calls):
    """Make the calls."""
    ctypes.CDLL(library).dmattn_define_operators()
    made = torch.load(calls, weights_only=True)
    for number, (name, arguments, expected, exact) in enumerate(made):
        try:
            packet, _, overload = name.partition(".")
            got = getattr(getattr(torch.ops.dmattn, packet), overload or "default")(*arguments)
        except RuntimeError as error:
            got = str(error)
        if isinstance(got, str) or isinstance(expected, str):
            if not isinstance(got, str) or not isinstance(expected, str) or expected not in got:
                print(f"{number} {name}: {got}, expected {expected}")
            continue
        got, expected = ([part] if isinstance(part, torch.Tensor) else part for part in (got, expected))
        got, expected = ([part.cpu() for part in parts] for parts in (got, expected))
        got, expected = specified(name, got), specified(name, expected)
        wrong = [place for place, pair in enumerate(zip(got, expected, strict=True)) if differs(*pair, exact)]
        if wrong:
            print(f"{number} {name}: outputs {wrong} differ")
    print(f"{len(made)} calls")


if __name__ == "__main__":
    assert "dmattn_ops" not in sys.modules
    main(*sys.argv[1:])

"""Make calls of operators with plans, on the CPU: `python planned_calls.py LIBRARY PLANS CALLS`, without the package.

PLANS are files between colons; what is wrong with one is printed. CALLS is a file of
[(operator, [what describes a tensor, or a number])]. Prints a line of JSON for each call: the addresses of
the tensors that it takes and returns, or the text of its error.
"""

import ctypes
import json
import sys

import torch


def tensor(shape, strides, dtype, skew=0):
    """Return a tensor whose address is `skew` elements behind a multiple of 64 bytes."""
    size = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = torch.zeros(max(size, 0) + skew + 64, dtype=getattr(torch, dtype))
    first = -memory.data_ptr() % 64 // memory.itemsize + skew
    return memory.as_strided(shape, strides, first)


def main(library, plans, calls):
    """Make the calls."""
    loaded = ctypes.CDLL(library)
    loaded.dmattn_define_operators()
    loaded.dmattn_serve_plans(b"CPU")
    loaded.dmattn_load_kernels.restype = ctypes.c_char_p
    for path in plans.split(":") if plans else ():
        if said := loaded.dmattn_load_kernels(path.encode()):
            print(json.dumps(said.decode()))
    for name, given in torch.load(calls):
        arguments = [tensor(*one) if isinstance(one, tuple) else one for one in given]
        packet, _, overload = name.partition(".")
        try:
            outputs = getattr(getattr(torch.ops.dmattn, packet), overload or "default")(*arguments)
        except RuntimeError as error:
            print(json.dumps(str(error)))
            continue
        takes = getattr(torch.ops.dmattn, packet).default._schema.arguments
        tensors = [one for one, of in zip(arguments, takes, strict=False) if "Tensor" in str(of.type)]
        print(json.dumps([0 if one is None else one.data_ptr() for one in (*tensors, *outputs)]))


if __name__ == "__main__":
    assert "dmattn_ops" not in sys.modules
    main(*sys.argv[1:])

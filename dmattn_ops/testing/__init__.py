"""Random attention problems checked against a float64 oracle, with the library's error budget.

`python -m dmattn_ops.testing --cases 2000` draws problems over everything that the public functions take; a case that fails is
shrunk and printed as one line that reproduces it. The oracle is written from the definition alone and shares no code with the
kernels (but for the dropout bits, which `reference.philox_keep` states).
"""

from dmattn_ops.testing.check import check, shrink
from dmattn_ops.testing.problem import Problem, draw

__all__ = ["Problem", "check", "draw", "shrink"]
